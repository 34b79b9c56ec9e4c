//! What the router's brain tells the one that says how large the fleet is to be, and what comes of it.
//!
//! Owns: the facts that [`Scaler`] hears, whom its words to other routers are given to carry, and the hope
//! of those who find no worker. Never: says how many workers there are to be.
//! Invariant: nobody is refused for want of a worker while one is to be started, before it could be there.

use crate::brain::Brain;
use crate::event::{Command, Output, Outside, Readiness};
use crate::fleet::Worker;
use crate::flight::{Flight, Stage};
use cleave_domain::{
    Aim, Capacity, Ending, FlightId, HandoffId, Order, Prices, Refusal, Request, Role, ScalingMode,
    Unmet, Verdict, Voice, WorkerRef,
};
use cleave_planner::scaling::{Came, Fleet, Input, Member, Output as Said, Scaler};
use std::sync::Arc;
use std::time::Duration;

/// Workers that carry a word to other routers; more than one, so that one that is stuck or lost keeps
/// nobody from agreeing.
const CARRIERS: usize = 3;

/// How many wait outside, by where.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Queues {
    here: u32,
    elsewhere: u32,
}

impl Brain {
    // === facts ===

    /// The policy changed.
    pub(crate) fn rescale(&mut self) {
        self.rescaled = true;
        let policy = Arc::clone(&self.limits.policy);
        let Some(scaling) = policy.scaling.clone() else {
            self.scaler = None;
            return;
        };
        match &mut self.scaler {
            Some(scaler) => scaler.handle(self.now, Input::Configured(scaling, policy)),
            None => {
                let scaler = Scaler::new(self.limits.me, self.now, scaling, policy);
                self.scaler = Some(Box::new(scaler));
            }
        }
    }

    /// What no worker could ever hold asks for none.
    pub(crate) fn came(&mut self, request: &Request) {
        if self.scaler.is_some() && !self.fleet.is_too_long(request.prompt.len()) {
            let class = request.slo.class.clone();
            let prompt_tokens = request.prompt.len() as u32;
            self.scaler_hears(Input::Arrived {
                class,
                prompt_tokens,
            });
        }
    }

    /// Only its first attempt tells of what comes.
    pub(crate) fn was_placed(&mut self, handoff: HandoffId, cached_tokens: u32) {
        if handoff.attempt == 0 {
            self.scaler_hears(Input::Placed { cached_tokens });
        }
    }

    pub(crate) fn was_judged(
        &mut self,
        flight: &Flight,
        (verdict, ending): (Verdict, &Ending),
        answer: Option<u32>,
    ) {
        if self.scaler.is_none() {
            return;
        }
        let plain = flight.failures == 0 && !flight.hopes;
        let aim = match ending {
            Ending::Refused(Refusal::Late { aim, .. }) => Some(*aim),
            Ending::Refused(Refusal::NoBlocks { .. }) => Some(Aim::Tpot),
            Ending::Refused(Refusal::QueueFull { .. }) => Some(Aim::Ttft),
            _ => None,
        };
        self.scaler_hears(Input::Ended {
            class: flight.request.slo.class.clone(),
            came: Came::of(verdict, plain, aim),
            output_tokens: answer.unwrap_or(0),
        });
    }

    pub(crate) fn passed_on(&mut self, voice: Arc<Voice>) {
        self.scaler_hears(Input::Heard(voice));
    }

    pub(crate) fn wait_outside(&mut self, place: Outside, count: u32) {
        let nobody_did = self.waiting_outside() == 0;
        match place {
            Outside::Here => self.outside.here = count,
            Outside::Elsewhere => self.outside.elsewhere = count,
        }
        if nobody_did && self.waiting_outside() > 0 {
            self.scale(true);
        }
    }

    /// Who waits elsewhere is heard of by the workers that routers share as soon as there are any, and must
    /// not count twice.
    fn waiting_outside(&self) -> u32 {
        let Queues { here, elsewhere } = self.outside;
        match self.fleet.workers().next() {
            None => here.saturating_add(elsewhere),
            Some(_) => here,
        }
    }

    fn scaler_hears(&mut self, input: Input) {
        if let Some(scaler) = &mut self.scaler {
            scaler.handle(self.now, input);
        }
    }

    // === hope ===

    /// How long a worker may take to be there that somebody is told to start; none where nobody is told.
    pub(crate) fn hope(&self) -> Option<Duration> {
        let scaling = self.limits.policy.scaling.as_ref()?;
        let hopes = scaling.mode == ScalingMode::Act && scaling.serves();
        hopes.then_some(scaling.start_max)
    }

    /// The same where no pair is there now; zero otherwise.
    pub(crate) fn start_awaited(&self) -> Duration {
        let hope = self.hope().unwrap_or_default();
        match hope.is_zero() || self.fleet.readiness(self.now, self.terms()) == Readiness::Ready {
            true => Duration::ZERO,
            false => hope,
        }
    }

    /// It waits until workers are there; its targets count from then on.
    pub(crate) fn wait_for_workers(&mut self, id: FlightId, start_max: Duration) {
        if let Some(flight) = self.flights.get_mut(&id) {
            let limit = match flight.unmet {
                Unmet::Queue(limit) => limit.max(start_max),
                Unmet::Reject | Unmet::Downgrade(_) => start_max,
            };
            flight.unmet = Unmet::Queue(limit);
            flight.place.latest = flight.submitted + limit;
            flight.hopes = true;
        }
        self.wait(id);
    }

    // === the look ===

    /// Lets the fleet be looked at, if it is time to or the fleet has changed.
    pub(crate) fn scale(&mut self, changed: bool) {
        let now = self.now;
        let Some(due) = self.scaler.as_ref().map(|scaler| scaler.deadline()) else {
            return;
        };
        if !changed && now < due {
            return;
        }
        let fleet = self.fleet_facts();
        self.scaler_hears(Input::Stands(fleet));
        while let Some(said) = self.scaler.as_mut().and_then(|scaler| scaler.poll()) {
            match said {
                Said::PassOn(voice) => self.pass_on(&Arc::new(voice)),
                Said::Flip { worker, role } => self.commanded(worker, Command::Serve(role)),
                Said::Want(decision) => self.say(Output::Want(decision)),
            }
        }
    }

    /// The same workers for every router that has the same fleet.
    fn pass_on(&mut self, voice: &Arc<Voice>) {
        let able = self.fleet.workers().filter(|worker| !worker.stuck());
        let carriers: Vec<WorkerRef> = able.map(|worker| worker.me).take(CARRIERS).collect();
        for carrier in carriers {
            self.tell(carrier, Order::PassOn(Arc::clone(voice)));
        }
    }

    fn fleet_facts(&self) -> Fleet {
        let waits = |flight: &&Flight| matches!(flight.stage, Stage::Waiting);
        let waiting = self.flights.values().filter(waits);
        let tokens = waiting.map(|flight| flight.request.prompt.len() as u64);
        let decodes = |worker: &&Worker| worker.description.role.decodes();
        let streams = self.fleet.workers().filter(decodes);
        Fleet {
            members: self.fleet.workers().map(member).collect(),
            prefill: self.costs(Role::Prefill),
            decode: self.costs(Role::Decode),
            context_tokens: streams.map(|worker| worker.load.context_tokens).sum(),
            waiting: self.line.len().saturating_add(self.waiting_outside()),
            waiting_tokens: tokens.sum(),
            open: self.flights.len() as u32,
        }
    }

    /// What work costs on a worker of that leg: one stands for all, one of that leg alone if there is one.
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

fn member(worker: &Worker) -> Member {
    let load = &worker.load;
    Member {
        worker: worker.me.worker,
        role: worker.description.role,
        home: worker.description.home,
        leaves: !worker.accepts(),
        busy_tokens: load.queue_tokens.saturating_add(load.context_tokens),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::event::{Input as Fact, Limits};
    use cleave_domain::{
        Fingerprint, Incarnation, PoolScaling, Scaling, SloPolicy, Time, WorkerDescription,
        WorkerId,
    };

    const ME: WorkerRef = WorkerRef {
        worker: WorkerId(1),
        incarnation: Incarnation(1),
    };

    struct Played {
        brain: Brain,
        second: u64,
        said: Option<u32>,
    }

    impl Played {
        /// A router whose fleet may have one worker, and who has listened long enough to decide.
        fn begin() -> Self {
            let scaling = Scaling {
                both: PoolScaling {
                    max: 1,
                    ..PoolScaling::none(Role::Both)
                },
                ..Scaling::new(1)
            };
            let policy = SloPolicy {
                scaling: Some(scaling),
                ..SloPolicy::default()
            };
            let mut played = Self {
                brain: Brain::new(Limits {
                    policy: Arc::new(policy),
                    ..Limits::default()
                }),
                second: 0,
                said: None,
            };
            for _ in 0..30 {
                played.hear(Fact::Woke);
            }
            played
        }

        /// A second later.
        fn hear(&mut self, fact: Fact) {
            self.second += 1;
            let now = Time::ZERO + Duration::from_secs(self.second);
            self.brain.handle(now, fact);
            while let Some(output) = self.brain.poll() {
                if let Output::Want(decision) = output {
                    self.said = Some(decision.waiting);
                }
            }
            self.brain.check();
        }

        /// How many wait, as the scaler goes by it a second after this fact.
        fn waiting_after(&mut self, fact: Fact) -> u32 {
            self.hear(fact);
            self.hear(Fact::Woke);
            self.said.unwrap()
        }
    }

    #[test]
    fn who_waited_elsewhere_counted_twice_or_not_at_all() {
        let mut played = Played::begin();
        let wait = |place, count| Fact::Waiting { place, count };
        assert_eq!(played.waiting_after(wait(Outside::Elsewhere, 3)), 3);
        assert_eq!(played.waiting_after(wait(Outside::Here, 2)), 5);
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
                },
                queue_max: 3,
                device: None,
            },
        };
        assert_eq!(played.waiting_after(joined), 2, "workers carry the word");
        assert_eq!(played.waiting_after(wait(Outside::Elsewhere, 7)), 2);
        let lost = Fact::WorkerLost { worker: ME };
        assert_eq!(played.waiting_after(lost), 9, "nobody carries it any more");
        assert_eq!(played.waiting_after(wait(Outside::Elsewhere, 0)), 2);
        assert_eq!(played.waiting_after(wait(Outside::Here, 0)), 0);
    }
}
