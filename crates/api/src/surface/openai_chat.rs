//! `POST /v1/chat/completions`.
//!
//! Tools: the chat template shows their descriptions to the model. The model's answer stays text;
//! calls in it are not parsed. With `tool_choice` `auto` (or without the field) tools are shown,
//! with `none` they are not; `required` and a named function would need constrained output and are
//! refused.

mod message;

use super::openai::{OpenAiSurface, token_text, write_json};
use crate::app::BodyWork;
use crate::error::ApiError;
use crate::field::{JsonFields, wrong_type};
use crate::output_piece::TokenScore;
use crate::request::sampling::{OutputRoom, StopFields, logprobs_count, output, sampling};
use crate::request::{
    self, GenerateRequest, OutputWanted, RequestWarning, TokenizedPrompt, UNSUPPORTED, text,
};
use cleave_domain::TokenId;
use cleave_text::json::{Document, Json, JsonShape};
use cleave_text::{ModelText, RenderEnd, RenderError, SpecialTokens, TemplateInput, TemplateValue};
use serde_json::{Map, Value, json};

/// Warning of a request whose tools are shown to the model.
const TOOLS_WARNING: RequestWarning = RequestWarning {
    param: "tools",
    message: "Tools are shown to the model through its chat template, but calls in its answer are not parsed: \
              they are part of `content`, and `tool_calls` is never set. `tool_choice: \"none\"` leaves the tools out.",
};

/// Chat completions, a conversation with roles.
pub(super) static CHAT: OpenAiSurface = OpenAiSurface {
    route: "/v1/chat/completions",
    operation: "chat",
    body_work: BodyWork::RenderTemplate,
    parse: chat,
    id_prefix: "chatcmpl",
    whole_object: "chat.completion",
    chunk_object: "chat.completion.chunk",
    first_choice: Some(role_choice),
    insert_text: insert_message,
    write_text: write_delta,
    scores,
};

/// The choice of the first chunk, which names the role.
fn role_choice(index: usize) -> Value {
    let delta = json!({"role": "assistant", "content": ""});
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null})
}

fn insert_message(choice: &mut Map<String, Value>, text: &str) {
    let message = json!({"role": "assistant", "content": text, "refusal": null});
    choice.insert("message".into(), message);
}

fn write_delta(out: &mut Vec<u8>, text: &str) {
    if text.is_empty() {
        return out.extend(b",\"delta\":{}");
    }
    out.extend(b",\"delta\":{\"content\":");
    write_json(out, text);
    out.push(b'}');
}

/// Builds `choices[].logprobs` of a chat.
fn scores(scores: &[TokenScore], model: &ModelText) -> Value {
    let one = |token: TokenId, logprob: Option<f32>| json!({"token": token_text(token, model), "logprob": logprob, "bytes": model.tokenizer().bytes(token)});
    let content = scores.iter().map(|score| {
        let mut entry = one(score.token, score.logprob);
        let top = score
            .top
            .iter()
            .map(|&(token, logprob)| one(token, Some(logprob)));
        entry["top_logprobs"] = top.collect();
        entry
    });
    json!({"content": content.collect::<Value>(), "refusal": null})
}

/// Checks a body, renders its messages and tokenizes them.
fn chat(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body)?;
    request::check_model(&fields, model)?;
    request::refuse_fields(&fields, UNSUPPORTED)?;
    request::refuse_fields(&fields, &["echo", "best_of"])?;
    request::check_format(&fields)?;
    check_modalities(&fields)?;
    let delivery = request::response_mode(&fields)?;
    let choices = request::choices(&fields, 1)?;
    let logprobs = logprobs(&fields)?;
    let output = output(&fields, logprobs)?;
    let mut sampling = sampling(&fields, model)?;
    sampling.logprobs = logprobs;
    let stop = StopFields::read(&fields, model, 1)?;
    let (priority, cache_salt) = (request::priority(&fields)?, request::cache_salt(&fields)?);

    let warnings = match shown_tools(&fields)? {
        Some(_) => vec![TOOLS_WARNING],
        None => Vec::new(),
    };
    let tokens = prompt(&fields, model)?;
    let output_room = OutputRoom {
        param: "messages",
        context: model.context_tokens_max(),
        default: None,
    };
    let output_limit = stop.output_limit();
    let stop = stop.stop_rules(tokens.len(), output_room)?;
    let start = request::text_start(model, &tokens, output.special);
    let output_wanted = OutputWanted::Output;
    let prompt = TokenizedPrompt {
        tokens: tokens.into(),
        stop,
        start,
        echo: None,
        output_wanted,
    };
    Ok(GenerateRequest {
        prompts: vec![prompt],
        choices,
        sampling,
        output,
        delivery,
        priority,
        cache_salt,
        warnings,
        output_limit,
    })
}

fn check_modalities(fields: &JsonFields) -> Result<(), ApiError> {
    let is_text = |modality: Json<'_>| match modality.shape() {
        JsonShape::String(text) => text.get() == "text",
        _ => false,
    };
    let mut modalities = fields.array("modalities")?.into_iter().flatten();
    if modalities.all(is_text) {
        return Ok(());
    }
    Err(ApiError::unsupported(
        "modalities",
        "`modalities`: only \"text\" is supported.",
    ))
}

fn logprobs(fields: &JsonFields) -> Result<Option<u32>, ApiError> {
    let top = logprobs_count(fields, "top_logprobs")?;
    match (fields.flag("logprobs")?.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "`top_logprobs` needs `logprobs` to be true.",
        )),
    }
}

/// Reads the input of the chat template.
fn template_input(fields: &JsonFields) -> Result<TemplateInput, ApiError> {
    let messages = message::messages(fields)?;
    let end = render_end(fields)?;
    let documents = fields.array("documents")?.and(fields.any("documents"));
    let value = |json: Json<'_>| TemplateValue::of_json(&fields.part(json), json);
    Ok(TemplateInput {
        last_content: (end == RenderEnd::LastMessage)
            .then(|| message::last_content(&messages))
            .flatten(),
        body_bytes: messages.document().len(),
        tools: shown_tools(fields)?.map(value),
        documents: documents.map(value),
        variables: variables(fields)?.map(value),
        messages: message::list(messages),
        end,
    })
}

/// Renders and tokenizes the conversation.
fn prompt(fields: &JsonFields, model: &ModelText) -> Result<Vec<TokenId>, ApiError> {
    let (text, special) = rendered(fields, model)?;
    let tokens = text::encode(&text, special, model, "messages")?;
    if tokens.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "The messages render to an empty prompt.",
        ));
    }
    Ok(tokens)
}

/// Renders the conversation, and says whether special tokens are added to it.
pub(super) fn rendered(
    fields: &JsonFields,
    model: &ModelText,
) -> Result<(String, SpecialTokens), ApiError> {
    let conversation = template_input(fields)?;
    if !model.has_chat_template() {
        return Err(ApiError::bad_request(
            "no_chat_template",
            "This model has no chat template; use /v1/completions with the text as you want it.",
        ));
    }
    let text = model.render(&conversation).map_err(|error| match error {
        RenderError::Refused(reason) => ApiError::invalid(
            "messages",
            format!("The model's chat template refused these messages: {reason}"),
        ),
        other => ApiError::invalid("messages", format!("{other}.")),
    })?;
    // Templates write the special tokens themselves, so none are added by default.
    let special = match fields.flag("add_special_tokens")? {
        Some(true) => SpecialTokens::Kept,
        Some(false) | None => SpecialTokens::Skipped,
    };
    Ok((text, special))
}

fn shown_tools<'a>(fields: &JsonFields<'a>) -> Result<Option<Json<'a>>, ApiError> {
    let mut count = 0;
    for (index, tool) in fields.array("tools")?.into_iter().flatten().enumerate() {
        count += 1;
        let tool = fields.object_at(format!("tools[{index}]"), tool)?;
        let function = tool.object("function")?;
        if function
            .map(|function| function.text("name"))
            .transpose()?
            .flatten()
            .is_none()
        {
            let path = tool.path("function.name");
            return Err(ApiError::invalid(&*path, format!("`{path}` is missing.")));
        }
    }
    let choice = fields.any("tool_choice");
    let shown = match choice.map(|choice| (choice, choice.shape())) {
        None => true,
        Some((_, JsonShape::String(choice))) if choice.get() == "auto" => true,
        Some((_, JsonShape::String(choice))) if choice.get() == "none" => false,
        Some((_, JsonShape::String(_) | JsonShape::Object(_))) => {
            return Err(ApiError::unsupported(
                "tool_choice",
                "`tool_choice` may be \"auto\" or \"none\"; the output cannot be forced into a call.",
            ));
        }
        Some((other, _)) => return Err(wrong_type("tool_choice", "a string or an object", other)),
    };
    Ok(fields.any("tools").filter(|_| shown && count > 0))
}

/// Reads `chat_template_kwargs`, which cannot override the server's own variables.
fn variables<'a>(fields: &JsonFields<'a>) -> Result<Option<Json<'a>>, ApiError> {
    let Some(variables) = fields.object("chat_template_kwargs")? else {
        return Ok(None);
    };
    let own = ["messages", "tools", "documents", "add_generation_prompt"];
    let named = |name: &str| variables.members().any(|(key, _)| key.get() == name);
    if let Some(name) = own.iter().find(|name| named(name)) {
        let path = variables.path(name);
        return Err(ApiError::invalid(
            &*path,
            format!("`{path}`: use the field `{name}` instead."),
        ));
    }
    Ok(fields.any("chat_template_kwargs"))
}

fn render_end(fields: &JsonFields) -> Result<RenderEnd, ApiError> {
    let continued = fields.flag("continue_final_message")?.unwrap_or(false);
    match (continued, fields.flag("add_generation_prompt")?) {
        (true, Some(true)) => Err(ApiError::invalid(
            "continue_final_message",
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
        )),
        (true, _) => Ok(RenderEnd::LastMessage),
        (false, Some(false)) => Ok(RenderEnd::Closed),
        (false, Some(true) | None) => Ok(RenderEnd::AnswerOpening),
    }
}

#[cfg(test)]
mod reference;
