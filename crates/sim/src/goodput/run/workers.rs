//! The workers of a goodput run: performs their brains' outputs, with the time that each takes.

use super::{GoodputEvent, GoodputWorld, SwapCopy};
use crate::goodput::links::{latency, link_price};
use crate::goodput::worker::{self, StepImprecision};
use cleave_domain::{HandoffId, LinkPrice, WorkerRef};
use cleave_kv::Packet;
use cleave_sched::{
    BlockExport, ImportOutcome, PayloadCondition, SwapOutcome, WorkerInput, WorkerOutput,
};
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
                self.perform_worker_output(place, output);
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
        let wake = worker.brain.deadline();
        if let Some(wake) = wake.filter(|wake| worker.wake.is_none_or(|planned| *wake < planned)) {
            worker.wake = Some(wake);
            let at = self.scenario.timer_time(wake.max(self.now));
            self.event_queue.push(at, GoodputEvent::WakeWorker(place));
        }
    }

    fn perform_worker_output(&mut self, place: usize, output: WorkerOutput) {
        let device = &self.devices[place];
        match output {
            WorkerOutput::Step(plan) => {
                let flaws = StepImprecision {
                    noise_permille: self.scenario.noise_permille,
                    grain: self.scenario.grain,
                };
                let worker = &mut self.workers[place];
                let (result, took) = worker.step(&plan, device, flaws);
                // A step in flight behind another begins when that one ends.
                worker.free_at = worker.free_at.max(self.now) + took;
                let at = worker.free_at;
                let event = GoodputEvent::Stepped {
                    worker: place,
                    result,
                    took,
                };
                self.event_queue.push(at, event);
            }
            WorkerOutput::Report { router, report } => {
                let event = GoodputEvent::ToRouter {
                    router: router.0 as usize - 1,
                    from: device.worker_ref(),
                    report,
                };
                let at = self.now + self.scenario.message_time;
                self.event_queue.push_in_order(at, event);
            }
            WorkerOutput::Emit { handoff, emission } => {
                let at = self.now + self.scenario.message_time;
                self.clients.receive_token(handoff, emission.index, at);
            }
            WorkerOutput::Export(export) => self.workers[place].exports_pending.push(export),
            WorkerOutput::Send { to, packet } => self.send_packet(place, to, packet),
            WorkerOutput::Import { handoff, part, .. } => {
                self.workers[place]
                    .answers_due
                    .push_back(WorkerInput::Imported {
                        handoff,
                        part,
                        outcome: ImportOutcome::Written,
                    });
            }
            WorkerOutput::SwapOut {
                handoff, blocks, ..
            } => {
                self.begin_swap_copy(place, SwapCopy::Out, handoff, blocks.len());
            }
            WorkerOutput::SwapIn {
                handoff, blocks, ..
            } => {
                self.begin_swap_copy(place, SwapCopy::In, handoff, blocks.len());
            }
            WorkerOutput::SwapDrop { handoff } => {
                self.workers[place].dropped_swaps.insert(handoff);
            }
            WorkerOutput::Offload { .. }
            | WorkerOutput::SpillToDisk { .. }
            | WorkerOutput::Fetch { .. }
            | WorkerOutput::FetchStop { .. }
            | WorkerOutput::TierDrop { .. } => unreachable!("these pools have no tiers"),
            // A frame without a payload leaves nothing to discard; copies in progress are answered
            // when they end.
            WorkerOutput::Discard { .. } | WorkerOutput::Forget { .. } => {}
            WorkerOutput::Drained => self.workers[place].has_drained = true,
            WorkerOutput::Note(note) => self.clients.worker_note(&note),
        }
    }

    pub(super) fn wake_worker(&mut self, place: usize) {
        let worker = &mut self.workers[place];
        if worker.wake.take_if(|at| *at <= self.now).is_none() || !worker.phase.is_running() {
            return;
        }
        // Many deadlines have moved later by the time of their wake-up.
        match worker.brain.deadline() {
            Some(at) if at > self.now => {
                worker.wake = Some(at);
                self.event_queue.push(at, GoodputEvent::WakeWorker(place));
            }
            Some(_) => self.handle_worker_input(place, WorkerInput::Woke),
            None => {}
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
            let packet = Packet::Frame {
                handoff: export.handoff,
                block: export.block,
                part: worker::block_frame(export, bytes),
                checksum: worker::checksum(export),
            };
            self.packet_arrives(place, from, packet);
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
