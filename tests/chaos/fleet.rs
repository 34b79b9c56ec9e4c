//! A router, two prefill and three decode workers, each a process, with a proxy on every connection
//! between them but one worker's data link, which goes the way that the pair chooses itself.
//!
//! Owns: the processes. Never: decides what happens to them.

use crate::harness::{Client, Process, wait_for};
use crate::proxy::Proxy;
use tokio::runtime::Handle;

/// A worker's place: the same name, proxies and flags in all its lives.
pub(crate) struct Seat {
    pub(crate) name: &'static str,
    pub(crate) leg: &'static str,
    process: Option<Process>,
    /// Between it and the router.
    pub(crate) line: Proxy,
    /// Between other workers and its blocks.
    pub(crate) data: Option<Proxy>,
    page: String,
}

/// See the module.
pub(crate) struct Fleet {
    pub(crate) router: Process,
    pub(crate) client: Client,
    pub(crate) base: String,
    pub(crate) seats: Vec<Seat>,
}

const SEATS: [(&str, &str); 5] = [
    ("p0", "prefill"),
    ("p1", "prefill"),
    ("d0", "decode"),
    ("d1", "decode"),
    ("d2", "decode"),
];

/// Seconds; short, so that a run sees many losses.
const SILENCE: &str = "1";

impl Fleet {
    pub(crate) fn start(runtime: &Handle) -> Self {
        let arguments = [
            "router",
            "--listen",
            "127.0.0.1:0",
            "--worker-silence",
            SILENCE,
            // Every stream has a hand-off that may break.
            "--placement",
            "split",
        ];
        let mut router = Process::start(&arguments);
        let address = router.address();
        let seats = SEATS.map(|(name, leg)| {
            let line = runtime.block_on(Proxy::start());
            line.aim(Some(address.clone()));
            let data = (name != "d2").then(|| runtime.block_on(Proxy::start()));
            let mut seat = Seat {
                name,
                leg,
                process: None,
                line,
                data,
                page: String::new(),
            };
            seat.start();
            seat
        });
        let client = Client::new(&address);
        client.wait_ready();
        let fleet = Self {
            router,
            client,
            base: format!("http://{address}"),
            seats: seats.into(),
        };
        fleet.wait_whole();
        fleet
    }

    /// Waits until every worker is connected and serves what it was started for.
    pub(crate) fn wait_whole(&self) {
        wait_for("a whole fleet", || {
            let (_, text) = self.client.get("/admin/workers");
            let list: serde_json::Value = serde_json::from_str(&text).ok()?;
            let workers = list["data"].as_array()?;
            let whole = self.seats.iter().all(|seat| {
                workers.iter().any(|worker| {
                    worker["name"] == seat.name
                        && worker["role"] == seat.leg
                        && worker["state"] == "ready"
                })
            });
            whole.then_some(())
        });
    }

    /// Waits until the router has lost this worker.
    pub(crate) fn wait_lost(&self, seat: usize) {
        let name = format!("\"name\":\"{}\"", self.seats[seat].name);
        wait_for("its loss", || {
            (!self.client.get("/admin/workers").1.contains(&name)).then_some(())
        });
    }
}

impl Seat {
    /// Starts its next life.
    pub(crate) fn start(&mut self) {
        let mut arguments = vec![
            "worker",
            "--leg",
            self.leg,
            "--name",
            self.name,
            "--router",
            &self.line.address,
            "--threads",
            "1",
            "--kv-cache",
            "12MiB",
            "--worker-silence",
            SILENCE,
            "--metrics-listen",
            "127.0.0.1:0",
        ];
        if let Some(data) = &self.data {
            data.aim(None);
            arguments.extend(["--data-advertise", &data.address]);
        }
        let process = Process::start(&arguments);
        let said = |mark: &str| {
            wait_for("a worker's addresses", || {
                let logs = process.logs();
                let rest = &logs[logs.find(mark)? + mark.len()..];
                let end = rest.find(['/', ' ', '\n'])?;
                Some(rest[..end].to_owned())
            })
        };
        let data_address = said("worker runs data=");
        self.page = said("metrics at http://");
        if let Some(data) = &self.data {
            data.aim(Some(data_address));
        }
        self.process = Some(process);
    }

    pub(crate) fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("it was started")
    }

    pub(crate) fn logs(&self) -> String {
        let process = self.process.as_ref().expect("it was started");
        process.logs()
    }

    /// Its own metrics.
    pub(crate) fn page(&self) -> Client {
        Client::new(&self.page)
    }
}
