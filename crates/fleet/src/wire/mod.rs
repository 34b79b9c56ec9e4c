//! Conversions between protobuf messages and domain types.
//!
//! Owns: every conversion; the generated types stay in this crate. Never accepts a message that
//! lacks a field, or with values that no worker could have: [`FleetWireError`] names the field.
//! Invariant: a value converted there and back is equal. Conversions name every field, so that a
//! field added to the domain does not compile until it is sent too.

mod checked;
mod order;
mod price;
mod registration;
mod report;
mod request;
mod request_context;
mod scaling;
#[cfg(test)]
mod strategies;
#[cfg(test)]
mod tests;

pub(crate) use checked::{
    BATCH_BYTES_MAX, CheckedCodec, EMISSIONS_BYTES_MAX, HELLO_BYTES_MAX, ORDER_BYTES_MAX,
};
#[cfg(test)]
pub(crate) use checked::{decode_checked as open_message, encode_checked as close_message};

use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, FlightId, Generation, HandoffId, Incarnation, WorkerId,
    WorkerRef,
};
use cleave_text::ModelFiles;
use cleave_transfer::WriteGrant;
use prost::Message;
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

/// Incremented when a message changes its meaning; both ends must agree.
pub(crate) const PROTOCOL: u32 = 5;

/// The reason why a message is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetWireError {
    /// A message field that is always sent.
    #[error("message lacks `{0}`: does the other side run another release?")]
    Missing(&'static str),
    /// An enum or oneof value that does not exist here.
    #[error("`{0}` has a value unknown here: does the other side run another release?")]
    Unknown(&'static str),
    /// A byte string of the wrong length.
    #[error("`{field}` has {len} bytes in place of {expected}")]
    Length {
        field: &'static str,
        len: usize,
        expected: usize,
    },
    /// A list that is too long, too short or out of order.
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

/// A message field, which protobuf always makes optional.
fn required<T>(field: Option<T>, name: &'static str) -> Result<T, FleetWireError> {
    field.ok_or(FleetWireError::Missing(name))
}

/// An enum field's value, whatever number came.
fn role_of(number: i32, name: &'static str) -> Result<proto::Role, FleetWireError> {
    proto::Role::try_from(number).map_err(|_| FleetWireError::Unknown(name))
}

/// Names a model's text files in logs and errors.
pub fn files_digest(files: &ModelFiles) -> String {
    // As they travel: every file is in there, and one that is absent is not one that is empty.
    let bytes = proto::ModelFiles::from(files.clone()).encode_to_vec();
    format!("{:016x}", cleave_transfer::checksum(&bytes))
}

/// Lengths of time beyond 584 years are 584 years.
pub fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

impl From<WorkerRef> for proto::WorkerRef {
    fn from(worker: WorkerRef) -> Self {
        let WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(incarnation),
        } = worker;
        Self {
            worker,
            incarnation,
        }
    }
}

impl From<proto::WorkerRef> for WorkerRef {
    fn from(worker: proto::WorkerRef) -> Self {
        let proto::WorkerRef {
            worker,
            incarnation,
        } = worker;
        Self {
            worker: WorkerId(worker),
            incarnation: Incarnation(incarnation),
        }
    }
}

impl From<HandoffId> for proto::HandoffId {
    fn from(handoff: HandoffId) -> Self {
        let HandoffId {
            flight: FlightId(flight),
            attempt,
        } = handoff;
        Self { flight, attempt }
    }
}

impl From<(HandoffId, WriteGrant)> for proto::Pass {
    fn from(issued: (HandoffId, WriteGrant)) -> Self {
        let (handoff, WriteGrant(pass)) = issued;
        Self {
            handoff: Some(handoff.into()),
            pass: pass.to_vec(),
        }
    }
}

impl TryFrom<proto::Pass> for (HandoffId, WriteGrant) {
    type Error = FleetWireError;

    fn try_from(wire: proto::Pass) -> Result<Self, FleetWireError> {
        let proto::Pass { handoff, pass } = wire;
        let pass = pass
            .try_into()
            .map_err(|_| FleetWireError::Missing("pass.pass"))?;
        let handoff = handoff.ok_or(FleetWireError::Missing("pass.handoff"))?;
        Ok((handoff.into(), WriteGrant(pass)))
    }
}

impl From<proto::HandoffId> for HandoffId {
    fn from(handoff: proto::HandoffId) -> Self {
        let proto::HandoffId { flight, attempt } = handoff;
        Self {
            flight: FlightId(flight),
            attempt,
        }
    }
}

impl From<BlockRef> for proto::BlockRef {
    fn from(block: BlockRef) -> Self {
        let BlockRef {
            block: BlockIndex(block),
            generation: Generation(generation),
        } = block;
        Self { block, generation }
    }
}

impl From<proto::BlockRef> for BlockRef {
    fn from(block: proto::BlockRef) -> Self {
        let proto::BlockRef { block, generation } = block;
        Self {
            block: BlockIndex(block),
            generation: Generation(generation),
        }
    }
}

fn blocks_out(blocks: Vec<BlockRef>) -> Vec<proto::BlockRef> {
    blocks.into_iter().map(Into::into).collect()
}

fn blocks_in(blocks: Vec<proto::BlockRef>) -> Vec<BlockRef> {
    blocks.into_iter().map(Into::into).collect()
}

fn hashes_out(hashes: Vec<BlockHash>) -> Vec<Vec<u8>> {
    hashes
        .into_iter()
        .map(|BlockHash(bytes)| bytes.to_vec())
        .collect()
}

fn hashes_in(hashes: Vec<Vec<u8>>, field: &'static str) -> Result<Vec<BlockHash>, FleetWireError> {
    let hash = |bytes: Vec<u8>| {
        let len = bytes.len();
        let bytes = <[u8; 16]>::try_from(bytes);
        bytes.map(BlockHash).map_err(|_| FleetWireError::Length {
            field,
            len,
            expected: 16,
        })
    };
    hashes.into_iter().map(hash).collect()
}
