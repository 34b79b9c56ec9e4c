//! Outputs in each format: the parts, whatever the division.
//!
//! Names of fixtures say which case of which suite they restate, in our own words: `dynamo` is the
//! conformance suite of ai-dynamo/frontend-crates by its category, `vllm` a defect's number.

use super::registry::{CallStyle, OutputFormats};
use super::{AnswerPart, AnswerParts, OutputReading, ToolCallParser, ToolSpec};
use serde_json::{Value, json};
use std::sync::Arc;

const TOOLS: [&str; 2] = ["weather", "time"];

/// The schema of both tools' arguments.
fn schema() -> Value {
    json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "deep": {"type": "object"},
    }})
}

pub(super) fn tools() -> Arc<[ToolSpec]> {
    TOOLS
        .map(|name| ToolSpec::new(name.to_owned(), Some(&schema())))
        .into()
}

/// Prints an output of the tests with its formats, a JSON object behind a word, for
/// `scripts/lab/parser_suites.py`, which gives it to readers of other projects.
pub(super) fn record(reasoning: &str, calls: &str, prompt: &str, output: &str) {
    let tools = TOOLS.map(|name| json!({"name": name, "parameters": schema()}));
    let fixture = json!({
        "test": std::thread::current().name(),
        "reasoning": reasoning,
        "calls": calls,
        "prompt": prompt,
        "tools": tools,
        "output": output,
    });
    println!("fixture {fixture}");
}

pub(super) fn formats(reasoning: &str, calls: &str) -> OutputFormats {
    OutputFormats::default()
        .with_reasoning(reasoning.parse().unwrap())
        .with_calls(calls.parse().unwrap())
}

pub(super) fn read(reading: &OutputReading, pieces: &[&str]) -> Vec<AnswerPart> {
    let mut parser = reading.start();
    let mut parts = AnswerParts::default();
    for piece in pieces {
        parser
            .push(piece)
            .into_iter()
            .for_each(|part| parts.push(part));
    }
    parser
        .finish()
        .into_iter()
        .for_each(|part| parts.push(part));
    parts.0
}

/// The parts in one line: reasoning in angle brackets, calls as `name(arguments)`.
pub(super) fn line(parts: &[AnswerPart]) -> String {
    let mut line = String::new();
    for part in parts {
        match part {
            AnswerPart::Text(text) => line += text,
            AnswerPart::Reasoning(text) => line += &format!("<{text}>"),
            AnswerPart::CallBegin { name, id } => {
                line += &format!(
                    "{}{name}(",
                    id.as_deref().map_or(String::new(), |id| format!("{id}="))
                );
            }
            AnswerPart::CallArguments(text) => line += text,
            AnswerPart::CallEnd => line += ")",
        }
    }
    line
}

/// Checks the parts of an output, read whole, by character and at every division in two and three.
fn check(reasoning: &str, calls: &str, prompt: &str, output: &str, expected: &str) {
    record(reasoning, calls, prompt, output);
    let formats = formats(reasoning, calls);
    let reading = OutputReading::new(&formats, prompt, tools()).expect("a format");
    let whole = read(&reading, &[output]);
    assert_eq!(line(&whole), expected, "{output}");
    let ends: Vec<usize> = output.char_indices().map(|(at, _)| at).collect();
    let single: Vec<&str> = output.split("").collect();
    assert_eq!(read(&reading, &single), whole, "{output} by character");
    for (nth, first) in ends.iter().enumerate() {
        let (head, rest) = output.split_at(*first);
        assert_eq!(read(&reading, &[head, rest]), whole, "{head} | {rest}");
        let second = ends[(nth * 7 + 3) % ends.len()].max(*first);
        let pieces = [head, &output[*first..second], &output[second..]];
        assert_eq!(read(&reading, &pieces), whole, "{pieces:?}");
    }
}

fn check_calls(calls: &str, output: &str, expected: &str) {
    check("none", calls, "", output, expected);
}

#[test]
fn reasoning_ends_at_its_mark() {
    for (prompt, output, expected) in [
        ("", "<think>\nWhy?\n</think>\n\nSo.", "<Why?>So."),
        ("p<think>\n", "Why?\n</think>\n\nSo.", "<Why?>So."),
        ("p<think>\n", "<think>Why?</think>So.", "<Why?>So."),
        // The template closed it: `enable_thinking: false`.
        ("p<think>\n\n</think>\n\n", "So.", "So."),
        // Cut by the limit of tokens.
        ("p<think>\n", "Why </thi", "<Why></thi>"),
        ("", "a <think>b</think>", "a <think>b</think>"),
        ("", "<thinking>", "<thinking>"),
        ("p<think>", "</think>", ""),
        ("", "  x  ", "  x  "),
        ("p<think>", "a </think", "<a></think>"),
    ] {
        let expected = expected.replace("<Why></thi>", "<Why </thi>");
        let expected = expected.replace("<a></think>", "<a </think>");
        check("qwen3", "none", prompt, output, &expected);
    }
    check("mistral", "none", "", "[THINK]a[/THINK]b", "<a>b");
}

#[test]
fn a_call_after_reasoning_is_a_call() {
    let output = "<think>x <tool_call> y</think>\n\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
    check("qwen3", "hermes", "", output, "<x <tool_call> y>time({})");
}

#[test]
fn hermes_calls_are_read() {
    let call = r#"{"name": "weather", "arguments": {"city": "a}\"b", "days": 2}}"#;
    let read = r#"weather({"city": "a}\"b", "days": 2})"#;
    for (output, expected) in [
        (
            format!("<tool_call>\n{call}\n</tool_call>"),
            read.to_owned(),
        ),
        // dynamo: multiple calls, text before.
        (
            format!("Sure.\n<tool_call>{call}</tool_call>\n<tool_call>{call}</tool_call>\n"),
            format!("Sure.{read}{read}"),
        ),
        // dynamo: text after.
        (
            format!("<tool_call>{call}</tool_call>\nDone."),
            format!("{read}\nDone."),
        ),
        // dynamo: missing end mark.
        (format!("<tool_call>{call}"), read.to_owned()),
        (format!("<tool_call>{call} so"), format!("{read} so")),
        // dynamo: truncated arguments.
        (
            r#"<tool_call>{"name": "weather", "arguments": {"city": "a"#.to_owned(),
            r#"weather({"city": "a)"#.to_owned(),
        ),
        (
            r#"<tool_call>{"name": "weather", "arguments": {"city": 1</tool_call>x"#.to_owned(),
            r#"weather({"city": 1)x"#.to_owned(),
        ),
        // dynamo: no arguments.
        (
            r#"<tool_call>{"name": "time"}</tool_call>"#.to_owned(),
            "time({})".to_owned(),
        ),
        (
            r#"<tool_call>{"name": "time", "arguments": null}</tool_call>"#.to_owned(),
            "time({})".to_owned(),
        ),
        // vllm 47977: arguments before the name.
        (
            r#"<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>"#.to_owned(),
            r#"weather({"days": 1})"#.to_owned(),
        ),
        // Arguments as a text.
        (
            r#"<tool_call>{"name": "weather", "arguments": "{\"days\": 1}"}</tool_call>"#
                .to_owned(),
            r#"weather({"days": 1})"#.to_owned(),
        ),
    ] {
        check_calls("hermes", &output, &expected);
    }
}

#[test]
fn text_that_resembles_a_call_is_text() {
    for output in [
        r#"<tool_call>{"name": "unknown", "arguments": {}}</tool_call>"#,
        "<tool_call>hello</tool_call>",
        r#"<tool_call>{"name": 1}</tool_call>"#,
        r#"<tool_call>{"name": "time", "arguments": 1}</tool_call>"#,
        r#"<tool_call>{"arguments": {}}</tool_call>"#,
        r#"<tool_call>{"name": "time", "argum"#,
        "a <tool_cal",
        "<<tool_call><tool_call>",
    ] {
        check_calls("hermes", output, output);
    }
    let nested = r#"<tool_call>no <tool_call>{"name": "time"}</tool_call>"#;
    check_calls("hermes", nested, "<tool_call>notime({})");
    let cut = r#"<tool_call>{"name": "<tool_call>{"name": "time"}</tool_call>"#;
    check_calls("hermes", cut, r#"<tool_call>{"name": "time({})"#);
}

#[test]
fn a_head_beyond_the_limit_is_text() {
    let long = format!(
        "<tool_call>{{\"x\": \"{}\", \"name\": \"time\"}}",
        "y".repeat(9000)
    );
    let formats = formats("none", "hermes");
    let reading = OutputReading::new(&formats, "", tools()).unwrap();
    assert_eq!(line(&read(&reading, &[&long])), long);
    let mut parser = reading.start();
    let early: usize = parser
        .push(&long)
        .iter()
        .map(|part| line(std::slice::from_ref(part)).len())
        .sum();
    assert!(early > 8000, "{early} bytes before the end");
}

#[test]
fn llama_calls_begin_the_output() {
    let call = r#"{"name": "weather", "parameters": {"days": 2}}"#;
    let read = r#"weather({"days": 2})"#;
    for (output, expected) in [
        (call.to_owned(), read.to_owned()),
        (format!("<|python_tag|>{call}"), read.to_owned()),
        (format!("{call}; {call}"), format!("{read}{read}")),
        (format!("[{call}, "), format!("{read}, ")),
        (
            r#"{"type": "function", "name": "time", "parameters": {}}"#.to_owned(),
            "time({})".to_owned(),
        ),
        // Text first switches the reading of bare calls off.
        (format!("I call {call}"), format!("I call {call}")),
        (
            format!("I call <|python_tag|>{call}"),
            format!("I call{read}"),
        ),
        (r#"{"answer": 1}"#.to_owned(), r#"{"answer": 1}"#.to_owned()),
        (format!("{call} and"), format!("{read} and")),
    ] {
        check_calls("llama3_json", &output, &expected);
    }
}

#[test]
fn pythonic_calls_are_read() {
    for (output, expected) in [
        (
            r#"[weather(city='it\'s', days=-2), time()]"#,
            r#"weather({"city": "it's", "days": -2})time({})"#,
        ),
        (
            r#"<|python_start|>[weather(deep={'a': [True, None, (1,)]})]<|python_end|>"#,
            r#"weather({"deep": {"a":[true,null,[1]]}})"#,
        ),
        ("[1] A source", "[1] A source"),
        ("[unknown(a=1)]", "[unknown(a=1)]"),
        ("[weather(city=a+b)]", r#"weather({"city": "a+b"})"#),
    ] {
        check_calls("pythonic", output, expected);
    }
}

#[test]
fn mistral_calls_old_and_new_are_read() {
    for (output, expected) in [
        (
            r#"[TOOL_CALLS][{"name": "weather", "arguments": {"days": 2}, "id": "abcdefghi"}, {"name": "time", "arguments": {}}]"#,
            r#"weather({"days": 2})time({})"#,
        ),
        (
            r#"[TOOL_CALLS]weather[ARGS]{"days": 2}[TOOL_CALLS]time[ARGS]{}"#,
            r#"weather({"days": 2})time({})"#,
        ),
        (
            r#"Well.[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}"#,
            "Well.abcdefghi=time({})",
        ),
        ("[TOOL_CALLS] none", "[TOOL_CALLS] none"),
        ("[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS]unknown[ARGS]{}"),
    ] {
        check_calls("mistral", output, expected);
    }
}

/// dynamo: `gemma4` of the unified fixtures.
#[test]
fn gemma_calls_are_read() {
    for (output, expected) in [
        (
            "<|tool_call>call:weather{city:<|\"|>a {\"b\"}, c<|\"|>,days:2,deep:{a:[<|\"|>x<|\"|>,true],b:{}}}<tool_call|>",
            r#"weather({"city": "a {\"b\"}, c", "days": 2, "deep": {"a": ["x", true], "b": {}}})"#,
        ),
        (
            "So. <|tool_call>call:time{}<tool_call|><|tool_call>call:time{ }<tool_call|>",
            "So.time({})time({})",
        ),
        (
            "<|tool_call>call:weather{city:<|\"|>a<tool_call|>b<|\"|>}<tool_call|>",
            r#"weather({"city": "a<tool_call|>b"})"#,
        ),
        (
            "<|tool_call>call:weather{city:<|\"|>cut <|",
            "weather({\"city\": \"cut <|)",
        ),
        (
            "<|tool_call>call:weather{city:bare word,days:x",
            r#"weather({"city": "bare word", "days": "x")"#,
        ),
        (
            "<|tool_call>call:other{}<tool_call|>",
            "<|tool_call>call:other{}<tool_call|>",
        ),
        ("<|tool_call>time{}", "<|tool_call>time{}"),
    ] {
        check_calls("gemma4", output, expected);
    }
    let output = "<|channel>thought\nHm.<channel|><|tool_call>call:time{}<tool_call|>";
    check("gemma4", "gemma4", "", output, "<Hm.>time({})");
}

#[test]
fn calls_between_tags_are_read() {
    for (format, output, expected) in [
        (
            "qwen3_coder",
            "Now.\n<tool_call>\n<function=weather>\n<parameter=city>\na <b>\n\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            "Now.weather({\"city\": \"a <b>\\n\", \"days\": 2})",
        ),
        (
            "qwen3_coder",
            "<function=weather>\n<parameter=note>\nnull\n</parameter>\n<parameter=x>\n\"y\"\n</parameter>\n</tool_call>",
            r#"weather({"note": null, "x": "\"y\""})"#,
        ),
        // A text or null is a text, whatever it resembles.
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=note>\n{\"a\": \"b\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            r#"weather({"note": "{\"a\": \"b", "days": 2})"#,
        ),
        (
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"note\">None</parameter>\n<parameter name=\"x\">None</parameter>\n</invoke>\n</minimax:tool_call>",
            r#"weather({"note": "None", "x": null})"#,
        ),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>note</arg_key>\n<arg_value>[1]</arg_value>\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
            r#"weather({"note": "[1]", "x": [1]})"#,
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nab</para",
            "weather({\"city\": \"ab</para)",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=other>\n</function>",
            "<tool_call>\n<function=other>\n</function>",
        ),
        (
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">a</parameter>\n</invoke>\n<invoke name=\"time\">\n</invoke>\n</minimax:tool_call>",
            "weather({\"city\": \"a\"})time({})",
        ),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
            "weather({\"city\": \"a\\n\", \"days\": 2})time({})",
        ),
        (
            "glm47",
            "<tool_call>weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>time</tool_call>",
            "weather({\"days\": 2})time({})",
        ),
        (
            "deepseek_v32",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">2</｜DSML｜parameter>\n<｜DSML｜parameter name=\"deep\" string=\"false\">{\"a\": 1}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            "weather({\"city\": \"2\", \"deep\": {\"a\": 1}})",
        ),
        (
            "deepseek_v4",
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"time\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "time({})",
        ),
    ] {
        check_calls(format, output, expected);
    }
}

#[test]
fn calls_of_a_name_and_json_are_read() {
    for (format, output, expected) in [
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"days\": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "weather({\"days\": 2})time({})",
        ),
        (
            "deepseek_v31",
            "Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"days\": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Okweather({\"days\": 2})time({})",
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"days\": 2}<|tool_call_end|><|tool_calls_section_end|>",
            "functions.weather:0=weather({\"days\": 2})",
        ),
    ] {
        check_calls(format, output, expected);
    }
}

#[test]
fn calls_in_lists_between_marks_are_read() {
    for (format, output, expected) in [
        (
            "nemotron_json",
            r#"<TOOLCALL>[{"name": "weather", "arguments": {"days": 2}}, {"name": "time", "arguments": {}}]</TOOLCALL>"#,
            r#"weather({"days": 2})time({})"#,
        ),
        (
            "nemotron_json",
            r#"So. <TOOLCALL>{"name": "time", "arguments": {}}</TOOLCALL> Done."#,
            "So.time({}) Done.",
        ),
        (
            "nemotron_json",
            "<TOOLCALL>[]</TOOLCALL>",
            "<TOOLCALL>[]</TOOLCALL>",
        ),
        // Numbers of Cohere's calls begin at 0 in each turn, so they are no ids.
        (
            "cohere_command3",
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"days\": 2}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"time\", \"parameters\": {}}\n]<|END_ACTION|>",
            r#"weather({"days": 2})time({})"#,
        ),
        (
            "cohere_command3",
            r#"<|START_ACTION|>[{"name": "time", "parameters": {}}]<|END_ACTION|>"#,
            r#"<|START_ACTION|>[{"name": "time", "parameters": {}}]<|END_ACTION|>"#,
        ),
        // vllm: the tests of step3 leave out the kind of the tool, which its parser demands.
        (
            "step3",
            "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"weather\"><steptml:parameter name=\"city\">Rome</steptml:parameter><steptml:parameter name=\"days\">2</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
            r#"weather({"city": "Rome", "days": 2})"#,
        ),
    ] {
        check_calls(format, output, expected);
    }
    let output = "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[{\"tool_name\": \"time\", \"parameters\": {}}]<|END_ACTION|>";
    check(
        "cohere_command3",
        "cohere_command3",
        "",
        output,
        "<Hm.>time({})",
    );
}

#[test]
fn every_part_of_a_mark_may_be_a_token() {
    let step3 = formats("none", "step3");
    let reading = OutputReading::new(&step3, "", tools()).expect("a format");
    let marks: Vec<&str> = reading.marks().collect();
    for mark in [
        "<｜tool_call_begin｜>",
        "<｜tool_sep｜>",
        "<｜tool_calls_end｜>",
    ] {
        assert!(marks.contains(&mark), "{mark}");
    }
}

#[test]
fn channels_are_read() {
    for (output, expected) in [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>",
            "<Hm.>So.",
        ),
        (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"days\": 2}<|call|>",
            "weather({\"days\": 2})",
        ),
        (
            "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.time<|channel|>commentary<|message|>{}",
            "<x>time({})",
        ),
        ("<|channel|>commentary<|message|>I look.<|end|>", "I look."),
        (
            "<|channel|>commentary to=functions.other<|message|>{}",
            "{}",
        ),
        ("plain <|x|>", "plain <|x|>"),
    ] {
        check_calls("openai", output, expected);
    }
}

#[test]
fn templates_choose_their_formats() {
    for (template, calls) in [
        ("…<tool_call>…<function=…<parameter=…", "qwen3_coder"),
        ("…<tool_call>\n…", "hermes"),
        ("…<tool_call>…<arg_key>…<arg_value>…", "glm45"),
        ("…[TOOL_CALLS]…", "mistral"),
        ("…<|tool_call>call:…<tool_call|>…", "gemma4"),
        ("…<｜tool▁calls▁begin｜>…```json…", "deepseek_v3"),
        ("…<｜DSML｜ calls>…</｜DSML｜ calls>…", "deepseek_v41"),
        ("…<seed:tool_call>…<function=…<parameter=…", "seed_oss"),
        ("…<longcat_tool_call>…", "longcat"),
        ("…<|tool_call|>[…", "granite"),
        ("…<TOOLCALL>[…", "nemotron_json"),
        ("…<|START_RESPONSE|>…<|START_ACTION|>…", "cohere_command3"),
        ("…<｜tool_call_begin｜>…<steptml:invoke name=…", "step3"),
        ("…<|channel|>…<|message|>…<think></think>", "openai"),
    ] {
        let chosen = OutputFormats::of_template(template);
        let named = formats("none", calls);
        let marks = |formats: &OutputFormats| -> Vec<&str> {
            formats
                .calls()
                .into_iter()
                .flat_map(CallStyle::marks)
                .collect()
        };
        assert_eq!(marks(&chosen), marks(&named), "{template}");
        assert!(chosen.reasoning().is_none());
    }
    assert!(
        OutputFormats::of_template("…</think>…")
            .reasoning()
            .is_some()
    );
    assert!(!OutputFormats::of_template("{{ messages }}").reads_calls());
    let error = "nope".parse::<ToolCallParser>().unwrap_err();
    assert!(error.to_string().contains("hermes"), "{error}");
}
