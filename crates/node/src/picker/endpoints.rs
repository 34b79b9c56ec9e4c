//! The routers that a picker knows.
//!
//! Owns: asking each, again and again, whether it is ready and how much it has. Never: asks on a request's
//! way. Invariant: a router that has not answered when last asked is not ready.

use super::choose::{Choice, Seat, choose};
use super::wish::Wish;
use crate::grpc::watch_names;
use crate::telemetry::PickerSeries;
use bytes::Bytes;
use futures::future::join_all;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::info;

/// How often each router is asked, and how long it may take to answer.
const ASK_EVERY: Duration = Duration::from_millis(500);
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// An answer is a few words.
const ANSWER_BYTES_MAX: usize = 16 << 10;

/// See the module.
#[derive(Debug)]
pub(crate) struct Endpoints {
    known: Mutex<Known>,
    series: PickerSeries,
    /// Whether all were asked once.
    asked: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Known {
    routers: BTreeMap<SocketAddr, Told>,
    turn: u64,
}

/// What a router said when last asked.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    ready: bool,
    load: u64,
    load_max: Option<u64>,
    /// Requests sent there that its word cannot have counted.
    sent: u64,
}

/// `GET /load`.
#[derive(Deserialize)]
struct Load {
    server_load: u64,
    server_load_max: Option<u64>,
}

pub(crate) type Asker = Client<HttpConnector, Empty<Bytes>>;

/// What routers are asked with.
pub(crate) fn asker() -> Asker {
    Client::builder(TokioExecutor::new()).build_http()
}

impl Endpoints {
    pub(crate) fn new(series: PickerSeries) -> Self {
        Self {
            known: Mutex::default(),
            series,
            asked: watch::Sender::new(false),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses, and remembers it until the router's next word.
    pub(crate) fn choose(&self, wish: &Wish) -> Choice {
        let mut known = self.known();
        let seats: Vec<Seat> = known
            .routers
            .iter()
            .map(|(address, told)| Seat {
                address: *address,
                ready: told.ready,
                load: told.load + told.sent,
                load_max: told.load_max,
            })
            .collect();
        known.turn += 1;
        let choice = choose(
            &seats,
            wish.subset.as_ref(),
            (wish.key.as_deref(), known.turn),
        );
        if let Choice::Endpoint(address) = choice
            && let Some(told) = known.routers.get_mut(&address)
        {
            told.sent += 1;
        }
        choice
    }

    /// Returns once all routers were asked.
    pub(crate) async fn asked(&self) {
        let mut asked = self.asked.subscribe();
        // The other end is this value's own.
        let _ = asked.wait_for(|asked| *asked).await;
    }

    /// Keeps asking the routers of these names, until dropped.
    pub(crate) async fn watch(&self, names: Vec<String>) {
        let (tell, mut found) = watch::channel(BTreeSet::new());
        let asker = asker();
        let ask = async {
            let mut ticks = interval(ASK_EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            // The names' first look-up.
            let _ = found.changed().await;
            loop {
                ticks.tick().await;
                let addresses = found.borrow().clone();
                self.known()
                    .routers
                    .retain(|one, _| addresses.contains(one));
                join_all(addresses.iter().map(|one| self.ask(&asker, *one))).await;
                self.tell();
                self.asked.send_replace(true);
            }
        };
        tokio::select! {
            () = ask => {}
            () = watch_names(names, tell) => {}
        }
    }

    async fn ask(&self, asker: &Asker, address: SocketAddr) {
        let sent = self.known().routers.entry(address).or_default().sent;
        let answer = timeout(ANSWER_MAX, told(asker, address)).await;
        let load = answer.ok().flatten();
        let mut known = self.known();
        let told = known.routers.entry(address).or_default();
        if told.ready != load.is_some() {
            let state = if load.is_some() { "ready" } else { "away" };
            info!(router = %address, "the endpoint picker finds this router {state}");
        }
        told.ready = load.is_some();
        // Its word may have counted what was sent while it was asked; then that counts twice, once.
        told.sent -= sent;
        if let Some(Load {
            server_load,
            server_load_max,
        }) = load
        {
            told.load = server_load;
            told.load_max = server_load_max;
        }
    }

    fn tell(&self) {
        let known = self.known();
        let ready = known.routers.values().filter(|told| told.ready).count();
        self.series.knows(ready, known.routers.len() - ready);
    }
}

/// What a router says, if it would serve a request.
async fn told(asker: &Asker, address: SocketAddr) -> Option<Load> {
    get(asker, address, "/ready").await?;
    load(asker, address).await
}

async fn load(asker: &Asker, address: SocketAddr) -> Option<Load> {
    serde_json::from_slice(&get(asker, address, "/load").await?).ok()
}

/// How many requests are open at a router, ready or not.
pub(crate) async fn ask_load(asker: &Asker, address: SocketAddr) -> Option<u64> {
    let load = load(asker, address).await?;
    Some(load.server_load)
}

/// The body of an answer that is a 200.
async fn get(asker: &Asker, address: SocketAddr, path: &str) -> Option<Bytes> {
    let uri = format!("http://{address}{path}").parse().ok()?;
    let answer = asker.get(uri).await.ok()?;
    if answer.status() != axum::http::StatusCode::OK {
        return None;
    }
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
    Some(body.collect().await.ok()?.to_bytes())
}
