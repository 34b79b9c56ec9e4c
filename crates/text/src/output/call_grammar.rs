//! The grammar of calls between marks, from the description that the reader has.
//!
//! Owns: frames, names and argument objects of calls. Never: knows what surrounds the calls (see
//! `output_grammar`).
//! Invariant: a text of the grammar is read as calls of these tools, and as nothing else.

use super::argument_grammar::{pythonic_arguments, tagged_arguments};
use super::calls::{CallForm, CallFormat, NAMED_OBJECT, ObjectForm};
use super::escaped_call::PREFIX;
use super::escaped_grammar::escaped_arguments;
use super::lark_text::{BREAK, LarkText};
use super::named_call::{CallId, NamedForm};
use super::output_grammar::{CallRules, CallableTool};
use super::pythonic_call::is_name;
use super::tagged_call::TaggedForm;
use cleave_grammar::{GrammarError, SchemaKeywords, json_expression};
use serde_json::{Value, json};

/// The grammar of one or several calls of a format.
pub(super) struct FramedCalls {
    /// The mark behind which the calls come, if text precedes them.
    pub(super) mark: &'static str,
    /// Expression of the calls behind that mark; where it is left out, behind nothing.
    pub(super) calls: String,
}

/// The grammar of calls in a format.
///
/// # Errors
/// `Refused` with the tool's part that cannot be enforced.
pub(super) fn framed_calls(
    lark: &mut LarkText<'_>,
    format: &'static CallFormat,
    rules: &CallRules<'_>,
) -> Result<FramedCalls, GrammarError> {
    let mut tools = Vec::new();
    for tool in rules.tools {
        let inside = inside(lark, format, tool, rules)?;
        tools.push(lark.rule(&inside));
    }
    let call = lark.one_of(&tools);
    let call = format!("{BREAK} {call} {BREAK} {}", lark.literal(format.call_end));
    let call = lark.rule(&call);
    let several = |lark: &mut LarkText<'_>, between: &str, call: &str| {
        if rules.is_single {
            call.to_owned()
        } else {
            lark.rule(&format!("{call} ({between} {call})*"))
        }
    };
    let (group_begin, call_begin) = (
        lark.literal(format.group_begin),
        lark.literal(format.call_begin),
    );
    let group_end = lark.literal(format.group_end);
    let separator = format!("{BREAK} {} \" \"?", lark.literal(format.separator));
    // Mistral's newer models write a name instead of a list.
    let is_named =
        matches!(&format.form, CallForm::ObjectOrNamed(form) if lark.is_token(form.separator));
    let is_list = format.writes_list && !is_named;
    let (mark, calls) = match (format.group_begin, format.call_begin) {
        ("", mark) => (mark, several(lark, &format!("{BREAK} {call_begin}"), &call)),
        (mark, "") if is_list => {
            let calls = several(lark, &separator, &call);
            let end = if group_end.is_empty() {
                String::new()
            } else {
                format!("({group_end})?")
            };
            (mark, format!("{BREAK} \"[\" {calls} \"]\" {BREAK} {end}"))
        }
        (mark, "") if matches!(format.form, CallForm::ObjectOrNamed(_)) => {
            (mark, several(lark, &group_begin, &call))
        }
        (mark, "") => (mark, several(lark, &separator, &call)),
        (mark, _) => {
            let call = format!("{BREAK} {call_begin} {call}");
            let calls = several(lark, "", &call);
            (mark, format!("{calls} {BREAK} {group_end}"))
        }
    };
    Ok(FramedCalls { mark, calls })
}

/// The expression of a tool's arguments as JSON.
///
/// # Errors
/// `Refused` with the part that cannot be enforced.
pub(super) fn arguments_of(
    tool: &CallableTool,
    rules: &CallRules<'_>,
) -> Result<String, GrammarError> {
    ArgumentRules::of(tool, rules)?.json()
}

/// The inside of a tool's call.
fn inside(
    lark: &mut LarkText<'_>,
    format: &'static CallFormat,
    tool: &CallableTool,
    rules: &CallRules<'_>,
) -> Result<String, GrammarError> {
    let name = &tool.name;
    let arguments = ArgumentRules::of(tool, rules)?;
    let is_named = |form: &NamedForm| lark.is_token(form.separator);
    match &format.form {
        CallForm::Object(form) => object(lark, form, name, &arguments),
        CallForm::ObjectOrNamed(form) if !is_named(form) => {
            object(lark, &NAMED_OBJECT, name, &arguments)
        }
        CallForm::Named(form) | CallForm::ObjectOrNamed(form) => {
            let separator = lark.literal(form.separator);
            let json = arguments.json()?;
            let head = match form.id {
                CallId::Whole => format!(
                    "{} /[0-9]{{1,3}}/",
                    lark.literal(&format!("{}{name}:", form.prefix))
                ),
                CallId::Absent | CallId::Behind(_) => {
                    lark.literal(&format!("{}{name}", form.prefix))
                }
            };
            Ok(format!("{head} {separator} {json}"))
        }
        CallForm::Tagged(form) => tagged(lark, form, name, &arguments),
        CallForm::Escaped => {
            let begin = lark.literal(&format!("{PREFIX}{name}{{"));
            let inside = escaped_arguments(lark, &arguments)?;
            Ok(format!("{begin} {inside} \"}}\""))
        }
        CallForm::Pythonic => {
            let begin = lark.literal(&format!("{name}("));
            let inside = pythonic_arguments(lark, &arguments)?;
            Ok(format!("{begin} {inside} \")\""))
        }
    }
}

fn object(
    lark: &LarkText<'_>,
    form: &ObjectForm,
    name: &str,
    arguments: &ArgumentRules<'_>,
) -> Result<String, GrammarError> {
    let ObjectForm {
        number,
        name: name_key,
        arguments: arguments_key,
    } = form;
    let named = format!("\"{name_key}\": \"{name}\", \"{arguments_key}\": ");
    let begin = if number.is_empty() {
        lark.literal(&format!("{{{named}"))
    } else {
        let number = lark.literal(&format!("{{\"{number}\": \""));
        format!(
            "{number} /[0-9]{{1,3}}/ {}",
            lark.literal(&format!("\", {named}"))
        )
    };
    Ok(format!("{begin} {} \"}}\"", arguments.json()?))
}

fn tagged(
    lark: &mut LarkText<'_>,
    form: &'static TaggedForm,
    name: &str,
    arguments: &ArgumentRules<'_>,
) -> Result<String, GrammarError> {
    let begin = lark.literal(&format!("{name}{}", form.name_end));
    let inside = tagged_arguments(lark, form, arguments)?;
    let end = lark.literal(form.call_end);
    Ok(format!("{begin} {BREAK} {inside} {BREAK} {end}"))
}

/// The form of the arguments of a tool's calls.
pub(super) struct ArgumentRules<'a> {
    /// JSON Schema of an object; `None` allows any object.
    pub(super) schema: Option<Value>,
    pub(super) keywords: SchemaKeywords,
    pub(super) tool: &'a str,
}

impl<'a> ArgumentRules<'a> {
    fn of(tool: &'a CallableTool, rules: &CallRules<'_>) -> Result<Self, GrammarError> {
        let keywords = if tool.is_strict {
            SchemaKeywords::All
        } else {
            SchemaKeywords::Known
        };
        let mut allowed = Self {
            schema: None,
            keywords,
            tool: &tool.name,
        };
        let name = &tool.name;
        if name.is_empty() || !name.chars().all(|c| c.is_ascii() && is_name(c)) {
            let reason = "its name has other characters than letters, digits, `_`, `-` and `.`";
            return Err(allowed.refused(reason));
        }
        let is_exact = tool.is_strict || rules.are_required;
        if !is_exact {
            return Ok(allowed);
        }
        let none = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        let mut schema = tool.schema.clone().unwrap_or_else(none);
        let Value::Object(members) = &mut schema else {
            return Err(allowed.refused("its parameters are no object"));
        };
        let kind = members.entry("type").or_insert_with(|| "object".into());
        if kind != "object" {
            return Err(allowed.refused("its parameters are of another `type` than \"object\""));
        }
        allowed.schema = Some(schema);
        Ok(allowed)
    }

    /// The expression of the arguments as JSON.
    fn json(&self) -> Result<String, GrammarError> {
        match &self.schema {
            Some(schema) => json_expression(schema, self.keywords),
            None => json_expression(&json!({"type": "object"}), SchemaKeywords::All),
        }
    }

    /// An error of the tool.
    pub(super) fn refused(&self, reason: &str) -> GrammarError {
        GrammarError::Refused(format!("tool {:?}: {reason}", self.tool))
    }
}
