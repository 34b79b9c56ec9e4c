//! The tensors of a folder, from one file or many.
//!
//! Owns: the choice of files that belong to the checkpoint, and the check that index and files
//! agree.
//! Never: knows the purpose of a tensor.
//! Invariant: each tensor name occurs once.

use super::CheckpointError;
use super::map::FileSpan;
use super::scales::ScaleType;
use super::shard::Shard;
use super::tensor::{StoredTensor, StoredType};
use cleave_models::{ConfigError, ConfigFields};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Every tensor of a checkpoint by name.
#[derive(Debug)]
pub(super) struct TensorFolder {
    shards: Vec<Shard>,
    /// Index of a tensor's shard, by the tensor's name.
    shard_of: BTreeMap<String, usize>,
    /// The single file or the index, for error messages about tensors that no shard has.
    root: PathBuf,
}

impl TensorFolder {
    pub(super) fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let single = dir.join(SINGLE);
        if single.exists() {
            return Self::single(&single);
        }
        let index = dir.join(INDEX);
        let Some(fields) = crate::config_file::read(&index)? else {
            return Err(CheckpointError::absent(dir, missing_weights_problem(dir)));
        };
        let weight_map = weight_map(&fields)?;
        let files: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
        let mut shards = Vec::with_capacity(files.len());
        for file in files {
            let path = dir.join(file);
            if !path.exists() {
                let problem = format!("missing, though {INDEX} names it; download it too");
                return Err(CheckpointError::absent(&path, problem));
            }
            shards.push(Shard::open(&path)?);
        }
        let folder = Self::collect(index, shards)?;
        folder.check_index(&weight_map)?;
        Ok(folder)
    }

    /// The tensors of one file.
    fn single(file: &Path) -> Result<Self, CheckpointError> {
        Self::collect(file.to_owned(), vec![Shard::open(file)?])
    }

    /// The tensors of one file that was read into memory.
    pub(super) fn in_memory(file: &Path, bytes: Vec<u8>) -> Result<Self, CheckpointError> {
        Self::collect(file.to_owned(), vec![Shard::in_memory(file, bytes)?])
    }

    fn collect(root: PathBuf, shards: Vec<Shard>) -> Result<Self, CheckpointError> {
        let mut places: BTreeMap<String, usize> = BTreeMap::new();
        for (index, shard) in shards.iter().enumerate() {
            for name in shard.entries.keys() {
                if let Some(first) = places.insert(name.clone(), index) {
                    let problem = format!("is in {} too", shards[first].file.display());
                    return Err(CheckpointError::tensor(&shard.file, name, problem));
                }
            }
        }
        Ok(Self {
            shards,
            shard_of: places,
            root,
        })
    }

    fn check_index(&self, weight_map: &BTreeMap<String, String>) -> Result<(), CheckpointError> {
        for (name, file) in weight_map {
            let found = self
                .shard_of
                .get(name)
                .map(|place| &self.shards[*place].file);
            if found.is_none_or(|path| !path.ends_with(file)) {
                let problem = format!("should be in {file}, but is not there");
                return Err(CheckpointError::tensor(&self.root, name, problem));
            }
        }
        Ok(())
    }

    /// The checkpoint's files, in a stable order.
    pub(super) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.shard_of.keys().map(String::as_str)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.shard_of.contains_key(name)
    }

    /// The file that holds a tensor.
    pub(super) fn file_of(&self, name: &str) -> &Path {
        match self.shard_of.get(name) {
            Some(place) => &self.shards[*place].file,
            None => &self.root,
        }
    }

    /// Finds a tensor of any format and shape.
    pub(super) fn find<'a>(&'a self, name: &'a str) -> Option<FoundTensor<'a>> {
        let shard = &self.shards[*self.shard_of.get(name)?];
        let entry = &shard.entries[name];
        let span = FileSpan::new(Arc::clone(&shard.bytes), entry.range.clone());
        Some(FoundTensor {
            name,
            file: &shard.file,
            dtype: &entry.dtype,
            shape: &entry.shape,
            span: span.expect("a shard's entries lie within it"),
        })
    }

    /// Whether a tensor exists and holds only zeros.
    pub(super) fn is_zero(&self, name: &str) -> bool {
        self.find(name).is_some_and(|found| {
            // Negative zero counts as zero: the sign bit is ignored.
            let bytes = found.span.bytes();
            let width = found.stored_type().map_or(1, StoredType::element_bytes);
            bytes.chunks_exact(width).all(|element| {
                let [rest @ .., last] = element else {
                    return true;
                };
                rest.iter().all(|byte| *byte == 0) && last & 0x7f == 0
            })
        })
    }

    /// Finds a required tensor; `reason` says in the error why it is required.
    pub(super) fn require<'a>(
        &'a self,
        name: &'a str,
        reason: impl FnOnce() -> String,
    ) -> Result<FoundTensor<'a>, CheckpointError> {
        let missing = || format!("missing; {}", reason());
        self.find(name)
            .ok_or_else(|| CheckpointError::tensor(&self.root, name, missing()))
    }

    /// Finds a required tensor of this shape. Of three dimensions the first two become one.
    pub(super) fn tensor(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<StoredTensor, CheckpointError> {
        let found = self.require(name, || {
            format!("config.json calls for it, shape {shape:?}")
        })?;
        if found.shape != shape {
            let problem = format!("shape {:?}, config.json calls for {shape:?}", found.shape);
            return Err(found.damaged(problem));
        }
        let stored = found.stored_type()?;
        let (rows, columns) = match *shape {
            [rows, columns] => (rows, columns),
            [count, rows, columns] => (count * rows, columns),
            _ => (1, shape.iter().product()),
        };
        StoredTensor::new(name.into(), found.span.clone(), stored, rows, columns)
            .ok_or_else(|| found.damaged("does not fill its range"))
    }
}

/// A tensor with the type and shape that its file's header states.
#[derive(Debug)]
pub(super) struct FoundTensor<'a> {
    pub(super) name: &'a str,
    pub(super) file: &'a Path,
    /// Element type as the file spells it: `BF16`.
    pub(super) dtype: &'a str,
    pub(super) shape: &'a [usize],
    pub(super) span: FileSpan,
}

impl FoundTensor<'_> {
    /// The element type, if it is one of the floats that any tensor may have.
    pub(super) fn stored_type(&self) -> Result<StoredType, CheckpointError> {
        match self.dtype {
            "F32" => Ok(StoredType::F32),
            "F16" => Ok(StoredType::F16),
            "BF16" => Ok(StoredType::Bf16),
            other => Err(self.unsupported(format!(
                "stored as {other}, which is not supported; BF16, F16 and F32 are"
            ))),
        }
    }

    /// The number format of scales.
    pub(super) fn scale_type(&self) -> Result<ScaleType, CheckpointError> {
        match self.dtype {
            "F8_E4M3" => Ok(ScaleType::E4m3),
            "U8" | "F8_E8M0" => Ok(ScaleType::E8m0),
            "F32" | "F16" | "BF16" => self.stored_type().map(ScaleType::Float),
            other => Err(self.unsupported(format!(
                "stored as {other}, which is not supported; F32, F16, BF16, F8_E4M3 and, for \
                 powers of two, U8 are"
            ))),
        }
    }

    /// Refuses any other element type.
    pub(super) fn require_type(&self, dtype: &str) -> Result<&Self, CheckpointError> {
        if self.dtype == dtype {
            Ok(self)
        } else {
            Err(self.damaged(format!("stored as {}, not as {dtype}", self.dtype)))
        }
    }

    /// Refuses any other shape.
    pub(super) fn require_shape(&self, shape: &[usize]) -> Result<&Self, CheckpointError> {
        if self.shape == shape {
            Ok(self)
        } else {
            Err(self.damaged(format!(
                "shape {:?}, its matrix calls for {shape:?}",
                self.shape
            )))
        }
    }

    pub(super) fn damaged(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::tensor(self.file, self.name, problem)
    }

    pub(super) fn unsupported(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::unsupported(self.file, format!("tensor `{}`", self.name), problem)
    }
}

fn weight_map(fields: &ConfigFields) -> Result<BTreeMap<String, String>, ConfigError> {
    let Some(Value::Object(map)) = fields.get("weight_map") else {
        return Err(fields.damaged("weight_map", "missing, or not an object"));
    };
    if map.is_empty() {
        return Err(fields.damaged("weight_map", "names no tensor"));
    }
    let place = |(name, file): (&String, &Value)| match file.as_str() {
        // Only a plain file name: a path in the index could reach files outside this folder.
        Some(file) if is_plain_name(file) => Ok((name.clone(), file.to_owned())),
        _ => {
            let problem = format!("{file} for tensor `{name}` is not the name of a file here");
            Err(fields.damaged("weight_map", problem))
        }
    };
    map.iter().map(place).collect()
}

fn is_plain_name(file: &str) -> bool {
    let mut components = Path::new(file).components();
    matches!(components.next(), Some(Component::Normal(_))) && components.next().is_none()
}

/// Error message for a folder without safetensors; it names PyTorch files if there are any.
fn missing_weights_problem(dir: &Path) -> String {
    let has_pickle = fs::read_dir(dir).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth")
        })
    });
    if has_pickle {
        format!("has PyTorch files but neither {SINGLE} nor {INDEX}; convert it to safetensors")
    } else {
        format!("has neither {SINGLE} nor {INDEX}; download the weights")
    }
}
