//! What is sent.
//!
//! Owns: bodies and headers of requests. Never: sends them.
//! Invariant: an answer is as long as the schedule says, unless the user lets the model end it.

use crate::prompt::Alphabet;
use crate::schedule::Planned;
use crate::slo::Slo;
use crate::workload::ONE_CLASS;
use anyhow::Context;
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Which of the two interfaces is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// `/v1/completions`.
    #[default]
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

impl Endpoint {
    /// Path below the server's address.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// Who ends an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// The schedule: `ignore_eos` and `min_tokens` are sent.
    #[default]
    AsPlanned,
    /// The model, or the planned length: for servers that refuse those two fields.
    ByModel,
}

/// Which SLO headers are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SloHeaders {
    /// None.
    #[default]
    None,
    /// `x-slo-class` with the class's name, if it was given one.
    Class,
    /// `x-slo-ttft-ms`, `x-slo-tpot-ms` and `x-slo-e2e-ms` with the class's targets.
    Targets,
    /// Both.
    Both,
}

/// What every request has beside its prompt.
#[derive(Clone, Debug, Default)]
pub struct Asking {
    /// The interface.
    pub endpoint: Endpoint,
    /// Who ends an answer.
    pub ending: Ending,
    /// Which SLO headers go along.
    pub slo_headers: SloHeaders,
    /// Whether `x-cleave-timing: 1` asks for stages.
    pub timing: Timing,
    /// Sent as `Authorization: Bearer …`.
    pub api_key: Option<String>,
    /// More headers, as `name: value`.
    pub headers: Vec<String>,
    /// More fields of the body; they replace ours. Greedy sampling unless one says otherwise.
    pub fields: Map<String, Value>,
}

/// Whether stages are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Timing {
    /// No.
    #[default]
    Silent,
    /// By `x-cleave-timing: 1`.
    Asked,
}

/// Writes bodies.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    endpoint: Endpoint,
    ending: Ending,
    alphabet: Alphabet,
    /// All before the prompt.
    head: Vec<u8>,
}

impl Writer {
    pub(crate) fn new(asking: &Asking, model: Option<&str>, alphabet: Alphabet) -> Self {
        let mut fields = Map::new();
        if let Some(model) = model {
            fields.insert("model".into(), json!(model));
        }
        fields.insert("stream".into(), json!(true));
        fields.insert("stream_options".into(), json!({"include_usage": true}));
        fields.insert("temperature".into(), json!(0));
        if asking.ending == Ending::AsPlanned {
            fields.insert("ignore_eos".into(), json!(true));
        }
        fields.extend(asking.fields.clone());
        let mut head = Value::Object(fields).to_string().into_bytes();
        head.pop();
        head.extend_from_slice(match asking.endpoint {
            Endpoint::Completions => b",\"prompt\":",
            Endpoint::Chat => b",\"messages\":[{\"role\":\"user\",\"content\":",
        });
        Self {
            endpoint: asking.endpoint,
            ending: asking.ending,
            alphabet,
            head,
        }
    }

    pub(crate) fn body(&self, planned: &Planned, salt: u64) -> Bytes {
        let mut body = Vec::with_capacity(self.head.len() + 7 * planned.prompt.tokens() as usize);
        body.extend_from_slice(&self.head);
        self.alphabet.write(&planned.prompt, salt, &mut body);
        if self.endpoint == Endpoint::Chat {
            body.extend_from_slice(b"}]");
        }
        let output = planned.output;
        let rest = match self.ending {
            Ending::AsPlanned => format!(",\"max_tokens\":{output},\"min_tokens\":{output}}}"),
            Ending::ByModel => format!(",\"max_tokens\":{output}}}"),
        };
        body.extend_from_slice(rest.as_bytes());
        Bytes::from(body)
    }
}

/// Headers of all requests, but for those of a class.
pub(crate) fn headers(asking: &Asking) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if asking.timing == Timing::Asked {
        headers.insert("x-cleave-timing", HeaderValue::from_static("1"));
    }
    if let Some(key) = &asking.api_key {
        let mut value = HeaderValue::try_from(format!("Bearer {key}"))
            .context("the API key has characters that no header may have")?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    for text in &asking.headers {
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
    asking: &Asking,
    slo: &Slo,
    classes: &[String],
) -> anyhow::Result<Vec<HeaderMap>> {
    let common = headers(asking)?;
    let of_class = |class: &String| {
        let mut headers = common.clone();
        let (name, targets) = match asking.slo_headers {
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
    use crate::prompt::Prompt;
    use cleave_domain::Time;

    fn planned() -> Planned {
        Planned {
            at: Time::ZERO,
            class: 0,
            prompt: Prompt::unique(3, 5),
            output: 9,
        }
    }

    fn body(asking: &Asking) -> Value {
        let alphabet = Alphabet::Range {
            first: 256,
            end: 900,
        };
        let writer = Writer::new(asking, Some("m\"x"), alphabet);
        serde_json::from_slice(&writer.body(&planned(), 0)).unwrap()
    }

    #[test]
    fn a_body_is_what_servers_of_this_api_take() {
        let asked = body(&Asking::default());
        assert_eq!(asked["model"], "m\"x");
        assert_eq!(asked["prompt"].as_array().unwrap().len(), 5);
        assert_eq!(asked["stream_options"], json!({"include_usage": true}));
        assert_eq!(
            (&asked["max_tokens"], &asked["min_tokens"]),
            (&json!(9), &json!(9))
        );
        assert_eq!(asked["ignore_eos"], true);
        let chat = body(&Asking {
            endpoint: Endpoint::Chat,
            ending: Ending::ByModel,
            fields: Map::from_iter([("temperature".to_owned(), json!(0.5))]),
            ..Asking::default()
        });
        assert_eq!(chat["messages"][0]["role"], "user");
        assert_eq!(chat["temperature"], 0.5);
        assert!(chat.get("ignore_eos").is_none() && chat.get("min_tokens").is_none());
    }

    #[test]
    fn headers_say_class_and_targets_only_if_asked_to() {
        let classes = ["chat".to_owned()];
        let slo = Slo::parse(&["ttft=1500us,tpot=50ms,e2e=2s".to_owned()], &classes).unwrap();
        let headers = |slo_headers| {
            let asking = Asking {
                slo_headers,
                headers: vec!["x-tenant:  a ".into()],
                ..Asking::default()
            };
            class_headers(&asking, &slo, &classes).unwrap().remove(0)
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
        let wrong = Asking {
            headers: vec!["no colon".into()],
            ..Asking::default()
        };
        assert!(class_headers(&wrong, &slo, &classes).is_err());
    }
}
