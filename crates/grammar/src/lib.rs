//! Grammars over the tokens of a model.
//!
//! Owns: a vocabulary as bytes, the compilation of a constraint, and the tokens that it allows
//! after an output.
//! Never: draws a token, reads a file, logs a grammar, or knows a server.
//! Invariant: the tokens allowed depend only on constraint, vocabulary and output, not on how the
//! output came about: a matcher that lived through it allows those that a replayed one does.

mod compile;
mod compose;
mod expressions;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod lexers;
mod matcher;
mod reasons;
mod regular;
mod size;
mod vocabulary;

pub use compile::{CompiledGrammar, GrammarCompiler, GrammarError};
pub use compose::{
    SchemaKeywords, json_expression, lark_expression, regex_of_text, text_expression,
};
pub use matcher::{ForcedPart, GrammarMatcher};
pub use regular::regex_of_lark;
pub use vocabulary::{TokenBytes, Vocabulary};

#[cfg(test)]
mod tests;
