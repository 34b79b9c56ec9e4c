//! A LoRA adapter in PEFT's format: a folder with adapter_config.json and
//! adapter_model.safetensors.
//!
//! Owns: the match between an adapter's tensors and the projections of its model, and the identity
//! of an adapter.
//! Never: reads a weight, but for its digest; decides where an adapter is loaded.
//! Invariant: an open adapter changes known projections alone, each by a pair of matrices of the
//! right shapes; anything else in the folder refuses it.

mod config;
mod experts;
mod file;
mod target;

use crate::config_file;
use crate::error::CheckpointError;
use crate::folder::TensorFolder;
use crate::map::FileBytes;
use crate::tensor::{StoredTensor, TensorLayout};
use cleave_domain::AdapterId;
pub use cleave_models::ADAPTED_STACKS;
use cleave_models::{ConfigFields, Projection, StackedRows, TensorPlace};
use config::AdapterConfig;
pub use file::AdapterFile;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
pub use target::AdapterTarget;
use target::{AdapterPlaceInModel, TargetModule};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// The class that PEFT wraps around a model, and its attribute that has the model.
const WRAPPER: &str = "base_model.model.";

/// The changes of an adapter, in memory.
#[derive(Debug)]
pub struct Adapter {
    dir: PathBuf,
    id: AdapterId,
    rank_max: usize,
    parts: BTreeMap<AdapterPlaceInModel, AdapterPart>,
}

/// The change of one module's output: `scale · b · (a · x)`.
#[derive(Clone, Debug)]
pub struct AdapterPart<T = StoredTensor> {
    /// First row of the module in its stack.
    pub first_row: usize,
    /// From the module's input to the rank, `(rank, in)`; PEFT's `lora_A`.
    pub a: T,
    /// From the rank to the module's output, `(out, rank)`; PEFT's `lora_B`.
    b: T,
    /// Columns of `b` that are this part's, `rank` of them.
    columns: ColumnSteps,
    /// Order of the rows of `b`, where the module is a stack of two.
    order: StackedRows,
    /// Factor of the product.
    pub scale: f32,
}

/// Columns of a matrix at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ColumnSteps {
    first: usize,
    step: usize,
}

impl ColumnSteps {
    const ALL: Self = Self { first: 0, step: 1 };
}

impl AdapterPart {
    /// Rows of the second matrix.
    pub fn rows(&self) -> usize {
        self.b.rows()
    }

    /// The second matrix's row of this number in the order of the stack, `(rank)`, times the scale.
    pub fn read_expand_row(&self, row: usize, out: &mut [f32]) {
        let half = self.b.rows() / 2;
        let stored = match self.order {
            StackedRows::Consecutive => row,
            StackedRows::Interleaved => 2 * (row % half) + row / half,
        };
        let ColumnSteps { first, step } = self.columns;
        self.b.read_columns(stored, first, step, out);
        out.iter_mut().for_each(|value| *value *= self.scale);
    }

    fn layout(&self) -> AdapterPart<TensorLayout> {
        AdapterPart {
            first_row: self.first_row,
            a: self.a.layout(),
            b: self.b.layout(),
            columns: self.columns,
            order: self.order,
            scale: self.scale,
        }
    }
}

impl AdapterPart<TensorLayout> {
    /// The part with the bytes of its file; `None` if they end before it does.
    fn of_file(&self, bytes: &Arc<FileBytes>) -> Option<AdapterPart> {
        Some(AdapterPart {
            first_row: self.first_row,
            a: self.a.of_file(bytes)?,
            b: self.b.of_file(bytes)?,
            columns: self.columns,
            order: self.order,
            scale: self.scale,
        })
    }
}

fn last_part(module: &str) -> &str {
    module.rsplit_once('.').map_or(module, |(_, last)| last)
}

impl Adapter {
    /// Opens a folder: reads its tensors, checks all that it has, and computes its identity.
    /// Ranks above `rank_max` are refused.
    ///
    /// # Errors
    /// See [`CheckpointError`]; each names the file and the field or tensor.
    pub fn open(
        dir: &Path,
        target: &AdapterTarget,
        rank_max: usize,
    ) -> Result<Self, CheckpointError> {
        let (_, adapter) = AdapterFile::open(dir, target, rank_max)?;
        Ok(adapter)
    }

    fn of(dir: &Path, parts: BTreeMap<AdapterPlaceInModel, AdapterPart>) -> Self {
        Self {
            dir: dir.to_owned(),
            id: digest(&parts),
            rank_max: parts.values().map(|part| part.a.rows()).max().unwrap_or(0),
            parts,
        }
    }

    /// Folder that contains the adapter.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Identity of the adapter's content.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// The largest rank of its matrices.
    pub fn rank_max(&self) -> usize {
        self.rank_max
    }

    /// The changes of a stack of a layer or of an expert, in the order of their rows.
    pub fn stack(
        &self,
        place: TensorPlace,
        stack: &'static [Projection],
    ) -> impl Iterator<Item = &AdapterPart> {
        let first = |first_row| AdapterPlaceInModel {
            place,
            stack,
            first_row,
        };
        let parts = self.parts.range(first(0)..=first(usize::MAX));
        parts.map(|(_, part)| part)
    }

    /// Whether it changes any expert.
    pub fn changes_experts(&self) -> bool {
        let mut places = self.parts.keys();
        places.any(|part| matches!(part.place, TensorPlace::Expert { .. }))
    }
}

/// Reads the adapter's configuration.
fn read_config(dir: &Path) -> Result<ConfigFields, CheckpointError> {
    if !dir.is_dir() {
        let problem = "not a folder; an adapter is a folder as PEFT writes it";
        return Err(CheckpointError::absent(dir, problem));
    }
    let fields = config_file::read(&dir.join(CONFIG))?;
    fields.ok_or_else(|| {
        let problem = format!("has no {CONFIG}; an adapter is a folder as PEFT writes it");
        CheckpointError::absent(dir, problem)
    })
}

/// The file of the adapter's tensors; an error names PyTorch's if that is there instead.
fn tensors_file(dir: &Path) -> Result<PathBuf, CheckpointError> {
    let file = dir.join(TENSORS);
    if file.exists() {
        return Ok(file);
    }
    let problem = if dir.join("adapter_model.bin").exists() {
        format!("has adapter_model.bin but no {TENSORS}; save the adapter as safetensors")
    } else {
        format!("has no {TENSORS}; download the adapter's weights")
    };
    Err(CheckpointError::absent(dir, problem))
}

/// The pairs of an adapter whose file has these bytes, each with its place; anything else in the
/// file refuses it.
fn read_parts(
    fields: &ConfigFields,
    file: &Path,
    bytes: Vec<u8>,
    target: &AdapterTarget,
    rank_max: usize,
) -> Result<BTreeMap<AdapterPlaceInModel, AdapterPart>, CheckpointError> {
    let config = AdapterConfig::read(fields)?;
    let source = AdapterSource {
        fields,
        folder: TensorFolder::in_memory(file, bytes)?,
        config: &config,
        target,
        rank_max,
    };
    let mut parts = BTreeMap::new();
    let (mut modules, mut parameters) = (BTreeSet::new(), BTreeSet::new());
    for name in source.folder.names() {
        let module = source.module_of(name)?;
        let found = match source.experts_of(module)? {
            None if modules.insert(module) => {
                config.check_module(fields, module)?;
                let at = &target.modules[module];
                vec![(at.place.clone(), source.part(module, at)?)]
            }
            Some(experts) if parameters.insert(experts.key()) => {
                source.parts_of_experts(module, &experts)?
            }
            // The other tensor of a pair.
            _ => continue,
        };
        for (place, part) in found {
            if parts.insert(place, part).is_some() {
                let problem = "the adapter changes this module under two names";
                let file = source.folder.file_of(name);
                return Err(CheckpointError::tensor(file, name, problem));
            }
        }
    }
    if parts.is_empty() {
        let problem = "has no tensor; an adapter changes at least one module";
        return Err(fields.damaged("target_modules", problem).into());
    }
    config.check_targets(fields, &source.folder, target, &modules)?;
    config.check_parameters(fields, target, &parameters)?;
    Ok(parts)
}

/// The files of an adapter, and the model that it must fit.
struct AdapterSource<'a> {
    fields: &'a ConfigFields,
    folder: TensorFolder,
    config: &'a AdapterConfig,
    target: &'a AdapterTarget,
    rank_max: usize,
}

impl AdapterSource<'_> {
    /// The module that a tensor of the adapter belongs to.
    fn module_of<'n>(&self, name: &'n str) -> Result<&'n str, CheckpointError> {
        let refuse = |problem: String| {
            let file = self.folder.file_of(name);
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
            refuse(
                "is no matrix of a LoRA pair; it would be ignored, and the answers be wrong".into(),
            )
        })?;
        if self
            .target
            .experts
            .contains_key(experts::without_layers(module))
        {
            return Ok(module);
        }
        match self.target.refusal(module) {
            None => Ok(module),
            Some(reason) => Err(refuse(reason)),
        }
    }

    /// The pair of matrices of a module.
    fn part(&self, module: &str, at: &TargetModule) -> Result<AdapterPart, CheckpointError> {
        let rank = self.config.rank(module);
        let [a, b] = self.pair(module, rank, [[rank, at.columns], [at.rows, rank]])?;
        Ok(AdapterPart {
            first_row: at.place.first_row,
            a,
            b,
            columns: ColumnSteps::ALL,
            order: StackedRows::Consecutive,
            scale: self.config.scale(module),
        })
    }

    /// Both tensors of a module, in these shapes.
    fn pair(
        &self,
        module: &str,
        rank: usize,
        shapes: [[usize; 2]; 2],
    ) -> Result<[StoredTensor; 2], CheckpointError> {
        let (folder, rank_max) = (&self.folder, self.rank_max);
        let names = pair_names(module);
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
        Ok([tensor(&names[0], shapes[0])?, tensor(&names[1], shapes[1])?])
    }
}

/// Names of both tensors of a module.
fn pair_names(module: &str) -> [String; 2] {
    ["A", "B"].map(|letter| format!("{WRAPPER}{module}.lora_{letter}.weight"))
}

/// Digest of all that decides the change of a model: places, shapes, types, bytes and scales.
fn digest(parts: &BTreeMap<AdapterPlaceInModel, AdapterPart>) -> AdapterId {
    let mut hash = blake3::Hasher::new();
    hash.update(b"cleave adapter 1\n");
    for (place, part) in parts {
        let AdapterPlaceInModel {
            place,
            stack,
            first_row,
        } = place;
        let AdapterPart {
            a,
            b,
            columns,
            order,
            scale,
            ..
        } = part;
        let place = match place {
            TensorPlace::Model => String::new(),
            TensorPlace::Layer(layer) => layer.to_string(),
            TensorPlace::Expert { layer, expert } => format!("{layer}.{expert} {order:?}"),
        };
        hash.update(format!("{place} {stack:?} {first_row} {:08x}\n", scale.to_bits()).as_bytes());
        // The tensor of all experts is read once.
        let is_first = columns.first == 0;
        for tensor in [a, b].into_iter().take(if is_first { 2 } else { 1 }) {
            let (rows, columns) = (tensor.rows(), tensor.columns());
            hash.update(format!("{:?} {rows}x{columns}\n", tensor.stored()).as_bytes());
            hash.update(tensor.bytes());
        }
    }
    let mut id = AdapterId::default();
    id.0.copy_from_slice(&hash.finalize().as_bytes()[..16]);
    id
}
