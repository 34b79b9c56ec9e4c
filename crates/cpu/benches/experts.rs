//! Speed of a mixture of experts of OLMoE-1B-7B's shape (64 experts of width 1,024, eight for each
//! token, hidden 2,048) in bf16: the bytes of the touched experts per second for few rows, beside
//! the memory's speed; operations per second for many, beside a dense product of as many.
//!
//! `cargo bench -p cleave-cpu --bench experts [-- ROUNDS [LAYERS]]`; the processor must be idle
//! otherwise. The best of all rounds counts.
#![allow(clippy::print_stdout)] // what it is for

use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_cpu::{BandwidthReader, CpuMatrix, CpuOps, CpuOptions, CpuWeightLoader, cores_count};
use cleave_engine::ops::{
    Activation, BufferRole, ChosenWeights, Experts, ExpertsSpec, GatedMatrices, GatedMlpSpec,
    InnerSlices, Ops, Precision, RouterScore, RouterSpec, WeightLoader,
};
use half::bf16;
use std::time::Instant;

const HIDDEN: usize = 2048;
const WIDTH: usize = 1024;
const COUNT: usize = 64;
const CHOSEN: usize = 8;
const ROWS: [usize; 6] = [1, 4, 16, 64, 256, 1024];
/// Bytes of an expert.
const EXPERT_BYTES: usize = 3 * HIDDEN * WIDTH * 2;

const SPEC: ExpertsSpec = ExpertsSpec {
    count: COUNT,
    chosen: CHOSEN,
    expert: GatedMlpSpec {
        width: WIDTH,
        activation: Activation::Silu,
        bias: false,
    },
    router: RouterSpec {
        score: RouterScore::Softmax,
        has_bias: false,
        has_choice_bias: false,
        groups: None,
        weights: ChosenWeights::Scores,
        scale: 1.0,
    },
    shared: None,
};

struct Layer {
    router: CpuMatrix,
    experts: Vec<GatedMatrices<CpuMatrix>>,
}

/// Numbers in −0.5..0.5 that look random, the same for the same seed.
fn noise(seed: usize) -> impl Iterator<Item = f32> {
    (0..).map(move |i: usize| {
        let mixed = (i + seed * 7919).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 40) as f32 / (1 << 24) as f32 - 0.5
    })
}

fn stored(seed: usize, rows: usize, columns: usize) -> [StoredMatrix; 1] {
    let values: Vec<bf16> = noise(seed)
        .take(rows * columns)
        .map(bf16::from_f32)
        .collect();
    [StoredTensor::from_bf16("weights", rows, columns, &values).into()]
}

fn layer(pack: &CpuWeightLoader, number: usize) -> Layer {
    let slices = InnerSlices::halved(WIDTH, 128, 8);
    let expert = |expert: usize| {
        let seed = 1000 * number + 2 * expert;
        GatedMatrices {
            gate_up: pack
                .gate_up(&stored(seed, 2 * WIDTH, HIDDEN), None)
                .expect("memory"),
            down: pack
                .sliced_matrix(&stored(seed + 1, HIDDEN, WIDTH), None, &slices)
                .expect("memory"),
        }
    };
    Layer {
        router: pack
            .exact_matrix(&stored(1000 * number + 999, COUNT, HIDDEN), None)
            .expect("memory"),
        experts: (0..COUNT).map(expert).collect(),
    }
}

/// Expected number of experts that these rows touch.
fn touched(rows: usize) -> f64 {
    let is_left_out = 1.0 - CHOSEN as f64 / COUNT as f64;
    COUNT as f64 * (1.0 - is_left_out.powi(rows as i32))
}

fn main() {
    let numbers: Vec<usize> = std::env::args()
        .filter_map(|arg| arg.parse().ok())
        .collect();
    let number = |index: usize, default: usize| numbers.get(index).copied().unwrap_or(default);
    let (rounds, layers) = (number(0, 9), number(1, 3));
    let options = CpuOptions::new(Precision::Bf16);
    let threads = cores_count();
    let mut ops = CpuOps::new(&options).expect("the best instruction set");
    let pack = CpuWeightLoader::new(&options);
    let layers: Vec<Layer> = (0..layers).map(|number| layer(&pack, number)).collect();
    let memory = BandwidthReader::new(threads).expect("memory");
    println!("{COUNT} experts of {WIDTH}, {CHOSEN} chosen, hidden {HIDDEN}, {threads} threads");
    for rows in ROWS {
        let buffer = |ops: &CpuOps, rows, width| {
            ops.rows(rows, width, BufferRole::Activations)
                .expect("memory")
        };
        let (mut x, mut out) = (buffer(&ops, rows, HIDDEN), buffer(&ops, rows, HIDDEN));
        for (x, value) in x.values_mut().iter_mut().zip(noise(rows)) {
            *x = value;
        }
        // A dense product of as many operations, by one expert's first matrix.
        let dense_rows = rows * CHOSEN;
        let dense_x = buffer(&ops, dense_rows, WIDTH);
        let mut dense_out = buffer(&ops, dense_rows, HIDDEN);
        let (mut best, mut best_dense, mut read) = (f64::INFINITY, f64::INFINITY, 0.0_f64);
        for round in 0..rounds {
            read = read.max(memory.bytes_per_second());
            let layer = &layers[round % layers.len()];
            let experts = Experts {
                spec: &SPEC,
                router: &layer.router,
                choice_bias: None,
                experts: &layer.experts,
                shared: None,
            };
            let from = Instant::now();
            ops.experts(&experts, rows, &x, &mut out)
                .expect("a mixture");
            best = best.min(from.elapsed().as_secs_f64());
            let from = Instant::now();
            for _ in 0..3 {
                ops.matmul(&layer.experts[0].down, dense_rows, &dense_x, &mut dense_out)
                    .expect("a product");
            }
            best_dense = best_dense.min(from.elapsed().as_secs_f64());
        }
        let bytes = touched(rows) * EXPERT_BYTES as f64 / best;
        let operations = (2 * 3 * dense_rows * HIDDEN * WIDTH) as f64;
        println!(
            "{rows:5} rows: {:8.3} ms, {:5.1} GB/s, {:.2} of read; {:7.1} GFLOP/s, {:.2} of dense",
            best * 1e3,
            bytes / 1e9,
            bytes / read,
            operations / best / 1e9,
            best_dense / best,
        );
    }
}
