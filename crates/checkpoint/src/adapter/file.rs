//! The file of an adapter, which is read anew for each load.
//!
//! Owns: the open file, and the places of the adapter's tensors in it. Never: maps the file: one
//! that became shorter would end the process that reads it.
//! Invariant: what is read has the identity that the adapter had when it was opened.

use super::target::{AdapterPlaceInModel, AdapterTarget};
use super::{Adapter, AdapterPart, read_parts};
use crate::error::CheckpointError;
use crate::map::FileBytes;
use crate::tensor::TensorLayout;
use cleave_domain::AdapterId;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// An adapter that was validated, and whose tensors are in its file alone. The file stays open, so
/// that removing it, or putting another one in its place, changes nothing.
#[derive(Debug)]
pub struct AdapterFile {
    dir: PathBuf,
    /// The file of the tensors.
    path: PathBuf,
    file: Mutex<File>,
    len: u64,
    id: AdapterId,
    parts: BTreeMap<AdapterPlaceInModel, AdapterPart<TensorLayout>>,
}

impl AdapterFile {
    /// Opens a folder, and reads and checks all that it has. Ranks above `rank_max` are refused.
    ///
    /// # Errors
    /// See [`CheckpointError`]; each names the file and the field or tensor.
    pub fn open(
        dir: &Path,
        target: &AdapterTarget,
        rank_max: usize,
    ) -> Result<(Self, Adapter), CheckpointError> {
        let fields = super::read_config(dir)?;
        let path = super::tensors_file(dir)?;
        let absent = |error: std::io::Error| CheckpointError::absent(&path, error.to_string());
        let (mut file, _) = cleave_files::open(&path).map_err(absent)?;
        let bytes_max = target.bytes_max(rank_max);
        let bytes = cleave_files::read_opened(&mut file, bytes_max).map_err(|error| {
            let problem = format!(
                "{error}, for an adapter of this model with ranks up to {rank_max} (--max-lora-rank)"
            );
            CheckpointError::absent(&path, problem)
        })?;
        let len = bytes.len() as u64;
        let parts = read_parts(&fields, &path, bytes, target, rank_max)?;
        let adapter = Adapter::of(dir, parts);
        let layouts = adapter.parts.iter();
        let layouts = layouts.map(|(place, part)| (place.clone(), part.layout()));
        let opened = Self {
            dir: dir.to_owned(),
            file: Mutex::new(file),
            len,
            id: adapter.id(),
            parts: layouts.collect(),
            path,
        };
        Ok((opened, adapter))
    }

    /// Folder that contains the adapter.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reads the tensors into memory; `None` if the file has another content than when it was
    /// opened.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self) -> Result<Option<Adapter>, CheckpointError> {
        let absent = |error: std::io::Error| CheckpointError::absent(&self.path, error.to_string());
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if file.metadata().map_err(absent)?.len() != self.len {
            return Ok(None);
        }
        let bytes = cleave_files::read_opened(&mut file, self.len).map_err(absent)?;
        drop(file);
        let bytes = Arc::new(FileBytes::Owned(bytes));
        let parts = self.parts.iter();
        let parts = parts.map(|(place, part)| Some((place.clone(), part.of_file(&bytes)?)));
        // `None` if the file became shorter while it was read.
        let adapter = parts.collect::<Option<_>>();
        let adapter = adapter.map(|parts| Adapter::of(&self.dir, parts));
        Ok(adapter.filter(|adapter| adapter.id() == self.id))
    }
}
