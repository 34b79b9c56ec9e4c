//! Routes for operators: listing workers and commanding them.
//!
//! Owns: the JSON of `/admin/*`. Never: knows a router or a worker; it talks to an [`Operator`].
//! Invariant: a command for an unknown worker, or an invalid one, is a 4xx that names the field and
//! changes nothing.
//!
//! `gate` decides who may use these routes.

use crate::adapter_routes::{
    AdapterChange, CHANGE_DOC, LOAD_ORDER, UNLOAD_ORDER, load_adapter, unload_adapter,
};
use crate::body::{BodyMemory, parse_json};
use crate::error::ApiError;
use crate::field::{
    JsonFields, ObjectSpec, TextShape, clipped, request_fields, request_object, text as text_field,
};
use crate::gate::{AdminKey, require_operator};
use crate::openapi::{RouteDoc, ServedRoute, serve};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use cleave_domain::{FleetTarget, PoolCounts, Role, ScalingMode, WorkerLoad, WorkerRef};
use cleave_text::json::{Document, JsonShape};
use futures::future::BoxFuture;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Limit of a command's body.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// Memory for the bodies of all commands.
static COMMAND_MEMORY: LazyLock<BodyMemory> = LazyLock::new(|| BodyMemory::of_short(4 << 20));

/// Time limit for the arrival of a command's body.
const BODY_WAIT_MAX: Duration = Duration::from_secs(10);

/// Access to the workers of a fleet.
pub trait Operator: Send + Sync + 'static {
    /// All connected workers, by name.
    fn workers(&self) -> Vec<WorkerView>;

    /// Sends a command to a worker and returns the state that the worker will have.
    ///
    /// # Errors
    /// See [`CommandError`].
    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError>;

    /// Desired number of workers of each model, by its name; none of those for which the policy has
    /// no scaling part.
    fn scaling(&self) -> BTreeMap<String, ScalingView> {
        BTreeMap::new()
    }

    /// Changes the LoRA adapters that the workers of a model serve. The result comes once all of
    /// them have answered, and is the reasons of those that refused. The default refuses.
    fn change_adapter(&self, change: AdapterChange) -> BoxFuture<'static, Result<(), String>> {
        drop(change);
        let reason = "adapters are changed at a router".to_owned();
        Box::pin(std::future::ready(Err(reason)))
    }

    /// The worker that a command without a name addresses; `None` where a name is required.
    fn only_worker(&self) -> Option<String> {
        None
    }
}

/// The desired number of workers and its reasons.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingView {
    /// Whether an autoscaler acts on the number.
    pub mode: ScalingMode,
    /// Workers to start in pools that have none, where a request waits and the fleet is not known
    /// yet.
    pub first: Option<PoolCounts>,
    /// `None` before the fleet is known.
    pub answer: Option<ScalingDecision>,
}

/// The scaling decision; see [`ScalingView::answer`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingDecision {
    /// Desired workers of each pool.
    pub target: FleetTarget,
    /// Whether this router decided; otherwise it repeats the decision of a peer router.
    pub decided_here: bool,
    /// Requests per second, over all routers.
    pub rate: f64,
    /// Prefill workers needed, before rounding and delays.
    pub prefill_load: f64,
    /// Decode workers needed, before rounding and delays.
    pub decode_load: f64,
    /// Waiting requests, over all routers.
    pub waiting: u32,
    /// Workers that are wanted and have not joined yet.
    pub starting: u32,
}

/// A command to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerCommand {
    /// Drain: accept nothing new, move running sequences to other workers, then leave.
    Drain,
    /// Change the role: serve these legs from now on.
    SetRole(Role),
}

/// The reason why a command was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// No worker with this name is connected.
    UnknownWorker,
    /// The worker runs in the process of its router and could not be started again.
    SameProcess,
    /// Earlier commands to the worker are still unanswered.
    Busy,
    Stopped,
}

/// A worker as operators see it.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerView {
    pub name: String,
    /// Served name of its model.
    pub model: String,
    pub worker: WorkerRef,
    /// Legs that it serves.
    pub role: Role,
    /// Whether it accepts work.
    pub state: WorkerState,
    /// Fingerprint: workers exchange KV only if theirs are equal.
    pub fingerprint: String,
    /// Hardware that it uses entirely; workers on the same hardware slow each other down.
    pub device: Option<String>,
    pub load: WorkerLoad,
    /// Median error of its predicted step times, in thousandths; `None` before it has reported
    /// prices.
    pub price_error_permille: Option<u32>,
    pub blocks_count: u32,
    /// Measured links to other workers.
    pub links: Vec<LinkView>,
    /// Counters since it joined, by name.
    pub counters: Vec<(&'static str, u64)>,
}

/// Whether a worker accepts work; see [`WorkerView::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// The worker accepts work.
    Ready,
    /// The worker accepts nothing new and leaves when its sequences have ended.
    Draining,
    /// The worker answers but makes no progress.
    Stuck,
}

impl WorkerState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Stuck => "stuck",
        }
    }
}

/// A link to another worker, as measured when it was made.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkView {
    /// Name of the other worker, or its id if the name is unknown.
    pub peer: String,
    /// Transport of the link.
    pub transport: String,
    /// Payload bandwidth in one direction.
    pub bytes_per_second: u64,
    /// Shortest of several round trips.
    pub latency: Duration,
}

/// Routes `/admin/*` for this operator, protected by this key; without a key only for local
/// requests. The server must insert the address of the peer.
pub fn admin_routes<S>(operator: Arc<dyn Operator>, key: Option<AdminKey>) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    serve(Router::new(), ADMIN_ROUTES)
        .route_layer(from_fn_with_state(key, require_operator))
        .with_state(operator)
}

request_fields! {
    WORKER_FIELDS {
        WORKER: TextShape = text_field(
            "worker",
            TextShape::ANY,
            "Name of the worker. Required at a router, even if only one worker is connected; may be left out at a worker's own port.",
        );
    }
}

request_fields! {
    ROLE_FIELDS {
        ROLE: TextShape = text_field(
            "role",
            TextShape::one_of(&["prefill", "decode", "both"]),
            "Legs that the worker serves from now on.",
        ).required();
    }
}

const WORKER_ORDER: ObjectSpec =
    request_object!("WorkerOrder", &[&[WORKER_FIELDS]]).refusing_unknown();
const ROLE_ORDER: ObjectSpec =
    request_object!("RoleOrder", &[&[WORKER_FIELDS, ROLE_FIELDS]]).refusing_unknown();

const COMMAND_DOC: RouteDoc = RouteDoc {
    status: 202,
    description: "The command was sent to the worker.",
    schema: "Worker",
    errors: &[400, 401, 403, 404, 409, 413, 415, 500, 503],
    ..RouteDoc::GET
};

/// The routes of operators: below `/admin`, and those of adapters.
pub(crate) static ADMIN_ROUTES: &[ServedRoute<Arc<dyn Operator>>] = &[
    ServedRoute {
        path: "/admin/workers",
        handler: || get(workers),
        doc: RouteDoc {
            operation: "workers",
            summary: "List the connected workers.",
            schema: "WorkerList",
            errors: &[401, 403],
            ..RouteDoc::GET
        },
    },
    ServedRoute {
        path: "/admin/scaling",
        handler: || get(scaling),
        doc: RouteDoc {
            operation: "scaling",
            summary: "Desired number of workers, and the reasons.",
            description: "The decision; without `pools` before the fleet is known, or where the policy has no scaling part.",
            schema: "Scaling",
            errors: &[401, 403],
            ..RouteDoc::GET
        },
    },
    ServedRoute {
        path: "/admin/drain",
        handler: || post(drain),
        doc: RouteDoc {
            operation: "drain",
            summary: "Drain a worker: move its sequences to others, then let it leave.",
            request: Some(&WORKER_ORDER),
            ..COMMAND_DOC
        },
    },
    ServedRoute {
        path: "/admin/role",
        handler: || post(role),
        doc: RouteDoc {
            operation: "role",
            summary: "Change which legs a worker serves.",
            request: Some(&ROLE_ORDER),
            ..COMMAND_DOC
        },
    },
    ServedRoute {
        path: "/v1/load_lora_adapter",
        handler: || post(load_adapter),
        doc: RouteDoc {
            operation: "load_adapter",
            summary: "Serve a LoRA adapter from now on, in place of an earlier one of its name.",
            request: Some(&LOAD_ORDER),
            ..CHANGE_DOC
        },
    },
    ServedRoute {
        path: "/v1/unload_lora_adapter",
        handler: || post(unload_adapter),
        doc: RouteDoc {
            operation: "unload_adapter",
            summary: "Serve a LoRA adapter no longer; requests that have it end as usual.",
            request: Some(&UNLOAD_ORDER),
            ..CHANGE_DOC
        },
    },
];

pub(crate) type OperatorState = State<Arc<dyn Operator>>;

async fn workers(State(operator): OperatorState) -> axum::Json<Value> {
    let data: Vec<Value> = operator.workers().iter().map(worker_json).collect();
    axum::Json(serde_json::json!({"object": "list", "data": data}))
}

/// `{"object": "scaling", "mode": "off" | "advise" | "act", "pools": {…}}`; with `reason` in place
/// of `pools` before the fleet is known, and `first` where a request waits then.
async fn scaling(State(operator): OperatorState) -> axum::Json<Value> {
    let views = operator.scaling();
    let mut all = views.values();
    // A fleet of one model has its numbers without the name too.
    let mut object = match (all.next(), all.next()) {
        (None, _) => serde_json::json!({"mode": "off"}),
        (Some(view), None) => scaling_json(view),
        (Some(_), Some(_)) => serde_json::json!({"mode": "by_model"}),
    };
    object["object"] = "scaling".into();
    let models = views.iter();
    let models = models.map(|(model, view)| (model.clone(), scaling_json(view)));
    object["models"] = Value::Object(models.collect());
    axum::Json(object)
}

fn scaling_json(view: &ScalingView) -> Value {
    let ScalingView {
        mode,
        first,
        answer,
    } = view;
    let mut object = serde_json::json!({
        "mode": match mode {
            ScalingMode::Advise => "advise",
            ScalingMode::Act => "act",
        },
    });
    if let Some(answer) = answer {
        let pool = |role| {
            serde_json::json!({
                "wanted": answer.target.workers.for_role(role),
                "legs": answer.target.legs.for_role(role),
                "reason": answer.target.reasons.for_role(role).name(),
            })
        };
        object["pools"] = serde_json::json!({
            "prefill": pool(Role::Prefill),
            "decode": pool(Role::Decode),
            "both": pool(Role::Both),
        });
        object["own"] = answer.decided_here.into();
        object["rate"] = answer.rate.into();
        object["load"] =
            serde_json::json!({"prefill": answer.prefill_load, "decode": answer.decode_load});
        object["waiting"] = answer.waiting.into();
        object["starting"] = answer.starting.into();
    } else {
        let reason = "the router has just started: it decides once its workers had time to connect";
        object["reason"] = reason.into();
    }
    if let Some(first) = first {
        object["first"] = serde_json::json!({
            "prefill": first.prefill,
            "decode": first.decode,
            "both": first.both,
        });
    }
    object
}

async fn drain(
    State(operator): OperatorState,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let order = read_command(&headers, body, &WORKER_ORDER).await?;
    let fields = JsonFields::of_body(&order, &WORKER_ORDER)?;
    run_command(operator.as_ref(), &fields, WorkerCommand::Drain)
}

async fn role(
    State(operator): OperatorState,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let order = read_command(&headers, body, &ROLE_ORDER).await?;
    let fields = JsonFields::of_body(&order, &ROLE_ORDER)?;
    let role = match fields.text(&ROLE)?.as_deref() {
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        Some("both") => Role::Both,
        _ => {
            let message = "`role` must be \"prefill\", \"decode\" or \"both\".";
            return Err(fields.invalid(&ROLE, message));
        }
    };
    run_command(operator.as_ref(), &fields, WorkerCommand::SetRole(role))
}

/// Reads a command, all of whose fields must be declared.
pub(crate) async fn read_command(
    headers: &HeaderMap,
    body: Body,
    spec: &'static ObjectSpec,
) -> Result<Document, ApiError> {
    let reading = COMMAND_MEMORY.read(headers, body, BODY_BYTES_MAX);
    let reading = tokio::time::timeout(BODY_WAIT_MAX, reading).await;
    let held = reading.unwrap_or_else(|_| Err(ApiError::body_too_slow(BODY_WAIT_MAX)))?;
    let order = match held.bytes() {
        b"" => parse_json(b"{}".to_vec())?,
        _ => held.parse(|order| Ok(order.clone()))?,
    };
    let JsonShape::Object(mut members) = order.root().shape() else {
        return Err(ApiError::bad_request("invalid_json", "Send a JSON object."));
    };
    let unknown = members.find_map(|(name, _)| {
        let name = name.get();
        let mut declared = spec.fields();
        let is_known = declared.any(|field| field.name == name);
        (!is_known).then(|| clipped(&name).into_owned())
    });
    match unknown {
        Some(name) => {
            let names: Vec<&str> = spec.fields().map(|field| field.name).collect();
            let message = format!(
                "Unknown field `{name}`; the known fields are {}.",
                names.join(", ")
            );
            Err(ApiError::invalid(name, message))
        }
        None => Ok(order),
    }
}

fn run_command(
    operator: &dyn Operator,
    fields: &JsonFields<'_>,
    command: WorkerCommand,
) -> Result<Response, ApiError> {
    let named = fields.text(&WORKER)?.map(Cow::into_owned);
    let Some(worker) = named.or_else(|| operator.only_worker()) else {
        let message = "Name the `worker`; GET /admin/workers lists them.";
        return Err(fields.invalid(&WORKER, message));
    };
    match operator.command(&worker, command) {
        Ok(view) => Ok((StatusCode::ACCEPTED, axum::Json(worker_json(&view))).into_response()),
        Err(CommandError::UnknownWorker) => Err(ApiError::worker_not_found(&worker)),
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

fn worker_json(view: &WorkerView) -> Value {
    let WorkerView {
        name,
        model,
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
        "model": model,
        "fingerprint": fingerprint,
        "device": device,
        "load": {
            "queue_tokens": load.queue_tokens,
            "sequences_waiting": load.sequences_waiting,
            "sequences_running": load.sequences_running,
            "context_tokens": load.context_tokens,
            "streams": load.streams,
            "backlog_seconds": load.backlog.work_ahead(i32::MAX, None).as_secs_f64(),
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
