//! The application: its state, and what every route needs of it.
//!
//! Owns: the served model, which may arrive or change while running, body limits, and where long
//! parsing runs. Never: binds a port. Invariant: one request's bad or huge input costs no other
//! request more than its share of the processor.

use crate::admin::Operator;
use crate::body::{BodyMemory, HeldBody};
use crate::error::ApiError;
use crate::frontend::{Frontend, Progress, Readiness};
use crate::gate::{AdminKey, is_json};
use crate::json::Document;
use crate::metrics::Metrics;
use crate::model::ModelText;
use crate::quota::Quotas;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use cleave_domain::Refusal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

/// Bodies from this size on are parsed and tokenized apart from the event loop.
const LONG_BODY_BYTES: usize = 8 * 1024;
/// Requests that wait for the first worker, each with its body and its reservation, at most: no more than the
/// router's queue is long by default.
const OUTSIDE_MAX: u32 = 1024;
/// How often a request that waits for a worker looks again.
const READINESS_PERIOD: Duration = Duration::from_millis(20);

/// Settings of the HTTP face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiOptions {
    /// How long after the start requests wait for a model and a worker before they are refused.
    pub startup_grace: Duration,
    /// The largest body taken, in bytes.
    pub body_bytes_max: usize,
    /// Memory for all bodies that are read at once, in bytes; a body takes four times its length, and at least
    /// one of the largest finds room.
    pub body_memory_bytes: usize,
    /// Called after long bodies, on a thread that may block; `None` leaves freed memory to the allocator.
    pub give_back: Option<GiveBack>,
    /// How long the whole body may take to arrive.
    pub body_wait_max: Duration,
    /// After so long without an event a stream gets a comment; `None` never.
    pub keep_alive: Option<Duration>,
    /// What `/admin` asks for; `None` admits requests of this machine alone.
    pub admin_key: Option<AdminKey>,
    /// Whether what clients ask is logged.
    pub prompts: PromptLog,
}

/// Returns freed memory to the system.
#[derive(Clone, Copy, Debug)]
pub struct GiveBack(pub fn());

impl PartialEq for GiveBack {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}

impl Eq for GiveBack {}

/// See [`ApiOptions::prompts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptLog {
    /// Neither log, span nor metric has text or tokens of a prompt or an answer.
    #[default]
    Hidden,
    /// Bodies of completion requests are logged as they came, and what errors quote of them.
    Shown,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            startup_grace: Duration::from_secs(10),
            body_bytes_max: 8 * 1024 * 1024,
            body_memory_bytes: 64 * 1024 * 1024,
            give_back: None,
            body_wait_max: Duration::from_secs(60),
            keep_alive: Some(Duration::from_secs(15)),
            admin_key: None,
            prompts: PromptLog::default(),
        }
    }
}

/// The HTTP face of one server. Clones are the same server.
#[derive(Clone)]
pub struct App {
    shared: Arc<Shared>,
}

struct Shared {
    frontend: Arc<dyn Frontend>,
    options: ApiOptions,
    model: watch::Sender<Option<Served>>,
    grace_ends: Instant,
    metrics: Arc<Metrics>,
    bodies: BodyMemory,
    long_bodies: Arc<Semaphore>,
    short_renderings: Arc<Semaphore>,
    quotas: Quotas,
    is_leaving: AtomicBool,
    /// Requests that wait for the first worker.
    outside: Mutex<u32>,
}

/// The model, and since when.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) model: Arc<ModelText>,
    pub(crate) since: u64,
}

impl App {
    /// A server without a model yet. The start-up grace begins now.
    pub fn new(frontend: Arc<dyn Frontend>, options: ApiOptions) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Shared {
            frontend,
            bodies: BodyMemory::new(
                options.body_memory_bytes,
                options.body_bytes_max,
                options.give_back.map(|GiveBack(hook)| hook),
            ),
            grace_ends: Instant::now() + options.startup_grace,
            options,
            model: watch::Sender::new(None),
            metrics: Arc::new(Metrics::new()),
            long_bodies: Arc::new(Semaphore::new(cores)),
            short_renderings: Arc::new(Semaphore::new(cores)),
            quotas: Quotas::default(),
            is_leaving: AtomicBool::new(false),
            outside: Mutex::new(0),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Serves this model from now on; requests that have begun keep theirs.
    pub fn serve_model(&self, model: ModelText) {
        let served = Served {
            model: Arc::new(model),
            since: crate::answer::unix_now(),
        };
        self.shared.model.send_replace(Some(served));
    }

    /// Says that it is not ready any more, and serves on: whoever sends requests here needs a while to
    /// notice.
    pub fn leave(&self) {
        self.shared.is_leaving.store(true, Ordering::Release);
    }

    pub(crate) fn frontend(&self) -> &dyn Frontend {
        &*self.shared.frontend
    }

    /// The same, to be kept.
    pub(crate) fn frontend_shared(&self) -> Arc<dyn Frontend> {
        Arc::clone(&self.shared.frontend)
    }

    /// Who sees and commands workers.
    pub(crate) fn operator(&self) -> Arc<dyn Operator> {
        self.shared.frontend.clone()
    }

    /// Who shows how the fleet stands.
    pub(crate) fn shown(&self) -> Arc<dyn Frontend> {
        self.shared.frontend.clone()
    }

    pub(crate) fn options(&self) -> &ApiOptions {
        &self.shared.options
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    pub(crate) fn quotas(&self) -> &Quotas {
        &self.shared.quotas
    }

    pub(crate) fn served(&self) -> Option<Served> {
        self.shared.model.borrow().clone()
    }

    /// Ready means: a model is known, and a request sent now would find a worker.
    pub(crate) fn readiness(&self) -> Readiness {
        if self.shared.is_leaving.load(Ordering::Acquire) {
            return Readiness::Draining;
        }
        match self.served() {
            // Whoever asks waits, and is what the first worker is started for.
            None if self.frontend().patience().is_some() => Readiness::Ready,
            None => Readiness::NotReady("no worker has brought a model yet".into()),
            Some(_) => self.frontend().readiness(),
        }
    }

    /// Requests that wait for a model, with their bodies unread.
    pub(crate) fn outside_count(&self) -> usize {
        *self.outside() as usize
    }

    fn outside(&self) -> MutexGuard<'_, u32> {
        let outside = self.shared.outside.lock();
        outside.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn progress(&self) -> Progress {
        self.frontend().progress()
    }

    /// The model, as soon as there is one.
    pub(crate) async fn wait_for_model(&self) -> Result<Arc<ModelText>, ApiError> {
        if let Some(served) = self.served() {
            return Ok(served.model);
        }
        let patience = self.frontend().patience();
        let _outside = patience.map(|_| Outside::enter(self)).transpose()?;
        let patient = patience.map(|patience| Instant::now() + patience);
        let until = self
            .shared
            .grace_ends
            .max(patient.unwrap_or(self.shared.grace_ends));
        let mut watched = self.shared.model.subscribe();
        let wait = watched.wait_for(Option::is_some);
        let served = tokio::time::timeout_at(until, wait).await;
        let served = served.ok().and_then(|served| served.ok()?.clone());
        let none = || ApiError::unavailable("no_worker", "No worker has brought a model yet.");
        served.map(|served| served.model).ok_or_else(none)
    }

    /// Returns when a request sent now would find a worker.
    pub(crate) async fn wait_for_worker(&self) -> Result<(), ApiError> {
        loop {
            let reason = match self.frontend().readiness() {
                Readiness::Ready => return Ok(()),
                Readiness::NotReady(reason) => reason,
                Readiness::Draining => return Err(ApiError::from(&Refusal::Draining)),
            };
            if Instant::now() >= self.shared.grace_ends {
                let message = format!("Not ready: {reason}.");
                return Err(ApiError::unavailable("no_worker", message));
            }
            tokio::time::sleep(READINESS_PERIOD).await;
        }
    }

    /// The whole body, if it is JSON by name and not too large.
    pub(crate) async fn read_body(
        &self,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<HeldBody, ApiError> {
        if let Some(kind) = headers.get(header::CONTENT_TYPE) {
            let kind = String::from_utf8_lossy(kind.as_bytes());
            if !is_json(&kind) {
                return Err(ApiError::not_json(&kind));
            }
        }
        let bytes_max = self.options().body_bytes_max;
        let reading = self.shared.bodies.read(headers, body, bytes_max);
        let waited = tokio::time::timeout(self.options().body_wait_max, reading).await;
        waited.unwrap_or_else(|_| Err(ApiError::body_too_slow(self.options().body_wait_max)))
    }

    /// Does with a body what `read` does. Work that may take long is done apart from the event loop, as much at
    /// a time as there are cores.
    pub(crate) async fn parse<T: Send + 'static>(
        &self,
        mut body: HeldBody,
        model: Arc<ModelText>,
        work: Work,
        read: fn(&Document, &ModelText) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        self.shared.bodies.resume(&mut body).await?;
        let is_long = body.bytes().len() >= LONG_BODY_BYTES;
        let turns = match (work, is_long) {
            (Work::Reads, false) => return body.parse(|body| read(body, &model)),
            (Work::Renders, false) => &self.shared.short_renderings,
            (_, true) => &self.shared.long_bodies,
        };
        let permit = Arc::clone(turns).acquire_owned().await;
        let work = move || {
            // Held by the work: it goes on when the client has left.
            let _permit = permit;
            body.parse(|body| read(body, &model))
        };
        let result = tokio::task::spawn_blocking(work).await;
        let panicked = |_| ApiError::internal("panicked", "The request could not be read.");
        result.map_err(panicked)?
    }
}

/// The kind of work that a body asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Time in proportion to its length.
    Reads,
    /// A chat template, which does what its author had in mind.
    Renders,
}

/// A request that waits for the first worker; the frontend knows how many do.
struct Outside<'a>(&'a App);

impl<'a> Outside<'a> {
    /// Each holds its body, so there are not too many.
    fn enter(app: &'a App) -> Result<Self, ApiError> {
        let mut outside = app.outside();
        if *outside >= OUTSIDE_MAX {
            let retry_after = crate::RETRY_AFTER;
            return Err(ApiError::from(&Refusal::QueueFull { retry_after }));
        }
        *outside += 1;
        app.frontend().wait_outside(*outside);
        Ok(Self(app))
    }
}

impl Drop for Outside<'_> {
    fn drop(&mut self) {
        let mut outside = self.0.outside();
        *outside -= 1;
        self.0.frontend().wait_outside(*outside);
    }
}
