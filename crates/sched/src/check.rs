//! Every invariant of a worker's brain, asserted.
//!
//! Owns: the list. Never: runs in production by itself: it walks everything.
//! Invariant: the numbers are those of ARCHITECTURE.md.

use crate::Brain;
use crate::sequence::{Sequence, Stage};
use std::collections::BTreeSet;

impl Brain {
    /// Asserts every invariant of this brain; for tests and simulators, after each
    /// [`Brain::handle`].
    pub fn check(&self) {
        let size = self.limits.capacity.block_tokens;
        let tables = self
            .sequences
            .values()
            .flat_map(|s| s.table.iter().copied());
        let promised = self.sequences.values().map(|s| s.promise.count()).sum();
        // Every block held is in the tables of its holders, every promise is somebody's.
        self.pool.check(tables, promised);
        self.check_lists();
        for (handoff, sequence) in &self.sequences {
            assert_eq!(*handoff, sequence.rank.handoff);
            check_sequence(sequence, size);
        }
        self.check_step();
    }

    fn check_lists(&self) {
        let stage = |stage| move |s: &&Sequence| s.stage == stage;
        let active = self.sequences.values().filter(stage(Stage::Active));
        let active: BTreeSet<_> = active.map(|s| s.rank).collect();
        assert_eq!(active, self.active, "the active");
        let mut slots = self.slots.clone();
        for slot in self.sequences.values().filter_map(|s| s.slot) {
            assert!(slots.insert(slot), "{slot} is free or taken twice");
        }
        let capacity = &self.limits.capacity;
        let count = capacity.slots_count.min(capacity.step_tokens_max) as usize;
        assert_eq!(slots.len(), count, "a slot is lost");
        let living = self.sequences.iter().filter(|(_, s)| !s.closing());
        self.leases.check(living.map(|(handoff, _)| *handoff));
        let living = self.sequences.iter().filter(|(_, s)| !s.closing());
        let waiting = living.filter(|(_, s)| s.waits_for_peer());
        self.stalls.check(waiting.map(|(handoff, _)| *handoff));
        let queue = capacity.slots_count + self.limits.queue_max;
        let decoding = self.sequences.values().filter(|s| s.decodes_here()).count();
        assert!(decoding <= queue as usize, "more decoding than may be");
        let queued = |s: &&Sequence| s.outgoing.is_some() && s.times.started.is_none();
        let queued = self.sequences.values().filter(queued).count();
        assert!(queued <= self.limits.queue_max as usize, "queue");
    }

    fn check_step(&self) {
        let stepping = self.sequences.iter().filter(|(_, s)| s.stepping);
        let stepping: BTreeSet<_> = stepping.map(|(handoff, _)| *handoff).collect();
        let placed = self.under_way.iter().flat_map(|step| &step.placed);
        let tokens: u32 = placed.clone().map(|placed| placed.tokens).sum();
        assert!(
            tokens <= self.limits.capacity.step_tokens_max,
            "step tokens"
        );
        // A sequence in the step stays until the step is over.
        let placed: BTreeSet<_> = placed.map(|placed| placed.handoff).collect();
        assert_eq!(stepping, placed, "sequences in the step");
        // An idle engine means that nobody can run: all wait for their KV, their peer or blocks.
        if self.under_way.is_none() {
            let mut active = self
                .active
                .iter()
                .map(|rank| &self.sequences[&rank.handoff]);
            assert!(
                active.all(Sequence::starved),
                "an active sequence does not run"
            );
        }
    }
}

fn check_sequence(sequence: &Sequence, block_tokens: u32) {
    let covered = sequence.table.len() * block_tokens as usize;
    match sequence.stage {
        Stage::Active => {
            assert!(sequence.rest() > 0, "nothing to run");
            assert!(sequence.computed as usize <= covered, "KV without a block");
            let decoding = sequence.slot.is_some() || sequence.computed + 1 == sequence.len();
            assert!(
                sequence.starved() || decoding || sequence.secured(block_tokens),
                "it may run out half way: {sequence:?}"
            );
        }
        Stage::Reserved => assert!(sequence.slot.is_none() && !sequence.stepping),
        Stage::Sending => {
            let open = sequence.outgoing.as_ref().is_some_and(|s| s.open());
            assert!(sequence.slot.is_none() && open, "sends to nobody");
        }
        Stage::Closing { .. } => assert!(!sequence.settled(), "nothing keeps it"),
    }
    let published = sequence.published as usize;
    assert!(published <= sequence.table.len(), "published: {sequence:?}");
    if let Some(receiver) = &sequence.incoming {
        receiver.check();
    }
    if let Some(sender) = &sequence.outgoing {
        sender.check();
    }
}
