//! Connections through a proxy, by the variables that other tools read.
//!
//! Owns: the choice between a direct connection, a tunnel and a proxy that forwards. Never: sends a
//! user's token to a proxy of an `https` address, which is asked for a tunnel alone.

use crate::error::HubError;
use hyper::Uri;
use hyper::header::HeaderValue;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::TcpStream;
use tower::Service;

/// The proxies, as the variables have them; an empty text is no proxy.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ProxySettings {
    /// `HTTP_PROXY`: `http://[user:password@]host:port`, for addresses of `http`.
    pub http: String,
    /// `HTTPS_PROXY`: for addresses of `https`.
    pub https: String,
    /// `ALL_PROXY`: for those that have none of their own.
    pub all: String,
    /// `NO_PROXY`: hosts, domains and networks that are asked directly, with commas between.
    pub none: String,
}

/// A proxy's address may have a password.
impl fmt::Debug for ProxySettings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ProxySettings")
    }
}

impl ProxySettings {
    /// Reads `variable`s by name: in lower case first, as curl and Python do.
    pub(crate) fn of(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let read = |name: &str| {
            let lower = variable(&name.to_lowercase());
            lower.or_else(|| variable(name)).unwrap_or_default()
        };
        Self {
            http: read("HTTP_PROXY"),
            https: read("HTTPS_PROXY"),
            all: read("ALL_PROXY"),
            none: read("NO_PROXY"),
        }
    }
}

/// Dials hosts, directly or through their proxy.
#[derive(Clone, Debug)]
pub(crate) struct ProxyConnector {
    direct: HttpConnector,
    matcher: Arc<Matcher>,
}

/// A connection to a host, or to the proxy that forwards requests to it.
pub(crate) struct HostStream {
    stream: TokioIo<TcpStream>,
    /// Whether requests name the whole address, because a proxy reads them.
    is_forwarded: bool,
}

type BoxError = Box<dyn Error + Send + Sync>;

impl ProxyConnector {
    pub(crate) fn new(mut direct: HttpConnector, settings: &ProxySettings) -> Self {
        direct.enforce_http(false);
        let matcher = Matcher::builder()
            .http(settings.http.as_str())
            .https(settings.https.as_str())
            .all(settings.all.as_str())
            .no(settings.none.as_str())
            .build();
        Self {
            direct,
            matcher: Arc::new(matcher),
        }
    }

    /// Returns the credentials that requests to this address carry because a proxy forwards them.
    ///
    /// # Errors
    /// If the proxy of this address is of a kind that is not spoken here.
    pub(crate) fn credentials(&self, at: &Uri) -> Result<Option<HeaderValue>, HubError> {
        let Some(proxy) = self.matcher.intercept(at) else {
            return Ok(None);
        };
        if proxy.uri().scheme_str() != Some("http") {
            return Err(HubError::Proxy {
                host: at.host().unwrap_or_default().to_owned(),
                scheme: proxy.uri().scheme_str().unwrap_or_default().to_owned(),
            });
        }
        let is_forwarded = at.scheme_str() == Some("http");
        let credentials = proxy.basic_auth().filter(|_| is_forwarded);
        Ok(credentials.cloned())
    }
}

impl Service<Uri> for ProxyConnector {
    type Response = HostStream;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<HostStream, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.direct.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, at: Uri) -> Self::Future {
        let mut direct = self.direct.clone();
        let proxy = self.matcher.intercept(&at);
        Box::pin(async move {
            let Some(proxy) = proxy else {
                return Ok(HostStream {
                    stream: direct.call(at).await?,
                    is_forwarded: false,
                });
            };
            let address = proxy.uri().clone();
            let through = |error: BoxError| -> BoxError {
                let host = address.host().unwrap_or_default();
                format!("through the proxy {host}: {}", deepest(&*error)).into()
            };
            if at.scheme_str() == Some("https") {
                let stream = tunnel(&proxy, direct).call(at).await;
                return Ok(HostStream {
                    stream: stream.map_err(|error| through(error.into()))?,
                    is_forwarded: false,
                });
            }
            let stream = direct.call(address.clone()).await;
            Ok(HostStream {
                stream: stream.map_err(|error| through(error.into()))?,
                is_forwarded: true,
            })
        })
    }
}

fn tunnel(proxy: &Intercept, direct: HttpConnector) -> Tunnel<HttpConnector> {
    let tunnel = Tunnel::new(proxy.uri().clone(), direct);
    match proxy.basic_auth() {
        Some(credentials) => tunnel.with_auth(credentials.clone()),
        None => tunnel,
    }
}

/// The last cause of an error, which says most.
pub(crate) fn deepest(error: &(dyn Error + 'static)) -> String {
    let mut deepest = error;
    while let Some(cause) = deepest.source() {
        deepest = cause;
    }
    deepest.to_string()
}

impl Connection for HostStream {
    fn connected(&self) -> Connected {
        self.stream.connected().proxy(self.is_forwarded)
    }
}

impl Read for HostStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl Write for HostStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
