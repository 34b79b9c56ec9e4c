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

/// The proxies, as the variables have them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxySettings {
    /// `HTTP_PROXY`: for addresses of `http`.
    pub http: ProxyVariable,
    /// `HTTPS_PROXY`: for addresses of `https`.
    pub https: ProxyVariable,
    /// `ALL_PROXY`: for those that have none of their own.
    pub all: ProxyVariable,
    /// `NO_PROXY`: hosts, domains and networks that are asked directly, with commas between.
    pub none: String,
}

/// A variable that names a proxy.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ProxyVariable {
    /// Its name as it was set, in upper or lower case.
    pub name: String,
    /// `http://[user:password@]host:port`; an empty text is no proxy.
    pub address: String,
}

/// A proxy's address may have a password.
impl fmt::Debug for ProxyVariable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.name)
    }
}

impl ProxySettings {
    /// Reads `variable`s by name: in lower case first, as curl and Python do.
    pub(crate) fn of(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let read = |name: &str| {
            let names = [name.to_lowercase(), name.to_owned()];
            let mut set = names.into_iter().filter_map(|name| {
                let address = variable(&name)?;
                Some(ProxyVariable { name, address })
            });
            set.next().unwrap_or_default()
        };
        Self {
            http: read("HTTP_PROXY"),
            https: read("HTTPS_PROXY"),
            all: read("ALL_PROXY"),
            none: read("NO_PROXY").address,
        }
    }
}

/// Dials hosts, directly or through their proxy.
#[derive(Clone, Debug)]
pub(crate) struct ProxyConnector {
    direct: HttpConnector,
    /// The name of each variable with the addresses that its proxy is for; the first that matches
    /// counts.
    variables: Arc<[(String, Matcher)]>,
}

/// The proxy of an address.
struct ChosenProxy {
    /// The variable that names it.
    variable: String,
    intercept: Intercept,
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
        let ProxySettings {
            http,
            https,
            all,
            none,
        } = settings;
        let rules = || Matcher::builder().no(none.as_str());
        let variables = [
            (http, rules().http(http.address.as_str())),
            (https, rules().https(https.address.as_str())),
            (all, rules().all(all.address.as_str())),
        ];
        let variables = variables.map(|(variable, rules)| (variable.name.clone(), rules.build()));
        Self {
            direct,
            variables: Arc::new(variables),
        }
    }

    fn proxy(&self, at: &Uri) -> Option<ChosenProxy> {
        let mut chosen = self.variables.iter().filter_map(|(variable, matcher)| {
            let intercept = matcher.intercept(at)?;
            Some(ChosenProxy {
                variable: variable.clone(),
                intercept,
            })
        });
        chosen.next()
    }

    /// The variable that names the proxy of this address, if there is one.
    pub(crate) fn variable(&self, at: &Uri) -> Option<String> {
        self.proxy(at).map(|proxy| proxy.variable)
    }

    /// Returns the credentials that requests to this address carry because a proxy forwards them.
    ///
    /// # Errors
    /// If the proxy of this address is of a kind that is not spoken here.
    pub(crate) fn credentials(&self, at: &Uri) -> Result<Option<HeaderValue>, HubError> {
        let Some(ChosenProxy {
            variable,
            intercept,
        }) = self.proxy(at)
        else {
            return Ok(None);
        };
        if intercept.uri().scheme_str() != Some("http") {
            return Err(HubError::Proxy {
                host: at.host().unwrap_or_default().to_owned(),
                scheme: intercept.uri().scheme_str().unwrap_or_default().to_owned(),
                variable,
            });
        }
        let is_forwarded = at.scheme_str() == Some("http");
        let credentials = intercept.basic_auth().filter(|_| is_forwarded);
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
        let proxy = self.proxy(&at);
        Box::pin(async move {
            let Some(proxy) = proxy else {
                return Ok(HostStream {
                    stream: direct.call(at).await?,
                    is_forwarded: false,
                });
            };
            let address = proxy.intercept.uri().clone();
            let through = |error: BoxError| -> BoxError {
                let host = address.host().unwrap_or_default();
                let port = address.port_u16().unwrap_or(80);
                let (variable, reason) = (&proxy.variable, deepest(&*error));
                format!("through the proxy {host}:{port} of {variable}: {reason}").into()
            };
            if at.scheme_str() == Some("https") {
                let stream = tunnel(&proxy.intercept, direct).call(at).await;
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
