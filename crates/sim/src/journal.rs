//! One line of state per event.
//!
//! Owns: the lines, and a hash over all of them. Never: is read by anything in the world.
//! Invariant: the same world writes the same bytes.

use cleave_domain::Time;
use std::collections::VecDeque;

/// What the columns mean.
pub const LEGEND: &str = "\
   milliseconds  who event       what happened                             flights  each worker
                                                                    (under way)  role state held/all q=queued prompt tokens
   role: p prefill, d decode, b both    state: . idle, s step, c copy, z frozen, - draining, x dead
";

/// Lines kept for a violation when not all are.
const LAST: usize = 60;

/// Which lines are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    All,
    Last,
}

#[derive(Debug)]
pub(crate) struct Journal {
    lines: VecDeque<String>,
    keep: Keep,
    hash: u64,
    pub(crate) count: u64,
}

impl Journal {
    pub(crate) fn new(keep: Keep) -> Self {
        Self {
            lines: VecDeque::new(),
            keep,
            hash: 0xcbf2_9ce4_8422_2325,
            count: 0,
        }
    }

    pub(crate) fn line(&mut self, at: Time, event: &str, state: &str) {
        let line = format!("{} {event:<62} {state}\n", millis(at));
        self.count += 1;
        for byte in line.bytes() {
            // FNV-1a.
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.keep == Keep::Last && self.lines.len() == LAST {
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

/// A time as milliseconds with six digits after the point, right-aligned.
pub(crate) fn millis(at: Time) -> String {
    let nanos = at.as_nanos();
    format!("{:>6}.{:06}", nanos / 1_000_000, nanos % 1_000_000)
}
