//! A flight as its router tells it: a span for it, and one for each attempt.
//!
//! Owns: what the brain's notes add to them. Never: is there for a flight that nobody records. Invariant: an
//! attempt's span has its id before the first order of the attempt leaves, since workers' spans are its
//! children.

use super::{Mark, Piece, Traces};
use crate::telemetry::{failure_name, refusal_name};
use cleave_api::TraceParent;
use cleave_domain::{Ending, Failure, HandoffId, Timing, Usage, WorkerRef};
use cleave_router::Note;
use opentelemetry::KeyValue;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How a stream came to another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The attempt before was over, and its tokens were computed again.
    Resumed,
    /// The running sequence moved.
    Migrated,
}

impl Turn {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Resumed => "resumed",
            Self::Migrated => "migrated",
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Story {
    trace: TraceParent,
    flight: Piece,
    has_token: bool,
    attempts: Vec<Attempt>,
}

#[derive(Debug)]
struct Attempt {
    number: u32,
    piece: Piece,
    over: bool,
}

/// How it all ended.
pub(crate) struct Told<'a> {
    pub(crate) ending: &'a Ending,
    pub(crate) usage: Usage,
    pub(crate) timing: Timing,
}

impl Story {
    /// Of a flight, if its trace is recorded.
    pub(crate) fn begin(traces: &Traces, mark: &Mark) -> Option<Box<Self>> {
        let parent = mark.trace.filter(|trace| traces.records(Some(*trace)))?;
        let flight = Piece::under(parent, "flight", SystemTime::now());
        Some(Box::new(Self {
            trace: flight.span,
            flight,
            has_token: false,
            attempts: Vec::new(),
        }))
    }

    /// What a worker's work for an attempt belongs to.
    pub(crate) fn mark(&mut self, mark: &Mark, handoff: HandoffId) -> Mark {
        mark.under(self.attempt(handoff).piece.span.span)
    }

    fn attempt(&mut self, handoff: HandoffId) -> &mut Attempt {
        let number = handoff.attempt;
        let known = self.attempts.iter().rposition(|one| one.number == number);
        let index = known.unwrap_or_else(|| {
            let mut piece = Piece::under(self.trace, "attempt", SystemTime::now());
            piece.count("cleave.attempt", number);
            self.attempts.push(Attempt {
                number,
                piece,
                over: false,
            });
            self.attempts.len() - 1
        });
        &mut self.attempts[index]
    }

    /// Takes what the brain noted of the flight.
    pub(crate) fn hear(&mut self, note: &Note) {
        match note {
            Note::Placed {
                handoff,
                prefill,
                decode,
                cached_tokens,
                waited,
            } => self.placed(*handoff, (*prefill, *decode), (*cached_tokens, *waited)),
            Note::PassedOver {
                handoff,
                worker,
                refusal,
            } => {
                let reason = refusal.as_ref().map_or("silent", refusal_name);
                let said = vec![
                    KeyValue::new("cleave.worker", worker.to_string()),
                    KeyValue::new("cleave.refusal", reason),
                ];
                self.attempt(*handoff).piece.note("passed_over", said);
            }
            Note::Retried {
                handoff,
                failure,
                generated_tokens,
            } => {
                let attempt = self.attempt(*handoff);
                let tokens = *generated_tokens;
                attempt.piece.count("cleave.generated_tokens", tokens);
                attempt.fail(failure);
            }
            Note::Moving {
                handoff,
                from,
                to,
                why: _,
            } => {
                let piece = &mut self.attempt(*handoff).piece;
                piece.put("cleave.migration", true);
                piece.put("cleave.worker.source", from.to_string());
                piece.put("cleave.worker.decode", to.to_string());
            }
            Note::Moved { handoff, took: _ } => {
                let number = handoff.attempt;
                let before = self.attempts.iter_mut().filter(|one| one.number < number);
                before.for_each(Attempt::end);
            }
            Note::Stayed { handoff, failure } => self.attempt(*handoff).fail(failure),
            Note::Decided(_)
            | Note::Judged { .. }
            | Note::Stale { .. }
            | Note::CancelFreed { .. }
            | Note::WorkerStuck { .. }
            | Note::Fleet { .. } => {}
        }
    }

    fn placed(
        &mut self,
        handoff: HandoffId,
        (prefill, decode): (WorkerRef, WorkerRef),
        (cached_tokens, waited): (u32, Duration),
    ) {
        let piece = &mut self.attempt(handoff).piece;
        let kind = match prefill == decode {
            true => "aggregated",
            false => "disaggregated",
        };
        piece.put("cleave.placement", kind);
        piece.put("cleave.worker.prefill", prefill.to_string());
        piece.put("cleave.worker.decode", decode.to_string());
        piece.count("cleave.placement.cached_tokens", cached_tokens);
        piece.put("cleave.placement.wait_seconds", waited.as_secs_f64());
    }

    /// A token went to the client.
    pub(crate) fn token(&mut self) {
        if !std::mem::replace(&mut self.has_token, true) {
            self.flight.note("first_token", Vec::new());
        }
    }

    /// An attempt took over after so many tokens, and its client waited for so long.
    pub(crate) fn turned(&mut self, turn: Turn, (attempt, tokens, pause): (u32, usize, Duration)) {
        let said = vec![
            KeyValue::new("cleave.attempt", i64::from(attempt)),
            KeyValue::new("cleave.tokens", i64::try_from(tokens).unwrap_or(i64::MAX)),
            KeyValue::new("cleave.pause_seconds", pause.as_secs_f64()),
        ];
        self.flight.note(turn.name(), said);
    }

    /// The flight has ended.
    pub(crate) fn tell(mut self, traces: &Traces, told: &Told<'_>) {
        self.sum_up(told);
        for mut attempt in self.attempts {
            attempt.end();
            traces.send(attempt.piece);
        }
        self.flight.ended = SystemTime::now();
        traces.send(self.flight);
    }

    fn sum_up(&mut self, told: &Told<'_>) {
        let Told {
            ending,
            usage,
            timing,
        } = told;
        let attempts = self.attempts.len();
        let moved = |one: &&Attempt| one.piece.attributes.iter().any(is_migration);
        let migrations = self.attempts.iter().filter(moved).count();
        let piece = &mut self.flight;
        piece.count("gen_ai.usage.input_tokens", usage.prompt_tokens);
        piece.count("gen_ai.usage.output_tokens", usage.output_tokens);
        let cached = usage.cached_tokens;
        piece.count("gen_ai.usage.cache_read.input_tokens", cached);
        piece.count("cleave.attempts", attempts);
        piece.count("cleave.migrations", migrations);
        let retries = attempts.saturating_sub(1 + migrations);
        piece.count("cleave.retries", retries);
        for stage in cleave_domain::Stage::ALL {
            let span = timing.of(stage);
            if !span.is_zero() {
                let key = format!("cleave.stage.{stage}_seconds");
                piece
                    .attributes
                    .push(KeyValue::new(key, span.as_secs_f64()));
            }
        }
        let ended = match ending {
            Ending::Done { .. } => "done",
            Ending::Cancelled => "cancelled",
            Ending::Refused(refusal) => {
                piece.put("cleave.refusal", refusal_name(refusal));
                "refused"
            }
            Ending::Failed(failure) => {
                piece.fail(failure_name(failure));
                "failed"
            }
        };
        piece.put("cleave.ending", ended);
    }
}

fn is_migration(attribute: &KeyValue) -> bool {
    attribute.key.as_str() == "cleave.migration"
}

impl Attempt {
    fn end(&mut self) {
        if !std::mem::replace(&mut self.over, true) {
            self.piece.ended = SystemTime::now();
        }
    }

    fn fail(&mut self, failure: &Failure) {
        self.piece.fail(failure_name(failure));
        self.end();
    }
}

/// A request's name in a line of a log.
pub(crate) fn named(mark: Option<&Arc<Mark>>) -> (Option<&str>, Option<TraceParent>) {
    let id = mark.map(|mark| &*mark.request_id);
    (id, mark.and_then(|mark| mark.trace))
}
