//! Flags from the environment and from files, and keys of clients, in real processes.

use crate::harness::{HttpClient, cleave, run, serve};
use serde_json::{Value, json};
use std::fs;
use std::net::TcpListener;

/// The output of `cleave config print` with these variables and flags.
fn printed(variables: &[(&str, &str)], flags: &[&str]) -> String {
    let mut command = cleave(&[&["config", "print"], flags].concat());
    let output = command.envs(variables.iter().copied()).output();
    let output = output.expect("cleave starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{flags:?}: {error}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn each_origin_counts_before_those_below_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cleave.yaml");
    fs::write(&path, "port: 1\nmax-num-seqs: 1\nmax-queue: 1\n").expect("written");
    let path = path.to_str().expect("text");
    let variables = [
        ("CLEAVE_CONFIG", path),
        ("CLEAVE_PORT", "2"),
        ("CLEAVE_MAX_NUM_SEQS", "2"),
        ("CLEAVE_NO_PREFIX_CACHE", "1"),
        ("CLEAVE_ADMIN_KEY", "never-to-be-shown"),
    ];
    let text = printed(&variables, &["--port", "3"]);
    for line in [
        "port: 3  # command line",
        "max-num-seqs: 2  # environment",
        "no-prefix-cache: true  # environment",
        "max-queue: 1  # file",
        "host: \"127.0.0.1\"  # default",
        "# admin-key: hidden  # environment",
    ] {
        assert!(text.lines().any(|known| known == line), "{line}\n{text}");
    }
    assert!(!text.contains("never-to-be-shown"));
    let of_kubernetes = [("CLEAVE_PORT", "tcp://10.96.0.1:8000")];
    assert!(printed(&of_kubernetes, &[]).contains("port: 8000  # default"));
    // Only an address is Kubernetes': a wrong port is an error.
    let mut command = cleave(&["config", "print"]);
    let output = command.env("CLEAVE_PORT", "http://a").output();
    assert!(!output.expect("cleave starts").status.success());
}

#[test]
fn the_error_of_a_wrong_variable_names_it() {
    let error = |words: &[&str], variable: (&str, &str)| {
        let mut command = cleave(words);
        let output = command.envs([variable]).output().expect("cleave starts");
        assert!(!output.status.success(), "{words:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let wrong = ("CLEAVE_MAX_NUM_SEQS", "x");
    let text = error(&["serve", "--port", "0"], wrong);
    let named = "--max-num-seqs is set by the environment variable CLEAVE_MAX_NUM_SEQS";
    assert!(text.contains(named), "{text}");
    // A wrong word of the command line is not the variable's fault.
    let text = error(
        &["serve", "--max-num-seqs", "y"],
        ("CLEAVE_MAX_NUM_SEQS", "1"),
    );
    assert!(text.contains("invalid value 'y'"), "{text}");
    assert!(!text.contains("CLEAVE_MAX_NUM_SEQS"), "{text}");
}

#[test]
fn pages_of_allowed_origins_call_the_server() {
    let flags = [
        "--engine",
        "mock",
        "--allowed-origins",
        "https://app.example",
    ];
    let mut process = serve(&flags);
    let client = HttpClient::new(&process.address());
    let body = json!({"prompt": "a", "max_tokens": 1});
    let allowed = |origin: &str| {
        let headers = [("origin", origin)];
        let (status, headers, _) = client.post_with("/v1/completions", &body, &headers);
        assert_eq!(status, 200);
        let named = headers.get("access-control-allow-origin");
        named.map(|value| value.to_str().expect("text").to_owned())
    };
    let page = "https://app.example";
    assert_eq!(allowed(page).as_deref(), Some(page));
    assert_eq!(allowed("https://other.example"), None);
}

#[test]
fn variables_of_other_programs_count_after_ours() {
    let other = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4317");
    let ours = ("CLEAVE_OTLP_ENDPOINT", "http://ours:4317");
    assert!(printed(&[other], &[]).contains("otlp-endpoint: \"http://other:4317\""));
    assert!(printed(&[other, ours], &[]).contains("otlp-endpoint: \"http://ours:4317\""));
}

#[test]
fn a_port_in_use_ends_the_start_with_the_remedy() {
    let other = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = other.local_addr().expect("an address").port().to_string();
    let address = format!("127.0.0.1:{port}");
    let worker = ["worker", "--leg", "both", "--router", "127.0.0.1:1"];
    for (words, named) in [
        (&["serve", "--port", &port][..], "--host or --port"),
        (
            &["serve", "--port", "0", "--admin-listen", &address],
            "--admin-listen",
        ),
        (&["router", "--listen", &address], "--listen"),
        (
            &[&worker[..], &["--data-listen", &address]].concat(),
            "--data-listen",
        ),
        (
            &[&worker[..], &["--metrics-listen", &address]].concat(),
            "--metrics-listen",
        ),
    ] {
        let (status, _, error) = run(words);
        assert!(!status.success(), "{words:?}");
        assert!(
            error.contains(&format!("cannot listen on {address}")),
            "{error}"
        );
        let remedy = error
            .trim_end()
            .rsplit("choose another address with ")
            .next();
        assert_eq!(remedy, Some(named), "{words:?}: {error}");
        let (_, help, _) = run(&[words[0], "--help"]);
        for flag in named.split(' ').filter(|word| word.starts_with("--")) {
            assert!(help.contains(flag), "{words:?} has no {flag}");
        }
    }
}

#[test]
fn a_wrong_file_or_context_ends_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cleave.yaml");
    fs::write(&path, "prot: 8000\n").expect("written");
    let path = path.to_str().expect("text");
    for words in [
        &["serve", "--config", path][..],
        &["config", "check", path],
        &["config", "print", "--config", path],
    ] {
        let (status, _, error) = run(words);
        assert!(!status.success(), "{words:?}");
        let place = format!("{path}:1:1: `cleave serve` has no flag `prot`; is `port` meant?");
        assert!(error.contains(&place), "{words:?}: {error}");
    }
    for words in [
        &["--log-format", "json", "serve", "--config", path][..],
        &["serve", "--log-format=json", "--model", "/no/such/folder"],
    ] {
        let (status, _, error) = run(words);
        assert!(!status.success(), "{words:?}");
        let lines = error.lines().map(serde_json::from_str);
        let lines: Vec<Value> = lines.collect::<Result<_, _>>().expect("each line is JSON");
        let last = lines.last().expect("a line");
        assert_eq!(last["level"], "ERROR", "{last}");
        let reason = last["error"].as_str().expect("a reason");
        let is_named = reason.contains("`prot`") || reason.contains("no such folder");
        assert!(is_named, "{reason}");
    }
    let (status, _, error) = run(&["serve", "--port", "0", "--max-model-len", "99999999"]);
    assert!(!status.success());
    assert!(
        error.contains("--max-model-len 99999999: the model has a context of"),
        "{error}"
    );
}

#[test]
fn check_places_a_conflict_as_serve_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cleave.yaml");
    let text = "api-key: [k]\napi-key-file: keys\nport: 1\npolicy: policy.yaml\n";
    fs::write(&path, text).expect("written");
    let path = path.to_str().expect("text");
    let origins = |words: &[&str]| -> Vec<String> {
        let (status, _, error) = run(words);
        assert!(!status.success(), "{words:?}");
        let lines = error.lines().filter(|line| line.contains(" is set at "));
        lines.map(str::to_owned).collect()
    };
    let checked = origins(&["config", "check", path]);
    for (flag, line) in [("api-key", 1), ("policy", 4)] {
        let named = format!("  --{flag} is set at {path}:{line}:");
        let found = checked.iter().any(|line| line.starts_with(&named));
        assert!(found, "{named}\n{checked:#?}");
    }
    assert_eq!(checked, origins(&["serve", "--config", path]));
}

#[test]
fn print_takes_the_command_by_a_flag() {
    let (status, _, error) = run(&["config", "print", "worker"]);
    assert!(!status.success());
    assert!(
        error.contains("cleave config print --for worker"),
        "{error}"
    );
}

#[test]
fn api_keys_guard_a_server_without_a_policy() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys");
    fs::write(&keys, "from-the-file\n").expect("written");
    let keys = keys.to_str().expect("text");
    let flags = [
        "--engine",
        "mock",
        "--api-key",
        "one",
        "--api-key-file",
        keys,
    ];
    let mut server = serve(&flags);
    let client = HttpClient::new(&server.address());
    let body = json!({"prompt": "a", "max_tokens": 2});
    let status = |headers: &[(&str, &str)]| client.post_with("/v1/completions", &body, headers).0;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&[("authorization", "Bearer two")]), 401);
    assert_eq!(status(&[("authorization", "Bearer one")]), 200);
    assert_eq!(status(&[("x-api-key", "from-the-file")]), 200);
}
