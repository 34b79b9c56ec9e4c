//! Anticipation of a shortage of blocks.
//!
//! Owns: the request that a sequence be moved before another must lose its blocks.
//! Never: relies on it: blocks that are short are taken by rank, with or without an answer.
//! Invariant: a request is sent when another sequence becomes the one to move, and at most once a
//! second while it stays the same.

use super::KvMemory;
use crate::context::WorkerContext;
use crate::policy;
use crate::sequences::{SequenceTable, WorkerSequence};
use cleave_domain::{HandoffId, Report, Time};
use std::time::Duration;

/// Steps to look ahead: about as many as a sequence draws while its move begins.
const STEPS_AHEAD: u32 = 16;

/// When a request is repeated: a router that had no room for it does not keep it.
const REPEATED_AFTER: Duration = Duration::from_secs(1);

/// The last request, while blocks are short.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryPressure {
    request: Option<MigrationRequest>,
}

#[derive(Clone, Copy, Debug)]
struct MigrationRequest {
    handoff: HandoffId,
    requested_at: Time,
}

impl MemoryPressure {
    /// Asks a router to move a sequence if running ones may run out of blocks within the next
    /// steps: of the least important ones that can move, the one with the most slack.
    pub(crate) fn request_migration(
        &mut self,
        context: &mut WorkerContext,
        sequences: &SequenceTable,
        memory: &KvMemory,
    ) {
        if !is_short(sequences, memory, context.block_tokens()) {
            self.request = None;
            return;
        }
        let movable =
            |s: &&WorkerSequence| s.decodes_next() && s.slot().is_some() && s.moving.is_none();
        let movable = sequences.iter().filter(movable);
        let chosen = policy::most_slack(movable.map(|s| (s.rank(), s.token_due())));
        let Some(sequence) = chosen.and_then(|rank| sequences.get(rank.handoff)) else {
            return;
        };
        let (router, handoff) = (sequence.router, sequence.handoff());
        let now = context.now();
        let is_repetition = |request: MigrationRequest| {
            request.handoff == handoff && now < request.requested_at + REPEATED_AFTER
        };
        if !self.request.is_some_and(is_repetition) {
            self.request = Some(MigrationRequest {
                handoff,
                requested_at: now,
            });
            context.report(router, Report::MemoryPressure { handoff });
        }
    }

    /// The sequence of the last request, and the time since then.
    pub(crate) fn last(&self, now: Time) -> Option<(HandoffId, Duration)> {
        let request = self.request?;
        Some((request.handoff, now.since(request.requested_at)))
    }
}

/// Whether the free blocks, and those about to leave, do not cover the growth of the running
/// sequences.
fn is_short(sequences: &SequenceTable, memory: &KvMemory, block_tokens: u32) -> bool {
    let (mut lacking, mut leaving_blocks) = (0, 0);
    for sequence in sequences.iter() {
        if sequence.moving.is_some() || sequence.kv.swap.is_some() {
            leaving_blocks += sequence.kv.table.len();
        } else if sequence.slot().is_some() && sequence.decodes_next() {
            lacking += sequence.lacks(STEPS_AHEAD, block_tokens);
        }
    }
    lacking > leaving_blocks as u64 + u64::from(memory.blocks().blocks_available())
}

impl WorkerSequence {
    /// Blocks beyond its own, held and reserved, that its next `steps` tokens need.
    pub(crate) fn lacks(&self, steps: u32, block_tokens: u32) -> u64 {
        let blocks = self.tokens_ahead(steps).div_ceil(block_tokens);
        u64::from(blocks).saturating_sub(self.kv.blocks())
    }

    /// Leading tokens that its next `steps` steps run to, if each draws one.
    pub(super) fn tokens_ahead(&self, steps: u32) -> u32 {
        let left = self
            .request
            .stop
            .max_tokens
            .saturating_sub(self.output_count());
        self.len() + steps.min(left).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerOutput;
    use crate::memory::tests::NO_BLOCK;
    use crate::sequences::SequencePhase;
    use crate::sequences::sample::sequence;
    use crate::test_worker::{ROUTER, handoff, limits};

    /// Two running streams of 41 tokens, each with three blocks, and no other block.
    fn full() -> (WorkerContext, SequenceTable, KvMemory) {
        let mut limits = limits();
        limits.capacity.blocks_count = 6;
        let mut memory = KvMemory::new(&limits);
        let mut table = SequenceTable::new(&limits);
        for number in [1, 2] {
            let mut stream = sequence(number, 40);
            assert!(memory.secure(&mut stream, NO_BLOCK, 0));
            memory.take_reserved(&mut stream, 3);
            stream.tokens.push(1);
            (stream.kv.computed, stream.phase) = (40, SequencePhase::Decode);
            table.add(stream.activated(), Time::ZERO);
            assert!(table.give_slot(handoff(number)));
        }
        (WorkerContext::new(limits), table, memory)
    }

    #[test]
    fn a_request_to_move_is_repeated_after_a_second() {
        let (mut context, mut table, memory) = full();
        let mut pressure = MemoryPressure::default();
        let mut asked_at = |millis: u32, table: &SequenceTable| {
            context.advance(Time::ZERO + Duration::from_millis(1) * millis);
            pressure.request_migration(&mut context, table, &memory);
            match context.poll()? {
                WorkerOutput::Report {
                    router: ROUTER,
                    report: Report::MemoryPressure { handoff },
                } => Some(handoff),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(asked_at(0, &table), Some(handoff(2)), "the least important");
        assert_eq!(asked_at(999, &table), None);
        assert_eq!(asked_at(1000, &table), Some(handoff(2)));
        table.free_slot(handoff(2));
        assert_eq!(asked_at(1001, &table), Some(handoff(1)), "another one");
        table.close(handoff(1), None);
        assert_eq!(asked_at(9000, &table), None, "no stream grows");
    }
}
