//! What the process takes of its machine, and which release it is.
//!
//! Owns: these series, under the names that Prometheus's own libraries give them. Never: fails: what the
//! system does not tell stays as it was. Invariant: read when asked for, and at no other time.
//!
//! Source: proc_pid_stat(5), proc_pid_status(5).

use super::FloatGauge;
use cleave_api::Book;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::fs;
use std::sync::atomic::AtomicU64;

/// Of every Linux that Rust runs on.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct ProcessSeries {
    cpu: Counter<f64, AtomicU64>,
    resident: Gauge,
    files: Gauge,
    started: FloatGauge,
}

impl ProcessSeries {
    pub(super) fn register(book: &mut Book) -> Self {
        let series = Self {
            cpu: Counter::default(),
            resident: Gauge::default(),
            files: Gauge::default(),
            started: FloatGauge::default(),
        };
        let build: Family<Build, Gauge> = Family::default();
        let version = env!("CARGO_PKG_VERSION");
        build.get_or_create(&Build { version }).set(1);
        book.register("cleave_build_info", "1 for the release that runs", build);
        book.register(
            "process_cpu_seconds",
            "Processor time of this process",
            series.cpu.clone(),
        );
        book.register(
            "process_resident_memory_bytes",
            "Memory of this process that is resident",
            series.resident.clone(),
        );
        book.register(
            "process_open_fds",
            "File descriptors that this process has open",
            series.files.clone(),
        );
        book.register(
            "process_start_time_seconds",
            "When this process started, in seconds since 1970",
            series.started.clone(),
        );
        series
    }

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

/// Bytes in memory.
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

    #[test]
    fn what_the_process_takes_is_told() {
        let mut book = Book::default();
        let series = ProcessSeries::register(&mut book);
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
