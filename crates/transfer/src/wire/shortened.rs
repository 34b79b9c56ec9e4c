//! Limits of the texts and nested failures of a message, for `#[serde(with)]`.
//!
//! Texts are for people, so a text over the limit is cut rather than refused, at both ends.

use cleave_domain::{AbandonCause, Failure};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Limit of a text in a message.
const TEXT_BYTES_MAX: usize = 4 << 10;
/// Limit of nested failures. Brains nest failures at most once; below the limit only the innermost
/// failure is kept.
const FAILURE_DEPTH_MAX: u32 = 4;

pub(super) trait Shorten: Clone {
    fn shorten(self) -> Self;
}

impl Shorten for String {
    fn shorten(mut self) -> Self {
        let mut cut = self.len().min(TEXT_BYTES_MAX);
        while !self.is_char_boundary(cut) {
            cut -= 1;
        }
        self.truncate(cut);
        self
    }
}

impl Shorten for AbandonCause {
    fn shorten(self) -> Self {
        match self {
            Self::Failed(failure) => Self::Failed(shorten_failure(failure, 1)),
            other => other,
        }
    }
}

fn shorten_failure(failure: Failure, depth: u32) -> Failure {
    match failure {
        Failure::Engine(reason) => Failure::Engine(reason.shorten()),
        Failure::Constraint(reason) => Failure::Constraint(reason.shorten()),
        Failure::RetriesSpent(last) if depth < FAILURE_DEPTH_MAX => {
            Failure::RetriesSpent(Box::new(shorten_failure(*last, depth + 1)))
        }
        Failure::RetriesSpent(last) => shorten_failure(*last, depth),
        other => other,
    }
}

pub(super) fn serialize<T, S>(value: &T, to: S) -> Result<S::Ok, S::Error>
where
    T: Shorten + Serialize,
    S: Serializer,
{
    value.clone().shorten().serialize(to)
}

pub(super) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
where
    T: Shorten + Deserialize<'de>,
    D: Deserializer<'de>,
{
    T::deserialize(from).map(T::shorten)
}
