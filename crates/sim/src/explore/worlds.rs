//! The small worlds and their sizes.
//!
//! Owns: the workers, blocks, requests, faults and surprises of each. Never: depends on chance.
//! Invariant: a world has a unique name.

use super::guard::Guard;
use crate::model::VOCAB_SIZE;
use cleave_domain::{
    Capacity, FlightId, Pooling, Prices, Request, RequestSlo, Role, RouterId, RowPrice,
    SamplingParams, StateCapacity, WindowCapacity, WorkerDescription,
};
use cleave_router::OperatorRequest;
use cleave_sched::PoolWriter;
use cleave_testkit::{CellConstraint, build};
use std::sync::Arc;
use std::time::Duration;

/// The only router of a small world.
pub(super) const ROUTER: RouterId = RouterId(1);

/// A kind of fault; each occurrence costs one surprise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SmallWorldFault {
    /// A packet between workers is lost while its link stays up.
    Lose,
    /// A packet arrives twice.
    Duplicate,
    /// A frame's payload changes in flight.
    Damage,
    /// A bit of any field of a message flips in flight; the link's check ends the connection.
    Flip,
    /// A field of a seal changes behind the link's check.
    ChangeSeal,
    /// A copy of a packet arrives with another generation, block or sender.
    Misroute,
    /// A client leaves before its answer is complete.
    Cancel,
    /// A worker dies and starts again as a new incarnation.
    Crash,
    /// A brain's own clock jumps to its next deadline: leases and timers run out.
    Expire,
    /// The link between two workers breaks; its packets in flight are lost.
    Cut,
    /// The stream between a router and a worker breaks; its messages in flight are lost.
    Disconnect,
    /// An engine fails its operation.
    EngineFault,
    /// Time passes although messages are in flight.
    TimePassesEarly,
}

/// Whether messages in flight may arrive in any order at no cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeliveryOrder {
    /// Every order is explored.
    Any,
    /// There is one usual order, and each departure from it costs one surprise.
    Usual,
}

#[derive(Clone, Debug)]
pub(super) struct SmallWorld {
    pub(super) name: &'static str,
    pub(super) roles: &'static [Role],
    /// Prompt tokens and output tokens of each request; without output it asks for the mean of its
    /// hidden states.
    pub(super) requests: &'static [(u32, u32)],
    /// Operator commands, each with its worker (from 0).
    pub(super) commands: &'static [(usize, OperatorRequest)],
    pub(super) faults: &'static [SmallWorldFault],
    pub(super) order: DeliveryOrder,
    /// Most surprises on one path.
    pub(super) surprises_max: u8,
    pub(super) writer: PoolWriter,
    /// Steps that an engine runs at a time.
    pub(super) steps_in_flight: u32,
    /// Time by which a step advances every clock.
    pub(super) step: Duration,
    /// The TTFT and TPOT targets; with them work has prices, and legs are placed by forecasts.
    pub(super) slo_target: Option<Duration>,
    /// The slots of each worker's state plane; `None` if the model has no states.
    pub(super) states: Option<StateCapacity>,
    /// The blocks of each worker's window plane; `None` if the model has no windows.
    pub(super) windows: Option<WindowCapacity>,
    /// Whether the requests have constraints, which leave several tokens at each place.
    pub(super) constraints: bool,
    /// The guard that is disabled, if any.
    pub(super) missing_guard: Option<Guard>,
}

const FOUR_WORKERS: &[Role] = &[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

const ALL_FAULTS: &[SmallWorldFault] = &[
    SmallWorldFault::Lose,
    SmallWorldFault::Duplicate,
    SmallWorldFault::Damage,
    SmallWorldFault::Cancel,
    SmallWorldFault::Crash,
    SmallWorldFault::Expire,
    SmallWorldFault::Cut,
    SmallWorldFault::Disconnect,
    SmallWorldFault::EngineFault,
    SmallWorldFault::TimePassesEarly,
];

/// The smallest world in which every kind of message occurs.
fn one_request() -> SmallWorld {
    SmallWorld {
        name: "one",
        roles: FOUR_WORKERS,
        requests: &[(3, 3)],
        commands: &[],
        faults: &[
            SmallWorldFault::Lose,
            SmallWorldFault::Duplicate,
            SmallWorldFault::Cancel,
            SmallWorldFault::Crash,
            SmallWorldFault::Cut,
            SmallWorldFault::TimePassesEarly,
        ],
        order: DeliveryOrder::Any,
        surprises_max: 1,
        writer: PoolWriter::Receiver,
        steps_in_flight: 1,
        step: Duration::ZERO,
        slo_target: None,
        states: None,
        windows: None,
        constraints: false,
        missing_guard: None,
    }
}

/// Two workers without roles, each of which runs requests whole. Packets between them occur only
/// when a sequence moves.
fn whole_requests() -> SmallWorld {
    SmallWorld {
        name: "whole",
        roles: &[Role::Both, Role::Both],
        requests: &[(3, 3), (2, 2), (1, 3)],
        faults: &[
            SmallWorldFault::Flip,
            SmallWorldFault::Cancel,
            SmallWorldFault::Crash,
            SmallWorldFault::Expire,
            SmallWorldFault::Disconnect,
            SmallWorldFault::EngineFault,
            SmallWorldFault::TimePassesEarly,
        ],
        ..three_requests()
    }
}

/// The base of most other worlds.
fn three_requests() -> SmallWorld {
    SmallWorld {
        name: "three",
        requests: &[(3, 3), (2, 2), (1, 3)],
        faults: ALL_FAULTS,
        order: DeliveryOrder::Usual,
        surprises_max: 2,
        ..one_request()
    }
}

/// All worlds, in the order of exploration.
pub(super) fn all_worlds() -> Vec<SmallWorld> {
    let (one, three) = (one_request(), three_requests());
    let drain = SmallWorld {
        name: "drain",
        requests: &[(1, 5)],
        commands: &[(2, OperatorRequest::Drain)],
        ..three.clone()
    };
    vec![
        one.clone(),
        three.clone(),
        whole_requests(),
        drain.clone(),
        SmallWorld {
            name: "drains",
            requests: &[(1, 5), (1, 4), (2, 3)],
            commands: &[(2, OperatorRequest::Drain), (3, OperatorRequest::Drain)],
            surprises_max: 1,
            ..drain.clone()
        },
        SmallWorld {
            name: "role",
            requests: &[(1, 5), (2, 3)],
            commands: &[
                (2, OperatorRequest::Serve(Role::Prefill)),
                (0, OperatorRequest::Serve(Role::Decode)),
            ],
            ..drain.clone()
        },
        SmallWorld {
            name: "one-sided",
            requests: &[(3, 2), (3, 2)],
            faults: &[
                SmallWorldFault::Cancel,
                SmallWorldFault::Crash,
                SmallWorldFault::Cut,
                SmallWorldFault::Expire,
            ],
            writer: PoolWriter::Sender,
            ..three.clone()
        },
        SmallWorld {
            name: "astray",
            requests: &[(3, 2)],
            faults: &[SmallWorldFault::Misroute],
            ..one.clone()
        },
        // Three flipped bits anywhere: on links, and behind their check.
        SmallWorld {
            name: "flips",
            requests: &[(3, 3), (2, 2)],
            faults: &[SmallWorldFault::Flip, SmallWorldFault::ChangeSeal],
            surprises_max: 3,
            ..three.clone()
        },
        // Three flipped bits during a migration.
        SmallWorld {
            name: "changes",
            faults: &[SmallWorldFault::Flip, SmallWorldFault::ChangeSeal],
            surprises_max: 3,
            ..drain.clone()
        },
        // Long answers, so that two steps are in flight when faults occur.
        SmallWorld {
            name: "ahead",
            requests: &[(1, 5), (2, 4)],
            commands: &[(2, OperatorRequest::Drain)],
            steps_in_flight: 2,
            ..three.clone()
        },
        // Each worker must enforce the constraint behind what others have drawn.
        SmallWorld {
            name: "constrained",
            requests: &[(1, 5), (2, 3)],
            constraints: true,
            ..drain.clone()
        },
        // Targets later than any timer: no flight is refused for them, but every leg is placed by
        // forecasts.
        SmallWorld {
            name: "promised",
            requests: &[(3, 3), (2, 2)],
            slo_target: Some(Duration::from_secs(3600)),
            ..three.clone()
        },
        SmallWorld {
            name: "leases",
            requests: &[(1, 5), (2, 4), (1, 5)],
            faults: &[],
            step: Duration::from_millis(400),
            ..three.clone()
        },
        // Vectors of prompts of two chunks and of one, which either worker may pool.
        SmallWorld {
            name: "pools",
            requests: &[(5, 0), (3, 0)],
            faults: &[
                SmallWorldFault::Cancel,
                SmallWorldFault::Crash,
                SmallWorldFault::Disconnect,
                SmallWorldFault::EngineFault,
                SmallWorldFault::Expire,
            ],
            ..one.clone()
        },
        // A prompt's state is handed over with its blocks.
        SmallWorld {
            name: "state",
            faults: PLANE_FAULTS,
            order: DeliveryOrder::Usual,
            surprises_max: 2,
            states: STATES,
            ..one.clone()
        },
        // A running sequence's state leaves with its last block.
        SmallWorld {
            name: "state-moves",
            states: STATES,
            ..drain.clone()
        },
        SmallWorld {
            name: "state-one-sided",
            requests: &[(3, 2)],
            faults: &[
                SmallWorldFault::Cancel,
                SmallWorldFault::Crash,
                SmallWorldFault::Cut,
                SmallWorldFault::Expire,
            ],
            writer: PoolWriter::Sender,
            states: STATES,
            ..three.clone()
        },
        // A prompt's window is handed over with its blocks; its first block was given up before.
        SmallWorld {
            name: "window",
            requests: &[(4, 2)],
            faults: PLANE_FAULTS,
            order: DeliveryOrder::Usual,
            surprises_max: 2,
            windows: WINDOWS,
            ..one
        },
        // A running sequence's window leaves while it generates.
        SmallWorld {
            name: "window-moves",
            windows: WINDOWS,
            ..drain
        },
        SmallWorld {
            name: "window-one-sided",
            requests: &[(3, 2)],
            faults: &[
                SmallWorldFault::Cancel,
                SmallWorldFault::Crash,
                SmallWorldFault::Cut,
                SmallWorldFault::Expire,
            ],
            writer: PoolWriter::Sender,
            windows: WINDOWS,
            ..three
        },
    ]
}

impl SmallWorld {
    /// The limits of a worker's brain.
    pub(super) fn worker_limits(
        &self,
        worker: usize,
        incarnation: u64,
    ) -> cleave_sched::WorkerLimits {
        let me = crate::run::worker_ref(worker, incarnation);
        cleave_sched::WorkerLimits {
            role: self.roles[worker],
            vocab_size: crate::model::VOCAB_SIZE as u32,
            queue_max: 2,
            lease: Duration::from_secs(2),
            stall_max: Duration::from_secs(1) + 25 * self.step,
            step_max: Duration::from_secs(10),
            writer: self.writer,
            prices: self.prices(),
            steps_in_flight: self.steps_in_flight,
            ..build::limits(me, self.capacity())
        }
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            states: self.states,
            windows: self.windows,
            ..CAPACITY
        }
    }

    fn prices(&self) -> Prices {
        if self.slo_target.is_none() {
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

    pub(super) fn description(&self, worker: usize) -> WorkerDescription {
        WorkerDescription {
            queue_max: 2,
            ..build::description(self.roles[worker], self.capacity())
        }
    }

    /// The limits of the router's brain.
    pub(super) fn router_limits(&self) -> cleave_router::RouterLimits {
        cleave_router::RouterLimits {
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
            ..cleave_router::RouterLimits::default()
        }
    }

    pub(super) fn flight(&self, index: usize) -> FlightId {
        FlightId::new(ROUTER, index as u64)
    }

    pub(super) fn request(&self, index: usize) -> Arc<Request> {
        let (prompt, max_tokens) = self.requests[index];
        let first = 10 * (index as u32 + 1);
        let mut sampling = SamplingParams::greedy();
        sampling.seed = index as u64;
        // Longer than any output here, so that none ends by it.
        let constraint = CellConstraint {
            seed: index as u64,
            vocab_size: VOCAB_SIZE as u32,
            end_token: VOCAB_SIZE as u32 - 1,
            answer_tokens: 2 * max_tokens,
            thinking: None,
        };
        sampling.constraint = self.constraints.then(|| constraint.constraint());
        Arc::new(Request {
            sampling,
            slo: RequestSlo {
                ttft: self.slo_target,
                tpot: self.slo_target,
                ..RequestSlo::default()
            },
            pooling: (max_tokens == 0).then_some(Pooling::Mean),
            ..build::request(first..first + prompt, max_tokens.max(1))
        })
    }
}

/// Failures that a flight survives.
pub(super) const FAILURES_MAX: u32 = 3;

/// Two slots for states of a block and a half.
const STATES: Option<StateCapacity> = Some(StateCapacity {
    bytes: 24,
    count: 2,
});

/// Windows of three tokens, in blocks of two pieces: room for two sequences and a chunk.
const WINDOWS: Option<WindowCapacity> = Some(WindowCapacity {
    tokens: 3,
    bytes: 32,
    count: 6,
});

/// Faults of a hand-off with a second plane.
const PLANE_FAULTS: &[SmallWorldFault] = &[
    SmallWorldFault::Lose,
    SmallWorldFault::Duplicate,
    SmallWorldFault::Cancel,
    SmallWorldFault::Crash,
    SmallWorldFault::Cut,
    SmallWorldFault::EngineFault,
    SmallWorldFault::Misroute,
    SmallWorldFault::ChangeSeal,
];

/// Three blocks of two tokens.
const CAPACITY: Capacity = Capacity {
    block_tokens: 2,
    block_bytes: 16,
    blocks_count: 3,
    slots_count: 2,
    step_tokens_max: 4,
    context_tokens_max: 12,
    states: None,
    windows: None,
};
