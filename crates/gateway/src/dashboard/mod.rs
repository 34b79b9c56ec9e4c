//! The flights on the operators' dashboard.
//!
//! Owns: how far each flight has come, which hand-offs landed, the last minute, and what went
//! wrong. Never decides, or sees a token or a text. Invariant: a flight is counted at one stage
//! from its submission to its end, and after that only numbers of it are kept.
//!
//! The driver reports facts and outputs; readers copy the numbers. Workers are in the roster.

mod events;
mod last_minute;
mod scaling;

pub(super) use scaling::dashboard_scaling;

use cleave_api::{
    DashboardEvent, DurationQuantiles, FlightStageCounts, HandoffTotals, HistorySecond,
    ScalingChange, VerdictCounts,
};
use cleave_domain::{Ending, FleetTarget, FlightId, HandoffId, Report, RequestStage, WorkerRef};
use cleave_router::RouterNote;
use cleave_telemetry::{HandoffLoss, RequestVerdict, failure_name, refusal_name};
use events::{DashboardEvents, at_ms};
use last_minute::{ClassMinute, LastMinute};
use parking_lot::{Mutex, MutexGuard};
use scaling::RecentDecisions;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Dashboard {
    since: Instant,
    state: Mutex<DashboardState>,
}

#[derive(Debug, Default)]
struct DashboardState {
    flights: HashMap<FlightId, TrackedFlight>,
    minute: LastMinute,
    totals: BTreeMap<String, VerdictCounts>,
    bytes_total: u64,
    landed_total: u64,
    joined_total: u64,
    events: DashboardEvents,
    decisions: RecentDecisions,
}

/// How far a flight has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlightStage {
    Queued,
    Reserved,
    Prefill,
    Transfer,
    Decode,
}

#[derive(Debug)]
struct TrackedFlight {
    stage: FlightStage,
    prompt_tokens: u64,
    /// The attempt whose hand-off is tracked.
    attempt: u32,
    /// Whether its legs are on two workers.
    is_split: bool,
    /// A running sequence is on its way to another worker.
    moving: bool,
    /// Leading blocks that the receiver had already.
    blocks_present: u32,
}

/// The size of a block at the receiving worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSize {
    pub(crate) tokens: u32,
    pub(crate) bytes: u32,
}

/// A copy of everything that is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct DashboardSnapshot {
    pub(crate) uptime: Duration,
    pub(crate) flights: FlightStageCounts,
    pub(crate) stages: Vec<(RequestStage, DurationQuantiles)>,
    /// The last minute and the totals, by class.
    pub(crate) classes: BTreeMap<String, ClassSnapshot>,
    pub(crate) handoffs: HandoffTotals,
    pub(crate) history: Vec<HistorySecond>,
    pub(crate) events: Vec<DashboardEvent>,
    pub(crate) decisions: Vec<ScalingChange>,
}

/// The verdicts on a class's requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClassSnapshot {
    pub(crate) minute: ClassMinute,
    pub(crate) total: VerdictCounts,
}

impl Default for Dashboard {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            state: Mutex::default(),
        }
    }
}

impl Dashboard {
    /// A flight is submitted.
    pub(crate) fn submitted(&self, flight: FlightId, prompt_tokens: usize) {
        let now = self.now();
        let mut state = self.lock();
        state.minute.second(now).begun += 1;
        let tracked = TrackedFlight {
            stage: FlightStage::Queued,
            prompt_tokens: prompt_tokens as u64,
            attempt: 0,
            is_split: false,
            moving: false,
            blocks_present: 0,
        };
        state.flights.insert(flight, tracked);
    }

    /// Handles a note of the brain; `name` gives a worker's name. Gives the outcome of a hand-off
    /// that this ends without a landing.
    pub(crate) fn handle_note(
        &self,
        note: &RouterNote,
        name: impl Fn(&WorkerRef) -> String,
    ) -> Option<HandoffLoss> {
        let mut state = self.lock();
        let loss = state.handoff_loss(note);
        match note {
            RouterNote::Placed {
                handoff,
                prefill,
                decode,
                ..
            } => state.placed(*handoff, prefill != decode),
            RouterNote::Moving { handoff, .. } => {
                if let Some(tracked) = state.flights.get_mut(&handoff.flight) {
                    (tracked.moving, tracked.attempt, tracked.blocks_present) =
                        (true, handoff.attempt, 0);
                }
            }
            RouterNote::Moved { handoff, .. } => state.migration_ended(*handoff),
            RouterNote::MigrationAborted { handoff, failure } => {
                state.migration_ended(*handoff);
                let reason = failure_name(failure);
                state.events.add("stayed", reason, "a move");
            }
            RouterNote::Retried {
                handoff, failure, ..
            } => {
                if let Some(tracked) = state.flights.get_mut(&handoff.flight) {
                    (tracked.stage, tracked.moving) = (FlightStage::Queued, false);
                }
                let reason = failure_name(failure);
                state.events.add("retried", reason, "an attempt");
            }
            RouterNote::PassedOver {
                worker, refusal, ..
            } => {
                // A refusal is no news about a worker; a missing answer is.
                let (reason, about) = match refusal {
                    Some(refusal) => (refusal_name(refusal), "a worker".into()),
                    None => ("silent", name(worker)),
                };
                state.events.add("passed_over", reason, &about);
            }
            RouterNote::WorkerStuck { worker } => {
                let about = name(worker);
                state.events.add("stuck", "no step ends", &about);
            }
            RouterNote::Decided(_)
            | RouterNote::Judged { .. }
            | RouterNote::Stale { .. }
            | RouterNote::CancelFreed { .. }
            | RouterNote::PrefixDropped { .. }
            | RouterNote::Fleet { .. } => {}
        }
        loss
    }

    /// Handles a worker's report on a hand-off; `given` is the number of tokens that the client
    /// has. Gives the bytes of a hand-off that landed by it.
    pub(crate) fn handle_report(
        &self,
        report: &Report,
        blocks: BlockSize,
        given: impl FnOnce(FlightId) -> u32,
    ) -> Option<u64> {
        let (handoff, step) = match report {
            Report::Reserved {
                handoff, present, ..
            } => (handoff, HandoffProgress::Reserved(*present)),
            Report::Prefilled { handoff, .. } => (handoff, HandoffProgress::Prefilled),
            Report::Landed { handoff } => (handoff, HandoffProgress::Landed),
            _ => return None,
        };
        let now = self.now();
        let mut state = self.lock();
        let tracked = state.flights.get_mut(&handoff.flight)?;
        if tracked.attempt != handoff.attempt {
            return None; // Of an attempt that is over.
        }
        if !tracked.advance(step) {
            return None;
        }
        // The token drawn last has no KV yet.
        let output_tokens = u64::from(given(handoff.flight).saturating_sub(1));
        let tokens = tracked.prompt_tokens + output_tokens;
        let sent = tokens.div_ceil(u64::from(blocks.tokens.max(1)));
        let sent = sent.saturating_sub(u64::from(tracked.blocks_present));
        let bytes = sent * u64::from(blocks.bytes);
        state.landed_total += 1;
        state.bytes_total += bytes;
        state.minute.second(now).handoff_bytes += bytes;
        Some(bytes)
    }

    /// Removes a flight at its end, and counts its verdict. Gives the outcome of a hand-off that
    /// was under way.
    pub(crate) fn ended(
        &self,
        flight: FlightId,
        ending: Option<&Ending>,
        verdict: Option<&RequestVerdict>,
    ) -> Option<HandoffLoss> {
        let now = self.now();
        let mut state = self.lock();
        let tracked = state.flights.remove(&flight);
        if let Some(verdict) = verdict {
            state.judged(now, verdict);
        }
        match ending {
            Some(Ending::Failed(failure)) if tracked?.is_handing_over() => HandoffLoss::by(failure),
            _ => None,
        }
    }

    /// Counts a request that was refused before it was a flight.
    pub(crate) fn turned_away(&self, verdict: &RequestVerdict) {
        let now = self.now();
        self.lock().judged(now, verdict);
    }

    /// Something happened to a worker.
    pub(crate) fn worker_changed(&self, kind: &'static str, reason: &str, name: &str) {
        self.lock().events.add(kind, reason, name);
    }

    /// Records how many workers are wanted from now on.
    pub(crate) fn scaling_decided(&self, target: &FleetTarget) {
        self.lock().decisions.record(target, at_ms());
    }

    /// A copy of everything that is shown.
    pub(crate) fn snapshot(&self) -> DashboardSnapshot {
        let now = self.now();
        let mut state = self.lock();
        let mut classes: BTreeMap<String, ClassSnapshot> = BTreeMap::new();
        for (class, total) in &state.totals {
            classes.entry(class.clone()).or_default().total = *total;
        }
        for (class, minute) in state.minute.classes(now) {
            classes.entry(class).or_default().minute = minute;
        }
        DashboardSnapshot {
            uptime: self.since.elapsed(),
            flights: state.flights_now(),
            stages: state.minute.stages(now),
            classes,
            handoffs: HandoffTotals {
                bytes_total: state.bytes_total,
                landed_total: state.landed_total,
                joined_total: state.joined_total,
                links: Vec::new(),
            },
            history: state.minute.history(now),
            events: state.events.all(),
            decisions: state.decisions.all(),
        }
    }

    fn now(&self) -> u64 {
        self.since.elapsed().as_secs()
    }

    fn lock(&self) -> MutexGuard<'_, DashboardState> {
        self.state.lock()
    }
}

/// The progress of a flight that a worker's report means.
#[derive(Clone, Copy)]
enum HandoffProgress {
    Reserved(u32),
    Prefilled,
    Landed,
}

impl TrackedFlight {
    /// Whether blocks of one worker are to land at another.
    fn is_handing_over(&self) -> bool {
        let is_before_landing = matches!(
            self.stage,
            FlightStage::Reserved | FlightStage::Prefill | FlightStage::Transfer
        );
        self.moving || (self.is_split && is_before_landing)
    }

    /// Ends the hand-off under way. A sequence that was to migrate stays where it is.
    fn handoff_ended(&mut self) {
        if self.moving {
            self.moving = false
        } else {
            self.stage = FlightStage::Queued
        }
    }

    /// Advances the flight; true if blocks of another worker have landed.
    fn advance(&mut self, step: HandoffProgress) -> bool {
        match step {
            HandoffProgress::Reserved(present) => {
                self.blocks_present = present;
                if !self.moving {
                    self.stage = FlightStage::Prefill;
                }
                false
            }
            HandoffProgress::Prefilled => {
                if !self.moving {
                    self.stage = if self.is_split {
                        FlightStage::Transfer
                    } else {
                        FlightStage::Decode
                    };
                }
                false
            }
            HandoffProgress::Landed => {
                let landed = self.is_handing_over();
                (self.stage, self.moving) = (FlightStage::Decode, false);
                landed
            }
        }
    }
}

impl DashboardState {
    fn placed(&mut self, handoff: HandoffId, apart: bool) {
        if !apart {
            self.joined_total += 1;
        }
        if let Some(tracked) = self.flights.get_mut(&handoff.flight) {
            tracked.stage = FlightStage::Reserved;
            (tracked.attempt, tracked.is_split) = (handoff.attempt, apart);
            (tracked.moving, tracked.blocks_present) = (false, 0);
        }
    }

    /// A migration ended, or was given up.
    fn migration_ended(&mut self, handoff: HandoffId) {
        if let Some(tracked) = self.flights.get_mut(&handoff.flight) {
            tracked.moving = false;
        }
    }

    /// The outcome of a hand-off that this note ends, if one was under way.
    fn handoff_loss(&mut self, note: &RouterNote) -> Option<HandoffLoss> {
        let (handoff, loss) = match note {
            RouterNote::PassedOver {
                handoff, refusal, ..
            } => match refusal {
                Some(_) => (handoff, Some(HandoffLoss::Refused)),
                None => (handoff, Some(HandoffLoss::Lost)),
            },
            RouterNote::MigrationAborted { handoff, failure } => {
                (handoff, HandoffLoss::by(failure))
            }
            RouterNote::Retried {
                handoff, failure, ..
            } => (handoff, HandoffLoss::by(failure)),
            _ => return None,
        };
        let tracked = self.flights.get_mut(&handoff.flight)?;
        let was_handing_over = tracked.is_handing_over();
        if let RouterNote::PassedOver { .. } = note {
            tracked.handoff_ended();
        }
        loss.filter(|_| was_handing_over)
    }

    fn judged(&mut self, now: u64, judged_request: &RequestVerdict) {
        self.minute.judge(now, judged_request);
        let total = self.totals.entry(judged_request.class.clone()).or_default();
        *last_minute::verdict_of(total, judged_request.verdict) += 1;
        if matches!(judged_request.verdict, "refused" | "failed" | "late") {
            let (verdict, reason) = (judged_request.verdict, judged_request.reason);
            self.events.add(verdict, reason, &judged_request.class);
        }
    }

    fn flights_now(&self) -> FlightStageCounts {
        let mut now = FlightStageCounts::default();
        for tracked in self.flights.values() {
            let count = match tracked.stage {
                FlightStage::Queued => &mut now.queued,
                FlightStage::Reserved => &mut now.reserved,
                FlightStage::Prefill => &mut now.prefill,
                FlightStage::Transfer => &mut now.transfer,
                FlightStage::Decode => &mut now.decode,
            };
            *count += 1;
            now.moving += u32::from(tracked.moving);
        }
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Failure, PrefillTiming, Refusal, RequestStageTimes, WorkerId};

    const BLOCKS: BlockSize = BlockSize {
        tokens: 16,
        bytes: 1_000,
    };

    fn worker(number: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(number),
            ..WorkerRef::default()
        }
    }

    fn attempt(attempt: u32) -> HandoffId {
        HandoffId {
            flight: FlightId(7),
            attempt,
        }
    }

    struct DashboardFixture(Dashboard, std::cell::Cell<u32>);

    impl DashboardFixture {
        fn placed(&self, handoff: HandoffId, prefill: u64, decode: u64) {
            self.handle_note(&RouterNote::Placed {
                handoff,
                prefill: worker(prefill),
                decode: worker(decode),
                cached_tokens: 0,
                waited: Duration::ZERO,
            });
        }

        fn handle_note(&self, note: &RouterNote) {
            self.0
                .handle_note(note, |worker| format!("w{}", worker.worker.0));
        }

        fn handle_report(&self, report: &Report) {
            self.0.handle_report(report, BLOCKS, |_| self.1.get());
        }

        fn reserved(&self, handoff: HandoffId, present: u32) {
            self.handle_report(&Report::Reserved {
                handoff,
                present,
                blocks: Vec::new(),
            });
        }

        fn prefilled(&self, handoff: HandoffId) {
            let timing = PrefillTiming::default();
            self.handle_report(&Report::Prefilled { handoff, timing });
        }

        #[track_caller]
        fn assert_stages(&self, queued: u32, handoff_stages: [u32; 3], decode: u32) {
            let [reserved, prefill, transfer] = handoff_stages;
            let now = self.0.snapshot().flights;
            let expected = FlightStageCounts {
                queued,
                reserved,
                prefill,
                transfer,
                decode,
                moving: now.moving,
            };
            assert_eq!(now, expected);
        }
    }

    #[test]
    fn every_failed_hand_off_has_one_outcome() {
        let mut lost = Vec::new();
        let dashboard = Dashboard::default();
        let handle = |note: &RouterNote| dashboard.handle_note(note, |_| String::new());
        let place = |number: u32, prefill| {
            let placed = RouterNote::Placed {
                handoff: attempt(number),
                prefill: worker(prefill),
                decode: worker(2),
                cached_tokens: 0,
                waited: Duration::ZERO,
            };
            assert_eq!(handle(&placed), None);
        };
        let passed_over = |number, refusal| RouterNote::PassedOver {
            handoff: attempt(number),
            worker: worker(2),
            refusal,
        };
        let retried = |number, failure| RouterNote::Retried {
            handoff: attempt(number),
            failure,
            generated_tokens: 0,
        };
        dashboard.submitted(FlightId(7), 100);
        place(0, 1);
        lost.push(handle(&passed_over(0, Some(Refusal::Draining))));
        // The same attempt has no second end.
        assert_eq!(handle(&retried(0, Failure::Corrupt)), None);
        place(1, 1);
        lost.push(handle(&passed_over(1, None)));
        place(2, 1);
        lost.push(handle(&retried(2, Failure::Corrupt)));
        place(3, 1);
        lost.push(handle(&retried(3, Failure::LinkLost)));
        // Both legs of one worker are no hand-off.
        place(4, 2);
        assert_eq!(handle(&retried(4, Failure::WorkerLost)), None);
        place(5, 1);
        let landed = Report::Landed {
            handoff: attempt(5),
        };
        assert!(dashboard.handle_report(&landed, BLOCKS, |_| 0).is_some());
        assert_eq!(
            dashboard.handle_report(&landed, BLOCKS, |_| 0),
            None,
            "landed once"
        );
        let moving = RouterNote::Moving {
            handoff: attempt(6),
            from: worker(2),
            to: worker(3),
            why: cleave_router::MoveReason::Drain,
        };
        assert_eq!(handle(&moving), None);
        assert_eq!(
            handle(&passed_over(6, Some(Refusal::Draining))),
            Some(HandoffLoss::Refused)
        );
        let aborted = RouterNote::MigrationAborted {
            handoff: attempt(6),
            failure: Failure::Rejected,
        };
        assert_eq!(handle(&aborted), None, "it was counted as refused");
        // A failure after the landing is not the hand-off's.
        assert_eq!(handle(&retried(5, Failure::WorkerLost)), None);
        place(7, 1);
        let spent = Ending::Failed(Failure::RetriesSpent(Box::new(Failure::WorkerLost)));
        lost.push(dashboard.ended(FlightId(7), Some(&spent), None));
        use HandoffLoss::{Failed, Lost, Refused};
        assert_eq!(lost, [Refused, Lost, Failed, Lost, Lost].map(Some));
    }

    #[test]
    fn a_flight_has_one_stage_and_landings_count_once() {
        let fixture = DashboardFixture(Dashboard::default(), std::cell::Cell::new(1));
        fixture.0.submitted(FlightId(7), 100);
        fixture.assert_stages(1, [0, 0, 0], 0);
        fixture.placed(attempt(0), 1, 2);
        fixture.assert_stages(0, [1, 0, 0], 0);
        fixture.reserved(attempt(0), 2);
        fixture.assert_stages(0, [0, 1, 0], 0);
        fixture.prefilled(attempt(0));
        fixture.assert_stages(0, [0, 0, 1], 0);
        fixture.handle_report(&Report::Landed {
            handoff: attempt(0),
        });
        fixture.assert_stages(0, [0, 0, 0], 1);
        // Seven blocks, two of which were there.
        assert_eq!(fixture.0.snapshot().handoffs.bytes_total, 5_000);
        // Its worker is lost, and the tokens it had are computed again, on one worker.
        fixture.handle_note(&RouterNote::Retried {
            handoff: attempt(0),
            failure: Failure::WorkerLost,
            generated_tokens: 60,
        });
        fixture.assert_stages(1, [0, 0, 0], 0);
        fixture.placed(attempt(1), 3, 3);
        fixture.reserved(attempt(1), 0);
        // A late report of the attempt before.
        fixture.handle_report(&Report::Landed {
            handoff: attempt(0),
        });
        fixture.prefilled(attempt(1));
        fixture.assert_stages(0, [0, 0, 0], 1);
        // It moves: ten blocks for a hundred tokens and sixty more, and the last one drawn.
        fixture.1.set(61);
        let (from, to) = (worker(3), worker(4));
        fixture.handle_note(&RouterNote::Moving {
            handoff: attempt(2),
            from,
            to,
            why: cleave_router::MoveReason::Drain,
        });
        fixture.reserved(attempt(2), 0);
        fixture.prefilled(attempt(2));
        fixture.assert_stages(0, [0, 0, 0], 1);
        assert_eq!(fixture.0.snapshot().flights.moving, 1);
        fixture.handle_report(&Report::Landed {
            handoff: attempt(2),
        });
        fixture.handle_note(&RouterNote::Moved {
            handoff: attempt(2),
            took: Duration::ZERO,
        });
        let snapshot = fixture.0.snapshot();
        assert_eq!(snapshot.flights.moving, 0);
        let handoffs = snapshot.handoffs;
        assert_eq!(handoffs.bytes_total, 15_000);
        assert_eq!((handoffs.landed_total, handoffs.joined_total), (2, 1));
        let verdict = RequestVerdict {
            class: "fast".to_owned(),
            verdict: "late",
            reason: "retry",
            timing: RequestStageTimes::default(),
            output_tokens: 61,
        };
        fixture.0.ended(FlightId(7), None, Some(&verdict));
        fixture.assert_stages(0, [0, 0, 0], 0);
        let snapshot = fixture.0.snapshot();
        assert_eq!(snapshot.classes["fast"].total.late, 1);
        let events: Vec<_> = snapshot
            .events
            .iter()
            .map(|e| (e.kind, &*e.reason))
            .collect();
        assert_eq!(events, [("late", "retry"), ("retried", "worker_lost")]);
        assert!(fixture.0.lock().flights.is_empty());
    }
}
