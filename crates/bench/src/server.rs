//! Probing of a server before it is measured.
//!
//! Owns: the model's name, its context, and the tokens or words of prompts with an exact length.
//! Never: requires an interface that some servers of this API lack, if there is another way.

use crate::client::BenchClient;
use crate::prompt::{CountedWord, PromptVocabulary};
use crate::request::{ApiEndpoint, BodyWriter, RequestOptions, headers};
use anyhow::{Context, bail, ensure};
use hyper::StatusCode;
use hyper::header::HeaderMap;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Ids below this are special ones and single bytes in most vocabularies; so are the last ones.
const ID_FIRST: u32 = 256;
const ID_SHARE: f64 = 0.9;
/// Fewest distinct token ids that a text must give to write prompts with.
const IDS_MIN: usize = 24;
/// How often a word is repeated to count its tokens.
const REPEATS: u32 = 16;

/// Words of one token each in most vocabularies.
const WORDS: [&str; 48] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business",
];

/// The encoding of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptEncoding {
    /// Token ids for completions, text for chat.
    #[default]
    Auto,
    /// Token ids: lengths are exact.
    Tokens,
    /// Text whose tokens are counted beforehand.
    Text,
}

/// Address and options of a server.
#[derive(Clone, Debug, Default)]
pub struct ServerTarget {
    /// Address, as `http://host:port` or `https://host:port`.
    pub url: String,
    /// A PEM file of authorities that may sign the server's certificate; the system's if `None`.
    pub authorities: Option<PathBuf>,
    /// The model's name; the server's first one if `None`.
    pub model: Option<String>,
    /// The encoding of prompts.
    pub encoding: PromptEncoding,
    /// Size of the vocabulary; probed from the server if `None`.
    pub vocabulary: Option<u32>,
    pub request_options: RequestOptions,
}

/// The probed properties of a server.
#[derive(Clone, Debug, Serialize)]
pub struct ServerFacts {
    /// The model's name, if there is one.
    pub model: Option<String>,
    /// The model's context in tokens, if the server reports it.
    pub context_max: Option<u32>,
    /// A description of the prompts' tokens or words.
    pub prompts: String,
    /// The server's own name and version, if it reports them.
    pub software: Option<String>,
}

/// A server that can be measured.
#[derive(Clone, Debug)]
pub struct MeasuredServer {
    pub(crate) client: BenchClient,
    pub(crate) writer: BodyWriter,
    /// The probed properties of the server.
    pub facts: ServerFacts,
}

impl MeasuredServer {
    /// Probes the server; it must be up.
    ///
    /// # Errors
    /// The server cannot be reached or lacks an interface; the error names the flag that replaces
    /// it.
    pub async fn probe(target: &ServerTarget) -> anyhow::Result<Self> {
        let probe = ServerProbe {
            client: BenchClient::new(&target.url, target.authorities.as_deref())?,
            headers: headers(&target.request_options)?,
            target,
        };
        let card = probe.model_card().await?;
        let name = card.get("id").and_then(Value::as_str).map(str::to_owned);
        let model = target.model.clone().or(name);
        let encoding = match (target.encoding, target.request_options.endpoint) {
            (PromptEncoding::Auto, ApiEndpoint::Completions) => PromptEncoding::Tokens,
            (PromptEncoding::Auto | PromptEncoding::Text, _) => PromptEncoding::Text,
            (PromptEncoding::Tokens, ApiEndpoint::Completions) => PromptEncoding::Tokens,
            (PromptEncoding::Tokens, ApiEndpoint::Chat) => {
                bail!(
                    "chat prompts cannot be token ids: use --endpoint completions or --prompt text"
                )
            }
        };
        let alphabet = match encoding {
            PromptEncoding::Tokens => probe.id_vocabulary(&card, model.as_deref()).await?,
            PromptEncoding::Text | PromptEncoding::Auto => {
                probe.word_vocabulary(model.as_deref()).await?
            }
        };
        let context = ["max_model_len", "context_length", "n_ctx"];
        let facts = ServerFacts {
            context_max: context.iter().find_map(|name| number(&card, name)),
            prompts: describe_vocabulary(&alphabet),
            software: probe.software().await,
            model: model.clone(),
        };
        Ok(Self {
            writer: BodyWriter::new(&target.request_options, model.as_deref(), alphabet),
            client: probe.client,
            facts,
        })
    }
}

fn describe_vocabulary(alphabet: &PromptVocabulary) -> String {
    match alphabet {
        PromptVocabulary::IdRange { first, end } => {
            format!("token ids from {first} to {}", end - 1)
        }
        PromptVocabulary::IdList(ids) => {
            format!("{} token ids that the server made of a text", ids.len())
        }
        PromptVocabulary::Words { words, overhead } => format!(
            "text of {} words ({} to {} tokens each; {overhead} tokens are added by the server)",
            words.len(),
            words.first().map_or(0, |word| word.tokens),
            words.last().map_or(0, |word| word.tokens),
        ),
    }
}

/// A number of a model's card, at its top or in `meta` (llama.cpp).
fn number(card: &Value, name: &str) -> Option<u32> {
    let places = [card.get(name), card.get("meta").and_then(|m| m.get(name))];
    let number = places.into_iter().flatten().find_map(Value::as_u64)?;
    u32::try_from(number).ok()
}

struct ServerProbe<'a> {
    client: BenchClient,
    headers: HeaderMap,
    target: &'a ServerTarget,
}

impl ServerProbe<'_> {
    /// The model's entry in `/v1/models`; null if the server has no such list.
    async fn model_card(&self) -> anyhow::Result<Value> {
        let (status, list) = self.client.json("/v1/models", None, &self.headers).await?;
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            bail!("{}: {status}: give --api-key", self.target.url);
        }
        let cards = list.get("data").and_then(Value::as_array);
        let Some(cards) = cards.filter(|_| status == StatusCode::OK) else {
            return Ok(Value::Null);
        };
        let Some(model) = &self.target.model else {
            return Ok(cards.first().cloned().unwrap_or_default());
        };
        let named = cards.iter().find(|card| card["id"] == json!(model));
        Ok(named
            .or(cards.first().filter(|_| cards.len() == 1))
            .cloned()
            .unwrap_or_default())
    }

    async fn software(&self) -> Option<String> {
        let (status, answer) = self
            .client
            .json("/version", None, &self.headers)
            .await
            .ok()?;
        let version = answer.get("version").and_then(Value::as_str);
        version
            .filter(|_| status == StatusCode::OK)
            .map(str::to_owned)
    }

    /// Token ids of ordinary text.
    async fn id_vocabulary(
        &self,
        card: &Value,
        model: Option<&str>,
    ) -> anyhow::Result<PromptVocabulary> {
        let listed = ["vocab_size", "n_vocab"]
            .iter()
            .find_map(|name| number(card, name));
        if let Some(vocabulary) = self.target.vocabulary.or(listed) {
            let end = (f64::from(vocabulary) * ID_SHARE) as u32;
            // A tiny vocabulary has only bytes and a few special ids at its start.
            let first = ID_FIRST.min(end / 2);
            ensure!(end > first, "a vocabulary of {vocabulary} ids is too small");
            return Ok(PromptVocabulary::IdRange { first, end });
        }
        let text = WORDS.join(" ");
        let (mut ids, refusal) = self.tokenize(&text, model).await?;
        // A begin token comes first in any text, so it is removed.
        let (other, _) = self.tokenize("x", model).await?;
        if ids.first() == other.first() && !ids.is_empty() {
            ids.remove(0);
        }
        ids.sort_unstable();
        ids.dedup();
        ensure!(
            ids.len() >= IDS_MIN,
            "the server neither reports its vocabulary size nor tokenizes text{}: give --vocab N, or --prompt text",
            refusal.map_or(String::new(), |refusal| format!(" ({refusal})"))
        );
        Ok(PromptVocabulary::IdList(ids))
    }

    /// Tokenizes a text by whichever interface exists: Cleave's and vLLM's, llama.cpp's,
    /// llama-cpp-python's. Returns no tokens, and the first refusal, if there is none.
    ///
    /// # Errors
    /// The server does not have the model.
    async fn tokenize(
        &self,
        text: &str,
        model: Option<&str>,
    ) -> anyhow::Result<(Vec<u32>, Option<String>)> {
        let mut refusal = None;
        let requests = [
            (
                "/tokenize",
                json!({"model": model, "prompt": text, "content": text, "add_special_tokens": false}),
            ),
            ("/tokenize", json!({"content": text})),
            ("/extras/tokenize", json!({"model": model, "input": text})),
        ];
        for (path, body) in requests {
            let answer = self.client.json(path, Some(&body), &self.headers).await;
            let tokens = match answer {
                Ok((StatusCode::OK, answer)) => answer.get("tokens").cloned(),
                Ok((status, answer)) => {
                    let message = answer.pointer("/error/message").and_then(Value::as_str);
                    let message = message.unwrap_or_default();
                    ensure!(
                        answer.pointer("/error/code") != Some(&json!("model_not_found")),
                        "{}: {status}: {message}",
                        self.target.url
                    );
                    refusal.get_or_insert_with(|| format!("{path}: {status} {message}"));
                    None
                }
                Err(_) => None,
            };
            let tokens = tokens.and_then(|tokens| serde_json::from_value::<Vec<u32>>(tokens).ok());
            if let Some(tokens) = tokens.filter(|tokens| !tokens.is_empty()) {
                return Ok((tokens, None));
            }
        }
        Ok((Vec::new(), refusal))
    }

    /// Words with their token counts, and the tokens that the server adds to a prompt.
    async fn word_vocabulary(&self, model: Option<&str>) -> anyhow::Result<PromptVocabulary> {
        let mut words = Vec::new();
        let mut overheads = Vec::new();
        for word in WORDS {
            let word = format!(" {word}");
            let once = self.prompt_tokens(&word, model).await?;
            let text = word.repeat(1 + REPEATS as usize);
            let often = self.prompt_tokens(&text, model).await?;
            let tokens = often.saturating_sub(once) / REPEATS;
            // A word whose count changes in a sequence would make lengths wrong.
            if tokens > 0 && often == once + REPEATS * tokens {
                overheads.push(once.saturating_sub(tokens));
                words.push(CountedWord { text: word, tokens });
            }
        }
        ensure!(
            words.len() >= IDS_MIN,
            "only {} of {} words have the same token count alone and repeated: use --prompt tokens",
            words.len(),
            WORDS.len()
        );
        words.sort_by_key(|word| word.tokens);
        overheads.sort_unstable();
        let overhead = overheads[overheads.len() / 2];
        Ok(PromptVocabulary::Words { words, overhead })
    }

    /// Prompt tokens that the server counts for a text, from an answer of one token.
    async fn prompt_tokens(&self, text: &str, model: Option<&str>) -> anyhow::Result<u32> {
        let endpoint = self.target.request_options.endpoint;
        let mut body = json!({"max_tokens": 1, "temperature": 0});
        if let Some(model) = model {
            body["model"] = json!(model);
        }
        match endpoint {
            ApiEndpoint::Completions => body["prompt"] = json!(text),
            ApiEndpoint::Chat => body["messages"] = json!([{"role": "user", "content": text}]),
        }
        let (status, answer) = self
            .client
            .json(endpoint.path(), Some(&body), &self.headers)
            .await?;
        ensure!(
            status == StatusCode::OK,
            "{}: {status}: {answer}",
            endpoint.path()
        );
        let tokens = answer
            .pointer("/usage/prompt_tokens")
            .and_then(Value::as_u64);
        let tokens = tokens.and_then(|tokens| u32::try_from(tokens).ok());
        tokens
            .context("the server reports no prompt tokens (`usage`): use --prompt tokens --vocab N")
    }
}
