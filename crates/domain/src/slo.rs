//! What is promised to whom: classes of requests, tenants, and which request is of which class.
//!
//! Owns: the policy after validation, and the promise a request gets from it. Never: reads a file, or
//! judges what can be met; `node` reads, the router's brain judges.
//! Invariant: names of classes are unique, the default class exists, and downgrades end.

use crate::Scaling;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::time::Duration;

/// What a client was promised. `None` is no promise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slo {
    /// The class the request belongs to; empty is the default class.
    pub class: String,
    /// On whose share it is served; empty is everybody who named no tenant.
    pub tenant: String,
    /// From arrival to the first token.
    pub ttft: Option<Duration>,
    /// Mean gap between output tokens after the first.
    pub tpot: Option<Duration>,
    /// From arrival to the last token.
    pub e2e: Option<Duration>,
    /// The class's; smaller goes first. (A request's own priority orders it among its tenant's only.)
    pub priority: i32,
}

/// Which promises there are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SloPolicy {
    /// In the order of the file; never empty.
    pub classes: Vec<SloClass>,
    /// The class of a request that no rule is about: one of `classes`.
    pub default_class: String,
    /// The first that fits decides.
    pub rules: Vec<Rule>,
    /// Those with a share of their own; all others together are one, with share 1.
    pub tenants: Vec<Tenant>,
    /// Which headers are believed.
    pub trust: Trust,
    /// How the fleet grows and shrinks; none where nobody is told to.
    #[serde(default)]
    pub scaling: Option<Scaling>,
}

/// See [`SloPolicy::trust`]. Whoever can reach the server can send any header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// A request may bring targets of its own. Default yes.
    pub targets: bool,
    /// A request without a known API key may name a tenant that has none. Default no: it would be
    /// served on somebody else's share.
    pub tenant: bool,
    /// Whoever has no known API key is served nothing. Default no.
    pub require_key: bool,
    /// Tenants reuse each other's cached prefixes, which their answers' times show. Default no: each has
    /// its own, and those without a tenant share one.
    pub shared_prefixes: bool,
}

/// A class of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SloClass {
    /// Unique.
    pub name: String,
    /// From arrival to the first token.
    pub ttft: Option<Duration>,
    /// Mean gap between output tokens after the first.
    pub tpot: Option<Duration>,
    /// From arrival to the last token.
    pub e2e: Option<Duration>,
    /// Of the requests taken on, so many are to meet their targets, in thousandths. Default 900.
    pub attainment_permille: u32,
    /// Smaller goes first, whatever the slack of others. Default 0.
    pub priority: i32,
    /// What the class weighs against others of its priority that have no slack to compare. Default 1.
    pub weight: u32,
    /// Its flights that wait for a place at most. Default: the router's limit.
    pub queue_max: Option<u32>,
    /// What becomes of a request whose target cannot be met. Default `Reject`.
    pub unmet: Unmet,
    /// Whether a request may ask for it by its name. Default yes; else rules, downgrades and the
    /// default alone lead to it.
    pub by_name: bool,
}

/// See [`SloClass::unmet`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unmet {
    /// 429 at once.
    Reject,
    /// It waits for so long that targets can be met (as counted from when it is placed), then 429.
    Queue(Duration),
    /// It becomes one of that class, and is judged anew.
    Downgrade(String),
}

/// Requests that fit every given condition are of a class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// A header's name in lower case and its value; none given: any.
    pub header: Option<(String, Option<String>)>,
    /// The tenant's name.
    pub tenant: Option<String>,
    /// The served model's name.
    pub model: Option<String>,
    /// Length of the prompt.
    pub prompt_tokens: Option<RangeInclusive<u32>>,
    /// The class that they are of.
    pub class: String,
}

/// Somebody with a share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tenant {
    /// Unique.
    pub name: String,
    /// SHA-256 of the API keys by which it is known, so that a policy holds no secret.
    pub key_digests: Vec<[u8; 32]>,
    /// Tokens served to it stand to those of others as the shares do, while both want some.
    pub share: u32,
    /// What it may ask for. Default anything.
    pub quota: Quota,
}

/// What a tenant may ask of one router; without a number there is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// HTTP requests, up to a minute's worth at once.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers, up to a minute's worth at once.
    pub tokens_per_minute: Option<u32>,
    /// Sequences served at once; each prompt and each of `n` choices is one.
    pub streams_max: Option<u32>,
    /// The most urgent that its requests may be, by their class or by themselves (smaller is more
    /// urgent); more urgent ones are served as this.
    pub priority_min: Option<i32>,
}

/// What is known of a request's sender before it is a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Lower-case names and values, as far as rules could ask for them.
    pub headers: Vec<(String, String)>,
    /// SHA-256 of its API key, if it sent one.
    pub key_digest: Option<[u8; 32]>,
    /// The class it asked for by name.
    pub class: Option<String>,
    /// The tenant it named.
    pub tenant: Option<String>,
    /// Its own targets, which replace those of the class.
    pub ttft: Option<Duration>,
    /// See `ttft`.
    pub tpot: Option<Duration>,
    /// See `ttft`.
    pub e2e: Option<Duration>,
}

impl Default for SloClass {
    fn default() -> Self {
        Self {
            name: "default".to_owned(),
            ttft: None,
            tpot: None,
            e2e: None,
            attainment_permille: 900,
            priority: 0,
            weight: 1,
            queue_max: None,
            unmet: Unmet::Reject,
            by_name: true,
        }
    }
}

impl Default for Trust {
    fn default() -> Self {
        Self {
            targets: true,
            tenant: false,
            require_key: false,
            shared_prefixes: false,
        }
    }
}

impl Default for SloPolicy {
    /// One class without targets: everybody is served as soon as possible.
    fn default() -> Self {
        let class = SloClass::default();
        Self {
            default_class: class.name.clone(),
            classes: vec![class],
            rules: Vec::new(),
            tenants: Vec::new(),
            trust: Trust::default(),
            scaling: None,
        }
    }
}

impl SloPolicy {
    /// The class of that name; the default class for any other.
    pub fn class(&self, name: &str) -> &SloClass {
        let named = |name: &str| self.classes.iter().find(|class| class.name == name);
        named(name)
            .or_else(|| named(&self.default_class))
            .expect("the default class exists")
    }

    /// The tenant's share; 1 for one without its own.
    pub fn share(&self, tenant: &str) -> u32 {
        let found = self.tenants.iter().find(|one| one.name == tenant);
        found.map_or(1, |one| one.share)
    }

    /// What the tenant may ask for; anything if the policy does not know it.
    pub fn quota(&self, tenant: &str) -> Quota {
        let found = self.tenants.iter().find(|one| one.name == tenant);
        found.map_or_else(Quota::default, |one| one.quota)
    }

    /// How urgent a request of this tenant may be that would be as urgent as this.
    pub fn priority_for(&self, tenant: &str, priority: i32) -> i32 {
        let least = self.quota(tenant).priority_min;
        least.map_or(priority, |least| priority.max(least))
    }
}
