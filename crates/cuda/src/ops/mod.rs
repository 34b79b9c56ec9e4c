//! `Ops` on a GPU.
//!
//! Owns: one engine's stream, its kernels, and its copies to and from the device. Never: waits for
//! the device, except when the host fetches a pass's results. Invariant: one engine queues all its
//! work in one stream, so that it runs in the order of the calls; the host's messages stay until
//! the device has read them (see [`StepMessages`]). While a decode step is recorded, nothing is
//! sent and no memory grows.

mod adapters;
mod arithmetic;
mod draw;
mod experts;
mod host;
mod kernels;
mod norms;
mod pass;
mod products;

use crate::adapters::{CudaAdapter, CudaAdapterLoader, CudaAdapters};
use crate::args::{DeviceAddress, EmbedArgs, GatherArgs, RotateArgs};
use crate::attention::{AttentionBuffers, CudaAttention};
use crate::blocks::{CudaBlocks, PoolRegions};
use crate::buffers::{CudaPool, CudaRows};
use crate::driver::{CudaDevice, CudaStream, DeviceMemory, PinnedMemory};
use crate::error::CudaError;
use crate::experts::CudaExperts;
use crate::idle::DeviceIdleTimer;
use crate::images::{KernelImages, SOURCES_HASH};
use crate::matmul::CudaMatmul;
use crate::options::CudaOptions;
use crate::pack::{CudaMatrix, CudaRotary, CudaTable, CudaVector, CudaWeightLoader, WeightPart};
use crate::recording::{GraphUse, RecordedStep, StepRecordings};
use crate::sample::CudaSampling;
use crate::step_messages::{StepMessage, StepMessages};
use arithmetic::arithmetic_name;
use cleave_domain::{BlockIndex, DeviceId, KvPlane, TokenId};
use cleave_engine::ops::{
    AdaptedStack, AdapterGroup, Attention, AttentionIo, Batch, BufferRole, DrawRule, Experts,
    GatedIo, Head, HeadShape, KvPoolShape, KvType, MaskedDraw, Norm, Ops, PassMode, PassPurpose,
    PoolLayer, Precision, QkNorms, ResidualIo,
};
use cleave_engine::{BlockSpan, DeviceBlocks, EngineError};
use host::HOST_COPY_BYTES;
use kernels::OpsKernels;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

/// Warps of a thread block in kernels with one head for each warp.
const HEAD_WARPS: usize = 4;

/// The operations of one engine on a GPU.
#[derive(Debug)]
pub struct CudaOps {
    options: CudaOptions,
    images: KernelImages,
    kernels: OpsKernels,
    attention: RefCell<Option<CudaAttention>>,
    matmul: CudaMatmul,
    experts: CudaExperts,
    adapters: CudaAdapters,
    sampling: CudaSampling,
    stream: CudaStream,
    idle: DeviceIdleTimer,
    messages: StepMessages,
    recordings: StepRecordings,
    step: StepAddresses,
    /// Pinned memory for copies besides a step's own messages.
    staging: RefCell<PinnedMemory>,
    /// Tokens of a block of the pool, once there is one.
    block_tokens: Cell<Option<usize>>,
    /// Rows of the smallest buffer: recordings launch no more.
    rows_max: Cell<usize>,
}

/// Addresses of a batch's description, and the handling of its pass.
#[derive(Clone, Copy, Debug, Default)]
struct StepAddresses {
    tokens: DeviceAddress,
    positions: DeviceAddress,
    row_slots: DeviceAddress,
    /// The same in the window plane; 0 without it.
    window_slots: DeviceAddress,
    /// The kind of a decode step, and its handling.
    decode: Option<(RecordedStep, GraphUse)>,
}

impl CudaOps {
    /// Loads kernels, and makes a stream.
    ///
    /// # Errors
    /// If there is no code for this GPU, or no memory.
    pub fn new(device: &Arc<CudaDevice>, options: &CudaOptions) -> Result<Self, CudaError> {
        let images = KernelImages::load(device)?;
        let kernels = OpsKernels::load(&images, options)?;
        let stream = CudaStream::with_priority_and_share(device, options.priority, options.share)?;
        Ok(Self {
            options: *options,
            kernels,
            attention: RefCell::new(None),
            matmul: CudaMatmul::new(&images, &stream, options)?,
            experts: CudaExperts::new(&images, &stream, options.precision)?,
            adapters: CudaAdapters::new(&images, &stream, options.precision)?,
            sampling: CudaSampling::new(&images, &stream)?,
            images,
            idle: DeviceIdleTimer::new(&stream)?,
            messages: StepMessages::new(device)?,
            recordings: StepRecordings::default(),
            step: StepAddresses::default(),
            staging: RefCell::new(PinnedMemory::new(device, HOST_COPY_BYTES)?),
            block_tokens: Cell::new(None),
            rows_max: Cell::new(usize::MAX),
            stream,
        })
    }

    pub fn hardware(&self) -> &Arc<CudaDevice> {
        self.stream.device()
    }
}

impl Drop for CudaOps {
    fn drop(&mut self) {
        // Passes in flight may use memory and code that are freed before the stream.
        let _ = self.stream.bind().and_then(|()| self.stream.synchronize());
    }
}

impl Ops for CudaOps {
    type Pack = CudaWeightLoader;
    type Adapters = CudaAdapterLoader;
    type Rows = CudaRows;
    type Pool = CudaPool;

    fn device(&self) -> String {
        let facts = self.hardware().facts();
        let wgmma = if self.matmul.has_wgmma() {
            ", wgmma"
        } else {
            ""
        };
        let (own, all) = (self.stream.processors_count(), facts.processors_count);
        let part = match self.options.share {
            Some(_) => format!(", {own} of {all} multiprocessors"),
            None => String::new(),
        };
        let precision = self.options.precision.name();
        format!("{}, {precision}{wgmma}{part}", facts.name)
    }

    fn kv_type(&self) -> KvType {
        self.options.kv
    }

    fn device_id(&self) -> Option<DeviceId> {
        let uuid = self.hardware().facts().uuid;
        let name: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        // Engines with a share do not compete for multiprocessors, so they report no common device.
        let takes_all = self.options.share.is_none();
        takes_all.then(|| DeviceId(format!("gpu-{name}")))
    }

    fn arithmetic(&self) -> String {
        arithmetic_name(
            self.hardware().facts().capability,
            SOURCES_HASH,
            self.options.products,
            self.matmul.has_wgmma(),
        )
    }

    fn rows(
        &self,
        rows_max: usize,
        width: usize,
        holds: BufferRole,
    ) -> Result<CudaRows, EngineError> {
        let stored = match holds {
            BufferRole::Residual => Precision::F32,
            BufferRole::Activations => self.options.precision,
        };
        let bytes = rows_max * width * stored.element_bytes();
        let memory = DeviceMemory::new(self.hardware(), bytes, "activations")?;
        self.rows_max.set(self.rows_max.get().min(rows_max));
        self.stream.zero(&memory, 0..bytes)?;
        Ok(CudaRows {
            memory,
            width,
            stored,
        })
    }

    fn pool(&self, shape: KvPoolShape) -> Result<CudaPool, EngineError> {
        assert_eq!(shape.kv, self.options.kv, "a pool of another format");
        let slots = shape.blocks_count.checked_mul(shape.block_tokens);
        if slots.is_none_or(|slots| slots >= u32::MAX as usize) {
            let most = u32::MAX as usize / shape.block_tokens;
            return Err(EngineError::Plan(format!(
                "{} blocks of {} tokens: at most {most} can be addressed",
                shape.blocks_count, shape.block_tokens
            )));
        }
        let regions = PoolRegions::of(&shape);
        // A size beyond all memory stands for an overflow, so that the driver refuses it.
        let bytes = regions.map_or(usize::MAX / 2, |regions| regions.bytes());
        let memory = DeviceMemory::new(self.hardware(), bytes, "the KV cache")?;
        self.stream.zero(&memory, 0..bytes)?;
        // Other workers write into the pool through other streams, which do not wait for the zeros.
        self.stream.synchronize()?;
        let attending = CudaAttention::new(&self.images, &self.stream, &shape)?;
        self.attention.replace(Some(attending));
        self.block_tokens.set(Some(shape.block_tokens));
        Ok(CudaPool {
            memory: Arc::new(memory),
            shape,
            regions: regions.expect("no memory is as large as an overflow"),
        })
    }

    fn begin(
        &mut self,
        batch: &Batch,
        purpose: PassPurpose<'_>,
        adapters: &[AdapterGroup<CudaAdapter>],
    ) -> Result<PassMode, EngineError> {
        self.begin_pass(batch, purpose, adapters)
    }

    fn embed(
        &mut self,
        batch: &Batch,
        table: &CudaTable,
        factor: f32,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        assert_eq!((out.width, out.stored), (table.width, Precision::F32));
        let rows = self.launched(batch.rows_count());
        out.check_rows(rows);
        let args = EmbedArgs {
            table: table.rows.address(),
            tokens: self.step.tokens,
            drawn: self.sampling.tokens(),
            out: out.address(),
            width: table.width as u32,
            vocab: table.vocab as u32,
            factor,
            padding: 0,
        };
        let grid = [rows as u32, 1, 1];
        // SAFETY: the kernel reads no row beyond the vocabulary; fed rows name rows of the last
        // draw.
        unsafe { self.kernels.embed.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    fn norm(
        &mut self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.launch_norm(norm, rows, x, None, out)
    }

    fn add_norm(
        &mut self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        sum: ResidualIo<'_, CudaRows>,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.launch_norm(norm, rows, sum.residual, Some(sum.delta), out)
    }

    fn norm_add(
        &mut self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        x: &mut CudaRows,
        residual: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.add_normed(norm, rows, x, residual)
    }

    fn add(
        &mut self,
        rows: usize,
        delta: &CudaRows,
        residual: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.launch_add(rows, delta, residual)
    }

    fn activations<'a>(
        &mut self,
        rows: usize,
        residual: &'a CudaRows,
        scratch: &'a mut CudaRows,
    ) -> Result<&'a CudaRows, EngineError> {
        self.round_rows(rows, residual, scratch)
    }

    fn matmul(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.product(matrix, rows, x, out)
    }

    fn qk_norm(
        &mut self,
        norms: &QkNorms<'_, CudaVector>,
        heads: HeadShape,
        rows: usize,
        qkv: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.norm_queries_and_keys(norms, heads, rows, qkv)
    }

    fn rotate_store(
        &mut self,
        batch: &Batch,
        rotary: &CudaRotary,
        qkv: &mut CudaRows,
        pool: PoolLayer<'_, CudaPool>,
    ) -> Result<(), EngineError> {
        let PoolLayer { pool, layer } = pool;
        let shape = pool.shape.layer(layer);
        let heads = shape.heads;
        assert_eq!(
            (qkv.width, qkv.stored),
            (heads.qkv_width(), self.options.precision)
        );
        assert!(rotary.half * 2 <= heads.head_dim, "pairs of a head");
        let rows = self.launched(batch.rows_count());
        qkv.check_rows(rows);
        let args = RotateArgs {
            qkv: qkv.address(),
            cos: rotary.cos.address(),
            sin: rotary.sin.address(),
            query_factors: rotary.query_factors.as_ref().map_or(0, WeightPart::address),
            positions: self.step.positions,
            row_slots: match shape.plane {
                KvPlane::Window => self.step.window_slots,
                _ => self.step.row_slots,
            },
            pool: pool.plane_address(shape.plane),
            block_elements: shape.block_elements as u64,
            key_offset: shape.key_offset(0) as u64,
            value_offset: shape.value_offset(0) as u64,
            query_heads: heads.query_heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            half: rotary.half as u32,
            block_tokens: shape.block_tokens as u32,
            padding: 0,
        };
        let blocks = (heads.query_heads + 2 * heads.kv_heads).div_ceil(HEAD_WARPS);
        let grid = [rows as u32, blocks as u32, 1];
        // SAFETY: as in `launch_norm`; positions and blocks are those of a plan that the engine
        // checked.
        unsafe { self.kernels.rotate.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    fn attend(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: AttentionIo<'_, Self>,
    ) -> Result<(), EngineError> {
        let AttentionIo {
            qkv,
            pool,
            sinks,
            out,
        } = io;
        let heads = pool.shape.layer(attention.layer).heads;
        assert_eq!(
            (qkv.width, qkv.stored),
            (heads.qkv_width(), self.options.precision)
        );
        assert_eq!(
            (out.width, out.stored),
            (heads.query_width(), self.options.precision)
        );
        let rows = self.launched(batch.rows_count());
        qkv.check_rows(rows);
        out.check_rows(rows);
        let attending = self.attention.get_mut().as_mut();
        let attending = attending.expect("there is a pool");
        let io = AttentionBuffers {
            qkv,
            pool,
            sinks,
            out,
        };
        Ok(attending.run(
            batch,
            rows,
            attention,
            &io,
            &self.stream,
            &mut self.messages,
        )?)
    }

    fn gated(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        to: GatedIo<'_, CudaRows>,
    ) -> Result<(), EngineError> {
        self.gated_product(matrix, rows, x, to)
    }

    fn regroup(&mut self, adapters: &[AdapterGroup<CudaAdapter>]) -> Result<(), EngineError> {
        let (stream, messages) = (&self.stream, &mut self.messages);
        Ok(self.adapters.send(adapters, None, stream, messages)?)
    }

    fn is_adapted(&self, stack: &AdaptedStack<'_, CudaAdapter>) -> bool {
        self.adapters.is_adapted(stack)
    }

    fn adapt(
        &mut self,
        stack: &AdaptedStack<'_, CudaAdapter>,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.add_adapters(stack, x, out)
    }

    fn adapted_gated(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        to: GatedIo<'_, CudaRows>,
        stack: &AdaptedStack<'_, CudaAdapter>,
    ) -> Result<(), EngineError> {
        self.gated_with_adapters(matrix, rows, x, to, stack)
    }

    fn experts(
        &mut self,
        experts: &Experts<'_, CudaWeightLoader>,
        rows: usize,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.mixture(experts, rows, x, out)
    }

    fn gather(
        &mut self,
        indices: &[u32],
        from: &CudaRows,
        to: &mut CudaRows,
    ) -> Result<(), EngineError> {
        assert_eq!((from.width, from.stored), (to.width, to.stored));
        to.check_rows(indices.len());
        from.check_rows(indices.iter().max().map_or(0, |most| *most as usize + 1));
        let args = GatherArgs {
            from: from.address(),
            to: to.address(),
            indices: self
                .messages
                .send(&self.stream, StepMessage::Indices, indices)?,
            units: (from.row_bytes() / 2) as u32,
            padding: 0,
        };
        // SAFETY: as in `launch_norm`; the indices are rows of `from`.
        unsafe {
            let grid = [indices.len() as u32, 1, 1];
            self.kernels.gather.launch(&self.stream, grid, args)
        }?;
        Ok(())
    }

    fn logits(
        &mut self,
        head: Head<'_, CudaMatrix>,
        rows: usize,
        x: &CudaRows,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        self.fetch_logits(head, rows, x, out)
    }

    fn read_rows(
        &mut self,
        x: &CudaRows,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let rows = out.len() / x.width;
        assert_eq!(out.len(), rows * x.width);
        x.check_rows(first + rows);
        self.fetch_values(x, first * x.row_bytes(), out)
    }

    fn can_draw(&self) -> bool {
        true
    }

    fn queue_draw(
        &mut self,
        head: Head<'_, CudaMatrix>,
        rules: &[Option<DrawRule>],
        x: &CudaRows,
    ) -> Result<(), EngineError> {
        self.queue_head_and_draw(head, rules, x)
    }

    fn queue_masked_draw(&mut self, draws: &[MaskedDraw<'_>]) -> Result<(), EngineError> {
        self.queue_draws_under_masks(draws)
    }

    fn abandon_pass(&mut self) {
        self.end_failed_recording();
        // The pass must end before another sequence may fill its blocks through another stream. Its
        // error was reported already, or the next call reports it.
        let _ = self.stream.synchronize();
    }

    fn fetch_drawn(&mut self, tokens: &mut Vec<Option<TokenId>>) -> Result<(), EngineError> {
        self.sampling.fetch_tokens(&self.stream, tokens)?;
        self.idle.pass_fetched();
        Ok(())
    }

    fn idle_before_step(&self) -> Option<Duration> {
        self.idle.last()
    }

    fn is_draw_ready(&mut self) -> bool {
        self.sampling.is_copy_done(&self.stream)
    }

    fn blocks(&self, pool: &CudaPool) -> Option<Arc<dyn DeviceBlocks>> {
        let made = CudaBlocks::new(&self.images, self.hardware(), pool);
        made.inspect_err(|error| tracing::warn!(%error, "KV blocks can be copied only between steps, because their own streams cannot be made"))
            .ok()
            .map(|blocks| Arc::new(blocks) as Arc<dyn DeviceBlocks>)
    }

    fn read_block(
        &self,
        pool: &CudaPool,
        span: BlockSpan,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        let range = pool.regions.expect_range(&span);
        self.fetch(&pool.memory, range.start, out)
    }

    fn write_block(
        &mut self,
        pool: &mut CudaPool,
        span: BlockSpan,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        let range = pool.regions.expect_range(&span);
        self.put(&pool.memory, range.start, bytes)
    }

    fn copy_block(
        &mut self,
        pool: &mut CudaPool,
        plane: KvPlane,
        from: BlockIndex,
        to: BlockIndex,
    ) -> Result<(), EngineError> {
        self.stream.bind()?;
        let [from, to] = [from, to].map(|block| pool.regions.whole(plane, block));
        let (source, target) = ((&*pool.memory, from.start), (&*pool.memory, to.start));
        Ok(self.stream.copy_within(source, target, from.len())?)
    }

    fn clear_state(&mut self, pool: &mut CudaPool, slot: BlockIndex) -> Result<(), EngineError> {
        self.stream.bind()?;
        let slot = pool.regions.whole(KvPlane::State, slot);
        Ok(self.stream.zero(&pool.memory, slot)?)
    }
}
