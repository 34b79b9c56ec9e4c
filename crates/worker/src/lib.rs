//! The worker's body.
//!
//! Owns: the driver around the brain, the engine's host, the worker's links, the constraints of its
//! requests, and the measurement of its engine before it joins. Never decides, or knows what
//! carries a connection to a router.
//! Invariant: the driver waits for no engine, link or router.

mod adapter_gate;
mod admin;
mod calibrate;
mod constraint_gate;
mod constraints;
mod directory;
mod driver;
mod engine;
mod exports;
mod facts;
mod kv_copier;
mod options;
mod overlap;
mod pace;
mod pools;
mod queue;
mod spans;
mod step_failure;
mod stops;
mod swap;
mod tier;

pub use admin::WorkerAdmin;
pub use calibrate::{CALIBRATION, Calibration, StepPart, StepTimer, calibrate};
pub use options::{OpenAdapter, WorkerOptions};
pub use pace::StepTime;
pub use tier::{DiskOptions, SlabError, TierOptions};

use adapter_gate::{AdapterEvent, AdapterGate};
use cleave_domain::{Incarnation, WorkerDescription, WorkerId, WorkerRef};
use cleave_engine::{ConstraintSource, Engine, EngineDescription, STEPS_IN_FLIGHT_MAX};
use cleave_fleet::{HealthMonitor, Registration, WorkerAcceptor, WorkerEvent};
use cleave_sched::{AdapterLimits, LookupLimits, PoolWriter};
use cleave_telemetry::{TapeRecorder, Telemetry, TelemetryError, WorkerMeters, WorkerSpans};
use cleave_text::ModelFiles;
use cleave_tls::PeerTls;
use cleave_transfer::{GrantIssuer, Links, LinksConfig, Listeners, LocalNet, Nixl, PoolSharing};
use constraint_gate::ConstraintGate;
use constraints::{ForcedTokens, WorkerConstraints};
use driver::{LinkPriceSource, WorkerDriver, WorkerEffects, WorkerInbox};
use engine::{EngineHost, EngineHostLimits};
use pools::DevicePools;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::info;

/// Orders that wait for the driver; connections wait when it is full.
const INBOX_MAX: usize = 4096;
/// Packets and frames that wait for the driver, besides what credit allows on the way.
const LINK_EVENTS_MAX: usize = 1024;

/// The reason why a worker cannot start.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The folder for KV blocks cannot be used.
    #[error(transparent)]
    Tier(#[from] SlabError),
    /// The system cannot start the engine's thread.
    #[error("cannot start the engine's thread")]
    Thread(#[source] io::Error),
    /// The tape cannot be written.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
}

/// Everything that a worker is started from.
pub struct WorkerParts {
    pub options: WorkerOptions,
    pub engine: Box<dyn Engine>,
    pub files: Arc<ModelFiles>,
    /// The network to other workers of this process.
    pub net: LocalNet,
    /// The listeners for workers of other processes, and the addresses to announce.
    pub data: Option<(Listeners, String)>,
    /// The certificates by which this worker and its peers know each other.
    pub peers: Option<PeerTls>,
    /// NVIDIA's transfer library, if it is there.
    pub nixl: Option<Arc<Nixl>>,
}

/// A worker that runs.
#[derive(Debug)]
pub struct WorkerBody {
    pub acceptor: WorkerAcceptor,
    pub monitor: Arc<HealthMonitor>,
    pub admin: Arc<WorkerAdmin>,
    drained: watch::Receiver<bool>,
    driver: JoinHandle<()>,
    data: Option<JoinHandle<()>>,
}

impl WorkerBody {
    /// Starts the engine's host, the driver and, if there is a listener, the data server.
    pub fn start(parts: WorkerParts, telemetry: &Telemetry) -> Result<Self, WorkerError> {
        let WorkerParts {
            options,
            mut engine,
            files,
            net,
            data,
            peers,
            nixl,
        } = parts;
        let description = engine.describe().clone();
        let me = identity(&options.name);
        let steps_in_flight = steps_in_flight(engine.as_mut());
        let speculation = speculation(engine.as_ref(), options.speculation);
        let forced = match speculation {
            Some(_) => ForcedTokens::Proposed,
            None => ForcedTokens::Left,
        };
        let constraints = Arc::new(WorkerConstraints::new(Arc::clone(&files), forced));
        engine.enforce(Arc::clone(&constraints) as Arc<dyn ConstraintSource>);
        let (constraint_gate, known_constraints) = ConstraintGate::new(constraints);
        let (adapter_gate, adapter_events) = adapter_gate(engine.as_ref(), &options);
        let monitor = Arc::new(HealthMonitor::new(options.step_max));
        let (answers, engine_answers) = mpsc::unbounded_channel();
        let limits = engine_limits(&options, &description);
        let blocks = match options.step_time {
            StepTime::Measured => engine.blocks(),
            StepTime::Priced(_) => None,
        };
        let pools = blocks.clone().filter(|_| options.writes_to_pools);
        let tier = tier::OpenedTier::open(
            &options.tier,
            &description.fingerprint,
            description.capacity.block_bytes,
        )?;
        let tier = tier.filter(|_| options.prefix_cache);
        let below = tier
            .as_ref()
            .map(|tier| (tier.host_blocks, tier.disk_blocks));
        let found = tier.as_ref().map(|tier| tier.found.clone());
        let host = EngineHost::start(engine, blocks, tier, limits, Arc::clone(&monitor), answers);
        let host = host.map_err(WorkerError::Thread)?;
        let (link_events, received_events) = mpsc::channel(LINK_EVENTS_MAX);
        let capacity = description.capacity;
        let pools =
            pools.map(|blocks| Arc::new(DevicePools { blocks, capacity }) as Arc<dyn PoolSharing>);
        let writer = match pools {
            // See `cleave_transfer::PoolSharing` for why that is safe for peers that send frames,
            // too.
            Some(_) => PoolWriter::Sender,
            None => PoolWriter::Receiver,
        };
        // Workers of one process cannot impersonate each other, so they need no grants.
        let grants = data.is_some().then(|| GrantIssuer::new(rand::random()));
        let links_config = LinksConfig {
            pools,
            peer_tls: peers,
            grants: grants.clone(),
            nixl,
            ..links_config(&options, me, &description)
        };
        let links = Links::new(links_config, link_events, net);
        let (drained_sender, drained) = watch::channel(false);
        let (listeners, data_address) = data.unzip();
        let (inbox, outside) = mpsc::channel(INBOX_MAX);
        let registration = Registration {
            worker: me,
            name: options.name.clone(),
            description: WorkerDescription {
                role: options.role,
                home: options.role,
                model: files.name.clone(),
                fingerprint: description.fingerprint.clone(),
                capacity: description.capacity,
                queue_max: options.queue_max,
                device: description.device_id.clone(),
            },
            data_address: data_address.unwrap_or_default(),
            silence: options.silence_max,
            files,
        };
        let admin = Arc::new(WorkerAdmin::new(&registration, inbox.clone()));
        let model = &registration.files.name;
        let effects = WorkerEffects {
            engine: host,
            links: links.clone(),
            grants,
            meters: WorkerMeters::new(&telemetry.workers, &options.name, options.role, model)
                .with_ceilings(options.ceilings)
                .with_capacity(description.capacity),
            spans: WorkerSpans::new(
                telemetry.traces.clone(),
                options.name.clone(),
                model.clone(),
            ),
            recorder: TapeRecorder::create(options.tape.as_deref())?,
            name: options.name.clone(),
            data_address: registration.data_address.clone(),
            link_prices: match options.step_time {
                StepTime::Measured => LinkPriceSource::Measured,
                StepTime::Priced(_) => LinkPriceSource::Given,
            },
            admin: Arc::clone(&admin),
            constraint_gate,
            adapter_gate,
            drained: drained_sender,
        };
        let worker_inbox = WorkerInbox {
            inbox: outside,
            links: received_events,
            engine: engine_answers,
            constraints: known_constraints,
            adapters: adapter_events,
        };
        let (host_blocks, disk_blocks) = below.unwrap_or_default();
        let limits = cleave_sched::WorkerLimits {
            writer,
            speculation,
            host_blocks,
            disk_blocks,
            ..brain_limits(&options, me, steps_in_flight, &description)
        };
        let driver = WorkerDriver::new(limits, found.unwrap_or_default(), worker_inbox, effects);
        let watched = Arc::clone(&monitor);
        let driver = tokio::spawn(async move { watched.watch(driver.run()).await });
        Ok(Self {
            acceptor: WorkerAcceptor {
                registration,
                role: admin.role(),
                inbox,
            },
            monitor,
            admin,
            drained,
            driver,
            data: listeners.map(|listeners| tokio::spawn(links.serve(listeners))),
        })
    }

    /// Accepts nothing new and waits until nothing is left here.
    pub async fn drain(&mut self) {
        // A stopped driver holds nothing.
        if self.acceptor.inbox.send(WorkerEvent::Drain).await.is_ok() {
            let _ = self.drained.wait_for(|drained| *drained).await;
        }
    }

    pub async fn stop(self) {
        let _ = self.acceptor.inbox.send(WorkerEvent::Stop).await;
        // The driver ends on `Stop`, and catches its own panics.
        let _ = self.driver.await;
        if let Some(data) = self.data {
            data.abort();
        }
    }
}

/// The gate of a worker that serves the adapters of its options.
fn adapter_gate(
    engine: &dyn Engine,
    options: &WorkerOptions,
) -> (AdapterGate, mpsc::UnboundedReceiver<AdapterEvent>) {
    let root = options.lora_root.clone();
    let limits = AdapterLimits {
        loaded_max: options.max_loras,
        host_max: options.max_cpu_loras,
    };
    let (mut gate, events) = AdapterGate::new(engine.adapters(), limits, root);
    for OpenAdapter {
        name,
        folder,
        facts,
    } in &options.adapters
    {
        gate.serve(name, folder, *facts);
    }
    (gate, events)
}

/// Equal names are the same worker; each start is a new incarnation, ordered by the clock.
fn identity(name: &str) -> WorkerRef {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let micros = since.unwrap_or_default().as_micros();
    WorkerRef {
        worker: WorkerId(cleave_transfer::checksum(name.as_bytes())),
        incarnation: Incarnation(u64::try_from(micros).unwrap_or(u64::MAX)),
    }
}

fn engine_limits(options: &WorkerOptions, engine: &EngineDescription) -> EngineHostLimits {
    EngineHostLimits {
        capacity: engine.capacity,
        write_bytes_max: options.import_bytes_per_step,
        swap_bytes_max: swap_bytes(options, engine),
        time: options.step_time.clone(),
    }
}

fn links_config(options: &WorkerOptions, me: WorkerRef, engine: &EngineDescription) -> LinksConfig {
    let block_bytes = engine.capacity.block_bytes;
    LinksConfig {
        credit_bytes: options.credit_bytes,
        frame_bytes_max: options.frame_bytes_max,
        streams_count: options.streams_count,
        transports: options.transports.clone(),
        ..LinksConfig::new(me, engine.fingerprint.clone(), block_bytes)
    }
}

fn brain_limits(
    options: &WorkerOptions,
    me: WorkerRef,
    steps_in_flight: u32,
    engine: &EngineDescription,
) -> cleave_sched::WorkerLimits {
    let block_bytes = u64::from(engine.capacity.block_bytes);
    cleave_sched::WorkerLimits {
        me,
        role: options.role,
        capacity: engine.capacity,
        vocab_size: engine.vocab_size,
        queue_max: options.queue_max,
        lease: options.lease,
        stall_max: options.stall_max,
        prefix_cache: options.prefix_cache,
        step_max: options.step_max,
        swap_blocks: u32::try_from(swap_bytes(options, engine) / block_bytes).unwrap_or(u32::MAX),
        // Known once the tier is open.
        host_blocks: 0,
        disk_blocks: 0,
        writer: PoolWriter::Receiver,
        prices: match &options.prices {
            Some(prices) => prices.clone(),
            None => options.step_time.prices(),
        },
        steps_in_flight,
        speculation: None,
    }
}

/// Limits the number of drafts to what the engine verifies; `None` if it verifies none.
pub fn speculation(engine: &dyn Engine, requested: Option<LookupLimits>) -> Option<LookupLimits> {
    let requested = requested?;
    let drafts_max = requested.drafts_max.min(engine.drafts_max());
    if drafts_max == 0 {
        let EngineDescription {
            device, capacity, ..
        } = engine.describe();
        let reason = match capacity.states {
            Some(_) => "the model has a state, which cannot take back a rejected token",
            None => "the device samples its tokens itself, one in each step",
        };
        info!(%device, reason, "speculation is off");
        return None;
    }
    Some(LookupLimits {
        drafts_max,
        ..requested
    })
}

/// The number of steps that the engine takes at a time.
fn steps_in_flight(engine: &mut dyn Engine) -> u32 {
    let count = match engine.overlap() {
        Some(_) => STEPS_IN_FLIGHT_MAX,
        None => 1,
    };
    u32::try_from(count).expect("steps in flight are few")
}

/// Bytes of host memory for swapping.
fn swap_bytes(options: &WorkerOptions, engine: &EngineDescription) -> u64 {
    let capacity = &engine.capacity;
    let states = capacity.states.map_or(0, |states| {
        u64::from(states.count) * u64::from(states.bytes)
    });
    let pool = u64::from(capacity.blocks_count) * u64::from(capacity.block_bytes) + states;
    options.swap_bytes.unwrap_or(pool / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_api::{Operator, WorkerState};
    use cleave_domain::{BlockIndex, Capacity, KvPlane, Role, RouterId, StepPlan, StepResult};
    use cleave_engine::{BlockSpan, EngineError};
    use cleave_fleet::LinkState;

    /// An engine that is never used.
    struct UnusedEngine(EngineDescription);

    impl Engine for UnusedEngine {
        fn describe(&self) -> &EngineDescription {
            &self.0
        }

        fn step(&mut self, _: &StepPlan) -> Result<StepResult, EngineError> {
            unreachable!("nothing runs here")
        }

        fn read_block(&self, _: BlockSpan, _: &mut [u8]) -> Result<(), EngineError> {
            unreachable!("nothing leaves")
        }

        fn write_block(&mut self, _: BlockSpan, _: &[u8]) -> Result<(), EngineError> {
            unreachable!("nothing comes")
        }

        fn copy_blocks(
            &mut self,
            _: KvPlane,
            _: &[(BlockIndex, BlockIndex)],
        ) -> Result<(), EngineError> {
            unreachable!("nothing is copied")
        }
    }

    fn unused_worker(options: WorkerOptions) -> WorkerBody {
        let registration = cleave_fleet::sample::registration();
        let capacity: Capacity = registration.description.capacity;
        let parts = WorkerParts {
            options,
            engine: Box::new(UnusedEngine(EngineDescription {
                capacity,
                fingerprint: registration.description.fingerprint.clone(),
                vocab_size: 100,
                device: "none".into(),
                device_id: None,
                model: "none".into(),
            })),
            files: registration.files,
            net: LocalNet::default(),
            data: None,
            peers: None,
            nixl: None,
        };
        WorkerBody::start(parts, &Telemetry::default()).unwrap()
    }

    #[tokio::test]
    async fn a_router_lost_while_joining_is_lost_to_the_brain() {
        let tape = std::env::temp_dir().join(format!("cleave-phantom-{}", std::process::id()));
        let mut options = WorkerOptions::new("w", Role::Both);
        options.tape = Some(tape.clone());
        let body = unused_worker(options);
        // It has a link to report to routers that join.
        body.admin.link_measured(&LinkState {
            peer: WorkerRef::default(),
            transport: "tcp".into(),
            bytes_per_second: 1,
            latency: std::time::Duration::ZERO,
        });
        let (session, messages) = body.acceptor.join(RouterId(7)).await.unwrap();
        drop(messages);
        session.close().await;
        body.stop().await;
        let text = std::fs::read_to_string(&tape).unwrap();
        std::fs::remove_file(&tape).unwrap();
        let line_of = |name: &str| {
            text.lines()
                .position(|l| l.contains("eard") && l.contains(name))
        };
        let (joined, lost) = (line_of("RouterJoined"), line_of("RouterLost"));
        assert!(joined.is_some() && joined < lost, "{text}");
    }

    #[tokio::test]
    async fn a_worker_drained_by_a_signal_is_shown_draining() {
        let mut body = unused_worker(WorkerOptions::new("w", Role::Both));
        body.drain().await;
        assert_eq!(body.admin.workers()[0].state, WorkerState::Draining);
        body.stop().await;
    }
}
