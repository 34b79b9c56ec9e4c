//! The cost of slices of the inner dimension in a whole model: layers and head of Llama-3.2-1B's
//! shape, four of sixteen and a quarter of the vocabulary, with its slices and with one slice each,
//! by turns in one process.
//!
//! `cargo bench -p cleave-cpu --bench layers [-- PAIRS] [FORM…] [pass=NAME…]`, where FORM is bf16,
//! int8 or int4, and NAME prefill or a number of sequences. Passes of both kinds alternate, and
//! which kind is first alternates too: each neighbouring pair gives a ratio of CPU times of the one
//! thread, so that neither other processes nor a core that changes its speed count. Printed: the
//! median of the ratios, and their quartiles.
#![allow(clippy::print_stdout)] // what it is for
#![allow(unsafe_code)] // a clock

use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_cpu::{
    CpuMatrix, CpuOps, CpuOptions, CpuPool, CpuRotary, CpuRows, CpuVector, CpuWeightLoader,
    Quantize,
};
use cleave_domain::BlockIndex;
use cleave_engine::ops::{
    Activation, Attention, AttentionIo, Batch, BatchSegment, BufferRole, GatedIo, HeadShape,
    InnerSlices, KvPoolShape, KvType, Norm, NormFormula, NormIo, Ops, PassPurpose, PoolLayer,
    Precision, RotaryTable, WeightLoader,
};
use half::bf16;

const LAYERS: usize = 4;
const HIDDEN: usize = 2048;
const INNER: usize = 8192;
const VOCABULARY: usize = 128_256 / 4;
const HEADS: HeadShape = HeadShape {
    query_heads: 32,
    kv_heads: 8,
    head_dim: 64,
};
/// Units of slices: a KV head with its query heads, and elements of the down projection.
const OUTPUT_UNIT: usize = HIDDEN / 8;
const DOWN_UNIT: usize = 128;
const SLICES: usize = 8;
const BLOCK_TOKENS: usize = 16;
const PROMPT_TOKENS: usize = 512;
const SEQUENCES_MAX: usize = 32;
/// Tokens of a decoded sequence that are in its KV cache.
const CONTEXT: usize = 128;

/// A measured pass: a prompt, or a step of several sequences.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Prefill,
    Decode { sequences: usize },
}

const PASSES: [Pass; 5] = [
    Pass::Decode { sequences: 1 },
    Pass::Decode { sequences: 4 },
    Pass::Decode { sequences: 8 },
    Pass::Decode {
        sequences: SEQUENCES_MAX,
    },
    Pass::Prefill,
];

impl Pass {
    fn name(self) -> String {
        match self {
            Self::Prefill => "prefill".to_owned(),
            Self::Decode { sequences } => sequences.to_string(),
        }
    }

    fn batch(self) -> Batch {
        let (sequences, tokens, position) = match self {
            Self::Prefill => (1, PROMPT_TOKENS, 0),
            Self::Decode { sequences } => (sequences, 1, CONTEXT),
        };
        let blocks = (position + tokens).div_ceil(BLOCK_TOKENS);
        let segments = (0..sequences).map(|sequence| BatchSegment {
            rows: sequence * tokens..(sequence + 1) * tokens,
            position,
            blocks: sequence * blocks..(sequence + 1) * blocks,
            state: None,
        });
        let positions = (0..sequences).flat_map(|_| position..position + tokens);
        Batch {
            tokens: vec![0; sequences * tokens],
            positions: positions.map(|position| position as u32).collect(),
            segments: segments.collect(),
            blocks: (0..sequences * blocks)
                .map(|block| BlockIndex(block as u32))
                .collect(),
            ..Batch::default()
        }
    }
}

/// Matrices of a layer; those whose products have slices are there with and without.
struct DecoderLayer {
    qkv: CpuMatrix,
    gate_up: CpuMatrix,
    whole: RowParallel,
    sliced: RowParallel,
}

/// Matrices of a pass: those with the model's slices, or with one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slicing {
    Whole,
    Sliced,
}

/// Matrices whose products have slices.
struct RowParallel {
    output: CpuMatrix,
    down: CpuMatrix,
}

struct Model {
    layers: Vec<DecoderLayer>,
    head: CpuMatrix,
    norm: CpuVector,
    rotary: CpuRotary,
}

fn stored(rows: usize, columns: usize) -> [StoredMatrix; 1] {
    let weights = (0..rows * columns).map(|i| (i * 7919 % 1021) as f32 / 1021.0 - 0.5);
    let weights: Vec<bf16> = weights.map(bf16::from_f32).collect();
    [StoredTensor::from_bf16("weights", rows, columns, &weights).into()]
}

impl Model {
    fn new(pack: &CpuWeightLoader) -> Self {
        let qkv = stored(HEADS.qkv_width(), HIDDEN);
        let output = stored(HIDDEN, HIDDEN);
        let gate_up = stored(2 * INNER, HIDDEN);
        let down = stored(HIDDEN, INNER);
        let load = |stack: &[StoredMatrix], slices: &InnerSlices| {
            pack.sliced_matrix(stack, None, slices).expect("memory")
        };
        let row_parallel = |of_output: &InnerSlices, of_down: &InnerSlices| RowParallel {
            output: load(&output, of_output),
            down: load(&down, of_down),
        };
        let layer = |_| DecoderLayer {
            qkv: load(&qkv, &InnerSlices::whole(HIDDEN)),
            gate_up: pack.gate_up(&gate_up, None).expect("memory"),
            whole: row_parallel(&InnerSlices::whole(HIDDEN), &InnerSlices::whole(INNER)),
            sliced: row_parallel(
                &InnerSlices::halved(HIDDEN, OUTPUT_UNIT, SLICES),
                &InnerSlices::halved(INNER, DOWN_UNIT, SLICES),
            ),
        };
        let angles = (0..PROMPT_TOKENS * HEADS.head_dim / 2).map(|i| i as f32);
        let angles: Vec<f32> = angles.collect();
        let cos: Vec<f32> = angles.iter().map(|angle| angle.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|angle| angle.sin()).collect();
        let rotary = RotaryTable {
            cos: &cos,
            sin: &sin,
            half: HEADS.head_dim / 2,
            query_factors: &[],
        };
        Self {
            layers: (0..LAYERS).map(layer).collect(),
            head: load(&stored(VOCABULARY, HIDDEN), &InnerSlices::whole(HIDDEN)),
            norm: pack.vector(&vec![1.0; HIDDEN]).expect("memory"),
            rotary: pack.rotary(rotary).expect("memory"),
        }
    }
}

/// Buffers of a pass.
struct Buffers {
    residual: CpuRows,
    normed: CpuRows,
    qkv: CpuRows,
    attended: CpuRows,
    delta: CpuRows,
    gate_up: CpuRows,
    gated: CpuRows,
    logits: CpuRows,
}

impl Buffers {
    fn new(ops: &CpuOps) -> Self {
        let rows = |width| {
            ops.rows(PROMPT_TOKENS, width, BufferRole::Activations)
                .expect("memory")
        };
        let mut residual = rows(HIDDEN);
        for (i, x) in residual.values_mut().iter_mut().enumerate() {
            *x = (i * 31 % 257) as f32 / 257.0 - 0.5;
        }
        Self {
            residual,
            normed: rows(HIDDEN),
            qkv: rows(HEADS.qkv_width()),
            attended: rows(HEADS.query_width()),
            delta: rows(HIDDEN),
            gate_up: rows(2),
            gated: rows(INNER),
            logits: ops
                .rows(SEQUENCES_MAX, VOCABULARY, BufferRole::Activations)
                .expect("memory"),
        }
    }
}

/// A model, and all that its passes use.
struct ModelPasses {
    model: Model,
    ops: CpuOps,
    pool: CpuPool,
    buffers: Buffers,
}

impl ModelPasses {
    fn new(quantize: Option<Quantize>) -> Self {
        let options = CpuOptions {
            threads: 1,
            quantize,
            ..CpuOptions::new(Precision::Bf16)
        };
        let ops = CpuOps::new(&options).expect("the best instruction set");
        let blocks = SEQUENCES_MAX * (CONTEXT + 1).div_ceil(BLOCK_TOKENS);
        let shape = KvPoolShape::uniform(HEADS, LAYERS, BLOCK_TOKENS, blocks, KvType::Bf16);
        Self {
            model: Model::new(&CpuWeightLoader::new(&options)),
            pool: ops.pool(shape).expect("memory"),
            buffers: Buffers::new(&ops),
            ops,
        }
    }

    /// CPU seconds of a pass through all layers, and of the head for the sequences' last rows.
    fn seconds(&mut self, batch: &Batch, slicing: Slicing) -> f64 {
        (self.ops)
            .begin(batch, PassPurpose::Unspecified, &[])
            .expect("a plan");
        let from = thread_seconds();
        for layer in 0..LAYERS {
            self.attention(batch, layer);
            self.products(batch.rows_count(), layer, slicing);
        }
        let (buffers, head) = (&mut self.buffers, &self.model.head);
        let rows = batch.segments.len();
        (self.ops)
            .matmul(head, rows, &buffers.residual, &mut buffers.logits)
            .expect("logits");
        thread_seconds() - from
    }

    /// Queries, keys and values of a layer, and attention.
    fn attention(&mut self, batch: &Batch, layer: usize) {
        let Self {
            model,
            ops,
            pool,
            buffers,
        } = self;
        let rows = batch.rows_count();
        let from = NormIo {
            residual: &mut buffers.residual,
            delta: None,
            normed: &mut buffers.normed,
        };
        let qkv = &model.layers[layer].qkv;
        ops.norm_matmul(&norm(&model.norm), rows, from, qkv, &mut buffers.qkv)
            .expect("a product");
        let to = PoolLayer { pool, layer };
        ops.rotate_store(batch, &model.rotary, &mut buffers.qkv, to)
            .expect("stored keys");
        let attention = Attention {
            layer,
            scale: 0.125,
            soft_cap: None,
            window: None,
        };
        let io = AttentionIo {
            qkv: &buffers.qkv,
            pool,
            sinks: None,
            out: &mut buffers.attended,
        };
        ops.attend(batch, &attention, io).expect("attention");
    }

    /// The rest of a layer. The sum of a layer's output and its input is left out, which no kind of
    /// slices changes, so that numbers stay the same from pass to pass.
    fn products(&mut self, rows: usize, layer: usize, slicing: Slicing) {
        let Self {
            model,
            ops,
            buffers,
            ..
        } = self;
        let layer = &model.layers[layer];
        let matrices = match slicing {
            Slicing::Whole => &layer.whole,
            Slicing::Sliced => &layer.sliced,
        };
        let delta = &mut buffers.delta;
        ops.matmul(&matrices.output, rows, &buffers.attended, delta)
            .expect("a product");
        let from = NormIo {
            residual: &mut buffers.residual,
            delta: None,
            normed: &mut buffers.normed,
        };
        let to = GatedIo {
            activation: Activation::Silu,
            gate_up: &mut buffers.gate_up,
            out: &mut buffers.gated,
        };
        ops.norm_gated(&norm(&model.norm), rows, from, &layer.gate_up, to)
            .expect("a gated product");
        ops.matmul(&matrices.down, rows, &buffers.gated, delta)
            .expect("a product");
    }
}

fn norm(weight: &CpuVector) -> Norm<'_, CpuVector> {
    Norm {
        formula: NormFormula::RmsNorm,
        weight,
        epsilon: 1e-5,
    }
}

/// CPU time of this thread in seconds.
fn thread_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the clock exists, and the time is written before it is read.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Ratios of a pass's speeds with and without slices, ascending.
fn ratios(bench: &mut ModelPasses, pass: Pass, pairs: usize) -> Vec<f64> {
    let batch = pass.batch();
    // Not counted: the first pass of a shape allocates.
    bench.seconds(&batch, Slicing::Whole);
    let mut ratios: Vec<f64> = (0..pairs)
        .map(|pair| {
            let mut order = [Slicing::Whole, Slicing::Sliced];
            order.rotate_left(pair % 2);
            let seconds = order.map(|slicing| bench.seconds(&batch, slicing));
            match order[0] {
                Slicing::Whole => seconds[0] / seconds[1],
                Slicing::Sliced => seconds[1] / seconds[0],
            }
        })
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    ratios
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let pairs: usize = args.iter().find_map(|arg| arg.parse().ok()).unwrap_or(30);
    let is_named = |name: &str| args.iter().any(|arg| arg == name);
    let forms = [None, Some(Quantize::Int8), Some(Quantize::Int4)];
    let name = |form: Option<Quantize>| form.map_or("bf16", Quantize::name);
    let has_forms = forms.into_iter().any(|form| is_named(name(form)));
    let is_pass_named = |pass: &Pass| is_named(&format!("pass={}", pass.name()));
    let has_passes = PASSES.iter().any(is_pass_named);
    for form in forms {
        if has_forms && !is_named(name(form)) {
            continue;
        }
        let mut bench = ModelPasses::new(form);
        for pass in PASSES {
            if has_passes && !is_pass_named(&pass) {
                continue;
            }
            // A prompt takes as long as tens of steps.
            let pairs = if pass == Pass::Prefill {
                pairs / 4
            } else {
                pairs
            }
            .max(1);
            let ratios = ratios(&mut bench, pass, pairs);
            let at = |quarter: usize| ratios[(ratios.len() - 1) * quarter / 4];
            println!(
                "{} {:8} {:.3} of the speed without slices ({:.3} to {:.3}, {pairs} pairs)",
                name(form),
                pass.name(),
                at(2),
                at(1),
                at(3)
            );
        }
    }
}
