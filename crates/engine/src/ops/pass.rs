//! Plain data of a load and of a pass.

use super::{DrawRule, InnerSlices};
use cleave_checkpoint::StoredMatrix;

/// Role of an activation buffer, which decides its element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferRole {
    /// The residual stream: sums of every layer, always f32.
    Residual,
    /// Inputs and outputs of single operations; a device may store them in the weights' type.
    Activations,
}

/// Sizes of a stack of dense matrices.
#[derive(Clone, Debug)]
pub struct DenseStack {
    /// Rows of all matrices.
    pub rows: usize,
    /// Slices of their columns.
    pub slices: InnerSlices,
}

/// Sizes of the weights that are about to be loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadPlan {
    /// Elements of the table and the head; one tensor that serves as both counts once.
    pub matrix_elements: u64,
    /// Stacks of dense matrices, as they will be passed to [`WeightLoader::sliced_matrix`].
    pub dense: Vec<DenseStack>,
    /// Stacks of matrices with at least one quantised one, and their slices, passed there too.
    pub quantized: Vec<(Vec<StoredMatrix>, InnerSlices)>,
    /// Elements of vectors, biases and rotary tables.
    pub vector_elements: u64,
    /// Number of tensors in all.
    pub tensors_count: usize,
}

/// Results that a pass is run for.
#[derive(Clone, Copy, Debug)]
pub enum PassPurpose<'a> {
    /// KV, and whatever the caller asks for afterwards.
    Unspecified,
    /// The token after every row, and nothing else, in one [`Ops::queue_draw`] by these rules: a
    /// decode step.
    DrawEveryRow(&'a [Option<DrawRule>]),
}

/// Whether the caller must run the operations of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassMode {
    /// The caller runs them.
    Execute,
    /// The caller skips them: the device replays them from a recording, at the next
    /// [`Ops::queue_draw`].
    Replay,
}
