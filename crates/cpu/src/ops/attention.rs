//! Keys and values as the threads store them, and attention over them.
//!
//! Owns: how each type of keys and values is rounded and read.
//! Never: does arithmetic itself; see `kernel`.
//! Invariant: a token's key and value in a head are rounded by themselves, whatever is stored beside them.

use super::{CpuOps, PIECE_ELEMENTS, grow};
use crate::buffers::{CpuPool, CpuRows};
use crate::grid::piece;
use crate::kernel::attention::{Attend, Pool, Scratch, head_width};
use crate::kernel::{Kernels, Stored};
use crate::layout::{Layout, Spot};
use crate::memory::{Parts, Plain, bytes_of, bytes_of_mut};
use crate::pack::{CpuRotary, CpuVector};
use crate::plan::Stored as StoredRun;
use crate::simd::LANES;
use cleave_engine::ops::{
    Attention, AttentionIo, Batch, HeadNorms, HeadShape, KvType, LayerOf, PoolShape,
};
use cleave_engine::{EngineError, e4m3};

/// Elements that are rounded together before they are stored: one of the widest heads that a checkpoint may have, or those of
/// several tokens.
const RUN_ELEMENTS: usize = 2048;

/// Heads that were rounded, where words may begin.
#[repr(align(64))]
struct Rounded<T>([T; RUN_ELEMENTS]);

/// Rounds a head; gives its scale where heads have one.
type Round<'a, T> = dyn Fn(&[f32], &mut [T]) -> Option<f32> + Sync + 'a;

/// A pool as attention reads it.
#[derive(Clone, Copy)]
struct View<'a, T> {
    shape: PoolShape,
    layer: usize,
    elements: Pool<'a, T>,
}

/// Rows whose keys and values are to be stored.
pub(super) struct Rows<'a> {
    pub(super) batch: &'a Batch,
    pub(super) rotary: &'a CpuRotary,
    /// What queries and keys go through before they are rotated.
    pub(super) norms: Option<&'a HeadNorms<'a, CpuVector>>,
}

/// One layer's storing, seen by all its tasks, each of which has rows of its own and their blocks.
struct Storing<'a, T> {
    kernels: &'static Kernels,
    shape: PoolShape,
    layer: usize,
    layout: Layout,
    /// `(rows, q | k | v)`.
    qkv: Parts<'a, f32>,
    stored: Parts<'a, T>,
    round: &'a Round<'a, T>,
}

impl<'a, T: Plain> Storing<'a, T> {
    /// Asks for the memory that a token alone goes to: its keys are in as many cache lines as all of a block.
    fn expect(&self, run: &StoredRun) {
        if run.rows.len() > 1 {
            return;
        }
        let token = run.position % self.shape.block_tokens;
        for kv_head in 0..self.shape.heads.kv_heads {
            let keys = self.head(run, self.shape.key_offset(self.layer, kv_head));
            let values = self.head(run, self.shape.value_offset(self.layer, kv_head));
            let first = token / 2 * 2 * self.shape.heads.head_dim;
            let values = &values[first..values.len().min(first + 2 * self.shape.heads.head_dim)];
            for part in [bytes_of(keys), bytes_of(values)] {
                // SAFETY: `Kernels::of` checked the instructions.
                unsafe { (self.kernels.expect)(part) };
            }
        }
    }

    /// A head of a run's block, from this element of the block on.
    fn head(&self, run: &StoredRun, offset: usize) -> &'a mut [T] {
        let start = run.block.0 as usize * self.shape.block_elements() + offset;
        // SAFETY: a block is of one run, as the plan has seen, and a run of one task, which takes one head at a time.
        unsafe { self.stored.part(start..start + self.shape.head_elements()) }
    }

    fn row(&self, row: usize) -> &'a mut [f32] {
        let width = self.shape.heads.qkv_width();
        // SAFETY: a row is of one run, and a run of one task.
        unsafe { self.qkv.part(row * width..(row + 1) * width) }
    }

    /// Normalises and rotates queries and keys where they are.
    fn turn(&self, rows: &Rows<'_>, run: &StoredRun) {
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = self.shape.heads;
        let half = head_dim / 2;
        for (row, position) in run.rows.clone().zip(run.position..) {
            let cos = &rows.rotary.cos[position * half..][..half];
            let sin = &rows.rotary.sin[position * half..][..half];
            let heads = &mut self.row(row)[..(query_heads + kv_heads) * head_dim];
            for (index, head) in heads.chunks_exact_mut(head_dim).enumerate() {
                if let Some(norms) = rows.norms {
                    let weight = match index < query_heads {
                        true => norms.query,
                        false => norms.key,
                    };
                    // SAFETY: `Kernels::of` checked the instructions.
                    unsafe { (self.kernels.norm)(head, &weight.0, norms.epsilon) };
                }
                // SAFETY: as above.
                unsafe { (self.kernels.rotate)(head, cos, sin) };
            }
        }
    }

    /// Rounds keys and values and puts them where attention reads them.
    fn store(&self, run: &StoredRun) {
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = self.shape.heads;
        let mut rounded = Rounded([T::default(); RUN_ELEMENTS]);
        let tokens_each = (RUN_ELEMENTS / head_dim).min(LANES);
        for first in run.rows.clone().step_by(tokens_each) {
            let rows = first..run.rows.end.min(first + tokens_each);
            let spot = Spot {
                layout: self.layout,
                block_tokens: self.shape.block_tokens,
                head_dim,
                token: (run.position + first - run.rows.start) % self.shape.block_tokens,
            };
            for head in 0..2 * kv_heads {
                let (of_values, kv_head) = (head >= kv_heads, head % kv_heads);
                let to = self.head(
                    run,
                    match of_values {
                        false => self.shape.key_offset(self.layer, kv_head),
                        true => self.shape.value_offset(self.layer, kv_head),
                    },
                );
                let column = (query_heads + head) * head_dim;
                let rounded = &mut rounded.0[..rows.len() * head_dim];
                for (row, rounded) in rows.clone().zip(rounded.chunks_exact_mut(head_dim)) {
                    let scale = (self.round)(&self.row(row)[column..column + head_dim], rounded);
                    if let Some(scale) = scale {
                        let token = spot.token + row - rows.start;
                        Spot { token, ..spot }.put_scale(scale, bytes_of_mut(to));
                    }
                }
                match of_values {
                    // SAFETY: `Kernels::of` checked the instructions.
                    false => spot.put_keys(rounded, to, |from, tokens, to| unsafe {
                        (self.kernels.turn)(from, tokens, to);
                    }),
                    true => spot.put_values(rounded, to),
                }
            }
        }
    }
}

impl CpuOps {
    /// Normalises and rotates rows, and stores their keys and values.
    pub(super) fn store_rows(
        &mut self,
        rows: &Rows<'_>,
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

    /// Normalises and rotates rows, and stores their keys and values in a pool of `T`.
    fn store_as<T: Plain>(
        &mut self,
        rows: &Rows<'_>,
        qkv: &mut CpuRows,
        pool: LayerOf<'_, CpuPool>,
        round: &Round<'_, T>,
    ) {
        let LayerOf { pool, layer } = pool;
        let shape = pool.shape;
        let Rows { batch, rotary, .. } = rows;
        assert_eq!(qkv.width, shape.heads.qkv_width());
        assert_eq!(rotary.half * 2, shape.heads.head_dim);
        let threads = self.threads.count();
        self.plan
            .make(batch, (shape.heads, shape.block_tokens), threads);
        let width = qkv.width;
        let storing = Storing {
            kernels: self.kernels,
            shape,
            layer,
            layout: Layout::of(self.precision, shape.heads, shape.block_tokens),
            qkv: Parts::new(qkv.head_mut(batch.rows_count())),
            stored: Parts::new(pool.elements_mut::<T>()),
            round,
        };
        let runs = self.plan.stored();
        let elements = batch.rows_count() * width;
        let each = (runs.len() * PIECE_ELEMENTS)
            .div_ceil(elements.max(1))
            .max(1);
        self.threads.run(runs.len().div_ceil(each), &|turn| {
            let mine = &runs[piece(turn.task, each, runs.len())];
            for (index, run) in mine.iter().enumerate() {
                // Memory takes as long as a row does: the next one's is asked for before this one is done.
                for run in &mine[index + usize::from(index > 0)..mine.len().min(index + 2)] {
                    storing.expect(run);
                }
                storing.turn(rows, run);
                storing.store(run);
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
