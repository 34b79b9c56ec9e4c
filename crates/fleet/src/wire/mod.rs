//! Messages between routers and workers as bytes.
//!
//! Owns: two forms. The exchange at the start, beats and the frame of every message are protobuf,
//! which any release reads well enough to say why it turns another one away. What is in the frame
//! after that is postcard of the types themselves ([`encoding`]). Never passes on a value that no
//! worker could have: [`FleetWireError`] names the field. Invariant: a value sent is the value that
//! arrives; every message has a checksum ([`checked`]).

mod bounds;
mod checked;
mod encoding;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod strategies;
#[cfg(test)]
mod tests;

#[cfg(any(test, fuzzing))]
pub(crate) use bounds::Bounded;
pub(crate) use checked::{
    BATCH_BYTES_MAX, CheckedCodec, EMISSIONS_BYTES_MAX, HELLO_BYTES_MAX, ORDER_BYTES_MAX,
};
#[cfg(test)]
pub(crate) use checked::{decode_checked as open_message, encode_checked as close_message};
pub(crate) use encoding::{decode, encode};

use crate::connection::Registration;
use cleave_text::ModelFiles;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Types that the build generates from the fleet's protocol.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::needless_pass_by_value,
    clippy::large_enum_variant,
    clippy::doc_markdown
)]
pub(crate) mod proto {
    tonic::include_proto!("cleave.fleet.v1");
}

/// Incremented when a byte of a message changes, or its meaning; both ends must agree.
pub(crate) const PROTOCOL: u32 = 15;

/// The reason why a message is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FleetWireError {
    /// A message field that is always sent.
    #[error("message lacks `{0}`: does the other side run another release?")]
    Missing(&'static str),
    /// Bytes that are no value of their kind.
    #[error("`{0}` cannot be decoded: does the other side run another release?")]
    Unreadable(&'static str),
    /// A list that is too long or out of order.
    #[error("`{field}` {problem}")]
    List {
        field: &'static str,
        problem: &'static str,
    },
    /// A number that makes no sense.
    #[error("`{field}` is {value}, and may be {least} to {most}")]
    Bounds {
        field: &'static str,
        value: u64,
        /// The least that makes sense.
        least: u64,
        most: u64,
    },
    /// A worker's name that cannot be one.
    #[error("`hello.name` {0}")]
    Name(&'static str),
}

/// A number within bounds, both included.
pub(crate) fn within(
    field: &'static str,
    value: u64,
    bounds: RangeInclusive<u64>,
) -> Result<(), FleetWireError> {
    if bounds.contains(&value) {
        Ok(())
    } else {
        Err(FleetWireError::Bounds {
            field,
            value,
            least: *bounds.start(),
            most: *bounds.end(),
        })
    }
}

/// Names a model's text files in logs and errors.
pub fn files_digest(files: &ModelFiles) -> String {
    // As they travel: every file is in there, and one that is absent is not one that is empty.
    format!("{:016x}", cleave_transfer::checksum(&encode(files)))
}

/// Lengths of time beyond 584 years are 584 years.
pub fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

impl From<&Registration> for proto::Hello {
    fn from(registration: &Registration) -> Self {
        Self {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            name: registration.name.clone(),
            registration: encode(registration),
        }
    }
}
