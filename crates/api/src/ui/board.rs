//! What `/ui` and `cleave top` show: the fleet at one moment, and its last minute.
//!
//! Owns: these words and how they are written. Never: a prompt, a text, a key or an address. Invariant:
//! a worker's row is short and of plain numbers, so that a thousand of them are sent every second.

use crate::admin::WorkerState;
use cleave_domain::{Role, Stage};
use serde::ser::{Serialize, SerializeMap, SerializeTuple, Serializer};
use std::time::Duration;

/// How long what is counted stays on the board.
pub const WINDOW: Duration = Duration::from_secs(60);

/// Seconds of [`Board::history`].
pub const HISTORY_SECONDS: usize = WINDOW.as_secs() as usize;

/// The whole of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Board {
    /// Since the router started.
    pub uptime: Duration,
    /// All connected workers, by name.
    pub workers: Vec<WorkerRow>,
    /// Flights that have not ended, by how far they have come.
    pub flights: FlightsNow,
    /// Where the time of those that were done in the last minute went.
    pub stages: Vec<(Stage, Quantiles)>,
    /// The classes of the policy, and what else was judged.
    pub classes: Vec<ClassRow>,
    /// Devices that the workers say they have; each unknown one counts for itself.
    pub devices: u32,
    /// KV on its way.
    pub handoffs: Handoffs,
    /// The last minute, second by second, the latest last.
    pub history: Vec<Second>,
    /// Refusals, failures and what happened to workers, the latest first.
    pub events: Vec<Happening>,
    /// How many workers are wanted; none where nobody decides that.
    pub scaling: Option<Scaling>,
}

/// A connected worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerRow {
    /// Unique in the fleet.
    pub name: String,
    /// Which legs it serves.
    pub role: Role,
    /// What may be expected of it.
    pub state: WorkerState,
    /// The hardware that it takes all of, if it says.
    pub device: Option<String>,
    /// Other workers of the same device.
    pub sharing: u32,
    /// Sequences in its batch.
    pub running: u32,
    /// Sequences that wait for their first step or for blocks.
    pub waiting: u32,
    /// Prompt tokens accepted and not yet computed.
    pub queue_tokens: u64,
    /// How long its prompts will take.
    pub backlog: Duration,
    /// Blocks held or promised.
    pub blocks_held: u32,
    /// Blocks in its pool.
    pub blocks_count: u32,
    /// How long its last step took: between two words of tokens of a worker that generates, or its last
    /// prompt; none before there was one.
    pub step: Option<Duration>,
    /// Since its last word; none before it said one.
    pub heard: Option<Duration>,
    /// Output tokens per second since the board was made last; none the first time.
    pub tokens_per_second: Option<f64>,
    /// Prompts and streams placed there since it joined.
    pub placed: u64,
}

/// The names of a row's numbers, in their order.
pub(crate) const COLUMNS: [&str; 15] = [
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
];

impl Serialize for WorkerRow {
    /// As [`COLUMNS`] has it.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            name,
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
            step,
            heard,
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
        row.serialize_element(&heard.map(|since| since.as_millis() as u64))?;
        row.serialize_element(&tokens_per_second.map(f64::round))?;
        row.serialize_element(placed)?;
        row.end()
    }
}

/// See [`Board::flights`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct FlightsNow {
    /// In line for a place.
    pub queued: u32,
    /// Placed; the decode worker was asked for blocks.
    pub reserved: u32,
    /// The prompt waits for its turn, or runs.
    pub prefill: u32,
    /// The first token is there; blocks are on their way.
    pub transfer: u32,
    /// It generates.
    pub decode: u32,
    /// Of those that generate, so many are on their way to another worker.
    pub moving: u32,
}

impl FlightsNow {
    /// All of them.
    pub fn total(&self) -> u32 {
        self.queued + self.reserved + self.prefill + self.transfer + self.decode
    }
}

/// How long something took, of all of the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quantiles {
    /// How many there were; without any, the rest means nothing.
    pub count: u64,
    /// Half took no longer.
    pub p50: Duration,
    /// Nine of ten.
    pub p90: Duration,
    /// Ninety-nine of a hundred.
    pub p99: Duration,
}

impl Serialize for Quantiles {
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

/// What came of requests, by verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Verdicts {
    /// All targets met.
    pub good: u64,
    /// Done, and a target missed.
    pub late: u64,
    /// Not taken on.
    pub refused: u64,
    /// Broken off.
    pub failed: u64,
    /// The client left before anything was due.
    pub cancelled: u64,
}

/// A class and its last minute.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassRow {
    /// Its name.
    pub name: String,
    /// Its target for the time to first token.
    pub ttft_target: Option<Duration>,
    /// Its target for the mean gap between tokens.
    pub tpot_target: Option<Duration>,
    /// Of the requests taken on, so many are to meet their targets, in thousandths.
    pub goal_permille: Option<u32>,
    /// What came of the last minute's requests.
    pub minute: Verdicts,
    /// What came of all since the router started.
    pub total: Verdicts,
    /// Met all targets, per second, over the last minute.
    pub goodput: f64,
    /// Times to first token of those that were done.
    pub ttft: Quantiles,
    /// Mean gaps between tokens of those that were done.
    pub tpot: Quantiles,
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

/// See [`Board::handoffs`].
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Handoffs {
    /// KV bytes that landed since the router started, as reserved and prompted: full blocks.
    pub bytes_total: u64,
    /// Hand-offs that landed since then.
    pub landed_total: u64,
    /// Attempts whose legs were one worker's, and so had nothing to send.
    pub joined_total: u64,
    /// Links between workers, by what carries them, as measured at their start.
    pub links: Vec<LinkRow>,
}

/// Links of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LinkRow {
    /// What carries the bytes.
    pub transport: String,
    /// How many.
    pub count: u64,
    /// The slowest one.
    pub slowest_bytes_per_second: u64,
    /// Their mean.
    pub mean_bytes_per_second: u64,
}

/// One second of [`Board::history`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Second {
    /// Requests that came.
    pub begun: u32,
    /// Met all targets.
    pub good: u32,
    /// Late, refused or failed.
    pub missed: u32,
    /// Output tokens of what ended.
    pub tokens: u64,
    /// KV bytes that landed.
    pub handoff_bytes: u64,
}

impl Serialize for Second {
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

/// Something that went wrong, or happened to a worker.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Happening {
    /// The last time, in milliseconds since 1970.
    pub at_ms: u64,
    /// `refused`, `failed`, `late`, `retried`, `passed_over`, `moved`, `stuck`, `joined`, `lost`, `left`.
    pub kind: &'static str,
    /// Why.
    pub reason: String,
    /// The class or the worker that it is about.
    pub about: String,
    /// How often in a row.
    pub count: u32,
}

/// How many workers are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Scaling {
    /// Whether it is only said, and nobody acts on it.
    pub advisory: bool,
    /// Each pool.
    pub pools: Vec<PoolWanted>,
    /// What was decided of late, the latest first.
    pub recent: Vec<ScalingStep>,
}

/// A pool's workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PoolWanted {
    /// `prefill`, `decode` or `both`.
    pub pool: String,
    /// That are there.
    pub workers: u32,
    /// That there should be.
    pub wanted: u32,
    /// Why, in words.
    pub reason: String,
}

/// One change of mind.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ScalingStep {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// The pool.
    pub pool: String,
    /// Before.
    pub from: u32,
    /// After.
    pub to: u32,
    /// Why, in words.
    pub reason: String,
}

/// A board as it is sent: whole, or without the workers that stand as they stood.
pub(crate) struct Sent<'a> {
    pub(crate) board: &'a Board,
    /// Rows that are new or differ; all of them in a snapshot.
    pub(crate) workers: Vec<&'a WorkerRow>,
    /// Names of workers that are there no more.
    pub(crate) gone: Vec<&'a str>,
    pub(crate) whole: bool,
}

impl<'a> Sent<'a> {
    pub(crate) fn whole(board: &'a Board) -> Self {
        Self {
            board,
            workers: board.workers.iter().collect(),
            gone: Vec::new(),
            whole: true,
        }
    }

    /// What differs from the board before; both are ordered by name.
    pub(crate) fn since(before: &'a Board, board: &'a Board) -> Self {
        let find = |board: &'a Board, name: &str| {
            let at = board.workers.binary_search_by(|row| (*row.name).cmp(name));
            at.ok().map(|at| &board.workers[at])
        };
        let changed = |row: &&WorkerRow| find(before, &row.name) != Some(row);
        let gone = |row: &&WorkerRow| find(board, &row.name).is_none();
        let left = before.workers.iter().filter(gone);
        Self {
            board,
            workers: board.workers.iter().filter(changed).collect(),
            gone: left.map(|row| row.name.as_str()).collect(),
            whole: false,
        }
    }
}

impl Serialize for Sent<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Board {
            uptime,
            workers: _,
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
        map.serialize_entry("gone", &self.gone)?;
        map.serialize_entry("workers_count", &self.board.workers.len())?;
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

/// To the hundredth: finer nobody sees, and a row stays short.
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
            step: None,
            heard: Some(Duration::from_millis(7)),
            tokens_per_second: Some(12.6),
            placed: 5,
        }
    }

    fn board(workers: Vec<WorkerRow>) -> Board {
        Board {
            workers,
            ..Board::default()
        }
    }

    fn sent(sent: &Sent) -> Value {
        serde_json::to_value(sent).expect("it is plain data")
    }

    #[test]
    fn a_worker_that_stands_as_it_stood_was_sent_every_second() {
        let before = board(vec![row("a", 1), row("b", 1), row("d", 1)]);
        let after = board(vec![row("a", 1), row("b", 2), row("c", 1)]);
        let whole = sent(&Sent::whole(&after));
        assert_eq!(whole["workers"].as_array().map(Vec::len), Some(3));
        assert_eq!(
            whole["workers"][0],
            json!([
                "a", "decode", "ready", null, 0, 1, 0, 0, 1.23, 3, 9, null, 7, 13.0, 5
            ])
        );
        assert_eq!(whole["columns"].as_array().map(Vec::len), Some(15));
        let delta = sent(&Sent::since(&before, &after));
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
