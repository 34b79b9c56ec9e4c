//! Effects of the worker brains' outputs: towards routers, other workers and engines.
//!
//! Owns: feeding worker brains and performing their outputs. Never: decides. Invariant: every frame
//! that arrives is imported or discarded before the next input.

mod links;

use crate::bit_flips::MessageArrival;
use crate::log_text;
use crate::model::REPEATING_SEED_BIT;
use crate::network::StreamDirection;
use crate::run::{ChaosEvent, ChaosRun, WorkerMessage, worker_index};
use cleave_domain::{
    BlockHash, Emission, HandoffId, Report, RouterId, Tape, TapeRecord, Time, WorkerRef,
};
use cleave_kv::{Packet, PoolWriter};
use cleave_sched::{ExportOutcome, ImportOutcome, WorkerInput, WorkerNote, WorkerOutput};
use cleave_testkit::{CellHost, CellWorker, EngineOpResult, carry_out};

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
        let process = &mut self.workers[worker];
        let (Some(body), tape) = (process.body.as_mut(), &mut process.tape) else {
            return Ok(());
        };
        tape.record(|| {
            let input = input.clone();
            Tape::Worker(TapeRecord::Received { at: now, input })
        });
        body.handle_input(now, input);
        let mut outputs = Vec::new();
        while let Some(output) = body.brain.poll() {
            tape.record(|| {
                let output = output.clone();
                Tape::Worker(TapeRecord::Emitted { output })
            });
            outputs.push(output);
        }
        body.brain.check();
        for output in outputs {
            self.perform_worker_output(worker, output)?;
        }
        let process = &mut self.workers[worker];
        let Some(body) = process.body.as_mut() else {
            return Ok(());
        };
        body.check_frame_answered()?;
        let me = body.worker;
        if let Some(wake) = process.wake.plan(body.brain.deadline()) {
            self.schedule(wake, ChaosEvent::WakeWorker(me));
        }
        self.next_op(me);
        Ok(())
    }

    fn perform_worker_output(&mut self, worker: usize, output: WorkerOutput) -> Result<(), String> {
        if self.workers[worker].body.is_none() {
            return Ok(());
        }
        if matches!(output, WorkerOutput::Discard { .. }) {
            self.count("frames discarded");
        }
        carry_out(&mut ChaosHost { run: self, worker }, output)
    }

    fn note(&mut self, note: &WorkerNote) {
        let constrained = match note {
            WorkerNote::Joined { handoff } => Some(("constrained joined", handoff)),
            WorkerNote::Preempted { handoff, .. } => Some(("constrained preempted", handoff)),
            WorkerNote::SwappedIn { handoff, .. } => Some(("constrained swapped in", handoff)),
            WorkerNote::MigratedOut { handoff, .. } => Some(("constrained moved", handoff)),
            _ => None,
        };
        if let Some((name, handoff)) = constrained {
            self.count_constrained(name, handoff.flight);
        }
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
        // A freeze may delay the wake-up past its deadline.
        let at = worker_index(worker);
        if self.body(worker).is_none() || !self.workers[at].wake.take_due(self.now) {
            return Ok(None);
        }
        self.feed_worker(at, WorkerInput::Woke)?;
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
                if matches!(&input, WorkerInput::Stepped { result, .. } if !result.forced.is_empty())
                {
                    self.count("steps that forced tokens");
                }
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

/// A worker of the run, as its brain's outputs see it.
struct ChaosHost<'r, 'w> {
    run: &'r mut ChaosRun<'w>,
    worker: usize,
}

impl ChaosHost<'_, '_> {
    fn me(&mut self) -> WorkerRef {
        self.cells().worker
    }
}

impl CellHost for ChaosHost<'_, '_> {
    fn cells(&mut self) -> &mut CellWorker {
        let body = self.run.workers[self.worker].body.as_mut();
        body.expect("only a running worker has outputs")
    }

    fn now(&self) -> Time {
        self.run.now
    }

    fn report(&mut self, router: RouterId, report: Report) -> Result<(), String> {
        let me = self.me();
        let message = WorkerMessage::Report(report);
        self.run.send_to_router(me, router, message);
        Ok(())
    }

    fn emit(&mut self, handoff: HandoffId, emission: Emission) -> Result<(), String> {
        let me = self.me();
        let message = WorkerMessage::Token(handoff, emission);
        self.run
            .send_to_router(me, handoff.flight.router(), message);
        Ok(())
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) -> Result<(), String> {
        let me = self.me();
        self.run.send(me, to, packet, Vec::new());
        Ok(())
    }

    fn answer(&mut self, answer: WorkerInput) -> Result<(), String> {
        let (me, now) = (self.me(), self.run.now);
        self.run.schedule(now, ChaosEvent::WorkerInput(me, answer));
        Ok(())
    }

    fn drained(&mut self) -> Result<(), String> {
        self.run.drained(self.worker)
    }

    fn note(&mut self, note: WorkerNote) -> Result<(), String> {
        if let WorkerNote::Pool {
            blocks_quarantined, ..
        } = note
        {
            self.run.workers[self.worker].quarantined = blocks_quarantined;
        }
        self.run.note(&note);
        Ok(())
    }

    fn spill(&mut self, content: BlockHash) -> Result<(), String> {
        let me = self.me();
        self.run.spill(me, content);
        Ok(())
    }

    fn read_disk(&mut self, handoff: HandoffId, first: Option<BlockHash>) -> Result<(), String> {
        let me = self.me();
        self.run.read_disk(me, handoff, first);
        Ok(())
    }
}
