//! Division of one pass's attention and KV stores into tasks.
//!
//! Owns: the lists of tasks, built once per pass and used by every layer.
//! Invariant: the division changes no bit of the result, only the thread that computes it. Only one
//! task writes a block.

use crate::grid::run_range;
use cleave_cpu_kernels::kernel::attention::{
    Queries, SPAN, SpanShare, kv_heads_per_task_max, state_len, tokens_per_task_max,
};
use cleave_domain::{BlockIndex, KvPlane};
use cleave_engine::ops::{Batch, HeadShape};
use std::ops::Range;

/// Consecutive tokens of a segment, with some KV heads.
#[derive(Clone, Debug)]
struct QueryChunk {
    segment: usize,
    /// Offset of the first token in the segment.
    first: usize,
    tokens: usize,
    kv_heads: Range<usize>,
}

/// Rows whose keys and values are stored in one block.
#[derive(Clone, Debug)]
pub(crate) struct StoredRun {
    /// The block's place in the batch's tables of a plane.
    pub(crate) entry: usize,
    /// Rows of the batch.
    pub(crate) rows: Range<usize>,
    /// Position of the first row.
    pub(crate) position: usize,
}

/// Division of a pass into tasks.
#[derive(Debug, Default)]
pub(crate) struct CpuAttentionPlan {
    /// Head shape of the current plan; `None` if it must be rebuilt.
    heads: Option<HeadShape>,
    stored: Vec<StoredRun>,
    /// Scratch of the check that no block is written twice.
    written: Vec<BlockIndex>,
    tasks: Vec<(QueryChunk, SpanShare)>,
    /// Tasks that merge spans, with the first element of their states in the partials.
    merges: Vec<(QueryChunk, usize)>,
    partials_len: usize,
}

/// Tasks per thread from which on no sequence's keys are divided.
const TASKS_PER_THREAD: usize = 4;

impl CpuAttentionPlan {
    /// Discards the plan at the start of a pass.
    pub(crate) fn reset(&mut self) {
        self.heads = None;
    }

    /// Builds the plan, unless this pass has one already.
    pub(crate) fn prepare(
        &mut self,
        batch: &Batch,
        heads: HeadShape,
        block_tokens: usize,
        threads: usize,
    ) {
        if self.heads == Some(heads) {
            return;
        }
        self.heads = Some(heads);
        self.make_stored(batch, block_tokens);
        self.tasks.clear();
        self.merges.clear();
        self.partials_len = 0;
        let tokens = tokens_per_task_max(heads);
        let tasks_target = TASKS_PER_THREAD * threads;
        let runs = batch.segments.iter();
        let tiles = runs.clone().map(|run| run.rows.len().div_ceil(tokens));
        let tiles: usize = tiles.sum();
        // With fewer tiles of rows than threads can use, long sequences' keys are divided into
        // spans.
        let is_divided = threads > 1 && tiles < tasks_target;
        let all_spans = runs.map(|run| (run.position + run.rows.len()).div_ceil(SPAN));
        let parts = if is_divided {
            tiles.max(all_spans.sum())
        } else {
            tiles
        };
        for (segment, run) in batch.segments.iter().enumerate() {
            for first in (0..run.rows.len()).step_by(tokens) {
                let tokens = tokens.min(run.rows.len() - first);
                let spans = (run.position + first + tokens).div_ceil(SPAN);
                let most = kv_heads_per_task_max(heads, tokens);
                // As many KV heads per task as still leave enough tasks for all threads: adjacent
                // heads are read in one run of memory.
                let heads_each = (parts * heads.kv_heads / tasks_target).clamp(1, most);
                for index in 0..heads.kv_heads.div_ceil(heads_each) {
                    let chunk = QueryChunk {
                        segment,
                        first,
                        tokens,
                        kv_heads: run_range(index, heads_each, heads.kv_heads),
                    };
                    if is_divided && spans > 1 {
                        self.split_into_spans(&chunk, spans, heads);
                    } else {
                        self.tasks.push((chunk, SpanShare::AllSpans));
                    }
                }
            }
        }
        // The longest tasks first, so that no thread starts one when the others have finished.
        self.tasks.sort_unstable_by_key(|(chunk, share)| {
            let run = &batch.segments[chunk.segment];
            let keys = match share {
                SpanShare::AllSpans => run.position + chunk.first + chunk.tokens,
                SpanShare::OneSpan { .. } => SPAN,
            };
            std::cmp::Reverse(keys * chunk.tokens * chunk.kv_heads.len())
        });
    }

    /// # Panics
    /// If two segments write to one block, or one twice.
    fn make_stored(&mut self, batch: &Batch, block_tokens: usize) {
        self.stored.clear();
        self.written.clear();
        for run in &batch.segments {
            let table = batch.table(run, KvPlane::Blocks);
            let (mut row, mut position) = (run.rows.start, run.position);
            while row < run.rows.end {
                let count = (block_tokens - position % block_tokens).min(run.rows.end - row);
                self.written.push(table[position / block_tokens]);
                self.stored.push(StoredRun {
                    entry: run.blocks.start + position / block_tokens,
                    rows: row..row + count,
                    position,
                });
                (row, position) = (row + count, position + count);
            }
        }
        self.written.sort_unstable();
        let is_twice = |pair: &[BlockIndex]| pair[0] == pair[1];
        assert!(
            !self.written.windows(2).any(is_twice),
            "a block is written twice"
        );
    }

    /// Runs of rows, each stored in one block.
    pub(crate) fn stored(&self) -> &[StoredRun] {
        &self.stored
    }

    fn split_into_spans(&mut self, chunk: &QueryChunk, spans: usize, heads: HeadShape) {
        let len = state_len(heads, chunk.tokens, chunk.kv_heads.len());
        self.merges.push((chunk.clone(), self.partials_len));
        for span in 0..spans {
            let partial = self.partials_len + span * len;
            let share = SpanShare::OneSpan { span, partial };
            self.tasks.push((chunk.clone(), share));
        }
        self.partials_len += spans * len;
    }

    pub(crate) fn tasks_count(&self) -> usize {
        self.tasks.len()
    }

    /// Number of merge tasks, which run after all tasks.
    pub(crate) fn merges_count(&self) -> usize {
        self.merges.len()
    }

    /// Elements of the partials: states that tasks write for the merges.
    pub(crate) fn partials_len(&self) -> usize {
        self.partials_len
    }

    pub(crate) fn task<'a>(
        &'a self,
        batch: &'a Batch,
        plane: KvPlane,
        task: usize,
    ) -> (Queries<'a>, &'a SpanShare) {
        let (chunk, share) = &self.tasks[task];
        (queries(batch, plane, chunk), share)
    }

    pub(crate) fn merge<'a>(
        &self,
        batch: &'a Batch,
        plane: KvPlane,
        task: usize,
    ) -> (Queries<'a>, usize) {
        let (chunk, partial) = &self.merges[task];
        (queries(batch, plane, chunk), *partial)
    }
}

fn queries<'a>(batch: &'a Batch, plane: KvPlane, chunk: &QueryChunk) -> Queries<'a> {
    let run = &batch.segments[chunk.segment];
    Queries {
        table: batch.table(run, plane),
        row: run.rows.start + chunk.first,
        position: run.position + chunk.first,
        tokens: chunk.tokens,
        kv_heads: chunk.kv_heads.clone(),
    }
}
