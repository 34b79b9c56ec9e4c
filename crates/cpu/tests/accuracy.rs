//! Accuracy of quantised weights and keys: the bundled, trained checkpoint in every layout,
//! compared with itself in bf16, on a text that it generated.

use cleave_checkpoint::Checkpoint;
use cleave_checkpoint::synth::{QuantizeOptions, QuantizedLayout, quantize};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader, Quantize};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, SamplingParams, Segment, SlotIndex, StepPlan, TokenId,
};
use cleave_engine::ops::{KvType, Precision};
use cleave_engine::{Engine, EngineLimits, ModelEngine, Weights};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokens that are drawn, then scored.
const TOKENS: usize = 200;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo")
}

fn engine(dir: &Path, kv: KvType) -> ModelEngine<CpuOps> {
    build(
        dir,
        &CpuOptions {
            kv,
            ..CpuOptions::new(Precision::Bf16)
        },
    )
}

fn build(dir: &Path, options: &CpuOptions) -> ModelEngine<CpuOps> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let weights = Weights::load(
        &CpuWeightLoader::new(options),
        &checkpoint,
        None,
        &mut |_| {},
    )
    .unwrap();
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: TOKENS as u32 / 16 + 2,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: TOKENS as u32 + 16,
        windows_count: 0,
    };
    ModelEngine::new(CpuOps::new(options).unwrap(), Arc::new(weights), limits).unwrap()
}

fn open(prompt: &[TokenId], sampling: SamplingParams) -> OpenSlot {
    OpenSlot {
        slot: SlotIndex(0),
        sampling: Arc::new(sampling),
        prompt: Arc::from(prompt),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    }
}

fn segment(position: usize, len: usize, logits: LogitsWanted) -> Segment {
    Segment {
        slot: SlotIndex(0),
        position: position as u32,
        len: len as u32,
        blocks: (0..TOKENS as u32 / 16 + 2).map(BlockIndex).collect(),
        logits,
        drafts: Vec::new(),
        state: None,
        window: None,
    }
}

/// A text sampled from the model itself.
fn sampled_text(engine: &mut dyn Engine) -> Vec<TokenId> {
    let sampling = SamplingParams {
        temperature: 1.0,
        seed: 11,
        ..SamplingParams::greedy()
    };
    let mut tokens = vec![300, 301, 302];
    let mut opens = vec![open(&tokens, sampling)];
    let (mut position, mut len) = (0, tokens.len());
    while tokens.len() < TOKENS {
        let plan = StepPlan {
            opens: std::mem::take(&mut opens),
            segments: vec![segment(position, len, LogitsWanted::Sample)],
            ..StepPlan::default()
        };
        tokens.push(engine.step(&plan).unwrap().sampled[0].1.token);
        (position, len) = (position + len, 1);
    }
    tokens
}

/// The log-probability of every token, at every position.
fn scores(engine: &mut dyn Engine, tokens: &[TokenId]) -> Vec<Vec<f64>> {
    let vocab = engine.describe().vocab_size;
    let sampling = SamplingParams {
        prompt_logprobs: Some(vocab),
        ..SamplingParams::greedy()
    };
    let plan = StepPlan {
        opens: vec![open(tokens, sampling)],
        segments: vec![segment(0, tokens.len(), LogitsWanted::Score)],
        ..StepPlan::default()
    };
    let scored = engine.step(&plan).unwrap().prompt_scores.remove(0).1;
    let each = scored.into_iter().map(|sampled| {
        let scores = sampled.scores.unwrap();
        let mut logprobs = vec![f64::NAN; vocab as usize];
        for (token, logit) in scores.top {
            logprobs[token as usize] = f64::from(logit) - f64::from(scores.normalizer);
        }
        logprobs
    });
    each.collect()
}

/// Mean of KL(reference ‖ other) in nats, and the share of positions with the same most likely
/// token.
fn compare(reference: &[Vec<f64>], other: &[Vec<f64>]) -> (f64, f64) {
    let count = reference.len() as f64;
    let best = |scores: &[f64]| {
        let best = (0..scores.len()).max_by(|a, b| scores[*a].total_cmp(&scores[*b]));
        best.unwrap()
    };
    let (mut divergence, mut agreed) = (0.0, 0.0);
    for (p, q) in reference.iter().zip(other) {
        let terms = p.iter().zip(q).map(|(p, q)| p.exp() * (p - q));
        divergence += terms.sum::<f64>() / count;
        agreed += f64::from(u8::from(best(p) == best(q))) / count;
    }
    (divergence, agreed)
}

/// Bounds are about twice the measured divergence, in nats: 0.0019 for KV in fp8, 0.0001 for KV in
/// int8, 0.0024 and 0.0025 for fp8, 0.0009 for int8, 0.027, 0.022 and 0.036 for int4; rounded at
/// load 0.0011 and 0.025. With activations in bf16, int8 had 0.0002, and int4 the same as here. 688
/// columns are no multiple of 32: four-bit groups leave `down_proj` dense, and rounding at load
/// gives it eight bits.
#[test]
fn quantised_answers_stay_near_those_of_bf16() {
    let mut dense = engine(&demo(), KvType::Bf16);
    let tokens = sampled_text(&mut dense);
    let reference = scores(&mut dense, &tokens);
    let (same, all) = compare(&reference, &scores(&mut dense, &tokens));
    assert!(same.abs() < 1e-12 && all > 1.0 - 1e-9, "{same} {all}");
    let mut comparisons = Vec::new();
    for (kv, divergence_max, agreed_min) in [
        (KvType::Fp8E4m3, 0.004, 0.9),
        (KvType::Int8PerTokenHead, 0.0002, 0.97),
    ] {
        let quantized = scores(&mut engine(&demo(), kv), &tokens);
        let (divergence, agreed) = compare(&reference, &quantized);
        comparisons.push((kv.name(), divergence, agreed, divergence_max, agreed_min));
    }
    for (layout, group, divergence_max, agreed_min) in [
        (QuantizedLayout::Fp8, 1, 0.005, 0.93),
        (QuantizedLayout::Fp8Block, 128, 0.005, 0.93),
        (QuantizedLayout::Int8, 1, 0.002, 0.97),
        (QuantizedLayout::Int4, 32, 0.05, 0.85),
        (QuantizedLayout::Awq, 64, 0.045, 0.85),
        (QuantizedLayout::Gptq, 128, 0.07, 0.82),
        (QuantizedLayout::Gptq8, 32, 0.002, 0.97),
        (QuantizedLayout::Mxfp8, 32, 0.005, 0.93),
        (QuantizedLayout::Mxfp4, 32, 0.2, 0.7),
        (QuantizedLayout::Nvfp4, 16, 0.1, 0.8),
        (QuantizedLayout::ModelOptNvfp4, 16, 0.1, 0.8),
        (QuantizedLayout::ModelOptFp8, 1, 0.005, 0.93),
        (QuantizedLayout::F16, 1, 0.002, 0.97),
    ] {
        let out = tempfile::tempdir().unwrap();
        quantize(
            &demo(),
            out.path(),
            QuantizeOptions { layout, group },
            &mut |_| {},
        )
        .unwrap();
        let options = CpuOptions {
            keeps_f16: layout == QuantizedLayout::F16,
            ..CpuOptions::new(Precision::Bf16)
        };
        let quantized = scores(&mut build(out.path(), &options), &tokens);
        let (divergence, agreed) = compare(&reference, &quantized);
        let name = match layout {
            QuantizedLayout::Fp8 => "fp8",
            QuantizedLayout::Fp8Block => "fp8, blocks of 128",
            QuantizedLayout::Int8 => "int8",
            QuantizedLayout::Int4 => "int4, groups of 32",
            QuantizedLayout::Awq => "awq, groups of 64",
            QuantizedLayout::Gptq => "gptq, groups of 128",
            QuantizedLayout::Gptq8 => "gptq of eight bits, groups of 32",
            QuantizedLayout::Mxfp8 => "mxfp8",
            QuantizedLayout::Mxfp4 => "mxfp4",
            QuantizedLayout::Nvfp4 => "nvfp4",
            QuantizedLayout::ModelOptNvfp4 => "nvfp4 of modelopt",
            QuantizedLayout::ModelOptFp8 => "fp8 of modelopt",
            QuantizedLayout::F16 => "f16, kept",
        };
        comparisons.push((name, divergence, agreed, divergence_max, agreed_min));
    }
    for (quantize, divergence_max, agreed_min) in
        [(Quantize::Int8, 0.002, 0.97), (Quantize::Int4, 0.05, 0.85)]
    {
        let options = CpuOptions {
            quantize: Some(quantize),
            ..CpuOptions::new(Precision::Bf16)
        };
        let quantized = scores(&mut build(&demo(), &options), &tokens);
        let (divergence, agreed) = compare(&reference, &quantized);
        comparisons.push((
            quantize.name(),
            divergence,
            agreed,
            divergence_max,
            agreed_min,
        ));
    }
    for (name, divergence, agreed, divergence_max, agreed_min) in comparisons {
        assert!(
            divergence < divergence_max && agreed > agreed_min,
            "{name}: {divergence:.6} nats, {:.1} % the same token",
            agreed * 100.0
        );
    }
}
