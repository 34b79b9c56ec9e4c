//! LoRA adapters on a GPU: slots in its memory, and the two products of a pass's rows.
//!
//! Owns: the lists of a pass (rows by adapter, tiles of rows), the kernels, and what lies between
//! both products.
//! Never: waits for the device in a pass. Everything that changes from step to step is read from
//! device memory, so that a recorded step serves any adapters.
//! Invariant: a row's result depends on the row and its adapter alone.

mod loader;
mod slots;

pub use loader::{CudaAdapter, CudaAdapterLoader};
pub use slots::adapter_bytes_max;

use crate::args::{AdapterRowsArgs, DevicePlace, DeviceTile, ExpandArgs, ShrinkArgs};
use crate::buffers::{CudaRows, GrowingMemory, MemoryContents};
use crate::driver::{CudaKernel, CudaStream};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::step_messages::{StepMessage, StepMessages};
use cleave_checkpoint::ADAPTED_STACKS;
use cleave_engine::ops::{AdaptedStack, AdapterGroup, Precision};
use loader::stack_number;

/// Rows of a tile: `TILE_PLACES` of the kernels.
const TILE_PLACES: usize = 8;
/// Ranks of a warp that has several rows: `TILE_RANKS` of the kernels.
const TILE_RANKS: usize = 4;
/// Warps of a thread block of the first product.
const SHRINK_WARPS: usize = 4;
/// Columns that one thread block of the second product computes: eight for each thread, or one.
const EXPAND_COLUMNS: (usize, usize) = (1024, 128);
/// Rows from which warps of the first product have several: fewer would leave multiprocessors idle.
const TILED_ROWS: usize = 64;

/// The kernels of one precision, and the lists of the present pass.
#[derive(Debug)]
pub(crate) struct CudaAdapters {
    shrink: CudaKernel<ShrinkArgs>,
    expand: CudaKernel<ExpandArgs>,
    /// Products with the first matrix, `(places, ranks)`.
    shrunk: GrowingMemory,
    /// Stacks that any adapter so far changes, as bits: a recording has the kernels of these.
    stacks: u32,
    /// The most ranks of any adapter so far.
    ranks_max: usize,
    /// Changes of the three fields before, each of which invalidates recordings.
    reallocations_count: u64,
    pass: Option<PassAdapters>,
}

/// The lists of a pass with adapters.
#[derive(Clone, Copy, Debug)]
struct PassAdapters {
    places: u64,
    tiles: u64,
    counts: u64,
    /// The most places and the most tiles that are launched.
    places_max: usize,
    tiles_max: usize,
}

impl CudaAdapters {
    pub(crate) fn new(
        images: &KernelImages,
        stream: &CudaStream,
        precision: Precision,
    ) -> Result<Self, CudaError> {
        let of = |name: &str| format!("adapt_{name}_{}", precision.name());
        let contents = MemoryContents::Undefined;
        Ok(Self {
            shrink: images.kernel(&of("shrink"))?,
            expand: images.kernel(&of("expand"))?,
            shrunk: GrowingMemory::new(stream, 0, "products of adapters", contents)?,
            stacks: 0,
            ranks_max: 0,
            reallocations_count: 0,
            pass: None,
        })
    }

    /// Counts what invalidates recordings: moves of the workspace, a stack or a rank that no
    /// adapter had before.
    pub(crate) fn reallocations_count(&self) -> u64 {
        self.reallocations_count
    }

    /// Sends the rows of each adapter. A pass whose launches must suit every pass of a bucket, of
    /// `recorded` rows, may have that many places, and as many tiles.
    pub(crate) fn send(
        &mut self,
        groups: &[AdapterGroup<CudaAdapter>],
        recorded: Option<usize>,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        self.pass = None;
        let (places, tiles) = sorted(groups);
        if places.is_empty() {
            return Ok(());
        }
        let counts = [places.len() as u32, tiles.len() as u32];
        let pass = PassAdapters {
            places: messages.send(stream, StepMessage::AdapterPlaces, &places)?,
            tiles: messages.send(stream, StepMessage::AdapterTiles, &tiles)?,
            counts: messages.send(stream, StepMessage::AdapterCounts, &counts)?,
            places_max: recorded.unwrap_or(places.len()),
            tiles_max: recorded.unwrap_or(tiles.len()),
        };
        let weights = groups.iter().map(|group| &group.weights);
        let stacks = weights.clone().fold(self.stacks, |all, of| all | of.stacks);
        let ranks_max = weights
            .map(|of| of.ranks_max)
            .fold(self.ranks_max, usize::max);
        let before = self.shrunk.memory().at(0);
        let bytes = pass.places_max * ranks_max * size_of::<f32>();
        let after = self.shrunk.ensure_bytes(stream, bytes)?.at(0);
        let is_changed = (stacks, ranks_max, after) != (self.stacks, self.ranks_max, before);
        self.reallocations_count += u64::from(is_changed);
        (self.stacks, self.ranks_max, self.pass) = (stacks, ranks_max, Some(pass));
        Ok(())
    }

    /// Returns whether the stack's product needs [`CudaAdapters::run`] in this pass.
    pub(crate) fn is_adapted(&self, stack: &AdaptedStack<'_, CudaAdapter>) -> bool {
        self.stacks >> stack_number(stack.stack) & 1 != 0
    }

    /// Queues both products of the pass's rows, added to `out`.
    pub(crate) fn run(
        &self,
        stack: &AdaptedStack<'_, CudaAdapter>,
        x: &CudaRows,
        out: &CudaRows,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        // The rows that are left of a pass may have no adapter.
        let Some(pass) = self.pass else {
            return Ok(());
        };
        let rows = AdapterRowsArgs {
            places: pass.places,
            tiles: pass.tiles,
            counts: pass.counts,
            product: (stack.layer * ADAPTED_STACKS.len() + stack_number(stack.stack)) as u32,
            ranks_most: self.ranks_max as u32,
        };
        let is_tiled = pass.places_max >= TILED_ROWS;
        let warps = if is_tiled {
            pass.tiles_max * self.ranks_max.div_ceil(TILE_RANKS)
        } else {
            pass.places_max * self.ranks_max
        };
        let shrink = ShrinkArgs {
            x: x.address(),
            shrunk: self.shrunk.memory().at(0),
            rows,
            width: x.width as u32,
            is_tiled: u32::from(is_tiled),
        };
        let each = if out.width.is_multiple_of(8) {
            EXPAND_COLUMNS.0
        } else {
            EXPAND_COLUMNS.1
        };
        let expand = ExpandArgs {
            shrunk: self.shrunk.memory().at(0),
            out: out.address(),
            rows,
            width: out.width as u32,
            padding: 0,
        };
        // SAFETY: the rows of the lists are rows of the pass, which both buffers have; the
        // workspace has room for all places and ranks; adapters are of this model.
        unsafe {
            let blocks = warps.div_ceil(SHRINK_WARPS) as u32;
            self.shrink.launch(stream, [blocks, 1, 1], shrink)?;
            let blocks = out.width.div_ceil(each) as u32;
            self.expand
                .launch(stream, [pass.tiles_max as u32, blocks, 1], expand)
        }
    }
}

/// Returns the rows in the order of adapters, and tiles of them.
fn sorted(groups: &[AdapterGroup<CudaAdapter>]) -> (Vec<DevicePlace>, Vec<DeviceTile>) {
    let (mut places, mut tiles) = (Vec::new(), Vec::new());
    for group in groups {
        let changes = group.weights.changes();
        for rows in group.rows.chunks(TILE_PLACES) {
            let first = places.len() as u32;
            let end = first + rows.len() as u32;
            tiles.push(DeviceTile { first, end });
            let of_row = |row: &u32| DevicePlace {
                changes,
                row: *row,
                padding: 0,
            };
            places.extend(rows.iter().map(of_row));
        }
    }
    (places, tiles)
}
