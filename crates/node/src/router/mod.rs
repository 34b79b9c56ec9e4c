//! The router's body.
//!
//! Owns: the driver around the brain, the streams to clients, what the HTTP face sees.

mod added;
mod backlog;
mod driver;
mod facts;
mod fellows;
mod flights;
mod frontend;
mod joining;
mod lookout;
mod orders;
mod passes;
mod roster;
mod standby;

pub(crate) use added::Added;
pub(crate) use driver::RouterEvent;
pub(crate) use flights::Flights;
pub(crate) use lookout::Judgement;

use crate::ask::Asker;
use crate::door::RouterDoor;
use crate::health::Pulse;
use crate::policy::{Reload, Watch};
use crate::scaling::{Answers, Standing};
use crate::tape::Recorder;
use crate::telemetry::{PolicySeries, PromiseMeters, RouterMeters, Telemetry};
use crate::trace::Traces;
use crate::{NodeError, RouterOptions};
use cleave_api::{Frontend, Readiness};
use cleave_domain::{Ending, Failure, RouterId, SloPolicy};
use driver::{Driver, Ears, Hands};
use fellows::watch_fellows;
use frontend::RouterFrontend;
use lookout::Lookout;
use roster::Roster;
use std::error::Error;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

/// Reports that wait for the driver, of all workers; connections wait when it is full.
const INBOX_MAX: usize = 4096;

/// A router that runs.
#[derive(Debug)]
pub(crate) struct RouterBody {
    pub(crate) door: RouterDoor,
    frontend: Arc<RouterFrontend>,
    driver: mpsc::UnboundedSender<RouterEvent>,
    readiness: watch::Receiver<Readiness>,
    drained: watch::Receiver<bool>,
    pub(crate) pulse: Arc<Pulse>,
    /// How many workers there are to be.
    pub(crate) answers: Answers,
    traces: Traces,
    task: JoinHandle<()>,
    /// Follows the policy's file.
    watch: Option<JoinHandle<()>>,
    /// Asks the fleet's other routers.
    fellows: Option<JoinHandle<()>>,
}

/// How flights end that are cut off.
fn stopping() -> Ending {
    Ending::Failed(Failure::Draining)
}

/// Passes on what the policy's file says next. The brain hears of it before any request that goes by
/// it, since both come by the same way.
async fn follow(
    watch: Watch,
    series: PolicySeries,
    (driver, tell): (
        mpsc::UnboundedSender<RouterEvent>,
        watch::Sender<Arc<SloPolicy>>,
    ),
) {
    let heard = watch.run(|reload| {
        series.count(&reload);
        match reload {
            Reload::Changed(policy, _) => {
                info!(classes = policy.classes.len(), "the policy changed");
                let event = RouterEvent::PolicyChanged {
                    policy: Arc::clone(&policy),
                };
                if driver.send(event).is_ok() {
                    tell.send_replace(policy);
                }
            }
            Reload::Same(_) => info!("the policy's file was read again and says the same"),
            Reload::Rejected(error) => error!("{error}\nthe policy before stays"),
            Reload::Unreadable(error) => {
                let reason = error.source().map(ToString::to_string);
                warn!(reason, "{error}; the policy before stays");
            }
        }
    });
    heard.await;
}

impl RouterBody {
    /// Starts the driver.
    pub(crate) fn start(options: &RouterOptions, telemetry: &Telemetry) -> Result<Self, NodeError> {
        // Drawn anew at each start, so that a late word about an old life harms nothing.
        let router = RouterId(rand::random_range(0..1 << 24));
        let mut limits = options.limits.clone();
        limits.me = router;
        if let Some(file) = &options.policy {
            limits.policy = Arc::clone(file.policy());
        }
        let meters = RouterMeters::new(&telemetry.router);
        let promises = PromiseMeters::new(&telemetry.promises, &limits.policy);
        let (tell_policy, policy) = watch::channel(Arc::clone(&limits.policy));
        let traces = telemetry.traces.clone();
        let flights = Arc::new(Flights::new(meters.clone(), traces.clone()));
        let roster = Arc::new(Roster::default());
        let lookout = Arc::new(Lookout::default());
        let (inbox, workers) = mpsc::channel(INBOX_MAX);
        let (driver, clients) = mpsc::unbounded_channel();
        let starting = Readiness::NotReady("starting".into());
        let (tell_readiness, readiness) = watch::channel(starting);
        let (tell_drained, drained) = watch::channel(false);
        let begins = Standing::of(limits.policy.scaling.as_ref(), &Standing::Off);
        let (tell_scaling, scaling) = watch::channel(begins);
        let answers = Answers::new(scaling);
        let hands = Hands {
            flights: Arc::clone(&flights),
            roster: Arc::clone(&roster),
            meters,
            promises,
            lookout: Arc::clone(&lookout),
            recorder: Recorder::create(options.tape.as_deref())?,
            readiness: tell_readiness,
            drained: tell_drained,
            scaling: tell_scaling,
            scaling_series: telemetry.scaling.clone(),
        };
        let ears = Ears { workers, clients };
        let body = Driver::new(limits, ears, hands);
        let pulse = Arc::new(Pulse::new(Duration::MAX));
        let (watched, left) = (Arc::clone(&pulse), Arc::clone(&flights));
        let task = tokio::spawn(async move {
            watched.watch(body.run()).await;
            // After a panic nobody else would.
            left.end_all(&stopping());
        });
        let streams_max = options.limits.flights_max as usize + options.limits.queue_max as usize;
        let streams_max = streams_max.min(Semaphore::MAX_PERMITS);
        let frontend = RouterFrontend {
            router,
            flights: Arc::clone(&flights),
            roster,
            lookout,
            backlog_max: options.reader_backlog_max,
            streams: Arc::new(Semaphore::new(streams_max)),
            streams_max,
            driver: driver.clone(),
            policy,
            answers: answers.clone(),
            readiness: readiness.clone(),
            telemetry: telemetry.clone(),
            pulses: Mutex::new(vec![Arc::clone(&pulse)]),
            number: AtomicU64::new(0),
        };
        let watch = options.policy.clone().map(|file| {
            let series = PolicySeries::clone(&telemetry.policy);
            series.holds(&file);
            tokio::spawn(follow(
                Watch::new(file),
                series,
                (driver.clone(), tell_policy),
            ))
        });
        let door = RouterDoor {
            router,
            inbox,
            flights,
            silence: options.silence_max,
        };
        Ok(Self {
            door,
            frontend: Arc::new(frontend),
            driver,
            readiness,
            drained,
            pulse,
            answers,
            traces,
            task,
            watch,
            fellows: None,
        })
    }

    /// For the HTTP face, or whoever else wants sequences.
    pub(crate) fn frontend(&self) -> Arc<dyn Frontend> {
        Arc::clone(&self.frontend) as Arc<dyn Frontend>
    }

    /// Hears from now on who waits at the routers of these names; `own` are this router's ports.
    pub(crate) fn ask_fellows(&mut self, names: &[String], own: Vec<u16>, asker: Asker) {
        let asks = watch_fellows(names.to_vec(), (own, asker), self.driver.clone());
        self.fellows = (!names.is_empty()).then(|| tokio::spawn(asks));
    }

    /// Answers for an engine of this process too.
    pub(crate) fn vouch_for(&self, pulse: Arc<Pulse>) {
        let pulses = self.frontend.pulses.lock();
        pulses.unwrap_or_else(PoisonError::into_inner).push(pulse);
    }

    /// Changes whenever a request would find a worker, or none.
    pub(crate) fn readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.clone()
    }

    /// Accepts nothing new and waits until no flight is left.
    pub(crate) async fn drain(&mut self) {
        // A stopped driver has no flight left.
        if self.driver.send(RouterEvent::Drain).is_ok() {
            let _ = self.drained.wait_for(|drained| *drained).await;
        }
    }

    /// Ends what is left, with the reason, and stops.
    pub(crate) async fn stop(self) {
        self.door.flights.end_all(&stopping());
        let _ = self.driver.send(RouterEvent::Stop);
        for task in self.watch.iter().chain(&self.fellows) {
            task.abort();
        }
        // It ends by itself when told, and catches its own panics.
        let _ = self.task.await;
        self.traces.flush().await;
    }
}
