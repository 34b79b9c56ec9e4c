//! One port for HTTP and gRPC, and a worker's own small one.

use crate::NodeError;
use crate::door::RouterDoor;
use crate::grpc::{ModelDesk, fleet_service};
use crate::health::Pulse;
use crate::scaling::{Answers, scaler_service};
use crate::telemetry::Telemetry;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::ListenerExt;
use cleave_api::{AdminKey, App, Operator, admin_routes, metrics_answer};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tracing::{debug, error};

/// How long answers under way may take to leave when the server stops.
const FLUSH_MAX: Duration = Duration::from_secs(2);

/// Everything a router serves: workers find it under the address that clients use.
pub(crate) fn router_routes(
    app: &App,
    (door, desk): (RouterDoor, ModelDesk),
    answers: Answers,
) -> Router {
    let fleet = fleet_service(door, desk);
    app.router()
        .route_service("/cleave.fleet.v1.Fleet/{*method}", fleet)
        .route_service(
            "/externalscaler.ExternalScaler/{*method}",
            scaler_service(answers),
        )
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

/// A listener bound to `address`.
pub(crate) async fn bind(address: &str) -> Result<TcpListener, NodeError> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| NodeError::Bind(address.to_owned(), error))
}

/// A server that runs.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Server {
    /// Serves HTTP/1.1 and HTTP/2 in clear text, whichever the client speaks.
    pub(crate) fn start(listener: TcpListener, routes: Router) -> Result<Self, NodeError> {
        let local = listener.local_addr();
        let address = local.map_err(|error| NodeError::Bind("the listener".into(), error))?;
        let listener = listener.tap_io(|stream| {
            // Tokens are small and wait for nothing.
            if let Err(error) = stream.set_nodelay(true) {
                debug!(%error, "cannot set TCP_NODELAY");
            }
        });
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let stopped = async move {
                // A dropped server stops too.
                let _ = stopped.await;
            };
            // The gate before `/admin` asks who is there.
            let service = routes.into_make_service_with_connect_info::<SocketAddr>();
            let served = axum::serve(listener, service).with_graceful_shutdown(stopped);
            if let Err(error) = served.await {
                error!(%error, "the HTTP server ended");
            }
        });
        Ok(Self {
            address,
            stop,
            task,
        })
    }

    /// Takes no new connection, lets answers leave for a moment, then closes.
    pub(crate) async fn stop(mut self) {
        // The server may have ended by itself.
        let _ = self.stop.send(());
        if tokio::time::timeout(FLUSH_MAX, &mut self.task)
            .await
            .is_err()
        {
            self.task.abort();
        }
    }
}
