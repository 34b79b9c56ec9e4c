//! The sequences that a worker has accepted and not released.
//!
//! Owns: the list of those with tokens to run, the engine's slots, and the leases. Never: decides
//! which of them runs or ends, or holds a block.
//! Invariant: a sequence is in the list of active ones exactly while it is active; each slot is
//! free or has one sequence; each sequence that is not closing has a lease. So the stage, the slot
//! and the steps of a sequence are changed here alone.

use super::{SequenceStage, WorkerSequence};
use crate::WorkerLimits;
use crate::deadline::Deadlines;
use crate::policy::ServiceRank;
use cleave_domain::{HandoffId, OpenSlot, SlotIndex, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Every hand-off accepted and not released.
#[derive(Clone, Debug)]
pub(crate) struct SequenceTable {
    sequences: BTreeMap<HandoffId, WorkerSequence>,
    /// Sequences with tokens to run, the most important first.
    active: BTreeSet<ServiceRank>,
    slots_free: BTreeSet<SlotIndex>,
    slots_count: u32,
    /// A hand-off that its router does not renew in time ends.
    leases: Deadlines,
    /// Orders accepted so far.
    arrivals: u64,
}

impl SequenceTable {
    pub(crate) fn new(limits: &WorkerLimits) -> Self {
        let capacity = &limits.capacity;
        // Every sequence with a slot can decode in one step.
        let slots_count = capacity.slots_count.min(capacity.step_tokens_max);
        Self {
            sequences: BTreeMap::new(),
            active: BTreeSet::new(),
            slots_free: (0..slots_count).map(SlotIndex).collect(),
            slots_count,
            leases: Deadlines::default(),
            arrivals: 0,
        }
    }

    // === coming and going ===

    /// Numbers a sequence that arrives.
    pub(crate) fn count_arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    /// Adds a sequence, with a lease until then.
    pub(crate) fn add(&mut self, sequence: WorkerSequence, leased_until: Time) {
        let handoff = sequence.handoff();
        if sequence.stage() == SequenceStage::Active {
            self.active.insert(sequence.rank());
        }
        self.leases.set(handoff, leased_until);
        let before = self.sequences.insert(handoff, sequence);
        assert!(before.is_none(), "{handoff:?} is accepted twice");
    }

    /// Extends the lease of a sequence that is not closing.
    pub(crate) fn renew(&mut self, handoff: HandoffId, until: Time) {
        if self.get(handoff).is_some_and(|s| !s.closing()) {
            self.leases.set(handoff, until);
        }
    }

    /// A sequence whose lease has ended, if any; the caller closes it at once.
    pub(crate) fn next_expired(&mut self, now: Time) -> Option<HandoffId> {
        self.leases.pop_passed(now)
    }

    /// Ends a sequence, except for readers and writers of its blocks: it leaves the batch at once,
    /// but keeps its slot while a step writes to it. `cancelled` is the time of the cancel, if that
    /// is why.
    pub(crate) fn close(&mut self, handoff: HandoffId, cancelled: Option<Time>) {
        self.set_stage(handoff, SequenceStage::Closing { cancelled });
        self.leases.remove(handoff);
        if self.get(handoff).is_some_and(|s| !s.stepping()) {
            self.free_slot(handoff);
        }
    }

    /// Removes a sequence that is closing, and returns it for the release of its blocks.
    pub(crate) fn remove(&mut self, handoff: HandoffId) -> Option<WorkerSequence> {
        self.free_slot(handoff);
        let sequence = self.sequences.remove(&handoff)?;
        assert!(sequence.closing(), "{handoff:?} is removed before its end");
        Some(sequence)
    }

    // === stages ===

    /// The sequence has tokens to run here.
    pub(crate) fn activate(&mut self, handoff: HandoffId) {
        self.set_stage(handoff, SequenceStage::Active);
    }

    /// Nothing more of the sequence runs here: its blocks are being sent.
    pub(crate) fn begin_sending(&mut self, handoff: HandoffId) {
        self.set_stage(handoff, SequenceStage::Sending);
        self.free_slot(handoff);
    }

    /// The sequence is paused, for a move.
    pub(crate) fn pause(&mut self, handoff: HandoffId) {
        self.set_stage(handoff, SequenceStage::Paused);
        self.free_slot(handoff);
    }

    fn set_stage(&mut self, handoff: HandoffId, stage: SequenceStage) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.stage = stage;
        if stage == SequenceStage::Active {
            self.active.insert(sequence.rank);
        } else {
            self.active.remove(&sequence.rank);
        }
    }

    // === slots and steps ===

    pub(crate) fn has_free_slot(&self) -> bool {
        !self.slots_free.is_empty()
    }

    /// Gives a sequence the first free slot, if it has none; false if there is none.
    pub(crate) fn give_slot(&mut self, handoff: HandoffId) -> bool {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return false;
        };
        if sequence.slot.is_none() {
            sequence.slot = self.slots_free.pop_first();
        }
        sequence.slot.is_some()
    }

    /// Takes a sequence's slot, if it has one.
    pub(crate) fn free_slot(&mut self, handoff: HandoffId) {
        if let Some(sequence) = self.sequences.get_mut(&handoff) {
            self.slots_free.extend(sequence.slot.take());
            sequence.opened = false;
        }
    }

    /// The description of a sequence that the engine needs before its first step in its slot;
    /// `None` if the engine has it.
    pub(crate) fn open_slot(&mut self, handoff: HandoffId) -> Option<OpenSlot> {
        let sequence = self.sequences.get_mut(&handoff)?;
        let slot = sequence.slot.filter(|_| !sequence.opened)?;
        sequence.opened = true;
        Some(sequence.describe(slot))
    }

    /// The engine has to open the sequence's slot anew.
    pub(crate) fn forget_opening(&mut self, handoff: HandoffId) {
        if let Some(sequence) = self.sequences.get_mut(&handoff) {
            sequence.opened = false;
        }
    }

    /// The sequence is in one step more.
    pub(crate) fn enter_step(&mut self, handoff: HandoffId, now: Time) {
        if let Some(sequence) = self.sequences.get_mut(&handoff) {
            sequence.steps_count += 1;
            sequence.client_timing.step_started(now);
        }
    }

    /// A step that held the sequence is over. One that is closing loses its slot with its last
    /// step.
    pub(crate) fn leave_step(&mut self, handoff: HandoffId) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.steps_count -= 1;
        if sequence.closing() && !sequence.stepping() {
            self.free_slot(handoff);
        }
    }

    // === looking ===

    pub(crate) fn get(&self, handoff: HandoffId) -> Option<&WorkerSequence> {
        self.sequences.get(&handoff)
    }

    pub(crate) fn get_mut(&mut self, handoff: HandoffId) -> Option<&mut WorkerSequence> {
        self.sequences.get_mut(&handoff)
    }

    pub(crate) fn contains(&self, handoff: HandoffId) -> bool {
        self.sequences.contains_key(&handoff)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.sequences.len()
    }

    /// All sequences, in the order of their hand-offs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &WorkerSequence> + Clone {
        self.sequences.values()
    }

    pub(crate) fn handoffs(&self) -> impl Iterator<Item = HandoffId> + '_ {
        self.sequences.keys().copied()
    }

    /// Hand-offs of the sequences for which `pick` holds.
    pub(crate) fn handoffs_where(&self, pick: impl Fn(&WorkerSequence) -> bool) -> Vec<HandoffId> {
        let picked = self.iter().filter(|sequence| pick(sequence));
        picked.map(WorkerSequence::handoff).collect()
    }

    /// Sequences with tokens to run, the most important first.
    pub(crate) fn active(&self) -> impl Iterator<Item = &WorkerSequence> {
        self.active
            .iter()
            .map(|rank| &self.sequences[&rank.handoff])
    }

    /// Ranks of the active sequences for which `pick` holds, the most important first.
    pub(crate) fn active_where(&self, pick: impl Fn(&WorkerSequence) -> bool) -> Vec<ServiceRank> {
        let picked = self.active().filter(|sequence| pick(sequence));
        picked.map(WorkerSequence::rank).collect()
    }

    /// Blocks and pieces of states in host memory, or being copied there or back.
    pub(crate) fn blocks_swapped(&self) -> u64 {
        let swaps = self.iter().filter_map(|s| s.kv.swap());
        swaps.map(|swap| u64::from(swap.units)).sum()
    }

    /// The earliest end of a lease.
    pub(crate) fn lease_end(&self) -> Option<Time> {
        self.leases.next()
    }

    /// Time left of each lease.
    pub(crate) fn leases(&self, now: Time) -> impl Iterator<Item = (HandoffId, Duration)> + '_ {
        let leases = self.leases.iter();
        leases.map(move |(handoff, until)| (handoff, until.since(now)))
    }

    /// Asserts this module's invariant.
    pub(crate) fn check(&self) {
        let active = self.iter().filter(|s| s.stage == SequenceStage::Active);
        let active: BTreeSet<_> = active.map(|s| s.rank).collect();
        assert_eq!(active, self.active, "the list of active sequences is wrong");
        let mut slots = self.slots_free.clone();
        for slot in self.iter().filter_map(|s| s.slot) {
            assert!(
                slots.insert(slot),
                "{slot} is listed as free while in use, or in use twice"
            );
        }
        let count = self.slots_count as usize;
        assert_eq!(slots.len(), count, "a slot is neither free nor in use");
        let living = self.iter().filter(|s| !s.closing());
        self.leases.check(living.map(WorkerSequence::handoff));
        for (handoff, sequence) in &self.sequences {
            assert_eq!(*handoff, sequence.rank.handoff);
            let is_idle = sequence.slot.is_none() && !sequence.stepping();
            let waits = matches!(
                sequence.stage,
                SequenceStage::Reserved | SequenceStage::Paused
            );
            assert!(is_idle || !waits, "it waits with a slot: {sequence:?}");
            let sends = sequence.stage == SequenceStage::Sending;
            assert!(
                sequence.slot.is_none() || !sends,
                "a sending sequence has a slot: {sequence:?}"
            );
            assert!(
                sequence.slot.is_some() || !sequence.stepping(),
                "a sequence runs without a slot: {sequence:?}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequences::sample::sequence;
    use crate::test_worker::{MS, handoff, limits};

    const LEASE: Time = Time::from_nanos(1_000_000);

    /// A table with two slots, and this many active sequences.
    fn table(active: u64) -> SequenceTable {
        let mut limits = limits();
        limits.capacity.slots_count = 2;
        let mut table = SequenceTable::new(&limits);
        for number in 0..active {
            table.add(sequence(number, 20).activated(), LEASE);
        }
        table.check();
        table
    }

    fn active(table: &SequenceTable) -> Vec<HandoffId> {
        table.active().map(WorkerSequence::handoff).collect()
    }

    #[test]
    fn the_active_list_follows_every_stage() {
        let mut table = table(2);
        table.add(sequence(2, 20), LEASE);
        assert_eq!(active(&table), [handoff(0), handoff(1)], "one is reserved");
        table.activate(handoff(2));
        table.begin_sending(handoff(0));
        table.check();
        assert_eq!(active(&table), [handoff(1), handoff(2)]);
        table.pause(handoff(2));
        table.close(handoff(1), None);
        table.check();
        assert_eq!(active(&table), []);
        table.activate(handoff(2));
        table.check();
        assert_eq!(active(&table), [handoff(2)], "its move was aborted");
    }

    #[test]
    fn a_slot_has_one_sequence_until_it_is_free() {
        let mut table = table(3);
        let slots = [0, 1, 2].map(|number| table.give_slot(handoff(number)));
        assert_eq!(slots, [true, true, false]);
        assert!(table.give_slot(handoff(0)), "it keeps its own");
        assert!(!table.has_free_slot());
        table.check();
        table.begin_sending(handoff(1));
        assert!(table.give_slot(handoff(2)));
        table.check();
        assert_eq!(
            table.get(handoff(2)).and_then(WorkerSequence::slot),
            Some(SlotIndex(1))
        );
    }

    #[test]
    fn a_closing_sequence_keeps_its_slot_until_its_last_step() {
        let mut table = table(1);
        table.give_slot(handoff(0));
        for _ in 0..2 {
            table.enter_step(handoff(0), Time::ZERO);
        }
        table.close(handoff(0), None);
        let has_slot = |table: &SequenceTable| {
            table.check();
            table.get(handoff(0)).is_some_and(|s| s.slot().is_some())
        };
        assert!(has_slot(&table));
        table.leave_step(handoff(0));
        assert!(has_slot(&table), "a step ahead holds it");
        table.leave_step(handoff(0));
        assert!(!has_slot(&table));
    }

    #[test]
    fn a_slot_is_opened_once_for_each_sequence() {
        let mut table = table(1);
        assert!(table.open_slot(handoff(0)).is_none(), "it has no slot");
        table.give_slot(handoff(0));
        assert!(table.open_slot(handoff(0)).is_some());
        assert!(table.open_slot(handoff(0)).is_none());
        table.forget_opening(handoff(0));
        assert!(table.open_slot(handoff(0)).is_some(), "a step failed");
        table.free_slot(handoff(0));
        table.give_slot(handoff(0));
        assert!(table.open_slot(handoff(0)).is_some(), "it is a new slot");
    }

    #[test]
    fn a_closing_sequence_has_no_lease() {
        let mut table = table(2);
        table.renew(handoff(0), LEASE + MS);
        table.close(handoff(1), None);
        table.renew(handoff(1), LEASE + MS);
        table.check();
        assert_eq!(table.lease_end(), Some(LEASE + MS));
        assert_eq!(table.next_expired(LEASE), None);
        assert_eq!(table.next_expired(LEASE + MS), Some(handoff(0)));
    }

    #[test]
    #[should_panic(expected = "removed before its end")]
    fn a_sequence_is_removed_after_its_end_alone() {
        table(1).remove(handoff(0));
    }
}
