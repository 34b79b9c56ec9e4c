//! Steady load: clients that ask, read, sometimes leave, and compare every byte.
//!
//! Owns: the questions, their answers in an undisturbed run, and the comparison. Never: injects a
//! fault.

use crate::chaos::rng::FaultRng;
use crate::harness::LIMIT;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A question, with the answer of an undisturbed run.
pub(crate) struct LoadQuestion {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
    pub(crate) expected: LoadAnswer,
}

/// An answer, assembled from any number of pieces.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LoadAnswer {
    choices: Vec<LoadChoice>,
    prompt_tokens: u64,
    output_tokens: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct LoadChoice {
    text: String,
    reasoning: String,
    /// Names and arguments of calls, in order, without their ids, which are random.
    calls: String,
    /// Tokens with their log-probabilities, as they were sent.
    scores: Vec<Value>,
    finish: Value,
    stop: Value,
}

/// How a question ended.
#[derive(Debug)]
pub(crate) enum QuestionOutcome {
    Answered(LoadAnswer),
    /// The client left; holds the part of the answer that it had.
    ClientLeft(LoadAnswer),
    /// Refused before any work; the client tries again.
    Refused,
    Failed(String),
}

/// Counts and failures of all clients.
#[derive(Default)]
pub(crate) struct LoadCounters {
    /// Events received, for tests that wait for progress.
    pub(crate) events: AtomicU64,
    pub(crate) answered: AtomicU64,
    pub(crate) left: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) tokens: AtomicU64,
    pub(crate) pause_micros: AtomicU64,
    pub(crate) failures: Mutex<Vec<String>>,
    pub(crate) stop: AtomicBool,
}

/// Questions of every kind with deterministic answers.
pub(crate) fn bodies(rng: &mut FaultRng) -> Vec<(&'static str, Value)> {
    const TEXT: &str = "/v1/completions";
    const CHAT: &str = "/v1/chat/completions";
    let long = "The borrow checker follows each reference to the value it came from. ".repeat(20);
    let messages = |text: &str| json!([{"role": "user", "content": text}]);
    let mut bodies = Vec::new();
    for prompt in ["A vector is", "Ownership means that", &long] {
        let tokens = 120 + rng.below(200);
        let seed = rng.below(1000);
        bodies.push((
            TEXT,
            json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0}),
        ));
        bodies.push((
            TEXT,
            json!({"prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "seed": seed, "logprobs": 2}),
        ));
        bodies.push((
            TEXT,
            json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": seed, "top_p": 0.95,
                   "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}),
        ));
        bodies.push((
            CHAT,
            json!({"messages": messages(prompt), "max_tokens": tokens, "temperature": 1.2, "seed": seed, "n": 3,
                   "logprobs": true, "top_logprobs": 2}),
        ));
        bodies.push((
            CHAT,
            json!({"messages": messages(prompt), "max_tokens": tokens, "temperature": 0, "min_tokens": tokens / 2}),
        ));
    }
    for (_, body) in &mut bodies {
        body["ignore_eos"] = json!(true);
    }
    bodies
}

/// Questions whose answers a constraint, calls or reasoning shape, for the model of
/// [`crate::tools::model`].
pub(crate) fn constrained_bodies(rng: &mut FaultRng) -> Vec<(&'static str, Value)> {
    const TEXT: &str = "/v1/completions";
    const CHAT: &str = "/v1/chat/completions";
    let tools = json!([
        crate::tools::tool("weather", 40),
        crate::tools::tool("climate", 40)
    ]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {
        "type": "array", "minItems": 12, "maxItems": 20, "items": {
            "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
            "required": ["name", "n"], "additionalProperties": false}}}});
    let mut bodies = Vec::new();
    for temperature in [0.0, 0.9] {
        let seed = rng.below(1000);
        let mut ask = |path: &'static str, fields: Value| {
            let mut body = json!({"temperature": temperature, "seed": seed, "max_tokens": 700});
            match path {
                TEXT => body["prompt"] = json!("It counts:"),
                _ => {
                    body["messages"] = json!([{"role": "user", "content": format!("{seed}: what is the weather?")}])
                }
            }
            let fields = fields.as_object().expect("an object").clone();
            body.as_object_mut().expect("an object").extend(fields);
            bodies.push((path, body));
        };
        let thinking = json!({"opens_thinking": true});
        ask(
            TEXT,
            json!({"guided_regex": format!("(({seed}|one|two|number twelve), ){{90}}"), "n": 2}),
        );
        ask(
            TEXT,
            json!({"response_format": schema, "logprobs": 2, "repetition_penalty": 1.2}),
        );
        ask(
            CHAT,
            json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "n": 3,
            "thinking_token_budget": 30}),
        );
        ask(
            CHAT,
            json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "climate"}},
            "chat_template_kwargs": thinking, "thinking_token_budget": 60}),
        );
        ask(
            CHAT,
            json!({"response_format": schema, "chat_template_kwargs": thinking, "thinking_token_budget": 45,
            "logprobs": true, "top_logprobs": 1}),
        );
        // Nothing but reasoning and text, in the same steps.
        ask(
            CHAT,
            json!({"ignore_eos": true, "max_tokens": 300, "chat_template_kwargs": thinking}),
        );
    }
    bodies
}

/// A question with a stop string late in its own answer, if that has a text.
pub(crate) fn with_stop(body: &Value, answer: &LoadAnswer) -> Option<Value> {
    let text: Vec<char> = answer.choices[0].text.chars().collect();
    let from = text.len() * 7 / 10;
    let stop: String = text[from..(from + 6).min(text.len())].iter().collect();
    let mut body = body.clone();
    body["stop"] = json!([stop]);
    (!stop.is_empty()).then_some(body)
}

/// The same question as a stream.
pub(crate) fn streamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

impl LoadAnswer {
    pub(crate) fn output_tokens(&self) -> u64 {
        self.output_tokens
    }

    fn take(&mut self, piece: &Value) {
        for choice in piece["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().unwrap_or(0) as usize;
            if self.choices.len() <= index {
                self.choices.resize(index + 1, LoadChoice::default());
            }
            self.choices[index].take(choice);
        }
        if let Some(usage) = piece["usage"].as_object() {
            self.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
            self.output_tokens = usage["completion_tokens"].as_u64().unwrap_or(0);
        }
    }

    /// Whether this is the beginning of `whole`.
    fn begins(&self, whole: &Self) -> bool {
        let mut pairs = self.choices.iter().zip(&whole.choices);
        self.choices.len() <= whole.choices.len()
            && pairs.all(|(part, whole)| {
                whole.text.starts_with(&part.text)
                    && whole.reasoning.starts_with(&part.reasoning)
                    && whole.calls.starts_with(&part.calls)
                    && whole.scores.starts_with(&part.scores)
            })
    }
}

impl LoadChoice {
    fn take(&mut self, choice: &Value) {
        let texts = [
            &choice["text"],
            &choice["delta"]["content"],
            &choice["message"]["content"],
        ];
        for text in texts.into_iter().filter_map(Value::as_str) {
            self.text.push_str(text);
        }
        for message in [&choice["delta"], &choice["message"]] {
            let reasoning = message["reasoning_content"].as_str();
            self.reasoning.push_str(reasoning.unwrap_or_default());
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                for part in [&call["function"]["name"], &call["function"]["arguments"]] {
                    self.calls.push_str(part.as_str().unwrap_or_default());
                }
            }
        }
        let scores = &choice["logprobs"];
        self.scores
            .extend(scores["content"].as_array().into_iter().flatten().cloned());
        let lists = ["tokens", "token_logprobs", "top_logprobs"].map(|list| &scores[list]);
        for at in 0..lists[0].as_array().map_or(0, Vec::len) {
            self.scores.push(json!(lists.map(|list| &list[at])));
        }
        if !choice["finish_reason"].is_null() {
            self.finish = choice["finish_reason"].clone();
            self.stop = choice["stop_reason"].clone();
        }
    }
}

/// Asks once. `on_event` is called for each piece, and says whether the client stays.
pub(crate) fn ask(
    http: &reqwest::blocking::Client,
    base: &str,
    path: &str,
    body: &Value,
    mut on_event: impl FnMut() -> ReadOn,
) -> QuestionOutcome {
    let sent = http.post(format!("{base}{path}")).json(body).send();
    let response = match sent {
        Ok(response) => response,
        Err(error) => return QuestionOutcome::Failed(format!("no answer: {error:?}")),
    };
    let status = response.status().as_u16();
    if status != 200 {
        let text = response.text().unwrap_or_default();
        let error: Value = serde_json::from_str(&text).unwrap_or_default();
        let code = error["error"]["code"].as_str().unwrap_or_default();
        let turned_away = ["no_worker", "queue_full", "no_blocks", "draining"].contains(&code);
        return if turned_away {
            QuestionOutcome::Refused
        } else {
            QuestionOutcome::Failed(format!("status {status}: {text}"))
        };
    }
    let mut answer = LoadAnswer::default();
    if body["stream"] != true {
        let text = match response.text() {
            Ok(text) => text,
            Err(error) => return QuestionOutcome::Failed(format!("half an answer: {error:?}")),
        };
        answer.take(&serde_json::from_str(&text).unwrap_or_default());
        on_event();
        return QuestionOutcome::Answered(answer);
    }
    for line in BufReader::new(response).lines() {
        let line = match line {
            Ok(line) => line,
            Err(error) => return QuestionOutcome::Failed(format!("the stream broke: {error:?}")),
        };
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            return QuestionOutcome::Answered(answer);
        }
        let piece: Value = serde_json::from_str(data).unwrap_or_default();
        if piece["error"].is_object() {
            return QuestionOutcome::Failed(format!("an error in mid-stream: {data}"));
        }
        answer.take(&piece);
        if on_event() == ReadOn::Leave {
            return QuestionOutcome::ClientLeft(answer);
        }
    }
    QuestionOutcome::Failed("the stream ended without a word".into())
}

/// Whether a client reads on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ReadOn {
    Continue,
    Leave,
}

/// One client of a server at `base`, until the load stops.
pub(crate) fn run_client(
    base: &str,
    asks: &[LoadQuestion],
    counters: &LoadCounters,
    mut rng: FaultRng,
) {
    let http = http();
    while !counters.stop.load(Ordering::Relaxed) {
        let ask_now = rng.pick(asks);
        let streams = ask_now.body["stream"] == true;
        let events_max = if streams && rng.below(8) == 0 {
            rng.below(100) as u64
        } else {
            u64::MAX
        };
        let (mut events, mut last) = (0u64, None::<Instant>);
        let on_event = || {
            events += 1;
            counters.events.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            if let Some(before) = last.replace(now) {
                let micros = (now - before).as_micros() as u64;
                counters.pause_micros.fetch_max(micros, Ordering::Relaxed);
            }
            if events > events_max {
                ReadOn::Leave
            } else {
                ReadOn::Continue
            }
        };
        let outcome = ask(&http, base, ask_now.path, &ask_now.body, on_event);
        counters.record(ask_now, outcome);
    }
}

/// A client whose timeout covers the longest fault.
pub(crate) fn http() -> reqwest::blocking::Client {
    let builder = reqwest::blocking::Client::builder().timeout(LIMIT);
    builder.build().expect("client builds")
}

impl LoadCounters {
    fn record(&self, question: &LoadQuestion, outcome: QuestionOutcome) {
        let expected = &question.expected;
        let failure = match outcome {
            QuestionOutcome::Answered(answer) if answer == *expected => {
                self.answered.fetch_add(1, Ordering::Relaxed);
                self.tokens
                    .fetch_add(answer.output_tokens, Ordering::Relaxed);
                return;
            }
            QuestionOutcome::ClientLeft(answer) if answer.begins(expected) => {
                self.left.fetch_add(1, Ordering::Relaxed);
                return;
            }
            QuestionOutcome::Refused => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                // Honours `Retry-After`, but sooner.
                std::thread::park_timeout(Duration::from_millis(50));
                return;
            }
            QuestionOutcome::Answered(answer) | QuestionOutcome::ClientLeft(answer) => {
                format!("another answer:\n got {answer:?}\nwant {expected:?}")
            }
            QuestionOutcome::Failed(reason) => reason,
        };
        let failure = format!("{} {}: {failure}", question.path, question.body);
        let mut failures = self.failures.lock().expect("no panic holds it");
        failures.push(failure);
    }
}
