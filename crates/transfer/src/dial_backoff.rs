//! Delays before a preferred transport is tried again at a peer that another transport reached.
//!
//! Owns: since when and for how long the preferred transport is not tried. Never: dials.
//! Invariant: every delay ends; it doubles with each consecutive failure up to a limit, and one
//! success resets it.

use crate::transports::Transport;
use cleave_domain::WorkerRef;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// The delay after the first failure. A failed dial costs seconds, and every hand-off to that peer
/// waits for it.
pub(crate) const BACKOFF_MIN: Duration = Duration::from_secs(30);
/// The limit of the delay.
const BACKOFF_MAX: Duration = Duration::from_secs(15 * 60);

/// The delays of all peers.
#[derive(Debug, Default)]
pub(crate) struct DialBackoff {
    peers: Mutex<BTreeMap<(WorkerRef, Transport), PeerBackoff>>,
}

#[derive(Clone, Debug)]
struct PeerBackoff {
    until: Instant,
    delay: Duration,
    reason: String,
}

impl DialBackoff {
    /// The reason for which the transport is not tried now.
    pub(crate) fn reason_to_wait(&self, peer: WorkerRef, transport: Transport) -> Option<String> {
        let peers = self.lock();
        let PeerBackoff { until, reason, .. } = peers.get(&(peer, transport))?;
        let left = until.checked_duration_since(Instant::now())?;
        let seconds = left.as_secs() + 1;
        Some(format!("not tried again for {seconds} s after: {reason}"))
    }

    /// Records a failed attempt.
    pub(crate) fn record_failure(&self, peer: WorkerRef, transport: Transport, reason: String) {
        let mut peers = self.lock();
        let rest = match peers.get(&(peer, transport)) {
            Some(before) => (before.delay * 2).min(BACKOFF_MAX),
            None => BACKOFF_MIN,
        };
        let until = Instant::now() + rest;
        let backoff = PeerBackoff {
            until,
            delay: rest,
            reason,
        };
        peers.insert((peer, transport), backoff);
    }

    /// Resets the delay after a success.
    pub(crate) fn clear(&self, peer: WorkerRef, transport: Transport) {
        self.lock().remove(&(peer, transport));
    }

    /// Removes all delays of a peer.
    pub(crate) fn forget(&self, peer: WorkerRef) {
        self.lock().retain(|(other, _), _| *other != peer);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(WorkerRef, Transport), PeerBackoff>> {
        self.peers.lock()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use cleave_domain::{Incarnation, WorkerId};
    use tokio::time::advance;

    const NIXL: Transport = Transport::Nixl;

    #[tokio::test(start_paused = true)]
    async fn a_failed_transport_is_retried_after_a_growing_delay() {
        let peer = |worker| WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(1),
        };
        let dial_backoff = DialBackoff::default();
        assert_eq!(dial_backoff.reason_to_wait(peer(1), NIXL), None);
        dial_backoff.record_failure(peer(1), NIXL, "no route".into());
        assert!(
            dial_backoff
                .reason_to_wait(peer(1), NIXL)
                .unwrap()
                .contains("no route")
        );
        assert_eq!(
            dial_backoff.reason_to_wait(peer(2), NIXL),
            None,
            "it is each peer's own"
        );
        advance(BACKOFF_MIN + Duration::from_millis(1)).await;
        assert_eq!(
            dial_backoff.reason_to_wait(peer(1), NIXL),
            None,
            "it is tried again"
        );
        dial_backoff.record_failure(peer(1), NIXL, "no route".into());
        advance(BACKOFF_MIN + Duration::from_millis(1)).await;
        assert!(
            dial_backoff.reason_to_wait(peer(1), NIXL).is_some(),
            "and rests twice as long"
        );
        for _ in 0..20 {
            dial_backoff.record_failure(peer(1), NIXL, "no route".into());
        }
        advance(BACKOFF_MAX + Duration::from_millis(1)).await;
        assert_eq!(
            dial_backoff.reason_to_wait(peer(1), NIXL),
            None,
            "but never for ever"
        );
        dial_backoff.clear(peer(1), NIXL);
        dial_backoff.record_failure(peer(1), NIXL, "no route".into());
        advance(BACKOFF_MIN + Duration::from_millis(1)).await;
        assert_eq!(
            dial_backoff.reason_to_wait(peer(1), NIXL),
            None,
            "a success begins anew"
        );
    }
}
