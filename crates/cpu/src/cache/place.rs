//! Names of the files that cache packed weights.
//!
//! Owns: the names of files, and the rule which of them a new file supersedes.
//! Never: opens a file.
//! Invariant: weights that differ in checkpoint, form or layout have different names; two names
//! with the same first part belong to one checkpoint's folder.

use crate::pack::LAYOUT;
use cleave_checkpoint::CheckpointStamp;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// Suffixes of a complete file, and of one that is being written.
const WHOLE: &str = ".packed";
const PART: &str = ".packed-part";

/// Identity of packed weights, and the folder of their file.
#[derive(Clone, Debug)]
pub(crate) struct PackedLocation {
    folder: PathBuf,
    /// Hash of the checkpoint's path.
    origin: u64,
    stamp: CheckpointStamp,
    form: String,
}

impl PackedLocation {
    /// Weights of the checkpoint in `origin`, cached in `folder`; `form` is precision and rounding.
    pub(crate) fn new(folder: &Path, origin: &Path, stamp: CheckpointStamp, form: String) -> Self {
        let origin = origin.canonicalize().unwrap_or_else(|_| origin.to_owned());
        Self {
            folder: folder.to_owned(),
            origin: XxHash3_64::oneshot(origin.as_os_str().as_encoded_bytes()),
            stamp,
            form,
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn stamp(&self) -> CheckpointStamp {
        self.stamp
    }

    pub(super) fn form(&self) -> &str {
        &self.form
    }

    /// Path of the complete file.
    pub(super) fn file(&self) -> PathBuf {
        self.folder.join(self.name() + WHOLE)
    }

    /// Path of the file that is being written.
    pub(super) fn part_file(&self) -> PathBuf {
        self.folder.join(self.name() + PART)
    }

    /// Name of the file: `origin-stamp-form-layout`.
    fn name(&self) -> String {
        let order = if cfg!(target_endian = "big") {
            "be"
        } else {
            "le"
        };
        let form = &self.form;
        format!("{}{form}-{LAYOUT}{order}", self.name_prefix())
    }

    /// Part of the name that all forms of this state of the checkpoint share.
    fn name_prefix(&self) -> String {
        let stamp = self.stamp.0[..8].iter();
        let stamp: String = stamp.map(|byte| format!("{byte:02x}")).collect();
        format!("{:016x}-{stamp}-", self.origin)
    }

    /// Whether a file of this name caches an older state of the same checkpoint folder, or this
    /// form in another layout.
    pub(super) fn is_superseded(&self, name: &str) -> bool {
        let Some(name) = name.strip_suffix(WHOLE) else {
            return false;
        };
        if name == self.name() || !name.starts_with(&format!("{:016x}-", self.origin)) {
            return false;
        }
        match name.strip_prefix(&self.name_prefix()) {
            None => true,
            Some(rest) => rest
                .rsplit_once('-')
                .is_some_and(|(form, _)| form == self.form),
        }
    }

    /// Whether a file of this name is, or was, being written by any process.
    pub(super) fn is_part(name: &str) -> bool {
        name.ends_with(PART)
    }
}
