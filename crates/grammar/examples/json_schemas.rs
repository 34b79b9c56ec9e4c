//! Compares the texts that schemas allow with the verdicts of a suite of JSON schemas.
//!
//! `cargo run --release -p cleave-grammar --example json_schemas FOLDER ...`, which
//! `scripts/lab/json_schemas.py` runs. A file has one schema with its tests, as those of MaskBench,
//! or a list of them, as those of JSON-Schema-Test-Suite. Each schema gives one line of JSON. A
//! text is fed byte by byte, with the mask of each byte, and once more without masks.
#![allow(clippy::print_stdout)]

use cleave_domain::{Constraint, ConstraintEnd, GRAMMAR_BYTES_MAX, Grammar, TokenId};
use cleave_grammar::{GrammarCompiler, GrammarError, GrammarMatcher, TokenBytes, Vocabulary};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

const END: TokenId = 256;

fn main() {
    let mut paths: Vec<PathBuf> = Vec::new();
    for folder in env::args().skip(1) {
        add_files(Path::new(&folder), &mut paths);
    }
    paths.sort();
    let compiler = GrammarCompiler::new(byte_vocabulary()).expect("a vocabulary of bytes");
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
                    report_file(&compiler, path);
                }
            });
        }
    });
}

/// Every JSON file below a folder.
fn add_files(folder: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            add_files(&path, paths);
        } else if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            paths.push(path);
        }
    }
}

fn byte_vocabulary() -> Vocabulary {
    let bytes = (0..=255).map(|byte| TokenBytes::Text(vec![byte]));
    let end = TokenBytes::Special("<|end|>".to_owned());
    Vocabulary {
        tokens: bytes.chain([end]).collect(),
        end_tokens: [END].into(),
    }
}

fn report_file(compiler: &GrammarCompiler, path: &Path) {
    let text = fs::read_to_string(path).expect("a readable file");
    let groups = match serde_json::from_str(&text).expect("a file of JSON") {
        Value::Array(groups) => groups,
        group => vec![group],
    };
    for (index, group) in groups.iter().enumerate() {
        let mut line = group_outcome(compiler, group);
        line["file"] = path.to_string_lossy().into();
        line["bytes"] = group["schema"].to_string().len().into();
        line["group"] = index.into();
        println!("{line}");
    }
}

/// The outcome of a schema, and its tests with another verdict than the suite's.
fn group_outcome(compiler: &GrammarCompiler, group: &Value) -> Value {
    let schema = group["schema"].to_string();
    let grammar = Grammar::JsonSchema(schema.as_str().into());
    if grammar.bytes() > GRAMMAR_BYTES_MAX {
        return json!({ "outcome": "complex", "reason": "too long" });
    }
    let end = ConstraintEnd::Allowed;
    let began = Instant::now();
    let compiled = compiler.compile(&Constraint { grammar, end });
    let compile_ms = milliseconds(began.elapsed());
    let outcome = |name: &str| json!({ "outcome": name, "compile_ms": compile_ms });
    let compiled = match compiled {
        Ok(compiled) => compiled,
        Err(GrammarError::Refused(reason)) => {
            let mut line = outcome("refused");
            line["reason"] = reason.into();
            return line;
        }
        Err(GrammarError::TooComplex) => return outcome("complex"),
        Err(_) => return outcome("failed"),
    };
    let mut ranks = HashMap::new();
    rank_properties(&group["schema"], &mut ranks);
    let mut mask_time_max = Duration::ZERO;
    let mut wrong = Vec::new();
    let (mut valid_count, mut invalid_count) = (0, 0);
    for test in group["tests"].as_array().into_iter().flatten() {
        let is_valid = test["valid"] == true;
        *(if is_valid {
            &mut valid_count
        } else {
            &mut invalid_count
        }) += 1;
        let as_given = test["data"].to_string();
        let in_order = in_schema_order(&test["data"], &ranks).to_string();
        let mut verdict = feed(compiled.start(), &as_given, &mut mask_time_max);
        if verdict != "accepted" && in_order != as_given {
            verdict = feed(compiled.start(), &in_order, &mut mask_time_max);
        }
        if verdict != if is_valid { "accepted" } else { "refused" } {
            wrong.push(json!({ "data": test["data"], "verdict": verdict }));
        }
    }
    let mut line = outcome("accepted");
    line["valid"] = valid_count.into();
    line["invalid"] = invalid_count.into();
    line["wrong"] = wrong.into();
    line["mask_ms_max"] = milliseconds(mask_time_max).into();
    line
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Where each name stands among the properties of the schema, at its first place.
fn rank_properties(schema: &Value, ranks: &mut HashMap<String, usize>) {
    match schema {
        Value::Object(members) => {
            for (key, value) in members {
                if let ("properties", Value::Object(properties)) = (key.as_str(), value) {
                    for name in properties.keys() {
                        let rank = ranks.len();
                        ranks.entry(name.clone()).or_insert(rank);
                    }
                }
                rank_properties(value, ranks);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| rank_properties(item, ranks)),
        _ => {}
    }
}

/// The value with the properties of the schema first, in its order, as constrained outputs have
/// them.
fn in_schema_order(value: &Value, ranks: &HashMap<String, usize>) -> Value {
    match value {
        Value::Object(members) => {
            let mut names: Vec<&String> = members.keys().collect();
            names.sort_by_key(|name| ranks.get(*name).copied().unwrap_or(usize::MAX));
            let member = |name: &String| (name.clone(), in_schema_order(&members[name], ranks));
            Value::Object(names.into_iter().map(member).collect::<Map<_, _>>())
        }
        Value::Array(items) => {
            let items = items.iter().map(|item| in_schema_order(item, ranks));
            items.collect()
        }
        _ => value.clone(),
    }
}

/// Whether a text is allowed as a whole; raises the longest time of a mask.
fn feed(start: GrammarMatcher, text: &str, mask_time_max: &mut Duration) -> &'static str {
    let (mut lived, mut replayed) = (start.clone(), start);
    let tokens = text.bytes().map(TokenId::from).chain([END]);
    for token in tokens {
        let mut words = [0; 9];
        let began = Instant::now();
        let masked = lived.allow(&mut words);
        *mask_time_max = began.elapsed().max(*mask_time_max);
        if masked.is_err() {
            return "too complex";
        }
        let is_allowed = words[token as usize / 32] >> (token % 32) & 1 == 1;
        let consumed = [lived.consume(token), replayed.consume(token)];
        match consumed {
            [Ok(()), Ok(())] if is_allowed => {}
            [Err(GrammarError::Mismatch), Err(GrammarError::Mismatch)] if !is_allowed => {
                return "refused";
            }
            [Err(GrammarError::TooComplex), _] => return "too complex",
            _ => return "mask and replay differ",
        }
    }
    "accepted"
}
