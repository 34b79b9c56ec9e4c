//! Grammars over the 256 bytes and an end token.

use crate::fuzzing::{COMPILER, END, grammar};
use crate::{
    CompiledGrammar, GrammarCompiler, GrammarError, GrammarMatcher, TokenBytes, Vocabulary,
};
use cleave_domain::{Constraint, ConstraintEnd, GRAMMAR_BYTES_MAX, Grammar, TokenId};

fn start(grammar: Grammar, end: ConstraintEnd) -> Result<GrammarMatcher, GrammarError> {
    let compiled = COMPILER.compile(&Constraint { grammar, end });
    compiled.map(|compiled| compiled.start())
}

fn schema(text: &str) -> Result<GrammarMatcher, GrammarError> {
    start(Grammar::JsonSchema(text.into()), ConstraintEnd::Allowed)
}

fn refusal(grammar: Grammar) -> String {
    match start(grammar, ConstraintEnd::Allowed) {
        Err(GrammarError::Refused(reason)) => reason,
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("it was accepted"),
    }
}

/// Whether a whole text matches: every byte is allowed, and then the end.
fn matches(matcher: &GrammarMatcher, text: &str) -> bool {
    let mut matcher = matcher.clone();
    let mut bytes = text.bytes();
    bytes.all(|byte| is_next(&mut matcher, TokenId::from(byte)) && consumed(&mut matcher, byte))
        && is_next(&mut matcher, END)
}

fn consumed(matcher: &mut GrammarMatcher, byte: u8) -> bool {
    matcher.consume(TokenId::from(byte)).is_ok()
}

fn is_next(matcher: &mut GrammarMatcher, token: TokenId) -> bool {
    let mut words = vec![0; COMPILER.mask_words()];
    matcher.allow(&mut words).unwrap();
    words[token as usize / 32] >> (token % 32) & 1 == 1
}

#[test]
fn each_kind_of_grammar_matches_its_texts_alone() {
    let json = schema(r#"{"type": "array", "items": {"type": "integer"}, "maxItems": 2}"#).unwrap();
    assert!(matches(&json, "[1, -20]") && matches(&json, "[]"));
    assert!(!matches(&json, "[1, 2, 3]") && !matches(&json, "[1"));
    let regex = start(
        Grammar::Regex("[a-c]{2}|x/y".into()),
        ConstraintEnd::Allowed,
    )
    .unwrap();
    assert!(matches(&regex, "ab") && matches(&regex, "x/y"));
    assert!(!matches(&regex, "abc") && !matches(&regex, "a"));
    let texts = [
        "yes".to_owned(),
        "no \"\\\u{1F980}\n".to_owned(),
        "yes!".to_owned(),
    ];
    let choice = start(
        Grammar::Choice(texts.clone().into()),
        ConstraintEnd::Allowed,
    )
    .unwrap();
    assert!(texts.iter().all(|text| matches(&choice, text)));
    assert!(!matches(&choice, "ye") && !matches(&choice, "yes?"));
    let lark = "start: \"(\" start? \")\"".to_owned();
    let lark = start(Grammar::Lark(lark.into()), ConstraintEnd::Allowed).unwrap();
    assert!(matches(&lark, "((()))") && !matches(&lark, "(()"));
}

// Lesson: 37.
#[test]
fn whitespace_in_json_has_a_limit() {
    let object = schema(r#"{"type": "object"}"#).unwrap();
    let spaced = |count: usize| format!("{{{}\"a\":1}}", " ".repeat(count));
    assert!(matches(
        &object,
        "{\n    \"a\": {\n        \"b\": []\n    }\n}"
    ));
    assert!(matches(&object, &spaced(64)) && !matches(&object, &spaced(65)));
}

#[test]
fn a_schema_that_cannot_be_enforced_is_refused_by_keyword() {
    let refused = |schema: &str| refusal(Grammar::JsonSchema(schema.into()));
    for (schema, keyword) in [
        (r#"{"type": "array", "uniqueItems": true}"#, "uniqueItems"),
        (
            r#"{"type": "object", "propertyNames": {"maxLength": 3}}"#,
            "propertyNames",
        ),
        (r#"{"type": "string", "format": "colour"}"#, "colour"),
        (
            r#"{"oneOf": [{"type": "integer"}, {"minimum": 3}]}"#,
            "oneOf",
        ),
        (r#"{"type": "strnig"}"#, "strnig"),
        (r#"{"x-guidance": {"lenient": true}}"#, "x-guidance"),
        (r#"{"type": "object", "properties": 3}"#, "properties"),
        ("[1]", "an object or a boolean"),
        ("false", "no value"),
        ("{", "EOF"),
    ] {
        let reason = refused(schema);
        assert!(reason.contains(keyword), "{schema}: {reason}");
        assert!(
            !reason.contains('\n') && !reason.contains("coerce"),
            "{reason}"
        );
    }
}

#[test]
fn invalid_expressions_and_grammars_are_refused() {
    for regex in ["(", "[z-a]", "a{2"] {
        assert!(!refusal(Grammar::Regex(regex.into())).is_empty(), "{regex}");
    }
    for lark in ["", "start: missing", "start: \"a", "begin: \"a\""] {
        assert!(!refusal(Grammar::Lark(lark.into())).is_empty(), "{lark}");
    }
}

/// An ambiguous grammar has more readings with each byte.
#[test]
fn an_output_that_grows_too_complex_fails() {
    let lark = "start: start start | \"a\"".to_owned();
    let mut matcher = start(Grammar::Lark(lark.into()), ConstraintEnd::Allowed).unwrap();
    let error = (0..1000).find_map(|_| matcher.consume(u32::from(b'a')).err());
    assert_eq!(error, Some(GrammarError::TooComplex));
    let mut words = vec![0; COMPILER.mask_words()];
    assert!(matcher.allow(&mut words).is_err());
    assert!(matcher.forced().is_empty());
    assert_eq!(matcher.valid_prefix(&[97]), 0);
}

#[test]
fn a_token_outside_the_grammar_is_a_mismatch() {
    let mut matcher = start(Grammar::Regex("ab".into()), ConstraintEnd::Allowed).unwrap();
    assert_eq!(
        matcher.consume(u32::from(b'x')),
        Err(GrammarError::Mismatch)
    );
    assert_eq!(matcher.consume(u32::from(b'a')), Ok(()));
    assert_eq!(matcher.valid_prefix(&[98, END]), 2);
    assert_eq!(matcher.valid_prefix(&[97, 98]), 0);
    assert_eq!(matcher.consume(98), Ok(()));
    assert_eq!(matcher.consume(98), Err(GrammarError::Mismatch));
    assert_eq!(matcher.consume(END), Ok(()));
}

/// A schema that counts words, which takes much of a step's budget, and a text of it.
fn words_counted() -> (String, String) {
    let names = [("a", 99), ("b", 100), ("c", 101), ("d", 102)];
    let properties = names.map(|(name, limit)| {
        let pattern = format!(r"^(?:\\S+\\s+){{0,{limit}}}\\S+$");
        format!(r#""{name}":{{"type":"string","maxLength":300,"pattern":"{pattern}"}}"#)
    });
    let properties = properties.join(",");
    let schema = format!(
        r#"{{"type":"object","properties":{{{properties}}},"additionalProperties":false}}"#
    );
    let words = "one and ".repeat(15);
    let members = names.map(|(name, _)| format!(r#""{name}":"{words}two""#));
    (schema, format!("{{{}}}", members.join(",")))
}

// Invariant: I54.
/// Masks renew the budget of a step.
#[test]
fn a_replay_reaches_no_limit_that_masks_do_not_reach() {
    let (schema, text) = words_counted();
    let mut lived = self::schema(&schema).unwrap();
    let mut replayed = lived.clone();
    let mut masks = [[0; 9], [0; 9]];
    for byte in text.bytes() {
        lived.allow(&mut masks[0]).unwrap();
        assert!(consumed(&mut lived, byte));
        assert!(consumed(&mut replayed, byte));
    }
    lived.allow(&mut masks[0]).unwrap();
    replayed.allow(&mut masks[1]).unwrap();
    assert_eq!(masks[0], masks[1]);
}

#[test]
fn a_forced_end_is_allowed_only_alone() {
    let digits = |end| start(Grammar::Regex("[0-9]{1,2}".into()), end).unwrap();
    for (end, is_early) in [
        (ConstraintEnd::Allowed, true),
        (ConstraintEnd::Forced, false),
    ] {
        let mut matcher = digits(end);
        assert!(!is_next(&mut matcher, END));
        assert!(consumed(&mut matcher, b'4'));
        assert_eq!(is_next(&mut matcher, END), is_early);
        assert!(consumed(&mut matcher, b'2'));
        assert!(is_next(&mut matcher, END));
    }
}

fn compiled(grammar: Grammar) -> CompiledGrammar {
    let end = ConstraintEnd::Allowed;
    COMPILER.compile(&Constraint { grammar, end }).unwrap()
}

fn mask(matcher: &mut GrammarMatcher) -> Vec<u32> {
    let mut words = vec![0; COMPILER.mask_words()];
    matcher.allow(&mut words).unwrap();
    words
}

#[test]
fn outputs_that_share_a_lexer_have_their_own_masks() {
    let schema = r#"{"type": "object", "additionalProperties": {"type": "integer"}}"#;
    let shared = compiled(Grammar::JsonSchema(schema.into())).with_one_lexer();
    let texts = [r#"{"a": 1, "bc": 23}"#, r#"{"": 9}"#, "{ \n}"];
    let mut sharing = texts.map(|_| shared.start());
    let mut alone = texts.map(|_| compiled(Grammar::JsonSchema(schema.into())).start());
    for place in 0..20 {
        for (index, text) in texts.iter().enumerate() {
            let (own, other) = (&mut alone[index], &mut sharing[index]);
            let Some(&byte) = text.as_bytes().get(place) else {
                continue;
            };
            assert_eq!(mask(own), mask(other), "{text} at {place}");
            assert!(consumed(own, byte) && consumed(other, byte));
        }
    }
    assert!(sharing.iter_mut().all(|matcher| is_next(matcher, END)));
}

#[test]
fn a_limit_that_others_reached_ends_no_output() {
    let (schema, text) = words_counted();
    let shared = compiled(Grammar::JsonSchema(schema.into())).with_one_lexer();
    let (mut first, mut second) = (shared.start(), shared.start());
    for byte in text.bytes() {
        assert!(consumed(&mut first, byte));
    }
    assert!(!first.shares_lexer(), "the lexer has reached no limit");
    assert!(second.shares_lexer());
    for byte in text.bytes() {
        assert!(consumed(&mut second, byte));
    }
    assert_eq!(mask(&mut first), mask(&mut second));
}

#[test]
fn an_error_of_an_expression_has_its_place() {
    let refused = |text: &str| refusal(Grammar::Regex(text.into()));
    assert_eq!(
        refused("[a-z]+(secret"),
        "unclosed group, at character 7 of the expression, near `[a-z]+(secret`"
    );
    let long = format!("{}[z-a]{}", "äb".repeat(20_000), "c".repeat(20_000));
    let reason = refused(&long);
    assert!(reason.contains("at character 40002"), "{reason}");
    assert!(reason.chars().count() < 200, "{reason}");
    assert_eq!(
        refused("a\nb\n(c"),
        r"unclosed group, at character 5 of the expression, near `a\nb\n(c`"
    );
    for (regex, place) in [("a/b/c(", 6), ("a\n\n\n(", 5), ("(?<n>a)(?<n>b)", 11)] {
        let reason = refused(regex);
        assert!(
            reason.contains(&format!("at character {place} of")) && !reason.contains("start"),
            "{reason}"
        );
    }
    for schema in [
        r#"{"type": "string", "pattern": "limit\\d/("}"#,
        r#"{"type": "object", "patternProperties": {"limit\\d/(": {}}}"#,
    ] {
        let pattern = refusal(Grammar::JsonSchema(schema.into()));
        assert_eq!(
            pattern,
            r"unclosed group, at character 9 of the expression, near `limit\d/(`"
        );
    }
    let lark = refusal(Grammar::Lark("start: /limit(/".into()));
    assert!(lark.contains("unclosed group"), "{lark}");
}

#[test]
fn a_backslash_at_the_end_of_an_expression_is_refused() {
    let expression = |text: &str| {
        let named = serde_json::json!({"type": "object", "patternProperties": {text: {}}});
        [
            Grammar::Regex(text.into()),
            Grammar::JsonSchema(
                serde_json::json!({"type": "string", "pattern": text})
                    .to_string()
                    .into(),
            ),
            Grammar::JsonSchema(named.to_string().into()),
            Grammar::Lark(format!("start: %json {named}").into()),
        ]
    };
    for (text, place) in [(r"ab\", 3), (r"\", 1), (r"\d\", 3), (r"ä\\\", 4)] {
        let reason = format!("incomplete escape, at character {place} of the expression");
        for grammar in expression(text) {
            assert!(refusal(grammar.clone()).starts_with(&reason), "{grammar:?}");
        }
        let within = crate::lark_expression(&Grammar::Regex(text.into())).unwrap_err();
        assert!(within.to_string().starts_with(&reason), "{within}");
    }
    for grammar in expression(r"ab\\") {
        assert!(start(grammar, ConstraintEnd::Allowed).is_ok());
    }
}

/// The library replaces line breaks and tabs of an expression by escapes, which are no whitespace.
#[test]
fn the_flag_x_with_a_line_break_is_refused() {
    for regex in ["(?x)a\nb", "(?x)a # c\nb", "a(?i-s)(?ix:b\tc)", "(?sx)a\r"] {
        let reason = refusal(Grammar::Regex(regex.into()));
        assert!(
            reason.starts_with("the flag `x` with a line break"),
            "{reason}"
        );
    }
    let pattern = serde_json::json!({"type": "string", "pattern": "^(?x)a\nb$"});
    let reason = refusal(Grammar::JsonSchema(pattern.to_string().into()));
    assert!(reason.contains("at character 2 of"), "{reason}");
    for (regex, text) in [
        ("(?x)a b # c", "ab"),
        ("(?i-x)a\nb", "A\nb"),
        (r"\(?x\)?", "x)"),
        ("(?P<x>a)\n", "a\n"),
    ] {
        let matcher = start(Grammar::Regex(regex.into()), ConstraintEnd::Allowed).unwrap();
        assert!(matches(&matcher, text), "{regex}");
    }
}

/// The library's errors quote the client's grammar.
#[test]
fn a_mistake_that_names_a_limit_is_no_limit() {
    for lark in [
        "start: a\na: limit",
        "start: x\n// limit\nx: y",
        "start: 'limit",
        "%import common.limit\nstart: limit",
        r#"start: %json {"type":"too complex"}"#,
    ] {
        assert!(!refusal(Grammar::Lark(lark.into())).is_empty(), "{lark}");
    }
    for schema in [
        r#"{"type":"limit"}"#,
        r#"{"type":"string","format":"limit"}"#,
        r##"{"$ref":"#/limit"}"##,
    ] {
        let reason = refusal(Grammar::JsonSchema(schema.into()));
        assert!(reason.contains("limit"), "{schema}: {reason}");
    }
}

#[test]
fn a_vocabulary_without_end_token_compiles_nothing() {
    let vocabulary = Vocabulary {
        tokens: vec![TokenBytes::Text(b"a".to_vec())],
        end_tokens: [].into(),
    };
    let error = GrammarCompiler::new(vocabulary).err();
    assert_eq!(error, Some(GrammarError::NoEndToken));
}

// Lesson: 38.
/// The library's trie cannot have deeper nodes.
#[test]
fn long_tokens_are_never_allowed_and_break_nothing() {
    let vocabulary = Vocabulary {
        tokens: vec![
            TokenBytes::Text(vec![b'a'; 4000]),
            TokenBytes::Text(b"a".to_vec()),
            TokenBytes::Special("<|end|>".repeat(100)),
            TokenBytes::Text(vec![0xFF, b'a']),
        ],
        end_tokens: [2].into(),
    };
    let compiler = GrammarCompiler::new(vocabulary).unwrap();
    let constraint = Constraint {
        grammar: Grammar::Regex("a+".into()),
        end: ConstraintEnd::Allowed,
    };
    let mut matcher = compiler.compile(&constraint).unwrap().start();
    let mut words = [0];
    matcher.allow(&mut words).unwrap();
    assert_eq!(words, [0b0010]);
    matcher.consume(1).unwrap();
    matcher.allow(&mut words).unwrap();
    assert_eq!(words, [0b0110]);
}

/// A chain of so many parts, each of which names the next.
fn chain(count: usize, part: impl Fn(usize, usize) -> String) -> String {
    (0..count).map(|index| part(index, index + 1)).collect()
}

// Lesson: 38.
/// The library recurses for each rule of a chain: an overflow of its stack would end the process.
#[test]
fn long_chains_and_deep_nesting_end_no_process() {
    let start = |grammar: Grammar| {
        assert!(grammar.bytes() <= GRAMMAR_BYTES_MAX, "{grammar:?}");
        start(grammar, ConstraintEnd::Allowed)
    };
    let rules = chain(9000, |rule, next| format!("r{rule}: r{next}\n"));
    let rules = format!("start: r0\n{rules}r9000: \"ab\"");
    let matcher = start(Grammar::Lark(rules.into())).unwrap();
    assert!(matches(&matcher, "ab"));
    let terminals = chain(9000, |rule, next| format!("R{rule}: R{next}\n"));
    let terminals = format!("start: R0\n{terminals}R9000: \"ab\"");
    assert!(start(Grammar::Lark(terminals.into())).is_ok());
    let nested = chain(4000, |rule, next| format!("r{rule}: \"b\" r{next} \"c\"\n"));
    let nested = format!("start: r0\n{nested}r4000: \"ab\"");
    assert!(start(Grammar::Lark(nested.into())).is_ok());
    let definitions = chain(3000, |index, next| {
        format!(r##""d{index}":{{"$ref":"#/$defs/d{next}"}},"##)
    });
    let definitions =
        format!(r##"{{"$ref":"#/$defs/d0","$defs":{{{definitions}"d3000":{{"const":1}}}}}}"##);
    let matcher = start(Grammar::JsonSchema(definitions.into())).unwrap();
    assert!(matches(&matcher, "1") && !matches(&matcher, "2"));
    let nest = |open: &str, inside: &str, close: &str| {
        format!("{}{inside}{}", open.repeat(10_000), close.repeat(10_000))
    };
    for grammar in [
        Grammar::Regex(nest("(", "a", ")").into()),
        Grammar::Regex(nest("(?:b", "a", ")?").into()),
        Grammar::Lark(format!("start: {}", nest("(", "\"a\"", ")")).into()),
        Grammar::Lark(format!("start: {}", nest("[", "\"a\"", "]")).into()),
        Grammar::JsonSchema(nest("{\"items\":", "{}", "}").into()),
    ] {
        assert!(start(grammar.clone()).is_err(), "{grammar:?}");
    }
}

// Lesson: 38.
#[test]
fn huge_bounds_and_endless_references_end_no_process() {
    let most = u64::MAX;
    for schema in [
        r##"{"$ref":"#"}"##.to_owned(),
        r##"{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}"##
            .to_owned(),
        r##"{"allOf":[{"$ref":"#"}]}"##.to_owned(),
        r##"{"anyOf":[{"$ref":"#"},{"type":"null"}]}"##.to_owned(),
        format!(r#"{{"type":"array","items":{{}},"maxItems":{most}}}"#),
        format!(r#"{{"type":"array","items":{{}},"minItems":{most}}}"#),
        format!(r#"{{"type":"string","maxLength":{most}}}"#),
        format!(r#"{{"type":"string","minLength":{most}}}"#),
        r#"{"type":"string","pattern":"^[^\n\r]{1,129}$"}"#.to_owned(),
        r#"{"type":"string","pattern":"^([a-z]{0,999}[0-9]{0,999}){0,999}$"}"#.to_owned(),
        r#"{"type":"integer","multipleOf":1e-300}"#.to_owned(),
        r#"{"type":"number","minimum":1e308,"maximum":1e309}"#.to_owned(),
    ] {
        // Some are grammars, and these give a mask.
        if let Ok(mut matcher) = self::schema(&schema) {
            let mut words = vec![0; COMPILER.mask_words()];
            matcher.allow(&mut words).unwrap();
            assert!(words.iter().any(|word| *word != 0), "{schema}");
        }
    }
    for grammar in [
        Grammar::Regex("(([abc]*)*)*".into()),
        Grammar::Regex("((a{0,1000}){0,1000}){0,1000}".into()),
        Grammar::Lark("start: start".into()),
        Grammar::Lark("start: a\na: b\nb: a | \"x\"".into()),
        Grammar::Lark("start: (\"a\"{0,100000}){0,100000}".into()),
    ] {
        if let Ok(mut matcher) = start(grammar.clone(), ConstraintEnd::Allowed) {
            let mut words = vec![0; COMPILER.mask_words()];
            let _ = matcher.allow(&mut words);
        }
    }
}

// Lesson: 40.
/// A window of drafts may have the end in it, and anything behind the end.
#[test]
fn drafts_behind_the_end_of_a_grammar_break_nothing() {
    let [a, b] = [TokenId::from(b'a'), TokenId::from(b'b')];
    for behind in [a, b, END] {
        let mut matcher = start(Grammar::Regex("ab".into()), ConstraintEnd::Allowed).unwrap();
        let drafts = [a, b, END, behind, behind];
        for drawn in 0..3 {
            let valid = matcher.valid_prefix(&drafts[drawn..]);
            // Behind the last token only the end is left, which needs no draft.
            let most = if behind == END { 5 - drawn } else { 3 - drawn };
            assert!(valid <= most, "{drafts:?} from {drawn}: {valid}");
            assert!(
                valid >= 3 - drawn || drawn == 2,
                "{drafts:?} from {drawn}: {valid}"
            );
            matcher.consume(drafts[drawn]).unwrap();
        }
        assert!(is_next(&mut matcher, END) && !is_next(&mut matcher, a));
        assert!(matcher.forced().is_empty(), "nothing follows the end");
    }
}

// Lesson: 47.
#[test]
fn every_end_token_ends_a_grammar() {
    let vocabulary = Vocabulary {
        tokens: vec![
            TokenBytes::Text(b"a".to_vec()),
            TokenBytes::Special("<|end|>".to_owned()),
            TokenBytes::Special("<|eot|>".to_owned()),
            TokenBytes::Special("<|other|>".to_owned()),
        ],
        end_tokens: [1, 2].into(),
    };
    let compiler = GrammarCompiler::new(vocabulary).unwrap();
    let constraint = Constraint {
        grammar: Grammar::Regex("aa?".into()),
        end: ConstraintEnd::Allowed,
    };
    let compiled = compiler.compile(&constraint).unwrap();
    for end in [1, 2] {
        let mut matcher = compiled.start();
        matcher.consume(0).unwrap();
        let mut words = [0];
        matcher.allow(&mut words).unwrap();
        assert_eq!(words, [0b0111]);
        assert_eq!(matcher.consume(end), Ok(()));
    }
}

#[test]
fn schemas_with_hundreds_of_optional_properties_are_enforced() {
    let properties = (0..300).map(|index| format!(r#""p{index}":{{"type":"integer"}},"#));
    let properties: String = properties.collect();
    let object = schema(&format!(
        r#"{{"type":"object","properties":{{{properties}"z":{{}}}},"additionalProperties":false}}"#
    ));
    let object = object.unwrap();
    assert!(matches(&object, r#"{"p3":1,"p200":2,"p299":3}"#));
    assert!(!matches(&object, r#"{"p300":1}"#));
}

// Lesson: 38.
/// Whatever a client sends compiles, or is an error.
#[test]
fn damaged_grammars_are_errors_or_grammars() {
    let samples: Vec<Vec<u8>> = [
        r##"J{"type":"object","properties":{"a":{"enum":[1,null,"x"]},"b":{"$ref":"#/$defs/c"}},"$defs":{"c":{"type":"array","items":{"anyOf":[{"type":"number","multipleOf":0.5},{"format":"date-time"}]},"minItems":1}},"required":["b"]}"##,
        r"R(foo|[^b-z]{2,5}\d+)*?\.\p{Lu}|(?i:x)&",
        "Lstart: a (\",\" a)* /[0-9]+/i\na: \"x\" | T{2,3} | <|end|> | %json {\"type\": \"null\"}\nT: /[a-z]/ & /[^q]/\n%ignore /[ \\t]+/\n%llguidance {\"no_forcing\": true}",
        "Cyes|no|no\"\\|\u{1F980}x",
    ]
    .map(|sample| sample.as_bytes().to_vec())
    .into();
    cleave_fuzz::check_samples("grammar", &samples, 600, grammar);
}
