//! The adapters of a worker: their names, and the work that its machine of adapters asks for.
//!
//! Owns: the names, and loads under way. Never: reads a file on the driver's thread; decides which
//! adapter leaves, which [`AdapterAdmission`] does.
//! Invariant: work on adapters begins in the order in which it was asked for.

mod changes;

pub(crate) use changes::{AdapterChangeQueue, QueuedAdapterChange};

use super::constraint_gate::RouterOrder;
use cleave_domain::{AdapterId, AdapterOffer, Report, RouterId};
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

/// The adapters of a worker, and the orders that wait for one.
pub(crate) struct AdapterGate {
    memory: Option<Arc<dyn AdapterMemory>>,
    admission: AdapterAdmission<RouterOrder>,
    /// Contents that the names stand for.
    names: BTreeMap<String, NamedAdapter>,
    events: mpsc::UnboundedSender<AdapterEvent>,
    /// The folder below which routers may name adapters; `None` if they may name none.
    root: Option<PathBuf>,
}

/// An adapter that a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedAdapter {
    /// The folder that it was read from.
    folder: PathBuf,
    /// The folder as the command named it that loaded it; `None` for one of the worker's start.
    loaded_from: Option<String>,
    /// The content of the folder when it was opened.
    adapter: AdapterId,
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
    /// The number of the change, which the answer names.
    pub(crate) change: u64,
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
            adapter: facts.adapter,
        };
        self.name(name, named);
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
        let (folder, facts) = outcome?;
        let adapter = facts.adapter;
        if let Some(content) = request.content.filter(|content| *content != adapter) {
            self.admission.close_if_unknown(adapter);
            self.do_work();
            return Err(format!(
                "{}: has adapter {adapter}, and the fleet's adapter {} is {content}; load it again to serve the \
                 new content",
                folder.display(),
                request.name,
            ));
        }
        let named = NamedAdapter {
            folder,
            loaded_from: Some(request.folder.clone()),
            adapter,
        };
        self.name(&request.name, named);
        Ok(())
    }

    /// Whether this content is served under this name.
    pub(crate) fn serves(&self, name: &str, content: AdapterId) -> bool {
        let named = self.names.get(name);
        named.is_some_and(|named| named.adapter == content)
    }

    /// Gives an adapter a name, in place of an earlier one of the name. Hand-offs that have the
    /// earlier one keep it.
    fn name(&mut self, name: &str, named: NamedAdapter) {
        self.admission.add_name(named.adapter);
        let earlier = self.names.insert(name.to_owned(), named);
        if let Some(earlier) = earlier {
            self.admission.remove_name(earlier.adapter);
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
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let named = self.names.remove(name);
        if let Some(named) = &named {
            self.admission.remove_name(named.adapter);
            self.do_work();
        }
        named.is_some()
    }

    /// All adapters with the places of their weights, by ascending name.
    pub(crate) fn offers(&self) -> Vec<AdapterOffer> {
        let offers = self.names.iter().map(|(name, named)| AdapterOffer {
            name: name.clone(),
            adapter: named.adapter,
            root: named.folder.display().to_string(),
            loaded_from: named.loaded_from.clone(),
            place: self.admission.state(named.adapter).into(),
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
            let used = used.filter(|(_, named)| self.admission.is_used(named.adapter, state));
            used.map(|(name, _)| name.clone()).collect()
        };
        AdapterUse {
            max_loras: self.admission.loaded_max(),
            served: self.names.len(),
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
        let outcome = match outcome {
            Ok(()) => {
                info!(%adapter, "adapter loaded");
                LoadOutcome::Loaded
            }
            Err(error) => {
                warn!(%adapter, %error, "an adapter cannot be loaded");
                LoadOutcome::Failed
            }
        };
        let passages = self.admission.load_ended(adapter, outcome);
        self.do_work();
        passages.into_iter().map(Passage::from).collect()
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
