//! Series of the process's use of its machine, and of its release.
//!
//! Owns: these series, under the names of Prometheus's own libraries. Never fails: a value that the
//! system does not give stays unchanged. Invariant: read only when `/metrics` is.
//!
//! Source: proc_pid_stat(5), proc_pid_status(5).

use super::buckets::FloatGauge;
use crate::series_table::series_table;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::fs;
use std::sync::atomic::AtomicU64;

/// Clock ticks per second in `/proc`, on every Linux that Rust runs on.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
}

series_table! {
    pub(crate) struct ProcessSeries;

    build: Family<BuildLabels, Gauge> = build_info(), "cleave_build_info",
        "1, with the version of the running release";
    cpu: Counter<f64, AtomicU64>, "process_cpu_seconds",
        "Processor time used by this process, in user and system mode";
    resident: Gauge, "process_resident_memory_bytes",
        "Resident memory of this process";
    files: Gauge, "process_open_fds",
        "Open file descriptors of this process";
    started: FloatGauge, "process_start_time_seconds",
        "Start time of this process, in seconds since 1970";
}

impl ProcessSeries {
    pub(super) fn refresh(&self) {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The second field, the program's name, may have spaces; fields are counted behind it.
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let fields: Vec<f64> = fields
            .split(' ')
            .map(|one| one.parse().unwrap_or(0.0))
            .collect();
        let field = |number: usize| fields.get(number - 2).copied().unwrap_or(0.0);
        let cpu = (field(14) + field(15)) / TICKS_PER_SECOND;
        self.cpu.inc_by((cpu - self.cpu.get()).max(0.0));
        if let Some(bytes) = resident() {
            self.resident.set(bytes);
        }
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // One of them is the folder that is being read.
            let count = files.count().saturating_sub(1);
            self.files.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        if let Some(booted) = booted() {
            self.started.set(booted + field(22) / TICKS_PER_SECOND);
        }
    }
}

fn build_info() -> Family<BuildLabels, Gauge> {
    let build: Family<BuildLabels, Gauge> = Family::default();
    let version = env!("CARGO_PKG_VERSION");
    build.get_or_create(&BuildLabels { version }).set(1);
    build
}

/// The resident memory in bytes.
fn resident() -> Option<i64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: i64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Seconds since 1970 at which the machine started.
fn booted() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let line = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_api::MetricRegistry;

    #[test]
    fn process_memory_files_and_cpu_are_reported() {
        let mut registry = MetricRegistry::default();
        let series = ProcessSeries::register(&mut registry);
        series.refresh();
        assert!(series.resident.get() > 1 << 20);
        assert!(series.files.get() > 2);
        let now = std::time::SystemTime::now();
        let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
        let age = now.as_secs_f64() - series.started.get();
        assert!((-2.0..86_400.0).contains(&age), "{age}");
        let before = series.cpu.get();
        series.refresh();
        assert!(series.cpu.get() >= before);
    }
}
