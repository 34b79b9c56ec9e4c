//! `cleave chat` through pipes: with a server, with a model of its own, and with scripted answers.

use crate::harness::{CleaveProcess, HttpClient, cleave, root, run, wait_for};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// Runs a command to its end with this standard input: status, standard output, standard error.
fn piped(mut command: Command, input: &str) -> (ExitStatus, String, String) {
    command.stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("cleave starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    // A chat that ended early reads no more.
    stdin.write_all(input.as_bytes()).ok();
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    (output.status, text(output.stdout), text(output.stderr))
}

fn chat(more: &[&str]) -> Command {
    let mut command = cleave(&[&["chat"], more].concat());
    command.env_remove("OPENAI_API_KEY");
    command
}

#[test]
fn a_chat_answers_alike_with_and_without_a_server() {
    let mut server = CleaveProcess::start(&["serve", "--port", "0", "--threads", "2"]);
    let address = server.address();
    let url = format!("http://{address}/v1");
    let rules = ["--temperature", "0", "--max-tokens", "12", "--timing"];
    let input = "What is a slice?\nAnd \\\na vector?\n";
    let (status, out, err) = piped(chat(&[&["--url", &url], &rules[..]].concat()), input);
    assert!(status.success(), "{err}");
    let with_model = [&["--threads", "2"], &rules[..]].concat();
    let (status, alone, other) = piped(chat(&with_model), input);
    assert!(status.success(), "{other}");
    assert_eq!(out, alone);
    assert!(!out.contains('\u{1b}'), "{out:?}");
    assert_eq!(err.lines().count(), 2, "{err}");
    assert!(
        err.contains("12 tokens after") && err.contains("prefill"),
        "{err}"
    );
    // The second question is asked after the first one and its answer.
    let client = HttpClient::new(&address);
    let ask = |messages: &Value| {
        let body = json!({"messages": messages, "temperature": 0, "max_tokens": 12});
        let (_, answer) = client.post("/v1/chat/completions", &body);
        answer["choices"][0]["message"]["content"]
            .as_str()
            .expect("a text")
            .to_owned()
    };
    let first = json!({"role": "user", "content": "What is a slice?"});
    let answer = ask(&json!([first]));
    let second = json!({"role": "user", "content": "And \na vector?"});
    let again = ask(&json!([first, {"role": "assistant", "content": answer}, second]));
    let line = |text: &str| {
        if text.ends_with('\n') {
            text.to_owned()
        } else {
            format!("{text}\n")
        }
    };
    assert_eq!(out, line(&answer) + &line(&again));
}

const SCRIPT: &str = r#"
answers:
  - contains: ["21 degrees"]
    text: "It is clear."
  - text: |-
      <think>
      The tool knows.
      </think>

      <tool_call>
      {"name": "weather", "arguments": {"city": "Rome"}}
      </tool_call>
"#;

#[test]
fn a_conversation_with_a_tool_goes_on_through_a_hand_off() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path.to_str().expect("a path").to_owned()
    };
    let script = file("answers.yaml", SCRIPT);
    let tools = file("tools.json", r#"[{"name": "weather"}]"#);
    let model = root().join("testdata/qwen3");
    let model = model.to_str().expect("a path");
    let plain = "serve --port 0 --engine mock --prefill 1 --decode 1 --placement split";
    let more = ["--model", model, "--mock-script", &script];
    let arguments: Vec<&str> = plain.split(' ').chain(more).collect();
    let mut server = CleaveProcess::start(&arguments);
    let url = format!("http://{}", server.address());
    let input = "How is the weather in Rome?\n21 degrees\n";
    let flags = ["--url", &url, "--tools", &tools];
    let (status, out, err) = piped(chat(&flags), input);
    assert!(status.success(), "{err}");
    let (line, rest) = out.split_once('\n').expect("two lines");
    assert!(
        line.contains(r#""name":"weather""#) && line.contains("Rome"),
        "{line}"
    );
    assert_eq!(rest, "It is clear.\n");
}

#[test]
fn a_line_of_a_pipe_writes_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("saved.json");
    let line = format!("/save {}", path.display());
    let (url, asked) = scripted(vec![("400 Bad Request", String::new())]);
    let flags = ["--url", &url, "--served-model-name", "m"];
    let (status, _, err) = piped(chat(&flags), &format!("{line}\n"));
    assert_eq!(status.code(), Some(1), "{err}");
    let body = asked.recv().expect("the line was sent");
    assert_eq!(body["messages"][0]["content"], *line);
    assert!(!path.exists());
}

#[test]
fn a_refused_list_of_models_names_the_way_out() {
    let error = |message: &str| json!({"error": {"message": message}}).to_string();
    for (answer, words) in [
        (
            ("401 Unauthorized", error("No key.")),
            ["401", "No key.", "--api-key"],
        ),
        (("404 Not Found", String::new()), ["404", "--url", "`/v1`"]),
        (
            ("503 Service Unavailable", error("Busy.")),
            ["503", "Busy.", "does not list"],
        ),
    ] {
        let (url, _asked) = scripted(vec![answer]);
        let (status, _, err) = piped(chat(&["--url", &url]), "one\n");
        assert_eq!(status.code(), Some(1), "{err}");
        assert!(!err.contains("is a server running"), "{err}");
        for word in words {
            assert!(err.contains(word), "{word}: {err}");
        }
    }
}

/// A server of one answer for each connection; gives the bodies that it was sent.
fn scripted(answers: Vec<(&'static str, String)>) -> (String, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let (sender, asked) = channel();
    std::thread::spawn(move || {
        for (status, answer) in answers {
            let (stream, _) = listener.accept().expect("a client");
            sender.send(request(&stream)).ok();
            let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n\r\n");
            (&stream).write_all((head + &answer).as_bytes()).ok();
            if answer.ends_with("forever\"}}]}\n\n") {
                // The client leaves; nothing ends this stream.
                (&stream).read_to_end(&mut Vec::new()).ok();
            }
        }
    });
    (url, asked)
}

/// The body of a request, if it is JSON.
fn request(stream: &TcpStream) -> Value {
    let mut lines = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).expect("a head");
        let line = line.trim().to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(count) = line.strip_prefix("content-length: ") {
            length = count.parse().expect("a number");
        }
    }
    let mut body = vec![0; length];
    lines.read_exact(&mut body).expect("a body");
    serde_json::from_slice(&body).unwrap_or_default()
}

fn events(deltas: &[Value], finish: &str) -> (&'static str, String) {
    let mut text = String::new();
    let end = json!({"choices": [{"delta": {}, "finish_reason": finish}]});
    let chunks = deltas
        .iter()
        .map(|delta| json!({"choices": [{"delta": delta}]}));
    for chunk in chunks.chain([end]) {
        text += &format!("data: {chunk}\n\n");
    }
    ("200 OK", text + "data: [DONE]\n\n")
}

#[test]
fn a_call_is_a_line_and_the_next_line_its_result() {
    let tools = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(tools.path(), r#"[{"name": "weather"}]"#).expect("a file");
    let call = |part: &str| json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "weather", "arguments": part}}]});
    let first = [
        json!({"reasoning_content": "hm"}),
        call("{\"city\":"),
        call("1}"),
    ];
    let sunny = json!({"content": "Sunny \u{1b}[2J."});
    let (url, asked) = scripted(vec![events(&first, "tool_calls"), events(&[sunny], "stop")]);
    let tools = tools.path().to_str().expect("a path");
    let flags = ["--url", &url, "--served-model-name", "m", "--tools", tools];
    let (status, out, err) = piped(chat(&flags), "weather?\n21 degrees\n");
    assert!(status.success(), "{err}");
    let (line, rest) = out.split_once('\n').expect("two lines");
    let calls: Value = serde_json::from_str(line).expect("a line of JSON");
    let function = json!({"name": "weather", "arguments": "{\"city\":1}"});
    assert_eq!(calls["tool_calls"][0]["function"], function);
    // A program gets the bytes of the model.
    assert_eq!(rest, "Sunny \u{1b}[2J.\n");
    let first = asked.recv().expect("a request");
    assert_eq!(first["tools"][0]["function"]["name"], "weather");
    assert_eq!(first["model"], "m");
    let second = asked.recv().expect("a request");
    let result = json!({"role": "tool", "tool_call_id": "c", "content": "21 degrees"});
    assert_eq!(second["messages"][2], result);
}

#[test]
fn failed_chats_end_with_their_reason_and_status() {
    let refused = |status: &'static str, message: &str| {
        (status, json!({"error": {"message": message}}).to_string())
    };
    let broken = (
        "200 OK",
        "data: {\"choices\": [{\"delta\": {\"content\": \"half\"}}]}\n\n".to_owned(),
    );
    for (answer, out, reason) in [
        (
            refused("401 Unauthorized", "No key."),
            "",
            "Give the key by --api-key",
        ),
        (
            refused("400 Bad Request", "Too long."),
            "",
            "Too long. (status 400)",
        ),
        (broken, "half\n", "ended before the answer did"),
    ] {
        let (url, _asked) = scripted(vec![answer]);
        let flags = ["--url", &url, "--served-model-name", "m"];
        let (status, found, err) = piped(chat(&flags), "one\ntwo\n");
        assert_eq!((status.code(), &*found), (Some(1), out), "{err}");
        assert!(err.contains(reason), "{err}");
    }
    let (status, _, err) = piped(chat(&["--url", "http://127.0.0.1:1"]), "one\n");
    assert_eq!(status.code(), Some(1));
    assert!(err.contains("`cleave serve` starts one"), "{err}");
    let schema = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(schema.path(), "[").expect("a file");
    let path = schema.path().to_str().expect("a path");
    let (status, _, err) = run(&["chat", "--json-schema", path]);
    assert_eq!(status.code(), Some(1));
    assert!(
        err.contains("is not JSON") && err.contains("line 1 column 1"),
        "{err}"
    );
}

#[test]
fn an_interrupt_ends_a_piped_chat_at_once() {
    let begun = "data: {\"choices\": [{\"delta\": {\"content\": \"forever\"}}]}\n\n";
    let (url, _asked) = scripted(vec![("200 OK", begun.to_owned())]);
    let mut command = chat(&["--url", &url, "--served-model-name", "m"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child: Child = command.spawn().expect("cleave starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(b"one\n").expect("it reads");
    let mut text = [0; 7];
    let stdout = child.stdout.as_mut().expect("a pipe");
    stdout.read_exact(&mut text).expect("the begun answer");
    let id = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &id]).status();
    assert!(sent.expect("kill runs").success());
    let status = wait_for("exit", || child.try_wait().expect("it can be asked"));
    assert_eq!(status.code(), Some(130));
}
