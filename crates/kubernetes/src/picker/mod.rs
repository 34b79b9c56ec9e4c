//! The endpoint picker: chooses a router for each request of a gateway's proxy.
//!
//! Owns: Envoy's external-processing service as the Gateway API Inference Extension uses it
//! (endpoint-picker protocol 1.0.0), its health, and the known state of the routers. Never chooses
//! workers: the chosen router's brain does. Invariant: only an endpoint that was ready at its last
//! poll is named, and of a subset that the proxy gave only a member.
//!
//! Every router may be a picker: it polls the routers themselves, so that there is no leader and
//! nothing to agree on.

mod choose;
mod conversation;
mod endpoints;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod pick_request;
#[cfg(test)]
mod tests;

/// Types that the build generates from Envoy's protocol.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::needless_pass_by_value,
    clippy::large_enum_variant,
    clippy::enum_variant_names,
    clippy::doc_markdown
)]
mod proto {
    tonic::include_proto!("envoy.service.ext_proc.v3");
}

use crate::KubernetesError;
use axum::Router;
use axum::body::Body;
use cleave_server::{HttpLimits, HttpServer, PeerRouterClient, PortRoutes, RouterTls, bind};
use cleave_telemetry::{PickerSeries, Telemetry};
use cleave_tls::ServerTls;
use conversation::ExtProcConversation;
use endpoints::{PickerEndpoints, StatusProbe};
use proto::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use proto::{ProcessingRequest, ProcessingResponse};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// Answers of one conversation that wait for the proxy.
const STREAM_ITEMS_MAX: usize = 64;
/// The services whose health proxies and gateways ask for.
const SERVICE: &str = "envoy.service.ext_proc.v3.ExternalProcessor";
const LIVENESS: &str = "liveness";
const READINESS: &str = "readiness";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickerOptions {
    /// `host:port` for the proxy's gRPC.
    pub listen: String,
    /// TLS on the proxy's connections.
    pub tls: ProxyTls,
    /// `host:port` of the routers; a name stands for all its addresses, looked up again and again.
    pub endpoints: Vec<String>,
    /// The port at which each router is polled. Default the port of requests.
    pub admin_port: Option<u16>,
}

/// TLS between a proxy and a picker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyTls {
    /// TLS with the front's certificate; a self-signed one where the front has none.
    #[default]
    Front,
    /// TLS with a self-signed certificate, which the proxy cannot verify.
    SelfSigned,
    /// No TLS: the proxy connects in clear (h2c).
    Off,
}

/// A picker that runs.
#[derive(Debug)]
pub struct Picker {
    pub address: SocketAddr,
    server: HttpServer,
    health: HealthReporter,
    watch: JoinHandle<()>,
    open: watch::Receiver<usize>,
}

impl Picker {
    /// Binds the port and begins to poll the routers; until each was polled once it is alive, but
    /// not ready.
    pub async fn start(
        options: PickerOptions,
        telemetry: &Telemetry,
        trust: RouterTls,
    ) -> Result<Self, KubernetesError> {
        let PickerOptions {
            listen,
            tls,
            endpoints: names,
            admin_port,
        } = options;
        let shown = certificate_shown(tls, trust.front)?;
        let listener = bind(&listen).await?;
        let endpoints = Arc::new(PickerEndpoints::new(telemetry.picker.clone()));
        let (health, health_service) = tonic_health::server::health_reporter();
        set_health(&health, &[LIVENESS], ServingStatus::Serving).await;
        set_health(&health, &[READINESS, SERVICE], ServingStatus::NotServing).await;
        let (open_sender, open) = watch::channel(0);
        let service = ExternalProcessorServer::new(ExtProcService {
            endpoints: Arc::clone(&endpoints),
            series: telemetry.picker.clone(),
            open: open_sender,
        });
        let routes = Router::new()
            .route_service(&format!("/{SERVICE}/{{*method}}"), service)
            .route_service("/grpc.health.v1.Health/{*method}", health_service);
        let (limits, series) = (HttpLimits::default(), telemetry.servers.clone());
        let server = HttpServer::start(listener, faces(routes, shown), limits, series)?;
        let status_probe = StatusProbe {
            client: PeerRouterClient::new(trust.peers),
            port: admin_port,
        };
        let reporter = health.clone();
        let watch = tokio::spawn(async move {
            let serve = async {
                endpoints.all_probed().await;
                set_health(&reporter, &[READINESS, SERVICE], ServingStatus::Serving).await;
            };
            tokio::join!(endpoints.watch(names, status_probe), serve);
        });
        Ok(Self {
            address: server.address,
            server,
            health,
            watch,
            open,
        })
    }

    /// Asks proxies to go elsewhere; requests that still come are served.
    pub async fn set_not_ready(&self) {
        let status = ServingStatus::NotServing;
        set_health(&self.health, &[READINESS, SERVICE], status).await;
    }

    /// Returns once no conversation is open: a proxy ends requests whose picker is gone.
    pub async fn idle(&self) {
        let mut open = self.open.clone();
        // The service, which counts, lives as long as the server.
        let _ = open.wait_for(|open| *open == 0).await;
    }

    pub async fn stop(self) {
        self.watch.abort();
        self.server.stop().await;
    }
}

/// The certificate for proxies, if they use TLS.
fn certificate_shown(
    tls: ProxyTls,
    front: Option<ServerTls>,
) -> Result<Option<ServerTls>, KubernetesError> {
    Ok(match (tls, front) {
        (ProxyTls::Off, _) => None,
        (ProxyTls::Front, Some(front)) => Some(front),
        (ProxyTls::Front, None) | (ProxyTls::SelfSigned, _) => Some(ServerTls::self_signed()?.0),
    })
}

/// Routes for TLS or for clear connections; a proxy of the other kind gets an error that says so.
fn faces(routes: Router, shown: Option<ServerTls>) -> PortRoutes {
    let Some(tls) = shown else {
        return PortRoutes::clear(routes);
    };
    PortRoutes {
        clear: Router::new().fallback(async || tls_required()),
        secure: Some((tls, routes)),
        peers: None,
    }
}

fn tls_required() -> axum::response::Response {
    let reason = "this endpoint picker requires TLS: enable it in the gateway, or start the router with --ext-proc-tls off";
    Status::unavailable(reason).into_http::<Body>()
}

async fn set_health(health: &HealthReporter, services: &[&str], status: ServingStatus) {
    for service in services {
        health.set_service_status(*service, status).await;
    }
}

/// The gRPC service for proxies.
struct ExtProcService {
    endpoints: Arc<PickerEndpoints>,
    series: PickerSeries,
    open: watch::Sender<usize>,
}

/// Counts a conversation for as long as it lives.
struct OpenConversation(watch::Sender<usize>);

impl OpenConversation {
    fn count(open: &watch::Sender<usize>) -> Self {
        open.send_modify(|open| *open += 1);
        Self(open.clone())
    }
}

impl Drop for OpenConversation {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

#[tonic::async_trait]
impl ExternalProcessor for ExtProcService {
    type ProcessStream = ReceiverStream<Result<ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let mut messages = request.into_inner();
        let (sender, answers) = mpsc::channel(STREAM_ITEMS_MAX);
        let (endpoints, series) = (Arc::clone(&self.endpoints), self.series.clone());
        let open = OpenConversation::count(&self.open);
        tokio::spawn(async move {
            let _open = open;
            let mut conversation = ExtProcConversation::default();
            // The proxy ends the stream; an error means that it has left.
            while let Ok(Some(message)) = messages.message().await {
                let choose = |pick: &pick_request::PickRequest| {
                    let choice = endpoints.choose(pick);
                    series.count_choice(choice);
                    choice
                };
                for answer in conversation.handle(message, choose) {
                    if sender.send(Ok(answer)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}
