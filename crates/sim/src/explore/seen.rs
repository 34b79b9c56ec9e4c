//! Which states were seen.
//!
//! Owns: a set of fingerprints in one flat array, nine bytes for each place, and with each the most
//! surprises that were left when its state was met. Never: keeps a state.
//! Invariant: a state is worth another look only if more may still happen than before.

/// Open addressing, linear probing; 0 marks an empty place.
#[derive(Debug)]
pub(super) struct Seen {
    prints: Vec<u64>,
    left: Vec<u8>,
    pub(super) count: u64,
}

/// What is known of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Never met.
    New,
    /// Met with fewer surprises left.
    Again,
    /// Nothing new can come of it.
    Known,
}

impl Seen {
    pub(super) fn new() -> Self {
        let places = 1 << 16;
        Self {
            prints: vec![0; places],
            left: vec![0; places],
            count: 0,
        }
    }

    /// Notes a state with so many surprises left.
    pub(super) fn look(&mut self, print: u64, left: u8) -> Look {
        if self.count * 10 > self.prints.len() as u64 * 7 {
            self.grow();
        }
        let print = print.max(1);
        let at = self.place(print);
        if self.prints[at] == 0 {
            self.prints[at] = print;
            self.left[at] = left;
            self.count += 1;
            return Look::New;
        }
        if self.left[at] >= left {
            return Look::Known;
        }
        self.left[at] = left;
        Look::Again
    }

    fn place(&self, print: u64) -> usize {
        let mask = self.prints.len() - 1;
        let mut at = print as usize & mask;
        while self.prints[at] != 0 && self.prints[at] != print {
            at = (at + 1) & mask;
        }
        at
    }

    fn grow(&mut self) {
        let places = self.prints.len() * 2;
        let prints = std::mem::replace(&mut self.prints, vec![0; places]);
        let left = std::mem::replace(&mut self.left, vec![0; places]);
        for (print, left) in prints.into_iter().zip(left) {
            if print != 0 {
                let at = self.place(print);
                self.prints[at] = print;
                self.left[at] = left;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Look, Seen};
    use crate::dice::mix;

    #[test]
    fn a_state_is_looked_at_again_only_with_more_left() {
        let mut seen = Seen::new();
        for n in 0..200_000 {
            assert_eq!(seen.look(mix(n), 1), Look::New);
        }
        assert_eq!(seen.count, 200_000);
        for n in 0..200_000 {
            assert_eq!(seen.look(mix(n), 1), Look::Known);
            assert_eq!(seen.look(mix(n), 2), Look::Again);
            assert_eq!(seen.look(mix(n), 1), Look::Known);
        }
        assert_eq!(seen.count, 200_000);
    }
}
