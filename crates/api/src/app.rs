//! The application: the state that every route shares.
//!
//! Owns: the served models, which may arrive or change while running; the body limits; the choice
//! of the thread that parses a body. Never: binds a port. Invariant: a bad or huge request takes no
//! more than its share of the processor from the others.

mod model_wait;
mod output_options;

pub(crate) use model_wait::no_model_yet;
pub use output_options::{OutputOptions, ParserChoice};

use crate::access_line::AccessLog;
use crate::admin::Operator;
use crate::body::{BodyMemory, ReservedBody, drain_refused_body};
use crate::body_work::BodyWork;
use crate::constraint_check::ConstraintChecks;
use crate::cross_origin::AllowedOrigin;
use crate::error::ApiError;
use crate::frontend::{Frontend, ServingProgress, ServingReadiness};
use crate::gate::{AdminKey, is_json, require_plain_body};
use crate::memory_budget::{SharedMemoryBudget, TemplateMemory, units};
use crate::metrics::HttpMetrics;
use crate::models::ServedModels;
use crate::quota::Quotas;
use crate::request::GenerateRequest;
use crate::response_store::{ResponsePeers, ResponseStore, ResponseStoreLimits, router_digits};
use axum::body::Body;
use axum::http::{HeaderMap, header};
use cleave_domain::Refusal;
use cleave_text::json::Document;
use cleave_text::{ModelTask, ModelText};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

/// Interval at which a request that waits for a worker checks the readiness again.
const READINESS_PERIOD: Duration = Duration::from_millis(20);
/// Time limit of the wait for the capacity of the first worker. It joins right after its model is
/// known.
const CAPACITY_WAIT_MAX: Duration = Duration::from_secs(1);

/// Settings of the HTTP side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiOptions {
    /// Time after the start during which requests wait for a model and a worker instead of being
    /// refused.
    pub startup_grace: Duration,
    /// Limit of one body, in bytes.
    pub body_bytes_max: usize,
    /// Memory for all bodies that are read at the same time, in bytes. A body takes four times its
    /// length. A quarter is for bodies of at most 64 KiB; longer ones share the rest, in which one
    /// body of the maximum length always fits.
    pub body_memory_bytes: usize,
    /// Memory for all chat templates that are rendered at the same time, for texts in the
    /// `tokenizers` library and for lists of tokens, in bytes. One rendering of the largest body
    /// always fits.
    pub template_memory_bytes: usize,
    /// Memory for the vectors of all requests that are being answered, in bytes; 4 for each number.
    pub vector_memory_bytes: usize,
    /// Time limit of a request for vectors that waits for others, as of one in the router's queue.
    pub queue_wait_max: Duration,
    /// Time limit for the arrival of a whole body.
    pub body_wait_max: Duration,
    /// Silence after which a stream gets a comment; `None` sends no comments.
    pub keep_alive: Option<Duration>,
    /// Key that `/admin` and `/ui` require; with `None` they accept only requests of this machine.
    pub admin_key: Option<AdminKey>,
    /// Whether the bodies of completion requests are logged.
    pub prompts: PromptLog,
    /// Whether each request is logged.
    pub access_log: AccessLog,
    /// Formats of outputs, if they are not those of the model's chat template.
    pub outputs: OutputOptions,
    /// Limits of stored responses.
    pub responses: ResponseStoreLimits,
    /// Further names of the model, where only one is served.
    pub aliases: Vec<String>,
    /// Origins whose pages may call the API from a browser. Default none.
    pub allowed_origins: Vec<AllowedOrigin>,
}

/// Whether prompts appear in logs; see [`ApiOptions::prompts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptLog {
    /// No log, span or metric contains text or tokens of a prompt or an answer.
    #[default]
    Hidden,
    /// Logs contain the bodies of completion requests and the parts of them that errors quote.
    Shown,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            startup_grace: Duration::from_secs(10),
            body_bytes_max: 8 * 1024 * 1024,
            body_memory_bytes: 64 * 1024 * 1024,
            template_memory_bytes: 256 * 1024 * 1024,
            vector_memory_bytes: 256 * 1024 * 1024,
            queue_wait_max: Duration::from_secs(30),
            body_wait_max: Duration::from_secs(60),
            keep_alive: Some(Duration::from_secs(15)),
            admin_key: None,
            prompts: PromptLog::default(),
            access_log: AccessLog::default(),
            outputs: OutputOptions::default(),
            responses: ResponseStoreLimits::default(),
            aliases: Vec::new(),
            allowed_origins: Vec::new(),
        }
    }
}

/// The HTTP side of one server. Clones share one server.
#[derive(Clone)]
pub struct App {
    shared: Arc<AppState>,
}

struct AppState {
    frontend: Arc<dyn Frontend>,
    options: ApiOptions,
    models: watch::Sender<ServedModels>,
    grace_ends: Instant,
    metrics: Arc<HttpMetrics>,
    bodies: BodyMemory,
    templates: TemplateMemory,
    vectors: SharedMemoryBudget,
    long_body_turns: Arc<Semaphore>,
    short_rendering_turns: Arc<Semaphore>,
    quotas: Quotas,
    constraint_checks: ConstraintChecks,
    responses: ResponseStore,
    is_draining: AtomicBool,
    /// Number of requests that wait for the first worker of a model, by its name; by no name where
    /// no model is known.
    first_worker_waits: Mutex<BTreeMap<String, u32>>,
}

impl App {
    /// Creates a server without a model. The start-up grace period begins now.
    pub fn new(frontend: Arc<dyn Frontend>, options: ApiOptions) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let metrics = Arc::new(HttpMetrics::new());
        let shared = AppState {
            frontend,
            responses: ResponseStore::new(options.responses, metrics.stored_responses()),
            bodies: BodyMemory::new(options.body_memory_bytes, options.body_bytes_max),
            templates: TemplateMemory::new(options.template_memory_bytes, options.body_bytes_max),
            vectors: SharedMemoryBudget::new(units(options.vector_memory_bytes)),
            grace_ends: Instant::now() + options.startup_grace,
            options,
            models: watch::Sender::new(ServedModels::default()),
            metrics,
            long_body_turns: Arc::new(Semaphore::new(cores)),
            short_rendering_turns: Arc::new(Semaphore::new(cores)),
            quotas: Quotas::default(),
            constraint_checks: ConstraintChecks::new(cores),
            is_draining: AtomicBool::new(false),
            first_worker_waits: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Serves this model from now on, in place of an earlier one of its name; requests that have
    /// begun keep theirs.
    pub fn serve_model(&self, mut model: ModelText) {
        model.set_output_formats(self.shared.options.outputs.formats(&model));
        let since = crate::surface::unix_now();
        let models = &self.shared.models;
        models.send_modify(|models| models.serve(model, since));
    }

    /// Serves the model of this name no longer; a request for it is answered 404 from now on.
    pub fn retire_model(&self, name: &str) {
        let models = &self.shared.models;
        models.send_modify(|models| models.retire(name));
    }

    /// Asks these routers for stored responses that are not here.
    pub fn ask_peers(&self, peers: Arc<dyn ResponsePeers>) {
        self.shared.responses.ask_peers(peers);
    }

    /// Reports "not ready" from now on and keeps serving, because load balancers need time to
    /// notice.
    pub fn start_draining(&self) {
        self.shared.is_draining.store(true, Ordering::Release);
    }

    pub(crate) fn frontend(&self) -> &dyn Frontend {
        &*self.shared.frontend
    }

    /// Returns the frontend as a shared pointer.
    pub(crate) fn frontend_shared(&self) -> Arc<dyn Frontend> {
        Arc::clone(&self.shared.frontend)
    }

    /// Returns the frontend as the operator that lists and commands workers.
    pub(crate) fn operator(&self) -> Arc<dyn Operator> {
        self.shared.frontend.clone()
    }

    /// Returns the frontend as the source of the fleet's state for `/ui`.
    pub(crate) fn snapshot_source(&self) -> Arc<dyn Frontend> {
        self.shared.frontend.clone()
    }

    pub(crate) fn options(&self) -> &ApiOptions {
        &self.shared.options
    }

    pub(crate) fn metrics(&self) -> &Arc<HttpMetrics> {
        &self.shared.metrics
    }

    pub(crate) fn quotas(&self) -> &Quotas {
        &self.shared.quotas
    }

    pub(crate) fn constraint_checks(&self) -> &ConstraintChecks {
        &self.shared.constraint_checks
    }

    pub(crate) fn responses(&self) -> &ResponseStore {
        &self.shared.responses
    }

    /// The digits that stand for this router in the ids of its responses.
    pub(crate) fn router_digits(&self) -> String {
        router_digits(self.frontend().router_number())
    }

    /// The models as they are now.
    pub(crate) fn models(&self) -> ServedModels {
        self.shared.models.borrow().clone()
    }

    /// Reports whether a model is known and a request for one of them sent now would find a worker.
    /// A model without workers does not take its router from the others.
    pub fn readiness(&self) -> ServingReadiness {
        if self.shared.is_draining.load(Ordering::Acquire) {
            return ServingReadiness::Draining;
        }
        let models = self.models();
        let all = models
            .iter()
            .map(|served| self.readiness_for(&served.model));
        let best = all.min_by_key(|readiness| match readiness {
            ServingReadiness::Ready => 0,
            ServingReadiness::PromptsOnly(_) | ServingReadiness::NotReady(_) => 1,
            ServingReadiness::Draining => 2,
        });
        match best {
            Some(readiness) => readiness,
            // A fleet that starts with the first request is ready without a model: the waiting
            // request itself causes the first worker to start.
            None if self.starts_workers() => ServingReadiness::Ready,
            None => ServingReadiness::NotReady("no worker has brought a model yet".into()),
        }
    }

    /// Whether a request for each model, sent now, would find a worker.
    pub fn is_ready_for_all(&self) -> bool {
        let models = self.models();
        models
            .iter()
            .all(|served| self.readiness_for(&served.model) == ServingReadiness::Ready)
    }

    /// Whether a request for some model that no worker has brought yet would start one.
    fn starts_workers(&self) -> bool {
        let policy = self.frontend().policy();
        let listed = policy.models.iter().map(|listed| listed.name.as_str());
        let waits = |model: &str| self.frontend().worker_wait_max(model).is_some();
        listed.chain([""]).any(waits)
    }

    /// Reports whether a request for this model would find a worker. A model that is served for
    /// vectors needs no worker that decodes.
    pub(crate) fn readiness_for(&self, model: &ModelText) -> ServingReadiness {
        match self.frontend().readiness(model.base_name()) {
            ServingReadiness::PromptsOnly(reason) => match model.task() {
                ModelTask::Embed(_) | ModelTask::Rerank(_) => ServingReadiness::Ready,
                ModelTask::Generate => ServingReadiness::NotReady(reason),
            },
            readiness => readiness,
        }
    }

    pub(crate) fn progress(&self) -> ServingProgress {
        self.frontend().progress()
    }

    /// Waits until a request for this model would find a worker.
    pub(crate) async fn wait_for_worker(&self, model: &ModelText) -> Result<(), ApiError> {
        loop {
            let reason = match self.readiness_for(model) {
                ServingReadiness::Ready => return Ok(()),
                ServingReadiness::NotReady(reason) | ServingReadiness::PromptsOnly(reason) => {
                    reason
                }
                ServingReadiness::Draining => return Err(ApiError::from(&Refusal::Draining)),
            };
            if Instant::now() >= self.shared.grace_ends {
                let message = format!("Not ready: {reason}.");
                return Err(ApiError::unavailable("no_worker", message));
            }
            tokio::time::sleep(READINESS_PERIOD).await;
        }
    }

    /// Waits for the turn of a request for vectors, until its permit is dropped.
    ///
    /// # Errors
    /// 429 after [`ApiOptions::queue_wait_max`], or if too many requests wait.
    pub(crate) async fn wait_for_turn(
        &self,
        ask: &GenerateRequest,
        model: &ModelText,
    ) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        if ask.pooling.is_none() {
            return Ok(None);
        }
        let wait_max = self.options().queue_wait_max;
        let served = self.models().get(model.base_name()).cloned();
        let Some(served) = served else {
            return Ok(None);
        };
        let turns = &served.input_turns;
        turns.wait(ask.prompts.len(), wait_max).await.map(Some)
    }

    /// Reserves memory for the vectors of a request, until its answer was sent.
    pub(crate) async fn reserve_vectors(
        &self,
        ask: &GenerateRequest,
        model: &ModelText,
    ) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let Some(pooling) = &ask.pooling else {
            return Ok(None);
        };
        let width = pooling.width(model.hidden_size().unwrap_or(0) as usize);
        let bytes = ask.prompts.len() * width * size_of::<f32>();
        let bytes_max = self.options().vector_memory_bytes;
        if bytes > bytes_max {
            let message = format!(
                "{} vectors of {width} numbers take {bytes} bytes, more than `--vector-memory`, \
                 {bytes_max}; send fewer texts at a time.",
                ask.prompts.len()
            );
            return Err(ApiError::bad_request("too_many_vectors", message));
        }
        let reserved = self.shared.vectors.reserve(bytes).await;
        reserved.map(Some).map_err(|_| ApiError::vectors_full())
    }

    /// Returns the tokens of the longest sequence that a worker of the model can hold, if that is
    /// known. Waits a moment where requests start workers, because such a request may know the
    /// model of the first worker before its capacity.
    pub(crate) async fn sequence_tokens_max(&self, model: &ModelText) -> Option<u32> {
        let until = Instant::now() + CAPACITY_WAIT_MAX;
        loop {
            let known = self.frontend().sequence_tokens_max(model.base_name());
            let starts = self.frontend().worker_wait_max(model.base_name()).is_some();
            let is_awaited = starts && Instant::now() < until;
            if known.is_some() || !is_awaited {
                return known;
            }
            tokio::time::sleep(READINESS_PERIOD).await;
        }
    }

    /// Reads the whole body, if it is unencoded JSON by its headers and its size is within the
    /// limit.
    pub(crate) async fn read_body(
        &self,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<ReservedBody, ApiError> {
        if let Some(kind) = headers.get(header::CONTENT_TYPE) {
            let kind = String::from_utf8_lossy(kind.as_bytes());
            if !is_json(&kind) {
                return Err(ApiError::not_json(&kind));
            }
        }
        if let Err(error) = require_plain_body(headers) {
            drain_refused_body(headers, body).await;
            return Err(error);
        }
        let bytes_max = self.options().body_bytes_max;
        let reading = self.shared.bodies.read(headers, body, bytes_max);
        let waited = tokio::time::timeout(self.options().body_wait_max, reading).await;
        waited.unwrap_or_else(|_| Err(ApiError::body_too_slow(self.options().body_wait_max)))
    }

    /// Calls `read` with the parsed body. Long work runs on blocking threads, at most one job per
    /// core.
    pub(crate) async fn parse<T: Send + 'static>(
        &self,
        body: ReservedBody,
        model: Arc<ModelText>,
        work: BodyWork,
        read: impl FnOnce(&Document, &ModelText) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let parsed = self.parse_keeping(body, model, work, read, |_| 0).await?;
        Ok(parsed.0)
    }

    /// As [`Self::parse`]; `kept_bytes` of the body's memory stay reserved until the permit is
    /// dropped.
    pub(crate) async fn parse_keeping<T: Send + 'static>(
        &self,
        mut body: ReservedBody,
        model: Arc<ModelText>,
        work: BodyWork,
        read: impl FnOnce(&Document, &ModelText) -> Result<T, ApiError> + Send + 'static,
        kept_bytes: impl FnOnce(&T) -> usize + Send + 'static,
    ) -> Result<(T, Option<OwnedSemaphorePermit>), ApiError> {
        self.shared.bodies.reserve_parse_memory(&mut body).await?;
        let is_long = body.is_long();
        let turns = match (work, is_long) {
            (BodyWork::ParseOnly, false) => {
                return body.parse_keeping(|body| read(body, &model), kept_bytes);
            }
            (_, false) => &self.shared.short_rendering_turns,
            (_, true) => &self.shared.long_body_turns,
        };
        let permit = Arc::clone(turns).acquire_owned().await;
        let templates = &self.shared.templates;
        let memory = templates.reserve(body.len(), work, &model);
        let memory = memory.await?;
        let work = move || {
            // The closure owns the reservation, because it runs on after the client has
            // disconnected.
            let _held = (permit, memory);
            body.parse_keeping(|body| read(body, &model), kept_bytes)
        };
        let result = tokio::task::spawn_blocking(work).await;
        let panicked =
            |_| ApiError::internal("panicked", "The server failed while it read the request.");
        result.map_err(panicked)?
    }
}

#[cfg(test)]
mod tests;
