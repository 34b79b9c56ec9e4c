//! `POST /v1/embeddings`: a vector for each text.

use super::pooled::{PooledSurface, answer_parts, insert_usage, no_parts, write_body};
use super::{AnswerEnd, AnswerHead, BodyParts, SurfaceTask};
use crate::body_work::BodyWork;
use crate::error::ApiError;
use crate::field::{
    AnyValue, FieldGroup, FlagValue, IntegerRange, JsonFields, ListShape, ObjectSpec, RequestField,
    TextShape, ValueShape, any, flag, integer, limit_list, request_fields, request_object,
    text as text_field, wrong_type,
};
use crate::openapi::RouteDoc;
use crate::request::pooled::{
    EmbeddingEncoding, EmbeddingForm, PooledAnswer, check_prompt, pooled_request,
};
use crate::request::sampling::token_ids;
use crate::request::{
    self, GenerateRequest, MODEL_FIELDS, SCHEDULING_FIELDS, UNSUPPORTED, check_model, text,
};
use cleave_domain::TokenId;
use cleave_text::json::{Document, Json, JsonItems, JsonShape};
use cleave_text::{EmbedTask, ModelTask, ModelText, SpecialTokens};
use serde::Serialize;
use serde_json::Map;
use std::borrow::Cow;
use std::sync::Arc;

/// Limit of inputs in one body.
const INPUTS_MAX: usize = 1024;
const TOKEN_LIST: ListShape = ListShape::of(&ValueShape::TokenId);

request_fields! {
    EMBEDDING_FIELDS {
        INPUT: AnyValue = any(
            "input",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::ANY),
                ValueShape::List(
                    ListShape::of(&ValueShape::Text(TextShape::ANY)).at_least(1).at_most(INPUTS_MAX),
                ),
                ValueShape::List(TOKEN_LIST.at_least(1)),
                ValueShape::List(
                    ListShape::of(&ValueShape::List(TOKEN_LIST)).at_least(1).at_most(INPUTS_MAX),
                ),
            ]),
            "Texts, or their tokens. Each is a sequence of its own; one that is refused refuses all.",
        ).required();
        ENCODING_FORMAT: TextShape = text_field(
            "encoding_format",
            TextShape::one_of(&["float", "base64"]),
            "`base64`: the bytes of little-endian 32-bit floats.",
        ).default("float");
        DIMENSIONS: IntegerRange = integer(
            "dimensions",
            1..=u32::MAX as i64,
            "Keeps the first elements, at most the vector's; they are normalised afterwards.",
        ).default("all");
        PROMPT_NAME: TextShape = text_field(
            "prompt_name",
            TextShape::ANY,
            "A prompt of the model's `config_sentence_transformers.json`, put before each text; not before tokens.",
        ).default("`default_prompt_name` of that file");
        NORMALIZE: FlagValue = flag(
            "normalize",
            "Vectors are divided by their length.",
        ).default("as the model's are");
        ADD_SPECIAL_TOKENS: FlagValue = flag(
            "add_special_tokens",
            "Adds the tokenizer's special tokens to a text, not to tokens.",
        ).default("true");
    }
}

const EMBEDDING_GROUPS: &[FieldGroup] = &[MODEL_FIELDS, EMBEDDING_FIELDS, SCHEDULING_FIELDS];

const EMBEDDING_REQUEST: ObjectSpec =
    request_object!("EmbeddingRequest", &[EMBEDDING_GROUPS], &[UNSUPPORTED]);

/// The API of OpenAI's clients for vectors of texts.
pub(super) static EMBEDDINGS: PooledSurface = PooledSurface {
    route: "/v1/embeddings",
    operation: "embeddings",
    task: SurfaceTask::Embed,
    doc: RouteDoc {
        operation: "embeddings",
        summary: "Embed texts.",
        request: Some(&EMBEDDING_REQUEST),
        schema: "EmbeddingAnswer",
        description: "A vector for each input, in their order.",
        ..request::GENERATE_DOC
    },
    body_work: BodyWork::ParseOnly,
    parse: embeddings,
    answer: embeddings_answer,
};

/// An input as the client sent it.
enum EmbeddingInput<'a> {
    Text(Cow<'a, str>),
    Tokens(JsonItems<'a>),
}

/// Checks a body and tokenizes its inputs.
fn embeddings(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &EMBEDDING_REQUEST)?;
    check_model(&fields, model)?;
    fields.check_refused()?;
    let ModelTask::Embed(task) = model.task() else {
        return Err(ApiError::unsupported("model", "This model does not embed."));
    };
    let answer = PooledAnswer::Embeddings(EmbeddingForm {
        encoding: match fields.text(&ENCODING_FORMAT)?.as_deref() {
            None | Some("float") => EmbeddingEncoding::Float,
            Some("base64") => EmbeddingEncoding::Base64,
            Some(_) => {
                let message = "`encoding_format` is `float` or `base64`.";
                return Err(fields.invalid(&ENCODING_FORMAT, message));
            }
        },
        dimensions: dimensions(&fields, model)?,
        normalize: fields.flag(&NORMALIZE)?.unwrap_or(task.normalize),
    });
    let prefix = prompt_text(&fields, task)?;
    let special = special_tokens(&fields, &ADD_SPECIAL_TOKENS)?;
    let tokens = |(path, given): (String, EmbeddingInput)| {
        let tokens = match given {
            EmbeddingInput::Text(text) => encode_after(prefix, &text, special, model, &path)?,
            EmbeddingInput::Tokens(items) => token_ids(&path, items, model)?,
        };
        check_prompt(&tokens, model, &path).map(|()| tokens)
    };
    let prompts = inputs(&fields)?.into_iter().map(tokens);
    let prompts = prompts.collect::<Result<Vec<_>, ApiError>>()?;
    pooled_request(&fields, prompts, task.pooling.clone(), answer)
}

/// Whether texts get the tokenizer's special tokens, by this field.
pub(super) fn special_tokens(
    fields: &JsonFields,
    field: &RequestField<FlagValue>,
) -> Result<SpecialTokens, ApiError> {
    Ok(match fields.flag(field)? {
        Some(false) => SpecialTokens::Skipped,
        Some(true) | None => SpecialTokens::Kept,
    })
}

/// Tokenizes a text behind a prompt, as one text.
pub(super) fn encode_after(
    prefix: &str,
    text: &str,
    special: SpecialTokens,
    model: &ModelText,
    path: &str,
) -> Result<Vec<TokenId>, ApiError> {
    let whole = if prefix.is_empty() {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(format!("{prefix}{text}"))
    };
    text::encode(&whole, special, model, path)
}

fn dimensions(fields: &JsonFields, model: &ModelText) -> Result<Option<usize>, ApiError> {
    let Some(dimensions) = fields.integer(&DIMENSIONS)? else {
        return Ok(None);
    };
    match model.hidden_size() {
        Some(size) if dimensions > i64::from(size) => Err(fields.invalid(
            &DIMENSIONS,
            format!("`dimensions` is {dimensions}; the model's vectors have {size}."),
        )),
        _ => Ok(usize::try_from(dimensions).ok()),
    }
}

/// The text of the prompt that the request names, or of the model's default one.
fn prompt_text<'a>(fields: &JsonFields, task: &'a EmbedTask) -> Result<&'a str, ApiError> {
    let name = fields.text(&PROMPT_NAME)?;
    task.prompt(name.as_deref()).ok_or_else(|| {
        let known: Vec<&str> = task.prompts.iter().map(|(name, _)| name.as_str()).collect();
        let known = if known.is_empty() {
            "none".to_owned()
        } else {
            known.join(", ")
        };
        let message = format!("`prompt_name` is none of the model's prompts ({known}).");
        fields.invalid(&PROMPT_NAME, message)
    })
}

/// Reads the inputs with their paths.
fn inputs<'a>(fields: &JsonFields<'a>) -> Result<Vec<(String, EmbeddingInput<'a>)>, ApiError> {
    let expected =
        "a string, an array of strings, an array of token ids, or an array of arrays of token ids";
    let name = INPUT.name();
    let input = fields.any(&INPUT).ok_or_else(|| fields.missing(&INPUT))?;
    let items = match input.shape() {
        JsonShape::String(text) => {
            return Ok(vec![(name.to_owned(), EmbeddingInput::Text(text.get()))]);
        }
        JsonShape::Array(items) => items,
        _ => return Err(wrong_type(name, expected, input)),
    };
    match items.clone().next().map(Json::shape) {
        None => return Err(fields.invalid(&INPUT, "`input` must not be an empty array.")),
        Some(JsonShape::Number(_)) => {
            return Ok(vec![(name.to_owned(), EmbeddingInput::Tokens(items))]);
        }
        Some(_) => limit_list(name, items.clone().count(), INPUTS_MAX)?,
    }
    let given = |(index, item): (usize, Json<'a>)| {
        let path = format!("{name}[{index}]");
        match item.shape() {
            JsonShape::String(text) => Ok((path, EmbeddingInput::Text(text.get()))),
            JsonShape::Array(tokens) => Ok((path, EmbeddingInput::Tokens(tokens))),
            _ => Err(wrong_type(&path, "a string or an array of token ids", item)),
        }
    };
    items.enumerate().map(given).collect()
}

/// An embedding in an answer.
#[derive(Serialize)]
struct EmbeddingEntry {
    object: &'static str,
    index: usize,
    embedding: EncodedEmbedding,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EncodedEmbedding {
    /// Each number by the shortest digits that name it among those of 32 bits.
    Float(Vec<f32>),
    Base64(String),
}

fn embeddings_answer(head: &AnswerHead, vectors: &[Arc<[f32]>], end: AnswerEnd) -> BodyParts {
    let Some(PooledAnswer::Embeddings(form)) = head.facts.pooled.as_deref() else {
        return no_parts();
    };
    let (form, vectors) = (*form, vectors.to_vec());
    let mut rest = Map::new();
    rest.insert("object".into(), "list".into());
    rest.insert("model".into(), head.model.name().into());
    insert_usage(&mut rest, end);
    answer_parts(rest, "data", vectors.len(), move |index, out| {
        let embedding = form.embedding(&vectors[index]);
        let embedding = match form.encoding {
            EmbeddingEncoding::Float => EncodedEmbedding::Float(embedding),
            EmbeddingEncoding::Base64 => EncodedEmbedding::Base64(base64_of(&embedding)),
        };
        let entry = EmbeddingEntry {
            object: "embedding",
            index,
            embedding,
        };
        write_body(out, &entry);
    })
}

/// Base64 (RFC 4648) of the numbers' little-endian bytes.
fn base64_of(numbers: &[f32]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |place: usize| u32::from(group.get(place).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            // Each byte of the group gives one digit more than itself; the rest is padding.
            let digit = DIGITS[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= group.len() {
                char::from(digit)
            } else {
                '='
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_has_the_bytes_of_the_numbers() {
        assert_eq!(base64_of(&[]), "");
        assert_eq!(base64_of(&[1.0]), "AACAPw==");
        assert_eq!(base64_of(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64_of(&[0.0, 0.0, 1.0]), "AAAAAAAAAAAAAIA/");
    }
}
