//! Time, processes and links of a small world.
//!
//! Owns: every clock, which processes run, and which are connected. Never: touches a brain's
//! internals. Invariant: nothing sent over a connection that broke arrives, and a side is notified
//! of the break before anything of the next connection; a write that a device has begun outlives
//! its process.

use super::apply::PropertyCheck;
use super::state::{LateWrite, PendingNotice, SmallWorldPacket, SmallWorldState};
use super::worlds::{ROUTER, SmallWorld};
use crate::model::draw_of_slot;
use crate::run::worker_index;
use cleave_domain::{Time, WorkerRef};
use cleave_kv::PoolWriter;
use cleave_sched::WorkerInput;
use cleave_testkit::CellWorker;
use std::rc::Rc;
use std::time::Duration;

impl SmallWorldState {
    /// The earliest deadline of any brain, by the common clock.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        let router = self.router.brain.deadline().map(|at| at - self.router.skew);
        let workers = self.workers.iter().filter_map(|process| {
            let deadline = process.body.as_ref()?.brain.deadline()?;
            Some(deadline - process.skew)
        });
        workers.chain(router).min()
    }

    pub(super) fn tick(&mut self, small: &SmallWorld) -> PropertyCheck {
        if let Some(at) = self.next_deadline() {
            self.now = self.now.max(at);
        }
        self.wake_due(small)
    }

    /// Wakes every brain whose deadline has passed.
    pub(super) fn wake_due(&mut self, small: &SmallWorld) -> PropertyCheck {
        for worker in 0..self.workers.len() {
            let process = &self.workers[worker];
            let due = process.body.as_ref().and_then(|body| body.brain.deadline());
            if due.is_some_and(|at| at <= self.now + process.skew) {
                self.feed_worker(small, worker, WorkerInput::Woke)?;
            }
        }
        let due = self.router.brain.deadline();
        if due.is_some_and(|at| at <= self.now + self.router.skew) {
            self.feed_router(small, cleave_router::RouterInput::Woke)?;
        }
        Ok(())
    }

    pub(super) fn expire(&mut self, small: &SmallWorld, worker: usize) -> PropertyCheck {
        let now = self.now;
        if worker == self.workers.len() {
            let router = self.router_mut();
            if let Some(at) = router.brain.deadline() {
                router.skew = router.skew.max(at.since(now));
            }
        } else {
            let process = self.worker_mut(worker);
            let deadline = process.body.as_ref().and_then(|body| body.brain.deadline());
            if let Some(at) = deadline {
                process.skew = process.skew.max(at.since(now));
            }
        }
        self.wake_due(small)
    }

    // === lives and links ===

    pub(super) fn start(&mut self, small: &SmallWorld, worker: usize) -> PropertyCheck {
        let process = self.worker_mut(worker);
        process.incarnation += 1;
        let limits = small.worker_limits(worker, process.incarnation);
        let me = limits.me;
        let draw_salt = (worker as u64 + 1) << 32;
        process.body = Some(CellWorker::new(limits, draw_of_slot, draw_salt));
        self.connect(small, me)
    }

    pub(super) fn connect(&mut self, small: &SmallWorld, me: WorkerRef) -> PropertyCheck {
        let worker = worker_index(me);
        let process = self.worker_mut(worker);
        process.connected = Some(me);
        let description = small.description(worker);
        let joined = cleave_router::RouterInput::WorkerJoined {
            worker: me,
            description,
        };
        self.feed_router(small, joined)?;
        self.feed_worker(small, worker, WorkerInput::RouterJoined { router: ROUTER })?;
        // Router and worker exchange greetings at once: a slow greeting alone decides nothing.
        while !self.workers[worker].to_router.is_empty() {
            self.message_arrives(small, worker)?;
        }
        Ok(())
    }

    pub(super) fn notice(&mut self, small: &SmallWorld, notice: PendingNotice) -> PropertyCheck {
        self.notices.remove(&notice);
        match notice {
            PendingNotice::LinkLost { side, peer } => {
                self.links_lost.remove(&(side, peer));
                self.feed_worker(small, worker_index(side), WorkerInput::LinkLost { peer })?;
                let body = self.worker_mut(worker_index(side)).body.as_mut();
                let answers = body.map_or(Vec::new(), |body| body.drop_exports(peer));
                answers
                    .into_iter()
                    .try_for_each(|answer| self.feed_worker(small, worker_index(side), answer))
            }
            PendingNotice::PeerFenced { side, peer } => {
                self.feed_worker(small, worker_index(side), WorkerInput::Fenced { peer })
            }
            PendingNotice::WorkerLost(worker) => {
                self.feed_router(small, cleave_router::RouterInput::WorkerLost { worker })
            }
            PendingNotice::RouterLost(side) => self.feed_worker(
                small,
                worker_index(side),
                WorkerInput::RouterLost { router: ROUTER },
            ),
            PendingNotice::WorkerStarts(worker) => self.start(small, worker),
            PendingNotice::Reconnects(worker) => {
                let me = self.workers[worker].body.as_ref().map(|body| body.worker);
                me.map_or(Ok(()), |me| self.connect(small, me))
            }
        }
    }

    /// `side` is to be notified that it lost `peer`.
    pub(super) fn lose(&mut self, side: WorkerRef, peer: WorkerRef) {
        if self.links_lost.insert((side, peer)) {
            self.notices.insert(PendingNotice::LinkLost { side, peer });
        }
    }

    /// `side` is to be notified that `peer`, which is dead, can write nothing any more. The notice
    /// comes each time `side` contacts the dead life.
    pub(super) fn notify_fenced(&mut self, side: WorkerRef, peer: WorkerRef) {
        let body = self.body(side);
        if body.is_some_and(|body| body.limits.writer == PoolWriter::Sender) {
            self.notices
                .insert(PendingNotice::PeerFenced { side, peer });
        }
    }

    pub(super) fn cut(&mut self, a: usize, b: usize) {
        let alive = |worker: usize| self.workers[worker].body.as_ref().map(|body| body.worker);
        let (Some(a), Some(b)) = (alive(a), alive(b)) else {
            return;
        };
        let between = |p: &SmallWorldPacket| (p.from, p.to) == (a, b) || (p.from, p.to) == (b, a);
        // The sender of these packets asks again after a timeout: no notice says that the link is
        // back.
        self.needs_timer |= (self.packets.iter())
            .any(|sent| between(&sent.envelope) && sent.envelope.is_about_writes());
        self.packets.retain(|sent| !between(&sent.envelope));
        self.lose(a, b);
        self.lose(b, a);
    }

    pub(super) fn disconnect(&mut self, worker: usize) -> Option<WorkerRef> {
        let process = self.worker_mut(worker);
        process.to_worker.clear();
        process.to_router.clear();
        let connected = process.connected.take();
        self.notices
            .extend(connected.map(PendingNotice::WorkerLost));
        connected
    }

    pub(super) fn cut_stream(&mut self, worker: usize) {
        if let Some(me) = self.disconnect(worker) {
            self.notices.insert(PendingNotice::RouterLost(me));
            self.notices.insert(PendingNotice::Reconnects(worker));
        }
    }

    /// The process ends. Its packets in flight are lost, except writes that its device has already
    /// begun.
    pub(super) fn exit(&mut self, worker: usize) -> PropertyCheck {
        self.disconnect(worker);
        let Some(body) = self.worker_mut(worker).body.take() else {
            return Ok(());
        };
        let me = body.worker;
        self.worker_mut(worker).skew = Duration::ZERO;
        if let Some((export, payload)) = body.writing() {
            let late = LateWrite {
                from: me,
                export,
                payload,
            };
            self.late_writes.push(Rc::new(late));
        }
        self.packets
            .retain(|sent| sent.envelope.from != me && sent.envelope.to != me);
        self.links_lost.retain(|(side, _)| *side != me);
        self.notices.retain(|notice| match notice {
            PendingNotice::LinkLost { side, .. } | PendingNotice::PeerFenced { side, .. } => {
                *side != me
            }
            PendingNotice::RouterLost(side) => *side != me,
            PendingNotice::Reconnects(other) => *other != worker,
            PendingNotice::WorkerLost(_) | PendingNotice::WorkerStarts(_) => true,
        });
        for other in (0..self.workers.len()).filter(|other| *other != worker) {
            if let Some(peer) = self.workers[other].body.as_ref().map(|body| body.worker) {
                self.lose(peer, me);
                self.notify_fenced(peer, me);
            }
        }
        self.notices.insert(PendingNotice::WorkerStarts(worker));
        Ok(())
    }
}
