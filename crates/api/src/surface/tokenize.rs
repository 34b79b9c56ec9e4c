//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.

use crate::error::ApiError;
use crate::field::JsonFields;
use crate::request::check_model;
use crate::request::sampling::token_ids;
use crate::request::text::{check_length, encode_within, too_long};
use cleave_domain::TokenId;
use cleave_text::json::Document;
use cleave_text::{ModelText, SpecialTokens};
use serde::Serialize;

/// The answer of `/tokenize`.
#[derive(Debug, Serialize)]
pub(crate) struct TokenizeResponse {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

/// The answer of `/detokenize`.
#[derive(Debug, Serialize)]
pub(crate) struct DetokenizeResponse {
    prompt: String,
}

pub(crate) fn tokenize(body: &Document, model: &ModelText) -> Result<TokenizeResponse, ApiError> {
    let fields = JsonFields::of_body(body)?;
    check_model(&fields, model)?;
    let tokens = match (fields.text("prompt")?, fields.any("messages")) {
        (Some(text), None) => {
            let special = match fields.flag("add_special_tokens")? {
                Some(false) => SpecialTokens::Skipped,
                Some(true) | None => SpecialTokens::Kept,
            };
            // A text may exceed the context here, because a client may only want the count. The
            // limit on its tokens bounds the size of the answer to a few times the text.
            let context = model.context_tokens_max();
            let counted = if model.tokenizer().is_byte_level() {
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
        (None, Some(_)) => super::openai_chat::prompt(&fields, model)?,
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "prompt",
                "Give `prompt` or `messages`, not both.",
            ));
        }
        (None, None) => return Err(ApiError::invalid("prompt", "`prompt` is missing.")),
    };
    let spelt = fields.flag("return_token_strs")?.unwrap_or(false);
    let tokenizer = model.tokenizer();
    let piece = |&token: &TokenId| {
        let piece = tokenizer.piece(token, SpecialTokens::Kept);
        piece.unwrap_or_default()
    };
    let pieces: Option<Vec<String>> = spelt.then(|| tokens.iter().map(piece).collect());
    Ok(TokenizeResponse {
        count: tokens.len(),
        max_model_len: model.context_tokens_max(),
        tokens,
        token_strs: pieces,
    })
}

pub(crate) fn detokenize(
    body: &Document,
    model: &ModelText,
) -> Result<DetokenizeResponse, ApiError> {
    let fields = JsonFields::of_body(body)?;
    check_model(&fields, model)?;
    let missing = || ApiError::invalid("tokens", "`tokens` is missing.");
    let given = fields.array("tokens")?.ok_or_else(missing)?;
    let (count, context) = (given.clone().count(), model.context_tokens_max());
    // The library builds a string for each token before it joins them, so the number of tokens is
    // limited first.
    if count > context as usize {
        return Err(too_long("tokens", count, context, ""));
    }
    let tokens = token_ids("tokens", given, model)?;
    let prompt = model.tokenizer().decode(&tokens, SpecialTokens::Kept);
    Ok(DetokenizeResponse { prompt })
}
