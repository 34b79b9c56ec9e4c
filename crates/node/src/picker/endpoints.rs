//! The routers that a picker knows.
//!
//! Owns: polling each router for its readiness and load. Never asks on a request's path. Invariant:
//! a router that did not answer its last poll is not ready.

use super::choose::{EndpointState, PickerChoice, choose};
use super::pick_request::PickRequest;
use crate::grpc::watch_names;
use crate::peer_router::{PeerRouterClient, PeerRouterLoad, PeerRouterUnavailable};
use crate::telemetry::PickerSeries;
use futures::future::join_all;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

/// How often each router is polled.
const PROBE_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct PickerEndpoints {
    known: Mutex<KnownRouters>,
    series: PickerSeries,
    /// Whether all were polled once.
    all_probed: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct KnownRouters {
    routers: BTreeMap<SocketAddr, RouterStatus>,
    turn: u64,
}

/// A router's last answer.
#[derive(Clone, Debug, Default)]
struct RouterStatus {
    ready: bool,
    /// Why it is not ready, if it was polled.
    unavailable: Option<PeerRouterUnavailable>,
    load: u64,
    load_max: Option<u64>,
    /// Requests sent there that its last answer cannot include.
    requests_sent_since: u64,
}

/// The client and the port for polling routers.
#[derive(Clone, Debug)]
pub(crate) struct StatusProbe {
    pub(crate) asker: PeerRouterClient,
    /// The port, if it differs from that of requests.
    pub(crate) port: Option<u16>,
}

impl PickerEndpoints {
    pub(crate) fn new(series: PickerSeries) -> Self {
        Self {
            known: Mutex::default(),
            series,
            all_probed: watch::Sender::new(false),
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownRouters> {
        self.known.lock()
    }

    /// Chooses, and counts the request until the router's next answer.
    pub(crate) fn choose(&self, wish: &PickRequest) -> PickerChoice {
        let mut known = self.known();
        let seats: Vec<EndpointState> = known
            .routers
            .iter()
            .map(|(address, told)| EndpointState {
                address: *address,
                ready: told.ready,
                load: told.load + told.requests_sent_since,
                load_max: told.load_max,
            })
            .collect();
        known.turn += 1;
        let choice = choose(
            &seats,
            wish.subset.as_ref(),
            wish.key.as_deref(),
            known.turn,
        );
        if let PickerChoice::Endpoint(address) = choice
            && let Some(told) = known.routers.get_mut(&address)
        {
            told.requests_sent_since += 1;
        }
        choice
    }

    /// Returns once all routers were polled.
    pub(crate) async fn all_probed(&self) {
        let mut asked = self.all_probed.subscribe();
        // The sender is part of this value.
        let _ = asked.wait_for(|asked| *asked).await;
    }

    /// Keeps polling the routers of these names, until dropped.
    pub(crate) async fn watch(&self, names: Vec<String>, way: StatusProbe) {
        let (tell, mut found) = watch::channel(BTreeSet::new());
        let ask = async {
            let mut ticks = interval(PROBE_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            // The names' first look-up.
            let _ = found.changed().await;
            loop {
                ticks.tick().await;
                let addresses = found.borrow().clone();
                self.known()
                    .routers
                    .retain(|one, _| addresses.contains(one));
                join_all(addresses.iter().map(|one| self.probe(&way, *one))).await;
                self.update_series();
                self.all_probed.send_replace(true);
            }
        };
        tokio::select! {
            () = ask => {}
            () = watch_names(names, tell) => {}
        }
    }

    async fn probe(&self, way: &StatusProbe, address: SocketAddr) {
        let sent = self
            .known()
            .routers
            .entry(address)
            .or_default()
            .requests_sent_since;
        let asked = SocketAddr::new(address.ip(), way.port.unwrap_or(address.port()));
        let answer = way.asker.ready_load(asked).await;
        let mut known = self.known();
        let told = known.routers.entry(address).or_default();
        // The answer may include requests sent while it was under way; those count twice until the
        // next one.
        told.requests_sent_since -= sent;
        told.update(address, answer);
    }

    fn update_series(&self) {
        let known = self.known();
        let ready = known.routers.values().filter(|told| told.ready).count();
        self.series
            .set_endpoints(ready, known.routers.len() - ready);
    }
}

impl RouterStatus {
    fn update(
        &mut self,
        router: SocketAddr,
        answer: Result<PeerRouterLoad, PeerRouterUnavailable>,
    ) {
        match &answer {
            Ok(_) if !self.ready => info!(%router, "the endpoint picker finds this router ready"),
            Err(PeerRouterUnavailable::NotReady)
                if self.unavailable != answer.as_ref().err().cloned() =>
            {
                info!(%router, "the endpoint picker finds this router not ready");
            }
            Err(PeerRouterUnavailable::NoAnswer(reason))
                if self.unavailable != answer.as_ref().err().cloned() =>
            {
                warn!(%router, reason, "the endpoint picker cannot poll this router and sends it no requests");
            }
            _ => {}
        }
        self.ready = answer.is_ok();
        if let Ok(load) = &answer {
            self.load = load.server_load;
            self.load_max = load.server_load_max;
        }
        self.unavailable = answer.err();
    }
}
