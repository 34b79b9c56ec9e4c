//! The SLO policy: classes of requests, tenants, and the rules that assign requests to classes.
//!
//! Owns: the validated policy, and the targets that a request gets from it. Never: reads a file, or
//! judges which targets can be met; `policy` reads the file, and the brain of the router judges.
//! Invariant: names of classes are unique, the default class exists, and chains of downgrades end.

use crate::ScalingPolicy;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// The targets of a request. `None` means no target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestSlo {
    /// The class of the request; empty is the default class.
    pub class: String,
    /// The tenant whose share is used; empty is the common share of all others.
    pub tenant: String,
    /// From arrival to the first token.
    pub ttft: Option<Duration>,
    /// Mean gap between output tokens after the first.
    pub tpot: Option<Duration>,
    /// From arrival to the last token.
    pub e2e: Option<Duration>,
    /// The priority of the class; smaller values are served first. (The priority of a request
    /// orders it only among the requests of its tenant.)
    pub priority: i32,
}

/// The SLO policy of a fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SloPolicy {
    /// The classes in the order of the file; never empty.
    pub classes: Vec<SloClass>,
    /// The class of a request that no rule matches: one of `classes`.
    pub default_class: String,
    /// The rules; the first match decides.
    pub rules: Vec<SloRule>,
    /// The tenants with a share of their own; all other tenants together have share 1.
    pub tenants: Vec<Tenant>,
    /// The headers that are trusted.
    pub trust: HeaderTrust,
    /// The scaling policy of each model that `models` gives none; `None` without an autoscaler.
    #[serde(default)]
    pub scaling: Option<ScalingPolicy>,
    /// The models that are known before a worker announces them. Default none.
    #[serde(default)]
    pub models: Vec<ModelPolicy>,
}

/// The policy of one model, see [`SloPolicy::models`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelPolicy {
    /// The served name, unique among names and aliases of all models.
    pub name: String,
    /// Further names by which requests may ask for it, as unique. Default none.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// The scaling policy of its workers alone. Default that of all models.
    pub scaling: Option<ScalingPolicy>,
}

/// See [`SloPolicy::trust`]. Every client that reaches the server can send any header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderTrust {
    /// Whether a request may set targets of its own. Default yes.
    pub targets: bool,
    /// Whether a request without a known API key may name a tenant that has no key. Default no,
    /// because it would use the share of that tenant.
    pub tenant: bool,
    /// Whether requests without a known API key are refused. Default no.
    pub require_key: bool,
    /// Whether tenants reuse each other's cached prefixes, which the timing of answers reveals.
    /// Default no: each tenant has its own, and requests without a tenant share one.
    pub shared_prefixes: bool,
}

/// A class of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SloClass {
    /// The name, unique among the classes.
    pub name: String,
    /// From arrival to the first token.
    pub ttft: Option<Duration>,
    /// Mean gap between output tokens after the first.
    pub tpot: Option<Duration>,
    /// From arrival to the last token.
    pub e2e: Option<Duration>,
    /// The share of accepted requests that must meet their targets, in thousandths. Default 900.
    pub attainment_permille: u32,
    /// The priority: smaller values are served first, whatever the slack of others. Default 0.
    pub priority: i32,
    /// The weight against classes of the same priority without slack to compare. Default 1.
    pub weight: u32,
    /// Limit of queued flights of the class. Default: the limit of the router.
    pub queue_max: Option<u32>,
    /// The handling of a request whose target cannot be met. Default `Reject`.
    pub unmet: OnSloMiss,
    /// Whether a request may select the class by name. Default yes; otherwise only rules,
    /// downgrades and the default select it.
    pub by_name: bool,
}

/// The handling of a request whose target cannot be met, see [`SloClass::unmet`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnSloMiss {
    /// Refuse with status 429 at once.
    Reject,
    /// Queue for up to this long until targets can be met (counted from the placement), then refuse
    /// with 429.
    Queue(Duration),
    /// Change to that class, and judge again.
    Downgrade(String),
}

/// Assigns requests that match every given condition to a class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SloRule {
    /// The name of a header in lower case, and its value; without a value any value matches.
    pub header: Option<(String, Option<String>)>,
    /// The name of the tenant.
    pub tenant: Option<String>,
    /// The served name of the model.
    pub model: Option<String>,
    /// The range of the prompt length.
    pub prompt_tokens: Option<RangeInclusive<u32>>,
    /// The class of matching requests.
    pub class: String,
}

/// A tenant with a share of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tenant {
    /// The name, unique among the tenants.
    pub name: String,
    /// SHA-256 of the API keys of the tenant, so that a policy holds no secret.
    pub key_digests: Vec<[u8; 32]>,
    /// The share: while two tenants have requests, the tokens served to them are proportional to
    /// their shares.
    pub share: u32,
    /// The limits of its requests. Default none.
    pub quota: TenantQuota,
}

/// The limits of a tenant at one router; without a number there is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantQuota {
    /// HTTP requests; a burst may use one minute's worth at once.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers; a burst may use one minute's worth at once.
    pub tokens_per_minute: Option<u32>,
    /// Sequences served at the same time; each prompt and each of `n` choices is one.
    pub streams_max: Option<u32>,
    /// The smallest priority value of its requests, by their class or by themselves (smaller is
    /// more urgent); requests with a smaller value get this one.
    pub priority_min: Option<i32>,
}

/// The attributes of a request that decide its class and tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestOrigin {
    /// Header names in lower case, and values: at least those that rules match.
    pub headers: Vec<(String, String)>,
    /// SHA-256 of the API key of the request, if it has one.
    pub key_digest: Option<[u8; 32]>,
    /// The class that it requested by name.
    pub class: Option<String>,
    /// The tenant that it named.
    pub tenant: Option<String>,
    /// Its own targets, which replace those of the class.
    pub ttft: Option<Duration>,
    /// As `ttft`, for the gap between output tokens.
    pub tpot: Option<Duration>,
    /// As `ttft`, for the time to the last token.
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
            unmet: OnSloMiss::Reject,
            by_name: true,
        }
    }
}

impl Default for HeaderTrust {
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
    /// One class without targets: every request is served as soon as possible.
    fn default() -> Self {
        let class = SloClass::default();
        Self {
            default_class: class.name.clone(),
            classes: vec![class],
            rules: Vec::new(),
            tenants: Vec::new(),
            trust: HeaderTrust::default(),
            scaling: None,
            models: Vec::new(),
        }
    }
}

impl SloPolicy {
    /// The policy as the pool of this model sees it: with the scaling of that model.
    pub fn of_model(self: &Arc<Self>, model: &str) -> Arc<Self> {
        if self.models.is_empty() {
            return Arc::clone(self);
        }
        let mut own = Self::clone(self);
        own.scaling = self.scaling_of(model).cloned();
        own.models = Vec::new();
        Arc::new(own)
    }

    /// The scaling policy of a model; `None` without an autoscaler.
    pub fn scaling_of(&self, model: &str) -> Option<&ScalingPolicy> {
        let listed = self.models.iter().find(|one| one.name == model);
        let own = listed.and_then(|one| one.scaling.as_ref());
        own.or(self.scaling.as_ref())
    }

    /// The class of that name; the default class for any other.
    pub fn class(&self, name: &str) -> &SloClass {
        let named = |name: &str| self.classes.iter().find(|class| class.name == name);
        named(name)
            .or_else(|| named(&self.default_class))
            .expect("the default class exists")
    }

    /// The share of the tenant; 1 for a tenant without its own.
    pub fn share(&self, tenant: &str) -> u32 {
        let found = self.tenants.iter().find(|one| one.name == tenant);
        found.map_or(1, |one| one.share)
    }

    /// The limits of the tenant; none if the policy does not know it.
    pub fn quota(&self, tenant: &str) -> TenantQuota {
        let found = self.tenants.iter().find(|one| one.name == tenant);
        found.map_or_else(TenantQuota::default, |one| one.quota)
    }

    /// The priority of a request of this tenant whose class or client asks for `priority`.
    pub fn priority_for(&self, tenant: &str, priority: i32) -> i32 {
        let least = self.quota(tenant).priority_min;
        least.map_or(priority, |least| priority.max(least))
    }
}
