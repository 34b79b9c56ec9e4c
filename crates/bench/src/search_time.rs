//! The time that a search over rates will take.
//!
//! Owns: the estimate. Never: runs anything. Invariant: no run is counted that the search could not
//! make; the arrivals of a run are counted, not the wait for its last answers.

use crate::measurement::GoodputSearch;
use crate::search::RateBisection;
use std::time::Duration;

/// Capacities of the server for which the search is played through, as multiples of its first
/// rate.
const CAPACITIES: [f64; 9] = [0.07, 0.13, 0.3, 0.6, 0.9, 1.7, 3.5, 7.0, 15.0];

/// The least and the most of a search's runs and of their time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchTime {
    /// Runs if every verdict is clear at once.
    pub runs_min: u32,
    pub time_min: Duration,
    /// Runs if every rate is repeated as often as it may be.
    pub runs_max: u32,
    pub time_max: Duration,
}

impl GoodputSearch {
    /// The expected time; of a search by bisection for a server that carries between a fifteenth
    /// and fifteen times the first rate.
    pub fn expected_time(&self, requests_max: Option<usize>) -> SearchTime {
        let all: Vec<Vec<f64>> = if self.rates.is_empty() {
            let first = self.bounds.first;
            CAPACITIES
                .iter()
                .map(|share| self.rates_tried(share * first))
                .collect()
        } else {
            vec![self.rates.clone()]
        };
        let time = |rates: &Vec<f64>| -> Duration {
            let run = |rate: &f64| self.arrivals_time(*rate, requests_max);
            rates.iter().map(run).sum()
        };
        let counts = || all.iter().map(|rates| rates.len() as u32);
        let times = || all.iter().map(time);
        let repeats = self.repeats.max(1);
        let within = |time: Duration| self.time_max.map_or(time, |max| time.min(max));
        SearchTime {
            runs_min: counts().min().unwrap_or(0),
            time_min: within(times().min().unwrap_or_default()),
            runs_max: counts().max().unwrap_or(0).saturating_mul(repeats),
            time_max: within(times().max().unwrap_or_default().saturating_mul(repeats)),
        }
    }

    /// The rates that a search tries at a server of this capacity.
    fn rates_tried(&self, capacity: f64) -> Vec<f64> {
        let mut bisection = RateBisection::new(self.bounds);
        let mut rates = Vec::new();
        while let Some(rate) = bisection.next() {
            rates.push(rate);
            if rate <= capacity {
                bisection.record_met(rate);
            } else {
                bisection.record_missed(rate);
            }
        }
        rates
    }

    /// The time of a run's arrivals.
    fn arrivals_time(&self, rate: f64, requests_max: Option<usize>) -> Duration {
        let requests = self
            .requests_at(rate)
            .min(requests_max.unwrap_or(usize::MAX));
        Duration::try_from_secs_f64(requests as f64 / rate).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::RateBounds;

    fn search(rates: &[f64], repeats: u32) -> GoodputSearch {
        GoodputSearch {
            goal: 0.9,
            bounds: RateBounds {
                first: 4.0,
                max: 100.0,
                min: 0.01,
                precision: 0.05,
            },
            rates: rates.to_vec(),
            requests_min: 60,
            duration_min: Duration::from_secs(30),
            repeats,
            time_max: None,
        }
    }

    #[test]
    fn given_rates_take_their_arrivals_each() {
        let sweep = search(&[1.0, 2.0, 10.0], 3).expected_time(None);
        let seconds = |span: Duration| span.as_secs();
        assert_eq!((sweep.runs_min, seconds(sweep.time_min)), (3, 120));
        assert_eq!((sweep.runs_max, seconds(sweep.time_max)), (9, 360));
        let few = search(&[1.0, 2.0, 10.0], 1).expected_time(Some(20));
        assert_eq!(seconds(few.time_min), 20 + 10 + 2);
    }

    #[test]
    fn a_bisection_takes_as_many_runs_as_it_will_try() {
        let time = search(&[], 1).expected_time(None);
        assert_eq!(time.runs_min, 6, "one doubling, and four halvings");
        assert!((9..=11).contains(&time.runs_max), "{time:?}");
        assert!(time.time_min >= Duration::from_secs(6 * 30), "{time:?}");
        assert!(time.time_max > time.time_min);
        let capped = GoodputSearch {
            time_max: Some(Duration::from_secs(100)),
            ..search(&[], 1)
        };
        let capped = capped.expected_time(None);
        assert_eq!(capped.time_max, Duration::from_secs(100));
    }
}
