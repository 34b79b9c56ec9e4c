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
        let same = |entry: &DashboardEvent| {
            entry.kind == kind && entry.reason == reason && entry.about == about
        };
        let index = self.0.iter().take(MERGE_AMONG).position(same);
        let again = index.and_then(|at| self.0.remove(at));
        let event = match again {
            Some(earlier) => DashboardEvent {
                at_ms,
                count: earlier.count.saturating_add(1),
                ..earlier
            },
            None => DashboardEvent {
                at_ms,
                kind,
                reason: reason.to_owned(),
                about: about.to_owned(),
                count: 1,
            },
        };
        self.0.push_front(event);
        self.0.truncate(EVENTS_MAX);
    }

    pub(super) fn all(&self) -> Vec<DashboardEvent> {
        self.0.iter().cloned().collect()
    }
}

/// Now, in milliseconds since 1970.
pub(crate) fn at_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_events_are_merged_into_one_entry() {
        let mut events = DashboardEvents::default();
        events.add("lost", "connection", "decode-3");
        for round in 0..1_000 {
            events.add("refused", "slo_ttft_unreachable", "fast");
            if round % 2 == 0 {
                events.add("refused", "queue_full", "slow");
            }
        }
        let all = events.all();
        let counts: Vec<_> = all.iter().map(|h| (h.kind, h.count)).collect();
        assert_eq!(counts, [("refused", 1_000), ("refused", 500), ("lost", 1)]);
        for number in 0..100 {
            events.add("joined", "", &format!("w{number}"));
        }
        assert_eq!(events.all().len(), EVENTS_MAX);
    }
}
