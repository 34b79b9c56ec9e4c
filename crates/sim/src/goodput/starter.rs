//! Whoever starts and stops workers while a world runs: an orchestrator, as prices.
//!
//! Owns: who is started, drained and killed, and when; how many devices that took. Never: says how many there
//! are to be, unless it is the baseline that does: a router's word, a fixed number, or thresholds.
//! Invariant: a worker takes its devices from the moment it is started until it has left.

use super::run::{Event, Life, World};
use super::worker::Worker;
use super::{Device, Fleet, Profile};
use crate::dice::{Dice, mix};
use cleave_domain::{PoolCounts, Role, Time};
use cleave_planner::scaling::Decision;
use cleave_sched::Input;
use serde::Serialize;
use std::time::Duration;

/// Every pool.
const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// How workers come and go.
#[derive(Clone, Debug)]
pub struct Starter {
    /// What is started.
    pub profile: Profile,
    /// How many are there from the beginning.
    pub first: PoolCounts,
    /// From the decision to start a worker until it joins.
    pub start: Duration,
    /// How many there are to be.
    pub who: Who,
    /// When a worker dies, whichever; another one is started in its place.
    pub kills: Vec<Duration>,
    /// How long the world goes on after the last answer.
    pub tail: Duration,
}

/// See [`Starter::who`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// As many as at first.
    Nobody,
    /// The first router, by its policy.
    Router,
    /// Thresholds of occupancy and queues, one worker more or fewer of a pool at each look: what existing
    /// autoscalers do by default (keys and values to 0.8 less 0.1 to spare, queues to 5 less 3, every
    /// 30 s; of 1 to so many workers of each pool, and of no more devices than whoever goes by promises).
    Thresholds {
        /// Of each pool.
        most: PoolCounts,
        /// Of all.
        devices_max: u32,
    },
}

/// How a fleet's size went.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Growth {
    /// Nanoseconds of devices, of workers that started or ran.
    pub device_time: Duration,
    /// Every change of what was wanted, with its time.
    pub wanted: Vec<(Time, PoolCounts)>,
    /// Workers started, those at first not counted.
    pub started: u64,
    /// Workers asked to leave.
    pub drained: u64,
    /// Workers killed.
    pub killed: u64,
    /// Workers that changed their leg.
    pub flipped: u64,
    /// Devices at most at any time, draining ones not counted.
    pub devices_most: u32,
    /// What each router said at last.
    pub last: Vec<Decision>,
    /// Looks at the fleet, and at how many of them routers wanted other numbers than each other.
    pub looks: u64,
    /// See `looks`.
    pub disputed: u64,
}

impl Growth {
    /// Most changes between growing and shrinking of one pool within any hour.
    pub fn turns_most(&self) -> usize {
        let of = |role: Role| {
            let mut turns: Vec<Time> = Vec::new();
            let mut grew = None;
            for pair in self.wanted.windows(2) {
                let (before, after) = (pair[0].1.of(role), pair[1].1.of(role));
                if before == after {
                    continue;
                }
                if grew
                    .replace(after > before)
                    .is_some_and(|g| g != (after > before))
                {
                    turns.push(pair[1].0);
                }
            }
            let hour = Duration::from_secs(3600);
            let within = |at: &Time| {
                let late = turns.iter().filter(|t| **t >= *at && t.since(*at) < hour);
                late.count()
            };
            turns.iter().map(within).max().unwrap_or(0)
        };
        POOLS.into_iter().map(of).max().unwrap_or(0)
    }
}

/// The starter at work.
#[derive(Debug)]
pub(crate) struct Works {
    wanted: PoolCounts,
    growth: Growth,
    since: Time,
    dice: Dice,
}

impl Works {
    pub(crate) fn new(starter: &Starter, seed: u64) -> Self {
        Self {
            wanted: starter.first,
            growth: Growth {
                wanted: vec![(Time::ZERO, starter.first)],
                ..Growth::default()
            },
            since: Time::ZERO,
            dice: Dice::new(mix(seed)),
        }
    }

    pub(crate) fn growth(self) -> Growth {
        self.growth
    }
}

impl Starter {
    /// The workers that are there from the beginning.
    pub fn fleet(&self) -> Fleet {
        let PoolCounts {
            prefill,
            decode,
            both,
        } = self.first;
        Fleet {
            profile: self.profile.clone(),
            prefill,
            decode,
            both,
        }
    }

    /// How often it looks.
    pub(crate) fn every(&self) -> Duration {
        match self.who {
            Who::Thresholds { .. } => Duration::from_secs(30),
            Who::Nobody | Who::Router => Duration::from_secs(1),
        }
    }
}

impl World<'_> {
    /// Whoever starts workers never rests; the world ends a while after its last answer.
    pub(crate) fn is_over(&mut self) -> bool {
        let Some(starter) = self.scenario.starter.as_ref() else {
            return false;
        };
        if !self.clients.all_ended() {
            return false;
        }
        let ends = *self.ends_at.get_or_insert(self.now + starter.tail);
        self.now >= ends
    }

    /// One more worker, which does not run yet.
    pub(crate) fn enrol(&mut self, device: Device) -> usize {
        let place = self.workers.len();
        let mut worker = Worker::new(&device, self.scenario.seed);
        worker.life = Life::Starting;
        self.places.insert(device.me().worker, place);
        self.workers.push(worker);
        self.devices.push(device);
        self.wire.enrol();
        place
    }

    pub(crate) fn joins(&mut self, place: usize) {
        if self.workers[place].life != Life::Starting {
            return;
        }
        self.workers[place].life = Life::Up;
        for router in 0..self.routers.len() {
            self.meet_one(router, place);
        }
    }

    pub(crate) fn check_routers(&self) {
        for router in &self.routers {
            router.brain.check();
        }
    }

    /// A worker's connections end, and with them what was under way on them.
    pub(crate) fn gone(&mut self, place: usize) {
        self.workers[place].life = Life::Gone;
        let peer = self.devices[place].me();
        for router in 0..self.routers.len() {
            self.router_hears(router, cleave_router::Input::WorkerLost { worker: peer });
        }
        for other in 0..self.workers.len() {
            self.worker_hears(other, Input::LinkLost { peer });
        }
    }

    /// A router says how many there are to be.
    pub(crate) fn wants(&mut self, router: usize, decision: Decision) {
        let by_router = self.starter().is_some_and(|s| s.who == Who::Router);
        let Some(works) = self.works.as_mut().filter(|_| by_router) else {
            return;
        };
        let last = &mut works.growth.last;
        if last.len() <= router {
            last.resize(router + 1, Decision::default());
        }
        last[router] = decision;
        if router == 0 {
            works.want(self.now, decision.wanted.workers);
        }
    }

    /// One look of whoever starts workers.
    pub(crate) fn look(&mut self) {
        self.count_devices();
        let Some(starter) = self.starter().cloned() else {
            return;
        };
        if let Who::Thresholds { most, devices_max } = starter.who {
            self.go_by_thresholds(&most, devices_max);
        }
        self.check_routers();
        let Some(works) = &mut self.works else {
            return;
        };
        let wanted = works.wanted;
        let growth = &mut works.growth;
        let same = |pair: &[Decision]| pair[0].wanted.workers == pair[1].wanted.workers;
        growth.looks += 1;
        growth.disputed += u64::from(!growth.last.windows(2).all(same));
        for role in POOLS {
            self.reconcile(&starter, role, wanted.of(role));
        }
    }

    fn starter(&self) -> Option<&Starter> {
        self.scenario.starter.as_ref()
    }

    fn of_pool(&self, role: Role) -> Vec<usize> {
        let there = |place: &usize| {
            let worker = &self.workers[*place];
            self.devices[*place].limits.role == role && worker.life.counts()
        };
        (0..self.workers.len()).filter(there).collect()
    }

    fn reconcile(&mut self, starter: &Starter, role: Role, wanted: u32) {
        let there = self.of_pool(role);
        for _ in there.len()..wanted as usize {
            self.start(starter, role);
        }
        for _ in wanted as usize..there.len() {
            self.stop_one(role);
        }
    }

    fn start(&mut self, starter: &Starter, role: Role) {
        let device = starter.profile.device(self.workers.len() as u32, role);
        let place = self.enrol(device);
        if let Some(works) = &mut self.works {
            works.growth.started += 1;
        }
        self.agenda
            .plan(self.now + starter.start, Event::Joins(place));
    }

    /// One that has not joined yet, or any.
    fn stop_one(&mut self, role: Role) {
        let there = self.of_pool(role);
        let starting = there
            .iter()
            .find(|p| self.workers[**p].life == Life::Starting);
        if let Some(place) = starting.copied() {
            self.workers[place].life = Life::Gone;
            return;
        }
        let Some(works) = self.works.as_mut().filter(|_| !there.is_empty()) else {
            return;
        };
        let place = *works.dice.pick(&there);
        works.growth.drained += 1;
        self.workers[place].life = Life::Leaving;
        self.worker_hears(place, Input::Draining);
    }

    /// Whichever dies.
    pub(crate) fn kill_one(&mut self) {
        let up = |place: &usize| self.workers[*place].life == Life::Up;
        let there: Vec<usize> = (0..self.workers.len()).filter(up).collect();
        let Some(works) = self.works.as_mut().filter(|_| !there.is_empty()) else {
            return;
        };
        let place = *works.dice.pick(&there);
        works.growth.killed += 1;
        self.count_devices();
        self.gone(place);
    }

    /// Devices since the last time.
    pub(crate) fn count_devices(&mut self) {
        let takes = |(place, worker): (usize, &Worker)| match worker.life {
            Life::Gone => 0,
            Life::Starting | Life::Up | Life::Leaving => self.devices[place].devices_count,
        };
        let devices: u32 = self.workers.iter().enumerate().map(takes).sum();
        let wanted = POOLS
            .into_iter()
            .map(|role| self.of_pool(role).len() as u32);
        let counted: u32 = wanted.sum::<u32>() * self.devices_of_each();
        let now = self.now;
        if let Some(works) = &mut self.works {
            works.growth.device_time += now.since(works.since) * devices;
            works.growth.devices_most = works.growth.devices_most.max(counted);
            works.since = now;
        }
    }

    /// Every worker takes as many.
    fn devices_of_each(&self) -> u32 {
        self.devices.first().map_or(1, |d| d.devices_count)
    }

    /// See [`Who::Thresholds`].
    fn go_by_thresholds(&mut self, most: &PoolCounts, devices_max: u32) {
        let workers_max = devices_max / self.devices_of_each();
        for role in POOLS.into_iter().filter(|role| most.of(*role) > 0) {
            let there = self.of_pool(role);
            let up = there.iter().filter(|p| self.workers[**p].life == Life::Up);
            let (mut queue, mut held, mut blocks, mut count) = (0u64, 0u64, 0u64, 0u64);
            for place in up {
                let load = self.workers[*place].brain.load();
                let capacity = &self.devices[*place].limits.capacity;
                queue += u64::from(load.sequences_waiting);
                held += u64::from(capacity.blocks_count - load.blocks_free);
                blocks += u64::from(capacity.blocks_count);
                count += 1;
            }
            let starting = there.len() as u64 > count;
            let Some(works) = self.works.as_mut().filter(|_| count > 0) else {
                continue;
            };
            let mut wanted = works.wanted;
            let fuller = |n: u64| held * 1000 > blocks * 700 * n / count || queue > 2 * n;
            let has_room = wanted.total() < workers_max;
            let pool = wanted.of_mut(role);
            if fuller(count) && !starting {
                let more = u32::from(has_room);
                *pool = (*pool + more).min(most.of(role));
            } else if count > 1 && !fuller(count - 1) && !starting {
                *pool = (*pool - 1).max(1);
            }
            works.want(self.now, wanted);
        }
    }
}

impl Works {
    fn want(&mut self, now: Time, wanted: PoolCounts) {
        if wanted != self.wanted {
            self.wanted = wanted;
            self.growth.wanted.push((now, wanted));
        }
    }

    pub(crate) fn flipped(&mut self) {
        self.growth.flipped += 1;
    }
}
