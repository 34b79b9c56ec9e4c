//! The tools of a request, and the choice among them.
//!
//! Owns: `tools`, `tool_choice` and `parallel_tool_calls`. Never: enforces a choice; chat does, or
//! refuses it. Invariant: a tool that OpenAI's servers run is left out with a warning, and a choice
//! of one is refused.

use crate::error::ApiError;
use crate::field::{
    AnyValue, FlagValue, JsonFields, ListShape, MapKeys, MapShape, ObjectSpec, TextShape,
    ValueShape, any, clipped, flag, list, map, request_fields, request_object, text as text_field,
    wrong_type,
};
use crate::request::RequestWarning;
use crate::surface::chat_body::{
    ChatTool, ConvertedTools, JsonText, TOOLS_MAX, write_named_choice,
};
use cleave_text::json::{Json, JsonShape};

request_fields! {
    pub(super) TOOL_FIELDS {
        TOOLS: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&TOOL)).at_most(TOOLS_MAX),
            "Functions that the model may call. Tools of other types are left out, with a warning.",
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
            "`function`, or the name of another type.",
        ).required();
        TOOL_NAME: TextShape =
            text_field("name", TextShape::ANY, "Name of the function.").default("required in a function");
        TOOL_DESCRIPTION: TextShape =
            text_field("description", TextShape::ANY, "Shown to the model.");
        TOOL_PARAMETERS: MapShape = map(
            "parameters",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "JSON Schema of the arguments, an object.",
        );
        TOOL_STRICT: FlagValue = flag(
            "strict",
            "Whether arguments must match the schema, as `strict` of a tool in chat.",
        );
    }
}

request_fields! {
    CHOICE_FIELDS {
        CHOICE_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&[FUNCTION, ALLOWED]),
            "One function by name, or some of the functions.",
        ).required();
        CHOICE_NAME: TextShape =
            text_field("name", TextShape::ANY, "Name of the function, with the type `function`.");
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

const TOOL: ObjectSpec = request_object!("ResponseTool", &[&[FUNCTION_FIELDS]]);
const CHOICE_OBJECT: ObjectSpec = request_object!("", &[&[CHOICE_FIELDS]]);
const ALLOWED_TOOL: ObjectSpec = request_object!("", &[&[ALLOWED_TOOL_FIELDS]]);

const FUNCTION: &str = "function";
const ALLOWED: &str = "allowed_tools";

const HOSTED_WARNING: RequestWarning = RequestWarning {
    param: "tools",
    message: "Tools of other types than `function` are left out: nothing here runs them, and the model does not know them.",
};

/// Reads the tools and the choice among them.
pub(super) fn response_tools<'a>(fields: &JsonFields<'a>) -> Result<ConvertedTools<'a>, ApiError> {
    let mut found = ConvertedTools {
        is_single: !fields.flag(&PARALLEL_TOOL_CALLS)?.unwrap_or(true),
        ..ConvertedTools::default()
    };
    let mut names = Vec::new();
    for (index, tool) in fields.list(&TOOLS)?.into_iter().flatten().enumerate() {
        let path = format!("{}[{index}]", TOOLS.name());
        let tool = fields.object_at(path, tool, &TOOL)?;
        if tool.required_text(&TOOL_TYPE)? != FUNCTION {
            found.warning = Some(HOSTED_WARNING);
            continue;
        }
        names.push(tool.required_text(&TOOL_NAME)?.into_owned());
        tool.text(&TOOL_DESCRIPTION)?;
        found.tools.push(ChatTool {
            name: tool
                .any(&TOOL_NAME)
                .ok_or_else(|| tool.missing(&TOOL_NAME))?,
            description: tool.any(&TOOL_DESCRIPTION),
            parameters: tool.map(&TOOL_PARAMETERS)?.and(tool.any(&TOOL_PARAMETERS)),
            is_strict: tool.flag(&TOOL_STRICT)?.unwrap_or(false),
        });
    }
    let Some(choice) = fields.any(&TOOL_CHOICE) else {
        return Ok(found);
    };
    let path = fields.path_of(&TOOL_CHOICE);
    found.choice = Some(match choice.shape() {
        JsonShape::String(_) => choice.text().to_owned(),
        JsonShape::Object(_) => {
            let choice = fields.object_at(path, choice, &CHOICE_OBJECT)?;
            choice_of_chat(&choice, &names)?
        }
        _ => return Err(wrong_type(&path, "a string or an object", choice)),
    });
    Ok(found)
}

/// Returns `tool_choice` of chat for a choice that is an object here.
fn choice_of_chat(choice: &JsonFields, names: &[String]) -> Result<String, ApiError> {
    let mut out = JsonText::default();
    let kind = choice.required_text(&CHOICE_TYPE)?;
    if kind == FUNCTION {
        let name = named(choice, &CHOICE_NAME, names)?;
        write_named_choice(&mut out, name);
        return Ok(out.into_string());
    }
    if kind != ALLOWED {
        let kind = clipped(&kind);
        let message = format!("`tool_choice` of type {kind:?}: only functions may be chosen.");
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
        let message = format!("{:?} is no function in `tools`.", clipped(&name));
        return Err(choice.invalid(field, message));
    }
    choice.any(field).ok_or_else(|| choice.missing(field))
}

/// Writes the fields as the answer repeats them: the tools that the model knows, each in full.
pub(super) fn write_repeated(fields: &JsonFields, tools: &ConvertedTools<'_>, out: &mut JsonText) {
    out.name(TOOLS.name());
    out.begin('[');
    for tool in &tools.tools {
        let ChatTool {
            name,
            description,
            parameters,
            is_strict,
        } = tool;
        out.begin('{');
        out.member(TOOL_TYPE.name(), r#""function""#);
        out.member(TOOL_NAME.name(), name.text());
        for (field, value) in [
            (TOOL_DESCRIPTION.name(), description),
            (TOOL_PARAMETERS.name(), parameters),
        ] {
            out.member(field, value.map_or("null", Json::text));
        }
        out.member(TOOL_STRICT.name(), &is_strict.to_string());
        out.end('}');
    }
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
