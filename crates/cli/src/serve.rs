//! The long-running commands: `serve`, `router`, `worker`.
//!
//! Owns: what is printed at the start, signals, and the time given to drain.
//! Never: decides anything about a request.

use crate::args::{EngineArgs, ProcessArgs, RouterArgs, ServeArgs, WorkerArgs};
use crate::model::{self, Loaded};
use anyhow::{Context, bail};
use cleave_domain::Role;
use cleave_engine::Engine;
use cleave_node::{RouterNode, RouterOptions, Serve, WorkerNode, WorkerOptions};
use std::future::Future;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

/// Exit status after a second signal: 128 + SIGINT, as shells have it.
const IMPATIENT: i32 = 130;

/// Everything in this process.
pub(crate) fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let roles = roles(args)?;
    make_tape_folder(&args.process)?;
    let loaded = model::load(&args.model, &args.engine)?;
    let engines = loaded.engines(&args.engine, roles.len())?;
    let workers: Vec<_> = names(&roles)
        .zip(engines)
        .map(|((name, role), engine)| {
            (
                worker_options(name, role, &args.engine, &args.process),
                engine,
            )
        })
        .collect();
    announce(
        &loaded,
        workers
            .iter()
            .map(|(options, engine)| (options, engine.as_ref())),
    );
    let serve = Serve {
        listen: SocketAddr::new(args.host, args.port).to_string(),
        router: router_options(&args.process),
        workers,
        files: loaded.files.clone(),
    };
    runtime()?.block_on(async {
        let mut stop = Stop::new()?;
        let running = serve.start().await?;
        let ready = async {
            running.ready().await;
            say_address(running.address());
            std::future::pending().await
        };
        let broken = stop.or(first(ready, running.broken())).await;
        stop.drain(args.process.drain_timeout, |deadline| {
            running.drain(deadline)
        })
        .await;
        broken_or_done(broken)
    })
}

/// The router alone.
pub(crate) fn router(args: &RouterArgs) -> anyhow::Result<()> {
    make_tape_folder(&args.process)?;
    let node = RouterNode {
        listen: args.listen.to_string(),
        options: router_options(&args.process),
    };
    runtime()?.block_on(async {
        let mut stop = Stop::new()?;
        let running = node.start().await?;
        // Scripts hand this address to workers, so it cannot wait for them.
        say_address(running.address());
        info!("waiting for a prefill and a decode worker");
        let ready = async {
            running.ready().await;
            info!("ready");
            std::future::pending().await
        };
        let broken = stop.or(first(ready, running.broken())).await;
        stop.drain(args.process.drain_timeout, |deadline| {
            running.drain(deadline)
        })
        .await;
        broken_or_done(broken)
    })
}

/// One worker.
pub(crate) fn worker(args: &WorkerArgs) -> anyhow::Result<()> {
    make_tape_folder(&args.process)?;
    let loaded = model::load(&args.model, &args.engine)?;
    let engine = loaded
        .engines(&args.engine, 1)?
        .pop()
        .context("one engine was asked for")?;
    let role = Role::from(args.leg);
    let name = args
        .name
        .clone()
        .unwrap_or_else(|| format!("{role}-{}", std::process::id()));
    let options = worker_options(name, role, &args.engine, &args.process);
    announce(&loaded, std::iter::once((&options, engine.as_ref())));
    let node = WorkerNode {
        options,
        engine,
        files: loaded.files,
        routers: args.router.clone(),
        data_listen: args.data_listen.to_string(),
        data_address: args.data_advertise.clone(),
        metrics_listen: args.metrics_listen.map(|address| address.to_string()),
    };
    runtime()?.block_on(async {
        let mut stop = Stop::new()?;
        let running = node.start().await?;
        info!(data = %running.data_address(), routers = args.router.join(","), "worker runs");
        if let Some(address) = running.metrics_address() {
            info!("metrics at http://{address}/metrics");
        }
        let ready = async {
            running.ready().await;
            info!("joined a router");
            std::future::pending().await
        };
        let broken = stop.or(first(ready, running.broken())).await;
        stop.drain(args.process.drain_timeout, |deadline| {
            running.drain(deadline)
        })
        .await;
        broken_or_done(broken)
    })
}

fn roles(args: &ServeArgs) -> anyhow::Result<Vec<Role>> {
    let ServeArgs {
        prefill,
        decode,
        both,
        ..
    } = args;
    let many = |role, count: u32| std::iter::repeat_n(role, count as usize);
    let roles: Vec<Role> = many(Role::Prefill, *prefill)
        .chain(many(Role::Decode, *decode))
        .chain(many(Role::Both, *both))
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

fn worker_options(
    name: String,
    role: Role,
    engine: &EngineArgs,
    process: &ProcessArgs,
) -> WorkerOptions {
    WorkerOptions {
        queue_max: engine.max_queue,
        prefix_cache: !engine.no_prefix_cache,
        tape: tape(process, &name),
        ..WorkerOptions::new(name, role)
    }
}

fn router_options(process: &ProcessArgs) -> RouterOptions {
    RouterOptions {
        tape: tape(process, "router"),
        otlp_endpoint: process.otlp_endpoint.clone(),
        ..RouterOptions::default()
    }
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
    loaded: &Loaded,
    workers: impl Iterator<Item = (&'a WorkerOptions, &'a dyn Engine)>,
) {
    let context = loaded.context_tokens_max();
    info!("model {}, context {context} tokens", loaded.title());
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

/// The line that scripts wait for.
fn say_address(address: SocketAddr) {
    let mut out = std::io::stdout().lock();
    // Nobody reads it: then nobody waits for it either.
    let _ = writeln!(out, "listening on http://{address}").and_then(|()| out.flush());
}

/// Whichever is there first.
async fn first<T>(one: impl Future<Output = T>, other: impl Future<Output = T>) -> T {
    tokio::select! {
        done = one => done,
        done = other => done,
    }
}

/// A process whose engine or brain broke says so by its exit status.
fn broken_or_done(broken: Option<String>) -> anyhow::Result<()> {
    match broken {
        Some(reason) => bail!("{reason}"),
        None => Ok(()),
    }
}

fn runtime() -> anyhow::Result<Runtime> {
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

    /// Waits for `event`; `None` when a signal came first.
    async fn or<T>(&mut self, event: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            happened = event => Some(happened),
            () = self.signalled() => None,
        }
    }

    async fn drain<F: Future<Output = ()>>(
        mut self,
        seconds: u64,
        drain: impl FnOnce(Duration) -> F,
    ) {
        info!("draining for up to {seconds} s; a second signal ends at once");
        if self.or(drain(Duration::from_secs(seconds))).await.is_none() {
            warn!("ended at once");
            std::process::exit(IMPATIENT);
        }
    }
}
