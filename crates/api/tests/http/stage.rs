//! A scripted [`Frontend`], and a client that speaks to the routes without a socket.

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Method, Request as HttpRequest, StatusCode};
use cleave_api::{
    ApiOptions, App, Board, Caller, CommandError, FlightEvent, FlightStream, Frontend, LinkView,
    ModelFiles, ModelText, Operator, Readiness, Streams, TraceParent, WorkerCommand, WorkerState,
    WorkerView,
};
use cleave_domain::{
    Backlog, Emission, Ending, FinishReason, Load, PrefillTiming, PromptFacts, Request, Role,
    Sampled, Scores, SloPolicy, Timing, TokenId, Usage, WorkerRef,
};
use futures::StreamExt;
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use http_body_util::BodyExt;
use serde_json::Value;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tower::ServiceExt;

/// What a submitted flight does.
pub(crate) enum Script {
    /// These tokens, then this ending.
    Play(Vec<TokenId>, Ending),
    /// Whatever the test sends.
    Live(UnboundedReceiver<FlightEvent>),
    /// This many tokens, then a panic.
    Panic(u32),
}

/// Plays scripts in the order of submission and remembers what was asked.
#[derive(Default)]
pub(crate) struct Stage {
    pub(crate) scripts: Mutex<VecDeque<Script>>,
    pub(crate) submitted: Mutex<Vec<Request>>,
    pub(crate) traces: Mutex<Vec<Option<TraceParent>>>,
    pub(crate) readiness: Mutex<Option<Readiness>>,
    pub(crate) policy: Mutex<Arc<SloPolicy>>,
    /// What `/ui` is shown, and how often it was asked for.
    pub(crate) board: Mutex<Option<Board>>,
    pub(crate) boards_made: AtomicU32,
}

impl Operator for Stage {
    fn workers(&self) -> Vec<WorkerView> {
        vec![worker()]
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let mut view = self::worker();
        match (worker, command) {
            ("d0", WorkerCommand::Drain) => view.state = WorkerState::Draining,
            ("d0", WorkerCommand::Serve(role)) => view.role = role,
            ("near", WorkerCommand::Drain) => return Err(CommandError::SameProcess),
            ("busy", _) => return Err(CommandError::Busy),
            ("gone", _) => return Err(CommandError::Stopped),
            _ => return Err(CommandError::Unknown),
        }
        Ok(view)
    }
}

/// The one worker there is.
fn worker() -> WorkerView {
    let mut backlog = Backlog::default();
    backlog.add(0, None, Duration::from_millis(500));
    backlog.add(1, Some(Duration::ZERO), Duration::from_millis(250));
    WorkerView {
        name: "d0".into(),
        worker: WorkerRef::default(),
        role: Role::Decode,
        state: WorkerState::Ready,
        fingerprint: "tiny".into(),
        device: Some("cores 0-1".into()),
        load: Load {
            blocks_free: 30,
            sequences_running: 2,
            context_tokens: 500,
            streams: 2,
            backlog,
            tpot_least: Some(Duration::from_millis(20)),
            ..Load::default()
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

impl Frontend for Stage {
    fn submit(&self, request: Request) -> FlightStream {
        let script = self
            .scripts
            .lock()
            .unwrap()
            .pop_front()
            .expect("a script for this flight");
        let stream = match script {
            Script::Play(tokens, ending) => {
                let events = tokens.into_iter().enumerate();
                let events = events.map(|(index, token)| event(&request, index as u32, token));
                let events: Vec<_> = events.chain([ended(ending)]).collect();
                futures::stream::iter(events).boxed()
            }
            Script::Live(events) => events.boxed(),
            Script::Panic(count) => {
                let tokens: Vec<_> = (0..count).map(|index| event(&request, index, 5)).collect();
                let bug = futures::stream::poll_fn(|_| panic!("a bug in the serving side"));
                futures::stream::iter(tokens).chain(bug).boxed()
            }
        };
        self.submitted.lock().unwrap().push(request);
        stream
    }

    fn submit_for(&self, request: Request, caller: Caller) -> FlightStream {
        self.traces.lock().unwrap().push(caller.trace);
        self.submit(request)
    }

    fn streams(&self) -> Streams {
        Streams {
            open: 3,
            max: Some(8),
        }
    }

    fn readiness(&self) -> Readiness {
        let said = self.readiness.lock().unwrap().clone();
        said.unwrap_or(Readiness::Ready)
    }

    fn policy(&self) -> Arc<SloPolicy> {
        self.policy.lock().unwrap().clone()
    }

    fn board(&self) -> Option<Board> {
        self.boards_made.fetch_add(1, Ordering::Relaxed);
        self.board.lock().unwrap().clone()
    }

    fn metrics(&self) -> String {
        "# TYPE cleave_steps counter\ncleave_steps_total 7\n".into()
    }
}

/// Scores that are easy to check: every log-probability is -(rank + 1).
fn scores(token: TokenId, top: u32) -> Scores {
    let others = (0..top).map(|rank| (token + rank, 9.0 - rank as f32));
    Scores {
        normalizer: 10.0,
        chosen: 9.0,
        top: others.collect(),
    }
}

fn sampled(token: TokenId, wanted: Option<u32>) -> Sampled {
    let scores = wanted.map(|top| scores(token, top));
    Sampled { token, scores }
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
    };
    FlightEvent::Token(Emission {
        index,
        sampled: sampled(token, request.sampling.logprobs),
        prompt: (index == 0).then_some(facts),
    })
}

/// A token of a request that wants no scores.
pub(crate) fn plain(index: u32, token: TokenId) -> FlightEvent {
    let facts = PromptFacts {
        cached_tokens: CACHED,
        scores: Vec::new(),
        timing: PrefillTiming::default(),
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

/// The flight's last event.
pub(crate) fn ended(ending: Ending) -> FlightEvent {
    let usage = Usage {
        cached_tokens: CACHED,
        ..Usage::default()
    };
    FlightEvent::Ended {
        ending,
        usage,
        timing: Timing::default(),
    }
}

/// Prompt tokens that every flight found in the prefix cache.
pub(crate) const CACHED: u32 = 3;

/// Everything a test needs.
pub(crate) struct Set {
    pub(crate) stage: Arc<Stage>,
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

/// A server of the checkpoint `name`.
pub(crate) fn set(name: &str) -> Set {
    set_with(files(name), options())
}

pub(crate) fn set_with(files: ModelFiles, options: ApiOptions) -> Set {
    let stage = Arc::new(Stage::default());
    let app = App::new(stage.clone(), options);
    app.serve_model(ModelText::new(files.clone()).unwrap());
    Set {
        stage,
        router: app.router(),
        app,
        text: ModelText::new(files).unwrap(),
    }
}

impl Set {
    pub(crate) fn tokens(&self, text: &str) -> Vec<TokenId> {
        self.text
            .encode(text, cleave_api::Special::Skipped)
            .unwrap()
    }

    /// Lets the next flight say this.
    pub(crate) fn says(&self, text: &str) {
        self.plays(self.tokens(text), done(FinishReason::Length));
    }

    pub(crate) fn plays(&self, tokens: Vec<TokenId>, ending: Ending) {
        self.stage
            .scripts
            .lock()
            .unwrap()
            .push_back(Script::Play(tokens, ending));
    }

    /// Lets a later flight answer whatever is asked.
    pub(crate) fn says_later(&self) {
        self.plays(vec![64, 65, 66], done(FinishReason::Length));
    }

    /// Lets the next flight say what is sent.
    pub(crate) fn live(&self) -> UnboundedSender<FlightEvent> {
        let (sender, receiver) = unbounded();
        self.stage
            .scripts
            .lock()
            .unwrap()
            .push_back(Script::Live(receiver));
        sender
    }

    pub(crate) fn asked(&self) -> Request {
        self.stage
            .submitted
            .lock()
            .unwrap()
            .last()
            .expect("a submitted request")
            .clone()
    }

    pub(crate) async fn send(&self, request: HttpRequest<Body>) -> Answer {
        send(self.router.clone(), request).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(post(path, body.to_string())).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(HttpRequest::get(path).body(Body::empty()).unwrap())
            .await
    }
}

/// Through a router, as a connection from this machine would be.
pub(crate) async fn send(router: Router, request: HttpRequest<Body>) -> Answer {
    let mut request = request;
    let here = ConnectInfo(SocketAddr::from(([127, 0, 0, 1], 40_000)));
    if request
        .extensions()
        .get::<ConnectInfo<SocketAddr>>()
        .is_none()
    {
        request.extensions_mut().insert(here);
    }
    let response = router.oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    Answer {
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

/// A response read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// The payloads of a stream's events, `[DONE]` included as a string.
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

    /// The text of one choice of a stream.
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
