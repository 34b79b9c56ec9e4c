//! Speed of mixtures of experts of published shapes, in each format that weights are packed in: the
//! bytes of the touched experts per second, beside the memory's speed, and the operations per
//! second, beside a dense product of as many in the same format.
//!
//! `cargo bench -p cleave-cpu --bench experts [-- SHAPE… FORMAT… ROUNDS rows=N…]`, all shapes,
//! formats and numbers of rows if none is named; the processor must be idle otherwise. The best of
//! all rounds counts. Every round has other rows, so that no expert is in a cache because of the
//! round before. A mixture of other rows, not timed, runs before those that are.
#![allow(clippy::print_stdout)] // what it is for

use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_cpu::{
    BandwidthReader, CpuMatrix, CpuOps, CpuOptions, CpuRows, CpuWeightLoader, cores_count,
};
use cleave_engine::ops::{
    Activation, BufferRole, ChosenWeights, Experts, ExpertsSpec, GatedMatrices, GatedMlpSpec,
    InnerSlices, Ops, Precision, Quantize, RouterScore, RouterSpec, WeightLoader,
};
use half::bf16;
use std::time::Instant;

const ROWS: [usize; 7] = [1, 4, 8, 32, 128, 512, 2048];
/// Mixtures that a sample times, one after the other with other rows, where rows are few: the
/// layers of a step follow each other, so that no thread sleeps meanwhile.
const LAYERS: usize = 8;
/// Rows up to which they are few.
const FEW_ROWS_MAX: usize = 32;
const FORMATS: [Option<Quantize>; 4] = [
    None,
    Some(Quantize::Int8),
    Some(Quantize::Int4),
    Some(Quantize::Mxfp4),
];

/// Sizes of a published mixture.
struct Shape {
    name: &'static str,
    hidden: usize,
    width: usize,
    count: usize,
    chosen: usize,
    /// Unit of a down projection's slices, as a model of this width has them.
    slice_unit: usize,
    activation: Activation,
    has_bias: bool,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "olmoe-1b-7b",
        hidden: 2048,
        width: 1024,
        count: 64,
        chosen: 8,
        slice_unit: 128,
        activation: Activation::Silu,
        has_bias: false,
    },
    Shape {
        name: "qwen3-30b-a3b",
        hidden: 2048,
        width: 768,
        count: 128,
        chosen: 8,
        slice_unit: 64,
        activation: Activation::Silu,
        has_bias: false,
    },
    Shape {
        name: "gpt-oss-20b",
        hidden: 2880,
        width: 2880,
        count: 32,
        chosen: 4,
        slice_unit: 64,
        activation: Activation::ClampedSwiGlu { limit: 7.0 },
        has_bias: true,
    },
];

impl Shape {
    fn spec(&self) -> ExpertsSpec {
        ExpertsSpec {
            count: self.count,
            chosen: self.chosen,
            expert: GatedMlpSpec {
                width: self.width,
                activation: self.activation,
                bias: self.has_bias,
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
        }
    }

    fn slices(&self) -> InnerSlices {
        InnerSlices::halved(self.width, self.slice_unit, 8)
    }
}

/// Numbers in −0.5..0.5 that look random, the same for the same seed.
fn noise(seed: usize) -> impl Iterator<Item = f32> {
    (0..).map(move |i: usize| {
        let mixed = (i + (seed << 36)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
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

/// A layer's weights in one format.
struct Layer {
    router: CpuMatrix,
    /// The router's weights, `(experts, hidden)`.
    router_values: Vec<f32>,
    experts: Vec<GatedMatrices<CpuMatrix>>,
    /// A dense matrix of gate's and up's size.
    dense: CpuMatrix,
    /// Bytes of an expert as it is packed, and in a checkpoint of this format.
    packed_bytes: f64,
    format_bytes: f64,
}

impl Layer {
    fn new(shape: &Shape, pack: &CpuWeightLoader, format: Option<Quantize>) -> Self {
        let (hidden, width, slices) = (shape.hidden, shape.width, shape.slices());
        let whole = InnerSlices::whole(hidden);
        let gate_up = stored(1, 2 * width, hidden);
        let down = stored(2, hidden, width);
        let router = stored(3, shape.count, hidden);
        let biases = vec![0.25; (2 * width).max(hidden)];
        let bias = |columns: usize| shape.has_bias.then(|| &biases[..columns]);
        // Experts of equal weights take as long as others.
        let expert = |_| GatedMatrices {
            gate_up: pack.gate_up(&gate_up, bias(2 * width)).expect("memory"),
            down: pack
                .sliced_matrix(&down, bias(hidden), &slices)
                .expect("memory"),
        };
        let packed_bytes = pack.matrix_bytes(&gate_up, &whole) + pack.matrix_bytes(&down, &slices);
        let of_format = |rows: usize, slices: &InnerSlices| {
            let columns = slices.elements().len();
            (rows * columns) as f64 * bytes_of_weight(format, columns, slices)
        };
        Self {
            router: pack.exact_matrix(&router, None).expect("memory"),
            router_values: router[0].to_f32(),
            experts: (0..shape.count).map(expert).collect(),
            dense: pack.sliced_matrix(&gate_up, None, &whole).expect("memory"),
            packed_bytes: packed_bytes as f64,
            format_bytes: of_format(2 * width, &whole) + of_format(hidden, &slices),
        }
    }

    /// Number of experts that these rows choose.
    fn touched(&self, shape: &Shape, x: &[f32]) -> usize {
        let mut is_touched = vec![false; shape.count];
        for row in x.chunks_exact(shape.hidden) {
            let of_expert = |weights: &[f32]| -> f32 {
                weights.iter().zip(row).map(|(weight, x)| weight * x).sum()
            };
            let logits = self.router_values.chunks_exact(shape.hidden).map(of_expert);
            let mut logits: Vec<(f32, usize)> = logits.zip(0..).collect();
            logits.sort_unstable_by(|one, two| two.0.total_cmp(&one.0));
            for (_, expert) in &logits[..shape.chosen] {
                is_touched[*expert] = true;
            }
        }
        is_touched.iter().filter(|touched| **touched).count()
    }
}

/// Bytes of a weight in a checkpoint: its code, and its share of a scale.
fn bytes_of_weight(format: Option<Quantize>, columns: usize, slices: &InnerSlices) -> f64 {
    let fits = |group: &usize| slices.are_multiples_of(*group);
    match format {
        None => 2.0,
        Some(Quantize::Int4) => {
            let group = [128, 64, 32].into_iter().find(fits);
            0.5 + 2.0 / group.expect("whole groups") as f64
        }
        Some(Quantize::Mxfp4) => 0.5 + 1.0 / 32.0,
        Some(_) => 1.0 + 4.0 / columns as f64,
    }
}

/// The best of all rounds of one number of rows.
#[derive(Default)]
struct Best {
    seconds: f64,
    touched: f64,
    bytes_per_second: f64,
    dense_seconds: f64,
    read_per_second: f64,
}

/// Mixtures of a sample with so many rows.
fn layers(rows: usize) -> usize {
    if rows <= FEW_ROWS_MAX { LAYERS } else { 1 }
}

fn measure(
    shape: &Shape,
    layer: &Layer,
    ops: &mut CpuOps,
    memory: &BandwidthReader,
    rows: usize,
    rounds: usize,
) -> Best {
    let spec = shape.spec();
    let buffer = |ops: &CpuOps, rows, width| {
        ops.rows(rows, width, BufferRole::Activations)
            .expect("memory")
    };
    let layers = layers(rows);
    let mut inputs: Vec<CpuRows> = (0..=layers)
        .map(|_| buffer(ops, rows, shape.hidden))
        .collect();
    let mut out = buffer(ops, rows, shape.hidden);
    let dense_rows = rows * shape.chosen;
    let mut dense_x = buffer(ops, dense_rows, shape.hidden);
    dense_x.values_mut().fill(0.5);
    let mut dense_out = buffer(ops, dense_rows, 2 * shape.width);
    let experts = Experts {
        spec: &spec,
        router: &layer.router,
        choice_bias: None,
        experts: &layer.experts,
        shared: None,
    };
    let mut best = Best {
        seconds: f64::INFINITY,
        dense_seconds: f64::INFINITY,
        ..Best::default()
    };
    for round in 0..rounds {
        let mut touched = 0;
        for (layer_index, x) in inputs.iter_mut().enumerate() {
            let seed = 10 + round * (LAYERS + 1) + layer_index;
            for (x, value) in x.values_mut().iter_mut().zip(noise(seed)) {
                *x = value;
            }
            // The first is not timed.
            if layer_index > 0 {
                touched += layer.touched(shape, x.values_mut());
            }
        }
        best.read_per_second = best.read_per_second.max(memory.bytes_per_second());
        let mut from = Instant::now();
        for (layer_index, x) in inputs.iter().enumerate() {
            if layer_index == 1 {
                from = Instant::now();
            }
            ops.experts(&experts, rows, x, &mut out).expect("a mixture");
        }
        let seconds = from.elapsed().as_secs_f64() / layers as f64;
        let touched = touched as f64 / layers as f64;
        let bytes_per_second = touched * layer.packed_bytes / seconds;
        best.bytes_per_second = best.bytes_per_second.max(bytes_per_second);
        if seconds < best.seconds {
            (best.seconds, best.touched) = (seconds, touched);
        }
        let from = Instant::now();
        ops.matmul(&layer.dense, dense_rows, &dense_x, &mut dense_out)
            .expect("a product");
        // Down is half as large as gate and up.
        best.dense_seconds = best.dense_seconds.min(1.5 * from.elapsed().as_secs_f64());
    }
    best
}

fn print_table(shape: &Shape, format: Option<Quantize>, rounds: usize, rows: &[usize]) {
    let threads = cores_count();
    let options = CpuOptions {
        quantize: format,
        ..CpuOptions::new(Precision::Bf16)
    };
    let mut ops = CpuOps::new(&options).expect("the best instruction set");
    let layer = Layer::new(shape, &CpuWeightLoader::new(&options), format);
    let memory = BandwidthReader::new(threads).expect("memory");
    println!(
        "\n{} {}: {} experts of {}, {} chosen, hidden {}, {threads} threads; packed {:.3} of the format's bytes\n",
        shape.name,
        format.map_or("bf16", Quantize::name),
        shape.count,
        shape.width,
        shape.chosen,
        shape.hidden,
        layer.packed_bytes / layer.format_bytes,
    );
    println!(
        "| rows | experts read | ms | GB/s | of the memory's speed | GFLOP/s | of a dense product |"
    );
    println!("|---|---|---|---|---|---|---|");
    for &rows in rows {
        let best = measure(shape, &layer, &mut ops, &memory, rows, rounds);
        let operations = (6 * rows * shape.chosen * shape.hidden * shape.width) as f64;
        println!(
            "| {rows} | {:.0} | {:.3} | {:.1} | {:.2} | {:.0} | {:.2} |",
            best.touched,
            best.seconds * 1e3,
            best.bytes_per_second / 1e9,
            best.bytes_per_second / best.read_per_second,
            operations / best.seconds / 1e9,
            best.dense_seconds / best.seconds,
        );
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let is_named = |name: &str| args.iter().any(|arg| arg == name);
    let rounds = args.iter().find_map(|arg| arg.parse().ok()).unwrap_or(9);
    let shapes: Vec<&Shape> = SHAPES.iter().filter(|shape| is_named(shape.name)).collect();
    let shapes = if shapes.is_empty() {
        SHAPES.iter().collect()
    } else {
        shapes
    };
    let name = |format: &Option<Quantize>| format.map_or("bf16", Quantize::name);
    let formats = FORMATS.into_iter().filter(|format| is_named(name(format)));
    let mut formats: Vec<Option<Quantize>> = formats.collect();
    if formats.is_empty() {
        formats.extend(FORMATS);
    }
    let rows = args
        .iter()
        .filter_map(|arg| arg.strip_prefix("rows=")?.parse().ok());
    let mut rows: Vec<usize> = rows.collect();
    if rows.is_empty() {
        rows.extend(ROWS);
    }
    for shape in shapes {
        for format in &formats {
            print_table(shape, *format, rounds, &rows);
        }
    }
}
