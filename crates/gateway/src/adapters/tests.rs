//! Names and changes of adapters, as workers report them.

use super::*;
use cleave_domain::{AdapterOffer, AdapterPlace, Incarnation};
use std::ops::RangeInclusive;

fn offer(name: &str, content: u8) -> AdapterOffer {
    AdapterOffer {
        name: name.to_owned(),
        adapter: AdapterId([content; 16]),
        root: format!("/adapters/{name}"),
        loaded_from: None,
        change: None,
        place: AdapterPlace::OnDisk,
        problem: None,
    }
}

/// An adapter that was loaded at run time from folder `f`, by the change of this number.
fn loaded(name: &str, content: u8, number: u64) -> AdapterOffer {
    AdapterOffer {
        loaded_from: Some("f".to_owned()),
        change: Some(change(number)),
        ..offer(name, content)
    }
}

fn change(number: u64) -> AdapterChangeId {
    AdapterChangeId {
        number,
        router: RouterId(1),
    }
}

fn report_of(offers: &[AdapterOffer], unloaded: &[(&str, u64)]) -> AdapterReport {
    let unloaded = unloaded.iter().map(|(name, number)| UnloadedAdapter {
        name: (*name).to_owned(),
        change: change(*number),
    });
    AdapterReport {
        offers: offers.to_vec(),
        unloaded: unloaded.collect(),
    }
}

fn content(directory: &AdapterDirectory, name: &str) -> Option<u8> {
    let served = directory.get(name)?;
    Some(served.adapter.0[0])
}

fn load_command(name: &str, content: u8, number: u64) -> OrderedChange {
    let command = AdapterCommand::Load {
        name: name.to_owned(),
        folder: "f".to_owned(),
        content: Some(AdapterId([content; 16])),
    };
    OrderedChange {
        change: change(number),
        command,
    }
}

fn unload_command(name: &str, number: u64) -> OrderedChange {
    OrderedChange {
        change: change(number),
        command: AdapterCommand::Unload {
            name: name.to_owned(),
        },
    }
}

#[test]
fn a_name_switches_once_more_workers_have_the_new_content() {
    let directory = AdapterDirectory::default();
    let report = |worker, content| {
        let report = report_of(&[offer("a", content)], &[]);
        directory.report(WorkerId(worker), "m", &report);
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
fn the_content_that_was_loaded_last_outweighs_the_majority() {
    let directory = AdapterDirectory::default();
    let report = |worker, offer: AdapterOffer| {
        directory.report(WorkerId(worker), "m", &report_of(&[offer], &[]));
    };
    (1..=3).for_each(|worker| report(worker, loaded("a", 1, 1)));
    report(1, loaded("a", 2, 2));
    assert_eq!(content(&directory, "a"), Some(2));
    let broken = AdapterOffer {
        problem: Some("its folder changed".to_owned()),
        ..loaded("a", 2, 2)
    };
    report(1, broken);
    assert_eq!(content(&directory, "a"), Some(1), "no worker can load it");
}

#[test]
fn an_adapter_that_cannot_be_loaded_outweighs_none() {
    let directory = AdapterDirectory::default();
    let broken = |content| AdapterOffer {
        problem: Some("its folder changed".to_owned()),
        ..offer("a", content)
    };
    directory.report(WorkerId(1), "m", &report_of(&[broken(1)], &[]));
    directory.report(WorkerId(2), "m", &report_of(&[broken(1)], &[]));
    assert_eq!(content(&directory, "a"), Some(1), "the name has an answer");
    directory.report(WorkerId(3), "m", &report_of(&[offer("a", 2)], &[]));
    assert_eq!(content(&directory, "a"), Some(2));
}

#[test]
fn a_change_ends_once_every_worker_answered_or_is_lost() {
    let workers = [1, 2].map(|number| WorkerRef {
        worker: WorkerId(number),
        incarnation: Incarnation(1),
    });
    let mut changes = AdapterChanges::default();
    let begin = |changes: &mut AdapterChanges, number| {
        let (answer, outcome) = oneshot::channel();
        let ordered = unload_command("a", number);
        (changes.begin("m", ordered, workers.into(), answer), outcome)
    };
    let (request, mut outcome) = begin(&mut changes, 1);
    assert_eq!(changes.pending_for("m").count(), 1);
    assert_eq!(changes.pending_for("other").count(), 0);
    assert!(changes.is_pending(change(1)) && !changes.is_pending(change(2)));
    changes.answered(workers[0], "one", request, Ok(()));
    assert!(outcome.try_recv().is_err(), "the other has not answered");
    changes.answered(workers[1], "two", request, Err("no".to_owned()));
    assert_eq!(outcome.try_recv().unwrap(), Err("two: no".to_owned()));
    let (request, mut outcome) = begin(&mut changes, 2);
    changes.answered(workers[0], "one", request, Ok(()));
    changes.worker_lost(workers[1]);
    let lost = outcome.try_recv().unwrap().unwrap_err();
    assert!(lost.contains("lost before it answered"), "{lost}");
    assert!(changes.pending.is_empty());
}

#[test]
fn a_name_stays_while_its_workers_are_away() {
    let directory = AdapterDirectory::default();
    let none = AdapterReport::default();
    directory.report(WorkerId(1), "m", &report_of(&[offer("a", 1)], &[]));
    directory.leave(WorkerId(1));
    assert_eq!(content(&directory, "a"), Some(1));
    directory.report(WorkerId(2), "other", &none);
    assert_eq!(content(&directory, "a"), Some(1), "another model's worker");
    directory.report(WorkerId(3), "m", &none);
    assert_eq!(content(&directory, "a"), None, "it was unloaded");
}

#[test]
fn an_unloaded_name_goes_with_the_last_worker_that_has_it() {
    let directory = AdapterDirectory::default();
    for worker in [1, 2] {
        let report = report_of(&[loaded("a", 1, 1), offer("b", 2)], &[]);
        directory.report(WorkerId(worker), "m", &report);
    }
    directory.report(WorkerId(1), "m", &report_of(&[], &[("a", 2)]));
    assert_eq!(content(&directory, "a"), Some(1), "worker 2 has it still");
    directory.leave(WorkerId(2));
    assert_eq!(content(&directory, "a"), None);
    assert_eq!(content(&directory, "b"), Some(2), "its workers are away");
}

#[test]
fn a_loaded_name_outlives_workers_without_it() {
    let directory = AdapterDirectory::default();
    let none = AdapterReport::default();
    directory.report(WorkerId(1), "m", &none);
    assert_eq!(directory.commands_for("m"), []);
    directory.report(WorkerId(1), "m", &report_of(&[loaded("a", 1, 1)], &[]));
    assert_eq!(directory.commands_for("m"), [load_command("a", 1, 1)]);
    assert_eq!(directory.commands_for("other"), []);
    directory.leave(WorkerId(1));
    directory.report(WorkerId(2), "m", &none);
    assert_eq!(content(&directory, "a"), Some(1), "it is being loaded");
    directory.report(WorkerId(2), "m", &report_of(&[], &[("a", 2)]));
    assert_eq!(directory.commands_for("m"), [unload_command("a", 2)]);
    assert_eq!(content(&directory, "a"), None, "the last command");
}

/// Another router commands them, and this one sees them in the workers' reports.
#[test]
fn the_later_change_of_a_name_holds_in_any_order() {
    let directory = AdapterDirectory::default();
    let report = |worker, offers: &[AdapterOffer], unloaded: &[(&str, u64)]| {
        let report = report_of(offers, unloaded);
        directory.report(WorkerId(worker), "m", &report).learned
    };
    assert_eq!(report(1, &[offer("start", 1)], &[]), [], "by flags");
    let learned = report(1, &[loaded("a", 3, 3), offer("start", 1)], &[]);
    assert_eq!(learned, [load_command("a", 3, 3)]);
    // A worker that is late, or was cut off, changes nothing.
    assert_eq!(report(2, &[loaded("a", 2, 2)], &[]), []);
    assert_eq!(report(3, &[], &[("a", 1)]), []);
    assert_eq!(directory.commands_for("m"), [load_command("a", 3, 3)]);
    let learned = report(1, &[], &[("a", 4), ("start", 5)]);
    let unloads = [unload_command("a", 4), unload_command("start", 5)];
    assert_eq!(learned, unloads);
    assert_eq!(report(2, &[loaded("a", 2, 2)], &[]), []);
    assert_eq!(directory.commands_for("m"), unloads);
    assert_eq!(content(&directory, "a"), Some(2), "one worker has it still");
    report(2, &[], &[("a", 4)]);
    assert_eq!(content(&directory, "a"), None);
}

/// A change comes after all that its router has seen, of any name.
#[test]
fn a_router_numbers_its_changes_above_all_that_it_knows() {
    let directory = AdapterDirectory::default();
    let next = || directory.next_change(RouterId(2)).number;
    assert_eq!([next(), next()], [1, 2]);
    directory.report(WorkerId(1), "m", &report_of(&[loaded("a", 1, 9)], &[]));
    assert_eq!(next(), 10);
    directory.report(WorkerId(1), "m", &report_of(&[], &[("a", 20)]));
    assert_eq!(next(), 21);
}

#[test]
fn a_new_router_learns_what_was_changed_before() {
    let directory = AdapterDirectory::default();
    directory.report(WorkerId(1), "m", &AdapterReport::default());
    let known = report_of(&[loaded("a", 1, 1), offer("b", 2)], &[("c", 2)]);
    let report = |worker| directory.report(WorkerId(worker), "m", &known).learned;
    let learned = report(2);
    let expected = [load_command("a", 1, 1), unload_command("c", 2)];
    assert_eq!(learned, expected);
    assert_eq!(report(3), [], "it is known");
}

/// A worker remembers as many; what two workers report together must not be sent to and fro.
#[test]
fn only_the_latest_unloads_of_a_model_are_remembered() {
    let directory = AdapterDirectory::default();
    let report = |worker, numbers: RangeInclusive<u64>| {
        let names: Vec<_> = numbers.map(|number| (number.to_string(), number)).collect();
        let unloaded: Vec<_> = names.iter().map(|(name, of)| (&**name, *of)).collect();
        let report = report_of(&[loaded("kept", 1, 1)], &unloaded);
        directory.report(WorkerId(worker), "m", &report).learned
    };
    assert_eq!(report(1, 2..=1025).len(), 1025, "with the load");
    assert_eq!(report(2, 1026..=1027).len(), 2);
    let commands = directory.commands_for("m");
    assert_eq!(commands.len(), 1025);
    assert!(commands.contains(&load_command("kept", 1, 1)));
    let has = |number: u64| commands.contains(&unload_command(&number.to_string(), number));
    assert!(!has(3) && has(4) && has(1027));
    assert_eq!(report(1, 2..=1025), [], "the earlier ones stay forgotten");
}

/// A worker forgets old unloads, and a router that was cut off may load such a name again.
#[test]
fn a_worker_that_made_an_earlier_change_is_corrected_once() {
    let directory = AdapterDirectory::default();
    let report = |worker, offers: &[AdapterOffer], unloaded: &[(&str, u64)]| {
        let report = report_of(offers, unloaded);
        let commands = directory.report(WorkerId(worker), "m", &report);
        assert_eq!(commands.learned.len(), usize::from(worker == 1));
        commands.corrections
    };
    assert_eq!(report(1, &[], &[("a", 3)]), []);
    let early = loaded("a", 1, 2);
    let joined = report(2, std::slice::from_ref(&early), &[]);
    assert_eq!(joined, [], "the command of its join is on the way");
    assert_eq!(report(2, &[], &[]), []);
    let correction = [unload_command("a", 3)];
    let again = std::slice::from_ref(&early);
    assert_eq!(report(2, again, &[]), correction);
    assert_eq!(report(2, again, &[]), [], "it refused the correction");
    let other = [early.clone(), offer("b", 2)];
    assert_eq!(report(2, &other, &[]), [], "another name is new");
    assert_eq!(report(2, &[loaded("a", 1, 1)], &[]), correction);
    directory.leave(WorkerId(2));
    assert_eq!(report(2, again, &[]), [], "it joined again");
}
