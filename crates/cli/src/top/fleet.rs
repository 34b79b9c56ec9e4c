//! The fleet as the stream reports it: a snapshot, then changes.
//!
//! Owns: the current workers. Never: queries. Invariant: a worker is present from its row until the
//! event that removes it.

use anyhow::Context;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The last state of the fleet.
#[derive(Debug, Default)]
pub(super) struct FleetView {
    columns: Vec<String>,
    workers: BTreeMap<String, Map<String, Value>>,
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
        self.summary = board;
        Ok(())
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

    pub(super) fn workers(&self) -> impl Iterator<Item = &Map<String, Value>> {
        self.workers.values()
    }

    pub(super) fn workers_count(&self) -> usize {
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

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
