//! A router's series.
//!
//! Owns: each name with its help, and what a note adds to it. Never: notes anything itself.
//! Invariant: every kind of ending, placement and move is there from the start, as a zero.

use super::{Histograms, histograms, seconds, split_seconds};
use crate::router::Added;
use crate::trace::{Mark, Turn, named};
use cleave_api::Book;
use cleave_domain::{Aim, Ending, Failure, Refusal, Role};
use cleave_router::{CancelStage, Census, Decision, MoveReason, Note};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tracing::field::display;
use tracing::{debug, info, warn};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Staged {
    stage: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Connected {
    role: String,
}

/// The series of this process's router, if it has one.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    flights: Gauge,
    flights_waiting: Gauge,
    workers: Family<Connected, Gauge>,
    placed: Family<Kind, Counter>,
    cached_tokens: Counter,
    placement_wait: Histogram,
    added: Histogram,
    retries: Family<Kind, Counter>,
    passed_over: Family<Kind, Counter>,
    stale: Counter,
    ended: Family<Kind, Counter>,
    cancel_seconds: Histograms<Staged>,
    resumed: Counter,
    resumed_tokens: Counter,
    moves: Family<Kind, Counter>,
    moved: Counter,
    stayed: Family<Kind, Counter>,
    move_seconds: Histogram,
    pause_seconds: Histograms<Kind>,
    stuck: Counter,
    exceeded: Counter,
    passes: Gauge,
    handoffs: Counter,
    handoff_bytes: Counter,
}

impl Series {
    pub(super) fn register(book: &mut Book) -> Self {
        let series = Self {
            flights: Gauge::default(),
            flights_waiting: Gauge::default(),
            workers: Family::default(),
            placed: Family::default(),
            cached_tokens: Counter::default(),
            placement_wait: seconds(),
            added: split_seconds(),
            retries: Family::default(),
            passed_over: Family::default(),
            stale: Counter::default(),
            ended: Family::default(),
            cancel_seconds: histograms(),
            resumed: Counter::default(),
            resumed_tokens: Counter::default(),
            moves: Family::default(),
            moved: Counter::default(),
            stayed: Family::default(),
            move_seconds: seconds(),
            pause_seconds: histograms(),
            stuck: Counter::default(),
            exceeded: Counter::default(),
            passes: Gauge::default(),
            handoffs: Counter::default(),
            handoff_bytes: Counter::default(),
        };
        series.register_flights(book);
        series.register_placement(book);
        series.register_limits(book);
        series.register_turns(book);
        series
    }

    fn register_flights(&self, book: &mut Book) {
        book.register(
            "cleave_flights",
            "Flights that have not ended",
            self.flights.clone(),
        );
        book.register(
            "cleave_flights_waiting",
            "Flights waiting for room",
            self.flights_waiting.clone(),
        );
        book.register(
            "cleave_flights_ended",
            "Flights by how they ended",
            self.ended.clone(),
        );
        book.register(
            "cleave_cancel_to_free_seconds",
            "From the client's leaving to every block free on both pools, by how far the flight had come",
            self.cancel_seconds.clone(),
        );
    }

    fn register_limits(&self, book: &mut Book) {
        book.register(
            "cleave_tokens_beyond_limit",
            "Tokens from workers beyond what their request may have, dropped: a defect of a worker",
            self.exceeded.clone(),
        );
        book.register(
            "cleave_router_passes",
            "Passes to write to what a worker reserved, whose senders have not been told",
            self.passes.clone(),
        );
    }

    fn register_placement(&self, book: &mut Book) {
        book.register(
            "cleave_workers",
            "Connected workers by role",
            self.workers.clone(),
        );
        book.register(
            "cleave_placements",
            "Attempts placed: on two workers, or both legs on one",
            self.placed.clone(),
        );
        book.register(
            "cleave_router_handoffs",
            "Hand-offs that landed, as this router heard of them: prompts that another worker computed, and running \
             sequences that moved",
            self.handoffs.clone(),
        );
        book.register(
            "cleave_router_handoff_bytes",
            "KV bytes of these hand-offs, without what their receivers had cached",
            self.handoff_bytes.clone(),
        );
        book.register(
            "cleave_placement_cached_tokens",
            "Prompt tokens believed cached where they were placed",
            self.cached_tokens.clone(),
        );
        book.register(
            "cleave_placement_wait_seconds",
            "From submission to placement",
            self.placement_wait.clone(),
        );
        book.register(
            "cleave_router_added_seconds",
            "What the router adds to the time to first token: choosing, ordering and passing on, not waiting",
            self.added.clone(),
        );
        book.register(
            "cleave_retries",
            "Attempts that failed and were followed by another, by reason",
            self.retries.clone(),
        );
        book.register(
            "cleave_workers_passed_over",
            "Workers that refused a leg, by reason, or did not answer in time (silent)",
            self.passed_over.clone(),
        );
        book.register(
            "cleave_stale_reports",
            "Reports of past attempts or lives, ignored",
            self.stale.clone(),
        );
        book.register(
            "cleave_workers_stuck",
            "Workers that stopped making progress while they answered",
            self.stuck.clone(),
        );
    }

    fn register_turns(&self, book: &mut Book) {
        book.register(
            "cleave_streams_resumed",
            "Streams continued by another attempt after their worker failed in mid-stream",
            self.resumed.clone(),
        );
        book.register(
            "cleave_resumed_tokens",
            "Output tokens that resumed streams had, whose KV was computed again",
            self.resumed_tokens.clone(),
        );
        book.register(
            "cleave_moves",
            "Running sequences that were to move to another worker, by reason",
            self.moves.clone(),
        );
        book.register(
            "cleave_moves_done",
            "Running sequences that moved",
            self.moved.clone(),
        );
        book.register(
            "cleave_moves_stayed",
            "Running sequences that were to move and went on where they were, by reason",
            self.stayed.clone(),
        );
        book.register(
            "cleave_move_seconds",
            "From the order to move to running on the other worker",
            self.move_seconds.clone(),
        );
        book.register(
            "cleave_stream_pause_seconds",
            "Gap between two tokens of a stream where another attempt took over: resumed after a \
             failure, or migrated",
            self.pause_seconds.clone(),
        );
    }
}

/// The router's hand on its series.
#[derive(Clone, Debug)]
pub(crate) struct RouterMeters {
    series: Series,
}

impl RouterMeters {
    pub(crate) fn new(series: &Series) -> Self {
        for kind in ["done", "refused", "cancelled", "failed"] {
            drop(series.ended.get_or_create(&Kind { kind }));
        }
        for kind in ["disaggregated", "aggregated"] {
            drop(series.placed.get_or_create(&Kind { kind }));
        }
        for reason in [MoveReason::Drain, MoveReason::Role, MoveReason::Crowded] {
            let kind = why(reason);
            drop(series.moves.get_or_create(&Kind { kind }));
        }
        for turn in [Turn::Resumed, Turn::Migrated] {
            let kind = turn.name();
            drop(series.pause_seconds.get_or_create(&Kind { kind }));
        }
        for stage in STAGES {
            let stage = name(stage);
            drop(series.cancel_seconds.get_or_create(&Staged { stage }));
        }
        Self {
            series: series.clone(),
        }
    }

    /// For one flight.
    pub(crate) fn added(&self) -> Arc<Added> {
        Added::begin(self.series.added.clone())
    }

    /// A client saw a pause where another attempt took over.
    pub(crate) fn paused(&self, turn: Turn, pause: Duration) {
        let kind = turn.name();
        let pauses = self.series.pause_seconds.get_or_create(&Kind { kind });
        pauses.observe(pause.as_secs_f64());
    }

    /// So many passes are kept.
    pub(crate) fn passes(&self, count: usize) {
        self.series
            .passes
            .set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Blocks of one worker landed at another.
    pub(crate) fn handed_over(&self, bytes: u64) {
        self.series.handoffs.inc();
        self.series.handoff_bytes.inc_by(bytes);
    }

    /// A worker emitted a token beyond what its request may have.
    pub(crate) fn exceeded(&self) {
        self.series.exceeded.inc();
    }

    /// Counts what the brain noted, and logs it with the name of the request that it is about.
    pub(crate) fn count(&self, note: &Note, mark: Option<&Arc<Mark>>) {
        let (request_id, trace) = named(mark);
        let trace_id = trace.map(display);
        match note {
            // As JSON, for whoever wants to know why a request went where it went.
            Note::Decided(decision) => {
                debug!(target: "decision", request_id, trace_id, record = %Record(decision));
            }
            note => debug!(request_id, trace_id, ?note),
        }
        let series = &self.series;
        match note {
            Note::Placed {
                handoff: _,
                prefill,
                decode,
                cached_tokens,
                waited,
            } => {
                let kind = match prefill == decode {
                    true => "aggregated",
                    false => "disaggregated",
                };
                series.placed.get_or_create(&Kind { kind }).inc();
                series.cached_tokens.inc_by(u64::from(*cached_tokens));
                series.placement_wait.observe(waited.as_secs_f64());
            }
            Note::PassedOver {
                handoff: _,
                worker: _,
                refusal,
            } => {
                let kind = refusal.as_ref().map_or("silent", refused);
                series.passed_over.get_or_create(&Kind { kind }).inc();
            }
            Note::Stale { .. } => drop(series.stale.inc()),
            Note::Decided(_) | Note::Judged { .. } => {}
            Note::Retried { .. }
            | Note::Moving { .. }
            | Note::Moved { .. }
            | Note::Stayed { .. } => self.count_turn(note),
            Note::CancelFreed {
                flight: _,
                took,
                stage,
            } => {
                let stage = name(*stage);
                let spans = series.cancel_seconds.get_or_create(&Staged { stage });
                spans.observe(took.as_secs_f64());
            }
            Note::WorkerStuck { worker } => {
                warn!(%worker, "a worker makes no progress and is passed over");
                series.stuck.inc();
            }
            Note::Fleet {
                workers,
                flights,
                flights_waiting,
            } => {
                self.workers(*workers);
                series.flights.set(i64::from(*flights));
                series.flights_waiting.set(i64::from(*flights_waiting));
            }
        }
    }

    /// Another attempt takes over, or was to.
    fn count_turn(&self, note: &Note) {
        let series = &self.series;
        match note {
            Note::Retried {
                handoff,
                failure,
                generated_tokens,
            } => {
                info!(%handoff, ?failure, generated_tokens, "attempt failed, trying again");
                let kind = reason(failure);
                series.retries.get_or_create(&Kind { kind }).inc();
                if *generated_tokens > 0 {
                    series.resumed.inc();
                    series.resumed_tokens.inc_by(u64::from(*generated_tokens));
                }
            }
            Note::Moving {
                handoff: _,
                from: _,
                to: _,
                why: reason,
            } => {
                let kind = why(*reason);
                series.moves.get_or_create(&Kind { kind }).inc();
            }
            Note::Moved { handoff: _, took } => {
                series.moved.inc();
                series.move_seconds.observe(took.as_secs_f64());
            }
            Note::Stayed {
                handoff: _,
                failure,
            } => {
                let kind = reason(failure);
                series.stayed.get_or_create(&Kind { kind }).inc();
            }
            other => debug_assert!(false, "counted elsewhere: {other:?}"),
        }
    }

    fn workers(&self, census: Census) {
        let Census {
            prefill,
            decode,
            both,
            devices: _,
        } = census;
        let counts = [
            (Role::Prefill, prefill),
            (Role::Decode, decode),
            (Role::Both, both),
        ];
        for (role, count) in counts {
            let role = role.to_string();
            let gauge = self.series.workers.get_or_create(&Connected { role });
            gauge.set(i64::from(count));
        }
    }

    pub(crate) fn ended(&self, ending: &Ending) {
        let kind = match ending {
            Ending::Done { .. } => "done",
            Ending::Refused(_) => "refused",
            Ending::Cancelled => "cancelled",
            Ending::Failed(_) => "failed",
        };
        self.series.ended.get_or_create(&Kind { kind }).inc();
    }
}

/// A decision, written only if somebody reads it.
struct Record<'a>(&'a Decision);

impl fmt::Display for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match serde_json::to_string(self.0) {
            Ok(json) => f.write_str(&json),
            Err(error) => write!(f, "{error}"),
        }
    }
}

const STAGES: [CancelStage; 5] = [
    CancelStage::Queued,
    CancelStage::Reserving,
    CancelStage::Prefilling,
    CancelStage::Sending,
    CancelStage::Decoding,
];

fn name(stage: CancelStage) -> &'static str {
    match stage {
        CancelStage::Queued => "queued",
        CancelStage::Reserving => "reserving",
        CancelStage::Prefilling => "prefilling",
        CancelStage::Sending => "sending",
        CancelStage::Decoding => "decoding",
    }
}

fn why(reason: MoveReason) -> &'static str {
    match reason {
        MoveReason::Drain => "drain",
        MoveReason::Role => "role",
        MoveReason::Crowded => "crowded",
    }
}

pub(crate) fn refused(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::QueueFull { .. } => "queue_full",
        Refusal::NoBlocks { .. } => "no_blocks",
        Refusal::TooLong { .. } => "too_long",
        Refusal::OutOfVocabulary { .. } => "out_of_vocabulary",
        Refusal::NoWorker => "no_worker",
        Refusal::Draining => "draining",
        Refusal::WrongWorker => "wrong_worker",
        Refusal::Late { aim, .. } => match aim {
            Aim::Ttft => "slo_ttft_unreachable",
            Aim::Tpot => "slo_tpot_unreachable",
            Aim::EndToEnd => "slo_e2e_unreachable",
        },
    }
}

pub(crate) fn reason(failure: &Failure) -> &'static str {
    match failure {
        Failure::WorkerLost => "worker_lost",
        Failure::WorkerStuck => "worker_stuck",
        Failure::SlowReader => "slow_reader",
        Failure::LinkLost => "link_lost",
        Failure::LeaseExpired => "lease_expired",
        Failure::Corrupt => "corrupt",
        Failure::Rejected => "rejected",
        Failure::Engine(_) => "engine",
        Failure::OutOfBlocks => "out_of_blocks",
        Failure::Draining => "draining",
        Failure::RetriesSpent(last) => reason(last),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::FlightId;
    use cleave_router::Decided;

    #[test]
    fn a_decision_in_the_log_reads_back_as_what_was_decided() {
        let decision = Decision {
            flight: FlightId(7),
            class: "fast".to_owned(),
            tenant: String::new(),
            waited: Duration::from_millis(3),
            ttft_permille: 1100,
            tpot_permille: 1000,
            considered: Vec::new(),
            outcome: Decided::Refused(Refusal::Late {
                aim: Aim::Ttft,
                predicted: Duration::from_millis(812),
                retry_after: Duration::from_millis(300),
            }),
        };
        let written = Record(&decision).to_string();
        let read: Decision = serde_json::from_str(&written).unwrap();
        assert_eq!(read, decision);
    }
}
