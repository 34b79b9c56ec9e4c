//! Consistency between the parts of a policy.
//!
//! Owns: whether every name exists, every class and rule can take effect, and downgrades end. Never
//! reads a number. Invariant: a policy that passes keeps the invariant of [`SloPolicy`].

use super::class::PlacedClass;
use super::rule::{PlacedRule, PlacedTenant};
use cleave_domain::{HeaderTrust, ModelPolicy, OnSloMiss, ScalingPolicy, SloPolicy};
use cleave_yaml::Location;
use cleave_yaml::{Diagnostics, YamlNode};
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
    pub(super) models: Vec<ModelPolicy>,
}

impl PolicyDraft<'_> {
    pub(super) fn check(self, diagnostics: &mut Diagnostics) -> Option<SloPolicy> {
        // Without a class every name would add an error about the same mistake.
        self.classes.first()?;
        let default_class = self.default_class(diagnostics);
        self.check_rules(diagnostics);
        self.check_tenants(diagnostics);
        self.check_keys(diagnostics);
        self.check_downgrades(diagnostics);
        if let Some(default_class) = &default_class {
            self.check_reach(default_class, diagnostics);
        }
        Some(SloPolicy {
            default_class: default_class?,
            classes: self.classes.into_iter().map(|one| one.class).collect(),
            rules: self.rules.into_iter().map(|one| one.rule).collect(),
            tenants: self.tenants.into_iter().map(|one| one.tenant).collect(),
            trust: self.trust,
            scaling: self.scaling,
            models: self.models,
        })
    }

    /// The named default class, or the only class.
    fn default_class(&self, diagnostics: &mut Diagnostics) -> Option<String> {
        match (self.default_class, self.classes.as_slice()) {
            (Some(node), _) => {
                let name = diagnostics.text(node, "default_class")?;
                self.exists(&name, node.referenced, diagnostics)
                    .then_some(name)
            }
            (None, [only]) => Some(only.class.name.clone()),
            (None, _) => {
                let message = "a policy of several classes says which one is everybody's: \
                            `default_class: NAME`";
                diagnostics.add(self.at, message);
                None
            }
        }
    }

    fn exists(&self, class: &str, at: Location, diagnostics: &mut Diagnostics) -> bool {
        let mut names = self.classes.iter().map(|one| one.class.name.as_str());
        if names.clone().any(|name| name == class) {
            return true;
        }
        let names: Vec<_> = names.by_ref().collect();
        let message = format!("there is no class `{class}`; there is {}", names.join(", "));
        diagnostics.add(at, message);
        false
    }

    fn check_rules(&self, diagnostics: &mut Diagnostics) {
        for (index, later) in self.rules.iter().enumerate() {
            self.exists(&later.rule.class, later.class_at, diagnostics);
            let mut before = self.rules[..index].iter();
            if let Some(first) = before.find(|first| first.rule.covers(&later.rule)) {
                let line = first.at.line();
                let message = format!(
                    "this rule never decides: the one in line {line} fits all that it fits; move \
                     it up or drop it"
                );
                diagnostics.add(later.at, message);
            }
            let tenant = later.rule.tenant.as_deref();
            let tenant_exists = |name: &str| self.tenants.iter().any(|one| one.tenant.name == name);
            if let Some(tenant) = tenant.filter(|name| !tenant_exists(name)) {
                let message = format!("there is no tenant `{tenant}`: add it to `tenants`");
                diagnostics.add(later.tenant_at, message);
            }
        }
    }

    fn check_tenants(&self, diagnostics: &mut Diagnostics) {
        for PlacedTenant {
            tenant,
            is_keyed,
            at,
        } in &self.tenants
        {
            if !is_keyed && !self.trust.tenant {
                let message = format!(
                    "nobody can be the tenant `{}`: give it an `api_key_sha256`, or believe \
                     headers with `trust: {{tenant: true}}`",
                    tenant.name
                );
                diagnostics.add(*at, message);
            }
        }
    }

    fn check_keys(&self, diagnostics: &mut Diagnostics) {
        let keyed = self.tenants.iter().any(|one| one.is_keyed);
        if self.trust.require_key && !keyed {
            let message = "nobody has a key, and `trust` has `require_key: true`: give a tenant an \
                        `api_key_sha256` (`cleave key` makes one)";
            diagnostics.add(self.at, message);
        }
    }

    /// Reports each cycle once, at its first class in the file.
    fn check_downgrades(&self, diagnostics: &mut Diagnostics) {
        let mut reported = BTreeSet::new();
        for start in &self.classes {
            if let Some(to) = downgrade(start) {
                self.exists(to, start.downgrade_at, diagnostics);
            }
            let mut path = vec![start.class.name.as_str()];
            let mut here = start;
            while let Some(next) = downgrade(here).and_then(|to| self.find(to)) {
                let name = next.class.name.as_str();
                if path.contains(&name) {
                    break;
                }
                path.push(name);
                here = next;
            }
            let closes = downgrade(here) == Some(path[0]);
            if closes && path.iter().all(|name| reported.insert(*name)) {
                let message = format!(
                    "downgrades that go in a circle end nowhere: {} -> {}",
                    path.join(" -> "),
                    path[0]
                );
                diagnostics.add(start.downgrade_at, message);
            }
        }
    }

    fn check_reach(&self, default_class: &str, diagnostics: &mut Diagnostics) {
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
                let message = format!(
                    "no request can be of class `{name}`: no rule, downgrade or default leads to \
                     it, and with `by_name: false` none may ask for it"
                );
                diagnostics.add(one.at, message);
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
