//! The loop around a router's brain: hear one fact, do everything the brain asks, wait for the next.
//!
//! Never: decides, blocks, or sees a token. Invariant: the brain is drained before it is told the
//! next thing, and each of a worker's lives joins and is lost in turn.

use super::facts::{flight_of, words};
use super::flights::{End, Flights};
use super::joining::warn_of;
use super::lookout::{BlockSize, Lookout};
use super::orders;
use super::passes::Passes;
use super::roster::Roster;
use super::standby::Standby;
use crate::clock::{Clock, reached};
use crate::line::{Downward, LinkState, WorkerLine};
use crate::scaling::Standing;
use crate::tape::Recorder;
use crate::telemetry::{PromiseMeters, RouterMeters, ScalingSeries};
use cleave_api::WorkerState;
use cleave_domain::{
    FlightId, HandoffId, Order, Report, Request, Role, ScalingMode, SloPolicy, TapeLine, TokenId,
    WorkerId, WorkerRef,
};
use cleave_planner::scaling::Decision;
use cleave_router::{
    Brain, CancelReason, Command, Decided, Input, Limits, Note, Output, Outside, Readiness,
};
use cleave_transfer::Pass;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, watch};
use tracing::{Level, error, info, warn};

/// What the outside tells a router's driver.
#[derive(Debug)]
pub(crate) enum RouterEvent {
    /// A worker connected and was welcomed.
    Joined(Box<WorkerLine>),
    /// That connection is over.
    Lost { worker: WorkerRef, serial: u64 },
    /// A worker reported something.
    Told {
        worker: WorkerRef,
        serial: u64,
        report: Report,
        read: Instant,
    },
    /// Whoever is to send this may write to what a worker reserved.
    Passed {
        worker: WorkerRef,
        serial: u64,
        handoff: HandoffId,
        pass: Pass,
    },
    /// A client wants a sequence.
    Submitted {
        flight: FlightId,
        request: Arc<Request>,
    },
    /// A client left before the last token.
    Cancelled { flight: FlightId, why: CancelReason },
    /// A client does not read what waits for it.
    Stalled { flight: FlightId },
    /// It reads again.
    Flowing { flight: FlightId },
    /// An operator wants something of a worker.
    Commanded { worker: WorkerId, command: Command },
    /// Other promises hold from now on.
    PolicyChanged { policy: Arc<SloPolicy> },
    /// So many requests wait for a worker, without being flights here.
    Wait { place: Outside, count: u32 },
    /// A worker measured a link to another one.
    Measured {
        worker: WorkerRef,
        serial: u64,
        link: LinkState,
    },
    /// The process was asked to end.
    Drain,
    /// Stop at once; what is left of flights is ended.
    Stop,
}

/// What outputs are done with.
pub(crate) struct Hands {
    pub(crate) flights: Arc<Flights>,
    pub(crate) roster: Arc<Roster>,
    pub(crate) meters: RouterMeters,
    pub(crate) promises: PromiseMeters,
    pub(crate) lookout: Arc<Lookout>,
    pub(crate) recorder: Recorder,
    pub(crate) readiness: watch::Sender<cleave_api::Readiness>,
    pub(crate) drained: watch::Sender<bool>,
    /// How many workers there are to be, as it was said last.
    pub(crate) scaling: watch::Sender<Standing>,
    pub(crate) scaling_series: ScalingSeries,
}

/// Where facts come from: connections wait when the driver is behind, clients cannot.
pub(crate) struct Ears {
    pub(crate) workers: mpsc::Receiver<RouterEvent>,
    pub(crate) clients: mpsc::UnboundedReceiver<RouterEvent>,
}

/// A connected worker.
#[derive(Debug)]
struct Connected {
    line: WorkerLine,
    /// Peers whose address it has been told.
    knows: BTreeSet<WorkerRef>,
}

/// A router's brain and its body.
pub(crate) struct Driver {
    clock: Clock,
    brain: Brain,
    ears: Ears,
    hands: Hands,
    workers: BTreeMap<WorkerId, Connected>,
    standby: Standby,
    passes: Passes,
    /// Answers to what the brain asked; it hears them before anything else.
    answers: VecDeque<Input>,
    /// Facts that came up while the brain was being drained.
    pending: VecDeque<Input>,
}

impl Driver {
    pub(crate) fn new(limits: Limits, ears: Ears, mut hands: Hands) -> Self {
        hands.readiness.send_replace(words(Readiness::NONE));
        hands.recorder.router(TapeLine::Born { limits: &limits });
        Self {
            clock: Clock::start(),
            brain: Brain::new(limits),
            ears,
            hands,
            workers: BTreeMap::new(),
            standby: Standby::default(),
            passes: Passes::default(),
            answers: VecDeque::new(),
            pending: VecDeque::new(),
        }
    }

    /// Runs until told to stop. Whoever runs it ends the flights that are left.
    pub(crate) async fn run(mut self) {
        while let Some(event) = self.next_event().await {
            match event {
                RouterEvent::Stop => break,
                event => self.hear_outside(event),
            }
        }
    }

    /// The next event; `None` when nobody can send any more. Wakes the brain at its deadlines.
    async fn next_event(&mut self) -> Option<RouterEvent> {
        loop {
            let deadline = self.brain.deadline();
            // In one order always, so that the same facts at the same moments give the same decisions.
            // Workers say no more than what was begun with them, so clients come to be heard.
            tokio::select! {
                biased;
                () = reached(self.clock, deadline) => {}
                event = self.ears.workers.recv() => return event,
                event = self.ears.clients.recv() => return event,
            }
            self.hear(Input::Woke);
        }
    }

    /// Tells the brain one fact, and does all that follows from it.
    fn hear(&mut self, input: Input) {
        self.pending.push_back(input);
        self.settle();
    }

    /// Tells the brain all that is pending, and what comes up meanwhile.
    fn settle(&mut self) {
        while let Some(input) = self.next_fact() {
            let at = self.clock.now();
            let line = TapeLine::Heard { at, input: &input };
            self.hands.recorder.router(line);
            self.brain.handle(at, input);
            while let Some(output) = self.brain.poll() {
                let line = TapeLine::Said { output: &output };
                self.hands.recorder.router(line);
                self.perform(output);
            }
            self.hands.recorder.flush();
        }
    }

    fn next_fact(&mut self) -> Option<Input> {
        let answer = self.answers.pop_front();
        answer.or_else(|| self.pending.pop_front())
    }

    fn hear_outside(&mut self, event: RouterEvent) {
        match event {
            RouterEvent::Joined(line) => self.join(*line),
            RouterEvent::Lost { worker, serial } => self.lose(worker, serial),
            RouterEvent::Told {
                worker,
                serial,
                report,
                read,
            } => self.hear_worker((worker, serial), report, read),
            RouterEvent::Passed {
                worker,
                serial,
                handoff,
                pass,
            } => {
                if self.is_current(worker, serial) {
                    self.passes.made(worker, (handoff, pass));
                    self.hands.meters.passes(self.passes.count());
                }
            }
            RouterEvent::Submitted { flight, request } => {
                self.hands.lookout.submitted(flight, request.prompt.len());
                self.hear(Input::Submitted { flight, request });
            }
            RouterEvent::Cancelled { flight, why } => self.hear(Input::Cancelled { flight, why }),
            RouterEvent::Stalled { flight } => self.hear(Input::Stalled { flight }),
            RouterEvent::Flowing { flight } => self.hear(Input::Flowing { flight }),
            RouterEvent::Commanded { worker, command } => {
                info!(%worker, ?command, "an operator commands");
                self.hear(Input::Commanded { worker, command });
            }
            RouterEvent::Measured {
                worker,
                serial,
                link,
            } => {
                if self.is_current(worker, serial) {
                    self.hands.roster.measured(worker, link);
                }
            }
            RouterEvent::Wait { place, count } => {
                self.hear(Input::Waiting { place, count });
            }
            RouterEvent::PolicyChanged { policy } => {
                self.hands.promises.follow(&policy);
                self.rescale(&policy);
                self.hear(Input::PolicyChanged { policy });
            }
            RouterEvent::Drain => self.hear(Input::Draining),
            RouterEvent::Stop => {}
        }
    }

    fn join(&mut self, line: WorkerLine) {
        let worker = line.introduction.worker;
        if let Some(connected) = self.workers.get(&worker.worker) {
            let known = &connected.line.introduction;
            if known.worker.incarnation > worker.incarnation {
                // A process that was replaced and still dials lives: two have one name.
                let name = &line.introduction.name;
                let (there, here) = (&known.data_address, &line.introduction.data_address);
                error!(
                    name,
                    kept = there,
                    turned_away = here,
                    "two workers have one name: give one of them another (--name)"
                );
                tell_name_taken(&line, there.clone());
                return self.standby.add(line);
            }
            let earlier = known.worker;
            if earlier != worker {
                // A restart whose old stream lingers, or the second of two of one name: if the
                // earlier one lives it hears why it is cut off, and says so.
                let (there, here) = (&known.data_address, &line.introduction.data_address);
                warn!(%worker, before = there, now = here, "a later start replaces a worker");
                tell_name_taken(&connected.line, here.clone());
                self.standby.add(connected.line.clone());
            }
            self.remove(earlier);
        }
        let description = line.introduction.description.clone();
        let (name, role) = (&line.introduction.name, description.role);
        info!(%worker, name, %role, "worker joined");
        let serves = format!("serves {role}");
        self.hands.lookout.worker(("joined", &serves), name);
        let connected = self.workers.values().map(|other| &other.line.introduction);
        warn_of(&line.introduction, connected);
        let activity = Arc::clone(&line.activity);
        self.hands.roster.join(&line.introduction, activity);
        let connected = Connected {
            line,
            knows: BTreeSet::new(),
        };
        self.workers.insert(worker.worker, connected);
        self.hear(Input::WorkerJoined {
            worker,
            description,
        });
    }

    fn lose(&mut self, worker: WorkerRef, serial: u64) {
        self.standby.lost(worker, serial);
        if self.is_current(worker, serial) {
            info!(%worker, "worker lost");
            self.remove(worker);
            self.standby.free(worker.worker);
        }
    }

    fn hear_worker(&mut self, (worker, serial): (WorkerRef, u64), report: Report, read: Instant) {
        // A word from a connection that was replaced meanwhile belongs to nobody.
        if !self.is_current(worker, serial) {
            return;
        }
        self.passes.reported(worker, &report);
        self.hands.meters.passes(self.passes.count());
        self.hands.roster.hear(worker, &report);
        self.look(worker, &report);
        let reserved = match &report {
            Report::Reserved { handoff, .. } => Some(handoff.flight),
            _ => None,
        };
        self.hear(Input::Told { worker, report });
        if let Some(flight) = reserved {
            self.hands.flights.answered(flight, read);
        }
    }

    /// The page hears of what a worker says of hand-offs.
    fn look(&self, worker: WorkerRef, report: &Report) {
        let Some(connected) = self.workers.get(&worker.worker) else {
            return;
        };
        let capacity = connected.line.introduction.description.capacity;
        let blocks = BlockSize {
            tokens: capacity.block_tokens,
            bytes: capacity.block_bytes,
        };
        let flights = &self.hands.flights;
        let given = |flight| flights.given_count(flight);
        if let Some(bytes) = self.hands.lookout.hear(report, blocks, given) {
            self.hands.meters.handed_over(bytes);
        }
    }

    /// A worker is connected no longer.
    fn forget(&mut self, worker: WorkerRef) {
        self.workers.remove(&worker.worker);
        self.passes.lost(worker);
        let Some((name, state)) = self.hands.roster.leave(worker) else {
            return;
        };
        let what = match state {
            WorkerState::Draining => ("left", "was asked to"),
            WorkerState::Ready | WorkerState::Stuck => ("lost", "its connection is over"),
        };
        self.hands.lookout.worker(what, &name);
    }

    fn is_current(&self, worker: WorkerRef, serial: u64) -> bool {
        let current = self.workers.get(&worker.worker);
        current.is_some_and(|current| current.line.serial == serial)
    }

    fn perform(&mut self, output: Output) {
        match output {
            Output::Tell { worker, order } => self.tell(worker, order),
            Output::Fence { handoff } => {
                let generated = self.hands.flights.fence(handoff);
                self.answer(handoff, generated);
            }
            Output::Count { handoff } => {
                let generated = self.hands.flights.given(handoff.flight);
                self.answer(handoff, generated);
            }
            Output::End {
                flight,
                ending,
                output_tokens,
                timing,
            } => {
                let end = End {
                    ending,
                    output_tokens,
                    timing,
                };
                let seen = self.hands.flights.end(flight, end);
                let judged = self.hands.promises.ended(flight, seen.as_ref());
                self.hands.lookout.ended(flight, judged.as_ref());
            }
            Output::Drained => {
                self.hands.drained.send_replace(true);
            }
            Output::Readiness(readiness) => {
                self.hands.readiness.send_replace(words(readiness));
            }
            Output::Want(decision) => self.want(decision),
            Output::Note(note) => self.note(&note),
        }
    }

    /// The policy says something else of the fleet's size.
    fn rescale(&mut self, policy: &SloPolicy) {
        let scaling = policy.scaling.as_ref();
        if scaling.is_none() {
            self.hands.scaling_series.hide();
        }
        self.hands
            .scaling
            .send_modify(|standing| *standing = Standing::of(scaling, standing));
    }

    /// So many workers are wanted from now on.
    fn want(&mut self, decision: Decision) {
        let before = self.hands.scaling.borrow().clone();
        let mode = match before {
            Standing::Off => return,
            Standing::Listening(mode) | Standing::Said(mode, _) => mode,
        };
        let known = matches!(&before, Standing::Said(_, said) if said.wanted == decision.wanted);
        if !known {
            let wanted = &decision.wanted;
            let reason = |role| wanted.reasons.of(role).name();
            info!(
                prefill = wanted.workers.prefill,
                decode = wanted.workers.decode,
                both = wanted.workers.both,
                prefill_legs = wanted.legs.prefill,
                decode_legs = wanted.legs.decode,
                why_prefill = reason(Role::Prefill),
                why_decode = reason(Role::Decode),
                why_both = reason(Role::Both),
                rate = decision.rate,
                waiting = decision.waiting,
                advice = mode == ScalingMode::Advise,
                "workers wanted"
            );
        }
        self.hands.scaling_series.show(&decision);
        self.hands.lookout.wants(&decision.wanted);
        self.hands
            .scaling
            .send_replace(Standing::Said(mode, decision));
    }

    /// A flight that was ended from outside is asked about no more.
    fn answer(&mut self, handoff: HandoffId, generated: Option<Arc<[TokenId]>>) {
        let answer = generated.map(|generated| Input::Counted { handoff, generated });
        self.answers.extend(answer);
    }

    fn note(&mut self, note: &Note) {
        let flights = &self.hands.flights;
        if let Some(flight) = flight_of(note)
            && flights.are_recorded()
        {
            flights.noted(flight, note);
        }
        let mark = match tracing::enabled!(Level::DEBUG) {
            true => flight_of(note).and_then(|flight| flights.mark(flight)),
            false => None,
        };
        self.hands.meters.count(note, mark.as_ref());
        self.hands.promises.hear(note);
        self.hands.roster.count(note);
        let roster = &self.hands.roster;
        self.hands.lookout.note(note, |worker| roster.name(worker));
        match note {
            Note::Placed { handoff, .. } => flights.placed(handoff.flight),
            Note::Decided(decision) if decision.outcome == Decided::Waits => {
                flights.waits(decision.flight);
            }
            Note::PassedOver { .. }
            | Note::Stale { .. }
            | Note::Decided(_)
            | Note::Judged { .. }
            | Note::Retried { .. }
            | Note::Moving { .. }
            | Note::Moved { .. }
            | Note::Stayed { .. }
            | Note::CancelFreed { .. }
            | Note::WorkerStuck { .. }
            | Note::Fleet { .. } => {}
        }
    }

    fn tell(&mut self, worker: WorkerRef, order: Order) {
        if let Some(peer) = orders::peer_of(&order, worker) {
            self.introduce(worker, peer);
        }
        if let Some((handoff, pass)) = self.passes.ordered(worker, &order) {
            self.say(worker, Downward::Pass { handoff, pass });
        }
        let mark = orders::begins(&order).and_then(|handoff| self.hands.flights.mark_of(handoff));
        self.say(worker, Downward::Order { order, mark });
    }

    /// Tells a worker where a peer is, unless it knows.
    fn introduce(&mut self, worker: WorkerRef, peer: WorkerRef) {
        let Some(known) = self.workers.get(&peer.worker) else {
            return; // Gone meanwhile: the worker will find no link, and say so.
        };
        if known.line.introduction.worker != peer {
            return;
        }
        let data_address = known.line.introduction.data_address.clone();
        let told = self.workers.get_mut(&worker.worker);
        if told.is_some_and(|told| told.knows.insert(peer)) {
            self.say(
                worker,
                Downward::Peer {
                    worker: peer,
                    data_address,
                },
            );
        }
    }

    /// A worker whose line is full does not read it: it is lost.
    fn say(&mut self, worker: WorkerRef, word: Downward) {
        let Some(connected) = self.workers.get(&worker.worker) else {
            return;
        };
        if connected.line.introduction.worker != worker {
            return;
        }
        if let Err(error) = connected.line.out.try_send(word) {
            warn!(%worker, %error, "worker lost: it does not take its orders");
            self.forget(worker);
            self.standby.free(worker.worker);
            self.pending.push_back(Input::WorkerLost { worker });
            self.tell_gone(worker);
        }
    }

    /// A worker is connected no longer. Its flights' other legs are told first: they end of their
    /// own, not by a lost link.
    fn remove(&mut self, worker: WorkerRef) {
        self.forget(worker);
        self.hear(Input::WorkerLost { worker });
        self.tell_gone(worker);
        // A line that was full has ended meanwhile.
        self.settle();
    }

    /// Whoever was told where a worker is hears that it is gone.
    fn tell_gone(&mut self, worker: WorkerRef) {
        let mut told = Vec::new();
        for other in self.workers.values_mut() {
            if other.knows.remove(&worker) {
                told.push(other.line.introduction.worker);
            }
        }
        for other in told {
            self.say(other, Downward::PeerGone { worker });
        }
    }
}

/// The last thing said on a line; a line that is full ends without it.
fn tell_name_taken(line: &WorkerLine, data_address: String) {
    let _ = line.out.try_send(Downward::NameTaken { data_address });
}
