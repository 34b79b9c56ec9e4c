//! The set of visited states.
//!
//! Owns: fingerprints in one flat array, nine bytes a slot, each with the most surprises that were
//! left at a visit. Never: keeps a state. Invariant: a state is visited again only with more
//! surprises left than before.

/// Open addressing with linear probing; 0 marks an empty slot.
#[derive(Debug)]
pub(super) struct VisitedStates {
    hashes: Vec<u64>,
    surprises_left: Vec<u8>,
    pub(super) count: u64,
}

/// The result of recording a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VisitOutcome {
    /// The state is new.
    New,
    /// Visited before, with fewer surprises left.
    Revisit,
    /// Visited before with as many; nothing new follows.
    Known,
}

impl VisitedStates {
    pub(super) fn new() -> Self {
        let places = 1 << 16;
        Self {
            hashes: vec![0; places],
            surprises_left: vec![0; places],
            count: 0,
        }
    }

    /// Records a state with this many surprises left.
    pub(super) fn record(&mut self, print: u64, left: u8) -> VisitOutcome {
        if self.count * 10 > self.hashes.len() as u64 * 7 {
            self.grow();
        }
        let print = print.max(1);
        let at = self.slot_of(print);
        if self.hashes[at] == 0 {
            self.hashes[at] = print;
            self.surprises_left[at] = left;
            self.count += 1;
            return VisitOutcome::New;
        }
        if self.surprises_left[at] >= left {
            return VisitOutcome::Known;
        }
        self.surprises_left[at] = left;
        VisitOutcome::Revisit
    }

    fn slot_of(&self, print: u64) -> usize {
        let mask = self.hashes.len() - 1;
        let mut at = print as usize & mask;
        while self.hashes[at] != 0 && self.hashes[at] != print {
            at = (at + 1) & mask;
        }
        at
    }

    fn grow(&mut self) {
        let places = self.hashes.len() * 2;
        let prints = std::mem::replace(&mut self.hashes, vec![0; places]);
        let left = std::mem::replace(&mut self.surprises_left, vec![0; places]);
        for (print, left) in prints.into_iter().zip(left) {
            if print != 0 {
                let at = self.slot_of(print);
                self.hashes[at] = print;
                self.surprises_left[at] = left;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{VisitOutcome, VisitedStates};
    use cleave_domain::SplitMix64;

    #[test]
    fn a_state_is_revisited_only_with_more_surprises_left() {
        let mut visited = VisitedStates::new();
        for n in 0..200_000 {
            assert_eq!(
                visited.record(SplitMix64::finalize(n), 1),
                VisitOutcome::New
            );
        }
        assert_eq!(visited.count, 200_000);
        for n in 0..200_000 {
            assert_eq!(
                visited.record(SplitMix64::finalize(n), 1),
                VisitOutcome::Known
            );
            assert_eq!(
                visited.record(SplitMix64::finalize(n), 2),
                VisitOutcome::Revisit
            );
            assert_eq!(
                visited.record(SplitMix64::finalize(n), 1),
                VisitOutcome::Known
            );
        }
        assert_eq!(visited.count, 200_000);
    }
}
