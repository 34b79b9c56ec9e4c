//! The tensors of a model, by their roles and by the names that a family gives them.
//!
//! Owns: the shape of each role in a model.
//! Never: reads a file.
//! Invariant: the list of a model's tensors is complete: a tensor that is not on it is not loaded.

mod roles;

pub use roles::{ADAPTED_STACKS, ExpertAxes, Projection, StackedRows, TensorPlace, TensorRole};

use crate::spec::{
    AttentionSpec, ExpertsSpec, GatedMlpSpec, HeadShape, LayerSpec, Mixer, Mlp, ModelSpec, NormSpec,
};

/// A family's name of a role: a pattern, in which `{layer}` stands for the layer's number and
/// `{expert}` for the expert's.
pub type NamedRole = (&'static str, TensorRole);

/// A tensor that a model has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Role in the model.
    pub role: TensorRole,
    /// Part of the model that has it.
    pub place: TensorPlace,
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
const EXPERT: &str = "{expert}";

impl ModelSpec {
    /// Every tensor of the model, by the names of a family: those of no layer first, then layer by
    /// layer, in the order of `names`; where a name has one for each expert, in their order.
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
                place: TensorPlace::Model,
                shape: self.shape(role),
            })
            .collect();
        for index in 0..self.layers.len() {
            for named in &in_layers {
                self.list_tensors(index, *named, &mut list);
            }
        }
        list
    }

    /// Appends the tensors of a name that a layer has: none, one, or one for each expert.
    fn list_tensors(&self, index: usize, named: NamedRole, list: &mut Vec<ModelTensor>) {
        let (pattern, role) = named;
        let layer = &self.layers[index];
        let Some(shape) = layer.shape(role, self.hidden_size) else {
            return;
        };
        let pattern = pattern.replace(LAYER, &index.to_string());
        let tensor = |name: String, place| ModelTensor {
            name,
            role,
            place,
            shape: shape.clone(),
        };
        if !pattern.contains(EXPERT) {
            list.push(tensor(pattern, TensorPlace::Layer(index)));
            return;
        }
        list.extend((0..layer.experts_count()).map(|expert| {
            let place = TensorPlace::Expert {
                layer: index,
                expert,
            };
            tensor(pattern.replace(EXPERT, &expert.to_string()), place)
        }));
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
            | TensorRole::Experts { .. }
            | TensorRole::ExpertBiases { .. }
            | TensorRole::Router
            | TensorRole::RouterBias
            | TensorRole::ChoiceBias
            | TensorRole::SharedExpertGate
            | TensorRole::QueryNorm
            | TensorRole::KeyNorm
            | TensorRole::Sinks => {
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
            TensorRole::Sinks => attention.has_sinks.then(|| vec![query_heads]),
            TensorRole::Weight(projection) => {
                let size = self.projection(projection, hidden)?;
                Some(vec![size.rows, size.columns])
            }
            TensorRole::Stack(stack) => {
                let size = self.stack(stack, hidden)?;
                Some(vec![size.rows, size.columns])
            }
            TensorRole::Bias(projection) => {
                let size = self.projection(projection, hidden)?;
                size.has_bias.then(|| vec![size.rows])
            }
            TensorRole::Experts { .. }
            | TensorRole::ExpertBiases { .. }
            | TensorRole::Router
            | TensorRole::RouterBias
            | TensorRole::ChoiceBias
            | TensorRole::SharedExpertGate => self.experts_shape(role, hidden),
            TensorRole::Embedding | TensorRole::FinalNorm | TensorRole::Head => None,
        }
    }

    /// Shape of a role that a mixture of experts has; `None` if the layer has no such tensor.
    fn experts_shape(&self, role: TensorRole, hidden: usize) -> Option<Vec<usize>> {
        let experts = self.experts()?;
        let count = experts.count;
        match role {
            TensorRole::Experts { parts, axes, .. } => {
                let ProjectionSize { rows, columns, .. } = self.stack(parts, hidden)?;
                Some(match axes {
                    ExpertAxes::OutIn => vec![count, rows, columns],
                    ExpertAxes::InOut => vec![count, columns, rows],
                })
            }
            TensorRole::ExpertBiases { parts, .. } => {
                let size = self.stack(parts, hidden)?;
                size.has_bias.then(|| vec![count, size.rows])
            }
            TensorRole::Router => Some(vec![count, hidden]),
            TensorRole::RouterBias => experts.router.has_bias.then(|| vec![count]),
            TensorRole::ChoiceBias => experts.router.has_choice_bias.then(|| vec![count]),
            TensorRole::SharedExpertGate => {
                let has_gate = experts.shared.is_some_and(|shared| shared.has_gate);
                has_gate.then(|| vec![1, hidden])
            }
            _ => None,
        }
    }

    /// The mixture of experts, if the layer's MLP is one.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match &self.mlp {
            Mlp::Gated(_) => None,
            Mlp::Experts(experts) => Some(experts),
        }
    }

    fn experts_count(&self) -> usize {
        self.experts().map_or(0, |experts| experts.count)
    }

    /// Whether the layer's projections of this kind have a bias.
    pub fn has_bias(&self, projection: Projection) -> bool {
        let size = self.projection(projection, 0);
        size.is_some_and(|size| size.has_bias)
    }

    /// Rows of a projection's weight; 0 if the layer has no such projection.
    pub fn rows_of(&self, projection: Projection, hidden: usize) -> usize {
        self.projection(projection, hidden)
            .map_or(0, |size| size.rows)
    }

    /// Inner dimension of a projection, elements summed per result; `None` if the layer has no
    /// such projection.
    pub(crate) fn inner_width(&self, projection: Projection, hidden: usize) -> Option<usize> {
        self.projection(projection, hidden).map(|size| size.columns)
    }

    /// Rows and columns of a stack of projections, in a model of this hidden size; `None` if the
    /// layer has not all of them.
    pub fn stack_shape(&self, parts: &[Projection], hidden: usize) -> Option<(usize, usize)> {
        let ProjectionSize { rows, columns, .. } = self.stack(parts, hidden)?;
        Some((rows, columns))
    }

    /// A stack of projections as one: its rows are theirs.
    fn stack(&self, parts: &[Projection], hidden: usize) -> Option<ProjectionSize> {
        let first = self.projection(*parts.first()?, hidden)?;
        let rows = parts.iter().map(|part| self.projection(*part, hidden));
        let rows: Option<usize> = rows.map(|size| size.map(|size| size.rows)).sum();
        Some(ProjectionSize {
            rows: rows?,
            ..first
        })
    }

    fn projection(&self, projection: Projection, hidden: usize) -> Option<ProjectionSize> {
        let Mixer::Attention(AttentionSpec { heads, biases, .. }) = &self.mixer;
        let dense = match &self.mlp {
            Mlp::Gated(mlp) => Some(*mlp),
            Mlp::Experts(_) => None,
        };
        let expert = self.experts().map(|experts| experts.expert);
        let shared = self.experts().and_then(|experts| experts.shared);
        let shared = shared.map(|shared| shared.mlp);
        let to_width = |mlp: GatedMlpSpec| (mlp.width, hidden, mlp.bias);
        let from_width = |mlp: GatedMlpSpec| (hidden, mlp.width, mlp.bias);
        let (rows, columns, has_bias) = match projection {
            Projection::Query => (heads.query_width(), hidden, biases.qkv),
            Projection::Key | Projection::Value => (heads.kv_width(), hidden, biases.qkv),
            Projection::Output => (hidden, heads.query_width(), biases.output),
            Projection::Gate | Projection::Up => to_width(dense?),
            Projection::Down => from_width(dense?),
            Projection::ExpertGate | Projection::ExpertUp => to_width(expert?),
            Projection::ExpertDown => from_width(expert?),
            Projection::SharedGate | Projection::SharedUp => to_width(shared?),
            Projection::SharedDown => from_width(shared?),
        };
        Some(ProjectionSize {
            rows,
            columns,
            has_bias,
        })
    }

    /// Weights of the layer's projections, those of one expert where there are experts.
    pub(crate) fn projection_weights(&self, hidden: usize) -> LayerWeightCounts {
        let mut counts = LayerWeightCounts::default();
        for projection in self.stacks().into_iter().flatten() {
            let size = self.projection(*projection, hidden);
            let weights = size.map_or(0, |size| size.rows as u64 * size.columns as u64);
            if projection.is_of_expert() {
                counts.of_expert += weights;
            } else {
                counts.of_every_token += weights;
            }
        }
        counts
    }

    /// The layer's matrices in the order of computation, each a stack of projections that multiply
    /// the same input: the mixer's, then the MLP's. Every expert has those of
    /// [`Projection::is_of_expert`].
    pub fn stacks(&self) -> Vec<&'static [Projection]> {
        let Mixer::Attention(_) = &self.mixer;
        let mut stacks = vec![Projection::QKV, Projection::OUTPUT];
        match &self.mlp {
            Mlp::Gated(_) => stacks.extend([Projection::GATE_UP, Projection::DOWN]),
            Mlp::Experts(experts) => {
                stacks.extend([Projection::EXPERT_GATE_UP, Projection::EXPERT_DOWN]);
                if experts.shared.is_some() {
                    stacks.extend([Projection::SHARED_GATE_UP, Projection::SHARED_DOWN]);
                }
            }
        }
        stacks
    }

    /// The places in the model that have a stack of this layer: the layer, or each of its experts.
    pub fn places(
        &self,
        layer: usize,
        parts: &[Projection],
    ) -> impl Iterator<Item = TensorPlace> + use<> {
        let of_experts = parts.iter().any(|part| part.is_of_expert());
        let experts = if of_experts { self.experts_count() } else { 0 };
        let alone = (!of_experts).then_some(TensorPlace::Layer(layer));
        let each = (0..experts).map(move |expert| TensorPlace::Expert { layer, expert });
        alone.into_iter().chain(each)
    }
}

/// Weights of a layer's projections.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerWeightCounts {
    /// Weights that every token is multiplied with.
    pub(crate) of_every_token: u64,
    /// Weights of one expert.
    pub(crate) of_expert: u64,
}

/// Shape of a projection's weight, and whether it has a bias.
struct ProjectionSize {
    rows: usize,
    columns: usize,
    has_bias: bool,
}

#[cfg(test)]
mod tests;
