//! A LoRA adapter in PEFT's format: a folder with adapter_config.json and
//! adapter_model.safetensors.
//!
//! Owns: the match between an adapter's tensors and the projections of its model, and the identity
//! of an adapter.
//! Never: reads a weight, but for its digest; decides where an adapter is loaded.
//! Invariant: an open adapter changes known projections alone, each by a pair of matrices of the
//! right shapes; anything else in the folder refuses it.

mod config;

use crate::checkpoint::Checkpoint;
use crate::config_file;
use crate::error::CheckpointError;
use crate::folder::TensorFolder;
use crate::tensor::StoredTensor;
use cleave_domain::AdapterId;
pub use cleave_models::ADAPTED_STACKS;
use cleave_models::{Projection, TensorPlace, TensorRole};
use config::AdapterConfig;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// The reason why an adapter of experts' matrices is refused.
const EXPERTS_REFUSED: &str = "an adapter of experts is not supported; merge it into the model";
/// The class that PEFT wraps around a model, and its attribute that has the model.
const WRAPPER: &str = "base_model.model.";

/// The projections of a model that adapters can change, by the names of their modules.
#[derive(Clone, Debug)]
pub struct AdapterTarget {
    /// Projections by the name of their module: `model.layers.0.self_attn.q_proj`.
    modules: BTreeMap<String, TargetModule>,
    /// Modules of the model that adapters cannot change here, with the reason.
    refused: BTreeMap<String, &'static str>,
}

/// A module of a model whose output an adapter may change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TargetModule {
    place: AdapterPlaceInModel,
    rows: usize,
    columns: usize,
}

/// The rows of a stack that a module computes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct AdapterPlaceInModel {
    layer: usize,
    stack: &'static [Projection],
    /// First row of the module in the stack.
    first_row: usize,
}

/// A mapped and validated adapter.
#[derive(Debug)]
pub struct Adapter {
    dir: PathBuf,
    id: AdapterId,
    rank_max: usize,
    parts: BTreeMap<AdapterPlaceInModel, AdapterPart>,
}

/// The change of one module's output: `scale · b · (a · x)`.
#[derive(Clone, Debug)]
pub struct AdapterPart {
    /// First row of the module in its stack.
    pub first_row: usize,
    /// From the module's input to the rank, `(rank, in)`; PEFT's `lora_A`.
    pub a: StoredTensor,
    /// From the rank to the module's output, `(out, rank)`; PEFT's `lora_B`.
    pub b: StoredTensor,
    /// Factor of the product.
    pub scale: f32,
}

impl AdapterTarget {
    /// The modules of an open checkpoint, by the names in its files and by those of its family: an
    /// adapter is trained on the class that its maker loaded.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let mut target = Self {
            modules: BTreeMap::new(),
            refused: BTreeMap::new(),
        };
        for (tensor, family_name) in checkpoint.named_tensors() {
            let names = [tensor.name.as_str(), family_name.as_str()];
            let modules = names.iter().filter_map(|name| name.strip_suffix(".weight"));
            let modules: BTreeSet<&str> = modules.collect();
            for module in modules {
                target.add(module, tensor.role, tensor.place, &tensor.shape, checkpoint);
            }
        }
        target
    }

    fn add(
        &mut self,
        module: &str,
        role: TensorRole,
        place: TensorPlace,
        shape: &[usize],
        checkpoint: &Checkpoint,
    ) {
        let refuse = |reason| (module.to_owned(), reason);
        let parts: &[Projection] = match &role {
            TensorRole::Weight(part) => std::slice::from_ref(part),
            TensorRole::Stack(parts) => parts,
            TensorRole::Embedding | TensorRole::Head => {
                const REASON: &str = "an adapter of the embedding or the head is not supported";
                return self.refused.extend([refuse(REASON)]);
            }
            TensorRole::Router | TensorRole::SharedExpertGate | TensorRole::Experts { .. } => {
                const REASON: &str = "an adapter of experts or of their router is not supported; merge it into the model";
                return self.refused.extend([refuse(REASON)]);
            }
            _ => return,
        };
        let (TensorPlace::Layer(layer), &[rows, columns]) = (place, shape) else {
            return self.refused.extend([refuse(EXPERTS_REFUSED)]);
        };
        let spec = &checkpoint.spec().layers[layer];
        let stack = spec
            .stacks()
            .into_iter()
            .find(|stack| stack.contains(&parts[0]));
        let stack = stack.filter(|stack| ADAPTED_STACKS.contains(stack));
        let Some(stack) = stack else {
            const REASON: &str = "an adapter of the shared expert is not supported";
            return self.refused.extend([refuse(REASON)]);
        };
        let hidden = checkpoint.spec().hidden_size;
        let before = stack.iter().take_while(|part| **part != parts[0]);
        let place = AdapterPlaceInModel {
            layer,
            stack,
            first_row: before.map(|part| spec.rows_of(*part, hidden)).sum(),
        };
        let target = TargetModule {
            place,
            rows,
            columns,
        };
        self.modules.insert(module.to_owned(), target);
    }

    /// Names of the modules that adapters may change, each by its last part, for messages.
    fn kinds(&self) -> String {
        let kinds = self.modules.keys().map(|module| last_part(module));
        let kinds: BTreeSet<&str> = kinds.collect();
        kinds.into_iter().collect::<Vec<_>>().join(", ")
    }

    /// Why a module cannot be changed; `None` if it can.
    fn refusal(&self, module: &str) -> Option<String> {
        if self.modules.contains_key(module) {
            return None;
        }
        // An adapter has a module for each expert, or one for all, whatever the checkpoint has.
        let is_of_experts = module.split('.').any(|part| part == "experts");
        Some(match self.refused.get(module) {
            Some(reason) => (*reason).to_owned(),
            None if is_of_experts => EXPERTS_REFUSED.to_owned(),
            None => format!(
                "the model has no such module; adapters may change {}",
                self.kinds()
            ),
        })
    }
}

fn last_part(module: &str) -> &str {
    module.rsplit_once('.').map_or(module, |(_, last)| last)
}

impl Adapter {
    /// Opens a folder: maps its tensors, checks all that it has, and reads them for its identity.
    /// Ranks above `rank_max` are refused.
    ///
    /// # Errors
    /// See [`CheckpointError`]; each names the file and the field or tensor.
    pub fn open(
        dir: &Path,
        target: &AdapterTarget,
        rank_max: usize,
    ) -> Result<Self, CheckpointError> {
        if !dir.is_dir() {
            let problem = "not a folder; an adapter is a folder as PEFT writes it";
            return Err(CheckpointError::absent(dir, problem));
        }
        let fields = config_file::read(&dir.join(CONFIG))?;
        let fields = fields.ok_or_else(|| {
            let problem = format!("has no {CONFIG}; an adapter is a folder as PEFT writes it");
            CheckpointError::absent(dir, problem)
        })?;
        let config = AdapterConfig::read(&fields)?;
        let folder = open_tensors(dir)?;
        let mut parts = BTreeMap::new();
        let mut modules = BTreeSet::new();
        for name in folder.names() {
            let module = module_of(&folder, name, target)?;
            if !modules.insert(module) {
                continue;
            }
            config.check_module(&fields, module)?;
            let at = &target.modules[module];
            let part = part(&folder, module, at, &config, rank_max)?;
            if parts.insert(at.place.clone(), part).is_some() {
                let problem = "the adapter changes this module under two names";
                return Err(CheckpointError::tensor(folder.file_of(name), name, problem));
            }
        }
        config.check_targets(&fields, &folder, target, &modules)?;
        Ok(Self {
            dir: dir.to_owned(),
            id: digest(&parts),
            rank_max: parts.values().map(|part| part.a.rows()).max().unwrap_or(0),
            parts,
        })
    }

    /// Folder that contains the adapter.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Identity of the adapter's content.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// Identity of the content as the files have it now: they may have been written to since.
    pub fn id_now(&self) -> AdapterId {
        digest(&self.parts)
    }

    /// The largest rank of its matrices.
    pub fn rank_max(&self) -> usize {
        self.rank_max
    }

    /// The changes of a layer's stack, in the order of their rows.
    pub fn stack(
        &self,
        layer: usize,
        stack: &'static [Projection],
    ) -> impl Iterator<Item = &AdapterPart> {
        let parts = self.parts.iter();
        parts
            .filter(move |(place, _)| place.layer == layer && place.stack == stack)
            .map(|(_, part)| part)
    }

    /// A copy of its tensors in memory, which no write to the files changes. The identity is that
    /// of the copy.
    pub fn in_memory(&self) -> Self {
        let copied = self.parts.iter().map(|(place, part)| {
            let part = AdapterPart {
                a: part.a.in_memory(),
                b: part.b.in_memory(),
                ..part.clone()
            };
            (place.clone(), part)
        });
        let parts = copied.collect();
        self.release();
        Self {
            dir: self.dir.clone(),
            id: digest(&parts),
            rank_max: self.rank_max,
            parts,
        }
    }

    /// Releases the mapped pages from this process's memory.
    pub fn release(&self) {
        for part in self.parts.values() {
            part.a.release();
            part.b.release();
        }
    }
}

/// Opens the adapter's tensors; names PyTorch's file if that is there instead.
fn open_tensors(dir: &Path) -> Result<TensorFolder, CheckpointError> {
    let file = dir.join(TENSORS);
    if file.exists() {
        return TensorFolder::single(&file);
    }
    let problem = if dir.join("adapter_model.bin").exists() {
        format!("has adapter_model.bin but no {TENSORS}; save the adapter as safetensors")
    } else {
        format!("has no {TENSORS}; download the adapter's weights")
    };
    Err(CheckpointError::absent(dir, problem))
}

/// The module that a tensor of the adapter belongs to.
fn module_of<'a>(
    folder: &TensorFolder,
    name: &'a str,
    target: &AdapterTarget,
) -> Result<&'a str, CheckpointError> {
    let refuse = |problem: String| {
        let file = folder.file_of(name);
        CheckpointError::unsupported(file, format!("tensor `{name}`"), problem)
    };
    let module = name.strip_prefix(WRAPPER).ok_or_else(|| {
        refuse(format!(
            "does not begin with `{WRAPPER}`, as PEFT names the tensors of adapters"
        ))
    })?;
    for (ending, problem) in [
        (
            ".lora_magnitude_vector",
            "belongs to DoRA, which is not supported",
        ),
        (
            ".lora_B.bias",
            "is a bias of LoRA's second matrix, which is not supported",
        ),
        (
            ".lora_embedding_A",
            "changes the embedding, which is not supported",
        ),
        (
            ".lora_embedding_B",
            "changes the embedding, which is not supported",
        ),
    ] {
        if module.ends_with(ending) {
            return Err(refuse(problem.to_owned()));
        }
    }
    let endings = [".lora_A.weight", ".lora_B.weight"];
    let found = endings.iter().find_map(|end| module.strip_suffix(end));
    let module = found.ok_or_else(|| {
        refuse("is no matrix of a LoRA pair; it would be ignored, and the answers be wrong".into())
    })?;
    match target.refusal(module) {
        None => Ok(module),
        Some(reason) => Err(refuse(reason)),
    }
}

/// The pair of matrices of a module.
fn part(
    folder: &TensorFolder,
    module: &str,
    at: &TargetModule,
    config: &AdapterConfig,
    rank_max: usize,
) -> Result<AdapterPart, CheckpointError> {
    let rank = config.rank(module);
    let names = ["A", "B"].map(|letter| format!("{WRAPPER}{module}.lora_{letter}.weight"));
    if rank > rank_max {
        let problem = format!(
            "rank {rank}, and the limit is {rank_max}; raise --max-lora-rank to serve this adapter"
        );
        let place = format!("tensor `{}`", names[0]);
        return Err(CheckpointError::unsupported(
            folder.file_of(&names[0]),
            place,
            problem,
        ));
    }
    let tensor = |name: &str, shape: [usize; 2]| {
        let reason = || format!("{CONFIG} and the model call for it, shape {shape:?}");
        let found = folder.require(name, reason)?;
        if found.shape != shape {
            let problem = format!(
                "shape {:?}; the rank of {CONFIG} and the model call for {shape:?}; the adapter may be one of \
                 another model",
                found.shape
            );
            let place = format!("tensor `{name}`");
            return Err(CheckpointError::unsupported(
                folder.file_of(name),
                place,
                problem,
            ));
        }
        folder.tensor(name, &shape)
    };
    Ok(AdapterPart {
        first_row: at.place.first_row,
        a: tensor(&names[0], [rank, at.columns])?,
        b: tensor(&names[1], [at.rows, rank])?,
        scale: config.scale(module),
    })
}

/// Digest of all that decides the change of a model: places, shapes, types, bytes and scales.
fn digest(parts: &BTreeMap<AdapterPlaceInModel, AdapterPart>) -> AdapterId {
    let mut hash = blake3::Hasher::new();
    hash.update(b"cleave adapter 1\n");
    for (place, part) in parts {
        let AdapterPlaceInModel {
            layer,
            stack,
            first_row,
        } = place;
        let AdapterPart { a, b, scale, .. } = part;
        hash.update(format!("{layer} {stack:?} {first_row} {:08x}\n", scale.to_bits()).as_bytes());
        for tensor in [a, b] {
            let (rows, columns) = (tensor.rows(), tensor.columns());
            hash.update(format!("{:?} {rows}x{columns}\n", tensor.stored()).as_bytes());
            hash.update(tensor.bytes());
        }
    }
    let mut id = AdapterId::default();
    id.0.copy_from_slice(&hash.finalize().as_bytes()[..16]);
    id
}
