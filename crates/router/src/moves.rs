//! Running sequences move: away from a worker that leaves, serves other legs, or runs out of blocks.
//!
//! Owns: a move from the wish to the landing. Never: ends the attempt that generates, or counts a move
//! that came to nothing as a failure of the flight.
//! Invariant: at most `moves_max` sequences leave one worker at once; a sequence moves only while it
//! runs, and begins no second move before the worker it would leave has spoken of the first.
//!
//! A move is a hand-off whose sender is the decode worker. The client's tokens are counted, the
//! target reserves for prompt and tokens, the source sends while it generates on, stands still for
//! the rest, and the target's `Landed` makes the new attempt the flight's. The source answers for the
//! old attempt until then: whatever happens to the target, the source says whether it goes on. After a
//! move that came to nothing the flight stays where it is for a while, twice as long each time.

use crate::alarm::Alarm;
use crate::brain::Brain;
use crate::candidates::Burden;
use crate::event::{Mode, MoveReason, Note, Output};
use crate::flight::{Attempt, Flight, Move, Stage};
use crate::legs::Parting;
use crate::policy::{Ask, NoPlace};
use cleave_domain::{
    Failure, FlightId, HandoffId, Load, Migrate, Order, Refusal, Reserve, Target, WorkerId,
    WorkerRef,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How long a flight stays where it is after a move that came to nothing: at first, and at most.
const REST: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

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
        for handoff in self.fleet.sequences_to_move(source, why) {
            if free == 0 {
                return;
            }
            let id = handoff.flight;
            let helps = |who| self.could_move_to(id, who);
            if self.may_move(source, handoff)
                && news.is_none_or(helps)
                && self.target(id, why).is_ok()
            {
                self.begin_move(id, why);
                free -= 1;
            }
        }
    }

    /// A worker wishes to be rid of a sequence. The wish stands until another takes its place, the
    /// sequence is gone, or there is room; meanwhile no other is placed there.
    pub(crate) fn crowded(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.current(handoff).is_none_or(|a| a.decode != worker) {
            return self.note(Note::Stale { worker });
        }
        self.fleet.wish(worker, handoff);
        self.grant(worker, handoff);
    }

    /// Moves away what workers wish to be rid of; `news` as in [`Brain::evacuate`].
    pub(crate) fn grant_wishes(&mut self, news: Option<WorkerRef>) {
        for (source, handoff) in self.fleet.wishes() {
            if news.is_none_or(|who| self.could_move_to(handoff.flight, who)) {
                self.grant(source, handoff);
            }
        }
    }

    fn grant(&mut self, source: WorkerRef, handoff: HandoffId) {
        let id = handoff.flight;
        let may = self.may_move(source, handoff) && self.moves_free(source) > 0;
        if may && self.target(id, MoveReason::Crowded).is_ok() {
            self.begin_move(id, MoveReason::Crowded);
        }
    }

    /// Whether a worker's load shows room for what one more sequence is expected to draw.
    pub(crate) fn settle_wish(&mut self, worker: WorkerRef, load: &Load) {
        let tokens = self.limits.expected_output_tokens;
        let blocks = self.fleet.blocks(worker, tokens);
        if blocks.is_some_and(|blocks| load.blocks_free >= blocks) {
            self.fleet.unwish(worker);
        }
    }

    /// How many more sequences may leave the worker now.
    fn moves_free(&self, source: WorkerRef) -> u32 {
        let generates = |a: &Attempt| {
            let promise = self.fleet.promised(source, a.handoff);
            a.decode == source && promise.is_some_and(|promise| promise.blocks > 0)
        };
        let attempts = self.moving.iter();
        let attempts = attempts.filter_map(|id| self.flights.get(id)?.attempt());
        let under_way = attempts.filter(|attempt| generates(attempt)).count();
        self.limits.moves_max.saturating_sub(under_way as u32)
    }

    fn may_move(&self, source: WorkerRef, handoff: HandoffId) -> bool {
        let runs = |a: &Attempt| a.decode == source && a.runs();
        let rests = self.alarms.get(handoff.flight, Alarm::Pause).is_some();
        let flight = self.flights.get(&handoff.flight);
        let free = flight.is_some_and(|f| f.moving.is_none()) && !rests;
        free && self.current(handoff).is_some_and(runs)
    }

    // === where to ===

    /// Whoever takes a sequence over to make room elsewhere must have more of it than it takes: or it
    /// would be the next to wish.
    fn move_ask(&self, flight: &Flight, why: MoveReason) -> Ask {
        let output = self.limits.expected_output_tokens;
        let output = output.max(self.limits.move_ahead_tokens);
        Ask::of(
            &flight.request,
            match why {
                MoveReason::Drain | MoveReason::Role => output,
                MoveReason::Crowded => output.saturating_mul(2),
            },
        )
    }

    /// Where the sequence could move now: to one that did not fail to take it before, if there is one.
    fn target(&self, id: FlightId, why: MoveReason) -> Result<WorkerRef, NoPlace> {
        let flight = self.flights.get(&id).ok_or(NoPlace::NoWorker)?;
        let source = flight.attempt().ok_or(NoPlace::NoWorker)?.decode;
        let ask = self.move_ask(flight, why);
        let query = self.query(flight, None);
        let among = |excluded: &BTreeSet<WorkerId>| {
            let query = query.asking(ask, excluded);
            self.fleet.choose_target(source, &query)
        };
        among(&flight.avoided).or_else(|_| among(&BTreeSet::new()))
    }

    /// Whether news of `who` could give the sequence a place to move to.
    fn could_move_to(&self, id: FlightId, who: WorkerRef) -> bool {
        let Some(flight) = self.flights.get(&id) else {
            return false;
        };
        let ask = self.move_ask(flight, MoveReason::Drain);
        let query = self.query(flight, None);
        self.fleet
            .could_take(who, &query.asking(ask, &BTreeSet::new()))
    }

    // === the way ===

    fn begin_move(&mut self, id: FlightId, why: MoveReason) {
        let began = self.now;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let handoff = flight.name_attempt();
        let moving = Move {
            handoff,
            why,
            began,
            leg: None,
        };
        self.set_move(id, moving);
        self.say(Output::Count { handoff });
    }

    fn set_move(&mut self, id: FlightId, moving: Move) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.moving = Some(moving);
            self.moving.insert(id);
        }
    }

    pub(crate) fn take_move(&mut self, id: FlightId) -> Option<Move> {
        self.moving.remove(&id);
        self.flights.get_mut(&id)?.moving.take()
    }

    /// The client's tokens are counted: the target is asked for blocks.
    pub(crate) fn depart(&mut self, id: FlightId) {
        let moving = self.take_move(id);
        let flight = self.flights.get(&id);
        let of = flight.and_then(|flight| flight.attempt());
        let of = of.filter(|a| a.runs()).cloned();
        let Some((of, moving)) = of.zip(moving) else {
            return;
        };
        let why = moving.why;
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if flight.over(of.context_tokens_max).is_some() {
            // Its `Finished` is on the way.
            return;
        }
        if why == MoveReason::Crowded {
            if self.yielded_lately(flight) {
                return self.fleet.unwish(of.decode);
            }
        } else if self.fleet.leaves(of.decode).is_none() {
            // It serves decode legs again.
            return;
        }
        // If there is no room any more, news of some will be told.
        if let Ok(target) = self.target(id, why) {
            self.ask_target(id, &of, target, &moving);
        }
    }

    /// A sequence that was moved to make room draws some tokens before it is moved for that again.
    fn yielded_lately(&self, flight: &Flight) -> bool {
        let drawn = flight.request.generated.len() as u32;
        let rest = self.limits.expected_output_tokens;
        flight
            .yielded_at
            .is_some_and(|at| drawn < at.saturating_add(rest))
    }

    fn ask_target(&mut self, id: FlightId, of: &Attempt, target: WorkerRef, moving: &Move) {
        let (handoff, why) = (moving.handoff, moving.why);
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let burden = Burden {
            ask: self.move_ask(flight, why),
            tpot: flight
                .request
                .slo
                .tpot
                .filter(|_| self.limits.mode == Mode::Slo),
        };
        let reserve = Reserve {
            handoff,
            request: Arc::clone(&flight.request),
            sender: of.decode,
            expected_output_tokens: self.limits.expected_output_tokens,
            ahead_tokens: self.limits.move_ahead_tokens,
            waited: self.now.since(flight.submitted),
            due: None,
        };
        let leg = Attempt {
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
        let moving = Move {
            handoff,
            why,
            began: self.now,
            leg: Some(leg),
        };
        self.set_move(id, moving);
        self.fleet.promise_move(handoff, target, &burden);
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
        let Some(Move {
            why,
            began,
            leg: Some(leg),
            ..
        }) = self.take_move(id)
        else {
            return;
        };
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.stays = 0;
        if why == MoveReason::Crowded {
            flight.yielded_at = Some(flight.request.generated.len() as u32);
        }
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
        self.next_from(source);
    }

    // === what comes to nothing ===

    /// Whether the flight stands sealed on its way, and its target may have everything.
    pub(crate) fn is_sealed(&self, id: FlightId) -> bool {
        let leg = self.flights.get(&id).and_then(|flight| flight.leg());
        leg.is_some_and(|leg| leg.prefilled && leg.trouble.is_none())
    }

    /// The target does not take the sequence, or should not. The source, once it was told to send, has
    /// the last word about it: it may have sealed, and then waits for what the target says.
    pub(crate) fn move_broken(&mut self, handoff: HandoffId, failure: Failure) {
        let id = handoff.flight;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let speaks = flight.attempt().is_some_and(|a| a.trouble.is_none());
        let Some(leg) = flight.leg_mut(handoff) else {
            return;
        };
        if !(leg.reserved && speaks) {
            return self.move_over(id, failure);
        }
        if leg.trouble.is_none() {
            leg.trouble = Some(failure);
            let (source, target) = (leg.prefill, leg.decode);
            self.part(target, handoff, Parting::Cancel);
            self.tell(source, Order::Cancel { handoff });
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

    /// The sequence goes on where it was, if it still is there, and rests before it tries again.
    pub(crate) fn move_over(&mut self, id: FlightId, failure: Failure) {
        let Some(leg) = self.take_move(id).and_then(|moving| moving.leg) else {
            return;
        };
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.avoided.insert(leg.decode.worker);
        let (shortest, longest) = REST;
        let rest = shortest * (1_u32 << flight.stays.min(10));
        let until = self.now + rest.min(longest);
        flight.stays += 1;
        let doubt = flight.attempt().and_then(|a| a.trouble.clone());
        let current = flight.attempt().map(|a| a.handoff);
        self.alarms.set(id, Alarm::Step, None);
        self.alarms.set(id, Alarm::Pause, Some(until));
        self.part(leg.decode, leg.handoff, Parting::Cancel);
        let handoff = leg.handoff;
        self.note(Note::Stayed { handoff, failure });
        match doubt.zip(current) {
            Some((doubt, current)) => self.fail(current, doubt, leg.decode),
            None => self.next_from(leg.prefill),
        }
    }

    /// The flight has rested after a move that came to nothing.
    pub(crate) fn rested(&mut self, id: FlightId) {
        let source = self
            .flights
            .get(&id)
            .and_then(|f| f.attempt())
            .map(|a| a.decode);
        if let Some(source) = source {
            self.next_from(source);
        }
    }

    /// A move from this worker is over, or may be tried again: another may go.
    fn next_from(&mut self, source: WorkerRef) {
        self.evacuate_one(source);
        self.grant_wishes(None);
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
}
