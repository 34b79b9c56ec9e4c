//! The autoscaler in the router's brain.
//!
//! Owns: the scaler, the facts given to it, and the counts of requests that wait outside. Never:
//! decides how many workers there are to be, or performs the scaler's outputs.
//! Invariant: a request counts as demand once: at its arrival, at its first placement, at its end.

use crate::accounting::verdict::FlightVerdict;
use crate::event::{OutsideQueue, RouterLimits};
use crate::fleet::{FleetWorker, RouterFleet};
use crate::flight::state::{FlightRecord, RouterFlights};
use cleave_domain::{
    Capacity, Ending, HandoffId, Prices, Refusal, Request, Role, ScalingGossip, ScalingMode,
    SloMetric, SloPolicy, Time,
};
use cleave_planner::scaling::{
    PromiseOutcome, Scaler, ScalerFleet, ScalerInput, ScalerMember, ScalerOutput,
};
use std::sync::Arc;
use std::time::Duration;

/// Requests that wait outside the brain, by place.
#[derive(Clone, Copy, Debug, Default)]
struct OutsideQueues {
    here: u32,
    elsewhere: u32,
}

/// The autoscaler's brain, if the policy has one, and the requests that it cannot see.
#[derive(Clone, Debug)]
pub(crate) struct Autoscaling {
    scaler: Option<Box<Scaler>>,
    /// Requests that wait for a tokenizer.
    outside_queues: OutsideQueues,
}

impl Autoscaling {
    pub(crate) fn new(limits: &RouterLimits) -> Self {
        let mut scaling = Self {
            scaler: None,
            outside_queues: OutsideQueues::default(),
        };
        scaling.configure(Time::ZERO, limits);
        scaling
    }

    /// Applies the present policy.
    pub(crate) fn configure(&mut self, now: Time, limits: &RouterLimits) {
        let policy = Arc::clone(&limits.policy);
        let Some(scaling) = policy.scaling.clone() else {
            self.scaler = None;
            return;
        };
        match &mut self.scaler {
            Some(scaler) => scaler.handle(now, ScalerInput::Configured(scaling, policy)),
            None => {
                let scaler = Scaler::new(limits.me, now, scaling, policy);
                self.scaler = Some(Box::new(scaler));
            }
        }
    }

    pub(crate) fn deadline(&self) -> Option<Time> {
        self.scaler.as_ref().map(|scaler| scaler.deadline())
    }

    pub(crate) fn check(&self) {
        if let Some(scaler) = &self.scaler {
            scaler.check();
        }
    }

    // === facts ===

    /// Counts an arrival. A request that no worker could ever hold creates no demand.
    pub(crate) fn arrived(&mut self, now: Time, request: &Request, fleet: &RouterFleet) {
        if self.scaler.is_some() && !fleet.is_too_long(request.prompt.len()) {
            let class = request.slo.class.clone();
            let prompt_tokens = request.prompt.len() as u32;
            let arrived = ScalerInput::Arrived {
                class,
                prompt_tokens,
            };
            self.feed(now, arrived);
        }
    }

    /// Counts a placement. Only the first attempt reflects new demand.
    pub(crate) fn placed(&mut self, now: Time, handoff: HandoffId, cached_tokens: u32) {
        if handoff.attempt == 0 {
            self.feed(now, ScalerInput::Placed { cached_tokens });
        }
    }

    pub(crate) fn judged(&mut self, now: Time, flight: &FlightRecord, outcome: &FlightVerdict) {
        if self.scaler.is_none() {
            return;
        }
        let plain = flight.failures.failures() == 0 && !flight.awaits_start;
        let aim = match outcome.ending {
            Ending::Refused(Refusal::Late { aim, .. }) => Some(*aim),
            Ending::Refused(Refusal::NoBlocks { .. }) => Some(SloMetric::Tpot),
            Ending::Refused(Refusal::QueueFull { .. }) => Some(SloMetric::Ttft),
            _ => None,
        };
        let ended = ScalerInput::Ended {
            class: flight.request.slo.class.clone(),
            outcome: PromiseOutcome::from_verdict(outcome.verdict, plain, aim),
            output_tokens: outcome.answer_tokens.unwrap_or(0),
        };
        self.feed(now, ended);
    }

    pub(crate) fn receive_gossip(&mut self, now: Time, gossip: Arc<ScalingGossip>) {
        self.feed(now, ScalerInput::GossipReceived(gossip));
    }

    /// Records requests that wait outside the brain. Returns whether they are the first ones.
    pub(crate) fn wait_outside(
        &mut self,
        place: OutsideQueue,
        count: u32,
        fleet: &RouterFleet,
    ) -> bool {
        let none_waited = self.waiting_outside(fleet) == 0;
        match place {
            OutsideQueue::Here => self.outside_queues.here = count,
            OutsideQueue::Elsewhere => self.outside_queues.elsewhere = count,
        }
        none_waited && self.waiting_outside(fleet) > 0
    }

    /// Requests waiting at other routers arrive as gossip over shared workers as soon as there are
    /// any, and must not be counted twice.
    fn waiting_outside(&self, fleet: &RouterFleet) -> u32 {
        let OutsideQueues { here, elsewhere } = self.outside_queues;
        match fleet.workers().next() {
            None => here.saturating_add(elsewhere),
            Some(_) => here,
        }
    }

    fn feed(&mut self, now: Time, input: ScalerInput) {
        if let Some(scaler) = &mut self.scaler {
            scaler.handle(now, input);
        }
    }

    // === evaluation ===

    /// Lets the autoscaler evaluate the fleet, if it is due or the fleet has changed. Returns its
    /// outputs, in the order in which they are to be performed.
    pub(crate) fn evaluate(
        &mut self,
        now: Time,
        changed: bool,
        fleet: &RouterFleet,
        flights: &RouterFlights,
        queued: u32,
    ) -> Vec<ScalerOutput> {
        let due = self.deadline().is_some_and(|due| changed || now >= due);
        if !due {
            return Vec::new();
        }
        let waiting = queued.saturating_add(self.waiting_outside(fleet));
        let facts = fleet_facts(fleet, flights, waiting);
        self.feed(now, ScalerInput::FleetChanged(facts));
        let outputs = || self.scaler.as_mut().and_then(|scaler| scaler.poll());
        std::iter::from_fn(outputs).collect()
    }
}

/// The facts of an evaluation; `waiting` requests have no place.
fn fleet_facts(fleet: &RouterFleet, flights: &RouterFlights, waiting: u32) -> ScalerFleet {
    let without_place = flights.iter().filter(|(_, flight)| flight.is_waiting());
    let tokens = without_place.map(|(_, flight)| flight.request.prompt.len() as u64);
    let decodes = |worker: &&FleetWorker| worker.description.role.decodes();
    let streams = fleet.workers().filter(decodes);
    ScalerFleet {
        members: fleet.workers().map(member).collect(),
        prefill: costs(fleet, Role::Prefill),
        decode: costs(fleet, Role::Decode),
        context_tokens: streams.map(|worker| worker.load.context_tokens).sum(),
        waiting,
        waiting_tokens: tokens.sum(),
        open: flights.len() as u32,
    }
}

/// Prices and capacity of a worker for that leg, as a sample; of a worker of that leg alone if
/// there is one.
fn costs(fleet: &RouterFleet, leg: Role) -> Option<(Prices, Capacity)> {
    let priced = fleet.workers().filter(|worker| worker.priced());
    let serves = priced.filter(|worker| match leg {
        Role::Decode => worker.description.role.decodes(),
        Role::Prefill | Role::Both => worker.description.role.prefills(),
    });
    let found = serves.min_by_key(|worker| (worker.description.role != leg, worker.me));
    found.map(|worker| (worker.prices.clone(), worker.description.capacity))
}

/// How long a started worker may take to join; none where the autoscaler starts none.
pub(crate) fn workers_expected(policy: &SloPolicy) -> Option<Duration> {
    let scaling = policy.scaling.as_ref()?;
    let hopes = scaling.mode == ScalingMode::Act && scaling.can_serve();
    hopes.then_some(scaling.start_max)
}

fn member(worker: &FleetWorker) -> ScalerMember {
    let load = &worker.load;
    ScalerMember {
        worker: worker.me.worker,
        role: worker.description.role,
        home_role: worker.description.home,
        leaving: !worker.accepts(),
        busy_tokens: load.queue_tokens.saturating_add(load.context_tokens),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::brain::RouterBrain;
    use crate::event::{RouterInput as Fact, RouterOutput};
    use cleave_domain::{
        Fingerprint, Incarnation, PoolScaling, ScalingPolicy, WorkerDescription, WorkerId,
        WorkerRef,
    };

    const ME: WorkerRef = WorkerRef {
        worker: WorkerId(1),
        incarnation: Incarnation(1),
    };

    struct ScalerHarness {
        brain: RouterBrain,
        second: u64,
        waiting: Option<u32>,
    }

    impl ScalerHarness {
        /// A router whose fleet may have one worker, after its initial listening time.
        fn begin() -> Self {
            let scaling = ScalingPolicy {
                both: PoolScaling {
                    max: 1,
                    ..PoolScaling::absent(Role::Both)
                },
                ..ScalingPolicy::new(1)
            };
            let policy = SloPolicy {
                scaling: Some(scaling),
                ..SloPolicy::default()
            };
            let mut played = Self {
                brain: RouterBrain::new(RouterLimits {
                    policy: Arc::new(policy),
                    ..RouterLimits::default()
                }),
                second: 0,
                waiting: None,
            };
            for _ in 0..30 {
                played.handle(Fact::Woke);
            }
            played
        }

        fn handle(&mut self, fact: Fact) {
            self.second += 1;
            let now = Time::ZERO + Duration::from_secs(self.second);
            self.brain.handle(now, fact);
            while let Some(output) = self.brain.poll() {
                if let RouterOutput::WorkersWanted(decision) = output {
                    self.waiting = Some(decision.waiting);
                }
            }
            self.brain.check();
        }

        /// Waiting requests in the scaler's decision one second after this fact.
        fn waiting_after(&mut self, fact: Fact) -> u32 {
            self.handle(fact);
            self.handle(Fact::Woke);
            self.waiting.unwrap()
        }
    }

    #[test]
    fn requests_waiting_at_other_routers_count_once() {
        let mut played = ScalerHarness::begin();
        let wait = |place, count| Fact::Waiting { place, count };
        assert_eq!(played.waiting_after(wait(OutsideQueue::Elsewhere, 3)), 3);
        assert_eq!(played.waiting_after(wait(OutsideQueue::Here, 2)), 5);
        let joined = Fact::WorkerJoined {
            worker: ME,
            description: WorkerDescription {
                role: Role::Both,
                home: Role::Both,
                model: "m".to_owned(),
                fingerprint: Fingerprint("a".to_owned()),
                capacity: Capacity {
                    block_tokens: 4,
                    block_bytes: 64,
                    blocks_count: 40,
                    slots_count: 4,
                    step_tokens_max: 16,
                    context_tokens_max: 100,
                    states: None,
                    windows: None,
                },
                queue_max: 3,
                device: None,
            },
        };
        assert_eq!(played.waiting_after(joined), 2, "workers relay gossip");
        assert_eq!(played.waiting_after(wait(OutsideQueue::Elsewhere, 7)), 2);
        let lost = Fact::WorkerLost { worker: ME };
        assert_eq!(played.waiting_after(lost), 9, "no worker relays gossip");
        assert_eq!(played.waiting_after(wait(OutsideQueue::Elsewhere, 0)), 2);
        assert_eq!(played.waiting_after(wait(OutsideQueue::Here, 0)), 0);
    }
}
