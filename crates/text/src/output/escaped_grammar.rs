//! The grammar of values whose texts are between escape marks.
//!
//! Owns: values by their schemas. Invariant: the reader makes JSON of a value that its schema
//! accepts.

use super::argument_grammar::{
    Argument, NOTES, allows_all, check_length, enumerated, listed, members, text_regex,
    value_schema,
};
use super::call_grammar::ArgumentRules;
use super::escaped_call::ESCAPE;
use super::lark_text::LarkText;
use super::tool_spec::resolved;
use cleave_grammar::{GrammarError, SchemaKeywords, json_expression};
use serde_json::{Map, Value, json};

/// Depth to which schemas of values are followed; a schema that refers to itself has no end.
const DEPTH_MAX: u32 = 32;
/// A key that no schema names.
const ANY_KEY: &str = "[A-Za-z_][A-Za-z0-9_]{0,63}";

/// The members of all arguments, without the braces around them.
///
/// # Errors
/// `Refused` with the part that cannot be enforced.
pub(super) fn escaped_arguments(
    lark: &mut LarkText<'_>,
    rules: &ArgumentRules<'_>,
) -> Result<String, GrammarError> {
    match &rules.schema {
        None => any_members(lark),
        Some(_) => {
            let arguments = listed(rules)?;
            written(lark, rules, &arguments, DEPTH_MAX)
        }
    }
}

fn written(
    lark: &mut LarkText<'_>,
    rules: &ArgumentRules<'_>,
    arguments: &[Argument<'_>],
    depth: u32,
) -> Result<String, GrammarError> {
    let mut expressions = Vec::new();
    for argument in arguments {
        let value = value(lark, rules, argument.schema, depth)?;
        let key = lark.literal(&format!("{}:", argument.name));
        expressions.push((format!("{key} {value}"), argument.is_required));
        check_length(rules, &expressions)?;
    }
    Ok(members(lark, "\",\"", &expressions))
}

fn value(
    lark: &mut LarkText<'_>,
    rules: &ArgumentRules<'_>,
    schema: &Value,
    depth: u32,
) -> Result<String, GrammarError> {
    let schema = resolved(schema, rules.schema.as_ref());
    let Some(depth) = depth.checked_sub(1).filter(|_| !lark.is_long()) else {
        return Err(rules.refused("its schema is too deep, or refers to itself"));
    };
    if let Some(values) = enumerated(schema) {
        let texts = values.iter().map(|value| written_value(lark, value));
        let texts: Vec<String> = texts.collect();
        return Ok(lark.one_of(&texts));
    }
    let alternatives = ["anyOf", "oneOf"]
        .iter()
        .find_map(|key| schema.get(*key)?.as_array());
    if let Some(schemas) = alternatives {
        let mut found = Vec::new();
        for schema in schemas {
            found.push(value(lark, rules, schema, depth)?);
        }
        return Ok(lark.rule(&found.join(" | ")));
    }
    match schema.get("type") {
        None if allows_all(schema) => any_value(lark),
        Some(Value::Array(names)) => {
            let mut found = Vec::new();
            for name in names {
                let mut one = schema.clone();
                one["type"] = name.clone();
                found.push(value(lark, rules, &one, depth)?);
            }
            Ok(lark.rule(&found.join(" | ")))
        }
        Some(Value::String(name)) => match name.as_str() {
            "string" => match text_regex(schema) {
                Ok(regex) => Ok(text(lark, &regex)),
                Err(keyword) => unsupported(lark, rules, &keyword),
            },
            "object" => object(lark, rules, schema, depth),
            "array" => array(lark, rules, schema, depth),
            _ => json_expression(&value_schema(rules, schema), rules.keywords),
        },
        Some(_) | None => unsupported(lark, rules, "a schema without `type`"),
    }
}

/// A part that cannot be enforced: an error, or any value.
fn unsupported(
    lark: &mut LarkText<'_>,
    rules: &ArgumentRules<'_>,
    keyword: &str,
) -> Result<String, GrammarError> {
    if rules.keywords == SchemaKeywords::All {
        let reason = format!("`{keyword}` is not supported where the model writes no JSON");
        return Err(rules.refused(&reason));
    }
    any_value(lark)
}

fn text(lark: &mut LarkText<'_>, regex: &str) -> String {
    let begin = lark.literal(ESCAPE);
    let text = lark.text_until(regex, &[ESCAPE], "", ESCAPE);
    format!("{begin} {text}")
}

fn object(
    lark: &mut LarkText<'_>,
    rules: &ArgumentRules<'_>,
    schema: &Value,
    depth: u32,
) -> Result<String, GrammarError> {
    let inside = if schema.get("properties").is_some() {
        let inner = ArgumentRules {
            schema: Some(value_schema(rules, schema)),
            keywords: rules.keywords,
            tool: rules.tool,
        };
        let arguments = listed(&inner)?;
        written(lark, &inner, &arguments, depth)?
    } else {
        any_members(lark)?
    };
    Ok(format!("\"{{\" {inside} \"}}\""))
}

fn array(
    lark: &mut LarkText<'_>,
    rules: &ArgumentRules<'_>,
    schema: &Value,
    depth: u32,
) -> Result<String, GrammarError> {
    let known = [
        "type",
        "items",
        "minItems",
        "maxItems",
        "$defs",
        "definitions",
    ];
    let mut keys = schema.as_object().into_iter().flat_map(Map::keys);
    let unknown = keys.find(|key| !known.contains(&key.as_str()) && !NOTES.contains(&key.as_str()));
    if let Some(keyword) = unknown {
        return unsupported(lark, rules, &keyword.clone());
    }
    let items = schema.get("items").unwrap_or(&Value::Bool(true));
    let item = value(lark, rules, items, depth)?;
    let item = lark.rule(&item);
    let count = |keyword: &str| schema.get(keyword).and_then(Value::as_u64);
    let low = count("minItems").unwrap_or(0);
    let high = count("maxItems");
    if high == Some(0) {
        return Ok("\"[\" \"]\"".to_owned());
    }
    let high = high.map_or(String::new(), |high| (high - 1).to_string());
    let more = format!("(\",\" {item}){{{},{high}}}", low.saturating_sub(1));
    let mark = if low == 0 { "?" } else { "" };
    Ok(format!("\"[\" ({item} {more}){mark} \"]\""))
}

/// The text of a value.
fn written_value(lark: &LarkText<'_>, value: &Value) -> String {
    fn write(value: &Value, out: &mut String) {
        match value {
            Value::String(text) => {
                *out += ESCAPE;
                *out += text;
                *out += ESCAPE;
            }
            Value::Array(items) => {
                out.push('[');
                for (nth, item) in items.iter().enumerate() {
                    *out += if nth == 0 { "" } else { "," };
                    write(item, out);
                }
                out.push(']');
            }
            Value::Object(members) => {
                out.push('{');
                for (nth, (name, item)) in members.iter().enumerate() {
                    *out += if nth == 0 { "" } else { "," };
                    *out += name;
                    out.push(':');
                    write(item, out);
                }
                out.push('}');
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => *out += &value.to_string(),
        }
    }
    let mut text = String::new();
    write(value, &mut text);
    lark.literal(&text)
}

fn any_members(lark: &mut LarkText<'_>) -> Result<String, GrammarError> {
    let value = any_value(lark)?;
    let member = lark.rule(&format!("/{ANY_KEY}/ \":\" {value}"));
    Ok(format!("({member} (\",\" {member})*)?"))
}

fn any_value(lark: &mut LarkText<'_>) -> Result<String, GrammarError> {
    let scalar = json!({"type": ["number", "boolean", "null"]});
    let scalar = json_expression(&scalar, SchemaKeywords::All)?;
    let text = text(lark, "(?s:.*)");
    Ok(lark.recursive(|name| {
        let member = format!("/{ANY_KEY}/ \":\" {name}");
        let object = format!("\"{{\" ({member} (\",\" {member})*)? \"}}\"");
        let list = format!("\"[\" ({name} (\",\" {name})*)? \"]\"");
        format!("{text} | {scalar} | {object} | {list}")
    }))
}
