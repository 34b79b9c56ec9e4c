//! The grammar of arguments that are written one by one, in tags or in Python's syntax.
//!
//! Owns: the order and the presence of arguments, and the form of each value.
//! Invariant: the reader makes JSON of a value that the value's schema accepts.

use super::call_grammar::ArgumentRules;
use super::lark_text::{BREAK, LarkText};
use super::pythonic_call::is_name;
use super::tagged_call::{TaggedForm, json_of};
use super::tool_spec::{ParameterKind, TypeSet, resolved};
use cleave_domain::GRAMMAR_BYTES_MAX;
use cleave_grammar::{GrammarError, SchemaKeywords, json_expression};
use serde_json::{Map, Value};

/// Keywords that change nothing that a value may be.
pub(super) const NOTES: [&str; 8] = [
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$id",
    "$comment",
    "deprecated",
];
/// Keywords beside [`NOTES`] that the schema of all arguments may have.
const OBJECT_KEYWORDS: [&str; 6] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
];
/// Members of a schema to which its parts refer.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// A key of an argument that no schema names.
const ANY_KEY: &str = "[A-Za-z_][A-Za-z0-9_]{0,63}";

/// An argument by its schema.
pub(super) struct Argument<'a> {
    pub(super) name: &'a str,
    pub(super) schema: &'a Value,
    pub(super) is_required: bool,
}

/// The arguments that a schema lists, in its order.
pub(super) fn listed<'a>(rules: &'a ArgumentRules<'_>) -> Result<Vec<Argument<'a>>, GrammarError> {
    let schema = rules.schema.as_ref().and_then(Value::as_object);
    let Some(schema) = schema else {
        return Ok(Vec::new());
    };
    let is_strict = rules.keywords == SchemaKeywords::All;
    let is_known =
        |key: &&String| NOTES.contains(&key.as_str()) || OBJECT_KEYWORDS.contains(&key.as_str());
    if let Some(keyword) = schema
        .keys()
        .find(|key| !is_known(key))
        .filter(|_| is_strict)
    {
        return Err(rules.refused(&format!(
            "`{keyword}` is not supported where the model writes arguments one by one"
        )));
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    let properties = properties.into_iter().flatten();
    let required = schema.get("required").and_then(Value::as_array);
    let required: Vec<&str> = required
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let arguments = properties.map(|(name, schema)| Argument {
        name,
        schema,
        is_required: required.contains(&name.as_str()),
    });
    let arguments: Vec<Argument<'a>> = arguments.collect();
    let is_listed = |name: &&&str| arguments.iter().any(|argument| argument.name == **name);
    if let Some(name) = required
        .iter()
        .find(|name| !is_listed(name))
        .filter(|_| is_strict)
    {
        return Err(rules.refused(&format!("`required` has {name:?}, which is no property")));
    }
    let is_plain = |name: &str| !name.is_empty() && name.chars().all(is_name);
    match arguments.iter().find(|argument| !is_plain(argument.name)) {
        Some(Argument { name, .. }) => Err(rules.refused(&format!(
            "the name {name:?} has other characters than letters, digits, `_`, `-` and `.`"
        ))),
        None => Ok(arguments),
    }
}

/// The schema of a value, with the definitions of the whole.
pub(super) fn value_schema(rules: &ArgumentRules<'_>, schema: &Value) -> Value {
    let mut members = match schema {
        Value::Object(members) => members.clone(),
        Value::Bool(false) => return schema.clone(),
        _ => Map::new(),
    };
    let whole = rules.schema.as_ref().and_then(Value::as_object);
    for name in DEFINITIONS {
        if let Some(definitions) = whole.and_then(|whole| whole.get(name)) {
            members.insert(name.to_owned(), definitions.clone());
        }
    }
    Value::Object(members)
}

/// Arguments in Python's syntax, each value as JSON.
pub(super) fn pythonic_arguments(
    lark: &mut LarkText<'_>,
    rules: &ArgumentRules<'_>,
) -> Result<String, GrammarError> {
    let Some(whole) = &rules.schema else {
        let any = json_expression(&Value::Bool(true), SchemaKeywords::All)?;
        let argument = lark.rule(&format!("/{ANY_KEY}/ \"=\" {any}"));
        return Ok(format!("({argument} (\", \" {argument})*)?"));
    };
    debug_assert!(whole.is_object());
    let mut expressions = Vec::new();
    for argument in listed(rules)? {
        let json = json_expression(&value_schema(rules, argument.schema), rules.keywords)?;
        let text = lark.literal(&format!("{}=", argument.name));
        expressions.push((format!("{text} {json}"), argument.is_required));
        check_length(rules, &expressions)?;
    }
    Ok(members(lark, "\", \"", &expressions))
}

/// Refuses arguments that are longer than any grammar: each has a copy of the definitions.
pub(super) fn check_length(
    rules: &ArgumentRules<'_>,
    arguments: &[(String, bool)],
) -> Result<(), GrammarError> {
    let bytes: usize = arguments.iter().map(|(text, _)| text.len()).sum();
    if bytes > GRAMMAR_BYTES_MAX {
        return Err(rules.refused("its arguments with their definitions are too long"));
    }
    Ok(())
}

/// Members in order, with a separator between them; each may be left out that is not required.
pub(super) fn members(
    lark: &mut LarkText<'_>,
    separator: &str,
    members: &[(String, bool)],
) -> String {
    // From the last member on: a rule for the rest behind another member, and one for the rest in
    // front, which has no separator.
    let (mut behind, mut front) = (String::new(), String::new());
    for (member, is_required) in members.iter().rev() {
        let member = lark.rule(member);
        let begun = format!("{member} {behind}");
        let follows = format!("{separator} {begun}");
        let (next_front, next_behind) = if *is_required {
            (begun, follows)
        } else {
            (
                format!("{begun} | {front}"),
                format!("{follows} | {behind}"),
            )
        };
        (front, behind) = (lark.rule(&next_front), lark.rule(&next_behind));
    }
    front
}

/// Arguments between tags, each in a line of its own where the model writes it so.
pub(super) fn tagged_arguments(
    lark: &mut LarkText<'_>,
    form: &'static TaggedForm,
    rules: &ArgumentRules<'_>,
) -> Result<String, GrammarError> {
    if rules.schema.is_none() {
        let begin = lark.literal(form.key_begin);
        let (end, value) = (key_end(lark, form, None), free_text(lark, form, "(?s:.*)"));
        let argument = lark.rule(&format!("{BREAK} {begin} /{ANY_KEY}/ {end} {value}"));
        return Ok(format!("{argument}*"));
    }
    let mut arguments = Vec::new();
    for argument in listed(rules)? {
        let kind = ParameterKind::of(argument.schema, rules.schema.as_ref());
        let (value, is_text) = tagged_value(lark, form, rules, &argument, kind)?;
        let begin = lark.literal(&format!("{}{}", form.key_begin, argument.name));
        let end = key_end(lark, form, Some(is_text));
        let written = lark.rule(&format!("{BREAK} {begin} {end} {value}"));
        if lark.is_long() {
            return Err(rules.refused("its arguments with their definitions are too long"));
        }
        let mark = if argument.is_required { "" } else { "?" };
        arguments.push(format!("{written}{mark}"));
    }
    Ok(arguments.join(" "))
}

/// The end of a key, and the mark of its value. A format may say whether the value is a text.
fn key_end(lark: &LarkText<'_>, form: &TaggedForm, is_text: Option<bool>) -> String {
    let end = match (form.text_attribute, is_text) {
        ("", _) => lark.literal(form.key_end),
        (attribute, Some(is_text)) => {
            lark.literal(&format!("{attribute}{is_text}{}", form.key_end))
        }
        (attribute, None) => {
            let (attribute, end) = (lark.literal(attribute), lark.literal(form.key_end));
            format!("{attribute} (\"true\" | \"false\") {end}")
        }
    };
    if form.value_begin.is_empty() {
        return end;
    }
    format!("{end} {BREAK} {}", lark.literal(form.value_begin))
}

/// A text up to the mark of a value's end, of which the expression matches what is read.
fn free_text(lark: &mut LarkText<'_>, form: &TaggedForm, regex: &str) -> String {
    let regex = if form.has_lines {
        format!(r"\n{regex}\n")
    } else {
        regex.to_owned()
    };
    lark.text_until(&regex, &[form.value_end], "", form.value_end)
}

/// A value and its end, and whether it is written as a text.
fn tagged_value(
    lark: &mut LarkText<'_>,
    form: &TaggedForm,
    rules: &ArgumentRules<'_>,
    argument: &Argument<'_>,
    kind: ParameterKind,
) -> Result<(String, bool), GrammarError> {
    let schema = resolved(argument.schema, rules.schema.as_ref());
    let is_strict = rules.keywords == SchemaKeywords::All;
    if let Some(values) = enumerated(schema) {
        return listed_values(lark, form, &values, kind).ok_or_else(|| {
            rules.refused(&format!(
                "a value of {:?} would be read as another one",
                argument.name
            ))
        });
    }
    let is_text = matches!(kind, ParameterKind::Text | ParameterKind::TextOrNull);
    if is_text || allows_all(schema) {
        let regex = text_regex(schema);
        return match regex {
            Ok(regex) => Ok((free_text(lark, form, &regex), is_text)),
            Err(_) if !is_strict => Ok((free_text(lark, form, "(?s:.*)"), true)),
            Err(keyword) => Err(rules.refused(&format!(
                "`{keyword}` of {:?} is not supported where the model writes texts without quotes",
                argument.name
            ))),
        };
    }
    if may_be_text(schema, rules.schema.as_ref()) {
        if is_strict {
            return Err(rules.refused(&format!(
                "{:?} may be a string or something else, which the model's format does not tell apart",
                argument.name
            )));
        }
        return Ok((free_text(lark, form, "(?s:.*)"), false));
    }
    let json = json_expression(&value_schema(rules, argument.schema), rules.keywords)?;
    let line = if form.has_lines { "\"\\n\"" } else { "" };
    let end = lark.literal(form.value_end);
    Ok((format!("{line} {json} {line} {end}"), false))
}

/// Whether a schema says nothing about its values.
pub(super) fn allows_all(schema: &Value) -> bool {
    let mut keys = schema.as_object().into_iter().flat_map(Map::keys);
    *schema != Value::Bool(false) && keys.all(|key| NOTES.contains(&key.as_str()))
}

/// The values of `enum` or `const`.
pub(super) fn enumerated(schema: &Value) -> Option<Vec<Value>> {
    match (schema.get("enum"), schema.get("const")) {
        (_, Some(value)) => Some(vec![value.clone()]),
        (Some(Value::Array(values)), None) => Some(values.clone()),
        _ => None,
    }
}

/// The texts of these values; `None` if one of them would be read as another value.
fn listed_values(
    lark: &LarkText<'_>,
    form: &TaggedForm,
    values: &[Value],
    kind: ParameterKind,
) -> Option<(String, bool)> {
    // A format that marks texts has one mark for all values.
    let are_texts = values.iter().all(Value::is_string);
    let kind = match (form.text_attribute, are_texts) {
        ("", _) => kind,
        (_, true) => ParameterKind::Text,
        (_, false) => ParameterKind::Json,
    };
    let text = |value: &Value| {
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        let is_same = serde_json::from_str::<Value>(&json_of(&text, kind)).ok()? == *value;
        let is_whole = is_same && !text.contains(form.value_end);
        is_whole.then_some(text)
    };
    let texts: Option<Vec<String>> = values.iter().map(text).collect();
    let line = if form.has_lines { "\n" } else { "" };
    let literal = |text: &String| lark.literal(&format!("{line}{text}{line}{}", form.value_end));
    let literals: Vec<String> = texts?.iter().map(literal).collect();
    (!literals.is_empty()).then(|| (format!("({})", literals.join(" | ")), are_texts))
}

/// The regular expression of a text, or the keyword that it cannot express.
pub(super) fn text_regex(schema: &Value) -> Result<String, String> {
    let members = schema.as_object().into_iter().flatten();
    let (mut low, mut high) = (0, String::new());
    for (keyword, value) in members {
        match (keyword.as_str(), value.as_u64()) {
            ("minLength", Some(length)) => low = length,
            ("maxLength", Some(length)) => high = length.to_string(),
            ("type" | "$defs" | "definitions", _) => {}
            (note, _) if NOTES.contains(&note) => {}
            ("anyOf" | "oneOf", _) if has_plain_alternatives(value) => {}
            _ => return Err(keyword.clone()),
        }
    }
    Ok(match (low, &*high) {
        (0, "") => "(?s:.*)".to_owned(),
        _ => format!("(?s:.{{{low},{high}}})"),
    })
}

/// Whether alternatives say nothing but their types: any text, or `null`.
fn has_plain_alternatives(alternatives: &Value) -> bool {
    let is_plain = |schema: &Value| {
        let mut keys = schema.as_object().into_iter().flat_map(Map::keys);
        keys.all(|key| key == "type" || NOTES.contains(&key.as_str()))
    };
    let alternatives = alternatives.as_array();
    alternatives.is_some_and(|schemas| schemas.iter().all(is_plain))
}

/// Whether a value of a schema may be a text.
fn may_be_text(schema: &Value, whole: Option<&Value>) -> bool {
    TypeSet::of(schema, whole).has_text()
}
