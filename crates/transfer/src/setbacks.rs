//! Peers that were dialled in vain by one transport, though another reaches them.
//!
//! Owns: since when, and for how long the better transport is left alone. Never: dials.
//! Invariant: a rest ends, and doubles with each failure after another, up to the longest; one success, and nothing is
//! remembered.

use cleave_domain::WorkerRef;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// After the first failure. A dial in vain costs seconds, and every hand-off to that peer waits for it.
pub(crate) const REST_MIN: Duration = Duration::from_secs(30);
/// After many.
const REST_MAX: Duration = Duration::from_secs(15 * 60);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Setbacks {
    peers: Mutex<BTreeMap<WorkerRef, Setback>>,
}

#[derive(Clone, Debug)]
struct Setback {
    until: Instant,
    rest: Duration,
    reason: String,
}

impl Setbacks {
    /// Why the peer is not tried now.
    pub(crate) fn rest(&self, peer: WorkerRef) -> Option<String> {
        let peers = self.lock();
        let Setback { until, reason, .. } = peers.get(&peer)?;
        let left = until.checked_duration_since(Instant::now())?;
        let seconds = left.as_secs() + 1;
        Some(format!("not tried again for {seconds} s after: {reason}"))
    }

    /// It was tried, in vain.
    pub(crate) fn note(&self, peer: WorkerRef, reason: String) {
        let mut peers = self.lock();
        let rest = match peers.get(&peer) {
            Some(before) => (before.rest * 2).min(REST_MAX),
            None => REST_MIN,
        };
        let until = Instant::now() + rest;
        let setback = Setback {
            until,
            rest,
            reason,
        };
        peers.insert(peer, setback);
    }

    /// It carried something, or the peer is gone.
    pub(crate) fn forget(&self, peer: WorkerRef) {
        self.lock().remove(&peer);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerRef, Setback>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use cleave_domain::{Incarnation, WorkerId};
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn each_dial_paid_again_for_a_way_that_failed() {
        let peer = |worker| WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(1),
        };
        let setbacks = Setbacks::default();
        assert_eq!(setbacks.rest(peer(1)), None);
        setbacks.note(peer(1), "no route".into());
        assert!(setbacks.rest(peer(1)).unwrap().contains("no route"));
        assert_eq!(setbacks.rest(peer(2)), None, "it is each peer's own");
        advance(REST_MIN + Duration::from_millis(1)).await;
        assert_eq!(setbacks.rest(peer(1)), None, "it is tried again");
        setbacks.note(peer(1), "no route".into());
        advance(REST_MIN + Duration::from_millis(1)).await;
        assert!(setbacks.rest(peer(1)).is_some(), "and rests twice as long");
        for _ in 0..20 {
            setbacks.note(peer(1), "no route".into());
        }
        advance(REST_MAX + Duration::from_millis(1)).await;
        assert_eq!(setbacks.rest(peer(1)), None, "but never for ever");
        setbacks.forget(peer(1));
        setbacks.note(peer(1), "no route".into());
        advance(REST_MIN + Duration::from_millis(1)).await;
        assert_eq!(setbacks.rest(peer(1)), None, "a success begins anew");
    }
}
