//! The shortage that is coming.
//!
//! Owns: the wish that a sequence be moved before another must lose its blocks.
//! Never: counts on it: what is short is taken by rank, wish or no wish.
//! Invariant: a wish is said when another sequence becomes the one to move, and at most once a second
//! while it stays the same.

use crate::Brain;
use crate::policy;
use crate::sequence::Sequence;
use cleave_domain::{HandoffId, Report, Time};
use std::time::Duration;

/// Steps to look ahead: about as many as a sequence draws while its move begins.
const STEPS_AHEAD: u32 = 16;

/// When a wish is repeated: a router that had no room for it does not keep it.
const REPEATED_AFTER: Duration = Duration::from_secs(1);

/// What was wished last, while blocks are short.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    /// The sequence to be moved.
    pub(crate) handoff: HandoffId,
    /// When that was said.
    pub(crate) said: Time,
}

impl Brain {
    /// Asks for room if what runs may run out of blocks within the next steps: of the
    /// least important ones that can move for the one with the most slack.
    pub(crate) fn wish(&mut self) {
        if !self.crowded() {
            self.wish = None;
            return;
        }
        let movable = |s: &&Sequence| s.generates() && s.slot.is_some() && s.moving.is_none();
        let movable = self.sequences.values().filter(movable);
        let chosen = policy::most_slack(movable.map(|s| (s.rank, s.token_due())));
        let Some(sequence) = chosen.and_then(|rank| self.sequences.get(&rank.handoff)) else {
            return;
        };
        let (router, handoff) = (sequence.router, sequence.rank.handoff);
        let said = self.now;
        let known = |wish: Wish| wish.handoff == handoff && said < wish.said + REPEATED_AFTER;
        if !self.wish.is_some_and(known) {
            self.wish = Some(Wish { handoff, said });
            self.tell(router, Report::Crowded { handoff });
        }
    }

    /// Whether the blocks that are free, and those that are about to leave, do not cover the growth
    /// of what runs.
    fn crowded(&self) -> bool {
        let size = self.limits.capacity.block_tokens;
        let (mut lacking, mut leaving) = (0, 0);
        for sequence in self.sequences.values() {
            if sequence.moving.is_some() || sequence.swap.is_some() {
                leaving += sequence.table.len();
            } else if sequence.slot.is_some() && sequence.generates() {
                lacking += sequence.lacks(STEPS_AHEAD, size);
            }
        }
        lacking > leaving as u64 + u64::from(self.pool.blocks_available())
    }
}

impl Sequence {
    /// Blocks beyond its own, held and promised, that its next `steps` tokens need.
    pub(crate) fn lacks(&self, steps: u32, block_tokens: u32) -> u64 {
        let left = self
            .request
            .stop
            .max_tokens
            .saturating_sub(self.output_count());
        let tokens = self.len() + steps.min(left).saturating_sub(1);
        let own = self.table.len() as u64 + u64::from(self.promise.count());
        u64::from(tokens.div_ceil(block_tokens)).saturating_sub(own)
    }
}
