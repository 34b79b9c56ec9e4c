//! What operators see of whole processes: traces, metrics, logs.

#[path = "../harness/mod.rs"]
mod harness;

mod collector;
mod logs;
mod metrics;
mod traces;

use harness::{Client, Process, wait_for};

/// A router, with these flags too, and a worker for each leg named, with those.
pub(crate) struct Fleet {
    pub(crate) router: Process,
    pub(crate) workers: Vec<Process>,
    pub(crate) client: Client,
    pub(crate) address: String,
}

impl Fleet {
    pub(crate) fn start(legs: &[&str], router: &[&str], workers: &[&str]) -> Self {
        let first = ["router", "--listen", "127.0.0.1:0", "--placement", "split"];
        let mut router = Process::start(&[&first, router].concat());
        let address = router.address();
        let client = Client::new(&address);
        let mut fleet = Self {
            router,
            workers: Vec::new(),
            client,
            address,
        };
        for leg in legs {
            fleet.join(leg, workers);
        }
        fleet.client.wait_ready();
        fleet
    }

    /// One worker more.
    pub(crate) fn join(&mut self, leg: &str, flags: &[&str]) {
        let (threads, cache) = (["--threads", "1"], ["--kv-cache", "64MiB"]);
        let first = ["worker", "--leg", leg, "--router", &self.address];
        let listen = ["--metrics-listen", "127.0.0.1:0"];
        let flags = [&first[..], &threads, &cache, &listen, flags].concat();
        self.workers.push(Process::start(&flags));
        let count = self.workers.len() as f64;
        wait_for("another worker", || {
            (self.client.metric("cleave_workers", &[]) >= count).then_some(())
        });
    }

    /// Each worker's metrics.
    pub(crate) fn of_workers(&self) -> Vec<Client> {
        let page = |worker: &Process| {
            let logs = worker.logs();
            let (_, rest) = logs
                .split_once("metrics at http://")
                .expect("it says where");
            let (address, _) = rest.split_once('/').expect("a path follows");
            Client::new(address)
        };
        self.workers.iter().map(page).collect()
    }
}
