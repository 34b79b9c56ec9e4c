//! Operator views of whole processes: traces, metrics, logs.

mod collector;
mod logs;
mod metrics;
mod traces;

use crate::harness::{CleaveProcess, HttpClient, wait_for};

/// A router and one worker for each leg, with additional flags.
pub(crate) struct ObservedFleet {
    pub(crate) router: CleaveProcess,
    pub(crate) workers: Vec<CleaveProcess>,
    pub(crate) client: HttpClient,
    pub(crate) address: String,
}

impl ObservedFleet {
    pub(crate) fn start(legs: &[&str], router: &[&str], workers: &[&str]) -> Self {
        let first = ["router", "--listen", "127.0.0.1:0", "--placement", "split"];
        let mut router = CleaveProcess::start(&[&first, router].concat());
        let address = router.address();
        let client = HttpClient::new(&address);
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

    pub(crate) fn join(&mut self, leg: &str, flags: &[&str]) {
        let (threads, cache) = (["--threads", "1"], ["--kv-cache", "64MiB"]);
        let first = ["worker", "--leg", leg, "--router", &self.address];
        let listen = ["--metrics-listen", "127.0.0.1:0"];
        let flags = [&first[..], &threads, &cache, &listen, flags].concat();
        self.workers.push(CleaveProcess::start(&flags));
        let count = self.workers.len() as f64;
        wait_for("another worker", || {
            (self.client.metric("cleave_workers", &[]) >= count).then_some(())
        });
    }

    pub(crate) fn worker_metrics(&self) -> Vec<HttpClient> {
        let page = |worker: &CleaveProcess| {
            let logs = worker.logs();
            // As text, and as JSON.
            let urls = ["url=http://", "\"url\":\"http://"];
            let rest = urls.into_iter().find_map(|url| logs.split_once(url));
            let (_, rest) = rest.expect("it says where");
            let (address, _) = rest.split_once('/').expect("a path follows");
            HttpClient::new(address)
        };
        self.workers.iter().map(page).collect()
    }
}
