//! Drafts from a sequence's own tokens: those that followed the last ones at an earlier place.
//!
//! Owns: the places of token runs in a sequence. Never: sees another sequence's tokens, or forgets
//! one of its own.
//! Invariant: a draft is a function of the tokens and the limits alone, whatever was asked before;
//! a token costs eight to twelve bytes, and each step its new tokens and a bounded search.
//!
//! This is prompt lookup (Saxena, Prompt Lookup Decoding, 2023; `ngram` in vLLM), and the search is
//! that of hash chains (Deutsch, RFC 1951, section 4): the last place of each run of
//! [`LookupLimits::match_min`] tokens is known, and for each place the one before it.

use super::{DraftSource, LookupLimits};
use cleave_domain::TokenId;

/// Earlier places of the same tokens that are compared for one draft.
const PLACES_MAX: usize = 32;
/// Size of a new index's table; it grows with the tokens.
const TABLE_LEAST: usize = 64;

/// Places of a sequence's token runs. Empty until the first draft.
#[derive(Clone, Debug, Default)]
pub(crate) struct NgramIndex {
    /// For each hash of a run the end of its last place, 0 for none; the length is a power of two.
    last: Vec<u32>,
    /// For each end of a run the end of the place before it with equal hash, 0 for none; `(tokens
    /// indexed + 1)`.
    before: Vec<u32>,
}

/// A draft source with its index and limits.
pub(crate) struct PromptLookup<'a> {
    pub(crate) index: &'a mut NgramIndex,
    pub(crate) bounds: LookupLimits,
}

impl DraftSource for PromptLookup<'_> {
    fn draft(&mut self, tokens: &[TokenId], most: usize) -> Vec<TokenId> {
        let LookupLimits {
            match_min,
            match_max,
            ..
        } = self.bounds;
        let (least, longest) = (match_min as usize, match_max as usize);
        self.index.extend(tokens, least);
        // The longest match wins; of equal ones the latest, since places come latest first.
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
        // A run that overlaps its own continuation repeats: the continuation is not all there yet.
        let (follows, round) = (&tokens[end..], tokens.len() - end);
        (0..most).map(|place| follows[place % round]).collect()
    }
}

impl NgramIndex {
    /// Adds the tokens that it does not know. They follow those that it knows.
    fn extend(&mut self, tokens: &[TokenId], least: usize) {
        // Rebuilding at each doubling keeps the cost per token constant.
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

    /// Ends of earlier places whose run has the hash of the last one, the latest first.
    fn places<'a>(&'a self, tokens: &[TokenId], least: usize) -> impl Iterator<Item = usize> + 'a {
        let is_found = run(tokens, tokens.len(), least).is_some();
        let mut end = if is_found { tokens.len() } else { 0 };
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

/// How many tokens before `end` equal the last tokens of all, `longest` at most.
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

    const BOUNDS: LookupLimits = LookupLimits {
        drafts_max: 4,
        match_max: 4,
        match_min: 2,
    };

    fn guess(index: &mut NgramIndex, tokens: &[TokenId]) -> Vec<TokenId> {
        let bounds = BOUNDS;
        PromptLookup { index, bounds }.draft(tokens, 4)
    }

    fn fresh(tokens: &[TokenId]) -> Vec<TokenId> {
        guess(&mut NgramIndex::default(), tokens)
    }

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
    fn drafts_repeat_what_followed_the_same_tokens() {
        assert_eq!(fresh(&[1, 2, 3, 4, 5, 6, 9, 2, 3]), [4, 5, 6, 9]);
        assert!(
            fresh(&[1, 2, 3, 4, 5, 9, 3]).is_empty(),
            "one token is no run"
        );
        assert!(fresh(&[]).is_empty());
        assert!(fresh(&[7]).is_empty());
    }

    #[test]
    fn the_longest_then_latest_match_wins() {
        assert_eq!(fresh(&[1, 2, 3, 40, 8, 2, 3, 50, 1, 2, 3])[0], 40);
        assert_eq!(fresh(&[2, 3, 40, 8, 2, 3, 50, 7, 2, 3])[0], 50);
    }

    #[test]
    fn a_self_overlapping_match_repeats() {
        assert_eq!(fresh(&[5, 5, 5]), [5, 5, 5, 5]);
        assert_eq!(fresh(&[9, 1, 2, 3, 1, 2, 3]), [1, 2, 3, 1]);
    }

    proptest! {
        /// Independent of earlier calls, and of the pieces in which the tokens came.
        #[test]
        fn the_index_finds_what_a_full_search_finds(
            tokens in proptest::collection::vec(0..4_u32, 0..40),
            cuts in proptest::collection::vec(0..40_usize, 0..6),
        ) {
            let mut index = NgramIndex::default();
            let mut cuts = cuts;
            cuts.sort_unstable();
            for cut in cuts.into_iter().filter(|cut| *cut <= tokens.len()) {
                prop_assert_eq!(guess(&mut index, &tokens[..cut]), by_hand(&tokens[..cut]));
            }
            prop_assert_eq!(guess(&mut index, &tokens), by_hand(&tokens));
        }
    }
}
