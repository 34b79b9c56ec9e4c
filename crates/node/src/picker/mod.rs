//! The endpoint picker: where a gateway's proxy sends each request, among several routers.
//!
//! Owns: Envoy's external-processing service as the Gateway API Inference Extension uses it (endpoint-picker
//! protocol 1.0.0), its health, and what is known of the routers. Never: chooses workers: that is the
//! brain's of the router it chose. Invariant: only an endpoint that was ready when last asked is
//! named, and of a subset that the proxy gave only its members.
//!
//! Every router may be a picker: what it knows it asks the routers themselves, again and again, so there
//! is no leader and nothing to agree on.

mod choose;
mod conversation;
mod endpoints;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;
mod wish;

/// The generated types.
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

pub(crate) use choose::Choice;

use crate::NodeError;
use crate::ask::Asker;
use crate::http::Trust;
use crate::server::{Faces, HttpLimits, Server, bind};
use crate::telemetry::{PickerSeries, Telemetry};
use axum::Router;
use axum::body::Body;
use cleave_tls::FrontTls;
use conversation::Conversation;
use endpoints::{Endpoints, Way};
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
/// What proxies and gateways ask about.
const SERVICE: &str = "envoy.service.ext_proc.v3.ExternalProcessor";
const LIVENESS: &str = "liveness";
const READINESS: &str = "readiness";

/// A picker's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickerOptions {
    /// `host:port` for the proxy's gRPC.
    pub listen: String,
    /// How it is secured.
    pub tls: ProxyTls,
    /// `host:port` of the routers; a name stands for all its addresses, looked up again and again.
    pub endpoints: Vec<String>,
    /// The port of each at which it is asked how it is. Default the one of requests.
    pub admin_port: Option<u16>,
}

/// How a proxy speaks to a picker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyTls {
    /// By TLS, and is shown the front's certificate; a self-signed one where the front has none.
    #[default]
    Front,
    /// By TLS, and is shown a self-signed certificate, which it cannot verify.
    SelfSigned,
    /// In clear (h2c).
    Off,
}

/// A picker that runs.
#[derive(Debug)]
pub(crate) struct Picker {
    pub(crate) address: SocketAddr,
    server: Server,
    health: HealthReporter,
    watch: JoinHandle<()>,
    open: watch::Receiver<usize>,
}

impl Picker {
    /// Binds the port and begins to ask the routers how they are; until each was asked once it is alive, and
    /// not ready.
    pub(crate) async fn start(
        options: PickerOptions,
        telemetry: &Telemetry,
        trust: Trust,
    ) -> Result<Self, NodeError> {
        let PickerOptions {
            listen,
            tls,
            endpoints: names,
            admin_port,
        } = options;
        let shown = shown(tls, trust.front)?;
        let listener = bind(&listen).await?;
        let endpoints = Arc::new(Endpoints::new(telemetry.picker.clone()));
        let (health, health_service) = tonic_health::server::health_reporter();
        say(&health, &[LIVENESS], ServingStatus::Serving).await;
        say(&health, &[READINESS, SERVICE], ServingStatus::NotServing).await;
        let (tell_open, open) = watch::channel(0);
        let service = ExternalProcessorServer::new(Desk {
            endpoints: Arc::clone(&endpoints),
            series: telemetry.picker.clone(),
            open: tell_open,
        });
        let routes = Router::new()
            .route_service(&format!("/{SERVICE}/{{*method}}"), service)
            .route_service("/grpc.health.v1.Health/{*method}", health_service);
        let terms = (HttpLimits::default(), telemetry.servers.clone());
        let server = Server::start(listener, faces(routes, shown), terms)?;
        let way = Way {
            asker: Asker::new(trust.peers),
            port: admin_port,
        };
        let told = health.clone();
        let watch = tokio::spawn(async move {
            let serve = async {
                endpoints.asked().await;
                say(&told, &[READINESS, SERVICE], ServingStatus::Serving).await;
            };
            tokio::join!(endpoints.watch(names, way), serve);
        });
        Ok(Self {
            address: server.address,
            server,
            health,
            watch,
            open,
        })
    }

    /// Asks proxies to go elsewhere; who comes all the same is served.
    pub(crate) async fn leave(&self) {
        let status = ServingStatus::NotServing;
        say(&self.health, &[READINESS, SERVICE], status).await;
    }

    /// Returns once no request is spoken about: a proxy ends those whose picker is gone.
    pub(crate) async fn idle(&self) {
        let mut open = self.open.clone();
        // The desk, which counts, lives as long as the server.
        let _ = open.wait_for(|open| *open == 0).await;
    }

    pub(crate) async fn stop(self) {
        self.watch.abort();
        self.server.stop().await;
    }
}

/// What proxies are shown, if they speak TLS.
fn shown(tls: ProxyTls, front: Option<FrontTls>) -> Result<Option<FrontTls>, NodeError> {
    Ok(match (tls, front) {
        (ProxyTls::Off, _) => None,
        (ProxyTls::Front, Some(front)) => Some(front),
        (ProxyTls::Front, None) | (ProxyTls::SelfSigned, _) => Some(FrontTls::self_signed()?.0),
    })
}

/// Proxies speak TLS or in clear; those that do not speak as the port does are told so.
fn faces(routes: Router, shown: Option<FrontTls>) -> Faces {
    let Some(tls) = shown else {
        return Faces::clear(routes);
    };
    Faces {
        clear: Router::new().fallback(async || no_clear()),
        secure: Some((tls, routes)),
        peers: None,
    }
}

fn no_clear() -> axum::response::Response {
    let reason = "this endpoint picker speaks TLS: let the gateway, or start the router with --ext-proc-tls off";
    Status::unavailable(reason).into_http::<Body>()
}

async fn say(health: &HealthReporter, services: &[&str], status: ServingStatus) {
    for service in services {
        health.set_service_status(*service, status).await;
    }
}

/// Where proxies come in.
struct Desk {
    endpoints: Arc<Endpoints>,
    series: PickerSeries,
    open: watch::Sender<usize>,
}

/// Counts a conversation for as long as it lives.
struct Open(watch::Sender<usize>);

impl Open {
    fn count(open: &watch::Sender<usize>) -> Self {
        open.send_modify(|open| *open += 1);
        Self(open.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

#[tonic::async_trait]
impl ExternalProcessor for Desk {
    type ProcessStream = ReceiverStream<Result<ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let mut words = request.into_inner();
        let (tell, answers) = mpsc::channel(STREAM_ITEMS_MAX);
        let (endpoints, series) = (Arc::clone(&self.endpoints), self.series.clone());
        let open = Open::count(&self.open);
        tokio::spawn(async move {
            let _open = open;
            let mut conversation = Conversation::default();
            // The proxy says when it is over; an error is its leaving.
            while let Ok(Some(word)) = words.message().await {
                let choose = |wish: &wish::Wish| {
                    let choice = endpoints.choose(wish);
                    series.chose(choice);
                    choice
                };
                for answer in conversation.hear(word, choose) {
                    if tell.send(Ok(answer)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}
