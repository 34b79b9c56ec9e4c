//! The long-running commands: `serve`, `router`, `worker`.
//!
//! Owns: the startup output. Never: decides anything about a request.

mod addresses;
mod lifetime;
mod models;

use crate::adapters::with_adapters;
use crate::args::{
    HostArgs, HttpArgs, ModelArgs, ProcessArgs, RouterArgs, RouterLimitArgs, ServeArgs, WorkerArgs,
};
use crate::gpu;
use crate::model::{EngineShare, ProcessWorkers};
use crate::source::{EngineSource, OpenedSource};
use addresses::{AddressFlag, with_flag};
use anyhow::{Context, bail};
use cleave_api::ApiOptions;
use cleave_domain::{DeviceId, Role, ScalingMode};
use cleave_engine::Engine;
use cleave_node::{
    FleetModel, FleetNode, FleetPorts, RouterNode, RouterOptions, WorkerNode, WorkerPorts,
};
use cleave_policy::PolicyFile;
use cleave_router::{LegPlacement, RoutingMode};
use cleave_worker::{Calibration, WorkerOptions};
use lifetime::{ShutdownPlan, TerminationSignals, run_until_stopped};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tracing::{info, warn};

/// Workers of the same process join within this time; no others come.
const WORKERS_JOIN_MAX: Duration = Duration::from_secs(1);

/// Runs a router and its workers in this process.
pub(crate) fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let models = models::of(args)?;
    let mut router = router_options(&args.router, &args.http, &args.process)?;
    router.api.startup_grace = WORKERS_JOIN_MAX;
    if let [only] = &models[..] {
        let served = only.model.name.served_model_name.iter();
        router.api.aliases = served.skip(1).cloned().collect();
    }
    make_tape_folder(&args.process)?;
    models
        .iter()
        .try_for_each(|model| check_tier(&model.host))?;
    let models = models::open(models)?;
    let listen = SocketAddr::new(args.address, args.port).to_string();
    let runtime = runtime()?;
    let ports = runtime.block_on(FleetPorts::open(&listen, &router));
    let ports = ports.map_err(|error| {
        with_flag(
            error,
            &router_addresses("--host or --port", &listen, &router),
        )
    })?;
    let models = models::start(models, &args.process)?;
    for model in &models {
        let workers = model.workers.iter();
        let workers = || {
            workers
                .clone()
                .map(|(options, engine)| (options, engine.as_ref()))
        };
        log_startup(&model.source, workers());
        let limits = &router.limits;
        if limits.mode == RoutingMode::Slo && limits.placement != LegPlacement::Split {
            let devices = workers().map(|(options, engine)| {
                let device = engine.describe().device_id.clone();
                (options.name.as_str(), device)
            });
            if let Some(note) = shared_device_note(devices) {
                info!("{note}");
            }
        }
    }
    let models = models.into_iter().map(|model| FleetModel {
        workers: model.workers,
        files: model.source.into_files(),
    });
    let serve = FleetNode {
        listen,
        router,
        models: models.collect(),
    };
    runtime.block_on(async {
        let stop = TerminationSignals::new()?;
        let running = serve.start_at(ports).await?;
        let at = PrintedAddresses::of(&args.http, running.address(), running.admin_address());
        run_until_stopped(
            running,
            stop,
            args.http.shutdown_plan(&args.process),
            |_| at.print(),
        )
        .await
    })
}

/// Runs the router alone.
pub(crate) fn router(args: &RouterArgs) -> anyhow::Result<()> {
    make_tape_folder(&args.process)?;
    let mut options = router_options(&args.limits, &args.http, &args.process)?;
    options.peer_routers.clone_from(&args.peers.fellow_routers);
    options.served_models.clone_from(&args.served_model);
    let picker = args.picker.options();
    let can_query_routers = options.peer_tls.is_some() || args.picker.picker_admin_port.is_some();
    if picker.is_some() && options.certificate.is_some() && !can_query_routers {
        bail!(
            "--picker-endpoints: where clients use TLS, the picker queries routers by --peer-tls, or in clear text \
             at the port of their --admin-listen: give --peer-tls or --picker-admin-port"
        );
    }
    let waits = awaited_workers_text(options.policy.as_ref());
    let listen = args.listen.to_string();
    let mut addresses = router_addresses("--listen", &listen, &options);
    let picker_listen = args.picker.ext_proc_listen;
    addresses.push((
        "--ext-proc-listen",
        picker_listen.map(|address| address.to_string()),
    ));
    let node = RouterNode {
        listen,
        options,
        picker,
    };
    runtime()?.block_on(async {
        let stop = TerminationSignals::new()?;
        let started = node.start().await;
        let running = started.map_err(|error| with_flag(error, &addresses))?;
        // Scripts pass this address to workers, so it is printed before a worker joins.
        PrintedAddresses::of(&args.http, running.address(), running.admin_address()).print();
        if let Some(address) = running.picker_address() {
            info!(%address, "endpoint picker is served");
        }
        info!("{waits}");
        run_until_stopped(
            running,
            stop,
            args.http.shutdown_plan(&args.process),
            |_| info!("ready"),
        )
        .await
    })
}

/// The flags of a router's addresses; `front` is the flag of `listen`.
fn router_addresses(
    front: &'static str,
    listen: &str,
    options: &RouterOptions,
) -> Vec<AddressFlag> {
    vec![
        (front, Some(listen.to_owned())),
        ("--admin-listen", options.admin_listen.clone()),
        (
            "--external-metrics-listen",
            options.external_metrics_listen.clone(),
        ),
    ]
}

/// Says what a router without workers does.
fn awaited_workers_text(policy: Option<&PolicyFile>) -> &'static str {
    let scaling = policy.and_then(|file| file.policy().scaling.as_ref());
    match scaling {
        Some(scaling) if scaling.mode == ScalingMode::Act && scaling.can_serve() => {
            "no worker is connected: the first request starts one, by the autoscaler, and waits for it"
        }
        _ => "waiting for a prefill and a decode worker",
    }
}

pub(crate) fn worker(args: &WorkerArgs) -> anyhow::Result<()> {
    if let [_, alias, ..] = &args.model.served_model_name[..] {
        bail!(
            "a worker has one --served-model-name; `{alias}` is an alias, which the router's policy \
             lists: models: [{{name: …, aliases: [{alias}]}}]"
        );
    }
    make_tape_folder(&args.process)?;
    check_tier(&args.host)?;
    let role = Role::from(args.leg);
    let name = args.name.clone().unwrap_or_else(|| name_default(role));
    let options = WorkerOptions {
        transports: args.transport.transports(),
        nixl_library: args.transport.nixl_library.clone(),
        ..worker_options(name, role, &args.host, &args.process)?
    };
    let traces = args.process.traces.options()?;
    let data_listen = args.data_listen.to_string();
    let metrics_listen = args.metrics_listen.map(|address| address.to_string());
    let runtime = runtime()?;
    let ports = WorkerPorts::open(&data_listen, metrics_listen.as_deref(), &options, &traces);
    let ports = runtime.block_on(ports).map_err(|error| {
        let addresses = [
            ("--data-listen", Some(data_listen.clone())),
            ("--metrics-listen", metrics_listen.clone()),
        ];
        with_flag(error, &addresses)
    })?;
    let model = ModelArgs {
        name: args.model.clone(),
        form: args.host.form.clone(),
    };
    let source = OpenedSource::open(&model, &args.host)?.load(&args.host)?;
    let workers = ProcessWorkers::of(std::iter::once((&args.host.engine, 1)));
    let share = EngineShare {
        kv_bytes: source.kv_bytes(&args.host.engine, workers)?,
        workers_before: 0,
        workers_count: 1,
    };
    let mut engine = source
        .engines(&args.host.engine, &[role], share)?
        .pop()
        .context("one engine was asked for")?;
    let share = args.host.engine.gpu_decode_share;
    let is_mps = source.is_mps();
    if let Some(warning) = is_mps.and_then(|is_mps| gpu::single_leg_warning(role, share, is_mps)) {
        warn!("{warning}");
    }
    let options = with_adapters(options, engine.as_ref(), &args.host, &source)?;
    let options = with_measured_prices(options, &source, engine.as_mut(), &args.host)?;
    log_startup(&source, std::iter::once((&options, engine.as_ref())));
    let node = WorkerNode {
        options,
        engine,
        files: source.into_files(),
        routers: args.router.clone(),
        data_listen,
        data_address: args.data_advertise.clone(),
        metrics_listen,
        traces,
    };
    runtime.block_on(async {
        let stop = TerminationSignals::new()?;
        let running = node.start_at(ports).await?;
        info!(data = %running.data_address(), routers = args.router.join(","), "worker runs");
        if let Some(address) = running.metrics_address() {
            info!(url = %format_args!("http://{address}/metrics"), "metrics are served");
        }
        let shutdown = ShutdownPlan {
            delay: Duration::ZERO,
            limit: args.process.drain_timeout,
        };
        // Each connection to a router is logged where it begins.
        run_until_stopped(running, stop, shutdown, |_| {}).await
    })
}

/// Returns a name that is unique in a fleet: containers share process ids, and processes share a
/// host.
fn name_default(role: Role) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{role}-{}-{}", host.trim(), std::process::id())
}

/// Checks the folder before the model is loaded, which may take minutes.
fn check_tier(host: &HostArgs) -> anyhow::Result<()> {
    let checked = host.limits.tier.options().check();
    checked.context("--kv-offloading-dir")
}

/// Adds the measured step times of the engine to the options.
fn with_measured_prices(
    options: WorkerOptions,
    source: &EngineSource,
    engine: &mut dyn Engine,
    host: &HostArgs,
) -> anyhow::Result<WorkerOptions> {
    let measured = source.measure(engine, host.limits.calibrate.0)?;
    Ok(WorkerOptions {
        step_time: source.step_time(options.role),
        prices: measured.as_ref().map(Calibration::prices),
        ceilings: measured.map(|measured| measured.ceilings),
        ..options
    })
}

fn worker_options(
    name: String,
    role: Role,
    host: &HostArgs,
    process: &ProcessArgs,
) -> anyhow::Result<WorkerOptions> {
    let HostArgs { engine, limits, .. } = host;
    let defaults = WorkerOptions::new(name, role);
    Ok(WorkerOptions {
        queue_max: engine.max_queue.unwrap_or(defaults.queue_max),
        prefix_cache: !engine.no_prefix_cache,
        step_max: limits.step_max.0,
        swap_bytes: limits.swap_space,
        speculation: limits.speculation.speculative_config.0,
        tier: limits.tier.options(),
        silence_max: process.worker_silence.0,
        admin_key: process.admin_key()?,
        peer_tls: process.peer_tls.clone(),
        tape: tape(process, &defaults.name),
        ..defaults
    })
}

fn router_options(
    limits: &RouterLimitArgs,
    face: &HttpArgs,
    process: &ProcessArgs,
) -> anyhow::Result<RouterOptions> {
    let defaults = RouterOptions::default();
    let mut brain = defaults.limits;
    brain.failures_max = limits.migration_limit;
    brain.moves_max = limits.max_moves;
    brain.queue_wait_max = limits.queue_wait.0;
    brain.reader_wait_max = limits.reader_wait.0;
    brain.mode = limits.router_mode.into();
    brain.placement = limits.placement.into();
    if let Some(policy) = face.access.policy()? {
        brain.policy = Arc::new(policy);
    }
    let policy = limits.policy.as_deref().map(PolicyFile::open);
    Ok(RouterOptions {
        limits: brain,
        policy: policy.transpose()?,
        silence_max: process.worker_silence.0,
        reader_backlog_max: limits.reader_backlog,
        external_metrics_listen: limits.external_metrics_listen.map(|at| at.to_string()),
        peer_routers: Vec::new(),
        served_models: Vec::new(),
        tape: tape(process, "router"),
        traces: process.traces.options()?,
        http: face.http_limits(),
        certificate: face.certificate(),
        peer_tls: process.peer_tls.clone(),
        admin_listen: face.admin_listen.map(|address| address.to_string()),
        api: ApiOptions {
            admin_key: process.admin_key()?,
            body_bytes_max: face.max_body,
            body_memory_bytes: face.body_memory,
            template_memory_bytes: face.template_memory,
            vector_memory_bytes: face.vector_memory,
            queue_wait_max: limits.queue_wait.0,
            body_wait_max: face.body_timeout.0,
            keep_alive: limits.streams.keep_alive(),
            prompts: limits.prompts.shown(),
            access_log: limits.prompts.access_log(),
            outputs: face.outputs(),
            responses: face.responses.limits()?,
            allowed_origins: face.access.allowed_origins.clone(),
            ..defaults.api
        },
    })
}

fn make_tape_folder(process: &ProcessArgs) -> anyhow::Result<()> {
    let Some(folder) = &process.tape else {
        return Ok(());
    };
    std::fs::create_dir_all(folder).with_context(|| format!("--tape {}", folder.display()))
}

fn tape(process: &ProcessArgs, name: &str) -> Option<PathBuf> {
    process
        .tape
        .as_ref()
        .map(|folder| folder.join(format!("{name}.jsonl")))
}

/// Logs which worker runs on which device.
fn log_startup<'a>(
    source: &EngineSource,
    workers: impl Iterator<Item = (&'a WorkerOptions, &'a dyn Engine)>,
) {
    let context = source.context_tokens_max();
    let model = source.title();
    info!(model, context_tokens = context, "model loaded");
    for (options, engine) in workers {
        let description = engine.describe();
        let capacity = description.capacity;
        let tokens = u64::from(capacity.blocks_count) * u64::from(capacity.block_tokens);
        let mib = (u64::from(capacity.blocks_count) * u64::from(capacity.block_bytes)) >> 20;
        let windows = capacity.windows;
        let window_tokens =
            windows.map(|one| u64::from(one.count) * u64::from(capacity.block_tokens));
        let window_mib = windows.map(|one| (u64::from(one.count) * u64::from(one.bytes)) >> 20);
        info!(worker = options.name, device = %description.device, tokens, mib, window_tokens, window_mib, "KV cache");
        if let Some(warning) = short_cache_warning(&options.name, tokens, context) {
            warn!("{warning}");
        }
    }
}

/// Returns a warning if a worker's KV cache holds less than the longest sequence of the model.
fn short_cache_warning(name: &str, cache_tokens: u64, context: u32) -> Option<String> {
    (cache_tokens < u64::from(context)).then(|| {
        format!(
            "{name}: the KV cache holds {cache_tokens} tokens, fewer than the context of {context}: longer sequences \
             are refused, and a request without max_tokens gets what the cache leaves; raise --kv-cache, or lower \
             --max-model-len"
        )
    })
}

/// Returns a note on workers that compute on the same hardware, if any do.
fn shared_device_note<'a>(
    workers: impl Iterator<Item = (&'a str, Option<DeviceId>)>,
) -> Option<String> {
    let mut devices: BTreeMap<DeviceId, Vec<&str>> = BTreeMap::new();
    for (name, device) in workers {
        if let Some(device) = device {
            devices.entry(device).or_default().push(name);
        }
    }
    let there = devices.into_values().find(|there| there.len() > 1)?;
    Some(format!(
        "{} compute on the same hardware, so one of them serves both legs of a request; --placement split uses two \
         workers, --threads divides a processor's cores, and --gpu-decode-share a GPU",
        there.join(" and ")
    ))
}

/// Addresses of the server for clients and operators.
struct PrintedAddresses {
    scheme: &'static str,
    front: SocketAddr,
    admin: Option<SocketAddr>,
}

impl PrintedAddresses {
    fn of(face: &HttpArgs, front: SocketAddr, admin: Option<SocketAddr>) -> Self {
        let scheme = match face.ssl_certfile {
            Some(_) => "https",
            None => "http",
        };
        Self {
            scheme,
            front,
            admin,
        }
    }

    /// Prints the lines that scripts wait for.
    fn print(&self) {
        let Self {
            scheme,
            front,
            admin,
        } = self;
        let mut lines = format!("listening on {scheme}://{front}\n");
        if let Some(admin) = admin {
            lines += &format!("admin on http://{admin}\n");
        }
        let mut out = std::io::stdout().lock();
        // A closed output has no reader that waits.
        let _ = out.write_all(lines.as_bytes()).and_then(|()| out.flush());
    }
}

impl HttpArgs {
    fn shutdown_plan(&self, process: &ProcessArgs) -> ShutdownPlan {
        ShutdownPlan {
            delay: self.shutdown_delay.0,
            limit: process.drain_timeout,
        }
    }
}

fn runtime() -> anyhow::Result<Runtime> {
    crate::log::log_panics();
    Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

#[cfg(test)]
mod tests {
    use super::{awaited_workers_text, shared_device_note, short_cache_warning};
    use cleave_domain::DeviceId;
    use cleave_policy::PolicyFile;

    #[test]
    fn a_router_that_can_start_workers_is_logged() {
        let text = |scaling: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let policy = format!("classes:\n- name: a\ndefault_class: a\n{scaling}");
            std::fs::write(file.path(), policy).unwrap();
            awaited_workers_text(Some(&PolicyFile::open(file.path()).unwrap()))
        };
        let waits = awaited_workers_text(None);
        assert!(waits.starts_with("waiting for"));
        let scaling = "scaling:\n  mode: MODE\n  devices_max: 2\n  pools:\n    both: {max: 2}\n";
        assert_eq!(text(&scaling.replace("MODE", "advise")), waits);
        assert!(text(&scaling.replace("MODE", "act")).contains("the first request starts one"));
    }

    #[test]
    fn a_cache_below_the_context_is_warned_of() {
        let warning = short_cache_warning("d0", 336, 1024);
        assert!(warning.is_some_and(|text| text.contains("holds 336 tokens, fewer")));
        assert_eq!(short_cache_warning("d0", 1024, 1024), None);
    }

    #[test]
    fn workers_on_the_same_hardware_are_reported() {
        let note_of = |devices: [Option<&str>; 2]| {
            let device = |text: &str| DeviceId(text.to_owned());
            let named = ["p", "d"].into_iter().zip(devices);
            shared_device_note(named.map(|(name, text)| (name, text.map(device))))
        };
        let shared = note_of([Some("a"), Some("a")]);
        assert!(shared.is_some_and(|note| note.starts_with("p and d compute on the same")));
        assert_eq!(note_of([Some("a"), Some("b")]), None);
        assert_eq!(note_of([None, None]), None);
    }
}
