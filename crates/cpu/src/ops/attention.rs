//! Storing of keys and values, and attention over them, on all threads.
//!
//! Owns: the rounding and the reading of each type of keys and values.
//! Never: does arithmetic itself; see `kernel`.
//! Invariant: rounding of a token's key or value in a head depends on nothing stored beside it.

use super::{CpuOps, PIECE_ELEMENTS, ensure_len};
use crate::buffers::{CpuPool, CpuRows};
use crate::grid::run_range;
use crate::pack::{CpuRotary, CpuVector};
use crate::plan::StoredRun;
use cleave_checkpoint::e4m3;
use cleave_cpu_kernels::kernel::attention::{
    AttentionScratch, LayerAttention, PoolContents, head_width,
};
use cleave_cpu_kernels::kernel::{CpuKernels, SoftCap, StoredElement};
use cleave_cpu_kernels::layout::{KvLayout, TokenSpot};
use cleave_cpu_kernels::memory::{PlainData, SliceParts, bytes_of, bytes_of_mut};
use cleave_cpu_kernels::simd::LANES;
use cleave_domain::BlockIndex;
use cleave_engine::EngineError;
use cleave_engine::ops::{
    Attention, AttentionIo, Batch, HeadShape, KvType, PoolLayer, PoolLayerShape, QkNorms,
};
use std::f32::consts::LOG2_E;

/// Elements that are rounded before they are stored: one head of the largest size that a checkpoint
/// may have, or heads of several tokens.
const RUN_ELEMENTS: usize = 2048;

/// Rounded heads, aligned for words and vectors.
#[repr(align(64))]
struct RoundedHeads<T>([T; RUN_ELEMENTS]);

/// Function that rounds a head; returns its scale if the format has scales.
type RoundHead<'a, T> = dyn Fn(&[f32], &mut [T]) -> Option<f32> + Sync + 'a;

/// A pool as attention reads it.
#[derive(Clone, Copy)]
struct PoolLayerView<'a, T> {
    shape: PoolLayerShape,
    elements: PoolContents<'a, T>,
}

/// Rows that attention reads and writes.
struct AttendedRows<'a> {
    /// `(rows, q | k | v)`.
    qkv: &'a CpuRows,
    /// Sink of each query head, if there are any.
    sinks: Option<&'a CpuVector>,
    /// `(rows, query_heads × head_dim)`.
    out: &'a mut CpuRows,
}

/// Rows whose keys and values are stored.
pub(super) struct RowsToStore<'a> {
    pub(super) batch: &'a Batch,
    pub(super) rotary: &'a CpuRotary,
    /// Norms of queries and keys, applied before the rotation.
    pub(super) norms: Option<&'a QkNorms<'a, CpuVector>>,
}

/// Normalises queries and keys of a row `(q | k | v)` in place.
pub(super) fn normalize_qk(
    kernels: &CpuKernels,
    norms: &QkNorms<'_, CpuVector>,
    heads: HeadShape,
    row: &mut [f32],
) {
    let (queries, rest) = row.split_at_mut(heads.query_width());
    let keys = &mut rest[..heads.kv_width()];
    for (part, CpuVector(weight)) in [(queries, norms.query), (keys, norms.key)] {
        let width = weight.len();
        assert!(
            width == heads.head_dim || width == part.len(),
            "a norm of a head or of all heads"
        );
        for together in part.chunks_exact_mut(width) {
            // SAFETY: `CpuKernels::of` checked the instructions.
            unsafe { (kernels.norm)(together, weight, norms.epsilon) };
        }
    }
}

/// Storing of one layer's keys and values, shared by its tasks, each of which has its own rows and
/// blocks.
struct KvStoring<'a, T> {
    kernels: &'static CpuKernels,
    shape: PoolLayerShape,
    layout: KvLayout,
    /// `(rows, q | k | v)`.
    qkv: SliceParts<'a, f32>,
    /// The batch's tables of the layer's plane.
    tables: &'a [BlockIndex],
    stored: SliceParts<'a, T>,
    round: &'a RoundHead<'a, T>,
}

impl<'a, T: PlainData> KvStoring<'a, T> {
    /// Prefetches the destination of a single token: its key is spread over as many cache lines as
    /// a whole block's.
    fn prefetch_target(&self, run: &StoredRun) {
        if run.rows.len() > 1 {
            return;
        }
        let token = run.position % self.shape.block_tokens;
        for kv_head in 0..self.shape.heads.kv_heads {
            let keys = self.head(run, self.shape.key_offset(kv_head));
            let values = self.head(run, self.shape.value_offset(kv_head));
            let first = token / 2 * 2 * self.shape.heads.head_dim;
            let values = &values[first..values.len().min(first + 2 * self.shape.heads.head_dim)];
            for part in [bytes_of(keys), bytes_of(values)] {
                // SAFETY: `CpuKernels::of` checked the instructions.
                unsafe { (self.kernels.prefetch_lines)(part) };
            }
        }
    }

    /// A head of a run's block, which begins at this element of the block.
    fn head(&self, run: &StoredRun, offset: usize) -> &'a mut [T] {
        let start = self.tables[run.entry].0 as usize * self.shape.block_elements + offset;
        // SAFETY: a block belongs to one run, which the plan asserts, and a run to one task, which
        // uses one head at a time.
        unsafe { self.stored.part(start..start + self.shape.head_elements()) }
    }

    fn row(&self, row: usize) -> &'a mut [f32] {
        let width = self.shape.heads.qkv_width();
        // SAFETY: a row belongs to one run, and a run to one task.
        unsafe { self.qkv.part(row * width..(row + 1) * width) }
    }

    /// Normalises and rotates queries and keys in place.
    fn normalize_and_rotate(&self, rows: &RowsToStore<'_>, run: &StoredRun) {
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = self.shape.heads;
        let half = rows.rotary.half;
        for (row, position) in run.rows.clone().zip(run.position..) {
            let cos = &rows.rotary.cos[position * half..][..half];
            let sin = &rows.rotary.sin[position * half..][..half];
            let row = self.row(row);
            if let Some(norms) = rows.norms {
                normalize_qk(self.kernels, norms, self.shape.heads, row);
            }
            let heads = &mut row[..(query_heads + kv_heads) * head_dim];
            for head in heads.chunks_exact_mut(head_dim) {
                // SAFETY: `CpuKernels::of` checked the instructions.
                unsafe { (self.kernels.rotate)(&mut head[..2 * half], cos, sin) };
            }
            if let Some(factor) = rows.rotary.query_factors.get(position) {
                let queries = &mut row[..query_heads * head_dim];
                queries.iter_mut().for_each(|query| *query *= factor);
            }
        }
    }

    /// Rounds keys and values and stores them in the pool's layout.
    fn store(&self, run: &StoredRun) {
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = self.shape.heads;
        let mut rounded = RoundedHeads([T::default(); RUN_ELEMENTS]);
        let tokens_each = (RUN_ELEMENTS / head_dim).min(LANES);
        for first in run.rows.clone().step_by(tokens_each) {
            let rows = first..run.rows.end.min(first + tokens_each);
            let spot = TokenSpot {
                layout: self.layout,
                block_tokens: self.shape.block_tokens,
                head_dim,
                token: (run.position + first - run.rows.start) % self.shape.block_tokens,
            };
            for head in 0..2 * kv_heads {
                let (of_values, kv_head) = (head >= kv_heads, head % kv_heads);
                let to = self.head(
                    run,
                    if of_values {
                        self.shape.value_offset(kv_head)
                    } else {
                        self.shape.key_offset(kv_head)
                    },
                );
                let column = (query_heads + head) * head_dim;
                let rounded = &mut rounded.0[..rows.len() * head_dim];
                for (row, rounded) in rows.clone().zip(rounded.chunks_exact_mut(head_dim)) {
                    let scale = (self.round)(&self.row(row)[column..column + head_dim], rounded);
                    if let Some(scale) = scale {
                        let token = spot.token + row - rows.start;
                        TokenSpot { token, ..spot }.put_scale(scale, bytes_of_mut(to));
                    }
                }
                if of_values {
                    spot.put_values(rounded, to)
                } else {
                    // SAFETY: `CpuKernels::of` checked the instructions.
                    spot.put_keys(rounded, to, |from, tokens, to| unsafe {
                        (self.kernels.transpose_rows)(from, tokens, to);
                    })
                }
            }
        }
    }
}

impl CpuOps {
    /// Normalises and rotates rows, and stores their keys and values.
    pub(super) fn store_rows(
        &mut self,
        rows: &RowsToStore<'_>,
        qkv: &mut CpuRows,
        pool: PoolLayer<'_, CpuPool>,
    ) {
        let (store_f32, store_bf16) = (self.kernels.of_f32.store, self.kernels.of_bf16.store);
        let round_int8 = self.bytes_kernels.round_int8;
        match self.kv {
            KvType::F32 => self.store_as(rows, qkv, pool, &|x, to| {
                // SAFETY: `CpuKernels::of` checked the instructions.
                unsafe { store_f32(x, to) };
                None
            }),
            KvType::Bf16 => self.store_as(rows, qkv, pool, &|x, to| {
                // SAFETY: as above.
                unsafe { store_bf16(x, to) };
                None
            }),
            KvType::Fp8E4m3 => self.store_as(rows, qkv, pool, &|x, to| {
                for (to, x) in to.iter_mut().zip(x) {
                    *to = e4m3::from_f32(*x);
                }
                None
            }),
            KvType::Int8PerTokenHead => {
                self.store_as(rows, qkv, pool, &|x, to| {
                    // SAFETY: `IntegerKernels::of` checked the instructions.
                    Some(unsafe { round_int8(x, to) })
                });
            }
        }
    }

    /// Normalises and rotates rows, and stores their keys and values in a pool of `T`.
    fn store_as<T: PlainData>(
        &mut self,
        rows: &RowsToStore<'_>,
        qkv: &mut CpuRows,
        pool: PoolLayer<'_, CpuPool>,
        round: &RoundHead<'_, T>,
    ) {
        let PoolLayer { pool, layer } = pool;
        let shape = pool.shape.layer(layer);
        let RowsToStore { batch, rotary, .. } = rows;
        assert_eq!(qkv.width, shape.heads.qkv_width());
        assert!(rotary.half * 2 <= shape.heads.head_dim, "pairs of a head");
        let threads = self.threads.count();
        self.plan
            .prepare(batch, shape.heads, shape.block_tokens, threads);
        let width = qkv.width;
        let storing = KvStoring {
            kernels: self.kernels,
            shape,
            layout: KvLayout::of(self.precision, shape.heads, shape.block_tokens),
            qkv: SliceParts::new(qkv.head_mut(batch.rows_count())),
            tables: &batch.blocks[batch.tables_start(shape.plane)..],
            stored: SliceParts::new(pool.elements_mut::<T>(shape.plane)),
            round,
        };
        let runs = self.plan.stored();
        let elements = batch.rows_count() * width;
        let each = (runs.len() * PIECE_ELEMENTS)
            .div_ceil(elements.max(1))
            .max(1);
        self.threads.run(runs.len().div_ceil(each), &|turn| {
            let own_runs = &runs[run_range(turn.task, each, runs.len())];
            for (index, run) in own_runs.iter().enumerate() {
                // A memory access takes as long as a row's computation: prefetch the next run's
                // destination before this run is computed.
                for run in &own_runs[index + usize::from(index > 0)..own_runs.len().min(index + 2)]
                {
                    storing.prefetch_target(run);
                }
                storing.normalize_and_rotate(rows, run);
                storing.store(run);
            }
        });
    }

    /// Attention over a pool of `T`, or over a pool of eight bits that is widened to `T`.
    pub(super) fn attend_rows<T: StoredElement>(
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
        let rows = AttendedRows { qkv, sinks, out };
        let shape = pool.shape.layer(attention.layer);
        let of = |elements| PoolLayerView { shape, elements };
        let view = match self.kv {
            KvType::F32 | KvType::Bf16 => {
                of(PoolContents::Elements(pool.elements::<T>(shape.plane)))
            }
            KvType::Int8PerTokenHead => of(PoolContents::Codes(pool.elements(shape.plane))),
            KvType::Fp8E4m3 => {
                return self.attend_widened::<T>(attention, pool, rows);
            }
        };
        self.attend_over(batch, attention, view, rows)
    }

    fn attend_widened<T: StoredElement>(
        &mut self,
        attention: &Attention,
        pool: &CpuPool,
        rows: AttendedRows<'_>,
    ) -> Result<(), EngineError> {
        // Moved out of `self` while attention borrows both.
        let mut widened = std::mem::take(&mut self.widened);
        let stored = pool.shape.layer(attention.layer);
        let (batch, elements) = widened.widen::<T>(&mut self.threads, pool, &stored)?;
        let view = PoolLayerView {
            shape: PoolLayerShape {
                offset: 0,
                block_elements: stored.layer_elements(),
                ..stored
            },
            elements: PoolContents::Elements(elements),
        };
        let done = self.attend_over(batch, attention, view, rows);
        self.widened = widened;
        done
    }

    fn attend_over<T: StoredElement>(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        view: PoolLayerView<'_, T>,
        rows: AttendedRows<'_>,
    ) -> Result<(), EngineError> {
        let PoolLayerView { shape, elements } = view;
        let AttendedRows { qkv, sinks, out } = rows;
        if let Some(CpuVector(sinks)) = sinks {
            assert_eq!(sinks.len(), shape.heads.query_heads, "sinks of query heads");
        }
        assert_eq!(qkv.width, shape.heads.qkv_width());
        assert_eq!(out.width, shape.heads.query_width());
        let threads = self.threads.count();
        self.plan
            .prepare(batch, shape.heads, shape.block_tokens, threads);
        self.make_scratch(shape.heads)?;
        ensure_len(&mut self.partials, self.plan.partials_len())?;
        let rows = batch.rows_count();
        let attend = LayerAttention {
            heads: shape.heads,
            block_tokens: shape.block_tokens,
            layout: KvLayout::of(self.precision, shape.heads, shape.block_tokens),
            pool: elements,
            head_elements: shape.head_elements(),
            block_elements: shape.block_elements,
            layer_offsets: (shape.key_offset(0), shape.value_offset(0)),
            qkv: qkv.head(rows),
            scale: attention.scale * LOG2_E,
            soft_cap: attention.soft_cap.map(|cap| SoftCap::new(cap, LOG2_E)),
            window: attention.window.unwrap_or(usize::MAX),
            sinks: sinks.map(|CpuVector(sinks)| &sinks[..]),
            out: SliceParts::new(out.head_mut(rows)),
            partials: SliceParts::new(&mut self.partials),
        };
        let kernels = T::kernels_of(self.kernels);
        let (plan, scratch) = (&self.plan, SliceParts::new(&mut self.scratch));
        self.threads.run(plan.tasks_count(), &|turn| {
            // SAFETY: one scratch per worker; `CpuKernels::of` checked the instructions.
            unsafe {
                let scratch = &mut scratch.part(turn.worker..turn.worker + 1)[0];
                let (queries, share) = plan.task(batch, shape.plane, turn.task);
                (kernels.attend)(&attend, queries, share, scratch);
            }
        });
        self.threads.run(plan.merges_count(), &|turn| {
            // SAFETY: as above.
            unsafe {
                let scratch = &mut scratch.part(turn.worker..turn.worker + 1)[0];
                let (queries, partial) = plan.merge(batch, shape.plane, turn.task);
                (kernels.combine)(&attend, queries, partial, scratch);
            }
        });
        Ok(())
    }

    fn make_scratch(&mut self, heads: HeadShape) -> Result<(), EngineError> {
        if self.scratch_heads != Some(heads) {
            self.scratch = (0..self.threads.count())
                .map(|_| AttentionScratch::new(heads))
                .collect::<Result<_, _>>()?;
            self.scratch_heads = Some(heads);
        }
        debug_assert!(head_width(heads) >= heads.head_dim);
        Ok(())
    }
}
