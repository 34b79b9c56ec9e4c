//! Confidence in a share.
//!
//! Owns: Wilson's interval and the verdict from it. Never: assumes more than independent trials.
//! Requests that queue behind each other are not quite independent, so that the true interval is
//! somewhat wider; runs of several lengths show by how much.

use serde::Serialize;

/// The 97.5 % quantile of the normal distribution: two-sided 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// A share's interval at 95 % confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ConfidenceInterval {
    pub low: f64,
    pub high: f64,
}

/// Wilson's score interval of `hits` in `trials` (E. B. Wilson, JASA 22, 1927); 0 to 1 without a
/// trial.
pub fn wilson(hits: u64, trials: u64) -> ConfidenceInterval {
    if trials == 0 {
        return ConfidenceInterval {
            low: 0.0,
            high: 1.0,
        };
    }
    let (hits, trials) = (hits as f64, trials as f64);
    let share = hits / trials;
    let z2 = Z * Z;
    let centre = share + z2 / (2.0 * trials);
    let half = Z * ((share * (1.0 - share) + z2 / (4.0 * trials)) / trials).sqrt();
    let scale = 1.0 + z2 / trials;
    ConfidenceInterval {
        low: ((centre - half) / scale).max(0.0),
        high: ((centre + half) / scale).min(1.0),
    }
}

/// Whether a goal is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GoalVerdict {
    /// The whole interval reaches the goal.
    Kept,
    /// The whole interval is below it.
    Broken,
    /// The goal lies inside the interval.
    Open,
}

/// Whether `hits` of `trials` meet `goal`.
pub(crate) fn verdict(hits: u64, trials: u64, goal: f64) -> GoalVerdict {
    let interval = wilson(hits, trials);
    match (interval.low >= goal, interval.high < goal) {
        (true, _) => GoalVerdict::Kept,
        (_, true) => GoalVerdict::Broken,
        _ => GoalVerdict::Open,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wilson_intervals_match_published_ones() {
        // Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in
        // Medicine 17 (1998), Table I, method 3 (score without continuity correction).
        for (hits, trials, low, high) in [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0000, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ] {
            let interval = wilson(hits, trials);
            assert!(
                (interval.low - low).abs() < 5e-5,
                "{hits}/{trials}: {interval:?}"
            );
            assert!(
                (interval.high - high).abs() < 5e-5,
                "{hits}/{trials}: {interval:?}"
            );
        }
        let nothing = wilson(0, 0);
        assert_eq!((nothing.low, nothing.high), (0.0, 1.0));
        assert_eq!(wilson(50, 50).high, 1.0);
    }

    #[test]
    fn a_share_at_the_goal_stays_open_for_any_sample_size() {
        for trials in [10, 100, 10_000] {
            assert_eq!(verdict(trials * 9 / 10, trials, 0.9), GoalVerdict::Open);
        }
        assert_eq!(verdict(100, 100, 0.9), GoalVerdict::Kept);
        assert_eq!(verdict(800, 1000, 0.9), GoalVerdict::Broken);
        assert_eq!(
            verdict(10, 10, 0.9),
            GoalVerdict::Open,
            "ten are too few to tell"
        );
    }
}
