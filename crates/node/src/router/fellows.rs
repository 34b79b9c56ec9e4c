//! Who waits at the fleet's other routers.
//!
//! Owns: asking them, again and again. Never: decides; counts itself among them. Invariant: a router that does
//! not answer has nobody waiting.
//!
//! Routers tell each other what is asked through them by the workers that they share. Where there is no
//! worker nobody carries a word, and a request that waits at one router would be unknown to the one that
//! an autoscaler asks.

use super::RouterEvent;
use crate::ask::Asker;
use crate::grpc::{local_address, watch_names};
use cleave_router::Outside;
use futures::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

/// How often each is asked.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Keeps telling the driver how many requests are open at the routers of these names, until dropped.
/// `own` are the ports at which this router itself would be asked.
pub(super) async fn watch_fellows(
    names: Vec<String>,
    (own, asker): (Vec<u16>, Asker),
    driver: mpsc::UnboundedSender<RouterEvent>,
) {
    let (tell, found) = watch::channel(BTreeSet::new());
    let place = Outside::Elsewhere;
    let tell_driver = |count| driver.send(RouterEvent::Wait { place, count }).is_ok();
    let ask = async {
        let mut ticks = interval(ASK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut silent = BTreeMap::new();
        loop {
            ticks.tick().await;
            let addresses: BTreeSet<SocketAddr> = found.borrow().clone();
            let asked = addresses.iter().map(|one| open_at(&asker, *one, &own));
            let answers = join_all(asked).await;
            let count = answers.iter().flatten().copied();
            if !tell_driver(count.fold(0, u32::saturating_add)) {
                return;
            }
            let answered = addresses.iter().zip(answers);
            let now_silent = answered.filter_map(|(one, answer)| Some((*one, answer.err()?)));
            let now_silent: BTreeMap<SocketAddr, String> = now_silent.collect();
            for (address, reason) in &now_silent {
                if silent.get(address) != Some(reason) {
                    warn!(%address, reason, "this --fellow-routers cannot be asked: who waits there is not counted");
                }
            }
            silent = now_silent;
        }
    };
    tokio::select! {
        () = ask => {}
        () = watch_names(names, tell) => {}
    }
}

/// Requests that are open at a router, or why that is unknown; none at this one.
async fn open_at(asker: &Asker, address: SocketAddr, own: &[u16]) -> Result<u32, String> {
    let here = local_address(address).await;
    if own.contains(&address.port()) && here.is_ok_and(|here| here == address.ip()) {
        return Ok(0);
    }
    let load = asker.load(address).await?;
    Ok(u32::try_from(load.server_load).unwrap_or(u32::MAX))
}
