//! The interpreter of a model's description, written once over [`Ops`].
//!
//! Owns: the activation buffers and the order of operations, which the kinds of each layer's parts
//! decide.
//! Never: samples, checks a plan, or allocates between layers.
//! Invariant: a row's result depends only on its own row and its sequence's KV, because this holds
//! for every operation (see [`crate::ops`]) and rows go through operations only.

use crate::EngineError;
use crate::adapters::StepAdapters;
use crate::ops;
use crate::ops::{
    Attention, AttentionIo, Batch, BufferRole, DrawRule, GatedIo, Norm, NormIo, Ops, PoolLayer,
    QkNorms,
};
use crate::weights::{AttentionWeights, MixerWeights, MlpWeights, Weights};
use cleave_models::{AttentionSpec, LayerSpec, Mixer, Mlp, NormSpec, PartOrder, Projection};

/// Activations of one pass, `(rows_max, width)` each.
pub(crate) struct ActivationBuffers<O: Ops> {
    residual: O::Rows,
    normed: O::Rows,
    qkv: O::Rows,
    attention_out: O::Rows,
    /// Output of attention or of the MLP. The next norm adds it to the residual, unless a norm of
    /// the output itself did, see [`ForwardPass::add_output`].
    delta: O::Rows,
    gate_up: O::Rows,
    gated: O::Rows,
    /// Rows whose logits are needed: the last layer computes everything after attention for them
    /// only.
    residual_selected: O::Rows,
    attended_selected: O::Rows,
    /// Input of the head, `(logit_rows_max, hidden)`.
    head_input: O::Rows,
    /// Scratch memory for gather's indices.
    indices: Vec<u32>,
}

/// One forward pass: the weights and buffers that it uses, and the pool that gets its KV.
pub(crate) struct ForwardPass<'a, O: Ops> {
    pub(crate) ops: &'a mut O,
    pub(crate) weights: &'a Weights<O::Pack>,
    pub(crate) pool: &'a mut O::Pool,
    pub(crate) buffers: &'a mut ActivationBuffers<O>,
    /// Adapters of the pass, by their rows.
    pub(crate) adapters: &'a mut StepAdapters<ops::AdapterOf<O>>,
}

impl<O: Ops> ActivationBuffers<O> {
    pub(crate) fn new(
        ops: &O,
        weights: &Weights<O::Pack>,
        rows_max: usize,
        logit_rows_max: usize,
    ) -> Result<Self, EngineError> {
        let (hidden, widths) = (weights.spec.hidden_size, weights.spec.widths_max());
        Ok(Self {
            residual: ops.rows(rows_max, hidden, BufferRole::Residual)?,
            normed: ops.rows(rows_max, hidden, BufferRole::Activations)?,
            qkv: ops.rows(rows_max, widths.qkv, BufferRole::Activations)?,
            attention_out: ops.rows(rows_max, widths.attention_out, BufferRole::Activations)?,
            delta: ops.rows(rows_max, hidden, BufferRole::Activations)?,
            gate_up: ops.rows(rows_max, 2 * widths.gated, BufferRole::Activations)?,
            gated: ops.rows(rows_max, widths.gated, BufferRole::Activations)?,
            residual_selected: ops.rows(rows_max, hidden, BufferRole::Residual)?,
            attended_selected: ops.rows(rows_max, widths.attention_out, BufferRole::Activations)?,
            head_input: ops.rows(logit_rows_max, hidden, BufferRole::Activations)?,
            indices: Vec::with_capacity(logit_rows_max),
        })
    }

    /// The final norm of the wanted rows, `(rows, hidden)`, after [`ForwardPass::run`].
    pub(crate) fn final_rows(&self) -> &O::Rows {
        &self.normed
    }

    /// Buffer with the head's input rows from number `first` on, after
    /// `ForwardPass::gather_logit_rows`.
    fn head_input_from(&self, first: usize) -> &O::Rows {
        match first {
            0 => &self.normed,
            _ => &self.head_input,
        }
    }
}

/// Whether the logits of all rows are needed, in order, as in a decode step.
pub(crate) fn selects_all_rows(logit_rows: &[u32], rows: usize) -> bool {
    (0..rows as u32).eq(logit_rows.iter().copied())
}

impl<O: Ops> ForwardPass<'_, O> {
    /// Runs the batch through all layers: stores every row's KV, and computes the final norm of the
    /// rows in `logit_rows`, from which [`ForwardPass::logits`] or [`ForwardPass::draw`] continue.
    pub(crate) fn run(
        &mut self,
        batch: &Batch,
        logit_rows: &[u32],
        purpose: ops::PassPurpose<'_>,
    ) -> Result<(), EngineError> {
        let rows = batch.rows_count();
        let weights = self.weights;
        // A device that replays a recorded pass runs all operations below by itself.
        let mode = (self.ops).begin(batch, purpose, self.adapters.groups())?;
        if mode == ops::PassMode::Replay {
            return Ok(());
        }
        self.ops.embed(
            batch,
            &weights.table,
            weights.spec.scalars.embedding,
            &mut self.buffers.residual,
        )?;
        let last = weights.layers.len() - 1;
        for index in 0..weights.layers.len() {
            self.store(batch, index)?;
            if index < last {
                self.mix(batch, index)?;
                self.outputs(index, rows)?;
            // The last layer: every row's keys and values were stored above, but attention and what
            // follows are needed only for rows whose logits are used.
            } else if !logit_rows.is_empty() {
                self.mix(batch, index)?;
                if !selects_all_rows(logit_rows, rows) {
                    self.select_rows(logit_rows)?;
                }
                self.outputs(index, logit_rows.len())?;
                self.final_norm(logit_rows.len())?;
            }
        }
        Ok(())
    }

    /// Computes logits of the wanted rows from number `first`, as many as `out` `(rows, vocab)`
    /// holds.
    pub(crate) fn logits(&mut self, first: usize, out: &mut [f32]) -> Result<(), EngineError> {
        let rows = out.len() / self.weights.spec.vocab_size;
        self.gather_logit_rows(first, rows)?;
        let x = self.buffers.head_input_from(first);
        self.ops.logits(self.weights.head(), rows, x, out)
    }

    /// Queues the draw of the tokens after the first wanted rows, `[rows]`; see
    /// [`Ops::queue_draw`].
    pub(crate) fn draw(&mut self, rules: &[Option<DrawRule>]) -> Result<(), EngineError> {
        let x = self.buffers.head_input_from(0);
        self.ops.queue_draw(self.weights.head(), rules, x)
    }

    /// Gathers wanted rows into the head's input buffer; rows from number 0 on already lie where
    /// the head reads them.
    fn gather_logit_rows(&mut self, first: usize, rows: usize) -> Result<(), EngineError> {
        if first == 0 {
            return Ok(());
        }
        let buffers = &mut *self.buffers;
        buffers.indices.clear();
        buffers
            .indices
            .extend((first..first + rows).map(|row| row as u32));
        self.ops
            .gather(&buffers.indices, &buffers.normed, &mut buffers.head_input)
    }

    /// Applies the final norm to the wanted rows, which `select_rows` moved to the front.
    fn final_norm(&mut self, rows: usize) -> Result<(), EngineError> {
        let spec = &self.weights.spec;
        let norm = Norm {
            formula: spec.final_norm.formula,
            weight: &self.weights.norm,
            epsilon: spec.final_norm.epsilon,
        };
        let is_added = self.is_mlp_output_added(spec.layers.len() - 1);
        let buffers = &mut *self.buffers;
        let from = NormIo {
            residual: &mut buffers.residual,
            delta: (!is_added).then_some(&buffers.delta),
            normed: &mut buffers.normed,
        };
        self.ops.normalize(&norm, rows, from)?;
        Ok(())
    }

    /// Runs the part of a layer's mixer that every row needs: what later rows read of it.
    fn store(&mut self, batch: &Batch, index: usize) -> Result<(), EngineError> {
        let weights = self.weights;
        let layer = &weights.layers[index];
        let mixer = &weights.spec.layers[index].mixer;
        match (mixer, &layer.mixer) {
            (Mixer::Attention(spec), MixerWeights::Attention(attention)) => {
                self.qkv_projection(batch, index, attention)?;
                self.rotate_and_store(batch, index, spec, attention)
            }
        }
    }

    /// Computes a mixer's result for every row, from what [`ForwardPass::store`] stored.
    fn mix(&mut self, batch: &Batch, index: usize) -> Result<(), EngineError> {
        match &self.weights.spec.layers[index].mixer {
            Mixer::Attention(spec) => self.attention(batch, index, spec),
        }
    }

    /// Adds a mixer's output and the MLP's to the residual stream, but for the last one of the
    /// layer, see [`ForwardPass::add_output`].
    fn outputs(&mut self, index: usize, rows: usize) -> Result<(), EngineError> {
        match self.weights.spec.layers[index].order {
            PartOrder::Sequential => {
                self.mix_output(index, rows)?;
                self.gate(index, rows)?;
            }
            // The gate reads the layer's input, so that the mixer's output is added after it, and
            // at once: the MLP's takes its place.
            PartOrder::Parallel => {
                self.gate(index, rows)?;
                self.mix_output(index, rows)?;
                let buffers = &mut *self.buffers;
                self.ops.add(rows, &buffers.delta, &mut buffers.residual)?;
            }
        }
        self.mlp_output(index, rows)
    }

    /// Applies a mixer's output projection, and the norm of the output if there is one.
    fn mix_output(&mut self, index: usize, rows: usize) -> Result<(), EngineError> {
        let buffers = &mut *self.buffers;
        let layer = &self.weights.layers[index];
        match &layer.mixer {
            MixerWeights::Attention(attention) => {
                let (x, out) = (&buffers.attention_out, &mut buffers.delta);
                self.ops.matmul(&attention.output, rows, x, out)?;
                if let Some(stack) = adapted(self.ops, self.adapters, index, Projection::OUTPUT) {
                    self.ops.adapt(&stack, x, out)?;
                }
            }
        }
        let norms = &self.weights.spec.layers[index].norms;
        self.add_output(norm(&layer.norms.mixer_output, norms.mixer_output), rows)
    }

    /// Normalises `delta` and adds it to the residual stream. Without a norm it stays in `delta`,
    /// for the norm of the next input.
    fn add_output(
        &mut self,
        norm: Option<Norm<'_, ops::VectorOf<O>>>,
        rows: usize,
    ) -> Result<(), EngineError> {
        let Some(norm) = norm else {
            return Ok(());
        };
        let buffers = &mut *self.buffers;
        self.ops
            .norm_add(&norm, rows, &mut buffers.delta, &mut buffers.residual)
    }

    /// Whether the residual stream has the output of a layer's MLP already.
    fn is_mlp_output_added(&self, index: usize) -> bool {
        self.weights.spec.layers[index].norms.mlp_output.is_some()
    }

    /// Computes queries, keys and values of the normed residual stream, or of the stream itself.
    /// The norm adds the layer before's `delta` if that is not part of the stream yet.
    fn qkv_projection(
        &mut self,
        batch: &Batch,
        index: usize,
        attention: &AttentionWeights<O::Pack>,
    ) -> Result<(), EngineError> {
        let is_added = index == 0 || self.is_mlp_output_added(index - 1);
        let norms = &self.weights.spec.layers[index].norms;
        let weights = &self.weights.layers[index].norms;
        let buffers = &mut *self.buffers;
        let rows = batch.rows_count();
        let norm = norm(&weights.mixer_input, norms.mixer_input);
        let adapted = adapted(self.ops, self.adapters, index, Projection::QKV);
        let (ops, out) = (&mut *self.ops, &mut buffers.qkv);
        let from = NormIo {
            residual: &mut buffers.residual,
            delta: (!is_added).then_some(&buffers.delta),
            normed: &mut buffers.normed,
        };
        let x = match (&norm, &adapted) {
            (None, _) => ops.activations(rows, from.residual, from.normed)?,
            // Adapters read the normed rows, too.
            (Some(norm), Some(_)) => ops.normalize(norm, rows, from)?,
            (Some(norm), None) => return ops.norm_matmul(norm, rows, from, &attention.qkv, out),
        };
        ops.matmul(&attention.qkv, rows, x, out)?;
        adapted.map_or(Ok(()), |stack| ops.adapt(&stack, x, out))
    }

    /// Normalises and rotates queries and keys, and stores keys and values in the pool.
    fn rotate_and_store(
        &mut self,
        batch: &Batch,
        index: usize,
        spec: &AttentionSpec,
        attention: &AttentionWeights<O::Pack>,
    ) -> Result<(), EngineError> {
        let norms = spec.qk_norm.zip(attention.qk_norm.as_ref());
        let norms = norms.map(|(spec, weights)| QkNorms {
            query: &weights.query,
            key: &weights.key,
            epsilon: spec.norm.epsilon,
        });
        let pool = PoolLayer {
            pool: &mut *self.pool,
            layer: index,
        };
        self.ops.norm_rotate_store(
            norms.as_ref(),
            batch,
            &self.weights.rotary[spec.rope.0],
            &mut self.buffers.qkv,
            spec.heads,
            pool,
        )
    }

    fn attention(
        &mut self,
        batch: &Batch,
        index: usize,
        spec: &AttentionSpec,
    ) -> Result<(), EngineError> {
        let attention = Attention {
            layer: index,
            scale: spec.scale,
            soft_cap: spec.soft_cap,
            window: spec.window,
        };
        let MixerWeights::Attention(weights) = &self.weights.layers[index].mixer;
        let io = AttentionIo {
            qkv: &self.buffers.qkv,
            pool: &*self.pool,
            sinks: weights.sinks.as_ref(),
            out: &mut self.buffers.attention_out,
        };
        self.ops.attend(batch, &attention, io)
    }

    /// Gathers the rows of `logit_rows` to the front of the buffers that the rest of the last layer
    /// uses.
    fn select_rows(&mut self, logit_rows: &[u32]) -> Result<(), EngineError> {
        let buffers = &mut *self.buffers;
        self.ops.gather(
            logit_rows,
            &buffers.attention_out,
            &mut buffers.attended_selected,
        )?;
        self.ops.gather(
            logit_rows,
            &buffers.residual,
            &mut buffers.residual_selected,
        )?;
        self.adapters.select(logit_rows);
        self.ops.regroup(self.adapters.groups())?;
        // Swapped instead of copied back: the next operation reads the gathered rows under the
        // usual names, and the old buffers serve as scratch of the next pass.
        std::mem::swap(&mut buffers.attention_out, &mut buffers.attended_selected);
        std::mem::swap(&mut buffers.residual, &mut buffers.residual_selected);
        Ok(())
    }

    /// Computes the gated product of the normed residual stream, or of the stream itself; of a
    /// mixture of experts, the norm alone. The norm adds the mixer's `delta` if that is to be a
    /// part of the MLP's input and is not yet.
    fn gate(&mut self, index: usize, rows: usize) -> Result<(), EngineError> {
        let weights = self.weights;
        let layer = &weights.layers[index];
        let LayerSpec {
            order, norms, mlp, ..
        } = &weights.spec.layers[index];
        let buffers = &mut *self.buffers;
        let ops = &mut *self.ops;
        let (norm, is_added) = match order {
            PartOrder::Sequential => (
                norm(&layer.norms.mlp_input, norms.mlp_input),
                norms.mixer_output.is_some(),
            ),
            PartOrder::Parallel => (norm(&layer.norms.mixer_input, norms.mixer_input), true),
        };
        let from = NormIo {
            residual: &mut buffers.residual,
            delta: (!is_added).then_some(&buffers.delta),
            normed: &mut buffers.normed,
        };
        match (mlp, &layer.mlp) {
            (Mlp::Gated(spec), MlpWeights::Gated(mlp)) => {
                let gated = GatedIo {
                    activation: spec.activation,
                    gate_up: &mut buffers.gate_up,
                    out: &mut buffers.gated,
                };
                let adapted = adapted(ops, self.adapters, index, Projection::GATE_UP);
                let x = match (&norm, &adapted) {
                    (None, _) => ops.activations(rows, from.residual, from.normed)?,
                    (Some(norm), Some(_)) => ops.normalize(norm, rows, from)?,
                    (Some(norm), None) => {
                        return ops.norm_gated(norm, rows, from, &mlp.gate_up, gated);
                    }
                };
                match adapted {
                    None => ops.gated(&mlp.gate_up, rows, x, gated),
                    Some(stack) => ops.adapted_gated(&mlp.gate_up, rows, x, gated, &stack),
                }
            }
            // Router and experts read the normed rows, which stay until `mlp_output`.
            _ => match norm {
                Some(norm) => ops.normalize(&norm, rows, from).map(|_| ()),
                None => Ok(()),
            },
        }
    }

    /// Applies the MLP's output projection, and the norm of the output if there is one.
    fn mlp_output(&mut self, index: usize, rows: usize) -> Result<(), EngineError> {
        let layer = &self.weights.layers[index];
        let LayerSpec {
            order, norms, mlp, ..
        } = &self.weights.spec.layers[index];
        let buffers = &mut *self.buffers;
        match (mlp, &layer.mlp) {
            (Mlp::Gated(_), MlpWeights::Gated(mlp)) => {
                let (x, out) = (&buffers.gated, &mut buffers.delta);
                self.ops.matmul(&mlp.down, rows, x, out)?;
                if let Some(stack) = adapted(self.ops, self.adapters, index, Projection::DOWN) {
                    self.ops.adapt(&stack, x, out)?;
                }
            }
            (Mlp::Experts(spec), MlpWeights::Experts(weights)) => {
                let experts = weights.experts(spec);
                let x = match (order, norms.mlp_input) {
                    (PartOrder::Sequential, None) => {
                        self.ops
                            .activations(rows, &buffers.residual, &mut buffers.normed)?
                    }
                    _ => &buffers.normed,
                };
                let (ops, out) = (&mut *self.ops, &mut buffers.delta);
                let adapted = self.adapters.of_experts(index);
                match adapted.filter(|adapted| ops.has_adapted_experts(adapted)) {
                    None => ops.experts(&experts, rows, x, out)?,
                    Some(adapted) => ops.adapted_experts(&experts, rows, x, out, adapted)?,
                }
            }
            (Mlp::Gated(_), MlpWeights::Experts(_)) | (Mlp::Experts(_), MlpWeights::Gated(_)) => {
                unreachable!("weights are loaded as the description says")
            }
        }
        self.add_output(norm(&layer.norms.mlp_output, norms.mlp_output), rows)
    }
}

/// The product of a stack, if adapters of the pass may change it.
fn adapted<'a, O: Ops>(
    ops: &O,
    adapters: &'a StepAdapters<ops::AdapterOf<O>>,
    layer: usize,
    stack: &'static [Projection],
) -> Option<ops::AdaptedStack<'a, ops::AdapterOf<O>>> {
    let adapted = adapters.of(layer, stack)?;
    ops.is_adapted(&adapted).then_some(adapted)
}

/// A norm of the residual stream or of a part's output, if a layer has it.
fn norm<V>(weight: &Option<V>, spec: Option<NormSpec>) -> Option<Norm<'_, V>> {
    let (weight, spec) = weight.as_ref().zip(spec)?;
    let NormSpec {
        formula,
        epsilon,
        weight: _,
    } = spec;
    Some(Norm {
        formula,
        weight,
        epsilon,
    })
}
