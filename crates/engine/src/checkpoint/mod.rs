//! Checkpoints: a Hugging Face folder.
//!
//! Owns: config.json, generation_config.json and the safetensors files. (The tokenizer's files are
//! the API's.)
//! Never: copies weights; tensors are views of mapped files.
//! Invariant: an open [`Checkpoint`] is complete: every tensor that the model needs is there in the
//! right shape and a known format, and there is none that it would ignore without a reason.

mod config;
mod error;
mod fields;
mod folder;
mod generation;
pub(crate) mod layout;
mod map;
mod revision;
mod rope;
mod shard;
mod tensor;

pub use config::{Architecture, Biases, ModelConfig};
pub use error::CheckpointError;
pub use generation::GenerationConfig;
pub use revision::Revision;
pub use rope::{Rope, RopeScaling, RotaryValues};
pub use tensor::{StoredTensor, StoredType};

use cleave_domain::TokenId;
use folder::Folder;
use layout::{EMBEDDING, HEAD};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A checkpoint, mapped and checked.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    generation: GenerationConfig,
    tensors: BTreeMap<String, StoredTensor>,
    tied: bool,
}

impl Checkpoint {
    /// Opens a folder: maps its files and checks everything that can be checked without reading
    /// the weights themselves.
    ///
    /// # Errors
    /// See [`CheckpointError`]; each names the file and the field or tensor.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        if !dir.is_dir() {
            let problem = "not a folder; --model takes a Hugging Face checkpoint's folder";
            return Err(CheckpointError::absent(dir, problem));
        }
        let config = ModelConfig::read(&dir.join("config.json"))?;
        let generation = GenerationConfig::read(&dir.join("generation_config.json"))?;
        let folder = Folder::open(dir)?;
        let tied = config.tied.unwrap_or_else(|| !folder.contains(HEAD));
        let mut tensors = BTreeMap::new();
        for expected in layout::expected(&config, tied) {
            let tensor = folder.tensor(&expected.name, &expected.shape)?;
            tensors.insert(expected.name, tensor);
        }
        let is_known = |name: &&str| tensors.contains_key(*name) || layout::is_harmless(name, tied);
        if let Some(extra) = folder.names().find(|name| !is_known(name)) {
            return Err(CheckpointError::unsupported(
                folder.file_of(extra),
                format!("tensor `{extra}`"),
                format!(
                    "is not part of a {} model as config.json describes it; it would be ignored, \
                     and the answers would be wrong",
                    config.architecture.name()
                ),
            ));
        }
        Ok(Self {
            dir: dir.to_owned(),
            config,
            generation,
            tensors,
            tied,
        })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The makers' sampling defaults.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// How the embedding is stored, and nearly always the other matrices with it.
    pub fn stored_type(&self) -> StoredType {
        self.embedding().stored()
    }

    /// Tokens that end a text: generation_config.json's, or else config.json's.
    pub fn eos(&self) -> &[TokenId] {
        self.generation.eos.as_ref().unwrap_or(&self.config.eos)
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<TokenId> {
        self.generation.bos.or(self.config.bos)
    }

    /// Every tensor of the model, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &StoredTensor> {
        self.tensors.values()
    }

    /// Number of weights; a tied head counts once.
    pub fn parameters_count(&self) -> u64 {
        self.tensors
            .values()
            .map(|tensor| (tensor.rows() * tensor.columns()) as u64)
            .sum()
    }

    /// Bytes that loading reads.
    pub fn bytes_total(&self) -> u64 {
        let stored: u64 = self.tensors.values().map(|t| t.bytes().len() as u64).sum();
        match self.tied {
            true => stored + self.embedding().bytes().len() as u64,
            false => stored,
        }
    }

    /// What tells these weights from others.
    pub fn revision(&self) -> Revision {
        revision::of(&self.config, &self.tensors)
    }

    /// The embedding, `(vocab, hidden)`.
    pub(crate) fn embedding(&self) -> &StoredTensor {
        self.tensor(EMBEDDING)
    }

    /// The head, `(vocab, hidden)`: its own, or the embedding.
    pub(crate) fn head(&self) -> &StoredTensor {
        self.tensor(if self.tied { EMBEDDING } else { HEAD })
    }

    /// A tensor that the configuration calls for.
    pub(crate) fn tensor(&self, name: &str) -> &StoredTensor {
        self.tensors
            .get(name)
            .expect("open() found every tensor of the layout")
    }
}
