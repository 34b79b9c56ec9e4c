//! The interface between a worker and a model, on any device.

use crate::adapters::AdapterMemory;
use crate::blocks::{BlockSpan, DeviceBlocks};
use crate::constraint::{ConstraintError, ConstraintSource};
use cleave_domain::{
    BlockIndex, Capacity, DeviceId, Fingerprint, KvPlane, SlotIndex, StepPlan, StepResult,
};
use std::sync::Arc;
use std::time::Duration;

/// Description of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineDescription {
    /// Architecture and size, for people.
    pub model: String,
    /// Device and number formats, for people.
    pub device: String,
    /// Identity of the hardware, if this engine uses all of it.
    pub device_id: Option<DeviceId>,
    /// Weights revision, numeric type, block layout and size.
    pub fingerprint: Fingerprint,
    /// Capacity of pool, slots and steps.
    pub capacity: Capacity,
    /// Size of the vocabulary.
    pub vocab_size: u32,
}

/// A model with a KV pool. Synchronous, driven by one thread.
///
/// The KV pool has one contiguous range per block, `[block][layer][K|V][kv_head]`, and one per slot
/// of the state plane, if the model has one.
pub trait Engine: Send {
    /// Model, device, fingerprint and capacity of the engine.
    fn describe(&self) -> &EngineDescription;

    /// Runs one step. When it returns, the device has finished all of the step: keys and values are
    /// final.
    ///
    /// # Errors
    /// `Plan` or `Slot` if the plan contradicts the engine's limits or itself; nothing has changed
    /// then. `Device`, `NotFinite` or `Lost` if the device failed, `Constraint` if a constraint
    /// allows no token that can be found; the contents of the blocks and state slots that the plan
    /// writes are then undefined, those of other sequences' states too.
    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError>;

    /// Gives the engine the matchers of constraints. Without them it refuses every slot that has a
    /// constraint.
    fn enforce(&mut self, constraints: Arc<dyn ConstraintSource>) {
        let _ = constraints;
    }

    /// The adapters that slots may have; `None` if the engine applies none, and refuses every slot
    /// that has one.
    fn adapters(&self) -> Option<Arc<dyn AdapterMemory>> {
        None
    }

    /// Limit of a segment's drafts ([`cleave_domain::Segment::drafts`]); 0 if the engine cannot
    /// verify drafts, as with states, which cannot forget a rejected draft.
    fn drafts_max(&self) -> u32 {
        0
    }

    /// Overlapping steps, if the device supports them: the same steps, begun before the last one
    /// has ended.
    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        None
    }

    /// Copies a range out of a block or slot, `[span.len]`.
    ///
    /// # Errors
    /// `Plan` if the range is outside the block or slot, or the pool has no such block or plane.
    ///
    /// # Panics
    /// If `out` is not as long as the range.
    fn read_block(&self, span: BlockSpan, out: &mut [u8]) -> Result<(), EngineError>;

    /// The bytes of a whole block or slot in place, if it exists and the host can read it there; it
    /// saves the caller one copy.
    fn host_block(&self, plane: KvPlane, block: BlockIndex) -> Option<&[u8]> {
        let _ = (plane, block);
        None
    }

    /// Access to the pool's blocks beside the engine, if the device can copy on its own; block
    /// copies then need not go through the engine's thread.
    fn blocks(&self) -> Option<Arc<dyn DeviceBlocks>> {
        None
    }

    /// Copies bytes into a range of a block or slot, `[span.len]`.
    ///
    /// # Errors
    /// As [`Engine::read_block`].
    ///
    /// # Panics
    /// As [`Engine::read_block`].
    fn write_block(&mut self, span: BlockSpan, bytes: &[u8]) -> Result<(), EngineError>;

    /// Copies whole blocks or slots of a plane, `(from, to)`, in order.
    ///
    /// # Errors
    /// As [`Engine::read_block`].
    fn copy_blocks(
        &mut self,
        plane: KvPlane,
        pairs: &[(BlockIndex, BlockIndex)],
    ) -> Result<(), EngineError>;
}

/// An engine whose device accepts a step while it runs the one before, so that the device never
/// waits for the host.
///
/// At most [`STEPS_IN_FLIGHT_MAX`] steps are in flight; [`Engine::step`] is allowed only if none
/// is. A segment of the second step may end one token after its slot's history, if the first step
/// draws that token: the device has it before the host does. This holds only for slots whose draws
/// do not depend on earlier tokens ([`cleave_domain::SamplingParams::can_draw_ahead`]).
///
/// Block copies made meanwhile behave as if they ran before or after the steps in flight: callers
/// name no block that one of those steps writes.
pub trait Overlap {
    /// Begins a step. A step whose logits the host needs has ended when this returns.
    ///
    /// # Errors
    /// As [`Engine::step`]; a refused step is not collected. After `Device`, the caller collects
    /// the steps in flight before it begins another.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError>;

    /// Whether [`Overlap::collect`] would return without waiting: the oldest step has ended, or
    /// none is in flight. Polled often, so implementations only read a status.
    fn is_done(&mut self) -> bool;

    /// Waits for the oldest step that was begun and not collected, and returns its result.
    ///
    /// # Errors
    /// `Device`, `NotFinite` or `Lost` if the step failed, or the step before it, whose tokens it
    /// took.
    ///
    /// # Panics
    /// If no step is in flight.
    fn collect(&mut self) -> Result<StepResult, EngineError>;

    /// Time that the device was idle before the step that was collected last, if known.
    fn idle_before_step(&self) -> Option<Duration> {
        None
    }
}

/// Limit of steps in flight of an engine with [`Overlap`]: one runs, one waits on the device.
pub const STEPS_IN_FLIGHT_MAX: usize = 2;

/// Errors of an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The plan or request is impossible; nothing has changed.
    #[error("impossible step: {0}")]
    Plan(String),
    /// The same, because of one slot; the rest of the plan could run without it.
    #[error("impossible step: {0}: {1}")]
    Slot(SlotIndex, String),
    /// An operation on the device failed; others may still succeed.
    #[error("device failed: {0}")]
    Device(String),
    /// The device computed logits that are not finite; the model itself may do so with this input.
    #[error("the logits of {} are not finite", slot_list(.0))]
    NotFinite(Vec<SlotIndex>),
    /// The constraints of these slots cannot be enforced any further, for the same reason.
    #[error("the constraint of {} cannot be enforced any further: {error}", slot_list(.slots))]
    Constraint {
        /// At least one slot; its sequence cannot go on.
        slots: Vec<SlotIndex>,
        /// It says whether another engine could enforce them.
        error: ConstraintError,
    },
    /// The device failed permanently: no operation works on it any more in this process.
    #[error("device lost: {0}")]
    Lost(String),
}

impl EngineError {
    /// Slots whose sequences alone made a step fail, if known: the other sequences of the step can
    /// run again, from their history and the blocks that they had before it, and from a snapshot of
    /// their state if they have one.
    pub fn slots(&self) -> &[SlotIndex] {
        match self {
            Self::Slot(slot, _) => std::slice::from_ref(slot),
            Self::NotFinite(slots) | Self::Constraint { slots, .. } => slots,
            Self::Plan(_) | Self::Device(_) | Self::Lost(_) => &[],
        }
    }

    /// The failure of these constraints, `None` without one. An error has one reason: slots with
    /// another one than the first fail when the step runs again without these.
    pub(crate) fn of_constraints(failed: Vec<(SlotIndex, ConstraintError)>) -> Option<Self> {
        let (_, error) = failed.first()?.clone();
        let alike = failed.into_iter().filter(|(_, other)| *other == error);
        let slots = alike.map(|(slot, _)| slot).collect();
        Some(Self::Constraint { slots, error })
    }
}

fn slot_list(slots: &[SlotIndex]) -> String {
    let names: Vec<String> = slots.iter().map(ToString::to_string).collect();
    names.join(", ")
}
