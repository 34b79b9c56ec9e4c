//! The outputs of a worker's brain, performed in a process.
//!
//! Owns: which part of the body each output goes to. Never: waits for one: engines, links and disks
//! have queues of their own.
//! Invariant: a report that frees a hand-off's blocks takes back the grant to write to them first.

use super::{WorkerDriver, WorkerEffects};
use crate::engine::{BlockImport, EngineWork};
use crate::spans::unit_span;
use crate::swap::{SwapDirection, SwapJob};
use crate::tier::OffloadJob;
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Emission, HandoffId, KvPlane, KvUnit, Report, RouterId,
    StepPlan, WindowTable, WorkerRef,
};
use cleave_fleet::FromWorker;
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{
    BlockExport, SnapshotPiece, StateFetch, TierLevel, WindowFetch, WorkerActions, WorkerNote,
};
use cleave_telemetry::{JsonField, log_ids};
use tracing::{Level, debug};

impl WorkerActions for WorkerDriver {
    type Outcome = ();

    fn step(&mut self, plan: StepPlan) {
        self.effects.engine.push(EngineWork::Step(plan));
    }

    fn report(&mut self, router: RouterId, report: Report) {
        self.effects.spans.report_sent(&report);
        self.effects.constraint_gate.reported(&report);
        self.effects.adapter_gate.reported(&report);
        if let Report::Refused { handoff, .. } | Report::MigrationAborted { handoff, .. } = &report
        {
            self.update_grants(|grants| grants.remove(*handoff));
        }
        self.send_to_router(router, FromWorker::Report(report));
    }

    fn emit(&mut self, handoff: HandoffId, emission: Emission) {
        self.effects.spans.token_emitted(handoff, &emission);
        let emitted = self.emitted.entry(handoff.flight.router()).or_default();
        emitted.push((handoff, emission));
    }

    fn forget(&mut self, handoff: HandoffId) {
        self.pending.extend(self.exports.forget(handoff));
        self.pending.extend(self.effects.engine.forget(handoff));
        self.update_grants(|grants| grants.remove(handoff));
    }

    fn drained(&mut self) {
        self.effects.drained.send_replace(true);
    }

    fn note(&mut self, note: WorkerNote) {
        let WorkerEffects { spans, name, .. } = &self.effects;
        if tracing::enabled!(target: "note", Level::DEBUG) {
            let handoff = note.handoff();
            let context = handoff.and_then(|handoff| spans.request_context(handoff));
            let (request_id, trace) = log_ids(context);
            debug!(
                target: "note",
                worker = name,
                request_id,
                trace_id = trace.map(display),
                note = %JsonField(&note)
            );
        }
        for observer in self.effects.observers() {
            observer.handle_note(&note);
        }
    }

    // === other workers ===

    fn export(&mut self, export: BlockExport) {
        self.exports.push(export);
        self.pump(export.to);
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) {
        self.send_packet(to, packet);
    }

    fn import(&mut self, handoff: HandoffId, part: BlockPart, block: BlockRef) {
        let arrived = self.payload_arriving.take();
        let payload = arrived.expect("the brain imports the frame that just arrived");
        self.effects.engine.push(EngineWork::Write(BlockImport {
            handoff,
            part,
            block,
            payload,
        }));
    }

    fn discard(&mut self, _: HandoffId, _: BlockPart) {
        drop(self.payload_arriving.take());
    }

    // === host memory for sequences ===

    fn swap_out(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        window: Option<WindowTable>,
        state: Option<BlockIndex>,
    ) {
        let units = self.capacity.units(&blocks, window.as_ref(), state);
        self.swap(handoff, SwapDirection::Out, units.collect());
    }

    fn swap_in(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        window: Option<WindowTable>,
        state: Option<BlockIndex>,
    ) {
        let units = self.capacity.units(&blocks, window.as_ref(), state);
        self.swap(handoff, SwapDirection::In, units.collect());
    }

    fn drop_swapped(&mut self, handoff: HandoffId) {
        self.pending
            .extend(self.effects.engine.drop_swapped(handoff));
    }

    // === tiers for the prefix cache ===

    fn offload(
        &mut self,
        content: BlockHash,
        plane: KvPlane,
        block: BlockIndex,
        pieces: Vec<SnapshotPiece>,
    ) {
        let piece = |piece: SnapshotPiece| {
            let ordinal = piece.ordinal;
            let span = unit_span(&self.capacity, block, KvUnit { plane, ordinal });
            (piece.content, span)
        };
        let parts = if pieces.is_empty() {
            vec![(content, unit_span(&self.capacity, block, KvUnit::block(0)))]
        } else {
            pieces.into_iter().map(piece).collect()
        };
        let offload = OffloadJob::new(content, parts);
        self.effects.engine.push(EngineWork::Offload(offload));
    }

    fn spill_to_disk(&mut self, content: BlockHash) {
        self.effects.engine.spill_to_disk(content);
    }

    fn fetch(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
        window: Option<WindowFetch>,
        state: Option<StateFetch>,
    ) {
        let (contents, blocks): (Vec<BlockHash>, Vec<BlockIndex>) = blocks.into_iter().unzip();
        let slot = state.as_ref().map(|state| state.slot);
        let table = window.as_ref().map(|window| &window.table);
        let span = |(unit, block)| unit_span(&self.capacity, block, unit);
        let units: Vec<_> = self.capacity.units(&blocks, table, slot).collect();
        let spans = units.into_iter().map(span);
        let pieces = window.into_iter().flat_map(|window| window.pieces);
        let pieces = pieces.chain(state.into_iter().flat_map(|state| state.pieces));
        let parts = contents.into_iter().chain(pieces).zip(spans).collect();
        self.effects.engine.fetch(handoff, parts);
    }

    fn stop_fetch(&mut self, handoff: HandoffId) {
        self.effects.engine.stop_fetch(handoff);
    }

    fn drop_from_tier(&mut self, content: BlockHash, tier: TierLevel) {
        self.effects.engine.drop_tier_block(content, tier);
    }
}

impl WorkerDriver {
    fn swap(&self, handoff: HandoffId, direction: SwapDirection, units: Vec<(KvUnit, BlockIndex)>) {
        let span = |(unit, block)| unit_span(&self.capacity, block, unit);
        let spans = units.into_iter().map(span).collect();
        let swap = SwapJob::new(handoff, spans, direction);
        self.effects.engine.push(EngineWork::Swap(swap));
    }
}
