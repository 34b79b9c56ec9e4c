//! What must hold when little or nothing is left to happen.
//!
//! Owns: L1 and L2. Never: changes a state. Invariant: see `explore`.

use super::happen::Outcome;
use super::state::State;

impl State {
    /// L2: when only time could still change something, and nothing was lost that only waiting can
    /// tell, no worker holds anything.
    pub(super) fn check_quiet(&self) -> Outcome {
        if self.silent || self.said_twice && self.faults > 1 {
            return Ok(());
        }
        for body in self.seats.iter().filter_map(|seat| seat.body.as_ref()) {
            let held: Vec<_> = body.brain.handoffs().map(|h| h.to_string()).collect();
            if !held.is_empty() {
                return Err(format!(
                    "L2: nothing is under way, and {} still holds {held:?}",
                    body.me
                ));
            }
        }
        Ok(())
    }

    /// L1: nothing will ever happen again; everything has come to its end.
    pub(super) fn check_rest(&self) -> Outcome {
        for reader in self.readers.iter() {
            if reader.ending.is_none() {
                return Err(format!("L1: at rest, and {} has no end", reader.flight));
            }
        }
        for seat in &self.seats {
            let Some(body) = &seat.body else {
                return Err("L1: a worker never came back".to_owned());
            };
            body.check_empty().map_err(|what| format!("L1: {what}"))?;
            if !body.is_done() {
                return Err(format!("L1: {} has work and rests", body.me));
            }
        }
        let open = self.desk.brain.legs_open();
        if open > 0 {
            return Err(format!("L1: the router still counts {open} legs"));
        }
        if self.desk.workers as usize != self.seats.len() {
            return Err(format!(
                "L1: the router knows {} workers",
                self.desk.workers
            ));
        }
        Ok(())
    }
}
