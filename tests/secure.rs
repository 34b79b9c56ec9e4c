//! API keys, certificates and shutdown, in real processes.

use crate::harness::authority::TestAuthority;
use crate::harness::{CleaveProcess, HttpClient, cleave, run, serve, wait_for};
use serde_json::json;
use std::io::Write;
use std::process::Stdio;

#[test]
fn shutdown_delay_serves_requests_until_it_ends() {
    let mut process = serve(&["--shutdown-delay", "600"]);
    let client = HttpClient::new(&process.address());
    process.signal("TERM");
    wait_for("not ready", || {
        (client.get("/ready").0 == 503).then_some(())
    });
    // Everything else works as before.
    assert_eq!(client.get("/health").0, 200);
    let text = client.complete(&json!({"prompt": "A vector is", "max_tokens": 4}));
    assert!(!text.is_empty());
    // A second signal ends the process at once.
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(130));
    // After the delay the process drains and ends.
    let mut process = serve(&["--shutdown-delay", "0.2"]);
    process.address();
    process.signal("TERM");
    assert!(process.wait().success());
    let logs = process.logs();
    let (left, drained) = (logs.find("delay_seconds=0.2"), logs.find("draining"));
    assert!(left.is_some() && left < drained, "{logs}");
}

#[test]
fn bad_certificates_are_refused_before_a_port_is_bound() {
    let folder = tempfile::tempdir().expect("a folder");
    TestAuthority::new().sign(folder.path(), "localhost");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (certificate, key, missing) = (path("tls.crt"), path("tls.key"), path("none"));
    for (flags, expected) in [
        (
            vec!["--ssl-certfile", &certificate, "--ssl-keyfile", &missing],
            missing.as_str(),
        ),
        (
            vec!["--ssl-certfile", &key, "--ssl-keyfile", &key],
            "is no certificate in PEM",
        ),
        (vec!["--ssl-certfile", &certificate], "--ssl-keyfile"),
        (
            vec!["--peer-tls", folder.path().to_str().expect("text")],
            "not for the DNS name",
        ),
    ] {
        let words = [&["router", "--listen", "127.0.0.1:0"], &flags[..]].concat();
        let (status, out, err) = run(&words);
        assert!(
            !status.success() && out.is_empty(),
            "no address was promised"
        );
        assert!(err.contains(expected), "{err}");
    }
}

/// Routers whose clients use TLS are asked by routers of another fleet, without TLS, with the admin
/// port, and of their own fleet.
#[test]
fn an_unreachable_peer_router_is_logged_with_its_cause() {
    let folders = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
    let [front, front_peers, others] = &folders;
    TestAuthority::new().sign(front.path(), "llm.example");
    for folder in [front_peers, others] {
        TestAuthority::new().sign(folder.path(), "cleave-peer");
    }
    let path = |name: &str| front.path().join(name).display().to_string();
    let peers = |folder: &tempfile::TempDir| folder.path().display().to_string();
    let (certificate, key) = (path("tls.crt"), path("tls.key"));
    let (front_peers, others) = (peers(front_peers), peers(others));
    let router = ["router", "--listen", "127.0.0.1:0"];
    let tls = ["--ssl-certfile", &certificate, "--ssl-keyfile", &key];
    let front_flags = ["--peer-tls", &front_peers, "--admin-listen", "127.0.0.1:0"];
    let mut front_router = CleaveProcess::start(&[&router[..], &tls, &front_flags].concat());
    let (at, admin) = (front_router.tls_address(), front_router.admin_address());
    let (_, port) = admin.rsplit_once(':').expect("a port");
    let picks = [
        "--ext-proc-listen",
        "127.0.0.1:0",
        "--picker-endpoints",
        &at,
    ];
    let fellow = ["--fellow-routers", &at];
    let stranger = ["--peer-tls", &others];
    let unasked = "the endpoint picker cannot poll this router";
    let uncounted = "cannot poll this router of --fellow-routers";
    let not_ready = "the endpoint picker finds this router not ready";
    for (more, expected) in [
        (
            [&stranger[..], &fellow].concat(),
            vec![unasked, uncounted, "invalid peer certificate"],
        ),
        (
            fellow.to_vec(),
            vec![unasked, uncounted, "This port speaks HTTPS."],
        ),
        (vec!["--picker-admin-port", port], vec![not_ready]),
        (vec!["--peer-tls", &front_peers], vec![not_ready]),
    ] {
        let process = CleaveProcess::start(&[&router[..], &picks, &more].concat());
        wait_for(expected[0], || {
            let logs = process.logs();
            expected.iter().all(|one| logs.contains(one)).then_some(())
        });
        let logs = process.logs();
        assert!(
            logs.contains(not_ready) == (expected[0] == not_ready),
            "{logs}"
        );
    }
    // A router that could never ask itself refuses to start.
    let (status, _, error) = run(&[&router[..], &tls, &picks].concat());
    assert!(
        !status.success() && error.contains("--picker-admin-port"),
        "{error}"
    );
}

/// Our own clients behind a TLS front: a client that knows the authority is answered, and no client
/// accepts a certificate of an unknown authority or another name.
#[test]
fn our_clients_verify_the_servers_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    TestAuthority::new().sign(folder.path(), "localhost");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (certificate, key, authority) = (path("tls.crt"), path("tls.key"), path("ca.crt"));
    let policy = path("policy.yaml");
    let text =
        "classes: [{name: all}]\nscaling: {devices_max: 2, pools: {both: {min: 1, max: 1}}}\n";
    std::fs::write(&policy, text).expect("written");
    let pair = ["--ssl-certfile", &certificate, "--ssl-keyfile", &key];
    let mut server = serve(&[&pair[..], &["--policy", &policy]].concat());
    let address = server.tls_address();
    let port = address.rsplit_once(':').expect("a port").1;
    let (named, other) = (
        format!("https://localhost:{port}"),
        format!("https://127.0.0.1:{port}"),
    );
    let load = [
        "--workload",
        "short-short:input=8,output=4",
        "--rate",
        "20",
        "--limit",
        "4",
    ];
    let top = |url: &str, more: &[&str]| {
        run(&[&["top", "--once", "--json", "--url", url], more].concat())
    };
    let bench = |url: &str, more: &[&str]| {
        run(&[
            &[
                "bench", "run", "--url", url, "--goal", "1", "--slo", "e2e=100s",
            ],
            &load[..],
            more,
        ]
        .concat())
    };

    let trusting = ["--cacert", authority.as_str()];
    let stranger = path("other.crt");
    std::fs::write(&stranger, TestAuthority::new().pem()).expect("written");
    let wrong_authority = ["--cacert", stranger.as_str()];
    let (status, output, error) = top(&named, &trusting);
    assert!(
        status.success() && output.contains("\"pools\""),
        "{output}{error}"
    );
    let (status, output, error) = bench(&named, &trusting);
    assert!(status.success(), "{output}{error}");
    for (url, more, expected) in [
        (&named, &wrong_authority[..], "invalid peer certificate"),
        (&other, &trusting[..], "not valid for name"),
        (
            &named,
            &["--cacert", key.as_str()][..],
            "is no certificate in PEM",
        ),
    ] {
        for (status, _, error) in [top(url, more), bench(url, more)] {
            assert!(
                !status.success() && error.contains(expected),
                "{expected}: {error}"
            );
        }
    }

    // The autoscaler logs its workers, or why it cannot follow the router.
    for (more, expected) in [
        (&trusting[..], "wanted"),
        (&wrong_authority[..], "invalid peer certificate"),
    ] {
        let follow = ["autoscale", "--local", "--router", &named];
        let mut scaler =
            CleaveProcess::start(&[&follow[..], more, &["--", "--no-such-flag"]].concat());
        let is_logged = |logs: &str| match expected {
            "wanted" => logs.contains("started") || logs.contains("ended"),
            _ => logs.contains(expected),
        };
        wait_for(expected, || is_logged(&scaler.logs()).then_some(()));
        scaler.signal("INT");
        assert!(scaler.wait().success(), "{}", scaler.logs());
    }
}

#[test]
fn only_a_generated_key_is_accepted() {
    let (status, made, _) = run(&["key"]);
    assert!(status.success());
    let line = |name: &str| {
        let mut lines = made.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().expect("a line").to_owned()
    };
    let (key, digest) = (line("key: "), line("api_key_sha256: "));
    let mut digests = cleave(&["key", "--digest"]);
    digests.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut digests = digests.spawn().expect("it starts");
    let mut input = digests.stdin.take().expect("piped");
    writeln!(input, "{key}").expect("it reads");
    drop(input);
    let again = digests.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&again.stdout).trim(), digest);
    assert_ne!(run(&["key"]).1, made, "another one each time");

    let folder = tempfile::tempdir().expect("a folder");
    let policy = folder.path().join("policy.yaml");
    let text = format!(
        "classes:\n- name: a\ntrust: {{require_key: true}}\ntenants:\n- name: t\n  requests_per_minute: 1\n  \
         api_key_sha256: [{digest}]\n"
    );
    std::fs::write(&policy, text).expect("written");
    let mut process = serve(&["--policy", policy.to_str().expect("text")]);
    let client = HttpClient::new(&process.address());
    let body = json!({"prompt": "a", "max_tokens": 2});
    let path = "/v1/completions";
    let (status, answer) = client.post(path, &body);
    assert_eq!(status, 401);
    assert_eq!(answer["error"]["code"], "invalid_api_key");
    let bearer = format!("Bearer {key}");
    let headers = [("authorization", bearer.as_str())];
    let statuses = [200, 429].map(|_| client.post_with(path, &body, &headers).0);
    assert_eq!(statuses, [200, 429]);
}
