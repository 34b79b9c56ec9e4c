//! The tools of a chat request, and the choice among them.
//!
//! Owns: `tools`, `tool_choice` and `parallel_tool_calls`, and their meaning for prompt and
//! answer. Never: reads an answer. Invariant: a choice that cannot be enforced is refused.

use crate::error::ApiError;
use crate::field::{
    AnyValue, FieldSpec, FlagValue, JsonFields, ListShape, MapKeys, MapShape, ObjectSpec,
    TextShape, ValueShape, any, clipped, flag, list, map, object, request_fields, request_object,
    text as text_field, wrong_type,
};
use cleave_text::ToolSpec;
use cleave_text::json::{Json, JsonShape};
use std::borrow::Cow;
use std::sync::Arc;

request_fields! {
    /// Fields of tools, which a chat template shows.
    pub(in crate::surface) TOOL_REQUEST_FIELDS {
        TOOLS: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&TOOL)).at_most(TOOLS_MAX),
            "Functions that the model may call, shown to it by its chat template.",
        );
        TOOL_CHOICE: AnyValue = any(
            "tool_choice",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::one_of(&[AUTO, NONE])),
                ValueShape::Object(&CHOICE_OBJECT),
            ]),
            "`none` hides the tools from the model; `allowed_tools` shows all and lets it call some. `required` and a function by name are refused.",
        ).default("`auto`");
        PARALLEL_TOOL_CALLS: FlagValue = flag(
            "parallel_tool_calls",
            "Whether an answer may have several calls; `false` with tools is refused.",
        ).default("true");
    }
}

request_fields! {
    TOOL_FIELDS {
        FUNCTION: &'static ObjectSpec =
            object("function", &FUNCTION_OBJECT, "The function that the model may call.")
                .required();
    }
}

request_fields! {
    pub(super) FUNCTION_FIELDS {
        FUNCTION_NAME: TextShape =
            text_field("name", TextShape::ANY, "Name of the function.").required();
    }
}

request_fields! {
    SIGNATURE_FIELDS {
        PARAMETERS: MapShape = map(
            "parameters",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "JSON Schema of the arguments, an object.",
        );
        STRICT: FlagValue = flag(
            "strict",
            "Whether arguments must match the schema; `true` is refused unless `tool_choice` is `none`.",
        );
    }
}

request_fields! {
    CHOICE_FIELDS {
        CHOICE_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&[ALLOWED]),
            "Kind of the choice.",
        ).required();
        ALLOWED_TOOLS: &'static ObjectSpec =
            object("allowed_tools", &ALLOWED_OBJECT, "The tools that may be called.").required();
    }
}

request_fields! {
    ALLOWED_FIELDS {
        ALLOWED_MODE: TextShape = text_field(
            "mode",
            TextShape::one_of(&[AUTO]),
            "Whether the model must call one; `required` is refused.",
        ).required();
        ALLOWED_LIST: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&ALLOWED_TOOL)),
            "The tools by name, as objects with `function`.",
        ).required();
    }
}

const TOOL: ObjectSpec = request_object!(
    "Tool",
    &[&[&[FieldSpec::shown_by_template("type")], TOOL_FIELDS]]
);
const FUNCTION_OBJECT: ObjectSpec = request_object!("", &[&[FUNCTION_FIELDS, SIGNATURE_FIELDS]]);
const CHOICE_OBJECT: ObjectSpec = request_object!("", &[&[CHOICE_FIELDS]]);
const ALLOWED_OBJECT: ObjectSpec = request_object!("", &[&[ALLOWED_FIELDS]]);
const ALLOWED_TOOL: ObjectSpec = request_object!("", &[&[ALLOWED_TOOL_FIELDS]]);

request_fields! {
    ALLOWED_TOOL_FIELDS {
        ALLOWED_FUNCTION: &'static ObjectSpec =
            object("function", &ALLOWED_NAME, "The function.").required();
    }
}

const ALLOWED_NAME: ObjectSpec = request_object!("", &[&[FUNCTION_FIELDS]]);

/// Limit of the tools of a request: each takes memory while the answer is read. OpenAI's is 128.
const TOOLS_MAX: usize = 1024;
/// Limit of the schemas that are read for the kinds of parameters, all tools together, in bytes.
const SCHEMAS_BYTES_MAX: usize = 256 << 10;

const AUTO: &str = "auto";
const NONE: &str = "none";
const REQUIRED: &str = "required";
const FUNCTION_CHOICE: &str = "function";
const ALLOWED: &str = "allowed_tools";

/// The tools of a request, checked.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestTools<'a> {
    /// The list, if the template shows it.
    pub(super) shown: Option<Json<'a>>,
    /// Tools that the model may call.
    pub(super) callable: Vec<RequestTool<'a>>,
}

/// A tool that the model may call.
#[derive(Clone, Debug)]
pub(super) struct RequestTool<'a> {
    pub(super) name: Cow<'a, str>,
    /// The JSON Schema of its arguments.
    pub(super) parameters: Option<Json<'a>>,
}

impl RequestTools<'_> {
    /// The tools as readers of outputs need them. Behind the limit of schemas kinds of parameters
    /// are unknown.
    pub(super) fn specs(&self) -> Arc<[ToolSpec]> {
        let mut bytes_left = SCHEMAS_BYTES_MAX;
        let spec = |tool: &RequestTool<'_>| {
            let schema = tool.parameters.map(Json::text);
            let schema = schema.filter(|schema| schema.len() <= bytes_left);
            bytes_left -= schema.map_or(0, str::len);
            let schema = schema.map(serde_json::from_str).transpose();
            let schema = schema.expect("the body was checked");
            ToolSpec::new(tool.name.clone().into_owned(), schema.as_ref())
        };
        self.callable.iter().map(spec).collect()
    }
}

/// Reads the tools and the choice among them.
pub(super) fn request_tools<'a>(fields: &JsonFields<'a>) -> Result<RequestTools<'a>, ApiError> {
    let mut callable = Vec::new();
    let mut strict = None;
    for (index, tool) in fields.list(&TOOLS)?.into_iter().flatten().enumerate() {
        let path = format!("{}[{index}]", TOOLS.name());
        let tool = fields.object_at(path, tool, &TOOL)?;
        let Some(function) = tool.object(&FUNCTION)? else {
            let path = format!("{}.{}", tool.path_of(&FUNCTION), FUNCTION_NAME.name());
            return Err(ApiError::invalid(&*path, format!("`{path}` is missing.")));
        };
        if function.flag(&STRICT)?.unwrap_or(false) {
            strict = strict.or_else(|| Some(function.clone()));
        }
        callable.push(RequestTool {
            name: function.required_text(&FUNCTION_NAME)?,
            parameters: function.map(&PARAMETERS)?.and(function.any(&PARAMETERS)),
        });
    }
    let choice = fields.any(&TOOL_CHOICE);
    match choice.map(|choice| (choice, choice.shape())) {
        None => {}
        Some((_, JsonShape::String(choice))) => match &*choice.get() {
            AUTO => {}
            NONE => return Ok(RequestTools::default()),
            REQUIRED => return Err(cannot_force(fields)),
            other => {
                let message = format!("`tool_choice` {:?} is not known.", clipped(other));
                return Err(fields.invalid(&TOOL_CHOICE, message));
            }
        },
        Some((given, JsonShape::Object(_))) => {
            let path = fields.path_of(&TOOL_CHOICE);
            let choice = fields.object_at(path, given, &CHOICE_OBJECT)?;
            let kind = choice.required_text(&CHOICE_TYPE)?;
            if kind == FUNCTION_CHOICE {
                return Err(cannot_force(fields));
            }
            if !CHOICE_TYPE.choices().contains(&&*kind) {
                let message = format!("`tool_choice` of type {:?} is not known.", clipped(&kind));
                return Err(choice.invalid(&CHOICE_TYPE, message));
            }
            let allowed = allowed(fields, &choice, &callable)?;
            callable.retain(|tool| allowed.contains(&tool.name));
        }
        Some((other, _)) => {
            let path = fields.path_of(&TOOL_CHOICE);
            return Err(wrong_type(&path, "a string or an object", other));
        }
    }
    if let Some(function) = strict {
        let message = "`strict: true` is not supported: arguments are not constrained.";
        return Err(function.unsupported(&STRICT, message));
    }
    let is_parallel = fields.flag(&PARALLEL_TOOL_CALLS)?.unwrap_or(true);
    if !is_parallel && !callable.is_empty() {
        let message = "`parallel_tool_calls: false` is not supported: the number of calls is not constrained.";
        return Err(fields.unsupported(&PARALLEL_TOOL_CALLS, message));
    }
    let has_tools = fields
        .list(&TOOLS)?
        .is_some_and(|mut tools| tools.next().is_some());
    Ok(RequestTools {
        shown: fields.any(&TOOLS).filter(|_| has_tools),
        callable,
    })
}

fn cannot_force(fields: &JsonFields) -> ApiError {
    fields.unsupported(
        &TOOL_CHOICE,
        "`tool_choice` may be \"auto\", \"none\" or allowed tools; the output cannot be forced into a call.",
    )
}

/// Reads the names of the tools that may be called.
fn allowed<'a>(
    fields: &JsonFields<'a>,
    choice: &JsonFields<'a>,
    tools: &[RequestTool<'a>],
) -> Result<Vec<Cow<'a, str>>, ApiError> {
    let allowed = choice.object(&ALLOWED_TOOLS)?;
    let allowed = allowed.ok_or_else(|| choice.missing(&ALLOWED_TOOLS))?;
    let mode = allowed.required_text(&ALLOWED_MODE)?;
    if mode == REQUIRED {
        return Err(cannot_force(fields));
    }
    if mode != AUTO {
        let message = format!("`mode` {:?} is not known.", clipped(&mode));
        return Err(allowed.invalid(&ALLOWED_MODE, message));
    }
    let listed = allowed.list(&ALLOWED_LIST)?;
    let listed = listed.ok_or_else(|| allowed.missing(&ALLOWED_LIST))?;
    let mut names = Vec::new();
    for (index, tool) in listed.enumerate() {
        let path = format!("{}[{index}]", allowed.path_of(&ALLOWED_LIST));
        let tool = allowed.object_at(path, tool, &ALLOWED_TOOL)?;
        let function = tool.object(&ALLOWED_FUNCTION)?;
        let function = function.ok_or_else(|| tool.missing(&ALLOWED_FUNCTION))?;
        let name = function.required_text(&FUNCTION_NAME)?;
        if !tools.iter().any(|tool| tool.name == name) {
            let message = format!("{:?} is not in `tools`.", clipped(&name));
            return Err(function.invalid(&FUNCTION_NAME, message));
        }
        names.push(name);
    }
    Ok(names)
}
