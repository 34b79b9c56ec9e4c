//! What the operations reach on a GPU, for the shapes of Llama-3.1-8B: attention over paged KV, and matrix products.
//!
//! Owns: which shapes, and what each must move or compute. Prints a line of JSON for each, as labs do
//! (`kernels/include/lab.h`); scripts/gpu holds them against the ceilings of the same run.
//! Never: checks a result: that is what the tests are for.
//! Invariant: calls are queued in groups and waited for together, so that the host's part hides behind the device;
//! layers and copies of a matrix take turns, so that nothing is read from a cache that a model would not find there.
//!
//! With `--tiny` the shapes are small ones, to try this out where kernels run on the processor.
#![allow(clippy::unwrap_used)] // A measurement that fails has nothing else to do.

use cleave_cuda::{CudaOps, CudaOptions, CudaPack, Device};
use cleave_domain::BlockIndex;
use cleave_engine::checkpoint::StoredTensor;
use cleave_engine::ops::{
    Attention, AttentionIo, Batch, BatchSegment, HeadShape, Holds, KvType, LoadPlan, Ops, Pack,
    PoolShape, Precision, Wanted,
};
use half::bf16;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

const BLOCK_TOKENS: usize = 16;
/// What takes turns is this large together: many times the cache. In bytes.
const TURNS_BYTES: usize = 1 << 30;
/// Groups that are timed, and how long one is at least.
const GROUPS: usize = 15;
const GROUP_SECONDS: f64 = 2e-3;

/// One measurement.
struct Figure {
    lab: &'static str,
    variant: &'static str,
    shape: String,
    amount: Amount,
}

/// What bounds it.
enum Amount {
    Bytes(f64),
    Operations(f64),
}

/// The sizes that are measured.
struct Sizes {
    heads: HeadShape,
    /// (sequences, context).
    decode: Vec<(usize, usize)>,
    prefill: Vec<usize>,
    /// (name, columns, width).
    matrices: Vec<(&'static str, usize, usize)>,
    rows: Vec<usize>,
}

impl Sizes {
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

/// A GPU, and how long its work takes.
struct Bench {
    device: Arc<Device>,
    is_tiny: bool,
}

impl Bench {
    fn ops(&self) -> CudaOps {
        CudaOps::new(&self.device, &CudaOptions::new(Precision::Bf16)).unwrap()
    }

    /// Seconds of one call; each is told its number.
    fn time(&self, mut call: impl FnMut(usize)) -> (f64, f64) {
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
            return (once, once);
        }
        group(3);
        let calls = ((GROUP_SECONDS / group(10)) as usize).clamp(5, 1000);
        let mut seconds: Vec<f64> = (0..GROUPS).map(|_| group(calls)).collect();
        seconds.sort_by(f64::total_cmp);
        (seconds[GROUPS / 2], seconds[0])
    }

    fn report(&self, figure: &Figure, (median, best): (f64, f64)) {
        let Figure {
            lab,
            variant,
            shape,
            amount,
        } = figure;
        let amount = match amount {
            Amount::Bytes(bytes) => format!("\"bytes\": {bytes}"),
            Amount::Operations(operations) => format!("\"operations\": {operations}"),
        };
        let line = format!(
            "{{\"kind\": \"lab\", \"lab\": \"{lab}\", \"variant\": \"{variant}\", \"shape\": \"{shape}\", \
             \"seconds\": {median:e}, \"best\": {best:e}, {amount}, \"error\": 0, \"tolerance\": 0}}"
        );
        let mut out = std::io::stdout();
        writeln!(out, "{line}").unwrap();
    }

    /// Attention of sequences that all have `context` tokens, of which the last `rows` are computed.
    fn attention(
        &self,
        sizes: &Sizes,
        (sequences, context, rows): (usize, usize, usize),
    ) -> (f64, f64) {
        let mut ops = self.ops();
        let heads = sizes.heads;
        let blocks_each = context.div_ceil(BLOCK_TOKENS);
        let layer_bytes = sequences * blocks_each * BLOCK_TOKENS * heads.kv_width() * 4;
        let shape = PoolShape {
            blocks_count: sequences * blocks_each,
            layers_count: (TURNS_BYTES / layer_bytes).clamp(1, 32),
            heads,
            block_tokens: BLOCK_TOKENS,
            kv: KvType::Bf16,
        };
        let mut pool = ops.pool(shape).unwrap();
        let noise: Vec<u8> = noise(1, shape.block_bytes() / 2)
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        ops.write_block(&mut pool, BlockIndex(0), 0, &noise)
            .unwrap();
        for block in 1..shape.blocks_count as u32 {
            ops.copy_block(&mut pool, BlockIndex(0), BlockIndex(block))
                .unwrap();
        }
        let batch = batch((sequences, blocks_each), (context, rows));
        let count = batch.rows_count();
        let qkv = ops
            .rows(count, heads.qkv_width(), Holds::Activations)
            .unwrap();
        let values = noise_f32(2, count * heads.qkv_width());
        ops.set_values(&qkv, &values).unwrap();
        let mut out = ops
            .rows(count, heads.query_width(), Holds::Activations)
            .unwrap();
        ops.begin(&batch, Wanted::Anything).unwrap();
        self.time(|turn| {
            let attention = Attention {
                layer: turn % shape.layers_count,
                scale: 1.0 / (heads.head_dim as f32).sqrt(),
                window: None,
            };
            let io = AttentionIo {
                qkv: &qkv,
                pool: &pool,
                out: &mut out,
            };
            ops.attend(&batch, &attention, io).unwrap();
        })
    }

    fn attentions(&self, sizes: &Sizes) {
        for (sequences, context) in sizes.decode.iter().copied() {
            let bytes = sequences * context * sizes.heads.kv_width() * 4;
            let figure = Figure {
                lab: "attend",
                variant: "decode",
                shape: format!(
                    "batch {sequences}, context {context}, {}",
                    sizes.heads_name()
                ),
                amount: Amount::Bytes(bytes as f64),
            };
            self.report(&figure, self.attention(sizes, (sequences, context, 1)));
        }
        for tokens in sizes.prefill.iter().copied() {
            let pairs = (tokens * (tokens + 1) / 2) as f64;
            let figure = Figure {
                lab: "attend",
                variant: "prefill",
                shape: format!("tokens {tokens}, {}", sizes.heads_name()),
                amount: Amount::Operations(4.0 * sizes.heads.query_width() as f64 * pairs),
            };
            self.report(&figure, self.attention(sizes, (1, tokens, tokens)));
        }
    }

    /// One matrix with each number of rows.
    fn products(&self, (name, columns, width): (&str, usize, usize), rows: &[usize]) {
        let elements = columns * width;
        let copies = (TURNS_BYTES / (2 * elements)).clamp(1, 8);
        let pack = CudaPack::new(&self.device, Precision::Bf16).unwrap();
        pack.expect(&LoadPlan {
            matrix_elements: (copies * elements) as u64,
            tensors_count: copies,
            ..LoadPlan::default()
        })
        .unwrap();
        let stored = StoredTensor::from_bf16(name, (columns, width), &noise(3, elements)).into();
        let matrices: Vec<_> = (0..copies)
            .map(|_| pack.matrix(std::slice::from_ref(&stored), None).unwrap())
            .collect();
        pack.finish().unwrap();
        let mut ops = self.ops();
        for rows in rows.iter().copied() {
            let x = ops.rows(rows, width, Holds::Activations).unwrap();
            ops.set_values(&x, &noise_f32(4, rows * width)).unwrap();
            let mut out = ops.rows(rows, columns, Holds::Activations).unwrap();
            let batch = batch((rows, 1), (1, 1));
            ops.begin(&batch, Wanted::Anything).unwrap();
            let figure = Figure {
                lab: "matmul",
                variant: "bf16",
                shape: format!("{name}: {columns} x {width}, rows {rows}"),
                amount: match rows <= 128 {
                    true => Amount::Bytes((2 * elements) as f64),
                    false => Amount::Operations(2.0 * elements as f64 * rows as f64),
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

/// Sequences of one length, the last rows of each, their blocks in no order.
fn batch((sequences, blocks_each): (usize, usize), (context, rows): (usize, usize)) -> Batch {
    let blocks = sequences * blocks_each;
    // Steps of a prime that does not divide their number come by every block once.
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
        });
    }
    batch
}

/// Numbers in −1..1, never all zeros: those are faster than what a model has.
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
    let sizes = match is_tiny {
        true => Sizes::tiny(),
        false => Sizes::llama_8b(),
    };
    let device = Device::open(0).unwrap_or_else(|error| panic!("a GPU is needed: {error}"));
    let bench = Bench { device, is_tiny };
    bench.attentions(&sizes);
    for matrix in sizes.matrices.iter().copied() {
        bench.products(matrix, &sizes.rows);
    }
}
