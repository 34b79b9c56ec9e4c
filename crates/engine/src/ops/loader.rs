//! Loading of weights into a device's own layout.
//!
//! Owns: the trait [`WeightLoader`]. Never: runs an operation.

use super::{GatedMatrices, supports_decoder};
use super::{InnerSlices, LoadPlan, ModelSpec, Precision, RotaryTable, Unsupported};
use crate::EngineError;
use cleave_checkpoint::{StoredMatrix, StoredTensor};

/// Loads weights into a device's own layout. Used before any engine runs, from any thread; the
/// loaded weights are shared between engines.
pub trait WeightLoader: Send + Sync {
    /// A weight `(out, in)` with an optional bias `(out)`.
    type Matrix: Send + Sync;
    /// Embedding rows `(vocab, width)`.
    type Table: Send + Sync;
    /// A norm's weight `(width)`, f32.
    type Vector: Send + Sync;
    /// A rotary table on the device.
    type Rotary: Send + Sync;

    /// Element type of dense matrices.
    fn precision(&self) -> Precision;

    /// Name of the format to which weights are rounded beyond the precision, or in which they are
    /// kept, for people and the fingerprint; empty if neither.
    fn weight_form(&self) -> &'static str {
        ""
    }

    /// Refuses a model with a part that the device cannot compute; called before any weight is
    /// loaded. The default accepts every model that the forward pass runs, see
    /// [`supports_decoder`].
    ///
    /// # Errors
    /// The first such part.
    fn supports(&self, spec: &ModelSpec) -> Result<(), Unsupported> {
        supports_decoder(spec)
    }

    /// Called before everything else: a device may allocate the memory for all weights at once.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn reserve(&self, plan: &LoadPlan) -> Result<(), EngineError> {
        let _ = plan;
        Ok(())
    }

    /// Called last: when it returns, all weights are loaded. Until then a device may still be
    /// copying.
    ///
    /// # Errors
    /// `Device` if any load failed.
    fn finish(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Bytes that a step reads of the matrix that [`WeightLoader::sliced_matrix`] makes of this
    /// stack.
    fn matrix_bytes(&self, stack: &[StoredMatrix], slices: &InnerSlices) -> u64 {
        let _ = slices;
        let elements: usize = stack.iter().map(|part| part.rows() * part.columns()).sum();
        (elements * self.precision().element_bytes()) as u64
    }

    /// Bytes that a step reads of [`WeightLoader::head`].
    fn head_bytes(&self, head: &StoredTensor) -> u64 {
        let slices = InnerSlices::whole(head.columns());
        self.matrix_bytes(&[head.clone().into()], &slices)
    }

    /// Packs the head `(vocab, in)`, which computes logits.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn head(&self, head: &StoredTensor) -> Result<Self::Matrix, EngineError> {
        self.matrix(&[head.clone().into()], None)
    }

    /// Packs tensors `(out_i, in)`, stacked along `out` in the order given, into one matrix. A
    /// device keeps quantised tensors as they are if it can multiply with them, or else rounds
    /// `(code − zero) × scale` to its own precision. `bias`, if given, has one element per row of
    /// the stack.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<Self::Matrix, EngineError> {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        self.sliced_matrix(stack, bias, &InnerSlices::whole(width))
    }

    /// As [`WeightLoader::matrix`], for a product whose inner dimension has slices: each is summed
    /// from zero in f32, in the order of a matrix of the slice alone, and the sums are added as
    /// [`InnerSlices`] says; then comes the bias. If activations are rounded with a scale, no scale
    /// covers two slices. A matrix with a rank's share of the slices gives that subtree's sum.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn sliced_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
        slices: &InnerSlices,
    ) -> Result<Self::Matrix, EngineError>;

    /// As [`WeightLoader::matrix`], for [`Ops::gated`](super::Ops::gated) alone: the first half of
    /// the stack's rows are the gate's.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn gate_up(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<Self::Matrix, EngineError> {
        self.matrix(stack, bias)
    }

    /// As [`WeightLoader::matrix`], but in f32 whatever the precision, for products of f32 rows:
    /// the router of [`Ops::experts`](super::Ops::experts), whose rounding would choose other
    /// experts. Only if [`WeightLoader::supports`] accepts experts.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn exact_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<Self::Matrix, EngineError> {
        let _ = (stack, bias);
        Err(super::has_no_experts())
    }

    /// Returns an error if the packed experts of a layer cannot be computed together.
    ///
    /// # Errors
    /// `Device` with the expert that differs from the first.
    fn check_experts(&self, experts: &[GatedMatrices<Self::Matrix>]) -> Result<(), EngineError> {
        let _ = experts;
        Ok(())
    }

    /// Loads embedding rows. May keep the tensor and read its rows from the mapped file.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn table(&self, stored: &StoredTensor) -> Result<Self::Table, EngineError>;

    /// A norm's weight.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector, EngineError>;

    /// A rotary table.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn rotary(&self, table: RotaryTable<'_>) -> Result<Self::Rotary, EngineError>;
}
