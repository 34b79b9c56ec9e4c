//! Real `cleave` processes for the whole-system tests.
//!
//! Owns: starting, waiting for and ending processes, and a small HTTP client.
//! Never: waits for a time; it waits for a line, an answer or an exit, each with a limit.

pub(crate) mod authority;
mod fleet_permit;
pub(crate) mod keda;
pub(crate) mod openai;

pub(crate) use crate::root::root;
use fleet_permit::FleetPermit;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Far longer than any step takes: a test that reaches it has found a hang.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// The folders of `testdata/` that hold a checkpoint with goldens.
pub(crate) fn golden_folders() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("testdata")).expect("testdata is there");
    let mut folders: Vec<PathBuf> = entries
        .map(|entry| entry.expect("readable folder").path())
        .filter(|path| path.join("goldens.json").is_file())
        .collect();
    folders.sort();
    assert!(folders.len() >= 6, "goldens of every architecture");
    folders
}

/// Whether a checkpoint has experts, as its config.json counts them.
pub(crate) fn has_experts(folder: &Path) -> bool {
    let text = std::fs::read(folder.join("config.json")).expect("a readable config.json");
    let config: Value = serde_json::from_slice(&text).expect("JSON");
    let count = config["num_experts_per_tok"].as_u64();
    count.is_some_and(|count| count > 0)
}

/// `cleave` with these arguments, not started yet.
pub(crate) fn cleave(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleave"));
    command
        .args(arguments)
        .env_remove("CLEAVE_MODEL")
        .env_remove("CLEAVE_POLICY")
        .env_remove("OTEL_EXPORTER_OTLP_ENDPOINT");
    command
}

/// Starts `cleave serve` with these flags, on two cores and with a small cache.
pub(crate) fn serve(more: &[&str]) -> CleaveProcess {
    let plain = "serve --port 0 --threads 2 --kv-cache 64MiB";
    let arguments: Vec<&str> = plain.split(' ').chain(more.iter().copied()).collect();
    CleaveProcess::start(&arguments)
}

/// Runs `cleave` to its end: status, standard output, standard error.
pub(crate) fn run(arguments: &[&str]) -> (ExitStatus, String, String) {
    let output = cleave(arguments).output().expect("cleave starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    (output.status, text(output.stdout), text(output.stderr))
}

/// Runs `cleave` to its end with this standard input; gives its standard output.
///
/// # Panics
/// If it fails.
pub(crate) fn run_with_input(arguments: &[&str], input: &str) -> String {
    let mut command = cleave(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("cleave starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("it reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).expect("output is UTF-8")
}

/// Calls `probe` until it gives a value.
///
/// # Panics
/// With `condition` after [`LIMIT`].
pub(crate) fn wait_for<T>(condition: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(started.elapsed() < LIMIT, "no {condition} within {LIMIT:?}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// A long-running `cleave` process; killed when dropped.
pub(crate) struct CleaveProcess {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    logs: Arc<Mutex<String>>,
    _permit: Arc<FleetPermit>,
}

impl CleaveProcess {
    /// Starts `cleave` with these arguments.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::spawn(cleave(arguments))
    }

    /// Starts a command that [`cleave`] prepared.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let permit = FleetPermit::of_this_thread();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("cleave starts");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let logs = Arc::new(Mutex::new(String::new()));
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        let (thread_lines, thread_logs) = (lines.clone(), logs.clone());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                thread_lines.lock().expect("no panic holds it").push(line);
            }
        });
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let mut logs = thread_logs.lock().expect("no panic holds it");
                logs.push_str(&line);
                logs.push('\n');
            }
        });
        Self {
            child,
            lines,
            logs,
            _permit: permit,
        }
    }

    /// The address in its line `listening on http://`.
    pub(crate) fn address(&mut self) -> String {
        self.address_after("listening on http://")
    }

    /// The address of a server with a certificate.
    pub(crate) fn tls_address(&mut self) -> String {
        self.address_after("listening on https://")
    }

    /// The admin address, if it has a port of its own.
    pub(crate) fn admin_address(&mut self) -> String {
        self.address_after("admin on http://")
    }

    fn address_after(&mut self, mark: &str) -> String {
        wait_for("line with the address", || {
            let lines = self.lines.lock().expect("no panic holds it");
            let found = lines
                .iter()
                .find_map(|line| line.strip_prefix(mark).map(str::to_owned));
            if found.is_none() {
                let ended = self.child.try_wait().expect("process can be asked");
                assert!(
                    ended.is_none(),
                    "cleave ended early: {}",
                    self.logs.lock().expect("no panic holds it")
                );
            }
            found
        })
    }

    /// Its log so far.
    pub(crate) fn logs(&self) -> String {
        self.logs.lock().expect("no panic holds it").clone()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by name, such as `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([&format!("-{name}"), &self.id().to_string()])
            .status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits until it has ended.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        wait_for("exit", || {
            self.child.try_wait().expect("process can be asked")
        })
    }
}

impl Drop for CleaveProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A blocking HTTP client of one server.
pub(crate) struct HttpClient {
    base: String,
    http: reqwest::blocking::Client,
}

impl HttpClient {
    /// A client for `address`, such as `127.0.0.1:8000`.
    pub(crate) fn new(address: &str) -> Self {
        let http = reqwest::blocking::Client::builder()
            .timeout(LIMIT)
            .build()
            .expect("client builds");
        Self {
            base: format!("http://{address}"),
            http,
        }
    }

    /// Status and body of a GET.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let answer = self.get_with(path, &[]);
        (
            answer.status().as_u16(),
            answer.text().expect("body is text"),
        )
    }

    /// The answer to a GET with these headers.
    pub(crate) fn get_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
    ) -> reqwest::blocking::Response {
        let request = self.http.get(format!("{}{path}", self.base));
        let request = headers.iter().fold(request, |request, (name, value)| {
            request.header(*name, *value)
        });
        request.send().expect("server answers")
    }

    /// Waits until `/ready` answers 200.
    pub(crate) fn wait_ready(&self) {
        wait_for("readiness", || (self.get("/ready").0 == 200).then_some(()));
    }

    /// Status and body of a POST of JSON.
    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, body) = self.post_with(path, body, &[]);
        (status, body)
    }

    /// Status, headers and body of a POST of JSON with these headers.
    pub(crate) fn post_with(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> (u16, reqwest::header::HeaderMap, Value) {
        let answer = self.send(path, body, headers);
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        let text = answer.text().expect("body is text");
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        (status, headers, body)
    }

    /// Starts a streamed POST; the result iterates over its events.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> StreamedEvents {
        let answer = self.send(path, body, &[]);
        assert_eq!(answer.status().as_u16(), 200, "stream begins");
        StreamedEvents {
            lines: BufReader::new(answer),
        }
    }

    fn send(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> reqwest::blocking::Response {
        let request = self.http.post(format!("{}{path}", self.base)).json(body);
        let request = headers.iter().fold(request, |request, (name, value)| {
            request.header(*name, *value)
        });
        request.send().expect("server answers")
    }

    /// The text of a greedy completion.
    pub(crate) fn complete(&self, body: &Value) -> String {
        let (status, answer) = self.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"]
            .as_str()
            .expect("a text")
            .to_owned()
    }

    /// The sum over all series of a metric whose line contains each of `labels`.
    pub(crate) fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200);
        sum_metric(&text, name, labels)
    }
}

pub(crate) fn sum_metric(text: &str, name: &str, labels: &[&str]) -> f64 {
    text.lines()
        .filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
                && labels.iter().all(|label| line.contains(label))
        })
        .map(|line| {
            line.rsplit(' ')
                .next()
                .and_then(|number| number.parse::<f64>().ok())
                .expect("a number")
        })
        .sum()
}

/// Server-sent events of one answer.
pub(crate) struct StreamedEvents {
    lines: BufReader<reqwest::blocking::Response>,
}

impl Iterator for StreamedEvents {
    type Item = String;

    /// The next event's data.
    fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.lines.by_ref().read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_owned());
            }
        }
    }
}
