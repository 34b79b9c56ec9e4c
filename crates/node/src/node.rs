//! The kinds of process: a router, a worker, or a whole fleet in one.
//!
//! Each is plain data until `start`, which binds the ports before it returns. Each ends by `drain`:
//! it accepts nothing new, waits for open work, then ends the rest with a reason.

use crate::http::{RouterPorts, RouterServers, WorkerHttpState, worker_routes};
use crate::peer_responses::PeerResponses;
use crate::ports::{FleetPorts, WorkerPorts};
use crate::{NodeError, RouterOptions};
use cleave_api::{App, Frontend, Operator, ServingReadiness};
use cleave_engine::Engine;
use cleave_fleet::{FAREWELL_MAX, ModelAdmission, RouterConnections, Uplink, connect};
use cleave_gateway::{ModelReadiness, RouterBody};
use cleave_kubernetes::{ExternalMetricsServer, Picker, PickerOptions, external_metrics_routes};
use cleave_server::{HttpLimits, HttpServer, PeerRouterClient, PortRoutes, RouterTls};
use cleave_telemetry::{ServiceProcess, Telemetry, TraceOptions};
use cleave_text::ModelFiles;
use cleave_tls::ServerTls;
use cleave_transfer::{ListenOptions, Listeners, LocalNet, OpenedListeners, TransportReach};
use cleave_worker::{WorkerBody, WorkerOptions, WorkerParts};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{info, warn};

#[derive(Clone, Debug)]
pub struct RouterNode {
    /// `host:port` for HTTP and for workers.
    pub listen: String,
    pub options: RouterOptions,
    /// An endpoint picker in the same process; default none.
    pub picker: Option<PickerOptions>,
}

/// A router process that runs.
pub struct RunningRouter {
    app: App,
    body: RouterBody,
    servers: RouterServers,
    picker: Option<Picker>,
    /// The server of Kubernetes' external metrics, if enabled.
    metrics: Option<ExternalMetricsServer>,
}

impl RouterNode {
    /// Binds the port and serves. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Tls`, `Bind` or `Tape` if that cannot be done.
    pub async fn start(self) -> Result<RunningRouter, NodeError> {
        let Self {
            listen,
            options,
            picker,
        } = self;
        if options.certificate.is_some() && options.peer_tls.is_none() {
            warn!(
                "clients use TLS and workers do not: set --peer-tls so that only workers of this fleet can join"
            );
        }
        let mut ports = RouterPorts::open(&listen, &options).await?;
        let service = ServiceProcess::router(ports.front_port());
        let telemetry = Telemetry::with_traces(&options.traces, &service)?;
        let picker = match picker {
            Some(options) => Some(Picker::start(options, &telemetry, ports.tls()).await?),
            None => None,
        };
        let mut body = RouterBody::start(&options.gateway(), &telemetry)?;
        let client = PeerRouterClient::new(ports.tls().peers);
        let (names, own) = (&options.peer_routers, ports.port_numbers());
        let addresses = body.watch_peer_routers(names, own, client.clone());
        let app = App::new(body.frontend(), options.api.clone());
        let RouterTls { front, peers } = ports.tls();
        // Questions have the keys of clients, which are not sent in clear where clients use TLS.
        if !names.is_empty() && (peers.is_some() || front.is_none()) {
            app.ask_peers(Arc::new(PeerResponses { client, addresses }));
        }
        let registry = body.model_registry(app.clone());
        let metrics = external_metrics(ports.take_external(), &body, ports.tls().front)?;
        let (acceptor, scaling) = (body.acceptor.clone(), body.scaling.clone());
        let servers = ports.serve(&app, acceptor, registry, scaling, &options, &telemetry)?;
        Ok(RunningRouter {
            app,
            body,
            servers,
            picker,
            metrics,
        })
    }
}

/// Starts the external metrics API, if it is enabled.
fn external_metrics(
    listener: Option<TcpListener>,
    body: &RouterBody,
    certificate: Option<ServerTls>,
) -> Result<Option<ExternalMetricsServer>, NodeError> {
    let Some(listener) = listener else {
        return Ok(None);
    };
    let routes = external_metrics_routes(body.scaling.clone());
    let shown = match certificate {
        Some(front) => front,
        // An APIService accepts it with `insecureSkipTLSVerify`.
        None => ServerTls::self_signed()?.0,
    };
    let secured = ExternalMetricsServer::start(listener, routes, shown)?;
    info!(address = %secured.address, "serving external metrics over HTTPS");
    Ok(Some(secured))
}

impl RunningRouter {
    pub fn address(&self) -> SocketAddr {
        self.servers.front.address
    }

    /// The operators' address, if it differs from `address`.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        let admin = self.servers.admin.as_ref();
        admin.map(|server| server.address)
    }

    /// Reports not ready at `/ready` and keeps serving: load balancers need a while to notice.
    pub fn set_not_ready(&self) {
        self.app.start_draining();
    }

    /// The endpoint picker's address, if there is one.
    pub fn picker_address(&self) -> Option<SocketAddr> {
        self.picker.as_ref().map(|picker| picker.address)
    }

    /// Returns when a request sent now would find its workers.
    pub async fn ready(&self) {
        wait_until_ready(&self.app, self.body.readiness()).await;
    }

    /// The frontend, for callers without HTTP.
    pub fn frontend(&self) -> Arc<dyn Frontend> {
        self.body.frontend()
    }

    /// Returns the reason when something failed that only a new process repairs.
    pub async fn failed(&self) -> String {
        self.body.monitor.failed().await
    }

    /// Accepts nothing new, waits until no flight is left or `deadline` has passed, ends the rest
    /// and stops.
    pub async fn drain(self, deadline: Duration) {
        let Self {
            app,
            mut body,
            servers,
            picker,
            metrics: _metrics,
        } = self;
        app.start_draining();
        let ends = Instant::now() + deadline;
        if let Some(picker) = &picker {
            picker.set_not_ready().await;
        }
        if timeout_at(ends, body.drain()).await.is_err() {
            warn!("drain deadline passed: ending the flights that are left");
        }
        // Requests that the picker sent to other routers also pass through it.
        if let Some(picker) = picker {
            if timeout_at(ends, picker.idle()).await.is_err() {
                warn!(
                    "drain deadline passed: requests routed by this endpoint picker are still open"
                );
            }
            picker.stop().await;
        }
        body.stop().await;
        servers.stop().await;
    }
}

pub struct WorkerNode {
    pub options: WorkerOptions,
    pub engine: Box<dyn Engine>,
    /// The model's tokenizer, templates and defaults, for routers without the model's folder.
    pub files: ModelFiles,
    /// `host:port` of each router; names are resolved again and again, and every address is
    /// dialled.
    pub routers: Vec<String>,
    /// `host:port` at which other workers reach this one's blocks; port 0 picks a free one.
    pub data_listen: String,
    /// The address to announce to other workers, where it differs from the bound one: `host:port`,
    /// and then no other is announced. Default: the bound one, with the host as the router sees it
    /// if that is unspecified, and shared memory for workers of the same host.
    pub data_address: Option<String>,
    /// `host:port` for `/metrics`, `/health`, `/ready` and `/admin`; by default none.
    pub metrics_listen: Option<String>,
    pub traces: TraceOptions,
}

/// A worker process that runs.
pub struct RunningWorker {
    body: WorkerBody,
    data_address: SocketAddr,
    server: Option<HttpServer>,
    telemetry: Telemetry,
    connections: watch::Receiver<RouterConnections>,
    tasks: JoinSet<()>,
}

impl WorkerNode {
    /// Binds the ports and goes on as [`WorkerNode::start_at`]. Must be called within a tokio
    /// runtime.
    ///
    /// # Errors
    /// `Tls`, `Bind`, `Thread` or `Tape` if that cannot be done.
    pub async fn start(self) -> Result<RunningWorker, NodeError> {
        let metrics_listen = self.metrics_listen.as_deref();
        let (data_listen, options) = (&self.data_listen, &self.options);
        let ports = WorkerPorts::open(data_listen, metrics_listen, options, &self.traces).await?;
        self.start_at(ports).await
    }

    /// Starts the engine's thread and dials the routers, on ports that are bound already;
    /// `data_listen` and `metrics_listen` are the addresses that they were bound by.
    ///
    /// # Errors
    /// `Thread`, `Tier` or `Tape` if that cannot be done.
    pub async fn start_at(self, ports: WorkerPorts) -> Result<RunningWorker, NodeError> {
        let WorkerPorts {
            telemetry,
            peers,
            nixl,
            data,
            data_address,
            metrics,
            mut closing,
            loading,
        } = ports;
        let data_listeners = DataListeners {
            tcp: data,
            bound: data_address,
            advertised: self.data_address,
            nixl: nixl.is_some(),
        };
        let (listeners, announced) = data_listeners.bind_and_address(&self.options);
        let parts = WorkerParts {
            options: self.options,
            engine: self.engine,
            files: Arc::new(self.files),
            net: LocalNet::default(),
            data: Some((listeners, announced)),
            peers: peers.clone(),
            nixl,
        };
        let admin_key = parts.options.admin_key;
        closing.shutdown().await;
        let body = WorkerBody::start(parts, &telemetry)?;
        let (connections_sender, connections) = watch::channel(RouterConnections::default());
        let uplink = Uplink {
            acceptor: body.acceptor.clone(),
            routers: self.routers,
            peers: peers.clone(),
            connections: connections_sender,
        };
        let mut tasks = JoinSet::new();
        if let Some(tls) = peers {
            tasks.spawn(tls.follow());
        }
        tasks.spawn(uplink.run());
        let face = WorkerHttpState {
            monitor: Arc::clone(&body.monitor),
            telemetry: telemetry.clone(),
            connections: connections.clone(),
            operator: Arc::clone(&body.admin) as Arc<dyn Operator>,
            admin_key,
        };
        loading.stop().await;
        let server = metrics.map(|listener| {
            let (limits, series) = (HttpLimits::default(), telemetry.servers.clone());
            HttpServer::start(
                listener,
                PortRoutes::clear(worker_routes(face)),
                limits,
                series,
            )
        });
        Ok(RunningWorker {
            body,
            data_address,
            server: server.transpose()?,
            telemetry,
            connections,
            tasks,
        })
    }
}

/// The addresses at which other workers send blocks to this one.
struct DataListeners {
    tcp: TcpListener,
    bound: SocketAddr,
    /// The address to announce to peers, if it differs.
    advertised: Option<String>,
    /// Whether links over NIXL are accepted too.
    nixl: bool,
}

impl DataListeners {
    /// Gives the listeners, and the addresses to announce. An address named by the operator is the
    /// only one announced; otherwise workers of this host also get shared memory.
    fn bind_and_address(self, options: &WorkerOptions) -> (Listeners, String) {
        let Self {
            tcp,
            bound,
            advertised: named,
            nixl,
        } = self;
        let mut transports = options.transports.clone();
        if named.is_some() {
            transports.retain(|transport| transport.reach() == TransportReach::Network);
        }
        let address = named.unwrap_or_else(|| bound.to_string());
        let opened = Listeners::open(ListenOptions {
            transports,
            tcp: Some((tcp, address)),
            has_nixl: nixl,
        });
        let OpenedListeners {
            listeners,
            addresses,
            failures,
        } = opened;
        for (transport, error) in failures {
            warn!(%transport, %error, "cannot listen for links of this transport: blocks of peers come by another one");
        }
        (listeners, addresses.to_string())
    }
}

impl RunningWorker {
    /// The address at which other workers send blocks.
    pub fn data_address(&self) -> SocketAddr {
        self.data_address
    }

    /// The address of `/metrics`, if it is served.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(|server| server.address)
    }

    /// Its metrics in the OpenMetrics text format, without the closing `# EOF`.
    pub fn metrics(&self) -> String {
        self.telemetry.text()
    }

    /// Returns when at least one router is connected.
    pub async fn ready(&self) {
        let mut connections = self.connections.clone();
        // The uplink runs for as long as this value lives.
        let _ = connections.wait_for(|now| now.count > 0).await;
    }

    /// Returns the reason when something failed that only a new process repairs.
    pub async fn failed(&self) -> String {
        self.body.monitor.failed().await
    }

    /// Returns once a router or an operator has asked this worker to leave; the caller then calls
    /// [`RunningWorker::drain`].
    pub async fn wait_for_drain_request(&self) {
        self.body.admin.wait_for_drain_request().await;
    }

    /// Accepts nothing new, waits until nothing is left or `deadline` has passed, and stops once
    /// its routers have read its last messages.
    pub async fn drain(mut self, deadline: Duration) {
        if timeout(deadline, self.body.drain()).await.is_err() {
            warn!("drain deadline passed: dropping the sequences that are left");
        }
        self.end(FAREWELL_MAX).await;
    }

    /// Stops at once, as a crash would.
    pub async fn stop(self) {
        self.end(Duration::ZERO).await;
    }

    /// Stops. Connections have so long to end by themselves.
    async fn end(self, farewell: Duration) {
        let Self {
            body,
            data_address: _,
            server,
            telemetry,
            mut connections,
            mut tasks,
        } = self;
        body.stop().await;
        let disconnected = connections.wait_for(|now| now.count == 0);
        // Routers that read nothing notice the loss by themselves.
        let _ = timeout(farewell, disconnected).await;
        tasks.shutdown().await;
        telemetry.traces.flush().await;
        if let Some(server) = server {
            server.stop().await;
        }
    }
}

/// A whole fleet in this process: a router and workers, connected by channels and driven as in
/// separate processes.
pub struct FleetNode {
    /// `host:port` for HTTP, and for workers of other processes that want to join.
    pub listen: String,
    pub router: RouterOptions,
    /// Models of different names.
    pub models: Vec<FleetModel>,
}

/// A model of a fleet, with its workers.
pub struct FleetModel {
    /// Each worker's settings and engine. All engines hold this model.
    pub workers: Vec<(WorkerOptions, Box<dyn Engine>)>,
    /// The model's tokenizer, templates and defaults.
    pub files: ModelFiles,
}

/// A fleet in one process that runs.
pub struct RunningFleet {
    router: RunningRouter,
    workers: Vec<WorkerBody>,
    connections: JoinSet<()>,
}

impl FleetNode {
    /// Binds the port and serves. Must be called within a tokio runtime.
    ///
    /// # Errors `Bind`, `Tape` or `Thread` if that cannot be done; `WorkerModelLabels` if the
    /// model's tokenizer or templates cannot be used.
    pub async fn start(self) -> Result<RunningFleet, NodeError> {
        let ports = FleetPorts::open(&self.listen, &self.router).await?;
        self.start_at(ports).await
    }

    /// Serves at ports that are bound already; `listen` is what they were bound by.
    ///
    /// # Errors
    /// As [`FleetNode::start`], but for `Bind`.
    pub async fn start_at(self, ports: FleetPorts) -> Result<RunningFleet, NodeError> {
        let (mut ports, telemetry, loading) = ports.into_parts();
        let body = RouterBody::start(&self.router.gateway(), &telemetry)?;
        let app = App::new(body.frontend(), self.router.api.clone());
        let registry = body.model_registry(app.clone());
        let net = LocalNet::default();
        let mut workers = Vec::new();
        let mut lines = JoinSet::new();
        for model in self.models {
            let files = Arc::new(model.files);
            // The workers stay for as long as the process runs.
            let accepted = registry.accept("", &files).await;
            accepted.map_err(NodeError::Model)?;
            for (options, engine) in model.workers {
                let parts = WorkerParts {
                    options,
                    engine,
                    files: Arc::clone(&files),
                    net: net.clone(),
                    data: None,
                    peers: None,
                    nixl: None,
                };
                let worker = WorkerBody::start(parts, &telemetry)?;
                body.add_monitor(Arc::clone(&worker.monitor));
                lines.spawn(connect(worker.acceptor.clone(), body.acceptor.clone()));
                workers.push(worker);
            }
        }
        // Everything that serves is there: no request waits between this and the next lines.
        loading.stop().await;
        let metrics = external_metrics(ports.take_external(), &body, ports.tls().front)?;
        let (acceptor, scaling) = (body.acceptor.clone(), body.scaling.clone());
        let servers = ports.serve(&app, acceptor, registry, scaling, &self.router, &telemetry)?;
        info!(address = %servers.front.address, workers = workers.len(), "serving");
        let router = RunningRouter {
            app,
            body,
            servers,
            picker: None,
            metrics,
        };
        Ok(RunningFleet {
            router,
            workers,
            connections: lines,
        })
    }
}

impl RunningFleet {
    pub fn address(&self) -> SocketAddr {
        self.router.address()
    }

    /// The operators' address, if it differs from `address`.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.router.admin_address()
    }

    pub fn set_not_ready(&self) {
        self.router.set_not_ready();
    }

    /// Returns when a request for any model, sent now, would find its workers.
    pub async fn ready(&self) {
        let RunningRouter { app, body, .. } = &self.router;
        wait_until(body.readiness(), |_| app.is_ready_for_all()).await;
    }

    /// The frontend, for callers without HTTP.
    pub fn frontend(&self) -> Arc<dyn Frontend> {
        self.router.frontend()
    }

    /// Lets another router of this process use these workers too.
    pub fn join(&mut self, router: &RunningRouter) {
        for worker in &self.workers {
            let line = connect(worker.acceptor.clone(), router.body.acceptor.clone());
            self.connections.spawn(line);
        }
    }

    /// Returns the reason when something failed that only a new process repairs.
    pub async fn failed(&self) -> String {
        let pulses = self.workers.iter().map(|worker| &worker.monitor);
        let pulses = pulses.chain([&self.router.body.monitor]);
        let broken = pulses.map(|pulse| Box::pin(pulse.failed()));
        futures::future::select_all(broken).await.0
    }

    /// Accepts nothing new, waits until no flight is left or `deadline` has passed, ends the rest
    /// and stops.
    pub async fn drain(self, deadline: Duration) {
        let Self {
            router,
            workers,
            connections: mut lines,
        } = self;
        router.drain(deadline).await;
        for worker in workers {
            worker.stop().await;
        }
        lines.shutdown().await;
    }
}

/// A fleet with both legs is ready whatever its model; one that runs prompts only, where its model
/// is served for vectors, which is known before the brain knows its first worker.
async fn wait_until_ready(app: &App, changes: watch::Receiver<ModelReadiness>) {
    let is_ready = |known: &ModelReadiness| {
        known.has_ready_model() || app.readiness() == ServingReadiness::Ready
    };
    wait_until(changes, is_ready).await;
}

async fn wait_until(
    mut changes: watch::Receiver<ModelReadiness>,
    is_met: impl Fn(&ModelReadiness) -> bool,
) {
    loop {
        let known = changes.borrow_and_update().clone();
        if is_met(&known) {
            return;
        }
        // The router's driver sends readiness for as long as the router runs.
        if changes.changed().await.is_err() {
            return;
        }
    }
}
