//! A world drawn from a seed: workers, routers, requests, prices, faults.
//!
//! Owns: every size, probability and limit. Never: draws anything once the world runs, except from
//! the generator that it hands over. Invariant: printed before it runs, and the same for the same
//! seed.

mod faults;
mod text;

pub(crate) use faults::{ChaosFault, LinkBehaviour};

use crate::bit_flips::BitFlipRates;
use crate::disk::TierSettings;
use crate::speculation::draw_speculation;
use cleave_domain::{
    Capacity, Fingerprint, Pooling, Request, RequestSlo, Role, SamplingParams, SplitMix64,
    StateCapacity, StopRules, Time, TokenId, WindowCapacity, WorkerDescription,
};
use cleave_kv::PoolWriter;
use cleave_router::OperatorRequest;
use cleave_sched::LookupLimits;
use cleave_testkit::EngineCosts;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The served name of the model of a world with one.
const ONLY_MODEL: &str = "simulated";

/// Whether the world has faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultPlan {
    /// No fault occurs, in a fifth of the worlds.
    NoFaults,
    Faults,
}

/// Separates the draw of steps in flight from the seed's other draws.
const STEPS_SEED_SALT: u64 = 0x6c62_272e_07bb_0142;

/// Separates the draw of vectors from the seed's other draws.
const POOLING_SEED_SALT: u64 = 0x51ab_90f3_7c12_e4d5;

/// Separates the draw of states from the seed's other draws.
const STATES_SEED_SALT: u64 = 0x2bd7_a6a6_e99c_2ddc;

/// Separates the draw of windows from the seed's other draws.
const WINDOWS_SEED_SALT: u64 = 0x91c7_5a3e_04bd_f862;

/// The most tokens that a reservation has room for beyond its own: those that a moving sequence may
/// draw before it is there, and the rest of the last block.
const AHEAD_TOKENS: u32 = 16 + 16;

/// All inputs of a run.
#[derive(Clone, Debug)]
pub(crate) struct ChaosWorld {
    pub(crate) seed: u64,
    fault_plan: FaultPlan,
    pub(crate) workers: Vec<WorkerDescription>,
    /// The model of each request, by its index; all are of the workers' one model by default.
    pub(crate) request_models: Vec<Arc<str>>,
    /// Models that some workers serve after each second start, by their index.
    pub(crate) changed_models: BTreeMap<usize, String>,
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

impl ChaosWorld {
    pub(crate) fn draw(seed: u64) -> Self {
        let rng = &mut SplitMix64::new(seed);
        // In a world without faults every request must be done.
        let fault_plan = if rng.chance(200) {
            FaultPlan::NoFaults
        } else {
            FaultPlan::Faults
        };
        let window = *rng.pick(&[2_000, 50_000, 300_000, 1_000_000, 3_000_000]);
        let capacity = draw_capacity(rng);
        let workers = draw_workers(rng, capacity);
        let routers_count = if rng.chance(250) { 2 } else { 1 };
        let mut requests = draw_requests(rng, &capacity, routers_count, window);
        let faults = match fault_plan {
            FaultPlan::NoFaults => Vec::new(),
            FaultPlan::Faults => draw_faults(rng, workers.len(), routers_count, window),
        };
        let commands = draw_commands(rng, &workers, routers_count, window, fault_plan);
        let lease_max = *rng.pick(&[60_000, 500_000, 3_000_000]);
        let lease = rng.micros(30_000, lease_max);
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
        draw_poolings(seed, &mut requests);
        Self {
            seed,
            fault_plan,
            routers_count,
            engine_costs: draw_price(rng),
            links: draw_links(rng, fault_plan),
            flips: BitFlipRates::draw(seed, fault_plan),
            router: draw_router(rng, lease, u32::from(fault_plan == FaultPlan::NoFaults)),
            lease,
            stall_max: rng.micros(300_000, 2_000_000),
            prefix_cache: rng.chance(800),
            step_max: rng.micros(20_000, 500_000),
            // Drawn from its own generator, so that the rest of a seed's world stays the same.
            steps_in_flight: 1 + (SplitMix64::finalize(seed ^ STEPS_SEED_SALT) & 1) as u32,
            speculation,
            swap_blocks: *rng.pick(&[0, 0, 2, 8, 64]),
            tiers: TierSettings::draw(seed),
            writer: if rng.chance(250) {
                PoolWriter::Sender
            } else {
                PoolWriter::Receiver
            },
            silence_max: rng.micros(50_000, 1_000_000),
            commands,
            faults_end_at: heal_at + Duration::from_millis(1),
            request_models: vec![Arc::from(ONLY_MODEL); requests.len()],
            changed_models: BTreeMap::new(),
            workers,
            requests,
            faults,
        }
    }

    /// Gives the model a state of one to forty cells. Some workers have few slots for it, some more
    /// than sequences.
    pub(crate) fn draw_states(&mut self) {
        let rng = &mut SplitMix64::new(self.seed ^ STATES_SEED_SALT);
        let bytes = 8 * rng.count(1, 40);
        for worker in &mut self.workers {
            let count = rng.count(1, 2 * worker.capacity.slots_count + 2);
            worker.capacity.states = Some(StateCapacity { bytes, count });
        }
    }

    /// Gives the model layers with a window, in blocks of one to three pieces. Some workers have
    /// room for one sequence's window and a chunk, some for more than their slots.
    pub(crate) fn draw_windows(&mut self) {
        let rng = &mut SplitMix64::new(self.seed ^ WINDOWS_SEED_SALT);
        let tokens = *rng.pick(&[1, 2, 3, 5, 8, 16, 31]);
        let cells = rng.count(1, 3);
        for worker in &mut self.workers {
            let capacity = &mut worker.capacity;
            capacity.windows = Some(WindowCapacity {
                tokens,
                bytes: cells * capacity.block_bytes,
                count: 0,
            });
            if let (Some(window), Some(windows)) = (capacity.window(), &mut capacity.windows) {
                let least = window.blocks_max(capacity.step_tokens_max.max(AHEAD_TOKENS));
                let slots = window.blocks_max(1) * capacity.slots_count;
                windows.count = least + rng.count(0, 2 * slots);
            }
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
        let slots_count = capacity.states.map_or(0, |states| u64::from(states.count));
        let windows_count = capacity
            .windows
            .map_or(0, |windows| u64::from(windows.count));
        let pieces = slots_count * u64::from(capacity.state_pieces())
            + windows_count * u64::from(capacity.window_pieces());
        let copies = 4 * (u64::from(capacity.blocks_count) + pieces) * copy;
        let engine = Duration::from_nanos(steps * (step + tokens + context) + copies);
        let units = u64::from(capacity.blocks_count) + pieces;
        let pool_bytes = units * u64::from(capacity.block_bytes + 128);
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

fn draw_capacity(rng: &mut SplitMix64) -> Capacity {
    let block_tokens = *rng.pick(&[1, 2, 4, 8, 16]);
    let context_tokens_max = rng.count(16, 120);
    let whole = context_tokens_max.div_ceil(block_tokens);
    // From a pool that cannot hold one longest sequence to one that holds six.
    let tenths = *rng.pick(&[8, 10, 13, 20, 30, 60]);
    let blocks_count = (whole * tenths / 10).max(2);
    Capacity {
        block_tokens,
        block_bytes: block_tokens * 8,
        blocks_count,
        slots_count: rng.count(1, 8),
        step_tokens_max: rng.count(8, 64),
        context_tokens_max,
        states: None,
        windows: None,
    }
}

fn draw_workers(rng: &mut SplitMix64, capacity: Capacity) -> Vec<WorkerDescription> {
    let mut roles = Vec::new();
    let draw = rng.count(0, 9);
    if draw < 7 {
        roles.extend((0..rng.count(1, 3)).map(|_| Role::Prefill));
        roles.extend((0..rng.count(1, 3)).map(|_| Role::Decode));
    }
    if draw >= 5 {
        roles.extend((0..rng.count(1, 3)).map(|_| Role::Both));
    }
    let queue_max = rng.count(1, 16);
    let upgrade = rng.chance(150);
    let mut workers = Vec::new();
    for role in roles {
        // A rolling upgrade: old and new weights side by side.
        let revision = if upgrade && rng.chance(500) { "b" } else { "a" };
        workers.push(WorkerDescription {
            role,
            home: role,
            model: ONLY_MODEL.to_owned(),
            fingerprint: Fingerprint(format!("rev-{revision}")),
            capacity,
            queue_max,
            device: None,
        });
    }
    workers
}

/// Turns some requests of every third world into ones for a vector.
fn draw_poolings(seed: u64, requests: &mut [ChaosRequest]) {
    let rng = &mut SplitMix64::new(seed ^ POOLING_SEED_SALT);
    if !rng.chance(333) {
        return;
    }
    let share = *rng.pick(&[100, 400, 1000]);
    for request in requests.iter_mut() {
        if !rng.chance(share) {
            continue;
        }
        let request = Arc::make_mut(&mut request.request);
        let pooling = match rng.count(0, 3) {
            0 => Pooling::LastToken,
            1 => Pooling::FirstToken,
            2 => Pooling::Logits([0, 1].into()),
            _ => Pooling::Mean,
        };
        request.pooling = Some(pooling);
        request.sampling.prompt_logprobs = None;
        request.stop = StopRules {
            max_tokens: 1,
            min_tokens: 0,
            stop_tokens: [].into(),
        };
    }
}

fn draw_requests(
    rng: &mut SplitMix64,
    capacity: &Capacity,
    routers: usize,
    window: u64,
) -> Vec<ChaosRequest> {
    let context = capacity.context_tokens_max;
    let count = rng.count(3, 40);
    let tokens = |rng: &mut SplitMix64, count: u32| -> Vec<TokenId> {
        (0..count)
            .map(|_| rng.count(0, crate::model::VOCAB_SIZE as u32 - 1))
            .collect()
    };
    let beginnings: Vec<Vec<TokenId>> = (0..3)
        .map(|_| {
            let len = rng.count(1, context / 2);
            tokens(rng, len)
        })
        .collect();
    let leave_rate = *rng.pick(&[0, 0, 100, 400]);
    let stallers = *rng.pick(&[0, 0, 50, 300]);
    let longest = *rng.pick(&[1, 5, 20, 60]);
    let mut arrivals = Vec::new();
    for index in 0..count {
        let mut prompt = if rng.chance(600) {
            rng.pick(&beginnings).clone()
        } else {
            Vec::new()
        };
        let own = rng.count(1, (context - 1 - prompt.len() as u32).min(60));
        prompt.extend(tokens(rng, own));
        let mut sampling = SamplingParams::greedy();
        sampling.seed = u64::from(index);
        if rng.chance(50) {
            sampling.prompt_logprobs = Some(0);
        }
        let stops = rng.count(0, 2);
        let max_tokens = rng.count(1, longest);
        let request = Request {
            prompt: prompt.into(),
            generated: Arc::new([]),
            sampling,
            stop: StopRules {
                max_tokens,
                min_tokens: rng.count(0, 3).min(max_tokens),
                stop_tokens: tokens(rng, stops).into(),
            },
            priority: rng.count(0, 2) as i32 - 1,
            cache_salt: u64::from(rng.chance(300)),
            adapter: None,
            pooling: None,
            slo: RequestSlo::default(),
        };
        let at = Time::from_nanos(rng.range(0, window) * 1000);
        let leaves_at = rng
            .chance(leave_rate)
            .then(|| at + rng.micros(0, window.max(2) / 2));
        let stalls = rng.chance(stallers).then(|| {
            let from = at + rng.micros(0, window.max(2));
            (from, rng.micros(1_000, 3_000_000))
        });
        arrivals.push(ChaosRequest {
            at,
            router: rng.draw() as usize % routers,
            request: Arc::new(request),
            leaves_at,
            stalls,
        });
    }
    arrivals
}

fn draw_faults(
    rng: &mut SplitMix64,
    workers: usize,
    routers: usize,
    window: u64,
) -> Vec<(Time, ChaosFault)> {
    let count = rng.count(0, 10);
    // Faults long after the last arrival disturb little.
    let until = window + 500_000;
    let mut faults = Vec::new();
    for _ in 0..count {
        let at = Time::from_nanos(rng.range(0, until) * 1000);
        let span = rng.micros(100, 2_000_000);
        let worker = rng.draw() as usize % workers;
        let other = (worker + 1 + rng.draw() as usize % workers.max(2)) % workers;
        let router = rng.draw() as usize % routers;
        let fault = match rng.count(0, 14) {
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
                extra: rng.micros(100, 300_000),
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
    rng: &mut SplitMix64,
    workers: &[WorkerDescription],
    routers: usize,
    window: u64,
    plan: FaultPlan,
) -> Vec<TimedCommand> {
    let count = match (rng.chance(400), plan) {
        (false, _) => 0,
        (true, FaultPlan::NoFaults) => 1,
        (true, FaultPlan::Faults) => rng.count(1, 4),
    };
    let mut commands = Vec::new();
    for _ in 0..count {
        let worker = rng.draw() as usize % workers.len();
        let command = match rng.count(0, 4) {
            0..=2 => OperatorRequest::Drain,
            3 => OperatorRequest::Serve(Role::Prefill),
            _ => OperatorRequest::Serve(*rng.pick(&[Role::Decode, Role::Both])),
        };
        let at = Time::from_nanos(rng.range(0, window + 100_000) * 1000);
        let router = rng.draw() as usize % routers;
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

fn draw_price(rng: &mut SplitMix64) -> EngineCosts {
    EngineCosts {
        step: rng.range(100_000, 5_000_000),
        prefill_token: rng.range(2_000, 100_000),
        decode_sequence: rng.range(2_000, 100_000),
        context_token: rng.range(10, 1_000),
        copy: rng.range(500, 50_000),
        write_bytes: *rng.pick(&[1, 100, 1_000, 1 << 20]),
    }
}

fn draw_links(rng: &mut SplitMix64, fault_plan: FaultPlan) -> LinkBehaviour {
    let mut rate = |most: u32| {
        if fault_plan == FaultPlan::NoFaults || rng.chance(500) {
            0
        } else {
            rng.count(0, most)
        }
    };
    let (damage, loss, broken, stray) = (rate(20), rate(10), rate(5), rate(5));
    LinkBehaviour {
        damage,
        loss,
        broken,
        stale_blocks: stray,
        duplicates: rng.count(0, 30),
        overtake: rng.count(0, 100),
        latency: rng.micros(10, 2_000),
        jitter: rng.micros(0, 2_000),
        nanos_per_byte: rng.range(0, 5_000),
        notice_max: rng.micros(10, 500_000),
    }
}

fn draw_router(
    rng: &mut SplitMix64,
    lease: Duration,
    failures_min: u32,
) -> cleave_router::RouterLimits {
    cleave_router::RouterLimits {
        flights_max: rng.count(10, 60),
        queue_max: rng.count(1, 40),
        queue_wait_max: rng.micros(500_000, 10_000_000),
        // A worker that drains may be gone before an order reaches it.
        failures_max: rng.count(failures_min, 3),
        renew_every: lease / 3,
        reserve_timeout: rng.micros(20_000, 500_000),
        expected_output_tokens: *rng.pick(&[1, 4, 16, 60]),
        moves_max: rng.count(1, 4),
        move_ahead_tokens: rng.count(0, 16),
        reader_wait_max: rng.micros(50_000, 2_000_000),
        stuck_max: rng.micros(100_000, 5_000_000),
        ..cleave_router::RouterLimits::default()
    }
}
