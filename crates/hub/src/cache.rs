//! The cache of models on this machine, in the layout of Python's `huggingface_hub`.
//!
//! Owns: `models--ORG--NAME/{blobs,refs,snapshots}` and `.locks`. Never: uses the network.
//! Invariant: `refs/REVISION` names a commit, `snapshots/COMMIT` has a link for each file, and
//! `blobs/CHECKSUM` its bytes.

use crate::digest::BlobHash;
use crate::error::HubError;
use crate::listing::{RepoPath, is_commit};
use crate::name::{HubName, HubRevision};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Longest file of `refs/` that is read, in bytes.
const REF_BYTES_MAX: u64 = 256;

/// The cache: a folder that Python's tools share.
#[derive(Clone, Debug)]
pub struct HubCache {
    pub(crate) root: PathBuf,
}

/// The folder of one model.
#[derive(Clone, Debug)]
pub(crate) struct ModelFolder {
    pub(crate) root: PathBuf,
    locks: PathBuf,
}

impl HubCache {
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(crate) fn model(&self, name: &HubName) -> ModelFolder {
        ModelFolder {
            root: self.root.join(name.folder()),
            locks: self.root.join(".locks").join(name.folder()),
        }
    }
}

impl ModelFolder {
    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    pub(crate) fn refs(&self) -> PathBuf {
        self.root.join("refs")
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    pub(crate) fn locks(&self) -> &Path {
        &self.locks
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.snapshots().join(commit)
    }

    pub(crate) fn blob(&self, hash: &BlobHash) -> PathBuf {
        self.blobs().join(hash.as_str())
    }

    /// The part of a blob that arrived so far.
    pub(crate) fn incomplete(&self, hash: &BlobHash) -> PathBuf {
        self.blobs().join(format!("{hash}.incomplete"))
    }

    /// The file that the download of a blob holds a lock on; Python's tools lock it, too.
    pub(crate) fn lock(&self, hash: &BlobHash) -> PathBuf {
        self.locks.join(format!("{hash}.lock"))
    }

    /// Returns the commit of a revision, if the cache knows it.
    pub(crate) fn commit(&self, revision: &HubRevision) -> Option<String> {
        let text = revision.as_str();
        if is_commit(text) {
            return Some(text.to_owned());
        }
        let stored = cleave_files::read_text(&self.refs().join(text), REF_BYTES_MAX).ok()?;
        let commit = stored.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    /// Makes the folders of the model.
    pub(crate) fn make(&self) -> Result<(), HubError> {
        for folder in [&self.blobs(), &self.refs(), &self.snapshots(), &self.locks] {
            fs::create_dir_all(folder).map_err(HubError::disk(folder))?;
        }
        Ok(())
    }

    /// Stores the commit of a revision.
    pub(crate) fn write_ref(&self, revision: &HubRevision, commit: &str) -> Result<(), HubError> {
        if is_commit(revision.as_str()) {
            return Ok(());
        }
        let path = self.refs().join(revision.as_str());
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder).map_err(HubError::disk(folder))?;
        let new = self
            .root
            .join(format!(".ref-{commit}-{}", std::process::id()));
        fs::write(&new, commit).map_err(HubError::disk(&new))?;
        fs::rename(&new, &path).map_err(HubError::disk(&path))
    }

    /// Links a file of a snapshot to its blob; a link to another blob is replaced.
    pub(crate) fn link(
        &self,
        commit: &str,
        file: &RepoPath,
        hash: &BlobHash,
    ) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file.as_str());
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder).map_err(HubError::disk(folder))?;
        // From the file's folder up to the model's: each folder of the file's path, the commit, and
        // `snapshots`.
        let ups = file.as_str().matches('/').count() + 2;
        let target: PathBuf = std::iter::repeat_n("..", ups)
            .chain(["blobs", hash.as_str()])
            .collect();
        match symlink(&target, &path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if fs::read_link(&path).is_ok_and(|found| found == target) {
                    return Ok(());
                }
                fs::remove_file(&path)
                    .and_then(|()| symlink(&target, &path))
                    .map_err(HubError::disk(&path))
            }
            other => other.map_err(HubError::disk(&path)),
        }
    }
}
