//! The ranges of numbers in `/openapi.json` are those by which bodies are read.

use crate::scripted_server::{
    HttpAnswer, TestServer, files, options, post, request_forms, server, server_with,
};
use cleave_domain::Pooling;
use cleave_text::{EmbedTask, ModelTask};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A field that is a number, on its route.
#[derive(Clone, Debug)]
struct NumberField {
    route: String,
    /// Name in the body.
    name: String,
    /// Schema of the number itself.
    schema: Value,
    /// Whether the field is an object from token ids to such numbers.
    is_map: bool,
}

/// A body that the route serves.
fn base(route: &str) -> Value {
    match route {
        "/v1/chat/completions" => json!({"messages": [{"role": "user", "content": "Hi"}]}),
        "/v1/completions" => json!({"prompt": "Hi", "echo": true}),
        "/tokenize" => json!({"prompt": "Hi"}),
        "/detokenize" => json!({"tokens": [5]}),
        "/admin/drain" => json!({"worker": "d0"}),
        "/admin/role" => json!({"worker": "d0", "role": "both"}),
        "/v1/messages" => json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        "/v1/responses" | "/v1/responses/input_tokens" => json!({"input": "Hi"}),
        "/v1/messages/count_tokens" => json!({"messages": [{"role": "user", "content": "Hi"}]}),
        "/v1/embeddings" => json!({"input": "Hi"}),
        "/v1/rerank" | "/rerank" | "/v2/rerank" => json!({"query": "Hi", "documents": ["Hi"]}),
        "/v1/score" | "/score" => json!({"text_1": "Hi", "text_2": "Hi"}),
        other => panic!("{other}: add a body that it serves"),
    }
}

/// Fields that must be there for a value to be served.
fn companions(name: &str, value: &str) -> String {
    match name {
        "top_logprobs" => r#", "logprobs": true"#.to_owned(),
        "best_of" => format!(r#", "n": {value}"#),
        _ => String::new(),
    }
}

/// All numbers among the fields of request bodies.
fn number_fields(document: &Value) -> Vec<NumberField> {
    let mut found = Vec::new();
    for (route, form) in request_forms(document) {
        for (name, field) in form["properties"].as_object().unwrap() {
            let is_map = field["additionalProperties"].is_object();
            let schema = if is_map {
                &field["additionalProperties"]
            } else {
                field
            };
            if is_number(schema) {
                found.push(NumberField {
                    route: route.clone(),
                    name: name.clone(),
                    schema: schema.clone(),
                    is_map,
                });
            }
        }
    }
    found
}

fn is_number(schema: &Value) -> bool {
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.as_slice(),
        kind => std::slice::from_ref(kind),
    };
    kinds
        .iter()
        .any(|kind| kind == "number" || kind == "integer")
}

impl NumberField {
    fn is_integer(&self) -> bool {
        self.schema["type"].to_string().contains("integer")
    }

    /// An end of the range as it is written, and whether it is in the range.
    fn end(&self, included: &str, excluded: &str) -> Option<(Value, bool)> {
        let included = self.schema.get(included).map(|end| (end.clone(), true));
        included.or_else(|| Some((self.schema.get(excluded)?.clone(), false)))
    }

    /// The value next to an end, above or below it, as JSON: 64 bits do not hold all integers. Of
    /// other numbers it is the neighbour in 32 bits, because JSON is read with an error of a bit.
    fn beside(&self, end: &Value, is_above: bool) -> String {
        if self.is_integer() {
            let step = if is_above { 1 } else { -1 };
            return (i128::from(end.as_i64().unwrap()) + step).to_string();
        }
        let end = end.as_f64().unwrap() as f32;
        let value = if is_above {
            end.next_up()
        } else {
            end.next_down()
        };
        json!(f64::from(value)).to_string()
    }

    /// Sends a request with this value, which is JSON.
    async fn ask(&self, set: &TestServer, value: &str, companions: &str) -> HttpAnswer {
        let body = base(&self.route).to_string();
        let value = if self.is_map {
            format!(r#"{{"5": {value}}}"#)
        } else {
            value.to_owned()
        };
        let (name, inside) = (&self.name, body.strip_suffix('}').unwrap());
        let body = format!(r#"{inside}, "{name}": {value}{companions}}}"#);
        set.send(post(&self.route, body)).await
    }

    fn path(&self) -> String {
        if self.is_map {
            format!("{}.5", self.name)
        } else {
            self.name.clone()
        }
    }

    /// Whether an answer refuses the number because of its own range.
    fn is_out_of_range(&self, answer: &HttpAnswer) -> bool {
        let error = &answer.json()["error"];
        let message = error["message"].as_str().unwrap_or_default();
        let path = self.path();
        error["param"] == path.as_str() && message.starts_with(&format!("`{path}` must be "))
    }

    /// Checks a value within the range. A request that is served has parameters that engines
    /// accept, so the API's ranges are within theirs.
    async fn is_accepted(&self, set: &TestServer, value: &str) {
        for _ in 0..128 {
            if pools(&self.route) {
                set.script_vector(&[1.0, 2.0]);
            } else {
                set.script_default();
            }
        }
        let companions = companions(&self.name, value);
        let answer = self.ask(set, value, &companions).await;
        assert!(!self.is_out_of_range(&answer), "{self:?}: {}", answer.body);
        if answer.status != 200 {
            // Rules beyond the range: the context, and the vocabulary.
            let code = &answer.json()["error"]["code"];
            let is_count = [
                "max_tokens",
                "max_completion_tokens",
                "max_output_tokens",
                "min_tokens",
                "top_logprobs",
                "dimensions",
            ];
            let is_count = is_count.contains(&&*self.name);
            assert!(is_count, "{self:?} {value} {code}: {}", answer.body);
            return;
        }
        let vocabulary = set.text.vocabulary_count();
        for request in set.frontend.submitted.lock().unwrap().drain(..) {
            assert_eq!(request.sampling.check(vocabulary), Ok(()), "{self:?}");
        }
        set.frontend.scripts.lock().unwrap().clear();
    }

    /// Checks a value beyond the range, whose ends the error names.
    async fn is_refused(&self, set: &TestServer, value: &str) {
        let answer = self.ask(set, value, "").await;
        let path = self.path();
        answer.is_error(400, "invalid_value", Some(&path));
        assert!(self.is_out_of_range(&answer), "{self:?}: {}", answer.body);
        let message = answer.json()["error"]["message"].to_string();
        if message.contains("64 bits") {
            return;
        }
        let low = self.end("minimum", "exclusiveMinimum");
        let high = self.end("maximum", "exclusiveMaximum");
        for (end, _) in low.into_iter().chain(high) {
            assert!(message.contains(&end.to_string()), "{end}: {message}");
        }
    }
}

/// Whether a route answers with vectors.
fn pools(route: &str) -> bool {
    ["embeddings", "rerank", "score"]
        .iter()
        .any(|name| route.ends_with(name))
}

/// A server whose model generates, and one whose model embeds.
struct RangeServers([TestServer; 2]);

impl RangeServers {
    fn new() -> Self {
        let mut embedder = files("llama3");
        embedder.task = ModelTask::Embed(EmbedTask::of(Pooling::LastToken));
        Self([server("llama3"), server_with(embedder, options())])
    }

    fn of(&self, field: &NumberField) -> &TestServer {
        &self.0[usize::from(pools(&field.route))]
    }
}

/// The server's fields that are numbers.
async fn fields_of(set: &TestServer) -> Vec<NumberField> {
    let fields = number_fields(&set.get("/openapi.json").await.json());
    assert!(fields.len() > 20, "they are found: {fields:?}");
    fields
}

#[tokio::test]
async fn ranges_end_as_the_document_states() {
    let sets = RangeServers::new();
    for field in fields_of(&sets.0[0]).await {
        let set = sets.of(&field);
        for (end, is_high) in [
            (field.end("minimum", "exclusiveMinimum"), false),
            (field.end("maximum", "exclusiveMaximum"), true),
        ] {
            let Some((end, is_included)) = end else {
                continue;
            };
            let outside = field.beside(&end, is_high);
            let inside = field.beside(&end, !is_high);
            if is_included {
                field.is_accepted(set, &end.to_string()).await;
                field.is_refused(set, &outside).await;
            } else {
                field.is_refused(set, &end.to_string()).await;
                field.is_accepted(set, &inside).await;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn numbers_are_refused_exactly_outside_their_range(
        at in any::<prop::sample::Index>(),
        number in prop_oneof![-200.0..200.0_f64, -1e10..1e10_f64, any::<i32>().prop_map(f64::from)],
    ) {
        thread_local! {
            static SETS: RangeServers = RangeServers::new();
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        SETS.with(|sets| runtime.block_on(async {
            let fields = fields_of(&sets.0[0]).await;
            let field = at.get(&fields);
            let set = sets.of(field);
            let number = if field.is_integer() { number.trunc() } else { number };
            let value = if field.is_integer() { json!(number as i64) } else { json!(number) };
            let value = value.to_string();
            let is_above = field.end("minimum", "exclusiveMinimum").is_none_or(|(low, is_in)| {
                let low = low.as_f64().unwrap();
                number > low || is_in && number == low
            });
            let is_below = field.end("maximum", "exclusiveMaximum").is_none_or(|(high, is_in)| {
                let high = high.as_f64().unwrap();
                number < high || is_in && number == high
            });
            if is_above && is_below {
                field.is_accepted(set, &value).await;
            } else {
                field.is_refused(set, &value).await;
            }
        }));
    }
}
