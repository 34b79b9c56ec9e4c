//! The most likely tokens, without sorting the vocabulary.
//!
//! Owns: partial selection.
//! Never: knows a probability.
//! Invariant: the result is the head of the total order "larger logit first, then smaller id".

use cleave_domain::TokenId;
use std::cmp::Ordering;

/// A token with its logit.
pub(crate) type TokenLogit = (TokenId, f32);

/// Larger logit first, then smaller id.
pub(crate) fn order(a: &TokenLogit, b: &TokenLogit) -> Ordering {
    b.1.partial_cmp(&a.1)
        .expect("logits were checked to be numbers")
        .then(a.0.cmp(&b.0))
}

/// Selects the first `count` tokens in order, or all if there are fewer. `out` is cleared first.
pub(crate) fn top(logits: &[f32], count: usize, out: &mut Vec<TokenLogit>) {
    out.clear();
    let count = count.min(logits.len());
    if count == 0 {
        return;
    }
    // Collects candidates up to twice `count`, then drops the worse half. Ids ascend, so a
    // later token that only equals the worst kept one never precedes it, and need not be collected.
    let full = (2 * count).max(count + 64);
    let mut threshold = f32::NEG_INFINITY;
    let mut threshold_is_set = false;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > threshold || !threshold_is_set {
            out.push((id as TokenId, *logit));
            if out.len() == full {
                out.select_nth_unstable_by(count - 1, order);
                out.truncate(count);
                threshold = out[count - 1].1;
                threshold_is_set = true;
            }
        }
    }
    out.sort_unstable_by(order);
    out.truncate(count);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Few distinct values, so that ties are frequent.
        #[test]
        fn top_k_selection_is_the_head_of_a_full_sort(
            values in prop::collection::vec(-6i8..6, 0..900),
            count in 0usize..300,
        ) {
            let logits: Vec<f32> = values.iter().map(|v| f32::from(*v)).collect();
            let mut sorted: Vec<TokenLogit> =
                logits.iter().enumerate().map(|(id, l)| (id as u32, *l)).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            sorted.truncate(count);
            let mut found = Vec::new();
            top(&logits, count, &mut found);
            prop_assert_eq!(found, sorted);
        }
    }
}
