//! The earlier moves of a flight, as far as they limit the next one.
//!
//! Owns: the moves aborted since the last completed one, and the last move to make room. Never:
//! moves anything. Invariant: a worker is avoided only while an aborted move is remembered.

use crate::event::MoveReason;
use cleave_domain::WorkerId;
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a flight stays where it is after an aborted move: at first, and at most.
const MOVE_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

#[derive(Clone, Debug, Default)]
pub(crate) struct MoveHistory {
    /// Aborted moves since the last completed one.
    aborted: u32,
    /// Workers that did not take it over in these: others are tried before them.
    avoided: BTreeSet<WorkerId>,
    /// Output tokens it had when it was last moved to make room.
    yielded_at: Option<u32>,
}

impl MoveHistory {
    pub(crate) fn aborted(&self) -> u32 {
        self.aborted
    }

    pub(crate) fn avoided(&self) -> &BTreeSet<WorkerId> {
        &self.avoided
    }

    pub(crate) fn yielded_at(&self) -> Option<u32> {
        self.yielded_at
    }

    /// Records a move that its target did not complete. Returns how long the flight rests before
    /// the next one.
    pub(crate) fn abort(&mut self, target: WorkerId) -> Duration {
        self.avoided.insert(target);
        let (shortest, longest) = MOVE_BACKOFF;
        let rest = shortest * (1_u32 << self.aborted.min(10));
        self.aborted += 1;
        rest.min(longest)
    }

    /// Records a completed move, after so many output tokens.
    pub(crate) fn complete(&mut self, why: MoveReason, output_tokens: u32) {
        if why == MoveReason::MemoryPressure {
            self.yielded_at = Some(output_tokens);
        }
        self.forget_aborted();
    }

    /// Forgets aborted moves: the flight runs, or will run, on another worker.
    pub(crate) fn forget_aborted(&mut self) {
        self.avoided.clear();
        self.aborted = 0;
    }

    /// Whether the sequence was moved to make room recently: it draws `rest` tokens before it is
    /// moved for that reason again.
    pub(crate) fn yielded_lately(&self, output_tokens: u32, rest: u32) -> bool {
        self.yielded_at
            .is_some_and(|at| output_tokens < at.saturating_add(rest))
    }

    pub(crate) fn check(&self) {
        assert!(
            self.avoided.len() <= self.aborted as usize,
            "a worker is avoided that aborted no move"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_double_up_to_a_limit() {
        let mut history = MoveHistory::default();
        let rests: Vec<u128> = (0..8)
            .map(|_| history.abort(WorkerId(7)).as_millis())
            .collect();
        assert_eq!(rests, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        for _ in 0..40 {
            history.abort(WorkerId(8));
        }
        history.check();
        history.complete(MoveReason::Drain, 4);
        history.check();
        assert!(history.avoided().is_empty());
        assert_eq!(history.abort(WorkerId(7)).as_millis(), 100);
    }

    #[test]
    fn a_flight_makes_room_again_after_some_tokens() {
        let mut history = MoveHistory::default();
        assert!(!history.yielded_lately(0, 9), "it never did");
        history.complete(MoveReason::Drain, 4);
        assert!(!history.yielded_lately(5, 9), "it had to leave");
        history.complete(MoveReason::MemoryPressure, 6);
        assert!(history.yielded_lately(14, 9) && !history.yielded_lately(15, 9));
        history.forget_aborted();
        assert!(history.yielded_lately(14, 9));
    }
}
