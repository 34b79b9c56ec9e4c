//! Client input for tests and libFuzzer.

use crate::admin::{CommandError, Operator, WorkerCommand, WorkerView};
use crate::app::{ApiOptions, App};
use crate::frontend::{FlightEvent, FlightStream, Frontend, ServingReadiness};
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request as HttpRequest, StatusCode, header};
use cleave_domain::{
    Emission, Ending, FinishReason, Pooling, PrefillTiming, PromptFacts, Request,
    RequestStageTimes, SampledToken, TokenId, TokenScores, TokenUsage,
};
use cleave_text::{EmbedTask, ModelFiles, ModelTask, ModelText, RerankTask};
use futures::StreamExt;
use http_body_util::BodyExt;
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use tokio::runtime::Runtime;
use tower::ServiceExt;

/// Routes that a sample can choose; behind them those of [`POOLED_ROUTES`].
const ROUTES: [&str; 10] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/admin/drain",
    "/admin/role",
    "/v1/models",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
];

/// Routes whose answers are made of vectors, and whether a reranker serves them or an embedding
/// model.
const POOLED_ROUTES: [(&str, bool); 5] = [
    ("/v1/embeddings", false),
    ("/v1/rerank", false),
    ("/v1/rerank", true),
    ("/v1/score", false),
    ("/v1/score", true),
];

/// A frontend that repeats the first tokens of the prompt, or makes a vector of them.
pub(crate) struct EchoFrontend;

impl Operator for EchoFrontend {
    fn workers(&self) -> Vec<WorkerView> {
        Vec::new()
    }

    fn command(&self, _: &str, _: WorkerCommand) -> Result<WorkerView, CommandError> {
        Err(CommandError::UnknownWorker)
    }
}

impl Frontend for EchoFrontend {
    fn submit(&self, request: Request) -> FlightStream {
        let count = (request.stop.max_tokens as usize).min(4);
        let scored = |token: TokenId, top: Option<u32>| SampledToken {
            token,
            scores: top.map(|top| TokenScores {
                normalizer: 1.0,
                chosen: 0.5,
                top: (0..top).map(|rank| (rank, 0.5)).collect(),
            }),
        };
        let prompt_scores = request.sampling.prompt_logprobs.map(|top| {
            let rest = request.prompt.iter().skip(1);
            rest.map(|token| scored(*token, Some(top))).collect()
        });
        let mut facts = Some(PromptFacts {
            cached_tokens: 0,
            scores: prompt_scores.unwrap_or_default(),
            timing: PrefillTiming::default(),
            pooled: request.pooling.as_ref().map(|pooling| {
                let tokens = request.prompt.iter().cycle();
                let tokens = tokens.take(pooling.width(4));
                tokens.map(|token| *token as f32 - 200.0).collect()
            }),
        });
        let tokens = request.prompt.iter().cycle().take(count);
        let tokens = tokens.enumerate().map(|(index, token)| {
            FlightEvent::Token(Emission {
                index: index as u32,
                sampled: scored(*token, request.sampling.logprobs),
                prompt: facts.take(),
            })
        });
        let ended = FlightEvent::Ended {
            ending: Ending::Done {
                reason: FinishReason::Length,
            },
            usage: TokenUsage::default(),
            timing: RequestStageTimes::default(),
        };
        let events: Vec<FlightEvent> = tokens.chain([ended]).collect();
        futures::stream::iter(events).boxed()
    }

    fn readiness(&self, _: &str) -> ServingReadiness {
        ServingReadiness::Ready
    }

    fn metrics(&self) -> String {
        String::new()
    }
}

fn model(name: &str, task: ModelTask) -> ModelText {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let mut files = ModelFiles::read(&root.join(name)).expect("a checkpoint of the tests");
    files.task = task;
    ModelText::new(files).expect("a tokenizer")
}

fn server_for(task: ModelTask) -> Router {
    let app = App::new(Arc::new(EchoFrontend), ApiOptions::default());
    app.serve_model(model("qwen3", task));
    app.router()
}

fn embedder() -> &'static Router {
    static SERVER: LazyLock<Router> = LazyLock::new(|| {
        server_for(ModelTask::Embed(EmbedTask {
            prompts: vec![("query".to_owned(), "Q: ".to_owned())],
            ..EmbedTask::of(Pooling::Mean)
        }))
    });
    &SERVER
}

fn reranker() -> &'static Router {
    static SERVER: LazyLock<Router> = LazyLock::new(|| {
        server_for(ModelTask::Rerank(RerankTask {
            negative: "n".to_owned(),
            positive: "y".to_owned(),
        }))
    });
    &SERVER
}

/// Sends a body to the route that its first byte chooses, and returns the status of the answer.
///
/// # Panics
/// If the answer is a server error or does not have the API's form.
pub fn http(bytes: &[u8]) -> StatusCode {
    let (route, body) = bytes.split_first().unwrap_or((&0, &[]));
    let route = usize::from(*route) % (ROUTES.len() + POOLED_ROUTES.len());
    match route.checked_sub(ROUTES.len()) {
        None => post(ROUTES[route], body),
        Some(pooled) => {
            let (route, reranks) = POOLED_ROUTES[pooled];
            post_to(if reranks { reranker() } else { embedder() }, route, body)
        }
    }
}

/// Sends a body to one route, and returns the status of the answer.
///
/// # Panics
/// If the answer is a server error or does not have the API's form.
pub fn post(route: &str, body: &[u8]) -> StatusCode {
    static SERVER: LazyLock<Router> = LazyLock::new(|| server_for(ModelTask::Generate));
    post_to(&SERVER, route, body)
}

fn post_to(server: &Router, route: &str, body: &[u8]) -> StatusCode {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime")
    });
    let request = HttpRequest::post(route)
        .header(header::CONTENT_TYPE, "application/json")
        // `/admin` accepts only local requests.
        .extension(ConnectInfo(SocketAddr::from((Ipv4Addr::LOCALHOST, 1))))
        .body(Body::from(body.to_vec()))
        .expect("a request");
    let answer = server.clone().oneshot(request);
    RUNTIME.block_on(async {
        let answer = answer.await.expect("routes do not fail");
        let (head, body) = answer.into_parts();
        let body = body.collect().await.expect("a body does not break off");
        let body = body.to_bytes();
        assert!(!head.status.is_server_error(), "{}", body.escape_ascii());
        let kind = head.headers.get(header::CONTENT_TYPE);
        if kind.is_some_and(|kind| kind == "application/json") {
            let answer: Value = serde_json::from_slice(&body).expect("an answer is JSON");
            let error_message = answer["error"]["message"].as_str();
            assert_eq!(
                head.status.is_success(),
                error_message.is_none(),
                "{answer}"
            );
        }
        head.status
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(route: u8, body: &str) -> Vec<u8> {
        [&[route], body.as_bytes()].concat()
    }

    #[test]
    fn damaged_bodies_get_an_answer_and_break_no_other_request() {
        let chat = r#"{"model":"qwen3","messages":[{"role":"system","content":"Be brief."},{"role":"user",
            "content":[{"type":"text","text":"What is a slice?"}]},{"role":"assistant","tool_calls":[{"id":"1",
            "type":"function","function":{"name":"look","arguments":"{\"at\": 3}"}}]},{"role":"tool",
            "tool_call_id":"1","content":"a view"}],"tools":[{"type":"function","function":{"name":"look",
            "parameters":{"type":"object"}}}],"max_completion_tokens":3,"logprobs":true,"top_logprobs":2,
            "temperature":0.7,"stop":["\n"],"n":2,"stream":false}"#;
        let forced = r##"{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{
            "name":"look","strict":true,"parameters":{"type":"object","properties":{"at":{"type":"integer"},
            "deep":{"anyOf":[{"$ref":"#/$defs/d"},{"type":"null"}]}},"required":["at"],"$defs":{"d":{"enum":["a","b"]}}}}}],
            "tool_choice":{"type":"function","function":{"name":"look"}},"parallel_tool_calls":false,
            "response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"array"}}},
            "thinking_token_budget":3,"reasoning_effort":"low","include_reasoning":false,"max_tokens":3}"##;
        let samples = [
            sample(0, chat),
            sample(0, forced),
            sample(
                0,
                r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true}}"#,
            ),
            sample(
                1,
                r#"{"prompt":"A vector is","max_tokens":4,"seed":5,"top_p":0.9,"logit_bias":{"5":-3.5},"echo":true,"logprobs":1}"#,
            ),
            sample(
                1,
                r#"{"prompt":[[1,2,3],[4,5]],"max_tokens":2,"presence_penalty":0.5,"min_p":0.1,"suffix":null}"#,
            ),
            sample(2, r#"{"prompt":"a b c","add_special_tokens":true}"#),
            sample(
                2,
                r#"{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":false}"#,
            ),
            sample(3, r#"{"tokens":[1,2,3,4]}"#),
            sample(4, r#"{"worker":"d0"}"#),
            sample(5, r#"{"worker":"d0","role":"both"}"#),
            sample(
                9,
                r#"{"instructions":"Be brief.","input":[{"role":"developer","content":"Now."},{"role":"user","content":[
                {"type":"input_text","text":"x"}]},{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text",
                "text":"Hm"}]},{"type":"function_call","call_id":"1","name":"f","arguments":"{}"},
                {"type":"function_call_output","call_id":"1","output":"y"}],"tools":[{"type":"function","name":"f",
                "parameters":{"type":"object"}},{"type":"web_search"}],"tool_choice":"auto","store":true,
                "text":{"format":{"type":"text"}},"max_output_tokens":3,"stream":true}"#,
            ),
            sample(
                7,
                r#"{"max_tokens":3,"system":[{"type":"text","text":"x-anthropic-billing-header: a\nBe brief."}],
                "messages":[{"role":"user","content":[{"type":"text","text":"x"}]},{"role":"assistant","content":[
                {"type":"thinking","thinking":"Hm","signature":"s"},{"type":"tool_use","id":"1","name":"f","input":{}}]},
                {"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"y"}]}],
                "tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"auto"},
                "thinking":{"type":"enabled","budget_tokens":1},"stop_sequences":["z"],"stream":true}"#,
            ),
            sample(
                8,
                r#"{"messages":[{"role":"user","content":"x"}],"system":"y"}"#,
            ),
            sample(
                10,
                r#"{"model":"qwen3","input":["a","é 漢"],"encoding_format":"base64","dimensions":3,"prompt_name":"query","user":"u"}"#,
            ),
            sample(10, r#"{"input":[[1,2,3],[4]],"encoding_format":"float"}"#),
            sample(10, r#"{"input":[5,6],"priority":1}"#),
            sample(
                11,
                r#"{"query":"q","documents":["a",{"text":"b"}],"top_n":1}"#,
            ),
            sample(
                12,
                r#"{"query":"q","documents":["a","b"],"instruction":"i","return_documents":false}"#,
            ),
            sample(13, r#"{"text_1":"a","text_2":["b","c"]}"#),
            sample(14, r#"{"queries":["a","b"],"documents":["c","d"]}"#),
        ];
        for (index, sample) in samples.iter().enumerate() {
            // The frontend has no worker that could be commanded.
            let expected_status = if matches!(sample[0], 4 | 5) { 404 } else { 200 };
            assert_eq!(http(sample).as_u16(), expected_status, "sample {index}");
        }
        cleave_fuzz::check_samples("http", &samples, 3_000, |bytes| {
            http(bytes);
        });
        // Each API that generates has a target of its own.
        for (target, route) in [
            ("chat", 0),
            ("completions", 1),
            ("tokenize", 2),
            ("messages", 7),
            ("responses", 9),
        ] {
            let own = samples.iter().filter(|sample| sample[0] == route);
            let own: Vec<Vec<u8>> = own.map(|sample| sample[1..].to_vec()).collect();
            cleave_fuzz::check_samples(target, &own, 300, |bytes| {
                post(ROUTES[usize::from(route)], bytes);
            });
        }
    }
}
