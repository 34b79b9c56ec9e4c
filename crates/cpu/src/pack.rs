//! Weights in the kernels' layout.
//!
//! Owns: [`CpuWeightLoader`], the packed weights, and the version of their layout.
//! Never: copies an embedding table: its rows are read from the mapped file.
//! Invariant: the layout does not depend on the instruction set, so engines may share weights.

mod groups;
mod quantized;
mod row_order;
mod table;

use crate::affinity;
use crate::cache::{PackedCache, PackedLocation, PackedStack, StackKey};
use crate::options::CpuOptions;
use cleave_checkpoint::{Checkpoint, StoredMatrix, StoredTensor, StoredType, rounding};
use cleave_cpu_kernels::kernel::CpuKernels;
use cleave_cpu_kernels::kernel::product::PANEL;
use cleave_cpu_kernels::kernel::product::groups::ScaleFormat;
use cleave_cpu_kernels::kernel::product::halves::ELEMENT_WORDS;
use cleave_cpu_kernels::memory::{PageChunks, SliceParts, WeightWords, bytes_of_mut};
use cleave_engine::EngineError;
use cleave_engine::ops::{
    InnerSlices, ModelSpec, Precision, Quantize, RotaryTable, Unsupported, WeightLoader,
    supports_decoder,
};
use parking_lot::Mutex;
pub(crate) use quantized::{PER_STEP, StackForm, groups_of};
pub(crate) use row_order::RowOrder;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub use table::CpuTable;

/// Version of everything that decides the packed words: the formats' layouts, rounding, and the
/// order of rows in panels. Raise it with any change, because names of cached files contain it.
pub(crate) const LAYOUT: u64 = 4;

/// Limit of a checkpoint file's bytes in this process's memory while a matrix is packed, counted as
/// if elements were f32.
const SOURCE_BYTES_RESIDENT_MAX: usize = 64 << 20;

/// Packs weights, with several threads.
#[derive(Debug)]
pub struct CpuWeightLoader {
    precision: Precision,
    quantize: Option<Quantize>,
    keeps_f16: bool,
    threads: usize,
    /// Memory nodes over which the weights are interleaved, see
    /// [`ThreadPlacement::nodes`](crate::placement::ThreadPlacement::nodes).
    nodes: Vec<usize>,
    cache: Option<Mutex<PackedCache>>,
    /// Memory of packed weights.
    pages: Mutex<PageChunks>,
    /// Whether the warning about a larger format than requested was logged.
    warned_wider: AtomicBool,
}

/// A weight matrix, packed in panels.
#[derive(Debug)]
pub struct CpuMatrix {
    pub(crate) form: StackForm,
    /// Scale of each column, `(panels × PANEL)`, in forms that have them.
    pub(crate) column_scales: Option<Vec<f32>>,
    /// Columns of the result: rows of the stored tensors, or half of them if gated.
    pub(crate) columns: usize,
    /// Whether half of each panel is a gate, see
    /// [`PackedProduct::gate`](cleave_cpu_kernels::kernel::product::PackedProduct::gate).
    pub(crate) is_gated: bool,
    /// Inner dimension: elements summed per result.
    pub(crate) width: usize,
    /// End of each slice of the inner dimension, in steps; the last is the number of all steps.
    pub(crate) slices: Vec<usize>,
    /// Packed words `[panel][…]`; `kernel::product` defines the rest for each format.
    pub(crate) words: WeightWords,
    /// Bias of each column, `(panels × PANEL)`.
    pub(crate) bias: Option<Vec<f32>>,
}

impl CpuMatrix {
    /// Steps of the inner dimension.
    pub(crate) fn steps(&self) -> usize {
        self.slices.last().copied().unwrap_or(0)
    }

    pub(crate) fn panels(&self) -> usize {
        if self.is_gated {
            self.columns.div_ceil(PANEL / 2)
        } else {
            self.columns.div_ceil(PANEL)
        }
    }
}

/// Weight of a norm, `(width)`, in f32.
#[derive(Debug)]
pub struct CpuVector(pub(crate) Vec<f32>);

/// Cosines and sines by position.
#[derive(Debug)]
pub struct CpuRotary {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) half: usize,
    pub(crate) query_factors: Vec<f32>,
}

/// Distance in words between the columns of a panel in staging; the padding keeps columns of a
/// power-of-two size from sharing cache sets.
const fn column_stride(steps: usize) -> usize {
    steps.next_multiple_of(16) + 16
}

impl CpuWeightLoader {
    /// Packs in `options.precision` with `options.threads`.
    pub fn new(options: &CpuOptions) -> Self {
        Self {
            precision: options.precision,
            quantize: options.quantize,
            keeps_f16: options.keeps_f16,
            threads: options.threads_count(),
            nodes: options.placement.nodes.clone(),
            cache: None,
            pages: Mutex::default(),
            warned_wider: AtomicBool::new(false),
        }
    }

    /// As [`CpuWeightLoader::new`], for one load of this checkpoint: packed weights are cached in
    /// `folder`, from which the next load maps them. Problems with the cache are logged as
    /// warnings.
    pub fn cached(options: &CpuOptions, folder: &Path, checkpoint: &Checkpoint) -> Self {
        let pack = Self::new(options);
        let form = match pack.weight_form() {
            "" => options.precision.name().to_owned(),
            form => format!("{}-{form}", options.precision.name()),
        };
        let place = PackedLocation::new(folder, checkpoint.dir(), checkpoint.stamp(), form);
        pack.with_cache_at(place)
    }

    pub(crate) fn with_cache_at(self, place: PackedLocation) -> Self {
        let cache = PackedCache::open(place, self.threads);
        Self {
            cache: Some(Mutex::new(cache)),
            ..self
        }
    }

    /// Calls `act` with the cache, if there is one.
    fn with_cache<T>(&self, act: impl FnOnce(&mut PackedCache) -> Option<T>) -> Option<T> {
        let cache = self.cache.as_ref()?;
        act(&mut cache.lock())
    }

    /// Format of the head: at least eight bits, because it decides between tokens of nearly equal
    /// probability.
    fn head_form(&self, stack: &[StoredMatrix], slices: &InnerSlices) -> StackForm {
        match self.quantize {
            Some(_) => StackForm::Int8,
            None => self.stack_form(stack, slices),
        }
    }

    /// Format in which a stack will be packed.
    fn stack_form(&self, stack: &[StoredMatrix], slices: &InnerSlices) -> StackForm {
        let dense = match self.precision {
            Precision::F32 => StackForm::F32,
            Precision::Bf16 if self.keeps_f16 && !stack.is_empty() && stack.iter().all(is_f16) => {
                StackForm::F16
            }
            Precision::Bf16 => StackForm::Bf16,
        };
        let is_dense = |matrix: &StoredMatrix| matches!(matrix, StoredMatrix::Dense(_));
        let stack_form = match self.quantize {
            Some(quantize) if stack.iter().all(is_dense) => {
                StackForm::rounded_at_load(quantize.form(slices))
            }
            _ if self.precision == Precision::Bf16 => {
                StackForm::of_checkpoint(stack, slices).unwrap_or(dense)
            }
            _ => dense,
        };
        self.warn_if_wider(stack_form, stack);
        stack_form
    }

    /// Takes a stack from the cache, or else packs it.
    fn load_or_pack(
        &self,
        stack_form: impl FnOnce() -> StackForm,
        stack: &[StoredMatrix],
        order: RowOrder,
        bias: Option<&[f32]>,
        slices: &InnerSlices,
    ) -> Result<CpuMatrix, EngineError> {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        assert_eq!(slices.elements().len(), width, "slices of a stack");
        let key = StackKey::of_stack(stack, order, slices.count());
        let PackedStack {
            stack_form,
            words,
            column_scales,
        } = match self.with_cache(|cache| cache.take_stack(&key)) {
            Some(packed) => packed,
            None => {
                let packed = self.pack(stack_form(), stack, order)?;
                self.with_cache(|cache| {
                    cache.keep_stack(&key, &packed);
                    None::<()>
                });
                stack.iter().for_each(StoredMatrix::release);
                packed
            }
        };
        let rows: usize = stack.iter().map(StoredMatrix::rows).sum();
        let bias = bias.map(|bias| {
            assert_eq!(bias.len(), rows, "bias of a stack of {rows} rows");
            let of = |place: Option<usize>| place.map_or(0.0, |place| bias[place]);
            order.row_of_column(rows).map(of).collect()
        });
        Ok(CpuMatrix {
            form: stack_form,
            column_scales,
            columns: order.columns(rows),
            is_gated: order == RowOrder::GateUpInterleaved,
            width,
            slices: slices.ends().map(|end| stack_form.steps(end)).collect(),
            words,
            bias,
        })
    }

    /// Factor of all scales of a matrix in this form.
    fn scale_factor(&self, form: StackForm, matrix: &StoredMatrix) -> Option<f32> {
        match (form, matrix) {
            (_, StoredMatrix::Quantized(tensor)) => tensor.scale_factor(),
            (StackForm::Groups(units), StoredMatrix::Dense(_))
                if units.scales == ScaleFormat::E4m3 =>
            {
                Some(rounding::nvfp4_factor(matrix.magnitude_max(self.threads)))
            }
            (_, StoredMatrix::Dense(_)) => None,
        }
    }

    fn pack(
        &self,
        form: StackForm,
        stack: &[StoredMatrix],
        order: RowOrder,
    ) -> Result<PackedStack, EngineError> {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        assert!(stack.iter().all(|tensor| tensor.columns() == width));
        let rows: Vec<SourceRow<'_>> = stack
            .iter()
            .flat_map(|matrix| {
                let factor = self.scale_factor(form, matrix);
                (0..matrix.rows()).map(move |row| SourceRow {
                    matrix,
                    row,
                    factor,
                })
            })
            .collect();
        let panels = order.panels(rows.len());
        let (steps, size) = (form.steps(width), form.panel_words(width));
        let mut words = self.pages.lock().zeroed(panels * size)?;
        affinity::interleave_pages(bytes_of_mut(&mut words), &self.nodes);
        let mut column_scales =
            (form.column_words() > 0).then(|| vec![0.0; form.column_words() * panels * PANEL]);
        let sources: Vec<ColumnSource<'_>> = order
            .row_of_column(rows.len())
            .map(|place| place.map(|place| rows[place]))
            .collect();
        let parts = SliceParts::new(&mut words);
        let scales_parts = column_scales.as_mut().map(|scales| SliceParts::new(scales));
        let next = AtomicUsize::new(0);
        let panels_held =
            (SOURCE_BYTES_RESIDENT_MAX / (PANEL * width * size_of::<f32>()).max(1)).max(1);
        std::thread::scope(|scope| {
            for _ in 0..self.threads.min(panels) {
                scope.spawn(|| {
                    let mut packer = PanelPacker::new(width, steps);
                    loop {
                        let panel = next.fetch_add(1, Ordering::Relaxed);
                        if panel >= panels {
                            break;
                        }
                        let first = panel * PANEL;
                        let sources = &sources[first..first + PANEL];
                        // SAFETY: only one thread takes a panel.
                        let to = unsafe { parts.part(panel * size..(panel + 1) * size) };
                        // SAFETY: as above.
                        let scales = scales_parts
                            .as_ref()
                            .map(|parts| unsafe { parts.part(first..first + PANEL) });
                        match (form, scales) {
                            (StackForm::F32, _) => packer.pack_dense(Precision::F32, sources, to),
                            (StackForm::Bf16, _) => packer.pack_dense(Precision::Bf16, sources, to),
                            (StackForm::F16, _) => packer.pack_halves(sources, to),
                            (StackForm::Int8, Some(scales)) => {
                                packer.pack_bytes(sources, to, scales);
                            }
                            (StackForm::Int8, None) => unreachable!("eight bits come with scales"),
                            (StackForm::Groups(units), factors) => {
                                packer.pack_groups(sources, units, to, factors);
                            }
                        }
                        // Pages of the checkpoint stay in this process's memory until they are
                        // released; a thread that is still reading them maps them again at once.
                        if panel % panels_held == panels_held - 1 {
                            stack.iter().for_each(StoredMatrix::release);
                        }
                    }
                });
            }
        });
        Ok(PackedStack {
            stack_form: form,
            words: WeightWords::Owned(words),
            column_scales,
        })
    }
}

/// A row of a stored tensor.
#[derive(Clone, Copy)]
struct SourceRow<'a> {
    matrix: &'a StoredMatrix,
    row: usize,
    /// Factor of all scales of the matrix, if it has one.
    factor: Option<f32>,
}

/// Source of a panel's column; `None` for padding.
type ColumnSource<'a> = Option<SourceRow<'a>>;

/// Bytes that a step reads of a packed stack.
fn packed_bytes(stack_form: StackForm, stack: &[StoredMatrix]) -> u64 {
    let width = stack.first().map_or(0, StoredMatrix::columns);
    let columns: usize = stack.iter().map(StoredMatrix::rows).sum();
    let panel_words = stack_form.panel_words(width) + PANEL * stack_form.column_words();
    (columns.div_ceil(PANEL) * panel_words * size_of::<u32>()) as u64
}

fn is_f16(matrix: &StoredMatrix) -> bool {
    matches!(matrix, StoredMatrix::Dense(tensor) if tensor.stored() == StoredType::F16)
}

/// Rounds to bf16, halves to even; NaN stays NaN.
#[inline]
fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits | 0x0040_0000) >> 16;
    }
    bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16
}

/// Makes one column's words: copies the bytes if the file has the same format, or else converts by
/// way of f32.
fn column_words(
    precision: Precision,
    matrix: &StoredMatrix,
    index: usize,
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
                *to = bf16_bits(*low) | bf16_bits(*high) << 16;
            }
            if let [last] = odd {
                to[pairs.len()] = bf16_bits(*last);
            }
        }
    }
}

/// One thread's staging memory for panels.
struct PanelPacker {
    row: Vec<f32>,
    /// Words of the panel's columns, `(PANEL, stride)`.
    words: Vec<u32>,
    /// Pairs of f16, `[pair][PANEL]`.
    pairs: Vec<u32>,
    stride: usize,
}

impl PanelPacker {
    fn new(width: usize, steps: usize) -> Self {
        let stride = column_stride(steps);
        Self {
            row: vec![0.0; width],
            words: vec![0; PANEL * stride],
            pairs: Vec::new(),
            stride,
        }
    }

    /// Packs a panel of floats. `columns[i]` is the source of column `i`; padding columns are zero.
    fn pack_dense(&mut self, precision: Precision, columns: &[ColumnSource<'_>], to: &mut [u32]) {
        let steps = to.len() / PANEL;
        for (column, words) in columns.iter().zip(self.words.chunks_exact_mut(self.stride)) {
            match column {
                Some(SourceRow { matrix, row, .. }) => {
                    column_words(precision, matrix, *row, &mut self.row, &mut words[..steps])
                }
                None => words.fill(0),
            }
        }
        self.interleave(to);
    }

    /// As [`PanelPacker::pack_dense`], from f16 tensors.
    fn pack_halves(&mut self, columns: &[ColumnSource<'_>], to: &mut [u32]) {
        for (column, words) in columns.iter().zip(self.words.chunks_exact_mut(self.stride)) {
            words.fill(0);
            let Some(SourceRow {
                matrix: StoredMatrix::Dense(tensor),
                row,
                ..
            }) = column
            else {
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
        // Split each pair of elements: all columns of the first element, then all of the second.
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

    fn interleave(&self, to: &mut [u32]) {
        // SAFETY: `CpuKernels::best` checked the instructions.
        unsafe { (CpuKernels::best().interleave)(&self.words, self.stride, to) };
    }
}

impl WeightLoader for CpuWeightLoader {
    type Matrix = CpuMatrix;
    type Table = CpuTable;
    type Vector = CpuVector;
    type Rotary = CpuRotary;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn weight_form(&self) -> &'static str {
        match self.quantize {
            Some(quantize) => quantize.name(),
            None if self.keeps_f16 => "f16",
            None => "",
        }
    }

    fn supports(&self, spec: &ModelSpec) -> Result<(), Unsupported> {
        supports_decoder(spec)?;
        if self.quantize == Some(Quantize::Fp8) {
            return Err(Unsupported {
                family: spec.family,
                problem: "weights rounded to fp8 are for a GPU: a processor multiplies float 8 as \
                          bf16, so that they would lose accuracy and save no memory; int8 takes as \
                          little"
                    .to_owned(),
            });
        }
        Ok(())
    }

    fn finish(&self) -> Result<(), EngineError> {
        self.with_cache(|cache| {
            cache.finish();
            None::<()>
        });
        Ok(())
    }

    fn matrix_bytes(&self, stack: &[StoredMatrix], slices: &InnerSlices) -> u64 {
        packed_bytes(self.stack_form(stack, slices), stack)
    }

    fn head_bytes(&self, head: &StoredTensor) -> u64 {
        let (stack, slices) = ([head.clone().into()], InnerSlices::whole(head.columns()));
        packed_bytes(self.head_form(&stack, &slices), &stack)
    }

    fn sliced_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
        slices: &InnerSlices,
    ) -> Result<CpuMatrix, EngineError> {
        let form = || self.stack_form(stack, slices);
        self.load_or_pack(form, stack, RowOrder::Stacked, bias, slices)
    }

    fn gate_up(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<CpuMatrix, EngineError> {
        let slices = InnerSlices::whole(stack.first().map_or(0, StoredMatrix::columns));
        let form = || self.stack_form(stack, &slices);
        self.load_or_pack(form, stack, RowOrder::GateUpInterleaved, bias, &slices)
    }

    fn exact_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<CpuMatrix, EngineError> {
        let slices = InnerSlices::whole(stack.first().map_or(0, StoredMatrix::columns));
        self.load_or_pack(|| StackForm::F32, stack, RowOrder::Stacked, bias, &slices)
    }

    fn head(&self, head: &StoredTensor) -> Result<CpuMatrix, EngineError> {
        let (stack, slices) = ([head.clone().into()], InnerSlices::whole(head.columns()));
        let form = || self.head_form(&stack, &slices);
        self.load_or_pack(form, &stack, RowOrder::Stacked, None, &slices)
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
            query_factors: table.query_factors.to_vec(),
        })
    }
}
