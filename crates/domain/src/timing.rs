//! Where a request's time went, and whether it kept its promise.
//!
//! Owns: the stages and the verdict. Never: measures; workers and routers do.
//! Invariant: the stages up to the first token add up to the time to first token.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// A part of a request's way, in the order of the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Stage {
    /// From arrival until the prefill worker had it, less what it spent there: the line, the
    /// reservation, and the way of every message before the first token.
    RouterQueue,
    /// Spent on attempts that failed or were passed over before the first token.
    Retry,
    /// On the prefill worker, until its first chunk.
    PrefillWait,
    /// From the first chunk to the first token.
    Prefill,
    /// From the first token until the decode worker had every block; zero where nothing moved.
    Transfer,
    /// On the decode worker, until its first step there.
    DecodeWait,
    /// Its first step there.
    FirstDecode,
    /// Every further token.
    Decode,
}

impl Stage {
    /// All, in the order of the way.
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

    /// Its name in metrics, headers and answers.
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

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How long each stage took; zero for one that was not reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Timing {
    /// See [`Stage::RouterQueue`].
    pub router_queue: Duration,
    /// See [`Stage::Retry`].
    pub retry: Duration,
    /// See [`Stage::PrefillWait`].
    pub prefill_wait: Duration,
    /// See [`Stage::Prefill`].
    pub prefill: Duration,
    /// See [`Stage::Transfer`].
    pub transfer: Duration,
    /// See [`Stage::DecodeWait`].
    pub decode_wait: Duration,
    /// See [`Stage::FirstDecode`].
    pub first_decode: Duration,
    /// See [`Stage::Decode`].
    pub decode: Duration,
}

impl Timing {
    /// How long one stage took.
    pub fn of(&self, stage: Stage) -> Duration {
        match stage {
            Stage::RouterQueue => self.router_queue,
            Stage::Retry => self.retry,
            Stage::PrefillWait => self.prefill_wait,
            Stage::Prefill => self.prefill,
            Stage::Transfer => self.transfer,
            Stage::DecodeWait => self.decode_wait,
            Stage::FirstDecode => self.first_decode,
            Stage::Decode => self.decode,
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

    /// Mean gap between `output_tokens` tokens after the first; none if there is only one.
    pub fn tpot(&self, output_tokens: u32) -> Option<Duration> {
        let gaps = output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.total() - self.ttft()) / gaps)
    }
}

/// What a prompt's way through its prefill worker took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrefillTiming {
    /// From the order to the first chunk.
    pub wait: Duration,
    /// From the first chunk to the token that ends it.
    pub run: Duration,
}

/// What the start on a decode worker took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DecodeTiming {
    /// From the landing (or the first token, where nothing moved) to the first step.
    pub wait: Duration,
    /// The first step.
    pub first: Duration,
}

/// What an SLO is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Aim {
    /// From arrival to the first token.
    Ttft,
    /// Mean gap between output tokens after the first.
    Tpot,
    /// From arrival to the last token.
    EndToEnd,
}

impl Aim {
    /// Its name in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::EndToEnd => "e2e",
        }
    }
}

/// Whether a request counts for goodput. Only `Good` does; what was cancelled before any target had
/// passed counts neither way, and after that it is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Verdict {
    /// Every target was met, or there was none.
    Good,
    /// Done, and too late.
    Late {
        /// The first target missed, in the order of time.
        aim: Aim,
        /// The stage that took the most beyond what was predicted when it was admitted; without a
        /// prediction, the longest of those that the target is about.
        stage: Stage,
    },
    /// Not taken on.
    Refused,
    /// Broken off.
    Failed,
    /// The client left while every target could still be met.
    Cancelled,
}
