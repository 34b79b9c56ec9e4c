//! Custom tools, which are called with a text instead of arguments.
//!
//! Owns: their conversion into functions with one text, `input`, and the limits of their grammars.
//! Never: knows where an API writes a tool's parts. Invariant: the text of a call matches the
//! grammar of its tool, or the tool is not converted.

use super::chat_body::ChatTool;
use crate::error::ApiError;
use crate::field::{JsonFields, TextShape, clipped, request_fields, text as text_field};
use cleave_grammar::regex_of_lark;
use serde_json::json;

/// Limit of the custom tools of a request, that of OpenAI: each has a schema that its body has not.
const CUSTOM_TOOLS_MAX: usize = 128;
/// Limit of the expressions of all custom tools of a request together, in bytes.
const EXPRESSIONS_BYTES_MAX: usize = 64 << 10;

const TEXT: &str = "text";
const GRAMMAR: &str = "grammar";
const LARK: &str = "lark";
const REGEX: &str = "regex";

request_fields! {
    pub(super) FORMAT_KIND_FIELDS {
        FORMAT_KIND: TextShape =
            text_field("type", TextShape::one_of(&[TEXT, GRAMMAR]), "Any text, or one of a grammar.")
                .required();
    }
}

request_fields! {
    pub(super) GRAMMAR_FIELDS {
        GRAMMAR_SYNTAX: TextShape = text_field(
            "syntax",
            TextShape::one_of(&[LARK, REGEX]),
            "Syntax of `definition`. The grammar is enforced. In Lark it must be regular: without recursion, `%ignore` and other imports than common ones.",
        );
        GRAMMAR_DEFINITION: TextShape =
            text_field("definition", TextShape::ANY, "The grammar.");
    }
}

/// The custom tools of a request that were converted.
#[derive(Clone, Debug, Default)]
pub(super) struct CustomTools {
    count: usize,
    expressions_bytes: usize,
}

/// A custom tool, as an API describes it.
pub(super) struct CustomTool<'a> {
    pub(super) name: &'a str,
    pub(super) description: Option<&'a str>,
    /// The object with the fields of its grammar, if it has one.
    pub(super) grammar: Option<JsonFields<'a>>,
}

/// The function that stands for a custom tool.
pub(super) enum ConvertedTool {
    Function(ChatTool<'static>),
    /// Its grammar cannot be enforced, for this reason.
    Unenforced(String),
}

/// Whether the format of a custom tool is a grammar.
pub(super) fn has_grammar(format: &JsonFields<'_>) -> Result<bool, ApiError> {
    match &*format.required_text(&FORMAT_KIND)? {
        TEXT => Ok(false),
        GRAMMAR => Ok(true),
        other => {
            let message = format!("A format of the type {:?} is not known.", clipped(other));
            Err(format.invalid(&FORMAT_KIND, message))
        }
    }
}

impl CustomTools {
    /// Converts a tool. `path` is its path in the body.
    pub(super) fn convert(
        &mut self,
        path: &str,
        tool: &CustomTool<'_>,
    ) -> Result<ConvertedTool, ApiError> {
        if self.count == CUSTOM_TOOLS_MAX {
            let message = format!("More than {CUSTOM_TOOLS_MAX} custom tools.");
            return Err(ApiError::invalid(path, message));
        }
        let CustomTool {
            name,
            description,
            grammar,
        } = tool;
        let mut description = description.unwrap_or_default().to_owned();
        let mut input = json!({"type": "string"});
        if let Some(grammar) = grammar {
            let syntax = grammar.required_text(&GRAMMAR_SYNTAX)?;
            let definition = grammar.required_text(&GRAMMAR_DEFINITION)?;
            let room = EXPRESSIONS_BYTES_MAX - self.expressions_bytes;
            let regex = match &*syntax {
                REGEX => Ok(definition.clone().into_owned()),
                LARK => regex_of_lark(&definition, room),
                other => {
                    let message = format!("The syntax {:?} is not known.", clipped(other));
                    return Err(grammar.invalid(&GRAMMAR_SYNTAX, message));
                }
            };
            let regex = match regex {
                Ok(regex) if regex.len() <= room => regex,
                Ok(_) => {
                    let reason =
                        format!("the grammars are longer than {EXPRESSIONS_BYTES_MAX} bytes");
                    return Ok(ConvertedTool::Unenforced(reason));
                }
                Err(error) => return Ok(ConvertedTool::Unenforced(error.to_string())),
            };
            self.expressions_bytes += regex.len();
            input["pattern"] = format!("^(?:{regex})$").into();
            description += &format!("\n\nThe input matches this grammar ({syntax}):\n{definition}");
        }
        self.count += 1;
        let schema = json!({
            "type": "object",
            "properties": {"input": input},
            "required": ["input"],
            "additionalProperties": false,
        });
        Ok(ConvertedTool::Function(ChatTool {
            name: json_string(name).into(),
            description: (!description.is_empty()).then(|| json_string(&description).into()),
            parameters: Some(schema.to_string().into()),
            is_strict: grammar.is_some(),
        }))
    }
}

/// A text as a string of JSON.
pub(super) fn json_string(text: &str) -> String {
    serde_json::to_string(text).expect("a text is JSON")
}

/// The arguments of the function that stands for a custom tool; `input` is a string of JSON.
pub(super) fn custom_arguments(input: &str) -> String {
    format!(r#"{{"input":{input}}}"#)
}
