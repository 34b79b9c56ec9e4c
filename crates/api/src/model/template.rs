//! Chat templates, as Hugging Face renders them.
//!
//! Owns: Jinja's set-up as in `apply_chat_template` (trimmed blocks, `raise_exception`,
//! `strftime_now`, Python's methods and `tojson`). Never: tokenizes, or trusts the template: fuel
//! bounds what it may do. Invariant: the rendered text is the one the reference renders.

use super::budget::{Spent, within};
use super::calendar::strftime;
use super::python_json::{Characters, Keys, Style};
use super::sandbox::{environment, steps};
use minijinja::machinery::{
    Instruction, Instructions, Token, eval, get_compiled_template, make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Template};
use serde_json::Map;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Instructions one rendering may take: some seconds, and hundreds of times what a full context of
/// short messages needs.
const FUEL: u64 = 20_000_000;
/// Time that one rendering may take.
const TIME_MAX: Duration = Duration::from_secs(5);
/// Bytes that one rendering may make, output and everything on the way to it, ...
const BYTES_MAX: usize = 8 << 20;
/// ... and so many more for each byte of the body: templates cut, join and compare a message some times over.
const BYTES_PER_BYTE: usize = 16;
/// A template's source.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Bytes that the constant expressions of a template's source may make together: the library computes them
/// while it compiles.
const CONSTANT_BYTES_MAX: u64 = 1 << 20;
/// Characters of a refusal's text, which may quote what a client sent.
const REASON_MAX: usize = 1000;

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
    /// It would make more than it may.
    #[error("the chat template needs more than {0} bytes for these messages")]
    OutOfBytes(usize),
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
        let mut environment = environment();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        let syntax = syntax.map_err(|error| error.to_string())?;
        environment.set_syntax(syntax.clone());
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        for (name, source) in templates {
            let source = without_generation_marks(&source);
            check_source(&source, &syntax)?;
            environment
                .add_template_owned(name, source)
                .map_err(|error| format!("{error:#}"))?;
        }
        for (_, template) in environment.templates() {
            let compiled = get_compiled_template(&template);
            for code in [&compiled.instructions]
                .into_iter()
                .chain(compiled.blocks.values())
            {
                check_instructions(code)?;
            }
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
            body_bytes,
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
        let bytes_max = BYTES_MAX.saturating_add(body_bytes.saturating_mul(BYTES_PER_BYTE));
        let text_bytes = text_bytes(messages, *body_bytes);
        let render = || self.run(&template, Value::from_object(root), text_bytes);
        let (rendered, spent) = within(bytes_max, TIME_MAX, render);
        let rendered = match spent {
            Some(Spent::Bytes) => return Err(RenderError::OutOfBytes(bytes_max)),
            Some(Spent::Time) => return Err(RenderError::OutOfFuel),
            None => rendered.map_err(|error| refused(&error))?,
        };
        match end {
            End::LastMessage => cut_at_last_message(rendered, last_content.as_deref()),
            End::Closed | End::Answer => Ok(rendered),
        }
    }
}

impl ChatTemplates {
    fn run(
        &self,
        template: &Template<'_, '_>,
        root: Value,
        text_bytes: usize,
    ) -> Result<String, Error> {
        let compiled = get_compiled_template(template);
        let name = |name: &str| compiled.blocks.keys().find(|key| **key == name).copied();
        let blocks: BTreeMap<&str, Instructions<'_>> = compiled
            .blocks
            .iter()
            .filter_map(|(block, code)| Some((name(block)?, guarded(code))))
            .collect();
        let code = guarded(&compiled.instructions);
        let mut text = String::with_capacity(text_bytes);
        let mut out = make_string_output(&mut text);
        eval(
            &self.environment,
            &code,
            root,
            &blocks,
            &mut out,
            AutoEscape::None,
        )?;
        drop(out);
        Ok(text)
    }
}

/// What the text of many short messages comes to: a text that grows by doubling takes twice its memory. Long
/// messages come in large pieces, and their text does not double.
fn text_bytes(messages: &Value, body_bytes: usize) -> usize {
    /// Of the marks that a template puts around a message.
    const MARKS_BYTES: usize = 36;
    /// Messages that are shorter on the average are short.
    const SHORT_BYTES: usize = 4096;
    let count = messages.len().unwrap_or(0);
    match body_bytes / SHORT_BYTES < count {
        true => body_bytes + body_bytes / 8 + count.saturating_mul(MARKS_BYTES),
        false => 1024,
    }
}

/// The same instructions, with checks before those that make something: the library has no hook of its own.
/// They take no longer than some microseconds for the longest templates in use.
fn guarded<'a>(code: &Instructions<'a>) -> Instructions<'a> {
    let all = (0..).map_while(|at| Some((at, code.get(at)?.clone())));
    let mut new_places = Vec::new();
    let mut steps = Vec::new();
    for (at, instruction) in all {
        new_places.push(steps.len() as u32);
        let line = code.get_line(at).unwrap_or(0) as u16;
        steps.extend(
            with_checks(instruction)
                .into_iter()
                .map(|step| (step, line)),
        );
    }
    new_places.push(steps.len() as u32);
    let moved = |target: u32| new_places.get(target as usize).copied().unwrap_or(target);
    let mut guarded = Instructions::new(code.name(), code.source());
    for (step, line) in steps {
        let step = match step {
            Instruction::Iterate(target) => Instruction::Iterate(moved(target)),
            Instruction::Jump(target) => Instruction::Jump(moved(target)),
            Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(moved(target)),
            Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(moved(target)),
            Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(moved(target)),
            Instruction::BuildMacro(name, target, flags) => {
                Instruction::BuildMacro(name, moved(target), flags)
            }
            other => other,
        };
        guarded.add_with_line(step, line);
    }
    guarded
}

/// An instruction and what is to be done before and after it.
fn with_checks(instruction: Instruction<'_>) -> Vec<Instruction<'_>> {
    use Instruction::{ApplyFilter, Swap, UnpackList};
    /// No place in the library's cache of filters.
    const UNCACHED: u8 = !0;
    let step = |name, count| ApplyFilter(name, Some(count), UNCACHED);
    let checked = |name, instruction| vec![step(name, 2), UnpackList(2), instruction];
    match instruction {
        Instruction::EmitRaw(text) => {
            vec![Instruction::LoadConst(Value::from(text)), Instruction::Emit]
        }
        Instruction::Add => {
            let mut steps = checked(steps::ADD, Instruction::Add);
            steps.push(step(steps::MADE, 1));
            steps
        }
        Instruction::Mul => {
            let mut steps = checked(steps::REPEAT, Instruction::Mul);
            steps.push(step(steps::MADE, 1));
            steps
        }
        Instruction::StringConcat => checked(steps::CONCAT, Instruction::StringConcat),
        Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::In => checked(steps::COMPARE, instruction),
        Instruction::Slice => vec![step(steps::SLICE, 4)],
        Instruction::BuildList(_) | Instruction::BuildTuple(_) | Instruction::BuildMap(_) => {
            vec![instruction, step(steps::BUILT, 1)]
        }
        Instruction::SetAttr(_) => checked(steps::KEPT, instruction),
        Instruction::GetItem => vec![Swap, step(steps::READ, 1), Swap, instruction],
        Instruction::GetAttr(_) | Instruction::PerformTest(_, Some(1..), _) => {
            vec![step(steps::READ, 1), instruction]
        }
        Instruction::MergeKwargs(count) => vec![
            Instruction::BuildList(Some(count)),
            step(steps::MERGE, 1),
            UnpackList(count),
            Instruction::MergeKwargs(count),
        ],
        // Nothing that the check could take is on the stack.
        Instruction::Iterate(_) | Instruction::CallFunction(..) => vec![
            Instruction::LoadConst(Value::UNDEFINED),
            step(steps::READ, 1),
            Instruction::DiscardTop,
            instruction,
        ],
        Instruction::PushLoop(_) => vec![step(steps::LOOPED, 1), instruction],
        other => vec![other],
    }
}

/// Refuses what cannot be guarded, none of which chat templates use.
fn check_instructions(code: &Instructions<'_>) -> Result<(), String> {
    for at in 0.. {
        let Some(instruction) = code.get(at) else {
            return Ok(());
        };
        let what = match instruction {
            Instruction::UnpackLists(_) => "`*` before an argument or item",
            Instruction::CompareAndPreserve(_) => {
                "a chain of comparisons (write `a < b and b < c`)"
            }
            Instruction::Include(_) | Instruction::LoadBlocks | Instruction::ExportLocals => {
                "`include`, `import` or `extends`"
            }
            _ => continue,
        };
        let line = code.get_line(at).unwrap_or(0);
        return Err(format!(
            "line {line}: {what} is not supported in a chat template"
        ));
    }
    Ok(())
}

/// Refuses a source that takes much to compile.
fn check_source(source: &str, syntax: &SyntaxConfig) -> Result<(), String> {
    if source.len() > SOURCE_BYTES_MAX {
        let bytes = source.len();
        return Err(format!(
            "the template has {bytes} bytes; at most {SOURCE_BYTES_MAX} are allowed"
        ));
    }
    let tokens = tokenize(source, false, syntax.clone());
    // The compiler reports what is wrong with the others.
    let tokens: Vec<Token<'_>> = tokens.map_while(|token| Some(token.ok()?.0)).collect();
    let mut bytes: u64 = 0;
    for run in tokens.split(|token| !may_be_constant(token)) {
        bytes = bytes.saturating_add(constant_bytes(run));
    }
    match bytes > CONSTANT_BYTES_MAX {
        true => Err(format!(
            "the template's constant expressions may make {bytes} bytes; at most {CONSTANT_BYTES_MAX} are allowed \
             (repeat texts and lists less often)"
        )),
        false => Ok(()),
    }
}

/// Whether a token may stand within an expression that is computed while the template is compiled.
fn may_be_constant(token: &Token<'_>) -> bool {
    match token {
        Token::Ident(name) => matches!(
            *name,
            "true" | "True" | "false" | "False" | "none" | "None" | "not" | "and" | "or" | "in"
        ),
        Token::TemplateData(_)
        | Token::VariableStart
        | Token::VariableEnd
        | Token::BlockStart
        | Token::BlockEnd
        | Token::Pipe
        | Token::Assign => false,
        _ => true,
    }
}

/// The most that constant expressions of these tokens make: their texts and items, as often as all their numbers
/// together can repeat them. Where nothing is multiplied, this is no more than the source.
fn constant_bytes(tokens: &[Token<'_>]) -> u64 {
    /// Of an item, or of a number's text.
    const ITEM_BYTES: u64 = 40;
    let multiplies = |token: &Token<'_>| matches!(token, Token::Mul | Token::Pow);
    // A variable stands before the first of them, and what is multiplied with it is no constant.
    let mut tokens = tokens;
    while let [Token::Mul, Token::Int(_) | Token::Float(_), rest @ ..] = tokens {
        if matches!(rest, [Token::Pow, ..]) {
            break;
        }
        tokens = rest;
    }
    if !tokens.iter().any(multiplies) {
        return 0;
    }
    let (mut bytes, mut times) = (0u64, 1u64);
    for token in tokens {
        // A sum is no more than the product of numbers from 2 on.
        let (made, factor) = match token {
            Token::Str(text) => (text.len() as u64, 1),
            Token::String(text) => (text.len() as u64, 1),
            Token::Int(number) => (ITEM_BYTES, (*number).max(2)),
            Token::Float(number) => (
                ITEM_BYTES,
                number.abs().max(number.abs().recip()) as u64 + 2,
            ),
            Token::Int128(_) | Token::Pow => (ITEM_BYTES, u64::MAX),
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen | Token::Comma => {
                (ITEM_BYTES, 1)
            }
            _ => (0, 1),
        };
        bytes = bytes.saturating_add(made);
        times = times.saturating_mul(factor);
    }
    // Numbers alone make numbers.
    let repeats = |token: &Token<'_>| {
        matches!(
            token,
            Token::Str(_) | Token::String(_) | Token::BracketOpen | Token::Comma | Token::Tilde
        )
    };
    match tokens.iter().any(repeats) {
        true => bytes.saturating_mul(times),
        false => 0,
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
            Some(detail) => detail.chars().take(REASON_MAX).collect(),
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
mod tests;
