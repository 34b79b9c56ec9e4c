//! Effects of the router brains' outputs.
//!
//! Owns: feeding router brains and performing their outputs. Never: decides. Invariant: a fence
//! takes effect at once; its answer comes soon, but other inputs may come before it.

use crate::log_text;
use crate::run::{ChaosEvent, ChaosRun, WorkerMessage};
use crate::world::TimedCommand;
use cleave_domain::{
    Ending, FlightId, HandoffId, Order, Refusal, RequestStageTimes, Tape, TapeRecord, WorkerRef,
};
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{
    PoolInput, PoolOutput, RouterActions, RouterInput, RouterNote, RouterOutput, RouterReadiness,
};
use std::sync::Arc;

impl ChaosRun<'_> {
    // === clients and operators ===

    pub(crate) fn stall(&mut self, client: usize) -> Result<Option<String>, String> {
        let Some(flight) = self.clients.set_stalled(client, Some(self.now)) else {
            return Ok(None);
        };
        let router = self.clients.all[client].router;
        self.feed_router(router, RouterInput::ReaderStalled { flight })?;
        self.count("stalled");
        Ok(Some(format!("r{:x} stalled     {flight}", router + 1)))
    }

    pub(crate) fn flow(&mut self, client: usize) -> Result<Option<String>, String> {
        let since = self.clients.all[client].stalled;
        let Some(flight) = self.clients.set_stalled(client, None) else {
            return Ok(None);
        };
        let waited = since.map(|since| self.now.since(since));
        let limit = self.world.router.reader_wait_max;
        if waited.is_some_and(|waited| waited > limit) {
            return Err(format!(
                "{flight} was not read for {waited:?}, but did not end"
            ));
        }
        let router = self.clients.all[client].router;
        self.feed_router(router, RouterInput::ReaderResumed { flight })?;
        Ok(Some(format!("r{:x} flowing     {flight}", router + 1)))
    }

    pub(crate) fn perform_command(&mut self, index: usize) -> Result<Option<String>, String> {
        let TimedCommand {
            router,
            worker,
            command,
            ..
        } = self.world.commands[index];
        if self.routers[router].down_until.is_some() {
            return Ok(None);
        }
        let worker = crate::run::worker_ref(worker, 0).worker;
        let input = RouterInput::Commanded { worker, command };
        self.feed_router(router, input)?;
        self.count("wishes");
        Ok(Some(format!(
            "r{:x} commanded   {worker} {command:?}",
            router + 1
        )))
    }

    // === the brain ===

    pub(crate) fn deliver_to_router(
        &mut self,
        router: usize,
        from: WorkerRef,
        message: WorkerMessage,
    ) -> Result<String, String> {
        match message {
            WorkerMessage::Token(handoff, emission) => {
                let words = format!(
                    "r{:x} token       {handoff} #{} = {} from {}",
                    router + 1,
                    emission.index,
                    emission.sampled.token,
                    from.worker
                );
                let cached = emission
                    .prompt
                    .as_ref()
                    .is_some_and(|f| f.cached_tokens > 0);
                self.clients.receive_token(handoff, emission)?;
                if cached {
                    self.count_constrained("constrained with cached tokens", handoff.flight);
                }
                Ok(words)
            }
            WorkerMessage::Report(report) => {
                let words = format!(
                    "r{:x} told        {from} {}",
                    router + 1,
                    log_text::report(&report)
                );
                let input = RouterInput::WorkerReported {
                    worker: from,
                    report,
                };
                self.feed_router(router, input)?;
                Ok(words)
            }
        }
    }

    pub(crate) fn feed_router(
        &mut self,
        router: usize,
        input: impl Into<PoolInput>,
    ) -> Result<(), String> {
        let input = input.into();
        let process = &mut self.routers[router];
        let at = self.now;
        let submitted = match &input.input {
            RouterInput::Submitted { flight, .. } => Some(*flight),
            _ => None,
        };
        process.tape.record(|| {
            let input = input.clone();
            Tape::Router(TapeRecord::Received { at, input })
        });
        process.pools.handle(at, input);
        let mut outputs = Vec::new();
        while let Some(output) = process.pools.poll() {
            process.tape.record(|| {
                let output = output.clone();
                Tape::Router(TapeRecord::Emitted { output })
            });
            outputs.push(output);
        }
        process.pools.check();
        if let Some(wake) = process.wake.plan(process.pools.deadline()) {
            self.schedule(wake, ChaosEvent::WakeRouter(router));
        }
        for output in outputs {
            self.perform(router, submitted, output)?;
        }
        Ok(())
    }

    fn perform(
        &mut self,
        router: usize,
        submitted: Option<FlightId>,
        output: PoolOutput,
    ) -> Result<(), String> {
        let process = &mut self.routers[router];
        match output {
            PoolOutput::Began { .. } => {}
            PoolOutput::Ended { model } => {
                process.readiness.remove(&model);
                process.workers.remove(&model);
            }
            PoolOutput::Drained => process.drained = true,
            PoolOutput::OfModel { model, output } => {
                let is_ready = process.readiness_of(&model) == RouterReadiness::Ready;
                let is_served = is_ready && process.pools.answers(&model);
                // A new flight may take the place of one in the queue, which ends for its own
                // reason.
                if is_served && submitted.is_some_and(|id| refuses_for_no_worker(&output, id)) {
                    return Err(format!(
                        "r{:x} is ready, its workers answer, and it refuses a request for want of them",
                        router + 1
                    ));
                }
                let run = self;
                output.perform(&mut ChaosRouter { run, router, model })?;
            }
        }
        Ok(())
    }

    /// Answers a question about a client's stream soon; other inputs may come before the answer.
    fn counted(&mut self, router: usize, counted: RouterInput) {
        let soon = self.now + self.rng.micros(0, 500);
        let id = self.routers[router].id;
        self.schedule(soon, ChaosEvent::RouterInput(id, counted));
    }

    pub(crate) fn wake_router(&mut self, router: usize) -> Result<Option<String>, String> {
        // A deadline may move later after its wake-up was scheduled.
        if !self.routers[router].wake.take_due(self.now) {
            return Ok(None);
        }
        self.feed_router(router, RouterInput::Woke)?;
        Ok(Some(format!("r{:x} woke", router + 1)))
    }
}

/// The body of a router of the run, for the pool of one model.
struct ChaosRouter<'r, 'w> {
    run: &'r mut ChaosRun<'w>,
    router: usize,
    model: Arc<str>,
}

impl RouterActions for ChaosRouter<'_, '_> {
    type Outcome = Result<(), String>;

    fn order(&mut self, worker: WorkerRef, order: Order) -> Result<(), String> {
        self.run.check_models(worker, &order)?;
        self.run.order(self.router, worker, order);
        Ok(())
    }

    fn fence(&mut self, handoff: HandoffId) -> Result<(), String> {
        let generated = self.run.clients.fence(handoff)?;
        self.run.count("fenced");
        if !generated.is_empty() {
            let flight = handoff.flight;
            self.run.count_constrained("constrained resumed", flight);
        }
        let generated = generated.into();
        let counted = RouterInput::Counted { handoff, generated };
        self.run.counted(self.router, counted);
        Ok(())
    }

    fn count(&mut self, handoff: HandoffId) -> Result<(), String> {
        let delivered = self.run.clients.delivered_tokens(handoff.flight)?;
        let generated = delivered.into();
        let counted = RouterInput::Counted { handoff, generated };
        self.run.counted(self.router, counted);
        Ok(())
    }

    fn end(
        &mut self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
        _: RequestStageTimes,
    ) -> Result<(), String> {
        self.run.clients.end(flight, ending, output_tokens)
    }

    /// The pools report the end of a drain together.
    fn drained(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn readiness(&mut self, readiness: RouterReadiness) -> Result<(), String> {
        let all = &mut self.run.routers[self.router].readiness;
        all.insert(Arc::clone(&self.model), readiness);
        Ok(())
    }

    fn workers_wanted(&mut self, _: ScalerDecision) -> Result<(), String> {
        self.run.count("wanted");
        Ok(())
    }

    fn note(&mut self, note: RouterNote) -> Result<(), String> {
        self.run.count(match note {
            RouterNote::CancelFreed { flight, took, .. } => {
                let world = self.run.world;
                if world.is_undisturbed() && took > world.cancel_max() {
                    return Err(format!(
                        "{flight} was cancelled and held blocks for {took:?}"
                    ));
                }
                "cancel freed"
            }
            RouterNote::Placed { .. } => "placed",
            RouterNote::PassedOver { .. } => "passed over",
            RouterNote::Decided(_) => "decided",
            RouterNote::Judged { .. } => "judged",
            RouterNote::Stale { .. } => "stale",
            RouterNote::Retried { .. } => "retried",
            RouterNote::Moving { .. } => "moving",
            RouterNote::Moved { .. } => "moved",
            RouterNote::MigrationAborted { .. } => "stayed",
            RouterNote::WorkerStuck { .. } => "workers stuck",
            RouterNote::PrefixDropped { .. } => "prefixes dropped",
            RouterNote::Fleet { workers, .. } => {
                let all = &mut self.run.routers[self.router].workers;
                all.insert(Arc::clone(&self.model), workers.total());
                return Ok(());
            }
        });
        Ok(())
    }
}

/// Whether this flight is refused because no worker could serve it.
fn refuses_for_no_worker(output: &RouterOutput, id: FlightId) -> bool {
    matches!(
        output,
        RouterOutput::End {
            flight,
            ending: Ending::Refused(Refusal::NoWorker),
            ..
        } if *flight == id
    )
}
