//! Factors and offsets of a model that are folded into its weights and constants when they are
//! loaded, so that no operation knows them.
//!
//! Owns: the arithmetic of it, and the order of rows. Never: changes an element of a matrix.
//! Invariant: the folded model computes the same function; it has no [`Scalars::residual`] and no
//! [`Scalars::logits`], its embedding's factor is final, and its rotary pairs are halves.

use crate::ops::{HeadShape, Precision};
use cleave_checkpoint::StoredMatrix;
use cleave_models::{
    AttentionSpec, LayerNorms, LayerSpec, Mixer, ModelSpec, NormSpec, NormWeight, Projection,
    RopePairs, Scalars,
};
use half::bf16;

/// The model whose residual stream is `x / r`, where the described one's is `x` and adds outputs
/// times `r`: outputs are added as they are, the embedding's factor is divided by `r`, and a norm
/// of the stream gives the same for `x / r` if its epsilon is divided by `r²`.
pub(crate) fn folded(described: &ModelSpec, precision: Precision) -> ModelSpec {
    let mut spec = described.clone();
    let Scalars {
        embedding,
        is_embedding_rounded,
        residual,
        logits: _,
        logits_cap,
    } = described.scalars;
    let embedding = match (is_embedding_rounded, precision) {
        (true, Precision::Bf16) => bf16::from_f32(embedding).to_f32(),
        (true, Precision::F32) | (false, _) => embedding,
    };
    spec.scalars = Scalars {
        embedding: embedding / residual,
        logits_cap,
        ..Scalars::default()
    };
    let fold = |norm: &mut NormSpec| norm.epsilon /= residual * residual;
    for LayerSpec { norms, .. } in &mut spec.layers {
        let LayerNorms {
            mixer_input,
            mixer_output: _,
            mlp_input,
            mlp_output: _,
        } = norms;
        mixer_input.iter_mut().chain(mlp_input).for_each(fold);
    }
    fold(&mut spec.final_norm);
    spec
}

/// Rows of a stack of queries, keys and values in the order in which rotary pairs of neighbours
/// become pairs of halves, the only ones that devices rotate: `0 2 4 … 1 3 5 …` within the rotated
/// part of each head. Scores do not change, since queries and keys have the same order. `None` for
/// any other stack, or if pairs are halves already.
pub(crate) fn row_order(
    spec: &ModelSpec,
    layer: usize,
    parts: &[Projection],
) -> Option<Vec<usize>> {
    let Mixer::Attention(AttentionSpec { heads, rope, .. }) = &spec.layers[layer].mixer;
    let rope = &spec.ropes[rope.0];
    if parts != Projection::QKV || rope.pairs == RopePairs::Halves {
        return None;
    }
    let HeadShape {
        query_heads,
        kv_heads,
        head_dim,
    } = *heads;
    let of_head = |head: usize| {
        let rotated = rope.rotated_dim;
        let in_order = (0..rotated).step_by(2).chain((1..rotated).step_by(2));
        in_order
            .chain(rotated..head_dim)
            .map(move |row| head * head_dim + row)
    };
    let turned = query_heads + kv_heads;
    let values = turned * head_dim..heads.qkv_width();
    Some((0..turned).flat_map(of_head).chain(values).collect())
}

/// A stack with its rows in this order, which moves none from one matrix to another.
pub(crate) fn in_order(stack: Vec<StoredMatrix>, order: Option<&[usize]>) -> Vec<StoredMatrix> {
    let Some(order) = order else {
        return stack;
    };
    let mut first = 0;
    let ordered = stack.into_iter().map(|matrix| {
        let rows = first..first + matrix.rows();
        first = rows.end;
        let own = order[rows.clone()].iter().map(|row| row - rows.start);
        matrix.with_rows(&own.collect::<Vec<_>>())
    });
    ordered.collect()
}

/// A norm's weight from its stored numbers.
pub(crate) fn norm_weight(norm: NormSpec, mut stored: Vec<f32>) -> Vec<f32> {
    if norm.weight == NormWeight::PlusOne {
        stored.iter_mut().for_each(|weight| *weight += 1.0);
    }
    stored
}

/// Multiplies the final norm's weight by the factor of the logits, which are linear in it. Vectors
/// made of its rows are divided by the factor again.
pub(crate) fn scale_logits(described: &ModelSpec, weight: &mut [f32]) {
    let factor = described.scalars.logits;
    weight.iter_mut().for_each(|weight| *weight *= factor);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_models::{ConfigError, ConfigFields, NormFormula, read_model};
    use serde_json::json;
    use std::path::Path;

    fn granite() -> ModelSpec {
        let config = json!({
            "architectures": ["GraniteForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 32,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
        });
        let map = config.as_object().cloned().unwrap();
        let fields = ConfigFields::new(Path::new("config.json"), map);
        let read = read_model(&fields, |_| Ok::<_, ConfigError>(()));
        read.unwrap().0.spec
    }

    #[test]
    fn a_factor_of_outputs_moves_into_embedding_and_epsilons() {
        let described = granite();
        let folded = folded(&described, Precision::F32);
        assert_eq!(folded.scalars.embedding, 48.0);
        assert_eq!((folded.scalars.residual, folded.scalars.logits), (1.0, 1.0));
        let epsilon = described.final_norm.epsilon * 16.0;
        assert_eq!(folded.final_norm.epsilon, epsilon);
        let norms = folded.layers[1].norms;
        for norm in [norms.mixer_input, norms.mlp_input] {
            assert_eq!(norm.map(|norm| norm.epsilon), Some(epsilon));
        }
        let mut weight = vec![1.0, -2.0];
        scale_logits(&described, &mut weight);
        assert_eq!(weight, [0.125, -0.25]);
    }

    #[test]
    fn a_rounded_factor_depends_on_the_type_of_weights() {
        let mut described = granite();
        described.scalars = Scalars {
            embedding: 33.94113,
            is_embedding_rounded: true,
            ..Scalars::default()
        };
        let embedding = |precision| folded(&described, precision).scalars.embedding;
        assert_eq!(embedding(Precision::F32), 33.94113);
        assert_eq!(embedding(Precision::Bf16), 34.0);
    }

    #[test]
    fn a_weight_less_one_is_completed() {
        let norm = NormSpec {
            formula: NormFormula::RmsNorm,
            epsilon: 1e-6,
            weight: NormWeight::PlusOne,
        };
        assert_eq!(norm_weight(norm, vec![0.0, -0.5]), [1.0, 0.5]);
    }
}
