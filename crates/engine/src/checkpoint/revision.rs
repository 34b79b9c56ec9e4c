//! Identity of a checkpoint's weights.
//!
//! Owns: the choice of data that is hashed.
//! Never: hashes all of it: 16 GB would take longer to hash than to load.
//! Invariant: the revision is equal for the same weights in any number of files, and differs if any
//! tensor's name, format or shape differs, or a sampled byte.

use super::config::{Biases, ModelConfig};
use super::quantized::QuantizedTensor;
use super::rope::{Rope, RopeScaling};
use super::shard::Shard;
use super::tensor::StoredTensor;
use crate::ops::HeadShape;
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
    config: &ModelConfig,
    tensors: &BTreeMap<String, StoredTensor>,
    narrow: &BTreeMap<String, Arc<QuantizedTensor>>,
) -> Revision {
    let mut hash = blake3::Hasher::new();
    hash.update(b"cleave weights 1\n");
    hash.update(constants(config).as_bytes());
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
    for (name, tensor) in narrow {
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
/// not change them.
fn constants(config: &ModelConfig) -> String {
    let ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size,
        heads,
        windows,
        norm_epsilon,
        rope,
        context_tokens_max: _,
        tied: _,
        biases,
        head_norms,
        // Hashed with each quantised tensor, as its layout.
        quantization: _,
        bos: _,
        eos: _,
    } = config;
    let HeadShape {
        query_heads,
        kv_heads,
        head_dim,
    } = heads;
    let Biases { qkv, output, mlp } = biases;
    let Rope { theta, scaling } = rope;
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
    };
    let windows: Vec<usize> = windows.iter().map(|window| window.unwrap_or(0)).collect();
    format!(
        "{} {vocab_size} {hidden_size} {intermediate_size} {query_heads}/{kv_heads}x{head_dim} \
         {windows:?} {norm_epsilon} {theta} {scaling} {qkv} {output} {mlp} {head_norms}\n",
        architecture.name()
    )
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
