//! The description of a model that engines run and planners price.
//!
//! Owns: the kinds of layers there are. Adding one is a new variant here; the compiler then names
//! every place that must know it.
//! Never: tests for a family; knows no file and no device.
//! Invariant: plain data; equal specs with equal weights give equal answers.

mod experts;

pub use experts::{
    ChosenWeights, ExpertGroups, ExpertsSpec, GroupScore, RouterScore, RouterSpec, SharedExpertSpec,
};

use crate::rope::Rope;
use cleave_domain::{KvSpec, PlaneLayout, TokenId, WindowLayout};

/// A model: what each layer computes, and the scalars between them.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Name of the family, config.json's `model_type`.
    pub family: &'static str,
    /// Rows of the embedding and of the head; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Longest context that the model was trained for, in tokens.
    pub context_tokens_max: usize,
    /// Factors between the parts.
    pub scalars: Scalars,
    /// Rotary embeddings, which attention layers name by index.
    pub ropes: Vec<Rope>,
    /// Layers in the order of computation; at least one.
    pub layers: Vec<LayerSpec>,
    /// Norm between the last layer and the head.
    pub final_norm: NormSpec,
    /// Whether the head shares the embedding's weights; `None` if config.json does not say, and the
    /// head is shared unless it has a tensor of its own.
    pub tied: Option<bool>,
    /// The token that begins a text.
    pub bos: Option<TokenId>,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
}

/// One layer: a mixer and an MLP, each of which adds to the residual stream, see [`LayerNorms`].
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Stream that the MLP reads.
    pub order: PartOrder,
    /// Norms of the layer's two parts.
    pub norms: LayerNorms,
    /// Part that mixes tokens of a sequence.
    pub mixer: Mixer,
    /// Part that computes on each token alone.
    pub mlp: Mlp,
}

/// Order of a layer's two parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PartOrder {
    /// The MLP reads the stream with the mixer's output.
    #[default]
    Sequential,
    /// Both parts read the layer's input under one norm, that of the mixer's input (Cohere).
    Parallel,
}

/// Norms around a layer's parts: `x += output_norm(part(input_norm(x)))`, those that there are. A
/// part without a norm of its input reads the residual stream itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorms {
    /// Norm of the mixer's input.
    pub mixer_input: Option<NormSpec>,
    /// Norm of the mixer's output.
    pub mixer_output: Option<NormSpec>,
    /// Norm of the MLP's input.
    pub mlp_input: Option<NormSpec>,
    /// Norm of the MLP's output.
    pub mlp_output: Option<NormSpec>,
}

/// A norm of a row of elements, without a bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Formula of the norm.
    pub formula: NormFormula,
    /// Epsilon, added to the mean of squares.
    pub epsilon: f32,
    /// Weight of which a checkpoint has the stored numbers.
    pub weight: NormWeight,
}

/// Statistics of a row that a norm divides by, or subtracts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormFormula {
    /// `x[i] · weight[i] / sqrt(mean(x²) + epsilon)` (Zhang and Sennrich 2019).
    #[default]
    RmsNorm,
    /// The same of `x − mean(x)` (Ba et al. 2016; Cohere).
    LayerNorm,
}

/// How a norm's weight is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormWeight {
    /// The stored numbers are the weight.
    #[default]
    AsStored,
    /// The weight is one more than the stored numbers (Gemma).
    PlusOne,
}

/// Kinds of mixers, the parts that mix tokens of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Attention with keys and values in the KV pool.
    Attention(AttentionSpec),
}

/// Grouped-query attention (Ainslie et al. 2023).
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Heads and their width.
    pub heads: HeadShape,
    /// Rotary embedding of queries and keys.
    pub rope: RopeIndex,
    /// Norm of queries and keys before rotation, if there is one.
    pub qk_norm: Option<QkNormSpec>,
    /// Sliding window in tokens, the token itself included; `None` attends to everything.
    pub window: Option<usize>,
    /// Factor of the scores before the softmax.
    pub scale: f32,
    /// Cap of the scores after their factor, `cap · tanh(score / cap)` (Gemma 2); positive.
    pub soft_cap: Option<f32>,
    /// Projections that have a bias.
    pub biases: AttentionBiases,
    /// Whether each query head has a sink: one more logit in its softmax, without a value
    /// (gpt-oss).
    pub has_sinks: bool,
}

/// Norm of queries and of keys, which have a weight each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormSpec {
    /// Formula of the norm.
    pub norm: NormSpec,
    /// Elements that are normalised together.
    pub scope: QkNormScope,
}

/// Elements that one norm of queries or keys covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormScope {
    /// One head; every head has the same weight, `(head_dim)` (Qwen3).
    Head,
    /// All heads side by side, as the projection gives them, `(heads × head_dim)` (OLMo 2).
    Projection,
}

impl QkNormScope {
    /// Width of the weight for `heads_count` heads.
    pub const fn width(self, heads_count: usize, head_dim: usize) -> usize {
        match self {
            Self::Head => head_dim,
            Self::Projection => heads_count * head_dim,
        }
    }
}

/// Index of a rotary embedding in [`ModelSpec::ropes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeIndex(pub usize);

/// Projections of attention that have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionBiases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The projection of attention's output.
    pub output: bool,
}

/// The shape of attention's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads; a multiple of `kv_heads`. Query head `h` reads KV head
    /// `h / (query_heads / kv_heads)`.
    pub query_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements per head, even.
    pub head_dim: usize,
}

impl HeadShape {
    /// Width of all query heads side by side; also of attention's output.
    pub const fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Width of all key heads side by side; the same for values.
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of a row of queries, keys and values: `q | k | v`, heads in order within each.
    pub const fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }
}

/// Kinds of MLPs, the parts that compute on each token alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Mlp {
    /// `down · (act(gate · x) ∘ (up · x))` (Shazeer 2020).
    Gated(GatedMlpSpec),
    /// A mixture of such MLPs.
    Experts(ExpertsSpec),
}

/// Sizes and activation of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedMlpSpec {
    /// Width of the gate and up projections.
    pub width: usize,
    /// Activation of the gate.
    pub activation: Activation,
    /// Whether gate, up and down have a bias.
    pub bias: bool,
}

/// Activations of a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x / (1 + exp(−x))`, also called swish.
    Silu,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))`, the approximation of GELU.
    GeluTanh,
    /// `x / (1 + exp(−1.702 · x))` of a gate of at most `limit`, times one more than the factor,
    /// which is cut to `±limit` (gpt-oss).
    ClampedSwiGlu {
        /// Limit of the gate and of its factor; positive.
        limit: f32,
    },
}

/// Factors between the parts of a model; 1 in most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scalars {
    /// Factor of the embedding's rows.
    pub embedding: f32,
    /// Whether the embedding's factor is first rounded to the type that weights are computed in
    /// (Gemma).
    pub is_embedding_rounded: bool,
    /// Factor of each part's output before it is added to the residual stream.
    pub residual: f32,
    /// Factor of the logits.
    pub logits: f32,
    /// Cap of the logits after their factor, `cap · tanh(logit / cap)` (Gemma 2); positive.
    pub logits_cap: Option<f32>,
}

impl Default for Scalars {
    fn default() -> Self {
        Self {
            embedding: 1.0,
            is_embedding_rounded: false,
            residual: 1.0,
            logits: 1.0,
            logits_cap: None,
        }
    }
}

/// Part of a model that a device cannot compute, found before any weight is loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this {family} model cannot run on this device: {problem}")]
pub struct Unsupported {
    /// Family of the model.
    pub family: &'static str,
    /// The part, its value, and the values that the device supports.
    pub problem: String,
}

impl ModelSpec {
    /// Attention layers, in order.
    pub fn attention(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.layers.iter().map(|layer| match &layer.mixer {
            Mixer::Attention(attention) => attention,
        })
    }

    /// The heads, if every layer has the same: the only case in which a block of the KV pool is the
    /// same for every layer.
    pub fn uniform_heads(&self) -> Option<HeadShape> {
        let mut shapes = self.attention().map(|attention| attention.heads);
        let first = shapes.next()?;
        shapes.all(|heads| heads == first).then_some(first)
    }

    /// The KV memory that the model needs with blocks of `block_tokens` tokens and this number
    /// format: bytes of a key's or a value's element, and of the scale of a token's key or value in
    /// a head, or 0. All layers are in the plane of blocks. [`KvSpec::check`] says whether it is
    /// possible.
    pub fn kv_spec(&self, block_tokens: u32, element_bytes: u64, scale_bytes: u64) -> KvSpec {
        let head_bytes = |heads: HeadShape| heads.head_dim as u64 * element_bytes + scale_bytes;
        let token_bytes = |heads: HeadShape| 2 * heads.kv_heads as u64 * head_bytes(heads);
        let layers = (0..).zip(&self.layers).map(|(index, layer)| {
            let Mixer::Attention(AttentionSpec { heads, .. }) = &layer.mixer;
            (index, token_bytes(*heads) * u64::from(block_tokens))
        });
        KvSpec {
            block_tokens,
            blocks: PlaneLayout::packed(layers),
            state: None,
            window: None,
        }
    }

    /// The same, with layers whose window is shorter than a context of `context_tokens` in the
    /// window plane. A window shorter than a block counts as none: kernels read a whole block's
    /// tokens, masked ones too, so the first that they read must be full. One layer stays in the
    /// plane of blocks, the last if all have such windows: every prefix then has blocks.
    pub fn kv_spec_with_window(&self, whole: KvSpec, context_tokens: usize) -> KvSpec {
        let window_of = |index: u32| {
            let Mixer::Attention(attention) = &self.layers[index as usize].mixer;
            let lengths = whole.block_tokens as usize..context_tokens;
            attention.window.filter(|window| lengths.contains(window))
        };
        let layers = &whole.blocks.layers;
        let is_whole = |layer: u32| window_of(layer).is_none();
        let kept = layers.iter().rev().find(|span| is_whole(span.layer));
        let kept = kept.or(layers.last()).map(|span| span.layer);
        let stays = |layer: u32| is_whole(layer) || Some(layer) == kept;
        let windows = layers.iter().filter(|span| !stays(span.layer));
        let tokens = windows.clone().filter_map(|span| window_of(span.layer));
        let Some(tokens) = tokens.max() else {
            return whole;
        };
        let packed = |is_in: &dyn Fn(u32) -> bool| {
            let spans = layers.iter().filter(|span| is_in(span.layer));
            PlaneLayout::packed(spans.map(|span| (span.layer, span.bytes)))
        };
        KvSpec {
            block_tokens: whole.block_tokens,
            blocks: packed(&stays),
            window: Some(WindowLayout {
                tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
                layout: packed(&|layer| !stays(layer)),
            }),
            state: whole.state,
        }
    }

    /// Widths of the activations, each the widest of all layers.
    pub fn widths_max(&self) -> LayerWidths {
        let widths = self.layers.iter().map(LayerSpec::widths);
        widths.fold(LayerWidths::default(), LayerWidths::max)
    }
}

/// Widths of a layer's activations in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerWidths {
    /// Queries, keys and values side by side.
    pub qkv: usize,
    /// Attention's output, before its projection.
    pub attention_out: usize,
    /// The product of gate and up projection.
    pub gated: usize,
}

impl LayerWidths {
    fn max(self, other: Self) -> Self {
        Self {
            qkv: self.qkv.max(other.qkv),
            attention_out: self.attention_out.max(other.attention_out),
            gated: self.gated.max(other.gated),
        }
    }
}

impl LayerSpec {
    fn widths(&self) -> LayerWidths {
        let Mixer::Attention(AttentionSpec { heads, .. }) = &self.mixer;
        LayerWidths {
            qkv: heads.qkv_width(),
            attention_out: heads.query_width(),
            gated: match &self.mlp {
                Mlp::Gated(mlp) => mlp.width,
                // A mixture's rows go to several experts; the device keeps what is between.
                Mlp::Experts(_) => 0,
            },
        }
    }
}
