//! Recent failures and changes of workers, for the dashboard.
//!
//! Owns: the latest entries, with reasons. Never names a request. Invariant: a repeated event is
//! one entry with a count, so that a thousand refusals push nothing else out.

use cleave_api::DashboardEvent;
use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

/// The number of entries kept.
const EVENTS_MAX: usize = 40;

/// An event equal to one of this many latest entries is merged into it.
const MERGE_AMONG: usize = 12;

/// The latest event first.
#[derive(Debug, Default)]
pub(super) struct DashboardEvents(VecDeque<DashboardEvent>);

impl DashboardEvents {
    pub(super) fn add(&mut self, kind: &'static str, reason: &str, about: &str) {
        let at_ms = at_ms();
        let same = |known: &DashboardEvent| {
            known.kind == kind && known.reason == reason && known.about == about
        };
        let known = self.0.iter().take(MERGE_AMONG).position(same);
        let again = known.and_then(|at| self.0.remove(at));
        let happening = match again {
            Some(known) => DashboardEvent {
                at_ms,
                count: known.count.saturating_add(1),
                ..known
            },
            None => DashboardEvent {
                at_ms,
                kind,
                reason: reason.to_owned(),
                about: about.to_owned(),
                count: 1,
            },
        };
        self.0.push_front(happening);
        self.0.truncate(EVENTS_MAX);
    }

    pub(super) fn all(&self) -> Vec<DashboardEvent> {
        self.0.iter().cloned().collect()
    }
}

/// Now, in milliseconds since 1970.
pub(super) fn at_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_events_are_merged_into_one_entry() {
        let mut happenings = DashboardEvents::default();
        happenings.add("lost", "connection", "decode-3");
        for round in 0..1_000 {
            happenings.add("refused", "slo_ttft_unreachable", "fast");
            if round % 2 == 0 {
                happenings.add("refused", "queue_full", "slow");
            }
        }
        let all = happenings.all();
        let told: Vec<_> = all.iter().map(|h| (h.kind, h.count)).collect();
        assert_eq!(told, [("refused", 1_000), ("refused", 500), ("lost", 1)]);
        for number in 0..100 {
            happenings.add("joined", "", &format!("w{number}"));
        }
        assert_eq!(happenings.all().len(), EVENTS_MAX);
    }
}
