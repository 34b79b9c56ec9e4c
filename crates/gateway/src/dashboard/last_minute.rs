//! Verdicts and times of the last minute's requests.
//!
//! Owns: how times are stored so that quantiles can be given, and when they are forgotten. Never
//! keeps a request. Invariant: its memory depends on the number of classes alone, not on the load.

use cleave_api::{DurationQuantiles, HISTORY_SECONDS, HistorySecond, VerdictCounts, WINDOW};
use cleave_domain::RequestStage;
use cleave_telemetry::RequestVerdict;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Times are forgotten in slots of this length: the minute slides in twelve steps.
const SLOT_SECONDS: u64 = 5;

/// Times from 8 µs on are distinguished by an eighth of an octave, about 9 %.
const EIGHTHS: u32 = 8;

/// Up to about nine hours; longer times count as that.
const BUCKETS: usize = 29 * EIGHTHS as usize;

/// A histogram of durations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DurationHistogram(Vec<u32>);

impl Default for DurationHistogram {
    fn default() -> Self {
        Self(vec![0; BUCKETS])
    }
}

impl DurationHistogram {
    fn add(&mut self, span: Duration) {
        let count = &mut self.0[bucket_of(span)];
        *count = count.saturating_add(1);
    }

    fn merge(&mut self, other: &Self) {
        for (sum, count) in self.0.iter_mut().zip(&other.0) {
            *sum = sum.saturating_add(*count);
        }
    }

    fn quantiles(&self) -> DurationQuantiles {
        let count: u64 = self.0.iter().map(|count| u64::from(*count)).sum();
        let at = |percent: u64| {
            // The smallest time that this share of the samples does not exceed.
            let rank = (count * percent).div_ceil(100).max(1);
            let mut counted = 0;
            let found = self.0.iter().position(|count| {
                counted += u64::from(*count);
                counted >= rank
            });
            found.map(bucket_middle).unwrap_or_default()
        };
        DurationQuantiles {
            count,
            p50: at(50),
            p90: at(90),
            p99: at(99),
        }
    }
}

fn bucket_of(span: Duration) -> usize {
    let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
    let units = (micros / 8).max(1);
    let octave = units.ilog2();
    // The three bits after the first.
    let eighth = ((u128::from(units) << 3) >> octave) as u64 & 7;
    let index = octave as usize * EIGHTHS as usize + eighth as usize;
    index.min(BUCKETS - 1)
}

/// The middle of a bucket's range.
fn bucket_middle(bucket: usize) -> Duration {
    let (octave, eighth) = (bucket / EIGHTHS as usize, bucket % EIGHTHS as usize);
    let middle = (1u64 << octave) as f64 * (1.0 + (eighth as f64 + 0.5) / 8.0);
    Duration::from_secs_f64(middle * 8e-6)
}

/// One class of one slot.
#[derive(Clone, Debug, Default)]
pub(super) struct ClassSample {
    pub(super) verdicts: VerdictCounts,
    ttft: DurationHistogram,
    tpot: DurationHistogram,
}

/// A class of the whole minute.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ClassMinute {
    pub(crate) verdicts: VerdictCounts,
    pub(crate) ttft: DurationQuantiles,
    pub(crate) tpot: DurationQuantiles,
}

#[derive(Debug, Default)]
struct MinuteSlot {
    number: u64,
    classes: BTreeMap<String, ClassSample>,
    stages: BTreeMap<RequestStage, DurationHistogram>,
}

/// Times are whole seconds since the dashboard began.
#[derive(Debug, Default)]
pub(super) struct LastMinute {
    slots: VecDeque<MinuteSlot>,
    /// The latest second last.
    seconds: VecDeque<(u64, HistorySecond)>,
}

impl LastMinute {
    pub(super) fn judge(&mut self, now: u64, verdict: &RequestVerdict) {
        let RequestVerdict {
            class,
            verdict,
            reason: _,
            timing,
            output_tokens,
        } = verdict;
        let second = self.second(now);
        match *verdict {
            "good" => second.good += 1,
            "cancelled" => {}
            _ => second.missed += 1,
        }
        second.tokens += u64::from(*output_tokens);
        let slot = self.slot(now);
        let sample = slot.classes.entry(class.clone()).or_default();
        *verdict_of(&mut sample.verdicts, verdict) += 1;
        if !matches!(*verdict, "good" | "late") || *output_tokens == 0 {
            return;
        }
        sample.ttft.add(timing.ttft());
        if let Some(tpot) = timing.tpot(*output_tokens) {
            sample.tpot.add(tpot);
        }
        for stage in RequestStage::ALL {
            let spread = slot.stages.entry(stage).or_default();
            spread.add(timing.stage(stage));
        }
    }

    /// The entry of the present second.
    pub(super) fn second(&mut self, now: u64) -> &mut HistorySecond {
        self.forget(now);
        if self.seconds.back().is_none_or(|(at, _)| *at != now) {
            self.seconds.push_back((now, HistorySecond::default()));
        }
        let last = self.seconds.back_mut().expect("one was put there");
        &mut last.1
    }

    fn slot(&mut self, now: u64) -> &mut MinuteSlot {
        let number = now / SLOT_SECONDS;
        if self.slots.back().is_none_or(|slot| slot.number != number) {
            self.slots.push_back(MinuteSlot {
                number,
                ..MinuteSlot::default()
            });
        }
        self.slots.back_mut().expect("one was put there")
    }

    fn forget(&mut self, now: u64) {
        let slots = WINDOW.as_secs() / SLOT_SECONDS;
        let past = |slot: &MinuteSlot| slot.number + slots <= now / SLOT_SECONDS;
        while self.slots.front().is_some_and(past) {
            self.slots.pop_front();
        }
        let past = |(at, _): &(u64, HistorySecond)| at + WINDOW.as_secs() <= now;
        while self.seconds.front().is_some_and(past) {
            self.seconds.pop_front();
        }
    }

    pub(super) fn classes(&mut self, now: u64) -> BTreeMap<String, ClassMinute> {
        self.forget(now);
        let mut sums: BTreeMap<&str, ClassSample> = BTreeMap::new();
        for (class, sample) in self.slots.iter().flat_map(|slot| &slot.classes) {
            let sum = sums.entry(class).or_default();
            add(&mut sum.verdicts, sample.verdicts);
            sum.ttft.merge(&sample.ttft);
            sum.tpot.merge(&sample.tpot);
        }
        let minute = |(class, sum): (&str, ClassSample)| {
            let minute = ClassMinute {
                verdicts: sum.verdicts,
                ttft: sum.ttft.quantiles(),
                tpot: sum.tpot.quantiles(),
            };
            (class.to_owned(), minute)
        };
        sums.into_iter().map(minute).collect()
    }

    pub(super) fn stages(&mut self, now: u64) -> Vec<(RequestStage, DurationQuantiles)> {
        self.forget(now);
        let of = |stage: RequestStage| {
            let mut sum = DurationHistogram::default();
            for spread in self.slots.iter().filter_map(|slot| slot.stages.get(&stage)) {
                sum.merge(spread);
            }
            (stage, sum.quantiles())
        };
        RequestStage::ALL.into_iter().map(of).collect()
    }

    /// Every second of the minute; the present one is not over, and is left out.
    pub(super) fn history(&mut self, now: u64) -> Vec<HistorySecond> {
        self.forget(now);
        let mut history = vec![HistorySecond::default(); HISTORY_SECONDS];
        for (at, second) in &self.seconds {
            let ago = now - at;
            if (1..=HISTORY_SECONDS as u64).contains(&ago) {
                history[HISTORY_SECONDS - ago as usize] = *second;
            }
        }
        history
    }
}

pub(super) fn verdict_of<'a>(verdicts: &'a mut VerdictCounts, verdict: &str) -> &'a mut u64 {
    match verdict {
        "good" => &mut verdicts.good,
        "late" => &mut verdicts.late,
        "refused" => &mut verdicts.refused,
        "cancelled" => &mut verdicts.cancelled,
        _ => &mut verdicts.failed,
    }
}

fn add(sum: &mut VerdictCounts, more: VerdictCounts) {
    let VerdictCounts {
        good,
        late,
        refused,
        failed,
        cancelled,
    } = more;
    sum.good += good;
    sum.late += late;
    sum.refused += refused;
    sum.failed += failed;
    sum.cancelled += cancelled;
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::RequestStageTimes;
    use proptest::prelude::*;

    fn done(verdict: &'static str, millis: u64) -> RequestVerdict {
        let timing = RequestStageTimes {
            prefill: Duration::from_millis(millis),
            decode: Duration::from_millis(40),
            ..RequestStageTimes::default()
        };
        RequestVerdict {
            class: "fast".to_owned(),
            verdict,
            reason: "met",
            timing,
            output_tokens: 5,
        }
    }

    #[test]
    fn verdicts_older_than_a_minute_are_forgotten() {
        let mut minute = LastMinute::default();
        minute.judge(0, &done("good", 10));
        minute.judge(30, &done("late", 900));
        minute.judge(30, &done("refused", 0));
        let fast = minute.classes(59)["fast"].clone();
        assert_eq!(
            (
                fast.verdicts.good,
                fast.verdicts.late,
                fast.verdicts.refused
            ),
            (1, 1, 1)
        );
        assert_eq!(fast.ttft.count, 2, "what was refused has no time");
        let fast = minute.classes(60)["fast"].clone();
        assert_eq!((fast.verdicts.good, fast.ttft.count), (0, 1));
        let history = minute.history(60);
        assert_eq!(history.len(), HISTORY_SECONDS);
        assert_eq!(history[30].missed, 2, "thirty seconds ago");
        assert_eq!(history[30].tokens, 10);
        assert!(minute.classes(95).is_empty());
        assert!(
            minute
                .history(200)
                .iter()
                .all(|s| *s == HistorySecond::default())
        );
        assert!(minute.slots.is_empty() && minute.seconds.is_empty());
    }

    proptest! {
        /// Compared with the sorted times.
        #[test]
        fn quantiles_are_within_a_tenth_of_the_real_ones(
            mut micros in proptest::collection::vec(20u64..100_000_000, 1..400)
        ) {
            let mut spread = DurationHistogram::default();
            for span in &micros {
                spread.add(Duration::from_micros(*span));
            }
            micros.sort_unstable();
            let found = spread.quantiles();
            prop_assert_eq!(found.count, micros.len() as u64);
            for (percent, found) in [(50, found.p50), (90, found.p90), (99, found.p99)] {
                let rank = (micros.len() * percent).div_ceil(100).max(1);
                let real = micros[rank - 1] as f64;
                let off = (found.as_micros() as f64 - real).abs();
                prop_assert!(off <= real * 0.1 + 8.0, "{}: {:?} of {}", percent, found, real);
            }
        }
    }
}
