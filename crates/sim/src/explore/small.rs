//! The small worlds.
//!
//! Owns: how many workers, blocks and requests each has, what may go wrong in it and how often.
//! Never: depends on chance. Invariant: a world is named, and its name finds it again.

use super::guard::Guard;
use cleave_domain::{
    Capacity, Fingerprint, FlightId, Prices, Request, Role, RouterId, RowPrice, Sampling, Slo,
    StopRules, WorkerDescription,
};
use cleave_router::Command;
use cleave_sched::Writer;
use std::sync::Arc;
use std::time::Duration;

/// The one router of a small world.
pub(super) const ROUTER: RouterId = RouterId(1);

/// What may go wrong; each time costs one surprise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A packet between workers vanishes, and its link stays.
    Lose,
    /// A packet comes twice.
    Twice,
    /// A frame's payload changes on the way.
    Damage,
    /// A bit of a message flips on the way, in any of its fields: the link's check ends the connection.
    Flip,
    /// A field of a seal changes behind the link's check.
    Change,
    /// A packet comes once more with another generation, block or sender.
    Astray,
    /// A client leaves.
    Cancel,
    /// A worker dies and starts again as a new incarnation.
    Crash,
    /// A brain's own clock jumps to its next deadline: leases and timers run out.
    Expire,
    /// The link between two workers breaks; what is under way on it is lost.
    Cut,
    /// A router and a worker lose sight of each other; what is under way between them is lost.
    Part,
    /// An engine breaks what it was to do.
    Break,
    /// Time passes although things are under way.
    Slow,
}

/// Whether things under way may happen in any order for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Every order is explored.
    Any,
    /// There is one usual order, and each departure from it costs one surprise.
    Usual,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Small {
    pub(super) name: &'static str,
    pub(super) roles: &'static [Role],
    /// Prompt tokens and output tokens.
    pub(super) requests: &'static [(u32, u32)],
    /// Of which worker (counted from 0) what is wanted.
    pub(super) commands: &'static [(usize, Command)],
    pub(super) faults: &'static [Fault],
    pub(super) order: Order,
    /// Surprises on one path at most.
    pub(super) surprises_max: u8,
    pub(super) writer: Writer,
    /// Steps that engines take at a time.
    pub(super) steps_in_flight: u32,
    /// By which a step moves every clock.
    pub(super) step: Duration,
    /// Within so much a first token is promised; then work has a price too, and legs are placed by it.
    pub(super) promised: Option<Duration>,
    /// The guard that is missing.
    pub(super) without: Option<Guard>,
}

const FOUR: &[Role] = &[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

const EVERY: &[Fault] = &[
    Fault::Lose,
    Fault::Twice,
    Fault::Damage,
    Fault::Cancel,
    Fault::Crash,
    Fault::Expire,
    Fault::Cut,
    Fault::Part,
    Fault::Break,
    Fault::Slow,
];

/// The least in which every kind of word is said.
fn one() -> Small {
    Small {
        name: "one",
        roles: FOUR,
        requests: &[(3, 3)],
        commands: &[],
        faults: &[
            Fault::Lose,
            Fault::Twice,
            Fault::Cancel,
            Fault::Crash,
            Fault::Cut,
            Fault::Slow,
        ],
        order: Order::Any,
        surprises_max: 1,
        writer: Writer::Receiver,
        steps_in_flight: 1,
        step: Duration::ZERO,
        promised: None,
        without: None,
    }
}

/// What most others begin from.
fn three() -> Small {
    Small {
        name: "three",
        requests: &[(3, 3), (2, 2), (1, 3)],
        faults: EVERY,
        order: Order::Usual,
        surprises_max: 2,
        ..one()
    }
}

/// All of them, in the order in which they are explored.
pub(super) fn all() -> Vec<Small> {
    let (one, three) = (one(), three());
    let drain = Small {
        name: "drain",
        requests: &[(1, 5)],
        commands: &[(2, Command::Drain)],
        ..three.clone()
    };
    vec![
        one.clone(),
        three.clone(),
        drain.clone(),
        Small {
            name: "drains",
            requests: &[(1, 5), (1, 4), (2, 3)],
            commands: &[(2, Command::Drain), (3, Command::Drain)],
            surprises_max: 1,
            ..drain.clone()
        },
        Small {
            name: "role",
            requests: &[(1, 5), (2, 3)],
            commands: &[
                (2, Command::Serve(Role::Prefill)),
                (0, Command::Serve(Role::Decode)),
            ],
            ..drain.clone()
        },
        Small {
            name: "one-sided",
            requests: &[(3, 2), (3, 2)],
            faults: &[Fault::Cancel, Fault::Crash, Fault::Cut, Fault::Expire],
            writer: Writer::Sender,
            ..three.clone()
        },
        Small {
            name: "astray",
            requests: &[(3, 2)],
            faults: &[Fault::Astray],
            ..one.clone()
        },
        // Three flipped bits anywhere, on links and behind their check.
        Small {
            name: "flips",
            requests: &[(3, 3), (2, 2)],
            faults: &[Fault::Flip, Fault::Change],
            surprises_max: 3,
            ..three.clone()
        },
        // The same of a sequence that moves.
        Small {
            name: "changes",
            faults: &[Fault::Flip, Fault::Change],
            surprises_max: 3,
            ..drain.clone()
        },
        // Long answers, so that two steps of one are under way when things happen.
        Small {
            name: "ahead",
            requests: &[(1, 5), (2, 4)],
            commands: &[(2, Command::Drain)],
            steps_in_flight: 2,
            ..three.clone()
        },
        // Later than any timer: nobody is ever refused for it, and yet everything is placed by it.
        Small {
            name: "promised",
            requests: &[(3, 3), (2, 2)],
            promised: Some(Duration::from_secs(3600)),
            ..three.clone()
        },
        Small {
            name: "leases",
            requests: &[(1, 5), (2, 4), (1, 5)],
            faults: &[],
            step: Duration::from_millis(400),
            ..three
        },
    ]
}

impl Small {
    /// What a worker of it is told at birth.
    pub(super) fn limits(&self, worker: usize, life: u64) -> cleave_sched::Limits {
        cleave_sched::Limits {
            me: crate::run::life(worker, life),
            role: self.roles[worker],
            capacity: CAPACITY,
            vocab_size: crate::model::VOCAB as u32,
            queue_max: 2,
            lease: Duration::from_secs(2),
            stall_max: Duration::from_secs(1) + 25 * self.step,
            step_max: Duration::from_secs(10),
            prefix_cache: false,
            swap_blocks: 0,
            host_blocks: 0,
            disk_blocks: 0,
            writer: self.writer,
            prices: self.prices(),
            steps_in_flight: self.steps_in_flight,
            speculation: None,
        }
    }

    fn prices(&self) -> Prices {
        if self.promised.is_none() {
            return Prices::default();
        }
        let row = |rows| RowPrice {
            rows,
            nanos: 1_000_000 * u64::from(rows + 4),
        };
        Prices {
            rows: vec![row(1), row(4)],
            draw_nanos: 10_000,
            ..Prices::default()
        }
    }

    pub(super) fn about(&self, worker: usize) -> WorkerDescription {
        WorkerDescription {
            role: self.roles[worker],
            home: self.roles[worker],
            model: String::new(),
            fingerprint: Fingerprint::default(),
            capacity: CAPACITY,
            queue_max: 2,
            device: None,
        }
    }

    /// What its router is told at birth.
    pub(super) fn router(&self) -> cleave_router::Limits {
        cleave_router::Limits {
            flights_max: 8,
            queue_max: 8,
            queue_wait_max: Duration::from_secs(60),
            failures_max: FAILURES_MAX,
            renew_every: Duration::from_millis(500),
            reserve_timeout: Duration::from_secs(2),
            expected_output_tokens: 2,
            moves_max: 2,
            move_ahead_tokens: 1,
            reader_wait_max: Duration::from_secs(60),
            stuck_max: Duration::from_secs(30),
            ..cleave_router::Limits::default()
        }
    }

    pub(super) fn flight(&self, index: usize) -> FlightId {
        FlightId::new(ROUTER, index as u64)
    }

    pub(super) fn request(&self, index: usize) -> Arc<Request> {
        let (prompt, max_tokens) = self.requests[index];
        let first = 10 * (index as u32 + 1);
        let mut sampling = Sampling::greedy();
        sampling.seed = index as u64;
        Arc::new(Request {
            prompt: (first..first + prompt).collect(),
            generated: Arc::new([]),
            sampling,
            stop: StopRules {
                max_tokens,
                min_tokens: 0,
                stop_tokens: Arc::new([]),
            },
            priority: 0,
            cache_salt: 0,
            slo: Slo {
                ttft: self.promised,
                tpot: self.promised,
                ..Slo::default()
            },
        })
    }
}

/// Failures that a flight survives.
pub(super) const FAILURES_MAX: u32 = 3;

/// Three blocks of two tokens.
const CAPACITY: Capacity = Capacity {
    block_tokens: 2,
    block_bytes: 16,
    blocks_count: 3,
    slots_count: 2,
    step_tokens_max: 4,
    context_tokens_max: 12,
};
