//! Quantised checkpoints: every layout compared with the tool that wrote it, and unsupported ones.

use crate::folder::{assert_error_contains, copy, edit, edit_header, testdata};
use crate::reference;
use cleave_checkpoint::synth::{QuantizeOptions, QuantizedLayout, quantize, synth_of_config};
use cleave_checkpoint::{Checkpoint, QuantizedType, StoredMatrix};
use cleave_engine::Engine;
use cleave_engine::conformance::agreement;
use cleave_models::{Projection, TensorPlace};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::Path;

/// Folder, its quantisation in words, and the number of quantised projections out of seven.
const FOLDERS: [(&str, &str, usize); 17] = [
    ("fp8-tensor", "compressed-tensors fp8", 7),
    ("fp8-channel", "compressed-tensors fp8", 6),
    ("fp8-block", "fp8", 6),
    ("int8-channel", "compressed-tensors int8", 7),
    ("int8-group", "compressed-tensors int8", 7),
    ("int8-packed", "compressed-tensors int8", 7),
    ("awq", "awq int4", 7),
    ("gptq", "gptq int4", 7),
    ("gptq-int8", "gptq int8", 7),
    ("gptq-act-order", "gptq int4", 7),
    ("int4-symmetric", "compressed-tensors int4", 7),
    ("int4-asymmetric", "compressed-tensors int4", 7),
    ("mxfp8", "compressed-tensors fp8", 6),
    ("mxfp4", "compressed-tensors fp4", 6),
    ("nvfp4", "compressed-tensors fp4", 7),
    ("modelopt-nvfp4", "modelopt fp4", 7),
    ("modelopt-mixed", "modelopt fp4 and fp8", 7),
];

fn path(name: &str) -> std::path::PathBuf {
    testdata(&format!("quantized/{name}"))
}

/// A weight `(out, in)` as `scripts/models/quantized_goldens.py` dequantised it.
fn expected(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let words = tensor.data().as_chunks::<4>().0;
    words
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

/// Compares every element bit by bit: a product of two f32 numbers that is rounded once has one
/// result.
#[test]
fn every_quantised_layout_is_read_exactly() {
    for (folder, about, quantized_count) in FOLDERS {
        let checkpoint = Checkpoint::open(&path(folder)).unwrap();
        assert_eq!(
            checkpoint.quantization().as_deref(),
            Some(about),
            "{folder}"
        );
        let bytes = std::fs::read(path(folder).join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut found_count = 0;
        for name in file.names() {
            let matrix = checkpoint.matrix(name).unwrap();
            assert_eq!(
                file.tensor(name).unwrap().shape(),
                [matrix.rows(), matrix.columns()]
            );
            assert!(matrix.to_f32() == expected(&file, name), "{folder}: {name}");
            found_count += usize::from(matches!(matrix, StoredMatrix::Quantized(_)));
        }
        assert_eq!((file.len(), found_count), (7, quantized_count), "{folder}");
    }
}

/// Codes, scales and zero points read one by one give the dequantised rows.
#[test]
fn codes_scales_and_zero_points_reproduce_the_rows() {
    for (folder, ..) in FOLDERS {
        let checkpoint = Checkpoint::open(&path(folder)).unwrap();
        let name = "model.layers.0.mlp.gate_proj.weight";
        let Some(StoredMatrix::Quantized(tensor)) = checkpoint.matrix(name) else {
            panic!("{folder}: dense");
        };
        let Some(each) = tensor.group_columns() else {
            assert_eq!(folder, "gptq-act-order");
            continue;
        };
        let (row, width) = (13, tensor.columns());
        let (mut codes, mut values) = (vec![0; width - 3], vec![0.0; width]);
        tensor.read_codes(row, 3, &mut codes);
        tensor.read_row(row, &mut values);
        for (code, column) in codes.into_iter().zip(3..) {
            let (scale, zero) = (
                tensor.scale(row, column / each),
                tensor.zero(row, column / each),
            );
            let number = match tensor.element() {
                QuantizedType::E4m3 => cleave_checkpoint::e4m3::to_f32(code),
                QuantizedType::Int8 => {
                    f32::from(code.cast_signed()) - f32::from(zero.cast_signed())
                }
                QuantizedType::Int4 => f32::from(code) - f32::from(zero),
                QuantizedType::E2m1 => cleave_checkpoint::e2m1::to_f32(code),
            };
            assert_eq!(number * scale, values[column], "{folder}");
        }
    }
}

#[test]
fn every_quantised_layout_loads_and_is_named() {
    for (folder, about, _) in FOLDERS {
        let limits = cleave_engine::EngineLimits {
            block_tokens: 16,
            blocks_count: 2,
            states_count: 0,
            slots_count: 1,
            step_tokens_max: 16,
            windows_count: 0,
        };
        let engine = reference::engine(&path(folder), limits).unwrap();
        let name = &cleave_engine::Engine::describe(&engine).model;
        assert_eq!(*name, format!("llama 11K, {about}"));
    }
}

/// The stack of an expert's gate and up projection, or its down projection, as the file's rows.
fn expert_rows(stack: &[StoredMatrix]) -> Vec<f32> {
    stack.iter().flat_map(StoredMatrix::to_f32).collect()
}

#[test]
fn experts_of_four_bits_are_read_exactly() {
    let folder = path("mxfp4-gpt-oss");
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(checkpoint.quantization().as_deref(), Some("mxfp4 fp4"));
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, parts) in [
        ("gate_up_proj", Projection::EXPERT_GATE_UP),
        ("down_proj", Projection::EXPERT_DOWN),
    ] {
        let name = format!("model.layers.0.mlp.experts.{name}");
        let &[count, rows, columns] = file.tensor(&name).unwrap().shape() else {
            panic!("{name}: not of all experts");
        };
        let all = expected(&file, &name);
        let stored: usize = (0..count)
            .map(|expert| {
                let place = TensorPlace::Expert { layer: 0, expert };
                let stack = checkpoint.stack(parts, place);
                let all = &all[expert * rows * columns..][..rows * columns];
                // In the file rows of gate and up take turns.
                let ordered: Vec<f32> = (0..parts.len())
                    .flat_map(|part| (part..rows).step_by(parts.len()))
                    .flat_map(|row| &all[row * columns..][..columns])
                    .copied()
                    .collect();
                assert!(expert_rows(&stack) == ordered, "{name} {expert}");
                stack.iter().map(StoredMatrix::stored_bytes).sum::<usize>()
            })
            .sum();
        let (codes, scales) = (count * rows * columns / 2, count * rows * columns / 32);
        assert_eq!(stored, codes + scales, "{name}");
    }
}

fn edit_quantization(dir: &Path, change: impl FnOnce(&mut Value)) {
    edit(dir, "config.json", |config| {
        change(&mut config["quantization_config"])
    });
}

// Lesson: 19.
/// Lesson 19. Equal bytes mean different weights in another layout.
#[test]
fn a_changed_scale_or_layout_changes_the_revision() {
    let revision = |dir: &Path| Checkpoint::open(dir).unwrap().revision();
    let dir = copy("quantized/gptq");
    let before = revision(dir.path());
    edit_quantization(dir.path(), |q| q["checkpoint_format"] = json!("gptq_v2"));
    assert_ne!(revision(dir.path()), before);
    for kind in ["scales", "qzeros", "qweight"] {
        let dir = copy("quantized/gptq");
        let file = dir.path().join("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let entry = &header[format!("model.layers.0.mlp.up_proj.{kind}")];
        bytes[8 + length + entry["data_offsets"][0].as_u64().unwrap() as usize] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        assert_ne!(revision(dir.path()), before, "{kind}");
    }
}

#[test]
fn an_unsupported_quantisation_is_named() {
    type DamageQuantization = fn(&mut Value);
    let cases: [(&str, DamageQuantization, &[&str]); 13] = [
        (
            "awq",
            |q| q["quant_method"] = json!("bitsandbytes"),
            &[
                "bitsandbytes",
                "compressed-tensors, modelopt, mxfp4, fp8, awq and gptq",
            ],
        ),
        (
            "awq",
            |q| drop(q.as_object_mut().unwrap().remove("quant_method")),
            &["quant_method", "is missing"],
        ),
        (
            "awq",
            |q| q["bits"] = json!(8),
            &["quantization_config.bits", "8 bits", "4 are"],
        ),
        (
            "awq",
            |q| q["version"] = json!("gemv"),
            &["version", "gemv", "gemm is"],
        ),
        ("awq", |q| q["zero_point"] = json!(false), &["zero_point"]),
        (
            "awq",
            |q| q["group_size"] = json!(0),
            &["group_size", "is 0"],
        ),
        ("gptq", |q| q["bits"] = json!(3), &["3 bits"]),
        (
            "gptq",
            |q| q["checkpoint_format"] = json!("marlin"),
            &["marlin", "gptq_v2"],
        ),
        (
            "fp8-block",
            |q| q["fmt"] = json!("e5m2"),
            &["e5m2", "e4m3 is"],
        ),
        (
            "fp8-block",
            |q| q["weight_block_size"] = json!([128]),
            &["weight_block_size", "two numbers"],
        ),
        (
            "int4-symmetric",
            |q| q["format"] = json!("mxfp6-pack-quantized"),
            &["mxfp6", "pack-quantized"],
        ),
        (
            "int4-symmetric",
            |q| q["config_groups"]["group_0"]["weights"]["num_bits"] = json!(2),
            &[
                "group_0.weights.num_bits",
                "int of 2 bits",
                "int of 8 or 4 bits",
            ],
        ),
        (
            "fp8-tensor",
            |q| q["sparsity_config"] = json!({"format": "sparse-24-bitmask"}),
            &["sparse-24", "dense is"],
        ),
    ];
    for (folder, change, expected) in cases {
        let dir = copy(&format!("quantized/{folder}"));
        edit_quantization(dir.path(), change);
        assert_error_contains(dir.path(), &[&["config.json"], expected].concat());
    }
}

/// Every row moves: the order is one row backwards.
#[test]
fn rows_of_quantised_weights_are_read_in_any_order() {
    for (folder, ..) in FOLDERS {
        let checkpoint = Checkpoint::open(&path(folder)).unwrap();
        let name = "model.layers.0.mlp.gate_proj.weight";
        let stored = checkpoint.matrix(name).unwrap();
        let (rows, columns) = (stored.rows(), stored.columns());
        let order: Vec<usize> = (0..rows).map(|row| (row + rows - 1) % rows).collect();
        let moved = stored.with_rows(&order);
        let mut expected = stored.to_f32();
        expected.rotate_right(columns);
        assert!(moved.to_f32() == expected, "{folder}");
        let back: Vec<usize> = (0..rows).map(|row| (row + 1) % rows).collect();
        assert!(
            moved.with_rows(&back).to_f32() == stored.to_f32(),
            "{folder}"
        );
        let StoredMatrix::Quantized(moved) = moved else {
            panic!("{folder}: dense");
        };
        let StoredMatrix::Quantized(stored) = stored else {
            panic!("{folder}: dense");
        };
        assert_eq!(moved.scale_byte(1, 0), stored.scale_byte(0, 0), "{folder}");
    }
}

fn written(from: &Path, layout: QuantizedLayout, group: usize) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let options = QuantizeOptions { layout, group };
    quantize(from, out.path(), options, &mut |_| {}).unwrap();
    out
}

/// In f32 every number is exact.
#[test]
fn an_expanded_copy_has_the_numbers_of_its_source() {
    for (folder, ..) in FOLDERS.iter().chain(&[("mxfp4-gpt-oss", "", 0)]) {
        let expanded = written(&path(folder), QuantizedLayout::F32, 1);
        let checkpoint = Checkpoint::open(expanded.path()).unwrap();
        assert_eq!(checkpoint.quantization(), None, "{folder}");
        let bytes = std::fs::read(path(folder).join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for name in file.names() {
            let mut found = checkpoint.matrix(name).unwrap().to_f32();
            if let &[count, rows, columns] = file.tensor(name).unwrap().shape() {
                // The dense model has experts' inputs before their outputs.
                let places = (0..count * rows * columns).map(|at| {
                    let (expert, row, column) =
                        (at / columns / rows, at / columns % rows, at % columns);
                    (expert * columns + column) * rows + row
                });
                found = places.map(|at| found[at]).collect();
            }
            assert!(found == expected(&file, name), "{folder}: {name}");
        }
    }
}

/// Random weights of a golden's model, but of a width that groups divide.
fn wide_copy(folder: &str) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let config = out.path().join("wide.json");
    std::fs::copy(testdata(folder).join("config.json"), &config).unwrap();
    edit(out.path(), "wide.json", |config| {
        config["hidden_size"] = json!(64);
        config["head_dim"] = json!(16);
        config["intermediate_size"] = json!(96);
    });
    synth_of_config(&config, out.path(), 3, &mut |_| {}).unwrap();
    out
}

/// Families whose rotary pairs are neighbours, so that rows of queries and keys move: logits equal
/// those of the same numbers in f32.
#[test]
fn quantised_rows_move_as_dense_ones_do() {
    for folder in ["glm4", "cohere", "cohere2"] {
        for (layout, group) in [
            (QuantizedLayout::Fp8, 1),
            (QuantizedLayout::Fp8Block, 16),
            (QuantizedLayout::Int8, 1),
            (QuantizedLayout::Int4, 32),
            (QuantizedLayout::Awq, 32),
            (QuantizedLayout::Gptq, 32),
            (QuantizedLayout::Gptq8, 32),
            (QuantizedLayout::Mxfp8, 32),
            (QuantizedLayout::Mxfp4, 32),
            (QuantizedLayout::Nvfp4, 16),
            (QuantizedLayout::ModelOptNvfp4, 16),
            (QuantizedLayout::ModelOptFp8, 1),
        ] {
            let wide = wide_copy(folder);
            let quantized = written(wide.path(), layout, group);
            let dense = written(quantized.path(), QuantizedLayout::F32, 1);
            let build = |dir: &Path, limits| -> Result<Box<dyn Engine>, String> {
                Ok(Box::new(reference::engine(dir, limits)?))
            };
            let expanded = |_: &Path, limits| build(dense.path(), limits);
            let prompts = testdata(folder).join("goldens.json");
            std::fs::copy(prompts, quantized.path().join("goldens.json")).unwrap();
            agreement(quantized.path(), [&build, &expanded], 0.0)
                .unwrap_or_else(|error| panic!("{folder} {layout:?}: {error}"));
            let checkpoint = Checkpoint::open(quantized.path()).unwrap();
            let stack = checkpoint.stack(Projection::QKV, TensorPlace::Layer(0));
            assert!(
                stack
                    .iter()
                    .all(|matrix| matches!(matrix, StoredMatrix::Quantized(_)))
            );
        }
    }
}

fn rename(dir: &Path, from: &str, to: &str) {
    edit_header(&dir.join("model.safetensors"), |header| {
        let entry = header.as_object_mut().unwrap().remove(from).unwrap();
        header[to] = entry;
    });
}

/// The test renames the missing tensor, so that the file has an unknown one too; the error must
/// name the missing one.
#[test]
fn a_missing_quantised_tensor_is_named() {
    let cases = [
        (
            "fp8-channel",
            "q_proj.weight_scale",
            "F8_E4M3, which needs scales",
        ),
        ("fp8-block", "q_proj.weight_scale_inv", "needs scales"),
        ("awq", "q_proj.qzeros", "packed weights"),
        ("gptq", "q_proj.scales", "packed weights"),
        ("int4-asymmetric", "q_proj.weight_shape", "packed weights"),
        ("awq", "q_proj.qweight", "config.json calls for it"),
    ];
    for (folder, name, expected) in cases {
        let dir = copy(&format!("quantized/{folder}"));
        let name = format!("model.layers.0.self_attn.{name}");
        rename(dir.path(), &name, "elsewhere");
        let missing = match name.strip_suffix("qweight") {
            Some(module) => format!("{module}weight"),
            None => name,
        };
        assert_error_contains(
            dir.path(),
            &["model.safetensors", &missing, "missing", expected],
        );
    }
}

#[test]
fn a_mismatched_quantised_tensor_is_named() {
    let assert_named = |folder: &str, kind: &str, field: &str, value: Value, expected: &[&str]| {
        let dir = copy(&format!("quantized/{folder}"));
        let name = format!("model.layers.0.mlp.gate_proj.{kind}");
        edit_header(&dir.path().join("model.safetensors"), |header| {
            header[&name][field] = value
        });
        assert_error_contains(
            dir.path(),
            &[&["model.safetensors", name.as_str()], expected].concat(),
        );
    };
    assert_named(
        "fp8-channel",
        "weight_scale",
        "shape",
        json!([8, 10]),
        &["[8, 10]", "[80, 1]"],
    );
    assert_named(
        "fp8-block",
        "weight_scale_inv",
        "shape",
        json!([2, 4]),
        &["[2, 4]", "[4, 2]"],
    );
    assert_named(
        "fp8-tensor",
        "weight",
        "dtype",
        json!("F8_E5M2"),
        &["F8_E5M2", "F8_E4M3"],
    );
    assert_named(
        "awq",
        "qweight",
        "shape",
        json!([10, 32]),
        &["[10, 32]", "[32, 10]"],
    );
    assert_named("gptq", "qzeros", "dtype", json!("F32"), &["F32", "I32"]);
    assert_named("gptq", "scales", "dtype", json!("I16"), &["I16", "F16"]);
    assert_named(
        "int4-symmetric",
        "weight_scale",
        "shape",
        json!([160, 1]),
        &["weight_scale", "[160, 1]"],
    );
    // A group size that contradicts the shapes.
    let dir = copy("quantized/gptq");
    edit_quantization(dir.path(), |q| q["group_size"] = json!(64));
    assert_error_contains(
        dir.path(),
        &["model.safetensors", "qzeros", "[3, 4]", "[2, 4]"],
    );
}

/// Covers tensors that would be ignored, and tensors that would be used wrongly.
#[test]
fn unused_tensors_are_refused_except_activation_scales() {
    let dir = copy("quantized/awq");
    rename(dir.path(), "lm_head.weight", "lm_head.qweight");
    assert_error_contains(
        dir.path(),
        &["lm_head.qweight", "a quantised lm_head is not supported"],
    );
    let dir = copy("quantized/gptq");
    edit_header(&dir.path().join("model.safetensors"), |header| {
        // Exchanges two biases of zeros.
        let scales = header["model.layers.0.self_attn.k_proj.bias"].clone();
        header["model.layers.0.self_attn.k_proj.bias"]["data_offsets"] =
            header["model.layers.0.self_attn.v_proj.bias"]["data_offsets"].clone();
        header["model.layers.0.self_attn.v_proj.bias"]["data_offsets"] =
            scales["data_offsets"].clone();
    });
    Checkpoint::open(dir.path()).unwrap();
    let file = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let bias = &header["model.layers.0.self_attn.v_proj.bias"]["data_offsets"][0];
    bytes[8 + length + bias.as_u64().unwrap() as usize] = 1;
    std::fs::write(&file, bytes).unwrap();
    assert_error_contains(dir.path(), &["v_proj.bias", "is not part of"]);
    let dir = copy("quantized/fp8-tensor");
    rename(
        dir.path(),
        "model.layers.0.self_attn.q_proj.input_scale",
        "model.layers.0.self_attn.k_scale",
    );
    Checkpoint::open(dir.path()).unwrap();
    let dir = copy("quantized/fp8-tensor");
    rename(
        dir.path(),
        "model.layers.0.self_attn.q_proj.input_scale",
        "model.layers.0.self_attn.q_proj.weight_global_scale",
    );
    assert_error_contains(dir.path(), &["weight_global_scale", "is not part of"]);
}

/// Overwrites the scale of an activation, and renames it to `name`.
fn with_scale(name: &str, scale: f32) -> tempfile::TempDir {
    let dir = copy("quantized/fp8-tensor");
    let from = "model.layers.0.self_attn.q_proj.input_scale";
    let file = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let at = 8 + length + header[from]["data_offsets"][0].as_u64().unwrap() as usize;
    match header[from]["dtype"].as_str().unwrap() {
        "F32" => bytes[at..at + 4].copy_from_slice(&scale.to_le_bytes()),
        // The upper half only: the scales of these tests fit bf16.
        "BF16" => bytes[at..at + 2].copy_from_slice(&scale.to_le_bytes()[2..]),
        other => panic!("{other}"),
    }
    std::fs::write(&file, bytes).unwrap();
    rename(dir.path(), from, name);
    dir
}

#[test]
fn kv_scales_are_reported_as_a_range() {
    let plain = Checkpoint::open(&path("fp8-tensor")).unwrap();
    assert_eq!(plain.kv_scales(), None);
    for kind in ["k_scale", "v_scale"] {
        for (scale, reported) in [(0.25, Some(0.25)), (3.0, Some(3.0)), (-1.0, None)] {
            let dir = with_scale(&format!("model.layers.0.self_attn.{kind}"), scale);
            let scales = Checkpoint::open(dir.path()).unwrap().kv_scales();
            assert_eq!(
                scales.map(|scales| (scales.min, scales.max)),
                reported.map(|s| (s, s))
            );
        }
    }
}

#[test]
fn a_group_index_out_of_range_is_refused() {
    let dir = copy("quantized/gptq-act-order");
    let file = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let list = &header["model.layers.0.mlp.down_proj.g_idx"]["data_offsets"][0];
    let at = 8 + length + list.as_u64().unwrap() as usize + 4 * 7;
    bytes[at..at + 4].copy_from_slice(&5i32.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    assert_error_contains(
        dir.path(),
        &["down_proj.g_idx", "column 7 is of group 5, there are 5"],
    );
}
