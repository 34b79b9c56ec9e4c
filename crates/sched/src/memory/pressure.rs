//! Anticipation of a shortage of blocks.
//!
//! Owns: the request that a sequence be moved before another must lose its blocks.
//! Never: relies on it: blocks that are short are taken by rank, with or without an answer.
//! Invariant: a request is sent when another sequence becomes the one to move, and at most once a
//! second while it stays the same.

use crate::context::WorkerContext;
use crate::policy;
use crate::sequences::WorkerSequence;
use cleave_domain::{HandoffId, Report, Time};
use cleave_kv::KvPools;
use std::collections::BTreeMap;
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
        sequences: &BTreeMap<HandoffId, WorkerSequence>,
        pools: &KvPools,
    ) {
        if !is_short(sequences, pools, context.block_tokens()) {
            self.request = None;
            return;
        }
        let movable =
            |s: &&WorkerSequence| s.decodes_next() && s.slot.is_some() && s.moving.is_none();
        let movable = sequences.values().filter(movable);
        let chosen = policy::most_slack(movable.map(|s| (s.rank, s.token_due())));
        let Some(sequence) = chosen.and_then(|rank| sequences.get(&rank.handoff)) else {
            return;
        };
        let (router, handoff) = (sequence.router, sequence.rank.handoff);
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
fn is_short(
    sequences: &BTreeMap<HandoffId, WorkerSequence>,
    pools: &KvPools,
    block_tokens: u32,
) -> bool {
    let (mut lacking, mut leaving_blocks) = (0, 0);
    for sequence in sequences.values() {
        if sequence.moving.is_some() || sequence.swap.is_some() {
            leaving_blocks += sequence.table.len();
        } else if sequence.slot.is_some() && sequence.decodes_next() {
            lacking += sequence.lacks(STEPS_AHEAD, block_tokens);
        }
    }
    lacking > leaving_blocks as u64 + u64::from(pools.blocks.blocks_available())
}

impl WorkerSequence {
    /// Blocks beyond its own, held and reserved, that its next `steps` tokens need.
    pub(crate) fn lacks(&self, steps: u32, block_tokens: u32) -> u64 {
        let left = self
            .request
            .stop
            .max_tokens
            .saturating_sub(self.output_count());
        let tokens = self.len() + steps.min(left).saturating_sub(1);
        let own = self.table.len() as u64 + u64::from(self.reservation.count());
        u64::from(tokens.div_ceil(block_tokens)).saturating_sub(own)
    }
}
