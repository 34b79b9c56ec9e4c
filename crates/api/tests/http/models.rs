//! Several models behind one server: each request is for one of them.

use crate::scripted_server::{HttpAnswer, TestServer, files, options, server, server_with};
use cleave_api::{ApiOptions, ServingReadiness};
use cleave_domain::{ModelPolicy, SloPolicy};
use cleave_text::{EmbedTask, ModelTask, ModelText};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A server of the checkpoints `llama3` and `qwen2`, and of `qwen3` for vectors.
fn models_server() -> TestServer {
    let set = server("llama3");
    set.app.serve_model(ModelText::new(files("qwen2")).unwrap());
    let mut vectors = files("qwen3");
    vectors.task = ModelTask::Embed(EmbedTask::of(cleave_domain::Pooling::Mean));
    set.app.serve_model(ModelText::new(vectors).unwrap());
    set
}

/// The served name with which the last sequence was submitted.
fn submitted_to(set: &TestServer) -> String {
    let models = set.frontend.models.lock().unwrap();
    models.last().cloned().unwrap_or_default()
}

/// A body for each route that is for a model, without the model.
fn bodies() -> Vec<(&'static str, Value)> {
    let chat = json!([{"role": "user", "content": "a"}]);
    vec![
        (TEXT, json!({"prompt": "a", "max_tokens": 1})),
        (CHAT, json!({"messages": chat, "max_tokens": 1})),
        ("/v1/responses", json!({"input": "a", "store": false})),
        ("/v1/responses/input_tokens", json!({"input": "a"})),
        ("/v1/messages", json!({"messages": chat, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": chat})),
        ("/v1/embeddings", json!({"input": "a"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
        ("/v1/score", json!({"text_1": "a", "text_2": "b"})),
        ("/tokenize", json!({"prompt": "a"})),
        ("/detokenize", json!({"tokens": [1]})),
    ]
}

async fn ask(set: &TestServer, route: &str, body: &Value, model: &str) -> HttpAnswer {
    let mut body = body.clone();
    body["model"] = model.into();
    set.post(route, body).await
}

#[tokio::test]
async fn a_request_is_served_by_the_model_it_names() {
    let set = models_server();
    for model in ["qwen2", "llama3", "qwen2"] {
        set.script_default();
        let body = json!({"prompt": "a", "max_tokens": 1});
        let answer = ask(&set, TEXT, &body, model).await;
        assert_eq!(answer.json()["model"], model, "{}", answer.body);
        assert_eq!(submitted_to(&set), model);
    }
    // Each has its own tokenizer.
    let text = "Hello, world!";
    let mut counts = Vec::new();
    for model in ["llama3", "qwen2", "qwen3"] {
        let tokens = ask(&set, "/tokenize", &json!({"prompt": text}), model).await;
        let expected = ModelText::new(files(model)).unwrap();
        let expected = expected.tokenizer();
        let expected = expected
            .encode(text, cleave_text::SpecialTokens::Kept)
            .unwrap();
        assert_eq!(tokens.json()["tokens"], json!(expected), "{model}");
        counts.push(tokens.json()["max_model_len"].clone());
    }
    assert_eq!(counts.len(), 3);
    // A model is served for its own task only.
    let vectors = ask(&set, "/v1/embeddings", &json!({"input": "a"}), "llama3").await;
    vectors.is_error(400, "unsupported_parameter", Some("model"));
    let text = ask(&set, TEXT, &json!({"prompt": "a"}), "qwen3").await;
    text.is_error(400, "unsupported_parameter", Some("model"));
}

#[tokio::test]
async fn an_unknown_model_is_not_found_in_each_api() {
    let set = models_server();
    for (route, body) in bodies() {
        let answer = ask(&set, route, &body, "gpt-9").await;
        assert_eq!(answer.status, 404, "{route}: {}", answer.body);
        for name in ["gpt-9", "llama3", "qwen2", "qwen3"] {
            assert!(answer.body.contains(name), "{route}: {}", answer.body);
        }
        if route.starts_with("/v1/messages") {
            assert_eq!(answer.json()["error"]["type"], "not_found_error", "{route}");
        } else {
            answer.is_error(404, "model_not_found", Some("model"));
        }
    }
    assert!(set.frontend.submitted.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_request_must_name_one_of_several_models() {
    let set = models_server();
    for (route, body) in bodies() {
        let answer = set.post(route, body).await;
        assert_eq!(answer.status, 400, "{route}: {}", answer.body);
        assert!(answer.body.contains("`qwen2`"), "{route}: {}", answer.body);
    }
    set.post(TEXT, json!({"model": 7, "prompt": "a"}))
        .await
        .is_error(400, "invalid_value", Some("model"));
    let broken = crate::scripted_server::post(TEXT, "{\"model\": \"qwen2\"");
    set.send(broken).await.is_error(400, "invalid_json", None);
    // One model needs no name.
    let one = server("qwen2");
    one.script_default();
    let answer = one.post(TEXT, json!({"prompt": "a"})).await;
    assert_eq!(
        (answer.status.as_u16(), submitted_to(&one).as_str()),
        (200, "qwen2")
    );
}

#[tokio::test]
async fn all_models_are_listed_with_their_limits() {
    let set = models_server();
    let list = set.get("/v1/models").await.json();
    let listed: Vec<_> = list["data"].as_array().unwrap().iter().collect();
    let names: Vec<&Value> = listed.iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["llama3", "qwen2", "qwen3"]);
    for model in listed {
        let name = model["id"].as_str().unwrap();
        let context = ModelText::new(files(name)).unwrap().context_tokens_max();
        assert_eq!(model["max_model_len"], context, "{name}");
        let task = if name == "qwen3" { "embed" } else { "generate" };
        assert_eq!(model["task"], task);
        let one = set.get(&format!("/v1/models/{name}")).await.json();
        assert_eq!(one, *model);
    }
}

#[tokio::test]
async fn a_model_without_workers_is_unavailable_and_known() {
    let set = models_server();
    set.frontend.away.lock().unwrap().insert("qwen2".into());
    let answer = ask(&set, TEXT, &json!({"prompt": "a"}), "qwen2").await;
    answer.is_error(503, "no_worker", None);
    assert_eq!(answer.header("retry-after"), "1");
    let ready = set.get("/ready").await;
    let states = json!({"llama3": true, "qwen2": false, "qwen3": true});
    assert_eq!(
        (ready.status.as_u16(), &ready.json()["models"]),
        (200, &states)
    );
    set.script_default();
    let other = ask(&set, TEXT, &json!({"prompt": "a"}), "llama3").await;
    assert_eq!(other.status, 200);
    for model in ["llama3", "qwen3"] {
        set.frontend.away.lock().unwrap().insert(model.into());
    }
    set.get("/ready").await.is_error(503, "not_ready", None);
    set.app.retire_model("qwen2");
    let answer = ask(&set, TEXT, &json!({"prompt": "a"}), "qwen2").await;
    answer.is_error(404, "model_not_found", Some("model"));
}

#[tokio::test(start_paused = true)]
async fn a_model_may_come_in_the_grace_period() {
    let set = server_with(files("llama3"), {
        ApiOptions {
            startup_grace: Duration::from_secs(10),
            ..options()
        }
    });
    set.script_default();
    let arrives = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        set.app.serve_model(ModelText::new(files("qwen2")).unwrap());
    };
    let body = json!({"prompt": "a", "max_tokens": 1});
    let (answer, ()) = futures::join!(ask(&set, TEXT, &body, "qwen2"), arrives);
    assert_eq!(
        (answer.status.as_u16(), submitted_to(&set).as_str()),
        (200, "qwen2")
    );
    let begun = tokio::time::Instant::now();
    let answer = ask(&set, TEXT, &body, "gpt-9").await;
    answer.is_error(404, "model_not_found", Some("model"));
    assert_eq!(begun.elapsed(), Duration::from_secs(7));
    let begun = tokio::time::Instant::now();
    let answer = ask(&set, TEXT, &body, "gpt-9").await;
    answer.is_error(404, "model_not_found", Some("model"));
    assert_eq!(begun.elapsed(), Duration::ZERO, "the period is over");
}

#[tokio::test]
async fn a_listed_model_without_its_first_worker_is_unavailable() {
    let set = server("llama3");
    let listed = ModelPolicy {
        name: "later".to_owned(),
        aliases: vec!["soon".to_owned()],
        scaling: None,
    };
    *set.frontend.policy.lock().unwrap() = Arc::new(SloPolicy {
        models: vec![listed],
        ..SloPolicy::default()
    });
    let body = json!({"prompt": "a"});
    for name in ["later", "soon"] {
        let answer = ask(&set, TEXT, &body, name).await;
        answer.is_error(503, "no_worker", None);
    }
    let one = set.get("/v1/models/later").await;
    one.is_error(503, "no_worker", None);
    let unnamed = set.post(TEXT, body.clone()).await;
    unnamed.is_error(400, "invalid_value", Some("model"));
    let answer = ask(&set, TEXT, &body, "gpt-9").await;
    answer.is_error(404, "model_not_found", Some("model"));
}

#[tokio::test]
async fn a_stored_response_goes_on_with_another_model() {
    let set = models_server();
    set.script_stop("First.");
    let body = json!({"input": "Hi"});
    let first = ask(&set, "/v1/responses", &body, "llama3").await.json();
    set.script_text("Second.");
    let body = json!({"input": "Go on", "previous_response_id": first["id"]});
    let second = ask(&set, "/v1/responses", &body, "qwen2").await.json();
    assert_eq!(second["model"], "qwen2", "{second}");
    let prompt = set.last_submitted().prompt;
    let tokenizer = ModelText::new(files("qwen2")).unwrap();
    let text = tokenizer
        .tokenizer()
        .decode(&prompt, cleave_text::SpecialTokens::Kept);
    assert!(text.contains("First.") && text.contains("Go on"), "{text}");
}

#[tokio::test]
async fn readiness_of_one_model_does_not_hide_a_drain() {
    let set = models_server();
    set.app.start_draining();
    set.get("/ready").await.is_error(503, "draining", None);
    *set.frontend.readiness.lock().unwrap() = Some(ServingReadiness::Draining);
    let answer = ask(&set, TEXT, &json!({"prompt": "a"}), "qwen2").await;
    answer.is_error(503, "draining", None);
}

/// The names of a list of models, with each one's root.
fn listed(answer: &Value) -> Vec<(String, String)> {
    let data = answer["data"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    data.map(|it| (text(&it["id"]), text(&it["root"])))
        .collect()
}

#[tokio::test]
async fn an_alias_of_the_policy_names_its_model_in_each_api() {
    let set = models_server();
    let aliases = [("llama3", "gpt-9"), ("qwen3", "embedder")].map(|(name, alias)| ModelPolicy {
        name: name.to_owned(),
        aliases: vec![alias.to_owned()],
        scaling: None,
    });
    *set.frontend.policy.lock().unwrap() = Arc::new(SloPolicy {
        models: aliases.to_vec(),
        ..SloPolicy::default()
    });
    for (route, body) in bodies() {
        let alias = match route {
            "/v1/rerank" | "/v1/score" => continue,
            "/v1/embeddings" => "embedder",
            _ => "gpt-9",
        };
        match route {
            "/v1/embeddings" => set.script_vector(&[1.0, 0.0]),
            TEXT | CHAT | "/v1/responses" | "/v1/messages" => set.script_default(),
            _ => {}
        }
        let answer = ask(&set, route, &body, alias).await;
        assert_eq!(answer.status, 200, "{route}: {}", answer.body);
        if let Some(named) = answer.json().get("model") {
            assert_eq!(named, alias, "{route}");
        }
    }
    assert_eq!(submitted_to(&set), "qwen3", "the pool of the model itself");
    let models = listed(&set.get("/v1/models").await.json());
    for (name, alias) in [("llama3", "gpt-9"), ("qwen3", "embedder")] {
        assert!(
            models.contains(&(alias.to_owned(), name.to_owned())),
            "{models:?}"
        );
    }
    let one = set.get("/v1/models/gpt-9").await.json();
    assert_eq!(
        (&one["id"], &one["root"]),
        (&json!("gpt-9"), &json!("llama3"))
    );
    let answer = ask(&set, TEXT, &json!({"prompt": "a"}), "gpt-8").await;
    answer.is_error(404, "model_not_found", Some("model"));
    assert!(answer.body.contains("`gpt-9`"), "{}", answer.body);
}

#[tokio::test]
async fn further_names_of_a_server_are_its_models() {
    let set = server_with(files("llama3"), {
        ApiOptions {
            aliases: vec!["gpt-9".to_owned()],
            ..options()
        }
    });
    let body = json!({"prompt": "a", "max_tokens": 1});
    for name in ["gpt-9", "llama3"] {
        set.script_default();
        let answer = ask(&set, TEXT, &body, name).await;
        assert_eq!(answer.json()["model"], name, "{}", answer.body);
        assert_eq!(submitted_to(&set), "llama3");
    }
    let models = listed(&set.get("/v1/models").await.json());
    assert_eq!(models.len(), 2);
    let answer = ask(&set, TEXT, &body, "gpt-8").await;
    answer.is_error(404, "model_not_found", Some("model"));
    // Of several models none has the further name.
    set.app.serve_model(ModelText::new(files("qwen2")).unwrap());
    let answer = ask(&set, TEXT, &body, "gpt-9").await;
    answer.is_error(404, "model_not_found", Some("model"));
}
