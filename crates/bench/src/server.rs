//! What has to be known of a server before it is measured.
//!
//! Owns: the model's name, its context, and with what prompts are written so that they have the
//! wanted length. Never: needs anything that not all servers of this API have, if there is a way.

use crate::ask::{Asking, Endpoint, Writer, headers};
use crate::client::Client;
use crate::prompt::{Alphabet, Word};
use anyhow::{Context, bail, ensure};
use hyper::StatusCode;
use hyper::header::HeaderMap;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Ids below this are special ones and single bytes in most vocabularies; so are the last ones.
const ID_FIRST: u32 = 256;
const ID_SHARE: f64 = 0.9;
/// Different token ids that a text must give to write prompts with.
const IDS_MIN: usize = 24;
/// How often a word stands in the text that tells its tokens.
const REPEATS: u32 = 16;

/// Words of one token each in most vocabularies.
const WORDS: [&str; 48] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business",
];

/// As what prompts are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptForm {
    /// Token ids for completions, text for chat.
    #[default]
    Auto,
    /// Token ids: lengths are exact.
    Tokens,
    /// Text whose tokens are counted beforehand.
    Text,
}

/// Where and how a server is asked.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// `http://host:port` or `https://host:port`.
    pub url: String,
    /// A file of the authorities, in PEM, that may vouch for the server; this system's if `None`.
    pub authorities: Option<PathBuf>,
    /// The model's name; the server's first one if `None`.
    pub model: Option<String>,
    /// As what prompts are sent.
    pub form: PromptForm,
    /// Token ids there are; asked of the server if `None`.
    pub vocabulary: Option<u32>,
    /// Everything else.
    pub asking: Asking,
}

/// What was found out.
#[derive(Clone, Debug, Serialize)]
pub struct Findings {
    /// The model's name, if there is one.
    pub model: Option<String>,
    /// The model's context in tokens, if the server says it.
    pub context_max: Option<u32>,
    /// What prompts are written with, in words.
    pub prompts: String,
    /// The server's own name and version, if it says them.
    pub software: Option<String>,
}

/// A server that can be measured.
#[derive(Clone, Debug)]
pub struct Server {
    pub(crate) client: Client,
    pub(crate) writer: Writer,
    /// What was found out.
    pub findings: Findings,
}

impl Server {
    /// Asks the server what is needed; it must be up.
    ///
    /// # Errors
    /// The server cannot be reached, or does not say what is needed, and which flag says it instead.
    pub async fn find(target: &Target) -> anyhow::Result<Self> {
        let asker = Asker {
            client: Client::new(&target.url, target.authorities.as_deref())?,
            headers: headers(&target.asking)?,
            target,
        };
        let card = asker.card().await?;
        let name = card.get("id").and_then(Value::as_str).map(str::to_owned);
        let model = target.model.clone().or(name);
        let form = match (target.form, target.asking.endpoint) {
            (PromptForm::Auto, Endpoint::Completions) => PromptForm::Tokens,
            (PromptForm::Auto | PromptForm::Text, _) => PromptForm::Text,
            (PromptForm::Tokens, Endpoint::Completions) => PromptForm::Tokens,
            (PromptForm::Tokens, Endpoint::Chat) => {
                bail!("chats have no token ids: take --endpoint completions or --prompt text")
            }
        };
        let alphabet = match form {
            PromptForm::Tokens => asker.ids(&card, model.as_deref()).await?,
            PromptForm::Text | PromptForm::Auto => asker.words(model.as_deref()).await?,
        };
        let context = ["max_model_len", "context_length", "n_ctx"];
        let findings = Findings {
            context_max: context.iter().find_map(|name| number(&card, name)),
            prompts: in_words(&alphabet),
            software: asker.software().await,
            model: model.clone(),
        };
        Ok(Self {
            writer: Writer::new(&target.asking, model.as_deref(), alphabet),
            client: asker.client,
            findings,
        })
    }
}

fn in_words(alphabet: &Alphabet) -> String {
    match alphabet {
        Alphabet::Range { first, end } => format!("token ids from {first} to {}", end - 1),
        Alphabet::Listed(ids) => format!("{} token ids that the server made of a text", ids.len()),
        Alphabet::Words { words, overhead } => format!(
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

struct Asker<'a> {
    client: Client,
    headers: HeaderMap,
    target: &'a Target,
}

impl Asker<'_> {
    /// The model's entry in `/v1/models`; null if the server has no such list.
    async fn card(&self) -> anyhow::Result<Value> {
        let (status, list) = self
            .client
            .json(("/v1/models", None), &self.headers)
            .await?;
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            bail!("{}: {status}: give --api-key", self.target.url);
        }
        let cards = list.get("data").and_then(Value::as_array);
        let Some(cards) = cards.filter(|_| status == StatusCode::OK) else {
            return Ok(Value::Null);
        };
        let Some(wanted) = &self.target.model else {
            return Ok(cards.first().cloned().unwrap_or_default());
        };
        let named = cards.iter().find(|card| card["id"] == json!(wanted));
        Ok(named
            .or(cards.first().filter(|_| cards.len() == 1))
            .cloned()
            .unwrap_or_default())
    }

    async fn software(&self) -> Option<String> {
        let (status, answer) = self
            .client
            .json(("/version", None), &self.headers)
            .await
            .ok()?;
        let version = answer.get("version").and_then(Value::as_str);
        version
            .filter(|_| status == StatusCode::OK)
            .map(str::to_owned)
    }

    /// Token ids that stand for themselves.
    async fn ids(&self, card: &Value, model: Option<&str>) -> anyhow::Result<Alphabet> {
        let said = ["vocab_size", "n_vocab"]
            .iter()
            .find_map(|name| number(card, name));
        if let Some(vocabulary) = self.target.vocabulary.or(said) {
            let end = (f64::from(vocabulary) * ID_SHARE) as u32;
            // A tiny vocabulary is all bytes and a few special ids at its start.
            let first = ID_FIRST.min(end / 2);
            ensure!(end > first, "a vocabulary of {vocabulary} ids is too small");
            return Ok(Alphabet::Range { first, end });
        }
        let text = WORDS.join(" ");
        let mut ids = self.tokens(&text, model).await.unwrap_or_default();
        // Begin tokens come first whatever the text.
        let other = self.tokens("x", model).await.unwrap_or_default();
        if ids.first() == other.first() && !ids.is_empty() {
            ids.remove(0);
        }
        ids.sort_unstable();
        ids.dedup();
        ensure!(
            ids.len() >= IDS_MIN,
            "the server says neither its vocabulary nor how it tokenizes: give --vocab N, or --prompt text"
        );
        Ok(Alphabet::Listed(ids))
    }

    /// The tokens of a text, by whichever interface there is: Cleave's and vLLM's, llama.cpp's,
    /// llama-cpp-python's.
    async fn tokens(&self, text: &str, model: Option<&str>) -> Option<Vec<u32>> {
        let asks = [
            (
                "/tokenize",
                json!({"model": model, "prompt": text, "content": text, "add_special_tokens": false}),
            ),
            ("/tokenize", json!({"content": text})),
            ("/extras/tokenize", json!({"model": model, "input": text})),
        ];
        for (path, body) in asks {
            let answer = self.client.json((path, Some(&body)), &self.headers).await;
            let tokens = match answer {
                Ok((StatusCode::OK, answer)) => answer.get("tokens").cloned(),
                _ => None,
            };
            let tokens = tokens.and_then(|tokens| serde_json::from_value::<Vec<u32>>(tokens).ok());
            if let Some(tokens) = tokens.filter(|tokens| !tokens.is_empty()) {
                return Some(tokens);
            }
        }
        None
    }

    /// Words with their tokens, and what the server adds to a prompt.
    async fn words(&self, model: Option<&str>) -> anyhow::Result<Alphabet> {
        let mut words = Vec::new();
        let mut overheads = Vec::new();
        for word in WORDS {
            let word = format!(" {word}");
            let once = self.prompt_tokens(&word, model).await?;
            let text = word.repeat(1 + REPEATS as usize);
            let often = self.prompt_tokens(&text, model).await?;
            let tokens = often.saturating_sub(once) / REPEATS;
            // A word that is counted otherwise in a row than alone would spoil lengths.
            if tokens > 0 && often == once + REPEATS * tokens {
                overheads.push(once.saturating_sub(tokens));
                words.push(Word { text: word, tokens });
            }
        }
        ensure!(
            words.len() >= IDS_MIN,
            "the server counts only {} of {} words alike in a row and alone: take --prompt tokens",
            words.len(),
            WORDS.len()
        );
        words.sort_by_key(|word| word.tokens);
        overheads.sort_unstable();
        let overhead = overheads[overheads.len() / 2];
        Ok(Alphabet::Words { words, overhead })
    }

    /// Prompt tokens that the server counts for a text, by an answer of one token.
    async fn prompt_tokens(&self, text: &str, model: Option<&str>) -> anyhow::Result<u32> {
        let endpoint = self.target.asking.endpoint;
        let mut body = json!({"max_tokens": 1, "temperature": 0});
        if let Some(model) = model {
            body["model"] = json!(model);
        }
        match endpoint {
            Endpoint::Completions => body["prompt"] = json!(text),
            Endpoint::Chat => body["messages"] = json!([{"role": "user", "content": text}]),
        }
        let asked = (endpoint.path(), Some(&body));
        let (status, answer) = self.client.json(asked, &self.headers).await?;
        ensure!(
            status == StatusCode::OK,
            "{}: {status}: {answer}",
            endpoint.path()
        );
        let tokens = answer
            .pointer("/usage/prompt_tokens")
            .and_then(Value::as_u64);
        let tokens = tokens.and_then(|tokens| u32::try_from(tokens).ok());
        tokens.context(
            "the server does not count prompt tokens (`usage`): take --prompt tokens --vocab N",
        )
    }
}
