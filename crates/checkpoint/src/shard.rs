//! One safetensors file.
//!
//! Owns: the file's header, every number of which is validated, since the file was downloaded.
//! Never: allocates by a number of the file, or copies tensor data.
//! Invariant: every entry lies within the file and has the size of its shape; together the entries
//! cover the data exactly.

use super::CheckpointError;
use super::map::FileBytes;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Limit of the header in bytes, from the format's specification.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A safetensors file, mapped or read into memory.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) file: PathBuf,
    pub(super) bytes: Arc<FileBytes>,
    /// Modification time; `None` if the system has none.
    pub(super) modified: Option<SystemTime>,
    pub(super) entries: BTreeMap<String, ShardEntry>,
}

/// A tensor's type, shape and place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardEntry {
    /// Element type as the file spells it: `BF16`.
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Byte range within the whole file.
    pub(super) range: Range<usize>,
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let absent = |error: std::io::Error| CheckpointError::absent(path, error.to_string());
        let (file, metadata) = cleave_files::open(path).map_err(absent)?;
        check_size(path, metadata.len())?;
        let bytes = FileBytes::map(&file).map_err(absent)?;
        Self::of_bytes(path, bytes, metadata.modified().ok())
    }

    /// A file that was read into memory.
    pub(super) fn in_memory(path: &Path, bytes: Vec<u8>) -> Result<Self, CheckpointError> {
        check_size(path, bytes.len() as u64)?;
        Self::of_bytes(path, FileBytes::Owned(bytes), None)
    }

    fn of_bytes(
        path: &Path,
        bytes: FileBytes,
        modified: Option<SystemTime>,
    ) -> Result<Self, CheckpointError> {
        let entries = entries(path, bytes.as_slice())?;
        Ok(Self {
            file: path.to_owned(),
            bytes: Arc::new(bytes),
            modified,
            entries,
        })
    }
}

/// Refuses a file that has no room for the length of a header; an empty one cannot be mapped.
fn check_size(path: &Path, size: u64) -> Result<(), CheckpointError> {
    if size >= 8 {
        return Ok(());
    }
    let problem = format!("{size} bytes, too short for a safetensors file");
    Err(CheckpointError::damaged(path, "header", problem))
}

/// Reads the header: its length in eight bytes, then JSON; the data follow.
fn entries(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, ShardEntry>, CheckpointError> {
    let damaged = |problem: String| CheckpointError::damaged(path, "header", problem);
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(damaged("shorter than 8 bytes".to_owned()));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        let problem = format!("claims {length} bytes, the limit is {HEADER_BYTES_MAX}");
        return Err(damaged(problem));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        let problem = format!(
            "{length} bytes long, but the file ends after {}",
            rest.len()
        );
        return Err(damaged(problem));
    };
    let header: BTreeMap<String, Value> =
        serde_json::from_slice(header).map_err(|error| damaged(error.to_string()))?;
    let start = bytes.len() - data.len();
    let mut entries = BTreeMap::new();
    for (name, value) in header {
        if name != "__metadata__" {
            let entry = entry(&value, data.len(), start)
                .map_err(|problem| CheckpointError::tensor(path, &name, problem))?;
            entries.insert(name, entry);
        }
    }
    check_cover(path, &entries, start..bytes.len())?;
    Ok(entries)
}

/// Validates one tensor's entry of the header.
fn entry(value: &Value, data_bytes: usize, start: usize) -> Result<ShardEntry, String> {
    let dtype = value["dtype"].as_str().ok_or("has no dtype")?.to_owned();
    let numbers = |name: &str| -> Result<Vec<usize>, String> {
        let list = value[name].as_array();
        list.and_then(|list| {
            list.iter()
                .map(|number| usize::try_from(number.as_u64()?).ok())
                .collect()
        })
        .ok_or_else(|| format!("{name} is not a list of whole numbers"))
    };
    let shape = numbers("shape")?;
    let offsets = numbers("data_offsets")?;
    let &[from, to] = offsets.as_slice() else {
        return Err("data_offsets is not a pair".to_owned());
    };
    if from > to {
        return Err(format!("data_offsets run backwards, {from} to {to}"));
    }
    if to > data_bytes {
        return Err(format!(
            "ends at byte {to} of the data, but the file is truncated after {data_bytes}"
        ));
    }
    if let Some(element) = element_bytes(&dtype) {
        let bytes = shape.iter().try_fold(element, |n, dim| n.checked_mul(*dim));
        if bytes != Some(to - from) {
            let size = to - from;
            return Err(format!(
                "shape {shape:?} of {dtype} does not fill its {size} bytes"
            ));
        }
    }
    Ok(ShardEntry {
        dtype,
        shape,
        range: start + from..start + to,
    })
}

/// Bytes of an element, for types of whole bytes; a tensor of another type is refused only if the
/// model needs it.
fn element_bytes(dtype: &str) -> Option<usize> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => Some(1),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "F32" | "I32" | "U32" => Some(4),
        "F64" | "I64" | "U64" => Some(8),
        _ => None,
    }
}

/// Checks that tensors follow one another without gap or overlap to the file's end.
fn check_cover(
    path: &Path,
    entries: &BTreeMap<String, ShardEntry>,
    data: Range<usize>,
) -> Result<(), CheckpointError> {
    let mut ordered: Vec<_> = entries.iter().collect();
    ordered.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    let mut end = data.start;
    for (name, entry) in ordered {
        if entry.range.start != end {
            let problem = format!("begins at byte {}, expected {end}", entry.range.start);
            return Err(CheckpointError::tensor(path, name, problem));
        }
        end = entry.range.end;
    }
    if end != data.end {
        let problem = format!("{} bytes follow the last tensor", data.end - end);
        return Err(CheckpointError::damaged(path, "end", problem));
    }
    Ok(())
}
