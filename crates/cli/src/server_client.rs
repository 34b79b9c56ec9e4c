//! The HTTP client of commands that query a running server.
//!
//! Owns: the connection, the trusted authorities, and the error text of a refusal. Never: knows the
//! contents of a page.

use anyhow::{Context, ensure};
use cleave_tls::{HttpTlsConnector, connector};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// Time limit for the head of an answer, and for reading a page.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// Limit of a page.
const PAGE_BYTES_MAX: usize = 64 << 20;

/// A page that a running server refused.
#[derive(Debug)]
pub(crate) struct PageRefusal {
    url: String,
    pub(crate) status: StatusCode,
    message: String,
}

impl fmt::Display for PageRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url,
            status,
            message,
        } = self;
        write!(f, "{url}: {status}: {message}")
    }
}

impl std::error::Error for PageRefusal {}

/// The address of a server, with a client for it.
pub(crate) struct ServerClient {
    client: Client<HttpTlsConnector, Full<Bytes>>,
    /// URL without a slash at its end.
    base: String,
    key: Option<String>,
}

impl ServerClient {
    /// Checks the URL, `http://host:port` or `https://host:port`. `cacert` is a file of the
    /// authorities that the server must be signed by; `None` stands for the system's.
    pub(crate) fn connect(
        url: &str,
        cacert: Option<&Path>,
        key: Option<&str>,
    ) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/');
        let uri: Uri = base.parse().with_context(|| format!("URL `{url}`"))?;
        ensure!(
            matches!(uri.scheme_str(), Some("http" | "https")),
            "URL `{url}`: expected http://host:port or https://host:port"
        );
        let mut plain = HttpConnector::new();
        plain.set_nodelay(true);
        Ok(Self {
            client: Client::builder(TokioExecutor::new()).build(connector(plain, &uri, cacert)?),
            base: base.to_owned(),
            key: key.map(str::to_owned),
        })
    }

    /// Requests a page.
    ///
    /// # Errors
    /// If the server cannot be reached or trusted; a [`PageRefusal`] if it answers with an error.
    pub(crate) async fn get(&self, path: &str, accept: &str) -> anyhow::Result<Incoming> {
        let Self { client, base, key } = self;
        let mut request = Request::get(format!("{base}{path}")).header("accept", accept);
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request
            .body(Full::default())
            .context("the key is not a valid header")?;
        let answer = timeout(ANSWER_MAX, client.request(request)).await;
        let answer = answer.with_context(|| format!("{base} does not answer"))?;
        let answer = answer.with_context(|| format!("cannot reach {base}"))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        let body = read_body(answer.into_body()).await?;
        let refusal = PageRefusal {
            url: format!("{base}{path}"),
            status,
            message: refusal_text(&body),
        };
        Err(refusal.into())
    }

    /// Sends JSON, and returns the answer whatever its status. It waits for as long as the server
    /// does.
    ///
    /// # Errors
    /// If the server cannot be reached or trusted.
    pub(crate) async fn post(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> anyhow::Result<Response<Incoming>> {
        let Self { client, base, key } = self;
        let mut request = Request::post(format!("{base}{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request
            .body(Full::from(body))
            .context("the key or the SLO class is not a valid header")?;
        let answer = client.request(request).await;
        answer.with_context(|| format!("cannot reach {base}"))
    }

    /// Requests a page and parses it as JSON.
    ///
    /// # Errors
    /// As for [`Self::get`], or if the page is not JSON.
    pub(crate) async fn json(&self, path: &str) -> anyhow::Result<Value> {
        let body = self.get(path, "application/json").await?;
        let bytes = read_body(body).await?;
        let base = &self.base;
        serde_json::from_slice(&bytes).with_context(|| format!("{base}{path} is not JSON"))
    }
}

/// Reads the reason of a refusal out of its body.
pub(crate) fn refusal_text(body: &[u8]) -> String {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let message = body["error"]["message"].as_str();
    message.unwrap_or("no reason given").to_owned()
}

/// Reads the whole body of an answer that is not a stream.
///
/// # Errors
/// If it is larger than the limit, or does not end in time.
pub(crate) async fn read_body(body: Incoming) -> anyhow::Result<Bytes> {
    let read = timeout(ANSWER_MAX, Limited::new(body, PAGE_BYTES_MAX).collect()).await;
    let read = read.context("the server stopped in the middle of a page")?;
    Ok(read.map_err(|error| anyhow::anyhow!("{error}"))?.to_bytes())
}
