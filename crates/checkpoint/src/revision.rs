//! Identity of a checkpoint's weights.
//!
//! Owns: the choice of data that is hashed.
//! Never: hashes all of it: 16 GB would take longer to hash than to load.
//! Invariant: the revision is equal for the same weights in any number of files, and differs if any
//! tensor's name, format or shape differs, or a sampled byte.

use crate::quantized::QuantizedTensor;
use crate::shard::Shard;
use crate::tensor::StoredTensor;
use cleave_models::{
    Activation, AttentionBiases, AttentionSpec, ChosenWeights, ExpertGroups, ExpertsSpec,
    GatedMlpSpec, GroupScore, HeadShape, LayerNorms, LayerSpec, LongRopeScaling, Mixer, Mlp,
    ModelSpec, NormFormula, NormSpec, NormWeight, PartOrder, QkNormScope, QkNormSpec, QueryGrowth,
    Rope, RopePairs, RopeScaling, RouterScore, RouterSpec, Scalars, SharedExpertSpec, YarnScaling,
};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

/// Tensors up to this size are hashed whole, larger ones by samples. In bytes.
const WHOLE_BYTES_MAX: usize = 1 << 16;
/// Samples taken of a large tensor, and bytes of each. A finetune or a merged adapter changes
/// nearly every element of the tensors it touches, so that any of these would show it.
const SAMPLES: usize = 16;
const SAMPLE_BYTES: usize = 256;

/// Hash of a checkpoint's weights and of the constants that they are used with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Revision([u8; 32]);

impl fmt::Display for Revision {
    /// The first eight bytes, as sixteen hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .take(8)
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Hash that also changes when a file of the checkpoint is written to: of the revision, which reads
/// samples only, and of each file's name, length and modification time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckpointStamp(pub [u8; 32]);

pub(super) fn stamp_of(revision: Revision, files: &[SourceFile]) -> CheckpointStamp {
    let mut hash = blake3::Hasher::new();
    hash.update(b"cleave files 1\n");
    hash.update(&revision.0);
    for SourceFile {
        name,
        bytes,
        modified,
    } in files
    {
        let since = modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        hash.update(format!("{name} {bytes} {since:?}\n").as_bytes());
    }
    CheckpointStamp(*hash.finalize().as_bytes())
}

/// A file that has tensors.
#[derive(Debug)]
pub(super) struct SourceFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) modified: Option<SystemTime>,
}

impl SourceFile {
    pub(super) fn of(shard: &Shard) -> Self {
        let name = shard.file.file_name().unwrap_or_default();
        Self {
            name: name.to_string_lossy().into_owned(),
            bytes: shard.bytes.as_slice().len() as u64,
            modified: shard.modified,
        }
    }
}

pub(super) fn revision_of(
    spec: &ModelSpec,
    tensors: &BTreeMap<String, StoredTensor>,
    quantized: &BTreeMap<String, Arc<QuantizedTensor>>,
) -> Revision {
    let mut hash = blake3::Hasher::new();
    hash.update(b"cleave weights 1\n");
    hash.update(constants(spec).as_bytes());
    for (name, tensor) in tensors {
        let line = format!(
            "{name} {:?} {}x{}\n",
            tensor.stored(),
            tensor.rows(),
            tensor.columns()
        );
        hash.update(line.as_bytes());
        hash_samples(&mut hash, tensor.bytes());
        // The system may map half a megabyte per sample, and there are thousands.
        tensor.release();
    }
    for (name, tensor) in quantized {
        let line = format!(
            "{name} {} {}x{}\n",
            tensor.layout,
            tensor.rows(),
            tensor.columns()
        );
        hash.update(line.as_bytes());
        for part in tensor.part_bytes() {
            hash_samples(&mut hash, part);
        }
        tensor.release();
    }
    Revision(*hash.finalize().as_bytes())
}

/// The constants that change what the weights compute, spelled so that a rename in the code does
/// not change them. A constant that few models have is spelled only where a model has it, so that
/// the revisions of all others stay when a kind is added.
fn constants(spec: &ModelSpec) -> String {
    let ModelSpec {
        family,
        vocab_size,
        hidden_size,
        context_tokens_max: _,
        scalars,
        ropes: _,
        layers,
        final_norm,
        tied: _,
        bos: _,
        eos: _,
    } = spec;
    let windows: Vec<usize> = spec.attention().map(|a| a.window.unwrap_or(0)).collect();
    let first = LayerConstants::of(spec, &layers[0]);
    let LayerConstants {
        width,
        heads,
        rest,
        own,
    } = &first;
    let epsilon = format!("{}{}", final_norm.epsilon, norm_kind(final_norm));
    let mut text = format!(
        "{family} {vocab_size} {hidden_size} {width} {heads} {windows:?} {epsilon} {rest}\n{own}"
    );
    for (index, layer) in layers.iter().enumerate().skip(1) {
        let constants = LayerConstants::of(spec, layer);
        if constants != first {
            let LayerConstants {
                width,
                heads,
                rest,
                own,
            } = constants;
            text += &format!("layer {index} {width} {heads} {rest}\n{own}");
        }
    }
    let Scalars {
        embedding,
        is_embedding_rounded,
        residual,
        logits,
        logits_cap,
    } = scalars;
    if *scalars != Scalars::default() {
        text += &format!("scalars {embedding} {residual} {logits}\n");
    }
    if *is_embedding_rounded {
        text += "embedding factor rounded\n";
    }
    if let Some(cap) = logits_cap {
        text += &format!("logits capped {cap}\n");
    }
    text
}

/// Constants of a layer, but for its window.
#[derive(Debug, PartialEq)]
struct LayerConstants {
    width: usize,
    heads: String,
    rest: String,
    /// Lines of what few layers have.
    own: String,
}

impl LayerConstants {
    fn of(spec: &ModelSpec, layer: &LayerSpec) -> Self {
        let LayerSpec {
            order,
            norms,
            mixer,
            mlp,
        } = layer;
        let Mixer::Attention(AttentionSpec {
            heads,
            rope,
            qk_norm,
            window: _,
            scale,
            soft_cap,
            biases,
            has_sinks,
        }) = mixer;
        let HeadShape {
            query_heads,
            kv_heads,
            head_dim,
        } = heads;
        let AttentionBiases { qkv, output } = biases;
        let (mlp, experts) = match mlp {
            Mlp::Gated(mlp) => (mlp, None),
            Mlp::Experts(experts) => (&experts.expert, Some(experts)),
        };
        let GatedMlpSpec {
            width,
            activation: _,
            bias,
        } = mlp;
        let Rope {
            theta,
            scaling,
            rotated_dim,
            pairs,
            query_growth,
        } = &spec.ropes[rope.0];
        let scaling = match scaling {
            RopeScaling::None => "none".to_owned(),
            RopeScaling::Linear { factor } => format!("linear {factor}"),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                format!("llama3 {factor} {low_freq_factor} {high_freq_factor} {original_context}")
            }
            RopeScaling::Yarn(YarnScaling {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
            }) => format!(
                "yarn {factor} {original_context} {beta_fast} {beta_slow} {truncate} \
                 {attention_factor}"
            ),
            RopeScaling::LongRope(LongRopeScaling {
                short_factors,
                long_factors,
                original_context,
                attention_factor,
            }) => format!(
                "longrope {short_factors:?} {long_factors:?} {original_context} {attention_factor}"
            ),
        };
        let mut own = String::new();
        if rotated_dim != head_dim {
            own += &format!("rotated {rotated_dim}\n");
        }
        match pairs {
            RopePairs::Halves => {}
            RopePairs::Neighbours => own += "rotated neighbours\n",
        }
        if let Some(QueryGrowth {
            beta,
            original_context,
        }) = query_growth
        {
            own += &format!("queries grow {beta} {original_context}\n");
        }
        own += &activation_of(mlp);
        if *has_sinks {
            own += "attention sinks\n";
        }
        if let Some(experts) = experts {
            own += &experts_of(experts);
        }
        if *scale != 1.0 / (*head_dim as f32).sqrt() {
            own += &format!("scale {scale}\n");
        }
        if let Some(cap) = soft_cap {
            own += &format!("scores capped {cap}\n");
        }
        match order {
            PartOrder::Sequential => {}
            PartOrder::Parallel => own += "parallel parts\n",
        }
        let LayerNorms {
            mixer_input,
            mixer_output,
            mlp_input,
            mlp_output,
        } = norms;
        let differs = |norm: &NormSpec| *norm != spec.final_norm;
        for (name, norm) in [("mixer input", mixer_input), ("mlp input", mlp_input)] {
            match norm {
                None => own += &format!("no norm of {name}\n"),
                Some(norm) if differs(norm) => own += &norm_of(name, norm),
                Some(_) => {}
            }
        }
        if let Some(QkNormSpec { norm, scope }) = qk_norm {
            if differs(norm) {
                own += &norm_of("heads", norm);
            }
            match scope {
                QkNormScope::Head => {}
                QkNormScope::Projection => own += "norm of whole projections\n",
            }
        }
        for (name, norm) in [("mixer output", mixer_output), ("mlp output", mlp_output)] {
            if let Some(norm) = norm {
                own += &norm_of(name, norm);
            }
        }
        let has_qk_norm = qk_norm.is_some();
        Self {
            width: *width,
            heads: format!("{query_heads}/{kv_heads}x{head_dim}"),
            rest: format!("{theta} {scaling} {qkv} {output} {bias} {has_qk_norm}"),
            own,
        }
    }
}

/// Spelling of an activation that few have, in a line.
fn activation_of(mlp: &GatedMlpSpec) -> String {
    match mlp.activation {
        Activation::Silu => String::new(),
        Activation::GeluTanh => "gelu tanh\n".to_owned(),
        Activation::ClampedSwiGlu { limit } => format!("swiglu clamped {limit}\n"),
    }
}

/// Spelling of a mixture of experts, but for the size of one.
fn experts_of(experts: &ExpertsSpec) -> String {
    let ExpertsSpec {
        count,
        chosen,
        expert: _,
        router,
        shared,
    } = experts;
    let RouterSpec {
        score,
        has_bias,
        has_choice_bias,
        groups,
        weights,
        scale,
    } = router;
    let score = match score {
        RouterScore::Softmax => "softmax",
        RouterScore::Sigmoid => "sigmoid",
        RouterScore::Identity => "identity",
    };
    let weights = match weights {
        ChosenWeights::Scores => "scores".to_owned(),
        ChosenWeights::Normalized { epsilon } => format!("normalized {epsilon}"),
        ChosenWeights::Softmax => "softmax".to_owned(),
    };
    let mut text = format!(
        "experts {chosen} of {count} {score} {has_bias} {has_choice_bias} {weights} {scale}\n"
    );
    if let Some(ExpertGroups {
        count,
        chosen,
        score,
    }) = groups
    {
        let score = match score {
            GroupScore::Max => "max",
            GroupScore::TwoBestSum => "sum of two",
        };
        text += &format!("groups {chosen} of {count} {score}\n");
    }
    if let Some(SharedExpertSpec { mlp, has_gate }) = shared {
        let GatedMlpSpec {
            width,
            activation: _,
            bias,
        } = mlp;
        text += &format!("shared expert {width} {bias} {has_gate}\n");
        text += &activation_of(mlp);
    }
    text
}

fn norm_of(name: &str, norm: &NormSpec) -> String {
    format!("norm of {name} {}{}\n", norm.epsilon, norm_kind(norm))
}

/// Spelling of the parts of a norm that few have, behind a space.
fn norm_kind(norm: &NormSpec) -> &'static str {
    let NormSpec {
        formula,
        epsilon: _,
        weight,
    } = norm;
    match (formula, weight) {
        (NormFormula::RmsNorm, NormWeight::AsStored) => "",
        (NormFormula::RmsNorm, NormWeight::PlusOne) => " plus one",
        (NormFormula::LayerNorm, NormWeight::AsStored) => " without mean",
        (NormFormula::LayerNorm, NormWeight::PlusOne) => " without mean, plus one",
    }
}

fn hash_samples(hash: &mut blake3::Hasher, bytes: &[u8]) {
    if bytes.len() <= WHOLE_BYTES_MAX {
        hash.update(bytes);
        return;
    }
    let stride = (bytes.len() - SAMPLE_BYTES) / (SAMPLES - 1);
    for index in 0..SAMPLES {
        hash.update(&bytes[index * stride..][..SAMPLE_BYTES]);
    }
}

#[cfg(test)]
mod tests {
    use crate::Checkpoint;
    use std::path::Path;

    /// Revisions as an earlier release computed them, most from a struct of constants instead of a
    /// spec; a model that came later has the one of its first release.
    const REVISIONS: [(&str, &str); 38] = [
        ("testdata/trained", "36fa2c923a1c853f"),
        ("testdata/cohere", "b2058746012a6166"),
        ("testdata/cohere2", "9eede16721e89b05"),
        ("testdata/exaone4", "6b993b386d842645"),
        ("testdata/gemma2", "e9c7bf8196ab87c7"),
        ("testdata/gemma3", "7d8aa73202d7e7ba"),
        ("testdata/glm4", "955cc639c363dd0a"),
        ("testdata/glm4-moe", "de67343506de65c5"),
        ("testdata/gpt-oss", "d4864bbdabde6707"),
        ("testdata/granite", "9028351b9e9ea17f"),
        ("testdata/granite4", "094a07e145b00ba5"),
        ("testdata/granite4-moe", "4e083daa4412bff6"),
        ("testdata/granitemoe", "bb92ef6221d6b71b"),
        ("testdata/granitemoeshared", "96aab59eecf205fb"),
        ("testdata/llama2", "b37b1ecfa8ed420a"),
        ("testdata/llama3", "4a603a93efcfd98e"),
        ("testdata/llama3-new", "3be10de677fb46ed"),
        ("testdata/minimax-m2", "5dd074bf05782c11"),
        ("testdata/ministral3", "fc1f480ed1fafd17"),
        ("testdata/mistral", "408104fa26e55d8c"),
        ("testdata/mixtral", "e9047926a5eccbd7"),
        ("testdata/olmo2", "13348265a99b2289"),
        ("testdata/olmo3", "8ad4de7e33adee2d"),
        ("testdata/olmoe", "1aa76ba7960b46e3"),
        ("testdata/phi3", "f5f0a014f2346ca9"),
        ("testdata/phi4-mini", "613807f800f9a245"),
        ("testdata/phi4-mini-short", "cbd853ceb4b5bf35"),
        ("testdata/quantized/awq", "f3532422d7c0ebfc"),
        ("testdata/quantized/fp8-block", "ef47f1f3d579d906"),
        ("testdata/quantized/gptq", "be858573bc641f31"),
        ("testdata/quantized/int8-packed", "20da751effea47ee"),
        ("testdata/qwen2", "d76a325508b78595"),
        ("testdata/qwen2-moe", "c1a5c7b4cd264f31"),
        ("testdata/qwen2.5", "77e34cbfca2d715b"),
        ("testdata/qwen3", "9a02cc7bc9ad40a7"),
        ("testdata/qwen3-moe", "2eb4567ed1465580"),
        ("testdata/seed-oss", "68674b6273625d15"),
        ("testdata/smollm3", "b9b36c719daccaac"),
    ];

    #[test]
    fn revisions_stay_as_earlier_releases_had_them() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let revision_of = |folder: &str| {
            let checkpoint = Checkpoint::open(&root.join(folder)).unwrap();
            checkpoint.revision().to_string()
        };
        let found = REVISIONS.map(|(folder, _)| (folder, revision_of(folder)));
        assert_eq!(
            found,
            REVISIONS.map(|(folder, revision)| (folder, revision.to_owned()))
        );
    }
}
