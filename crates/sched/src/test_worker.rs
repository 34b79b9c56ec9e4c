//! A worker that tests drive by hand: it serves both legs, and its steps take exactly what they
//! cost.
//!
//! Owns: orders, answers and steps. Never: goes on by itself.
//! Invariant: the brain's own checks hold after every fact.

use crate::{PoolWriter, WorkerBrain, WorkerInput, WorkerLimits, WorkerOutput};
use cleave_domain::{
    Capacity, Deadline, FlightId, HandoffId, HandoffTarget, LinkPrice, OnDeadlineMiss, Order,
    PrefillOrder, Prices, Refusal, Report, Request, RequestSlo, ReserveOrder, Role, RouterId,
    RowPrice, RunOrder, StepPlan, StepWork, Time, WorkerRef,
};
use cleave_planner::Predict;
use cleave_testkit::build;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const MS: Duration = Duration::from_millis(1);
pub(crate) const ROUTER: RouterId = RouterId(1);
pub(crate) const ME: WorkerRef = build::worker(1);
pub(crate) const PEER: WorkerRef = build::worker(2);

/// A step of 1 ms; besides 1 ns a pair, 2 ns a token of context and 5 us a draw.
pub(crate) fn prices() -> Prices {
    Prices {
        rows: vec![RowPrice {
            rows: 1,
            nanos: 1_000_000,
        }],
        pair_picos: 1000,
        context_picos: 2000,
        draw_nanos: 5000,
        link: LinkPrice::default(),
        ..Prices::default()
    }
}

pub(crate) fn limits() -> WorkerLimits {
    WorkerLimits {
        me: ME,
        role: Role::Both,
        capacity: Capacity {
            block_tokens: 16,
            block_bytes: 16,
            blocks_count: 100,
            slots_count: 4,
            step_tokens_max: 64,
            context_tokens_max: 1000,
            states: None,
            windows: None,
        },
        vocab_size: 1000,
        queue_max: 8,
        lease: Duration::from_secs(1000),
        stall_max: Duration::from_secs(10),
        step_max: Duration::from_secs(60),
        prefix_cache: false,
        swap_blocks: 0,
        host_blocks: 0,
        disk_blocks: 0,
        writer: PoolWriter::Receiver,
        prices: prices(),
        steps_in_flight: 1,
        speculation: None,
    }
}

/// A request, and what was promised of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    /// Equal families have equal tokens.
    pub(crate) family: u32,
    pub(crate) due: Option<Duration>,
    pub(crate) tpot: Option<Duration>,
    pub(crate) priority: i32,
}

impl Want {
    pub(crate) fn tokens(prompt: u32) -> Self {
        Self {
            prompt,
            output: 1,
            family: 0,
            due: None,
            tpot: None,
            priority: 0,
        }
    }

    fn due(&self) -> Option<Deadline> {
        let unmet = OnDeadlineMiss::Refuse;
        self.due.map(|left| Deadline { left, unmet })
    }

    fn request(&self) -> Arc<Request> {
        let tokens = (0..self.prompt).map(|i| (self.family * 7 + i) % 1000);
        Arc::new(Request {
            slo: RequestSlo {
                ttft: self.due,
                tpot: self.tpot,
                priority: self.priority,
                ..RequestSlo::default()
            },
            ..build::request(tokens, self.output)
        })
    }
}

pub(crate) fn handoff(number: u64) -> HandoffId {
    build::handoff(FlightId::new(ROUTER, number))
}

pub(crate) struct TestWorker {
    pub(crate) brain: WorkerBrain,
    pub(crate) now: Time,
    /// Every report that was sent to a router.
    pub(crate) reports: Vec<(RouterId, Report)>,
    /// Outputs other than reports and steps.
    pub(crate) outputs: Vec<WorkerOutput>,
    pub(crate) steps: VecDeque<StepPlan>,
}

impl TestWorker {
    pub(crate) fn new(limits: WorkerLimits) -> Self {
        let mut worker = Self {
            brain: WorkerBrain::new(limits),
            now: Time::ZERO,
            reports: Vec::new(),
            outputs: Vec::new(),
            steps: VecDeque::new(),
        };
        worker.handle(WorkerInput::RouterJoined { router: ROUTER });
        worker
    }

    pub(crate) fn handle(&mut self, input: WorkerInput) {
        self.brain.handle(self.now, input);
        while let Some(output) = self.brain.poll() {
            match output {
                WorkerOutput::Step(plan) => self.steps.push_back(plan),
                WorkerOutput::Report { router, report } => self.reports.push((router, report)),
                other => self.outputs.push(other),
            }
        }
        self.brain.check();
    }

    pub(crate) fn order(&mut self, router: RouterId, order: Order) {
        self.handle(WorkerInput::Ordered { router, order });
    }

    /// The decode leg; the answer.
    pub(crate) fn reserve(&mut self, number: u64, want: Want, sender: WorkerRef) -> Report {
        let before = self.reports.len();
        let order = Order::Reserve(ReserveOrder {
            handoff: handoff(number),
            request: want.request(),
            sender,
            expected_output_tokens: want.output,
            ahead_tokens: 0,
            waited: Duration::ZERO,
            due: want.due(),
        });
        self.order(ROUTER, order);
        self.reports[before].1.clone()
    }

    pub(crate) fn prefill(&mut self, number: u64, want: Want, target: HandoffTarget) {
        let order = Order::Prefill(PrefillOrder {
            handoff: handoff(number),
            request: want.request(),
            target,
            waited: Duration::ZERO,
            due: want.due(),
        });
        self.order(ROUTER, order);
    }

    /// Both legs, by one order; the answer.
    pub(crate) fn run(&mut self, number: u64, want: Want) -> Report {
        let before = self.reports.len();
        self.repeat_run(number, want);
        self.reports[before].1.clone()
    }

    /// The same, where no answer is expected.
    pub(crate) fn repeat_run(&mut self, number: u64, want: Want) {
        let order = Order::Run(RunOrder {
            handoff: handoff(number),
            request: want.request(),
            expected_output_tokens: want.output,
            waited: Duration::ZERO,
            due: want.due(),
        });
        self.order(ROUTER, order);
    }

    /// Both legs, or why not.
    pub(crate) fn submit(&mut self, number: u64, want: Want) -> Result<(), Refusal> {
        match self.run(number, want) {
            Report::Running { .. } => Ok(()),
            Report::Refused { refusal, .. } => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    /// The step under way ends when it was predicted to.
    pub(crate) fn end_step(&mut self) {
        let plan = self.steps.pop_front().expect("a step is under way");
        let took = prices().step(&StepWork::of_plan(&plan));
        self.now = self.now + took;
        let result = build::step_result(&plan, |_| 1);
        self.handle(WorkerInput::Stepped { result, took });
    }

    /// All steps, until there is nothing to run.
    pub(crate) fn finish(&mut self) {
        while !self.steps.is_empty() {
            self.end_step();
        }
    }
}
