//! What an answer must keep to count.
//!
//! Owns: targets and the verdict on one request. Never: measures.
//! Invariant: whatever was refused, failed, cut off or late is a miss (lesson 25).

use crate::number::{pair, span};
use crate::record::{Outcome, Record};
use anyhow::{Context, bail, ensure};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Limits on one request; none where `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Targets {
    /// From the time the request was due to its first token.
    pub ttft: Option<Duration>,
    /// Mean time per output token after the first.
    pub tpot: Option<Duration>,
    /// From the time the request was due to the end of its answer.
    pub e2e: Option<Duration>,
}

/// Targets of all classes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slo {
    /// Of classes that have none of their own.
    any: Targets,
    by_class: BTreeMap<String, Targets>,
}

impl Slo {
    /// Of texts such as `ttft=500ms,tpot=50ms` (all classes) and `chat:ttft=200ms` (one class; its own
    /// targets replace the others).
    ///
    /// # Errors
    /// What is no target, or a class that is not in `classes`.
    pub fn parse(texts: &[String], classes: &[String]) -> anyhow::Result<Self> {
        let mut slo = Self::default();
        for text in texts {
            let place = || format!("SLO `{text}`");
            match text.split_once(':') {
                None => slo.any = targets(text).with_context(place)?,
                Some((class, text)) => {
                    let class = class.trim();
                    ensure!(
                        classes.iter().any(|known| known == class),
                        "SLO of class `{class}`: the workload has {}",
                        classes.join(", ")
                    );
                    let targets = targets(text).with_context(place)?;
                    slo.by_class.insert(class.to_owned(), targets);
                }
            }
        }
        Ok(slo)
    }

    /// What holds for `class`.
    pub fn of(&self, class: &str) -> Targets {
        self.by_class.get(class).copied().unwrap_or(self.any)
    }

    /// Whether no class has any target.
    pub fn is_empty(&self) -> bool {
        let none = |targets: &Targets| *targets == Targets::default();
        none(&self.any) && self.by_class.values().all(none)
    }
}

fn targets(text: &str) -> anyhow::Result<Targets> {
    let mut targets = Targets::default();
    for item in text.split(',') {
        let (name, limit) = pair(item)?;
        let place = match name {
            "ttft" => &mut targets.ttft,
            "tpot" => &mut targets.tpot,
            "e2e" => &mut targets.e2e,
            other => bail!("unknown target `{other}`; there are ttft, tpot and e2e"),
        };
        ensure!(place.is_none(), "`{name}` is there twice");
        *place = Some(span(limit)?);
    }
    Ok(targets)
}

/// Why a request does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Miss {
    /// Turned away with 429.
    Refused,
    /// An error, or an answer that broke off.
    Failed,
    /// Not over when the measurement was.
    Unfinished,
    /// The first token came too late.
    Ttft,
    /// Tokens came too slowly.
    Tpot,
    /// The end came too late.
    E2e,
}

impl Targets {
    /// Whether a request that is over kept these; the first reason why not.
    pub(crate) fn judge(&self, record: &Record) -> Result<(), Miss> {
        match &record.outcome {
            Outcome::Refused { .. } => return Err(Miss::Refused),
            Outcome::Failed { .. } => return Err(Miss::Failed),
            Outcome::Unfinished => return Err(Miss::Unfinished),
            Outcome::Done => {}
        }
        // What was never seen is as late as can be; an answer of one token has no time per token.
        let late = |took: Option<Duration>, limit: Option<Duration>| {
            limit.is_some_and(|limit| took.is_none_or(|took| took > limit))
        };
        if late(record.ttft(), self.ttft) {
            return Err(Miss::Ttft);
        }
        let slow = |limit| record.tpot().is_some_and(|took| took > limit);
        if self.tpot.is_some_and(slow) {
            return Err(Miss::Tpot);
        }
        match late(record.e2e(), self.e2e) {
            true => Err(Miss::E2e),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Failure, Length};
    use cleave_domain::Time;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn at(millis: u64) -> Option<Time> {
        Some(Time::from_nanos(millis * 1_000_000))
    }

    /// Due at 100 ms, sent at 110; 11 tokens from 400 on, 20 ms each; over at 605.
    fn answer() -> Record {
        let mut record = Record::new(0, 0, at(100).unwrap());
        record.asked = Length {
            input: 7,
            output: 11,
        };
        record.sent = at(110);
        record.first = at(400);
        record.last = at(600);
        record.over = at(605);
        record.chunks = 11;
        record.outcome = Outcome::Done;
        record
    }

    #[test]
    fn late_is_by_when_it_was_due_not_by_when_it_was_sent() {
        let judged = |text: &str| {
            let slo = Slo::parse(&texts(&[text]), &[]).unwrap();
            slo.of("default").judge(&answer())
        };
        assert_eq!(judged("ttft=300ms,tpot=20ms,e2e=505ms"), Ok(()));
        assert_eq!(judged("ttft=299ms"), Err(Miss::Ttft));
        assert_eq!(judged("tpot=19.9ms"), Err(Miss::Tpot));
        assert_eq!(judged("e2e=504ms"), Err(Miss::E2e));
        assert_eq!(judged("ttft=1ms,tpot=1ms"), Err(Miss::Ttft));
    }

    #[test]
    fn lesson_25_what_was_refused_or_failed_was_left_out_of_the_count() {
        let generous = Targets::default();
        let mut record = answer();
        record.outcome = Outcome::Refused {
            status: 429,
            retry_after: None,
        };
        assert_eq!(generous.judge(&record), Err(Miss::Refused));
        record.outcome = Outcome::Failed {
            kind: Failure::Cut,
            text: String::new(),
        };
        assert_eq!(generous.judge(&record), Err(Miss::Failed));
        record.outcome = Outcome::Unfinished;
        assert_eq!(generous.judge(&record), Err(Miss::Unfinished));
        // Done, but without a token: as late as can be.
        let mut silent = answer();
        silent.first = None;
        let some = Targets {
            ttft: Some(Duration::from_secs(9)),
            ..generous
        };
        assert_eq!(some.judge(&silent), Err(Miss::Ttft));
    }

    #[test]
    fn a_classes_own_targets_replace_the_common_ones() {
        let classes = texts(&["chat", "batch"]);
        let slo = Slo::parse(&texts(&["ttft=1s,tpot=50ms", "batch:e2e=60s"]), &classes).unwrap();
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
            assert!(Slo::parse(&texts(&[bad]), &classes).is_err(), "{bad}");
        }
    }
}
