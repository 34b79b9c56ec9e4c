//! `POST /tokenize` and `/detokenize`, in vLLM's shapes; and tokenization with its limit.

use super::sampling::token_ids;
use crate::error::ApiError;
use crate::field::Fields;
use crate::json::Document;
use crate::model::{Encoded, ModelText, Special};
use cleave_domain::TokenId;
use serde::Serialize;

/// Text to tokens. A text that cannot fit is refused before the work is done.
pub(super) fn encode(
    text: &str,
    special: Special,
    model: &ModelText,
    param: &str,
) -> Result<Vec<TokenId>, ApiError> {
    check_length(text, model, param)?;
    let context = model.context_tokens_max();
    encode_within(text, special, model, param, context as usize)
}

/// Refuses a text that cannot fit, before it is tokenized.
fn check_length(text: &str, model: &ModelText, param: &str) -> Result<(), ApiError> {
    let (context, at_least) = (model.context_tokens_max(), model.tokens_min(text));
    match at_least > context as usize {
        true => Err(too_long(param, at_least, context, "at least ")),
        false => Ok(()),
    }
}

fn encode_within(
    text: &str,
    special: Special,
    model: &ModelText,
    param: &str,
    tokens_max: usize,
) -> Result<Vec<TokenId>, ApiError> {
    let failed = |error: crate::ModelError| ApiError::invalid(param, error.to_string());
    let encoded = model.encode_within(text, special, tokens_max);
    match encoded.map_err(failed)? {
        Encoded::Tokens(tokens) => Ok(tokens),
        Encoded::TooMany(count) => Err(too_long(param, count, model.context_tokens_max(), "")),
    }
}

pub(super) fn too_long(param: &str, count: usize, context: u32, about: &str) -> ApiError {
    ApiError::context_exceeded(
        param,
        format!(
            "The model's context length is {context} tokens; the prompt has {about}{count}. Shorten it."
        ),
    )
}

/// The answer of `/tokenize`.
#[derive(Debug, Serialize)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

/// The answer of `/detokenize`.
#[derive(Debug, Serialize)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// Answers `/tokenize`.
pub(crate) fn tokenize(body: &Document, model: &ModelText) -> Result<Tokenized, ApiError> {
    let fields = Fields::of_body(body)?;
    super::check_model(&fields, model)?;
    let tokens = match (fields.text("prompt")?, fields.any("messages")) {
        (Some(text), None) => {
            let special = match fields.flag("add_special_tokens")? {
                Some(false) => Special::Skipped,
                Some(true) | None => Special::Kept,
            };
            // A text may be longer than the context here, whose tokens somebody wants to count; but what is
            // made of it is not to be many times as long.
            let context = model.context_tokens_max();
            let counted = if model.is_bytewise() {
                text.len() / 4
            } else {
                0
            };
            let tokens_max = counted.max(context as usize);
            if counted == 0 {
                check_length(&text, model, "prompt")?;
            }
            encode_within(&text, special, model, "prompt", tokens_max)?
        }
        (None, Some(_)) => super::chat::prompt(&fields, model)?,
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "prompt",
                "Give `prompt` or `messages`, not both.",
            ));
        }
        (None, None) => return Err(ApiError::invalid("prompt", "`prompt` is missing.")),
    };
    let spelt = fields.flag("return_token_strs")?.unwrap_or(false);
    let piece = |&token: &TokenId| model.piece(token, Special::Kept).unwrap_or_default();
    let pieces: Option<Vec<String>> = spelt.then(|| tokens.iter().map(piece).collect());
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: model.context_tokens_max(),
        tokens,
        token_strs: pieces,
    })
}

/// Answers `/detokenize`.
pub(crate) fn detokenize(body: &Document, model: &ModelText) -> Result<Detokenized, ApiError> {
    let fields = Fields::of_body(body)?;
    super::check_model(&fields, model)?;
    let missing = || ApiError::invalid("tokens", "`tokens` is missing.");
    let given = fields.array("tokens")?.ok_or_else(missing)?;
    let (count, context) = (given.clone().count(), model.context_tokens_max());
    // The library makes a string of each token before it joins them.
    if count > context as usize {
        return Err(too_long("tokens", count, context, ""));
    }
    let tokens = token_ids("tokens", given, model)?;
    let prompt = model.decode(&tokens, Special::Kept);
    Ok(Detokenized { prompt })
}
