//! Tokenizers and templates against what transformers made of them (`testdata/*/goldens.json`).

use super::{Conversation, End, ModelFiles, ModelText, RenderError, Special, value_of};
use crate::ask::conversation;
use crate::field::Fields;
use crate::json::Document;
use crate::text::{Start, TextStream};
use cleave_domain::TokenId;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

struct Checkpoint {
    name: String,
    model: Arc<ModelText>,
    goldens: Value,
}

static CHECKPOINTS: LazyLock<Vec<Checkpoint>> = LazyLock::new(|| {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let mut folders: Vec<PathBuf> = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.sort();
    let folders = folders
        .into_iter()
        .filter(|folder| folder.join("goldens.json").exists());
    let checkpoint = |folder: PathBuf| {
        let files = ModelFiles::read(&folder).unwrap();
        // By way of what is sent from a worker to a router.
        let sent = serde_json::to_vec(&files).unwrap();
        let files: ModelFiles = serde_json::from_slice(&sent).unwrap();
        Checkpoint {
            name: files.name.clone(),
            model: Arc::new(ModelText::new(files).unwrap()),
            goldens: serde_json::from_slice(&fs::read(folder.join("goldens.json")).unwrap())
                .unwrap(),
        }
    };
    let checkpoints: Vec<Checkpoint> = folders.map(checkpoint).collect();
    assert!(checkpoints.len() >= 7, "goldens of seven architectures");
    checkpoints
});

fn ids(value: &Value) -> Vec<TokenId> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn tokens_or_text_differ_from_the_reference() {
    for Checkpoint {
        name,
        model,
        goldens,
    } in CHECKPOINTS.iter()
    {
        for case in goldens["tokenizer"]["encode"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(
                model.encode(text, Special::Skipped).unwrap(),
                ids(&case["ids"]),
                "{name} {text:?}"
            );
            let special = model.encode(text, Special::Kept).unwrap();
            assert_eq!(special, ids(&case["ids_with_special"]), "{name} {text:?}");
            assert_eq!(
                model.decode(&ids(&case["ids"]), Special::Kept),
                case["decoded"],
                "{name}"
            );
        }
        for case in goldens["tokenizer"]["decode"].as_array().unwrap() {
            let tokens = ids(&case["ids"]);
            assert_eq!(
                model.decode(&tokens, Special::Kept),
                case["text"],
                "{name} {tokens:?}"
            );
            let without = model.decode(&tokens, Special::Skipped);
            assert_eq!(without, case["text_without_special"], "{name} {tokens:?}");
            for special in [Special::Kept, Special::Skipped] {
                assert_eq!(
                    streamed(model, &tokens, special),
                    model.decode(&tokens, special),
                    "{name} {tokens:?}"
                );
            }
        }
    }
}

/// What patterns, normalizers and tokens of their own cut texts at.
const SCRAPS: [&str; 30] = [
    "a",
    " the",
    "don't",
    "'S",
    "12345",
    " 7",
    " ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    " \n ",
    "é",
    "e\u{301}",
    "日本",
    "🙂",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<s>",
    "<|",
    "_",
    "!?",
    "\u{a0}",
    "ſ",
    "\u{200b}",
    "\u{ff}",
    "½",
    "antidisestablishment",
    "ДА",
];

fn scraps() -> impl Strategy<Value = Vec<String>> {
    let scrap = prop::sample::select(&SCRAPS[..]).prop_map(str::to_owned);
    prop::collection::vec(prop_oneof![4 => scrap, 1 => ".{0,4}"], 0..60)
}

proptest! {
    #[test]
    fn the_shorter_way_gave_other_tokens_than_the_library(scraps in scraps()) {
        let text = scraps.concat();
        for Checkpoint { name, model, .. } in CHECKPOINTS.iter() {
            for special in [Special::Kept, Special::Skipped] {
                let whole = model.tokenizer.encode_fast(text.as_str(), special == Special::Kept).unwrap();
                let tokens = model.encode(&text, special).unwrap();
                prop_assert_eq!(&tokens[..], whole.get_ids(), "{} {:?}", name, text);
            }
        }
    }
}

#[test]
fn tokenizers_of_the_common_kind_go_the_long_way() {
    for Checkpoint { name, model, .. } in CHECKPOINTS.iter() {
        let common = name.contains("llama3") || name.contains("qwen");
        let short = model.bytewise.as_ref().and_then(|bytewise| {
            bytewise.encode(
                &model.tokenizer,
                ("A slice <|im_end|> borrows.", Special::Kept),
                usize::MAX,
            )
        });
        assert_eq!(short.is_some(), common, "{name}");
    }
}

#[test]
fn a_chat_renders_differently_from_the_reference() {
    for Checkpoint {
        name,
        model,
        goldens,
    } in CHECKPOINTS.iter()
    {
        for case in goldens["chat"].as_array().unwrap() {
            let body = serde_json::json!({
                "messages": case["messages"],
                "tools": case.get("tools"),
                "chat_template_kwargs": case.get("kwargs"),
                "add_generation_prompt": case["add_generation_prompt"],
            });
            let body = Document::check(body.to_string()).unwrap();
            let fields = Fields::of_body(&body).unwrap();
            let value = |name| {
                fields
                    .any(name)
                    .map(|json| value_of(&fields.part(json), json))
            };
            // As a list that the API would refuse may be, and as what the API makes of a request.
            let plain = Conversation {
                messages: value("messages").unwrap(),
                body_bytes: body.len(),
                tools: value("tools"),
                documents: None,
                variables: value("chat_template_kwargs"),
                last_content: None,
                end: match case["add_generation_prompt"] == true {
                    true => End::Answer,
                    false => End::Closed,
                },
            };
            for conversation in [Some(plain), conversation(&fields).ok()] {
                let Some(conversation) = conversation else {
                    continue;
                };
                match (model.render(&conversation), case.get("error")) {
                    (Ok(text), None) => {
                        assert_eq!(text, case["rendered"], "{name}");
                        let tokens = model.encode(&text, Special::Skipped).unwrap();
                        assert_eq!(tokens, ids(&case["ids"]), "{name} {text:?}");
                    }
                    (Err(RenderError::Refused(reason)), Some(expected)) => {
                        assert_eq!(reason, *expected, "{name}")
                    }
                    (got, _) => panic!("{name}: {got:?} for {case}"),
                }
            }
        }
    }
}

fn streamed(model: &Arc<ModelText>, tokens: &[TokenId], special: Special) -> String {
    let mut stream = TextStream::new(model.clone(), special, Start::Fresh);
    let mut text: String = tokens.iter().map(|&token| stream.push(token)).collect();
    text += &stream.finish();
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Random tokens are mostly broken UTF-8, and some are special or unknown.
    #[test]
    fn streamed_text_is_not_the_whole_text(
        which in 0usize..7,
        seeds in prop::collection::vec(any::<u32>(), 0..60),
    ) {
        let Checkpoint { model, .. } = &CHECKPOINTS[which];
        let tokens: Vec<TokenId> =
            seeds.iter().map(|seed| seed % (model.vocabulary_count() + 2)).collect();
        for special in [Special::Kept, Special::Skipped] {
            prop_assert_eq!(streamed(model, &tokens, special), model.decode(&tokens, special));
        }
    }

    /// Real text comes through unchanged, and at no time with half a character in it.
    #[test]
    fn half_a_character_went_out(which in 0usize..7, text in "(\\PC|[ \n🙂你é]){0,40}") {
        let Checkpoint { model, .. } = &CHECKPOINTS[which];
        let tokens = model.encode(&text, Special::Skipped).unwrap();
        let whole = model.decode(&tokens, Special::Kept);
        let mut stream = TextStream::new(model.clone(), Special::Kept, Start::Fresh);
        let mut out = String::new();
        for &token in &tokens {
            out += &stream.push(token);
            prop_assert!(whole.starts_with(&out), "{:?} does not begin {:?}", out, whole);
        }
        out += &stream.finish();
        prop_assert_eq!(out, whole);
    }

    /// A text continues a prompt as if both were one.
    #[test]
    fn the_space_between_prompt_and_answer_was_lost(
        which in 0usize..7,
        prompt in "[a-z]{1,8}( [a-z]{1,8}){0,3}",
        answer in "( [a-z]{1,8}){1,4}",
    ) {
        let Checkpoint { model, .. } = &CHECKPOINTS[which];
        let tokens = model.encode(&(prompt.clone() + &answer), Special::Skipped).unwrap();
        let cut = (0..tokens.len()).find(|&cut| model.decode(&tokens[..cut], Special::Kept) == prompt);
        if let Some(cut) = cut {
            let mut stream = TextStream::new(model.clone(), Special::Kept, Start::Continued);
            let mut out: String = tokens[cut..].iter().map(|&token| stream.push(token)).collect();
            out += &stream.finish();
            prop_assert_eq!(out, answer);
        }
    }
}

/// A script that the vocabulary spells in bytes must still be streamed, and without quadratic cost.
#[test]
fn a_long_run_of_bytes_was_held_until_its_end() {
    let model = &CHECKPOINTS
        .iter()
        .find(|checkpoint| checkpoint.name == "llama2")
        .unwrap()
        .model;
    let text = "አማርኛ".repeat(20_000);
    let bytes = text
        .bytes()
        .map(|byte| model.tokenizer.token_to_id(&format!("<0x{byte:02X}>")));
    let tokens: Vec<TokenId> = bytes.map(Option::unwrap).collect();
    let mut stream = TextStream::new(model.clone(), Special::Kept, Start::Fresh);
    let mut out = String::new();
    for (count, &token) in tokens.iter().enumerate() {
        out += &stream.push(token);
        assert!(
            count < out.len() + 30,
            "{count} bytes in, {} out",
            out.len()
        );
    }
    out += &stream.finish();
    assert_eq!(out, text);
}

#[test]
fn a_folder_without_its_files_was_not_told_which() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
    let error = ModelFiles::read(&folder).unwrap_err().to_string();
    assert!(
        error.contains("config.json") && error.contains("no such file"),
        "{error}"
    );
    let mut files = ModelFiles::read(&folder.join("../../../testdata/llama3")).unwrap();
    files.tokenizer.truncate(100);
    let error = ModelText::new(files).map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("tokenizer.json: "), "{error}");
}
