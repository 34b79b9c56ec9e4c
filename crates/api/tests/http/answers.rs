//! Answers to valid requests.

use crate::scripted_server::{done, files, next_chunk, options, plain, server, server_with};
use cleave_domain::FinishReason;
use http_body_util::BodyExt;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn hello() -> Value {
    json!([{"role": "user", "content": "Hello!"}])
}

#[tokio::test]
async fn a_chat_answer_has_the_openai_shape() {
    let set = server("qwen3");
    let mut tokens = set.tokens("Grüße, 世界 🙂");
    let end = set.text.eos()[0];
    tokens.push(end);
    let count = tokens.len();
    set.script_tokens(tokens, done(FinishReason::Stop));
    let answer = set
        .post(CHAT, json!({"model": "qwen3", "messages": hello()}))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let body = answer.json();
    assert_eq!(body["object"], "chat.completion");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["model"], "qwen3");
    let choice = &body["choices"][0];
    assert_eq!(
        choice["message"],
        json!({"role": "assistant", "content": "Grüße, 世界 🙂", "refusal": null})
    );
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["stop_reason"], Value::Null);
    assert_eq!(choice["logprobs"], Value::Null);
    // The prompt is the golden one: "Hello!" has 21 tokens.
    assert_eq!(
        body["usage"],
        json!({
            "prompt_tokens": 21, "completion_tokens": count, "total_tokens": 21 + count,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        })
    );
    let submitted = set.last_submitted();
    assert_eq!(
        submitted.stop.max_tokens,
        set.text.context_tokens_max() - 21
    );
    assert_eq!(&submitted.stop.stop_tokens, set.text.eos());
}

#[tokio::test]
async fn stream_chunks_add_up_to_the_whole_answer() {
    let set = server("llama3");
    set.script_text("naïve 🙂 text");
    let body =
        json!({"messages": hello(), "stream": true, "stream_options": {"include_usage": true}});
    let answer = set.post(CHAT, body).await;
    assert_eq!(answer.header("cache-control"), "no-cache");
    assert_eq!(answer.header("x-accel-buffering"), "no");
    let events = answer.events();
    assert_eq!(
        events[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    assert!(
        events
            .iter()
            .all(|e| e == "[DONE]" || e["object"] == "chat.completion.chunk")
    );
    assert_eq!(answer.streamed(0), "naïve 🙂 text");
    assert!(!answer.body.contains('\u{FFFD}'));
    let [.., finish, usage, over] = events.as_slice() else {
        panic!("{events:?}")
    };
    assert_eq!(finish["choices"][0]["finish_reason"], "length");
    assert_eq!(finish["choices"][0]["delta"], json!({}));
    assert_eq!(finish["usage"], Value::Null);
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(over, "[DONE]");
}

#[tokio::test]
async fn usage_is_streamed_only_on_request() {
    let set = server("llama3");
    set.script_text("one two");
    let answer = set
        .post(CHAT, json!({"messages": hello(), "stream": true}))
        .await;
    assert!(!answer.body.contains("usage"));
    set.script_text("one two");
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = json!({"prompt": "a", "stream": true, "stream_options": options});
    let events = set.post(TEXT, body).await.events();
    assert_eq!(events[0]["usage"]["completion_tokens"], 1);
    assert_eq!(events[1]["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn choices_are_ordered_by_prompt_and_choice() {
    let set = server("mistral");
    for text in ["a0", "a1", "b0", "b1"] {
        set.script_text(text);
    }
    let body = json!({"prompt": ["first", "second one"], "n": 2, "seed": -7});
    let answer = set.post(TEXT, body).await.json();
    let texts: Vec<_> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["text"].as_str().unwrap().trim())
        .collect();
    assert_eq!(texts, ["a0", "a1", "b0", "b1"]);
    assert_eq!(answer["choices"][3]["index"], 3);
    let submitted = set.frontend.submitted.lock().unwrap().clone();
    let prompts: u64 = submitted[0].prompt.len() as u64 + submitted[2].prompt.len() as u64;
    assert_eq!(answer["usage"]["prompt_tokens"], prompts);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 6);
    // The first choice has the client's seed, the second another one, the same for every prompt.
    assert_eq!(submitted[0].sampling.seed, -7i64 as u64);
    assert_ne!(submitted[1].sampling.seed, submitted[0].sampling.seed);
    assert_eq!(submitted[2].sampling.seed, submitted[0].sampling.seed);
    assert_eq!(submitted[3].sampling.seed, submitted[1].sampling.seed);
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_flight() {
    let set = server("llama3");
    let sender = set.script_live();
    for (index, token) in set.tokens("keep this END drop").into_iter().enumerate() {
        sender.unbounded_send(plain(index as u32, token)).unwrap();
    }
    let body = json!({"prompt": "a", "stop": ["END", "nothing"], "max_tokens": 50, "stream": true});
    let answer = set.post(TEXT, body).await;
    assert_eq!(answer.streamed(0), "keep this ");
    let events = answer.events();
    let last = &events[events.len() - 2]["choices"][0];
    assert_eq!(
        (&last["finish_reason"], &last["stop_reason"]),
        (&json!("stop"), &json!("END"))
    );
    assert!(sender.is_closed(), "the flight goes on");
}

#[tokio::test]
async fn a_stopped_choice_is_cancelled_while_others_continue() {
    let set = server("llama3");
    let (stopped, other) = (set.script_live(), set.script_live());
    for (index, token) in set.tokens("x END").into_iter().enumerate() {
        stopped.unbounded_send(plain(index as u32, token)).unwrap();
    }
    let body = json!({"prompt": "a", "n": 2, "stop": "END", "stream": true});
    let mut body = set.stream(TEXT, body).await;
    let is_end = |chunk: &[u8]| String::from_utf8_lossy(chunk).contains("\"stop_reason\":\"END\"");
    while !is_end(&next_chunk(&mut body).await) {}
    other.unbounded_send(plain(0, 64)).unwrap();
    assert!(body.frame().await.unwrap().is_ok());
    assert!(stopped.is_closed() && !other.is_closed());
}

#[tokio::test]
async fn stop_strings_are_cut_or_included_on_request() {
    let set = server("llama3");
    set.script_text("keep END drop");
    let body = json!({"prompt": "a", "stop": "END", "include_stop_str_in_output": true});
    assert_eq!(set.completed_text(body).await, "keep END");
    // Text that might begin a stop string is sent at the end.
    set.script_text("keep EN");
    let body = json!({"prompt": "a", "stop": "END"});
    let answer = set.post(TEXT, body).await.json();
    assert_eq!(answer["choices"][0]["text"], "keep EN");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    // Stop strings do not apply before min_tokens.
    set.script_text("END and more");
    let body = json!({"prompt": "a", "stop": "END", "min_tokens": 6});
    assert_eq!(set.completed_text(body).await, "END and more");
}

#[tokio::test]
async fn a_stop_token_is_hidden_and_named_as_the_reason() {
    let set = server("llama3");
    let stop = set.tokens("!")[0];
    let body = json!({"prompt": "a", "stop_token_ids": [stop]});
    let mut tokens = set.tokens("so");
    tokens.push(stop);
    set.script_tokens(tokens.clone(), done(FinishReason::Stop));
    let choice = set.post(TEXT, body).await.json()["choices"][0].clone();
    assert_eq!(
        (&choice["text"], &choice["stop_reason"]),
        (&json!("so"), &json!(stop))
    );
    assert!(set.last_submitted().stop.stop_tokens.contains(&stop));
    set.script_tokens(tokens, done(FinishReason::Stop));
    let body = json!({"prompt": "a", "stop_token_ids": [stop], "include_stop_str_in_output": true, "ignore_eos": true});
    assert_eq!(set.completed_text(body).await, "so!");
    assert_eq!(set.last_submitted().stop.stop_tokens[..], [stop]);
}

#[tokio::test]
async fn an_echoed_prompt_is_followed_by_a_space() {
    let set = server("llama2");
    set.script_text("and on");
    let body = json!({"prompt": "On", "echo": true});
    assert_eq!(set.completed_text(body).await, "On and on");
}

#[tokio::test]
async fn chat_logprobs_have_the_openai_shape() {
    let set = server("llama3");
    set.script_text("é!");
    let body = json!({"messages": hello(), "logprobs": true, "top_logprobs": 2});
    let answer = set.post(CHAT, body).await.json();
    let content = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    // The character é is two tokens of one byte each.
    assert_eq!(content.len(), 3);
    assert_eq!(content[0]["bytes"], json!([0xC3]));
    assert_eq!(content[1]["bytes"], json!([0xA9]));
    assert_eq!(content[2]["token"], "!");
    assert_eq!(content[2]["logprob"], -1.0);
    let top = content[2]["top_logprobs"].as_array().unwrap();
    assert_eq!((top.len(), &top[1]["logprob"]), (2, &json!(-2.0)));
    set.script_text("é!");
    let body = json!({"messages": hello(), "logprobs": true, "stream": true});
    let events = set.post(CHAT, body).await.events();
    let scores = events
        .iter()
        .filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(scores.flatten().count(), 3, "scores of held text were lost");
}

#[tokio::test]
async fn completion_logprobs_are_parallel_lists() {
    let set = server("llama3");
    set.script_text("é!");
    let body = json!({"prompt": "ab c", "echo": true, "logprobs": 1, "add_special_tokens": false});
    let answer = set.post(TEXT, body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "ab cé!");
    let scores = &choice["logprobs"];
    let count = set.last_submitted().prompt.len();
    assert_eq!(set.last_submitted().sampling.prompt_logprobs, Some(1));
    assert_eq!(scores["tokens"].as_array().unwrap().len(), count + 3);
    assert_eq!(scores["token_logprobs"][0], Value::Null);
    assert_eq!(scores["top_logprobs"][0], Value::Null);
    assert_eq!(scores["token_logprobs"][1], -1.0);
    let offsets = scores["text_offset"].as_array().unwrap();
    assert_eq!(offsets[0], 0);
    assert_eq!(offsets[count..], [json!(4), json!(4), json!(5)]);
}

/// vLLM's form: a list with null for the first token, and objects by token id.
#[tokio::test]
async fn prompt_logprobs_are_by_token_id_as_in_vllm() {
    let set = server("llama3");
    for path in [TEXT, CHAT] {
        set.script_text("x");
        let mut body = json!({"prompt_logprobs": 2, "max_tokens": 4});
        if path == TEXT {
            body["prompt"] = json!([64, 65, 66]);
        } else {
            body["messages"] = hello();
        }
        let answer = set.post(path, body.clone()).await.json();
        assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
        let submitted = set.last_submitted();
        assert_eq!(submitted.sampling.prompt_logprobs, Some(2));
        let scores = if path == TEXT {
            assert_eq!(answer["choices"][0]["text"], "x", "no echo");
            &answer["choices"][0]["prompt_logprobs"]
        } else {
            &answer["prompt_logprobs"]
        };
        let scores = scores.as_array().unwrap();
        assert_eq!(scores.len(), submitted.prompt.len());
        assert_eq!(scores[0], Value::Null);
        let own = &scores[1][submitted.prompt[1].to_string()];
        assert_eq!((&own["logprob"], &own["rank"]), (&json!(-1.0), &json!(1)));
        assert!(own["decoded_token"].is_string());
        assert_eq!(scores[1].as_object().unwrap().len(), 2);
        body["stream"] = json!(true);
        let refused = set.post(path, body).await.json();
        assert_eq!(refused["error"]["param"], "prompt_logprobs");
    }
}

#[tokio::test]
async fn an_echo_and_prompt_logprobs_have_their_own_counts() {
    let set = server("llama3");
    set.script_text("x");
    let body = json!({"prompt": [64, 65], "echo": true, "logprobs": 1, "prompt_logprobs": 0});
    let answer = set.post(TEXT, body).await.json();
    assert_eq!(set.last_submitted().sampling.prompt_logprobs, Some(1));
    let choice = &answer["choices"][0];
    let top = choice["logprobs"]["top_logprobs"][1].as_object();
    assert_eq!(top.unwrap().len(), 1);
    let own = &choice["prompt_logprobs"][1]["65"];
    assert_eq!(
        (&own["logprob"], &own["rank"]),
        (&json!(-1.0), &Value::Null)
    );
}

#[tokio::test]
async fn scoring_a_prompt_gives_no_output() {
    let set = server("llama3");
    set.script_tokens(vec![5], done(FinishReason::Length));
    let body = json!({"prompt": [64, 65, 66], "echo": true, "logprobs": 0, "max_tokens": 0});
    let answer = set.post(TEXT, body).await.json();
    assert_eq!(answer["choices"][0]["text"], "abc");
    assert_eq!(
        answer["choices"][0]["logprobs"]["tokens"],
        json!(["a", "b", "c"])
    );
    assert_eq!(answer["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn sampling_defaults_are_those_of_generation_config() {
    let set = server("qwen3");
    set.script_text("x");
    set.post(CHAT, json!({"messages": hello()})).await;
    let sampling = set.last_submitted().sampling;
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.top_k),
        (0.7, 0.8, 20)
    );
    assert_eq!(sampling.repetition_penalty, 1.05);
    set.script_text("x");
    let body = json!({
        "messages": hello(), "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.25, "seed": 5,
        "repetition_penalty": 1, "presence_penalty": -1.5, "frequency_penalty": 2, "priority": -3,
        "logit_bias": {"7": -100, "3": 1.5}, "cache_salt": "tenant", "max_tokens": 9,
        "max_completion_tokens": 4, "min_tokens": 2, "user": "u", "store": true, "metadata": {"a": 1},
    });
    set.post(CHAT, body).await;
    let submitted = set.last_submitted();
    let sampling = submitted.sampling;
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.top_k),
        (0.0, 1.0, 0)
    );
    assert_eq!(
        (sampling.min_p, sampling.seed, submitted.priority),
        (0.25, 5, -3)
    );
    assert_eq!(
        (sampling.presence_penalty, sampling.frequency_penalty),
        (-1.5, 2.0)
    );
    assert_eq!(sampling.logit_bias, [(3, 1.5), (7, -100.0)]);
    assert_eq!(
        (submitted.stop.max_tokens, submitted.stop.min_tokens),
        (4, 2)
    );
    assert_ne!(submitted.cache_salt, 0);
}

#[tokio::test]
async fn a_tiny_top_p_stays_above_zero() {
    let set = server("llama3");
    set.script_text("x");
    set.post(CHAT, json!({"messages": hello(), "top_p": 1e-300}))
        .await;
    assert_eq!(set.last_submitted().sampling.top_p, f32::MIN_POSITIVE);
}

// Lesson: 21.
#[tokio::test]
async fn max_completion_tokens_overrides_max_tokens() {
    let set = server("llama3");
    for (body, tokens) in [
        (json!({"max_tokens": 3}), 3),
        (json!({"max_completion_tokens": 4}), 4),
        (json!({"max_tokens": 3, "max_completion_tokens": 4}), 4),
        (json!({"max_tokens": 5, "max_completion_tokens": null}), 5),
    ] {
        for (path, field, value) in [(CHAT, "messages", hello()), (TEXT, "prompt", json!("a"))] {
            set.script_text("x");
            let mut body = body.clone();
            body[field] = value;
            assert_eq!(set.post(path, body).await.status, 200);
            assert_eq!(set.last_submitted().stop.max_tokens, tokens);
        }
    }
}

#[tokio::test]
async fn chat_fields_shape_the_rendered_prompt() {
    let set = server("qwen3");
    let rendered = |body: Value| {
        let mut body = body;
        body["return_token_strs"] = json!(false);
        let set = &set;
        async move {
            let answer = set.post("/tokenize", body).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            let tokens = answer.json()["tokens"].clone();
            set.post("/detokenize", json!({"tokens": tokens}))
                .await
                .json()["prompt"]
                .as_str()
                .unwrap()
                .to_owned()
        }
    };
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let messages =
        json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]);
    assert_eq!(
        rendered(json!({"messages": messages})).await,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    );
    let messages =
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]);
    let body = json!({"messages": messages, "continue_final_message": true});
    assert!(rendered(body).await.ends_with("assistant\nWell, "));
    let body = json!({"messages": hello(), "add_generation_prompt": false});
    assert!(rendered(body).await.ends_with("Hello!<|im_end|>\n"));
    let kwargs = json!({"enable_thinking": false});
    let body = json!({"messages": hello(), "chat_template_kwargs": kwargs});
    assert!(rendered(body).await.contains("</think>"));
    let tools =
        json!([{"type": "function", "function": {"name": "zap", "parameters": {"b": 1, "a": 2}}}]);
    let with = rendered(json!({"messages": hello(), "tools": tools})).await;
    assert!(
        with.contains(r#"{"b": 1, "a": 2}"#),
        "keys keep their order: {with}"
    );
    let without =
        rendered(json!({"messages": hello(), "tools": tools, "tool_choice": "none"})).await;
    assert!(!without.contains("zap"));
    let call = json!({"id": "c", "type": "function", "function": {"name": "zap", "arguments": "{\"x\": 1}"}});
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"}]);
    let called = rendered(json!({"messages": messages})).await;
    assert!(
        called.contains(r#"{"x": 1}"#) && called.contains("done"),
        "{called}"
    );
}

#[tokio::test]
async fn special_tokens_are_shown_only_on_request() {
    let set = server("llama3");
    let mark = set
        .text
        .tokenizer()
        .encode("<|start_header_id|>", cleave_text::SpecialTokens::Skipped)
        .unwrap();
    for (skip, text) in [(true, "x"), (false, "<|start_header_id|>x")] {
        let tokens = [mark.clone(), set.tokens("x")].concat();
        set.script_tokens(tokens, done(FinishReason::Length));
        let body = json!({"prompt": "a", "skip_special_tokens": skip});
        assert_eq!(set.completed_text(body).await, text);
    }
}

#[tokio::test]
async fn an_empty_prompt_becomes_the_begin_token() {
    let set = server("llama3");
    set.script_text("x");
    assert_eq!(set.post(TEXT, json!({"prompt": ""})).await.status, 200);
    assert_eq!(set.last_submitted().prompt[..], [set.text.bos().unwrap()]);
    set.script_text("x");
    assert_eq!(
        set.post(TEXT, json!({"prompt": [[5, 6]]})).await.status,
        200
    );
    assert_eq!(set.last_submitted().prompt[..], [5, 6]);
}

#[tokio::test]
async fn a_long_prompt_is_tokenized_on_a_blocking_thread() {
    let mut files = files("llama3");
    files.config = files.config.replace("512", "100000");
    let set = server_with(files, options());
    let prompt = "word ".repeat(8000);
    set.script_text("x");
    assert_eq!(
        set.post(TEXT, json!({"prompt": prompt, "add_special_tokens": false}))
            .await
            .status,
        200
    );
    assert_eq!(set.last_submitted().prompt[..], set.tokens(&prompt)[..]);
}

#[tokio::test]
async fn tokens_are_streamed_as_they_arrive() {
    let set = server("llama3");
    let sender = set.script_live();
    let tokens = set.tokens("one two three");
    sender.unbounded_send(plain(0, tokens[0])).unwrap();
    let mut body = set
        .stream(TEXT, json!({"prompt": "a", "stream": true}))
        .await;
    let first = next_chunk(&mut body).await;
    assert!(first.starts_with(b"data: {"));
    sender.unbounded_send(plain(1, tokens[1])).unwrap();
    assert!(body.frame().await.unwrap().is_ok());
    assert!(!sender.is_closed());
    drop(body);
    assert!(sender.is_closed(), "a client that left did not cancel");
}

#[tokio::test]
async fn tools_without_a_known_format_add_a_warning() {
    // The template of this model tells no format of calls.
    let mut files = files("qwen3");
    files.chat_template = Some("{{ messages[0].content }}".to_owned());
    let set = server_with(files, options());
    let body = |more: serde_json::Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        });
        let all = body.as_object_mut().unwrap();
        all.extend(more.as_object().unwrap().clone());
        body
    };
    for choice in [json!({}), json!({"tool_choice": "auto"})] {
        set.script_text("x");
        let answer = set.post("/v1/chat/completions", body(choice)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.json()["warnings"][0]["param"], "tools");
    }
    set.script_text("x");
    let answer = set
        .post("/v1/chat/completions", body(json!({"stream": true})))
        .await;
    let warnings = answer
        .body
        .lines()
        .filter(|line| line.contains("\"warnings\""));
    let warnings: Vec<&str> = warnings.collect();
    assert_eq!(warnings.len(), 1, "{}", answer.body);
    assert!(
        warnings[0].contains("\"finish_reason\":\"length\""),
        "{}",
        warnings[0]
    );
    set.script_text("x");
    let answer = set
        .post("/v1/chat/completions", body(json!({"tool_choice": "none"})))
        .await;
    assert!(answer.json().get("warnings").is_none());
    let metrics = set.get("/metrics").await.body;
    let counted = "cleave_request_warnings_total{param=\"tools\"} 3";
    assert!(metrics.contains(counted), "{metrics}");
}
