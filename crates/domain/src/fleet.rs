//! What a worker says of itself.

use crate::SPAN_MAX;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Which legs a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Runs prompts and hands their KV on.
    Prefill,
    /// Receives KV and generates.
    Decode,
    /// Either, per request.
    Both,
}

impl Role {
    /// Whether a worker of this role runs prompts.
    pub fn prefills(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    /// Whether a worker of this role generates.
    pub fn decodes(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        })
    }
}

/// What must be equal for KV blocks to mean the same on two workers: weights revision, numeric
/// type, block layout and size. A readable text; equality is all that counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint(pub String);

/// The hardware that a worker computes with, where it takes all of it: a GPU by its UUID, or a machine and
/// its cores. Workers that say the same one slow each other. A readable text; equality is all that counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceId(pub String);

/// What a worker is and what it can hold; sent once when it joins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerDescription {
    /// Which legs it serves.
    pub role: Role,
    /// Which it was started with: the pool in which whoever starts workers counts it.
    pub home: Role,
    /// The model's served name.
    pub model: String,
    /// With whom it may exchange blocks.
    pub fingerprint: Fingerprint,
    /// What it can hold.
    pub capacity: Capacity,
    /// Requests it queues at most, each leg.
    pub queue_max: u32,
    /// None where it takes a part of its own of some hardware, or nothing is known of that.
    pub device: Option<DeviceId>,
}

/// What an engine can hold and run; the same numbers for engine, scheduler and router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of one block: `layers × 2 × kv_heads × block_tokens × head_dim × element`.
    pub block_bytes: u32,
    /// Blocks in the pool.
    pub blocks_count: u32,
    /// Sequences in one step at most (`max_num_seqs`).
    pub slots_count: u32,
    /// Tokens in one step at most (`max_num_batched_tokens`); bounds the prefill chunk.
    pub step_tokens_max: u32,
    /// The longest sequence, prompt and output together.
    pub context_tokens_max: u32,
}

/// How busy a worker is, as of its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Prompt tokens accepted and not yet computed.
    pub queue_tokens: u64,
    /// Sequences waiting for their first step or for blocks.
    pub sequences_waiting: u32,
    /// Sequences in the running batch.
    pub sequences_running: u32,
    /// Blocks neither held nor promised; cached prefixes that could be evicted count as free.
    pub blocks_free: u32,
    /// Whether its steps come to an end.
    pub progress: Progress,
    /// Tokens, prompt and output, of the sequences that run or will run here: those in the batch, those
    /// that it has reserved for, and prompts that it runs for itself.
    pub context_tokens: u64,
    /// How many sequences those tokens are of: on a prefill worker the ones that stay there.
    pub streams: u32,
    /// How long its prompts will take, by how soon they must begin.
    pub backlog: Backlog,
    /// The tightest mean gap between tokens that can still be kept, of what is left of each running or
    /// reserved sequence's promise; one that is lost anyway, or about to end, binds nobody.
    pub tpot_least: Option<Duration>,
    /// How long the step under way is still predicted to take; nothing new begins before.
    pub step_left: Duration,
    /// Orders that this router has sent over this connection and that are counted in all of this.
    pub orders_heard: u64,
}

impl Load {
    /// The same with no span above [`SPAN_MAX`].
    pub fn bounded(self) -> Self {
        Self {
            tpot_least: self.tpot_least.map(|gap| gap.min(SPAN_MAX)),
            step_left: self.step_left.min(SPAN_MAX),
            ..self
        }
    }
}

/// How long the prompts that a worker was given will take it, by the class's priority and by slack: the
/// time that is left until a prompt must begin to be in time. A prompt waits for what is of smaller
/// priority, and among its own for what has less slack. Prompts share steps, so work is what a prompt
/// adds to steps that are full, not what it would take alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Backlog {
    /// Microseconds of work: `[band][i]` is of prompts whose slack is at most [`Self::BOUNDS`]`[i]` and
    /// more than the bound before; the last of each band is all that has more, or is due at no time,
    /// or cannot be in time any more.
    pub micros: [[u32; 9]; 3],
}

impl Backlog {
    /// Upper bounds of slack, ascending.
    pub const BOUNDS: [Duration; 8] = [
        Duration::from_millis(50),
        Duration::from_millis(100),
        Duration::from_millis(250),
        Duration::from_millis(500),
        Duration::from_millis(1_000),
        Duration::from_millis(2_500),
        Duration::from_millis(5_000),
        Duration::from_millis(10_000),
    ];

    /// Priorities below 0, 0, and above it; also the first key of the order in which prompts run.
    pub fn band(priority: i32) -> usize {
        match priority {
            ..0 => 0,
            0 => 1,
            1.. => 2,
        }
    }

    /// Which entry of a band a prompt with so much slack is part of.
    pub fn place(slack: Option<Duration>) -> usize {
        let fits = |slack: Duration| Self::BOUNDS.iter().position(|bound| slack <= *bound);
        slack.and_then(fits).unwrap_or(Self::BOUNDS.len())
    }

    /// Adds a prompt that takes `work` and must begin within `slack`; `None` if it is due at no time.
    pub fn add(&mut self, priority: i32, slack: Option<Duration>, work: Duration) {
        let micros = u32::try_from(work.as_micros()).unwrap_or(u32::MAX);
        let sum = &mut self.micros[Self::band(priority)][Self::place(slack)];
        *sum = sum.saturating_add(micros);
    }

    /// All that goes before a prompt with so much slack, those with about as much included.
    pub fn ahead(&self, priority: i32, slack: Option<Duration>) -> Duration {
        let (bands, own) = self.micros.split_at(Self::band(priority));
        let more_urgent = bands.iter().flatten();
        let before = own[0][..=Self::place(slack)].iter();
        Duration::from_micros(more_urgent.chain(before).map(|m| u64::from(*m)).sum())
    }
}

/// Whether a worker gets anywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Progress {
    /// Idle, or in a step that takes no longer than a step may.
    #[default]
    Moving,
    /// The step under way takes longer than any should.
    Stuck,
}
