//! `POST /v1/rerank` and `/v1/score`: how well documents fit a query.
//!
//! A reranker judges each pair in a prompt of its own; an embedding model gives the cosine of two
//! vectors.

use super::openai_embeddings::{encode_after, special_tokens};
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
    DocumentRanking, PairScores, PooledAnswer, check_prompt, pooled_request,
};
use crate::request::{
    self, GenerateRequest, MODEL_FIELDS, SCHEDULING_FIELDS, UNSUPPORTED, check_model,
};
use cleave_domain::{Pooling, TokenId};
use cleave_text::json::{Document, Json, JsonShape};
use cleave_text::{EmbedTask, ModelTask, ModelText, RERANK_INSTRUCTION, rerank_prompt};
use serde_json::{Map, json};
use std::borrow::Cow;
use std::sync::Arc;

/// Limit of documents or texts in one body: with the query they are one sequence each.
const TEXTS_MAX: usize = 1023;

request_fields! {
    RERANK_FIELDS {
        QUERY: TextShape =
            text_field("query", TextShape::NOT_EMPTY, "What the documents are to fit.").required();
        DOCUMENTS: AnyValue = any(
            "documents",
            ValueShape::List(
                ListShape::of(&ValueShape::OneOf(&[
                    ValueShape::Text(TextShape::NOT_EMPTY),
                    ValueShape::Object(&DOCUMENT_OBJECT),
                ])).at_least(1).at_most(TEXTS_MAX),
            ),
            "Texts, or objects with a `text`. One that is refused refuses all.",
        ).required();
        TOP_N: IntegerRange = integer(
            "top_n",
            1..=u32::MAX as i64,
            "Limit of results: those with the highest scores.",
        ).default("all");
        RETURN_DOCUMENTS: FlagValue =
            flag("return_documents", "Each result repeats its document's text.").default("true");
    }
}

request_fields! {
    DOCUMENT_FIELDS {
        DOCUMENT_TEXT: TextShape =
            text_field("text", TextShape::NOT_EMPTY, "Text of the document.").required();
    }
}

const DOCUMENT_OBJECT: ObjectSpec = request_object!("RerankDocument", &[&[DOCUMENT_FIELDS]]);

request_fields! {
    PROMPT_FIELDS {
        INSTRUCTION: TextShape = text_field(
            "instruction",
            TextShape::NOT_EMPTY,
            "Task of the query, in a reranker's prompt.",
        ).default("`Given a web search query, retrieve relevant passages that answer the query`");
        ADD_SPECIAL_TOKENS: FlagValue = flag(
            "add_special_tokens",
            "Adds the tokenizer's special tokens to each text, for an embedding model; a reranker's prompt is complete.",
        ).default("true");
    }
}

const TEXT_OR_TEXTS: ValueShape = ValueShape::OneOf(&[
    ValueShape::Text(TextShape::NOT_EMPTY),
    ValueShape::List(
        ListShape::of(&ValueShape::Text(TextShape::NOT_EMPTY))
            .at_least(1)
            .at_most(TEXTS_MAX),
    ),
]);

request_fields! {
    SCORE_FIELDS {
        TEXT_1: AnyValue = any(
            "text_1",
            TEXT_OR_TEXTS,
            "A text for all of `text_2`, or one for each: the query, for a reranker.",
        );
        TEXT_2: AnyValue =
            any("text_2", TEXT_OR_TEXTS, "A text, or several: the documents, for a reranker.");
        QUERIES: AnyValue = any("queries", TEXT_OR_TEXTS, "Another name of `text_1`.");
        SCORE_DOCUMENTS: AnyValue = any("documents", TEXT_OR_TEXTS, "Another name of `text_2`.");
    }
}

const RERANK_GROUPS: &[FieldGroup] = &[
    MODEL_FIELDS,
    RERANK_FIELDS,
    PROMPT_FIELDS,
    SCHEDULING_FIELDS,
];
const SCORE_GROUPS: &[FieldGroup] = &[MODEL_FIELDS, SCORE_FIELDS, PROMPT_FIELDS, SCHEDULING_FIELDS];

const RERANK_REQUEST: ObjectSpec =
    request_object!("RerankRequest", &[RERANK_GROUPS], &[UNSUPPORTED]);
const SCORE_REQUEST: ObjectSpec = request_object!("ScoreRequest", &[SCORE_GROUPS], &[UNSUPPORTED]);

const RERANK_DOC: RouteDoc = RouteDoc {
    operation: "rerank",
    summary: "Sort documents by how well they fit a query.",
    request: Some(&RERANK_REQUEST),
    schema: "RerankAnswer",
    description: "Documents with their scores, the best first.",
    ..request::GENERATE_DOC
};

const SCORE_DOC: RouteDoc = RouteDoc {
    operation: "score",
    summary: "Score pairs of texts.",
    request: Some(&SCORE_REQUEST),
    schema: "ScoreAnswer",
    description: "A score for each pair, in their order.",
    ..request::GENERATE_DOC
};

/// The route of Jina's clients and vLLM's.
pub(super) static RERANK_V1: PooledSurface = rerank_surface("/v1/rerank", "rerank");
/// vLLM's route without a version.
pub(super) static RERANK: PooledSurface = rerank_surface("/rerank", "rerank_unversioned");
/// The route of the second version of Cohere's clients.
pub(super) static RERANK_V2: PooledSurface = rerank_surface("/v2/rerank", "rerank_v2");
pub(super) static SCORE_V1: PooledSurface = score_surface("/v1/score", "score");
pub(super) static SCORE: PooledSurface = score_surface("/score", "score_unversioned");

const fn rerank_surface(route: &'static str, operation: &'static str) -> PooledSurface {
    PooledSurface {
        route,
        operation: "rerank",
        task: SurfaceTask::Score,
        doc: RouteDoc {
            operation,
            ..RERANK_DOC
        },
        body_work: BodyWork::ParseOnly,
        parse: rerank,
        answer: rerank_answer,
    }
}

const fn score_surface(route: &'static str, operation: &'static str) -> PooledSurface {
    PooledSurface {
        route,
        operation: "score",
        task: SurfaceTask::Score,
        doc: RouteDoc {
            operation,
            ..SCORE_DOC
        },
        body_work: BodyWork::ParseOnly,
        parse: score,
        answer: score_answer,
    }
}

/// Texts with their paths.
type PlacedTexts<'a> = Vec<(String, Cow<'a, str>)>;

/// Prompts of a request, and how their vectors become scores.
struct ScorePrompts {
    prompts: Vec<Vec<TokenId>>,
    pooling: Pooling,
    scores: PairScores,
}

fn rerank(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &RERANK_REQUEST)?;
    check_model(&fields, model)?;
    fields.check_refused()?;
    let query = fields.required_text(&QUERY)?;
    let query = vec![(QUERY.name().to_owned(), query)];
    let documents = documents(&fields)?;
    let repeats = fields.flag(&RETURN_DOCUMENTS)?.unwrap_or(true);
    let top_n = fields.integer(&TOP_N)?;
    let repeated = || {
        documents
            .iter()
            .map(|(_, text)| text.clone().into_owned())
            .collect()
    };
    let repeated = repeats.then(repeated);
    // Models whose queries and documents have different prompts name them so.
    let names = [Some("query"), Some("document")];
    let ScorePrompts {
        prompts,
        pooling,
        scores,
    } = pairs(&fields, (&query, &documents), names, model)?;
    let answer = PooledAnswer::Ranking(DocumentRanking {
        scores,
        top_n: top_n.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
        documents: repeated,
    });
    pooled_request(&fields, prompts, pooling, answer)
}

fn score(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &SCORE_REQUEST)?;
    check_model(&fields, model)?;
    fields.check_refused()?;
    let first = texts(&fields, [&TEXT_1, &QUERIES])?;
    let second = texts(&fields, [&TEXT_2, &SCORE_DOCUMENTS])?;
    if first.len() != 1 && first.len() != second.len() {
        let message = format!(
            "`text_1` has {} texts and `text_2` {}: give one, or as many.",
            first.len(),
            second.len()
        );
        return Err(fields.invalid(&TEXT_1, message));
    }
    let ScorePrompts {
        prompts,
        pooling,
        scores,
    } = pairs(&fields, (&first, &second), [None, None], model)?;
    pooled_request(&fields, prompts, pooling, PooledAnswer::Scores(scores))
}

/// The prompts of the pairs of both sides' texts, for any model that scores. Names are those of the
/// sides' prompts in an embedding model, whose default prompt stands for one that it has not.
fn pairs(
    fields: &JsonFields,
    sides: (&PlacedTexts<'_>, &PlacedTexts<'_>),
    names: [Option<&str>; 2],
    model: &ModelText,
) -> Result<ScorePrompts, ApiError> {
    match model.task() {
        ModelTask::Rerank(_) => judged_pairs(fields, sides.0, sides.1, model),
        ModelTask::Embed(task) => {
            let prefixes = names.map(|name| task.prompt(name).or(task.prompt(None)).unwrap_or(""));
            embedded_pairs(fields, sides, prefixes, (task, model))
        }
        ModelTask::Generate => Err(cannot_score()),
    }
}

fn cannot_score() -> ApiError {
    ApiError::unsupported("model", "This model gives no scores.")
}

/// The prompts of a reranker, one for each pair. One query stands for all documents.
fn judged_pairs(
    fields: &JsonFields,
    queries: &PlacedTexts<'_>,
    documents: &PlacedTexts<'_>,
    model: &ModelText,
) -> Result<ScorePrompts, ApiError> {
    let tokens = model.rerank_tokens().ok_or_else(cannot_score)?;
    if fields.flag(&ADD_SPECIAL_TOKENS)?.is_some() {
        let message =
            "`add_special_tokens` is for embedding models; a reranker's prompt is complete.";
        return Err(fields.unsupported(&ADD_SPECIAL_TOKENS, message));
    }
    let instruction = fields.text(&INSTRUCTION)?;
    let instruction = instruction.as_deref().unwrap_or(RERANK_INSTRUCTION);
    let prompt = |(index, (path, document)): (usize, &(String, Cow<'_, str>))| {
        let (_, query) = queries.get(index).unwrap_or(&queries[0]);
        // Texts that cannot fit are refused before they are tokenized as a whole.
        for text in [query, document] {
            request::text::check_length(text, model, path)?;
        }
        let prompt = rerank_prompt(model.tokenizer(), instruction, query, document)
            .map_err(|error| ApiError::invalid(path, format!("`{path}`: {error}.")))?;
        check_prompt(&prompt, model, path).map(|()| prompt)
    };
    let prompts = documents.iter().enumerate().map(prompt);
    Ok(ScorePrompts {
        prompts: prompts.collect::<Result<_, _>>()?,
        pooling: Pooling::Logits([tokens.negative, tokens.positive].into()),
        scores: PairScores::Classified,
    })
}

/// The texts of both sides, each behind its prefix, and their pairs.
fn embedded_pairs(
    fields: &JsonFields,
    sides: (&PlacedTexts<'_>, &PlacedTexts<'_>),
    prefixes: [&str; 2],
    by: (&EmbedTask, &ModelText),
) -> Result<ScorePrompts, ApiError> {
    if fields.any(&INSTRUCTION).is_some() {
        let message = "`instruction` is for rerankers; an embedding model takes it in the query.";
        return Err(fields.unsupported(&INSTRUCTION, message));
    }
    let ((first, second), (task, model)) = (sides, by);
    let special = special_tokens(fields, &ADD_SPECIAL_TOKENS)?;
    let encoded = |texts: &PlacedTexts<'_>, prefix: &str| {
        let one = |(path, text): &(String, Cow<'_, str>)| {
            let tokens = encode_after(prefix, text, special, model, path)?;
            check_prompt(&tokens, model, path).map(|()| tokens)
        };
        texts.iter().map(one).collect::<Result<Vec<_>, ApiError>>()
    };
    let mut prompts = encoded(first, prefixes[0])?;
    prompts.extend(encoded(second, prefixes[1])?);
    let pair = |index: usize| (index.min(first.len() - 1), first.len() + index);
    Ok(ScorePrompts {
        prompts,
        pooling: task.pooling.clone(),
        scores: PairScores::Cosine((0..second.len()).map(pair).collect()),
    })
}

/// Reads the documents of a ranking.
fn documents<'a>(fields: &JsonFields<'a>) -> Result<PlacedTexts<'a>, ApiError> {
    let given = fields.any(&DOCUMENTS);
    let given = given.ok_or_else(|| fields.missing(&DOCUMENTS))?;
    let JsonShape::Array(items) = given.shape() else {
        return Err(wrong_type(DOCUMENTS.name(), "an array", given));
    };
    limit_list(DOCUMENTS.name(), items.clone().count(), TEXTS_MAX)?;
    let document = |(index, item): (usize, Json<'a>)| {
        let path = format!("{}[{index}]", DOCUMENTS.name());
        let text = match item.shape() {
            JsonShape::String(text) => text.get(),
            JsonShape::Object(_) => {
                let object = fields.object_at(path.clone(), item, &DOCUMENT_OBJECT)?;
                object.required_text(&DOCUMENT_TEXT)?
            }
            _ => return Err(wrong_type(&path, "a string or an object with a text", item)),
        };
        not_empty(path, text)
    };
    let documents: Result<PlacedTexts<'a>, ApiError> = items.enumerate().map(document).collect();
    match documents {
        Ok(documents) if documents.is_empty() => {
            Err(fields.invalid(&DOCUMENTS, "`documents` must not be an empty array."))
        }
        documents => documents,
    }
}

/// Reads one side of the pairs, under the one of its names that is given.
fn texts<'a>(
    fields: &JsonFields<'a>,
    names: [&RequestField<AnyValue>; 2],
) -> Result<PlacedTexts<'a>, ApiError> {
    if names.iter().all(|field| fields.any(field).is_some()) {
        let message = format!(
            "`{}` is another name of `{}`: give one of them.",
            names[1].name(),
            names[0].name()
        );
        return Err(fields.invalid(names[1], message));
    }
    let found = names
        .into_iter()
        .find_map(|field| Some((field, fields.any(field)?)));
    let (field, given) = found.ok_or_else(|| fields.missing(names[0]))?;
    let name = field.name();
    let items = match given.shape() {
        JsonShape::String(text) => return Ok(vec![not_empty(name.to_owned(), text.get())?]),
        JsonShape::Array(items) => items,
        _ => return Err(wrong_type(name, "a string or an array of strings", given)),
    };
    limit_list(name, items.clone().count(), TEXTS_MAX)?;
    let text = |(index, item): (usize, Json<'a>)| {
        let path = format!("{name}[{index}]");
        match item.shape() {
            JsonShape::String(text) => not_empty(path, text.get()),
            _ => Err(wrong_type(&path, "a string", item)),
        }
    };
    let texts: Result<PlacedTexts<'a>, ApiError> = items.enumerate().map(text).collect();
    match texts {
        Ok(texts) if texts.is_empty() => {
            Err(fields.invalid(field, format!("`{name}` must not be an empty array.")))
        }
        texts => texts,
    }
}

fn not_empty(path: String, text: Cow<'_, str>) -> Result<(String, Cow<'_, str>), ApiError> {
    if text.is_empty() {
        let message = format!("`{path}` must not be empty.");
        Err(ApiError::invalid(path, message))
    } else {
        Ok((path, text))
    }
}

fn rerank_answer(head: &AnswerHead, vectors: &[Arc<[f32]>], end: AnswerEnd) -> BodyParts {
    let Some(pooled) = head.facts.pooled.clone() else {
        return no_parts();
    };
    let PooledAnswer::Ranking(ranking) = &*pooled else {
        return no_parts();
    };
    let results = ranking.results(vectors);
    let mut rest = Map::new();
    rest.insert("id".into(), format!("rerank-{}", head.request_id).into());
    rest.insert("model".into(), head.model.name().into());
    insert_usage(&mut rest, end);
    answer_parts(rest, "results", results.len(), move |place, out| {
        let (index, score) = results[place];
        let mut result = json!({"index": index, "relevance_score": score});
        if let Some(text) = pooled.document(index) {
            result["document"] = json!({"text": text});
        }
        write_body(out, &result);
    })
}

fn score_answer(head: &AnswerHead, vectors: &[Arc<[f32]>], end: AnswerEnd) -> BodyParts {
    let Some(PooledAnswer::Scores(scores)) = head.facts.pooled.as_deref() else {
        return no_parts();
    };
    let scores = scores.of(vectors);
    let mut rest = Map::new();
    rest.insert("id".into(), format!("score-{}", head.request_id).into());
    rest.insert("object".into(), "list".into());
    rest.insert("created".into(), head.created.into());
    rest.insert("model".into(), head.model.name().into());
    insert_usage(&mut rest, end);
    answer_parts(rest, "data", scores.len(), move |index, out| {
        let entry = json!({"index": index, "object": "score", "score": scores[index]});
        write_body(out, &entry);
    })
}
