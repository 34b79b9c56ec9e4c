//! Damaged and unsupported checkpoints give one clear error that names the file and the place.

use crate::folder::{assert_error_contains, copy, edit, edit_header, open_error};
use cleave_checkpoint::Checkpoint;
use cleave_models::RopeScaling;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

type DamageJson = fn(&mut Value);

fn edit_config(dir: &Path, field: &str, value: Value) {
    edit(dir, "config.json", |config| config[field] = value);
}

#[test]
fn missing_files_are_named_in_the_error() {
    assert_error_contains(
        Path::new("/nonexistent/model"),
        &["/nonexistent/model", "not a folder"],
    );
    let empty = tempfile::tempdir().unwrap();
    assert_error_contains(empty.path(), &["config.json", "missing"]);
    let dir = copy("llama2");
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert_error_contains(dir.path(), &["model.safetensors", "download the weights"]);
    fs::write(dir.path().join("pytorch_model.bin"), b"x").unwrap();
    assert_error_contains(dir.path(), &["PyTorch", "convert it to safetensors"]);
    let sharded = copy("llama3");
    let shard = "model-00002-of-00003.safetensors";
    fs::remove_file(sharded.path().join(shard)).unwrap();
    assert_error_contains(
        sharded.path(),
        &[shard, "model.safetensors.index.json names it"],
    );
}

#[test]
fn an_unsupported_value_is_named_with_supported_ones() {
    let cases = [
        (
            "architectures",
            json!(["GPT2LMHeadModel"]),
            "LlamaForCausalLM",
        ),
        ("model_type", json!("qwen2"), "`model_type` is llama"),
        ("quantization_config", json!({"quant_method": "hqq"}), "hqq"),
        ("hidden_act", json!("gelu"), "silu"),
        (
            "rope_scaling",
            json!({"type": "dynamic", "factor": 2.0}),
            "linear, llama3, yarn and longrope",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "dynamic", "factor": 4.0}),
            "dynamic",
        ),
        ("partial_rotary_factor", json!(0.5), "whole heads"),
        (
            "rope_parameters",
            json!({"rope_type": "longrope"}),
            "rope_parameters.short_factor",
        ),
    ];
    for (field, value, expected) in cases {
        let dir = copy("llama2");
        edit_config(dir.path(), field, value);
        assert_error_contains(dir.path(), &["config.json", expected]);
    }
    let dir = copy("qwen3");
    edit_config(dir.path(), "use_sliding_window", json!(true));
    edit_config(
        dir.path(),
        "layer_types",
        json!(["full_attention", "full_attention", "linear"]),
    );
    assert_error_contains(dir.path(), &["config.json", "layer_types", "linear"]);
}

// Invariant: I15.
#[test]
fn an_invalid_config_field_is_named() {
    let cases = [
        ("hidden_size", json!("64"), "a whole number"),
        ("hidden_size", json!(null), "missing"),
        ("hidden_size", json!(0), "is 0"),
        ("num_hidden_layers", json!(-2), "a whole number"),
        ("num_hidden_layers", json!(1e18), "a whole number"),
        ("vocab_size", json!(1u64 << 60), "a whole number"),
        ("num_attention_heads", json!(5), "divide"),
        ("num_key_value_heads", json!(3), "divide"),
        ("head_dim", json!(7), "even"),
        ("rms_norm_eps", json!(-1.0), "is not from 0 to 1"),
        ("rms_norm_eps", json!("small"), "a number"),
        ("rope_theta", json!(0), "is not from 1 to 1000000000000"),
        ("rope_scaling", json!("llama3"), "an object"),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8}),
            "missing",
        ),
        ("tie_word_embeddings", json!("no"), "true or false"),
        ("eos_token_id", json!("</s>"), "a token id"),
        ("architectures", json!("LlamaForCausalLM"), "a list"),
    ];
    for (field, value, expected) in cases {
        let dir = copy("llama2");
        edit_config(dir.path(), field, value);
        assert_error_contains(dir.path(), &["config.json", expected]);
    }
}

#[test]
fn a_mismatched_tensor_is_named_with_its_file() {
    let dir = copy("llama2");
    edit_config(dir.path(), "intermediate_size", json!(176));
    assert_error_contains(
        dir.path(),
        &[
            "model.safetensors",
            "mlp.gate_proj.weight",
            "[172, 64]",
            "[176, 64]",
        ],
    );
    let dir = copy("llama2");
    edit_config(dir.path(), "num_hidden_layers", json!(3));
    assert_error_contains(dir.path(), &["model.layers.2.", "missing"]);
    let dir = copy("llama2");
    edit_config(dir.path(), "num_hidden_layers", json!(1));
    assert_error_contains(
        dir.path(),
        &["model.safetensors", "model.layers.1.", "is not part of"],
    );
    // The bias would be ignored.
    let dir = copy("qwen2");
    edit_config(dir.path(), "architectures", json!(["MistralForCausalLM"]));
    edit_config(dir.path(), "model_type", json!("mistral"));
    assert_error_contains(
        dir.path(),
        &["_proj.bias", "is not part of a mistral model"],
    );
    let dir = copy("llama2");
    edit_header(&dir.path().join("model.safetensors"), |header| {
        header["model.norm.weight"]["dtype"] = json!("I32");
    });
    assert_error_contains(
        dir.path(),
        &["model.safetensors", "model.norm.weight", "I32", "BF16"],
    );
}

#[test]
fn an_inconsistent_safetensors_header_is_refused() {
    let file = |dir: &TempDir| dir.path().join("model.safetensors");
    let damages: [(&str, DamageJson); 8] = [
        ("data_offsets", |h| {
            h["lm_head.weight"]["data_offsets"] = json!([0, -1])
        }),
        ("data_offsets", |h| {
            h["lm_head.weight"]["data_offsets"] = json!([0])
        }),
        ("backwards", |h| {
            h["lm_head.weight"]["data_offsets"] = json!([8, 4])
        }),
        ("truncated", |h| {
            h["lm_head.weight"]["data_offsets"] = json!([0, u64::MAX])
        }),
        ("does not fill", |h| {
            h["lm_head.weight"]["shape"] = json!([512, 63])
        }),
        ("does not fill", |h| {
            h["lm_head.weight"]["shape"] = json!([u64::MAX, u64::MAX])
        }),
        ("has no dtype", |h| h["lm_head.weight"] = json!(7)),
        ("begins at byte", |h| {
            drop(h.as_object_mut().unwrap().remove("lm_head.weight"))
        }),
    ];
    for (expected, damage) in damages {
        let dir = copy("llama2");
        edit_header(&file(&dir), damage);
        assert_error_contains(dir.path(), &["model.safetensors", expected]);
    }
    let dir = copy("llama2");
    for (length, expected) in [
        (u64::MAX, "claims"),
        (99_999_999, "ends after"),
        (0, "header"),
    ] {
        let mut bytes = fs::read(file(&dir)).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(file(&dir), bytes).unwrap();
        assert_error_contains(dir.path(), &["model.safetensors", expected]);
    }
    let dir = copy("llama2");
    let mut bytes = fs::read(file(&dir)).unwrap();
    bytes.extend([0; 5]);
    fs::write(file(&dir), bytes).unwrap();
    assert_error_contains(dir.path(), &["model.safetensors", "5 bytes follow"]);
}

#[test]
fn an_index_that_contradicts_its_files_is_refused() {
    let index = "model.safetensors.index.json";
    let damages: [(&str, DamageJson); 6] = [
        ("weight_map", |i| i["weight_map"] = json!([])),
        ("names no tensor", |i| i["weight_map"] = json!({})),
        ("not the name of a file", |i| {
            i["weight_map"]["model.norm.weight"] = json!("../x")
        }),
        ("not the name of a file", |i| {
            i["weight_map"]["model.norm.weight"] = json!("/etc/passwd")
        }),
        ("model.extra.weight", |i| {
            i["weight_map"]["model.extra.weight"] = json!("model-00001-of-00003.safetensors");
        }),
        ("should be in model-00001", |i| {
            i["weight_map"]["model.norm.weight"] = json!("model-00001-of-00003.safetensors");
        }),
    ];
    for (expected, damage) in damages {
        let dir = copy("llama3");
        edit(dir.path(), index, damage);
        assert_error_contains(dir.path(), &[index, expected]);
    }
    let dir = copy("llama3");
    let from = dir.path().join("model-00001-of-00003.safetensors");
    fs::copy(from, dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert_error_contains(
        dir.path(),
        &["model-00002-of-00003.safetensors", "is in", "00001"],
    );
}

/// A file that is cut anywhere gives an error and no panic.
#[test]
fn truncation_at_any_offset_is_an_error() {
    let files = ["config.json", "generation_config.json", "model.safetensors"];
    let dir = copy("llama2");
    for name in files {
        let file = dir.path().join(name);
        let whole = fs::read(&file).unwrap();
        let trimmed = whole.trim_ascii_end().len();
        let step = (whole.len() / 150).max(1);
        let dense = 0..whole.len().min(100);
        for len in dense
            .chain((100..trimmed).step_by(step))
            .filter(|len| *len < trimmed)
        {
            fs::write(&file, &whole[..len]).unwrap();
            assert!(open_error(dir.path()).contains(name), "{name} cut at {len}");
        }
        fs::write(&file, &whole).unwrap();
        Checkpoint::open(dir.path()).unwrap();
    }
}

/// Flipped bits in headers and configurations may stay undetected, but never cause a panic.
#[test]
fn flipped_bits_never_panic() {
    let dir = copy("llama3");
    let names = [
        "config.json",
        "model.safetensors.index.json",
        "model-00002-of-00003.safetensors",
    ];
    for name in names {
        let file = dir.path().join(name);
        let whole = fs::read(&file).unwrap();
        for at in (0..whole.len().min(1500)).step_by(3) {
            let mut spoiled = whole.clone();
            spoiled[at] ^= 1 << (at % 8);
            fs::write(&file, &spoiled).unwrap();
            drop(Checkpoint::open(dir.path()));
        }
        fs::write(&file, &whole).unwrap();
    }
}

#[test]
fn old_and_new_rope_spellings_are_equivalent() {
    let old = copy("llama3");
    let before = Checkpoint::open(old.path()).unwrap();
    edit(old.path(), "config.json", |config| {
        let map = config.as_object_mut().unwrap();
        let mut rope = map.remove("rope_scaling").unwrap();
        rope["rope_theta"] = map.remove("rope_theta").unwrap();
        map.insert("rope_parameters".to_owned(), rope);
        let dtype = map.remove("torch_dtype").unwrap();
        map.insert("dtype".to_owned(), dtype);
    });
    let after = Checkpoint::open(old.path()).unwrap();
    assert_eq!(before.spec(), after.spec());
    assert_eq!(before.revision(), after.revision());
    assert!(matches!(
        after.spec().ropes[0].scaling,
        RopeScaling::Llama3 { .. }
    ));
    // Nested by layer type, with equal values.
    edit(old.path(), "config.json", |config| {
        let rope = config["rope_parameters"].take();
        config["rope_parameters"] = json!({"full_attention": rope, "sliding_attention": rope});
    });
    assert_eq!(Checkpoint::open(old.path()).unwrap().spec(), before.spec());
    edit(old.path(), "config.json", |config| {
        config["rope_parameters"]["sliding_attention"]["rope_theta"] = json!(77.0);
    });
    assert_error_contains(old.path(), &["sliding_attention", "differs"]);
}

#[test]
fn windows_biases_and_end_tokens_follow_the_architecture() {
    let dir = copy("mistral");
    let windows = |dir: &TempDir| {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let attention = checkpoint.spec().attention();
        attention.map(|a| a.window).collect::<Vec<_>>()
    };
    assert_eq!(windows(&dir), [Some(24); 3]);
    edit_config(dir.path(), "sliding_window", json!(null));
    assert_eq!(windows(&dir), [None; 3]);
    let dir = copy("qwen2");
    assert_eq!(windows(&dir), [None; 2]);
    edit_config(dir.path(), "use_sliding_window", json!(true));
    assert_eq!(windows(&dir), [None, Some(16)]);
    edit_config(
        dir.path(),
        "layer_types",
        json!(["sliding_attention", "full_attention"]),
    );
    assert_eq!(windows(&dir), [Some(16), None]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.spec().family, "qwen2");
    let mut biases = checkpoint.spec().attention().map(|a| a.biases);
    assert!(biases.all(|biases| biases.qkv && !biases.output));
    assert_eq!(checkpoint.eos(), [408, 406]);
    fs::remove_file(dir.path().join("generation_config.json")).unwrap();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().eos(), [408]);
}

#[test]
fn linear_rope_divides_and_tying_follows_the_files() {
    let dir = copy("llama2");
    let plain = Checkpoint::open(dir.path()).unwrap().spec().ropes[0].frequencies(16);
    edit_config(
        dir.path(),
        "rope_scaling",
        json!({"type": "linear", "factor": 4.0}),
    );
    let linear = Checkpoint::open(dir.path()).unwrap().spec().ropes[0].frequencies(16);
    for (plain, linear) in plain.iter().zip(linear) {
        assert_eq!(linear, plain / 4.0);
    }
    for name in ["llama2", "qwen3"] {
        let dir = copy(name);
        let before = Checkpoint::open(dir.path()).unwrap().bytes_total();
        edit(dir.path(), "config.json", |config| {
            config
                .as_object_mut()
                .unwrap()
                .remove("tie_word_embeddings");
        });
        assert_eq!(Checkpoint::open(dir.path()).unwrap().bytes_total(), before);
    }
}

// Lesson: 19.
/// Lesson 19: the weights' revision was missing from a compatibility check.
#[test]
fn one_changed_element_changes_the_revision() {
    let dir = copy("qwen2.5");
    let before = Checkpoint::open(dir.path()).unwrap().revision();
    let file = dir.path().join("model-00002-of-00002.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_ne!(Checkpoint::open(dir.path()).unwrap().revision(), before);
    let dir = copy("qwen2.5");
    edit_config(dir.path(), "rope_theta", json!(20_000.0));
    assert_ne!(Checkpoint::open(dir.path()).unwrap().revision(), before);
}

/// Replaces a file by one without contents of its own, or without an end.
#[cfg(unix)]
fn replace_by(kind: &str, path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    if kind == "a sparse file" {
        // The contents stay, so that the length alone is wrong.
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        return file.set_len(1 << 40).unwrap();
    }
    fs::remove_file(path).unwrap();
    match kind {
        "a FIFO" => {
            let mode = Mode::RUSR | Mode::WUSR;
            mknodat(CWD, path, FileType::Fifo, mode, 0).unwrap();
        }
        "a device" => std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
        "a folder" => fs::create_dir(path).unwrap(),
        other => panic!("no file is {other}"),
    }
}

/// Returns the error of opening a folder, which must not wait for a writer or read without end.
#[cfg(unix)]
fn error_at_once(dir: &Path) -> String {
    let (error_sender, error) = std::sync::mpsc::channel();
    let dir = dir.to_owned();
    std::thread::spawn(move || error_sender.send(open_error(&dir)));
    let waited = error.recv_timeout(std::time::Duration::from_secs(60));
    waited.expect("a refusal at once")
}

#[test]
#[cfg(unix)]
fn special_and_endless_files_are_refused_at_once() {
    for (model, files) in [
        ("llama2", ["config.json", "model.safetensors"]),
        (
            "llama3",
            [
                "model.safetensors.index.json",
                "model-00002-of-00003.safetensors",
            ],
        ),
    ] {
        for file in files {
            for kind in ["a FIFO", "a device", "a folder", "a sparse file"] {
                let dir = copy(model);
                replace_by(kind, &dir.path().join(file));
                let error = error_at_once(dir.path());
                let expected = match (kind, file.ends_with(".json")) {
                    ("a sparse file", true) => "1099511627776 bytes; at most",
                    ("a sparse file", false) => "bytes follow",
                    _ => kind,
                };
                assert!(error.contains(file) && error.contains(expected), "{error}");
            }
        }
    }
}
