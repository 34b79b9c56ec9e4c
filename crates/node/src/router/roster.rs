//! The workers as an operator sees them.
//!
//! Owns: one view per connected worker, kept up by the driver from what it hears, and read by the
//! HTTP face. Never: decides anything: what a worker is fit for the brain knows, from the same words.
//! Invariant: a view is there exactly as long as the worker is connected.

use crate::line::{Introduction, LinkState};
use cleave_api::{LinkView, WorkerCommand, WorkerState, WorkerView};
use cleave_domain::{Load, Progress, Report, WorkerId, WorkerRef};
use cleave_router::Note;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    workers: Mutex<BTreeMap<WorkerId, Entry>>,
}

#[derive(Debug)]
struct Entry {
    view: WorkerView,
    draining: bool,
    links: BTreeMap<WorkerId, LinkState>,
    counts: Counts,
}

/// What the router did with a worker since it joined.
#[derive(Debug, Default)]
struct Counts {
    prefills: u64,
    decodes: u64,
    moves_in: u64,
    moves_out: u64,
    passed_over: u64,
}

impl Roster {
    pub(crate) fn join(&self, introduction: &Introduction) {
        let description = &introduction.description;
        let view = WorkerView {
            name: introduction.name.clone(),
            worker: introduction.worker,
            role: description.role,
            state: WorkerState::Ready,
            fingerprint: description.fingerprint.0.clone(),
            load: Load {
                blocks_free: description.capacity.blocks_count,
                ..Load::default()
            },
            blocks_count: description.capacity.blocks_count,
            links: Vec::new(),
            counters: Vec::new(),
        };
        let entry = Entry {
            view,
            draining: false,
            links: BTreeMap::new(),
            counts: Counts::default(),
        };
        self.lock().insert(introduction.worker.worker, entry);
    }

    pub(crate) fn leave(&self, worker: WorkerRef) {
        self.lock().remove(&worker.worker);
    }

    /// A worker said something that an operator may want to know.
    pub(crate) fn hear(&self, worker: WorkerRef, report: &Report) {
        let mut workers = self.lock();
        let Some(entry) = workers.get_mut(&worker.worker) else {
            return;
        };
        match report {
            Report::Load(load) => entry.view.load = *load,
            Report::Draining => entry.draining = true,
            Report::Serves { role } => entry.view.role = *role,
            _ => {}
        }
    }

    /// A worker measured a link.
    pub(crate) fn measured(&self, worker: WorkerRef, link: LinkState) {
        if let Some(entry) = self.lock().get_mut(&worker.worker) {
            entry.links.insert(link.peer.worker, link);
        }
    }

    /// The brain noted something of workers.
    pub(crate) fn count(&self, note: &Note) {
        let mut workers = self.lock();
        let mut at = |worker: &WorkerRef, count: fn(&mut Counts) -> &mut u64| {
            if let Some(entry) = workers.get_mut(&worker.worker) {
                *count(&mut entry.counts) += 1;
            }
        };
        match note {
            Note::Placed {
                prefill, decode, ..
            } => {
                at(prefill, |counts| &mut counts.prefills);
                at(decode, |counts| &mut counts.decodes);
            }
            Note::Moving { from, to, .. } => {
                at(from, |counts| &mut counts.moves_out);
                at(to, |counts| &mut counts.moves_in);
            }
            Note::PassedOver { worker, .. } => at(worker, |counts| &mut counts.passed_over),
            _ => {}
        }
    }

    /// All of them, by name.
    pub(crate) fn views(&self) -> Vec<WorkerView> {
        let workers = self.lock();
        let mut views: Vec<WorkerView> = workers.values().map(|e| e.view(&workers)).collect();
        views.sort_by(|a, b| a.name.cmp(&b.name));
        views
    }

    /// How a worker will stand once it has done this; `None` if it is not here.
    pub(crate) fn after(&self, name: &str, command: WorkerCommand) -> Option<WorkerView> {
        let workers = self.lock();
        let entry = workers.values().find(|entry| entry.view.name == name)?;
        let mut view = entry.view(&workers);
        match command {
            WorkerCommand::Drain => view.state = WorkerState::Draining,
            WorkerCommand::Serve(role) => view.role = role,
        }
        Some(view)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Entry>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn view(&self, workers: &BTreeMap<WorkerId, Entry>) -> WorkerView {
        let name = |id: &WorkerId| {
            let known = workers.get(id).map(|entry| entry.view.name.clone());
            known.unwrap_or_else(|| id.to_string())
        };
        let link = |(peer, link): (&WorkerId, &LinkState)| LinkView {
            peer: name(peer),
            transport: link.transport.clone(),
            bytes_per_second: link.bytes_per_second,
            latency: link.latency,
        };
        let Counts {
            prefills,
            decodes,
            moves_in,
            moves_out,
            passed_over,
        } = self.counts;
        WorkerView {
            state: match (self.draining, self.view.load.progress) {
                (true, _) => WorkerState::Draining,
                (false, Progress::Stuck) => WorkerState::Stuck,
                (false, Progress::Moving) => WorkerState::Ready,
            },
            links: self.links.iter().map(link).collect(),
            counters: vec![
                ("prefills", prefills),
                ("decodes", decodes),
                ("moves_in", moves_in),
                ("moves_out", moves_out),
                ("passed_over", passed_over),
            ],
            ..self.view.clone()
        }
    }
}
