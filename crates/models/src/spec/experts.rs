//! Mixtures of experts: MLPs of which each token uses a few, chosen by a router.
//!
//! Owns: one description that covers the routers of every family. Never: routes.
//! Invariant: `1 <= chosen <= count`; groups divide the experts evenly, and the best groups have at
//! least `chosen` experts together.

use super::GatedMlpSpec;

/// A mixture of experts: the weighted outputs of the chosen experts, added in ascending order of
/// their indices, then the shared expert's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// Experts to choose from.
    pub count: usize,
    /// Experts that each token uses.
    pub chosen: usize,
    /// Every one of these experts.
    pub expert: GatedMlpSpec,
    /// Choice of experts and of their weights.
    pub router: RouterSpec,
    /// An expert that every token uses, if there is one.
    pub shared: Option<SharedExpertSpec>,
}

/// A router, computed in f32: `logits = W · x (+ bias)`, `s = score(logits)`. It chooses the
/// experts with the largest `s (+ choice bias)`, in the best groups only if there are groups; of
/// equal ones that of the lower index. Their weights come from `s` without the choice bias, as
/// [`ChosenWeights`] says, times `scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// Function from logits to scores.
    pub score: RouterScore,
    /// Whether the logits have a bias (gpt-oss).
    pub has_bias: bool,
    /// Whether a bias is added to the scores for the choice alone (DeepSeek V3).
    pub has_choice_bias: bool,
    /// Groups of experts of which the best are chosen first, if there are any.
    pub groups: Option<ExpertGroups>,
    /// Weights of the chosen experts.
    pub weights: ChosenWeights,
    /// Factor of the weights.
    pub scale: f32,
}

/// Functions from a router's logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// `1 / (1 + exp(−logit))` of each expert.
    Sigmoid,
    /// The logits themselves, of any sign.
    Identity,
}

/// Groups of neighbouring experts, as many in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups to choose from; divides the number of experts.
    pub count: usize,
    /// Groups whose experts may be chosen.
    pub chosen: usize,
    /// Score of a group.
    pub score: GroupScore,
}

/// Scores of a group, from those of its experts with the choice bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest (DeepSeek V2).
    Max,
    /// Sum of the two largest (DeepSeek V3); a group has at least two experts.
    TwoBestSum,
}

/// Weights of the chosen experts, from their scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChosenWeights {
    /// The scores as they are; their sum is not 1.
    Scores,
    /// The scores, divided by their sum plus epsilon.
    Normalized {
        /// Number added to the sum, 0 in most.
        epsilon: f32,
    },
    /// Softmax over the chosen scores.
    Softmax,
}

/// An expert that every token uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpertSpec {
    /// Sizes and activation, which may differ from those of the other experts.
    pub mlp: GatedMlpSpec,
    /// Whether its output is multiplied by the sigmoid of a projection to one number (Qwen2-MoE).
    pub has_gate: bool,
}
