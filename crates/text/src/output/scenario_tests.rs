//! Outputs of reasoning, text and calls in every order, in each format.
//!
//! The scenarios are those of the conformance suite of ai-dynamo/frontend-crates, by its
//! identifiers (`UNIFIED.11-2` is `11-2`), in our own words. Where the suite expects other parts,
//! the row has both, and says which rule of ours makes the difference.

use super::rendered_tests::{names, rendered};
use super::tests::{formats, line, read, record, tools};
use super::{AnswerPart, OutputReading};
use serde_json::{Value, json};

/// A format of calls with one of reasoning: names, marks of reasoning, first and last mark of a
/// call.
struct FormatPair {
    calls: &'static str,
    reasoning: &'static str,
    thinks: [&'static str; 2],
    marks: [&'static str; 2],
}

const THINK: [&str; 2] = ["<think>", "</think>"];

const FAMILIES: [FormatPair; 12] = [
    family("hermes", ["<tool_call>", "</tool_call>"]),
    family("qwen3_coder", ["<tool_call>", "</tool_call>"]),
    family("glm45", ["<tool_call>", "</tool_call>"]),
    family(
        "kimi_k2",
        ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
    ),
    family(
        "minimax_m2",
        ["<minimax:tool_call>", "</minimax:tool_call>"],
    ),
    family(
        "deepseek_v4",
        ["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"],
    ),
    family("deepseek_v41", ["<｜DSML｜ calls>", "</｜DSML｜ calls>"]),
    family("nemotron_json", ["<TOOLCALL>", "</TOOLCALL>"]),
    family("step3", ["<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"]),
    FormatPair {
        reasoning: "cohere_command3",
        thinks: ["<|START_THINKING|>", "<|END_THINKING|>"],
        ..family("cohere_command3", ["<|START_ACTION|>", "<|END_ACTION|>"])
    },
    FormatPair {
        reasoning: "gemma4",
        thinks: ["<|channel>thought", "<channel|>"],
        ..family("gemma4", ["<|tool_call>", "<tool_call|>"])
    },
    // An output has one group of calls at most, which has no mark at its end.
    FormatPair {
        reasoning: "mistral",
        thinks: ["[THINK]", "[/THINK]"],
        ..family("mistral", ["[TOOL_CALLS]", ""])
    },
];

const fn family(calls: &'static str, marks: [&'static str; 2]) -> FormatPair {
    FormatPair {
        calls,
        reasoning: "qwen3",
        thinks: THINK,
        marks,
    }
}

/// A beginning of an output, by the end of its prompt.
#[derive(Clone, Copy)]
enum Start {
    Anywhere,
    InReasoning,
    BehindReasoning,
}

use Start::{Anywhere, BehindReasoning, InReasoning};

/// An output and its parts. `(A)` is reasoning, `[Rome]` a call with this city, `[]` one without
/// arguments, `[Ro` a call that is cut there, `[Rome` with a `|` behind it one that lacks its last
/// mark; `{b}`, `{e}`, `{o}` and `{c}` are single marks of reasoning and calls.
struct OutputScenario {
    id: &'static str,
    start: Start,
    output: &'static str,
    /// The parts; empty if they are as the output says.
    parts: &'static str,
}

const fn same(id: &'static str, output: &'static str) -> OutputScenario {
    OutputScenario {
        id,
        start: Anywhere,
        output,
        parts: "",
    }
}

const fn other(id: &'static str, output: &'static str, parts: &'static str) -> OutputScenario {
    OutputScenario {
        id,
        start: Anywhere,
        output,
        parts,
    }
}

const fn after(
    id: &'static str,
    start: Start,
    output: &'static str,
    parts: &'static str,
) -> OutputScenario {
    OutputScenario {
        id,
        start,
        output,
        parts,
    }
}

const SCENARIOS: [OutputScenario; 49] = [
    same("1-1", "[Paris]"),
    same("2-1", "[a][b]"),
    same("2-2", "[Paris][Paris]"),
    same("3-1", "The answer is 42, no tools needed."),
    same("6-1", "[]"),
    same("7-1", "[São Paulo 東京]"),
    same("7-2", "[git log {c} --oneline]"),
    same("7-3", "[ {b}quoted{e} {o} {c} &amp; \"x\"\\\n ]"),
    same("7-5", "[null]"),
    same("8-1", "On it: [Paris]"),
    same("8-2", "[Paris]The forecast shows clear skies."),
    same("8-3", "Before. [Paris] After."),
    same("8-4", "[a] then [b]"),
    same("8-5", "[Paris] then I'll run [a] and [b]"),
    same("8-6", "Write \"{o}\" to begin."),
    same("8-7", "The mark is '{o}' here."),
    same("8-8", "Write \"{o}\" first. [Paris]"),
    same("8-9", "He said \"go: [Paris]"),
    same("8-11", "It's 'the {o} that isn't one' here."),
    same("glm5-1", "[before {c}{o}weather{c} after]"),
    same("10-1", "(just thinking)"),
    same("10-2", "(let me think)The answer is 42."),
    same("11-1", "(Check weather.)[Paris]"),
    same("11-5", "(a)Here you go: [Paris]"),
    same("12-1", "[{b}reconsider{e}]"),
    same("12-3", "Logging now: [{b}reconsider{e}] done."),
    // Cut within reasoning: it is reasoning.
    other(
        "10-4",
        "{b}thinking but stream ends",
        "(thinking but stream ends)",
    ),
    after(
        "40-1",
        InReasoning,
        "checking{e}[Paris]",
        "(checking)[Paris]",
    ),
    after(
        "40-3",
        InReasoning,
        "weighing{e}I found: [Paris]",
        "(weighing)I found: [Paris]",
    ),
    after(
        "40-4",
        InReasoning,
        "no tool{e}It is 42.",
        "(no tool)It is 42.",
    ),
    after(
        "40-5",
        InReasoning,
        "weighing \"{o}\"{e}It is 42.",
        "(weighing \"{o}\")It is 42.",
    ),
    after(
        "41-1",
        InReasoning,
        "(checking)[London]",
        "(checking)[London]",
    ),
    // The call is complete without its last mark.
    other("5-2", "[Paris|", "[Paris]"),
    // Other parts than the suite's from here on. Reasoning is at the beginning of an output; there
    // it may be anywhere.
    other(
        "10-3",
        "(first)interlude (second)done",
        "(first)interlude {b}second{e}done",
    ),
    other(
        "11-2",
        "(Look.)[Paris](Now.)It's 18C.",
        "(Look.)[Paris]{b}Now.{e}It's 18C.",
    ),
    other(
        "11-6",
        "Sure. (checking)[Paris]",
        "Sure. {b}checking{e}[Paris]",
    ),
    other(
        "11-7",
        "Hello. (let me recall)It is Paris.",
        "Hello. {b}let me recall{e}It is Paris.",
    ),
    other("11-3", "(a)[Paris](b)[Rome]", "(a)[Paris]{b}b{e}[Rome]"),
    other(
        "11-4",
        "(a)[Paris] so (b)[Rome]",
        "(a)[Paris] so {b}b{e}[Rome]",
    ),
    other(
        "11-8",
        "(a)[Paris](b)[Rome](c)",
        "(a)[Paris]{b}b{e}[Rome]{b}c{e}",
    ),
    other("11-9", "[a](mid)[b]", "[a]{b}mid{e}[b]"),
    other(
        "11-10",
        "Sure. (A)[a] and (B)[b]",
        "Sure. {b}A{e}[a] and {b}B{e}[b]",
    ),
    // Two spans of reasoning next to each other: the second is text.
    other("10-5", "(first)(second)done", "(first){b}second{e}done"),
    // A call that was cut is a call, whose arguments the client judges; there it is dropped.
    other("5-1", "(ok)[Par", "(ok)[Par"),
    after("41-2", InReasoning, "analyzing{e}[Par", "(analyzing)[Par"),
    // A model that reasons behind an end that the prompt wrote is read; there the marks are text.
    after(
        "50-4",
        BehindReasoning,
        "(literal) then[Paris]",
        "(literal) then[Paris]",
    ),
    // Marks without a call are text; there they are dropped.
    other("5-3", "I will check that. {c}", "I will check that. {c}"),
    other("4-2", "{o}{c} done", "{o}{c} done"),
    other(
        "4-1",
        "{o}still thinking about it",
        "{o}still thinking about it",
    ),
];

/// Replaces the placeholders of single marks by those of the format.
fn marked(family: &FormatPair, text: &str) -> String {
    text.replace("{b}", family.thinks[0])
        .replace("{e}", family.thinks[1])
        .replace("{o}", family.marks[0])
        .replace("{c}", family.marks[1])
}

/// A call as the format's template writes it.
fn call(family: &FormatPair, city: &str) -> String {
    let arguments = if city.is_empty() {
        json!({})
    } else {
        json!({"city": city})
    };
    rendered(family.calls, &[("weather", arguments)])
}

/// Writes an output: calls and reasoning in the format.
fn written(family: &FormatPair, output: &str) -> String {
    let mut text = String::new();
    let mut rest = output;
    while let Some(at) = rest.find(['(', '[']) {
        text += &marked(family, &rest[..at]);
        let is_call = rest[at..].starts_with('[');
        rest = &rest[at + 1..];
        let end = rest.find(if is_call { ']' } else { ')' });
        let inside = marked(family, &rest[..end.unwrap_or(rest.len())]);
        text += &match (is_call, end, inside.strip_suffix('|')) {
            (false, ..) => format!("{}{inside}{}", family.thinks[0], family.thinks[1]),
            (true, Some(_), _) => call(family, &inside),
            (true, None, Some(city)) => {
                let whole = call(family, city);
                let whole = whole.trim_end();
                let open = whole.strip_suffix(family.marks[1]);
                open.expect("its last mark").to_owned()
            }
            (true, None, None) => {
                let whole = call(family, &inside);
                let at = whole.find(&inside).expect("its argument") + inside.len();
                whole[..at].to_owned()
            }
        };
        rest = end.map_or("", |end| &rest[end + 1..]);
    }
    text + &marked(family, rest)
}

/// Parts in the notation of a scenario, without whitespace.
fn notation(parts: &[AnswerPart]) -> String {
    let mut text = String::new();
    let mut arguments = None;
    for part in parts {
        match part {
            AnswerPart::Text(part) => text += part,
            AnswerPart::Reasoning(part) => text += &format!("({part})"),
            AnswerPart::CallBegin { .. } => arguments = Some(String::new()),
            AnswerPart::CallArguments(more) => arguments.as_mut().expect("a call").push_str(more),
            AnswerPart::CallEnd => text += &city(&arguments.take().expect("a call")),
        }
    }
    text += &arguments.map_or(String::new(), |cut| city(&cut));
    text.split_whitespace().collect()
}

/// The city of a call's arguments, which may be cut.
fn city(arguments: &str) -> String {
    if let Ok(value) = serde_json::from_str::<Value>(arguments) {
        return format!("[{}]", value["city"].as_str().unwrap_or_default());
    }
    let (_, city) = arguments.rsplit_once('"').expect("a text that is cut");
    format!("[{city}")
}

#[test]
fn parts_in_every_order_are_those_that_were_written() {
    for family in &FAMILIES {
        let formats = formats(family.reasoning, family.calls);
        for scenario in &SCENARIOS {
            // Without a last mark of a call there is nothing to lack it.
            let needs_mark = ["5-2", "5-3", "4-2", "7-2", "glm5-1", "7-3"].contains(&scenario.id);
            if needs_mark && family.marks[1].is_empty() {
                continue;
            }
            let prompt = match scenario.start {
                Anywhere => "",
                InReasoning => family.thinks[0],
                BehindReasoning => family.thinks[1],
            };
            let output = written(family, scenario.output);
            record(family.reasoning, family.calls, prompt, &output);
            let parts = if scenario.parts.is_empty() {
                scenario.output
            } else {
                scenario.parts
            };
            let expected: String = marked(family, parts).split_whitespace().collect();
            let reading = OutputReading::new(&formats, prompt, tools()).expect("a format");
            let whole = read(&reading, &[&output]);
            let context = format!("{} {}: {output}", family.calls, scenario.id);
            assert_eq!(notation(&whole), expected, "{context}");
            let single: Vec<&str> = output.split("").collect();
            assert_eq!(read(&reading, &single), whole, "{context}");
            for (at, _) in output.char_indices() {
                let (head, tail) = output.split_at(at);
                assert_eq!(read(&reading, &[head, tail]), whole, "{head} | {tail}");
            }
        }
    }
}

/// The suite's scenario 5-4: arguments that are no JSON, whose call ends at its marks.
#[test]
fn calls_behind_a_malformed_one_are_read() {
    // Calls without a mark are at the beginning of an output alone.
    let marked = |name: &&str| !name.starts_with("llama") && *name != "pythonic";
    for format in names().into_iter().filter(marked) {
        let malformed = rendered(format, &[("weather", json!({"deep": {"a": 1}}))]);
        let cut = malformed.find("1}").expect("the end of the value");
        let malformed = format!("{}{}", &malformed[..cut], &malformed[cut + 2..]);
        let valid = [("weather", json!({"city": "\u{e9}"})), ("time", json!({}))];
        let output = malformed + &rendered(format, &valid);
        record("none", format, "", &output);
        let reading = OutputReading::new(&formats("none", format), "", tools());
        let reading = reading.expect("a format");
        let whole = read(&reading, &[&output]);
        let without_id = |part: &AnswerPart| match part {
            AnswerPart::CallBegin { name, .. } => AnswerPart::CallBegin {
                name: name.clone(),
                id: None,
            },
            other => other.clone(),
        };
        let parts: Vec<AnswerPart> = whole.iter().map(without_id).collect();
        let text = line(&parts).replace(' ', "");
        assert!(
            text.ends_with("weather({\"city\":\"\u{e9}\"})time({})"),
            "{format}: {text}"
        );
        for (at, _) in output.char_indices() {
            let (head, tail) = output.split_at(at);
            assert_eq!(read(&reading, &[head, tail]), whole, "{head} | {tail}");
        }
    }
}
