//! Depth-first search over states.
//!
//! Owns: the current path and the visited states. Never: looks inside a state. Invariant: depth
//! first, the usual transition first. So the usual path from each state is followed to its end when
//! the state is first met: a state whose usual path ends nowhere or in a cycle is found, and no
//! usual path is followed twice.

use super::state::SmallWorldState;
use super::transitions::{Transition, TransitionCost};
use super::visited::{VisitOutcome, VisitedStates};
use super::worlds::SmallWorld;

/// More usual transitions in a row than any world needs to come to rest.
const USUAL_TRANSITIONS_MAX: u32 = 4_000;

#[derive(Debug)]
pub(super) struct StateSearch<'a> {
    world: &'a SmallWorld,
    states_max: u64,
    visited: VisitedStates,
    stack: Vec<SearchNode>,
    /// The transitions to the last node of the stack, and the one being applied.
    pub(super) path: Vec<(Transition, TransitionCost)>,
    pub(super) transitions: u64,
    pub(super) states_at_rest: u64,
    pub(super) deepest: usize,
}

/// A state on the current path.
#[derive(Debug)]
struct SearchNode {
    /// `None` once the last transition took it.
    state: Option<SmallWorldState>,
    print: u64,
    moves: Vec<(Transition, TransitionCost)>,
    next: usize,
    /// Usual transitions since the last unusual one.
    usual: u32,
}

/// Whether the whole world was explored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchExtent {
    /// Every state that the world's limits allow.
    Whole,
    /// The search stopped at its limit of states.
    Part,
}

impl<'a> StateSearch<'a> {
    pub(super) fn new(small: &'a SmallWorld, states_max: u64) -> Self {
        Self {
            world: small,
            states_max,
            visited: VisitedStates::new(),
            stack: Vec::new(),
            path: Vec::new(),
            transitions: 0,
            states_at_rest: 0,
            deepest: 0,
        }
    }

    pub(super) fn states(&self) -> u64 {
        self.visited.count
    }

    /// Explores; the first violation ends the search, and `path` leads to it.
    pub(super) fn run(&mut self) -> Result<SearchExtent, String> {
        let first = SmallWorldState::first(self.world)?;
        self.visit(first, 0)?;
        while let Some(node) = self.stack.last_mut() {
            let Some((transition, cost)) = node.moves.get(node.next).copied() else {
                self.stack.pop();
                self.path.pop();
                continue;
            };
            if self.visited.count >= self.states_max {
                return Ok(SearchExtent::Part);
            }
            node.next += 1;
            let last = node.next == node.moves.len();
            let state = if last {
                // The last transition takes the state: parts shared with no other state need no
                // copy.
                node.state.take()
            } else {
                node.state.clone()
            };
            let mut state = state.expect("a node has its state until its last move");
            // The first transition of a node is the usual one; any other starts a new count.
            let usual = if node.next == 1 { node.usual + 1 } else { 0 };
            self.path.push((transition, cost));
            self.transitions += 1;
            state.take(self.world, transition, cost)?;
            if !self.visit(state, usual)? {
                self.path.pop();
            }
        }
        Ok(SearchExtent::Whole)
    }

    /// Visits a state; says whether to continue from it.
    fn visit(&mut self, mut state: SmallWorldState, usual: u32) -> Result<bool, String> {
        let print = state.fingerprint();
        let look = self.visited.record(print, state.surprises_left);
        if look == VisitOutcome::Known {
            let mut path_back = self.stack.iter().rev().take(usual as usize);
            if path_back.any(|node| node.print == print) {
                return Err("L1: the usual transitions form a cycle".to_owned());
            }
            return Ok(false);
        }
        if usual > USUAL_TRANSITIONS_MAX {
            return Err(format!(
                "L1: no rest after {USUAL_TRANSITIONS_MAX} usual transitions"
            ));
        }
        let moves = state.moves(self.world);
        match moves.first() {
            None => {
                self.states_at_rest += u64::from(look == VisitOutcome::New);
                state.check_rest()?;
            }
            Some((Transition::TimePasses, _)) => state.check_quiet()?,
            Some(_) => {}
        }
        self.deepest = self.deepest.max(self.stack.len());
        self.stack.push(SearchNode {
            state: Some(state),
            print,
            moves,
            next: 0,
            usual,
        });
        Ok(true)
    }
}
