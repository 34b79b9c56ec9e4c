//! The lexers of a grammar's sequences.
//!
//! Owns: how many there are, and which sequence has which. A lexer is nearly all of a compiled
//! grammar's memory, and it grows with the texts that it reads.
//! Never: runs one.
//! Invariant: the lexers of a grammar begin with no more memory together than [`BYTES_MAX`], unless
//! there is one alone; a lexer without sequences is dropped.

use llguidance::Matcher;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Limit of the memory of a grammar's lexers, in bytes: hundreds for a usual schema, so that
/// threads that find masks rarely wait for each other; one for the largest.
const BYTES_MAX: usize = 64 << 20;

/// The lexers of one grammar. A lexer belongs to a matcher of no output, whose clones share it.
pub(crate) struct SequenceLexers {
    count_max: usize,
    in_use: Mutex<Vec<Weak<Matcher>>>,
}

impl SequenceLexers {
    /// Lexers that begin with so many bytes each.
    pub(crate) fn new(bytes: usize) -> Self {
        Self {
            count_max: (BYTES_MAX / bytes.max(1)).max(1),
            in_use: Mutex::default(),
        }
    }

    /// The lexer of another sequence: a new one below the limit, or the one with the fewest.
    pub(crate) fn take(&self, start: &Matcher) -> Arc<Matcher> {
        // No update of the list can be cut off by a panic.
        let in_use = self.in_use.lock();
        let mut in_use = in_use.unwrap_or_else(PoisonError::into_inner);
        in_use.retain(|lexer| lexer.strong_count() > 0);
        if in_use.len() >= self.count_max {
            let shared = in_use.iter().filter_map(Weak::upgrade);
            if let Some(lexer) = shared.min_by_key(Arc::strong_count) {
                return lexer;
            }
        }
        let lexer = Arc::new(start.deep_clone());
        in_use.push(Arc::downgrade(&lexer));
        lexer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Matcher {
        Matcher::new(Err(std::io::Error::other("it is not read").into()))
    }

    #[test]
    fn lexers_beyond_the_limit_are_shared_evenly() {
        let (lexers, start) = (SequenceLexers::new(BYTES_MAX / 3), start());
        let taken: Vec<Arc<Matcher>> = (0..7).map(|_| lexers.take(&start)).collect();
        let is_same = |a: usize, b: usize| Arc::ptr_eq(&taken[a], &taken[b]);
        assert!(!is_same(0, 1) && !is_same(1, 2) && !is_same(0, 2));
        let mut counts: Vec<usize> = taken[..3].iter().map(Arc::strong_count).collect();
        counts.sort_unstable();
        assert_eq!(counts, [2, 2, 3]);
        // Lexers of sequences that ended make room.
        drop(taken);
        let new = lexers.take(&start);
        assert_eq!(Arc::strong_count(&new), 1);
        assert_eq!(lexers.in_use.lock().unwrap().len(), 1);
    }

    #[test]
    fn the_largest_grammar_has_one_lexer() {
        let (lexers, start) = (SequenceLexers::new(BYTES_MAX + 1), start());
        let first = lexers.take(&start);
        assert!(Arc::ptr_eq(&first, &lexers.take(&start)));
    }
}
