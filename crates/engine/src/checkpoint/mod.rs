//! Checkpoints: a Hugging Face folder.
//!
//! Owns: config.json, generation_config.json and the safetensors files. (The tokenizer's files are
//! the API's.)
//! Never: copies weights; tensors are views of mapped files.
//! Invariant: an open [`Checkpoint`] is complete: every tensor that the model needs exists in the
//! right shape and a known format, and no other tensor exists but those that may be ignored.
//! Embedding, head, norms and biases are floats; projections may be quantised (see `quantization`
//! for the layouts).

mod config;
mod error;
mod fields;
mod folder;
mod generation;
pub(crate) mod layout;
mod map;
pub(crate) mod packed_numbers;
mod quantization;
mod quantized;
mod revision;
mod rope;
mod shard;
mod tensor;

pub use config::{Architecture, Biases, ModelConfig};
pub use error::CheckpointError;
pub use quantized::{ByteCodes, QuantizedTensor, QuantizedType, StoredMatrix};
pub use revision::{CheckpointStamp, Revision};
pub use rope::{Rope, RopeScaling, RotaryValues};
pub use tensor::{StoredTensor, StoredType};

use cleave_domain::TokenId;
use folder::TensorFolder;
use generation::GenerationConfig;
use layout::{EMBEDDING, HEAD};
use quantization::{ProjectionModule, Quantization};
use revision::SourceFile;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A mapped and validated checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    generation: GenerationConfig,
    tensors: BTreeMap<String, StoredTensor>,
    /// Quantised weights, by the name that they would have if they were dense.
    narrow: BTreeMap<String, Arc<QuantizedTensor>>,
    tied: bool,
    kv_scales: Option<KvScales>,
    files: Vec<SourceFile>,
    revision: OnceLock<Revision>,
}

/// Range of the calibrated scales of an fp8 KV cache, one per layer: key = stored value × scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    /// Smallest scale of all layers.
    pub min: f32,
    /// Largest scale of all layers.
    pub max: f32,
}

/// Reads the KV scales of a folder. Some writers store -1 for a layer that was not calibrated.
fn kv_scales(folder: &TensorFolder) -> Result<Option<KvScales>, CheckpointError> {
    let mut scales: Option<KvScales> = None;
    for name in folder.names() {
        if !name.ends_with(".k_scale") && !name.ends_with(".v_scale") {
            continue;
        }
        let shape = folder.find(name).expect("it has this name").shape;
        for scale in folder.tensor(name, shape)?.to_f32() {
            if scale > 0.0 {
                let KvScales {
                    min: least,
                    max: most,
                } = scales.unwrap_or(KvScales {
                    min: scale,
                    max: scale,
                });
                scales = Some(KvScales {
                    min: least.min(scale),
                    max: most.max(scale),
                });
            }
        }
    }
    Ok(scales)
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
        let generation =
            GenerationConfig::read(&dir.join("generation_config.json"), config.vocab_size)?;
        let folder = TensorFolder::open(dir)?;
        let tied = config.tied.unwrap_or_else(|| !folder.contains(HEAD));
        let (mut tensors, mut narrow) = (BTreeMap::new(), BTreeMap::new());
        for expected in layout::expected(&config, tied) {
            match quantized_weight(&config, &folder, &expected)? {
                Some(tensor) => drop(narrow.insert(expected.name, Arc::new(tensor))),
                None => {
                    let tensor = folder.tensor(&expected.name, &expected.shape)?;
                    tensors.insert(expected.name, tensor);
                }
            }
        }
        let opened = Self {
            dir: dir.to_owned(),
            config,
            generation,
            tensors,
            narrow,
            tied,
            kv_scales: kv_scales(&folder)?,
            files: folder.shards().iter().map(SourceFile::of).collect(),
            revision: OnceLock::new(),
        };
        match folder.names().find(|name| !opened.is_known(&folder, name)) {
            Some(extra) => Err(CheckpointError::unsupported(
                folder.file_of(extra),
                format!("tensor `{extra}`"),
                format!(
                    "is not part of a {} model as config.json describes it; it would be ignored, \
                     and the answers would be wrong",
                    opened.config.architecture.name()
                ),
            )),
            None => Ok(opened),
        }
    }

    /// Whether a tensor of the files is used by the model, or may be ignored.
    fn is_known(&self, folder: &TensorFolder, name: &str) -> bool {
        if self.tensors.contains_key(name)
            || self.narrow.contains_key(name)
            || layout::may_be_ignored(name, self.tied)
        {
            return true;
        }
        let Some(quantization) = &self.config.quantization else {
            return false;
        };
        let is_narrow = |module: &str| self.narrow.contains_key(&format!("{module}.weight"));
        name.rsplit_once('.').is_some_and(|(module, kind)| {
            let is_weight_part = is_narrow(module) || module.ends_with("self_attn");
            let is_known = is_weight_part && quantization.is_known(kind);
            // Some writers give every quantised module a bias, filled with zeros where the model
            // has none.
            is_known || (is_narrow(module) && kind == "bias" && folder.is_zero(name))
        })
    }

    /// Folder that contains the checkpoint.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Shape and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Element type of the embedding; nearly always also that of the other dense matrices.
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

    /// Quantisation of the projections in words: `awq int4`.
    pub fn quantization(&self) -> Option<String> {
        let method = self.config.quantization.as_ref()?.name();
        let mut names: Vec<&str> = self.narrow.values().map(|t| t.element().name()).collect();
        names.sort_unstable();
        names.dedup();
        match names.as_slice() {
            [] => None,
            [name] if *name == method => Some(method.to_owned()),
            names => Some(format!("{method} {}", names.join(" and "))),
        }
    }

    /// Range of the makers' KV scales, which the engine does not use.
    pub fn kv_scales(&self) -> Option<KvScales> {
        self.kv_scales
    }

    /// Every tensor of the model that is not quantised, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &StoredTensor> {
        self.tensors.values()
    }

    /// A weight `(out, in)`, by its name in the dense model.
    pub fn matrix(&self, name: &str) -> Option<StoredMatrix> {
        let narrow = self.narrow.get(name).cloned().map(StoredMatrix::Quantized);
        narrow.or_else(|| self.tensors.get(name).cloned().map(StoredMatrix::Dense))
    }

    /// Number of weights; a tied head counts once.
    pub fn parameters_count(&self) -> u64 {
        let dense = self.tensors.values().map(|t| (t.rows(), t.columns()));
        let narrow = self.narrow.values().map(|t| (t.rows(), t.columns()));
        let shapes = dense.chain(narrow);
        shapes.map(|(rows, columns)| (rows * columns) as u64).sum()
    }

    /// Bytes that loading reads; a tied head is read twice.
    pub fn bytes_total(&self) -> u64 {
        let dense = self.tensors.values().map(|t| t.bytes().len());
        let narrow = self.narrow.values().flat_map(|tensor| tensor.part_bytes());
        let stored: usize = dense.chain(narrow.map(<[u8]>::len)).sum();
        let stored = stored as u64;
        if self.tied {
            stored + self.embedding().bytes().len() as u64
        } else {
            stored
        }
    }

    /// Identity of the weights.
    pub fn revision(&self) -> Revision {
        *self
            .revision
            .get_or_init(|| revision::revision_of(&self.config, &self.tensors, &self.narrow))
    }

    /// Identity of the weights and of their files' state; any write to a file changes it.
    pub fn stamp(&self) -> CheckpointStamp {
        revision::stamp_of(self.revision(), &self.files)
    }

    /// The embedding, `(vocab, hidden)`.
    pub(crate) fn embedding(&self) -> &StoredTensor {
        self.tensor(EMBEDDING)
    }

    /// The head, `(vocab, hidden)`: its own, or the embedding.
    pub(crate) fn head(&self) -> &StoredTensor {
        self.tensor(if self.tied { EMBEDDING } else { HEAD })
    }

    /// A projection of a layer.
    pub(crate) fn projection(&self, layer: usize, part: &str) -> StoredMatrix {
        self.matrix(&layout::layer_tensor_name(layer, &format!("{part}.weight")))
            .expect("open() found every tensor of the layout")
    }

    /// A tensor that the configuration calls for, and that is never quantised.
    pub(crate) fn tensor(&self, name: &str) -> &StoredTensor {
        self.tensors
            .get(name)
            .expect("open() found every tensor of the layout")
    }
}

/// Reads an expected tensor if it is a projection's weight and quantised.
fn quantized_weight(
    config: &ModelConfig,
    folder: &TensorFolder,
    expected: &layout::ExpectedTensor,
) -> Result<Option<QuantizedTensor>, CheckpointError> {
    let Some(quantization) = &config.quantization else {
        return Ok(None);
    };
    if expected.name == HEAD {
        return refuse_quantized_head(quantization, folder).map(|()| None);
    }
    match (layout::module_of(&expected.name), expected.shape.as_slice()) {
        (Some(name), &[rows, columns]) => {
            let module = ProjectionModule {
                name,
                rows,
                columns,
            };
            quantization.weight(folder, module)
        }
        _ => Ok(None),
    }
}

/// Refuses a quantised head; nearly all published checkpoints keep it dense.
fn refuse_quantized_head(
    quantization: &Quantization,
    folder: &TensorFolder,
) -> Result<(), CheckpointError> {
    let module = HEAD.strip_suffix(".weight").unwrap_or(HEAD);
    let is_part = |name: &&str| {
        let kind = name.strip_prefix(module).and_then(|n| n.strip_prefix('.'));
        kind.is_some_and(|kind| quantization.is_known(kind))
    };
    match folder.names().find(is_part) {
        None => Ok(()),
        Some(name) => Err(CheckpointError::unsupported(
            folder.file_of(name),
            format!("tensor `{name}`"),
            "a quantised lm_head is not supported; one in BF16, F16 or F32 is",
        )),
    }
}
