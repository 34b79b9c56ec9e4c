//! The input of a goodput run.
//!
//! Owns: devices, arrivals and the limits of the router. Never: draws any of it; the callers do.
//! Invariant: plain data; a prompt is a recipe of a few words however many tokens it has.

use super::Orchestrator;
use super::adapters::{AdapterFleet, adapter_id};
use super::links::whole_grains;
use cleave_domain::{
    Fingerprint, LinkPrice, Prices, Request, RequestSlo, SamplingParams, SloPolicy, SplitMix64,
    StopRules, Time, TokenId, WorkerDescription, WorkerRef,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub const VOCAB_SIZE: u32 = 32_000;

/// A fleet, its clients, and the imperfections of both.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The workers. All join at the start, in this order.
    pub devices: Vec<WorkerDevice>,
    /// Number of routers, at least 1; arrivals take turns among them, and every worker serves all.
    pub routers_count: u32,
    /// The limits of each router's brain.
    pub router: cleave_router::RouterLimits,
    /// Requests in the order of time.
    pub arrivals: Vec<RequestArrival>,
    /// Time of a message between router and worker, each way.
    pub message_time: Duration,
    /// How far a step may take longer or shorter than its price, in thousandths; drawn evenly for
    /// each.
    pub noise_permille: u32,
    /// Steps and transfers last whole multiples of this, and brains are woken at whole multiples of
    /// it, rounded up; zero for no rounding.
    pub grain: Duration,
    /// By class: the run stops once more requests than this missed their targets. Requests in
    /// flight are then unfinished.
    pub misses_max: BTreeMap<String, u64>,
    /// The adapters of its workers, if requests name any.
    pub adapters: Option<AdapterFleet>,
    /// Starts and stops workers while the run goes on; `devices` are its first workers.
    pub orchestrator: Option<Orchestrator>,
    /// Seeds the noise and the tokens.
    pub seed: u64,
}

/// A worker and its hardware.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerDevice {
    /// The limits of its brain; the prices in them are its first estimate.
    pub limits: cleave_sched::WorkerLimits,
    /// The true prices of its work and of its links to other workers.
    pub real_prices: Prices,
    /// The price of copies between its pool and host memory.
    pub host_link: LinkPrice,
    /// Real devices of this worker, such as 8 for tensor parallelism over 8.
    pub devices_count: u32,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestArrival {
    pub at: Time,
    pub prompt: PromptRecipe,
    /// Exact number of generated tokens, at least 1.
    pub output_tokens: u32,
    /// The SLO targets of the request.
    pub slo: RequestSlo,
    /// Priority as in [`Request::priority`].
    pub priority: i32,
    /// The number of the adapter that it names, below [`AdapterFleet::count`].
    pub adapter: Option<u32>,
}

/// The recipe of a prompt: prompts with equal leading parts have equal leading tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptRecipe {
    /// Parts of the prompt, in order.
    pub parts: Arc<[RecipePart]>,
}

/// A run of tokens that is equal wherever its name is; a shorter part of the same name is its
/// beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecipePart {
    pub name: u64,
    pub tokens: u32,
}

impl PromptRecipe {
    /// A prompt that shares no prefix with a prompt of another name.
    pub fn unshared(name: u64, tokens: u32) -> Self {
        Self {
            parts: Arc::new([RecipePart { name, tokens }]),
        }
    }

    /// Tokens of all parts together.
    pub fn tokens(&self) -> u32 {
        self.parts.iter().map(|part| part.tokens).sum()
    }

    /// The token ids of the prompt.
    pub fn token_ids(&self) -> Arc<[TokenId]> {
        let write = |part: &RecipePart| {
            let key = SplitMix64::finalize(part.name);
            let token = move |place: u32| {
                SplitMix64::finalize(key ^ u64::from(place)) % u64::from(VOCAB_SIZE)
            };
            (0..part.tokens).map(move |place| token(place) as TokenId)
        };
        self.parts.iter().flat_map(write).collect()
    }
}

impl Scenario {
    /// The policy that the routers follow. Without an orchestrator the fleet's size is fixed: a
    /// router that asked for another size for ever would never let the simulation end.
    pub(crate) fn policy(&self) -> Arc<SloPolicy> {
        let policy = &self.router.policy;
        if self.orchestrator.is_some() || policy.scaling.is_none() {
            return Arc::clone(policy);
        }
        Arc::new(SloPolicy {
            scaling: None,
            ..SloPolicy::clone(policy)
        })
    }

    /// When a timer set to this moment goes off.
    pub(crate) fn timer_time(&self, at: Time) -> Time {
        Time::ZERO + whole_grains(at.since(Time::ZERO), self.grain)
    }
}

impl RequestArrival {
    /// The request of the router; `number` is the arrival's index in the scenario, and its seed.
    pub fn request(&self, number: u64) -> Request {
        Request {
            prompt: self.prompt.token_ids(),
            generated: Arc::new([]),
            sampling: SamplingParams {
                seed: number,
                ..SamplingParams::greedy()
            },
            stop: StopRules {
                max_tokens: self.output_tokens.max(1),
                min_tokens: 0,
                stop_tokens: Arc::new([]),
            },
            priority: self.priority,
            cache_salt: 0,
            adapter: self.adapter.map(adapter_id),
            pooling: None,
            slo: self.slo.clone(),
        }
    }
}

impl WorkerDevice {
    pub fn worker_ref(&self) -> WorkerRef {
        self.limits.me
    }

    /// The description with which it joins.
    pub fn description(&self) -> WorkerDescription {
        WorkerDescription {
            role: self.limits.role,
            home: self.limits.role,
            model: "simulated".to_owned(),
            fingerprint: Fingerprint("simulated".to_owned()),
            capacity: self.limits.capacity,
            queue_max: self.limits.queue_max,
            device: None,
        }
    }
}
