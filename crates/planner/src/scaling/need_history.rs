//! Stabilisation: grow fast, shrink slowly.
//!
//! Owns: the needs of one leg over its stabilisation windows. Never: computes a need.
//! Invariant: a leg grows to the least need throughout `up_after`, and shrinks to the largest need
//! within `down_after`; it does not shrink before its history covers that time.

use cleave_domain::{PoolScaling, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// Workers needed: to grow to, and to shrink to. The range between them keeps a fleet from
/// following every small change of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkersNeeded {
    pub(super) up: u32,
    pub(super) down: u32,
}

#[derive(Clone, Debug, Default)]
pub(super) struct NeedHistory {
    needs: VecDeque<(Time, WorkersNeeded)>,
}

impl NeedHistory {
    /// Records the present need.
    pub(super) fn record(&mut self, now: Time, need: WorkersNeeded, keep: Duration) {
        self.needs.push_back((now, need));
        // One entry older than `keep` stays, so that the length of the history is known.
        while self
            .needs
            .get(1)
            .is_some_and(|(at, _)| now.since(*at) > keep)
        {
            self.needs.pop_front();
        }
    }

    /// The stabilised number of workers, given the current one.
    pub(super) fn stabilised(&self, now: Time, current: u32, pool: &PoolScaling) -> u32 {
        let newest = self.needs.back().map_or(0, |(_, need)| need.up);
        let up = match current {
            // Without any worker there is no stabilisation: requests already wait.
            0 => newest,
            _ => self.least_up(now, pool.up_after),
        };
        if up > current {
            return up;
        }
        if self.covers(now, pool.down_after) {
            self.most_down(now, pool.down_after).min(current)
        } else {
            current
        }
    }

    /// How many of the current workers were not needed at any time within a span.
    pub(super) fn spare(&self, now: Time, current: u32, within: Duration) -> u32 {
        if self.covers(now, within) {
            current.saturating_sub(self.most_down(now, within))
        } else {
            0
        }
    }

    fn covers(&self, now: Time, span: Duration) -> bool {
        let first = self.needs.front();
        first.is_some_and(|(at, _)| now.since(*at) >= span)
    }

    fn within(&self, now: Time, span: Duration) -> impl Iterator<Item = &WorkersNeeded> {
        let late = self.needs.iter().rev();
        let late = late.take_while(move |(at, _)| now.since(*at) <= span);
        late.map(|(_, need)| need)
    }

    fn least_up(&self, now: Time, span: Duration) -> u32 {
        if self.covers(now, span) {
            self.within(now, span)
                .map(|need| need.up)
                .min()
                .unwrap_or(0)
        } else {
            0
        }
    }

    fn most_down(&self, now: Time, span: Duration) -> u32 {
        self.within(now, span)
            .map(|need| need.down)
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::Role;

    fn run(needs: &[(u64, u32)]) -> Vec<u32> {
        let pool = PoolScaling {
            up_after: Duration::from_secs(10),
            down_after: Duration::from_secs(60),
            ..PoolScaling::absent(Role::Prefill)
        };
        let (mut steady, mut current) = (NeedHistory::default(), 0);
        let mut counts = Vec::new();
        let ends = needs.iter().map(|(until, _)| *until).max().unwrap_or(0);
        for second in 0..ends {
            let now = Time::from_nanos(second * 1_000_000_000);
            let (_, need) = needs.iter().find(|(until, _)| second < *until).unwrap();
            steady.record(
                now,
                WorkersNeeded {
                    up: *need,
                    down: *need,
                },
                pool.down_after,
            );
            current = steady.stabilised(now, current, &pool);
            if counts.last() != Some(&current) {
                counts.push(current);
            }
        }
        counts
    }

    // Lesson: 29.
    #[test]
    fn short_peaks_change_no_count_and_lasting_ones_do() {
        assert_eq!(
            run(&[(30, 2), (35, 5), (100, 2)]),
            [2],
            "five seconds of five"
        );
        assert_eq!(run(&[(30, 2), (100, 5)]), [2, 5]);
        assert_eq!(run(&[(30, 5), (80, 2), (82, 4), (139, 2)]), [5, 4]);
        assert_eq!(run(&[(30, 5), (80, 2), (82, 4), (145, 2)]), [5, 4, 2]);
    }
}
