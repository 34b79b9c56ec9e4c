//! The world that does not exist: virtual time, priced engines and links, faults from a seed, and
//! checkers that look from outside.
//!
//! Owns: [`chaos`], which draws a world and runs the production brains in it, [`tape::replay`], and
//! [`goodput`], which runs them over the prices of real devices to see what promises they keep.
//! Never: decides what a brain decides; touches a clock, a file or a thread.
//! Invariant: the same seed gives the same bytes.

mod body;
mod clients;
mod damage;
mod desk;
mod dice;
mod disk;
mod engine;
pub mod explore;
mod faults;
pub mod goodput;
mod guesses;
mod journal;
mod model;
mod net;
mod run;
mod talk;
pub mod tape;
mod words;
mod world;

pub use clients::Endings;
pub use damage::Checks;
pub use journal::LEGEND;

use cleave_domain::Time;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a run keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Every line of the log; otherwise only a violation's last ones.
    pub log: bool,
    /// A tape of every life of every brain.
    pub tape: bool,
    /// Whether links check what arrives.
    pub checks: Checks,
}

/// What a run that broke nothing was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Draws the same world again.
    pub seed: u64,
    /// The world, as drawn.
    pub world: String,
    /// One line per event, if kept; see [`LEGEND`].
    pub log: String,
    /// A hash over every line, kept or not.
    pub hash: u64,
    /// Events that happened.
    pub events: u64,
    /// How flights ended.
    pub endings: Endings,
    /// Tokens compared with the reference.
    pub tokens: u64,
    /// How often what happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// One tape per life of a brain, as lines, if kept.
    pub tapes: Vec<Vec<String>>,
}

/// What a run broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Breaks it again.
    pub seed: u64,
    /// When, in virtual time.
    pub at: Time,
    /// What is wrong.
    pub what: String,
    /// The world, as drawn.
    pub world: String,
    /// The last lines of the log, or all of them.
    pub log: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{LEGEND}{}", self.world, self.log)?;
        writeln!(f, "seed {} at {:?}: {}", self.seed, self.at, self.what)
    }
}

impl std::error::Error for Violation {}

/// Draws a world from a seed, runs it through its faults, heals it, demands that it comes to rest,
/// and drains it.
///
/// # Errors
/// The first thing that any checker or any brain's own `check` found wrong.
pub fn chaos(seed: u64, options: &Options) -> Result<Report, Box<Violation>> {
    let world = world::World::draw(seed);
    let mut run = run::Run::new(&world, options);
    let outcome = catch_unwind(AssertUnwindSafe(|| run.go())).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("a brain's check: {}", words.unwrap_or("a panic")))
    });
    match outcome {
        Ok(()) => Ok(Report {
            seed,
            world: world.to_string(),
            log: if options.log {
                run.journal.text()
            } else {
                String::new()
            },
            hash: run.journal.hash(),
            events: run.journal.count,
            endings: run.clients.endings(),
            tokens: run.clients.tokens,
            counts: run.counts,
            tapes: run.tapes,
        }),
        Err(what) => Err(Box::new(Violation {
            seed,
            at: run.now,
            what,
            world: world.to_string(),
            log: run.journal.text(),
        })),
    }
}
