//! Granite 3 with experts, and a shared expert in every layer.

use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use super::{expert_names, experts, granitemoe};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{ExpertsSpec, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "granitemoeshared",
    models: "Granite 3 with experts and a shared one (previews of Granite 4)",
    classes: &["GraniteMoeSharedForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        expert_names::EXPERTS_GRANITE,
        expert_names::SHARED_GRANITE,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &["router_aux_loss_coef"],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let experts = ExpertsSpec {
        shared: experts::shared(fields, "shared_intermediate_size")?,
        ..granitemoe::experts(fields)?
    };
    granitemoe::model(fields, FAMILY.name, experts)
}
