//! SLO policies in real processes: the policy's file, refusals, and clients that retry.

use crate::harness::{self, CleaveProcess, HttpClient, cleave, root, wait_for};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A fresh folder for one test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// One process with a prefill and a decode worker, on the bundled checkpoint.
fn serve(policy: &Path) -> (CleaveProcess, HttpClient) {
    let policy = policy.to_str().expect("a path is text");
    let legs = ["--prefill", "1", "--decode", "1"];
    let mut process = harness::serve(&[&legs[..], &["--policy", policy]].concat());
    let client = HttpClient::new(&process.address());
    (process, client)
}

const PATH: &str = "/v1/completions";

#[test]
fn all_policy_mistakes_are_reported_before_a_port_is_bound() {
    let path = folder("policy-mistakes").join("policy.yaml");
    std::fs::write(&path, "classes:\n- name: a\n  ttft: 0ms\n  colour: red\n").expect("written");
    let path = path.to_str().expect("a path is text");
    for command in ["serve", "router"] {
        let output = cleave(&[command, "--policy", path])
            .output()
            .expect("it starts");
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        for place in [":3:9: `ttft` is 0ms", ":4:3: a class has no key `colour`"] {
            assert!(error.contains(&format!("{path}{place}")), "{error}");
        }
        assert!(output.stdout.is_empty(), "no address was promised");
    }
}

#[test]
fn check_validates_a_policy_and_its_flags() {
    let example = root().join("assets/policy.yaml");
    let example = example.to_str().expect("a path is text");
    let check = |words: &[&str]| {
        let output = cleave(&["check", example]).args(words).output();
        let output = output.expect("it starts");
        let printed = [output.stdout, output.stderr].concat();
        let printed = String::from_utf8_lossy(&printed).into_owned();
        (output.status.code(), printed)
    };
    let (status, printed) = check(&[]);
    assert_eq!(status, Some(0), "{printed}");
    assert!(
        printed.contains("no mistakes (classes: 3, rules: 3"),
        "{printed}"
    );
    for (words, missing) in [
        (["--devices", "2"], "give --workload SPEC or --trace FILE"),
        (
            ["--workload", "short-short"],
            "give --fleet SPEC or --devices N",
        ),
        (["--rate", "4"], "give --fleet SPEC or --devices N"),
        (["--rate", "nan"], "expected a number from"),
        (["--rate", "0"], "expected a number from"),
    ] {
        let (status, printed) = check(&words);
        assert!(matches!(status, Some(1 | 2)), "{printed}");
        assert!(printed.contains(missing), "{printed}");
    }
    let path = folder("policy-check").join("policy.yaml");
    std::fs::write(&path, "classes: []\n").expect("written");
    let path = path.to_str().expect("a path is text");
    let output = cleave(&["check", path]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
}

/// `sim scale` tries scaling beforehand: every row serves the same requests, and each wanted number
/// lasts until the next one.
#[test]
fn sim_scale_compares_fleets_on_the_same_arrivals() {
    let policy = root().join("assets/policy.yaml");
    let policy = policy.to_str().expect("a path is text");
    let load = ["--workload", "long-long", "--rate", "8", "--duration", "4m"];
    let curve = ["--curve", "0s=0.1,1m=0.1,2m=1", "--start", "20s"];
    let fleet = [
        "--policy",
        policy,
        "--profile",
        "a100-llama-3-8b",
        "--first",
        "prefill=1,decode=1",
    ];
    let mut command = vec!["sim", "scale", "--json", "--compare"];
    command.extend(load.into_iter().chain(curve).chain(fleet));
    let (status, out, err) = harness::run(&command);
    assert!(status.success(), "{err}");
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    let names: Vec<&str> = rows
        .iter()
        .filter_map(|row| row["fleet"].as_str())
        .collect();
    let fixed = ["as many as at the most", "as many as on average"];
    assert_eq!(names, ["by the promises", fixed[0], fixed[1], "thresholds"]);
    let arrivals = |row: &Value| row["score"]["all"]["arrivals"].as_u64();
    assert!(arrivals(&rows[0]).is_some_and(|count| count > 300), "{out}");
    assert!(rows.iter().all(|row| arrivals(row) == arrivals(&rows[0])));

    let own_row = &rows[0];
    let targets = own_row["wanted"].as_array().expect("changes");
    assert_eq!(
        targets[0]["workers"],
        json!({"prefill": 1, "decode": 1, "both": 0})
    );
    assert!(
        targets.len() > 1,
        "ten times the load changed nothing: {own_row}"
    );
    assert!(own_row["devices_most"].as_u64() <= Some(8), "{own_row}");
    // A fleet that always has the largest number of devices uses the most device time.
    let hours = |row: &Value| row["device_hours"].as_f64().expect("a number");
    assert!(hours(own_row) < hours(&rows[1]), "{out}");
    assert!(
        rows[1]["wanted"]
            .as_array()
            .is_some_and(|all| all.len() == 1)
    );

    let plain = folder("scale").join("policy.yaml");
    std::fs::write(&plain, "classes: [{name: chat}]\n").expect("written");
    let plain = plain.to_str().expect("a path is text");
    let mut command = vec!["sim", "scale", "--policy", plain];
    command.extend(load);
    let (status, _, err) = harness::run(&command);
    assert!(
        !status.success() && err.contains("no part `scaling`"),
        "{err}"
    );
}

#[test]
fn the_example_policy_serves() {
    let (_process, client) = serve(&root().join("assets/policy.yaml"));
    let body = json!({"prompt": "A policy", "max_tokens": 4, "temperature": 0});
    assert!(!client.complete(&body).is_empty());
    let good = client.metric("cleave_slo_requests_total", &["standard", "good"]);
    let ended = client.metric("cleave_slo_requests_total", &["standard"]);
    assert_eq!((good, ended), (1.0, 1.0));
}

// Invariant: I35.
#[test]
fn a_policy_reloaded_by_a_signal_cuts_no_stream() {
    let path = folder("policy-reload").join("policy.yaml");
    std::fs::write(&path, "classes:\n- name: old\n").expect("written");
    let (process, client) = serve(&path);
    let body = json!({"prompt": "A stream", "max_tokens": 300, "temperature": 0, "ignore_eos": true, "stream": true});
    let mut events = client.stream(PATH, &body);
    events.next().expect("a first event");
    std::fs::write(&path, "classes:\n- name: new\n").expect("written");
    process.signal("HUP");
    wait_for("reload", || {
        (client.metric("cleave_policy_reloads_total", &["changed"]) == 1.0).then_some(())
    });
    let ask = json!({"prompt": "A", "max_tokens": 1});
    let headers = |class| [("x-slo-class", class)];
    assert_eq!(client.post_with(PATH, &ask, &headers("new")).0, 200);
    let (status, _, answer) = client.post_with(PATH, &ask, &headers("old"));
    assert_eq!(status, 400, "{answer}");
    std::fs::write(&path, "classes:\n- nme: broken\n").expect("written");
    process.signal("HUP");
    wait_for("rejection", || {
        (client.metric("cleave_policy_reloads_total", &["rejected"]) >= 1.0).then_some(())
    });
    wait_for("line in the log", || {
        process.logs().contains("has no key `nme`").then_some(())
    });
    assert_eq!(
        client.post_with(PATH, &ask, &headers("new")).0,
        200,
        "the one before stays"
    );
    assert_eq!(events.last().as_deref(), Some("[DONE]"));
}

#[test]
fn timing_stages_sum_to_the_requests_time() {
    let (_process, client) = serve(&root().join("assets/policy.yaml"));
    let body = json!({"prompt": "Where did it go", "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let (status, headers, answer) = client.post_with(PATH, &body, &[("x-cleave-timing", "1")]);
    assert_eq!(status, 200, "{answer}");
    let header = headers["x-cleave-timing"]
        .to_str()
        .expect("text")
        .to_owned();
    let timing = &answer["timing"];
    let stages: f64 = header
        .split(", ")
        .map(|part| part.split_once(";dur=").expect("a duration").1)
        .map(|number| number.parse::<f64>().expect("a number"))
        .sum();
    let whole = timing["e2e_ms"].as_f64().expect("a number");
    assert!((stages - whole).abs() < 0.1, "{header} is not {whole}");
    assert!(timing["ttft_ms"].as_f64() > Some(0.0), "{timing}");
    assert!(timing["tpot_ms"].as_f64() > Some(0.0), "{timing}");
}

#[test]
fn an_unreachable_slo_is_refused_and_retried_by_openai() {
    let (mut process, client) = serve(&root().join("assets/policy.yaml"));
    let body = json!({"prompt": "Never in time", "max_tokens": 4});
    let impossible = [("x-slo-ttft-ms", "0.001")];
    let (status, headers, answer) = client.post_with(PATH, &body, &impossible);
    assert_eq!(status, 429, "{answer}");
    assert_eq!(answer["error"]["code"], "slo_ttft_unreachable");
    assert_eq!(headers["x-cleave-refused-reason"], "slo_ttft_unreachable");
    let seconds: u64 = headers["retry-after"]
        .to_str()
        .expect("text")
        .parse()
        .expect("whole");
    let millis: u64 = headers["retry-after-ms"]
        .to_str()
        .expect("text")
        .parse()
        .expect("whole");
    assert_eq!(seconds, millis.div_ceil(1000).max(1));
    let refused = client.metric(
        "cleave_slo_requests_total",
        &["refused", "slo_ttft_unreachable"],
    );
    assert_eq!(refused, 1.0);
    // A request with possible targets is served meanwhile.
    let (status, _, answer): (u16, _, Value) = client.post_with(PATH, &body, &[]);
    assert_eq!(status, 200, "{answer}");

    let url = format!("http://{}", process.address());
    harness::openai::run_client("retry.py", &url);
}
