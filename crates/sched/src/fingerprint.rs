//! Fingerprints of a brain's state, for model checking.
//!
//! Owns: the choice of state that decides the future, in a form that does not depend on how it came
//! about. Never: hashes a statistic, or a number that only counts.
//! Invariant: two brains with equal limits and equal fingerprints give the same outputs for the
//! same facts after the same spans, except for times in notes and in hints when to come back.

use crate::machines::WorkerMachines;
use std::hash::{Hash, Hasher};

impl WorkerMachines {
    /// Hashes the state; see [`crate::WorkerBrain::fingerprint`].
    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            context,
            sequences,
            memory,
            peers,
            steps,
            forecast,
            acceptance,
            reports,
            pressure,
        } = self;
        let (limits, now) = (context.limits(), context.now());
        assert!(
            !context.has_outputs(),
            "poll every output before taking a fingerprint"
        );
        (limits.me, limits.role).hash(hasher);
        reports.hash_drain(hasher);
        memory.hash_pools(hasher);
        memory.hash_tiers(now, hasher);
        sequences.fingerprint(now, forecast, hasher);
        peers.hash_moves(hasher);
        let leases = sequences.leases(now).chain(peers.stalls(now));
        for left in leases.chain(memory.fetches(now)) {
            left.hash(hasher);
        }
        peers.hash_resends(now, hasher);
        steps.fingerprint(now, limits.step_max, hasher);
        if let Some(requested) = pressure.last(now) {
            requested.hash(hasher);
        }
        (reports.routers(), peers.fenced(), memory.swap_prices()).hash(hasher);
        context.has_changed().hash(hasher);
        (forecast.prices(), forecast.fingerprint(), acceptance).hash(hasher);
        if forecast.has_prices() {
            reports.turn(now).hash(hasher);
            steps.turn(now).hash(hasher);
        }
        reports.load_reported().hash(hasher);
    }
}
