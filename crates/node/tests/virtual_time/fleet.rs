//! The fleet under test, and scenarios for it.

use cleave_domain::{
    Capacity, Fingerprint, Incarnation, LinkPrice, OnSloMiss, Prices, RequestSlo, Role, RowPrice,
    SloClass, SloPolicy, SplitMix64, Time, WorkerId, WorkerRef,
};
use cleave_engine::{Engine, EngineDescription, MockEngine};
use cleave_node::{FleetModel, FleetNode, RouterOptions, RunningFleet};
use cleave_sched::PoolWriter;
use cleave_sim::goodput::{
    PromptRecipe, RecipePart, RequestArrival, Scenario, VOCAB_SIZE, WorkerDevice,
};
use cleave_text::ModelFiles;
use cleave_worker::{StepTime, WorkerOptions};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const LEGS: [Role; 5] = [
    Role::Prefill,
    Role::Prefill,
    Role::Decode,
    Role::Decode,
    Role::Decode,
];

const CAPACITY: Capacity = Capacity {
    block_tokens: 16,
    block_bytes: 64,
    blocks_count: 400,
    slots_count: 12,
    step_tokens_max: 128,
    context_tokens_max: 1024,
    states: None,
    windows: None,
};

/// The cost of a step besides rows and draws, in milliseconds. Virtual clocks tick in milliseconds,
/// so everything costs whole ones; and no two workers are equally fast, so that events rarely
/// coincide without one causing the other: their order would then be the body's own.
const STEP_MILLIS: [u64; 5] = [17, 23, 13, 19, 29];

/// One millisecond more for each row, three for each draw.
fn prices(place: usize) -> Prices {
    let row = |rows: u32| RowPrice {
        rows,
        nanos: (STEP_MILLIS[place] + u64::from(rows)) * 1_000_000,
    };
    Prices {
        rows: vec![row(1), row(4096)],
        draw_nanos: 3_000_000,
        ..Prices::default()
    }
}

/// Every other worker's engine takes a step while it runs the one before.
fn overlaps(place: usize) -> bool {
    place.is_multiple_of(2)
}

fn options(place: usize) -> WorkerOptions {
    WorkerOptions {
        swap_bytes: Some(0),
        step_time: StepTime::Priced(prices(place)),
        ..WorkerOptions::new(format!("w{place}"), LEGS[place])
    }
}

/// The simulator's device with the same limits that the node gives to this worker's brain.
fn device(place: usize) -> WorkerDevice {
    let options = options(place);
    let limits = cleave_sched::WorkerLimits {
        me: WorkerRef {
            worker: WorkerId(cleave_transfer::checksum(options.name.as_bytes())),
            incarnation: Incarnation(0),
        },
        role: options.role,
        capacity: CAPACITY,
        vocab_size: VOCAB_SIZE,
        queue_max: options.queue_max,
        lease: options.lease,
        stall_max: options.stall_max,
        step_max: options.step_max,
        prefix_cache: options.prefix_cache,
        swap_blocks: 0,
        host_blocks: 0,
        disk_blocks: 0,
        writer: PoolWriter::Receiver,
        prices: prices(place),
        steps_in_flight: if overlaps(place) { 2 } else { 1 },
        speculation: None,
    };
    WorkerDevice {
        limits,
        real_prices: prices(place),
        host_link: LinkPrice::default(),
        devices_count: 1,
    }
}

/// Classes by what happens when a target cannot be met: refused, queued, downgraded to the second.
const CLASSES: [&str; 3] = ["strict", "patient", "modest"];

fn policy() -> SloPolicy {
    let class = |name: &str, unmet| SloClass {
        name: name.to_owned(),
        unmet,
        ..SloClass::default()
    };
    SloPolicy {
        classes: vec![
            class(CLASSES[0], OnSloMiss::Reject),
            class(CLASSES[1], OnSloMiss::Queue(Duration::from_secs(2))),
            class(CLASSES[2], OnSloMiss::Downgrade(CLASSES[1].to_owned())),
        ],
        default_class: CLASSES[0].to_owned(),
        ..SloPolicy::default()
    }
}

/// The targets of a day's requests that have any.
#[derive(Clone, Copy)]
pub(crate) struct DayTargets {
    /// One request in this many has targets.
    pub(crate) one_in: u64,
    /// Time to first token, at least and at most.
    pub(crate) ttft_millis: (u64, u64),
    /// The time between output tokens.
    pub(crate) tpot_millis: u64,
}

/// A day of so many arrivals, `gap_millis` apart in the mean.
pub(crate) fn day(seed: u64, count: u64, gap_millis: u64, targets: DayTargets) -> Scenario {
    let mut rng = SplitMix64::new(seed);
    let mut at = Duration::from_secs(1);
    let arrival = |number: u64| {
        at += Duration::from_millis(1 + rng.below(2 * gap_millis));
        let tokens = 20 + rng.below(280) as u32;
        // One prompt in three shares its beginning with others.
        let prompt = match rng.below(3) {
            0 => {
                let part = |name, tokens| RecipePart { name, tokens };
                PromptRecipe {
                    parts: Arc::new([part(rng.below(4), 96), part(1000 + number, tokens)]),
                }
            }
            _ => PromptRecipe::unshared(1000 + number, tokens),
        };
        let has_target = rng.below(targets.one_in) == 0;
        let within = |millis: u64| has_target.then(|| Duration::from_millis(millis));
        let (least, most) = targets.ttft_millis;
        RequestArrival {
            at: Time::ZERO + at,
            prompt,
            output_tokens: 1 + rng.below(14) as u32,
            slo: RequestSlo {
                class: CLASSES[rng.below(3) as usize].to_owned(),
                ttft: within(least + rng.below(most - least)),
                tpot: within(targets.tpot_millis),
                ..RequestSlo::default()
            },
            priority: 0,
            adapter: None,
        }
    };
    Scenario {
        devices: (0..LEGS.len()).map(device).collect(),
        routers_count: 1,
        router: cleave_router::RouterLimits {
            policy: Arc::new(policy()),
            ..cleave_router::RouterLimits::default()
        },
        arrivals: (0..count).map(arrival).collect(),
        message_time: Duration::ZERO,
        noise_permille: 0,
        grain: Duration::from_millis(1),
        misses_max: BTreeMap::new(),
        adapters: None,
        orchestrator: None,
        seed,
    }
}

/// The fleet of these scenarios, ready to serve.
pub(crate) async fn serve(router: RouterOptions) -> RunningFleet {
    let worker = |place| {
        let description = EngineDescription {
            model: "mock".into(),
            device: "none".into(),
            device_id: None,
            fingerprint: Fingerprint("mock".into()),
            capacity: CAPACITY,
            vocab_size: VOCAB_SIZE,
        };
        let engine = MockEngine::new(description).unwrap();
        let engine: Box<dyn Engine> = if overlaps(place) {
            Box::new(engine.overlapping())
        } else {
            Box::new(engine)
        };
        (options(place), engine)
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/llama3");
    let serve = FleetNode {
        listen: "127.0.0.1:0".into(),
        router,
        models: vec![FleetModel {
            workers: (0..LEGS.len()).map(worker).collect(),
            files: ModelFiles::read(&folder).unwrap(),
        }],
    };
    let running = serve.start().await.unwrap();
    running.ready().await;
    running
}
