//! Who waits at the fleet's other routers.
//!
//! Owns: asking them, again and again. Never: decides; counts itself among them. Invariant: a router that does
//! not answer has nobody waiting.
//!
//! Routers tell each other what is asked through them by the workers that they share. Where there is no
//! worker nobody carries a word, and a request that waits at one router would be unknown to the one that
//! an autoscaler asks.

use super::RouterEvent;
use crate::grpc::{local_address, watch_names};
use crate::picker::{Asker, ask_load, asker};
use cleave_router::Outside;
use futures::future::join_all;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::warn;

/// How often each is asked, and how long it may take to answer.
const ASK_EVERY: Duration = Duration::from_secs(1);
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Keeps telling the driver how many requests are open at the routers of these names, until dropped.
/// `own` are the ports at which this router itself would be asked.
pub(super) async fn watch_fellows(
    names: Vec<String>,
    own: Vec<u16>,
    driver: mpsc::UnboundedSender<RouterEvent>,
) {
    let (tell, found) = watch::channel(BTreeSet::new());
    let asker = asker();
    let place = Outside::Elsewhere;
    let tell_driver = |count| driver.send(RouterEvent::Wait { place, count }).is_ok();
    let ask = async {
        let mut ticks = interval(ASK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut silent = BTreeSet::new();
        loop {
            ticks.tick().await;
            let addresses: BTreeSet<SocketAddr> = found.borrow().clone();
            let asked = addresses.iter().map(|one| open_at(&asker, *one, &own));
            let answers = join_all(asked).await;
            let count = answers.iter().flatten().copied();
            if !tell_driver(count.fold(0, u32::saturating_add)) {
                return;
            }
            let answered = addresses.iter().zip(&answers);
            let now_silent = answered.filter(|(_, answer)| answer.is_none());
            let now_silent: BTreeSet<SocketAddr> = now_silent.map(|(one, _)| *one).collect();
            for address in now_silent.difference(&silent) {
                warn!(%address, "this --fellow-routers does not answer /load by plain HTTP: who waits there is not counted");
            }
            silent = now_silent;
        }
    };
    tokio::select! {
        () = ask => {}
        () = watch_names(names, tell) => {}
    }
}

/// Requests that are open at a router, if it answers; none at this one.
async fn open_at(asker: &Asker, address: SocketAddr, own: &[u16]) -> Option<u32> {
    let here = local_address(address).await;
    if own.contains(&address.port()) && here.is_ok_and(|here| here == address.ip()) {
        return Some(0);
    }
    let answer = timeout(ANSWER_MAX, ask_load(asker, address)).await;
    let open = answer.ok().flatten()?;
    Some(u32::try_from(open).unwrap_or(u32::MAX))
}
