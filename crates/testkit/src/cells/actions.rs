//! The outputs of a brain, carried out on a worker of cells.
//!
//! Owns: operations of the engine, host memory and tiers, and the checks of reports and imports.
//! Never: sends; its world does. Invariant: an output that breaks a property is an error, which
//! begins with the name of the property where it has one.

use super::{CellWorker, EngineOp, FetchPart, FetchSource};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Emission, HandoffId, KvPlane, Report, RouterId, StepPlan,
    Time, WindowTable, WorkerRef,
};
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{
    BlockExport, SnapshotPiece, StateFetch, TierLevel, WindowFetch, WorkerActions, WorkerInput,
    WorkerNote, WorkerOutput,
};

/// The world around a worker of cells: what the worker's outputs reach beside its own engine.
/// `Err` is a violation.
pub trait CellHost {
    fn cells(&mut self) -> &mut CellWorker;
    fn now(&self) -> Time;

    /// Sends a report, which agrees with the reports before it.
    fn report(&mut self, router: RouterId, report: Report) -> Result<(), String>;
    fn emit(&mut self, handoff: HandoffId, emission: Emission) -> Result<(), String>;
    fn send(&mut self, to: WorkerRef, packet: Packet) -> Result<(), String>;
    /// Gives the brain an answer that it is owed at once.
    fn answer(&mut self, answer: WorkerInput) -> Result<(), String>;
    fn drained(&mut self) -> Result<(), String>;
    fn note(&mut self, note: WorkerNote) -> Result<(), String>;

    /// An operation was queued for the engine: [`CellWorker::last_queued`].
    fn queued(&mut self) {}

    /// A content is to be written to disk, which ends with [`CellWorker::disk_wrote`].
    fn spill(&mut self, content: BlockHash) -> Result<(), String> {
        Err(format!("{content} is to be written to a disk that is none"))
    }

    /// The disk is to read the blocks of a fetch, which ends with [`CellWorker::disk_read`].
    fn read_disk(&mut self, handoff: HandoffId, first: Option<BlockHash>) -> Result<(), String> {
        Err(format!(
            "{handoff} is to read {first:?} from a disk that is none"
        ))
    }
}

/// Carries out one output of the worker's brain.
///
/// # Errors
/// The violated property.
pub fn carry_out(host: &mut impl CellHost, output: WorkerOutput) -> Result<(), String> {
    output.perform(&mut CellActions(host))
}

struct CellActions<'a, H>(&'a mut H);

impl<H: CellHost> CellActions<'_, H> {
    /// Tells the world of the operation that was queued last, if the worker took it.
    fn queued(&mut self, taken: Result<(), String>) -> Result<(), String> {
        taken?;
        self.0.queued();
        Ok(())
    }

    fn answer_all(&mut self, answers: Vec<WorkerInput>) -> Result<(), String> {
        let mut answers = answers.into_iter();
        answers.try_for_each(|answer| self.0.answer(answer))
    }
}

impl<H: CellHost> WorkerActions for CellActions<'_, H> {
    type Outcome = Result<(), String>;

    fn step(&mut self, plan: StepPlan) -> Result<(), String> {
        let taken = self.0.cells().step(plan);
        self.queued(taken)
    }

    fn report(&mut self, router: RouterId, report: Report) -> Result<(), String> {
        let witnessed = self.0.cells().witness(&report);
        witnessed.map_err(|problem| format!("S1: {problem}"))?;
        self.0.report(router, report)
    }

    fn emit(&mut self, handoff: HandoffId, emission: Emission) -> Result<(), String> {
        self.0.emit(handoff, emission)
    }

    fn forget(&mut self, handoff: HandoffId) -> Result<(), String> {
        let answers = self.0.cells().forget(handoff);
        self.answer_all(answers)
    }

    fn drained(&mut self) -> Result<(), String> {
        self.0.drained()
    }

    fn note(&mut self, note: WorkerNote) -> Result<(), String> {
        if let WorkerNote::Pool {
            blocks_leaked,
            states_leaked,
            windows_leaked,
            ..
        } = note
            && blocks_leaked + states_leaked + windows_leaked > 0
        {
            let me = self.0.cells().worker;
            return Err(format!(
                "{me} reports {blocks_leaked} leaked blocks, {states_leaked} leaked slots and \
                 {windows_leaked} leaked blocks of windows"
            ));
        }
        self.0.note(note)
    }

    fn export(&mut self, export: BlockExport) -> Result<(), String> {
        let taken = self.0.cells().export(export);
        self.queued(taken)
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) -> Result<(), String> {
        if let Packet::Seal(seal) = &packet {
            self.0.cells().sealed.insert(seal.handoff, to);
        }
        self.0.send(to, packet)
    }

    fn import(
        &mut self,
        handoff: HandoffId,
        part: BlockPart,
        block: BlockRef,
    ) -> Result<(), String> {
        let taken = self.0.cells().import(handoff, part, block);
        self.queued(taken.map_err(|problem| format!("S2: {problem}")))
    }

    fn discard(&mut self, handoff: HandoffId, part: BlockPart) -> Result<(), String> {
        self.0.cells().take_arrived_frame(handoff, part).map(drop)
    }

    fn swap_out(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        window: Option<WindowTable>,
        state: Option<BlockIndex>,
    ) -> Result<(), String> {
        let cells = self.0.cells();
        let units = cells.limits.capacity.units(&blocks, window.as_ref(), state);
        let units = units.collect();
        let taken = cells.swap(EngineOp::SwapOut { handoff, units });
        self.queued(taken)
    }

    fn swap_in(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        window: Option<WindowTable>,
        state: Option<BlockIndex>,
    ) -> Result<(), String> {
        let cells = self.0.cells();
        let units = cells.limits.capacity.units(&blocks, window.as_ref(), state);
        let units = units.collect();
        let taken = cells.swap(EngineOp::SwapIn { handoff, units });
        self.queued(taken)
    }

    fn drop_swapped(&mut self, handoff: HandoffId) -> Result<(), String> {
        let answers = self.0.cells().drop_swapped(handoff);
        self.answer_all(answers)
    }

    fn offload(
        &mut self,
        content: BlockHash,
        plane: KvPlane,
        block: BlockIndex,
        pieces: Vec<SnapshotPiece>,
    ) -> Result<(), String> {
        let taken = self.0.cells().offload(content, plane, block, &pieces);
        self.queued(taken)
    }

    fn spill_to_disk(&mut self, content: BlockHash) -> Result<(), String> {
        self.0.spill(content)
    }

    fn fetch(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
        window: Option<WindowFetch>,
        state: Option<StateFetch>,
    ) -> Result<(), String> {
        let now = self.0.now();
        let (contents, blocks): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
        let slot = state.as_ref().map(|state| state.slot);
        let table = window.as_ref().map(|window| &window.table);
        let capacity = &self.0.cells().limits.capacity;
        let units: Vec<_> = capacity.units(&blocks, table, slot).collect();
        let pieces = window.into_iter().flat_map(|window| window.pieces);
        let pieces = pieces.chain(state.into_iter().flat_map(|state| state.pieces));
        let parts = contents.into_iter().chain(pieces).zip(units);
        let parts = parts.map(|(content, (unit, block))| FetchPart {
            content,
            unit,
            block,
        });
        let parts: Vec<FetchPart> = parts.collect();
        let first = parts.first().map(|part| part.content);
        match self.0.cells().fetch(now, handoff, parts)? {
            FetchSource::Host => self.queued(Ok(())),
            FetchSource::Disk => self.0.read_disk(handoff, first),
        }
    }

    fn stop_fetch(&mut self, handoff: HandoffId) -> Result<(), String> {
        let now = self.0.now();
        let answer = self.0.cells().stop_fetch(now, handoff);
        self.answer_all(answer.into_iter().collect())
    }

    fn drop_from_tier(&mut self, content: BlockHash, tier: TierLevel) -> Result<(), String> {
        self.0.cells().drop_from_tier(content, tier)
    }
}
