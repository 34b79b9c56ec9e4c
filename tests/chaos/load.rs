//! Steady load: clients that ask, read, sometimes leave, and compare every byte.
//!
//! Owns: the questions, their answers in an undisturbed run, what was compared. Never: disturbs.

use crate::dice::Dice;
use crate::harness::LIMIT;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A question, and what an undisturbed run answers.
pub(crate) struct Ask {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
    pub(crate) expected: Answer,
}

/// An answer, put together from however many pieces it came in.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    choices: Vec<Choice>,
    prompt_tokens: u64,
    output_tokens: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Choice {
    text: String,
    /// Tokens with their log-probabilities, as they were sent.
    scores: Vec<Value>,
    finish: Value,
    stop: Value,
}

/// How a question ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Answered(Answer),
    /// The client left; this is what it had.
    Left(Answer),
    /// Not taken on, before any work: a client comes again.
    Refused,
    Failed(String),
}

/// What the clients have seen, together.
#[derive(Default)]
pub(crate) struct Ledger {
    /// Events received, for whoever waits for the load to get on.
    pub(crate) events: AtomicU64,
    pub(crate) answered: AtomicU64,
    pub(crate) left: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) tokens: AtomicU64,
    pub(crate) pause_micros: AtomicU64,
    pub(crate) failures: Mutex<Vec<String>>,
    pub(crate) over: AtomicBool,
}

/// Questions of every kind whose answers depend on nothing but themselves.
pub(crate) fn bodies(dice: &mut Dice) -> Vec<(&'static str, Value)> {
    const TEXT: &str = "/v1/completions";
    const CHAT: &str = "/v1/chat/completions";
    let long = "The borrow checker follows each reference to the value it came from. ".repeat(20);
    let say = |text: &str| json!([{"role": "user", "content": text}]);
    let mut bodies = Vec::new();
    for prompt in ["A vector is", "Ownership means that", &long] {
        let tokens = 120 + dice.below(200);
        let seed = dice.below(1000);
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
            json!({"messages": say(prompt), "max_tokens": tokens, "temperature": 1.2, "seed": seed, "n": 3,
                   "logprobs": true, "top_logprobs": 2}),
        ));
        bodies.push((
            CHAT,
            json!({"messages": say(prompt), "max_tokens": tokens, "temperature": 0, "min_tokens": tokens / 2}),
        ));
    }
    for (_, body) in &mut bodies {
        body["ignore_eos"] = json!(true);
    }
    bodies
}

/// A question that is stopped by text of its own answer, late in it.
pub(crate) fn with_stop(body: &Value, answer: &Answer) -> Value {
    let text: Vec<char> = answer.choices[0].text.chars().collect();
    let from = text.len() * 7 / 10;
    let stop: String = text[from..(from + 6).min(text.len())].iter().collect();
    let mut body = body.clone();
    body["stop"] = json!([stop]);
    body
}

/// The same question as a stream.
pub(crate) fn streamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

impl Answer {
    pub(crate) fn output_tokens(&self) -> u64 {
        self.output_tokens
    }

    fn take(&mut self, piece: &Value) {
        for choice in piece["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().unwrap_or(0) as usize;
            if self.choices.len() <= index {
                self.choices.resize(index + 1, Choice::default());
            }
            self.choices[index].take(choice);
        }
        if let Some(usage) = piece["usage"].as_object() {
            self.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
            self.output_tokens = usage["completion_tokens"].as_u64().unwrap_or(0);
        }
    }

    /// Whether this is how `whole` begins.
    fn begins(&self, whole: &Self) -> bool {
        let mut pairs = self.choices.iter().zip(&whole.choices);
        self.choices.len() <= whole.choices.len()
            && pairs.all(|(part, whole)| {
                whole.text.starts_with(&part.text) && whole.scores.starts_with(&part.scores)
            })
    }
}

impl Choice {
    fn take(&mut self, choice: &Value) {
        let texts = [
            &choice["text"],
            &choice["delta"]["content"],
            &choice["message"]["content"],
        ];
        for text in texts.into_iter().filter_map(Value::as_str) {
            self.text.push_str(text);
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

/// Asks once. `on_event` hears of each piece, and says whether the client stays.
pub(crate) fn ask(
    http: &reqwest::blocking::Client,
    (base, path, body): (&str, &str, &Value),
    mut on_event: impl FnMut() -> Stay,
) -> Outcome {
    let sent = http.post(format!("{base}{path}")).json(body).send();
    let response = match sent {
        Ok(response) => response,
        Err(error) => return Outcome::Failed(format!("no answer: {error:?}")),
    };
    let status = response.status().as_u16();
    if status != 200 {
        let text = response.text().unwrap_or_default();
        let error: Value = serde_json::from_str(&text).unwrap_or_default();
        let code = error["error"]["code"].as_str().unwrap_or_default();
        let turned_away = ["no_worker", "queue_full", "no_blocks", "draining"].contains(&code);
        return match turned_away {
            true => Outcome::Refused,
            false => Outcome::Failed(format!("status {status}: {text}")),
        };
    }
    let mut answer = Answer::default();
    if body["stream"] != true {
        let text = match response.text() {
            Ok(text) => text,
            Err(error) => return Outcome::Failed(format!("half an answer: {error:?}")),
        };
        answer.take(&serde_json::from_str(&text).unwrap_or_default());
        on_event();
        return Outcome::Answered(answer);
    }
    for line in BufReader::new(response).lines() {
        let line = match line {
            Ok(line) => line,
            Err(error) => return Outcome::Failed(format!("the stream broke: {error:?}")),
        };
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            return Outcome::Answered(answer);
        }
        let piece: Value = serde_json::from_str(data).unwrap_or_default();
        if piece["error"].is_object() {
            return Outcome::Failed(format!("an error in mid-stream: {data}"));
        }
        answer.take(&piece);
        if on_event() == Stay::No {
            return Outcome::Left(answer);
        }
    }
    Outcome::Failed("the stream ended without a word".into())
}

/// Whether a client reads on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Stay {
    Yes,
    No,
}

/// One client of a server at `base`, until the load is over.
pub(crate) fn client(base: &str, asks: &[Ask], ledger: &Ledger, mut dice: Dice) {
    let http = http();
    while !ledger.over.load(Ordering::Relaxed) {
        let ask_now = dice.pick(asks);
        let streams = ask_now.body["stream"] == true;
        let leaves_after = match streams && dice.below(8) == 0 {
            true => dice.below(100) as u64,
            false => u64::MAX,
        };
        let (mut events, mut last) = (0u64, None::<Instant>);
        let on_event = || {
            events += 1;
            ledger.events.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            if let Some(before) = last.replace(now) {
                let micros = (now - before).as_micros() as u64;
                ledger.pause_micros.fetch_max(micros, Ordering::Relaxed);
            }
            match events > leaves_after {
                true => Stay::No,
                false => Stay::Yes,
            }
        };
        let question = (base, ask_now.path, &ask_now.body);
        ledger.enter(ask_now, ask(&http, question, on_event));
    }
}

/// For answers that may take as long as the worst fault.
pub(crate) fn http() -> reqwest::blocking::Client {
    let builder = reqwest::blocking::Client::builder().timeout(LIMIT);
    builder.build().expect("client builds")
}

impl Ledger {
    fn enter(&self, asked: &Ask, outcome: Outcome) {
        let expected = &asked.expected;
        let failure = match outcome {
            Outcome::Answered(answer) if answer == *expected => {
                self.answered.fetch_add(1, Ordering::Relaxed);
                self.tokens
                    .fetch_add(answer.output_tokens, Ordering::Relaxed);
                return;
            }
            Outcome::Left(answer) if answer.begins(expected) => {
                self.left.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Outcome::Refused => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                // As a client would that heard `Retry-After`, only sooner.
                std::thread::park_timeout(Duration::from_millis(50));
                return;
            }
            Outcome::Answered(answer) | Outcome::Left(answer) => {
                format!("another answer:\n got {answer:?}\nwant {expected:?}")
            }
            Outcome::Failed(reason) => reason,
        };
        let failure = format!("{} {}: {failure}", asked.path, asked.body);
        let mut failures = self.failures.lock().expect("no panic holds it");
        failures.push(failure);
    }
}
