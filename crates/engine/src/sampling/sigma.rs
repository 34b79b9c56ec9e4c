//! The cut by standard deviations below the largest logit (top-n-sigma).
//!
//! Owns: distances of logits, and their standard deviation. Never: drops a token.
//! Invariant: distances are summed as whole numbers, so that a sum does not depend on its order.

/// Parts of a logit in which distances are counted: finer than bf16 holds logits above 2.
const UNITS: f32 = 65_536.0;
/// Logits this far below the largest one or farther are equally far.
const FARTHEST: f32 = 65_536.0;

/// Distance of a logit from the largest one, in 2^-16 of a logit, rounded down.
pub(super) fn distance(most: f32, logit: f32) -> u32 {
    let distance = most - logit;
    if distance < FARTHEST {
        (distance * UNITS) as u32
    } else {
        u32::MAX
    }
}

/// The greatest [`distance`] within `n` standard deviations of all finite logits. `most`, the
/// largest of them, is finite.
pub(super) fn greatest_distance(logits: &[f32], most: f32, n: f32) -> u32 {
    let finite = logits.iter().filter(|logit| **logit != f32::NEG_INFINITY);
    let distances = finite.map(|logit| u64::from(distance(most, *logit)));
    let (mut count, mut sum) = (0_u64, 0_u64);
    for distance in distances.clone() {
        count += 1;
        sum += distance;
    }
    let mean = sum / count;
    // A square takes up to 64 bits, so the halves are summed apart.
    let (mut high, mut low) = (0_u64, 0_u64);
    for distance in distances {
        let deviation = distance.abs_diff(mean);
        let square = deviation * deviation;
        high += square >> 32;
        low += square & u64::from(u32::MAX);
    }
    let squares = high as f32 * 4_294_967_296.0 + low as f32;
    // A conversion beyond the largest number gives that number.
    (n * (squares / count as f32).sqrt()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_logits_have_no_deviation() {
        assert_eq!(greatest_distance(&[3.5; 1000], 3.5, 5.0), 0);
    }

    #[test]
    fn banned_logits_do_not_count() {
        let logits = [4.0, 2.0, 0.0, f32::NEG_INFINITY];
        let allowed = greatest_distance(&logits[..3], 4.0, 1.0);
        assert_eq!(greatest_distance(&logits, 4.0, 1.0), allowed);
        assert_eq!(distance(4.0, f32::NEG_INFINITY), u32::MAX);
    }

    #[test]
    fn extreme_logits_do_not_overflow() {
        let logits = [f32::MAX, f32::MIN, 0.0];
        assert_eq!(distance(f32::MAX, f32::MIN), u32::MAX);
        assert_eq!(greatest_distance(&logits, f32::MAX, 1e4), u32::MAX);
    }

    proptest! {
        #[test]
        fn the_deviation_is_that_of_double_precision(
            logits in prop::collection::vec(-40.0f32..40.0, 2..3000),
            n in 0.01f32..6.0,
        ) {
            let most = logits.iter().copied().fold(f32::MIN, f32::max);
            let values = || logits.iter().map(|logit| f64::from(*logit));
            let count = logits.len() as f64;
            let mean = values().sum::<f64>() / count;
            let variance = values().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
            let exact = f64::from(n) * variance.sqrt();
            let got = f64::from(greatest_distance(&logits, most, n)) / f64::from(UNITS);
            prop_assert!((got - exact).abs() < 1e-4, "{got}, not {exact}");
        }
    }
}
