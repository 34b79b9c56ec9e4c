//! The forward pass compared with the reference's goldens, and with itself on every path.

use crate::reference;
use cleave_checkpoint::Checkpoint;
use cleave_engine::conformance::{drafts, goldens, path_independence, pooling, vectors};
use cleave_engine::{Engine, EngineLimits, Weights};
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

fn build(dir: &Path, limits: EngineLimits) -> Result<Box<dyn Engine>, String> {
    Ok(Box::new(reference::engine(dir, limits)?))
}

/// The same with a window plane, where the model has windows of the suites' context.
fn build_windowed(dir: &Path, limits: EngineLimits) -> Result<Box<dyn Engine>, String> {
    build(
        dir,
        EngineLimits {
            windows_count: 64.max(limits.blocks_count),
            ..limits
        },
    )
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

// Invariant: I58.
#[test]
fn given_up_windows_change_no_token_or_logit() {
    for name in WINDOWED {
        goldens(&folder(name), &build_windowed).unwrap();
    }
}

// Invariant: I11.
#[test]
fn answers_with_windows_are_path_independent() {
    for name in ["gemma3", "mistral"] {
        path_independence(&folder(name), &build_windowed).unwrap();
    }
}

macro_rules! checkpoint {
    ($name:ident, $folder:literal) => {
        mod $name {
            use super::*;

            #[test]
            fn tokens_and_logits_match_the_reference() {
                goldens(&folder($folder), &build).unwrap();
            }

            // Invariant: I11.
            #[test]
            fn answers_are_path_independent() {
                path_independence(&folder($folder), &build).unwrap();
            }
        }
    };
}

checkpoint!(cohere, "cohere");
checkpoint!(cohere2, "cohere2");
checkpoint!(exaone4, "exaone4");
checkpoint!(gemma2, "gemma2");
checkpoint!(gemma3, "gemma3");
checkpoint!(gemma3_images, "gemma3-images");
checkpoint!(glm4, "glm4");
checkpoint!(glm4_moe, "glm4-moe");
checkpoint!(gpt_oss, "gpt-oss");
checkpoint!(granite, "granite");
checkpoint!(granite4, "granite4");
checkpoint!(granite4_moe, "granite4-moe");
checkpoint!(granitemoe, "granitemoe");
checkpoint!(granitemoeshared, "granitemoeshared");
checkpoint!(llama2, "llama2");
checkpoint!(llama3, "llama3");
checkpoint!(llama3_new, "llama3-new");
checkpoint!(minimax_m2, "minimax-m2");
checkpoint!(ministral3, "ministral3");
checkpoint!(mistral, "mistral");
checkpoint!(mistral_small3, "mistral-small3");
checkpoint!(mixtral, "mixtral");
checkpoint!(olmo2, "olmo2");
checkpoint!(olmo3, "olmo3");
checkpoint!(olmoe, "olmoe");
checkpoint!(phi3, "phi3");
checkpoint!(phi4_mini, "phi4-mini");
checkpoint!(phi4_mini_short, "phi4-mini-short");
checkpoint!(qwen2, "qwen2");
checkpoint!(qwen2_moe, "qwen2-moe");
checkpoint!(qwen2_5, "qwen2.5");
checkpoint!(qwen3, "qwen3");
checkpoint!(qwen3_moe, "qwen3-moe");
checkpoint!(seed_oss, "seed-oss");
checkpoint!(smollm3, "smollm3");

// Invariant: I11.
#[test]
fn vectors_match_the_reference_on_every_path() {
    for name in ["llama3", "olmo2", "qwen2", "qwen3"] {
        pooling(&folder(name), &build).unwrap();
    }
}

/// Granite's vectors are not normalised, so that the factor of its logits shows if it is in them.
#[test]
fn vectors_match_sentence_transformers() {
    for name in ["granite", "qwen3"] {
        vectors(&folder(name), usize::MAX, &build).unwrap();
    }
}

// Invariant: I48.
#[test]
fn drafts_change_no_token_on_the_cpu() {
    for (seed, name) in (1..).zip(["llama3", "mistral", "qwen3", "olmo2"]) {
        drafts(&folder(name), &build, seed).unwrap();
    }
}

/// A Llama with every bias that it may have. It has no goldens of its own, but a Qwen2 is a Llama
/// with biases on q, k and v; with the other biases zero, Qwen2's goldens must match.
#[test]
fn a_llama_with_biases_matches_qwen2_goldens() {
    let dir = tempfile::tempdir().unwrap();
    let from = folder("qwen2");
    for file in ["generation_config.json", "goldens.json"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["architectures"] = serde_json::json!(["LlamaForCausalLM"]);
    config["model_type"] = serde_json::json!("llama");
    config["attention_bias"] = serde_json::json!(true);
    config["mlp_bias"] = serde_json::json!(true);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let stored = std::fs::read(from.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&stored).unwrap();
    let zeros = vec![0u8; 2 * 108];
    let mut tensors = stored.tensors();
    for layer in 0..2 {
        for (part, size) in [
            ("self_attn.o_proj", 64),
            ("mlp.gate_proj", 108),
            ("mlp.up_proj", 108),
            ("mlp.down_proj", 64),
        ] {
            let bias = safetensors::tensor::TensorView::new(
                safetensors::Dtype::BF16,
                vec![size],
                &zeros[..2 * size],
            );
            tensors.push((format!("model.layers.{layer}.{part}.bias"), bias.unwrap()));
        }
    }
    let file = dir.path().join("model.safetensors");
    safetensors::serialize_to_file(tensors, None, &file).unwrap();
    goldens(dir.path(), &build).unwrap();
}

#[test]
fn loading_counts_every_byte_once() {
    for name in ["llama2", "llama3", "olmo2", "qwen2", "qwen3"] {
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        let mut reports = Vec::new();
        Weights::load(
            &reference::PlainOps::default(),
            &checkpoint,
            Some(32),
            &mut |progress| {
                reports.push(progress);
            },
        )
        .unwrap();
        assert!(reports.is_sorted_by_key(|progress| progress.bytes_done));
        let last = reports.last().unwrap();
        assert_eq!(last.bytes_done, checkpoint.bytes_total(), "{name}");
        assert_eq!(last.bytes_total, checkpoint.bytes_total(), "{name}");
    }
}

// Lesson: 19.
/// Lesson 19: the fingerprint must differ for other weights and block sizes, and must not for other
/// capacities.
#[test]
fn the_fingerprint_depends_on_weights_and_block_size_only() {
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: 4,
        states_count: 0,
        slots_count: 2,
        step_tokens_max: 8,
        windows_count: 0,
    };
    let fingerprint = |name: &str, limits: EngineLimits| {
        let engine = build(&folder(name), limits).unwrap();
        engine.describe().fingerprint.clone()
    };
    let first = fingerprint("qwen3", limits);
    let larger = EngineLimits {
        blocks_count: 9,
        slots_count: 5,
        step_tokens_max: 32,
        ..limits
    };
    assert_eq!(first, fingerprint("qwen3", larger));
    let other_blocks = EngineLimits {
        block_tokens: 32,
        ..limits
    };
    assert_ne!(first, fingerprint("qwen3", other_blocks));
    assert_ne!(first, fingerprint("qwen2", limits));
    // States of another length cannot be exchanged, whatever their number.
    let states = [1, 5].map(|states_count| EngineLimits {
        states_count,
        ..limits
    });
    let [few, many] = states.map(|limits| fingerprint("qwen3", limits));
    assert_eq!(few, many);
    assert_eq!(few.0, format!("{}-s1b{}", first.0, reference::STATE_BYTES));
}

/// Attention's output and the down projection; 100 columns of the latter are no multiple of 16.
#[test]
fn the_fingerprint_names_the_slices_of_both_products() {
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: 4,
        slots_count: 2,
        step_tokens_max: 8,
        states_count: 0,
        windows_count: 0,
    };
    for (name, slices) in [("llama2", "o4d1"), ("llama3", "o2d4"), ("qwen3", "o2d1")] {
        let engine = build(&folder(name), limits).unwrap();
        let fingerprint = &engine.describe().fingerprint.0;
        let mut parts = fingerprint.split('-');
        assert!(parts.any(|part| part == slices), "{fingerprint}");
    }
}

#[test]
fn every_testdata_folder_is_compared() {
    let mut found: Vec<String> = std::fs::read_dir(folder(""))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("goldens.json").exists())
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    found.sort();
    let compared = [
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
    assert_eq!(found, compared);
}
