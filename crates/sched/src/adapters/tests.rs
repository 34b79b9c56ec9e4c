//! Orders and adapters, in every order that a seed draws.

use super::*;
use cleave_domain::{FlightId, SplitMix64};
use std::collections::{BTreeMap, BTreeSet};

fn id(number: u8) -> AdapterId {
    AdapterId([number; 16])
}

fn handoff(flight: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(flight),
        attempt: 1,
    }
}

/// Adapters 1 to `count`, each with a name, in places of these limits.
fn admission([loaded_max, host_max]: [usize; 2], count: u8) -> AdapterAdmission<u64> {
    let mut admission = AdapterAdmission::new(AdapterLimits {
        loaded_max,
        host_max,
    });
    (1..=count).for_each(|number| admission.add_name(id(number)));
    admission
}

/// All work that it asks for now.
fn work(admission: &mut AdapterAdmission<u64>) -> Vec<AdapterWork> {
    std::iter::from_fn(|| admission.poll()).collect()
}

/// Uses an adapter from its begin to its end; gives the work that was asked for.
fn use_once(admission: &mut AdapterAdmission<u64>, flight: u64, adapter: u8) -> Vec<AdapterWork> {
    let passage = admission.pass(handoff(flight), Some(id(adapter)), flight);
    if passage == AdapterPassage::Held {
        let passed = admission.load_ended(id(adapter), &LoadOutcome::Loaded);
        assert_eq!(passed, [AdapterPassage::Open(flight)]);
    } else {
        assert_eq!(passage, AdapterPassage::Open(flight));
    }
    admission.release(handoff(flight));
    work(admission)
}

#[test]
fn work_follows_the_order_of_uses() {
    use AdapterWork::{DropHostCopy, Load, Unload};
    let through = LoadSource::DiskThroughHost;
    let mut admission = admission([1, 2], 3);
    assert_eq!(use_once(&mut admission, 1, 1), [Load(id(1), through)]);
    let expected = [Unload(id(1)), Load(id(2), through)];
    assert_eq!(use_once(&mut admission, 2, 2), expected);
    let expected = [Unload(id(2)), Load(id(1), LoadSource::Host)];
    assert_eq!(use_once(&mut admission, 3, 1), expected);
    // The copy that was used before the others is dropped before another is made.
    let expected = [Unload(id(1)), DropHostCopy(id(2)), Load(id(3), through)];
    assert_eq!(use_once(&mut admission, 4, 3), expected);
    assert_eq!(use_once(&mut admission, 5, 3), []);
}

#[test]
fn without_room_for_copies_none_is_made() {
    use AdapterWork::{Load, Unload};
    for host_max in [0, 1] {
        let mut admission = admission([1, host_max], 2);
        let expected = [Load(id(1), LoadSource::Disk)];
        assert_eq!(use_once(&mut admission, 1, 1), expected);
        let expected = [Unload(id(1)), Load(id(2), LoadSource::Disk)];
        assert_eq!(use_once(&mut admission, 2, 2), expected);
    }
}

#[test]
fn an_adapter_is_in_use_from_its_first_order_to_the_release() {
    use AdapterState::{Loading, OnDisk, Resident};
    let mut admission = admission([2, 2], 2);
    let used = |admission: &AdapterAdmission<u64>, state| {
        [1, 2].map(|number| admission.is_used(id(number), state))
    };
    assert_eq!(used(&admission, OnDisk), [false, false]);
    let mut version = admission.version();
    let mut has_changed = |admission: &AdapterAdmission<u64>| {
        std::mem::replace(&mut version, admission.version()) < admission.version()
    };
    admission.pass(handoff(1), Some(id(2)), 1);
    assert!(has_changed(&admission));
    assert_eq!(used(&admission, Loading), [false, true]);
    assert_eq!(admission.count(Loading), 1);
    admission.load_ended(id(2), &LoadOutcome::Loaded);
    assert!(has_changed(&admission));
    assert_eq!(used(&admission, Resident), [false, true]);
    assert_eq!(used(&admission, Loading), [false, false]);
    admission.release(handoff(1));
    assert!(has_changed(&admission));
    assert_eq!(used(&admission, Resident), [false, false]);
    assert_eq!(admission.state(id(2)), Resident);
    assert_eq!((admission.count(Resident), admission.count(OnDisk)), (1, 1));
    admission.remove_name(id(2));
    assert!(has_changed(&admission));
    assert!(work(&mut admission).contains(&AdapterWork::Close(id(2))));
    assert_eq!(admission.loaded_max(), 2);
}

#[test]
fn a_fetched_adapter_is_loaded_before_its_hand_off_comes() {
    use AdapterWork::{Load, Unload};
    let mut admission = admission([1, 1], 2);
    admission.fetch(id(1));
    admission.fetch(id(1));
    assert_eq!(work(&mut admission), [Load(id(1), LoadSource::Disk)]);
    assert_eq!(
        admission.pass(handoff(1), Some(id(1)), 1),
        AdapterPassage::Held
    );
    assert_eq!(work(&mut admission), [], "one load is enough");
    let passed = admission.load_ended(id(1), &LoadOutcome::Loaded);
    assert_eq!(passed, [AdapterPassage::Open(1)]);
    // A place in use is not taken for it, nor is an adapter that is not served.
    admission.fetch(id(2));
    admission.fetch(id(3));
    assert_eq!(work(&mut admission), []);
    admission.release(handoff(1));
    admission.fetch(id(2));
    let expected = [Unload(id(1)), Load(id(2), LoadSource::Disk)];
    assert_eq!(work(&mut admission), expected);
    // Nothing has it: it leaves for another one once it is loaded.
    assert_eq!(admission.load_ended(id(2), &LoadOutcome::Loaded), []);
    assert_eq!(
        admission.pass(handoff(2), Some(id(1)), 2),
        AdapterPassage::Held
    );
}

/// The memory of a worker that does the work.
#[derive(Default)]
struct Memory {
    loaded: BTreeSet<AdapterId>,
    loading: BTreeSet<AdapterId>,
    copies: BTreeSet<AdapterId>,
}

impl Memory {
    fn perform(&mut self, work: AdapterWork) {
        match work {
            AdapterWork::Load(adapter, source) => {
                let has_copy = self.copies.contains(&adapter);
                assert_eq!(has_copy, source == LoadSource::Host, "{adapter}");
                if source == LoadSource::DiskThroughHost {
                    self.copies.insert(adapter);
                }
                assert!(self.loading.insert(adapter) && !self.loaded.contains(&adapter));
            }
            AdapterWork::Unload(adapter) => assert!(self.loaded.remove(&adapter)),
            AdapterWork::DropHostCopy(adapter) => {
                self.copies.remove(&adapter);
            }
            AdapterWork::Close(adapter) => {
                assert!(!self.loading.contains(&adapter));
                self.loaded.remove(&adapter);
                self.copies.remove(&adapter);
            }
        }
    }
}

// Invariant: I56.
#[test]
fn limits_hold_and_used_adapters_stay_in_any_order() {
    const HOST_MAX: usize = 4;
    for seed in 0..200 {
        let mut rng = SplitMix64::new(seed);
        let mut admission = admission([2, HOST_MAX], 6);
        let mut memory = Memory::default();
        let mut waiting: BTreeMap<u64, AdapterId> = BTreeMap::new();
        let mut running: BTreeMap<u64, AdapterId> = BTreeMap::new();
        for flight in 0..300 {
            match rng.range(0, 2) {
                0 => {
                    let adapter = id(rng.range(1, 6) as u8);
                    match admission.pass(handoff(flight), Some(adapter), flight) {
                        AdapterPassage::Open(_) => {
                            running.insert(flight, adapter);
                        }
                        AdapterPassage::Held => {
                            waiting.insert(flight, adapter);
                        }
                        AdapterPassage::Refused(_, _, refusal) => {
                            assert!(matches!(refusal, Refusal::QueueFull { .. }));
                            let used: BTreeSet<_> =
                                running.values().chain(waiting.values()).collect();
                            assert_eq!(used.len(), 2, "every place is in use");
                        }
                    }
                }
                1 => {
                    let Some(adapter) = memory.loading.pop_first() else {
                        continue;
                    };
                    let outcome = if rng.chance(200) {
                        let reason = "test".to_owned();
                        LoadOutcome::Failed { reason }
                    } else {
                        memory.loaded.insert(adapter);
                        LoadOutcome::Loaded
                    };
                    for passage in admission.load_ended(adapter, &outcome) {
                        let (AdapterPassage::Open(flight)
                        | AdapterPassage::Refused(_, flight, Refusal::NoAdapter { .. })) = passage
                        else {
                            panic!("{passage:?}");
                        };
                        assert_eq!(waiting.remove(&flight), Some(adapter));
                        if outcome == LoadOutcome::Loaded {
                            running.insert(flight, adapter);
                        }
                    }
                }
                _ => {
                    if let Some((flight, _)) = running.pop_first() {
                        admission.release(handoff(flight));
                    }
                }
            }
            work(&mut admission)
                .into_iter()
                .for_each(|work| memory.perform(work));
            assert!(
                memory.loaded.len() + memory.loading.len() <= 2,
                "seed {seed}"
            );
            assert!(memory.copies.len() <= HOST_MAX, "seed {seed}");
            assert!(
                running
                    .values()
                    .all(|adapter| memory.loaded.contains(adapter))
            );
            assert!(
                waiting
                    .values()
                    .all(|adapter| memory.loading.contains(adapter))
            );
        }
    }
}
