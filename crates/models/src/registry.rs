//! The model families, one row each.
//!
//! Owns: the choice of a family by config.json's `architectures` and `model_type`, which must agree
//! where both are given.
//! Never: reads another key.

use crate::error::ConfigError;
use crate::families::{
    exaone4, gemma3, glm4, granite, granitemoehybrid, llama, ministral3, mistral, olmo2, olmo3,
    phi3, qwen2, qwen3, seed_oss, smollm3,
};
use crate::fields::ConfigFields;
use crate::spec::ModelSpec;
use crate::tensors::NamedRole;

/// A family of models: how its config.json reads, and what its tensors are called.
#[derive(Debug)]
pub struct Family {
    /// Name of the family, as config.json's `model_type` has it.
    pub name: &'static str,
    /// Classes, as config.json's `architectures` has them.
    pub classes: &'static [&'static str],
    /// Reads the description of the model from its config.json.
    pub(crate) spec: fn(&ConfigFields) -> Result<ModelSpec, ConfigError>,
    /// Names of the tensors, with their roles, in groups that families share.
    pub tensors: &'static [&'static [NamedRole]],
    /// Name of a layer's attention module.
    pub attention_module: &'static str,
    /// Endings of names of tensors that are not used.
    pub unused_tensors: &'static [&'static str],
    /// Keys of config.json that change nothing in this family, beside those that change nothing in
    /// any.
    pub(crate) unused_keys: &'static [&'static str],
}

/// A model as its config.json describes it.
#[derive(Debug)]
pub struct DescribedModel {
    /// Family of the model.
    pub family: &'static Family,
    /// Description of the model.
    pub spec: ModelSpec,
}

static FAMILIES: [&Family; 15] = [
    &exaone4::FAMILY,
    &gemma3::FAMILY,
    &glm4::FAMILY,
    &granite::FAMILY,
    &granitemoehybrid::FAMILY,
    &llama::FAMILY,
    &ministral3::FAMILY,
    &mistral::FAMILY,
    &olmo2::FAMILY,
    &olmo3::FAMILY,
    &phi3::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &seed_oss::FAMILY,
    &smollm3::FAMILY,
];

/// Every family, in the order in which errors list them.
pub fn families() -> impl Iterator<Item = &'static Family> {
    FAMILIES.into_iter()
}

/// Reads a config.json. `rest` reads the fields that describe no model, such as a format of stored
/// weights; every field must be read by then, or be known to be harmless.
///
/// # Errors
/// The first field that contradicts another, is not supported, or is unknown.
pub fn read_model<T, E: From<ConfigError>>(
    fields: &ConfigFields,
    rest: impl FnOnce(&ConfigFields) -> Result<T, E>,
) -> Result<(DescribedModel, T), E> {
    let family = family(fields)?;
    let spec = (family.spec)(fields)?;
    let rest = rest(fields)?;
    family.refuse_unread(fields)?;
    Ok((DescribedModel { family, spec }, rest))
}

fn family(fields: &ConfigFields) -> Result<&'static Family, ConfigError> {
    let classes = fields.texts("architectures")?.unwrap_or_default();
    let model_type = fields.text("model_type")?;
    let found = families().find(|family| {
        if classes.is_empty() {
            model_type == Some(family.name)
        } else {
            family.classes.iter().any(|class| classes.contains(class))
        }
    });
    if let Some(family) = found {
        return match model_type {
            Some(name) if name != family.name => Err(contradiction(fields, family, name)),
            _ => Ok(family),
        };
    }
    let supported: Vec<&str> = families()
        .flat_map(|family| family.classes)
        .copied()
        .collect();
    let supported = supported.join(", ");
    let (field, is) = match (classes.first(), model_type) {
        (Some(class), _) => ("architectures", *class),
        (None, Some(name)) => ("model_type", name),
        (None, None) => {
            let problem = format!("is missing, so the architecture is unknown; one of {supported}");
            return Err(fields.damaged("architectures", problem));
        }
    };
    let problem = format!("{is} is not supported; supported are {supported}");
    Err(fields.unsupported(field, problem))
}

/// The error of a class and a `model_type` of two models: transformers would choose by the second.
fn contradiction(fields: &ConfigFields, family: &Family, name: &str) -> ConfigError {
    let (class, own_name) = (family.classes[0], family.name);
    let problem = format!(
        "{name} is another model than {class}, which `architectures` names and whose `model_type` \
         is {own_name}; correct the field that does not fit the weights"
    );
    fields.unsupported("model_type", problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::path::Path;

    fn family_of(config: &Value) -> Result<&'static str, String> {
        let map = config.as_object().cloned().unwrap_or_default();
        let fields = ConfigFields::new(Path::new("config.json"), map);
        let found = family(&fields).map(|family| family.name);
        found.map_err(|error| error.to_string())
    }

    #[test]
    fn a_family_is_found_by_class_or_model_type() {
        for found in families() {
            let (class, name) = (found.classes[0], found.name);
            for config in [
                json!({"architectures": [class], "model_type": name}),
                json!({"architectures": [class], "model_type": null}),
                json!({"architectures": [class]}),
                json!({"architectures": [], "model_type": name}),
                json!({"model_type": name}),
            ] {
                assert_eq!(family_of(&config), Ok(name), "{config}");
            }
        }
    }

    #[test]
    fn a_class_with_a_foreign_model_type_is_refused() {
        for name in ["qwen3", "deepseek_v3"] {
            let config = json!({"architectures": ["LlamaForCausalLM"], "model_type": name});
            let error = family_of(&config).unwrap_err();
            for part in ["field `model_type`", name, "LlamaForCausalLM", "is llama"] {
                assert!(error.contains(part), "{error} lacks {part}");
            }
        }
    }
}
