//! Every invariant of a worker's brain, asserted.
//!
//! Owns: the list. Never: runs in production by itself, because it walks all state.
//! Invariant: the numbers are those of docs/design/invariants.md.

use crate::WorkerBrain;
use crate::sequences::{SequenceStage, WorkerSequence};
use cleave_domain::KvUnit;
use std::collections::BTreeSet;

impl WorkerBrain {
    /// Asserts every invariant of this brain; for tests and simulators, after each
    /// [`WorkerBrain::handle`].
    pub fn check(&self) {
        let size = self.context.block_tokens();
        let tables = self
            .sequences
            .values()
            .flat_map(|s| s.table.iter().copied());
        let tables = tables.chain(self.tiers.offloading().map(|pin| pin.held));
        let reserved = self.sequences.values().map(|s| s.reservation.count()).sum();
        // Every held block is in the table of a holder, and every reservation belongs to a
        // sequence.
        self.pools.blocks.check(tables, reserved);
        let slots = self.sequences.values().filter_map(|s| s.state);
        let slots = slots.flat_map(|state| state.held());
        match &self.pools.states {
            Some(states) => states.check(slots, 0),
            None => assert_eq!(slots.count(), 0, "a state without a plane"),
        }
        self.check_lists();
        for (handoff, sequence) in &self.sequences {
            assert_eq!(*handoff, sequence.rank.handoff);
            check_sequence(sequence, size);
            // No sequence has blocks and waits for a slot, or the reverse.
            let has_blocks = !sequence.table.is_empty() || sequence.reservation.count() > 0;
            let expects_state = has_blocks && self.pools.states.is_some();
            assert_eq!(sequence.state.is_some(), expects_state, "{sequence:?}");
            let may_remain = !sequence.settled() || self.read_for_a_move(*handoff);
            assert!(
                !sequence.closing() || may_remain,
                "a closing sequence was not released although nothing touches its blocks"
            );
        }
        self.check_step();
        self.check_moves();
        self.check_tiers();
        let swapped = self.blocks_swapped();
        assert!(
            swapped <= u64::from(self.context.limits().swap_blocks),
            "more blocks are swapped than swap_blocks"
        );
        let named: u64 = self.sequences.values().map(|s| s.table.len() as u64).sum();
        let named = named + self.tiers.offloading().len() as u64;
        assert_eq!(self.pools.blocks.holders_total(), named, "blocks leaked");
    }

    /// Asserts that a move is open exactly as long as its sequence names it, and is dropped once
    /// nothing is left of it.
    fn check_moves(&self) {
        for (handoff, outbound) in &self.moves {
            assert_eq!(*handoff, outbound.order.handoff);
            outbound.sender.check();
            let sequence = self.sequences.get(&outbound.order.of);
            let named = sequence.is_some_and(|s| s.moving == Some(*handoff));
            assert_eq!(
                named,
                outbound.sender.is_open(),
                "a move is open without its sequence, or the reverse: {outbound:?}"
            );
            let read = !outbound.sender.is_settled();
            assert!(
                named || read,
                "a finished move was not dropped: {outbound:?}"
            );
            assert!(
                sequence.is_some() || !read,
                "a move reads blocks of a released sequence"
            );
        }
        for sequence in self.sequences.values() {
            let is_known = |handoff| self.moves.contains_key(&handoff);
            assert!(
                sequence.moving.is_none_or(is_known),
                "a sequence names a move that does not exist"
            );
        }
    }

    fn check_lists(&self) {
        let stage = |stage| move |s: &&WorkerSequence| s.stage == stage;
        let active = self.sequences.values().filter(stage(SequenceStage::Active));
        let active: BTreeSet<_> = active.map(|s| s.rank).collect();
        assert_eq!(active, self.active, "the list of active sequences is wrong");
        let mut slots = self.slots_free.clone();
        for slot in self.sequences.values().filter_map(|s| s.slot) {
            assert!(
                slots.insert(slot),
                "{slot} is listed as free while in use, or in use twice"
            );
        }
        let capacity = &self.context.limits().capacity;
        let count = capacity.slots_count.min(capacity.step_tokens_max) as usize;
        assert_eq!(slots.len(), count, "a slot is neither free nor in use");
        let living = self.sequences.iter().filter(|(_, s)| !s.closing());
        self.leases.check(living.map(|(handoff, _)| *handoff));
        let known_handoffs: BTreeSet<_> = self.sequences.keys().chain(self.moves.keys()).collect();
        assert_eq!(
            known_handoffs.len(),
            self.sequences.len() + self.moves.len(),
            "a hand-off is both a sequence and a move"
        );
        let waiting = known_handoffs.into_iter().copied();
        self.stalls
            .check(waiting.filter(|handoff| self.waits_for_peer(*handoff)));
        let known_handoffs: BTreeSet<_> = self.sequences.keys().chain(self.moves.keys()).collect();
        let asking = known_handoffs.into_iter().copied();
        self.resends
            .check(asking.filter(|handoff| self.awaits_answer(*handoff)));
        let queue = capacity.slots_count + self.context.limits().queue_max;
        let decoding = self.sequences.values().filter(|s| s.decodes_here()).count();
        assert!(
            decoding <= queue as usize,
            "more decode legs than slots and queue allow"
        );
        let queued = |s: &&WorkerSequence| s.outgoing.is_some() && s.times.started.is_none();
        let queued = self.sequences.values().filter(queued).count();
        assert!(
            queued <= self.context.limits().queue_max as usize,
            "more prompts are queued than queue_max"
        );
    }

    fn check_step(&self) {
        self.steps.check(self.context.limits());
        self.forecast.check();
        let mut placed = self.steps.placed();
        for (handoff, sequence) in &self.sequences {
            let (steps, tokens) = placed.remove(handoff).unwrap_or_default();
            assert_eq!(
                sequence.steps_count, steps,
                "steps_count of {handoff} is wrong"
            );
            assert!(
                steps == 0 || sequence.slot.is_some(),
                "a sequence runs without a slot"
            );
            if steps > 0 && !sequence.closing() {
                self.check_written(sequence, tokens);
            }
        }
        // A sequence in a step stays until the step is over.
        assert!(
            placed.is_empty(),
            "a step holds unknown sequences: {placed:?}"
        );
        // An idle engine means that no sequence can run: all wait for their KV, their peer or
        // blocks.
        if self.steps.is_empty() {
            let mut active = self
                .active
                .iter()
                .map(|rank| &self.sequences[&rank.handoff]);
            // A victim's blocks may first have to be read to their end.
            let copied = self.sequences.values().any(|s| s.swapping())
                || self
                    .moves
                    .values()
                    .any(|outbound| !outbound.sender.is_settled())
                || self.tiers.offloading().len() > 0;
            let waits = |s: &WorkerSequence| {
                s.starved() || s.lacks_state() && self.blocks_are_read(s.rank.handoff)
            };
            assert!(
                copied || active.all(waits),
                "the engine is idle although an active sequence could run"
            );
        }
    }
}

impl WorkerBrain {
    /// Asserts that the blocks to which steps under way write `tokens` tokens exist, are not shared
    /// through the pool, and are read by nobody.
    fn check_written(&self, sequence: &WorkerSequence, tokens: u32) {
        let size = self.context.block_tokens();
        let first = sequence.computed / size;
        let end = (sequence.computed + tokens).div_ceil(size);
        assert!(
            end as usize <= sequence.table.len(),
            "a step writes past the sequence's blocks"
        );
        assert!(
            sequence.published <= first,
            "a step writes to a published block"
        );
        let of = sequence.rank.handoff;
        let moves = self
            .moves
            .values()
            .filter(|outbound| outbound.order.of == of);
        let mut senders = moves
            .map(|outbound| &outbound.sender)
            .chain(&sequence.outgoing);
        let read = senders
            .any(|sender| (first..end).any(|ordinal| sender.is_reading(KvUnit::block(ordinal))));
        assert!(
            !read && !self.state_is_read(sequence),
            "a step writes to a block or state that is being read: {sequence:?}"
        );
    }
}

fn check_sequence(sequence: &WorkerSequence, block_tokens: u32) {
    let covered = sequence.table.len() * block_tokens as usize;
    match sequence.stage {
        SequenceStage::Active => {
            assert!(
                sequence.tokens_to_run() > 0,
                "an active sequence has no token to run"
            );
            assert!(
                sequence.computed as usize <= covered,
                "computed tokens exceed the sequence's blocks"
            );
            let decoding = sequence.slot.is_some() || sequence.computed + 1 == sequence.len();
            assert!(
                sequence.starved() || decoding || sequence.has_all_blocks(block_tokens),
                "a running prompt lacks blocks: {sequence:?}"
            );
        }
        SequenceStage::Reserved => assert!(sequence.slot.is_none() && !sequence.stepping()),
        SequenceStage::Sending => {
            let open = sequence.outgoing.as_ref().is_some_and(|s| s.is_open());
            assert!(
                sequence.slot.is_none() && open,
                "a sending sequence has a slot or no open sender"
            );
        }
        SequenceStage::Paused => {
            let is_paused = sequence.slot.is_none() && sequence.moving.is_some();
            assert!(
                is_paused && !sequence.stepping(),
                "a paused sequence has a slot, no move, or a step"
            );
        }
        SequenceStage::Closing { .. } => {}
    }
    if sequence.swap.is_some() {
        let stands = sequence.slot.is_none() && !sequence.stepping() && sequence.moving.is_none();
        assert!(
            stands,
            "a swapped sequence has a slot, a step or a move: {sequence:?}"
        );
    }
    let published = sequence.published as usize;
    assert!(
        published <= sequence.table.len(),
        "more blocks are published than held: {sequence:?}"
    );
    if let Some(receiver) = &sequence.incoming {
        receiver.check();
    }
    if let Some(sender) = &sequence.outgoing {
        sender.check();
    }
}
