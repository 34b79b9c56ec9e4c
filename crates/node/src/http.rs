//! What each port serves: one for HTTP and gRPC, perhaps one for operators, and a worker's own small one.

use crate::door::RouterDoor;
use crate::grpc::{ModelDesk, fleet_service};
use crate::health::Pulse;
use crate::scaling::{Answers, scaler_service};
use crate::server::{Faces, Server, bind, fit};
use crate::telemetry::Telemetry;
use crate::{NodeError, RouterOptions};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use cleave_api::{AdminKey, App, Operator, admin_routes, metrics_answer};
use cleave_tls::{FrontTls, PeerTls};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Where workers say what they have to say.
const FLEET: &str = "/cleave.fleet.v1.Fleet/{*method}";
/// Where KEDA asks how many workers are wanted.
const SCALER: &str = "/externalscaler.ExternalScaler/{*method}";

/// A router's ports, bound and with their certificates read, before anything is served.
#[derive(Debug)]
pub(crate) struct RouterPorts {
    front: TcpListener,
    /// For operators, if they have a port of their own.
    admin: Option<TcpListener>,
    /// For Kubernetes' external metrics, if they are asked for.
    external: Option<TcpListener>,
    certificate: Option<FrontTls>,
    peers: Option<PeerTls>,
}

/// The certificates that a router has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trust {
    /// What clients are shown, if they speak TLS.
    pub(crate) front: Option<FrontTls>,
    /// How the fleet's processes know each other, if they do.
    pub(crate) peers: Option<PeerTls>,
}

/// A router's ports, served.
#[derive(Debug)]
pub(crate) struct RouterServers {
    pub(crate) front: Server,
    pub(crate) admin: Option<Server>,
    /// Follow the certificates' files.
    follow: JoinSet<()>,
}

impl RouterPorts {
    /// At which it would be asked how much it has.
    pub(crate) fn numbers(&self) -> Vec<u16> {
        let bound = [Some(&self.front), self.admin.as_ref()];
        let addresses = bound.into_iter().flatten().map(TcpListener::local_addr);
        addresses.flatten().map(|address| address.port()).collect()
    }

    /// Reads the certificates first: whoever has none of use binds nothing.
    pub(crate) async fn open(listen: &str, options: &RouterOptions) -> Result<Self, NodeError> {
        let certificate = options.certificate.as_ref().map(FrontTls::open);
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

    /// Where it speaks HTTP: for clients and workers, then for operators.
    pub(crate) fn http(&self) -> impl Iterator<Item = &TcpListener> {
        std::iter::once(&self.front).chain(&self.admin)
    }

    /// The port of the external metrics, if it is not taken yet.
    pub(crate) fn external(&self) -> Option<&TcpListener> {
        self.external.as_ref()
    }

    /// The port of the external metrics, once.
    pub(crate) fn take_external(&mut self) -> Option<TcpListener> {
        self.external.take()
    }

    /// By what its other ports and questions are secured.
    pub(crate) fn trust(&self) -> Trust {
        Trust {
            front: self.certificate.clone(),
            peers: self.peers.clone(),
        }
    }

    /// Serves clients, workers and operators.
    pub(crate) fn serve(
        self,
        app: &App,
        (fleet, answers): ((RouterDoor, ModelDesk), Answers),
        (options, telemetry): (&RouterOptions, &Telemetry),
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
        let clients = clients.route_service(SCALER, scaler_service(answers));
        let limits = fit(options.http);
        let terms = || (limits, telemetry.servers.clone());
        let operators = admin.map(|listener| {
            let faces = Faces {
                clear: app.operator_router(),
                secure: certificate.clone().map(|tls| (tls, app.operator_router())),
                peers: peers.clone().map(|tls| (tls, app.fellow_router())),
            };
            Server::start(listener, faces, terms())
        });
        let peers = peers.map(|tls| (tls, app.fellow_router()));
        let faces = front_faces(clients, fleet_routes(fleet), (certificate, peers));
        Ok(RouterServers {
            front: Server::start(front, faces, terms())?,
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

fn fleet_routes((door, desk): (RouterDoor, ModelDesk)) -> Router {
    Router::new().route_service(FLEET, fleet_service(door, desk))
}

/// Who may say what: clients speak TLS where there is a certificate, workers and other routers where peers have one,
/// and what is said in clear is heard only as far as neither is so.
fn front_faces(
    clients: Router,
    fleet: Router,
    (certificate, peers): (Option<FrontTls>, Option<(PeerTls, Router)>),
) -> Faces {
    let stranger = Router::new().route(FLEET, any(async || no_stranger()));
    let clear = match certificate {
        None => clients.clone(),
        Some(_) => Router::new().fallback(async || no_https()),
    };
    let clear = clear.merge(match peers {
        None => fleet.clone(),
        Some(_) => stranger.clone(),
    });
    Faces {
        clear,
        secure: certificate.map(|tls| (tls, clients.merge(stranger))),
        peers: peers.map(|(tls, fellows)| (tls, fleet.merge(fellows))),
    }
}

/// Workers that do not show who they are are told so in their own words.
fn no_stranger() -> Response {
    let reason = "this router takes workers only by mutual TLS: start the worker with --peer-tls";
    tonic::Status::permission_denied(reason).into_http::<Body>()
}

fn no_https() -> Response {
    (StatusCode::BAD_REQUEST, "This port speaks HTTPS.\n").into_response()
}

/// What a worker process says of itself.
#[derive(Clone)]
pub(crate) struct WorkerFace {
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) telemetry: Telemetry,
    pub(crate) connected: watch::Receiver<usize>,
    pub(crate) operator: Arc<dyn Operator>,
    pub(crate) admin_key: Option<AdminKey>,
}

/// `/metrics`, `/health`, `/ready` and `/admin` of a worker process.
pub(crate) fn worker_routes(face: WorkerFace) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .merge(admin_routes(Arc::clone(&face.operator), face.admin_key))
        .with_state(face)
}

async fn metrics(State(face): State<WorkerFace>, headers: HeaderMap) -> Response {
    metrics_answer(&headers, face.telemetry.text())
}

async fn health(State(face): State<WorkerFace>) -> Response {
    match face.pulse.check() {
        Ok(()) => StatusCode::OK.into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
    }
}

async fn ready(State(face): State<WorkerFace>) -> Response {
    let unhealthy = face.pulse.check().err();
    let alone = (*face.connected.borrow() == 0).then(|| "no router is connected".to_owned());
    match unhealthy.or(alone) {
        None => StatusCode::OK.into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
    }
}
