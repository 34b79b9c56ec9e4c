//! The task that a model is served for: tokens, embeddings, or scores of documents.
//!
//! Owns: the reading of a sentence-transformers folder (`modules.json`, `1_Pooling/config.json`,
//! `config_sentence_transformers.json`), and the prompt of rerankers. Never: pools.
//! Invariant: a module that would change the vectors, and that is not done here, refuses the
//! folder.

use crate::model_files::{ModelError, TEXT_BYTES_MAX, read_optional};
use crate::tokenizer::{EncodeError, ModelTokenizer, SpecialTokens};
use cleave_domain::{Pooling, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The answers that a model gives; a server has one model, and so one task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelTask {
    /// Tokens after a prompt.
    #[default]
    Generate,
    /// A vector for each text.
    Embed(EmbedTask),
    /// A score for each pair of a query and a document.
    Rerank(RerankTask),
}

/// How the vector of a text is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbedTask {
    /// The hidden states that it is made of.
    pub pooling: Pooling,
    /// Whether it is divided by its length.
    pub normalize: bool,
    /// Texts that may be put before an input, by name.
    pub prompts: Vec<(String, String)>,
    /// The one that is put before inputs of requests that name none.
    pub default_prompt: Option<String>,
}

/// The words whose logits after a prompt are compared. Each is one token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RerankTask {
    /// The word of a document that does not meet the query: `no`.
    pub negative: String,
    /// The word of one that does: `yes`.
    pub positive: String,
}

/// The tokens of [`RerankTask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RerankTokens {
    pub negative: TokenId,
    pub positive: TokenId,
}

/// Task of the query, where a request has none; as in Qwen3-Reranker's model card.
pub const RERANK_INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";
/// The parts of Qwen3-Reranker's prompt around instruction, query and document. They are tokenized
/// on their own, so that no text of a client changes their tokens.
const RERANK_BEGIN: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n";
const RERANK_END: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

impl ModelTask {
    /// The task in a word, as `/v1/models` shows it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Embed(_) => "embed",
            Self::Rerank(_) => "rerank",
        }
    }
}

impl EmbedTask {
    /// A task without prompts, whose vectors have length 1.
    pub fn of(pooling: Pooling) -> Self {
        Self {
            pooling,
            normalize: true,
            prompts: Vec::new(),
            default_prompt: None,
        }
    }

    /// Reads the modules of a sentence-transformers folder; `None` if it is none.
    ///
    /// # Errors
    /// `Unreadable` or `Invalid` for a file that cannot be used, or a module that is not done here.
    pub fn read(folder: &Path) -> Result<Option<Self>, ModelError> {
        let Some(modules) = read_json::<Vec<SentenceModule>>(folder, "modules.json")? else {
            return Ok(None);
        };
        let mut pooling = None;
        let mut normalize = false;
        for module in &modules {
            match (module.kind(), pooling.is_some()) {
                ("Transformer", false) if module.path.is_empty() => check_transformer(folder)?,
                ("Pooling", false) => pooling = Some(pooling_of(folder, &module.path)?),
                ("Normalize", true) => normalize = true,
                (kind, _) => {
                    let reason = format!(
                        "the module `{kind}` at this place is not supported: Transformer, \
                         Pooling and Normalize are, in this order"
                    );
                    return Err(invalid("modules.json", reason));
                }
            }
        }
        let pooling = pooling.ok_or_else(|| {
            let reason = "has no module `Pooling`, which makes one vector of a text";
            invalid("modules.json", reason.to_owned())
        })?;
        let prompts = PromptsFile::read(folder)?;
        Ok(Some(Self {
            pooling,
            normalize,
            prompts: prompts.prompts,
            default_prompt: prompts.default_prompt,
        }))
    }

    /// The text to put before an input of a request that names this prompt, or none.
    pub fn prompt(&self, name: Option<&str>) -> Option<&str> {
        let name = name.or(self.default_prompt.as_deref());
        let Some(name) = name else {
            return Some("");
        };
        let found = self.prompts.iter().find(|(other, _)| other == name);
        found.map(|(_, text)| text.as_str())
    }
}

impl RerankTask {
    /// The tokens of its words.
    ///
    /// # Errors
    /// `Invalid` for a word that is not one token.
    pub(crate) fn tokens(&self, tokenizer: &ModelTokenizer) -> Result<RerankTokens, ModelError> {
        let token = |word: &str| match tokenizer.encode(word, SpecialTokens::Skipped) {
            Ok(tokens) if tokens.len() == 1 => Ok(tokens[0]),
            _ => {
                let reason = format!("the classifier's word {word:?} is not one token");
                Err(invalid("tokenizer.json", reason))
            }
        };
        Ok(RerankTokens {
            negative: token(&self.negative)?,
            positive: token(&self.positive)?,
        })
    }
}

/// Tokens of the prompt by which a reranker judges a document, in Qwen3-Reranker's form.
///
/// # Errors
/// If the tokenizer cannot encode a text.
pub fn rerank_prompt(
    tokenizer: &ModelTokenizer,
    instruction: &str,
    query: &str,
    document: &str,
) -> Result<Vec<TokenId>, EncodeError> {
    let asked = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}");
    let mut tokens = Vec::new();
    for part in [RERANK_BEGIN, &asked, RERANK_END] {
        tokens.extend(tokenizer.encode(part, SpecialTokens::Skipped)?);
    }
    Ok(tokens)
}

/// An entry of `modules.json`.
#[derive(Deserialize)]
struct SentenceModule {
    #[serde(default)]
    path: String,
    #[serde(rename = "type")]
    class: String,
}

impl SentenceModule {
    /// The last part of the class: libraries of several ages name the modules before it anew.
    fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }
}

/// The prompts of `config_sentence_transformers.json`.
#[derive(Default)]
struct PromptsFile {
    prompts: Vec<(String, String)>,
    default_prompt: Option<String>,
}

const PROMPTS_FILE: &str = "config_sentence_transformers.json";
const POOLING_FILE: &str = "1_Pooling/config.json";
const TRANSFORMER_FILE: &str = "sentence_bert_config.json";

impl PromptsFile {
    fn read(folder: &Path) -> Result<Self, ModelError> {
        let Some(fields) = read_json::<Map<String, Value>>(folder, PROMPTS_FILE)? else {
            return Ok(Self::default());
        };
        let mut prompts = Vec::new();
        if let Some(Value::Object(named)) = fields.get("prompts") {
            for (name, text) in named {
                let Value::String(text) = text else {
                    let reason = format!("the prompt {name:?} is no text");
                    return Err(invalid(PROMPTS_FILE, reason));
                };
                prompts.push((name.clone(), text.clone()));
            }
        }
        let default_prompt = fields.get("default_prompt_name").and_then(Value::as_str);
        if let Some(name) = default_prompt.filter(|name| !prompts.iter().any(|(p, _)| p == name)) {
            let reason = format!("default_prompt_name {name:?} is none of the prompts");
            return Err(invalid(PROMPTS_FILE, reason));
        }
        Ok(Self {
            default_prompt: default_prompt.map(str::to_owned),
            prompts,
        })
    }
}

/// Refuses a module `Transformer` that changes a text before the model reads it. Its
/// `max_seq_length` cuts texts, which are refused here instead.
fn check_transformer(folder: &Path) -> Result<(), ModelError> {
    let fields: Map<String, Value> = read_json(folder, TRANSFORMER_FILE)?.unwrap_or_default();
    let is_chat = |config: &Value| config.get("message").is_some();
    if fields.get("do_lower_case") == Some(&Value::Bool(true)) {
        let reason = "`do_lower_case` is not supported: texts are read as they are";
        Err(invalid(TRANSFORMER_FILE, reason.to_owned()))
    } else if fields.get("modality_config").is_some_and(is_chat) {
        let reason = "`modality_config` puts texts into the chat template (`message`), which is \
                      not supported: texts are read as they are";
        Err(invalid(TRANSFORMER_FILE, reason.to_owned()))
    } else {
        Ok(())
    }
}

/// Reads the kind of pooling: one name in `pooling_mode`, or one of the older flags.
fn pooling_of(folder: &Path, module: &str) -> Result<Pooling, ModelError> {
    let file = Path::new(module).join("config.json");
    let inside = file.components().all(|part| {
        let is_name = matches!(part, std::path::Component::Normal(_));
        is_name || part == std::path::Component::CurDir
    });
    if !inside {
        let reason = format!("the path {module:?} leads out of the folder");
        return Err(invalid("modules.json", reason));
    }
    let fields: Map<String, Value> =
        read_json(folder, &file.to_string_lossy())?.ok_or_else(|| {
            let reason = format!("{} is missing", file.display());
            invalid(POOLING_FILE, reason)
        })?;
    let mut modes: Vec<&str> = match fields.get("pooling_mode") {
        Some(Value::String(mode)) => vec![mode],
        Some(Value::Array(modes)) => modes.iter().filter_map(Value::as_str).collect(),
        Some(_) => return Err(invalid(POOLING_FILE, "pooling_mode is no name".to_owned())),
        None => {
            let flags = fields.iter();
            let set = flags.filter(|(_, value)| **value == Value::Bool(true));
            set.filter_map(|(key, _)| key.strip_prefix("pooling_mode_"))
                .collect()
        }
    };
    modes.sort_unstable();
    let leaves_prompts_out = fields.get("include_prompt") == Some(&Value::Bool(false));
    match modes[..] {
        ["lasttoken"] => Ok(Pooling::LastToken),
        ["mean" | "mean_tokens"] if leaves_prompts_out => {
            let reason = "`include_prompt: false` is not supported with a mean: all tokens count";
            Err(invalid(POOLING_FILE, reason.to_owned()))
        }
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        ["cls" | "cls_token"] => Ok(Pooling::FirstToken),
        [] => {
            let reason = "it has no `pooling_mode`, and no `pooling_mode_…` of it is true; one of \
                          lasttoken, mean and cls is needed";
            Err(invalid(POOLING_FILE, reason.to_owned()))
        }
        _ => {
            let reason = format!(
                "the pooling {:?} is not supported; one of lasttoken, mean and cls is",
                modes.join(" and ")
            );
            Err(invalid(POOLING_FILE, reason))
        }
    }
}

fn read_json<T: for<'a> Deserialize<'a>>(
    folder: &Path,
    file: &str,
) -> Result<Option<T>, ModelError> {
    let path = folder.join(file);
    let Some(text) = read_optional(&path, TEXT_BYTES_MAX)? else {
        return Ok(None);
    };
    let unreadable = |error: serde_json::Error| ModelError::Unreadable {
        path,
        reason: error.to_string(),
    };
    serde_json::from_str(&text).map(Some).map_err(unreadable)
}

fn invalid(file: &'static str, reason: String) -> ModelError {
    ModelError::Invalid { file, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const MODULES: &str = r#"[
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    ]"#;

    fn read(files: &[(&str, &str)]) -> Result<Option<EmbedTask>, String> {
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        EmbedTask::read(folder.path()).map_err(|error| error.to_string())
    }

    fn pooled(config: &str) -> Result<Pooling, String> {
        let task = read(&[("modules.json", MODULES), ("1_Pooling/config.json", config)])?;
        Ok(task.expect("it has modules").pooling)
    }

    #[test]
    fn a_folder_without_modules_is_no_embedding_model() {
        assert_eq!(read(&[("config.json", "{}")]), Ok(None));
    }

    #[test]
    fn both_spellings_of_a_pooling_are_read() {
        let flags = |set: &str| {
            format!(
                r#"{{"word_embedding_dimension": 8, "pooling_mode_cls_token": false,
                    "pooling_mode_{set}": true, "include_prompt": true}}"#
            )
        };
        let last = Ok(Pooling::LastToken);
        assert_eq!(pooled(&flags("lasttoken")), last);
        assert_eq!(pooled(r#"{"pooling_mode": "lasttoken"}"#), last);
        assert_eq!(pooled(&flags("mean_tokens")), Ok(Pooling::Mean));
        assert_eq!(pooled(r#"{"pooling_mode": "mean"}"#), Ok(Pooling::Mean));
        assert_eq!(
            pooled(r#"{"pooling_mode": "cls"}"#),
            Ok(Pooling::FirstToken)
        );
    }

    #[test]
    fn unsupported_poolings_and_modules_refuse_the_folder() {
        for config in [
            r#"{"pooling_mode": "max"}"#,
            r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}"#,
            r#"{"pooling_mode": ["mean", "lasttoken"]}"#,
            r#"{"pooling_mode": 3}"#,
            r#"{"pooling_mode": "mean", "include_prompt": false}"#,
            "{}",
        ] {
            let error = pooled(config).unwrap_err();
            assert!(error.starts_with("1_Pooling/config.json: "), "{error}");
        }
        let empty = pooled("{}").unwrap_err();
        assert!(empty.contains("it has no `pooling_mode`"), "{empty}");
        let dense = MODULES.replace("models.Normalize", "models.Dense");
        let plain = MODULES.replace("models.Pooling", "models.Normalize");
        for modules in [&*dense, &*plain, "[]"] {
            let error = read(&[
                ("modules.json", modules),
                ("1_Pooling/config.json", r#"{"pooling_mode": "mean"}"#),
            ]);
            assert!(
                error.unwrap_err().starts_with("modules.json: "),
                "{modules}"
            );
        }
        let outside = MODULES.replace("\"1_Pooling\"", "\"../x\"");
        let error = read(&[("modules.json", &outside)]).unwrap_err();
        assert!(error.contains("leads out of the folder"), "{error}");
    }

    #[test]
    fn a_folder_that_changes_texts_is_refused() {
        let text = r#""text": {"method": "forward"}"#;
        let chat = r#""message": {"method": "forward", "format": "flat"}"#;
        for (config, is_read) in [
            (r#"{"max_seq_length": 512, "do_lower_case": false}"#, true),
            (&format!(r#"{{"modality_config": {{{text}}}}}"#), true),
            (r#"{"do_lower_case": true}"#, false),
            (
                &format!(r#"{{"modality_config": {{{text}, {chat}}}}}"#),
                false,
            ),
        ] {
            let task = read(&[
                ("modules.json", MODULES),
                ("1_Pooling/config.json", r#"{"pooling_mode": "lasttoken"}"#),
                ("sentence_bert_config.json", config),
            ]);
            assert_eq!(task.is_ok(), is_read, "{config}: {task:?}");
        }
    }

    #[test]
    fn prompts_are_read_with_their_default() {
        let with = |prompts: &str| {
            read(&[
                ("modules.json", MODULES),
                ("1_Pooling/config.json", r#"{"pooling_mode": "lasttoken"}"#),
                ("config_sentence_transformers.json", prompts),
            ])
        };
        let task = with(
            r#"{"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": null,
                "similarity_fn_name": "cosine"}"#,
        );
        let task = task.unwrap().unwrap();
        assert!(task.normalize);
        assert_eq!(task.prompt(None), Some(""));
        assert_eq!(task.prompt(Some("query")), Some("Q: "));
        assert_eq!(task.prompt(Some("other")), None);
        let task = with(r#"{"prompts": {"query": "Q: "}, "default_prompt_name": "query"}"#);
        assert_eq!(task.unwrap().unwrap().prompt(None), Some("Q: "));
        let error = with(r#"{"prompts": {}, "default_prompt_name": "query"}"#).unwrap_err();
        assert!(error.contains("is none of the prompts"), "{error}");
    }
}
