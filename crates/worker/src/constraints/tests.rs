//! Constraints of the tokenizer in testdata.

use super::*;
use cleave_domain::{ConstraintEnd, Grammar};
use std::path::Path;

pub(in super::super) fn constraints() -> WorkerConstraints {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/qwen3");
    let files = ModelFiles::read(&folder).unwrap();
    WorkerConstraints::new(Arc::new(files), ForcedTokens::Proposed)
}

pub(in super::super) fn regex(text: &str) -> Arc<Constraint> {
    Arc::new(Constraint {
        grammar: Grammar::Regex(text.into()),
        end: ConstraintEnd::Allowed,
    })
}

fn allowed(matcher: &mut dyn TokenMatcher) -> Vec<TokenId> {
    let mut mask = TokenMask::none_of(416);
    matcher.allow(&mut mask).unwrap();
    (0..416).filter(|token| mask.allows(*token)).collect()
}

#[test]
fn a_matcher_continues_the_output_that_it_is_opened_with() {
    let constraints = constraints();
    let digits = regex("[0-9]{3}x");
    assert_eq!(constraints.pin(&digits), CompileState::New);
    constraints.compile(&digits);
    let mut lived = constraints.open(&digits, &[]).unwrap();
    let mut output = Vec::new();
    for _ in 0..3 {
        let next = allowed(lived.as_mut())[0];
        lived.push(next);
        output.push(next);
        let mut replayed = constraints.open(&digits, &output).unwrap();
        assert_eq!(allowed(replayed.as_mut()), allowed(lived.as_mut()));
    }
    assert!(constraints.open(&digits, &[output[0]; 9]).is_err());
}

#[test]
fn errors_have_no_text_of_the_grammar() {
    let constraints = constraints();
    let broken = regex("(secret");
    constraints.pin(&broken);
    constraints.compile(&broken);
    assert_eq!(constraints.pin(&broken), CompileState::Known);
    let error = constraints.open(&broken, &[]).err().unwrap();
    assert_eq!(error.to_string(), "it is not supported");
}

#[test]
fn the_least_recently_used_grammar_without_pin_is_dropped() {
    let constraints = constraints();
    let numbered = |number: usize| regex(&format!("a{number}"));
    let pinned = numbered(UNPINNED_MAX + 1);
    constraints.pin(&pinned);
    for number in 0..=UNPINNED_MAX {
        assert_eq!(constraints.pin(&numbered(number)), CompileState::New);
        constraints.compile(&numbered(number));
        constraints.unpin(&numbered(number));
    }
    assert_eq!(
        constraints.pin(&numbered(0)),
        CompileState::New,
        "the oldest"
    );
    assert_eq!(constraints.pin(&numbered(1)), CompileState::Known);
    assert_eq!(constraints.pin(&pinned), CompileState::UnderWay);
}

#[test]
fn grammars_without_pin_have_a_limit_of_their_memory() {
    let constraints = constraints();
    let numbered = |number: u32| {
        let schema = format!(r#"{{"type":"integer","multipleOf":{}}}"#, 9999 - number);
        Arc::new(Constraint {
            grammar: Grammar::JsonSchema(schema.into()),
            end: ConstraintEnd::Allowed,
        })
    };
    for number in 0..4 {
        let constraint = numbered(number);
        constraints.pin(&constraint);
        constraints.compile(&constraint);
        if number > 0 {
            constraints.unpin(&constraint);
        }
    }
    let mut table = constraints.compiled.lock();
    let bytes = table.entries[&numbered(3)].bytes();
    assert!(bytes > 1 << 20, "{bytes} bytes for 10,000 states");
    table.drop_oldest(bytes * 5 / 2);
    let is_kept = |number| table.entries.contains_key(&numbered(number));
    let kept: Vec<bool> = (0..4).map(is_kept).collect();
    assert_eq!(kept, [true, false, true, true], "0 is pinned");
}
