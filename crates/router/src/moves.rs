//! Running sequences move: away from a worker that leaves, serves other legs, or runs out of blocks.
//!
//! Owns: a move from the wish to the landing, and the failing over from a worker that is stuck.
//! Never: ends the attempt that generates, or counts a move that came to nothing as a failure of the
//! flight. Invariant: at most `moves_max` sequences leave one worker at once; a sequence moves only
//! while it runs, and begins no second move before the worker it would leave has answered the first.
//!
//! A move is a hand-off whose sender is the decode worker. The client's tokens are counted, the
//! target reserves for prompt and tokens, the source sends while it generates on, stands still for
//! the rest, and the target's `Landed` makes the new attempt the flight's. The source answers for the
//! old attempt until then: whatever happens to the target, the source says whether it goes on.

use crate::alarm::Alarm;
use crate::brain::Brain;
use crate::event::{MoveReason, Note, Output};
use crate::flight::{Attempt, Move, Stage};
use crate::legs::Parting;
use crate::policy::{Ask, NoPlace};
use cleave_domain::{
    Failure, FlightId, HandoffId, Migrate, Order, Refusal, Reserve, Target, WorkerRef,
};
use std::sync::Arc;

impl Brain {
    // === who is to move ===

    /// Moves away what may, from every worker that leaves. `news` names the one worker where room
    /// may have appeared; without it all are looked at.
    pub(crate) fn evacuate(&mut self, news: Option<WorkerRef>) {
        for (source, why) in self.fleet.leaving() {
            self.evacuate_from(source, why, news);
        }
    }

    /// The same for one worker, if it leaves: a sequence may have begun to run there.
    pub(crate) fn evacuate_one(&mut self, source: WorkerRef) {
        if let Some(why) = self.fleet.leaves(source) {
            self.evacuate_from(source, why, None);
        }
    }

    fn evacuate_from(&mut self, source: WorkerRef, why: MoveReason, news: Option<WorkerRef>) {
        let mut free = self.moves_free(source);
        for handoff in self.fleet.sequences(source) {
            if free == 0 {
                return;
            }
            let id = handoff.flight;
            let helps = |who| self.could_move_to(id, who);
            if self.may_move(source, handoff) && news.is_none_or(helps) && self.target(id).is_ok() {
                self.begin_move(id, why);
                free -= 1;
            }
        }
    }

    /// A worker wishes to be rid of a sequence.
    pub(crate) fn crowded(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.current(handoff).is_none_or(|a| a.decode != worker) {
            return self.note(Note::Stale { worker });
        }
        let id = handoff.flight;
        let may = self.may_move(worker, handoff) && self.moves_free(worker) > 0;
        if may && self.target(id).is_ok() {
            self.begin_move(id, MoveReason::Crowded);
        }
    }

    /// How many more sequences may leave the worker now.
    fn moves_free(&self, source: WorkerRef) -> u32 {
        let moves = |handoff: &HandoffId| {
            let flight = self.flights.get(&handoff.flight);
            let here = flight.filter(|f| f.attempt().is_some_and(|a| a.handoff == *handoff));
            here.is_some_and(|flight| flight.moving.is_some())
        };
        let under_way = self
            .fleet
            .sequences(source)
            .iter()
            .filter(|h| moves(h))
            .count();
        self.limits.moves_max.saturating_sub(under_way as u32)
    }

    fn may_move(&self, source: WorkerRef, handoff: HandoffId) -> bool {
        let runs = |a: &Attempt| a.decode == source && a.runs();
        let flight = self.flights.get(&handoff.flight);
        self.current(handoff).is_some_and(runs) && flight.is_some_and(|f| f.moving.is_none())
    }

    // === where to ===

    fn move_ask(&self, id: FlightId) -> Option<Ask> {
        let output = self.limits.expected_output_tokens;
        let output = output.max(self.limits.move_ahead_tokens);
        Some(Ask::of(&self.flights.get(&id)?.request, output))
    }

    /// Where the sequence could move now.
    fn target(&self, id: FlightId) -> Result<WorkerRef, NoPlace> {
        let ask = self.move_ask(id).ok_or(NoPlace::NoWorker)?;
        let flight = self.flights.get(&id).ok_or(NoPlace::NoWorker)?;
        let source = flight.attempt().ok_or(NoPlace::NoWorker)?.decode;
        let query = self.query(flight).asking(ask, &flight.avoided);
        self.fleet.choose_target(source, &query)
    }

    /// Whether news of `who` could give the sequence a place to move to.
    fn could_move_to(&self, id: FlightId, who: WorkerRef) -> bool {
        let (Some(ask), Some(flight)) = (self.move_ask(id), self.flights.get(&id)) else {
            return false;
        };
        let query = self.query(flight).asking(ask, &flight.avoided);
        self.fleet.could_take(who, &query)
    }

    // === the way ===

    fn begin_move(&mut self, id: FlightId, why: MoveReason) {
        let began = self.now;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.moving = Some(Move {
            why,
            began,
            leg: None,
        });
        flight.counts_due += 1;
        self.say(Output::Count { flight: id });
    }

    /// The client's tokens are counted: the target is asked for blocks.
    pub(crate) fn depart(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let of = flight.attempt().filter(|a| a.runs()).cloned();
        let Some(moving) = flight.moving.take_if(|moving| moving.leg.is_none()) else {
            return;
        };
        let target = self.target(id);
        let (Some(of), Ok(target), Some(ask)) = (of, target, self.move_ask(id)) else {
            // There is no room any more; news of some will be told.
            return;
        };
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if flight.over(of.context_tokens_max).is_some() {
            // Its `Finished` is on the way.
            return;
        }
        let handoff = flight.name_attempt();
        let why = moving.why;
        let attempt = Attempt {
            handoff,
            prefill: of.decode,
            decode: target,
            of: Some(of.handoff),
            context_tokens_max: self.fleet.context_tokens_max(target),
            reserved: false,
            prefilled: false,
            trouble: None,
            landed: false,
            finished: None,
        };
        flight.moving = Some(Move {
            began: self.now,
            leg: Some(attempt),
            ..moving
        });
        let reserve = Reserve {
            handoff,
            request: Arc::clone(&flight.request),
            sender: of.decode,
            expected_output_tokens: self.limits.expected_output_tokens,
            ahead_tokens: self.limits.move_ahead_tokens,
            waited: self.now.since(flight.submitted),
        };
        self.fleet.promise_move(handoff, target, &ask);
        let until = self.now + self.limits.reserve_timeout;
        self.alarms.set(id, Alarm::Step, Some(until));
        self.note(Note::Moving {
            handoff,
            from: of.decode,
            to: target,
            why,
        });
        self.tell(target, Order::Reserve(reserve));
    }

    /// The target holds blocks: the source begins to send.
    pub(crate) fn move_reserved(&mut self, handoff: HandoffId, target: Target) {
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return;
        };
        let tokens = (flight.request.prompt.len() + flight.request.generated.len()) as u32;
        let Some(leg) = flight.leg_mut(handoff) else {
            return;
        };
        leg.reserved = true;
        let (source, of) = (leg.prefill, leg.sending());
        self.alarms.set(handoff.flight, Alarm::Step, None);
        let migrate = Migrate {
            handoff,
            of,
            target,
            tokens,
        };
        self.tell(source, Order::Migrate(migrate));
    }

    /// The target has everything: the flight is there now.
    pub(crate) fn moved(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let Some(Move {
            began,
            leg: Some(leg),
            ..
        }) = flight.moving.take()
        else {
            return;
        };
        let (handoff, source, of) = (leg.handoff, leg.prefill, leg.sending());
        flight.stage = Stage::Flying(Attempt {
            landed: true,
            ..leg
        });
        flight.avoided.clear();
        self.alarms.set(id, Alarm::Step, None);
        self.alarms.set(id, Alarm::Pause, None);
        let took = self.now.since(began);
        self.note(Note::Moved { handoff, took });
        // The target tells the source too, but if that is lost nobody else would. The source stood
        // still before it sealed: it has nothing more to say than what is on its way.
        self.part(source, of, Parting::Cancel);
        self.evacuate(None);
    }

    // === what comes to nothing ===

    /// Whether the flight stands sealed on its way, and its target may have everything.
    pub(crate) fn is_sealed(&self, id: FlightId) -> bool {
        let leg = self.flights.get(&id).and_then(|flight| flight.leg());
        leg.is_some_and(|leg| leg.prefilled && leg.trouble.is_none())
    }

    /// The target does not take the sequence. The source, once it was told to send, says what
    /// becomes of it: it may have stood still already.
    pub(crate) fn move_broken(&mut self, handoff: HandoffId, failure: Failure) {
        let id = handoff.flight;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let waits = flight.attempt().is_some_and(|a| a.trouble.is_none());
        match flight.leg_mut(handoff) {
            Some(leg) if leg.reserved && waits => {
                leg.trouble.get_or_insert(failure);
            }
            Some(_) => self.move_over(id, failure),
            None => {}
        }
    }

    pub(crate) fn move_refused(&mut self, worker: WorkerRef, handoff: HandoffId, refusal: Refusal) {
        self.note(Note::PassedOver {
            handoff,
            worker,
            refusal: Some(refusal),
        });
        self.move_broken(handoff, Failure::Rejected);
    }

    /// The sequence goes on where it was, if it still is there. The target is not asked again for a
    /// moment; another one may be.
    pub(crate) fn move_over(&mut self, id: FlightId, failure: Failure) {
        let until = self.now + self.limits.reserve_timeout;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let Some(leg) = flight.moving.take().and_then(|moving| moving.leg) else {
            return;
        };
        flight.avoided.insert(leg.decode.worker);
        let doubt = flight.attempt().and_then(|a| a.trouble.clone());
        let current = flight.attempt().map(|a| a.handoff);
        self.alarms.set(id, Alarm::Step, None);
        self.alarms.set(id, Alarm::Pause, Some(until));
        self.part(leg.decode, leg.handoff, Parting::Cancel);
        match (doubt, current) {
            (Some(doubt), Some(current)) => self.fail(current, doubt, leg.decode),
            _ => {
                let handoff = leg.handoff;
                self.note(Note::Stayed { handoff, failure });
                self.evacuate(None);
            }
        }
    }

    /// Targets that did not take the sequence may be asked again.
    pub(crate) fn paused(&mut self, id: FlightId) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.avoided.clear();
            self.evacuate(None);
        }
    }

    /// The source says that the sequence stays.
    pub(crate) fn stayed(&mut self, worker: WorkerRef, handoff: HandoffId, failure: Failure) {
        let moves = |a: &Attempt| a.of.is_some() && a.reserved && a.prefill == worker;
        if self.leg(handoff).is_some_and(moves) {
            // What the target said says more.
            let said = self.leg(handoff).and_then(|leg| leg.trouble.clone());
            return self.move_over(handoff.flight, said.unwrap_or(failure));
        }
        match self.current(handoff) {
            // It landed, and its last tokens will not come.
            Some(a) if moves(a) && !a.prefilled => self.fail(handoff, failure, worker),
            _ => self.note(Note::Stale { worker }),
        }
    }

    // === stuck workers ===

    /// The worker makes no progress. Nothing moves there; what is there goes elsewhere, if it can.
    pub(crate) fn stuck(&mut self, worker: WorkerRef) {
        if !self.fleet.set_stuck(worker, true) {
            return;
        }
        self.note(Note::WorkerStuck { worker });
        for handoff in self.fleet.sequences(worker) {
            if self.leg(handoff).is_some_and(|leg| leg.decode == worker) {
                self.part(worker, handoff, Parting::Cancel);
                self.move_broken(handoff, Failure::WorkerStuck);
            }
        }
        self.rescue();
    }

    /// Fails flights over from stuck workers while there is another place for them; one at a time,
    /// for a flight whose tokens are being counted has no place yet.
    pub(crate) fn rescue(&mut self) {
        for worker in self.fleet.stuck() {
            for handoff in self.fleet.handoffs(worker) {
                if self.counting > 0 {
                    return;
                }
                if self.may_rescue(worker, handoff) && self.find(handoff.flight).is_ok() {
                    self.fail(handoff, Failure::WorkerStuck, worker);
                }
            }
        }
    }

    /// A flight on its last failure is better off waiting for the worker.
    fn may_rescue(&self, worker: WorkerRef, handoff: HandoffId) -> bool {
        let waits_for = |a: &Attempt| {
            let sends = a.prefill == worker && !a.landed;
            a.finished.is_none() && (a.decode == worker || sends)
        };
        let flight = self.flights.get(&handoff.flight);
        let budget = flight.is_some_and(|f| f.failures < self.limits.failures_max);
        budget && self.current(handoff).is_some_and(waits_for) && !self.is_sealed(handoff.flight)
    }
}
