//! The forward pass, written once over [`Ops`].
//!
//! Owns: the activation buffers and the order of operations.
//! Never: samples, checks a plan, or allocates between layers.
//! Invariant: a row's result depends on its own row and its sequence's KV alone, because every
//! operation does (see [`crate::ops`]) and nothing else is done to rows.

use crate::EngineError;
use crate::ops;
use crate::ops::{
    Attention, AttentionIo, Batch, DrawRule, Gated, HeadNorms, Holds, LayerOf, Norm, Normed, Ops,
    Residual,
};
use crate::weights::{Layer, Weights};

/// Activations of one pass, `(rows_max, width)` each.
pub(crate) struct Buffers<O: Ops> {
    residual: O::Rows,
    normed: O::Rows,
    qkv: O::Rows,
    attended: O::Rows,
    /// What attention or the MLP adds to the residual.
    delta: O::Rows,
    gate_up: O::Rows,
    gated: O::Rows,
    /// The rows whose logits are wanted: in the last layer, what follows attention is for them only.
    residual_wanted: O::Rows,
    attended_wanted: O::Rows,
    /// `(logit_rows_max, hidden)`.
    head_input: O::Rows,
    /// Scratch for gathering.
    indices: Vec<u32>,
}

/// One pass: what it reads and where its KV goes.
pub(crate) struct Pass<'a, O: Ops> {
    pub(crate) ops: &'a mut O,
    pub(crate) weights: &'a Weights<O::Pack>,
    pub(crate) pool: &'a mut O::Pool,
    pub(crate) buffers: &'a mut Buffers<O>,
}

impl<O: Ops> Buffers<O> {
    pub(crate) fn new(
        ops: &O,
        weights: &Weights<O::Pack>,
        (rows_max, logit_rows_max): (usize, usize),
    ) -> Result<Self, EngineError> {
        let config = &weights.config;
        let (hidden, gate) = (config.hidden_size, config.intermediate_size);
        let query = config.heads.query_width();
        Ok(Self {
            residual: ops.rows(rows_max, hidden, Holds::Residual)?,
            normed: ops.rows(rows_max, hidden, Holds::Activations)?,
            qkv: ops.rows(rows_max, config.heads.qkv_width(), Holds::Activations)?,
            attended: ops.rows(rows_max, query, Holds::Activations)?,
            delta: ops.rows(rows_max, hidden, Holds::Activations)?,
            gate_up: ops.rows(rows_max, 2 * gate, Holds::Activations)?,
            gated: ops.rows(rows_max, gate, Holds::Activations)?,
            residual_wanted: ops.rows(rows_max, hidden, Holds::Residual)?,
            attended_wanted: ops.rows(rows_max, query, Holds::Activations)?,
            head_input: ops.rows(logit_rows_max, hidden, Holds::Activations)?,
            indices: Vec::with_capacity(logit_rows_max),
        })
    }

    /// Where `Pass::take_up` left the wanted rows from number `first`.
    fn head_rows(&self, first: usize) -> &O::Rows {
        match first {
            0 => &self.normed,
            _ => &self.head_input,
        }
    }
}

/// Whether all rows are wanted, in their order, as in a decode step.
pub(crate) fn is_all(wanted: &[u32], rows: usize) -> bool {
    (0..rows as u32).eq(wanted.iter().copied())
}

impl<O: Ops> Pass<'_, O> {
    /// Runs the batch: stores every row's KV, and brings the rows in `wanted` to the last layer's
    /// end, where [`Pass::logits`] takes them up.
    pub(crate) fn run(
        &mut self,
        batch: &Batch,
        wanted: &[u32],
        what: ops::Wanted<'_>,
    ) -> Result<(), EngineError> {
        let rows = batch.rows_count();
        let weights = self.weights;
        if self.ops.begin(batch, what)? == ops::Pass::Recorded {
            return Ok(());
        }
        self.ops
            .embed(batch, &weights.table, &mut self.buffers.residual)?;
        let last = weights.layers.len() - 1;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.enter(batch, index, layer)?;
            if index < last {
                self.attend(batch, index)?;
                self.leave(layer, rows)?;
            } else if !wanted.is_empty() {
                self.attend(batch, index)?;
                if !is_all(wanted, rows) {
                    self.narrow(wanted)?;
                }
                self.leave(layer, wanted.len())?;
                self.finish(wanted.len())?;
            }
        }
        Ok(())
    }

    /// Logits of the wanted rows from number `first`, as many as `out` `(rows, vocab)` holds.
    pub(crate) fn logits(&mut self, first: usize, out: &mut [f32]) -> Result<(), EngineError> {
        let rows = out.len() / self.weights.config.vocab_size;
        self.take_up(first, rows)?;
        let x = self.buffers.head_rows(first);
        self.ops.logits(&self.weights.head, rows, x, out)
    }

    /// Queues the drawing of the tokens after the first wanted rows, as many as there are rules.
    pub(crate) fn draw(&mut self, rules: &[DrawRule]) -> Result<(), EngineError> {
        let x = self.buffers.head_rows(0);
        self.ops.draw(&self.weights.head, rules, x)
    }

    /// Brings wanted rows to where the head takes them: the first are in their place.
    fn take_up(&mut self, first: usize, rows: usize) -> Result<(), EngineError> {
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

    /// The last norm, for the wanted rows, which lie at the front since `narrow`.
    fn finish(&mut self, rows: usize) -> Result<(), EngineError> {
        let norm = Norm {
            weight: &self.weights.norm,
            epsilon: self.weights.config.norm_epsilon,
        };
        let buffers = &mut *self.buffers;
        let sum = Residual {
            residual: &mut buffers.residual,
            delta: &buffers.delta,
        };
        self.ops.add_rms_norm(&norm, rows, sum, &mut buffers.normed)
    }

    /// From the residual stream to queries, keys and values; adds what the layer before left in `delta`. Keys and values
    /// go to the pool.
    fn enter(
        &mut self,
        batch: &Batch,
        index: usize,
        layer: &Layer<O::Pack>,
    ) -> Result<(), EngineError> {
        let config = &self.weights.config;
        let buffers = &mut *self.buffers;
        let norm = Norm {
            weight: &layer.input_norm,
            epsilon: config.norm_epsilon,
        };
        let from = Normed {
            residual: &mut buffers.residual,
            delta: (index > 0).then_some(&buffers.delta),
            normed: &mut buffers.normed,
        };
        let to = (&layer.qkv, &mut buffers.qkv);
        self.ops.norm_matmul(&norm, batch.rows_count(), from, to)?;
        let both = layer.query_norm.as_ref().zip(layer.key_norm.as_ref());
        let norms = both.map(|(query, key)| HeadNorms {
            query,
            key,
            epsilon: config.norm_epsilon,
        });
        let pool = LayerOf {
            pool: &mut *self.pool,
            layer: index,
        };
        let rows = (batch, &self.weights.rotary);
        let to = (config.heads, pool);
        self.ops
            .norm_rotate_store(norms.as_ref(), rows, &mut buffers.qkv, to)
    }

    fn attend(&mut self, batch: &Batch, index: usize) -> Result<(), EngineError> {
        let config = &self.weights.config;
        let attention = Attention {
            layer: index,
            scale: 1.0 / (config.heads.head_dim as f32).sqrt(),
            window: config.windows[index],
        };
        let io = AttentionIo {
            qkv: &self.buffers.qkv,
            pool: &*self.pool,
            out: &mut self.buffers.attended,
        };
        self.ops.attend(batch, &attention, io)
    }

    /// Brings the wanted rows to the front of the buffers that the rest of the last layer uses.
    fn narrow(&mut self, wanted: &[u32]) -> Result<(), EngineError> {
        let buffers = &mut *self.buffers;
        self.ops
            .gather(wanted, &buffers.attended, &mut buffers.attended_wanted)?;
        self.ops
            .gather(wanted, &buffers.residual, &mut buffers.residual_wanted)?;
        std::mem::swap(&mut buffers.attended, &mut buffers.attended_wanted);
        std::mem::swap(&mut buffers.residual, &mut buffers.residual_wanted);
        Ok(())
    }

    /// Attention's output projection and the MLP, which leaves its part in `delta`.
    fn leave(&mut self, layer: &Layer<O::Pack>, rows: usize) -> Result<(), EngineError> {
        let buffers = &mut *self.buffers;
        let ops = &mut *self.ops;
        let norm = Norm {
            weight: &layer.post_norm,
            epsilon: self.weights.config.norm_epsilon,
        };
        ops.matmul(&layer.output, rows, &buffers.attended, &mut buffers.delta)?;
        let from = Normed {
            residual: &mut buffers.residual,
            delta: Some(&buffers.delta),
            normed: &mut buffers.normed,
        };
        let gated = Gated {
            gate_up: &mut buffers.gate_up,
            out: &mut buffers.gated,
        };
        ops.norm_gated(&norm, rows, from, (&layer.gate_up, gated))?;
        ops.matmul(&layer.down, rows, &buffers.gated, &mut buffers.delta)
    }
}
