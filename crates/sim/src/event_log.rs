//! The log of a run: one line of state per event.
//!
//! Owns: the lines, and a hash over all of them. Never: is read by anything in the world.
//! Invariant: the same world writes the same bytes.

use cleave_domain::Time;
use std::collections::VecDeque;

/// Explains the columns of the log.
pub const LEGEND: &str = "\
   milliseconds  who event       what happened                             flights  each worker
                                                                    (under way)  role state held/all q=queued prompt tokens
   role: p prefill, d decode, b both    state: . idle, s step, c copy, z frozen, - draining, x dead
";

/// Last lines that are kept for a violation.
const VIOLATION_LINES: usize = 60;

/// The lines that a log keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogRetention {
    All,
    Last,
}

#[derive(Debug)]
pub(crate) struct EventLog {
    lines: VecDeque<String>,
    keep: LogRetention,
    hash: u64,
    pub(crate) count: u64,
}

impl EventLog {
    pub(crate) fn new(keep: LogRetention) -> Self {
        Self {
            lines: VecDeque::new(),
            keep,
            hash: 0xcbf2_9ce4_8422_2325,
            count: 0,
        }
    }

    pub(crate) fn append(&mut self, at: Time, event: &str, state: &str) {
        let line = format!("{} {event:<62} {state}\n", millis(at));
        self.count += 1;
        for byte in line.bytes() {
            // FNV-1a.
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.keep == LogRetention::Last && self.lines.len() == VIOLATION_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn text(&self) -> String {
        self.lines.iter().map(String::as_str).collect()
    }
}

/// A time in milliseconds with six decimals, right-aligned.
pub(crate) fn millis(at: Time) -> String {
    let nanos = at.as_nanos();
    format!("{:>6}.{:06}", nanos / 1_000_000, nanos % 1_000_000)
}
