//! What a process can be: a router, a worker, or a whole fleet in one.
//!
//! Each is plain data until `start` is called, binds its ports before it says that it runs, and
//! ends by `drain`: nothing new, wait, then end the rest with a reason.

use crate::ask::Asker;
use crate::door::connect;
use crate::grpc::{ModelDesk, Uplink};
use crate::http::{RouterPorts, RouterServers, WorkerFace, worker_routes};
use crate::picker::{Picker, PickerOptions};
use crate::ports::{ServePorts, WorkerPorts};
use crate::router::RouterBody;
use crate::scaling::{Secured, external_metrics_routes};
use crate::server::{Faces, HttpLimits, Server};
use crate::telemetry::Telemetry;
use crate::trace::TraceOptions;
use crate::worker::{Parts, WorkerBody};
use crate::{NodeError, RouterOptions, WorkerOptions};
use cleave_api::{App, Frontend, ModelFiles, Operator, Readiness};
use cleave_engine::Engine;
use cleave_tls::FrontTls;
use cleave_transfer::{Addresses, HostListener, Listeners, LocalNet, Transport};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{info, warn};

/// A router process.
#[derive(Clone, Debug)]
pub struct RouterNode {
    /// `host:port` for HTTP and for workers.
    pub listen: String,
    /// Its settings.
    pub options: RouterOptions,
    /// An endpoint picker beside it, by default none.
    pub picker: Option<PickerOptions>,
}

/// A router process that runs.
pub struct RunningRouter {
    app: App,
    body: RouterBody,
    servers: RouterServers,
    picker: Option<Picker>,
    /// Kubernetes' external metrics, if asked for.
    metrics: Option<Secured>,
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
            warn!("clients speak TLS and workers do not: --peer-tls keeps strangers from joining");
        }
        let mut ports = RouterPorts::open(&listen, &options).await?;
        let telemetry = Telemetry::with_traces(&options.traces)?;
        let picker = match picker {
            Some(options) => Some(Picker::start(options, &telemetry, ports.trust()).await?),
            None => None,
        };
        let mut body = RouterBody::start(&options, &telemetry)?;
        let asker = Asker::new(ports.trust().peers);
        body.ask_fellows(&options.fellows, ports.numbers(), asker);
        let app = App::new(body.frontend(), options.api.clone());
        let fleet = (body.door.clone(), ModelDesk::new(app.clone()));
        let metrics = external_metrics(ports.take_external(), &body, ports.trust().front)?;
        let fleet = (fleet, body.answers.clone());
        let servers = ports.serve(&app, fleet, (&options, &telemetry))?;
        Ok(RunningRouter {
            app,
            body,
            servers,
            picker,
            metrics,
        })
    }
}

/// The external metrics API, if it is asked for.
fn external_metrics(
    listener: Option<TcpListener>,
    body: &RouterBody,
    certificate: Option<FrontTls>,
) -> Result<Option<Secured>, NodeError> {
    let Some(listener) = listener else {
        return Ok(None);
    };
    let routes = external_metrics_routes(body.answers.clone());
    let shown = match certificate {
        Some(front) => front,
        // An APIService takes it by `insecureSkipTLSVerify`.
        None => FrontTls::self_signed()?.0,
    };
    let secured = Secured::start(listener, routes, shown)?;
    info!(address = %secured.address, "external metrics, by HTTPS");
    Ok(Some(secured))
}

impl RunningRouter {
    /// Where the external metrics API listens, if anywhere.
    pub fn external_metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|metrics| metrics.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.servers.front.address
    }

    /// Where operators reach it, if not there.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        let admin = self.servers.admin.as_ref();
        admin.map(|server| server.address)
    }

    /// Says at `/ready` that it leaves, and serves on as before: balancers need a while to notice.
    pub fn leave(&self) {
        self.app.leave();
    }

    /// Where its endpoint picker listens, if it has one.
    pub fn picker_address(&self) -> Option<SocketAddr> {
        self.picker.as_ref().map(|picker| picker.address)
    }

    /// Returns when a request sent now would find workers for both legs.
    pub async fn ready(&self) {
        wait_until_ready(self.body.readiness()).await;
    }

    /// The serving side without HTTP.
    pub fn frontend(&self) -> Arc<dyn Frontend> {
        self.body.frontend()
    }

    /// Returns, with the reason, when something broke that only a new process makes good.
    pub async fn broken(&self) -> String {
        self.body.pulse.broken().await
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
        app.leave();
        let ends = Instant::now() + deadline;
        if let Some(picker) = &picker {
            picker.leave().await;
        }
        if timeout_at(ends, body.drain()).await.is_err() {
            warn!("flights are left at the deadline and are ended");
        }
        // Requests that it sent to other routers go past it too.
        if let Some(picker) = picker {
            if timeout_at(ends, picker.idle()).await.is_err() {
                warn!("requests are left at the deadline whose endpoint was picked here");
            }
            picker.stop().await;
        }
        body.stop().await;
        servers.stop().await;
    }
}

/// A worker process.
pub struct WorkerNode {
    /// Its settings.
    pub options: WorkerOptions,
    /// The model.
    pub engine: Box<dyn Engine>,
    /// The model's text side, for routers that have no folder.
    pub files: ModelFiles,
    /// `host:port` of each router; names are looked up again and again, and every address is
    /// dialled.
    pub routers: Vec<String>,
    /// `host:port` at which other workers reach this one's blocks; port 0 picks a free one.
    pub data_listen: String,
    /// The address to give other workers, where it differs from the one bound: `host:port`, and then
    /// the only way in. By default the bound one, with the host as the router sees it if that is
    /// unspecified, and shared memory for workers of the same host.
    pub data_address: Option<String>,
    /// `host:port` for `/metrics`, `/health`, `/ready` and `/admin`; by default none.
    pub metrics_listen: Option<String>,
    /// Where traces go.
    pub traces: TraceOptions,
}

/// A worker process that runs.
pub struct RunningWorker {
    body: WorkerBody,
    data_address: SocketAddr,
    server: Option<Server>,
    telemetry: Telemetry,
    connected: watch::Receiver<usize>,
    tasks: JoinSet<()>,
}

impl WorkerNode {
    /// Binds the ports and goes on as [`WorkerNode::start_at`]. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Tls`, `Bind`, `Thread` or `Tape` if that cannot be done.
    pub async fn start(self) -> Result<RunningWorker, NodeError> {
        let metrics_listen = self.metrics_listen.as_deref();
        let (data_listen, options) = (&self.data_listen, &self.options);
        let ports = WorkerPorts::open(data_listen, metrics_listen, options, &self.traces).await?;
        self.start_at(ports).await
    }

    /// Starts the engine's thread and dials the routers, at ports that are bound already; its own
    /// `data_listen` and `metrics_listen` are what they were bound by.
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
        let ways_in = WaysIn {
            tcp: data,
            bound: data_address,
            named: self.data_address,
            nixl: nixl.is_some(),
        };
        let (listeners, told) = ways_in.announce(&self.options);
        let parts = Parts {
            options: self.options,
            engine: self.engine,
            files: Arc::new(self.files),
            net: LocalNet::default(),
            data: Some((listeners, told)),
            peers: peers.clone(),
            nixl,
        };
        let admin_key = parts.options.admin_key;
        closing.shutdown().await;
        let body = WorkerBody::start(parts, &telemetry)?;
        let (tell_connected, connected) = watch::channel(0);
        let uplink = Uplink {
            door: body.door.clone(),
            routers: self.routers,
            peers: peers.clone(),
            connected: tell_connected,
        };
        let mut tasks = JoinSet::new();
        if let Some(tls) = peers {
            tasks.spawn(tls.follow());
        }
        tasks.spawn(uplink.run());
        let face = WorkerFace {
            pulse: Arc::clone(&body.pulse),
            telemetry: telemetry.clone(),
            connected: connected.clone(),
            operator: Arc::clone(&body.desk) as Arc<dyn Operator>,
            admin_key,
        };
        loading.stop().await;
        let server = metrics.map(|listener| {
            let terms = (HttpLimits::default(), telemetry.servers.clone());
            Server::start(listener, Faces::clear(worker_routes(face)), terms)
        });
        Ok(RunningWorker {
            body,
            data_address,
            server: server.transpose()?,
            telemetry,
            connected,
            tasks,
        })
    }
}

/// Where others send blocks to.
struct WaysIn {
    tcp: TcpListener,
    bound: SocketAddr,
    /// What peers are to be told of it, if that differs.
    named: Option<String>,
    /// Whether links over NIXL are made there, too.
    nixl: bool,
}

impl WaysIn {
    /// And what they are told of it. Whoever names an address wants that one used; otherwise workers of this host get a
    /// better way in.
    fn announce(self, options: &WorkerOptions) -> (Listeners, String) {
        let Self {
            tcp,
            bound,
            named,
            nixl,
        } = self;
        let is_within = named.is_none() && options.transports.contains(&Transport::SharedMemory);
        let host = is_within.then(|| {
            HostListener::bind()
                .inspect_err(|error| warn!(%error, "no shared memory: blocks go over TCP"))
                .ok()
        });
        let host = host.flatten();
        let addresses = Addresses {
            tcp: Some(named.unwrap_or_else(|| bound.to_string())),
            shared_memory: host.as_ref().map(|host| host.address().clone()),
            nixl,
        };
        let listeners = Listeners {
            tcp: Some(tcp),
            host,
        };
        (listeners, addresses.to_string())
    }
}

impl RunningWorker {
    /// Where other workers reach its blocks.
    pub fn data_address(&self) -> SocketAddr {
        self.data_address
    }

    /// Where `/metrics` is, if anywhere.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(|server| server.address)
    }

    /// Its metrics in the OpenMetrics text format, without the closing `# EOF`.
    pub fn metrics(&self) -> String {
        self.telemetry.text()
    }

    /// Returns when at least one router is connected.
    pub async fn ready(&self) {
        let mut connected = self.connected.clone();
        // The uplink runs for as long as this value lives.
        let _ = connected.wait_for(|count| *count > 0).await;
    }

    /// Returns, with the reason, when something broke that only a new process makes good.
    pub async fn broken(&self) -> String {
        self.body.pulse.broken().await
    }

    /// Returns once a router or an operator has asked this worker to leave:
    /// [`RunningWorker::drain`] is to be called then.
    pub async fn asked_to_leave(&self) {
        self.body.desk.asked_to_leave().await;
    }

    /// Accepts nothing new, waits until nothing is left or `deadline` has passed, and stops.
    pub async fn drain(mut self, deadline: Duration) {
        if timeout(deadline, self.body.drain()).await.is_err() {
            warn!("sequences are left at the deadline and are dropped");
        }
        self.stop().await;
    }

    /// Stops at once, as a crash would.
    pub async fn stop(self) {
        let Self {
            body,
            data_address: _,
            server,
            telemetry,
            connected: _,
            mut tasks,
        } = self;
        body.stop().await;
        tasks.shutdown().await;
        telemetry.traces.flush().await;
        if let Some(server) = server {
            server.stop().await;
        }
    }
}

/// A whole fleet in this process: a router and workers, joined by channels, driven as they would be
/// apart.
pub struct Serve {
    /// `host:port` for HTTP, and for workers of other processes that want to join.
    pub listen: String,
    /// The router's settings.
    pub router: RouterOptions,
    /// Each worker's settings and model. All engines hold the same model.
    pub workers: Vec<(WorkerOptions, Box<dyn Engine>)>,
    /// The model's text side.
    pub files: ModelFiles,
}

/// A fleet in one process that runs.
pub struct Running {
    router: RunningRouter,
    workers: Vec<WorkerBody>,
    lines: JoinSet<()>,
}

impl Serve {
    /// Binds the port and serves. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Bind`, `Tape` or `Thread` if that cannot be done; `Model` if the model's text side is of
    /// no use.
    pub async fn start(self) -> Result<Running, NodeError> {
        let ports = ServePorts::open(&self.listen, &self.router).await?;
        self.start_at(ports).await
    }

    /// Serves at ports that are bound already; `listen` is what they were bound by.
    ///
    /// # Errors
    /// As [`Serve::start`], but for `Bind`.
    pub async fn start_at(self, ports: ServePorts) -> Result<Running, NodeError> {
        let (mut ports, telemetry, loading) = ports.take();
        let body = RouterBody::start(&self.router, &telemetry)?;
        let files = Arc::new(self.files);
        let app = App::new(body.frontend(), self.router.api.clone());
        let desk = ModelDesk::new(app.clone());
        // They are here for as long as the process.
        let _stays = desk.accept("", &files).await.map_err(NodeError::Model)?;
        let net = LocalNet::default();
        let mut workers = Vec::new();
        let mut lines = JoinSet::new();
        for (options, engine) in self.workers {
            let parts = Parts {
                options,
                engine,
                files: Arc::clone(&files),
                net: net.clone(),
                data: None,
                peers: None,
                nixl: None,
            };
            let worker = WorkerBody::start(parts, &telemetry)?;
            body.vouch_for(Arc::clone(&worker.pulse));
            lines.spawn(connect(worker.door.clone(), body.door.clone()));
            workers.push(worker);
        }
        // Everything that serves is there: no request waits between this and the next lines.
        loading.stop().await;
        let metrics = external_metrics(ports.take_external(), &body, ports.trust().front)?;
        let fleet = ((body.door.clone(), desk), body.answers.clone());
        let servers = ports.serve(&app, fleet, (&self.router, &telemetry))?;
        info!(address = %servers.front.address, workers = workers.len(), "serving");
        let router = RunningRouter {
            app,
            body,
            servers,
            picker: None,
            metrics,
        };
        Ok(Running {
            router,
            workers,
            lines,
        })
    }
}

impl Running {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.router.address()
    }

    /// Where operators reach it, if not there.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.router.admin_address()
    }

    /// As [`RunningRouter::leave`].
    pub fn leave(&self) {
        self.router.leave();
    }

    /// Returns when a request sent now would find workers for both legs.
    pub async fn ready(&self) {
        self.router.ready().await;
    }

    /// The serving side without HTTP.
    pub fn frontend(&self) -> Arc<dyn Frontend> {
        self.router.frontend()
    }

    /// Lets another router of this process use these workers too.
    pub fn join(&mut self, router: &RunningRouter) {
        for worker in &self.workers {
            let line = connect(worker.door.clone(), router.body.door.clone());
            self.lines.spawn(line);
        }
    }

    /// Returns, with the reason, when something broke that only a new process makes good.
    pub async fn broken(&self) -> String {
        let pulses = self.workers.iter().map(|worker| &worker.pulse);
        let pulses = pulses.chain([&self.router.body.pulse]);
        let broken = pulses.map(|pulse| Box::pin(pulse.broken()));
        futures::future::select_all(broken).await.0
    }

    /// Accepts nothing new, waits until no flight is left or `deadline` has passed, ends the rest
    /// and stops.
    pub async fn drain(self, deadline: Duration) {
        let Self {
            router,
            workers,
            mut lines,
        } = self;
        router.drain(deadline).await;
        for worker in workers {
            worker.stop().await;
        }
        lines.shutdown().await;
    }
}

async fn wait_until_ready(mut readiness: watch::Receiver<Readiness>) {
    // The router's driver tells readiness for as long as the router runs.
    let _ = readiness.wait_for(|now| *now == Readiness::Ready).await;
}
