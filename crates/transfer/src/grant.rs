//! Write grants: signed permissions to write to reserved blocks.
//!
//! Owns: the grants that a receiver issues, one for each hand-off, and the grants that a sender
//! received.
//! Never: extends or ends a hand-off; the hand-off machine does. Invariant: a grant is valid for
//! one sender and one hand-off, at the receiver that issued it, in the same incarnation, until it
//! expires.
//!
//! A receiver signs with a key of its own that never leaves it, so the fleet shares no secret; its
//! router forwards the grant to the sender, beside the order. The hand-off machine still checks
//! sender, block, generation and repetition: its checks catch mistakes, and grants keep out a peer
//! that lies about its identity.
//!
//! A grant is kept for as long as it may still be used: by the router until it was sent to the
//! sender or the receiver released the hand-off; by the sender until its hand-off ended. Bytes read
//! out of the pool before that end may be sent after it and must not be refused, because a refusal
//! ends the link: so each queued message carries its grant. A receiver stores none. A grant that is
//! sent again, within its hour, admits frames of a hand-off that is over, and the worker's brain
//! discards those as it discards late frames: by their hand-off.

use crate::socket::LinkError;
use cleave_domain::{HandoffId, RouterId, WorkerRef};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::time::Instant;

/// Size of a grant: its expiry, the hash of the tenant, and the signature.
pub const GRANT_BYTES: usize = 32;
/// The lifetime of a grant. No hand-off takes as long; leases end unwanted ones within seconds. The
/// limit bounds the use of a stolen grant.
const GRANT_LIFETIME: Duration = Duration::from_secs(3600);
/// Limit of the stored grants, of which the newest are kept: many times the hand-offs that one
/// worker can have in progress.
const STORED_MAX: usize = 1 << 16;

/// A signed permission to write the reserved blocks of one hand-off.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteGrant(pub [u8; GRANT_BYTES]);

impl fmt::Debug for WriteGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pass(…)")
    }
}

/// The reason for which a grant is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteGrantError {
    /// This worker did not issue it, or issued it for another hand-off or sender.
    #[error("the write grant was not made for this sender and hand-off")]
    Forged,
    /// Its time of validity has passed.
    #[error("the write grant has expired")]
    Expired,
}

/// Issues and verifies the grants of one worker, and stores the grants that it received. Clones
/// share the state.
#[derive(Clone)]
pub struct GrantIssuer(Arc<GrantIssuerState>);

struct GrantIssuerState {
    key: [u8; 32],
    started_at: Instant,
    stored: Mutex<GrantStore>,
}

impl GrantIssuer {
    /// Creates the issuer of a worker that starts now, with a random key.
    pub fn new(key: [u8; 32]) -> Self {
        Self(Arc::new(GrantIssuerState {
            key,
            started_at: Instant::now(),
            stored: Mutex::default(),
        }))
    }

    /// Issues a grant to this sender for the blocks that this hand-off reserved here.
    pub fn issue(&self, handoff: HandoffId, sender: WorkerRef, tenant: &str) -> WriteGrant {
        let expires = (self.0.started_at.elapsed() + GRANT_LIFETIME).as_millis();
        let expires = u64::try_from(expires).unwrap_or(u64::MAX);
        let mut grant = [0; GRANT_BYTES];
        grant[..8].copy_from_slice(&expires.to_le_bytes());
        grant[8..16].copy_from_slice(&blake3::hash(tenant.as_bytes()).as_bytes()[..8]);
        let signature = self.signature(&grant, handoff, sender);
        grant[16..].copy_from_slice(&signature.as_bytes()[..16]);
        WriteGrant(grant)
    }

    /// Verifies that this sender may write the blocks that this hand-off reserved.
    ///
    /// # Errors
    /// See [`WriteGrantError`].
    pub fn verify(
        &self,
        handoff: HandoffId,
        sender: WorkerRef,
        WriteGrant(grant): WriteGrant,
    ) -> Result<(), WriteGrantError> {
        let signature = self.signature(&grant, handoff, sender);
        let is_authentic = signature.as_bytes()[..16].ct_eq(&grant[16..]);
        if !bool::from(is_authentic) {
            return Err(WriteGrantError::Forged);
        }
        let mut expires = [0; 8];
        expires.copy_from_slice(&grant[..8]);
        if self.0.started_at.elapsed().as_millis() < u128::from(u64::from_le_bytes(expires)) {
            Ok(())
        } else {
            Err(WriteGrantError::Expired)
        }
    }

    fn signature(
        &self,
        grant: &[u8; GRANT_BYTES],
        handoff: HandoffId,
        sender: WorkerRef,
    ) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0.key);
        hasher.update(&grant[..16]);
        let HandoffId { flight, attempt } = handoff;
        hasher.update(&flight.0.to_le_bytes());
        hasher.update(&attempt.to_le_bytes());
        hasher.update(&sender.worker.0.to_le_bytes());
        hasher.update(&sender.incarnation.0.to_le_bytes());
        hasher.finalize()
    }

    /// Stores the grant for a hand-off that this worker is about to send.
    pub fn store(&self, handoff: HandoffId, grant: WriteGrant) {
        let mut held = self.0.stored.lock();
        held.insert(handoff, grant);
    }

    /// Removes the grant of a hand-off that ended here: queued messages carry their own copy.
    pub fn remove(&self, handoff: HandoffId) {
        let mut held = self.0.stored.lock();
        held.remove(handoff);
    }

    /// Removes all grants of hand-offs of this router.
    pub fn remove_router(&self, router: RouterId) {
        let mut held = self.0.stored.lock();
        held.remove_router(router);
    }

    /// The number of stored grants.
    pub fn stored_count(&self) -> usize {
        let held = self.0.stored.lock();
        held.len()
    }

    /// The stored grant for a hand-off.
    pub(crate) fn stored(&self, handoff: HandoffId) -> Option<WriteGrant> {
        let held = self.0.stored.lock();
        held.get(handoff)
    }
}

impl fmt::Debug for GrantIssuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passes(…)")
    }
}

/// Grants that wait to be used; over the limit the oldest is dropped.
#[derive(Debug, Default)]
pub struct GrantStore {
    /// Each grant with the number of its insertion.
    grants: BTreeMap<HandoffId, (u64, WriteGrant)>,
    order: BTreeMap<u64, HandoffId>,
    inserted_count: u64,
}

impl GrantStore {
    /// Stores a grant, in the place of an earlier one for the same hand-off.
    pub fn insert(&mut self, handoff: HandoffId, grant: WriteGrant) {
        self.remove(handoff);
        self.inserted_count += 1;
        self.grants.insert(handoff, (self.inserted_count, grant));
        self.order.insert(self.inserted_count, handoff);
        if self.order.len() > STORED_MAX
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.grants.remove(&oldest);
        }
    }

    /// The grant for this hand-off.
    pub fn get(&self, handoff: HandoffId) -> Option<WriteGrant> {
        self.grants.get(&handoff).map(|(_, grant)| *grant)
    }

    /// Removes and returns the grant for this hand-off.
    pub fn remove(&mut self, handoff: HandoffId) -> Option<WriteGrant> {
        let (number, grant) = self.grants.remove(&handoff)?;
        self.order.remove(&number);
        Some(grant)
    }

    /// The number of grants.
    pub fn len(&self) -> usize {
        self.grants.len()
    }

    /// Whether no grant is stored.
    pub fn is_empty(&self) -> bool {
        self.grants.is_empty()
    }

    fn remove_router(&mut self, router: RouterId) {
        self.grants
            .retain(|handoff, _| handoff.flight.router() != router);
        self.order
            .retain(|_, handoff| handoff.flight.router() != router);
    }
}

/// Limit of the hand-offs that either end of a stream remembers as granted. A sender forgets no
/// later than its receiver, and then sends the grants again.
pub(crate) const HANDOFFS_MAX: usize = 1 << 12;

/// The hand-offs whose grant was received on one stream.
#[derive(Debug)]
pub(crate) struct AdmittedHandoffs {
    /// `None` if the fleet uses no write grants.
    issuer: Option<GrantIssuer>,
    handoffs: BTreeSet<HandoffId>,
}

impl AdmittedHandoffs {
    /// Admits no hand-off yet.
    pub(crate) fn new(issuer: Option<GrantIssuer>) -> Self {
        Self {
            issuer,
            handoffs: BTreeSet::new(),
        }
    }

    /// Verifies a grant of the sender of the stream; frames and seals of this hand-off may follow.
    pub(crate) fn admit(
        &mut self,
        sender: WorkerRef,
        handoff: HandoffId,
        grant: WriteGrant,
    ) -> Result<(), LinkError> {
        let Some(issuer) = &self.issuer else {
            return Ok(());
        };
        let checked = issuer.verify(handoff, sender, grant);
        checked.map_err(|error| LinkError::InvalidGrant(handoff, error))?;
        if self.handoffs.len() >= HANDOFFS_MAX {
            self.handoffs.clear();
        }
        self.handoffs.insert(handoff);
        Ok(())
    }

    pub(crate) fn check_admitted(&self, handoff: HandoffId) -> Result<(), LinkError> {
        if self.issuer.is_none() || self.handoffs.contains(&handoff) {
            Ok(())
        } else {
            Err(LinkError::InvalidGrant(handoff, WriteGrantError::Forged))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{FlightId, Incarnation, WorkerId};

    fn handoff(flight: u64, attempt: u32) -> HandoffId {
        HandoffId {
            flight: FlightId(flight),
            attempt,
        }
    }

    fn worker(worker: u64, life: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(life),
        }
    }

    // Invariant: I47.
    #[tokio::test(start_paused = true)]
    async fn a_grant_is_valid_for_one_hand_off_and_sender() {
        let issuer = GrantIssuer::new([1; 32]);
        let grant = issuer.issue(handoff(7, 1), worker(3, 9), "acme");
        let check = |handoff, sender| issuer.verify(handoff, sender, grant);
        assert_eq!(check(handoff(7, 1), worker(3, 9)), Ok(()));
        for (handoff, sender) in [
            (handoff(8, 1), worker(3, 9)),
            (handoff(7, 2), worker(3, 9)),
            (handoff(7, 1), worker(4, 9)),
            (handoff(7, 1), worker(3, 10)),
        ] {
            assert_eq!(check(handoff, sender), Err(WriteGrantError::Forged));
        }
        // No bit of the expiry, the tenant or the signature may differ.
        for bit in 0..GRANT_BYTES * 8 {
            let WriteGrant(mut other) = grant;
            other[bit / 8] ^= 1 << (bit % 8);
            let checked = issuer.verify(handoff(7, 1), worker(3, 9), WriteGrant(other));
            assert_eq!(checked, Err(WriteGrantError::Forged), "bit {bit}");
        }
        let other_issuer = GrantIssuer::new([2; 32]);
        let checked = other_issuer.verify(handoff(7, 1), worker(3, 9), grant);
        assert_eq!(
            checked,
            Err(WriteGrantError::Forged),
            "another life has another key"
        );
        let other_tenants = issuer.issue(handoff(7, 1), worker(3, 9), "blue");
        assert_ne!(other_tenants, grant);
        tokio::time::advance(GRANT_LIFETIME).await;
        assert_eq!(
            check(handoff(7, 1), worker(3, 9)),
            Err(WriteGrantError::Expired)
        );
    }

    #[tokio::test]
    async fn grants_of_ended_hand_offs_are_removed() {
        let issuer = GrantIssuer::new([1; 32]);
        let grant = WriteGrant([0; GRANT_BYTES]);
        for flight in 0..1000 {
            issuer.store(handoff(flight, 0), grant);
            issuer.store(handoff(flight, 1), grant);
            issuer.remove(handoff(flight, 0));
            // Forgetting an unknown hand-off has no effect.
            issuer.remove(handoff(flight, 0));
            assert!(issuer.stored(handoff(flight, 0)).is_none());
            assert_eq!(issuer.stored(handoff(flight, 1)), Some(grant));
            issuer.remove(handoff(flight, 1));
            assert_eq!(issuer.stored_count(), 0);
        }
        assert!(issuer.0.stored.lock().order.is_empty());
        let of = |router| HandoffId {
            flight: FlightId::new(RouterId(router), 1),
            attempt: 0,
        };
        issuer.store(of(1), grant);
        issuer.store(of(2), grant);
        issuer.remove_router(RouterId(1));
        assert_eq!(issuer.stored_count(), 1);
        assert_eq!(issuer.stored(of(2)), Some(grant));
    }

    #[test]
    fn the_grant_store_keeps_at_most_its_limit() {
        let mut store = GrantStore::default();
        let grant = WriteGrant([0; GRANT_BYTES]);
        for flight in 0..STORED_MAX as u64 + 10 {
            store.insert(handoff(flight, 0), grant);
            store.insert(handoff(flight, 0), grant);
        }
        assert_eq!(store.grants.len(), STORED_MAX);
        assert_eq!(store.order.len(), STORED_MAX);
        assert!(store.get(handoff(9, 0)).is_none() && store.get(handoff(10, 0)).is_some());
    }
}
