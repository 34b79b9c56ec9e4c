//! The router's body.
//!
//! Owns: the driver around the brain, the streams to clients, the interface to the HTTP server, the
//! models that it speaks for, and the dashboard. Never decides, or knows a port. Invariant: every
//! open stream ends, even after a panic of the driver.

mod adapters;
mod backlog;
mod dashboard;
mod driver;
mod event;
mod flights;
mod frontend;
mod grants;
mod join_warnings;
mod model_registry;
mod orders;
mod peer_routers;
mod readiness;
mod roster;
mod standby;

pub use model_registry::ModelRegistry;
pub use readiness::ModelReadiness;

use cleave_api::{App, Frontend};
use cleave_domain::{Ending, Failure, RouterId, SloPolicy};
use cleave_fleet::{
    EmissionSink, HealthMonitor, RouterAcceptor, ScalingStatus, ScalingStatusReader,
    ScalingStatuses,
};
use cleave_policy::{PolicyFile, PolicyReload, PolicyWatcher};
use cleave_router::RouterLimits;
use cleave_server::PeerRouterClient;
use cleave_telemetry::{
    PolicySeries, RouterMeters, SloMeters, TapeRecorder, Telemetry, TelemetryError, Traces,
};
use dashboard::Dashboard;
use driver::{RouterDriver, RouterEffects, RouterInbox};
use event::RouterEvent;
use flights::FlightTable;
use frontend::RouterFrontend;
use parking_lot::Mutex;
use peer_routers::watch_peer_routers;
use roster::WorkerRoster;
use std::collections::BTreeSet;
use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

/// Reports that wait for the driver, of all workers; connections wait when it is full.
const INBOX_MAX: usize = 4096;

/// How a router's body is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayOptions {
    /// Limits of its brain.
    pub limits: RouterLimits,
    /// The SLO policy, in a file that is followed; it replaces the policy of `limits`.
    pub policy: Option<PolicyFile>,
    /// The served names of the models whose workers may join; all where it is empty.
    pub served_models: Vec<String>,
    /// The file of the brain's tape, if there is one.
    pub tape: Option<PathBuf>,
    /// A worker that sends nothing for this long counts as lost.
    pub silence_max: Duration,
    /// Tokens given to a client before it takes one; with more it counts as stalled.
    pub reader_backlog_max: u32,
}

/// A router that runs.
#[derive(Debug)]
pub struct RouterBody {
    pub acceptor: RouterAcceptor,
    flights: Arc<FlightTable>,
    frontend: Arc<RouterFrontend>,
    driver: mpsc::UnboundedSender<RouterEvent>,
    readiness: watch::Receiver<ModelReadiness>,
    drained: watch::Receiver<bool>,
    pub monitor: Arc<HealthMonitor>,
    /// The number of workers wanted.
    pub scaling: ScalingStatusReader,
    traces: Traces,
    served_models: Vec<String>,
    task: JoinHandle<()>,
    /// Follows the policy's file.
    watch: Option<JoinHandle<()>>,
    /// Asks the fleet's other routers.
    peer_routers: Option<JoinHandle<()>>,
}

/// The ending of flights that are cut off.
fn stopping_ending() -> Ending {
    Ending::Failed(Failure::Draining)
}

/// Forwards changes of the policy's file. The brain gets a policy before any request under it,
/// since both use the same channel.
async fn follow_policy(
    watch: PolicyWatcher,
    series: PolicySeries,
    driver: mpsc::UnboundedSender<RouterEvent>,
    policy_sender: watch::Sender<Arc<SloPolicy>>,
) {
    let reloads = watch.run(|reload| {
        series.count(&reload);
        match reload {
            PolicyReload::Changed(policy, _) => {
                info!(classes = policy.classes.len(), "the policy changed");
                let event = RouterEvent::PolicyChanged {
                    policy: Arc::clone(&policy),
                };
                if driver.send(event).is_ok() {
                    policy_sender.send_replace(policy);
                }
            }
            PolicyReload::Same(_) => {
                info!("the policy file was read again: the policy is unchanged")
            }
            PolicyReload::Rejected(error) => {
                let lines: Vec<_> = error.to_string().lines().map(str::to_owned).collect();
                let reason = lines.join("; ");
                error!(reason, "the policy file has mistakes: the previous policy stays in force");
            }
            PolicyReload::Unreadable(error) => {
                let reason = error.source().map(ToString::to_string);
                warn!(%error, reason, "the policy file cannot be read: the previous policy stays in force");
            }
        }
    });
    reloads.await;
}

impl RouterBody {
    /// Starts the driver. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If the tape cannot be written.
    pub fn start(options: &GatewayOptions, telemetry: &Telemetry) -> Result<Self, TelemetryError> {
        // Drawn anew at each start, so that a late message about an old incarnation has no effect.
        let router = RouterId(rand::random_range(0..1 << 24));
        let mut limits = options.limits.clone();
        limits.me = router;
        if let Some(file) = &options.policy {
            limits.policy = Arc::clone(file.policy());
        }
        let meters = RouterMeters::new(&telemetry.router);
        let slo_meters = SloMeters::new(&telemetry.slo, &limits.policy);
        let (policy_sender, policy) = watch::channel(Arc::clone(&limits.policy));
        let traces = telemetry.traces.clone();
        let flights = FlightTable::new(meters.clone(), telemetry.slo.clone(), traces.clone());
        let flights = Arc::new(flights);
        let roster = Arc::new(WorkerRoster::default());
        let dashboard = Arc::new(Dashboard::default());
        let (inbox, workers) = mpsc::channel(INBOX_MAX);
        let (driver, clients) = mpsc::unbounded_channel();
        let (readiness_sender, readiness) = watch::channel(ModelReadiness::starting("starting"));
        let (drained_sender, drained) = watch::channel(false);
        let begins =
            ScalingStatus::after_policy_change(limits.policy.scaling.as_ref(), &ScalingStatus::Off);
        let (scaling_sender, scaling) = watch::channel(ScalingStatuses::from(begins));
        let answers = ScalingStatusReader::new(scaling);
        let effects = RouterEffects {
            flights: Arc::clone(&flights),
            roster: Arc::clone(&roster),
            meters,
            slo: slo_meters,
            dashboard: Arc::clone(&dashboard),
            recorder: TapeRecorder::create(options.tape.as_deref())?,
            readiness: readiness_sender,
            drained: drained_sender,
            scaling: scaling_sender,
            scaling_series: telemetry.scaling.clone(),
            policy: Arc::clone(&limits.policy),
        };
        let router_inbox = RouterInbox { workers, clients };
        let body = RouterDriver::new(limits, router_inbox, effects);
        let monitor = Arc::new(HealthMonitor::new(Duration::MAX));
        let (watched, left) = (Arc::clone(&monitor), Arc::clone(&flights));
        let task = tokio::spawn(async move {
            watched.watch(body.run()).await;
            // After a panic nothing else would end them.
            left.end_all(&stopping_ending());
        });
        let streams_max = options.limits.flights_max as usize + options.limits.queue_max as usize;
        let streams_max = streams_max.min(Semaphore::MAX_PERMITS);
        let frontend = RouterFrontend {
            router,
            flights: Arc::clone(&flights),
            roster,
            dashboard,
            backlog_max: options.reader_backlog_max,
            streams: Mutex::default(),
            streams_max,
            driver: driver.clone(),
            policy,
            scaling: answers.clone(),
            readiness: readiness.clone(),
            telemetry: telemetry.clone(),
            monitors: Mutex::new(vec![Arc::clone(&monitor)]),
            flights_submitted: AtomicU64::new(0),
        };
        let watch = options.policy.clone().map(|file| {
            let series = PolicySeries::clone(&telemetry.policy);
            series.begin_with(&file);
            tokio::spawn(follow_policy(
                PolicyWatcher::new(file),
                series,
                driver.clone(),
                policy_sender,
            ))
        });
        let acceptor = RouterAcceptor {
            router,
            inbox,
            flights: Arc::clone(&flights) as Arc<dyn EmissionSink>,
            silence: options.silence_max,
        };
        Ok(Self {
            acceptor,
            flights,
            frontend: Arc::new(frontend),
            driver,
            readiness,
            drained,
            monitor,
            scaling: answers,
            traces,
            served_models: options.served_models.clone(),
            task,
            watch,
            peer_routers: None,
        })
    }

    /// The models that `app` serves: those of this router's workers.
    pub fn model_registry(&self, app: App) -> ModelRegistry {
        let readiness = self.readiness.clone();
        let registry = ModelRegistry::new(app, Arc::clone(&self.flights), readiness);
        registry.serving_only(&self.served_models)
    }

    /// The interface for the HTTP server and other submitters.
    pub fn frontend(&self) -> Arc<dyn Frontend> {
        Arc::clone(&self.frontend) as Arc<dyn Frontend>
    }

    /// Polls from now on the routers of these names for waiting requests; `own` are this router's
    /// ports. Returns the addresses of the names, which may change.
    pub fn watch_peer_routers(
        &mut self,
        names: &[String],
        own: Vec<u16>,
        client: PeerRouterClient,
    ) -> watch::Receiver<BTreeSet<SocketAddr>> {
        let (found_sender, found) = watch::channel(BTreeSet::new());
        let driver = self.driver.clone();
        let asks = watch_peer_routers(names.to_vec(), own, client, driver, found_sender);
        self.peer_routers = (!names.is_empty()).then(|| tokio::spawn(asks));
        found
    }

    /// Includes an engine of this process in the health.
    pub fn add_monitor(&self, monitor: Arc<HealthMonitor>) {
        let mut pulses = self.frontend.monitors.lock();
        pulses.push(monitor);
    }

    /// Changes whenever a request for some model would find a worker, or none.
    pub fn readiness(&self) -> watch::Receiver<ModelReadiness> {
        self.readiness.clone()
    }

    /// Accepts nothing new and waits until no flight is left.
    pub async fn drain(&mut self) {
        // A stopped driver has no flight left.
        if self.driver.send(RouterEvent::Drain).is_ok() {
            let _ = self.drained.wait_for(|drained| *drained).await;
        }
    }

    /// Ends what is left, with the reason, and stops.
    pub async fn stop(self) {
        self.flights.end_all(&stopping_ending());
        let _ = self.driver.send(RouterEvent::Stop);
        for task in self.watch.iter().chain(&self.peer_routers) {
            task.abort();
        }
        // The driver ends on `Stop`, and catches its own panics.
        let _ = self.task.await;
        self.traces.flush().await;
    }
}
