//! A sequence's progress against its client's targets.
//!
//! Owns: when its next token is due, and when it last ran. Never: decides which sequence runs.
//! Invariant: a token's deadline is the first token's time plus one mean gap for each token after
//! it.

use crate::sequences::WorkerSequence;
use cleave_domain::{DecodeTiming, Time};
use std::time::Duration;

/// Time after which a prompt without a target is due: it then goes before prompts with later
/// deadlines, so that none waits for ever.
const NO_TARGET_WAIT: Duration = Duration::from_secs(30);

/// Times of a sequence that its client observes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClientTiming {
    /// When a token was last known to be drawn, and how many output tokens there were then.
    first: Option<(Time, u32)>,
    /// Since when it can decode here.
    ready: Option<Time>,
    /// Start of its first decode step.
    stepped: Option<Time>,
    /// How long that step took.
    first_step_took: Option<Duration>,
    /// When it last ran, or arrived.
    pub(crate) last_run_at: Time,
}

/// Deadline of a prompt's first token.
pub(crate) fn prompt_due(since: Time, ttft: Option<Duration>) -> Time {
    since + ttft.unwrap_or(NO_TARGET_WAIT)
}

impl ClientTiming {
    /// Times of a sequence that arrives now.
    pub(crate) fn new(now: Time) -> Self {
        Self {
            last_run_at: now,
            ..Self::default()
        }
    }

    /// Records that the sequence has its first token, or arrived with it; its KV is here.
    pub(crate) fn first_token(&mut self, first: Time, now: Time, output_count: u32) {
        self.first.get_or_insert((first, output_count));
        self.ready.get_or_insert(now);
        self.last_run_at = now;
    }

    /// Records that it is placed in a step.
    pub(crate) fn step_started(&mut self, now: Time) {
        self.last_run_at = now;
        if self.ready.is_some() {
            self.stepped.get_or_insert(now);
        }
    }

    /// Records that the step ended.
    pub(crate) fn step_ended(&mut self, now: Time) {
        if let Some(began) = self.stepped {
            self.first_step_took.get_or_insert(now.since(began));
        }
    }

    /// Waiting time and first step's time at this worker.
    pub(crate) fn timing(&self) -> DecodeTiming {
        let wait = |ready| self.stepped.map(|began| began.since(ready));
        DecodeTiming {
            wait: self.ready.and_then(wait).unwrap_or_default(),
            first: self.first_step_took.unwrap_or_default(),
        }
    }

    /// The part of its state that decides the future where targets and prices are known.
    pub(crate) fn fingerprint(&self, now: Time) -> (Option<(Duration, u32)>, Duration) {
        let first = self.first.map(|(at, count)| (now.since(at), count));
        (first, now.since(self.last_run_at))
    }
}

/// A stream may end at any token, so lost time is made up over this many tokens at most.
const HORIZON: u32 = 64;

impl WorkerSequence {
    /// The mean gap of its next tokens that keeps its target: shorter than promised where it is
    /// behind, and zero where the target cannot be met. `None` without a target.
    pub(crate) fn gap_left(&self, now: Time) -> Option<Duration> {
        let tpot = self.request.slo.tpot?;
        let Some((first, count)) = self.client_timing.first else {
            return Some(tpot);
        };
        let left = self.tokens_left().clamp(1, HORIZON);
        let gaps = (self.output_count() + left).saturating_sub(count);
        let by = first + tpot.saturating_mul(gaps);
        Some((by.since(now) / left).min(tpot))
    }

    /// Tokens that it may still draw.
    pub(crate) fn tokens_left(&self) -> u32 {
        let most = self.request.stop.max_tokens;
        most.saturating_sub(self.output_count())
    }

    /// Deadline of its next token; `None` without a target.
    pub(crate) fn token_due(&self) -> Option<Time> {
        let tpot = self.request.slo.tpot?;
        let (first, count) = self.client_timing.first?;
        let gaps = (self.output_count() + 1).saturating_sub(count);
        Some(first + tpot.saturating_mul(gaps))
    }
}
