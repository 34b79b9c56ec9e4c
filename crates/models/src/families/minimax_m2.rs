//! MiniMax-M2: experts in every layer that a biased score chooses, norms of whole projections of
//! queries and keys, and a rotary embedding of a part of each head.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::expert_names;
use super::experts::{self, COUNT_KEYS, DecoderExperts, ExpertsReader, SOFTMAX_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{Rope, RopeReader};
use crate::spec::{
    AttentionBiases, ChosenWeights, HeadShape, ModelSpec, QkNormScope, RouterScore, RouterSpec,
};

pub(crate) static FAMILY: Family = Family {
    name: "minimax_m2",
    models: "MiniMax-M2, M2.1, M2.5, M2.7",
    classes: &["MiniMaxM2ForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        names::HEAD_NORMS,
        expert_names::EXPERTS_MIXTRAL,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: Some("num_mtp_modules"),
    unused_keys: &[
        "mtp_transformer_layers",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "use_mtp",
    ],
};

/// The class's own defaults.
const HEAD_DIM: usize = 128;
const THETA: f64 = 5e6;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, Some(HEAD_DIM))?;
    require_own_options(fields)?;
    let router = RouterSpec {
        score: RouterScore::Sigmoid,
        has_choice_bias: true,
        weights: ChosenWeights::Normalized { epsilon: 0.0 },
        ..SOFTMAX_ROUTER
    };
    let reader = ExpertsReader {
        count: COUNT_KEYS,
        width: "intermediate_size",
    };
    let experts = DecoderExperts {
        spec: reader.read(fields, router)?,
        has_experts: experts::in_every_layer(fields)?,
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases::default(),
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms {
            qk: Some(QkNormScope::Projection),
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::one(rope(fields, &heads)?),
    }
    .spec(fields)
}

/// Reads the rotary embedding, of `rotary_dim` elements where config.json has that key.
fn rope(fields: &ConfigFields, heads: &HeadShape) -> Result<Rope, ConfigError> {
    const DIM: &str = "rotary_dim";
    let stated = fields.count(DIM, heads.head_dim)?;
    if let Some(dim) = stated.filter(|dim| *dim == 0 || !dim.is_multiple_of(2)) {
        let problem = format!("{dim} is not an even number from 2 to {}", heads.head_dim);
        return Err(fields.damaged(DIM, problem));
    }
    let share = stated.map_or(1.0, |dim| dim as f64 / heads.head_dim as f64);
    let reader = RopeReader {
        theta: THETA,
        share: Some(share),
        ..RopeReader::new(heads.head_dim)
    };
    let rope = reader.read(fields)?;
    match stated {
        Some(dim) if dim != rope.rotated_dim => {
            let rotated = rope.rotated_dim;
            let problem =
                format!("{dim} differs from partial_rotary_factor, which gives {rotated}");
            Err(fields.damaged(DIM, problem))
        }
        _ => Ok(rope),
    }
}

/// Refuses values of the files' own options that the class does not read, but for those that it
/// has always.
fn require_own_options(fields: &ConfigFields) -> Result<(), ConfigError> {
    decoder::require_text(fields, "scoring_func", "sigmoid")?;
    decoder::require_text(fields, "qk_norm_type", "per_layer")?;
    for name in ["use_qk_norm", "use_routing_bias"] {
        if fields.flag(name)? == Some(false) {
            return Err(fields.unsupported(name, "false is not supported; true is"));
        }
    }
    const SHARED: &str = "shared_intermediate_size";
    if let Some(width @ 1..) = fields.count(SHARED, decoder::WIDTH_MAX)? {
        let problem = format!("{width} is not supported; 0, no shared expert, is");
        return Err(fields.unsupported(SHARED, problem));
    }
    const KINDS: &str = "attn_type_list";
    let kinds = fields.counts(KINDS, 1 << 8)?.unwrap_or_default();
    if let Some(kind) = kinds.iter().find(|kind| **kind != 1) {
        let problem = format!("{kind} is not supported; 1, full attention, is");
        return Err(fields.unsupported(KINDS, problem));
    }
    Ok(())
}
