//! Engines that compute nothing and take the time of devices that are not present.
//!
//! Owns: the source of a profile, and a replacement for the model folder. Never: invents a price:
//! profiles are the simulator's, or the user's own in the same format. Invariant: an invalid
//! profile or script is one error that names it, before a port is bound.

use crate::args::{EngineArgs, MockArgs, ModelArgs};
use crate::demo;
use crate::mock_script::MockScript;
use crate::model::check_max_model_len;
use crate::task::model_task;
use anyhow::{Context, anyhow};
use cleave_domain::{Capacity, Fingerprint, Prices, Role};
use cleave_engine::{Engine, EngineDescription, MOCK_HIDDEN, MockEngine};
use cleave_sim::goodput::WorkerProfile;
use cleave_text::{ModelFiles, ModelText};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

pub(crate) const PROFILE: &str = "h100-llama-3-8b";

/// A mock model: a profile with the text side of a checkpoint.
pub(crate) struct MockModel {
    profile: WorkerProfile,
    /// Capacity of the profile, with this mock's block size and context.
    capacity: Capacity,
    files: ModelFiles,
    vocab_size: u32,
    script: Option<Arc<MockScript>>,
}

impl MockModel {
    /// Reads the profile, the script, and the text side of the given folder or of the bundled
    /// checkpoint.
    ///
    /// # Errors
    /// One that names the file and the defect.
    pub(crate) fn open(args: &MockArgs, model: &ModelArgs) -> anyhow::Result<Self> {
        let profile = profile(&args.mock_profile)?;
        let mut capacity = profile.device(0, Role::Both).limits.capacity;
        let folder = model.folder()?;
        let mut files = match folder {
            Some(folder) => ModelFiles::read(folder)?,
            None => demo::files(),
        };
        files.config = with_context(&files.config, capacity.context_tokens_max)?;
        check_max_model_len(model.form.max_model_len, capacity.context_tokens_max)?;
        files.context_tokens_max = model.form.max_model_len;
        files.task = model_task(&model.form, folder)?;
        if let Some(name) = model.given_name() {
            files.name = name;
        }
        let text = ModelText::new(files.clone())?;
        capacity.context_tokens_max = text.context_tokens_max();
        capacity.block_bytes = args.mock_block_bytes;
        let vocab_size = text.vocabulary_count();
        let script = args.mock_script.as_deref();
        let script = script
            .map(|path| MockScript::open(path, text))
            .transpose()?;
        Ok(Self {
            vocab_size,
            profile,
            capacity,
            files,
            script: script.map(Arc::new),
        })
    }

    pub(crate) fn into_files(self) -> ModelFiles {
        self.files
    }

    pub(crate) fn served_name(&self) -> &str {
        &self.files.name
    }

    pub(crate) fn title(&self) -> String {
        format!("{} (mock of {})", self.files.name, self.profile.name)
    }

    pub(crate) fn context_tokens_max(&self) -> u32 {
        self.capacity.context_tokens_max
    }

    /// Prices of a worker with these legs.
    pub(crate) fn prices(&self, role: Role) -> Prices {
        self.profile.prices(role)
    }

    /// Creates an engine. Flags take precedence over the profile.
    ///
    /// # Errors
    /// If there is no memory for its blocks.
    pub(crate) fn engine(&self, args: &EngineArgs) -> anyhow::Result<Box<dyn Engine>> {
        let its = &self.capacity;
        let block_tokens = args.block_size.unwrap_or(its.block_tokens);
        let blocks = match args.kv_cache {
            Some(bytes) => bytes / u64::from(its.block_bytes),
            None => {
                let tokens = u64::from(its.blocks_count) * u64::from(its.block_tokens);
                tokens / u64::from(block_tokens)
            }
        };
        let step_tokens_max = args.max_num_batched_tokens;
        let capacity = Capacity {
            block_tokens,
            blocks_count: u32::try_from(blocks.max(1)).unwrap_or(u32::MAX),
            slots_count: args.max_num_seqs.unwrap_or(its.slots_count),
            step_tokens_max: step_tokens_max.unwrap_or(its.step_tokens_max),
            ..*its
        };
        let (bytes, vocab) = (capacity.block_bytes, self.vocab_size);
        // Workers with different scripts do not continue each other's answers.
        let script = self.script.as_ref();
        let digest = script.map(|script| format!(" script {}", script.digest()));
        let digest = digest.unwrap_or_default();
        let engine = MockEngine::new(EngineDescription {
            model: "mock".to_owned(),
            device: format!("mock of {}", self.profile.about),
            device_id: None,
            fingerprint: Fingerprint(format!("mock {vocab} {block_tokens}x{bytes}{digest}")),
            capacity,
            vocab_size: vocab,
        })?;
        Ok(match script {
            Some(script) => Box::new(engine.scripted(Arc::<MockScript>::clone(script))),
            None => Box::new(engine),
        })
    }
}

/// Limit of a profile file, far above any measured profile.
const PROFILE_BYTES_MAX: u64 = 16 << 20;

/// Reads a profile by name, or from a file.
fn profile(name: &str) -> anyhow::Result<WorkerProfile> {
    if !Path::new(name).exists() {
        let named = WorkerProfile::named(name);
        return named.map_err(|error| anyhow!("--mock-profile {name}: no such file, and {error}"));
    }
    let text = cleave_files::read_text(Path::new(name), PROFILE_BYTES_MAX)
        .with_context(|| format!("--mock-profile {name}"))?;
    let profile: WorkerProfile =
        serde_json::from_str(&text).with_context(|| format!("--mock-profile {name}"))?;
    let rows = profile.prices(Role::Both).rows;
    if !rows.is_empty() && rows.is_sorted_by(|a, b| a.rows < b.rows) {
        Ok(profile)
    } else {
        Err(anyhow!(
            "--mock-profile {name}: rows must name at least one number of rows, each once, in \
             ascending order"
        ))
    }
}

/// Sets the context length of a configuration to the profile's; any tokenizer will do.
fn with_context(config: &str, tokens: u32) -> anyhow::Result<String> {
    let mut config: Value = serde_json::from_str(config).context("config.json")?;
    let text = match config.get("text_config") {
        Some(Value::Object(_)) => &mut config["text_config"],
        _ => &mut config,
    };
    text["max_position_embeddings"] = tokens.into();
    text["hidden_size"] = MOCK_HIDDEN.into();
    text["rope_scaling"] = Value::Null;
    text["rope_parameters"] = Value::Null;
    Ok(config.to_string())
}
