//! Workers of a small world: their brains, their engines, and the packets between them.
//!
//! Owns: performing a worker brain's outputs, and S1 to S4. Never: decides anything that a brain
//! decides. Invariant: every frame that arrives is imported or discarded before the next input; a
//! frame is judged by its true writer, not by its header.

use super::apply::PropertyCheck;
use super::guard::MessageFate;
use super::state::{PendingNotice, SmallWorldMessage, SmallWorldPacket, SmallWorldState};
use super::transitions::PacketFault;
use super::worlds::SmallWorld;
use crate::body::{DeviceFaults, EngineOp, EngineOpResult, FrameCells};
use crate::engine::EngineCosts;
use crate::run::worker_index;
use crate::worker_effects::checksum;
use cleave_domain::{KvPlane, SplitMix64, WorkerRef};
use cleave_kv::handoff::HandoffDigest;
use cleave_kv::{BlockPart, Packet, PoolWriter};
use cleave_sched::{
    BlockExport, ExportOutcome, PayloadCondition, WorkerInput, WorkerNote, WorkerOutput,
};

/// Engine operations take no time; the world's `step` advances the clocks.
const NO_COSTS: EngineCosts = EngineCosts {
    step: 0,
    prefill_token: 0,
    decode_sequence: 0,
    context_token: 0,
    copy: 0,
    write_bytes: 1 << 20,
};

impl SmallWorldState {
    pub(super) fn feed_worker(
        &mut self,
        small: &SmallWorld,
        worker: usize,
        input: WorkerInput,
    ) -> PropertyCheck {
        let Some(input) = self.filter_input(small, worker, input) else {
            return Ok(());
        };
        let now = self.now;
        let process = self.worker_mut(worker);
        let at = now + process.skew;
        process.last_input_at = at;
        let Some(body) = &mut process.body else {
            return Ok(());
        };
        body.handle_input(at, input);
        let mut outputs = Vec::new();
        while let Some(output) = body.poll_output() {
            outputs.push(output);
        }
        body.brain.check();
        let mut answers = Vec::new();
        for output in outputs {
            answers.extend(self.forged_answer(small, &output));
            answers.extend(self.perform_worker_output(worker, output)?);
        }
        if let Some(body) = &self.workers[worker].body
            && let Some((handoff, part, _)) = &body.arriving
        {
            return Err(format!(
                "{} neither imports nor discards {handoff} {part:?}",
                body.worker
            ));
        }
        answers
            .into_iter()
            .try_for_each(|answer| self.feed_worker(small, worker, answer))
    }

    /// Performs an output; gives the answers that the brain is owed at once.
    pub(super) fn perform_worker_output(
        &mut self,
        worker: usize,
        output: WorkerOutput,
    ) -> Result<Vec<WorkerInput>, String> {
        let process = self.worker_mut(worker);
        let Some(body) = &mut process.body else {
            return Ok(Vec::new());
        };
        let me = body.worker;
        match output {
            WorkerOutput::Step(plan) => body.step(plan)?,
            WorkerOutput::Report { router: _, report } => {
                body.witness(&report)
                    .map_err(|problem| format!("S1: {problem}"))?;
                self.send_to_router(worker, SmallWorldMessage::Report(report));
            }
            WorkerOutput::Emit { handoff, emission } => {
                self.send_to_router(worker, SmallWorldMessage::Token(handoff, emission));
            }
            WorkerOutput::Export(export) => body.export(export)?,
            WorkerOutput::Send { to, packet } => {
                if let Packet::Seal(seal) = &packet {
                    body.sealed.insert(seal.handoff, to);
                }
                self.send(me, to, packet);
            }
            WorkerOutput::Import {
                handoff,
                part,
                block,
            } => body
                .import(handoff, part, block)
                .map_err(|problem| format!("S2: {problem}"))?,
            WorkerOutput::Discard { handoff, part } => {
                body.take_arrived_frame(handoff, part)?;
            }
            WorkerOutput::SwapOut {
                handoff,
                blocks,
                state,
            } => {
                let units = body.limits.capacity.units(&blocks, state).collect();
                body.swap(EngineOp::SwapOut { handoff, units })?
            }
            WorkerOutput::SwapIn {
                handoff,
                blocks,
                state,
            } => {
                let units = body.limits.capacity.units(&blocks, state).collect();
                body.swap(EngineOp::SwapIn { handoff, units })?
            }
            WorkerOutput::SwapDrop { handoff } => return Ok(body.swap_drop(handoff)),
            WorkerOutput::Forget { handoff } => {
                body.sealed.remove(&handoff);
                return Ok(body.forget(handoff));
            }
            WorkerOutput::Offload { .. }
            | WorkerOutput::SpillToDisk { .. }
            | WorkerOutput::Fetch { .. }
            | WorkerOutput::FetchStop { .. }
            | WorkerOutput::TierDrop { .. } => {
                return Err("a small world has no tiers below its pool".to_owned());
            }
            WorkerOutput::Drained => body.exiting = true,
            WorkerOutput::Note(WorkerNote::Pool {
                blocks_leaked,
                states_leaked,
                ..
            }) if blocks_leaked + states_leaked > 0 => {
                return Err(format!(
                    "{me} reports {blocks_leaked} leaked blocks and {states_leaked} leaked slots"
                ));
            }
            WorkerOutput::Note(_) => {}
        }
        Ok(Vec::new())
    }

    pub(super) fn engine(
        &mut self,
        small: &SmallWorld,
        worker: usize,
        device_faults: DeviceFaults,
    ) -> PropertyCheck {
        let now = self.now;
        let Some(body) = &mut self.worker_mut(worker).body else {
            return Ok(());
        };
        let me = body.worker;
        let begins = body.busy.is_none();
        body.begin_next_op(now, &NO_COSTS);
        let one_sided = small.writer == PoolWriter::Sender;
        if one_sided && begins && matches!(body.busy, Some((EngineOp::Export(_), _))) {
            // The one-sided write is in flight; it lands by a later transition.
            return Ok(());
        }
        let rng = &mut SplitMix64::new(0);
        let broken = match device_faults {
            DeviceFaults::None => 0,
            DeviceFaults::Failing => 1000,
        };
        let stepped = matches!(body.busy, Some((EngineOp::Step(_), _)));
        let done = body
            .finish_op(now, |_| 0, rng, broken)
            .map_err(|problem| format!("S4: {problem}"))?;
        if stepped {
            self.now = self.now + small.step;
        }
        match done {
            EngineOpResult::Answer(input) => self.feed_worker(small, worker, input)?,
            EngineOpResult::Send(export, payload) if one_sided => {
                self.land(&export, &payload)?;
                self.send_block(small, me, &export, payload)?;
            }
            EngineOpResult::Send(export, payload) => {
                self.send_block(small, me, &export, payload)?
            }
        }
        self.wake_due(small)
    }

    /// Sends a block as one frame. If the link is lost, the answer comes with the notice of the
    /// loss; a one-sided write, which is over now, is answered at once.
    pub(super) fn send_block(
        &mut self,
        small: &SmallWorld,
        me: WorkerRef,
        export: &BlockExport,
        payload: FrameCells,
    ) -> PropertyCheck {
        let part = BlockPart {
            plane: export.plane,
            ordinal: export.ordinal,
            offset: 0,
            len: payload.len() as u32 * 8,
        };
        let checksum = checksum(&payload);
        let packet = Packet::Frame {
            handoff: export.handoff,
            block: export.block,
            part,
            checksum,
        };
        let envelope = SmallWorldPacket {
            to: export.to,
            from: me,
            packet,
            payload,
            condition: PayloadCondition::Intact,
            written_for: Some((me, export.plane, export.block)),
        };
        let nowhere = self.send_envelope(envelope) == MessageFate::Lost;
        if nowhere && small.writer == PoolWriter::Receiver {
            return Ok(());
        }
        let Some(body) = &mut self.worker_mut(worker_index(me)).body else {
            return Ok(());
        };
        body.exporting.remove(&(export.handoff, export.unit()));
        let mut digest = HandoffDigest::default();
        digest.add_frame(part, checksum);
        let answer = export.answer(if nowhere {
            ExportOutcome::Dropped
        } else {
            ExportOutcome::Sent {
                digest: digest.value(),
                bytes: u64::from(part.len),
            }
        });
        self.feed_worker(small, worker_index(me), answer)
    }

    /// A one-sided write reaches the other worker's pool, if that life still runs.
    pub(super) fn land(&mut self, export: &BlockExport, payload: &FrameCells) -> PropertyCheck {
        if self.body(export.to).is_none() {
            return Ok(());
        }
        let body = self.worker_mut(worker_index(export.to)).body.as_mut();
        body.map_or(Ok(()), |body| body.written_into(export, payload))
    }

    pub(super) fn land_late(&mut self, index: usize) -> PropertyCheck {
        let late = self.late_writes.remove(index);
        self.land(&late.export, &late.payload)
    }

    // === from worker to worker ===

    pub(super) fn send(&mut self, from: WorkerRef, to: WorkerRef, packet: Packet) {
        self.send_envelope(SmallWorldPacket {
            to,
            from,
            packet,
            payload: Vec::new(),
            condition: PayloadCondition::Intact,
            written_for: None,
        });
    }

    pub(super) fn send_envelope(&mut self, envelope: SmallWorldPacket) -> MessageFate {
        let (from, to) = (envelope.from, envelope.to);
        if self.links_lost.contains(&(from, to)) {
            self.needs_timer |= envelope.is_about_writes();
            return MessageFate::Lost;
        }
        if self.body(to).is_none() {
            self.lose(from, to);
            self.notify_fenced(from, to);
            return MessageFate::Lost;
        }
        self.add_packet(envelope);
        MessageFate::Delivered
    }

    pub(super) fn arrive(
        &mut self,
        small: &SmallWorld,
        mut envelope: SmallWorldPacket,
    ) -> PropertyCheck {
        let (from, to) = (envelope.from, envelope.to);
        // The loss of the old connection is reported before the first packet of the new one.
        let news = PendingNotice::LinkLost {
            side: to,
            peer: from,
        };
        if self.notices.contains(&news) {
            self.notice(small, news)?;
        }
        if self.filter_packet(small, &mut envelope) == MessageFate::Lost {
            return Ok(());
        }
        let Some(body) = &mut self.worker_mut(worker_index(to)).body else {
            return Ok(());
        };
        if let Packet::Frame { handoff, part, .. } = &envelope.packet {
            body.arriving = Some((*handoff, *part, envelope.payload.clone()));
        }
        let input = WorkerInput::Arrived {
            from: envelope.from,
            packet: envelope.packet.clone(),
            condition: envelope.condition,
        };
        let before = body.imports();
        self.feed_worker(small, worker_index(to), input)?;
        let Some(body) = &self.workers[worker_index(to)].body else {
            return Ok(());
        };
        // The import is judged by the true writer and block, whatever the frame's header says.
        if let (Some((writer, plane, block)), Packet::Frame { handoff, .. }) =
            (envelope.written_for, &envelope.packet)
            && body.imports() > before
        {
            let meant = body.reserved_for(plane, block.block) == Some((*handoff, block.generation));
            if !meant || body.sender_of(*handoff) != Some(writer) {
                return Err(format!(
                    "S2: {} imports into {handoff} a frame that {writer} wrote for {}/{}",
                    body.worker, block.block, block.generation
                ));
            }
        }
        Ok(())
    }

    pub(super) fn go_astray(&mut self, small: &SmallWorld, at: usize, how: PacketFault) {
        let mut envelope = self.packets[at].envelope.clone();
        match how {
            PacketFault::Sender => {
                let others = (0..small.roles.len()).filter_map(|w| self.workers[w].body.as_ref());
                let mut others = others.map(|body| body.worker);
                let third_worker =
                    others.find(|worker| *worker != envelope.from && *worker != envelope.to);
                envelope.from = third_worker.unwrap_or(envelope.from);
            }
            PacketFault::Generation => {
                if let Packet::Frame { block, .. } = &mut envelope.packet {
                    block.generation.0 = block.generation.0.wrapping_sub(1);
                }
            }
            PacketFault::Block => {
                if let Packet::Frame { block, .. } = &mut envelope.packet {
                    block.block.0 = (block.block.0 + 1) % 3;
                }
            }
            PacketFault::Plane => {
                if let Packet::Frame { part, .. } = &mut envelope.packet {
                    part.plane = other_plane(part.plane);
                }
            }
        }
        if let Packet::Frame { block, part, .. } = &envelope.packet {
            envelope.written_for = Some((envelope.from, part.plane, *block));
        }
        self.add_packet(envelope);
    }
}

/// The plane that a frame is not of.
pub(super) fn other_plane(plane: KvPlane) -> KvPlane {
    match plane {
        KvPlane::Blocks => KvPlane::State,
        KvPlane::State => KvPlane::Blocks,
    }
}
