//! One sequence moves once, and at every point of its way one thing happens.

use super::desk::{Flight, Verdict};
use super::stage::script::prompt;
use super::stage::{Fate, Pending, ROUTER, limits};
use super::{Chaos, Desk, Dice, World};
use cleave_domain::{Order, Role};
use cleave_sched::{Input, Writer};
use std::collections::BTreeMap;
use std::time::Duration;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Blow {
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

const BLOWS: [Blow; 14] = [
    Blow::Nothing,
    Blow::ClientLeaves,
    Blow::MoveDropped,
    Blow::TargetCancelled,
    Blow::LinkCut,
    Blow::SourceRestarts,
    Blow::TargetRestarts,
    Blow::SourceServesPrefill,
    Blow::TargetServesPrefill,
    Blow::SourceDrains,
    Blow::PacketLost,
    Blow::PacketsDoubled,
    Blow::NextFails,
    Blow::BlocksRunOut,
];

/// The world around it.
#[derive(Clone, Copy, Debug)]
struct Case {
    prompt: u32,
    ahead: u32,
    /// The target has the prompt's full blocks already.
    cached: bool,
    writer: Writer,
    steps_in_flight: u32,
    blow: Blow,
    /// After so many events from the order on. (When blocks run out, the order is what comes late.)
    after: u32,
}

const SOURCE: usize = 0;
const TARGET: usize = 1;

impl Case {
    fn world(self) -> Chaos {
        let mut chaos = Chaos {
            dice: Dice(7),
            world: World::default(),
            desk: Desk::default(),
            faults: false,
            promises: None,
            slow_disks: Dice(0),
            lies: None,
            guesses: None,
        };
        for (name, role) in [('a', Role::Both), ('e', Role::Decode)] {
            let mut limits = limits(u64::from(name == 'e') + 1, role);
            // Too few for two.
            let tight = self.blow == Blow::BlocksRunOut && name == 'a';
            limits.capacity.blocks_count = if tight { 7 } else { 10 };
            limits.writer = self.writer;
            limits.swap_blocks = 8;
            limits.steps_in_flight = self.steps_in_flight;
            chaos.world.add(name, limits);
        }
        chaos
    }

    /// Gives back whether the blow fell before all was over, and what became of the move.
    fn play(self) -> (bool, Option<Verdict>) {
        let mut chaos = self.world();
        if self.cached {
            let warm = Flight::new(prompt(1, self.prompt), 1);
            chaos.desk.flights.push(warm);
            chaos.attempt_on(0, TARGET, TARGET);
            while !chaos.desk.flights[0].ended {
                chaos.let_happen();
            }
        }
        let flight = chaos.desk.flights.len();
        chaos
            .desk
            .flights
            .push(Flight::new(prompt(1, self.prompt), 14));
        chaos.attempt_on(flight, SOURCE, SOURCE);
        if self.blow == Blow::BlocksRunOut {
            let mut urgent = Flight::new(prompt(2, 8), 16);
            urgent.priority = -1;
            chaos.desk.flights.push(urgent);
            chaos.attempt_on(flight + 1, SOURCE, SOURCE);
        }
        while chaos.desk.flights[flight].got < 2 {
            chaos.let_happen();
        }
        if self.blow != Blow::BlocksRunOut {
            chaos.move_to(flight, TARGET, self.ahead);
        }
        for _ in 0..self.after {
            chaos.let_happen();
        }
        let fell = !chaos.desk.flights[flight].ended;
        if fell {
            self.strike(&mut chaos, flight);
            chaos.listen();
        }
        chaos.heal();
        let of = &chaos.desk.flights[flight];
        let left = self.blow == Blow::ClientLeaves && fell;
        assert!(left || of.got == of.expected.len(), "{self:?}: cut short");
        let mut verdicts = chaos.desk.verdicts.iter();
        let verdict = verdicts.find(|(handoff, _)| handoff.attempt == 1);
        (fell, verdict.map(|(_, verdict)| *verdict))
    }

    fn strike(self, chaos: &mut Chaos, flight: usize) {
        let order = |chaos: &mut Chaos, to, order| chaos.world.order(to, order);
        match self.blow {
            Blow::Nothing => {}
            Blow::ClientLeaves => chaos.end(flight),
            Blow::MoveDropped => chaos.drop_any_move(),
            Blow::TargetCancelled => {
                let handoff = super::stage::script::handoff(
                    u32::try_from(flight).expect("few"),
                    chaos.desk.flights[flight].attempts - 1,
                );
                // Once it has landed, it is the one that the client reads.
                if chaos.desk.flights[flight].moving.is_some() {
                    let (router, order) = (ROUTER, Order::Cancel { handoff });
                    chaos.world.feed(TARGET, Input::Ordered { router, order });
                }
            }
            Blow::LinkCut => chaos.world.cut(SOURCE, TARGET),
            Blow::SourceRestarts => chaos.restart(SOURCE),
            Blow::TargetRestarts => chaos.restart(TARGET),
            Blow::SourceServesPrefill => {
                order(
                    chaos,
                    SOURCE,
                    Order::Serve {
                        role: Role::Prefill,
                    },
                );
            }
            Blow::TargetServesPrefill => {
                order(
                    chaos,
                    TARGET,
                    Order::Serve {
                        role: Role::Prefill,
                    },
                );
            }
            Blow::SourceDrains => chaos.world.feed(SOURCE, Input::Draining),
            Blow::PacketLost => {
                let packet = |what: &Pending| matches!(what, Pending::Packet { .. });
                let mut pending = chaos.world.pending.iter();
                let first = pending.find(|(_, what)| packet(what)).map(|(key, _)| *key);
                first.map(|key| chaos.world.pending.remove(&key));
            }
            Blow::PacketsDoubled => {
                let pending = chaos.world.pending.values();
                let packets = pending.filter(|what| matches!(what, Pending::Packet { .. }));
                for packet in packets.cloned().collect::<Vec<_>>() {
                    for late in [0, 5, 60, 400] {
                        let late = Duration::from_millis(late);
                        chaos.world.later(late, packet.clone());
                    }
                }
            }
            Blow::NextFails => {
                let first = chaos.world.pending.keys().next().copied();
                if let Some(key) = first {
                    chaos.perform(key, Fate::Damaged);
                }
            }
            Blow::BlocksRunOut => {
                let able = chaos.desk.flights[flight].landed;
                if able {
                    chaos.move_to(flight, TARGET, self.ahead);
                }
            }
        }
    }
}

/// Lengths on both sides of a block's end; room for no token, for some and for more than are drawn.
#[test]
fn a_sequence_that_moves_survives_one_blow_at_any_point() {
    let mut seen: BTreeMap<(Blow, Option<&str>), u32> = BTreeMap::new();
    for blow in BLOWS {
        for (prompt, ahead) in [(3, 0), (4, 9), (5, 1), (6, 3), (7, 9), (8, 0), (9, 20)] {
            for (cached, writer, steps_in_flight) in [
                (false, Writer::Receiver, 1),
                (true, Writer::Receiver, 1),
                (true, Writer::Sender, 1),
                (false, Writer::Receiver, 2),
                (true, Writer::Receiver, 2),
            ] {
                for after in 0.. {
                    let case = Case {
                        prompt,
                        ahead,
                        cached,
                        writer,
                        steps_in_flight,
                        blow,
                        after,
                    };
                    let (fell, verdict) = case.play();
                    let verdict = verdict.map(|verdict| match verdict {
                        Verdict::Stayed => "stayed",
                        Verdict::Landed => "landed",
                    });
                    *seen.entry((blow, verdict)).or_default() += 1;
                    if !fell || blow == Blow::Nothing {
                        break;
                    }
                }
            }
        }
    }
    for blow in BLOWS {
        let landed = seen.get(&(blow, Some("landed")));
        assert!(landed.is_some(), "{blow:?} let no move land: {seen:?}");
    }
    for blow in [
        Blow::MoveDropped,
        Blow::TargetCancelled,
        Blow::LinkCut,
        Blow::NextFails,
        Blow::BlocksRunOut,
    ] {
        let stayed = seen.get(&(blow, Some("stayed")));
        assert!(stayed.is_some(), "{blow:?} made no sequence stay: {seen:?}");
    }
}
