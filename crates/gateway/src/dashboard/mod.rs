//! The numbers of past flights on the operators' dashboard.
//!
//! Owns: the last minute, totals since the start, and what went wrong. Never decides, or sees a
//! token or a text. Invariant: only numbers of a flight are kept.
//!
//! The driver reports facts and outputs; readers copy the numbers. Flights under way are in the
//! flight table, workers in the roster.

mod events;
mod last_minute;
mod scaling;

pub(crate) use events::at_ms;
pub(super) use scaling::dashboard_scaling;

use cleave_api::{
    DashboardEvent, DurationQuantiles, HandoffTotals, HistorySecond, ScalingChange, VerdictCounts,
};
use cleave_domain::{FleetTarget, RequestStage};
use cleave_router::RouterNote;
use cleave_telemetry::{NoteContext, RequestVerdict, RouterObserver, failure_name, refusal_name};
use events::DashboardEvents;
use last_minute::{ClassMinute, LastMinute};
use parking_lot::{Mutex, MutexGuard};
use scaling::RecentDecisions;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Dashboard {
    since: Instant,
    state: Mutex<DashboardState>,
}

#[derive(Debug, Default)]
struct DashboardState {
    minute: LastMinute,
    totals: BTreeMap<String, VerdictCounts>,
    bytes_total: u64,
    landed_total: u64,
    joined_total: u64,
    events: DashboardEvents,
    decisions: RecentDecisions,
}

/// A copy of everything that is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct DashboardSnapshot {
    pub(crate) uptime: Duration,
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
    pub(crate) fn submitted(&self) {
        let now = self.now();
        self.lock().minute.second(now).begun += 1;
    }

    /// Blocks of one worker landed at another.
    pub(crate) fn handoff_landed(&self, bytes: u64) {
        let now = self.now();
        let mut state = self.lock();
        state.landed_total += 1;
        state.bytes_total += bytes;
        state.minute.second(now).handoff_bytes += bytes;
    }

    /// Counts the verdict on a flight that has ended, or on a request that was refused before it
    /// was one.
    pub(crate) fn judged(&self, verdict: &RequestVerdict) {
        let now = self.now();
        self.lock().judged(now, verdict);
    }

    /// Something happened to a worker.
    pub(crate) fn worker_changed(&self, kind: &'static str, reason: &str, name: &str) {
        self.lock().events.add(kind, reason, name);
    }

    /// Records how many workers of a model are wanted from now on.
    pub(crate) fn scaling_decided(&self, model: &str, target: &FleetTarget) {
        self.lock().decisions.record(model, target, at_ms());
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

impl RouterObserver for Dashboard {
    fn handle_note(&self, note: &RouterNote, context: NoteContext<'_>) {
        let (kind, reason, about) = match note {
            RouterNote::Placed {
                prefill, decode, ..
            } => {
                if prefill == decode {
                    self.lock().joined_total += 1;
                }
                return;
            }
            RouterNote::MigrationAborted { failure, .. } => {
                ("stayed", failure_name(failure), "a move".into())
            }
            RouterNote::Retried { failure, .. } => {
                ("retried", failure_name(failure), "an attempt".into())
            }
            // A refusal is no news about a worker; a missing answer is.
            RouterNote::PassedOver {
                worker, refusal, ..
            } => match refusal {
                Some(refusal) => ("passed_over", refusal_name(refusal), "a worker".into()),
                None => ("passed_over", "silent", (context.worker_name)(worker)),
            },
            RouterNote::WorkerStuck { worker } => {
                ("stuck", "no step ends", (context.worker_name)(worker))
            }
            _ => return,
        };
        self.lock().events.add(kind, reason, &about);
    }
}

impl DashboardState {
    fn judged(&mut self, now: u64, judged_request: &RequestVerdict) {
        self.minute.judge(now, judged_request);
        let total = self.totals.entry(judged_request.class.clone()).or_default();
        *last_minute::verdict_of(total, judged_request.verdict) += 1;
        if matches!(judged_request.verdict, "refused" | "failed" | "late") {
            let (verdict, reason) = (judged_request.verdict, judged_request.reason);
            self.events.add(verdict, reason, &judged_request.class);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Failure, FlightId, HandoffId, RequestStageTimes, WorkerId, WorkerRef};

    #[test]
    fn verdicts_and_failures_are_shown_the_latest_first() {
        let dashboard = Dashboard::default();
        let handle = |note: &RouterNote| {
            let context = NoteContext {
                flight: note.flight(),
                model: "m",
                request: None,
                worker_name: &|worker| format!("w{}", worker.worker.0),
            };
            dashboard.handle_note(note, context);
        };
        let handoff = HandoffId {
            flight: FlightId(7),
            attempt: 0,
        };
        let placed = |decode| RouterNote::Placed {
            handoff,
            prefill: WorkerRef::default(),
            decode: WorkerRef {
                worker: WorkerId(decode),
                ..WorkerRef::default()
            },
            cached_tokens: 0,
            waited: Duration::ZERO,
        };
        dashboard.submitted();
        handle(&placed(2));
        dashboard.handoff_landed(5_000);
        handle(&RouterNote::PassedOver {
            handoff,
            worker: WorkerRef {
                worker: WorkerId(3),
                ..WorkerRef::default()
            },
            refusal: None,
        });
        handle(&RouterNote::Retried {
            handoff,
            failure: Failure::WorkerLost,
            generated_tokens: 60,
        });
        handle(&placed(0));
        dashboard.judged(&RequestVerdict {
            class: "fast".to_owned(),
            verdict: "late",
            reason: "retry",
            timing: RequestStageTimes::default(),
            output_tokens: 61,
        });
        let snapshot = dashboard.snapshot();
        let handoffs = snapshot.handoffs;
        assert_eq!((handoffs.landed_total, handoffs.joined_total), (1, 1));
        assert_eq!(handoffs.bytes_total, 5_000);
        assert_eq!(snapshot.classes["fast"].total.late, 1);
        let events: Vec<_> = snapshot
            .events
            .iter()
            .map(|event| (event.kind, &*event.reason, &*event.about))
            .collect();
        let expected = [
            ("late", "retry", "fast"),
            ("retried", "worker_lost", "an attempt"),
            ("passed_over", "silent", "w3"),
        ];
        assert_eq!(events, expected);
    }
}
