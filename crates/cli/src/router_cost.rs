//! The cost of a router's brain: time per input, and memory.
//!
//! Owns: the clock that a simulated world lacks. Never: changes the world. Invariant: memory is
//! that of whole copies of the brain, made while it is busy, so nothing of the surrounding world
//! counts.

use cleave_router::{RouterBrain, RouterInput};
use cleave_sim::goodput::RouterBrainTimer;
use serde_json::{Value, json};
use std::fmt;
use std::time::{Duration, Instant};

/// Limits of the copies: their bytes, and their number.
const COPIES_BYTES: u64 = 256 << 20;
const COPIES_MAX: u64 = 64;
/// Bytes of a page, the unit in which Linux reports resident memory.
const PAGE_BYTES: u64 = 4096;

#[derive(Debug, Default)]
pub(crate) struct RouterCostMeter {
    since: Option<Instant>,
    is_submission: bool,
    cost: RouterCost,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RouterCost {
    decisions: u64,
    /// Time in the brain for these requests.
    deciding: Duration,
    /// Longest time of one decision.
    slowest: Duration,
    /// Number of inputs, including reports.
    inputs: u64,
    /// Time in the brain for all inputs.
    handling: Duration,
    /// Bytes of a copy, taken half-way through the run; `None` if the system does not report
    /// memory.
    bytes: Option<u64>,
    /// Open legs at that time.
    legs: u32,
}

impl RouterCostMeter {
    pub(crate) fn cost(&self) -> RouterCost {
        self.cost
    }
}

impl RouterBrainTimer for RouterCostMeter {
    fn input_begins(&mut self, input: &RouterInput) {
        self.is_submission = matches!(input, RouterInput::Submitted { .. });
        self.since = Some(Instant::now());
    }

    fn input_ends(&mut self) {
        let took = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        self.cost.inputs += 1;
        self.cost.handling += took;
        if self.is_submission {
            self.cost.decisions += 1;
            self.cost.deciding += took;
            self.cost.slowest = self.cost.slowest.max(took);
        }
    }

    fn half_arrived(&mut self, router: &RouterBrain) {
        self.cost.legs = router.legs_open();
        self.cost.bytes = bytes_of(router);
    }
}

/// Returns the memory that each further copy adds to this process.
fn bytes_of(brain: &RouterBrain) -> Option<u64> {
    // The first copies may fit into memory that was freed before.
    let mut copies = vec![brain.clone(), brain.clone()];
    let before = resident_bytes()?;
    let mut added = 0;
    while added < COPIES_BYTES && (copies.len() as u64) < COPIES_MAX + 2 {
        copies.push(brain.clone());
        added = resident_bytes()?.saturating_sub(before);
    }
    Some(added / (copies.len() as u64 - 2))
}

/// Returns the resident memory of this process, as Linux reports it.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * PAGE_BYTES)
}

impl RouterCost {
    fn per_second(&self) -> f64 {
        self.decisions as f64 / self.handling.as_secs_f64().max(1e-9)
    }

    fn micros(&self) -> f64 {
        self.deciding.as_secs_f64() * 1e6 / self.decisions.max(1) as f64
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "decisions": self.decisions,
            "decision_us": self.micros(),
            "slowest_decision_us": self.slowest.as_secs_f64() * 1e6,
            "inputs": self.inputs,
            "decisions_per_second": self.per_second(),
            "bytes": self.bytes,
            "legs_open": self.legs,
        })
    }
}

impl fmt::Display for RouterCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "router: {:.0} requests/s on one core, reports included; a decision takes {:.0} µs, \
             the slowest {:.0} µs",
            self.per_second(),
            self.micros(),
            self.slowest.as_secs_f64() * 1e6,
        )?;
        match self.bytes {
            Some(bytes) => write!(
                f,
                "; {:.1} MiB with {} legs open",
                bytes as f64 / f64::from(1 << 20),
                self.legs
            ),
            None => Ok(()),
        }
    }
}
