//! The classes of a policy's file.
//!
//! Owns: their keys, and the ranges of their numbers. Never checks how a class is reached.

use cleave_domain::{OnSloMiss, SloClass};
use cleave_yaml::Location;
use cleave_yaml::{Diagnostics, YamlNode, YamlValue};
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

pub(super) fn classes(node: &YamlNode, diagnostics: &mut Diagnostics) -> Vec<PlacedClass> {
    let entries = diagnostics.list(node, "classes");
    if entries.is_empty() && matches!(node.value, YamlValue::List(_)) {
        diagnostics.add(node.referenced, "a policy has at least one class");
    }
    if entries.len() > CLASSES_MAX {
        let message = format!("there are more than {CLASSES_MAX} classes");
        diagnostics.add(entries[CLASSES_MAX].referenced, message);
    }
    let mut lines_by_name = BTreeMap::new();
    let mut placed: Vec<PlacedClass> = Vec::new();
    for entry in entries {
        let Some(one) = class(entry, diagnostics) else {
            continue;
        };
        let before = lines_by_name.insert(one.class.name.clone(), one.at.line());
        if let Some(line) = before {
            let message = format!(
                "there is a class `{}` already, in line {line}",
                one.class.name
            );
            diagnostics.add(one.at, message);
            continue;
        }
        placed.push(one);
    }
    placed
}

/// A class whose numbers are wrong counts as one with the defaults, so that rules find it.
fn class(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<PlacedClass> {
    let mut fields = diagnostics.fields(node, "a class")?;
    let name = fields.take_required("name", diagnostics);
    let [ttft, tpot, e2e] = ["ttft", "tpot", "e2e"].map(|key| fields.take(key));
    let attainment = fields.take("attainment");
    let priority = fields.take("priority");
    let weight = fields.take("weight");
    let queue_max = fields.take("queue_max");
    let unmet = fields.take("unmet");
    let by_name = fields.take("by_name");
    fields.reject_unknown(diagnostics);

    let defaults = SloClass::default();
    let times = [(ttft, "ttft"), (tpot, "tpot"), (e2e, "e2e")];
    let [ttft, tpot, e2e] =
        times.map(|(node, key)| Some((diagnostics.time(node?, key)?, node?.referenced)));
    for (part, key) in [(ttft, "ttft"), (tpot, "tpot")] {
        if let (Some((part, at)), Some((whole, _))) = (part, e2e)
            && part > whole
        {
            let message = format!(
                "`{key}` is {part:?}, longer than all of the answer may take: `e2e` is {whole:?}"
            );
            diagnostics.add(at, message);
        }
    }
    let attainment = attainment.and_then(|node| diagnostics.permille(node, "attainment"));
    let priority = priority.and_then(|node| diagnostics.integer(node, "priority", &(-1000..=1000)));
    let weight = weight.and_then(|node| diagnostics.integer(node, "weight", &(1..=1000)));
    let queue_max =
        queue_max.and_then(|node| diagnostics.integer(node, "queue_max", &(1..=1 << 20)));
    let by_name = by_name.and_then(|node| diagnostics.boolean(node, "by_name"));
    let unmet = unmet.and_then(|node| unmet_of(node, diagnostics));
    let (unmet, downgrade_at) = unmet.unwrap_or((OnSloMiss::Reject, node.referenced));
    let name_node = name?;
    Some(PlacedClass {
        class: SloClass {
            name: name_of(name_node, diagnostics)?,
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
pub(super) fn name_of(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<String> {
    let name = diagnostics.text(node, "name")?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.chars().all(fits) && name.len() <= NAME_CHARS_MAX {
        return Some(name);
    }
    let message = format!(
        "`name` is 1 to {NAME_CHARS_MAX} letters, digits and - _ . (it stands in headers and \
         metrics), not {name:?}"
    );
    diagnostics.add(node.referenced, message);
    None
}

/// `reject`, `{queue: 2s}` or `{downgrade: NAME}`; and the position of the name in it.
fn unmet_of(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<(OnSloMiss, Location)> {
    let wrong = |diagnostics: &mut Diagnostics| {
        let message = "`unmet` is reject, {queue: 2s} or {downgrade: CLASS}: one of them";
        diagnostics.add(node.referenced, message);
        None
    };
    if node.value == YamlValue::Text("reject".to_owned()) {
        return Some((OnSloMiss::Reject, node.referenced));
    }
    let YamlValue::Map(_) = &node.value else {
        return wrong(diagnostics);
    };
    let mut fields = diagnostics.fields(node, "`unmet`")?;
    let (queue, downgrade) = (fields.take("queue"), fields.take("downgrade"));
    fields.reject_unknown(diagnostics);
    match (queue, downgrade) {
        (Some(queue), None) => {
            let wait: Duration = diagnostics.time(queue, "queue")?;
            Some((OnSloMiss::Queue(wait), queue.referenced))
        }
        (None, Some(class)) => {
            let name = diagnostics.text(class, "downgrade")?;
            Some((OnSloMiss::Downgrade(name), class.referenced))
        }
        _ => wrong(diagnostics),
    }
}

/// Narrows a number whose bounds were checked.
pub(super) fn narrow_checked<T: TryFrom<i64>>(number: i64) -> T {
    let small = T::try_from(number).ok();
    small.expect("its bounds were checked")
}
