//! What is to be simulated.
//!
//! Owns: devices, arrivals and the limits of the router. Never: draws any of it; see the callers.
//! Invariant: plain data; a prompt is a recipe of a few words however many tokens it has.

use super::Starter;
use super::wire::whole_grains;
use crate::dice::mix;
use cleave_domain::{
    Fingerprint, LinkPrice, Prices, Request, Sampling, Slo, SloPolicy, StopRules, Time, TokenId,
    WorkerDescription, WorkerRef,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Tokens are `0..VOCAB_SIZE`.
pub const VOCAB_SIZE: u32 = 32_000;

/// A fleet, its clients, and how perfect the world is.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The workers. All join at the start, in this order.
    pub devices: Vec<Device>,
    /// Routers; arrivals take turns among them, and every worker serves all. At least 1.
    pub routers_count: u32,
    /// What each router is told at birth.
    pub router: cleave_router::Limits,
    /// In order of time.
    pub arrivals: Vec<Arrival>,
    /// How long a message between router and worker takes, each way.
    pub message: Duration,
    /// How far a step may take longer or shorter than its price, in thousandths: drawn evenly for each.
    pub noise_permille: u32,
    /// Steps and transfers end at whole multiples of this after they begin, and brains are woken at whole
    /// multiples of it, rounded up; zero for no rounding.
    pub grain: Duration,
    /// By class as arrivals name it: stop once more of them than this missed their targets. Those under
    /// way then are unfinished.
    pub misses_max: BTreeMap<String, u64>,
    /// Starts and stops workers while the world runs; those that `devices` names are its first ones.
    pub starter: Option<Starter>,
    /// Draws noise and tokens.
    pub seed: u64,
}

/// A worker and its hardware.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// What its brain is told at birth; the prices in it are what it believes then.
    pub limits: cleave_sched::Limits,
    /// What its work really costs, and the way of its blocks to others.
    pub real: Prices,
    /// The way between its blocks and host memory.
    pub host: LinkPrice,
    /// Real devices that this worker stands for, such as 8 where it runs tensor-parallel over 8.
    pub devices_count: u32,
}

/// Somebody wants something.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// When.
    pub at: Time,
    /// Of what.
    pub prompt: Prompt,
    /// Exactly so many tokens are generated, at least 1.
    pub output_tokens: u32,
    /// What it was promised.
    pub slo: Slo,
    /// As in [`Request::priority`].
    pub priority: i32,
}

/// The recipe of a prompt: prompts that begin with the same parts begin with the same tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What it is made of, in order.
    pub parts: Arc<[Part]>,
}

/// A run of tokens that is the same wherever its name is; a shorter one of that name is its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Names the content.
    pub name: u64,
    /// How many.
    pub tokens: u32,
}

impl Prompt {
    /// One that begins as no other of another name does.
    pub fn alone(name: u64, tokens: u32) -> Self {
        Self {
            parts: Arc::new([Part { name, tokens }]),
        }
    }

    /// How many.
    pub fn tokens(&self) -> u32 {
        self.parts.iter().map(|part| part.tokens).sum()
    }

    /// The tokens.
    pub fn write(&self) -> Arc<[TokenId]> {
        let write = |part: &Part| {
            let key = mix(part.name);
            let token = move |place: u32| mix(key ^ u64::from(place)) % u64::from(VOCAB_SIZE);
            (0..part.tokens).map(move |place| token(place) as TokenId)
        };
        self.parts.iter().flat_map(write).collect()
    }
}

impl Scenario {
    /// The policy that the routers follow. Without a starter the fleet's size is given: a router that asked for
    /// another one for ever would never let the simulation end.
    pub(crate) fn policy(&self) -> Arc<SloPolicy> {
        let policy = &self.router.policy;
        if self.starter.is_some() || policy.scaling.is_none() {
            return Arc::clone(policy);
        }
        Arc::new(SloPolicy {
            scaling: None,
            ..SloPolicy::clone(policy)
        })
    }

    /// When a timer set to this moment goes off.
    pub(crate) fn tick(&self, at: Time) -> Time {
        Time::ZERO + whole_grains(at.since(Time::ZERO), self.grain)
    }
}

impl Arrival {
    /// What the router is asked for; `number` is the arrival's place in the scenario, and its seed.
    pub fn request(&self, number: u64) -> Request {
        Request {
            prompt: self.prompt.write(),
            generated: Arc::new([]),
            sampling: Sampling {
                seed: number,
                ..Sampling::greedy()
            },
            stop: StopRules {
                max_tokens: self.output_tokens.max(1),
                min_tokens: 0,
                stop_tokens: Arc::new([]),
            },
            priority: self.priority,
            cache_salt: 0,
            slo: self.slo.clone(),
        }
    }
}

impl Device {
    /// Who it is.
    pub fn me(&self) -> WorkerRef {
        self.limits.me
    }

    /// What it says of itself when it joins.
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
