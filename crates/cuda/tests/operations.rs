//! Tests of each operation against the CPU backend's, on the same numbers: odd sizes, one row,
//! partial blocks, windows, groups of every kind; in f32, and in bf16 from numbers that bf16 can
//! hold.

use crate::harness;
use cleave_checkpoint::e4m3;
use cleave_checkpoint::{ByteCodes, QuantizedTensor, QuantizedType, StoredMatrix, StoredTensor};
use cleave_cpu::{CpuOps, CpuOptions, CpuRows, CpuWeightLoader};
use cleave_cuda::{
    CudaOps, CudaOptions, CudaRows, CudaWeightLoader, MultiprocessorShare, SharePart,
};
use cleave_domain::{BlockIndex, KvPlane};
use cleave_engine::BlockSpan;
use cleave_engine::conformance;
use cleave_engine::ops::{
    Activation, Attention, AttentionIo, Batch, BatchSegment, BufferRole, DrawRule, FedRow, GatedIo,
    Head, HeadShape, KvPoolShape, KvType, LoadPlan, Norm, NormFormula, Ops, PassMode, PassPurpose,
    PoolLayer, Precision, QkNorms, ResidualIo, RotaryTable, WeightLoader,
};
use half::bf16;

/// A test's access to a device's buffers.
pub(crate) trait BufferAccess: Ops {
    fn set_rows(&self, rows: &mut Self::Rows, values: &[f32]);
    fn get_rows(&self, rows: &Self::Rows) -> Vec<f32>;
    /// Returns a block's elements in the order `[layer][K|V][kv_head][token][dim]`.
    fn in_rows(shape: &KvPoolShape, block: Vec<f32>) -> Vec<f32>;
}

impl BufferAccess for CpuOps {
    fn set_rows(&self, rows: &mut CpuRows, values: &[f32]) {
        rows.values_mut()[..values.len()].copy_from_slice(values);
    }
    fn get_rows(&self, rows: &CpuRows) -> Vec<f32> {
        rows.values().to_vec()
    }
    /// The CPU backend stores f32 keys as `[dim][token]` where both are multiples of a vector.
    fn in_rows(shape: &KvPoolShape, block: Vec<f32>) -> Vec<f32> {
        let (tokens, dim) = (shape.block_tokens, shape.uniform_heads().head_dim);
        if !tokens.is_multiple_of(16) || !dim.is_multiple_of(16) {
            return block;
        }
        let mut rows = block.clone();
        for (head, (rows, block)) in rows
            .chunks_exact_mut(tokens * dim)
            .zip(block.chunks_exact(tokens * dim))
            .enumerate()
        {
            if (head / shape.uniform_heads().kv_heads).is_multiple_of(2) {
                for (at, element) in rows.iter_mut().enumerate() {
                    *element = block[at % dim * tokens + at / dim];
                }
            }
        }
        rows
    }
}

impl BufferAccess for CudaOps {
    fn set_rows(&self, rows: &mut CudaRows, values: &[f32]) {
        self.set_values(rows, values).unwrap();
    }
    fn get_rows(&self, rows: &CudaRows) -> Vec<f32> {
        self.values(rows).unwrap()
    }
    fn in_rows(_: &KvPoolShape, block: Vec<f32>) -> Vec<f32> {
        block
    }
}

/// One of the two compared backends, and the precision of its numbers.
pub(crate) struct DeviceUnderTest<O: Ops> {
    pub(crate) ops: O,
    pub(crate) pack: O::Pack,
    pool: KvType,
}

/// Returns numbers in −1..1 that bf16 can hold, the same for the same seed.
pub(crate) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32()
        })
        .collect()
}

/// Returns the CPU backend in f32; its keys and values are f32 too, unless `kv` is fp8.
pub(crate) fn cpu(kv: KvType) -> DeviceUnderTest<CpuOps> {
    let kv = match kv {
        KvType::F32 | KvType::Bf16 => KvType::F32,
        KvType::Fp8E4m3 | KvType::Int8PerTokenHead => kv,
    };
    let options = CpuOptions {
        threads: 1,
        kv,
        ..CpuOptions::new(Precision::F32)
    };
    DeviceUnderTest {
        ops: CpuOps::new(&options).unwrap(),
        pack: CpuWeightLoader::new(&options),
        pool: kv,
    }
}

pub(crate) fn cuda(precision: Precision, kv: KvType) -> Option<DeviceUnderTest<CudaOps>> {
    let device = harness::device()?;
    let options = CudaOptions {
        kv,
        ..CudaOptions::new(precision)
    };
    let pack = CudaWeightLoader::new(&device, precision).unwrap();
    pack.reserve(&LoadPlan {
        matrix_elements: 8 << 20,
        vector_elements: 1 << 20,
        tensors_count: 256,
        ..LoadPlan::default()
    })
    .unwrap();
    Some(DeviceUnderTest {
        ops: CudaOps::new(&device, &options).unwrap(),
        pack,
        pool: kv,
    })
}

/// Returns the allowed difference of two numbers as a share of the largest one: one rounding to
/// bf16 costs 2^-9.
fn tolerance(precision: Precision) -> f32 {
    match precision {
        Precision::F32 => 2e-6,
        Precision::Bf16 => 6e-3,
    }
}

#[track_caller]
fn assert_same(label: &str, precision: Precision, got: &[f32], want: &[f32]) {
    let label = format!("{label}, {}", precision.name());
    assert_near(&label, tolerance(precision), got, want);
}

#[track_caller]
pub(crate) fn assert_near(label: &str, tolerance: f32, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{label}");
    let scale = want.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs() / scale;
        assert!(
            error <= tolerance,
            "{label}: element {at} is {got}, not {want}"
        );
    }
}

impl<O: BufferAccess> DeviceUnderTest<O> {
    pub(crate) fn rows(&self, values: &[f32], width: usize, holds: BufferRole) -> O::Rows {
        let count = values.len() / width;
        let mut rows = self.ops.rows(count, width, holds).unwrap();
        self.ops.set_rows(&mut rows, values);
        rows
    }

    /// Begins a pass of this many rows.
    pub(crate) fn begin_rows(&mut self, rows: usize) {
        let batch = Batch {
            tokens: vec![0; rows],
            ..Batch::default()
        };
        self.ops
            .begin(&batch, PassPurpose::Unspecified, &[])
            .unwrap();
    }

    fn tensor(name: &str, rows: usize, columns: usize, seed: u64) -> StoredTensor {
        StoredTensor::from_f32(name, rows, columns, &numbers(seed, rows * columns))
    }

    fn embed(&mut self, rows: usize, width: usize) -> Vec<f32> {
        let table = self
            .pack
            .table(&Self::tensor("table", 50, width, 1))
            .unwrap();
        self.pack.finish().unwrap();
        let batch = Batch {
            tokens: (0..rows as u32).map(|row| row * 7 % 50).collect(),
            ..Batch::default()
        };
        let mut out = self.ops.rows(rows, width, BufferRole::Residual).unwrap();
        self.ops
            .begin(&batch, PassPurpose::Unspecified, &[])
            .unwrap();
        self.ops.embed(&batch, &table, 1.0, &mut out).unwrap();
        self.ops.get_rows(&out)
    }

    /// LayerNorm of a stream far from zero, and the sum before it.
    fn layer_norm(&mut self, rows: usize, width: usize) -> [Vec<f32>; 3] {
        let weight = self.pack.vector(&numbers(2, width)).unwrap();
        self.pack.finish().unwrap();
        let norm = Norm {
            formula: NormFormula::LayerNorm,
            weight: &weight,
            epsilon: 1e-5,
        };
        let values: Vec<f32> = (numbers(3, rows * width).iter()).map(|x| x + 4.0).collect();
        let mut residual = self.rows(&values, width, BufferRole::Residual);
        let delta = self.rows(&numbers(4, rows * width), width, BufferRole::Activations);
        self.ops.add(rows, &delta, &mut residual).unwrap();
        let sum = self.ops.get_rows(&residual);
        let mut out = self.rows(&vec![0.0; rows * width], width, BufferRole::Activations);
        self.ops.norm(&norm, rows, &residual, &mut out).unwrap();
        let plain = self.ops.get_rows(&out);
        let from = ResidualIo {
            residual: &mut residual,
            delta: &delta,
        };
        self.ops.add_norm(&norm, rows, from, &mut out).unwrap();
        [sum, plain, self.ops.get_rows(&out)]
    }

    fn norms(&mut self, rows: usize, width: usize) -> [Vec<f32>; 5] {
        let weight = self.pack.vector(&numbers(2, width)).unwrap();
        self.pack.finish().unwrap();
        let norm = Norm {
            formula: NormFormula::RmsNorm,
            weight: &weight,
            epsilon: 1e-5,
        };
        let mut residual = self.rows(&numbers(3, rows * width), width, BufferRole::Residual);
        let delta = self.rows(&numbers(4, rows * width), width, BufferRole::Activations);
        let mut out = self.rows(&vec![0.0; rows * width], width, BufferRole::Activations);
        self.ops.norm(&norm, rows, &residual, &mut out).unwrap();
        let plain = self.ops.get_rows(&out);
        let sum = ResidualIo {
            residual: &mut residual,
            delta: &delta,
        };
        self.ops.add_norm(&norm, rows, sum, &mut out).unwrap();
        let (sum, after_sum) = (self.ops.get_rows(&residual), self.ops.get_rows(&out));
        let mut delta = delta;
        self.ops
            .norm_add(&norm, rows, &mut delta, &mut residual)
            .unwrap();
        let input = self.ops.activations(rows, &residual, &mut out).unwrap();
        let input = self.ops.get_rows(input);
        [plain, sum, after_sum, self.ops.get_rows(&residual), input]
    }

    /// Normalises all query heads of a row together, and all key heads.
    fn projection_norm(&mut self, heads: HeadShape, rows: usize) -> Vec<f32> {
        let key_width = heads.kv_heads * heads.head_dim;
        let query = self.pack.vector(&numbers(14, heads.query_width())).unwrap();
        let key = self.pack.vector(&numbers(15, key_width)).unwrap();
        self.pack.finish().unwrap();
        let width = heads.qkv_width();
        let mut qkv = self.rows(&numbers(16, rows * width), width, BufferRole::Activations);
        let norms = QkNorms {
            query: &query,
            key: &key,
            epsilon: 1e-6,
        };
        self.ops.qk_norm(&norms, heads, rows, &mut qkv).unwrap();
        self.ops.get_rows(&qkv)
    }

    fn matmul(&mut self, rows: usize, width: usize, columns: usize, bias: bool) -> Vec<f32> {
        let parts = [columns / 3, columns - columns / 3];
        let stack: Vec<StoredMatrix> = parts
            .iter()
            .filter(|part| **part > 0)
            .map(|part| Self::tensor("part", *part, width, *part as u64).into())
            .collect();
        let bias = bias.then(|| numbers(9, columns));
        let matrix = self.pack.matrix(&stack, bias.as_deref()).unwrap();
        self.pack.finish().unwrap();
        self.product(&matrix, rows, width, columns)
    }

    /// Computes a product of numbers that depend on the row alone; returns the result, and the same
    /// as logits.
    fn product(
        &mut self,
        matrix: &<O::Pack as WeightLoader>::Matrix,
        rows: usize,
        width: usize,
        columns: usize,
    ) -> Vec<f32> {
        let x = self.rows(&numbers(5, rows * width), width, BufferRole::Activations);
        let mut out = self
            .ops
            .rows(rows, columns, BufferRole::Activations)
            .unwrap();
        self.ops.matmul(matrix, rows, &x, &mut out).unwrap();
        let mut logits = vec![0.0; rows * columns];
        let head = Head::uncapped(matrix);
        self.ops.logits(head, rows, &x, &mut logits).unwrap();
        let mut both = self.ops.get_rows(&out);
        both.extend(logits);
        both
    }

    fn gate_and_gather(&mut self, rows: usize, width: usize) -> [Vec<f32>; 2] {
        // Every row of the left side selects a column of the matrix, whose numbers then go through
        // the gate unchanged.
        const PICKS: usize = 8;
        let weights: Vec<f32> = numbers(6, 2 * width * PICKS)
            .iter()
            .map(|x| x * 8.0)
            .collect();
        let stored = StoredTensor::from_f32("gate", 2 * width, PICKS, &weights);
        let matrix = self.pack.gate_up(&[stored.into()], None).unwrap();
        self.pack.finish().unwrap();
        let picks: Vec<f32> = (0..rows * PICKS)
            .map(|at| f32::from(u8::from(at % PICKS == at / PICKS % PICKS)))
            .collect();
        let x = self.rows(&picks, PICKS, BufferRole::Activations);
        let mut gate_up = self.rows(
            &vec![0.0; rows * 2 * width],
            2 * width,
            BufferRole::Activations,
        );
        let mut out = self.rows(&vec![0.0; rows * width], width, BufferRole::Activations);
        let gated = GatedIo {
            activation: Activation::Silu,
            gate_up: &mut gate_up,
            out: &mut out,
        };
        self.ops.gated(&matrix, rows, &x, gated).unwrap();
        let gated = self.ops.get_rows(&out);
        let indices: Vec<u32> = (0..rows as u32).rev().step_by(2).collect();
        let mut picked = self.ops.rows(rows, width, BufferRole::Activations).unwrap();
        self.ops.gather(&indices, &out, &mut picked).unwrap();
        [
            gated,
            self.ops.get_rows(&picked)[..indices.len() * width].to_vec(),
        ]
    }

    /// Runs queries, keys and values of several sequences through norm, rotation, pool and
    /// attention: first everything before each segment in chunks, then the segments. Returns the
    /// answers and a block that was read back.
    fn attention(&mut self, case: &DeviceAttentionCase) -> [Vec<f32>; 2] {
        let DeviceAttentionCase {
            heads,
            block_tokens,
            segments,
            window,
            soft_cap,
            has_sinks: _,
        } = case;
        let sinks = case.sinks().map(|sinks| self.pack.vector(&sinks).unwrap());
        let width = heads.qkv_width();
        let tables = case.tables();
        let shape = KvPoolShape::uniform(
            *heads,
            2,
            *block_tokens,
            tables.iter().map(Vec::len).sum::<usize>() + 1,
            self.pool,
        );
        let mut pool = self.ops.pool(shape.clone()).unwrap();
        let longest = segments
            .iter()
            .map(|(position, rows)| position + rows)
            .max()
            .unwrap();
        let half = heads.head_dim / 2;
        let angles: Vec<f32> = (0..longest * half)
            .map(|at| (at % 97) as f32 * 0.07)
            .collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let rotary = self
            .pack
            .rotary(RotaryTable {
                cos: &cos,
                sin: &sin,
                half,
                query_factors: &[],
            })
            .unwrap();
        let query = self.pack.vector(&numbers(12, heads.head_dim)).unwrap();
        let key = self.pack.vector(&numbers(13, heads.head_dim)).unwrap();
        self.pack.finish().unwrap();
        let before: Vec<(usize, usize)> = segments
            .iter()
            .map(|(position, _)| (0, *position))
            .collect();
        let mut last = Vec::new();
        for (turn, parts) in [before, segments.clone()].iter().enumerate() {
            let batch = case.batch(parts, &tables);
            let rows = batch.rows_count();
            if rows == 0 {
                continue;
            }
            let mut out = self
                .ops
                .rows(rows, heads.query_width(), BufferRole::Activations)
                .unwrap();
            self.ops
                .begin(&batch, PassPurpose::Unspecified, &[])
                .unwrap();
            for layer in [1, 0] {
                let mut qkv = self.rows(
                    &numbers(20 + 2 * turn as u64 + layer as u64, rows * width),
                    width,
                    BufferRole::Activations,
                );
                let norms = QkNorms {
                    query: &query,
                    key: &key,
                    epsilon: 1e-6,
                };
                self.ops.qk_norm(&norms, *heads, rows, &mut qkv).unwrap();
                let target = PoolLayer {
                    pool: &mut pool,
                    layer,
                };
                self.ops
                    .rotate_store(&batch, &rotary, &mut qkv, target)
                    .unwrap();
                let attention = Attention {
                    layer,
                    scale: 1.0 / (heads.head_dim as f32).sqrt(),
                    soft_cap: *soft_cap,
                    window: *window,
                };
                let io = AttentionIo {
                    qkv: &qkv,
                    pool: &pool,
                    sinks: sinks.as_ref(),
                    out: &mut out,
                };
                self.ops.attend(&batch, &attention, io).unwrap();
                last.extend(self.ops.get_rows(&out));
            }
        }
        let mut bytes = vec![0; shape.block_bytes()];
        let block = tables[0][0];
        let whole = |block| shape.whole(KvPlane::Blocks, block);
        self.ops
            .read_block(&pool, whole(block), &mut bytes)
            .unwrap();
        let spare = BlockIndex(shape.blocks_count as u32 - 1);
        self.ops
            .copy_block(&mut pool, KvPlane::Blocks, block, spare)
            .unwrap();
        let mut copied = vec![0; shape.block_bytes()];
        self.ops
            .read_block(&pool, whole(spare), &mut copied)
            .unwrap();
        assert_eq!(copied, bytes, "a copied block");
        let (head, tail) = bytes.split_at(bytes.len() / 3);
        let changed: Vec<u8> = tail.iter().map(|byte| byte ^ 0x55).collect();
        let end = BlockSpan::of_block(spare, head.len(), tail.len());
        self.ops.write_block(&mut pool, end, &changed).unwrap();
        let mut again = vec![0; tail.len()];
        self.ops.read_block(&pool, end, &mut again).unwrap();
        assert_eq!(again, changed, "a written block");
        [last, O::in_rows(&shape, self.elements(&bytes))]
    }

    /// Returns a block's bytes as numbers.
    fn elements(&self, bytes: &[u8]) -> Vec<f32> {
        match self.pool {
            KvType::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            KvType::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            KvType::Fp8E4m3 => bytes.iter().map(|bits| e4m3::to_f32(*bits)).collect(),
            KvType::Int8PerTokenHead => unreachable!("a GPU has none"),
        }
    }
}

/// Sequences that attend in one batch, `(position, rows)` each.
struct DeviceAttentionCase {
    heads: HeadShape,
    block_tokens: usize,
    segments: Vec<(usize, usize)>,
    window: Option<usize>,
    soft_cap: Option<f32>,
    has_sinks: bool,
}

impl DeviceAttentionCase {
    /// A score of each query head, of all sizes, if the case has sinks.
    fn sinks(&self) -> Option<Vec<f32>> {
        let sinks = (0..self.heads.query_heads).map(|head| [1.5, -4.0, 0.25, 40.0][head % 4]);
        self.has_sinks.then(|| sinks.collect())
    }

    /// Returns the block tables of all sequences, with shuffled blocks.
    fn tables(&self) -> Vec<Vec<BlockIndex>> {
        let needed =
            |(position, rows): &(usize, usize)| (position + rows).div_ceil(self.block_tokens);
        let count: usize = self.segments.iter().map(needed).sum();
        let stride = (1..=count)
            .rev()
            .find(|step| gcd(*step, count) == 1 && *step <= count * 2 / 3 + 1);
        let mut blocks = (0..count).map(|at| BlockIndex((at * stride.unwrap() % count) as u32));
        let table = |segment| blocks.by_ref().take(needed(segment)).collect();
        self.segments.iter().map(table).collect()
    }

    fn batch(&self, parts: &[(usize, usize)], tables: &[Vec<BlockIndex>]) -> Batch {
        let mut batch = Batch::default();
        for ((position, rows), table) in parts.iter().zip(tables) {
            if *rows == 0 {
                continue;
            }
            let (first, block) = (batch.tokens.len(), batch.blocks.len());
            batch.tokens.extend((0..*rows).map(|_| 0));
            batch
                .positions
                .extend((*position..position + rows).map(|p| p as u32));
            batch
                .blocks
                .extend(&table[..(position + rows).div_ceil(self.block_tokens)]);
            batch.segments.push(BatchSegment {
                rows: first..first + rows,
                position: *position,
                blocks: block..batch.blocks.len(),
                state: None,
            });
        }
        batch
    }
}

fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];

#[test]
fn norms_of_whole_projections_match_the_cpu_backend() {
    let shapes = [(4, 2, 64), (3, 1, 13), (32, 8, 128), (5, 5, 8)];
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(mut gpu) = cuda(precision, precision.into()) else {
            return;
        };
        let mut cpu = cpu(precision.into());
        for (query_heads, kv_heads, head_dim) in shapes {
            let heads = HeadShape {
                query_heads,
                kv_heads,
                head_dim,
            };
            for rows in [1, 3] {
                let (got, want) = (
                    gpu.projection_norm(heads, rows),
                    cpu.projection_norm(heads, rows),
                );
                assert_same("norms of projections", precision, &got, &want);
            }
        }
    }
}

#[test]
fn row_operations_match_the_cpu() {
    for precision in PRECISIONS {
        let Some(mut gpu) = cuda(precision, precision.into()) else {
            return;
        };
        let mut cpu = cpu(KvType::F32);
        for (rows, width) in [(1, 8), (3, 40), (17, 96), (2, 130), (5, 1), (4, 2056)] {
            assert_same(
                "embed",
                Precision::F32,
                &gpu.embed(rows, width),
                &cpu.embed(rows, width),
            );
            let (got, want) = (gpu.norms(rows, width), cpu.norms(rows, width));
            assert_same("norm", precision, &got[0], &want[0]);
            assert_same("residual", Precision::F32, &got[1], &want[1]);
            assert_same("norm of a sum", precision, &got[2], &want[2]);
            assert_same("sum of a norm", Precision::F32, &got[3], &want[3]);
            assert_same("input without a norm", precision, &got[4], &want[4]);
            let (got, want) = (gpu.layer_norm(rows, width), cpu.layer_norm(rows, width));
            assert_same("sum", Precision::F32, &got[0], &want[0]);
            assert_same("LayerNorm", precision, &got[1], &want[1]);
            assert_same("LayerNorm of a sum", precision, &got[2], &want[2]);
            let (got, want) = (
                gpu.gate_and_gather(rows, width),
                cpu.gate_and_gather(rows, width),
            );
            assert_same("gate", precision, &got[0], &want[0]);
            assert_same("gather", precision, &got[1], &want[1]);
        }
    }
}

#[test]
fn matrix_products_match_the_cpu() {
    for precision in PRECISIONS {
        let Some(mut gpu) = cuda(precision, precision.into()) else {
            return;
        };
        let mut cpu = cpu(KvType::F32);
        let mut shapes = vec![
            (1, 8, 1),
            (1, 64, 64),
            (2, 40, 3),
            (5, 130, 65),
            (8, 1024, 70),
            (9, 200, 129),
        ];
        shapes.extend([
            (33, 256, 130),
            (65, 72, 200),
            (130, 136, 257),
            (600, 16, 20),
            (520, 1096, 130),
        ]);
        for (rows, width, columns) in shapes {
            for bias in [false, true] {
                let label = format!("({rows}, {width}, {columns}), bias {bias}");
                assert_same(
                    &label,
                    precision,
                    &gpu.matmul(rows, width, columns, bias),
                    &cpu.matmul(rows, width, columns, bias),
                );
            }
        }
    }
}

/// The format and shape of a quantised weight.
#[derive(Clone, Copy, Debug)]
struct QuantisedCase {
    element: QuantizedType,
    /// Columns that share a scale.
    group: usize,
    /// Rows, width and columns of the product.
    shape: (usize, usize, usize),
    /// Whether a kernel takes this format and shape.
    has_kernel: bool,
}

impl QuantisedCase {
    /// Returns a stack of two tensors with codes of all kinds, each with its own scales.
    fn stack(&self) -> Vec<StoredMatrix> {
        let (_, width, columns) = self.shape;
        let parts = [columns / 3, columns - columns / 3];
        let tensor = |(seed, rows): (u64, usize)| {
            let groups = width.div_ceil(self.group);
            let bytes = |seed: u64, count: usize| {
                let numbers = numbers(seed, count).into_iter();
                numbers.map(|x| ((x + 1.0) * 127.9) as u8)
            };
            let code = |code: u8| match self.element {
                // The two NaN codes are replaced.
                QuantizedType::E4m3 if code & 0x7f == 0x7f => 0x7e,
                QuantizedType::E4m3 | QuantizedType::Int8 => code,
                QuantizedType::Int4 | QuantizedType::E2m1 => code & 15,
            };
            let codes: Vec<u8> = bytes(seed, rows * width).map(code).collect();
            let scales: Vec<f32> = numbers(seed + 1, rows * groups)
                .iter()
                .map(|x| half::f16::from_f32(0.01 + x.abs() / 50.0).to_f32())
                .collect();
            // No kernel takes int8 with zero points.
            let zero_max = match (self.element, self.has_kernel) {
                (QuantizedType::Int8, true) | (QuantizedType::E2m1, _) => 0,
                _ => 15,
            };
            let zeros: Vec<u8> = bytes(seed + 2, rows * groups)
                .map(|x| x & zero_max)
                .collect();
            let coded = ByteCodes {
                element: self.element,
                codes: &codes,
                group: self.group,
                scales: &scales,
                zeros: &zeros,
            };
            QuantizedTensor::from_codes("part", rows, width, &coded).into()
        };
        let parts = (40..).step_by(10).zip(parts);
        parts.filter(|(_, rows)| *rows > 0).map(tensor).collect()
    }
}

fn quantised(element: QuantizedType, group: usize, shape: (usize, usize, usize)) -> QuantisedCase {
    QuantisedCase {
        element,
        group,
        shape,
        has_kernel: true,
    }
}

/// The cases cover each format with one row and with many, few columns and more than a tile, groups
/// of every size, and several spans.
#[test]
fn quantised_matrix_products_match_the_cpu() {
    use QuantizedType::{E2m1, E4m3, Int4, Int8};
    let widened = |of: QuantisedCase| QuantisedCase {
        has_kernel: false,
        ..of
    };
    let cases = [
        quantised(E4m3, 1 << 20, (1, 16, 1)),
        quantised(E4m3, 1 << 20, (9, 272, 130)),
        quantised(E4m3, 1 << 20, (70, 1040, 65)),
        quantised(E4m3, 32, (3, 96, 5)),
        quantised(E4m3, 128, (17, 640, 129)),
        quantised(E4m3, 256, (33, 512, 66)),
        quantised(Int8, 1 << 20, (8, 176, 70)),
        quantised(Int8, 1 << 20, (65, 528, 20)),
        quantised(Int4, 32, (1, 32, 3)),
        quantised(Int4, 32, (11, 352, 129)),
        quantised(Int4, 64, (32, 1088, 67)),
        quantised(Int4, 128, (129, 640, 130)),
        quantised(Int4, 1 << 20, (2, 96, 8)),
        quantised(E2m1, 32, (1, 32, 3)),
        quantised(E2m1, 32, (17, 352, 129)),
        quantised(E2m1, 64, (70, 640, 66)),
        quantised(E2m1, 16, (1, 64, 5)),
        quantised(E2m1, 16, (11, 352, 129)),
        quantised(E2m1, 16, (32, 640, 67)),
        quantised(E2m1, 16, (129, 288, 130)),
        // No kernel takes the next cases: widths and groups that are no multiples, and int8 in
        // groups or with zero points.
        widened(quantised(E4m3, 1 << 20, (2, 40, 9))),
        widened(quantised(Int4, 24, (2, 96, 9))),
        widened(quantised(Int4, 32, (5, 112, 9))),
        widened(quantised(Int8, 32, (5, 64, 9))),
        widened(quantised(E2m1, 16, (3, 48, 9))),
        widened(quantised(Int8, 1 << 20, (5, 64, 9))),
    ];
    let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
        return;
    };
    let mut cpu = cpu(KvType::F32);
    for case in cases {
        let stack = case.stack();
        let (rows, width, columns) = case.shape;
        for bias in [None, Some(numbers(9, columns))] {
            let matrix = gpu.pack.matrix(&stack, bias.as_deref()).unwrap();
            gpu.pack.finish().unwrap();
            assert_eq!(matrix.is_quantized(), case.has_kernel, "{case:?}");
            let got = gpu.product(&matrix, rows, width, columns);
            let matrix = cpu.pack.matrix(&stack, bias.as_deref()).unwrap();
            let want = cpu.product(&matrix, rows, width, columns);
            let (got_logits, want_logits) = (&got[got.len() / 2..], &want[want.len() / 2..]);
            assert_same(&format!("{case:?}"), Precision::Bf16, &got, &want);
            if case.has_kernel {
                // Only sums are rounded: codes, f16 scales and these rows are exact.
                assert_near(
                    &format!("logits of {case:?}"),
                    2e-5,
                    got_logits,
                    want_logits,
                );
            }
        }
    }
}

/// The number of rows decides the kernel, and a row gives the same bits from each of them.
#[test]
fn quantised_rows_are_bit_equal_beside_any_number_of_rows() {
    use QuantizedType::{E2m1, E4m3, Int4, Int8};
    let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
        return;
    };
    let (width, columns) = (640, 140);
    let whole = 1 << 20;
    for (element, group) in [
        (E4m3, whole),
        (E4m3, 128),
        (Int8, whole),
        (Int4, 64),
        (E2m1, 32),
        (E2m1, 16),
    ] {
        let case = quantised(element, group, (70, width, columns));
        let matrix = gpu.pack.matrix(&case.stack(), None).unwrap();
        gpu.pack.finish().unwrap();
        assert!(matrix.is_quantized());
        let all = gpu.product(&matrix, 70, width, columns);
        let logits = &all[70 * columns..];
        for rows in [1, 9, 17, 33] {
            let some = gpu.product(&matrix, rows, width, columns);
            assert!(
                some[..rows * columns] == all[..rows * columns],
                "{case:?}, {rows} rows"
            );
            assert!(
                some[rows * columns..] == logits[..rows * columns],
                "{case:?}, {rows} rows"
            );
        }
    }
}

/// The cases cover every kernel: those for few rows, which distribute spans over thread blocks,
/// those for many rows, and wgmma on Hopper.
#[test]
fn rows_are_bit_equal_beside_any_number_of_rows() {
    let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
        return;
    };
    // A real device's wgmma may round differently from mma, and then must not be used.
    let is_hopper = gpu.ops.hardware().facts().capability.0 == 9;
    let is_used = gpu.ops.device().contains("wgmma");
    assert!(
        is_used == is_hopper || harness::is_real(),
        "the stand-in's steps are the same"
    );
    let (width, columns) = (1096, 130);
    // The second half of the result is in f32.
    let mut sums = |rows: usize| {
        let both = gpu.matmul(rows, width, columns, true);
        let of_row = both[rows * columns..].iter().map(|sum| sum.to_bits());
        of_row.collect::<Vec<u32>>()
    };
    let all = sums(530);
    for rows in [1, 8, 9, 31, 33, 65, 128] {
        let some = sums(rows);
        assert_eq!(some, all[..some.len()], "{rows} of 530 rows");
    }
}

fn heads(query_heads: usize, kv_heads: usize, head_dim: usize) -> HeadShape {
    HeadShape {
        query_heads,
        kv_heads,
        head_dim,
    }
}

#[test]
fn attention_matches_the_cpu() {
    let case = |heads, block_tokens, segments: &[(usize, usize)], window| DeviceAttentionCase {
        heads,
        block_tokens,
        segments: segments.to_vec(),
        window,
        soft_cap: None,
        has_sinks: false,
    };
    let capped = |case: DeviceAttentionCase, cap| DeviceAttentionCase {
        soft_cap: Some(cap),
        ..case
    };
    let with_sinks = |case| DeviceAttentionCase {
        has_sinks: true,
        ..case
    };
    let cases = [
        case(heads(1, 1, 64), 16, &[(0, 1)], None),
        case(
            heads(4, 1, 64),
            16,
            &[(0, 5), (17, 1), (64, 1), (63, 3)],
            None,
        ),
        case(heads(6, 2, 128), 16, &[(33, 1), (0, 40), (15, 2)], None),
        case(heads(8, 8, 80), 8, &[(9, 1), (3, 20)], Some(7)),
        case(heads(8, 1, 96), 32, &[(70, 1), (0, 3)], Some(33)),
        case(heads(2, 1, 256), 16, &[(20, 1), (0, 18)], None),
        case(heads(4, 2, 64), 64, &[(1100, 1), (530, 9)], None),
        case(heads(4, 2, 64), 16, &[(1100, 1), (500, 30)], Some(600)),
        // Tensor cores do not take the next shapes.
        case(heads(3, 3, 24), 16, &[(18, 2), (0, 1)], None),
        case(heads(4, 2, 64), 12, &[(30, 3), (0, 13)], Some(9)),
        // Caps below the largest scores, of all kernels.
        capped(case(heads(4, 2, 64), 16, &[(70, 1), (3, 40)], None), 0.4),
        capped(
            case(heads(2, 1, 128), 16, &[(33, 1), (0, 9)], Some(20)),
            0.3,
        ),
        capped(case(heads(2, 1, 256), 16, &[(20, 1), (0, 40)], None), 0.2),
        capped(case(heads(3, 3, 24), 16, &[(18, 2), (0, 1)], None), 0.5),
        // Sinks, in kernels for few rows and for many, with spans of several blocks, and plain.
        with_sinks(case(heads(8, 2, 64), 16, &[(1100, 1), (20, 30)], None)),
        with_sinks(case(heads(4, 2, 64), 16, &[(70, 1), (3, 40)], Some(20))),
        with_sinks(case(heads(6, 3, 24), 16, &[(18, 2), (0, 1)], None)),
    ];
    let formats = [
        (Precision::F32, KvType::F32),
        (Precision::Bf16, KvType::Bf16),
        (Precision::Bf16, KvType::Fp8E4m3),
    ];
    for (precision, kv) in formats {
        for (number, case) in cases.iter().enumerate() {
            let Some(mut gpu) = cuda(precision, kv) else {
                return;
            };
            let (got, want) = (gpu.attention(case), cpu(kv).attention(case));
            // The GPU computes keys in bf16 and the CPU in f32, so that one key in thirty is
            // rounded to a neighbour in fp8, a sixteenth away. That is an eighth for a single key,
            // and little for a score, which sums many.
            let (answers, keys) = match kv {
                KvType::F32 | KvType::Bf16 => (tolerance(precision), tolerance(precision)),
                KvType::Fp8E4m3 => (3e-2, 0.13),
                KvType::Int8PerTokenHead => unreachable!("a GPU has none"),
            };
            let label = format!("case {number}, {}", kv.name());
            assert_near(&label, answers, &got[0], &want[0]);
            assert_near(&format!("block of {label}"), keys, &got[1], &want[1]);
            // Values are stored without rotation.
            let heads = case.heads;
            let each = heads.kv_heads * case.block_tokens * heads.head_dim;
            if kv == KvType::Fp8E4m3 {
                assert_eq!(got[1][each..2 * each], want[1][each..2 * each], "{label}");
            }
        }
    }
}

/// On compute capabilities 8.6, 8.9 and 12.0 tiles of the usual size do not fit a thread block.
#[test]
fn heads_of_256_run_with_99_kib_of_shared_memory() {
    let name = "operations::heads_of_256_run_with_99_kib_of_shared_memory";
    if !harness::has_stand_in_settings(name, &[("CLEAVE_STANDIN_CAPABILITY", "8.6")]) {
        return;
    }
    let case = |segments: &[(usize, usize)], window| DeviceAttentionCase {
        heads: heads(2, 1, 256),
        block_tokens: 16,
        segments: segments.to_vec(),
        window,
        soft_cap: None,
        has_sinks: false,
    };
    let cases = [
        case(&[(20, 1), (0, 18)], None),
        case(&[(1100, 1), (530, 40)], Some(600)),
    ];
    for kv in [KvType::Bf16, KvType::Fp8E4m3] {
        for (number, case) in cases.iter().enumerate() {
            let mut gpu = cuda(Precision::Bf16, kv).expect("a stand-in");
            assert_eq!(gpu.ops.hardware().facts().shared_bytes_max, 99 << 10);
            let (got, want) = (gpu.attention(case), cpu(kv).attention(case));
            let label = format!("case {number}, {}", kv.name());
            assert_near(&label, 3e-2, &got[0], &want[0]);
        }
    }
}

/// A recorded step is replayed for other batches, so its grid must suffice for the longest. A group
/// of 32 heads has more rows than a tile of the kernel for decode steps.
#[test]
fn recorded_decode_steps_fill_the_device() {
    // The test counts launches, so it runs in a process of its own.
    let name = "operations::recorded_decode_steps_fill_the_device";
    if !harness::has_stand_in_settings(name, &[("CLEAVE_STANDIN_MULTIPROCESSORS", "4")]) {
        return;
    }
    let stand_in = harness::stand_in().expect("it has settings");
    for group in [4, 32] {
        let mut gpu = cuda(Precision::Bf16, KvType::Bf16).expect("a stand-in");
        let shape = KvPoolShape::uniform(heads(group, 1, 64), 1, 16, 80, KvType::Bf16);
        let pool = gpu.ops.pool(shape.clone()).unwrap();
        let head = StoredTensor::from_f32("head", 8, group * 64, &numbers(3, 8 * group * 64));
        let head = gpu.pack.matrix(&[head.into()], None).unwrap();
        let head = Head::uncapped(&head);
        gpu.pack.finish().unwrap();
        let activations =
            |ops: &CudaOps, width| ops.rows(1, width, BufferRole::Activations).unwrap();
        let qkv = activations(&gpu.ops, shape.uniform_heads().qkv_width());
        let mut out = activations(&gpu.ops, shape.uniform_heads().query_width());
        let attention = Attention {
            layer: 0,
            window: None,
            scale: 0.1,
            soft_cap: None,
        };
        let rule = Some(DrawRule::greedy());
        // The longest batch comes first, so that the workspace has its size. Some steps warm up,
        // one is recorded, the others are replayed.
        let mut recorded = Vec::new();
        for position in [1270, 1271, 1272, 3, 1273] {
            let batch = Batch {
                tokens: vec![0],
                positions: vec![position],
                segments: vec![BatchSegment {
                    rows: 0..1,
                    position: position as usize,
                    blocks: 0..80,
                    state: None,
                }],
                blocks: (0..80).map(BlockIndex).collect(),
                ..Batch::default()
            };
            let before = (
                stand_in.calls_count("block"),
                stand_in.calls_count("graph_launch"),
            );
            let purpose = PassPurpose::DrawEveryRow(std::slice::from_ref(&rule));
            if gpu.ops.begin(&batch, purpose, &[]).unwrap() == PassMode::Execute {
                let io = AttentionIo {
                    qkv: &qkv,
                    pool: &pool,
                    sinks: None,
                    out: &mut out,
                };
                gpu.ops.attend(&batch, &attention, io).unwrap();
            }
            gpu.ops
                .queue_draw(head, std::slice::from_ref(&rule), &out)
                .unwrap();
            gpu.ops.fetch_drawn(&mut Vec::new()).unwrap();
            if stand_in.calls_count("graph_launch") > before.1 {
                recorded.push(stand_in.calls_count("block") - before.0);
            }
        }
        assert!(recorded.len() >= 2, "group {group}: nothing was recorded");
        // Each of the stand-in's four multiprocessors holds two or three thread blocks of
        // attention; the other kernels' grids are small.
        assert!(
            recorded.iter().all(|blocks| *blocks >= 4 * 2),
            "{recorded:?}"
        );
        assert!(
            recorded.iter().all(|blocks| *blocks == recorded[0]),
            "{recorded:?}"
        );
    }
}

/// Further thread blocks would wait until the others end, which is at the kernel's end.
#[test]
fn a_grid_uses_only_the_multiprocessors_of_its_share() {
    // The test counts launches, so it runs in a process of its own.
    let name = "operations::a_grid_uses_only_the_multiprocessors_of_its_share";
    if !harness::has_stand_in_settings(name, &[("CLEAVE_STANDIN_MULTIPROCESSORS", "4")]) {
        return;
    }
    let stand_in = harness::stand_in().expect("it has settings");
    let blocks = |rows, columns, share| {
        let device = harness::device().expect("a stand-in");
        let options = CudaOptions {
            share,
            ..CudaOptions::new(Precision::Bf16)
        };
        let DeviceUnderTest { pack, .. } = cuda(Precision::Bf16, KvType::Bf16).expect("a stand-in");
        let mut ops = CudaOps::new(&device, &options).unwrap();
        assert_eq!(
            ops.device_id().is_some(),
            share.is_none(),
            "whose GPU it is"
        );
        let width = 64;
        let stored = StoredTensor::from_f32("w", columns, width, &numbers(5, columns * width));
        let matrix = pack.matrix(&[stored.into()], None).unwrap();
        pack.finish().unwrap();
        let x = ops.rows(rows, width, BufferRole::Activations).unwrap();
        let mut out = ops.rows(rows, columns, BufferRole::Activations).unwrap();
        ops.begin(&Batch::default(), PassPurpose::Unspecified, &[])
            .unwrap();
        ops.get_rows(&out);
        let before = stand_in.calls_count("block");
        ops.matmul(&matrix, rows, &x, &mut out).unwrap();
        ops.get_rows(&out);
        stand_in.calls_count("block") - before
    };
    let share = |part| Some(MultiprocessorShare { percent: 50, part });
    // Each of the stand-in's four multiprocessors holds two thread blocks of the kernel for one
    // row, and a part has two multiprocessors.
    assert_eq!(blocks(1, 4096, None), 8);
    assert_eq!(blocks(1, 4096, share(SharePart::First)), 4);
    assert_eq!(blocks(1, 4096, share(SharePart::Rest)), 4);
    // A thread block of the kernel for many rows fills a multiprocessor; it has five tiles here.
    assert_eq!(blocks(513, 128, None), 4);
    assert_eq!(blocks(513, 128, share(SharePart::First)), 2);
}

#[test]
fn device_draws_match_host_draws() {
    let Some(mut gpu) = cuda(Precision::F32, KvType::F32) else {
        return;
    };
    let set = |ops: &CudaOps, rows: &mut CudaRows, values: &[f32]| {
        ops.set_values(rows, values)
            .map_err(|error| error.to_string())
    };
    conformance::draws_match_host(&mut gpu.ops, &gpu.pack, &set).unwrap();
}

/// The draw of a capped head is that of a head whose logits are the capped ones.
#[test]
fn draws_are_from_capped_logits() {
    let Some(gpu) = cuda(Precision::F32, KvType::F32) else {
        return;
    };
    let DeviceUnderTest { mut ops, pack, .. } = gpu;
    let vocab = 2100;
    let large: Vec<f32> = numbers(7, vocab).iter().map(|x| x * 40.0).collect();
    let head_of = |values: &[f32]| {
        let stored = StoredTensor::from_f32("head", vocab, 1, values);
        let matrix = pack.matrix(&[stored.into()], None).unwrap();
        pack.finish().unwrap();
        matrix
    };
    let matrix = head_of(&large);
    let head = Head {
        matrix: &matrix,
        soft_cap: Some(4.0),
    };
    let mut one = ops.rows(1, 1, BufferRole::Activations).unwrap();
    ops.set_rows(&mut one, &[1.0]);
    ops.begin(&Batch::default(), PassPurpose::Unspecified, &[])
        .unwrap();
    let mut capped = vec![0.0; vocab];
    ops.logits(head, 1, &one, &mut capped).unwrap();
    let expected: Vec<f32> = large.iter().map(|x| 4.0 * (x / 4.0).tanh()).collect();
    assert_near("capped logits", 1e-5, &capped, &expected);
    let again = head_of(&capped);
    for turn in 0..20 {
        let rule = Some(DrawRule {
            random_bits: turn * ((1 << 53) / 20),
            inverse_temperature: 1.0,
            ..DrawRule::greedy()
        });
        let mut tokens = Vec::new();
        for head in [head, Head::uncapped(&again)] {
            let rule = std::slice::from_ref(&rule);
            ops.begin(&Batch::default(), PassPurpose::Unspecified, &[])
                .unwrap();
            ops.queue_draw(head, rule, &one).unwrap();
            ops.fetch_drawn(&mut tokens).unwrap();
        }
        assert_eq!(tokens[0], tokens[1], "turn {turn}");
    }
}

/// Of the three rows one is fed a drawn token, one a draw without a token, and one a token of the
/// host.
#[test]
fn a_drawn_token_is_embedded_before_the_host_receives_it() {
    let Some(gpu) = cuda(Precision::F32, KvType::F32) else {
        return;
    };
    let DeviceUnderTest { mut ops, pack, .. } = gpu;
    let (vocab, width) = (50, 40);
    let stored = numbers(1, vocab * width);
    let tensor = StoredTensor::from_f32("table", vocab, width, &stored);
    let table = pack.table(&tensor).unwrap();
    // The logits of each row are a column of the matrix.
    let logits = numbers(7, vocab * 2);
    let head = StoredTensor::from_f32("head", vocab, 2, &logits);
    let head = pack.matrix(&[head.into()], None).unwrap();
    pack.finish().unwrap();
    let mut picks = ops.rows(2, 2, BufferRole::Activations).unwrap();
    ops.set_rows(&mut picks, &[0.0, 1.0, f32::NAN, 0.0]);
    let mut out = ops.rows(3, width, BufferRole::Residual).unwrap();
    let greedy = Some(DrawRule::greedy());
    ops.begin(&Batch::default(), PassPurpose::Unspecified, &[])
        .unwrap();
    ops.queue_draw(Head::uncapped(&head), &[greedy.clone(), greedy], &picks)
        .unwrap();
    let batch = Batch {
        tokens: vec![0, 0, 9],
        fed_rows: vec![
            FedRow {
                row: 0,
                draw_row: 0,
            },
            FedRow {
                row: 1,
                draw_row: 1,
            },
        ],
        ..Batch::default()
    };
    ops.begin(&batch, PassPurpose::Unspecified, &[]).unwrap();
    ops.embed(&batch, &table, 1.0, &mut out).unwrap();
    let embedded = ops.get_rows(&out);
    let mut tokens = Vec::new();
    ops.fetch_drawn(&mut tokens).unwrap();
    let likeliest = (0..vocab).max_by(|a, b| logits[a * 2 + 1].total_cmp(&logits[b * 2 + 1]));
    let likeliest = likeliest.unwrap();
    assert_eq!(tokens, [Some(likeliest as u32), None]);
    for (row, token) in [likeliest, 0, 9].into_iter().enumerate() {
        let expected = &stored[token * width..][..width];
        assert_eq!(&embedded[row * width..][..width], expected, "row {row}");
    }
}
