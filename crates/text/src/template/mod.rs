//! Chat templates, as Hugging Face renders them.
//!
//! Owns: Jinja's set-up as in `apply_chat_template` (trimmed blocks, `raise_exception`,
//! `strftime_now`, Python's methods and `tojson`). Never: tokenizes, or trusts the template, whose
//! work is limited. Invariant: the rendered text equals that of the reference.

mod budget;
mod calendar;
mod cost;
mod json_value;
mod python_json;
mod sandbox;

pub use json_value::TemplateValue;

use budget::{BudgetLimit, with_budget};
use calendar::strftime;
use minijinja::machinery::{
    Instruction, Instructions, Token, eval, get_compiled_template, make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Template};
use python_json::{JsonStyle, KeyOrder, NonAsciiStyle};
use sandbox::{environment, steps};
use serde_json::Map;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Limit of instructions in one rendering: some seconds, and hundreds of times the need of a full
/// context of short messages.
const FUEL: u64 = 20_000_000;
/// Time limit of one rendering.
const TIME_MAX: Duration = Duration::from_secs(5);
/// Limit of the bytes that one rendering makes, its output and all intermediate values: a constant,
/// ...
const BYTES_MAX: usize = 8 << 20;
/// ... and this many more per byte of the body, because templates split, join and compare a message
/// several times.
const BYTES_PER_BYTE: usize = 16;
/// Limit of a template's source.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Limit of the bytes that the constant expressions of a template make together: the library
/// evaluates them while it compiles.
const CONSTANT_BYTES_MAX: u64 = 1 << 20;
/// Limit of the characters of a refusal's text, which may quote what a client sent.
const REASON_MAX: usize = 1000;

/// Limit of the bytes that the rendering of a body of this size makes.
pub fn rendering_bytes_max(body_bytes: usize) -> usize {
    BYTES_MAX.saturating_add(body_bytes.saturating_mul(BYTES_PER_BYTE))
}

pub(crate) struct ChatTemplates {
    environment: Environment<'static>,
    /// `bos_token` and similar, which templates use by name.
    special_tokens: Arc<[(String, Value)]>,
}

/// The input of a rendering.
#[derive(Clone, Debug)]
pub struct TemplateInput {
    /// The messages: a list of mappings.
    pub messages: TemplateValue,
    /// Size of the body from which the values were read.
    pub body_bytes: usize,
    /// Tool descriptions, if any.
    pub tools: Option<TemplateValue>,
    /// Documents, for templates that use them.
    pub documents: Option<TemplateValue>,
    /// Further variables: a mapping.
    pub variables: Option<TemplateValue>,
    /// Text of the last message, if it is to be continued.
    pub last_content: Option<String>,
    /// End of the text.
    pub end: RenderEnd,
}

/// The variables of a rendering.
#[derive(Debug)]
struct TemplateVariables {
    server_variables: [(&'static str, Value); 4],
    variables: Option<Value>,
    special_tokens: Arc<[(String, Value)]>,
}

impl Object for TemplateVariables {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if let Some((_, value)) = self.server_variables.iter().find(|(name, _)| *name == key) {
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

/// The end of a rendered conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenderEnd {
    /// The text ends after the last message.
    Closed,
    /// The text ends with the beginning of an answer.
    AnswerOpening,
    /// The text ends within the last message, which the model continues.
    LastMessage,
}

/// The reason why a conversation was not rendered.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The template called `raise_exception`, or failed on its input.
    #[error("{0}")]
    Refused(String),
    /// The limit of instructions or time was reached.
    #[error("the chat template needs too long for these messages")]
    OutOfFuel,
    /// The limit of bytes was reached.
    #[error("the chat template needs more than {0} bytes for these messages")]
    OutOfBytes(usize),
    /// The rendered text does not contain the last message.
    #[error("the last message cannot be continued: the chat template does not keep its text")]
    NotContinuable,
}

impl ChatTemplates {
    /// Compiles the templates. The error is that of the first template that does not compile.
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

    pub(crate) fn render(&self, conversation: &TemplateInput) -> Result<String, RenderError> {
        self.render_within(conversation, TIME_MAX)
    }

    fn render_within(
        &self,
        conversation: &TemplateInput,
        time_max: Duration,
    ) -> Result<String, RenderError> {
        let TemplateInput {
            messages,
            tools,
            documents,
            variables,
            end,
            last_content,
            body_bytes,
        } = conversation;
        let or_none = |value: &Option<TemplateValue>| match value {
            Some(TemplateValue(value)) => value.clone(),
            None => Value::from(()),
        };
        let root = TemplateVariables {
            server_variables: [
                ("messages", messages.0.clone()),
                ("tools", or_none(tools)),
                ("documents", or_none(documents)),
                (
                    "add_generation_prompt",
                    (*end == RenderEnd::AnswerOpening).into(),
                ),
            ],
            variables: variables.as_ref().map(|variables| variables.0.clone()),
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
                .map_err(|error| render_error(&error))?,
        };
        let bytes_max = rendering_bytes_max(*body_bytes);
        let text_bytes = text_bytes(&messages.0, *body_bytes);
        let render = || self.run(&template, Value::from_object(root), text_bytes);
        let (rendered, spent) = with_budget(bytes_max, time_max, render);
        let rendered = match spent {
            Some(BudgetLimit::Bytes) => return Err(RenderError::OutOfBytes(bytes_max)),
            Some(BudgetLimit::Time) => return Err(RenderError::OutOfFuel),
            None => rendered.map_err(|error| render_error(&error))?,
        };
        match end {
            RenderEnd::LastMessage => cut_at_last_message(rendered, last_content.as_deref()),
            RenderEnd::Closed | RenderEnd::AnswerOpening => Ok(rendered),
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
            .filter_map(|(block, code)| Some((name(block)?, with_budget_checks(code))))
            .collect();
        let code = with_budget_checks(&compiled.instructions);
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

/// Returns the initial capacity of a text, in bytes. For many short messages it is the capacity of
/// the whole text, since a text that grows by doubling takes twice its memory. Long messages arrive
/// in large pieces, after which the text does not double.
fn text_bytes(messages: &Value, body_bytes: usize) -> usize {
    /// Bytes that a template writes around a message.
    const MARKS_BYTES: usize = 36;
    /// Average size below which messages are short.
    const SHORT_BYTES: usize = 4096;
    let count = messages.len().unwrap_or(0);
    if body_bytes / SHORT_BYTES < count {
        body_bytes + body_bytes / 8 + count.saturating_mul(MARKS_BYTES)
    } else {
        1024
    }
}

/// Copies the instructions and adds checks before those that make something: the library has no
/// hook for this. The copy takes some microseconds for the longest templates in use.
fn with_budget_checks<'a>(code: &Instructions<'a>) -> Instructions<'a> {
    let all = (0..).map_while(|at| Some((at, code.get(at)?.clone())));
    let mut new_places = Vec::new();
    let mut steps = Vec::new();
    for (at, instruction) in all {
        new_places.push(steps.len() as u32);
        let line = code.get_line(at).unwrap_or(0) as u16;
        steps.extend(
            checked_instruction(instruction)
                .into_iter()
                .map(|step| (step, line)),
        );
    }
    new_places.push(steps.len() as u32);
    // The inserted checks shift all later instructions, so jumps get new targets.
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

/// Returns an instruction with the checks before and after it.
fn checked_instruction(instruction: Instruction<'_>) -> Vec<Instruction<'_>> {
    use Instruction::{ApplyFilter, Swap, UnpackList};
    /// Index outside the library's cache of filters.
    const UNCACHED: u8 = !0;
    let step = |name, count| ApplyFilter(name, Some(count), UNCACHED);
    let checked = |name, instruction| vec![step(name, 2), UnpackList(2), instruction];
    match instruction {
        Instruction::EmitRaw(text) => {
            vec![Instruction::LoadConst(Value::from(text)), Instruction::Emit]
        }
        Instruction::Add => {
            let mut steps = checked(steps::ADD, Instruction::Add);
            steps.push(step(steps::MATERIALIZE, 1));
            steps
        }
        Instruction::Mul => {
            let mut steps = checked(steps::REPEAT, Instruction::Mul);
            steps.push(step(steps::MATERIALIZE, 1));
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
            vec![instruction, step(steps::CHECK_BUILT, 1)]
        }
        Instruction::SetAttr(_) => checked(steps::CHECK_STORED, instruction),
        Instruction::GetItem => vec![Swap, step(steps::CHECK_TIME, 1), Swap, instruction],
        Instruction::GetAttr(_) | Instruction::PerformTest(_, Some(1..), _) => {
            vec![step(steps::CHECK_TIME, 1), instruction]
        }
        Instruction::MergeKwargs(count) => vec![
            Instruction::BuildList(Some(count)),
            step(steps::MERGE, 1),
            UnpackList(count),
            Instruction::MergeKwargs(count),
        ],
        // The stack has no operand that the check could take, so it gets one of its own.
        Instruction::Iterate(_) | Instruction::CallFunction(..) => vec![
            Instruction::LoadConst(Value::UNDEFINED),
            step(steps::CHECK_TIME, 1),
            Instruction::DiscardTop,
            instruction,
        ],
        Instruction::PushLoop(_) => vec![step(steps::CHARGE_LOOP_VALUE, 1), instruction],
        other => vec![other],
    }
}

/// Refuses instructions that cannot be checked, none of which chat templates use.
fn check_instructions(code: &Instructions<'_>) -> Result<(), String> {
    for at in 0.. {
        let Some(instruction) = code.get(at) else {
            return Ok(());
        };
        let construct = match instruction {
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
            "line {line}: {construct} is not supported in a chat template"
        ));
    }
    Ok(())
}

/// Refuses a source whose compilation takes much memory.
fn check_source(source: &str, syntax: &SyntaxConfig) -> Result<(), String> {
    if source.len() > SOURCE_BYTES_MAX {
        let bytes = source.len();
        return Err(format!(
            "the template has {bytes} bytes; at most {SOURCE_BYTES_MAX} are allowed"
        ));
    }
    let tokens = tokenize(source, false, syntax.clone());
    // The compiler reports errors in the rest.
    let tokens: Vec<Token<'_>> = tokens.map_while(|token| Some(token.ok()?.0)).collect();
    let mut bytes: u64 = 0;
    for run in tokens.split(|token| !may_be_constant(token)) {
        bytes = bytes.saturating_add(constant_bytes(run));
    }
    if bytes > CONSTANT_BYTES_MAX {
        Err(format!(
            "the template's constant expressions may make {bytes} bytes; at most {CONSTANT_BYTES_MAX} are allowed \
             (repeat texts and lists less often)"
        ))
    } else {
        Ok(())
    }
}

/// Whether a token may be part of an expression that is evaluated while the template is compiled.
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

/// Returns an upper bound of the bytes that constant expressions of these tokens make: their texts
/// and items, repeated as often as the product of all their numbers. Without a multiplication the
/// result is no larger than the source.
fn constant_bytes(tokens: &[Token<'_>]) -> u64 {
    /// Bytes of an item, or of a number's text.
    const ITEM_BYTES: u64 = 40;
    let multiplies = |token: &Token<'_>| matches!(token, Token::Mul | Token::Pow);
    // A variable precedes the first factors, and its product is no constant.
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
                (number.abs().max(number.abs().recip()) as u64).saturating_add(2),
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
    // Expressions of numbers only make numbers.
    let repeats = |token: &Token<'_>| {
        matches!(
            token,
            Token::Str(_) | Token::String(_) | Token::BracketOpen | Token::Comma | Token::Tilde
        )
    };
    if tokens.iter().any(repeats) {
        bytes.saturating_mul(times)
    } else {
        0
    }
}

/// Ends the text at the end of the last message's own text.
fn cut_at_last_message(mut rendered: String, content: Option<&str>) -> Result<String, RenderError> {
    let content = content.ok_or(RenderError::NotContinuable)?;
    let start = rendered
        .rfind(content.trim())
        .ok_or(RenderError::NotContinuable)?;
    // Templates that strip messages lose their trailing blanks; the others keep them.
    let shown = content.trim_start();
    let shown = if rendered[start..].starts_with(shown) {
        shown
    } else {
        content.trim()
    };
    rendered.truncate(start + shown.len());
    Ok(rendered)
}

fn render_error(error: &Error) -> RenderError {
    match error.kind() {
        ErrorKind::OutOfFuel => RenderError::OutOfFuel,
        _ => RenderError::Refused(match error.detail() {
            Some(detail) => detail.chars().take(REASON_MAX).collect(),
            None => error.to_string(),
        }),
    }
}

/// Replaces `{% generation %}`, which marks training targets, by a plain block.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        // Behind both characters of the beginning: `{%}` has no end.
        let Some(length) = rest[start + 2..].find("%}").map(|at| at + 2) else {
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
    let mut style = JsonStyle::indented(indent.or(named));
    if options.get::<Option<bool>>("sort_keys")?.unwrap_or(false) {
        style.keys = KeyOrder::Sorted;
    }
    if options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false)
    {
        style.characters = NonAsciiStyle::Escaped;
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
