//! Constraints on the output, by the fields of OpenAI, vLLM and SGLang.
//!
//! Owns: their declarations and their reader. Never: judges a grammar (see `constraint_check`).
//! Invariant: a request has one constraint at most.

use super::sampling::IGNORE_EOS;
use crate::error::ApiError;
use crate::field::{
    AnyValue, FlagValue, JsonFields, ListShape, MapKeys, MapShape, ObjectSpec, RefusedField,
    RequestField, TextShape, ValueShape, any, check_bytes, clipped, flag, list, object,
    request_fields, request_object, text as text_field, text_value, wrong_type,
};
use cleave_domain::{Constraint, ConstraintEnd, GRAMMAR_BYTES_MAX, Grammar};
use cleave_text::json::JsonShape;
use std::borrow::Cow;
use std::sync::Arc;

/// Limit of the texts of a choice.
const TEXTS_MAX: usize = 1024;
/// The schema of `json_object`.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

const GRAMMAR_TEXT: TextShape = TextShape {
    bytes_max: Some(GRAMMAR_BYTES_MAX),
    ..TextShape::NOT_EMPTY
};
const SCHEMA_TEXT: TextShape = TextShape {
    is_json: true,
    ..GRAMMAR_TEXT
};
const SCHEMA_OBJECT: MapShape = MapShape {
    keys: MapKeys::Any,
    values: &ValueShape::Any,
    count_max: None,
};
/// A JSON Schema, as an object or as its text.
const SCHEMA: ValueShape = ValueShape::OneOf(&[
    ValueShape::Map(SCHEMA_OBJECT),
    ValueShape::Text(SCHEMA_TEXT),
]);
const TEXTS: ListShape = ListShape::of(&ValueShape::Text(GRAMMAR_TEXT))
    .at_least(1)
    .at_most(TEXTS_MAX);

request_fields! {
    /// Fields that constrain the output; a request has one of them at most.
    pub(crate) CONSTRAINT_FIELDS {
        RESPONSE_FORMAT: &'static ObjectSpec = object(
            "response_format",
            &RESPONSE_FORMAT_OBJECT,
            "Form of the output, as in OpenAI's API.",
        ).default("text");
        STRUCTURED_OUTPUTS: &'static ObjectSpec = object(
            "structured_outputs",
            &STRUCTURED_OUTPUTS_OBJECT,
            "What the output is to match, as in vLLM; one of its fields.",
        );
        GUIDED_JSON: AnyValue =
            any("guided_json", SCHEMA, "The older name of `structured_outputs.json`.");
        GUIDED_REGEX: TextShape =
            text_field("guided_regex", GRAMMAR_TEXT, "The older name of `structured_outputs.regex`.");
        GUIDED_CHOICE: ListShape =
            list("guided_choice", TEXTS, "The older name of `structured_outputs.choice`.");
        GUIDED_GRAMMAR: TextShape = text_field(
            "guided_grammar",
            GRAMMAR_TEXT,
            "The older name of `structured_outputs.grammar`.",
        );
        JSON_SCHEMA: AnyValue =
            any("json_schema", SCHEMA, "SGLang's name of `structured_outputs.json`.");
        REGEX: TextShape =
            text_field("regex", GRAMMAR_TEXT, "SGLang's name of `structured_outputs.regex`.");
    }
}

request_fields! {
    RESPONSE_FORMAT_FIELDS {
        FORMAT_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&["text", "json_object", "json_schema"]),
            "Any text, any JSON object, or JSON by a schema.",
        ).required();
        FORMAT_SCHEMA: &'static ObjectSpec = object(
            "json_schema",
            &FORMAT_SCHEMA_OBJECT,
            "The schema; only, and always, with the type `json_schema`.",
        );
    }
}

request_fields! {
    FORMAT_SCHEMA_FIELDS {
        SCHEMA_NAME: TextShape =
            text_field("name", TextShape::ANY, "A name for people; it changes nothing.");
        SCHEMA_ITSELF: AnyValue =
            any("schema", ValueShape::Map(SCHEMA_OBJECT), "The JSON Schema.").required();
        STRICT: FlagValue = flag(
            "strict",
            "Changes nothing: every schema is enforced, and one that cannot be is a 400.",
        );
    }
}

request_fields! {
    STRUCTURED_OUTPUTS_FIELDS {
        OUTPUT_JSON: AnyValue = any("json", SCHEMA, "A JSON Schema: the output is JSON that it accepts.");
        OUTPUT_REGEX: TextShape = text_field(
            "regex",
            GRAMMAR_TEXT,
            "A regular expression that the whole output matches, in the syntax of Rust's `regex`.",
        );
        OUTPUT_CHOICE: ListShape = list("choice", TEXTS, "The output is one of these texts.");
        OUTPUT_GRAMMAR: TextShape = text_field(
            "grammar",
            GRAMMAR_TEXT,
            "A context-free grammar in Lark's syntax, with the rule `start`.",
        );
        OUTPUT_OBJECT: FlagValue = flag("json_object", "The output is a JSON object.");
    }
}

const RESPONSE_FORMAT_OBJECT: ObjectSpec =
    request_object!("ResponseFormat", &[&[RESPONSE_FORMAT_FIELDS]]);
const FORMAT_SCHEMA_OBJECT: ObjectSpec = request_object!("", &[&[FORMAT_SCHEMA_FIELDS]]);
const STRUCTURED_OUTPUTS_OBJECT: ObjectSpec = request_object!(
    "StructuredOutputs",
    &[&[STRUCTURED_OUTPUTS_FIELDS]],
    &[OF_VLLM]
);

/// Options of vLLM that would change what matches.
const OF_VLLM: &[RefusedField] = &[
    RefusedField::new("structural_tag", "an output has one grammar from its start"),
    RefusedField::new("whitespace_pattern", WHITESPACE),
    RefusedField::new("disable_any_whitespace", WHITESPACE),
    RefusedField::new(
        "disable_additional_properties",
        "the schema says which properties it allows",
    ),
];
const WHITESPACE: &str = "JSON has at most 64 characters of whitespace at a place";

/// The constraint of a request, and the path of its field.
#[derive(Clone, Debug)]
pub(crate) struct FieldConstraint {
    pub(crate) path: String,
    pub(crate) constraint: Arc<Constraint>,
    /// The constraint on the content, if that is a part of the output only: the check of the whole
    /// sees no more of it than how the output begins.
    pub(crate) content: Option<Box<FieldConstraint>>,
}

/// Reads whichever field constrains the output; two are an error.
pub(crate) fn constraint(fields: &JsonFields) -> Result<Option<FieldConstraint>, ApiError> {
    let mut found = Vec::new();
    found.extend(response_format(fields)?);
    if let Some(outputs) = fields.object(&STRUCTURED_OUTPUTS)? {
        outputs.check_refused()?;
        found.extend(schema(&outputs, &OUTPUT_JSON)?);
        found.extend(text(&outputs, &OUTPUT_REGEX, Grammar::Regex)?);
        found.extend(choice(&outputs, &OUTPUT_CHOICE)?);
        found.extend(text(&outputs, &OUTPUT_GRAMMAR, Grammar::Lark)?);
        if outputs.flag(&OUTPUT_OBJECT)?.unwrap_or(false) {
            found.push((outputs.path_of(&OUTPUT_OBJECT), any_object()));
        }
    }
    found.extend(schema(fields, &GUIDED_JSON)?);
    found.extend(text(fields, &GUIDED_REGEX, Grammar::Regex)?);
    found.extend(choice(fields, &GUIDED_CHOICE)?);
    found.extend(text(fields, &GUIDED_GRAMMAR, Grammar::Lark)?);
    found.extend(schema(fields, &JSON_SCHEMA)?);
    found.extend(text(fields, &REGEX, Grammar::Regex)?);
    let mut found = found.into_iter();
    let Some((path, grammar)) = found.next() else {
        return Ok(None);
    };
    if let Some((other, _)) = found.next() {
        let message = format!("`{other}` excludes `{path}`: an output has one constraint.");
        return Err(ApiError::invalid(other, message));
    }
    FieldConstraint::of(fields, path, grammar).map(Some)
}

impl FieldConstraint {
    /// The constraint of the field at a path, which ends as the request's outputs do.
    pub(crate) fn of(
        fields: &JsonFields,
        path: String,
        grammar: Grammar,
    ) -> Result<Self, ApiError> {
        let end = match fields.flag(&IGNORE_EOS)? {
            Some(true) => ConstraintEnd::Forced,
            Some(false) | None => ConstraintEnd::Allowed,
        };
        let constraint = Arc::new(Constraint { grammar, end });
        Ok(Self {
            path,
            constraint,
            content: None,
        })
    }
}

/// A grammar, and the path of its field.
type FieldGrammar = (String, Grammar);

fn any_object() -> Grammar {
    Grammar::JsonSchema(ANY_OBJECT.into())
}

fn response_format(fields: &JsonFields) -> Result<Option<FieldGrammar>, ApiError> {
    let Some(format) = fields.object(&RESPONSE_FORMAT)? else {
        return Ok(None);
    };
    let kind = format.required_text(&FORMAT_TYPE)?;
    if &*kind != "json_schema"
        && let Some(stray) = format.object(&FORMAT_SCHEMA)?.map(|_| &FORMAT_SCHEMA)
    {
        let message = "`response_format.json_schema` needs the type \"json_schema\".";
        return Err(format.invalid(stray, message));
    }
    match &*kind {
        "text" => Ok(None),
        "json_object" => Ok(Some((fields.path_of(&RESPONSE_FORMAT), any_object()))),
        "json_schema" => {
            let given = format.object(&FORMAT_SCHEMA)?;
            let given = given.ok_or_else(|| format.missing(&FORMAT_SCHEMA))?;
            given.text(&SCHEMA_NAME)?;
            given.flag(&STRICT)?;
            let found = schema(&given, &SCHEMA_ITSELF)?;
            found.ok_or_else(|| given.missing(&SCHEMA_ITSELF)).map(Some)
        }
        other => Err(fields.unsupported(
            &RESPONSE_FORMAT,
            format!(
                "`response_format` of type {:?} is not supported.",
                clipped(other)
            ),
        )),
    }
}

/// Reads a schema, which is an object or its text.
fn schema(
    fields: &JsonFields,
    field: &RequestField<AnyValue>,
) -> Result<Option<FieldGrammar>, ApiError> {
    let Some(given) = fields.any(field) else {
        return Ok(None);
    };
    let path = fields.path_of(field);
    let schema = match given.shape() {
        JsonShape::Object(_) => {
            let text = given.text();
            check_bytes(|| path.clone(), text, GRAMMAR_BYTES_MAX)?;
            Cow::Borrowed(text)
        }
        JsonShape::String(_) => text_value(|| path.clone(), given, SCHEMA_TEXT)?,
        _ => return Err(wrong_type(&path, "a JSON Schema or its text", given)),
    };
    Ok(Some((path, Grammar::JsonSchema(schema.into()))))
}

fn text(
    fields: &JsonFields,
    field: &RequestField<TextShape>,
    grammar: fn(Arc<str>) -> Grammar,
) -> Result<Option<FieldGrammar>, ApiError> {
    let given = fields.text(field)?;
    Ok(given.map(|text| (fields.path_of(field), grammar(text.into()))))
}

fn choice(
    fields: &JsonFields,
    field: &RequestField<ListShape>,
) -> Result<Option<FieldGrammar>, ApiError> {
    let Some(items) = fields.list(field)? else {
        return Ok(None);
    };
    let path = fields.path_of(field);
    let read = |(index, item)| {
        let path = || format!("{path}[{index}]");
        text_value(path, item, GRAMMAR_TEXT).map(Cow::into_owned)
    };
    let (mut texts, mut bytes) = (Vec::new(), 0);
    for item in items.enumerate() {
        let text = read(item)?;
        bytes += text.len() + 1;
        if bytes > GRAMMAR_BYTES_MAX {
            break;
        }
        texts.push(text);
    }
    if bytes > GRAMMAR_BYTES_MAX {
        let message = format!("`{path}` has more than {GRAMMAR_BYTES_MAX} bytes of texts.");
        return Err(ApiError::invalid(path, message));
    }
    if texts.is_empty() {
        let message = format!("`{path}` must not be empty.");
        return Err(ApiError::invalid(path, message));
    }
    Ok(Some((path, Grammar::Choice(texts.into()))))
}
