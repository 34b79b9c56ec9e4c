//! Parameters of operations: rotary tables, norms, attention, experts.
//!
//! Owns: these types. Never: computes.

use super::WeightLoader;
use cleave_models::{ExpertsSpec, NormFormula};

/// Cosines and sines of the rotary embedding, for every position of the context.
///
/// Pairs are `(i, i + half)`: `x[i] ← x[i]·cos[i] − x[i+half]·sin[i]`,
/// `x[i+half] ← x[i+half]·cos[i] + x[i]·sin[i]`. Elements of a head from `2 · half` on stay.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTable<'a> {
    /// `(positions, half)`, scaled by the model's attention factor, if it has one.
    pub cos: &'a [f32],
    /// Sines, shaped and scaled as `cos`.
    pub sin: &'a [f32],
    /// Pairs per head, at most `head_dim / 2`; 0 if nothing is rotated.
    pub half: usize,
    /// Factors of rotated queries by position, `(positions)`; empty if they are 1.
    pub query_factors: &'a [f32],
}

/// Normalisation of a row `x`.
#[derive(Debug)]
pub struct Norm<'a, V> {
    /// Root mean square, or LayerNorm.
    pub formula: NormFormula,
    /// Shape: `(width)`, one weight per element.
    pub weight: &'a V,
    /// Epsilon, added to the mean of squares.
    pub epsilon: f32,
}

/// Root-mean-square normalisation of queries and keys, before rotation. As many elements are
/// normalised together as the weight has: those of a head, or those of all heads.
#[derive(Debug)]
pub struct QkNorms<'a, V> {
    /// `(head_dim)`, the same for every query head, or `(query_heads × head_dim)`.
    pub query: &'a V,
    /// `(head_dim)`, the same for every key head, or `(kv_heads × head_dim)`.
    pub key: &'a V,
    /// Epsilon, added to the mean of squares.
    pub epsilon: f32,
}

/// Parameters of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Layer of the pool.
    pub layer: usize,
    /// Multiplies the scores before the softmax, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Cap of the scores after `scale`: `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Sliding window: position `p` attends to `p - window + 1 ..= p` (positions that exist), with
    /// `None` to `0 ..= p`.
    pub window: Option<usize>,
}

/// The head, which computes logits.
#[derive(Debug)]
pub struct Head<'a, M> {
    /// Embedding of every token as a product has it, `(vocab, in)`.
    pub matrix: &'a M,
    /// Cap of the logits: `cap · tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
}

impl<'a, M> Head<'a, M> {
    /// A head whose logits have no cap.
    pub const fn uncapped(matrix: &'a M) -> Self {
        Self {
            matrix,
            soft_cap: None,
        }
    }
}

impl<M> Clone for Head<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Head<'_, M> {}

/// Matrices of a gated MLP.
#[derive(Debug)]
pub struct GatedMatrices<M> {
    /// `(gate | up, hidden)`, of [`WeightLoader::gate_up`].
    pub gate_up: M,
    /// Down projection, `(hidden, width)`, of [`WeightLoader::sliced_matrix`].
    pub down: M,
}

/// A layer's mixture of experts.
#[derive(Debug)]
pub struct Experts<'a, P: WeightLoader> {
    /// Description, which has the router's formula.
    pub spec: &'a ExpertsSpec,
    /// Router, `(experts, hidden)`, of [`WeightLoader::exact_matrix`], with its bias if there is
    /// one. If the shared expert has a gate, that is one more row.
    pub router: &'a P::Matrix,
    /// Bias of the scores for the choice of experts alone, `(experts)`.
    pub choice_bias: Option<&'a P::Vector>,
    /// Every expert, in order.
    pub experts: &'a [GatedMatrices<P::Matrix>],
    /// The expert that every row uses, if there is one.
    pub shared: Option<&'a GatedMatrices<P::Matrix>>,
}
