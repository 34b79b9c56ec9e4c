//! Speed of attention, compared with the processor's limits (bytes read per second, multiply-adds
//! per second). Matrix products have their own bench, `products`.
//!
//! `cargo bench -p cleave-cpu`; the processor must be idle otherwise.
#![allow(missing_docs)] // criterion's macros
#![allow(unsafe_code)] // one instruction, for the ceiling

use cleave_cpu::{CpuOps, CpuOptions, Isa, Threads, cores_count};
use cleave_domain::BlockIndex;
use cleave_engine::ops::{
    Attention, AttentionIo, Batch, BatchSegment, BufferRole, HeadShape, KvPoolShape, KvType, Ops,
    PassPurpose, Precision,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;

const HEADS: HeadShape = HeadShape {
    query_heads: 32,
    kv_heads: 8,
    head_dim: 64,
};
const LAYERS: usize = 16;

fn attention(criterion: &mut Criterion) {
    let options = CpuOptions::new(Precision::Bf16);
    let mut ops = CpuOps::new(&options).expect("the best instruction set");
    // (tokens per sequence, position of the first, sequences).
    for (tokens, position, sequences) in [
        (1_usize, 1000_usize, 1),
        (1, 1000, 16),
        (1, 16000, 1),
        (512, 0, 1),
    ] {
        let blocks = (position + tokens).div_ceil(16);
        let shape = KvPoolShape::uniform(HEADS, LAYERS, 16, blocks * sequences, KvType::Bf16);
        let mut batch = Batch::default();
        for sequence in 0..sequences {
            let row = batch.tokens.len();
            batch.tokens.resize(row + tokens, 0);
            batch
                .positions
                .extend((position..position + tokens).map(|p| p as u32));
            let first = batch.blocks.len();
            let table = first..first + blocks;
            batch
                .blocks
                .extend(table.clone().map(|b| BlockIndex(b as u32)));
            batch.segments.push(BatchSegment {
                rows: row..row + tokens,
                position,
                blocks: table,
                state: None,
            });
            assert_eq!(batch.segments.len(), sequence + 1);
        }
        let rows = batch.rows_count();
        let pool = ops.pool(shape).expect("memory");
        let qkv = ops
            .rows(rows, HEADS.qkv_width(), BufferRole::Activations)
            .expect("memory");
        let mut out = ops
            .rows(rows, HEADS.query_width(), BufferRole::Activations)
            .expect("memory");
        ops.begin(&batch, PassPurpose::Unspecified, &[])
            .expect("a plan");
        let keys_bytes = 4 * sequences * (position + tokens) * HEADS.kv_width();
        let mut group = criterion.benchmark_group("attention, 32 over 8 heads of 64, bf16");
        group.throughput(Throughput::Bytes(keys_bytes as u64));
        let name = format!("{sequences} × {tokens} tokens at {position}");
        let mut layer = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                layer = (layer + 1) % LAYERS;
                let attention = Attention {
                    layer,
                    scale: 0.125,
                    soft_cap: None,
                    window: None,
                };
                let io = AttentionIo {
                    qkv: &qkv,
                    pool: &pool,
                    sinks: None,
                    out: &mut out,
                };
                ops.attend(&batch, &attention, io)
            });
        });
    }
}

fn ceilings(criterion: &mut Criterion) {
    let mut threads = Threads::new(cores_count(), &[]).expect("threads");
    let memory = vec![1_u64; 64 << 20];
    let mut group = criterion.benchmark_group("ceiling");
    group.throughput(Throughput::Bytes(size_of_val(&memory[..]) as u64));
    group.bench_function("read", |bencher| {
        bencher.iter(|| {
            threads.run(256, &|turn| {
                let part = memory.len() / 256;
                let words = &memory[turn.task * part..(turn.task + 1) * part];
                black_box(
                    words
                        .iter()
                        .fold(0_u64, |sum, word| sum.wrapping_add(*word)),
                );
            });
        });
    });
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx512Bf16.available() {
        let tasks = threads.count();
        group.throughput(Throughput::Elements((tasks * dot::OPERATIONS) as u64));
        group.bench_function("bf16 dot", |bencher| {
            bencher.iter(|| {
                threads.run(tasks, &|_| {
                    // SAFETY: the instructions were detected.
                    black_box(unsafe { dot::spin() });
                });
            });
        });
    }
    group.bench_function("nothing, on every thread", |bencher| {
        let tasks = threads.count();
        bencher.iter(|| threads.run(tasks, &|_| {}));
    });
}

/// A loop of the dot product instruction on registers.
#[cfg(target_arch = "x86_64")]
mod dot {
    use std::arch::x86_64::{__m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps};
    use std::arch::x86_64::{_mm512_reduce_add_ps, _mm512_set1_epi32, _mm512_setzero_ps};

    const ROUNDS: usize = 100_000;
    const CHAINS: usize = 14;
    /// Multiplications and additions of one call: 32 pairs per instruction.
    pub(super) const OPERATIONS: usize = ROUNDS * CHAINS * 64;

    /// # Safety
    /// The processor has AVX-512 F and BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn spin() -> f32 {
        let ones = _mm512_set1_epi32(0x3f80_3f80);
        // SAFETY: both are 512 bits.
        let ones = unsafe { std::mem::transmute::<__m512i, __m512bh>(ones) };
        let mut chains = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            for chain in &mut chains {
                *chain = _mm512_dpbf16_ps(*chain, ones, ones);
            }
        }
        let mut sum = chains[0];
        for chain in &chains[1..] {
            sum = _mm512_add_ps(sum, *chain);
        }
        _mm512_reduce_add_ps(sum)
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .without_plots();
    targets = ceilings, attention
}
criterion_main!(benches);
