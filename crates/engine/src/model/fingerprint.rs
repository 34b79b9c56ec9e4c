//! The fingerprint of an engine.
//!
//! Owns: its text.
//! Invariant: engines of one fingerprint compute equal bits, and their blocks have equal bytes.

use crate::ops::{KvPoolShape, WeightLoader};
use crate::weights::Weights;
use cleave_domain::{Fingerprint, KvSpec, WindowLayout};

/// Compatibility key: blocks can be exchanged only between engines with equal keys.
pub(super) fn fingerprint<P: WeightLoader>(
    weights: &Weights<P>,
    spec: &KvSpec,
    shape: &KvPoolShape,
    arithmetic: &str,
) -> Fingerprint {
    let (layers_count, heads) = (shape.layers_count(), shape.uniform_heads());
    let (block_tokens, kv) = (shape.block_tokens, shape.kv);
    // Where each layer's state lies follows from the weights' revision and the number formats.
    let state = spec.state.as_ref().map_or(String::new(), |layout| {
        format!("-s{}b{}", layout.layers.len(), layout.bytes)
    });
    let window = spec.window.as_ref().map_or(String::new(), |window| {
        let WindowLayout { tokens, layout } = window;
        format!("-w{tokens}l{}", layout.layers.len())
    });
    let form = match weights.weight_form {
        "" => String::new(),
        form => format!("-{form}"),
    };
    let rope = weights.rope_choice;
    Fingerprint(format!(
        "{}-{}{form}-{arithmetic}{rope}-{}-{}l{layers_count}h{}d{}t{block_tokens}{state}{window}",
        weights.revision,
        weights.precision.name(),
        weights.slices,
        kv.name(),
        heads.kv_heads,
        heads.head_dim,
    ))
}
