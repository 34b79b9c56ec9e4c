//! Embeddings, rankings and scores by real processes, one and several.

use crate::harness::{CleaveProcess, HttpClient, run, wait_for};
use crate::root::root;
use crate::serving::{ServingFleet, fleet_of_legs, serve};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

const EMBEDDINGS: &str = "/v1/embeddings";

fn checkpoint() -> PathBuf {
    root().join("testdata/qwen3")
}

/// A checkpoint as sentence-transformers stores embedding models: without a head, with names
/// without `model.`, and with modules that say how to pool.
fn embedding_folder(pooling: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        std::fs::copy(checkpoint().join(file), folder.path().join(file)).unwrap();
    }
    let config = std::fs::read(checkpoint().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["tie_word_embeddings"] = json!(false);
    write(folder.path(), "config.json", &config);
    let stored = std::fs::read(checkpoint().join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&stored).unwrap();
    let bare = stored.tensors().into_iter().filter_map(|(name, tensor)| {
        let bare = name.strip_prefix("model.")?.to_owned();
        Some((bare, tensor))
    });
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(bare.collect::<Vec<_>>(), None, &file).unwrap();
    let module = |index: u32, path: &str, kind: &str| {
        let class = format!("sentence_transformers.models.{kind}");
        json!({"idx": index, "name": index.to_string(), "path": path, "type": class})
    };
    let modules = json!([
        module(0, "", "Transformer"),
        module(1, "1_Pooling", "Pooling"),
        module(2, "2_Normalize", "Normalize"),
    ]);
    write(folder.path(), "modules.json", &modules);
    std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
    let key = format!("pooling_mode_{pooling}");
    write(folder.path(), "1_Pooling/config.json", &json!({key: true}));
    folder
}

fn write(folder: &Path, file: &str, content: &Value) {
    std::fs::write(folder.join(file), content.to_string()).unwrap();
}

/// Texts, pairs, and what sentence-transformers and transformers computed of them with this
/// checkpoint.
fn goldens() -> Value {
    let file = root().join("testdata/vectors/qwen3.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn embedded_as(client: &HttpClient, form: &Value) -> Vec<Value> {
    let mut body = json!({"input": goldens()["texts"]});
    let fields = form.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    let (status, answer) = client.post(EMBEDDINGS, &body);
    assert_eq!(status, 200, "{answer}");
    let data = answer["data"].as_array().unwrap();
    data.iter()
        .map(|entry| entry["embedding"].clone())
        .collect()
}

fn embedded(client: &HttpClient) -> Vec<Value> {
    embedded_as(client, &json!({}))
}

/// The numbers of an embedding in either encoding.
fn numbers(embedding: &Value) -> Vec<f32> {
    match embedding {
        Value::String(text) => {
            let bytes = base64_bytes(text);
            let numbers = bytes.chunks_exact(4);
            numbers
                .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                .collect()
        }
        list => serde_json::from_value(list.clone()).unwrap(),
    }
}

fn base64_bytes(text: &str) -> Vec<u8> {
    let digit = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        other => panic!("{other} is no digit"),
    };
    let letters = text.trim_end_matches('=').bytes();
    let bits: Vec<u8> = letters
        .flat_map(|letter| (0..6).rev().map(move |bit| digit(letter) >> bit & 1))
        .collect();
    let byte = |bits: &[u8]| bits.iter().fold(0, |byte, bit| byte << 1 | bit);
    bits.chunks_exact(8).map(byte).collect()
}

/// Fails if a number differs from the reference's by more than its tolerance in f32.
fn assert_close(embeddings: &[Value], expected: &Value, case: &str) {
    let expected = expected.as_array().unwrap();
    assert_eq!(embeddings.len(), expected.len(), "{case}");
    for (index, (embedding, expected)) in embeddings.iter().zip(expected).enumerate() {
        let (computed, expected) = (numbers(embedding), numbers(expected));
        assert_eq!(computed.len(), expected.len(), "{case} {index}");
        let mut pairs = computed.iter().zip(&expected);
        assert!(
            pairs.all(|(a, b)| (a - b).abs() <= 1e-3),
            "{case} {index}: {computed:?} is not {expected:?}"
        );
    }
}

/// A fleet of so many prefill and decode workers whose model embeds; its router places prompt and
/// output on two workers where there is output.
fn embedding_fleet(folder: &Path, counts: [usize; 2]) -> ServingFleet {
    let model = ["--model", folder.to_str().unwrap(), "--dtype", "f32"];
    fleet_of_legs(counts, &model, &[])
}

#[test]
fn one_process_and_fleets_embed_as_the_reference_does() {
    let goldens = goldens();
    // Vectors need no decode worker, and one that is there gets nothing to do.
    for (mode, name, counts) in [
        ("lasttoken", "lasttoken", [2, 2]),
        ("mean_tokens", "mean", [2, 0]),
        ("cls_token", "cls", [1, 0]),
    ] {
        let folder = embedding_folder(mode);
        let path = folder.path().to_str().unwrap();
        // The longest text has many chunks.
        let small = ["--max-num-batched-tokens", "16"];
        let model = ["--model", path, "--dtype", "f32"];
        let (_one, one) = serve(&model);
        let (_chunked, chunked) = serve(&[&model[..], &small].concat());
        let fleet = embedding_fleet(folder.path(), counts);
        let expected = embedded(&one);
        assert_close(&expected, &goldens["poolings"][name], name);
        assert_eq!(expected, embedded(&chunked), "{name}");
        assert_eq!(expected, embedded(&fleet.client), "{name}");
        // Again, from the prefix cache where the pooling allows it.
        assert_eq!(expected, embedded(&fleet.client), "{name}");
        let sent = fleet
            .client
            .metric("cleave_router_handoff_bytes_total", &[]);
        assert_eq!(sent, 0.0, "a vector needs no hand-off");
        let encoded = embedded_as(&fleet.client, &json!({"encoding_format": "base64"}));
        for (list, text) in expected.iter().zip(&encoded) {
            assert_eq!(numbers(list), numbers(text), "{name}");
        }
        let form = json!({"dimensions": goldens["dimensions"], "encoding_format": "base64"});
        let cut = embedded_as(&chunked, &form);
        assert_close(&cut, &goldens["cut"][name], name);
    }
}

// Invariant: I18.
#[test]
fn vectors_survive_a_killed_prefill_worker() {
    let folder = embedding_folder("mean_tokens");
    let mut fleet = embedding_fleet(folder.path(), [2, 0]);
    let expected = embedded(&fleet.client);
    let killed = AtomicBool::new(false);
    let client = &fleet.client;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut rounds_after = 0;
                    while rounds_after < 5 {
                        assert_eq!(expected, embedded(client));
                        rounds_after += u32::from(killed.load(Ordering::Relaxed));
                    }
                })
            })
            .collect();
        fleet.prefill[0].signal("KILL");
        fleet.prefill[0].wait();
        killed.store(true, Ordering::Relaxed);
        clients
            .into_iter()
            .for_each(|client| client.join().unwrap());
    });
    wait_for("one worker", || {
        (fleet.client.metric("cleave_workers", &[]) == 1.0).then_some(())
    });
}

#[test]
fn a_reranker_is_served_by_its_words() {
    let model = checkpoint();
    let flags = [
        "--model",
        model.to_str().unwrap(),
        "--classifier-from-token",
        "n,y",
        "--dtype",
        "f32",
    ];
    let (_process, client) = serve(&flags);
    let documents = ["first", "second", "third"];
    let ask = json!({"query": "q", "documents": documents});
    let (status, ranked) = client.post("/v1/rerank", &ask);
    assert_eq!(status, 200, "{ranked}");
    let results = ranked["results"].as_array().unwrap();
    let (_, scored) = client.post("/v1/score", &json!({"text_1": "q", "text_2": documents}));
    for result in results {
        let index = result["index"].as_u64().unwrap() as usize;
        assert_eq!(result["relevance_score"], scored["data"][index]["score"]);
        assert_eq!(result["document"]["text"], documents[index]);
    }
    let scores = results
        .iter()
        .map(|result| result["relevance_score"].as_f64().unwrap());
    assert!(scores.is_sorted_by(|a, b| a >= b), "{ranked}");
    let goldens = goldens();
    assert_eq!(goldens["words"], json!(["n", "y"]));
    for pair in goldens["pairs"].as_array().unwrap() {
        let mut ask = json!({"query": pair["query"], "documents": [pair["document"]]});
        if let Some(instruction) = pair.get("instruction") {
            ask["instruction"] = instruction.clone();
        }
        let (_, ranked) = client.post("/v1/rerank", &ask);
        let score = ranked["results"][0]["relevance_score"].as_f64().unwrap();
        let expected = pair["score"].as_f64().unwrap();
        assert!((score - expected).abs() <= 1e-3, "{score} is not {pair}");
    }
    let (status, error) = client.post("/v1/completions", &json!({"prompt": "a"}));
    assert_eq!((status, &error["error"]["param"]), (400, &json!("model")));
}

#[test]
fn a_task_that_cannot_be_served_ends_the_start() {
    let bare = embedding_folder("lasttoken");
    let odd = embedding_folder("max_tokens");
    let serve = |folder: &Path, more: &[&str]| {
        let plain = ["serve", "--port", "0", "--model", folder.to_str().unwrap()];
        let (status, _, error) = run(&[&plain[..], more].concat());
        assert!(!status.success());
        error
    };
    let no_head = serve(bare.path(), &["--runner", "generate"]);
    assert!(no_head.contains("no lm_head"), "{no_head}");
    let pooling = serve(odd.path(), &[]);
    assert!(pooling.contains("1_Pooling/config.json"), "{pooling}");
    let word = serve(
        &checkpoint(),
        &["--classifier-from-token", "no,certainly not"],
    );
    assert!(word.contains("not one token"), "{word}");
    let both = serve(
        &checkpoint(),
        &["--runner", "generate", "--pooling", "mean"],
    );
    assert!(both.contains("--runner pooling"), "{both}");
}

/// The mock engine's vectors travel the same way, without a model.
#[test]
fn a_mock_embeds_without_a_model() {
    let mut process = CleaveProcess::start(&[
        "serve",
        "--port",
        "0",
        "--engine",
        "mock",
        "--runner",
        "pooling",
        "--both",
        "1",
        "--prefill",
        "0",
        "--decode",
        "0",
    ]);
    let client = HttpClient::new(&process.address());
    let expected = embedded(&client);
    assert_eq!(expected, embedded(&client));
    let (status, answer) = client.post(EMBEDDINGS, &json!({"input": "a", "dimensions": 17}));
    assert_eq!(status, 400, "{answer}");
}
