//! LoRA adapters of an engine.
//!
//! Owns: which adapters are open and which are loaded, the rows of a step that each changes, and
//! the form of a change.
//! Never: decides when an adapter is loaded or leaves; knows a name of one.
//! Invariant: an adapter that a step uses stays loaded until the step has ended.

mod changes;
mod matrices;
mod step;

pub use changes::{StoredChanges, StoredLowRank};
pub use matrices::{AdapterMatrices, LowRank};

pub(crate) use step::StepAdapters;

use crate::EngineError;
use crate::model::locked;
use crate::ops::AdapterLoader;
use cleave_checkpoint::{Adapter, AdapterFile, AdapterTarget, CheckpointError};
use cleave_domain::AdapterId;
use cleave_models::ModelSpec;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The adapters of one engine. Called from any thread; an engine runs steps meanwhile.
pub trait AdapterMemory: Send + Sync {
    /// Opens a folder and checks all that it has. Reads the whole adapter, so that it waits for a
    /// disk.
    ///
    /// # Errors
    /// `Refused` names the file, and the field or tensor; `Unsupported` if the device cannot
    /// compute the adapter.
    fn open(&self, folder: &Path) -> Result<AdapterFacts, AdapterError>;

    /// Loads an open adapter, unless it is loaded. Waits for a disk.
    ///
    /// # Errors
    /// `Unknown` if it is not open, `Changed` if its file was written to, `Refused` if the file
    /// cannot be read, `Device` if memory is short.
    fn load(&self, adapter: AdapterId) -> Result<(), AdapterError>;

    /// Copies an open adapter to host memory, unless a copy is there; later loads read the copy.
    /// Waits for a disk.
    ///
    /// # Errors
    /// `Unknown` if it is not open, `Changed` if its file was written to, `Refused` if the file
    /// cannot be read.
    fn copy_to_host(&self, adapter: AdapterId) -> Result<(), AdapterError>;

    /// Frees an adapter's copy in host memory. It stays open, and loaded if it is.
    fn drop_host_copy(&self, adapter: AdapterId);

    /// Frees the memory of a loaded adapter. It stays open, and keeps its copy in host memory.
    fn unload(&self, adapter: AdapterId);

    /// Closes an adapter, and frees all its memory.
    fn close(&self, adapter: AdapterId);
}

/// Facts about an open adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterFacts {
    /// Identity of its content.
    pub adapter: AdapterId,
    /// The largest rank of its matrices.
    pub rank_max: usize,
    /// Bytes of memory that it takes where it is loaded.
    pub bytes: u64,
}

/// Errors of opening or loading an adapter, one variant for each remedy.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The folder is no adapter for this model. Remedy: another folder, or another adapter.
    #[error(transparent)]
    Refused(#[from] CheckpointError),
    /// The adapter was closed, or never opened. Remedy: open it.
    #[error("adapter {0} is not open")]
    Unknown(AdapterId),
    /// The adapter's files have another content than when they were opened. Remedy: load the folder
    /// again, under the same name or another one.
    #[error(
        "{folder}: was written to since it was opened as adapter {adapter}; load it again to serve \
         the new content"
    )]
    Changed {
        /// The adapter that was opened.
        adapter: AdapterId,
        /// The folder that was written to.
        folder: String,
    },
    /// The device cannot compute it. Remedy: another adapter, or another device.
    #[error("{folder}: {problem}")]
    Unsupported {
        /// The folder of the adapter.
        folder: String,
        /// The part that the device does not compute.
        problem: &'static str,
    },
    /// The device failed to take it. Remedy: fewer adapters at a time.
    #[error("loading an adapter: {0}")]
    Device(#[from] EngineError),
}

/// The open and the loaded adapters of an engine.
pub struct AdapterTable<L: AdapterLoader> {
    loader: L,
    spec: ModelSpec,
    target: AdapterTarget,
    rank_max: usize,
    open: Mutex<BTreeMap<AdapterId, Arc<AdapterFile>>>,
    host_copies: Mutex<BTreeMap<AdapterId, Arc<Adapter>>>,
    loaded: Mutex<BTreeMap<AdapterId, Arc<L::Adapter>>>,
}

impl<L: AdapterLoader> AdapterTable<L> {
    /// A table without adapters, for an engine with weights of [`Weights::spec`]. The names of
    /// tensors stand for one adapter only, so that the loader has no cache by name.
    ///
    /// [`Weights::spec`]: crate::Weights::spec
    pub fn new(loader: L, spec: ModelSpec, target: AdapterTarget, rank_max: usize) -> Self {
        Self {
            loader,
            spec,
            target,
            rank_max,
            open: Mutex::default(),
            host_copies: Mutex::default(),
            loaded: Mutex::default(),
        }
    }

    /// Reads an open adapter from its file.
    fn read(&self, adapter: AdapterId) -> Result<Adapter, AdapterError> {
        let opened = locked(&self.open).get(&adapter).cloned();
        let opened = opened.ok_or(AdapterError::Unknown(adapter))?;
        opened.read()?.ok_or_else(|| AdapterError::Changed {
            adapter,
            folder: opened.dir().display().to_string(),
        })
    }

    /// The weights of a loaded adapter.
    pub(crate) fn get(&self, adapter: AdapterId) -> Option<Arc<L::Adapter>> {
        locked(&self.loaded).get(&adapter).cloned()
    }
}

impl<L: AdapterLoader> AdapterMemory for AdapterTable<L> {
    fn open(&self, folder: &Path) -> Result<AdapterFacts, AdapterError> {
        let (file, adapter) = AdapterFile::open(folder, &self.target, self.rank_max)?;
        let changes = StoredChanges::new(&self.spec, &adapter);
        (self.loader)
            .supports(&changes)
            .map_err(|problem| AdapterError::Unsupported {
                folder: folder.display().to_string(),
                problem,
            })?;
        let facts = AdapterFacts {
            adapter: adapter.id(),
            rank_max: adapter.rank_max(),
            bytes: changes.bytes(),
        };
        // Two folders of one content are one adapter; the files of the later one are the fresher.
        locked(&self.open).insert(adapter.id(), Arc::new(file));
        Ok(facts)
    }

    fn load(&self, id: AdapterId) -> Result<(), AdapterError> {
        if self.get(id).is_some() {
            return Ok(());
        }
        let host_copy = locked(&self.host_copies).get(&id).cloned();
        let adapter = match host_copy {
            // Its identity was compared when it was read, and nothing writes to it.
            Some(copy) => copy,
            None => Arc::new(self.read(id)?),
        };
        let weights = (self.loader).load(&StoredChanges::new(&self.spec, &adapter))?;
        locked(&self.loaded).insert(id, Arc::new(weights));
        Ok(())
    }

    fn copy_to_host(&self, id: AdapterId) -> Result<(), AdapterError> {
        if locked(&self.host_copies).contains_key(&id) {
            return Ok(());
        }
        let copy = self.read(id)?;
        locked(&self.host_copies).insert(id, Arc::new(copy));
        Ok(())
    }

    fn drop_host_copy(&self, adapter: AdapterId) {
        let freed = locked(&self.host_copies).remove(&adapter);
        drop(freed);
    }

    fn unload(&self, adapter: AdapterId) {
        // Freed outside the lock, which steps take.
        let freed = locked(&self.loaded).remove(&adapter);
        drop(freed);
    }

    fn close(&self, adapter: AdapterId) {
        self.unload(adapter);
        self.drop_host_copy(adapter);
        let closed = locked(&self.open).remove(&adapter);
        drop(closed);
    }
}
