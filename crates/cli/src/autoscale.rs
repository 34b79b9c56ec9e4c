//! `cleave autoscale --local`: worker processes of this machine, in the number that a router
//! requests.
//!
//! Owns: these processes. Never: decides their number, or ends a worker other than by SIGTERM, upon
//! which it drains and its streams migrate. Invariant: while the router gives no number, nothing
//! changes.

use crate::args::AutoscaleArgs;
use crate::configuration;
use crate::server_client::ServerClient;
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

/// Interval of requests to the router and of checks of the processes.
const POLL_PERIOD: Duration = Duration::from_millis(250);
/// Time limit of the router's answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// First and longest pause after a worker has died.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// Uptime after which a death counts as the first one again.
const HEALTHY_UPTIME: Duration = Duration::from_secs(60);
const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// Follows the router until a signal arrives.
pub(crate) fn run(args: &AutoscaleArgs) -> anyhow::Result<()> {
    let AutoscaleArgs {
        local: _,
        router,
        served_model_name,
        cacert,
        key,
        worker,
    } = args;
    let mut flags = worker.clone();
    if let Some(name) = served_model_name {
        flags.extend(["--served-model-name".to_owned(), name.clone()]);
    }
    let mut client = ScalingClient {
        pages: ServerClient::connect(&router.url, cacert.as_deref(), key.key()?.as_deref())?,
        model: served_model_name.clone(),
        last_error: String::new(),
    };
    let mut local = LocalPool {
        program: std::env::current_exe().context("cannot find the path of this program")?,
        router: router.address.clone(),
        flags,
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
                    () = tokio::time::sleep(POLL_PERIOD) => {}
                    _ = interrupt.recv() => break,
                    _ = terminate.recv() => break,
                }
                let target = client.target_counts().await;
                local.remove_ended();
                match target {
                    Some(WorkersToRun::Exactly(target)) => local.apply(&target)?,
                    Some(WorkersToRun::AtLeast(first)) => local.apply(&local.at_least(&first))?,
                    None => {}
                }
            }
            info!(workers = local.workers.len(), "draining every worker");
            local.stop_all();
            while !local.workers.is_empty() {
                tokio::select! {
                    () = tokio::time::sleep(POLL_PERIOD) => local.remove_ended(),
                    _ = interrupt.recv() => break,
                    _ = terminate.recv() => break,
                }
            }
            anyhow::Ok(())
        })
    // Dropping the remaining workers kills their processes.
}

/// Asks a router for the desired number of workers.
struct ScalingClient {
    pages: ServerClient,
    /// The model to follow; a router of one model needs no name.
    model: Option<String>,
    /// Last logged error, so that the same error is logged once.
    last_error: String,
}

impl ScalingClient {
    /// Returns the desired numbers; `None` if nothing is to change. The reason is logged once.
    async fn target_counts(&mut self) -> Option<WorkersToRun> {
        let response = timeout(ANSWER_MAX, self.pages.json("/admin/scaling")).await;
        let answer = response.context("the router does not answer").flatten();
        match answer.and_then(|answer| model_counts(&answer, self.model.as_deref())) {
            Ok(target) => {
                self.last_error.clear();
                Some(target)
            }
            Err(error) => {
                let error = format!("{error:#}");
                if self.last_error != error {
                    warn!(
                        error,
                        "no number of workers is known: workers stay as they are"
                    );
                    self.last_error = error;
                }
                None
            }
        }
    }
}

/// Reads the numbers of a model from the answer of `/admin/scaling`; without a name, those of the
/// only model.
fn model_counts(answer: &Value, model: Option<&str>) -> anyhow::Result<WorkersToRun> {
    match (model, answer["models"].as_object()) {
        (Some(model), Some(models)) if models.contains_key(model) => target_counts(&models[model]),
        // Before a model is known the only numbers have no name.
        (Some(_), Some(models)) if models.contains_key("") => target_counts(answer),
        (Some(model), _) => {
            bail!(
                "the router knows no model \"{model}\" with `scaling`: list it in the policy's `models`"
            )
        }
        (None, _) => target_counts(answer),
    }
}

fn target_counts(answer: &Value) -> anyhow::Result<WorkersToRun> {
    match answer["mode"].as_str() {
        Some("act") => {}
        Some("by_model") => {
            bail!("the router serves several models: choose one with --served-model-name")
        }
        Some("advise") => bail!("the router's policy says `mode: advise`"),
        _ => bail!("the router's policy has no `scaling`"),
    }
    let counts = |read: &dyn Fn(&str) -> Option<u64>| {
        let mut counts = PoolCounts::default();
        for role in POOLS {
            let count = u32::try_from(read(&role.to_string())?).ok()?;
            *counts.for_role_mut(role) = count;
        }
        Some(counts)
    };
    let exactly = counts(&|pool| answer["pools"][pool]["wanted"].as_u64());
    let first = || counts(&|pool| answer["first"][pool].as_u64());
    let exactly = exactly.map(WorkersToRun::Exactly);
    exactly
        .or_else(|| first().map(WorkersToRun::AtLeast))
        .context("the router has just started and does not know its workers yet")
}

/// The workers that a router asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkersToRun {
    Exactly(PoolCounts),
    /// Of a router that has just started: more are left as they are.
    AtLeast(PoolCounts),
}

/// The worker processes of this machine.
struct LocalPool {
    program: PathBuf,
    router: String,
    flags: Vec<String>,
    workers: Vec<WorkerProcess>,
    /// Pause of each pool.
    pauses: [RestartPause; 3],
    started: u64,
}

struct WorkerProcess {
    name: String,
    role: Role,
    process: Child,
    started_at: Instant,
    is_draining: bool,
}

/// Pause between the death of a worker and the next start.
#[derive(Clone, Copy, Debug, Default)]
struct RestartPause {
    deaths: u32,
    until: Option<Instant>,
}

impl RestartPause {
    fn record_death(&mut self, now: Instant, lived: Duration) {
        let (first, longest) = PAUSES;
        self.deaths = if lived >= HEALTHY_UPTIME {
            1
        } else {
            self.deaths + 1
        };
        let pause = first * 2u32.saturating_pow(self.deaths - 1);
        self.until = Some(now + pause.min(longest));
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }
}

impl LocalPool {
    /// The larger of these numbers and those of its workers, for each pool.
    fn at_least(&self, first: &PoolCounts) -> PoolCounts {
        let mut target = *first;
        for role in POOLS {
            let there = |worker: &&WorkerProcess| worker.role == role && !worker.is_draining;
            let count = self.workers.iter().filter(there).count() as u32;
            let wanted = target.for_role_mut(role);
            *wanted = count.max(*wanted);
        }
        target
    }

    /// Starts and stops workers to reach the desired numbers.
    fn apply(&mut self, target: &PoolCounts) -> anyhow::Result<()> {
        for (place, role) in POOLS.into_iter().enumerate() {
            let there = |worker: &&mut WorkerProcess| worker.role == role && !worker.is_draining;
            let count = self.workers.iter_mut().filter(there).count() as u32;
            let target = target.for_role(role);
            if count > target {
                // The newest worker has the fewest cached prefixes, so it is stopped first.
                let newest = self.workers.iter_mut().rev().filter(there);
                newest
                    .take((count - target) as usize)
                    .for_each(WorkerProcess::stop);
            }
            if self.pauses[place].is_over(Instant::now()) {
                for _ in count..target {
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
        // The file has the flags of this command; one for workers is among their own flags.
        command
            .args(&self.flags)
            .env_remove(configuration::FILE_VARIABLE)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let process = command.spawn();
        let process =
            process.with_context(|| format!("cannot start {}", self.program.display()))?;
        info!(name, pid = process.id(), "worker started");
        self.workers.push(WorkerProcess {
            name,
            role,
            process,
            started_at: Instant::now(),
            is_draining: false,
        });
        Ok(())
    }

    /// Removes the workers whose processes have ended.
    fn remove_ended(&mut self) {
        let now = Instant::now();
        for mut worker in std::mem::take(&mut self.workers) {
            let Some(status) = worker.ended() else {
                self.workers.push(worker);
                continue;
            };
            let name = &worker.name;
            if worker.is_draining && status.success() {
                info!(name, "worker has drained and left");
                continue;
            }
            let lived = now.saturating_duration_since(worker.started_at);
            let place = POOLS.iter().position(|role| *role == worker.role);
            let pause = &mut self.pauses[place.expect("every role is a pool")];
            pause.record_death(now, lived);
            warn!(name, %status, deaths = pause.deaths, "worker ended unexpectedly");
        }
    }

    fn stop_all(&mut self) {
        self.workers.iter_mut().for_each(WorkerProcess::stop);
    }
}

impl WorkerProcess {
    /// Signals the worker to drain and leave.
    fn stop(&mut self) {
        self.is_draining = true;
        info!(name = self.name, "draining a worker");
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

impl Drop for WorkerProcess {
    /// Kills a process that is still running.
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

    // Invariant: I43.
    #[test]
    fn without_a_number_from_the_router_nothing_changes() {
        let pool = |target: u32| json!({"wanted": target});
        let pools = json!({"prefill": pool(1), "decode": pool(2), "both": pool(0)});
        let counts = target_counts(&json!({"mode": "act", "pools": pools})).expect("three numbers");
        let expected = PoolCounts {
            prefill: 1,
            decode: 2,
            both: 0,
        };
        assert_eq!(counts, WorkersToRun::Exactly(expected));
        let first = json!({"prefill": 1, "decode": 2, "both": 0});
        let counts = target_counts(&json!({"mode": "act", "first": first}));
        let counts = counts.expect("a request waits at a router that has just started");
        assert_eq!(counts, WorkersToRun::AtLeast(expected));
        for none in [
            json!({"mode": "advise", "pools": pools}),
            json!({"mode": "off"}),
            json!({"mode": "act"}),
            json!({}),
            json!({"mode": "act", "pools": {"prefill": pool(1)}}),
        ] {
            assert!(target_counts(&none).is_err(), "{none}");
        }
    }

    #[test]
    fn one_of_several_models_is_followed_by_its_name() {
        let pool = |target: u32| json!({"wanted": target});
        let of = |count| {
            let pools = json!({"prefill": pool(count), "decode": pool(1), "both": pool(0)});
            json!({"mode": "act", "pools": pools})
        };
        let several = json!({"mode": "by_model", "models": {"a": of(2), "b": of(3)}});
        let prefill =
            |answer: &Value, model: Option<&str>| match model_counts(answer, model).ok()? {
                WorkersToRun::Exactly(counts) => Some(counts.prefill),
                WorkersToRun::AtLeast(_) => None,
            };
        assert_eq!(prefill(&several, Some("b")), Some(3));
        assert_eq!(prefill(&several, Some("c")), None);
        assert_eq!(prefill(&several, None), None, "none is named");
        let mut one = of(4);
        one["models"] = json!({"a": of(4)});
        assert_eq!(
            (prefill(&one, None), prefill(&one, Some("a"))),
            (Some(4), Some(4))
        );
        one["models"] = json!({"": of(4)});
        assert_eq!(prefill(&one, Some("a")), Some(4), "no model is known yet");
    }

    #[test]
    fn a_worker_that_dies_at_once_is_restarted_after_a_pause() {
        let now = Instant::now();
        let mut pause = RestartPause::default();
        assert!(pause.is_over(now));
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pause.record_death(now, Duration::ZERO);
            pauses.push(pause.until.expect("a pause") - now);
        }
        assert!(pauses.is_sorted());
        assert_eq!((pauses[0], pauses[8]), PAUSES);
        pause.record_death(now, HEALTHY_UPTIME);
        assert_eq!(pause.until.expect("a pause") - now, PAUSES.0);
    }
}
