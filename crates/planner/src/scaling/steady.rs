//! More soon, fewer late.
//!
//! Owns: what was needed of one leg over its stabilization windows. Never: computes a need.
//! Invariant: a leg grows to the least that was needed throughout `up_after`, and shrinks to the most that was
//! needed at any time within `down_after`; before it has seen so much it does not shrink.

use cleave_domain::{PoolScaling, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// How many are needed: enough, and enough to go down to. What is between keeps a fleet from following
/// each breath of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) up: u32,
    pub(super) down: u32,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Steady {
    needs: VecDeque<(Time, Need)>,
}

impl Steady {
    /// Takes down what is needed now.
    pub(super) fn hear(&mut self, now: Time, need: Need, keep: Duration) {
        self.needs.push_back((now, need));
        // One that is older than all is kept, so that it is seen how far back this reaches.
        while self
            .needs
            .get(1)
            .is_some_and(|(at, _)| now.since(*at) > keep)
        {
            self.needs.pop_front();
        }
    }

    /// How many it should be, from so many.
    pub(super) fn settle(&self, now: Time, current: u32, pool: &PoolScaling) -> u32 {
        let newest = self.needs.back().map_or(0, |(_, need)| need.up);
        let up = match current {
            // Who waits for the first one has waited long enough.
            0 => newest,
            _ => self.least_up(now, pool.up_after),
        };
        if up > current {
            return up;
        }
        match self.reaches(now, pool.down_after) {
            true => self.most_down(now, pool.down_after).min(current),
            false => current,
        }
    }

    /// How many of so many were not needed at any time within a span.
    pub(super) fn spare(&self, now: Time, current: u32, within: Duration) -> u32 {
        match self.reaches(now, within) {
            true => current.saturating_sub(self.most_down(now, within)),
            false => 0,
        }
    }

    fn reaches(&self, now: Time, span: Duration) -> bool {
        let first = self.needs.front();
        first.is_some_and(|(at, _)| now.since(*at) >= span)
    }

    fn within(&self, now: Time, span: Duration) -> impl Iterator<Item = &Need> {
        let late = self.needs.iter().rev();
        let late = late.take_while(move |(at, _)| now.since(*at) <= span);
        late.map(|(_, need)| need)
    }

    fn least_up(&self, now: Time, span: Duration) -> u32 {
        match self.reaches(now, span) {
            true => self
                .within(now, span)
                .map(|need| need.up)
                .min()
                .unwrap_or(0),
            false => 0,
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
            ..PoolScaling::none(Role::Prefill)
        };
        let (mut steady, mut current) = (Steady::default(), 0);
        let mut seen = Vec::new();
        let ends = needs.iter().map(|(until, _)| *until).max().unwrap_or(0);
        for second in 0..ends {
            let now = Time::from_nanos(second * 1_000_000_000);
            let (_, need) = needs.iter().find(|(until, _)| second < *until).unwrap();
            steady.hear(
                now,
                Need {
                    up: *need,
                    down: *need,
                },
                pool.down_after,
            );
            current = steady.settle(now, current, &pool);
            if seen.last() != Some(&current) {
                seen.push(current);
            }
        }
        seen
    }

    #[test]
    fn a_breath_of_load_moves_nothing_and_a_lasting_change_does() {
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
