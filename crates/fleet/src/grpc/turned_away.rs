//! The log lines about workers that are turned away.
//!
//! Owns: when each was logged last. Never: writes a line, or reads a clock. Invariant: a name has a
//! line a period at most, and all names together are kept up to a limit, since strangers choose
//! them.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A worker that is turned away dials again and again.
const PERIOD: Duration = Duration::from_secs(60);
/// Names that are remembered; of further ones no line is written before the others' periods end.
const NAMES_MAX: usize = 256;

/// Admits lines about workers that are turned away.
#[derive(Debug, Default)]
pub(super) struct TurnedAwayLog(Mutex<BTreeMap<String, Instant>>);

impl TurnedAwayLog {
    /// Whether a line about the worker of this name may be written now.
    pub(super) fn admits(&self, name: &str, now: Instant) -> bool {
        let mut logged = self.0.lock();
        logged.retain(|_, at| now.saturating_duration_since(*at) < PERIOD);
        if logged.contains_key(name) || logged.len() >= NAMES_MAX {
            return false;
        }
        logged.insert(name.to_owned(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_turned_away_again_has_a_line_a_minute() {
        let log = TurnedAwayLog::default();
        let began = Instant::now();
        let lines = (0..180).filter(|second| {
            let now = began + Duration::from_secs(*second);
            log.admits("d0", now)
        });
        assert_eq!(lines.count(), 3);
        assert!(log.admits("d1", began + Duration::from_secs(180)));
        let later = began + Duration::from_secs(400);
        let names = (0..1_000).map(|number| number.to_string());
        let admitted = names.filter(|name| log.admits(name, later)).count();
        assert_eq!(admitted, NAMES_MAX);
    }
}
