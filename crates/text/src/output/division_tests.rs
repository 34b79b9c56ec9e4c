//! Every division of every format's outputs gives the parts of the whole.

use super::rendered_tests::{names, pieces_of, rendered};
use super::tests::{formats, line, read, record, tools};
use super::{AnswerPart, OutputReading, ReasoningParser};
use crate::detokenize::{TextStart, TextStream};
use crate::model_files::ModelFiles;
use crate::model_text::ModelText;
use crate::tokenizer::SpecialTokens;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// Divisions in four that are tried of each output, evenly over all of them.
const FOUR_PIECES: usize = 800;
/// Characters of the longest output of which every division in three is tried.
const THREE_PIECES_CHARS: usize = 130;

/// Calls with everything that a reader might stumble over, in a format's own words: one, or two.
fn outputs(format: &str) -> [String; 2] {
    let text = json!({"city": "\u{e9}}\u{1f600}\"\\<"});
    let deep = json!({"days": -2, "deep": {"a": [1, null, "x"]}});
    [
        rendered(format, &[("weather", text)]),
        rendered(format, &[("weather", deep), ("time", json!({}))]),
    ]
}

/// A reading, with an output that has reasoning and calls.
struct DivisionCase {
    name: &'static str,
    reading: OutputReading,
    output: String,
}

/// Each format of calls behind reasoning, and each format of reasoning in front of calls.
fn cases() -> Vec<DivisionCase> {
    let mut cases = Vec::new();
    let mut add = |name, reasoning: &str, calls: &str, output: String| {
        record(reasoning, calls, "", &output);
        let reading = OutputReading::new(&formats(reasoning, calls), "", tools());
        let reading = reading.expect("a format");
        cases.push(DivisionCase {
            name,
            reading,
            output,
        });
    };
    for name in names() {
        for output in outputs(name) {
            if name == "openai" {
                let analysis = "<|channel|>analysis<|message|>H\u{e9}<|end|><|start|>assistant";
                add(name, "none", name, format!("{analysis}{output}"));
            } else {
                add(
                    name,
                    "qwen3",
                    name,
                    format!("<think>H\u{e9}</think>\n\n{output}"),
                );
            }
        }
    }
    for name in ReasoningParser::names().filter(|name| *name != "none") {
        let (begin, end) = match name {
            "mistral" => ("[THINK]", "[/THINK]"),
            "gemma4" => ("<|channel>thought\n", "<channel|>"),
            "seed_oss" => ("<seed:think>", "</seed:think>"),
            "cohere_command3" => ("<|START_THINKING|>", "<|END_THINKING|>"),
            _ => ("<think>\n", "</think>"),
        };
        let [call, _] = outputs("hermes");
        add(
            name,
            name,
            "hermes",
            format!("{begin}H</m>{end}\n\nSo {call}"),
        );
    }
    cases
}

#[test]
fn every_division_in_two_to_four_gives_the_same_parts() {
    for DivisionCase {
        name,
        reading,
        output,
    } in cases()
    {
        let whole = read(&reading, &[&output]);
        let is_call = |part: &AnswerPart| matches!(part, AnswerPart::CallBegin { .. });
        let is_reasoning = |part: &AnswerPart| matches!(part, AnswerPart::Reasoning(_));
        let has_both = whole.iter().any(is_call) && whole.iter().any(is_reasoning);
        assert!(has_both, "{name}: {}", line(&whole));
        let mut cuts: Vec<usize> = output.char_indices().map(|(at, _)| at).collect();
        cuts.push(output.len());
        let count = cuts.len();
        let check =
            |pieces: &[&str]| assert_eq!(read(&reading, pieces), whole, "{name}: {pieces:?}");
        let short = count <= THREE_PIECES_CHARS;
        for (nth, first) in cuts.iter().enumerate() {
            let (head, rest) = output.split_at(*first);
            check(&[head, rest]);
            for second in cuts[nth..].iter().filter(|_| short) {
                check(&[head, &output[*first..*second], &output[*second..]]);
            }
        }
        let step = (count.pow(3) / FOUR_PIECES).max(1) | 1;
        for nth in (0..count.pow(3)).step_by(step) {
            let mut at = [nth, nth / count, nth / count / count].map(|place| cuts[place % count]);
            at.sort_unstable();
            let [first, second, third] = at;
            let middle = [&output[first..second], &output[second..third]];
            check(&[&output[..first], middle[0], middle[1], &output[third..]]);
        }
    }
}

/// A character may come in several tokens, and a mark in one or many.
#[test]
fn every_division_into_tokens_gives_the_same_parts() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    for model in ["qwen3", "llama3"] {
        let files = ModelFiles::read(&root.join(model)).expect("a checkpoint of the tests");
        let model = Arc::new(ModelText::new(files).expect("a tokenizer"));
        for case in cases() {
            let DivisionCase {
                name,
                reading,
                output,
            } = case;
            let whole = read(&reading, &[&output]);
            for size in 1..12 {
                // Each piece is encoded by itself, so that tokens end where it does.
                let cuts: Vec<usize> = (0..output.len()).map(|nth| 1 + nth * size % 7).collect();
                let pieces = pieces_of(&output, &cuts);
                let encode = |piece: &str| {
                    let tokens = model.tokenizer().encode(piece, SpecialTokens::Skipped);
                    tokens.expect("a text has tokens")
                };
                let tokens: Vec<u32> = pieces.into_iter().flat_map(encode).collect();
                let mut stream =
                    TextStream::new(Arc::clone(&model), SpecialTokens::Kept, TextStart::Fresh);
                let mut texts: Vec<String> =
                    tokens.into_iter().map(|token| stream.push(token)).collect();
                texts.push(stream.finish());
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                assert_eq!(read(&reading, &texts), whole, "{name}: {texts:?}");
            }
        }
    }
}
