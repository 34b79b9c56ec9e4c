//! A process's ports from before its model is loaded until it serves.
//!
//! Owns: binding, and the answers until the model is loaded. Never serves. Invariant: a port that
//! cannot be bound, a certificate that cannot be read and a missing library are found before the
//! model is loaded; and no client waits at a bound port: every request gets 503 until the process
//! serves.

use crate::http::RouterPorts;
use crate::{NodeError, RouterOptions};
use axum::Router;
use axum::http::{HeaderMap, Uri};
use cleave_api::loading_answer;
use cleave_server::{HttpLimits, HttpServer, PortRoutes, ServerError, bind};
use cleave_telemetry::{ServiceProcess, Telemetry, TraceOptions};
use cleave_tls::{PeerTls, ServerTls};
use cleave_transfer::{Nixl, Transport};
use cleave_worker::WorkerOptions;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::{info, warn};

/// The pause after a connection that could not be accepted: the system is short of files or memory.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The ports of a fleet in one process, bound.
#[derive(Debug)]
pub struct FleetPorts {
    router: RouterPorts,
    telemetry: Telemetry,
    loading: LoadingServers,
}

impl FleetPorts {
    /// Reads the certificates and binds the ports. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Tls` or `Bind` if that cannot be done.
    pub async fn open(listen: &str, options: &RouterOptions) -> Result<Self, NodeError> {
        let router = RouterPorts::open(listen, options).await?;
        let service = ServiceProcess::fleet(router.front_port());
        let telemetry = Telemetry::with_traces(&options.traces, &service)?;
        let mut loading = LoadingServers::default();
        let certificate = router.tls().front;
        for listener in router.http() {
            loading.serve_unavailable(listener, certificate.as_ref(), &telemetry)?;
        }
        if let Some(listener) = router.external() {
            // Speaks HTTPS in any case.
            let own = match &certificate {
                Some(front) => front.clone(),
                None => ServerTls::self_signed()?.0,
            };
            loading.serve_unavailable(listener, Some(&own), &telemetry)?;
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
    /// If the system does not give it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        let mut listeners = self.router.http();
        let front = listeners.next().expect("a router has a front port");
        front.local_addr()
    }

    /// The address of the external metrics, if they are served.
    ///
    /// # Errors
    /// If the system does not give it.
    pub fn external_metrics_address(&self) -> io::Result<Option<SocketAddr>> {
        self.router
            .external()
            .map(TcpListener::local_addr)
            .transpose()
    }

    /// The ports, and the servers that answer on them until they are stopped.
    pub(crate) fn into_parts(self) -> (RouterPorts, Telemetry, LoadingServers) {
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
    /// NVIDIA's transfer library, if links may use it and it was found.
    pub(crate) nixl: Option<Arc<Nixl>>,
    pub(crate) data: TcpListener,
    pub(crate) data_address: SocketAddr,
    pub(crate) metrics: Option<TcpListener>,
    /// Closes connections to `data` until the worker runs.
    pub(crate) closing: JoinSet<()>,
    pub(crate) loading: LoadingServers,
}

impl WorkerPorts {
    /// Reads the certificates, loads the transfer library and binds the ports: `data_listen` for
    /// other workers, `metrics_listen` for operators. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Tls`, `Traces`, `Nixl` or `Bind` if that cannot be done.
    pub async fn open(
        data_listen: &str,
        metrics_listen: Option<&str>,
        options: &WorkerOptions,
        traces: &TraceOptions,
    ) -> Result<Self, NodeError> {
        let service = ServiceProcess::worker(&options.name, options.role);
        let telemetry = Telemetry::with_traces(traces, &service)?;
        let peers = options.peer_tls.as_deref().map(PeerTls::open).transpose()?;
        let nixl = nixl(options)?;
        let data = bind(data_listen).await?;
        let local = data.local_addr();
        let data_address =
            local.map_err(|error| ServerError::Bind(data_listen.to_owned(), error))?;
        let mut loading = LoadingServers::default();
        let metrics = match metrics_listen {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        if let Some(listener) = &metrics {
            loading.serve_unavailable(listener, None, &telemetry)?;
        }
        let handle = second_handle(&data);
        let handle = handle.map_err(|error| ServerError::Bind(data_listen.to_owned(), error))?;
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
    /// The address at which other workers will send blocks.
    pub fn data_address(&self) -> SocketAddr {
        self.data_address
    }
}

/// Closes every connection at once, so that a peer that dials too early notices and dials again.
async fn close_each(listener: TcpListener) {
    loop {
        if let Err(error) = listener.accept().await {
            warn!(%error, "cannot accept a connection");
            tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
        }
    }
}

/// Servers that answer every request with 503 while the model is loaded.
#[derive(Debug, Default)]
pub(crate) struct LoadingServers {
    servers: Vec<HttpServer>,
}

impl LoadingServers {
    /// Serves a second handle of the socket, so that the port stays bound when this ends.
    fn serve_unavailable(
        &mut self,
        listener: &TcpListener,
        certificate: Option<&ServerTls>,
        telemetry: &Telemetry,
    ) -> Result<(), NodeError> {
        let handle = second_handle(listener);
        let handle = handle.map_err(|error| ServerError::Bind("the listener".into(), error))?;
        let answer = async |uri: Uri, headers: HeaderMap| loading_answer(uri.path(), &headers);
        let routes = Router::new().fallback(answer);
        let faces = PortRoutes {
            secure: certificate.map(|tls| (tls.clone(), routes.clone())),
            ..PortRoutes::clear(routes)
        };
        let (limits, series) = (HttpLimits::default(), telemetry.servers.clone());
        let server = HttpServer::start(handle, faces, limits, series)?;
        self.servers.push(server);
        Ok(())
    }

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

/// Loads NVIDIA's transfer library, if links may use it; `None` if it is not there.
fn nixl(options: &WorkerOptions) -> Result<Option<Arc<Nixl>>, NodeError> {
    if !options.transports.contains(&Transport::Nixl) {
        return Ok(None);
    }
    if options.peer_tls.is_some() {
        warn!("--kv-transport nixl: blocks sent over NIXL are not encrypted, even with --peer-tls");
    }
    match Nixl::load(options.nixl_library.as_deref()) {
        Ok(nixl) => {
            let library = nixl.path().display();
            if nixl.uses_network_card() {
                info!(%library, "NIXL is loaded: blocks go by RDMA to hosts that have it")
            } else {
                warn!(
                    %library,
                    "NIXL: UCX_TLS allows transports without a network card: they are used where no card can be"
                )
            }
            Ok(Some(nixl))
        }
        Err(error) if options.transports.len() == 1 => Err(error.into()),
        Err(error) => {
            match options.nixl_library {
                Some(_) => warn!(%error, "NIXL not loaded: blocks go to other hosts over TCP"),
                None => info!(%error, "NIXL not loaded: blocks go to other hosts over TCP"),
            }
            Ok(None)
        }
    }
}
