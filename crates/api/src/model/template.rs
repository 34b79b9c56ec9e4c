//! Chat templates, as Hugging Face renders them.
//!
//! Owns: Jinja's set-up as in `apply_chat_template` (trimmed blocks, `raise_exception`,
//! `strftime_now`, Python's methods and `tojson`). Never: tokenizes, or trusts the template: fuel
//! bounds what it may do. Invariant: the rendered text is the one the reference renders.

use super::calendar::strftime;
use super::python_json::{Characters, Keys, Style};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Map;
use std::sync::Arc;
use std::time::SystemTime;

/// Instructions one rendering may take: some seconds, and hundreds of times what a full context of
/// short messages needs.
const FUEL: u64 = 20_000_000;

/// The templates of a model.
pub(crate) struct ChatTemplates {
    environment: Environment<'static>,
    /// `bos_token` and its like, which templates use by name.
    special_tokens: Arc<[(String, Value)]>,
}

/// What to render.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    /// A list of messages.
    pub(crate) messages: Value,
    /// Bytes of what the values here were read from.
    pub(crate) body_bytes: usize,
    /// Tool descriptions; `None` if there are none.
    pub(crate) tools: Option<Value>,
    /// Documents for templates that know them.
    pub(crate) documents: Option<Value>,
    /// Further variables: a mapping.
    pub(crate) variables: Option<Value>,
    /// The text of the last message, where that is to be continued.
    pub(crate) last_content: Option<String>,
    /// How the text ends.
    pub(crate) end: End,
}

/// The variables of a rendering.
#[derive(Debug)]
struct Root {
    own: [(&'static str, Value); 4],
    variables: Option<Value>,
    special_tokens: Arc<[(String, Value)]>,
}

impl Object for Root {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if let Some((_, value)) = self.own.iter().find(|(name, _)| *name == key) {
            return Some(value.clone());
        }
        let variables = self.variables.as_ref().and_then(Value::as_object);
        if let Some(value) = variables.and_then(|map| map.get_value_by_str(key)) {
            return Some(value);
        }
        let mut tokens = self.special_tokens.iter();
        let (_, token) = tokens.find(|(name, _)| name == key)?;
        Some(token.clone())
    }
}

/// How a rendered conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// After the last message.
    Closed,
    /// With the beginning of an answer.
    Answer,
    /// Within the last message, which the model shall continue.
    LastMessage,
}

/// Why a conversation was not rendered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RenderError {
    /// The template called `raise_exception`, or ran into something that it cannot take.
    #[error("{0}")]
    Refused(String),
    /// It would not end.
    #[error("the chat template needs too long for these messages")]
    OutOfFuel,
    /// The last message is not in the rendered text.
    #[error("the last message cannot be continued: the chat template does not keep its text")]
    NotContinuable,
}

impl ChatTemplates {
    /// Compiles the templates; the error is the first template's that does not compile.
    pub(crate) fn new(
        templates: Vec<(String, String)>,
        special_tokens: Map<String, serde_json::Value>,
    ) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        for (name, source) in templates {
            environment
                .add_template_owned(name, without_generation_marks(&source))
                .map_err(|error| format!("{error:#}"))?;
        }
        Ok(Self {
            environment,
            special_tokens: special_tokens
                .into_iter()
                .filter_map(|(name, token)| Some((name, Value::from(token.as_str()?))))
                .collect(),
        })
    }

    /// Renders a conversation.
    pub(crate) fn render(&self, conversation: &Conversation) -> Result<String, RenderError> {
        let Conversation {
            messages,
            tools,
            documents,
            variables,
            end,
            last_content,
            body_bytes: _,
        } = conversation;
        let or_none = |value: &Option<Value>| value.clone().unwrap_or(Value::from(()));
        let root = Root {
            own: [
                ("messages", messages.clone()),
                ("tools", or_none(tools)),
                ("documents", or_none(documents)),
                ("add_generation_prompt", (*end == End::Answer).into()),
            ],
            variables: variables.clone(),
            special_tokens: Arc::clone(&self.special_tokens),
        };
        let with_tools = self
            .environment
            .get_template("tool_use")
            .ok()
            .filter(|_| tools.is_some());
        let template = match with_tools {
            Some(template) => template,
            None => self
                .environment
                .get_template("default")
                .map_err(|error| refused(&error))?,
        };
        let rendered = template
            .render(Value::from_object(root))
            .map_err(|error| refused(&error))?;
        match end {
            End::LastMessage => cut_at_last_message(rendered, last_content.as_deref()),
            End::Closed | End::Answer => Ok(rendered),
        }
    }
}

/// Ends the text where the last message's own text ends.
fn cut_at_last_message(mut rendered: String, content: Option<&str>) -> Result<String, RenderError> {
    let content = content.ok_or(RenderError::NotContinuable)?;
    let start = rendered
        .rfind(content.trim())
        .ok_or(RenderError::NotContinuable)?;
    // Templates that strip messages lose the blanks at the end; the others keep them.
    let kept = content.trim_start();
    let kept = if rendered[start..].starts_with(kept) {
        kept
    } else {
        content.trim()
    };
    rendered.truncate(start + kept.len());
    Ok(rendered)
}

fn refused(error: &Error) -> RenderError {
    match error.kind() {
        ErrorKind::OutOfFuel => RenderError::OutOfFuel,
        _ => RenderError::Refused(match error.detail() {
            Some(detail) => detail.to_owned(),
            None => error.to_string(),
        }),
    }
}

/// `{% generation %}` marks what to train on; for rendering it is no more than a block.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start..start + length];
        let word = tag[2..]
            .trim_start_matches(['-', '+'])
            .trim_end_matches(['-', '+'])
            .trim();
        out.push_str(&rest[..start]);
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[start + length..];
    }
    out + rest
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> String {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    strftime(format, since.as_secs())
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the template engine passes options by value"
)]
fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let named: Option<usize> = options.get("indent")?;
    let mut style = Style::indented(indent.or(named));
    if options.get::<Option<bool>>("sort_keys")?.unwrap_or(false) {
        style.keys = Keys::Sorted;
    }
    if options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false)
    {
        style.characters = Characters::Escaped;
    }
    if let Some(separators) = options.get::<Option<Value>>("separators")? {
        style.item_separator = separators.get_item_by_index(0)?.to_string();
        style.key_separator = separators.get_item_by_index(1)?.to_string();
    }
    options.assert_all_used()?;
    Ok(Value::from_safe_string(style.dump(value)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;
    use serde_json::json;

    fn templates(source: &str) -> ChatTemplates {
        let special = json!({"bos_token": "<s>"}).as_object().cloned().unwrap();
        ChatTemplates::new(vec![("default".into(), source.into())], special).unwrap()
    }

    fn conversation(end: End) -> Conversation {
        let messages = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": " Sure, Hi "},
        ]);
        Conversation {
            messages: Value::from(Serde(messages)),
            body_bytes: 100,
            tools: None,
            documents: None,
            variables: None,
            last_content: Some(" Sure, Hi ".to_owned()),
            end,
        }
    }

    #[test]
    fn generation_marks_stopped_the_template() {
        let source = "{% for m in messages %}\n{%- generation -%} [{{ m.content }}] {% endgeneration %}\n{% endfor %}";
        assert_eq!(
            templates(source)
                .render(&conversation(End::Closed))
                .unwrap(),
            "[Hi] [ Sure, Hi ] "
        );
    }

    #[test]
    fn a_template_that_never_ends_hung_the_server() {
        let source =
            "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
        let error = templates(source)
            .render(&conversation(End::Closed))
            .unwrap_err();
        assert!(matches!(error, RenderError::OutOfFuel), "{error}");
    }

    #[test]
    fn the_last_message_was_closed_though_it_goes_on() {
        let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
        let kept = templates(plain)
            .render(&conversation(End::LastMessage))
            .unwrap();
        assert_eq!(kept, "<user>Hi</><assistant> Sure, Hi ");
        let strip = "{% for m in messages %}<{{ m.role }}>{{ m.content.strip() }}</>{% endfor %}";
        let stripped = templates(strip)
            .render(&conversation(End::LastMessage))
            .unwrap();
        assert_eq!(stripped, "<user>Hi</><assistant>Sure, Hi");
        let drops = "{{ bos_token }}";
        assert!(
            templates(drops)
                .render(&conversation(End::LastMessage))
                .is_err()
        );
    }

    #[test]
    fn python_values_were_spelt_as_in_rust() {
        let source = "{{ none }} {{ true }} {{ [1, 'a', none] }} {{ {'a': false} }} {{ 1.0 }} {{ 7 // 2 }} {{ 'ab'[::-1] }}";
        assert_eq!(
            templates(source)
                .render(&conversation(End::Closed))
                .unwrap(),
            "None True [1, 'a', None] {'a': False} 1.0 3 ba"
        );
    }
}
