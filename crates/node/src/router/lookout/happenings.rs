//! What went wrong of late, and what happened to workers.
//!
//! Owns: the last few of these, with reasons. Never: names a request. Invariant: what repeats itself is
//! one entry with a number, so that a thousand refusals push nothing else off the board.

use cleave_api::Happening;
use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

/// So many are kept.
const KEPT: usize = 40;

/// One that is as one of the last so many is that one again.
const SAME_AMONG: usize = 12;

/// See the module. The latest first.
#[derive(Debug, Default)]
pub(super) struct Happenings(VecDeque<Happening>);

impl Happenings {
    pub(super) fn add(&mut self, (kind, reason): (&'static str, &str), about: &str) {
        let at_ms = at_ms();
        let same = |known: &Happening| {
            known.kind == kind && known.reason == reason && known.about == about
        };
        let known = self.0.iter().take(SAME_AMONG).position(same);
        let again = known.and_then(|at| self.0.remove(at));
        let happening = match again {
            Some(known) => Happening {
                at_ms,
                count: known.count.saturating_add(1),
                ..known
            },
            None => Happening {
                at_ms,
                kind,
                reason: reason.to_owned(),
                about: about.to_owned(),
                count: 1,
            },
        };
        self.0.push_front(happening);
        self.0.truncate(KEPT);
    }

    pub(super) fn all(&self) -> Vec<Happening> {
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
    fn a_thousand_refusals_hid_the_worker_that_was_lost() {
        let mut happenings = Happenings::default();
        happenings.add(("lost", "connection"), "decode-3");
        for round in 0..1_000 {
            happenings.add(("refused", "slo_ttft_unreachable"), "fast");
            if round % 2 == 0 {
                happenings.add(("refused", "queue_full"), "slow");
            }
        }
        let all = happenings.all();
        let told: Vec<_> = all.iter().map(|h| (h.kind, h.count)).collect();
        assert_eq!(told, [("refused", 1_000), ("refused", 500), ("lost", 1)]);
        for number in 0..100 {
            happenings.add(("joined", ""), &format!("w{number}"));
        }
        assert_eq!(happenings.all().len(), KEPT);
    }
}
