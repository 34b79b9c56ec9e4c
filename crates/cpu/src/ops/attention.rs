//! Keys and values as the threads store them, and attention over them.
//!
//! Owns: how each type of keys and values is rounded and read.
//! Never: does arithmetic itself; see `kernel`.
//! Invariant: a token's key and value in a head are rounded by themselves, whatever is stored beside them.

use super::{CpuOps, PIECE_ELEMENTS, grow};
use crate::buffers::{CpuPool, CpuRows};
use crate::grid::piece;
use crate::kernel::Stored;
use crate::kernel::attention::{Attend, Pool, Scratch, head_width};
use crate::layout::{Layout, Spot};
use crate::memory::{Parts, Plain, bytes_of_mut};
use crate::pack::CpuRotary;
use crate::plan::Stored as StoredRun;
use cleave_engine::ops::{Attention, AttentionIo, Batch, HeadShape, KvType, LayerOf, PoolShape};
use cleave_engine::{EngineError, e4m3};

/// Elements of the widest head that a checkpoint may have.
const HEAD_DIM_MAX: usize = 1024;

/// Rounds a head; gives its scale where heads have one.
type Round<'a, T> = dyn Fn(&[f32], &mut [T]) -> Option<f32> + Sync + 'a;

/// A pool as attention reads it.
#[derive(Clone, Copy)]
struct View<'a, T> {
    shape: PoolShape,
    layer: usize,
    elements: Pool<'a, T>,
}

impl CpuOps {
    /// Rotates rows, and stores their keys and values.
    pub(super) fn store_rows(
        &mut self,
        rows: (&Batch, &CpuRotary),
        qkv: &mut CpuRows,
        pool: LayerOf<'_, CpuPool>,
    ) {
        let (single, brain) = (self.kernels.single.store, self.kernels.brain.store);
        let round_int8 = self.bytes_kernels.round_int8;
        match self.kv {
            KvType::F32 => self.store_as(rows, qkv, pool, &|x, to| {
                // SAFETY: `Kernels::of` checked the instructions.
                unsafe { single(x, to) };
                None
            }),
            KvType::Bf16 => self.store_as(rows, qkv, pool, &|x, to| {
                // SAFETY: as above.
                unsafe { brain(x, to) };
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
                    // SAFETY: `BytesKernels::of` checked the instructions.
                    Some(unsafe { round_int8(x, to) })
                });
            }
        }
    }

    /// Rotates rows, and stores their keys and values in a pool of `T`.
    fn store_as<T: Plain>(
        &mut self,
        (batch, rotary): (&Batch, &CpuRotary),
        qkv: &mut CpuRows,
        pool: LayerOf<'_, CpuPool>,
        round: &Round<'_, T>,
    ) {
        let LayerOf { pool, layer } = pool;
        let shape = pool.shape;
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = shape.heads;
        assert_eq!(qkv.width, shape.heads.qkv_width());
        assert_eq!(rotary.half * 2, head_dim);
        let kernels = self.kernels;
        let width = qkv.width;
        let layout = Layout::of(self.precision, shape.heads, shape.block_tokens);
        let (heads, threads) = (shape.heads, self.threads.count());
        self.plan.make(batch, (heads, shape.block_tokens), threads);
        let rows = Parts::new(qkv.head_mut(batch.rows_count()));
        let stored = Parts::new(pool.elements_mut::<T>());
        let store_run = |run: &StoredRun| {
            let mut rounded = [T::default(); HEAD_DIM_MAX];
            let rounded = &mut rounded[..head_dim];
            let block = run.block.0 as usize * shape.block_elements();
            for (row, position) in run.rows.clone().zip(run.position..) {
                let cos = &rotary.cos[position * rotary.half..][..rotary.half];
                let sin = &rotary.sin[position * rotary.half..][..rotary.half];
                let spot = Spot {
                    layout,
                    block_tokens: shape.block_tokens,
                    head_dim,
                    token: position % shape.block_tokens,
                };
                // SAFETY: a row is of one run.
                let row = unsafe { rows.part(row * width..(row + 1) * width) };
                let (keys_end, heads) = ((query_heads + kv_heads) * head_dim, query_heads);
                for head in row[..keys_end].chunks_exact_mut(head_dim) {
                    // SAFETY: `Kernels::of` checked the instructions.
                    unsafe { (kernels.rotate)(head, cos, sin) };
                }
                let (keys, values) = row[heads * head_dim..].split_at(kv_heads * head_dim);
                let both = keys
                    .chunks_exact(head_dim)
                    .zip(values.chunks_exact(head_dim));
                for (kv_head, (key, value)) in both.enumerate() {
                    // SAFETY: a block is of one run, as the plan has seen.
                    let in_block = |offset: usize| unsafe {
                        let start = block + offset;
                        stored.part(start..start + shape.head_elements())
                    };
                    let head = in_block(shape.key_offset(layer, kv_head));
                    if let Some(scale) = round(key, rounded) {
                        spot.put_scale(scale, bytes_of_mut(head));
                    }
                    spot.put_key(rounded, head);
                    let head = in_block(shape.value_offset(layer, kv_head));
                    if let Some(scale) = round(value, rounded) {
                        spot.put_scale(scale, bytes_of_mut(head));
                    }
                    spot.put_value(rounded, head);
                }
            }
        };
        let runs = self.plan.stored();
        let elements = batch.rows_count() * width;
        let each = (runs.len() * PIECE_ELEMENTS)
            .div_ceil(elements.max(1))
            .max(1);
        self.threads.run(runs.len().div_ceil(each), &|turn| {
            for run in &runs[piece(turn.task, each, runs.len())] {
                store_run(run);
            }
        });
    }

    /// Attention over a pool of `T`, or one of eight bits that becomes it.
    pub(super) fn attend_rows<T: Stored>(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: AttentionIo<'_, Self>,
    ) -> Result<(), EngineError> {
        let AttentionIo { qkv, pool, out } = io;
        let of = |elements| View {
            shape: pool.shape,
            layer: attention.layer,
            elements,
        };
        let view = match self.kv {
            KvType::F32 | KvType::Bf16 => of(Pool::Elements(pool.elements::<T>())),
            KvType::Int8PerTokenHead => of(Pool::Codes(pool.elements())),
            KvType::Fp8E4m3 => {
                return self.attend_widened::<T>(attention, pool, (qkv, out));
            }
        };
        self.attend_over((batch, attention), view, (qkv, out))
    }

    fn attend_widened<T: Stored>(
        &mut self,
        attention: &Attention,
        pool: &CpuPool,
        rows: (&CpuRows, &mut CpuRows),
    ) -> Result<(), EngineError> {
        // Taken out for as long as attention reads it.
        let mut widened = std::mem::take(&mut self.widened);
        let (batch, elements) = widened.widen::<T>(&mut self.threads, pool, attention.layer)?;
        let view = View {
            shape: PoolShape {
                layers_count: 1,
                ..pool.shape
            },
            layer: 0,
            elements: Pool::Elements(elements),
        };
        let done = self.attend_over((batch, attention), view, rows);
        self.widened = widened;
        done
    }

    fn attend_over<T: Stored>(
        &mut self,
        (batch, attention): (&Batch, &Attention),
        view: View<'_, T>,
        (qkv, out): (&CpuRows, &mut CpuRows),
    ) -> Result<(), EngineError> {
        let View {
            shape,
            layer,
            elements,
        } = view;
        assert_eq!(qkv.width, shape.heads.qkv_width());
        assert_eq!(out.width, shape.heads.query_width());
        let threads = self.threads.count();
        self.plan
            .make(batch, (shape.heads, shape.block_tokens), threads);
        self.make_scratch(shape.heads)?;
        grow(&mut self.partials, self.plan.partials_len())?;
        let rows = batch.rows_count();
        let attend = Attend {
            heads: shape.heads,
            block_tokens: shape.block_tokens,
            layout: Layout::of(self.precision, shape.heads, shape.block_tokens),
            pool: elements,
            head_elements: shape.head_elements(),
            block_elements: shape.block_elements(),
            layer_offsets: (shape.key_offset(layer, 0), shape.value_offset(layer, 0)),
            qkv: qkv.head(rows),
            scale: attention.scale * std::f32::consts::LOG2_E,
            window: attention.window.unwrap_or(usize::MAX),
            out: Parts::new(out.head_mut(rows)),
            partials: Parts::new(&mut self.partials),
        };
        let kernels = T::of(self.kernels);
        let (plan, scratch) = (&self.plan, Parts::new(&mut self.scratch));
        self.threads.run(plan.tasks_count(), &|turn| {
            // SAFETY: one scratch per worker; `Kernels::of` checked the instructions.
            unsafe {
                let scratch = &mut scratch.part(turn.worker..turn.worker + 1)[0];
                (kernels.attend)(&attend, plan.task(batch, turn.task), scratch);
            }
        });
        self.threads.run(plan.merges_count(), &|turn| {
            // SAFETY: as above.
            unsafe {
                let scratch = &mut scratch.part(turn.worker..turn.worker + 1)[0];
                (kernels.combine)(&attend, plan.merge(batch, turn.task), scratch);
            }
        });
        Ok(())
    }

    fn make_scratch(&mut self, heads: HeadShape) -> Result<(), EngineError> {
        if self.scratch_heads != Some(heads) {
            self.scratch = (0..self.threads.count())
                .map(|_| Scratch::new(heads))
                .collect::<Result<_, _>>()?;
            self.scratch_heads = Some(heads);
        }
        debug_assert!(head_width(heads) >= heads.head_dim);
        Ok(())
    }
}
