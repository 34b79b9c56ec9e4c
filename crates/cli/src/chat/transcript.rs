//! The turns of a conversation, as messages of a request and as a file.
//!
//! Owns: the order of turns, and the form of a saved conversation, which `/ui/chat` reads and
//! writes too. Never: sends or prints.

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

/// The form of a saved conversation.
const FORMAT: &str = "cleave-chat-1";

/// A call of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CalledTool {
    pub(super) id: String,
    pub(super) name: String,
    /// As the model wrote them.
    pub(super) arguments: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChatTurn {
    User(String),
    Answer {
        text: String,
        reasoning: String,
        calls: Vec<CalledTool>,
    },
    /// The result of the call with this id.
    Result {
        call: String,
        text: String,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Transcript {
    turns: Vec<ChatTurn>,
}

impl Transcript {
    /// Adds a message. A message before it that has no answer is replaced: its answer failed.
    pub(super) fn ask(&mut self, text: String) {
        if let Some(ChatTurn::User(_)) = self.turns.last() {
            self.turns.pop();
        }
        self.turns.push(ChatTurn::User(text));
    }

    pub(super) fn push(&mut self, turn: ChatTurn) {
        self.turns.push(turn);
    }

    /// Takes the last answer back. Returns whether there is something to answer.
    pub(super) fn forget_answer(&mut self) -> bool {
        if let Some(ChatTurn::Answer { .. }) = self.turns.last() {
            self.turns.pop();
        }
        !self.turns.is_empty()
    }

    /// Returns the calls that have no result, which are at the end.
    pub(super) fn open_calls(&self) -> Vec<CalledTool> {
        let is_result = |turn: &&ChatTurn| matches!(turn, ChatTurn::Result { .. });
        let results = self.turns.iter().rev().take_while(is_result).count();
        match self.turns.iter().rev().nth(results) {
            Some(ChatTurn::Answer { calls, .. }) => calls.iter().skip(results).cloned().collect(),
            _ => Vec::new(),
        }
    }

    pub(super) fn turns_count(&self) -> usize {
        self.turns.len()
    }

    /// Returns the messages of a request, in their order.
    pub(super) fn messages(&self, system: Option<&str>) -> Vec<Value> {
        let system = system.map(|text| json!({"role": "system", "content": text}));
        system
            .into_iter()
            .chain(self.turns.iter().map(message))
            .collect()
    }

    /// Returns the file of the conversation.
    pub(super) fn to_file(&self, system: Option<&str>) -> String {
        let turns: Vec<Value> = self.turns.iter().map(saved).collect();
        let settings = json!({"system": system.unwrap_or_default()});
        let file = json!({"format": FORMAT, "settings": settings, "turns": turns});
        format!("{file:#}\n")
    }

    /// Reads a file of a conversation: its system prompt, if it has one, and its turns.
    ///
    /// # Errors
    /// One that says which part is wrong.
    pub(super) fn from_file(text: &str) -> anyhow::Result<(Option<String>, Self)> {
        let file: Value = serde_json::from_str(text).context("this is not JSON")?;
        ensure!(
            file["format"] == FORMAT,
            "this is no saved conversation (format {FORMAT})"
        );
        let system = file["settings"]["system"].as_str().unwrap_or_default();
        let turns = file["turns"].as_array().context("it has no turns")?;
        let read = |turn: (usize, &Value)| {
            let (index, turn) = turn;
            read_turn(turn).with_context(|| format!("turn {}", index + 1))
        };
        let turns = turns.iter().enumerate().map(read);
        let turns = turns.collect::<anyhow::Result<Vec<_>>>()?;
        let system = (!system.is_empty()).then(|| system.to_owned());
        Ok((system, Self { turns }))
    }
}

fn message(turn: &ChatTurn) -> Value {
    match turn {
        ChatTurn::User(text) => json!({"role": "user", "content": text}),
        ChatTurn::Result { call, text } => {
            json!({"role": "tool", "tool_call_id": call, "content": text})
        }
        ChatTurn::Answer {
            text,
            reasoning,
            calls,
        } => {
            let content = (!text.is_empty() || calls.is_empty()).then_some(text);
            let mut message = json!({"role": "assistant", "content": content});
            if !reasoning.is_empty() {
                message["reasoning_content"] = reasoning.as_str().into();
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.iter().map(tool_call).collect();
            }
            message
        }
    }
}

/// Returns a call in OpenAI's form.
pub(super) fn tool_call(call: &CalledTool) -> Value {
    json!({
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}

fn saved(turn: &ChatTurn) -> Value {
    match turn {
        ChatTurn::User(text) => json!({"role": "user", "text": text}),
        ChatTurn::Result { call, text } => json!({"role": "tool", "call": call, "text": text}),
        ChatTurn::Answer {
            text,
            reasoning,
            calls,
        } => {
            let call = |call: &CalledTool| json!({"id": call.id, "name": call.name, "text": call.arguments});
            let calls: Vec<Value> = calls.iter().map(call).collect();
            json!({"role": "assistant", "state": "done", "text": text, "reasoning": reasoning, "calls": calls})
        }
    }
}

fn read_turn(turn: &Value) -> anyhow::Result<ChatTurn> {
    let text = |of: &Value, name: &str| {
        let text = of[name].as_str();
        text.map(str::to_owned)
            .with_context(|| format!("`{name}` is not a text"))
    };
    Ok(match turn["role"].as_str() {
        Some("user") => ChatTurn::User(text(turn, "text")?),
        Some("tool") => ChatTurn::Result {
            call: text(turn, "call")?,
            text: text(turn, "text")?,
        },
        Some("assistant") => {
            let calls = turn["calls"].as_array().into_iter().flatten();
            let call = |call: &Value| {
                Ok(CalledTool {
                    id: text(call, "id")?,
                    name: text(call, "name")?,
                    arguments: text(call, "text")?,
                })
            };
            ChatTurn::Answer {
                text: text(turn, "text")?,
                reasoning: text(turn, "reasoning")?,
                calls: calls.map(call).collect::<anyhow::Result<_>>()?,
            }
        }
        _ => bail!("`role` is none of user, assistant and tool"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_calls() -> Transcript {
        let mut transcript = Transcript::default();
        transcript.ask("weather?".to_owned());
        let call = |id: &str| CalledTool {
            id: id.to_owned(),
            name: "weather".to_owned(),
            arguments: "{}".to_owned(),
        };
        transcript.push(ChatTurn::Answer {
            text: String::new(),
            reasoning: "hm".to_owned(),
            calls: vec![call("a"), call("b")],
        });
        transcript
    }

    #[test]
    fn messages_have_the_order_of_the_turns() {
        let mut transcript = with_calls();
        let open = |transcript: &Transcript| -> Vec<String> {
            let calls = transcript.open_calls().into_iter();
            calls.map(|call| call.id).collect()
        };
        assert_eq!(open(&transcript), ["a", "b"]);
        for (left, id) in [(&["b"][..], "a"), (&[], "b")] {
            transcript.push(ChatTurn::Result {
                call: id.to_owned(),
                text: format!("result {id}"),
            });
            assert_eq!(open(&transcript), left);
        }
        let messages = transcript.messages(Some("Be short."));
        let roles: Vec<&str> = messages
            .iter()
            .filter_map(|message| message["role"].as_str())
            .collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "tool"]);
        assert_eq!(messages[2]["content"], Value::Null);
        assert_eq!(messages[2]["reasoning_content"], "hm");
        assert_eq!(messages[2]["tool_calls"][1]["function"]["name"], "weather");
        assert_eq!(
            messages[4],
            json!({"role": "tool", "tool_call_id": "b", "content": "result b"})
        );
    }

    #[test]
    fn a_message_without_an_answer_is_replaced() {
        let mut transcript = Transcript::default();
        transcript.ask("one".to_owned());
        transcript.ask("two".to_owned());
        assert_eq!(transcript.messages(None).len(), 1);
        assert!(transcript.forget_answer());
        assert!(!Transcript::default().forget_answer());
    }

    #[test]
    fn a_saved_conversation_reads_as_the_same() {
        let transcript = with_calls();
        let file = transcript.to_file(Some("Be short."));
        let (system, read) = Transcript::from_file(&file).unwrap();
        assert_eq!((system.as_deref(), read), (Some("Be short."), transcript));
        let part = r#"{"format": "cleave-chat-1", "turns": [{"role": "user", "text": 1}]}"#;
        for (bad, reason) in [("{", "not JSON"), ("{}", "no saved"), (part, "turn 1")] {
            let error = Transcript::from_file(bad).unwrap_err();
            assert!(format!("{error:#}").contains(reason), "{error:#}");
        }
    }
}
