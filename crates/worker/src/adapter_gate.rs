//! The adapters of a worker: their names, and the work that its machine of adapters asks for.
//!
//! Owns: the names, and loads under way. Never: reads a file on the driver's thread; decides which
//! adapter leaves, which [`AdapterAdmission`] does.
//! Invariant: work on adapters begins in the order in which it was asked for.

mod changes;

pub(crate) use changes::{AdapterChangeQueue, QueuedAdapterChange};

use super::constraint_gate::RouterOrder;
use cleave_domain::{
    AdapterChangeId, AdapterCommand, AdapterId, AdapterOffer, AdapterPlace, AdapterReport, Order,
    Report, RouterId, UnloadedAdapter,
};
use cleave_engine::{AdapterError, AdapterFacts, AdapterMemory};
use cleave_sched::{
    AdapterAdmission, AdapterLimits, AdapterPassage, AdapterState, AdapterWork, LoadOutcome,
    LoadSource,
};
use cleave_telemetry::AdapterUse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

/// Names that were unloaded, at most, that a worker remembers; the changes that came first are
/// forgotten first.
const UNLOADED_MAX: usize = 1024;

/// Names that a worker serves, at most: those that a report has room for.
const NAMES_MAX: usize = 4096;

/// The adapters of a worker, and the orders that wait for one.
pub(crate) struct AdapterGate {
    memory: Option<Arc<dyn AdapterMemory>>,
    admission: AdapterAdmission<RouterOrder>,
    /// Contents that the names stand for.
    names: BTreeMap<String, NamedAdapter>,
    /// Names that were unloaded, each with the change that did so.
    unloaded: BTreeMap<String, AdapterChangeId>,
    events: mpsc::UnboundedSender<AdapterEvent>,
    /// The folder below which routers may name adapters; `None` if they may name none.
    root: Option<PathBuf>,
}

/// An adapter that a worker serves, or would if it could load it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedAdapter {
    /// The folder that it was read from.
    folder: PathBuf,
    /// The folder as the command named it that loaded it; `None` for one of the worker's start.
    loaded_from: Option<String>,
    /// The change that gave it the name; `None` for one of the worker's start.
    change: Option<AdapterChangeId>,
    /// The content of the folder when it was opened.
    adapter: AdapterId,
    /// Why it cannot be loaded. The admission knows the adapter only if there is no such reason.
    problem: Option<String>,
}

/// The end of work on an adapter that was done beside the driver.
#[derive(Debug)]
pub(crate) enum AdapterEvent {
    /// A load has ended.
    Loaded {
        adapter: AdapterId,
        outcome: Result<(), AdapterError>,
    },
    /// A folder was opened, or refused with the reason.
    Opened {
        request: OpenRequest,
        outcome: Result<(PathBuf, AdapterFacts), String>,
    },
}

/// A router's request to serve the adapter in a folder.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    pub(crate) router: RouterId,
    /// The number that the answer names.
    pub(crate) number: u64,
    /// Its place among all changes.
    pub(crate) change: AdapterChangeId,
    pub(crate) name: String,
    pub(crate) folder: String,
    /// The content that the folder must have; `None` for whatever it has.
    pub(crate) content: Option<AdapterId>,
}

/// The way of an order at the gate.
#[derive(Debug)]
pub(crate) enum Passage {
    /// It need not wait.
    Open(RouterOrder),
    /// It waits until its adapter is loaded.
    Held,
    /// It is refused, and leaves nothing behind.
    Refused(RouterId, Report),
}

impl AdapterGate {
    /// Gives the gate, and the ends of its work. Routers may name folders below `root`.
    pub(crate) fn new(
        memory: Option<Arc<dyn AdapterMemory>>,
        limits: AdapterLimits,
        root: Option<PathBuf>,
    ) -> (Self, mpsc::UnboundedReceiver<AdapterEvent>) {
        let (events, ends) = mpsc::unbounded_channel();
        let gate = Self {
            memory,
            admission: AdapterAdmission::new(limits),
            names: BTreeMap::new(),
            unloaded: BTreeMap::new(),
            events,
            root,
        };
        (gate, ends)
    }

    /// Whether the engine applies adapters.
    pub(crate) fn is_capable(&self) -> bool {
        self.memory.is_some()
    }

    // === names ===

    /// Serves an open adapter under a name from the start.
    pub(crate) fn serve(&mut self, name: &str, folder: &Path, facts: AdapterFacts) {
        let named = NamedAdapter {
            folder: folder.to_owned(),
            loaded_from: None,
            change: None,
            adapter: facts.adapter,
            problem: None,
        };
        self.name(name, named);
    }

    /// Refuses a new name where the worker has as many as a report may have.
    pub(crate) fn check_room(&self, command: &AdapterCommand) -> Result<(), String> {
        let AdapterCommand::Load { name, .. } = command else {
            return Ok(());
        };
        if self.names.len() < NAMES_MAX || self.names.contains_key(name) {
            return Ok(());
        }
        Err(format!(
            "it serves {NAMES_MAX} adapters, the most that a worker may: unload one first"
        ))
    }

    /// Refuses a change of a name that a later change was carried out for.
    pub(crate) fn check_order(&self, name: &str, change: AdapterChangeId) -> Result<(), String> {
        let named = self.names.get(name).and_then(|named| named.change);
        let last = named.max(self.unloaded.get(name).copied());
        match last.filter(|last| *last > change) {
            None => Ok(()),
            Some(last) => Err(format!(
                "{name} was changed later, by change {} of {}; repeat the command if this one is meant",
                last.number, last.router
            )),
        }
    }

    /// Serves the adapter of a folder that was opened for a router.
    ///
    /// # Errors
    /// The reason, if the folder was refused or has another content than it must have.
    pub(crate) fn opened(
        &mut self,
        request: &OpenRequest,
        outcome: Result<(PathBuf, AdapterFacts), String>,
    ) -> Result<(), String> {
        let opened = outcome.and_then(|(folder, facts)| {
            let adapter = facts.adapter;
            let Some(content) = request.content.filter(|content| *content != adapter) else {
                return Ok((folder, adapter));
            };
            self.admission.close_if_unknown(adapter);
            self.do_work();
            Err(format!(
                "{}: has adapter {adapter}, and the fleet's adapter {} is {content}; load it again to serve the \
                 new content",
                folder.display(),
                request.name,
            ))
        });
        let named = |folder, adapter, problem| NamedAdapter {
            folder,
            loaded_from: Some(request.folder.clone()),
            change: Some(request.change),
            adapter,
            problem,
        };
        match opened {
            Ok((folder, adapter)) => {
                self.unloaded.remove(&request.name);
                self.name(&request.name, named(folder, adapter, None));
                Ok(())
            }
            Err(reason) => {
                // The fleet serves the name: the report gives the reason why this worker does not.
                let present = self.names.get(&request.name);
                let is_free = present.is_none_or(|named| named.problem.is_some());
                if let Some(content) = request.content.filter(|_| is_free) {
                    self.unloaded.remove(&request.name);
                    let folder = PathBuf::from(&request.folder);
                    let named = named(folder, content, Some(reason.clone()));
                    self.names.insert(request.name.clone(), named);
                }
                Err(reason)
            }
        }
    }

    /// Whether this content is served under this name already; then it has it by this change.
    pub(crate) fn keep(
        &mut self,
        name: &str,
        folder: &str,
        content: AdapterId,
        change: AdapterChangeId,
    ) -> bool {
        let named = self.names.get_mut(name);
        let same = named.filter(|named| named.adapter == content && named.problem.is_none());
        let Some(named) = same else {
            return false;
        };
        named.loaded_from = Some(folder.to_owned());
        named.change = Some(change);
        true
    }

    /// Gives an adapter a name, in place of an earlier one of the name. Hand-offs that have the
    /// earlier one keep it.
    fn name(&mut self, name: &str, named: NamedAdapter) {
        self.admission.add_name(named.adapter);
        let earlier = self.names.insert(name.to_owned(), named);
        self.forget(earlier);
    }

    /// The admission needs an adapter no longer for a name that it had.
    fn forget(&mut self, named: Option<NamedAdapter>) {
        if let Some(named) = named.filter(|named| named.problem.is_none()) {
            self.admission.remove_name(named.adapter);
            self.do_work();
        }
    }

    /// Opens a folder that a router named, beside the driver; [`AdapterEvent::Opened`] follows.
    /// Must be called within a tokio runtime.
    pub(crate) fn open(&self, request: OpenRequest) {
        let (memory, root) = (self.memory.clone(), self.root.clone());
        let events = self.events.clone();
        tokio::spawn(async move {
            let folder = request.folder.clone();
            let opened =
                spawn_blocking(move || open_below(memory.as_deref(), root.as_deref(), &folder));
            let outcome = opened.await;
            let outcome = outcome.unwrap_or_else(|_| Err("reading the adapter failed".to_owned()));
            // The driver may have ended.
            let _ = events.send(AdapterEvent::Opened { request, outcome });
        });
    }

    /// Serves the adapter of this name no longer; whether there was one. Hand-offs that have it
    /// keep it.
    pub(crate) fn unload(&mut self, name: &str, change: AdapterChangeId) -> bool {
        let named = self.names.remove(name);
        let was_served = named.is_some();
        self.forget(named);
        self.unloaded.insert(name.to_owned(), change);
        if self.unloaded.len() > UNLOADED_MAX {
            let first = self.unloaded.iter().min_by_key(|(_, change)| **change);
            let first = first.map(|(name, _)| name.clone());
            first.and_then(|first| self.unloaded.remove(&first));
        }
        was_served
    }

    /// All adapters with the places of their weights, and the names that were unloaded.
    pub(crate) fn report(&self) -> AdapterReport {
        let unloaded = self.unloaded.iter();
        AdapterReport {
            offers: self.offers(),
            unloaded: unloaded
                .map(|(name, change)| UnloadedAdapter {
                    name: name.clone(),
                    change: *change,
                })
                .collect(),
        }
    }

    fn offers(&self) -> Vec<AdapterOffer> {
        let offers = self.names.iter().map(|(name, named)| AdapterOffer {
            name: name.clone(),
            adapter: named.adapter,
            root: named.folder.display().to_string(),
            loaded_from: named.loaded_from.clone(),
            change: named.change,
            place: match named.problem {
                None => self.admission.state(named.adapter).into(),
                Some(_) => AdapterPlace::OnDisk,
            },
            problem: named.problem.clone(),
        });
        offers.collect()
    }

    /// Grows with each change of what [`AdapterGate::in_use`] gives.
    pub(crate) fn version(&self) -> u64 {
        self.admission.version()
    }

    /// The adapters as metrics show them.
    pub(crate) fn in_use(&self) -> AdapterUse {
        let names = |state: AdapterState| {
            let used = self.names.iter();
            let used = used.filter(|(_, named)| named.problem.is_none());
            let used = used.filter(|(_, named)| self.admission.is_used(named.adapter, state));
            used.map(|(name, _)| name.clone()).collect()
        };
        AdapterUse {
            max_loras: self.admission.loaded_max(),
            served: self
                .names
                .values()
                .filter(|of| of.problem.is_none())
                .count(),
            loaded: self.admission.count(AdapterState::Resident),
            in_host: self.admission.count(AdapterState::InHost),
            running: names(AdapterState::Resident),
            waiting: names(AdapterState::Loading),
            loads: self.admission.loads(),
        }
    }

    // === orders ===

    /// Gives an order back if it need not wait. Must be called within a tokio runtime.
    pub(crate) fn pass(&mut self, order: RouterOrder) -> Passage {
        if let Order::FetchAdapter { adapter } = &order.order {
            self.admission.fetch(*adapter);
            self.do_work();
        }
        let (handoff, request) = order.subject();
        let Some(handoff) = handoff else {
            return Passage::Open(order);
        };
        let adapter = request.and_then(|request| request.adapter);
        let passage = self.admission.pass(handoff, adapter, order);
        self.do_work();
        passage.into()
    }

    /// Gives the orders that waited for a load; after a failure, their refusals.
    pub(crate) fn loaded(
        &mut self,
        adapter: AdapterId,
        outcome: &Result<(), AdapterError>,
    ) -> Vec<Passage> {
        // A device may have room for it later.
        let is_final = !matches!(outcome, Ok(()) | Err(AdapterError::Device(_)));
        let outcome = match outcome {
            Ok(()) => {
                info!(%adapter, "adapter loaded");
                LoadOutcome::Loaded
            }
            Err(error) => {
                warn!(%adapter, %error, "an adapter cannot be loaded");
                LoadOutcome::Failed {
                    reason: error.to_string(),
                }
            }
        };
        let passages = self.admission.load_ended(adapter, &outcome);
        if let LoadOutcome::Failed { reason } = &outcome
            && is_final
        {
            self.give_up(adapter, reason);
        }
        self.do_work();
        passages.into_iter().map(Passage::from).collect()
    }

    /// Takes no request any more with an adapter whose file cannot be loaded, until its name is
    /// loaded again.
    fn give_up(&mut self, adapter: AdapterId, reason: &str) {
        for named in self.names.values_mut() {
            if named.adapter == adapter && named.problem.is_none() {
                named.problem = Some(reason.to_owned());
                self.admission.remove_name(adapter);
            }
        }
    }

    /// Ends the holds of hand-offs that have ended.
    pub(crate) fn reported(&mut self, report: &Report) {
        if let Report::Refused { handoff, .. } | Report::Released { handoff, .. } = report {
            self.admission.release(*handoff);
            self.do_work();
        }
    }

    /// Drops the orders of a router that is gone, and the holds of its hand-offs.
    pub(crate) fn router_lost(&mut self, router: RouterId) {
        self.admission.router_lost(router);
        self.do_work();
    }

    // === work ===

    fn do_work(&mut self) {
        while let Some(work) = self.admission.poll() {
            let Some(memory) = &self.memory else { continue };
            match work {
                AdapterWork::Load(adapter, source) => self.load(adapter, source, memory),
                AdapterWork::Unload(adapter) => memory.unload(adapter),
                AdapterWork::DropHostCopy(adapter) => memory.drop_host_copy(adapter),
                AdapterWork::Close(adapter) => memory.close(adapter),
            }
        }
    }

    fn load(&self, adapter: AdapterId, source: LoadSource, memory: &Arc<dyn AdapterMemory>) {
        let (memory, events) = (Arc::clone(memory), self.events.clone());
        let load = move || {
            match source {
                LoadSource::DiskThroughHost => memory.copy_to_host(adapter)?,
                LoadSource::Disk | LoadSource::Host => {}
            }
            memory.load(adapter)
        };
        tokio::spawn(async move {
            let loaded = spawn_blocking(load).await;
            // A panic of a load is an error of the adapter alone.
            let outcome = loaded.unwrap_or(Err(AdapterError::Unknown(adapter)));
            // The driver may have ended.
            let _ = events.send(AdapterEvent::Loaded { adapter, outcome });
        });
    }
}

impl From<AdapterPassage<RouterOrder>> for Passage {
    fn from(passage: AdapterPassage<RouterOrder>) -> Self {
        match passage {
            AdapterPassage::Open(order) => Self::Open(order),
            AdapterPassage::Held => Self::Held,
            AdapterPassage::Refused(handoff, order, refusal) => {
                Self::Refused(order.router, Report::Refused { handoff, refusal })
            }
        }
    }
}

/// Opens a folder below `root`, whatever links are on the way.
fn open_below(
    memory: Option<&dyn AdapterMemory>,
    root: Option<&Path>,
    folder: &str,
) -> Result<(PathBuf, AdapterFacts), String> {
    let memory = memory.ok_or("its engine applies no adapters")?;
    let root = root.ok_or("it was started without --lora-root, so that adapters are fixed")?;
    let outside = || format!("{folder} is not a folder below --lora-root");
    let real = |path: &Path| path.canonicalize().map_err(|_| outside());
    let path = real(&root.join(folder))?;
    // Nothing of a folder elsewhere is told, not even whether it exists.
    if !path.starts_with(real(root)?) {
        return Err(outside());
    }
    let facts = memory.open(&path).map_err(|error| error.to_string())?;
    Ok((path, facts))
}

#[cfg(test)]
mod tests;
