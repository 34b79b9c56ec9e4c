//! Measures the speed of attention over paged KV and of matrix products on a GPU, for the shapes of
//! Llama-3.1-8B.
//!
//! Owns: the shapes, and the bytes that each must move or the operations that it must compute.
//! Prints a line of JSON for each, as labs do (`kernels/include/lab.h`); scripts/gpu compares them
//! with the ceilings of the same run.
//! Never: checks a result, as the tests do.
//! Invariant: calls are queued in groups and waited for together, so that the device's time hides
//! the host's; layers and copies of a matrix take turns, so that no call reads from a cache what a
//! model would not find there.
//!
//! With `--tiny` the shapes are small, to try the benchmark where kernels run on the processor.
#![allow(clippy::unwrap_used)] // A failed measurement can only end the program.

use cleave_checkpoint::StoredTensor;
use cleave_cuda::{CudaDevice, CudaOps, CudaOptions, CudaWeightLoader};
use cleave_domain::{BlockIndex, KvPlane};
use cleave_engine::ops::{
    Attention, AttentionIo, Batch, BatchSegment, BufferRole, HeadShape, KvPoolShape, KvType,
    LoadPlan, Ops, PassPurpose, Precision, WeightLoader,
};
use half::bf16;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

const BLOCK_TOKENS: usize = 16;
/// The total size in bytes of the data that calls use in turns: many times the cache.
const TURNS_BYTES: usize = 1 << 30;
/// The number of groups that are timed, and the least duration of one.
const GROUPS: usize = 15;
const GROUP_SECONDS: f64 = 2e-3;

struct GpuMeasurement {
    lab: &'static str,
    variant: &'static str,
    shape: String,
    amount: MeasuredAmount,
}

/// The limit of a measurement: bytes to move, or operations to compute.
enum MeasuredAmount {
    Bytes(f64),
    Operations(f64),
}

/// The sizes to measure.
struct MeasuredSizes {
    heads: HeadShape,
    /// Decode batches: `(sequences, context)`, the context in tokens.
    decode: Vec<(usize, usize)>,
    prefill: Vec<usize>,
    /// Weight matrices: `(name, columns, width)`, in elements.
    matrices: Vec<(&'static str, usize, usize)>,
    rows: Vec<usize>,
}

impl MeasuredSizes {
    fn llama_8b() -> Self {
        Self {
            heads: HeadShape {
                query_heads: 32,
                kv_heads: 8,
                head_dim: 128,
            },
            decode: [1024, 8192]
                .into_iter()
                .flat_map(|context| [1, 8, 32, 128].map(|batch| (batch, context)))
                .collect(),
            prefill: vec![2048, 8192, 32_768],
            matrices: vec![
                ("q, k, v", 6144, 4096),
                ("out", 4096, 4096),
                ("gate, up", 28_672, 4096),
                ("down", 4096, 14_336),
                ("head", 128_256, 4096),
            ],
            rows: vec![1, 8, 32, 128, 512, 2048, 8192],
        }
    }

    fn tiny() -> Self {
        Self {
            heads: HeadShape {
                query_heads: 4,
                kv_heads: 2,
                head_dim: 64,
            },
            decode: vec![(2, 40)],
            prefill: vec![33],
            matrices: vec![("tiny", 72, 64)],
            rows: vec![1, 17],
        }
    }

    fn heads_name(&self) -> String {
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = self.heads;
        format!("{query_heads}/{kv_heads} heads of {head_dim}")
    }
}

/// Seconds of one call, over all groups of calls.
#[derive(Clone, Copy)]
struct CallSeconds {
    median: f64,
    best: f64,
}

/// A GPU whose work is timed.
struct GpuBench {
    device: Arc<CudaDevice>,
    is_tiny: bool,
}

impl GpuBench {
    fn ops(&self) -> CudaOps {
        CudaOps::new(&self.device, &CudaOptions::new(Precision::Bf16)).unwrap()
    }

    /// Returns the seconds of one call; each call gets its number.
    fn time(&self, mut call: impl FnMut(usize)) -> CallSeconds {
        let mut turn = 0;
        let mut group = |calls: usize| {
            self.device.synchronize().unwrap();
            let from = Instant::now();
            for _ in 0..calls {
                call(turn);
                turn += 1;
            }
            self.device.synchronize().unwrap();
            from.elapsed().as_secs_f64() / calls as f64
        };
        if self.is_tiny {
            let once = group(1);
            return CallSeconds {
                median: once,
                best: once,
            };
        }
        group(3);
        let calls = ((GROUP_SECONDS / group(10)) as usize).clamp(5, 1000);
        let mut seconds: Vec<f64> = (0..GROUPS).map(|_| group(calls)).collect();
        seconds.sort_by(f64::total_cmp);
        CallSeconds {
            median: seconds[GROUPS / 2],
            best: seconds[0],
        }
    }

    fn report(&self, figure: &GpuMeasurement, seconds: CallSeconds) {
        let CallSeconds { median, best } = seconds;
        let GpuMeasurement {
            lab,
            variant,
            shape,
            amount,
        } = figure;
        let amount = match amount {
            MeasuredAmount::Bytes(bytes) => format!("\"bytes\": {bytes}"),
            MeasuredAmount::Operations(operations) => format!("\"operations\": {operations}"),
        };
        let line = format!(
            "{{\"kind\": \"lab\", \"lab\": \"{lab}\", \"variant\": \"{variant}\", \"shape\": \"{shape}\", \
             \"seconds\": {median:e}, \"best\": {best:e}, {amount}, \"error\": 0, \"tolerance\": 0}}"
        );
        let mut out = std::io::stdout();
        writeln!(out, "{line}").unwrap();
    }

    /// Measures attention of sequences that all have `context` tokens, of which the last `rows` are
    /// computed.
    fn attention(
        &self,
        sizes: &MeasuredSizes,
        sequences: usize,
        context: usize,
        rows: usize,
    ) -> CallSeconds {
        let mut ops = self.ops();
        let heads = sizes.heads;
        let blocks_each = context.div_ceil(BLOCK_TOKENS);
        let layer_bytes = sequences * blocks_each * BLOCK_TOKENS * heads.kv_width() * 4;
        let shape = KvPoolShape::uniform(
            heads,
            (TURNS_BYTES / layer_bytes).clamp(1, 32),
            BLOCK_TOKENS,
            sequences * blocks_each,
            KvType::Bf16,
        );
        let mut pool = ops.pool(shape.clone()).unwrap();
        let noise: Vec<u8> = noise(1, shape.block_bytes() / 2)
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let first = shape.whole(KvPlane::Blocks, BlockIndex(0));
        ops.write_block(&mut pool, first, &noise).unwrap();
        for block in 1..shape.blocks_count as u32 {
            ops.copy_block(&mut pool, KvPlane::Blocks, BlockIndex(0), BlockIndex(block))
                .unwrap();
        }
        let batch = batch(sequences, blocks_each, context, rows);
        let count = batch.rows_count();
        let qkv = ops
            .rows(count, heads.qkv_width(), BufferRole::Activations)
            .unwrap();
        let values = noise_f32(2, count * heads.qkv_width());
        ops.set_values(&qkv, &values).unwrap();
        let mut out = ops
            .rows(count, heads.query_width(), BufferRole::Activations)
            .unwrap();
        ops.begin(&batch, PassPurpose::Unspecified, &[]).unwrap();
        self.time(|turn| {
            let attention = Attention {
                layer: turn % shape.layers_count(),
                scale: 1.0 / (heads.head_dim as f32).sqrt(),
                soft_cap: None,
                window: None,
            };
            let io = AttentionIo {
                qkv: &qkv,
                pool: &pool,
                sinks: None,
                out: &mut out,
            };
            ops.attend(&batch, &attention, io).unwrap();
        })
    }

    fn attentions(&self, sizes: &MeasuredSizes) {
        for (sequences, context) in sizes.decode.iter().copied() {
            let bytes = sequences * context * sizes.heads.kv_width() * 4;
            let figure = GpuMeasurement {
                lab: "attend",
                variant: "decode",
                shape: format!(
                    "batch {sequences}, context {context}, {}",
                    sizes.heads_name()
                ),
                amount: MeasuredAmount::Bytes(bytes as f64),
            };
            self.report(&figure, self.attention(sizes, sequences, context, 1));
        }
        for tokens in sizes.prefill.iter().copied() {
            let pairs = (tokens * (tokens + 1) / 2) as f64;
            let figure = GpuMeasurement {
                lab: "attend",
                variant: "prefill",
                shape: format!("tokens {tokens}, {}", sizes.heads_name()),
                amount: MeasuredAmount::Operations(4.0 * sizes.heads.query_width() as f64 * pairs),
            };
            self.report(&figure, self.attention(sizes, 1, tokens, tokens));
        }
    }

    /// Measures one matrix with each number of rows.
    fn products(&self, name: &str, columns: usize, width: usize, rows: &[usize]) {
        let elements = columns * width;
        let copies = (TURNS_BYTES / (2 * elements)).clamp(1, 8);
        let pack = CudaWeightLoader::new(&self.device, Precision::Bf16).unwrap();
        pack.reserve(&LoadPlan {
            matrix_elements: (copies * elements) as u64,
            tensors_count: copies,
            ..LoadPlan::default()
        })
        .unwrap();
        let stored = StoredTensor::from_bf16(name, columns, width, &noise(3, elements)).into();
        let matrices: Vec<_> = (0..copies)
            .map(|_| pack.matrix(std::slice::from_ref(&stored), None).unwrap())
            .collect();
        pack.finish().unwrap();
        let mut ops = self.ops();
        for rows in rows.iter().copied() {
            let x = ops.rows(rows, width, BufferRole::Activations).unwrap();
            ops.set_values(&x, &noise_f32(4, rows * width)).unwrap();
            let mut out = ops.rows(rows, columns, BufferRole::Activations).unwrap();
            let batch = batch(rows, 1, 1, 1);
            ops.begin(&batch, PassPurpose::Unspecified, &[]).unwrap();
            let figure = GpuMeasurement {
                lab: "matmul",
                variant: "bf16",
                shape: format!("{name}: {columns} x {width}, rows {rows}"),
                amount: if rows <= 128 {
                    MeasuredAmount::Bytes((2 * elements) as f64)
                } else {
                    MeasuredAmount::Operations(2.0 * elements as f64 * rows as f64)
                },
            };
            let took = self.time(|turn| {
                ops.matmul(&matrices[turn % copies], rows, &x, &mut out)
                    .unwrap()
            });
            self.report(&figure, took);
        }
    }
}

/// Returns a batch of the last rows of sequences of one length, with shuffled blocks.
fn batch(sequences: usize, blocks_each: usize, context: usize, rows: usize) -> Batch {
    let blocks = sequences * blocks_each;
    // Steps of a prime that does not divide the number of blocks visit every block once.
    let stride = if blocks.is_multiple_of(7919) { 1 } else { 7919 };
    let mut batch = Batch {
        blocks: (0..blocks)
            .map(|at| BlockIndex((at * stride % blocks) as u32))
            .collect(),
        ..Batch::default()
    };
    for sequence in 0..sequences {
        let first = batch.tokens.len();
        batch.tokens.extend((0..rows).map(|_| 0));
        batch
            .positions
            .extend((context - rows..context).map(|position| position as u32));
        batch.segments.push(BatchSegment {
            rows: first..first + rows,
            position: context - rows,
            blocks: sequence * blocks_each..(sequence + 1) * blocks_each,
            state: None,
        });
    }
    batch
}

/// Returns numbers in −1..1; zeros would be faster than a model's numbers.
fn noise(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..count).map(|_| draw()).collect()
}

fn noise_f32(seed: u64, count: usize) -> Vec<f32> {
    noise(seed, count).iter().map(|x| x.to_f32()).collect()
}

fn main() {
    let is_tiny = std::env::args().any(|argument| argument == "--tiny");
    let sizes = if is_tiny {
        MeasuredSizes::tiny()
    } else {
        MeasuredSizes::llama_8b()
    };
    let device = CudaDevice::open(0).unwrap_or_else(|error| panic!("a GPU is needed: {error}"));
    let bench = GpuBench { device, is_tiny };
    bench.attentions(&sizes);
    for (name, columns, width) in sizes.matrices.iter().copied() {
        bench.products(name, columns, width, &sizes.rows);
    }
}
