//! The time that a request spent in each stage, and whether it met its targets.
//!
//! Owns: the stages and the verdict. Never: measures; workers and routers do.
//! Invariant: the stages up to the first token add up to the time to first token.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// A stage of a request, in order of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RequestStage {
    /// From arrival until the first token, without the time on the prefill worker: the queue, the
    /// reservation, and the transfer of all messages before the first token.
    RouterQueue,
    /// The time of attempts that failed or were abandoned before the first token.
    Retry,
    /// The wait on the prefill worker until the first chunk.
    PrefillWait,
    /// From the first chunk to the first token.
    Prefill,
    /// From the first token until the decode worker had every block; zero without a transfer.
    Transfer,
    /// The wait on the decode worker until its first step.
    DecodeWait,
    /// The first decode step.
    FirstDecode,
    /// All tokens after the first decode step.
    Decode,
}

impl RequestStage {
    /// All stages, in order of time.
    pub const ALL: [Self; 8] = [
        Self::RouterQueue,
        Self::Retry,
        Self::PrefillWait,
        Self::Prefill,
        Self::Transfer,
        Self::DecodeWait,
        Self::FirstDecode,
        Self::Decode,
    ];

    /// The name in metrics, headers and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::RouterQueue => "router_queue",
            Self::Retry => "retry",
            Self::PrefillWait => "prefill_wait",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::DecodeWait => "decode_wait",
            Self::FirstDecode => "first_decode",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for RequestStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The time of each stage; zero for a stage that was not reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestStageTimes {
    /// The time in [`RequestStage::RouterQueue`].
    pub router_queue: Duration,
    /// The time in [`RequestStage::Retry`].
    pub retry: Duration,
    /// The time in [`RequestStage::PrefillWait`].
    pub prefill_wait: Duration,
    /// The time in [`RequestStage::Prefill`].
    pub prefill: Duration,
    /// The time in [`RequestStage::Transfer`].
    pub transfer: Duration,
    /// The time in [`RequestStage::DecodeWait`].
    pub decode_wait: Duration,
    /// The time in [`RequestStage::FirstDecode`].
    pub first_decode: Duration,
    /// The time in [`RequestStage::Decode`].
    pub decode: Duration,
}

impl RequestStageTimes {
    /// The time of one stage.
    pub fn stage(&self, stage: RequestStage) -> Duration {
        match stage {
            RequestStage::RouterQueue => self.router_queue,
            RequestStage::Retry => self.retry,
            RequestStage::PrefillWait => self.prefill_wait,
            RequestStage::Prefill => self.prefill,
            RequestStage::Transfer => self.transfer,
            RequestStage::DecodeWait => self.decode_wait,
            RequestStage::FirstDecode => self.first_decode,
            RequestStage::Decode => self.decode,
        }
    }

    /// From arrival to the first token.
    pub fn ttft(&self) -> Duration {
        self.router_queue + self.retry + self.prefill_wait + self.prefill
    }

    /// From arrival to the last token.
    pub fn total(&self) -> Duration {
        self.ttft() + self.transfer + self.decode_wait + self.first_decode + self.decode
    }

    /// The mean gap between `output_tokens` tokens after the first; `None` if there is only one.
    pub fn tpot(&self, output_tokens: u32) -> Option<Duration> {
        let gaps = output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.total() - self.ttft()) / gaps)
    }
}

/// The times of a prompt on its prefill worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrefillTiming {
    /// From the order to the first chunk.
    pub wait: Duration,
    /// From the first chunk to the token that ends it.
    pub run: Duration,
}

/// The times of the start on a decode worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DecodeTiming {
    /// From the landing (or the first token, without a transfer) to the first step.
    pub wait: Duration,
    /// The duration of the first step.
    pub first: Duration,
}

/// The metric of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum SloMetric {
    /// From arrival to the first token.
    Ttft,
    /// Mean gap between output tokens after the first.
    Tpot,
    /// From arrival to the last token.
    EndToEnd,
}

impl SloMetric {
    /// The name in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::EndToEnd => "e2e",
        }
    }
}

/// The SLO outcome of a request. Only `Good` counts as goodput; a request cancelled before any
/// target had passed does not count, and one cancelled later is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SloVerdict {
    /// Every target was met, or there was none.
    Good,
    /// Done, but a target was missed.
    Late {
        /// The first missed target, in order of time.
        aim: SloMetric,
        /// The stage that exceeded its prediction at admission the most; without a prediction, the
        /// longest stage that the target covers.
        stage: RequestStage,
    },
    /// The request was refused.
    Refused,
    /// The request failed; tokens may have been emitted.
    Failed,
    /// The client left while every target could still be met.
    Cancelled,
}
