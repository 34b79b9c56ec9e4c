//! Packets and blocks from worker to worker, with the faults of the links.

use crate::bit_flips::{self, MessageArrival};
use crate::log_text;
use crate::run::{ChaosEvent, ChaosRun, OneSidedWrite, PacketInFlight, worker_index};
use cleave_domain::{KvUnit, WorkerRef};
use cleave_kv::Packet;
use cleave_sched::{BlockExport, ExportOutcome, PayloadCondition, WorkerInput};
use cleave_testkit::{BlockFrames, FrameCells};
use std::time::Duration;

/// Whether the link took a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockSend {
    Sent,
    NoLink,
}

impl ChaosRun<'_> {
    /// Sends a block as frames; the brain is answered when the link has taken them. If the link is
    /// lost, the answer comes with the notice of the loss, or from the caller.
    pub(super) fn send_block(
        &mut self,
        me: WorkerRef,
        export: &BlockExport,
        payload: &FrameCells,
    ) -> BlockSend {
        // One frame or two.
        let count = payload.len() as u32;
        let cut = if count > 1 && self.rng.chance(300) {
            self.rng.count(1, count - 1)
        } else {
            count
        };
        let mut block = BlockFrames::of_cells(export, payload, cut as usize);
        let mut sent = None;
        for (packet, cells) in std::mem::take(&mut block.frames) {
            sent = self.send(me, export.to, packet, cells);
        }
        let Some(sent) = sent else {
            return BlockSend::NoLink;
        };
        let exported = Box::new(block.answer());
        self.schedule(sent, ChaosEvent::BlockSent { side: me, exported });
        BlockSend::Sent
    }

    /// Begins a one-sided write. Nothing stops it any more; its frame follows once it has landed.
    pub(super) fn write(&mut self, me: WorkerRef, export: BlockExport, payload: FrameCells) {
        let to = export.to;
        let bytes = payload.len() as u64 * 8;
        let wire = &self.world.links;
        let travel = self.net.send(me, to, bytes, self.now, wire, &mut self.rng);
        let damaged = !self.faults_over && self.rng.chance(wire.damage);
        let write = OneSidedWrite {
            from: me,
            epoch: self.net.epoch(worker_index(me), worker_index(to)),
            export,
            damaged: damaged.then(|| vec![None; payload.len()]),
            payload,
        };
        self.schedule(travel.arrives, ChaosEvent::WriteLands(Box::new(write)));
    }

    pub(crate) fn lands(&mut self, write: OneSidedWrite) -> Result<Option<String>, String> {
        let OneSidedWrite {
            from,
            epoch,
            export,
            payload,
            damaged,
        } = write;
        let to = export.to;
        let content = damaged.as_ref().unwrap_or(&payload);
        let receiver = self.workers[worker_index(to)].body.as_mut();
        if let Some(body) = receiver.filter(|body| body.worker == to) {
            body.written_into(&export, content)?;
        }
        self.count("one-sided writes");
        let words = format!("-> landed      {to} {} {}", export.handoff, export.unit());
        if self.body(from).is_none() {
            return Ok(Some(words));
        }
        let stands = self.net.epoch(worker_index(from), worker_index(to)) == epoch;
        if !stands || self.send_block(from, &export, &payload) == BlockSend::NoLink {
            let exported = Box::new(export.answer(ExportOutcome::Dropped));
            self.schedule(
                self.now,
                ChaosEvent::BlockSent {
                    side: from,
                    exported,
                },
            );
        }
        Ok(Some(words))
    }

    pub(crate) fn shipped(
        &mut self,
        side: WorkerRef,
        exported: WorkerInput,
    ) -> Result<Option<String>, String> {
        let WorkerInput::Exported {
            handoff,
            plane,
            ordinal,
            ..
        } = exported
        else {
            return Ok(None);
        };
        let unit = KvUnit { plane, ordinal };
        let process = &mut self.workers[worker_index(side)];
        let body = process.body.as_mut().filter(|body| body.worker == side);
        // The loss of the link answered this export already.
        if !body.is_some_and(|body| body.export_ends(handoff, unit)) {
            return Ok(None);
        }
        self.worker_input_if_alive(side, "shipped", exported)
    }

    /// Sends a packet; gives the time at which the link has taken it, or nothing without a link.
    pub(super) fn send(
        &mut self,
        me: WorkerRef,
        to: WorkerRef,
        packet: Packet,
        payload: FrameCells,
    ) -> Option<cleave_domain::Time> {
        if self.net.has_lost(me, to) {
            return None;
        }
        let (a, b) = (worker_index(me), worker_index(to));
        if self.body(to).is_none() || self.net.is_down(a, b, self.now) {
            self.lose(me, to);
            if self.body(to).is_none() {
                self.notify_fenced(me, to);
            }
            return None;
        }
        let bytes = payload.len() as u64 * 8 + 64;
        let wire = &self.world.links;
        let travel = self.net.send(me, to, bytes, self.now, wire, &mut self.rng);
        let mut envelope = PacketInFlight {
            from: me,
            to,
            epoch: self.net.epoch(a, b),
            packet,
            payload,
            condition: PayloadCondition::Intact,
        };
        // Faults apply in order: loss, a detected bit flip, undetected changes, a duplicate.
        if !self.faults_over && self.rng.chance(wire.loss) {
            self.count("packets lost");
            return Some(travel.sent);
        }
        let flips = self.world.flips;
        match self.transmit(envelope.packet, flips.packets) {
            MessageArrival::Received(packet) => envelope.packet = packet,
            MessageArrival::Damaged => {
                let epoch = envelope.epoch;
                let from = me;
                self.schedule(travel.arrives, ChaosEvent::LinkDamaged { from, to, epoch });
                return Some(travel.sent);
            }
        }
        self.change_seal(&mut envelope.packet);
        let wire = &self.world.links;
        if !self.faults_over && !envelope.payload.is_empty() && self.rng.chance(wire.damage) {
            self.count("frames damaged");
            envelope.condition = PayloadCondition::Damaged;
            envelope.payload.fill(None);
        }
        if let Packet::Frame { block, .. } = &mut envelope.packet
            && !self.faults_over
            && self.rng.chance(wire.stale_blocks)
        {
            let blocks_count = self.world.workers[0].capacity.blocks_count;
            if self.rng.chance(500) {
                block.generation.0 = block.generation.0.wrapping_sub(1);
            } else {
                block.block.0 = (block.block.0 + 1) % blocks_count;
            }
            self.counts
                .entry("frames astray")
                .and_modify(|n| *n += 1)
                .or_insert(1);
        }
        if self.rng.chance(wire.duplicates) {
            let later = travel.arrives + self.rng.micros(0, 20_000);
            self.schedule(later, ChaosEvent::Packet(Box::new(envelope.clone())));
        }
        self.schedule(travel.arrives, ChaosEvent::Packet(Box::new(envelope)));
        Some(travel.sent)
    }

    /// Flips a bit of a seal behind the link's check.
    fn change_seal(&mut self, packet: &mut Packet) {
        let rate = self.world.flips.seals;
        if let Packet::Seal(seal) = packet
            && !self.faults_over
            && bit_flips::is_hit(&mut self.flip_rng, rate)
            && let Some(other) = bit_flips::flip_seal(seal, &mut self.flip_rng)
        {
            *packet = other;
            self.count("seals changed");
        }
    }

    /// Schedules the notice that `side` lost `peer`.
    pub(crate) fn lose(&mut self, side: WorkerRef, peer: WorkerRef) {
        if self.net.mark_lost(side, peer) {
            let at = self.now + self.notice();
            self.schedule(at, ChaosEvent::LinkLost { side, peer });
        }
    }

    pub(crate) fn notice(&mut self) -> Duration {
        let most = self.world.links.notice_max.as_micros() as u64;
        self.rng.micros(1, most)
    }

    pub(crate) fn link_lost(
        &mut self,
        side: WorkerRef,
        peer: WorkerRef,
    ) -> Result<Option<String>, String> {
        if !self.net.take_loss(side, peer) || self.body(side).is_none() {
            return Ok(None);
        }
        self.feed_worker(worker_index(side), WorkerInput::LinkLost { peer })?;
        let body = self.workers[worker_index(side)].body.as_mut();
        let answers = body.map_or(Vec::new(), |body| body.drop_exports(peer));
        for answer in answers {
            self.feed_worker(worker_index(side), answer)?;
        }
        Ok(Some(format!("{} lost link   to {peer}", side.worker)))
    }

    pub(crate) fn packet(&mut self, envelope: PacketInFlight) -> Result<Option<String>, String> {
        let (from, to) = (envelope.from, envelope.to);
        let epoch = self.net.epoch(worker_index(from), worker_index(to));
        if self.body(to).is_none() || epoch != envelope.epoch {
            return Ok(None);
        }
        // The loss of the old connection is reported before the first packet of the new one.
        self.link_lost(to, from)?;
        let Some(body) = self.workers[worker_index(to)].body.as_mut() else {
            return Ok(None);
        };
        if let Packet::Frame { handoff, part, .. } = &envelope.packet {
            body.frame_arrives(*handoff, *part, envelope.payload);
        }
        let packet = envelope.packet;
        let words = format!(
            "{} arrived     {} from {}",
            to.worker,
            log_text::packet(&packet),
            from
        );
        let input = WorkerInput::Arrived {
            from,
            packet,
            condition: envelope.condition,
        };
        self.feed_worker(worker_index(to), input)?;
        Ok(Some(words))
    }
}
