//! Exponentials and sums over a vocabulary.
//!
//! Owns: an exponential with the same bits on every machine, and sums in a fixed order.
//! Never: depends on a sampling rule.
//! Invariant: results depend on the numbers and their order only: the code calls no platform's
//! libm, and uses no multiply-add that a compiler may or may not fuse.

const LANES: usize = 8;

/// `exp(x)` for `x <= 0`, within two units in the last place; 0 below −87. Branch-free, so that
/// loops over it vectorise.
pub(crate) fn exp(x: f32) -> f32 {
    // Range reduction to |r| <= ln 2 / 2 with ln 2 in two parts, then a polynomial of degree 5 for
    // (exp(r) − 1 − r) / r², as in Moshier's Cephes. 1.5 · 2^23: adding it rounds to a whole
    // number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let whole = rounded - ROUND;
    let r = clamped - whole * 0.693_359_4 - whole * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4_f32;
    for coefficient in [
        1.398_199_9e-3_f32,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = p * r + coefficient;
    }
    let value = p * r * r + r + 1.0;
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    let scale = f32::from_bits(exponent.wrapping_add(127) << 23);
    if x > -87.0 { value * scale } else { 0.0 }
}

/// Whether every logit is a finite number.
pub(crate) fn all_finite(logits: &[f32]) -> bool {
    logits
        .chunks(1024)
        .all(|chunk| chunk.iter().fold(true, |fine, l| fine & l.is_finite()))
}

/// The largest logit; negative infinity for none.
pub(crate) fn max(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *value);
        }
    }
    let most = lanes.into_iter().fold(f32::NEG_INFINITY, larger);
    rest.iter().copied().fold(most, larger)
}

/// The smallest index of the largest logit; 0 for none.
pub(crate) fn argmax(logits: &[f32]) -> usize {
    let most = max(logits);
    logits.iter().position(|l| *l == most).unwrap_or(0)
}

/// Returns `log Σ exp(logit)` over all logits.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f32 {
    let most = max(logits);
    let mut lanes = [0.0f64; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        let mut powers = [0.0f32; LANES];
        for (power, logit) in powers.iter_mut().zip(chunk) {
            *power = exp(logit - most);
        }
        for (lane, power) in lanes.iter_mut().zip(powers) {
            *lane += f64::from(power);
        }
    }
    let rest: f64 = rest.iter().map(|l| f64::from(exp(l - most))).sum();
    let sum = lanes.into_iter().sum::<f64>() + rest;
    (f64::from(most) + sum.ln()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_double_precision() {
        for step in 0..=870_000 {
            let x = -(step as f32) * 1e-4;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            let error = ((got - want) / want).abs();
            assert!(
                error < 2.5e-7 || want < 2e-38,
                "exp({x}) = {got}, not {want}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
    }

    #[test]
    fn sums_agree_with_double_precision() {
        let logits: Vec<f32> = (0..1003)
            .map(|i| ((i * 37 % 101) as f32) * 0.1 - 3.0)
            .collect();
        let want = logits.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
        assert!((f64::from(log_sum_exp(&logits)) - want).abs() < 1e-6);
        assert_eq!(max(&logits), 7.0);
        assert_eq!(
            argmax(&logits),
            logits.iter().position(|l| *l == 7.0).unwrap()
        );
    }
}
