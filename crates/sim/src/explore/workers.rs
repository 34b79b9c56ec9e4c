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
use crate::run::worker_index;
use cleave_domain::{Emission, HandoffId, KvPlane, Report, RouterId, SplitMix64, Time, WorkerRef};
use cleave_kv::{Packet, PoolWriter};
use cleave_sched::{BlockExport, ExportOutcome, PayloadCondition, WorkerInput, WorkerNote};
use cleave_testkit::{
    BlockFrames, CellHost, CellWorker, EngineCosts, EngineOp, EngineOpResult, FrameCells, carry_out,
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
        while let Some(output) = body.brain.poll() {
            outputs.push(output);
        }
        body.brain.check();
        let mut answers = Vec::new();
        for output in outputs {
            answers.extend(self.forged_answer(small, &output));
            if self.workers[worker].body.is_none() {
                continue;
            }
            let mut host = SmallWorldHost {
                state: self,
                worker,
                answers: &mut answers,
            };
            carry_out(&mut host, output)?;
        }
        if let Some(body) = &self.workers[worker].body {
            body.check_frame_answered()?;
        }
        answers
            .into_iter()
            .try_for_each(|answer| self.feed_worker(small, worker, answer))
    }

    pub(super) fn engine(
        &mut self,
        small: &SmallWorld,
        worker: usize,
        broken_permille: u32,
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
        let stepped = matches!(body.busy, Some((EngineOp::Step(_), _)));
        let done = body
            .finish_op(now, |_| 0, rng, broken_permille)
            .map_err(|problem| format!("S4: {problem}"))?;
        if stepped {
            self.now = self.now + small.step;
        }
        match done {
            EngineOpResult::Answer(input) => self.feed_worker(small, worker, input)?,
            EngineOpResult::Send(export, payload) if one_sided => {
                self.land(&export, &payload)?;
                self.send_block(small, me, &export, &payload)?;
            }
            EngineOpResult::Send(export, payload) => {
                self.send_block(small, me, &export, &payload)?
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
        payload: &FrameCells,
    ) -> PropertyCheck {
        let mut block = BlockFrames::of_cells(export, payload, payload.len());
        let Some((packet, payload)) = block.frames.pop() else {
            return Err(format!("{export:?} has no cell"));
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
        body.export_ends(export.handoff, export.unit());
        let answer = if nowhere {
            export.answer(ExportOutcome::Dropped)
        } else {
            block.answer()
        };
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
            body.frame_arrives(*handoff, *part, envelope.payload.clone());
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

/// A worker of a small world, as its brain's outputs see it.
struct SmallWorldHost<'a> {
    state: &'a mut SmallWorldState,
    worker: usize,
    /// Answers that the brain is owed at once.
    answers: &'a mut Vec<WorkerInput>,
}

impl CellHost for SmallWorldHost<'_> {
    fn cells(&mut self) -> &mut CellWorker {
        let body = self.state.worker_mut(self.worker).body.as_mut();
        body.expect("only a running worker has outputs")
    }

    fn now(&self) -> Time {
        self.state.now
    }

    fn report(&mut self, _: RouterId, report: Report) -> PropertyCheck {
        let message = SmallWorldMessage::Report(report);
        self.state.send_to_router(self.worker, message);
        Ok(())
    }

    fn emit(&mut self, handoff: HandoffId, emission: Emission) -> PropertyCheck {
        let message = SmallWorldMessage::Token(handoff, emission);
        self.state.send_to_router(self.worker, message);
        Ok(())
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) -> PropertyCheck {
        let me = self.cells().worker;
        self.state.send(me, to, packet);
        Ok(())
    }

    fn answer(&mut self, answer: WorkerInput) -> PropertyCheck {
        self.answers.push(answer);
        Ok(())
    }

    fn drained(&mut self) -> PropertyCheck {
        self.cells().exiting = true;
        Ok(())
    }

    fn note(&mut self, _: WorkerNote) -> PropertyCheck {
        Ok(())
    }
}

/// The plane that a frame is not of.
pub(super) fn other_plane(plane: KvPlane) -> KvPlane {
    match plane {
        KvPlane::Blocks => KvPlane::State,
        KvPlane::State | KvPlane::Window => KvPlane::Blocks,
    }
}
