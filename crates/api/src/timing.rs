//! Durations of a request's stages, for clients that ask for them.
//!
//! Owns: the stages known at each point of an answer, and their formats. Never: measures more than
//! the time to the first token. Invariant: an unknown stage is left out, never zero.

use axum::http::{HeaderName, HeaderValue};
use cleave_domain::{PrefillTiming, RequestStage, RequestStageTimes};
use serde_json::{Map, Value};
use std::fmt::Write;
use std::time::Duration;

/// Header of the request and of the answer; the answer has the format of `Server-Timing`.
pub(crate) const TIMING_HEADER: HeaderName = HeaderName::from_static("x-cleave-timing");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimingShown {
    Never,
    Asked,
}

/// Known durations of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SequenceTiming {
    first: Option<(Duration, PrefillTiming)>,
    ended: Option<(RequestStageTimes, u32)>,
    /// Time since submission, and tokens, of a sequence that ended at a stop string, which only the
    /// HTTP side sees.
    stopped: Option<(Duration, u32)>,
}

/// Stages up to the first token.
const FIRST_TOKEN_STAGES: [RequestStage; 3] = [
    RequestStage::RouterQueue,
    RequestStage::PrefillWait,
    RequestStage::Prefill,
];

impl SequenceTiming {
    /// Sets the time from submission to the first token.
    pub(crate) fn set_first_token(&mut self, ttft: Duration, prompt: PrefillTiming) {
        self.first = Some((ttft, prompt));
    }

    /// Sets the stages at the end of the sequence.
    pub(crate) fn set_ended(&mut self, timing: RequestStageTimes, output_tokens: u32) {
        self.ended = Some((timing, output_tokens));
    }

    /// Sets the end at a stop string; the stages after the first token remain unknown.
    pub(crate) fn set_stopped(&mut self, e2e: Duration, output_tokens: u32) {
        self.stopped = Some((e2e, output_tokens));
    }

    /// Returns the longest of an answer's sequences, as far as their durations are known.
    pub(crate) fn slowest(all: &[Self]) -> Self {
        let longest = |one: &&Self| one.total();
        all.iter().max_by_key(longest).copied().unwrap_or_default()
    }

    fn total(&self) -> Duration {
        match (self.ended, self.stopped, self.first) {
            (Some((timing, _)), _, _) => timing.total(),
            (None, Some((e2e, _)), _) => e2e,
            (None, None, Some((ttft, _))) => ttft,
            (None, None, None) => Duration::ZERO,
        }
    }

    fn timing(&self) -> Option<(RequestStageTimes, &'static [RequestStage])> {
        if let Some((timing, _)) = self.ended {
            return Some((timing, &RequestStage::ALL));
        }
        let (ttft, PrefillTiming { wait, run }) = self.first?;
        let timing = RequestStageTimes {
            // Worker and router measure separately, so the rest of the time is the router's queue.
            router_queue: ttft.saturating_sub(wait + run),
            prefill_wait: wait,
            prefill: run,
            ..RequestStageTimes::default()
        };
        Some((timing, &FIRST_TOKEN_STAGES))
    }

    /// Formats `router_queue;dur=1.2, prefill_wait;dur=0.3, …`, in milliseconds; `None` if nothing
    /// is known.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let (timing, stages) = self.timing()?;
        let mut text = String::new();
        for stage in stages {
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(text, "{comma}{stage};dur={}", millis(timing.stage(*stage)));
        }
        HeaderValue::try_from(text).ok()
    }

    /// Formats `{"router_queue_ms": 1.2, …, "ttft_ms": 9.1, "tpot_ms": 4.2, "e2e_ms": 60.0}`.
    pub(crate) fn object(&self) -> Value {
        let mut object = Map::new();
        let Some((timing, stages)) = self.timing() else {
            return Value::Object(object);
        };
        let mut put = |name: String, span| object.insert(name, millis(span).into());
        for stage in stages {
            put(format!("{stage}_ms"), timing.stage(*stage));
        }
        put("ttft_ms".to_owned(), timing.ttft());
        if let Some((timing, output_tokens)) = self.ended {
            if let Some(tpot) = timing.tpot(output_tokens) {
                put("tpot_ms".to_owned(), tpot);
            }
            put("e2e_ms".to_owned(), timing.total());
        } else if let Some((e2e, output_tokens)) = self.stopped {
            let gaps = output_tokens.saturating_sub(1);
            if let Some(tpot) = e2e.saturating_sub(timing.ttft()).checked_div(gaps) {
                put("tpot_ms".to_owned(), tpot);
            }
            put("e2e_ms".to_owned(), e2e);
        }
        Value::Object(object)
    }
}

/// Milliseconds, rounded to microseconds.
pub(crate) fn millis(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_stages_are_left_out() {
        let ms = Duration::from_millis;
        let mut sequence = SequenceTiming::default();
        assert_eq!(
            (sequence.header(), sequence.object()),
            (None, serde_json::json!({}))
        );
        let (wait, run) = (ms(2), Duration::from_micros(3_500));
        sequence.set_first_token(ms(10), PrefillTiming { wait, run });
        let header = sequence.header().unwrap();
        assert_eq!(
            header,
            "router_queue;dur=4.5, prefill_wait;dur=2, prefill;dur=3.5"
        );
        assert_eq!(sequence.object()["ttft_ms"], 10.0);
        assert_eq!(sequence.object().get("transfer_ms"), None);
        let mut stopped = sequence;
        stopped.set_stopped(ms(30), 5);
        let object = stopped.object();
        assert_eq!(object["e2e_ms"], 30.0, "by a stop string");
        assert_eq!(object["tpot_ms"], 5.0);
        assert_eq!(object.get("transfer_ms"), None);
        let timing = RequestStageTimes {
            router_queue: ms(4),
            retry: ms(0),
            prefill_wait: ms(2),
            prefill: ms(4),
            transfer: ms(1),
            decode_wait: ms(3),
            first_decode: ms(5),
            decode: ms(11),
        };
        sequence.set_ended(timing, 3);
        let header = sequence.header().unwrap();
        let header = header.to_str().unwrap();
        assert!(
            header
                .ends_with("transfer;dur=1, decode_wait;dur=3, first_decode;dur=5, decode;dur=11")
        );
        let object = sequence.object();
        assert_eq!(object["ttft_ms"], 10.0);
        assert_eq!(object["tpot_ms"], 10.0);
        assert_eq!(object["e2e_ms"], 30.0);
        assert_eq!(object["first_decode_ms"], 5.0);
    }
}
