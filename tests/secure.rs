//! Keys, certificates and leaving, in real processes.

#[path = "harness/authority.rs"]
mod authority;
mod harness;

use authority::Authority;
use harness::{Client, Process, cleave, run, wait_for};
use serde_json::json;
use std::io::Write;
use std::process::Stdio;

const SERVE: [&str; 7] = [
    "serve",
    "--port",
    "0",
    "--threads",
    "2",
    "--kv-cache",
    "64MiB",
];

fn serve(more: &[&str]) -> Process {
    Process::start(&[&SERVE[..], more].concat())
}

#[test]
fn a_balancer_sends_requests_until_it_has_noticed() {
    let mut process = serve(&["--shutdown-delay", "600"]);
    let client = Client::new(&process.address());
    process.signal("TERM");
    wait_for("not ready", || {
        (client.get("/ready").0 == 503).then_some(())
    });
    // Everything else is as before.
    assert_eq!(client.get("/health").0, 200);
    let text = client.complete(&json!({"prompt": "A vector is", "max_tokens": 4}));
    assert!(!text.is_empty());
    // Whoever does not want to wait says so.
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(130));
    // And after the delay it leaves.
    let mut process = serve(&["--shutdown-delay", "0.2"]);
    process.address();
    process.signal("TERM");
    assert!(process.wait().success());
    let logs = process.logs();
    let (left, drained) = (logs.find("serving on for 0.2 s"), logs.find("draining"));
    assert!(left.is_some() && left < drained, "{logs}");
}

#[test]
fn certificates_of_no_use_are_told_before_a_port_is_bound() {
    let folder = tempfile::tempdir().expect("a folder");
    Authority::new().sign(folder.path(), "localhost");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (certificate, key, missing) = (path("tls.crt"), path("tls.key"), path("none"));
    for (flags, says) in [
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
        assert!(err.contains(says), "{err}");
    }
}

/// Routers whose clients speak TLS, asked by one that is of another fleet, that speaks in clear, that was told the
/// port of operators, and that is of theirs.
#[test]
fn a_router_that_cannot_be_asked_was_away_without_a_reason() {
    let folders = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
    let [front, theirs, others] = &folders;
    Authority::new().sign(front.path(), "llm.example");
    for folder in [theirs, others] {
        Authority::new().sign(folder.path(), "cleave-peer");
    }
    let path = |name: &str| front.path().join(name).display().to_string();
    let peers = |folder: &tempfile::TempDir| folder.path().display().to_string();
    let (certificate, key) = (path("tls.crt"), path("tls.key"));
    let (theirs, others) = (peers(theirs), peers(others));
    let router = ["router", "--listen", "127.0.0.1:0"];
    let tls = ["--ssl-certfile", &certificate, "--ssl-keyfile", &key];
    let asked = ["--peer-tls", &theirs, "--admin-listen", "127.0.0.1:0"];
    let mut asked = Process::start(&[&router[..], &tls, &asked].concat());
    let (at, admin) = (asked.tls_address(), asked.admin_address());
    let (_, port) = admin.rsplit_once(':').expect("a port");
    let picks = [
        "--ext-proc-listen",
        "127.0.0.1:0",
        "--picker-endpoints",
        &at,
    ];
    let fellow = ["--fellow-routers", &at];
    let stranger = ["--peer-tls", &others];
    let unasked = "the endpoint picker cannot ask this router";
    let uncounted = "this --fellow-routers cannot be asked";
    let not_ready = "the endpoint picker finds this router not ready";
    for (more, says) in [
        (
            [&stranger[..], &fellow].concat(),
            vec![unasked, uncounted, "invalid peer certificate"],
        ),
        (
            fellow.to_vec(),
            vec![unasked, uncounted, "This port speaks HTTPS."],
        ),
        (vec!["--picker-admin-port", port], vec![not_ready]),
        (vec!["--peer-tls", &theirs], vec![not_ready]),
    ] {
        let process = Process::start(&[&router[..], &picks, &more].concat());
        wait_for(says[0], || {
            let logs = process.logs();
            says.iter().all(|one| logs.contains(one)).then_some(())
        });
        let logs = process.logs();
        assert!(logs.contains(not_ready) == (says[0] == not_ready), "{logs}");
    }
    // One that could never ask itself says so at once.
    let (status, _, error) = run(&[&router[..], &tls, &picks].concat());
    assert!(
        !status.success() && error.contains("--picker-admin-port"),
        "{error}"
    );
}

/// Each of our own clients through a front with a certificate: whoever knows its authority is answered, and nobody goes on
/// with a server for which nobody vouches, or that has another name.
#[test]
fn our_own_clients_could_not_look_through_tls_or_trusted_anybody() {
    let folder = tempfile::tempdir().expect("a folder");
    Authority::new().sign(folder.path(), "localhost");
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
    std::fs::write(&stranger, Authority::new().pem()).expect("written");
    let astray = ["--cacert", stranger.as_str()];
    let (status, said, error) = top(&named, &trusting);
    assert!(
        status.success() && said.contains("\"pools\""),
        "{said}{error}"
    );
    let (status, said, error) = bench(&named, &trusting);
    assert!(status.success(), "{said}{error}");
    for (url, more, says) in [
        (&named, &astray[..], "invalid peer certificate"),
        (&other, &trusting[..], "not valid for name"),
        (
            &named,
            &["--cacert", key.as_str()][..],
            "is no certificate in PEM",
        ),
    ] {
        for (status, _, error) in [top(url, more), bench(url, more)] {
            assert!(!status.success() && error.contains(says), "{says}: {error}");
        }
    }

    // It says what it follows, or why it cannot.
    for (more, says) in [
        (&trusting[..], "wanted"),
        (&astray[..], "invalid peer certificate"),
    ] {
        let follow = ["autoscale", "--local", "--router", &named];
        let mut scaler = Process::start(&[&follow[..], more, &["--", "--no-such-flag"]].concat());
        let heard = |logs: &str| match says {
            "wanted" => logs.contains("started") || logs.contains("ended"),
            _ => logs.contains(says),
        };
        wait_for(says, || heard(&scaler.logs()).then_some(()));
        scaler.signal("INT");
        assert!(scaler.wait().success(), "{}", scaler.logs());
    }
}

#[test]
fn a_key_that_was_made_opens_the_door_and_no_other() {
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
    let client = Client::new(&process.address());
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
