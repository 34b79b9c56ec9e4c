//! Workers from parts: hardware and a model by name or by file.
//!
//! Owns: the choice between a name and a file. Never: reads a weight, or measures. Invariant: a
//! path that exists is the path, whatever name it has.

use crate::args::{PartsArgs, PlacementArgs};
use anyhow::{Context, anyhow};
use cleave_models::{ConfigError, ConfigFields, ModelParts, read_model};
use cleave_planner::parts::{Hardware, StepLimits, WorkerSetup};
use cleave_sim::goodput::WorkerProfile;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Limit of a file with a description, far above any real one.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Reads the profile of the worker that the flags describe; `None` if they describe none.
///
/// # Errors
/// If a name is unknown, a file is wrong, or the devices cannot hold the model.
pub(crate) fn profile(args: &PartsArgs) -> anyhow::Result<Option<WorkerProfile>> {
    let (Some(hardware), Some(model)) = (&args.hardware, &args.model) else {
        return Ok(None);
    };
    let parts = worker(hardware, model, &args.placement)?;
    let profile = WorkerProfile::from_parts(&parts);
    profile.map(Some).map_err(anyhow::Error::msg)
}

/// The profile that the flags describe, or else the named one of the table.
///
/// # Errors
/// As [`profile`], or if the name is unknown.
pub(crate) fn profile_or(args: &PartsArgs, name: &str) -> anyhow::Result<WorkerProfile> {
    match profile(args)? {
        Some(profile) => Ok(profile),
        None => WorkerProfile::named(name).map_err(anyhow::Error::msg),
    }
}

/// Puts a worker together.
///
/// # Errors
/// If a name is unknown or a file is wrong.
pub(crate) fn worker(
    hardware_name: &str,
    model_name: &str,
    placement: &PlacementArgs,
) -> anyhow::Result<WorkerSetup> {
    let PlacementArgs {
        quantization,
        expert_quantization,
        kv_cache_dtype,
        tensor_parallel_size,
        pipeline_parallel_size,
        max_num_batched_tokens,
        max_num_seqs,
        gpu_memory_utilization,
    } = placement;
    Ok(WorkerSetup {
        hardware: hardware(hardware_name)?,
        model: model(model_name)?,
        weights: *quantization,
        expert_weights: expert_quantization.unwrap_or(*quantization),
        kv: *kv_cache_dtype,
        tensor_parallel: *tensor_parallel_size,
        pipeline_parallel: *pipeline_parallel_size,
        limits: StepLimits {
            step_tokens_max: *max_num_batched_tokens,
            sequences_max: *max_num_seqs,
            memory_share: *gpu_memory_utilization,
        },
    })
}

/// Reads hardware from a file, or else takes it from the catalogue.
pub(crate) fn hardware(name: &str) -> anyhow::Result<Hardware> {
    let path = Path::new(name);
    let found = if path.exists() {
        let text = cleave_files::read_text(path, FILE_BYTES_MAX);
        Hardware::parse(&text.with_context(|| format!("--hardware {name}"))?)
    } else {
        Hardware::named(name)
    };
    found.map_err(|error| anyhow!("--hardware {name}: {error}"))
}

/// Reads the sums of a model from a config.json, or else takes them from the published ones.
pub(crate) fn model(name: &str) -> anyhow::Result<ModelParts> {
    let path = Path::new(name);
    if !path.exists() {
        let published = ModelParts::published(name);
        return published.map_err(|error| anyhow!("--model {name}: no such file, and {error}"));
    }
    let (file, title) = if path.is_dir() {
        (path.join("config.json"), path.to_owned())
    } else {
        // A config.json has the name of its folder.
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        (
            path.to_owned(),
            folder.map_or_else(PathBuf::new, Path::to_owned),
        )
    };
    let title = title.file_name().map(|name| name.to_string_lossy());
    let title = title.map_or_else(|| "config".to_owned(), |name| word(&name));
    let text = cleave_files::read_text(&file, FILE_BYTES_MAX);
    let text = text.with_context(|| format!("--model {name}"))?;
    let config: Map<String, Value> =
        serde_json::from_str(&text).with_context(|| file.display().to_string())?;
    read_parts(&file, config, &title).with_context(|| format!("--model {name}"))
}

/// The formats of stored weights are flags here, whatever the file has.
fn read_parts(
    file: &Path,
    mut config: Map<String, Value>,
    title: &str,
) -> anyhow::Result<ModelParts> {
    config.remove("quantization_config");
    config.remove("dtype");
    config.insert("torch_dtype".to_owned(), json!("bfloat16"));
    let fields = ConfigFields::new(file, config);
    let (model, ()) = read_model(&fields, |_| Ok::<_, ConfigError>(()))?;
    Ok(model.spec.parts(title))
}

/// A name that can stand in the text of a fleet.
fn word(name: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    name.chars()
        .map(|c| if allowed(c) { c } else { '-' })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_model_is_a_published_name_a_file_or_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("My Model");
        fs::create_dir(&model).unwrap();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
            "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128_256, "max_position_embeddings": 131_072, "dtype": "float16",
            "tie_word_embeddings": false, "quantization_config": {"quant_method": "fp8"}
        });
        let file = model.join("config.json");
        fs::write(&file, config.to_string()).unwrap();
        let published = super::model("llama-3.1-8b").unwrap();
        for path in [&model, &file] {
            let read = super::model(path.to_str().unwrap()).unwrap();
            assert_eq!(read.name, "My-Model");
            assert_eq!(
                ModelParts {
                    name: published.name.clone(),
                    ..read
                },
                published
            );
        }
        let error = format!("{:#}", super::model("abacus").unwrap_err());
        assert!(
            error.contains("no such file") && error.contains("opt-13b"),
            "{error}"
        );
    }

    #[test]
    fn hardware_is_a_name_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("mine.json");
        let mut device = hardware("h100").unwrap();
        device.name = "mine".to_owned();
        fs::write(&file, serde_json::to_string(&device).unwrap()).unwrap();
        assert_eq!(hardware(file.to_str().unwrap()).unwrap(), device);
        fs::write(&file, "{}").unwrap();
        let error = format!("{:#}", hardware(file.to_str().unwrap()).unwrap_err());
        assert!(
            error.contains("mine.json") && error.contains("version"),
            "{error}"
        );
    }
}
