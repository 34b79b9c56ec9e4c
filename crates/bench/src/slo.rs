//! SLO targets of answers.
//!
//! Owns: targets and the verdict on one request. Never: measures. Invariant: refused, failed, cut
//! off and late requests are misses (lesson 25).

use crate::number::{parse_duration, split_key_value};
use crate::record::{RequestMeasurement, RequestOutcome};
use anyhow::{Context, bail, ensure};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Latency limits of one request; no limit where `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SloTargets {
    /// From the time the request was due to its first token.
    pub ttft: Option<Duration>,
    /// Mean time per output token after the first.
    pub tpot: Option<Duration>,
    /// From the time the request was due to the end of its answer.
    pub e2e: Option<Duration>,
}

/// Targets of all classes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SloSet {
    /// Targets of classes without their own.
    default_targets: SloTargets,
    by_class: BTreeMap<String, SloTargets>,
}

impl SloSet {
    /// Parses texts such as `ttft=500ms,tpot=50ms` (all classes) and `chat:ttft=200ms` (one class;
    /// its own targets replace the others).
    ///
    /// # Errors
    /// A text that is no target, or a class that is not in `classes`.
    pub fn parse(texts: &[String], classes: &[String]) -> anyhow::Result<Self> {
        let mut slo = Self::default();
        for text in texts {
            let context = || format!("SLO `{text}`");
            match text.split_once(':') {
                None => slo.default_targets = parse_targets(text).with_context(context)?,
                Some((class, text)) => {
                    let class = class.trim();
                    ensure!(
                        classes.iter().any(|other| other == class),
                        "SLO of class `{class}`: the workload has {}",
                        classes.join(", ")
                    );
                    let targets = parse_targets(text).with_context(context)?;
                    slo.by_class.insert(class.to_owned(), targets);
                }
            }
        }
        Ok(slo)
    }

    /// The targets of `class`.
    pub fn of(&self, class: &str) -> SloTargets {
        self.by_class
            .get(class)
            .copied()
            .unwrap_or(self.default_targets)
    }

    /// Whether no class has any target.
    pub fn is_empty(&self) -> bool {
        let none = |targets: &SloTargets| *targets == SloTargets::default();
        none(&self.default_targets) && self.by_class.values().all(none)
    }
}

fn parse_targets(text: &str) -> anyhow::Result<SloTargets> {
    let mut targets = SloTargets::default();
    for item in text.split(',') {
        let (name, limit) = split_key_value(item)?;
        let target = match name {
            "ttft" => &mut targets.ttft,
            "tpot" => &mut targets.tpot,
            "e2e" => &mut targets.e2e,
            other => bail!("unknown target `{other}`; there are ttft, tpot and e2e"),
        };
        ensure!(target.is_none(), "`{name}` is given twice");
        *target = Some(parse_duration(limit)?);
    }
    Ok(targets)
}

/// Why a request is a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MissReason {
    /// The server refused it with 429.
    Refused,
    /// The answer is an error, or broke off.
    Failed,
    /// The request was open when the measurement ended.
    Unfinished,
    /// The first token came too late.
    Ttft,
    /// Tokens came too slowly.
    Tpot,
    /// The end came too late.
    E2e,
}

impl SloTargets {
    /// Judges an ended request; the error is the first missed target.
    pub(crate) fn judge(&self, record: &RequestMeasurement) -> Result<(), MissReason> {
        match &record.outcome {
            RequestOutcome::Refused { .. } => return Err(MissReason::Refused),
            RequestOutcome::Failed { .. } => return Err(MissReason::Failed),
            RequestOutcome::Unfinished => return Err(MissReason::Unfinished),
            RequestOutcome::Done => {}
        }
        // An event that never occurred is late; an answer of one token has no time per token.
        let late = |took: Option<Duration>, limit: Option<Duration>| {
            limit.is_some_and(|limit| took.is_none_or(|took| took > limit))
        };
        if late(record.ttft(), self.ttft) {
            return Err(MissReason::Ttft);
        }
        let slow = |limit| record.tpot().is_some_and(|took| took > limit);
        if self.tpot.is_some_and(slow) {
            return Err(MissReason::Tpot);
        }
        if late(record.e2e(), self.e2e) {
            Err(MissReason::E2e)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{RequestFailure, RequestTokens};
    use cleave_domain::Time;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn at(millis: u64) -> Option<Time> {
        Some(Time::from_nanos(millis * 1_000_000))
    }

    /// Due at 100 ms, sent at 110; 11 tokens from 400 on, 20 ms each; over at 605.
    fn answer() -> RequestMeasurement {
        let mut record = RequestMeasurement::new(0, 0, at(100).unwrap());
        record.requested = RequestTokens {
            input: 7,
            output: 11,
        };
        record.sent = at(110);
        record.first = at(400);
        record.last = at(600);
        record.ended = at(605);
        record.chunks = 11;
        record.outcome = RequestOutcome::Done;
        record
    }

    #[test]
    fn latencies_count_from_the_due_time() {
        let judged = |text: &str| {
            let slo = SloSet::parse(&texts(&[text]), &[]).unwrap();
            slo.of("default").judge(&answer())
        };
        assert_eq!(judged("ttft=300ms,tpot=20ms,e2e=505ms"), Ok(()));
        assert_eq!(judged("ttft=299ms"), Err(MissReason::Ttft));
        assert_eq!(judged("tpot=19.9ms"), Err(MissReason::Tpot));
        assert_eq!(judged("e2e=504ms"), Err(MissReason::E2e));
        assert_eq!(judged("ttft=1ms,tpot=1ms"), Err(MissReason::Ttft));
    }

    // Lesson: 25.
    #[test]
    fn refused_failed_and_unfinished_requests_are_misses() {
        let generous = SloTargets::default();
        let mut record = answer();
        record.outcome = RequestOutcome::Refused {
            status: 429,
            retry_after: None,
        };
        assert_eq!(generous.judge(&record), Err(MissReason::Refused));
        record.outcome = RequestOutcome::Failed {
            kind: RequestFailure::Cut,
            text: String::new(),
        };
        assert_eq!(generous.judge(&record), Err(MissReason::Failed));
        record.outcome = RequestOutcome::Unfinished;
        assert_eq!(generous.judge(&record), Err(MissReason::Unfinished));
        // A finished answer without a token is late.
        let mut silent = answer();
        silent.first = None;
        let some = SloTargets {
            ttft: Some(Duration::from_secs(9)),
            ..generous
        };
        assert_eq!(some.judge(&silent), Err(MissReason::Ttft));
    }

    #[test]
    fn class_targets_replace_the_common_ones() {
        let classes = texts(&["chat", "batch"]);
        let slo = SloSet::parse(&texts(&["ttft=1s,tpot=50ms", "batch:e2e=60s"]), &classes).unwrap();
        assert_eq!(slo.of("chat").ttft, Some(Duration::from_secs(1)));
        let batch = slo.of("batch");
        assert_eq!((batch.ttft, batch.tpot), (None, None));
        assert_eq!(batch.e2e, Some(Duration::from_secs(60)));
        for bad in [
            "ttft",
            "ttft=5",
            "itl=5ms",
            "ttft=1s,ttft=2s",
            "other:ttft=1s",
        ] {
            assert!(SloSet::parse(&texts(&[bad]), &classes).is_err(), "{bad}");
        }
    }
}
