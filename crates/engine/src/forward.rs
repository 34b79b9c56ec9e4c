//! The forward pass, written once over [`Ops`].
//!
//! Owns: the activation buffers and the order of operations.
//! Never: samples, checks a plan, or allocates between layers.
//! Invariant: a row's result depends only on its own row and its sequence's KV, because this holds
//! for every operation (see [`crate::ops`]) and rows go through operations only.

use crate::EngineError;
use crate::ops;
use crate::ops::{
    Attention, AttentionIo, Batch, BufferRole, DrawRule, GatedIo, HeadNorms, Norm, NormIo, Ops,
    PoolLayer, ResidualIo,
};
use crate::weights::{LayerWeights, Weights};

/// Activations of one pass, `(rows_max, width)` each.
pub(crate) struct ActivationBuffers<O: Ops> {
    residual: O::Rows,
    normed: O::Rows,
    qkv: O::Rows,
    attention_out: O::Rows,
    /// Output of attention or of the MLP, not yet added to the residual.
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
}

impl<O: Ops> ActivationBuffers<O> {
    pub(crate) fn new(
        ops: &O,
        weights: &Weights<O::Pack>,
        rows_max: usize,
        logit_rows_max: usize,
    ) -> Result<Self, EngineError> {
        let config = &weights.config;
        let (hidden, gate) = (config.hidden_size, config.intermediate_size);
        let query = config.heads.query_width();
        Ok(Self {
            residual: ops.rows(rows_max, hidden, BufferRole::Residual)?,
            normed: ops.rows(rows_max, hidden, BufferRole::Activations)?,
            qkv: ops.rows(rows_max, config.heads.qkv_width(), BufferRole::Activations)?,
            attention_out: ops.rows(rows_max, query, BufferRole::Activations)?,
            delta: ops.rows(rows_max, hidden, BufferRole::Activations)?,
            gate_up: ops.rows(rows_max, 2 * gate, BufferRole::Activations)?,
            gated: ops.rows(rows_max, gate, BufferRole::Activations)?,
            residual_selected: ops.rows(rows_max, hidden, BufferRole::Residual)?,
            attended_selected: ops.rows(rows_max, query, BufferRole::Activations)?,
            head_input: ops.rows(logit_rows_max, hidden, BufferRole::Activations)?,
            indices: Vec::with_capacity(logit_rows_max),
        })
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
pub(crate) fn selects_all_rows(wanted: &[u32], rows: usize) -> bool {
    (0..rows as u32).eq(wanted.iter().copied())
}

impl<O: Ops> ForwardPass<'_, O> {
    /// Runs the batch through all layers: stores every row's KV, and computes the final norm of the
    /// rows in `wanted`, from which [`ForwardPass::logits`] or [`ForwardPass::draw`] continue.
    pub(crate) fn run(
        &mut self,
        batch: &Batch,
        wanted: &[u32],
        what: ops::PassPurpose<'_>,
    ) -> Result<(), EngineError> {
        let rows = batch.rows_count();
        let weights = self.weights;
        // A device that replays a recorded pass runs all operations below by itself.
        if self.ops.begin(batch, what)? == ops::PassMode::Replay {
            return Ok(());
        }
        self.ops
            .embed(batch, &weights.table, &mut self.buffers.residual)?;
        let last = weights.layers.len() - 1;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.qkv_projection(batch, index, layer)?;
            if index < last {
                self.attention(batch, index)?;
                self.output_and_mlp(layer, rows)?;
            // The last layer: every row's keys and values were stored above, but attention and what
            // follows are needed only for rows whose logits are used.
            } else if !wanted.is_empty() {
                self.attention(batch, index)?;
                if !selects_all_rows(wanted, rows) {
                    self.select_rows(wanted)?;
                }
                self.output_and_mlp(layer, wanted.len())?;
                self.final_norm(wanted.len())?;
            }
        }
        Ok(())
    }

    /// Computes logits of the wanted rows from number `first`, as many as `out` `(rows, vocab)`
    /// holds.
    pub(crate) fn logits(&mut self, first: usize, out: &mut [f32]) -> Result<(), EngineError> {
        let rows = out.len() / self.weights.config.vocab_size;
        self.gather_logit_rows(first, rows)?;
        let x = self.buffers.head_input_from(first);
        self.ops.logits(&self.weights.head, rows, x, out)
    }

    /// Queues the draw of the tokens after the first wanted rows, one per rule.
    pub(crate) fn draw(&mut self, rules: &[DrawRule]) -> Result<(), EngineError> {
        let x = self.buffers.head_input_from(0);
        self.ops.queue_draw(&self.weights.head, rules, x)
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

    /// Adds the MLP's output and applies the final norm to the wanted rows, which `narrow` moved to
    /// the front.
    fn final_norm(&mut self, rows: usize) -> Result<(), EngineError> {
        let norm = Norm {
            weight: &self.weights.norm,
            epsilon: self.weights.config.norm_epsilon,
        };
        let buffers = &mut *self.buffers;
        let sum = ResidualIo {
            residual: &mut buffers.residual,
            delta: &buffers.delta,
        };
        self.ops.add_rms_norm(&norm, rows, sum, &mut buffers.normed)
    }

    /// Computes queries, keys and values: adds the layer before's `delta` to the residual stream,
    /// normalises, multiplies, rotates, and stores keys and values in the pool.
    fn qkv_projection(
        &mut self,
        batch: &Batch,
        index: usize,
        layer: &LayerWeights<O::Pack>,
    ) -> Result<(), EngineError> {
        let config = &self.weights.config;
        let buffers = &mut *self.buffers;
        let norm = Norm {
            weight: &layer.input_norm,
            epsilon: config.norm_epsilon,
        };
        let from = NormIo {
            residual: &mut buffers.residual,
            delta: (index > 0).then_some(&buffers.delta),
            normed: &mut buffers.normed,
        };
        self.ops.norm_matmul(
            &norm,
            batch.rows_count(),
            from,
            &layer.qkv,
            &mut buffers.qkv,
        )?;
        let both = layer.query_norm.as_ref().zip(layer.key_norm.as_ref());
        let norms = both.map(|(query, key)| HeadNorms {
            query,
            key,
            epsilon: config.norm_epsilon,
        });
        let pool = PoolLayer {
            pool: &mut *self.pool,
            layer: index,
        };
        self.ops.norm_rotate_store(
            norms.as_ref(),
            batch,
            &self.weights.rotary,
            &mut buffers.qkv,
            config.heads,
            pool,
        )
    }

    fn attention(&mut self, batch: &Batch, index: usize) -> Result<(), EngineError> {
        let config = &self.weights.config;
        let attention = Attention {
            layer: index,
            scale: 1.0 / (config.heads.head_dim as f32).sqrt(),
            window: config.windows[index],
        };
        let io = AttentionIo {
            qkv: &self.buffers.qkv,
            pool: &*self.pool,
            out: &mut self.buffers.attention_out,
        };
        self.ops.attend(batch, &attention, io)
    }

    /// Gathers the wanted rows to the front of the buffers that the rest of the last layer uses.
    fn select_rows(&mut self, wanted: &[u32]) -> Result<(), EngineError> {
        let buffers = &mut *self.buffers;
        self.ops.gather(
            wanted,
            &buffers.attention_out,
            &mut buffers.attended_selected,
        )?;
        self.ops
            .gather(wanted, &buffers.residual, &mut buffers.residual_selected)?;
        // Swapped instead of copied back: the next operation reads the gathered rows under the
        // usual names, and the old buffers serve as scratch of the next pass.
        std::mem::swap(&mut buffers.attention_out, &mut buffers.attended_selected);
        std::mem::swap(&mut buffers.residual, &mut buffers.residual_selected);
        Ok(())
    }

    /// Applies attention's output projection and the MLP, whose output stays in `delta`.
    fn output_and_mlp(
        &mut self,
        layer: &LayerWeights<O::Pack>,
        rows: usize,
    ) -> Result<(), EngineError> {
        let buffers = &mut *self.buffers;
        let ops = &mut *self.ops;
        let norm = Norm {
            weight: &layer.post_norm,
            epsilon: self.weights.config.norm_epsilon,
        };
        ops.matmul(
            &layer.output,
            rows,
            &buffers.attention_out,
            &mut buffers.delta,
        )?;
        let from = NormIo {
            residual: &mut buffers.residual,
            delta: Some(&buffers.delta),
            normed: &mut buffers.normed,
        };
        let gated = GatedIo {
            gate_up: &mut buffers.gate_up,
            out: &mut buffers.gated,
        };
        ops.norm_gated(&norm, rows, from, &layer.gate_up, gated)?;
        ops.matmul(&layer.down, rows, &buffers.gated, &mut buffers.delta)
    }
}
