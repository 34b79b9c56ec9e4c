//! What workers say and hear: to their routers, to each other, to their engines.
//!
//! Owns: carrying out a worker brain's outputs. Never: decides.
//! Invariant: every frame that arrives is imported or discarded before anything else is heard.

use crate::body::{Done, From, Op, Payload};
use crate::damage::{self, Arrival};
use crate::model::REPEATS;
use crate::net::Way;
use crate::run::{Event, Parcel, Run, Word, Write, index};
use crate::words;
use cleave_domain::{HandoffId, RouterId, WorkerRef};
use cleave_kv::handoff::Digest;
use cleave_kv::{BlockPart, Packet, Writer};
use cleave_sched::{Condition, Export, ExportOutcome, ImportOutcome, Input, Note, Output};
use std::time::Duration;

/// Whether the link took a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shipped {
    Sent,
    Nowhere,
}

/// How many of a thousand broken operations break the engine for good.
const ENGINE_LOST: u32 = 300;

/// Whether the device broke what it was asked to do.
fn breaks(input: &Input) -> bool {
    matches!(
        input,
        Input::StepFailed { .. }
            | Input::Exported {
                outcome: ExportOutcome::Broken,
                ..
            }
            | Input::Imported {
                outcome: ImportOutcome::Broken,
                ..
            }
    )
}

impl Run<'_> {
    // === the brain's body ===

    pub(crate) fn worker_hears(&mut self, worker: usize, input: Input) -> Result<(), String> {
        let now = self.now;
        let Some(body) = self.seats[worker].body.as_mut() else {
            return Ok(());
        };
        body.hear(now, input);
        let mut outputs = Vec::new();
        while let Some(output) = body.say() {
            outputs.push(output);
        }
        body.brain.check();
        for output in outputs {
            self.worker_says(worker, output)?;
        }
        let price = self.world.price;
        let Some(body) = self.seats[worker].body.as_mut() else {
            return Ok(());
        };
        if let Some((handoff, part, _)) = &body.arriving {
            return Err(format!("{} leaves {handoff} {part:?} lying", body.me));
        }
        let me = body.me;
        let wake = body.brain.deadline();
        let wake = wake.filter(|w| body.wake.is_none_or(|planned| *w < planned));
        if let Some(wake) = wake {
            body.wake = Some(wake);
            self.plan(wake, Event::WakeWorker(me));
        }
        let body = self.seats[worker].body.as_mut();
        if let Some(done) = body.and_then(|body| body.begin(now, &price)) {
            self.plan(done, Event::EngineDone(me));
        }
        self.exit_if_done(worker);
        Ok(())
    }

    fn worker_says(&mut self, worker: usize, output: Output) -> Result<(), String> {
        let Some(body) = self.seats[worker].body.as_mut() else {
            return Ok(());
        };
        let me = body.me;
        match output {
            Output::Step(plan) => body.step(plan)?,
            Output::Tell { router, report } => {
                body.witness(&report)?;
                self.say_to_router(me, router, Word::Report(report));
            }
            Output::Emit { handoff, emission } => {
                let router = handoff.flight.router();
                self.say_to_router(me, router, Word::Token(handoff, emission));
            }
            Output::Export(export) => body.export(export)?,
            Output::Send { to, packet } => {
                self.send(me, to, packet, Vec::new());
            }
            Output::Import {
                handoff,
                part,
                block,
            } => body.import(handoff, part, block)?,
            Output::Discard { handoff, part } => {
                body.take_arrived(handoff, part)?;
                self.count("frames discarded");
            }
            Output::SwapOut { handoff, blocks } => body.swap(Op::SwapOut { handoff, blocks })?,
            Output::SwapIn { handoff, blocks } => body.swap(Op::SwapIn { handoff, blocks })?,
            Output::SwapDrop { handoff } => {
                for answer in body.swap_drop(handoff) {
                    self.plan(self.now, Event::WorkerHears(me, answer));
                }
            }
            Output::Shelve { content, block } => body.shelve(content, block)?,
            Output::WriteOn { content } => self.write_on(me, content),
            Output::Fetch { handoff, blocks } => {
                let first = blocks.first().map(|(content, _)| *content);
                if body.fetch(self.now, handoff, blocks)? == From::Disk {
                    self.read_disk(me, (handoff, first));
                }
            }
            Output::FetchStop { handoff } => {
                if let Some(answer) = body.stop_fetch(self.now, handoff) {
                    self.plan(self.now, Event::WorkerHears(me, answer));
                }
            }
            Output::TierDrop { content, place } => body.drop_kept(content, place)?,
            Output::Forget { handoff } => {
                for answer in body.forget(handoff) {
                    self.plan(self.now, Event::WorkerHears(me, answer));
                }
            }
            Output::Drained => self.drained(worker)?,
            Output::Note(Note::Pool { blocks_leaked, .. }) if blocks_leaked > 0 => {
                return Err(format!("{me} says that {blocks_leaked} blocks leaked"));
            }
            Output::Note(note) => {
                if let Note::Pool {
                    blocks_quarantined, ..
                } = note
                {
                    body.quarantined = blocks_quarantined;
                }
                self.note(&note);
            }
        }
        Ok(())
    }

    fn note(&mut self, note: &Note) {
        match note {
            Note::Stepped { .. } => self.count("steps"),
            Note::Drafted {
                drafted_tokens,
                accepted_tokens,
                ..
            } => {
                for _ in 0..*accepted_tokens {
                    self.count("guesses true");
                }
                for _ in *accepted_tokens..*drafted_tokens {
                    self.count("guesses wrong");
                }
            }
            Note::Landed { .. } => self.count("landed"),
            Note::Joined { .. } => self.count("joined"),
            Note::Preempted { .. } => self.count("preempted"),
            Note::SwappedOut { .. } => self.count("swapped out"),
            Note::SwappedIn { .. } => self.count("swapped in"),
            Note::Kept { .. } | Note::Fetched { .. } => self.note_below(note),
            Note::MovedOut { .. } => self.count("moved out"),
            Note::Stuck { .. } => self.count("stuck"),
            Note::HandoffFailed { .. } => self.count("hand-offs failed"),
            Note::PrefixLooked { cached_tokens, .. } if *cached_tokens > 0 => {
                self.count("prefix hits");
            }
            _ => {}
        }
    }

    pub(crate) fn wake_worker(&mut self, who: WorkerRef) -> Result<Option<String>, String> {
        let Some(body) = self.seats[index(who)].body.as_mut().filter(|b| b.me == who) else {
            return Ok(None);
        };
        // Held up by a freeze, it may be late.
        if body.wake.is_none_or(|at| at > self.now) {
            return Ok(None);
        }
        body.wake = None;
        self.worker_hears(index(who), Input::Woke)?;
        Ok(Some(format!("{} woke", who.worker)))
    }

    // === to and from the engine ===

    pub(crate) fn engine_done(&mut self, who: WorkerRef) -> Result<Option<String>, String> {
        let broken = if self.healed {
            0
        } else {
            self.world.wire.broken
        };
        let requests = &self.world.requests;
        let salt_of = |seed: u64| requests[(seed & !REPEATS) as usize].request.cache_salt;
        let Some(body) = self.seats[index(who)].body.as_mut().filter(|b| b.me == who) else {
            return Ok(None);
        };
        let done = body.finish(self.now, salt_of, (&mut self.dice, broken))?;
        let words = match done {
            Done::Hear(input) => {
                let words = words::input(&input);
                let broke = breaks(&input);
                self.worker_hears(index(who), input)?;
                if broke && self.dice.chance(ENGINE_LOST) {
                    self.lose_engine(who)?;
                }
                words
            }
            Done::Ship(export, payload) => {
                let words = format!("read {} block {}", export.handoff, export.ordinal);
                match self.world.writer {
                    Writer::Receiver => {
                        self.ship(who, &export, &payload);
                    }
                    Writer::Sender => self.write(who, export, payload),
                }
                self.next_op(who);
                words
            }
        };
        Ok(Some(format!("{} engine      {words}", who.worker)))
    }

    /// The engine breaks for good: the brain drains, and the process starts anew.
    fn lose_engine(&mut self, who: WorkerRef) -> Result<(), String> {
        let back = self.dice.micros(0, 100_000);
        let seat = &mut self.seats[index(who)];
        let body = seat.body.as_mut().filter(|body| body.me == who);
        let Some(body) = body.filter(|body| !body.draining) else {
            return Ok(());
        };
        body.draining = true;
        seat.back = back;
        self.count("engines lost");
        let reason = "the dice said so".to_owned();
        self.worker_hears(index(who), Input::EngineLost { reason })
    }

    pub(crate) fn next_op(&mut self, who: WorkerRef) {
        let (now, price) = (self.now, self.world.price);
        let body = self.seats[index(who)].body.as_mut();
        if let Some(done) = body.and_then(|body| body.begin(now, &price)) {
            self.plan(done, Event::EngineDone(who));
        }
        self.exit_if_done(index(who));
    }

    /// Sends a block as frames, and answers the brain when the link has taken them. If the link is
    /// gone the answer comes with the news of that, or from whoever hears it here.
    fn ship(&mut self, me: WorkerRef, export: &Export, payload: &Payload) -> Shipped {
        let frames = self.frames(export, payload);
        let mut digest = Digest::default();
        let mut bytes = 0;
        let mut sent = None;
        for (part, cells) in frames {
            let checksum = checksum(&cells);
            digest.add(part, checksum);
            bytes += u64::from(part.len);
            let packet = Packet::Frame {
                handoff: export.handoff,
                block: export.block,
                part,
                checksum,
            };
            sent = self.send(me, export.to, packet, cells);
        }
        let Some(sent) = sent else {
            return Shipped::Nowhere;
        };
        let exported = Box::new(export.answer(ExportOutcome::Sent {
            digest: digest.value(),
            bytes,
        }));
        self.plan(sent, Event::Shipped { side: me, exported });
        Shipped::Sent
    }

    /// Begins a one-sided write. Nothing stops it any more; its frame follows once it has landed.
    fn write(&mut self, me: WorkerRef, export: Export, payload: Payload) {
        let to = export.to;
        let bytes = payload.len() as u64 * 8;
        let wire = &self.world.wire;
        let ways = (wire, &mut self.dice);
        let travel = self.net.travel((me, to), bytes, self.now, ways);
        let damaged = !self.healed && self.dice.chance(wire.damage);
        let write = Write {
            from: me,
            epoch: self.net.epoch(index(me), index(to)),
            export,
            damaged: damaged.then(|| vec![None; payload.len()]),
            payload,
        };
        self.plan(travel.arrives, Event::Lands(Box::new(write)));
    }

    pub(crate) fn lands(&mut self, write: Write) -> Result<Option<String>, String> {
        let Write {
            from,
            epoch,
            export,
            payload,
            damaged,
        } = write;
        let to = export.to;
        let content = damaged.as_ref().unwrap_or(&payload);
        let receiver = self.seats[index(to)].body.as_mut();
        if let Some(body) = receiver.filter(|body| body.me == to) {
            body.written_into(export.handoff, export.block, content)?;
        }
        self.count("one-sided writes");
        let words = format!("-> landed      {to} {} {}", export.handoff, export.ordinal);
        if self.body(from).is_none() {
            return Ok(Some(words));
        }
        let stands = self.net.epoch(index(from), index(to)) == epoch;
        if !stands || self.ship(from, &export, &payload) == Shipped::Nowhere {
            let exported = Box::new(export.answer(ExportOutcome::Dropped));
            self.plan(
                self.now,
                Event::Shipped {
                    side: from,
                    exported,
                },
            );
        }
        Ok(Some(words))
    }

    /// One frame or two.
    fn frames(&mut self, export: &Export, payload: &Payload) -> Vec<(BlockPart, Payload)> {
        let capacity = &self.world.workers[0].capacity;
        let size = capacity.block_bytes / capacity.block_tokens;
        let count = payload.len() as u32;
        let cut = if count > 1 && self.dice.chance(300) {
            self.dice.count(1, count - 1)
        } else {
            count
        };
        [(0, cut), (cut, count)]
            .into_iter()
            .filter(|(from, to)| from < to)
            .map(|(from, to)| {
                let part = BlockPart {
                    ordinal: export.ordinal,
                    offset: from * size,
                    len: (to - from) * size,
                };
                (part, payload[from as usize..to as usize].to_vec())
            })
            .collect()
    }

    pub(crate) fn shipped(
        &mut self,
        side: WorkerRef,
        exported: Input,
    ) -> Result<Option<String>, String> {
        let Input::Exported {
            handoff, ordinal, ..
        } = &exported
        else {
            return Ok(None);
        };
        let key: (HandoffId, u32) = (*handoff, *ordinal);
        let seat = &mut self.seats[index(side)];
        let body = seat.body.as_mut().filter(|body| body.me == side);
        // Answered before, when the link broke.
        if body.and_then(|body| body.exporting.remove(&key)).is_none() {
            return Ok(None);
        }
        self.if_alive(side, "shipped", exported)
    }

    // === from worker to worker ===

    /// Sends a packet; says when the link has taken it, or nothing if there is no link.
    fn send(
        &mut self,
        me: WorkerRef,
        to: WorkerRef,
        packet: Packet,
        payload: Payload,
    ) -> Option<cleave_domain::Time> {
        if self.net.has_lost(me, to) {
            return None;
        }
        let (a, b) = (index(me), index(to));
        if self.body(to).is_none() || self.net.is_down(a, b, self.now) {
            self.lose(me, to);
            if self.body(to).is_none() {
                self.sever(me, to);
            }
            return None;
        }
        let bytes = payload.len() as u64 * 8 + 64;
        let wire = &self.world.wire;
        let ways = (wire, &mut self.dice);
        let travel = self.net.travel((me, to), bytes, self.now, ways);
        let mut parcel = Parcel {
            from: me,
            to,
            epoch: self.net.epoch(a, b),
            packet,
            payload,
            condition: Condition::Intact,
        };
        if !self.healed && self.dice.chance(wire.loss) {
            self.count("packets lost");
            return Some(travel.sent);
        }
        let flips = self.world.flips;
        match self.arrival(parcel.packet, flips.packets) {
            Arrival::Read(packet) => parcel.packet = packet,
            Arrival::Damaged => {
                let epoch = parcel.epoch;
                let from = me;
                self.plan(travel.arrives, Event::LinkDamaged { from, to, epoch });
                return Some(travel.sent);
            }
        }
        self.change_seal(&mut parcel.packet);
        let wire = &self.world.wire;
        if !self.healed && !parcel.payload.is_empty() && self.dice.chance(wire.damage) {
            self.count("frames damaged");
            parcel.condition = Condition::Damaged;
            parcel.payload.fill(None);
        }
        if let Packet::Frame { block, .. } = &mut parcel.packet
            && !self.healed
            && self.dice.chance(wire.stray)
        {
            let blocks_count = self.world.workers[0].capacity.blocks_count;
            if self.dice.chance(500) {
                block.generation.0 = block.generation.0.wrapping_sub(1);
            } else {
                block.block.0 = (block.block.0 + 1) % blocks_count;
            }
            self.counts
                .entry("frames astray")
                .and_modify(|n| *n += 1)
                .or_insert(1);
        }
        if self.dice.chance(wire.twice) {
            let later = travel.arrives + self.dice.micros(0, 20_000);
            self.plan(later, Event::Packet(Box::new(parcel.clone())));
        }
        self.plan(travel.arrives, Event::Packet(Box::new(parcel)));
        Some(travel.sent)
    }

    /// A bit of a seal flips behind the link's check.
    fn change_seal(&mut self, packet: &mut Packet) {
        let rate = self.world.flips.seals;
        if let Packet::Seal(seal) = packet
            && !self.healed
            && damage::hits(&mut self.flips, rate)
            && let Some(other) = damage::flip_seal(seal, &mut self.flips)
        {
            *packet = other;
            self.count("seals changed");
        }
    }

    /// `side` will notice that it lost `peer`.
    pub(crate) fn lose(&mut self, side: WorkerRef, peer: WorkerRef) {
        if self.net.lose(side, peer) {
            let at = self.now + self.notice();
            self.plan(at, Event::LinkLost { side, peer });
        }
    }

    pub(crate) fn notice(&mut self) -> Duration {
        let most = self.world.wire.notice.as_micros() as u64;
        self.dice.micros(1, most)
    }

    pub(crate) fn link_lost(
        &mut self,
        side: WorkerRef,
        peer: WorkerRef,
    ) -> Result<Option<String>, String> {
        if !self.net.notice(side, peer) || self.body(side).is_none() {
            return Ok(None);
        }
        self.worker_hears(index(side), Input::LinkLost { peer })?;
        let body = self.seats[index(side)].body.as_mut();
        let answers = body.map_or(Vec::new(), |body| body.drop_exports(peer));
        for answer in answers {
            self.worker_hears(index(side), answer)?;
        }
        Ok(Some(format!("{} lost link   to {peer}", side.worker)))
    }

    pub(crate) fn packet(&mut self, parcel: Parcel) -> Result<Option<String>, String> {
        let (from, to) = (parcel.from, parcel.to);
        let epoch = self.net.epoch(index(from), index(to));
        if self.body(to).is_none() || epoch != parcel.epoch {
            return Ok(None);
        }
        // The old connection's end is said before the new one's first packet.
        self.link_lost(to, from)?;
        let Some(body) = self.seats[index(to)].body.as_mut() else {
            return Ok(None);
        };
        if let Packet::Frame { handoff, part, .. } = &parcel.packet {
            body.arriving = Some((*handoff, *part, parcel.payload));
        }
        let packet = parcel.packet;
        let words = format!(
            "{} arrived     {} from {}",
            to.worker,
            words::packet(&packet),
            from
        );
        let input = Input::Arrived {
            from,
            packet,
            condition: parcel.condition,
        };
        self.worker_hears(index(to), input)?;
        Ok(Some(words))
    }

    // === to and from routers ===

    fn say_to_router(&mut self, me: WorkerRef, router: RouterId, word: Word) {
        let worker = index(me);
        let Some(router) = self.router(router) else {
            return;
        };
        if self.net.stream(router, worker).life != Some(me) {
            return;
        }
        let due = self.now + self.delay();
        let at = self.net.carry((router, worker), Way::ToRouter, due);
        let epoch = self.net.stream(router, worker).epoch;
        let event = match self.arrival(word, self.world.flips.words) {
            Arrival::Read(word) => Event::ToRouter {
                router,
                worker,
                epoch,
                from: me,
                word,
            },
            Arrival::Damaged => Event::StreamDamaged {
                router,
                worker,
                epoch,
            },
        };
        self.plan(at, event);
    }

    pub(crate) fn order(&mut self, router: usize, to: WorkerRef, order: cleave_domain::Order) {
        let worker = index(to);
        let stream = self.net.stream(router, worker);
        if stream.life != Some(to) {
            return;
        }
        let due = self.now + self.delay();
        let at = self.net.carry((router, worker), Way::ToWorker, due);
        let epoch = stream.epoch;
        let event = match self.arrival(order, self.world.flips.orders) {
            Arrival::Read(order) => Event::ToWorker {
                router,
                worker,
                epoch,
                order,
            },
            Arrival::Damaged => Event::StreamDamaged {
                router,
                worker,
                epoch,
            },
        };
        self.plan(at, event);
    }
}

/// The cells' checksum: FNV-1a over their contents.
pub(crate) fn checksum(cells: &Payload) -> u64 {
    cells.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, cell| {
        let word = cell.map_or(0, |cell| cell.kv.0 ^ cell.salt);
        (hash ^ word).wrapping_mul(0x0100_0000_01b3)
    })
}
