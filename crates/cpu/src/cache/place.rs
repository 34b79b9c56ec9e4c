//! Which file of a folder keeps which weights.
//!
//! Owns: names of files, and which of them a new one takes the place of.
//! Never: opens a file.
//! Invariant: weights that differ in their checkpoint, form or layout have other names; of two names with the same
//! beginning, both are of one checkpoint's folder.

use crate::pack::LAYOUT;
use cleave_engine::checkpoint::Stamp;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// Ends the name of a file that is whole, and of one that is being written.
const WHOLE: &str = ".packed";
const PART: &str = ".packed-part";

/// Which weights, and where they are kept.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    folder: PathBuf,
    /// Of the checkpoint's path.
    origin: u64,
    stamp: Stamp,
    form: String,
}

impl Place {
    /// In `folder`, weights of the checkpoint that is in `origin`; `form` is precision and rounding.
    pub(crate) fn new(folder: &Path, (origin, stamp): (&Path, Stamp), form: String) -> Self {
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

    pub(super) fn stamp(&self) -> Stamp {
        self.stamp
    }

    pub(super) fn form(&self) -> &str {
        &self.form
    }

    /// The file that is whole.
    pub(super) fn file(&self) -> PathBuf {
        self.folder.join(self.name() + WHOLE)
    }

    /// The file that is being written.
    pub(super) fn part(&self) -> PathBuf {
        self.folder.join(self.name() + PART)
    }

    /// `origin-stamp-form-layout`.
    fn name(&self) -> String {
        let order = match cfg!(target_endian = "big") {
            true => "be",
            false => "le",
        };
        let form = &self.form;
        format!("{}{form}-{LAYOUT}{order}", self.beginning())
    }

    /// What all forms of this state of the checkpoint share.
    fn beginning(&self) -> String {
        let stamp = self.stamp.0[..8].iter();
        let stamp: String = stamp.map(|byte| format!("{byte:02x}")).collect();
        format!("{:016x}-{stamp}-", self.origin)
    }

    /// Whether a file of this name is of the same folder's checkpoint as it was before it changed, or of this form in
    /// another layout.
    pub(super) fn is_replaced(&self, name: &str) -> bool {
        let Some(name) = name.strip_suffix(WHOLE) else {
            return false;
        };
        if name == self.name() || !name.starts_with(&format!("{:016x}-", self.origin)) {
            return false;
        }
        match name.strip_prefix(&self.beginning()) {
            None => true,
            Some(rest) => rest
                .rsplit_once('-')
                .is_some_and(|(form, _)| form == self.form),
        }
    }

    /// Whether a file of this name is, or was, being written by somebody.
    pub(super) fn is_part(name: &str) -> bool {
        name.ends_with(PART)
    }
}
