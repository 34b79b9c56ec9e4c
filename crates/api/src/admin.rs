//! Routes for operators: who the workers are, and what they are told to do.
//!
//! Owns: the JSON of `/admin/*`. Never: knows a router or a worker; it talks to an [`Operator`].
//! Invariant: a command for a worker that is not there, or that makes no sense, is a 4xx that names
//! the field, and changes nothing.
//!
//! Who may use them is the gate's.

use crate::body::{BodyMemory, json};
use crate::error::ApiError;
use crate::field::{Fields, clipped};
use crate::gate::{AdminKey, guard};
use crate::json::{Document, Shape};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use cleave_domain::{Load, Role, ScalingMode, Wanted, WorkerRef};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// A command is a few words.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// All commands together.
static COMMANDS: LazyLock<BodyMemory> = LazyLock::new(|| BodyMemory::of_short(4 << 20));

/// And is there at once.
const BODY_WAIT_MAX: Duration = Duration::from_secs(10);

/// Whoever can see and command workers.
pub trait Operator: Send + Sync + 'static {
    /// All workers that are connected, by name.
    fn workers(&self) -> Vec<WorkerView>;

    /// Tells a worker to do something; how it will stand comes back.
    ///
    /// # Errors
    /// See [`CommandError`].
    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError>;

    /// How many workers there are to be; none where the policy does not say that the fleet changes.
    fn scaling(&self) -> Option<ScalingView> {
        None
    }

    /// The worker that is meant when none is named; by default one must be named.
    fn sole(&self) -> Option<String> {
        None
    }
}

/// How many workers there are to be, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingView {
    /// Whether anything comes of it.
    pub mode: ScalingMode,
    /// None before the fleet is known.
    pub answer: Option<ScalingAnswer>,
}

/// See [`ScalingView::answer`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingAnswer {
    /// How many.
    pub wanted: Wanted,
    /// Whether this router decided it; otherwise it repeats another one's word.
    pub own: bool,
    /// Requests in a second, of all routers.
    pub rate: f64,
    /// Prefill workers that would do, before anything was rounded or held.
    pub prefill_load: f64,
    /// Decode workers that would do.
    pub decode_load: f64,
    /// Requests that wait, of all routers.
    pub waiting: u32,
    /// Workers that are wanted and not there yet.
    pub starting: u32,
}

/// What a worker can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerCommand {
    /// Take nothing new; what runs moves to others; leave once nothing is left.
    Drain,
    /// Serve these legs from now on.
    Serve(Role),
}

/// Why a command was not passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// No worker of this name is connected.
    Unknown,
    /// It runs in the process of its router: what left could not be started again.
    SameProcess,
    /// It has not answered what it was told, or is too far behind to be told more.
    Busy,
    /// The server is stopping.
    Stopped,
}

/// A worker, as an operator sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerView {
    /// Its name.
    pub name: String,
    /// Its identity and life.
    pub worker: WorkerRef,
    /// Which legs it serves.
    pub role: Role,
    /// What may be expected of it.
    pub state: WorkerState,
    /// With whom it may exchange blocks.
    pub fingerprint: String,
    /// The hardware that it takes all of; workers of the same one slow each other.
    pub device: Option<String>,
    /// How busy it is.
    pub load: Load,
    /// How far its predictions of steps are off of late, in thousandths; none before it has said what
    /// its work costs.
    pub price_error_permille: Option<u32>,
    /// Blocks in its pool.
    pub blocks_count: u32,
    /// Its links to other workers, as far as they have been measured.
    pub links: Vec<LinkView>,
    /// What has been counted of it since it joined.
    pub counters: Vec<(&'static str, u64)>,
}

/// See [`WorkerView::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// It takes what it is given.
    Ready,
    /// It takes nothing new, and leaves when nothing is left.
    Draining,
    /// It answers, and makes no progress.
    Stuck,
}

impl WorkerState {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Stuck => "stuck",
        }
    }
}

/// A link to another worker, as measured at its start.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkView {
    /// The other worker's name; its id if no name is known.
    pub peer: String,
    /// What carries the bytes.
    pub transport: String,
    /// Payload, one way.
    pub bytes_per_second: u64,
    /// The shortest round trip of a few.
    pub latency: Duration,
}

/// `/admin/*` for this operator, behind this key; without one, for requests of this machine alone.
/// The server must say where connections come from.
pub fn admin_routes<S>(operator: Arc<dyn Operator>, key: Option<AdminKey>) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    Router::new()
        .route("/admin/workers", get(workers))
        .route("/admin/drain", post(drain))
        .route("/admin/role", post(role))
        .route("/admin/scaling", get(scaling))
        .route_layer(from_fn_with_state(key, guard))
        .with_state(operator)
}

type Operating = State<Arc<dyn Operator>>;

async fn workers(State(operator): Operating) -> axum::Json<Value> {
    let data: Vec<Value> = operator.workers().iter().map(card).collect();
    axum::Json(serde_json::json!({"object": "list", "data": data}))
}

/// `{"object": "scaling", "mode": "off" | "advise" | "act", "pools": {…}}`; without `pools` where nothing is
/// known yet.
async fn scaling(State(operator): Operating) -> axum::Json<Value> {
    let Some(ScalingView { mode, answer }) = operator.scaling() else {
        return axum::Json(serde_json::json!({"object": "scaling", "mode": "off"}));
    };
    let mut object = serde_json::json!({
        "object": "scaling",
        "mode": match mode {
            ScalingMode::Advise => "advise",
            ScalingMode::Act => "act",
        },
    });
    if let Some(answer) = answer {
        let pool = |role| {
            serde_json::json!({
                "wanted": answer.wanted.workers.of(role),
                "legs": answer.wanted.legs.of(role),
                "reason": answer.wanted.reasons.of(role).name(),
            })
        };
        object["pools"] = serde_json::json!({
            "prefill": pool(Role::Prefill),
            "decode": pool(Role::Decode),
            "both": pool(Role::Both),
        });
        object["own"] = answer.own.into();
        object["rate"] = answer.rate.into();
        object["load"] =
            serde_json::json!({"prefill": answer.prefill_load, "decode": answer.decode_load});
        object["waiting"] = answer.waiting.into();
        object["starting"] = answer.starting.into();
    }
    axum::Json(object)
}

async fn drain(
    State(operator): Operating,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let order = read(&headers, body, &["worker"]).await?;
    let fields = Fields::of_body(&order)?;
    command(operator.as_ref(), &fields, WorkerCommand::Drain)
}

async fn role(
    State(operator): Operating,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let order = read(&headers, body, &["worker", "role"]).await?;
    let fields = Fields::of_body(&order)?;
    let role = match fields.text("role")?.as_deref() {
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        Some("both") => Role::Both,
        _ => {
            let message = "`role` must be \"prefill\", \"decode\" or \"both\".";
            return Err(ApiError::invalid("role", message));
        }
    };
    command(operator.as_ref(), &fields, WorkerCommand::Serve(role))
}

/// A command, whose fields are all `known`.
async fn read(headers: &HeaderMap, body: Body, known: &[&str]) -> Result<Document, ApiError> {
    let reading = COMMANDS.read(headers, body, BODY_BYTES_MAX);
    let reading = tokio::time::timeout(BODY_WAIT_MAX, reading).await;
    let held = reading.unwrap_or_else(|_| Err(ApiError::body_too_slow(BODY_WAIT_MAX)))?;
    let order = match held.bytes() {
        b"" => json(b"{}".to_vec())?,
        _ => held.parse(|order| Ok(order.clone()))?,
    };
    let Shape::Object(mut members) = order.root().shape() else {
        return Err(ApiError::bad_request("invalid_json", "Send a JSON object."));
    };
    let unknown = members.find_map(|(name, _)| {
        let name = name.get();
        (!known.contains(&&*name)).then(|| clipped(&name).into_owned())
    });
    match unknown {
        Some(name) => {
            let message = format!("There is no `{name}` here; known are {}.", known.join(", "));
            Err(ApiError::invalid(name, message))
        }
        None => Ok(order),
    }
}

fn command(
    operator: &dyn Operator,
    fields: &Fields<'_>,
    command: WorkerCommand,
) -> Result<Response, ApiError> {
    let named = fields.text("worker")?.map(Cow::into_owned);
    let Some(worker) = named.or_else(|| operator.sole()) else {
        let message = "Name the `worker`; GET /admin/workers lists them.";
        return Err(ApiError::invalid("worker", message));
    };
    match operator.command(&worker, command) {
        Ok(view) => Ok((StatusCode::ACCEPTED, axum::Json(card(&view))).into_response()),
        Err(CommandError::Unknown) => Err(ApiError::worker_not_found(&worker)),
        Err(CommandError::SameProcess) => Err(ApiError::conflict(
            "same_process",
            format!(
                "`{worker}` runs inside this process and could not be started again. Stop the \
                 process to drain it (SIGTERM), or change the worker's role."
            ),
        )),
        Err(CommandError::Busy) => Err(ApiError::unavailable(
            "worker_busy",
            format!("`{worker}` has not answered earlier commands yet; try again."),
        )),
        Err(CommandError::Stopped) => Err(ApiError::unavailable(
            "draining",
            "The server is shutting down.",
        )),
    }
}

fn card(view: &WorkerView) -> Value {
    let WorkerView {
        name,
        worker,
        role,
        state,
        fingerprint,
        device,
        load,
        price_error_permille,
        blocks_count,
        links,
        counters,
    } = view;
    let link = |link: &LinkView| {
        serde_json::json!({
            "peer": link.peer,
            "transport": link.transport,
            "bytes_per_second": link.bytes_per_second,
            "latency_seconds": link.latency.as_secs_f64(),
        })
    };
    let counted = counters
        .iter()
        .map(|(name, count)| ((*name).to_owned(), (*count).into()));
    serde_json::json!({
        "object": "worker",
        "name": name,
        "id": worker.worker.to_string(),
        "incarnation": worker.incarnation.0,
        "role": role.to_string(),
        "state": state.name(),
        "fingerprint": fingerprint,
        "device": device,
        "load": {
            "queue_tokens": load.queue_tokens,
            "sequences_waiting": load.sequences_waiting,
            "sequences_running": load.sequences_running,
            "context_tokens": load.context_tokens,
            "streams": load.streams,
            "backlog_seconds": load.backlog.ahead(i32::MAX, None).as_secs_f64(),
            "tpot_least_seconds": load.tpot_least.map(|gap| gap.as_secs_f64()),
        },
        "price_error": price_error_permille.map(|error| f64::from(error) / 1e3),
        "blocks": {
            "count": blocks_count,
            "free": load.blocks_free,
            "held": blocks_count.saturating_sub(load.blocks_free),
        },
        "links": links.iter().map(link).collect::<Vec<Value>>(),
        "counters": counted.collect::<Map<String, Value>>(),
    })
}
