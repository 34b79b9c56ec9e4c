//! The LoRA adapters of workers.
//!
//! Owns: which worker serves which adapter, and why one does not. Never: chooses a worker.
//! Invariant: a worker serves an adapter only while it reports no problem with it.

use super::{FleetWorker, RouterFleet};
use cleave_domain::{AdapterId, AdapterOffer, AdapterPlace, Role, WorkerRef};
use std::collections::BTreeMap;

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

    /// The problem that leaves an adapter without a worker. `None` for a passing state: no worker
    /// reports a problem, as while one that joined opens its folder, or every role of those that do
    /// is taken by workers that serve the adapter, which may drain or be stuck.
    pub(crate) fn adapter_problem(&self, adapter: AdapterId) -> Option<&str> {
        let is_served = |has_role: fn(Role) -> bool| {
            let mut workers = self.workers.values();
            workers.any(|of| of.serves(Some(adapter)) && has_role(of.description.role))
        };
        let (is_prefilled, is_decoded) = (is_served(Role::prefills), is_served(Role::decodes));
        self.workers.values().find_map(|worker| {
            let problem = worker.adapter_problems.get(&adapter)?;
            let role = worker.description.role;
            let is_replaced = (is_prefilled || !role.prefills()) && (is_decoded || !role.decodes());
            (!is_replaced).then_some(problem.as_str())
        })
    }
}
