//! `cleave autoscale --local`: worker processes of this machine, as many as a router wants.
//!
//! Owns: these processes. Never: decides how many there are to be; takes a worker away without SIGTERM, by
//! which it drains and its streams move. Invariant: where the router gives no number, nothing changes.

use crate::args::AutoscaleArgs;
use crate::page::Pages;
use anyhow::{Context, bail};
use cleave_domain::{PoolCounts, Role};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;
use tracing::{info, warn};

/// How often the router is asked and processes are looked at.
const EVERY: Duration = Duration::from_millis(250);
/// How long the router may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// The first pause after a worker that died, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// A worker that lived for so long was sound: the next pause is the first one again.
const SOUND: Duration = Duration::from_secs(60);
const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// Follows the router until a signal comes.
pub(crate) fn run(args: &AutoscaleArgs) -> anyhow::Result<()> {
    let AutoscaleArgs {
        local: _,
        router,
        cacert,
        admin_key,
        worker,
    } = args;
    let mut asker = Asker {
        pages: Pages::of(&router.url, cacert.as_deref(), admin_key.as_deref())?,
        told: String::new(),
    };
    let mut local = Local {
        program: std::env::current_exe().context("cannot tell where this program is")?,
        router: router.address.clone(),
        flags: worker.clone(),
        workers: Vec::new(),
        pauses: Default::default(),
        started: 0,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime
        .context("cannot start the runtime")?
        .block_on(async {
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut terminate = signal(SignalKind::terminate())?;
            info!(router = router.url, "following the router");
            loop {
                tokio::select! {
                    () = tokio::time::sleep(EVERY) => {}
                    _ = interrupt.recv() => break,
                    _ = terminate.recv() => break,
                }
                let wanted = asker.ask().await;
                local.reap();
                if let Some(wanted) = wanted {
                    local.follow(&wanted)?;
                }
            }
            info!(workers = local.workers.len(), "draining every worker");
            local.stop_all();
            while !local.workers.is_empty() {
                tokio::select! {
                    () = tokio::time::sleep(EVERY) => local.reap(),
                    _ = interrupt.recv() => break,
                    _ = terminate.recv() => break,
                }
            }
            anyhow::Ok(())
        })
    // Whoever is left is ended by the drop.
}

/// Asks a router how many workers it wants.
struct Asker {
    pages: Pages,
    /// What kept it from answering was told.
    told: String,
}

impl Asker {
    /// None where nothing is to change; why is told once.
    async fn ask(&mut self) -> Option<PoolCounts> {
        let asked = timeout(ANSWER_MAX, self.pages.json("/admin/scaling")).await;
        let said = asked.context("the router does not answer").flatten();
        match said.and_then(|answer| wanted(&answer)) {
            Ok(wanted) => {
                self.told.clear();
                Some(wanted)
            }
            Err(error) => {
                let error = format!("{error:#}");
                if self.told != error {
                    warn!("{error}; workers stay as they are");
                    self.told = error;
                }
                None
            }
        }
    }
}

/// What `/admin/scaling` says.
fn wanted(answer: &Value) -> anyhow::Result<PoolCounts> {
    match answer["mode"].as_str() {
        Some("act") => {}
        Some("advise") => bail!("the router's policy says `mode: advise`"),
        _ => bail!("the router's policy has no `scaling`"),
    }
    let mut wanted = PoolCounts::default();
    for role in POOLS {
        let count = answer["pools"][role.to_string()]["wanted"].as_u64();
        let count = count.and_then(|count| u32::try_from(count).ok());
        *wanted.of_mut(role) = count.context("the router does not know its fleet yet")?;
    }
    Ok(wanted)
}

/// The workers of this machine.
struct Local {
    program: PathBuf,
    router: String,
    flags: Vec<String>,
    workers: Vec<Worker>,
    /// For each pool.
    pauses: [Pause; 3],
    started: u64,
}

struct Worker {
    name: String,
    role: Role,
    process: Child,
    since: Instant,
    leaves: bool,
}

/// Between a death and the next start.
#[derive(Clone, Copy, Debug, Default)]
struct Pause {
    deaths: u32,
    until: Option<Instant>,
}

impl Pause {
    fn died(&mut self, now: Instant, lived: Duration) {
        let (first, longest) = PAUSES;
        self.deaths = if lived >= SOUND { 1 } else { self.deaths + 1 };
        let pause = first * 2u32.saturating_pow(self.deaths - 1);
        self.until = Some(now + pause.min(longest));
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }
}

impl Local {
    /// Starts and stops, so that there are as many.
    fn follow(&mut self, wanted: &PoolCounts) -> anyhow::Result<()> {
        for (place, role) in POOLS.into_iter().enumerate() {
            let there = |worker: &&mut Worker| worker.role == role && !worker.leaves;
            let count = self.workers.iter_mut().filter(there).count() as u32;
            let wanted = wanted.of(role);
            if count > wanted {
                // The newest: it has the fewest prefixes cached.
                let newest = self.workers.iter_mut().rev().filter(there);
                newest
                    .take((count - wanted) as usize)
                    .for_each(Worker::stop);
            }
            if self.pauses[place].is_over(Instant::now()) {
                for _ in count..wanted {
                    self.start(role)?;
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, role: Role) -> anyhow::Result<()> {
        let name = format!("{role}-local-{}-{}", std::process::id(), self.started);
        self.started += 1;
        let (leg, router) = (role.to_string(), self.router.as_str());
        let mut command = Command::new(&self.program);
        command.args(["worker", "--leg", &leg, "--router", router, "--name", &name]);
        command
            .args(&self.flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let process = command.spawn();
        let process =
            process.with_context(|| format!("cannot start {}", self.program.display()))?;
        info!(name, pid = process.id(), "a worker is started");
        self.workers.push(Worker {
            name,
            role,
            process,
            since: Instant::now(),
            leaves: false,
        });
        Ok(())
    }

    /// Takes note of those that have ended.
    fn reap(&mut self) {
        let now = Instant::now();
        for mut worker in std::mem::take(&mut self.workers) {
            let Some(status) = worker.ended() else {
                self.workers.push(worker);
                continue;
            };
            let name = &worker.name;
            if worker.leaves && status.success() {
                info!(name, "a worker has drained and left");
                continue;
            }
            let lived = now.saturating_duration_since(worker.since);
            let place = POOLS.iter().position(|role| *role == worker.role);
            let pause = &mut self.pauses[place.expect("every role is a pool")];
            pause.died(now, lived);
            warn!(name, %status, deaths = pause.deaths, "a worker ended by itself");
        }
    }

    fn stop_all(&mut self) {
        self.workers.iter_mut().for_each(Worker::stop);
    }
}

impl Worker {
    /// Asks it to drain and leave.
    fn stop(&mut self) {
        self.leaves = true;
        info!(name = self.name, "a worker is to drain and leave");
        let pid = i32::try_from(self.process.id())
            .ok()
            .and_then(Pid::from_raw);
        if let Some(pid) = pid
            && let Err(error) = kill_process(pid, Signal::TERM)
        {
            warn!(name = self.name, %error, "cannot signal a worker");
        }
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().ok().flatten()
    }
}

impl Drop for Worker {
    /// Nobody is left behind.
    fn drop(&mut self) {
        if self.ended().is_none() {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn workers_were_stopped_where_the_router_gave_no_number() {
        let pool = |wanted: u32| json!({"wanted": wanted});
        let pools = json!({"prefill": pool(1), "decode": pool(2), "both": pool(0)});
        let said = wanted(&json!({"mode": "act", "pools": pools})).expect("three numbers");
        assert_eq!((said.prefill, said.decode, said.both), (1, 2, 0));
        for none in [
            json!({"mode": "advise", "pools": pools}),
            json!({"mode": "off"}),
            json!({"mode": "act"}),
            json!({}),
            json!({"mode": "act", "pools": {"prefill": pool(1)}}),
        ] {
            assert!(wanted(&none).is_err(), "{none}");
        }
    }

    #[test]
    fn a_worker_that_dies_at_once_was_started_without_a_pause() {
        let now = Instant::now();
        let mut pause = Pause::default();
        assert!(pause.is_over(now));
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pause.died(now, Duration::ZERO);
            pauses.push(pause.until.expect("a pause") - now);
        }
        assert!(pauses.is_sorted());
        assert_eq!((pauses[0], pauses[8]), PAUSES);
        pause.died(now, SOUND);
        assert_eq!(pause.until.expect("a pause") - now, PAUSES.0);
    }
}
