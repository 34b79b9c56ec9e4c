//! A scripted [`Frontend`], and a client that calls the routes without a socket.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Method, Request as HttpRequest, StatusCode};
use axum::response::Response;
use cleave_api::{
    ApiOptions, App, CommandError, FleetSnapshot, FlightEvent, FlightStream, Frontend, LinkView,
    Operator, ServingReadiness, StreamCounts, SubmissionContext, TraceParent, WorkerCommand,
    WorkerState, WorkerView,
};
use cleave_domain::{
    Emission, Ending, FinishReason, POOLED_TOKEN, PrefillBacklog, PrefillTiming, PromptFacts,
    Request, RequestStageTimes, Role, SampledToken, SloPolicy, TokenId, TokenScores, TokenUsage,
    WorkerLoad, WorkerRef,
};
use cleave_text::{ModelFiles, ModelText};
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::{FutureExt, StreamExt};
use http_body_util::BodyExt;
use serde_json::Value;
use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;
use tower::ServiceExt;

/// Behavior of a submitted flight.
pub(crate) enum FlightScript {
    /// Sends these tokens, then this ending.
    Play(Vec<TokenId>, Ending),
    /// Sends this vector, then its end.
    Vector(Vec<f32>),
    /// Sends this vector when a step of the worker takes it, in the order of submission.
    Queued(Vec<f32>),
    /// Sends the events of the test.
    Live(UnboundedReceiver<FlightEvent>),
    /// Sends this many tokens, then panics.
    Panic(u32),
}

/// A frontend that plays scripts in the order of submission and records the requests.
#[derive(Default)]
pub(crate) struct ScriptedFrontend {
    pub(crate) scripts: Mutex<VecDeque<FlightScript>>,
    pub(crate) submitted: Mutex<Vec<Request>>,
    /// Streams that were submitted and not yet dropped, and the most of them at a time.
    pub(crate) open: Arc<AtomicU32>,
    pub(crate) open_most: AtomicU32,
    /// Sequences that the worker may take now.
    pub(crate) steps: StepPermits,
    pub(crate) traces: Mutex<Vec<Option<TraceParent>>>,
    /// The models of the sequences, as they were submitted.
    pub(crate) models: Mutex<Vec<String>>,
    /// The models whose workers are gone.
    pub(crate) away: Mutex<BTreeSet<String>>,
    pub(crate) readiness: Mutex<Option<ServingReadiness>>,
    pub(crate) policy: Mutex<Arc<SloPolicy>>,
    /// Longest sequence that a worker can hold.
    pub(crate) sequence_tokens_max: Mutex<Option<u32>>,
    pub(crate) router_number: AtomicU32,
    /// Snapshot for `/ui`, and the number of requests for it.
    pub(crate) snapshot: Mutex<Option<FleetSnapshot>>,
    pub(crate) snapshots_made: AtomicU32,
}

/// Permits for the sequences of [`FlightScript::Queued`]; none at first.
pub(crate) struct StepPermits(pub(crate) Arc<Semaphore>);

impl Default for StepPermits {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }
}

/// Counts an open stream while it lives.
struct OpenStream(Arc<AtomicU32>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Operator for ScriptedFrontend {
    fn workers(&self) -> Vec<WorkerView> {
        vec![worker()]
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let mut view = self::worker();
        match (worker, command) {
            ("d0", WorkerCommand::Drain) => view.state = WorkerState::Draining,
            ("d0", WorkerCommand::SetRole(role)) => view.role = role,
            ("near", WorkerCommand::Drain) => return Err(CommandError::SameProcess),
            ("busy", _) => return Err(CommandError::Busy),
            ("gone", _) => return Err(CommandError::Stopped),
            _ => return Err(CommandError::UnknownWorker),
        }
        Ok(view)
    }
}

fn worker() -> WorkerView {
    let mut backlog = PrefillBacklog::default();
    backlog.add(0, None, Duration::from_millis(500));
    backlog.add(1, Some(Duration::ZERO), Duration::from_millis(250));
    WorkerView {
        name: "d0".into(),
        model: "llama3".into(),
        worker: WorkerRef::default(),
        role: Role::Decode,
        state: WorkerState::Ready,
        fingerprint: "tiny".into(),
        device: Some("cores 0-1".into()),
        load: WorkerLoad {
            blocks_free: 30,
            sequences_running: 2,
            context_tokens: 500,
            streams: 2,
            backlog,
            tpot_least: Some(Duration::from_millis(20)),
            ..WorkerLoad::default()
        },
        price_error_permille: Some(42),
        blocks_count: 40,
        links: vec![LinkView {
            peer: "p0".into(),
            transport: "tcp".into(),
            bytes_per_second: 5,
            latency: Duration::from_millis(2),
        }],
        counters: vec![("decodes", 9)],
    }
}

impl Frontend for ScriptedFrontend {
    fn submit(&self, request: Request) -> FlightStream {
        let script = self
            .scripts
            .lock()
            .unwrap()
            .pop_front()
            .expect("a script for this flight");
        let stream = match script {
            FlightScript::Play(tokens, ending) => {
                let events = tokens.into_iter().enumerate();
                let events = events.map(|(index, token)| event(&request, index as u32, token));
                let events: Vec<_> = events.chain([ended(ending)]).collect();
                futures::stream::iter(events).boxed()
            }
            FlightScript::Vector(vector) => {
                let events = [vector_event(vector), ended(done(FinishReason::Length))];
                futures::stream::iter(events).boxed()
            }
            FlightScript::Queued(vector) => {
                let steps = Arc::clone(&self.steps.0);
                let taken = async move { steps.acquire_owned().await.unwrap().forget() };
                let events = [vector_event(vector), ended(done(FinishReason::Length))];
                let events = taken.map(move |()| futures::stream::iter(events));
                events.flatten_stream().boxed()
            }
            FlightScript::Live(events) => events.boxed(),
            FlightScript::Panic(count) => {
                let tokens: Vec<_> = (0..count).map(|index| event(&request, index, 5)).collect();
                let bug = futures::stream::poll_fn(|_| panic!("a bug in the serving side"));
                futures::stream::iter(tokens).chain(bug).boxed()
            }
        };
        self.submitted.lock().unwrap().push(request);
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        self.open_most.fetch_max(open, Ordering::Relaxed);
        let counted = OpenStream(Arc::clone(&self.open));
        let counted = stream.map(move |event| {
            let _open = &counted;
            event
        });
        counted.boxed()
    }

    fn submit_for(&self, request: Request, caller: SubmissionContext) -> FlightStream {
        self.traces.lock().unwrap().push(caller.trace);
        let model = caller.model.to_string();
        self.models.lock().unwrap().push(model);
        self.submit(request)
    }

    fn streams(&self) -> StreamCounts {
        StreamCounts {
            open: 3,
            max: Some(8),
        }
    }

    fn readiness(&self, model: &str) -> ServingReadiness {
        if self.away.lock().unwrap().contains(model) {
            return ServingReadiness::NotReady("its workers are gone".into());
        }
        let readiness = self.readiness.lock().unwrap().clone();
        readiness.unwrap_or(ServingReadiness::Ready)
    }

    fn sequence_tokens_max(&self, _: &str) -> Option<u32> {
        *self.sequence_tokens_max.lock().unwrap()
    }

    fn router_number(&self) -> u32 {
        self.router_number.load(Ordering::Relaxed)
    }

    fn policy(&self) -> Arc<SloPolicy> {
        self.policy.lock().unwrap().clone()
    }

    fn fleet_snapshot(&self) -> Option<FleetSnapshot> {
        self.snapshots_made.fetch_add(1, Ordering::Relaxed);
        self.snapshot.lock().unwrap().clone()
    }

    fn metrics(&self) -> String {
        "# TYPE cleave_steps counter\ncleave_steps_total 7\n".into()
    }
}

/// Scores that are easy to check: every log-probability is -(rank + 1).
fn scores(token: TokenId, top: u32) -> TokenScores {
    let others = (0..top).map(|rank| (token + rank, 9.0 - rank as f32));
    TokenScores {
        normalizer: 10.0,
        chosen: 9.0,
        top: others.collect(),
    }
}

fn sampled(token: TokenId, top_count: Option<u32>) -> SampledToken {
    let scores = top_count.map(|top| scores(token, top));
    SampledToken { token, scores }
}

/// The token event that a real worker would send for this request.
fn event(request: &Request, index: u32, token: TokenId) -> FlightEvent {
    let scored = request.sampling.prompt_logprobs.map(|top| {
        let prompt = request.prompt[1..].iter();
        prompt.map(|&token| sampled(token, Some(top))).collect()
    });
    let facts = PromptFacts {
        cached_tokens: CACHED,
        scores: scored.unwrap_or_default(),
        timing: PrefillTiming::default(),
        pooled: None,
    };
    FlightEvent::Token(Emission {
        index,
        sampled: sampled(token, request.sampling.logprobs),
        prompt: (index == 0).then_some(facts),
    })
}

/// The event of a pooled request.
pub(crate) fn vector_event(vector: Vec<f32>) -> FlightEvent {
    let FlightEvent::Token(mut emission) = plain(0, POOLED_TOKEN) else {
        unreachable!("it is a token");
    };
    if let Some(facts) = &mut emission.prompt {
        facts.pooled = Some(vector.into());
    }
    FlightEvent::Token(emission)
}

/// A token of a request without scores.
pub(crate) fn plain(index: u32, token: TokenId) -> FlightEvent {
    let facts = PromptFacts {
        cached_tokens: CACHED,
        scores: Vec::new(),
        timing: PrefillTiming::default(),
        pooled: None,
    };
    FlightEvent::Token(Emission {
        index,
        sampled: sampled(token, None),
        prompt: (index == 0).then_some(facts),
    })
}

pub(crate) fn done(reason: FinishReason) -> Ending {
    Ending::Done { reason }
}

pub(crate) fn ended(ending: Ending) -> FlightEvent {
    let usage = TokenUsage {
        cached_tokens: CACHED,
        ..TokenUsage::default()
    };
    FlightEvent::Ended {
        ending,
        usage,
        timing: RequestStageTimes::default(),
    }
}

/// Prompt tokens that every flight finds in the prefix cache.
pub(crate) const CACHED: u32 = 3;

/// A server with its scripted frontend and its tokenizer.
pub(crate) struct TestServer {
    pub(crate) frontend: Arc<ScriptedFrontend>,
    pub(crate) app: App,
    pub(crate) router: Router,
    pub(crate) text: ModelText,
}

pub(crate) fn files(name: &str) -> ModelFiles {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    ModelFiles::read(&root.join(name)).unwrap()
}

pub(crate) fn options() -> ApiOptions {
    ApiOptions {
        startup_grace: Duration::ZERO,
        keep_alive: None,
        ..ApiOptions::default()
    }
}

/// Starts a server for the checkpoint `name`.
pub(crate) fn server(name: &str) -> TestServer {
    server_with(files(name), options())
}

pub(crate) fn server_with(files: ModelFiles, options: ApiOptions) -> TestServer {
    let stage = Arc::new(ScriptedFrontend::default());
    let app = App::new(stage.clone(), options);
    app.serve_model(ModelText::new(files.clone()).unwrap());
    TestServer {
        frontend: stage,
        router: app.router(),
        app,
        text: ModelText::new(files).unwrap(),
    }
}

impl TestServer {
    pub(crate) fn tokens(&self, text: &str) -> Vec<TokenId> {
        self.text
            .tokenizer()
            .encode(text, cleave_text::SpecialTokens::Skipped)
            .unwrap()
    }

    /// Scripts the text of the next flight.
    pub(crate) fn script_text(&self, text: &str) {
        self.script_tokens(self.tokens(text), done(FinishReason::Length));
    }

    /// Scripts a flight that ends by itself.
    pub(crate) fn script_stop(&self, text: &str) {
        self.script_tokens(self.tokens(text), done(FinishReason::Stop));
    }

    pub(crate) fn script_tokens(&self, tokens: Vec<TokenId>, ending: Ending) {
        self.frontend
            .scripts
            .lock()
            .unwrap()
            .push_back(FlightScript::Play(tokens, ending));
    }

    /// Scripts a later flight with fixed tokens.
    pub(crate) fn script_default(&self) {
        self.script_tokens(vec![64, 65, 66], done(FinishReason::Length));
    }

    /// Scripts the vector of the next flight.
    pub(crate) fn script_vector(&self, vector: &[f32]) {
        let script = FlightScript::Vector(vector.to_vec());
        self.frontend.scripts.lock().unwrap().push_back(script);
    }

    /// Scripts the vectors of later flights; each waits for a permit of the worker's steps.
    pub(crate) fn script_queued(&self, count: usize, vector: impl Fn(usize) -> Vec<f32>) {
        let queued = (0..count).map(|index| FlightScript::Queued(vector(index)));
        self.frontend.scripts.lock().unwrap().extend(queued);
    }

    /// Number of streams that were submitted and not yet dropped.
    pub(crate) fn open_count(&self) -> usize {
        self.frontend.open.load(Ordering::Relaxed) as usize
    }

    /// Scripts the next flight with the events that the test sends.
    pub(crate) fn script_live(&self) -> UnboundedSender<FlightEvent> {
        let (sender, receiver) = unbounded();
        self.frontend
            .scripts
            .lock()
            .unwrap()
            .push_back(FlightScript::Live(receiver));
        sender
    }

    pub(crate) fn last_submitted(&self) -> Request {
        self.frontend
            .submitted
            .lock()
            .unwrap()
            .last()
            .expect("a submitted request")
            .clone()
    }

    pub(crate) async fn send(&self, request: HttpRequest<Body>) -> HttpAnswer {
        send(self.router.clone(), request).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> HttpAnswer {
        self.send(post(path, body.to_string())).await
    }

    /// The text of a completion's first choice.
    pub(crate) async fn completed_text(&self, body: Value) -> Value {
        let mut answer = self.post("/v1/completions", body).await.json();
        answer["choices"][0]["text"].take()
    }

    /// The body of an answer, of which the test reads one chunk after the other.
    pub(crate) async fn stream(&self, path: &str, body: Value) -> Body {
        let request = post(path, body.to_string());
        respond(self.router.clone(), request).await.into_body()
    }

    pub(crate) async fn get(&self, path: &str) -> HttpAnswer {
        self.send(HttpRequest::get(path).body(Body::empty()).unwrap())
            .await
    }
}

/// Sends a request to the router as from a local connection.
pub(crate) async fn respond(router: Router, mut request: HttpRequest<Body>) -> Response {
    let here = ConnectInfo(SocketAddr::from(([127, 0, 0, 1], 40_000)));
    if request
        .extensions()
        .get::<ConnectInfo<SocketAddr>>()
        .is_none()
    {
        request.extensions_mut().insert(here);
    }
    router.oneshot(request).await.unwrap()
}

/// Sends a request, and waits for the whole answer.
pub(crate) async fn send(router: Router, request: HttpRequest<Body>) -> HttpAnswer {
    let (parts, body) = respond(router, request).await.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    HttpAnswer {
        status: parts.status,
        headers: parts.headers,
        body: String::from_utf8(bytes.to_vec()).unwrap(),
    }
}

pub(crate) fn post(path: &str, body: impl Into<Body>) -> HttpRequest<Body> {
    HttpRequest::builder()
        .method(Method::POST)
        .uri(path)
        .header("content-type", "application/json")
        .body(body.into())
        .unwrap()
}

/// The next chunk of a stream.
pub(crate) async fn next_chunk(body: &mut Body) -> Bytes {
    body.frame().await.unwrap().unwrap().into_data().unwrap()
}

#[derive(Debug)]
pub(crate) struct HttpAnswer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl HttpAnswer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// Returns the payloads of a stream's events, with `[DONE]` as a string.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(
            self.header("content-type"),
            "text/event-stream; charset=utf-8",
            "{self:?}"
        );
        assert!(self.body.ends_with("\n\n"));
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        let payload = |event: &str| match event.strip_prefix("data: ").expect("data only") {
            "[DONE]" => Value::from("[DONE]"),
            json => serde_json::from_str(json).unwrap(),
        };
        events.map(payload).collect()
    }

    /// Returns the text of one choice of a stream.
    pub(crate) fn streamed(&self, index: usize) -> String {
        let events = self.events();
        let choices = events
            .iter()
            .filter_map(|event| event["choices"].get(0).cloned());
        let text = |choice: Value| {
            let text = choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str());
            text.unwrap_or_default().to_owned()
        };
        choices
            .filter(|choice| choice["index"] == index)
            .map(text)
            .collect()
    }

    /// Asserts an error object with this status, code and field.
    #[track_caller]
    pub(crate) fn is_error(&self, status: u16, code: &str, param: Option<&str>) {
        assert_eq!(self.status.as_u16(), status, "{}", self.body);
        let error = &self.json()["error"];
        assert_eq!(error["code"], code, "{}", self.body);
        assert_eq!(error["param"].as_str(), param, "{}", self.body);
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string());
    }
}

/// The routes that take bodies, with the schema of each form of a body, from `/openapi.json`.
pub(crate) fn request_forms(document: &Value) -> Vec<(String, Value)> {
    let mut forms = Vec::new();
    for (route, methods) in document["paths"].as_object().unwrap() {
        let body = &methods["post"]["requestBody"]["content"]["application/json"]["schema"];
        let Some(title) = body["$ref"].as_str() else {
            continue;
        };
        let schema = document.pointer(title.trim_start_matches('#')).unwrap();
        let one = std::slice::from_ref(schema);
        let of_body = schema["oneOf"].as_array().map_or(one, Vec::as_slice);
        forms.extend(of_body.iter().map(|form| (route.clone(), form.clone())));
    }
    forms
}
