//! Damaged and contradictory checkpoints with experts give one clear error that names the place.

use crate::folder::{assert_error_contains, copy, edit, edit_header};
use cleave_checkpoint::Checkpoint;
use cleave_models::Mlp;
use serde_json::{Value, json};
use std::path::Path;

/// Golden checkpoints with experts, and their layers that have some.
const FOLDERS: [(&str, &[usize]); 10] = [
    ("glm4-moe", &[1, 2]),
    ("gpt-oss", &[0, 1, 2]),
    ("granite4-moe", &[0, 1]),
    ("granitemoe", &[0, 1, 2]),
    ("granitemoeshared", &[0, 1]),
    ("minimax-m2", &[0, 1]),
    ("mixtral", &[0, 1]),
    ("olmoe", &[0, 1]),
    ("qwen2-moe", &[1, 3]),
    ("qwen3-moe", &[1, 2]),
];

fn edit_config(dir: &Path, field: &str, value: Value) {
    edit(dir, "config.json", |config| config[field] = value);
}

/// Gives tensors other names; the bytes stay.
fn rename(dir: &Path, names: &[(&str, &str)]) {
    edit_header(&dir.join("model.safetensors"), |header| {
        let header = header.as_object_mut().unwrap();
        let taken = names.iter().map(|(old, new)| {
            let tensor = header.remove(*old);
            (
                (*new).to_owned(),
                tensor.unwrap_or_else(|| panic!("no tensor {old}")),
            )
        });
        let taken: Vec<_> = taken.collect();
        header.extend(taken);
    });
}

#[test]
fn experts_are_in_the_layers_that_the_config_states() {
    for (folder, expected) in FOLDERS {
        let checkpoint = Checkpoint::open(copy(folder).path()).unwrap();
        let layers = checkpoint.spec().layers.iter().enumerate();
        let found = layers.filter(|(_, layer)| matches!(layer.mlp, Mlp::Experts(_)));
        let found: Vec<usize> = found.map(|(index, _)| index).collect();
        assert_eq!(found, expected, "{folder}");
    }
}

#[test]
fn a_missing_or_foreign_tensor_of_experts_is_named() {
    let layer = "model.layers.1.";
    // The checkpoint, the name of a tensor, the name in its place, and the one that is missed.
    let cases = [
        (
            "qwen3-moe",
            "mlp.experts.7.up_proj.weight",
            "mlp.experts.8.up_proj.weight",
        ),
        ("qwen3-moe", "mlp.gate.weight", "mlp.router.weight"),
        (
            "mixtral",
            "block_sparse_moe.experts.0.w2.weight",
            "block_sparse_moe.experts.0.w4.weight",
        ),
        ("mixtral", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
        (
            "olmoe",
            "mlp.experts.3.down_proj.weight",
            "mlp.experts.03.down_proj.weight",
        ),
        (
            "qwen2-moe",
            "mlp.shared_expert_gate.weight",
            "mlp.shared_expert.gate.weight",
        ),
        (
            "qwen2-moe",
            "mlp.shared_expert.up_proj.weight",
            "mlp.shared_experts.up_proj.weight",
        ),
        (
            "granitemoe",
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.gate_up.weight",
        ),
        (
            "granitemoe",
            "block_sparse_moe.router.layer.weight",
            "block_sparse_moe.router.weight",
        ),
        (
            "granitemoeshared",
            "shared_mlp.output_linear.weight",
            "shared_mlp.down.weight",
        ),
        (
            "granite4-moe",
            "shared_mlp.input_linear.weight",
            "mlp.input_linear.weight",
        ),
        (
            "glm4-moe",
            "mlp.gate.e_score_correction_bias",
            "mlp.e_score_correction_bias",
        ),
        (
            "glm4-moe",
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_expert.gate_proj.weight",
        ),
        (
            "minimax-m2",
            "block_sparse_moe.e_score_correction_bias",
            "block_sparse_moe.gate.e_score_correction_bias",
        ),
        ("gpt-oss", "self_attn.sinks", "self_attn.sink"),
        ("gpt-oss", "mlp.router.bias", "mlp.router.biases"),
        (
            "gpt-oss",
            "mlp.experts.gate_up_proj_bias",
            "mlp.experts.gate_up_proj.bias",
        ),
        (
            "gpt-oss",
            "mlp.experts.down_proj",
            "mlp.experts.down_proj.weight",
        ),
    ];
    for (folder, own, other) in cases {
        let (own, other) = (format!("{layer}{own}"), format!("{layer}{other}"));
        let dir = copy(folder);
        rename(dir.path(), &[(&own, &other)]);
        assert_error_contains(dir.path(), &["model.safetensors", &own, "missing"]);
    }
}

#[test]
fn swapped_tensors_of_unequal_shapes_are_refused() {
    let layer = "model.layers.1.";
    for (folder, first, second) in [
        (
            "qwen3-moe",
            "mlp.experts.2.gate_proj.weight",
            "mlp.experts.2.down_proj.weight",
        ),
        (
            "mixtral",
            "block_sparse_moe.experts.1.w1.weight",
            "block_sparse_moe.experts.1.w2.weight",
        ),
        (
            "granitemoe",
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
        (
            "gpt-oss",
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
        ),
        (
            "qwen2-moe",
            "mlp.gate.weight",
            "mlp.shared_expert_gate.weight",
        ),
    ] {
        let (first, second) = (format!("{layer}{first}"), format!("{layer}{second}"));
        let dir = copy(folder);
        rename(dir.path(), &[(&first, &second), (&second, &first)]);
        assert_error_contains(dir.path(), &["model.safetensors", layer, "calls for"]);
    }
}

#[test]
fn another_number_of_experts_is_refused() {
    for (folder, key, count) in [
        ("qwen3-moe", "num_experts", 8),
        ("mixtral", "num_local_experts", 6),
        ("granitemoe", "num_local_experts", 6),
        ("gpt-oss", "num_local_experts", 6),
        ("minimax-m2", "num_local_experts", 8),
    ] {
        for wrong in [count - 1, count + 1] {
            let dir = copy(folder);
            edit_config(dir.path(), key, json!(wrong));
            let (stored, called_for) = (format!("[{count}, "), format!("[{wrong}, "));
            assert_error_contains(dir.path(), &["model.layers.", &stored, &called_for]);
        }
    }
    // An expert more than the router chooses from.
    let dir = copy("glm4-moe");
    let extra = "model.layers.2.mlp.experts.9.gate_proj.weight";
    rename(dir.path(), &[("model.layers.3.eh_proj.weight", extra)]);
    assert_error_contains(dir.path(), &[extra, "is not part of a glm4_moe model"]);
}

/// The file has tensors of one layer after the model's three.
#[test]
fn only_the_stated_layers_of_mtp_are_ignored() {
    let last = "model.layers.3.";
    let dir = copy("glm4-moe");
    assert!(Checkpoint::open(dir.path()).is_ok());
    edit_config(dir.path(), "num_nextn_predict_layers", json!(0));
    assert_error_contains(dir.path(), &[last, "is not part of"]);
    let dir = copy("glm4-moe");
    let name = format!("{last}enorm.weight");
    rename(dir.path(), &[(&name, "model.layers.4.enorm.weight")]);
    assert_error_contains(dir.path(), &["model.layers.4.", "is not part of"]);
    rename(
        dir.path(),
        &[(
            "model.layers.4.enorm.weight",
            "model.layers.33.enorm.weight",
        )],
    );
    assert_error_contains(dir.path(), &["model.layers.33.", "is not part of"]);
    // The key is another family's.
    let dir = copy("qwen3-moe");
    edit_config(dir.path(), "num_nextn_predict_layers", json!(1));
    assert_error_contains(dir.path(), &["num_nextn_predict_layers", "is not known"]);
}

#[test]
fn a_contradiction_about_experts_is_named_with_its_range() {
    let cases = [
        ("qwen3-moe", "num_experts_per_tok", json!(9), "from 1 to 8"),
        ("qwen3-moe", "num_experts_per_tok", json!(0), "is 0"),
        ("qwen3-moe", "num_experts_per_tok", json!(null), "missing"),
        ("qwen3-moe", "num_experts", json!(null), "missing"),
        ("qwen3-moe", "num_experts", json!(0), "from 1 to"),
        ("qwen3-moe", "num_experts", json!(5000), "0 to 4096"),
        (
            "qwen3-moe",
            "num_local_experts",
            json!(7),
            "differs from num_experts, 8",
        ),
        ("qwen3-moe", "moe_intermediate_size", json!(0), "from 1 to"),
        (
            "qwen3-moe",
            "moe_intermediate_size",
            json!(1 << 20),
            "have more than",
        ),
        ("qwen3-moe", "norm_topk_prob", json!(1), "true or false"),
        ("qwen3-moe", "decoder_sparse_step", json!(0), "from 1 to"),
        (
            "qwen3-moe",
            "mlp_only_layers",
            json!([0, 3]),
            "layer 3 of 3",
        ),
        (
            "qwen3-moe",
            "mlp_layer_types",
            json!(["sparse", "sparse", "sparse"]),
            "decoder_sparse_step",
        ),
        ("qwen3-moe", "use_qk_norm", json!(false), "always"),
        (
            "qwen3-moe",
            "shared_expert_intermediate_size",
            json!(8),
            "no shared expert",
        ),
        (
            "qwen3-moe",
            "n_shared_experts",
            json!(1),
            "is not known for a qwen3_moe",
        ),
        (
            "qwen3-moe",
            "scoring_func",
            json!("sigmoid"),
            "is not known",
        ),
        (
            "qwen2-moe",
            "shared_expert_intermediate_size",
            json!(null),
            "missing",
        ),
        ("olmoe", "head_dim", json!(24), "hidden_size, 48"),
        ("olmoe", "clip_qkv", json!(8.0), "is not known"),
        ("glm4-moe", "n_group", json!(2), "does not divide 9"),
        ("glm4-moe", "n_group", json!(0), "does not divide 9"),
        ("glm4-moe", "n_group", json!(9), "at least 2"),
        ("glm4-moe", "topk_group", json!(4), "from 1 to 3"),
        ("glm4-moe", "topk_group", json!(0), "from 1 to 3"),
        ("glm4-moe", "topk_group", json!(1), "fewer than the 4"),
        (
            "glm4-moe",
            "routed_scaling_factor",
            json!(-1.0),
            "is not from",
        ),
        ("glm4-moe", "scoring_func", json!("softmax"), "sigmoid is"),
        (
            "glm4-moe",
            "first_k_dense_replace",
            json!("one"),
            "a whole number",
        ),
        (
            "glm4-moe",
            "mlp_layer_types",
            json!(["dense", "dense", "dense"]),
            "first_k_dense_replace",
        ),
        (
            "glm4-moe",
            "num_nextn_predict_layers",
            json!(100),
            "from 0 to",
        ),
        ("minimax-m2", "rotary_dim", json!(33), "from 0 to 32"),
        ("minimax-m2", "rotary_dim", json!(13), "an even number"),
        (
            "gpt-oss",
            "experts_per_token",
            json!(3),
            "num_experts_per_tok, 2",
        ),
        ("gpt-oss", "swiglu_alpha", json!(1.5), "1.702 is"),
        ("gpt-oss", "swiglu_limit", json!(0.0), "is not from"),
        (
            "granitemoeshared",
            "shared_intermediate_size",
            json!(-1),
            "from 0 to",
        ),
    ];
    for (folder, key, value, expected) in cases {
        let dir = copy(folder);
        edit_config(dir.path(), key, value);
        assert_error_contains(dir.path(), &["config.json", key, expected]);
    }
}

/// A list that repeats the rule of another key is read and compared.
#[test]
fn a_list_of_sparse_layers_may_repeat_the_rule() {
    for folder in ["qwen3-moe", "glm4-moe"] {
        let dir = copy(folder);
        let types = json!(["dense", "sparse", "sparse"]);
        edit_config(dir.path(), "mlp_layer_types", types);
        Checkpoint::open(dir.path()).unwrap();
    }
}
