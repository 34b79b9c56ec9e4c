//! The description and the load that a worker reports of itself.

use crate::{BlockIndex, KvPlane, KvUnit, KvWindow, SPAN_MAX, WindowTable};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The legs that a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Runs prompts and sends their KV to a decode worker.
    Prefill,
    /// Receives KV and generates.
    Decode,
    /// Both legs, chosen per request.
    Both,
}

impl Role {
    /// Whether the steps of a worker complete in time.
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

/// The properties that must be equal for KV blocks to mean the same on two workers: weights
/// revision, numeric type, block layout and size. A readable text; only equality matters.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint(pub String);

/// The hardware that a worker uses exclusively: a GPU by its UUID, or a machine and its cores.
/// Workers that report the same device slow each other. A readable text; only equality matters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceId(pub String);

/// The properties and the capacity of a worker; sent once when it joins.
#[derive(Clone, Debug, PartialEq, Hash, Serialize, Deserialize)]
pub struct WorkerDescription {
    /// The legs that it serves now.
    pub role: Role,
    /// The role that it was started with: the pool in which an autoscaler counts it.
    pub home: Role,
    /// The served name of the model.
    pub model: String,
    /// Workers with the same fingerprint may exchange blocks.
    pub fingerprint: Fingerprint,
    /// The limits of its engine.
    pub capacity: Capacity,
    /// Limit of queued requests, for each leg.
    pub queue_max: u32,
    /// The device; `None` if the worker uses only a part of one, or its hardware is unknown.
    pub device: Option<DeviceId>,
}

/// The limits of an engine; the same numbers for engine, scheduler and router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Capacity {
    /// Tokens whose KV one block holds.
    pub block_tokens: u32,
    /// Bytes of one block: `layers × 2 × kv_heads × block_tokens × head_dim × element`.
    pub block_bytes: u32,
    /// Blocks in the pool.
    pub blocks_count: u32,
    /// Limit of sequences in one step (`max_num_seqs`).
    pub slots_count: u32,
    /// Limit of tokens in one step (`max_num_batched_tokens`); bounds the prefill chunk.
    pub step_tokens_max: u32,
    /// Limit of a sequence, prompt and output together.
    pub context_tokens_max: u32,
    /// The state plane; `None` if no layer of the model has a state.
    #[serde(default)]
    pub states: Option<StateCapacity>,
    /// The window plane; `None` if no layer has a window that is shorter than the context.
    #[serde(default)]
    pub windows: Option<WindowCapacity>,
}

/// The slots of a state plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StateCapacity {
    /// Bytes of one slot, at least 1.
    pub bytes: u32,
    /// Slots, for the states of sequences and for snapshots, at least 1.
    pub count: u32,
}

/// The blocks of a window plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WindowCapacity {
    /// The largest window in tokens, the token itself included; at least 1.
    pub tokens: u32,
    /// Bytes of one block, at least 1.
    pub bytes: u32,
    /// Blocks; at least as many as one sequence needs for its longest step, or as the plane of
    /// blocks has.
    pub count: u32,
}

impl Capacity {
    /// The window of the layers in the window plane, if there is one.
    pub fn window(&self) -> Option<KvWindow> {
        self.windows.map(|windows| KvWindow {
            tokens: windows.tokens,
            block_tokens: self.block_tokens,
        })
    }

    /// The pieces in which a block of the window plane is sent and copied, none longer than a
    /// block; 0 without such a plane.
    pub fn window_pieces(&self) -> u32 {
        self.windows
            .map_or(0, |windows| windows.bytes.div_ceil(self.block_bytes))
    }

    /// The pieces of one block of the window plane, by the block's ordinal in its sequence.
    pub fn window_units(&self, ordinal: u32) -> impl Iterator<Item = KvUnit> + use<> {
        let (plane, pieces) = (KvPlane::Window, self.window_pieces());
        let ordinals = ordinal * pieces..(ordinal + 1) * pieces;
        ordinals.map(move |ordinal| KvUnit { plane, ordinal })
    }

    /// The pieces in which a state is sent and copied, none longer than a block; 0 without states.
    pub fn state_pieces(&self) -> u32 {
        self.states
            .map_or(0, |states| states.bytes.div_ceil(self.block_bytes))
    }

    /// The blocks of a sequence in their order, then the pieces of its window's blocks, then those
    /// of its state in `slot`; each with the block or slot that it lies in.
    pub fn units<'a>(
        &self,
        blocks: &'a [BlockIndex],
        window: Option<&'a WindowTable>,
        slot: Option<BlockIndex>,
    ) -> impl Iterator<Item = (KvUnit, BlockIndex)> + use<'a> {
        let capacity = *self;
        let blocks = (0..).map(KvUnit::block).zip(blocks.iter().copied());
        let window = window.into_iter().flat_map(WindowTable::entries);
        let window = window.flat_map(move |(ordinal, block)| {
            let units = capacity.window_units(ordinal);
            units.map(move |unit| (unit, block))
        });
        let blocks = blocks.chain(window);
        let plane = KvPlane::State;
        let pieces = (0..self.state_pieces()).map(move |ordinal| KvUnit { plane, ordinal });
        blocks.chain(
            slot.into_iter()
                .flat_map(move |slot| pieces.clone().map(move |unit| (unit, slot))),
        )
    }

    /// Bytes of a block, or of a piece of a state or of a block of the window; the last piece may
    /// be shorter than the others, and one past the end has none.
    pub fn unit_bytes(&self, unit: KvUnit) -> u32 {
        match unit.plane {
            KvPlane::Blocks => self.block_bytes,
            KvPlane::State | KvPlane::Window => {
                let states = self.states.map(|states| states.bytes);
                let windows = self.windows.map(|windows| windows.bytes);
                let is_state = unit.plane == KvPlane::State;
                let bytes = if is_state { states } else { windows }.unwrap_or(0);
                let left = u64::from(bytes).saturating_sub(self.unit_start(unit));
                u32::try_from(left).map_or(self.block_bytes, |left| left.min(self.block_bytes))
            }
        }
    }

    /// The first byte of a block or piece, from the start of the block or slot that it lies in.
    pub fn unit_start(&self, unit: KvUnit) -> u64 {
        match unit.plane {
            KvPlane::Blocks => 0,
            KvPlane::State => u64::from(unit.ordinal) * u64::from(self.block_bytes),
            KvPlane::Window => {
                let piece = unit.ordinal % self.window_pieces().max(1);
                u64::from(piece) * u64::from(self.block_bytes)
            }
        }
    }
}

/// The load of a worker after its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerLoad {
    /// Prompt tokens accepted and not yet computed.
    pub queue_tokens: u64,
    /// Sequences waiting for their first step or for blocks.
    pub sequences_waiting: u32,
    /// Sequences in the running batch.
    pub sequences_running: u32,
    /// Blocks neither held nor reserved; cached prefixes that can be evicted count as free.
    pub blocks_free: u32,
    /// State slots held by no sequence and no copy; snapshots that can be evicted count as free.
    #[serde(default)]
    pub states_free: u32,
    /// Blocks of the window plane neither held nor reserved; cached ones count as free.
    #[serde(default)]
    pub windows_free: u32,
    /// Whether its steps complete in time.
    pub progress: StepProgress,
    /// Tokens, prompt and output, of the sequences that decode or will decode here: in the batch,
    /// reserved for, and prompts that the worker runs for itself.
    pub context_tokens: u64,
    /// The number of those sequences; on a prefill worker the ones that stay there.
    pub streams: u32,
    /// The predicted time of its queued prompts, by slack.
    pub backlog: PrefillBacklog,
    /// The smallest mean gap between tokens that still meets the targets of all running and
    /// reserved sequences, over their remaining tokens. Sequences that miss their target anyway, or
    /// are about to end, are ignored.
    pub tpot_least: Option<Duration>,
    /// The predicted rest of the current step; no new work begins before its end.
    pub step_left: Duration,
    /// Orders of this router, over this connection, that this load includes.
    #[serde(rename = "orders_heard")]
    pub orders_received: u64,
}

impl WorkerLoad {
    /// The same load with no duration above [`SPAN_MAX`].
    pub fn bounded(self) -> Self {
        Self {
            tpot_least: self.tpot_least.map(|gap| gap.min(SPAN_MAX)),
            step_left: self.step_left.min(SPAN_MAX),
            ..self
        }
    }
}

/// The predicted time of the prompts of a worker, by priority and by slack: the time left until a
/// prompt must begin to meet its target. A prompt waits for prompts of smaller priority value, and
/// among its own for those with less slack. Prompts share steps, so the work of a prompt is the
/// time that it adds to full steps, not its time alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrefillBacklog {
    /// Microseconds of work: `[band][i]` counts prompts whose slack is at most
    /// [`Self::BOUNDS`]`[i]` and more than the bound before. The last entry of each band counts
    /// prompts with more slack, without a target, or that miss it anyway.
    pub micros: [[u32; 9]; 3],
}

impl PrefillBacklog {
    /// The upper bounds of slack, ascending.
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

    /// The band of a priority: below 0, 0, and above 0; also the first sort key of queued prompts.
    pub fn priority_band(priority: i32) -> usize {
        match priority {
            ..0 => 0,
            0 => 1,
            1.. => 2,
        }
    }

    /// The entry of a band for a prompt with this slack.
    pub fn slack_index(slack: Option<Duration>) -> usize {
        let fits = |slack: Duration| Self::BOUNDS.iter().position(|bound| slack <= *bound);
        slack.and_then(fits).unwrap_or(Self::BOUNDS.len())
    }

    /// Adds a prompt that takes `work` and must begin within `slack`; `None` if it has no target.
    pub fn add(&mut self, priority: i32, slack: Option<Duration>, work: Duration) {
        let micros = u32::try_from(work.as_micros()).unwrap_or(u32::MAX);
        let sum = &mut self.micros[Self::priority_band(priority)][Self::slack_index(slack)];
        *sum = sum.saturating_add(micros);
    }

    /// The work ahead of a prompt with this slack, prompts in the same entry included.
    pub fn work_ahead(&self, priority: i32, slack: Option<Duration>) -> Duration {
        let (bands, own) = self.micros.split_at(Self::priority_band(priority));
        let more_urgent = bands.iter().flatten();
        let before = own[0][..=Self::slack_index(slack)].iter();
        Duration::from_micros(more_urgent.chain(before).map(|m| u64::from(*m)).sum())
    }
}

/// Whether a worker gets anywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StepProgress {
    /// The worker is idle, or in a step within its time limit.
    #[default]
    Moving,
    /// The current step exceeds its time limit.
    Stuck,
}

#[cfg(test)]
mod tests {
    use super::{Capacity, StateCapacity, WindowCapacity};
    use crate::{BlockIndex, KvPlane, KvUnit, WindowTable};

    fn capacity(state_bytes: Option<u32>) -> Capacity {
        Capacity {
            block_tokens: 4,
            block_bytes: 8,
            blocks_count: 3,
            slots_count: 2,
            step_tokens_max: 8,
            context_tokens_max: 12,
            states: state_bytes.map(|bytes| StateCapacity { bytes, count: 2 }),
            windows: None,
        }
    }

    #[test]
    fn pieces_of_a_window_follow_its_blocks() {
        for bytes in 1..40 {
            let mut capacity = capacity(Some(9));
            capacity.windows = Some(WindowCapacity {
                tokens: 5,
                bytes,
                count: 9,
            });
            let window = WindowTable {
                first: 3,
                blocks: vec![BlockIndex(7), BlockIndex(2)],
            };
            let units = capacity.units(&[BlockIndex(1)], Some(&window), Some(BlockIndex(0)));
            let units: Vec<_> = units.collect();
            let pieces = capacity.window_pieces();
            assert_eq!(units.len() as u32, 1 + 2 * pieces + 2);
            let mut end = [0, 0];
            for (place, (unit, block)) in (3 * pieces..).zip(&units[1..1 + 2 * pieces as usize]) {
                let plane = KvPlane::Window;
                assert_eq!(
                    *unit,
                    KvUnit {
                        plane,
                        ordinal: place
                    }
                );
                let second = usize::from(*block == BlockIndex(2));
                assert_eq!(capacity.unit_start(*unit), end[second]);
                let len = capacity.unit_bytes(*unit);
                assert!((1..=8).contains(&len), "{len} of {bytes}");
                end[second] += u64::from(len);
            }
            assert_eq!(end, [u64::from(bytes); 2]);
        }
    }

    #[test]
    fn pieces_cover_a_state_and_none_exceeds_a_block() {
        for bytes in 1..40 {
            let capacity = capacity(Some(bytes));
            let mut end = 0;
            for ordinal in 0..capacity.state_pieces() {
                let plane = KvPlane::State;
                let unit = KvUnit { plane, ordinal };
                assert_eq!(capacity.unit_start(unit), end);
                let len = capacity.unit_bytes(unit);
                assert!((1..=8).contains(&len), "{len} of {bytes}");
                end += u64::from(len);
            }
            assert_eq!(end, u64::from(bytes));
            let ordinal = capacity.state_pieces();
            let plane = KvPlane::State;
            assert_eq!(capacity.unit_bytes(KvUnit { plane, ordinal }), 0);
        }
    }

    #[test]
    fn without_a_state_plane_only_blocks_have_bytes() {
        let capacity = capacity(None);
        assert_eq!(capacity.state_pieces(), 0);
        assert_eq!(capacity.unit_bytes(KvUnit::block(7)), 8);
        assert_eq!(capacity.unit_start(KvUnit::block(7)), 0);
        let (plane, ordinal) = (KvPlane::State, 0);
        assert_eq!(capacity.unit_bytes(KvUnit { plane, ordinal }), 0);
    }
}
