//! The LoRA adapters that workers serve, by the names that clients give.
//!
//! Owns: which content a name stands for, and the last change of each name, by any router, which
//! workers that join later get. Never: loads an adapter, or chooses a worker.
//! Invariant: a name stands for one content at a time: that of its last load at run time once a
//! worker can load that; else that of the most workers, and the present one where as many have
//! another. A name stays while its workers are away, so that a request for
//! it waits as one for their model does; it goes when a worker of the model comes without it,
//! unless it was loaded at run time. Of two changes of a name the one with the higher number holds,
//! in whichever order they are seen.

use cleave_api::ServedAdapter;
use cleave_domain::{
    AdapterChangeId, AdapterCommand, AdapterId, AdapterReport, RouterId, UnloadedAdapter, WorkerId,
    WorkerRef,
};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use tokio::sync::oneshot;

/// Names that were unloaded, at most, that a router remembers of a model, as its workers do; the
/// changes that came first are forgotten first.
const UNLOADED_MAX: usize = 1024;

/// The adapters of all connected workers.
#[derive(Debug, Default)]
pub(crate) struct AdapterDirectory {
    state: Mutex<DirectoryState>,
}

#[derive(Debug, Default)]
struct DirectoryState {
    /// The last report of each worker, with the name of its model.
    reports: BTreeMap<WorkerId, (String, AdapterReport)>,
    served: BTreeMap<String, ServedAdapter>,
    /// The last change at run time of each name of each model.
    changed: BTreeMap<String, BTreeMap<String, NumberedChange>>,
    /// The latest unload of each model that was forgotten: a worker may still report earlier ones.
    forgotten: BTreeMap<String, AdapterChangeId>,
    /// The highest number of a change that was seen or begun.
    number_last: u64,
}

/// A change of a name, as workers carried it out, with its place among all changes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NumberedChange {
    change: AdapterChangeId,
    made: RunTimeChange,
}

/// A command with the place of its change among all changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OrderedChange {
    pub(crate) change: AdapterChangeId,
    pub(crate) command: AdapterCommand,
}

/// The commands that follow from a worker's report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReportCommands {
    /// Changes that are later than all of their names that were seen before, for the model's other
    /// workers.
    pub(crate) learned: Vec<OrderedChange>,
    /// Later changes of names that the worker changed, for this worker.
    pub(crate) corrections: Vec<OrderedChange>,
}

/// The change that operators made last of a name, as workers carried it out.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RunTimeChange {
    Loaded {
        /// The folder as the command named it.
        folder: String,
        /// The content that it had.
        adapter: AdapterId,
    },
    Unloaded,
}

impl NumberedChange {
    /// The command that makes the same change at another worker. A folder may have another content
    /// by now, which no operator has asked for.
    fn ordered(&self, name: &str) -> OrderedChange {
        let name = name.to_owned();
        let command = match &self.made {
            RunTimeChange::Loaded { folder, adapter } => AdapterCommand::Load {
                name,
                folder: folder.clone(),
                content: Some(*adapter),
            },
            RunTimeChange::Unloaded => AdapterCommand::Unload { name },
        };
        OrderedChange {
            change: self.change,
            command,
        }
    }
}

impl AdapterDirectory {
    /// A worker of this model serves these adapters from now on, and no others.
    pub(crate) fn report(
        &self,
        worker: WorkerId,
        model: &str,
        report: &AdapterReport,
    ) -> ReportCommands {
        let mut state = self.state.lock();
        let learned = state.learn(model, report);
        let corrections = state.correct(worker, model, report);
        let entry = (model.to_owned(), report.clone());
        state.reports.insert(worker, entry);
        let named = state.count_offers();
        // Names that were loaded at run time are loaded again.
        let is_loaded = |made: Option<&_>| matches!(made, Some(RunTimeChange::Loaded { .. }));
        state.forget_unserved(model, &named, |made| !is_loaded(made));
        state.serve(named);
        ReportCommands {
            learned,
            corrections,
        }
    }

    /// A worker is gone.
    pub(crate) fn leave(&self, worker: WorkerId) {
        let mut state = self.state.lock();
        if let Some((model, _)) = state.reports.remove(&worker) {
            let named = state.count_offers();
            // It may have been the last one that had not answered an unload.
            let is_unloaded = |made: Option<&_>| matches!(made, Some(RunTimeChange::Unloaded));
            state.forget_unserved(&model, &named, is_unloaded);
            state.serve(named);
        }
    }

    /// The place of a change that this router is about to order: after all that it knows of.
    pub(crate) fn next_change(&self, router: RouterId) -> AdapterChangeId {
        let mut state = self.state.lock();
        state.number_last = state.number_last.saturating_add(1);
        AdapterChangeId {
            number: state.number_last,
            router,
        }
    }

    /// The commands that a worker of this model must carry out when it joins.
    pub(crate) fn commands_for(&self, model: &str) -> Vec<OrderedChange> {
        let state = self.state.lock();
        let changed = state.changed.get(model).into_iter().flatten();
        changed.map(|(name, change)| change.ordered(name)).collect()
    }

    /// The adapter of this name.
    pub(crate) fn get(&self, name: &str) -> Option<ServedAdapter> {
        self.state.lock().served.get(name).cloned()
    }

    /// All of them, by name.
    pub(crate) fn all(&self) -> Vec<ServedAdapter> {
        self.state.lock().served.values().cloned().collect()
    }
}

/// The contents offered under one name, with the number of workers that offer each, and one of the
/// folders.
type NamedOffers = BTreeMap<(String, AdapterId), (usize, String)>;

/// The changes in a report, each with its name.
fn changes_of(report: &AdapterReport) -> impl Iterator<Item = (&str, NumberedChange)> {
    let loaded = report.offers.iter().filter_map(|offer| {
        let made = RunTimeChange::Loaded {
            folder: offer.loaded_from.clone()?,
            adapter: offer.adapter,
        };
        let change = offer.change?;
        Some((offer.name.as_str(), NumberedChange { change, made }))
    });
    let unloaded = report
        .unloaded
        .iter()
        .map(|UnloadedAdapter { name, change }| {
            let made = RunTimeChange::Unloaded;
            let change = *change;
            (name.as_str(), NumberedChange { change, made })
        });
    loaded.chain(unloaded)
}

/// Forgets all unloads but the latest [`UNLOADED_MAX`]; gives the latest one that it forgot.
fn forget_unloads(changed: &mut BTreeMap<String, NumberedChange>) -> Option<AdapterChangeId> {
    let unloads = changed.values();
    let unloads = unloads.filter(|change| change.made == RunTimeChange::Unloaded);
    let mut unloads: Vec<AdapterChangeId> = unloads.map(|change| change.change).collect();
    unloads.sort_unstable();
    let latest = unloads.into_iter().rev().nth(UNLOADED_MAX)?;
    changed.retain(|_, of| of.made != RunTimeChange::Unloaded || of.change > latest);
    Some(latest)
}

impl DirectoryState {
    /// Takes the changes of a report that are later than those known of their names.
    fn learn(&mut self, model: &str, report: &AdapterReport) -> Vec<OrderedChange> {
        let changed = self.changed.entry(model.to_owned()).or_default();
        let mut learned = Vec::new();
        for (name, change) in changes_of(report) {
            self.number_last = self.number_last.max(change.change.number);
            let known = changed.get(name);
            let is_unload = change.made == RunTimeChange::Unloaded;
            if known.is_none() && is_unload && Some(&change.change) <= self.forgotten.get(model) {
                continue;
            }
            if known.is_none_or(|known| known.change < change.change) {
                learned.push(change.ordered(name));
                changed.insert(name.to_owned(), change);
            }
        }
        if let Some(latest) = forget_unloads(changed) {
            let forgotten = self.forgotten.entry(model.to_owned()).or_default();
            *forgotten = latest.max(*forgotten);
        }
        learned
    }

    /// The later changes of names that a worker has changed since its last report: it had forgotten
    /// them. A name that it reports as before is not corrected again: it has been sent the later
    /// change, as at its join, and carries it out yet or has refused it.
    fn correct(&self, worker: WorkerId, model: &str, report: &AdapterReport) -> Vec<OrderedChange> {
        let before = self.reports.get(&worker);
        let (Some((_, before)), Some(changed)) = (before, self.changed.get(model)) else {
            return Vec::new();
        };
        let before = changes_of(before).map(|(name, before)| (name, before.change));
        let before: BTreeMap<&str, AdapterChangeId> = before.collect();
        let corrections = changes_of(report).filter_map(|(name, reported)| {
            let known = changed.get(name)?;
            let is_new = before.get(name) != Some(&reported.change);
            (is_new && known.change > reported.change).then(|| known.ordered(name))
        });
        corrections.collect()
    }

    /// Forgets the names of a model that no worker serves, where their last change, if any, is one
    /// that `ends` them.
    fn forget_unserved(
        &mut self,
        model: &str,
        named: &BTreeMap<String, NamedOffers>,
        ends: impl Fn(Option<&RunTimeChange>) -> bool,
    ) {
        let changed = self.changed.get(model);
        let made = |name: &String| Some(&changed?.get(name)?.made);
        self.served.retain(|name, adapter| {
            adapter.base != model || named.contains_key(name) || !ends(made(name))
        });
    }

    /// Whether the last change of a name gave it this content.
    fn is_loaded_last(&self, model: &str, name: &str, content: AdapterId) -> bool {
        let change = self.changed.get(model).and_then(|of| of.get(name));
        let made = change.map(|change| &change.made);
        matches!(made, Some(RunTimeChange::Loaded { adapter, .. }) if *adapter == content)
    }

    fn count_offers(&self) -> BTreeMap<String, NamedOffers> {
        let mut named: BTreeMap<String, NamedOffers> = BTreeMap::new();
        for (model, report) in self.reports.values() {
            for offer in &report.offers {
                let contents = named.entry(offer.name.clone()).or_default();
                let content = contents.entry((model.clone(), offer.adapter));
                // One that cannot be loaded keeps its name, and outweighs nothing.
                let count = &mut content.or_insert_with(|| (0, offer.root.clone())).0;
                *count += usize::from(offer.problem.is_none());
            }
        }
        named
    }

    /// Serves each name's content that was loaded last, or that the most workers have.
    fn serve(&mut self, named: BTreeMap<String, NamedOffers>) {
        for (name, contents) in named {
            let present = self.served.get(&name).map(|served| served.adapter);
            let best = contents
                .into_iter()
                .max_by_key(|((model, adapter), (count, _))| {
                    // Of an earlier content, which the most may still have, no operator wants more.
                    let is_last = *count > 0 && self.is_loaded_last(model, &name, *adapter);
                    let is_present = present == Some(*adapter);
                    (is_last, *count, is_present, Reverse(*adapter))
                });
            let Some(((base, adapter), (_, root))) = best else {
                continue;
            };
            let served = ServedAdapter {
                name: name.clone(),
                adapter,
                base,
                root,
            };
            self.served.insert(name, served);
        }
    }
}

/// Changes of adapters that workers have not answered.
#[derive(Debug, Default)]
pub(crate) struct AdapterChanges {
    begun_count: u64,
    pending: BTreeMap<u64, PendingChange>,
}

#[derive(Debug)]
struct PendingChange {
    model: String,
    ordered: OrderedChange,
    /// Workers that have not answered.
    waiting: BTreeSet<WorkerRef>,
    /// The reasons of workers that refused, each with the worker's name.
    refusals: Vec<String>,
    answer: oneshot::Sender<Result<(), String>>,
}

impl AdapterChanges {
    /// Begins a change of a model at these workers; gives its number.
    pub(crate) fn begin(
        &mut self,
        model: &str,
        ordered: OrderedChange,
        workers: BTreeSet<WorkerRef>,
        answer: oneshot::Sender<Result<(), String>>,
    ) -> u64 {
        self.begun_count += 1;
        let change = PendingChange {
            model: model.to_owned(),
            ordered,
            waiting: workers,
            refusals: Vec::new(),
            answer,
        };
        self.pending.insert(self.begun_count, change);
        self.begun_count
    }

    /// The commands for a model that not every worker has answered.
    pub(crate) fn pending_for(&self, model: &str) -> impl Iterator<Item = &OrderedChange> {
        let pending = self.pending.values();
        let of_model = pending.filter(move |pending| pending.model == model);
        of_model.map(|pending| &pending.ordered)
    }

    /// Whether not every worker has answered this change.
    pub(crate) fn is_pending(&self, change: AdapterChangeId) -> bool {
        let mut pending = self.pending.values();
        pending.any(|pending| pending.ordered.change == change)
    }

    /// A worker of this name answered the change of this number.
    pub(crate) fn answered(
        &mut self,
        worker: WorkerRef,
        name: &str,
        request: u64,
        outcome: Result<(), String>,
    ) {
        if let Some(pending) = self.pending.get_mut(&request)
            && pending.waiting.remove(&worker)
            && let Err(reason) = outcome
        {
            pending.refusals.push(format!("{name}: {reason}"));
        }
        self.end_answered();
    }

    /// A worker is gone, and answers nothing any more.
    pub(crate) fn worker_lost(&mut self, worker: WorkerRef) {
        for pending in self.pending.values_mut() {
            if pending.waiting.remove(&worker) {
                pending
                    .refusals
                    .push(format!("{worker}: lost before it answered"));
            }
        }
        self.end_answered();
    }

    /// Tells the results of changes that every worker has answered.
    fn end_answered(&mut self) {
        let over = self.pending.iter();
        let over = over.filter(|(_, pending)| pending.waiting.is_empty());
        let over: Vec<u64> = over.map(|(change, _)| *change).collect();
        for change in over {
            let Some(pending) = self.pending.remove(&change) else {
                continue;
            };
            let PendingChange {
                refusals, answer, ..
            } = pending;
            let outcome = if refusals.is_empty() {
                Ok(())
            } else {
                Err(refusals.join("; "))
            };
            // The operator may have left.
            let _ = answer.send(outcome);
        }
    }
}

#[cfg(test)]
mod tests;
