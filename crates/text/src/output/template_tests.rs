//! Calls in the words of real chat templates are read back.

use super::rendered_tests::{arguments, found, is_writable};
use super::tests::{read, tools};
use super::{OutputFormats, OutputReading};
use crate::model_files::ModelFiles;
use crate::model_text::ModelText;
use crate::template::{RenderEnd, TemplateInput, TemplateValue};
use minijinja::value::{Serde, Value as TemplateJson};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::LazyLock;

/// A checkpoint of the tests whose template writes calls.
struct CallingModel {
    name: &'static str,
    /// The parser, where the template itself does not tell it.
    parser: Option<&'static str>,
    /// The end of a turn.
    end: &'static str,
    text: ModelText,
}

static MODELS: LazyLock<[CallingModel; 4]> = LazyLock::new(|| {
    let llama = (Some("llama3_json"), "<|eot_id|>");
    let qwen = (None, "<|im_end|>");
    [
        ("qwen3", qwen),
        ("qwen2.5", qwen),
        ("llama3", llama),
        ("llama3-new", llama),
    ]
    .map(|(name, (parser, end))| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        let files = ModelFiles::read(&root.join(name)).expect("a checkpoint of the tests");
        let text = ModelText::new(files).expect("a tokenizer");
        CallingModel {
            name,
            parser,
            end,
            text,
        }
    })
});

impl CallingModel {
    fn formats(&self) -> OutputFormats {
        match self.parser {
            Some(parser) => self
                .text
                .output_formats()
                .with_calls(parser.parse().unwrap()),
            None => self.text.output_formats(),
        }
    }

    /// The template's text of a turn with these calls.
    fn output(&self, calls: &[(&str, Value)], content: &str) -> String {
        let render = |messages: Value, end| {
            let input = TemplateInput {
                messages: TemplateValue(TemplateJson::from(Serde(messages))),
                body_bytes: 1 << 20,
                tools: None,
                documents: None,
                variables: None,
                last_content: None,
                end,
            };
            self.text.render(&input).unwrap()
        };
        let user = json!({"role": "user", "content": "Hi"});
        let call = |(name, arguments): &(&str, Value)| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
        let calls: Vec<Value> = calls.iter().map(call).collect();
        let turn = json!({"role": "assistant", "content": content, "tool_calls": calls});
        let prompt = render(json!([user]), RenderEnd::AnswerOpening);
        let whole = render(json!([user, turn]), RenderEnd::Closed);
        let output = whole.strip_prefix(&prompt).expect("the prompt comes first");
        let end = output.rfind(self.end).expect("the turn ends");
        output[..end].to_owned()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_call_of_a_template_is_read_back(
        model in 0usize..4,
        arguments in prop::collection::vec(arguments(), 1..4),
        content in "[a-z]{0,6}",
    ) {
        let model = &MODELS[model];
        let formats = model.formats();
        let reading = OutputReading::new(&formats, "", tools()).unwrap();
        prop_assume!(arguments.iter().all(|arguments| is_writable("", &reading, arguments)));
        // These templates write one call, without text in front of it.
        let is_llama = model.parser.is_some();
        let count = if is_llama { 1 } else { arguments.len() };
        let content = if is_llama { "" } else { &*content };
        let names = ["weather", "time"].into_iter().cycle();
        let calls: Vec<(&str, Value)> = names.zip(arguments).take(count).collect();
        let output = model.output(&calls, content);
        let single: Vec<&str> = output.split("").collect();
        let calls: Vec<(String, Value)> = calls.into_iter().map(|(name, json)| (name.to_owned(), json)).collect();
        for pieces in [&[&*output][..], &single] {
            prop_assert_eq!(found(&read(&reading, pieces)), calls.clone(), "{}: {}", model.name, output);
        }
    }
}
