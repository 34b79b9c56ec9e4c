//! Bisection for the highest rate that meets a goal.
//!
//! Owns: the choice of the next rate. Never: runs anything. Invariant: every rate that met the goal
//! is at most the lower bound, every rate that missed it at least the upper; the search ends, since
//! each try halves the logarithmic distance.
//!
//! Attainment is assumed to fall with the rate. Where chance breaks that, the bounds stay as
//! measured: a rate above a missed one is never tried again.

/// Start, limits and precision of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateBounds {
    /// Rate of the first try, requests per second.
    pub first: f64,
    /// No rate above is tried.
    pub max: f64,
    /// No rate below is tried.
    pub min: f64,
    /// The search ends when the bounds are this close: 0.05 is within 5 %.
    pub precision: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct RateBisection {
    bounds: RateBounds,
    /// Highest rate that met the goal.
    highest_met: Option<f64>,
    /// Lowest rate that missed it.
    lowest_missed: Option<f64>,
}

impl RateBisection {
    pub(crate) fn new(bounds: RateBounds) -> Self {
        Self {
            bounds,
            highest_met: None,
            lowest_missed: None,
        }
    }

    /// The rate to try; `None` when there is nothing left to find.
    pub(crate) fn next(&self) -> Option<f64> {
        let RateBounds {
            first,
            max,
            min,
            precision,
        } = self.bounds;
        // Doubles or halves until both bounds exist, then takes their geometric mean.
        match (self.highest_met, self.lowest_missed) {
            (None, None) => Some(first.clamp(min, max)),
            (Some(highest_met), None) => {
                Some((2.0 * highest_met).min(max)).filter(|rate| *rate > highest_met)
            }
            (None, Some(lowest_missed)) => {
                Some((lowest_missed / 2.0).max(min)).filter(|rate| *rate < lowest_missed)
            }
            (Some(highest_met), Some(lowest_missed)) => (lowest_missed
                > highest_met * (1.0 + precision))
                .then(|| (highest_met * lowest_missed).sqrt()),
        }
    }

    pub(crate) fn record_met(&mut self, rate: f64) {
        self.highest_met = Some(rate.max(self.highest_met.unwrap_or_default()));
    }

    pub(crate) fn record_missed(&mut self, rate: f64) {
        self.lowest_missed = Some(rate.min(self.lowest_missed.unwrap_or(f64::INFINITY)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn search(bounds: RateBounds, capacity: f64) -> (RateBisection, u32) {
        let mut search = RateBisection::new(bounds);
        let mut tries = 0;
        while let Some(rate) = search.next() {
            if rate <= capacity {
                search.record_met(rate)
            } else {
                search.record_missed(rate)
            }
            tries += 1;
            assert!(tries < 100, "without an end");
        }
        (search, tries)
    }

    proptest! {
        #[test]
        fn bisection_finds_the_capacity_from_any_first_rate(
            capacity in 0.01_f64..5000.0, first in 0.01_f64..5000.0, precision in 0.01_f64..0.3,
        ) {
            let bounds = RateBounds { first, max: 1e6, min: 1e-3, precision };
            let (search, tries) = search(bounds, capacity);
            let (highest_met, lowest_missed) = (search.highest_met, search.lowest_missed);
            let (highest_met, lowest_missed) = (highest_met.unwrap(), lowest_missed.unwrap());
            prop_assert!(highest_met <= capacity && capacity < lowest_missed);
            prop_assert!(lowest_missed <= highest_met * (1.0 + precision));
            prop_assert!(tries <= 40, "{tries}");
        }
    }

    #[test]
    fn the_rate_limits_end_a_search_without_result() {
        let bounds = RateBounds {
            first: 1.0,
            max: 10.0,
            min: 0.5,
            precision: 0.05,
        };
        let found = |capacity| {
            let search = search(bounds, capacity).0;
            (search.highest_met, search.lowest_missed)
        };
        assert_eq!(found(1e9), (Some(10.0), None));
        assert_eq!(found(0.0), (None, Some(0.5)));
    }
}
