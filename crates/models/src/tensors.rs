//! Roles of a model's tensors, and the names that a family gives them.
//!
//! Owns: the shape of each role in a model.
//! Never: reads a file.
//! Invariant: the list of a model's tensors is complete: a tensor that is not on it is not loaded.

use crate::spec::{AttentionSpec, HeadShape, LayerSpec, Mixer, Mlp, ModelSpec, NormSpec};

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
    /// Norm of queries, `(head_dim)` or `(query_heads × head_dim)`.
    QueryNorm,
    /// Norm of keys, `(head_dim)` or `(kv_heads × head_dim)`.
    KeyNorm,
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
}

/// A family's name of a role: a pattern, in which `{layer}` stands for the layer's number.
pub type NamedRole = (&'static str, TensorRole);

/// A tensor that a model has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Role in the model.
    pub role: TensorRole,
    /// Layer; `None` if it belongs to no layer.
    pub layer: Option<usize>,
    /// Shape in the dense model.
    pub shape: Vec<usize>,
}

impl ModelTensor {
    /// Name of the projection or stack, without `.weight`, whose weight this is; `None` for any
    /// other tensor. Only a projection's weight may be quantised.
    pub fn projection_name(&self) -> Option<&str> {
        match self.role {
            TensorRole::Weight(_) | TensorRole::Stack(_) => self.name.strip_suffix(".weight"),
            _ => None,
        }
    }
}

const LAYER: &str = "{layer}";

impl ModelSpec {
    /// Every tensor of the model, by the names of a family: those of no layer first, then layer by
    /// layer, in the order of `names`.
    pub fn tensors(&self, names: &[&[NamedRole]], tied: bool) -> Vec<ModelTensor> {
        let names = names.iter().copied().flatten();
        let (in_layers, alone): (Vec<NamedRole>, Vec<NamedRole>) =
            names.partition(|(pattern, _)| pattern.contains(LAYER));
        let alone = alone
            .into_iter()
            .filter(|(_, role)| !(tied && *role == TensorRole::Head));
        let mut list: Vec<ModelTensor> = alone
            .map(|(name, role)| ModelTensor {
                name: name.to_owned(),
                role,
                layer: None,
                shape: self.shape(role),
            })
            .collect();
        for (index, layer) in self.layers.iter().enumerate() {
            let number = index.to_string();
            for (pattern, role) in &in_layers {
                if let Some(shape) = layer.shape(*role, self.hidden_size) {
                    list.push(ModelTensor {
                        name: pattern.replace(LAYER, &number),
                        role: *role,
                        layer: Some(index),
                        shape,
                    });
                }
            }
        }
        list
    }

    /// Shape of a role outside the layers.
    fn shape(&self, role: TensorRole) -> Vec<usize> {
        match role {
            TensorRole::Embedding | TensorRole::Head => vec![self.vocab_size, self.hidden_size],
            TensorRole::FinalNorm => vec![self.hidden_size],
            TensorRole::MixerInputNorm
            | TensorRole::MixerOutputNorm
            | TensorRole::MlpInputNorm
            | TensorRole::MlpOutputNorm
            | TensorRole::Weight(_)
            | TensorRole::Stack(_)
            | TensorRole::Bias(_)
            | TensorRole::QueryNorm
            | TensorRole::KeyNorm => {
                panic!("{role:?} belongs to a layer; its name needs `{LAYER}`")
            }
        }
    }
}

impl LayerSpec {
    /// Shape of a role in this layer; `None` if the layer has no such tensor.
    fn shape(&self, role: TensorRole, hidden: usize) -> Option<Vec<usize>> {
        let Mixer::Attention(attention) = &self.mixer;
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = attention.heads;
        let of_stream = |norm: Option<NormSpec>| norm.map(|_| vec![hidden]);
        let of_heads = |heads_count| {
            let norm = attention.qk_norm?;
            Some(vec![norm.scope.width(heads_count, head_dim)])
        };
        match role {
            TensorRole::MixerInputNorm => of_stream(self.norms.mixer_input),
            TensorRole::MixerOutputNorm => of_stream(self.norms.mixer_output),
            TensorRole::MlpInputNorm => of_stream(self.norms.mlp_input),
            TensorRole::MlpOutputNorm => of_stream(self.norms.mlp_output),
            TensorRole::QueryNorm => of_heads(query_heads),
            TensorRole::KeyNorm => of_heads(kv_heads),
            TensorRole::Weight(projection) => {
                let size = self.projection(projection, hidden);
                Some(vec![size.rows, size.columns])
            }
            TensorRole::Stack(stack) => {
                let sizes = stack.iter().map(|part| self.projection(*part, hidden));
                let columns = self.projection(*stack.first()?, hidden).columns;
                Some(vec![sizes.map(|size| size.rows).sum(), columns])
            }
            TensorRole::Bias(projection) => {
                let size = self.projection(projection, hidden);
                size.has_bias.then(|| vec![size.rows])
            }
            TensorRole::Embedding | TensorRole::FinalNorm | TensorRole::Head => None,
        }
    }

    /// Whether the layer's projections of this kind have a bias.
    pub fn has_bias(&self, projection: Projection) -> bool {
        self.projection(projection, 0).has_bias
    }

    /// Inner dimension of a projection: elements summed per result.
    pub(crate) fn inner_width(&self, projection: Projection, hidden: usize) -> usize {
        self.projection(projection, hidden).columns
    }

    fn projection(&self, projection: Projection, hidden: usize) -> ProjectionSize {
        let Mixer::Attention(AttentionSpec { heads, biases, .. }) = &self.mixer;
        let Mlp::Gated(mlp) = &self.mlp;
        let (rows, columns, has_bias) = match projection {
            Projection::Query => (heads.query_width(), hidden, biases.qkv),
            Projection::Key | Projection::Value => (heads.kv_width(), hidden, biases.qkv),
            Projection::Output => (hidden, heads.query_width(), biases.output),
            Projection::Gate | Projection::Up => (mlp.width, hidden, mlp.bias),
            Projection::Down => (hidden, mlp.width, mlp.bias),
        };
        ProjectionSize {
            rows,
            columns,
            has_bias,
        }
    }

    /// Weights of the layer's projections, each of which multiplies every token once.
    pub(crate) fn projection_weights(&self, hidden: usize) -> u64 {
        let projections = self.stacks().into_iter().flatten();
        let weights = projections.map(|projection| {
            let size = self.projection(*projection, hidden);
            size.rows as u64 * size.columns as u64
        });
        weights.sum()
    }

    /// The layer's matrices in the order of computation, each a stack of projections that multiply
    /// the same input: the mixer's, then the MLP's.
    pub fn stacks(&self) -> Vec<&'static [Projection]> {
        let Mixer::Attention(_) = &self.mixer;
        let Mlp::Gated(_) = &self.mlp;
        vec![
            Projection::QKV,
            Projection::OUTPUT,
            Projection::GATE_UP,
            Projection::DOWN,
        ]
    }
}

impl Projection {
    /// Queries, keys and values in one matrix.
    pub const QKV: &[Self] = &[Self::Query, Self::Key, Self::Value];
    /// The projection of attention's output, by itself.
    pub const OUTPUT: &[Self] = &[Self::Output];
    /// Gate and up projection in one matrix.
    pub const GATE_UP: &[Self] = &[Self::Gate, Self::Up];
    /// The down projection, by itself.
    pub const DOWN: &[Self] = &[Self::Down];
}

/// Shape of a projection's weight, and whether it has a bias.
struct ProjectionSize {
    rows: usize,
    columns: usize,
    has_bias: bool,
}
