//! Who may write to what was reserved.
//!
//! Owns: the passes that a receiver gives out, one for each hand-off, and those that a sender was given.
//! Never: lets a hand-off live longer or end: that is the machine's. Invariant: a pass is of use to one
//! sender, for one hand-off, at the receiver that made it, in that life of it, until it expires.
//!
//! A receiver signs with a key of its own that it never shows, so no secret is shared by a fleet; its
//! router carries the pass to the sender, beside the order. The machine's own checks (sender, block,
//! generation, once) stay as they are: they keep mistakes apart, and this keeps out who only says who he is.
//!
//! A pass is kept for as long as somebody may still use it: by the router until the sender was told, or the
//! receiver let go; by the sender until its hand-off ended. What was let out of the pool before that may leave
//! later, and must not be refused, for that would cost the link: so each parcel takes its pass along.
//! A receiver keeps none. A pass that is shown again, within its hour, opens the stream to frames of a hand-off
//! that is over, and these the machine drops as it drops late ones: by their generation.

use crate::socket::SocketError;
use cleave_domain::{HandoffId, RouterId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::time::Instant;

/// Bytes of a pass: when it expires, whose sequence it is for, and the signature.
pub const PASS_BYTES: usize = 32;
/// No hand-off waits for so long; leases end those that nobody wants, in seconds. What this bounds is the
/// use of a pass that was stolen.
const PASS_LIFE: Duration = Duration::from_secs(3600);
/// Of others' passes the newest are kept: many times what one worker can have under way.
const HELD_MAX: usize = 1 << 16;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Pass(pub [u8; PASS_BYTES]);

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pass(…)")
    }
}

/// Why a pass is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PassError {
    /// This worker did not make it, or for something else.
    #[error("a pass that was not made for this")]
    Forged,
    /// It was, long ago.
    #[error("a pass that has expired")]
    Expired,
}

/// What one worker makes and holds of passes. Clones are the same.
#[derive(Clone)]
pub struct Passes(Arc<Shared>);

struct Shared {
    key: [u8; 32],
    born: Instant,
    held: Mutex<Purse>,
}

impl Passes {
    /// Of a worker that starts now, with a key that was drawn for it.
    pub fn new(key: [u8; 32]) -> Self {
        Self(Arc::new(Shared {
            key,
            born: Instant::now(),
            held: Mutex::default(),
        }))
    }

    /// For this sender, to write what this hand-off of this tenant's reserved here.
    pub fn make(&self, handoff: HandoffId, sender: WorkerRef, tenant: &str) -> Pass {
        let expires = (self.0.born.elapsed() + PASS_LIFE).as_millis();
        let expires = u64::try_from(expires).unwrap_or(u64::MAX);
        let mut pass = [0; PASS_BYTES];
        pass[..8].copy_from_slice(&expires.to_le_bytes());
        pass[8..16].copy_from_slice(&blake3::hash(tenant.as_bytes()).as_bytes()[..8]);
        let signature = self.signature(&pass, handoff, sender);
        pass[16..].copy_from_slice(&signature.as_bytes()[..16]);
        Pass(pass)
    }

    /// Whether this sender may write what this hand-off reserved.
    ///
    /// # Errors
    /// See [`PassError`].
    pub fn check(
        &self,
        handoff: HandoffId,
        sender: WorkerRef,
        Pass(pass): Pass,
    ) -> Result<(), PassError> {
        let signature = self.signature(&pass, handoff, sender);
        let is_ours = signature.as_bytes()[..16].ct_eq(&pass[16..]);
        if !bool::from(is_ours) {
            return Err(PassError::Forged);
        }
        let mut expires = [0; 8];
        expires.copy_from_slice(&pass[..8]);
        match self.0.born.elapsed().as_millis() < u128::from(u64::from_le_bytes(expires)) {
            true => Ok(()),
            false => Err(PassError::Expired),
        }
    }

    fn signature(
        &self,
        pass: &[u8; PASS_BYTES],
        handoff: HandoffId,
        sender: WorkerRef,
    ) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0.key);
        hasher.update(&pass[..16]);
        let HandoffId { flight, attempt } = handoff;
        hasher.update(&flight.0.to_le_bytes());
        hasher.update(&attempt.to_le_bytes());
        hasher.update(&sender.worker.0.to_le_bytes());
        hasher.update(&sender.incarnation.0.to_le_bytes());
        hasher.finalize()
    }

    /// This worker was given a pass for what it is about to send.
    pub fn hold(&self, handoff: HandoffId, pass: Pass) {
        let held = self.0.held.lock();
        held.unwrap_or_else(PoisonError::into_inner)
            .put(handoff, pass);
    }

    /// That hand-off ended here: what is still to be sent of it has its pass already.
    pub fn forget(&self, handoff: HandoffId) {
        let held = self.0.held.lock();
        held.unwrap_or_else(PoisonError::into_inner).take(handoff);
    }

    /// Nothing of this router's is under way any more.
    pub fn forget_router(&self, router: RouterId) {
        let held = self.0.held.lock();
        held.unwrap_or_else(PoisonError::into_inner)
            .forget_router(router);
    }

    /// How many it holds.
    pub fn held_count(&self) -> usize {
        let held = self.0.held.lock();
        held.unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The pass for a hand-off, if it was given one.
    pub(crate) fn held(&self, handoff: HandoffId) -> Option<Pass> {
        let held = self.0.held.lock();
        held.unwrap_or_else(PoisonError::into_inner).get(handoff)
    }
}

impl fmt::Debug for Passes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passes(…)")
    }
}

/// Passes on their way to whoever may use them; of those that nobody takes, the newest.
#[derive(Debug, Default)]
pub struct Purse {
    /// With when it came.
    passes: BTreeMap<HandoffId, (u64, Pass)>,
    order: BTreeMap<u64, HandoffId>,
    came_count: u64,
}

impl Purse {
    /// Keeps one, in the place of an earlier one for the same.
    pub fn put(&mut self, handoff: HandoffId, pass: Pass) {
        self.take(handoff);
        self.came_count += 1;
        self.passes.insert(handoff, (self.came_count, pass));
        self.order.insert(self.came_count, handoff);
        if self.order.len() > HELD_MAX
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.passes.remove(&oldest);
        }
    }

    /// The one for this.
    pub fn get(&self, handoff: HandoffId) -> Option<Pass> {
        self.passes.get(&handoff).map(|(_, pass)| *pass)
    }

    /// The same, which is kept no longer.
    pub fn take(&mut self, handoff: HandoffId) -> Option<Pass> {
        let (came, pass) = self.passes.remove(&handoff)?;
        self.order.remove(&came);
        Some(pass)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.passes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    fn forget_router(&mut self, router: RouterId) {
        self.passes
            .retain(|handoff, _| handoff.flight.router() != router);
        self.order
            .retain(|_, handoff| handoff.flight.router() != router);
    }
}

/// Hand-offs that either end of a stream remembers to have been shown a pass for. A sender forgets no
/// later than its receiver, and shows them again.
pub(crate) const HANDOFFS_MAX: usize = 1 << 12;

/// The hand-offs that one stream was shown a pass for.
#[derive(Debug)]
pub(crate) struct Admitted {
    /// None where nobody needs one.
    passes: Option<Passes>,
    handoffs: BTreeSet<HandoffId>,
}

impl Admitted {
    /// None yet.
    pub(crate) fn new(passes: Option<Passes>) -> Self {
        Self {
            passes,
            handoffs: BTreeSet::new(),
        }
    }

    /// The stream's sender shows a pass: what follows on it of this hand-off may be written.
    pub(crate) fn show(
        &mut self,
        sender: WorkerRef,
        (handoff, pass): (HandoffId, Pass),
    ) -> Result<(), SocketError> {
        let Some(passes) = &self.passes else {
            return Ok(());
        };
        let checked = passes.check(handoff, sender, pass);
        checked.map_err(|error| SocketError::Pass(handoff, error))?;
        if self.handoffs.len() >= HANDOFFS_MAX {
            self.handoffs.clear();
        }
        self.handoffs.insert(handoff);
        Ok(())
    }

    pub(crate) fn may_write(&self, handoff: HandoffId) -> Result<(), SocketError> {
        match self.passes.is_none() || self.handoffs.contains(&handoff) {
            true => Ok(()),
            false => Err(SocketError::Pass(handoff, PassError::Forged)),
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

    #[tokio::test(start_paused = true)]
    async fn a_pass_opened_more_than_it_was_made_for() {
        let passes = Passes::new([1; 32]);
        let pass = passes.make(handoff(7, 1), worker(3, 9), "acme");
        let check = |handoff, sender| passes.check(handoff, sender, pass);
        assert_eq!(check(handoff(7, 1), worker(3, 9)), Ok(()));
        for (handoff, sender) in [
            (handoff(8, 1), worker(3, 9)),
            (handoff(7, 2), worker(3, 9)),
            (handoff(7, 1), worker(4, 9)),
            (handoff(7, 1), worker(3, 10)),
        ] {
            assert_eq!(check(handoff, sender), Err(PassError::Forged));
        }
        // No bit of it may differ: neither its end, nor its tenant, nor its signature.
        for bit in 0..PASS_BYTES * 8 {
            let Pass(mut other) = pass;
            other[bit / 8] ^= 1 << (bit % 8);
            let checked = passes.check(handoff(7, 1), worker(3, 9), Pass(other));
            assert_eq!(checked, Err(PassError::Forged), "bit {bit}");
        }
        let elsewhere = Passes::new([2; 32]);
        let checked = elsewhere.check(handoff(7, 1), worker(3, 9), pass);
        assert_eq!(
            checked,
            Err(PassError::Forged),
            "another life has another key"
        );
        let blue = passes.make(handoff(7, 1), worker(3, 9), "blue");
        assert_ne!(blue, pass);
        tokio::time::advance(PASS_LIFE).await;
        assert_eq!(check(handoff(7, 1), worker(3, 9)), Err(PassError::Expired));
    }

    #[tokio::test]
    async fn passes_of_hand_offs_that_were_over_piled_up() {
        let passes = Passes::new([1; 32]);
        let pass = Pass([0; PASS_BYTES]);
        for flight in 0..1000 {
            passes.hold(handoff(flight, 0), pass);
            passes.hold(handoff(flight, 1), pass);
            passes.forget(handoff(flight, 0));
            // What was never there, or is no longer, is as good as forgotten.
            passes.forget(handoff(flight, 0));
            assert!(passes.held(handoff(flight, 0)).is_none());
            assert_eq!(passes.held(handoff(flight, 1)), Some(pass));
            passes.forget(handoff(flight, 1));
            assert_eq!(passes.held_count(), 0);
        }
        assert!(passes.0.held.lock().unwrap().order.is_empty());
        let of = |router| HandoffId {
            flight: FlightId::new(RouterId(router), 1),
            attempt: 0,
        };
        passes.hold(of(1), pass);
        passes.hold(of(2), pass);
        passes.forget_router(RouterId(1));
        assert_eq!(passes.held_count(), 1);
        assert_eq!(passes.held(of(2)), Some(pass));
    }

    #[test]
    fn passes_that_were_never_used_piled_up() {
        let mut purse = Purse::default();
        let pass = Pass([0; PASS_BYTES]);
        for flight in 0..HELD_MAX as u64 + 10 {
            purse.put(handoff(flight, 0), pass);
            purse.put(handoff(flight, 0), pass);
        }
        assert_eq!(purse.passes.len(), HELD_MAX);
        assert_eq!(purse.order.len(), HELD_MAX);
        assert!(purse.get(handoff(9, 0)).is_none() && purse.get(handoff(10, 0)).is_some());
    }
}
