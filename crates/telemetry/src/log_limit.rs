//! A limit on log lines of one kind, for events that a stranger may cause without end.
//!
//! Owns: how many lines were logged lately, and how many were left out. Never: writes a line, or
//! reads a clock: the time is a parameter. Invariant: in each period at most [`LINES_MAX`] lines
//! are admitted, and every line that is left out is counted by a later one.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Lines of one kind in a period.
const LINES_MAX: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Admits lines of one kind.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<LogPeriod>);

#[derive(Debug, Default)]
struct LogPeriod {
    began: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl LogLimit {
    /// Returns whether a line may be logged now: `Some` with the number of lines that were left out
    /// since the last one, or `None`.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut period = self.0.lock();
        let is_over = |began: Instant| now.saturating_duration_since(began) >= PERIOD;
        if period.began.is_none_or(is_over) {
            period.began = Some(now);
            period.lines = 0;
        }
        if period.lines >= LINES_MAX {
            period.left_out += 1;
            return None;
        }
        period.lines += 1;
        Some(std::mem::take(&mut period.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_by_a_later_one() {
        let limit = LogLimit::default();
        let began = Instant::now();
        let admitted: Vec<_> = (0..500).filter_map(|_| limit.admit(began)).collect();
        assert_eq!(admitted, [0; LINES_MAX as usize]);
        assert_eq!(limit.admit(began + PERIOD / 2), None);
        assert_eq!(limit.admit(began + PERIOD), Some(500 - 10 + 1));
        assert_eq!(limit.admit(began + PERIOD), Some(0));
    }
}
