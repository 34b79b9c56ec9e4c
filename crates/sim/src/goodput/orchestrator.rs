//! An orchestrator that starts and stops workers while a world runs, as prices.
//!
//! Owns: which workers start, drain and are killed, and when; the device time that this takes.
//! Never: decides how many workers there are to be; that is the router's policy, a fixed number, or
//! the baseline's thresholds. Invariant: a worker occupies its devices from its start until it has
//! left.

use super::run::{GoodputEvent, GoodputWorld, WorkerPhase};
use super::worker::GoodputWorker;
use super::{FleetSpec, WorkerDevice, WorkerProfile};
use cleave_domain::{PoolCounts, Role, SplitMix64, Time};
use cleave_planner::scaling::ScalerDecision;
use cleave_sched::WorkerInput;
use serde::Serialize;
use std::time::Duration;

const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// How workers come and go.
#[derive(Clone, Debug)]
pub struct Orchestrator {
    /// The profile of started workers.
    pub profile: WorkerProfile,
    /// Workers at the beginning.
    pub workers_first: PoolCounts,
    /// Time from the decision to start a worker until it joins.
    pub start_time: Duration,
    /// Decides how many workers there are to be.
    pub authority: ScalingAuthority,
    /// When a random worker is killed; another one is started in its place.
    pub kill_times: Vec<Duration>,
    /// How long the world goes on after the last answer.
    pub tail: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalingAuthority {
    /// The number of workers stays as at first.
    Fixed,
    /// The first router decides, by its policy.
    Router,
    /// Thresholds of occupancy and queues, one worker of a pool more or fewer at each look: the
    /// defaults of existing autoscalers (KV occupancy target 0.8 with a margin of 0.1, queue target
    /// 5 with a margin of 3, every 30 s; 1 to `most` workers in each pool, and at most as many
    /// devices as the policy that it is compared with).
    Thresholds {
        /// Most workers of each pool.
        most: PoolCounts,
        /// Most devices of all pools together.
        devices_max: u32,
    },
}

/// The size of a fleet over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FleetHistory {
    /// Device time of workers that started or ran.
    pub device_time: Duration,
    /// Every change of the wanted size, with its time.
    pub wanted: Vec<(Time, PoolCounts)>,
    /// Workers started after the beginning.
    pub started: u64,
    /// Workers asked to drain.
    pub drained: u64,
    pub killed: u64,
    /// Workers that changed their role.
    pub flipped: u64,
    /// Most devices at any time, draining ones not counted.
    pub devices_most: u32,
    /// The last decision of each router.
    pub last: Vec<ScalerDecision>,
    /// Looks at the fleet.
    pub looks: u64,
    /// Looks at which the routers wanted different sizes.
    pub disputed: u64,
}

impl FleetHistory {
    /// Most changes between growing and shrinking of one pool within any hour.
    pub fn turns_most(&self) -> usize {
        let of = |role: Role| {
            // A turn is a change in the opposite direction of the one before.
            let mut turns: Vec<Time> = Vec::new();
            let mut grew = None;
            for pair in self.wanted.windows(2) {
                let (before, after) = (pair[0].1.for_role(role), pair[1].1.for_role(role));
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

/// The orchestrator's state during a run.
#[derive(Debug)]
pub(crate) struct OrchestratorState {
    target: PoolCounts,
    history: FleetHistory,
    counted_until: Time,
    rng: SplitMix64,
}

impl OrchestratorState {
    pub(crate) fn new(starter: &Orchestrator, seed: u64) -> Self {
        Self {
            target: starter.workers_first,
            history: FleetHistory {
                wanted: vec![(Time::ZERO, starter.workers_first)],
                ..FleetHistory::default()
            },
            counted_until: Time::ZERO,
            rng: SplitMix64::new(SplitMix64::finalize(seed)),
        }
    }

    pub(crate) fn growth(self) -> FleetHistory {
        self.history
    }
}

impl Orchestrator {
    /// The workers at the beginning.
    pub fn fleet(&self) -> FleetSpec {
        let PoolCounts {
            prefill,
            decode,
            both,
        } = self.workers_first;
        FleetSpec {
            profile: self.profile.clone(),
            prefill,
            decode,
            both,
        }
    }

    /// The interval between looks.
    pub(crate) fn look_interval(&self) -> Duration {
        match self.authority {
            ScalingAuthority::Thresholds { .. } => Duration::from_secs(30),
            ScalingAuthority::Fixed | ScalingAuthority::Router => Duration::from_secs(1),
        }
    }
}

impl GoodputWorld<'_> {
    /// Whether the run is over: an orchestrator never rests, so it ends `tail` after the last
    /// answer.
    pub(crate) fn is_over(&mut self) -> bool {
        let Some(starter) = self.scenario.orchestrator.as_ref() else {
            return false;
        };
        if !self.clients.all_ended() {
            return false;
        }
        let ends = *self.ends_at.get_or_insert(self.now + starter.tail);
        self.now >= ends
    }

    /// Adds a worker, which does not run yet.
    pub(crate) fn enrol(&mut self, device: WorkerDevice) -> usize {
        let place = self.workers.len();
        let mut worker = GoodputWorker::new(&device, self.scenario);
        worker.phase = WorkerPhase::Starting;
        self.worker_index.insert(device.worker_ref().worker, place);
        self.workers.push(worker);
        self.devices.push(device);
        self.links.add_worker();
        place
    }

    pub(crate) fn joins(&mut self, place: usize) {
        if self.workers[place].phase != WorkerPhase::Starting {
            return;
        }
        self.workers[place].phase = WorkerPhase::Up;
        for router in 0..self.routers.len() {
            self.connect(router, place);
        }
    }

    pub(crate) fn check_routers(&self) {
        for router in &self.routers {
            router.brain.check();
        }
    }

    /// A worker's connections end, and everything in flight on them is lost.
    pub(crate) fn gone(&mut self, place: usize) {
        self.workers[place].phase = WorkerPhase::Gone;
        let peer = self.devices[place].worker_ref();
        for router in 0..self.routers.len() {
            self.handle_router_input(
                router,
                cleave_router::RouterInput::WorkerLost { worker: peer },
            );
        }
        for other in 0..self.workers.len() {
            self.handle_worker_input(other, WorkerInput::LinkLost { peer });
        }
    }

    /// A router decides the wanted size.
    pub(crate) fn record_decision(&mut self, router: usize, decision: ScalerDecision) {
        let by_router = self
            .starter()
            .is_some_and(|s| s.authority == ScalingAuthority::Router);
        let Some(orchestrator) = self.orchestrator.as_mut().filter(|_| by_router) else {
            return;
        };
        let last = &mut orchestrator.history.last;
        if last.len() <= router {
            last.resize(router + 1, ScalerDecision::default());
        }
        last[router] = decision;
        if router == 0 {
            orchestrator.set_target(self.now, decision.wanted.workers);
        }
    }

    /// One look of the orchestrator.
    pub(crate) fn look(&mut self) {
        self.count_devices();
        let Some(starter) = self.starter().cloned() else {
            return;
        };
        if let ScalingAuthority::Thresholds { most, devices_max } = starter.authority {
            self.go_by_thresholds(&most, devices_max);
        }
        self.check_routers();
        let Some(orchestrator) = &mut self.orchestrator else {
            return;
        };
        let target = orchestrator.target;
        let growth = &mut orchestrator.history;
        let same = |pair: &[ScalerDecision]| pair[0].wanted.workers == pair[1].wanted.workers;
        growth.looks += 1;
        growth.disputed += u64::from(!growth.last.windows(2).all(same));
        for role in POOLS {
            self.reconcile(&starter, role, target.for_role(role));
        }
    }

    fn starter(&self) -> Option<&Orchestrator> {
        self.scenario.orchestrator.as_ref()
    }

    fn of_pool(&self, role: Role) -> Vec<usize> {
        let there = |place: &usize| {
            let worker = &self.workers[*place];
            self.devices[*place].limits.role == role && worker.phase.is_counted()
        };
        (0..self.workers.len()).filter(there).collect()
    }

    fn reconcile(&mut self, starter: &Orchestrator, role: Role, target: u32) {
        let there = self.of_pool(role);
        for _ in there.len()..target as usize {
            self.start(starter, role);
        }
        for _ in target as usize..there.len() {
            self.stop_one(role);
        }
    }

    fn start(&mut self, starter: &Orchestrator, role: Role) {
        let device = starter.profile.device(self.workers.len() as u32, role);
        let place = self.enrol(device);
        if let Some(orchestrator) = &mut self.orchestrator {
            orchestrator.history.started += 1;
        }
        self.event_queue.push(
            self.now + starter.start_time,
            GoodputEvent::WorkerJoins(place),
        );
    }

    /// Stops a worker that has not joined yet, or else drains a random one.
    fn stop_one(&mut self, role: Role) {
        let there = self.of_pool(role);
        let starting = there
            .iter()
            .find(|p| self.workers[**p].phase == WorkerPhase::Starting);
        if let Some(place) = starting.copied() {
            self.workers[place].phase = WorkerPhase::Gone;
            return;
        }
        let Some(orchestrator) = self.orchestrator.as_mut().filter(|_| !there.is_empty()) else {
            return;
        };
        let place = *orchestrator.rng.pick(&there);
        orchestrator.history.drained += 1;
        self.workers[place].phase = WorkerPhase::Leaving;
        self.handle_worker_input(place, WorkerInput::Draining);
    }

    /// Kills a random worker.
    pub(crate) fn kill_one(&mut self) {
        let up = |place: &usize| self.workers[*place].phase == WorkerPhase::Up;
        let there: Vec<usize> = (0..self.workers.len()).filter(up).collect();
        let Some(orchestrator) = self.orchestrator.as_mut().filter(|_| !there.is_empty()) else {
            return;
        };
        let place = *orchestrator.rng.pick(&there);
        orchestrator.history.killed += 1;
        self.count_devices();
        self.gone(place);
    }

    /// Adds the device time since the last call.
    pub(crate) fn count_devices(&mut self) {
        let takes = |(place, worker): (usize, &GoodputWorker)| match worker.phase {
            WorkerPhase::Gone => 0,
            WorkerPhase::Starting | WorkerPhase::Up | WorkerPhase::Leaving => {
                self.devices[place].devices_count
            }
        };
        let devices: u32 = self.workers.iter().enumerate().map(takes).sum();
        let pool_sizes = POOLS
            .into_iter()
            .map(|role| self.of_pool(role).len() as u32);
        let counted: u32 = pool_sizes.sum::<u32>() * self.devices_of_each();
        let now = self.now;
        if let Some(orchestrator) = &mut self.orchestrator {
            orchestrator.history.device_time += now.since(orchestrator.counted_until) * devices;
            orchestrator.history.devices_most = orchestrator.history.devices_most.max(counted);
            orchestrator.counted_until = now;
        }
    }

    /// Devices of each worker; all have the same profile.
    fn devices_of_each(&self) -> u32 {
        self.devices.first().map_or(1, |d| d.devices_count)
    }

    fn go_by_thresholds(&mut self, most: &PoolCounts, devices_max: u32) {
        let workers_max = devices_max / self.devices_of_each();
        for role in POOLS.into_iter().filter(|role| most.for_role(*role) > 0) {
            let there = self.of_pool(role);
            let up = there
                .iter()
                .filter(|p| self.workers[**p].phase == WorkerPhase::Up);
            let (mut queue, mut held, mut blocks, mut count) = (0u64, 0u64, 0u64, 0u64);
            for place in up {
                let load = self.workers[*place].brain.load();
                let capacity = &self.devices[*place].limits.capacity;
                queue += u64::from(load.sequences_waiting);
                held += u64::from(capacity.blocks_count - load.blocks_free);
                blocks += u64::from(capacity.blocks_count);
                count += 1;
            }
            // Starting workers will take load soon, so a pool with one does not change again.
            let starting = there.len() as u64 > count;
            let Some(orchestrator) = self.orchestrator.as_mut().filter(|_| count > 0) else {
                continue;
            };
            let mut target = orchestrator.target;
            // Whether the load would exceed the thresholds on `n` workers: 70 % of the blocks, or
            // two waiting sequences a worker.
            let fuller = |n: u64| held * 1000 > blocks * 700 * n / count || queue > 2 * n;
            let has_room = target.total() < workers_max;
            let pool = target.for_role_mut(role);
            if fuller(count) && !starting {
                let more = u32::from(has_room);
                *pool = (*pool + more).min(most.for_role(role));
            } else if count > 1 && !fuller(count - 1) && !starting {
                *pool = (*pool - 1).max(1);
            }
            orchestrator.set_target(self.now, target);
        }
    }
}

impl OrchestratorState {
    fn set_target(&mut self, now: Time, target: PoolCounts) {
        if target != self.target {
            self.target = target;
            self.history.wanted.push((now, target));
        }
    }

    pub(crate) fn count_role_change(&mut self) {
        self.history.flipped += 1;
    }
}
