//! Attention on the device: which kernels, and what they are told of the batch.
//!
//! Owns: the choice between tensor-core and plain kernels, the plan of a pass for each window, and the workspace
//! for states of spans.
//! Never: waits.
//! Invariant: a plan is sent once for each window of a pass, and forgotten with the pass.

use crate::args::{AttendArgs, AttendPlainArgs};
use crate::buffers::{Contents, CudaPool, CudaRows, Growing};
use crate::driver::{Kernel, Stream};
use crate::error::CudaError;
use crate::images::Images;
use crate::mailbox::Mailbox;
use crate::plan::{AttentionPlan, PlanShape, STATE_HEADER, segments};
use cleave_engine::ops::{Attention, Batch, HeadShape, PoolShape, Precision};

/// Head sizes that the tensor-core kernels are built for.
const DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// Tokens per block that they take: powers of two.
const BLOCK_TOKENS: std::ops::RangeInclusive<usize> = 8..=512;
/// Warps of a block of the plain kernels, each with one head of one row.
const PLAIN_WARPS: usize = 4;
/// Blocks for each multiprocessor: as many as fit one, with the registers they take.
const BLOCKS_EACH: usize = 4;

/// Kernels of one precision and head size.
#[derive(Debug)]
enum Kernels {
    Tensor {
        decode: Kernel<AttendArgs>,
        prefill: Kernel<AttendArgs>,
    },
    Plain(Kernel<AttendPlainArgs>),
}

/// Attention for one pool.
#[derive(Debug)]
pub(crate) struct Attending {
    kernels: Kernels,
    blocks_count: usize,
    states: Growing,
    arrivals: Growing,
    /// Of the pass at hand.
    sent: Option<Sent>,
    plans: Vec<(Option<usize>, SentPlan)>,
}

/// Where the batch's tables are.
#[derive(Clone, Copy, Debug)]
struct Sent {
    tables: u64,
    segments: u64,
    segments_count: u64,
}

/// Where a plan's items are.
#[derive(Clone, Copy, Debug)]
struct SentPlan {
    decode: SentItems,
    prefill: SentItems,
    states_count: usize,
    arrivals_count: usize,
}

#[derive(Clone, Copy, Debug)]
struct SentItems {
    items: u64,
    items_count: u64,
    count: usize,
}

/// What a layer's attention reads and writes.
#[derive(Debug)]
pub(crate) struct Io<'a> {
    pub(crate) qkv: &'a CudaRows,
    pub(crate) pool: &'a CudaPool,
    pub(crate) out: &'a CudaRows,
}

/// Whether tensor cores can be used for such a pool.
fn is_tensor(shape: &PoolShape) -> bool {
    shape.precision == Precision::Bf16
        && DIMS.contains(&shape.heads.head_dim)
        && shape.block_tokens.is_power_of_two()
        && BLOCK_TOKENS.contains(&shape.block_tokens)
}

impl Attending {
    pub(crate) fn new(
        images: &Images,
        stream: &Stream,
        shape: &PoolShape,
    ) -> Result<Self, CudaError> {
        let dim = shape.heads.head_dim;
        let kernels = match is_tensor(shape) {
            true => Kernels::Tensor {
                decode: images.kernel(&format!("attend_decode_bf16_{dim}"))?,
                prefill: images.kernel(&format!("attend_prefill_bf16_{dim}"))?,
            },
            false => Kernels::Plain(images.kernel(&format!("attend_plain_{}", shape.precision.name()))?),
        };
        let processors = stream.device().facts().processors_count as usize;
        Ok(Self {
            kernels,
            blocks_count: processors * BLOCKS_EACH,
            states: Growing::new(stream, 0, "states of attention", Contents::Anything)?,
            arrivals: Growing::new(stream, 0, "counters of attention", Contents::Zeros)?,
            sent: None,
            plans: Vec::new(),
        })
    }

    /// Another batch comes.
    pub(crate) fn begin(
        &mut self,
        batch: &Batch,
        stream: &Stream,
        mailbox: &mut Mailbox,
    ) -> Result<(), CudaError> {
        self.plans.clear();
        let tables: Vec<u32> = batch.blocks.iter().map(|block| block.0).collect();
        let segments = segments(batch);
        self.sent = Some(Sent {
            tables: mailbox.send_all(stream, &tables)?,
            segments: mailbox.send_all(stream, &segments)?,
            segments_count: mailbox.send_all(stream, &[segments.len() as u32])?,
        });
        Ok(())
    }

    /// One layer's attention over the batch that began.
    pub(crate) fn run(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: &Io<'_>,
        (stream, mailbox): (&Stream, &mut Mailbox),
    ) -> Result<(), CudaError> {
        let sent = self.sent.expect("a pass began");
        let plan = match self.kernels {
            Kernels::Plain(_) => None,
            Kernels::Tensor { .. } => {
                let heads = io.pool.shape.heads;
                Some(self.plan(batch, (attention, heads), stream, mailbox)?)
            }
        };
        match (&self.kernels, plan) {
            (Kernels::Plain(kernel), _) => {
                let args = plain_args(attention, io, sent);
                let heads = batch.rows_count() * io.pool.shape.heads.query_heads;
                let grid = [heads.div_ceil(PLAIN_WARPS) as u32, 1, 1];
                // SAFETY: the batch's tables name blocks of the pool, which the engine checked.
                unsafe { kernel.launch(stream, grid, args) }
            }
            (Kernels::Tensor { decode, prefill }, Some(plan)) => {
                let width = io.pool.shape.heads.head_dim + STATE_HEADER;
                let bytes = plan.states_count * width * size_of::<f32>();
                let states = self.states.at_least(stream, bytes)?.at(0);
                let bytes = plan.arrivals_count * size_of::<u32>();
                let arrivals = self.arrivals.at_least(stream, bytes)?.at(0);
                let kv_heads = io.pool.shape.heads.kv_heads;
                for (kernel, items) in [(prefill, plan.prefill), (decode, plan.decode)] {
                    let blocks = (items.count * kv_heads).min(self.blocks_count);
                    let args = AttendArgs {
                        items: items.items,
                        items_count: items.items_count,
                        states,
                        arrivals,
                        ..tensor_args(attention, io, sent)
                    };
                    // SAFETY: as above; the workspace has room for the plan's states.
                    unsafe { kernel.launch(stream, [blocks as u32, 1, 1], args) }?;
                }
                Ok(())
            }
            (Kernels::Tensor { .. }, None) => unreachable!("a plan was made for these kernels"),
        }
    }

    /// The plan for a layer's window, made when the first such layer comes.
    fn plan(
        &mut self,
        batch: &Batch,
        (attention, heads): (&Attention, HeadShape),
        stream: &Stream,
        mailbox: &mut Mailbox,
    ) -> Result<SentPlan, CudaError> {
        let window = attention.window;
        if let Some((_, plan)) = self.plans.iter().find(|(of, _)| *of == window) {
            return Ok(*plan);
        }
        let shape = PlanShape {
            group: heads.query_heads / heads.kv_heads,
            kv_heads: heads.kv_heads,
            window,
            blocks_count: self.blocks_count,
        };
        let AttentionPlan {
            decode,
            prefill,
            states_count,
            arrivals_count,
        } = AttentionPlan::new(batch, &shape);
        let mut send = |items: &[crate::plan::Item]| -> Result<SentItems, CudaError> {
            Ok(SentItems {
                items: mailbox.send_all(stream, items)?,
                items_count: mailbox.send_all(stream, &[items.len() as u32])?,
                count: items.len(),
            })
        };
        let plan = SentPlan {
            decode: send(&decode)?,
            prefill: send(&prefill)?,
            states_count,
            arrivals_count,
        };
        self.plans.push((window, plan));
        Ok(plan)
    }
}

/// As the kernels take a window: all ones is none.
fn window_of(attention: &Attention) -> u32 {
    let window = attention.window.map(u32::try_from);
    window.and_then(Result::ok).unwrap_or(u32::MAX)
}

fn tensor_args(attention: &Attention, io: &Io<'_>, sent: Sent) -> AttendArgs {
    let shape = &io.pool.shape;
    let bytes = |elements: usize| (elements * shape.precision.element_bytes()) as u64;
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
