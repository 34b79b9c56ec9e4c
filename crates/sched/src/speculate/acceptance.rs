//! How often guesses come true.
//!
//! Owns: two running counts. Never: forgets at once, or remembers for ever: what a sequence says changes.
//! Invariant: whole numbers, so that equal histories give equal shares.

/// One guess, in the parts that are counted.
const ONE: u32 = 1 << 10;
/// Guesses that a sequence's share is of, about.
const SEQUENCE_MEMORY: u32 = 32;
/// And a worker's.
const WORKER_MEMORY: u32 = 1024;
/// What is known of a worker's sequences counts in each as so many guesses.
const PRIOR: u32 = 4;

/// Guesses of one next token and those that came true, the late ones counting most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Acceptance {
    true_parts: u32,
    all_parts: u32,
}

impl Acceptance {
    pub(crate) fn of_sequence(&mut self, is_right: bool) {
        self.observe(is_right, SEQUENCE_MEMORY);
    }

    pub(crate) fn of_worker(&mut self, is_right: bool) {
        self.observe(is_right, WORKER_MEMORY);
    }

    fn observe(&mut self, is_right: bool, memory: u32) {
        for parts in [&mut self.true_parts, &mut self.all_parts] {
            *parts -= *parts / memory;
        }
        self.all_parts += ONE;
        self.true_parts += if is_right { ONE } else { 0 };
    }

    /// How likely a sequence's next guess is right, in 0..1, by its own and by the worker's.
    pub(crate) fn share(&self, worker: Self) -> f64 {
        // Before anything is known, a guess is as likely right as wrong.
        let prior = share_of(worker.true_parts + ONE, worker.all_parts + 2 * ONE);
        let known = f64::from(PRIOR * ONE);
        let right = f64::from(self.true_parts) + prior * known;
        right / (f64::from(self.all_parts) + known)
    }
}

fn share_of(part: u32, whole: u32) -> f64 {
    f64::from(part) / f64::from(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(observed: impl IntoIterator<Item = bool>) -> Acceptance {
        let mut acceptance = Acceptance::default();
        for is_right in observed {
            acceptance.of_sequence(is_right);
        }
        acceptance
    }

    #[test]
    fn a_sequence_is_believed_more_than_its_worker_once_it_is_known() {
        let nothing = Acceptance::default();
        assert!((nothing.share(nothing) - 0.5).abs() < 1e-9);
        let mut worker = Acceptance::default();
        (0..1000).for_each(|_| worker.of_worker(false));
        assert!(nothing.share(worker) < 0.01);
        assert!(after([true; 20]).share(worker) > 0.75);
        assert!(after([false; 20]).share(nothing) < 0.15);
    }

    #[test]
    fn what_changed_is_noticed_within_some_guesses() {
        let nothing = Acceptance::default();
        let turned = after([false; 500].into_iter().chain([true; 40]));
        assert!(turned.share(nothing) > 0.6, "{turned:?}");
        let back = after([true; 500].into_iter().chain([false; 40]));
        assert!(back.share(nothing) < 0.4, "{back:?}");
    }
}
