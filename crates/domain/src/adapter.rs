//! LoRA adapters, as routers and workers name them.

use crate::{BlockHash, RouterId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The content of an adapter: a digest over its tensors, their shapes and their scales. Two folders
/// with equal content are one adapter, and a name whose folder changes is another one.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct AdapterId(pub [u8; 16]);

impl fmt::Display for AdapterId {
    /// All sixteen bytes as hexadecimal digits: operators compare adapters by them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// An adapter that a worker serves under a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AdapterOffer {
    /// The model name that requests give; unique among a worker's adapters.
    pub name: String,
    /// The content that this name stands for on this worker.
    pub adapter: AdapterId,
    /// The folder that it was read from, for display.
    pub root: String,
    /// The folder as the command named it that loaded it at run time; `None` for an adapter that
    /// the worker has had from its start.
    pub loaded_from: Option<String>,
    /// The change that gave it this name; `None` for an adapter that the worker has had from its
    /// start, which comes before every change.
    pub change: Option<AdapterChangeId>,
    /// The place where its weights are now.
    pub place: AdapterPlace,
    /// Why this worker cannot load it, if it cannot: it takes no request with it.
    pub problem: Option<String>,
}

/// A change of the adapters of a fleet, in the order of all changes: of two changes of a name the
/// later one holds, whichever a worker receives first. A router numbers a change above all that it
/// knows of.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct AdapterChangeId {
    /// Number of the change.
    pub number: u64,
    /// The router that ordered it, which decides between changes of one number.
    pub router: RouterId,
}

/// A name that a worker serves no longer, by a change.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnloadedAdapter {
    /// The model name that requests gave.
    pub name: String,
    /// The change that ended it.
    pub change: AdapterChangeId,
}

/// The adapters of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdapterReport {
    /// Adapters by ascending name.
    pub offers: Vec<AdapterOffer>,
    /// Names that were unloaded last, by ascending name.
    pub unloaded: Vec<UnloadedAdapter>,
}

/// A command to a worker about the adapters that it serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdapterCommand {
    /// Serve the adapter in this folder under this name, in place of an earlier one of the name.
    Load {
        /// The model name that requests give.
        name: String,
        /// The folder, below the worker's root for adapters.
        folder: String,
        /// The content that the folder must have; `None` for whatever it has.
        content: Option<AdapterId>,
    },
    /// Serve the adapter of this name no longer; hand-offs that have it keep it.
    Unload {
        /// The model name that requests gave.
        name: String,
    },
}

impl AdapterCommand {
    /// The model name that it is about.
    pub fn name(&self) -> &str {
        match self {
            Self::Load { name, .. } | Self::Unload { name } => name,
        }
    }
}

/// The place of an adapter's weights on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum AdapterPlace {
    /// Loaded: a sequence can begin at once.
    Resident,
    /// In its folder: the first sequence waits until it is read and loaded.
    OnDisk,
    /// A copy is in host memory: the first sequence waits until it is loaded.
    InHost,
}

/// The sequences with which a sequence may share KV blocks: those of the same salt and the same
/// adapter. KV depends on the adapter, so its content is a part of each block's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheScope {
    /// The salt of the request, 0 for the public one.
    pub salt: u64,
    /// The adapter of the request; `None` for the base model.
    pub adapter: Option<AdapterId>,
}

impl CacheScope {
    /// The scope of the base model with this salt.
    pub const fn of_salt(salt: u64) -> Self {
        let adapter = None;
        Self { salt, adapter }
    }

    /// The hash that stands before the first block of a sequence.
    pub fn root(&self) -> BlockHash {
        let root = self.adapter.map(|AdapterId(digest)| BlockHash(digest));
        root.unwrap_or_default()
    }
}
