//! GLM-4.5 to 4.7: a few dense layers, then experts that a biased score chooses, beside shared
//! ones, with a rotary embedding of half of each head.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::expert_names;
use super::experts::{self, DecoderExperts, ExpertsReader, SOFTMAX_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::RopeReader;
use crate::spec::{
    AttentionBiases, ExpertsSpec, GatedMlpSpec, ModelSpec, QkNormScope, RouterScore, RouterSpec,
    SharedExpertSpec,
};

pub(crate) static FAMILY: Family = Family {
    name: "glm4_moe",
    models: "GLM-4.5, GLM-4.6, GLM-4.7",
    classes: &["Glm4MoeForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        names::HEAD_NORMS,
        names::MLP,
        expert_names::EXPERTS_QWEN,
        expert_names::SHARED_DEEPSEEK,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: Some("num_nextn_predict_layers"),
    unused_keys: &["router_aux_loss_coef"],
};

/// The class's own defaults.
const DENSE_LAYERS: usize = 1;
const EPSILON: f64 = 1e-5;
/// Number that the class adds to the sum of the chosen scores.
const WEIGHTS_EPSILON: f32 = 1e-20;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let rope = RopeReader {
        share: Some(0.5),
        ..RopeReader::new(heads.head_dim)
    };
    let experts = DecoderExperts {
        spec: experts(fields)?,
        has_experts: experts::after_dense_layers(fields, DENSE_LAYERS)?,
    };
    let has_qk_norm = fields.flag("use_qk_norm")?.unwrap_or(false);
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases {
            qkv: fields.flag("attention_bias")?.unwrap_or(false),
            output: false,
        },
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms {
            qk: has_qk_norm.then_some(QkNormScope::Head),
            epsilon: EPSILON,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::one(rope.read(fields)?),
    }
    .spec(fields)
}

fn experts(fields: &ConfigFields) -> Result<ExpertsSpec, ConfigError> {
    decoder::require_text(fields, "scoring_func", "sigmoid")?;
    decoder::require_text(fields, "topk_method", "noaux_tc")?;
    let router = RouterSpec {
        score: RouterScore::Sigmoid,
        has_choice_bias: true,
        weights: experts::weights(fields, true, WEIGHTS_EPSILON)?,
        scale: decoder::factor(fields, "routed_scaling_factor")?,
        ..SOFTMAX_ROUTER
    };
    let reader = ExpertsReader {
        count: &["n_routed_experts", "num_local_experts"],
        width: "moe_intermediate_size",
    };
    let mut spec = reader.read(fields, router)?;
    spec.router.groups = experts::groups(fields, &spec)?;
    spec.shared = shared(fields, spec.expert)?;
    Ok(spec)
}

/// The shared experts, which are one MLP of their widths together.
fn shared(
    fields: &ConfigFields,
    expert: GatedMlpSpec,
) -> Result<Option<SharedExpertSpec>, ConfigError> {
    const COUNT: &str = "n_shared_experts";
    // A null means none in files of other writers; the class's own default is one.
    let default = usize::from(!fields.has(COUNT));
    let count = fields.count(COUNT, 1 << 8)?.unwrap_or(default);
    let width = count * expert.width;
    if width > decoder::WIDTH_MAX {
        let problem = format!("{count} experts of {} are too wide together", expert.width);
        return Err(fields.damaged(COUNT, problem));
    }
    let mlp = GatedMlpSpec { width, ..expert };
    let has_gate = false;
    Ok((count > 0).then_some(SharedExpertSpec { mlp, has_gate }))
}
