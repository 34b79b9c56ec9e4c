//! Slowly learned parameters.
//!
//! Owns: the mean length of answers, correction factors of the formulas, the trend of the load, and
//! how long a worker takes to start. Never: learns from failures or while workers are missing; the
//! window holds no such outcomes. Invariant: no correction exceeds a factor of two.

use cleave_domain::{FleetDemand, Role, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// Weight of a new value in a moving mean.
const GAIN: f64 = 0.05;
/// Judged requests of a class from which on its misses are learned from.
const JUDGED_MIN: u64 = 20;
/// Interval of updates of the factors, and of the trend's samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(15);
/// Factor by which missed targets raise a correction, and by which kept ones lower it.
const RISE: f64 = 1.1;
const FALL: f64 = 0.99;
const FACTOR_MAX: f64 = 2.0;
/// Samples of each half of the trend: two and a half minutes.
const TREND_HALF_SAMPLES: usize = 10;
/// Limit of the forecast growth.
const GROWTH_MAX: f64 = 1.5;
/// Start-up time of a worker before any start was seen.
const STARTUP_TIME_DEFAULT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub(super) struct LearnedTrends {
    /// Mean tokens of an answer.
    output: Option<f64>,
    /// Corrections for prompts and for streams.
    factors: [f64; 2],
    sampled_at: Time,
    /// Requests per second, newest last.
    rates: VecDeque<f64>,
    startup_time: Duration,
    /// Times at which workers were wanted that have not joined yet.
    start_requested_at: VecDeque<Time>,
}

impl Default for LearnedTrends {
    fn default() -> Self {
        Self {
            output: None,
            factors: [1.0; 2],
            sampled_at: Time::ZERO,
            rates: VecDeque::new(),
            startup_time: STARTUP_TIME_DEFAULT,
            start_requested_at: VecDeque::new(),
        }
    }
}

impl LearnedTrends {
    pub(super) fn output(&self, otherwise: f64) -> f64 {
        self.output.unwrap_or(otherwise)
    }

    pub(super) fn correction(&self, role: Role) -> f64 {
        self.factors[usize::from(role == Role::Decode)]
    }

    /// Learns from the demand, and from the misses of each class.
    pub(super) fn learn(&mut self, now: Time, demand: &FleetDemand, goals: &[u32]) {
        let flow = &demand.slow;
        if flow.answers >= 8 {
            let mean = flow.output_tokens as f64 / flow.answers as f64;
            let mean_before = self.output.unwrap_or(mean);
            self.output = Some(mean_before + GAIN * (mean - mean_before));
        }
        if now.since(self.sampled_at) < SAMPLE_INTERVAL {
            return;
        }
        self.sampled_at = now;
        self.rates.push_back(rate(flow.arrivals));
        if self.rates.len() > 2 * TREND_HALF_SAMPLES {
            self.rates.pop_front();
        }
        let mut missed = [false; 2];
        // A leg is corrected only if a class missed more targets than its goal allows, among enough
        // judged requests for that to mean something.
        for (outcomes, goal) in demand.classes.iter().zip(goals) {
            let may = u128::from(outcomes.judged) * u128::from(1000 - goal.min(&1000)) / 1000;
            let enough = outcomes.judged >= JUDGED_MIN;
            missed[0] |= enough && u128::from(outcomes.missed_prefill) > may;
            missed[1] |= enough && u128::from(outcomes.missed_decode) > may;
        }
        for (factor, missed) in self.factors.iter_mut().zip(missed) {
            let by = if missed { RISE } else { FALL };
            *factor = (*factor * by).clamp(1.0, FACTOR_MAX);
        }
    }

    /// Forecast growth of the load until a worker that is started now can serve.
    pub(super) fn forecast_growth(&self) -> f64 {
        if self.rates.len() < 2 * TREND_HALF_SAMPLES {
            return 1.0;
        }
        let mean =
            |rates: &mut dyn Iterator<Item = &f64>| rates.sum::<f64>() / TREND_HALF_SAMPLES as f64;
        let before = mean(&mut self.rates.iter().take(TREND_HALF_SAMPLES));
        let after = mean(&mut self.rates.iter().skip(TREND_HALF_SAMPLES));
        let span = TREND_HALF_SAMPLES as f64 * SAMPLE_INTERVAL.as_secs_f64();
        let risen = after - before;
        // Three standard deviations of the difference of two Poisson counts.
        let chance = 3.0 * ((before + after) / span).sqrt();
        let newest = self.rates.back().copied().unwrap_or(0.0);
        if risen <= chance || newest <= 0.0 {
            return 1.0;
        }
        // Linear extrapolation from the middle of the newer half by half a window and a start-up
        // time.
        let ahead = after + risen / span * (span / 2.0 + self.startup_time.as_secs_f64());
        (ahead / newest).clamp(1.0, GROWTH_MAX)
    }

    /// Records that `count` more workers are wanted.
    pub(super) fn starts_requested(&mut self, now: Time, count: u32) {
        self.start_requested_at
            .extend((0..count.min(64)).map(|_| now));
    }

    /// Records that `count` workers have joined; a start that took longer than `most` had failed,
    /// and teaches nothing.
    pub(super) fn workers_joined(&mut self, now: Time, count: u32, most: Duration) {
        for _ in 0..count {
            let Some(at) = self.start_requested_at.pop_front() else {
                return;
            };
            let took = now.since(at);
            if took <= most {
                self.startup_time = (self.startup_time * 3 + took) / 4;
            }
        }
    }

    /// Forgets pending starts, as no worker is missing.
    pub(super) fn none_missing(&mut self) {
        self.start_requested_at.clear();
    }
}

/// Arrivals per second, of the slow flow.
fn rate(arrivals: u64) -> f64 {
    arrivals as f64 / FleetDemand::SLOW.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{RequestFlow, SloOutcomes};

    fn look(trends: &mut LearnedTrends, tick: u64, arrivals: u64, outcomes: SloOutcomes) {
        let demand = FleetDemand {
            slow: RequestFlow {
                arrivals,
                ..RequestFlow::default()
            },
            classes: vec![outcomes],
            ..FleetDemand::default()
        };
        let now = Time::from_nanos(tick * 15_000_000_000);
        trends.learn(now, &demand, &[900]);
    }

    // Lesson: 28.
    #[test]
    fn missed_targets_raise_only_their_legs_correction() {
        let mut trends = LearnedTrends::default();
        let outcomes = SloOutcomes {
            judged: 100,
            missed_decode: 30,
            missed_prefill: 10,
            ..SloOutcomes::default()
        };
        for tick in 1..40 {
            look(&mut trends, tick, 0, outcomes);
        }
        assert_eq!(trends.correction(Role::Decode), FACTOR_MAX);
        assert_eq!(
            trends.correction(Role::Prefill),
            1.0,
            "ten of a hundred may"
        );
    }

    // Lesson: 29.
    #[test]
    fn growth_is_forecast_for_trends_and_not_for_noise() {
        let mut trends = LearnedTrends::default();
        for tick in 1..=20 {
            look(&mut trends, tick, 600 + tick * 30, SloOutcomes::default());
        }
        let grown = trends.forecast_growth();
        assert!((1.05..1.3).contains(&grown), "{grown}");
        let mut level = LearnedTrends::default();
        for tick in 1..=20 {
            look(
                &mut level,
                tick,
                600 + tick % 3 * 20,
                SloOutcomes::default(),
            );
        }
        assert_eq!(level.forecast_growth(), 1.0);
    }

    #[test]
    fn answers_move_their_mean_by_a_twentieth() {
        let mut trends = LearnedTrends::default();
        let learn = |trends: &mut LearnedTrends, answers, output_tokens| {
            let slow = RequestFlow {
                answers,
                output_tokens,
                ..RequestFlow::default()
            };
            let demand = FleetDemand {
                slow,
                ..FleetDemand::default()
            };
            trends.learn(Time::ZERO, &demand, &[]);
        };
        learn(&mut trends, 7, 7000);
        assert_eq!(trends.output(256.0), 256.0, "seven answers say too little");
        learn(&mut trends, 8, 800);
        assert_eq!(trends.output(256.0), 100.0);
        learn(&mut trends, 10, 3000);
        assert_eq!(trends.output(256.0), 110.0);
    }

    #[test]
    fn a_factor_rises_by_a_tenth_and_falls_by_a_hundredth() {
        let mut trends = LearnedTrends::default();
        let outcomes = |judged, missed_prefill| SloOutcomes {
            judged,
            missed_prefill,
            ..SloOutcomes::default()
        };
        look(&mut trends, 1, 0, outcomes(19, 19));
        assert_eq!(
            trends.correction(Role::Prefill),
            1.0,
            "nineteen are too few"
        );
        look(&mut trends, 2, 0, outcomes(20, 2));
        assert_eq!(trends.correction(Role::Prefill), 1.0, "two of twenty may");
        look(&mut trends, 3, 0, outcomes(20, 3));
        assert_eq!(trends.correction(Role::Prefill), 1.1);
        look(&mut trends, 3, 0, outcomes(20, 3));
        assert_eq!(trends.correction(Role::Prefill), 1.1, "it has just looked");
        look(&mut trends, 4, 0, outcomes(20, 2));
        assert_eq!(trends.correction(Role::Prefill), 1.1 * 0.99);
        assert_eq!(trends.correction(Role::Decode), 1.0);
    }

    #[test]
    fn growth_is_forecast_over_the_start_up_time() {
        let mut trends = LearnedTrends::default();
        let none = SloOutcomes::default();
        for tick in 1..=20 {
            assert_eq!(trends.forecast_growth(), 1.0, "half of it is not known");
            look(&mut trends, tick, if tick > 10 { 1200 } else { 600 }, none);
        }
        let close = |is: f64, expected: f64| {
            assert!((is - expected).abs() < 1e-9, "{is}, and not {expected}");
        };
        // Ten more in a second in 150 s; half of these and a start of 30 s lie ahead.
        close(
            trends.forecast_growth(),
            (20.0 + 10.0 / 150.0 * 105.0) / 20.0,
        );
        let at = |second: u64| Time::from_nanos(second * 1_000_000_000);
        trends.starts_requested(at(0), 3);
        trends.workers_joined(at(10), 1, Duration::from_secs(100));
        // A start took 10 s: a quarter of the way from 30 s.
        close(
            trends.forecast_growth(),
            (20.0 + 10.0 / 150.0 * 100.0) / 20.0,
        );
        trends.workers_joined(at(101), 1, Duration::from_secs(100));
        close(
            trends.forecast_growth(),
            (20.0 + 10.0 / 150.0 * 100.0) / 20.0,
        );
        trends.none_missing();
        trends.workers_joined(at(1), 1, Duration::from_secs(100));
        close(
            trends.forecast_growth(),
            (20.0 + 10.0 / 150.0 * 100.0) / 20.0,
        );
        for tick in 21..=30 {
            look(&mut trends, tick, 6000, none);
        }
        assert_eq!(trends.forecast_growth(), GROWTH_MAX);
        for tick in 31..=40 {
            look(&mut trends, tick, 600, none);
        }
        assert_eq!(trends.forecast_growth(), 1.0, "it falls");
    }

    #[test]
    fn a_rise_within_three_deviations_is_ignored() {
        let growth = |late| {
            let mut trends = LearnedTrends::default();
            for tick in 1..=20 {
                let arrivals = if tick > 10 { late } else { 600 };
                look(&mut trends, tick, arrivals, SloOutcomes::default());
            }
            trends.forecast_growth()
        };
        // From ten in a second in 150 s: a spread is about 0.38.
        assert_eq!(growth(660), 1.0);
        let risen = (12.0 + 2.0 / 150.0 * 105.0) / 12.0;
        assert!((growth(720) - risen).abs() < 1e-9, "{}", growth(720));
    }
}
