//! The rules, tenants and trust of a policy's file.
//!
//! Owns: their keys, and the ranges of their numbers. Never checks whether a rule's class exists.

use super::class::{name_of, narrow_checked};
use cleave_domain::{HeaderTrust, SloRule, Tenant, TenantQuota};
use cleave_yaml::Location;
use cleave_yaml::{Diagnostics, YamlNode, YamlValue};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Every request is compared with all of them.
const RULES_MAX: usize = 1024;

/// A rule with its positions in the file.
pub(super) struct PlacedRule {
    pub(super) rule: SloRule,
    pub(super) at: Location,
    pub(super) class_at: Location,
    pub(super) tenant_at: Location,
}

/// A tenant with the position of its name.
pub(super) struct PlacedTenant {
    pub(super) tenant: Tenant,
    /// Whether the file gives it keys, valid or not.
    pub(super) is_keyed: bool,
    pub(super) at: Location,
}

pub(super) fn trust(node: &YamlNode, diagnostics: &mut Diagnostics) -> HeaderTrust {
    let defaults = HeaderTrust::default();
    let Some(mut fields) = diagnostics.fields(node, "`trust`") else {
        return defaults;
    };
    let keys = ["targets", "tenant", "require_key", "shared_prefixes"];
    let nodes = keys.map(|key| (key, fields.take(key)));
    fields.reject_unknown(diagnostics);
    let [targets, tenant, require_key, shared_prefixes] =
        nodes.map(|(key, node)| diagnostics.boolean(node?, key));
    HeaderTrust {
        targets: targets.unwrap_or(defaults.targets),
        tenant: tenant.unwrap_or(defaults.tenant),
        require_key: require_key.unwrap_or(defaults.require_key),
        shared_prefixes: shared_prefixes.unwrap_or(defaults.shared_prefixes),
    }
}

pub(super) fn rules(node: &YamlNode, diagnostics: &mut Diagnostics) -> Vec<PlacedRule> {
    let entries = diagnostics.list(node, "rules");
    if entries.len() > RULES_MAX {
        let message = format!("there are more than {RULES_MAX} rules");
        diagnostics.add(entries[RULES_MAX].referenced, message);
    }
    let rules = entries.iter().filter_map(|entry| rule(entry, diagnostics));
    rules.collect()
}

fn rule(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<PlacedRule> {
    let mut fields = diagnostics.fields(node, "a rule")?;
    let header = fields.take("header");
    let tenant = fields.take("tenant");
    let model = fields.take("model");
    let length = fields.take("prompt_tokens");
    let class = fields.take_required("class", diagnostics);
    fields.reject_unknown(diagnostics);

    let at = node.referenced;
    let mut sound = true;
    // A condition that cannot be read must not make the rule fit everything.
    let header = header.map(|node| header_of(node, diagnostics));
    let name = tenant.map(|node| diagnostics.text(node, "tenant"));
    let model = model.map(|node| diagnostics.text(node, "model"));
    let length = length.map(|node| length_of(node, diagnostics));
    sound &= header.as_ref().is_none_or(Option::is_some);
    sound &= name.as_ref().is_none_or(Option::is_some);
    sound &= model.as_ref().is_none_or(Option::is_some);
    sound &= length.as_ref().is_none_or(Option::is_some);
    let class_node = class?;
    let class = diagnostics.text(class_node, "class")?;
    sound.then(|| PlacedRule {
        rule: SloRule {
            header: header.flatten(),
            tenant: name.flatten(),
            model: model.flatten(),
            prompt_tokens: length.flatten(),
            class,
        },
        at,
        class_at: class_node.referenced,
        tenant_at: tenant.map_or(at, |node| node.referenced),
    })
}

/// A header's name, and its value unless any will do.
fn header_of(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<(String, Option<String>)> {
    let mut fields = diagnostics.fields(node, "`header`")?;
    let (name, value) = (
        fields.take_required("name", diagnostics),
        fields.take("value"),
    );
    fields.reject_unknown(diagnostics);
    let value = match value {
        Some(value) => Some(diagnostics.text(value, "value")?),
        None => None,
    };
    let node = name?;
    let name = diagnostics.text(node, "name")?.to_ascii_lowercase();
    let secret = [
        "authorization",
        "proxy-authorization",
        "cookie",
        "x-api-key",
    ];
    if secret.contains(&name.as_str()) {
        let message = format!(
            "`{name}` holds secrets, which do not belong into a policy: make the key's owner a \
             tenant (tenants: api_key_sha256) and ask for `tenant`"
        );
        diagnostics.add(node.referenced, message);
        return None;
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    if !name.chars().all(fits) {
        let message = format!("{name:?} cannot be the name of a header");
        diagnostics.add(node.referenced, message);
        return None;
    }
    Some((name, value))
}

fn length_of(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<RangeInclusive<u32>> {
    let mut fields = diagnostics.fields(node, "`prompt_tokens`")?;
    let (min, max) = (fields.take("min"), fields.take("max"));
    fields.reject_unknown(diagnostics);
    let all = 0..=i64::from(u32::MAX);
    let least = match min {
        Some(node) => diagnostics.integer(node, "min", &all)?,
        None => *all.start(),
    };
    let most = match max {
        Some(node) => diagnostics.integer(node, "max", &all)?,
        None => *all.end(),
    };
    if min.is_none() && max.is_none() {
        let message = "`prompt_tokens` has a `min`, a `max` or both";
        diagnostics.add(node.referenced, message);
        return None;
    }
    if least > most {
        let message = format!("no prompt has from {least} to {most} tokens: swap `min` and `max`?");
        diagnostics.add(node.referenced, message);
        return None;
    }
    Some(narrow_checked(least)..=narrow_checked(most))
}

pub(super) fn tenants(node: &YamlNode, diagnostics: &mut Diagnostics) -> Vec<PlacedTenant> {
    let mut names = BTreeMap::new();
    let mut keys = BTreeMap::new();
    let mut placed = Vec::new();
    for entry in diagnostics.list(node, "tenants") {
        let Some(one) = tenant(entry, &mut keys, diagnostics) else {
            continue;
        };
        let name = one.tenant.name.clone();
        match names.insert(name, one.at.line()) {
            None => placed.push(one),
            Some(line) => {
                let name = &one.tenant.name;
                let message = format!("there is a tenant `{name}` already, in line {line}");
                diagnostics.add(one.at, message);
            }
        }
    }
    placed
}

fn tenant(
    node: &YamlNode,
    keys: &mut BTreeMap<[u8; 32], u64>,
    diagnostics: &mut Diagnostics,
) -> Option<PlacedTenant> {
    let mut fields = diagnostics.fields(node, "a tenant")?;
    let name = fields.take_required("name", diagnostics);
    let share = fields.take("share");
    let quota = QuotaNodes {
        requests: fields.take("requests_per_minute"),
        tokens: fields.take("tokens_per_minute"),
        streams: fields.take("streams_max"),
        priority: fields.take("priority_min"),
    };
    let digests = fields.take("api_key_sha256");
    // A tenant whose last key was removed must not become one that is believed by its name.
    let empty_keys_at = match digests {
        Some(node) => (node.value == YamlValue::List(Vec::new())).then_some(node.referenced),
        None => fields.place("api_key_sha256"),
    };
    fields.reject_unknown(diagnostics);

    let quota = quota.read(diagnostics);
    let share = share.and_then(|node| diagnostics.integer(node, "share", &(1..=1_000_000)));
    if let Some(at) = empty_keys_at {
        let message = "`api_key_sha256` is empty: give a key, or drop the line if the tenant is to be \
                    known by its name alone";
        diagnostics.add(at, message);
    }
    let mut key_digests = Vec::new();
    for node in digests.map_or(&[][..], |node| diagnostics.list(node, "api_key_sha256")) {
        let Some(digest) = digest_of(node, diagnostics) else {
            continue;
        };
        match keys.insert(digest, node.referenced.line()) {
            None => key_digests.push(digest),
            Some(line) => {
                let message = format!("this key is somebody's already, in line {line}");
                diagnostics.add(node.referenced, message);
            }
        }
    }
    let node = name?;
    Some(PlacedTenant {
        tenant: Tenant {
            name: name_of(node, diagnostics)?,
            key_digests,
            share: share.map_or(1, narrow_checked),
            quota,
        },
        is_keyed: digests.is_some() || empty_keys_at.is_some(),
        at: node.referenced,
    })
}

/// The nodes of a tenant's quota.
struct QuotaNodes<'a> {
    requests: Option<&'a YamlNode>,
    tokens: Option<&'a YamlNode>,
    streams: Option<&'a YamlNode>,
    priority: Option<&'a YamlNode>,
}

impl QuotaNodes<'_> {
    fn read(&self, diagnostics: &mut Diagnostics) -> TenantQuota {
        let Self {
            requests,
            tokens,
            streams,
            priority,
        } = self;
        let mut count = |node: &Option<&YamlNode>, key| {
            let number = diagnostics.integer((*node)?, key, &(1..=i64::from(u32::MAX)));
            number.map(narrow_checked)
        };
        let requests_per_minute = count(requests, "requests_per_minute");
        let tokens_per_minute = count(tokens, "tokens_per_minute");
        let streams_max = count(streams, "streams_max");
        let priority =
            priority.and_then(|node| diagnostics.integer(node, "priority_min", &(-1000..=1000)));
        TenantQuota {
            requests_per_minute,
            tokens_per_minute,
            streams_max,
            priority_min: priority.map(narrow_checked),
        }
    }
}

/// Reads the SHA-256 of a key, 64 hexadecimal digits.
fn digest_of(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<[u8; 32]> {
    let text = diagnostics.text(node, "api_key_sha256")?;
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len() == 64);
    let Some(digits) = digits else {
        let message = "a key is given by its SHA-256 in 64 hexadecimal digits: `cleave key` makes one and \
             prints it";
        diagnostics.add(node.referenced, message);
        return None;
    };
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::try_from(pair[0] * 16 + pair[1]).expect("two digits make a byte");
    }
    Some(digest)
}
