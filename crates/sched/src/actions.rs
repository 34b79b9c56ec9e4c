//! The outputs of a worker's brain as methods, so that no two bodies list them on their own.
//!
//! Owns: the only `match` over all of [`WorkerOutput`] that performs them. Never: performs one;
//! bodies do. Invariant: an output that is added here fails to compile until every body performs
//! it.

use crate::{BlockExport, SnapshotPiece, StateFetch, WindowFetch, WorkerNote, WorkerOutput};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Emission, HandoffId, KvPlane, Report, RouterId, StepPlan,
    WindowTable, WorkerRef,
};
use cleave_kv::{BlockPart, Packet, TierLevel};

/// A body: it performs the outputs of a worker's brain. [`WorkerOutput`] says what each asks for.
///
/// The methods that have a body here are for outputs that a brain never emits under some limits or
/// orders: about other workers, if it never gets a hand-off; about host memory, if `swap_blocks` is
/// 0; about tiers, if `host_blocks` is 0. They panic.
pub trait WorkerActions {
    /// The result of performing one output, such as `()`.
    type Outcome;

    fn step(&mut self, plan: StepPlan) -> Self::Outcome;
    fn report(&mut self, router: RouterId, report: Report) -> Self::Outcome;
    fn emit(&mut self, handoff: HandoffId, emission: Emission) -> Self::Outcome;
    fn forget(&mut self, handoff: HandoffId) -> Self::Outcome;
    fn drained(&mut self) -> Self::Outcome;
    fn note(&mut self, note: WorkerNote) -> Self::Outcome;

    // === other workers ===

    fn export(&mut self, export: BlockExport) -> Self::Outcome {
        absent(&export)
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) -> Self::Outcome {
        absent(&(to, packet))
    }

    fn import(&mut self, handoff: HandoffId, part: BlockPart, block: BlockRef) -> Self::Outcome {
        absent(&(handoff, part, block))
    }

    fn discard(&mut self, handoff: HandoffId, part: BlockPart) -> Self::Outcome {
        absent(&(handoff, part))
    }

    // === host memory for sequences ===

    fn swap_out(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        window: Option<WindowTable>,
        state: Option<BlockIndex>,
    ) -> Self::Outcome {
        absent(&(handoff, blocks, window, state))
    }

    fn swap_in(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        window: Option<WindowTable>,
        state: Option<BlockIndex>,
    ) -> Self::Outcome {
        absent(&(handoff, blocks, window, state))
    }

    fn drop_swapped(&mut self, handoff: HandoffId) -> Self::Outcome {
        absent(&handoff)
    }

    // === tiers for the prefix cache ===

    fn offload(
        &mut self,
        content: BlockHash,
        plane: KvPlane,
        block: BlockIndex,
        pieces: Vec<SnapshotPiece>,
    ) -> Self::Outcome {
        absent(&(content, plane, block, pieces))
    }

    fn spill_to_disk(&mut self, content: BlockHash) -> Self::Outcome {
        absent(&content)
    }

    fn fetch(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
        window: Option<WindowFetch>,
        state: Option<StateFetch>,
    ) -> Self::Outcome {
        absent(&(handoff, blocks, window, state))
    }

    fn stop_fetch(&mut self, handoff: HandoffId) -> Self::Outcome {
        absent(&handoff)
    }

    fn drop_from_tier(&mut self, content: BlockHash, tier: TierLevel) -> Self::Outcome {
        absent(&(content, tier))
    }
}

fn absent(of: &impl std::fmt::Debug) -> ! {
    panic!("the brain asks its body for what the limits exclude: {of:?}")
}

impl WorkerOutput {
    /// Has the body perform this output.
    pub fn perform<A: WorkerActions>(self, body: &mut A) -> A::Outcome {
        match self {
            Self::Step(plan) => body.step(plan),
            Self::Report { router, report } => body.report(router, report),
            Self::Emit { handoff, emission } => body.emit(handoff, emission),
            Self::Export(export) => body.export(export),
            Self::Send { to, packet } => body.send(to, packet),
            Self::Import {
                handoff,
                part,
                block,
            } => body.import(handoff, part, block),
            Self::Discard { handoff, part } => body.discard(handoff, part),
            Self::SwapOut {
                handoff,
                blocks,
                window,
                state,
            } => body.swap_out(handoff, blocks, window, state),
            Self::SwapIn {
                handoff,
                blocks,
                window,
                state,
            } => body.swap_in(handoff, blocks, window, state),
            Self::SwapDrop { handoff } => body.drop_swapped(handoff),
            Self::Offload {
                content,
                plane,
                block,
                pieces,
            } => body.offload(content, plane, block, pieces),
            Self::SpillToDisk { content } => body.spill_to_disk(content),
            Self::Fetch {
                handoff,
                blocks,
                window,
                state,
            } => body.fetch(handoff, blocks, window, state),
            Self::FetchStop { handoff } => body.stop_fetch(handoff),
            Self::TierDrop { content, place } => body.drop_from_tier(content, place),
            Self::Forget { handoff } => body.forget(handoff),
            Self::Drained => body.drained(),
            Self::Note(note) => body.note(note),
        }
    }
}
