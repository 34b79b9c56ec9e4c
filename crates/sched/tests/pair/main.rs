//! A few workers, a router's desk and a world that the seed draws: everything that is under way may
//! happen in any order; packets get lost, doubled and damaged, links break, workers restart, clients
//! leave. Then the faults stop, and everything must come to its end.
//!
//! The judge is outside: the stage's engine panics at KV that is not the sequence's own, the desk
//! compares every token with the oracle's, and in the end no block may be held anywhere.

mod below;
mod desk;
mod every;
mod future;
mod last_block;
mod lies;
#[path = "../stage/mod.rs"]
mod stage;

use cleave_domain::{Order, Prices, Role, RowPrice, Time};
use cleave_sched::{Input, Writer};
use desk::Desk;
use proptest::prelude::{ProptestConfig, any};
use proptest::proptest;
use stage::script::guessing;
use stage::{Fate, Pending, ROUTER, World, limits};
use std::collections::BTreeSet;
use std::time::Duration;

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }

    fn between(&mut self, low: u32, high: u32) -> u32 {
        low + u32::try_from(self.roll(u64::from(high - low + 1))).expect("small")
    }

    fn index(&mut self, of: usize) -> usize {
        usize::try_from(self.roll(of as u64)).expect("small")
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.roll(100) < chance
    }
}

struct Chaos {
    dice: Dice,
    world: World,
    desk: Desk,
    faults: bool,
    /// What flights are promised is drawn from it, if anything is.
    promises: Option<Dice>,
    /// Whether a disk is slow, or has something wrong on it, is drawn from it.
    slow_disks: Dice,
    /// What a router says of times and lengths is drawn from it, if that is a liar.
    lies: Option<Dice>,
    /// Whether a flight repeats itself is drawn from it, where workers guess.
    guesses: Option<Dice>,
}

/// About what steps take here.
fn prices() -> Prices {
    let rows = [(1, 7_000_000), (4, 9_000_000), (12, 14_000_000)];
    Prices {
        rows: rows.map(|(rows, nanos)| RowPrice { rows, nanos }).to_vec(),
        pair_picos: 2_000_000,
        context_picos: 10_000_000,
        draw_nanos: 100_000,
        ..Prices::default()
    }
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let mut chaos = Self {
            dice: Dice(seed),
            world: World::default(),
            desk: Desk::default(),
            faults: true,
            promises: None,
            slow_disks: Dice(seed ^ 0x9fb2_1c65_1e98_df25),
            lies: None,
            guesses: None,
        };
        let dice = &mut chaos.dice;
        // In some worlds nothing breaks, and sequences live long enough to move more than once.
        chaos.faults = dice.percent(60);
        let shape = dice.roll(4);
        let count = dice.between(1, 5);
        let cache = dice.percent(70);
        let swap = dice.between(0, 1);
        let writer = if dice.percent(40) {
            Writer::Sender
        } else {
            Writer::Receiver
        };
        // Drawn apart: in half of the worlds work has prices, and flights were promised something.
        let mut promises = Dice(seed ^ 0x5851_f42d_4c95_7f2d);
        let priced = promises.percent(50);
        chaos.promises = priced.then_some(promises);
        let mut lies = Dice(seed ^ 0x2545_f491_4f6c_dd1d);
        chaos.lies = lies.percent(25).then_some(lies);
        // Drawn apart too.
        let steps_in_flight = Dice(seed ^ 0x6c62_272e_07bb_0142).between(1, 2);
        let mut guesses = Dice(seed ^ 0x1b87_3593_cc9e_2d51);
        chaos.guesses = guesses.percent(50).then_some(guesses);
        // And what is kept below the pools: in half of the worlds something is.
        let mut kept = Dice(seed ^ 0x1405_7b7e_f767_814f);
        let below = match kept.percent(50) {
            true => (kept.between(1, 16), kept.between(0, 20)),
            false => (0, 0),
        };
        for i in 0..count {
            let role = match (shape, i % 2) {
                (0, _) => Role::Both,
                (_, 0) if count > 1 => Role::Prefill,
                (_, 1) => Role::Decode,
                _ => Role::Both,
            };
            let mut limits = limits(u64::from(i) + 1, role);
            limits.capacity.blocks_count = dice.between(3, 24);
            limits.capacity.slots_count = dice.between(1, 4);
            limits.capacity.step_tokens_max = dice.between(3, 12);
            limits.capacity.context_tokens_max = dice.between(20, 64);
            limits.queue_max = dice.between(1, 5);
            limits.prefix_cache = cache;
            limits.swap_blocks = swap * dice.between(0, 12);
            limits.writer = writer;
            if priced {
                limits.prices = prices();
            }
            limits.steps_in_flight = steps_in_flight;
            if let Some(guesses) = &mut chaos.guesses {
                limits.speculation = guessing(guesses.between(0, 6));
            }
            (limits.host_blocks, limits.disk_blocks) = below;
            if below.0 > 0 {
                limits.capacity.blocks_count += 8;
            }
            let name = char::from(b'a' + u8::try_from(i).expect("few"));
            chaos.world.add(name, limits);
        }
        chaos
    }

    /// A disk that takes longer than anybody waits for it.
    fn hold_up_fetch(&mut self) {
        let fetches = |what: &Pending| matches!(what, Pending::Fetch { .. });
        let fetched = self.world.pending.values().any(fetches);
        if self.faults && fetched && self.slow_disks.percent(10) {
            self.pass(Duration::from_millis(300));
        }
    }

    fn act(&mut self) {
        self.hold_up_fetch();
        match self.dice.roll(100) {
            0..=9 if self.desk.flights.len() < 20 => self.submit(),
            0..=9 => self.move_any(),
            10..=81 => self.perform_any(),
            82..=84 => self.move_any(),
            85 if self.dice.percent(30) => self.drop_any_move(),
            85..=94 => {
                let millis = u64::from(self.dice.between(1, 40));
                let millis = if self.dice.percent(1) { 1100 } else { millis };
                self.pass(Duration::from_millis(millis));
            }
            95 => self.cancel_any(),
            96 if self.faults && self.dice.percent(30) => self.cut_any(),
            97 if self.faults && self.dice.percent(20) => self.restart_any(),
            98 if self.faults && self.dice.percent(10) => {
                let at = self.dice.index(self.world.machines.len());
                self.world.feed(at, Input::RouterLost { router: ROUTER });
                self.world.feed(at, Input::RouterJoined { router: ROUTER });
                self.listen();
                self.retry_all_on(at);
            }
            99 if self.dice.percent(20) => {
                let to = self.dice.index(self.world.machines.len());
                let roles = [Role::Prefill, Role::Decode, Role::Both];
                let role = roles[self.dice.index(roles.len())];
                self.world.order(to, Order::Serve { role });
            }
            _ => {}
        }
    }

    // === the world ===

    /// Lets something happen that is under way; what goes to one worker from its router keeps its
    /// order, as on one stream.
    fn perform_any(&mut self) {
        let mut seen = BTreeSet::new();
        let first = |(key, what): (&(Time, u64), &Pending)| match what {
            Pending::Order { to, .. } => seen.insert(*to).then_some(*key),
            _ => Some(*key),
        };
        let mut in_order: Vec<_> = self.world.pending.iter().collect();
        in_order.sort_unstable_by_key(|((_, made), _)| *made);
        let able: Vec<_> = in_order.into_iter().filter_map(first).collect();
        if able.is_empty() {
            return;
        }
        let key = able[self.dice.index(able.len())];
        let what = self.world.pending[&key].clone();
        let packet = matches!(what, Pending::Packet { .. });
        let doubles = packet || matches!(what, Pending::Order { .. });
        if self.faults && packet && self.dice.percent(3) {
            self.world.pending.remove(&key);
            return;
        }
        if self.faults && doubles && self.dice.percent(4) {
            self.world.later(Duration::from_millis(3), what.clone());
        }
        let damaged = self.faults && self.dice.percent(2);
        let fetched = matches!(what, Pending::Fetch { .. });
        let damaged = damaged || self.faults && fetched && self.slow_disks.percent(25);
        let fate = if damaged { Fate::Damaged } else { Fate::Well };
        self.perform(key, fate);
    }

    fn perform(&mut self, key: (Time, u64), fate: Fate) {
        let what = self.world.pending[&key].clone();
        self.listen();
        self.world.perform(key, fate);
        self.ordered(&what);
        self.listen();
    }

    fn pass(&mut self, span: Duration) {
        self.world.now = self.world.now + span;
        for at in 0..self.world.machines.len() {
            let due = self.world.machines[at].brain.deadline();
            // An early wake-up is harmless.
            if due.is_some_and(|due| due <= self.world.now) || self.dice.percent(10) {
                self.world.feed(at, Input::Woke);
            }
        }
        self.listen();
        self.renew();
    }

    fn cut_any(&mut self) {
        let count = self.world.machines.len();
        let (a, b) = (self.dice.index(count), self.dice.index(count));
        if a != b {
            self.world.cut(a, b);
            self.listen();
        }
    }

    fn restart_any(&mut self) {
        let at = self.dice.index(self.world.machines.len());
        self.restart(at);
    }

    fn restart(&mut self, at: usize) {
        let old = self.world.me(at);
        self.listen();
        self.world.restart(at);
        self.desk
            .open
            .retain(|(worker, life, _)| (*worker, *life) != (old.worker.0, old.incarnation.0));
        self.desk
            .unanswered
            .retain(|_, at| *at != (old.worker.0, old.incarnation.0));
        self.listen();
        self.retry_all_on(at);
    }

    /// The next thing that is due, or a while without any.
    fn let_happen(&mut self) {
        let next = self.world.pending.first_key_value().map(|(key, _)| *key);
        let soon = self.world.now + Duration::from_millis(20);
        match next {
            Some(key) if key.0 <= soon => self.perform(key, Fate::Well),
            _ => self.pass(Duration::from_millis(20)),
        }
    }

    /// No more faults: everything under way happens in its time, and every flight ends.
    fn heal(&mut self) {
        self.faults = false;
        let patience = self.world.now + Duration::from_secs(60);
        while self.world.now < patience {
            self.let_happen();
            let quiet = self.desk.open.is_empty() && self.desk.flights.iter().all(|of| of.ended);
            if quiet && self.world.pending.is_empty() {
                break;
            }
        }
        for (flight, of) in self.desk.flights.iter().enumerate() {
            assert!(of.ended, "flight {flight} never ended");
        }
        let Desk {
            open, unanswered, ..
        } = &self.desk;
        assert!(open.is_empty(), "never released: {open:?}");
        assert!(unanswered.is_empty(), "never answered: {unanswered:?}");
        self.world.check_empty();
    }
}

fn live_and_die(seed: u64, acts: u32) -> Vec<String> {
    let mut chaos = Chaos::new(seed);
    for _ in 0..acts {
        chaos.act();
    }
    chaos.heal();
    chaos.world.log
}

/// Without this, the test below could pass because nothing happened.
#[test]
fn the_worlds_reach_every_corner() {
    let mut lines = Vec::new();
    for seed in 0..150 {
        lines.extend(live_and_die(seed, 600));
    }
    for corner in [
        "note preempted",
        "note joined",
        "note repeated",
        "note frame discarded",
        "note cancel freed",
        "Failed(Corrupt)",
        "LeaseExpired",
        "Rejected",
        "leg failed #0.0 LinkLost",
        "OutOfBlocks",
        "on fire",
        "could not be read",
        "could not be written",
        "abandoned #1.0 Finished",
        "QueueFull",
        "NoBlocks",
        "TooLong",
        "ScoreAndSample",
        "Length",
        "Stop",
        "DAMAGED",
        "router lost",
        "present 1",
        "Dropped",
        "note moved out",
        "tell stayed",
        "tell crowded",
        "serve prefill",
        "swap out",
        "swap in",
        "swap drop",
        "swapped out #",
        "swapped in #",
        "send stop #",
        "send stopped #",
        "severed",
        "> shelve ",
        "> write on ",
        "> fetch #",
        "found on disk",
    ] {
        let count = lines.iter().filter(|line| line.contains(corner)).count();
        assert!(count > 0, "no world had {corner:?}");
    }
}

/// Same seed, same bytes.
#[test]
fn a_world_is_the_same_twice() {
    for seed in 0..10 {
        assert_eq!(live_and_die(seed, 400), live_and_die(seed, 400));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_leaked_stranded_or_overwritten_whatever_happens(
        seed in any::<u64>(),
        acts in 0..900_u32,
    ) {
        live_and_die(seed, acts);
    }
}
