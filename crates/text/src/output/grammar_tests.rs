//! Grammars of outputs: each text of one is read as what the grammar says.

use super::byte_model::{ByteModel, END, MODELS, accepts, allowed_after, draw, token_of};
use super::output_grammar::{CallRules, CallableTool, OutputRules};
use super::tests::{formats, read};
use super::{AnswerPart, OutputReading, ToolCallParser, ToolSpec};
use cleave_domain::{Constraint, ConstraintEnd, Grammar, TokenId};
use cleave_grammar::GrammarError;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["c", "f"]},
            "deep": {"$ref": "#/$defs/deep"},
        },
        "required": ["city"],
        "additionalProperties": false,
        "$defs": {"deep": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}},
            "required": ["a"], "additionalProperties": false}},
    })
}

fn callable(is_strict: bool) -> Vec<CallableTool> {
    let tool = |name: &str, schema| CallableTool {
        name: name.to_owned(),
        schema,
        is_strict,
    };
    vec![tool("weather", Some(schema())), tool("time", None)]
}

fn specs() -> Arc<[ToolSpec]> {
    let spec = |tool: &CallableTool| ToolSpec::new(tool.name.clone(), tool.schema.as_ref());
    callable(true).iter().map(spec).collect()
}

/// Whether the arguments are what the tool's schema accepts.
fn are_valid(name: &str, arguments: &Value) -> bool {
    let Some(members) = arguments.as_object() else {
        return false;
    };
    if name == "time" {
        return members.is_empty();
    }
    let is_member = |(name, value): (&String, &Value)| match name.as_str() {
        "city" => value.is_string(),
        "days" => value.as_u64().is_some_and(|days| days <= 99),
        "unit" => matches!(value.as_str(), Some("c" | "f")),
        "deep" => {
            let text = value["a"].as_str();
            text.is_some_and(|text| text.chars().count() <= 5)
                && value.as_object().is_some_and(|deep| deep.len() == 1)
        }
        _ => false,
    };
    members.contains_key("city") && members.iter().all(is_member)
}

fn reading(reasoning: &str, calls: &str, prompt: &str) -> OutputReading {
    OutputReading::new(&formats(reasoning, calls), prompt, specs()).unwrap()
}

fn required(tools: &[CallableTool], is_single: bool) -> OutputRules<'_> {
    OutputRules {
        content: None,
        calls: CallRules {
            tools,
            are_required: true,
            is_single,
        },
        reasoning_tokens_max: None,
    }
}

/// The calls among parts, and everything else.
fn divided(parts: &[AnswerPart]) -> (Vec<(String, String)>, String) {
    let (mut calls, mut rest) = (Vec::new(), String::new());
    for part in parts {
        match part {
            AnswerPart::CallBegin { name, .. } => calls.push((name.clone(), String::new())),
            AnswerPart::CallArguments(text) => {
                let last: &mut (String, String) = calls.last_mut().unwrap();
                last.1.push_str(text);
            }
            AnswerPart::Text(text) => rest += text,
            AnswerPart::Reasoning(_) | AnswerPart::CallEnd => {}
        }
    }
    (calls, rest)
}

fn check_calls(
    model: &ByteModel,
    format: &str,
    rules: &OutputRules<'_>,
    choices: &[u16],
) -> Result<bool, TestCaseError> {
    let prompt = if format == "openai" {
        "<|start|>assistant"
    } else {
        ""
    };
    let reading = reading("none", format, prompt);
    let grammar = reading.lark(rules, &model.marks, &[END]).unwrap();
    let Some(output) = draw(model, &grammar, choices) else {
        return Ok(false);
    };
    let (calls, rest) = divided(&read(&reading, &[&output]));
    let are_required = rules.calls.are_required;
    prop_assert!(!are_required || !calls.is_empty(), "{}", output);
    prop_assert!(!are_required || rest.trim().is_empty(), "{}", output);
    prop_assert!(!rules.calls.is_single || calls.len() <= 1, "{}", output);
    for (name, arguments) in calls {
        let json = serde_json::from_str(&arguments);
        let json: Value =
            json.map_err(|error| TestCaseError::fail(format!("{error} in {output}")))?;
        prop_assert!(are_valid(&name, &json), "{} in {}", arguments, output);
    }
    Ok(true)
}

fn call_formats() -> Vec<&'static str> {
    ToolCallParser::names()
        .filter(|name| *name != "none")
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn texts_of_a_grammar_are_valid_calls(
        format in prop::sample::select(call_formats()),
        has_marks: bool,
        are_required: bool,
        is_single: bool,
        choices in prop::collection::vec(any::<u16>(), 0..60),
    ) {
        let tools = callable(true);
        let mut rules = required(&tools, is_single);
        rules.calls.are_required = are_required;
        check_calls(&MODELS[usize::from(has_marks)], format, &rules, &choices)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_required_call_follows_reasoning(
        format in prop::sample::select(call_formats()),
        prompt in prop::sample::select(&PROMPTS[..]),
        has_marks: bool,
        choices in prop::collection::vec(any::<u16>(), 0..60),
    ) {
        prop_assume!(format != "openai");
        let (tools, model) = (callable(true), &MODELS[usize::from(has_marks)]);
        let reading = reading("qwen3", format, prompt);
        let grammar = reading.lark(&required(&tools, false), &model.marks, &[END]).unwrap();
        // Where the prompt leaves room for it, the model may reason.
        let thought = if prompt == PROMPTS[1] { "Hm.</think>" } else { "<think>Hm.</think>" };
        prop_assert_eq!(begins(model, &grammar, thought), prompt != PROMPTS[2]);
        if let Some(output) = draw(model, &grammar, &choices) {
            let parts = read(&reading, &[&output]);
            let (calls, rest) = divided(&parts);
            prop_assert!(!calls.is_empty() && rest.trim().is_empty(), "{}", output);
            let reasons = parts.iter().any(|part| matches!(part, AnswerPart::Reasoning(_)));
            prop_assert!(prompt != PROMPTS[2] || !reasons, "{}", output);
        }
    }
}

/// Whether outputs of a grammar may begin with this text.
fn begins(model: &ByteModel, grammar: &Grammar, text: &str) -> bool {
    let constraint = Constraint {
        grammar: grammar.clone(),
        end: ConstraintEnd::Allowed,
    };
    let mut matcher = model.compiler.compile(&constraint).unwrap().start();
    let mark = |rest: &str| model.marks.at_start(rest);
    let mut rest = text;
    while !rest.is_empty() {
        let (token, length) = mark(rest).unwrap_or((TokenId::from(rest.as_bytes()[0]), 1));
        if matcher.valid_prefix(&[token]) == 0 {
            return false;
        }
        matcher.consume(token).unwrap();
        rest = &rest[length..];
    }
    true
}

/// The content and the reasoning among parts.
fn content_of(parts: &[AnswerPart]) -> (String, String) {
    let (mut content, mut reasoning) = (String::new(), String::new());
    for part in parts {
        match part {
            AnswerPart::Text(text) => content += text,
            AnswerPart::Reasoning(text) => reasoning += text,
            _ => panic!("{part:?}"),
        }
    }
    (content, reasoning)
}

fn content(grammar: &Grammar) -> OutputRules<'_> {
    OutputRules {
        content: Some(grammar),
        ..OutputRules::default()
    }
}

const PROMPTS: [&str; 3] = ["", "p<think>\n", "p<think>\n\n</think>\n\n"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn content_of_a_grammar_follows_reasoning(
        prompt in prop::sample::select(&PROMPTS[..]),
        is_harmony: bool,
        kind in 0usize..4,
        has_marks: bool,
        choices in prop::collection::vec(any::<u16>(), 0..60),
    ) {
        let (grammar, is_match): (Grammar, fn(&str) -> bool) = [
            (Grammar::JsonSchema("{\"type\": \"integer\"}".into()), (|text| text.parse::<f64>().is_ok()) as fn(&str) -> bool),
            (Grammar::Regex("[a-c]{1,3}/x".into()), |text| text.ends_with("/x") && text.len() < 6),
            (Grammar::Choice(["yes".to_owned(), "no".to_owned()].into()), |text| ["yes", "no"].contains(&text)),
            (Grammar::Lark("start: \"(\" start? \")\" # no } here".into()), |text| text.starts_with('(') && text.ends_with(')')),
        ][kind].clone();
        let model = &MODELS[usize::from(has_marks)];
        let prompt = if is_harmony { "<|start|>assistant" } else { prompt };
        let formats = if is_harmony { formats("none", "openai") } else { formats("qwen3", "none") };
        let reading = OutputReading::new(&formats, prompt, Arc::from([])).unwrap();
        let grammar = reading.lark(&content(&grammar), &model.marks, &[END]).unwrap();
        if let Some(output) = draw(model, &grammar, &choices) {
            let (content, reasoning) = content_of(&read(&reading, &[&output]));
            prop_assert!(is_match(content.trim()), "{} in {}", content, output);
            prop_assert!(prompt != PROMPTS[2] || reasoning.is_empty(), "{}", output);
        }
    }
}

#[test]
fn reasoning_ends_after_its_limit_of_tokens() {
    let model = &MODELS[1];
    let [begin, end] = ["<think>", "</think>"].map(|mark| token_of(model, mark));
    let integer = Grammar::JsonSchema("{\"type\": \"integer\"}".into());
    let text: Vec<TokenId> = "caf\u{e9} \u{1f600}".bytes().map(TokenId::from).collect();
    for content in [None, Some(&integer)] {
        for prompt in &PROMPTS[..2] {
            for limit in 0..=text.len() {
                let rules = OutputRules {
                    content,
                    reasoning_tokens_max: Some(limit as u32),
                    ..OutputRules::default()
                };
                let reading = reading("qwen3", "none", prompt);
                let grammar = reading.lark(&rules, &model.marks, &[END]).unwrap();
                let opening = if prompt.is_empty() {
                    vec![begin]
                } else {
                    vec![]
                };
                for count in 0..limit {
                    let output = [&opening[..], &text[..count]].concat();
                    let allowed = allowed_after(model, &grammar, &output);
                    assert!(allowed.contains(&text[count]), "{count} of {limit}");
                }
                let full = [&opening[..], &text[..limit]].concat();
                assert_eq!(allowed_after(model, &grammar, &full), [end], "{limit}");
                let answer = allowed_after(model, &grammar, &[&full[..], &[end]].concat());
                assert!(answer.contains(&u32::from(b'7')));
                let is_free = content.is_none();
                assert_eq!(answer.contains(&END), is_free, "the answer may be empty");
                assert_eq!(answer.contains(&u32::from(b'x')), is_free);
            }
        }
    }
    let rules = OutputRules {
        reasoning_tokens_max: Some(3),
        ..OutputRules::default()
    };
    let refused = reading("qwen3", "none", "").lark(&rules, &MODELS[0].marks, &[END]);
    let reason = refused.unwrap_err().to_string();
    assert!(reason.contains("</think>"), "{reason}");
}

// Lesson: 35, 39.
/// At each place of the draft: the rest of it is constrained.
#[test]
fn drafts_are_cut_behind_the_end_of_reasoning() {
    let model = &MODELS[1];
    let end = token_of(model, "</think>");
    let integer = Grammar::JsonSchema("{\"type\": \"integer\"}".into());
    let reading = reading("qwen3", "none", "p<think>\n");
    let grammar = reading
        .lark(&content(&integer), &model.marks, &[END])
        .unwrap();
    let constraint = Constraint {
        grammar,
        end: ConstraintEnd::Allowed,
    };
    let compiled = model.compiler.compile(&constraint).unwrap();
    let bytes = |text: &str| -> Vec<TokenId> { text.bytes().map(TokenId::from).collect() };
    for at in 0..6 {
        let thinking = &bytes("abcdef")[..at];
        for (answer, valid) in [("\n\n42", 4), ("42x", 2), ("x", 0)] {
            let draft = [thinking, &[end], &bytes(answer)].concat();
            let mut matcher = compiled.start();
            assert_eq!(
                matcher.valid_prefix(&draft),
                at + 1 + valid,
                "{at} {answer:?}"
            );
            // The tokens may have come one by one, before and behind the draft's beginning.
            for (nth, token) in draft[..at + 1 + valid].iter().enumerate() {
                assert_eq!(matcher.valid_prefix(&draft[nth..]), at + 1 + valid - nth);
                matcher.consume(*token).unwrap();
            }
        }
    }
}

/// Without its schema each of these calls would be read.
#[test]
fn a_free_text_has_no_call_that_is_not_strict() {
    let tools = callable(true);
    let mut rules = required(&tools, false);
    rules.calls.are_required = false;
    let free = |format: &str| {
        let reading = reading("none", format, "");
        reading.lark(&rules, &MODELS[0].marks, &[END]).unwrap()
    };
    let bad = r#"{"name": "weather", "parameters": {"bad": 1}}"#;
    let good = r#"{"name": "weather", "parameters": {"city": "a"}}"#;
    for (format, good, bad) in [
        (
            "hermes",
            "I say <tool_cal".to_owned(),
            format!("So <tool_call>{bad}"),
        ),
        ("llama3_json", good.to_owned(), bad.to_owned()),
        (
            "llama3_json",
            format!("{good}; {good}"),
            format!("{good}; {bad}"),
        ),
        ("llama3_json", format!("See: {bad}"), format!(" {bad}")),
        (
            "llama3_json",
            format!("a<|python_tag|>{good}"),
            format!("a<|python_tag|>{bad}"),
        ),
        (
            "llama3_json",
            format!("a<|python_tag|>{good}; {good}"),
            format!("a<|python_tag|>{good}; {bad}"),
        ),
        (
            "pythonic",
            r#"[weather(city="a")]"#.to_owned(),
            "[weather(bad=1)]".to_owned(),
        ),
        (
            "mistral",
            "See [TOOL".to_owned(),
            "[TOOL_CALLS]weather[ARGS]{}".to_owned(),
        ),
    ] {
        let grammar = free(format);
        assert!(accepts(&grammar, &good), "{format}: {good}");
        assert!(!accepts(&grammar, &bad), "{format}: {bad}");
    }
}

#[test]
fn marks_within_strings_of_arguments_end_nothing() {
    for (format, prompt, text, expected) in [
        (
            "qwen3_coder",
            "",
            "<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n<parameter=deep>\n{\"a\":\"</parameter>\"}\n</parameter>\n</function>\n</tool_call>",
            json!({"city": "a", "deep": {"a": "</parameter>"}}),
        ),
        (
            "openai",
            "<|start|>assistant",
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\":\"<|end|>\"}",
            json!({"city": "<|end|>"}),
        ),
        (
            "pythonic",
            "",
            r#"[weather(city="a\b)")]"#,
            json!({"city": "a\u{8})"}),
        ),
    ] {
        let tools = [CallableTool {
            name: "weather".to_owned(),
            schema: Some(json!({"type": "object", "properties": {
                "city": {"type": "string"}, "deep": {"type": "object"}}})),
            is_strict: true,
        }];
        let reading = reading("none", format, prompt);
        let grammar = reading.lark(&required(&tools, false), &MODELS[0].marks, &[END]);
        assert!(accepts(&grammar.unwrap(), text), "{text}");
        let (calls, rest) = divided(&read(&reading, &[text]));
        let arguments: Vec<Value> = calls
            .iter()
            .map(|(_, arguments)| serde_json::from_str(arguments).unwrap())
            .collect();
        assert_eq!((arguments, &*rest), (vec![expected], ""), "{text}");
    }
}

#[test]
fn a_form_that_every_output_has_needs_no_grammar() {
    let free = reading("qwen3", "hermes", "");
    let any = callable(false);
    let mut rules = required(&any, false);
    assert!(!free.is_free(&rules));
    rules.calls.are_required = false;
    assert!(free.is_free(&rules));
    rules.reasoning_tokens_max = Some(9);
    assert!(!free.is_free(&rules));
    assert!(
        reading("none", "hermes", "").is_free(&rules),
        "nothing to limit"
    );
    rules.reasoning_tokens_max = None;
    rules.calls.is_single = true;
    assert!(!free.is_free(&rules));
    rules.calls = CallRules {
        is_single: false,
        ..rules.calls
    };
    let strict = callable(true);
    rules.calls.tools = &strict;
    assert!(!free.is_free(&rules));
}

#[test]
fn arguments_that_no_format_can_enforce_are_refused() {
    let refusal = |format: &str, schema: Value, is_strict: bool| {
        let tools = [CallableTool {
            name: "weather".to_owned(),
            schema: Some(schema),
            is_strict,
        }];
        let made =
            reading("none", format, "").lark(&required(&tools, false), &MODELS[1].marks, &[END]);
        made.err().map(|error| error.to_string())
    };
    let with = |city: Value| json!({"type": "object", "properties": {"city": city}});
    for (schema, named) in [
        (with(json!({"type": "string", "pattern": "a+"})), "pattern"),
        (with(json!({"type": ["string", "integer"]})), "city"),
        (with(json!({"enum": ["1", 2]})), "city"),
        (json!({"type": "object", "required": ["x"]}), "required"),
        (
            json!({"type": "object", "minProperties": 1}),
            "minProperties",
        ),
        (json!({"type": "object", "properties": {"a b": {}}}), "a b"),
        (json!({"type": "array"}), "type"),
    ] {
        let reason = refusal("qwen3_coder", schema.clone(), true);
        assert!(
            reason.is_some_and(|reason| reason.contains(named)),
            "{schema}"
        );
    }
    let open = with(json!({"type": "string", "pattern": "a+"}));
    assert_eq!(refusal("qwen3_coder", open, false), None);
    let options = json!({"type": "object", "x-guidance": {}});
    assert!(
        refusal("hermes", options, false)
            .unwrap()
            .contains("x-guidance")
    );
}

/// Each argument has a copy of the definitions: together they would take 100 MB.
#[test]
fn copies_of_definitions_have_a_limit() {
    let names = (0..2000).map(|index| (format!("p{index}"), json!({"$ref": "#/$defs/d"})));
    let tools = [CallableTool {
        name: "weather".to_owned(),
        schema: Some(json!({
            "type": "object",
            "properties": Value::Object(names.collect()),
            "$defs": {"d": {"type": "integer", "description": "x".repeat(50_000)}},
        })),
        is_strict: true,
    }];
    for format in ["qwen3_coder", "pythonic", "gemma4"] {
        let reading = reading("none", format, "");
        let made = reading.lark(&required(&tools, false), &MODELS[1].marks, &[END]);
        let reason = made.err().map(|error| error.to_string());
        assert!(
            reason.is_some_and(|reason| reason.contains("too long")),
            "{format}"
        );
    }
}

/// Whatever a client describes is a grammar, or an error.
#[test]
fn damaged_schemas_are_grammars_or_errors() {
    let samples: Vec<Vec<u8>> = (0..call_formats().len() as u8)
        .map(|format| [&[format], schema().to_string().as_bytes()].concat())
        .collect();
    cleave_fuzz::check_samples("tool-schemas", &samples, 600, |bytes| {
        let (choice, text) = bytes.split_first().unwrap_or((&0, &[]));
        let formats = call_formats();
        let format = formats[usize::from(*choice) % formats.len()];
        let Ok(schema) = serde_json::from_slice(text) else {
            return;
        };
        let tools = [CallableTool {
            name: "weather".to_owned(),
            schema: Some(schema),
            is_strict: choice % 2 == 0,
        }];
        let reading = reading("qwen3", format, "<|start|>assistant");
        let model = &MODELS[1];
        let grammar = reading.lark(&required(&tools, false), &model.marks, &[END]);
        let Ok(grammar) = grammar else { return };
        let compiled = model.compiler.compile(&Constraint {
            grammar,
            end: ConstraintEnd::Allowed,
        });
        if let Err(error) = compiled {
            assert_ne!(error, GrammarError::Failed);
        }
    });
}

/// The property above is empty if no text ends.
#[test]
fn most_texts_that_are_drawn_end() {
    let tools = callable(true);
    let rules = required(&tools, true);
    for format in call_formats() {
        // Without tokens for its marks nothing would lead out of a message.
        let models = MODELS.iter().skip(usize::from(format == "openai"));
        for model in models {
            assert!(check_calls(model, format, &rules, &[]).unwrap(), "{format}");
        }
    }
}
