//! An answer while it is streamed.
//!
//! Owns: the meaning of a chunk. Never: prints; it says which text a chunk added.

use super::transcript::CalledTool;
use serde_json::Value;
use std::time::Duration;

/// Calls of one answer; a larger index is no call.
const CALLS_MAX: usize = 1024;

/// Text that a chunk added to an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AddedText {
    Reasoning(String),
    Content(String),
    /// A call began; its name.
    Call(String),
    /// More of the last call's arguments.
    Arguments(String),
}

#[derive(Clone, Debug, Default)]
pub(super) struct GrowingAnswer {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<CalledTool>,
    /// `finish_reason`, once the server has given it.
    pub(super) finish: Option<String>,
    pub(super) warnings: Vec<String>,
    /// Time from the request to its first text, at this client.
    first: Option<Duration>,
    usage: Value,
    timing: Value,
}

impl GrowingAnswer {
    /// Adds a chunk, `since` the request was sent.
    pub(super) fn add(&mut self, chunk: &Value, since: Duration) -> Vec<AddedText> {
        for (part, kept) in [("usage", &mut self.usage), ("timing", &mut self.timing)] {
            if chunk[part].is_object() {
                kept.clone_from(&chunk[part]);
            }
        }
        let warnings = chunk["warnings"].as_array().into_iter().flatten();
        let warnings = warnings.filter_map(|warning| warning["message"].as_str());
        self.warnings.extend(warnings.map(str::to_owned));
        let choice = &chunk["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish = Some(reason.to_owned());
        }
        let delta = &choice["delta"];
        let text = |name: &str| delta[name].as_str().filter(|text| !text.is_empty());
        let mut added = Vec::new();
        if let Some(text) = text("reasoning_content").or_else(|| text("reasoning")) {
            self.reasoning.push_str(text);
            added.push(AddedText::Reasoning(text.to_owned()));
        }
        if let Some(text) = text("content") {
            self.text.push_str(text);
            added.push(AddedText::Content(text.to_owned()));
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            self.add_call(part, &mut added);
        }
        if !added.is_empty() {
            self.first.get_or_insert(since);
        }
        added
    }

    fn add_call(&mut self, part: &Value, added: &mut Vec<AddedText>) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let index = part["index"].as_u64().map_or(self.calls.len(), |index| {
            usize::try_from(index).unwrap_or(CALLS_MAX)
        });
        if index >= CALLS_MAX {
            return;
        }
        if index >= self.calls.len() {
            self.calls.resize_with(index + 1, CalledTool::default);
        }
        let call = &mut self.calls[index];
        let (id, name) = (text(&part["id"]), text(&part["function"]["name"]));
        if call.id.is_empty() {
            call.id = id;
        }
        if call.name.is_empty() && !name.is_empty() {
            call.name.clone_from(&name);
            added.push(AddedText::Call(name));
        }
        let arguments = text(&part["function"]["arguments"]);
        if !arguments.is_empty() {
            call.arguments.push_str(&arguments);
            added.push(AddedText::Arguments(arguments));
        }
    }

    /// Returns a line about time and tokens; `since` is the time of the whole answer at this
    /// client.
    pub(super) fn timing_line(&self, since: Duration) -> String {
        let ms = |name: &str| self.timing[name].as_f64();
        let here = |time: Duration| time.as_secs_f64() * 1e3;
        let first = ms("ttft_ms").or(self.first.map(here));
        let mut parts = Vec::new();
        parts.extend(first.map(|time| format!("first token {}", time_text(time))));
        parts.extend(ms("tpot_ms").map(|time| format!("{} per token", time_text(time))));
        if let Some(output) = self.usage["completion_tokens"].as_u64() {
            let prompt = self.usage["prompt_tokens"].as_u64().unwrap_or_default();
            let cached = &self.usage["prompt_tokens_details"]["cached_tokens"];
            let cached = cached.as_u64().unwrap_or_default();
            parts.push(format!("{output} tokens after {prompt} ({cached} cached)"));
        }
        let whole = ms("e2e_ms").unwrap_or(here(since));
        parts.push(format!("{} in all", time_text(whole)));
        let stages: [(&str, &[&str]); 4] = [
            ("queue", &["router_queue_ms", "retry_ms"]),
            ("prefill", &["prefill_wait_ms", "prefill_ms"]),
            ("hand-off", &["transfer_ms"]),
            (
                "decode",
                &["decode_wait_ms", "first_decode_ms", "decode_ms"],
            ),
        ];
        let stage = |stage: &(&str, &[&str])| {
            let times: Vec<f64> = stage.1.iter().filter_map(|name| ms(name)).collect();
            let sum = (!times.is_empty()).then(|| times.iter().sum::<f64>())?;
            Some(format!("{} {}", stage.0, time_text(sum)))
        };
        let stages: Vec<String> = stages.iter().filter_map(stage).collect();
        if !stages.is_empty() {
            parts.push(stages.join(", "));
        }
        parts.join(" · ")
    }
}

/// Formats milliseconds with a fitting unit.
fn time_text(ms: f64) -> String {
    if ms >= 1000.0 {
        format!("{:.2} s", ms / 1000.0)
    } else if ms >= 10.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{ms:.1} ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn calls_grow_by_their_index() {
        let mut answer = GrowingAnswer::default();
        let chunk = |calls: Value| json!({"choices": [{"delta": {"tool_calls": calls}}]});
        let first = chunk(json!([
            {"index": 0, "id": "a", "function": {"name": "weather", "arguments": ""}},
            {"index": 1, "id": "b", "function": {"name": "time", "arguments": "{}"}},
        ]));
        let added = answer.add(&first, Duration::ZERO);
        let call = |name: &str| AddedText::Call(name.to_owned());
        let arguments = AddedText::Arguments("{}".to_owned());
        assert_eq!(added, [call("weather"), call("time"), arguments]);
        let part = |text: &str| chunk(json!([{"index": 0, "function": {"arguments": text}}]));
        answer.add(&part("{\"city\""), Duration::ZERO);
        answer.add(&part(": 1}"), Duration::ZERO);
        assert_eq!(answer.calls[0].arguments, "{\"city\": 1}");
        assert_eq!(answer.calls[1].arguments, "{}");
        let far = chunk(json!([{"index": 1_u64 << 40, "function": {"name": "x"}}]));
        assert!(answer.add(&far, Duration::ZERO).is_empty());
    }

    #[test]
    fn the_line_of_times_leaves_out_unknown_stages() {
        let mut answer = GrowingAnswer::default();
        let text = json!({"choices": [{"delta": {"content": "a"}}]});
        answer.add(&text, Duration::from_millis(5));
        let whole = Duration::from_millis(1500);
        assert_eq!(
            answer.timing_line(whole),
            "first token 5.0 ms · 1.50 s in all"
        );
        let end = json!({
            "choices": [],
            "usage": {
                "prompt_tokens": 40,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 32},
            },
            "timing": {"router_queue_ms": 1.0, "prefill_ms": 20.0, "ttft_ms": 21.0, "e2e_ms": 30.0},
        });
        answer.add(&end, Duration::ZERO);
        assert_eq!(
            answer.timing_line(whole),
            "first token 21 ms · 2 tokens after 40 (32 cached) · 30 ms in all · queue 1.0 ms, prefill 20 ms"
        );
    }
}
