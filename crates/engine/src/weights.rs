//! A model's weights on a device.
//!
//! Owns: the loading of tensors, stacked into matrices.
//! Never: computes with them.
//! Invariant: weights are immutable once loaded; several engines of one process share them.

use crate::EngineError;
use crate::folding;
use crate::ops::{Head, InnerSlices, KvType, LoadPlan, Precision, RotaryTable, WeightLoader};
use crate::rotary::{self, RotaryValues};
use cleave_checkpoint::{Checkpoint, CheckpointProgress, QuantizedType, Revision, StoredMatrix};
use cleave_domain::KvSpec;
use cleave_models::{
    AttentionSpec, LayerNorms, Mixer, Mlp, ModelSpec, NormSpec, Projection, QkNormSpec, TensorRole,
    Unsupported,
};
use std::collections::BTreeSet;

/// Errors of loading weights, one variant for each remedy.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The device cannot compute a part of the model. Remedy: another model, or another device.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The device failed to load the weights. Remedy: a device with more memory.
    #[error("loading weights: {0}")]
    Device(#[from] EngineError),
}

/// A model's weights in a device's own layout.
pub struct Weights<P: WeightLoader> {
    pub(crate) spec: ModelSpec,
    pub(crate) revision: Revision,
    /// Architecture, size and quantisation, for people: `qwen3 0.6B, awq int4`.
    pub(crate) name: String,
    /// Context length in tokens: the model's own, or less if the caller asked for less.
    pub(crate) context_tokens_max: usize,
    pub(crate) precision: Precision,
    /// Name of the format, see [`WeightLoader::weight_form`].
    pub(crate) weight_form: &'static str,
    /// Numbers of slices of the row-parallel products, for the fingerprint: `o8d8`, attention's
    /// output and down projection.
    pub(crate) slices: String,
    /// Choice of factors of LongRoPE in the rotary tables, for the fingerprint; empty without them.
    pub(crate) rope_choice: &'static str,
    /// Bytes of all layers' matrices, and of the head, as a step reads them.
    layer_bytes: u64,
    head_bytes: u64,
    pub(crate) table: P::Table,
    pub(crate) layers: Vec<LayerWeights<P>>,
    pub(crate) norm: P::Vector,
    /// The factor of logits, which is in `norm`: hidden states come out of it this much larger.
    pub(crate) norm_factor: f32,
    pub(crate) head: P::Matrix,
    /// Rotary tables, as [`ModelSpec::ropes`].
    pub(crate) rotary: Vec<P::Rotary>,
}

pub(crate) struct LayerWeights<P: WeightLoader> {
    pub(crate) norms: LayerNormWeights<P>,
    pub(crate) mixer: MixerWeights<P>,
    pub(crate) mlp: MlpWeights<P>,
}

/// Weights of a layer's norms, `(hidden)` each, as [`LayerNorms`].
pub(crate) struct LayerNormWeights<P: WeightLoader> {
    pub(crate) mixer_input: Option<P::Vector>,
    pub(crate) mixer_output: Option<P::Vector>,
    pub(crate) mlp_input: Option<P::Vector>,
    pub(crate) mlp_output: Option<P::Vector>,
}

/// Weights of a mixer, one variant for each [`Mixer`].
pub(crate) enum MixerWeights<P: WeightLoader> {
    Attention(AttentionWeights<P>),
}

pub(crate) struct AttentionWeights<P: WeightLoader> {
    /// `(q | k | v, hidden)`.
    pub(crate) qkv: P::Matrix,
    pub(crate) qk_norm: Option<QkNormWeights<P>>,
    /// Projection after attention, `(hidden, query_width)`.
    pub(crate) output: P::Matrix,
}

/// Weights of the norms of queries and keys, as wide as the norm's scope.
pub(crate) struct QkNormWeights<P: WeightLoader> {
    pub(crate) query: P::Vector,
    pub(crate) key: P::Vector,
}

/// Weights of an MLP, one variant for each [`Mlp`].
pub(crate) enum MlpWeights<P: WeightLoader> {
    Gated(GatedMlpWeights<P>),
}

pub(crate) struct GatedMlpWeights<P: WeightLoader> {
    /// `(gate | up, hidden)`.
    pub(crate) gate_up: P::Matrix,
    /// Down projection, `(hidden, width)`.
    pub(crate) down: P::Matrix,
}

impl<P: WeightLoader> Weights<P> {
    /// Loads a checkpoint onto a device. `context_tokens_max` shortens the model's context (and the
    /// rotary table with it); it cannot lengthen it. `progress` is called after every matrix.
    ///
    /// # Errors
    /// `Unsupported` if the device cannot compute the model, `Device` if it cannot take a tensor.
    pub fn load(
        pack: &P,
        checkpoint: &Checkpoint,
        context_tokens_max: Option<usize>,
        progress: &mut dyn FnMut(CheckpointProgress),
    ) -> Result<Self, LoadError> {
        let described = checkpoint.spec();
        pack.supports(described)?;
        folding::supports_order(checkpoint)?;
        let spec = folding::folded(described, pack.precision());
        let context = context_tokens_max
            .unwrap_or(spec.context_tokens_max)
            .clamp(1, spec.context_tokens_max);
        let tables: Vec<RotaryValues> = spec
            .ropes
            .iter()
            .map(|rope| rotary::table(rope, context))
            .collect();
        pack.reserve(&load_plan(checkpoint, &tables))?;
        let rotary = rotary_on_device(pack, &tables)?;
        drop(tables);
        let mut loader = CheckpointLoader {
            pack,
            checkpoint,
            progress,
            matrix_bytes: 0,
            bytes_done: 0,
            bytes_total: checkpoint.bytes_total(),
        };
        let table = loader.table()?;
        let layers = (0..spec.layers.len())
            .map(|layer| loader.layer(layer))
            .collect::<Result<_, _>>()?;
        let layer_bytes = std::mem::take(&mut loader.matrix_bytes);
        let norm = loader.norm(spec.final_norm, TensorRole::FinalNorm, None)?;
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
            slices: slices_name(checkpoint),
            rope_choice: rope_choice(&spec, context),
            context_tokens_max: context,
            precision: pack.precision(),
            spec,
            table,
            layers,
            norm,
            norm_factor: described.scalars.logits,
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

    /// Description of the model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Bytes of a KV block of an engine with these weights; known before an engine is built.
    pub fn block_bytes(&self, block_tokens: u32, kv: KvType) -> u64 {
        self.kv_spec(block_tokens, kv).blocks.bytes
    }

    /// Layout of the KV of a sequence.
    pub fn kv_spec(&self, block_tokens: u32, kv: KvType) -> KvSpec {
        let (element, scale) = (kv.element_bytes(), kv.scale_bytes());
        self.spec
            .kv_spec(block_tokens, element as u64, scale as u64)
    }

    /// The head, with the cap of its logits.
    pub(crate) fn head(&self) -> Head<'_, P::Matrix> {
        Head {
            matrix: &self.head,
            soft_cap: self.spec.scalars.logits_cap,
        }
    }

    /// Longest sequence in tokens.
    pub fn context_tokens_max(&self) -> usize {
        self.context_tokens_max
    }
}

fn rotary_on_device<P: WeightLoader>(
    pack: &P,
    tables: &[RotaryValues],
) -> Result<Vec<P::Rotary>, EngineError> {
    let tables = tables.iter().map(|table| {
        pack.rotary(RotaryTable {
            cos: &table.cos,
            sin: &table.sin,
            half: table.half,
            query_factors: &table.query_factors,
        })
    });
    tables.collect()
}

/// Sizes of all weights. Every tensor is loaded once; tensors of one row are vectors or biases.
fn load_plan(checkpoint: &Checkpoint, rotary: &[RotaryValues]) -> LoadPlan {
    let rotary_elements = rotary
        .iter()
        .map(|table| (2 * table.cos.len() + table.query_factors.len()) as u64);
    let mut plan = LoadPlan {
        vector_elements: rotary_elements.sum(),
        // Cosines, sines and factors are a tensor each.
        tensors_count: 3 * rotary.len(),
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
    for (layer, spec) in checkpoint.spec().layers.iter().enumerate() {
        for parts in spec.stacks() {
            let stack = checkpoint.stack(parts, layer);
            let dense = stack.iter().filter_map(|matrix| match matrix {
                StoredMatrix::Dense(tensor) => Some(tensor.rows() * tensor.columns()),
                StoredMatrix::Quantized(_) => None,
            });
            if dense.clone().count() < stack.len() {
                plan.matrix_elements -= dense.sum::<usize>() as u64;
                let slices = inner_slices(checkpoint, layer, parts);
                plan.quantized.push((stack, slices));
                plan.tensors_count += 1;
            }
        }
    }
    plan
}

fn name(checkpoint: &Checkpoint, form: &str) -> String {
    let (architecture, count) = (
        checkpoint.spec().family,
        rounded(checkpoint.parameters_count()),
    );
    match (checkpoint.quantization(), form) {
        (Some(quantization), _) => format!("{architecture} {count}, {quantization}"),
        (None, "") => format!("{architecture} {count}"),
        (None, "f16") => format!("{architecture} {count}, weights in f16"),
        (None, form) => format!("{architecture} {count}, rounded to {form}"),
    }
}

/// Slices of a stack's inner dimension. Its projections read the same input.
fn inner_slices(
    checkpoint: &Checkpoint,
    layer: usize,
    parts: &'static [Projection],
) -> InnerSlices {
    let stack = checkpoint.stack(parts, layer);
    let slices = parts.iter().flat_map(|part| {
        let of = |weight| {
            let group = group_columns(weight);
            checkpoint.spec().inner_slices(layer, *part, group)
        };
        stack.iter().map(of)
    });
    let mut slices: Vec<InnerSlices> = slices.collect();
    slices.dedup();
    assert_eq!(
        slices.len(),
        1,
        "projections of one stack have the same slices"
    );
    slices.remove(0)
}

/// Columns that share a scale and stay in one slice; 1 if the weight may be cut anywhere.
fn group_columns(weight: &StoredMatrix) -> usize {
    let StoredMatrix::Quantized(tensor) = weight else {
        return 1;
    };
    let columns = tensor.columns();
    match (tensor.element(), tensor.group_columns()) {
        // Columns of a group lie apart, so no kernel keeps the groups.
        (_, None) => 1,
        // A scale of the whole row multiplies sums of slices.
        (QuantizedType::Int8 | QuantizedType::E4m3, Some(group)) if group >= columns => 1,
        (_, Some(group)) => group.min(columns),
    }
}

/// Choice of factors of LongRoPE by an engine of this context; all ropes of a model choose alike.
fn rope_choice(spec: &ModelSpec, context_tokens: usize) -> &'static str {
    let mut choices = spec
        .ropes
        .iter()
        .filter_map(|rope| rope.is_long(context_tokens));
    match choices.next() {
        None => "",
        Some(true) => "-longrope",
        Some(false) => "-shortrope",
    }
}

/// Numbers of slices in all layers: `o8d8`, or several joined by `+` if layers differ.
fn slices_name(checkpoint: &Checkpoint) -> String {
    let count =
        |layer: usize, parts: &'static [Projection]| inner_slices(checkpoint, layer, parts).count();
    let layers = 0..checkpoint.spec().layers.len();
    let names: BTreeSet<String> = layers
        .map(|layer| {
            let output = count(layer, Projection::OUTPUT);
            let down = count(layer, Projection::DOWN);
            format!("o{output}d{down}")
        })
        .collect();
    names.into_iter().collect::<Vec<_>>().join("+")
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

/// Function that packs a stack, its bias and its slices into a matrix.
type LoadStack<P> = fn(
    &P,
    &[StoredMatrix],
    Option<&[f32]>,
    &InnerSlices,
) -> Result<<P as WeightLoader>::Matrix, EngineError>;

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
        let checkpoint = self.checkpoint;
        let spec = &checkpoint.spec().layers[layer];
        Ok(LayerWeights {
            norms: self.layer_norms(&spec.norms, layer)?,
            mixer: match &spec.mixer {
                Mixer::Attention(spec) => MixerWeights::Attention(self.attention(spec, layer)?),
            },
            mlp: match &spec.mlp {
                Mlp::Gated(_) => MlpWeights::Gated(self.gated_mlp(layer)?),
            },
        })
    }

    fn layer_norms(
        &mut self,
        norms: &LayerNorms,
        layer: usize,
    ) -> Result<LayerNormWeights<P>, EngineError> {
        let mut load = |norm: &Option<NormSpec>, role| {
            let weight = norm.map(|norm| self.norm(norm, role, Some(layer)));
            weight.transpose()
        };
        let LayerNorms {
            mixer_input,
            mixer_output,
            mlp_input,
            mlp_output,
        } = norms;
        Ok(LayerNormWeights {
            mixer_input: load(mixer_input, TensorRole::MixerInputNorm)?,
            mixer_output: load(mixer_output, TensorRole::MixerOutputNorm)?,
            mlp_input: load(mlp_input, TensorRole::MlpInputNorm)?,
            mlp_output: load(mlp_output, TensorRole::MlpOutputNorm)?,
        })
    }

    fn attention(
        &mut self,
        spec: &AttentionSpec,
        layer: usize,
    ) -> Result<AttentionWeights<P>, EngineError> {
        let qkv = self.matrix(layer, Projection::QKV, P::sliced_matrix)?;
        let qk_norm = match spec.qk_norm {
            None => None,
            Some(QkNormSpec { norm, scope: _ }) => Some(QkNormWeights {
                query: self.norm(norm, TensorRole::QueryNorm, Some(layer))?,
                key: self.norm(norm, TensorRole::KeyNorm, Some(layer))?,
            }),
        };
        Ok(AttentionWeights {
            qkv,
            qk_norm,
            output: self.matrix(layer, Projection::OUTPUT, P::sliced_matrix)?,
        })
    }

    fn gated_mlp(&mut self, layer: usize) -> Result<GatedMlpWeights<P>, EngineError> {
        let gate_up: LoadStack<P> = |pack, stack, bias, _| pack.gate_up(stack, bias);
        Ok(GatedMlpWeights {
            gate_up: self.matrix(layer, Projection::GATE_UP, gate_up)?,
            down: self.matrix(layer, Projection::DOWN, P::sliced_matrix)?,
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
        parts: &'static [Projection],
        pack: LoadStack<P>,
    ) -> Result<P::Matrix, EngineError> {
        let checkpoint = self.checkpoint;
        // All parts of a stack have a bias, or none.
        let spec = &checkpoint.spec().layers[layer];
        let has_bias = parts.iter().all(|part| spec.has_bias(*part));
        let stored = checkpoint.stack(parts, layer);
        let order = folding::row_order(checkpoint.spec(), layer, parts);
        let weights = folding::in_order(stored, order.as_deref());
        let biases = parts.iter().filter(|_| has_bias);
        let biases: Vec<_> = biases
            .map(|part| checkpoint.vector(TensorRole::Bias(*part), Some(layer)))
            .collect();
        let bias: Option<Vec<f32>> =
            has_bias.then(|| biases.iter().flat_map(|part| part.to_f32()).collect());
        let bias = bias.map(|bias| match &order {
            Some(order) => order.iter().map(|row| bias[*row]).collect(),
            None => bias,
        });
        let bias_bytes: usize = biases.iter().map(|part| part.bytes().len()).sum();
        let slices = inner_slices(checkpoint, layer, parts);
        let matrix = pack(self.pack, &weights, bias.as_deref(), &slices)?;
        self.matrix_bytes += self.pack.matrix_bytes(&weights, &slices);
        let stored: usize = weights.iter().map(StoredMatrix::stored_bytes).sum();
        self.advance(stored + bias_bytes);
        Ok(matrix)
    }

    fn norm(
        &mut self,
        norm: NormSpec,
        role: TensorRole,
        layer: Option<usize>,
    ) -> Result<P::Vector, EngineError> {
        let tensor = self.checkpoint.vector(role, layer);
        let mut weight = folding::norm_weight(norm, tensor.to_f32());
        if role == TensorRole::FinalNorm {
            folding::scale_logits(self.checkpoint.spec(), &mut weight);
        }
        let vector = self.pack.vector(&weight)?;
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
