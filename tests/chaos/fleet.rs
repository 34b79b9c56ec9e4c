//! A fleet of processes: a router, two prefill and three decode workers, with a proxy on every
//! connection between them except one worker's data link, whose transport the pair chooses itself.
//!
//! Owns: the processes. Never: decides their faults.

use crate::chaos::proxy::FaultProxy;
use crate::harness::{CleaveProcess, HttpClient, wait_for};
use tokio::runtime::Handle;

/// A worker with the same name, proxies and flags in all its lives.
pub(crate) struct ChaosWorker {
    pub(crate) name: &'static str,
    pub(crate) leg: &'static str,
    process: Option<CleaveProcess>,
    /// Proxy between it and the router.
    pub(crate) router_proxy: FaultProxy,
    /// Proxy between other workers and its blocks.
    pub(crate) data_proxy: Option<FaultProxy>,
    metrics_address: String,
    silence: &'static str,
    flags: Vec<String>,
}

pub(crate) struct ChaosFleet {
    pub(crate) router: CleaveProcess,
    pub(crate) client: HttpClient,
    pub(crate) base: String,
    pub(crate) workers: Vec<ChaosWorker>,
}

const WORKERS: [(&str, &str); 5] = [
    ("p0", "prefill"),
    ("p1", "prefill"),
    ("d0", "decode"),
    ("d1", "decode"),
    ("d2", "decode"),
];

/// Seconds of silence after which one end of a worker's stream counts the other as lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SilenceLimits {
    pub(crate) router: &'static str,
    pub(crate) workers: &'static str,
}

/// Short limits, so that a run has many losses.
pub(crate) const SHORT_SILENCE: SilenceLimits = SilenceLimits {
    router: "1",
    workers: "1",
};

/// Flags of a worker that serves the bundled checkpoint.
const PLAIN_FLAGS: [&str; 2] = ["--kv-cache", "20MiB"];

impl ChaosFleet {
    pub(crate) fn start(runtime: &Handle) -> Self {
        Self::start_with(runtime, SHORT_SILENCE)
    }

    pub(crate) fn start_with(runtime: &Handle, silence: SilenceLimits) -> Self {
        Self::start_flagged(runtime, silence, |_| PLAIN_FLAGS.map(str::to_owned).into())
    }

    /// Starts a fleet each of whose workers has flags of its own, by its index.
    pub(crate) fn start_flagged(
        runtime: &Handle,
        silence: SilenceLimits,
        flags: impl Fn(usize) -> Vec<String>,
    ) -> Self {
        let arguments = [
            "router",
            "--listen",
            "127.0.0.1:0",
            "--worker-silence",
            silence.router,
            // Split placement gives every stream a hand-off that may break.
            "--placement",
            "split",
        ];
        let mut router = CleaveProcess::start(&arguments);
        let address = router.address();
        let mut indices = 0..WORKERS.len();
        let workers = WORKERS.map(|(name, leg)| {
            let line = runtime.block_on(FaultProxy::start());
            line.set_target(Some(address.clone()));
            let data = (name != "d2").then(|| runtime.block_on(FaultProxy::start()));
            let mut worker = ChaosWorker {
                name,
                leg,
                process: None,
                router_proxy: line,
                data_proxy: data,
                metrics_address: String::new(),
                silence: silence.workers,
                flags: flags(indices.next().expect("one for each worker")),
            };
            worker.start();
            worker
        });
        let client = HttpClient::new(&address);
        client.wait_ready();
        let fleet = Self {
            router,
            client,
            base: format!("http://{address}"),
            workers: workers.into(),
        };
        fleet.wait_whole();
        fleet
    }

    /// Waits until every worker is connected in its own role.
    pub(crate) fn wait_whole(&self) {
        wait_for("a whole fleet", || {
            let (_, text) = self.client.get("/admin/workers");
            let list: serde_json::Value = serde_json::from_str(&text).ok()?;
            let workers = list["data"].as_array()?;
            let whole = self.workers.iter().all(|expected| {
                workers.iter().any(|worker| {
                    worker["name"] == expected.name
                        && worker["role"] == expected.leg
                        && worker["state"] == "ready"
                })
            });
            whole.then_some(())
        });
    }

    /// Waits until the router has lost this worker.
    pub(crate) fn wait_lost(&self, worker_index: usize) {
        let name = format!("\"name\":\"{}\"", self.workers[worker_index].name);
        wait_for("its loss", || {
            (!self.client.get("/admin/workers").1.contains(&name)).then_some(())
        });
    }
}

impl ChaosWorker {
    /// Starts the worker's next process.
    pub(crate) fn start(&mut self) {
        let mut arguments = vec![
            "worker",
            "--leg",
            self.leg,
            "--name",
            self.name,
            "--router",
            &self.router_proxy.address,
            "--threads",
            "1",
            "--worker-silence",
            self.silence,
            "--metrics-listen",
            "127.0.0.1:0",
        ];
        arguments.extend(self.flags.iter().map(String::as_str));
        if let Some(data) = &self.data_proxy {
            data.set_target(None);
            arguments.extend(["--data-advertise", &data.address]);
        }
        let process = CleaveProcess::start(&arguments);
        let logged = |mark: &str| {
            wait_for("a worker's addresses", || {
                let logs = process.logs();
                let rest = &logs[logs.find(mark)? + mark.len()..];
                let end = rest.find(['/', ' ', '\n'])?;
                Some(rest[..end].to_owned())
            })
        };
        let data_address = logged("worker runs data=");
        self.metrics_address = logged("metrics are served url=http://");
        if let Some(data) = &self.data_proxy {
            data.set_target(Some(data_address));
        }
        self.process = Some(process);
    }

    pub(crate) fn process(&mut self) -> &mut CleaveProcess {
        self.process.as_mut().expect("it was started")
    }

    pub(crate) fn logs(&self) -> String {
        let process = self.process.as_ref().expect("it was started");
        process.logs()
    }

    pub(crate) fn metrics_client(&self) -> HttpClient {
        HttpClient::new(&self.metrics_address)
    }
}
