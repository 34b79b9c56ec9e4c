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

/// The source of a draft, on which its acceptance depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum DraftKind {
    /// Found among the sequence's own tokens.
    #[default]
    Guessed,
    /// The constraint leaves one text, which the model may divide into other tokens.
    Forced,
}

impl DraftKind {
    /// Share of accepted drafts without any history, in units of [`ONE`].
    fn share_expected(self) -> u32 {
        match self {
            Self::Guessed => ONE / 2,
            Self::Forced => ONE - ONE / 10,
        }
    }
}

/// Drafts of a next token and accepted ones among them, of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct DraftAcceptance {
    guessed: AcceptedShare,
    forced: AcceptedShare,
}

/// Drafts and accepted ones among them, recent ones weighing most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct AcceptedShare {
    true_parts: u32,
    all_parts: u32,
}

impl DraftAcceptance {
    pub(crate) fn observe_for_sequence(&mut self, kind: DraftKind, is_right: bool) {
        self.of_kind(kind).observe(is_right, SEQUENCE_MEMORY);
    }

    pub(crate) fn observe_for_worker(&mut self, kind: DraftKind, is_right: bool) {
        self.of_kind(kind).observe(is_right, WORKER_MEMORY);
    }

    /// Probability that a sequence's next draft is accepted, in 0..1, from its own and the worker's
    /// history of such drafts.
    pub(crate) fn probability(mut self, kind: DraftKind, mut worker: Self) -> f64 {
        let (own, worker) = (*self.of_kind(kind), *worker.of_kind(kind));
        let expected = 2 * kind.share_expected();
        let prior = share_of(worker.true_parts + expected, worker.all_parts + 2 * ONE);
        let prior_weight = f64::from(PRIOR * ONE);
        let right = f64::from(own.true_parts) + prior * prior_weight;
        right / (f64::from(own.all_parts) + prior_weight)
    }

    fn of_kind(&mut self, kind: DraftKind) -> &mut AcceptedShare {
        match kind {
            DraftKind::Guessed => &mut self.guessed,
            DraftKind::Forced => &mut self.forced,
        }
    }
}

impl AcceptedShare {
    fn observe(&mut self, is_right: bool, memory: u32) {
        for parts in [&mut self.true_parts, &mut self.all_parts] {
            *parts -= *parts / memory;
        }
        self.all_parts += ONE;
        self.true_parts += if is_right { ONE } else { 0 };
    }
}

fn share_of(part: u32, whole: u32) -> f64 {
    f64::from(part) / f64::from(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: DraftAcceptance = DraftAcceptance {
        guessed: AcceptedShare {
            true_parts: 0,
            all_parts: 0,
        },
        forced: AcceptedShare {
            true_parts: 0,
            all_parts: 0,
        },
    };

    fn after(kind: DraftKind, observed: impl IntoIterator<Item = bool>) -> DraftAcceptance {
        let mut acceptance = NOTHING;
        for is_right in observed {
            acceptance.observe_for_sequence(kind, is_right);
        }
        acceptance
    }

    #[test]
    fn own_history_outweighs_the_workers_after_some_drafts() {
        for (kind, expected) in [(DraftKind::Guessed, 0.5), (DraftKind::Forced, 0.9)] {
            assert!((NOTHING.probability(kind, NOTHING) - expected).abs() < 1e-2);
            let mut worker = NOTHING;
            (0..1000).for_each(|_| worker.observe_for_worker(kind, false));
            assert!(NOTHING.probability(kind, worker) < 0.01);
            assert!(after(kind, [true; 20]).probability(kind, worker) > 0.75);
            assert!(after(kind, [false; 20]).probability(kind, NOTHING) < 0.2);
        }
    }

    #[test]
    fn acceptance_follows_a_change_within_forty_drafts() {
        let kind = DraftKind::Guessed;
        let turned = after(kind, [false; 500].into_iter().chain([true; 40]));
        assert!(turned.probability(kind, NOTHING) > 0.6, "{turned:?}");
        let back = after(kind, [true; 500].into_iter().chain([false; 40]));
        assert!(back.probability(kind, NOTHING) < 0.4, "{back:?}");
    }

    #[test]
    fn kinds_of_drafts_have_histories_of_their_own() {
        let (guessed, forced) = (DraftKind::Guessed, DraftKind::Forced);
        let wrong = after(forced, [false; 100]);
        assert_eq!(
            wrong.probability(guessed, NOTHING),
            NOTHING.probability(guessed, NOTHING)
        );
        assert_eq!(
            NOTHING.probability(guessed, wrong),
            NOTHING.probability(guessed, NOTHING)
        );
        assert!(wrong.probability(forced, NOTHING) < 0.15);
    }
}
