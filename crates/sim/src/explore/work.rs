//! What workers of a small world do: their brains, their engines, and the packets between them.
//!
//! Owns: carrying out what a worker's brain says, and S1 to S4. Never: decides anything that a brain
//! decides. Invariant: every frame that arrives is imported or discarded before anything else is
//! heard; what a frame says of itself is not believed, but who wrote it in truth.

use super::guard::Heard;
use super::happen::Outcome;
use super::moves::Astray;
use super::small::Small;
use super::state::{Notice, Parcel, State, Word};
use crate::body::{Done, Luck, Op, Payload};
use crate::dice::Dice;
use crate::engine::Price;
use crate::run::index;
use crate::talk::checksum;
use cleave_domain::WorkerRef;
use cleave_kv::handoff::Digest;
use cleave_kv::{BlockPart, Packet, Writer};
use cleave_sched::{Condition, Export, ExportOutcome, Input, Note, Output};

/// Nothing costs time but what the world says.
const FREE: Price = Price {
    step: 0,
    prefill_token: 0,
    decode_sequence: 0,
    context_token: 0,
    copy: 0,
    write_bytes: 1 << 20,
};

impl State {
    pub(super) fn worker_hears(&mut self, small: &Small, worker: usize, input: Input) -> Outcome {
        let Some(input) = self.fact_heard(small, worker, input) else {
            return Ok(());
        };
        let now = self.now;
        let seat = self.seat(worker);
        let at = now + seat.skew;
        seat.heard = at;
        let Some(body) = &mut seat.body else {
            return Ok(());
        };
        body.hear(at, input);
        let mut outputs = Vec::new();
        while let Some(output) = body.say() {
            outputs.push(output);
        }
        body.brain.check();
        let mut answers = Vec::new();
        for output in outputs {
            answers.extend(self.said(small, &output));
            answers.extend(self.worker_says(worker, output)?);
        }
        if let Some(body) = &self.seats[worker].body
            && let Some((handoff, part, _)) = &body.arriving
        {
            return Err(format!("{} leaves {handoff} {part:?} lying", body.me));
        }
        answers
            .into_iter()
            .try_for_each(|answer| self.worker_hears(small, worker, answer))
    }

    /// Carries out an output; gives the answers that the brain is owed at once.
    pub(super) fn worker_says(
        &mut self,
        worker: usize,
        output: Output,
    ) -> Result<Vec<Input>, String> {
        let seat = self.seat(worker);
        let Some(body) = &mut seat.body else {
            return Ok(Vec::new());
        };
        let me = body.me;
        match output {
            Output::Step(plan) => body.step(plan)?,
            Output::Tell { router: _, report } => {
                body.witness(&report)
                    .map_err(|what| format!("S1: {what}"))?;
                self.say_to_router(worker, Word::Report(report));
            }
            Output::Emit { handoff, emission } => {
                self.say_to_router(worker, Word::Token(handoff, emission));
            }
            Output::Export(export) => body.export(export)?,
            Output::Send { to, packet } => {
                if let Packet::Seal(seal) = &packet {
                    body.sealed.insert(seal.handoff, to);
                }
                self.send(me, to, packet);
            }
            Output::Import {
                handoff,
                part,
                block,
            } => body
                .import(handoff, part, block)
                .map_err(|what| format!("S2: {what}"))?,
            Output::Discard { handoff, part } => {
                body.take_arrived(handoff, part)?;
            }
            Output::SwapOut { handoff, blocks } => body.swap(Op::SwapOut { handoff, blocks })?,
            Output::SwapIn { handoff, blocks } => body.swap(Op::SwapIn { handoff, blocks })?,
            Output::SwapDrop { handoff } => return Ok(body.swap_drop(handoff)),
            Output::Forget { handoff } => {
                body.sealed.remove(&handoff);
                return Ok(body.forget(handoff));
            }
            Output::Shelve { .. }
            | Output::WriteOn { .. }
            | Output::Fetch { .. }
            | Output::FetchStop { .. }
            | Output::TierDrop { .. } => {
                return Err("something is kept below a small world's pool".to_owned());
            }
            Output::Drained => body.exiting = true,
            Output::Note(Note::Pool { blocks_leaked, .. }) if blocks_leaked > 0 => {
                return Err(format!("{me} says that {blocks_leaked} blocks leaked"));
            }
            Output::Note(_) => {}
        }
        Ok(Vec::new())
    }

    pub(super) fn engine(&mut self, small: &Small, worker: usize, luck: Luck) -> Outcome {
        let now = self.now;
        let Some(body) = &mut self.seat(worker).body else {
            return Ok(());
        };
        let me = body.me;
        let begins = body.busy.is_none();
        body.begin(now, &FREE);
        let one_sided = small.writer == Writer::Sender;
        if one_sided && begins && matches!(body.busy, Some((Op::Export(_), _))) {
            // The write is under way, and lands when it lands.
            return Ok(());
        }
        let dice = &mut Dice::new(0);
        let broken = match luck {
            Luck::Well => 0,
            Luck::Broken => 1000,
        };
        let stepped = matches!(body.busy, Some((Op::Step(_), _)));
        let done = body
            .finish(now, |_| 0, (dice, broken))
            .map_err(|what| format!("S4: {what}"))?;
        if stepped {
            self.now = self.now + small.step;
        }
        match done {
            Done::Hear(input) => self.worker_hears(small, worker, input)?,
            Done::Ship(export, payload) if one_sided => {
                self.land(&export, &payload)?;
                self.ship(small, me, &export, payload)?;
            }
            Done::Ship(export, payload) => self.ship(small, me, &export, payload)?,
        }
        self.wake_due(small)
    }

    /// Sends a block as one frame. If the link is gone the answer comes with the news of that; that of a
    /// one-sided write, which is over now, comes at once.
    pub(super) fn ship(
        &mut self,
        small: &Small,
        me: WorkerRef,
        export: &Export,
        payload: Payload,
    ) -> Outcome {
        let part = BlockPart {
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
        let parcel = Parcel {
            to: export.to,
            from: me,
            packet,
            payload,
            condition: Condition::Intact,
            truth: Some((me, export.block)),
        };
        let nowhere = self.send_parcel(parcel) == Heard::No;
        if nowhere && small.writer == Writer::Receiver {
            return Ok(());
        }
        let Some(body) = &mut self.seat(index(me)).body else {
            return Ok(());
        };
        body.exporting.remove(&(export.handoff, export.ordinal));
        let mut digest = Digest::default();
        digest.add(part, checksum);
        let answer = export.answer(match nowhere {
            true => ExportOutcome::Dropped,
            false => ExportOutcome::Sent {
                digest: digest.value(),
                bytes: u64::from(part.len),
            },
        });
        self.worker_hears(small, index(me), answer)
    }

    /// A one-sided write reaches the other worker's pool, if that life still has it.
    pub(super) fn land(&mut self, export: &Export, payload: &Payload) -> Outcome {
        if self.body(export.to).is_none() {
            return Ok(());
        }
        let body = self.seat(index(export.to)).body.as_mut();
        body.map_or(Ok(()), |body| {
            body.written_into(export.handoff, export.block, payload)
        })
    }

    pub(super) fn land_late(&mut self, index: usize) -> Outcome {
        let late = self.late.remove(index);
        self.land(&late.export, &late.payload)
    }

    // === from worker to worker ===

    pub(super) fn send(&mut self, from: WorkerRef, to: WorkerRef, packet: Packet) {
        self.send_parcel(Parcel {
            to,
            from,
            packet,
            payload: Vec::new(),
            condition: Condition::Intact,
            truth: None,
        });
    }

    pub(super) fn send_parcel(&mut self, parcel: Parcel) -> Heard {
        let (from, to) = (parcel.from, parcel.to);
        if self.lost.contains(&(from, to)) {
            self.silent |= parcel.is_about_writes();
            return Heard::No;
        }
        if self.body(to).is_none() {
            self.lose(from, to);
            self.sever(from, to);
            return Heard::No;
        }
        self.put(parcel);
        Heard::Yes
    }

    pub(super) fn arrive(&mut self, small: &Small, mut parcel: Parcel) -> Outcome {
        let (from, to) = (parcel.from, parcel.to);
        // The old connection's end is said before the new one's first packet.
        let news = Notice::LinkLost {
            side: to,
            peer: from,
        };
        if self.notices.contains(&news) {
            self.notice(small, news)?;
        }
        if self.packet_heard(small, &mut parcel) == Heard::No {
            return Ok(());
        }
        let Some(body) = &mut self.seat(index(to)).body else {
            return Ok(());
        };
        if let Packet::Frame { handoff, part, .. } = &parcel.packet {
            body.arriving = Some((*handoff, *part, parcel.payload.clone()));
        }
        let input = Input::Arrived {
            from: parcel.from,
            packet: parcel.packet.clone(),
            condition: parcel.condition,
        };
        let before = body.imports();
        self.worker_hears(small, index(to), input)?;
        let Some(body) = &self.seats[index(to)].body else {
            return Ok(());
        };
        // Whatever the frame says of itself, this is who wrote it, and for which block.
        if let (Some((writer, block)), Packet::Frame { handoff, .. }) =
            (parcel.truth, &parcel.packet)
            && body.imports() > before
        {
            let meant = body.reserved_for(block.block) == Some((*handoff, block.generation));
            if !meant || body.sender_of(*handoff) != Some(writer) {
                return Err(format!(
                    "S2: {} takes in for {handoff} what {writer} wrote for {}/{}",
                    body.me, block.block, block.generation
                ));
            }
        }
        Ok(())
    }

    pub(super) fn go_astray(&mut self, small: &Small, at: usize, how: Astray) {
        let mut parcel = self.parcels[at].parcel.clone();
        match how {
            Astray::Sender => {
                let others = (0..small.roles.len()).filter_map(|w| self.seats[w].body.as_ref());
                let mut others = others.map(|body| body.me);
                let stranger = others.find(|who| *who != parcel.from && *who != parcel.to);
                parcel.from = stranger.unwrap_or(parcel.from);
            }
            Astray::Generation => {
                if let Packet::Frame { block, .. } = &mut parcel.packet {
                    block.generation.0 = block.generation.0.wrapping_sub(1);
                }
            }
            Astray::Block => {
                if let Packet::Frame { block, .. } = &mut parcel.packet {
                    block.block.0 = (block.block.0 + 1) % 3;
                }
            }
        }
        if let Packet::Frame { block, .. } = &parcel.packet {
            parcel.truth = Some((parcel.from, *block));
        }
        self.put(parcel);
    }
}
