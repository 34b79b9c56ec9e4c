//! Consistency between the parts of a policy.
//!
//! Owns: whether every name exists, every class and rule can take effect, and downgrades end. Never
//! reads a number. Invariant: a policy that passes keeps the invariant of [`SloPolicy`].

use super::class::PlacedClass;
use super::rule::{PlacedRule, PlacedTenant};
use super::yaml::{Diagnostics, YamlNode};
use cleave_domain::{HeaderTrust, OnSloMiss, ScalingPolicy, SloPolicy};
use serde_saphyr::Location;
use std::collections::BTreeSet;

/// The parts of a policy, each valid by itself.
pub(super) struct PolicyDraft<'a> {
    pub(super) at: Location,
    pub(super) default_class: Option<&'a YamlNode>,
    pub(super) classes: Vec<PlacedClass>,
    pub(super) rules: Vec<PlacedRule>,
    pub(super) tenants: Vec<PlacedTenant>,
    pub(super) trust: HeaderTrust,
    pub(super) scaling: Option<ScalingPolicy>,
}

impl PolicyDraft<'_> {
    pub(super) fn check(self, flaws: &mut Diagnostics) -> Option<SloPolicy> {
        // Without a class every name would add an error about the same mistake.
        self.classes.first()?;
        let default_class = self.default_class(flaws);
        self.check_rules(flaws);
        self.check_tenants(flaws);
        self.check_keys(flaws);
        self.check_downgrades(flaws);
        if let Some(default_class) = &default_class {
            self.check_reach(default_class, flaws);
        }
        Some(SloPolicy {
            default_class: default_class?,
            classes: self.classes.into_iter().map(|one| one.class).collect(),
            rules: self.rules.into_iter().map(|one| one.rule).collect(),
            tenants: self.tenants.into_iter().map(|one| one.tenant).collect(),
            trust: self.trust,
            scaling: self.scaling,
        })
    }

    /// The named default class, or the only class.
    fn default_class(&self, flaws: &mut Diagnostics) -> Option<String> {
        match (self.default_class, self.classes.as_slice()) {
            (Some(node), _) => {
                let name = flaws.text(node, "default_class")?;
                self.exists(&name, node.referenced, flaws).then_some(name)
            }
            (None, [only]) => Some(only.class.name.clone()),
            (None, _) => {
                let says = "a policy of several classes says which one is everybody's: \
                            `default_class: NAME`";
                flaws.add(self.at, says);
                None
            }
        }
    }

    fn exists(&self, class: &str, at: Location, flaws: &mut Diagnostics) -> bool {
        let mut names = self.classes.iter().map(|one| one.class.name.as_str());
        if names.clone().any(|name| name == class) {
            return true;
        }
        let names: Vec<_> = names.by_ref().collect();
        let says = format!("there is no class `{class}`; there is {}", names.join(", "));
        flaws.add(at, says);
        false
    }

    fn check_rules(&self, flaws: &mut Diagnostics) {
        for (index, later) in self.rules.iter().enumerate() {
            self.exists(&later.rule.class, later.class_at, flaws);
            let mut before = self.rules[..index].iter();
            if let Some(first) = before.find(|first| first.rule.covers(&later.rule)) {
                let line = first.at.line();
                let says = format!(
                    "this rule never decides: the one in line {line} fits all that it fits; move \
                     it up or drop it"
                );
                flaws.add(later.at, says);
            }
            let tenant = later.rule.tenant.as_deref();
            let known = |name: &str| self.tenants.iter().any(|one| one.tenant.name == name);
            if let Some(tenant) = tenant.filter(|name| !known(name)) {
                let says = format!("there is no tenant `{tenant}`: add it to `tenants`");
                flaws.add(later.tenant_at, says);
            }
        }
    }

    fn check_tenants(&self, flaws: &mut Diagnostics) {
        for PlacedTenant {
            tenant,
            is_keyed,
            at,
        } in &self.tenants
        {
            if !is_keyed && !self.trust.tenant {
                let says = format!(
                    "nobody can be the tenant `{}`: give it an `api_key_sha256`, or believe \
                     headers with `trust: {{tenant: true}}`",
                    tenant.name
                );
                flaws.add(*at, says);
            }
        }
    }

    fn check_keys(&self, flaws: &mut Diagnostics) {
        let keyed = self.tenants.iter().any(|one| one.is_keyed);
        if self.trust.require_key && !keyed {
            let says = "nobody has a key, and `trust` has `require_key: true`: give a tenant an \
                        `api_key_sha256` (`cleave key` makes one)";
            flaws.add(self.at, says);
        }
    }

    /// Reports each cycle once, at its first class in the file.
    fn check_downgrades(&self, flaws: &mut Diagnostics) {
        let mut told = BTreeSet::new();
        for start in &self.classes {
            if let Some(to) = downgrade(start) {
                self.exists(to, start.downgrade_at, flaws);
            }
            let mut way = vec![start.class.name.as_str()];
            let mut here = start;
            while let Some(next) = downgrade(here).and_then(|to| self.find(to)) {
                let name = next.class.name.as_str();
                if way.contains(&name) {
                    break;
                }
                way.push(name);
                here = next;
            }
            let closes = downgrade(here) == Some(way[0]);
            if closes && way.iter().all(|name| told.insert(*name)) {
                let says = format!(
                    "downgrades that go in a circle end nowhere: {} -> {}",
                    way.join(" -> "),
                    way[0]
                );
                flaws.add(start.downgrade_at, says);
            }
        }
    }

    fn check_reach(&self, default_class: &str, flaws: &mut Diagnostics) {
        let by_name = self.classes.iter().filter(|one| one.class.by_name);
        let mut reached: BTreeSet<&str> = by_name.map(|one| one.class.name.as_str()).collect();
        reached.insert(default_class);
        reached.extend(self.rules.iter().map(|one| one.rule.class.as_str()));
        let mut open: Vec<&str> = reached.iter().copied().collect();
        while let Some(name) = open.pop() {
            let next = self.find(name).and_then(downgrade);
            open.extend(next.filter(|next| reached.insert(next)));
        }
        for one in &self.classes {
            let name = one.class.name.as_str();
            if !reached.contains(name) {
                let says = format!(
                    "no request can be of class `{name}`: no rule, downgrade or default leads to \
                     it, and with `by_name: false` none may ask for it"
                );
                flaws.add(one.at, says);
            }
        }
    }

    fn find(&self, class: &str) -> Option<&PlacedClass> {
        self.classes.iter().find(|one| one.class.name == class)
    }
}

fn downgrade(one: &PlacedClass) -> Option<&str> {
    match &one.class.unmet {
        OnSloMiss::Downgrade(to) => Some(to),
        OnSloMiss::Reject | OnSloMiss::Queue(_) => None,
    }
}
