//! A byte-level BPE tokenizer of any size, generated without training text.
//!
//! Owns: a vocabulary that covers every text and fills every id, so that any token that a random
//! model draws can be decoded.
//! Never: approximates a trained tokenizer, except that English text has about four letters per
//! token.
//! Invariant: ids are dense, `0..vocab`; the special tokens are the last ones.

use serde_json::{Map, Value, json};

/// Letters by frequency in English, so that a small vocabulary has the frequent pairs.
const LETTERS: &str = "etaoinshrdlcumwfgypbvkjxqz";
/// Byte-level BPE's character for a space.
const SPACE: char = 'Ġ';

const BEGIN: &str = "<|begin_of_text|>";
const END: &str = "<|end_of_text|>";
const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";

const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
    message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Tokens of the smallest vocabulary: every byte, and the special tokens.
pub(super) const VOCAB_MIN: usize = 256 + 4;

/// Ids of the special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpecialTokenIds {
    pub(super) begin: usize,
    pub(super) end: usize,
    pub(super) turn_start: usize,
    pub(super) turn_end: usize,
}

impl SpecialTokenIds {
    pub(super) fn of(vocab: usize) -> Self {
        Self {
            begin: vocab - 4,
            end: vocab - 3,
            turn_start: vocab - 2,
            turn_end: vocab - 1,
        }
    }
}

/// Content of tokenizer.json for `vocab` tokens.
pub(super) fn tokenizer(vocab: usize) -> Value {
    let special = SpecialTokenIds::of(vocab);
    let merges = merges(special.begin - 256);
    let mut ids = Map::new();
    for symbol in byte_symbols() {
        ids.insert(symbol.to_string(), json!(ids.len()));
    }
    for (left, right) in &merges {
        ids.insert(format!("{left}{right}"), json!(ids.len()));
    }
    let added = |id: usize, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        })
    };
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [
            added(special.begin, BEGIN),
            added(special.end, END),
            added(special.turn_start, TURN_START),
            added(special.turn_end, TURN_END),
        ],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": ids, "merges": merges,
        },
    })
}

/// Content of tokenizer_config.json for a context of `context` tokens.
pub(super) fn config(context: usize) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": false,
        "add_bos_token": false,
        "chat_template": TEMPLATE,
    })
}

/// The 256 characters that represent bytes: printable bytes by themselves, the others from U+0100.
fn byte_symbols() -> Vec<char> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255u8).filter(|byte| !is_printable(byte));
    let spelled = others
        .enumerate()
        .filter_map(|(index, _)| char::from_u32(0x100 + index as u32));
    let printable = (0..=255u8).filter(is_printable).map(char::from);
    printable.chain(spelled).collect()
}

/// `count` merges: words of two letters, then three and so on, each made of a word one letter
/// shorter and a letter; first without and then with a space before them.
fn merges(count: usize) -> Vec<(String, String)> {
    let mut merges: Vec<(String, String)> = Vec::with_capacity(count);
    let letters: Vec<String> = LETTERS.chars().map(String::from).collect();
    // Words of the current length: bare, and with their space.
    let mut bare = letters.clone();
    let mut spaced = vec![SPACE.to_string()];
    while merges.len() < count {
        let longer = |words: &[String]| -> Vec<(String, String)> {
            words
                .iter()
                .flat_map(|word| letters.iter().map(|letter| (word.clone(), letter.clone())))
                .collect()
        };
        let (more_spaced, more_bare) = (longer(&spaced), longer(&bare));
        let joined = |pairs: &[(String, String)]| -> Vec<String> {
            pairs
                .iter()
                .map(|(left, right)| format!("{left}{right}"))
                .collect()
        };
        (spaced, bare) = (joined(&more_spaced), joined(&more_bare));
        merges.extend(
            more_spaced
                .into_iter()
                .chain(more_bare)
                .take(count - merges.len()),
        );
    }
    merges
}
