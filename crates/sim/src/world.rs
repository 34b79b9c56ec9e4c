//! A world drawn from a seed: workers, routers, requests, prices, faults.
//!
//! Owns: every size, probability and limit. Never: draws anything once the world runs, except from
//! the generator that it hands over. Invariant: printed before it runs, and the same for the same
//! seed.

mod text;

use crate::bit_flips::BitFlipRates;
use crate::disk::TierSettings;
use crate::engine::EngineCosts;
use crate::rng::{SimRng, mix};
use crate::speculation::draw_speculation;
use cleave_domain::{
    Capacity, Fingerprint, Request, RequestSlo, Role, SamplingParams, StopRules, Time, TokenId,
    WorkerDescription,
};
use cleave_kv::PoolWriter;
use cleave_router::OperatorRequest;
use cleave_sched::LookupLimits;
use std::sync::Arc;
use std::time::Duration;

/// Whether the world has faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultPlan {
    /// No fault occurs, in a fifth of the worlds.
    NoFaults,
    Faults,
}

/// Separates the draw of steps in flight from the seed's other draws.
const STEPS_SEED_SALT: u64 = 0x6c62_272e_07bb_0142;

/// All inputs of a run.
#[derive(Clone, Debug)]
pub(crate) struct ChaosWorld {
    pub(crate) seed: u64,
    fault_plan: FaultPlan,
    pub(crate) workers: Vec<WorkerDescription>,
    pub(crate) routers_count: usize,
    pub(crate) requests: Vec<ChaosRequest>,
    pub(crate) faults: Vec<(Time, ChaosFault)>,
    pub(crate) engine_costs: EngineCosts,
    pub(crate) links: LinkBehaviour,
    pub(crate) flips: BitFlipRates,
    pub(crate) router: cleave_router::RouterLimits,
    pub(crate) lease: Duration,
    pub(crate) stall_max: Duration,
    /// How long a step may take before its worker reports itself stuck.
    pub(crate) step_max: Duration,
    /// Host memory of each worker, in blocks.
    pub(crate) swap_blocks: u32,
    pub(crate) tiers: TierSettings,
    /// The side that writes blocks into the receiver's pool.
    pub(crate) writer: PoolWriter,
    /// How long a worker may be silent before its routers take it for lost.
    pub(crate) silence_max: Duration,
    /// Operator commands, also in worlds without faults.
    pub(crate) commands: Vec<TimedCommand>,
    pub(crate) prefix_cache: bool,
    /// Steps that an engine runs at a time.
    pub(crate) steps_in_flight: u32,
    /// In half of the worlds steps verify drafts, and about half of the requests repeat their
    /// output.
    pub(crate) speculation: Option<LookupLimits>,
    /// When every fault is over.
    pub(crate) faults_end_at: Time,
}

/// A request and its client.
#[derive(Clone, Debug)]
pub(crate) struct ChaosRequest {
    pub(crate) at: Time,
    pub(crate) router: usize,
    pub(crate) request: Arc<Request>,
    /// The client leaves then, if its answer is not complete.
    pub(crate) leaves_at: Option<Time>,
    /// The client stops reading then, for this long.
    pub(crate) stalls: Option<(Time, Duration)>,
}

/// An operator's command to a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimedCommand {
    pub(crate) at: Time,
    pub(crate) router: usize,
    pub(crate) worker: usize,
    pub(crate) command: OperatorRequest,
}

/// Speed of links, and their failure rates while faults last.
#[derive(Clone, Debug)]
pub(crate) struct LinkBehaviour {
    pub(crate) latency: Duration,
    /// Largest random addition to each message's latency.
    pub(crate) jitter: Duration,
    pub(crate) nanos_per_byte: u64,
    /// Longest time until a side notices that the other is gone.
    pub(crate) notice_max: Duration,
    /// Frames damaged, of a thousand.
    pub(crate) damage: u32,
    /// Frames that name a block of an earlier reservation, of a thousand.
    pub(crate) stale_blocks: u32,
    /// Packets lost without the link breaking, of a thousand.
    pub(crate) loss: u32,
    /// Packets that arrive twice, of a thousand.
    pub(crate) duplicates: u32,
    /// Packets that overtake others, of a thousand: a link may have several streams.
    pub(crate) overtake: u32,
    /// Steps, reads and writes that the device fails, of a thousand.
    pub(crate) broken: u32,
}

/// A fault that begins at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ChaosFault {
    /// The process dies and starts again later.
    Crash { worker: usize, back: Duration },
    /// The process is frozen: SIGSTOP, then SIGCONT.
    Freeze { worker: usize, span: Duration },
    /// The process is asked to drain; it starts again once it is done.
    Drain { worker: usize, back: Duration },
    /// The link between two workers breaks and stays down.
    Cut {
        pair: (usize, usize),
        span: Duration,
    },
    /// The stream between a worker and a router breaks.
    Disconnect {
        router: usize,
        worker: usize,
        span: Duration,
    },
    /// The engine hangs in its operation.
    Hang { worker: usize, span: Duration },
    /// A worker loses its connections to all others.
    Isolate { worker: usize, span: Duration },
    /// A router dies with its clients' connections; its next life starts later.
    Restart { router: usize, back: Duration },
    /// Messages between routers and workers take longer for a while.
    Slow { extra: Duration, span: Duration },
}

impl ChaosWorld {
    pub(crate) fn draw(seed: u64) -> Self {
        let dice = &mut SimRng::new(seed);
        // In a world without faults every request must be done.
        let weather = if dice.chance(200) {
            FaultPlan::NoFaults
        } else {
            FaultPlan::Faults
        };
        let window = *dice.pick(&[2_000, 50_000, 300_000, 1_000_000, 3_000_000]);
        let capacity = draw_capacity(dice);
        let workers = draw_workers(dice, capacity);
        let routers_count = if dice.chance(250) { 2 } else { 1 };
        let mut requests = draw_requests(dice, &capacity, routers_count, window);
        let faults = match weather {
            FaultPlan::NoFaults => Vec::new(),
            FaultPlan::Faults => draw_faults(dice, workers.len(), routers_count, window),
        };
        let commands = draw_commands(dice, &workers, routers_count, window, weather);
        let lease_max = *dice.pick(&[60_000, 500_000, 3_000_000]);
        let lease = dice.micros(30_000, lease_max);
        // Recovery begins after the last fault, arrival, stall and command.
        let ends = faults.iter().map(|(at, fault)| *at + fault.duration());
        let heal_at = ends
            .chain(requests.iter().map(|r| r.at))
            .chain(
                requests
                    .iter()
                    .filter_map(|r| r.stalls)
                    .map(|(at, span)| at + span),
            )
            .chain(commands.iter().map(|command| command.at))
            .max()
            .unwrap_or_default();
        let speculation = draw_speculation(seed, &mut requests);
        Self {
            seed,
            fault_plan: weather,
            routers_count,
            engine_costs: draw_price(dice),
            links: draw_links(dice, weather),
            flips: BitFlipRates::draw(seed, weather),
            router: draw_router(dice, lease, u32::from(weather == FaultPlan::NoFaults)),
            lease,
            stall_max: dice.micros(300_000, 2_000_000),
            prefix_cache: dice.chance(800),
            step_max: dice.micros(20_000, 500_000),
            // Drawn from its own generator, so that the rest of a seed's world stays the same.
            steps_in_flight: 1 + (mix(seed ^ STEPS_SEED_SALT) & 1) as u32,
            speculation,
            swap_blocks: *dice.pick(&[0, 0, 2, 8, 64]),
            tiers: TierSettings::draw(seed),
            writer: if dice.chance(250) {
                PoolWriter::Sender
            } else {
                PoolWriter::Receiver
            },
            silence_max: dice.micros(50_000, 1_000_000),
            commands,
            faults_end_at: heal_at + Duration::from_millis(1),
            workers,
            requests,
            faults,
        }
    }

    /// The longest time for which a cancelled flight may hold blocks in a world without faults:
    /// messages to both workers and back, the engines' operations in progress, and transfers that
    /// the links have taken.
    pub(crate) fn cancel_max(&self) -> Duration {
        let capacity = &self.workers[0].capacity;
        let EngineCosts {
            step,
            prefill_token,
            decode_sequence,
            context_token,
            copy,
            write_bytes: _,
        } = self.engine_costs;
        // The worst case: every step in flight and one more, each full, and copies of the pool.
        let steps = u64::from(1 + self.steps_in_flight);
        let slots = u64::from(capacity.slots_count);
        let context = slots * u64::from(capacity.context_tokens_max) * context_token;
        let tokens = u64::from(capacity.step_tokens_max) * prefill_token.max(decode_sequence);
        let copies = 4 * u64::from(capacity.blocks_count) * copy;
        let engine = Duration::from_nanos(steps * (step + tokens + context) + copies);
        let pool_bytes = u64::from(capacity.blocks_count) * u64::from(capacity.block_bytes + 128);
        let link = Duration::from_nanos(pool_bytes * self.links.nanos_per_byte);
        4 * (self.links.latency + self.links.jitter) + engine + link
    }

    /// Whether nothing fails and no operator intervenes: then every message is answered in its
    /// time.
    pub(crate) fn is_undisturbed(&self) -> bool {
        self.is_faultless() && self.commands.is_empty()
    }

    pub(crate) fn is_faultless(&self) -> bool {
        let harmless = self.links.failure_rates_sum() == 0 && !self.flips.any();
        self.fault_plan == FaultPlan::NoFaults && self.faults.is_empty() && harmless
    }
}

impl LinkBehaviour {
    /// The sum of all rates that may make a hand-off fail.
    fn failure_rates_sum(&self) -> u32 {
        self.damage + self.stale_blocks + self.loss + self.broken
    }
}

impl ChaosFault {
    fn duration(self) -> Duration {
        match self {
            Self::Crash { back: span, .. }
            | Self::Drain { back: span, .. }
            | Self::Restart { back: span, .. }
            | Self::Hang { span, .. }
            | Self::Isolate { span, .. }
            | Self::Freeze { span, .. }
            | Self::Cut { span, .. }
            | Self::Disconnect { span, .. }
            | Self::Slow { span, .. } => span,
        }
    }
}

fn draw_capacity(dice: &mut SimRng) -> Capacity {
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

fn draw_workers(dice: &mut SimRng, capacity: Capacity) -> Vec<WorkerDescription> {
    let mut roles = Vec::new();
    let draw = dice.count(0, 9);
    if draw < 7 {
        roles.extend((0..dice.count(1, 3)).map(|_| Role::Prefill));
        roles.extend((0..dice.count(1, 3)).map(|_| Role::Decode));
    }
    if draw >= 5 {
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
    dice: &mut SimRng,
    capacity: &Capacity,
    routers: usize,
    window: u64,
) -> Vec<ChaosRequest> {
    let context = capacity.context_tokens_max;
    let count = dice.count(3, 40);
    let tokens = |dice: &mut SimRng, count: u32| -> Vec<TokenId> {
        (0..count)
            .map(|_| dice.count(0, crate::model::VOCAB_SIZE as u32 - 1))
            .collect()
    };
    let beginnings: Vec<Vec<TokenId>> = (0..3)
        .map(|_| {
            let len = dice.count(1, context / 2);
            tokens(dice, len)
        })
        .collect();
    let leave_rate = *dice.pick(&[0, 0, 100, 400]);
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
        let mut sampling = SamplingParams::greedy();
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
            slo: RequestSlo::default(),
        };
        let at = Time::from_nanos(dice.range(0, window) * 1000);
        let leaves_at = dice
            .chance(leave_rate)
            .then(|| at + dice.micros(0, window.max(2) / 2));
        let stalls = dice.chance(stallers).then(|| {
            let from = at + dice.micros(0, window.max(2));
            (from, dice.micros(1_000, 3_000_000))
        });
        arrivals.push(ChaosRequest {
            at,
            router: dice.next() as usize % routers,
            request: Arc::new(request),
            leaves_at,
            stalls,
        });
    }
    arrivals
}

fn draw_faults(
    dice: &mut SimRng,
    workers: usize,
    routers: usize,
    window: u64,
) -> Vec<(Time, ChaosFault)> {
    let count = dice.count(0, 10);
    // Faults long after the last arrival disturb little.
    let until = window + 500_000;
    let mut faults = Vec::new();
    for _ in 0..count {
        let at = Time::from_nanos(dice.range(0, until) * 1000);
        let span = dice.micros(100, 2_000_000);
        let worker = dice.next() as usize % workers;
        let other = (worker + 1 + dice.next() as usize % workers.max(2)) % workers;
        let router = dice.next() as usize % routers;
        let fault = match dice.count(0, 14) {
            10..=11 => ChaosFault::Hang { worker, span },
            12 => ChaosFault::Isolate { worker, span },
            13 => ChaosFault::Restart { router, back: span },
            0..=2 => ChaosFault::Crash { worker, back: span },
            3 => ChaosFault::Freeze { worker, span },
            4 => ChaosFault::Drain { worker, back: span },
            5..=6 => ChaosFault::Cut {
                pair: (worker, other),
                span,
            },
            7..=8 => ChaosFault::Disconnect {
                router,
                worker,
                span,
            },
            _ => ChaosFault::Slow {
                extra: dice.micros(100, 300_000),
                span,
            },
        };
        faults.push((at, fault));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// A world without faults has at most one command, and only where another worker can take over.
fn draw_commands(
    dice: &mut SimRng,
    workers: &[WorkerDescription],
    routers: usize,
    window: u64,
    plan: FaultPlan,
) -> Vec<TimedCommand> {
    let count = match (dice.chance(400), plan) {
        (false, _) => 0,
        (true, FaultPlan::NoFaults) => 1,
        (true, FaultPlan::Faults) => dice.count(1, 4),
    };
    let mut commands = Vec::new();
    for _ in 0..count {
        let worker = dice.next() as usize % workers.len();
        let command = match dice.count(0, 4) {
            0..=2 => OperatorRequest::Drain,
            3 => OperatorRequest::Serve(Role::Prefill),
            _ => OperatorRequest::Serve(*dice.pick(&[Role::Decode, Role::Both])),
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
        if replaced || plan == FaultPlan::Faults {
            commands.push(TimedCommand {
                at,
                router,
                worker,
                command,
            });
        }
    }
    commands.sort_by_key(|timed| timed.at);
    commands
}

fn draw_price(dice: &mut SimRng) -> EngineCosts {
    EngineCosts {
        step: dice.range(100_000, 5_000_000),
        prefill_token: dice.range(2_000, 100_000),
        decode_sequence: dice.range(2_000, 100_000),
        context_token: dice.range(10, 1_000),
        copy: dice.range(500, 50_000),
        write_bytes: *dice.pick(&[1, 100, 1_000, 1 << 20]),
    }
}

fn draw_links(dice: &mut SimRng, weather: FaultPlan) -> LinkBehaviour {
    let mut rate = |most: u32| {
        if weather == FaultPlan::NoFaults || dice.chance(500) {
            0
        } else {
            dice.count(0, most)
        }
    };
    let (damage, loss, broken, stray) = (rate(20), rate(10), rate(5), rate(5));
    LinkBehaviour {
        damage,
        loss,
        broken,
        stale_blocks: stray,
        duplicates: dice.count(0, 30),
        overtake: dice.count(0, 100),
        latency: dice.micros(10, 2_000),
        jitter: dice.micros(0, 2_000),
        nanos_per_byte: dice.range(0, 5_000),
        notice_max: dice.micros(10, 500_000),
    }
}

fn draw_router(
    dice: &mut SimRng,
    lease: Duration,
    failures_min: u32,
) -> cleave_router::RouterLimits {
    cleave_router::RouterLimits {
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
        ..cleave_router::RouterLimits::default()
    }
}
