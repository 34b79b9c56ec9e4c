//! One sequence on one engine, without a router or a socket: what `cleave generate` needs.
//!
//! Owns: the smallest body that a worker's brain can have, and the only order of things that one
//! request on one worker can have: reserve, then prefill into what was reserved.
//! Never: decides what a step runs; the brain does, as in a server.
//! Invariant: every output is drained before the next input.

use anyhow::{Context, anyhow, bail};
use cleave_domain::{
    Emission, FinishReason, FlightId, HandoffId, Incarnation, Order, Prefill, Report, Request,
    Reserve, Role, RouterId, Target, Time, WorkerId, WorkerRef,
};
use cleave_engine::Engine;
use cleave_sched::{Brain, Input, Limits, Lookup, Output, Writer};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ME: WorkerRef = WorkerRef {
    worker: WorkerId(1),
    incarnation: Incarnation(1),
};
const ROUTER: RouterId = RouterId(1);

/// Long enough never to matter: nobody can lose interest here.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs one request to its end, with tokens guessed as `speculation` says; `each` sees every token as it is drawn.
///
/// # Errors
/// If the request does not fit the engine, the engine fails, or `each` does.
pub(crate) fn run(
    (engine, speculation): (&mut dyn Engine, Option<Lookup>),
    request: Request,
    each: &mut dyn FnMut(&Emission) -> anyhow::Result<()>,
) -> anyhow::Result<FinishReason> {
    let mut brain = Brain::new(limits(engine, speculation));
    let mut solo = Solo {
        engine,
        each,
        handoff: HandoffId {
            flight: FlightId::new(ROUTER, 1),
            attempt: 0,
        },
        request: Arc::new(request),
        facts: VecDeque::new(),
    };
    solo.reserve();
    let started = Instant::now();
    while let Some(fact) = solo.facts.pop_front() {
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        brain.handle(Time::from_nanos(nanos), fact);
        while let Some(output) = brain.poll() {
            if let Some(reason) = solo.perform(output)? {
                return Ok(reason);
            }
        }
    }
    Err(anyhow!("the scheduler stopped before the sequence ended"))
}

/// The body.
struct Solo<'a> {
    engine: &'a mut dyn Engine,
    each: &'a mut dyn FnMut(&Emission) -> anyhow::Result<()>,
    handoff: HandoffId,
    request: Arc<Request>,
    facts: VecDeque<Input>,
}

impl Solo<'_> {
    fn reserve(&mut self) {
        self.facts.push_back(Input::RouterJoined { router: ROUTER });
        self.order(Order::Reserve(Reserve {
            handoff: self.handoff,
            request: self.request.clone(),
            sender: ME,
            expected_output_tokens: self.request.stop.max_tokens,
            ahead_tokens: 0,
            waited: Duration::ZERO,
            due: None,
        }));
    }

    fn order(&mut self, order: Order) {
        self.facts.push_back(Input::Ordered {
            router: ROUTER,
            order,
        });
    }

    /// Does what the brain wants; gives the end when it has come.
    fn perform(&mut self, output: Output) -> anyhow::Result<Option<FinishReason>> {
        match output {
            Output::Step(plan) => {
                let from = Instant::now();
                let result = self
                    .engine
                    .step(&plan)
                    .context("the engine could not run a step")?;
                self.facts.push_back(Input::Stepped {
                    result,
                    took: from.elapsed(),
                });
            }
            Output::Emit { emission, .. } => (self.each)(&emission)?,
            Output::Tell { report, .. } => return self.hear(report),
            // Facts for a server's metrics, and moves to workers that do not exist.
            _ => {}
        }
        Ok(None)
    }

    fn hear(&mut self, report: Report) -> anyhow::Result<Option<FinishReason>> {
        match report {
            Report::Reserved {
                present, blocks, ..
            } => self.order(Order::Prefill(Prefill {
                handoff: self.handoff,
                request: self.request.clone(),
                target: Target {
                    worker: ME,
                    present,
                    blocks,
                },
                waited: Duration::ZERO,
                due: None,
            })),
            Report::Finished { reason, .. } => return Ok(Some(reason)),
            Report::Refused { refusal, .. } => bail!("the prompt was refused: {refusal:?}"),
            Report::LegFailed { failure, .. } => bail!("the sequence failed: {failure:?}"),
            // Load, prefixes and progress interest only a router with a choice.
            _ => {}
        }
        Ok(None)
    }
}

fn limits(engine: &dyn Engine, speculation: Option<Lookup>) -> Limits {
    Limits {
        me: ME,
        role: Role::Both,
        capacity: engine.describe().capacity,
        vocab_size: engine.describe().vocab_size,
        queue_max: 1,
        lease: FOREVER,
        stall_max: FOREVER,
        prefix_cache: false,
        step_max: FOREVER,
        swap_blocks: 0,
        host_blocks: 0,
        disk_blocks: 0,
        writer: Writer::Receiver,
        prices: cleave_domain::Prices::default(),
        steps_in_flight: 1,
        speculation: cleave_node::speculation(engine, speculation),
    }
}
