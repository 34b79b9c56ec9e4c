//! Content of prompts, and their text or token ids.
//!
//! Owns: prompts as parts, and writing them. Never: knows a server. Invariant: prompts with equal
//! leading parts have equal leading tokens, to the end of those parts; parts of other keys have
//! other contents.

use cleave_domain::SplitMix64;

/// A run of tokens that is equal wherever its key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PromptPart {
    /// Identifies the content. A shorter part of the same key is its beginning.
    pub(crate) key: u64,
    /// Number of tokens; at least 1.
    pub(crate) tokens: u32,
}

/// A prompt as parts, before it is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptPlan(pub(crate) Vec<PromptPart>);

impl PromptPlan {
    /// A prompt that shares nothing with others.
    pub(crate) fn unique(key: u64, tokens: u32) -> Self {
        Self(vec![PromptPart { key, tokens }])
    }

    pub(crate) fn tokens(&self) -> u32 {
        self.0.iter().map(|part| part.tokens).sum()
    }

    /// The same parts scaled by `factor` and cut off after `tokens_max`; at least one token. Ends
    /// of parts are scaled, not lengths, so that equal prefixes stay equal.
    pub(crate) fn scaled(&self, factor: f64, tokens_max: u32) -> Self {
        let mut parts = Vec::with_capacity(self.0.len());
        let (mut end, mut scaled_end) = (0_u64, 0_u32);
        for part in &self.0 {
            end += u64::from(part.tokens);
            let to = ((end as f64 * factor).round() as u32).min(tokens_max);
            if to > scaled_end {
                let tokens = to - scaled_end;
                parts.push(PromptPart { tokens, ..*part });
                scaled_end = to;
            }
        }
        match (parts.is_empty(), self.0.first()) {
            (true, Some(first)) => Self::unique(first.key, 1),
            _ => Self(parts),
        }
    }
}

/// The key of content that only one request has. Keys of shared content have another highest bit,
/// so the two never collide.
pub(crate) fn unique_key(request_index: u64) -> u64 {
    SplitMix64::hash(request_index) | 1 << 63
}

/// The key of a trace's block `id`, or of a class's shared prefix `id`.
pub(crate) fn shared_key(class: u32, id: u64) -> u64 {
    SplitMix64::hash(id ^ SplitMix64::hash(u64::from(class))) & !(1 << 63)
}

/// A word with the blank before it, and its number of tokens on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CountedWord {
    pub(crate) text: String,
    pub(crate) tokens: u32,
}

/// The token ids or words that prompts are written with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PromptVocabulary {
    /// Token ids from `first` to before `end`; never empty.
    IdRange { first: u32, end: u32 },
    /// These token ids; never empty.
    IdList(Vec<u32>),
    /// These words, fewest tokens first; `overhead` tokens are added by the server (begin token,
    /// chat template).
    Words {
        words: Vec<CountedWord>,
        overhead: u32,
    },
}

impl PromptVocabulary {
    /// Appends the prompt as a JSON value: an array of numbers or a string. `salt` makes the
    /// contents differ from run to run, so that no run finds another's prompts in the server's
    /// cache.
    pub(crate) fn write(&self, prompt: &PromptPlan, salt: u64, out: &mut Vec<u8>) {
        match self {
            Self::IdRange { first, end } => {
                let span = u64::from(end - first);
                write_ids(prompt, salt, out, |draw| first + scale_below(draw, span));
            }
            Self::IdList(ids) => {
                let count = ids.len() as u64;
                write_ids(prompt, salt, out, |draw| {
                    ids[scale_below(draw, count) as usize]
                });
            }
            Self::Words { words, overhead } => write_text(words, *overhead, prompt, salt, out),
        }
    }
}

/// The `at`-th random number of a part's content.
fn token_draw(key: u64, salt: u64, at: u32) -> u64 {
    SplitMix64::nth(SplitMix64::hash(key ^ salt), u64::from(at) + 1)
}

/// Scales 64 random bits to a number below `count`.
fn scale_below(draw: u64, count: u64) -> u32 {
    ((u128::from(draw) * u128::from(count)) >> 64) as u32
}

fn write_ids(prompt: &PromptPlan, salt: u64, out: &mut Vec<u8>, id_of: impl Fn(u64) -> u32) {
    let mut before = b'[';
    for part in &prompt.0 {
        for at in 0..part.tokens {
            out.push(before);
            before = b',';
            write_number(id_of(token_draw(part.key, salt, at)), out);
        }
    }
    if before == b'[' {
        out.push(before);
    }
    out.push(b']');
}

/// Writes a decimal number. Prompts have hundreds of thousands of them, and this dominates the time
/// to build a body.
fn write_number(mut number: u32, out: &mut Vec<u8>) {
    let mut digits = [0_u8; 10];
    let mut from = digits.len();
    loop {
        from -= 1;
        digits[from] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[from..]);
}

/// Writes words up to each part's end; near the end only words that still fit are drawn.
fn write_text(
    words: &[CountedWord],
    overhead: u32,
    prompt: &PromptPlan,
    salt: u64,
    out: &mut Vec<u8>,
) {
    let budget = prompt.tokens().saturating_sub(overhead).max(1);
    let (mut end, mut written) = (0, 0);
    out.push(b'"');
    for part in &prompt.0 {
        end = (end + part.tokens).min(budget);
        let mut at = 0;
        while written < end {
            let tokens_left = end - written;
            // Words are sorted by tokens, so those that fit are a prefix of the list.
            let fitting = words.partition_point(|word| word.tokens <= tokens_left);
            // No word fits: the next part begins a little early, in the same way for all prompts
            // that share this one.
            if fitting == 0 && written > 0 {
                break;
            }
            let pick = scale_below(token_draw(part.key, salt, at), fitting.max(1) as u64);
            let word = &words[pick as usize];
            out.extend_from_slice(word.text.as_bytes());
            written += word.tokens;
            at += 1;
        }
    }
    out.push(b'"');
}

/// The salt of one run's prompts.
pub(crate) fn run_salt(seed: u64, run_index: u32) -> u64 {
    SplitMix64::hash(SplitMix64::hash(seed) ^ u64::from(run_index))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RANGE: PromptVocabulary = PromptVocabulary::IdRange {
        first: 256,
        end: 30_000,
    };

    fn ids(alphabet: &PromptVocabulary, prompt: &PromptPlan, salt: u64) -> Vec<u32> {
        let mut out = Vec::new();
        alphabet.write(prompt, salt, &mut out);
        serde_json::from_slice(&out).unwrap()
    }

    fn text(alphabet: &PromptVocabulary, prompt: &PromptPlan) -> String {
        let mut out = Vec::new();
        alphabet.write(prompt, 0, &mut out);
        serde_json::from_slice(&out).unwrap()
    }

    fn words() -> PromptVocabulary {
        let word = |text: &str, tokens| CountedWord {
            text: text.into(),
            tokens,
        };
        PromptVocabulary::Words {
            words: vec![
                word(" a", 1),
                word(" the", 1),
                word(" slice", 2),
                word(" vector", 3),
            ],
            overhead: 4,
        }
    }

    fn count(text: &str) -> u32 {
        let tokens = |word: &str| match word {
            "a" | "the" => 1,
            "slice" => 2,
            "vector" => 3,
            other => panic!("{other}"),
        };
        text.split_whitespace().map(tokens).sum()
    }

    fn parts() -> impl Strategy<Value = PromptPlan> {
        let part = (0_u64..50, 1_u32..700).prop_map(|(key, tokens)| PromptPart { key, tokens });
        proptest::collection::vec(part, 1..6).prop_map(PromptPlan)
    }

    proptest! {
        #[test]
        fn only_equal_parts_give_equal_tokens(
            shared in parts(), scale in 0.01_f64..2.0, one in 60_u64..80, other in 90_u64..110,
        ) {
            let with = |key| {
                let mut prompt = shared.clone();
                prompt.0.push(PromptPart { key, tokens: 400 });
                prompt.scaled(scale, u32::MAX)
            };
            let prefix = shared.scaled(scale, u32::MAX);
            let (left, right) = (ids(&RANGE, &with(one), 9), ids(&RANGE, &with(other), 9));
            prop_assert_eq!(left.len() as u32, with(one).tokens());
            let shared_tokens = prefix.tokens() as usize;
            if shared_tokens > 1 {
                prop_assert_eq!(&left[..shared_tokens], &right[..shared_tokens]);
                prop_assert_eq!(&left[..shared_tokens], &ids(&RANGE, &prefix, 9)[..]);
            }
            let rest = left.len() - shared_tokens;
            if rest >= 8 {
                prop_assert_ne!(&left[shared_tokens..], &right[shared_tokens..]);
            }
            prop_assert!(left.iter().all(|id| (256..30_000).contains(id)));
            if left.len() >= 8 {
                prop_assert_ne!(&ids(&RANGE, &with(one), 10), &left, "another run, other contents");
            }
        }

        #[test]
        fn text_has_the_planned_token_count(prompt in parts()) {
            let expected = prompt.tokens().saturating_sub(4).max(1);
            prop_assert_eq!(count(&text(&words(), &prompt)), expected);
        }
    }

    #[test]
    fn equal_leading_parts_give_equal_text() {
        let block = |key| PromptPart { key, tokens: 512 };
        let one = text(&words(), &PromptPlan(vec![block(1), block(2), block(3)]));
        let other = text(&words(), &PromptPlan(vec![block(1), block(2), block(4)]));
        let common = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b);
        assert!(count(one[..common.count()].rsplit_once(' ').unwrap().0) >= 1020);
    }

    #[test]
    fn scaled_prompts_stay_within_one_token_and_the_limit() {
        let prompt = PromptPlan::unique(1, 1000);
        assert_eq!(prompt.scaled(1e-6, 100).tokens(), 1);
        assert_eq!(prompt.scaled(1.0, 100).tokens(), 100);
        assert_eq!(prompt.scaled(0.25, 1000).tokens(), 250);
    }

    #[test]
    fn token_ids_are_written_in_decimal() {
        for number in [0, 7, 10, 4_294_967_295] {
            let mut out = Vec::new();
            write_number(number, &mut out);
            assert_eq!(out, number.to_string().as_bytes());
        }
    }
}
