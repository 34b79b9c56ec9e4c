//! The board as the stream tells it: a snapshot, then what changed.
//!
//! Owns: which workers there are. Never: asks. Invariant: a worker is here from its row to the event that
//! says that it is gone.

use anyhow::Context;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fleet {
    columns: Vec<String>,
    workers: BTreeMap<String, Map<String, Value>>,
    /// All but the workers, as it was told last.
    rest: Value,
}

impl Fleet {
    /// Takes an event.
    ///
    /// # Errors
    /// If it is not one of `/ui/events`.
    pub(super) fn hear(&mut self, (name, mut board): (String, Value)) -> anyhow::Result<()> {
        if name == "snapshot" {
            self.workers.clear();
            let columns = board["columns"].take();
            self.columns =
                serde_json::from_value(columns).context("a snapshot names no columns")?;
        }
        for gone in list(&board["gone"]) {
            self.workers.remove(gone.as_str().unwrap_or_default());
        }
        for row in list(&board["workers"]) {
            let values = row.as_array().context("a worker's row is no list")?;
            let pairs = self.columns.iter().cloned().zip(values.iter().cloned());
            let row: Map<String, Value> = pairs.collect();
            let name = row.get("name").and_then(Value::as_str);
            let name = name.context("a worker has no name")?.to_owned();
            self.workers.insert(name, row);
        }
        self.rest = board;
        Ok(())
    }

    /// A part of the board, by its path.
    pub(super) fn at(&self, path: &str) -> &Value {
        self.rest.pointer(path).unwrap_or(&Value::Null)
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

    /// All of it, each worker as an object.
    pub(super) fn json(&self) -> Value {
        let mut all = self.rest.clone();
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
