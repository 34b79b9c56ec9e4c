//! Each operation compared with its formula in f64 on every instruction set that this processor
//! has, and with itself: rows alone and together, other thread counts, other divisions.

use crate::harness::{
    assert_close, assert_independent, assert_rows_alone, available, filled, multiply, numbers,
    options, same_bits,
};
use cleave_checkpoint::e4m3;
use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_cpu::{CpuOps, CpuOptions, CpuRows, CpuWeightLoader, Isa};
use cleave_domain::{BlockIndex, KvPlane, StateCapacity};
use cleave_engine::BlockSpan;
use cleave_engine::ops::{
    Activation, Attention, AttentionIo, Batch, BatchSegment, BufferRole, GatedIo, Head, HeadShape,
    KvPoolShape, KvType, Norm, NormFormula, Ops, PassPurpose, PoolLayer, Precision, ResidualIo,
    RotaryTable, WeightLoader,
};

const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];

/// Number formats of weights and activations, and of keys and values.
const FORMATS: [(Precision, KvType); 6] = [
    (Precision::F32, KvType::F32),
    (Precision::Bf16, KvType::Bf16),
    (Precision::F32, KvType::Fp8E4m3),
    (Precision::Bf16, KvType::Fp8E4m3),
    (Precision::F32, KvType::Int8PerTokenHead),
    (Precision::Bf16, KvType::Int8PerTokenHead),
];

fn rounded(precision: Precision, values: &[f32]) -> Vec<f64> {
    values
        .iter()
        .map(|&v| match precision {
            Precision::F32 => f64::from(v),
            Precision::Bf16 => half::bf16::from_f32(v).to_f64(),
        })
        .collect()
}

/// One token's key or value in a head, as the pool rounds it.
fn rounded_kv(kv: KvType, values: &[f32]) -> Vec<f64> {
    match kv {
        KvType::F32 => rounded(Precision::F32, values),
        KvType::Bf16 => rounded(Precision::Bf16, values),
        KvType::Fp8E4m3 => {
            let codes = values.iter().map(|v| e4m3::from_f32(*v));
            codes.map(|bits| f64::from(e4m3::to_f32(bits))).collect()
        }
        KvType::Int8PerTokenHead => {
            let scale = f64::from(scale_of(values));
            let codes = values.iter().map(|v| (f64::from(*v) / scale).round());
            codes.map(|code| code * scale).collect()
        }
    }
}

/// Scale of one token's key or value in a head.
fn scale_of(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most: f32, v| most.max(v.abs())) / 127.0
}

/// `x · weightᵀ + bias` on one instruction set.
struct ProductCase {
    width: usize,
    columns: usize,
    rows: usize,
    bias: bool,
}

impl ProductCase {
    fn weights(&self) -> Vec<f32> {
        numbers(7, self.width * self.columns)
    }

    fn bias(&self) -> Option<Vec<f32>> {
        self.bias.then(|| numbers(8, self.columns))
    }

    fn left(&self) -> Vec<f32> {
        numbers(9, self.width * self.rows)
    }

    fn run(&self, options: &CpuOptions, rows: usize, x: &[f32]) -> Vec<f32> {
        let weights = StoredTensor::from_f32("w", self.columns, self.width, &self.weights());
        let matrix = CpuWeightLoader::new(options)
            .matrix(&[weights.into()], self.bias().as_deref())
            .unwrap();
        multiply(options, &matrix, self.columns, x, rows)
    }

    fn expected(&self, precision: Precision) -> Vec<f64> {
        let weights = rounded(precision, &self.weights());
        let left = rounded(precision, &self.left());
        let bias = self.bias().unwrap_or_else(|| vec![0.0; self.columns]);
        let mut out = Vec::new();
        for row in left.chunks_exact(self.width) {
            for (weights, bias) in weights.chunks_exact(self.width).zip(&bias) {
                let dot: f64 = row.iter().zip(weights).map(|(a, b)| a * b).sum();
                out.push(dot + f64::from(*bias));
            }
        }
        out
    }
}

/// Odd and even sizes around vectors, pairs, panels and register tiles.
fn cases() -> Vec<ProductCase> {
    let mut cases = Vec::new();
    for (width, columns) in [
        (1, 1),
        (2, 16),
        (3, 17),
        (16, 31),
        (33, 33),
        (64, 100),
        (257, 64),
    ] {
        for rows in [1, 2, 3, 5, 6, 7, 8, 13, 14, 15, 16, 29, 40] {
            let bias = (rows + columns) % 2 == 0;
            cases.push(ProductCase {
                width,
                columns,
                rows,
                bias,
            });
        }
    }
    cases
}

#[test]
fn products_of_odd_sizes_are_right_on_every_isa() {
    for isa in available() {
        for precision in PRECISIONS {
            for case in cases() {
                let out = case.run(&options(precision, isa, 2), case.rows, &case.left());
                let label = format!("{isa} {precision:?} {}×{}", case.width, case.columns);
                assert_close(&out, &case.expected(precision), 2e-5, &label);
            }
        }
    }
}

#[test]
fn a_product_of_no_rows_writes_nothing() {
    let case = ProductCase {
        width: 8,
        columns: 8,
        rows: 0,
        bias: false,
    };
    let options = options(Precision::Bf16, Isa::detect(), 2);
    let weights = StoredTensor::from_f32("w", 8, 8, &case.weights());
    let matrix = CpuWeightLoader::new(&options)
        .matrix(&[weights.into()], None)
        .unwrap();
    let mut ops = CpuOps::new(&options).unwrap();
    let (x, mut out) = (
        ops.rows(4, 8, BufferRole::Activations).unwrap(),
        ops.rows(4, 8, BufferRole::Activations).unwrap(),
    );
    out.values_mut().fill(5.0);
    ops.matmul(&matrix, 0, &x, &mut out).unwrap();
    assert!(out.values().iter().all(|&v| v == 5.0));
}

#[test]
fn rows_are_bit_equal_in_any_batch_and_thread_count() {
    for isa in available() {
        for precision in PRECISIONS {
            // Large enough that the product is divided among threads by panels and by tiles.
            let case = ProductCase {
                width: 515,
                columns: 200,
                rows: 61,
                bias: true,
            };
            let label = format!("{isa} {precision:?}");
            assert_independent(&case.left(), case.rows, &label, |threads, x, rows| {
                case.run(&options(precision, isa, threads), rows, x)
            });
        }
    }
}

/// More rows than one pass has, with a left side larger than the cache, so that panels go in
/// groups.
#[test]
fn rows_of_a_large_product_equal_those_computed_alone() {
    let case = ProductCase {
        width: 600,
        columns: 100,
        rows: 530,
        bias: true,
    };
    let left = case.left();
    for isa in available() {
        // One thread: several threads would each have single panels.
        let options = options(Precision::Bf16, isa, 1);
        let together = case.run(&options, case.rows, &left);
        assert_close(&together, &case.expected(Precision::Bf16), 5e-5, isa.name());
        let alone = |x: &[f32]| case.run(&options, 1, x);
        assert_rows_alone(
            &together,
            &left,
            case.rows,
            &[0, 511, 529],
            isa.name(),
            alone,
        );
    }
}

#[test]
fn bf16_products_are_bit_equal_on_every_isa() {
    let case = ProductCase {
        width: 333,
        columns: 70,
        rows: 17,
        bias: false,
    };
    let run = |isa| case.run(&options(Precision::Bf16, isa, 2), case.rows, &case.left());
    let plain = run(Isa::Plain);
    for isa in available() {
        assert!(same_bits(&plain, &run(isa)), "{isa} differs from plain");
    }
}

#[test]
fn exactly_stored_weights_pack_alike_from_every_type() {
    let values: Vec<half::bf16> = numbers(3, 40 * 24)
        .iter()
        .map(|&v| half::bf16::from_f32(v))
        .collect();
    let wide: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
    for precision in PRECISIONS {
        let options = options(precision, Isa::detect(), 2);
        let pack = CpuWeightLoader::new(&options);
        let mut ops = CpuOps::new(&options).unwrap();
        let x = filled(&ops, 2, &numbers(4, 48));
        let mut results = Vec::new();
        // As one tensor, and as a stack of three.
        for stack in [
            vec![StoredTensor::from_bf16("w", 40, 24, &values)],
            vec![
                StoredTensor::from_f32("a", 7, 24, &wide[..7 * 24]),
                StoredTensor::from_bf16("b", 30, 24, &values[7 * 24..37 * 24]),
                StoredTensor::from_f32("c", 3, 24, &wide[37 * 24..]),
            ],
        ] {
            let stack: Vec<StoredMatrix> = stack.into_iter().map(Into::into).collect();
            let matrix = pack.matrix(&stack, None).unwrap();
            let mut out = ops.rows(2, 40, BufferRole::Activations).unwrap();
            ops.matmul(&matrix, 2, &x, &mut out).unwrap();
            results.push(out.values().to_vec());
        }
        assert!(same_bits(&results[0], &results[1]));
    }
}

#[test]
fn a_layer_norm_removes_the_mean() {
    for isa in available() {
        for width in [1, 15, 16, 48, 100, 2048] {
            let options = options(Precision::F32, isa, 2);
            let mut ops = CpuOps::new(&options).unwrap();
            // The mean is many times the deviation from it.
            let x: Vec<f32> = numbers(1, 3 * width).iter().map(|x| x + 20.0).collect();
            let (delta, weight) = (numbers(2, 3 * width), numbers(5, width));
            let norm = Norm {
                formula: NormFormula::LayerNorm,
                weight: &CpuWeightLoader::new(&options).vector(&weight).unwrap(),
                epsilon: 1e-5,
            };
            let mut residual = filled(&ops, 3, &x);
            ops.add(3, &filled(&ops, 3, &delta), &mut residual).unwrap();
            let total: Vec<f64> = (x.iter().zip(&delta))
                .map(|(a, b)| f64::from(a + b))
                .collect();
            assert_close(residual.values(), &total, 0.0, "sum");
            let mut out = ops.rows(3, width, BufferRole::Activations).unwrap();
            ops.norm(&norm, 3, &residual, &mut out).unwrap();
            let expected: Vec<f64> = total
                .chunks_exact(width)
                .flat_map(|row| {
                    let mean = row.iter().sum::<f64>() / width as f64;
                    let squares = row.iter().map(|v| (v - mean) * (v - mean));
                    let scale = 1.0 / (squares.sum::<f64>() / width as f64 + 1e-5).sqrt();
                    let weighted = row.iter().zip(&weight);
                    weighted.map(move |(v, w)| (v - mean) * scale * f64::from(*w))
                })
                .collect();
            assert_close(out.values(), &expected, 1e-4, "LayerNorm");
        }
    }
}

#[test]
fn logits_are_capped() {
    for isa in available() {
        for columns in [1, 15, 16, 100] {
            let options = options(Precision::F32, isa, 2);
            let mut ops = CpuOps::new(&options).unwrap();
            let values: Vec<f32> = numbers(3, columns).iter().map(|x| x * 200.0).collect();
            let stored = StoredTensor::from_f32("head", columns, 1, &values);
            let matrix = CpuWeightLoader::new(&options).head(&stored).unwrap();
            let x = filled(&ops, 2, &[1.0, 0.01]);
            let head = Head {
                matrix: &matrix,
                soft_cap: Some(30.0),
            };
            let mut out = vec![0.0; 2 * columns];
            ops.logits(head, 2, &x, &mut out).unwrap();
            let rows = [1.0, f64::from(0.01f32)];
            let expected: Vec<f64> = (rows.iter())
                .flat_map(|x| values.iter().map(move |value| x * f64::from(*value)))
                .map(|logit| 30.0 * (logit / 30.0).tanh())
                .collect();
            assert_close(&out, &expected, 1e-5, "capped logits");
        }
    }
}

#[test]
fn a_cap_hides_no_number_that_is_not_finite() {
    for isa in available() {
        let options = options(Precision::F32, isa, 2);
        let mut ops = CpuOps::new(&options).unwrap();
        let values = [vec![f32::NAN], vec![1.0; 17], vec![f32::INFINITY]].concat();
        let stored = StoredTensor::from_f32("head", values.len(), 1, &values);
        let matrix = CpuWeightLoader::new(&options).head(&stored).unwrap();
        let x = filled(&ops, 1, &[1.0]);
        let head = Head {
            matrix: &matrix,
            soft_cap: Some(30.0),
        };
        let mut out = vec![0.0; values.len()];
        ops.logits(head, 1, &x, &mut out).unwrap();
        let finite = out.iter().map(|logit| logit.is_finite());
        assert!(
            finite.eq(values.iter().map(|value| value.is_finite())),
            "{isa:?}"
        );
    }
}

#[test]
fn norms_and_gates_follow_their_formulas() {
    for isa in available() {
        for width in [1, 15, 16, 48, 100, 2048] {
            let options = options(Precision::F32, isa, 2);
            let mut ops = CpuOps::new(&options).unwrap();
            let (x, delta) = (numbers(1, 3 * width), numbers(2, 3 * width));
            let weight = numbers(5, width);
            let norm = Norm {
                formula: NormFormula::RmsNorm,
                weight: &CpuWeightLoader::new(&options).vector(&weight).unwrap(),
                epsilon: 1e-5,
            };
            let mut residual = filled(&ops, 3, &x);
            let mut out = ops.rows(3, width, BufferRole::Activations).unwrap();
            let sum = ResidualIo {
                residual: &mut residual,
                delta: &filled(&ops, 3, &delta),
            };
            ops.add_norm(&norm, 3, sum, &mut out).unwrap();
            let total: Vec<f64> = x
                .iter()
                .zip(&delta)
                .map(|(a, b)| f64::from(a + b))
                .collect();
            assert_close(residual.values(), &total, 0.0, "residual");
            let expected: Vec<f64> = total
                .chunks_exact(width)
                .flat_map(|row| {
                    let mean = row.iter().map(|v| v * v).sum::<f64>() / width as f64;
                    let scale = 1.0 / (mean + 1e-5).sqrt();
                    row.iter()
                        .zip(&weight)
                        .map(move |(v, w)| v * scale * f64::from(*w))
                })
                .collect();
            assert_close(out.values(), &expected, 1e-5, "norm");
            let mut again = ops.rows(3, width, BufferRole::Activations).unwrap();
            ops.norm(&norm, 3, &residual, &mut again).unwrap();
            assert!(same_bits(again.values(), out.values()));
            let expected: Vec<f64> = (total.iter().zip(expected)).map(|(x, n)| x + n).collect();
            let mut input = filled(&ops, 3, residual.values());
            ops.norm_add(&norm, 3, &mut input, &mut residual).unwrap();
            assert_close(residual.values(), &expected, 1e-5, "sum of a norm");

            let gate_up: Vec<f32> = numbers(6, 6 * width).iter().map(|v| v * 30.0).collect();
            let out = gated(&mut ops, &gate_up, 3);
            let expected: Vec<f64> = gate_up
                .chunks_exact(2 * width)
                .flat_map(|row| {
                    let (gate, up) = row.split_at(width);
                    gate.iter().zip(up).map(|(&g, &u)| {
                        let (g, u) = (f64::from(g), f64::from(u));
                        g / (1.0 + (-g).exp()) * u
                    })
                })
                .collect();
            assert_close(out.values(), &expected, 1e-6, "gate");
        }
    }
}

/// Applies the gate to rows of `gate | up`: each row of the left side is a unit vector that selects
/// one of them from the matrix.
fn gated(ops: &mut CpuOps, gate_up: &[f32], rows: usize) -> CpuRows {
    let both = gate_up.len() / rows;
    let weights: Vec<f32> = (0..both)
        .flat_map(|column| (0..rows).map(move |row| gate_up[row * both + column]))
        .collect();
    let stored = StoredTensor::from_f32("gate", both, rows, &weights);
    let pack = CpuWeightLoader::new(&options(Precision::F32, Isa::Plain, 1));
    let matrix = pack.gate_up(&[stored.into()], None).unwrap();
    let picks: Vec<f32> = (0..rows * rows)
        .map(|at| f32::from(u8::from(at / rows == at % rows)))
        .collect();
    let x = filled(ops, rows, &picks);
    let mut unused = ops.rows(rows, both, BufferRole::Activations).unwrap();
    let mut out = ops.rows(rows, both / 2, BufferRole::Activations).unwrap();
    let to = GatedIo {
        activation: Activation::Silu,
        gate_up: &mut unused,
        out: &mut out,
    };
    ops.gated(&matrix, rows, &x, to).unwrap();
    out
}

#[test]
fn the_gate_is_finite_at_the_ends_of_its_range() {
    for isa in available() {
        let mut ops = CpuOps::new(&options(Precision::F32, isa, 1)).unwrap();
        let gate = [-1e30, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e30];
        let gate_up: Vec<f32> = gate.iter().copied().chain([1.0; 8]).collect();
        let out = gated(&mut ops, &gate_up, 1);
        let out = out.values();
        assert!(out.iter().all(|v| v.is_finite()), "{isa}: {out:?}");
        assert!(out[..5].iter().all(|v| v.abs() < 1e-30), "{isa}: {out:?}");
        assert_eq!(&out[5..], &gate[5..]);
    }
}

/// Attention of several sequences, computed in pieces.
struct AttentionCase {
    heads: HeadShape,
    block_tokens: usize,
    window: Option<usize>,
    soft_cap: Option<f32>,
    has_sinks: bool,
    /// Tokens of each sequence.
    lengths: Vec<usize>,
}

const LAYERS: usize = 2;

impl AttentionCase {
    fn shape(&self, kv: KvType) -> KvPoolShape {
        let blocks = self.lengths.iter().map(|n| n.div_ceil(self.block_tokens));
        KvPoolShape::uniform(
            self.heads,
            LAYERS,
            self.block_tokens,
            blocks.sum::<usize>() + 1,
            kv,
        )
    }

    /// Rows of one sequence, `(tokens, q | k | v)`.
    fn qkv(&self, sequence: usize) -> Vec<f32> {
        let count = self.lengths[sequence] * self.heads.qkv_width();
        numbers(100 + sequence as u64, count)
            .iter()
            .map(|v| v * 3.0)
            .collect()
    }

    /// Block table of a sequence, in descending order, so that tables are not in the pool's order.
    fn table(&self, sequence: usize) -> Vec<BlockIndex> {
        let before: usize = self.lengths[..sequence]
            .iter()
            .map(|n| n.div_ceil(self.block_tokens))
            .sum();
        let count = self.lengths[sequence].div_ceil(self.block_tokens);
        (0..count)
            .map(|i| BlockIndex((before + count - i) as u32))
            .collect()
    }

    fn rotary(&self) -> (Vec<f32>, Vec<f32>) {
        let longest = self.lengths.iter().max().unwrap();
        let angles = numbers(55, longest * self.heads.head_dim / 2);
        let cos = angles.iter().map(|a| a.cos()).collect();
        (cos, angles.iter().map(|a| a.sin()).collect())
    }

    /// A sink of each query head: below the scores, among them, and far above.
    fn sinks(&self) -> Option<Vec<f32>> {
        let sinks = (0..self.heads.query_heads).map(|head| [1.5, -4.0, 0.25, 40.0][head % 4]);
        self.has_sinks.then(|| sinks.collect())
    }

    /// Runs the steps: in each, `(sequence, from, to)` tokens. Returns every sequence's output.
    fn run(&self, options: &CpuOptions, steps: &[Vec<(usize, usize, usize)>]) -> Vec<Vec<f32>> {
        let mut ops = CpuOps::new(options).unwrap();
        let shape = self.shape(options.kv);
        let mut pool = ops.pool(shape.clone()).unwrap();
        // Earlier contents of a block are NaN in every format.
        let left = vec![0xff; shape.block_bytes()];
        for block in 0..shape.blocks_count as u32 {
            let whole = shape.whole(KvPlane::Blocks, BlockIndex(block));
            ops.write_block(&mut pool, whole, &left).unwrap();
        }
        let (cos, sin) = self.rotary();
        let half = self.heads.head_dim / 2;
        let (cos, sin) = (&cos, &sin);
        let rotary = CpuWeightLoader::new(options)
            .rotary(RotaryTable {
                cos,
                sin,
                half,
                query_factors: &[],
            })
            .unwrap();
        let sinks = self.sinks();
        let sinks = sinks.map(|sinks| CpuWeightLoader::new(options).vector(&sinks).unwrap());
        let width = self.heads.query_width();
        let mut outs: Vec<Vec<f32>> = self.lengths.iter().map(|n| vec![0.0; n * width]).collect();
        for step in steps {
            let (batch, values) = self.batch(step);
            let rows = batch.rows_count();
            let mut qkv = filled(&ops, rows, &values);
            let mut out = ops.rows(rows, width, BufferRole::Activations).unwrap();
            ops.begin(&batch, PassPurpose::Unspecified, &[]).unwrap();
            let pool_layer = PoolLayer {
                pool: &mut pool,
                layer: 1,
            };
            ops.rotate_store(&batch, &rotary, &mut qkv, pool_layer)
                .unwrap();
            let attention = Attention {
                layer: 1,
                scale: 1.0 / (self.heads.head_dim as f32).sqrt(),
                soft_cap: self.soft_cap,
                window: self.window,
            };
            let io = AttentionIo {
                qkv: &qkv,
                pool: &pool,
                sinks: sinks.as_ref(),
                out: &mut out,
            };
            ops.attend(&batch, &attention, io).unwrap();
            let mut row = 0;
            for &(sequence, from, to) in step {
                let part = &out.values()[row * width..(row + to - from) * width];
                outs[sequence][from * width..to * width].copy_from_slice(part);
                row += to - from;
            }
        }
        outs
    }

    /// A step that computes all sequences whole.
    fn whole(&self) -> Vec<(usize, usize, usize)> {
        let lengths = self.lengths.iter().enumerate();
        lengths.map(|(sequence, len)| (sequence, 0, *len)).collect()
    }

    fn batch(&self, step: &[(usize, usize, usize)]) -> (Batch, Vec<f32>) {
        let mut batch = Batch::default();
        let mut values = Vec::new();
        for &(sequence, from, to) in step {
            let table = self.table(sequence);
            let (row, first) = (batch.tokens.len(), batch.blocks.len());
            batch.tokens.extend((from..to).map(|_| 0));
            batch.positions.extend(from as u32..to as u32);
            batch.blocks.extend(&table);
            batch.segments.push(BatchSegment {
                rows: row..row + to - from,
                position: from,
                blocks: first..first + table.len(),
                state: None,
            });
            let width = self.heads.qkv_width();
            values.extend_from_slice(&self.qkv(sequence)[from * width..to * width]);
        }
        (batch, values)
    }

    /// The formula, in f64.
    fn expected(&self, precision: Precision, kv: KvType, sequence: usize) -> Vec<f64> {
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = self.heads;
        let (cos, sin) = self.rotary();
        let (tokens, half) = (self.lengths[sequence], head_dim / 2);
        let qkv = self.qkv(sequence);
        // [head][token][dim], rotated and rounded.
        let head = |index: usize, token: usize| -> Vec<f64> {
            let start = token * self.heads.qkv_width() + index * head_dim;
            let mut x = qkv[start..start + head_dim].to_vec();
            if index < query_heads + kv_heads {
                for i in 0..half {
                    let (c, s) = (cos[token * half + i], sin[token * half + i]);
                    let (a, b) = (x[i], x[i + half]);
                    x[i] = a * c - b * s;
                    x[i + half] = b * c + a * s;
                }
            }
            if index < query_heads {
                rounded(precision, &x)
            } else {
                rounded_kv(kv, &x)
            }
        };
        let mut out = vec![0.0; tokens * query_heads * head_dim];
        for query in 0..query_heads {
            let kv_head = query / (query_heads / kv_heads);
            let all = |index: usize| -> Vec<_> { (0..tokens).map(|t| head(index, t)).collect() };
            let keys = all(query_heads + kv_head);
            let values = all(query_heads + kv_heads + kv_head);
            for token in 0..tokens {
                let q = head(query, token);
                let first = self.window.map_or(0, |w| (token + 1).saturating_sub(w));
                let scores: Vec<f64> = (first..=token)
                    .map(|t| {
                        let dot: f64 = q.iter().zip(&keys[t]).map(|(a, b)| a * b).sum();
                        let score = dot / (head_dim as f64).sqrt();
                        let capped = |cap| f64::from(cap) * (score / f64::from(cap)).tanh();
                        self.soft_cap.map_or(score, capped)
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sink = self
                    .sinks()
                    .map_or(0.0, |sinks| (f64::from(sinks[query]) - top).exp());
                let sum = weights.iter().sum::<f64>() + sink;
                let to = &mut out[(token * query_heads + query) * head_dim..][..head_dim];
                for (weight, t) in weights.iter().zip(first..) {
                    for (to, v) in to.iter_mut().zip(&values[t]) {
                        *to += weight / sum * v;
                    }
                }
            }
        }
        out
    }
}

fn heads(query_heads: usize, kv_heads: usize, head_dim: usize) -> HeadShape {
    HeadShape {
        query_heads,
        kv_heads,
        head_dim,
    }
}

/// Shapes around vectors, tiles, spans, groups and windows.
fn sequences() -> Vec<AttentionCase> {
    let of = |heads, block_tokens, window, lengths: &[usize]| AttentionCase {
        heads,
        block_tokens,
        window,
        soft_cap: None,
        has_sinks: false,
        lengths: lengths.to_vec(),
    };
    let capped = |case| AttentionCase {
        soft_cap: Some(2.5),
        ..case
    };
    let with_sinks = |case| AttentionCase {
        has_sinks: true,
        ..case
    };
    vec![
        of(heads(4, 2, 16), 16, None, &[1, 17, 70]),
        of(heads(2, 2, 8), 4, None, &[5, 66]),
        of(heads(8, 2, 40), 16, Some(9), &[90, 3]),
        of(heads(7, 1, 64), 32, None, &[130]),
        of(heads(4, 1, 32), 16, Some(100), &[620]),
        of(heads(2, 1, 128), 16, None, &[1100]),
        capped(of(heads(4, 2, 40), 16, Some(9), &[50, 3])),
        capped(of(heads(2, 1, 64), 16, None, &[600])),
        with_sinks(of(heads(4, 2, 40), 16, Some(9), &[50, 3])),
        with_sinks(of(heads(8, 1, 64), 16, None, &[600, 1])),
    ]
}

#[test]
fn attention_follows_its_formula_on_every_isa() {
    for isa in available() {
        for (precision, kv) in FORMATS {
            for case in sequences() {
                let whole = case.whole();
                let options = CpuOptions {
                    kv,
                    ..options(precision, isa, 2)
                };
                let outs = case.run(&options, &[whole]);
                for (sequence, out) in outs.iter().enumerate() {
                    let bound = match (precision, kv) {
                        (Precision::F32, KvType::F32) => 2e-5,
                        (Precision::F32, KvType::Int8PerTokenHead) => 1e-3,
                        // Queries and weights are rounded on the way, 8 bits each; and where a key
                        // is just between two numbers of eight bits, its last bit may take it to
                        // the other.
                        _ => 2e-2,
                    };
                    let label = format!("{isa} {precision:?} {kv:?} {:?}", case.heads);
                    let expected = case.expected(precision, kv, sequence);
                    assert_close(out, &expected, bound, &label);
                }
            }
        }
    }
}

#[test]
fn attention_is_bit_equal_in_any_chunks_and_thread_count() {
    for isa in available() {
        for (precision, kv) in FORMATS {
            for case in sequences() {
                let whole = case.whole();
                let options = |threads| CpuOptions {
                    kv,
                    ..options(precision, isa, threads)
                };
                let together = case.run(&options(1), &[whole]);
                // One after the other, in chunks that end anywhere, the last ones token by token.
                let mut steps = Vec::new();
                for (sequence, &tokens) in case.lengths.iter().enumerate() {
                    let mut from = 0;
                    let mut chunk = 1;
                    while from < tokens {
                        let size = if tokens - from <= 3 {
                            1
                        } else {
                            chunk.min(tokens - from - 3)
                        };
                        steps.push(vec![(sequence, from, from + size)]);
                        from += size;
                        chunk = chunk * 2 + 1;
                    }
                }
                for threads in [1, 3] {
                    let apart = case.run(&options(threads), &steps);
                    for (a, b) in together.iter().zip(&apart) {
                        assert!(
                            same_bits(a, b),
                            "{isa} {precision:?} {kv:?} {:?} on {threads} threads",
                            case.heads
                        );
                    }
                }
            }
        }
    }
}

/// A processor may continue another's sequence if their arithmetic has the same name.
#[test]
fn attention_is_bit_equal_on_isas_of_one_arithmetic() {
    for (precision, kv) in FORMATS {
        for case in sequences() {
            let whole = case.whole();
            let mut outs_by_arithmetic: Vec<(String, Vec<Vec<f32>>)> = Vec::new();
            for isa in available() {
                let options = CpuOptions {
                    kv,
                    ..options(precision, isa, 2)
                };
                let name = CpuOps::new(&options).unwrap().arithmetic();
                let outs = case.run(&options, std::slice::from_ref(&whole));
                match outs_by_arithmetic.iter().find(|(other, _)| *other == name) {
                    None => outs_by_arithmetic.push((name, outs)),
                    Some((_, others)) => {
                        for (a, b) in others.iter().zip(&outs) {
                            assert!(
                                same_bits(a, b),
                                "{isa} {precision:?} {kv:?} {:?}",
                                case.heads
                            );
                        }
                    }
                }
            }
        }
    }
}

/// A block's bytes after these rows of one sequence are stored in these chunks.
fn stored_block_bytes(
    precision: Precision,
    heads: HeadShape,
    chunks: &[usize],
    qkv: &[f32],
) -> Vec<u8> {
    let options = CpuOptions {
        kv: KvType::Int8PerTokenHead,
        ..options(precision, Isa::detect(), 1)
    };
    let mut ops = CpuOps::new(&options).unwrap();
    let shape = KvPoolShape::uniform(heads, 1, 16, 1, options.kv);
    let mut pool = ops.pool(shape.clone()).unwrap();
    let left = vec![0xff; shape.block_bytes()];
    let whole = shape.whole(KvPlane::Blocks, BlockIndex(0));
    ops.write_block(&mut pool, whole, &left).unwrap();
    let half = heads.head_dim / 2;
    let (cos, sin) = (vec![1.0; 16 * half], vec![0.0; 16 * half]);
    let (cos, sin) = (&cos, &sin);
    let rotary = CpuWeightLoader::new(&options)
        .rotary(RotaryTable {
            cos,
            sin,
            half,
            query_factors: &[],
        })
        .unwrap();
    let mut position = 0;
    for &rows in chunks {
        let batch = Batch {
            tokens: vec![0; rows],
            positions: (position as u32..).take(rows).collect(),
            blocks: vec![BlockIndex(0)],
            segments: vec![BatchSegment {
                rows: 0..rows,
                position,
                blocks: 0..1,
                state: None,
            }],
            ..Batch::default()
        };
        let width = heads.qkv_width();
        let values = &qkv[position * width..(position + rows) * width];
        let mut values = filled(&ops, rows, values);
        ops.begin(&batch, PassPurpose::Unspecified, &[]).unwrap();
        let (pool, layer) = (&mut pool, 0);
        ops.rotate_store(&batch, &rotary, &mut values, PoolLayer { pool, layer })
            .unwrap();
        position += rows;
    }
    let mut bytes = vec![0; shape.block_bytes()];
    ops.read_block(&pool, whole, &mut bytes).unwrap();
    bytes
}

/// Each head has its tokens' codes, then their scales. Bytes of other tokens stay unchanged, and no
/// byte depends on the tokens stored beside it.
#[test]
fn int8_codes_and_scale_depend_only_on_token_and_head() {
    const TOKENS: usize = 11;
    for (precision, heads) in [
        (Precision::Bf16, heads(2, 2, 32)),
        (Precision::F32, heads(2, 2, 32)),
        (Precision::Bf16, heads(4, 2, 6)),
    ] {
        let HeadShape {
            kv_heads, head_dim, ..
        } = heads;
        // Some tokens are a thousand times larger than others, and some are zero.
        let mut qkv = numbers(77, TOKENS * heads.qkv_width());
        for (token, row) in qkv.chunks_exact_mut(heads.qkv_width()).enumerate() {
            let size = [1.0, 1000.0, 1e-3, 0.0][token % 4];
            row.iter_mut().for_each(|x| *x *= size);
        }
        let bytes = stored_block_bytes(precision, heads, &[TOKENS], &qkv);
        let section = 16 * (head_dim + 4);
        assert_eq!(bytes.len(), 2 * kv_heads * section);
        for (index, section) in bytes.chunks_exact(section).enumerate() {
            let (codes, scales) = section.split_at(16 * head_dim);
            let left = codes.iter().filter(|code| **code == 0xff).count();
            assert!(
                left >= (16 - TOKENS) * head_dim,
                "{left} bytes as they were"
            );
            let mut found: Vec<i8> = codes.iter().map(|code| code.cast_signed()).collect();
            let mut expected = vec![-1; (16 - TOKENS) * head_dim];
            for token in 0..16 {
                let scale = &scales[4 * token..4 * token + 4];
                if token >= TOKENS {
                    assert_eq!(scale, [0xff; 4]);
                    continue;
                }
                let start = token * heads.qkv_width() + (heads.query_heads + index) * head_dim;
                let head = &qkv[start..start + head_dim];
                let scale = f32::from_le_bytes(scale.try_into().unwrap());
                if token % 4 == 3 {
                    expected.extend(vec![0; head_dim]);
                    assert!(scale.is_finite());
                    continue;
                }
                assert_eq!(scale, scale_of(head), "token {token} of section {index}");
                expected.extend(head.iter().map(|x| (x / scale).round_ties_even() as i8));
            }
            found.sort_unstable();
            expected.sort_unstable();
            // A number half-way between two codes may get either.
            let is_near = |(a, b): (&i8, &i8)| (i16::from(*a) - i16::from(*b)).abs() <= 1;
            assert!(found.iter().zip(&expected).all(is_near), "section {index}");
        }
        for chunks in [&[1; TOKENS][..], &[3, 7, 1]] {
            assert!(
                stored_block_bytes(precision, heads, chunks, &qkv) == bytes,
                "{chunks:?}"
            );
        }
    }
}

#[test]
fn blocks_are_read_written_and_copied_as_bytes() {
    let mut ops = CpuOps::new(&options(Precision::Bf16, Isa::detect(), 1)).unwrap();
    let shape = KvPoolShape::uniform(heads(1, 1, 16), 1, 2, 3, KvType::Bf16);
    let mut pool = ops.pool(shape.clone()).unwrap();
    let len = shape.block_bytes();
    let span = |block, offset, len| BlockSpan::of_block(BlockIndex(block), offset, len);
    let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
    ops.write_block(&mut pool, span(1, 5, len - 5), &bytes[5..])
        .unwrap();
    ops.write_block(&mut pool, span(1, 0, 5), &bytes[..5])
        .unwrap();
    ops.copy_block(&mut pool, KvPlane::Blocks, BlockIndex(1), BlockIndex(2))
        .unwrap();
    let mut read = vec![1; len];
    ops.read_block(&pool, span(0, 0, len), &mut read).unwrap();
    assert!(read.iter().all(|&b| b == 0), "a new pool is zero");
    ops.read_block(&pool, span(2, 3, len - 3), &mut read[3..])
        .unwrap();
    assert_eq!(read[3..], bytes[3..]);
}

#[test]
fn state_slots_and_blocks_share_no_byte() {
    let mut ops = CpuOps::new(&options(Precision::Bf16, Isa::detect(), 1)).unwrap();
    let mut shape = KvPoolShape::uniform(heads(1, 1, 16), 1, 1, 3, KvType::Bf16);
    shape.states = Some(StateCapacity {
        bytes: 37,
        count: 3,
    });
    let mut pool = ops.pool(shape.clone()).unwrap();
    let planes = [KvPlane::Blocks, KvPlane::State];
    let all = || {
        planes
            .into_iter()
            .flat_map(|plane| (0..3).map(move |index| (plane, index)))
    };
    for (plane, index) in all() {
        let span = shape.whole(plane, BlockIndex(index));
        let content = vec![1 + index as u8 + 3 * plane as u8; span.len];
        ops.write_block(&mut pool, span, &content).unwrap();
    }
    ops.copy_block(&mut pool, KvPlane::State, BlockIndex(0), BlockIndex(1))
        .unwrap();
    ops.clear_state(&mut pool, BlockIndex(2)).unwrap();
    let contents: Vec<u8> = all()
        .map(|(plane, index)| {
            let bytes = ops.host_block(&pool, plane, BlockIndex(index)).unwrap();
            assert!(
                bytes.iter().all(|byte| *byte == bytes[0]),
                "{plane} {index}"
            );
            bytes[0]
        })
        .collect();
    assert_eq!(contents, [1, 2, 3, 4, 4, 0]);
}
