//! The lower waist: what the forward pass needs of a device, in coarse operations.
//!
//! Owns: the traits [`Pack`] (weights, loaded once, shared by several engines) and [`Ops`] (one
//! engine's device), and the plain data they speak in.
//! Never: knows an architecture, a request or a sampling rule.
//! Invariant, which every implementation keeps: **path independence.** An output element depends
//! only on its own row (and, in attention, on the KV of its own sequence up to its own position),
//! and is accumulated in an order that does not depend on how many rows, segments or chunks are in
//! the call. The same row gives the same bits alone, in a batch, and in any chunk.
//!
//! Shapes are written `(rows, columns)`, row-major. Activations are f32 as far as the caller can
//! tell; how weights are stored is [`Precision`], and how keys and values are [`KvType`], both chosen when the
//! implementation is built. Quantised weights a device may keep as narrow as they come, see [`Pack::matrix`].
//! An implementation may assume what is written here and panics, with `assert!`, where it is not so:
//! the forward pass is checked code, and a wrong shape is a defect, not an input.

mod draw;
mod io;
mod shapes;

pub use draw::{Change, DrawRule, Edit};
pub use io::{AttentionIo, Gated, LayerOf, Normed, Residual};
pub use shapes::{HeadShape, KvType, PoolShape, Precision};

use crate::EngineError;
use crate::blocks::DeviceBlocks;
use crate::checkpoint::{StoredMatrix, StoredTensor};
use cleave_domain::{BlockIndex, DeviceId, TokenId};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The rows of one forward pass: every segment's tokens one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token of each row, `(rows)`; of a row that is fed, anything.
    pub tokens: Vec<TokenId>,
    /// Rows whose token the last draw makes, by row; only where [`Ops::draws`].
    pub fed: Vec<FedRow>,
    /// Position of each row in its sequence, `(rows)`.
    pub positions: Vec<u32>,
    /// The runs, in row order; together they cover every row.
    pub segments: Vec<BatchSegment>,
    /// Every segment's block table, one after the other.
    pub blocks: Vec<BlockIndex>,
}

impl Batch {
    /// Number of rows.
    pub fn rows_count(&self) -> usize {
        self.tokens.len()
    }

    /// A segment's block table: block `i` holds positions `i × block_tokens ..`.
    pub fn table(&self, segment: &BatchSegment) -> &[BlockIndex] {
        &self.blocks[segment.blocks.clone()]
    }
}

/// A row whose token is not known to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FedRow {
    /// Of the batch.
    pub row: u32,
    /// Of the last [`Ops::draw`], whose token it takes. If that is none, since its logits were not finite, any
    /// token of the table will do: nobody is told what comes of it.
    pub drawn: u32,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSegment {
    /// Its rows in the batch; row `rows.start + i` is at `position + i`.
    pub rows: Range<usize>,
    /// Position of its first row. Keys and values of `0..position` are in the pool already.
    pub position: usize,
    /// Its block table, a range of [`Batch::blocks`]; covers `position + rows.len()` tokens.
    /// The blocks that its rows are stored in are no other segment's.
    pub blocks: Range<usize>,
}

/// Cosines and sines of the rotary embedding, for every position of the context.
///
/// Pairs are `(i, i + head_dim / 2)`: `x[i] ← x[i]·cos[i] − x[i+half]·sin[i]`,
/// `x[i+half] ← x[i+half]·cos[i] + x[i]·sin[i]`.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTable<'a> {
    /// `(positions, head_dim / 2)`, scaled by the model's attention factor, if it has one.
    pub cos: &'a [f32],
    /// As `cos`.
    pub sin: &'a [f32],
    /// Pairs per head, `head_dim / 2`.
    pub half: usize,
}

/// Root-mean-square normalisation: `x[i] · weight[i] / sqrt(mean(x²) + epsilon)`.
#[derive(Debug)]
pub struct Norm<'a, V> {
    /// `(width)`.
    pub weight: &'a V,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// Per-head normalisation of queries and keys, before rotation (Qwen3).
#[derive(Debug)]
pub struct HeadNorms<'a, V> {
    /// `(head_dim)`, the same for every query head.
    pub query: &'a V,
    /// `(head_dim)`, the same for every key head.
    pub key: &'a V,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// How one layer attends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Which layer of the pool.
    pub layer: usize,
    /// Multiplies the scores before the softmax, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Position `p` sees `p - window + 1 ..= p` (those that exist); `None` sees `0 ..= p`.
    pub window: Option<usize>,
}

/// What activations in a buffer are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// The residual stream: sums of every layer, always f32.
    Residual,
    /// What goes into and comes out of one operation; a device may keep it as it keeps weights.
    Activations,
}

/// What is about to be loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadPlan {
    /// Elements of dense matrices and tables; one tensor that serves as both counts once.
    pub matrix_elements: u64,
    /// Matrices that are not dense, or not wholly, as [`Pack::matrix`] will be given them.
    pub narrow: Vec<Vec<StoredMatrix>>,
    /// Elements of vectors, biases and rotary tables.
    pub vector_elements: u64,
    /// How many of all these there are.
    pub tensors_count: usize,
}

/// What a pass is for.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// KV, and whatever is asked for afterwards.
    Anything,
    /// The token after every row, and nothing else, in one [`Ops::draw`] by these rules: a decode step.
    Tokens(&'a [DrawRule]),
}

/// Whether the caller runs the operations of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// It does.
    Run,
    /// It leaves them out: the device does them from a recording, with [`Ops::draw`], which comes next.
    Recorded,
}

/// Loads weights into the form the device likes. Used before any engine runs, from any thread;
/// what it makes is shared between engines.
pub trait Pack: Send + Sync {
    /// A weight `(out, in)` with an optional bias `(out)`.
    type Matrix: Send + Sync;
    /// Embedding rows `(vocab, width)`.
    type Table: Send + Sync;
    /// A norm's weight `(width)`, f32.
    type Vector: Send + Sync;
    /// A rotary table on the device.
    type Rotary: Send + Sync;

    /// How dense matrices are stored.
    fn precision(&self) -> Precision;

    /// Names what it rounds weights to beyond that, or keeps them in, for people and the fingerprint; empty where it does
    /// neither.
    fn form(&self) -> &'static str {
        ""
    }

    /// Comes before everything else: a device may take the memory for all of it at once.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn expect(&self, plan: &LoadPlan) -> Result<(), EngineError> {
        let _ = plan;
        Ok(())
    }

    /// Comes last: when it returns, everything is where it belongs. Until then a device may still be
    /// copying.
    ///
    /// # Errors
    /// `Device` if anything went wrong on the way.
    fn finish(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Bytes that [`Pack::matrix`] makes of these, as a step reads them.
    fn matrix_bytes(&self, stack: &[StoredMatrix]) -> u64 {
        let elements: usize = stack.iter().map(|part| part.rows() * part.columns()).sum();
        (elements * self.precision().element_bytes()) as u64
    }

    /// The same of [`Pack::head`].
    fn head_bytes(&self, head: &StoredTensor) -> u64 {
        self.matrix_bytes(&[head.clone().into()])
    }

    /// The head `(vocab, in)`, which makes logits.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn head(&self, head: &StoredTensor) -> Result<Self::Matrix, EngineError> {
        self.matrix(&[head.clone().into()], None)
    }

    /// Packs tensors `(out_i, in)`, stacked along `out` in the order given, into one matrix. A device
    /// keeps quantised ones as they are if it can multiply with them, or rounds `(code − zero) × scale`
    /// to its own precision.
    /// `bias`, if given, has one element per row of the stack.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<Self::Matrix, EngineError>;

    /// As [`Pack::matrix`], for [`Ops::gated`] alone: the first half of the stack's rows are the gate's.
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

    /// Embedding rows. May keep the tensor and read its rows where they lie.
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

/// [`Pack::Matrix`] of an [`Ops`].
pub type MatrixOf<O> = <<O as Ops>::Pack as Pack>::Matrix;
/// [`Pack::Table`] of an [`Ops`].
pub type TableOf<O> = <<O as Ops>::Pack as Pack>::Table;
/// [`Pack::Vector`] of an [`Ops`].
pub type VectorOf<O> = <<O as Ops>::Pack as Pack>::Vector;
/// [`Pack::Rotary`] of an [`Ops`].
pub type RotaryOf<O> = <<O as Ops>::Pack as Pack>::Rotary;

/// One engine's device. Called by one thread.
///
/// In one pass: [`begin`](Ops::begin), then the running operations in any order. `rows` is how many
/// leading rows of the buffers take part; the rest keep what they hold.
///
/// Every running operation fails only with [`EngineError::Device`] or [`EngineError::Lost`].
pub trait Ops: Send {
    /// What loads its weights.
    type Pack: Pack;
    /// An activation buffer `(rows_max, width)`.
    type Rows: Send;
    /// A KV pool.
    type Pool: Send;

    /// Processor or device and number formats, for people: `AVX-512 bf16, 8 threads`.
    fn device(&self) -> String;

    /// The hardware, if this takes all of it: what computes on the same makes both slower.
    fn device_id(&self) -> Option<DeviceId>;

    /// How keys and values are stored in its pools.
    fn kv_type(&self) -> KvType;

    /// Names how it rounds and how blocks are laid out, for the fingerprint: two devices of one name give the same bits,
    /// and only their blocks and streams may be mixed. Anything that may change either changes the name.
    fn arithmetic(&self) -> String;

    /// Allocates an activation buffer, zeroed.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn rows(&self, rows_max: usize, width: usize, holds: Holds) -> Result<Self::Rows, EngineError>;

    /// Allocates a KV pool, zeroed.
    ///
    /// # Errors
    /// `Device` if memory is short.
    fn pool(&self, shape: PoolShape) -> Result<Self::Pool, EngineError>;

    /// A pass begins: everything up to the next `begin` is about this batch. A device with its own
    /// memory copies it there; a processor may plan its work.
    fn begin(&mut self, batch: &Batch, wanted: Wanted<'_>) -> Result<Pass, EngineError>;

    /// `out[r] = table[batch.tokens[r]]`, `(rows, width)`, or of the token that [`Batch::fed`] says. Every token
    /// is within the table.
    fn embed(
        &mut self,
        batch: &Batch,
        table: &TableOf<Self>,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// `out[r] = norm(x[r])`, both `(rows, width)`.
    fn rms_norm(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        x: &Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// `sum.residual[r] += sum.delta[r]`, then `out[r] = norm(residual[r])`, all `(rows, width)`.
    fn add_rms_norm(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        sum: Residual<'_, Self::Rows>,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// `out[r] = matrix · x[r] + bias`, `x` `(rows, in)`, `out` `(rows, out)`.
    fn matmul(
        &mut self,
        matrix: &MatrixOf<Self>,
        rows: usize,
        x: &Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// Normalises rows of the residual stream, with what is added first, and multiplies: [`Ops::rms_norm`] or
    /// [`Ops::add_rms_norm`], then [`Ops::matmul`]. Normed rows are for this product alone, so that a device need
    /// not write them.
    fn norm_matmul(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        from: Normed<'_, Self::Rows>,
        (matrix, out): (&MatrixOf<Self>, &mut Self::Rows),
    ) -> Result<(), EngineError> {
        let normed = self.normed(norm, rows, from)?;
        self.matmul(matrix, rows, normed, out)
    }

    /// The same with [`Ops::gated`].
    fn norm_gated(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        from: Normed<'_, Self::Rows>,
        (matrix, to): (&MatrixOf<Self>, Gated<'_, Self::Rows>),
    ) -> Result<(), EngineError> {
        let normed = self.normed(norm, rows, from)?;
        self.gated(matrix, rows, normed, to)
    }

    /// Normalises rows, with what is added first, into where they are for.
    fn normed<'a>(
        &mut self,
        norm: &Norm<'_, VectorOf<Self>>,
        rows: usize,
        from: Normed<'a, Self::Rows>,
    ) -> Result<&'a Self::Rows, EngineError> {
        let Normed {
            residual,
            delta,
            normed,
        } = from;
        match delta {
            None => self.rms_norm(norm, rows, residual, normed)?,
            Some(delta) => {
                self.add_rms_norm(norm, rows, Residual { residual, delta }, normed)?;
            }
        }
        Ok(normed)
    }

    /// Normalises each query head and each key head of `qkv` `(rows, q | k | v)` in place.
    fn head_norm(
        &mut self,
        norms: &HeadNorms<'_, VectorOf<Self>>,
        heads: HeadShape,
        rows: usize,
        qkv: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// Rotates queries and keys of `qkv` `(rows, q | k | v)` by their positions, queries in place,
    /// and stores keys and values in `layer` of the pool where the block tables say. Keys need not
    /// be rotated in `qkv` itself. `heads` and the blocks' layout are the pool's.
    fn rotate_store(
        &mut self,
        batch: &Batch,
        rotary: &RotaryOf<Self>,
        qkv: &mut Self::Rows,
        pool: LayerOf<'_, Self::Pool>,
    ) -> Result<(), EngineError>;

    /// [`Ops::head_norm`] where there are norms, then [`Ops::rotate_store`]. A device may do both to a row at once.
    fn norm_rotate_store(
        &mut self,
        norms: Option<&HeadNorms<'_, VectorOf<Self>>>,
        (batch, rotary): (&Batch, &RotaryOf<Self>),
        qkv: &mut Self::Rows,
        (heads, pool): (HeadShape, LayerOf<'_, Self::Pool>),
    ) -> Result<(), EngineError> {
        if let Some(norms) = norms {
            self.head_norm(norms, heads, batch.rows_count(), qkv)?;
        }
        self.rotate_store(batch, rotary, qkv, pool)
    }

    /// Causal attention of every row over its own sequence's keys and values in the pool, which
    /// hold this batch's too (`rotate_store` came first). Reads the queries of `qkv`; `out` is
    /// `(rows, query_heads × head_dim)`. Keys are walked in tiles of one block, in order.
    fn attend(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: AttentionIo<'_, Self>,
    ) -> Result<(), EngineError>;

    /// `gate | up = matrix · x[r] + bias` with a matrix of [`Pack::gate_up`], then
    /// `out[r][i] = silu(gate[i]) · up[i]`, where `silu(x) = x / (1 + exp(−x))`. `x` `(rows, in)`, `out`
    /// `(rows, width)`; `gate_up` `(rows, 2 × width)` is for a device that makes two operations of it.
    fn gated(
        &mut self,
        matrix: &MatrixOf<Self>,
        rows: usize,
        x: &Self::Rows,
        to: Gated<'_, Self::Rows>,
    ) -> Result<(), EngineError>;

    /// `to[i] = from[indices[i]]`, same width.
    fn gather(
        &mut self,
        indices: &[u32],
        from: &Self::Rows,
        to: &mut Self::Rows,
    ) -> Result<(), EngineError>;

    /// As [`Ops::matmul`], into the host's memory: `out` is `(rows, vocab)`, exactly filled.
    fn logits(
        &mut self,
        head: &MatrixOf<Self>,
        rows: usize,
        x: &Self::Rows,
        out: &mut [f32],
    ) -> Result<(), EngineError>;

    /// Whether the device draws tokens itself, so that logits need not come to the host, and takes the next
    /// pass before they were fetched.
    fn draws(&self) -> bool {
        false
    }

    /// Queues that logits are made as [`Ops::logits`] does and the token after each row is drawn by its rule;
    /// no rules, no draw. The same logits give the same token as on the host. At most
    /// [`STEPS_IN_FLIGHT_MAX`](crate::STEPS_IN_FLIGHT_MAX) are queued and not fetched. Only where [`Ops::draws`].
    fn draw(
        &mut self,
        head: &MatrixOf<Self>,
        rules: &[DrawRule],
        x: &Self::Rows,
    ) -> Result<(), EngineError> {
        let _ = (head, rules, x);
        Err(draws_nothing())
    }

    /// The pass at hand failed before its draw was queued: what was queued of it is over when this returns, and nothing
    /// of it is in the way of what comes next.
    fn abandon(&mut self) {}

    /// Waits for the oldest [`Ops::draw`] that was not fetched, and for all that was queued before it: its tokens
    /// are appended, `(rows)`; `None` for a row whose logits are not all finite. If it failed it counts as fetched.
    fn drawn(&mut self, tokens: &mut Vec<Option<TokenId>>) -> Result<(), EngineError> {
        let _ = tokens;
        Err(draws_nothing())
    }

    /// Whether [`Ops::drawn`] would not wait.
    fn is_drawn(&mut self) -> bool {
        true
    }

    /// How long the device stood still before the pass whose tokens came last, if it was asked for tokens before
    /// and knows.
    fn idle(&self) -> Option<Duration> {
        None
    }

    /// The pool apart from the engine, where the device copies by itself.
    fn blocks(&self, pool: &Self::Pool) -> Option<Arc<dyn DeviceBlocks>> {
        let _ = pool;
        None
    }

    /// Copies `out.len()` bytes of a block out, from byte `offset`. The range is within the block.
    fn read_block(
        &self,
        pool: &Self::Pool,
        block: BlockIndex,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), EngineError>;

    /// A block where it is, if the host can read it there. The block is one of the pool's.
    fn host_block<'a>(&self, pool: &'a Self::Pool, block: BlockIndex) -> Option<&'a [u8]> {
        let _ = (pool, block);
        None
    }

    /// Copies bytes into a block, from byte `offset`. The range is within the block.
    fn write_block(
        &mut self,
        pool: &mut Self::Pool,
        block: BlockIndex,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), EngineError>;

    /// Copies one whole block onto another.
    fn copy_block(
        &mut self,
        pool: &mut Self::Pool,
        from: BlockIndex,
        to: BlockIndex,
    ) -> Result<(), EngineError>;
}

fn draws_nothing() -> EngineError {
    EngineError::Device("this device does not draw tokens".to_owned())
}
