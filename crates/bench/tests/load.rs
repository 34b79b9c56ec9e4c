//! Load on a scripted server in this process.
//!
//! Times are compared only where the server delays an answer until the client's clock must have
//! reached a value, never with a tolerance: a delayed token cannot be seen earlier.

#![allow(clippy::unwrap_used)]

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use cleave_bench::{
    ApiEndpoint, ArrivalProcess, BenchJob, BenchReport, BenchWorkload, CutReason, GoodputSearch,
    InterruptSignal, LengthScaling, MeasuredServer, MissReason, ProgressObserver, PromptEncoding,
    RateBounds, RateResult, RequestOptions, ResultFolder, RunProgress, ScheduleOptions,
    ServerTarget, SloHeaders, SloSet, StageRequest,
};
use futures::stream;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The server's behaviour towards one request, probes not counted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ServerBehaviour {
    Answer,
    /// Answers with two tokens in each chunk.
    TwoTokensPerChunk,
    Refuse,
    Fail,
    /// Sends an error in mid-stream.
    ErrorMidStream,
    /// Ends the stream early.
    EndMidStream,
    Hang,
    /// Delays the first token by this time.
    FirstTokenDelayed(Duration),
}

struct ScriptedServer {
    behaviour: fn(usize) -> ServerBehaviour,
    requests_count: AtomicUsize,
    bodies: Mutex<Vec<(HeaderMap, Value)>>,
    /// Requests in flight now; the next field has their maximum.
    present: AtomicUsize,
    present_max: AtomicUsize,
    /// Answers begin when this many requests have arrived.
    arrivals_count: watch::Sender<usize>,
    answers_begin_at: usize,
}

/// A server, with the requests that it received.
async fn serve(
    behaviour: fn(usize) -> ServerBehaviour,
    answers_begin_at: usize,
) -> (String, Arc<ScriptedServer>) {
    let server = Arc::new(ScriptedServer {
        behaviour,
        requests_count: AtomicUsize::new(0),
        bodies: Mutex::default(),
        present: AtomicUsize::new(0),
        present_max: AtomicUsize::new(0),
        arrivals_count: watch::channel(0).0,
        answers_begin_at,
    });
    let models = || async {
        Json(json!({"data": [{"id": "tiny", "max_model_len": 4096, "vocab_size": 1000}]}))
    };
    let app = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(complete))
        .with_state(server.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (url, server)
}

async fn complete(
    State(server): State<Arc<ScriptedServer>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap();
    if body["stream"] != json!(true) {
        return token_count_answer(&body);
    }
    let tokens = body["max_tokens"].as_u64().unwrap();
    if tokens == 1 {
        return answer(1, 1, &server, ServerBehaviour::Answer);
    }
    let number = server.requests_count.fetch_add(1, Ordering::SeqCst);
    server.bodies.lock().unwrap().push((headers, body.clone()));
    let present = server.present.fetch_add(1, Ordering::SeqCst) + 1;
    server.present_max.fetch_max(present, Ordering::SeqCst);
    server.arrivals_count.send_modify(|count| *count += 1);
    let mut arrivals = server.arrivals_count.subscribe();
    arrivals
        .wait_for(|count| *count >= server.answers_begin_at)
        .await
        .unwrap();
    let behaviour = (server.behaviour)(number);
    let input = body["prompt"].as_array().map_or(0, Vec::len);
    match behaviour {
        ServerBehaviour::Refuse => {
            server.present.fetch_sub(1, Ordering::SeqCst);
            (
                StatusCode::TOO_MANY_REQUESTS,
                [(header::RETRY_AFTER, "7")],
                "later",
            )
                .into_response()
        }
        ServerBehaviour::Fail => (StatusCode::INTERNAL_SERVER_ERROR, "broken").into_response(),
        ServerBehaviour::Hang => std::future::pending().await,
        ServerBehaviour::FirstTokenDelayed(span) => {
            tokio::time::timeout(span, std::future::pending::<()>())
                .await
                .ok();
            answer(input, tokens, &server, behaviour)
        }
        ServerBehaviour::Answer
        | ServerBehaviour::TwoTokensPerChunk
        | ServerBehaviour::ErrorMidStream
        | ServerBehaviour::EndMidStream => answer(input, tokens, &server, behaviour),
    }
}

/// A token count without a stream: three tokens added by the server, and two for each word.
fn token_count_answer(body: &Value) -> Response {
    let text = body["messages"][0]["content"]
        .as_str()
        .or(body["prompt"].as_str());
    let words = text.unwrap().split_whitespace().count();
    Json(json!({"usage": {"prompt_tokens": 3 + 2 * words}})).into_response()
}

fn answer(
    input: usize,
    tokens: u64,
    server: &Arc<ScriptedServer>,
    behaviour: ServerBehaviour,
) -> Response {
    let chunk = |text: &str, finish: Value| {
        let chunk = json!({"choices": [{"index": 0, "text": text, "finish_reason": finish}]});
        format!("data: {chunk}\n\n")
    };
    let mut events = Vec::new();
    let step = if behaviour == ServerBehaviour::TwoTokensPerChunk {
        2
    } else {
        1
    };
    for at in (0..tokens).step_by(step) {
        let last = at + step as u64 >= tokens;
        events.push(chunk(
            "ab",
            if last { json!("length") } else { Value::Null },
        ));
    }
    let usage = json!({"prompt_tokens": input, "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 2}});
    let timing = json!({"router_queue_ms": 0.5, "prefill_ms": 4.0});
    match behaviour {
        ServerBehaviour::ErrorMidStream => {
            events.truncate(2);
            events.push("data: {\"error\": {\"message\": \"worker lost\"}}\n\n".into());
        }
        ServerBehaviour::EndMidStream => events.truncate(2),
        _ => {
            let closing = json!({"choices": [], "usage": usage, "timing": timing});
            events.push(format!("data: {closing}\n\ndata: [DONE]\n\n"));
        }
    }
    server
        .present
        .fetch_sub(usize::from(tokens > 1), Ordering::SeqCst);
    let events = events.into_iter().map(Ok::<_, std::convert::Infallible>);
    let stream = Body::from_stream(stream::iter(events));
    ([("content-type", "text/event-stream")], stream).into_response()
}

struct SilentObserver;

impl ProgressObserver for SilentObserver {
    fn run_progresses(&self, _: &RunProgress) {}
    fn run_begins(&self, _: f64, _: usize) {}
    fn rate_tried(&self, _: &RateResult) {}
}

fn schedule_options(requests: usize) -> ScheduleOptions {
    ScheduleOptions {
        arrivals: Some(ArrivalProcess::Uniform),
        rate: Some(1000.0),
        speed: None,
        requests: Some(requests),
        duration: None,
        scaling: LengthScaling::default(),
        seed: 4,
    }
}

/// A measurement of 20 requests of 30 tokens in and 6 out, for tests to change.
async fn job(url: &str, request_options: RequestOptions) -> (BenchJob, watch::Sender<bool>) {
    let target = ServerTarget {
        url: url.to_owned(),
        encoding: PromptEncoding::Auto,
        request_options,
        ..ServerTarget::default()
    };
    let server = MeasuredServer::probe(&target).await.unwrap();
    let (switch, stop) = InterruptSignal::new();
    let workload: BenchWorkload = "short-short:input=30,output=6,cv=0".parse().unwrap();
    let job = BenchJob {
        server,
        request_options: target.request_options,
        slo: SloSet::parse(&["ttft=60s".to_owned()], workload.classes()).unwrap(),
        workload,
        schedule_options: schedule_options(20),
        timeout: Duration::from_secs(120),
        grace: Duration::from_secs(120),
        warmup: Duration::ZERO,
        devices: 2,
        configuration: Value::Null,
        folder: None,
        stop,
    };
    (job, switch)
}

async fn measured(behaviour: fn(usize) -> ServerBehaviour) -> (BenchReport, Arc<ScriptedServer>) {
    let (url, server) = serve(behaviour, 0).await;
    let (job, _switch) = job(&url, RequestOptions::default()).await;
    (job.run(&SilentObserver).await.unwrap(), server)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_sent_as_planned_and_counted_as_answered() {
    let (report, server) = measured(|_| ServerBehaviour::Answer).await;
    let all = &report.runs[0].all;
    assert_eq!(
        (all.offered, all.done, all.met, all.attainment),
        (20, 20, 20, 1.0)
    );
    assert_eq!((all.input_tokens.mean, all.output_tokens.mean), (30.0, 6.0));
    assert_eq!(
        (all.chunks_differ, all.outputs_differ, all.inputs_differ),
        (0, 0, 0)
    );
    assert_eq!((all.gap_ms.count, all.cached_tokens.mean), (100, 2.0));
    assert_eq!(all.stages_ms["prefill"].mean, 4.0);
    assert!(!all.stages_ms.contains_key("transfer"));
    assert_eq!(report.runs[0].span_s, 0.02);
    assert_eq!(
        (all.goodput_rps, all.goodput_rps_per_device),
        (1000.0, 500.0)
    );
    assert_eq!(report.server.model.as_deref(), Some("tiny"));
    for (_, body) in server.bodies.lock().unwrap().iter() {
        assert_eq!(
            (&body["min_tokens"], &body["ignore_eos"]),
            (&json!(6), &json!(true))
        );
        let ids = body["prompt"].as_array().unwrap();
        // The last tenth of the ids and the first 256 may be special.
        assert!(
            ids.iter()
                .all(|id| (256..900).contains(&id.as_u64().unwrap()))
        );
    }
}

// Lesson: 25.
#[tokio::test(flavor = "multi_thread")]
async fn refused_failed_and_broken_answers_are_misses() {
    let (report, _) = measured(|number| match number % 5 {
        0 => ServerBehaviour::Refuse,
        1 => ServerBehaviour::Fail,
        2 => ServerBehaviour::ErrorMidStream,
        3 => ServerBehaviour::EndMidStream,
        _ => ServerBehaviour::Answer,
    })
    .await;
    let all = &report.runs[0].all;
    assert_eq!(
        (all.offered, all.done, all.met, all.attainment),
        (20, 4, 4, 0.2)
    );
    let missed = BTreeMap::from([(MissReason::Refused, 4), (MissReason::Failed, 12)]);
    assert_eq!(all.missed, missed);
    let kinds = ["status", "error", "cut"].map(|kind| all.failures[kind]);
    assert_eq!(kinds, [4, 4, 4]);
    assert_eq!((all.retry_after_s.count, all.retry_after_s.max), (4, 7.0));
    let errors = &report.runs[0].errors;
    assert_eq!(errors["worker lost"], 4);
    assert!(
        errors
            .keys()
            .any(|text| text.contains("500") && text.contains("broken"))
    );
}

/// A relay in front of a server that closes each connection when it is used a second time.
async fn closing_proxy(url: &str) -> String {
    let server = url.trim_start_matches("http://").trim_end_matches("/v1");
    let server = server.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&server).await.unwrap();
            tokio::spawn(async move {
                let (mut client_read, mut client_write) = client.into_split();
                let (mut server_read, mut server_write) = server.into_split();
                let answered = AtomicUsize::new(0);
                let back = async {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = server_read.read(&mut bytes).await {
                        answered.store(1, Ordering::SeqCst);
                        client_write.write_all(&bytes[..count]).await.unwrap();
                    }
                };
                let forth = async {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = client_read.read(&mut bytes).await {
                        if answered.load(Ordering::SeqCst) == 1 {
                            return;
                        }
                        server_write.write_all(&bytes[..count]).await.unwrap();
                    }
                };
                tokio::select! {
                    () = back => {}
                    () = forth => {}
                }
            });
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_kept_connection_is_not_a_failure() {
    let (url, _) = serve(|_| ServerBehaviour::Answer, 0).await;
    let (mut job, _stop) = job(&closing_proxy(&url).await, RequestOptions::default()).await;
    // Requests 25 ms apart: a busy machine, too, gives a connection back before the next request
    // wants one.
    job.schedule_options.rate = Some(40.0);
    let folder = tempfile::tempdir().unwrap();
    job.folder = Some(ResultFolder::create(folder.path()).unwrap());
    let report = job.run(&SilentObserver).await.unwrap();
    let all = &report.runs[0].all;
    assert_eq!(
        (all.done, all.failures.len()),
        (20, 0),
        "{:?}",
        report.runs[0].errors
    );
    assert!(all.asked_again > 0);
    let noted = |note: &String| note.contains("sent once more");
    assert!(report.notes.iter().any(noted), "{:?}", report.notes);
    let result = check_result_folder(folder.path(), 20);
    let reported = &result["runs"][0]["all"]["asked_again"];
    assert_eq!(reported, &json!(all.asked_again));
}

#[tokio::test(flavor = "multi_thread")]
async fn arrivals_do_not_wait_for_answers() {
    // No answer begins before all requests are there: a closed loop would wait for ever.
    let (url, server) = serve(|_| ServerBehaviour::Answer, 20).await;
    let (job, _switch) = job(&url, RequestOptions::default()).await;
    let report = job.run(&SilentObserver).await.unwrap();
    assert_eq!(report.runs[0].all.met, 20);
    assert_eq!(server.present_max.load(Ordering::SeqCst), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn unanswered_requests_are_misses_after_the_grace() {
    let (url, _) = serve(
        |number| [ServerBehaviour::Answer, ServerBehaviour::Hang][number % 2],
        0,
    )
    .await;
    let (mut job, _switch) = job(&url, RequestOptions::default()).await;
    job.grace = Duration::from_millis(300);
    let report = job.run(&SilentObserver).await.unwrap();
    let all = &report.runs[0].all;
    assert_eq!((all.offered, all.met, all.undecided), (20, 10, 0));
    assert_eq!(all.missed[&MissReason::Unfinished], 10);
    assert_eq!(report.runs[0].cut, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn delayed_first_tokens_miss_and_chunks_are_not_tokens() {
    let late = |number| match number % 2 {
        0 => ServerBehaviour::FirstTokenDelayed(Duration::from_millis(200)),
        _ => ServerBehaviour::TwoTokensPerChunk,
    };
    let (url, _) = serve(late, 0).await;
    let (mut job, _switch) = job(&url, RequestOptions::default()).await;
    job.slo = SloSet::parse(&["ttft=200ms".to_owned()], job.workload.classes()).unwrap();
    let report = job.run(&SilentObserver).await.unwrap();
    let all = &report.runs[0].all;
    assert!(all.missed[&MissReason::Ttft] >= 10, "{:?}", all.missed);
    assert_eq!(all.chunks_differ, 10);
    assert!(
        report
            .notes
            .iter()
            .any(|note| note.contains("number of chunks"))
    );
    assert_eq!(all.output_tokens.mean, 6.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_run_keeps_its_records() {
    let (url, server) = serve(
        |number| [ServerBehaviour::Answer, ServerBehaviour::Hang][number % 2],
        0,
    )
    .await;
    let (mut job, switch) = job(&url, RequestOptions::default()).await;
    let folder = tempfile::tempdir().unwrap();
    job.folder = Some(ResultFolder::create(folder.path()).unwrap());
    let mut arrivals = server.arrivals_count.subscribe();
    tokio::spawn(async move {
        arrivals.wait_for(|count| *count == 20).await.unwrap();
        switch.send_replace(true);
        // The switch stays alive until the run is over: dropping it is no signal.
        std::future::pending::<()>().await;
    });
    let report = job.run(&SilentObserver).await.unwrap();
    assert!(report.interrupted);
    let run = &report.runs[0];
    assert_eq!(run.cut, Some(CutReason::Interrupted));
    assert!(
        run.all.undecided >= 10 && run.all.missed.is_empty(),
        "{:?}",
        run.all
    );
    check_result_folder(folder.path(), 20);
}

/// Checks the files in the result folder, and gives `result.json`.
fn check_result_folder(folder: &Path, requests: usize) -> Value {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let result: Value = serde_json::from_str(&read("result.json")).unwrap();
    assert_eq!(result["schema"], "cleave-bench/1");
    let lines: Vec<Value> = read("requests.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), requests);
    let html = read("report.html");
    assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</html>"));
    for outside in [
        "http://www",
        "https://",
        "<script",
        "src=",
        "@import",
        "url(",
    ] {
        assert!(!html.contains(outside), "the page loads {outside}");
    }
    assert!(!html.contains("NaN"));
    result
}

#[tokio::test(flavor = "multi_thread")]
async fn each_class_has_its_headers_targets_and_summary() {
    let (url, server) = serve(|_| ServerBehaviour::Answer, 0).await;
    let request_options = RequestOptions {
        slo_headers: SloHeaders::Both,
        timing: StageRequest::Asked,
        ..RequestOptions::default()
    };
    let (mut job, _switch) = job(&url, request_options).await;
    job.workload = "a=1*short-short:cv=0,b=1*short-short:cv=0".parse().unwrap();
    let texts = ["a:ttft=60s,tpot=30ms".to_owned(), "b:e2e=1us".to_owned()];
    job.slo = SloSet::parse(&texts, job.workload.classes()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    job.folder = Some(ResultFolder::create(folder.path()).unwrap());
    let report = job.run(&SilentObserver).await.unwrap();
    let run = &report.runs[0];
    let (a, b) = (&run.classes["a"], &run.classes["b"]);
    assert_eq!(a.offered + b.offered, 20);
    assert_eq!((b.met, b.missed[&MissReason::E2e]), (0, b.offered));
    let bodies = server.bodies.lock().unwrap();
    let of_a = bodies
        .iter()
        .filter(|(headers, _)| headers["x-slo-class"] == "a");
    let of_a: Vec<_> = of_a.collect();
    assert_eq!(of_a.len() as u64, a.offered);
    let targets = |(headers, _): &&(HeaderMap, Value)| {
        headers["x-slo-ttft-ms"] == "60000" && headers["x-slo-tpot-ms"] == "30"
    };
    assert!(of_a.iter().all(targets));
    assert!(
        bodies
            .iter()
            .all(|(headers, _)| headers["x-cleave-timing"] == "1")
    );
    let result = check_result_folder(folder.path(), 20);
    assert_eq!(result["runs"][0]["classes"]["b"]["met"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_prompts_have_the_length_the_server_counts() {
    let (url, server) = serve(|_| ServerBehaviour::Answer, 0).await;
    let request_options = RequestOptions {
        endpoint: ApiEndpoint::Chat,
        ..RequestOptions::default()
    };
    let (job, _switch) = job(&url, request_options).await;
    assert!(
        job.server.facts.prompts.contains("2 to 2 tokens"),
        "{}",
        job.server.facts.prompts
    );
    job.run(&SilentObserver).await.unwrap();
    let bodies = server.bodies.lock().unwrap();
    for (_, body) in bodies.iter() {
        let text = body["messages"][0]["content"].as_str().unwrap();
        // 3 tokens of the server, 2 for each word: 13 words are 29 tokens, 14 would be 31.
        assert_eq!(text.split_whitespace().count(), 13);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trace_prompts_share_prefixes_within_one_run_only() {
    let (url, server) = serve(|_| ServerBehaviour::Answer, 0).await;
    let (mut job, _switch) = job(&url, RequestOptions::default()).await;
    let trace =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/mooncake_conversation.jsonl");
    job.workload = BenchWorkload::from_trace(&trace, None).unwrap();
    job.schedule_options.arrivals = Some(ArrivalProcess::Uniform);
    job.schedule_options.rate = Some(200.0);
    job.schedule_options.requests = None;
    job.schedule_options.scaling.input = 0.125;
    let search = GoodputSearch {
        rates: vec![150.0, 200.0],
        repeats: 1,
        ..goodput_search()
    };
    let report = job.goodput(&search, &SilentObserver).await.unwrap();
    assert_eq!(report.runs.len(), 2);
    let bodies = server.bodies.lock().unwrap();
    let prompts: Vec<&Vec<Value>> = bodies
        .iter()
        .map(|(_, body)| body["prompt"].as_array().unwrap())
        .collect();
    assert_eq!(prompts.len(), 48);
    let common =
        |one: &[Value], other: &[Value]| one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let most = |one: usize, others: &[&Vec<Value>]| {
        others
            .iter()
            .map(|other| common(prompts[one], other))
            .max()
            .unwrap()
    };
    // Blocks of 512 tokens are scaled to 64. The longest prefix that two requests share has 12
    // blocks.
    let (first, second) = prompts.split_at(24);
    let longest = (0..24).map(|one| {
        let others: Vec<_> = (0..24)
            .filter(|other| *other != one)
            .map(|other| first[other])
            .collect();
        most(one, &others)
    });
    assert_eq!(longest.max().unwrap(), 6144 / 8);
    assert!(
        (0..24).all(|one| most(one, second) < 8),
        "found in the next run's cache"
    );
}

fn goodput_search() -> GoodputSearch {
    GoodputSearch {
        goal: 0.9,
        bounds: RateBounds {
            first: 500.0,
            max: 2000.0,
            min: 100.0,
            precision: 0.1,
        },
        rates: Vec::new(),
        requests_min: 60,
        duration_min: Duration::from_millis(1),
        repeats: 2,
        time_max: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodput_search_ends_at_its_limits() {
    let (url, _) = serve(|_| ServerBehaviour::Answer, 0).await;
    let (mut job_, _switch) = job(&url, RequestOptions::default()).await;
    job_.schedule_options = schedule_options(1000);
    let folder = tempfile::tempdir().unwrap();
    job_.folder = Some(ResultFolder::create(folder.path()).unwrap());
    let report = job_
        .goodput(&goodput_search(), &SilentObserver)
        .await
        .unwrap();
    let found = report.goodput.as_ref().unwrap();
    assert_eq!((found.rate_max, found.rate_broken), (Some(2000.0), None));
    assert_eq!(found.goodput_rps_per_device, found.goodput_rps / 2.0);
    let rates: Vec<f64> = report.tries.iter().map(|tried| tried.rate).collect();
    assert_eq!(rates, [500.0, 1000.0, 2000.0]);
    check_result_folder(folder.path(), 180);

    let (url, server) = serve(|_| ServerBehaviour::Refuse, 0).await;
    let (mut job, _switch) = job(&url, RequestOptions::default()).await;
    job.schedule_options = schedule_options(1000);
    let report = job
        .goodput(&goodput_search(), &SilentObserver)
        .await
        .unwrap();
    let found = report.goodput.as_ref().unwrap();
    assert_eq!((found.rate_max, found.rate_broken), (None, Some(100.0)));
    assert_eq!(found.goodput_rps, 0.0);
    // Runs whose goal became unreachable were cut short.
    assert!(
        report
            .runs
            .iter()
            .all(|run| run.cut == Some(CutReason::Hopeless))
    );
    assert!(server.requests_count.load(Ordering::SeqCst) < 4 * 60);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_server_is_an_error() {
    let target = ServerTarget {
        url: "http://127.0.0.1:1".to_owned(),
        ..ServerTarget::default()
    };
    let error = format!("{:#}", MeasuredServer::probe(&target).await.unwrap_err());
    assert!(error.contains("127.0.0.1:1"), "{error}");
    for bad in ["https://a", "localhost:8000", "", "http://a?b=c"] {
        let target = ServerTarget {
            url: bad.to_owned(),
            ..ServerTarget::default()
        };
        assert!(MeasuredServer::probe(&target).await.is_err(), "{bad}");
    }
}

#[tokio::test]
async fn a_probe_reports_the_refusal_of_the_server() {
    let probe = async |answer: (StatusCode, Value)| {
        let models = || async { Json(json!({"data": [{"id": "tiny"}]})) };
        let (status, body) = answer;
        let tokenize = move || async move { (status, Json(body)) };
        let app = Router::new()
            .route("/v1/models", get(models))
            .route("/tokenize", post(tokenize));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let target = ServerTarget {
            url,
            model: Some("nope".to_owned()),
            ..ServerTarget::default()
        };
        MeasuredServer::probe(&target)
            .await
            .unwrap_err()
            .to_string()
    };
    let message = "The model `nope` does not exist here; `tiny` is served.";
    let missing = json!({"error": {"message": message, "code": "model_not_found"}});
    let reason = probe((StatusCode::NOT_FOUND, missing)).await;
    assert!(
        reason.contains(message) && !reason.contains("--vocab"),
        "{reason}"
    );
    let broken = json!({"error": {"message": "out of order"}});
    let reason = probe((StatusCode::INTERNAL_SERVER_ERROR, broken)).await;
    assert!(
        reason.contains("500 Internal Server Error out of order"),
        "{reason}"
    );
    assert!(reason.contains("--vocab"), "{reason}");
}
