//! Attention on the device: which kernels, and what they are told of the batch.
//!
//! Owns: the choice between tensor-core and plain kernels, the plan of a pass for each window, and the workspace
//! for states of spans.
//! Never: waits.
//! Invariant: a plan is sent once for each window of a pass, before anything of the pass is launched where the
//! window is known.

use crate::args::{AttendArgs, AttendPlainArgs};
use crate::buffers::{Contents, CudaPool, CudaRows, Growing};
use crate::driver::{Kernel, Stream};
use crate::error::CudaError;
use crate::images::Images;
use crate::inbox::{Inbox, Place};
use crate::plan::{AttentionPlan, Item, PlanShape, STATE_HEADER, segments};
use cleave_engine::ops::{Attention, Batch, HeadShape, KvType, PoolShape};

/// Head sizes that the tensor-core kernels are built for.
const DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// Tokens per block that they take: powers of two.
const BLOCK_TOKENS: std::ops::RangeInclusive<usize> = 8..=512;
/// Warps of a block of the plain kernels, each with one head of one row.
const PLAIN_WARPS: usize = 4;

/// Kernels of one precision and head size.
#[derive(Debug)]
enum Kernels {
    Tensor {
        decode: Kernel<AttendArgs>,
        /// None where a block has too little shared memory for it: `decode` then does all tiles.
        prefill: Option<Kernel<AttendArgs>>,
    },
    Plain(Kernel<AttendPlainArgs>),
}

/// Attention for one pool.
#[derive(Debug)]
pub(crate) struct Attending {
    kernels: Kernels,
    /// Multiprocessors that the stream's work runs on.
    processors_count: usize,
    states: Growing,
    arrivals: Growing,
    heads: HeadShape,
    /// Windows of the model's layers, as far as they were seen.
    windows: Vec<Option<usize>>,
    /// Of the pass at hand; plans by window.
    sent: Option<Sent>,
    plans: Vec<SentPlan>,
    moves_count: u64,
}

/// Where the batch's tables are.
#[derive(Clone, Copy, Debug)]
struct Sent {
    tables: u64,
    segments: u64,
    segments_count: u64,
}

/// Where a plan's items are; `None` if there are none to launch for.
#[derive(Clone, Copy, Debug)]
struct SentPlan {
    decode: Option<SentItems>,
    prefill: Option<SentItems>,
}

#[derive(Clone, Copy, Debug)]
struct SentItems {
    items: u64,
    items_count: u64,
    /// Blocks that walk them.
    blocks: u32,
}

/// Blocks of the largest grid that runs at once; 0 of a kernel that is not there.
#[derive(Clone, Copy, Debug)]
struct Grids {
    decode: usize,
    prefill: usize,
}

/// What a layer's attention reads and writes.
#[derive(Debug)]
pub(crate) struct Io<'a> {
    pub(crate) qkv: &'a CudaRows,
    pub(crate) pool: &'a CudaPool,
    pub(crate) out: &'a CudaRows,
}

/// What kernels over such a pool have in their names.
pub(crate) fn kernel_name(kv: KvType) -> &'static str {
    match kv {
        KvType::F32 => "f32",
        KvType::Bf16 => "bf16",
        KvType::Fp8E4m3 => "fp8",
        // Refused when kernels are loaded: there are none.
        KvType::Int8PerTokenHead => "int8_per_token_head",
    }
}

/// Whether tensor cores can be used for such a pool.
fn is_tensor(shape: &PoolShape) -> bool {
    shape.kv != KvType::F32
        && DIMS.contains(&shape.heads.head_dim)
        && shape.block_tokens.is_power_of_two()
        && BLOCK_TOKENS.contains(&shape.block_tokens)
}

/// The tensor-core kernels for keys and values of this type and heads of `dim`. Where a block has 99 KiB of shared memory
/// (compute capabilities 8.6, 8.9 and 12.0), large heads have room for a tile of `decode` alone, the largest of them in a
/// variant that keeps less there: it does every tile then, in the same order of sums.
fn tensor_kernels(
    images: &Images,
    stream: &Stream,
    (kv, dim): (&str, usize),
) -> Result<Kernels, CudaError> {
    let most = stream.device().facts().shared_bytes_max;
    let name = |kind: &str| format!("attend_{kind}_{kv}_{dim}");
    let fits = |name: &String| images.fits(name, most);
    let decode = [name("decode"), name("decode_small")]
        .into_iter()
        .find(fits)
        // The driver then says what is too large.
        .unwrap_or_else(|| name("decode"));
    let prefill = Some(name("prefill")).filter(fits);
    Ok(Kernels::Tensor {
        decode: images.kernel(&decode)?,
        prefill: prefill.map(|name| images.kernel(&name)).transpose()?,
    })
}

impl Attending {
    pub(crate) fn new(
        images: &Images,
        stream: &Stream,
        shape: &PoolShape,
    ) -> Result<Self, CudaError> {
        let dim = shape.heads.head_dim;
        let kv = kernel_name(shape.kv);
        let kernels = match is_tensor(shape) {
            true => tensor_kernels(images, stream, (kv, dim))?,
            false => Kernels::Plain(images.kernel(&format!("attend_plain_{kv}"))?),
        };
        Ok(Self {
            kernels,
            processors_count: stream.processors_count() as usize,
            states: Growing::new(stream, 0, "states of attention", Contents::Anything)?,
            arrivals: Growing::new(stream, 0, "counters of attention", Contents::Zeros)?,
            heads: shape.heads,
            windows: Vec::new(),
            sent: None,
            plans: Vec::new(),
            moves_count: 0,
        })
    }

    /// How often a workspace has moved.
    pub(crate) fn moves_count(&self) -> u64 {
        self.moves_count
    }

    /// Another batch comes. Plans are sent for all windows that are known, so that nothing need be sent while
    /// a recording is made.
    pub(crate) fn begin(
        &mut self,
        batch: &Batch,
        stream: &Stream,
        inbox: &mut Inbox,
    ) -> Result<(), CudaError> {
        self.plans.clear();
        let tables: Vec<u32> = batch.blocks.iter().map(|block| block.0).collect();
        let segments = segments(batch);
        let count = [segments.len() as u32];
        self.sent = Some(Sent {
            tables: inbox.send(stream, Place::Tables, &tables)?,
            segments: inbox.send(stream, Place::Segments, &segments)?,
            segments_count: inbox.send(stream, Place::SegmentsCount, &count)?,
        });
        if matches!(self.kernels, Kernels::Tensor { .. }) {
            for number in 0..self.windows.len() {
                self.send_plan(batch, number, (stream, inbox))?;
            }
        }
        Ok(())
    }

    /// One layer's attention over the batch that began, of which so many rows are launched.
    pub(crate) fn run(
        &mut self,
        (batch, rows): (&Batch, usize),
        attention: &Attention,
        io: &Io<'_>,
        (stream, inbox): (&Stream, &mut Inbox),
    ) -> Result<(), CudaError> {
        let sent = self.sent.expect("a pass began");
        if matches!(self.kernels, Kernels::Tensor { .. })
            && !self.windows.contains(&attention.window)
        {
            self.windows.push(attention.window);
            self.send_plan(batch, self.windows.len() - 1, (stream, inbox))?;
        }
        let number = self
            .windows
            .iter()
            .position(|window| *window == attention.window);
        match &self.kernels {
            Kernels::Plain(kernel) => {
                let args = plain_args(attention, io, sent);
                let heads = rows * self.heads.query_heads;
                let grid = [heads.div_ceil(PLAIN_WARPS) as u32, 1, 1];
                // SAFETY: the batch's tables name blocks of the pool, which the engine checked.
                unsafe { kernel.launch(stream, grid, args) }
            }
            Kernels::Tensor { decode, prefill } => {
                let plan = self.plans[number.expect("its window was added")];
                for (kernel, items) in [
                    (prefill.as_ref(), plan.prefill),
                    (Some(decode), plan.decode),
                ] {
                    let Some((kernel, items)) = kernel.zip(items) else {
                        continue;
                    };
                    let args = AttendArgs {
                        items: items.items,
                        items_count: items.items_count,
                        states: self.states.memory().at(0),
                        arrivals: self.arrivals.memory().at(0),
                        ..tensor_args(attention, io, sent)
                    };
                    // SAFETY: as above; the workspace has room for the plan's states.
                    unsafe { kernel.launch(stream, [items.blocks, 1, 1], args) }?;
                }
                Ok(())
            }
        }
    }

    /// As many blocks as the stream's multiprocessors hold at once, of each kernel.
    fn grids(&self) -> Grids {
        let all = |kernel: &Kernel<AttendArgs>| self.processors_count * kernel.blocks_each();
        match &self.kernels {
            Kernels::Plain(_) => Grids {
                decode: 0,
                prefill: 0,
            },
            Kernels::Tensor { decode, prefill } => Grids {
                decode: all(decode),
                prefill: prefill.as_ref().map_or(0, all),
            },
        }
    }

    /// Cuts the batch for a window, and makes room for what its items keep on the way.
    fn send_plan(
        &mut self,
        batch: &Batch,
        number: usize,
        (stream, inbox): (&Stream, &mut Inbox),
    ) -> Result<(), CudaError> {
        let heads = self.heads;
        let Grids {
            decode: decode_blocks,
            prefill: prefill_blocks,
        } = self.grids();
        let shape = PlanShape {
            group: heads.query_heads / heads.kv_heads,
            kv_heads: heads.kv_heads,
            window: self.windows[number],
            blocks_count: decode_blocks.max(prefill_blocks),
            has_prefill: prefill_blocks > 0,
        };
        let AttentionPlan {
            decode,
            prefill,
            states_count,
            arrivals_count,
        } = AttentionPlan::new(batch, &shape);
        // A step without prompts may be recorded, and launched again for any other batch: the kernel that does its tiles
        // has as many blocks as may be needed, whatever its items are now. Tiles of a decode step are of one kind: those of
        // a group of more heads than a tile of `decode` has rows go to `prefill`.
        let is_decode_step = batch.segments.len() == batch.rows_count();
        let blocks = |items: &[Item], most: usize| match is_decode_step {
            true => most as u32,
            false => (items.len() * heads.kv_heads).min(most) as u32,
        };
        let decode = SentItems {
            items: inbox.send(stream, Place::DecodeItems(number), &decode)?,
            items_count: inbox.send(
                stream,
                Place::DecodeItemsCount(number),
                &[decode.len() as u32],
            )?,
            blocks: blocks(&decode, decode_blocks),
        };
        let prefill = match prefill.as_slice() {
            [] => None,
            items => Some(SentItems {
                items: inbox.send(stream, Place::PrefillItems(number), items)?,
                items_count: inbox.send(
                    stream,
                    Place::PrefillItemsCount(number),
                    &[items.len() as u32],
                )?,
                blocks: blocks(items, prefill_blocks),
            }),
        };
        self.plans.push(SentPlan {
            // A step that has tiles of the other kind alone launches nothing here.
            decode: (prefill.is_none() || !is_decode_step).then_some(decode),
            prefill,
        });
        let width = heads.head_dim + STATE_HEADER;
        let rooms = [
            (&mut self.states, states_count * width * size_of::<f32>()),
            (&mut self.arrivals, arrivals_count * size_of::<u32>()),
        ];
        for (room, bytes) in rooms {
            let before = room.memory().at(0);
            let moved = room.at_least(stream, bytes)?.at(0) != before;
            self.moves_count += u64::from(moved);
        }
        Ok(())
    }
}

/// As the kernels take a window: all ones is none.
fn window_of(attention: &Attention) -> u32 {
    let window = attention.window.map(u32::try_from);
    window.and_then(Result::ok).unwrap_or(u32::MAX)
}

fn tensor_args(attention: &Attention, io: &Io<'_>, sent: Sent) -> AttendArgs {
    let shape = &io.pool.shape;
    let bytes = |elements: usize| (elements * shape.kv.element_bytes()) as u64;
    AttendArgs {
        qkv: io.qkv.address(),
        out: io.out.address(),
        pool: io.pool.memory.at(0),
        tables: sent.tables,
        segments: sent.segments,
        items: 0,
        items_count: 0,
        states: 0,
        arrivals: 0,
        block_bytes: shape.block_bytes() as u64,
        key_bytes: bytes(shape.key_offset(attention.layer, 0)),
        value_bytes: bytes(shape.value_offset(attention.layer, 0)),
        query_heads: shape.heads.query_heads as u32,
        kv_heads: shape.heads.kv_heads as u32,
        block_shift: shape.block_tokens.trailing_zeros(),
        window: window_of(attention),
        scale: attention.scale * std::f32::consts::LOG2_E,
        value_scale: 1.0,
    }
}

fn plain_args(attention: &Attention, io: &Io<'_>, sent: Sent) -> AttendPlainArgs {
    let shape = &io.pool.shape;
    AttendPlainArgs {
        qkv: io.qkv.address(),
        out: io.out.address(),
        pool: io.pool.memory.at(0),
        tables: sent.tables,
        segments: sent.segments,
        segments_count: sent.segments_count,
        block_elements: shape.block_elements() as u64,
        key_elements: shape.key_offset(attention.layer, 0) as u64,
        value_elements: shape.value_offset(attention.layer, 0) as u64,
        query_heads: shape.heads.query_heads as u32,
        kv_heads: shape.heads.kv_heads as u32,
        head_dim: shape.heads.head_dim as u32,
        block_tokens: shape.block_tokens as u32,
        window: window_of(attention),
        scale: attention.scale * std::f32::consts::LOG2_E,
    }
}
