//! Exhaustive exploration of small worlds.
//!
//! Owns: a search over the states of worlds made of the production brains: a router's and four
//! workers', with all messages in flight between them. Never: holds a second version of a brain's
//! rules; properties are judged from outside the brains, or asserted by their own `check`.
//! Invariant: the same world gives the same states in the same order.
//!
//! # Parts of a world
//!
//! Two prefill and two decode workers (or two without roles) with three blocks each, one router,
//! three requests, all with the brains that serve in production; an engine that computes at once
//! what [`crate::run_chaos`]'s engine computes, and remembers the content of every cell; streams
//! between router and workers that keep their order or break; packets between workers that arrive
//! in any order. A transition is one of these events, or a fault. Every brain has its own clock: a
//! clock that jumps to the brain's next deadline is a fault too, so leases and timers may run out
//! anywhere.
//!
//! Whole brains with three requests have more states than any machine holds. So each world limits
//! the *surprises* of a path: faults, and, in worlds with too many messages in flight to try all
//! orders, departures from the usual order (bounding delays: Emmi, Qadeer, Rakamarić, POPL 2011).
//! Within that bound a world is explored completely: worlds of one request in every order of all
//! messages in flight, with that many faults anywhere; worlds of three with every choice of that
//! many departures from the usual order.
//!
//! # Properties
//!
//! - S1: a block has one owner: a worker gives none away that it has given to another.
//! - S2: no write lands in a block of another generation, place or writer than it was meant for.
//! - S3: a one-sided write lands only in the block it was meant for, however late: until its writer
//!   has stopped or is dead, the block is in quarantine.
//! - S4: a step reads exactly what its sequence's tokens wrote: nothing runs before everything
//!   landed.
//! - S5: a flight ends exactly once, and at once if its client leaves.
//! - S6: a token continues exactly what its client has, in order; a finished stream is complete.
//! - S7: no two attempts draw the same token of a stream differently.
//! - S8: without a fault every flight is done.
//! - S9: a flight survives as many faults as its router's budget says.
//! - L1: from every state, once faults stop, everything comes to rest: every flight has ended,
//!   every block is free, every engine idle, and the router counts nothing.
//! - L2: no block waits for a timer to be freed, unless a loss occurred that only a timeout can
//!   detect.

mod apply;
mod at_rest;
mod client;
mod guard;
mod hasher;
mod path_text;
mod processes;
mod search;
mod state;
mod transitions;
mod visited;
mod workers;
mod worlds;

pub use guard::Guard;

use search::{SearchExtent, StateSearch};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use worlds::SmallWorld;

/// The result of one exploration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExploreReport {
    pub world: &'static str,
    /// Most surprises on one path.
    pub surprises: u8,
    /// Number of distinct states.
    pub states: u64,
    pub moves: u64,
    /// States in which everything was at rest.
    pub rests: u64,
    /// Transitions of the longest path.
    pub deepest: usize,
    /// Whether the world was explored completely.
    pub whole: bool,
}

/// A path that violates a property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counterexample {
    pub world: &'static str,
    /// The violation, with the number of the property.
    pub problem: String,
    /// The transitions of the path, one line each.
    pub path: String,
    /// Distinct states visited before the violation.
    pub states: u64,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        writeln!(
            f,
            "world {} after {} states: {}",
            self.world, self.states, self.problem
        )
    }
}

impl std::error::Error for Counterexample {}

impl fmt::Display for ExploreReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            world,
            surprises,
            states,
            moves,
            rests,
            deepest,
            whole,
        } = self;
        let extent = if *whole {
            "the whole of it"
        } else {
            "a part of it"
        };
        write!(
            f,
            "{world:<10} {surprises} surprises: {states:>9} states, {moves:>9} moves, {rests:>6} rests, paths of up to {deepest}: {extent}"
        )
    }
}

/// Limits of an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExploreScope {
    /// Most states; a search that meets more ends and is not `whole`.
    pub states_max: u64,
    /// Most surprises on one path; the world's own limit if `None`.
    pub surprises_max: Option<u8>,
    /// The guard that is disabled, to show that it is needed.
    pub without: Option<Guard>,
}

impl Default for ExploreScope {
    /// Every world with its own limits.
    fn default() -> Self {
        Self {
            states_max: u64::MAX,
            surprises_max: None,
            without: None,
        }
    }
}

/// The worlds' names, in the order of exploration.
pub fn worlds() -> Vec<&'static str> {
    worlds::all_worlds()
        .iter()
        .map(|small| small.name)
        .collect()
}

/// Explores a world with more and more surprises; gives a result for each number of them.
///
/// # Errors
/// The first violation with its path, or that no world has this name.
pub fn explore(
    world: &str,
    scope: &ExploreScope,
) -> Result<Vec<ExploreReport>, Box<Counterexample>> {
    let found = worlds::all_worlds()
        .into_iter()
        .find(|small| small.name == world);
    let Some(mut small) = found else {
        return Err(Box::new(Counterexample {
            world: "",
            problem: format!("no world is called {world}; there are {:?}", worlds()),
            path: String::new(),
            states: 0,
        }));
    };
    small.missing_guard = scope.without;
    let most = scope.surprises_max.unwrap_or(small.surprises_max);
    let mut explored = Vec::new();
    // Fewest surprises first, so that a counterexample has as few of them as possible.
    for surprises in 0..=most {
        small.surprises_max = surprises;
        explored.push(explore_small(&small, scope.states_max)?);
    }
    Ok(explored)
}

fn explore_small(
    small: &SmallWorld,
    states_max: u64,
) -> Result<ExploreReport, Box<Counterexample>> {
    let mut search = StateSearch::new(small, states_max);
    let outcome = catch_unwind(AssertUnwindSafe(|| search.run())).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("a brain's check: {}", words.unwrap_or("a panic")))
    });
    match outcome {
        Ok(extent) => Ok(ExploreReport {
            world: small.name,
            surprises: small.surprises_max,
            states: search.states(),
            moves: search.transitions,
            rests: search.states_at_rest,
            deepest: search.deepest,
            whole: extent == SearchExtent::Whole,
        }),
        Err(problem) => Err(Box::new(Counterexample {
            world: small.name,
            problem,
            path: path_text::path_text(small, &search.path),
            states: search.states(),
        })),
    }
}
