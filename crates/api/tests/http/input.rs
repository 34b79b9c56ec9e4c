//! Answers to invalid requests. Each case names the status, the code and the field.

use crate::scripted_server::{
    TestServer, files, options, post, request_forms, server, server_with,
};
use axum::body::Body;
use axum::http::Request;
use cleave_api::ApiOptions;
use proptest::prelude::*;
use serde_json::{Value, json};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const TEXT: &str = "/v1/completions";

/// Posts fields to both endpoints that are invalid in either.
pub(crate) async fn wrong_in_both(set: &TestServer, fields: Value, code: &str, param: &str) {
    for (path, field, value) in [
        (CHAT, "messages", json!([{"role": "user", "content": "Hi"}])),
        (TEXT, "prompt", json!("Hi")),
    ] {
        let mut body = fields.clone();
        body[field] = value;
        set.post(path, body).await.is_error(400, code, Some(param));
    }
    assert!(
        set.frontend.submitted.lock().unwrap().is_empty(),
        "{fields}"
    );
}

#[tokio::test]
async fn wrong_types_and_ranges_are_refused_by_field() {
    let set = server("llama3");
    for (fields, param) in [
        (json!({"model": 5}), "model"),
        (json!({"temperature": 2.01}), "temperature"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.1}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"top_k": 1.5}), "top_k"),
        (json!({"min_p": 1.5}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"repetition_penalty": 1e-40}), "repetition_penalty"),
        (json!({"repetition_penalty": 101}), "repetition_penalty"),
        (json!({"presence_penalty": 2.5}), "presence_penalty"),
        (json!({"frequency_penalty": -3}), "frequency_penalty"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": "many"}), "max_tokens"),
        (json!({"max_tokens": 18446744073709551615u64}), "max_tokens"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (
            json!({"max_completion_tokens": 1e300}),
            "max_completion_tokens",
        ),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"min_tokens": 10, "max_tokens": 9}), "min_tokens"),
        (json!({"n": 0}), "n"),
        (json!({"n": 129}), "n"),
        (json!({"seed": "x"}), "seed"),
        (json!({"stop": 5}), "stop"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": ["a", 5]}), "stop[1]"),
        (json!({"stop": vec!["x"; 17]}), "stop"),
        (json!({"stop": "x".repeat(2000)}), "stop"),
        (json!({"stop_token_ids": [1, 100000]}), "stop_token_ids[1]"),
        (json!({"stop_token_ids": [-1]}), "stop_token_ids[0]"),
        (json!({"stop_token_ids": [1.5]}), "stop_token_ids[0]"),
        (
            json!({"stop_token_ids": [4294967296u64]}),
            "stop_token_ids[0]",
        ),
        (
            json!({"stop_token_ids": [1, 2, 18446744073709551615u64]}),
            "stop_token_ids[2]",
        ),
        (
            json!({"logit_bias": {"4294967301": 1}}),
            "logit_bias.4294967301",
        ),
        (
            json!({"logit_bias": {"18446744073709551616": 1}}),
            "logit_bias.18446744073709551616",
        ),
        (json!({"logit_bias": {"-1": 1}}), "logit_bias.-1"),
        (json!({"logit_bias": {"99999": 1}}), "logit_bias.99999"),
        (json!({"logit_bias": {"abc": 1}}), "logit_bias.abc"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias.5"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"logprobs": "yes"}), "logprobs"),
        (json!({"ignore_eos": 1}), "ignore_eos"),
        (json!({"stream": "true"}), "stream"),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
        ),
        (
            json!({"stream": true, "stream_options": {"include_usage": 3}}),
            "stream_options.include_usage",
        ),
        (json!({"priority": 3000000000u64}), "priority"),
        (json!({"cache_salt": ""}), "cache_salt"),
        (json!({"response_format": "json"}), "response_format"),
        (json!({"response_format": {}}), "response_format.type"),
    ] {
        wrong_in_both(&set, fields, "invalid_value", param).await;
    }
}

#[tokio::test]
async fn unsupported_fields_are_refused() {
    let set = server("llama3");
    for (fields, param) in [
        (
            json!({"response_format": {"type": "grammar"}}),
            "response_format",
        ),
        (
            json!({"structured_outputs": {"structural_tag": "{}"}}),
            "structured_outputs.structural_tag",
        ),
        (json!({"ebnf": "root ::= \"a\""}), "ebnf"),
        (json!({"use_beam_search": true}), "use_beam_search"),
        (json!({"best_of": 3}), "best_of"),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template"),
        (
            json!({"truncate_prompt_tokens": 5}),
            "truncate_prompt_tokens",
        ),
    ] {
        wrong_in_both(&set, fields, "unsupported_parameter", param).await;
    }
    let chat = |fields: Value| {
        let mut body = fields;
        body["messages"] = json!([{"role": "user", "content": "Hi"}]);
        body
    };
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for (fields, param) in [
        (
            json!({"tools": tools, "tool_choice": "required"}),
            "tool_choice",
        ),
        (
            json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
            "tool_choice",
        ),
        (json!({"audio": {"voice": "x"}}), "audio"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
    ] {
        set.post(CHAT, chat(fields))
            .await
            .is_error(400, "unsupported_parameter", Some(param));
    }
    let body = json!({"prompt": "a", "suffix": "b"});
    set.post(TEXT, body)
        .await
        .is_error(400, "unsupported_parameter", Some("suffix"));
    // Fields that change nothing are ignored.
    set.script_text("x");
    let body = chat(
        json!({"unheard_of": 1, "best_of": null, "guided_json": null, "modalities": ["text"],
        "service_tier": "auto", "parallel_tool_calls": true, "response_format": {"type": "text"}, "use_beam_search": false}),
    );
    assert_eq!(set.post(CHAT, body).await.status, 200);
}

#[tokio::test]
async fn bad_messages_are_refused_by_path() {
    let set = server("llama3");
    let good = json!({"role": "user", "content": "Hi"});
    for (messages, param, code) in [
        (json!(null), "messages", "invalid_value"),
        (json!([]), "messages", "invalid_value"),
        (json!("Hi"), "messages", "invalid_value"),
        (json!(["Hi"]), "messages[0]", "invalid_value"),
        (
            json!([good, {"content": "x"}]),
            "messages[1].role",
            "invalid_value",
        ),
        (
            json!([good, {"role": "critic", "content": "x"}]),
            "messages[1].role",
            "invalid_value",
        ),
        (
            json!([good, {"role": "user"}]),
            "messages[1].content",
            "invalid_value",
        ),
        (
            json!([good, {"role": "user", "content": null}]),
            "messages[1].content",
            "invalid_value",
        ),
        (
            json!([good, {"role": "user", "content": 5}]),
            "messages[1].content",
            "invalid_value",
        ),
        (
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text",
            "invalid_value",
        ),
        (
            json!([{"role": "user", "content": ["x"]}]),
            "messages[0].content[0]",
            "invalid_value",
        ),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            json!([good, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
            "messages[1].tool_calls[0].function.arguments",
            "invalid_value",
        ),
    ] {
        set.post(CHAT, json!({"messages": messages}))
            .await
            .is_error(400, code, Some(param));
    }
    // The template itself refuses these messages.
    let llama2 = crate::scripted_server::server("llama2");
    let answer = llama2.post(CHAT, json!({"messages": [good, good]})).await;
    answer.is_error(400, "invalid_value", Some("messages"));
    assert!(answer.body.contains("must alternate"), "{}", answer.body);
    let body = json!({"messages": [good], "logprobs": false, "top_logprobs": 3});
    set.post(CHAT, body)
        .await
        .is_error(400, "invalid_value", Some("top_logprobs"));
    let body = json!({"messages": [good], "logprobs": true, "top_logprobs": 21});
    set.post(CHAT, body)
        .await
        .is_error(400, "invalid_value", Some("top_logprobs"));
    let body = json!({"messages": [good], "chat_template_kwargs": {"messages": []}});
    set.post(CHAT, body).await.is_error(
        400,
        "invalid_value",
        Some("chat_template_kwargs.messages"),
    );
}

#[tokio::test]
async fn bad_prompts_are_refused_by_path() {
    let set = server("llama3");
    for (prompt, param) in [
        (json!(null), "prompt"),
        (json!(5), "prompt"),
        (json!([]), "prompt"),
        (json!([true]), "prompt[0]"),
        (json!(["a", 5]), "prompt[1]"),
        (json!([5, "a"]), "prompt[1]"),
        (json!([5, 392]), "prompt[1]"),
        (json!([[5], [6, -1]]), "prompt[1][1]"),
    ] {
        set.post(TEXT, json!({"prompt": prompt}))
            .await
            .is_error(400, "invalid_value", Some(param));
    }
    let body = json!({"prompt": vec!["a"; 100], "n": 20});
    set.post(TEXT, body)
        .await
        .is_error(400, "invalid_value", Some("n"));
    let body = json!({"prompt": "a", "logprobs": 21});
    set.post(TEXT, body)
        .await
        .is_error(400, "invalid_value", Some("logprobs"));
}

#[tokio::test]
async fn an_empty_prompt_needs_a_begin_token() {
    let mut files = files("qwen3");
    files.config = files.config.replace("bos_token_id", "was_bos");
    files.generation_config = None;
    let set = server_with(files, options());
    set.post(TEXT, json!({"prompt": ""}))
        .await
        .is_error(400, "invalid_value", Some("prompt"));
}

#[tokio::test]
async fn a_prompt_beyond_the_context_is_refused_with_numbers() {
    let set = server("llama3");
    let context = set.text.context_tokens_max();
    let long = vec![5; context as usize];
    for (body, param, numbers) in [
        (json!({"prompt": long}), "prompt", vec!["512"]),
        (
            json!({"prompt": vec![5; 9000]}),
            "prompt",
            vec!["512", "9000"],
        ),
        (
            json!({"prompt": vec![5; 500], "max_tokens": 13}),
            "max_tokens",
            vec!["512", "500", "513"],
        ),
        (
            json!({"prompt": "x ".repeat(400_000)}),
            "prompt",
            vec!["512"],
        ),
    ] {
        let answer = set.post(TEXT, body).await;
        answer.is_error(400, "context_length_exceeded", Some(param));
        assert!(
            numbers.iter().all(|number| answer.body.contains(number)),
            "{}",
            answer.body
        );
        // The words by which libraries tell this error.
        let words = "maximum context length is 512 tokens";
        assert!(answer.body.contains(words), "{}", answer.body);
    }
    let messages = json!([{"role": "user", "content": "word ".repeat(600)}]);
    let answer = set.post(CHAT, json!({"messages": messages})).await;
    answer.is_error(400, "context_length_exceeded", Some("messages"));
    set.script_text("x");
    assert_eq!(
        set.post(TEXT, json!({"prompt": vec![5; 500]})).await.status,
        200
    );
    assert_eq!(
        set.last_submitted().stop.max_tokens,
        12,
        "the default is what there is room for"
    );
}

#[tokio::test]
async fn a_default_output_fits_what_a_worker_holds() {
    let set = server("llama3");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let post = async |path: &str, body: Value, held: Option<u32>| {
        *set.frontend.sequence_tokens_max.lock().unwrap() = held;
        set.script_default();
        assert_eq!(set.post(path, body).await.status, 200);
        let request = set.last_submitted();
        (request.prompt.len() as u32, request.stop.max_tokens)
    };
    let (prompt, output) = post(CHAT, chat.clone(), None).await;
    assert_eq!(prompt + output, 512, "the context");
    let (prompt, output) = post(CHAT, chat.clone(), Some(336)).await;
    assert_eq!(prompt + output, 336);
    // A client's own number stands, and a worker refuses what it cannot hold.
    let mut asked = chat.clone();
    asked["max_tokens"] = json!(400);
    assert_eq!(post(CHAT, asked, Some(336)).await.1, 400);
    let mut least = chat;
    least["min_tokens"] = json!(400);
    assert_eq!(post(CHAT, least, Some(336)).await.1, 400);
    let text = |count: usize| json!({"prompt": vec![5; count]});
    assert_eq!(post(TEXT, text(330), Some(336)).await.1, 6);
    assert_eq!(post(TEXT, text(100), Some(336)).await.1, 16);
    assert_eq!(
        post(TEXT, text(336), Some(336)).await.1,
        1,
        "for the worker to refuse"
    );
}

#[tokio::test]
async fn max_model_len_is_what_can_be_served() {
    let set = server("llama3");
    let model = async || set.get("/v1/models/llama3").await.json()["max_model_len"].clone();
    assert_eq!(model().await, 512);
    for (held, expected) in [(336, 336), (100_000, 512)] {
        *set.frontend.sequence_tokens_max.lock().unwrap() = Some(held);
        assert_eq!(model().await, expected);
        let counted = set.post("/tokenize", json!({"prompt": "a"})).await.json();
        assert_eq!(counted["max_model_len"], expected);
    }
}

#[tokio::test]
async fn texts_beyond_the_context_are_counted() {
    for model in ["llama3", "llama2"] {
        let set = server(model);
        let long = "a b".repeat(500);
        let counted = set.post("/tokenize", json!({"prompt": long})).await.json();
        assert!(counted["count"].as_u64() > Some(512), "{counted}");
        let tokens = &counted["tokens"];
        let joined = set.post("/detokenize", json!({"tokens": tokens})).await;
        assert!(joined.json()["prompt"].as_str().unwrap().ends_with(&long));
        let messages = json!([{"role": "user", "content": long}]);
        let counted = set.post("/tokenize", json!({"messages": messages})).await;
        assert!(
            counted.json()["count"].as_u64() > Some(512),
            "{}",
            counted.body
        );
    }
}

#[tokio::test]
async fn lists_of_tokens_are_limited() {
    let set = server("llama3");
    for (text, reason) in [
        (" ".repeat(8_000_000), "its pattern gives up"),
        ("a".repeat(200_000), "has 200000 bytes without a place"),
    ] {
        let answer = set.post("/tokenize", json!({"prompt": text})).await;
        answer.is_error(400, "invalid_value", Some("prompt"));
        assert!(answer.body.contains(reason), "{}", answer.body);
    }
    let answer = set
        .post("/tokenize", json!({"prompt": "7 ".repeat(1_000_000)}))
        .await;
    answer.is_error(400, "invalid_value", Some("prompt"));
    assert!(
        answer.body.contains("takes at most 1048576"),
        "{}",
        answer.body
    );
    let answer = set
        .post("/detokenize", json!({"tokens": vec![5; 1_100_000]}))
        .await;
    answer.is_error(400, "invalid_value", Some("tokens"));
    assert!(answer.body.contains("1100000 tokens"), "{}", answer.body);
}

#[tokio::test]
async fn an_encoded_body_is_refused() {
    let set = server("llama3");
    for (name, value, is_refused) in [
        ("content-encoding", "gzip", true),
        ("content-encoding", "identity, br", true),
        ("content-encoding", "Identity", false),
        ("transfer-encoding", "gzip, chunked", true),
        ("transfer-encoding", "chunked", false),
    ] {
        for path in [TEXT, CHAT, "/tokenize", "/detokenize", "/admin/drain"] {
            let mut request = post(path, "{}");
            let headers = request.headers_mut();
            headers.insert(name, value.parse().unwrap());
            let answer = set.send(request).await;
            assert_eq!(
                answer.status == 415,
                is_refused,
                "{path} {value}: {}",
                answer.body
            );
            if is_refused {
                answer.is_error(415, "unsupported_encoding", None);
            }
        }
    }
}

#[tokio::test]
async fn messages_name_the_limit_that_is_missed() {
    let set = server("llama3");
    for (fields, expected) in [
        (
            json!({"seed": 9_223_372_036_854_775_808_u64}),
            "`seed` must be a signed integer of 64 bits, not 9223372036854775808.",
        ),
        (
            json!({"max_tokens": -1}),
            "`max_tokens` must be between 1 and 4294967295, not -1.",
        ),
        (
            json!({"max_tokens": 0}),
            "`max_tokens` must be between 1 and 4294967295, not 0.",
        ),
    ] {
        for (path, field, value) in [
            (CHAT, "messages", json!([{"role": "user", "content": "Hi"}])),
            (TEXT, "prompt", json!("Hi")),
        ] {
            let mut body = fields.clone();
            body[field] = value;
            let answer = set.post(path, body).await;
            assert_eq!(answer.json()["error"]["message"], expected);
        }
    }
    let full = json!({"prompt": vec![5; 512], "echo": true, "max_tokens": 0});
    let answer = set.post(TEXT, full).await;
    answer.is_error(400, "context_length_exceeded", Some("prompt"));
    assert!(
        answer.body.contains("room for one more, which is computed"),
        "{}",
        answer.body
    );
    let tiny = r#"{"prompt": "a", "n": 1e-400}"#;
    set.send(post(TEXT, tiny))
        .await
        .is_error(400, "invalid_value", Some("n"));
    let mut request = post(TEXT, json!({"prompt": "a"}).to_string());
    let headers = request.headers_mut();
    headers.insert("x-slo-ttft-ms", "86400001".parse().unwrap());
    let answer = set.send(request).await;
    assert!(answer.body.contains("at most 86400000"), "{}", answer.body);
}

#[tokio::test]
async fn a_body_that_is_not_json_is_refused() {
    let set = server("llama3");
    for (body, code) in [
        (&b"{\"prompt\": "[..], "invalid_json"),
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"\"x\"", "invalid_json"),
        (b"{\"prompt\": 1e999}", "invalid_json"),
        (b"{\"prompt\": \"\xff\xfe\"}", "invalid_utf8"),
        (b"{\"prompt\": \"\\ud800\"}", "invalid_json"),
    ] {
        for path in [TEXT, CHAT, "/tokenize", "/detokenize"] {
            set.send(post(path, body.to_vec()))
                .await
                .is_error(400, code, None);
        }
    }
    let deep = "[".repeat(100_000);
    set.send(post(TEXT, deep))
        .await
        .is_error(400, "invalid_json", None);
    let form = Request::post(TEXT).header("content-type", "application/x-www-form-urlencoded");
    let form = form.body(Body::from("prompt=a")).unwrap();
    set.send(form)
        .await
        .is_error(415, "unsupported_media_type", None);
}

#[tokio::test]
async fn a_body_above_the_limit_is_refused() {
    let set = server("llama3");
    let body = json!({"prompt": "x".repeat(10_000_000)}).to_string();
    set.send(post(TEXT, body.clone()))
        .await
        .is_error(413, "body_too_large", None);
    // The same without an announced length.
    let chunks = body
        .into_bytes()
        .chunks(65_536)
        .map(<[u8]>::to_vec)
        .collect::<Vec<_>>();
    let chunks = futures::stream::iter(chunks.into_iter().map(Ok::<_, std::convert::Infallible>));
    set.send(post(TEXT, Body::from_stream(chunks)))
        .await
        .is_error(413, "body_too_large", None);
    let small = server_with(
        files("llama3"),
        ApiOptions {
            body_bytes_max: 10,
            ..options()
        },
    );
    small
        .post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(413, "body_too_large", None);
}

#[tokio::test]
async fn unknown_models_and_routes_are_named() {
    let set = server("llama3");
    let answer = set
        .post(TEXT, json!({"model": "gpt-9", "prompt": "a"}))
        .await;
    answer.is_error(404, "model_not_found", Some("model"));
    assert!(answer.body.contains("gpt-9") && answer.body.contains("llama3"));
    set.get("/v1/models/gpt-9")
        .await
        .is_error(404, "model_not_found", Some("model"));
    set.get("/v1/models/%ff")
        .await
        .is_error(400, "invalid_value", Some("model"));
    for path in ["/v1/nothing", "/%ff", "/ui/%ff"] {
        set.get(path).await.is_error(404, "unknown_url", None);
    }
    let root = set.get("/").await;
    root.is_error(404, "unknown_url", None);
    assert!(root.body.contains("/ui"), "{}", root.body);
    for (path, meant) in [
        ("/chat/completions", "Is POST /v1/chat/completions meant?"),
        ("/v1/v1/completions", "Is POST /v1/completions meant?"),
        ("/models", "Is GET /v1/models meant?"),
        ("/api/generate", "Is POST /v1/completions meant?"),
        ("/v1/v1/chat/completions", "of OpenAI ends in /v1."),
        ("/v1/v1/messages", "Is POST /v1/messages meant?"),
        ("/v1/v1/messages", "of Anthropic's clients has no /v1,"),
        (
            "/v1/v1/messages/count_tokens",
            "of Anthropic's clients has no /v1,",
        ),
    ] {
        for answer in [set.get(path).await, set.post(path, json!({})).await] {
            answer.is_error(404, "unknown_url", None);
            assert!(answer.body.contains(meant), "{}", answer.body);
        }
    }
    let answer = set.get(CHAT).await;
    answer.is_error(405, "method_not_allowed", None);
    assert_eq!(answer.header("allow"), "POST");
    assert!(answer.body.contains("send POST."), "{}", answer.body);
    let answer = set.post("/health", json!({})).await;
    answer.is_error(405, "method_not_allowed", None);
    assert!(answer.header("allow").contains("GET"));
}

#[tokio::test]
async fn chat_without_a_template_is_refused() {
    let mut files = files("llama3-new");
    files.chat_template = None;
    let set = server_with(files, options());
    let body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let answer = set.post(CHAT, body).await;
    answer.is_error(400, "no_chat_template", None);
    assert!(answer.body.contains("/v1/completions"));
}

#[tokio::test]
async fn invalid_slo_headers_are_refused() {
    let set = server("llama3");
    let with = |name: &str, value: &str| {
        let mut request = post(TEXT, json!({"prompt": "a"}).to_string());
        request.headers_mut().insert(
            axum::http::HeaderName::from_bytes(name.as_bytes()).unwrap(),
            axum::http::HeaderValue::from_bytes(value.as_bytes()).unwrap(),
        );
        request
    };
    for (name, value) in [
        ("x-slo-ttft-ms", "soon"),
        ("x-slo-ttft-ms", "0"),
        ("x-slo-tpot-ms", "-5"),
        ("x-slo-tpot-ms", "NaN"),
        ("x-slo-tpot-ms", "inf"),
        ("x-llm-d-slo-ttft-ms", ""),
        ("x-slo-class", ""),
        ("x-slo-class", "ü"),
    ] {
        set.send(with(name, value))
            .await
            .is_error(400, "invalid_value", Some(name));
    }
    for (name, value) in [("x-slo-ttft-ms", "200"), ("x-llm-d-slo-ttft-ms", "200.0")] {
        set.script_text("x");
        assert_eq!(set.send(with(name, value)).await.status, 200);
        assert_eq!(
            set.last_submitted().slo.ttft,
            Some(std::time::Duration::from_millis(200))
        );
    }
    // Without a policy there is one class.
    set.script_text("x");
    set.send(with("x-slo-class", "default")).await;
    assert_eq!(set.last_submitted().slo.class, "default");
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-5i64..200).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let key = prop_oneof![
            "[a-z]{1,6}",
            "[0-9]{1,4}",
            Just("role".to_owned()),
            Just("type".to_owned())
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(key, inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

/// Names of all fields of bodies, and of one that is refused.
fn field_names() -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let document = runtime.unwrap().block_on(async {
        let document = server("qwen3").get("/openapi.json").await;
        document.json()
    });
    let mut names = vec!["suffix".to_owned()];
    for (_, form) in request_forms(&document) {
        names.extend(form["properties"].as_object().unwrap().keys().cloned());
    }
    names.sort();
    names.dedup();
    names
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn random_values_never_give_a_server_error(
        fields in prop::collection::vec((prop::sample::select(field_names()), any_json()), 1..4),
        path in prop::sample::select(&[CHAT, TEXT, "/tokenize", "/detokenize"][..]),
    ) {
        thread_local! {
            static SET: TestServer = server("qwen3");
        }
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "tokens": [1]});
        if path == TEXT || path == "/tokenize" {
            body["messages"] = Value::Null;
        }
        for (field, value) in fields {
            body[&field] = value;
        }
        SET.with(|set| {
            let scripts_count = set.frontend.scripts.lock().unwrap().len();
            for _ in scripts_count..1100 {
                set.script_default();
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let answer = runtime.block_on(set.post(path, body.clone()));
            prop_assert!(answer.status.as_u16() < 500, "{body}: {}", answer.body);
            if answer.status != 200 {
                prop_assert!(answer.json()["error"]["message"].is_string());
            }
            Ok(())
        })?;
    }
}

#[tokio::test]
async fn tokens_beyond_the_vocabulary_are_refused() {
    let mut files = files("qwen3");
    let config = files
        .config
        .replace("\"vocab_size\": ", "\"vocab_size\": 409, \"was\": ");
    assert_ne!(config, files.config);
    files.config = config;
    files.generation_config = Some(r#"{"eos_token_id": [5, 1000000000]}"#.into());
    let set = server_with(files, options());
    assert!(
        set.text.eos().iter().all(|id| *id < 409),
        "{:?}",
        set.text.eos()
    );
    for (fields, param) in [
        (json!({"prompt": "a <tool_call> b"}), "prompt"),
        (json!({"prompt": ["a", "<tool_call>"]}), "prompt"),
        (json!({"prompt": [5, 409]}), "prompt[1]"),
        (json!({"prompt": [4294967301u64]}), "prompt[0]"),
        (json!({"prompt": [-5]}), "prompt[0]"),
        (json!({"prompt": [5, 18446744073709551615u64]}), "prompt[1]"),
        (json!({"prompt": [[5], [5, 4294967296u64]]}), "prompt[1][1]"),
        (
            json!({"prompt": "a", "logit_bias": {"409": 1}}),
            "logit_bias.409",
        ),
        (
            json!({"prompt": "a", "stop_token_ids": [409]}),
            "stop_token_ids[0]",
        ),
    ] {
        let answer = set.post(TEXT, fields).await;
        answer.is_error(400, "invalid_value", Some(param));
        assert!(
            answer.body.contains("409") || answer.body.contains("408"),
            "{}",
            answer.body
        );
    }
    let answer = set
        .post("/tokenize", json!({"prompt": "<tool_call>"}))
        .await;
    answer.is_error(400, "invalid_value", Some("prompt"));
    assert!(answer.body.contains("<tool_call>"), "{}", answer.body);
    let messages = json!([{"role": "user", "content": "say <tool_call>"}]);
    set.post(CHAT, json!({"messages": messages}))
        .await
        .is_error(400, "invalid_value", Some("messages"));
    assert!(set.frontend.submitted.lock().unwrap().is_empty());
    set.script_text("x");
    assert_eq!(set.post(TEXT, json!({"prompt": "a"})).await.status, 200);
}

#[tokio::test]
async fn model_configs_with_absurd_sizes_are_refused() {
    for (field, value, range) in [
        ("vocab_size", "0", "from 1 to"),
        ("vocab_size", "-1", "from 1 to"),
        ("vocab_size", "1e18", "from 1 to"),
        (
            "max_position_embeddings",
            "1000000000000000000",
            "from 1 to",
        ),
        ("max_position_embeddings", "0", "from 1 to"),
    ] {
        let mut files = files("qwen3");
        let mut config: serde_json::Map<String, Value> =
            serde_json::from_str(&files.config).unwrap();
        config.insert(field.into(), serde_json::from_str(value).unwrap());
        files.config = Value::Object(config).to_string();
        let error = cleave_text::ModelText::new(files)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(field) && error.contains(range), "{error}");
    }
}

#[tokio::test]
async fn a_hostile_template_fails_only_its_own_requests() {
    let mut files = files("qwen3");
    files.chat_template = Some(
        "{% set ns = namespace(x='ab') %}{% if messages|length > 1 %}\
         {% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{% endif %}{{ ns.x }}"
            .into(),
    );
    let set = server_with(files, options());
    let message = json!({"role": "user", "content": "Hi"});
    let answer = set
        .post(CHAT, json!({"messages": [message, message]}))
        .await;
    answer.is_error(400, "invalid_value", Some("messages"));
    assert!(answer.body.contains("needs more than"), "{}", answer.body);
    set.script_text("x");
    assert_eq!(
        set.post(CHAT, json!({"messages": [message]})).await.status,
        200
    );
}
