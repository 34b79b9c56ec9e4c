//! The upper waist: what a worker needs of a model, on whatever device.

use crate::blocks::DeviceBlocks;
use cleave_domain::{BlockIndex, Capacity, DeviceId, Fingerprint, SlotIndex, StepPlan, StepResult};
use std::sync::Arc;
use std::time::Duration;

/// What an engine is.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineDescription {
    /// Architecture and size, for people.
    pub model: String,
    /// Processor and number formats, for people.
    pub device: String,
    /// The hardware, if this takes all of it.
    pub device_id: Option<DeviceId>,
    /// Weights revision, numeric type, block layout and size.
    pub fingerprint: Fingerprint,
    /// What it can hold and run.
    pub capacity: Capacity,
    /// Size of the vocabulary.
    pub vocab_size: u32,
}

/// A model with a KV pool. Synchronous, driven by one thread.
///
/// The KV pool is one span per block, `[block][layer][K|V][kv_head]`.
pub trait Engine: Send {
    /// What this is.
    fn describe(&self) -> &EngineDescription;

    /// Runs one step. When its result is there, the device has done all of it: keys and values are final.
    ///
    /// # Errors
    /// `Plan` or `Slot` if the plan contradicts the engine's limits or itself; nothing has changed then.
    /// `Device`, `NotFinite` or `Lost` if the device failed; what the plan was to write is then unknown.
    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError>;

    /// Tokens that a segment may guess at most ([`cleave_domain::Segment::drafts`]); 0 if the engine verifies none.
    fn drafts_max(&self) -> u32 {
        0
    }

    /// Steps ahead of results, if the device can: the same steps, begun before the last one is over.
    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        None
    }

    /// Copies bytes of a block out; `out.len()` bytes from `offset`.
    ///
    /// # Errors
    /// `Plan` if the range is outside the block or the pool.
    fn read_block(
        &self,
        block: BlockIndex,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), EngineError>;

    /// A block where it is, `[block_bytes]`, if the host can read it there and it exists: whoever takes
    /// its bytes elsewhere can then do so in one copy.
    fn host_block(&self, block: BlockIndex) -> Option<&[u8]> {
        let _ = block;
        None
    }

    /// The pool apart from the engine, where a device copies by itself: whoever moves blocks then need not come
    /// here.
    fn blocks(&self) -> Option<Arc<dyn DeviceBlocks>> {
        None
    }

    /// Copies bytes into a block.
    ///
    /// # Errors
    /// As [`Engine::read_block`].
    fn write_block(
        &mut self,
        block: BlockIndex,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), EngineError>;

    /// Copies whole blocks, `(from, to)`, in order.
    ///
    /// # Errors
    /// As [`Engine::read_block`].
    fn copy_blocks(&mut self, pairs: &[(BlockIndex, BlockIndex)]) -> Result<(), EngineError>;
}

/// An engine whose device takes a step while it runs the one before, so that it never waits for the host.
///
/// At most [`STEPS_IN_FLIGHT_MAX`] are under way, and [`Engine::step`] is for when none is. A segment of the
/// second may end one token after what its slot's history has, if the first draws that token: the
/// device knows it before the host does. That is only for slots whose draws need nothing of the tokens
/// before ([`cleave_domain::Sampling::draws_ahead`]).
///
/// What is copied out of blocks or into them meanwhile is as if it were done before the steps under way or after
/// them: no caller names a block that one of them writes.
pub trait Overlap {
    /// Begins a step. It may be over when this returns, as one whose logits the host needs is.
    ///
    /// # Errors
    /// As [`Engine::step`]; a step that was refused is not collected. After `Device`, what is under way is collected
    /// before another step is begun.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError>;

    /// Whether [`Overlap::collect`] would not have to wait: the oldest step is over, or none is under way.
    /// Asked often, so it does no more than look.
    fn is_done(&mut self) -> bool;

    /// Waits for the oldest step that was begun and not collected, and gives its result.
    ///
    /// # Errors
    /// `Device`, `NotFinite` or `Lost` if the step failed, or the one before it on whose tokens it stood.
    ///
    /// # Panics
    /// If none is under way.
    fn collect(&mut self) -> Result<StepResult, EngineError>;

    /// How long the device stood still before the step that was collected last, if it knows.
    fn idle(&self) -> Option<Duration> {
        None
    }
}

/// Steps that an engine with [`Overlap`] has under way at most: one runs, one waits on the device.
pub const STEPS_IN_FLIGHT_MAX: usize = 2;

/// Why an engine could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The caller asked for something impossible; nothing has changed.
    #[error("impossible step: {0}")]
    Plan(String),
    /// The same, because of what the caller asked for one slot; without that the rest could be run.
    #[error("impossible step: {0}: {1}")]
    Slot(SlotIndex, String),
    /// The device failed.
    #[error("device failed: {0}")]
    Device(String),
    /// The device computed something that is no number; it may be the model that does, with this input.
    #[error("the logits of {0} are not finite")]
    NotFinite(SlotIndex),
    /// The device failed for good: nothing works on it any more in this process.
    #[error("device lost: {0}")]
    Lost(String),
}

impl EngineError {
    /// The slot for whose sequence alone a step failed, if it is known: the others of the step can run
    /// again, from their history and the KV that they had before it.
    pub fn slot(&self) -> Option<SlotIndex> {
        match self {
            Self::Slot(slot, _) | Self::NotFinite(slot) => Some(*slot),
            Self::Plan(_) | Self::Device(_) | Self::Lost(_) => None,
        }
    }
}
