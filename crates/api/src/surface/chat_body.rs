//! Bodies of chat requests, as which requests of other APIs are served.
//!
//! Owns: the writing of such a body and of its messages. Never: reads a field of another API, or
//! decides what a request may ask for; chat does. Invariant: texts are copied with their escapes,
//! so that they do not grow.

use super::openai_chat::{CHAT, rendered_with_tools};
use super::tokenize::TOKENIZE_REQUEST;
use crate::error::{ApiError, FieldNames, renamed_path};
use crate::field::JsonFields;
use crate::request::text::encode_for_list;
use crate::request::{GenerateRequest, RequestWarning};
use cleave_text::ModelText;
use cleave_text::json::{Document, Json};
use std::borrow::Cow;

/// Key of the arguments of a call that are no object of JSON, as Anthropic recommends it.
pub(super) const BROKEN_ARGUMENTS: &str = "INVALID_JSON";

/// A text of JSON that is being written. Commas come by themselves.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonText(String);

impl JsonText {
    fn separate(&mut self) {
        if !matches!(self.0.as_bytes().last(), None | Some(b'{' | b'[' | b':')) {
            self.0.push(',');
        }
    }

    /// Begins an object or an array, with its bracket.
    pub(super) fn begin(&mut self, bracket: char) {
        self.separate();
        self.0.push(bracket);
    }

    /// Ends an object or an array, with its bracket.
    pub(super) fn end(&mut self, bracket: char) {
        self.0.push(bracket);
    }

    /// Writes a member's name, which has no character to escape; its value comes next.
    pub(super) fn name(&mut self, name: &str) {
        self.separate();
        self.0.push('"');
        self.0.push_str(name);
        self.0.push_str("\":");
    }

    /// Writes a value that is JSON already.
    pub(super) fn json(&mut self, value: &str) {
        self.separate();
        self.0.push_str(value);
    }

    /// Writes a text as a string.
    pub(super) fn text(&mut self, text: &str) {
        self.json(&serde_json::to_string(text).expect("a text is JSON"));
    }

    /// Writes a member that is JSON already.
    pub(super) fn member(&mut self, name: &str, value: &str) {
        self.name(name);
        self.json(value);
    }

    /// Writes strings as one, with `separator` between them, which is escaped already.
    pub(super) fn joined(&mut self, strings: &[Json<'_>], separator: &str) {
        self.separate();
        self.0.push('"');
        for (index, string) in strings.iter().enumerate() {
            if index > 0 {
                self.0.push_str(separator);
            }
            let quoted = string.text();
            self.0.push_str(&quoted[1..quoted.len() - 1]);
        }
        self.0.push('"');
    }

    pub(super) fn into_string(self) -> String {
        self.0
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks the whole text.
    ///
    /// # Errors
    /// 400 if it is nested too deeply: it may be deeper than the body that it is made of.
    pub(super) fn check(self) -> Result<Document, ApiError> {
        Document::check(self.0).map_err(|error| {
            ApiError::bad_request("invalid_json", format!("The body is not served: {error}."))
        })
    }
}

/// Serves the body of a chat request. Errors have the names of the request's own API.
pub(super) fn generate_request(
    body: JsonText,
    model: &ModelText,
    names: FieldNames,
) -> Result<GenerateRequest, ApiError> {
    let body = body.check()?;
    let mut ask = (CHAT.parse)(&body, model).map_err(|error| error.renamed(names))?;
    if let Some(asked) = &mut ask.constraint {
        asked.path = renamed_path(std::mem::take(&mut asked.path), names);
    }
    Ok(ask)
}

/// Counts the tokens of the conversation in the body of a chat request. Errors have the names of
/// the request's own API, in which `param` is the conversation.
pub(super) fn input_tokens_count(
    body: JsonText,
    model: &ModelText,
    names: FieldNames,
    param: &'static str,
) -> Result<usize, ApiError> {
    let body = body.check()?;
    let fields = JsonFields::of_body(&body, &TOKENIZE_REQUEST)?;
    let rendered = rendered_with_tools(&fields, model);
    let (text, special) = rendered.map_err(|error| error.renamed(names))?;
    Ok(encode_for_list(&text, special, model, param)?.len())
}

/// Line break between the texts of a message, escaped, as chat joins parts.
pub(super) const LINE_BREAK: &str = r"\n";

/// Writes the messages of a conversation. An assistant's message is put together of its parts, and
/// ends where another message begins.
#[derive(Clone, Debug)]
pub(super) struct ChatMessages<'a> {
    body: JsonText,
    answer: Option<AssistantDraft<'a>>,
}

/// An assistant's message that has not ended.
#[derive(Clone, Debug, Default)]
struct AssistantDraft<'a> {
    reasoning: Vec<Json<'a>>,
    texts: Vec<Json<'a>>,
    calls: JsonText,
}

impl<'a> ChatMessages<'a> {
    /// Begins the list of messages in a body.
    pub(super) fn new(mut body: JsonText) -> Self {
        body.name("messages");
        body.begin('[');
        Self { body, answer: None }
    }

    /// Writes a message of this role, with the texts of its parts. `separator` is escaped.
    pub(super) fn message(&mut self, role: &str, texts: &[Json<'_>], separator: &str) {
        self.end_answer();
        self.body.begin('{');
        self.body.name("role");
        self.body.text(role);
        self.body.name("content");
        self.body.joined(texts, separator);
        self.body.end('}');
    }

    /// Writes the result of a tool.
    pub(super) fn result(&mut self, id: Json<'_>, texts: &[Json<'_>]) {
        self.end_answer();
        self.body.begin('{');
        self.body.member("role", r#""tool""#);
        self.body.member("tool_call_id", id.text());
        self.body.name("content");
        self.body.joined(texts, LINE_BREAK);
        self.body.end('}');
    }

    /// Begins a message of the assistant, even if it will have no part.
    pub(super) fn begin_answer(&mut self) {
        self.end_answer();
        self.answer = Some(AssistantDraft::default());
    }

    fn draft(&mut self) -> &mut AssistantDraft<'a> {
        self.answer.get_or_insert_default()
    }

    /// Adds reasoning to the assistant's message.
    pub(super) fn reasoning(&mut self, text: Json<'a>) {
        self.draft().reasoning.push(text);
    }

    /// Adds text to the assistant's message.
    pub(super) fn answer_text(&mut self, text: Json<'a>) {
        self.draft().texts.push(text);
    }

    /// Adds a call to the assistant's message. `name` is a string of JSON, and `arguments` JSON.
    pub(super) fn call(&mut self, id: Json<'_>, name: &str, arguments: &str) {
        let calls = &mut self.draft().calls;
        calls.begin('{');
        calls.member("id", id.text());
        calls.member("type", r#""function""#);
        calls.name("function");
        calls.begin('{');
        calls.member("name", name);
        calls.member("arguments", arguments);
        calls.end('}');
        calls.end('}');
    }

    /// Whether the assistant's message has text or a call already. Reasoning and text of the same
    /// answer come before them.
    pub(super) fn has_answered(&self) -> bool {
        let answer = self.answer.as_ref();
        answer.is_some_and(|draft| !draft.texts.is_empty() || !draft.calls.is_empty())
    }

    /// Ends the assistant's message, if there is one.
    pub(super) fn end_answer(&mut self) {
        let Some(draft) = self.answer.take() else {
            return;
        };
        let AssistantDraft {
            reasoning,
            texts,
            calls,
        } = draft;
        let out = &mut self.body;
        out.begin('{');
        out.member("role", r#""assistant""#);
        if !reasoning.is_empty() {
            out.name("reasoning_content");
            out.joined(&reasoning, LINE_BREAK);
        }
        out.name("content");
        out.joined(&texts, LINE_BREAK);
        if !calls.is_empty() {
            out.name("tool_calls");
            out.begin('[');
            out.json(calls.as_str());
            out.end(']');
        }
        out.end('}');
    }

    /// Ends the list; returns the body.
    pub(super) fn finish(mut self) -> JsonText {
        self.end_answer();
        self.body.end(']');
        self.body
    }
}

/// A tool as chat describes it.
#[derive(Clone, Debug)]
pub(super) struct ChatTool<'a> {
    /// A string of JSON, as the description is.
    pub(super) name: Cow<'a, str>,
    pub(super) description: Option<Cow<'a, str>>,
    /// The JSON Schema of its arguments.
    pub(super) parameters: Option<Cow<'a, str>>,
    pub(super) is_strict: bool,
}

impl ChatTool<'_> {
    pub(super) fn write(&self, out: &mut JsonText) {
        let Self {
            name,
            description,
            parameters,
            is_strict,
        } = self;
        out.begin('{');
        out.member("type", r#""function""#);
        out.name("function");
        out.begin('{');
        out.member("name", name);
        for (key, value) in [("description", description), ("parameters", parameters)] {
            if let Some(value) = value {
                out.member(key, value);
            }
        }
        if *is_strict {
            out.member("strict", "true");
        }
        out.end('}');
        out.end('}');
    }
}

/// Limit of the tools of a request: each takes memory while the answer is read. OpenAI's is 128.
pub(super) const TOOLS_MAX: usize = 1024;

/// The tools of a request of another API, and the choice among them, as chat has them.
#[derive(Clone, Debug, Default)]
pub(super) struct ConvertedTools<'a> {
    pub(super) tools: Vec<ChatTool<'a>>,
    /// `tool_choice` of a chat request, as JSON; `None` leaves the choice to the model.
    pub(super) choice: Option<String>,
    /// Whether an answer has one call at most.
    pub(super) is_single: bool,
    /// The warning of tools that are left out.
    pub(super) warning: Option<RequestWarning>,
}

impl ConvertedTools<'_> {
    /// Writes the members of a chat request.
    pub(super) fn write(&self, out: &mut JsonText) {
        if !self.tools.is_empty() {
            out.name("tools");
            out.begin('[');
            for tool in &self.tools {
                tool.write(out);
            }
            out.end(']');
        }
        if let Some(choice) = &self.choice {
            out.member("tool_choice", choice);
        }
        if self.is_single {
            out.member("parallel_tool_calls", "false");
        }
    }
}

/// Writes the choice of one tool by its name, a string of JSON.
pub(super) fn write_named_choice(out: &mut JsonText, name: Json<'_>) {
    out.begin('{');
    out.member("type", r#""function""#);
    out.name("function");
    out.begin('{');
    out.member("name", name.text());
    out.end('}');
    out.end('}');
}
