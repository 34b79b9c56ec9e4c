//! The fleet as the stream reports it: a snapshot, then changes.
//!
//! Owns: the current workers. Never: queries. Invariant: a worker is present from its row until the
//! event that removes it.

use anyhow::Context;
use serde_json::{Map, Value};
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// The last state of the fleet.
#[derive(Debug, Default)]
pub(super) struct FleetView {
    columns: Vec<String>,
    workers: BTreeMap<String, Map<String, Value>>,
    /// Workers that are not connected any more, each as a row without numbers.
    lost: Vec<Map<String, Value>>,
    /// Everything but the workers, from the last event.
    summary: Value,
}

impl FleetView {
    /// Applies an event.
    ///
    /// # Errors
    /// If it is not an event of `/ui/events`.
    pub(super) fn apply(&mut self, name: &str, mut board: Value) -> anyhow::Result<()> {
        if name == "snapshot" {
            self.workers.clear();
            let columns = board["columns"].take();
            self.columns = serde_json::from_value(columns).context("a snapshot has no columns")?;
        }
        for gone in list(&board["gone"]) {
            self.workers.remove(gone.as_str().unwrap_or_default());
        }
        for row in list(&board["workers"]) {
            let values = row.as_array().context("a worker's row is not a list")?;
            let pairs = self.columns.iter().cloned().zip(values.iter().cloned());
            let row: Map<String, Value> = pairs.collect();
            let name = row.get("name").and_then(Value::as_str);
            let name = name.context("a worker has no name")?.to_owned();
            self.workers.insert(name, row);
        }
        self.lost = list(&board["lost"]).iter().filter_map(lost_row).collect();
        self.summary = board;
        Ok(())
    }

    /// Whether the server has sent its state.
    pub(super) fn is_known(&self) -> bool {
        !self.summary.is_null()
    }

    /// Returns a part of the state by its path.
    pub(super) fn at(&self, path: &str) -> &Value {
        self.summary.pointer(path).unwrap_or(&Value::Null)
    }

    pub(super) fn number(&self, path: &str) -> f64 {
        self.at(path).as_f64().unwrap_or_default()
    }

    pub(super) fn list(&self, path: &str) -> &[Value] {
        list(self.at(path))
    }

    /// The connected workers, and those that were lost.
    pub(super) fn workers(&self) -> impl Iterator<Item = &Map<String, Value>> {
        self.workers.values().chain(&self.lost)
    }

    pub(super) fn connected_count(&self) -> usize {
        self.workers.len()
    }

    /// Returns the whole state, with each worker as an object.
    pub(super) fn json(&self) -> Value {
        let mut all = self.summary.clone();
        if let Value::Object(fields) = &mut all {
            fields.remove("columns");
            fields.remove("gone");
            let workers = self.workers.values().cloned().map(Value::Object);
            fields.insert("workers".to_owned(), workers.collect());
        }
        all
    }
}

fn lost_row(lost: &Value) -> Option<Map<String, Value>> {
    let mut row = lost.as_object()?.clone();
    row.insert("state".to_owned(), "lost".into());
    Some(row)
}

/// Compares names by their texts and numbers: `decode-9` is before `decode-10`.
pub(super) fn natural_order(a: &str, b: &str) -> Ordering {
    let mut rest = (a, b);
    loop {
        let (left, right) = (next_part(&mut rest.0), next_part(&mut rest.1));
        let order = match (left, right) {
            (None, None) => return a.cmp(b),
            (None, Some(_)) => Ordering::Less,
            (Some(_), None) => Ordering::Greater,
            (Some(left), Some(right)) => match (left.parse::<u64>(), right.parse::<u64>()) {
                (Ok(left), Ok(right)) => left.cmp(&right),
                _ => left.cmp(right),
            },
        };
        if order.is_ne() {
            return order;
        }
    }
}

/// Takes the leading digits, or everything before the next digit.
fn next_part<'a>(rest: &mut &'a str) -> Option<&'a str> {
    let first = rest.chars().next()?;
    let is_other = |c: char| c.is_ascii_digit() != first.is_ascii_digit();
    let (part, behind) = rest.split_at(rest.find(is_other).unwrap_or(rest.len()));
    *rest = behind;
    Some(part)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::natural_order;

    #[test]
    fn names_are_ordered_by_their_numbers() {
        let mut names = [
            "d-10",
            "d-9",
            "d",
            "c-11",
            "d-9b",
            "d-09",
            "e2x3",
            "e2x11",
            "99999999999999999999",
        ];
        names.sort_by(|a, b| natural_order(a, b));
        let expected = [
            "99999999999999999999",
            "c-11",
            "d",
            "d-09",
            "d-9",
            "d-9b",
            "d-10",
            "e2x3",
            "e2x11",
        ];
        assert_eq!(names, expected);
    }
}
