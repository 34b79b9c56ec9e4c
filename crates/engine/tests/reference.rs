//! The reference implementation of `Ops` in plain Rust: one loop per formula, sums in f64.

use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_domain::{BlockIndex, DeviceId, KvPlane, PlaneLayout, TokenId};
use cleave_engine::ops::{
    Activation, AdapterGroup, Attention, AttentionIo, Batch, BufferRole, ChosenWeights, DrawRule,
    Experts, ExpertsSpec, GatedIo, GatedMatrices, GatedMlpSpec, GroupScore, Head, HeadShape,
    InnerSlices, KvPoolShape, KvType, LogitEdit, MaskedDraw, NoAdapters, Norm, NormFormula, Ops,
    PassMode, PassPurpose, PoolLayer, Precision, QkNorms, ResidualIo, RotaryTable, RouterScore,
    WeightLoader,
};
use cleave_engine::{
    BlockSpan, EngineError, EngineLimits, ModelEngine, STEPS_IN_FLIGHT_MAX, Weights,
};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::f64::consts::PI;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[derive(Default)]
pub(crate) struct PlainOps {
    /// Set if it draws tokens itself, as a device does.
    pub(crate) device: Option<PlainDevice>,
    /// Token of each row of the pass.
    tokens: Vec<TokenId>,
}

/// Bytes of a sequence's state, where the pool has states: [`state_after`].
pub(crate) const STATE_BYTES: usize = 12;

/// The state after tokens from position 0 on: their number, and a hash of them.
pub(crate) fn state_after(tokens: &[TokenId]) -> [u8; STATE_BYTES] {
    let mut state = [0; STATE_BYTES];
    tokens.iter().for_each(|token| absorb(&mut state, *token));
    state
}

fn absorb(state: &mut [u8], token: TokenId) {
    let (count, hash) = state.split_at_mut(4);
    let before = u32::from_le_bytes(count.try_into().unwrap());
    count.copy_from_slice(&(before + 1).to_le_bytes());
    let before = u64::from_le_bytes((&*hash).try_into().unwrap());
    let mixed = (before ^ u64::from(token)).wrapping_add(1);
    let mixed = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    hash.copy_from_slice(&mixed.to_le_bytes());
}

/// State of a device that draws tokens, and accepts the next pass before they were fetched.
#[derive(Default)]
pub(crate) struct PlainDevice {
    /// Tokens of the last draw.
    drawn: Vec<Option<TokenId>>,
    /// Logits of the last draw, `(rows, vocab)`.
    logits: Vec<f32>,
    /// Draws that were not fetched, oldest first.
    queued: VecDeque<Vec<Option<TokenId>>>,
    pub(crate) watched: Arc<PlainDeviceProbe>,
}

/// Counters and faults through which a test observes and disturbs a device.
#[derive(Default)]
pub(crate) struct PlainDeviceProbe {
    /// Number of drawn tokens fed to passes.
    pub(crate) fed_count: AtomicUsize,
    /// Makes the logits of the next draw's first row not finite.
    pub(crate) breaks_first_row: AtomicBool,
    /// Makes the next logits not finite in every row.
    pub(crate) breaks_every_row: AtomicBool,
    /// Makes the next copy of a state fail.
    pub(crate) breaks_state_copy: AtomicBool,
}

impl PlainDevice {
    fn feed(&self, batch: &Batch, vocab: usize) -> Vec<TokenId> {
        let mut tokens = batch.tokens.clone();
        for fed in &batch.fed_rows {
            // After a failed draw any token will do, as on a device.
            let drawn = self.drawn[fed.draw_row as usize].unwrap_or(TokenId::MAX);
            tokens[fed.row as usize] = drawn.min(vocab as TokenId - 1);
        }
        self.watched
            .fed_count
            .fetch_add(batch.fed_rows.len(), Ordering::Relaxed);
        tokens
    }
}

/// A plain implementation of a draw; its tokens need not equal the host's.
fn draw_plainly(logits: &mut [f32], rule: &DrawRule) -> TokenId {
    for LogitEdit { token, change } in &rule.edits {
        let logit = &mut logits[*token as usize];
        *logit = change.apply(*logit);
    }
    let mut likely: Vec<(f64, TokenId)> = (0..)
        .zip(logits)
        .map(|(id, logit)| (f64::from(*logit), id))
        .collect();
    likely.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    if rule.inverse_temperature == 0.0 {
        return likely[0].1;
    }
    let most = likely[0].0;
    let candidates_count = match rule.top_k {
        0 => likely.len(),
        top_k => (top_k as usize).min(likely.len()),
    };
    let finite = likely.iter().map(|(logit, _)| *logit);
    let finite: Vec<f64> = finite.filter(|logit| logit.is_finite()).collect();
    let mean = finite.iter().sum::<f64>() / finite.len() as f64;
    let squares = finite.iter().map(|logit| (logit - mean).powi(2));
    let sigma = (squares.sum::<f64>() / finite.len() as f64).sqrt();
    let weight = |logit: f64| ((logit - most) * f64::from(rule.inverse_temperature)).exp();
    let share = |of: u64| of as f64 / (1u64 << 53) as f64;
    likely.truncate(candidates_count);
    if rule.top_n_sigma > 0.0 {
        likely.retain(|(logit, _)| *logit >= most - f64::from(rule.top_n_sigma) * sigma);
    }
    let total: f64 = likely.iter().map(|(logit, _)| weight(*logit)).sum();
    let mut before = 0.0;
    likely.retain(|(logit, _)| {
        let is_candidate =
            before < total * share(rule.top_p) && weight(*logit) >= f64::from(rule.min_p);
        before += weight(*logit);
        is_candidate
    });
    let total: f64 = likely.iter().map(|(logit, _)| weight(*logit)).sum();
    let mut goal = total * share(rule.random_bits);
    let passing = likely.iter().find(|(logit, _)| {
        goal -= weight(*logit);
        goal < 0.0
    });
    passing.unwrap_or(&likely[0]).1
}

pub(crate) struct Matrix {
    columns: usize,
    values: Vec<f32>,
    bias: Vec<f32>,
}

pub(crate) struct Rotary {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
    query_factors: Vec<f32>,
}

pub(crate) struct Rows {
    width: usize,
    values: Vec<f32>,
}

impl Rows {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.width..][..self.width]
    }
}

pub(crate) struct Pool {
    shape: KvPoolShape,
    values: Vec<f32>,
    /// The state slots, one after the other.
    states: Vec<u8>,
}

/// Elements of a plane, each of four bytes.
fn elements(shape: &KvPoolShape, plane: KvPlane) -> usize {
    shape.plane(plane).bytes_total().unwrap() / 4
}

impl Pool {
    /// Index of the first element of a token's key.
    fn key(&self, block: BlockIndex, layer: usize, kv_head: usize, token: usize) -> usize {
        self.elements_of(self.shape.layer(layer).plane, block).start
            + self.shape.layer(layer).key_offset(kv_head)
            + token * self.shape.layer(layer).heads.head_dim
    }

    fn value(&self, block: BlockIndex, layer: usize, kv_head: usize, token: usize) -> usize {
        let shape = self.shape.layer(layer);
        self.key(block, layer, kv_head, token) + shape.value_offset(kv_head)
            - shape.key_offset(kv_head)
    }

    /// The elements of a block.
    fn elements_of(&self, plane: KvPlane, block: BlockIndex) -> Range<usize> {
        let start = match plane {
            KvPlane::Window => elements(&self.shape, KvPlane::Blocks),
            KvPlane::Blocks | KvPlane::State => 0,
        };
        let size = self.shape.plane(plane).bytes / 4;
        let start = start + block.0 as usize * size;
        start..start + size
    }

    /// Bytes of a span of a state slot.
    fn state_range(&self, span: &BlockSpan) -> Range<usize> {
        self.shape.plane(KvPlane::State).range(span).unwrap()
    }
}

impl WeightLoader for PlainOps {
    type Matrix = Matrix;
    type Table = StoredTensor;
    type Vector = Vec<f32>;
    type Rotary = Rotary;

    fn precision(&self) -> Precision {
        Precision::F32
    }

    /// In f64 no slice changes a result by more than the tests allow.
    fn sliced_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
        _: &InnerSlices,
    ) -> Result<Matrix, EngineError> {
        let values: Vec<f32> = stack.iter().flat_map(StoredMatrix::to_f32).collect();
        let columns = stack[0].columns();
        let bias = bias.map_or_else(|| vec![0.0; values.len() / columns], <[f32]>::to_vec);
        assert_eq!(bias.len() * columns, values.len());
        Ok(Matrix {
            columns,
            values,
            bias,
        })
    }

    fn exact_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<Matrix, EngineError> {
        self.matrix(stack, bias)
    }

    fn table(&self, stored: &StoredTensor) -> Result<StoredTensor, EngineError> {
        Ok(stored.clone())
    }

    fn vector(&self, values: &[f32]) -> Result<Vec<f32>, EngineError> {
        Ok(values.to_vec())
    }

    fn rotary(&self, table: RotaryTable<'_>) -> Result<Rotary, EngineError> {
        Ok(Rotary {
            cos: table.cos.to_vec(),
            sin: table.sin.to_vec(),
            half: table.half,
            query_factors: table.query_factors.to_vec(),
        })
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum()
}

fn normed(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(epsilon)).sqrt();
    let scaled = x.iter().zip(weight);
    scaled
        .map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32)
        .collect()
}

fn normed_row(norm: &Norm<'_, Vec<f32>>, x: &[f32]) -> Vec<f32> {
    match norm.formula {
        NormFormula::RmsNorm => normed(x, norm.weight, norm.epsilon),
        NormFormula::LayerNorm => {
            let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
            let centred = x.iter().map(|x| (f64::from(*x) - mean) as f32);
            normed(&centred.collect::<Vec<_>>(), norm.weight, norm.epsilon)
        }
    }
}

fn capped(x: f64, cap: Option<f32>) -> f64 {
    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
}

/// The product of an activated gate and its factor.
fn gated(activation: Activation, gate: f64, up: f64) -> f64 {
    match activation {
        Activation::Silu => gate / (1.0 + (-gate).exp()) * up,
        Activation::GeluTanh => {
            let bent = (2.0 / PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            gate / 2.0 * (1.0 + bent.tanh()) * up
        }
        Activation::ClampedSwiGlu { limit } => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            gate / (1.0 + (-1.702 * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
        }
    }
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let most = logits
        .iter()
        .fold(f64::NEG_INFINITY, |most, logit| most.max(*logit));
    let powers: Vec<f64> = logits.iter().map(|logit| (logit - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

/// Indices of the largest, in ascending order; of equal ones the lower.
fn best(scores: &[f64], chosen: usize) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..scores.len()).collect();
    indices.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    indices.truncate(chosen);
    indices.sort_unstable();
    indices
}

/// Chosen experts of a row in ascending order, with their weights.
fn route(spec: &ExpertsSpec, bias: Option<&[f32]>, logits: &[f32]) -> Vec<(usize, f64)> {
    let logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    let scores = match spec.router.score {
        RouterScore::Softmax => softmax(&logits),
        RouterScore::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        RouterScore::Identity => logits,
    };
    let mut biased = scores.clone();
    if let Some(bias) = bias {
        biased
            .iter_mut()
            .zip(bias)
            .for_each(|(score, bias)| *score += f64::from(*bias));
    }
    if let Some(groups) = spec.router.groups {
        let each = spec.count / groups.count;
        let of_group = |group: &[f64]| {
            let two = best(group, 2);
            match groups.score {
                GroupScore::Max => group.iter().fold(f64::NEG_INFINITY, |most, x| most.max(*x)),
                GroupScore::TwoBestSum => two.iter().map(|index| group[*index]).sum(),
            }
        };
        let of_groups: Vec<f64> = biased.chunks_exact(each).map(of_group).collect();
        let chosen = best(&of_groups, groups.chosen);
        let closed = (0..spec.count).filter(|expert| !chosen.contains(&(expert / each)));
        closed.for_each(|expert| biased[expert] = f64::NEG_INFINITY);
    }
    let chosen = best(&biased, spec.chosen);
    let of_chosen: Vec<f64> = chosen.iter().map(|expert| scores[*expert]).collect();
    let weights = match spec.router.weights {
        ChosenWeights::Scores => of_chosen,
        ChosenWeights::Normalized { epsilon } => {
            let sum = of_chosen.iter().sum::<f64>() + f64::from(epsilon);
            of_chosen.iter().map(|score| score / sum).collect()
        }
        ChosenWeights::Softmax => softmax(&of_chosen),
    };
    let scaled = weights
        .iter()
        .map(|weight| weight * f64::from(spec.router.scale));
    chosen.into_iter().zip(scaled).collect()
}

/// Adds a gated MLP's output of a row, times a weight.
fn add_expert(
    matrices: &GatedMatrices<Matrix>,
    mlp: &GatedMlpSpec,
    x: &[f32],
    weight: f64,
    sum: &mut [f64],
) {
    let mut gate_up = vec![0.0; 2 * mlp.width];
    multiply(&matrices.gate_up, x, &mut gate_up);
    let (gate, up) = gate_up.split_at(mlp.width);
    let product =
        |(gate, up): (&f32, &f32)| gated(mlp.activation, f64::from(*gate), f64::from(*up)) as f32;
    let product: Vec<f32> = gate.iter().zip(up).map(product).collect();
    let mut out = vec![0.0; sum.len()];
    multiply(&matrices.down, &product, &mut out);
    sum.iter_mut()
        .zip(out)
        .for_each(|(sum, out)| *sum += weight * f64::from(out));
}

fn multiply(matrix: &Matrix, x: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), matrix.bias.len());
    for (index, out) in out.iter_mut().enumerate() {
        let row = &matrix.values[index * matrix.columns..][..matrix.columns];
        *out = (dot(row, x) + f64::from(matrix.bias[index])) as f32;
    }
}

fn rotate(head: &mut [f32], rotary: &Rotary, position: usize) {
    for pair in 0..rotary.half {
        let cos = rotary.cos[position * rotary.half + pair];
        let sin = rotary.sin[position * rotary.half + pair];
        let (a, b) = (head[pair], head[pair + rotary.half]);
        head[pair] = a * cos - b * sin;
        head[pair + rotary.half] = b * cos + a * sin;
    }
}

impl Ops for PlainOps {
    type Pack = PlainOps;
    type Adapters = NoAdapters;
    type Rows = Rows;
    type Pool = Pool;

    fn device(&self) -> String {
        "plain f64".to_owned()
    }

    fn device_id(&self) -> Option<DeviceId> {
        None
    }

    fn kv_type(&self) -> KvType {
        KvType::F32
    }

    fn arithmetic(&self) -> String {
        "f64".to_owned()
    }

    fn rows(&self, rows_max: usize, width: usize, _: BufferRole) -> Result<Rows, EngineError> {
        Ok(Rows {
            width,
            values: vec![0.0; rows_max * width],
        })
    }

    fn pool(&self, shape: KvPoolShape) -> Result<Pool, EngineError> {
        Ok(Pool {
            values: vec![
                0.0;
                elements(&shape, KvPlane::Blocks) + elements(&shape, KvPlane::Window)
            ],
            states: vec![0; shape.plane(KvPlane::State).bytes_total().unwrap()],
            shape,
        })
    }

    fn begin(
        &mut self,
        _: &Batch,
        _: PassPurpose<'_>,
        _: &[AdapterGroup<Infallible>],
    ) -> Result<PassMode, EngineError> {
        Ok(PassMode::Execute)
    }

    fn embed(
        &mut self,
        batch: &Batch,
        table: &StoredTensor,
        factor: f32,
        out: &mut Rows,
    ) -> Result<(), EngineError> {
        let tokens = match &self.device {
            Some(device) => device.feed(batch, table.rows()),
            None => batch.tokens.clone(),
        };
        for (row, token) in tokens.iter().enumerate() {
            table.read_row(*token as usize, out.row_mut(row));
            out.row_mut(row).iter_mut().for_each(|x| *x *= factor);
        }
        self.tokens = tokens;
        Ok(())
    }

    fn norm(
        &mut self,
        norm: &Norm<'_, Vec<f32>>,
        rows: usize,
        x: &Rows,
        out: &mut Rows,
    ) -> Result<(), EngineError> {
        for row in 0..rows {
            let values = normed_row(norm, x.row(row));
            out.row_mut(row).copy_from_slice(&values);
        }
        Ok(())
    }

    fn add_norm(
        &mut self,
        norm: &Norm<'_, Vec<f32>>,
        rows: usize,
        sum: ResidualIo<'_, Rows>,
        out: &mut Rows,
    ) -> Result<(), EngineError> {
        for row in 0..rows {
            let added = sum.residual.row_mut(row).iter_mut().zip(sum.delta.row(row));
            added.for_each(|(x, delta)| *x += delta);
        }
        self.norm(norm, rows, sum.residual, out)
    }

    fn norm_add(
        &mut self,
        norm: &Norm<'_, Vec<f32>>,
        rows: usize,
        x: &mut Rows,
        residual: &mut Rows,
    ) -> Result<(), EngineError> {
        for row in 0..rows {
            let addend = normed_row(norm, x.row(row));
            let added = residual.row_mut(row).iter_mut().zip(addend);
            added.for_each(|(residual, addend)| *residual += addend);
        }
        Ok(())
    }

    fn add(&mut self, rows: usize, delta: &Rows, residual: &mut Rows) -> Result<(), EngineError> {
        for row in 0..rows {
            let added = residual.row_mut(row).iter_mut().zip(delta.row(row));
            added.for_each(|(residual, delta)| *residual += delta);
        }
        Ok(())
    }

    fn matmul(
        &mut self,
        matrix: &Matrix,
        rows: usize,
        x: &Rows,
        out: &mut Rows,
    ) -> Result<(), EngineError> {
        for row in 0..rows {
            multiply(matrix, x.row(row), out.row_mut(row));
        }
        Ok(())
    }

    fn qk_norm(
        &mut self,
        norms: &QkNorms<'_, Vec<f32>>,
        heads: HeadShape,
        rows: usize,
        qkv: &mut Rows,
    ) -> Result<(), EngineError> {
        for row in 0..rows {
            let (queries, rest) = qkv.row_mut(row).split_at_mut(heads.query_width());
            let keys = &mut rest[..heads.kv_width()];
            for (part, weight) in [(queries, norms.query), (keys, norms.key)] {
                assert!(part.len().is_multiple_of(weight.len()));
                for together in part.chunks_mut(weight.len()) {
                    together.copy_from_slice(&normed(together, weight, norms.epsilon));
                }
            }
        }
        Ok(())
    }

    fn rotate_store(
        &mut self,
        batch: &Batch,
        rotary: &Rotary,
        qkv: &mut Rows,
        pool: PoolLayer<'_, Pool>,
    ) -> Result<(), EngineError> {
        let PoolLayer { pool, layer } = pool;
        let heads = pool.shape.layer(layer).heads;
        let (dim, block_tokens) = (heads.head_dim, pool.shape.block_tokens);
        for segment in batch.segments.iter().filter(|_| layer == 0) {
            if let Some(slot) = segment.state {
                let slot = pool.state_range(&pool.shape.whole(KvPlane::State, slot));
                for row in segment.rows.clone() {
                    absorb(&mut pool.states[slot.clone()], self.tokens[row]);
                }
            }
        }
        for segment in &batch.segments {
            for row in segment.rows.clone() {
                let position = batch.positions[row] as usize;
                let table = batch.table(segment, pool.shape.layer(layer).plane);
                let block = table[position / block_tokens];
                let values = qkv.row_mut(row);
                for head in values[..heads.query_width() + heads.kv_width()].chunks_mut(dim) {
                    rotate(head, rotary, position);
                }
                let factor = rotary.query_factors.get(position).unwrap_or(&1.0);
                let queries = values[..heads.query_width()].iter_mut();
                queries.for_each(|query| *query *= factor);
                let (_, kv) = values.split_at(heads.query_width());
                let (keys, values) = kv.split_at(heads.kv_width());
                for kv_head in 0..heads.kv_heads {
                    let key = pool.key(block, layer, kv_head, position % block_tokens);
                    let value = pool.value(block, layer, kv_head, position % block_tokens);
                    pool.values[key..][..dim].copy_from_slice(&keys[kv_head * dim..][..dim]);
                    pool.values[value..][..dim].copy_from_slice(&values[kv_head * dim..][..dim]);
                }
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        batch: &Batch,
        attention: &Attention,
        io: AttentionIo<'_, Self>,
    ) -> Result<(), EngineError> {
        let AttentionIo {
            qkv,
            pool,
            sinks,
            out,
        } = io;
        let heads = pool.shape.layer(attention.layer).heads;
        let (dim, block_tokens) = (heads.head_dim, pool.shape.block_tokens);
        for segment in &batch.segments {
            let table = batch.table(segment, pool.shape.layer(attention.layer).plane);
            for row in segment.rows.clone() {
                let position = batch.positions[row] as usize;
                let first = attention
                    .window
                    .map_or(0, |window| (position + 1).saturating_sub(window));
                for head in 0..heads.query_heads {
                    let query = &qkv.row(row)[head * dim..][..dim];
                    let kv_head = head / (heads.query_heads / heads.kv_heads);
                    let visible = first..position + 1;
                    let block_and_token = |p: usize| (table[p / block_tokens], p % block_tokens);
                    let scores: Vec<f64> = visible
                        .clone()
                        .map(|p| {
                            let (block, token) = block_and_token(p);
                            let key = pool.key(block, attention.layer, kv_head, token);
                            let product = dot(query, &pool.values[key..][..dim]);
                            capped(product * f64::from(attention.scale), attention.soft_cap)
                        })
                        .collect();
                    let sink = sinks.map(|sinks| f64::from(sinks[head]));
                    let most = scores.iter().copied().chain(sink);
                    let most = most.fold(f64::NEG_INFINITY, f64::max);
                    let powers: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                    // The sink takes its share, and has no value.
                    let of_sink = sink.map_or(0.0, |sink| (sink - most).exp());
                    let total = powers.iter().sum::<f64>() + of_sink;
                    let mut sums = vec![0.0f64; dim];
                    for (p, power) in visible.zip(&powers) {
                        let (block, token) = block_and_token(p);
                        let value = pool.value(block, attention.layer, kv_head, token);
                        let values = &pool.values[value..][..dim];
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum += power / total * f64::from(*value);
                        }
                    }
                    let target = &mut out.row_mut(row)[head * dim..][..dim];
                    target.iter_mut().zip(sums).for_each(|(t, s)| *t = s as f32);
                }
            }
        }
        Ok(())
    }

    fn gated(
        &mut self,
        matrix: &Matrix,
        rows: usize,
        x: &Rows,
        to: GatedIo<'_, Rows>,
    ) -> Result<(), EngineError> {
        let GatedIo {
            activation,
            gate_up,
            out,
        } = to;
        self.matmul(matrix, rows, x, gate_up)?;
        for row in 0..rows {
            let (gate, up) = gate_up.row(row).split_at(out.width);
            for ((out, gate), up) in out.row_mut(row).iter_mut().zip(gate).zip(up) {
                let (gate, up) = (f64::from(*gate), f64::from(*up));
                *out = gated(activation, gate, up) as f32;
            }
        }
        Ok(())
    }

    fn experts(
        &mut self,
        experts: &Experts<'_, PlainOps>,
        rows: usize,
        x: &Rows,
        out: &mut Rows,
    ) -> Result<(), EngineError> {
        let spec = experts.spec;
        for row in 0..rows {
            let x = x.row(row);
            let mut logits = vec![0.0; experts.router.bias.len()];
            multiply(experts.router, x, &mut logits);
            let (logits, gate) = logits.split_at(spec.count);
            let mut sum = vec![0.0; x.len()];
            for (expert, weight) in route(spec, experts.choice_bias.map(|bias| &bias[..]), logits) {
                add_expert(&experts.experts[expert], &spec.expert, x, weight, &mut sum);
            }
            if let (Some(matrices), Some(shared)) = (experts.shared, spec.shared) {
                let weight = gate
                    .first()
                    .map_or(1.0, |gate| 1.0 / (1.0 + f64::from(-gate).exp()));
                add_expert(matrices, &shared.mlp, x, weight, &mut sum);
            }
            let written = out.row_mut(row).iter_mut().zip(sum);
            written.for_each(|(out, sum)| *out = sum as f32);
        }
        Ok(())
    }

    fn gather(&mut self, indices: &[u32], from: &Rows, to: &mut Rows) -> Result<(), EngineError> {
        for (row, index) in indices.iter().enumerate() {
            to.row_mut(row).copy_from_slice(from.row(*index as usize));
        }
        Ok(())
    }

    fn logits(
        &mut self,
        head: Head<'_, Matrix>,
        rows: usize,
        x: &Rows,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let vocab = head.matrix.bias.len();
        assert_eq!(out.len(), rows * vocab);
        for row in 0..rows {
            multiply(head.matrix, x.row(row), &mut out[row * vocab..][..vocab]);
        }
        let capped = |logit: f32| capped(f64::from(logit), head.soft_cap) as f32;
        out.iter_mut().for_each(|logit| *logit = capped(*logit));
        let watched = self.device.as_ref().map(|device| &device.watched);
        let breaks = |watched: &Arc<PlainDeviceProbe>| {
            rows > 0 && watched.breaks_every_row.swap(false, Ordering::Relaxed)
        };
        if watched.is_some_and(breaks) {
            out.fill(f32::NAN);
        }
        Ok(())
    }

    fn can_draw(&self) -> bool {
        self.device.is_some()
    }

    fn read_rows(&mut self, x: &Rows, first: usize, out: &mut [f32]) -> Result<(), EngineError> {
        let width = x.row(0).len();
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(x.row(first + row));
        }
        Ok(())
    }

    fn queue_draw(
        &mut self,
        head: Head<'_, Matrix>,
        rules: &[Option<DrawRule>],
        x: &Rows,
    ) -> Result<(), EngineError> {
        let vocab = head.matrix.bias.len();
        let mut logits = vec![0.0; rules.len() * vocab];
        self.logits(head, rules.len(), x, &mut logits)?;
        let device = self.device.as_mut().expect("only a device is asked");
        if device
            .watched
            .breaks_first_row
            .swap(false, Ordering::Relaxed)
        {
            logits[0] = f32::NAN;
        }
        let rows = logits.chunks_mut(vocab).zip(rules);
        let drawn: Vec<_> = rows
            .map(|(logits, rule)| {
                let is_finite = logits.iter().all(|logit| logit.is_finite());
                let rule = rule.as_ref().filter(|_| is_finite)?;
                Some(draw_plainly(logits, rule))
            })
            .collect();
        if !drawn.is_empty() {
            device.drawn.clone_from(&drawn);
        }
        device.queued.push_back(drawn);
        device.logits = logits;
        assert!(device.queued.len() <= STEPS_IN_FLIGHT_MAX);
        Ok(())
    }

    fn queue_masked_draw(&mut self, draws: &[MaskedDraw<'_>]) -> Result<(), EngineError> {
        let device = self.device.as_mut().expect("only a device is asked");
        let drawn = device.queued.back_mut().expect("a draw was queued");
        let vocab = device.logits.len() / drawn.len();
        for MaskedDraw { row, rule, mask } in draws {
            let logits = &mut device.logits[*row as usize * vocab..][..vocab];
            let is_finite = logits.iter().all(|logit| logit.is_finite());
            let masked = (0..)
                .zip(&mut *logits)
                .filter(|(token, _)| !mask.allows(*token));
            masked.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            let token = is_finite.then(|| draw_plainly(logits, rule));
            drawn[*row as usize] = token;
        }
        device.drawn.clone_from(drawn);
        Ok(())
    }

    fn fetch_drawn(&mut self, tokens: &mut Vec<Option<TokenId>>) -> Result<(), EngineError> {
        let device = self.device.as_mut().expect("only a device is asked");
        tokens.extend(device.queued.pop_front().expect("a draw is under way"));
        Ok(())
    }

    fn is_draw_ready(&mut self) -> bool {
        false
    }

    fn read_block(&self, pool: &Pool, span: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
        let BlockSpan {
            plane,
            block,
            offset,
            ..
        } = span;
        if plane == KvPlane::State {
            out.copy_from_slice(&pool.states[pool.state_range(&span)]);
            return Ok(());
        }
        let values = &pool.values[pool.elements_of(plane, block)];
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        out.copy_from_slice(&bytes[offset..][..out.len()]);
        Ok(())
    }

    fn write_block(
        &mut self,
        pool: &mut Pool,
        span: BlockSpan,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        let BlockSpan {
            plane,
            block,
            offset,
            ..
        } = span;
        if plane == KvPlane::State {
            let range = pool.state_range(&span);
            pool.states[range].copy_from_slice(bytes);
            return Ok(());
        }
        let start = pool.elements_of(plane, block).start;
        for (index, byte) in bytes.iter().enumerate() {
            let (element, part) = ((offset + index) / 4, (offset + index) % 4);
            let mut value = pool.values[start + element].to_le_bytes();
            value[part] = *byte;
            pool.values[start + element] = f32::from_le_bytes(value);
        }
        Ok(())
    }

    fn copy_block(
        &mut self,
        pool: &mut Pool,
        plane: KvPlane,
        from: BlockIndex,
        to: BlockIndex,
    ) -> Result<(), EngineError> {
        if plane == KvPlane::State {
            let watched = self.device.as_ref().map(|device| &device.watched);
            if watched.is_some_and(|on| on.breaks_state_copy.swap(false, Ordering::Relaxed)) {
                return Err(EngineError::Device("the copy failed".to_owned()));
            }
            let [from, to] =
                [from, to].map(|slot| pool.state_range(&pool.shape.whole(plane, slot)));
            pool.states.copy_within(from, to.start);
            return Ok(());
        }
        let [from, to] = [from, to].map(|block| pool.elements_of(plane, block));
        pool.values.copy_within(from, to.start);
        Ok(())
    }

    fn clear_state(&mut self, pool: &mut Pool, slot: BlockIndex) -> Result<(), EngineError> {
        let slot = pool.state_range(&pool.shape.whole(KvPlane::State, slot));
        pool.states[slot].fill(0);
        Ok(())
    }
}

/// An engine over the plain operations, with draws on the host.
pub(crate) fn engine(dir: &Path, limits: EngineLimits) -> Result<ModelEngine<PlainOps>, String> {
    engine_over(PlainOps::default(), dir, limits)
}

/// An engine whose operations draw tokens, as a device does.
pub(crate) fn device_engine(
    dir: &Path,
    limits: EngineLimits,
) -> Result<(ModelEngine<PlainOps>, Arc<PlainDeviceProbe>), String> {
    let device = PlainDevice::default();
    let watched = Arc::clone(&device.watched);
    let plain = PlainOps {
        device: Some(device),
        ..PlainOps::default()
    };
    Ok((engine_over(plain, dir, limits)?, watched))
}

fn engine_over(
    plain: PlainOps,
    dir: &Path,
    limits: EngineLimits,
) -> Result<ModelEngine<PlainOps>, String> {
    let checkpoint = cleave_checkpoint::Checkpoint::open(dir).map_err(|error| error.to_string())?;
    let weights = Weights::load(&plain, &checkpoint, None, &mut |_| {});
    let weights = Arc::new(weights.map_err(|error| error.to_string())?);
    let mut layout = match limits.windows_count {
        0 => weights.kv_spec(limits.block_tokens, plain.kv_type()),
        _ => weights.kv_spec_with_window(limits.block_tokens, plain.kv_type()),
    };
    if limits.states_count > 0 {
        // A layer behind those of the model, so that all of them may have keys and values.
        let layer = layout.blocks.layers.len() as u32;
        layout.state = Some(PlaneLayout::packed([(layer, STATE_BYTES as u64)]));
    }
    let engine = ModelEngine::with_layout(plain, weights, &layout, limits);
    engine.map_err(|error| error.to_string())
}
