//! The grammar of outputs that must have a form: reasoning, then content or calls.
//!
//! Owns: the order of an output's parts. Never: knows one format's calls (see `call_grammar`).
//! Invariant: what the machines read in a text of the grammar is what the grammar says: reasoning,
//! content that matches, and calls of the tools.

use super::OutputReading;
use super::call_grammar::{FramedCalls, framed_calls};
use super::calls::CallFormat;
use super::harmony;
use super::lark_text::{BREAK, LarkText, SPACE};
use super::reasoning::ReasoningStart;
use super::registry::CallStyle;
use crate::grammar::MarkTokens;
use crate::model_text::ModelText;
use cleave_domain::{Grammar, TokenId};
use cleave_grammar::{GrammarError, lark_expression, regex_of_text};
use serde_json::Value;

/// The form that a request demands of its outputs.
#[derive(Clone, Debug, Default)]
pub struct OutputRules<'a> {
    /// The texts that the content may be, if the output is no call; `None` for any.
    pub content: Option<&'a Grammar>,
    pub calls: CallRules<'a>,
    /// Tokens of reasoning, after which it is ended.
    pub reasoning_tokens_max: Option<u32>,
}

/// The form of an output's calls.
#[derive(Clone, Debug, Default)]
pub struct CallRules<'a> {
    /// Tools that may be called.
    pub tools: &'a [CallableTool],
    /// Whether the output must be calls.
    pub are_required: bool,
    /// Whether there is one call at most.
    pub is_single: bool,
}

/// A tool, with the form of its arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct CallableTool {
    pub name: String,
    /// JSON Schema of the arguments; without one there are none.
    pub schema: Option<Value>,
    /// Whether a keyword that cannot be enforced is an error. If not, calls that are not required
    /// have any object as arguments.
    pub is_strict: bool,
}

impl CallRules<'_> {
    /// Whether calls are free, where nothing but these rules limits the output.
    fn are_free(&self) -> bool {
        let is_any_strict = self.tools.iter().any(|tool| tool.is_strict);
        self.tools.is_empty() || !(self.are_required || self.is_single || is_any_strict)
    }
}

/// The place at which an output of channels begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChannelStart {
    /// Behind the author of a message.
    Header,
    /// Elsewhere: within a message that goes on.
    Content,
}

/// Makes the grammar that [`OutputReading::grammar`] describes.
pub(super) struct OutputGrammar<'a> {
    pub(super) rules: &'a OutputRules<'a>,
    pub(super) lark: LarkText<'a>,
}

impl OutputReading {
    /// The grammar of outputs of this form; `None` if every output has it.
    ///
    /// # Errors
    /// `Refused` with the part that cannot be enforced.
    pub fn grammar(
        &self,
        rules: &OutputRules<'_>,
        model: &ModelText,
    ) -> Result<Option<Grammar>, GrammarError> {
        if self.is_free(rules) {
            return Ok(None);
        }
        if let Some(content) = rules.content.filter(|_| self.is_bare(rules)) {
            return Ok(Some(content.clone()));
        }
        let marks = model.tokenizer().mark_tokens();
        self.lark(rules, &marks, model.eos()).map(Some)
    }

    pub(super) fn is_free(&self, rules: &OutputRules<'_>) -> bool {
        let has_reasoning = match (&self.reasoning, &self.calls) {
            (_, Some((CallStyle::Harmony, _))) => true,
            (Some((_, start)), _) => *start != ReasoningStart::Closed,
            (None, _) => false,
        };
        let has_limit = rules.reasoning_tokens_max.is_some() && has_reasoning;
        rules.content.is_none() && rules.calls.are_free() && !has_limit
    }

    /// Whether an output is nothing but content.
    fn is_bare(&self, rules: &OutputRules<'_>) -> bool {
        let reasoning = self.reasoning.map(|(_, start)| start);
        let may_reason = reasoning.is_some_and(|start| start != ReasoningStart::Closed);
        let is_harmony = matches!(self.calls, Some((CallStyle::Harmony, _)));
        let has_channels = is_harmony && self.channel_start == ChannelStart::Header;
        rules.calls.tools.is_empty() && !may_reason && !has_channels
    }

    pub(super) fn lark(
        &self,
        rules: &OutputRules<'_>,
        marks: &MarkTokens,
        end_tokens: &[TokenId],
    ) -> Result<Grammar, GrammarError> {
        let mut grammar = OutputGrammar {
            rules,
            lark: LarkText::new(marks, end_tokens),
        };
        let style = self.calls.as_ref().map(|(style, _)| *style);
        let start = match style {
            Some(CallStyle::Harmony) if self.channel_start == ChannelStart::Header => {
                harmony::grammar(&mut grammar)?
            }
            Some(CallStyle::Framed(format)) => self.framed(&mut grammar, Some(format))?,
            Some(CallStyle::Harmony) | None => self.framed(&mut grammar, None)?,
        };
        Ok(Grammar::Lark(grammar.lark.finish(&start).into()))
    }

    /// Reasoning between marks, and then the answer.
    fn framed(
        &self,
        grammar: &mut OutputGrammar<'_>,
        format: Option<&'static CallFormat>,
    ) -> Result<String, GrammarError> {
        let reasoning = self.reasoning;
        let Some((reasoning, start)) =
            reasoning.filter(|(_, start)| *start != ReasoningStart::Closed)
        else {
            return Ok(grammar.answers(format, None)?.at_once);
        };
        let thinking = grammar.thinking(reasoning.end)?;
        if start == ReasoningStart::Open {
            let answer = grammar.answers(format, None)?;
            return Ok(format!("{thinking} {}", answer.after_reasoning));
        }
        let answers = grammar.answers(format, Some(reasoning.begin))?;
        let begin = grammar.lark.literal(reasoning.begin);
        let thoughtful = format!("{begin} {thinking} {}", answers.after_reasoning);
        Ok(grammar.lark.one_of(&[thoughtful, answers.at_once]))
    }
}

/// Expressions of an answer.
struct AnswerExpressions {
    after_reasoning: String,
    /// Without reasoning, and without its first mark where it would begin.
    at_once: String,
}

impl AnswerExpressions {
    fn alike(answer: String) -> Self {
        Self {
            after_reasoning: answer.clone(),
            at_once: answer,
        }
    }
}

impl OutputGrammar<'_> {
    /// Reasoning up to its last mark, and whitespace.
    fn thinking(&mut self, end: &str) -> Result<String, GrammarError> {
        let thinking = match self.rules.reasoning_tokens_max {
            Some(tokens_max) => self.lark.limited_until(end, tokens_max)?,
            None => self.lark.text_until("(?s:.*)", &[end], "", end),
        };
        let is_free = self.rules.content.is_none() && self.rules.calls.are_free();
        let space = if is_free { "" } else { SPACE };
        Ok(format!("{thinking} {space}"))
    }

    /// Content or calls. `begin` is the mark with which an output may begin its reasoning.
    fn answers(
        &mut self,
        format: Option<&'static CallFormat>,
        begin: Option<&str>,
    ) -> Result<AnswerExpressions, GrammarError> {
        let rules = self.rules;
        // An output that must be calls has no content.
        let content = rules.content.filter(|_| !rules.calls.are_required);
        let calls = &rules.calls;
        if content.is_none() && calls.are_free() {
            return Ok(AnswerExpressions {
                after_reasoning: self.lark.any_tokens(None),
                at_once: self.lark.any_tokens(begin),
            });
        }
        let content = content.map(lark_expression).transpose()?;
        let content = content.map(|content| self.lark.rule(&content));
        let format = match (format, &content) {
            (Some(format), _) if !calls.tools.is_empty() => format,
            // Calls could not be read.
            (_, Some(content)) => {
                return Ok(AnswerExpressions::alike(content.clone()));
            }
            _ => {
                let reason =
                    "the model's format of calls is not known; `--tool-call-parser` names one";
                return Err(GrammarError::Refused(reason.to_owned()));
            }
        };
        let framed = framed_calls(&mut self.lark, format, calls)?;
        let opening = if format.opens_output { "" } else { framed.mark };
        let opening = self.lark.literal(opening);
        let bare = self
            .lark
            .rule(&format!("{opening} {} {BREAK}", framed.calls));
        Ok(match content {
            _ if calls.are_required => AnswerExpressions::alike(bare),
            Some(content) => AnswerExpressions::alike(self.lark.one_of(&[content, bare])),
            None => AnswerExpressions {
                after_reasoning: self.text_and_calls(format, &framed, None),
                at_once: self.text_and_calls(format, &framed, begin),
            },
        })
    }

    /// Any text with calls in it.
    fn text_and_calls(
        &mut self,
        format: &'static CallFormat,
        framed: &FramedCalls,
        begin: Option<&str>,
    ) -> String {
        let marks: Vec<&str> = format.begins().collect();
        let mut not_first: Vec<String> = begin.map(regex_of_text).into_iter().collect();
        if format.opens_output {
            not_first.push(r"[\[{]".to_owned());
        }
        let not_first = if not_first.is_empty() {
            String::new()
        } else {
            format!("({})", not_first.join("|"))
        };
        let calls = &framed.calls;
        let text = self.lark.text_without(&marks, &not_first);
        let called = self
            .lark
            .text_until("(?s:.*)", &marks, &not_first, framed.mark);
        // Behind a separator the machine would read a call that this grammar does not know.
        let ends_output = self.rules.calls.is_single || !format.separator.is_empty();
        let more = if ends_output {
            BREAK.to_owned()
        } else {
            self.lark.any_texts_and(&marks, framed.mark, calls)
        };
        let mut bodies = vec![text, format!("{called} {calls} {more}")];
        if format.opens_output {
            bodies.push(format!("{calls} {BREAK}"));
        }
        self.lark.one_of(&bodies)
    }
}
