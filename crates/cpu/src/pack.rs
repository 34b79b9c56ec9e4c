//! Weights in the layout that the kernels read.
//!
//! Owns: [`CpuPack`] and what it makes, the layout's version among it.
//! Never: keeps a second copy of an embedding table: its rows are read where the file is mapped.
//! Invariant: the layout does not depend on the instruction set, so engines may share weights.

mod narrow;

use crate::cache::{Cache, Packed, Place, Wanted};
use crate::kernel::Kernels;
use crate::kernel::product::PANEL;
use crate::kernel::product::groups::Units;
use crate::kernel::product::halves::ELEMENT_WORDS;
use crate::memory::{Memory, Parts, Words};
use crate::options::{CpuOptions, Quantize};
use cleave_engine::EngineError;
use cleave_engine::checkpoint::{Checkpoint, StoredMatrix, StoredTensor, StoredType};
use cleave_engine::ops::{Pack, Precision, RotaryTable};
pub(crate) use narrow::{Columns, GROUPS, Kept, PER_STEP};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The version of everything that decides which words are made of a checkpoint: the forms' layouts, rounding, and which
/// column of a panel has which row. To be raised with any of it, because files on disk have it in their names.
pub(crate) const LAYOUT: u64 = 1;

/// Of a checkpoint's file, at most, while a matrix is packed: in bytes, as if its elements were the largest there are.
const SOURCE_BYTES_HELD: usize = 64 << 20;

/// Packs weights, with several threads.
#[derive(Debug)]
pub struct CpuPack {
    precision: Precision,
    quantize: Option<Quantize>,
    keeps_f16: bool,
    threads: usize,
    /// See [`Placement::nodes`](crate::placement::Placement::nodes).
    nodes: Vec<usize>,
    cache: Option<Mutex<Cache>>,
    /// Whether it was said that something needs more memory than was asked for.
    told_wider: AtomicBool,
}

/// A packed weight.
#[derive(Debug)]
pub struct CpuMatrix {
    pub(crate) form: Form,
    /// Columns of the result: rows of the stored tensors, or half of them.
    pub(crate) columns: usize,
    /// See [`Product::is_gated`](crate::kernel::product::Product::is_gated).
    pub(crate) is_gated: bool,
    /// Elements summed per result.
    pub(crate) width: usize,
    /// Steps of the inner dimension.
    pub(crate) steps: usize,
    /// `[panel][…]`: see `kernel::product` for what a form has there.
    pub(crate) words: Words,
    /// `(panels × PANEL)`.
    pub(crate) bias: Option<Vec<f32>>,
}

impl CpuMatrix {
    pub(crate) fn panels(&self) -> usize {
        match self.is_gated {
            true => self.columns.div_ceil(PANEL / 2),
            false => self.columns.div_ceil(PANEL),
        }
    }
}

/// How a weight is kept.
#[derive(Clone, Debug)]
pub(crate) enum Form {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE's 16 bits.
    F16,
    /// Eight bits, a scale for each column.
    Int8(Columns),
    /// Eight or four bits in groups.
    Groups(Units),
}

/// Embedding rows, where the file is mapped.
#[derive(Debug)]
pub struct CpuTable {
    stored: StoredTensor,
    /// Since pages were let go.
    rows_read: AtomicUsize,
}

impl CpuTable {
    /// What the system maps for a row that is not there: sixteen pages, or one of the larger ones.
    const MAPPED_BYTES: usize = 1 << 16;
    /// Of the table, at most, in this process's memory; in bytes.
    const HELD_BYTES: usize = 32 << 20;

    fn new(stored: StoredTensor) -> Self {
        Self {
            stored,
            rows_read: AtomicUsize::new(0),
        }
    }

    /// A token's row, as f32.
    pub(crate) fn read_row(&self, token: usize, out: &mut [f32]) {
        self.stored.read_row(token, out);
    }

    /// To be told after rows were read. A tied head is packed, so that the rows of a large table would be in memory twice once
    /// every token has come by: their pages go back to the system's cache of files, from where the next read has them.
    pub(crate) fn were_read(&self, rows: usize) {
        let before = self.rows_read.fetch_add(rows, Ordering::Relaxed);
        if self.stored.bytes().len() > Self::HELD_BYTES
            && (before + rows) * Self::MAPPED_BYTES > Self::HELD_BYTES
        {
            self.rows_read.store(0, Ordering::Relaxed);
            self.stored.release();
        }
    }
}

/// A norm's weight.
#[derive(Debug)]
pub struct CpuVector(pub(crate) Vec<f32>);

/// Cosines and sines by position.
#[derive(Debug)]
pub struct CpuRotary {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) half: usize,
}

/// Words between the columns of a panel while it is put together; the extra words keep columns of a
/// power-of-two size from sharing cache sets.
const fn column_stride(steps: usize) -> usize {
    steps.next_multiple_of(16) + 16
}

impl CpuPack {
    /// Packs for `options.precision` with `options.threads`.
    pub fn new(options: &CpuOptions) -> Self {
        Self {
            precision: options.precision,
            quantize: options.quantize,
            keeps_f16: options.keeps_f16,
            threads: options.threads_count(),
            nodes: options.placement.nodes.clone(),
            cache: None,
            told_wider: AtomicBool::new(false),
        }
    }

    /// As [`CpuPack::new`], for one load of this checkpoint: what is packed is kept in `folder` for the next load,
    /// which maps it from there. Whatever is wrong with what is there, or with writing it, is a warning.
    pub fn cached(options: &CpuOptions, folder: &Path, checkpoint: &Checkpoint) -> Self {
        let source = (checkpoint.dir(), checkpoint.stamp());
        let pack = Self::new(options);
        let form = match pack.form() {
            "" => options.precision.name().to_owned(),
            form => format!("{}-{form}", options.precision.name()),
        };
        pack.kept_at(Place::new(folder, source, form))
    }

    pub(crate) fn kept_at(self, place: Place) -> Self {
        let cache = Cache::open(place, self.threads);
        Self {
            cache: Some(Mutex::new(cache)),
            ..self
        }
    }

    /// Does something with the cache, if there is one.
    fn with_cache<T>(&self, act: impl FnOnce(&mut Cache) -> Option<T>) -> Option<T> {
        let cache = self.cache.as_ref()?;
        act(&mut cache.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The head decides between tokens that are nearly as likely: it gets no fewer than eight bits.
    fn kept_head(&self, stack: &[StoredMatrix]) -> Kept {
        match self.quantize {
            Some(_) => Kept::Int8,
            None => self.kept(stack),
        }
    }

    /// How a stack will be kept.
    fn kept(&self, stack: &[StoredMatrix]) -> Kept {
        let dense = match self.precision {
            Precision::F32 => Kept::F32,
            Precision::Bf16 if self.keeps_f16 && !stack.is_empty() && stack.iter().all(is_f16) => {
                Kept::F16
            }
            Precision::Bf16 => Kept::Bf16,
        };
        let is_dense = |matrix: &StoredMatrix| matches!(matrix, StoredMatrix::Dense(_));
        let kept = match self.quantize {
            Some(quantize) if stack.iter().all(is_dense) => Kept::quantized(quantize, stack),
            _ if self.precision == Precision::Bf16 => Kept::narrow(stack).unwrap_or(dense),
            _ => dense,
        };
        self.tell_wider(kept, stack);
        kept
    }

    /// A stack from the cache, or else packed.
    fn make(
        &self,
        kept: impl FnOnce() -> Kept,
        (stack, order): (&[StoredMatrix], RowOrder),
        bias: Option<&[f32]>,
    ) -> Result<CpuMatrix, EngineError> {
        let wanted = Wanted::of(stack, order);
        let Packed {
            kept,
            words,
            of_columns,
        } = match self.with_cache(|cache| cache.take(&wanted)) {
            Some(packed) => packed,
            None => {
                let packed = self.pack(kept(), stack, order)?;
                self.with_cache(|cache| {
                    cache.keep(&wanted, &packed);
                    None::<()>
                });
                stack.iter().for_each(StoredMatrix::release);
                packed
            }
        };
        let rows: usize = stack.iter().map(StoredMatrix::rows).sum();
        let width = stack.first().map_or(0, StoredMatrix::columns);
        let bias = bias.map(|bias| {
            assert_eq!(bias.len(), rows, "bias of a stack of {rows} rows");
            let of = |place: Option<usize>| place.map_or(0.0, |place| bias[place]);
            order.places(rows).map(of).collect()
        });
        Ok(CpuMatrix {
            form: match kept {
                Kept::F32 => Form::F32,
                Kept::Bf16 => Form::Bf16,
                Kept::F16 => Form::F16,
                Kept::Int8 => Form::Int8(of_columns.expect("eight bits come with scales")),
                Kept::Groups(units) => Form::Groups(units),
            },
            columns: order.columns(rows),
            is_gated: order == RowOrder::Gated,
            width,
            steps: kept.steps(width),
            words,
            bias,
        })
    }

    fn pack(
        &self,
        kept: Kept,
        stack: &[StoredMatrix],
        order: RowOrder,
    ) -> Result<Packed, EngineError> {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        assert!(stack.iter().all(|tensor| tensor.columns() == width));
        let rows: Vec<(&StoredMatrix, usize)> = stack
            .iter()
            .flat_map(|tensor| (0..tensor.rows()).map(move |row| (tensor, row)))
            .collect();
        let panels = order.panels(rows.len());
        let (steps, size) = (kept.steps(width), kept.panel_words(width));
        let mut words = Memory::zeroed(panels * size)?;
        words.spread(&self.nodes);
        let mut of_columns = (kept == Kept::Int8).then(|| Columns::new(panels * PANEL));
        let sources: Vec<Source<'_>> = order
            .places(rows.len())
            .map(|place| place.map(|place| rows[place]))
            .collect();
        let parts = Parts::new(&mut words);
        let of_parts = of_columns.as_mut().map(Columns::parts);
        let next = AtomicUsize::new(0);
        let panels_held = (SOURCE_BYTES_HELD / (PANEL * width * size_of::<f32>()).max(1)).max(1);
        std::thread::scope(|scope| {
            for _ in 0..self.threads.min(panels) {
                scope.spawn(|| {
                    let mut bench = Bench::new(width, steps);
                    loop {
                        let panel = next.fetch_add(1, Ordering::Relaxed);
                        if panel >= panels {
                            break;
                        }
                        let first = panel * PANEL;
                        let sources = &sources[first..first + PANEL];
                        // SAFETY: every panel is taken by one thread.
                        let to = unsafe { parts.part(panel * size..(panel + 1) * size) };
                        match (kept, &of_parts) {
                            (Kept::F32, _) => bench.pack_dense(Precision::F32, sources, to),
                            (Kept::Bf16, _) => bench.pack_dense(Precision::Bf16, sources, to),
                            (Kept::F16, _) => bench.pack_halves(sources, to),
                            (Kept::Int8, Some(of_parts)) => {
                                // SAFETY: as above.
                                let of_panel = unsafe { of_parts.part(first..first + PANEL) };
                                bench.pack_bytes(sources, to, of_panel);
                            }
                            (Kept::Int8, None) => unreachable!("eight bits come with scales"),
                            (Kept::Groups(units), _) => bench.pack_groups(sources, units, to),
                        }
                        // What was read for earlier panels stays in this process's memory until it is let go; another
                        // thread that is still reading has its pages back at once.
                        if panel % panels_held == panels_held - 1 {
                            stack.iter().for_each(StoredMatrix::release);
                        }
                    }
                });
            }
        });
        Ok(Packed {
            kept,
            words: Words::Own(words),
            of_columns,
        })
    }
}

/// Which row of a stack is which column of the panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As they come.
    Stacked,
    /// Sixteen of the first half, then the same sixteen of the second.
    Gated,
}

/// A row of a stored tensor; none where a panel has a column that nobody looks at.
type Source<'a> = Option<(&'a StoredMatrix, usize)>;

impl RowOrder {
    /// Columns of the result.
    fn columns(self, rows: usize) -> usize {
        match self {
            Self::Stacked => rows,
            Self::Gated => rows / 2,
        }
    }

    pub(crate) fn panels(self, rows: usize) -> usize {
        match self {
            Self::Stacked => rows.div_ceil(PANEL),
            Self::Gated => (rows / 2).div_ceil(PANEL / 2),
        }
    }

    /// The row of each column of all panels.
    fn places(self, rows: usize) -> impl Iterator<Item = Option<usize>> {
        const HALF: usize = PANEL / 2;
        let columns = self.columns(rows);
        (0..self.panels(rows) * PANEL).map(move |at| match self {
            Self::Stacked => (at < rows).then_some(at),
            Self::Gated => {
                let column = at / PANEL * HALF + at % HALF;
                let first = at % PANEL / HALF * columns;
                (column < columns).then_some(first + column)
            }
        })
    }
}

/// What a step reads of a stack.
fn bytes_of(kept: Kept, stack: &[StoredMatrix]) -> u64 {
    let width = stack.first().map_or(0, StoredMatrix::columns);
    let columns: usize = stack.iter().map(StoredMatrix::rows).sum();
    (columns.div_ceil(PANEL) * kept.panel_words(width) * size_of::<u32>()) as u64
}

fn is_f16(matrix: &StoredMatrix) -> bool {
    matches!(matrix, StoredMatrix::Dense(tensor) if tensor.stored() == StoredType::F16)
}

/// bf16 bits, halves to even; a NaN stays one.
#[inline]
fn brain(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits | 0x0040_0000) >> 16;
    }
    bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16
}

/// One column's words: the bytes as they are where the file has them so, else by way of f32.
fn column_words(
    precision: Precision,
    (matrix, index): (&StoredMatrix, usize),
    row: &mut [f32],
    to: &mut [u32],
) {
    if let StoredMatrix::Dense(tensor) = matrix
        && matches!(
            (precision, tensor.stored()),
            (Precision::F32, StoredType::F32) | (Precision::Bf16, StoredType::Bf16)
        )
    {
        let bytes = tensor.row_bytes(index);
        if bytes.len() == size_of_val(to) {
            for (to, bytes) in to.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *to = u32::from_le_bytes(*bytes);
            }
            return;
        }
    }
    matrix.read_row(index, row);
    match precision {
        Precision::F32 => {
            for (to, x) in to.iter_mut().zip(row) {
                *to = x.to_bits();
            }
        }
        Precision::Bf16 => {
            let (pairs, odd) = row.as_chunks::<2>();
            for (to, [low, high]) in to.iter_mut().zip(pairs) {
                *to = brain(*low) | brain(*high) << 16;
            }
            if let [last] = odd {
                to[pairs.len()] = brain(*last);
            }
        }
    }
}

/// One thread's space to put panels together.
struct Bench {
    row: Vec<f32>,
    /// `(PANEL, stride)`.
    words: Vec<u32>,
    /// Pairs of f16, `[pair][PANEL]`.
    pairs: Vec<u32>,
    stride: usize,
}

impl Bench {
    fn new(width: usize, steps: usize) -> Self {
        let stride = column_stride(steps);
        Self {
            row: vec![0.0; width],
            words: vec![0; PANEL * stride],
            pairs: Vec::new(),
            stride,
        }
    }

    /// `columns[i]` is where column `i` of the panel comes from; what comes from nowhere is zero.
    fn pack_dense(&mut self, precision: Precision, columns: &[Source<'_>], to: &mut [u32]) {
        let steps = to.len() / PANEL;
        for (column, words) in columns.iter().zip(self.words.chunks_exact_mut(self.stride)) {
            match column {
                Some(column) => {
                    column_words(precision, *column, &mut self.row, &mut words[..steps])
                }
                None => words.fill(0),
            }
        }
        self.interleave(to);
    }

    /// As [`Bench::pack_dense`], of tensors that are f16.
    fn pack_halves(&mut self, columns: &[Source<'_>], to: &mut [u32]) {
        for (column, words) in columns.iter().zip(self.words.chunks_exact_mut(self.stride)) {
            words.fill(0);
            let Some((StoredMatrix::Dense(tensor), row)) = column else {
                continue;
            };
            let (pairs, odd) = tensor.row_bytes(*row).as_chunks::<4>();
            for (to, bytes) in words.iter_mut().zip(pairs) {
                *to = u32::from_le_bytes(*bytes);
            }
            if let [low, high] = odd {
                words[pairs.len()] = u32::from_le_bytes([*low, *high, 0, 0]);
            }
        }
        let mut pairs = std::mem::take(&mut self.pairs);
        pairs.resize(self.row.len().div_ceil(2) * PANEL, 0);
        self.interleave(&mut pairs);
        // Of a pair of elements, all columns of the one, then of the other.
        let both = to.chunks_mut(2 * ELEMENT_WORDS);
        for (to, pairs) in both.zip(pairs.chunks_exact(PANEL)) {
            let (first, second) = to.split_at_mut(ELEMENT_WORDS);
            for (to, pair) in first.iter_mut().zip(pairs.as_chunks::<2>().0) {
                *to = pair[0] & 0xffff | pair[1] << 16;
            }
            for (to, pair) in second.iter_mut().zip(pairs.as_chunks::<2>().0) {
                *to = pair[0] >> 16 | pair[1] & 0xffff_0000;
            }
        }
        self.pairs = pairs;
    }

    /// Columns to steps.
    fn interleave(&self, to: &mut [u32]) {
        // SAFETY: `Kernels::best` checked the instructions.
        unsafe { (Kernels::best().interleave)(&self.words, self.stride, to) };
    }
}

impl Pack for CpuPack {
    type Matrix = CpuMatrix;
    type Table = CpuTable;
    type Vector = CpuVector;
    type Rotary = CpuRotary;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn form(&self) -> &'static str {
        match self.quantize {
            Some(quantize) => quantize.name(),
            None if self.keeps_f16 => "f16",
            None => "",
        }
    }

    fn finish(&self) -> Result<(), EngineError> {
        self.with_cache(|cache| {
            cache.finish();
            None::<()>
        });
        Ok(())
    }

    fn matrix_bytes(&self, stack: &[StoredMatrix]) -> u64 {
        bytes_of(self.kept(stack), stack)
    }

    fn head_bytes(&self, head: &StoredTensor) -> u64 {
        let stack = [head.clone().into()];
        bytes_of(self.kept_head(&stack), &stack)
    }

    fn matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<CpuMatrix, EngineError> {
        self.make(|| self.kept(stack), (stack, RowOrder::Stacked), bias)
    }

    fn gate_up(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<CpuMatrix, EngineError> {
        self.make(|| self.kept(stack), (stack, RowOrder::Gated), bias)
    }

    fn head(&self, head: &StoredTensor) -> Result<CpuMatrix, EngineError> {
        let stack = [head.clone().into()];
        self.make(|| self.kept_head(&stack), (&stack, RowOrder::Stacked), None)
    }

    fn table(&self, stored: &StoredTensor) -> Result<CpuTable, EngineError> {
        Ok(CpuTable::new(stored.clone()))
    }

    fn vector(&self, values: &[f32]) -> Result<CpuVector, EngineError> {
        Ok(CpuVector(values.to_vec()))
    }

    fn rotary(&self, table: RotaryTable<'_>) -> Result<CpuRotary, EngineError> {
        assert_eq!(table.cos.len(), table.sin.len());
        Ok(CpuRotary {
            cos: table.cos.to_vec(),
            sin: table.sin.to_vec(),
            half: table.half,
        })
    }
}
