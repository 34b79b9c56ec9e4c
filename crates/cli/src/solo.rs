//! One sequence on one engine, without a router or a socket.
//!
//! Owns: the smallest body that a worker's brain can have.
//! Never: decides what a step runs; the brain does, as in a server.
//! Invariant: every output is drained before the next input.

use anyhow::{Context, anyhow, bail};
use cleave_domain::{
    Emission, FinishReason, FlightId, HandoffId, Incarnation, Order, Prefill, Report, Request,
    Reserve, Role, RouterId, Target, Time, WorkerId, WorkerRef,
};
use cleave_engine::Engine;
use cleave_sched::{Brain, Input, Limits, Output};
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

/// Runs one request to its end; `each` sees every token as it is drawn.
///
/// # Errors
/// If the request does not fit the engine, or the engine fails.
pub(crate) fn run(
    engine: &mut dyn Engine,
    request: Request,
    each: &mut dyn FnMut(&Emission),
) -> anyhow::Result<FinishReason> {
    let handoff = HandoffId {
        flight: FlightId::new(ROUTER, 1),
        attempt: 0,
    };
    let started = Instant::now();
    let mut brain = Brain::new(limits(engine));
    let request = Arc::new(request);
    let order = |order| Input::Ordered {
        router: ROUTER,
        order,
    };
    let reserve = Reserve {
        handoff,
        expected_output_tokens: request.stop.max_tokens,
        request: request.clone(),
        sender: ME,
        waited: Duration::ZERO,
    };
    let mut facts = VecDeque::from([
        Input::RouterJoined { router: ROUTER },
        order(Order::Reserve(reserve)),
    ]);
    while let Some(fact) = facts.pop_front() {
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        brain.handle(Time::from_nanos(nanos), fact);
        while let Some(output) = brain.poll() {
            match output {
                Output::Step(plan) => {
                    let from = Instant::now();
                    let result = engine
                        .step(&plan)
                        .context("the engine could not run a step")?;
                    facts.push_back(Input::Stepped {
                        result,
                        took: from.elapsed(),
                    });
                }
                Output::Emit { emission, .. } => each(&emission),
                Output::Tell { report, .. } => match report {
                    Report::Reserved {
                        handoff,
                        present,
                        blocks,
                    } => {
                        let target = Target {
                            worker: ME,
                            present,
                            blocks,
                        };
                        let request = request.clone();
                        let prefill = Prefill {
                            handoff,
                            request,
                            target,
                            waited: Duration::ZERO,
                        };
                        facts.push_back(order(Order::Prefill(prefill)));
                    }
                    Report::Finished { reason, .. } => return Ok(reason),
                    Report::Refused { refusal, .. } => bail!("the prompt was refused: {refusal:?}"),
                    Report::LegFailed { failure, .. } => bail!("the sequence failed: {failure:?}"),
                    _ => {}
                },
                _ => {}
            }
        }
    }
    Err(anyhow!("the scheduler stopped before the sequence ended"))
}

fn limits(engine: &dyn Engine) -> Limits {
    Limits {
        me: ME,
        role: Role::Both,
        capacity: engine.describe().capacity,
        queue_max: 1,
        lease: FOREVER,
        stall_max: FOREVER,
        prefix_cache: false,
    }
}
