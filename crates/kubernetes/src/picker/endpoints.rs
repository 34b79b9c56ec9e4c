//! The routers that a picker knows.
//!
//! Owns: polling each router for its readiness and load. Never asks on a request's path. Invariant:
//! a router that did not answer its last poll is not ready.

use super::choose::{EndpointState, choose};
use super::pick_request::PickRequest;
use cleave_fleet::watch_names;
use cleave_server::{PeerRouterClient, PeerRouterLoad, PeerRouterUnavailable};
use cleave_telemetry::{PickerChoice, PickerSeries};
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
    known_routers: Mutex<KnownRouters>,
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
    pub(crate) client: PeerRouterClient,
    /// The port, if it differs from that of requests.
    pub(crate) port: Option<u16>,
}

impl PickerEndpoints {
    pub(crate) fn new(series: PickerSeries) -> Self {
        Self {
            known_routers: Mutex::default(),
            series,
            all_probed: watch::Sender::new(false),
        }
    }

    fn known_routers(&self) -> MutexGuard<'_, KnownRouters> {
        self.known_routers.lock()
    }

    /// Chooses, and counts the request until the router's next answer.
    pub(crate) fn choose(&self, request: &PickRequest) -> PickerChoice {
        let mut known_routers = self.known_routers();
        let endpoints: Vec<EndpointState> = known_routers
            .routers
            .iter()
            .map(|(address, router)| EndpointState {
                address: *address,
                ready: router.ready,
                load: router.load + router.requests_sent_since,
                load_max: router.load_max,
            })
            .collect();
        known_routers.turn += 1;
        let choice = choose(
            &endpoints,
            request.subset.as_ref(),
            request.key.as_deref(),
            known_routers.turn,
        );
        if let PickerChoice::Endpoint(address) = choice
            && let Some(router) = known_routers.routers.get_mut(&address)
        {
            router.requests_sent_since += 1;
        }
        choice
    }

    /// Returns once all routers were polled.
    pub(crate) async fn all_probed(&self) {
        let mut probed = self.all_probed.subscribe();
        // The sender is part of this value.
        let _ = probed.wait_for(|probed| *probed).await;
    }

    /// Keeps polling the routers of these names, until dropped.
    pub(crate) async fn watch(&self, names: Vec<String>, status_probe: StatusProbe) {
        let (found_sender, mut found) = watch::channel(BTreeSet::new());
        let ask = async {
            let mut ticks = interval(PROBE_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            // The names' first look-up.
            let _ = found.changed().await;
            loop {
                ticks.tick().await;
                let addresses = found.borrow().clone();
                self.known_routers()
                    .routers
                    .retain(|one, _| addresses.contains(one));
                join_all(addresses.iter().map(|one| self.probe(&status_probe, *one))).await;
                self.update_series();
                self.all_probed.send_replace(true);
            }
        };
        tokio::select! {
            () = ask => {}
            () = watch_names(names, found_sender) => {}
        }
    }

    async fn probe(&self, status_probe: &StatusProbe, address: SocketAddr) {
        let sent = self
            .known_routers()
            .routers
            .entry(address)
            .or_default()
            .requests_sent_since;
        let status_address =
            SocketAddr::new(address.ip(), status_probe.port.unwrap_or(address.port()));
        let answer = status_probe.client.ready_load(status_address).await;
        let mut known_routers = self.known_routers();
        let router = known_routers.routers.entry(address).or_default();
        // The answer may include requests sent while it was under way; those count twice until the
        // next one.
        router.requests_sent_since -= sent;
        router.update(address, answer);
    }

    fn update_series(&self) {
        let known_routers = self.known_routers();
        let ready = known_routers
            .routers
            .values()
            .filter(|router| router.ready)
            .count();
        self.series
            .set_endpoints(ready, known_routers.routers.len() - ready);
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
