//! The LoRA adapters that workers serve, by the names that clients give.
//!
//! Owns: which content a name stands for, and what operators changed at run time, which workers
//! that join later are told. Never: loads an adapter, or chooses a worker.
//! Invariant: a name stands for one content at a time: that of the most workers, and the present
//! one where as many have another. A name stays while its workers are away, so that a request for
//! it waits as one for their model does; it goes when a worker of the model comes without it,
//! unless an operator loaded it.

use cleave_api::ServedAdapter;
use cleave_domain::{AdapterCommand, AdapterId, AdapterOffer, WorkerId, WorkerRef};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use tokio::sync::oneshot;

/// The adapters of all connected workers.
#[derive(Debug, Default)]
pub(crate) struct AdapterDirectory {
    state: Mutex<DirectoryState>,
}

#[derive(Debug, Default)]
struct DirectoryState {
    /// Adapters of each worker, with the name of its model.
    offers: BTreeMap<WorkerId, (String, Vec<AdapterOffer>)>,
    served: BTreeMap<String, ServedAdapter>,
    /// The last command for each name of each model that a worker has carried out.
    ordered: BTreeMap<String, BTreeMap<String, AdapterCommand>>,
}

impl AdapterDirectory {
    /// A worker of this model serves these adapters from now on, and no others.
    pub(crate) fn report(&self, worker: WorkerId, model: &str, offers: &[AdapterOffer]) {
        let mut state = self.state.lock();
        state
            .offers
            .insert(worker, (model.to_owned(), offers.to_vec()));
        let named = state.count_offers();
        let DirectoryState {
            served, ordered, ..
        } = &mut *state;
        let ordered = ordered.get(model);
        let is_loaded = |name: &String| {
            let command = ordered.and_then(|ordered| ordered.get(name));
            matches!(command, Some(AdapterCommand::Load { .. }))
        };
        served.retain(|name, adapter| {
            adapter.base != model || named.contains_key(name) || is_loaded(name)
        });
        state.serve(named);
    }

    /// A worker is gone.
    pub(crate) fn leave(&self, worker: WorkerId) {
        let mut state = self.state.lock();
        if state.offers.remove(&worker).is_some() {
            let named = state.count_offers();
            state.serve(named);
        }
    }

    /// A worker of this model has carried out a command of an operator.
    pub(crate) fn ordered(&self, model: &str, command: AdapterCommand) {
        let mut state = self.state.lock();
        let name = command.name().to_owned();
        // The worker's report may have come before its answer, when the name was still loaded.
        let is_unload = matches!(command, AdapterCommand::Unload { .. });
        if is_unload && !state.count_offers().contains_key(&name) {
            state
                .served
                .retain(|served, adapter| *served != name || adapter.base != model);
        }
        let of_model = state.ordered.entry(model.to_owned()).or_default();
        of_model.insert(name, command);
    }

    /// The commands of operators that a worker of this model must carry out when it joins.
    pub(crate) fn commands_for(&self, model: &str) -> Vec<AdapterCommand> {
        let state = self.state.lock();
        let of_model = state.ordered.get(model).into_iter();
        of_model
            .flat_map(|ordered| ordered.values().cloned())
            .collect()
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

impl DirectoryState {
    fn count_offers(&self) -> BTreeMap<String, NamedOffers> {
        let mut named: BTreeMap<String, NamedOffers> = BTreeMap::new();
        for (model, offers) in self.offers.values() {
            for offer in offers {
                let contents = named.entry(offer.name.clone()).or_default();
                let content = contents.entry((model.clone(), offer.adapter));
                content.or_insert_with(|| (0, offer.root.clone())).0 += 1;
            }
        }
        named
    }

    /// Serves each name's content that the most workers have.
    fn serve(&mut self, named: BTreeMap<String, NamedOffers>) {
        for (name, contents) in named {
            let present = self.served.get(&name).map(|served| served.adapter);
            let best = contents
                .into_iter()
                .max_by_key(|((_, adapter), (count, _))| {
                    (*count, present == Some(*adapter), Reverse(*adapter))
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
    command: AdapterCommand,
    /// Whether a worker has carried it out.
    is_done_somewhere: bool,
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
        command: AdapterCommand,
        workers: BTreeSet<WorkerRef>,
        answer: oneshot::Sender<Result<(), String>>,
    ) -> u64 {
        self.begun_count += 1;
        let change = PendingChange {
            model: model.to_owned(),
            command,
            is_done_somewhere: false,
            waiting: workers,
            refusals: Vec::new(),
            answer,
        };
        self.pending.insert(self.begun_count, change);
        self.begun_count
    }

    /// The commands for a model that not every worker has answered.
    pub(crate) fn pending_for(&self, model: &str) -> impl Iterator<Item = &AdapterCommand> {
        let pending = self.pending.values();
        let of_model = pending.filter(move |pending| pending.model == model);
        of_model.map(|pending| &pending.command)
    }

    /// A worker of this name answered. Gives the command, with its model, if this is the first
    /// worker that has carried it out.
    pub(crate) fn answered(
        &mut self,
        worker: WorkerRef,
        name: &str,
        change: u64,
        outcome: Result<(), String>,
    ) -> Option<(String, AdapterCommand)> {
        let mut first_done = None;
        if let Some(pending) = self.pending.get_mut(&change)
            && pending.waiting.remove(&worker)
        {
            match outcome {
                Err(reason) => pending.refusals.push(format!("{name}: {reason}")),
                Ok(()) if !std::mem::replace(&mut pending.is_done_somewhere, true) => {
                    first_done = Some((pending.model.clone(), pending.command.clone()));
                }
                Ok(()) => {}
            }
        }
        self.end_answered();
        first_done
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
mod tests {
    use super::*;
    use cleave_domain::AdapterPlace;
    use cleave_domain::Incarnation;

    fn offer(name: &str, content: u8) -> AdapterOffer {
        AdapterOffer {
            name: name.to_owned(),
            adapter: AdapterId([content; 16]),
            root: format!("/adapters/{name}"),
            place: AdapterPlace::OnDisk,
        }
    }

    fn content(directory: &AdapterDirectory, name: &str) -> Option<u8> {
        let served = directory.get(name)?;
        Some(served.adapter.0[0])
    }

    #[test]
    fn a_name_switches_once_more_workers_have_the_new_content() {
        let directory = AdapterDirectory::default();
        let report = |worker, content| {
            directory.report(WorkerId(worker), "m", &[offer("a", content)]);
        };
        (1..=3).for_each(|worker| report(worker, 1));
        report(1, 2);
        assert_eq!(content(&directory, "a"), Some(1));
        report(2, 2);
        assert_eq!(content(&directory, "a"), Some(2));
        directory.leave(WorkerId(1));
        assert_eq!(
            content(&directory, "a"),
            Some(2),
            "it stays where both are equal"
        );
    }

    #[test]
    fn a_change_ends_once_every_worker_answered_or_is_lost() {
        let workers = [1, 2].map(|number| WorkerRef {
            worker: WorkerId(number),
            incarnation: Incarnation(1),
        });
        let mut changes = AdapterChanges::default();
        let begin = |changes: &mut AdapterChanges| {
            let (answer, outcome) = oneshot::channel();
            let command = AdapterCommand::Unload {
                name: "a".to_owned(),
            };
            (changes.begin("m", command, workers.into(), answer), outcome)
        };
        let (change, mut outcome) = begin(&mut changes);
        assert_eq!(changes.pending_for("m").count(), 1);
        assert_eq!(changes.pending_for("other").count(), 0);
        let done = changes.answered(workers[0], "one", change, Ok(()));
        assert_eq!(done.unwrap().0, "m");
        assert!(outcome.try_recv().is_err(), "the other has not answered");
        let refused = changes.answered(workers[1], "two", change, Err("no".to_owned()));
        assert_eq!(refused, None);
        assert_eq!(outcome.try_recv().unwrap(), Err("two: no".to_owned()));
        let (change, mut outcome) = begin(&mut changes);
        changes.answered(workers[0], "one", change, Ok(()));
        changes.worker_lost(workers[1]);
        let lost = outcome.try_recv().unwrap().unwrap_err();
        assert!(lost.contains("lost before it answered"), "{lost}");
        assert!(changes.pending.is_empty());
    }

    #[test]
    fn a_name_stays_while_its_workers_are_away() {
        let directory = AdapterDirectory::default();
        directory.report(WorkerId(1), "m", &[offer("a", 1)]);
        directory.leave(WorkerId(1));
        assert_eq!(content(&directory, "a"), Some(1));
        directory.report(WorkerId(2), "other", &[]);
        assert_eq!(content(&directory, "a"), Some(1), "another model's worker");
        directory.report(WorkerId(3), "m", &[]);
        assert_eq!(content(&directory, "a"), None, "it was unloaded");
    }

    #[test]
    fn an_ordered_name_outlives_workers_without_it() {
        let directory = AdapterDirectory::default();
        let name = || "a".to_owned();
        let load = AdapterCommand::Load {
            name: name(),
            folder: "f".to_owned(),
        };
        directory.report(WorkerId(1), "m", &[offer("a", 1)]);
        directory.ordered("m", load.clone());
        assert_eq!(directory.commands_for("m"), [load]);
        assert_eq!(directory.commands_for("other"), []);
        directory.leave(WorkerId(1));
        directory.report(WorkerId(2), "m", &[]);
        assert_eq!(content(&directory, "a"), Some(1), "it is being loaded");
        let unload = AdapterCommand::Unload { name: name() };
        directory.ordered("m", unload.clone());
        assert_eq!(directory.commands_for("m"), [unload], "the last command");
        assert_eq!(content(&directory, "a"), None, "the report came first");
        directory.report(WorkerId(2), "m", &[]);
        assert_eq!(content(&directory, "a"), None);
    }
}
