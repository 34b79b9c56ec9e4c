//! Guessing from a sequence's own tokens: what followed the last ones where they were before.
//!
//! Owns: where runs of tokens are in a sequence. Never: sees another sequence's tokens, or forgets one of its own.
//! Invariant: a guess is a function of the tokens and the bounds alone, whatever was asked before; a token costs
//! eight to twelve bytes, and each step its new tokens and a bounded search.
//!
//! This is prompt lookup (Saxena, Prompt Lookup Decoding, 2023; `ngram` in vLLM), and the search is that of hash
//! chains (Deutsch, RFC 1951, section 4): of each run of [`Lookup::match_min`] tokens the last place is known, and of
//! each place the one before it.

use super::{Guess, Lookup};
use cleave_domain::TokenId;

/// Earlier places of the same tokens that are looked at for one guess.
const PLACES_MAX: usize = 32;
/// Places in the table of a new index; it grows with the tokens.
const TABLE_LEAST: usize = 64;

/// Where a sequence's runs of tokens are. Empty until the first guess.
#[derive(Clone, Debug, Default)]
pub(crate) struct Index {
    /// By hash of a run the end of its last place, 0 for none; a power of two.
    last: Vec<u32>,
    /// By end of a run the end of the place before it of equal hash, 0 for none; `(tokens indexed + 1)`.
    before: Vec<u32>,
}

/// A guess for sequences of these bounds.
pub(crate) struct Looking<'a> {
    pub(crate) index: &'a mut Index,
    pub(crate) bounds: Lookup,
}

impl Guess for Looking<'_> {
    fn guess(&mut self, tokens: &[TokenId], most: usize) -> Vec<TokenId> {
        let Lookup {
            match_min,
            match_max,
            ..
        } = self.bounds;
        let (least, longest) = (match_min as usize, match_max as usize);
        self.index.extend(tokens, least);
        let mut found = None;
        let mut reached = 0;
        for end in self.index.places(tokens, least).take(PLACES_MAX) {
            let matched = matched(tokens, end, longest);
            if matched >= least && matched > reached {
                (found, reached) = (Some(end), matched);
            }
            if reached == longest {
                break;
            }
        }
        let Some(end) = found else {
            return Vec::new();
        };
        // Where a run follows itself, what follows it is not all there yet: it goes round.
        let (follows, round) = (&tokens[end..], tokens.len() - end);
        (0..most).map(|place| follows[place % round]).collect()
    }
}

impl Index {
    /// Takes in the tokens that it does not know. They follow those that it knows.
    fn extend(&mut self, tokens: &[TokenId], least: usize) {
        if tokens.len() > self.last.len() {
            let places = tokens.len().max(TABLE_LEAST).next_power_of_two();
            self.last = vec![0; places];
            self.before.clear();
        }
        if self.before.is_empty() {
            self.before.push(0);
        }
        for end in self.before.len()..=tokens.len() {
            let earlier = match run(tokens, end, least) {
                Some(run) => {
                    let slot = self.slot(run);
                    let end = u32::try_from(end).expect("a sequence fits the context");
                    std::mem::replace(&mut self.last[slot], end)
                }
                None => 0,
            };
            self.before.push(earlier);
        }
    }

    /// Ends of earlier places whose run hashes like the last one, the latest first.
    fn places<'a>(&'a self, tokens: &[TokenId], least: usize) -> impl Iterator<Item = usize> + 'a {
        let known = run(tokens, tokens.len(), least).is_some();
        let mut end = match known {
            true => tokens.len(),
            false => 0,
        };
        std::iter::from_fn(move || {
            end = self.before[end] as usize;
            (end > 0).then_some(end)
        })
    }

    fn slot(&self, run: &[TokenId]) -> usize {
        let mix = |hash: u64, token: &TokenId| {
            (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        let hash = run.iter().fold(0, mix);
        (hash >> 32) as usize & (self.last.len() - 1)
    }
}

/// The last `least` of the first `end` tokens.
fn run(tokens: &[TokenId], end: usize, least: usize) -> Option<&[TokenId]> {
    tokens.get(end.checked_sub(least)?..end)
}

/// How many tokens before `end` are the last ones of all, `longest` at most.
fn matched(tokens: &[TokenId], end: usize, longest: usize) -> usize {
    let earlier = tokens[..end].iter().rev();
    let last = tokens.iter().rev();
    let equal = earlier.zip(last).take(longest);
    equal.take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOUNDS: Lookup = Lookup {
        drafts_max: 4,
        match_max: 4,
        match_min: 2,
    };

    fn guess(index: &mut Index, tokens: &[TokenId]) -> Vec<TokenId> {
        let bounds = BOUNDS;
        Looking { index, bounds }.guess(tokens, 4)
    }

    fn fresh(tokens: &[TokenId]) -> Vec<TokenId> {
        guess(&mut Index::default(), tokens)
    }

    /// By looking everywhere.
    fn by_hand(tokens: &[TokenId]) -> Vec<TokenId> {
        for matched in (2..=4).rev() {
            for end in (matched..tokens.len()).rev() {
                if tokens.len() > matched
                    && tokens[..end].ends_with(&tokens[tokens.len() - matched..])
                {
                    let follows = tokens[end..].iter().cycle();
                    return follows.take(4).copied().collect();
                }
            }
        }
        Vec::new()
    }

    #[test]
    fn what_followed_the_last_tokens_follows_again() {
        assert_eq!(fresh(&[1, 2, 3, 4, 5, 6, 9, 2, 3]), [4, 5, 6, 9]);
        assert!(
            fresh(&[1, 2, 3, 4, 5, 9, 3]).is_empty(),
            "one token is no run"
        );
        assert!(fresh(&[]).is_empty());
        assert!(fresh(&[7]).is_empty());
    }

    #[test]
    fn the_longest_run_counts_and_of_equal_ones_the_last() {
        assert_eq!(fresh(&[1, 2, 3, 40, 8, 2, 3, 50, 1, 2, 3])[0], 40);
        assert_eq!(fresh(&[2, 3, 40, 8, 2, 3, 50, 7, 2, 3])[0], 50);
    }

    #[test]
    fn a_run_that_follows_itself_goes_round() {
        assert_eq!(fresh(&[5, 5, 5]), [5, 5, 5, 5]);
        assert_eq!(fresh(&[9, 1, 2, 3, 1, 2, 3]), [1, 2, 3, 1]);
    }

    proptest! {
        /// Whatever it was asked before, and however the tokens came.
        #[test]
        fn a_guess_is_what_looking_everywhere_finds(
            tokens in proptest::collection::vec(0..4_u32, 0..40),
            cuts in proptest::collection::vec(0..40_usize, 0..6),
        ) {
            let mut index = Index::default();
            let mut cuts = cuts;
            cuts.sort_unstable();
            for cut in cuts.into_iter().filter(|cut| *cut <= tokens.len()) {
                prop_assert_eq!(guess(&mut index, &tokens[..cut]), by_hand(&tokens[..cut]));
            }
            prop_assert_eq!(guess(&mut index, &tokens), by_hand(&tokens));
        }
    }
}
