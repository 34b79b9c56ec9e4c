//! How a move changes a state.
//!
//! Owns: carrying out what the brains say, and the properties that can be seen from outside a brain
//! while it is driven (S1 to S4 with the body's own checks; S9 and L1, L2 at rest).
//! Never: decides anything that a brain decides. Invariant: one move is one fact to one brain, and
//! whatever follows from it at once.

use super::guard::{Guard, Heard};
use super::moves::{Cost, Field, Move};
use super::print::Print;
use super::small::{FAILURES_MAX, ROUTER, Small};
use super::state::{Notice, State, Word};
use crate::body::Luck;
use crate::damage::every_flip_is_noticed;
use crate::run::index;
use cleave_domain::{Ending, FlightId, Order, Report, WorkerRef};
use cleave_kv::Packet;
use cleave_sched::{Condition, Input};
use std::rc::Rc;

/// Nothing, or what is wrong.
pub(super) type Outcome = Result<(), String>;

impl State {
    /// The first state: every worker is there and known.
    pub(super) fn first(small: &Small) -> Result<Self, String> {
        let mut state = Self::new(small);
        for worker in 0..small.roles.len() {
            state.start(small, worker)?;
        }
        let greets = |what: &Move| matches!(what, Move::ToRouter(_) | Move::ToWorker(_));
        while let Some((what, _)) = state
            .moves(small)
            .into_iter()
            .find(|(what, _)| greets(what))
        {
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
                    Move::Cut(..) | Move::Flip(_) => 2,
                    // Then a flight may also have waited for longer than it may.
                    Move::Slow => 2,
                    Move::Expire(who) if who == self.seats.len() => 2,
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

    pub(super) fn is_idle_news(&self, notice: Notice) -> bool {
        let (Notice::LinkLost { side, .. } | Notice::Severed { side, .. }) = notice else {
            return false;
        };
        self.may_notice(notice) && self.body(side).is_some_and(|body| body.brain.idle())
    }

    pub(super) fn make(&mut self, small: &Small, what: Move) -> Outcome {
        match what {
            Move::Submit => self.submit(small),
            Move::Notice(notice) => self.notice(small, notice),
            Move::ToWorker(worker) => self.order_arrives(small, worker),
            Move::ToRouter(worker) => self.word_arrives(small, worker),
            Move::Packet(index) => {
                let sent = self.parcels.remove(index);
                self.arrive(small, sent.parcel.clone())
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
                let lost = self.parcels.remove(index);
                match lost.parcel.packet {
                    Packet::Landed { .. } => self.said_twice = true,
                    _ => self.silent = true,
                }
                Ok(())
            }
            Move::Twice(index) => {
                let again = self.parcels[index].parcel.clone();
                self.put(again);
                Ok(())
            }
            Move::Damage(index) => {
                let mut parcel = self.parcels.remove(index).parcel.clone();
                parcel.condition = Condition::Damaged;
                parcel.payload.fill(None);
                self.put(parcel);
                Ok(())
            }
            Move::Flip(at) => {
                let parcel = &self.parcels[at].parcel;
                every_flip_is_noticed(&parcel.packet)?;
                let (from, to) = (index(parcel.from), index(parcel.to));
                self.cut(from, to);
                Ok(())
            }
            Move::FlipWord(worker) => {
                let word = self.seats[worker].to_router.front();
                word.map_or(Ok(()), |word| every_flip_is_noticed(&word.0))?;
                self.part(worker);
                Ok(())
            }
            Move::FlipOrder(worker) => {
                let order = self.seats[worker].to_worker.front();
                order.map_or(Ok(()), |order| every_flip_is_noticed(&order.0))?;
                self.part(worker);
                Ok(())
            }
            Move::Change(index, field) => {
                self.change(index, field);
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

    /// One bit of a field of a seal flips where no link checks it.
    fn change(&mut self, at: usize, field: Field) {
        let mut parcel = self.parcels.remove(at).parcel.clone();
        if let Packet::Seal(seal) = &mut parcel.packet {
            match field {
                Field::Handoff => {
                    seal.handoff.attempt ^= 1 << 20;
                    // Its receiver waits for a seal that is gone.
                    self.silent = true;
                }
                Field::BlocksCount => seal.blocks_count ^= 1,
                Field::Digest => seal.digest ^= 1 << 40,
                Field::Content => seal.content.0[3] ^= 1,
                Field::Token => seal.output[0] ^= 1,
                Field::TokensCount => seal.output.push(0),
            }
        }
        self.put(parcel);
    }

    // === clients and the router ===

    pub(super) fn submit(&mut self, small: &Small) -> Outcome {
        let index = self.submitted;
        self.submitted += 1;
        self.reader(index).submit();
        let (flight, request) = (small.flight(index), small.request(index));
        self.router_hears(small, cleave_router::Input::Submitted { flight, request })
    }

    pub(super) fn cancel(&mut self, small: &Small, index: usize) -> Outcome {
        let reader = self.reader(index);
        reader.leave();
        let flight = reader.flight;
        self.router_hears(
            small,
            cleave_router::Input::Cancelled {
                flight,
                why: cleave_router::CancelReason::Left,
            },
        )?;
        match self.readers[index].ending {
            Some(_) => Ok(()),
            None => Err(format!("S5: {flight} was left and did not end at once")),
        }
    }

    pub(super) fn word_arrives(&mut self, small: &Small, worker: usize) -> Outcome {
        let seat = self.seat(worker);
        let (Some(from), Some(word)) = (seat.connected, seat.to_router.pop_front()) else {
            return Err("nothing was said".to_owned());
        };
        match &word.0 {
            Word::Token(handoff, emission) => {
                let at = self.reader_of(handoff.flight)?;
                self.reader(at).token(*handoff, emission)
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
                        self.reader(at).fence(handoff);
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
                    timing: _,
                } => self.end(flight, ending, output_tokens)?,
                cleave_router::Output::Note(cleave_router::Note::Fleet { workers, .. }) => {
                    self.desk().workers = workers.total();
                }
                cleave_router::Output::Note(cleave_router::Note::Retried {
                    handoff,
                    failure,
                    ..
                }) if self.faults == 0 => {
                    return Err(format!("S8: {handoff} failed without a fault: {failure:?}"));
                }
                cleave_router::Output::Note(_)
                | cleave_router::Output::Drained
                | cleave_router::Output::Readiness(_)
                | cleave_router::Output::Want(_) => {}
            }
        }
        Ok(())
    }

    pub(super) fn reader_of(&self, flight: FlightId) -> Result<usize, String> {
        let at = self.readers.iter().position(|r| r.flight == flight);
        at.ok_or_else(|| format!("nobody asked for {flight}"))
    }

    pub(super) fn end(&mut self, flight: FlightId, ending: Ending, told: Option<u32>) -> Outcome {
        let at = self.reader_of(flight)?;
        let count = self.readers[at].given().len() as u32;
        if told.is_some_and(|told| told != count) {
            return Err(format!(
                "S6: {flight} is done with {told:?} tokens, and {count} came"
            ));
        }
        if self.faults == 0 && !matches!(ending, Ending::Done { .. }) {
            return Err(format!("S8: {flight} ended {ending:?} without a fault"));
        }
        let survives = u32::from(self.harm) <= FAILURES_MAX;
        if survives && matches!(ending, Ending::Failed(_)) {
            return Err(format!(
                "S9: {flight} ended {ending:?} after {} blows, and survives {FAILURES_MAX}",
                self.harm
            ));
        }
        self.reader(at).end(ending)
    }

    // === streams ===

    pub(super) fn say_to_router(&mut self, worker: usize, word: Word) {
        let print = Print::of_words(&word);
        let seat = self.seat(worker);
        if seat.connected.is_some() {
            seat.to_router.push_back(Rc::new((word, print)));
        }
    }

    pub(super) fn say_to_worker(&mut self, to: WorkerRef, order: Order) {
        let print = Print::of_words(&order);
        let seat = self.seat(index(to));
        if seat.connected == Some(to) {
            seat.to_worker.push_back(Rc::new((order, print)));
        }
    }

    pub(super) fn order_arrives(&mut self, small: &Small, worker: usize) -> Outcome {
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
}
