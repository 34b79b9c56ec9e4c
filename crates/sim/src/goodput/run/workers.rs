//! The workers of a goodput run: performs their brains' outputs, with the time that each takes.

use super::{GoodputEvent, GoodputWorld, SwapCopy};
use crate::goodput::links::{latency, link_price};
use crate::goodput::worker::StepImprecision;
use cleave_domain::{
    BlockIndex, BlockRef, Emission, HandoffId, LinkPrice, Report, RouterId, StepPlan, WindowTable,
    WorkerRef,
};
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{
    BlockExport, ImportOutcome, PayloadCondition, SwapOutcome, WorkerActions, WorkerInput,
    WorkerNote,
};
use cleave_testkit::BlockFrames;
use std::sync::Arc;
use std::time::Duration;

impl GoodputWorld<'_> {
    pub(crate) fn handle_worker_input(&mut self, place: usize, input: WorkerInput) {
        if !self.workers[place].phase.is_running() {
            return;
        }
        // Answers that outputs cause at once are inputs too, before anything else happens.
        let mut next = Some(input);
        while let Some(input) = next {
            self.workers[place].brain.handle(self.now, input);
            while let Some(output) = self.workers[place].brain.poll() {
                output.perform(&mut GoodputBody { world: self, place });
            }
            next = self.workers[place].answers_due.pop_front();
        }
        if std::mem::take(&mut self.workers[place].has_drained) {
            return self.gone(place);
        }
        if !self.workers[place].exports_pending.is_empty() {
            self.send_blocks(place);
        }
        let worker = &mut self.workers[place];
        if let Some(wake) = worker.wake.plan(worker.brain.deadline()) {
            let at = self.scenario.timer_time(wake.max(self.now));
            self.event_queue.push(at, GoodputEvent::WakeWorker(place));
        }
    }

    pub(super) fn wake_worker(&mut self, place: usize) {
        let worker = &mut self.workers[place];
        if !worker.wake.take_due(self.now) || !worker.phase.is_running() {
            return;
        }
        // Many deadlines have moved later by the time of their wake-up.
        let deadline = worker.brain.deadline();
        if deadline.is_some_and(|at| at <= self.now) {
            self.handle_worker_input(place, WorkerInput::Woke);
        } else if let Some(at) = worker.wake.plan(deadline) {
            self.event_queue.push(at, GoodputEvent::WakeWorker(place));
        }
    }

    pub(super) fn block_bytes(&self, place: usize) -> u32 {
        self.devices[place].limits.capacity.block_bytes
    }

    /// Sends the blocks exported by one input, as one transfer for each hand-off.
    fn send_blocks(&mut self, place: usize) {
        let device = &self.devices[place];
        let pending = std::mem::take(&mut self.workers[place].exports_pending);
        for exports in pending.chunk_by(|a, b| (a.handoff, a.to) == (b.handoff, b.to)) {
            let to = exports[0].to.worker;
            let worker = self.worker_index[&to];
            let bytes = u64::from(self.block_bytes(place)) * exports.len() as u64;
            let price = link_price(device, to);
            let (left, arrives) = self.links.transfer(place, worker, price, bytes, self.now);
            let exports: Arc<[BlockExport]> = exports.into();
            let shipped = GoodputEvent::BlocksSent {
                worker: place,
                exports: Arc::clone(&exports),
            };
            let frames = GoodputEvent::Frames {
                worker,
                from: device.worker_ref(),
                exports,
            };
            self.event_queue.push(left, shipped);
            self.event_queue.push(arrives, frames);
        }
    }

    pub(super) fn blocks_arrive(&mut self, place: usize, from: WorkerRef, exports: &[BlockExport]) {
        // A lost link delivers nothing more.
        if !self.workers[self.worker_index[&from.worker]]
            .phase
            .is_running()
        {
            return;
        }
        let bytes = self.block_bytes(place);
        for export in exports {
            for (packet, _) in BlockFrames::blank(export, bytes).frames {
                self.packet_arrives(place, from, packet);
            }
        }
    }

    fn send_packet(&mut self, place: usize, to: WorkerRef, packet: Packet) {
        let device = &self.devices[place];
        let event = GoodputEvent::Packet {
            worker: self.worker_index[&to.worker],
            from: device.worker_ref(),
            packet,
        };
        let takes = latency(link_price(device, to.worker));
        self.event_queue.push(self.now + takes, event);
    }

    pub(super) fn packet_arrives(&mut self, place: usize, from: WorkerRef, packet: Packet) {
        if !self.workers[self.worker_index[&from.worker]]
            .phase
            .is_running()
        {
            return;
        }
        let input = WorkerInput::Arrived {
            from,
            packet,
            condition: PayloadCondition::Intact,
        };
        self.handle_worker_input(place, input);
    }

    fn begin_swap_copy(&mut self, place: usize, copy: SwapCopy, handoff: HandoffId, blocks: usize) {
        let bytes = u64::from(self.block_bytes(place)) * blocks as u64;
        let host: LinkPrice = self.devices[place].host_link;
        let took = cleave_planner::predict_link(&host, bytes);
        self.workers[place].dropped_swaps.remove(&handoff);
        let event = GoodputEvent::Swapped {
            worker: place,
            copy,
            handoff,
            took,
        };
        self.event_queue.push(self.now + took, event);
    }

    pub(super) fn finish_swap_copy(
        &mut self,
        place: usize,
        copy: SwapCopy,
        handoff: HandoffId,
        took: Duration,
    ) {
        let outcome = if self.workers[place].dropped_swaps.remove(&handoff) {
            SwapOutcome::Dropped
        } else {
            SwapOutcome::Copied
        };
        let input = match copy {
            SwapCopy::Out => WorkerInput::SwappedOut {
                handoff,
                outcome,
                took,
            },
            SwapCopy::In => WorkerInput::SwappedIn {
                handoff,
                outcome,
                took,
            },
        };
        self.handle_worker_input(place, input);
    }
}

/// The body of a worker. Its pool has no tiers, and a frame no payload.
struct GoodputBody<'g, 'a> {
    world: &'g mut GoodputWorld<'a>,
    place: usize,
}

impl WorkerActions for GoodputBody<'_, '_> {
    type Outcome = ();

    fn step(&mut self, plan: StepPlan) {
        let world = &mut *self.world;
        let flaws = StepImprecision {
            noise_permille: world.scenario.noise_permille,
            grain: world.scenario.grain,
        };
        let worker = &mut world.workers[self.place];
        let (result, took) = worker.step(&plan, &world.devices[self.place], flaws);
        // A step in flight behind another begins when that one ends.
        worker.free_at = worker.free_at.max(world.now) + took;
        let event = GoodputEvent::Stepped {
            worker: self.place,
            result,
            took,
        };
        world.event_queue.push(worker.free_at, event);
    }

    fn report(&mut self, router: RouterId, report: Report) {
        self.world.give_adapter_back(self.place, &report);
        self.world
            .send_report(self.place, router.0 as usize - 1, report);
    }

    fn emit(&mut self, handoff: HandoffId, emission: Emission) {
        let at = self.world.now + self.world.scenario.message_time;
        self.world
            .clients
            .receive_token(handoff, emission.index, at);
    }

    /// Copies in progress are answered when they end.
    fn forget(&mut self, _: HandoffId) {}

    fn drained(&mut self) {
        self.world.workers[self.place].has_drained = true;
    }

    fn note(&mut self, note: WorkerNote) {
        self.world.clients.worker_note(&note);
    }

    fn export(&mut self, export: BlockExport) {
        let worker = &mut self.world.workers[self.place];
        worker.exports_pending.push(export);
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) {
        self.world.send_packet(self.place, to, packet);
    }

    fn import(&mut self, handoff: HandoffId, part: BlockPart, _: BlockRef) {
        let worker = &mut self.world.workers[self.place];
        worker.answers_due.push_back(WorkerInput::Imported {
            handoff,
            part,
            outcome: ImportOutcome::Written,
        });
    }

    fn discard(&mut self, _: HandoffId, _: BlockPart) {}

    fn swap_out(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        _: Option<WindowTable>,
        _: Option<BlockIndex>,
    ) {
        let count = blocks.len();
        self.world
            .begin_swap_copy(self.place, SwapCopy::Out, handoff, count);
    }

    fn swap_in(
        &mut self,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        _: Option<WindowTable>,
        _: Option<BlockIndex>,
    ) {
        let count = blocks.len();
        self.world
            .begin_swap_copy(self.place, SwapCopy::In, handoff, count);
    }

    fn drop_swapped(&mut self, handoff: HandoffId) {
        self.world.workers[self.place].dropped_swaps.insert(handoff);
    }
}
