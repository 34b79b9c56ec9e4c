//! `Ops` on the processor.
//!
//! Owns: the division of each operation among threads, and its intermediate buffers.
//! Never: does arithmetic itself; see `kernel`.
//! Invariant: the division changes no bit of a result. After the first pass of a given size no
//! operation allocates.

mod adapted_experts;
mod adapters;
mod attention;
mod experts;
mod product;
mod router;
mod sorted_rows;

use self::adapters::CpuAdapter;
use self::adapters::{AdapterScratch, AdapterSum};
use self::experts::ExpertsScratch;
use self::product::{ProductGate, RowsSource};
use crate::affinity;
use crate::buffers::{CpuPool, CpuRows};
use crate::grid::run_range;
use crate::options::{CpuError, CpuOptions};
use crate::pack::{CpuMatrix, CpuRotary, CpuTable, CpuVector, CpuWeightLoader};
use crate::plan::CpuAttentionPlan;
use crate::threads::Threads;
use crate::widened::WidenedKv;
use cleave_cpu_kernels::isa::Isa;
use cleave_cpu_kernels::kernel::attention::AttentionScratch;
use cleave_cpu_kernels::kernel::product::SCRATCH_WORDS;
use cleave_cpu_kernels::kernel::{CpuKernels, IntegerKernels, SoftCap};
use cleave_cpu_kernels::memory::{PageMemory, PlainData, SliceParts};
use cleave_domain::{BlockIndex, DeviceId, KvPlane};
use cleave_engine::ops::{
    AdaptedExperts, AdaptedStack, AdapterGroup, Attention, AttentionIo, Batch, BufferRole, Experts,
    GatedIo, Head, HeadShape, KvPoolShape, KvType, Norm, NormFormula, NormIo, Ops, PassMode,
    PassPurpose, PoolLayer, Precision, QkNorms, ResidualIo,
};
use cleave_engine::{BlockSpan, EngineError};

/// One engine's share of the processor.
pub struct CpuOps {
    isa: Isa,
    kernels: &'static CpuKernels,
    bytes_kernels: &'static IntegerKernels,
    precision: Precision,
    kv: KvType,
    threads: Threads,
    /// Packed rows of the current product.
    left: PageMemory<u32>,
    /// Scales and sums of the rows' groups, if rows are packed as bytes.
    left_scales: PageMemory<f32>,
    left_sums: PageMemory<u32>,
    /// Scratch memory, [`SCRATCH_WORDS`] for each thread.
    products_scratch: PageMemory<f32>,
    /// Normalised rows of a register tile, per thread.
    normed: PageMemory<f32>,
    plan: CpuAttentionPlan,
    /// One per thread, for heads of shape `scratch_heads`.
    scratch: Vec<AttentionScratch>,
    scratch_heads: Option<HeadShape>,
    /// States of spans of keys, between the tasks of spans and their merge.
    partials: PageMemory<f32>,
    widened: WidenedKv,
    /// Memory of mixtures of experts, from the first one on.
    experts: Option<Box<ExpertsScratch>>,
    /// Memory of adapters, from the first one on.
    adapters: Option<Box<AdapterScratch>>,
}

/// Elements per task below which dividing an operation on rows does not pay.
const PIECE_ELEMENTS: usize = 8192;

impl CpuOps {
    /// Starts the threads.
    ///
    /// # Errors
    /// If the processor lacks the instruction set, or the system cannot start the threads.
    pub fn new(options: &CpuOptions) -> Result<Self, CpuError> {
        let isa = options.checked_isa()?;
        let (Some(kernels), Some(bytes_kernels)) = (CpuKernels::of(isa), IntegerKernels::of(isa))
        else {
            let best = Isa::detect();
            return Err(CpuError::NoIsa {
                requested: isa,
                best,
            });
        };
        let count = options.threads_count();
        let failed = |source| CpuError::Threads { count, source };
        let no_memory = |error: EngineError| failed(std::io::Error::other(error));
        Ok(Self {
            isa,
            kernels,
            bytes_kernels,
            precision: options.precision,
            kv: options.checked_kv()?,
            widened: WidenedKv::default(),
            threads: Threads::new(count, &options.placement.threads).map_err(failed)?,
            left: PageMemory::zeroed(0).map_err(no_memory)?,
            left_scales: PageMemory::zeroed(0).map_err(no_memory)?,
            left_sums: PageMemory::zeroed(0).map_err(no_memory)?,
            products_scratch: PageMemory::zeroed(count * SCRATCH_WORDS).map_err(no_memory)?,
            normed: PageMemory::zeroed(0).map_err(no_memory)?,
            plan: CpuAttentionPlan::default(),
            scratch: Vec::new(),
            scratch_heads: None,
            partials: PageMemory::zeroed(0).map_err(no_memory)?,
            experts: None,
            adapters: None,
        })
    }

    /// Calls `body` for every row; many elements are divided among threads.
    fn each_row(&mut self, rows: usize, width: usize, body: &(dyn Fn(usize) + Sync)) {
        let each = PIECE_ELEMENTS.div_ceil(width.max(1));
        self.threads.run(rows.div_ceil(each), &|turn| {
            for row in run_range(turn.task, each, rows) {
                body(row);
            }
        });
    }
}

/// Normalises a row in place.
///
/// # Safety
/// The processor has the kernels' instructions.
unsafe fn normalize_row(kernels: &CpuKernels, norm: &Norm<'_, CpuVector>, row: &mut [f32]) {
    // SAFETY: as the caller promises.
    unsafe {
        match norm.formula {
            NormFormula::RmsNorm => {}
            NormFormula::LayerNorm => (kernels.remove_mean)(row),
        }
        (kernels.norm)(row, &norm.weight.0, norm.epsilon);
    }
}

/// Ensures a length of at least `len` elements; the contents are lost if it grows.
fn ensure_len<T: PlainData>(memory: &mut PageMemory<T>, len: usize) -> Result<(), EngineError> {
    if memory.len() < len {
        *memory = PageMemory::zeroed(len.next_power_of_two())?;
    }
    Ok(())
}

impl Ops for CpuOps {
    type Pack = CpuWeightLoader;
    type Adapters = CpuWeightLoader;
    type Rows = CpuRows;
    type Pool = CpuPool;

    fn arithmetic(&self) -> String {
        // Raise the number with any change of results or of a block's bytes.
        let name = match self.isa {
            Isa::Plain => "unfused-3",
            Isa::Avx512Bf16
            | Isa::Avx512Vnni
            | Isa::Avx512
            | Isa::Avx2Vnni
            | Isa::Avx2
            | Isa::NeonI8mm
            | Isa::NeonBf16
            | Isa::NeonDot
            | Isa::Neon => "fused-3",
        };
        name.to_owned()
    }

    fn device(&self) -> String {
        let count = self.threads.count();
        let threads = if count == 1 { "thread" } else { "threads" };
        let cores = self.threads.cores();
        let pinned = if cores.is_empty() {
            String::new()
        } else {
            format!(" on cores {}", affinity::core_list(&cores))
        };
        let (title, precision) = (self.isa.title(), self.precision.name());
        format!("{title}, {precision}, {count} {threads}{pinned}")
    }

    fn kv_type(&self) -> KvType {
        self.kv
    }

    fn device_id(&self) -> Option<DeviceId> {
        affinity::device_id(self.threads.count(), &self.threads.cores())
    }

    fn rows(&self, rows_max: usize, width: usize, _: BufferRole) -> Result<CpuRows, EngineError> {
        Ok(CpuRows {
            values: PageMemory::zeroed(rows_max * width)?,
            width,
        })
    }

    fn pool(&self, shape: KvPoolShape) -> Result<CpuPool, EngineError> {
        assert_eq!(shape.kv, self.kv, "a pool of another format");
        CpuPool::new(shape)
    }

    fn begin(
        &mut self,
        batch: &Batch,
        _: PassPurpose<'_>,
        _: &[AdapterGroup<CpuAdapter>],
    ) -> Result<PassMode, EngineError> {
        self.plan.reset();
        if self.kv == KvType::Fp8E4m3 {
            self.widened.begin(batch);
        }
        Ok(PassMode::Execute)
    }

    fn embed(
        &mut self,
        batch: &Batch,
        table: &CpuTable,
        factor: f32,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        let (rows, width) = (batch.rows_count(), out.width);
        let out = SliceParts::new(out.head_mut(rows));
        self.each_row(rows, width, &|row| {
            // SAFETY: each row is written by one task.
            let out = unsafe { out.part(row * width..(row + 1) * width) };
            table.read_row(batch.tokens[row] as usize, out);
            out.iter_mut().for_each(|x| *x *= factor);
        });
        table.release_after_reads(rows);
        Ok(())
    }

    fn norm(
        &mut self,
        norm: &Norm<'_, CpuVector>,
        rows: usize,
        x: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        let width = x.width;
        assert_eq!((norm.weight.0.len(), out.width), (width, width));
        let (kernels, x) = (self.kernels, x.head(rows));
        let out = SliceParts::new(out.head_mut(rows));
        self.each_row(rows, width, &|row| {
            // SAFETY: each row is written by one task; `CpuKernels::of` checked the instructions.
            unsafe {
                let out = out.part(row * width..(row + 1) * width);
                out.copy_from_slice(&x[row * width..(row + 1) * width]);
                normalize_row(kernels, norm, out);
            }
        });
        Ok(())
    }

    fn add_norm(
        &mut self,
        norm: &Norm<'_, CpuVector>,
        rows: usize,
        sum: ResidualIo<'_, CpuRows>,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        let width = out.width;
        assert_eq!((norm.weight.0.len(), sum.residual.width), (width, width));
        assert_eq!(sum.delta.width, width);
        let kernels = self.kernels;
        let delta = sum.delta.head(rows);
        let residual = SliceParts::new(sum.residual.head_mut(rows));
        let out = SliceParts::new(out.head_mut(rows));
        self.each_row(rows, width, &|row| {
            let range = row * width..(row + 1) * width;
            // SAFETY: each row is written by one task; `CpuKernels::of` checked the instructions.
            unsafe {
                let residual = residual.part(range.clone());
                (kernels.add)(residual, &delta[range.clone()]);
                let out = out.part(range);
                out.copy_from_slice(residual);
                normalize_row(kernels, norm, out);
            }
        });
        Ok(())
    }

    fn norm_add(
        &mut self,
        norm: &Norm<'_, CpuVector>,
        rows: usize,
        x: &mut CpuRows,
        residual: &mut CpuRows,
    ) -> Result<(), EngineError> {
        let width = residual.width;
        assert_eq!((norm.weight.0.len(), x.width), (width, width));
        let kernels = self.kernels;
        let x = SliceParts::new(x.head_mut(rows));
        let residual = SliceParts::new(residual.head_mut(rows));
        self.each_row(rows, width, &|row| {
            let range = row * width..(row + 1) * width;
            // SAFETY: each row is written by one task; `CpuKernels::of` checked the instructions.
            unsafe {
                let x = x.part(range.clone());
                normalize_row(kernels, norm, x);
                (kernels.add)(residual.part(range), x);
            }
        });
        Ok(())
    }

    fn add(
        &mut self,
        rows: usize,
        delta: &CpuRows,
        residual: &mut CpuRows,
    ) -> Result<(), EngineError> {
        let width = residual.width;
        assert_eq!(delta.width, width);
        let add = self.kernels.add;
        let delta = delta.head(rows);
        let residual = SliceParts::new(residual.head_mut(rows));
        self.each_row(rows, width, &|row| {
            let range = row * width..(row + 1) * width;
            // SAFETY: each row is written by one task; `CpuKernels::of` checked the instructions.
            unsafe { add(residual.part(range.clone()), &delta[range]) };
        });
        Ok(())
    }

    fn matmul(
        &mut self,
        matrix: &CpuMatrix,
        rows: usize,
        x: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        assert_eq!(x.width, matrix.width, "width of a product's left side");
        let from = RowsSource::Rows(x.head(rows));
        self.product(matrix, None, rows, from, out.head_mut(rows))
    }

    fn norm_matmul(
        &mut self,
        norm: &Norm<'_, CpuVector>,
        rows: usize,
        from: NormIo<'_, CpuRows>,
        matrix: &CpuMatrix,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        let from = RowsSource::normed(norm, rows, from);
        self.product(matrix, None, rows, from, out.head_mut(rows))
    }

    fn norm_gated(
        &mut self,
        norm: &Norm<'_, CpuVector>,
        rows: usize,
        from: NormIo<'_, CpuRows>,
        matrix: &CpuMatrix,
        to: GatedIo<'_, CpuRows>,
    ) -> Result<(), EngineError> {
        let from = RowsSource::normed(norm, rows, from);
        let gate = Some(ProductGate::of(to.activation));
        self.product(matrix, gate, rows, from, to.out.head_mut(rows))
    }

    fn qk_norm(
        &mut self,
        norms: &QkNorms<'_, CpuVector>,
        heads: HeadShape,
        rows: usize,
        qkv: &mut CpuRows,
    ) -> Result<(), EngineError> {
        assert_eq!(qkv.width, heads.qkv_width());
        let (kernels, width) = (self.kernels, qkv.width);
        let qkv = SliceParts::new(qkv.head_mut(rows));
        self.each_row(rows, width, &|row| {
            // SAFETY: each row is written by one task.
            let row = unsafe { qkv.part(row * width..(row + 1) * width) };
            attention::normalize_qk(kernels, norms, heads, row);
        });
        Ok(())
    }

    fn rotate_store(
        &mut self,
        batch: &Batch,
        rotary: &CpuRotary,
        qkv: &mut CpuRows,
        pool: PoolLayer<'_, CpuPool>,
    ) -> Result<(), EngineError> {
        let rows = attention::RowsToStore {
            batch,
            rotary,
            norms: None,
        };
        self.store_rows(&rows, qkv, pool);
        Ok(())
    }

    fn norm_rotate_store(
        &mut self,
        norms: Option<&QkNorms<'_, CpuVector>>,
        batch: &Batch,
        rotary: &CpuRotary,
        qkv: &mut CpuRows,
        heads: HeadShape,
        pool: PoolLayer<'_, CpuPool>,
    ) -> Result<(), EngineError> {
        assert_eq!(
            pool.pool.shape.layer(pool.layer).heads,
            heads,
            "a pool of other heads"
        );
        let rows = attention::RowsToStore {
            batch,
            rotary,
            norms,
        };
        self.store_rows(&rows, qkv, pool);
        Ok(())
    }

    fn attend(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: AttentionIo<'_, Self>,
    ) -> Result<(), EngineError> {
        match self.precision {
            Precision::F32 => self.attend_rows::<f32>(batch, attention, io),
            Precision::Bf16 => self.attend_rows::<u16>(batch, attention, io),
        }
    }

    fn gated(
        &mut self,
        matrix: &CpuMatrix,
        rows: usize,
        x: &CpuRows,
        to: GatedIo<'_, CpuRows>,
    ) -> Result<(), EngineError> {
        assert_eq!(x.width, matrix.width, "width of a product's left side");
        let (from, gate) = (
            RowsSource::Rows(x.head(rows)),
            ProductGate::of(to.activation),
        );
        self.product(matrix, Some(gate), rows, from, to.out.head_mut(rows))
    }

    fn is_adapted(&self, stack: &AdaptedStack<'_, CpuAdapter>) -> bool {
        stack.changes().next().is_some()
    }

    fn adapt(
        &mut self,
        stack: &AdaptedStack<'_, CpuAdapter>,
        x: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        self.adapt_rows(stack, x, out, AdapterSum::Added)
    }

    fn adapted_gated(
        &mut self,
        matrix: &CpuMatrix,
        rows: usize,
        x: &CpuRows,
        to: GatedIo<'_, CpuRows>,
        stack: &AdaptedStack<'_, CpuAdapter>,
    ) -> Result<(), EngineError> {
        self.gated_with_adapters(matrix, rows, x, to, stack)
    }

    fn experts(
        &mut self,
        experts: &Experts<'_, CpuWeightLoader>,
        rows: usize,
        x: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        self.mixture(experts, None, rows, x, out)
    }

    fn has_adapted_experts(&self, adapted: &AdaptedExperts<'_, CpuAdapter>) -> bool {
        adapted.has_changes()
    }

    fn adapted_experts(
        &mut self,
        experts: &Experts<'_, CpuWeightLoader>,
        rows: usize,
        x: &CpuRows,
        out: &mut CpuRows,
        adapted: AdaptedExperts<'_, CpuAdapter>,
    ) -> Result<(), EngineError> {
        self.mixture(experts, Some(adapted), rows, x, out)
    }

    fn gather(
        &mut self,
        indices: &[u32],
        from: &CpuRows,
        to: &mut CpuRows,
    ) -> Result<(), EngineError> {
        let width = from.width;
        assert_eq!(to.width, width);
        let rows = to.head_mut(indices.len()).chunks_exact_mut(width);
        for (to, &index) in rows.zip(indices) {
            let start = index as usize * width;
            to.copy_from_slice(&from.values[start..start + width]);
        }
        Ok(())
    }

    fn logits(
        &mut self,
        head: Head<'_, CpuMatrix>,
        rows: usize,
        x: &CpuRows,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let Head { matrix, soft_cap } = head;
        assert_eq!(x.width, matrix.width, "width of a product's left side");
        self.product(matrix, None, rows, RowsSource::Rows(x.head(rows)), out)?;
        let Some(cap) = soft_cap else {
            return Ok(());
        };
        let cap = SoftCap::new(cap, 1.0);
        let (cap_row, width) = (self.kernels.cap_row, matrix.columns);
        let out = SliceParts::new(out);
        self.each_row(rows, width, &|row| {
            // SAFETY: each row is written by one task; `CpuKernels::of` checked the instructions.
            unsafe { cap_row(out.part(row * width..(row + 1) * width), cap) };
        });
        Ok(())
    }

    fn read_rows(&mut self, x: &CpuRows, first: usize, out: &mut [f32]) -> Result<(), EngineError> {
        let start = first * x.width;
        out.copy_from_slice(&x.values[start..start + out.len()]);
        Ok(())
    }

    fn share_on_host(&mut self, calls: usize, body: &(dyn Fn() + Sync)) {
        self.threads.run(calls, &|_| body());
    }

    fn host_threads(&self) -> usize {
        self.threads.count()
    }

    fn read_block(
        &self,
        pool: &CpuPool,
        span: BlockSpan,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        out.copy_from_slice(pool.span(&span));
        Ok(())
    }

    fn host_block<'a>(
        &self,
        pool: &'a CpuPool,
        plane: KvPlane,
        block: BlockIndex,
    ) -> Option<&'a [u8]> {
        Some(pool.span(&pool.shape.whole(plane, block)))
    }

    fn write_block(
        &mut self,
        pool: &mut CpuPool,
        span: BlockSpan,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        pool.span_mut(&span).copy_from_slice(bytes);
        Ok(())
    }

    fn copy_block(
        &mut self,
        pool: &mut CpuPool,
        plane: KvPlane,
        from: BlockIndex,
        to: BlockIndex,
    ) -> Result<(), EngineError> {
        let [from, to] = [from, to].map(|block| pool.shape.whole(plane, block));
        pool.copy(&from, &to);
        Ok(())
    }

    fn clear_state(&mut self, pool: &mut CpuPool, slot: BlockIndex) -> Result<(), EngineError> {
        let slot = pool.shape.whole(KvPlane::State, slot);
        pool.span_mut(&slot).fill(0);
        Ok(())
    }
}
