//! A model's weights on a device.
//!
//! Owns: the loading of tensors, stacked into matrices.
//! Never: computes with them.
//! Invariant: weights are immutable once loaded; several engines of one process share them.

mod loader;

use crate::EngineError;
use crate::folding;
use crate::ops::{
    DenseStack, Experts, GatedMatrices, Head, InnerSlices, KvType, LoadPlan, Precision,
    RotaryTable, WeightLoader,
};
use crate::rotary::{self, RotaryValues};
use cleave_checkpoint::{Checkpoint, CheckpointProgress, QuantizedType, Revision, StoredMatrix};
use cleave_domain::KvSpec;
use cleave_models::{ExpertsSpec, ModelSpec, Projection, TensorPlace, TensorRole, Unsupported};
use loader::CheckpointLoader;
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
    matrix_bytes: MatrixBytes,
    pub(crate) table: P::Table,
    pub(crate) layers: Vec<LayerWeights<P>>,
    pub(crate) norm: P::Vector,
    /// The factor of logits, which is in `norm`: hidden states come out of it this much larger.
    pub(crate) norm_factor: f32,
    pub(crate) head: P::Matrix,
    /// Rotary tables, as [`ModelSpec::ropes`].
    pub(crate) rotary: Vec<P::Rotary>,
}

/// Bytes of a model's matrices on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatrixBytes {
    /// Matrices of all layers, but for experts', each read once a step.
    pub layers: u64,
    /// All experts of all layers but shared ones, each read if a token of the step chooses it.
    pub experts: u64,
    /// The head, read in each step that draws.
    pub head: u64,
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
    /// One more score of each query head, `(query_heads)`.
    pub(crate) sinks: Option<P::Vector>,
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
    Gated(GatedMatrices<P::Matrix>),
    Experts(ExpertsWeights<P>),
}

/// Weights of a mixture of experts, as [`Experts`] describes them.
pub(crate) struct ExpertsWeights<P: WeightLoader> {
    pub(crate) router: P::Matrix,
    pub(crate) choice_bias: Option<P::Vector>,
    pub(crate) experts: Vec<GatedMatrices<P::Matrix>>,
    pub(crate) shared: Option<GatedMatrices<P::Matrix>>,
}

impl<P: WeightLoader> ExpertsWeights<P> {
    /// The mixture of this description, as an operation takes it.
    pub(crate) fn experts<'a>(&'a self, spec: &'a ExpertsSpec) -> Experts<'a, P> {
        Experts {
            spec,
            router: &self.router,
            choice_bias: self.choice_bias.as_ref(),
            experts: &self.experts,
            shared: self.shared.as_ref(),
        }
    }
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
        let mut loader = CheckpointLoader::new(pack, checkpoint, progress);
        let table = loader.table()?;
        let layers = (0..spec.layers.len())
            .map(|layer| loader.layer(layer))
            .collect::<Result<_, _>>()?;
        let norm = loader.norm(spec.final_norm, TensorRole::FinalNorm, TensorPlace::Model)?;
        let head = pack.head(checkpoint.head())?;
        loader.advance(checkpoint.head().bytes().len());
        let matrix_bytes = MatrixBytes {
            head: pack.head_bytes(checkpoint.head()),
            ..loader.matrix_bytes()
        };
        pack.finish()?;
        Ok(Self {
            matrix_bytes,
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

    /// Bytes of its matrices.
    pub fn matrix_bytes(&self) -> MatrixBytes {
        self.matrix_bytes
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

    /// The same, with layers whose window is shorter than the context in the window plane.
    pub fn kv_spec_with_window(&self, block_tokens: u32, kv: KvType) -> KvSpec {
        let whole = self.kv_spec(block_tokens, kv);
        self.spec
            .kv_spec_with_window(whole, self.context_tokens_max)
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

/// Sizes of all weights. Every tensor is loaded once; routers are kept in f32, as vectors are.
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
    for (role, tensor) in checkpoint.tensors_by_role() {
        let elements = (tensor.rows() * tensor.columns()) as u64;
        match role {
            TensorRole::Embedding | TensorRole::Head => plan.matrix_elements += elements,
            TensorRole::Weight(_) | TensorRole::Stack(_) | TensorRole::Experts { .. } => {}
            _ => plan.vector_elements += elements,
        }
        plan.tensors_count += 1;
    }
    let model = checkpoint.spec();
    for (layer, spec) in model.layers.iter().enumerate() {
        let stacks = spec.stacks().into_iter();
        let each = |parts| spec.places(layer, parts).map(move |place| (parts, place));
        for (parts, place) in stacks.flat_map(each) {
            // One tensor may have the stacks, or the biases, of all experts of a layer.
            plan.tensors_count += 2;
            let slices = inner_slices(checkpoint, parts, place);
            if checkpoint.is_quantized(parts, place) {
                let stack = checkpoint.stack(parts, place);
                plan.quantized.push((stack, slices));
            } else {
                let shape = spec.stack_shape(parts, model.hidden_size);
                let (rows, _) = shape.expect("a layer has the projections of its stacks");
                plan.dense.push(DenseStack { rows, slices });
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
    parts: &'static [Projection],
    place: TensorPlace,
) -> InnerSlices {
    let layer = place.layer().expect("projections belong to a layer");
    let stack = if checkpoint.is_quantized(parts, place) {
        checkpoint.stack(parts, place)
    } else {
        Vec::new()
    };
    let groups = stack.iter().map(group_columns);
    let groups: Vec<usize> = if stack.is_empty() {
        vec![1]
    } else {
        groups.collect()
    };
    let (groups, spec) = (&groups, checkpoint.spec());
    let slices = parts.iter().flat_map(|part| {
        let of_group = |group: &usize| spec.inner_slices(layer, *part, *group);
        groups.iter().map(of_group)
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
        |parts: &'static [Projection], place| inner_slices(checkpoint, parts, place).count();
    let layers = checkpoint.spec().layers.iter().enumerate();
    let downs = layers.flat_map(|(layer, spec)| {
        let output = count(Projection::OUTPUT, TensorPlace::Layer(layer));
        let stacks = spec.stacks().into_iter();
        let downs = stacks.filter_map(|parts| down_letter(parts).map(|letter| (letter, parts)));
        downs.flat_map(move |(letter, parts)| {
            let places = spec.places(layer, parts);
            places.map(move |place| format!("o{output}{letter}{}", count(parts, place)))
        })
    });
    let names: BTreeSet<String> = downs.collect();
    names.into_iter().collect::<Vec<_>>().join("+")
}

/// Letter of a down projection in the fingerprint: the dense MLP's, an expert's, or the shared
/// expert's; `None` for other stacks.
fn down_letter(parts: &[Projection]) -> Option<char> {
    match parts {
        Projection::DOWN => Some('d'),
        Projection::EXPERT_DOWN => Some('e'),
        Projection::SHARED_DOWN => Some('s'),
        _ => None,
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
