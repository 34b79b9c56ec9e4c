//! The LoRA adapters that workers serve, by the names that clients give.
//!
//! Owns: which content a name stands for, and what operators changed at run time, by any router,
//! which workers that join later are told. Never: loads an adapter, or chooses a worker.
//! Invariant: a name stands for one content at a time: that of the most workers, and the present
//! one where as many have another. A name stays while its workers are away, so that a request for
//! it waits as one for their model does; it goes when a worker of the model comes without it,
//! unless it was loaded at run time.

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
    /// Adapters of each worker, by ascending name, with the name of its model.
    offers: BTreeMap<WorkerId, (String, Vec<AdapterOffer>)>,
    served: BTreeMap<String, ServedAdapter>,
    /// The last change at run time of each name of each model.
    changed: BTreeMap<String, BTreeMap<String, RunTimeChange>>,
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

impl RunTimeChange {
    /// The command that makes the same change at another worker. A folder may have another content
    /// by now, which no operator has asked for.
    fn command(&self, name: &str) -> AdapterCommand {
        let name = name.to_owned();
        match self {
            Self::Loaded { folder, adapter } => AdapterCommand::Load {
                name,
                folder: folder.clone(),
                content: Some(*adapter),
            },
            Self::Unloaded => AdapterCommand::Unload { name },
        }
    }
}

impl AdapterDirectory {
    /// A worker of this model serves these adapters, by ascending name, from now on, and no others.
    /// Gives the commands to load those that were loaded at run time before this router began.
    pub(crate) fn report(
        &self,
        worker: WorkerId,
        model: &str,
        offers: &[AdapterOffer],
    ) -> Vec<AdapterCommand> {
        let mut state = self.state.lock();
        let entry = (model.to_owned(), offers.to_vec());
        let before = state.offers.insert(worker, entry);
        let changed = state.changed.entry(model.to_owned()).or_default();
        let learned = match before {
            None => learn(changed, offers),
            Some((_, before)) => {
                follow(changed, &before, offers);
                Vec::new()
            }
        };
        let named = state.count_offers();
        state.forget_unserved(model, &named);
        state.serve(named);
        learned
    }

    /// A worker is gone.
    pub(crate) fn leave(&self, worker: WorkerId) {
        let mut state = self.state.lock();
        if state.offers.remove(&worker).is_some() {
            let named = state.count_offers();
            state.serve(named);
        }
    }

    /// A worker of this model has carried out an operator's command to unload. Its report says
    /// nothing of a name that it did not serve.
    pub(crate) fn unloaded(&self, model: &str, name: String) {
        let mut state = self.state.lock();
        let changed = state.changed.entry(model.to_owned()).or_default();
        changed.insert(name, RunTimeChange::Unloaded);
        let named = state.count_offers();
        state.forget_unserved(model, &named);
    }

    /// The commands that a worker of this model must carry out when it joins.
    pub(crate) fn commands_for(&self, model: &str) -> Vec<AdapterCommand> {
        let state = self.state.lock();
        let changed = state.changed.get(model).into_iter().flatten();
        changed.map(|(name, change)| change.command(name)).collect()
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

/// Takes the adapters of run time from the first report of a worker, but for names whose last
/// change is known: the worker may have been away when it was made. Gives those that are new.
fn learn(
    changed: &mut BTreeMap<String, RunTimeChange>,
    offers: &[AdapterOffer],
) -> Vec<AdapterCommand> {
    let mut learned = Vec::new();
    for (name, change) in offers.iter().filter_map(run_time_change) {
        if !changed.contains_key(name) {
            learned.push(change.command(name));
            changed.insert(name.to_owned(), change);
        }
    }
    learned
}

/// Takes the changes between two reports of a worker, whichever router commanded them.
fn follow(
    changed: &mut BTreeMap<String, RunTimeChange>,
    before: &[AdapterOffer],
    offers: &[AdapterOffer],
) {
    let of = |offers: &[AdapterOffer], name: &str| {
        let at = offers.binary_search_by(|offer| offer.name.as_str().cmp(name));
        at.ok()
    };
    for (name, change) in offers.iter().filter_map(run_time_change) {
        let before = of(before, name).and_then(|at| run_time_change(&before[at]));
        if before.is_none_or(|(_, before)| before != change) {
            changed.insert(name.to_owned(), change);
        }
    }
    let gone = before
        .iter()
        .filter(|offer| of(offers, &offer.name).is_none());
    for offer in gone {
        changed.insert(offer.name.clone(), RunTimeChange::Unloaded);
    }
}

/// The name of an adapter that was loaded at run time, and that change.
fn run_time_change(offer: &AdapterOffer) -> Option<(&str, RunTimeChange)> {
    let change = RunTimeChange::Loaded {
        folder: offer.loaded_from.clone()?,
        adapter: offer.adapter,
    };
    Some((&offer.name, change))
}

impl DirectoryState {
    /// Forgets the names of a model that no worker serves, but for those that were loaded at run
    /// time: they are loaded again.
    fn forget_unserved(&mut self, model: &str, named: &BTreeMap<String, NamedOffers>) {
        let Self {
            offers: _,
            served,
            changed,
        } = self;
        let changed = changed.get(model);
        let is_loaded = |name: &String| {
            let change = changed.and_then(|changed| changed.get(name));
            matches!(change, Some(RunTimeChange::Loaded { .. }))
        };
        served.retain(|name, adapter| {
            adapter.base != model || named.contains_key(name) || is_loaded(name)
        });
    }

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
            loaded_from: None,
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

    /// An adapter that was loaded at run time from folder `f`.
    fn loaded(name: &str, content: u8) -> AdapterOffer {
        AdapterOffer {
            loaded_from: Some("f".to_owned()),
            ..offer(name, content)
        }
    }

    fn load_command(name: &str, content: u8) -> AdapterCommand {
        AdapterCommand::Load {
            name: name.to_owned(),
            folder: "f".to_owned(),
            content: Some(AdapterId([content; 16])),
        }
    }

    fn unload_command(name: &str) -> AdapterCommand {
        AdapterCommand::Unload {
            name: name.to_owned(),
        }
    }

    #[test]
    fn a_loaded_name_outlives_workers_without_it() {
        let directory = AdapterDirectory::default();
        directory.report(WorkerId(1), "m", &[]);
        assert_eq!(directory.commands_for("m"), []);
        directory.report(WorkerId(1), "m", &[loaded("a", 1)]);
        assert_eq!(directory.commands_for("m"), [load_command("a", 1)]);
        assert_eq!(directory.commands_for("other"), []);
        directory.leave(WorkerId(1));
        directory.report(WorkerId(2), "m", &[]);
        assert_eq!(content(&directory, "a"), Some(1), "it is being loaded");
        directory.unloaded("m", "a".to_owned());
        assert_eq!(directory.commands_for("m"), [unload_command("a")]);
        assert_eq!(content(&directory, "a"), None, "the last command");
        directory.report(WorkerId(2), "m", &[]);
        assert_eq!(content(&directory, "a"), None);
    }

    /// Another router commands them, and this one sees them in the workers' reports.
    #[test]
    fn changes_by_another_router_are_known() {
        let directory = AdapterDirectory::default();
        let report = |worker, offers: &[AdapterOffer]| {
            directory.report(WorkerId(worker), "m", offers);
        };
        report(1, &[offer("start", 1)]);
        report(2, &[offer("start", 1)]);
        assert_eq!(directory.commands_for("m"), [], "by flags");
        report(1, &[loaded("a", 2), offer("start", 1)]);
        assert_eq!(directory.commands_for("m"), [load_command("a", 2)]);
        report(1, &[loaded("a", 3), offer("start", 1)]);
        assert_eq!(directory.commands_for("m"), [load_command("a", 3)]);
        // A place that changed, or a worker that is late, changes no command.
        report(2, &[loaded("a", 2), offer("start", 1)]);
        report(1, &[loaded("a", 3), offer("start", 1)]);
        report(1, &[loaded("a", 3)]);
        let commands = directory.commands_for("m");
        assert_eq!(commands[1], unload_command("start"));
        report(1, &[]);
        let commands = directory.commands_for("m");
        assert_eq!(commands, [unload_command("a"), unload_command("start")]);
        assert_eq!(content(&directory, "a"), Some(2), "one worker has it still");
        report(2, &[]);
        assert_eq!(content(&directory, "a"), None);
    }

    #[test]
    fn a_new_router_learns_what_was_loaded_before() {
        let directory = AdapterDirectory::default();
        directory.report(WorkerId(1), "m", &[]);
        let offers = [loaded("a", 1), offer("b", 2)];
        let learned = directory.report(WorkerId(2), "m", &offers);
        assert_eq!(learned, [load_command("a", 1)]);
        let again = directory.report(WorkerId(3), "m", &[loaded("a", 1)]);
        assert_eq!(again, [], "it is known");
        directory.unloaded("m", "a".to_owned());
        let stale = directory.report(WorkerId(4), "m", &[loaded("a", 1)]);
        assert_eq!(stale, [], "the worker was away when it was unloaded");
        assert_eq!(directory.commands_for("m"), [unload_command("a")]);
    }
}
