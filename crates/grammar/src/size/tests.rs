//! Sizes within the limits, and beyond them.

use super::*;
use cleave_domain::Grammar;
use serde_json::{Value, json};

fn refusal(grammar: &Grammar) -> Option<String> {
    check(grammar).err().map(|error| error.to_string())
}

fn of_regex(regex: &str) -> Option<String> {
    refusal(&Grammar::Regex(regex.into()))
}

fn of_schema(schema: &Value) -> Option<String> {
    refusal(&Grammar::JsonSchema(schema.to_string().into()))
}

fn of_lark(lark: &str) -> Option<String> {
    refusal(&Grammar::Lark(lark.into()))
}

/// Expressions that are refused took gigabytes.
#[test]
fn expressions_have_a_limit_of_their_parts() {
    let large = "its expressions are too large: more than 4000 parts";
    for part in ["a?", "a*", r"\w", "[ab]", "(a)", "a|", r"\p{Lu}", "a{2,3}"] {
        let of_count = |count| of_regex(&part.repeat(count));
        assert_eq!(of_count(500), None, "{part}");
        assert_eq!(of_count(4001).as_deref(), Some(large), "{part}");
    }
    assert_eq!(of_regex(&"a".repeat(100_000)), None, "a text is one part");
    assert!(of_regex(&format!("(?i){}", "a".repeat(5000))).is_some());
    let patterns = |count: usize, parts: usize| {
        let items = vec![json!({"type": "string", "pattern": "a?".repeat(parts)}); count];
        of_schema(&json!({"anyOf": items}))
    };
    assert_eq!(patterns(300, 100), None);
    assert_eq!(patterns(9, 1400).as_deref(), Some(large));
    let keys = json!({"patternProperties": {"a?".repeat(5000): {}}});
    assert_eq!(of_schema(&keys).as_deref(), Some(large));
    for name in ["default", "enum", "const", "examples"] {
        let named = json!({"properties": {name: {"pattern": "a?".repeat(5000)}}});
        assert_eq!(of_schema(&named).as_deref(), Some(large), "{name}");
    }
    let named = json!({"properties": {"pattern": {"type": "string"}}});
    assert_eq!(of_schema(&named), None);
}

#[test]
fn repetitions_within_each_other_have_a_limit() {
    for regex in [
        "(x{1,1000}){1,1000}",
        "((a{0,1000}){0,1000}){0,1000}",
        "(?:y(x{999})z){500,}",
        r"(\w{2}[a}]{1000}){1000}",
    ] {
        let reason = of_regex(regex).unwrap_or_default();
        assert!(reason.contains("repetitions"), "{regex}: {reason}");
    }
    for regex in [
        "x{1,1000}y{1,1000}z{1,1000}",
        r"([a-z]{1,63}\.){1,127}[a-z]{1,63}",
        r"^(\S+\s+){0,999}\S+$",
        r"[{]{1000}\x{61}{1000}",
    ] {
        assert_eq!(of_regex(regex), None, "{regex}");
    }
}

#[test]
fn remainders_of_multiples_have_a_limit() {
    let of = |value: f64| json!({"type": "number", "multipleOf": value});
    for schema in [of(1.0), of(0.01), of(0.05), of(9973.0), of(10_000.0)] {
        assert_eq!(of_schema(&schema), None, "{schema}");
    }
    let seven = || of(7.0);
    let large = [
        of(999_983.0),
        of(0.99991),
        json!({"allOf": [seven(), of(11.0), of(13.0), of(17.0)]}),
        json!({"multipleOf": 101, "anyOf": [{"allOf": [of(103.0)]}, {"type": "null"}]}),
        json!({"multipleOf": 101, "$ref": "#/$defs/a", "$defs": {"a": of(103.0)}}),
        json!({"properties": {"a": of(9973.0), "b": of(9967.0)}}),
    ];
    for schema in large {
        let reason = of_schema(&schema).unwrap_or_default();
        assert!(reason.contains("`multipleOf`"), "{schema}: {reason}");
        let lark = format!("start: \"a\" %json {schema} \"b\"");
        assert!(of_lark(&lark).is_some_and(|reason| reason.contains("`multipleOf`")));
    }
    let apart = json!({"properties": {"a": seven(), "b": of(500.0), "c": of(999.0)}});
    assert_eq!(of_schema(&apart), None);
    let endless = json!({"multipleOf": 7, "allOf": [{"$ref": "#"}, {"$ref": "#"}]});
    assert_eq!(of_schema(&endless), None);
}

#[test]
fn terminals_count_with_those_that_they_name() {
    let doubling = |count: usize| {
        let lines = (0..count).map(|index| format!("T{index}: T{0} T{0}\n", index + 1));
        of_lark(&format!(
            "start: T0\n{}T{count}: \"a\"?",
            lines.collect::<String>()
        ))
    };
    assert_eq!(doubling(8), None);
    assert!(doubling(16).is_some() && doubling(100).is_some());
    assert!(of_lark(&format!("start: T\nA: \"a\"\nT: {}", "A? ".repeat(4001))).is_some());
    assert!(of_lark(&format!("?start: /{}/i", "a".repeat(4001))).is_some());
    assert!(of_lark(&format!("start: \"//\" /{}/", "a?".repeat(4001))).is_some());
    let rules = (0..9000).map(|index| format!("?r{index}: r{} \"a?\"\n", index + 1));
    let rules = format!(
        "start: r0 // a? /{}\n{}",
        "a?".repeat(5000),
        rules.collect::<String>()
    );
    assert_eq!(of_lark(&rules), None);
    assert_eq!(of_lark("T: T"), None, "the library refuses it");
}
