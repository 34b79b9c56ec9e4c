//! What a router's brain costs: time for what it hears, memory for what it knows.
//!
//! Owns: the clock that a simulated world has not. Never: changes what the world does.
//! Invariant: memory is that of whole copies of the brain, made while it is busy, so nothing of the world
//! around it counts.

use cleave_router::{Brain, Input};
use cleave_sim::goodput::Observer;
use serde_json::{Value, json};
use std::fmt;
use std::time::{Duration, Instant};

/// Copies are made until they fill so much, or there are so many.
const COPIES_BYTES: u64 = 256 << 20;
const COPIES_MAX: u64 = 64;
/// What the C library hands out at least is this much larger than what a resident page shows.
const PAGE_BYTES: u64 = 4096;

/// Measures one brain while a world runs.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    since: Option<Instant>,
    submits: bool,
    cost: Cost,
}

/// What it cost.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    /// Requests submitted.
    decisions: u64,
    /// In the brain, for those alone.
    deciding: Duration,
    /// The longest.
    slowest: Duration,
    /// Everything it heard: reports too.
    inputs: u64,
    /// In the brain, for all.
    hearing: Duration,
    /// Bytes of a copy, half way; none where the system does not say.
    bytes: Option<u64>,
    /// Flights under way at that time.
    legs: u32,
}

impl Meter {
    pub(crate) fn cost(&self) -> Cost {
        self.cost
    }
}

impl Observer for Meter {
    fn begins(&mut self, input: &Input) {
        self.submits = matches!(input, Input::Submitted { .. });
        self.since = Some(Instant::now());
    }

    fn ends(&mut self) {
        let took = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        self.cost.inputs += 1;
        self.cost.hearing += took;
        if self.submits {
            self.cost.decisions += 1;
            self.cost.deciding += took;
            self.cost.slowest = self.cost.slowest.max(took);
        }
    }

    fn half_way(&mut self, router: &Brain) {
        self.cost.legs = router.legs_open();
        self.cost.bytes = bytes_of(router);
    }
}

/// What each further copy adds to this process's memory.
fn bytes_of(brain: &Brain) -> Option<u64> {
    // The first ones may fit in what was freed before.
    let mut copies = vec![brain.clone(), brain.clone()];
    let before = resident_bytes()?;
    let mut added = 0;
    while added < COPIES_BYTES && (copies.len() as u64) < COPIES_MAX + 2 {
        copies.push(brain.clone());
        added = resident_bytes()?.saturating_sub(before);
    }
    Some(added / (copies.len() as u64 - 2))
}

/// Pages of this process in memory, as Linux tells it.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * PAGE_BYTES)
}

impl Cost {
    fn per_second(&self) -> f64 {
        self.decisions as f64 / self.hearing.as_secs_f64().max(1e-9)
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

impl fmt::Display for Cost {
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
