//! Answers of a script, as clients of real processes see them.

use crate::harness::{self, CleaveProcess, HttpClient};
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

const SCRIPT: &str = r#"
answers:
  - contains: ["21 degrees"]
    text: "It is clear, at 21 degrees."
  - contains: ["weather in Rome"]
    text: |-
      <think>
      The tool knows.
      </think>

      <tool_call>
      {"name": "weather", "arguments": {"city": "Rome"}}
      </tool_call>
  - text: "Ünknown."
"#;

fn script() -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("answers.yaml");
    std::fs::write(&path, SCRIPT).expect("a file");
    let path = path.to_str().expect("a name in UTF-8").to_owned();
    (folder, path)
}

fn model() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/qwen3");
    folder.to_str().expect("a name in UTF-8").to_owned()
}

fn body(content: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}},
        "required": ["city"], "additionalProperties": false});
    let tool = json!({"name": "weather", "parameters": schema, "strict": true});
    json!({
        "messages": [{"role": "user", "content": content}],
        "tools": [{"type": "function", "function": tool}],
    })
}

#[test]
fn scripted_answers_are_exact_through_a_hand_off() {
    let (_folder, path) = script();
    let model = model();
    let mut server = CleaveProcess::start(&[
        "serve",
        "--port",
        "0",
        "--engine",
        "mock",
        "--model",
        &model,
        "--mock-script",
        &path,
        "--prefill",
        "1",
        "--decode",
        "1",
        "--placement",
        "split",
    ]);
    let client = HttpClient::new(&server.address());
    let ask = |body: &Value| {
        let (status, answer) = client.post("/v1/chat/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0].clone()
    };
    let mut asked = body("How is the weather in Rome?");
    for choice in ["auto", "required"] {
        asked["tool_choice"] = choice.into();
        let answer = ask(&asked);
        let message = &answer["message"];
        let call = &message["tool_calls"][0]["function"];
        assert_eq!(message["reasoning_content"], "The tool knows.", "{answer}");
        assert_eq!(
            call,
            &json!({"name": "weather", "arguments": "{\"city\": \"Rome\"}"})
        );
        assert_eq!(answer["finish_reason"], "tool_calls");
    }
    let second = ask(&body("The weather in Rome: 21 degrees"));
    assert_eq!(second["message"]["content"], "It is clear, at 21 degrees.");
    let mut streamed = body("Hello");
    streamed["stream"] = true.into();
    let mut text = String::new();
    let events = client.stream("/v1/chat/completions", &streamed);
    for event in events.take_while(|event| event != "[DONE]") {
        let chunk: Value = serde_json::from_str(&event).expect("each event is JSON");
        text += chunk["choices"][0]["delta"]["content"]
            .as_str()
            .unwrap_or_default();
    }
    assert_eq!(text, "Ünknown.");
    // A script does not break a request's demands.
    let mut forced = body("Hello");
    forced["tool_choice"] = "required".into();
    let (status, answer) = client.post("/v1/chat/completions", &forced);
    assert_eq!(status, 500, "{answer}");
    assert_eq!(ask(&body("Hello"))["message"]["content"], "Ünknown.");
}

#[test]
fn a_script_beside_a_model_or_with_a_mistake_ends_the_start() {
    let (_folder, path) = script();
    let (status, _, errors) = harness::run(&["serve", "--port", "0", "--mock-script", &path]);
    assert!(
        !status.success() && errors.contains("--engine mock"),
        "{errors}"
    );
    std::fs::write(&path, "answers: [{text: a, when: b}]").expect("a file");
    let mocked = [
        "serve",
        "--port",
        "0",
        "--engine",
        "mock",
        "--mock-script",
        &path,
    ];
    let (status, _, errors) = harness::run(&mocked);
    assert!(
        !status.success() && errors.contains("answers.yaml") && errors.contains("when"),
        "{errors}"
    );
}
