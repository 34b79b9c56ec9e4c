//! `Ops` on a GPU.
//!
//! Owns: one engine's stream, its kernels, and what it sends and fetches.
//! Never: waits in the middle of a pass, nor at its end: only where the host asks for what came of it.
//! Invariant: everything of one engine is queued in one stream, so that it happens in the order of the calls;
//! what the host wrote for it stays until it is read (see [`Inbox`]). While a decode step is recorded nothing is sent,
//! and nothing grows.

mod arithmetic;
mod host;
mod kernels;
mod pass;

use crate::args::{Address, EmbedArgs, GateArgs, GatherArgs, HeadNormArgs, NormArgs, RotateArgs};
use crate::attention::{Attending, Io};
use crate::blocks::{self, CudaBlocks};
use crate::buffers::{CudaPool, CudaRows};
use crate::driver::{Device, DeviceMemory, PinnedMemory, Stream};
use crate::error::CudaError;
use crate::idle::Idle;
use crate::images::{Images, SOURCES_HASH};
use crate::inbox::{Inbox, Place};
use crate::matmul::{Multiplying, Product, Target};
use crate::options::CudaOptions;
use crate::pack::{CudaMatrix, CudaPack, CudaRotary, CudaTable, CudaVector};
use crate::recording::{Recordings, Way};
use crate::sample::Sampling;
use arithmetic::arithmetic_name;
use cleave_domain::{BlockIndex, DeviceId, TokenId};
use cleave_engine::ops::{
    Attention, AttentionIo, Batch, DrawRule, Gated, HeadNorms, HeadShape, Holds, KvType, LayerOf,
    Norm, Ops, Pass, PoolShape, Precision, Residual, Wanted,
};
use cleave_engine::{DeviceBlocks, EngineError};
use host::PIECE_BYTES;
use kernels::Kernels;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

/// Warps of a block where each has one head.
const HEAD_WARPS: usize = 4;
/// Elements of a row that one block of the gate takes, by eights and by ones.
const GATE_ELEMENTS: (usize, usize) = (2048, 256);

/// One engine's share of a GPU.
#[derive(Debug)]
pub struct CudaOps {
    options: CudaOptions,
    images: Images,
    kernels: Kernels,
    attending: RefCell<Option<Attending>>,
    multiplying: Multiplying,
    sampling: Sampling,
    stream: Stream,
    idle: Idle,
    inbox: Inbox,
    recordings: Recordings,
    /// Of the pass at hand.
    step: StepAddresses,
    /// For what comes to the host and goes from it, outside a step's own messages.
    piece: RefCell<PinnedMemory>,
    pool_shape: RefCell<Option<PoolShape>>,
    /// Rows that the smallest buffer has: recordings launch no more.
    rows_max: Cell<usize>,
}

/// Where a batch's rows are described, and how the pass goes.
#[derive(Clone, Copy, Debug, Default)]
struct StepAddresses {
    tokens: Address,
    positions: Address,
    row_slots: Address,
    /// A decode step of that bucket, with what is done with it.
    decode: Option<(usize, Way)>,
}

impl CudaOps {
    /// Loads kernels, and makes a stream.
    ///
    /// # Errors
    /// If there is no code for this GPU, or no memory.
    pub fn new(device: &Arc<Device>, options: &CudaOptions) -> Result<Self, CudaError> {
        let images = Images::load(device)?;
        let kernels = Kernels::load(&images, options)?;
        let stream = Stream::placed(device, (options.priority, options.share))?;
        Ok(Self {
            options: *options,
            kernels,
            attending: RefCell::new(None),
            multiplying: Multiplying::new(&images, &stream, options)?,
            sampling: Sampling::new(&images, &stream)?,
            images,
            idle: Idle::new(&stream)?,
            inbox: Inbox::new(device)?,
            recordings: Recordings::default(),
            step: StepAddresses::default(),
            piece: RefCell::new(PinnedMemory::new(device, PIECE_BYTES)?),
            pool_shape: RefCell::new(None),
            rows_max: Cell::new(usize::MAX),
            stream,
        })
    }

    /// The device.
    pub fn hardware(&self) -> &Arc<Device> {
        self.stream.device()
    }

    fn add_norm(
        &mut self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        (residual, delta): (&CudaRows, Option<&CudaRows>),
        out: &CudaRows,
    ) -> Result<(), EngineError> {
        let rows = self.launched(rows);
        let width = residual.width;
        assert_eq!((norm.weight.width, out.width), (width, width));
        assert_eq!(residual.stored, Precision::F32, "a residual stream");
        assert_eq!(out.stored, self.options.precision);
        residual.check_rows(rows);
        out.check_rows(rows);
        if let Some(delta) = delta {
            assert_eq!((delta.width, delta.stored), (width, self.options.precision));
            delta.check_rows(rows);
        }
        let args = NormArgs {
            residual: residual.address(),
            delta: delta.map_or(0, CudaRows::address),
            weight: norm.weight.values.address(),
            out: out.address(),
            width: width as u32,
            epsilon: norm.epsilon,
        };
        // SAFETY: the rows are within the buffers, as was just checked, which outlive the stream's work.
        unsafe {
            self.kernels
                .norm
                .launch(&self.stream, [rows as u32, 1, 1], args)
        }?;
        Ok(())
    }
}

impl Drop for CudaOps {
    fn drop(&mut self) {
        // Passes may be under way, in memory and code that are given back before the stream is.
        let _ = self.stream.bind().and_then(|()| self.stream.synchronize());
    }
}

impl Ops for CudaOps {
    type Pack = CudaPack;
    type Rows = CudaRows;
    type Pool = CudaPool;

    fn device(&self) -> String {
        let facts = self.hardware().facts();
        let wgmma = match self.multiplying.has_wgmma() {
            true => ", wgmma",
            false => "",
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
        // One with multiprocessors of its own does not take those of others.
        let takes_all = self.options.share.is_none();
        takes_all.then(|| DeviceId(format!("gpu-{name}")))
    }

    fn arithmetic(&self) -> String {
        let products = (self.options.products, self.multiplying.has_wgmma());
        arithmetic_name(self.hardware().facts().capability, SOURCES_HASH, products)
    }

    fn rows(&self, rows_max: usize, width: usize, holds: Holds) -> Result<CudaRows, EngineError> {
        let stored = match holds {
            Holds::Residual => Precision::F32,
            Holds::Activations => self.options.precision,
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

    fn pool(&self, shape: PoolShape) -> Result<CudaPool, EngineError> {
        assert_eq!(shape.kv, self.options.kv, "a pool of another format");
        let slots = shape.blocks_count.checked_mul(shape.block_tokens);
        if slots.is_none_or(|slots| slots >= u32::MAX as usize) {
            let most = u32::MAX as usize / shape.block_tokens;
            return Err(EngineError::Plan(format!(
                "{} blocks of {} tokens: at most {most} can be addressed",
                shape.blocks_count, shape.block_tokens
            )));
        }
        let bytes = blocks::bytes_of(shape.blocks_count, shape.block_bytes());
        let memory = DeviceMemory::new(self.hardware(), bytes, "the KV cache")?;
        self.stream.zero(&memory, 0..bytes)?;
        // Whoever writes into it from elsewhere does so in another stream.
        self.stream.synchronize()?;
        let attending = Attending::new(&self.images, &self.stream, &shape)?;
        self.attending.replace(Some(attending));
        self.pool_shape.replace(Some(shape));
        let memory = Arc::new(memory);
        Ok(CudaPool { memory, shape })
    }

    fn begin(&mut self, batch: &Batch, wanted: Wanted<'_>) -> Result<Pass, EngineError> {
        self.begin_pass(batch, wanted)
    }

    fn embed(
        &mut self,
        batch: &Batch,
        table: &CudaTable,
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
        };
        let grid = [rows as u32, 1, 1];
        // SAFETY: the kernel reads no row beyond the vocabulary; rows that are fed name ones that were drawn.
        unsafe { self.kernels.embed.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    fn rms_norm(
        &mut self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.add_norm(norm, rows, (x, None), out)
    }

    fn add_rms_norm(
        &mut self,
        norm: &Norm<'_, CudaVector>,
        rows: usize,
        sum: Residual<'_, CudaRows>,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        self.add_norm(norm, rows, (sum.residual, Some(sum.delta)), out)
    }

    fn matmul(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<(), EngineError> {
        assert_eq!(
            (out.width, out.stored),
            (matrix.columns, self.options.precision)
        );
        let bucket = self.launched(rows);
        out.check_rows(bucket);
        let target = Target {
            address: out.address(),
            stored: out.stored,
        };
        let product = Product {
            matrix,
            rows,
            bucket,
            x,
        };
        let queue = (&self.stream, &mut self.inbox);
        Ok(self.multiplying.run(&product, target, queue)?)
    }

    fn head_norm(
        &mut self,
        norms: &HeadNorms<'_, CudaVector>,
        heads: HeadShape,
        rows: usize,
        qkv: &mut CudaRows,
    ) -> Result<(), EngineError> {
        assert_eq!(
            (qkv.width, qkv.stored),
            (heads.qkv_width(), self.options.precision)
        );
        assert_eq!(norms.query.width, heads.head_dim);
        assert_eq!(norms.key.width, heads.head_dim);
        let rows = self.launched(rows);
        qkv.check_rows(rows);
        let args = HeadNormArgs {
            qkv: qkv.address(),
            query_weight: norms.query.values.address(),
            key_weight: norms.key.values.address(),
            query_heads: heads.query_heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            epsilon: norms.epsilon,
        };
        let blocks = (heads.query_heads + heads.kv_heads).div_ceil(HEAD_WARPS);
        let grid = [rows as u32, blocks as u32, 1];
        // SAFETY: as in `add_norm`.
        unsafe { self.kernels.head_norm.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    fn rotate_store(
        &mut self,
        batch: &Batch,
        rotary: &CudaRotary,
        qkv: &mut CudaRows,
        pool: LayerOf<'_, CudaPool>,
    ) -> Result<(), EngineError> {
        let LayerOf { pool, layer } = pool;
        let shape = &pool.shape;
        let heads = shape.heads;
        assert_eq!(
            (qkv.width, qkv.stored),
            (heads.qkv_width(), self.options.precision)
        );
        assert_eq!(rotary.half * 2, heads.head_dim);
        let rows = self.launched(batch.rows_count());
        qkv.check_rows(rows);
        let args = RotateArgs {
            qkv: qkv.address(),
            cos: rotary.cos.address(),
            sin: rotary.sin.address(),
            positions: self.step.positions,
            row_slots: self.step.row_slots,
            pool: pool.memory.at(0),
            block_elements: shape.block_elements() as u64,
            key_offset: shape.key_offset(layer, 0) as u64,
            value_offset: shape.value_offset(layer, 0) as u64,
            query_heads: heads.query_heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            block_tokens: shape.block_tokens as u32,
        };
        let blocks = (heads.query_heads + 2 * heads.kv_heads).div_ceil(HEAD_WARPS);
        let grid = [rows as u32, blocks as u32, 1];
        // SAFETY: as in `add_norm`; positions and blocks are those of a plan that the engine checked.
        unsafe { self.kernels.rotate.launch(&self.stream, grid, args) }?;
        Ok(())
    }

    fn attend(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: AttentionIo<'_, Self>,
    ) -> Result<(), EngineError> {
        let AttentionIo { qkv, pool, out } = io;
        let heads = pool.shape.heads;
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
        let attending = self.attending.get_mut().as_mut();
        let attending = attending.expect("there is a pool");
        let io = Io { qkv, pool, out };
        let queue = (&self.stream, &mut self.inbox);
        Ok(attending.run((batch, rows), attention, &io, queue)?)
    }

    fn gated(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        Gated { gate_up, out }: Gated<'_, CudaRows>,
    ) -> Result<(), EngineError> {
        self.matmul(matrix, rows, x, gate_up)?;
        let width = out.width;
        assert_eq!(
            (gate_up.width, gate_up.stored),
            (2 * width, self.options.precision)
        );
        assert_eq!(out.stored, self.options.precision);
        let rows = self.launched(rows);
        gate_up.check_rows(rows);
        out.check_rows(rows);
        let args = GateArgs {
            gate_up: gate_up.address(),
            out: out.address(),
            width: width as u32,
            padding: 0,
        };
        let each = match width.is_multiple_of(8) {
            true => GATE_ELEMENTS.0,
            false => GATE_ELEMENTS.1,
        };
        let grid = [rows as u32, width.div_ceil(each) as u32, 1];
        // SAFETY: as in `add_norm`.
        unsafe { self.kernels.gate.launch(&self.stream, grid, args) }?;
        Ok(())
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
            indices: self.inbox.send(&self.stream, Place::Indices, indices)?,
            units: (from.row_bytes() / 2) as u32,
            padding: 0,
        };
        // SAFETY: as in `add_norm`; the indices are rows of `from`.
        unsafe {
            let grid = [indices.len() as u32, 1, 1];
            self.kernels.gather.launch(&self.stream, grid, args)
        }?;
        Ok(())
    }

    fn logits(
        &mut self,
        head: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        assert_eq!(out.len(), rows * head.columns);
        let product = Product {
            matrix: head,
            rows,
            bucket: rows,
            x,
        };
        let target = self.sampling.room(&self.stream, rows, head.columns)?;
        let queue = (&self.stream, &mut self.inbox);
        self.multiplying.run(&product, target, queue)?;
        let mut piece = self.piece.borrow_mut();
        let each = PIECE_BYTES / size_of::<f32>();
        for (index, chunk) in out.chunks_mut(each).enumerate() {
            let bytes = size_of_val(chunk);
            let from = (self.sampling.logits(), index * PIECE_BYTES);
            self.stream.copy_out(from, (&mut piece, 0..bytes))?;
            self.stream.synchronize()?;
            let words = piece.as_slice()[..bytes].as_chunks::<4>().0;
            for (value, word) in chunk.iter_mut().zip(words) {
                *value = f32::from_le_bytes(*word);
            }
        }
        Ok(())
    }

    fn draws(&self) -> bool {
        true
    }

    fn draw(
        &mut self,
        head: &CudaMatrix,
        rules: &[DrawRule],
        x: &CudaRows,
    ) -> Result<(), EngineError> {
        let rows = rules.len();
        if rows == 0 {
            self.sampling.bring(0, &self.stream)?;
            return Ok(self.idle.draws(&self.stream)?);
        }
        let decode = self.step.decode.take();
        let bucket = match decode {
            Some((bucket, _)) => bucket,
            None => {
                let queue = (&self.stream, &mut self.inbox);
                self.sampling.send(rules, rows, queue)?;
                rows
            }
        };
        if !matches!(decode, Some((_, Way::Replay))) {
            let target = self.sampling.room(&self.stream, bucket, head.columns)?;
            let product = Product {
                matrix: head,
                rows,
                bucket,
                x,
            };
            let queue = (&self.stream, &mut self.inbox);
            let queued = self.multiplying.run(&product, target, queue);
            let queued =
                queued.and_then(|()| self.sampling.queue(bucket, head.columns, &self.stream));
            if let Some((_, Way::Record)) = decode {
                let graph = self.stream.end_recording();
                queued?;
                self.recordings.keep(bucket, graph?, self.moves_count());
            } else {
                queued?;
            }
        }
        if let Some((_, Way::Record | Way::Replay)) = decode {
            self.stream.replay(self.recordings.graph(bucket))?;
        }
        self.sampling.bring(rows, &self.stream)?;
        Ok(self.idle.draws(&self.stream)?)
    }

    fn abandon(&mut self) {
        self.end_failed_recording();
        // The blocks that it writes may be another's soon, who has them filled beside this stream. What fails here was told
        // already, or will be told again.
        let _ = self.stream.synchronize();
    }

    fn drawn(&mut self, tokens: &mut Vec<Option<TokenId>>) -> Result<(), EngineError> {
        self.sampling.fetch(&self.stream, tokens)?;
        self.idle.fetched();
        Ok(())
    }

    fn idle(&self) -> Option<Duration> {
        self.idle.last()
    }

    fn is_drawn(&mut self) -> bool {
        self.sampling.is_fetched(&self.stream)
    }

    fn blocks(&self, pool: &CudaPool) -> Option<Arc<dyn DeviceBlocks>> {
        let made = CudaBlocks::new(&self.images, self.hardware(), pool);
        made.inspect_err(|error| tracing::warn!("blocks are copied between steps: {error}"))
            .ok()
            .map(|blocks| Arc::new(blocks) as Arc<dyn DeviceBlocks>)
    }

    fn read_block(
        &self,
        pool: &CudaPool,
        block: BlockIndex,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        let first = block.0 as usize * pool.shape.block_bytes();
        self.fetch((&pool.memory, first + offset), out)
    }

    fn write_block(
        &mut self,
        pool: &mut CudaPool,
        block: BlockIndex,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        let first = block.0 as usize * pool.shape.block_bytes();
        self.put((&pool.memory, first + offset), bytes)
    }

    fn copy_block(
        &mut self,
        pool: &mut CudaPool,
        from: BlockIndex,
        to: BlockIndex,
    ) -> Result<(), EngineError> {
        self.stream.bind()?;
        let bytes = pool.shape.block_bytes();
        let place = |block: BlockIndex| (&*pool.memory, block.0 as usize * bytes);
        Ok(self.stream.copy_within(place(from), place(to), bytes)?)
    }
}
