//! Small worlds, explored whole.
//!
//! Owns: a search over the states of worlds that are made of the production brains: a router's and
//! four workers', with everything that is under way between them. Never: holds a second version of
//! a brain's rules; what is judged is seen from outside the brains, or asserted by their own
//! `check`. Invariant: the same world gives the same states in the same order.
//!
//! # What a world is made of
//!
//! Two prefill and two decode workers with three blocks each, one router, three requests, all with
//! the brains that serve in production; an engine that computes at once what [`crate::chaos`]'s
//! engine computes, and remembers in every cell who wrote it; streams between router and workers
//! that keep their order or break; packets between workers that arrive in any order. A move is one
//! of these things happening, or a fault. Every brain has its own clock: a clock that jumps to the
//! brain's next deadline is a fault too, so leases and timers may run out anywhere.
//!
//! Whole brains with three requests have more states than any machine holds. So each world says
//! how many *surprises* a path may have: faults, and, where so many things are under way at once
//! that all orders are too many, departures from the usual order (bounding delays: Emmi, Qadeer,
//! Rakamarić, POPL 2011). Within that bound a world is explored whole: in worlds of one request every order
//! of everything under way, with so many faults anywhere; in worlds of three, every way to depart
//! from the usual one so often.
//!
//! # What must hold
//!
//! - S1: a block has one owner: a worker gives none away that it has given to another.
//! - S2: no write lands in a block of another generation, place or writer than it was meant for.
//! - S3: a one-sided write lands only in the block it was meant for, however late: until its writer
//!   has stopped or is dead, the block is in quarantine.
//! - S4: a step reads exactly what its sequence's tokens wrote: nothing runs before everything
//!   landed.
//! - S5: a flight ends exactly once, and a client that leaves is let go at once.
//! - S6: a token continues exactly what its client has, in order; a stream that is done is whole.
//! - S7: no two attempts draw the same token of a stream differently.
//! - S8: without a fault every flight is done.
//! - S9: a flight survives as many faults as its router's budget says.
//! - L1: from every state, once faults stop, everything comes to rest: every flight has ended, every
//!   block is free, every engine idle, and the router counts nothing.
//! - L2: unless something was lost that nobody can notice but by waiting, nobody has to wait for a
//!   timer to have his blocks back.

mod guard;
mod happen;
mod lives;
mod moves;
mod print;
mod reader;
mod rest;
mod search;
mod seen;
mod small;
mod state;
mod tell;
mod work;

pub use guard::Guard;

use search::{Extent, Search};
use small::Small;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What was explored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explored {
    /// Which world.
    pub world: &'static str,
    /// Surprises on one path, at most.
    pub surprises: u8,
    /// Different states.
    pub states: u64,
    /// Moves made.
    pub moves: u64,
    /// States in which everything had come to rest.
    pub rests: u64,
    /// Moves on the longest path.
    pub deepest: usize,
    /// Whether that was all.
    pub whole: bool,
}

/// A way to break a promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counterexample {
    /// In which world.
    pub world: &'static str,
    /// What is wrong, with the number of the property.
    pub what: String,
    /// The moves that lead there, one line each.
    pub path: String,
    /// Different states seen by then.
    pub states: u64,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        writeln!(
            f,
            "world {} after {} states: {}",
            self.world, self.states, self.what
        )
    }
}

impl std::error::Error for Counterexample {}

impl fmt::Display for Explored {
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
        let extent = match whole {
            true => "the whole of it",
            false => "a part of it",
        };
        write!(
            f,
            "{world:<10} {surprises} surprises: {states:>9} states, {moves:>9} moves, {rests:>6} rests, paths of up to {deepest}: {extent}"
        )
    }
}

/// How much of a world to explore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// States at most; a search that meets more ends, and says so.
    pub states_max: u64,
    /// Surprises on one path, if not as many as the world was made for.
    pub surprises_max: Option<u8>,
    /// The guard that is taken away, to show that it matters.
    pub without: Option<Guard>,
}

impl Default for Scope {
    /// Every world as it was made.
    fn default() -> Self {
        Self {
            states_max: u64::MAX,
            surprises_max: None,
            without: None,
        }
    }
}

/// The worlds' names, in the order in which they are worth exploring.
pub fn worlds() -> Vec<&'static str> {
    small::all().iter().map(|small| small.name).collect()
}

/// Explores a world with ever more surprises; says what was explored with each number of them.
///
/// # Errors
/// The first broken promise, with the way to it, or that no world has this name.
pub fn explore(world: &str, scope: &Scope) -> Result<Vec<Explored>, Box<Counterexample>> {
    let found = small::all().into_iter().find(|small| small.name == world);
    let Some(mut small) = found else {
        return Err(Box::new(Counterexample {
            world: "",
            what: format!("no world is called {world}; there are {:?}", worlds()),
            path: String::new(),
            states: 0,
        }));
    };
    small.without = scope.without;
    let most = scope.surprises_max.unwrap_or(small.surprises_max);
    let mut explored = Vec::new();
    // The fewest surprises first: so a way to break something is as short of them as can be.
    for surprises in 0..=most {
        small.surprises_max = surprises;
        explored.push(explore_small(&small, scope.states_max)?);
    }
    Ok(explored)
}

fn explore_small(small: &Small, states_max: u64) -> Result<Explored, Box<Counterexample>> {
    let mut search = Search::new(small, states_max);
    let outcome = catch_unwind(AssertUnwindSafe(|| search.go())).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("a brain's check: {}", words.unwrap_or("a panic")))
    });
    match outcome {
        Ok(extent) => Ok(Explored {
            world: small.name,
            surprises: small.surprises_max,
            states: search.states(),
            moves: search.moves,
            rests: search.rests,
            deepest: search.deepest,
            whole: extent == Extent::Whole,
        }),
        Err(what) => Err(Box::new(Counterexample {
            world: small.name,
            what,
            path: tell::path(small, &search.path),
            states: search.states(),
        })),
    }
}
