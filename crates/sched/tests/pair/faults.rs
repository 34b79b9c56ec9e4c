//! One sequence moves once, and one fault happens, at every point of its way.

use super::router_stub::{MoveVerdict, StubFlight};
use super::{PairRng, PairWorld, RouterStub, StageWorld};
use crate::stage::script::prompt;
use crate::stage::{ROUTER, StageEvent, StageEventOutcome, limits};
use cleave_domain::{Order, Role};
use cleave_sched::{PoolWriter, WorkerInput};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MoveFault {
    Nothing,
    ClientLeaves,
    MoveDropped,
    TargetCancelled,
    LinkCut,
    SourceRestarts,
    TargetRestarts,
    SourceServesPrefill,
    TargetServesPrefill,
    SourceDrains,
    PacketLost,
    PacketsDoubled,
    NextFails,
    BlocksRunOut,
}

const BLOWS: [MoveFault; 14] = [
    MoveFault::Nothing,
    MoveFault::ClientLeaves,
    MoveFault::MoveDropped,
    MoveFault::TargetCancelled,
    MoveFault::LinkCut,
    MoveFault::SourceRestarts,
    MoveFault::TargetRestarts,
    MoveFault::SourceServesPrefill,
    MoveFault::TargetServesPrefill,
    MoveFault::SourceDrains,
    MoveFault::PacketLost,
    MoveFault::PacketsDoubled,
    MoveFault::NextFails,
    MoveFault::BlocksRunOut,
];

/// The world around the move.
#[derive(Clone, Copy, Debug)]
struct MoveFaultCase {
    prompt: u32,
    ahead: u32,
    /// The target has the prompt's full blocks already.
    cached: bool,
    writer: PoolWriter,
    steps_in_flight: u32,
    fault: MoveFault,
    /// Number of events after the order at which the fault happens. (For `BlocksRunOut`, the order
    /// itself comes late.)
    after: u32,
}

const SOURCE: usize = 0;
const TARGET: usize = 1;

impl MoveFaultCase {
    fn world(self) -> PairWorld {
        let mut chaos = PairWorld {
            rng: PairRng::new(7),
            world: StageWorld::default(),
            router: RouterStub::default(),
            faults: false,
            slo_rng: None,
            slow_disks: PairRng::new(0),
            absurd_orders: None,
            draft_rng: None,
            state_rng: None,
        };
        for (name, role) in [('a', Role::Both), ('e', Role::Decode)] {
            let mut limits = limits(u64::from(name == 'e') + 1, role);
            // Too few blocks for two sequences.
            let tight = self.fault == MoveFault::BlocksRunOut && name == 'a';
            limits.capacity.blocks_count = if tight { 7 } else { 10 };
            limits.writer = self.writer;
            limits.swap_blocks = 8;
            limits.steps_in_flight = self.steps_in_flight;
            chaos.world.add(name, limits);
        }
        chaos
    }

    /// Returns whether the fault happened before the end, and the verdict of the move.
    fn play(self) -> (bool, Option<MoveVerdict>) {
        let mut chaos = self.world();
        if self.cached {
            let warm = StubFlight::new(prompt(1, self.prompt), 1);
            chaos.router.flights.push(warm);
            chaos.attempt_on(0, TARGET, TARGET);
            while !chaos.router.flights[0].ended {
                chaos.advance();
            }
        }
        let flight = chaos.router.flights.len();
        chaos
            .router
            .flights
            .push(StubFlight::new(prompt(1, self.prompt), 14));
        chaos.attempt_on(flight, SOURCE, SOURCE);
        if self.fault == MoveFault::BlocksRunOut {
            let mut urgent = StubFlight::new(prompt(2, 8), 16);
            urgent.priority = -1;
            chaos.router.flights.push(urgent);
            chaos.attempt_on(flight + 1, SOURCE, SOURCE);
        }
        while chaos.router.flights[flight].got < 2 {
            chaos.advance();
        }
        if self.fault != MoveFault::BlocksRunOut {
            chaos.move_to(flight, TARGET, self.ahead);
        }
        for _ in 0..self.after {
            chaos.advance();
        }
        let fell = !chaos.router.flights[flight].ended;
        if fell {
            self.inject(&mut chaos, flight);
            chaos.listen();
        }
        chaos.heal();
        let of = &chaos.router.flights[flight];
        let left = self.fault == MoveFault::ClientLeaves && fell;
        assert!(left || of.got == of.expected.len(), "{self:?}: cut short");
        let mut verdicts = chaos.router.verdicts.iter();
        let verdict = verdicts.find(|(handoff, _)| handoff.attempt == 1);
        (fell, verdict.map(|(_, verdict)| *verdict))
    }

    fn inject(self, chaos: &mut PairWorld, flight: usize) {
        let order = |chaos: &mut PairWorld, to, order| chaos.world.order(to, order);
        match self.fault {
            MoveFault::Nothing => {}
            MoveFault::ClientLeaves => chaos.end(flight),
            MoveFault::MoveDropped => chaos.drop_any_move(),
            MoveFault::TargetCancelled => {
                let handoff = crate::stage::script::handoff(
                    u32::try_from(flight).expect("few"),
                    chaos.router.flights[flight].attempts - 1,
                );
                // After the landing it is the attempt that the client reads.
                if chaos.router.flights[flight].moving.is_some() {
                    let (router, order) = (ROUTER, Order::Cancel { handoff });
                    chaos
                        .world
                        .feed(TARGET, WorkerInput::Ordered { router, order });
                }
            }
            MoveFault::LinkCut => chaos.world.cut(SOURCE, TARGET),
            MoveFault::SourceRestarts => chaos.restart(SOURCE),
            MoveFault::TargetRestarts => chaos.restart(TARGET),
            MoveFault::SourceServesPrefill => {
                order(
                    chaos,
                    SOURCE,
                    Order::Serve {
                        role: Role::Prefill,
                    },
                );
            }
            MoveFault::TargetServesPrefill => {
                order(
                    chaos,
                    TARGET,
                    Order::Serve {
                        role: Role::Prefill,
                    },
                );
            }
            MoveFault::SourceDrains => chaos.world.feed(SOURCE, WorkerInput::Draining),
            MoveFault::PacketLost => {
                let packet = |event: &StageEvent| matches!(event, StageEvent::Packet { .. });
                let mut pending = chaos.world.pending.iter();
                let first = pending
                    .find(|(_, event)| packet(event))
                    .map(|(key, _)| *key);
                first.map(|key| chaos.world.pending.remove(&key));
            }
            MoveFault::PacketsDoubled => {
                let pending = chaos.world.pending.values();
                let packets = pending.filter(|event| matches!(event, StageEvent::Packet { .. }));
                for packet in packets.cloned().collect::<Vec<_>>() {
                    for late in [0, 5, 60, 400] {
                        let late = Duration::from_millis(late);
                        chaos.world.later(late, packet.clone());
                    }
                }
            }
            MoveFault::NextFails => {
                let first = chaos.world.pending.keys().next().copied();
                if let Some(key) = first {
                    chaos.perform(key, StageEventOutcome::Damaged);
                }
            }
            MoveFault::BlocksRunOut => {
                let able = chaos.router.flights[flight].landed;
                if able {
                    chaos.move_to(flight, TARGET, self.ahead);
                }
            }
        }
    }
}

/// Lengths on both sides of a block's end; room for no token, for some and for more than are drawn.
#[test]
fn a_move_survives_one_fault_at_any_point() {
    let mut verdicts: BTreeMap<(MoveFault, Option<&str>), u32> = BTreeMap::new();
    for fault in BLOWS {
        for (prompt, ahead) in [(3, 0), (4, 9), (5, 1), (6, 3), (7, 9), (8, 0), (9, 20)] {
            for (cached, writer, steps_in_flight) in [
                (false, PoolWriter::Receiver, 1),
                (true, PoolWriter::Receiver, 1),
                (true, PoolWriter::Sender, 1),
                (false, PoolWriter::Receiver, 2),
                (true, PoolWriter::Receiver, 2),
            ] {
                for after in 0.. {
                    let case = MoveFaultCase {
                        prompt,
                        ahead,
                        cached,
                        writer,
                        steps_in_flight,
                        fault,
                        after,
                    };
                    let (fell, verdict) = case.play();
                    let verdict = verdict.map(|verdict| match verdict {
                        MoveVerdict::Stayed => "stayed",
                        MoveVerdict::Landed => "landed",
                    });
                    *verdicts.entry((fault, verdict)).or_default() += 1;
                    if !fell || fault == MoveFault::Nothing {
                        break;
                    }
                }
            }
        }
    }
    for fault in BLOWS {
        let landed = verdicts.get(&(fault, Some("landed")));
        assert!(landed.is_some(), "{fault:?} let no move land: {verdicts:?}");
    }
    for fault in [
        MoveFault::MoveDropped,
        MoveFault::TargetCancelled,
        MoveFault::LinkCut,
        MoveFault::NextFails,
        MoveFault::BlocksRunOut,
    ] {
        let aborted = verdicts.get(&(fault, Some("stayed")));
        assert!(
            aborted.is_some(),
            "{fault:?} made no sequence stay: {verdicts:?}"
        );
    }
}
