//! How a sequence stands to what its client was promised.
//!
//! Owns: when its next token is due, and since when nothing of it ran. Never: decides who runs.
//! Invariant: a token is due so many mean gaps after the first one as there are tokens between them.

use crate::sequence::Sequence;
use cleave_domain::{DecodeTiming, Time};
use std::time::Duration;

/// What a prompt without a target may wait: then it goes before those whose targets are later, so
/// that nobody waits for ever.
const PATIENCE: Duration = Duration::from_secs(30);

/// When things happened to a sequence that its client feels.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// When a token was last known to be there, and how many output tokens there were then.
    first: Option<(Time, u32)>,
    /// Since when it could generate here.
    ready: Option<Time>,
    /// Its first step that did.
    stepped: Option<Time>,
    /// How long that took.
    took: Option<Duration>,
    /// When it last ran, or came.
    pub(crate) served: Time,
}

/// When a prompt's first token is due.
pub(crate) fn prompt_due(since: Time, ttft: Option<Duration>) -> Time {
    since + ttft.unwrap_or(PATIENCE)
}

impl Pace {
    /// Of a sequence that comes now.
    pub(crate) fn new(now: Time) -> Self {
        Self {
            served: now,
            ..Self::default()
        }
    }

    /// The sequence has its first token, or came with it; its KV is here.
    pub(crate) fn begin(&mut self, first: Time, now: Time, output_count: u32) {
        self.first.get_or_insert((first, output_count));
        self.ready.get_or_insert(now);
        self.served = now;
    }

    /// It is in a step that generates.
    pub(crate) fn step(&mut self, now: Time) {
        self.served = now;
        if self.ready.is_some() {
            self.stepped.get_or_insert(now);
        }
    }

    /// That step is over.
    pub(crate) fn stepped(&mut self, now: Time) {
        if let Some(began) = self.stepped {
            self.took.get_or_insert(now.since(began));
        }
    }

    /// What its start here took.
    pub(crate) fn timing(&self) -> DecodeTiming {
        let wait = |ready| self.stepped.map(|began| began.since(ready));
        DecodeTiming {
            wait: self.ready.and_then(wait).unwrap_or_default(),
            first: self.took.unwrap_or_default(),
        }
    }

    /// What of it decides the future where targets and prices do.
    pub(crate) fn fingerprint(&self, now: Time) -> (Option<(Duration, u32)>, Duration) {
        let first = self.first.map(|(at, count)| (now.since(at), count));
        (first, now.since(self.served))
    }
}

/// A stream may end at any token; what it can still make up for is counted over so many at most.
const HORIZON: u32 = 64;

impl Sequence {
    /// The mean gap of its next tokens with which it keeps its promise: less than what was promised
    /// where it is behind, and zero where nothing helps. `None` without a promise.
    pub(crate) fn gap_left(&self, now: Time) -> Option<Duration> {
        let tpot = self.request.slo.tpot?;
        let Some((first, count)) = self.pace.first else {
            return Some(tpot);
        };
        let left = self.tokens_left().clamp(1, HORIZON);
        let gaps = (self.output_count() + left).saturating_sub(count);
        let by = first + tpot.saturating_mul(gaps);
        Some((by.since(now) / left).min(tpot))
    }

    /// Tokens that it may yet draw.
    pub(crate) fn tokens_left(&self) -> u32 {
        let most = self.request.stop.max_tokens;
        most.saturating_sub(self.output_count())
    }

    /// When its next token is due; `None` without a target.
    pub(crate) fn token_due(&self) -> Option<Time> {
        let tpot = self.request.slo.tpot?;
        let (first, count) = self.pace.first?;
        let gaps = (self.output_count() + 1).saturating_sub(count);
        Some(first + tpot.saturating_mul(gaps))
    }
}
