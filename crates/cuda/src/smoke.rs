//! The first tests to run on a new kind of GPU: each checks one property of the hardware that no
//! emulator has.
//!
//! Owns: tests of all fp8 codes through every kernel that reads them, of wgmma against mma, and of
//! a graph with a kernel and events on a part of the multiprocessors. `every_kernel` tests that
//! every kernel loads and launches; `tests/blocks.rs` tests memory of a child process.
//! Never: measures; takes longer than a few seconds.
#![allow(clippy::unwrap_used)] // Tests.

use crate::args::{AttendArgs, AttendPlainArgs, GatherArgs, MatmulArgs, slice_ends};
use crate::driver::{CudaDevice, CudaEvent, CudaStream};
use crate::every_kernel::{KernelBench, device};
use crate::images::KernelImages;
use crate::options::{MultiprocessorShare, SharePart, StreamPriority};
use crate::plan::{AttentionItem, SegmentEntry};
use crate::tiled::{MatrixInstruction, TiledCode, TiledKernel};
use crate::wgmma;
use cleave_checkpoint::e4m3;
use std::sync::Arc;

const CODES: usize = 256;
const BLOCK_TOKENS: usize = 16;
const WIDTH: usize = 128;

fn bench() -> Option<KernelBench> {
    let device = device()?;
    let stream = CudaStream::new(&device).unwrap();
    Some(KernelBench::new(stream))
}

/// Checks the f32 number that a kernel made of each code.
fn check_codes(label: &str, got: &[f32], knows_nan: bool) {
    for (code, got) in got.iter().enumerate() {
        let want = e4m3::to_f32(code as u8);
        if want.is_nan() {
            assert!(
                got.is_nan() || !knows_nan,
                "{label}: code {code:#04x} is {got}"
            )
        } else {
            assert_eq!(*got, want, "{label}: code {code:#04x}")
        }
    }
}

/// Attention over one key of zeros, so that the answer is its value, which has every code once.
struct OneKeyAttention {
    pool: u64,
    qkv: u64,
    out: u64,
    tables: u64,
    segments: u64,
}

impl OneKeyAttention {
    fn new(bench: &KernelBench) -> Self {
        let mut pool = vec![0u8; 2 * BLOCK_TOKENS * CODES];
        for (code, byte) in pool[BLOCK_TOKENS * CODES..][..CODES].iter_mut().enumerate() {
            *byte = code as u8;
        }
        let segment = SegmentEntry {
            row: 0,
            rows: 1,
            position: 0,
            table: 0,
        };
        Self {
            pool: bench.of(&pool),
            qkv: bench.zeros(3 * CODES * 2),
            out: bench.zeros(CODES * 2),
            tables: bench.of(&[0u32]),
            segments: bench.of(&[segment]),
        }
    }

    fn answer(&self, bench: &KernelBench) -> Vec<f32> {
        let bytes = bench.read(self.out);
        let words = bytes.as_chunks::<2>().0;
        words
            .iter()
            .map(|word| half::bf16::from_le_bytes(*word).to_f32())
            .collect()
    }
}

fn codes_through_plain_attention(bench: &KernelBench) {
    let key = OneKeyAttention::new(bench);
    let args = AttendPlainArgs {
        qkv: key.qkv,
        out: key.out,
        pool: key.pool,
        tables: key.tables,
        segments: key.segments,
        segments_count: bench.of(&[1u32]),
        sinks: 0,
        block_elements: (2 * BLOCK_TOKENS * CODES) as u64,
        key_elements: 0,
        value_elements: (BLOCK_TOKENS * CODES) as u64,
        query_heads: 1,
        kv_heads: 1,
        head_dim: CODES as u32,
        block_tokens: BLOCK_TOKENS as u32,
        window: u32::MAX,
        scale: 1.0,
        cap: 0.0,
        cap_exponent: 0.0,
    };
    bench.launch("attend_plain_fp8", [1, 1, 1], args);
    check_codes("plain attention", &key.answer(bench), true);
}

fn codes_through_tensor_attention(bench: &KernelBench) {
    let key = OneKeyAttention::new(bench);
    let item = AttentionItem {
        segment: 0,
        row: 0,
        span_first: 0,
        span_end: 1,
        parts: 1,
        states: 0,
        arrival: 0,
        padding: 0,
    };
    let args = AttendArgs {
        qkv: key.qkv,
        out: key.out,
        pool: key.pool,
        tables: key.tables,
        segments: key.segments,
        items: bench.of(&[item]),
        items_count: bench.of(&[1u32]),
        states: 0,
        arrivals: 0,
        sinks: 0,
        block_bytes: (2 * BLOCK_TOKENS * CODES) as u64,
        key_bytes: 0,
        value_bytes: (BLOCK_TOKENS * CODES) as u64,
        query_heads: 1,
        kv_heads: 1,
        block_shift: BLOCK_TOKENS.trailing_zeros(),
        window: u32::MAX,
        scale: 1.0,
        value_scale: 1.0,
        cap: 0.0,
        cap_exponent: 0.0,
    };
    bench.launch("attend_decode_fp8_256", [1, 1, 1], args);
    check_codes("attention on tensor cores", &key.answer(bench), false);
}

/// Each code has a column with the code as first element; the row is 1 there.
fn codes_through_products(bench: &KernelBench) {
    let mut weights = vec![0u8; CODES * WIDTH];
    for (code, column) in weights.chunks_exact_mut(WIDTH).enumerate() {
        column[0] = code as u8;
    }
    let mut x = vec![0u16; WIDTH];
    x[0] = half::bf16::ONE.to_bits();
    let out = bench.zeros(CODES * 4);
    let args = MatmulArgs {
        weights: bench.of(&weights),
        column_scales: bench.of(&[1.0f32; CODES]),
        group_scales: 0,
        x: bench.of(&x),
        bias: 0,
        out,
        rows_count: bench.of(&[1u32]),
        sums: 0,
        columns: CODES as u32,
        width: WIDTH as u32,
        span_width: WIDTH as u32,
        group_shift: 0,
        is_out_f32: 1,
        slices: 1,
        slice_ends: slice_ends(std::iter::once(WIDTH)),
    };
    for name in ["matmul_few8_fp8", "matmul_many64_fp8"] {
        bench.launch(name, [2, 1, 1], args);
        let bytes = bench.read(out);
        let words = bytes.as_chunks::<4>().0;
        let sums: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
        check_codes(name, &sums, false);
    }
}

#[test]
fn every_e4m3_code_is_read_as_its_number() {
    let Some(bench) = bench() else {
        return;
    };
    codes_through_plain_attention(&bench);
    codes_through_tensor_attention(&bench);
    codes_through_products(&bench);
}

/// The test prints how many sums differ; where any does, products use mma.
#[test]
fn wgmma_sums_are_compared_with_mma_sums() {
    let Some(bench) = bench() else {
        return;
    };
    let many = TiledKernel {
        code: TiledCode::alone(&bench.images, "matmul_many128_bf16").unwrap(),
        tile: (128, 128),
        rows_max: usize::MAX,
        instruction: MatrixInstruction::Mma,
    };
    let all = wgmma::compare_with_mma(&bench.images, &bench.stream, &many).unwrap();
    if all.is_empty() {
        println!("wgmma: this GPU has none");
    }
    for found in all {
        println!(
            "wgmma: {} of {} sums of {} differ from those of mma",
            found.sums_differing, found.sums, found.name
        );
        assert!(found.sums > 0);
    }
}

/// Copies rows by a kernel in a graph, on some of the multiprocessors, between two events.
fn replay_on(device: &Arc<CudaDevice>, part: SharePart) -> u32 {
    const ROWS: usize = 64;
    let share = MultiprocessorShare { percent: 40, part };
    let stream =
        CudaStream::with_priority_and_share(device, StreamPriority::High, Some(share)).unwrap();
    let bench = KernelBench::new(stream);
    let values: Vec<u32> = (0..ROWS as u32 * 8).map(|at| at * 3 + 1).collect();
    let indices: Vec<u32> = (0..ROWS as u32).rev().collect();
    let to = bench.zeros(ROWS * 32);
    let args = GatherArgs {
        from: bench.of(&values),
        to,
        indices: bench.of(&indices),
        units: 16,
        padding: 0,
    };
    let kernel = bench.images.kernel::<GatherArgs>("gather_rows").unwrap();
    let stream = &bench.stream;
    stream.begin_recording().unwrap();
    // SAFETY: the bench keeps the memory alive, which has so many rows.
    unsafe { kernel.launch(stream, [ROWS as u32, 1, 1], args) }.unwrap();
    let graph = stream.end_recording().unwrap();
    let [begin, end] = [(); 2].map(|()| CudaEvent::timed(device).unwrap());
    begin.record(stream).unwrap();
    for _ in 0..3 {
        stream.replay(&graph).unwrap();
    }
    end.record(stream).unwrap();
    end.synchronize().unwrap();
    assert!(end.is_reached().unwrap());
    println!(
        "three replays took {:?}",
        begin.elapsed_until(&end).unwrap()
    );
    let bytes = bench.read(to);
    let got: Vec<u32> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    let want: Vec<u32> = values.chunks(8).rev().flatten().copied().collect();
    assert_eq!(got, want);
    stream.processors_count()
}

#[test]
fn both_partitions_of_a_gpu_replay_graphs() {
    let Some(device) = device() else {
        return;
    };
    let all = device.facts().processors_count;
    let parts = [SharePart::First, SharePart::Rest].map(|part| replay_on(&device, part));
    println!("multiprocessors: {parts:?} of {all}");
    assert!(parts.iter().sum::<u32>() <= all && parts.iter().all(|part| *part > 0));
}

/// Loads all modules of this build one after the other, as a start does.
#[test]
fn every_kernel_module_loads() {
    let Some(device) = device() else {
        return;
    };
    KernelImages::load(&device).unwrap();
}
