//! Tokenization of prompts, with its limits.

use crate::error::ApiError;
use crate::memory_budget::listed_tokens_max;
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
    let tokens_max = context as usize;
    let encoded = model.tokenizer().encode_within(text, special, tokens_max);
    match encoded.map_err(|error| not_encoded(param, &error))? {
        EncodedText::Tokens(tokens) => Ok(tokens),
        EncodedText::TooMany(count) => Err(too_long(param, count, context, "")),
    }
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

/// Tokenizes a text for an answer with its tokens, which may be longer than the context.
pub(crate) fn encode_for_list(
    text: &str,
    special: SpecialTokens,
    model: &ModelText,
    param: &str,
) -> Result<Vec<TokenId>, ApiError> {
    if !model.tokenizer().is_byte_level() {
        // The library takes a hundred times the memory of the text.
        check_length(text, model, param)?;
    }
    let tokens_max = listed_tokens_max(model);
    let encoded = model.tokenizer().encode_within(text, special, tokens_max);
    match encoded.map_err(|error| not_encoded(param, &error))? {
        EncodedText::Tokens(tokens) => Ok(tokens),
        EncodedText::TooMany(count) => Err(too_many_listed(param, count, tokens_max)),
    }
}

/// An error for more tokens than `/tokenize` and `/detokenize` handle.
pub(crate) fn too_many_listed(param: &str, count: usize, tokens_max: usize) -> ApiError {
    let message = format!(
        "`{param}` has {count} tokens; this route takes at most {tokens_max}. Send it in parts."
    );
    ApiError::invalid(param, message)
}

fn not_encoded(param: &str, error: &EncodeError) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {error}."))
}

pub(crate) fn too_long(param: &str, count: usize, context: u32, about: &str) -> ApiError {
    ApiError::context_exceeded(
        param,
        format!(
            "This model's maximum context length is {context} tokens; the prompt has {about}{count}. Shorten it."
        ),
    )
}
