//! What goes wrong, and how it heals: lives, links, freezes, drains; and the demands at the end.
//!
//! Owns: starting and ending processes. Never: touches a brain's insides.
//! Invariant: once faults are over everything comes to rest, every flight has ended, and every
//! block is free or only cached.

use crate::body::{Body, Taping};
use crate::run::{Event, Run, index, life, router_life};
use crate::tape;
use crate::world::Fault;
use cleave_domain::{Tape, TapeLine, WorkerRef};
use cleave_kv::Writer;
use cleave_router::Readiness;
use std::time::Duration;

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    /// Killed: what it had sent and is still under way is lost.
    Killed,
    /// Of its own accord: what it sent arrives.
    Clean,
}

impl Run<'_> {
    // === faults ===

    pub(crate) fn fault(&mut self, fault: usize) -> Result<String, String> {
        let (_, fault) = self.world.faults[fault];
        match fault {
            Fault::Crash { worker, back } => {
                if self.seats[worker].body.is_some() {
                    self.exit(worker, Exit::Killed);
                    let at = self.now + back;
                    self.plan(at, Event::Starts(worker));
                }
            }
            Fault::Freeze { worker, span } => {
                let until = self.now + span;
                let seat = &mut self.seats[worker];
                seat.frozen_until = seat.frozen_until.max(until);
                if let Some(me) = seat.body.as_ref().map(|body| body.me) {
                    let silent = self.now + self.world.silence_max;
                    self.plan(silent, Event::Silent(me));
                }
            }
            Fault::Drain { worker, back } => {
                let seat = &mut self.seats[worker];
                if let Some(body) = seat.body.as_mut().filter(|body| !body.draining) {
                    body.draining = true;
                    seat.back = back;
                    let me = body.me;
                    let input = cleave_sched::Input::Draining;
                    self.plan(self.now, Event::WorkerHears(me, input));
                }
            }
            Fault::Hang { worker, span } => {
                let until = self.now + span;
                let seat = &mut self.seats[worker];
                seat.hung_until = seat.hung_until.max(until);
            }
            Fault::Isolate { worker, span } => {
                for other in (0..self.seats.len()).filter(|other| *other != worker) {
                    self.net.cut(worker, other, self.now + span);
                    self.lose_each_other(worker, other);
                }
                for router in 0..self.routers.len() {
                    self.part(router, worker, span);
                }
            }
            Fault::Restart { router, back } => self.router_dies(router, back),
            Fault::Cut { pair: (a, b), span } => {
                if a != b {
                    let until = self.now + span;
                    self.net.cut(a, b, until);
                    self.lose_each_other(a, b);
                }
            }
            Fault::Part {
                router,
                worker,
                span,
            } => self.part(router, worker, span),
            // Read by `delay`.
            Fault::Slow { .. } => {}
        }
        self.count("faults");
        Ok(format!("!! {fault:?}"))
    }

    /// How long a message between router and worker takes now.
    pub(crate) fn delay(&mut self) -> Duration {
        let now = self.now;
        let slow = self
            .world
            .faults
            .iter()
            .filter_map(|(at, fault)| match fault {
                Fault::Slow { extra, span } if *at <= now && now < *at + *span => Some(*extra),
                _ => None,
            });
        let extra: Duration = slow.sum();
        let jitter = self.world.wire.jitter.as_micros() as u64;
        self.world.wire.latency + extra + self.dice.micros(0, jitter)
    }

    /// A message came whose checksum does not fit: the link ends there.
    pub(crate) fn link_damaged(
        &mut self,
        from: WorkerRef,
        to: WorkerRef,
        epoch: u64,
    ) -> Option<String> {
        let (a, b) = (index(from), index(to));
        if self.body(to).is_none() || self.net.epoch(a, b) != epoch {
            return None;
        }
        self.net.cut(a, b, self.now);
        self.lose_each_other(a, b);
        self.count("links ended by damage");
        Some(format!("{} damaged     by {from}", to.worker))
    }

    /// The same of a stream between a router and a worker; the worker dials again after a while.
    pub(crate) fn stream_damaged(
        &mut self,
        router: usize,
        worker: usize,
        epoch: u64,
    ) -> Option<String> {
        let stream = self.net.stream(router, worker);
        if stream.epoch != epoch || stream.life.is_none() {
            return None;
        }
        let span = self.flips.micros(100, 200_000);
        self.part(router, worker, span);
        self.count("streams ended by damage");
        Some(format!("r{:x} damaged     w{:x}", router + 1, worker + 1))
    }

    fn lose_each_other(&mut self, a: usize, b: usize) {
        let alive = |seat: &crate::run::Seat| seat.body.as_ref().map(|body| body.me);
        let sides = (alive(&self.seats[a]), alive(&self.seats[b]));
        if let (Some(a), Some(b)) = sides {
            self.lose(a, b);
            self.lose(b, a);
        }
    }

    fn part(&mut self, router: usize, worker: usize, span: Duration) {
        let Some(me) = self.net.stream(router, worker).life else {
            return;
        };
        self.net.disconnect(router, worker);
        let router_notices = self.notice();
        let worker_notices = self.notice();
        let lost = cleave_router::Input::WorkerLost { worker: me };
        let life = self.routers[router].id;
        self.plan(self.now + router_notices, Event::RouterHears(life, lost));
        let lost = cleave_sched::Input::RouterLost { router: life };
        self.plan(self.now + worker_notices, Event::WorkerHears(me, lost));
        let again = self.now + router_notices.max(worker_notices) + span;
        let epoch = self.net.stream(router, worker).epoch;
        self.plan(
            again,
            Event::Meets {
                router,
                worker,
                epoch,
            },
        );
    }

    /// A frozen worker's routers take it for lost.
    pub(crate) fn silent(&mut self, who: WorkerRef) -> Result<Option<String>, String> {
        let worker = index(who);
        let until = self.seats[worker].frozen_until;
        if self.body(who).is_none() || until <= self.now {
            return Ok(None);
        }
        for router in 0..self.routers.len() {
            self.part(router, worker, until.since(self.now));
        }
        self.count("silent");
        Ok(Some(format!("{} is silent", who.worker)))
    }

    /// An order to drain, or a signal: the process starts again once it has.
    pub(crate) fn begins_to_drain(&mut self, worker: usize) {
        let back = self.dice.micros(100, 100_000);
        let seat = &mut self.seats[worker];
        if let Some(body) = seat.body.as_mut().filter(|body| !body.draining) {
            body.draining = true;
            seat.back = back;
        }
    }

    /// A router's process ends, and with it the connections of its clients and workers.
    fn router_dies(&mut self, router: usize, back: Duration) {
        let until = self.now + back;
        let seat = &mut self.routers[router];
        if seat.down_until.is_some() {
            return;
        }
        let old = seat.id;
        seat.down_until = Some(until);
        seat.wake = None;
        // Nobody is in that life any more, and nothing that was for it reaches the next.
        seat.id = router_life(router, (old.0 >> 8) + 1);
        self.plan(until, Event::RouterStarts(router));
        for client in 0..self.clients.all.len() {
            let about = &self.clients.all[client];
            if about.router == router && about.submitted {
                self.clients.cut_off(client);
            }
        }
        for worker in 0..self.seats.len() {
            // A side that had closed before is not heard any more either.
            let connected = self.net.stream(router, worker).life;
            self.net.disconnect(router, worker);
            let notices = self.now + self.notice();
            if let Some(me) = connected {
                let lost = cleave_sched::Input::RouterLost { router: old };
                self.plan(notices, Event::WorkerHears(me, lost));
            }
            let epoch = self.net.stream(router, worker).epoch;
            let meets = Event::Meets {
                router,
                worker,
                epoch,
            };
            let noticed = (self.now + self.world.wire.notice).max(notices);
            self.plan(noticed.max(until) + Duration::from_nanos(1), meets);
        }
    }

    pub(crate) fn router_starts(&mut self, router: usize) -> Result<String, String> {
        let limits = self.world.router.clone();
        let seat = &mut self.routers[router];
        self.tapes.extend(seat.tape.take());
        seat.brain = cleave_router::Brain::new(limits.clone());
        seat.down_until = None;
        seat.readiness = Readiness::NONE;
        seat.workers = 0;
        seat.tape = (self.taping == Taping::On)
            .then(|| vec![tape::write(&Tape::Router(TapeLine::Born { limits }))]);
        let words = format!("r{:x} starts      {}", router + 1, seat.id);
        self.count("routers restarted");
        Ok(words)
    }

    /// Once nothing that a dead life had under way can reach the other's pool, that is told.
    pub(crate) fn sever(&mut self, side: WorkerRef, dead: WorkerRef) {
        if self.world.writer == Writer::Sender {
            let landed = self.net.settled(dead, side, &self.world.wire);
            let at = landed.max(self.now + self.world.wire.notice) + self.notice();
            let severed = cleave_sched::Input::Severed { peer: dead };
            self.plan(at, Event::WorkerHears(side, severed));
        }
    }

    fn exit(&mut self, worker: usize, exit: Exit) {
        let Some(mut body) = self.seats[worker].body.take() else {
            return;
        };
        self.tapes.extend(body.take_tape());
        self.seats[worker].disk = std::mem::take(&mut body.below.disk);
        let me = body.me;
        let others: Vec<_> = (0..self.seats.len()).filter(|w| *w != worker).collect();
        for other in others {
            if exit == Exit::Killed {
                self.net.cut(worker, other, self.now);
            }
            if let Some(peer) = self.seats[other].body.as_ref().map(|body| body.me) {
                self.lose(peer, me);
                self.sever(peer, me);
            }
        }
        for router in 0..self.routers.len() {
            if self.net.stream(router, worker).life != Some(me) {
                continue;
            }
            let noticed = match exit {
                Exit::Killed => {
                    self.net.disconnect(router, worker);
                    self.now + self.notice()
                }
                Exit::Clean => self.net.close(router, worker) + Duration::from_nanos(1),
            };
            let lost = cleave_router::Input::WorkerLost { worker: me };
            let life = self.routers[router].id;
            self.plan(noticed, Event::RouterHears(life, lost));
        }
    }

    pub(crate) fn drained(&mut self, worker: usize) -> Result<(), String> {
        if let Some(body) = &mut self.seats[worker].body {
            if !body.draining || body.exiting {
                return Err(format!("{} drained unasked or again", body.me));
            }
            body.exiting = true;
            // What is in quarantine goes with the process.
            if body.quarantined == 0 {
                let what = body.check_empty();
                what.map_err(|what| format!("drained, and {what}"))?;
            }
        }
        self.count("drained");
        Ok(())
    }

    /// Ends a process that has drained, once its last words are out.
    pub(crate) fn exit_if_done(&mut self, worker: usize) {
        let seat = &self.seats[worker];
        let back = seat.back;
        if !(seat.body.as_ref()).is_some_and(|body| body.exiting && body.is_done()) {
            return;
        }
        self.exit(worker, Exit::Clean);
        if !self.closing {
            self.plan(self.now + back, Event::Starts(worker));
        }
    }

    // === starting and meeting ===

    pub(crate) fn start(&mut self, worker: usize) -> Result<Option<String>, String> {
        let seat = &mut self.seats[worker];
        if seat.body.is_some() {
            return Ok(None);
        }
        seat.life += 1;
        let me = life(worker, seat.life);
        let about = self.world.workers[worker].clone();
        let limits = cleave_sched::Limits {
            me,
            role: about.role,
            capacity: about.capacity,
            vocab_size: crate::model::VOCAB as u32,
            queue_max: about.queue_max,
            lease: self.world.lease,
            stall_max: self.world.stall_max,
            prefix_cache: self.world.prefix_cache,
            step_max: self.world.step_max,
            swap_blocks: self.world.swap_blocks,
            host_blocks: self.world.below.blocks.0,
            disk_blocks: self.world.below.blocks.1,
            writer: self.world.writer,
            prices: cleave_domain::Prices::default(),
            steps_in_flight: self.world.steps_in_flight,
            speculation: self.world.speculation,
        };
        let mut body = Body::new(limits, about, self.taping);
        body.below.disk = std::mem::take(&mut seat.disk);
        let contents: Vec<_> = body.below.disk.keys().copied().collect();
        seat.body = Some(body);
        if !contents.is_empty() {
            let found = cleave_sched::Input::FoundOnDisk { contents };
            self.worker_hears(worker, found)?;
            self.count("found on disk");
        }
        for router in 0..self.routers.len() {
            self.meet(router, worker)?;
        }
        Ok(Some(format!(
            "{} starts      life {}",
            me.worker, me.incarnation
        )))
    }

    /// Router and worker get a new connection, if the worker lives and they have none.
    pub(crate) fn meet(&mut self, router: usize, worker: usize) -> Result<Option<String>, String> {
        let Some(body) = &self.seats[worker].body else {
            return Ok(None);
        };
        if self.net.stream(router, worker).life == Some(body.me) {
            return Ok(None);
        }
        let (me, description) = (body.me, body.about.clone());
        if let Some(down_until) = self.routers[router].down_until {
            let epoch = self.net.stream(router, worker).epoch;
            let again = Event::Meets {
                router,
                worker,
                epoch,
            };
            self.plan(down_until + Duration::from_nanos(1), again);
            return Ok(None);
        }
        self.net.connect(router, worker, me);
        let joined = cleave_router::Input::WorkerJoined {
            worker: me,
            description,
        };
        self.router_hears(router, joined)?;
        let joined = cleave_sched::Input::RouterJoined {
            router: self.routers[router].id,
        };
        self.plan(self.now, Event::WorkerHears(me, joined));
        Ok(Some(format!("r{:x} meets       {me}", router + 1)))
    }

    // === at rest ===

    pub(crate) fn check_rest(&self) -> Result<(), String> {
        let waiting = self.clients.waiting();
        if !waiting.is_empty() {
            return Err(format!("at rest, and without an end: {waiting:?}"));
        }
        for seat in &self.seats {
            let Some(body) = &seat.body else {
                return Err("a worker never came back".to_owned());
            };
            body.check_empty()?;
            if body.draining {
                return Err(format!("{} was to drain and stays", body.me));
            }
            if !body.is_done() {
                return Err(format!("{} has work and rests", body.me));
            }
        }
        for (router, seat) in self.routers.iter().enumerate() {
            if seat.workers as usize != self.seats.len() {
                return Err(format!("r{:x} knows {} workers", router + 1, seat.workers));
            }
            let expected = self.readiness();
            if seat.readiness != expected {
                let (r, said) = (router + 1, seat.readiness);
                return Err(format!("r{r:x} says {said:?}, and it is {expected:?}"));
            }
            let open = seat.brain.legs_open();
            if open > 0 {
                return Err(format!("r{:x} still counts {open} legs", router + 1));
            }
        }
        Ok(())
    }

    /// What every router should say once all workers are back.
    fn readiness(&self) -> Readiness {
        let workers = || self.seats.iter().filter_map(|seat| seat.body.as_ref());
        let role = |body: &Body| body.brain.limits().role;
        let prefill = || workers().filter(|body| role(body).prefills());
        let decode = || workers().filter(|body| role(body).decodes());
        let fingerprint = |body: &Body| body.about.fingerprint.clone();
        let pair = prefill().any(|p| decode().any(|d| fingerprint(d) == fingerprint(p)));
        match pair {
            true => Readiness::Ready,
            false => Readiness::NoPair {
                prefill: prefill().count() as u32,
                decode: decode().count() as u32,
            },
        }
    }

    pub(crate) fn drain_all(&mut self) -> Result<(), String> {
        for router in 0..self.routers.len() {
            let input = cleave_router::Input::Draining;
            self.router_hears(router, input)?;
        }
        for worker in 0..self.seats.len() {
            if let Some(body) = self.seats[worker].body.as_mut() {
                body.draining = true;
                let me = body.me;
                let input = cleave_sched::Input::Draining;
                self.plan(self.now, Event::WorkerHears(me, input));
            }
        }
        // From here on nobody starts again.
        self.closing = true;
        self.take_tapes();
        Ok(())
    }

    pub(crate) fn check_drained(&self) -> Result<(), String> {
        if self.routers.iter().any(|seat| !seat.drained) {
            return Err("a router never drained".to_owned());
        }
        let said = |seat: &crate::run::RouterSeat| seat.readiness == Readiness::Draining;
        if !self.routers.iter().all(said) {
            return Err("a router that drained calls for requests".to_owned());
        }
        if self.seats.iter().any(|seat| seat.body.is_some()) {
            return Err("a worker never drained".to_owned());
        }
        Ok(())
    }
}
