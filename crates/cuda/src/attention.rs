//! Attention on the device: the choice of kernels, and the description of the batch that they read.
//!
//! Owns: the choice between tensor-core and plain kernels, the plan of a pass for each window, and
//! the workspace for the states of spans.
//! Never: waits for the device.
//! Invariant: a pass sends one plan for each window. The plans of known windows are sent before the
//! pass launches its first kernel.

use crate::args::{AttendArgs, AttendPlainArgs};
use crate::buffers::{CudaPool, CudaRows, GrowingMemory, MemoryContents};
use crate::driver::{CudaKernel, CudaStream};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::pack::CudaVector;
use crate::plan::{AttentionItem, AttentionPlanShape, CudaAttentionPlan, STATE_HEADER, segments};
use crate::step_messages::{StepMessage, StepMessages};
use cleave_domain::KvPlane;
use cleave_engine::ops::{Attention, Batch, HeadShape, KvPoolShape, KvType};
use std::f32::consts::LOG2_E;

/// The head sizes that the tensor-core kernels are built for.
const DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// The block sizes, in tokens, that the tensor-core kernels take; only powers of two among them.
const BLOCK_TOKENS: std::ops::RangeInclusive<usize> = 8..=512;
/// Warps in a thread block of the plain kernels; each warp computes one head of one row.
const PLAIN_WARPS: usize = 4;

/// The kernels of one precision and head size.
#[derive(Debug)]
enum AttentionKernels {
    TensorCores {
        decode: CudaKernel<AttendArgs>,
        /// `None` where a thread block has too little shared memory for this kernel; `decode` then
        /// computes all tiles.
        prefill: Option<CudaKernel<AttendArgs>>,
    },
    Plain(CudaKernel<AttendPlainArgs>),
}

/// Attention over one KV pool.
#[derive(Debug)]
pub(crate) struct CudaAttention {
    kernels: AttentionKernels,
    /// The number of multiprocessors that the stream runs on.
    processors_count: usize,
    states: GrowingMemory,
    arrivals: GrowingMemory,
    heads: HeadShape,
    /// The windows of the model's layers that calls have used so far.
    windows: Vec<Option<usize>>,
    /// The current pass's addresses; `plans` has one entry for each window.
    tables: Option<SentTables>,
    plans: Vec<SentPlan>,
    reallocations_count: u64,
}

/// Addresses of the batch's tables on the device.
#[derive(Clone, Copy, Debug)]
struct SentTables {
    tables: u64,
    /// Tables of the window plane; 0 without it.
    window_tables: u64,
    segments: u64,
    segments_count: u64,
}

impl SentTables {
    /// The tables of a plane.
    fn of_plane(self, plane: KvPlane) -> u64 {
        match plane {
            KvPlane::Window => self.window_tables,
            KvPlane::Blocks | KvPlane::State => self.tables,
        }
    }
}

/// Addresses of a plan's items; `None` for a kernel that this pass does not launch.
#[derive(Clone, Copy, Debug)]
struct SentPlan {
    decode: Option<SentItems>,
    prefill: Option<SentItems>,
}

#[derive(Clone, Copy, Debug)]
struct SentItems {
    items: u64,
    items_count: u64,
    /// Thread blocks that share the items.
    blocks: u32,
}

/// The largest grid, in thread blocks, that runs at once; 0 for a kernel that was not loaded.
#[derive(Clone, Copy, Debug)]
struct GridLimits {
    decode: usize,
    prefill: usize,
}

/// The buffers that a layer's attention reads and writes.
#[derive(Debug)]
pub(crate) struct AttentionBuffers<'a> {
    pub(crate) qkv: &'a CudaRows,
    pub(crate) pool: &'a CudaPool,
    /// One more score of each query head, if the layer has them.
    pub(crate) sinks: Option<&'a CudaVector>,
    pub(crate) out: &'a CudaRows,
}

impl AttentionBuffers<'_> {
    /// Returns the address of the sinks of `query_heads` heads, or 0.
    fn sinks_of(&self, query_heads: usize) -> u64 {
        self.sinks.map_or(0, |sinks| {
            assert_eq!(sinks.width, query_heads, "sinks of query heads");
            sinks.values.address()
        })
    }
}

/// Returns the part of a kernel's name that stands for the pool's format.
pub(crate) fn kernel_name(kv: KvType) -> &'static str {
    match kv {
        KvType::F32 => "f32",
        KvType::Bf16 => "bf16",
        KvType::Fp8E4m3 => "fp8",
        // No kernel has this name, so loading the kernels fails with an error.
        KvType::Int8PerTokenHead => "int8_per_token_head",
    }
}

/// Returns whether the tensor-core kernels take a pool of this shape.
fn is_tensor(shape: &KvPoolShape) -> bool {
    shape.kv != KvType::F32
        && DIMS.contains(&shape.uniform_heads().head_dim)
        && shape.block_tokens.is_power_of_two()
        && BLOCK_TOKENS.contains(&shape.block_tokens)
}

/// Loads the tensor-core kernels for keys and values of this type and heads of `dim` elements.
/// Where a block has 99 KiB of shared memory (compute capabilities 8.6, 8.9 and 12.0), only the
/// `decode` kernel fits for large heads, and for the largest heads only a variant of it that keeps
/// less in shared memory. That kernel then computes every tile and adds in the same order.
fn tensor_kernels(
    images: &KernelImages,
    stream: &CudaStream,
    kv: &str,
    dim: usize,
) -> Result<AttentionKernels, CudaError> {
    let most = stream.device().facts().shared_bytes_max;
    let name = |kind: &str| format!("attend_{kind}_{kv}_{dim}");
    let fits = |name: &String| images.fits(name, most);
    let decode = [name("decode"), name("decode_small")]
        .into_iter()
        .find(fits)
        // If no variant fits, the driver's error names the kernel that is too large.
        .unwrap_or_else(|| name("decode"));
    let prefill = Some(name("prefill")).filter(fits);
    Ok(AttentionKernels::TensorCores {
        decode: images.kernel(&decode)?,
        prefill: prefill
            .map(|name| images.kernel(&name).map(CudaKernel::in_turn))
            .transpose()?,
    })
}

impl CudaAttention {
    pub(crate) fn new(
        images: &KernelImages,
        stream: &CudaStream,
        shape: &KvPoolShape,
    ) -> Result<Self, CudaError> {
        let heads = shape.uniform_heads();
        let dim = heads.head_dim;
        let kv = kernel_name(shape.kv);
        let kernels = if is_tensor(shape) {
            tensor_kernels(images, stream, kv, dim)?
        } else {
            AttentionKernels::Plain(images.kernel(&format!("attend_plain_{kv}"))?)
        };
        Ok(Self {
            kernels,
            processors_count: stream.processors_count() as usize,
            states: GrowingMemory::new(
                stream,
                0,
                "states of attention",
                MemoryContents::Undefined,
            )?,
            arrivals: GrowingMemory::new(
                stream,
                0,
                "counters of attention",
                MemoryContents::Zeros,
            )?,
            heads,
            windows: Vec::new(),
            tables: None,
            plans: Vec::new(),
            reallocations_count: 0,
        })
    }

    /// Counts the moves of both workspaces; a move invalidates recordings.
    pub(crate) fn reallocations_count(&self) -> u64 {
        self.reallocations_count
    }

    /// Begins a pass over another batch. It sends the plans of all known windows now, because
    /// nothing may be sent while a pass is recorded.
    pub(crate) fn begin_pass(
        &mut self,
        batch: &Batch,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        self.plans.clear();
        let tables: Vec<u32> = batch.blocks.iter().map(|block| block.0).collect();
        // Apart, because a recorded pass has the addresses: they must not move with the batch.
        let windows_start = batch.windows_start.unwrap_or(tables.len());
        let (of_blocks, of_windows) = tables.split_at(windows_start);
        let segments = segments(batch);
        let count = [segments.len() as u32];
        self.tables = Some(SentTables {
            tables: messages.send(stream, StepMessage::Tables, of_blocks)?,
            window_tables: if of_windows.is_empty() {
                0
            } else {
                messages.send(stream, StepMessage::WindowTables, of_windows)?
            },
            segments: messages.send(stream, StepMessage::Segments, &segments)?,
            segments_count: messages.send(stream, StepMessage::SegmentsCount, &count)?,
        });
        if matches!(self.kernels, AttentionKernels::TensorCores { .. }) {
            for number in 0..self.windows.len() {
                self.send_plan(batch, number, stream, messages)?;
            }
        }
        Ok(())
    }

    /// Queues one layer's attention over the batch of the last `begin`, launched for `rows` rows.
    pub(crate) fn run(
        &mut self,
        batch: &Batch,
        rows: usize,
        attention: &Attention,
        io: &AttentionBuffers<'_>,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        let sent = self.tables.expect("a pass began");
        if matches!(self.kernels, AttentionKernels::TensorCores { .. })
            && !self.windows.contains(&attention.window)
        {
            // Only the first pass meets a window that `begin` did not know, and that pass is never
            // recorded.
            self.windows.push(attention.window);
            self.send_plan(batch, self.windows.len() - 1, stream, messages)?;
        }
        let number = self
            .windows
            .iter()
            .position(|window| *window == attention.window);
        match &self.kernels {
            AttentionKernels::Plain(kernel) => {
                let args = plain_args(attention, io, sent);
                let heads = rows * self.heads.query_heads;
                let grid = [heads.div_ceil(PLAIN_WARPS) as u32, 1, 1];
                // SAFETY: the batch's tables name blocks of the pool, which the engine checked.
                unsafe { kernel.launch(stream, grid, args) }
            }
            AttentionKernels::TensorCores { decode, prefill } => {
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

    /// Returns for each kernel the number of thread blocks that the stream's multiprocessors hold
    /// at once.
    fn grids(&self) -> GridLimits {
        let all = |kernel: &CudaKernel<AttendArgs>| {
            self.processors_count * kernel.blocks_per_multiprocessor()
        };
        match &self.kernels {
            AttentionKernels::Plain(_) => GridLimits {
                decode: 0,
                prefill: 0,
            },
            AttentionKernels::TensorCores { decode, prefill } => GridLimits {
                decode: all(decode),
                prefill: prefill.as_ref().map_or(0, all),
            },
        }
    }

    /// Sends the plan of the batch for one window, and grows the workspace to the plan's size.
    fn send_plan(
        &mut self,
        batch: &Batch,
        number: usize,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        let heads = self.heads;
        let GridLimits {
            decode: decode_blocks,
            prefill: prefill_blocks,
        } = self.grids();
        let shape = AttentionPlanShape {
            group: heads.query_heads / heads.kv_heads,
            kv_heads: heads.kv_heads,
            window: self.windows[number],
            blocks_count: decode_blocks.max(prefill_blocks),
            has_prefill: prefill_blocks > 0,
        };
        let CudaAttentionPlan {
            decode,
            prefill,
            states_count,
            arrivals_count,
        } = CudaAttentionPlan::new(batch, &shape);
        // A decode step may be recorded and replayed for any other batch, so its grid is always the
        // largest one, whatever the number of items now. All tiles of a decode step go to one
        // kernel: to `prefill` if a group has more query heads than a tile of `decode` has rows,
        // else to `decode`.
        let is_decode_step = batch.segments.len() == batch.rows_count();
        let blocks = |items: &[AttentionItem], most: usize| {
            if is_decode_step {
                most as u32
            } else {
                (items.len() * heads.kv_heads).min(most) as u32
            }
        };
        let decode = SentItems {
            items: messages.send(stream, StepMessage::DecodeItems(number), &decode)?,
            items_count: messages.send(
                stream,
                StepMessage::DecodeItemsCount(number),
                &[decode.len() as u32],
            )?,
            blocks: blocks(&decode, decode_blocks),
        };
        let prefill = match prefill.as_slice() {
            [] => None,
            items => Some(SentItems {
                items: messages.send(stream, StepMessage::PrefillItems(number), items)?,
                items_count: messages.send(
                    stream,
                    StepMessage::PrefillItemsCount(number),
                    &[items.len() as u32],
                )?,
                blocks: blocks(items, prefill_blocks),
            }),
        };
        self.plans.push(SentPlan {
            // A decode step whose tiles all go to `prefill` does not launch the `decode` kernel.
            decode: (prefill.is_none() || !is_decode_step).then_some(decode),
            prefill,
        });
        // The workspace grows before the first launch: a recorded launch keeps the workspace's
        // address.
        let width = heads.head_dim + STATE_HEADER;
        let buffers = [
            (&mut self.states, states_count * width * size_of::<f32>()),
            (&mut self.arrivals, arrivals_count * size_of::<u32>()),
        ];
        for (buffer, bytes) in buffers {
            let before = buffer.memory().at(0);
            let moved = buffer.ensure_bytes(stream, bytes)?.at(0) != before;
            self.reallocations_count += u64::from(moved);
        }
        Ok(())
    }
}

/// Returns the window as the kernels read it; all ones stands for no window.
fn window_of(attention: &Attention) -> u32 {
    let window = attention.window.map(u32::try_from);
    window.and_then(Result::ok).unwrap_or(u32::MAX)
}

/// Returns the cap of scores before they are scaled, and its exponent, as the kernels read them;
/// zeros stand for no cap.
fn cap_of(attention: &Attention) -> (f32, f32) {
    let limit = attention.soft_cap.map(|cap| cap / attention.scale);
    limit.map_or((0.0, 0.0), |limit| (limit, cap_exponent(limit)))
}

/// Returns the factor of a number whose power of two is the exponential in its hyperbolic tangent.
pub(crate) fn cap_exponent(limit: f32) -> f32 {
    2.0 * LOG2_E / limit
}

fn tensor_args(attention: &Attention, io: &AttentionBuffers<'_>, sent: SentTables) -> AttendArgs {
    let shape = io.pool.shape.layer(attention.layer);
    let (cap, cap_exponent) = cap_of(attention);
    let bytes = |elements: usize| (elements * shape.kv.element_bytes()) as u64;
    AttendArgs {
        qkv: io.qkv.address(),
        out: io.out.address(),
        pool: io.pool.plane_address(shape.plane),
        tables: sent.of_plane(shape.plane),
        segments: sent.segments,
        items: 0,
        items_count: 0,
        states: 0,
        arrivals: 0,
        sinks: io.sinks_of(shape.heads.query_heads),
        block_bytes: bytes(shape.block_elements),
        key_bytes: bytes(shape.key_offset(0)),
        value_bytes: bytes(shape.value_offset(0)),
        query_heads: shape.heads.query_heads as u32,
        kv_heads: shape.heads.kv_heads as u32,
        block_shift: shape.block_tokens.trailing_zeros(),
        window: window_of(attention),
        scale: attention.scale * LOG2_E,
        value_scale: 1.0,
        cap,
        cap_exponent,
    }
}

fn plain_args(
    attention: &Attention,
    io: &AttentionBuffers<'_>,
    sent: SentTables,
) -> AttendPlainArgs {
    let shape = io.pool.shape.layer(attention.layer);
    let (cap, cap_exponent) = cap_of(attention);
    AttendPlainArgs {
        qkv: io.qkv.address(),
        out: io.out.address(),
        pool: io.pool.plane_address(shape.plane),
        tables: sent.of_plane(shape.plane),
        segments: sent.segments,
        segments_count: sent.segments_count,
        sinks: io.sinks_of(shape.heads.query_heads),
        block_elements: shape.block_elements as u64,
        key_elements: shape.key_offset(0) as u64,
        value_elements: shape.value_offset(0) as u64,
        query_heads: shape.heads.query_heads as u32,
        kv_heads: shape.heads.kv_heads as u32,
        head_dim: shape.heads.head_dim as u32,
        block_tokens: shape.block_tokens as u32,
        window: window_of(attention),
        scale: attention.scale * LOG2_E,
        cap,
        cap_exponent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::every_kernel;

    /// A multiprocessor holds three thread blocks of the first kernel, two of the second and one of
    /// the third.
    #[test]
    fn attention_grids_follow_each_kernels_occupancy() {
        let Some(device) = every_kernel::stand_in_device() else {
            return;
        };
        let images = KernelImages::load(&device).expect("code");
        let stream = CudaStream::new(&device).expect("a stream");
        let grids = |kv, head_dim| {
            let heads = HeadShape {
                query_heads: 4,
                kv_heads: 1,
                head_dim,
            };
            let shape = KvPoolShape::uniform(heads, 1, 16, 2, kv);
            let attention = CudaAttention::new(&images, &stream, &shape).expect("kernels");
            attention.grids()
        };
        let all = stream.processors_count() as usize;
        assert!(all > 1);
        assert_eq!(grids(KvType::Fp8E4m3, 64).decode, 3 * all);
        assert_eq!(grids(KvType::Bf16, 128).decode, 2 * all);
        assert_eq!(grids(KvType::Bf16, 256).prefill, all);
    }
}
