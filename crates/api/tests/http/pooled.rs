//! Embeddings, rankings and scores.

use crate::scripted_server::{
    HttpAnswer, TestServer, done, ended, files, next_chunk, options, post, respond, send, server,
    server_with, vector_event,
};
use cleave_api::{ApiOptions, ServingReadiness};
use cleave_domain::{Ending, Failure, FinishReason, Pooling, Refusal, SloMetric};
use cleave_text::{EmbedTask, ModelTask, RerankTask, SpecialTokens};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::JoinHandle;

const EMBEDDINGS: &str = "/v1/embeddings";

fn served_for(task: ModelTask) -> TestServer {
    served_with(task, options())
}

fn served_with(task: ModelTask, options: ApiOptions) -> TestServer {
    let mut files = files("qwen3");
    files.task = task;
    server_with(files, options)
}

fn embedder() -> TestServer {
    served_for(embed_task())
}

fn embed_task() -> ModelTask {
    ModelTask::Embed(EmbedTask {
        prompts: vec![
            ("query".to_owned(), "Q: ".to_owned()),
            ("document".to_owned(), String::new()),
        ],
        ..EmbedTask::of(Pooling::LastToken)
    })
}

fn reranker() -> TestServer {
    // Letters are tokens of every tokenizer of the tests.
    served_for(ModelTask::Rerank(RerankTask {
        negative: "n".to_owned(),
        positive: "y".to_owned(),
    }))
}

fn prompts(server: &TestServer) -> Vec<Vec<u32>> {
    let submitted = server.frontend.submitted.lock().unwrap();
    submitted
        .iter()
        .map(|request| request.prompt.to_vec())
        .collect()
}

#[tokio::test]
async fn an_embedding_is_normalised_and_counts_its_prompt() {
    let set = embedder();
    set.script_vector(&[3.0, 4.0]);
    let body =
        json!({"model": "qwen3", "input": "a text", "user": "u", "encoding_format": "float"});
    let answer = set.post(EMBEDDINGS, body).await.json();
    let tokens = set.tokens("a text").len();
    let expected = json!({
        "object": "list",
        "model": "qwen3",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    });
    let numbers: Vec<f64> = answer["data"][0]["embedding"]
        .as_array()
        .unwrap()
        .iter()
        .map(|number| number.as_f64().unwrap())
        .collect();
    assert!((numbers[0] - 0.6).abs() < 1e-6 && (numbers[1] - 0.8).abs() < 1e-6);
    for key in ["object", "model", "usage"] {
        assert_eq!(answer[key], expected[key]);
    }
    let request = set.last_submitted();
    assert_eq!(request.pooling, Some(Pooling::LastToken));
    assert_eq!(request.stop.max_tokens, 1);
}

#[tokio::test]
async fn base64_and_dimensions_are_as_openai_clients_read_them() {
    let set = embedder();
    set.script_vector(&[0.0, -2.0, 7.0]);
    let body = json!({"input": "x", "encoding_format": "base64", "dimensions": 2});
    let answer = set.post(EMBEDDINGS, body).await.json();
    assert_eq!(answer["data"][0]["embedding"], "AAAAAAAAgL8=");
}

#[tokio::test]
async fn a_request_chooses_length_and_special_tokens() {
    let set = embedder();
    for (fields, first) in [
        (json!({"normalize": false}), 3.0),
        (json!({"normalize": true, "add_special_tokens": true}), 0.6),
    ] {
        set.script_vector(&[3.0, 4.0]);
        let mut body = json!({"input": "x"});
        let members = fields.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(members);
        let answer = set.post(EMBEDDINGS, body).await.json();
        let found = answer["data"][0]["embedding"][0].as_f64().unwrap();
        assert!((found - first).abs() < 1e-6, "{answer}");
    }
    // This tokenizer begins a text with a token of its own.
    let mut files = files("llama3");
    files.task = embed_task();
    let set = server_with(files, options());
    let encode = |special| set.text.tokenizer().encode("x", special).unwrap();
    let (kept, bare) = (encode(SpecialTokens::Kept), encode(SpecialTokens::Skipped));
    assert_ne!(kept, bare);
    for (adds, expected) in [(true, kept), (false, bare)] {
        set.script_vector(&[1.0, 0.0]);
        let body = json!({"input": "x", "add_special_tokens": adds});
        assert_eq!(set.post(EMBEDDINGS, body).await.status, 200);
        assert_eq!(set.last_submitted().prompt.to_vec(), expected);
    }
    for body in [
        json!({"text_1": "x", "text_2": "x", "add_special_tokens": false}),
        json!({"query": "x", "documents": ["x"], "add_special_tokens": false}),
    ] {
        let path = match body.get("query") {
            Some(_) => "/v1/rerank",
            None => "/v1/score",
        };
        set.script_vector(&[1.0, 0.0]);
        set.script_vector(&[1.0, 0.0]);
        assert_eq!(set.post(path, body.clone()).await.status, 200);
        let begins = set
            .text
            .tokenizer()
            .encode("", SpecialTokens::Kept)
            .unwrap();
        let submitted = prompts(&set);
        let pair = &submitted[submitted.len() - 2..];
        assert!(pair.iter().all(|tokens| !tokens.starts_with(&begins)));
        reranker().post(path, body).await.is_error(
            400,
            "unsupported_parameter",
            Some("add_special_tokens"),
        );
    }
    for field in ["normalize", "add_special_tokens"] {
        let mut body = json!({"input": "x"});
        body[field] = "no".into();
        assert_eq!(set.post(EMBEDDINGS, body).await.status, 400, "{field}");
    }
}

#[tokio::test]
async fn an_error_has_the_length_of_a_long_input() {
    let set = embedder();
    let context = set.text.context_tokens_max() as usize;
    let body = json!({"input": [vec![5; context]]});
    let answer = set.post(EMBEDDINGS, body).await;
    assert_eq!(answer.status, 400);
    let message = answer.json()["error"]["message"].to_string();
    let (has, most) = (format!("has {context} tokens"), context - 1);
    assert!(message.contains(&has), "{message}");
    assert!(message.contains(&format!("at most {most}")), "{message}");
}

#[tokio::test]
async fn a_side_of_a_pair_has_one_name() {
    let set = embedder();
    for (body, named) in [
        (
            json!({"text_1": "a", "queries": "b", "text_2": "c"}),
            "queries",
        ),
        (
            json!({"text_1": "a", "text_2": "c", "documents": ["d"]}),
            "documents",
        ),
    ] {
        let answer = set.post("/v1/score", body).await;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.json()["error"]["param"], named);
    }
}

/// Inputs that one request has in the router at a time.
const WINDOW: usize = 64;

/// Begins a request of this many inputs.
fn begin(set: &TestServer, inputs: usize) -> JoinHandle<HttpAnswer> {
    let body = json!({"input": vec!["x"; inputs], "normalize": false});
    tokio::spawn(send(set.router.clone(), post(EMBEDDINGS, body.to_string())))
}

fn submitted_count(set: &TestServer) -> usize {
    set.frontend.submitted.lock().unwrap().len()
}

/// The other tasks go on until `open` sequences are in the router.
async fn until_open(set: &TestServer, open: usize) {
    while set.open_count() != open {
        tokio::task::yield_now().await;
    }
}

/// The other tasks go on until each of them waits.
async fn until_all_wait() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// Lets the worker take sequences, 16 at a step, until every request has its answer.
async fn answers(set: &TestServer, requests: Vec<JoinHandle<HttpAnswer>>) -> Vec<HttpAnswer> {
    while !requests.iter().all(JoinHandle::is_finished) {
        set.frontend.steps.0.add_permits(16);
        tokio::task::yield_now().await;
    }
    let answers = futures::future::join_all(requests).await;
    answers.into_iter().map(Result::unwrap).collect()
}

#[tokio::test]
async fn a_request_has_a_window_of_inputs_in_the_router() {
    let set = embedder();
    let mut live: Vec<_> = (0..1024).map(|_| Some(set.script_live())).collect();
    let request = begin(&set, 1024);
    until_open(&set, WINDOW).await;
    // The last input of each window is the first with a vector.
    for window in (0..1024).step_by(WINDOW) {
        for index in (window..window + WINDOW).rev() {
            let sender = live[index].take().unwrap();
            sender
                .unbounded_send(vector_event(vec![index as f32]))
                .unwrap();
            sender
                .unbounded_send(ended(done(FinishReason::Length)))
                .unwrap();
            drop(sender);
            let next = window + WINDOW + (window + WINDOW - index);
            while submitted_count(&set) < next.min(1024) {
                tokio::task::yield_now().await;
            }
            assert_eq!(submitted_count(&set), next.min(1024));
        }
    }
    let answer = request.await.unwrap().json();
    let data = answer["data"].as_array().unwrap();
    assert_eq!(data.len(), 1024);
    for (index, entry) in data.iter().enumerate() {
        assert_eq!(entry["embedding"], json!([index as f32]));
    }
    let open_most = set.frontend.open_most.load(Ordering::Relaxed);
    assert_eq!(open_most as usize, WINDOW);
}

#[tokio::test]
async fn requests_for_vectors_never_fill_the_queue() {
    for (inputs, open_most) in [
        ([&[1024][..], &[64; 10]].concat(), 64 + 512),
        (vec![64; 24], 512),
        (vec![20; 100], 500),
        (vec![65; 30], 512),
        (vec![130; 12], 512),
    ] {
        let set = embedder();
        set.script_queued(inputs.iter().sum(), |_| vec![1.0]);
        let requests = inputs.iter().map(|&inputs| begin(&set, inputs)).collect();
        until_open(&set, open_most).await;
        for answer in answers(&set, requests).await {
            assert_eq!(answer.status, 200, "{answer:?}");
        }
        let most = set.frontend.open_most.load(Ordering::Relaxed) as usize;
        assert_eq!(most, open_most, "{inputs:?}");
    }
}

#[tokio::test]
async fn a_short_request_waits_for_no_long_one() {
    let set = embedder();
    set.script_queued(8 * 64, |_| vec![1.0]);
    let mut long: Vec<_> = (0..9).map(|_| begin(&set, 65)).collect();
    until_open(&set, 512).await;
    until_all_wait().await;
    assert_eq!(set.open_count(), 512, "the ninth waits");
    set.script_vector(&[1.0]);
    let short = set.post(EMBEDDINGS, json!({"input": "x"})).await;
    assert_eq!(short.status, 200);
    // A client that leaves gives its turn away.
    set.script_queued(8 * 65, |_| vec![1.0]);
    long.swap_remove(0).abort();
    for answer in answers(&set, long).await {
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}

#[tokio::test]
async fn a_turn_comes_in_time_or_the_request_is_refused() {
    let queue_wait_max = Duration::from_millis(1);
    let set = served_with(
        embed_task(),
        ApiOptions {
            queue_wait_max,
            ..options()
        },
    );
    set.script_queued(512, |_| vec![1.0]);
    let long: Vec<_> = (0..8).map(|_| begin(&set, 600)).collect();
    until_open(&set, 512).await;
    let refused = begin(&set, 65).await.unwrap();
    refused.is_error(429, "queue_full", None);
    assert_eq!(submitted_count(&set), 512, "nothing of it was started");
    long.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn an_input_that_fails_ends_the_rest_of_its_request() {
    let retry_after = Duration::from_secs(2);
    for (ending, status) in [
        (Ending::Refused(Refusal::QueueFull { retry_after }), 429),
        (Ending::Failed(Failure::Engine("broken".to_owned())), 500),
    ] {
        let set = embedder();
        set.script_queued(100, |_| vec![1.0]);
        set.script_tokens(Vec::new(), ending);
        set.script_queued(99, |_| vec![1.0]);
        let answer = answers(&set, vec![begin(&set, 200)]).await.remove(0);
        assert_eq!(answer.status, status, "{answer:?}");
        let submitted = submitted_count(&set);
        assert!((101..101 + WINDOW).contains(&submitted), "{submitted}");
        assert_eq!(set.open_count(), 0, "the others are cancelled");
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_window_and_the_rest() {
    let set = embedder();
    set.script_queued(200, |_| vec![1.0]);
    let request = begin(&set, 200);
    until_open(&set, WINDOW).await;
    set.frontend.steps.0.add_permits(10);
    while submitted_count(&set) < WINDOW + 10 {
        tokio::task::yield_now().await;
    }
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    assert_eq!(set.open_count(), 0);
    until_all_wait().await;
    assert_eq!(
        submitted_count(&set),
        WINDOW + 10,
        "nothing more was started"
    );
}

#[tokio::test]
async fn prompts_of_a_completion_start_at_once() {
    let set = server("qwen3");
    let live: Vec<_> = (0..100).map(|_| set.script_live()).collect();
    let body = json!({"prompt": vec!["x"; 100]});
    let request = post("/v1/completions", body.to_string());
    let request = tokio::spawn(send(set.router.clone(), request));
    until_open(&set, 100).await;
    drop(live);
    let broken = request.await.unwrap();
    broken.is_error(500, "stream_broken", None);
}

#[tokio::test]
async fn each_input_is_a_flight_in_its_place() {
    let set = embedder();
    for input in [
        json!("one"),
        json!(["one", "two"]),
        json!([5, 6, 7]),
        json!([[5, 6], [7]]),
    ] {
        let count = match &input {
            Value::Array(items) if !items[0].is_number() => items.len(),
            _ => 1,
        };
        for index in 0..count {
            set.script_vector(&[index as f32 + 1.0, 0.0]);
        }
        let answer = set.post(EMBEDDINGS, json!({"input": input})).await.json();
        let data = answer["data"].as_array().unwrap();
        assert_eq!(data.len(), count, "{answer}");
        for (index, entry) in data.iter().enumerate() {
            assert_eq!(entry["index"], index);
        }
    }
    let expected = [
        set.tokens("one"),
        set.tokens("one"),
        set.tokens("two"),
        vec![5, 6, 7],
        vec![5, 6],
        vec![7],
    ];
    assert_eq!(prompts(&set), expected);
}

#[tokio::test]
async fn a_prompt_of_the_model_stands_before_texts_alone() {
    let set = embedder();
    for input in [json!("cat"), json!([9, 10])] {
        set.script_vector(&[1.0]);
        let body = json!({"input": input, "prompt_name": "query"});
        assert_eq!(set.post(EMBEDDINGS, body).await.status, 200);
    }
    assert_eq!(prompts(&set), [set.tokens("Q: cat"), vec![9, 10]]);
    let body = json!({"input": "x", "prompt_name": "other"});
    set.post(EMBEDDINGS, body)
        .await
        .is_error(400, "invalid_value", Some("prompt_name"));
}

#[tokio::test]
async fn a_bad_input_refuses_all_and_names_its_place() {
    let set = embedder();
    for (input, param) in [
        (json!(["a", ""]), "input[1]"),
        (json!([]), "input"),
        (json!(["a", 5]), "input[1]"),
        (json!([[1], [1_000_000]]), "input[1][0]"),
        (json!({"text": "a"}), "input"),
        (Value::Null, "input"),
    ] {
        set.post(EMBEDDINGS, json!({"input": input}))
            .await
            .is_error(400, "invalid_value", Some(param));
    }
    let context = set.text.context_tokens_max() as usize;
    let long = vec![5; context];
    let body = json!({"input": [[5], long]});
    let answer = set.post(EMBEDDINGS, body).await;
    answer.is_error(400, "context_length_exceeded", Some("input[1]"));
    let many: Vec<&str> = vec!["a"; 1025];
    set.post(EMBEDDINGS, json!({"input": many})).await.is_error(
        400,
        "invalid_value",
        Some("input"),
    );
    for (field, value) in [
        ("dimensions", json!(0)),
        ("dimensions", json!(100_000)),
        ("encoding_format", json!("hex")),
    ] {
        set.post(EMBEDDINGS, json!({"input": "a", field: value}))
            .await
            .is_error(400, "invalid_value", Some(field));
    }
    assert!(prompts(&set).is_empty(), "nothing was started");
}

#[tokio::test]
async fn a_refused_flight_refuses_the_whole_request() {
    let set = embedder();
    set.script_vector(&[1.0]);
    let late = Refusal::Late {
        aim: SloMetric::Ttft,
        predicted: Duration::from_secs(3),
        retry_after: Duration::from_secs(2),
    };
    set.script_tokens(Vec::new(), Ending::Refused(late));
    let answer = set.post(EMBEDDINGS, json!({"input": ["a", "b"]})).await;
    assert_eq!(answer.status, 429, "{answer:?}");
}

#[tokio::test]
async fn vectors_need_no_worker_that_decodes() {
    let prompts_only = ServingReadiness::PromptsOnly("no decode worker".into());
    for (set, is_ready) in [
        (embedder(), true),
        (reranker(), true),
        (server("qwen3"), false),
    ] {
        *set.frontend.readiness.lock().unwrap() = Some(prompts_only.clone());
        let status = set.get("/ready").await.status;
        assert_eq!(status, if is_ready { 200 } else { 503 });
    }
    let set = embedder();
    *set.frontend.readiness.lock().unwrap() = Some(prompts_only.clone());
    set.script_vector(&[1.0]);
    assert_eq!(
        set.post(EMBEDDINGS, json!({"input": "a"})).await.status,
        200
    );
    let set = server("qwen3");
    *set.frontend.readiness.lock().unwrap() = Some(prompts_only);
    let answer = set.post("/v1/completions", json!({"prompt": "a"})).await;
    answer.is_error(503, "no_worker", None);
    assert!(answer.body.contains("no decode worker"), "{answer:?}");
}

#[tokio::test(start_paused = true)]
async fn vectors_have_a_memory_limit() {
    // A vector of this model has 64 numbers, so that there is room for eight.
    let options = ApiOptions {
        vector_memory_bytes: 8 * 64 * 4,
        ..options()
    };
    let set = served_with(embed_task(), options);
    let ask = |count: usize| json!({"input": vec!["a"; count]});
    let answer = set.post(EMBEDDINGS, ask(9)).await;
    answer.is_error(400, "too_many_vectors", None);
    assert!(answer.body.contains("--vector-memory"), "{answer:?}");
    let open: Vec<_> = (0..8).map(|_| set.script_live()).collect();
    // The first request has the memory for as long as its vectors are awaited.
    let (first, refused) = futures::join!(set.post(EMBEDDINGS, ask(8)), async {
        let refused = set.post(EMBEDDINGS, ask(1)).await;
        drop(open);
        refused
    });
    refused.is_error(429, "vectors_full", None);
    assert_eq!(first.status, 500, "its flights were cut off: {first:?}");
    set.script_vector(&[1.0]);
    assert_eq!(set.post(EMBEDDINGS, ask(1)).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_long_answer_keeps_its_memory_until_it_was_sent() {
    let options = ApiOptions {
        vector_memory_bytes: 1000 * 64 * 4,
        ..options()
    };
    let set = served_with(embed_task(), options);
    for _ in 0..1000 {
        set.script_vector(&[0.125; 64]);
    }
    let ask = |count: usize| json!({"input": vec!["a"; count]});
    let request = post(EMBEDDINGS, ask(1000).to_string());
    let mut body = respond(set.router.clone(), request).await.into_body();
    let part = next_chunk(&mut body).await;
    assert!(part.len() < 100_000, "it has several parts");
    let refused = set.post(EMBEDDINGS, ask(1)).await;
    refused.is_error(429, "vectors_full", None);
    let rest = body.collect().await.unwrap().to_bytes();
    assert!(rest.ends_with(b"]}"), "it ends");
    set.script_vector(&[1.0]);
    assert_eq!(set.post(EMBEDDINGS, ask(1)).await.status, 200);
}

#[tokio::test]
async fn numbers_have_no_digits_beyond_their_precision() {
    let set = embedder();
    set.script_vector(&[3.0, 4.0]);
    let answer = set.post(EMBEDDINGS, json!({"input": "a"})).await;
    assert!(answer.body.contains("[0.6,0.8]"), "{answer:?}");
}

#[tokio::test]
async fn a_flight_without_its_vector_is_an_error() {
    let set = embedder();
    set.script_tokens(vec![0], done(FinishReason::Length));
    let answer = set.post(EMBEDDINGS, json!({"input": "a"})).await;
    answer.is_error(500, "vector_missing", None);
}

#[tokio::test]
async fn a_model_serves_only_its_own_task() {
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    for set in [embedder(), reranker()] {
        for (path, body) in [
            ("/v1/chat/completions", chat.clone()),
            ("/v1/completions", json!({"prompt": "a"})),
            ("/v1/responses", json!({"input": "a"})),
        ] {
            let answer = set.post(path, body).await;
            assert_eq!(answer.status, 400, "{path}: {answer:?}");
            assert!(answer.body.contains("is served"), "{answer:?}");
        }
    }
    let pooled = [
        (EMBEDDINGS, json!({"input": "a"})),
        ("/v1/rerank", json!({"query": "q", "documents": ["d"]})),
        ("/v1/score", json!({"text_1": "q", "text_2": "d"})),
    ];
    let generator = server("qwen3");
    for (path, body) in &pooled {
        let answer = generator.post(path, body.clone()).await;
        assert_eq!(answer.status, 400, "{path}: {answer:?}");
        assert!(answer.body.contains("--runner pooling"), "{answer:?}");
    }
    let (path, body) = &pooled[0];
    reranker()
        .post(path, body.clone())
        .await
        .is_error(400, "unsupported_parameter", Some("model"));
    let tasks = [embedder(), reranker(), generator];
    for (set, task) in tasks.into_iter().zip(["embed", "rerank", "generate"]) {
        assert_eq!(set.get("/v1/models").await.json()["data"][0]["task"], task);
    }
}

#[tokio::test]
async fn a_reranker_sorts_documents_by_their_probability() {
    for path in ["/v1/rerank", "/rerank", "/v2/rerank"] {
        let set = reranker();
        for yes in [0.0, 2.0, 1.0] {
            set.script_vector(&[0.0, yes]);
        }
        let documents = json!(["a", {"text": "b"}, "c"]);
        let body = json!({"query": "q", "documents": documents, "top_n": 2});
        let answer = set.post(path, body).await.json();
        let results = answer["results"].as_array().unwrap();
        let order: Vec<&Value> = results.iter().map(|result| &result["index"]).collect();
        assert_eq!(order, [1, 2]);
        assert_eq!(results[0]["document"], json!({"text": "b"}));
        let score = results[0]["relevance_score"].as_f64().unwrap();
        assert!((score - 1.0 / (1.0 + (-2.0f64).exp())).abs() < 1e-9);
        let request = set.last_submitted();
        let tokens = [set.tokens("n"), set.tokens("y")].concat();
        assert_eq!(request.pooling, Some(Pooling::Logits(tokens.into())));
        let prompt = set
            .text
            .tokenizer()
            .decode(&request.prompt, cleave_text::SpecialTokens::Kept);
        assert!(prompt.contains("<Query>: q\n<Document>: c"), "{prompt}");
        assert!(prompt.ends_with("<think>\n\n</think>\n\n"), "{prompt}");
    }
}

#[tokio::test]
async fn a_rerankers_instruction_is_in_its_prompt() {
    let set = reranker();
    set.script_vector(&[0.0, 0.0]);
    let body = json!({"query": "q", "documents": ["d"], "instruction": "Find errors", "return_documents": false});
    let answer = set.post("/v1/rerank", body).await.json();
    assert_eq!(
        answer["results"][0],
        json!({"index": 0, "relevance_score": 0.5})
    );
    let prompt = &prompts(&set)[0];
    let prompt = set
        .text
        .tokenizer()
        .decode(prompt, cleave_text::SpecialTokens::Kept);
    assert!(prompt.contains("<Instruct>: Find errors\n"), "{prompt}");
    let body = json!({"query": "q", "documents": ["d"], "instruction": "x"});
    embedder().post("/v1/rerank", body).await.is_error(
        400,
        "unsupported_parameter",
        Some("instruction"),
    );
}

#[tokio::test]
async fn an_embedding_model_ranks_by_cosines() {
    let set = embedder();
    for vector in [[1.0, 0.0], [0.0, 3.0], [5.0, 0.0]] {
        set.script_vector(&vector);
    }
    let body = json!({"query": "q", "documents": ["a", "b"]});
    let answer = set.post("/v1/rerank", body).await.json();
    assert_eq!(answer["results"][0]["index"], 1);
    assert_eq!(answer["results"][0]["relevance_score"], 1.0);
    assert_eq!(answer["results"][1]["relevance_score"], 0.0);
    let expected = [set.tokens("Q: q"), set.tokens("a"), set.tokens("b")];
    assert_eq!(prompts(&set), expected);
}

#[tokio::test]
async fn scores_pair_one_text_or_as_many() {
    for (first, second, count) in [
        (json!("a"), json!("b"), 1),
        (json!("a"), json!(["b", "c"]), 2),
        (json!(["a", "b"]), json!(["c", "d"]), 2),
    ] {
        for (path, keys) in [
            ("/v1/score", ["text_1", "text_2"]),
            ("/score", ["queries", "documents"]),
        ] {
            let set = reranker();
            for _ in 0..count {
                set.script_vector(&[1.0, 1.0]);
            }
            let body = json!({keys[0]: first, keys[1]: second});
            let answer = set.post(path, body).await.json();
            let data = answer["data"].as_array().unwrap();
            assert_eq!(data.len(), count, "{answer}");
            let last = count - 1;
            assert_eq!(
                data[last],
                json!({"index": last, "object": "score", "score": 0.5})
            );
        }
    }
    let body = json!({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]});
    reranker()
        .post("/v1/score", body)
        .await
        .is_error(400, "invalid_value", Some("text_1"));
}

#[tokio::test]
async fn a_bad_text_of_a_pair_is_named_by_its_place() {
    for set in [embedder(), reranker()] {
        for (path, body, param) in [
            (
                "rerank",
                json!({"query": "q", "documents": ["a", ""]}),
                "documents[1]",
            ),
            (
                "rerank",
                json!({"query": "q", "documents": ["a", 5]}),
                "documents[1]",
            ),
            (
                "score",
                json!({"text_1": ["a", ""], "text_2": ["b", "c"]}),
                "text_1[1]",
            ),
            (
                "score",
                json!({"text_1": "a", "text_2": ["b", "c", 7]}),
                "text_2[2]",
            ),
        ] {
            let answer = set.post(&format!("/v1/{path}"), body).await;
            answer.is_error(400, "invalid_value", Some(param));
        }
        let long = "a b ".repeat(set.text.context_tokens_max() as usize);
        let body = json!({"text_1": "a", "text_2": ["b", long]});
        let answer = set.post("/v1/score", body).await;
        answer.is_error(400, "context_length_exceeded", Some("text_2[1]"));
        assert!(prompts(&set).is_empty(), "nothing was started");
    }
}
