//! Time to load very many tiny matrices: 48 layers of 128 experts of three matrices each, and half
//! of the layers. The time for each tensor must not grow.
//!
//! `cargo bench -p cleave-cpu --bench loading [-- ROUNDS]`; the processor must be idle otherwise.
//! The best of all rounds counts.
#![allow(clippy::print_stdout, clippy::unwrap_used)] // what it is for

use cleave_checkpoint::Checkpoint;
use cleave_cpu::{CpuOptions, CpuWeightLoader};
use cleave_engine::Weights;
use cleave_engine::ops::Precision;
use serde_json::{Map, json};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Width of every matrix.
const WIDTH: usize = 16;
const EXPERTS: usize = 128;

/// Writes a Qwen3-MoE of so many layers and experts, all weights zeros: three matrices for each
/// expert.
fn write(dir: &Path, layers: usize, experts: usize) {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH,
        "num_hidden_layers": layers, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": WIDTH, "num_experts": experts, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "vocab_size": WIDTH, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let square = vec![WIDTH, WIDTH];
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), square.clone()),
        ("model.norm.weight".to_owned(), vec![WIDTH]),
    ];
    for layer in 0..layers {
        let mut add = |name: &str, shape: Vec<usize>| {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        };
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(norm, vec![WIDTH]);
        }
        for norm in ["q_norm", "k_norm"] {
            add(&format!("self_attn.{norm}"), vec![WIDTH]);
        }
        for projection in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            add(&format!("self_attn.{projection}"), square.clone());
        }
        add("mlp.gate", vec![experts, WIDTH]);
        for expert in 0..experts {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                add(
                    &format!("mlp.experts.{expert}.{projection}"),
                    square.clone(),
                );
            }
        }
    }
    let mut header = Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name, entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + end, 0);
    fs::write(dir.join("model.safetensors"), file).unwrap();
}

/// Steps of loading, in order.
const STEPS: [&str; 4] = ["opened", "packed", "packed and kept", "mapped"];

/// The times of [`STEPS`]: the checkpoint is opened, loaded without a cache, with an empty one, and
/// with a full one.
fn times(dir: &Path) -> [Duration; 4] {
    let options = CpuOptions {
        threads: 1,
        ..CpuOptions::new(Precision::Bf16)
    };
    let cache = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let opened = begun.elapsed();
    let load = |loader: CpuWeightLoader| {
        let begun = Instant::now();
        Weights::load(&loader, &checkpoint, None, &mut |_| {}).unwrap();
        begun.elapsed()
    };
    let cached = || CpuWeightLoader::cached(&options, cache.path(), &checkpoint);
    [
        opened,
        load(CpuWeightLoader::new(&options)),
        load(cached()),
        load(cached()),
    ]
}

/// The best times of several rounds.
fn best_times(dir: &Path, rounds: usize) -> [Duration; 4] {
    let mut best = [Duration::MAX; 4];
    for _ in 0..rounds {
        for (best, time) in best.iter_mut().zip(times(dir)) {
            *best = time.min(*best);
        }
    }
    best
}

fn main() {
    let rounds = std::env::args().find_map(|arg| arg.parse().ok());
    let rounds = rounds.unwrap_or(3);
    let of = |layers: usize| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), layers, EXPERTS);
        let tensors = (layers * EXPERTS * 3) as f64;
        best_times(dir.path(), rounds).map(|time| time.as_secs_f64() / tensors)
    };
    let (half, whole) = (of(24), of(48));
    println!("| step | 9,216 tensors | 18,432 tensors | ratio for each tensor |");
    println!("|---|---|---|---|");
    for ((step, half), whole) in STEPS.iter().zip(half).zip(whole) {
        println!(
            "| {step} | {:.1} µs each | {:.1} µs each | {:.2} |",
            half * 1e6,
            whole * 1e6,
            whole / half
        );
    }
}
