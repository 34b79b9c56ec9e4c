//! A whole world from a seed: workers, routers, requests, prices, faults.
//!
//! Owns: every size, probability and limit. Never: draws anything once the world runs, except from
//! the dice it hands over. Invariant: printed before it runs, and the same for the same seed.

mod text;

use crate::damage::Flips;
use crate::dice::{Dice, mix};
use crate::disk::Below;
use crate::engine::Price;
use crate::guesses::draw_speculation;
use cleave_domain::{
    Capacity, Fingerprint, Request, Role, Sampling, Slo, StopRules, Time, TokenId,
    WorkerDescription,
};
use cleave_kv::Writer;
use cleave_router::Command;
use cleave_sched::Lookup;
use std::sync::Arc;
use std::time::Duration;

/// Whether anything is to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weather {
    /// Nothing is, in a fifth of the worlds.
    Calm,
    Rough,
}

/// Tells the dice of steps in flight from the others of a seed.
const AHEAD: u64 = 0x6c62_272e_07bb_0142;

/// Everything a run depends on.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) seed: u64,
    /// What was meant.
    weather: Weather,
    pub(crate) workers: Vec<WorkerDescription>,
    pub(crate) routers_count: usize,
    pub(crate) requests: Vec<Arrival>,
    pub(crate) faults: Vec<(Time, Fault)>,
    pub(crate) price: Price,
    pub(crate) wire: Wire,
    pub(crate) flips: Flips,
    pub(crate) router: cleave_router::Limits,
    pub(crate) lease: Duration,
    pub(crate) stall_max: Duration,
    /// How long a step may take before its worker says that it is stuck.
    pub(crate) step_max: Duration,
    /// Host memory of each worker, in blocks.
    pub(crate) swap_blocks: u32,
    pub(crate) below: Below,
    /// How blocks get from pool to pool.
    pub(crate) writer: Writer,
    /// How long a worker may say nothing before its routers take it for lost.
    pub(crate) silence_max: Duration,
    /// What operators want, also in worlds without a fault.
    pub(crate) wishes: Vec<Wish>,
    pub(crate) prefix_cache: bool,
    /// Steps that engines take at a time.
    pub(crate) steps_in_flight: u32,
    /// In half of the worlds steps verify guesses, and about half of the requests repeat themselves.
    pub(crate) speculation: Option<Lookup>,
    /// When every fault is over.
    pub(crate) heal_at: Time,
}

/// A request and its client.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    pub(crate) at: Time,
    pub(crate) router: usize,
    pub(crate) request: Arc<Request>,
    /// The client leaves then, if it still waits.
    pub(crate) leaves: Option<Time>,
    /// The client takes nothing from then on, for so long.
    pub(crate) stalls: Option<(Time, Duration)>,
}

/// What an operator wants of a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) at: Time,
    pub(crate) router: usize,
    pub(crate) worker: usize,
    pub(crate) command: Command,
}

/// What links cost and how often they misbehave, while faults last.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub(crate) latency: Duration,
    /// Added to each message, at most.
    pub(crate) jitter: Duration,
    pub(crate) nanos_per_byte: u64,
    /// Until a side notices that the other is gone, at most.
    pub(crate) notice: Duration,
    /// Frames damaged, of a thousand.
    pub(crate) damage: u32,
    /// Frames that name a block they were never given, of a thousand: a writer of the past.
    pub(crate) stray: u32,
    /// Packets lost without the link breaking, of a thousand.
    pub(crate) loss: u32,
    /// Packets that come twice, of a thousand.
    pub(crate) twice: u32,
    /// Packets that overtake, of a thousand: a link may be several streams.
    pub(crate) overtake: u32,
    /// Steps, reads and writes that the device breaks, of a thousand.
    pub(crate) broken: u32,
}

/// What goes wrong at once.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The process dies and starts again later.
    Crash { worker: usize, back: Duration },
    /// The process stands still: SIGSTOP, then SIGCONT.
    Freeze { worker: usize, span: Duration },
    /// Asked to end; starts again once it is done.
    Drain { worker: usize, back: Duration },
    /// The link between two workers breaks and stays down.
    Cut {
        pair: (usize, usize),
        span: Duration,
    },
    /// A worker and a router lose sight of each other.
    Part {
        router: usize,
        worker: usize,
        span: Duration,
    },
    /// The engine stands still in whatever it does.
    Hang { worker: usize, span: Duration },
    /// A worker and everybody else lose sight of each other.
    Isolate { worker: usize, span: Duration },
    /// A router dies, and its clients' connections with it; another life starts later.
    Restart { router: usize, back: Duration },
    /// Messages between routers and workers take so much longer for a while.
    Slow { extra: Duration, span: Duration },
}

impl World {
    pub(crate) fn draw(seed: u64) -> Self {
        let dice = &mut Dice::new(seed);
        // There nothing may fail.
        let weather = match dice.chance(200) {
            true => Weather::Calm,
            false => Weather::Rough,
        };
        let window = *dice.pick(&[2_000, 50_000, 300_000, 1_000_000, 3_000_000]);
        let capacity = draw_capacity(dice);
        let workers = draw_workers(dice, capacity);
        let routers_count = if dice.chance(250) { 2 } else { 1 };
        let mut requests = draw_requests(dice, &capacity, (routers_count, window));
        let faults = match weather {
            Weather::Calm => Vec::new(),
            Weather::Rough => draw_faults(dice, (workers.len(), routers_count), window),
        };
        let wishes = draw_wishes(dice, (&workers, routers_count), (window, weather));
        let lease_max = *dice.pick(&[60_000, 500_000, 3_000_000]);
        let lease = dice.micros(30_000, lease_max);
        let ends = faults.iter().map(|(at, fault)| *at + fault.span());
        let heal_at = ends
            .chain(requests.iter().map(|r| r.at))
            .chain(
                requests
                    .iter()
                    .filter_map(|r| r.stalls)
                    .map(|(at, span)| at + span),
            )
            .chain(wishes.iter().map(|wish| wish.at))
            .max()
            .unwrap_or_default();
        let speculation = draw_speculation(seed, &mut requests);
        Self {
            seed,
            weather,
            routers_count,
            price: draw_price(dice),
            wire: draw_wire(dice, weather),
            flips: Flips::draw(seed, weather),
            router: draw_router(dice, lease, u32::from(weather == Weather::Calm)),
            lease,
            stall_max: dice.micros(300_000, 2_000_000),
            prefix_cache: dice.chance(800),
            step_max: dice.micros(20_000, 500_000),
            // Drawn apart, so that the rest of the world is the same either way.
            steps_in_flight: 1 + (mix(seed ^ AHEAD) & 1) as u32,
            speculation,
            swap_blocks: *dice.pick(&[0, 0, 2, 8, 64]),
            below: Below::draw(seed),
            writer: match dice.chance(250) {
                true => Writer::Sender,
                false => Writer::Receiver,
            },
            silence_max: dice.micros(50_000, 1_000_000),
            wishes,
            heal_at: heal_at + Duration::from_millis(1),
            workers,
            requests,
            faults,
        }
    }

    /// How long a cancelled flight's blocks may stay held where nothing is at fault: messages to
    /// both workers and back, whatever their engines are in the middle of, and what the links have
    /// already taken.
    pub(crate) fn cancel_max(&self) -> Duration {
        let capacity = &self.workers[0].capacity;
        let Price {
            step,
            prefill_token,
            decode_sequence,
            context_token,
            copy,
            write_bytes: _,
        } = self.price;
        let steps = u64::from(1 + self.steps_in_flight);
        let slots = u64::from(capacity.slots_count);
        let context = slots * u64::from(capacity.context_tokens_max) * context_token;
        let tokens = u64::from(capacity.step_tokens_max) * prefill_token.max(decode_sequence);
        let copies = 4 * u64::from(capacity.blocks_count) * copy;
        let engine = Duration::from_nanos(steps * (step + tokens + context) + copies);
        let pool_bytes = u64::from(capacity.blocks_count) * u64::from(capacity.block_bytes + 128);
        let link = Duration::from_nanos(pool_bytes * self.wire.nanos_per_byte);
        4 * (self.wire.latency + self.wire.jitter) + engine + link
    }

    /// Nothing goes wrong, and nobody leaves: then every word is answered in its time.
    pub(crate) fn undisturbed(&self) -> bool {
        self.calm() && self.wishes.is_empty()
    }

    pub(crate) fn calm(&self) -> bool {
        let harmless = self.wire.harm() == 0 && !self.flips.any();
        self.weather == Weather::Calm && self.faults.is_empty() && harmless
    }
}

impl Wire {
    /// Whatever may make a hand-off fail.
    fn harm(&self) -> u32 {
        self.damage + self.stray + self.loss + self.broken
    }
}

impl Fault {
    fn span(self) -> Duration {
        match self {
            Self::Crash { back: span, .. }
            | Self::Drain { back: span, .. }
            | Self::Restart { back: span, .. }
            | Self::Hang { span, .. }
            | Self::Isolate { span, .. }
            | Self::Freeze { span, .. }
            | Self::Cut { span, .. }
            | Self::Part { span, .. }
            | Self::Slow { span, .. } => span,
        }
    }
}

fn draw_capacity(dice: &mut Dice) -> Capacity {
    let block_tokens = *dice.pick(&[1, 2, 4, 8, 16]);
    let context_tokens_max = dice.count(16, 120);
    let whole = context_tokens_max.div_ceil(block_tokens);
    // From a pool that cannot hold one longest sequence to one that holds six.
    let tenths = *dice.pick(&[8, 10, 13, 20, 30, 60]);
    let blocks_count = (whole * tenths / 10).max(2);
    Capacity {
        block_tokens,
        block_bytes: block_tokens * 8,
        blocks_count,
        slots_count: dice.count(1, 8),
        step_tokens_max: dice.count(8, 64),
        context_tokens_max,
    }
}

fn draw_workers(dice: &mut Dice, capacity: Capacity) -> Vec<WorkerDescription> {
    let mut roles = Vec::new();
    let shape = dice.count(0, 9);
    if shape < 7 {
        roles.extend((0..dice.count(1, 3)).map(|_| Role::Prefill));
        roles.extend((0..dice.count(1, 3)).map(|_| Role::Decode));
    }
    if shape >= 5 {
        roles.extend((0..dice.count(1, 3)).map(|_| Role::Both));
    }
    let queue_max = dice.count(1, 16);
    let upgrade = dice.chance(150);
    let mut workers = Vec::new();
    for role in roles {
        // A rolling upgrade: old and new weights side by side.
        let revision = if upgrade && dice.chance(500) {
            "b"
        } else {
            "a"
        };
        workers.push(WorkerDescription {
            role,
            home: role,
            model: "simulated".to_owned(),
            fingerprint: Fingerprint(format!("rev-{revision}")),
            capacity,
            queue_max,
            device: None,
        });
    }
    workers
}

fn draw_requests(
    dice: &mut Dice,
    capacity: &Capacity,
    (routers, window): (usize, u64),
) -> Vec<Arrival> {
    let context = capacity.context_tokens_max;
    let count = dice.count(3, 40);
    let tokens = |dice: &mut Dice, count: u32| -> Vec<TokenId> {
        (0..count)
            .map(|_| dice.count(0, crate::model::VOCAB as u32 - 1))
            .collect()
    };
    let beginnings: Vec<Vec<TokenId>> = (0..3)
        .map(|_| {
            let len = dice.count(1, context / 2);
            tokens(dice, len)
        })
        .collect();
    let leavers = *dice.pick(&[0, 0, 100, 400]);
    let stallers = *dice.pick(&[0, 0, 50, 300]);
    let longest = *dice.pick(&[1, 5, 20, 60]);
    let mut arrivals = Vec::new();
    for index in 0..count {
        let mut prompt = if dice.chance(600) {
            dice.pick(&beginnings).clone()
        } else {
            Vec::new()
        };
        let own = dice.count(1, (context - 1 - prompt.len() as u32).min(60));
        prompt.extend(tokens(dice, own));
        let mut sampling = Sampling::greedy();
        sampling.seed = u64::from(index);
        if dice.chance(50) {
            sampling.prompt_logprobs = Some(0);
        }
        let stops = dice.count(0, 2);
        let max_tokens = dice.count(1, longest);
        let request = Request {
            prompt: prompt.into(),
            generated: Arc::new([]),
            sampling,
            stop: StopRules {
                max_tokens,
                min_tokens: dice.count(0, 3).min(max_tokens),
                stop_tokens: tokens(dice, stops).into(),
            },
            priority: dice.count(0, 2) as i32 - 1,
            cache_salt: u64::from(dice.chance(300)),
            slo: Slo::default(),
        };
        let at = Time::from_nanos(dice.range(0, window) * 1000);
        let leaves = dice
            .chance(leavers)
            .then(|| at + dice.micros(0, window.max(2) / 2));
        let stalls = dice.chance(stallers).then(|| {
            let from = at + dice.micros(0, window.max(2));
            (from, dice.micros(1_000, 3_000_000))
        });
        arrivals.push(Arrival {
            at,
            router: dice.next() as usize % routers,
            request: Arc::new(request),
            leaves,
            stalls,
        });
    }
    arrivals
}

fn draw_faults(
    dice: &mut Dice,
    (workers, routers): (usize, usize),
    window: u64,
) -> Vec<(Time, Fault)> {
    let count = dice.count(0, 10);
    // Long after the last arrival little is left to disturb.
    let until = window + 500_000;
    let mut faults = Vec::new();
    for _ in 0..count {
        let at = Time::from_nanos(dice.range(0, until) * 1000);
        let span = dice.micros(100, 2_000_000);
        let worker = dice.next() as usize % workers;
        let other = (worker + 1 + dice.next() as usize % workers.max(2)) % workers;
        let router = dice.next() as usize % routers;
        let fault = match dice.count(0, 14) {
            10..=11 => Fault::Hang { worker, span },
            12 => Fault::Isolate { worker, span },
            13 => Fault::Restart { router, back: span },
            0..=2 => Fault::Crash { worker, back: span },
            3 => Fault::Freeze { worker, span },
            4 => Fault::Drain { worker, back: span },
            5..=6 => Fault::Cut {
                pair: (worker, other),
                span,
            },
            7..=8 => Fault::Part {
                router,
                worker,
                span,
            },
            _ => Fault::Slow {
                extra: dice.micros(100, 300_000),
                span,
            },
        };
        faults.push((at, fault));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// In a world without a fault at most one, and only where another worker can take over.
fn draw_wishes(
    dice: &mut Dice,
    (workers, routers): (&[WorkerDescription], usize),
    (window, weather): (u64, Weather),
) -> Vec<Wish> {
    let count = match (dice.chance(400), weather) {
        (false, _) => 0,
        (true, Weather::Calm) => 1,
        (true, Weather::Rough) => dice.count(1, 4),
    };
    let mut wishes = Vec::new();
    for _ in 0..count {
        let worker = dice.next() as usize % workers.len();
        let command = match dice.count(0, 4) {
            0..=2 => Command::Drain,
            3 => Command::Serve(Role::Prefill),
            _ => Command::Serve(*dice.pick(&[Role::Decode, Role::Both])),
        };
        let at = Time::from_nanos(dice.range(0, window + 100_000) * 1000);
        let router = dice.next() as usize % routers;
        let about = &workers[worker];
        let others = || {
            let others = workers.iter().enumerate().filter(|(at, _)| *at != worker);
            others.filter(|(_, other)| other.fingerprint == about.fingerprint)
        };
        let replaced = others().any(|(_, other)| other.role.prefills())
            && others().any(|(_, other)| other.role.decodes());
        if replaced || weather == Weather::Rough {
            wishes.push(Wish {
                at,
                router,
                worker,
                command,
            });
        }
    }
    wishes.sort_by_key(|wish| wish.at);
    wishes
}

fn draw_price(dice: &mut Dice) -> Price {
    Price {
        step: dice.range(100_000, 5_000_000),
        prefill_token: dice.range(2_000, 100_000),
        decode_sequence: dice.range(2_000, 100_000),
        context_token: dice.range(10, 1_000),
        copy: dice.range(500, 50_000),
        write_bytes: *dice.pick(&[1, 100, 1_000, 1 << 20]),
    }
}

fn draw_wire(dice: &mut Dice, weather: Weather) -> Wire {
    let mut rate = |most: u32| {
        if weather == Weather::Calm || dice.chance(500) {
            0
        } else {
            dice.count(0, most)
        }
    };
    let (damage, loss, broken, stray) = (rate(20), rate(10), rate(5), rate(5));
    Wire {
        damage,
        loss,
        broken,
        stray,
        twice: dice.count(0, 30),
        overtake: dice.count(0, 100),
        latency: dice.micros(10, 2_000),
        jitter: dice.micros(0, 2_000),
        nanos_per_byte: dice.range(0, 5_000),
        notice: dice.micros(10, 500_000),
    }
}

fn draw_router(dice: &mut Dice, lease: Duration, failures_min: u32) -> cleave_router::Limits {
    cleave_router::Limits {
        flights_max: dice.count(10, 60),
        queue_max: dice.count(1, 40),
        queue_wait_max: dice.micros(500_000, 10_000_000),
        // A worker that drains may be gone before an order reaches it.
        failures_max: dice.count(failures_min, 3),
        renew_every: lease / 3,
        reserve_timeout: dice.micros(20_000, 500_000),
        expected_output_tokens: *dice.pick(&[1, 4, 16, 60]),
        moves_max: dice.count(1, 4),
        move_ahead_tokens: dice.count(0, 16),
        reader_wait_max: dice.micros(50_000, 2_000_000),
        stuck_max: dice.micros(100_000, 5_000_000),
        ..cleave_router::Limits::default()
    }
}
