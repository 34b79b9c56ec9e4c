//! The simulator: virtual time, priced engines and links, faults from a seed, and checkers that
//! judge from outside.
//!
//! Owns: [`run_chaos`], which draws a world and runs the production brains in it, [`tape::replay`],
//! and [`goodput`], which runs them over the prices of real devices to see which promises they
//! keep. Never: decides what a brain decides; touches a clock, a file or a thread. Invariant: the
//! same seed gives the same bytes.

mod bit_flips;
mod clients;
mod constraints;
mod disk;
mod event_log;
pub mod explore;
mod faults;
pub mod goodput;
mod log_text;
mod model;
mod models;
mod network;
mod router_effects;
mod run;
mod speculation;
pub mod tape;
mod worker_effects;
mod world;

pub use bit_flips::LinkChecks;
pub use cleave_testkit::MatcherFault;
pub use clients::EndingCounts;
pub use event_log::LEGEND;

use cleave_domain::Time;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Options of a chaos run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChaosOptions {
    /// Keeps every line of the log; otherwise only a violation's last ones.
    pub log: bool,
    /// Keeps a tape of every life of every brain.
    pub tape: bool,
    /// Whether links verify checksums.
    pub link_checks: LinkChecks,
    /// Gives the seed's model a state, drawn apart, so that the rest of its world stays the same.
    pub states: bool,
    /// The model has layers with a sliding window.
    pub windows: bool,
    /// Gives the fleet one to three models, with workers and requests of each, drawn apart in the
    /// same way.
    pub models: bool,
    /// Gives requests of the seed constraints, drawn apart in the same way.
    pub constraints: bool,
    /// The mistake of every engine with its constraints, if there is to be one.
    pub matcher_fault: Option<MatcherFault>,
}

/// The result of a run without violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChaosReport {
    /// The seed that draws the same world again.
    pub seed: u64,
    /// The drawn world as text.
    pub world: String,
    /// One line per event, if kept; [`LEGEND`] explains the columns.
    pub log: String,
    /// A hash over every line, kept or not.
    pub hash: u64,
    pub events: u64,
    /// Counts of flights by ending.
    pub endings: EndingCounts,
    /// Tokens compared with the reference.
    pub tokens: u64,
    /// Counts of events, by name.
    pub counts: BTreeMap<&'static str, u64>,
    /// One tape per life of a brain, as lines, if kept.
    pub tapes: Vec<Vec<String>>,
}

/// A violation that a run found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The seed that repeats the violation.
    pub seed: u64,
    /// Virtual time of the violation.
    pub at: Time,
    /// Description of the violation.
    pub problem: String,
    /// The drawn world as text.
    pub world: String,
    /// The last lines of the log, or all of them.
    pub log: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{LEGEND}{}", self.world, self.log)?;
        writeln!(f, "seed {} at {:?}: {}", self.seed, self.at, self.problem)
    }
}

impl std::error::Error for Violation {}

/// Draws a world from a seed, runs it through its faults, ends them, checks that it comes to rest,
/// and drains it.
///
/// # Errors
/// The first violation found by a checker or by a brain's own `check`.
pub fn run_chaos(seed: u64, options: &ChaosOptions) -> Result<ChaosReport, Box<Violation>> {
    let mut world = world::ChaosWorld::draw(seed);
    if options.states {
        world.draw_states();
    }
    if options.windows {
        world.draw_windows();
    }
    if options.models {
        world.draw_models();
    }
    if options.constraints {
        constraints::draw_constraints(seed, &mut world.requests);
    }
    let mut run = run::ChaosRun::new(&world, options);
    let outcome = catch_unwind(AssertUnwindSafe(|| run.run_to_end())).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("a brain's check: {}", words.unwrap_or("a panic")))
    });
    match outcome {
        Ok(()) => Ok(ChaosReport {
            seed,
            world: world.to_string(),
            log: if options.log {
                run.log.text()
            } else {
                String::new()
            },
            hash: run.log.hash(),
            events: run.log.count,
            endings: run.clients.endings(),
            tokens: run.clients.tokens,
            counts: run.counts,
            tapes: run.tapes,
        }),
        Err(problem) => Err(Box::new(Violation {
            seed,
            at: run.now,
            problem,
            world: world.to_string(),
            log: run.log.text(),
        })),
    }
}
