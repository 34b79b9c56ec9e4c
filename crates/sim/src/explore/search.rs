//! The search.
//!
//! Owns: the path under way and what was seen. Never: looks inside a state.
//! Invariant: depth first, the usual move first. So the usual way onward from each state is walked
//! to its end when the state is first met: a state from which it leads nowhere, or round in a
//! circle, is found, and no state's way is walked twice.

use super::moves::{Cost, Move};
use super::seen::{Look, Seen};
use super::small::Small;
use super::state::State;

/// More usual moves in a row than any world needs to come to rest.
const USUAL_MAX: u32 = 4_000;

/// See the module.
#[derive(Debug)]
pub(super) struct Search<'a> {
    small: &'a Small,
    states_max: u64,
    seen: Seen,
    stack: Vec<Node>,
    /// The moves that led to the last node of the stack, and the one being made.
    pub(super) path: Vec<(Move, Cost)>,
    pub(super) moves: u64,
    pub(super) rests: u64,
    pub(super) deepest: usize,
}

/// A state on the path under way.
#[derive(Debug)]
struct Node {
    /// Until its last move.
    state: Option<State>,
    print: u64,
    moves: Vec<(Move, Cost)>,
    next: usize,
    /// Usual moves since the last that was not.
    usual: u32,
}

/// Whether everything was explored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// Every state that the world's limits allow.
    Whole,
    /// The search was told to stop before.
    Part,
}

impl<'a> Search<'a> {
    pub(super) fn new(small: &'a Small, states_max: u64) -> Self {
        Self {
            small,
            states_max,
            seen: Seen::new(),
            stack: Vec::new(),
            path: Vec::new(),
            moves: 0,
            rests: 0,
            deepest: 0,
        }
    }

    pub(super) fn states(&self) -> u64 {
        self.seen.count
    }

    /// Explores; the first thing found wrong ends it, and `path` leads there.
    pub(super) fn go(&mut self) -> Result<Extent, String> {
        let first = State::first(self.small)?;
        self.meet(first, 0)?;
        while let Some(node) = self.stack.last_mut() {
            let Some((what, cost)) = node.moves.get(node.next).copied() else {
                self.stack.pop();
                self.path.pop();
                continue;
            };
            if self.seen.count >= self.states_max {
                return Ok(Extent::Part);
            }
            node.next += 1;
            let last = node.next == node.moves.len();
            let state = match last {
                // Nobody needs it any more: what it shares with nobody need not be copied.
                true => node.state.take(),
                false => node.state.clone(),
            };
            let mut state = state.expect("a node has its state until its last move");
            let usual = match node.next == 1 {
                true => node.usual + 1,
                false => 0,
            };
            self.path.push((what, cost));
            self.moves += 1;
            state.take(self.small, what, cost)?;
            if !self.meet(state, usual)? {
                self.path.pop();
            }
        }
        Ok(Extent::Whole)
    }

    /// Looks at a state; says whether it is to be gone on from.
    fn meet(&mut self, mut state: State, usual: u32) -> Result<bool, String> {
        let print = state.print();
        let look = self.seen.look(print, state.left);
        if look == Look::Known {
            let mut way = self.stack.iter().rev().take(usual as usize);
            if way.any(|node| node.print == print) {
                return Err("L1: the usual way goes round in a circle".to_owned());
            }
            return Ok(false);
        }
        if usual > USUAL_MAX {
            return Err(format!("L1: no rest after {USUAL_MAX} usual moves"));
        }
        let moves = state.moves(self.small);
        match moves.first() {
            None => {
                self.rests += u64::from(look == Look::New);
                state.check_rest()?;
            }
            Some((Move::Tick, _)) => state.check_quiet()?,
            Some(_) => {}
        }
        self.deepest = self.deepest.max(self.stack.len());
        self.stack.push(Node {
            state: Some(state),
            print,
            moves,
            next: 0,
            usual,
        });
        Ok(true)
    }
}
