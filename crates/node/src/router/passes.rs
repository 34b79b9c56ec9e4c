//! Passes on their way from the workers that made them to those that may use them.
//!
//! Owns: which are kept, and until when. Never: makes or checks one. Invariant: each that is kept is for a leg
//! that its maker has not let go, and whose sender was not told of it.
//!
//! A maker says a pass before it answers the order to reserve, by the same line. So none comes after the
//! refusal or release that ends it, and none after the loss of its maker's connection.

use super::orders;
use cleave_domain::{HandoffId, Order, Report, WorkerRef};
use cleave_transfer::{Pass, Purse};
use std::collections::BTreeMap;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Passes {
    made: BTreeMap<WorkerRef, Purse>,
    count: usize,
}

impl Passes {
    /// A worker that is connected made one.
    pub(super) fn made(&mut self, maker: WorkerRef, (handoff, pass): (HandoffId, Pass)) {
        let purse = self.made.entry(maker).or_default();
        self.count -= purse.len();
        purse.put(handoff, pass);
        self.count += purse.len();
    }

    /// A worker said this.
    pub(super) fn reported(&mut self, by: WorkerRef, report: &Report) {
        if let Report::Refused { handoff, .. } | Report::Released { handoff } = report {
            self.take(by, *handoff);
        }
    }

    /// What a worker that is about to hear this order needs for it; into its own pool it needs none.
    pub(super) fn ordered(&mut self, to: WorkerRef, order: &Order) -> Option<(HandoffId, Pass)> {
        let (handoff, target) = orders::sends(order)?;
        let pass = self.take(target, handoff)?;
        (target != to).then_some((handoff, pass))
    }

    /// A worker is connected no longer.
    pub(super) fn lost(&mut self, maker: WorkerRef) {
        let purse = self.made.remove(&maker);
        self.count -= purse.map_or(0, |purse| purse.len());
    }

    /// How many are kept.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    fn take(&mut self, maker: WorkerRef, handoff: HandoffId) -> Option<Pass> {
        let pass = self.made.get_mut(&maker)?.take(handoff)?;
        self.count -= 1;
        Some(pass)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use cleave_domain::{FlightId, Incarnation, Migrate, Refusal, Target, WorkerId};
    use cleave_transfer::PASS_BYTES;

    const MAKER: WorkerRef = WorkerRef {
        worker: WorkerId(1),
        incarnation: Incarnation(1),
    };
    const OTHER: WorkerRef = WorkerRef {
        worker: WorkerId(2),
        ..MAKER
    };
    const PASS: Pass = Pass([7; PASS_BYTES]);

    fn handoff(flight: u64) -> HandoffId {
        HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        }
    }

    fn migrate(handoff: HandoffId) -> Order {
        Order::Migrate(Migrate {
            handoff,
            of: handoff,
            target: Target {
                worker: MAKER,
                present: 0,
                blocks: Vec::new(),
            },
            tokens: 0,
        })
    }

    #[test]
    fn passes_of_hand_offs_that_were_over_piled_up() {
        let mut passes = Passes::default();
        for flight in 0..300 {
            let handoff = handoff(flight);
            passes.made(MAKER, (handoff, PASS));
            match flight % 3 {
                0 => {
                    let order = migrate(handoff);
                    let told = passes.ordered(OTHER, &order);
                    assert_eq!(told, Some((handoff, PASS)));
                    assert_eq!(passes.ordered(OTHER, &order), None, "it is told once");
                    passes.made(MAKER, (handoff, PASS));
                    let told = passes.ordered(MAKER, &order);
                    assert_eq!(told, None, "nobody needs one for his own pool");
                }
                1 => {
                    let refusal = Refusal::WrongWorker;
                    passes.reported(MAKER, &Report::Refused { handoff, refusal });
                }
                _ => {
                    // The sender's word says nothing of what the maker has.
                    passes.reported(OTHER, &Report::Released { handoff });
                    assert_eq!(passes.count(), 1);
                    passes.reported(MAKER, &Report::Released { handoff });
                }
            }
            assert_eq!(passes.count(), 0, "after {flight}");
            assert!(passes.made[&MAKER].is_empty());
        }
        passes.made(MAKER, (handoff(1), PASS));
        passes.made(MAKER, (handoff(2), PASS));
        assert_eq!(passes.count(), 2);
        passes.lost(MAKER);
        assert_eq!((passes.count(), passes.made.len()), (0, 0));
    }
}
