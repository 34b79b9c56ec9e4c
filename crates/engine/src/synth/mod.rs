//! Checkpoints with random weights, of real shapes.
//!
//! Owns: the named shapes, and writing a folder that loads and serves like a downloaded one.
//! Never: holds a checkpoint in memory: weights stream to disk as they are drawn.
//! Invariant: the same shape and seed give the same bytes, on any number of cores.

mod shape;
mod tokenizer;
mod weights;

pub use shape::{ShapeSummary, shapes};

use crate::Progress;
use crate::checkpoint::{CheckpointError, ModelConfig, layout};
use serde_json::{Value, json};
use shape::Shape;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// No shape of that name.
    #[error("no shape `{name}`; there are {known}")]
    UnknownShape {
        /// What was asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The folder holds something already.
    #[error("{}: holds a checkpoint already; choose another folder or remove it", dir.display())]
    Exists {
        /// The folder.
        dir: PathBuf,
    },
    /// The disk said no.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
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
    progress: &mut dyn FnMut(Progress),
) -> Result<(), SynthError> {
    let shape = shape::find(shape)?;
    let config_file = out.join("config.json");
    if config_file.exists() {
        return Err(SynthError::Exists {
            dir: out.to_owned(),
        });
    }
    fs::create_dir_all(out).map_err(SynthError::at(out))?;
    let config = shape.config();
    let model = ModelConfig::from_object(&config_file, config.clone())?;
    let tensors = layout::expected(&model, shape.tied);
    weights::write(out, &tensors, seed, progress)?;
    write_json(
        &out.join("tokenizer.json"),
        &tokenizer::tokenizer(shape.vocab),
    )?;
    write_json(
        &out.join("tokenizer_config.json"),
        &tokenizer::config(shape.context),
    )?;
    write_json(&out.join("generation_config.json"), &generation(shape))?;
    write_json(&config_file, &Value::Object(config))
}

fn generation(shape: &Shape) -> Value {
    let special = tokenizer::Special::of(shape.vocab);
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
