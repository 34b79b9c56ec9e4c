//! The classes of a policy's file.
//!
//! Owns: their keys, and the ranges of their numbers. Never checks how a class is reached.

use super::yaml::{Diagnostics, YamlNode, YamlValue};
use cleave_domain::{OnSloMiss, SloClass};
use serde_saphyr::Location;
use std::collections::BTreeMap;
use std::time::Duration;

/// Each class creates about a dozen metric series.
const CLASSES_MAX: usize = 64;
/// A name is a header's value and a metric's label.
const NAME_CHARS_MAX: usize = 64;

/// A class with its positions in the file.
pub(super) struct PlacedClass {
    pub(super) class: SloClass,
    /// The position of its name.
    pub(super) at: Location,
    /// The position of the class that it is downgraded to.
    pub(super) downgrade_at: Location,
}

pub(super) fn classes(node: &YamlNode, flaws: &mut Diagnostics) -> Vec<PlacedClass> {
    let entries = flaws.list(node, "classes");
    if entries.is_empty() && matches!(node.value, YamlValue::List(_)) {
        flaws.add(node.referenced, "a policy has at least one class");
    }
    if entries.len() > CLASSES_MAX {
        let says = format!("there are more than {CLASSES_MAX} classes");
        flaws.add(entries[CLASSES_MAX].referenced, says);
    }
    let mut seen = BTreeMap::new();
    let mut placed: Vec<PlacedClass> = Vec::new();
    for entry in entries {
        let Some(one) = class(entry, flaws) else {
            continue;
        };
        let before = seen.insert(one.class.name.clone(), one.at.line());
        if let Some(line) = before {
            let says = format!(
                "there is a class `{}` already, in line {line}",
                one.class.name
            );
            flaws.add(one.at, says);
            continue;
        }
        placed.push(one);
    }
    placed
}

/// A class whose numbers are wrong counts as one with the defaults, so that rules find it.
fn class(node: &YamlNode, flaws: &mut Diagnostics) -> Option<PlacedClass> {
    let mut fields = flaws.fields(node, "a class")?;
    let name = fields.take_required("name", flaws);
    let [ttft, tpot, e2e] = ["ttft", "tpot", "e2e"].map(|key| fields.take(key));
    let attainment = fields.take("attainment");
    let priority = fields.take("priority");
    let weight = fields.take("weight");
    let queue_max = fields.take("queue_max");
    let unmet = fields.take("unmet");
    let by_name = fields.take("by_name");
    fields.reject_unknown(flaws);

    let defaults = SloClass::default();
    let times = [(ttft, "ttft"), (tpot, "tpot"), (e2e, "e2e")];
    let [ttft, tpot, e2e] =
        times.map(|(node, key)| Some((flaws.time(node?, key)?, node?.referenced)));
    for (part, key) in [(ttft, "ttft"), (tpot, "tpot")] {
        if let (Some((part, at)), Some((whole, _))) = (part, e2e)
            && part > whole
        {
            let says = format!(
                "`{key}` is {part:?}, longer than all of the answer may take: `e2e` is {whole:?}"
            );
            flaws.add(at, says);
        }
    }
    let attainment = attainment.and_then(|node| flaws.permille(node, "attainment"));
    let priority = priority.and_then(|node| flaws.integer(node, "priority", &(-1000..=1000)));
    let weight = weight.and_then(|node| flaws.integer(node, "weight", &(1..=1000)));
    let queue_max = queue_max.and_then(|node| flaws.integer(node, "queue_max", &(1..=1 << 20)));
    let by_name = by_name.and_then(|node| flaws.boolean(node, "by_name"));
    let unmet = unmet.and_then(|node| unmet_of(node, flaws));
    let (unmet, downgrade_at) = unmet.unwrap_or((OnSloMiss::Reject, node.referenced));
    let name_node = name?;
    Some(PlacedClass {
        class: SloClass {
            name: name_of(name_node, flaws)?,
            ttft: ttft.map(|(time, _)| time),
            tpot: tpot.map(|(time, _)| time),
            e2e: e2e.map(|(time, _)| time),
            attainment_permille: attainment.unwrap_or(defaults.attainment_permille),
            priority: priority.map_or(defaults.priority, narrow_checked),
            weight: weight.map_or(defaults.weight, narrow_checked),
            queue_max: queue_max.map(narrow_checked),
            unmet,
            by_name: by_name.unwrap_or(defaults.by_name),
        },
        at: name_node.referenced,
        downgrade_at,
    })
}

/// A name that can stand in a header and a label.
pub(super) fn name_of(node: &YamlNode, flaws: &mut Diagnostics) -> Option<String> {
    let name = flaws.text(node, "name")?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.chars().all(fits) && name.len() <= NAME_CHARS_MAX {
        return Some(name);
    }
    let says = format!(
        "`name` is 1 to {NAME_CHARS_MAX} letters, digits and - _ . (it stands in headers and \
         metrics), not {name:?}"
    );
    flaws.add(node.referenced, says);
    None
}

/// `reject`, `{queue: 2s}` or `{downgrade: NAME}`; and the position of the name in it.
fn unmet_of(node: &YamlNode, flaws: &mut Diagnostics) -> Option<(OnSloMiss, Location)> {
    let wrong = |flaws: &mut Diagnostics| {
        let says = "`unmet` is reject, {queue: 2s} or {downgrade: CLASS}: one of them";
        flaws.add(node.referenced, says);
        None
    };
    if node.value == YamlValue::Text("reject".to_owned()) {
        return Some((OnSloMiss::Reject, node.referenced));
    }
    let YamlValue::Map(_) = &node.value else {
        return wrong(flaws);
    };
    let mut fields = flaws.fields(node, "`unmet`")?;
    let (queue, downgrade) = (fields.take("queue"), fields.take("downgrade"));
    fields.reject_unknown(flaws);
    match (queue, downgrade) {
        (Some(queue), None) => {
            let wait: Duration = flaws.time(queue, "queue")?;
            Some((OnSloMiss::Queue(wait), queue.referenced))
        }
        (None, Some(class)) => {
            let name = flaws.text(class, "downgrade")?;
            Some((OnSloMiss::Downgrade(name), class.referenced))
        }
        _ => wrong(flaws),
    }
}

/// Narrows a number whose bounds were checked.
pub(super) fn narrow_checked<T: TryFrom<i64>>(number: i64) -> T {
    let small = T::try_from(number).ok();
    small.expect("its bounds were checked")
}
