//! `cleave bench run` and `cleave bench goodput` as a user runs them, against a real server.

use crate::harness::{self, CleaveProcess};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A folder of its own for each test.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{name}-{}", std::process::id()))
}

fn result(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("result.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn serve() -> (CleaveProcess, String) {
    let legs = ["--prefill", "1", "--decode", "1"];
    let mut server =
        CleaveProcess::start(&[&["serve", "--port", "0", "--threads", "2"][..], &legs].concat());
    let url = format!("http://{}", server.address());
    (server, url)
}

/// The arguments of `cleave bench` for this server, with the results in this folder.
fn arguments<'a>(words: &'a str, url: &'a str, out: &'a Path) -> Vec<&'a str> {
    let more = ["--url", url, "--out", out.to_str().unwrap()];
    ["bench"]
        .into_iter()
        .chain(words.split(' '))
        .chain(more)
        .collect()
}

/// Benchmarks the bundled model on one core.
fn bench_engine(more: &[&str]) -> (std::process::ExitStatus, String, String) {
    let engine = ["bench", "engine", "--threads", "1", "--kv-cache", "64MiB"];
    harness::run(&[&engine[..], &["--rounds", "2"], more].concat())
}

#[test]
fn bench_engine_reports_floors_and_skipped_shapes() {
    let shapes = "prefill:64,decode:2x32,decode:1x9999999";
    let (status, stdout, errors) = bench_engine(&["--json", "--shapes", shapes]);
    assert!(status.success(), "{errors}");
    let table: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(table["threads"], 1);
    let rows = table["rows"].as_array().unwrap();
    let shapes: Vec<&Value> = rows.iter().map(|row| &row["shape"]).collect();
    assert_eq!(shapes, ["prefill:64", "decode:2x32"]);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        let (median, best) = (
            number("tokens_per_second_median"),
            number("tokens_per_second_best"),
        );
        assert!(0.0 < median && median <= best, "{row}");
        // Instruction sets without a measured ceiling have no floor.
        if !row["floor_tokens_per_second"].is_null() {
            let (of_median, of_best) = (
                number("fraction_of_floor_median"),
                number("fraction_of_floor_best"),
            );
            assert!(0.0 < of_median && of_median <= of_best, "{row}");
            assert!(number("floor_tokens_per_second") > 0.0, "{row}");
        }
    }
    assert_eq!(table["skipped"][0]["shape"], "decode:1x9999999");
    let why = table["skipped"][0]["why"].as_str().unwrap();
    assert!(why.contains("context"), "{why}");
    let (status, stdout, errors) = bench_engine(&["--shapes", "prefill:64"]);
    assert!(status.success(), "{errors}");
    assert!(stdout.contains("| prefill 64 | "), "{stdout}");
}

#[test]
fn a_bad_shape_on_stdin_does_not_end_bench_engine() {
    let stdout = harness::run_with_input(
        &[
            "bench",
            "engine",
            "--threads",
            "1",
            "--kv-cache",
            "64MiB",
            "--rounds",
            "1",
            "--stdin",
        ],
        "prefil:64\n\ndecode:99999x8\nprefill:32\n",
    );
    let lines: Vec<Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let [about, unknown, empty, large, measured] = &lines[..] else {
        panic!("{stdout}")
    };
    assert_eq!(about["threads"], 1);
    assert_eq!(unknown["shape"], "prefil:64");
    assert!(unknown["why"].as_str().unwrap().contains("decode:8x1024"));
    assert!(empty["why"].is_string());
    assert!(large["why"].is_string());
    assert!(measured["tokens_per_second_best"].as_f64().unwrap() > 0.0);
}

#[test]
fn bench_run_measures_every_request_and_stage() {
    let (_server, url) = serve();
    let out = folder("run");
    let words = "run --rate 20 --limit 12 --timing --slo e2e=100s --slo-headers targets --workload \
        a=1*short-short:input=40,output=8,cv=0,b=1*short-short:input=90,output=8,cv=0,prefix=64";
    let (status, stdout, errors) = harness::run(&arguments(words, &url, &out));
    assert!(status.success(), "{errors}");
    assert!(stdout.contains("attainment 100.0 %"), "{stdout}");
    let result = result(&out);
    let run = &result["runs"][0];
    let all = &run["all"];
    assert_eq!(
        (&all["offered"], &all["done"], &all["met"]),
        (&12.into(), &12.into(), &12.into())
    );
    // The server's counts match the plan: prompts of 40, and of 64 shared and 90 own tokens.
    assert_eq!(
        (&all["inputs_differ"], &all["outputs_differ"]),
        (&0.into(), &0.into())
    );
    assert_eq!(run["classes"]["b"]["input_tokens"]["mean"], 154.0);
    for stage in [
        "router_queue",
        "prefill_wait",
        "prefill",
        "transfer",
        "decode_wait",
        "first_decode",
    ] {
        assert_eq!(all["stages_ms"][stage]["count"], 12, "{stage}: {all}");
    }
    let lines = std::fs::read_to_string(out.join("requests.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), 12);
    assert!(
        std::fs::read_to_string(out.join("report.html"))
            .unwrap()
            .contains("first_decode")
    );
    std::fs::remove_dir_all(out).unwrap();
}

/// The chart's test and scripts rely on the exit status.
#[test]
fn bench_run_fails_if_the_goal_is_missed() {
    let (_server, url) = serve();
    let run = |slo: &str| {
        let load = ["--rate", "20", "--limit", "2", "--workload"];
        let lengths = "short-short:input=8,output=4,cv=0";
        let ask = [lengths, "--prompt", "text", "--goal", "1", "--slo", slo];
        harness::run(&[&["bench", "run", "--url", &url][..], &load, &ask].concat())
    };
    let (status, stdout, errors) = run("e2e=100s");
    assert!(status.success(), "{stdout}{errors}");
    let (status, stdout, errors) = run("e2e=1us");
    assert!(!status.success(), "{stdout}");
    assert!(errors.contains("0 of 2 requests"), "{errors}");
}

#[test]
fn a_sweep_prints_a_line_for_each_rate() {
    let (_server, url) = serve();
    let out = folder("sweep");
    let words = "goodput --rates 20,40 --requests 8 --duration 100ms --repeats 1 --devices 2 \
        --workload short-short:input=40,output=4,cv=0 --slo ttft=100s,tpot=100s";
    let (status, stdout, errors) = harness::run(&arguments(words, &url, &out));
    assert!(status.success(), "{errors}");
    let rows: Vec<&str> = stdout
        .lines()
        .filter(|line| line.contains("kept"))
        .collect();
    assert_eq!(rows.len(), 2, "{stdout}");
    let result = result(&out);
    let found = &result["goodput"];
    assert_eq!(
        (&found["rate_max"], &found["devices"]),
        (&40.0.into(), &2.into())
    );
    let (all, one) = (&found["goodput_rps"], &found["goodput_rps_per_device"]);
    assert!((all.as_f64().unwrap() - 2.0 * one.as_f64().unwrap()).abs() < 1e-9);
    std::fs::remove_dir_all(out).unwrap();
}

#[test]
fn a_signal_keeps_the_measurements_so_far() {
    let (_server, url) = serve();
    let out = folder("signal");
    let words = "run --rate 50 --duration 600s --workload short-short:input=20,output=2,cv=0";
    let mut bench = CleaveProcess::start(&arguments(words, &url, &out));
    // The server's own counters show that some requests were served.
    let client = harness::HttpClient::new(url.trim_start_matches("http://"));
    harness::wait_for("requests", || {
        let (_, text) = client.get("/metrics");
        let ended = harness::sum_metric(&text, "cleave_flights_ended_total", &[]);
        (ended > 10.0).then_some(())
    });
    bench.signal("INT");
    assert!(bench.wait().success(), "{}", bench.logs());
    let result = result(&out);
    assert_eq!(result["interrupted"], true);
    assert!(result["runs"][0]["all"]["done"].as_u64().unwrap() > 0);
    std::fs::remove_dir_all(out).unwrap();
}

#[test]
fn bench_rejects_bad_arguments_at_once() {
    for (words, expected) in [
        ("run --workload short-long", "rate"),
        ("run --workload short-lang --rate 1 --limit 1", "short-long"),
        ("run --trace /no/such/file --rate 1", "/no/such/file"),
        (
            "run --workload short-long --rate 1 --limit 1 --slo ttft=5",
            "5ms",
        ),
        ("goodput --workload short-long", "--slo"),
        (
            "run --workload short-long --rate 1 --limit 1",
            "127.0.0.1:1",
        ),
    ] {
        let server = ["--url", "http://127.0.0.1:1"];
        let words: Vec<&str> = ["bench"]
            .into_iter()
            .chain(words.split(' '))
            .chain(server)
            .collect();
        let (status, _, errors) = harness::run(&words);
        assert!(
            !status.success() && errors.contains(expected),
            "{words:?}: {errors}"
        );
    }
}
