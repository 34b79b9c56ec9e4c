//! Grammars over the tokenizers of real checkpoints.

use crate::model_files::ModelFiles;
use crate::model_text::ModelText;
use crate::tokenizer::SpecialTokens;
use cleave_domain::{Constraint, ConstraintEnd, Grammar, TokenId};
use cleave_grammar::{CompiledGrammar, GrammarMatcher, TokenBytes};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::LazyLock;

/// Byte-level tokenizers, and those with byte fallback with and without a normalizer that adds a
/// space in front.
const FOLDERS: [&str; 25] = [
    "cohere",
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3",
    "gemma3-images",
    "glm4",
    "granite",
    "granite4",
    "llama2",
    "llama3",
    "llama3-new",
    "ministral3",
    "mistral",
    "mistral-small3",
    "olmo2",
    "olmo3",
    "phi3",
    "phi4-mini",
    "phi4-mini-short",
    "qwen2",
    "qwen2.5",
    "qwen3",
    "seed-oss",
    "smollm3",
];

static MODELS: LazyLock<Vec<ModelText>> = LazyLock::new(|| {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let model = |name: &&str| ModelText::new(ModelFiles::read(&root.join(name)).unwrap()).unwrap();
    FOLDERS.iter().map(model).collect()
});

const PERSON: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "größe": {"type": "integer", "minimum": 0, "maximum": 300},
        "kind": {"enum": ["child", "grown-up"]}
    },
    "required": ["name", "größe", "kind"],
    "additionalProperties": false
}"#;

fn compiled(model: &ModelText, grammar: Grammar) -> CompiledGrammar {
    let constraint = Constraint {
        grammar,
        end: ConstraintEnd::Allowed,
    };
    model.grammars().unwrap().compile(&constraint).unwrap()
}

/// Tokens that a matcher allows, in order.
fn allowed(model: &ModelText, matcher: &mut GrammarMatcher) -> Vec<TokenId> {
    let mut words = vec![0; model.grammars().unwrap().mask_words()];
    matcher.allow(&mut words).unwrap();
    let is_allowed = |token: &TokenId| words[*token as usize / 32] >> (token % 32) & 1 == 1;
    (0..model.vocabulary_count()).filter(is_allowed).collect()
}

/// An output of tokens that are chosen by a seed, up to the end of the grammar or a limit.
fn walk(model: &ModelText, mut matcher: GrammarMatcher, mut seed: u64) -> Vec<TokenId> {
    let mut output = Vec::new();
    for _ in 0..400 {
        let allowed = allowed(model, &mut matcher);
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let token = allowed[(seed >> 33) as usize % allowed.len()];
        if model.eos().contains(&token) {
            break;
        }
        matcher.consume(token).unwrap();
        output.push(token);
    }
    output
}

fn text(model: &ModelText, output: &[TokenId]) -> String {
    String::from_utf8(model.bytes_of(output)).unwrap()
}

#[test]
fn bytes_of_a_texts_tokens_are_the_text() {
    for model in MODELS.iter() {
        for sample in ["{\"a\": [1, 2]}", "größe 漢字 🦀\n\t tail", "  two  spaces"] {
            let tokens = model.tokenizer().encode(sample, SpecialTokens::Skipped);
            let text = |token: &TokenId| match model.tokenizer().grammar_bytes(*token) {
                TokenBytes::Text(bytes) => bytes,
                TokenBytes::Special(name) => panic!("{name} in a text"),
            };
            let joined: Vec<Vec<u8>> = tokens.unwrap().iter().map(text).collect();
            let joined = String::from_utf8(joined.concat()).unwrap();
            // A normalizer may put a space in front.
            let tail = joined
                .strip_prefix(' ')
                .filter(|_| !sample.starts_with("  "));
            let is_same =
                joined == sample || tail == Some(sample) || joined == format!(" {sample}");
            assert!(is_same, "{}: {sample:?} as {joined:?}", model.name());
        }
    }
}

// Invariant: I54.
#[test]
fn any_walk_through_a_schema_is_a_value_that_it_accepts() {
    for model in MODELS.iter() {
        let grammar = compiled(model, Grammar::JsonSchema(PERSON.into()));
        for seed in 0..20 {
            let text = text(model, &walk(model, grammar.start(), seed));
            let value: Value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{} {seed}: {error}: {text}", model.name()));
            let value = value.as_object().unwrap();
            assert_eq!(value.keys().collect::<Vec<_>>(), ["name", "größe", "kind"]);
            assert!(value["name"].as_str().unwrap().chars().count() <= 12);
            assert!(value["größe"].as_u64().unwrap() <= 300);
            assert!(["child", "grown-up"].contains(&value["kind"].as_str().unwrap()));
        }
    }
}

// Invariant: I54.
// Lesson: 35.
#[test]
fn a_replayed_matcher_allows_what_a_lived_one_does() {
    for model in MODELS.iter() {
        let grammar = compiled(model, Grammar::JsonSchema(PERSON.into()));
        let output = walk(model, grammar.start(), 7);
        let mut lived = grammar.start();
        for (index, token) in output.iter().enumerate() {
            let mut replayed = grammar.start();
            let replay = output[..index].iter();
            replay.for_each(|token| replayed.consume(*token).unwrap());
            let expected = allowed(model, &mut replayed);
            assert_eq!(
                allowed(model, &mut lived),
                expected,
                "{} {index}",
                model.name()
            );
            // Forced bytes are found ahead, which must change nothing.
            model.forced_tokens(&mut lived);
            assert_eq!(
                allowed(model, &mut lived),
                expected,
                "{} {index}",
                model.name()
            );
            lived.consume(*token).unwrap();
        }
    }
}

#[test]
fn forced_tokens_are_allowed_one_after_the_other() {
    for model in MODELS.iter() {
        let grammar = compiled(model, Grammar::Regex("no choice at all".into()));
        let mut matcher = grammar.start();
        let forced = model.forced_tokens(&mut matcher);
        assert!(forced.len() > 2, "{}: {forced:?}", model.name());
        assert_eq!(
            matcher.valid_prefix(&forced),
            forced.len(),
            "{}",
            model.name()
        );
        let text = text(model, &forced);
        assert!(
            "no choice at all".starts_with(&text),
            "{}: {text}",
            model.name()
        );
    }
}

/// A mark that the grammar demands is drafted with the text around it.
#[test]
fn forced_marks_are_tokens() {
    let mark_of = |model: &&ModelText| model.tokenizer().id_of("<tool_call>");
    let model = MODELS.iter().find(|model| mark_of(model).is_some());
    let model = model.expect("a model with the mark");
    let mark = mark_of(&model).expect("it was found by it");
    let lark = format!("start: \"so it is\" <[{mark}]> <[{mark}]> \"done and over\"");
    let mut matcher = compiled(model, Grammar::Lark(lark.into())).start();
    let forced = model.forced_tokens(&mut matcher);
    let marks: Vec<usize> = (0..forced.len()).filter(|at| forced[*at] == mark).collect();
    assert_eq!(marks.len(), 2, "{forced:?}");
    assert_eq!(text(model, &forced[..marks[0]]), "so it is");
    assert!("done and over".starts_with(&text(model, &forced[marks[1] + 1..])));
    for token in &forced {
        assert_eq!(matcher.valid_prefix(&[*token]), 1, "{forced:?}");
        matcher.consume(*token).unwrap();
    }
}

// Lesson: 40, 47.
#[test]
fn only_the_end_follows_a_finished_grammar() {
    for model in MODELS.iter() {
        let grammar = compiled(model, Grammar::Choice(["yes".to_owned()].into()));
        let mut matcher = grammar.start();
        for _ in 0..3 {
            let next = allowed(model, &mut matcher);
            if next.iter().all(|token| model.eos().contains(token)) {
                break;
            }
            matcher.consume(next[0]).unwrap();
        }
        let end = allowed(model, &mut matcher);
        assert_eq!(end, model.eos().to_vec(), "{}", model.name());
        matcher.consume(end[0]).unwrap();
        assert_eq!(allowed(model, &mut matcher), end, "{}", model.name());
    }
}
