//! The highest rate that keeps a goal.
//!
//! Owns: which rate is tried next. Never: runs anything.
//! Invariant: every kept rate tried is at most the lower bound, every broken one at least the upper;
//! the search ends, since each try halves what is between them, in logarithms.
//!
//! Attainment is taken to fall with the rate. Where chance breaks that, the bounds stay what was
//! measured last: a rate above a broken one is never tried again.

/// What is looked for, and within what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Rate of the first try, requests per second.
    pub first: f64,
    /// No rate above is tried.
    pub max: f64,
    /// No rate below is tried.
    pub min: f64,
    /// The search ends when the bounds are this close: 0.05 is within 5 %.
    pub precision: f64,
}

/// A search.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    bounds: Bounds,
    /// Highest rate that kept the goal.
    kept: Option<f64>,
    /// Lowest rate that broke it.
    broken: Option<f64>,
}

impl Search {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            kept: None,
            broken: None,
        }
    }

    /// The rate to try; `None` when there is nothing left to find.
    pub(crate) fn next(&self) -> Option<f64> {
        let Bounds {
            first,
            max,
            min,
            precision,
        } = self.bounds;
        match (self.kept, self.broken) {
            (None, None) => Some(first.clamp(min, max)),
            (Some(kept), None) => Some((2.0 * kept).min(max)).filter(|rate| *rate > kept),
            (None, Some(broken)) => Some((broken / 2.0).max(min)).filter(|rate| *rate < broken),
            (Some(kept), Some(broken)) => {
                (broken > kept * (1.0 + precision)).then(|| (kept * broken).sqrt())
            }
        }
    }

    pub(crate) fn kept(&mut self, rate: f64) {
        self.kept = Some(rate.max(self.kept.unwrap_or_default()));
    }

    pub(crate) fn broken(&mut self, rate: f64) {
        self.broken = Some(rate.min(self.broken.unwrap_or(f64::INFINITY)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn search(bounds: Bounds, capacity: f64) -> (Search, u32) {
        let mut search = Search::new(bounds);
        let mut tries = 0;
        while let Some(rate) = search.next() {
            match rate <= capacity {
                true => search.kept(rate),
                false => search.broken(rate),
            }
            tries += 1;
            assert!(tries < 100, "without an end");
        }
        (search, tries)
    }

    proptest! {
        #[test]
        fn a_servers_capacity_is_found_wherever_the_search_begins(
            capacity in 0.01_f64..5000.0, first in 0.01_f64..5000.0, precision in 0.01_f64..0.3,
        ) {
            let bounds = Bounds { first, max: 1e6, min: 1e-3, precision };
            let (search, tries) = search(bounds, capacity);
            let (kept, broken) = (search.kept, search.broken);
            let (kept, broken) = (kept.unwrap(), broken.unwrap());
            prop_assert!(kept <= capacity && capacity < broken);
            prop_assert!(broken <= kept * (1.0 + precision));
            prop_assert!(tries <= 40, "{tries}");
        }
    }

    #[test]
    fn limits_end_a_search_that_finds_nothing() {
        let bounds = Bounds {
            first: 1.0,
            max: 10.0,
            min: 0.5,
            precision: 0.05,
        };
        let found = |capacity| {
            let search = search(bounds, capacity).0;
            (search.kept, search.broken)
        };
        assert_eq!(found(1e9), (Some(10.0), None));
        assert_eq!(found(0.0), (None, Some(0.5)));
    }
}
