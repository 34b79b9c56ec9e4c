//! A router's series.
//!
//! Owns: each name with its help, and what a note adds to it. Never: notes anything itself.
//! Invariant: every kind of ending, placement and move is there from the start, as a zero.

use super::buckets::{HistogramFamily, histograms, seconds, submillisecond_seconds};
use crate::json_field::JsonField;
use crate::observer::{NoteContext, RouterObserver};
use crate::outcome::{HandoffLoss, failure_name, refusal_name};
use crate::overhead::RouterOverhead;
use crate::series_table::{begin, series_table};
use crate::trace::{AttemptChange, log_ids};
use cleave_domain::{Ending, Failure, Role};
use cleave_router::{CancelStage, MoveReason, RoleCounts, RouterNote};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use std::sync::Arc;
use std::time::Duration;
use tracing::field::display;
use tracing::{debug, info, warn};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouterKindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CancelStageLabels {
    stage: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandoffOutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerRoleLabels {
    role: String,
    model: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FlightEndLabels {
    kind: &'static str,
    model: String,
}

series_table! {
    /// The series of this process's router, if it has one.
    pub struct RouterSeries;

    flights: Family<ModelLabels, Gauge>, "cleave_flights",
        "Flights (sequences in the router) that have not ended, by model (empty before one is known)";
    flights_waiting: Family<ModelLabels, Gauge>, "cleave_flights_waiting",
        "Flights that wait to be placed, by model";
    ended: Family<FlightEndLabels, Counter>, "cleave_flights_ended",
        "Flights that ended, by model: done, refused, cancelled, failed, or invalid (their constraint cannot be enforced)";
    cancel_seconds: HistogramFamily<CancelStageLabels> = histograms(), "cleave_router_cancel_to_free_seconds",
        "Time from a client's departure until all blocks of its flight are free in both pools, by stage \
         (cleave_worker_cancel_to_free_seconds is one worker's part)";
    workers: Family<WorkerRoleLabels, Gauge>, "cleave_workers",
        "Connected workers by role and model";
    standing_by: Gauge, "cleave_workers_standing_by",
        "Connected workers that wait because another worker has their name";
    placed: Family<RouterKindLabels, Counter>, "cleave_placements",
        "Attempts placed: disaggregated (two workers) or aggregated (both legs on one); why is in cleave_placement_reasons_total";
    handoffs: Family<HandoffOutcomeLabels, Counter>, "cleave_router_handoffs",
        "Hand-offs that this router ordered, each once, of prompts computed on another worker and of migrations, \
         by outcome: landed, or refused, failed or lost at a worker (cleave_worker_handoffs_total counts each end)";
    handoff_bytes: Counter, "cleave_router_handoff_bytes",
        "KV bytes of landed hand-offs that this router ordered, without the blocks that their receivers had cached \
         (cleave_worker_handoff_bytes_total counts what each worker sent and received)";
    cached_tokens: Counter, "cleave_placement_cached_tokens",
        "Prompt tokens that the router expected in the cache of the worker it chose, at each placement \
         (cleave_router_cached_tokens_total has those that were there)";
    placement_wait: Histogram = seconds(), "cleave_placement_wait_seconds",
        "Time from submission to placement";
    added: Histogram = submillisecond_seconds(), "cleave_router_added_seconds",
        "Time that the router adds to the time to first token: placement, orders, forwarding; not waiting";
    retries: Family<RouterKindLabels, Counter>, "cleave_retries",
        "Attempts that failed and were followed by another: worker_lost, worker_stuck, link_lost, lease_expired, \
         corrupt (damaged blocks), rejected (by a worker), engine (its step failed), out_of_blocks";
    passed_over: Family<RouterKindLabels, Counter>, "cleave_workers_passed_over",
        "Workers that refused a leg, by reason: queue_full, no_blocks, too_long, out_of_vocabulary, draining, \
         wrong_worker (the order does not fit its role or incarnation), slo_ttft_unreachable, \
         slo_tpot_unreachable; or that did not answer in time (silent)";
    stale: Counter, "cleave_stale_reports",
        "Reports of past attempts or incarnations, ignored";
    stuck: Counter, "cleave_router_workers_stuck",
        "Times that this router stopped giving work to a worker that answered and made no progress \
         (cleave_worker_stuck is the state now, at the worker)";
    exceeded: Counter, "cleave_tokens_beyond_limit",
        "Tokens from workers beyond the max_tokens of their request, dropped: a defect of a worker";
    grants: Gauge, "cleave_router_write_grants",
        "Write grants for reserved blocks that the router has and has not sent to the senders yet";
    prefix_dropped: Counter, "cleave_prefixes_dropped",
        "Cached prefix blocks dropped because a worker reported more than the router keeps of one";
    resumed: Counter, "cleave_streams_resumed",
        "Streams continued by another attempt after their worker failed in mid-stream";
    resumed_tokens: Counter, "cleave_resumed_tokens",
        "Output tokens of streams resumed after a failure, whose KV another worker computed again \
         (cleave_recomputed_tokens_total is for preemptions)";
    moves: Family<RouterKindLabels, Counter>, "cleave_moves",
        "Migrations of running sequences ordered: drain, role (it changed), crowded (KV blocks run out)";
    moved: Counter, "cleave_moves_done",
        "Migrations of running sequences completed";
    moves_aborted: Family<RouterKindLabels, Counter>, "cleave_moves_stayed",
        "Migrations given up, by failure: the sequence continued on its worker, or its flight ended or failed";
    move_seconds: Histogram = seconds(), "cleave_router_move_seconds",
        "Time from the router's order to migrate until the sequence runs on the other worker";
    pause_seconds: HistogramFamily<RouterKindLabels> = histograms(), "cleave_stream_pause_seconds",
        "Time between two tokens of a stream where another attempt took over: resumed (after a \
         failure) or migrated";
}

/// Counts into a router's series.
#[derive(Clone, Debug)]
pub struct RouterMeters {
    series: RouterSeries,
}

impl RouterMeters {
    pub fn new(series: &RouterSeries) -> Self {
        let kind = |kind| RouterKindLabels { kind };
        let moves = [
            MoveReason::Drain,
            MoveReason::Role,
            MoveReason::MemoryPressure,
        ];
        let pauses = [AttemptChange::Resumed, AttemptChange::Migrated];
        begin(&series.placed, ["disaggregated", "aggregated"].map(kind));
        begin(&series.moves, moves.map(move_reason_name).map(kind));
        begin(&series.pause_seconds, pauses.map(|turn| kind(turn.name())));
        let missed = HandoffLoss::ALL.map(HandoffLoss::name);
        let outcomes = [LANDED].into_iter().chain(missed);
        let outcomes = outcomes.map(|outcome| HandoffOutcomeLabels { outcome });
        begin(&series.handoffs, outcomes);
        let stages = STAGES.map(cancel_stage_name);
        let stages = stages.map(|stage| CancelStageLabels { stage });
        begin(&series.cancel_seconds, stages);
        let meters = Self {
            series: series.clone(),
        };
        meters.begin_model("");
        meters
    }

    /// Shows the series of this model from now on, from zero, in place of those without a model.
    pub fn begin_model(&self, model: &str) {
        let series = &self.series;
        if !model.is_empty() {
            self.end_model("");
        }
        let of_model = ModelLabels {
            model: model.to_owned(),
        };
        begin(&series.flights, [of_model.clone()]);
        begin(&series.flights_waiting, [of_model]);
        let labels = |kind| FlightEndLabels {
            kind,
            model: model.to_owned(),
        };
        begin(&series.ended, ENDINGS.map(labels));
    }

    /// Hides the series of a model that is forgotten.
    pub fn end_model(&self, model: &str) {
        let series = &self.series;
        let labels = ModelLabels {
            model: model.to_owned(),
        };
        series.flights.remove(&labels);
        series.flights_waiting.remove(&labels);
        for kind in ENDINGS {
            let model = model.to_owned();
            series.ended.remove(&FlightEndLabels { kind, model });
        }
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            series.workers.remove(&WorkerRoleLabels {
                role: role.to_string(),
                model: model.to_owned(),
            });
        }
    }

    /// Starts the overhead clock of one flight.
    pub fn start_overhead(&self) -> Arc<RouterOverhead> {
        RouterOverhead::start(self.series.added.clone())
    }

    /// A client saw a pause where another attempt took over.
    pub fn paused(&self, turn: AttemptChange, pause: Duration) {
        let kind = turn.name();
        let pauses = self
            .series
            .pause_seconds
            .get_or_create(&RouterKindLabels { kind });
        pauses.observe(pause.as_secs_f64());
    }

    /// Sets the number of write grants that are kept.
    pub fn set_grants(&self, count: usize) {
        self.series
            .grants
            .set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Sets the number of workers that wait for their name.
    pub fn set_standing_by(&self, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.series.standing_by.set(count);
    }

    /// Blocks of one worker landed at another.
    pub fn handoff_landed(&self, bytes: u64) {
        self.count_handoff(LANDED);
        self.series.handoff_bytes.inc_by(bytes);
    }

    /// A hand-off did not land.
    pub fn handoff_lost(&self, loss: HandoffLoss) {
        self.count_handoff(loss.name());
    }

    fn count_handoff(&self, outcome: &'static str) {
        let handoffs = self
            .series
            .handoffs
            .get_or_create(&HandoffOutcomeLabels { outcome });
        handoffs.inc();
    }

    /// A worker emitted a token beyond its request's limit.
    pub fn token_beyond_limit(&self) {
        self.series.exceeded.inc();
    }

    /// Counts the takeover of a stream by another attempt, or one that was given up.
    fn count_attempt_change(&self, note: &RouterNote) {
        let series = &self.series;
        match note {
            RouterNote::Retried {
                handoff,
                failure,
                generated_tokens,
            } => {
                let kind = failure_name(failure);
                info!(%handoff, failure = kind, generated_tokens, "attempt failed, trying again");
                series
                    .retries
                    .get_or_create(&RouterKindLabels { kind })
                    .inc();
                if *generated_tokens > 0 {
                    series.resumed.inc();
                    series.resumed_tokens.inc_by(u64::from(*generated_tokens));
                }
            }
            RouterNote::Moving {
                handoff: _,
                from: _,
                to: _,
                why: reason,
            } => {
                let kind = move_reason_name(*reason);
                series.moves.get_or_create(&RouterKindLabels { kind }).inc();
            }
            RouterNote::Moved { handoff: _, took } => {
                series.moved.inc();
                series.move_seconds.observe(took.as_secs_f64());
            }
            RouterNote::MigrationAborted {
                handoff: _,
                failure,
            } => {
                let kind = failure_name(failure);
                series
                    .moves_aborted
                    .get_or_create(&RouterKindLabels { kind })
                    .inc();
            }
            other => debug_assert!(false, "counted elsewhere: {other:?}"),
        }
    }

    fn workers(&self, census: RoleCounts, model: &str) {
        let RoleCounts {
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
            let labels = WorkerRoleLabels {
                role: role.to_string(),
                model: model.to_owned(),
            };
            let gauge = self.series.workers.get_or_create(&labels);
            gauge.set(i64::from(count));
        }
    }

    /// A flight of this model ended.
    pub fn ended(&self, ending: &Ending, model: &str) {
        let kind = match ending {
            Ending::Done { .. } => "done",
            Ending::Refused(_) => "refused",
            Ending::Cancelled => "cancelled",
            Ending::Failed(Failure::Constraint(_)) => "invalid",
            Ending::Failed(_) => "failed",
        };
        let model = model.to_owned();
        self.series
            .ended
            .get_or_create(&FlightEndLabels { kind, model })
            .inc();
    }
}

impl RouterObserver for RouterMeters {
    /// Counts a note of the brain, and logs it with the id of its request.
    fn handle_note(&self, note: &RouterNote, context: NoteContext<'_>) {
        let (request_id, trace) = log_ids(context.request);
        let trace_id = trace.map(display);
        match note {
            // As JSON, for operators who ask why a request was placed as it was.
            RouterNote::Decided(decision) => {
                debug!(target: "decision", request_id, trace_id, record = %JsonField(&**decision));
            }
            note => debug!(target: "note", request_id, trace_id, note = %JsonField(note)),
        }
        let series = &self.series;
        match note {
            RouterNote::Placed {
                handoff: _,
                prefill,
                decode,
                cached_tokens,
                waited,
            } => {
                let kind = if prefill == decode {
                    "aggregated"
                } else {
                    "disaggregated"
                };
                series
                    .placed
                    .get_or_create(&RouterKindLabels { kind })
                    .inc();
                series.cached_tokens.inc_by(u64::from(*cached_tokens));
                series.placement_wait.observe(waited.as_secs_f64());
            }
            RouterNote::PassedOver {
                handoff: _,
                worker: _,
                refusal,
            } => {
                let kind = refusal.as_ref().map_or("silent", refusal_name);
                series
                    .passed_over
                    .get_or_create(&RouterKindLabels { kind })
                    .inc();
            }
            RouterNote::Stale { .. } => drop(series.stale.inc()),
            RouterNote::Decided(_) | RouterNote::Judged { .. } => {}
            RouterNote::Retried { .. }
            | RouterNote::Moving { .. }
            | RouterNote::Moved { .. }
            | RouterNote::MigrationAborted { .. } => self.count_attempt_change(note),
            RouterNote::CancelFreed {
                flight: _,
                took,
                stage,
            } => {
                let stage = cancel_stage_name(*stage);
                let spans = series
                    .cancel_seconds
                    .get_or_create(&CancelStageLabels { stage });
                spans.observe(took.as_secs_f64());
            }
            RouterNote::WorkerStuck { worker } => {
                warn!(%worker, "a worker makes no progress and gets no new work");
                series.stuck.inc();
            }
            RouterNote::PrefixDropped {
                worker: _,
                dropped_count,
            } => {
                series.prefix_dropped.inc_by(*dropped_count as u64);
            }
            RouterNote::Fleet {
                workers,
                flights,
                flights_waiting,
            } => {
                self.workers(*workers, context.model);
                let labels = ModelLabels {
                    model: context.model.to_owned(),
                };
                let open = series.flights.get_or_create(&labels);
                open.set(i64::from(*flights));
                let waiting = series.flights_waiting.get_or_create(&labels);
                waiting.set(i64::from(*flights_waiting));
            }
        }
    }
}

/// The kinds of endings of flights.
const ENDINGS: [&str; 5] = ["done", "refused", "cancelled", "failed", "invalid"];

/// The outcome of a hand-off that landed; see [`HandoffLoss`] for the others.
const LANDED: &str = "landed";

const STAGES: [CancelStage; 5] = [
    CancelStage::Queued,
    CancelStage::Reserving,
    CancelStage::Prefilling,
    CancelStage::Sending,
    CancelStage::Decoding,
];

fn cancel_stage_name(stage: CancelStage) -> &'static str {
    match stage {
        CancelStage::Queued => "queued",
        CancelStage::Reserving => "reserving",
        CancelStage::Prefilling => "prefilling",
        CancelStage::Sending => "sending",
        CancelStage::Decoding => "decoding",
    }
}

fn move_reason_name(reason: MoveReason) -> &'static str {
    match reason {
        MoveReason::Drain => "drain",
        MoveReason::Role => "role",
        MoveReason::MemoryPressure => "crowded",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{FlightId, Refusal, SloMetric};
    use cleave_router::{DecisionOutcome, PlacementDecision};

    #[test]
    fn a_logged_decision_reads_back_unchanged() {
        let decision = PlacementDecision {
            flight: FlightId(7),
            class: "fast".to_owned(),
            tenant: String::new(),
            waited: Duration::from_millis(3),
            ttft_permille: 1100,
            tpot_permille: 1000,
            considered: Vec::new(),
            outcome: DecisionOutcome::Refused(Refusal::Late {
                aim: SloMetric::Ttft,
                predicted: Duration::from_millis(812),
                retry_after: Duration::from_millis(300),
            }),
        };
        let written = JsonField(&decision).to_string();
        let read: PlacementDecision = serde_json::from_str(&written).unwrap();
        assert_eq!(read, decision);
    }
}
