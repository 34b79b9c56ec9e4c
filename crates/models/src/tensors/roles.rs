//! Roles of tensors in a model, and the places that have one of each.
//!
//! Owns: the kinds of tensors. Never: knows a size.
//! Invariant: a role and a place name at most one tensor of a model.

/// Part that a tensor plays in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorRole {
    /// Embedding of every token, `(vocab, hidden)`.
    Embedding,
    /// Norm before the head, `(hidden)`.
    FinalNorm,
    /// Head, `(vocab, hidden)`; absent or ignored if it is tied to the embedding.
    Head,
    /// Norm of the mixer's input, `(hidden)`.
    MixerInputNorm,
    /// Norm of the mixer's output, `(hidden)`.
    MixerOutputNorm,
    /// Norm of the MLP's input, `(hidden)`.
    MlpInputNorm,
    /// Norm of the MLP's output, `(hidden)`.
    MlpOutputNorm,
    /// Weight of a projection, `(out, in)`; may be quantised.
    Weight(Projection),
    /// Weights of the projections of a stack in one tensor, in the order of the stack, `(out, in)`;
    /// may be quantised.
    Stack(&'static [Projection]),
    /// Bias of a projection, `(out)`.
    Bias(Projection),
    /// Weights of a stack of projections of all experts of a layer, `(experts, out, in)` or
    /// Rows are inputs: `(experts, in, out)`.
    Experts {
        /// Projections of each expert.
        parts: &'static [Projection],
        /// Order of the last two axes.
        axes: ExpertAxes,
        /// Order of the projections' rows.
        rows: StackedRows,
    },
    /// Biases of a stack of projections of all experts of a layer, `(experts, out)`.
    ExpertBiases {
        /// Projections of each expert.
        parts: &'static [Projection],
        /// Order of the projections' elements.
        rows: StackedRows,
    },
    /// Router of a mixture of experts, `(experts, hidden)`; never quantised.
    Router,
    /// Bias of the router's logits, `(experts)`.
    RouterBias,
    /// Bias of the router's scores for the choice of experts alone, `(experts)`.
    ChoiceBias,
    /// Projection whose sigmoid multiplies the shared expert's output, `(1, hidden)`; never
    /// quantised.
    SharedExpertGate,
    /// Norm of queries, `(head_dim)` or `(query_heads × head_dim)`.
    QueryNorm,
    /// Norm of keys, `(head_dim)` or `(kv_heads × head_dim)`.
    KeyNorm,
    /// Sinks of attention, `(query_heads)`.
    Sinks,
}

/// Order of the axes of one expert's weights in a tensor of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExpertAxes {
    /// Rows are outputs: `(experts, out, in)`.
    OutIn,
    /// Rows of an expert are its inputs: `(experts, in, out)`.
    InOut,
}

/// Order of the rows of stacked projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StackedRows {
    /// All rows of the first projection, then those of the next.
    Consecutive,
    /// The first row of every projection, then the second of each: of gate and up, even rows are
    /// the gate's.
    Interleaved,
}

/// Projections of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Projection {
    /// Residual stream to queries.
    Query,
    /// Residual stream to keys.
    Key,
    /// Residual stream to values.
    Value,
    /// Attention's output to the residual stream.
    Output,
    /// Residual stream to the MLP's gate.
    Gate,
    /// Residual stream to the factor of the gate.
    Up,
    /// Gated product to the residual stream.
    Down,
    /// [`Projection::Gate`] of an expert.
    ExpertGate,
    /// [`Projection::Up`] of an expert.
    ExpertUp,
    /// [`Projection::Down`] of an expert.
    ExpertDown,
    /// [`Projection::Gate`] of the shared expert.
    SharedGate,
    /// [`Projection::Up`] of the shared expert.
    SharedUp,
    /// [`Projection::Down`] of the shared expert.
    SharedDown,
}

/// The stacks of projections whose product a LoRA adapter may change.
pub const ADAPTED_STACKS: [&[Projection]; 4] = [
    Projection::QKV,
    Projection::OUTPUT,
    Projection::GATE_UP,
    Projection::DOWN,
];

impl Projection {
    /// Queries, keys and values in one matrix.
    pub const QKV: &[Self] = &[Self::Query, Self::Key, Self::Value];
    /// The projection of attention's output, by itself.
    pub const OUTPUT: &[Self] = &[Self::Output];
    /// Gate and up projection in one matrix.
    pub const GATE_UP: &[Self] = &[Self::Gate, Self::Up];
    /// The down projection, by itself.
    pub const DOWN: &[Self] = &[Self::Down];
    /// An expert's gate and up projection in one matrix.
    pub const EXPERT_GATE_UP: &[Self] = &[Self::ExpertGate, Self::ExpertUp];
    /// An expert's down projection, by itself.
    pub const EXPERT_DOWN: &[Self] = &[Self::ExpertDown];
    /// The shared expert's gate and up projection in one matrix.
    pub const SHARED_GATE_UP: &[Self] = &[Self::SharedGate, Self::SharedUp];
    /// The shared expert's down projection, by itself.
    pub const SHARED_DOWN: &[Self] = &[Self::SharedDown];

    /// Whether every expert of a layer has such a projection.
    pub const fn is_of_expert(self) -> bool {
        matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertDown)
    }
}

/// Part of a model that has one tensor of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorPlace {
    /// The model, outside its layers.
    Model,
    /// A layer, outside its experts.
    Layer(usize),
    /// An expert of a layer.
    Expert {
        /// Number of the layer.
        layer: usize,
        /// Number of the expert in its layer.
        expert: usize,
    },
}

impl TensorPlace {
    /// The layer, if the place is one or is within one.
    pub const fn layer(self) -> Option<usize> {
        match self {
            Self::Model => None,
            Self::Layer(layer) | Self::Expert { layer, .. } => Some(layer),
        }
    }
}
