//! Tests of the tensors that a model with experts has.

use super::*;
use crate::spec::{ChosenWeights, GatedMlpSpec, RouterScore, RouterSpec, SharedExpertSpec};
use crate::{Activation, ConfigError, ConfigFields, StoredSizes, read_model};
use cleave_domain::StepWork;
use serde_json::json;
use std::path::Path;

/// A gated MLP of this width.
const fn mlp(width: usize, bias: bool) -> GatedMlpSpec {
    GatedMlpSpec {
        width,
        activation: Activation::Silu,
        bias,
    }
}

/// Two layers, of which the second has eight experts, two for each token.
fn model(shared: Option<SharedExpertSpec>) -> ModelSpec {
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
    });
    let map = config.as_object().cloned().unwrap();
    let fields = ConfigFields::new(Path::new("config.json"), map);
    let read = read_model(&fields, |_| Ok::<_, ConfigError>(()));
    let mut spec = read.unwrap().0.spec;
    spec.layers[1].mlp = Mlp::Experts(ExpertsSpec {
        count: 8,
        chosen: 2,
        expert: mlp(24, true),
        router: RouterSpec {
            score: RouterScore::Softmax,
            has_bias: false,
            has_choice_bias: true,
            groups: None,
            weights: ChosenWeights::Scores,
            scale: 1.0,
        },
        shared,
    });
    spec
}

const NAMES: &[NamedRole] = &[
    ("embed", TensorRole::Embedding),
    ("layers.{layer}.gate", TensorRole::Weight(Projection::Gate)),
    ("layers.{layer}.router", TensorRole::Router),
    ("layers.{layer}.router.bias", TensorRole::RouterBias),
    ("layers.{layer}.choice", TensorRole::ChoiceBias),
    (
        "layers.{layer}.experts.{expert}.down",
        TensorRole::Weight(Projection::ExpertDown),
    ),
    (
        "layers.{layer}.experts.gate_up",
        TensorRole::Experts {
            parts: Projection::EXPERT_GATE_UP,
            axes: ExpertAxes::InOut,
            rows: StackedRows::Interleaved,
        },
    ),
    (
        "layers.{layer}.experts.gate_up_bias",
        TensorRole::ExpertBiases {
            parts: Projection::EXPERT_GATE_UP,
            rows: StackedRows::Interleaved,
        },
    ),
    (
        "layers.{layer}.shared.down",
        TensorRole::Weight(Projection::SharedDown),
    ),
    ("layers.{layer}.shared.gate", TensorRole::SharedExpertGate),
    ("layers.{layer}.sinks", TensorRole::Sinks),
];

fn shapes(spec: &ModelSpec) -> Vec<(String, Vec<usize>)> {
    let tensors = spec.tensors(&[NAMES], false).into_iter();
    tensors.map(|tensor| (tensor.name, tensor.shape)).collect()
}

#[test]
fn each_layer_has_the_tensors_of_its_own_mlp() {
    let found = shapes(&model(None));
    let mut expected = vec![
        ("embed".to_owned(), vec![32, 16]),
        ("layers.0.gate".to_owned(), vec![40, 16]),
        ("layers.1.router".to_owned(), vec![8, 16]),
        ("layers.1.choice".to_owned(), vec![8]),
    ];
    let downs = (0..8).map(|expert| (format!("layers.1.experts.{expert}.down"), vec![16, 24]));
    expected.extend(downs);
    expected.push(("layers.1.experts.gate_up".to_owned(), vec![8, 16, 48]));
    expected.push(("layers.1.experts.gate_up_bias".to_owned(), vec![8, 48]));
    assert_eq!(found, expected);
}

#[test]
fn a_shared_expert_has_tensors_of_its_own() {
    let shared = SharedExpertSpec {
        mlp: mlp(56, false),
        has_gate: true,
    };
    let mut spec = model(Some(shared));
    let Mixer::Attention(attention) = &mut spec.layers[1].mixer;
    attention.has_sinks = true;
    let found = shapes(&spec);
    let last: Vec<_> = found[found.len() - 3..].to_vec();
    let expected = [
        ("layers.1.shared.down", vec![16, 56]),
        ("layers.1.shared.gate", vec![1, 16]),
        ("layers.1.sinks", vec![2]),
    ];
    assert_eq!(last, expected.map(|(name, shape)| (name.to_owned(), shape)));
}

#[test]
fn places_of_a_stack_are_the_layer_or_its_experts() {
    let spec = model(None);
    let layer = &spec.layers[1];
    let of = |parts| layer.places(1, parts).collect::<Vec<_>>();
    assert_eq!(of(Projection::QKV), [TensorPlace::Layer(1)]);
    let experts = of(Projection::EXPERT_DOWN);
    assert_eq!(experts.len(), 8);
    let (layer, expert) = (1, 7);
    assert_eq!(experts[7], TensorPlace::Expert { layer, expert });
}

/// Operations and bytes by hand: attention 4·16·16 weights a layer, an MLP of 3·16·40, experts of
/// 3·16·24, a router of 8·16.
#[test]
fn a_token_computes_with_the_chosen_experts_alone() {
    let stored = StoredSizes {
        layer_bytes: 1000,
        expert_bytes: 8000,
        ..StoredSizes::default()
    };
    let cost = model(None).cost(&stored);
    let weights = 2 * 1024 + 3 * 16 * 40 + 2 * (3 * 16 * 24) + 8 * 16;
    assert_eq!(cost.layer_weights, weights);
    // Two of eight experts, then 1 − (3/4)² of them.
    assert_eq!(cost.layer_bytes_read(1.0), 3000.0);
    assert_eq!(cost.layer_bytes_read(2.0), 1000.0 + 8000.0 * 7.0 / 16.0);
    let work = StepWork {
        rows: 6,
        ..StepWork::default()
    };
    let read = cost.bytes(&work, 3);
    assert_eq!(read, 3.0 * cost.layer_bytes_read(2.0), "two rows a step");
}
