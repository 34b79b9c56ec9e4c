//! Tokenization of prompts, with its limits.

use crate::error::ApiError;
use cleave_domain::TokenId;
use cleave_text::{EncodeError, EncodedText, ModelText, SpecialTokens};

/// Tokenizes a text. A text that cannot fit the context is refused first.
pub(crate) fn encode(
    text: &str,
    special: SpecialTokens,
    model: &ModelText,
    param: &str,
) -> Result<Vec<TokenId>, ApiError> {
    check_length(text, model, param)?;
    let context = model.context_tokens_max();
    encode_within(text, special, model, param, context as usize)
}

/// Refuses a text that cannot fit the context before it is tokenized.
pub(crate) fn check_length(text: &str, model: &ModelText, param: &str) -> Result<(), ApiError> {
    let (context, at_least) = (
        model.context_tokens_max(),
        model.tokenizer().tokens_min(text),
    );
    if at_least > context as usize {
        Err(too_long(param, at_least, context, "at least "))
    } else {
        Ok(())
    }
}

/// Tokenizes a text if it has `tokens_max` tokens at most.
pub(crate) fn encode_within(
    text: &str,
    special: SpecialTokens,
    model: &ModelText,
    param: &str,
    tokens_max: usize,
) -> Result<Vec<TokenId>, ApiError> {
    let failed = |error: EncodeError| ApiError::invalid(param, error.to_string());
    let encoded = model.tokenizer().encode_within(text, special, tokens_max);
    match encoded.map_err(failed)? {
        EncodedText::Tokens(tokens) => Ok(tokens),
        EncodedText::TooMany(count) => Err(too_long(param, count, model.context_tokens_max(), "")),
    }
}

pub(crate) fn too_long(param: &str, count: usize, context: u32, about: &str) -> ApiError {
    ApiError::context_exceeded(
        param,
        format!(
            "The model's context length is {context} tokens; the prompt has {about}{count}. Shorten it."
        ),
    )
}
