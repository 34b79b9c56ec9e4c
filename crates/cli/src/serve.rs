//! The long-running commands: `serve`, `router`, `worker`.
//!
//! Owns: what is printed at the start, signals, and the time given to drain.
//! Never: decides anything about a request.

use crate::args::{
    FaceArgs, HostArgs, ProcessArgs, RouterArgs, RouterLimitArgs, ServeArgs, WorkerArgs,
};
use crate::source::Source;
use crate::values::Seconds;
use anyhow::{Context, anyhow, bail};
use cleave_api::{ApiOptions, GiveBack};
use cleave_domain::{DeviceId, Role};
use cleave_engine::Engine;
use cleave_node::{
    Calibration, PolicyFile, RouterNode, RouterOptions, Running, RunningRouter, RunningWorker,
    Serve, WorkerNode, WorkerOptions,
};
use cleave_router::{Mode, Placement};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

/// Exit status after a second signal: 128 + SIGINT, as shells have it.
const IMPATIENT: i32 = 130;

/// Everything in this process.
pub(crate) fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let roles = roles(args)?;
    let router = router_options(&args.router, &args.face, &args.process)?;
    make_tape_folder(&args.process)?;
    let source = source(&args.host)?;
    let engines = source.engines(&args.host.engine, &roles)?;
    let workers: Vec<_> = names(&roles)
        .zip(engines)
        .map(|((name, role), mut engine)| {
            let options = worker_options((name, role), (&args.host, &args.process));
            let options = measured(options, (&source, engine.as_mut()), &args.host)?;
            Ok((options, engine))
        })
        .collect::<anyhow::Result<_>>()?;
    announce(
        &source,
        workers
            .iter()
            .map(|(options, engine)| (options, engine.as_ref())),
    );
    let limits = &router.limits;
    if limits.mode == Mode::Slo && limits.placement != Placement::Split {
        let devices = workers.iter().map(|(options, engine)| {
            let device = engine.describe().device_id.clone();
            (options.name.as_str(), device)
        });
        if let Some(said) = undivided(devices) {
            info!("{said}");
        }
    }
    let serve = Serve {
        listen: SocketAddr::new(args.address, args.port).to_string(),
        router,
        workers,
        files: source.into_files(),
    };
    runtime()?.block_on(async {
        let stop = Stop::new()?;
        let running = serve.start().await?;
        let at = Addresses::of(&args.face, running.address(), running.admin_address());
        live(running, stop, args.face.farewell(&args.process), |_| {
            at.say()
        })
        .await
    })
}

/// The router alone.
pub(crate) fn router(args: &RouterArgs) -> anyhow::Result<()> {
    make_tape_folder(&args.process)?;
    let mut options = router_options(&args.limits, &args.face, &args.process)?;
    options.fellows.clone_from(&args.fellows.fellow_routers);
    let picker = args.picker.options();
    let is_told_how = options.peer_tls.is_some() || args.picker.picker_admin_port.is_some();
    if picker.is_some() && options.certificate.is_some() && !is_told_how {
        bail!(
            "--picker-endpoints: routers whose clients speak TLS are asked how they are by --peer-tls, or in clear \
             at the port of their --admin-listen: give --peer-tls or --picker-admin-port"
        );
    }
    let node = RouterNode {
        listen: args.listen.to_string(),
        options,
        picker,
    };
    runtime()?.block_on(async {
        let stop = Stop::new()?;
        let running = node.start().await?;
        // Scripts hand this address to workers, so it cannot wait for them.
        Addresses::of(&args.face, running.address(), running.admin_address()).say();
        if let Some(address) = running.picker_address() {
            info!("endpoint picker at {address}");
        }
        info!("waiting for a prefill and a decode worker");
        live(running, stop, args.face.farewell(&args.process), |_| {
            info!("ready")
        })
        .await
    })
}

/// One worker.
pub(crate) fn worker(args: &WorkerArgs) -> anyhow::Result<()> {
    make_tape_folder(&args.process)?;
    let source = source(&args.host)?;
    let role = Role::from(args.leg);
    let mut engine = source
        .engines(&args.host.engine, &[role])?
        .pop()
        .context("one engine was asked for")?;
    let name = args.name.clone().unwrap_or_else(|| name_default(role));
    let options = WorkerOptions {
        transports: args.transport.transports(),
        nixl_library: args.transport.nixl_library.clone(),
        ..worker_options((name, role), (&args.host, &args.process))
    };
    let options = measured(options, (&source, engine.as_mut()), &args.host)?;
    announce(&source, std::iter::once((&options, engine.as_ref())));
    let node = WorkerNode {
        options,
        engine,
        files: source.into_files(),
        routers: args.router.clone(),
        data_listen: args.data_listen.to_string(),
        data_address: args.data_advertise.clone(),
        metrics_listen: args.metrics_listen.map(|address| address.to_string()),
        traces: args.process.traces.options()?,
    };
    runtime()?.block_on(async {
        let stop = Stop::new()?;
        let running = node.start().await?;
        info!(data = %running.data_address(), routers = args.router.join(","), "worker runs");
        if let Some(address) = running.metrics_address() {
            info!("metrics at http://{address}/metrics");
        }
        let farewell = Farewell {
            delay: Duration::ZERO,
            limit: args.process.drain_timeout,
        };
        live(running, stop, farewell, |_| info!("joined a router")).await
    })
}

fn roles(args: &ServeArgs) -> anyhow::Result<Vec<Role>> {
    let asked = (args.prefill, args.decode, args.both);
    let (prefill, decode, both) = match asked {
        (None, None, both) => (0, 0, both.unwrap_or(1)),
        (prefill, decode, Some(both)) => (prefill.unwrap_or(0), decode.unwrap_or(0), both),
        (prefill, decode, None) => (prefill.unwrap_or(1), decode.unwrap_or(1), 0),
    };
    let many = |role, count: u32| std::iter::repeat_n(role, count as usize);
    let roles: Vec<Role> = many(Role::Prefill, prefill)
        .chain(many(Role::Decode, decode))
        .chain(many(Role::Both, both))
        .collect();
    if !roles.iter().any(|role| role.prefills()) || !roles.iter().any(|role| role.decodes()) {
        bail!(
            "--prefill {prefill} --decode {decode} --both {both}: a request needs a worker for each of its legs"
        );
    }
    Ok(roles)
}

/// `prefill-0`, `prefill-1`, `decode-0` …
fn names(roles: &[Role]) -> impl Iterator<Item = (String, Role)> {
    roles.iter().enumerate().map(|(index, role)| {
        let number = roles[..index]
            .iter()
            .filter(|before| *before == role)
            .count();
        (format!("{role}-{number}"), *role)
    })
}

/// Unique among the workers of a fleet: containers share process ids, processes share a host.
fn name_default(role: Role) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{role}-{}-{}", host.trim(), std::process::id())
}

fn source(host: &HostArgs) -> anyhow::Result<Source> {
    Source::open((&host.model, &host.mock), &host.engine)
}

/// The same with what its engine's steps take.
fn measured(
    options: WorkerOptions,
    (source, engine): (&Source, &mut dyn Engine),
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
    (name, role): (String, Role),
    (host, process): (&HostArgs, &ProcessArgs),
) -> WorkerOptions {
    let HostArgs { engine, limits, .. } = host;
    let defaults = WorkerOptions::new(name, role);
    WorkerOptions {
        queue_max: engine.max_queue.unwrap_or(defaults.queue_max),
        prefix_cache: !engine.no_prefix_cache,
        step_max: limits.step_max.0,
        swap_bytes: limits.swap_space,
        speculation: limits.speculation.speculative_config.0,
        tier: limits.tier.options(),
        silence_max: process.worker_silence.0,
        admin_key: process.admin_key,
        peer_tls: process.peer_tls.clone(),
        tape: tape(process, &defaults.name),
        ..defaults
    }
}

fn router_options(
    limits: &RouterLimitArgs,
    face: &FaceArgs,
    process: &ProcessArgs,
) -> anyhow::Result<RouterOptions> {
    let defaults = RouterOptions::default();
    let mut brain = defaults.limits;
    brain.failures_max = limits.migration_limit;
    brain.moves_max = limits.max_moves;
    brain.reader_wait_max = limits.reader_wait.0;
    brain.mode = limits.router_mode.into();
    brain.placement = limits.placement.into();
    let policy = limits.policy.as_deref().map(PolicyFile::open);
    Ok(RouterOptions {
        limits: brain,
        policy: policy.transpose()?,
        silence_max: process.worker_silence.0,
        reader_backlog_max: limits.reader_backlog,
        external_metrics_listen: limits.external_metrics_listen.map(|at| at.to_string()),
        fellows: Vec::new(),
        tape: tape(process, "router"),
        traces: process.traces.options()?,
        http: face.limits(),
        certificate: face.certificate(),
        peer_tls: process.peer_tls.clone(),
        admin_listen: face.admin_listen.map(|address| address.to_string()),
        api: ApiOptions {
            admin_key: process.admin_key,
            body_bytes_max: face.max_body,
            body_memory_bytes: face.body_memory,
            give_back: Some(GiveBack(cleave_cpu::give_back_freed)),
            body_wait_max: face.body_timeout.0,
            keep_alive: limits.streams.keep_alive(),
            prompts: limits.prompts.shown(),
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

/// What runs where, for people.
fn announce<'a>(
    source: &Source,
    workers: impl Iterator<Item = (&'a WorkerOptions, &'a dyn Engine)>,
) {
    let context = source.context_tokens_max();
    info!("model {}, context {context} tokens", source.title());
    for (options, engine) in workers {
        let description = engine.describe();
        let capacity = description.capacity;
        let tokens = u64::from(capacity.blocks_count) * u64::from(capacity.block_tokens);
        let mib = (u64::from(capacity.blocks_count) * u64::from(capacity.block_bytes)) >> 20;
        info!(
            "{}: {}, KV cache {tokens} tokens ({mib} MiB)",
            options.name, description.device
        );
    }
}

/// What is said of workers that compute on the same hardware; nothing if none share any.
fn undivided<'a>(workers: impl Iterator<Item = (&'a str, Option<DeviceId>)>) -> Option<String> {
    let mut devices: BTreeMap<DeviceId, Vec<&str>> = BTreeMap::new();
    for (name, device) in workers {
        if let Some(device) = device {
            devices.entry(device).or_default().push(name);
        }
    }
    let there = devices.into_values().find(|there| there.len() > 1)?;
    Some(format!(
        "{} compute on the same cores, so one of them serves requests whole; --placement split hands each \
         over, and --threads divides the cores",
        there.join(" and ")
    ))
}

/// Where clients and operators find it.
struct Addresses {
    scheme: &'static str,
    front: SocketAddr,
    admin: Option<SocketAddr>,
}

impl Addresses {
    fn of(face: &FaceArgs, front: SocketAddr, admin: Option<SocketAddr>) -> Self {
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

    /// The lines that scripts wait for.
    fn say(&self) {
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
        // Nobody reads it: then nobody waits for it either.
        let _ = out.write_all(lines.as_bytes()).and_then(|()| out.flush());
    }
}

/// How a process leaves.
#[derive(Clone, Copy)]
struct Farewell {
    /// For so long it only says so.
    delay: Duration,
    /// Then what runs may go on for so long.
    limit: Seconds,
}

impl FaceArgs {
    fn farewell(&self, process: &ProcessArgs) -> Farewell {
        Farewell {
            delay: self.shutdown_delay.0,
            limit: process.drain_timeout,
        }
    }
}

/// A node that runs, as far as signals and the exit status go.
trait Node {
    async fn ready(&self);
    async fn broken(&self) -> String;
    /// Returns once somebody other than a signal has asked it to leave.
    async fn asked_to_leave(&self);
    /// Says that it is not ready any more, and goes on.
    fn leave(&self);
    async fn drain(self, deadline: Duration);
}

macro_rules! node {
    ($($running:ty: $leaves:expr, $leave:expr;)*) => {$(
        impl Node for $running {
            async fn ready(&self) {
                self.ready().await;
            }

            async fn broken(&self) -> String {
                self.broken().await
            }

            async fn asked_to_leave(&self) {
                let leaves: fn(&Self) -> Leaving<'_> = $leaves;
                leaves(self).await;
            }

            fn leave(&self) {
                let leave: fn(&Self) = $leave;
                leave(self);
            }

            async fn drain(self, deadline: Duration) {
                self.drain(deadline).await;
            }
        }
    )*};
}

type Leaving<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

node!(
    Running: |_| Box::pin(std::future::pending()), Self::leave;
    RunningRouter: |_| Box::pin(std::future::pending()), Self::leave;
    // Its routers hear that it drains.
    RunningWorker: |worker| Box::pin(worker.asked_to_leave()), |_| {};
);

/// Runs a node until a signal comes or it breaks, then drains it. A node that broke says so by the
/// exit status.
async fn live<N: Node>(
    node: N,
    mut stop: Stop,
    farewell: Farewell,
    say_ready: impl FnOnce(&N),
) -> anyhow::Result<()> {
    let ready = async {
        node.ready().await;
        cleave_cpu::give_back_freed();
        say_ready(&node);
        std::future::pending().await
    };
    let broken = tokio::select! {
        broken = ready => Some(broken),
        broken = node.broken() => Some(broken),
        () = node.asked_to_leave() => None,
        () = stop.signalled() => None,
    };
    let Farewell { delay, limit } = farewell;
    if broken.is_none() && !delay.is_zero() {
        info!("not ready any more; serving on for {} s", Seconds(delay));
        node.leave();
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            _ = node.broken() => {}
            () = stop.signalled() => end_at_once(),
        }
    }
    info!("draining for up to {limit} s; a second signal ends at once");
    tokio::select! {
        () = node.drain(limit.0) => {}
        () = stop.signalled() => end_at_once(),
    }
    broken.map_or(Ok(()), |reason| Err(anyhow!("{reason}")))
}

fn end_at_once() -> ! {
    warn!("ended at once");
    std::process::exit(IMPATIENT);
}

fn runtime() -> anyhow::Result<Runtime> {
    crate::log::panics();
    Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// Ctrl-C and SIGTERM: the first drains, the second ends at once.
struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn signalled(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{roles, undivided};
    use crate::args::ServeArgs;
    use clap::Parser;
    use cleave_domain::DeviceId;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        serve: ServeArgs,
    }

    #[track_caller]
    fn count(flags: &str) -> Result<[usize; 3], String> {
        let words = std::iter::once("test").chain(flags.split_whitespace());
        let roles = roles(&Flags::parse_from(words).serve).map_err(|error| error.to_string())?;
        let of = |name: &str| roles.iter().filter(|role| role.to_string() == name).count();
        Ok([of("prefill"), of("decode"), of("both")])
    }

    #[test]
    fn two_workers_of_the_same_cores_looked_like_two_devices() {
        let said = |devices: [Option<&str>; 2]| {
            let device = |text: &str| DeviceId(text.to_owned());
            let named = ["p", "d"].into_iter().zip(devices);
            undivided(named.map(|(name, text)| (name, text.map(device))))
        };
        let shared = said([Some("a"), Some("a")]);
        assert!(shared.is_some_and(|said| said.starts_with("p and d compute on the same")));
        assert_eq!(said([Some("a"), Some("b")]), None);
        assert_eq!(said([None, None]), None);
    }

    #[test]
    fn flags_for_one_leg_left_the_other_without_a_worker() {
        assert_eq!(count(""), Ok([0, 0, 1]));
        assert_eq!(count("--both 3"), Ok([0, 0, 3]));
        assert_eq!(count("--prefill 2"), Ok([2, 1, 0]));
        assert_eq!(count("--decode 3"), Ok([1, 3, 0]));
        assert_eq!(count("--prefill 2 --both 1"), Ok([2, 0, 1]));
        assert_eq!(count("--prefill 0 --decode 0 --both 1"), Ok([0, 0, 1]));
        assert!(count("--prefill 0").is_err_and(|said| said.contains("each of its legs")));
    }
}
