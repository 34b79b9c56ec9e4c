//! The routes of each port: a router's for HTTP and gRPC, the operators' if they have one, and a
//! worker's own.

use crate::{NodeError, RouterOptions};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use cleave_api::{AdminKey, App, Operator, admin_routes, metrics_answer, with_compression};
use cleave_fleet::{
    HealthMonitor, RouterAcceptor, RouterConnections, ScalingStatusReader, fleet_routes,
};
use cleave_gateway::ModelRegistry;
use cleave_kubernetes::scaler_routes;
use cleave_server::{HttpServer, PortRoutes, RouterTls, bind, fit_to_open_files};
use cleave_telemetry::Telemetry;
use cleave_tls::{PeerTls, ServerTls};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The path of the gRPC service for workers.
const FLEET: &str = "/cleave.fleet.v1.Fleet/{*method}";
/// The path of KEDA's external scaler.
const SCALER: &str = "/externalscaler.ExternalScaler/{*method}";

/// A router's ports, bound and with their certificates read, before anything is served.
#[derive(Debug)]
pub(crate) struct RouterPorts {
    front: TcpListener,
    /// The operators' port, if they have one of their own.
    admin: Option<TcpListener>,
    /// The port of Kubernetes' external metrics, if enabled.
    external: Option<TcpListener>,
    certificate: Option<ServerTls>,
    peers: Option<PeerTls>,
}

/// A router's ports, served.
#[derive(Debug)]
pub(crate) struct RouterServers {
    pub(crate) front: HttpServer,
    pub(crate) admin: Option<HttpServer>,
    /// Tasks that follow the certificates' files.
    follow: JoinSet<()>,
}

impl RouterPorts {
    /// The port numbers at which this router answers `/load`.
    pub(crate) fn port_numbers(&self) -> Vec<u16> {
        let bound = [Some(&self.front), self.admin.as_ref()];
        let addresses = bound.into_iter().flatten().map(TcpListener::local_addr);
        addresses.flatten().map(|address| address.port()).collect()
    }

    /// The number of the port for clients; 0 if the system does not give it.
    pub(crate) fn front_port(&self) -> u16 {
        self.front.local_addr().map_or(0, |address| address.port())
    }

    /// Reads the certificates before it binds a port.
    pub(crate) async fn open(listen: &str, options: &RouterOptions) -> Result<Self, NodeError> {
        let certificate = options.certificate.as_ref().map(ServerTls::open);
        let peers = options.peer_tls.as_deref().map(PeerTls::open);
        let (certificate, peers) = (certificate.transpose()?, peers.transpose()?);
        let front = bind(listen).await?;
        let admin = match &options.admin_listen {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        let external = match &options.external_metrics_listen {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        Ok(Self {
            front,
            admin,
            external,
            certificate,
            peers,
        })
    }

    /// The ports that speak HTTP: for clients and workers, then for operators.
    pub(crate) fn http(&self) -> impl Iterator<Item = &TcpListener> {
        std::iter::once(&self.front).chain(&self.admin)
    }

    /// The port of the external metrics, if it is not taken yet.
    pub(crate) fn external(&self) -> Option<&TcpListener> {
        self.external.as_ref()
    }

    /// Takes the port of the external metrics, once.
    pub(crate) fn take_external(&mut self) -> Option<TcpListener> {
        self.external.take()
    }

    /// The certificates for its other ports and for its requests to other routers.
    pub(crate) fn tls(&self) -> RouterTls {
        RouterTls {
            front: self.certificate.clone(),
            peers: self.peers.clone(),
        }
    }

    /// Serves clients, workers and operators.
    pub(crate) fn serve(
        self,
        app: &App,
        acceptor: RouterAcceptor,
        registry: ModelRegistry,
        scaling: ScalingStatusReader,
        options: &RouterOptions,
        telemetry: &Telemetry,
    ) -> Result<RouterServers, NodeError> {
        let Self {
            front,
            admin,
            external: _,
            certificate,
            peers,
        } = self;
        let mut follow = JoinSet::new();
        if let Some(tls) = certificate.clone() {
            follow.spawn(tls.follow());
        }
        if let Some(tls) = peers.clone() {
            follow.spawn(tls.follow());
        }
        let clients = match admin {
            None => app.router(),
            Some(_) => app.client_router(),
        };
        let clients = clients.merge(scaler_routes(SCALER, scaling));
        let limits = fit_to_open_files(options.http);
        let series = || telemetry.servers.clone();
        let operators = admin.map(|listener| {
            let faces = PortRoutes {
                clear: app.operator_router(),
                secure: certificate.clone().map(|tls| (tls, app.operator_router())),
                peers: peers.clone().map(|tls| (tls, app.fellow_router())),
            };
            HttpServer::start(listener, faces, limits, series())
        });
        let peers = peers.map(|tls| (tls, app.fellow_router()));
        let faces = front_routes(
            clients,
            fleet_routes(FLEET, acceptor, registry),
            certificate,
            peers,
        );
        Ok(RouterServers {
            front: HttpServer::start(front, faces, limits, series())?,
            admin: operators.transpose()?,
            follow,
        })
    }
}

impl RouterServers {
    /// Takes no new connection, lets answers leave for a moment, then closes.
    pub(crate) async fn stop(self) {
        let Self {
            front,
            admin,
            follow,
        } = self;
        drop(follow);
        front.stop().await;
        if let Some(admin) = admin {
            admin.stop().await;
        }
    }
}

/// The front port's routes by kind of connection. With a certificate clients must use TLS, and with
/// peer certificates workers and other routers must show one; connections without TLS get only the
/// routes that are left.
fn front_routes(
    clients: Router,
    fleet: Router,
    certificate: Option<ServerTls>,
    peers: Option<(PeerTls, Router)>,
) -> PortRoutes {
    let stranger = Router::new().route(FLEET, any(async || peer_tls_required()));
    let clear = match certificate {
        None => clients.clone(),
        Some(_) => Router::new().fallback(async || https_required()),
    };
    let clear = clear.merge(match peers {
        None => fleet.clone(),
        Some(_) => stranger.clone(),
    });
    PortRoutes {
        clear,
        secure: certificate.map(|tls| (tls, clients.merge(stranger))),
        peers: peers.map(|(tls, fellows)| (tls, fleet.merge(fellows))),
    }
}

/// Tells a worker without a certificate, by a gRPC status, why it is refused.
fn peer_tls_required() -> Response {
    let reason = "this router takes workers only by mutual TLS: start the worker with --peer-tls";
    tonic::Status::permission_denied(reason).into_http::<Body>()
}

fn https_required() -> Response {
    (StatusCode::BAD_REQUEST, "This port speaks HTTPS.\n").into_response()
}

/// The state behind a worker's own HTTP port.
#[derive(Clone)]
pub(crate) struct WorkerHttpState {
    pub(crate) monitor: Arc<HealthMonitor>,
    pub(crate) telemetry: Telemetry,
    pub(crate) connections: watch::Receiver<RouterConnections>,
    pub(crate) operator: Arc<dyn Operator>,
    pub(crate) admin_key: Option<AdminKey>,
}

/// `/metrics`, `/health`, `/ready` and `/admin` of a worker process.
pub(crate) fn worker_routes(face: WorkerHttpState) -> Router {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .merge(admin_routes(Arc::clone(&face.operator), face.admin_key))
        .with_state(face);
    with_compression(routes)
}

async fn metrics(State(face): State<WorkerHttpState>, headers: HeaderMap) -> Response {
    metrics_answer(&headers, face.telemetry.text())
}

async fn health(State(face): State<WorkerHttpState>) -> Response {
    match face.monitor.check() {
        Ok(()) => StatusCode::OK.into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
    }
}

async fn ready(State(face): State<WorkerHttpState>) -> Response {
    let unhealthy = face.monitor.check().err();
    match unhealthy.or_else(|| alone_reason(&face.connections.borrow())) {
        None => StatusCode::OK.into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
    }
}

/// The reason why a worker without a router is not ready; `None` with one.
fn alone_reason(connections: &RouterConnections) -> Option<String> {
    if connections.count > 0 {
        return None;
    }
    let reason = "no router is connected";
    Some(match &connections.last_failure {
        Some(failure) => format!("{reason}; {failure}"),
        None => reason.to_owned(),
    })
}
