//! How a move changes a state.
//!
//! Owns: carrying out what the brains say, and the properties that can be seen from outside a brain
//! while it is driven (S1 to S4 with the body's own checks; S9 and L1, L2 at rest).
//! Never: decides anything that a brain decides. Invariant: one move is one fact to one brain, and
//! whatever follows from it at once.

use super::guard::{Guard, Heard};
use super::moves::{Astray, Cost, Move};
use super::small::{FAILURES_MAX, ROUTER, Small};
use super::state::{Late, Notice, Parcel, State, Word};
use crate::body::{Body, Done, Op, Taping};
use crate::engine::Price;
use crate::run::index;
use crate::talk::checksum;
use cleave_domain::{Ending, FlightId, Order, Refusal, Report, Time, WorkerRef};
use cleave_kv::handoff::Digest;
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{Condition, Export, ExportOutcome, Input, Note, Output, Writer};
use std::rc::Rc;

/// Nothing costs time but what the world says.
const FREE: Price = Price {
    step: 0,
    prefill_token: 0,
    decode_sequence: 0,
    context_token: 0,
    copy: 0,
    write_bytes: 1 << 20,
};

type Outcome = Result<(), String>;

impl State {
    /// The first state: every worker is there and known.
    pub(super) fn first(small: &Small) -> Result<Self, String> {
        let mut state = Self::new(small);
        for worker in 0..small.roles.len() {
            state.start(small, worker)?;
        }
        let greets = |what: &Move| matches!(what, Move::ToRouter(_) | Move::ToWorker(_));
        while let Some((what, _)) = state.moves(small).into_iter().find(|(what, _)| greets(what)) {
            state.take(small, what, Cost::Nothing)?;
        }
        Ok(state)
    }

    /// Makes a move.
    pub(super) fn take(&mut self, small: &Small, what: Move, cost: Cost) -> Outcome {
        match cost {
            Cost::Nothing => {}
            Cost::Order => self.left -= 1,
            Cost::Fault => {
                self.left -= 1;
                self.faults += 1;
                self.harm += match what {
                    // Its two ends notice it at two times, and the second may hit the next attempt.
                    Move::Cut(..) => 2,
                    _ => 1,
                };
            }
        }
        self.make(small, what)?;
        // Who holds nothing loses nothing by hearing of a lost link at once.
        while let Some(notice) = self.notices.iter().copied().find(|n| self.is_idle_news(*n)) {
            self.notice(small, notice)?;
        }
        Ok(())
    }

    fn is_idle_news(&self, notice: Notice) -> bool {
        let (Notice::LinkLost { side, .. } | Notice::Severed { side, .. }) = notice else {
            return false;
        };
        self.may_notice(notice) && self.body(side).is_some_and(|body| body.brain.idle())
    }

    fn make(&mut self, small: &Small, what: Move) -> Outcome {
        match what {
            Move::Submit => self.submit(small),
            Move::Notice(notice) => self.notice(small, notice),
            Move::ToWorker(worker) => self.order_arrives(small, worker),
            Move::ToRouter(worker) => self.word_arrives(small, worker),
            Move::Packet(index) => {
                let parcel = self.parcels.remove(index);
                self.arrive(small, (*parcel).clone())
            }
            Move::Counted(index) => {
                let (handoff, generated) = self.counts.remove(index);
                self.router_hears(small, cleave_router::Input::Counted { handoff, generated })
            }
            Move::Late(index) => self.land_late(index),
            Move::Engine(worker) => self.engine(small, worker, Luck::Well),
            Move::Break(worker) => self.engine(small, worker, Luck::Broken),
            Move::Exit(worker) => self.die(worker),
            Move::Command => {
                let (worker, command) = small.commands[self.commanded];
                self.commanded += 1;
                let worker = crate::run::life(worker, 1).worker;
                let input = cleave_router::Input::Commanded { worker, command };
                self.router_hears(small, input)
            }
            Move::Tick | Move::Slow => self.tick(small),
            Move::Lose(index) => {
                self.parcels.remove(index);
                self.silent = true;
                Ok(())
            }
            Move::Twice(index) => {
                let again = (*self.parcels[index]).clone();
                self.put(again);
                Ok(())
            }
            Move::Damage(index) => {
                let mut parcel = (*self.parcels.remove(index)).clone();
                parcel.condition = Condition::Damaged;
                parcel.payload.fill(None);
                self.put(parcel);
                Ok(())
            }
            Move::Astray(index, how) => {
                self.go_astray(small, index, how);
                Ok(())
            }
            Move::Cancel(index) => self.cancel(small, index),
            Move::Crash(worker) => self.die(worker),
            Move::Expire(worker) => self.expire(small, worker),
            Move::Cut(a, b) => {
                self.cut(a, b);
                Ok(())
            }
            Move::Part(worker) => {
                self.part(worker);
                Ok(())
            }
        }
    }

    // === clients and the router ===

    fn submit(&mut self, small: &Small) -> Outcome {
        let index = self.submitted;
        self.submitted += 1;
        self.readers()[index].submitted = true;
        let (flight, request) = (small.flight(index), small.request(index));
        self.router_hears(small, cleave_router::Input::Submitted { flight, request })
    }

    fn cancel(&mut self, small: &Small, index: usize) -> Outcome {
        let reader = &mut self.readers()[index];
        reader.left = true;
        let flight = reader.flight;
        self.router_hears(small, cleave_router::Input::Cancelled { flight })?;
        match self.readers[index].ending {
            Some(_) => Ok(()),
            None => Err(format!("S5: {flight} was left and did not end at once")),
        }
    }

    fn word_arrives(&mut self, small: &Small, worker: usize) -> Outcome {
        let seat = self.seat(worker);
        let (Some(from), Some(word)) = (seat.connected, seat.to_router.pop_front()) else {
            return Err("nothing was said".to_owned());
        };
        match &word.0 {
            Word::Token(handoff, emission) => {
                let readers = self.readers();
                let reader = readers.iter_mut().find(|r| r.flight == handoff.flight);
                let reader = reader.ok_or_else(|| format!("nobody asked for {handoff}"))?;
                reader.token(*handoff, emission)
            }
            Word::Report(report) => {
                let report = report.clone();
                let told = cleave_router::Input::Told {
                    worker: from,
                    report,
                };
                self.router_hears(small, told)
            }
        }?;
        // News of load and cache arrive with the word before them: alone they decide little, and
        // every moment at which they might come would be a state.
        let seat = &self.seats[worker];
        let is_news = |report: &Report| matches!(report, Report::Load(_) | Report::Prefix { .. });
        match seat.to_router.front().map(|word| &word.0) {
            Some(Word::Report(report)) if is_news(report) => self.word_arrives(small, worker),
            _ => Ok(()),
        }
    }

    pub(super) fn router_hears(&mut self, small: &Small, input: cleave_router::Input) -> Outcome {
        let input = self.router_heard(small, input);
        let after = match &input {
            cleave_router::Input::Told { report, .. } => Some(report.clone()),
            _ => None,
        };
        let now = self.now;
        let desk = self.desk();
        let at = now + desk.skew;
        desk.heard = at;
        desk.brain.handle(at, input);
        let mut outputs = Vec::new();
        while let Some(output) = desk.brain.poll() {
            outputs.push(output);
        }
        desk.brain.check();
        for output in outputs {
            match output {
                cleave_router::Output::Tell { worker, order } => {
                    if Self::order_leaves(small, after.as_ref(), &order) == Heard::Yes {
                        self.say_to_worker(worker, order);
                    }
                }
                cleave_router::Output::Fence { handoff } => {
                    let flight = handoff.flight;
                    let at = self.reader_of(flight)?;
                    if small.without != Some(Guard::Fence) {
                        self.readers()[at].fence(handoff);
                    }
                    self.counts.push((handoff, self.readers[at].given()));
                }
                cleave_router::Output::Count { handoff } => {
                    let at = self.reader_of(handoff.flight)?;
                    self.counts.push((handoff, self.readers[at].given()));
                }
                cleave_router::Output::End {
                    flight,
                    ending,
                    output_tokens,
                } => self.end(flight, ending, output_tokens)?,
                cleave_router::Output::Note(cleave_router::Note::Fleet { workers, .. }) => {
                    self.desk().workers = workers.total();
                }
                cleave_router::Output::Note(_)
                | cleave_router::Output::Drained
                | cleave_router::Output::Readiness(_) => {}
            }
        }
        Ok(())
    }

    fn reader_of(&self, flight: FlightId) -> Result<usize, String> {
        let at = self.readers.iter().position(|r| r.flight == flight);
        at.ok_or_else(|| format!("nobody asked for {flight}"))
    }

    fn end(&mut self, flight: FlightId, ending: Ending, told: Option<u32>) -> Outcome {
        let at = self.reader_of(flight)?;
        let count = self.readers[at].given().len() as u32;
        if told.is_some_and(|told| told != count) {
            return Err(format!("S6: {flight} is done with {told:?} tokens, and {count} came"));
        }
        let calm = self.faults == 0;
        let survives = u32::from(self.harm) <= FAILURES_MAX;
        if survives && matches!(ending, Ending::Failed(_)) {
            return Err(format!(
                "S9: {flight} ended {ending:?} after {} blows, and survives {FAILURES_MAX}",
                self.harm
            ));
        }
        let nobody = matches!(ending, Ending::Refused(Refusal::NoWorker));
        self.readers()[at].end(ending, calm && !nobody)
    }

    // === streams ===

    pub(super) fn say_to_router(&mut self, worker: usize, word: Word) {
        let print = super::print::Print::of_words(&word);
        let seat = self.seat(worker);
        if seat.connected.is_some() {
            seat.to_router.push_back(Rc::new((word, print)));
        }
    }

    fn say_to_worker(&mut self, to: WorkerRef, order: Order) {
        let print = super::print::Print::of_words(&order);
        let seat = self.seat(index(to));
        if seat.connected == Some(to) {
            seat.to_worker.push_back(Rc::new((order, print)));
        }
    }

    fn order_arrives(&mut self, small: &Small, worker: usize) -> Outcome {
        let order = self.seat(worker).to_worker.pop_front();
        let Some(order) = order.map(|order| order.0.clone()) else {
            return Err("nothing was ordered".to_owned());
        };
        let Some(order) = self.order_heard(small, worker, order) else {
            return Ok(());
        };
        let router = ROUTER;
        self.worker_hears(small, worker, Input::Ordered { router, order })
    }

    // === a worker ===

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
    fn worker_says(&mut self, worker: usize, output: Output) -> Result<Vec<Input>, String> {
        let seat = self.seat(worker);
        let Some(body) = &mut seat.body else {
            return Ok(Vec::new());
        };
        let me = body.me;
        match output {
            Output::Step(plan) => body.step(plan)?,
            Output::Tell { router: _, report } => {
                body.witness(&report).map_err(|what| format!("S1: {what}"))?;
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
            Output::SwapOut { handoff, blocks } => body.swap(Op::SwapOut { handoff, blocks }),
            Output::SwapIn { handoff, blocks } => body.swap(Op::SwapIn { handoff, blocks }),
            Output::SwapDrop { handoff } => return Ok(body.swap_drop(handoff)),
            Output::Forget { handoff } => {
                body.sealed.remove(&handoff);
                return Ok(body.forget(handoff));
            }
            Output::Drained => body.exiting = true,
            Output::Note(Note::Pool { blocks_leaked, .. }) if blocks_leaked > 0 => {
                return Err(format!("{me} says that {blocks_leaked} blocks leaked"));
            }
            Output::Note(_) => {}
        }
        Ok(Vec::new())
    }

    fn engine(&mut self, small: &Small, worker: usize, luck: Luck) -> Outcome {
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
        let dice = &mut crate::dice::Dice::new(0);
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

    /// Sends a block as one frame. If the link is gone the answer comes with the news of that.
    fn ship(
        &mut self,
        small: &Small,
        me: WorkerRef,
        export: &Export,
        payload: crate::body::Payload,
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
        let bytes = u64::from(part.len);
        let sent = self.send_parcel(parcel);
        if sent == Heard::No && self.lost.contains(&(me, export.to)) {
            return Ok(());
        }
        let Some(body) = &mut self.seat(index(me)).body else {
            return Ok(());
        };
        body.exporting.remove(&(export.handoff, export.ordinal));
        let mut digest = Digest::default();
        digest.add(part, checksum);
        let answer = export.answer(ExportOutcome::Sent {
            digest: digest.value(),
            bytes,
        });
        self.worker_hears(small, index(me), answer)
    }

    /// A one-sided write reaches the other worker's pool, if that life still has it.
    fn land(&mut self, export: &Export, payload: &crate::body::Payload) -> Outcome {
        if self.body(export.to).is_none() {
            return Ok(());
        }
        let body = self.seat(index(export.to)).body.as_mut();
        body.map_or(Ok(()), |body| {
            body.written_into(export.handoff, export.block, payload)
        })
    }

    fn land_late(&mut self, index: usize) -> Outcome {
        let late = self.late.remove(index);
        self.land(&late.export, &late.payload)
    }

    // === from worker to worker ===

    fn send(&mut self, from: WorkerRef, to: WorkerRef, packet: Packet) {
        self.send_parcel(Parcel {
            to,
            from,
            packet,
            payload: Vec::new(),
            condition: Condition::Intact,
            truth: None,
        });
    }

    fn send_parcel(&mut self, parcel: Parcel) -> Heard {
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

    fn arrive(&mut self, small: &Small, mut parcel: Parcel) -> Outcome {
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

    fn go_astray(&mut self, small: &Small, at: usize, how: Astray) {
        let mut parcel = (*self.parcels[at]).clone();
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

    // === time ===

    /// When the first deadline passes, by the common clock.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        let desk = self.desk.brain.deadline().map(|at| at - self.desk.skew);
        let workers = self.seats.iter().filter_map(|seat| {
            let deadline = seat.body.as_ref()?.brain.deadline()?;
            Some(deadline - seat.skew)
        });
        workers.chain(desk).min()
    }

    fn tick(&mut self, small: &Small) -> Outcome {
        if let Some(at) = self.next_deadline() {
            self.now = self.now.max(at);
        }
        self.wake_due(small)
    }

    /// Wakes whoever is due.
    fn wake_due(&mut self, small: &Small) -> Outcome {
        for worker in 0..self.seats.len() {
            let seat = &self.seats[worker];
            let due = seat.body.as_ref().and_then(|body| body.brain.deadline());
            if due.is_some_and(|at| at <= self.now + seat.skew) {
                self.worker_hears(small, worker, Input::Woke)?;
            }
        }
        let due = self.desk.brain.deadline();
        if due.is_some_and(|at| at <= self.now + self.desk.skew) {
            self.router_hears(small, cleave_router::Input::Woke)?;
        }
        Ok(())
    }

    fn expire(&mut self, small: &Small, worker: usize) -> Outcome {
        let now = self.now;
        if worker == self.seats.len() {
            let desk = self.desk();
            if let Some(at) = desk.brain.deadline() {
                desk.skew = desk.skew.max(at.since(now));
            }
        } else {
            let seat = self.seat(worker);
            let deadline = seat.body.as_ref().and_then(|body| body.brain.deadline());
            if let Some(at) = deadline {
                seat.skew = seat.skew.max(at.since(now));
            }
        }
        self.wake_due(small)
    }

    // === lives and links ===

    fn start(&mut self, small: &Small, worker: usize) -> Outcome {
        let seat = self.seat(worker);
        seat.life += 1;
        let limits = small.limits(worker, seat.life);
        let me = limits.me;
        let mut body = Body::new(limits, small.about(worker), Taping::Off);
        body.give_voice((worker as u64 + 1) << 32);
        seat.body = Some(body);
        self.meet(small, me)
    }

    fn meet(&mut self, small: &Small, me: WorkerRef) -> Outcome {
        let worker = index(me);
        let seat = self.seat(worker);
        seat.connected = Some(me);
        let description = small.about(worker);
        let joined = cleave_router::Input::WorkerJoined {
            worker: me,
            description,
        };
        self.router_hears(small, joined)?;
        self.worker_hears(small, worker, Input::RouterJoined { router: ROUTER })?;
        // The two greet each other at once: a slow greeting alone decides nothing.
        while !self.seats[worker].to_router.is_empty() {
            self.word_arrives(small, worker)?;
        }
        Ok(())
    }

    fn notice(&mut self, small: &Small, notice: Notice) -> Outcome {
        self.notices.remove(&notice);
        match notice {
            Notice::LinkLost { side, peer } => {
                self.lost.remove(&(side, peer));
                self.worker_hears(small, index(side), Input::LinkLost { peer })?;
                let body = self.seat(index(side)).body.as_mut();
                let answers = body.map_or(Vec::new(), |body| body.drop_exports(peer));
                answers
                    .into_iter()
                    .try_for_each(|answer| self.worker_hears(small, index(side), answer))
            }
            Notice::Severed { side, peer } => {
                self.worker_hears(small, index(side), Input::Severed { peer })
            }
            Notice::WorkerLost(worker) => {
                self.router_hears(small, cleave_router::Input::WorkerLost { worker })
            }
            Notice::RouterLost(side) => {
                self.worker_hears(small, index(side), Input::RouterLost { router: ROUTER })
            }
            Notice::Starts(worker) => self.start(small, worker),
            Notice::Meets(worker) => {
                let me = self.seats[worker].body.as_ref().map(|body| body.me);
                me.map_or(Ok(()), |me| self.meet(small, me))
            }
        }
    }

    /// `side` will have to be told that it lost `peer`.
    fn lose(&mut self, side: WorkerRef, peer: WorkerRef) {
        if self.lost.insert((side, peer)) {
            self.notices.insert(Notice::LinkLost { side, peer });
        }
    }

    /// `side` will have to be told that nothing of `peer`, which is dead, can reach it any more. It
    /// is told each time it comes upon the dead life.
    fn sever(&mut self, side: WorkerRef, peer: WorkerRef) {
        let body = self.body(side);
        if body.is_some_and(|body| body.limits.writer == Writer::Sender) {
            self.notices.insert(Notice::Severed { side, peer });
        }
    }

    fn cut(&mut self, a: usize, b: usize) {
        let alive = |worker: usize| self.seats[worker].body.as_ref().map(|body| body.me);
        let (Some(a), Some(b)) = (alive(a), alive(b)) else {
            return;
        };
        let between = |p: &Parcel| (p.from, p.to) == (a, b) || (p.from, p.to) == (b, a);
        // Who waits for these asks again after a while: nobody tells it that the link is back.
        self.silent |= (self.parcels.iter()).any(|p| between(p) && p.is_about_writes());
        self.parcels.retain(|p| !between(p));
        self.lose(a, b);
        self.lose(b, a);
    }

    fn disconnect(&mut self, worker: usize) -> Option<WorkerRef> {
        let seat = self.seat(worker);
        seat.to_worker.clear();
        seat.to_router.clear();
        let connected = seat.connected.take();
        self.notices.extend(connected.map(Notice::WorkerLost));
        connected
    }

    fn part(&mut self, worker: usize) {
        if let Some(me) = self.disconnect(worker) {
            self.notices.insert(Notice::RouterLost(me));
            self.notices.insert(Notice::Meets(worker));
        }
    }

    /// The process ends; what it had sent and is still under way is lost, but for writes that its
    /// device has already begun.
    fn die(&mut self, worker: usize) -> Outcome {
        self.disconnect(worker);
        let Some(body) = self.seat(worker).body.take() else {
            return Ok(());
        };
        let me = body.me;
        self.seat(worker).skew = std::time::Duration::ZERO;
        if let Some((export, payload)) = body.writing() {
            let late = Late {
                from: me,
                export,
                payload,
            };
            self.late.push(Rc::new(late));
        }
        self.parcels.retain(|p| p.from != me && p.to != me);
        self.lost.retain(|(side, _)| *side != me);
        self.notices.retain(|notice| match notice {
            Notice::LinkLost { side, .. } | Notice::Severed { side, .. } => *side != me,
            Notice::RouterLost(side) => *side != me,
            Notice::Meets(other) => *other != worker,
            Notice::WorkerLost(_) | Notice::Starts(_) => true,
        });
        for other in (0..self.seats.len()).filter(|other| *other != worker) {
            if let Some(peer) = self.seats[other].body.as_ref().map(|body| body.me) {
                self.lose(peer, me);
                self.sever(peer, me);
            }
        }
        self.notices.insert(Notice::Starts(worker));
        Ok(())
    }

    // === at rest ===

    /// L2: when only time could still change something, and nothing was lost that only waiting can
    /// tell, no worker holds anything.
    pub(super) fn check_quiet(&self) -> Outcome {
        if self.silent {
            return Ok(());
        }
        for body in self.seats.iter().filter_map(|seat| seat.body.as_ref()) {
            let held: Vec<_> = body.brain.handoffs().map(|h| h.to_string()).collect();
            if !held.is_empty() {
                return Err(format!(
                    "L2: nothing is under way, and {} still holds {held:?}",
                    body.me
                ));
            }
        }
        Ok(())
    }

    /// L1: nothing will ever happen again; everything has come to its end.
    pub(super) fn check_rest(&self) -> Outcome {
        for reader in self.readers.iter() {
            if reader.ending.is_none() {
                return Err(format!("L1: at rest, and {} has no end", reader.flight));
            }
        }
        for seat in &self.seats {
            let Some(body) = &seat.body else {
                return Err("L1: a worker never came back".to_owned());
            };
            body.check_empty().map_err(|what| format!("L1: {what}"))?;
            if !body.is_done() {
                return Err(format!("L1: {} has work and rests", body.me));
            }
        }
        let open = self.desk.brain.legs_open();
        if open > 0 {
            return Err(format!("L1: the router still counts {open} legs"));
        }
        if self.desk.workers as usize != self.seats.len() {
            return Err(format!("L1: the router knows {} workers", self.desk.workers));
        }
        Ok(())
    }
}

/// Whether the device does what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Luck {
    Well,
    Broken,
}

