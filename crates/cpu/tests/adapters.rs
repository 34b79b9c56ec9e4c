//! Adapters on the processor, compared with the reference's goldens and with each sequence alone.

use crate::harness::{available, options};
use cleave_checkpoint::{Adapter, AdapterTarget, Checkpoint};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader, Isa, Quantize};
use cleave_engine::conformance::{adapter_goldens, mixed_adapters};
use cleave_engine::ops::Precision;
use cleave_engine::{AdapterError, AdapterTable, Engine, EngineLimits, ModelEngine, Weights};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Adapters, each with the checkpoint that it is for.
const ADAPTERS: [(&str, &str); 14] = [
    ("cohere", "cohere"),
    ("gemma2", "gemma2"),
    ("gpt-oss-params", "gpt-oss"),
    ("granite", "granite"),
    ("llama3-all", "llama3"),
    ("llama3-qv", "llama3"),
    ("llama3-third", "llama3"),
    ("mixtral-params", "mixtral"),
    ("olmo2", "olmo2"),
    ("phi3", "phi3"),
    ("qwen2", "qwen2"),
    ("qwen3-moe", "qwen3-moe"),
    ("qwen3-moe-each", "qwen3-moe"),
    ("qwen3-moe-params", "qwen3-moe"),
];

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

fn adapter(name: &str) -> PathBuf {
    testdata("adapters").join(name)
}

/// Limits that the model of a test fits in.
fn small_limits() -> EngineLimits {
    EngineLimits {
        block_tokens: 16,
        blocks_count: 1,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: 1,
        windows_count: 0,
    }
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
    let target = AdapterTarget::of(&checkpoint);
    let table = Arc::new(AdapterTable::new(pack, weights.spec().clone(), target, 64));
    let ops = CpuOps::new(options).map_err(|error| error.to_string())?;
    let engine = ModelEngine::new(ops, weights, limits).map_err(|error| error.to_string())?;
    Ok(Box::new(engine.with_adapters(table)))
}

// Invariant: I17.
#[test]
fn adapters_match_the_reference_on_every_isa() {
    for isa in available() {
        for (name, base) in ADAPTERS {
            let options = options(Precision::F32, isa, 2);
            let build = |dir: &Path, limits| engine(dir, limits, &options);
            adapter_goldens(&testdata(base), &adapter(name), &build)
                .unwrap_or_else(|error| panic!("{isa}: {error}"));
        }
    }
}

#[test]
fn every_adapter_of_testdata_is_compared() {
    let found = std::fs::read_dir(testdata("adapters")).unwrap();
    let names = found.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert_eq!(names, ADAPTERS.map(|(name, _)| name));
}

/// An adapter of `llama3` whose configuration was changed, and the reason why it is refused.
fn refusal(change: impl FnOnce(&mut Map<String, Value>)) -> String {
    let dir = copy("llama3-all");
    let file = dir.path().join("adapter_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(config.as_object_mut().unwrap());
    std::fs::write(&file, config.to_string()).unwrap();
    refused(dir.path())
}

/// The same with other tensors: `change` may rename each, or leave it out.
fn refusal_of_tensors(change: impl Fn(&str) -> Option<String>) -> String {
    let dir = copy("llama3-all");
    let file = dir.path().join("adapter_model.safetensors");
    let stored = std::fs::read(&file).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&stored).unwrap();
    let tensors = stored.tensors().into_iter();
    let changed = tensors.filter_map(|(name, tensor)| Some((change(&name)?, tensor)));
    safetensors::serialize_to_file(changed.collect::<Vec<_>>(), None, &file).unwrap();
    refused(dir.path())
}

fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(adapter(name).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

fn target(base: &str) -> AdapterTarget {
    AdapterTarget::of(&Checkpoint::open(&testdata(base)).unwrap())
}

fn refused(dir: &Path) -> String {
    let error = Adapter::open(dir, &target("llama3"), 64).unwrap_err();
    error.to_string()
}

#[test]
fn configurations_that_would_be_misread_are_refused() {
    type ChangeConfig = fn(&mut Map<String, Value>);
    let changes: [(&str, ChangeConfig); 14] = [
        ("field `peft_type`: is LOHA", |c| {
            drop(c.insert("peft_type".into(), json!("LOHA")))
        }),
        ("field `use_dora`: DoRA", |c| {
            drop(c.insert("use_dora".into(), json!(true)))
        }),
        ("field `bias`: is all", |c| {
            drop(c.insert("bias".into(), json!("all")))
        }),
        ("field `modules_to_save`", |c| {
            drop(c.insert("modules_to_save".into(), json!(["lm_head"])))
        }),
        ("field `trainable_token_indices`", |c| {
            drop(c.insert("trainable_token_indices".into(), json!([1])))
        }),
        ("field `init_lora_weights`: is \"pissa\"", |c| {
            drop(c.insert("init_lora_weights".into(), json!("pissa")))
        }),
        ("field `surprise`: 3 is not known", |c| {
            drop(c.insert("surprise".into(), json!(3)))
        }),
        ("field `r`: is missing", |c| drop(c.remove("r"))),
        ("field `lora_alpha`: is missing", |c| {
            drop(c.remove("lora_alpha"))
        }),
        (
            "names `embed_tokens`: an adapter of the embedding or the head",
            |c| {
                c["target_modules"]
                    .as_array_mut()
                    .unwrap()
                    .push(json!("embed_tokens"));
            },
        ),
        ("names `conv_proj`, which the model does not have", |c| {
            c["target_modules"]
                .as_array_mut()
                .unwrap()
                .push(json!("conv_proj"));
        }),
        (
            "does not name `model.layers.0.mlp.down_proj`, which has tensors",
            |c| {
                c["target_modules"] = json!([
                    "q_proj",
                    "k_proj",
                    "v_proj",
                    "o_proj",
                    "up_proj",
                    "gate_proj"
                ]);
            },
        ),
        ("field `rank_pattern.^q.*`: is a regular expression", |c| {
            c["rank_pattern"] = json!({"^q.*": 4});
        }),
        (
            "shape [8, 112]; the rank of adapter_config.json and the model call for [7, 112]",
            |c| {
                c["r"] = json!(7);
            },
        ),
    ];
    for (expected, change) in changes {
        let error = refusal(change);
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let ambiguous = refusal(|c| c["rank_pattern"] = json!({"q_proj": 5, "self_attn.q_proj": 6}));
    assert!(ambiguous.contains("has two values for"), "{ambiguous}");
}

#[test]
fn tensors_that_would_be_ignored_are_refused() {
    let rename = |from: &'static str, to: &'static str| {
        refusal_of_tensors(move |name| Some(name.replace(from, to)))
    };
    for (error, expected) in [
        (
            rename("layers.2.", "layers.3."),
            "the model has no such module",
        ),
        (
            rename("base_model.model.", "model."),
            "does not begin with `base_model.model.`",
        ),
        (
            rename(
                "layers.0.mlp.up_proj.lora_B.weight",
                "layers.0.mlp.up_proj.lora_B.bias",
            ),
            "lora_B.weight`: missing",
        ),
        (
            rename("up_proj.lora_A.weight", "up_proj.lora_magnitude_vector"),
            "lora_A.weight`: missing",
        ),
        (
            rename(
                "layers.0.mlp.up_proj.lora_A.weight",
                "layers.0.mlp.up_proj.weight",
            ),
            "lora_A.weight`: missing",
        ),
    ] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let half = refusal_of_tensors(|name| {
        let is_gone = name.ends_with("layers.1.mlp.up_proj.lora_B.weight");
        (!is_gone).then(|| name.to_owned())
    });
    assert!(
        half.contains("layers.1.mlp.up_proj.lora_B.weight`: missing"),
        "{half}"
    );
    let module =
        refusal_of_tensors(|name| (!name.contains("layers.1.mlp.up")).then(|| name.to_owned()));
    assert!(module.contains("target_modules names up_proj"), "{module}");
    // Experts have projections of the same names as a dense MLP.
    let experts = AdapterTarget::of(&Checkpoint::open(&testdata("qwen3-moe")).unwrap());
    let dense = Adapter::open(&adapter("llama3-all"), &experts, 64).unwrap_err();
    assert!(dense.to_string().contains("shape"), "{dense}");
}

/// An adapter with one more tensor, and the reason why a model refuses it.
fn refusal_of_extra(name: &str, base: &str, extra: &str) -> String {
    let dir = copy(name);
    let file = dir.path().join("adapter_model.safetensors");
    let stored = std::fs::read(&file).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&stored).unwrap();
    let zeros = [0; 16];
    let added = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![4, 1], &zeros);
    let mut tensors = stored.tensors();
    tensors.push((extra.to_owned(), added.unwrap()));
    safetensors::serialize_to_file(tensors, None, &file).unwrap();
    let error = Adapter::open(dir.path(), &target(base), 64).unwrap_err();
    error.to_string()
}

#[test]
fn a_tensor_beside_the_pairs_is_refused() {
    let layer = "base_model.model.model.layers.1";
    for (name, base, extra, expected) in [
        (
            "llama3-all",
            "llama3",
            "mlp.up_proj.lora_B.bias",
            "is a bias of LoRA's second matrix",
        ),
        (
            "qwen3-moe",
            "qwen3-moe",
            "mlp.experts.0.gate_proj.lora_A.weight",
            "target_modules`: does not name `model.layers.1.mlp.experts.0.gate_proj`",
        ),
        (
            "qwen3-moe",
            "qwen3-moe",
            "mlp.experts.8.gate_proj.lora_A.weight",
            "the model has no such module; adapters may change down_proj, gate_proj, gate_up_proj",
        ),
        (
            "qwen3-moe",
            "qwen3-moe",
            "mlp.experts.base_layer.lora_B.weight",
            "target_parameters`: does not name `model.layers.1.mlp.experts` often enough",
        ),
        (
            "qwen3-moe-params",
            "qwen3-moe",
            "mlp.experts.base_layer.base_layer.lora_B.weight",
            "target_parameters`: does not name `model.layers.1.mlp.experts` often enough",
        ),
        (
            "qwen3-moe",
            "qwen3-moe",
            "mlp.gate.lora_A.weight",
            "an adapter of a router of experts is not supported; merge it",
        ),
    ] {
        let error = refusal_of_extra(name, base, &format!("{layer}.{extra}"));
        assert!(error.contains(expected), "{extra}: {error}");
    }
    let error = refusal(|c| c["target_parameters"] = json!(["mlp.experts.gate_up_proj"]));
    let expected = "field `target_parameters`: names `mlp.experts.gate_up_proj`, which the model does not have";
    assert!(error.contains(expected), "{error}");
}

/// An adapter of `qwen3-moe`'s experts with other ranks, tensors or release, and the reason why it
/// is refused.
fn refusal_of_experts(
    config: impl FnOnce(&mut Map<String, Value>),
    tensors: impl Fn(&str, Vec<usize>) -> Option<Vec<usize>>,
) -> String {
    let dir = copy("qwen3-moe-params");
    let file = dir.path().join("adapter_config.json");
    let mut fields: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config(fields.as_object_mut().unwrap());
    std::fs::write(&file, fields.to_string()).unwrap();
    let file = dir.path().join("adapter_model.safetensors");
    let stored = std::fs::read(&file).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&stored).unwrap();
    let tensors = stored.tensors().into_iter().filter_map(|(name, tensor)| {
        let shape = tensors(&name, tensor.shape().to_vec())?;
        let bytes = vec![0; shape.iter().product::<usize>() * 4];
        Some((name, shape, bytes))
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
        (name.clone(), view.unwrap())
    });
    safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, &file).unwrap();
    let error = Adapter::open(dir.path(), &target("qwen3-moe"), 64).unwrap_err();
    error.to_string()
}

#[test]
fn adapters_of_experts_that_would_be_misread_are_refused() {
    let same = |_: &str, shape: Vec<usize>| Some(shape);
    let exchanged = |name: &str, shape: Vec<usize>| match (name.contains("experts"), &shape[..]) {
        (true, [32, 48]) => Some(vec![32, 80]),
        (true, [80, 32]) => Some(vec![48, 32]),
        _ => Some(shape),
    };
    let error = refusal_of_experts(|_| {}, exchanged);
    assert!(error.contains("exchanged, as PEFT before 0.19"), "{error}");
    let without = |name: &str, shape: Vec<usize>| {
        let is_left = !name.contains("layers.2.mlp.experts.lora");
        is_left.then_some(shape)
    };
    let error = refusal_of_experts(|_| {}, without);
    assert!(
        error.contains("`model.layers.2.mlp.experts.down_proj` has no tensors"),
        "{error}"
    );
    let half = |name: &str, shape: Vec<usize>| {
        let is_left = !name.ends_with("layers.2.mlp.experts.lora_B.weight");
        is_left.then_some(shape)
    };
    let error = refusal_of_experts(|_| {}, half);
    assert!(
        error.contains("layers.2.mlp.experts.lora_B.weight`: missing"),
        "{error}"
    );
    // One expert fewer or more.
    let fewer = |name: &str, shape: Vec<usize>| match (name.contains("experts"), &shape[..]) {
        (true, [32, 48]) => Some(vec![28, 48]),
        _ => Some(shape),
    };
    let error = refusal_of_experts(|_| {}, fewer);
    assert!(
        error.contains("shape [28, 48]") && error.contains("[32, 48]"),
        "{error}"
    );
    let error = refusal_of_experts(|c| drop(c.insert("r".into(), json!(65))), same);
    assert!(
        error.contains("rank 65") && error.contains("--max-lora-rank"),
        "{error}"
    );
    let error = refusal_of_experts(
        |c| c["target_parameters"] = json!(["mlp.experts.down_proj"]),
        same,
    );
    assert!(error.contains("often enough"), "{error}");
}

#[test]
fn the_digest_is_that_of_the_content() {
    let open = |dir: &Path| Adapter::open(dir, &target("llama3"), 64).unwrap().id();
    let original = open(&adapter("llama3-all"));
    let same = copy("llama3-all");
    assert_eq!(open(same.path()), original, "another folder");
    let change = |name: &str, value: Value| {
        let dir = copy("llama3-all");
        let file = dir.path().join("adapter_config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        config[name] = value;
        std::fs::write(&file, config.to_string()).unwrap();
        open(dir.path())
    };
    assert_eq!(
        change("lora_dropout", json!(0.5)),
        original,
        "training alone"
    );
    assert_ne!(change("lora_alpha", json!(7)), original);
    assert_ne!(change("use_rslora", json!(false)), original);
    let written = copy("llama3-all");
    let file = written.path().join("adapter_model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert_ne!(open(written.path()), original, "one bit");
}

/// A file that is written to after it was opened is another adapter.
#[test]
fn an_adapter_that_changed_since_is_not_loaded() {
    let options = options(Precision::F32, Isa::detect(), 1);
    let engine = engine(&testdata("llama3"), small_limits(), &options).unwrap();
    let memory = engine.adapters().unwrap();
    let dir = copy("llama3-all");
    let facts = memory.open(dir.path()).unwrap();
    let file = dir.path().join("adapter_model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    // In place, as no careful writer does: the mapping changes with it.
    std::fs::write(&file, bytes).unwrap();
    let error = memory.load(facts.adapter).unwrap_err();
    assert!(matches!(error, AdapterError::Changed { .. }), "{error}");
    let again = memory.open(dir.path()).unwrap();
    memory.load(again.adapter).unwrap();
    memory.close(again.adapter);
    let error = memory.load(again.adapter).unwrap_err();
    assert!(matches!(error, AdapterError::Unknown(_)), "{error}");
}

/// A file that became shorter under a running process ends no process: it is an adapter that
/// changed. One that was removed, or has another one in its place, is loaded as it was.
#[test]
fn a_file_that_is_cut_or_removed_ends_no_process() {
    let options = options(Precision::F32, Isa::detect(), 1);
    let engine = engine(&testdata("llama3"), small_limits(), &options).unwrap();
    let memory = engine.adapters().unwrap();
    let dir = copy("llama3-all");
    let file = dir.path().join("adapter_model.safetensors");
    let opened = memory.open(dir.path()).unwrap().adapter;
    let bytes = std::fs::read(&file).unwrap();
    for len in [0, 7, bytes.len() / 2, bytes.len() - 1, bytes.len() + 1] {
        let mut written = bytes.clone();
        written.resize(len, 0);
        std::fs::write(&file, &written).unwrap();
        for failed in [memory.load(opened), memory.copy_to_host(opened)] {
            let error = failed.unwrap_err();
            assert!(
                matches!(error, AdapterError::Changed { .. }),
                "{len}: {error}"
            );
        }
    }
    std::fs::write(&file, &bytes).unwrap();
    std::fs::remove_file(&file).unwrap();
    std::fs::copy(
        adapter("llama3-qv").join("adapter_model.safetensors"),
        &file,
    )
    .unwrap();
    memory.load(opened).unwrap();
    drop(dir);
    memory.unload(opened);
    memory.load(opened).unwrap();
}

/// A file larger than any adapter of the model is not read.
#[test]
fn a_file_too_large_for_an_adapter_is_refused() {
    let dir = copy("llama3-all");
    let file = dir.path().join("adapter_model.safetensors");
    let sparse = std::fs::File::options().write(true).open(&file).unwrap();
    sparse.set_len(1 << 40).unwrap();
    let error = refused(dir.path());
    assert!(error.contains("1099511627776 bytes; at most"), "{error}");
    assert!(error.contains("--max-lora-rank"), "{error}");
}

/// The price of an adapter follows from the bytes that an engine keeps of it.
#[test]
fn an_adapter_takes_the_bytes_that_its_model_counts() {
    for (name, rank) in [("qwen2", 4), ("gemma2", 4), ("olmo2", 4)] {
        let options = options(Precision::F32, Isa::detect(), 1);
        let engine = engine(&testdata(name), small_limits(), &options).unwrap();
        let memory = engine.adapters().unwrap();
        let facts = memory.open(&adapter(name)).unwrap();
        let checkpoint = Checkpoint::open(&testdata(name)).unwrap();
        let cost = checkpoint.spec().adapter_cost(rank);
        assert_eq!(facts.bytes, cost.bytes(), "{name}");
    }
}

/// A copy in host memory is loaded without the files, and refused where they have changed.
#[test]
fn a_host_copy_is_the_adapter_whatever_its_files_become() {
    let options = options(Precision::F32, Isa::detect(), 1);
    let engine = engine(&testdata("llama3"), small_limits(), &options).unwrap();
    let memory = engine.adapters().unwrap();
    let dir = copy("llama3-all");
    let adapter = memory.open(dir.path()).unwrap().adapter;
    memory.copy_to_host(adapter).unwrap();
    let file = dir.path().join("adapter_model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    memory.load(adapter).unwrap();
    memory.unload(adapter);
    memory.load(adapter).unwrap();
    memory.unload(adapter);
    memory.drop_host_copy(adapter);
    for failed in [memory.load(adapter), memory.copy_to_host(adapter)] {
        let error = failed.unwrap_err();
        assert!(matches!(error, AdapterError::Changed { .. }), "{error}");
    }
}

/// Two adapters of experts in one step, beside sequences of the model alone, whose bits stay.
// Invariant: I11.
#[test]
fn sequences_of_adapters_of_experts_are_path_independent() {
    let names = ["qwen3-moe-params", "qwen3-moe-each", "qwen3-moe"].map(adapter);
    let names: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
    let bases = [
        (Precision::F32, Isa::Plain, None),
        (Precision::Bf16, Isa::detect(), None),
        (Precision::Bf16, Isa::detect(), Some(Quantize::Int8)),
        (Precision::Bf16, Isa::detect(), Some(Quantize::Int4)),
    ];
    for (precision, isa, quantize) in bases {
        let options = CpuOptions {
            quantize,
            ..options(precision, isa, 2)
        };
        let build = |dir: &Path, limits| engine(dir, limits, &options);
        mixed_adapters(&testdata("qwen3-moe"), &names, &build)
            .unwrap_or_else(|error| panic!("{precision:?} {isa} {quantize:?}: {error}"));
    }
}

/// Several adapters of one model in one step, beside sequences of the model alone.
// Invariant: I11.
#[test]
fn sequences_of_several_adapters_are_path_independent() {
    let names = ["llama3-all", "llama3-qv", "llama3-third"].map(adapter);
    let names: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
    let bases = [
        (Precision::F32, Isa::detect(), None),
        (Precision::F32, Isa::Plain, None),
        (Precision::Bf16, Isa::detect(), None),
        (Precision::Bf16, Isa::detect(), Some(Quantize::Int8)),
        (Precision::Bf16, Isa::detect(), Some(Quantize::Int4)),
    ];
    for (precision, isa, quantize) in bases {
        let options = CpuOptions {
            quantize,
            ..options(precision, isa, 2)
        };
        let build = |dir: &Path, limits| engine(dir, limits, &options);
        mixed_adapters(&testdata("llama3"), &names, &build)
            .unwrap_or_else(|error| panic!("{precision:?} {isa} {quantize:?}: {error}"));
    }
}
