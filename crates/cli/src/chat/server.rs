//! The server of a chat: its model, and the stream of an answer.
//!
//! Owns: the connection, and the division of a stream into events. Never: knows what a chunk says.

use super::session::ServerEvent;
use crate::args::ChatArgs;
use crate::server_client::{PageRefusal, ServerClient, read_body, refusal_text};
use anyhow::{Context, bail, ensure};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Response, StatusCode};
use serde_json::Value;
use std::time::Duration;

/// Limit of a line of a stream, far above any chunk.
const LINE_BYTES_MAX: usize = 16 << 20;

pub(super) struct ChatServer {
    client: ServerClient,
    slo_class: Option<String>,
}

impl ChatServer {
    /// Checks the address, with or without `/v1` at its end. It connects to nothing yet.
    ///
    /// # Errors
    /// If the URL, or the file of authorities, cannot be used.
    pub(super) fn new(url: &str, args: &ChatArgs) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/');
        let base = url.strip_suffix("/v1").unwrap_or(url);
        let key = args.api_key.as_deref();
        Ok(Self {
            client: ServerClient::connect(base, args.cacert.as_deref(), key)?,
            slo_class: args.slo_class.clone(),
        })
    }

    /// Asks for the name of the served model, the first of several.
    ///
    /// # Errors
    /// If the server cannot be reached, refuses, or serves no model.
    pub(super) async fn model(&self) -> anyhow::Result<String> {
        let list = self.client.json("/v1/models").await;
        let list = list.map_err(|error| {
            let advice = models_advice(&error);
            error.context(advice)
        })?;
        let name = list["data"][0]["id"].as_str();
        let name = name.context("the server serves no model yet")?;
        Ok(name.to_owned())
    }

    /// Sends a request, and gives `each` its events; the last one is no chunk.
    ///
    /// # Errors
    /// The errors of `each`. Faults of the server are events.
    pub(super) async fn stream(
        &self,
        body: &Value,
        each: &mut dyn FnMut(ServerEvent) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut headers = vec![
            ("content-type", "application/json"),
            ("x-cleave-timing", "1"),
        ];
        if let Some(name) = &self.slo_class {
            headers.push(("x-slo-class", name));
        }
        let body = body.to_string().into_bytes();
        let path = "/v1/chat/completions";
        let answer = match self.client.post(path, &headers, body).await {
            Ok(answer) if answer.status().is_success() => answer,
            Ok(answer) => return each(refused(answer).await),
            Err(error) => return each(ServerEvent::Failed(format!("{error:#}"))),
        };
        let mut chunks = ChunkStream {
            body: answer.into_body(),
            rest: Vec::new(),
        };
        loop {
            match chunks.next().await {
                Ok(Some(chunk)) => each(ServerEvent::Chunk(chunk))?,
                Ok(None) => return each(ServerEvent::Ended),
                Err(error) => return each(ServerEvent::Failed(format!("{error:#}"))),
            }
        }
    }
}

/// The way out where the models could not be listed.
fn models_advice(error: &anyhow::Error) -> &'static str {
    let refusal = error.downcast_ref::<PageRefusal>();
    match refusal.map(|refusal| refusal.status) {
        None => {
            "is a server running there? `cleave serve` starts one; without --url the model runs in this process"
        }
        Some(StatusCode::UNAUTHORIZED) => {
            "the server asks for a key: give it by --api-key or OPENAI_API_KEY"
        }
        Some(StatusCode::NOT_FOUND) => {
            "the server has no list of models there: --url ends before `/v1`, or with it; --served-model-name makes the list unnecessary"
        }
        Some(_) => "the server does not list its models",
    }
}

async fn refused(answer: Response<Incoming>) -> ServerEvent {
    let status = answer.status().as_u16();
    let retry_after = retry_after(answer.headers());
    let message = match read_body(answer.into_body()).await {
        Ok(body) => refusal_text(&body),
        Err(error) => format!("{error:#}"),
    };
    ServerEvent::Refused {
        status,
        message,
        retry_after,
    }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.parse::<u32>().ok();
    let millis = number("retry-after-ms").map(|ms| Duration::from_millis(ms.into()));
    let seconds = || number("retry-after").map(|seconds| Duration::from_secs(seconds.into()));
    millis.or_else(seconds)
}

/// The chunks of an answer, out of server-sent events.
struct ChunkStream {
    body: Incoming,
    rest: Vec<u8>,
}

impl ChunkStream {
    /// Returns the next chunk; `None` after `[DONE]` or at the end of the stream.
    async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        loop {
            while let Some(line) = self.take_line() {
                let line = std::str::from_utf8(&line).context("the stream is not text")?;
                match line.strip_prefix("data:").map(str::trim) {
                    Some("[DONE]") => return Ok(None),
                    Some(data) => {
                        let chunk = serde_json::from_str(data);
                        return chunk.context("an event of the stream is not JSON");
                    }
                    // Comments, names of events and empty lines.
                    None => {}
                }
            }
            ensure!(
                self.rest.len() < LINE_BYTES_MAX,
                "a line of the stream is larger than 16 MiB"
            );
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            let frame = match frame {
                Ok(frame) => frame,
                Err(error) => bail!("the connection was lost: {error}"),
            };
            if let Some(bytes) = frame.data_ref() {
                self.rest.extend_from_slice(bytes);
            }
        }
    }

    fn take_line(&mut self) -> Option<Vec<u8>> {
        let end = self.rest.iter().position(|byte| *byte == b'\n')?;
        let mut line: Vec<u8> = self.rest.drain(..=end).collect();
        line.pop();
        Some(line)
    }
}
