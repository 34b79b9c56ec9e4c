//! Effects of a transition on a state.
//!
//! Owns: performing the brains' outputs, and the properties that are visible from outside a brain
//! (S1 to S4 with the worker's own checks; S9 and L1, L2 at rest). Never: decides anything that a
//! brain decides. Invariant: one transition is one input to one brain, and all that follows from it
//! at once.

use super::guard::{Guard, MessageFate};
use super::hasher::StateHasher;
use super::state::{PendingNotice, SmallWorldMessage, SmallWorldState};
use super::transitions::{SealField, Transition, TransitionCost};
use super::worlds::{FAILURES_MAX, ROUTER, SmallWorld};
use crate::bit_flips::check_every_flip_is_detected;
use crate::run::worker_index;
use cleave_domain::{Ending, FlightId, HandoffId, Order, Report, RequestStageTimes, WorkerRef};
use cleave_kv::Packet;
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{RouterActions, RouterInput, RouterNote, RouterReadiness};
use cleave_sched::{PayloadCondition, WorkerInput};
use std::rc::Rc;

/// `Err` names the violated property.
pub(super) type PropertyCheck = Result<(), String>;

impl SmallWorldState {
    /// The first state: every worker has started and is known to the router.
    pub(super) fn first(small: &SmallWorld) -> Result<Self, String> {
        let mut state = Self::new(small);
        for worker in 0..small.roles.len() {
            state.start(small, worker)?;
        }
        let greets = |transition: &Transition| {
            matches!(
                transition,
                Transition::ToRouter(_) | Transition::ToWorker(_)
            )
        };
        while let Some((transition, _)) = state
            .moves(small)
            .into_iter()
            .find(|(transition, _)| greets(transition))
        {
            state.take(small, transition, TransitionCost::Free)?;
        }
        Ok(state)
    }

    pub(super) fn take(
        &mut self,
        small: &SmallWorld,
        transition: Transition,
        cost: TransitionCost,
    ) -> PropertyCheck {
        match cost {
            TransitionCost::Free => {}
            TransitionCost::Reorder => self.surprises_left -= 1,
            TransitionCost::Fault => {
                self.surprises_left -= 1;
                self.faults += 1;
                self.failures_possible += match transition {
                    // The two ends notice the loss at different times, and the second notice may
                    // hit the next attempt.
                    Transition::Cut(..) | Transition::Flip(_) => 2,
                    // A flight may also have waited for longer than it may.
                    Transition::TimePassesEarly => 2,
                    Transition::Expire(worker) if worker == self.workers.len() => 2,
                    _ => 1,
                };
            }
        }
        self.make(small, transition)?;
        // A worker that holds nothing loses nothing by a link loss, so it is notified at once: this
        // saves states.
        while let Some(notice) = self.notices.iter().copied().find(|n| self.is_idle_news(*n)) {
            self.notice(small, notice)?;
        }
        Ok(())
    }

    pub(super) fn is_idle_news(&self, notice: PendingNotice) -> bool {
        let (PendingNotice::LinkLost { side, .. } | PendingNotice::PeerFenced { side, .. }) =
            notice
        else {
            return false;
        };
        self.may_notice(notice) && self.body(side).is_some_and(|body| body.brain.idle())
    }

    pub(super) fn make(&mut self, small: &SmallWorld, transition: Transition) -> PropertyCheck {
        match transition {
            Transition::Submit => self.submit(small),
            Transition::Notice(notice) => self.notice(small, notice),
            Transition::ToWorker(worker) => self.order_arrives(small, worker),
            Transition::ToRouter(worker) => self.message_arrives(small, worker),
            Transition::Packet(index) => {
                let sent = self.packets.remove(index);
                self.arrive(small, sent.envelope.clone())
            }
            Transition::Counted(index) => {
                let (handoff, generated) = self.count_answers.remove(index);
                self.feed_router(small, RouterInput::Counted { handoff, generated })
            }
            Transition::Late(index) => self.land_late(index),
            Transition::Engine(worker) => self.engine(small, worker, 0),
            Transition::EngineFault(worker) => self.engine(small, worker, 1000),
            Transition::Exit(worker) => self.exit(worker),
            Transition::Command => {
                let (worker, command) = small.commands[self.commanded];
                self.commanded += 1;
                let worker = crate::run::worker_ref(worker, 1).worker;
                let input = RouterInput::Commanded { worker, command };
                self.feed_router(small, input)
            }
            Transition::TimePasses | Transition::TimePassesEarly => self.tick(small),
            Transition::Lose(index) => {
                let lost = self.packets.remove(index);
                match lost.envelope.packet {
                    Packet::Landed { .. } => self.landed_lost = true,
                    _ => self.needs_timer = true,
                }
                Ok(())
            }
            Transition::Duplicate(index) => {
                let again = self.packets[index].envelope.clone();
                self.add_packet(again);
                Ok(())
            }
            Transition::Damage(index) => {
                let mut envelope = self.packets.remove(index).envelope.clone();
                envelope.condition = PayloadCondition::Damaged;
                envelope.payload.fill(None);
                self.add_packet(envelope);
                Ok(())
            }
            Transition::Flip(at) => {
                let envelope = &self.packets[at].envelope;
                check_every_flip_is_detected(&envelope.packet)?;
                let (from, to) = (worker_index(envelope.from), worker_index(envelope.to));
                self.cut(from, to);
                Ok(())
            }
            Transition::FlipReport(worker) => {
                let message = self.workers[worker].to_router.front();
                message.map_or(Ok(()), |message| check_every_flip_is_detected(&message.0))?;
                self.cut_stream(worker);
                Ok(())
            }
            Transition::FlipOrder(worker) => {
                let order = self.workers[worker].to_worker.front();
                order.map_or(Ok(()), |order| check_every_flip_is_detected(&order.0))?;
                self.cut_stream(worker);
                Ok(())
            }
            Transition::ChangeSeal(index, field) => {
                self.change(index, field);
                Ok(())
            }
            Transition::Misroute(index, how) => {
                self.go_astray(small, index, how);
                Ok(())
            }
            Transition::Cancel(index) => self.cancel(small, index),
            Transition::Crash(worker) => self.exit(worker),
            Transition::Expire(worker) => self.expire(small, worker),
            Transition::Cut(a, b) => {
                self.cut(a, b);
                Ok(())
            }
            Transition::Disconnect(worker) => {
                self.cut_stream(worker);
                Ok(())
            }
        }
    }

    /// Flips one bit of a seal's field where no link checks it.
    fn change(&mut self, at: usize, field: SealField) {
        let mut envelope = self.packets.remove(at).envelope.clone();
        if let Packet::Seal(seal) = &mut envelope.packet {
            match field {
                SealField::Handoff => {
                    seal.handoff.attempt ^= 1 << 20;
                    // The receiver waits for a seal that no longer names its hand-off.
                    self.needs_timer = true;
                }
                SealField::BlocksCount => seal.blocks_count ^= 1,
                SealField::Digest => seal.digest ^= 1 << 40,
                SealField::Content => seal.content.0[3] ^= 1,
                SealField::Token => seal.output[0] ^= 1,
                SealField::TokensCount => seal.output.push(0),
                SealField::State => seal.state = seal.state.map(|digest| digest ^ 1 << 9),
            }
        }
        self.add_packet(envelope);
    }

    // === clients and the router ===

    pub(super) fn submit(&mut self, small: &SmallWorld) -> PropertyCheck {
        let index = self.submitted;
        self.submitted += 1;
        self.client_mut(index).submit();
        let (flight, request) = (small.flight(index), small.request(index));
        self.feed_router(small, RouterInput::Submitted { flight, request })
    }

    pub(super) fn cancel(&mut self, small: &SmallWorld, index: usize) -> PropertyCheck {
        let reader = self.client_mut(index);
        reader.leave();
        let flight = reader.flight;
        self.feed_router(
            small,
            RouterInput::Cancelled {
                flight,
                why: cleave_router::CancelReason::Left,
            },
        )?;
        match self.clients[index].ending {
            Some(_) => Ok(()),
            None => Err(format!(
                "S5: {flight} did not end at once when its client left"
            )),
        }
    }

    pub(super) fn message_arrives(&mut self, small: &SmallWorld, worker: usize) -> PropertyCheck {
        let process = self.worker_mut(worker);
        let (Some(from), Some(message)) = (process.connected, process.to_router.pop_front()) else {
            return Err("no message to deliver".to_owned());
        };
        match &message.0 {
            SmallWorldMessage::Token(handoff, emission) => {
                let at = self.reader_of(handoff.flight)?;
                self.client_mut(at).receive_token(*handoff, emission)
            }
            SmallWorldMessage::Report(report) => {
                let report = report.clone();
                let input = RouterInput::WorkerReported {
                    worker: from,
                    report,
                };
                self.feed_router(small, input)
            }
        }?;
        // Load and cache reports arrive with the message before them: alone they decide little, and
        // every moment of their arrival would be a state.
        let process = &self.workers[worker];
        let is_news = |report: &Report| matches!(report, Report::Load(_) | Report::Prefix { .. });
        match process.to_router.front().map(|message| &message.0) {
            Some(SmallWorldMessage::Report(report)) if is_news(report) => {
                self.message_arrives(small, worker)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn feed_router(&mut self, small: &SmallWorld, input: RouterInput) -> PropertyCheck {
        let input = self.filter_router_input(small, input);
        let after = match &input {
            RouterInput::WorkerReported { report, .. } => Some(report.clone()),
            _ => None,
        };
        let now = self.now;
        let router = self.router_mut();
        let at = now + router.skew;
        router.last_input_at = at;
        router.brain.handle(at, input);
        let mut outputs = Vec::new();
        while let Some(output) = router.brain.poll() {
            outputs.push(output);
        }
        router.brain.check();
        for output in outputs {
            let mut body = SmallWorldRouterBody {
                state: self,
                small,
                after: after.as_ref(),
            };
            output.perform(&mut body)?;
        }
        Ok(())
    }

    pub(super) fn reader_of(&self, flight: FlightId) -> Result<usize, String> {
        let at = self.clients.iter().position(|r| r.flight == flight);
        at.ok_or_else(|| format!("no client submitted {flight}"))
    }

    pub(super) fn end(
        &mut self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
    ) -> PropertyCheck {
        let at = self.reader_of(flight)?;
        let count = self.clients[at].delivered().len() as u32;
        if output_tokens.is_some_and(|reported| reported != count) {
            return Err(format!(
                "S6: {flight} is done with {output_tokens:?} tokens, but {count} came"
            ));
        }
        if self.faults == 0 && !matches!(ending, Ending::Done { .. }) {
            return Err(format!("S8: {flight} ended {ending:?} without a fault"));
        }
        let survives = u32::from(self.failures_possible) <= FAILURES_MAX;
        if survives && matches!(ending, Ending::Failed(_)) {
            return Err(format!(
                "S9: {flight} ended {ending:?} after {} failures, but survives {FAILURES_MAX}",
                self.failures_possible
            ));
        }
        self.client_mut(at).end(ending)
    }

    // === streams ===

    pub(super) fn send_to_router(&mut self, worker: usize, message: SmallWorldMessage) {
        let print = StateHasher::of_debug(&message);
        let process = self.worker_mut(worker);
        if process.connected.is_some() {
            process.to_router.push_back(Rc::new((message, print)));
        }
    }

    pub(super) fn send_order(&mut self, to: WorkerRef, order: Order) {
        let print = StateHasher::of_debug(&order);
        let process = self.worker_mut(worker_index(to));
        if process.connected == Some(to) {
            process.to_worker.push_back(Rc::new((order, print)));
        }
    }

    pub(super) fn order_arrives(&mut self, small: &SmallWorld, worker: usize) -> PropertyCheck {
        let order = self.worker_mut(worker).to_worker.pop_front();
        let Some(order) = order.map(|order| order.0.clone()) else {
            return Err("no order to deliver".to_owned());
        };
        let Some(order) = self.filter_order(small, worker, order) else {
            return Ok(());
        };
        let router = ROUTER;
        self.feed_worker(small, worker, WorkerInput::Ordered { router, order })
    }
}

/// The body of the router of a small world.
struct SmallWorldRouterBody<'a> {
    state: &'a mut SmallWorldState,
    small: &'a SmallWorld,
    /// The report that the outputs follow from.
    after: Option<&'a Report>,
}

impl RouterActions for SmallWorldRouterBody<'_> {
    type Outcome = PropertyCheck;

    fn order(&mut self, worker: WorkerRef, order: Order) -> PropertyCheck {
        let sent = SmallWorldState::filter_sent_order(self.small, self.after, &order);
        if sent == MessageFate::Delivered {
            self.state.send_order(worker, order);
        }
        Ok(())
    }

    fn fence(&mut self, handoff: HandoffId) -> PropertyCheck {
        let at = self.state.reader_of(handoff.flight)?;
        if self.small.missing_guard != Some(Guard::Fence) {
            self.state.client_mut(at).fence(handoff);
        }
        self.count(handoff)
    }

    fn count(&mut self, handoff: HandoffId) -> PropertyCheck {
        let at = self.state.reader_of(handoff.flight)?;
        let delivered = self.state.clients[at].delivered();
        self.state.count_answers.push((handoff, delivered));
        Ok(())
    }

    fn end(
        &mut self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
        _: RequestStageTimes,
    ) -> PropertyCheck {
        self.state.end(flight, ending, output_tokens)
    }

    fn drained(&mut self) -> PropertyCheck {
        Ok(())
    }

    fn readiness(&mut self, _: RouterReadiness) -> PropertyCheck {
        Ok(())
    }

    fn workers_wanted(&mut self, _: ScalerDecision) -> PropertyCheck {
        Ok(())
    }

    fn note(&mut self, note: RouterNote) -> PropertyCheck {
        match note {
            RouterNote::Fleet { workers, .. } => {
                self.state.router_mut().workers = workers.total();
                Ok(())
            }
            RouterNote::Retried {
                handoff, failure, ..
            } if self.state.faults == 0 => {
                Err(format!("S8: {handoff} failed without a fault: {failure:?}"))
            }
            _ => Ok(()),
        }
    }
}
