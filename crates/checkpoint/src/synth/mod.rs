//! Checkpoints with random weights, of real shapes.
//!
//! Owns: the named shapes, and writing a folder that loads and serves as a downloaded one does.
//! Never: holds a checkpoint in memory: weights are written to disk as they are drawn or quantised.
//! Invariant: the same shape and seed give the same bytes, on any number of cores.

mod encoded;
mod experts;
mod quantization_config;
mod quantize;
mod shape;
mod shapes;
mod tokenizer;
mod weights;

pub use quantize::{QuantizeOptions, QuantizedLayout, quantize};
pub use shape::{ShapeSummary, shapes};

use crate::{CheckpointError, CheckpointProgress};
use cleave_models::{ConfigFields, ModelTensor, read_model};
use serde_json::{Map, Value, json};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Limit of a shard in bytes, as in Hugging Face's own tools.
const SHARD_BYTES_MAX: u64 = 5_000_000_000;
/// Limit of a config.json in bytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Errors of writing a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// No shape has that name.
    #[error("no shape `{name}`; there are {available}")]
    UnknownShape {
        /// Name that was asked for.
        name: String,
        /// Names that exist, separated by commas.
        available: String,
    },
    /// The folder already has a checkpoint.
    #[error("{}: holds a checkpoint already; choose another folder or remove it", dir.display())]
    Exists {
        /// Folder that has a checkpoint.
        dir: PathBuf,
    },
    /// Reading or writing a file failed.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path of the file that failed.
        path: PathBuf,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The checkpoint to quantise cannot be read.
    #[error("{0}")]
    Source(CheckpointError),
    /// A shape that the loader would refuse.
    #[error("the shape is not loadable: {0}")]
    Shape(#[from] CheckpointError),
}

impl SynthError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |error| Self::Io { path, error }
    }
}

/// Writes a checkpoint of a named shape to a folder: bf16 weights in shards of at most 5 GB,
/// configuration, a byte-level tokenizer that fills the vocabulary, and a chat template.
/// config.json is written last, so that a folder with one is whole.
///
/// # Errors
/// See [`SynthError`].
pub fn synth(
    shape: &str,
    out: &Path,
    seed: u64,
    progress: &mut dyn FnMut(CheckpointProgress),
) -> Result<(), SynthError> {
    let shape = shape::find(shape)?;
    let source = Path::new(shape.name);
    SynthModel::of(source, shape.config())?.write(out, seed, progress)
}

/// As [`synth`], of the model that a config.json describes. Weights are not quantised, whatever it
/// says.
///
/// # Errors
/// See [`SynthError`].
pub fn synth_of_config(
    config_file: &Path,
    out: &Path,
    seed: u64,
    progress: &mut dyn FnMut(CheckpointProgress),
) -> Result<(), SynthError> {
    let read = cleave_files::read(config_file, CONFIG_BYTES_MAX);
    let read = read.map_err(SynthError::at(config_file))?;
    let problem = match serde_json::from_slice(&read) {
        Ok(Value::Object(config)) => {
            return SynthModel::of(config_file, config)?.write(out, seed, progress);
        }
        Ok(_) => "is not a JSON object".to_owned(),
        Err(error) => error.to_string(),
    };
    let error = CheckpointError::damaged(config_file, "JSON", problem);
    Err(SynthError::Shape(error))
}

/// A model whose weights are to be drawn.
struct SynthModel {
    config: Map<String, Value>,
    tensors: Vec<ModelTensor>,
    vocab: usize,
    context: usize,
}

impl SynthModel {
    /// The model of a config.json, with floats of 16 bits. The head is tied to the embedding unless
    /// the file says otherwise.
    fn of(file: &Path, mut config: Map<String, Value>) -> Result<Self, CheckpointError> {
        config.remove("quantization_config");
        config.remove("dtype");
        config.insert("torch_dtype".to_owned(), json!("bfloat16"));
        let fields = ConfigFields::new(file, config.clone());
        let (model, ()) = read_model(&fields, |_| Ok::<_, CheckpointError>(()))?;
        let spelling = &model.spellings()[0];
        let tied = !spelling.has_head || model.spec.tied != Some(false);
        let mut tensors = model.spec.tensors(model.family.tensors, tied);
        for tensor in &mut tensors {
            tensor.name = spelling.spell(&tensor.name);
        }
        let (vocab, context) = (model.spec.vocab_size, model.spec.context_tokens_max);
        if vocab < tokenizer::VOCAB_MIN {
            let least = tokenizer::VOCAB_MIN;
            let problem = format!("is {vocab}; the byte-level tokenizer needs at least {least}");
            return Err(CheckpointError::unsupported(file, "vocab_size", problem));
        }
        Ok(Self {
            config,
            tensors,
            vocab,
            context,
        })
    }

    fn write(
        self,
        out: &Path,
        seed: u64,
        progress: &mut dyn FnMut(CheckpointProgress),
    ) -> Result<(), SynthError> {
        let config_file = new_config(out)?;
        fs::create_dir_all(out).map_err(SynthError::at(out))?;
        let writing = weights::WeightsWriter {
            tensors: &self.tensors,
            seed,
            shard_bytes_max: SHARD_BYTES_MAX,
        };
        writing.run(out, progress)?;
        for (file, value) in [
            ("tokenizer.json", tokenizer::tokenizer(self.vocab)),
            ("tokenizer_config.json", tokenizer::config(self.context)),
            ("generation_config.json", generation(self.vocab)),
        ] {
            write_json(&out.join(file), &value)?;
        }
        write_json(&config_file, &Value::Object(self.config))
    }
}

/// The path of the config.json that a folder will have.
///
/// # Errors
/// If it has one already.
fn new_config(out: &Path) -> Result<PathBuf, SynthError> {
    let file = out.join("config.json");
    if file.exists() {
        let dir = out.to_owned();
        return Err(SynthError::Exists { dir });
    }
    Ok(file)
}

fn generation(vocab: usize) -> Value {
    let special = tokenizer::SpecialTokenIds::of(vocab);
    json!({
        "bos_token_id": special.begin,
        "eos_token_id": [special.end, special.turn_end],
        "do_sample": true,
        "temperature": 0.8,
    })
}

fn write_json(file: &Path, value: &Value) -> Result<(), SynthError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(io::Error::from);
    if let Ok(text) = &mut text {
        text.push(b'\n');
    }
    text.and_then(|text| fs::write(file, text))
        .map_err(SynthError::at(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;

    fn write_sharded(out: &Path, shard_bytes_max: u64) {
        let shape = shape::find("tiny-mistral").unwrap();
        let file = out.join("config.json");
        let model = SynthModel::of(&file, shape.config()).unwrap();
        let writing = weights::WeightsWriter {
            tensors: &model.tensors,
            seed: 3,
            shard_bytes_max,
        };
        writing.run(out, &mut |_| {}).unwrap();
        write_json(&file, &Value::Object(shape.config())).unwrap();
    }

    #[test]
    fn shards_hold_the_same_weights_as_one_file() {
        let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_sharded(one.path(), SHARD_BYTES_MAX);
        write_sharded(many.path(), 100_000);
        let shards = fs::read_dir(many.path()).unwrap().filter(|entry| {
            let name = entry.as_ref().unwrap().file_name();
            name.to_string_lossy().ends_with(".safetensors")
        });
        assert!(shards.count() > 3);
        let revision = |dir: &Path| Checkpoint::open(dir).unwrap().revision();
        assert_eq!(revision(one.path()), revision(many.path()));
    }

    #[test]
    fn every_named_shape_loads_in_shards_within_the_limit() {
        for summary in shapes() {
            let shape = shape::find(summary.name).unwrap();
            let model = SynthModel::of(Path::new(summary.name), shape.config()).unwrap();
            let bytes = weights::shard_bytes(&model.tensors, SHARD_BYTES_MAX);
            assert!(bytes.iter().all(|bytes| *bytes <= SHARD_BYTES_MAX));
            let is_large = bytes.iter().sum::<u64>() > SHARD_BYTES_MAX;
            assert_eq!(bytes.len() > 1, is_large);
            // The parameter counts that the makers publish.
            let parameters = bytes.iter().sum::<u64>() / 2;
            let published = match summary.name {
                "gemma-3-1b" => 999_885_952,
                "gemma-2-2b" => 2_614_341_888,
                "smollm3-3b" => 3_075_098_624,
                "phi-4" => 14_659_507_200,
                "glm-4-9b" => 9_400_279_040,
                "command-r7b" => 8_028_033_024,
                "llama-3.2-1b" => 1_235_814_400,
                "llama-3.1-8b" => 8_030_261_248,
                "qwen3-0.6b" => 596_049_920,
                "olmo-2-1b" => 1_484_916_736,
                "olmoe-1b-7b" => 6_919_161_856,
                "gpt-oss-20b" => 20_914_757_184,
                "qwen3-30b-a3b" => 30_532_122_624,
                "mixtral-8x7b" => 46_702_792_704,
                _ => parameters,
            };
            assert_eq!(parameters, published, "{}", summary.name);
        }
    }
}
