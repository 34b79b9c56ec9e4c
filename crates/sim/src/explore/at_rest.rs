//! Properties at rest, when no message is in flight.
//!
//! Owns: L1 and L2. Never: changes a state. Invariant: see `explore`.

use super::apply::PropertyCheck;
use super::state::SmallWorldState;

impl SmallWorldState {
    /// L2: with only timers left, and no loss that needs a timeout, no worker holds anything.
    pub(super) fn check_quiet(&self) -> PropertyCheck {
        if self.needs_timer || self.landed_lost && self.faults > 1 {
            return Ok(());
        }
        for body in self
            .workers
            .iter()
            .filter_map(|process| process.body.as_ref())
        {
            let held: Vec<_> = body.brain.handoffs().map(|h| h.to_string()).collect();
            if !held.is_empty() {
                return Err(format!(
                    "L2: nothing is in flight, but {} still holds {held:?}",
                    body.worker
                ));
            }
        }
        Ok(())
    }

    /// L1: no transition is left, and everything has come to its end.
    pub(super) fn check_rest(&self) -> PropertyCheck {
        for reader in self.clients.iter() {
            if reader.ending.is_none() {
                return Err(format!("L1: at rest, but {} has not ended", reader.flight));
            }
        }
        for process in &self.workers {
            let Some(body) = &process.body else {
                return Err("L1: a worker never came back".to_owned());
            };
            body.check_empty()
                .map_err(|problem| format!("L1: {problem}"))?;
            if !body.is_idle() {
                return Err(format!("L1: {} is at rest with work queued", body.worker));
            }
        }
        let open = self.router.brain.legs_open();
        if open > 0 {
            return Err(format!("L1: the router still counts {open} legs"));
        }
        if self.router.workers as usize != self.workers.len() {
            return Err(format!(
                "L1: the router knows {} workers",
                self.router.workers
            ));
        }
        Ok(())
    }
}
