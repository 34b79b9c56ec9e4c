//! Cost of the router's brain: `cargo run --release -p cleave-router --example placing
//! [PROMPT_TOKENS]`. For fleets of several sizes, with prices and without: placements per second,
//! and the memory of a worker and of a flight. Half of the fleet prefills, half decodes, and every
//! worker has half of every prompt cached, which is the most expensive case for the prefix index.

use cleave_domain::{
    CacheScope, Capacity, Fingerprint, FlightId, HandoffId, LinkPrice, Prices, Report, Request,
    RequestSlo, Role, RowPrice, Time, WorkerDescription, WorkerLoad, WorkerRef,
};
use cleave_router::{
    CancelReason, RouterBrain, RouterInput, RouterLimits, RouterNote, RouterOutput,
};
use cleave_testkit::build;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REQUESTS: u64 = 2000;
/// Flights under way while memory is measured.
const KEPT: u64 = 1000;

fn main() -> std::io::Result<()> {
    let words = std::env::args().nth(1);
    let tokens = words
        .and_then(|word| word.parse::<u32>().ok())
        .unwrap_or(1000);
    let mut out = std::io::stdout().lock();
    for workers in [16, 64, 1024] {
        for priced in [false, true] {
            let before = resident();
            let mut fleet = PlacementBench::new(workers, priced, tokens);
            let joined = resident();
            let each = fleet.place(REQUESTS);
            let placed = resident();
            fleet.keep(KEPT);
            let flying = resident();
            let rate = 1e9 / each.as_nanos().max(1) as f64;
            writeln!(
                out,
                "{workers} workers, {}: {each:?} per request, {rate:.0} a second; {} KiB a worker, {} B a flight",
                if priced { "by prices" } else { "by load" },
                joined.saturating_sub(before) / 1024 / workers,
                flying.saturating_sub(placed) / KEPT,
            )?;
        }
    }
    Ok(())
}

/// Resident memory of this process in bytes, as the system reports it; 0 where it does not.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1);
    pages.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0) * 4096
}

struct PlacementBench {
    brain: RouterBrain,
    request: Arc<Request>,
    next: u64,
    now: u64,
}

impl PlacementBench {
    fn new(workers: u64, priced: bool, tokens: u32) -> Self {
        let mut brain = RouterBrain::new(RouterLimits {
            flights_max: 1_000_000,
            queue_max: 1_000_000,
            queue_wait_max: Duration::from_secs(3600),
            renew_every: Duration::from_secs(3600),
            reserve_timeout: Duration::from_secs(3600),
            ..RouterLimits::default()
        });
        let prompt: Arc<[u32]> = (0..tokens).collect();
        let stored =
            cleave_kv::block_hashes(CacheScope::default(), &prompt[..prompt.len() / 2], 16);
        for id in 1..=workers {
            let worker = build::worker(id);
            feed(
                &mut brain,
                joined(worker, [Role::Prefill, Role::Decode][(id % 2) as usize]),
            );
            let report = Report::Prefix {
                stored: stored.clone(),
                evicted: Vec::new(),
            };
            feed(&mut brain, RouterInput::WorkerReported { worker, report });
            if priced {
                let report = Report::Prices(prices());
                feed(&mut brain, RouterInput::WorkerReported { worker, report });
            }
            let report = Report::Load(WorkerLoad {
                sequences_running: 8,
                context_tokens: 8000,
                blocks_free: 90_000,
                ..WorkerLoad::default()
            });
            feed(&mut brain, RouterInput::WorkerReported { worker, report });
        }
        let request = Arc::new(Request {
            slo: RequestSlo {
                ttft: Some(Duration::from_secs(3600)),
                tpot: Some(Duration::from_secs(1)),
                ..RequestSlo::default()
            },
            ..build::request(prompt.iter().copied(), 100)
        });
        Self {
            brain,
            request,
            next: 0,
            now: 0,
        }
    }

    /// Submits a request. Returns how long that took, and the worker that it was sent to.
    fn submit(&mut self) -> (Duration, Option<(WorkerRef, HandoffId)>) {
        let flight = FlightId(self.next);
        self.next += 1;
        self.now += 1_000_000;
        let request = Arc::clone(&self.request);
        let input = RouterInput::Submitted { flight, request };
        let start = Instant::now();
        self.brain.handle(Time::from_nanos(self.now), input);
        let mut placed = None;
        while let Some(output) = self.brain.poll() {
            if let RouterOutput::Note(RouterNote::Placed {
                handoff, decode, ..
            }) = output
            {
                placed = Some((decode, handoff));
            }
        }
        (start.elapsed(), placed)
    }

    /// The mean time of so many placements, each of which is cancelled.
    fn place(&mut self, count: u64) -> Duration {
        let mut total = Duration::ZERO;
        for _ in 0..count {
            let (took, placed) = self.submit();
            total += took;
            let (worker, handoff) = placed.expect("there is room");
            let flight = handoff.flight;
            let why = CancelReason::Left;
            self.handle(RouterInput::Cancelled { flight, why });
            let report = Report::Released { handoff };
            self.handle(RouterInput::WorkerReported { worker, report });
        }
        total / count as u32
    }

    fn keep(&mut self, count: u64) {
        for _ in 0..count {
            self.submit();
        }
    }

    fn handle(&mut self, input: RouterInput) {
        self.brain.handle(Time::from_nanos(self.now), input);
        while self.brain.poll().is_some() {}
    }
}

fn prices() -> Prices {
    let knot = |(rows, micros): (u32, u64)| RowPrice {
        rows,
        nanos: micros * 1000,
    };
    let rows = [
        (1, 5000),
        (64, 5200),
        (256, 7000),
        (1024, 21_000),
        (8192, 160_000),
    ];
    Prices {
        rows: rows.map(knot).to_vec(),
        pair_picos: 100,
        context_picos: 50_000,
        draw_nanos: 10_000,
        link: LinkPrice {
            latency_nanos: 100_000,
            byte_picos: 50,
        },
        ..Prices::default()
    }
}

fn feed(brain: &mut RouterBrain, input: RouterInput) {
    brain.handle(Time::ZERO, input);
    while brain.poll().is_some() {}
}

fn joined(worker: WorkerRef, role: Role) -> RouterInput {
    let description = WorkerDescription {
        role,
        home: role,
        model: "m".to_owned(),
        fingerprint: Fingerprint("a".to_owned()),
        capacity: Capacity {
            block_tokens: 16,
            block_bytes: 1 << 20,
            blocks_count: 100_000,
            slots_count: 256,
            step_tokens_max: 8192,
            context_tokens_max: 131_072,
            states: None,
            windows: None,
        },
        queue_max: 1024,
        device: None,
    };
    RouterInput::WorkerJoined {
        worker,
        description,
    }
}
