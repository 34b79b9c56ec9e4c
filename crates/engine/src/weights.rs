//! A model's weights on a device.
//!
//! Owns: the loading of tensors, stacked into matrices.
//! Never: computes with them.
//! Invariant: weights are immutable once loaded; several engines of one process share them.

use crate::EngineError;
use crate::checkpoint::layout::{LAST_NORM, STACKS, layer_tensor_name};
use crate::checkpoint::{Checkpoint, CheckpointError, ModelConfig, Revision, StoredMatrix};
use crate::ops::{KvPoolShape, KvType, LoadPlan, Precision, RotaryTable, WeightLoader};

/// Progress of loading or writing a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointProgress {
    /// Bytes that are on the device, or written.
    pub bytes_done: u64,
    /// Bytes to load or write in all.
    pub bytes_total: u64,
}

/// A model's weights in a device's own layout.
#[derive(Debug)]
pub struct Weights<P: WeightLoader> {
    pub(crate) config: ModelConfig,
    pub(crate) revision: Revision,
    /// Architecture, size and quantisation, for people: `qwen3 0.6B, awq int4`.
    pub(crate) name: String,
    /// Context length in tokens: the model's own, or less if the caller asked for less.
    pub(crate) context_tokens_max: usize,
    pub(crate) precision: Precision,
    /// Name of the format, see [`WeightLoader::weight_form`].
    pub(crate) weight_form: &'static str,
    /// Bytes of all layers' matrices, and of the head, as a step reads them.
    layer_bytes: u64,
    head_bytes: u64,
    pub(crate) table: P::Table,
    pub(crate) layers: Vec<LayerWeights<P>>,
    pub(crate) norm: P::Vector,
    pub(crate) head: P::Matrix,
    pub(crate) rotary: P::Rotary,
}

#[derive(Debug)]
pub(crate) struct LayerWeights<P: WeightLoader> {
    pub(crate) input_norm: P::Vector,
    /// `(q | k | v, hidden)`.
    pub(crate) qkv: P::Matrix,
    pub(crate) query_norm: Option<P::Vector>,
    pub(crate) key_norm: Option<P::Vector>,
    /// Projection after attention, `(hidden, query_width)`.
    pub(crate) output: P::Matrix,
    pub(crate) post_norm: P::Vector,
    /// `(gate | up, hidden)`.
    pub(crate) gate_up: P::Matrix,
    /// Down projection of the MLP, `(hidden, intermediate)`.
    pub(crate) down: P::Matrix,
}

impl<P: WeightLoader> Weights<P> {
    /// Loads a checkpoint onto a device. `context_tokens_max` shortens the model's context (and the
    /// rotary table with it); it cannot lengthen it. `progress` is called after every matrix.
    ///
    /// # Errors
    /// [`CheckpointError::Device`] if the device cannot take a tensor.
    pub fn load(
        pack: &P,
        checkpoint: &Checkpoint,
        context_tokens_max: Option<usize>,
        progress: &mut dyn FnMut(CheckpointProgress),
    ) -> Result<Self, CheckpointError> {
        let config = checkpoint.config().clone();
        let context = context_tokens_max
            .unwrap_or(config.context_tokens_max)
            .clamp(1, config.context_tokens_max);
        let values = config.rope.table(config.heads.head_dim, context);
        pack.reserve(&load_plan(checkpoint, values.cos.len() + values.sin.len()))?;
        let rotary = pack.rotary(RotaryTable {
            cos: &values.cos,
            sin: &values.sin,
            half: config.heads.head_dim / 2,
        })?;
        let mut loader = CheckpointLoader {
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
            name: name(checkpoint, pack.weight_form()),
            weight_form: pack.weight_form(),
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

    /// Shape and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Shape of the KV pool of an engine with these weights; known before an engine is built.
    pub fn pool_shape(&self, block_tokens: usize, blocks_count: usize, kv: KvType) -> KvPoolShape {
        KvPoolShape {
            blocks_count,
            layers_count: self.config.layers_count(),
            heads: self.config.heads,
            block_tokens,
            kv,
        }
    }

    /// Longest sequence in tokens.
    pub fn context_tokens_max(&self) -> usize {
        self.context_tokens_max
    }
}

/// Sizes of all weights. Every tensor is loaded once; tensors of one row are vectors or biases.
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
                StoredMatrix::Quantized(_) => None,
            });
            if dense.clone().count() < stack.len() {
                plan.matrix_elements -= dense.sum::<usize>() as u64;
                plan.quantized.push(stack);
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

/// A parameter count for people: 1235814400 is `1.2B`.
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

/// Function that packs a stack and its bias into a matrix.
type LoadStack<P> =
    fn(&P, &[StoredMatrix], Option<&[f32]>) -> Result<<P as WeightLoader>::Matrix, EngineError>;

/// Loads a checkpoint's tensors in order, and counts bytes.
struct CheckpointLoader<'a, P> {
    pack: &'a P,
    checkpoint: &'a Checkpoint,
    progress: &'a mut dyn FnMut(CheckpointProgress),
    /// Bytes on the device of the matrices so far.
    matrix_bytes: u64,
    bytes_done: u64,
    bytes_total: u64,
}

impl<P: WeightLoader> CheckpointLoader<'_, P> {
    fn layer(&mut self, layer: usize) -> Result<LayerWeights<P>, EngineError> {
        let config = self.checkpoint.config();
        let biases = config.biases;
        let has_head_norms = config.head_norms;
        let [qkv, output, gate_up, down] = STACKS;
        let matrix = |loader: &mut Self, parts: &[&str], has_bias: bool| {
            loader.matrix(layer, parts, has_bias, P::matrix)
        };
        let head_norm = |loader: &mut Self, part: &str| {
            has_head_norms
                .then(|| loader.vector(&layer_tensor_name(layer, part)))
                .transpose()
        };
        Ok(LayerWeights {
            input_norm: self.vector(&layer_tensor_name(layer, "input_layernorm.weight"))?,
            qkv: matrix(self, qkv, biases.qkv)?,
            query_norm: head_norm(self, "self_attn.q_norm.weight")?,
            key_norm: head_norm(self, "self_attn.k_norm.weight")?,
            output: matrix(self, output, biases.output)?,
            post_norm: self.vector(&layer_tensor_name(layer, "post_attention_layernorm.weight"))?,
            gate_up: self.matrix(layer, gate_up, biases.mlp, P::gate_up)?,
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
        has_bias: bool,
        pack: LoadStack<P>,
    ) -> Result<P::Matrix, EngineError> {
        let bias_of = |part: &str| {
            self.checkpoint
                .tensor(&layer_tensor_name(layer, &format!("{part}.bias")))
        };
        let weight_of = |part: &&str| self.checkpoint.projection(layer, part);
        let stack: Vec<StoredMatrix> = parts.iter().map(weight_of).collect();
        let bias: Option<Vec<f32>> = has_bias.then(|| {
            parts
                .iter()
                .flat_map(|part| bias_of(part).to_f32())
                .collect()
        });
        let bias_bytes: usize = if has_bias {
            parts.iter().map(|part| bias_of(part).bytes().len()).sum()
        } else {
            0
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
        (self.progress)(CheckpointProgress {
            bytes_done: self.bytes_done,
            bytes_total: self.bytes_total,
        });
    }
}
