//! A mixture of experts on all threads: rows are sorted by expert, and each expert's weights are
//! read once.
//!
//! Owns: the steps of a mixture, and the division of all experts' products into one run.
//! Never: does arithmetic itself; see `kernel` and `router`.
//! Invariant: a row's result depends on the row alone: its experts are added in ascending order,
//! whatever rows they are computed beside.

use super::adapted_experts::ExpertChanges;
use super::adapters::CpuAdapter;
use super::product::{LeftSizes, PackedLeft, RowsSource, packed_product, product_grid};
use super::router::{RowChoice, choose};
use super::sorted_rows::SortedRows;
use super::{CpuOps, PIECE_ELEMENTS, ensure_len};
use crate::buffers::CpuRows;
use crate::grid::{ProductGrid, run_range};
use crate::pack::{CpuMatrix, CpuWeightLoader};
use cleave_cpu_kernels::kernel::product::left::LeftSide;
use cleave_cpu_kernels::kernel::product::{PackedProduct, RowAddends, SCRATCH_WORDS};
use cleave_cpu_kernels::kernel::tile::Tiles;
use cleave_cpu_kernels::memory::{PageMemory, SliceParts};
use cleave_engine::EngineError;
use cleave_engine::ops::{Activation, AdaptedExperts, Experts};
use std::ops::Range;

/// Elements of experts' outputs that wait for their sum at once; rows of more are computed expert
/// after expert.
const WAITING_ELEMENTS: usize = 8 << 20;

/// Memory of a mixture between its runs, kept for the next one.
pub(super) struct ExpertsScratch {
    /// Logits of the router, `(rows, experts)`, with one more column for a shared expert's gate.
    logits: PageMemory<f32>,
    /// Weights of each row's experts, `(rows, uses)`.
    weights: Vec<f32>,
    pub(super) sorted: SortedRows,
    pub(super) parts: Vec<ExpertPart>,
    /// Gated products of the places of a piece, and their number.
    pub(super) gated: PageMemory<f32>,
    pub(super) gated_len: usize,
    /// Outputs of the places of a piece, `(places, hidden)`.
    pub(super) outputs: PageMemory<f32>,
    pub(super) changes: ExpertChanges,
}

/// One mixture, seen by all its runs.
#[derive(Clone, Copy)]
pub(super) struct Mixture<'a> {
    experts: &'a Experts<'a, CpuWeightLoader>,
    /// Adapters of the rows, if any of them changes an expert.
    pub(super) adapted: Option<AdaptedExperts<'a, CpuAdapter>>,
    rows: usize,
    /// Input rows, `(rows, hidden)`, one after the other.
    pub(super) x: &'a [f32],
    hidden: usize,
    /// Experts of each row, the shared one included, which is the last.
    uses: usize,
}

/// One of the two products of each expert.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpertProduct {
    /// From rows to gated products.
    GateUp,
    /// From gated products to outputs.
    Down,
}

/// One expert's product in a run of several.
pub(super) struct ExpertPart {
    pub(super) expert: usize,
    /// Its places, see [`SortedRows`].
    pub(super) places: Range<usize>,
    /// First element of the places' gated products.
    pub(super) gated_at: usize,
    /// First word and first scale of its packed rows, and how many there are.
    left_at: LeftSizes,
    left: LeftSizes,
    cut: Tiles,
    grid: ProductGrid,
    /// First task of packing, and of the product.
    pack_at: usize,
    product_at: usize,
}

/// Sums of the sizes of all parts of a run.
#[derive(Clone, Copy, Default)]
struct RunSizes {
    left: LeftSizes,
    /// Elements of all rows before they are packed.
    elements: usize,
    gated: usize,
    pack_tasks: usize,
    product_tasks: usize,
}

impl ExpertsScratch {
    fn new() -> Result<Self, EngineError> {
        Ok(Self {
            logits: PageMemory::zeroed(0)?,
            weights: Vec::new(),
            sorted: SortedRows::default(),
            parts: Vec::new(),
            gated: PageMemory::zeroed(0)?,
            gated_len: 0,
            outputs: PageMemory::zeroed(0)?,
            changes: ExpertChanges::new()?,
        })
    }
}

impl<'a> Mixture<'a> {
    /// Experts to sort rows by, the shared one included.
    fn experts_count(&self) -> usize {
        self.experts.experts.len() + usize::from(self.experts.shared.is_some())
    }

    /// Matrix and gate of an expert's product.
    fn matrix(&self, expert: usize, which: ExpertProduct) -> (&'a CpuMatrix, Option<Activation>) {
        let spec = self.experts.spec;
        let (matrices, mlp) = match (self.experts.experts.get(expert), spec.shared) {
            (Some(matrices), _) => (matrices, spec.expert),
            (None, Some(shared)) => {
                let matrices = self.experts.shared;
                (matrices.expect("a shared expert has matrices"), shared.mlp)
            }
            (None, None) => panic!("no expert {expert} of {}", spec.count),
        };
        match which {
            ExpertProduct::GateUp => (&matrices.gate_up, Some(mlp.activation)),
            ExpertProduct::Down => (&matrices.down, None),
        }
    }
}

impl CpuOps {
    /// Computes a mixture of experts, `x` and `out` `(rows, hidden)`.
    pub(super) fn mixture(
        &mut self,
        experts: &Experts<'_, CpuWeightLoader>,
        adapted: Option<AdaptedExperts<'_, CpuAdapter>>,
        rows: usize,
        x: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<(), EngineError> {
        assert_eq!(x.width, experts.router.width, "width of a router's input");
        assert_eq!(x.width, out.width, "width of experts' input and output");
        let mut scratch = match self.experts.take() {
            Some(scratch) => scratch,
            None => Box::new(ExpertsScratch::new()?),
        };
        if let Some(adapted) = &adapted {
            scratch.changes.begin(rows, adapted);
        }
        let mixture = Mixture {
            experts,
            adapted,
            rows,
            x: x.head(rows),
            hidden: experts.router.width,
            uses: experts.spec.chosen + usize::from(experts.shared.is_some()),
        };
        let done = self.run_mixture(&mixture, &mut scratch, out.head_mut(rows));
        self.experts = Some(scratch);
        done
    }

    fn run_mixture(
        &mut self,
        mixture: &Mixture<'_>,
        scratch: &mut ExpertsScratch,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        self.route(mixture, scratch)?;
        scratch.sorted.sort(mixture.experts_count(), mixture.uses);
        // Later steps may touch more experts: the list gets its size at once.
        scratch.parts.clear();
        scratch.parts.reserve(mixture.experts_count());
        out.fill(0.0);
        let places_max = WAITING_ELEMENTS / mixture.hidden;
        let mut first = 0;
        while first < mixture.experts_count() {
            let piece = scratch.sorted.piece(first, places_max);
            let places = scratch.sorted.places_of(&piece);
            ensure_len(&mut scratch.outputs, places.len() * mixture.hidden)?;
            for which in [ExpertProduct::GateUp, ExpertProduct::Down] {
                let sizes = self.plan_parts(mixture, scratch, &piece, which);
                ensure_len(&mut scratch.gated, sizes.gated)?;
                scratch.gated_len = sizes.gated;
                // Before the rows are packed: products of adapters use the same memory.
                if which == ExpertProduct::GateUp {
                    self.change_parts(mixture, scratch, which, places.start)?;
                }
                self.pack_parts(mixture, scratch, sizes, which)?;
                self.multiply_parts(mixture, scratch, sizes, which, places.start);
                if which == ExpertProduct::Down {
                    self.change_parts(mixture, scratch, which, places.start)?;
                }
            }
            self.add_outputs(mixture, scratch, &piece, out);
            first = piece.end;
        }
        Ok(())
    }

    /// Chooses each row's experts and their weights.
    fn route(
        &mut self,
        mixture: &Mixture<'_>,
        scratch: &mut ExpertsScratch,
    ) -> Result<(), EngineError> {
        let Mixture {
            experts,
            rows,
            x,
            uses,
            ..
        } = *mixture;
        let columns = experts.router.columns;
        ensure_len(&mut scratch.logits, rows * columns)?;
        let logits = &mut scratch.logits[..rows * columns];
        self.product(experts.router, None, rows, RowsSource::Rows(x), logits)?;
        scratch.weights.resize(rows * uses, 0.0);
        let (logits, weights) = (
            SliceParts::new(logits),
            SliceParts::new(&mut scratch.weights),
        );
        let chosen = SliceParts::new(scratch.sorted.experts_mut(rows * uses));
        let spec = experts.spec;
        let bias = experts.choice_bias.map(|bias| &bias.0[..]);
        let kernels = self.kernels;
        self.each_row(rows, columns * uses, &|row| {
            let own = row * uses..(row + 1) * uses;
            // SAFETY: each row belongs to one task; `CpuKernels::of` checked the instructions.
            unsafe {
                let logits = logits.part(row * columns..(row + 1) * columns);
                let (logits, gate) = logits.split_at_mut(spec.count);
                let (experts, shared) = chosen.part(own.clone()).split_at_mut(spec.chosen);
                let (weights, shared_weight) = weights.part(own).split_at_mut(spec.chosen);
                choose(kernels, spec, bias, logits, RowChoice { experts, weights });
                shared.fill(spec.count as u32);
                shared_weight.fill(1.0);
                // The gate's column is there only if the shared expert has a gate.
                (kernels.sigmoid)(gate);
                let gated = shared_weight.iter_mut().zip(gate);
                gated.for_each(|(weight, gate)| *weight = *gate);
            }
        });
        Ok(())
    }

    /// Plans one product of each of these experts that has rows.
    fn plan_parts(
        &self,
        mixture: &Mixture<'_>,
        scratch: &mut ExpertsScratch,
        piece: &Range<usize>,
        which: ExpertProduct,
    ) -> RunSizes {
        let ExpertsScratch { sorted, parts, .. } = scratch;
        let (tables, threads) = (self.tables(), self.threads.count());
        let mut sizes = RunSizes::default();
        parts.clear();
        for expert in piece.clone() {
            let places = sorted.places_of(&(expert..expert + 1));
            if places.is_empty() {
                continue;
            }
            let (matrix, _) = mixture.matrix(expert, which);
            let (kernels, group_steps) = tables.of(matrix);
            let cut = Tiles::new(places.len(), self.kernels.rows_max);
            let part = ExpertPart {
                expert,
                gated_at: sizes.gated,
                left_at: sizes.left,
                left: LeftSizes::of(matrix, places.len(), kernels, group_steps),
                cut,
                grid: product_grid(matrix, cut, threads),
                pack_at: sizes.pack_tasks,
                product_at: sizes.product_tasks,
                places,
            };
            let (down, _) = mixture.matrix(expert, ExpertProduct::Down);
            sizes.gated += part.places.len() * down.width;
            sizes.elements += part.places.len() * matrix.width;
            sizes.left.words += part.left.words;
            sizes.left.groups += part.left.groups;
            sizes.pack_tasks += cut.count();
            sizes.product_tasks += part.grid.tasks_count();
            parts.push(part);
        }
        sizes
    }

    /// Packs the rows of every part, tile by tile.
    fn pack_parts(
        &mut self,
        mixture: &Mixture<'_>,
        scratch: &mut ExpertsScratch,
        sizes: RunSizes,
        which: ExpertProduct,
    ) -> Result<(), EngineError> {
        let LeftSizes { words, groups } = sizes.left;
        ensure_len(&mut self.left, words)?;
        ensure_len(&mut self.left_scales, groups)?;
        ensure_len(&mut self.left_sums, groups)?;
        let tile_elements = self.kernels.rows_max * mixture.hidden;
        ensure_len(&mut self.normed, self.threads.count() * tile_elements)?;
        let tables = self.tables();
        let gathered = SliceParts::new(&mut self.normed);
        let words = SliceParts::new(&mut self.left);
        let scales = SliceParts::new(&mut self.left_scales);
        let sums = SliceParts::new(&mut self.left_sums);
        let ExpertsScratch {
            sorted,
            parts,
            gated,
            ..
        } = &*scratch;
        let pack_tile = |worker: usize, task: usize| {
            let index = parts.partition_point(|part| part.pack_at <= task) - 1;
            let part = &parts[index];
            let (matrix, _) = mixture.matrix(part.expert, which);
            let (kernels, group_steps) = tables.of(matrix);
            let tile = task - part.pack_at;
            let rows = part.cut.start(tile)..part.cut.start(tile + 1);
            let x: &[f32] = match which {
                ExpertProduct::GateUp => {
                    let start = worker * tile_elements;
                    // SAFETY: each worker has its own part.
                    let x = unsafe { gathered.part(start..start + rows.len() * matrix.width) };
                    let places = part.places.start + rows.start..part.places.start + rows.end;
                    let tile_rows = x.chunks_exact_mut(matrix.width);
                    for (to, row) in tile_rows.zip(sorted.rows_at(places)) {
                        let start = *row as usize * matrix.width;
                        to.copy_from_slice(&mixture.x[start..start + matrix.width]);
                    }
                    x
                }
                ExpertProduct::Down => &gated[part.gated_at + rows.start * matrix.width..],
            };
            let left = LeftSide {
                x,
                first: rows.start,
                width: matrix.width,
                rows: part.places.len(),
                slices: &matrix.slices,
                group_steps,
                words: words.within(part.left_at.words..part.left_at.words + part.left.words),
                scales: scales.within(part.left_at.groups..part.left_at.groups + part.left.groups),
                sums: sums.within(part.left_at.groups..part.left_at.groups + part.left.groups),
            };
            // SAFETY: each tile belongs to one task; the tables were checked.
            unsafe { (kernels.pack)(&left, tile..tile + 1) };
        };
        let of_tile = sizes.elements.div_ceil(sizes.pack_tasks.max(1)).max(1);
        let each = PIECE_ELEMENTS.div_ceil(of_tile);
        self.threads.run(sizes.pack_tasks.div_ceil(each), &|turn| {
            for task in run_range(turn.task, each, sizes.pack_tasks) {
                pack_tile(turn.worker, task);
            }
        });
        Ok(())
    }

    /// Computes the products of all parts in one run.
    fn multiply_parts(
        &mut self,
        mixture: &Mixture<'_>,
        scratch: &mut ExpertsScratch,
        sizes: RunSizes,
        which: ExpertProduct,
        first_place: usize,
    ) {
        let tables = self.tables();
        let own_scratch = SliceParts::new(&mut self.products_scratch);
        let (words, scales, sums) = (&self.left, &self.left_scales, &self.left_sums);
        let gated = SliceParts::new(&mut scratch.gated);
        let outputs = SliceParts::new(&mut scratch.outputs);
        let (parts, changes) = (&scratch.parts, &scratch.changes);
        let has_addends = mixture.adapted.is_some() && which == ExpertProduct::GateUp;
        self.threads.run(sizes.product_tasks, &|turn| {
            let index = parts.partition_point(|part| part.product_at <= turn.task) - 1;
            let part = &parts[index];
            let (matrix, gate) = mixture.matrix(part.expert, which);
            let rows = part.places.len();
            let out_at = match which {
                ExpertProduct::GateUp => part.gated_at,
                ExpertProduct::Down => (part.places.start - first_place) * mixture.hidden,
            };
            let out = match which {
                ExpertProduct::GateUp => gated,
                ExpertProduct::Down => outputs,
            };
            let groups = part.left_at.groups..part.left_at.groups + part.left.groups;
            let left = PackedLeft {
                words: &words[part.left_at.words..part.left_at.words + part.left.words],
                scales: &scales[groups.clone()],
                sums: &sums[groups],
                rows,
            };
            let out = out.within(out_at..out_at + rows * matrix.columns);
            let addends = has_addends.then(|| {
                let places = part.places.start - first_place..part.places.end - first_place;
                RowAddends {
                    values: &changes.addends[2 * part.gated_at..][..2 * rows * matrix.columns],
                    is_adapted: &changes.is_adapted[places],
                }
            });
            let product = PackedProduct {
                addends,
                ..packed_product(matrix, gate, left, out)
            };
            let (kernels, _) = tables.of(matrix);
            let piece = part.grid.piece(turn.task - part.product_at);
            let range = turn.worker * SCRATCH_WORDS..(turn.worker + 1) * SCRATCH_WORDS;
            // SAFETY: each worker has its own scratch, and pieces do not overlap; the tables were
            // checked.
            unsafe { (kernels.multiply)(&product, &piece, own_scratch.part(range)) }
        });
    }

    /// Adds the weighted outputs of these experts to each row, in ascending order.
    fn add_outputs(
        &mut self,
        mixture: &Mixture<'_>,
        scratch: &ExpertsScratch,
        piece: &Range<usize>,
        out: &mut [f32],
    ) {
        let ExpertsScratch {
            sorted,
            weights,
            outputs,
            ..
        } = scratch;
        let (uses, hidden) = (mixture.uses, mixture.hidden);
        let first_place = sorted.places_of(piece).start;
        let add_scaled = self.kernels.add_scaled;
        let out = SliceParts::new(out);
        self.each_row(mixture.rows, hidden * uses, &|row| {
            // SAFETY: each row is written by one task.
            let out = unsafe { out.part(row * hidden..(row + 1) * hidden) };
            let own = row * uses..(row + 1) * uses;
            for (weight, at) in weights[own.clone()].iter().zip(own) {
                let (expert, place) = sorted.at(at);
                if piece.contains(&expert) {
                    let output = &outputs[(place - first_place) * hidden..][..hidden];
                    // SAFETY: `CpuKernels::of` checked the instructions.
                    unsafe { add_scaled(out, output, *weight) };
                }
            }
        });
    }
}
