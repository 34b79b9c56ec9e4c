//! Whole chats by script: lines and chunks in, texts and requests out.

use super::*;

fn chat(surface: ChatSurface) -> ChatSession {
    ChatSession::new(ChatSettings {
        surface,
        system: Some("Be short.".to_owned()),
        fields: Map::new(),
        shows_reasoning: true,
        shows_timing: false,
    })
}

fn chunk(delta: &Value) -> ServerEvent {
    ServerEvent::Chunk(json!({"choices": [{"delta": delta, "finish_reason": null}]}))
}

/// Answers by these deltas, and ends the stream.
fn answer(chat: &mut ChatSession, deltas: &[Value]) {
    for delta in deltas {
        chat.receive(chunk(delta), Duration::ZERO);
    }
    let end = json!({"choices": [{"delta": {}, "finish_reason": "stop"}]});
    chat.receive(ServerEvent::Chunk(end), Duration::ZERO);
    chat.receive(ServerEvent::Ended, Duration::ZERO);
}

/// Takes all outputs, a line each; a request is the contents of its messages.
fn outputs(chat: &mut ChatSession) -> Vec<String> {
    let line = |output| match output {
        ChatOutput::Show(role, text) => format!("{role:?} {text:?}"),
        ChatOutput::Send(body) => {
            let messages = body["messages"].as_array().unwrap().iter();
            let contents = messages.map(|message| message["content"].as_str().unwrap_or("-"));
            format!("send {}", contents.collect::<Vec<_>>().join("|"))
        }
        ChatOutput::Save(path, _) => format!("save {}", path.display()),
        ChatOutput::Load(path) => format!("load {}", path.display()),
        ChatOutput::Quit(Ok(())) => "quit".to_owned(),
        ChatOutput::Quit(Err(reason)) => format!("quit: {reason}"),
    };
    std::iter::from_fn(|| chat.poll()).map(line).collect()
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"tool_calls": [{"id": id, "function": {"name": name, "arguments": arguments}}]})
}

#[test]
fn turns_are_sent_in_the_order_of_the_talk() {
    let mut chat = chat(ChatSurface::Terminal);
    chat.enter("one");
    assert_eq!(outputs(&mut chat), ["send Be short.|one"]);
    assert_eq!(chat.need(), LineNeed::Nothing);
    let deltas = [
        json!({"reasoning_content": "hm"}),
        json!({"content": "1"}),
        json!({"content": "!"}),
    ];
    answer(&mut chat, &deltas);
    let shown = [
        r#"Reasoning "hm""#,
        r#"Reasoning "\n""#,
        r#"Content "1""#,
        r#"Content "!""#,
        r#"Content "\n""#,
    ];
    assert_eq!(outputs(&mut chat), shown);
    chat.enter("two \\");
    assert_eq!(chat.need(), LineNeed::Continuation);
    chat.enter("lines");
    assert_eq!(outputs(&mut chat), ["send Be short.|one|1!|two \nlines"]);
}

#[test]
fn each_call_gets_a_result_before_the_next_answer() {
    let mut chat = chat(ChatSurface::Terminal);
    chat.enter("weather?");
    let calls = [call("a", "weather", "{}"), call("b", "time", "{\"at\"")];
    let more = json!({"tool_calls": [{"index": 1, "function": {"arguments": ":1}"}}]});
    answer(&mut chat, &[&calls[..], &[more]].concat());
    let shown = outputs(&mut chat);
    assert_eq!(
        shown[1..5].join(" "),
        r#"Call "call weather " Call "{}" Call "\n" Call "call time ""#
    );
    assert_eq!(
        shown[5..].join(" "),
        r#"Call "{\"at\"" Call ":1}" Call "\n""#
    );
    for name in ["weather", "time"] {
        assert_eq!(chat.need(), LineNeed::ToolResult(name.to_owned()));
        assert!(outputs(&mut chat).is_empty());
        chat.enter(&format!("the {name}"));
    }
    let sent = outputs(&mut chat);
    assert_eq!(sent, ["send Be short.|weather?|-|the weather|the time"]);
}

#[test]
fn a_pipe_gets_answers_alone() {
    let mut chat = chat(ChatSurface::Pipe);
    chat.enter("weather?");
    let thought = json!({"reasoning_content": "hm"});
    answer(&mut chat, &[thought, call("a", "weather", "{}")]);
    let shown = outputs(&mut chat);
    assert_eq!(shown.len(), 3, "{shown:?}");
    assert!(
        shown[1].starts_with(r#"Content "{\"tool_calls\":[{"#),
        "{shown:?}"
    );
    chat.end_input();
    let ended = outputs(&mut chat);
    assert!(ended[0].starts_with("quit: the input ended"), "{ended:?}");
}

#[test]
fn a_stopped_answer_keeps_its_text_and_takes_no_more() {
    let mut chat = chat(ChatSurface::Terminal);
    chat.enter("one");
    chat.receive(chunk(&json!({"content": "par"})), Duration::ZERO);
    chat.receive(chunk(&call("a", "f", "{\"cu")), Duration::ZERO);
    outputs(&mut chat);
    chat.stop();
    chat.receive(chunk(&json!({"content": "tial"})), Duration::ZERO);
    assert_eq!(outputs(&mut chat), [r#"Call "\n""#, r#"Note "Stopped.""#]);
    assert_eq!(chat.need(), LineNeed::Message);
    chat.enter("two");
    assert_eq!(outputs(&mut chat), ["send Be short.|one|par|two"]);
    chat.stop();
    chat.enter("/retry");
    assert_eq!(outputs(&mut chat)[1], "send Be short.|one|par|two");
}

#[test]
fn errors_name_the_way_out() {
    let mut chat = chat(ChatSurface::Terminal);
    let refused = |status, wait: Option<u64>| ServerEvent::Refused {
        status,
        message: "No.".to_owned(),
        retry_after: wait.map(Duration::from_millis),
    };
    let lost = ServerEvent::Failed("cannot reach it".to_owned());
    for (event, words) in [
        (refused(401, None), "--api-key"),
        (
            refused(429, Some(1900)),
            "Try again in 2 s. /retry asks again.",
        ),
        (refused(400, None), "status 400"),
        (lost, "cannot reach it"),
        (ServerEvent::Ended, "before the answer did"),
        (
            ServerEvent::Chunk(json!({"error": {"message": "lost"}})),
            "lost",
        ),
    ] {
        chat.enter("one");
        assert_eq!(outputs(&mut chat), ["send Be short.|one"]);
        chat.receive(event, Duration::ZERO);
        let shown = outputs(&mut chat);
        assert!(
            shown[0].starts_with("Error") && shown[0].contains(words),
            "{shown:?}"
        );
    }
    let mut pipe = super::tests::chat(ChatSurface::Pipe);
    pipe.enter("one");
    pipe.receive(refused(400, None), Duration::ZERO);
    assert_eq!(outputs(&mut pipe)[1], "quit: No. (status 400)");
}

#[test]
fn an_answer_by_a_schema_must_be_json() {
    for (text, quits) in [("{\"n\": 1}", false), ("{\"n\":", true)] {
        let mut chat = chat(ChatSurface::Pipe);
        let format = json!({"type": "json_schema"});
        chat.settings
            .fields
            .insert("response_format".to_owned(), format);
        chat.enter("n?");
        answer(&mut chat, &[json!({"content": text})]);
        let shown = outputs(&mut chat);
        let last = shown.last().unwrap();
        assert_eq!(
            last.starts_with("quit: the answer is no JSON"),
            quits,
            "{shown:?}"
        );
    }
}

#[test]
fn a_pipe_has_messages_and_results_and_no_commands() {
    let mut chat = chat(ChatSurface::Pipe);
    for line in ["/save a.json", "//two", "/quit", "/nothing"] {
        chat.enter(line);
        let sent = outputs(&mut chat);
        assert_eq!(sent, [format!("send Be short.|{line}")]);
        chat.stop();
    }
    chat.enter("weather?");
    answer(&mut chat, &[call("a", "weather", "{}")]);
    outputs(&mut chat);
    chat.enter("/load b.json");
    let sent = outputs(&mut chat);
    assert_eq!(sent, ["send Be short.|weather?|-|/load b.json"]);
    let refused = ServerEvent::Refused {
        status: 429,
        message: "No.".to_owned(),
        retry_after: Some(Duration::from_secs(2)),
    };
    chat.receive(refused, Duration::ZERO);
    assert_eq!(outputs(&mut chat), ["quit: No. Try again in 2 s."]);
}

#[test]
fn commands_change_the_next_request() {
    let mut chat = chat(ChatSurface::Terminal);
    chat.enter("one");
    answer(&mut chat, &[json!({"content": "1"})]);
    outputs(&mut chat);
    chat.enter("/system");
    chat.enter("//two");
    let sent = outputs(&mut chat);
    assert_eq!(sent[1], "send one|1|/two");
    answer(&mut chat, &[]);
    chat.enter("/reset");
    chat.enter("/retry");
    chat.enter("/nothing");
    let shown = outputs(&mut chat);
    assert!(shown[1].contains("no message to answer"), "{shown:?}");
    assert!(shown[2].contains("/help lists them"), "{shown:?}");
    chat.enter("/save a.json");
    let ChatOutput::Save(_, file) = chat.poll().unwrap() else {
        panic!("a file is written");
    };
    chat.saved(Err("no room".to_owned()));
    chat.loaded(Ok(file));
    chat.enter("/load b.json");
    chat.loaded(Err("no such file".to_owned()));
    let shown = outputs(&mut chat);
    let words = ["no room", "0 turns", "load b.json", "no such file"];
    for (line, words) in shown.iter().zip(words) {
        assert!(line.contains(words), "{shown:?}");
    }
    assert_eq!(shown.len(), 4);
    chat.end_input();
    assert_eq!(outputs(&mut chat), ["quit"]);
}
