//! Reads outputs of models with the crates reasoning-parser and tool-parser (`smg`), or with
//! dynamo-parsers (`dynamo`). `parser_suites.py` builds it in a folder of its own.
//!
//! An input is a JSON object a line: `project`, `reasoning` and `calls` (the project's names of its
//! parsers, or empty), `is_open` (whether the prompt opened the reasoning), `tools` (`name`,
//! `parameters`) and `divisions` (lists of pieces; the first has one). The answer has `whole`, what
//! the project reads from the whole output, and `streams`, what it reads from each division. Both
//! are `[reasoning, text, [[name, arguments], …]]`, or a text that says why there is no answer.

use dynamo_parsers::reasoning::{
    ReasoningParser as _, ReasoningParserType, ReasoningParserWrapper,
};
use dynamo_parsers::tool_calling::ToolDefinition;
use dynamo_parsers::tool_calling::jail::{Annotated, JailedStream};
use dynamo_parsers::tool_calling::try_tool_call_parse_aggregate_finalize;
use dynamo_protocols::types::{
    ChatChoiceStream, ChatCompletionMessageContent, ChatCompletionStreamResponseDelta,
    CreateChatCompletionStreamResponse, FinishReason, Role,
};
use futures::StreamExt;
use openai_protocol::common::Tool;
use reasoning_parser::{ParserFactory as ReasoningFactory, ReasoningParser};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tool_parser::ParserFactory as ToolFactory;

/// Parts that were read of an output.
#[derive(Default)]
struct Parts {
    reasoning: String,
    text: String,
    /// Name and arguments.
    calls: Vec<(String, String)>,
}

impl Parts {
    /// A call's name, or more of its arguments.
    fn call(&mut self, index: usize, name: Option<&str>, arguments: &str) {
        if self.calls.len() <= index {
            self.calls.resize_with(index + 1, Default::default);
        }
        let (known, all) = &mut self.calls[index];
        known.push_str(name.unwrap_or_default());
        all.push_str(arguments);
    }
}

struct Case {
    reasoning: String,
    calls: String,
    is_open: bool,
    tools: Vec<Value>,
}

type Answer = Result<Parts, String>;

impl Case {
    fn smg_reasoning(&self) -> Option<Box<dyn ReasoningParser>> {
        let mut parser = ReasoningFactory::new()
            .registry()
            .create_parser(&self.reasoning)?;
        if self.is_open {
            parser.mark_reasoning_started();
        }
        Some(parser)
    }

    fn smg_tools(&self) -> Vec<Tool> {
        let tool = |tool: &Value| json!({"type": "function", "function": tool});
        let tools = self.tools.iter().map(tool);
        tools
            .map(|tool| serde_json::from_value(tool).expect("a tool"))
            .collect()
    }

    async fn smg_whole(&self, output: &str) -> Answer {
        let mut parts = Parts {
            text: output.to_owned(),
            ..Parts::default()
        };
        if let Some(mut parser) = self.smg_reasoning() {
            let read = parser
                .detect_and_parse_reasoning(output)
                .map_err(|error| error.to_string())?;
            (parts.reasoning, parts.text) = (read.reasoning_text, read.normal_text);
        }
        if let Some(parser) = ToolFactory::new().registry().create_parser(&self.calls) {
            let read = parser
                .parse_complete_with_tools(&parts.text, &self.smg_tools())
                .await;
            let (text, calls) = read.map_err(|error| error.to_string())?;
            parts.text = text;
            parts.calls = calls
                .into_iter()
                .map(|call| (call.function.name, call.function.arguments))
                .collect();
        }
        Ok(parts)
    }

    async fn smg_stream(&self, pieces: &[String]) -> Answer {
        let mut reasoning = self.smg_reasoning();
        let factory = ToolFactory::new();
        let mut calls = factory.registry().create_parser(&self.calls);
        let tools = self.smg_tools();
        let mut parts = Parts::default();
        for at in 0..=pieces.len() {
            let text = match (&mut reasoning, pieces.get(at)) {
                (None, piece) => piece.cloned().unwrap_or_default(),
                (Some(parser), piece) => {
                    let read = match piece {
                        Some(piece) => parser.parse_reasoning_streaming_incremental(piece),
                        None => parser.flush(),
                    };
                    let read = read.map_err(|error| error.to_string())?;
                    parts.reasoning += &read.reasoning_text;
                    read.normal_text
                }
            };
            match &mut calls {
                Some(parser) if !text.is_empty() => {
                    let read = parser
                        .parse_incremental(&text, &tools)
                        .await
                        .map_err(|error| error.to_string())?;
                    parts.text += &read.normal_text;
                    for item in read.calls {
                        parts.call(item.tool_index, item.name.as_deref(), &item.parameters);
                    }
                }
                Some(_) => {}
                None => parts.text += &text,
            }
        }
        if let Some(parser) = &mut calls {
            for item in parser.get_unstreamed_tool_args().into_iter().flatten() {
                parts.call(item.tool_index, item.name.as_deref(), &item.parameters);
            }
            parts.text += &parser.take_unstreamed_normal_text();
        }
        Ok(parts)
    }

    fn dynamo_reasoning(&self) -> Option<ReasoningParserWrapper> {
        if self.reasoning.is_empty() {
            return None;
        }
        let mut parser = ReasoningParserType::get_reasoning_parser_from_name(&self.reasoning);
        // Some begin within the reasoning, whatever the prompt has.
        parser.set_in_reasoning(self.is_open);
        Some(parser)
    }

    fn dynamo_tools(&self) -> Vec<ToolDefinition> {
        let tool = |tool: &Value| ToolDefinition {
            name: tool["name"].as_str().expect("a name").to_owned(),
            parameters: Some(tool["parameters"].clone()),
            strict: None,
        };
        self.tools.iter().map(tool).collect()
    }

    async fn dynamo_whole(&self, output: &str) -> Answer {
        let mut parts = Parts {
            text: output.to_owned(),
            ..Parts::default()
        };
        if let Some(mut parser) = self.dynamo_reasoning() {
            let read = parser.detect_and_parse_reasoning(output, &[]);
            (parts.reasoning, parts.text) = (read.reasoning_text, read.normal_text);
        }
        if !self.calls.is_empty() {
            let tools = self.dynamo_tools();
            let read = try_tool_call_parse_aggregate_finalize(
                &parts.text,
                Some(&self.calls),
                Some(&tools),
            )
            .await;
            let (calls, text) = read.map_err(|error| error.to_string())?;
            parts.text = text.unwrap_or_default();
            parts.calls = calls
                .into_iter()
                .map(|call| (call.function.name, call.function.arguments))
                .collect();
        }
        Ok(parts)
    }

    async fn dynamo_stream(&self, pieces: &[String]) -> Answer {
        let mut parts = Parts::default();
        let mut texts = pieces.to_vec();
        if let Some(mut parser) = self.dynamo_reasoning() {
            texts.clear();
            for piece in pieces {
                let read = parser.parse_reasoning_streaming_incremental(piece, &[]);
                parts.reasoning += &read.reasoning_text;
                texts.push(read.normal_text);
            }
            let read = parser.finish_reasoning_stream();
            parts.reasoning += &read.reasoning_text;
            texts.push(read.normal_text);
        }
        texts.retain(|text| !text.is_empty());
        if self.calls.is_empty() {
            parts.text = texts.concat();
            return Ok(parts);
        }
        let jail = JailedStream::builder()
            .tool_call_parser(&*self.calls)
            .tool_definitions(self.dynamo_tools())
            .build();
        let chunks: Vec<_> = texts
            .into_iter()
            .map(Some)
            .chain([None])
            .map(chunk)
            .collect();
        let read: Vec<_> = jail.apply(futures::stream::iter(chunks)).collect().await;
        for choice in read
            .into_iter()
            .filter_map(|one| one.data)
            .flat_map(|data| data.choices)
        {
            if let Some(ChatCompletionMessageContent::Text(text)) = choice.delta.content {
                parts.text += &text;
            }
            for call in choice.delta.tool_calls.into_iter().flatten() {
                let function = call.function.as_ref();
                let name = function.and_then(|function| function.name.as_deref());
                let arguments = function.and_then(|function| function.arguments.as_deref());
                parts.call(call.index as usize, name, arguments.unwrap_or_default());
            }
        }
        Ok(parts)
    }
}

/// A chunk of a stream; the last one has no text.
fn chunk(text: Option<String>) -> Annotated<CreateChatCompletionStreamResponse> {
    #[allow(deprecated)]
    let choice = ChatChoiceStream {
        index: 0,
        finish_reason: text.is_none().then_some(FinishReason::Stop),
        delta: ChatCompletionStreamResponseDelta {
            role: Some(Role::Assistant),
            content: text.map(ChatCompletionMessageContent::Text),
            tool_calls: None,
            function_call: None,
            refusal: None,
            reasoning_content: None,
        },
        logprobs: None,
    };
    let response = CreateChatCompletionStreamResponse {
        id: String::new(),
        choices: vec![choice],
        created: 0,
        model: String::new(),
        system_fingerprint: None,
        object: "chat.completion.chunk".to_owned(),
        usage: None,
        service_tier: None,
    };
    Annotated {
        data: Some(response),
        id: None,
        event: None,
        comment: None,
        error: None,
    }
}

fn json_of(answer: std::thread::Result<Answer>) -> Value {
    match answer {
        Ok(Ok(parts)) => json!([parts.reasoning, parts.text, parts.calls]),
        Ok(Err(error)) => json!(format!("error: {error}")),
        Err(_) => json!("panic"),
    }
}

fn main() {
    // Panics of a parser are answers.
    std::panic::set_hook(Box::new(|_| {}));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let input: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        let text_of = |key: &str| input[key].as_str().unwrap_or_default().to_owned();
        let case = Case {
            reasoning: text_of("reasoning"),
            calls: text_of("calls"),
            is_open: input["is_open"] == true,
            tools: input["tools"].as_array().cloned().unwrap_or_default(),
        };
        let divisions: Vec<Vec<String>> =
            serde_json::from_value(input["divisions"].clone()).expect("lists of texts");
        let is_smg = input["project"] == "smg";
        let output = divisions[0].concat();
        let whole = catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(async {
                if is_smg {
                    case.smg_whole(&output).await
                } else {
                    case.dynamo_whole(&output).await
                }
            })
        }));
        let stream = |pieces: &Vec<String>| {
            json_of(catch_unwind(AssertUnwindSafe(|| {
                runtime.block_on(async {
                    if is_smg {
                        case.smg_stream(pieces).await
                    } else {
                        case.dynamo_stream(pieces).await
                    }
                })
            })))
        };
        let streams: Vec<Value> = divisions.iter().map(stream).collect();
        writeln!(
            out,
            "{}",
            json!({"whole": json_of(whole), "streams": streams})
        )
        .expect("an open output");
        out.flush().expect("an open output");
    }
}
