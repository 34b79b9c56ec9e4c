//! Thirty-two adapters of one model in a fleet under load and kills.
//!
//! Each adapter is also merged into the model's weights by this test, and the merged model's
//! answers, computed without any adapter, are what the fleet must give. Workers have places for few
//! adapters, so that these come and go; workers are killed and started again meanwhile.

use crate::harness::{CleaveProcess, HttpClient, serve};
use crate::root::root;
use crate::serving::{ServingFleet, fleet_of_legs};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tempfile::TempDir;

const ADAPTERS: usize = 32;
const RANK: usize = 4;
const SCALE: f32 = 2.0;
/// Tokens of an answer.
const TOKENS: usize = 16;
/// Logits of adapter and merged weights differ by rounding, so a token whose two best logits are
/// nearer than this may be either. The goldens' tolerance is 1e-3 for each of both.
const MARGIN_MIN: f64 = 2e-3;
const CLIENTS: usize = 6;
const KILLS_MIN: usize = 4;
/// How often a client asks every question, at most: a worker that does not start ends the test.
const ROUNDS_MAX: usize = 20;

/// A float tensor of a checkpoint.
struct FloatTensor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

type Tensors = BTreeMap<String, FloatTensor>;

/// A client's question, with what the merged model answers up to the first near tie.
struct Question {
    model: String,
    prompt: Value,
    tokens: Vec<String>,
}

fn base() -> PathBuf {
    root().join("testdata/llama3")
}

/// Every tensor of the checkpoint, which is in bf16.
fn base_tensors() -> Tensors {
    let shards = std::fs::read_dir(base()).unwrap();
    let shards = shards.map(|entry| entry.unwrap().path());
    let shards = shards.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    let mut tensors = Tensors::new();
    for shard in shards {
        let stored = std::fs::read(shard).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&stored).unwrap().tensors() {
            assert_eq!(tensor.dtype(), Dtype::BF16, "{name}");
            let bits = tensor.data().chunks_exact(2);
            let widened =
                bits.map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16));
            let (shape, values) = (tensor.shape().to_vec(), widened.collect());
            tensors.insert(name, FloatTensor { shape, values });
        }
    }
    tensors
}

/// Numbers in −1..1 from a seed.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Modules that an adapter changes: those of every projection, but of other layers each time.
fn modules(adapter: usize) -> Vec<String> {
    let names = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
    ];
    let names = names
        .into_iter()
        .chain(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);
    let layers = (0..3).filter(|layer| adapter % 3 != *layer || adapter.is_multiple_of(2));
    let all = names.flat_map(|name| layers.clone().map(move |layer| (layer, name)));
    all.map(|(layer, name)| format!("model.layers.{layer}.{name}"))
        .collect()
}

fn save(file: &Path, tensors: &Tensors) {
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, FloatTensor { shape, values })| {
            let bytes = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            (name.clone(), shape.clone(), bytes)
        })
        .collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name.clone(), view.unwrap())
    });
    safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, file).unwrap();
}

/// Writes an adapter, and the model with it merged.
fn write(adapter: usize, weights: &Tensors, folder: &Path, merged: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::create_dir_all(merged).unwrap();
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(base().join(file), merged.join(file)).unwrap();
    }
    let mut changes = Tensors::new();
    let copy = |(name, tensor): (&String, &FloatTensor)| {
        let (shape, values) = (tensor.shape.clone(), tensor.values.clone());
        (name.clone(), FloatTensor { shape, values })
    };
    let mut all: Tensors = weights.iter().map(copy).collect();
    for (index, module) in modules(adapter).into_iter().enumerate() {
        let weight = all.get_mut(&format!("{module}.weight")).unwrap();
        let (rows, columns) = (weight.shape[0], weight.shape[1]);
        let seed = (1000 * adapter + index) as u64;
        let norm = 1.7 / (columns as f32).sqrt();
        let a: Vec<f32> = numbers(seed + 1, RANK * columns)
            .iter()
            .map(|x| x * norm)
            .collect();
        let b: Vec<f32> = numbers(seed + 500, rows * RANK)
            .iter()
            .map(|x| x * 0.5)
            .collect();
        for row in 0..rows {
            for column in 0..columns {
                let product = (0..RANK).map(|rank| {
                    f64::from(b[row * RANK + rank]) * f64::from(a[rank * columns + column])
                });
                let delta = f64::from(SCALE) * product.sum::<f64>();
                let value = &mut weight.values[row * columns + column];
                *value = (f64::from(*value) + delta) as f32;
            }
        }
        let mut add = |letter: &str, shape: [usize; 2], values| {
            let name = format!("base_model.model.{module}.lora_{letter}.weight");
            let shape = shape.to_vec();
            changes.insert(name, FloatTensor { shape, values });
        };
        add("A", [RANK, columns], a);
        add("B", [rows, RANK], b);
    }
    save(&folder.join("adapter_model.safetensors"), &changes);
    save(&merged.join("model.safetensors"), &all);
    let config = json!({
        "peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK as f32, "bias": "none",
        "target_modules": ".*_proj",
    });
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

/// Prompts, the same for every adapter: a cache of another adapter's KV would be found.
fn prompts() -> Vec<Value> {
    let prompt = |seed: u64, length: usize| {
        let numbers = numbers(seed, length).into_iter();
        let tokens = numbers.map(|x| ((x + 1.0) * 180.0) as u64 + 3);
        json!(tokens.collect::<Vec<_>>())
    };
    vec![prompt(1, 40), prompt(2, 7), prompt(3, 65)]
}

fn body(model: &str, prompt: &Value) -> Value {
    json!({
        "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": true, "logprobs": 2, "skip_special_tokens": false,
    })
}

/// The tokens of an answer as texts, up to the first that could be another by rounding.
fn clear_tokens(answer: &Value) -> Vec<String> {
    let scores = &answer["choices"][0]["logprobs"];
    let tokens = scores["tokens"].as_array().unwrap().iter();
    let tops = scores["top_logprobs"].as_array().unwrap().iter();
    let is_clear = |top: &Value| {
        let mut best: Vec<f64> = top
            .as_object()
            .unwrap()
            .values()
            .map(|v| v.as_f64().unwrap())
            .collect();
        best.sort_by(|a, b| b.total_cmp(a));
        // Two tokens of one text are one entry.
        best.len() > 1 && best[0] - best[1] > MARGIN_MIN
    };
    let clear = tokens.zip(tops).take_while(|(_, top)| is_clear(top));
    clear
        .map(|(token, _)| token.as_str().unwrap().to_owned())
        .collect()
}

/// The questions about one merged model, with its answers.
fn questions(name: &str, merged: &Path) -> Vec<Question> {
    let model = merged.display().to_string();
    let flags = [
        "--model",
        &model,
        "--served-model-name",
        name,
        "--dtype",
        "f32",
        "--calibrate",
        "0",
    ];
    let mut process = serve(&flags);
    let client = HttpClient::new(&process.address());
    let ask = |prompt: Value| {
        let (status, answer) = client.post("/v1/completions", &body(name, &prompt));
        assert_eq!(status, 200, "{answer}");
        Question {
            model: name.to_owned(),
            tokens: clear_tokens(&answer),
            prompt,
        }
    };
    prompts().into_iter().map(ask).collect()
}

/// Progress of clients and kills, which wait for each other.
#[derive(Default)]
struct Progress {
    answers: AtomicUsize,
    kills: AtomicUsize,
    is_done: AtomicBool,
}

/// Asks every question once, from another place on for each client, and goes on until enough
/// workers have been killed.
fn ask_all(client: &HttpClient, questions: &[Question], first: usize, progress: &Progress) {
    let is_enough = || progress.kills.load(Ordering::Relaxed) >= KILLS_MIN;
    let count = questions.len();
    for at in (0..ROUNDS_MAX * count).take_while(|at| *at < count || !is_enough()) {
        let Question {
            model,
            prompt,
            tokens,
        } = &questions[(first + at) % count];
        let (status, answer) = client.post("/v1/completions", &body(model, prompt));
        assert_eq!(status, 200, "{model}: {answer}");
        let given = answer["choices"][0]["logprobs"]["tokens"]
            .as_array()
            .unwrap()
            .iter();
        let given: Vec<&str> = given.map(|token| token.as_str().unwrap()).collect();
        assert_eq!(given[..tokens.len()], tokens[..], "{model} {prompt}");
        progress.answers.fetch_add(1, Ordering::Relaxed);
    }
}

/// Kills a worker and starts another one, until the clients are done.
fn kill_and_start(fleet: &mut ServingFleet, flags: &[&str], progress: &Progress) {
    let address = fleet.router.address();
    let is_done = || progress.is_done.load(Ordering::Relaxed);
    let answers = || progress.answers.load(Ordering::Relaxed);
    while !is_done() {
        let before = answers();
        // Load between two kills, so that each meets running requests.
        while answers() < before + 25 && !is_done() {
            std::thread::park_timeout(std::time::Duration::from_millis(5));
        }
        let (leg, workers) = match progress.kills.load(Ordering::Relaxed) % 2 {
            0 => ("decode", &mut fleet.decode),
            _ => ("prefill", &mut fleet.prefill),
        };
        drop(workers.remove(0));
        let plain = format!("worker --leg {leg} --threads 1 --kv-cache 64MiB --router {address}");
        let arguments: Vec<&str> = plain.split(' ').chain(flags.iter().copied()).collect();
        workers.push(CleaveProcess::start(&arguments));
        progress.kills.fetch_add(1, Ordering::Relaxed);
    }
}

// Invariant: I56.
// Lesson: 7.
#[test]
fn adapters_are_never_mixed_under_load_and_kills() {
    let folder = TempDir::new().unwrap();
    let (weights, name) = (base_tensors(), |adapter: usize| {
        format!("adapter-{adapter}")
    });
    let mut flags: Vec<String> = Vec::new();
    let mut questions_of_all: Vec<Question> = Vec::new();
    flags.extend(["--lora-modules".to_owned()]);
    for adapter in 0..ADAPTERS {
        let (at, merged) = (
            folder.path().join(name(adapter)),
            folder.path().join("merged"),
        );
        write(adapter, &weights, &at, &merged);
        questions_of_all.extend(questions(&name(adapter), &merged));
        flags.push(format!("{}={}", name(adapter), at.display()));
    }
    let compared: usize = questions_of_all
        .iter()
        .map(|question| question.tokens.len())
        .sum();
    assert!(
        compared > ADAPTERS * 20,
        "{compared} tokens have no near tie"
    );
    let model = base().display().to_string();
    flags.extend(["--max-loras", "4", "--calibrate", "0"].map(str::to_owned));
    flags.extend(
        [
            "--model",
            &model,
            "--served-model-name",
            "base",
            "--dtype",
            "f32",
        ]
        .map(str::to_owned),
    );
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let mut fleet = fleet_of_legs([2, 2], &flags, &[]);
    let progress = Progress::default();
    let client = HttpClient::new(&fleet.router.address());
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let (questions, progress, client) = (&questions_of_all, &progress, &client);
                scope.spawn(move || ask_all(client, questions, number * 16, progress))
            })
            .collect();
        let chaos = scope.spawn(|| kill_and_start(&mut fleet, &flags, &progress));
        let ended: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        progress.is_done.store(true, Ordering::Relaxed);
        chaos.join().unwrap();
        ended.into_iter().for_each(|end| end.unwrap());
    });
    let kills = progress.kills.load(Ordering::Relaxed);
    assert!(kills >= KILLS_MIN, "{kills} kills");
    let answers = progress.answers.load(Ordering::Relaxed);
    assert!(answers >= CLIENTS * questions_of_all.len());
}
