//! The fast encoder compared with the library, over kinds of tokenizers that no test checkpoint
//! has.

use super::super::piece::byte_of_level_letter;
use super::{ByteLevelEncoder, NotEncoded, PIECE_BYTES_MAX, SpecialTokens};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof};
use proptest::{proptest, sample::select, test_runner::Config};
use serde_json::{Map, Value, json};
use std::str::FromStr;
use tokenizers::{PaddingParams, PaddingStrategy, Tokenizer};

/// Merges in byte-level letters: `Ġ` is a space, `Ċ` a line feed.
const MERGES: [(&str, &str); 12] = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "hello"),
    ("Ġ", "Ġ"),
    ("Ċ", "Ċ"),
    ("<", "|"),
    ("|", ">"),
    ("|>", "b"),
    ("a", "b"),
    ("Ã", "©"),
];

/// Added tokens; several share a beginning or an end, or are in the vocabulary as well.
const ADDED: [&str; 11] = [
    "<|a|>", "<|a|>b", "<|a", "|>b", "b<|", "ab", "b", " b", "hello", "é|", "日",
];

const SCRAPS: [&str; 26] = [
    "a", "b", "<|", "|>", "|", "<", ">", "<|a", "hello", " hello", "he", "l", "'s", "'ll", " ",
    "  ", "\n", "\n\n", "\t", "1", "23", "é", "e\u{301}", "日本", "🙂", "\u{a0}",
];

#[derive(Clone, Debug)]
struct AddedTokenSpec {
    content: &'static str,
    flags: AddedTokenFlags,
}

/// Matching flags of an added token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AddedTokenFlags {
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
}

/// The content of a tokenizer file.
#[derive(Clone, Debug)]
struct TokenizerSpec {
    normalizer: Value,
    pre: Value,
    post: Value,
    added: Vec<AddedTokenSpec>,
    ignore_merges: bool,
}

impl TokenizerSpec {
    /// The simplest tokenizer with this pre-tokenizer.
    fn plain(pre: Value) -> Self {
        Self {
            normalizer: Value::Null,
            pre,
            post: Value::Null,
            added: Vec::new(),
            ignore_merges: false,
        }
    }

    fn tokenizer(&self) -> Tokenizer {
        let letters = ('\0'..'\u{200}').filter(|letter| byte_of_level_letter(*letter).is_some());
        let joined = MERGES.iter().map(|(one, next)| format!("{one}{next}"));
        let pieces = letters.map(String::from).chain(joined);
        let vocabulary: Map<String, Value> =
            pieces.zip(0..).map(|(p, id)| (p, json!(id))).collect();
        let mut next = vocabulary.len();
        let mut added = Vec::new();
        for AddedTokenSpec { content, flags } in &self.added {
            let known_id = vocabulary.get(*content).cloned();
            next += usize::from(known_id.is_none());
            added.push(json!({
                "id": known_id.unwrap_or(json!(next - 1)),
                "content": content,
                "single_word": flags.single_word,
                "lstrip": flags.lstrip,
                "rstrip": flags.rstrip,
                "normalized": flags.normalized,
                "special": false,
            }));
        }
        let file = json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre,
            "post_processor": self.post,
            "decoder": null,
            "model": {
                "type": "BPE",
                "ignore_merges": self.ignore_merges,
                "vocab": vocabulary,
                "merges": MERGES.map(|(one, next)| [one, next]),
            },
        });
        Tokenizer::from_str(&file.to_string()).unwrap()
    }
}

/// A tokenizer, with its fast encoder if it has one.
struct TokenizerPair {
    tokenizer: Tokenizer,
    bytewise: Option<ByteLevelEncoder>,
}

impl TokenizerPair {
    fn of(kind: &TokenizerSpec) -> Self {
        let tokenizer = kind.tokenizer();
        let bytewise = ByteLevelEncoder::of(&tokenizer);
        Self {
            tokenizer,
            bytewise,
        }
    }

    /// Returns the tokens of the library and, if it applies, those of the fast encoder.
    fn encode(&self, text: &str, special: SpecialTokens) -> (Vec<u32>, Option<Vec<u32>>) {
        let whole = self
            .tokenizer
            .encode_fast(text, special == SpecialTokens::Kept);
        let bytewise = self.bytewise.as_ref();
        let short = bytewise.and_then(|bytewise| {
            match bytewise.encode(&self.tokenizer, text, special, usize::MAX) {
                Ok(super::EncodedText::Tokens(tokens)) => Some(tokens),
                Ok(super::EncodedText::TooMany(_)) | Err(_) => None,
            }
        });
        (whole.unwrap().get_ids().to_vec(), short)
    }
}

// === what is drawn ===

fn level(use_regex: bool, add_prefix_space: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

fn levels() -> impl Strategy<Value = Value> {
    any::<[bool; 2]>().prop_map(|[use_regex, prefix]| level(use_regex, prefix))
}

/// Patterns that leave gaps, match the empty text or look around, with every behavior of matches.
fn splits() -> impl Strategy<Value = Value> {
    let levels = prop_oneof![3 => Just(level(false, false)), 1 => levels()];
    let patterns = [
        r"\p{L}+|\s+|\p{N}",
        r"a*",
        r"\s",
        r"(?i:'s|'ll)|[^\s]+\s?|\s+(?!\S)|\s+",
        r"b|\|",
    ];
    let behaviors = [
        "Isolated",
        "Isolated",
        "Isolated",
        "Removed",
        "MergedWithPrevious",
        "Contiguous",
    ];
    let kinds = ["Regex", "Regex", "Regex", "String"];
    let drawn = (
        select(patterns.to_vec()),
        select(behaviors.to_vec()),
        select(kinds.to_vec()),
    );
    let patterned = (drawn, prop::bool::weighted(0.2), levels);
    patterned.prop_map(|((pattern, behavior, kind), invert, level)| {
        let split = json!({
            "type": "Split",
            "pattern": {kind: pattern},
            "behavior": behavior,
            "invert": invert,
        });
        json!({"type": "Sequence", "pretokenizers": [split, level]})
    })
}

fn posts() -> impl Strategy<Value = Value> {
    let token = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let around = json!({
        "type": "TemplateProcessing",
        "single": [token("h"), text, token("e"), token("h")],
        "pair": [text, text],
        "special_tokens": {
            "h": {"id": "h", "ids": [7], "tokens": ["h"]},
            "e": {"id": "e", "ids": [8, 9], "tokens": ["e", "f"]},
        },
    });
    let level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    select(vec![Value::Null, around, level])
}

fn added(
    flags: impl Strategy<Value = AddedTokenFlags>,
) -> impl Strategy<Value = Vec<AddedTokenSpec>> {
    let contents = prop::sample::subsequence(&ADDED[..], 0..=ADDED.len()).prop_shuffle();
    let all = (contents, prop::collection::vec(flags, ADDED.len()));
    all.prop_map(|(contents, flags)| {
        let tokens = contents.into_iter().zip(flags);
        tokens
            .map(|(content, flags)| AddedTokenSpec { content, flags })
            .collect()
    })
}

fn flags() -> impl Strategy<Value = AddedTokenFlags> {
    let rare = || prop::bool::weighted(0.03);
    (rare(), rare(), rare(), rare()).prop_map(|(single_word, lstrip, rstrip, normalized)| {
        AddedTokenFlags {
            single_word,
            lstrip,
            rstrip,
            normalized,
        }
    })
}

fn kinds() -> impl Strategy<Value = TokenizerSpec> {
    let normalizers = [
        json!(null),
        json!(null),
        json!({"type": "NFC"}),
        json!({"type": "Lowercase"}),
    ];
    let pre = prop_oneof![levels(), splits()];
    let added = prop_oneof![added(Just(AddedTokenFlags::default())), added(flags())];
    let parts = (
        select(normalizers.to_vec()),
        pre,
        posts(),
        added,
        any::<bool>(),
    );
    parts.prop_map(
        |(normalizer, pre, post, added, ignore_merges)| TokenizerSpec {
            normalizer,
            pre,
            post,
            added,
            ignore_merges,
        },
    )
}

fn texts() -> impl Strategy<Value = String> {
    let scrap = || select(&SCRAPS[..]).prop_map(str::to_owned);
    let token = || select(&ADDED[..]).prop_map(str::to_owned);
    let scraps = prop_oneof![5 => scrap(), 4 => token(), 1 => ".{0,3}"];
    prop::collection::vec(scraps, 0..30).prop_map(|scraps| scraps.concat())
}

proptest! {
    #![proptest_config(Config { cases: 150, failure_persistence: None, ..Config::default() })]

    #[test]
    fn random_tokenizers_encode_as_the_library_does(
        kind in kinds(),
        texts in prop::collection::vec(texts(), 4),
    ) {
        let pair = TokenizerPair::of(&kind);
        for text in texts {
            for special in [SpecialTokens::Kept, SpecialTokens::Skipped] {
                let (whole, short) = pair.encode(&text, special);
                prop_assert_eq!(short.unwrap_or_else(|| whole.clone()), whole, "{:?}", text);
            }
        }
    }

    #[test]
    fn overlapping_added_tokens_match_as_in_the_library(
        added in added(Just(AddedTokenFlags::default())),
        texts in prop::collection::vec(texts(), 4),
    ) {
        let kind = TokenizerSpec { added, ..TokenizerSpec::plain(level(true, false)) };
        let pair = TokenizerPair::of(&kind);
        for text in texts {
            let (whole, short) = pair.encode(&text, SpecialTokens::Kept);
            prop_assert!(short.is_some(), "the long way: {:?}", text);
            prop_assert_eq!(short.unwrap(), whole, "{:?}", text);
        }
    }
}

#[test]
fn byte_level_needs_a_known_split_pattern() {
    let matches_library = |pre: Value| {
        let pair = TokenizerPair::of(&TokenizerSpec::plain(pre));
        let (whole, short) = pair.encode("hello hello\n 's", SpecialTokens::Kept);
        short.map(|short| assert_eq!(short, whole)).is_some()
    };
    assert!(matches_library(level(true, false)));
    assert!(
        !matches_library(level(false, false)),
        "nothing cuts the text"
    );
    assert!(
        !matches_library(level(true, true)),
        "a space goes before the text"
    );
    assert!(!matches_library(level(false, true)));
}

#[test]
fn added_tokens_with_flags_are_left_to_the_library() {
    let plain = AddedTokenFlags::default();
    let all = [
        AddedTokenFlags {
            single_word: true,
            ..plain
        },
        AddedTokenFlags {
            lstrip: true,
            ..plain
        },
        AddedTokenFlags {
            rstrip: true,
            ..plain
        },
        AddedTokenFlags {
            normalized: true,
            ..plain
        },
    ];
    let with = |flags| {
        let content = "<|a|>";
        let added = vec![AddedTokenSpec { content, flags }];
        let kind = TokenizerSpec {
            added,
            ..TokenizerSpec::plain(level(true, false))
        };
        ByteLevelEncoder::of(&kind.tokenizer()).is_some()
    };
    assert!(with(plain));
    assert_eq!(all.map(with), [false; 4]);
}

/// Composed, decomposed and reordered marks, jamo, and characters that NFC takes apart.
#[test]
fn nfc_tokenizers_encode_all_text_as_the_library_does() {
    let kind = TokenizerSpec {
        normalizer: json!({"type": "NFC"}),
        ..TokenizerSpec::plain(level(true, false))
    };
    let pair = TokenizerPair::of(&kind);
    for text in [
        "日本 é",
        "e\u{301}",
        "q\u{323}\u{307} q\u{307}\u{323}",
        "\u{1112}\u{1161}\u{11ab}",
        "\u{1d160}\u{958}\u{fb2c}",
        "\u{212b} \u{2126}",
    ] {
        let (whole, short) = pair.encode(text, SpecialTokens::Kept);
        assert_eq!(short, Some(whole), "{text:?}");
    }
}

#[test]
fn a_piece_beyond_the_limit_is_refused_with_its_length() {
    let kind = TokenizerSpec::plain(level(true, false));
    let tokenizer = kind.tokenizer();
    let bytewise = ByteLevelEncoder::of(&tokenizer).unwrap();
    let encode = |text: &str| bytewise.encode(&tokenizer, text, SpecialTokens::Kept, 10);
    let longest = "a".repeat(PIECE_BYTES_MAX);
    let counted = super::EncodedText::TooMany(2 * PIECE_BYTES_MAX + 1);
    assert_eq!(encode(&format!("{longest}\n{longest}")), Ok(counted));
    let refused = encode(&format!("b\n{longest}a\nb"));
    assert_eq!(refused, Err(NotEncoded::LongPiece(PIECE_BYTES_MAX + 1)));
}

/// Padding is for batches of texts, which the server does not have; a padding token would be taken
/// for a wrapping token.
#[test]
fn padding_tokenizers_are_left_to_the_library() {
    let mut tokenizer = TokenizerSpec::plain(level(true, false)).tokenizer();
    assert!(ByteLevelEncoder::of(&tokenizer).is_some());
    tokenizer.with_padding(Some(PaddingParams {
        strategy: PaddingStrategy::Fixed(20),
        ..PaddingParams::default()
    }));
    assert!(ByteLevelEncoder::of(&tokenizer).is_none());
}
