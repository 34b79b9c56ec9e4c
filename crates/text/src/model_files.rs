//! The text side of a model folder, as plain data.
//!
//! Owns: the list of files that matter, and errors for missing ones. Never: interprets tokenizer or
//! templates. Invariant: the type serializes, because a worker, which has the folder, sends it to
//! routers, which have none.

use crate::model_task::ModelTask;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The files of a model folder that concern text. Every field holds the content of a file,
/// unparsed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFiles {
    pub name: String,
    /// `config.json`: vocabulary size, context length, begin and end tokens.
    pub config: String,
    pub tokenizer: String,
    /// `tokenizer_config.json`: names of special tokens; in older folders the chat template.
    pub tokenizer_config: Option<String>,
    /// `special_tokens_map.json`, used where `tokenizer_config.json` names no token.
    pub special_tokens_map: Option<String>,
    /// `generation_config.json`: end tokens and the defaults of sampling.
    pub generation_config: Option<String>,
    /// `chat_template.jinja`, or the template in `chat_template.json`; preferred to the one in
    /// `tokenizer_config.json`.
    pub chat_template: Option<String>,
    /// `additional_chat_templates/NAME.jinja`: name and template, by name.
    pub chat_templates_named: Vec<(String, String)>,
    /// A limit below the context length of `config.json`, where the workers hold less.
    pub context_tokens_max: Option<u32>,
    /// The task that the model is served for.
    pub task: ModelTask,
}

/// An unusable model folder.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A required file is absent.
    #[error("{}: no such file; a model folder needs it", .0.display())]
    Absent(PathBuf),
    /// A file exists and cannot be read.
    #[error("{}: {reason}", .path.display())]
    Unreadable { path: PathBuf, reason: String },
    /// The content of a file is invalid.
    #[error("{file}: {reason}")]
    Invalid { file: &'static str, reason: String },
}

impl ModelFiles {
    /// Reads a Hugging Face folder. The served name is the name of the folder, and the task is to
    /// generate.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let absolute = folder
            .canonicalize()
            .map_err(|error| unreadable(folder, &error))?;
        let name = absolute.file_name().unwrap_or(absolute.as_os_str());
        let optional = |file: &str| read_optional(&folder.join(file), TEXT_BYTES_MAX);
        let absent = |file: &str| ModelError::Absent(folder.join(file));
        let chat_template = match optional("chat_template.jinja")? {
            Some(template) => Some(template),
            None => optional("chat_template.json")?
                .map(|text| template_of(&text))
                .transpose()?,
        };
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            config: optional("config.json")?.ok_or_else(|| absent("config.json"))?,
            tokenizer: read_optional(&folder.join("tokenizer.json"), TOKENIZER_BYTES_MAX)?
                .ok_or_else(|| absent("tokenizer.json"))?,
            tokenizer_config: optional("tokenizer_config.json")?,
            special_tokens_map: optional("special_tokens_map.json")?,
            generation_config: optional("generation_config.json")?,
            chat_template,
            chat_templates_named: read_named_templates(&folder.join("additional_chat_templates"))?,
            context_tokens_max: None,
            task: ModelTask::Generate,
        })
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> ModelError {
    ModelError::Unreadable {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// Limit of a configuration or template, in bytes.
pub(crate) const TEXT_BYTES_MAX: u64 = 16 << 20;
/// Limit of a tokenizer, in bytes: the largest in use have about forty million.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Limit of the entries of the template folder that are read.
const TEMPLATES_MAX: usize = 1000;

pub(crate) fn read_optional(path: &Path, bytes_max: u64) -> Result<Option<String>, ModelError> {
    match cleave_files::read_text(path, bytes_max) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(path, &error)),
    }
}

fn template_of(text: &str) -> Result<String, ModelError> {
    #[derive(Deserialize)]
    struct ChatTemplateFile {
        chat_template: String,
    }
    let invalid = |error: serde_json::Error| ModelError::Invalid {
        file: "chat_template.json",
        reason: error.to_string(),
    };
    serde_json::from_str::<ChatTemplateFile>(text)
        .map(|held| held.chat_template)
        .map_err(invalid)
}

fn read_named_templates(folder: &Path) -> Result<Vec<(String, String)>, ModelError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(unreadable(folder, &error)),
    };
    let mut templates = Vec::new();
    for entry in entries.take(TEMPLATES_MAX) {
        let path = entry.map_err(|error| unreadable(folder, &error))?.path();
        let stem = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned());
        if let (Some(stem), Some("jinja")) = (stem, path.extension().and_then(|e| e.to_str())) {
            templates
                .extend(read_optional(&path, TEXT_BYTES_MAX)?.map(|template| (stem, template)));
        }
    }
    templates.sort();
    Ok(templates)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::sync::mpsc;
    use std::time::Duration;
    use tempfile::TempDir;

    /// The text files of a checkpoint of testdata, and named templates.
    fn copy() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let testdata = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/qwen3"));
        for name in [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
        ] {
            fs::copy(testdata.join(name), folder.path().join(name)).unwrap();
        }
        let named = folder.path().join("additional_chat_templates");
        fs::create_dir(&named).unwrap();
        fs::write(named.join("tool_use.jinja"), "{{ messages }}").unwrap();
        fs::write(folder.path().join("special_tokens_map.json"), "{}").unwrap();
        ModelFiles::read(folder.path()).unwrap();
        folder
    }

    /// Returns the error of reading a folder, which must not wait for a writer or read without end.
    fn error_at_once(folder: &Path) -> String {
        let (sender, error) = mpsc::channel();
        let folder = folder.to_owned();
        std::thread::spawn(move || sender.send(ModelFiles::read(&folder).unwrap_err().to_string()));
        let waited = error.recv_timeout(Duration::from_secs(60));
        waited.expect("a refusal at once")
    }

    #[test]
    fn special_and_endless_text_files_are_refused_at_once() {
        for name in [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "generation_config.json",
            "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
        ] {
            for expected in [
                "a FIFO",
                "a device",
                "a folder",
                "1099511627776 bytes; at most",
            ] {
                let folder = copy();
                let path = folder.path().join(name);
                fs::remove_file(&path).unwrap();
                match expected {
                    "a FIFO" => {
                        let mode = Mode::RUSR | Mode::WUSR;
                        mknodat(CWD, &path, FileType::Fifo, mode, 0).unwrap();
                    }
                    "a device" => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                    "a folder" => fs::create_dir(&path).unwrap(),
                    _ => fs::File::create(&path).unwrap().set_len(1 << 40).unwrap(),
                }
                let error = error_at_once(folder.path());
                assert!(error.contains(name) && error.contains(expected), "{error}");
            }
        }
    }

    #[test]
    fn an_endless_template_in_json_is_refused_at_once() {
        let folder = copy();
        fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.path().join("chat_template.json")).unwrap();
        let error = error_at_once(folder.path());
        assert!(
            error.contains("chat_template.json: it is a device"),
            "{error}"
        );
    }
}
