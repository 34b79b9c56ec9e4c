//! How what one pass does with keys and values is divided into tasks.
//!
//! Owns: the lists of tasks, made once per pass and used by every layer.
//! Invariant: which division is chosen changes no bit of the result, only who computes it. A block is written by one
//! task.

use crate::grid::piece;
use crate::kernel::attention::{Queries, SPAN, Share, heads_max, state_len, tokens_max};
use cleave_domain::BlockIndex;
use cleave_engine::ops::{Batch, HeadShape};
use std::ops::Range;

/// Consecutive tokens of a segment, with some KV heads.
#[derive(Clone, Debug)]
struct Place {
    segment: usize,
    /// Offset of the first token in the segment.
    first: usize,
    tokens: usize,
    kv_heads: Range<usize>,
}

/// Rows whose keys and values go to one block.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) block: BlockIndex,
    /// Of the batch.
    pub(crate) rows: Range<usize>,
    /// Of the first row.
    pub(crate) position: usize,
}

/// The division of a pass.
#[derive(Debug, Default)]
pub(crate) struct AttentionPlan {
    /// What it was made for; `None` when it must be made anew.
    heads: Option<HeadShape>,
    stored: Vec<Stored>,
    /// To see that no block is written by two.
    written: Vec<BlockIndex>,
    tasks: Vec<(Place, Share)>,
    /// Tasks that put spans together, with the element of the partials where their states begin.
    merges: Vec<(Place, usize)>,
    partials_len: usize,
}

/// Tasks per thread at which no sequence's keys are divided any more.
const TASKS_PER_THREAD: usize = 4;

impl AttentionPlan {
    /// A new pass begins.
    pub(crate) fn forget(&mut self) {
        self.heads = None;
    }

    /// Makes the plan, unless it was made for this pass already.
    pub(crate) fn make(
        &mut self,
        batch: &Batch,
        (heads, block_tokens): (HeadShape, usize),
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
        let tokens = tokens_max(heads);
        let wanted = TASKS_PER_THREAD * threads;
        let runs = batch.segments.iter();
        let tiles = runs.clone().map(|run| run.rows.len().div_ceil(tokens));
        let tiles: usize = tiles.sum();
        let is_divided = threads > 1 && tiles < wanted;
        let all_spans = runs.map(|run| (run.position + run.rows.len()).div_ceil(SPAN));
        let parts = match is_divided {
            true => tiles.max(all_spans.sum()),
            false => tiles,
        };
        for (segment, run) in batch.segments.iter().enumerate() {
            for first in (0..run.rows.len()).step_by(tokens) {
                let tokens = tokens.min(run.rows.len() - first);
                let spans = (run.position + first + tokens).div_ceil(SPAN);
                let most = heads_max(heads, tokens);
                let heads_each = (parts * heads.kv_heads / wanted).clamp(1, most);
                for index in 0..heads.kv_heads.div_ceil(heads_each) {
                    let place = Place {
                        segment,
                        first,
                        tokens,
                        kv_heads: piece(index, heads_each, heads.kv_heads),
                    };
                    if is_divided && spans > 1 {
                        self.divide(&place, spans, heads);
                    } else {
                        self.tasks.push((place, Share::Whole));
                    }
                }
            }
        }
        // The longest first, so that no thread begins one when the others are done.
        self.tasks.sort_unstable_by_key(|(place, share)| {
            let run = &batch.segments[place.segment];
            let keys = match share {
                Share::Whole => run.position + place.first + place.tokens,
                Share::Span { .. } => SPAN,
            };
            std::cmp::Reverse(keys * place.tokens * place.kv_heads.len())
        });
    }

    /// # Panics
    /// If two segments write to one block, or one twice.
    fn make_stored(&mut self, batch: &Batch, block_tokens: usize) {
        self.stored.clear();
        self.written.clear();
        for run in &batch.segments {
            let table = batch.table(run);
            let (mut row, mut position) = (run.rows.start, run.position);
            while row < run.rows.end {
                let count = (block_tokens - position % block_tokens).min(run.rows.end - row);
                let block = table[position / block_tokens];
                self.written.push(block);
                self.stored.push(Stored {
                    block,
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

    /// Rows by the block that they are stored in.
    pub(crate) fn stored(&self) -> &[Stored] {
        &self.stored
    }

    fn divide(&mut self, place: &Place, spans: usize, heads: HeadShape) {
        let len = state_len(heads, place.tokens, place.kv_heads.len());
        self.merges.push((place.clone(), self.partials_len));
        for span in 0..spans {
            let partial = self.partials_len + span * len;
            let share = Share::Span { span, partial };
            self.tasks.push((place.clone(), share));
        }
        self.partials_len += spans * len;
    }

    /// Number of tasks.
    pub(crate) fn tasks_count(&self) -> usize {
        self.tasks.len()
    }

    /// Number of tasks after those.
    pub(crate) fn merges_count(&self) -> usize {
        self.merges.len()
    }

    /// Elements that the tasks leave for the merges.
    pub(crate) fn partials_len(&self) -> usize {
        self.partials_len
    }

    pub(crate) fn task<'a>(&'a self, batch: &'a Batch, task: usize) -> (Queries<'a>, &'a Share) {
        let (place, share) = &self.tasks[task];
        (queries(batch, place), share)
    }

    pub(crate) fn merge<'a>(&self, batch: &'a Batch, task: usize) -> (Queries<'a>, usize) {
        let (place, partial) = &self.merges[task];
        (queries(batch, place), *partial)
    }
}

fn queries<'a>(batch: &'a Batch, place: &Place) -> Queries<'a> {
    let run = &batch.segments[place.segment];
    Queries {
        table: batch.table(run),
        row: run.rows.start + place.first,
        position: run.position + place.first,
        tokens: place.tokens,
        kv_heads: place.kv_heads.clone(),
    }
}
