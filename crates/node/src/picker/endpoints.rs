//! The routers that a picker knows.
//!
//! Owns: asking each, again and again, whether it is ready and how much it has. Never: asks on a request's
//! way. Invariant: a router that has not answered when last asked is not ready.

use super::choose::{Choice, Seat, choose};
use super::wish::Wish;
use crate::ask::{Asker, Away, Load};
use crate::grpc::watch_names;
use crate::telemetry::PickerSeries;
use futures::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

/// How often each router is asked.
const ASK_EVERY: Duration = Duration::from_millis(500);

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
#[derive(Clone, Debug, Default)]
struct Told {
    ready: bool,
    /// Why it is not, if it was asked.
    away: Option<Away>,
    load: u64,
    load_max: Option<u64>,
    /// Requests sent there that its word cannot have counted.
    sent: u64,
}

/// Where routers are asked, and how.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) asker: Asker,
    /// The port, if it is another one than that of requests.
    pub(crate) port: Option<u16>,
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
    pub(crate) async fn watch(&self, names: Vec<String>, way: Way) {
        let (tell, mut found) = watch::channel(BTreeSet::new());
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
                join_all(addresses.iter().map(|one| self.ask(&way, *one))).await;
                self.tell();
                self.asked.send_replace(true);
            }
        };
        tokio::select! {
            () = ask => {}
            () = watch_names(names, tell) => {}
        }
    }

    async fn ask(&self, way: &Way, address: SocketAddr) {
        let sent = self.known().routers.entry(address).or_default().sent;
        let asked = SocketAddr::new(address.ip(), way.port.unwrap_or(address.port()));
        let answer = way.asker.ready_load(asked).await;
        let mut known = self.known();
        let told = known.routers.entry(address).or_default();
        // Its word may have counted what was sent while it was asked; then that counts twice, once.
        told.sent -= sent;
        told.hear(address, answer);
    }

    fn tell(&self) {
        let known = self.known();
        let ready = known.routers.values().filter(|told| told.ready).count();
        self.series.knows(ready, known.routers.len() - ready);
    }
}

impl Told {
    fn hear(&mut self, router: SocketAddr, answer: Result<Load, Away>) {
        match &answer {
            Ok(_) if !self.ready => info!(%router, "the endpoint picker finds this router ready"),
            Err(Away::NotReady) if self.away != answer.as_ref().err().cloned() => {
                info!(%router, "the endpoint picker finds this router not ready");
            }
            Err(Away::Unasked(reason)) if self.away != answer.as_ref().err().cloned() => {
                warn!(%router, reason, "the endpoint picker cannot ask this router and sends nobody there");
            }
            _ => {}
        }
        self.ready = answer.is_ok();
        if let Ok(load) = &answer {
            self.load = load.server_load;
            self.load_max = load.server_load_max;
        }
        self.away = answer.err();
    }
}
