//! Random draws of a workload.
//!
//! Owns: seeded draws. Never: reads a random source. Invariant: the same seed and purpose give the
//! same draws on any machine.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, Gamma, LogNormal, Weibull};

/// The purpose of a draw: draws for one purpose do not change those for another.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DrawPurpose {
    Arrivals,
    Lengths,
    Classes,
    Prefixes,
    Clients,
}

/// A seeded source of draws.
pub(crate) struct WorkloadRng(ChaCha8Rng);

impl WorkloadRng {
    pub(crate) fn new(seed: u64, purpose: DrawPurpose) -> Self {
        let mut source = ChaCha8Rng::seed_from_u64(seed);
        source.set_stream(purpose as u64);
        Self(source)
    }

    pub(crate) fn unit(&mut self) -> f64 {
        self.0.random()
    }

    /// In 0..`count`; `count` is at least 1.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0.random_range(0..count)
    }

    /// Exponential with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        Exp1.sample(&mut self.0)
    }

    /// Gamma; the parser made sure that both parameters are positive.
    pub(crate) fn gamma(&mut self, shape: f64, scale: f64) -> f64 {
        let gamma = Gamma::new(shape, scale).expect("positive parameters");
        gamma.sample(&mut self.0)
    }

    /// Weibull; the parser made sure that both parameters are positive.
    pub(crate) fn weibull(&mut self, shape: f64, scale: f64) -> f64 {
        let weibull = Weibull::new(scale, shape).expect("positive parameters");
        weibull.sample(&mut self.0)
    }

    /// Log-normal of this mean and coefficient of variation; the mean itself where that is 0.
    pub(crate) fn log_normal(&mut self, mean: f64, cv: f64) -> f64 {
        let log_normal = LogNormal::from_mean_cv(mean, cv).expect("positive parameters");
        log_normal.sample(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_seed_and_purpose_only() {
        let draws = |seed, purpose| {
            let mut rng = WorkloadRng::new(seed, purpose);
            [rng.unit(), rng.exponential(), rng.gamma(0.5, 2.0)]
        };
        assert_eq!(
            draws(7, DrawPurpose::Arrivals),
            draws(7, DrawPurpose::Arrivals)
        );
        assert_ne!(
            draws(7, DrawPurpose::Arrivals),
            draws(8, DrawPurpose::Arrivals)
        );
        assert_ne!(
            draws(7, DrawPurpose::Arrivals),
            draws(7, DrawPurpose::Lengths)
        );
    }
}
