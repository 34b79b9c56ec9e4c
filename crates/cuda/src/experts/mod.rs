//! Mixtures of experts: the kernels that route rows, sort them by expert and add up what experts
//! gave, and the products between.
//!
//! Owns: these kernels, and the workspace of a mixture.
//! Never: waits for the device. The device alone knows the experts of a row: grids are of the most
//! work that there may be, and kernels find how much there is.
//! Invariant: a row's experts, and the order of its sums, depend on the row alone.

mod products;
mod sizes;

pub(crate) use products::{ExpertMatrices, ExpertProduct, ExpertProducts, SortedPlaces};
pub(crate) use sizes::PieceSizes;
pub use sizes::experts_workspace_bytes;

use crate::args::{CombineArgs, ExpertLogitsArgs, ExpertPieceArgs, ExpertSortArgs, RouteArgs};
use crate::buffers::{GrowingMemory, MemoryContents, RowsPlace};
use crate::driver::{CudaKernel, CudaStream};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::pack::{CudaMatrix, CudaVector, CudaWeightLoader};
use cleave_engine::ops::{
    ChosenWeights, Experts, ExpertsSpec, GroupScore, ModelSpec, Precision, RouterScore, Unsupported,
};
use sizes::{MASK_ROWS, MixtureSizes, WorkspaceLayout};

/// The most experts of a layer: `EXPERTS_MOST` of the kernels.
const EXPERTS_MAX: usize = 512;
/// The most experts of a row, and the most groups: the lanes of a warp.
const LANES: usize = 32;
/// Warps of a thread block that computes logits, and rows and columns of a warp with several.
const LOGIT_WARPS: usize = 4;
const LOGIT_TILE: (usize, usize) = (8, 4);
/// Rows from which warps compute several logits: fewer would leave multiprocessors idle.
const TILED_LOGITS_ROWS: usize = 64;
/// Elements of a row that one thread block adds up: eight at a time, or one at a time.
const COMBINE_ELEMENTS: (usize, usize) = (2048, 256);

/// Refuses a mixture that no kernel routes.
///
/// # Errors
/// The first layer with too many experts, chosen ones, or groups.
pub(crate) fn supports_experts(spec: &ModelSpec) -> Result<(), Unsupported> {
    for experts in spec.layers.iter().filter_map(|layer| layer.experts()) {
        let groups = experts.router.groups.map_or(0, |groups| groups.count);
        let limits = [
            ("experts", experts.count, EXPERTS_MAX),
            ("experts of each token", experts.chosen, LANES),
            ("groups of experts", groups, LANES),
        ];
        for (name, found, most) in limits {
            if found > most {
                return Err(Unsupported {
                    family: spec.family,
                    problem: format!("its layers have {found} {name}, and a GPU takes {most}"),
                });
            }
        }
    }
    Ok(())
}

/// The kernels of one precision, and the workspace of all layers.
#[derive(Debug)]
pub(crate) struct CudaExperts {
    logits: CudaKernel<ExpertLogitsArgs>,
    route: CudaKernel<RouteArgs>,
    sort: CudaKernel<ExpertSortArgs>,
    combine: CudaKernel<CombineArgs>,
    pub(crate) products: ExpertProducts,
    workspace: GrowingMemory,
    reallocations_count: u64,
    precision: Precision,
}

/// A mixture with its rows and the place of its intermediate results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mixture<'a> {
    pub(crate) experts: &'a Experts<'a, CudaWeightLoader>,
    pub(crate) gate_up: ExpertMatrices<'a>,
    pub(crate) down: ExpertMatrices<'a>,
    /// Rows of the step, `(rows, hidden)`.
    pub(crate) x: RowsPlace,
    /// Address of the number of rows.
    pub(crate) rows_count: u64,
    /// Rows that are launched.
    pub(crate) rows: usize,
    sizes: MixtureSizes,
    layout: WorkspaceLayout,
    workspace: u64,
    tile_rows: usize,
}

/// Buffers of a gated product, which follow each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatedBuffers {
    pub(crate) gate_up: u64,
    pub(crate) gated: u64,
    pub(crate) outputs: u64,
}

impl Mixture<'_> {
    /// Returns the pieces of the step's rows, each with its first row.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (usize, PieceSizes)> {
        self.sizes.pieces()
    }

    /// Returns the buffers of the experts of a piece.
    pub(crate) fn buffers(&self) -> GatedBuffers {
        GatedBuffers {
            gate_up: self.workspace + self.layout.gate_up as u64,
            gated: self.workspace + self.layout.gated as u64,
            outputs: self.workspace + self.layout.outputs as u64,
        }
    }

    /// Returns the buffers of the shared expert, for all rows.
    pub(crate) fn shared_buffers(&self) -> GatedBuffers {
        GatedBuffers {
            gate_up: self.workspace + self.layout.shared_gate_up as u64,
            gated: self.workspace + self.layout.shared_gated as u64,
            outputs: self.workspace + self.layout.shared_outputs as u64,
        }
    }

    /// Returns the piece's rows in the order of experts; `rows_of` only for the first product.
    pub(crate) fn sorted(&self) -> SortedPlaces {
        SortedPlaces {
            tiles: self.at(self.layout.tiles),
            tiles_count: self.at(self.layout.tiles_count),
            rows_of: self.at(self.layout.rows_of),
            tile_rows: self.tile_rows,
        }
    }

    fn at(&self, offset: usize) -> u64 {
        self.workspace + offset as u64
    }

    fn piece(&self, first: usize, sizes: &PieceSizes) -> ExpertPieceArgs {
        ExpertPieceArgs {
            rows_count: self.rows_count,
            first: first as u32,
            most: sizes.rows as u32,
        }
    }
}

impl CudaExperts {
    pub(crate) fn new(
        images: &KernelImages,
        stream: &CudaStream,
        precision: Precision,
    ) -> Result<Self, CudaError> {
        let of = |name: &str| format!("experts_{name}_{}", precision.name());
        let contents = MemoryContents::Undefined;
        Ok(Self {
            logits: images.kernel(&of("logits"))?,
            route: images.kernel("experts_route")?,
            sort: images.kernel("experts_sort")?,
            combine: images.kernel(&of("combine"))?,
            products: ExpertProducts::new(images, stream, precision)?,
            workspace: GrowingMemory::new(stream, 0, "a mixture of experts", contents)?,
            reallocations_count: 0,
            precision,
        })
    }

    /// Counts the moves of all workspaces; a move invalidates recordings.
    pub(crate) fn reallocations_count(&self) -> u64 {
        self.reallocations_count + self.products.reallocations_count()
    }

    /// Makes room for a mixture of `rows` rows that are launched, whose real number is at the
    /// address `rows_count`.
    pub(crate) fn prepare<'a>(
        &mut self,
        experts: &'a Experts<'a, CudaWeightLoader>,
        x: RowsPlace,
        rows: usize,
        rows_count: u64,
        stream: &CudaStream,
    ) -> Result<Mixture<'a>, CudaError> {
        let checked = "the experts were compared when they were loaded";
        let each = experts.experts.iter();
        let gate_up = ExpertMatrices::of(each.clone().map(|of| &of.gate_up)).expect(checked);
        let down = ExpertMatrices::of(each.map(|of| &of.down)).expect(checked);
        let sizes = MixtureSizes {
            rows,
            hidden: experts.router.width,
            spec: *experts.spec,
            precision: self.precision,
            router_columns: experts.router.columns,
        };
        let (_, piece) = sizes.pieces().next().expect("a step has rows");
        let both: [&CudaMatrix; 2] = [gate_up.first, down.first];
        let tile_rows = self.products.tile_rows(both, &piece);
        let layout = WorkspaceLayout::new(&sizes, tile_rows);
        let before = self.workspace.memory().at(0);
        let workspace = self.workspace.ensure_bytes(stream, layout.bytes)?.at(0);
        self.reallocations_count += u64::from(workspace != before);
        Ok(Mixture {
            experts,
            gate_up,
            down,
            x,
            rows_count,
            rows,
            sizes,
            layout,
            workspace,
            tile_rows,
        })
    }

    /// Queues the choice of the experts of a piece's rows, and sorts the rows by expert.
    pub(crate) fn route(
        &self,
        mixture: &Mixture<'_>,
        first: usize,
        sizes: &PieceSizes,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let Mixture {
            experts,
            layout,
            tile_rows,
            ..
        } = mixture;
        let router = experts.router;
        let piece = mixture.piece(first, sizes);
        let is_tiled = sizes.rows >= TILED_LOGITS_ROWS;
        let (tile_rows_of_logits, tile_columns) = if is_tiled { LOGIT_TILE } else { (1, 1) };
        let warps =
            sizes.rows.div_ceil(tile_rows_of_logits) * router.columns.div_ceil(tile_columns);
        let logits = ExpertLogitsArgs {
            x: mixture.x.address,
            weights: router.weight.address(),
            bias: router.bias.as_ref().map_or(0, |bias| bias.address()),
            logits: mixture.at(layout.logits),
            piece,
            columns: router.columns as u32,
            width: router.width as u32,
            is_tiled: u32::from(is_tiled),
            padding: 0,
        };
        let words = sizes.rows.div_ceil(MASK_ROWS) as u32;
        let route = RouteArgs {
            logits: mixture.at(layout.logits),
            experts: mixture.at(layout.experts),
            weights: mixture.at(layout.weights),
            shared_weights: mixture.at(layout.shared_weights),
            masks: mixture.at(layout.masks),
            piece,
            columns: router.columns as u32,
            words,
            ..router_args(experts.spec, experts.choice_bias)
        };
        let sort = ExpertSortArgs {
            masks: mixture.at(layout.masks),
            experts: mixture.at(layout.experts),
            places: mixture.at(layout.places),
            rows_of: mixture.at(layout.rows_of),
            tiles: mixture.at(layout.tiles),
            tiles_count: mixture.at(layout.tiles_count),
            first_row: first as u32,
            count: sizes.count as u32,
            chosen: sizes.chosen as u32,
            words,
            tile_rows: *tile_rows as u32,
            padding: 0,
        };
        let grid = |blocks: usize| [blocks as u32, 1, 1];
        // SAFETY: the workspace has room for the piece; rows and weights are the mixture's.
        unsafe {
            self.logits
                .launch(stream, grid(warps.div_ceil(LOGIT_WARPS)), logits)?;
            self.route.launch(stream, grid(words as usize), route)?;
            self.sort.launch(stream, grid(sizes.count), sort)
        }
    }

    /// Queues the sum of a piece's rows, into `out` of all rows.
    pub(crate) fn combine(
        &self,
        mixture: &Mixture<'_>,
        first: usize,
        sizes: &PieceSizes,
        out: u64,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let width = mixture.sizes.hidden;
        let has_shared = mixture.experts.shared.is_some();
        let args = CombineArgs {
            outputs: mixture.buffers().outputs,
            places: mixture.at(mixture.layout.places),
            weights: mixture.at(mixture.layout.weights),
            shared: if has_shared {
                mixture.shared_buffers().outputs
            } else {
                0
            },
            shared_weights: mixture.at(mixture.layout.shared_weights),
            out,
            piece: mixture.piece(first, sizes),
            chosen: sizes.chosen as u32,
            width: width as u32,
        };
        let each = if width.is_multiple_of(8) {
            COMBINE_ELEMENTS.0
        } else {
            COMBINE_ELEMENTS.1
        };
        let grid = [sizes.rows as u32, width.div_ceil(each) as u32, 1];
        // SAFETY: as in `route`; `out` has the step's rows.
        unsafe { self.combine.launch(stream, grid, args) }
    }
}

/// Returns the router's formula as the kernel takes it.
fn router_args(spec: &ExpertsSpec, choice_bias: Option<&CudaVector>) -> RouteArgs {
    let router = spec.router;
    let groups = router.groups;
    let (rule, epsilon) = match router.weights {
        ChosenWeights::Scores => (0, 0.0),
        ChosenWeights::Normalized { epsilon } => (1, epsilon),
        ChosenWeights::Softmax => (2, 0.0),
    };
    RouteArgs {
        logits: 0,
        choice_bias: choice_bias.map_or(0, |bias| bias.values.address()),
        experts: 0,
        weights: 0,
        shared_weights: 0,
        masks: 0,
        piece: ExpertPieceArgs {
            rows_count: 0,
            first: 0,
            most: 0,
        },
        columns: 0,
        count: spec.count as u32,
        chosen: spec.chosen as u32,
        words: 0,
        score: match router.score {
            RouterScore::Softmax => 0,
            RouterScore::Sigmoid => 1,
            RouterScore::Identity => 2,
        },
        rule,
        groups: groups.map_or(0, |groups| groups.count as u32),
        groups_chosen: groups.map_or(0, |groups| groups.chosen as u32),
        is_two_best: u32::from(groups.is_some_and(|groups| groups.score == GroupScore::TwoBestSum)),
        epsilon,
        scale: router.scale,
        padding: 0,
    }
}
