//! The SLO policy as a file.
//!
//! Owns: the keys of the file, the ranges of their values, and following the file while it changes.
//! Never judges a request. Invariant: a policy from here keeps the invariant of [`SloPolicy`]; of
//! any other file every mistake is reported, with its line and column and the correction.

mod class;
mod consistency;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod model;
mod rule;
mod scaling;
#[cfg(test)]
mod tests;
mod watch;

pub use cleave_yaml::Diagnostic;
pub use watch::{PolicyReload, PolicyWatcher};

use cleave_domain::{HeaderTrust, SloPolicy};
use cleave_yaml::{Diagnostics, mistakes_text};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file larger than any ConfigMap is not a policy.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A policy with the file it is from.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyFile {
    path: PathBuf,
    policy: Arc<SloPolicy>,
    bytes: Vec<u8>,
}

impl PolicyFile {
    /// Reads and checks it.
    ///
    /// # Errors
    /// If it cannot be read, or has mistakes.
    pub fn open(path: &Path) -> Result<Self, PolicyError> {
        let bytes = read(path).map_err(|error| PolicyError::Unreadable(path.to_owned(), error))?;
        let policy = check(path, &bytes)?;
        Ok(Self {
            path: path.to_owned(),
            policy: Arc::new(policy),
            bytes,
        })
    }

    /// The digest of its content, for a metric's label.
    pub fn digest(&self) -> String {
        watch::digest(&self.bytes)
    }

    /// The policy that was read.
    pub fn policy(&self) -> &Arc<SloPolicy> {
        &self.policy
    }
}

/// The reason why a file is no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It cannot be read.
    #[error("cannot read the policy {}", .0.display())]
    Unreadable(PathBuf, #[source] io::Error),
    /// It says what cannot be.
    #[error("{}", mistakes_text("the policy", .0, .1))]
    Wrong(PathBuf, Vec<Diagnostic>),
}

/// Reads small files only: a wrong path may name anything.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    cleave_files::read(path, FILE_BYTES_MAX)
}

fn check(path: &Path, bytes: &[u8]) -> Result<SloPolicy, PolicyError> {
    let text = str::from_utf8(bytes).map_err(|error| {
        let error = io::Error::new(io::ErrorKind::InvalidData, error);
        PolicyError::Unreadable(path.to_owned(), error)
    })?;
    parse(text).map_err(|diagnostics| PolicyError::Wrong(path.to_owned(), diagnostics))
}

/// The policy in a text, or all its mistakes.
fn parse(text: &str) -> Result<SloPolicy, Vec<Diagnostic>> {
    let mut diagnostics = Diagnostics::default();
    let policy = read_policy(text, &mut diagnostics);
    match (policy, diagnostics.into_sorted()) {
        (Some(policy), diagnostics) if diagnostics.is_empty() => Ok(policy),
        (_, diagnostics) => Err(diagnostics),
    }
}

fn read_policy(text: &str, diagnostics: &mut Diagnostics) -> Option<SloPolicy> {
    let tree = cleave_yaml::parse(text, diagnostics)?;
    let mut fields = diagnostics.fields(&tree, "a policy")?;
    let default_class = fields.take("default_class");
    let classes = fields.take_required("classes", diagnostics);
    let rules = fields.take("rules");
    let tenants = fields.take("tenants");
    let trust = fields.take("trust");
    let scaling = fields.take("scaling");
    let models = fields.take("models");
    fields.reject_unknown(diagnostics);

    let trust = trust.map_or_else(HeaderTrust::default, |node| rule::trust(node, diagnostics));
    let classes = class::classes(classes?, diagnostics);
    let tenants = tenants.map_or_else(Vec::new, |node| rule::tenants(node, diagnostics));
    let rules = rules.map_or_else(Vec::new, |node| rule::rules(node, diagnostics));
    let draft = consistency::PolicyDraft {
        at: tree.referenced,
        default_class,
        classes,
        rules,
        tenants,
        trust,
        scaling: scaling.and_then(|node| scaling::scaling(node, diagnostics)),
        models: models.map_or_else(Vec::new, |node| model::models(node, diagnostics)),
    };
    draft.check(diagnostics)
}
