//! The pools of a router: a brain for each model.
//!
//! Owns: the pools by the name of their model, and to which of them a fact goes. Never: decides
//! about a flight or a worker; the brain of the pool does.
//! Invariant: a worker and a flight are in one pool, that of their model. So queues, limits,
//! prices, prefixes, hand-offs and the autoscaler are of one model each, and an overloaded model
//! takes nothing from another.
//!
//! It is driven as a brain is: [`RouterPools::handle`], then [`RouterPools::poll`] until it gives
//! nothing, then [`RouterPools::deadline`].
//!
//! A router that knows no model begins with one pool without a name. The first model that a worker
//! announces gives it its name: requests that started the first worker wait there. A pool ends when
//! it had neither worker nor flight for [`MODEL_KEPT`], unless the policy lists its model or it is
//! the last one. So a model that was replaced by one of another name is forgotten.

use crate::brain::RouterBrain;
use crate::event::{RouterInput, RouterLimits, RouterOutput};
use cleave_domain::{FlightId, SloPolicy, Time, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How long a model that the policy does not list stays known without a worker.
const MODEL_KEPT: Duration = Duration::from_secs(600);

/// A fact, with the model that it is about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolInput {
    /// The model of a request or of waiting requests. `None` for facts about a known worker or
    /// flight, for those about all pools, and where the router has one pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Arc<str>>,
    pub input: RouterInput,
}

/// Work for the body, to be performed in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PoolOutput {
    /// The pool of this model begins; a pool without a name is of this model from now on.
    Began { model: Arc<str> },
    /// An output of the pool of this model; the name is empty before the first one is known.
    OfModel {
        model: Arc<str>,
        output: Box<RouterOutput>,
    },
    /// The pool of this model has ended: no worker served it for a while.
    Ended { model: Arc<str> },
    /// Draining is complete: no pool has a flight left.
    Drained,
}

/// The pools of all models.
#[derive(Clone, Debug)]
pub struct RouterPools {
    /// As given; the policy is the one for all models.
    limits: RouterLimits,
    pools: BTreeMap<Arc<str>, ModelPool>,
    outputs: VecDeque<PoolOutput>,
    drain: DrainProgress,
}

#[derive(Clone, Debug)]
struct ModelPool {
    brain: RouterBrain,
    /// No flight is left after a request to drain.
    drained: bool,
    /// Since when it has neither worker nor flight, nor a leg that is not released.
    unused_since: Option<Time>,
}

impl ModelPool {
    fn is_unused(&self) -> bool {
        let brain = &self.brain;
        let has_any = brain.workers().next().is_some() || brain.flight_ids().next().is_some();
        !has_any && brain.legs_open() == 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainProgress {
    No,
    Requested,
    Reported,
}

/// The name of the pool before a model is known.
const UNNAMED: &str = "";

impl From<RouterInput> for PoolInput {
    fn from(input: RouterInput) -> Self {
        Self { model: None, input }
    }
}

impl PoolInput {
    /// A fact about a model, whose pool begins with it if there is none.
    pub fn of_model(model: Arc<str>, input: RouterInput) -> Self {
        let model = Some(model).filter(|model| **model != *UNNAMED);
        Self { model, input }
    }
}

impl RouterPools {
    /// Pools for the models of the policy, or one without a name.
    pub fn new(limits: RouterLimits) -> Self {
        let mut pools = Self {
            limits,
            pools: BTreeMap::new(),
            outputs: VecDeque::new(),
            drain: DrainProgress::No,
        };
        pools.begin_listed(Time::ZERO);
        if pools.pools.is_empty() {
            let pool = pools.new_pool(UNNAMED);
            pools.pools.insert(Arc::from(UNNAMED), pool);
        }
        pools
    }

    /// Handles a fact. A time before an earlier one counts as that one.
    pub fn handle(&mut self, now: Time, fact: PoolInput) {
        let PoolInput { model, input } = fact;
        match input {
            RouterInput::Woke => self.wake(now),
            RouterInput::PolicyChanged { policy } => self.policy_changed(now, policy),
            RouterInput::Draining => {
                if self.drain == DrainProgress::No {
                    self.drain = DrainProgress::Requested;
                }
                self.feed_all(now, &RouterInput::Draining);
            }
            RouterInput::WorkerJoined {
                worker,
                description,
            } => {
                let model: Arc<str> = Arc::from(description.model.as_str());
                self.leave_other_pools(now, worker.worker, &model);
                let joined = RouterInput::WorkerJoined {
                    worker,
                    description,
                };
                self.feed_model(now, &model, joined);
            }
            input => match model {
                Some(model) => self.feed_model(now, &model, input),
                None => {
                    let pool = self.pool_of(&input);
                    self.feed(now, &pool, input);
                }
            },
        }
        self.end_unused(now);
        self.report_drain();
    }

    /// Returns the next thing to do, in order.
    pub fn poll(&mut self) -> Option<PoolOutput> {
        self.outputs.pop_front()
    }

    /// When to wake the pools at the latest, if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        let deadlines = self.pools.values().filter_map(|pool| pool.brain.deadline());
        let ends = self.pools.iter().filter_map(|(model, pool)| {
            let unused_since = pool.unused_since.filter(|_| self.may_end(model))?;
            Some(unused_since + MODEL_KEPT)
        });
        deadlines.chain(ends).min()
    }

    /// Returns whether the responsive workers of a model alone can serve a request.
    pub fn answers(&self, model: &str) -> bool {
        let pool = self.pools.get(model);
        pool.is_some_and(|pool| pool.brain.answers())
    }

    /// Legs that were ordered and have not released their hand-off, those of ended flights
    /// included.
    pub fn legs_open(&self) -> u32 {
        self.pools.values().map(|pool| pool.brain.legs_open()).sum()
    }

    /// Asserts the invariants of every pool, and that they share nothing.
    pub fn check(&self) {
        let mut workers: BTreeMap<WorkerId, &str> = BTreeMap::new();
        let mut flights: BTreeMap<FlightId, &str> = BTreeMap::new();
        for (model, pool) in &self.pools {
            pool.brain.check();
            for worker in pool.brain.workers() {
                let other = workers.insert(worker.me.worker, model);
                assert_eq!(other, None, "{} is in a second pool, {model}", worker.me);
                assert!(
                    **model == *worker.description.model || **model == *UNNAMED,
                    "{} serves {}, and is in the pool of {model}",
                    worker.me,
                    worker.description.model
                );
            }
            for flight in pool.brain.flight_ids() {
                let other = flights.insert(flight, model);
                assert_eq!(other, None, "{flight} is in a second pool, {model}");
            }
        }
        assert!(!self.pools.is_empty(), "no pool is there");
        let unnamed = self.pools.contains_key(UNNAMED);
        assert!(!unnamed || self.pools.len() == 1, "a pool has no name");
    }

    // === pools ===

    fn new_pool(&self, model: &str) -> ModelPool {
        let limits = RouterLimits {
            policy: self.limits.policy.of_model(model),
            ..self.limits.clone()
        };
        ModelPool {
            brain: RouterBrain::new(limits),
            drained: false,
            unused_since: None,
        }
    }

    /// Lets the pool of the model begin, unless it is there. One without a name becomes it.
    fn begin(&mut self, now: Time, model: &Arc<str>) {
        if self.pools.contains_key(model) {
            return;
        }
        let unnamed = self.pools.remove(UNNAMED);
        let is_named_now = unnamed.is_some();
        let pool = unnamed.unwrap_or_else(|| self.new_pool(model));
        self.pools.insert(Arc::clone(model), pool);
        self.outputs.push_back(PoolOutput::Began {
            model: Arc::clone(model),
        });
        if is_named_now && !self.limits.policy.models.is_empty() {
            let policy = self.limits.policy.of_model(model);
            self.feed(now, model, RouterInput::PolicyChanged { policy });
        }
        if !is_named_now && self.drain != DrainProgress::No {
            self.feed(now, model, RouterInput::Draining);
        }
    }

    /// Whether the pool of this model ends once it is unused for long enough.
    fn may_end(&self, model: &str) -> bool {
        let policy = &self.limits.policy;
        self.pools.len() > 1 && !policy.models.iter().any(|listed| listed.name == model)
    }

    /// Notes which pools are unused, and ends those that were for long enough.
    fn end_unused(&mut self, now: Time) {
        for pool in self.pools.values_mut() {
            let since = pool.unused_since.unwrap_or(now);
            pool.unused_since = pool.is_unused().then_some(since);
        }
        let is_over = |pool: &ModelPool| {
            let since = pool.unused_since;
            since.is_some_and(|since| since + MODEL_KEPT <= now)
        };
        let over = self.pools.iter().filter(|(_, pool)| is_over(pool));
        for model in over.map(|(model, _)| Arc::clone(model)).collect::<Vec<_>>() {
            if self.may_end(&model) {
                self.pools.remove(&model);
                self.outputs.push_back(PoolOutput::Ended { model });
            }
        }
    }

    fn begin_listed(&mut self, now: Time) {
        let policy = Arc::clone(&self.limits.policy);
        for listed in &policy.models {
            self.begin(now, &Arc::from(listed.name.as_str()));
        }
    }

    /// The pool of the worker or the flight that the input is about; the first one if none has it,
    /// which counts it as stale.
    fn pool_of(&self, input: &RouterInput) -> Arc<str> {
        let has = |pool: &ModelPool| match input {
            RouterInput::WorkerLost { worker } | RouterInput::WorkerReported { worker, .. } => {
                pool.brain.incarnation_of(worker.worker).is_some()
            }
            RouterInput::Commanded { worker, .. } => pool.brain.incarnation_of(*worker).is_some(),
            RouterInput::Cancelled { flight, .. }
            | RouterInput::ReaderStalled { flight }
            | RouterInput::ReaderResumed { flight } => pool.brain.has_flight(*flight),
            RouterInput::Counted { handoff, .. } => pool.brain.has_flight(handoff.flight),
            RouterInput::WorkerJoined { .. }
            | RouterInput::Submitted { .. }
            | RouterInput::Waiting { .. }
            | RouterInput::PolicyChanged { .. }
            | RouterInput::Woke
            | RouterInput::Draining => false,
        };
        let found = self.pools.iter().find(|(_, pool)| has(pool));
        let (model, _) = found
            .or_else(|| self.pools.first_key_value())
            .expect("a pool is there from the start");
        Arc::clone(model)
    }

    /// Removes a worker from the pools of other models: it restarted with this one.
    fn leave_other_pools(&mut self, now: Time, worker: WorkerId, model: &str) {
        let others = self.pools.iter().filter(|(other, _)| ***other != *model);
        let found = others.filter_map(|(other, pool)| {
            let worker = pool.brain.incarnation_of(worker)?;
            Some((Arc::clone(other), worker))
        });
        for (other, worker) in found.collect::<Vec<_>>() {
            self.feed(now, &other, RouterInput::WorkerLost { worker });
        }
    }

    // === facts ===

    fn feed_model(&mut self, now: Time, model: &Arc<str>, input: RouterInput) {
        self.begin(now, model);
        self.feed(now, model, input);
    }

    fn feed_all(&mut self, now: Time, input: &RouterInput) {
        for model in self.pools.keys().cloned().collect::<Vec<_>>() {
            self.feed(now, &model, input.clone());
        }
    }

    /// Gives one brain a fact, and takes its outputs.
    fn feed(&mut self, now: Time, model: &Arc<str>, input: RouterInput) {
        let Some(pool) = self.pools.get_mut(model) else {
            return;
        };
        pool.brain.handle(now, input);
        while let Some(output) = pool.brain.poll() {
            if output == RouterOutput::Drained {
                pool.drained = true;
                continue;
            }
            self.outputs.push_back(PoolOutput::OfModel {
                model: Arc::clone(model),
                output: Box::new(output),
            });
        }
    }

    /// Wakes the pools whose time has come.
    fn wake(&mut self, now: Time) {
        let due = |pool: &ModelPool| pool.brain.deadline().is_some_and(|at| at <= now);
        let due = self.pools.iter().filter(|(_, pool)| due(pool));
        for model in due.map(|(model, _)| Arc::clone(model)).collect::<Vec<_>>() {
            self.feed(now, &model, RouterInput::Woke);
        }
    }

    /// Applies a new policy to each pool, and lets those of new models begin.
    fn policy_changed(&mut self, now: Time, policy: Arc<SloPolicy>) {
        self.limits.policy = policy;
        for model in self.pools.keys().cloned().collect::<Vec<_>>() {
            let policy = self.limits.policy.of_model(&model);
            self.feed(now, &model, RouterInput::PolicyChanged { policy });
        }
        self.begin_listed(now);
    }

    fn report_drain(&mut self) {
        let is_over = || self.pools.values().all(|pool| pool.drained);
        if self.drain == DrainProgress::Requested && is_over() {
            self.drain = DrainProgress::Reported;
            self.outputs.push_back(PoolOutput::Drained);
        }
    }
}
