//! The tools of a request, and the choice among them.
//!
//! Owns: `tools` and `tool_choice`. Never: enforces a choice; chat does, or refuses it. Invariant:
//! a tool of Anthropic's own, which nothing here runs, is left out with a warning, and a choice of
//! one is refused.

use super::content::CACHE_FIELDS;
use crate::error::ApiError;
use crate::field::{
    FlagValue, JsonFields, ListShape, MapKeys, MapShape, ObjectSpec, TextShape, ValueShape,
    clipped, flag, list, map, object, request_fields, request_object, text as text_field,
};
use crate::request::RequestWarning;
use crate::surface::chat_body::{
    ChatTool, ConvertedTools, JsonText, TOOLS_MAX, write_named_choice,
};
use cleave_text::json::Json;

request_fields! {
    pub(super) TOOL_FIELDS {
        TOOLS: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&TOOL)).at_most(TOOLS_MAX),
            "Tools that the model may call. Those with a `type` of Anthropic's own are left out, with a warning.",
        );
        TOOL_CHOICE: &'static ObjectSpec =
            object("tool_choice", &CHOICE_OBJECT, "The choice among the tools.").default("auto");
    }
}

request_fields! {
    ONE_TOOL_FIELDS {
        TOOL_TYPE: TextShape = text_field(
            "type",
            TextShape::ANY,
            "`custom`, or the name of a tool of Anthropic's own.",
        ).default("`custom`");
        TOOL_NAME: TextShape = text_field("name", TextShape::ANY, "Name of the tool.").required();
        TOOL_DESCRIPTION: TextShape =
            text_field("description", TextShape::ANY, "Shown to the model.");
        INPUT_SCHEMA: MapShape = map(
            "input_schema",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "JSON Schema of the arguments, an object.",
        );
        TOOL_STRICT: FlagValue =
            flag("strict", "Whether arguments must match the schema, as `strict` of a tool in chat.");
    }
}

request_fields! {
    CHOICE_FIELDS {
        CHOICE_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&[AUTO, ANY, ONE, NONE]),
            "`any` and `tool` are `required` and a function by name in chat, `none` hides the tools.",
        ).required();
        CHOICE_NAME: TextShape =
            text_field("name", TextShape::ANY, "Name of the tool, with the type `tool`.");
        NOT_PARALLEL: FlagValue = flag(
            "disable_parallel_tool_use",
            "The answer has one call at most, as with `parallel_tool_calls: false` in chat.",
        );
    }
}

const TOOL: ObjectSpec = request_object!("MessageTool", &[&[ONE_TOOL_FIELDS, CACHE_FIELDS]]);
const CHOICE_OBJECT: ObjectSpec = request_object!("", &[&[CHOICE_FIELDS]]);

const AUTO: &str = "auto";
const ANY: &str = "any";
const ONE: &str = "tool";
const NONE: &str = "none";
const CUSTOM: &str = "custom";

const HOSTED_WARNING: RequestWarning = RequestWarning {
    param: "tools",
    message: "Tools with a type of Anthropic's own are left out: nothing here runs them, and the model does not know them.",
};

/// Reads the tools and the choice among them.
pub(super) fn request_tools<'a>(fields: &JsonFields<'a>) -> Result<ConvertedTools<'a>, ApiError> {
    let mut found = ConvertedTools::default();
    let mut names = Vec::new();
    for (index, tool) in fields.list(&TOOLS)?.into_iter().flatten().enumerate() {
        let path = format!("{}[{index}]", TOOLS.name());
        let tool = fields.object_at(path, tool, &TOOL)?;
        let name = tool.required_text(&TOOL_NAME)?;
        if tool.text(&TOOL_TYPE)?.is_some_and(|kind| kind != CUSTOM) {
            found.warning = Some(HOSTED_WARNING);
            continue;
        }
        names.push(name);
        tool.text(&TOOL_DESCRIPTION)?;
        found.tools.push(ChatTool {
            name: tool
                .any(&TOOL_NAME)
                .map(Json::text)
                .ok_or_else(|| tool.missing(&TOOL_NAME))?
                .into(),
            description: tool.any(&TOOL_DESCRIPTION).map(|text| text.text().into()),
            parameters: tool
                .map(&INPUT_SCHEMA)?
                .and(tool.any(&INPUT_SCHEMA))
                .map(|schema| schema.text().into()),
            is_strict: tool.flag(&TOOL_STRICT)?.unwrap_or(false),
        });
    }
    let Some(choice) = fields.object(&TOOL_CHOICE)? else {
        return Ok(found);
    };
    found.is_single = choice.flag(&NOT_PARALLEL)?.unwrap_or(false);
    found.choice = Some(match &*choice.required_text(&CHOICE_TYPE)? {
        AUTO => r#""auto""#.to_owned(),
        ANY => r#""required""#.to_owned(),
        NONE => r#""none""#.to_owned(),
        ONE => {
            let name = choice.required_text(&CHOICE_NAME)?;
            if !names.contains(&name) {
                let message = format!("{:?} is not in `tools`.", clipped(&name));
                return Err(choice.invalid(&CHOICE_NAME, message));
            }
            let name = choice.any(&CHOICE_NAME);
            let name = name.ok_or_else(|| choice.missing(&CHOICE_NAME))?;
            let mut named = JsonText::default();
            write_named_choice(&mut named, name);
            named.into_string()
        }
        other => {
            let message = format!("`tool_choice` of type {:?} is not known.", clipped(other));
            return Err(choice.invalid(&CHOICE_TYPE, message));
        }
    });
    Ok(found)
}
