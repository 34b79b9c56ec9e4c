//! The first things to run on a GPU that nothing has run on: each looks at one thing that no emulator can vouch for.
//!
//! Owns: fp8 by all its codes through every way that reads them; wgmma held against mma, counted; a part of the
//! multiprocessors with a graph, a kernel and events. That every kernel loads and launches is `every_kernel`'s; memory of a child
//! process is `tests/blocks.rs`'s.
//! Never: measures; takes longer than a few seconds.
#![allow(clippy::unwrap_used)] // Tests.

use crate::args::{AttendArgs, AttendPlainArgs, GatherArgs, MatmulArgs};
use crate::driver::{Device, Event, Stream};
use crate::every_kernel::{Bench, device};
use crate::images::Images;
use crate::options::{Part, Priority, Share};
use crate::plan::{Item, SegmentEntry};
use crate::wide;
use cleave_engine::e4m3;
use std::sync::Arc;

const CODES: usize = 256;
const BLOCK_TOKENS: usize = 16;
const WIDTH: usize = 128;

fn bench() -> Option<Bench> {
    let device = device()?;
    let stream = Stream::new(&device).unwrap();
    Some(Bench::new(stream))
}

/// Of each code the number that a kernel made of it, in f32.
fn check_codes(way: &str, got: &[f32], knows_nan: bool) {
    for (code, got) in got.iter().enumerate() {
        let want = e4m3::to_f32(code as u8);
        match want.is_nan() {
            true => assert!(
                got.is_nan() || !knows_nan,
                "{way}: code {code:#04x} is {got}"
            ),
            false => assert_eq!(*got, want, "{way}: code {code:#04x}"),
        }
    }
}

/// One key of zeros, so that its value, which has every code once, is the answer.
struct OneKey {
    pool: u64,
    qkv: u64,
    out: u64,
    tables: u64,
    segments: u64,
}

impl OneKey {
    fn new(bench: &Bench) -> Self {
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

    fn answer(&self, bench: &Bench) -> Vec<f32> {
        let bytes = bench.read(self.out);
        let words = bytes.as_chunks::<2>().0;
        words
            .iter()
            .map(|word| half::bf16::from_le_bytes(*word).to_f32())
            .collect()
    }
}

fn codes_through_plain_attention(bench: &Bench) {
    let key = OneKey::new(bench);
    let args = AttendPlainArgs {
        qkv: key.qkv,
        out: key.out,
        pool: key.pool,
        tables: key.tables,
        segments: key.segments,
        segments_count: bench.of(&[1u32]),
        block_elements: (2 * BLOCK_TOKENS * CODES) as u64,
        key_elements: 0,
        value_elements: (BLOCK_TOKENS * CODES) as u64,
        query_heads: 1,
        kv_heads: 1,
        head_dim: CODES as u32,
        block_tokens: BLOCK_TOKENS as u32,
        window: u32::MAX,
        scale: 1.0,
    };
    bench.launch("attend_plain_fp8", [1, 1, 1], args);
    check_codes("plain attention", &key.answer(bench), true);
}

fn codes_through_tensor_attention(bench: &Bench) {
    let key = OneKey::new(bench);
    let item = Item {
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
        block_bytes: (2 * BLOCK_TOKENS * CODES) as u64,
        key_bytes: 0,
        value_bytes: (BLOCK_TOKENS * CODES) as u64,
        query_heads: 1,
        kv_heads: 1,
        block_shift: BLOCK_TOKENS.trailing_zeros(),
        window: u32::MAX,
        scale: 1.0,
        value_scale: 1.0,
    };
    bench.launch("attend_decode_fp8_256", [1, 1, 1], args);
    check_codes("attention on tensor cores", &key.answer(bench), false);
}

/// A column for each code, which stands at its first element; the row is 1 there.
fn codes_through_products(bench: &Bench) {
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
        arrivals: 0,
        columns: CODES as u32,
        width: WIDTH as u32,
        span_width: WIDTH as u32,
        spans: 1,
        group_shift: 0,
        is_out_f32: 1,
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
fn every_code_of_e4m3_is_read_as_its_number() {
    let Some(bench) = bench() else {
        return;
    };
    codes_through_plain_attention(&bench);
    codes_through_tensor_attention(&bench);
    codes_through_products(&bench);
}

/// How many sums differ is for whoever reads the run: where any does, products are left to mma.
#[test]
fn sums_of_wgmma_and_mma_are_compared() {
    let Some(bench) = bench() else {
        return;
    };
    let many = bench.images.kernel("matmul_many128_bf16").unwrap();
    match wide::compare(&bench.images, &bench.stream, &many).unwrap() {
        None => println!("wgmma: this GPU has none"),
        Some(found) => {
            println!(
                "wgmma: {} of {} sums differ from those of mma",
                found.differing, found.sums
            );
            assert!(found.sums > 0);
        }
    }
}

/// Copies rows by a kernel, in a graph, on some of the multiprocessors, between two events.
fn replay_on(device: &Arc<Device>, part: Part) -> u32 {
    const ROWS: usize = 64;
    let share = Share { percent: 40, part };
    let stream = Stream::placed(device, (Priority::High, Some(share))).unwrap();
    let bench = Bench::new(stream);
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
    // SAFETY: the bench keeps the memory, of so many rows.
    unsafe { kernel.launch(stream, [ROWS as u32, 1, 1], args) }.unwrap();
    let graph = stream.end_recording().unwrap();
    let [begin, end] = [(); 2].map(|()| Event::timed(device).unwrap());
    begin.record(stream).unwrap();
    for _ in 0..3 {
        stream.replay(&graph).unwrap();
    }
    end.record(stream).unwrap();
    end.synchronize().unwrap();
    assert!(end.is_reached().unwrap());
    println!("three replays took {:?}", begin.until(&end).unwrap());
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
fn both_parts_of_a_gpu_replay_graphs() {
    let Some(device) = device() else {
        return;
    };
    let all = device.facts().processors_count;
    let parts = [Part::First, Part::Rest].map(|part| replay_on(&device, part));
    println!("multiprocessors: {parts:?} of {all}");
    assert!(parts.iter().sum::<u32>() <= all && parts.iter().all(|part| *part > 0));
}

/// The modules that this build has, one after the other, as a start does.
#[test]
fn every_module_loads() {
    let Some(device) = device() else {
        return;
    };
    Images::load(&device).unwrap();
}
