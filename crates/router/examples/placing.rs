//! How long a decision takes in a large fleet: `cargo run --release -p cleave-router --example
//! placing [WORKERS [PROMPT_TOKENS]]`. Half of the fleet prefills, half decodes, and everybody has
//! half of every prompt cached, which is the dearest case for the prefix index.

use cleave_domain::{
    Capacity, Fingerprint, FlightId, Incarnation, Report, Request, Role, Sampling, Slo, StopRules,
    Time, WorkerDescription, WorkerId, WorkerRef,
};
use cleave_router::{Brain, Input, Limits};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REQUESTS: u64 = 2000;

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|word| word.parse::<u32>().ok());
    let workers = u64::from(arguments.next().flatten().unwrap_or(1000));
    let prompt = arguments.next().flatten().unwrap_or(1000);
    let mut brain = Brain::new(Limits {
        flights_max: 1_000_000,
        queue_max: 1_000_000,
        queue_wait_max: Duration::from_secs(60),
        renew_every: Duration::from_secs(3600),
        reserve_timeout: Duration::from_secs(3600),
        ..Limits::default()
    });
    let prompt: Arc<[u32]> = (0..prompt).collect();
    let half = &prompt[..prompt.len() / 2];
    let stored = cleave_kv::block_hashes(0, half, 16);
    for id in 1..=workers {
        let worker = WorkerRef {
            worker: WorkerId(id),
            incarnation: Incarnation(1),
        };
        let role = [Role::Prefill, Role::Decode][(id % 2) as usize];
        tell(&mut brain, joined(worker, role));
        let report = Report::Prefix {
            stored: stored.clone(),
            evicted: Vec::new(),
        };
        tell(&mut brain, Input::Told { worker, report });
    }
    let request = Arc::new(Request {
        prompt,
        generated: Arc::new([]),
        sampling: Sampling::greedy(),
        stop: StopRules {
            max_tokens: 100,
            min_tokens: 0,
            stop_tokens: Arc::new([]),
        },
        priority: 0,
        cache_salt: 0,
        slo: Slo::default(),
    });
    let start = Instant::now();
    for flight in 0..REQUESTS {
        let request = Arc::clone(&request);
        let flight = FlightId(flight);
        tell(&mut brain, Input::Submitted { flight, request });
    }
    let each = start.elapsed() / REQUESTS as u32;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{workers} workers: {each:?} per decision")
}

fn tell(brain: &mut Brain, input: Input) {
    brain.handle(Time::ZERO, input);
    while brain.poll().is_some() {}
}

fn joined(worker: WorkerRef, role: Role) -> Input {
    let description = WorkerDescription {
        role,
        model: "m".to_owned(),
        fingerprint: Fingerprint("a".to_owned()),
        capacity: Capacity {
            block_tokens: 16,
            block_bytes: 1 << 20,
            blocks_count: 100_000,
            slots_count: 256,
            step_tokens_max: 8192,
            context_tokens_max: 131_072,
        },
        queue_max: 1024,
    };
    Input::WorkerJoined {
        worker,
        description,
    }
}
