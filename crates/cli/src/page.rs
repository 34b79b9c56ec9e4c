//! What a running server says of itself, for commands that look at one.
//!
//! Owns: the connection, who vouches for the server, and what is told when it says no. Never: knows what a page
//! says.

use anyhow::{Context, bail, ensure};
use cleave_tls::{Connector, connector};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// Until the head of an answer is there, and to read a page.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// A page that is longer is none of ours.
const PAGE_BYTES_MAX: usize = 64 << 20;

/// A server by its address.
pub(crate) struct Pages {
    client: Client<Connector, Empty<Bytes>>,
    /// Without a slash at its end.
    base: String,
    key: Option<String>,
}

impl Pages {
    /// Checks the address, `http://host:port` or `https://host:port`; `cacert` is a file of the authorities that may
    /// vouch for the latter, this system's if none.
    pub(crate) fn of(url: &str, cacert: Option<&Path>, key: Option<&str>) -> anyhow::Result<Self> {
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

    /// The page, if the server gives it.
    ///
    /// # Errors
    /// A server that cannot be reached or trusted, or what it says in place of the page.
    pub(crate) async fn get(&self, path: &str, accept: &str) -> anyhow::Result<Incoming> {
        let Self { client, base, key } = self;
        let mut request = Request::get(format!("{base}{path}")).header("accept", accept);
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(Empty::new()).context("the key is no header")?;
        let answer = timeout(ANSWER_MAX, client.request(request)).await;
        let answer = answer.with_context(|| format!("{base} says nothing"))?;
        let answer = answer.with_context(|| format!("cannot reach {base}"))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        let said = whole(answer.into_body()).await?;
        let said: Value = serde_json::from_slice(&said).unwrap_or_default();
        let message = said["error"]["message"].as_str().unwrap_or("no reason");
        bail!("{base}{path}: {status}: {message}")
    }

    /// The same, as JSON.
    ///
    /// # Errors
    /// As there, and what is no JSON.
    pub(crate) async fn json(&self, path: &str) -> anyhow::Result<Value> {
        let body = self.get(path, "application/json").await?;
        let bytes = whole(body).await?;
        let base = &self.base;
        serde_json::from_slice(&bytes).with_context(|| format!("{base}{path} is no JSON"))
    }
}

async fn whole(body: Incoming) -> anyhow::Result<Bytes> {
    let read = timeout(ANSWER_MAX, Limited::new(body, PAGE_BYTES_MAX).collect()).await;
    let read = read.context("the server stopped in the middle of a page")?;
    Ok(read.map_err(|error| anyhow::anyhow!("{error}"))?.to_bytes())
}
