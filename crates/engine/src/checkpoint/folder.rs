//! The tensors of a folder, from one file or many.
//!
//! Owns: which files belong to the checkpoint, and that index and files agree.
//! Never: knows what a tensor is for.
//! Invariant: each name is found once.

use super::CheckpointError;
use super::fields::Fields;
use super::map::Span;
use super::shard::Shard;
use super::tensor::{StoredTensor, StoredType};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Every tensor of a checkpoint by name.
#[derive(Debug)]
pub(super) struct Folder {
    shards: Vec<Shard>,
    /// Name to its shard.
    places: BTreeMap<String, usize>,
    /// What says which tensors there are.
    root: PathBuf,
}

impl Folder {
    pub(super) fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let single = dir.join(SINGLE);
        if single.exists() {
            return Self::collect(single.clone(), vec![Shard::open(&single)?]);
        }
        let index = dir.join(INDEX);
        let Some(fields) = Fields::read(&index)? else {
            return Err(CheckpointError::absent(dir, nothing_found(dir)));
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
            places,
            root,
        })
    }

    fn check_index(&self, weight_map: &BTreeMap<String, String>) -> Result<(), CheckpointError> {
        for (name, file) in weight_map {
            let found = self.places.get(name).map(|place| &self.shards[*place].file);
            if found.is_none_or(|path| !path.ends_with(file)) {
                let problem = format!("should be in {file}, but is not there");
                return Err(CheckpointError::tensor(&self.root, name, problem));
            }
        }
        Ok(())
    }

    /// Its files, in an order that does not change.
    pub(super) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// The file that holds a tensor.
    pub(super) fn file_of(&self, name: &str) -> &Path {
        match self.places.get(name) {
            Some(place) => &self.shards[*place].file,
            None => &self.root,
        }
    }

    /// A tensor, whatever it is.
    pub(super) fn find<'a>(&'a self, name: &'a str) -> Option<Found<'a>> {
        let shard = &self.shards[*self.places.get(name)?];
        let entry = &shard.entries[name];
        let span = Span::new(Arc::clone(&shard.bytes), entry.range.clone());
        Some(Found {
            name,
            file: &shard.file,
            dtype: &entry.dtype,
            shape: &entry.shape,
            span: span.expect("a shard's entries lie within it"),
        })
    }

    /// Whether a tensor is there and nothing but zeros.
    pub(super) fn is_zero(&self, name: &str) -> bool {
        self.find(name).is_some_and(|found| {
            // A sign of its own makes a zero no other number.
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

    /// A tensor that must be there; `reason` says why.
    pub(super) fn need<'a>(
        &'a self,
        name: &'a str,
        reason: impl FnOnce() -> String,
    ) -> Result<Found<'a>, CheckpointError> {
        let missing = || format!("missing; {}", reason());
        self.find(name)
            .ok_or_else(|| CheckpointError::tensor(&self.root, name, missing()))
    }

    /// A tensor of this shape, one or two dimensions.
    pub(super) fn tensor(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<StoredTensor, CheckpointError> {
        let found = self.need(name, || {
            format!("config.json calls for it, shape {shape:?}")
        })?;
        if found.shape != shape {
            let problem = format!("shape {:?}, config.json calls for {shape:?}", found.shape);
            return Err(found.damaged(problem));
        }
        let stored = found.stored_type()?;
        let (rows, columns) = match *shape {
            [rows, columns] => (rows, columns),
            _ => (1, shape.iter().product()),
        };
        StoredTensor::new(name.into(), found.span.clone(), stored, (rows, columns))
            .ok_or_else(|| found.damaged("does not fill its range"))
    }
}

/// A tensor as its file tells of it.
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub(super) name: &'a str,
    pub(super) file: &'a Path,
    /// As the file spells it: `BF16`.
    pub(super) dtype: &'a str,
    pub(super) shape: &'a [usize],
    pub(super) span: Span,
}

impl Found<'_> {
    /// The format, if it is one of floats that every tensor may have.
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

    /// Refuses another format than this.
    pub(super) fn of_type(&self, dtype: &str) -> Result<&Self, CheckpointError> {
        match self.dtype == dtype {
            true => Ok(self),
            false => Err(self.damaged(format!("stored as {}, not as {dtype}", self.dtype))),
        }
    }

    /// Refuses another shape than this.
    pub(super) fn of_shape(&self, shape: &[usize]) -> Result<&Self, CheckpointError> {
        match self.shape == shape {
            true => Ok(self),
            false => Err(self.damaged(format!(
                "shape {:?}, its matrix calls for {shape:?}",
                self.shape
            ))),
        }
    }

    pub(super) fn damaged(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::tensor(self.file, self.name, problem)
    }

    pub(super) fn unsupported(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::unsupported(self.file, format!("tensor `{}`", self.name), problem)
    }
}

fn weight_map(fields: &Fields) -> Result<BTreeMap<String, String>, CheckpointError> {
    let Some(Value::Object(map)) = fields.get("weight_map") else {
        return Err(fields.damaged("weight_map", "missing, or not an object"));
    };
    if map.is_empty() {
        return Err(fields.damaged("weight_map", "names no tensor"));
    }
    let place = |(name, file): (&String, &Value)| match file.as_str() {
        // A file of this folder, and not one that the index could reach through a path.
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

/// Says what is in the folder instead of safetensors.
fn nothing_found(dir: &Path) -> String {
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
