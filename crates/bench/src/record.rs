//! Measurements of one request.
//!
//! Owns: its times and counts, and the values computed from them. Never: judges (see `slo`).
//! Invariant: times are the client's, since the run's start; latencies count from the time the
//! request was due, so that a late generator makes no server look good.

use crate::stages::StageTimes;
use cleave_domain::Time;
use serde::Serialize;
use std::time::Duration;

/// Prompt and output tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct RequestTokens {
    pub(crate) input: u32,
    pub(crate) output: u32,
}

/// How a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RequestFailure {
    /// The connection could not be made.
    Connect,
    Broken,
    /// A status other than 200 and 429.
    Status,
    /// The stream contained an error event.
    Error,
    /// The stream ended before its last event.
    Cut,
    /// The stream contained something else than completion events.
    Garbled,
    /// The answer took longer than the time limit.
    Timeout,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RequestOutcome {
    /// The whole answer came.
    Done,
    /// The server answered 429.
    Refused {
        status: u16,
        /// Seconds from the `Retry-After` header.
        retry_after: Option<u32>,
    },
    /// The answer is missing or incomplete.
    Failed { kind: RequestFailure, text: String },
    /// Still in flight, or not even sent, when the measurement ended.
    Unfinished,
}

/// The measurements of one request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestMeasurement {
    /// Index in the schedule.
    pub(crate) index: u32,
    pub(crate) class: usize,
    /// The lengths that were requested.
    pub(crate) requested: RequestTokens,
    pub(crate) due: Time,
    pub(crate) sent: Option<Time>,
    /// Time of the first chunk with output.
    pub(crate) first: Option<Time>,
    /// Time of the last chunk with output.
    pub(crate) last: Option<Time>,
    /// End of the answer, complete or not.
    pub(crate) ended: Option<Time>,
    /// Milliseconds between chunks with output.
    pub(crate) gaps: Vec<f32>,
    pub(crate) chunks: u32,
    /// Token counts of the server.
    pub(crate) usage: Option<RequestTokens>,
    /// Prompt tokens that the server had in its cache, as it reports.
    pub(crate) cached: Option<u32>,
    /// How often the request was resent, since a kept connection was closed instead of answering.
    pub(crate) resent_count: u32,
    pub(crate) outcome: RequestOutcome,
    pub(crate) stages: Option<StageTimes>,
}

impl RequestMeasurement {
    pub(crate) fn new(index: u32, class: usize, due: Time) -> Self {
        Self {
            index,
            class,
            requested: RequestTokens::default(),
            due,
            sent: None,
            first: None,
            last: None,
            ended: None,
            gaps: Vec::new(),
            chunks: 0,
            usage: None,
            cached: None,
            resent_count: 0,
            outcome: RequestOutcome::Unfinished,
            stages: None,
        }
    }

    /// Records a chunk with output.
    pub(crate) fn receive_chunk(&mut self, now: Time) {
        match self.last {
            None => self.first = Some(now),
            Some(last) => self.gaps.push(now.since(last).as_secs_f32() * 1e3),
        }
        self.last = Some(now);
        self.chunks += 1;
    }

    /// How late the request was sent.
    pub(crate) fn lateness(&self) -> Option<Duration> {
        self.sent.map(|sent| sent.since(self.due))
    }

    /// Time from when it was due to the first token.
    pub(crate) fn ttft(&self) -> Option<Duration> {
        self.first.map(|first| first.since(self.due))
    }

    /// (last − first) / (tokens − 1); `None` for a single token.
    pub(crate) fn tpot(&self) -> Option<Duration> {
        let span = self.last?.since(self.first?);
        let gaps = self.output_tokens().checked_sub(1)?;
        span.checked_div(gaps)
    }

    /// Time from when it was due to the end of its answer.
    pub(crate) fn e2e(&self) -> Option<Duration> {
        self.ended.map(|over| over.since(self.due))
    }

    /// The server's count, or else the number of chunks.
    pub(crate) fn output_tokens(&self) -> u32 {
        self.usage.map_or(self.chunks, |usage| usage.output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tpot_uses_the_servers_token_count() {
        let mut record = RequestMeasurement::new(0, 0, Time::ZERO);
        for millis in [100_u64, 140, 200] {
            record.receive_chunk(Time::from_nanos(millis * 1_000_000));
        }
        assert_eq!(record.gaps, [40.0, 60.0]);
        assert_eq!(record.tpot(), Some(Duration::from_millis(50)));
        record.usage = Some(RequestTokens {
            input: 1,
            output: 11,
        });
        assert_eq!(record.tpot(), Some(Duration::from_millis(10)));
        record.usage = Some(RequestTokens {
            input: 1,
            output: 1,
        });
        assert_eq!(record.tpot(), None);
    }
}
