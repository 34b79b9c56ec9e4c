//! One sequence on one engine, without a router or a socket, for `cleave generate`.
//!
//! Owns: the smallest possible body of a worker's brain, and the one order of one request. Never:
//! decides what a step runs; the brain does, as in a server. Invariant: all outputs are polled
//! before the next input.

use anyhow::{Context, anyhow, bail};
use cleave_domain::{
    Emission, FinishReason, FlightId, HandoffId, Incarnation, Order, Report, Request, Role,
    RouterId, RunOrder, StepPlan, Time, WorkerId, WorkerRef,
};
use cleave_engine::Engine;
use cleave_sched::{
    LookupLimits, PoolWriter, WorkerActions, WorkerBrain, WorkerInput, WorkerLimits, WorkerNote,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ME: WorkerRef = WorkerRef {
    worker: WorkerId(1),
    incarnation: Incarnation(1),
};
const ROUTER: RouterId = RouterId(1);

/// A lease and time limit that never expires, since neither the router nor the engine of this
/// process can disappear.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs one request to its end, with drafts as `speculation` says; `each` receives every token when
/// it is drawn.
///
/// # Errors
/// If the request does not fit the engine, the engine fails, or `each` does.
pub(crate) fn run(
    engine: &mut dyn Engine,
    speculation: Option<LookupLimits>,
    request: Request,
    each: &mut dyn FnMut(&Emission) -> anyhow::Result<()>,
) -> anyhow::Result<FinishReason> {
    let mut brain = WorkerBrain::new(limits(engine, speculation));
    let mut solo = SingleRequest {
        engine,
        on_emission: each,
        facts: VecDeque::new(),
    };
    solo.order(request);
    let started = Instant::now();
    while let Some(fact) = solo.facts.pop_front() {
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        brain.handle(Time::from_nanos(nanos), fact);
        while let Some(output) = brain.poll() {
            if let Some(reason) = output.perform(&mut solo)? {
                return Ok(reason);
            }
        }
    }
    Err(anyhow!("the scheduler stopped before the sequence ended"))
}

struct SingleRequest<'a> {
    engine: &'a mut dyn Engine,
    on_emission: &'a mut dyn FnMut(&Emission) -> anyhow::Result<()>,
    facts: VecDeque<WorkerInput>,
}

impl SingleRequest<'_> {
    fn order(&mut self, request: Request) {
        self.facts
            .push_back(WorkerInput::RouterJoined { router: ROUTER });
        let run = RunOrder {
            handoff: HandoffId {
                flight: FlightId::new(ROUTER, 1),
                attempt: 0,
            },
            expected_output_tokens: request.stop.max_tokens,
            request: Arc::new(request),
            waited: Duration::ZERO,
            due: None,
        };
        self.facts.push_back(WorkerInput::Ordered {
            router: ROUTER,
            order: Order::Run(run),
        });
    }
}

/// The finish reason, at the end.
impl WorkerActions for SingleRequest<'_> {
    type Outcome = anyhow::Result<Option<FinishReason>>;

    fn step(&mut self, plan: StepPlan) -> Self::Outcome {
        let from = Instant::now();
        let result = self
            .engine
            .step(&plan)
            .context("the engine could not run a step")?;
        self.facts.push_back(WorkerInput::Stepped {
            result,
            took: from.elapsed(),
        });
        Ok(None)
    }

    fn report(&mut self, _: RouterId, report: Report) -> Self::Outcome {
        handle_report(report)
    }

    fn emit(&mut self, _: HandoffId, emission: Emission) -> Self::Outcome {
        (self.on_emission)(&emission)?;
        Ok(None)
    }

    fn forget(&mut self, _: HandoffId) -> Self::Outcome {
        Ok(None)
    }

    fn drained(&mut self) -> Self::Outcome {
        Ok(None)
    }

    fn note(&mut self, _: WorkerNote) -> Self::Outcome {
        Ok(None)
    }
}

fn handle_report(report: Report) -> anyhow::Result<Option<FinishReason>> {
    match report {
        Report::Finished { reason, .. } => Ok(Some(reason)),
        Report::Refused { refusal, .. } => bail!("the prompt was refused: {refusal:?}"),
        Report::LegFailed { failure, .. } => bail!("the sequence failed: {failure:?}"),
        // Reports of load, prefixes and progress concern only a router with several workers.
        _ => Ok(None),
    }
}

fn limits(engine: &dyn Engine, speculation: Option<LookupLimits>) -> WorkerLimits {
    WorkerLimits {
        me: ME,
        role: Role::Both,
        capacity: engine.describe().capacity,
        vocab_size: engine.describe().vocab_size,
        queue_max: 1,
        lease: NEVER,
        stall_max: NEVER,
        prefix_cache: false,
        step_max: NEVER,
        swap_blocks: 0,
        host_blocks: 0,
        disk_blocks: 0,
        writer: PoolWriter::Receiver,
        prices: cleave_domain::Prices::default(),
        steps_in_flight: 1,
        speculation: cleave_worker::speculation(engine, speculation),
    }
}
