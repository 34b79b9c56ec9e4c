//! The interface between the forward pass and a device, in coarse operations.
//!
//! Owns: the traits [`WeightLoader`] (weights, loaded once, shared by several engines) and [`Ops`]
//! (one engine's device), and the plain data of their calls. Never: knows an architecture, a
//! request or a sampling rule. Invariant, which every implementation keeps: **path independence.**
//! An output element depends only on its own row (and, in attention, on the KV of its own sequence
//! up to its own position), and is accumulated in an order that does not depend on the number of
//! rows, segments or chunks in the call. The same row gives the same bits alone, in a batch, and in
//! any chunk.
//!
//! Shapes are written `(rows, columns)`, row-major. Activations are f32 as far as the caller can
//! tell. [`Precision`] is the type of stored weights and [`KvType`] that of keys and values; both
//! are chosen when the implementation is built. A device may keep quantised weights as they are,
//! see [`WeightLoader::matrix`]. An implementation may rely on these contracts, and panics with
//! `assert!` if one is broken: a wrong shape is a defect of the forward pass, not an input.

mod adapt;
mod batch;
mod draw;
mod host;
mod io;
mod loader;
mod parameters;
mod pass;
mod quantize;
mod shapes;
mod supports;

pub use adapt::{AdaptedExperts, AdaptedStack, AdapterGroup, AdapterLoader, NoAdapters};
pub use batch::{Batch, BatchSegment, FedRow};
pub use cleave_models::{
    Activation, ChosenWeights, ExpertGroups, ExpertsSpec, GatedMlpSpec, GroupScore, HeadShape,
    InnerSlices, ModelSpec, NormFormula, Projection, RouterScore, RouterSpec, SLICES_MAX,
    SharedExpertSpec, Unsupported,
};
pub use draw::{DrawRule, LogitChange, LogitEdit, MaskedDraw};
pub use io::{AttentionIo, GatedIo, NormIo, PoolLayer, ResidualIo};
pub use loader::WeightLoader;
pub use parameters::{Attention, Experts, GatedMatrices, Head, Norm, QkNorms, RotaryTable};
pub use pass::{BufferRole, DenseStack, LoadPlan, PassMode, PassPurpose};
pub use quantize::Quantize;
pub use shapes::{KvPoolShape, KvType, PlaneCounts, PoolLayerShape, PoolPlane, Precision};
pub use supports::supports_decoder;

use crate::EngineError;
use crate::blocks::{BlockSpan, DeviceBlocks};
use cleave_domain::{BlockIndex, DeviceId, KvPlane, TokenId};
use std::sync::Arc;
use std::time::Duration;

/// [`WeightLoader::Matrix`] of an [`Ops`].
pub type MatrixOf<O> = <<O as Ops>::Pack as WeightLoader>::Matrix;
/// [`WeightLoader::Table`] of an [`Ops`].
pub type TableOf<O> = <<O as Ops>::Pack as WeightLoader>::Table;
/// [`WeightLoader::Vector`] of an [`Ops`].
pub type VectorOf<O> = <<O as Ops>::Pack as WeightLoader>::Vector;
/// [`WeightLoader::Rotary`] of an [`Ops`].
pub type RotaryOf<O> = <<O as Ops>::Pack as WeightLoader>::Rotary;
/// [`AdapterLoader::Adapter`] of an [`Ops`].
pub type AdapterOf<O> = <<O as Ops>::Adapters as AdapterLoader>::Adapter;

/// One engine's device. Used by one thread.
///
/// In one pass: [`begin`](Ops::begin), then the running operations in any order. `rows` is how many
/// leading rows of the buffers take part; the rest keep what they hold.
///
/// Every running operation fails only with [`EngineError::Device`] or [`EngineError::Lost`].
pub trait Ops: Send {
    /// Loader of its weights.
    type Pack: WeightLoader;
    /// Loader of its adapters, [`NoAdapters`] if it applies none.
    type Adapters: AdapterLoader;
    /// An activation buffer `(rows_max, width)`.
    type Rows: Send;
    /// A KV pool on this device.
    type Pool: Send;

    /// Processor or device and number formats, for people: `AVX-512 bf16, 8 threads`.
    fn device(&self) -> String;

    /// Identity of the hardware, if this engine uses all of it: two engines on the same hardware
    /// slow each other down.
    fn device_id(&self) -> Option<DeviceId>;

    /// Type of keys and values in its pools.
    fn kv_type(&self) -> KvType;

    /// Name of its rounding and of its blocks' layout, for the fingerprint: devices of the same
    /// name give the same bits, and only their blocks and streams may be mixed. Any change of
    /// rounding or layout changes the name.
    fn arithmetic(&self) -> String;

    /// Allocates an activation buffer, zeroed.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn rows(
        &self,
        rows_max: usize,
        width: usize,
        role: BufferRole,
    ) -> Result<Self::Rows, EngineError>;

    /// Allocates a KV pool, zeroed.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn pool(&self, shape: KvPoolShape) -> Result<Self::Pool, EngineError>;

    /// Begins a pass: all operations up to the next `begin` are for this batch, whose rows have
    /// these adapters. A device with its own memory copies the batch there; a processor may plan
    /// its work.
    fn begin(
        &mut self,
        batch: &Batch,
        purpose: PassPurpose<'_>,
        adapters: &[AdapterGroup<AdapterOf<Self>>],
    ) -> Result<PassMode, EngineError>;

    /// `out[r] = factor · table[batch.tokens[r]]`, `(rows, width)`; rows in [`Batch::fed_rows`]
    /// take the drawn token instead. Every token is within the table.
    fn embed(
        &mut self,
        batch: &Batch,
        table: &TableOf<Self>,
        factor: f32,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// `out[r] = norm(x[r])`, both `(rows, width)`.
    fn norm(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        x: &Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// `sum.residual[r] += sum.delta[r]`, then `out[r] = norm(residual[r])`, all `(rows, width)`.
    fn add_norm(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        sum: ResidualIo<'_, Self::Rows>,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// `residual[r] += norm(x[r])`, all `(rows, width)`; `x` is undefined afterwards. The norm
    /// removes no mean.
    fn norm_add(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        x: &mut Self::Rows,
        residual: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// `residual[r] += delta[r]`, both `(rows, width)`.
    fn add(
        &mut self,
        rows: usize,
        delta: &Self::Rows,
        residual: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// The residual stream `(rows, width)` as an input of [`Ops::matmul`] or [`Ops::gated`], for a
    /// part without a norm of its input: the stream itself, or a rounded copy in `scratch` on a
    /// device that stores activations in another type.
    fn activations<'a>(
        &mut self,
        rows: usize,
        residual: &'a Self::Rows,
        scratch: &'a mut Self::Rows,
    ) -> Result<&'a Self::Rows, EngineError> {
        let _ = (rows, scratch);
        Ok(residual)
    }

    /// `out[r] = matrix · x[r] + bias`, `x` `(rows, in)`, `out` `(rows, out)`.
    fn matmul(
        &mut self,
        matrix: &MatrixOf<Self>,
        rows: usize,
        x: &Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// Adds `delta` to the residual stream if there is one, normalises, and multiplies:
    /// [`Ops::norm`] or [`Ops::add_norm`], then [`Ops::matmul`]. Only this product reads
    /// the normed rows, so that a device need not store them.
    fn norm_matmul(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        from: NormIo<'_, Self::Rows>,
        matrix: &MatrixOf<Self>,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError> {
        let normed = self.normalize(norm, rows, from)?;
        self.matmul(matrix, rows, normed, out)
    }

    /// The same, followed by [`Ops::gated`].
    fn norm_gated(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        from: NormIo<'_, Self::Rows>,
        matrix: &MatrixOf<Self>,
        to: GatedIo<'_, Self::Rows>,
    ) -> Result<(), EngineError> {
        let normed = self.normalize(norm, rows, from)?;
        self.gated(matrix, rows, normed, to)
    }

    /// Adds `delta` if there is one, and normalises into `from.normed`, which it returns.
    fn normalize<'a>(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        from: NormIo<'a, Self::Rows>,
    ) -> Result<&'a Self::Rows, EngineError> {
        let NormIo {
            residual,
            delta,
            normed,
        } = from;
        match delta {
            None => self.norm(norm, rows, residual, normed)?,
            Some(delta) => {
                self.add_norm(norm, rows, ResidualIo { residual, delta }, normed)?;
            }
        }
        Ok(normed)
    }

    /// Normalises queries and keys of `qkv` `(rows, q | k | v)` in place.
    fn qk_norm(
        &mut self,
        norms: &QkNorms<'_, VectorOf<Self>>,
        heads: HeadShape,
        rows: usize,
        qkv: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// Rotates queries and keys of `qkv` `(rows, q | k | v)` by their positions, queries in place,
    /// multiplies queries by their factors if there are any, and stores keys and values in `layer`
    /// of the pool, in the blocks of the block tables. Keys need not be rotated in `qkv` itself.
    /// `heads` and the blocks' layout are the pool's.
    fn rotate_store(
        &mut self,
        batch: &Batch,
        rotary: &RotaryOf<Self>,
        qkv: &mut Self::Rows,
        pool: PoolLayer<'_, Self::Pool>,
    ) -> Result<(), EngineError>;

    /// [`Ops::qk_norm`] if there are norms, then [`Ops::rotate_store`]. A device may fuse both.
    fn norm_rotate_store(
        &mut self,
        norms: Option<&QkNorms<'_, VectorOf<Self>>>,
        batch: &Batch,
        rotary: &RotaryOf<Self>,
        qkv: &mut Self::Rows,
        heads: HeadShape,
        pool: PoolLayer<'_, Self::Pool>,
    ) -> Result<(), EngineError> {
        if let Some(norms) = norms {
            self.qk_norm(norms, heads, batch.rows_count(), qkv)?;
        }
        self.rotate_store(batch, rotary, qkv, pool)
    }

    /// Causal attention of every row over its own sequence's keys and values in the pool, including
    /// this batch's (`rotate_store` was called first). Reads the queries of `qkv`; `out` is `(rows,
    /// query_heads × head_dim)`. Keys are walked in tiles of one block, in order.
    fn attend(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: AttentionIo<'_, Self>,
    ) -> Result<(), EngineError>;

    /// `gate | up = matrix · x[r] + bias` with a matrix of [`WeightLoader::gate_up`], then
    /// `out[r][i] = act(gate[i]) · up[i]` with the activation of `to`. `x` `(rows, in)`, `out`
    /// `(rows, width)`; `gate_up` `(rows, 2 × width)` is scratch for a device that runs this
    /// as two operations.
    fn gated(
        &mut self,
        matrix: &MatrixOf<Self>,
        rows: usize,
        x: &Self::Rows,
        to: GatedIo<'_, Self::Rows>,
    ) -> Result<(), EngineError>;

    /// A mixture of experts, `x` and `out` `(rows, hidden)`: routes each row as
    /// [`RouterSpec`](cleave_models::RouterSpec) says, and adds the weighted outputs of its experts
    /// in ascending order of their indices, in f32, from zero; then the shared expert's, times the
    /// sigmoid of its gate if it has one. An expert's output is a gated product as of
    /// [`Ops::gated`], then its down projection. Only if [`WeightLoader::supports`] accepts them.
    fn experts(
        &mut self,
        experts: &Experts<'_, Self::Pack>,
        rows: usize,
        x: &Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError> {
        let _ = (experts, rows, x, out);
        Err(has_no_experts())
    }

    /// Tells which rows the pass's adapters have from now on, after [`Ops::gather`] moved rows to
    /// the front.
    fn regroup(&mut self, adapters: &[AdapterGroup<AdapterOf<Self>>]) -> Result<(), EngineError> {
        let _ = adapters;
        Ok(())
    }

    /// Whether [`Ops::adapt`] must be called for this product. A device that records passes says so
    /// of every stack that any adapter changes, whatever adapters this pass has.
    fn is_adapted(&self, stack: &AdaptedStack<'_, AdapterOf<Self>>) -> bool {
        let _ = stack;
        false
    }

    /// `out[r] += expand · (shrink · x[r])` for each row `r` of each group, with the group's change
    /// of this stack, if it has one; `x` is `(rows, in)`, `out` `(rows, out)`. Both products are
    /// summed in f32.
    fn adapt(
        &mut self,
        stack: &AdaptedStack<'_, AdapterOf<Self>>,
        x: &Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError> {
        let _ = (stack, x, out);
        Err(has_no_adapters())
    }

    /// As [`Ops::gated`], where the changes of this stack are added to the gate and up of their
    /// rows, biases included, before the activation. The result of every other row is that of
    /// [`Ops::gated`] to the bit.
    fn adapted_gated(
        &mut self,
        matrix: &MatrixOf<Self>,
        rows: usize,
        x: &Self::Rows,
        to: GatedIo<'_, Self::Rows>,
        stack: &AdaptedStack<'_, AdapterOf<Self>>,
    ) -> Result<(), EngineError> {
        let _ = (matrix, rows, x, to, stack);
        Err(has_no_adapters())
    }

    /// Whether [`Ops::adapted_experts`] must be called for the experts of this layer.
    fn has_adapted_experts(&self, adapted: &AdaptedExperts<'_, AdapterOf<Self>>) -> bool {
        let _ = adapted;
        false
    }

    /// As [`Ops::experts`], where the changes of an expert's gate and up are added to them before
    /// the activation, and those of its down projection to its output before that is weighted. The
    /// result of every row without a change is that of [`Ops::experts`] to the bit. Only where the
    /// loader of adapters supports changes of experts.
    fn adapted_experts(
        &mut self,
        experts: &Experts<'_, Self::Pack>,
        rows: usize,
        x: &Self::Rows,
        out: &mut Self::Rows,
        adapted: AdaptedExperts<'_, AdapterOf<Self>>,
    ) -> Result<(), EngineError> {
        let _ = (experts, rows, x, out, adapted);
        Err(has_no_adapters())
    }

    /// `to[i] = from[indices[i]]`, same width.
    fn gather(
        &mut self,
        indices: &[u32],
        from: &Self::Rows,
        to: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// As [`Ops::matmul`], into host memory, and capped if the head has a cap: `out` is
    /// `(rows, vocab)`, exactly filled.
    fn logits(
        &mut self,
        head: Head<'_, MatrixOf<Self>>,
        rows: usize,
        x: &Self::Rows,
        out: &mut [f32],
    ) -> Result<(), EngineError>;

    /// Copies rows `first..` of a buffer to the host, widened to f32: `out` is `(rows, width)`,
    /// exactly filled. Waits for all work queued before.
    fn read_rows(
        &mut self,
        x: &Self::Rows,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), EngineError>;

    /// Whether the device draws tokens itself, so that logits need not be copied to the host, and
    /// accepts the next pass before the tokens were fetched.
    fn can_draw(&self) -> bool {
        false
    }

    /// Queues the logits as in [`Ops::logits`], and a draw of the token after each row by its rule,
    /// `[rows]`; a row with `None` is left to [`Ops::queue_masked_draw`], and until then has no
    /// token. The same logits give the same token as on the host. At most
    /// [`STEPS_IN_FLIGHT_MAX`](crate::STEPS_IN_FLIGHT_MAX) draws are queued and not fetched. Only
    /// if [`Ops::can_draw`].
    fn queue_draw(
        &mut self,
        head: Head<'_, MatrixOf<Self>>,
        rules: &[Option<DrawRule>],
        x: &Self::Rows,
    ) -> Result<(), EngineError> {
        let _ = (head, rules, x);
        Err(cannot_draw())
    }

    /// Queues the draws of rows that the last [`Ops::queue_draw`] left out, as a part of it: the
    /// masks of these rows may be found while the device runs the pass. Called at most once after a
    /// [`Ops::queue_draw`], before its tokens are fetched and before the next pass.
    fn queue_masked_draw(&mut self, draws: &[MaskedDraw<'_>]) -> Result<(), EngineError> {
        let _ = draws;
        Err(cannot_draw())
    }

    /// Calls `body` `calls` times, beside each other on threads of the host where that is worth it,
    /// and returns when all calls have: for work on tokens that no device does. The default starts
    /// threads.
    fn share_on_host(&mut self, calls: usize, body: &(dyn Fn() + Sync)) {
        host::share_by_new_threads(calls, body);
    }

    /// Limit of the calls that [`Ops::share_on_host`] runs at once, at least 1.
    fn host_threads(&self) -> usize {
        host::threads_max()
    }

    /// Called when the current pass failed before its draw was queued. On return all its queued
    /// work has ended, and none of it disturbs later calls.
    fn abandon_pass(&mut self) {}

    /// Waits for the oldest [`Ops::queue_draw`] that was not fetched, and for all work queued
    /// before it, and appends its tokens, `(rows)`; `None` for a row whose logits are not all
    /// finite. A failed draw counts as fetched.
    fn fetch_drawn(&mut self, tokens: &mut Vec<Option<TokenId>>) -> Result<(), EngineError> {
        let _ = tokens;
        Err(cannot_draw())
    }

    /// Whether [`Ops::fetch_drawn`] would return without waiting.
    fn is_draw_ready(&mut self) -> bool {
        true
    }

    /// Time that the device was idle before the pass whose tokens were fetched last; `None` before
    /// the second pass, or if unknown.
    fn idle_before_step(&self) -> Option<Duration> {
        None
    }

    /// Access to the pool's blocks beside the engine, if the device can copy on its own.
    fn blocks(&self, pool: &Self::Pool) -> Option<Arc<dyn DeviceBlocks>> {
        let _ = pool;
        None
    }

    /// Copies a range out of a block or slot, `[span.len]`. The pool has the range.
    fn read_block(
        &self,
        pool: &Self::Pool,
        span: BlockSpan,
        out: &mut [u8],
    ) -> Result<(), EngineError>;

    /// The bytes of a whole block or slot in place, if the host can read them there. The pool has
    /// the block or slot.
    fn host_block<'a>(
        &self,
        pool: &'a Self::Pool,
        plane: KvPlane,
        block: BlockIndex,
    ) -> Option<&'a [u8]> {
        let _ = (pool, plane, block);
        None
    }

    /// Copies bytes into a range of a block or slot, `[span.len]`. The pool has the range.
    fn write_block(
        &mut self,
        pool: &mut Self::Pool,
        span: BlockSpan,
        bytes: &[u8],
    ) -> Result<(), EngineError>;

    /// Copies one whole block or slot of a plane onto another, between the passes before and after
    /// this call. A device may queue the copy.
    fn copy_block(
        &mut self,
        pool: &mut Self::Pool,
        plane: KvPlane,
        from: BlockIndex,
        to: BlockIndex,
    ) -> Result<(), EngineError>;

    /// Sets a state slot to that of a sequence without tokens: zeros. Ordered as
    /// [`Ops::copy_block`].
    fn clear_state(&mut self, pool: &mut Self::Pool, slot: BlockIndex) -> Result<(), EngineError>;
}

fn has_no_experts() -> EngineError {
    EngineError::Device("this device computes no experts".to_owned())
}

fn has_no_adapters() -> EngineError {
    EngineError::Device("this device applies no adapters".to_owned())
}

fn cannot_draw() -> EngineError {
    EngineError::Device("this device does not draw tokens".to_owned())
}
