//! The model families, one row each.
//!
//! Owns: the choice of a family by config.json's `architectures` and `model_type`, which must agree
//! where both are given.
//! Never: reads another key.

use crate::error::ConfigError;
use crate::families::{
    cohere, cohere2, exaone4, gemma2, gemma3, glm4, glm4_moe, gpt_oss, granite, granitemoe,
    granitemoehybrid, granitemoeshared, llama, minimax_m2, ministral3, mistral, mixtral, olmo2,
    olmo3, olmoe, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, seed_oss, smollm3,
};
use crate::fields::ConfigFields;
use crate::spec::ModelSpec;
use crate::spelling::{self, NameSpelling};
use crate::tensors::NamedRole;
use crate::wrapper::{self, TEXT_CONFIG, Wrapper};

/// A family of models: how its config.json reads, and what its tensors are called.
#[derive(Debug)]
pub struct Family {
    /// Name of the family, as config.json's `model_type` has it.
    pub name: &'static str,
    /// Published models, for people.
    pub models: &'static str,
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
    /// Key of config.json that counts the layers after the model's own which predict further tokens
    /// (multi-token prediction, MTP), in families that may have some. They are not used.
    pub(crate) mtp_layers_key: Option<&'static str>,
    /// Keys of config.json that change nothing in this family, beside those that change nothing in
    /// any.
    pub(crate) unused_keys: &'static [&'static str],
}

/// A model as its config.json describes it.
#[derive(Debug)]
pub struct DescribedModel {
    /// Class around the model, if there is one.
    pub wrapper: Option<&'static Wrapper>,
    /// Family of the model.
    pub family: &'static Family,
    /// Description of the model.
    pub spec: ModelSpec,
    /// Layers after the model's own that predict further tokens, and are not used.
    mtp_layers_count: usize,
}

impl DescribedModel {
    /// Spellings of the names of tensors, the likeliest first.
    pub fn spellings(&self) -> &'static [NameSpelling] {
        match self.wrapper {
            None => &spelling::ALONE,
            Some(wrapper) => wrapper.spellings,
        }
    }

    /// Beginnings of the family's names of tensors that predict further tokens, and are not used:
    /// those of each layer that config.json counts after the model's own.
    pub fn mtp_tensors(&self) -> impl Iterator<Item = String> {
        let first = self.spec.layers.len();
        let layers = first..first + self.mtp_layers_count;
        layers.map(|layer| format!("model.layers.{layer}."))
    }
}

/// Bound on the layers that predict further tokens; published models have at most 3.
const MTP_LAYERS_MAX: usize = 64;

static FAMILIES: [&Family; 27] = [
    &cohere::FAMILY,
    &cohere2::FAMILY,
    &exaone4::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &glm4::FAMILY,
    &glm4_moe::FAMILY,
    &gpt_oss::FAMILY,
    &granite::FAMILY,
    &granitemoe::FAMILY,
    &granitemoehybrid::FAMILY,
    &granitemoeshared::FAMILY,
    &llama::FAMILY,
    &minimax_m2::FAMILY,
    &ministral3::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &olmo2::FAMILY,
    &olmo3::FAMILY,
    &olmoe::FAMILY,
    &phi3::FAMILY,
    &qwen2::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
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
    let wrapper = wrapper(fields)?;
    let model = match wrapper {
        None => described(fields, family(fields)?)?,
        Some(wrapper) => wrapped(fields, wrapper)?,
    };
    let rest = rest(fields)?;
    model.family.refuse_unread(fields)?;
    Ok((model, rest))
}

/// Reads a model of a family, without a class around it.
fn described(
    fields: &ConfigFields,
    family: &'static Family,
) -> Result<DescribedModel, ConfigError> {
    let spec = (family.spec)(fields)?;
    let mtp_layers_count = match family.mtp_layers_key {
        None => 0,
        Some(key) => fields.count(key, MTP_LAYERS_MAX)?.unwrap_or(0),
    };
    Ok(DescribedModel {
        wrapper: None,
        family,
        spec,
        mtp_layers_count,
    })
}

/// Reads the text part of a wrapped model.
fn wrapped(
    fields: &ConfigFields,
    wrapper: &'static Wrapper,
) -> Result<DescribedModel, ConfigError> {
    let text = fields.object(TEXT_CONFIG)?;
    let text = text.ok_or_else(|| fields.damaged(TEXT_CONFIG, "is missing"))?;
    let family = family(&text)?;
    wrapper.check_family(fields, family)?;
    let mut model = described(&text, family)?;
    wrapper.complete(fields, &mut model.spec)?;
    model.wrapper = Some(wrapper);
    Ok(model)
}

/// The classes and the model type that config.json names.
struct NamedModel<'a> {
    classes: Vec<&'a str>,
    model_type: Option<&'a str>,
}

impl<'a> NamedModel<'a> {
    fn read(fields: &'a ConfigFields) -> Result<Self, ConfigError> {
        Ok(Self {
            classes: fields.texts("architectures")?.unwrap_or_default(),
            model_type: fields.text("model_type")?,
        })
    }

    /// Whether one of these classes is named, or, if no class is, this model type.
    fn is(&self, classes: &[&str], name: &str) -> bool {
        if self.classes.is_empty() {
            self.model_type == Some(name)
        } else {
            classes.iter().any(|class| self.classes.contains(class))
        }
    }

    /// Refuses a class and a `model_type` of two models: transformers would choose by the second.
    fn check(&self, fields: &ConfigFields, class: &str, own_name: &str) -> Result<(), ConfigError> {
        let Some(name) = self.model_type.filter(|name| *name != own_name) else {
            return Ok(());
        };
        let problem = format!(
            "{name} is another model than {class}, which `architectures` names and whose \
             `model_type` is {own_name}; correct the field that does not fit the weights"
        );
        Err(fields.unsupported("model_type", problem))
    }
}

fn wrapper(fields: &ConfigFields) -> Result<Option<&'static Wrapper>, ConfigError> {
    let named = NamedModel::read(fields)?;
    let found = wrapper::wrappers().find(|wrapper| named.is(&[wrapper.class], wrapper.name));
    if let Some(wrapper) = found {
        named.check(fields, wrapper.class, wrapper.name)?;
    }
    Ok(found)
}

fn family(fields: &ConfigFields) -> Result<&'static Family, ConfigError> {
    let named = NamedModel::read(fields)?;
    let found = families().find(|family| named.is(family.classes, family.name));
    if let Some(family) = found {
        named.check(fields, family.classes[0], family.name)?;
        return Ok(family);
    }
    let classes = families().flat_map(|family| family.classes).copied();
    let supported: Vec<&str> = classes
        .chain(wrapper::wrappers().map(|each| each.class))
        .collect();
    let supported = supported.join(", ");
    let (field, is) = match (named.classes.first(), named.model_type) {
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
