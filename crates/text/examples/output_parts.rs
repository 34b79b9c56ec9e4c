//! Reads outputs of models: a JSON object a line on standard input, its parts a line on output.
//!
//! An input has `calls` and `reasoning` (names of parsers), `prompt` (the end of the prompt, which
//! may open the reasoning), `tools` (objects with `name` and `parameters`) and `pieces` (the
//! output's text). The answer is a list of parts for each piece, then one for the end.

use cleave_text::{
    AnswerPart, OutputFormats, OutputReading, ReasoningParser, ToolCallParser, ToolSpec,
};
use serde_json::{Value, json};
use std::io::{BufRead, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = parts_of(&serde_json::from_str(&line?)?)?;
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

fn parts_of(case: &Value) -> Result<Value, Box<dyn std::error::Error>> {
    let text_of = |key: &str| case[key].as_str().unwrap_or_default();
    let list_of = |key: &str| case[key].as_array().into_iter().flatten();
    let calls: ToolCallParser = text_of("calls").parse()?;
    let reasoning: ReasoningParser = text_of("reasoning").parse()?;
    let formats = OutputFormats::default()
        .with_calls(calls)
        .with_reasoning(reasoning);
    let tools = list_of("tools").map(|tool| {
        let name = tool["name"].as_str().unwrap_or_default();
        ToolSpec::new(name.to_owned(), tool.get("parameters"))
    });
    let reading = OutputReading::new(&formats, text_of("prompt"), tools.collect());
    let pieces = list_of("pieces").filter_map(Value::as_str);
    let Some(reading) = reading else {
        let texts = pieces.map(|piece| json!([{ "text": piece }]));
        return Ok(texts.chain([json!([])]).collect());
    };
    let mut parser = reading.start();
    let mut parts: Vec<Vec<AnswerPart>> = pieces.map(|piece| parser.push(piece)).collect();
    parts.push(parser.finish());
    let lists = parts
        .iter()
        .map(|list| list.iter().map(part_json).collect());
    Ok(lists.collect::<Vec<Value>>().into())
}

fn part_json(part: &AnswerPart) -> Value {
    match part {
        AnswerPart::Text(text) => json!({ "text": text }),
        AnswerPart::Reasoning(text) => json!({ "reasoning": text }),
        AnswerPart::CallBegin { name, id } => json!({ "begin": name, "id": id }),
        AnswerPart::CallArguments(text) => json!({ "arguments": text }),
        AnswerPart::CallEnd => json!({ "end": true }),
    }
}
