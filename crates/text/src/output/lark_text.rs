//! Text of a grammar in Lark's syntax, and the rules of texts that end at a mark.

use crate::grammar::MarkTokens;
use cleave_domain::{GRAMMAR_BYTES_MAX, TokenId};
use cleave_grammar::{GrammarError, regex_of_text, text_expression};
use std::fmt::Write;

/// A line break that a model may leave out, wherever whitespace belongs to a frame.
pub(super) const BREAK: &str = "BREAK?";
/// Whitespace between reasoning and answer.
pub(super) const SPACE: &str = "SPACE?";
const FRAME_TERMINALS: &str = "BREAK: \"\\n\"\nSPACE: /[ \\n]{1,4}/\n";

/// Writes a grammar. Expressions are texts; rules and terminals get names in their order.
pub(super) struct LarkText<'a> {
    marks: &'a MarkTokens,
    end_tokens: &'a [TokenId],
    lines: String,
    names_count: usize,
}

/// A part of a mark.
enum MarkPart<'a> {
    Text(&'a str),
    Token(TokenId),
}

impl<'a> LarkText<'a> {
    /// A grammar for a model with these marks as tokens, and these tokens at the end of outputs.
    pub(super) fn new(marks: &'a MarkTokens, end_tokens: &'a [TokenId]) -> Self {
        Self {
            marks,
            end_tokens,
            lines: FRAME_TERMINALS.to_owned(),
            names_count: 0,
        }
    }

    /// The whole grammar, whose texts are those of an expression.
    pub(super) fn finish(self, start: &str) -> String {
        format!("start: {start}\n{}", self.lines)
    }

    /// Whether it is longer than any grammar may be.
    pub(super) fn is_long(&self) -> bool {
        self.lines.len() > GRAMMAR_BYTES_MAX
    }

    /// Whether a mark is one token of the model.
    pub(super) fn is_token(&self, mark: &str) -> bool {
        self.marks.has(mark)
    }

    /// Adds a rule; returns its name.
    pub(super) fn rule(&mut self, body: &str) -> String {
        self.named("r", "", body)
    }

    /// Adds a rule of one of these expressions.
    pub(super) fn one_of(&mut self, bodies: &[String]) -> String {
        match bodies {
            [body] => body.clone(),
            bodies => self.rule(&bodies.join(" | ")),
        }
    }

    /// Adds a rule whose body has its own name; returns the name.
    pub(super) fn recursive(&mut self, body: impl FnOnce(&str) -> String) -> String {
        let name = format!("r{}", self.names_count);
        self.rule(&body(&name))
    }

    fn named(&mut self, prefix: &str, attribute: &str, body: &str) -> String {
        let name = format!("{prefix}{}", self.names_count);
        self.names_count += 1;
        writeln!(self.lines, "{name}{attribute}: {body}").expect("a string takes every text");
        name
    }

    /// The expression of a text whose marks are tokens, where the model has them.
    pub(super) fn literal(&self, text: &str) -> String {
        let parts = self.parts(text);
        let parts = parts.iter().map(|part| match part {
            MarkPart::Text(text) => text_expression(text),
            MarkPart::Token(token) => format!("<[{token}]>"),
        });
        parts.collect::<Vec<_>>().join(" ")
    }

    fn parts<'t>(&self, text: &'t str) -> Vec<MarkPart<'t>> {
        let mut parts = Vec::new();
        let (mut begin, mut at) = (0, 0);
        while let Some(c) = text[at..].chars().next() {
            match self.marks.at_start(&text[at..]) {
                Some((token, length)) => {
                    if begin < at {
                        parts.push(MarkPart::Text(&text[begin..at]));
                    }
                    parts.push(MarkPart::Token(token));
                    at += length;
                    begin = at;
                }
                None => at += c.len_utf8(),
            }
        }
        if begin < at {
            parts.push(MarkPart::Text(&text[begin..]));
        }
        parts
    }

    /// Any text, also an empty one, that has none of these marks, and does not begin with a match
    /// of this regular expression, unless that is empty. The name of a terminal.
    pub(super) fn text_without(&mut self, marks: &[&str], not_first: &str) -> String {
        let body = format!("/(?s:.*)/{}", exclusions(marks, not_first));
        self.named("T", "", &body)
    }

    /// A text up to and with a mark: [`LarkText::text_without`] these marks before it, which
    /// matches the regular expression.
    pub(super) fn text_until(
        &mut self,
        regex: &str,
        marks: &[&str],
        not_first: &str,
        mark: &str,
    ) -> String {
        let body = format!("/{regex}/{}", exclusions(marks, not_first));
        let text = self.named("T", "", &body);
        let parts = self.parts(mark);
        let Some(MarkPart::Text(first)) = parts.first() else {
            return format!("{text} {}", self.literal(mark));
        };
        // One terminal has the text and the mark's beginning: a text alone would take both.
        let begin = self.named("T", "", &format!("{text} {}", text_expression(first)));
        let rest = self.literal(&mark[first.len()..]);
        format!("{begin} {rest}").trim_end().to_owned()
    }

    /// Any text with the calls of an expression in it, each behind a mark.
    pub(super) fn any_texts_and(&mut self, marks: &[&str], mark: &str, calls: &str) -> String {
        let text = self.text_without(marks, "");
        let called = self.text_until("(?s:.*)", marks, "", mark);
        self.recursive(|name| format!("{called} {calls} {name} | {text}"))
    }

    /// A text of so many tokens at most, up to and with a mark.
    ///
    /// # Errors
    /// `Refused` if the mark does not begin with a token, so that nothing can end the text at once.
    pub(super) fn limited_until(
        &mut self,
        mark: &str,
        tokens_max: u32,
    ) -> Result<String, GrammarError> {
        let Some(MarkPart::Token(_)) = self.parts(mark).first() else {
            let reason = format!("{mark:?} is no token of this model, so that nothing can end it");
            return Err(GrammarError::Refused(reason));
        };
        let text = self.text_without(&[mark], "");
        let limit = format!("[max_tokens={tokens_max}]");
        let limited = self.named("r", &limit, &text);
        Ok(format!("{limited} {}", self.literal(mark)))
    }

    /// Any tokens but those that end the output; the first one is not this mark either.
    pub(super) fn any_tokens(&mut self, first: Option<&str>) -> String {
        let token = |tokens: &[TokenId]| {
            let tokens: Vec<String> = tokens.iter().map(TokenId::to_string).collect();
            format!("<[^{}]>", tokens.join(","))
        };
        let others = token(self.end_tokens);
        let rest = self.recursive(|name| format!("{name} {others} | "));
        match first.and_then(|first| self.marks.at_start(first)) {
            Some((first, _)) => {
                let first = token(&[self.end_tokens, &[first]].concat());
                format!("({first} {rest})?")
            }
            None => rest,
        }
    }
}

/// Terms that exclude texts with one of these marks, or with this beginning.
fn exclusions(marks: &[&str], not_first: &str) -> String {
    let mut terms = String::new();
    let marks: Vec<String> = marks.iter().map(|mark| regex_of_text(mark)).collect();
    if !marks.is_empty() {
        let marks = marks.join("|");
        write!(terms, " & ~/(?s:.*)({marks})(?s:.*)/").expect("a string takes every text");
    }
    if !not_first.is_empty() {
        write!(terms, " & ~/\\s*{not_first}(?s:.*)/").expect("a string takes every text");
    }
    terms
}
