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
use crate::output_piece::ToolKind;
use crate::surface::chat_body::{ChatTool, JsonText, TOOLS_MAX};
use crate::surface::custom_tool::{
    ConvertedTool, CustomTool, CustomTools, FORMAT_KIND_FIELDS, GRAMMAR_FIELDS, has_grammar,
};
use cleave_domain::GRAMMAR_BYTES_MAX;
use cleave_text::json::{Json, JsonPart, JsonShape};
use cleave_text::{CallableTool, ToolSpec};
use std::borrow::Cow;
use std::sync::Arc;

request_fields! {
    /// Fields of tools, which a chat template shows.
    pub(in crate::surface) TOOL_REQUEST_FIELDS {
        TOOLS: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&TOOL)).at_most(TOOLS_MAX),
            "Functions and custom tools that the model may call, shown to it by its chat template.",
        );
        TOOL_CHOICE: AnyValue = any(
            "tool_choice",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::one_of(&[AUTO, NONE, REQUIRED])),
                ValueShape::Object(&CHOICE_OBJECT),
            ]),
            "`none` hides the tools from the model; with `required` the output is calls; a function by name is called once; `allowed_tools` shows all and lets the model call some.",
        ).default("`auto`");
        PARALLEL_TOOL_CALLS: FlagValue = flag(
            "parallel_tool_calls",
            "Whether an answer may have several calls.",
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
    CUSTOM_TOOL_FIELDS {
        CUSTOM_TYPE: TextShape =
            text_field("type", TextShape::one_of(&[CUSTOM_KIND]), "Kind of the tool.").required();
        CUSTOM: &'static ObjectSpec = object(
            "custom",
            &CUSTOM_OBJECT,
            "A tool that the model calls with a text. The model knows it as a function with the argument `input`.",
        ).required();
    }
}

request_fields! {
    CUSTOM_FIELDS {
        DESCRIPTION: TextShape =
            text_field("description", TextShape::ANY, "Shown to the model.");
        FORMAT: &'static ObjectSpec =
            object("format", &FORMAT_OBJECT, "Form of the text.").default("any text");
    }
}

request_fields! {
    FORMAT_FIELDS {
        GRAMMAR: &'static ObjectSpec =
            object("grammar", &GRAMMAR_OBJECT, "The grammar, with that type.");
    }
}

request_fields! {
    pub(super) FUNCTION_FIELDS {
        FUNCTION_NAME: TextShape =
            text_field("name", TextShape::ANY, "Name of the tool.").required();
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
            "Whether arguments must match the schema. Without it they are any object, unless a call is required: then keywords that cannot be enforced have no effect.",
        );
    }
}

request_fields! {
    NAMED_FIELDS {
        NAMED_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&[FUNCTION_CHOICE]),
            "Kind of the choice.",
        ).required();
        NAMED_FUNCTION: &'static ObjectSpec =
            object("function", &ALLOWED_NAME, "The function that is called.").required();
    }
}

request_fields! {
    CUSTOM_CHOICE_FIELDS {
        CUSTOM_CHOICE: TextShape =
            text_field("type", TextShape::one_of(&[CUSTOM_KIND]), "Kind of the choice.").required();
        NAMED_CUSTOM: &'static ObjectSpec =
            object("custom", &ALLOWED_NAME, "The custom tool that is called.").required();
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
            TextShape::one_of(&[AUTO, REQUIRED]),
            "Whether the model must call one.",
        ).required();
        ALLOWED_LIST: ListShape = list(
            "tools",
            ListShape::of(&ValueShape::Object(&ALLOWED_TOOL)),
            "The tools by name, as objects with `function` or `custom`.",
        ).required();
    }
}

const TOOL: ObjectSpec = request_object!(
    "Tool",
    &[
        &[
            &[
                FieldSpec::shown_by_template("type"),
                FieldSpec::absent("custom")
            ],
            TOOL_FIELDS
        ],
        &[CUSTOM_TOOL_FIELDS, NO_FUNCTION],
    ]
);
const NO_FUNCTION: &[FieldSpec] = &[FieldSpec::absent("function")];
const NO_CUSTOM: &[FieldSpec] = &[FieldSpec::absent("custom")];
const CUSTOM_OBJECT: ObjectSpec = request_object!("", &[&[FUNCTION_FIELDS, CUSTOM_FIELDS]]);
const FORMAT_OBJECT: ObjectSpec = request_object!("", &[&[FORMAT_KIND_FIELDS, FORMAT_FIELDS]]);
const GRAMMAR_OBJECT: ObjectSpec = request_object!("", &[&[GRAMMAR_FIELDS]]);
const FUNCTION_OBJECT: ObjectSpec = request_object!("", &[&[FUNCTION_FIELDS, SIGNATURE_FIELDS]]);
const CHOICE_OBJECT: ObjectSpec = request_object!(
    "",
    &[&[NAMED_FIELDS], &[CUSTOM_CHOICE_FIELDS], &[CHOICE_FIELDS]]
);
const ALLOWED_OBJECT: ObjectSpec = request_object!("", &[&[ALLOWED_FIELDS]]);
const ALLOWED_TOOL: ObjectSpec = request_object!(
    "",
    &[
        &[ALLOWED_TOOL_FIELDS, NO_CUSTOM],
        &[ALLOWED_CUSTOM_FIELDS, NO_FUNCTION],
    ]
);

request_fields! {
    ALLOWED_TOOL_FIELDS {
        ALLOWED_FUNCTION: &'static ObjectSpec =
            object("function", &ALLOWED_NAME, "The function.").required();
    }
}

request_fields! {
    ALLOWED_CUSTOM_FIELDS {
        ALLOWED_CUSTOM: &'static ObjectSpec =
            object("custom", &ALLOWED_NAME, "The custom tool.").required();
    }
}

const ALLOWED_NAME: ObjectSpec = request_object!("", &[&[FUNCTION_FIELDS]]);

/// Limit of the schemas that are read for the kinds of parameters, all tools together, in bytes.
const SCHEMAS_BYTES_MAX: usize = 256 << 10;

const AUTO: &str = "auto";
const NONE: &str = "none";
const REQUIRED: &str = "required";
const FUNCTION_CHOICE: &str = "function";
pub(super) const CUSTOM_KIND: &str = "custom";
const ALLOWED: &str = "allowed_tools";

/// The tools of a request, checked.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestTools<'a> {
    /// The list, if the template shows it: with functions in the place of custom tools.
    pub(super) shown: Option<JsonPart>,
    /// Tools that the model may call.
    pub(super) callable: Vec<RequestTool<'a>>,
    pub(super) duty: CallDuty,
    /// Whether an answer has one call at most.
    pub(super) is_single: bool,
}

/// Whether the model must call a tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CallDuty {
    #[default]
    Free,
    Required,
    /// The request names it.
    Named,
}

/// A tool that the model may call.
#[derive(Clone, Debug)]
pub(super) struct RequestTool<'a> {
    pub(super) name: Cow<'a, str>,
    /// The JSON Schema of its arguments.
    pub(super) parameters: Option<Cow<'a, str>>,
    pub(super) is_strict: bool,
    pub(super) kind: ToolKind,
}

impl RequestTools<'_> {
    /// The tools as readers of outputs need them. Behind the limit of schemas kinds of parameters
    /// are unknown.
    pub(super) fn specs(&self) -> Arc<[ToolSpec]> {
        let mut bytes_left = SCHEMAS_BYTES_MAX;
        let spec = |tool: &RequestTool<'_>| {
            let schema = tool.parameters.as_deref();
            let schema = schema.filter(|schema| schema.len() <= bytes_left);
            bytes_left -= schema.map_or(0, str::len);
            let schema = schema.map(serde_json::from_str).transpose();
            let schema = schema.expect("the body was checked");
            ToolSpec::new(tool.name.clone().into_owned(), schema.as_ref())
        };
        self.callable.iter().map(spec).collect()
    }

    /// The tools as grammars need them.
    ///
    /// # Errors
    /// If their schemas are longer than any grammar.
    pub(super) fn grammar_tools(
        &self,
        fields: &JsonFields<'_>,
    ) -> Result<Vec<CallableTool>, ApiError> {
        let schemas = self.callable.iter();
        let schemas = schemas.filter_map(|tool| tool.parameters.as_deref());
        let bytes: usize = schemas.map(str::len).sum();
        if bytes > GRAMMAR_BYTES_MAX {
            return Err(fields.invalid(&TOOLS, long_grammar(TOOLS.name(), bytes)));
        }
        let tool = |tool: &RequestTool<'_>| {
            let schema = tool.parameters.as_deref().map(serde_json::from_str);
            CallableTool {
                name: tool.name.clone().into_owned(),
                schema: schema.transpose().expect("the body was checked"),
                is_strict: tool.is_strict,
            }
        };
        Ok(self.callable.iter().map(tool).collect())
    }

    /// Names of the custom tools that may be called.
    pub(super) fn custom_names(&self) -> Arc<[String]> {
        let custom = self.callable.iter();
        let custom = custom.filter(|tool| tool.kind == ToolKind::Custom);
        custom.map(|tool| tool.name.clone().into_owned()).collect()
    }

    /// The field for which calls must have a form, if they must.
    pub(super) fn bound_by(&self) -> Option<&'static str> {
        let is_any_strict = self.callable.iter().any(|tool| tool.is_strict);
        if self.callable.is_empty() {
            None
        } else if self.duty != CallDuty::Free {
            Some(TOOL_CHOICE.name())
        } else if self.is_single {
            Some(PARALLEL_TOOL_CALLS.name())
        } else {
            is_any_strict.then_some(TOOLS.name())
        }
    }
}

/// The message of a grammar that is too long.
pub(super) fn long_grammar(path: &str, bytes: usize) -> String {
    format!("`{path}` makes a grammar of {bytes} bytes; {GRAMMAR_BYTES_MAX} are allowed.")
}

/// Reads the tools and the choice among them.
pub(super) fn request_tools<'a>(fields: &JsonFields<'a>) -> Result<RequestTools<'a>, ApiError> {
    let (mut callable, shown) = listed_tools(fields)?;
    let choice = fields.any(&TOOL_CHOICE);
    let duty = match choice.map(|choice| (choice, choice.shape())) {
        None => CallDuty::Free,
        Some((_, JsonShape::String(choice))) => match &*choice.get() {
            AUTO => CallDuty::Free,
            NONE => return Ok(RequestTools::default()),
            REQUIRED => CallDuty::Required,
            other => {
                let message = format!("`tool_choice` {:?} is not known.", clipped(other));
                return Err(fields.invalid(&TOOL_CHOICE, message));
            }
        },
        Some((given, JsonShape::Object(_))) => {
            let path = fields.path_of(&TOOL_CHOICE);
            let choice = fields.object_at(path, given, &CHOICE_OBJECT)?;
            let (duty, names) = chosen(&choice, &callable)?;
            callable.retain(|tool| names.contains(&tool.name));
            duty
        }
        Some((other, _)) => {
            let path = fields.path_of(&TOOL_CHOICE);
            return Err(wrong_type(&path, "a string or an object", other));
        }
    };
    if duty != CallDuty::Free && callable.is_empty() {
        let message = "`tool_choice` requires a call, but there are no `tools`.";
        return Err(fields.invalid(&TOOL_CHOICE, message));
    }
    let is_parallel = fields.flag(&PARALLEL_TOOL_CALLS)?.unwrap_or(true);
    Ok(RequestTools {
        shown,
        callable,
        duty,
        is_single: !is_parallel || duty == CallDuty::Named,
    })
}

/// Reads the tools, and the list of them that the template shows.
fn listed_tools<'a>(
    fields: &JsonFields<'a>,
) -> Result<(Vec<RequestTool<'a>>, Option<JsonPart>), ApiError> {
    let mut callable = Vec::new();
    let mut custom = CustomTools::default();
    // The list with functions in the place of custom tools, from the first of these on.
    let mut converted: Option<JsonText> = None;
    let given = || fields.list(&TOOLS).map(|tools| tools.into_iter().flatten());
    for (index, json) in given()?.enumerate() {
        let path = format!("{}[{index}]", TOOLS.name());
        let tool = fields.object_at(path, json, &TOOL)?;
        if tool.any(&CUSTOM).is_none() {
            callable.push(function(&tool)?);
            if let Some(list) = &mut converted {
                list.json(json.text());
            }
            continue;
        }
        let (name, function) = custom_tool(&tool, &mut custom)?;
        if converted.is_none() {
            let mut list = JsonText::default();
            list.begin('[');
            given()?.take(index).for_each(|json| list.json(json.text()));
            converted = Some(list);
        }
        if let Some(list) = &mut converted {
            function.write(list);
        }
        callable.push(RequestTool {
            name,
            parameters: function.parameters,
            is_strict: function.is_strict,
            kind: ToolKind::Custom,
        });
    }
    let shown = match converted {
        Some(mut list) => {
            list.end(']');
            let list = list.check()?;
            Some(list.part(list.root()))
        }
        None if callable.is_empty() => None,
        None => fields.any(&TOOLS).map(|list| fields.part(list)),
    };
    Ok((callable, shown))
}

fn function<'a>(tool: &JsonFields<'a>) -> Result<RequestTool<'a>, ApiError> {
    let Some(function) = tool.object(&FUNCTION)? else {
        let kind = tool.any(&CUSTOM_TYPE).map(Json::text);
        if kind == Some(r#""custom""#) {
            return Err(tool.missing(&CUSTOM));
        }
        let path = format!("{}.{}", tool.path_of(&FUNCTION), FUNCTION_NAME.name());
        return Err(ApiError::invalid(&*path, format!("`{path}` is missing.")));
    };
    let parameters = function.map(&PARAMETERS)?.and(function.any(&PARAMETERS));
    Ok(RequestTool {
        name: function.required_text(&FUNCTION_NAME)?,
        parameters: parameters.map(|schema| schema.text().into()),
        is_strict: function.flag(&STRICT)?.unwrap_or(false),
        kind: ToolKind::Function,
    })
}

/// Reads a custom tool; returns its name, and the function that stands for it.
fn custom_tool<'a>(
    tool: &JsonFields<'a>,
    converted: &mut CustomTools,
) -> Result<(Cow<'a, str>, ChatTool<'static>), ApiError> {
    if tool.required_text(&CUSTOM_TYPE)? != CUSTOM_KIND {
        let path = tool.path_of(&CUSTOM_TYPE);
        let message = format!("`{path}` must be \"{CUSTOM_KIND}\" where the tool has `custom`.");
        return Err(tool.invalid(&CUSTOM_TYPE, message));
    }
    if tool.any(&FUNCTION).is_some() {
        let message = "A tool is a function or a custom tool, not both.";
        return Err(tool.invalid(&FUNCTION, message));
    }
    let custom = tool.object(&CUSTOM)?.ok_or_else(|| tool.missing(&CUSTOM))?;
    let name = custom.required_text(&FUNCTION_NAME)?;
    let description = custom.text(&DESCRIPTION)?;
    let mut grammar = None;
    if let Some(format) = custom.object(&FORMAT)?
        && has_grammar(&format)?
    {
        grammar = format.object(&GRAMMAR)?;
        if grammar.is_none() {
            return Err(format.missing(&GRAMMAR));
        }
    }
    let described = CustomTool {
        name: &name,
        description: description.as_deref(),
        grammar,
    };
    match converted.convert(&tool.path_of(&CUSTOM), &described)? {
        ConvertedTool::Function(function) => Ok((name, function)),
        ConvertedTool::Unenforced(reason) => {
            let path = custom.path_of(&FORMAT);
            let message = format!("`{path}` cannot be enforced: {reason}.");
            Err(custom.invalid(&FORMAT, message))
        }
    }
}

/// Reads a choice among tools, and the names of those that may be called.
fn chosen<'a>(
    choice: &JsonFields<'a>,
    tools: &[RequestTool<'a>],
) -> Result<(CallDuty, Vec<Cow<'a, str>>), ApiError> {
    let kind = choice.required_text(&CHOICE_TYPE)?;
    if NAMED_TYPE.choices().contains(&&*kind) {
        let function = choice.object(&NAMED_FUNCTION)?;
        let function = function.ok_or_else(|| choice.missing(&NAMED_FUNCTION))?;
        let name = known_name(&function, ToolKind::Function, tools)?;
        return Ok((CallDuty::Named, vec![name]));
    }
    if CUSTOM_CHOICE.choices().contains(&&*kind) {
        let custom = choice.object(&NAMED_CUSTOM)?;
        let custom = custom.ok_or_else(|| choice.missing(&NAMED_CUSTOM))?;
        let name = known_name(&custom, ToolKind::Custom, tools)?;
        return Ok((CallDuty::Named, vec![name]));
    }
    if !CHOICE_TYPE.choices().contains(&&*kind) {
        let message = format!("`tool_choice` of type {:?} is not known.", clipped(&kind));
        return Err(choice.invalid(&CHOICE_TYPE, message));
    }
    allowed(choice, tools)
}

/// Reads the name of a tool of this kind that is among the tools.
fn known_name<'a>(
    function: &JsonFields<'a>,
    kind: ToolKind,
    tools: &[RequestTool<'a>],
) -> Result<Cow<'a, str>, ApiError> {
    let name = function.required_text(&FUNCTION_NAME)?;
    let is_named = |tool: &RequestTool<'_>| tool.name == name && tool.kind == kind;
    if !tools.iter().any(is_named) {
        let message = format!("{:?} is not in `tools`.", clipped(&name));
        return Err(function.invalid(&FUNCTION_NAME, message));
    }
    Ok(name)
}

/// Reads whether a call is required, and the names of the tools that may be called.
fn allowed<'a>(
    choice: &JsonFields<'a>,
    tools: &[RequestTool<'a>],
) -> Result<(CallDuty, Vec<Cow<'a, str>>), ApiError> {
    let allowed = choice.object(&ALLOWED_TOOLS)?;
    let allowed = allowed.ok_or_else(|| choice.missing(&ALLOWED_TOOLS))?;
    let mode = allowed.required_text(&ALLOWED_MODE)?;
    let duty = match &*mode {
        AUTO => CallDuty::Free,
        REQUIRED => CallDuty::Required,
        other => {
            let message = format!("`mode` {:?} is not known.", clipped(other));
            return Err(allowed.invalid(&ALLOWED_MODE, message));
        }
    };
    let listed = allowed.list(&ALLOWED_LIST)?;
    let listed = listed.ok_or_else(|| allowed.missing(&ALLOWED_LIST))?;
    let mut names = Vec::new();
    for (index, tool) in listed.enumerate() {
        let path = format!("{}[{index}]", allowed.path_of(&ALLOWED_LIST));
        let tool = allowed.object_at(path, tool, &ALLOWED_TOOL)?;
        let (kind, named) = match tool.object(&ALLOWED_CUSTOM)? {
            Some(custom) => (ToolKind::Custom, Some(custom)),
            None => (ToolKind::Function, tool.object(&ALLOWED_FUNCTION)?),
        };
        let named = named.ok_or_else(|| tool.missing(&ALLOWED_FUNCTION))?;
        names.push(known_name(&named, kind, tools)?);
    }
    Ok((duty, names))
}
