//! A router with absurd times and lengths in its orders: spans beyond any clock, tokens beyond any
//! context, priorities at their ends.
//!
//! Owns: these draws. Never: changes the tokens to generate, or the workers. Invariant: an order's
//! valid rest leads to the same tokens, or to a refusal.

use super::{PairRng, PairWorld};
use cleave_domain::{
    Deadline, OnDeadlineMiss, Order, PrefillOrder, RequestSlo, ReserveOrder, RunOrder,
};
use std::time::Duration;

impl PairRng {
    fn lie(&mut self) -> u64 {
        match self.roll(8) {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => u64::MAX / 2,
            4 => u64::from(u32::MAX),
            _ => self.roll(2_000_000_000),
        }
    }

    fn span(&mut self) -> Duration {
        match self.roll(6) {
            0 => Duration::MAX,
            _ => Duration::from_nanos(self.lie()),
        }
    }

    fn number(&mut self) -> u32 {
        u32::try_from(self.lie()).unwrap_or(u32::MAX)
    }
}

/// A client's targets, as its router states them.
pub(crate) fn slo(rng: &mut PairRng) -> RequestSlo {
    let mut some = || rng.percent(60).then(|| rng.span());
    let [ttft, tpot, e2e] = [some(), some(), some()];
    let priorities = [i32::MIN, -1, 0, 1, i32::MAX];
    RequestSlo {
        ttft,
        tpot,
        e2e,
        priority: priorities[rng.index(priorities.len())],
        ..RequestSlo::default()
    }
}

impl PairWorld {
    /// Sends the order, with other numbers in a world of absurd orders.
    pub(crate) fn order(&mut self, to: usize, mut order: Order) {
        if let Some(rng) = &mut self.absurd_orders {
            match &mut order {
                Order::Reserve(ReserveOrder {
                    expected_output_tokens,
                    ahead_tokens,
                    waited,
                    due,
                    ..
                }) => {
                    *expected_output_tokens = rng.number();
                    // A prompt has no tokens drawn ahead.
                    if *ahead_tokens > 0 {
                        *ahead_tokens = rng.number();
                    }
                    (*waited, *due) = (rng.span(), lied(rng, *due));
                }
                Order::Run(RunOrder {
                    expected_output_tokens,
                    waited,
                    due,
                    ..
                }) => {
                    *expected_output_tokens = rng.number();
                    (*waited, *due) = (rng.span(), lied(rng, *due));
                }
                Order::Prefill(PrefillOrder { waited, due, .. }) => {
                    (*waited, *due) = (rng.span(), lied(rng, *due));
                }
                _ => {}
            }
        }
        self.world.order(to, order);
    }
}

/// Another time; as before, only a first attempt may be refused for it.
fn lied(rng: &mut PairRng, due: Option<Deadline>) -> Option<Deadline> {
    let unmet = due.map_or(OnDeadlineMiss::Serve, |due| due.unmet);
    let left = rng.percent(80).then(|| rng.span())?;
    Some(Deadline { left, unmet })
}
