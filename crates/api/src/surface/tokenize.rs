//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.
//!
//! A text may exceed the context here, because a client may only want the count. The number of
//! tokens is limited (see `memory_budget`), which bounds the size of an answer.

use crate::error::ApiError;
use crate::field::JsonFields;
use crate::memory_budget::listed_tokens_max;
use crate::request::check_model;
use crate::request::sampling::token_ids;
use crate::request::text::{encode_for_list, too_many_listed};
use cleave_domain::TokenId;
use cleave_text::json::Document;
use cleave_text::{ModelText, ModelTokenizer, SpecialTokens};
use serde::{Serialize, Serializer};

/// The answer of `/tokenize`.
#[derive(Serialize)]
struct TokenizeResponse<'a> {
    count: usize,
    max_model_len: u32,
    tokens: &'a [TokenId],
    token_strs: Option<TokenSpellings<'a>>,
}

/// The spellings of tokens, each made when it is written.
struct TokenSpellings<'a> {
    tokens: &'a [TokenId],
    tokenizer: &'a ModelTokenizer,
}

impl Serialize for TokenSpellings<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().map(|&token| {
            let piece = self.tokenizer.piece(token, SpecialTokens::Kept);
            piece.unwrap_or_default()
        }))
    }
}

/// The answer of `/detokenize`.
#[derive(Serialize)]
struct DetokenizeResponse {
    prompt: String,
}

/// Tokenizes a text or a conversation; returns the JSON of the answer. `max_model_len` is the
/// longest sequence that is served.
pub(crate) fn tokenize(
    body: &Document,
    model: &ModelText,
    max_model_len: u32,
) -> Result<Vec<u8>, ApiError> {
    let fields = JsonFields::of_body(body)?;
    check_model(&fields, model)?;
    let tokens = match (fields.text("prompt")?, fields.any("messages")) {
        (Some(text), None) => {
            let special = match fields.flag("add_special_tokens")? {
                Some(false) => SpecialTokens::Skipped,
                Some(true) | None => SpecialTokens::Kept,
            };
            encode_for_list(&text, special, model, "prompt")?
        }
        (None, Some(_)) => {
            let (text, special) = super::openai_chat::rendered(&fields, model)?;
            encode_for_list(&text, special, model, "messages")?
        }
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "prompt",
                "Give `prompt` or `messages`, not both.",
            ));
        }
        (None, None) => return Err(ApiError::invalid("prompt", "`prompt` is missing.")),
    };
    let is_spelt = fields.flag("return_token_strs")?.unwrap_or(false);
    let spellings = TokenSpellings {
        tokens: &tokens,
        tokenizer: model.tokenizer(),
    };
    Ok(json_bytes(&TokenizeResponse {
        count: tokens.len(),
        max_model_len,
        tokens: &tokens,
        token_strs: is_spelt.then_some(spellings),
    }))
}

/// Decodes tokens; returns the JSON of the answer.
pub(crate) fn detokenize(body: &Document, model: &ModelText) -> Result<Vec<u8>, ApiError> {
    let fields = JsonFields::of_body(body)?;
    check_model(&fields, model)?;
    let missing = || ApiError::invalid("tokens", "`tokens` is missing.");
    let given = fields.array("tokens")?.ok_or_else(missing)?;
    let (count, tokens_max) = (given.clone().count(), listed_tokens_max(model));
    if count > tokens_max {
        return Err(too_many_listed("tokens", count, tokens_max));
    }
    let tokens = token_ids("tokens", given, model)?;
    let prompt = model.tokenizer().decode(&tokens, SpecialTokens::Kept);
    Ok(json_bytes(&DetokenizeResponse { prompt }))
}

fn json_bytes(answer: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(answer).expect("numbers, texts and lists of them are JSON")
}
