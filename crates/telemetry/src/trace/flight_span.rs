//! Spans of a flight at its router: one for the flight, and one for each attempt.
//!
//! Owns: what the brain's notes add to them. Exists for recorded flights only. Invariant: an
//! attempt's span has its id before the first order of the attempt is sent, since workers' spans
//! are its children.

use super::{RequestContext, SpanBuilder, Traces};
use crate::outcome::{failure_name, refusal_name};
use cleave_api::TraceParent;
use cleave_domain::{Ending, Failure, HandoffId, RequestStageTimes, TokenUsage, WorkerRef};
use cleave_router::RouterNote;
use opentelemetry::KeyValue;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How a stream passed to another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptChange {
    /// The previous attempt was over, and its tokens were computed again.
    Resumed,
    /// The running sequence moved.
    Migrated,
}

impl AttemptChange {
    pub fn name(self) -> &'static str {
        match self {
            Self::Resumed => "resumed",
            Self::Migrated => "migrated",
        }
    }
}

#[derive(Debug)]
pub struct FlightSpan {
    trace: TraceParent,
    flight: SpanBuilder,
    has_token: bool,
    attempts: Vec<AttemptSpan>,
}

#[derive(Debug)]
struct AttemptSpan {
    number: u32,
    builder: SpanBuilder,
    over: bool,
}

/// The outcome of a flight.
pub struct FlightOutcome<'a> {
    pub ending: &'a Ending,
    pub usage: TokenUsage,
    pub timing: RequestStageTimes,
}

impl FlightSpan {
    /// The spans of a flight for this model, if its trace is recorded.
    pub fn begin(traces: &Traces, context: &RequestContext, model: &str) -> Option<Box<Self>> {
        let parent = context.trace.filter(|trace| traces.records(Some(*trace)))?;
        let mut flight = SpanBuilder::under(parent, "flight", SystemTime::now());
        if !model.is_empty() {
            flight.set("gen_ai.request.model", model.to_owned());
        }
        Some(Box::new(Self {
            trace: flight.span,
            flight,
            has_token: false,
            attempts: Vec::new(),
        }))
    }

    /// The request's id, and the span for workers' work on an attempt.
    pub fn order_context(
        &mut self,
        context: &RequestContext,
        handoff: HandoffId,
    ) -> RequestContext {
        context.under_span(self.attempt(handoff).builder.span.span)
    }

    fn attempt(&mut self, handoff: HandoffId) -> &mut AttemptSpan {
        let number = handoff.attempt;
        let index_before = self.attempts.iter().rposition(|one| one.number == number);
        let index = index_before.unwrap_or_else(|| {
            let mut builder = SpanBuilder::under(self.trace, "attempt", SystemTime::now());
            builder.set_count("cleave.attempt", number);
            self.attempts.push(AttemptSpan {
                number,
                builder,
                over: false,
            });
            self.attempts.len() - 1
        });
        &mut self.attempts[index]
    }

    /// Adds a note of the brain.
    pub fn handle_note(&mut self, note: &RouterNote) {
        match note {
            RouterNote::Placed {
                handoff,
                prefill,
                decode,
                cached_tokens,
                waited,
            } => self.placed(*handoff, *prefill, *decode, *cached_tokens, *waited),
            RouterNote::PassedOver {
                handoff,
                worker,
                refusal,
            } => {
                let reason = refusal.as_ref().map_or("silent", refusal_name);
                let attributes = vec![
                    KeyValue::new("cleave.worker", worker.to_string()),
                    KeyValue::new("cleave.refusal", reason),
                ];
                self.attempt(*handoff)
                    .builder
                    .add_event("passed_over", attributes);
            }
            RouterNote::Retried {
                handoff,
                failure,
                generated_tokens,
            } => {
                let attempt = self.attempt(*handoff);
                let tokens = *generated_tokens;
                attempt.builder.set_count("cleave.generated_tokens", tokens);
                attempt.fail(failure);
            }
            RouterNote::Moving {
                handoff,
                from,
                to,
                why: _,
            } => {
                let builder = &mut self.attempt(*handoff).builder;
                builder.set("cleave.migration", true);
                builder.set("cleave.worker.source", from.to_string());
                builder.set("cleave.worker.decode", to.to_string());
            }
            RouterNote::Moved { handoff, took: _ } => {
                let number = handoff.attempt;
                let before = self.attempts.iter_mut().filter(|one| one.number < number);
                before.for_each(AttemptSpan::end);
            }
            RouterNote::MigrationAborted { handoff, failure } => {
                self.attempt(*handoff).fail(failure)
            }
            _ => {}
        }
    }

    fn placed(
        &mut self,
        handoff: HandoffId,
        prefill: WorkerRef,
        decode: WorkerRef,
        cached_tokens: u32,
        waited: Duration,
    ) {
        let builder = &mut self.attempt(handoff).builder;
        let kind = if prefill == decode {
            "aggregated"
        } else {
            "disaggregated"
        };
        builder.set("cleave.placement", kind);
        builder.set("cleave.worker.prefill", prefill.to_string());
        builder.set("cleave.worker.decode", decode.to_string());
        builder.set_count("cleave.placement.cached_tokens", cached_tokens);
        builder.set("cleave.placement.wait_seconds", waited.as_secs_f64());
    }

    /// A token went to the client.
    pub fn token_sent(&mut self) {
        if !std::mem::replace(&mut self.has_token, true) {
            self.flight.add_event("first_token", Vec::new());
        }
    }

    /// Another attempt took over after this many tokens, and the client waited for this long.
    pub fn attempt_changed(
        &mut self,
        change: AttemptChange,
        attempt: u32,
        tokens: usize,
        pause: Duration,
    ) {
        let attributes = vec![
            KeyValue::new("cleave.attempt", i64::from(attempt)),
            KeyValue::new("cleave.tokens", i64::try_from(tokens).unwrap_or(i64::MAX)),
            KeyValue::new("cleave.pause_seconds", pause.as_secs_f64()),
        ];
        self.flight.add_event(change.name(), attributes);
    }

    /// Ends and sends all spans of the flight.
    pub fn send_spans(mut self, traces: &Traces, outcome: &FlightOutcome<'_>) {
        self.set_outcome(outcome);
        for mut attempt in self.attempts {
            attempt.end();
            traces.send(attempt.builder);
        }
        self.flight.ended = SystemTime::now();
        traces.send(self.flight);
    }

    fn set_outcome(&mut self, outcome: &FlightOutcome<'_>) {
        let FlightOutcome {
            ending,
            usage,
            timing,
        } = outcome;
        let attempts = self.attempts.len();
        let moved = |one: &&AttemptSpan| one.builder.attributes.iter().any(is_migration);
        let migrations = self.attempts.iter().filter(moved).count();
        let builder = &mut self.flight;
        builder.set_count("gen_ai.usage.input_tokens", usage.prompt_tokens);
        builder.set_count("gen_ai.usage.output_tokens", usage.output_tokens);
        let cached = usage.cached_tokens;
        builder.set_count("gen_ai.usage.cache_read.input_tokens", cached);
        builder.set_count("cleave.attempts", attempts);
        builder.set_count("cleave.migrations", migrations);
        let retries = attempts.saturating_sub(1 + migrations);
        builder.set_count("cleave.retries", retries);
        for stage in cleave_domain::RequestStage::ALL {
            let span = timing.stage(stage);
            if !span.is_zero() {
                let key = format!("cleave.stage.{stage}_seconds");
                builder
                    .attributes
                    .push(KeyValue::new(key, span.as_secs_f64()));
            }
        }
        let ended = match ending {
            Ending::Done { .. } => "done",
            Ending::Cancelled => "cancelled",
            Ending::Refused(refusal) => {
                builder.set("cleave.refusal", refusal_name(refusal));
                "refused"
            }
            Ending::Failed(failure) => {
                builder.fail(failure_name(failure));
                "failed"
            }
        };
        builder.set("cleave.ending", ended);
    }
}

fn is_migration(attribute: &KeyValue) -> bool {
    attribute.key.as_str() == "cleave.migration"
}

impl AttemptSpan {
    fn end(&mut self) {
        if !std::mem::replace(&mut self.over, true) {
            self.builder.ended = SystemTime::now();
        }
    }

    fn fail(&mut self, failure: &Failure) {
        self.builder.fail(failure_name(failure));
        self.end();
    }
}

/// A request's id and trace, for log lines.
pub fn log_ids(context: Option<&Arc<RequestContext>>) -> (Option<&str>, Option<TraceParent>) {
    let id = context.map(|context| &*context.request_id);
    (id, context.and_then(|context| context.trace))
}
