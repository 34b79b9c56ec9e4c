//! Effects of the worker brains' outputs: towards routers, other workers and engines.
//!
//! Owns: feeding worker brains and performing their outputs. Never: decides. Invariant: every frame
//! that arrives is imported or discarded before the next input.

mod links;

pub(crate) use links::checksum;

use crate::bit_flips::MessageArrival;
use crate::body::{EngineOp, EngineOpResult, FetchSource};
use crate::log_text;
use crate::model::REPEATING_SEED_BIT;
use crate::network::StreamDirection;
use crate::run::{ChaosEvent, ChaosRun, WorkerMessage, worker_index};
use cleave_domain::{RouterId, WorkerRef};
use cleave_kv::PoolWriter;
use cleave_sched::{ExportOutcome, ImportOutcome, WorkerInput, WorkerNote, WorkerOutput};

/// Device failures, of a thousand, that break the engine for good.
const ENGINE_LOST: u32 = 300;

/// Whether the input reports a failure of the device.
fn is_device_failure(input: &WorkerInput) -> bool {
    matches!(
        input,
        WorkerInput::StepFailed { .. }
            | WorkerInput::Exported {
                outcome: ExportOutcome::Broken,
                ..
            }
            | WorkerInput::Imported {
                outcome: ImportOutcome::Broken,
                ..
            }
    )
}

impl ChaosRun<'_> {
    // === the brain's body ===

    pub(crate) fn feed_worker(&mut self, worker: usize, input: WorkerInput) -> Result<(), String> {
        let now = self.now;
        let Some(body) = self.workers[worker].body.as_mut() else {
            return Ok(());
        };
        body.handle_input(now, input);
        let mut outputs = Vec::new();
        while let Some(output) = body.poll_output() {
            outputs.push(output);
        }
        body.brain.check();
        for output in outputs {
            self.perform_worker_output(worker, output)?;
        }
        let price = self.world.engine_costs;
        let Some(body) = self.workers[worker].body.as_mut() else {
            return Ok(());
        };
        if let Some((handoff, part, _)) = &body.arriving {
            return Err(format!("{} ignores {handoff} {part:?}", body.worker));
        }
        let me = body.worker;
        let wake = body.brain.deadline();
        let wake = wake.filter(|w| body.wakeup_at.is_none_or(|planned| *w < planned));
        if let Some(wake) = wake {
            body.wakeup_at = Some(wake);
            self.schedule(wake, ChaosEvent::WakeWorker(me));
        }
        let body = self.workers[worker].body.as_mut();
        if let Some(done) = body.and_then(|body| body.begin_next_op(now, &price)) {
            self.schedule(done, ChaosEvent::EngineDone(me));
        }
        self.exit_if_done(worker);
        Ok(())
    }

    fn perform_worker_output(&mut self, worker: usize, output: WorkerOutput) -> Result<(), String> {
        let Some(body) = self.workers[worker].body.as_mut() else {
            return Ok(());
        };
        let me = body.worker;
        match output {
            WorkerOutput::Step(plan) => body.step(plan)?,
            WorkerOutput::Report { router, report } => {
                body.witness(&report)?;
                self.send_to_router(me, router, WorkerMessage::Report(report));
            }
            WorkerOutput::Emit { handoff, emission } => {
                let router = handoff.flight.router();
                self.send_to_router(me, router, WorkerMessage::Token(handoff, emission));
            }
            WorkerOutput::Export(export) => body.export(export)?,
            WorkerOutput::Send { to, packet } => {
                self.send(me, to, packet, Vec::new());
            }
            WorkerOutput::Import {
                handoff,
                part,
                block,
            } => body.import(handoff, part, block)?,
            WorkerOutput::Discard { handoff, part } => {
                body.take_arrived_frame(handoff, part)?;
                self.count("frames discarded");
            }
            WorkerOutput::SwapOut {
                handoff,
                blocks,
                state,
            } => {
                let units = body.limits.capacity.units(&blocks, state).collect();
                body.swap(EngineOp::SwapOut { handoff, units })?
            }
            WorkerOutput::SwapIn {
                handoff,
                blocks,
                state,
            } => {
                let units = body.limits.capacity.units(&blocks, state).collect();
                body.swap(EngineOp::SwapIn { handoff, units })?
            }
            WorkerOutput::SwapDrop { handoff } => {
                for answer in body.swap_drop(handoff) {
                    self.schedule(self.now, ChaosEvent::WorkerInput(me, answer));
                }
            }
            WorkerOutput::Offload { content, block } => body.offload(content, block)?,
            WorkerOutput::SpillToDisk { content } => self.spill(me, content),
            WorkerOutput::Fetch { handoff, blocks } => {
                let first = blocks.first().map(|(content, _)| *content);
                if body.fetch(self.now, handoff, blocks)? == FetchSource::Disk {
                    self.read_disk(me, handoff, first);
                }
            }
            WorkerOutput::FetchStop { handoff } => {
                if let Some(answer) = body.stop_fetch(self.now, handoff) {
                    self.schedule(self.now, ChaosEvent::WorkerInput(me, answer));
                }
            }
            WorkerOutput::TierDrop { content, place } => body.drop_from_tier(content, place)?,
            WorkerOutput::Forget { handoff } => {
                for answer in body.forget(handoff) {
                    self.schedule(self.now, ChaosEvent::WorkerInput(me, answer));
                }
            }
            WorkerOutput::Drained => self.drained(worker)?,
            WorkerOutput::Note(WorkerNote::Pool {
                blocks_leaked,
                states_leaked,
                ..
            }) if blocks_leaked + states_leaked > 0 => {
                return Err(format!(
                    "{me} reports {blocks_leaked} leaked blocks and {states_leaked} leaked slots"
                ));
            }
            WorkerOutput::Note(note) => {
                if let WorkerNote::Pool {
                    blocks_quarantined, ..
                } = note
                {
                    body.quarantined = blocks_quarantined;
                }
                self.note(&note);
            }
        }
        Ok(())
    }

    fn note(&mut self, note: &WorkerNote) {
        match note {
            WorkerNote::Stepped { .. } => self.count("steps"),
            WorkerNote::Drafted {
                drafted_tokens,
                accepted_tokens,
                ..
            } => {
                for _ in 0..*accepted_tokens {
                    self.count("guesses true");
                }
                for _ in *accepted_tokens..*drafted_tokens {
                    self.count("guesses wrong");
                }
            }
            WorkerNote::Landed { .. } => self.count("landed"),
            WorkerNote::Joined { .. } => self.count("joined"),
            WorkerNote::Preempted { .. } => self.count("preempted"),
            WorkerNote::SwappedOut { .. } => self.count("swapped out"),
            WorkerNote::SwappedIn { .. } => self.count("swapped in"),
            WorkerNote::Offloaded { .. } | WorkerNote::Fetched { .. } => self.note_below(note),
            WorkerNote::MigratedOut { .. } => self.count("moved out"),
            WorkerNote::Stuck { .. } => self.count("stuck"),
            WorkerNote::HandoffFailed { .. } => self.count("hand-offs failed"),
            WorkerNote::PrefixLookedUp { cached_tokens, .. } if *cached_tokens > 0 => {
                self.count("prefix hits");
            }
            _ => {}
        }
    }

    pub(crate) fn wake_worker(&mut self, worker: WorkerRef) -> Result<Option<String>, String> {
        let Some(body) = self.workers[worker_index(worker)]
            .body
            .as_mut()
            .filter(|b| b.worker == worker)
        else {
            return Ok(None);
        };
        // A freeze may delay the wake-up past its deadline.
        if body.wakeup_at.is_none_or(|at| at > self.now) {
            return Ok(None);
        }
        body.wakeup_at = None;
        self.feed_worker(worker_index(worker), WorkerInput::Woke)?;
        Ok(Some(format!("{} woke", worker.worker)))
    }

    // === to and from the engine ===

    pub(crate) fn engine_done(&mut self, worker: WorkerRef) -> Result<Option<String>, String> {
        let broken = if self.faults_over {
            0
        } else {
            self.world.links.broken
        };
        let requests = &self.world.requests;
        let salt_of = |seed: u64| {
            requests[(seed & !REPEATING_SEED_BIT) as usize]
                .request
                .cache_salt
        };
        let Some(body) = self.workers[worker_index(worker)]
            .body
            .as_mut()
            .filter(|b| b.worker == worker)
        else {
            return Ok(None);
        };
        let done = body.finish_op(self.now, salt_of, &mut self.rng, broken)?;
        let words = match done {
            EngineOpResult::Answer(input) => {
                let words = log_text::input(&input);
                let broke = is_device_failure(&input);
                self.feed_worker(worker_index(worker), input)?;
                if broke && self.rng.chance(ENGINE_LOST) {
                    self.lose_engine(worker)?;
                }
                words
            }
            EngineOpResult::Send(export, payload) => {
                let words = format!("read {} block {}", export.handoff, export.unit());
                match self.world.writer {
                    PoolWriter::Receiver => {
                        self.send_block(worker, &export, &payload);
                    }
                    PoolWriter::Sender => self.write(worker, export, payload),
                }
                self.next_op(worker);
                words
            }
        };
        Ok(Some(format!("{} engine      {words}", worker.worker)))
    }

    /// The engine breaks for good: the brain drains, and the process starts again.
    fn lose_engine(&mut self, worker: WorkerRef) -> Result<(), String> {
        let back = self.rng.micros(0, 100_000);
        let process = &mut self.workers[worker_index(worker)];
        let body = process.body.as_mut().filter(|body| body.worker == worker);
        let Some(body) = body.filter(|body| !body.draining) else {
            return Ok(());
        };
        body.draining = true;
        process.restart_after = back;
        self.count("engines lost");
        let reason = "injected fault".to_owned();
        self.feed_worker(worker_index(worker), WorkerInput::EngineLost { reason })
    }

    pub(crate) fn next_op(&mut self, worker: WorkerRef) {
        let (now, price) = (self.now, self.world.engine_costs);
        let body = self.workers[worker_index(worker)].body.as_mut();
        if let Some(done) = body.and_then(|body| body.begin_next_op(now, &price)) {
            self.schedule(done, ChaosEvent::EngineDone(worker));
        }
        self.exit_if_done(worker_index(worker));
    }

    // === to and from routers ===

    fn send_to_router(&mut self, me: WorkerRef, router: RouterId, message: WorkerMessage) {
        let worker = worker_index(me);
        let Some(router) = self.router_index(router) else {
            return;
        };
        if self.net.stream(router, worker).worker != Some(me) {
            return;
        }
        let due = self.now + self.delay();
        let at = self
            .net
            .deliver_at(router, worker, StreamDirection::ToRouter, due);
        let epoch = self.net.stream(router, worker).epoch;
        let event = match self.transmit(message, self.world.flips.worker_messages) {
            MessageArrival::Received(message) => ChaosEvent::ToRouter {
                router,
                worker,
                epoch,
                from: me,
                message,
            },
            MessageArrival::Damaged => ChaosEvent::StreamDamaged {
                router,
                worker,
                epoch,
                direction: StreamDirection::ToRouter,
            },
        };
        self.schedule(at, event);
    }

    pub(crate) fn order(&mut self, router: usize, to: WorkerRef, order: cleave_domain::Order) {
        let worker = worker_index(to);
        let stream = self.net.stream(router, worker);
        if stream.worker != Some(to) {
            return;
        }
        let due = self.now + self.delay();
        let at = self
            .net
            .deliver_at(router, worker, StreamDirection::ToWorker, due);
        let epoch = stream.epoch;
        let event = match self.transmit(order, self.world.flips.orders) {
            MessageArrival::Received(order) => ChaosEvent::ToWorker {
                router,
                worker,
                epoch,
                order,
            },
            MessageArrival::Damaged => ChaosEvent::StreamDamaged {
                router,
                worker,
                epoch,
                direction: StreamDirection::ToWorker,
            },
        };
        self.schedule(at, event);
    }
}
