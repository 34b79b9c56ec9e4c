//! Keys of mixtures of experts, which families with experts share.
//!
//! Owns: the bounds on experts, and the refusal of numbers that contradict each other.
//! Never: knows which family it reads for, but for the values that the family's file passes.

use super::decoder::{self, LAYERS_MAX, WIDTH_MAX};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::spec::{
    Activation, ChosenWeights, ExpertGroups, ExpertsSpec, GatedMlpSpec, GroupScore, RouterScore,
    RouterSpec, SharedExpertSpec,
};

/// Bounds on what a file may claim, far above any model, so that products cannot overflow.
const EXPERTS_MAX: usize = 1 << 12;
/// Rows of all experts of a layer side by side; the largest published models have nearly 2^20.
const ROWS_MAX: usize = 1 << 22;

/// Key of the number of experts that each token uses.
const CHOSEN: &str = "num_experts_per_tok";

/// Experts of a decoder, and the layers that have them; the others have a dense MLP.
pub(super) struct DecoderExperts {
    pub(super) spec: ExpertsSpec,
    pub(super) has_experts: Vec<bool>,
}

/// A router without a bias, a group or a factor, which weights experts by their probabilities.
pub(super) const SOFTMAX_ROUTER: RouterSpec = RouterSpec {
    score: RouterScore::Softmax,
    has_bias: false,
    has_choice_bias: false,
    groups: None,
    weights: ChosenWeights::Scores,
    scale: 1.0,
};

/// A router whose weights are a softmax of the chosen logits alone.
pub(super) const LOGITS_ROUTER: RouterSpec = RouterSpec {
    score: RouterScore::Identity,
    weights: ChosenWeights::Softmax,
    ..SOFTMAX_ROUTER
};

/// The keys of a family's experts.
#[derive(Clone, Copy)]
pub(super) struct ExpertsReader {
    /// Names of the number of experts, of which a file has at least one.
    pub(super) count: &'static [&'static str],
    /// Key of an expert's width.
    pub(super) width: &'static str,
}

/// The names that transformers' versions give the number of experts; the hub's files have the
/// first.
pub(super) const COUNT_KEYS: &[&str] = &["num_experts", "num_local_experts"];

impl ExpertsReader {
    /// Reads the experts themselves, with this router and no shared expert.
    pub(super) fn read(
        &self,
        fields: &ConfigFields,
        router: RouterSpec,
    ) -> Result<ExpertsSpec, ConfigError> {
        let count = agreeing_size(fields, self.count, EXPERTS_MAX)?;
        let chosen = fields.size(CHOSEN, WIDTH_MAX)?;
        if chosen > count {
            let problem = format!("{chosen} is not from 1 to {count}, the number of experts");
            return Err(fields.damaged(CHOSEN, problem));
        }
        let expert = mlp(fields, self.width)?;
        if count * expert.width > ROWS_MAX {
            let width = expert.width;
            let problem = format!("{count} experts of {width} rows have more than {ROWS_MAX}");
            return Err(fields.damaged(self.width, problem));
        }
        Ok(ExpertsSpec {
            count,
            chosen,
            expert,
            router,
            shared: None,
        })
    }
}

/// Reads an MLP without a bias, by the key of its width.
pub(super) fn mlp(fields: &ConfigFields, width: &str) -> Result<GatedMlpSpec, ConfigError> {
    Ok(GatedMlpSpec {
        width: fields.size(width, WIDTH_MAX)?,
        activation: decoder::activation(fields, "hidden_act")?.unwrap_or(Activation::Silu),
        bias: false,
    })
}

/// Reads the shared expert, if there is one: the key of its width is absent or 0 where there is
/// none.
pub(super) fn shared(
    fields: &ConfigFields,
    width: &str,
) -> Result<Option<SharedExpertSpec>, ConfigError> {
    if fields.count(width, WIDTH_MAX)?.unwrap_or(0) == 0 {
        return Ok(None);
    }
    Ok(Some(SharedExpertSpec {
        mlp: mlp(fields, width)?,
        has_gate: false,
    }))
}

/// Reads a size that has several names, of which the file has at least one.
fn agreeing_size(
    fields: &ConfigFields,
    names: &[&'static str],
    max: usize,
) -> Result<usize, ConfigError> {
    let mut found: Option<(&str, usize)> = None;
    for name in names {
        if fields.get(name).is_none() {
            continue;
        }
        let size = fields.size(name, max)?;
        match found {
            Some((other, first)) if first != size => {
                let problem = format!("{size} differs from {other}, {first}; remove the wrong one");
                return Err(fields.damaged(name, problem));
            }
            _ => found = Some((name, size)),
        }
    }
    let first = names.first().copied().unwrap_or_default();
    found.map_or_else(|| fields.size(first, max), |(_, size)| Ok(size))
}

/// Reads whether the weights of the chosen experts are divided by their sum.
pub(super) fn weights(
    fields: &ConfigFields,
    default: bool,
    epsilon: f32,
) -> Result<ChosenWeights, ConfigError> {
    let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(default);
    Ok(if is_normalized {
        ChosenWeights::Normalized { epsilon }
    } else {
        ChosenWeights::Scores
    })
}

/// Reads the groups of experts of which only the best are chosen from, if that leaves any out.
pub(super) fn groups(
    fields: &ConfigFields,
    experts: &ExpertsSpec,
) -> Result<Option<ExpertGroups>, ConfigError> {
    const COUNT: &str = "n_group";
    const BEST: &str = "topk_group";
    let (count, chosen) = (experts.count, experts.chosen);
    let groups = fields.count(COUNT, EXPERTS_MAX)?.unwrap_or(1);
    let best = fields.count(BEST, EXPERTS_MAX)?.unwrap_or(1);
    if groups == 0 || !count.is_multiple_of(groups) {
        let problem = format!("{groups} does not divide {count}, the number of experts");
        return Err(fields.damaged(COUNT, problem));
    }
    if best == 0 || best > groups {
        let problem = format!("{best} is not from 1 to {groups}, which {COUNT} is");
        return Err(fields.damaged(BEST, problem));
    }
    if best == groups {
        return Ok(None);
    }
    let size = count / groups;
    if size < 2 {
        let problem = format!("{groups} groups of {size} experts; a group has at least 2");
        return Err(fields.damaged(COUNT, problem));
    }
    if best * size < chosen {
        let problem = format!(
            "{best} groups of {size} experts have fewer than the {chosen} that {CHOSEN} chooses"
        );
        return Err(fields.damaged(BEST, problem));
    }
    Ok(Some(ExpertGroups {
        count: groups,
        chosen: best,
        score: GroupScore::TwoBestSum,
    }))
}

/// Experts in every layer.
pub(super) fn in_every_layer(fields: &ConfigFields) -> Result<Vec<bool>, ConfigError> {
    Ok(vec![true; fields.size("num_hidden_layers", LAYERS_MAX)?])
}

/// Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.
pub(super) fn in_sparse_steps(fields: &ConfigFields) -> Result<Vec<bool>, ConfigError> {
    const STEP: &str = "decoder_sparse_step";
    const DENSE: &str = "mlp_only_layers";
    let layers_count = fields.size("num_hidden_layers", LAYERS_MAX)?;
    let step = match fields.get(STEP) {
        None => 1,
        Some(_) => fields.size(STEP, LAYERS_MAX)?,
    };
    let dense = fields.counts(DENSE, LAYERS_MAX)?.unwrap_or_default();
    if let Some(absent) = dense.iter().find(|layer| **layer >= layers_count) {
        let problem = format!("names layer {absent} of {layers_count}; layers count from 0");
        return Err(fields.damaged(DENSE, problem));
    }
    let has_experts = |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    checked_layers(fields, STEP, (0..layers_count).map(has_experts).collect())
}

/// Experts in every layer after the first ones, which `first_k_dense_replace` counts; `default` is
/// the class's own number.
pub(super) fn after_dense_layers(
    fields: &ConfigFields,
    default: usize,
) -> Result<Vec<bool>, ConfigError> {
    const DENSE: &str = "first_k_dense_replace";
    let layers_count = fields.size("num_hidden_layers", LAYERS_MAX)?;
    let dense = fields.count(DENSE, LAYERS_MAX)?.unwrap_or(default);
    checked_layers(
        fields,
        DENSE,
        (0..layers_count).map(|i| i >= dense).collect(),
    )
}

/// Compares the layers that have experts with `mlp_layer_types`, where newer writers list them.
fn checked_layers(
    fields: &ConfigFields,
    rule: &str,
    has_experts: Vec<bool>,
) -> Result<Vec<bool>, ConfigError> {
    const TYPES: &str = "mlp_layer_types";
    let Some(types) = fields.texts(TYPES)? else {
        return Ok(has_experts);
    };
    let names = has_experts.iter().map(|sparse| match sparse {
        true => "sparse",
        false => "dense",
    });
    if names.eq(types) {
        return Ok(has_experts);
    }
    let problem = format!("does not list the layers with experts that {rule} gives");
    Err(fields.damaged(TYPES, problem))
}
