//! A router that says whatever it likes of times and lengths: spans beyond any clock, tokens beyond any
//! context, priorities at their ends.
//!
//! Owns: these draws. Never: changes what is to be generated, or where. Invariant: what is left of an
//! order leads to the same tokens, or to a refusal.

use super::{Chaos, Dice};
use cleave_domain::{Due, DueUnmet, Order, Prefill, Reserve, Slo};
use std::time::Duration;

impl Dice {
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

/// What a client was promised, as its router says.
pub(crate) fn slo(dice: &mut Dice) -> Slo {
    let mut some = || dice.percent(60).then(|| dice.span());
    let [ttft, tpot, e2e] = [some(), some(), some()];
    let priorities = [i32::MIN, -1, 0, 1, i32::MAX];
    Slo {
        ttft,
        tpot,
        e2e,
        priority: priorities[dice.index(priorities.len())],
        ..Slo::default()
    }
}

impl Chaos {
    /// Orders it, with other numbers in a world of lies.
    pub(crate) fn order(&mut self, to: usize, mut order: Order) {
        if let Some(dice) = &mut self.lies {
            match &mut order {
                Order::Reserve(Reserve {
                    expected_output_tokens,
                    ahead_tokens,
                    waited,
                    due,
                    ..
                }) => {
                    *expected_output_tokens = dice.number();
                    // Of a prompt none are drawn ahead.
                    if *ahead_tokens > 0 {
                        *ahead_tokens = dice.number();
                    }
                    (*waited, *due) = (dice.span(), lied(dice, *due));
                }
                Order::Prefill(Prefill { waited, due, .. }) => {
                    (*waited, *due) = (dice.span(), lied(dice, *due));
                }
                _ => {}
            }
        }
        self.world.order(to, order);
    }
}

/// Another time, and what a first attempt alone may be: refused for it.
fn lied(dice: &mut Dice, due: Option<Due>) -> Option<Due> {
    let unmet = due.map_or(DueUnmet::Serve, |due| due.unmet);
    let left = dice.percent(80).then(|| dice.span())?;
    Some(Due { left, unmet })
}
