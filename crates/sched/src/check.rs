//! Every invariant of a worker's brain, asserted.
//!
//! Owns: the list. Never: runs in production by itself: it walks everything.
//! Invariant: the numbers are those of ARCHITECTURE.md.

use crate::Brain;
use crate::sequence::{Sequence, Stage};
use cleave_domain::HandoffId;
use std::collections::{BTreeMap, BTreeSet};

impl Brain {
    /// Asserts every invariant of this brain; for tests and simulators, after each
    /// [`Brain::handle`].
    pub fn check(&self) {
        let size = self.limits.capacity.block_tokens;
        let tables = self
            .sequences
            .values()
            .flat_map(|s| s.table.iter().copied());
        let tables = tables.chain(self.tiers.leaving().map(|lent| lent.held));
        let promised = self.sequences.values().map(|s| s.promise.count()).sum();
        // Every block held is in the tables of its holders, every promise is somebody's.
        self.pool.check(tables, promised);
        self.check_lists();
        for (handoff, sequence) in &self.sequences {
            assert_eq!(*handoff, sequence.rank.handoff);
            check_sequence(sequence, size);
            let kept = !sequence.settled() || self.read_for_a_move(*handoff);
            assert!(!sequence.closing() || kept, "nothing keeps it");
        }
        self.check_step();
        self.check_moves();
        self.check_tiers();
        let swapped = self.blocks_swapped();
        assert!(swapped <= u64::from(self.limits.swap_blocks), "host memory");
        let named: u64 = self.sequences.values().map(|s| s.table.len() as u64).sum();
        let named = named + self.tiers.leaving().len() as u64;
        assert_eq!(self.pool.holdings(), named, "blocks leaked");
    }

    /// A move is open exactly as long as its sequence names it, and is dropped once nothing is left
    /// of it.
    fn check_moves(&self) {
        for (handoff, leaving) in &self.moves {
            assert_eq!(*handoff, leaving.order.handoff);
            leaving.sender.check();
            let sequence = self.sequences.get(&leaving.order.of);
            let named = sequence.is_some_and(|s| s.moving == Some(*handoff));
            assert_eq!(named, leaving.sender.open(), "an open move: {leaving:?}");
            let read = !leaving.sender.settled();
            assert!(named || read, "nothing is left of it: {leaving:?}");
            assert!(sequence.is_some() || !read, "read without a holder");
        }
        for sequence in self.sequences.values() {
            let known = |handoff| self.moves.contains_key(&handoff);
            assert!(sequence.moving.is_none_or(known), "a move nobody knows");
        }
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
        let known: BTreeSet<_> = self.sequences.keys().chain(self.moves.keys()).collect();
        assert_eq!(
            known.len(),
            self.sequences.len() + self.moves.len(),
            "a hand-off stays and leaves"
        );
        let waiting = known.into_iter().copied();
        self.stalls
            .check(waiting.filter(|handoff| self.waits_for_peer(*handoff)));
        let known: BTreeSet<_> = self.sequences.keys().chain(self.moves.keys()).collect();
        let asking = known.into_iter().copied();
        self.resends
            .check(asking.filter(|handoff| self.awaits_answer(*handoff)));
        let queue = capacity.slots_count + self.limits.queue_max;
        let decoding = self.sequences.values().filter(|s| s.decodes_here()).count();
        assert!(decoding <= queue as usize, "more decoding than may be");
        let queued = |s: &&Sequence| s.outgoing.is_some() && s.times.started.is_none();
        let queued = self.sequences.values().filter(queued).count();
        assert!(queued <= self.limits.queue_max as usize, "queue");
    }

    fn check_step(&self) {
        let capacity = &self.limits.capacity;
        let steps_max = self.limits.steps_in_flight as usize;
        assert!(self.under_way.len() <= steps_max, "steps under way");
        // What each sequence runs in all of them.
        let mut placed: BTreeMap<HandoffId, (u32, u32)> = BTreeMap::new();
        for (place, step) in self.under_way.iter().enumerate() {
            let tokens: u32 = step.placed.iter().map(|placed| placed.tokens).sum();
            assert!(tokens <= capacity.step_tokens_max, "step tokens");
            for one in &step.placed {
                let (steps, tokens) = placed.entry(one.handoff).or_default();
                assert_eq!(*steps as usize, place, "not in the step before");
                *steps += 1;
                *tokens += one.tokens;
            }
        }
        for (handoff, sequence) in &self.sequences {
            let (steps, tokens) = placed.remove(handoff).unwrap_or_default();
            assert_eq!(sequence.steps_count, steps, "steps of {handoff}");
            assert!(steps == 0 || sequence.slot.is_some(), "runs without a slot");
            if steps > 0 && !sequence.closing() {
                self.check_written(sequence, tokens);
            }
        }
        // A sequence in a step stays until that is over.
        assert!(placed.is_empty(), "in a step and not here: {placed:?}");
        // An idle engine means that nobody can run: all wait for their KV, their peer or blocks.
        if self.under_way.is_empty() {
            let mut active = self
                .active
                .iter()
                .map(|rank| &self.sequences[&rank.handoff]);
            // Who gives way may have to be read to its end first.
            let copied = self.sequences.values().any(|s| s.swapping())
                || self.moves.values().any(|leaving| !leaving.sender.settled())
                || self.tiers.leaving().len() > 0;
            assert!(
                copied || active.all(Sequence::starved),
                "an active sequence does not run"
            );
        }
    }
}

impl Brain {
    /// The blocks that steps under way write, so many tokens from those that are computed on, are there,
    /// hold nothing that the pool would give to others, and are read by nobody.
    fn check_written(&self, sequence: &Sequence, tokens: u32) {
        let size = self.limits.capacity.block_tokens;
        let first = sequence.computed / size;
        let end = (sequence.computed + tokens).div_ceil(size);
        assert!(end as usize <= sequence.table.len(), "no block to write to");
        assert!(sequence.published <= first, "written and published");
        let of = sequence.rank.handoff;
        let moves = self.moves.values().filter(|leaving| leaving.order.of == of);
        let mut senders = moves
            .map(|leaving| &leaving.sender)
            .chain(&sequence.outgoing);
        let read = senders.any(|sender| (first..end).any(|ordinal| sender.reads(ordinal)));
        assert!(!read, "written and read: {sequence:?}");
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
        Stage::Reserved => assert!(sequence.slot.is_none() && !sequence.stepping()),
        Stage::Sending => {
            let open = sequence.outgoing.as_ref().is_some_and(|s| s.open());
            assert!(sequence.slot.is_none() && open, "sends to nobody");
        }
        Stage::Still => {
            let leaves = sequence.slot.is_none() && sequence.moving.is_some();
            assert!(
                leaves && !sequence.stepping(),
                "it stands still for nothing"
            );
        }
        Stage::Closing { .. } => {}
    }
    if sequence.swap.is_some() {
        let stands = sequence.slot.is_none() && !sequence.stepping() && sequence.moving.is_none();
        assert!(stands, "swapped, and not at rest: {sequence:?}");
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
