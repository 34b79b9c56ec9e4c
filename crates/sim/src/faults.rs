//! Faults and recovery: processes, links, freezes, drains; and the checks at the end.
//!
//! Owns: starting and ending processes. Never: touches a brain's internals. Invariant: once faults
//! are over everything comes to rest, every flight has ended, and every block is free or only
//! cached.

use crate::model::draw_of_slot;
use crate::network::StreamDirection;
use crate::run::{ChaosEvent, ChaosRun, router_id, worker_index, worker_ref};
use crate::tape::LifeTape;
use crate::world::ChaosFault;
use cleave_domain::{Tape, TapeRecord, WorkerRef};
use cleave_kv::PoolWriter;
use cleave_router::RouterReadiness;
use cleave_testkit::{CellWorker, WakeTimer};
use std::time::Duration;

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessExit {
    /// Killed: its messages in flight are lost.
    Killed,
    /// Ended by itself: its messages in flight arrive.
    Clean,
}

impl ChaosRun<'_> {
    // === faults ===

    pub(crate) fn fault(&mut self, fault: usize) -> Result<String, String> {
        let (_, fault) = self.world.faults[fault];
        match fault {
            ChaosFault::Crash { worker, back } => {
                if self.workers[worker].body.is_some() {
                    self.exit(worker, ProcessExit::Killed);
                    let at = self.now + back;
                    self.schedule(at, ChaosEvent::WorkerStarts(worker));
                }
            }
            ChaosFault::Freeze { worker, span } => {
                let until = self.now + span;
                let process = &mut self.workers[worker];
                process.frozen_until = process.frozen_until.max(until);
                if let Some(me) = process.body.as_ref().map(|body| body.worker) {
                    let silent = self.now + self.world.silence_max;
                    self.schedule(silent, ChaosEvent::WorkerSilent(me));
                }
            }
            ChaosFault::Drain { worker, back } => {
                let process = &mut self.workers[worker];
                if let Some(body) = process.body.as_mut().filter(|body| !body.draining) {
                    body.draining = true;
                    process.restart_after = back;
                    let me = body.worker;
                    let input = cleave_sched::WorkerInput::Draining;
                    self.schedule(self.now, ChaosEvent::WorkerInput(me, input));
                }
            }
            ChaosFault::Hang { worker, span } => {
                let until = self.now + span;
                let process = &mut self.workers[worker];
                process.hung_until = process.hung_until.max(until);
            }
            ChaosFault::Isolate { worker, span } => {
                for other in (0..self.workers.len()).filter(|other| *other != worker) {
                    self.net.cut(worker, other, self.now + span);
                    self.lose_each_other(worker, other);
                }
                for router in 0..self.routers.len() {
                    self.cut_stream(router, worker, span);
                }
            }
            ChaosFault::Restart { router, back } => self.exit_router(router, back),
            ChaosFault::Cut { pair: (a, b), span } => {
                if a != b {
                    let until = self.now + span;
                    self.net.cut(a, b, until);
                    self.lose_each_other(a, b);
                }
            }
            ChaosFault::Disconnect {
                router,
                worker,
                span,
            } => self.cut_stream(router, worker, span),
            // `delay` reads these faults from the world.
            ChaosFault::Slow { .. } => {}
        }
        self.count("faults");
        Ok(format!("!! {fault:?}"))
    }

    /// Draws the delay of a message between router and worker.
    pub(crate) fn delay(&mut self) -> Duration {
        let now = self.now;
        let slow = self
            .world
            .faults
            .iter()
            .filter_map(|(at, fault)| match fault {
                ChaosFault::Slow { extra, span } if *at <= now && now < *at + *span => Some(*extra),
                _ => None,
            });
        let extra: Duration = slow.sum();
        let jitter = self.world.links.jitter.as_micros() as u64;
        self.world.links.latency + extra + self.rng.micros(0, jitter)
    }

    /// A message arrived with a wrong checksum: the link ends.
    pub(crate) fn link_damaged(
        &mut self,
        from: WorkerRef,
        to: WorkerRef,
        epoch: u64,
    ) -> Option<String> {
        let (a, b) = (worker_index(from), worker_index(to));
        if self.body(to).is_none() || self.net.epoch(a, b) != epoch {
            return None;
        }
        self.net.cut(a, b, self.now);
        self.lose_each_other(a, b);
        self.count("links ended by damage");
        Some(format!("{} damaged     by {from}", to.worker))
    }

    /// A message of a router's stream arrived with a wrong checksum; the worker reconnects after a
    /// while.
    pub(crate) fn stream_damaged(
        &mut self,
        router: usize,
        worker: usize,
        epoch: u64,
        direction: StreamDirection,
    ) -> Option<String> {
        let stream = self.net.stream(router, worker);
        if stream.epoch != epoch {
            return None;
        }
        match (stream.worker, direction) {
            (Some(_), _) => {
                let span = self.flip_rng.micros(100, 200_000);
                self.cut_stream(router, worker, span);
            }
            // The worker has left: its messages after this one are lost with the connection.
            (None, StreamDirection::ToRouter) => self.net.disconnect(router, worker),
            (None, StreamDirection::ToWorker) => return None,
        }
        self.count("streams ended by damage");
        Some(format!("r{:x} damaged     w{:x}", router + 1, worker + 1))
    }

    fn lose_each_other(&mut self, a: usize, b: usize) {
        let alive =
            |process: &crate::run::SimProcess| process.body.as_ref().map(|body| body.worker);
        let sides = (alive(&self.workers[a]), alive(&self.workers[b]));
        if let (Some(a), Some(b)) = sides {
            self.lose(a, b);
            self.lose(b, a);
        }
    }

    fn cut_stream(&mut self, router: usize, worker: usize, span: Duration) {
        let Some(me) = self.net.stream(router, worker).worker else {
            return;
        };
        self.net.disconnect(router, worker);
        let router_notices = self.notice();
        let worker_notices = self.notice();
        let lost = cleave_router::RouterInput::WorkerLost { worker: me };
        let id = self.routers[router].id;
        self.schedule(self.now + router_notices, ChaosEvent::RouterInput(id, lost));
        let lost = cleave_sched::WorkerInput::RouterLost { router: id };
        self.schedule(self.now + worker_notices, ChaosEvent::WorkerInput(me, lost));
        let again = self.now + router_notices.max(worker_notices) + span;
        let epoch = self.net.stream(router, worker).epoch;
        self.schedule(
            again,
            ChaosEvent::Reconnects {
                router,
                worker,
                epoch,
            },
        );
    }

    /// A frozen worker's routers take it for lost after the silence limit.
    pub(crate) fn silent(&mut self, worker_ref: WorkerRef) -> Result<Option<String>, String> {
        let worker = worker_index(worker_ref);
        let until = self.workers[worker].frozen_until;
        if self.body(worker_ref).is_none() || until <= self.now {
            return Ok(None);
        }
        for router in 0..self.routers.len() {
            self.cut_stream(router, worker, until.since(self.now));
        }
        self.count("silent");
        Ok(Some(format!("{} is silent", worker_ref.worker)))
    }

    /// A drain begins, by order or signal; the process starts again once it is done.
    pub(crate) fn begins_to_drain(&mut self, worker: usize) {
        let back = self.rng.micros(100, 100_000);
        let process = &mut self.workers[worker];
        if let Some(body) = process.body.as_mut().filter(|body| !body.draining) {
            body.draining = true;
            process.restart_after = back;
        }
    }

    /// A router's process ends, and with it the connections of its clients and workers.
    fn exit_router(&mut self, router: usize, back: Duration) {
        let until = self.now + back;
        let process = &mut self.routers[router];
        if process.down_until.is_some() {
            return;
        }
        let old = process.id;
        process.down_until = Some(until);
        process.wake = WakeTimer::default();
        // Inputs for the old life are dropped, and none reaches the next one.
        process.id = router_id(router, (old.0 >> 8) + 1);
        self.schedule(until, ChaosEvent::RouterStarts(router));
        // The clients' connections end with the process.
        for client in 0..self.clients.all.len() {
            let about = &self.clients.all[client];
            if about.router == router && about.submitted {
                self.clients.end_with_router(client);
            }
        }
        for worker in 0..self.workers.len() {
            // A side that had closed before is cut off too.
            let connected = self.net.stream(router, worker).worker;
            self.net.disconnect(router, worker);
            let notices = self.now + self.notice();
            if let Some(me) = connected {
                let lost = cleave_sched::WorkerInput::RouterLost { router: old };
                self.schedule(notices, ChaosEvent::WorkerInput(me, lost));
            }
            let epoch = self.net.stream(router, worker).epoch;
            let meets = ChaosEvent::Reconnects {
                router,
                worker,
                epoch,
            };
            let noticed = (self.now + self.world.links.notice_max).max(notices);
            self.schedule(noticed.max(until) + Duration::from_nanos(1), meets);
        }
    }

    pub(crate) fn router_starts(&mut self, router: usize) -> Result<String, String> {
        let limits = self.world.router.clone();
        let process = &mut self.routers[router];
        self.tapes.extend(process.tape.take());
        process.pools = cleave_router::RouterPools::new(limits.clone());
        process.down_until = None;
        process.readiness.clear();
        process.workers.clear();
        process.tape =
            LifeTape::begin(self.taping, || Tape::Router(TapeRecord::Started { limits }));
        let words = format!("r{:x} starts      {}", router + 1, process.id);
        self.count("routers restarted");
        Ok(words)
    }

    /// Notifies `side` that `dead` is fenced, once no write of the dead life is in flight to it.
    pub(crate) fn notify_fenced(&mut self, side: WorkerRef, dead: WorkerRef) {
        if self.world.writer == PoolWriter::Sender {
            let landed = self.net.last_arrival_max(dead, side, &self.world.links);
            let at = landed.max(self.now + self.world.links.notice_max) + self.notice();
            let fenced = cleave_sched::WorkerInput::Fenced { peer: dead };
            self.schedule(at, ChaosEvent::WorkerInput(side, fenced));
        }
    }

    fn exit(&mut self, worker: usize, exit: ProcessExit) {
        let Some(mut body) = self.workers[worker].body.take() else {
            return;
        };
        let process = &mut self.workers[worker];
        self.tapes.extend(process.tape.take());
        process.disk_left = body.take_disk();
        let me = body.worker;
        let others: Vec<_> = (0..self.workers.len()).filter(|w| *w != worker).collect();
        for other in others {
            if exit == ProcessExit::Killed {
                self.net.cut(worker, other, self.now);
            }
            if let Some(peer) = self.workers[other].body.as_ref().map(|body| body.worker) {
                self.lose(peer, me);
                self.notify_fenced(peer, me);
            }
        }
        for router in 0..self.routers.len() {
            if self.net.stream(router, worker).worker != Some(me) {
                continue;
            }
            let noticed = match exit {
                ProcessExit::Killed => {
                    self.net.disconnect(router, worker);
                    self.now + self.notice()
                }
                ProcessExit::Clean => {
                    self.net.close_worker_side(router, worker) + Duration::from_nanos(1)
                }
            };
            let lost = cleave_router::RouterInput::WorkerLost { worker: me };
            let id = self.routers[router].id;
            self.schedule(noticed, ChaosEvent::RouterInput(id, lost));
        }
    }

    pub(crate) fn drained(&mut self, worker: usize) -> Result<(), String> {
        let quarantined = self.workers[worker].quarantined;
        if let Some(body) = &mut self.workers[worker].body {
            if !body.draining || body.exiting {
                return Err(format!("{} reports a drain unasked or twice", body.worker));
            }
            body.exiting = true;
            // Blocks in quarantine end with the process, so it may drain with some.
            if quarantined == 0 {
                let empty = body.check_empty();
                empty.map_err(|problem| format!("drained, but {problem}"))?;
            }
        }
        self.count("drained");
        Ok(())
    }

    /// Ends a drained process, once its last messages are out.
    pub(crate) fn exit_if_done(&mut self, worker: usize) {
        let process = &self.workers[worker];
        let back = process.restart_after;
        if !(process.body.as_ref()).is_some_and(|body| body.exiting && body.is_idle()) {
            return;
        }
        self.exit(worker, ProcessExit::Clean);
        if !self.no_restarts {
            self.schedule(self.now + back, ChaosEvent::WorkerStarts(worker));
        }
    }

    // === starting and meeting ===

    pub(crate) fn start(&mut self, worker: usize) -> Result<Option<String>, String> {
        let process = &mut self.workers[worker];
        if process.body.is_some() {
            return Ok(None);
        }
        process.incarnation += 1;
        let me = worker_ref(worker, process.incarnation);
        let about = self.world.workers[worker].clone();
        let limits = cleave_sched::WorkerLimits {
            me,
            role: about.role,
            capacity: about.capacity,
            vocab_size: crate::model::VOCAB_SIZE as u32,
            queue_max: about.queue_max,
            lease: self.world.lease,
            stall_max: self.world.stall_max,
            prefix_cache: self.world.prefix_cache,
            step_max: self.world.step_max,
            swap_blocks: self.world.swap_blocks,
            host_blocks: self.world.tiers.blocks.0,
            disk_blocks: self.world.tiers.blocks.1,
            writer: self.world.writer,
            prices: cleave_domain::Prices::default(),
            steps_in_flight: self.world.steps_in_flight,
            speculation: self.world.speculation,
        };
        let started = limits.clone();
        let started = || Tape::Worker(TapeRecord::Started { limits: started });
        process.tape = LifeTape::begin(self.taping, started);
        process.wake = WakeTimer::default();
        process.quarantined = 0;
        let body = CellWorker::new(limits, draw_of_slot, 0);
        let mut body = body.mistaking(self.matcher_fault);
        let contents = body.find_disk(std::mem::take(&mut process.disk_left));
        process.body = Some(body);
        if !contents.is_empty() {
            let found = cleave_sched::WorkerInput::FoundOnDisk { contents };
            self.feed_worker(worker, found)?;
            self.count("found on disk");
        }
        for router in 0..self.routers.len() {
            self.connect(router, worker)?;
        }
        Ok(Some(format!(
            "{} starts      life {}",
            me.worker, me.incarnation
        )))
    }

    /// Router and worker get a new connection, if the worker runs and they have none.
    pub(crate) fn connect(
        &mut self,
        router: usize,
        worker: usize,
    ) -> Result<Option<String>, String> {
        let Some(body) = &self.workers[worker].body else {
            return Ok(None);
        };
        if self.net.stream(router, worker).worker == Some(body.worker) {
            return Ok(None);
        }
        let (me, description) = (body.worker, self.world.description(body.worker));
        if let Some(down_until) = self.routers[router].down_until {
            let epoch = self.net.stream(router, worker).epoch;
            let again = ChaosEvent::Reconnects {
                router,
                worker,
                epoch,
            };
            self.schedule(down_until + Duration::from_nanos(1), again);
            return Ok(None);
        }
        self.net.connect(router, worker, me);
        let joined = cleave_router::RouterInput::WorkerJoined {
            worker: me,
            description,
        };
        self.feed_router(router, joined)?;
        let joined = cleave_sched::WorkerInput::RouterJoined {
            router: self.routers[router].id,
        };
        self.schedule(self.now, ChaosEvent::WorkerInput(me, joined));
        Ok(Some(format!("r{:x} meets       {me}", router + 1)))
    }

    // === at rest ===

    pub(crate) fn check_rest(&self) -> Result<(), String> {
        let waiting = self.clients.unended_flights();
        if !waiting.is_empty() {
            return Err(format!("at rest, but flights have not ended: {waiting:?}"));
        }
        for process in &self.workers {
            let Some(body) = &process.body else {
                return Err("a worker never came back".to_owned());
            };
            body.check_empty()?;
            if body.draining {
                return Err(format!(
                    "{} was asked to drain, but still runs",
                    body.worker
                ));
            }
            if !body.is_idle() {
                return Err(format!("{} is at rest with work queued", body.worker));
            }
        }
        for (router, process) in self.routers.iter().enumerate() {
            let known: u32 = process.workers.values().sum();
            if known as usize != self.workers.len() {
                return Err(format!("r{:x} knows {known} workers", router + 1));
            }
            for model in self.world.models() {
                let expected = self.readiness(model);
                let reported = process.readiness_of(model);
                if reported != expected {
                    let r = router + 1;
                    return Err(format!(
                        "r{r:x} reports {reported:?} for {model}, expected {expected:?}"
                    ));
                }
            }
            let open = process.pools.legs_open();
            if open > 0 {
                return Err(format!("r{:x} still counts {open} legs", router + 1));
            }
        }
        Ok(())
    }

    /// The readiness that every router reports for a model once all workers are back.
    fn readiness(&self, model: &str) -> RouterReadiness {
        let workers = || {
            let running = self
                .workers
                .iter()
                .filter_map(|process| process.body.as_ref());
            running.filter(|body| self.world.description(body.worker).model == model)
        };
        let role = |body: &CellWorker| body.brain.limits().role;
        let prefill = || workers().filter(|body| role(body).prefills());
        let decode = || workers().filter(|body| role(body).decodes());
        let fingerprint =
            |body: &CellWorker| &self.world.workers[worker_index(body.worker)].fingerprint;
        let pair = prefill().any(|p| decode().any(|d| fingerprint(d) == fingerprint(p)));
        if pair {
            RouterReadiness::Ready
        } else {
            RouterReadiness::NoPair {
                prefill: prefill().count() as u32,
                decode: decode().count() as u32,
            }
        }
    }

    pub(crate) fn drain_all(&mut self) -> Result<(), String> {
        for router in 0..self.routers.len() {
            let input = cleave_router::RouterInput::Draining;
            self.feed_router(router, input)?;
        }
        for worker in 0..self.workers.len() {
            if let Some(body) = self.workers[worker].body.as_mut() {
                body.draining = true;
                let me = body.worker;
                let input = cleave_sched::WorkerInput::Draining;
                self.schedule(self.now, ChaosEvent::WorkerInput(me, input));
            }
        }
        // No process starts again from here on.
        self.no_restarts = true;
        self.take_tapes();
        Ok(())
    }

    pub(crate) fn check_drained(&self) -> Result<(), String> {
        if self.routers.iter().any(|process| !process.drained) {
            return Err("a router never drained".to_owned());
        }
        let reports_draining = |process: &crate::run::SimRouterProcess| {
            let mut all = process.readiness.values();
            all.all(|readiness| *readiness == RouterReadiness::Draining)
        };
        if !self.routers.iter().all(reports_draining) {
            return Err("a drained router does not report Draining".to_owned());
        }
        if self.workers.iter().any(|process| process.body.is_some()) {
            return Err("a worker never drained".to_owned());
        }
        Ok(())
    }
}
