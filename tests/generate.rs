//! `cleave generate --json` compared with transformers on the same checkpoints.

use crate::harness;
use serde_json::{Value, json};
use std::path::Path;

fn ids(value: &Value) -> String {
    let ids = value.as_array().expect("an array of ids");
    ids.iter()
        .map(Value::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

/// The largest difference between two lists of `[id, logit]`, compared by id: an id that only one
/// of them has must be within the bound of the other's smallest logit, since near ties may trade
/// places at the list's end.
fn logits_distance(found: &Value, expected: &Value) -> f64 {
    let read = |list: &Value| -> Vec<(u64, f64)> {
        let pairs = list.as_array().expect("a list of pairs");
        pairs
            .iter()
            .map(|pair| {
                (
                    pair[0].as_u64().expect("an id"),
                    pair[1].as_f64().expect("a logit"),
                )
            })
            .collect()
    };
    let (found, expected) = (read(found), read(expected));
    assert_eq!((found.len(), expected.len()), (20, 20));
    let last = expected.last().expect("twenty of them").1;
    let apart = expected.iter().map(|(id, logit)| {
        let found = found.iter().find(|(our_id, _)| our_id == id);
        (found.map_or(last, |(_, our_logit)| *our_logit) - logit).abs()
    });
    apart.fold(0.0, f64::max)
}

// Invariant: I17.
#[test]
fn tokens_and_logits_match_transformers() {
    for (at, folder) in harness::golden_folders().into_iter().enumerate() {
        let name = folder
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let text = std::fs::read_to_string(folder.join("goldens.json")).expect("readable goldens");
        let goldens: Value = serde_json::from_str(&text).expect("goldens are JSON");
        let prompts = goldens["prompts"].as_array().expect("a list of prompts");
        assert_eq!(prompts.len(), 20, "{name}");
        // The processor's crate tests every prompt of every checkpoint; one runs through the
        // binary.
        let golden = &prompts[[0, 9, 19][at % 3]];
        let prompt = ids(&golden["prompt_tokens"]);
        let model = folder.to_str().expect("a readable path");
        let arguments = [
            "generate",
            "--json",
            "--dtype",
            "f32",
            "--ignore-eos",
            "--model",
            model,
            "--max-tokens",
            "32",
            "--prompt-tokens",
            &prompt,
        ];
        let plain = ["--speculative-config", "off"];
        let (status, out, err) = harness::run(&[&arguments[..], &plain].concat());
        assert!(status.success(), "{name}: {err}");
        let answer: Value = serde_json::from_str(&out).expect("one JSON object");
        assert_eq!(
            answer["tokens"], golden["tokens"],
            "{name}: greedy tokens after {prompt}"
        );
        assert_eq!(answer["prompt_tokens"], golden["prompt_tokens"]);
        assert_eq!(answer["finish_reason"], "length");
        let guessing = r#"{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":1}"#;
        let guessing = ["--speculative-config", guessing];
        let (_, guessed, err) = harness::run(&[&arguments[..], &guessing].concat());
        assert_eq!(guessed, out, "{name}: with guesses: {err}");
        let apart = logits_distance(&answer["first_top_logits"], &golden["first_top_logits"]);
        assert!(apart <= 1e-3, "{name}: logits {apart} apart after {prompt}");
    }
}

#[test]
fn text_prompts_are_tokenized_as_by_transformers() {
    for folder in harness::golden_folders() {
        let text = std::fs::read_to_string(folder.join("goldens.json")).expect("readable goldens");
        let goldens: Value = serde_json::from_str(&text).expect("goldens are JSON");
        let prompts = goldens["prompts"].as_array().expect("a list of prompts");
        let Some(golden) = prompts.iter().find(|golden| golden["text"].is_string()) else {
            continue;
        };
        let model = folder.to_str().expect("a readable path");
        let prompt = golden["text"].as_str().expect("a text");
        let (status, out, err) = harness::run(&[
            "generate",
            "--json",
            "--model",
            model,
            "--max-tokens",
            "1",
            "--prompt",
            prompt,
        ]);
        assert!(status.success(), "{err}");
        let answer: Value = serde_json::from_str(&out).expect("one JSON object");
        assert_eq!(
            answer["prompt_tokens"], golden["prompt_tokens"],
            "{model}: {prompt}"
        );
    }
}

#[test]
fn the_bundled_checkpoint_writes_english() {
    writes_english(&[]);
}

#[test]
fn weights_rounded_at_load_write_english() {
    for form in ["int8", "int4"] {
        writes_english(&["--model", &trained(), "--quantize", form]);
    }
}

/// A small trained checkpoint in bf16.
fn trained() -> String {
    let folder = harness::root().join("testdata/trained");
    folder
        .into_os_string()
        .into_string()
        .expect("a readable path")
}

/// Output and log of a short generation by a checkpoint.
fn generate(model: &str, flags: &[&str]) -> (String, String) {
    let first = ["generate", "--model", model, "--prompt", "Ownership"];
    let flags = [&["--max-tokens", "8"], flags].concat();
    let (status, out, err) = harness::run(&[&first[..], &flags].concat());
    assert!(status.success(), "{err}");
    (out, err)
}

#[test]
fn weights_kept_in_a_wider_format_are_logged() {
    let (_, err) = generate(&trained(), &["--quantize", "int4"]);
    let expected = "down_proj.weight (688 columns) is kept in int8 rather than int4";
    assert!(err.contains(expected), "{err}");
    let (_, err) = generate(&trained(), &["--quantize", "int8"]);
    assert!(!err.contains("more memory"), "{err}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (group, expected) in [
        ("16", Some("is kept in bf16 rather than int4")),
        ("32", None),
    ] {
        let out = folder.path().join(group);
        let to = out.to_str().expect("a readable path");
        let trained = trained();
        let mut synth = vec!["synth", "--model", &trained];
        synth.extend(["--quantization", "awq", "--group-size", group, "--out", to]);
        let (status, _, err) = harness::run(&synth);
        assert!(status.success(), "{err}");
        let (_, err) = generate(to, &[]);
        assert!(
            expected.is_none_or(|expected| err.contains(expected)),
            "{err}"
        );
        assert_eq!(err.contains("more memory"), expected.is_some(), "{err}");
    }
}

#[test]
fn cached_packed_weights_change_no_token() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let to = folder.path().to_str().expect("a readable path");
    for flags in [&[][..], &["--quantize", "int8"], &["--quantize", "int4"]] {
        let (packed, _) = generate(&trained(), flags);
        let cached = [flags, &["--packed-cache", to]].concat();
        assert_eq!(generate(&trained(), &cached).0, packed, "{flags:?}");
        assert_eq!(generate(&trained(), &cached).0, packed, "{flags:?}");
    }
    let files = || std::fs::read_dir(to).expect("it is there").flatten();
    assert_eq!(files().count(), 3);
    for file in files() {
        let bytes = std::fs::read(file.path()).expect("a file");
        std::fs::write(file.path(), &bytes[..bytes.len() / 2]).expect("room for it");
    }
    let (packed, _) = generate(&trained(), &[]);
    let (again, err) = generate(&trained(), &["--packed-cache", to]);
    assert_eq!(again, packed);
    assert!(err.contains("are not used"), "{err}");
}

#[test]
fn quantized_weights_and_fp8_kv_write_english() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (from, out) = (trained(), folder.path().join("awq"));
    let to = out.to_str().expect("a readable path");
    let mut synth = vec!["synth", "--model", &from];
    synth.extend(["--quantization", "awq", "--group-size", "64", "--out", to]);
    let (status, _, err) = harness::run(&synth);
    assert!(status.success(), "{err}");
    writes_english(&["--model", to, "--kv-cache-dtype", "fp8"]);
}

#[test]
fn int8_kv_writes_english() {
    for name in ["int8", "int8_per_token_head"] {
        writes_english(&["--kv-cache-dtype", name]);
    }
    let in_f32 = ["--model", &trained(), "--dtype", "f32"];
    writes_english(&[&in_f32[..], &["--kv-cache-dtype", "int8"]].concat());
}

/// Makes a quantized checkpoint with a scale for its keys.
fn with_key_scale(out: &Path, scale: f32) -> String {
    let from = trained();
    let to = out.to_str().expect("a readable path").to_owned();
    let mut synth = vec!["synth", "--model", &from];
    synth.extend(["--quantization", "awq", "--group-size", "64", "--out", &to]);
    let (status, _, err) = harness::run(&synth);
    assert!(status.success(), "{err}");
    let file = out.join("model.safetensors");
    let bytes = std::fs::read(&file).expect("weights");
    let (length, rest) = bytes.split_first_chunk().expect("a header's length");
    let (header, weights) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    let at = weights.len();
    header["model.layers.0.self_attn.k_scale"] =
        json!({"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]});
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    let parts: [&[u8]; 4] = [&length, header.as_bytes(), weights, &scale.to_le_bytes()];
    std::fs::write(&file, parts.concat()).expect("room for it");
    to
}

// Lesson: 16.
/// This KV cache applies no scales: above 1 the answers would be wrong, so it is an error; below 1
/// the scale is only reported as unused.
#[test]
fn kv_scales_that_cannot_be_applied_are_reported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (scale, cache, succeeds, expected) in [
        (3.0, "fp8", false, "k_scale or v_scale is 3"),
        (0.5, "fp8", true, "are not used"),
        (3.0, "auto", true, ""),
    ] {
        let model = with_key_scale(&folder.path().join(format!("{scale}-{cache}")), scale);
        let mut arguments = vec!["generate", "--model", &model, "--kv-cache-dtype", cache];
        arguments.extend(["--max-tokens", "1", "--prompt", "x"]);
        let (status, _, err) = harness::run(&arguments);
        assert_eq!(status.success(), succeeds, "{err}");
        assert!(err.contains(expected), "{err}");
        assert!(!expected.is_empty() || !err.contains("scale"), "{err}");
    }
}

#[test]
fn a_kv_dtype_unsupported_with_the_weights_is_refused() {
    let (status, _, err) = harness::run(&[
        "generate",
        "--dtype",
        "f32",
        "--kv-cache-dtype",
        "bf16",
        "--prompt",
        "x",
    ]);
    assert_eq!(status.code(), Some(1), "{err}");
    assert!(err.contains("KV cache in bf16"), "{err}");
    assert!(
        err.contains("f32, fp8_e4m3 and int8_per_token_head are"),
        "{err}"
    );
}

fn writes_english(flags: &[&str]) {
    let mut arguments = vec!["generate", "--prompt", "The Rust compiler"];
    arguments.extend(["--max-tokens", "48"]);
    arguments.extend(flags);
    let (status, out, err) = harness::run(&arguments);
    assert!(status.success(), "{err}");
    let words: Vec<&str> = out.split_whitespace().collect();
    assert!(words.len() >= 20, "{out}");
    let common = [
        "the", "a", "to", "of", "is", "that", "and", "in", "for", "it",
    ];
    let common_count = words
        .iter()
        .filter(|word| common.contains(&word.to_lowercase().as_str()))
        .count();
    assert!(
        common_count * 8 >= words.len(),
        "too few common words for English: {out}"
    );
}

// Invariant: I16.
#[test]
fn a_damaged_checkpoint_fails_with_one_clear_error() {
    let whole = harness::golden_folders()
        .into_iter()
        .find(|path| path.ends_with("llama2"))
        .expect("a golden checkpoint");
    let spoil = |name: &str, spoil: &dyn Fn(&std::path::Path)| -> String {
        let folder =
            std::env::temp_dir().join(format!("cleave-damaged-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder of our own");
        for entry in std::fs::read_dir(&whole).expect("readable folder") {
            let from = entry.expect("readable folder").path();
            std::fs::copy(&from, folder.join(from.file_name().expect("a name"))).expect("copied");
        }
        spoil(&folder);
        let (status, _, err) = harness::run(&[
            "serve",
            "--port",
            "0",
            "--model",
            folder.to_str().expect("a readable path"),
        ]);
        std::fs::remove_dir_all(&folder).expect("removed");
        assert_eq!(status.code(), Some(1), "{name}: {err}");
        assert!(!err.contains("panicked"), "{name}: {err}");
        err
    };
    let absent = spoil("tokenizer", &|folder| {
        std::fs::remove_file(folder.join("tokenizer.json")).expect("removed")
    });
    assert!(absent.contains("tokenizer.json"), "{absent}");
    let truncated = spoil("truncated", &|folder| {
        let path = folder.join("model.safetensors");
        let bytes = std::fs::read(&path).expect("readable");
        std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("written");
    });
    assert!(truncated.contains("model.safetensors"), "{truncated}");
    let no_numbers = spoil("no numbers", &|folder| {
        let path = folder.join("model.safetensors");
        let mut bytes = std::fs::read(&path).expect("readable");
        let half = bytes.len() / 2;
        // A number with every bit set is NaN in any format, at any alignment.
        bytes[half..].fill(0xff);
        std::fs::write(&path, bytes).expect("written");
    });
    assert!(no_numbers.contains("not finite"), "{no_numbers}");
    let unknown = spoil("architecture", &|folder| {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).expect("readable");
        std::fs::write(
            &path,
            text.replace("LlamaForCausalLM", "MambaForCausalLM")
                .replace("\"llama\"", "\"mamba\""),
        )
        .expect("written");
    });
    let quantised = spoil("quantisation", &|folder| {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).expect("readable");
        let method = "{ \"quantization_config\": {\"quant_method\": \"hqq\"},";
        std::fs::write(&path, text.replacen('{', method, 1)).expect("written");
    });
    assert!(
        quantised.contains("quantization_config.quant_method") && quantised.contains("awq"),
        "{quantised}"
    );
    assert!(
        unknown.contains("config.json") && unknown.contains("Mamba"),
        "{unknown}"
    );
}

#[test]
fn each_commands_help_has_an_example() {
    let commands: [&[&str]; 21] = [
        &[],
        &["serve"],
        &["router"],
        &["worker"],
        &["generate"],
        &["synth"],
        &["sim"],
        &["sim", "chaos"],
        &["sim", "explore"],
        &["sim", "goodput"],
        &["sim", "scale"],
        &["check"],
        &["autoscale"],
        &["top"],
        &["key"],
        &["kv", "bench"],
        &["replay"],
        &["bench"],
        &["bench", "engine"],
        &["bench", "run"],
        &["bench", "goodput"],
    ];
    for command in commands {
        let (status, out, err) = harness::run(&[command, &["--help"]].concat());
        assert!(status.success(), "{command:?}: {err}");
        let example = out.split("Example").nth(1).unwrap_or_default();
        assert!(example.contains("cleave "), "{command:?} has no example");
    }
}
