//! Loading of a checkpoint's tensors, layer by layer.
//!
//! Owns: which tensors become one matrix, and the count of bytes.
//! Never: decides how a device stores a matrix.

use super::{
    AttentionWeights, ExpertsWeights, LayerNormWeights, LayerWeights, MatrixBytes, MixerWeights,
    MlpWeights, QkNormWeights, inner_slices,
};
use crate::EngineError;
use crate::folding;
use crate::ops::{GatedMatrices, InnerSlices, WeightLoader};
use cleave_checkpoint::{Checkpoint, CheckpointProgress, StoredBias, StoredMatrix};
use cleave_models::{
    AttentionSpec, ExpertsSpec, LayerNorms, Mixer, Mlp, NormSpec, Projection, QkNormSpec,
    TensorPlace, TensorRole,
};

/// Function that packs a stack, its bias and its slices into a matrix.
type LoadStack<P> = fn(
    &P,
    &[StoredMatrix],
    Option<&[f32]>,
    &InnerSlices,
) -> Result<<P as WeightLoader>::Matrix, EngineError>;

/// Loads a checkpoint's tensors in order, and counts bytes.
pub(super) struct CheckpointLoader<'a, P> {
    pack: &'a P,
    checkpoint: &'a Checkpoint,
    progress: &'a mut dyn FnMut(CheckpointProgress),
    /// Bytes on the device of the layers' matrices so far.
    matrix_bytes: MatrixBytes,
    bytes_done: u64,
    bytes_total: u64,
}

impl<'a, P: WeightLoader> CheckpointLoader<'a, P> {
    pub(super) fn new(
        pack: &'a P,
        checkpoint: &'a Checkpoint,
        progress: &'a mut dyn FnMut(CheckpointProgress),
    ) -> Self {
        Self {
            pack,
            checkpoint,
            progress,
            matrix_bytes: MatrixBytes::default(),
            bytes_done: 0,
            bytes_total: checkpoint.bytes_total(),
        }
    }

    /// Bytes of the layers' matrices so far.
    pub(super) fn matrix_bytes(&self) -> MatrixBytes {
        self.matrix_bytes
    }

    pub(super) fn layer(&mut self, layer: usize) -> Result<LayerWeights<P>, EngineError> {
        let checkpoint = self.checkpoint;
        let spec = &checkpoint.spec().layers[layer];
        Ok(LayerWeights {
            norms: self.layer_norms(&spec.norms, layer)?,
            mixer: match &spec.mixer {
                Mixer::Attention(spec) => MixerWeights::Attention(self.attention(spec, layer)?),
            },
            mlp: match &spec.mlp {
                Mlp::Gated(_) => {
                    let stacks = [Projection::GATE_UP, Projection::DOWN];
                    MlpWeights::Gated(self.gated_mlp(TensorPlace::Layer(layer), stacks)?)
                }
                Mlp::Experts(spec) => MlpWeights::Experts(self.experts(spec, layer)?),
            },
        })
    }

    fn layer_norms(
        &mut self,
        norms: &LayerNorms,
        layer: usize,
    ) -> Result<LayerNormWeights<P>, EngineError> {
        let mut load = |norm: &Option<NormSpec>, role| {
            let weight = norm.map(|norm| self.norm(norm, role, TensorPlace::Layer(layer)));
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
        let place = TensorPlace::Layer(layer);
        let qkv = self.matrix(place, Projection::QKV, P::sliced_matrix)?;
        let qk_norm = match spec.qk_norm {
            None => None,
            Some(QkNormSpec { norm, scope: _ }) => Some(QkNormWeights {
                query: self.norm(norm, TensorRole::QueryNorm, TensorPlace::Layer(layer))?,
                key: self.norm(norm, TensorRole::KeyNorm, TensorPlace::Layer(layer))?,
            }),
        };
        let sinks = spec
            .has_sinks
            .then(|| self.vector(TensorRole::Sinks, place));
        Ok(AttentionWeights {
            qkv,
            qk_norm,
            sinks: sinks.transpose()?,
            output: self.matrix(place, Projection::OUTPUT, P::sliced_matrix)?,
        })
    }

    fn gated_mlp(
        &mut self,
        place: TensorPlace,
        stacks: [&'static [Projection]; 2],
    ) -> Result<GatedMatrices<P::Matrix>, EngineError> {
        let gate_up: LoadStack<P> = |pack, stack, bias, _| pack.gate_up(stack, bias);
        Ok(GatedMatrices {
            gate_up: self.matrix(place, stacks[0], gate_up)?,
            down: self.matrix(place, stacks[1], P::sliced_matrix)?,
        })
    }

    fn experts(
        &mut self,
        spec: &ExpertsSpec,
        layer: usize,
    ) -> Result<ExpertsWeights<P>, EngineError> {
        let place = TensorPlace::Layer(layer);
        let router = self.router(spec, place)?;
        let has_bias = spec.router.has_choice_bias;
        let choice_bias = has_bias.then(|| self.vector(TensorRole::ChoiceBias, place));
        let each = (0..spec.count).map(|expert| TensorPlace::Expert { layer, expert });
        let stacks = [Projection::EXPERT_GATE_UP, Projection::EXPERT_DOWN];
        let experts = each
            .map(|place| self.gated_mlp(place, stacks))
            .collect::<Result<Vec<_>, _>>()?;
        self.pack.check_experts(&experts)?;
        let stacks = [Projection::SHARED_GATE_UP, Projection::SHARED_DOWN];
        let shared = spec.shared.map(|_| self.gated_mlp(place, stacks));
        Ok(ExpertsWeights {
            router,
            choice_bias: choice_bias.transpose()?,
            experts,
            shared: shared.transpose()?,
        })
    }

    /// The router with its bias; the gate of the shared expert is one more row.
    fn router(&mut self, spec: &ExpertsSpec, place: TensorPlace) -> Result<P::Matrix, EngineError> {
        let checkpoint = self.checkpoint;
        let mut roles = vec![TensorRole::Router];
        if spec.shared.is_some_and(|shared| shared.has_gate) {
            roles.push(TensorRole::SharedExpertGate);
        }
        let tensors = roles.iter().map(|role| checkpoint.vector(*role, place));
        let stack: Vec<StoredMatrix> = tensors.cloned().map(StoredMatrix::from).collect();
        let rows: usize = stack.iter().map(StoredMatrix::rows).sum();
        let mut stored: usize = stack.iter().map(StoredMatrix::stored_bytes).sum();
        let bias = spec.router.has_bias.then(|| {
            let tensor = checkpoint.vector(TensorRole::RouterBias, place);
            stored += tensor.bytes().len();
            let mut bias = tensor.to_f32();
            bias.resize(rows, 0.0);
            bias
        });
        let matrix = self.pack.exact_matrix(&stack, bias.as_deref())?;
        self.matrix_bytes.layers += (rows * stack[0].columns() * size_of::<f32>()) as u64;
        self.advance(stored);
        Ok(matrix)
    }

    pub(super) fn table(&mut self) -> Result<P::Table, EngineError> {
        let embedding = self.checkpoint.embedding();
        let table = self.pack.table(embedding)?;
        self.advance(embedding.bytes().len());
        Ok(table)
    }

    fn matrix(
        &mut self,
        place: TensorPlace,
        parts: &'static [Projection],
        pack: LoadStack<P>,
    ) -> Result<P::Matrix, EngineError> {
        let checkpoint = self.checkpoint;
        let layer = place.layer().expect("projections belong to a layer");
        // All parts of a stack have a bias, or none.
        let spec = &checkpoint.spec().layers[layer];
        let has_bias = parts.iter().all(|part| spec.has_bias(*part));
        let stored = checkpoint.stack(parts, place);
        let order = folding::row_order(checkpoint.spec(), layer, parts);
        let weights = folding::in_order(stored, order.as_deref());
        let StoredBias {
            values,
            stored_bytes: bias_bytes,
        } = if has_bias {
            checkpoint.bias(parts, place)
        } else {
            StoredBias::default()
        };
        let bias: Option<Vec<f32>> = has_bias.then(|| match &order {
            Some(order) => order.iter().map(|row| values[*row]).collect(),
            None => values,
        });
        let slices = inner_slices(checkpoint, parts, place);
        let matrix = pack(self.pack, &weights, bias.as_deref(), &slices)?;
        let bytes = self.pack.matrix_bytes(&weights, &slices);
        match place {
            TensorPlace::Expert { .. } => self.matrix_bytes.experts += bytes,
            TensorPlace::Layer(_) | TensorPlace::Model => self.matrix_bytes.layers += bytes,
        }
        let stored: usize = weights.iter().map(StoredMatrix::stored_bytes).sum();
        self.advance(stored + bias_bytes);
        Ok(matrix)
    }

    /// A vector as the checkpoint has it.
    fn vector(&mut self, role: TensorRole, place: TensorPlace) -> Result<P::Vector, EngineError> {
        let tensor = self.checkpoint.vector(role, place);
        let vector = self.pack.vector(&tensor.to_f32())?;
        self.advance(tensor.bytes().len());
        Ok(vector)
    }

    pub(super) fn norm(
        &mut self,
        norm: NormSpec,
        role: TensorRole,
        place: TensorPlace,
    ) -> Result<P::Vector, EngineError> {
        let tensor = self.checkpoint.vector(role, place);
        let mut weight = folding::norm_weight(norm, tensor.to_f32());
        if role == TensorRole::FinalNorm {
            folding::scale_logits(self.checkpoint.spec(), &mut weight);
        }
        let vector = self.pack.vector(&weight)?;
        self.advance(tensor.bytes().len());
        Ok(vector)
    }

    pub(super) fn advance(&mut self, bytes: usize) {
        self.bytes_done += bytes as u64;
        (self.progress)(CheckpointProgress {
            bytes_done: self.bytes_done,
            bytes_total: self.bytes_total,
        });
    }
}
