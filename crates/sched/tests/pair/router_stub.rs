//! A router reduced to what these tests need, and the judge of the workers' reports.
//!
//! Owns: flights, their attempts and moves, and the guarantees that every worker must keep.
//! Never: looks into a brain to learn the right answer.
//! Invariant: no token is lost, repeated or changed, and no hand-off both stays and lands.

use super::PairWorld;
use crate::stage::script::handoff;
use crate::stage::script::prompt;
use crate::stage::{StageEvent, StageReport, draws};
use cleave_domain::{
    BlockRef, Deadline, Emission, HandoffId, HandoffTarget, MigrateOrder, OnDeadlineMiss, Order,
    PrefillOrder, Report, Request, RequestSlo, ReserveOrder, Role, RunOrder, SamplingParams,
    StopRules, Time, WindowTarget,
};
use cleave_testkit::build;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// One client's request and its outcome.
pub(crate) struct StubFlight {
    pub(crate) prompt: Vec<u32>,
    /// The tokens that any course must give.
    pub(crate) expected: Vec<u32>,
    pub(crate) stop: StopRules,
    pub(crate) priority: i32,
    pub(crate) slo: RequestSlo,
    pub(crate) scores: bool,
    pub(crate) got: usize,
    pub(crate) attempt: u32,
    /// Attempts begun, moves included.
    pub(crate) attempts: u32,
    /// Attempts up to this one are fenced: their later tokens are ignored.
    pub(crate) fence: Option<u32>,
    pub(crate) failures: u32,
    pub(crate) prefill: usize,
    pub(crate) decode: usize,
    pub(crate) prefilled: bool,
    pub(crate) landed: bool,
    pub(crate) ended: bool,
    pub(crate) moving: Option<StubMove>,
}

/// A running sequence on its way to another decode worker.
#[derive(Clone, Debug)]
pub(crate) struct StubMove {
    pub(crate) attempt: u32,
    pub(crate) target: usize,
    /// Tokens that the target's reservation includes.
    pub(crate) tokens: u32,
    pub(crate) ordered: bool,
    pub(crate) prefilled: bool,
    /// The target failed: only the source's report is still awaited.
    pub(crate) given_up: bool,
}

#[derive(Default)]
pub(crate) struct RouterStub {
    pub(crate) flights: Vec<StubFlight>,
    /// Hand-offs accepted and not released, by worker and incarnation.
    pub(crate) open: BTreeSet<(u64, u64, HandoffId)>,
    /// Moves that a source was ordered, and did not answer.
    pub(crate) unanswered: BTreeMap<HandoffId, (u64, u64)>,
    /// Verdicts of moves; no move may have two.
    pub(crate) verdicts: BTreeMap<HandoffId, MoveVerdict>,
    pub(crate) renewed: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveVerdict {
    Stayed,
    Landed,
}

/// The memory that a worker has reserved for a hand-off.
struct ReservedKv {
    present: u32,
    blocks: Vec<BlockRef>,
    state: Option<BlockRef>,
    window: Option<WindowTarget>,
}

impl PairWorld {
    pub(crate) fn submit(&mut self) {
        let rng = &mut self.rng;
        let guessed = self.draft_rng.as_mut().is_some_and(|rng| rng.percent(70));
        let family = rng.between(1, 3) + if guessed { 900 } else { 0 };
        let prompt = prompt(family, rng.between(1, 24));
        let max_tokens = rng.between(1, 30);
        let stop_at = rng.index(50);
        let mut flight = StubFlight::new(prompt, max_tokens);
        let stop_tokens = flight.expected.get(stop_at).copied();
        flight.stop.stop_tokens = stop_tokens.into_iter().collect();
        // A repeating output reaches its stop token earlier.
        let mut expected = flight.expected.iter();
        let stop_at = expected.position(|token| Some(*token) == stop_tokens);
        flight
            .expected
            .truncate(stop_at.map_or(usize::MAX, |at| at + 1));
        flight.priority = i32::try_from(rng.roll(3)).expect("small") - 1;
        flight.scores = rng.percent(10);
        if let Some(slo_rng) = &mut self.slo_rng {
            let mut span = |chance, low, high| {
                let millis = u64::from(slo_rng.between(low, high));
                slo_rng
                    .percent(chance)
                    .then(|| Duration::from_millis(millis))
            };
            flight.slo.ttft = span(60, 1, 400);
            flight.slo.tpot = span(60, 5, 80);
            flight.slo.priority = i32::try_from(slo_rng.roll(3)).expect("small") - 1;
        }
        if let Some(absurd_rng) = &mut self.absurd_orders {
            flight.slo = super::absurd_orders::slo(absurd_rng);
        }
        self.router.flights.push(flight);
        self.attempt(self.router.flights.len() - 1);
    }
}

impl StubFlight {
    pub(crate) fn new(prompt: Vec<u32>, max_tokens: u32) -> Self {
        Self {
            expected: draws::output(&prompt, max_tokens),
            prompt,
            stop: StopRules {
                max_tokens,
                min_tokens: 0,
                stop_tokens: [].into(),
            },
            priority: 0,
            slo: RequestSlo::default(),
            scores: false,
            got: 0,
            attempt: 0,
            attempts: 1,
            fence: None,
            failures: 0,
            prefill: 0,
            decode: 0,
            prefilled: false,
            landed: false,
            ended: false,
            moving: None,
        }
    }
}

impl PairWorld {
    pub(crate) fn id(&self, flight: usize) -> HandoffId {
        self.id_of(flight, self.router.flights[flight].attempt)
    }

    fn id_of(&self, flight: usize, attempt: u32) -> HandoffId {
        handoff(u32::try_from(flight).expect("few"), attempt)
    }

    fn request(&self, flight: usize) -> Arc<Request> {
        let of = &self.router.flights[flight];
        let mut sampling = SamplingParams::greedy();
        sampling.prompt_logprobs = of.scores.then_some(0);
        Arc::new(Request {
            generated: of.expected[..of.got].into(),
            sampling,
            stop: of.stop.clone(),
            priority: of.priority,
            slo: of.slo.clone(),
            ..build::request(of.prompt.iter().copied(), 0)
        })
    }

    fn serving(&self, pick: fn(Role) -> bool) -> Vec<usize> {
        let all = 0..self.world.machines.len();
        all.filter(|at| pick(self.world.machines[*at].cells.brain.limits().role))
            .collect()
    }

    pub(crate) fn attempt(&mut self, flight: usize) {
        let (prefills, decodes) = (self.serving(Role::prefills), self.serving(Role::decodes));
        let any = |of: &[usize], rng: &mut super::PairRng| match of.len() {
            0 => None,
            count => Some(of[rng.index(count)]),
        };
        let decode = any(&decodes, &mut self.rng);
        let prefill = any(&prefills, &mut self.rng).or(decode).unwrap_or(0);
        let decode = decode.unwrap_or(prefill);
        // Sometimes the decode worker runs the prompt itself.
        let prefill = if self.rng.percent(20) {
            decode
        } else {
            prefill
        };
        self.attempt_on(flight, prefill, decode);
    }

    /// Only a first attempt may be refused for its target.
    fn due(&self, flight: usize) -> Option<Deadline> {
        let of = &self.router.flights[flight];
        let unmet = if of.attempts == 1 && of.got == 0 {
            OnDeadlineMiss::Refuse
        } else {
            OnDeadlineMiss::Serve
        };
        of.slo.ttft.map(|left| Deadline { left, unmet })
    }

    pub(crate) fn attempt_on(&mut self, flight: usize, prefill: usize, decode: usize) {
        let expected_output_tokens = self.rng.between(0, 12);
        let order = if prefill == decode {
            Order::Run(RunOrder {
                handoff: self.id(flight),
                request: self.request(flight),
                expected_output_tokens,
                waited: Duration::ZERO,
                due: self.due(flight),
            })
        } else {
            Order::Reserve(ReserveOrder {
                handoff: self.id(flight),
                request: self.request(flight),
                sender: self.world.me(prefill),
                expected_output_tokens,
                ahead_tokens: 0,
                waited: Duration::ZERO,
                due: self.due(flight),
            })
        };
        let of = &mut self.router.flights[flight];
        (of.prefill, of.decode) = (prefill, decode);
        (of.prefilled, of.landed) = (false, false);
        self.order(decode, order);
    }

    // === moves ===

    /// Orders a running sequence to move.
    pub(crate) fn move_any(&mut self) {
        let able = |of: &&StubFlight| of.landed && of.prefilled && !of.ended && of.moving.is_none();
        let flights = self.router.flights.iter().enumerate();
        let able: Vec<_> = flights.filter(|(_, of)| able(of)).map(|(i, _)| i).collect();
        let targets = self.serving(Role::decodes);
        if able.is_empty() || targets.is_empty() {
            return;
        }
        let flight = able[self.rng.index(able.len())];
        let target = targets[self.rng.index(targets.len())];
        let ahead_tokens = self.rng.between(0, 24);
        self.move_to(flight, target, ahead_tokens);
    }

    pub(crate) fn move_to(&mut self, flight: usize, target: usize, ahead_tokens: u32) {
        let of = &mut self.router.flights[flight];
        if target == of.decode || of.got == of.expected.len() {
            return;
        }
        let attempt = of.attempts;
        of.attempts += 1;
        let tokens = u32::try_from(of.prompt.len() + of.got).expect("few");
        of.moving = Some(StubMove {
            attempt,
            target,
            tokens,
            ordered: false,
            prefilled: false,
            given_up: false,
        });
        let decode = of.decode;
        let order = Order::Reserve(ReserveOrder {
            handoff: self.id_of(flight, attempt),
            request: self.request(flight),
            sender: self.world.me(decode),
            expected_output_tokens: self.rng.between(0, 12),
            ahead_tokens,
            waited: Duration::ZERO,
            due: self.due(flight),
        });
        self.order(target, order);
    }

    fn reserved_move(&mut self, flight: usize, reserved: ReservedKv) {
        let of = &mut self.router.flights[flight];
        let (attempt, decode) = (of.attempt, of.decode);
        let moving = of.moving.as_mut().expect("asked before");
        moving.ordered = true;
        let moving = moving.clone();
        let order = Order::Migrate(MigrateOrder {
            handoff: self.id_of(flight, moving.attempt),
            of: self.id_of(flight, attempt),
            target: HandoffTarget {
                worker: self.world.me(moving.target),
                present: reserved.present,
                blocks: reserved.blocks,
                state: reserved.state,
                window: reserved.window,
            },
            tokens: moving.tokens,
        });
        self.order(decode, order);
    }

    /// Ends an aborted move.
    fn drop_move(&mut self, flight: usize) {
        if let Some(moving) = self.router.flights[flight].moving.take() {
            let handoff = self.id_of(flight, moving.attempt);
            self.order(moving.target, Order::Cancel { handoff });
        }
    }

    fn promote(&mut self, flight: usize) {
        let old = self.id(flight);
        let of = &mut self.router.flights[flight];
        let moving = of.moving.take().expect("it moves");
        let source = of.decode;
        (of.attempt, of.prefill, of.decode) = (moving.attempt, source, moving.target);
        (of.prefilled, of.landed) = (moving.prefilled, true);
        if moving.prefilled {
            self.order(source, Order::Cancel { handoff: old });
        }
    }

    /// Cancels a move on the router's side.
    pub(crate) fn drop_any_move(&mut self) {
        let flights = self.router.flights.iter().enumerate();
        let moving = |(i, of): (usize, &StubFlight)| Some((i, of.decode, of.moving.clone()?));
        let moving: Vec<_> = flights.filter_map(moving).collect();
        if moving.is_empty() {
            return;
        }
        let (flight, source, moving) = moving[self.rng.index(moving.len())].clone();
        let handoff = self.id_of(flight, moving.attempt);
        if moving.ordered {
            self.order(source, Order::Cancel { handoff });
        }
    }

    // === reports ===

    /// Handles every report, and answers it.
    pub(crate) fn listen(&mut self) {
        for (at, stage_report) in std::mem::take(&mut self.world.reports) {
            match stage_report {
                StageReport::Reported(report) => self.reported(at, report),
                StageReport::Emitted(handoff, emission) => self.emitted(handoff, &emission),
                StageReport::Repeated(_) | StageReport::Drained => {}
            }
        }
    }

    fn emitted(&mut self, handoff: HandoffId, emission: &Emission) {
        let flight = usize::try_from(handoff.flight.0 & 0xff_ffff_ffff).expect("few");
        let of = &mut self.router.flights[flight];
        if of.ended || of.fence.is_some_and(|fence| handoff.attempt <= fence) {
            return;
        }
        assert_eq!(
            emission.index as usize, of.got,
            "{handoff}: lost or repeated"
        );
        let token = emission.sampled.token;
        assert_eq!(token, of.expected[of.got], "{handoff}: a different token");
        of.got += 1;
        if of.scores && of.got == 1 {
            let scores = &emission.prompt.as_ref().expect("the first token").scores;
            let scored: Vec<_> = scores.iter().map(|scored| scored.token).collect();
            assert_eq!(scored, of.prompt[1..], "{handoff}: scores");
        }
    }

    /// The flight of a hand-off, if that is its present attempt and it has not ended.
    fn current(&self, handoff: HandoffId) -> Option<usize> {
        let flight = usize::try_from(handoff.flight.0 & 0xff_ffff_ffff).expect("few");
        let of = &self.router.flights[flight];
        (!of.ended && of.attempt == handoff.attempt).then_some(flight)
    }

    /// The flight of a hand-off, if that is the attempt under which it moves.
    fn moving(&self, handoff: HandoffId) -> Option<usize> {
        let flight = usize::try_from(handoff.flight.0 & 0xff_ffff_ffff).expect("few");
        let of = &self.router.flights[flight];
        let moves = of
            .moving
            .as_ref()
            .is_some_and(|m| m.attempt == handoff.attempt);
        (!of.ended && moves).then_some(flight)
    }

    fn judge(&mut self, handoff: HandoffId, verdict: MoveVerdict) {
        let before = self.router.verdicts.insert(handoff, verdict);
        let same = before.is_none_or(|before| before == verdict);
        assert!(same, "{handoff} stayed and landed");
    }

    fn reported(&mut self, at: usize, report: Report) {
        let me = self.world.me(at);
        let key = |handoff| (me.worker.0, me.incarnation.0, handoff);
        match report {
            Report::Reserved {
                handoff,
                present,
                blocks,
                state,
                window,
            } => {
                let reserved = ReservedKv {
                    present,
                    blocks,
                    state,
                    window,
                };
                assert!(self.router.open.insert(key(handoff)), "reserved twice");
                if let Some(flight) = self.current(handoff) {
                    self.reserved(flight, reserved);
                } else if let Some(flight) = self.moving(handoff) {
                    self.reserved_move(flight, reserved);
                } else {
                    self.order(at, Order::Cancel { handoff });
                }
            }
            Report::Running { handoff, .. } => {
                assert!(self.router.open.insert(key(handoff)), "runs twice");
                if self.current(handoff).is_none() {
                    self.order(at, Order::Cancel { handoff });
                }
            }
            Report::Refused { handoff, .. } => {
                if let Some(flight) = self.current(handoff) {
                    self.end(flight);
                } else if let Some(flight) = self.moving(handoff) {
                    self.router.flights[flight].moving = None;
                }
            }
            Report::Prefilled { handoff, .. } => {
                self.router.unanswered.remove(&handoff);
                self.prefilled(handoff);
            }
            Report::Landed { handoff } => self.landed(at, handoff),
            Report::MigrationAborted { handoff, .. } => {
                self.router.unanswered.remove(&handoff);
                self.judge(handoff, MoveVerdict::Stayed);
                if let Some(flight) = self.moving(handoff) {
                    self.drop_move(flight);
                }
            }
            Report::Finished {
                handoff,
                output_tokens,
                ..
            } => self.finished(handoff, output_tokens),
            Report::LegFailed { handoff, .. } => self.leg_failed(at, handoff),
            Report::Released { handoff } => {
                assert!(
                    self.router.open.remove(&key(handoff)),
                    "released twice: {handoff}"
                );
            }
            Report::Load(_)
            | Report::Prices(_)
            | Report::Draining
            | Report::MemoryPressure { .. }
            | Report::Serves { .. }
            | Report::Relayed(_)
            | Report::Adapters(_)
            | Report::Prefix { .. } => {}
        }
    }

    fn prefilled(&mut self, handoff: HandoffId) {
        if let Some(flight) = self.moving(handoff) {
            let of = &mut self.router.flights[flight];
            if let Some(moving) = &mut of.moving {
                moving.prefilled = true;
            }
        } else if let Some(flight) = self.current(handoff) {
            self.router.flights[flight].prefilled = true;
        }
    }

    fn landed(&mut self, at: usize, handoff: HandoffId) {
        if self.moving(handoff).is_some() || handoff.attempt > 0 {
            self.judge(handoff, MoveVerdict::Landed);
        }
        if let Some(flight) = self.moving(handoff) {
            return self.promote(flight);
        }
        if let Some(flight) = self.current(handoff) {
            let of = &mut self.router.flights[flight];
            of.landed = true;
            let prefill = of.prefill;
            if prefill != at {
                self.order(prefill, Order::Cancel { handoff });
            }
        }
    }

    fn finished(&mut self, handoff: HandoffId, output_tokens: u32) {
        let Some(flight) = self.current(handoff) else {
            return;
        };
        let of = &self.router.flights[flight];
        assert_eq!(of.got, output_tokens as usize, "{handoff}: count");
        let worker = of.decode.min(self.world.machines.len() - 1);
        let context = |at: usize| self.world.machines[at].cells.brain.limits().capacity;
        let full = [worker, of.prefill]
            .into_iter()
            .any(|at| of.prompt.len() + of.got >= context(at).context_tokens_max as usize);
        assert!(of.got == of.expected.len() || full, "{handoff}: too short");
        self.drop_move(flight);
        self.router.flights[flight].ended = true;
    }

    fn leg_failed(&mut self, at: usize, handoff: HandoffId) {
        if let Some(flight) = self.moving(handoff) {
            // The source will report the outcome.
            let of = &mut self.router.flights[flight];
            match &mut of.moving {
                Some(moving) if moving.ordered => moving.given_up = true,
                moving => *moving = None,
            }
        } else if let Some(flight) = self.current(handoff) {
            let of = &self.router.flights[flight];
            if at == of.decode || !of.landed {
                self.retry(flight);
            }
        }
    }

    fn reserved(&mut self, flight: usize, reserved: ReservedKv) {
        let of = &self.router.flights[flight];
        let order = Order::Prefill(PrefillOrder {
            handoff: self.id(flight),
            request: self.request(flight),
            target: HandoffTarget {
                worker: self.world.me(of.decode),
                present: reserved.present,
                blocks: reserved.blocks,
                state: reserved.state,
                window: reserved.window,
            },
            waited: Duration::ZERO,
            due: self.due(flight),
        });
        self.order(of.prefill, order);
    }

    // === endings ===

    /// Cancels all legs, and begins anew while the budget lasts.
    pub(crate) fn retry(&mut self, flight: usize) {
        self.cancel(flight);
        let of = &mut self.router.flights[flight];
        of.fence = Some(of.attempts - 1);
        of.attempt = of.attempts;
        of.attempts += 1;
        of.failures += 1;
        // Every token may be there already.
        if of.failures < 4 && of.got < of.expected.len() {
            self.attempt(flight);
        } else {
            of.ended = true;
        }
    }

    pub(crate) fn retry_all_on(&mut self, at: usize) {
        for flight in 0..self.router.flights.len() {
            let of = &self.router.flights[flight];
            if !of.ended && (of.decode == at || of.prefill == at && !of.landed) {
                self.retry(flight);
            }
        }
    }

    fn cancel(&mut self, flight: usize) {
        self.drop_move(flight);
        let handoff = self.id(flight);
        let of = &self.router.flights[flight];
        let (prefill, decode) = (of.prefill, of.decode);
        self.order(decode, Order::Cancel { handoff });
        self.order(prefill, Order::Cancel { handoff });
    }

    pub(crate) fn end(&mut self, flight: usize) {
        self.cancel(flight);
        self.router.flights[flight].ended = true;
    }

    pub(crate) fn cancel_any(&mut self) {
        if !self.router.flights.is_empty() {
            let flight = self.rng.index(self.router.flights.len());
            if !self.router.flights[flight].ended {
                self.end(flight);
            }
        }
    }

    pub(crate) fn renew(&mut self) {
        if self.world.now.since(self.router.renewed) < Duration::from_millis(300) {
            return;
        }
        self.router.renewed = self.world.now;
        for at in 0..self.world.machines.len() {
            let mut handoffs = Vec::new();
            for (flight, of) in self.router.flights.iter().enumerate() {
                if of.ended {
                    continue;
                }
                if of.prefill == at || of.decode == at {
                    handoffs.push(self.id(flight));
                }
                if let Some(moving) = of.moving.as_ref().filter(|m| m.target == at) {
                    handoffs.push(self.id_of(flight, moving.attempt));
                }
            }
            self.order(at, Order::Renew { handoffs });
        }
    }

    /// Asserts that an order that was just performed was answered or accepted.
    pub(crate) fn ordered(&mut self, event: &StageEvent) {
        let (to, handoff, kind) = match event {
            StageEvent::Order {
                to,
                order: Order::Prefill(prefill),
            } => (*to, prefill.handoff, true),
            StageEvent::Order {
                to,
                order: Order::Migrate(migrate),
            } => (*to, migrate.handoff, false),
            _ => return,
        };
        let answered = |(_, report): &(usize, StageReport)| match report {
            StageReport::Reported(
                Report::Refused { handoff: of, .. }
                | Report::MigrationAborted { handoff: of, .. }
                | Report::Prefilled { handoff: of, .. },
            )
            | StageReport::Repeated(of) => *of == handoff,
            _ => false,
        };
        if self.world.reports.iter().any(answered) {
            return;
        }
        let me = self.world.me(to);
        let (worker, incarnation) = (me.worker.0, me.incarnation.0);
        if kind {
            let key = (worker, incarnation, handoff);
            assert!(self.router.open.insert(key), "prefill accepted twice");
        } else {
            self.router
                .unanswered
                .insert(handoff, (worker, incarnation));
        }
    }
}
