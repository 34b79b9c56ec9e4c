//! Bodies and headers of requests.
//!
//! Owns: their content. Never: sends them. Invariant: an answer is as long as the schedule says,
//! unless the user lets the model end it.

use crate::prompt::PromptVocabulary;
use crate::schedule::PlannedRequest;
use crate::slo::SloSet;
use crate::workload::ONE_CLASS;
use anyhow::Context;
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The API that requests use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ApiEndpoint {
    #[default]
    Completions,
    Chat,
}

impl ApiEndpoint {
    /// Path below the server's address.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// The party that ends an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerLength {
    /// The schedule: `ignore_eos` and `min_tokens` are sent.
    #[default]
    AsPlanned,
    /// The model, or the planned length: for servers that refuse those two fields.
    ByModel,
}

/// The SLO headers that are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SloHeaders {
    #[default]
    None,
    /// `x-slo-class` with the class's name, if it was given one.
    Class,
    /// `x-slo-ttft-ms`, `x-slo-tpot-ms` and `x-slo-e2e-ms` with the class's targets.
    Targets,
    Both,
}

/// Options of every request, apart from its prompt.
#[derive(Clone, Debug, Default)]
pub struct RequestOptions {
    pub endpoint: ApiEndpoint,
    /// The party that ends an answer.
    pub ending: AnswerLength,
    /// The SLO headers that are sent.
    pub slo_headers: SloHeaders,
    /// Whether `x-cleave-timing: 1` asks for stages.
    pub timing: StageRequest,
    /// Sent as `Authorization: Bearer …`.
    pub api_key: Option<String>,
    /// More headers, as `name: value`.
    pub headers: Vec<String>,
    /// Additional fields of the body, which override ours. Sampling is greedy unless one says
    /// otherwise.
    pub fields: Map<String, Value>,
}

/// Whether stage times are requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StageRequest {
    #[default]
    Silent,
    /// Requested by `x-cleave-timing: 1`.
    Asked,
}

#[derive(Clone, Debug)]
pub(crate) struct BodyWriter {
    endpoint: ApiEndpoint,
    ending: AnswerLength,
    alphabet: PromptVocabulary,
    /// The body up to the prompt.
    head: Vec<u8>,
}

impl BodyWriter {
    pub(crate) fn new(
        options: &RequestOptions,
        model: Option<&str>,
        alphabet: PromptVocabulary,
    ) -> Self {
        let mut fields = Map::new();
        if let Some(model) = model {
            fields.insert("model".into(), json!(model));
        }
        fields.insert("stream".into(), json!(true));
        fields.insert("stream_options".into(), json!({"include_usage": true}));
        fields.insert("temperature".into(), json!(0));
        if options.ending == AnswerLength::AsPlanned {
            fields.insert("ignore_eos".into(), json!(true));
        }
        fields.extend(options.fields.clone());
        let mut head = Value::Object(fields).to_string().into_bytes();
        head.pop();
        head.extend_from_slice(match options.endpoint {
            ApiEndpoint::Completions => b",\"prompt\":",
            ApiEndpoint::Chat => b",\"messages\":[{\"role\":\"user\",\"content\":",
        });
        Self {
            endpoint: options.endpoint,
            ending: options.ending,
            alphabet,
            head,
        }
    }

    pub(crate) fn body(&self, planned: &PlannedRequest, salt: u64) -> Bytes {
        let mut body = Vec::with_capacity(self.head.len() + 7 * planned.prompt.tokens() as usize);
        body.extend_from_slice(&self.head);
        self.alphabet.write(&planned.prompt, salt, &mut body);
        if self.endpoint == ApiEndpoint::Chat {
            body.extend_from_slice(b"}]");
        }
        let output = planned.output;
        let rest = match self.ending {
            AnswerLength::AsPlanned => {
                format!(",\"max_tokens\":{output},\"min_tokens\":{output}}}")
            }
            AnswerLength::ByModel => format!(",\"max_tokens\":{output}}}"),
        };
        body.extend_from_slice(rest.as_bytes());
        Bytes::from(body)
    }
}

/// Headers of all requests, except those of a class.
pub(crate) fn headers(options: &RequestOptions) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if options.timing == StageRequest::Asked {
        headers.insert("x-cleave-timing", HeaderValue::from_static("1"));
    }
    if let Some(key) = &options.api_key {
        let mut value = HeaderValue::try_from(format!("Bearer {key}"))
            .context("the API key has characters that no header may have")?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    for text in &options.headers {
        let parts = text.split_once(':').map(|(name, value)| {
            let name = HeaderName::try_from(name.trim()).ok();
            name.zip(HeaderValue::try_from(value.trim()).ok())
        });
        let (name, value) = parts
            .flatten()
            .with_context(|| format!("header `{text}`: expected `name: value`"))?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Headers of the requests of each class.
pub(crate) fn class_headers(
    options: &RequestOptions,
    slo: &SloSet,
    classes: &[String],
) -> anyhow::Result<Vec<HeaderMap>> {
    let common = headers(options)?;
    let of_class = |class: &String| {
        let mut headers = common.clone();
        let (name, targets) = match options.slo_headers {
            SloHeaders::None => (None, None),
            SloHeaders::Class => (Some(class), None),
            SloHeaders::Targets => (None, Some(slo.of(class))),
            SloHeaders::Both => (Some(class), Some(slo.of(class))),
        };
        if let Some(name) = name.filter(|name| *name != ONE_CLASS) {
            headers.insert("x-slo-class", HeaderValue::try_from(name.as_str())?);
        }
        let mut target = |name: &'static str, target: Option<Duration>| -> anyhow::Result<()> {
            if let Some(target) = target {
                let millis = (target.as_secs_f64() * 1e6).round() / 1e3;
                headers.insert(name, HeaderValue::try_from(millis.to_string())?);
            }
            Ok(())
        };
        if let Some(targets) = targets {
            target("x-slo-ttft-ms", targets.ttft)?;
            target("x-slo-tpot-ms", targets.tpot)?;
            target("x-slo-e2e-ms", targets.e2e)?;
        }
        Ok(headers)
    };
    classes.iter().map(of_class).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::PromptPlan;
    use cleave_domain::Time;

    fn planned() -> PlannedRequest {
        PlannedRequest {
            at: Time::ZERO,
            class: 0,
            prompt: PromptPlan::unique(3, 5),
            output: 9,
        }
    }

    fn body(options: &RequestOptions) -> Value {
        let alphabet = PromptVocabulary::IdRange {
            first: 256,
            end: 900,
        };
        let writer = BodyWriter::new(options, Some("m\"x"), alphabet);
        serde_json::from_slice(&writer.body(&planned(), 0)).unwrap()
    }

    #[test]
    fn bodies_have_the_fields_of_the_openai_api() {
        let default_body = body(&RequestOptions::default());
        assert_eq!(default_body["model"], "m\"x");
        assert_eq!(default_body["prompt"].as_array().unwrap().len(), 5);
        assert_eq!(
            default_body["stream_options"],
            json!({"include_usage": true})
        );
        assert_eq!(
            (&default_body["max_tokens"], &default_body["min_tokens"]),
            (&json!(9), &json!(9))
        );
        assert_eq!(default_body["ignore_eos"], true);
        let chat = body(&RequestOptions {
            endpoint: ApiEndpoint::Chat,
            ending: AnswerLength::ByModel,
            fields: Map::from_iter([("temperature".to_owned(), json!(0.5))]),
            ..RequestOptions::default()
        });
        assert_eq!(chat["messages"][0]["role"], "user");
        assert_eq!(chat["temperature"], 0.5);
        assert!(chat.get("ignore_eos").is_none() && chat.get("min_tokens").is_none());
    }

    #[test]
    fn slo_headers_are_sent_only_if_enabled() {
        let classes = ["chat".to_owned()];
        let slo = SloSet::parse(&["ttft=1500us,tpot=50ms,e2e=2s".to_owned()], &classes).unwrap();
        let headers = |slo_headers| {
            let options = RequestOptions {
                slo_headers,
                headers: vec!["x-tenant:  a ".into()],
                ..RequestOptions::default()
            };
            class_headers(&options, &slo, &classes).unwrap().remove(0)
        };
        let both = headers(SloHeaders::Both);
        assert_eq!(both["x-slo-class"], "chat");
        assert_eq!(both["x-slo-ttft-ms"], "1.5");
        assert_eq!(both["x-slo-tpot-ms"], "50");
        assert_eq!(both["x-slo-e2e-ms"], "2000");
        assert_eq!(both["x-tenant"], "a");
        assert!(
            headers(SloHeaders::None)
                .keys()
                .all(|name| !name.as_str().starts_with("x-slo"))
        );
        let wrong = RequestOptions {
            headers: vec!["no colon".into()],
            ..RequestOptions::default()
        };
        assert!(class_headers(&wrong, &slo, &classes).is_err());
    }
}
