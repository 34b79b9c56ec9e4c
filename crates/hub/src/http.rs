//! HTTP requests to the hub, and to the hosts that it redirects to.
//!
//! Owns: addresses, redirects, the token. Never: retries. Invariant: the token goes to the hub's
//! own scheme, host and port alone, and never after a redirect away from them.

use crate::error::HubError;
use crate::name::HubModel;
use crate::proxy::{ProxyConnector, deepest};
use crate::settings::{HubSettings, HubToken};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONTENT_RANGE, HeaderMap, LOCATION, PROXY_AUTHORIZATION, RANGE, RETRY_AFTER,
};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

const CONNECT_MAX: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 6;
/// Longest answer that is read at once: the listing of a repository.
const ANSWER_BYTES_MAX: usize = 64 << 20;
const AGENT: &str = concat!("cleave/", env!("CARGO_PKG_VERSION"));

type Connections = Client<cleave_tls::HttpsConnector<ProxyConnector>, Empty<Bytes>>;

/// The hub and the connections to it.
pub(crate) struct HubClient {
    endpoint: String,
    token: Option<HubToken>,
    silence_max: Duration,
    connector: ProxyConnector,
    authorities: Option<PathBuf>,
    plain: OnceLock<Connections>,
    secure: OnceLock<Connections>,
}

/// A request that gave nothing.
#[derive(Debug)]
pub(crate) enum RequestError {
    Passing(PassingFailure),
    Lasting(HubError),
}

/// A failure after which a later try may succeed.
#[derive(Debug)]
pub(crate) struct PassingFailure {
    pub(crate) reason: String,
    /// Wait that the hub asks for by `retry-after`.
    pub(crate) asked: Option<Duration>,
    pub(crate) stage: FailureStage,
}

/// How far a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureStage {
    /// No connection was made: a wrong name, or no network.
    Connecting,
    Connected,
}

/// Bytes that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteRange {
    All,
    /// From this byte to the end.
    From(u64),
}

/// Answers that a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Redirects {
    Followed,
    /// A redirect to another host is the answer, because its headers describe the file.
    FollowedOnHost,
}

impl HubClient {
    pub(crate) fn new(settings: &HubSettings) -> Self {
        let mut direct = HttpConnector::new();
        direct.set_nodelay(true);
        direct.set_connect_timeout(Some(CONNECT_MAX));
        Self {
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
            silence_max: settings.retry.silence_max,
            connector: ProxyConnector::new(direct, &settings.proxies),
            authorities: settings.authorities.clone(),
            plain: OnceLock::new(),
            secure: OnceLock::new(),
        }
    }

    /// Address of the listing of a revision, with sizes and checksums.
    pub(crate) fn listing_url(&self, model: &HubModel) -> String {
        let revision = escape(model.revision().as_str(), "");
        let Self { endpoint, .. } = self;
        let name = &model.name;
        format!("{endpoint}/api/models/{name}/revision/{revision}?blobs=true")
    }

    /// Address of a file of a commit.
    pub(crate) fn file_url(&self, model: &HubModel, commit: &str, file: &str) -> String {
        let Self { endpoint, .. } = self;
        let file = escape(file, "/");
        format!("{endpoint}/{}/resolve/{commit}/{file}", model.name)
    }

    /// The advice to a user whose connections to this address are not made.
    pub(crate) fn contact_remedy(&self, url: &str) -> String {
        let at = url.parse::<Uri>().unwrap_or_default();
        match self.connector.variable(&at) {
            Some(variable) => format!(
                "check {variable}, or name the hub in NO_PROXY if it can be reached without a proxy"
            ),
            None => {
                let scheme = at.scheme_str().unwrap_or("https").to_uppercase();
                format!("check the network and HF_ENDPOINT, and behind a proxy set {scheme}_PROXY")
            }
        }
    }

    /// Reads a whole answer.
    pub(crate) async fn read(&self, url: &str, model: &HubModel) -> Result<Bytes, RequestError> {
        let request = (Method::GET, ByteRange::All);
        let response = self.send(url, model, request, Redirects::Followed).await?;
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect();
        match tokio::time::timeout(2 * self.silence_max, body).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(error)) => Err(passing(error.to_string())),
            Err(_) => Err(passing("the answer takes too long".to_owned())),
        }
    }

    /// Reads the headers of a file, which has the checksum before any redirect to another host.
    pub(crate) async fn headers(
        &self,
        url: &str,
        model: &HubModel,
    ) -> Result<HeaderMap, RequestError> {
        let request = (Method::HEAD, ByteRange::All);
        let sent = self.send(url, model, request, Redirects::FollowedOnHost);
        Ok(sent.await?.into_parts().0.headers)
    }

    /// Begins to read a file. The answer may be the whole file, though a part was asked for.
    pub(crate) async fn open(
        &self,
        url: &str,
        model: &HubModel,
        range: ByteRange,
    ) -> Result<(ByteRange, Incoming), RequestError> {
        let request = (Method::GET, range);
        let response = self.send(url, model, request, Redirects::Followed).await?;
        let begin = match response.status() {
            StatusCode::PARTIAL_CONTENT => content_range_start(response.headers()),
            _ => Some(0),
        };
        match (range, begin) {
            (_, Some(0)) => Ok((ByteRange::All, response.into_body())),
            (ByteRange::From(from), Some(begin)) if from == begin => {
                Ok((range, response.into_body()))
            }
            _ => Err(passing("the answer is another part of the file".to_owned())),
        }
    }

    /// Sends a request and follows redirects.
    async fn send(
        &self,
        url: &str,
        model: &HubModel,
        request: (Method, ByteRange),
        redirects: Redirects,
    ) -> Result<Response<Incoming>, RequestError> {
        let (method, range) = request;
        let is_address = |at: &Uri| matches!(at.scheme_str(), Some("http" | "https"));
        let first = url.parse::<Uri>().ok().filter(is_address);
        let first = first.ok_or_else(|| {
            // Every other part of the address is escaped.
            let endpoint = self.endpoint.clone();
            RequestError::Lasting(HubError::Endpoint { endpoint })
        })?;
        let mut at = first.clone();
        let mut is_on_hub = true;
        for _ in 0..=REDIRECTS_MAX {
            let token = self.token.as_ref().filter(|_| is_on_hub);
            let response = self.send_once(&at, &method, range, token).await?;
            if !response.status().is_redirection() {
                return self.judge(response, url, model);
            }
            let next = target(&at, response.headers())
                .ok_or_else(|| answer(url, "a redirect without an address that can be followed"))?;
            let leaves = !same_origin(&first, &next);
            if leaves && redirects == Redirects::FollowedOnHost {
                return Ok(response);
            }
            if at.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                return Err(answer(url, "a redirect from https to http"));
            }
            is_on_hub &= !leaves;
            at = next;
        }
        Err(answer(url, "too many redirects"))
    }

    async fn send_once(
        &self,
        at: &Uri,
        method: &Method,
        range: ByteRange,
        token: Option<&HubToken>,
    ) -> Result<Response<Incoming>, RequestError> {
        let mut request = Request::builder()
            .method(method)
            .uri(at)
            .header("user-agent", AGENT);
        if let ByteRange::From(from) = range {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        let credentials = self.connector.credentials(at);
        if let Some(credentials) = credentials.map_err(RequestError::Lasting)? {
            request = request.header(PROXY_AUTHORIZATION, credentials);
        }
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token.header());
        }
        let request = request
            .body(Empty::new())
            .map_err(|error| answer(&at.to_string(), &error.to_string()))?;
        let sent = self.connections(at)?.request(request);
        match tokio::time::timeout(self.silence_max, sent).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(RequestError::Passing(PassingFailure {
                reason: deepest(&error),
                asked: None,
                stage: if error.is_connect() {
                    FailureStage::Connecting
                } else {
                    FailureStage::Connected
                },
            })),
            Err(_) => Err(passing("no answer".to_owned())),
        }
    }

    /// The connections of an address's scheme, made when they are first needed: the system's
    /// authorities are read for `https` alone.
    fn connections(&self, at: &Uri) -> Result<&Connections, RequestError> {
        let kept = match at.scheme_str() {
            Some("https") => &self.secure,
            Some("http") => &self.plain,
            _ => return Err(answer(&at.to_string(), "not an address of http or https")),
        };
        if let Some(connections) = kept.get() {
            return Ok(connections);
        }
        let (plain, authorities) = (self.connector.clone(), self.authorities.as_deref());
        let connector = cleave_tls::connector_over(plain, at, authorities)
            .map_err(|error| answer(&at.to_string(), &error.to_string()))?;
        Ok(kept.get_or_init(|| Client::builder(TokioExecutor::new()).build(connector)))
    }

    /// Takes an answer that is the file, or says why it is none.
    fn judge(
        &self,
        response: Response<Incoming>,
        url: &str,
        model: &HubModel,
    ) -> Result<Response<Incoming>, RequestError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let headers = response.headers();
        let is_passing = status.is_server_error()
            || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status);
        if is_passing {
            let asked = headers.get(RETRY_AFTER);
            let asked = asked.and_then(|value| value.to_str().ok()?.trim().parse().ok());
            return Err(RequestError::Passing(PassingFailure {
                reason: format!("the answer is {status}"),
                asked: asked.map(Duration::from_secs),
                stage: FailureStage::Connected,
            }));
        }
        let code = headers.get("x-error-code");
        let code = code.and_then(|value| value.to_str().ok());
        Err(RequestError::Lasting(
            self.refusal(status, code, url, model),
        ))
    }

    /// The reason of a lasting refusal, by its status and by the hub's own code.
    fn refusal(
        &self,
        status: StatusCode,
        code: Option<&str>,
        url: &str,
        model: &HubModel,
    ) -> HubError {
        let endpoint = self.endpoint.clone();
        let (name, model) = (model.name.clone(), model.clone());
        match (status.as_u16(), code) {
            (401 | 403, Some("GatedRepo")) => HubError::Gated { name, endpoint },
            // The hub hides a private model, and answers without a token as if it might exist.
            (401 | 404, Some("RepoNotFound")) => HubError::NoModel { model, endpoint },
            (404, Some("RevisionNotFound")) => HubError::NoRevision { model, endpoint },
            (404, Some("EntryNotFound")) => HubError::Answer {
                url: url.to_owned(),
                reason: "the hub lists this file, and does not have it".to_owned(),
            },
            (401, _) if self.token.is_none() => HubError::NoModel { model, endpoint },
            (401 | 403, _) if self.token.is_some() => HubError::Refused {
                name,
                endpoint,
                status: status.as_u16(),
            },
            (403, _) => HubError::Gated { name, endpoint },
            (404, _) if model.revision.is_none() => HubError::NoModel { model, endpoint },
            (404, _) => HubError::NoRevision { model, endpoint },
            _ => HubError::Answer {
                url: url.to_owned(),
                reason: format!("the answer is {status}"),
            },
        }
    }
}

pub(crate) fn passing(reason: String) -> RequestError {
    RequestError::Passing(PassingFailure {
        reason,
        asked: None,
        stage: FailureStage::Connected,
    })
}

pub(crate) fn answer(url: &str, reason: &str) -> RequestError {
    RequestError::Lasting(HubError::Answer {
        url: url.to_owned(),
        reason: reason.to_owned(),
    })
}

fn same_origin(a: &Uri, b: &Uri) -> bool {
    let host = |uri: &Uri| uri.host().map(str::to_ascii_lowercase);
    (a.scheme(), host(a), port(a)) == (b.scheme(), host(b), port(b))
}

fn port(uri: &Uri) -> u16 {
    let usual = if uri.scheme_str() == Some("https") {
        443
    } else {
        80
    };
    uri.port_u16().unwrap_or(usual)
}

/// The address that a redirect leads to.
fn target(at: &Uri, headers: &HeaderMap) -> Option<Uri> {
    let text = headers.get(LOCATION)?.to_str().ok()?;
    // Signed addresses of object stores have characters that `Uri` takes as they are.
    let (scheme, authority) = (at.scheme_str()?, at.authority()?);
    let absolute = if text.starts_with("//") {
        format!("{scheme}:{text}")
    } else if text.starts_with('/') {
        format!("{scheme}://{authority}{text}")
    } else {
        text.to_owned()
    };
    let next: Uri = absolute.parse().ok()?;
    next.scheme()?;
    next.host()?;
    Some(next)
}

/// First byte of a `content-range: bytes FIRST-LAST/ALL`.
fn content_range_start(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let range = text.trim().strip_prefix("bytes")?.trim_start();
    range.split('-').next()?.parse().ok()
}

/// Escapes all characters but letters, digits, `-._~` and `plain` ones.
fn escape(text: &str, plain: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "-._~".contains(c) || plain.contains(c) {
            out.push(c);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn redirected(at: &str, location: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(LOCATION, location.parse().unwrap());
        target(&at.parse().unwrap(), &headers).map(|uri| uri.to_string())
    }

    #[test]
    fn redirects_are_read_as_browsers_read_them() {
        let at = "https://hub:444/a/b?c";
        for (location, expected) in [
            ("/x?y=1", Some("https://hub:444/x?y=1")),
            ("//cdn/x", Some("https://cdn/x")),
            ("http://cdn:1/x", Some("http://cdn:1/x")),
            ("x", None),
        ] {
            assert_eq!(redirected(at, location).as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a: &str, b: &str| same_origin(&a.parse().unwrap(), &b.parse().unwrap());
        assert!(same("https://Hub/a", "https://hub:443/b"));
        for other in ["http://hub/a", "https://hub:444/a", "https://hub.evil/a"] {
            assert!(!same("https://hub/a", other), "{other}");
        }
    }

    #[test]
    fn revisions_and_files_are_escaped() {
        assert_eq!(escape("refs/pr/1", ""), "refs%2Fpr%2F1");
        assert_eq!(
            escape("1_Pooling/a b?.json", "/"),
            "1_Pooling/a%20b%3F.json"
        );
    }
}
