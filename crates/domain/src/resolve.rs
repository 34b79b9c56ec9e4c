//! Resolves the class, tenant and targets of a request.
//!
//! Owns: the mapping from the origin of a request to its class, tenant and targets. Never: judges
//! whether they can be met. Invariant: a pure function; the result names a class of the policy.

use crate::{RequestOrigin, RequestSlo, SloPolicy, SloRule, Tenant};
use std::error::Error;
use std::fmt;
use subtle::ConstantTimeEq;

/// The header with which a request asks for a class; a rule may match it too.
pub const CLASS_HEADER: &str = "x-slo-class";

/// A request asked for a class that it may not select.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownSloClass {
    /// The class that the request named.
    pub requested: String,
    /// The classes that it may select, in the order of the policy.
    pub selectable: Vec<String>,
}

impl fmt::Display for UnknownSloClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no class `{}` to ask for", self.requested)?;
        match self.selectable.as_slice() {
            [] => f.write_str("; requests may not choose one here"),
            classes => write!(f, "; there is {}", classes.join(", ")),
        }
    }
}

impl Error for UnknownSloClass {}

impl SloPolicy {
    /// The class, tenant and targets of a request for this model with this prompt length. The class
    /// is the one requested by name, or that of the first rule that matches, or the default;
    /// targets of the request replace those of the class, if the policy trusts them.
    ///
    /// # Errors
    /// If it asks for a class that does not exist, or that only rules select.
    pub fn resolve(
        &self,
        origin: &RequestOrigin,
        model: &str,
        prompt_tokens: u32,
    ) -> Result<RequestSlo, UnknownSloClass> {
        let tenant = self.tenant_of(origin);
        let fits = |rule: &&SloRule| rule.fits(origin, &tenant, model, prompt_tokens);
        let class = match &origin.class {
            Some(requested) if self.may_ask_for(requested) => requested,
            Some(requested) => {
                let rule = self.rules.iter().find(fits);
                let leads = rule.filter(|rule| rule.is_about_class_header());
                &leads.ok_or_else(|| self.unknown(requested))?.class
            }
            None => {
                let rule = self.rules.iter().find(fits);
                rule.map_or(&self.default_class, |rule| &rule.class)
            }
        };
        let class = self.class(class);
        let believed = |own, of_class| (if self.trust.targets { own } else { None }).or(of_class);
        Ok(RequestSlo {
            class: class.name.clone(),
            priority: self.priority_for(&tenant, class.priority),
            tenant,
            ttft: believed(origin.ttft, class.ttft),
            tpot: believed(origin.tpot, class.tpot),
            e2e: believed(origin.e2e, class.e2e),
        })
    }

    /// Whether a request may select that class by name.
    pub fn may_ask_for(&self, class: &str) -> bool {
        let mut named = self.classes.iter().filter(|one| one.by_name);
        named.any(|one| one.name == class)
    }

    /// The headers that rules match.
    pub fn headers(&self) -> impl Iterator<Item = &str> {
        let headers = self.rules.iter().filter_map(|rule| rule.header.as_ref());
        headers.map(|(name, _)| name.as_str())
    }

    /// The tenant of the key of the request; else the tenant that it names, if the policy trusts
    /// such names. A tenant with keys is recognised only by a key, and all unknown tenants count as
    /// one: a client that invents names must not get more shares.
    pub fn tenant_of(&self, origin: &RequestOrigin) -> String {
        if let Some(tenant) = self.key_owner(origin) {
            return tenant.name.clone();
        }
        let name_only = |name: &String| {
            let is_it = |one: &Tenant| one.name == *name && one.key_digests.is_empty();
            self.tenants.iter().any(is_it)
        };
        let named = origin.tenant.as_ref().filter(|_| self.trust.tenant);
        named
            .filter(|name| name_only(name))
            .cloned()
            .unwrap_or_default()
    }

    /// The tenant of the key of the request. Every key is compared to its end, so that the time
    /// reveals nothing about any key.
    pub fn key_owner(&self, origin: &RequestOrigin) -> Option<&Tenant> {
        let shown = origin.key_digest?;
        let mut owner = None;
        for tenant in &self.tenants {
            for digest in &tenant.key_digests {
                if bool::from(digest.ct_eq(&shown)) {
                    owner = Some(tenant);
                }
            }
        }
        owner
    }

    fn unknown(&self, requested: &str) -> UnknownSloClass {
        let selectable = self.classes.iter().filter(|class| class.by_name);
        UnknownSloClass {
            requested: requested.to_owned(),
            selectable: selectable.map(|class| class.name.clone()).collect(),
        }
    }
}

impl SloRule {
    /// Whether every condition of the rule holds.
    fn fits(&self, origin: &RequestOrigin, tenant: &str, model: &str, prompt_tokens: u32) -> bool {
        let header = self.header.as_ref().is_none_or(|(name, value)| {
            let mut sent = origin.headers.iter().filter(|(sent, _)| sent == name);
            sent.any(|(_, sent)| value.as_ref().is_none_or(|value| value == sent))
        });
        let length = self.prompt_tokens.as_ref();
        header
            && self.tenant.as_ref().is_none_or(|one| one == tenant)
            && self.model.as_ref().is_none_or(|one| one == model)
            && length.is_none_or(|range| range.contains(&prompt_tokens))
    }

    /// Whether the rule matches the class header.
    pub fn is_about_class_header(&self) -> bool {
        let header = self.header.as_ref();
        header.is_some_and(|(name, _)| name == CLASS_HEADER)
    }

    /// Whether this rule matches every request that `later` matches, so that `later` never decides
    /// after it.
    pub fn covers(&self, later: &Self) -> bool {
        fn wider<T: PartialEq>(one: Option<&T>, other: Option<&T>) -> bool {
            one.is_none_or(|one| other == Some(one))
        }
        let header = match (&self.header, &later.header) {
            (None, _) => true,
            (Some((name, None)), Some((other, _))) => name == other,
            (one, other) => one == other,
        };
        let length = match (&self.prompt_tokens, &later.prompt_tokens) {
            (None, _) => true,
            (Some(one), Some(other)) => one.start() <= other.start() && other.end() <= one.end(),
            (Some(_), None) => false,
        };
        header
            && length
            && wider(self.tenant.as_ref(), later.tenant.as_ref())
            && wider(self.model.as_ref(), later.model.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HeaderTrust, OnSloMiss, SloClass, TenantQuota};
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use std::time::Duration;

    fn class(name: &str) -> SloClass {
        SloClass {
            name: name.to_owned(),
            ttft: Some(Duration::from_millis(100)),
            ..SloClass::default()
        }
    }

    /// Two tenants, one with a key; one class that only rules select.
    fn policy() -> SloPolicy {
        let rule = |class: &str| SloRule {
            class: class.to_owned(),
            ..SloRule::default()
        };
        SloPolicy {
            classes: vec![
                class("fast"),
                class("plain"),
                SloClass {
                    by_name: false,
                    ..class("vip")
                },
            ],
            default_class: "plain".to_owned(),
            rules: vec![
                SloRule {
                    header: Some((CLASS_HEADER.to_owned(), Some("gold".to_owned()))),
                    ..rule("vip")
                },
                SloRule {
                    tenant: Some("acme".to_owned()),
                    prompt_tokens: Some(0..=100),
                    ..rule("vip")
                },
                SloRule {
                    header: Some(("x-app".to_owned(), None)),
                    model: Some("m".to_owned()),
                    ..rule("fast")
                },
            ],
            tenants: vec![
                Tenant {
                    name: "acme".to_owned(),
                    key_digests: vec![[7; 32]],
                    share: 3,
                    quota: TenantQuota {
                        priority_min: Some(-2),
                        ..TenantQuota::default()
                    },
                },
                Tenant {
                    name: "open".to_owned(),
                    key_digests: Vec::new(),
                    share: 1,
                    quota: TenantQuota::default(),
                },
            ],
            trust: HeaderTrust {
                tenant: true,
                ..HeaderTrust::default()
            },
            scaling: None,
            models: Vec::new(),
        }
    }

    fn named(class: &str) -> RequestOrigin {
        RequestOrigin {
            class: Some(class.to_owned()),
            ..RequestOrigin::default()
        }
    }

    fn header(name: &str, value: &str) -> RequestOrigin {
        RequestOrigin {
            headers: vec![(name.to_owned(), value.to_owned())],
            ..RequestOrigin::default()
        }
    }

    #[track_caller]
    fn check(origin: &RequestOrigin, expected: (&str, &str)) {
        let slo = policy().resolve(origin, "m", 50).unwrap();
        assert_eq!((slo.class.as_str(), slo.tenant.as_str()), expected);
    }

    #[test]
    fn a_named_class_overrides_rules_and_rules_the_default() {
        check(&RequestOrigin::default(), ("plain", ""));
        check(&header("x-app", "any"), ("fast", ""));
        check(&named("plain"), ("plain", ""));
        let both = RequestOrigin {
            class: Some("plain".to_owned()),
            ..header("x-app", "any")
        };
        check(&both, ("plain", ""));
    }

    #[test]
    fn a_class_not_selectable_by_name_is_refused() {
        let refused = policy().resolve(&named("vip"), "m", 50).unwrap_err();
        let expected = "there is no class `vip` to ask for; there is fast, plain";
        assert_eq!(refused.to_string(), expected);
        // A matching rule for another header does not permit an unknown class.
        let wrong = RequestOrigin {
            class: Some("nonsense".to_owned()),
            ..header("x-app", "any")
        };
        assert!(policy().resolve(&wrong, "m", 50).is_err());
        let gold = RequestOrigin {
            class: Some("gold".to_owned()),
            ..header(CLASS_HEADER, "gold")
        };
        check(&gold, ("vip", ""));
    }

    #[test]
    fn a_tenant_with_keys_is_recognised_only_by_a_key() {
        let keyed = |digest, tenant: Option<&str>| RequestOrigin {
            key_digest: Some(digest),
            tenant: tenant.map(str::to_owned),
            ..RequestOrigin::default()
        };
        check(&keyed([7; 32], None), ("vip", "acme"));
        check(&keyed([7; 32], Some("open")), ("vip", "acme"));
        check(&keyed([8; 32], Some("acme")), ("plain", ""));
        check(&keyed([8; 32], Some("open")), ("plain", "open"));
        check(&keyed([8; 32], Some("new")), ("plain", ""));
        let mut wary = policy();
        wary.trust.tenant = false;
        let slo = wary.resolve(&keyed([8; 32], Some("open")), "m", 50);
        assert_eq!(slo.unwrap().tenant, "");
        // The prompt is too long for the rule.
        let long = policy().resolve(&keyed([7; 32], None), "m", 101).unwrap();
        assert_eq!(long.class, "plain");
    }

    #[test]
    fn a_tenants_priority_is_limited_by_its_quota() {
        let mut urgent = policy();
        for class in &mut urgent.classes {
            class.priority = -9;
        }
        let of = |policy: &SloPolicy, key: Option<[u8; 32]>| {
            let origin = RequestOrigin {
                key_digest: key,
                ..RequestOrigin::default()
            };
            policy.resolve(&origin, "m", 1).unwrap().priority
        };
        assert_eq!(of(&urgent, Some([7; 32])), -2);
        assert_eq!(of(&urgent, None), -9);
        assert_eq!(of(&policy(), Some([7; 32])), 0, "less urgent stays so");
    }

    #[test]
    fn trusted_request_targets_override_the_class() {
        let own = RequestOrigin {
            ttft: Some(Duration::from_millis(5)),
            e2e: Some(Duration::from_millis(9)),
            ..RequestOrigin::default()
        };
        let slo = policy().resolve(&own, "m", 1).unwrap();
        assert_eq!((slo.ttft, slo.tpot, slo.e2e), (own.ttft, None, own.e2e));
        let mut wary = policy();
        wary.trust.targets = false;
        let slo = wary.resolve(&own, "m", 1).unwrap();
        assert_eq!((slo.ttft, slo.e2e), (class("").ttft, None));
    }

    fn name() -> impl Strategy<Value = String> {
        "[a-d]"
    }

    fn rule() -> impl Strategy<Value = SloRule> {
        (
            option::of((name(), option::of(name()))),
            option::of(name()),
            option::of(name()),
            option::of((0..9_u32, 0..9_u32)),
            0..3_usize,
        )
            .prop_map(|(header, tenant, model, range, class)| SloRule {
                header,
                tenant,
                model,
                prompt_tokens: range.map(|(a, b)| a.min(b)..=a.max(b)),
                class: class.to_string(),
            })
    }

    fn any_policy() -> impl Strategy<Value = SloPolicy> {
        let tenant = (name(), vec(Just([1; 32]), 0..2));
        let tenants = vec(tenant, 0..3);
        let classes = any::<[bool; 3]>();
        let trust = any::<(bool, bool)>();
        (classes, vec(rule(), 0..5), tenants, trust).prop_map(
            |(by_name, rules, tenants, (targets, tenant))| SloPolicy {
                classes: (0..3)
                    .map(|number| SloClass {
                        by_name: by_name[number],
                        unmet: OnSloMiss::Reject,
                        ..class(&number.to_string())
                    })
                    .collect(),
                default_class: "0".to_owned(),
                rules,
                tenants: tenants
                    .into_iter()
                    .map(|(name, key_digests)| Tenant {
                        name,
                        key_digests,
                        share: 1,
                        quota: TenantQuota::default(),
                    })
                    .collect(),
                trust: HeaderTrust {
                    targets,
                    tenant,
                    ..HeaderTrust::default()
                },
                scaling: None,
                models: Vec::new(),
            },
        )
    }

    fn any_origin() -> impl Strategy<Value = RequestOrigin> {
        (
            vec((name(), name()), 0..3),
            option::of(Just([1; 32])),
            option::of("[0-4]"),
            option::of(name()),
            option::of(Just(Duration::from_millis(3))),
        )
            .prop_map(|(headers, key_digest, class, tenant, ttft)| RequestOrigin {
                headers,
                key_digest,
                class,
                tenant,
                ttft,
                tpot: None,
                e2e: None,
            })
    }

    proptest! {
        #[test]
        fn class_resolution_is_deterministic(
            policy in any_policy(), origin in any_origin(), model in name(), tokens in 0..12_u32,
        ) {
            let slo = policy.resolve(&origin, &model, tokens);
            prop_assert_eq!(&slo, &policy.resolve(&origin, &model, tokens));
            match slo {
                Ok(slo) => prop_assert!(policy.classes.iter().any(|class| class.name == slo.class)),
                Err(unknown) => prop_assert_eq!(Some(unknown.requested), origin.class),
            }
        }

        #[test]
        fn a_rule_covered_by_an_earlier_one_never_decides(
            first in rule(), later in rule(), origin in any_origin(), model in name(), tokens in 0..12_u32,
        ) {
            let tenant = origin.tenant.clone().unwrap_or_default();
            let fits = |rule: &SloRule| rule.fits(&origin, &tenant, model.as_str(), tokens);
            prop_assert!(!first.covers(&later) || !fits(&later) || fits(&first));
        }
    }
}
