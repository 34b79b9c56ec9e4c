//! Requests that wait at the fleet's other routers.
//!
//! Owns: polling those routers. Never decides, and never counts this router's own requests.
//! Invariant: a router that does not answer counts as having no request waiting.
//!
//! Routers share their demand through the workers that they have in common. Without a worker there
//! is no such path, and a request that waits at one router would be unknown to the router that an
//! autoscaler asks.

use super::event::RouterEvent;
use cleave_fleet::{local_address, watch_names};
use cleave_server::PeerRouterClient;
use futures::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

/// How often each router is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Keeps sending the driver how many requests are open at the routers of these names, until
/// dropped, and their addresses to `found_sender`. `own` are the ports of this router.
pub(super) async fn watch_peer_routers(
    names: Vec<String>,
    own: Vec<u16>,
    client: PeerRouterClient,
    driver: mpsc::UnboundedSender<RouterEvent>,
    found_sender: watch::Sender<BTreeSet<SocketAddr>>,
) {
    let found = found_sender.subscribe();
    let report_to_driver = |counts| {
        driver
            .send(RouterEvent::WaitingElsewhere { counts })
            .is_ok()
    };
    let ask = async {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut silent = BTreeMap::new();
        loop {
            ticks.tick().await;
            let addresses: BTreeSet<SocketAddr> = found.borrow().clone();
            let queries = addresses
                .iter()
                .map(|one| requests_open_at(&client, *one, &own));
            let answers = join_all(queries).await;
            let mut counts: BTreeMap<String, u32> = BTreeMap::new();
            for (model, count) in answers.iter().flatten().flatten() {
                let sum = counts.entry(model.clone()).or_default();
                *sum = sum.saturating_add(*count);
            }
            if !report_to_driver(counts) {
                return;
            }
            let answered = addresses.iter().zip(answers);
            let now_silent = answered.filter_map(|(one, answer)| Some((*one, answer.err()?)));
            let now_silent: BTreeMap<SocketAddr, String> = now_silent.collect();
            for (address, reason) in &now_silent {
                if silent.get(address) != Some(reason) {
                    warn!(%address, reason, "cannot poll this router of --fellow-routers: requests that wait there are not counted");
                }
            }
            silent = now_silent;
        }
    };
    tokio::select! {
        () = ask => {}
        () = watch_names(names, found_sender) => {}
    }
}

/// Requests that are open at a router, by model, or why that is unknown; none at this one.
async fn requests_open_at(
    client: &PeerRouterClient,
    address: SocketAddr,
    own: &[u16],
) -> Result<BTreeMap<String, u32>, String> {
    let here = local_address(address).await;
    if own.contains(&address.port()) && here.is_ok_and(|here| here == address.ip()) {
        return Ok(BTreeMap::new());
    }
    let load = client.load(address).await?;
    let counts = load.models.into_iter();
    let bounded = counts.map(|(model, open)| (model, u32::try_from(open).unwrap_or(u32::MAX)));
    Ok(bounded.collect())
}
