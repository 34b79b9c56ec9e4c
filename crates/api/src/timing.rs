//! Where a request's time went, as its client may ask.
//!
//! Owns: what is known of it at each point of an answer, and how it is written. Never: measures more
//! than the time to the first token. Invariant: a stage that is not known is left out, never zero.

use axum::http::{HeaderName, HeaderValue};
use cleave_domain::{PrefillTiming, Stage, Timing};
use serde_json::{Map, Value};
use std::fmt::Write;
use std::time::Duration;

/// The header of the question and of the answer; the answer is written as `Server-Timing` is.
pub(crate) const TIMING: HeaderName = HeaderName::from_static("x-cleave-timing");

/// Whether the client asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimingShown {
    Never,
    Asked,
}

/// What is known of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Known {
    first: Option<(Duration, PrefillTiming)>,
    whole: Option<(Timing, u32)>,
    /// A stop string ended it, which only the face sees: since the submission, and its tokens.
    stopped: Option<(Duration, u32)>,
}

/// The stages up to the first token.
const FIRST: [Stage; 3] = [Stage::RouterQueue, Stage::PrefillWait, Stage::Prefill];

impl Known {
    /// The first token came so long after the submission.
    pub(crate) fn first(&mut self, ttft: Duration, prompt: PrefillTiming) {
        self.first = Some((ttft, prompt));
    }

    /// It is over.
    pub(crate) fn ended(&mut self, timing: Timing, output_tokens: u32) {
        self.whole = Some((timing, output_tokens));
    }

    /// It is over so long after the submission, with so many tokens, and nobody will say its stages.
    pub(crate) fn stopped(&mut self, e2e: Duration, output_tokens: u32) {
        self.stopped = Some((e2e, output_tokens));
    }

    /// The longest of an answer's sequences, by how long it took as far as is known.
    pub(crate) fn slowest(all: &[Self]) -> Self {
        let longest = |one: &&Self| one.total();
        all.iter().max_by_key(longest).copied().unwrap_or_default()
    }

    fn total(&self) -> Duration {
        match (self.whole, self.stopped, self.first) {
            (Some((timing, _)), _, _) => timing.total(),
            (None, Some((e2e, _)), _) => e2e,
            (None, None, Some((ttft, _))) => ttft,
            (None, None, None) => Duration::ZERO,
        }
    }

    fn timing(&self) -> Option<(Timing, &'static [Stage])> {
        if let Some((timing, _)) = self.whole {
            return Some((timing, &Stage::ALL));
        }
        let (ttft, PrefillTiming { wait, run }) = self.first?;
        let timing = Timing {
            // Worker and router measure apart.
            router_queue: ttft.saturating_sub(wait + run),
            prefill_wait: wait,
            prefill: run,
            ..Timing::default()
        };
        Some((timing, &FIRST))
    }

    /// `router_queue;dur=1.2, prefill_wait;dur=0.3, …`, in milliseconds; none if nothing is known.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let (timing, stages) = self.timing()?;
        let mut text = String::new();
        for stage in stages {
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(text, "{comma}{stage};dur={}", millis(timing.of(*stage)));
        }
        HeaderValue::try_from(text).ok()
    }

    /// `{"router_queue_ms": 1.2, …, "ttft_ms": 9.1, "tpot_ms": 4.2, "e2e_ms": 60.0}`.
    pub(crate) fn object(&self) -> Value {
        let mut object = Map::new();
        let Some((timing, stages)) = self.timing() else {
            return Value::Object(object);
        };
        let mut put = |name: String, span| object.insert(name, millis(span).into());
        for stage in stages {
            put(format!("{stage}_ms"), timing.of(*stage));
        }
        put("ttft_ms".to_owned(), timing.ttft());
        if let Some((timing, output_tokens)) = self.whole {
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

/// To the microsecond.
fn millis(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_yet_was_zero() {
        let ms = Duration::from_millis;
        let mut known = Known::default();
        assert_eq!(
            (known.header(), known.object()),
            (None, serde_json::json!({}))
        );
        let (wait, run) = (ms(2), Duration::from_micros(3_500));
        known.first(ms(10), PrefillTiming { wait, run });
        let header = known.header().unwrap();
        assert_eq!(
            header,
            "router_queue;dur=4.5, prefill_wait;dur=2, prefill;dur=3.5"
        );
        assert_eq!(known.object()["ttft_ms"], 10.0);
        assert_eq!(known.object().get("transfer_ms"), None);
        let mut stopped = known;
        stopped.stopped(ms(30), 5);
        let object = stopped.object();
        assert_eq!(object["e2e_ms"], 30.0, "by a stop string");
        assert_eq!(object["tpot_ms"], 5.0);
        assert_eq!(object.get("transfer_ms"), None);
        let timing = Timing {
            router_queue: ms(4),
            retry: ms(0),
            prefill_wait: ms(2),
            prefill: ms(4),
            transfer: ms(1),
            decode_wait: ms(3),
            first_decode: ms(5),
            decode: ms(11),
        };
        known.ended(timing, 3);
        let header = known.header().unwrap();
        let header = header.to_str().unwrap();
        assert!(
            header
                .ends_with("transfer;dur=1, decode_wait;dur=3, first_decode;dur=5, decode;dur=11")
        );
        let object = known.object();
        assert_eq!(object["ttft_ms"], 10.0);
        assert_eq!(object["tpot_ms"], 10.0);
        assert_eq!(object["e2e_ms"], 30.0);
        assert_eq!(object["first_decode_ms"], 5.0);
    }
}
