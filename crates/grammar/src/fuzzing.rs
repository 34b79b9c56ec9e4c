//! Grammars of clients for tests and libFuzzer.

use crate::{GrammarCompiler, TokenBytes, Vocabulary};
use cleave_domain::{Constraint, ConstraintEnd, Grammar, TokenId};
use std::sync::LazyLock;

/// The end token of a vocabulary whose other tokens are the 256 bytes.
pub(crate) const END: TokenId = 256;

/// Tokens that a sample draws at most.
const DRAWS_MAX: usize = 40;

pub(crate) static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let bytes = (0..=255).map(|byte| TokenBytes::Text(vec![byte]));
    let end = TokenBytes::Special("<|end|>".to_owned());
    let compiler = GrammarCompiler::new(Vocabulary {
        tokens: bytes.chain([end]).collect(),
        end_tokens: [END].into(),
    });
    compiler.expect("the bytes are a vocabulary")
});

/// The kind that the first letter chooses, `J`, `R`, `C` or another.
fn grammar_of(text: &str) -> Grammar {
    let mut letters = text.chars();
    match (letters.next(), letters.as_str()) {
        (Some('J'), rest) => Grammar::JsonSchema(rest.into()),
        (Some('R'), rest) => Grammar::Regex(rest.into()),
        (Some('C'), rest) => Grammar::Choice(rest.split('|').map(str::to_owned).collect()),
        (_, rest) => Grammar::Lark(rest.into()),
    }
}

/// Compiles a grammar, draws from it, and compares the state with that of a replay.
///
/// # Panics
/// If the compiler panics, a mask is empty, a token of a mask is refused, or a replayed output has
/// another mask than one that was lived.
pub fn grammar(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for end in [ConstraintEnd::Allowed, ConstraintEnd::Forced] {
        let grammar = grammar_of(&text);
        let Ok(compiled) = COMPILER.compile(&Constraint { grammar, end }) else {
            continue;
        };
        let compiled = if bytes.len().is_multiple_of(2) {
            compiled
        } else {
            compiled.with_one_lexer()
        };
        let mut lived = compiled.start();
        let mut words = vec![0; COMPILER.mask_words()];
        let mut output = Vec::new();
        for step in 0..DRAWS_MAX {
            // A text may grow too complex; then the request fails.
            if lived.allow(&mut words).is_err() {
                break;
            }
            let is_allowed = |token: &TokenId| words[*token as usize / 32] >> (token % 32) & 1 == 1;
            let allowed: Vec<TokenId> = (0..=END).filter(is_allowed).collect();
            assert!(
                !allowed.is_empty(),
                "a mask allows nothing after {output:?}"
            );
            let mut replayed = compiled.start();
            if output.iter().all(|token| replayed.consume(*token).is_ok()) {
                let mut again = vec![0; words.len()];
                let is_equal = replayed.allow(&mut again).is_err() || again == words;
                assert!(is_equal, "a replay of {output:?} allows other tokens");
            }
            let draw = usize::from(bytes[(step * 7 + 1) % bytes.len().max(1)]);
            let token = allowed[(draw + step * 7) % allowed.len()];
            let ahead = lived.valid_prefix(&[token, token]);
            let consumed = lived.consume(token);
            if token == END || consumed.is_err() {
                break;
            }
            assert!(
                ahead > 0,
                "{token} is drawn after {output:?} but no valid draft"
            );
            output.push(token);
        }
    }
}
