//! What was seen of one request.
//!
//! Owns: its times and counts, and what is computed from them. Never: judges (see `slo`).
//! Invariant: times are the client's, since the run's start; latencies count from the time the
//! request was due, so that a generator that is late makes no server look good.

use crate::stages::Stages;
use cleave_domain::Time;
use serde::Serialize;
use std::time::Duration;

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Length {
    pub(crate) input: u32,
    pub(crate) output: u32,
}

/// How an attempt to get an answer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    /// No connection.
    Connect,
    /// The connection broke.
    Broken,
    /// A status other than 200 and 429.
    Status,
    /// The stream ended with an error event.
    Error,
    /// The stream ended without its end.
    Cut,
    /// Not what a stream of completions is made of.
    Garbled,
    /// Longer than the time limit.
    Timeout,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The whole answer came.
    Done,
    /// 429.
    Refused {
        status: u16,
        /// Seconds, as the header said.
        retry_after: Option<u32>,
    },
    /// No answer, or a part of one.
    Failed { kind: Failure, text: String },
    /// Still under way, or not even sent, when the measurement ended.
    Unfinished,
}

/// What was seen of one request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    /// In the schedule.
    pub(crate) index: u32,
    pub(crate) class: usize,
    /// As planned.
    pub(crate) asked: Length,
    pub(crate) due: Time,
    pub(crate) sent: Option<Time>,
    /// First chunk with output.
    pub(crate) first: Option<Time>,
    /// Last chunk with output.
    pub(crate) last: Option<Time>,
    /// End of the answer, whatever it was.
    pub(crate) over: Option<Time>,
    /// Between chunks with output, in milliseconds.
    pub(crate) gaps: Vec<f32>,
    /// Chunks with output.
    pub(crate) chunks: u32,
    /// As the server counted.
    pub(crate) usage: Option<Length>,
    /// Prompt tokens that the server had already, as it says.
    pub(crate) cached: Option<u32>,
    /// How often it was sent once more, since a kept connection was closed instead of an answer.
    pub(crate) asked_again: u32,
    pub(crate) outcome: Outcome,
    pub(crate) stages: Option<Stages>,
}

impl Record {
    pub(crate) fn new(index: u32, class: usize, due: Time) -> Self {
        Self {
            index,
            class,
            asked: Length::default(),
            due,
            sent: None,
            first: None,
            last: None,
            over: None,
            gaps: Vec::new(),
            chunks: 0,
            usage: None,
            cached: None,
            asked_again: 0,
            outcome: Outcome::Unfinished,
            stages: None,
        }
    }

    /// A chunk with output came.
    pub(crate) fn chunk(&mut self, now: Time) {
        match self.last {
            None => self.first = Some(now),
            Some(last) => self.gaps.push(now.since(last).as_secs_f32() * 1e3),
        }
        self.last = Some(now);
        self.chunks += 1;
    }

    /// How late the generator was.
    pub(crate) fn lateness(&self) -> Option<Duration> {
        self.sent.map(|sent| sent.since(self.due))
    }

    /// From when it was due to the first token.
    pub(crate) fn ttft(&self) -> Option<Duration> {
        self.first.map(|first| first.since(self.due))
    }

    /// (last − first) / (tokens − 1); `None` for a single token.
    pub(crate) fn tpot(&self) -> Option<Duration> {
        let span = self.last?.since(self.first?);
        let gaps = self.output_tokens().checked_sub(1)?;
        span.checked_div(gaps)
    }

    /// From when it was due to the end of its answer.
    pub(crate) fn e2e(&self) -> Option<Duration> {
        self.over.map(|over| over.since(self.due))
    }

    /// By the server's count, else by chunks.
    pub(crate) fn output_tokens(&self) -> u32 {
        self.usage.map_or(self.chunks, |usage| usage.output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_servers_where_a_chunk_has_several() {
        let mut record = Record::new(0, 0, Time::ZERO);
        for millis in [100_u64, 140, 200] {
            record.chunk(Time::from_nanos(millis * 1_000_000));
        }
        assert_eq!(record.gaps, [40.0, 60.0]);
        assert_eq!(record.tpot(), Some(Duration::from_millis(50)));
        record.usage = Some(Length {
            input: 1,
            output: 11,
        });
        assert_eq!(record.tpot(), Some(Duration::from_millis(10)));
        record.usage = Some(Length {
            input: 1,
            output: 1,
        });
        assert_eq!(record.tpot(), None);
    }
}
