//! The data of `/ui` and `cleave top`: the fleet at one moment, and its last minute.
//!
//! Owns: these fields and their JSON. Never: a prompt, a text, a key or an address. Invariant: the
//! row of a worker is short and of plain numbers, so that a thousand rows can be sent every second.

use crate::admin::WorkerState;
use cleave_domain::{RequestStage, Role};
use serde::ser::{Serialize, SerializeMap, SerializeTuple, Serializer};
use std::time::Duration;

/// Span of the counts and quantiles.
pub const WINDOW: Duration = Duration::from_secs(60);

/// Number of seconds in [`FleetSnapshot::history`].
pub const HISTORY_SECONDS: usize = WINDOW.as_secs() as usize;

/// A snapshot of the fleet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FleetSnapshot {
    /// Time since the router started.
    pub uptime: Duration,
    /// All connected workers, by name.
    pub workers: Vec<WorkerRow>,
    /// Workers whose connection ended without a drain, and that have not come back; by name.
    pub lost: Vec<LostWorker>,
    /// Flights that have not ended, by stage.
    pub flights: FlightStageCounts,
    /// Durations of the stages of the flights that ended well in the last minute.
    pub stages: Vec<(RequestStage, DurationQuantiles)>,
    /// Classes of the policy, and other classes of judged requests.
    pub classes: Vec<ClassRow>,
    /// Number of devices that the workers report; each unknown device counts separately.
    pub devices: u32,
    /// KV transfers between workers.
    pub handoffs: HandoffTotals,
    /// The last minute, second by second, in order of time.
    pub history: Vec<HistorySecond>,
    /// Refusals, failures and changes of workers, the latest first.
    pub events: Vec<DashboardEvent>,
    /// Desired workers; `None` where the policy has no scaling.
    pub scaling: Option<ScalingSummary>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct WorkerRow {
    /// Name, unique in the fleet.
    pub name: String,
    /// Served name of its model.
    pub model: String,
    /// Legs that it serves.
    pub role: Role,
    /// Whether it accepts work.
    pub state: WorkerState,
    /// Hardware that it uses entirely, if it reports it.
    pub device: Option<String>,
    /// Number of other workers on the same device.
    pub sharing: u32,
    /// Sequences in its batch.
    pub running: u32,
    /// Sequences that wait for their first step or for blocks.
    pub waiting: u32,
    /// Prompt tokens accepted and not yet computed.
    pub queue_tokens: u64,
    /// Predicted time of its queued prompts.
    pub backlog: Duration,
    /// Blocks held or promised.
    pub blocks_held: u32,
    pub blocks_count: u32,
    /// Duration of its last step: the interval between two reports of tokens of a generating
    /// worker, or its last prompt; `None` before the first.
    pub last_step: Option<Duration>,
    /// Time since its last report; `None` before the first.
    pub since_report: Option<Duration>,
    /// Output tokens per second since the last snapshot; `None` in the first one.
    pub tokens_per_second: Option<f64>,
    /// Prompts and streams placed on it since it joined.
    pub placed: u64,
}

/// A worker that was connected, and was not asked to leave.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LostWorker {
    pub name: String,
    /// Served name of its model.
    pub model: String,
    #[serde(serialize_with = "serialize_role")]
    pub role: Role,
    /// Hardware that it used entirely, if it reported it.
    pub device: Option<String>,
    /// Time at which its connection ended, in milliseconds since 1970.
    pub at_ms: u64,
}

fn serialize_role<S: Serializer>(role: &Role, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(role_name(*role))
}

/// Names of the columns of a row, in order.
pub(crate) const COLUMNS: [&str; 16] = [
    "name",
    "role",
    "state",
    "device",
    "sharing",
    "running",
    "waiting",
    "queue_tokens",
    "backlog_ms",
    "blocks_held",
    "blocks_count",
    "step_ms",
    "heard_ms",
    "tokens_per_second",
    "placed",
    "model",
];

impl Serialize for WorkerRow {
    /// Serializes a tuple in the order of [`COLUMNS`].
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            name,
            model,
            role,
            state,
            device,
            sharing,
            running,
            waiting,
            queue_tokens,
            backlog,
            blocks_held,
            blocks_count,
            last_step: step,
            since_report,
            tokens_per_second,
            placed,
        } = self;
        let mut row = serializer.serialize_tuple(COLUMNS.len())?;
        row.serialize_element(name)?;
        row.serialize_element(role_name(*role))?;
        row.serialize_element(state.name())?;
        row.serialize_element(device)?;
        row.serialize_element(sharing)?;
        row.serialize_element(running)?;
        row.serialize_element(waiting)?;
        row.serialize_element(queue_tokens)?;
        row.serialize_element(&millis(*backlog))?;
        row.serialize_element(blocks_held)?;
        row.serialize_element(blocks_count)?;
        row.serialize_element(&step.map(millis))?;
        row.serialize_element(&since_report.map(|since| since.as_millis() as u64))?;
        row.serialize_element(&tokens_per_second.map(f64::round))?;
        row.serialize_element(placed)?;
        row.serialize_element(model)?;
        row.end()
    }
}

/// Flights by stage; see [`FleetSnapshot::flights`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct FlightStageCounts {
    /// Flights in the queue.
    pub queued: u32,
    /// Placed flights that wait for the decode worker's reservation.
    pub reserved: u32,
    /// Flights whose prompt waits for its turn or runs.
    pub prefill: u32,
    /// Flights that have the first token and wait for the transfer of their blocks.
    pub transfer: u32,
    pub decode: u32,
    /// Generating flights that migrate to another worker.
    pub moving: u32,
}

impl FlightStageCounts {
    pub fn total(&self) -> u32 {
        self.queued + self.reserved + self.prefill + self.transfer + self.decode
    }
}

/// Quantiles of a duration over the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DurationQuantiles {
    /// Number of samples; without any, the quantiles mean nothing.
    pub count: u64,
    pub p50: Duration,
    pub p90: Duration,
    pub p99: Duration,
}

impl Serialize for DurationQuantiles {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            count,
            p50,
            p90,
            p99,
        } = *self;
        if count == 0 {
            return serializer.serialize_none();
        }
        let mut map = serializer.serialize_map(Some(4))?;
        map.serialize_entry("count", &count)?;
        map.serialize_entry("p50_ms", &millis(p50))?;
        map.serialize_entry("p90_ms", &millis(p90))?;
        map.serialize_entry("p99_ms", &millis(p99))?;
        map.end()
    }
}

/// Counts of requests by verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct VerdictCounts {
    /// Requests that met all targets.
    pub good: u64,
    /// Requests that ended well and missed a target.
    pub late: u64,
    pub refused: u64,
    pub failed: u64,
    /// Requests whose clients left before a target was due.
    pub cancelled: u64,
}

/// An SLO class and its last minute.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassRow {
    pub name: String,
    /// Target of the time to first token.
    pub ttft_target: Option<Duration>,
    /// Target of the mean time per output token.
    pub tpot_target: Option<Duration>,
    /// Required share of admitted requests that meet their targets, in thousandths.
    pub goal_permille: Option<u32>,
    /// Verdicts of the last minute.
    pub minute: VerdictCounts,
    /// Verdicts since the router started.
    pub total: VerdictCounts,
    /// Requests per second that met all targets, over the last minute.
    pub goodput: f64,
    /// Time to first token of the requests that ended well.
    pub ttft: DurationQuantiles,
    /// Time per output token of the requests that ended well.
    pub tpot: DurationQuantiles,
}

impl Serialize for ClassRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            name,
            ttft_target,
            tpot_target,
            goal_permille,
            minute,
            total,
            goodput,
            ttft,
            tpot,
        } = self;
        let mut map = serializer.serialize_map(Some(9))?;
        map.serialize_entry("name", name)?;
        map.serialize_entry("ttft_target_ms", &ttft_target.map(millis))?;
        map.serialize_entry("tpot_target_ms", &tpot_target.map(millis))?;
        map.serialize_entry("goal", &goal_permille.map(|goal| f64::from(goal) / 1e3))?;
        map.serialize_entry("minute", minute)?;
        map.serialize_entry("total", total)?;
        map.serialize_entry("goodput", goodput)?;
        map.serialize_entry("ttft", ttft)?;
        map.serialize_entry("tpot", tpot)?;
        map.end()
    }
}

/// Counts of hand-offs; see [`FleetSnapshot::handoffs`].
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct HandoffTotals {
    /// KV bytes landed since the router started, in full blocks.
    pub bytes_total: u64,
    /// Hand-offs landed since the router started.
    pub landed_total: u64,
    /// Attempts whose two legs ran on one worker and sent nothing.
    pub joined_total: u64,
    /// Links between workers by transport, as measured when they were made.
    pub links: Vec<LinkRow>,
}

/// Links of one transport.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LinkRow {
    pub transport: String,
    pub count: u64,
    /// Bandwidth of the slowest link.
    pub slowest_bytes_per_second: u64,
    /// Mean bandwidth of the links.
    pub mean_bytes_per_second: u64,
}

/// One second of [`FleetSnapshot::history`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistorySecond {
    pub begun: u32,
    /// Requests that met all targets.
    pub good: u32,
    /// Requests late, refused or failed.
    pub missed: u32,
    /// Output tokens of the requests that ended.
    pub tokens: u64,
    /// KV bytes that landed.
    pub handoff_bytes: u64,
}

impl Serialize for HistorySecond {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            begun,
            good,
            missed,
            tokens,
            handoff_bytes,
        } = *self;
        (begun, good, missed, tokens, handoff_bytes).serialize(serializer)
    }
}

/// A failure, or a change of a worker.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DashboardEvent {
    /// Time of the last occurrence, in milliseconds since 1970.
    pub at_ms: u64,
    /// Kind of the event: `refused`, `failed`, `late`, `retried`, `passed_over`, `stayed`,
    /// `stuck`, `joined`, `role`, `lost`, `left`.
    pub kind: &'static str,
    pub reason: String,
    /// Class or worker that the event concerns.
    pub about: String,
    /// Number of consecutive occurrences.
    pub count: u32,
}

/// Desired number of workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ScalingSummary {
    /// Whether the number is only advice that nothing acts on.
    pub advisory: bool,
    pub pools: Vec<PoolTarget>,
    /// Recent decisions, the latest first.
    pub recent: Vec<ScalingChange>,
}

/// Workers of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PoolTarget {
    /// Served name of the model.
    pub model: String,
    /// `prefill`, `decode` or `both`.
    pub pool: String,
    pub workers: u32,
    pub wanted: u32,
    /// Reason of the decision.
    pub reason: String,
}

/// One change of a pool's desired size.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ScalingChange {
    /// Time of the change, in milliseconds since 1970.
    pub at_ms: u64,
    /// Served name of the model.
    pub model: String,
    pub pool: String,
    pub from: u32,
    pub to: u32,
    /// Reason of the change.
    pub reason: String,
}

/// A snapshot as it is sent: whole, or without the workers that have not changed.
pub(crate) struct SnapshotUpdate<'a> {
    pub(crate) board: &'a FleetSnapshot,
    /// New and changed rows; all rows in a whole snapshot.
    pub(crate) workers: Vec<&'a WorkerRow>,
    /// Names of the workers that left.
    pub(crate) removed: Vec<&'a str>,
    pub(crate) whole: bool,
}

impl<'a> SnapshotUpdate<'a> {
    pub(crate) fn whole(board: &'a FleetSnapshot) -> Self {
        Self {
            board,
            workers: board.workers.iter().collect(),
            removed: Vec::new(),
            whole: true,
        }
    }

    /// Builds the difference to the previous snapshot; both are ordered by name.
    pub(crate) fn changes(before: &'a FleetSnapshot, board: &'a FleetSnapshot) -> Self {
        let find = |board: &'a FleetSnapshot, name: &str| {
            let at = board.workers.binary_search_by(|row| (*row.name).cmp(name));
            at.ok().map(|at| &board.workers[at])
        };
        let changed = |row: &&WorkerRow| find(before, &row.name) != Some(row);
        let gone = |row: &&WorkerRow| find(board, &row.name).is_none();
        let left = before.workers.iter().filter(gone);
        Self {
            board,
            workers: board.workers.iter().filter(changed).collect(),
            removed: left.map(|row| row.name.as_str()).collect(),
            whole: false,
        }
    }
}

impl Serialize for SnapshotUpdate<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let FleetSnapshot {
            uptime,
            workers: _,
            lost,
            flights,
            stages,
            classes,
            devices,
            handoffs,
            history,
            events,
            scaling,
        } = self.board;
        let mut map = serializer.serialize_map(None)?;
        if self.whole {
            map.serialize_entry("columns", &COLUMNS)?;
        }
        map.serialize_entry("uptime_seconds", &uptime.as_secs())?;
        map.serialize_entry("workers", &self.workers)?;
        map.serialize_entry("gone", &self.removed)?;
        map.serialize_entry("workers_count", &self.board.workers.len())?;
        map.serialize_entry("lost", lost)?;
        map.serialize_entry("flights", flights)?;
        let stages = stages.iter().map(|(stage, took)| (stage.name(), took));
        map.serialize_entry("stages", &stages.collect::<Vec<_>>())?;
        map.serialize_entry("classes", classes)?;
        map.serialize_entry("devices", devices)?;
        map.serialize_entry("handoffs", handoffs)?;
        map.serialize_entry("history", history)?;
        map.serialize_entry("events", events)?;
        if let Some(scaling) = scaling {
            map.serialize_entry("scaling", scaling)?;
        }
        map.end()
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Both => "both",
    }
}

/// Rounds to hundredths of a millisecond, which keeps rows short.
fn millis(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e5).round() / 1e2
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn row(name: &str, running: u32) -> WorkerRow {
        WorkerRow {
            name: name.to_owned(),
            model: "m".to_owned(),
            role: Role::Decode,
            state: WorkerState::Ready,
            device: None,
            sharing: 0,
            running,
            waiting: 0,
            queue_tokens: 0,
            backlog: Duration::from_micros(1_234),
            blocks_held: 3,
            blocks_count: 9,
            last_step: None,
            since_report: Some(Duration::from_millis(7)),
            tokens_per_second: Some(12.6),
            placed: 5,
        }
    }

    fn board(workers: Vec<WorkerRow>) -> FleetSnapshot {
        FleetSnapshot {
            workers,
            ..FleetSnapshot::default()
        }
    }

    fn sent(sent: &SnapshotUpdate) -> Value {
        serde_json::to_value(sent).expect("it is plain data")
    }

    #[test]
    fn lost_workers_are_in_every_event() {
        let lost = LostWorker {
            name: "d".to_owned(),
            model: "m".to_owned(),
            role: Role::Decode,
            device: None,
            at_ms: 5,
        };
        let board = FleetSnapshot {
            lost: vec![lost],
            ..FleetSnapshot::default()
        };
        let expected =
            json!([{"name": "d", "model": "m", "role": "decode", "device": null, "at_ms": 5}]);
        assert_eq!(sent(&SnapshotUpdate::whole(&board))["lost"], expected);
        assert_eq!(
            sent(&SnapshotUpdate::changes(&board, &board))["lost"],
            expected
        );
    }

    #[test]
    fn a_delta_has_only_changed_workers() {
        let before = board(vec![row("a", 1), row("b", 1), row("d", 1)]);
        let after = board(vec![row("a", 1), row("b", 2), row("c", 1)]);
        let whole = sent(&SnapshotUpdate::whole(&after));
        assert_eq!(whole["workers"].as_array().map(Vec::len), Some(3));
        assert_eq!(
            whole["workers"][0],
            json!([
                "a", "decode", "ready", null, 0, 1, 0, 0, 1.23, 3, 9, null, 7, 13.0, 5, "m"
            ])
        );
        assert_eq!(whole["columns"].as_array().map(Vec::len), Some(16));
        let delta = sent(&SnapshotUpdate::changes(&before, &after));
        let names = |rows: &Value| -> Vec<Value> {
            let rows = rows.as_array().expect("rows");
            rows.iter().map(|row| row[0].clone()).collect()
        };
        assert_eq!(names(&delta["workers"]), ["b", "c"]);
        assert_eq!(delta["gone"], json!(["d"]));
        assert_eq!(delta["workers_count"], 3);
        assert_eq!(delta.get("columns"), None);
        assert_eq!(delta.get("scaling"), None, "nobody decides");
    }
}
