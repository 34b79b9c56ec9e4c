//! Granite 3 with experts in every layer.

use super::decoder::{self, Decoder, DecoderMlp, DecoderNorms, DecoderRopes};
use super::experts::{self, COUNT_KEYS, DecoderExperts, ExpertsReader, LOGITS_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use super::{expert_names, granite};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{ExpertsSpec, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "granitemoe",
    models: "Granite 3 with experts (1B-A400M, 3B-A800M)",
    classes: &["GraniteMoeForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        expert_names::EXPERTS_GRANITE,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &["router_aux_loss_coef"],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    model(fields, FAMILY.name, experts(fields)?)
}

/// Reads the experts of a Granite model of any generation.
pub(super) fn experts(fields: &ConfigFields) -> Result<ExpertsSpec, ConfigError> {
    let reader = ExpertsReader {
        count: COUNT_KEYS,
        width: "intermediate_size",
    };
    reader.read(fields, LOGITS_ROUTER)
}

/// Reads a model of Granite 3 with these experts in every layer.
pub(super) fn model(
    fields: &ConfigFields,
    family: &'static str,
    spec: ExpertsSpec,
) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let experts = DecoderExperts {
        spec,
        has_experts: experts::in_every_layer(fields)?,
    };
    Decoder {
        family,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms::default(),
        factors: granite::factors(fields)?,
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
