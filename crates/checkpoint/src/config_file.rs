//! Configuration files: a JSON object each.

use crate::CheckpointError;
use cleave_models::ConfigFields;
use serde_json::Value;
use std::io;
use std::path::Path;

/// Limit of a configuration file in bytes; real ones are kilobytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Reads a file's object; `None` if the file is not there.
pub(crate) fn read(file: &Path) -> Result<Option<ConfigFields>, CheckpointError> {
    let bytes = match cleave_files::read(file, CONFIG_BYTES_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            return Err(CheckpointError::damaged(file, "size", error.to_string()));
        }
        Err(error) => return Err(CheckpointError::absent(file, error.to_string())),
        Ok(bytes) => bytes,
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(Some(ConfigFields::new(file, map))),
        Ok(_) => Err(CheckpointError::damaged(
            file,
            "top",
            "is not a JSON object",
        )),
        Err(error) => Err(CheckpointError::damaged(file, "JSON", error.to_string())),
    }
}

/// Reads config.json, which must exist.
pub(crate) fn read_config(file: &Path) -> Result<ConfigFields, CheckpointError> {
    read(file)?.ok_or_else(|| {
        CheckpointError::absent(
            file,
            "missing; a checkpoint is a Hugging Face folder with config.json, tokenizer.json and \
             *.safetensors",
        )
    })
}
