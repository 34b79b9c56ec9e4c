//! Series of the KV tiers below a worker's pool.
//!
//! Owns: counting notes into these series. Never counts a hit whose block was not loaded.

use super::{WorkerMeters, add, assert_not_counted_here, observe};
use cleave_sched::{FetchOutcome, OffloadOutcome, TierLevel, WorkerNote};

/// The places of kept blocks; see the help of `cleave_kv_tier_blocks`.
const PLACES: [&str; 2] = ["host", "disk"];

/// The reasons why a block is not kept or not loaded; see the help of `cleave_kv_tier_failures`.
const FAILURES: [&str; 7] = [
    "host_full",
    "disk_failed",
    "stopped",
    "missing",
    "corrupt",
    "unreadable",
    "engine",
];

fn name(place: TierLevel) -> &'static str {
    match place {
        TierLevel::Host => PLACES[0],
        TierLevel::Disk => PLACES[1],
    }
}

fn fetch_failure(outcome: FetchOutcome) -> Option<&'static str> {
    match outcome {
        FetchOutcome::Copied => None,
        FetchOutcome::Stopped => Some(FAILURES[2]),
        FetchOutcome::Missing => Some(FAILURES[3]),
        FetchOutcome::Corrupt => Some(FAILURES[4]),
        FetchOutcome::Unreadable => Some(FAILURES[5]),
        FetchOutcome::Broken => Some(FAILURES[6]),
    }
}

impl WorkerMeters {
    /// Creates every series of the tier, at zero.
    pub(super) fn begin_tier(&self) {
        let series = &self.series;
        for place in PLACES {
            drop(series.tier_blocks.get_or_create(&self.kind_labels(place)));
            drop(series.tier_bytes.get_or_create(&self.kind_labels(place)));
            drop(series.tier_copied.get_or_create(&self.kind_labels(place)));
        }
        for failure in FAILURES {
            drop(
                series
                    .tier_failures
                    .get_or_create(&self.kind_labels(failure)),
            );
        }
        drop(series.tier_fetched.get_or_create(&self.worker));
    }

    /// Removes the gauges, which are shown under another role from now on.
    pub(super) fn end_tier(&self) {
        for place in PLACES {
            self.series.tier_blocks.remove(&self.kind_labels(place));
            self.series.tier_bytes.remove(&self.kind_labels(place));
        }
    }

    pub(super) fn count_tier(&mut self, note: &WorkerNote) {
        let series = &self.series;
        match note {
            WorkerNote::Offloaded {
                place,
                outcome: OffloadOutcome::Copied,
                took,
            } => {
                let place = self.kind_labels(name(*place));
                add(&series.tier_copied, &place, 1);
                observe(&series.tier_keep_seconds, &place, *took);
            }
            WorkerNote::Offloaded {
                place,
                outcome: OffloadOutcome::Broken,
                took: _,
            } => {
                let failure = match place {
                    TierLevel::Host => FAILURES[0],
                    TierLevel::Disk => FAILURES[1],
                };
                add(&series.tier_failures, &self.kind_labels(failure), 1);
            }
            WorkerNote::Fetched {
                handoff: _,
                asked: _,
                came,
                outcome,
                took,
            } => {
                add(&series.tier_fetched, &self.worker, u64::from(*came));
                observe(&series.tier_fetch_seconds, &self.worker, *took);
                if let Some(failure) = fetch_failure(*outcome) {
                    add(&series.tier_failures, &self.kind_labels(failure), 1);
                }
            }
            WorkerNote::Tiers {
                host_blocks,
                disk_blocks,
            } => {
                for (place, blocks) in PLACES.into_iter().zip([host_blocks, disk_blocks]) {
                    let place = self.kind_labels(place);
                    let bytes = i64::from(*blocks) * i64::from(self.block_bytes);
                    let gauge = series.tier_blocks.get_or_create(&place);
                    gauge.set(i64::from(*blocks));
                    series.tier_bytes.get_or_create(&place).set(bytes);
                }
                self.tiers = Some(note.clone());
            }
            other => assert_not_counted_here(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Telemetry, WorkerObserver};
    use cleave_domain::{Capacity, HandoffId, Role};
    use std::time::Duration;

    #[test]
    fn kv_tier_blocks_and_failures_are_counted() {
        let telemetry = Telemetry::default();
        let meters = WorkerMeters::new(&telemetry.workers, "p", Role::Prefill, "demo");
        let mut meters = meters.with_capacity(Capacity {
            block_tokens: 4,
            block_bytes: 512,
            blocks_count: 8,
            slots_count: 1,
            step_tokens_max: 4,
            context_tokens_max: 32,
            states: None,
            windows: None,
        });
        let took = Duration::from_millis(2);
        meters.handle_note(&WorkerNote::Tiers {
            host_blocks: 3,
            disk_blocks: 7,
        });
        for (outcome, came) in [(FetchOutcome::Copied, 4), (FetchOutcome::Corrupt, 1)] {
            meters.handle_note(&WorkerNote::Fetched {
                handoff: HandoffId::default(),
                asked: 4,
                came,
                outcome,
                took,
            });
        }
        for outcome in [OffloadOutcome::Copied, OffloadOutcome::Broken] {
            let place = TierLevel::Disk;
            meters.handle_note(&WorkerNote::Offloaded {
                place,
                outcome,
                took,
            });
        }
        let text = telemetry.text();
        for line in [
            "cleave_kv_tier_blocks{worker=\"p\",role=\"prefill\",kind=\"disk\"} 7",
            "cleave_kv_tier_bytes{worker=\"p\",role=\"prefill\",kind=\"host\"} 1536",
            "cleave_kv_tier_kept_blocks_total{worker=\"p\",role=\"prefill\",kind=\"disk\"} 1",
            "cleave_kv_tier_fetched_blocks_total{worker=\"p\",role=\"prefill\"} 5",
            "cleave_kv_tier_fetch_seconds_count{worker=\"p\",role=\"prefill\"} 2",
            "cleave_kv_tier_failures_total{worker=\"p\",role=\"prefill\",kind=\"corrupt\"} 1",
            "cleave_kv_tier_failures_total{worker=\"p\",role=\"prefill\",kind=\"disk_failed\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
