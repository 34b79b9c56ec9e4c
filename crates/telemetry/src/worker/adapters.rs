//! The LoRA adapters of a worker as metrics show them.
//!
//! Owns: the series of adapters. Never: counts a hand-off.
//! Invariant: at any time one line names the adapters in use, so that their labels are bounded.

use super::{WorkerMeters, set};
use cleave_sched::AdapterLoads;
use prometheus_client::encoding::EncodeLabelSet;
use std::time::{SystemTime, UNIX_EPOCH};

/// The states of adapters; see the help of `cleave_adapters`.
pub(super) const ADAPTERS: [&str; 4] = ["served", "loaded", "in_use", "in_host"];
/// The ends of loads; see the help of `cleave_adapter_loads_total`.
pub(super) const LOADS: [&str; 5] = ["loaded", "failed", "evicted", "from_host", "dropped"];

/// Labels by the names that pickers know: names are joined by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct LoraLabels {
    worker: String,
    max_lora: String,
    running_lora_adapters: String,
    waiting_lora_adapters: String,
}

/// The counts of loads, in the order of [`LOADS`].
fn counts(loads: AdapterLoads) -> [u64; LOADS.len()] {
    let AdapterLoads {
        loaded,
        failed,
        evicted,
        from_host,
        dropped,
    } = loads;
    [loaded, failed, evicted, from_host, dropped]
}

/// The adapters of a worker now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterUse {
    /// Adapters that may be loaded at once.
    pub max_loras: usize,
    /// Adapters that are served under a name.
    pub served: usize,
    /// Adapters that are loaded.
    pub loaded: usize,
    /// Adapters that are not loaded and have a copy in host memory.
    pub in_host: usize,
    /// Names of the adapters that requests run with, ascending.
    pub running: Vec<String>,
    /// Names of the adapters that requests wait for, ascending.
    pub waiting: Vec<String>,
    /// Loads since the start.
    pub loads: AdapterLoads,
}

impl WorkerMeters {
    /// Shows the adapters of the worker; a worker that serves none has no series of their names.
    pub fn adapters_changed(&mut self, now: &AdapterUse) {
        let AdapterUse {
            max_loras,
            served,
            loaded,
            in_host,
            running,
            waiting,
            loads,
        } = now;
        let in_use = running.len() + waiting.len();
        for (kind, count) in ADAPTERS
            .into_iter()
            .zip([*served, *loaded, in_use, *in_host])
        {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            set(&self.series.adapters, &self.kind_labels(kind), count);
        }
        let changes = counts(*loads).into_iter().zip(counts(self.adapters.loads));
        for (kind, (now, before)) in LOADS.into_iter().zip(changes) {
            let new = now.saturating_sub(before);
            let counter = self
                .series
                .adapter_loads
                .get_or_create(&self.kind_labels(kind));
            counter.inc_by(new);
        }
        self.adapters.clone_from(now);
        if *served == 0 && self.loras.is_none() {
            return;
        }
        let labels = LoraLabels {
            worker: self.worker.worker.clone(),
            max_lora: max_loras.to_string(),
            running_lora_adapters: running.join(","),
            waiting_lora_adapters: waiting.join(","),
        };
        if self.loras.as_ref() == Some(&labels) {
            return;
        }
        if let Some(before) = self.loras.replace(labels.clone()) {
            self.series.vllm_loras.remove(&before);
        }
        // Pickers take the line with the latest time.
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = since.unwrap_or_default().as_secs_f64();
        self.series.vllm_loras.get_or_create(&labels).set(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Telemetry;
    use cleave_domain::Role;

    #[test]
    fn one_line_names_the_adapters_in_use() {
        let telemetry = Telemetry::default();
        let mut meters = WorkerMeters::new(&telemetry.workers, "w", Role::Both, "m");
        meters.adapters_changed(&AdapterUse::default());
        assert!(
            !telemetry.text().contains("lora_requests_info{"),
            "it serves none"
        );
        let first = AdapterUse {
            max_loras: 4,
            served: 3,
            loaded: 1,
            in_host: 1,
            running: vec!["a".into()],
            waiting: vec!["b".into()],
            loads: AdapterLoads {
                loaded: 1,
                from_host: 1,
                ..AdapterLoads::default()
            },
        };
        meters.adapters_changed(&first);
        meters.adapters_changed(&AdapterUse {
            loaded: 2,
            running: vec!["a".into(), "b".into()],
            waiting: Vec::new(),
            loads: AdapterLoads {
                loaded: 2,
                from_host: 1,
                ..AdapterLoads::default()
            },
            ..first
        });
        let text = telemetry.text();
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("vllm:lora_requests_info{"))
            .collect();
        let labels =
            "worker=\"w\",max_lora=\"4\",running_lora_adapters=\"a,b\",waiting_lora_adapters=\"\"";
        assert!(lines.len() == 1 && lines[0].contains(labels), "{lines:?}");
        for line in [
            "cleave_adapters{worker=\"w\",role=\"both\",kind=\"loaded\"} 2",
            "cleave_adapters{worker=\"w\",role=\"both\",kind=\"in_use\"} 2",
            "cleave_adapter_loads_total{worker=\"w\",role=\"both\",kind=\"loaded\"} 2",
            "cleave_adapters{worker=\"w\",role=\"both\",kind=\"in_host\"} 1",
            "cleave_adapter_loads_total{worker=\"w\",role=\"both\",kind=\"from_host\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
