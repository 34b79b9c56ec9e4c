//! What is learned slowly.
//!
//! Owns: how long answers are, by how much more is needed than formulas say, where the load is going, how
//! long a worker takes to start. Never: learns from failures or from the time in which workers are
//! missing; the window holds no such promise. Invariant: nothing learned doubles what is needed.

use cleave_domain::{Demand, Role, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// How much of what is new counts, of a mean that moves.
const GAIN: f64 = 0.05;
/// Promises of a class that were judged, from which on something is learned.
const ENOUGH: u64 = 20;
/// How often factors are looked at, and the trend's samples taken.
const EVERY: Duration = Duration::from_secs(15);
/// What is missed raises a factor by this; what is kept lowers it by that.
const RISE: f64 = 1.1;
const FALL: f64 = 0.99;
const FACTOR_MAX: f64 = 2.0;
/// Samples of each half of the trend: two and a half minutes.
const HALF: usize = 10;
/// A load is not foreseen to grow by more than a half.
const GROWTH_MAX: f64 = 1.5;
/// Before any start was seen.
const LEAD: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub(super) struct Habits {
    /// Tokens of an answer.
    output: Option<f64>,
    /// For prompts and for streams.
    factors: [f64; 2],
    looked_at: Time,
    /// Requests in a second, newest last.
    rates: VecDeque<f64>,
    lead: Duration,
    /// When workers were wanted that have not joined.
    wanted_at: VecDeque<Time>,
}

impl Default for Habits {
    fn default() -> Self {
        Self {
            output: None,
            factors: [1.0; 2],
            looked_at: Time::ZERO,
            rates: VecDeque::new(),
            lead: LEAD,
            wanted_at: VecDeque::new(),
        }
    }
}

impl Habits {
    pub(super) fn output(&self, otherwise: f64) -> f64 {
        self.output.unwrap_or(otherwise)
    }

    pub(super) fn factor(&self, role: Role) -> f64 {
        self.factors[usize::from(role == Role::Decode)]
    }

    /// Looks at the demand, and at how often each class's promise was kept.
    pub(super) fn learn(&mut self, now: Time, demand: &Demand, goals: &[u32]) {
        let flow = &demand.slow;
        if flow.answers >= 8 {
            let mean = flow.output_tokens as f64 / flow.answers as f64;
            let known = self.output.unwrap_or(mean);
            self.output = Some(known + GAIN * (mean - known));
        }
        if now.since(self.looked_at) < EVERY {
            return;
        }
        self.looked_at = now;
        self.rates.push_back(rate(flow.arrivals));
        if self.rates.len() > 2 * HALF {
            self.rates.pop_front();
        }
        let mut missed = [false; 2];
        for (kept, goal) in demand.classes.iter().zip(goals) {
            let may = u128::from(kept.judged) * u128::from(1000 - goal.min(&1000)) / 1000;
            let enough = kept.judged >= ENOUGH;
            missed[0] |= enough && u128::from(kept.missed_prefill) > may;
            missed[1] |= enough && u128::from(kept.missed_decode) > may;
        }
        for (factor, missed) in self.factors.iter_mut().zip(missed) {
            let by = if missed { RISE } else { FALL };
            *factor = (*factor * by).clamp(1.0, FACTOR_MAX);
        }
    }

    /// By how much the load is foreseen to have grown when a worker that is wanted now would serve.
    pub(super) fn growth(&self) -> f64 {
        if self.rates.len() < 2 * HALF {
            return 1.0;
        }
        let mean = |rates: &mut dyn Iterator<Item = &f64>| rates.sum::<f64>() / HALF as f64;
        let before = mean(&mut self.rates.iter().take(HALF));
        let after = mean(&mut self.rates.iter().skip(HALF));
        let span = HALF as f64 * EVERY.as_secs_f64();
        let risen = after - before;
        // Chance alone moves two counts this far apart.
        let chance = 3.0 * ((before + after) / span).sqrt();
        let newest = self.rates.back().copied().unwrap_or(0.0);
        if risen <= chance || newest <= 0.0 {
            return 1.0;
        }
        let ahead = after + risen / span * (span / 2.0 + self.lead.as_secs_f64());
        (ahead / newest).clamp(1.0, GROWTH_MAX)
    }

    /// So many more workers are wanted.
    pub(super) fn wants(&mut self, now: Time, count: u32) {
        self.wanted_at.extend((0..count.min(64)).map(|_| now));
    }

    /// So many more have joined; those that take too long have failed, which says nothing of the others.
    pub(super) fn joined(&mut self, now: Time, count: u32, most: Duration) {
        for _ in 0..count {
            let Some(at) = self.wanted_at.pop_front() else {
                return;
            };
            let took = now.since(at);
            if took <= most {
                self.lead = (self.lead * 3 + took) / 4;
            }
        }
    }

    /// Nobody is missing any more.
    pub(super) fn whole(&mut self) {
        self.wanted_at.clear();
    }
}

/// In a second, of the slow flow.
fn rate(arrivals: u64) -> f64 {
    arrivals as f64 / Demand::SLOW.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Flow, Kept};

    fn look(habits: &mut Habits, tick: u64, arrivals: u64, kept: Kept) {
        let demand = Demand {
            slow: Flow {
                arrivals,
                ..Flow::default()
            },
            classes: vec![kept],
            ..Demand::default()
        };
        let now = Time::from_nanos(tick * 15_000_000_000);
        habits.learn(now, &demand, &[900]);
    }

    #[test]
    fn a_promise_that_is_missed_raises_the_leg_that_missed_it_and_no_other() {
        let mut habits = Habits::default();
        let kept = Kept {
            judged: 100,
            missed_decode: 30,
            missed_prefill: 10,
            ..Kept::default()
        };
        for tick in 1..40 {
            look(&mut habits, tick, 0, kept);
        }
        assert_eq!(habits.factor(Role::Decode), FACTOR_MAX);
        assert_eq!(habits.factor(Role::Prefill), 1.0, "ten of a hundred may");
    }

    #[test]
    fn a_rising_load_is_met_before_it_is_there_and_noise_is_not() {
        let mut habits = Habits::default();
        for tick in 1..=20 {
            look(&mut habits, tick, 600 + tick * 30, Kept::default());
        }
        let grown = habits.growth();
        assert!((1.05..1.3).contains(&grown), "{grown}");
        let mut level = Habits::default();
        for tick in 1..=20 {
            look(&mut level, tick, 600 + tick % 3 * 20, Kept::default());
        }
        assert_eq!(level.growth(), 1.0);
    }
}
