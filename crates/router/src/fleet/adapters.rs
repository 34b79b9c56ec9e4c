//! The LoRA adapters of workers.
//!
//! Owns: which worker serves which adapter, and why one does not. Never: chooses a worker.
//! Invariant: a worker serves an adapter only while it reports no problem with it.

use super::{FleetWorker, RouterFleet};
use cleave_domain::{AdapterId, AdapterOffer, AdapterPlace, WorkerRef};
use std::collections::BTreeMap;

/// The reason why an adapter has no worker that nothing more is known of.
const NOT_SERVED: &str =
    "no connected worker serves it; one that joined just now may still open it";

impl FleetWorker {
    /// Whether it serves requests with this adapter; every worker serves the model alone.
    pub(crate) fn serves(&self, adapter: Option<AdapterId>) -> bool {
        adapter.is_none_or(|adapter| self.adapters.contains_key(&adapter))
    }

    /// The place of the adapter of a request; one without needs none to be loaded.
    pub(crate) fn adapter_place(&self, adapter: Option<AdapterId>) -> AdapterPlace {
        let place = adapter.and_then(|adapter| self.adapters.get(&adapter));
        place.copied().unwrap_or(AdapterPlace::Resident)
    }
}

impl RouterFleet {
    /// Stores the adapters that a worker serves.
    pub(crate) fn set_adapters(&mut self, worker_ref: WorkerRef, offers: &[AdapterOffer]) {
        let Some(worker) = self.get_mut(worker_ref) else {
            return;
        };
        let (broken, served): (Vec<_>, Vec<_>) =
            offers.iter().partition(|offer| offer.problem.is_some());
        let served = served.iter().map(|offer| (offer.adapter, offer.place));
        let served: BTreeMap<AdapterId, AdapterPlace> = served.collect();
        let problem = |offer: &AdapterOffer| Some((offer.adapter, offer.problem.clone()?));
        let problems = broken.into_iter().filter_map(problem).collect();
        let are_others = !served.keys().eq(worker.adapters.keys());
        (worker.adapters, worker.adapter_problems) = (served, problems);
        // Adapters decide which workers can serve a request.
        self.version += u64::from(are_others);
    }

    /// Why an adapter has no placement: a worker reports a problem with it, or all workers have
    /// others; `None` if the reason is another one.
    pub(crate) fn adapter_problem(&self, adapter: AdapterId) -> Option<&str> {
        let mut workers = self.workers.values();
        let problem = workers.find_map(|worker| worker.adapter_problems.get(&adapter));
        let serves = |worker: &FleetWorker| worker.serves(Some(adapter));
        let is_served = self.workers.is_empty() || self.workers.values().any(serves);
        let other = (!is_served).then_some(NOT_SERVED);
        problem.map(String::as_str).or(other)
    }
}
