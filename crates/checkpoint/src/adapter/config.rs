//! adapter_config.json: ranks and scales of an adapter's modules.
//!
//! Owns: the keys that PEFT writes, and which values of them change an adapter's meaning.
//! Never: reads a tensor.
//! Invariant: a key that no reader used refuses the adapter.

use super::experts::parameter_key;
use super::target::AdapterTarget;
use super::{last_part, pair_names};
use crate::error::CheckpointError;
use crate::folder::TensorFolder;
use cleave_models::{ConfigError, ConfigFields};
use serde_json::Value;
use std::collections::BTreeSet;

/// Keys that change nothing about an adapter that is served: how it was trained, and where from.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "velora_config",
];
/// Keys of variants of LoRA that are not supported, unless they are absent, false or empty.
const VARIANTS: &[(&str, &str)] = &[
    ("use_dora", "DoRA is not supported"),
    ("use_qalora", "QALoRA is not supported"),
    ("use_bdlora", "BD-LoRA is not supported"),
    (
        "lora_bias",
        "a bias of LoRA's second matrix is not supported",
    ),
    ("fan_in_fan_out", "transposed weights are not supported"),
    (
        "modules_to_save",
        "modules trained as a whole are not supported; merge the adapter",
    ),
    (
        "trainable_token_indices",
        "trained embeddings are not supported; merge the adapter",
    ),
    ("layer_replication", "replicated layers are not supported"),
    ("kasa_config", "KaSA is not supported"),
    ("monteclora_config", "MonteCLoRA is not supported"),
    (
        "arrow_config",
        "Arrow's routing among adapters is not supported",
    ),
    ("alora_invocation_tokens", "activated LoRA is not supported"),
];
/// Initialisations that leave the base model as it is. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
/// change it, and an adapter is for the changed model until PEFT converts it.
const PLAIN_INITS: &[&str] = &["gaussian", "orthogonal", "eva"];
const PARAMETERS: &str = "target_parameters";
/// Far above any rank, so that sizes cannot overflow.
const RANK_MAX: usize = 1 << 16;

/// Ranks, scales and targets of an adapter.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    rank: usize,
    alpha: f64,
    rank_patterns: Vec<(String, usize)>,
    alpha_patterns: Vec<(String, f64)>,
    /// Whether the scale is `alpha / √rank` and not `alpha / rank` (Kalajdzievski 2023).
    is_rank_stabilized: bool,
    /// Endings of the modules' names; `None` if a regular expression chose them.
    targets: Option<Vec<String>>,
    /// Endings of the names of parameters that it changes, as those of experts.
    parameters: Vec<String>,
    /// Release of PEFT that wrote the file; `None` for the earlier ones, which do not name theirs.
    release: Option<[u64; 2]>,
    /// Whether the file leaves modules of these endings out.
    leaves_out: bool,
}

impl AdapterConfig {
    pub(super) fn read(fields: &ConfigFields) -> Result<Self, CheckpointError> {
        match fields.text("peft_type")? {
            Some("LORA") => {}
            other => {
                let found = other.unwrap_or("missing");
                let problem = format!("is {found}; only LORA is supported");
                return Err(fields.unsupported("peft_type", problem).into());
            }
        }
        check_variants(fields)?;
        fields.ignore(HARMLESS);
        let limits_layers = fields.get("layers_to_transform").is_some();
        let excludes = fields.get("exclude_modules").is_some();
        let alpha = fields.number("lora_alpha")?;
        let config = Self {
            rank: fields.size("r", RANK_MAX)?,
            alpha: alpha.ok_or_else(|| fields.damaged("lora_alpha", "is missing"))?,
            rank_patterns: patterns(fields, "rank_pattern", |fields, name| {
                fields.size(name, RANK_MAX)
            })?,
            alpha_patterns: patterns(fields, "alpha_pattern", |fields, name| {
                let alpha = fields.number(name)?;
                alpha.ok_or_else(|| fields.damaged(name, "is missing"))
            })?,
            is_rank_stabilized: fields.flag("use_rslora")?.unwrap_or(false),
            targets: targets(fields)?,
            parameters: parameters(fields)?,
            release: release(fields)?,
            leaves_out: limits_layers || excludes,
        };
        fields.refuse_unread()?;
        Ok(config)
    }

    /// Rank of a module's matrices.
    pub(super) fn rank(&self, module: &str) -> usize {
        matching(&self.rank_patterns, module).unwrap_or(self.rank)
    }

    /// Factor of a module's product.
    pub(super) fn scale(&self, module: &str) -> f32 {
        let alpha = matching(&self.alpha_patterns, module).unwrap_or(self.alpha);
        let rank = self.rank(module) as f64;
        let scale = if self.is_rank_stabilized {
            alpha / rank.sqrt()
        } else {
            alpha / rank
        };
        scale as f32
    }

    /// Release of PEFT that wrote the file, if it is known.
    pub(super) fn release(&self) -> Option<[u64; 2]> {
        self.release
    }

    /// Whether the file's targets name this parameter.
    pub(super) fn names_parameter(&self, key: &str) -> bool {
        let mut parameters = self.parameters.iter();
        parameters.any(|ending| is_ending(ending, key))
    }

    /// Refuses patterns that have two values for a module or parameter.
    pub(super) fn check_patterns(
        &self,
        fields: &ConfigFields,
        module: &str,
    ) -> Result<(), ConfigError> {
        // A JSON object has no order, so that no pattern comes first.
        for (name, is_ambiguous) in [
            ("rank_pattern", is_ambiguous(&self.rank_patterns, module)),
            ("alpha_pattern", is_ambiguous(&self.alpha_patterns, module)),
        ] {
            if is_ambiguous {
                let problem = format!("has two values for `{module}`");
                return Err(fields.unsupported(name, problem));
            }
        }
        Ok(())
    }

    /// Refuses a module that the file's targets do not name.
    pub(super) fn check_module(
        &self,
        fields: &ConfigFields,
        module: &str,
    ) -> Result<(), ConfigError> {
        self.check_patterns(fields, module)?;
        let Some(targets) = &self.targets else {
            return Ok(());
        };
        if targets.iter().any(|target| is_ending(target, module)) {
            return Ok(());
        }
        let problem = format!("does not name `{module}`, which has tensors");
        Err(fields.damaged("target_modules", problem))
    }

    /// Refuses targets that the model does not have, and a file that lacks tensors of one.
    pub(super) fn check_targets(
        &self,
        fields: &ConfigFields,
        folder: &TensorFolder,
        target: &AdapterTarget,
        modules: &BTreeSet<&str>,
    ) -> Result<(), CheckpointError> {
        for ending in self.targets.iter().flatten() {
            let mut refused = target.refused.iter();
            if let Some((_, reason)) = refused.find(|(module, _)| is_ending(ending, module)) {
                let problem = format!("names `{ending}`: {reason}");
                return Err(fields.unsupported("target_modules", problem).into());
            }
            let named = target.modules.keys();
            let mut named = named.filter(|module| is_ending(ending, module)).peekable();
            if named.peek().is_none() {
                let kinds = target.kinds();
                let problem = format!(
                    "names `{ending}`, which the model does not have; adapters may change {kinds}"
                );
                return Err(fields.unsupported("target_modules", problem).into());
            }
            // A module has a name in the files and one of its family: the adapter has one of them.
            let present: BTreeSet<_> = modules
                .iter()
                .map(|it| &target.modules[*it].place)
                .collect();
            let absent = named.find(|module| !present.contains(&target.modules[*module].place));
            if let Some(module) = absent
                && !self.leaves_out
            {
                let [name, _] = pair_names(module);
                folder.require(&name, || {
                    format!("target_modules names {}", last_part(module))
                })?;
            }
        }
        Ok(())
    }

    /// Refuses parameters that the model does not have, and a file that lacks tensors of one.
    pub(super) fn check_parameters(
        &self,
        fields: &ConfigFields,
        target: &AdapterTarget,
        changed: &BTreeSet<String>,
    ) -> Result<(), ConfigError> {
        let known = target.experts.iter().flat_map(|(module, experts)| {
            let place = move |stack| (experts.layer, stack);
            let parameters = experts.parameters.iter();
            parameters.map(move |of| (parameter_key(module, of), place(of.stack)))
        });
        let known: Vec<_> = known.collect();
        // A module has a name in the files and one of its family: the adapter has one of them.
        let changed = known.iter().filter(|(key, _)| changed.contains(key));
        let present: BTreeSet<_> = changed.map(|(_, place)| *place).collect();
        for ending in &self.parameters {
            let named = known.iter().filter(|(key, _)| is_ending(ending, key));
            let mut named = named.peekable();
            if named.peek().is_none() {
                let kinds = target.kinds();
                let problem = format!(
                    "names `{ending}`, which the model does not have; adapters may change {kinds}"
                );
                return Err(fields.unsupported(PARAMETERS, problem));
            }
            let absent = named.find(|(_, place)| !present.contains(place));
            if let Some((key, _)) = absent
                && !self.leaves_out
            {
                let problem = format!("names `{ending}`, and `{key}` has no tensors");
                return Err(fields.damaged(PARAMETERS, problem));
            }
        }
        Ok(())
    }
}

/// Endings of the names of parameters that the adapter changes.
fn parameters(fields: &ConfigFields) -> Result<Vec<String>, ConfigError> {
    let names = fields.texts(PARAMETERS)?.unwrap_or_default();
    Ok(names.into_iter().map(str::to_owned).collect())
}

/// The first two numbers of the release of PEFT that wrote the file.
fn release(fields: &ConfigFields) -> Result<Option<[u64; 2]>, ConfigError> {
    let version = fields.text("peft_version")?.unwrap_or_default();
    let mut numbers = version.split('.').map_while(|part| part.parse().ok());
    Ok(numbers.next().zip(numbers.next()).map(<[u64; 2]>::from))
}

/// Refuses variants of LoRA, biases, and initialisations that change the base model.
fn check_variants(fields: &ConfigFields) -> Result<(), ConfigError> {
    for (name, problem) in VARIANTS {
        let is_off = match fields.get(name) {
            None | Some(Value::Bool(false)) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(_) => false,
        };
        if !is_off {
            return Err(fields.unsupported(name, *problem));
        }
    }
    if let Some(bias) = fields.text("bias")?
        && bias != "none"
    {
        let problem = format!("is {bias}; only none is supported: merge the adapter");
        return Err(fields.unsupported("bias", problem));
    }
    const INIT: &str = "init_lora_weights";
    match fields.get(INIT) {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(init)) if PLAIN_INITS.contains(&init.as_str()) => Ok(()),
        Some(other) => {
            let problem = format!(
                "is {other}, which changes the base model; save the adapter with PEFT's \
                 path_initial_model_for_weight_conversion"
            );
            Err(fields.unsupported(INIT, problem))
        }
    }
}

/// Endings of the target modules' names; `None` for a regular expression, which may be
/// `all-linear`.
fn targets(fields: &ConfigFields) -> Result<Option<Vec<String>>, ConfigError> {
    match fields.get("target_modules") {
        Some(Value::String(_)) => Ok(None),
        Some(_) => {
            let names = fields.texts("target_modules")?.unwrap_or_default();
            Ok(Some(names.into_iter().map(str::to_owned).collect()))
        }
        // All that is changed may be parameters.
        None if fields.get(PARAMETERS).is_some() => Ok(Some(Vec::new())),
        None => Err(fields.damaged("target_modules", "is missing")),
    }
}

/// The entries of an object whose keys are endings of modules' names.
fn patterns<T>(
    fields: &ConfigFields,
    name: &str,
    read: impl Fn(&ConfigFields, &str) -> Result<T, ConfigError>,
) -> Result<Vec<(String, T)>, ConfigError> {
    let Some(object) = fields.object(name)? else {
        return Ok(Vec::new());
    };
    let keys: Vec<String> = object.names().map(str::to_owned).collect();
    let entries = keys.into_iter().map(|key| {
        let is_plain = |c: char| c.is_alphanumeric() || "._-".contains(c);
        // PEFT writes this form for parameters in which newer classes have several modules.
        let name = key.strip_prefix(r".*\.").unwrap_or(&key).to_owned();
        if !name.chars().all(is_plain) {
            let problem = "is a regular expression; only names of modules are supported";
            return Err(object.unsupported(&key, problem));
        }
        let value = read(&object, &key)?;
        Ok((name, value))
    });
    entries.collect()
}

/// Whether patterns with different values are endings of a module's name.
fn is_ambiguous<T: Copy + PartialEq>(patterns: &[(String, T)], module: &str) -> bool {
    let first = matching(patterns, module);
    let mut all = patterns
        .iter()
        .filter(|(pattern, _)| is_ending(pattern, module));
    all.any(|(_, value)| Some(*value) != first)
}

/// The value of the first pattern that is an ending of a module's name.
fn matching<T: Copy>(patterns: &[(String, T)], module: &str) -> Option<T> {
    let mut patterns = patterns.iter();
    let found = patterns.find(|(pattern, _)| is_ending(pattern, module));
    found.map(|(_, value)| *value)
}

/// Whether the last parts of a module's name are these.
fn is_ending(ending: &str, module: &str) -> bool {
    let rest = module.strip_suffix(ending);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}
