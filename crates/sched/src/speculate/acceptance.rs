//! How often drafts are accepted.
//!
//! Owns: two decaying counts. Never: forgets at once, or remembers for ever: the share changes as a
//! sequence goes on.
//! Invariant: integers only, so that equal histories give equal shares.

/// One draft, in the units that are counted.
const ONE: u32 = 1 << 10;
/// Number of recent drafts over which a sequence's share is formed, approximately.
const SEQUENCE_MEMORY: u32 = 32;
const WORKER_MEMORY: u32 = 1024;
/// The worker's share counts in each sequence's as this many drafts.
const PRIOR: u32 = 4;

/// Drafts of a next token and accepted ones among them, recent ones weighing most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct DraftAcceptance {
    true_parts: u32,
    all_parts: u32,
}

impl DraftAcceptance {
    pub(crate) fn observe_for_sequence(&mut self, is_right: bool) {
        self.observe(is_right, SEQUENCE_MEMORY);
    }

    pub(crate) fn observe_for_worker(&mut self, is_right: bool) {
        self.observe(is_right, WORKER_MEMORY);
    }

    fn observe(&mut self, is_right: bool, memory: u32) {
        for parts in [&mut self.true_parts, &mut self.all_parts] {
            *parts -= *parts / memory;
        }
        self.all_parts += ONE;
        self.true_parts += if is_right { ONE } else { 0 };
    }

    /// Probability that a sequence's next draft is accepted, in 0..1, from its own and the worker's
    /// history.
    pub(crate) fn probability(&self, worker: Self) -> f64 {
        // Without any history, a draft is as likely accepted as not.
        let prior = share_of(worker.true_parts + ONE, worker.all_parts + 2 * ONE);
        let prior_weight = f64::from(PRIOR * ONE);
        let right = f64::from(self.true_parts) + prior * prior_weight;
        right / (f64::from(self.all_parts) + prior_weight)
    }
}

fn share_of(part: u32, whole: u32) -> f64 {
    f64::from(part) / f64::from(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(observed: impl IntoIterator<Item = bool>) -> DraftAcceptance {
        let mut acceptance = DraftAcceptance::default();
        for is_right in observed {
            acceptance.observe_for_sequence(is_right);
        }
        acceptance
    }

    #[test]
    fn own_history_outweighs_the_workers_after_some_drafts() {
        let nothing = DraftAcceptance::default();
        assert!((nothing.probability(nothing) - 0.5).abs() < 1e-9);
        let mut worker = DraftAcceptance::default();
        (0..1000).for_each(|_| worker.observe_for_worker(false));
        assert!(nothing.probability(worker) < 0.01);
        assert!(after([true; 20]).probability(worker) > 0.75);
        assert!(after([false; 20]).probability(nothing) < 0.15);
    }

    #[test]
    fn acceptance_follows_a_change_within_forty_drafts() {
        let nothing = DraftAcceptance::default();
        let turned = after([false; 500].into_iter().chain([true; 40]));
        assert!(turned.probability(nothing) > 0.6, "{turned:?}");
        let back = after([true; 500].into_iter().chain([false; 40]));
        assert!(back.probability(nothing) < 0.4, "{back:?}");
    }
}
