//! A process's ports from before its model is loaded until it serves.
//!
//! Owns: binding, and what is answered meanwhile. Never: serves. Invariant: an address that cannot be
//! had, a certificate that cannot be read and a library that is not there are found before anything
//! is loaded; and on a port that is bound nobody waits: every request is answered 503 until the process
//! serves.

use crate::http::RouterPorts;
use crate::server::{Faces, HttpLimits, Server, bind};
use crate::telemetry::Telemetry;
use crate::trace::TraceOptions;
use crate::{NodeError, RouterOptions, WorkerOptions};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use cleave_tls::{FrontTls, PeerTls};
use cleave_transfer::{Nixl, Transport};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::{info, warn};

/// Pause after a connection that could not be taken: files or memory are short.
const SHORTAGE: Duration = Duration::from_millis(100);

/// The ports of a fleet in one process, bound.
#[derive(Debug)]
pub struct ServePorts {
    router: RouterPorts,
    telemetry: Telemetry,
    loading: Loading,
}

impl ServePorts {
    /// Reads the certificates and binds the ports. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Tls` or `Bind` if that cannot be done.
    pub async fn open(listen: &str, options: &RouterOptions) -> Result<Self, NodeError> {
        let telemetry = Telemetry::with_traces(&options.traces)?;
        let router = RouterPorts::open(listen, options).await?;
        let mut loading = Loading::default();
        let certificate = router.trust().front;
        for listener in router.http() {
            loading.answer(listener, certificate.as_ref(), &telemetry)?;
        }
        if let Some(listener) = router.external() {
            // Speaks HTTPS in any case.
            let own = match &certificate {
                Some(front) => front.clone(),
                None => FrontTls::self_signed()?.0,
            };
            loading.answer(listener, Some(&own), &telemetry)?;
        }
        Ok(Self {
            router,
            telemetry,
            loading,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        let mut listeners = self.router.http();
        let front = listeners.next().expect("a router has a front port");
        front.local_addr()
    }

    /// Where the external metrics will be, if anywhere.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn external_metrics_address(&self) -> io::Result<Option<SocketAddr>> {
        self.router
            .external()
            .map(TcpListener::local_addr)
            .transpose()
    }

    /// The ports, and the servers that answer on them until they are stopped.
    pub(crate) fn take(self) -> (RouterPorts, Telemetry, Loading) {
        let Self {
            router,
            telemetry,
            loading,
        } = self;
        (router, telemetry, loading)
    }
}

/// A worker's ports, bound.
#[derive(Debug)]
pub struct WorkerPorts {
    pub(crate) telemetry: Telemetry,
    pub(crate) peers: Option<PeerTls>,
    /// NVIDIA's transfer library, if links may go over it and it is there.
    pub(crate) nixl: Option<Arc<Nixl>>,
    pub(crate) data: TcpListener,
    pub(crate) data_address: SocketAddr,
    pub(crate) metrics: Option<TcpListener>,
    /// Closes what comes to `data`.
    pub(crate) closing: JoinSet<()>,
    pub(crate) loading: Loading,
}

impl WorkerPorts {
    /// Reads the certificates, loads the transfer library and binds the ports: `data_listen` for other
    /// workers, `metrics_listen` for operators. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Tls`, `Trace`, `Nixl` or `Bind` if that cannot be done.
    pub async fn open(
        data_listen: &str,
        metrics_listen: Option<&str>,
        options: &WorkerOptions,
        traces: &TraceOptions,
    ) -> Result<Self, NodeError> {
        let telemetry = Telemetry::with_traces(traces)?;
        let peers = options.peer_tls.as_deref().map(PeerTls::open).transpose()?;
        let nixl = nixl(options)?;
        let data = bind(data_listen).await?;
        let local = data.local_addr();
        let data_address = local.map_err(|error| NodeError::Bind(data_listen.to_owned(), error))?;
        let mut loading = Loading::default();
        let metrics = match metrics_listen {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        if let Some(listener) = &metrics {
            loading.answer(listener, None, &telemetry)?;
        }
        let handle = second_handle(&data);
        let handle = handle.map_err(|error| NodeError::Bind(data_listen.to_owned(), error))?;
        let mut closing = JoinSet::new();
        closing.spawn(close_each(handle));
        Ok(Self {
            telemetry,
            peers,
            nixl,
            data,
            data_address,
            metrics,
            closing,
            loading,
        })
    }
}

impl WorkerPorts {
    /// Where other workers will send blocks to.
    pub fn data_address(&self) -> SocketAddr {
        self.data_address
    }
}

/// Closes every connection, so that a peer that dials too early learns it at once and dials again.
async fn close_each(listener: TcpListener) {
    loop {
        if let Err(error) = listener.accept().await {
            warn!(%error, "cannot take a connection");
            tokio::time::sleep(SHORTAGE).await;
        }
    }
}

/// Servers that say that the model is being loaded.
#[derive(Debug, Default)]
pub(crate) struct Loading {
    servers: Vec<Server>,
}

impl Loading {
    /// Serves a second handle of the socket, so that the port stays bound when this ends.
    fn answer(
        &mut self,
        listener: &TcpListener,
        certificate: Option<&FrontTls>,
        telemetry: &Telemetry,
    ) -> Result<(), NodeError> {
        let handle = second_handle(listener);
        let handle = handle.map_err(|error| NodeError::Bind("the listener".into(), error))?;
        let routes = Router::new().fallback(async || not_yet());
        let faces = Faces {
            secure: certificate.map(|tls| (tls.clone(), routes.clone())),
            ..Faces::clear(routes)
        };
        let terms = (HttpLimits::default(), telemetry.servers.clone());
        self.servers.push(Server::start(handle, faces, terms)?);
        Ok(())
    }

    /// Ends the answers.
    pub(crate) async fn stop(self) {
        for server in self.servers {
            server.stop().await;
        }
    }
}

fn second_handle(listener: &TcpListener) -> io::Result<TcpListener> {
    use std::os::fd::AsFd;
    let handle = listener.as_fd().try_clone_to_owned()?;
    TcpListener::from_std(std::net::TcpListener::from(handle))
}

fn not_yet() -> Response {
    let text = r#"{"error":{"message":"The model is being loaded.","type":"service_unavailable_error","param":null,"code":"loading"}}"#;
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::RETRY_AFTER, "1"),
        (header::CONNECTION, "close"),
    ];
    (StatusCode::SERVICE_UNAVAILABLE, headers, text).into_response()
}

/// NVIDIA's transfer library, where links may go over it and it is there.
fn nixl(options: &WorkerOptions) -> Result<Option<Arc<Nixl>>, NodeError> {
    if !options.transports.contains(&Transport::Nixl) {
        return Ok(None);
    }
    if options.peer_tls.is_some() {
        warn!(
            "--kv-transport nixl: blocks go in clear where they go by NIXL, whatever --peer-tls says"
        );
    }
    match Nixl::load(options.nixl_library.as_deref()) {
        Ok(nixl) => {
            let library = nixl.path().display();
            match nixl.is_by_card() {
                true => info!(%library, "NIXL: blocks go by RDMA to hosts that have it, too"),
                false => warn!(
                    %library,
                    "NIXL: UCX_TLS names ways that are no network card's: they are taken where nothing else is left"
                ),
            }
            Ok(Some(nixl))
        }
        Err(error) if options.transports.len() == 1 => Err(error.into()),
        Err(error) => {
            match options.nixl_library {
                Some(_) => warn!(%error, "no NIXL: blocks go to other hosts over TCP"),
                None => info!(%error, "no NIXL: blocks go to other hosts over TCP"),
            }
            Ok(None)
        }
    }
}
