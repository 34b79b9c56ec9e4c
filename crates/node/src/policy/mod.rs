//! The SLO policy as a file.
//!
//! Owns: the keys of the file, what each may be, and following the file while it changes. Never:
//! judges a request. Invariant: a policy that comes out of here keeps every promise of
//! [`SloPolicy`]; whoever gave a file that does not is told every mistake in it, with its line and
//! column and what to write in its place.

mod class;
mod reach;
mod rule;
mod scaling;
#[cfg(test)]
mod tests;
mod tree;
mod watch;

pub(crate) use watch::{Reload, Watch};

use cleave_domain::{SloPolicy, Trust};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tree::Flaws;

/// A file larger than any ConfigMap is not a policy.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A policy with the file it is from.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyFile {
    path: PathBuf,
    policy: Arc<SloPolicy>,
    /// As it was read.
    bytes: Vec<u8>,
}

impl PolicyFile {
    /// Reads and checks it.
    ///
    /// # Errors
    /// If it cannot be read, or says something that cannot be.
    pub fn open(path: &Path) -> Result<Self, PolicyError> {
        let bytes = read(path).map_err(|error| PolicyError::Unreadable(path.to_owned(), error))?;
        let policy = check(path, &bytes)?;
        Ok(Self {
            path: path.to_owned(),
            policy: Arc::new(policy),
            bytes,
        })
    }

    /// Names its content in a metric's label.
    pub(crate) fn digest(&self) -> String {
        watch::digest(&self.bytes)
    }

    /// What it says.
    pub fn policy(&self) -> &Arc<SloPolicy> {
        &self.policy
    }
}

/// Why a file is no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It cannot be read.
    #[error("cannot read the policy {}", .0.display())]
    Unreadable(PathBuf, #[source] io::Error),
    /// It says what cannot be.
    #[error("{}", told(.0, .1))]
    Wrong(PathBuf, Vec<Flaw>),
}

/// One mistake in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    /// From 1 on; 0 if it has no place.
    pub line: u64,
    /// From 1 on.
    pub column: u64,
    /// What is wrong, and what to do.
    pub says: String,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.says)
    }
}

fn told(path: &Path, flaws: &[Flaw]) -> String {
    let path = path.display();
    let count = match flaws.len() {
        1 => "a mistake".to_owned(),
        count => format!("{count} mistakes"),
    };
    let lines = flaws.iter().map(|flaw| format!("\n  {path}:{flaw}"));
    format!(
        "the policy {path} has {count}:{}",
        lines.collect::<String>()
    )
}

/// Small files only: a slip of the path may name anything.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    cleave_files::read(path, FILE_BYTES_MAX)
}

fn check(path: &Path, bytes: &[u8]) -> Result<SloPolicy, PolicyError> {
    let text = str::from_utf8(bytes).map_err(|error| {
        let error = io::Error::new(io::ErrorKind::InvalidData, error);
        PolicyError::Unreadable(path.to_owned(), error)
    })?;
    parse(text).map_err(|flaws| PolicyError::Wrong(path.to_owned(), flaws))
}

/// The policy that a text says, or everything that is wrong with it.
pub(crate) fn parse(text: &str) -> Result<SloPolicy, Vec<Flaw>> {
    let mut flaws = Flaws::default();
    let policy = read_policy(text, &mut flaws);
    match (policy, flaws.into_sorted()) {
        (Some(policy), flaws) if flaws.is_empty() => Ok(policy),
        (_, flaws) => Err(flaws),
    }
}

fn read_policy(text: &str, flaws: &mut Flaws) -> Option<SloPolicy> {
    let tree = tree::parse(text, flaws)?;
    let mut fields = flaws.fields(&tree, "a policy")?;
    let default_class = fields.take("default_class");
    let classes = fields.need("classes", flaws);
    let rules = fields.take("rules");
    let tenants = fields.take("tenants");
    let trust = fields.take("trust");
    let scaling = fields.take("scaling");
    fields.end(flaws);

    let trust = trust.map_or_else(Trust::default, |node| rule::trust(node, flaws));
    let classes = class::classes(classes?, flaws);
    let tenants = tenants.map_or_else(Vec::new, |node| rule::tenants(node, flaws));
    let rules = rules.map_or_else(Vec::new, |node| rule::rules(node, flaws));
    let draft = reach::Draft {
        at: tree.referenced,
        default_class,
        classes,
        rules,
        tenants,
        trust,
        scaling: scaling.and_then(|node| scaling::scaling(node, flaws)),
    };
    draft.check(flaws)
}
