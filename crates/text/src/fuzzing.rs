//! Texts of clients for tests and libFuzzer.

use crate::detokenize::{TextStart, TextStream};
use crate::model_files::ModelFiles;
use crate::model_text::ModelText;
use crate::output::{
    AnswerPart, AnswerParts, OutputFormats, OutputReading, ReasoningParser, ToolCallParser,
    ToolSpec,
};
use crate::template::{ChatTemplates, RenderEnd, TemplateInput, TemplateValue};
use crate::tokenizer::SpecialTokens;
use minijinja::value::{Serde, Value};
use serde_json::json;
use std::path::Path;
use std::sync::{Arc, LazyLock};

fn model(name: &str) -> ModelText {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let files = ModelFiles::read(&root.join(name)).expect("a checkpoint of the tests");
    ModelText::new(files).expect("a tokenizer")
}

/// Tokenizes a text with tokenizers of three kinds.
///
/// # Panics
/// If a token does not exist, text is lost, or streamed decoding differs from decoding all tokens
/// at once.
pub fn text(bytes: &[u8]) {
    static MODELS: LazyLock<[(Arc<ModelText>, bool); 3]> = LazyLock::new(|| {
        // The flag says whether every text survives: the second model prepends a space and has no
        // token for some characters.
        [("llama3", true), ("llama2", false), ("qwen3", false)]
            .map(|(name, is_exact)| (Arc::new(model(name)), is_exact))
    });
    let text = String::from_utf8_lossy(bytes);
    for (model, is_exact) in &*MODELS {
        let tokens = model.tokenizer().encode(&text, SpecialTokens::Skipped);
        let tokens = tokens.expect("a text has tokens");
        let count = model.vocabulary_count();
        assert!(tokens.iter().all(|token| *token < count), "{tokens:?}");
        let whole = model.tokenizer().decode(&tokens, SpecialTokens::Kept);
        if *is_exact {
            assert_eq!(whole, text);
        }
        let mut stream = TextStream::new(Arc::clone(model), SpecialTokens::Kept, TextStart::Fresh);
        let mut parts: String = tokens.iter().map(|token| stream.push(*token)).collect();
        parts.push_str(&stream.finish());
        assert_eq!(parts, whole);
    }
}

/// Reads an output whole, by character, and at divisions of its own. The first bytes choose the
/// formats, the beginning of the prompt and the divisions; the rest is the output.
///
/// # Panics
/// If a division changes the parts, or a text of the parts is not in the output.
pub fn calls(bytes: &[u8]) {
    static TOOLS: LazyLock<Arc<[ToolSpec]>> = LazyLock::new(|| {
        let schema = json!({"properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "deep": {},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }});
        ["weather", "time"]
            .map(|name| ToolSpec::new(name.to_owned(), Some(&schema)))
            .into()
    });
    let Some(([reasoning, calls, prompt, cuts @ ..], output)) = bytes.split_at_checked(12) else {
        return;
    };
    let chosen = |names: Vec<&'static str>, byte: &u8| names[usize::from(*byte) % names.len()];
    let reasoning = chosen(ReasoningParser::names().collect(), reasoning);
    let calls = chosen(ToolCallParser::names().collect(), calls);
    let formats = OutputFormats::default()
        .with_reasoning(reasoning.parse().expect("a name from the list"))
        .with_calls(calls.parse().expect("a name from the list"));
    let prompts = [
        "",
        "<think>\n",
        "<think></think>",
        "[THINK]",
        "<|channel|>final<|message|>",
    ];
    let prompt = prompts[usize::from(*prompt) % prompts.len()];
    let Some(reading) = OutputReading::new(&formats, prompt, Arc::clone(&TOOLS)) else {
        return;
    };
    let output = String::from_utf8_lossy(output);
    let whole = parts(&reading, std::iter::once(&*output));
    let letters = output
        .char_indices()
        .map(|(at, letter)| &output[at..at + letter.len_utf8()]);
    assert_eq!(parts(&reading, letters), whole, "{output:?} by character");
    let mut rest = &*output;
    let mut pieces = Vec::new();
    for cut in cuts.iter().cycle().take(2 * output.len()) {
        let mut at = rest.len().min(usize::from(*cut));
        while !rest.is_char_boundary(at) {
            at -= 1;
        }
        let (piece, more) = rest.split_at(at);
        pieces.push(piece);
        rest = more;
    }
    pieces.push(rest);
    assert_eq!(parts(&reading, pieces.into_iter()), whole, "{output:?}");
    for part in &whole {
        let (AnswerPart::Text(text) | AnswerPart::Reasoning(text)) = part else {
            continue;
        };
        let mut letters = output.chars();
        let is_within = text
            .chars()
            .all(|letter| letters.any(|other| other == letter));
        assert!(is_within, "{text:?} is not in {output:?}");
    }
}

/// The parts of an output that comes in these pieces.
fn parts<'a>(reading: &OutputReading, pieces: impl Iterator<Item = &'a str>) -> Vec<AnswerPart> {
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

/// Compiles a chat template and renders a conversation with it, in which texts of the template
/// stand too.
///
/// # Panics
/// If compiler or renderer panic; if a rendering that succeeds is not the same again.
pub fn template(bytes: &[u8]) {
    let source = String::from_utf8_lossy(bytes);
    let special = json!({"bos_token": "<s>"}).as_object().cloned();
    let special = special.expect("an object");
    let named = vec![("default".to_owned(), source.to_string())];
    let Ok(templates) = ChatTemplates::new(named, special) else {
        return;
    };
    let quoted: String = source.chars().take(20).collect();
    let value = |json| TemplateValue(Value::from(Serde(json)));
    let input = |end| TemplateInput {
        messages: value(json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": quoted},
            {"role": "assistant", "content": null, "reasoning_content": "Hm", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, quoted]}}}]},
            {"role": "tool", "tool_call_id": "1", "content": "y"},
            {"role": "user", "content": [{"type": "text", "text": quoted}]},
        ])),
        body_bytes: 500,
        tools: Some(value(
            json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        )),
        documents: None,
        variables: Some(value(json!({"enable_thinking": false}))),
        last_content: Some(quoted.clone()),
        end,
    };
    for end in [
        RenderEnd::Closed,
        RenderEnd::AnswerOpening,
        RenderEnd::LastMessage,
    ] {
        let rendered = templates.render(&input(end));
        let again = templates.render(&input(end));
        // Whether it is in time depends on the machine.
        if let (Ok(rendered), Ok(again)) = (rendered, again) {
            assert_eq!(rendered, again, "{source}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_outputs_are_read_alike_in_any_division() {
        let sample = |reasoning: u8, calls: u8, prompt: u8, output: &str| {
            let head = [reasoning, calls, prompt, 1, 2, 9, 0, 4, 1, 3, 7, 5];
            [&head, output.as_bytes()].concat()
        };
        let outputs = [
            "<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a\\\"}\", \"days\": 2}}\n</tool_call>",
            "[TOOL_CALLS][{\"name\": \"time\", \"arguments\": {}}]",
            "[TOOL_CALLS]weather[ARGS]{\"days\": 2}",
            "{\"name\": \"weather\", \"parameters\": {\"deep\": [1, null]}}; {\"name\": \"time\"}",
            "[weather(city='it\\'s', days=-2), time()]",
            "<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"days\": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"deep\" string=\"false\">{}</｜DSML｜parameter>\n</｜DSML｜invoke>",
            "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.time<|channel|>commentary<|message|>{}<|call|>",
            "<|tool_call>call:weather{city:<|\"|>a<|\"|>,deep:{a:[true]}}<tool_call|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "<minimax:tool_call><invoke name=\"weather\"><parameter name=\"note\">null</parameter></invoke></minimax:tool_call>",
        ];
        let samples: Vec<Vec<u8>> = outputs
            .iter()
            .flat_map(|output| (0..20).map(move |calls| sample(calls % 5, calls, calls, output)))
            .collect();
        cleave_fuzz::check_samples("calls", &samples, 6_000, calls);
    }

    #[test]
    fn damaged_templates_are_errors_or_templates() {
        let qwen = include_str!("../../../testdata/qwen3/chat_template.jinja");
        let llama = include_str!("../../../testdata/llama3-new/chat_template.jinja");
        let samples = [
            qwen,
            llama,
            "{%- for m in messages %}{{ m.role ~ ': ' ~ (m.content or '') | trim }}{% endfor %}",
            "{% macro f(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{{ f(messages[1:]) }}{{ strftime_now('%d') }}",
            "{% set ns = namespace(n=0) %}{% for t in tools %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
        ];
        let samples = samples.map(|sample| sample.as_bytes().to_vec());
        cleave_fuzz::check_samples("template", &samples, 600, template);
    }

    #[test]
    fn any_text_survives_tokenization() {
        let samples = [
            "What is a slice? It's 12,345.67 \u{a0} \t\n\n  done"
                .as_bytes()
                .to_vec(),
            "Größe, 语言模型, 🦀👩‍👩‍👧, \u{1F1E9}\u{1F1EA} é e\u{301}"
                .as_bytes()
                .to_vec(),
            "<|im_start|><s></s><0x0A>▁<|eot_id|>".as_bytes().to_vec(),
            b"\xff\xfe\x00\x01\xc3".to_vec(),
        ];
        cleave_fuzz::check_samples("text", &samples, 3_000, text);
    }
}
