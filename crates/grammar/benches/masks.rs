//! Time of masks, of compilation and of a replay, by the size of the vocabulary.
//!
//! `cargo bench -p cleave-grammar`; the processor must be idle otherwise. The vocabularies are
//! invented, of words, numbers, blanks and punctuation in about the shares of real ones.
#![allow(missing_docs)] // criterion's macros

use cleave_domain::{Constraint, ConstraintEnd, Grammar, TokenId};
use cleave_grammar::{GrammarCompiler, TokenBytes, Vocabulary};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::time::Duration;

const SYLLABLES: [&str; 40] = [
    "a", "ab", "al", "an", "ar", "be", "ca", "ce", "co", "con", "de", "di", "do", "en", "er", "es",
    "ex", "fi", "ge", "in", "ing", "ion", "it", "ka", "la", "le", "ly", "ma", "me", "mi", "na",
    "ne", "or", "pro", "re", "ri", "s", "ta", "ti", "un",
];

const PERSON: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "notes": {"type": "string"}
    },
    "required": ["name", "born", "tags", "notes"],
    "additionalProperties": false
}"#;

const TEXT: &str = r#"{"name": "Ada Lovelace", "born": 1815, "tags": ["red", "blue"], "notes": "She wrote the first program for a machine that was never built, and saw further than others."}"#;

/// Reasoning up to a mark, of any length or limited, and then JSON of the schema, as requests of
/// reasoning models have it.
fn reasoning(mark: TokenId, limit: &str) -> Constraint {
    let lark = format!(
        "start: r0 <[{mark}]> j0\nr0{limit}: T0\nT0: /(?s:.*)/ & ~/(?s:.*)<\\/think>(?s:.*)/\nj0: %json {PERSON}"
    );
    Constraint {
        grammar: Grammar::Lark(lark.into()),
        end: ConstraintEnd::Allowed,
    }
}

/// A vocabulary of this size, its last tokens the end of reasoning and the end.
fn vocabulary(size: usize) -> Vocabulary {
    let mut words: BTreeSet<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
    for count in 1..=64 {
        words.insert(vec![b' '; count]);
        words.insert([&b"\n"[..], &vec![b' '; count]].concat());
    }
    for number in 0..1000 {
        words.insert(number.to_string().into_bytes());
    }
    for joined in [
        r#"":"#, r#"", "#, r#"{""#, r#""}"#, r#"": ""#, "],", "},", r#"",""#, ");", "()", "->",
    ] {
        words.insert(joined.as_bytes().to_vec());
    }
    let mut seed = 1_u64;
    let mut below = |limit: usize| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % limit
    };
    while words.len() < size - 1 {
        let mut word = String::new();
        (0..=below(5)).for_each(|_| word += SYLLABLES[below(SYLLABLES.len())]);
        match below(6) {
            0 => word = word[..1].to_uppercase() + &word[1..],
            1..4 => word.insert(0, ' '),
            _ => {}
        }
        words.insert(word.into_bytes());
    }
    let text = words.into_iter().take(size - 2).map(TokenBytes::Text);
    let marks = ["</think>", "<|end|>"].map(|mark| TokenBytes::Special(mark.to_owned()));
    Vocabulary {
        tokens: text.chain(marks).collect(),
        end_tokens: [size as TokenId - 1].into(),
    }
}

fn masks(criterion: &mut Criterion) {
    let constraint = Constraint {
        grammar: Grammar::JsonSchema(PERSON.into()),
        end: ConstraintEnd::Allowed,
    };
    for (name, size) in [("32k", 32_000), ("128k", 128_256), ("256k", 256_000)] {
        let mut group = criterion.benchmark_group(name);
        group
            .sample_size(10)
            .measurement_time(Duration::from_secs(3));
        let words = vocabulary(size);
        group.bench_function("vocabulary", |bench| {
            let prepare = || words.clone();
            let make = |words| GrammarCompiler::new(words).expect("it has an end");
            bench.iter_batched(prepare, make, BatchSize::LargeInput);
        });
        let compiler = GrammarCompiler::new(words).expect("it has an end");
        group.bench_function("compile", |bench| {
            bench.iter(|| {
                compiler
                    .compile(black_box(&constraint))
                    .expect("it is valid")
            });
        });
        let compiled = compiler.compile(&constraint).expect("it is valid");
        let tokens = compiler.longest_tokens(TEXT.as_bytes());
        let count = tokens.len();
        let mut mask = vec![0; compiler.mask_words()];
        group.bench_function("start", |bench| bench.iter(|| compiled.start()));
        group.bench_function(format!("{count} tokens"), |bench| {
            let replay = |mut matcher: cleave_grammar::GrammarMatcher| {
                tokens
                    .iter()
                    .for_each(|token| matcher.consume(*token).expect("it matches"));
            };
            bench.iter_batched(|| compiled.start(), replay, BatchSize::SmallInput);
        });
        group.bench_function(format!("{count} tokens with masks"), |bench| {
            let live = |mut matcher: cleave_grammar::GrammarMatcher| {
                for token in &tokens {
                    matcher.allow(&mut mask).expect("it matches");
                    matcher.consume(*token).expect("it matches");
                }
            };
            bench.iter_batched(|| compiled.start(), live, BatchSize::SmallInput);
        });
        for (kind, limit) in [("free", ""), ("limited", "[max_tokens=1000]")] {
            let constraint = reasoning(size as TokenId - 2, limit);
            let compiled = compiler.compile(&constraint).expect("it is valid");
            group.bench_function(
                format!("{count} tokens of {kind} reasoning, with masks"),
                |bench| {
                    let live = |mut matcher: cleave_grammar::GrammarMatcher| {
                        for token in &tokens {
                            matcher.allow(&mut mask).expect("it matches");
                            matcher.consume(*token).expect("it matches");
                        }
                    };
                    bench.iter_batched(|| compiled.start(), live, BatchSize::SmallInput);
                },
            );
        }
        group.finish();
    }
}

criterion_group!(benches, masks);
criterion_main!(benches);
