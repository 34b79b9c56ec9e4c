//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.
//!
//! A text may exceed the context here, because a client may only want the count. The number of
//! tokens is limited (see `memory_budget`), which bounds the size of an answer.

use super::openai_chat::{CONVERSATION_FIELDS, MESSAGES, TOOL_REQUEST_FIELDS, rendered_with_tools};
use crate::error::ApiError;
use crate::field::{
    FieldSpec, FlagValue, JsonFields, ListShape, ObjectSpec, TextShape, ValueShape, flag, list,
    request_fields, request_object, text as text_field,
};
use crate::memory_budget::listed_tokens_max;
use crate::request::sampling::{SPECIAL_TOKENS_FIELDS, special_tokens, token_ids};
use crate::request::text::{encode_for_list, too_many_listed};
use crate::request::{MODEL_FIELDS, check_model};
use cleave_domain::TokenId;
use cleave_text::json::Document;
use cleave_text::{ModelText, ModelTokenizer, SpecialTokens};
use serde::{Serialize, Serializer};

request_fields! {
    TEXT_FIELDS {
        PROMPT: TextShape = text_field("prompt", TextShape::ANY, "Text to tokenize.").required();
    }
}

request_fields! {
    LIST_FIELDS {
        RETURN_TOKEN_STRS: FlagValue =
            flag("return_token_strs", "The answer has the text of each token, too.");
    }
}

request_fields! {
    DETOKENIZE_FIELDS {
        TOKENS: ListShape =
            list("tokens", ListShape::of(&ValueShape::TokenId), "Tokens to convert to text.")
                .required();
    }
}

/// The body of `/tokenize`: a text or a conversation.
pub(crate) const TOKENIZE_REQUEST: ObjectSpec = request_object!(
    "TokenizeRequest",
    &[
        &[
            TEXT_FIELDS,
            &[FieldSpec::absent(MESSAGES.name())],
            MODEL_FIELDS,
            SPECIAL_TOKENS_FIELDS,
            LIST_FIELDS,
        ],
        &[
            &[FieldSpec::absent(PROMPT.name())],
            CONVERSATION_FIELDS,
            TOOL_REQUEST_FIELDS,
            MODEL_FIELDS,
            SPECIAL_TOKENS_FIELDS,
            LIST_FIELDS,
        ],
    ]
);

/// The body of `/detokenize`.
pub(crate) const DETOKENIZE_REQUEST: ObjectSpec =
    request_object!("DetokenizeRequest", &[&[DETOKENIZE_FIELDS, MODEL_FIELDS]]);

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
    let fields = JsonFields::of_body(body, &TOKENIZE_REQUEST)?;
    check_model(&fields, model)?;
    let tokens = match (fields.text(&PROMPT)?, fields.any(&MESSAGES)) {
        (Some(text), None) => {
            let special = special_tokens(&fields, SpecialTokens::Kept)?;
            encode_for_list(&text, special, model, PROMPT.name())?
        }
        (None, Some(_)) => {
            let (text, special) = rendered_with_tools(&fields, model)?;
            encode_for_list(&text, special, model, MESSAGES.name())?
        }
        (Some(_), Some(_)) => {
            return Err(fields.invalid(&PROMPT, "Give `prompt` or `messages`, not both."));
        }
        (None, None) => return Err(fields.missing(&PROMPT)),
    };
    let is_spelt = fields.flag(&RETURN_TOKEN_STRS)?.unwrap_or(false);
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
    let fields = JsonFields::of_body(body, &DETOKENIZE_REQUEST)?;
    check_model(&fields, model)?;
    let given = fields.list(&TOKENS)?;
    let given = given.ok_or_else(|| fields.missing(&TOKENS))?;
    let (count, tokens_max) = (given.clone().count(), listed_tokens_max(model));
    if count > tokens_max {
        return Err(too_many_listed(TOKENS.name(), count, tokens_max));
    }
    let tokens = token_ids(TOKENS.name(), given, model)?;
    let prompt = model.tokenizer().decode(&tokens, SpecialTokens::Kept);
    Ok(json_bytes(&DetokenizeResponse { prompt }))
}

fn json_bytes(answer: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(answer).expect("numbers, texts and lists of them are JSON")
}
