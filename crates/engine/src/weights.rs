//! A model's weights on a device.
//!
//! Owns: which tensors are stacked into which matrix.
//! Never: runs anything.
//! Invariant: immutable once loaded; several engines of one process share it.

use crate::EngineError;
use crate::checkpoint::layout::{LAST_NORM, STACKS, in_layer};
use crate::checkpoint::{Checkpoint, CheckpointError, ModelConfig, Revision, StoredMatrix};
use crate::ops::{KvType, LoadPlan, Pack, PoolShape, Precision, RotaryTable};

/// How far a long piece of work on a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the checkpoint that are on the device, or written.
    pub bytes_done: u64,
    /// Bytes of all of it.
    pub bytes_total: u64,
}

/// A model's weights in the form a device likes.
#[derive(Debug)]
pub struct Weights<P: Pack> {
    pub(crate) config: ModelConfig,
    pub(crate) revision: Revision,
    /// Architecture, size and quantisation, for people: `qwen3 0.6B, awq int4`.
    pub(crate) name: String,
    /// The context in tokens: the model's own, or less where the caller asked for less.
    pub(crate) context_tokens_max: usize,
    pub(crate) precision: Precision,
    /// See [`Pack::form`].
    pub(crate) form: &'static str,
    /// Of all layers' matrices, and of the head, where they are multiplied.
    layer_bytes: u64,
    head_bytes: u64,
    pub(crate) table: P::Table,
    pub(crate) layers: Vec<Layer<P>>,
    pub(crate) norm: P::Vector,
    pub(crate) head: P::Matrix,
    pub(crate) rotary: P::Rotary,
}

/// One layer's weights.
#[derive(Debug)]
pub(crate) struct Layer<P: Pack> {
    pub(crate) input_norm: P::Vector,
    /// `(q | k | v, hidden)`.
    pub(crate) qkv: P::Matrix,
    pub(crate) query_norm: Option<P::Vector>,
    pub(crate) key_norm: Option<P::Vector>,
    /// `(hidden, query_width)`.
    pub(crate) output: P::Matrix,
    pub(crate) post_norm: P::Vector,
    /// `(gate | up, hidden)`.
    pub(crate) gate_up: P::Matrix,
    /// `(hidden, intermediate)`.
    pub(crate) down: P::Matrix,
}

impl<P: Pack> Weights<P> {
    /// Loads a checkpoint onto a device. `context_tokens_max` shortens the model's context (and the
    /// rotary table with it); it cannot lengthen it. `progress` is called after every matrix.
    ///
    /// # Errors
    /// [`CheckpointError::Device`] if the device cannot take a tensor.
    pub fn load(
        pack: &P,
        checkpoint: &Checkpoint,
        context_tokens_max: Option<usize>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, CheckpointError> {
        let config = checkpoint.config().clone();
        let context = context_tokens_max
            .unwrap_or(config.context_tokens_max)
            .clamp(1, config.context_tokens_max);
        let values = config.rope.table(config.heads.head_dim, context);
        pack.expect(&load_plan(checkpoint, values.cos.len() + values.sin.len()))?;
        let rotary = pack.rotary(RotaryTable {
            cos: &values.cos,
            sin: &values.sin,
            half: config.heads.head_dim / 2,
        })?;
        let mut loader = Loader {
            pack,
            checkpoint,
            progress,
            matrix_bytes: 0,
            bytes_done: 0,
            bytes_total: checkpoint.bytes_total(),
        };
        let table = loader.table()?;
        let layers = (0..config.layers_count())
            .map(|layer| loader.layer(layer))
            .collect::<Result<_, _>>()?;
        let layer_bytes = std::mem::take(&mut loader.matrix_bytes);
        let norm = loader.vector(LAST_NORM)?;
        let head = pack.head(checkpoint.head())?;
        loader.advance(checkpoint.head().bytes().len());
        let head_bytes = pack.head_bytes(checkpoint.head());
        pack.finish()?;
        Ok(Self {
            layer_bytes,
            head_bytes,
            revision: checkpoint.revision(),
            name: name(checkpoint, pack.form()),
            form: pack.form(),
            context_tokens_max: context,
            precision: pack.precision(),
            config,
            table,
            layers,
            norm,
            head,
            rotary,
        })
    }

    /// Architecture, size and quantisation, for people: `qwen3 0.6B, awq int4`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of all layers' matrices, and of the head, as a step reads them.
    pub fn matrix_bytes(&self) -> (u64, u64) {
        (self.layer_bytes, self.head_bytes)
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The KV pool of an engine over these weights; says what a block takes before one is built.
    pub fn pool_shape(&self, block_tokens: usize, blocks_count: usize, kv: KvType) -> PoolShape {
        PoolShape {
            blocks_count,
            layers_count: self.config.layers_count(),
            heads: self.config.heads,
            block_tokens,
            kv,
        }
    }

    /// The longest sequence in tokens.
    pub fn context_tokens_max(&self) -> usize {
        self.context_tokens_max
    }
}

/// Every tensor is loaded once; those of one row are vectors or biases.
fn load_plan(checkpoint: &Checkpoint, rotary_elements: usize) -> LoadPlan {
    let mut plan = LoadPlan {
        vector_elements: rotary_elements as u64,
        tensors_count: 2,
        ..LoadPlan::default()
    };
    for tensor in checkpoint.tensors() {
        let elements = (tensor.rows() * tensor.columns()) as u64;
        match tensor.rows() {
            1 => plan.vector_elements += elements,
            _ => plan.matrix_elements += elements,
        }
        plan.tensors_count += 1;
    }
    for layer in 0..checkpoint.config().layers_count() {
        for parts in STACKS {
            let of = |part: &&str| checkpoint.projection(layer, part);
            let stack: Vec<StoredMatrix> = parts.iter().map(of).collect();
            let dense = stack.iter().filter_map(|matrix| match matrix {
                StoredMatrix::Dense(tensor) => Some(tensor.rows() * tensor.columns()),
                StoredMatrix::Narrow(_) => None,
            });
            if dense.clone().count() < stack.len() {
                plan.matrix_elements -= dense.sum::<usize>() as u64;
                plan.narrow.push(stack);
                plan.tensors_count += 1;
            }
        }
    }
    plan
}

fn name(checkpoint: &Checkpoint, form: &str) -> String {
    let (architecture, count) = (
        checkpoint.config().architecture.name(),
        rounded(checkpoint.parameters_count()),
    );
    match (checkpoint.quantization(), form) {
        (Some(quantization), _) => format!("{architecture} {count}, {quantization}"),
        (None, "") => format!("{architecture} {count}"),
        (None, "f16") => format!("{architecture} {count}, weights in f16"),
        (None, form) => format!("{architecture} {count}, rounded to {form}"),
    }
}

/// 1235814400 as `1.2B`.
fn rounded(count: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")];
    let unit = UNITS.into_iter().find(|(size, _)| count >= *size);
    let Some((size, letter)) = unit else {
        return count.to_string();
    };
    let tenths = count * 10 / size;
    match tenths {
        100.. => format!("{}{letter}", tenths / 10),
        _ => format!("{}.{}{letter}", tenths / 10, tenths % 10),
    }
}

/// What makes a matrix of a stack and its bias.
type PackStack<P> =
    fn(&P, &[StoredMatrix], Option<&[f32]>) -> Result<<P as Pack>::Matrix, EngineError>;

/// The walk through a checkpoint, counting bytes.
struct Loader<'a, P> {
    pack: &'a P,
    checkpoint: &'a Checkpoint,
    progress: &'a mut dyn FnMut(Progress),
    /// Of the matrices so far, on the device.
    matrix_bytes: u64,
    bytes_done: u64,
    bytes_total: u64,
}

impl<P: Pack> Loader<'_, P> {
    fn layer(&mut self, layer: usize) -> Result<Layer<P>, EngineError> {
        let config = self.checkpoint.config();
        let biases = config.biases;
        let has_head_norms = config.head_norms;
        let [qkv, output, gate_up, down] = STACKS;
        let matrix = |loader: &mut Self, parts: &[&str], has_bias: bool| {
            loader.matrix(layer, parts, (has_bias, P::matrix))
        };
        let head_norm = |loader: &mut Self, part: &str| {
            has_head_norms
                .then(|| loader.vector(&in_layer(layer, part)))
                .transpose()
        };
        Ok(Layer {
            input_norm: self.vector(&in_layer(layer, "input_layernorm.weight"))?,
            qkv: matrix(self, qkv, biases.qkv)?,
            query_norm: head_norm(self, "self_attn.q_norm.weight")?,
            key_norm: head_norm(self, "self_attn.k_norm.weight")?,
            output: matrix(self, output, biases.output)?,
            post_norm: self.vector(&in_layer(layer, "post_attention_layernorm.weight"))?,
            gate_up: self.matrix(layer, gate_up, (biases.mlp, P::gate_up))?,
            down: matrix(self, down, biases.mlp)?,
        })
    }

    fn table(&mut self) -> Result<P::Table, EngineError> {
        let embedding = self.checkpoint.embedding();
        let table = self.pack.table(embedding)?;
        self.advance(embedding.bytes().len());
        Ok(table)
    }

    fn matrix(
        &mut self,
        layer: usize,
        parts: &[&str],
        (has_bias, pack): (bool, PackStack<P>),
    ) -> Result<P::Matrix, EngineError> {
        let bias_of = |part: &str| {
            self.checkpoint
                .tensor(&in_layer(layer, &format!("{part}.bias")))
        };
        let weight_of = |part: &&str| self.checkpoint.projection(layer, part);
        let stack: Vec<StoredMatrix> = parts.iter().map(weight_of).collect();
        let bias: Option<Vec<f32>> = has_bias.then(|| {
            parts
                .iter()
                .flat_map(|part| bias_of(part).to_f32())
                .collect()
        });
        let bias_bytes: usize = match has_bias {
            true => parts.iter().map(|part| bias_of(part).bytes().len()).sum(),
            false => 0,
        };
        let matrix = pack(self.pack, &stack, bias.as_deref())?;
        self.matrix_bytes += self.pack.matrix_bytes(&stack);
        let stored: usize = stack.iter().map(StoredMatrix::stored_bytes).sum();
        self.advance(stored + bias_bytes);
        Ok(matrix)
    }

    fn vector(&mut self, name: &str) -> Result<P::Vector, EngineError> {
        let tensor = self.checkpoint.tensor(name);
        let vector = self.pack.vector(&tensor.to_f32())?;
        self.advance(tensor.bytes().len());
        Ok(vector)
    }

    fn advance(&mut self, bytes: usize) {
        self.bytes_done += bytes as u64;
        (self.progress)(Progress {
            bytes_done: self.bytes_done,
            bytes_total: self.bytes_total,
        });
    }
}
