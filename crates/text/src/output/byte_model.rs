//! A model of the 256 bytes, an end and marks, for tests of grammars.

use crate::grammar::MarkTokens;
use cleave_domain::{Constraint, ConstraintEnd, Grammar, TokenId};
use cleave_grammar::{GrammarCompiler, TokenBytes, Vocabulary};
use std::sync::LazyLock;

pub(super) const END: TokenId = 256;
/// Tokens beside the bytes and the end: marks, which are special or not, and parts of texts.
const MARKS: [&str; 37] = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|constrain|>",
    "<|end|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
    "<|tool_call|>",
    "<longcat_tool_call>",
];
const TEXTS: [&str; 15] = [
    "</parameter>",
    "</arg_value>",
    "\"}",
    "{\"name\": \"",
    "weather",
    "arguments",
    "\\u00e9",
    "parameter>",
    "</function>",
    "<function=",
    "city",
    "\n</",
    "1, ",
    "it's \"x",
    "null",
];

pub(super) struct ByteModel {
    pub(super) compiler: GrammarCompiler,
    pub(super) marks: MarkTokens,
    /// Bytes by token id.
    pub(super) tokens: Vec<Vec<u8>>,
}

/// A model whose marks are tokens, or texts.
fn model(has_marks: bool) -> ByteModel {
    let mut tokens: Vec<(Vec<u8>, bool)> = (0..=255).map(|byte| (vec![byte], false)).collect();
    tokens.push((b"<|return|>".to_vec(), true));
    let mut marks = Vec::new();
    if has_marks {
        for (nth, mark) in MARKS.iter().enumerate() {
            marks.push(((*mark).to_owned(), tokens.len() as TokenId));
            tokens.push((mark.as_bytes().to_vec(), nth % 2 == 0));
        }
    }
    tokens.extend(TEXTS.map(|text| (text.as_bytes().to_vec(), false)));
    let token = |(bytes, is_special): &(Vec<u8>, bool)| {
        if *is_special {
            TokenBytes::Special(String::from_utf8(bytes.clone()).unwrap())
        } else {
            TokenBytes::Text(bytes.clone())
        }
    };
    let vocabulary = Vocabulary {
        tokens: tokens.iter().map(token).collect(),
        end_tokens: [END].into(),
    };
    ByteModel {
        compiler: GrammarCompiler::new(vocabulary).unwrap(),
        marks: marks.into_iter().collect(),
        tokens: tokens.into_iter().map(|(bytes, _)| bytes).collect(),
    }
}

pub(super) static MODELS: LazyLock<[ByteModel; 2]> = LazyLock::new(|| [model(false), model(true)]);

/// A text of a grammar, drawn by these numbers and then by what ends it soon; `None` if it does not
/// end.
pub(super) fn draw(model: &ByteModel, grammar: &Grammar, choices: &[u16]) -> Option<String> {
    let constraint = Constraint {
        grammar: grammar.clone(),
        end: ConstraintEnd::Allowed,
    };
    let compiled = model.compiler.compile(&constraint);
    let compiled = compiled.unwrap_or_else(|error| panic!("{error:?}: {grammar:?}"));
    let mut matcher = compiled.start();
    let mut output = Vec::new();
    let mut words = vec![0; model.compiler.mask_words()];
    let closing = b"\"}]>)\n,:1ca/< ";
    for step in 0..600 {
        matcher.allow(&mut words).unwrap();
        let is_allowed = |token: &TokenId| words[*token as usize / 32] >> (token % 32) & 1 == 1;
        if is_allowed(&END) && step > choices.len() / 2 {
            return Some(String::from_utf8_lossy(&output).into_owned());
        }
        let allowed: Vec<TokenId> = (0..model.tokens.len() as TokenId)
            .filter(|token| *token != END && is_allowed(token))
            .collect();
        if allowed.is_empty() {
            return Some(String::from_utf8_lossy(&output).into_owned());
        }
        let token = match choices.get(step) {
            // Tokens of several bytes are as likely as all single ones.
            Some(choice) => {
                let long: Vec<TokenId> = allowed
                    .iter()
                    .copied()
                    .filter(|token| *token > END)
                    .collect();
                let from = if choice % 2 == 0 && !long.is_empty() {
                    &long
                } else {
                    &allowed
                };
                from[*choice as usize / 2 % from.len()]
            }
            None => {
                let mark = allowed.iter().find(|token| {
                    **token > END
                        && model
                            .marks
                            .has(&String::from_utf8_lossy(&model.tokens[**token as usize]))
                });
                let byte = closing.iter().map(|byte| TokenId::from(*byte));
                let byte = byte.into_iter().find(|byte| allowed.contains(byte));
                mark.copied().or(byte).unwrap_or(allowed[0])
            }
        };
        matcher.consume(token).unwrap();
        output.extend_from_slice(&model.tokens[token as usize]);
    }
    None
}

/// Tokens that may come after these.
pub(super) fn allowed_after(
    model: &ByteModel,
    grammar: &Grammar,
    tokens: &[TokenId],
) -> Vec<TokenId> {
    let constraint = Constraint {
        grammar: grammar.clone(),
        end: ConstraintEnd::Allowed,
    };
    let mut matcher = model.compiler.compile(&constraint).unwrap().start();
    for token in tokens {
        matcher.consume(*token).unwrap();
    }
    let mut words = vec![0; model.compiler.mask_words()];
    matcher.allow(&mut words).unwrap();
    (0..model.tokens.len() as TokenId)
        .filter(|token| words[*token as usize / 32] >> (token % 32) & 1 == 1)
        .collect()
}

/// The token of a text.
pub(super) fn token_of(model: &ByteModel, text: &str) -> TokenId {
    let found = model
        .tokens
        .iter()
        .rposition(|bytes| bytes == text.as_bytes());
    found.unwrap() as TokenId
}

/// Whether a text, in single bytes, is one of a grammar's.
pub(super) fn accepts(grammar: &Grammar, text: &str) -> bool {
    let model = &MODELS[0];
    let constraint = Constraint {
        grammar: grammar.clone(),
        end: ConstraintEnd::Allowed,
    };
    let mut matcher = model.compiler.compile(&constraint).unwrap().start();
    let mut bytes = text.bytes().map(TokenId::from);
    let mut words = vec![0; model.compiler.mask_words()];
    let is_whole = bytes.all(|byte| matcher.consume(byte).is_ok());
    is_whole && matcher.allow(&mut words).is_ok() && words[END as usize / 32] >> (END % 32) & 1 == 1
}
