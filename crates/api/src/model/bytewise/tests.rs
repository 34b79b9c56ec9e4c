//! The shorter way beside the library's own, over tokenizers of kinds that no checkpoint of ours has.

use super::super::piece::level_byte;
use super::{Bytewise, Special};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof};
use proptest::{proptest, sample::select, test_runner::Config};
use serde_json::{Map, Value, json};
use std::str::FromStr;
use tokenizers::{PaddingParams, PaddingStrategy, Tokenizer};

/// Spelt in letters of bytes: `Ġ` is a space, `Ċ` a line's end.
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

/// Several begin as another does, end as another begins, or are what the vocabulary has anyway.
const ADDED: [&str; 11] = [
    "<|a|>", "<|a|>b", "<|a", "|>b", "b<|", "ab", "b", " b", "hello", "é|", "日",
];

const SCRAPS: [&str; 26] = [
    "a", "b", "<|", "|>", "|", "<", ">", "<|a", "hello", " hello", "he", "l", "'s", "'ll", " ",
    "  ", "\n", "\n\n", "\t", "1", "23", "é", "e\u{301}", "日本", "🙂", "\u{a0}",
];

/// A token to be found before anything else.
#[derive(Clone, Debug)]
struct Added {
    content: &'static str,
    wishes: Wishes,
}

/// What it wishes more than that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Wishes {
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
}

/// A tokenizer's file.
#[derive(Clone, Debug)]
struct Kind {
    normalizer: Value,
    pre: Value,
    post: Value,
    added: Vec<Added>,
    ignore_merges: bool,
}

impl Kind {
    /// The shortest way there is.
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
        let letters = ('\0'..'\u{200}').filter(|letter| level_byte(*letter).is_some());
        let joined = MERGES.iter().map(|(one, next)| format!("{one}{next}"));
        let pieces = letters.map(String::from).chain(joined);
        let vocabulary: Map<String, Value> =
            pieces.zip(0..).map(|(p, id)| (p, json!(id))).collect();
        let mut next = vocabulary.len();
        let mut added = Vec::new();
        for Added { content, wishes } in &self.added {
            let known = vocabulary.get(*content).cloned();
            next += usize::from(known.is_none());
            added.push(json!({
                "id": known.unwrap_or(json!(next - 1)),
                "content": content,
                "single_word": wishes.single_word,
                "lstrip": wishes.lstrip,
                "rstrip": wishes.rstrip,
                "normalized": wishes.normalized,
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

/// A tokenizer, and the shorter way where it has one.
struct Pair {
    tokenizer: Tokenizer,
    bytewise: Option<Bytewise>,
}

impl Pair {
    fn of(kind: &Kind) -> Self {
        let tokenizer = kind.tokenizer();
        let bytewise = Bytewise::of(&tokenizer);
        Self {
            tokenizer,
            bytewise,
        }
    }

    /// The library's tokens and, if it goes that way, those of the shorter one.
    fn encode(&self, text: &str, special: Special) -> (Vec<u32>, Option<Vec<u32>>) {
        let whole = self.tokenizer.encode_fast(text, special == Special::Kept);
        let bytewise = self.bytewise.as_ref();
        let short = bytewise.and_then(|bytewise| {
            match bytewise.encode(&self.tokenizer, (text, special), usize::MAX)? {
                super::Encoded::Tokens(tokens) => Some(tokens),
                super::Encoded::TooMany(_) => None,
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

/// Patterns that leave gaps, match nothing at all, or look around, and all that is done with matches.
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

fn added(wishes: impl Strategy<Value = Wishes>) -> impl Strategy<Value = Vec<Added>> {
    let contents = prop::sample::subsequence(&ADDED[..], 0..=ADDED.len()).prop_shuffle();
    let all = (contents, prop::collection::vec(wishes, ADDED.len()));
    all.prop_map(|(contents, wishes)| {
        let tokens = contents.into_iter().zip(wishes);
        tokens
            .map(|(content, wishes)| Added { content, wishes })
            .collect()
    })
}

fn wishes() -> impl Strategy<Value = Wishes> {
    let rare = || prop::bool::weighted(0.03);
    (rare(), rare(), rare(), rare()).prop_map(|(single_word, lstrip, rstrip, normalized)| Wishes {
        single_word,
        lstrip,
        rstrip,
        normalized,
    })
}

fn kinds() -> impl Strategy<Value = Kind> {
    let normalizers = [
        json!(null),
        json!(null),
        json!({"type": "NFC"}),
        json!({"type": "Lowercase"}),
    ];
    let pre = prop_oneof![levels(), splits()];
    let added = prop_oneof![added(Just(Wishes::default())), added(wishes())];
    let parts = (
        select(normalizers.to_vec()),
        pre,
        posts(),
        added,
        any::<bool>(),
    );
    parts.prop_map(|(normalizer, pre, post, added, ignore_merges)| Kind {
        normalizer,
        pre,
        post,
        added,
        ignore_merges,
    })
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
    fn the_shorter_way_gave_other_tokens_to_a_kind_that_no_checkpoint_is_of(
        kind in kinds(),
        texts in prop::collection::vec(texts(), 4),
    ) {
        let pair = Pair::of(&kind);
        for text in texts {
            for special in [Special::Kept, Special::Skipped] {
                let (whole, short) = pair.encode(&text, special);
                prop_assert_eq!(short.unwrap_or_else(|| whole.clone()), whole, "{:?}", text);
            }
        }
    }

    #[test]
    fn a_token_that_begins_as_another_does_was_not_found_as_the_library_finds_it(
        added in added(Just(Wishes::default())),
        texts in prop::collection::vec(texts(), 4),
    ) {
        let kind = Kind { added, ..Kind::plain(level(true, false)) };
        let pair = Pair::of(&kind);
        for text in texts {
            let (whole, short) = pair.encode(&text, Special::Kept);
            prop_assert!(short.is_some(), "the long way: {:?}", text);
            prop_assert_eq!(short.unwrap(), whole, "{:?}", text);
        }
    }
}

#[test]
fn bytes_alone_go_the_shorter_way_only_where_the_pattern_is_known() {
    let ways = |pre: Value| {
        let pair = Pair::of(&Kind::plain(pre));
        let (whole, short) = pair.encode("hello hello\n 's", Special::Kept);
        short.map(|short| assert_eq!(short, whole)).is_some()
    };
    assert!(ways(level(true, false)));
    assert!(!ways(level(false, false)), "nothing cuts the text");
    assert!(!ways(level(true, true)), "a space goes before the text");
    assert!(!ways(level(false, true)));
}

#[test]
fn a_token_that_wishes_more_than_to_be_found_is_left_to_the_library() {
    let plain = Wishes::default();
    let all = [
        Wishes {
            single_word: true,
            ..plain
        },
        Wishes {
            lstrip: true,
            ..plain
        },
        Wishes {
            rstrip: true,
            ..plain
        },
        Wishes {
            normalized: true,
            ..plain
        },
    ];
    let with = |wishes| {
        let content = "<|a|>";
        let added = vec![Added { content, wishes }];
        let kind = Kind {
            added,
            ..Kind::plain(level(true, false))
        };
        Bytewise::of(&kind.tokenizer()).is_some()
    };
    assert!(with(plain));
    assert_eq!(all.map(with), [false; 4]);
}

/// A row of texts of one length is nobody's here; what a text is padded with would stand for what is put
/// around it.
#[test]
fn a_text_that_is_padded_is_left_to_the_library() {
    let mut tokenizer = Kind::plain(level(true, false)).tokenizer();
    assert!(Bytewise::of(&tokenizer).is_some());
    tokenizer.with_padding(Some(PaddingParams {
        strategy: PaddingStrategy::Fixed(20),
        ..PaddingParams::default()
    }));
    assert!(Bytewise::of(&tokenizer).is_none());
}
