//! The tools of a request, and the choice among them.
//!
//! Owns: `tools`, `tool_choice` and `parallel_tool_calls`. Never: enforces a choice; chat does, or
//! refuses it. Invariant: a tool that OpenAI's servers run is left out with a warning, and a choice
//! of one is refused.

use crate::error::ApiError;
use crate::field::{
    AnyValue, FlagValue, JsonFields, ListShape, MapKeys, MapShape, ObjectSpec, TextShape,
    ValueShape, any, clipped, flag, list, map, object, request_fields, request_object,
    text as text_field, wrong_type,
};
use crate::request::{NamespacedTool, RequestWarning};
use crate::surface::chat_body::{
    ChatTool, ConvertedTools, JsonText, TOOLS_MAX, write_named_choice,
};
use crate::surface::custom_tool::{
    ConvertedTool, CustomTool, CustomTools, FORMAT_KIND_FIELDS, GRAMMAR_FIELDS, has_grammar,
    json_string,
};
use cleave_text::json::{Json, JsonShape};

request_fields! {
    pub(super) TOOL_FIELDS {
        TOOLS: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&TOOL)).at_most(TOOLS_MAX),
            "Tools that the model may call: functions, custom tools, and namespaces of functions. Tools of other types are left out, with a warning.",
        );
        TOOL_CHOICE: AnyValue = any(
            "tool_choice",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::one_of(&["auto", "none", "required"])),
                ValueShape::Object(&CHOICE_OBJECT),
            ]),
            "The choice among the tools, as in chat.",
        ).default("`auto`");
        PARALLEL_TOOL_CALLS: FlagValue = flag(
            "parallel_tool_calls",
            "Whether an answer may have several calls, as in chat.",
        ).default("true");
    }
}

request_fields! {
    FUNCTION_FIELDS {
        TOOL_TYPE: TextShape = text_field(
            "type",
            TextShape::ANY,
            "`function`, `custom`, `namespace`, or the name of another type.",
        ).required();
        TOOL_NAME: TextShape = text_field("name", TextShape::ANY, "Name of the tool.")
            .default("required for `function`, `custom` and `namespace`");
        TOOL_DESCRIPTION: TextShape =
            text_field("description", TextShape::ANY, "Shown to the model.");
        TOOL_PARAMETERS: MapShape = map(
            "parameters",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "JSON Schema of a function's arguments, an object.",
        );
        TOOL_STRICT: FlagValue = flag(
            "strict",
            "Whether arguments must match the schema, as `strict` of a tool in chat.",
        );
    }
}

request_fields! {
    OTHER_FIELDS {
        TOOL_FORMAT: &'static ObjectSpec = object(
            "format",
            &FORMAT_OBJECT,
            "Form of the text with which a custom tool is called. One whose grammar cannot be enforced is left out, with a warning.",
        ).default("any text");
        NAMESPACE_TOOLS: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&NAMESPACED_TOOL)).at_most(TOOLS_MAX),
            "Functions of a namespace; the model knows each as `NAMESPACE__NAME`.",
        );
    }
}

request_fields! {
    CHOICE_FIELDS {
        CHOICE_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&[FUNCTION, CUSTOM, ALLOWED]),
            "One tool by name, or some of the tools.",
        ).required();
        CHOICE_NAME: TextShape =
            text_field("name", TextShape::ANY, "Name of the tool, with the types `function` and `custom`.");
        ALLOWED_MODE: TextShape = text_field(
            "mode",
            TextShape::one_of(&["auto", "required"]),
            "Whether the model must call one of `tools`, with the type `allowed_tools`.",
        );
        ALLOWED_LIST: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&ALLOWED_TOOL)),
            "The functions by name, with the type `allowed_tools`.",
        );
    }
}

request_fields! {
    ALLOWED_TOOL_FIELDS {
        ALLOWED_NAME: TextShape =
            text_field("name", TextShape::ANY, "Name of the function.").required();
    }
}

const TOOL: ObjectSpec = request_object!("ResponseTool", &[&[FUNCTION_FIELDS, OTHER_FIELDS]]);
const NAMESPACED_TOOL: ObjectSpec = request_object!("", &[&[FUNCTION_FIELDS]]);
const FORMAT_OBJECT: ObjectSpec = request_object!("", &[&[FORMAT_KIND_FIELDS, GRAMMAR_FIELDS]]);
const CHOICE_OBJECT: ObjectSpec = request_object!("", &[&[CHOICE_FIELDS]]);
const ALLOWED_TOOL: ObjectSpec = request_object!("", &[&[ALLOWED_TOOL_FIELDS]]);

const FUNCTION: &str = "function";
const CUSTOM: &str = "custom";
const NAMESPACE: &str = "namespace";
const ALLOWED: &str = "allowed_tools";

const HOSTED_WARNING: RequestWarning = RequestWarning {
    param: "tools",
    message: "Tools of other types than `function`, `custom` and `namespace`, and custom ones whose grammar is not regular, are left out: the model does not know them.",
};

/// The tools of a request, for its chat request and for its answer.
#[derive(Debug, Default)]
pub(super) struct ResponseTools<'a> {
    pub(super) chat: ConvertedTools<'a>,
    /// Names of the custom tools.
    pub(super) custom: Vec<String>,
    pub(super) namespaced: Vec<NamespacedTool>,
    /// The tools that the model knows, as the answer repeats them.
    repeated: JsonText,
    names: Vec<String>,
    converted: CustomTools,
}

impl<'a> ResponseTools<'a> {
    fn add(&mut self, tool: &JsonFields<'a>, given: Json<'a>) -> Result<(), ApiError> {
        match &*tool.required_text(&TOOL_TYPE)? {
            FUNCTION => {
                let name = tool.required_text(&TOOL_NAME)?.into_owned();
                let converted = function(tool, &name)?;
                write_repeated_function(&converted, &mut self.repeated);
                self.names.push(name);
                self.chat.tools.push(converted);
            }
            CUSTOM => {
                let name = tool.required_text(&TOOL_NAME)?.into_owned();
                let description = tool.text(&TOOL_DESCRIPTION)?;
                let format = tool.object(&TOOL_FORMAT)?;
                let has_grammar = format.as_ref().map(has_grammar).transpose()?;
                let described = CustomTool {
                    name: &name,
                    description: description.as_deref(),
                    grammar: format.filter(|_| has_grammar == Some(true)),
                };
                let path = tool.path_of(&TOOL_TYPE);
                let converted = match self.converted.convert(&path, &described)? {
                    ConvertedTool::Function(converted) => converted,
                    ConvertedTool::Unenforced(_) => {
                        self.chat.warning = Some(HOSTED_WARNING);
                        return Ok(());
                    }
                };
                self.repeated.json(given.text());
                self.names.push(name.clone());
                self.custom.push(name);
                self.chat.tools.push(converted);
            }
            NAMESPACE => {
                let namespace = tool.required_text(&TOOL_NAME)?;
                tool.text(&TOOL_DESCRIPTION)?;
                let inside = tool.list(&NAMESPACE_TOOLS)?.into_iter().flatten();
                for (index, inner) in inside.enumerate() {
                    let path = format!("{}[{index}]", tool.path_of(&NAMESPACE_TOOLS));
                    let inner = tool.object_at(path, inner, &NAMESPACED_TOOL)?;
                    if inner.required_text(&TOOL_TYPE)? != FUNCTION {
                        self.chat.warning = Some(HOSTED_WARNING);
                        continue;
                    }
                    let name = inner.required_text(&TOOL_NAME)?.into_owned();
                    let shown_name = shown_name(&namespace, &name);
                    self.chat.tools.push(function(&inner, &shown_name)?);
                    self.namespaced.push(NamespacedTool {
                        shown_name,
                        namespace: namespace.clone().into_owned(),
                        name,
                    });
                }
                self.repeated.json(given.text());
            }
            _ => self.chat.warning = Some(HOSTED_WARNING),
        }
        Ok(())
    }
}

/// The name by which the model knows a function of a namespace.
pub(super) fn shown_name(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// Converts a function that the model knows by this name.
fn function<'a>(tool: &JsonFields<'a>, name: &str) -> Result<ChatTool<'a>, ApiError> {
    tool.text(&TOOL_DESCRIPTION)?;
    let parameters = tool.map(&TOOL_PARAMETERS)?.and(tool.any(&TOOL_PARAMETERS));
    Ok(ChatTool {
        name: json_string(name).into(),
        description: tool.any(&TOOL_DESCRIPTION).map(|text| text.text().into()),
        parameters: parameters.map(|schema| schema.text().into()),
        is_strict: tool.flag(&TOOL_STRICT)?.unwrap_or(false),
    })
}

/// Writes a function in full.
fn write_repeated_function(tool: &ChatTool<'_>, out: &mut JsonText) {
    let ChatTool {
        name,
        description,
        parameters,
        is_strict,
    } = tool;
    out.begin('{');
    out.member(TOOL_TYPE.name(), r#""function""#);
    out.member(TOOL_NAME.name(), name);
    for (field, value) in [
        (TOOL_DESCRIPTION.name(), description),
        (TOOL_PARAMETERS.name(), parameters),
    ] {
        out.member(field, value.as_deref().unwrap_or("null"));
    }
    out.member(TOOL_STRICT.name(), &is_strict.to_string());
    out.end('}');
}

/// Reads the tools and the choice among them.
pub(super) fn response_tools<'a>(fields: &JsonFields<'a>) -> Result<ResponseTools<'a>, ApiError> {
    let mut found = ResponseTools::default();
    found.chat.is_single = !fields.flag(&PARALLEL_TOOL_CALLS)?.unwrap_or(true);
    for (index, given) in fields.list(&TOOLS)?.into_iter().flatten().enumerate() {
        let path = format!("{}[{index}]", TOOLS.name());
        let tool = fields.object_at(path, given, &TOOL)?;
        found.add(&tool, given)?;
    }
    let Some(choice) = fields.any(&TOOL_CHOICE) else {
        return Ok(found);
    };
    let path = fields.path_of(&TOOL_CHOICE);
    found.chat.choice = Some(match choice.shape() {
        JsonShape::String(_) => choice.text().to_owned(),
        JsonShape::Object(_) => {
            let choice = fields.object_at(path, choice, &CHOICE_OBJECT)?;
            choice_of_chat(&choice, &found.names)?
        }
        _ => return Err(wrong_type(&path, "a string or an object", choice)),
    });
    Ok(found)
}

/// Returns `tool_choice` of chat for a choice that is an object here.
fn choice_of_chat(choice: &JsonFields, names: &[String]) -> Result<String, ApiError> {
    let mut out = JsonText::default();
    let kind = choice.required_text(&CHOICE_TYPE)?;
    if kind == FUNCTION || kind == CUSTOM {
        let name = named(choice, &CHOICE_NAME, names)?;
        write_named_choice(&mut out, name);
        return Ok(out.into_string());
    }
    if kind != ALLOWED {
        let kind = clipped(&kind);
        let message = format!(
            "`tool_choice` of type {kind:?}: only functions and custom tools may be chosen."
        );
        return Err(choice.unsupported(&CHOICE_TYPE, message));
    }
    let mode = choice.required_text(&ALLOWED_MODE)?;
    let listed = choice.list(&ALLOWED_LIST)?;
    let listed = listed.ok_or_else(|| choice.missing(&ALLOWED_LIST))?;
    out.begin('{');
    out.member("type", r#""allowed_tools""#);
    out.name(ALLOWED);
    out.begin('{');
    out.name("mode");
    out.text(&mode);
    out.name("tools");
    out.begin('[');
    for (index, tool) in listed.enumerate() {
        let path = format!("{}[{index}]", choice.path_of(&ALLOWED_LIST));
        let tool = choice.object_at(path, tool, &ALLOWED_TOOL)?;
        write_named_choice(&mut out, named(&tool, &ALLOWED_NAME, names)?);
    }
    out.end(']');
    out.end('}');
    out.end('}');
    Ok(out.into_string())
}

/// Reads the name of a function of the request; returns it as it is written.
fn named<'a>(
    choice: &JsonFields<'a>,
    field: &crate::field::RequestField<TextShape>,
    names: &[String],
) -> Result<Json<'a>, ApiError> {
    let name = choice.required_text(field)?;
    if !names.iter().any(|known| *known == name) {
        let message = format!(
            "{:?} is no function or custom tool in `tools`.",
            clipped(&name)
        );
        return Err(choice.invalid(field, message));
    }
    choice.any(field).ok_or_else(|| choice.missing(field))
}

/// Writes the fields as the answer repeats them.
pub(super) fn write_repeated(fields: &JsonFields, tools: &ResponseTools<'_>, out: &mut JsonText) {
    out.name(TOOLS.name());
    out.begin('[');
    out.json(tools.repeated.as_str());
    out.end(']');
    for (name, value, default) in [
        (TOOL_CHOICE.name(), fields.any(&TOOL_CHOICE), r#""auto""#),
        (
            PARALLEL_TOOL_CALLS.name(),
            fields.any(&PARALLEL_TOOL_CALLS),
            "true",
        ),
    ] {
        out.member(name, value.map_or(default, Json::text));
    }
}
