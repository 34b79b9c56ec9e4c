//! Effects of the router brains' outputs.
//!
//! Owns: feeding router brains and performing their outputs. Never: decides. Invariant: a fence
//! takes effect at once; its answer comes soon, but other inputs may come before it.

use crate::log_text;
use crate::run::{ChaosEvent, ChaosRun, SimRouterProcess, WorkerMessage};
use crate::tape::{self, AnyTapeLine};
use crate::world::TimedCommand;
use cleave_domain::{Ending, Refusal, Tape, TapeRecord, WorkerRef};
use cleave_router::RouterReadiness;

impl ChaosRun<'_> {
    // === clients and operators ===

    pub(crate) fn stall(&mut self, client: usize) -> Result<Option<String>, String> {
        let Some(flight) = self.clients.set_stalled(client, Some(self.now)) else {
            return Ok(None);
        };
        let router = self.clients.all[client].router;
        self.feed_router(router, cleave_router::RouterInput::ReaderStalled { flight })?;
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
        self.feed_router(router, cleave_router::RouterInput::ReaderResumed { flight })?;
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
        let input = cleave_router::RouterInput::Commanded { worker, command };
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
                self.clients.receive_token(handoff, emission)?;
                Ok(words)
            }
            WorkerMessage::Report(report) => {
                let words = format!(
                    "r{:x} told        {from} {}",
                    router + 1,
                    log_text::report(&report)
                );
                let input = cleave_router::RouterInput::WorkerReported {
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
        input: cleave_router::RouterInput,
    ) -> Result<(), String> {
        let process = &mut self.routers[router];
        let at = self.now;
        let is_submission = matches!(input, cleave_router::RouterInput::Submitted { .. });
        if process.tape.is_some() {
            let input = input.clone();
            process.record(&Tape::Router(TapeRecord::Received { at, input }));
        }
        process.brain.handle(at, input);
        let mut outputs = Vec::new();
        while let Some(output) = process.brain.poll() {
            if process.tape.is_some() {
                let output = output.clone();
                process.record(&Tape::Router(TapeRecord::Emitted { output }));
            }
            outputs.push(output);
        }
        process.brain.check();
        let wake = process.brain.deadline();
        if let Some(wake) = wake.filter(|w| process.wakeup_at.is_none_or(|planned| *w < planned)) {
            process.wakeup_at = Some(wake);
            self.schedule(wake, ChaosEvent::WakeRouter(router));
        }
        for output in outputs {
            let process = &self.routers[router];
            let is_served = process.readiness == RouterReadiness::Ready && process.brain.answers();
            if is_submission && is_served && refuses_for_no_worker(&output) {
                return Err(format!(
                    "r{:x} is ready, its workers answer, and it refuses a request for want of them",
                    router + 1
                ));
            }
            self.perform_router_output(router, output)?;
        }
        Ok(())
    }

    /// Answers a question about a client's stream soon; other inputs may come before the answer.
    fn counted(&mut self, router: usize, counted: cleave_router::RouterInput) {
        let soon = self.now + self.rng.micros(0, 500);
        let id = self.routers[router].id;
        self.schedule(soon, ChaosEvent::RouterInput(id, counted));
    }

    fn perform_router_output(
        &mut self,
        router: usize,
        output: cleave_router::RouterOutput,
    ) -> Result<(), String> {
        match output {
            cleave_router::RouterOutput::Order { worker, order } => {
                self.order(router, worker, order);
            }
            cleave_router::RouterOutput::Fence { handoff } => {
                let generated = self.clients.fence(handoff)?.into();
                self.count("fenced");
                self.counted(
                    router,
                    cleave_router::RouterInput::Counted { handoff, generated },
                );
            }
            cleave_router::RouterOutput::Count { handoff } => {
                let generated = self.clients.delivered_tokens(handoff.flight)?.into();
                self.counted(
                    router,
                    cleave_router::RouterInput::Counted { handoff, generated },
                );
            }
            cleave_router::RouterOutput::End {
                flight,
                ending,
                output_tokens,
                timing: _,
            } => self.clients.end(flight, ending, output_tokens)?,
            cleave_router::RouterOutput::Readiness(readiness) => {
                self.routers[router].readiness = readiness;
            }
            cleave_router::RouterOutput::Drained => self.routers[router].drained = true,
            cleave_router::RouterOutput::WorkersWanted(_) => self.count("wanted"),
            cleave_router::RouterOutput::Note(cleave_router::RouterNote::CancelFreed {
                flight,
                took,
                ..
            }) if self.world.is_undisturbed() && took > self.world.cancel_max() => {
                return Err(format!(
                    "{flight} was cancelled and held blocks for {took:?}"
                ));
            }
            cleave_router::RouterOutput::Note(note) => self.count(match note {
                cleave_router::RouterNote::Placed { .. } => "placed",
                cleave_router::RouterNote::PassedOver { .. } => "passed over",
                cleave_router::RouterNote::Decided(_) => "decided",
                cleave_router::RouterNote::Judged { .. } => "judged",
                cleave_router::RouterNote::Stale { .. } => "stale",
                cleave_router::RouterNote::Retried { .. } => "retried",
                cleave_router::RouterNote::CancelFreed { .. } => "cancel freed",
                cleave_router::RouterNote::Moving { .. } => "moving",
                cleave_router::RouterNote::Moved { .. } => "moved",
                cleave_router::RouterNote::MigrationAborted { .. } => "stayed",
                cleave_router::RouterNote::WorkerStuck { .. } => "workers stuck",
                cleave_router::RouterNote::PrefixDropped { .. } => "prefixes dropped",
                cleave_router::RouterNote::Fleet { workers, .. } => {
                    self.routers[router].workers = workers.total();
                    return Ok(());
                }
            }),
        }
        Ok(())
    }

    pub(crate) fn wake_router(&mut self, router: usize) -> Result<Option<String>, String> {
        let process = &mut self.routers[router];
        // A deadline may move later after its wake-up was scheduled.
        if process.wakeup_at.is_none_or(|at| at > self.now) {
            return Ok(None);
        }
        process.wakeup_at = None;
        self.feed_router(router, cleave_router::RouterInput::Woke)?;
        Ok(Some(format!("r{:x} woke", router + 1)))
    }
}

impl SimRouterProcess {
    fn record(&mut self, line: &AnyTapeLine) {
        if let Some(tape) = &mut self.tape {
            tape.push(tape::write(line));
        }
    }
}

/// Whether a flight is refused because no worker could serve it.
fn refuses_for_no_worker(output: &cleave_router::RouterOutput) -> bool {
    matches!(
        output,
        cleave_router::RouterOutput::End {
            ending: Ending::Refused(Refusal::NoWorker),
            ..
        }
    )
}
