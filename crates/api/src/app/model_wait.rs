//! The wait of a request for its model.
//!
//! Owns: how a body tells its model, and the requests that wait for the first worker of one. Never:
//! reads another field. Invariant: each request that waits is counted while it waits, so that an
//! autoscaler starts a worker of its model.

use super::{App, READINESS_PERIOD};
use crate::body::ReservedBody;
use crate::error::ApiError;
use crate::field::clipped;
use crate::frontend::ServedAdapter;
use crate::models::{ListedModels, ModelChoice, RequestedModel};
use cleave_domain::Refusal;
use cleave_text::ModelText;
use parking_lot::MutexGuard;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Limit of requests that wait for the first worker. Each holds its body and its reservation, so
/// the limit equals the default length of the router's queue.
const FIRST_WORKER_WAITS_MAX: u32 = 1024;

impl App {
    /// Finds the name by which a body asks for its model, where there may be several. A long body
    /// is searched on a blocking thread.
    pub(crate) async fn requested_model(
        &self,
        body: ReservedBody,
    ) -> Result<(ReservedBody, RequestedModel), ApiError> {
        if self.has_one_model() {
            return Ok((body, RequestedModel::LeftToReader));
        }
        let is_long = body.is_long();
        let search = move || {
            let requested = RequestedModel::of_body(body.bytes());
            (body, requested)
        };
        if !is_long {
            return Ok(search());
        }
        let searched = tokio::task::spawn_blocking(search).await;
        searched.map_err(|_| ApiError::internal("panicked", "The server failed on this request."))
    }

    /// Whether one model is served, and no worker of another one is expected.
    fn has_one_model(&self) -> bool {
        let is_only = self.shared.models.borrow().iter().count() == 1;
        is_only
            && self.adapters().is_empty()
            && self.options().aliases.is_empty()
            && Instant::now() >= self.shared.grace_ends
            && self.frontend().policy().models.is_empty()
    }

    /// The model that the request is for, if it can be told now.
    pub(crate) fn choose_model(&self, requested: &RequestedModel) -> ModelChoice {
        let listed = self.listed_models();
        let models = self.shared.models.borrow();
        match (models.choose(requested, &listed), requested) {
            (ModelChoice::Found(model), _) => ModelChoice::Found(model),
            (choice, RequestedModel::Named(name)) => {
                let adapter = self.frontend().adapter(name);
                let of_base = adapter.and_then(|adapter| {
                    let base = models.get(&adapter.base)?;
                    Some(base.model.of_adapter(name, adapter.adapter))
                });
                of_base.map_or(choice, |model| ModelChoice::Found(Arc::new(model)))
            }
            (choice, _) => choice,
        }
    }

    /// The error of a request for a model that is not here: it names models and adapters that are.
    pub(crate) fn model_not_found(&self, requested: &str) -> ApiError {
        let adapters = self.adapters().into_iter().map(|adapter| adapter.name);
        let adapters: Vec<String> = adapters.collect();
        let listed = self.listed_models();
        self.models()
            .not_found(&clipped(requested), &listed, &adapters)
    }

    /// The LoRA adapters that workers serve now, by name.
    pub(crate) fn adapters(&self) -> Vec<ServedAdapter> {
        self.frontend().adapters()
    }

    /// The names that requests may use, beside those of the served models.
    pub(crate) fn listed_models(&self) -> ListedModels {
        let policy = self.frontend().policy();
        let served = self.shared.models.borrow();
        ListedModels::of(&policy, &self.options().aliases, &served)
    }

    /// Returns the requested model as soon as a worker has sent it.
    ///
    /// # Errors
    /// 404 if there is no such model, 400 if the request must name one, 503 if none has come in
    /// time. In the start-up grace period workers of another model may still come.
    pub(crate) async fn wait_for_model(
        &self,
        requested: &RequestedModel,
    ) -> Result<Arc<ModelText>, ApiError> {
        let mut watched = self.shared.models.subscribe();
        let begun = Instant::now();
        let mut outside = None;
        loop {
            watched.mark_unchanged();
            let choice = self.choose_model(requested);
            let grace_ends = self.shared.grace_ends;
            let until = match &choice {
                ModelChoice::Found(model) => return Ok(Arc::clone(model)),
                ModelChoice::Unnamed => return Err(self.models().unnamed(&self.listed_models())),
                ModelChoice::Unknown(_) => grace_ends,
                ModelChoice::Awaited(name) => match self.frontend().worker_wait_max(name) {
                    None => grace_ends,
                    Some(patience) => {
                        if outside.is_none() {
                            outside = Some(FirstWorkerWait::begin(self, name)?);
                        }
                        grace_ends.max(begun + patience)
                    }
                },
            };
            // A worker tells its adapters after its model, and nothing announces them here.
            let next = until.min(Instant::now() + READINESS_PERIOD);
            let changed = tokio::time::timeout_at(next, watched.changed()).await;
            if !matches!(changed, Ok(Ok(()))) && Instant::now() >= until {
                return Err(match choice {
                    ModelChoice::Unknown(name) => self.model_not_found(&name),
                    _ if outside.is_some() => no_worker_came(begun.elapsed()),
                    _ => no_model_yet(),
                });
            }
        }
    }

    /// Number of requests that wait for a model, with their bodies unread; of each, by its name.
    pub(crate) fn first_worker_waits_counts(&self) -> BTreeMap<String, u32> {
        self.first_worker_waits().clone()
    }

    fn first_worker_waits(&self) -> MutexGuard<'_, BTreeMap<String, u32>> {
        self.shared.first_worker_waits.lock()
    }
}

/// The error of a request for a model that no worker has brought.
pub(crate) fn no_model_yet() -> ApiError {
    ApiError::unavailable("no_worker", "No worker has brought this model yet.")
}

/// The error of a request whose model has no worker, though one was asked for.
fn no_worker_came(waited: Duration) -> ApiError {
    let message = format!(
        "No worker of this model came within {} s, though one is wanted: /admin/scaling says which, and \
         the autoscaler's log why none started.",
        waited.as_secs()
    );
    ApiError::unavailable("no_worker", message)
}

/// A request that waits for the first worker of a model. The frontend is notified of the number of
/// these.
struct FirstWorkerWait<'a> {
    app: &'a App,
    model: String,
}

impl<'a> FirstWorkerWait<'a> {
    /// Registers the request; beyond the limit it is refused, because each one holds its body.
    fn begin(app: &'a App, model: &str) -> Result<Self, ApiError> {
        let mut outside = app.first_worker_waits();
        if outside.values().sum::<u32>() >= FIRST_WORKER_WAITS_MAX {
            let retry_after = crate::error::RETRY_AFTER;
            return Err(ApiError::from(&Refusal::QueueFull { retry_after }));
        }
        let count = outside.entry(model.to_owned()).or_default();
        *count += 1;
        app.frontend().report_waiting_requests(model, *count);
        let model = model.to_owned();
        Ok(Self { app, model })
    }
}

impl Drop for FirstWorkerWait<'_> {
    fn drop(&mut self) {
        let mut outside = self.app.first_worker_waits();
        let count = outside.entry(self.model.clone()).or_default();
        *count -= 1;
        self.app
            .frontend()
            .report_waiting_requests(&self.model, *count);
        if *count == 0 {
            outside.remove(&self.model);
        }
    }
}
