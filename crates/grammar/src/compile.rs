//! Compilation of constraints.
//!
//! Owns: the limits of a grammar, and the errors.
//! Never: shows a text of a grammar but in an error for its client.

use crate::compose::{SchemaKeywords, alternatives, bounded, parsed};
use crate::expressions::ClientExpression;
use crate::lexers::SequenceLexers;
use crate::matcher::GrammarMatcher;
use crate::reasons::reason;
use crate::size;
use crate::vocabulary::Vocabulary;
use cleave_domain::{Constraint, Grammar, TokenId};
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher, ParserFactory};
use std::sync::Arc;
use std::thread::{self, Builder, ScopedJoinHandle};

/// Stack of a compilation. The longest chain of rules in a grammar of the longest text needs a part
/// of it; pages that are not touched take no memory.
const STACK_BYTES: usize = 256 << 20;
/// Memory of a compiled grammar for each byte of its text, and for each byte of which its lexer
/// knows, as measured.
const TEXT_SHARE: usize = 256;
const LEXER_SHARE: usize = 16;

/// Compiles constraints for one vocabulary. Threads share it.
pub struct GrammarCompiler {
    factory: ParserFactory,
    end_tokens: Arc<[TokenId]>,
}

/// A compiled constraint, from which every sequence that has it starts.
pub struct CompiledGrammar {
    start: GrammarMatcher,
    bytes: usize,
    lexers: SequenceLexers,
}

/// A constraint that cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar is invalid, or has a part that is not supported. The reason names it, so it has
    /// text of the client and belongs into no log.
    #[error("{0}")]
    Refused(String),
    /// The grammar, or the text at this place, is too complex: a limit was reached.
    #[error("it is too complex; simplify it (fewer alternatives or optional parts)")]
    TooComplex,
    /// The output has left the grammar, which a constrained output never does.
    #[error("the output does not match it")]
    Mismatch,
    /// The model has no end token, so that no constrained output could end.
    #[error("the model has no end token")]
    NoEndToken,
    /// The library panicked, which it does for the same grammar and text again.
    #[error("it cannot be evaluated")]
    Failed,
    /// The compilation had no thread or no vocabulary: the grammar is not the reason.
    #[error("it cannot be compiled here now")]
    Unavailable,
}

impl GrammarCompiler {
    /// Prepares a vocabulary; this takes a part of a second for a large one.
    ///
    /// # Errors
    /// `NoEndToken`; `Failed` if the library refuses the vocabulary.
    pub fn new(vocabulary: Vocabulary) -> Result<Self, GrammarError> {
        let end_tokens = Arc::clone(&vocabulary.end_tokens);
        if end_tokens.is_empty() {
            return Err(GrammarError::NoEndToken);
        }
        let environment = vocabulary.into_environment();
        let capabilities = InferenceCapabilities::default();
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, capabilities, &slices)
            .map_err(|_| GrammarError::Failed)?;
        factory.quiet();
        Ok(Self {
            factory,
            end_tokens,
        })
    }

    /// Compiles a constraint: milliseconds for most, a second for the largest.
    ///
    /// # Errors
    /// `Refused` with the part that cannot be enforced, `TooComplex`, `Failed` or `Unavailable`.
    pub fn compile(&self, constraint: &Constraint) -> Result<CompiledGrammar, GrammarError> {
        // The library recurses along chains of rules, and an overflow of the stack would end the
        // process.
        let builder = Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES);
        let compiled = thread::scope(|scope| {
            let thread = builder.spawn_scoped(scope, || self.compile_here(constraint));
            thread.map(ScopedJoinHandle::join)
        });
        match compiled {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(_panic)) => Err(GrammarError::Failed),
            Err(_) => Err(GrammarError::Unavailable),
        }
    }

    fn compile_here(&self, constraint: &Constraint) -> Result<CompiledGrammar, GrammarError> {
        size::check(&constraint.grammar)?;
        let grammar = match &constraint.grammar {
            Grammar::JsonSchema(schema) => {
                let schema = bounded(&parsed(schema)?, SchemaKeywords::All)?;
                TopLevelGrammar::from_json_schema(schema)
            }
            Grammar::Regex(regex) => {
                ClientExpression::of_regex(regex).check()?;
                TopLevelGrammar::from_regex(regex)
            }
            Grammar::Choice(texts) => {
                TopLevelGrammar::from_lark(format!("start: {}", alternatives(texts)))
            }
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.to_string()),
        };
        let init = GrammarInit::Serialized(grammar);
        let (logger, capabilities) = (Logger::new(0, 0), InferenceCapabilities::default());
        let limits = limits(&constraint.grammar);
        let parser = self
            .factory
            .create_parser_from_init_ext(init, logger, capabilities, limits);
        let parser = parser.map_err(|error| reason(&format!("{error:#}"), &constraint.grammar))?;
        let lexer_bytes = parser.parser.lexer_stats().num_bytes;
        let bytes = LEXER_SHARE * lexer_bytes + TEXT_SHARE * constraint.grammar.bytes();
        let mut matcher = Matcher::new(Ok(parser));
        if let Some(error) = matcher.get_error() {
            return Err(reason(&error, &constraint.grammar));
        }
        let is_schema = matches!(constraint.grammar, Grammar::JsonSchema(_));
        if let Some(warning) = matcher.grammar_warnings().first().filter(|_| is_schema) {
            return Err(reason(warning, &constraint.grammar));
        }
        let start = GrammarMatcher::new(matcher, constraint.end, Arc::clone(&self.end_tokens));
        // A grammar without any text fails here, and not when its first token is drawn.
        let mut allowed = vec![0; self.mask_words()];
        match start.clone().allow(&mut allowed) {
            Ok(()) => Ok(CompiledGrammar {
                start,
                bytes,
                lexers: SequenceLexers::new(bytes),
            }),
            Err(GrammarError::Mismatch) => Err(GrammarError::Refused(
                "no token of the model begins a text that matches".to_owned(),
            )),
            Err(error) => Err(error),
        }
    }

    /// Tokens of these bytes, the longest first at each place; none if the vocabulary lacks a byte.
    /// A model may divide a text otherwise.
    pub fn longest_tokens(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.factory.tok_env().tokenize_bytes(bytes)
    }

    /// Words of a mask, `ceil(vocabulary / 32)`.
    pub fn mask_words(&self) -> usize {
        let trie = self.factory.tok_env().tok_trie();
        trie.vocab_size().div_ceil(32)
    }
}

impl CompiledGrammar {
    /// A matcher of an output that has not begun. It may share its lexer, most of its memory, with
    /// those of other outputs.
    pub fn start(&self) -> GrammarMatcher {
        self.start.begin(&self.lexers)
    }

    /// The same, but all outputs share one lexer.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn with_one_lexer(self) -> Self {
        let lexers = SequenceLexers::new(usize::MAX);
        Self { lexers, ..self }
    }

    /// About the memory that it takes, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Below the library's own: a request holds a thread for a fraction of a second at most, and a step
/// some milliseconds. They are counts and no times, so that workers agree.
fn limits(grammar: &Grammar) -> ParserLimits {
    ParserLimits {
        max_items_in_row: match grammar {
            // As many as a schema of hundreds of optional properties has.
            Grammar::JsonSchema(_) | Grammar::Choice(_) => 2000,
            // A client's own grammar may be ambiguous: each token then costs as much as the square
            // of this, some ten milliseconds.
            Grammar::Regex(_) | Grammar::Lark(_) => 500,
        },
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 100_000,
        step_max_items: 25_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}
