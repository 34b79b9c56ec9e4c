//! Time, lives and links of a small world.
//!
//! Owns: every clock, who starts and dies, who is connected with whom. Never: touches a brain's
//! insides. Invariant: what was sent over a connection that broke never arrives, and a side hears of
//! the break before anything of the next connection; a write that a device has begun outlives its
//! process.

use super::happen::Outcome;
use super::small::{ROUTER, Small};
use super::state::{Late, Notice, Parcel, State};
use crate::body::{Body, Taping};
use crate::run::index;
use cleave_domain::{Time, WorkerRef};
use cleave_kv::Writer;
use cleave_sched::Input;
use std::rc::Rc;
use std::time::Duration;

impl State {
    /// When the first deadline passes, by the common clock.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        let desk = self.desk.brain.deadline().map(|at| at - self.desk.skew);
        let workers = self.seats.iter().filter_map(|seat| {
            let deadline = seat.body.as_ref()?.brain.deadline()?;
            Some(deadline - seat.skew)
        });
        workers.chain(desk).min()
    }

    pub(super) fn tick(&mut self, small: &Small) -> Outcome {
        if let Some(at) = self.next_deadline() {
            self.now = self.now.max(at);
        }
        self.wake_due(small)
    }

    /// Wakes whoever is due.
    pub(super) fn wake_due(&mut self, small: &Small) -> Outcome {
        for worker in 0..self.seats.len() {
            let seat = &self.seats[worker];
            let due = seat.body.as_ref().and_then(|body| body.brain.deadline());
            if due.is_some_and(|at| at <= self.now + seat.skew) {
                self.worker_hears(small, worker, Input::Woke)?;
            }
        }
        let due = self.desk.brain.deadline();
        if due.is_some_and(|at| at <= self.now + self.desk.skew) {
            self.router_hears(small, cleave_router::Input::Woke)?;
        }
        Ok(())
    }

    pub(super) fn expire(&mut self, small: &Small, worker: usize) -> Outcome {
        let now = self.now;
        if worker == self.seats.len() {
            let desk = self.desk();
            if let Some(at) = desk.brain.deadline() {
                desk.skew = desk.skew.max(at.since(now));
            }
        } else {
            let seat = self.seat(worker);
            let deadline = seat.body.as_ref().and_then(|body| body.brain.deadline());
            if let Some(at) = deadline {
                seat.skew = seat.skew.max(at.since(now));
            }
        }
        self.wake_due(small)
    }

    // === lives and links ===

    pub(super) fn start(&mut self, small: &Small, worker: usize) -> Outcome {
        let seat = self.seat(worker);
        seat.life += 1;
        let limits = small.limits(worker, seat.life);
        let me = limits.me;
        let mut body = Body::new(limits, small.about(worker), Taping::Off);
        body.give_voice((worker as u64 + 1) << 32);
        seat.body = Some(body);
        self.meet(small, me)
    }

    pub(super) fn meet(&mut self, small: &Small, me: WorkerRef) -> Outcome {
        let worker = index(me);
        let seat = self.seat(worker);
        seat.connected = Some(me);
        let description = small.about(worker);
        let joined = cleave_router::Input::WorkerJoined {
            worker: me,
            description,
        };
        self.router_hears(small, joined)?;
        self.worker_hears(small, worker, Input::RouterJoined { router: ROUTER })?;
        // The two greet each other at once: a slow greeting alone decides nothing.
        while !self.seats[worker].to_router.is_empty() {
            self.word_arrives(small, worker)?;
        }
        Ok(())
    }

    pub(super) fn notice(&mut self, small: &Small, notice: Notice) -> Outcome {
        self.notices.remove(&notice);
        match notice {
            Notice::LinkLost { side, peer } => {
                self.lost.remove(&(side, peer));
                self.worker_hears(small, index(side), Input::LinkLost { peer })?;
                let body = self.seat(index(side)).body.as_mut();
                let answers = body.map_or(Vec::new(), |body| body.drop_exports(peer));
                answers
                    .into_iter()
                    .try_for_each(|answer| self.worker_hears(small, index(side), answer))
            }
            Notice::Severed { side, peer } => {
                self.worker_hears(small, index(side), Input::Severed { peer })
            }
            Notice::WorkerLost(worker) => {
                self.router_hears(small, cleave_router::Input::WorkerLost { worker })
            }
            Notice::RouterLost(side) => {
                self.worker_hears(small, index(side), Input::RouterLost { router: ROUTER })
            }
            Notice::Starts(worker) => self.start(small, worker),
            Notice::Meets(worker) => {
                let me = self.seats[worker].body.as_ref().map(|body| body.me);
                me.map_or(Ok(()), |me| self.meet(small, me))
            }
        }
    }

    /// `side` will have to be told that it lost `peer`.
    pub(super) fn lose(&mut self, side: WorkerRef, peer: WorkerRef) {
        if self.lost.insert((side, peer)) {
            self.notices.insert(Notice::LinkLost { side, peer });
        }
    }

    /// `side` will have to be told that nothing of `peer`, which is dead, can reach it any more. It
    /// is told each time it comes upon the dead life.
    pub(super) fn sever(&mut self, side: WorkerRef, peer: WorkerRef) {
        let body = self.body(side);
        if body.is_some_and(|body| body.limits.writer == Writer::Sender) {
            self.notices.insert(Notice::Severed { side, peer });
        }
    }

    pub(super) fn cut(&mut self, a: usize, b: usize) {
        let alive = |worker: usize| self.seats[worker].body.as_ref().map(|body| body.me);
        let (Some(a), Some(b)) = (alive(a), alive(b)) else {
            return;
        };
        let between = |p: &Parcel| (p.from, p.to) == (a, b) || (p.from, p.to) == (b, a);
        // Who waits for these asks again after a while: nobody tells it that the link is back.
        self.silent |= (self.parcels.iter())
            .any(|sent| between(&sent.parcel) && sent.parcel.is_about_writes());
        self.parcels.retain(|sent| !between(&sent.parcel));
        self.lose(a, b);
        self.lose(b, a);
    }

    pub(super) fn disconnect(&mut self, worker: usize) -> Option<WorkerRef> {
        let seat = self.seat(worker);
        seat.to_worker.clear();
        seat.to_router.clear();
        let connected = seat.connected.take();
        self.notices.extend(connected.map(Notice::WorkerLost));
        connected
    }

    pub(super) fn part(&mut self, worker: usize) {
        if let Some(me) = self.disconnect(worker) {
            self.notices.insert(Notice::RouterLost(me));
            self.notices.insert(Notice::Meets(worker));
        }
    }

    /// The process ends; what it had sent and is still under way is lost, but for writes that its
    /// device has already begun.
    pub(super) fn die(&mut self, worker: usize) -> Outcome {
        self.disconnect(worker);
        let Some(body) = self.seat(worker).body.take() else {
            return Ok(());
        };
        let me = body.me;
        self.seat(worker).skew = Duration::ZERO;
        if let Some((export, payload)) = body.writing() {
            let late = Late {
                from: me,
                export,
                payload,
            };
            self.late.push(Rc::new(late));
        }
        self.parcels
            .retain(|sent| sent.parcel.from != me && sent.parcel.to != me);
        self.lost.retain(|(side, _)| *side != me);
        self.notices.retain(|notice| match notice {
            Notice::LinkLost { side, .. } | Notice::Severed { side, .. } => *side != me,
            Notice::RouterLost(side) => *side != me,
            Notice::Meets(other) => *other != worker,
            Notice::WorkerLost(_) | Notice::Starts(_) => true,
        });
        for other in (0..self.seats.len()).filter(|other| *other != worker) {
            if let Some(peer) = self.seats[other].body.as_ref().map(|body| body.me) {
                self.lose(peer, me);
                self.sever(peer, me);
            }
        }
        self.notices.insert(Notice::Starts(worker));
        Ok(())
    }
}
