//! The whole forward pass on every instruction set that this processor has, compared with the
//! reference's goldens, and with itself on every path.

use crate::harness::{available, options};
use cleave_checkpoint::Checkpoint;
use cleave_checkpoint::synth::{QuantizeOptions, QuantizedLayout, quantize};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader, Isa, Quantize};
use cleave_engine::conformance::{
    drafts, goldens, path_independence, poisoned, pooled_paths, pooling, vectors,
};
use cleave_engine::ops::{KvType, Precision};
use cleave_engine::{Engine, EngineLimits, ModelEngine, Weights};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const FOLDERS: [&str; 35] = [
    "cohere",
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3",
    "gemma3-images",
    "glm4",
    "glm4-moe",
    "gpt-oss",
    "granite",
    "granite4",
    "granite4-moe",
    "granitemoe",
    "granitemoeshared",
    "llama2",
    "llama3",
    "llama3-new",
    "minimax-m2",
    "ministral3",
    "mistral",
    "mistral-small3",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "phi4-mini",
    "phi4-mini-short",
    "qwen2",
    "qwen2-moe",
    "qwen2.5",
    "qwen3",
    "qwen3-moe",
    "seed-oss",
    "smollm3",
];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

fn engine(
    dir: &Path,
    limits: EngineLimits,
    options: &CpuOptions,
) -> Result<Box<dyn Engine>, String> {
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    let pack = CpuWeightLoader::new(options);
    let weights = Weights::load(&pack, &checkpoint, None, &mut |_| {});
    let weights = Arc::new(weights.map_err(|error| error.to_string())?);
    let ops = CpuOps::new(options).map_err(|error| error.to_string())?;
    let engine = ModelEngine::new(ops, weights, limits).map_err(|error| error.to_string())?;
    Ok(Box::new(engine))
}

// Invariant: I17.
#[test]
fn tokens_and_logits_match_the_reference_on_every_isa() {
    for isa in available() {
        for name in FOLDERS {
            let options = options(Precision::F32, isa, 2);
            let build = |dir: &Path, limits| engine(dir, limits, &options);
            goldens(&folder(name), &build).unwrap_or_else(|error| panic!("{isa}: {error}"));
        }
    }
}

// Invariant: I58.
#[test]
fn given_up_windows_change_no_token_on_every_isa() {
    for isa in available() {
        for name in WINDOWED {
            let options = options(Precision::F32, isa, 2);
            let build = |dir: &Path, limits| engine(dir, windowed(limits), &options).map(poisoned);
            goldens(&folder(name), &build).unwrap_or_else(|error| panic!("{isa}: {error}"));
        }
    }
    for (name, kv) in [
        ("gemma3", KvType::Fp8E4m3),
        ("gpt-oss", KvType::Int8PerTokenHead),
        ("mistral", KvType::Bf16),
    ] {
        let options = CpuOptions {
            kv,
            ..options(Precision::Bf16, Isa::detect(), 2)
        };
        let build = |dir: &Path, limits| engine(dir, windowed(limits), &options);
        path_independence(&folder(name), &build).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

const WINDOWED: [&str; 9] = [
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3",
    "gemma3-images",
    "gpt-oss",
    "mistral",
    "olmo3",
    "phi3",
];

/// The same limits with a window plane.
fn windowed(limits: EngineLimits) -> EngineLimits {
    EngineLimits {
        windows_count: 64.max(limits.blocks_count),
        ..limits
    }
}

#[test]
fn vectors_match_the_reference_on_every_isa() {
    for isa in available() {
        for name in ["llama3", "qwen3"] {
            let options = options(Precision::F32, isa, 2);
            let build = |dir: &Path, limits| engine(dir, limits, &options);
            pooling(&folder(name), &build).unwrap_or_else(|error| panic!("{isa}: {error}"));
        }
        for name in ["granite", "qwen3"] {
            let options = options(Precision::F32, isa, 2);
            let build = |dir: &Path, limits| engine(dir, limits, &options);
            vectors(&folder(name), usize::MAX, &build)
                .unwrap_or_else(|error| panic!("{isa}: {error}"));
        }
    }
}

#[test]
fn bf16_vectors_are_path_independent() {
    let options = options(Precision::Bf16, Isa::detect(), 2);
    let build = |dir: &Path, limits| engine(dir, limits, &options);
    pooled_paths(&folder("qwen3"), &build).unwrap();
}

/// Every engine that the suite builds gets another number of threads, so that moving a sequence
/// between engines also shows that the number of threads has no effect.
fn path_independent(precision: Precision, isa: Isa, names: &[&str]) {
    let built = AtomicUsize::new(0);
    let build = |dir: &Path, limits| {
        let threads = 1 + built.fetch_add(1, Ordering::Relaxed) % 3;
        engine(dir, limits, &options(precision, isa, threads))
    };
    for name in names {
        path_independence(&folder(name), &build).unwrap_or_else(|error| panic!("{isa}: {error}"));
    }
}

#[test]
fn f32_results_are_path_independent() {
    path_independent(Precision::F32, Isa::detect(), &FOLDERS);
}

#[test]
fn bf16_results_are_path_independent() {
    path_independent(Precision::Bf16, Isa::detect(), &FOLDERS);
}

// Invariant: I48.
// Lesson: 36.
#[test]
fn drafts_change_no_token_on_the_cpu() {
    for (seed, name) in (1..).zip(["llama3", "mistral", "qwen3", "olmo2"]) {
        for precision in [Precision::F32, Precision::Bf16] {
            let options = options(precision, Isa::detect(), 2);
            let build = |dir: &Path, limits| engine(dir, limits, &options);
            drafts(&folder(name), &build, seed).unwrap();
        }
    }
}

/// An engine must not receive blocks of another number format.
#[test]
fn the_kv_format_is_part_of_the_fingerprint() {
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: 1,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: 1,
        windows_count: 0,
    };
    let described = |kv: KvType| {
        let options = CpuOptions {
            kv,
            ..options(Precision::Bf16, Isa::detect(), 1)
        };
        let engine = engine(&folder("qwen2"), limits, &options).unwrap();
        let about = engine.describe();
        (about.fingerprint.clone(), about.capacity.block_bytes)
    };
    let (wide, quantized) = (described(KvType::Bf16), described(KvType::Fp8E4m3));
    assert_ne!(wide.0, quantized.0);
    assert_eq!(wide.1, 2 * quantized.1);
    assert_eq!(quantized, described(KvType::Fp8E4m3));
    let scaled = described(KvType::Int8PerTokenHead);
    assert!(scaled.0 != wide.0 && scaled.0 != quantized.0);
    // 16 tokens, with four bytes for each key's and each value's scale.
    let checkpoint = Checkpoint::open(&folder("qwen2")).unwrap();
    let heads: usize = checkpoint
        .spec()
        .attention()
        .map(|a| a.heads.kv_heads)
        .sum();
    let scales = heads * 2 * 16 * 4;
    assert_eq!(scaled.1 as usize, quantized.1 as usize + scales);
}

/// Keys and values of eight bits, in both number formats.
#[test]
fn eight_bit_kv_results_are_path_independent() {
    for (kv, isa, name) in [
        (KvType::Fp8E4m3, Isa::detect(), "mistral"),
        (KvType::Int8PerTokenHead, Isa::detect(), "mistral"),
        (KvType::Int8PerTokenHead, Isa::Plain, "qwen3"),
        (KvType::Int8PerTokenHead, Isa::detect(), "llama3"),
        (KvType::Fp8E4m3, Isa::detect(), "olmo2"),
    ] {
        for precision in [Precision::F32, Precision::Bf16] {
            let built = AtomicUsize::new(0);
            let build = |dir: &Path, limits| {
                let threads = 1 + built.fetch_add(1, Ordering::Relaxed) % 3;
                let options = CpuOptions {
                    kv,
                    ..options(precision, isa, threads)
                };
                engine(dir, limits, &options)
            };
            path_independence(&folder(name), &build)
                .unwrap_or_else(|error| panic!("{isa} {}: {error}", kv.name()));
        }
    }
}

// Invariant: I11.
#[test]
fn results_are_path_independent_on_every_isa() {
    for isa in available() {
        path_independent(Precision::F32, isa, &["mistral"]);
        path_independent(Precision::Bf16, isa, &["olmo2", "qwen3"]);
    }
}

/// Weights rounded when they are loaded.
#[test]
fn weights_rounded_at_load_are_path_independent() {
    for quantize in [
        Quantize::Int8,
        Quantize::Int4,
        Quantize::Mxfp4,
        Quantize::Nvfp4,
    ] {
        for isa in [Isa::detect(), Isa::Plain] {
            let build = |dir: &Path, limits| {
                let options = CpuOptions {
                    quantize: Some(quantize),
                    ..options(Precision::Bf16, isa, 2)
                };
                engine(dir, limits, &options)
            };
            for name in ["olmo2", "qwen3"] {
                path_independence(&folder(name), &build).unwrap();
            }
        }
    }
}

/// Weights as their makers rounded them.
#[test]
fn quantised_checkpoints_are_path_independent() {
    for (name, layout, group) in [
        ("qwen3", QuantizedLayout::Int8, 1),
        ("qwen3", QuantizedLayout::Gptq8, 32),
        ("qwen3", QuantizedLayout::Int4, 32),
        ("qwen3", QuantizedLayout::Awq, 32),
        ("qwen3", QuantizedLayout::Mxfp4, 32),
        ("qwen3", QuantizedLayout::Nvfp4, 16),
        ("olmo2", QuantizedLayout::Int8, 1),
        ("olmo2", QuantizedLayout::Awq, 32),
    ] {
        let from = folder(name);
        let out = tempfile::tempdir().unwrap();
        let quantizing = QuantizeOptions { layout, group };
        quantize(&from, out.path(), quantizing, &mut |_| {}).unwrap();
        std::fs::copy(from.join("goldens.json"), out.path().join("goldens.json")).unwrap();
        let build =
            |dir: &Path, limits| engine(dir, limits, &options(Precision::Bf16, Isa::detect(), 2));
        path_independence(out.path(), &build).unwrap();
    }
}

/// f16 weights that are kept in f16.
#[test]
fn f16_weights_are_path_independent() {
    let from = folder("qwen3");
    let out = tempfile::tempdir().unwrap();
    let quantizing = QuantizeOptions {
        layout: QuantizedLayout::F16,
        group: 1,
    };
    quantize(&from, out.path(), quantizing, &mut |_| {}).unwrap();
    std::fs::copy(from.join("goldens.json"), out.path().join("goldens.json")).unwrap();
    for isa in [Isa::detect(), Isa::Plain] {
        let build = |dir: &Path, limits| {
            let options = CpuOptions {
                keeps_f16: true,
                ..options(Precision::Bf16, isa, 2)
            };
            engine(dir, limits, &options)
        };
        path_independence(out.path(), &build).unwrap();
    }
}

/// Weights rounded differently give different keys and values.
#[test]
fn the_rounding_of_weights_is_part_of_the_fingerprint() {
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: 1,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: 1,
        windows_count: 0,
    };
    let described = |quantize| {
        let options = CpuOptions {
            quantize,
            ..options(Precision::Bf16, Isa::detect(), 1)
        };
        let engine = engine(&folder("qwen2"), limits, &options).unwrap();
        let about = engine.describe();
        (about.fingerprint.0.clone(), about.model.clone())
    };
    let of_processor = Quantize::ALL.into_iter().filter(|of| *of != Quantize::Fp8);
    let all: Vec<_> = [None]
        .into_iter()
        .chain(of_processor.map(Some))
        .map(described)
        .collect();
    let fingerprints: BTreeSet<&String> = all.iter().map(|(fingerprint, _)| fingerprint).collect();
    assert_eq!(fingerprints.len(), 5);
    assert!(all[1].1.ends_with("rounded to int8"), "{}", all[1].1);
    assert_eq!(all[2], described(Some(Quantize::Int4)));
}

/// A processor would multiply them as bf16.
#[test]
fn a_processor_refuses_to_round_weights_to_fp8() {
    let options = CpuOptions {
        quantize: Some(Quantize::Fp8),
        ..options(Precision::Bf16, Isa::detect(), 1)
    };
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: 1,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: 1,
        windows_count: 0,
    };
    let refused = engine(&folder("qwen2"), limits, &options).err().unwrap();
    assert!(refused.contains("fp8 are for a GPU"), "{refused}");
}
