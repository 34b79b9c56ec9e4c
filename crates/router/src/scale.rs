//! The link between the router's brain and the autoscaler in it.
//!
//! Owns: the facts given to [`Scaler`], the relay of its gossip to other routers, and requests that
//! wait for workers to be started. Never: decides how many workers there are to be.
//! Invariant: while a worker is to be started, no request is refused for want of one before the
//! worker could be there.

use crate::brain::RouterBrain;
use crate::event::{OperatorRequest, OutsideQueue, RouterOutput, RouterReadiness};
use crate::fleet::FleetWorker;
use crate::flight::{FlightPhase, FlightRecord};
use cleave_domain::{
    Capacity, Ending, FlightId, HandoffId, OnSloMiss, Order, Prices, Refusal, Request, Role,
    ScalingGossip, ScalingMode, SloMetric, SloVerdict, WorkerRef,
};
use cleave_planner::scaling::{
    PromiseOutcome, Scaler, ScalerFleet, ScalerInput, ScalerMember, ScalerOutput as Said,
};
use std::sync::Arc;
use std::time::Duration;

/// Workers that relay gossip to other routers; more than one, so that one that is stuck or lost
/// does not prevent agreement.
const RELAYS: usize = 3;

/// Requests that wait outside the brain, by place.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OutsideQueues {
    here: u32,
    elsewhere: u32,
}

impl RouterBrain {
    // === facts ===

    pub(crate) fn rescale(&mut self) {
        self.readiness_dirty = true;
        let policy = Arc::clone(&self.limits.policy);
        let Some(scaling) = policy.scaling.clone() else {
            self.scaler = None;
            return;
        };
        match &mut self.scaler {
            Some(scaler) => scaler.handle(self.now, ScalerInput::Configured(scaling, policy)),
            None => {
                let scaler = Scaler::new(self.limits.me, self.now, scaling, policy);
                self.scaler = Some(Box::new(scaler));
            }
        }
    }

    /// Counts an arrival. A request that no worker could ever hold creates no demand.
    pub(crate) fn count_arrival(&mut self, request: &Request) {
        if self.scaler.is_some() && !self.fleet.is_too_long(request.prompt.len()) {
            let class = request.slo.class.clone();
            let prompt_tokens = request.prompt.len() as u32;
            self.feed_scaler(ScalerInput::Arrived {
                class,
                prompt_tokens,
            });
        }
    }

    /// Counts a placement. Only the first attempt reflects new demand.
    pub(crate) fn was_placed(&mut self, handoff: HandoffId, cached_tokens: u32) {
        if handoff.attempt == 0 {
            self.feed_scaler(ScalerInput::Placed { cached_tokens });
        }
    }

    pub(crate) fn was_judged(
        &mut self,
        flight: &FlightRecord,
        verdict: SloVerdict,
        ending: &Ending,
        answer: Option<u32>,
    ) {
        if self.scaler.is_none() {
            return;
        }
        let plain = flight.failures == 0 && !flight.awaits_start;
        let aim = match ending {
            Ending::Refused(Refusal::Late { aim, .. }) => Some(*aim),
            Ending::Refused(Refusal::NoBlocks { .. }) => Some(SloMetric::Tpot),
            Ending::Refused(Refusal::QueueFull { .. }) => Some(SloMetric::Ttft),
            _ => None,
        };
        self.feed_scaler(ScalerInput::Ended {
            class: flight.request.slo.class.clone(),
            outcome: PromiseOutcome::from_verdict(verdict, plain, aim),
            output_tokens: answer.unwrap_or(0),
        });
    }

    pub(crate) fn handle_gossip(&mut self, gossip: Arc<ScalingGossip>) {
        self.feed_scaler(ScalerInput::GossipReceived(gossip));
    }

    pub(crate) fn wait_outside(&mut self, place: OutsideQueue, count: u32) {
        let none_waited = self.waiting_outside() == 0;
        match place {
            OutsideQueue::Here => self.outside_queues.here = count,
            OutsideQueue::Elsewhere => self.outside_queues.elsewhere = count,
        }
        if none_waited && self.waiting_outside() > 0 {
            self.scale(true);
        }
    }

    /// Requests waiting at other routers arrive as gossip over shared workers as soon as there are
    /// any, and must not be counted twice.
    fn waiting_outside(&self) -> u32 {
        let OutsideQueues { here, elsewhere } = self.outside_queues;
        match self.fleet.workers().next() {
            None => here.saturating_add(elsewhere),
            Some(_) => here,
        }
    }

    fn feed_scaler(&mut self, input: ScalerInput) {
        if let Some(scaler) = &mut self.scaler {
            scaler.handle(self.now, input);
        }
    }

    // === waiting for workers to start ===

    /// How long a started worker may take to join; none where the autoscaler starts none.
    pub(crate) fn workers_expected(&self) -> Option<Duration> {
        let scaling = self.limits.policy.scaling.as_ref()?;
        let hopes = scaling.mode == ScalingMode::Act && scaling.can_serve();
        hopes.then_some(scaling.start_max)
    }

    /// The same where no pair is there now; zero otherwise.
    pub(crate) fn start_awaited(&self) -> Duration {
        let expected = self.workers_expected().unwrap_or_default();
        if expected.is_zero()
            || self.fleet.readiness(self.now, self.terms()) == RouterReadiness::Ready
        {
            Duration::ZERO
        } else {
            expected
        }
    }

    /// Lets a flight wait until workers are there; its targets count from then on.
    pub(crate) fn wait_for_workers(&mut self, id: FlightId, start_max: Duration) {
        if let Some(flight) = self.flights.get_mut(&id) {
            let limit = match flight.on_miss {
                OnSloMiss::Queue(limit) => limit.max(start_max),
                OnSloMiss::Reject | OnSloMiss::Downgrade(_) => start_max,
            };
            flight.on_miss = OnSloMiss::Queue(limit);
            flight.place.latest_start = flight.submitted + limit;
            flight.awaits_start = true;
        }
        self.wait(id);
    }

    // === evaluation ===

    /// Lets the autoscaler evaluate the fleet, if it is due or the fleet has changed.
    pub(crate) fn scale(&mut self, changed: bool) {
        let now = self.now;
        let Some(due) = self.scaler.as_ref().map(|scaler| scaler.deadline()) else {
            return;
        };
        if !changed && now < due {
            return;
        }
        let fleet = self.fleet_facts();
        self.feed_scaler(ScalerInput::FleetChanged(fleet));
        while let Some(output) = self.scaler.as_mut().and_then(|scaler| scaler.poll()) {
            match output {
                Said::SendGossip(gossip) => self.relay_gossip(&Arc::new(gossip)),
                Said::Flip { worker, role } => self.commanded(worker, OperatorRequest::Serve(role)),
                Said::Decided(decision) => self.emit_output(RouterOutput::WorkersWanted(decision)),
            }
        }
    }

    /// Relays gossip over the same workers as every router with the same fleet.
    fn relay_gossip(&mut self, gossip: &Arc<ScalingGossip>) {
        let able = self.fleet.workers().filter(|worker| !worker.stuck());
        let carriers: Vec<WorkerRef> = able.map(|worker| worker.me).take(RELAYS).collect();
        for carrier in carriers {
            self.send_order(carrier, Order::Relay(Arc::clone(gossip)));
        }
    }

    fn fleet_facts(&self) -> ScalerFleet {
        let waits = |flight: &&FlightRecord| matches!(flight.stage, FlightPhase::Waiting);
        let waiting = self.flights.values().filter(waits);
        let tokens = waiting.map(|flight| flight.request.prompt.len() as u64);
        let decodes = |worker: &&FleetWorker| worker.description.role.decodes();
        let streams = self.fleet.workers().filter(decodes);
        ScalerFleet {
            members: self.fleet.workers().map(member).collect(),
            prefill: self.costs(Role::Prefill),
            decode: self.costs(Role::Decode),
            context_tokens: streams.map(|worker| worker.load.context_tokens).sum(),
            waiting: self.queue.len().saturating_add(self.waiting_outside()),
            waiting_tokens: tokens.sum(),
            open: self.flights.len() as u32,
        }
    }

    /// Prices and capacity of a worker for that leg, as a sample; of a worker of that leg alone if
    /// there is one.
    fn costs(&self, leg: Role) -> Option<(Prices, Capacity)> {
        let priced = self.fleet.workers().filter(|worker| worker.priced());
        let serves = priced.filter(|worker| match leg {
            Role::Decode => worker.description.role.decodes(),
            Role::Prefill | Role::Both => worker.description.role.prefills(),
        });
        let found = serves.min_by_key(|worker| (worker.description.role != leg, worker.me));
        found.map(|worker| (worker.prices.clone(), worker.description.capacity))
    }
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
    use crate::event::{RouterInput as Fact, RouterLimits};
    use cleave_domain::{
        Fingerprint, Incarnation, PoolScaling, ScalingPolicy, SloPolicy, Time, WorkerDescription,
        WorkerId,
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
