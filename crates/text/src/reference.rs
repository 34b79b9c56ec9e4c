//! Tokenizers and templates compared with the results of transformers (`testdata/*/goldens.json`).

use crate::detokenize::{TextStart, TextStream};
use crate::json::{Document, Json, JsonShape};
use crate::model_files::ModelFiles;
use crate::model_text::ModelText;
use crate::template::{RenderEnd, RenderError, TemplateInput, TemplateValue};
use crate::tokenizer::SpecialTokens;
use cleave_domain::TokenId;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

struct GoldenCheckpoint {
    name: String,
    model: Arc<ModelText>,
    goldens: Value,
}

static CHECKPOINTS: LazyLock<Vec<GoldenCheckpoint>> = LazyLock::new(|| {
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
        // The files pass through the serialization that carries them from a worker to a router.
        let sent = serde_json::to_vec(&files).unwrap();
        let files: ModelFiles = serde_json::from_slice(&sent).unwrap();
        GoldenCheckpoint {
            name: files.name.clone(),
            model: Arc::new(ModelText::new(files).unwrap()),
            goldens: serde_json::from_slice(&fs::read(folder.join("goldens.json")).unwrap())
                .unwrap(),
        }
    };
    let checkpoints: Vec<GoldenCheckpoint> = folders.map(checkpoint).collect();
    assert!(checkpoints.len() >= 7, "goldens of seven architectures");
    checkpoints
});

fn ids(value: &Value) -> Vec<TokenId> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn tokens_and_text_match_the_reference() {
    for GoldenCheckpoint {
        name,
        model,
        goldens,
    } in CHECKPOINTS.iter()
    {
        for case in goldens["tokenizer"]["encode"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(
                model
                    .tokenizer()
                    .encode(text, SpecialTokens::Skipped)
                    .unwrap(),
                ids(&case["ids"]),
                "{name} {text:?}"
            );
            let special = model.tokenizer().encode(text, SpecialTokens::Kept).unwrap();
            assert_eq!(special, ids(&case["ids_with_special"]), "{name} {text:?}");
            assert_eq!(
                model
                    .tokenizer()
                    .decode(&ids(&case["ids"]), SpecialTokens::Kept),
                case["decoded"],
                "{name}"
            );
        }
        for case in goldens["tokenizer"]["decode"].as_array().unwrap() {
            let tokens = ids(&case["ids"]);
            assert_eq!(
                model.tokenizer().decode(&tokens, SpecialTokens::Kept),
                case["text"],
                "{name} {tokens:?}"
            );
            let without = model.tokenizer().decode(&tokens, SpecialTokens::Skipped);
            assert_eq!(without, case["text_without_special"], "{name} {tokens:?}");
            for special in [SpecialTokens::Kept, SpecialTokens::Skipped] {
                assert_eq!(
                    streamed(model, &tokens, special),
                    model.tokenizer().decode(&tokens, special),
                    "{name} {tokens:?}"
                );
            }
        }
    }
}

/// Texts at which patterns, normalizers and added tokens split.
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
    fn byte_level_encoding_matches_the_library(scraps in scraps()) {
        let text = scraps.concat();
        for GoldenCheckpoint { name, model, .. } in CHECKPOINTS.iter() {
            for special in [SpecialTokens::Kept, SpecialTokens::Skipped] {
                let whole = model.tokenizer().library().encode_fast(text.as_str(), special == SpecialTokens::Kept).unwrap();
                let tokens = model.tokenizer().encode(&text, special).unwrap();
                prop_assert_eq!(&tokens[..], whole.get_ids(), "{} {:?}", name, text);
            }
        }
    }
}

#[test]
fn all_but_byte_fallback_uses_the_byte_level_encoder() {
    for GoldenCheckpoint { name, model, .. } in CHECKPOINTS.iter() {
        let common = !["llama2", "mistral"].contains(&name.as_str());
        let short = model.tokenizer().byte_level().and_then(|bytewise| {
            let encoded = bytewise.encode(
                model.tokenizer().library(),
                "A slice <|im_end|> borrows.",
                SpecialTokens::Kept,
                usize::MAX,
            );
            encoded.ok()
        });
        assert_eq!(short.is_some(), common, "{name}");
    }
}

/// The member of an object, unless it is null.
fn member<'a>(object: Json<'a>, name: &str) -> Option<Json<'a>> {
    let JsonShape::Object(mut members) = object.shape() else {
        return None;
    };
    let (_, value) = members.find(|(key, _)| key.get() == name)?;
    (!value.is_null()).then_some(value)
}

/// The conversion of requests has a test of its own, in the crate of the HTTP side.
#[test]
fn chats_render_as_in_the_reference() {
    for GoldenCheckpoint {
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
            });
            let body = Document::check(body.to_string()).unwrap();
            let value = |name| {
                let json = member(body.root(), name)?;
                Some(TemplateValue::of_json(&body.part(json), json))
            };
            let conversation = TemplateInput {
                messages: value("messages").unwrap(),
                body_bytes: body.len(),
                tools: value("tools"),
                documents: None,
                variables: value("chat_template_kwargs"),
                last_content: None,
                end: if case["add_generation_prompt"] == true {
                    RenderEnd::AnswerOpening
                } else {
                    RenderEnd::Closed
                },
            };
            match (model.render(&conversation), case.get("error")) {
                (Ok(text), None) => {
                    assert_eq!(text, case["rendered"], "{name}");
                    let tokens = model
                        .tokenizer()
                        .encode(&text, SpecialTokens::Skipped)
                        .unwrap();
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

fn streamed(model: &Arc<ModelText>, tokens: &[TokenId], special: SpecialTokens) -> String {
    let mut stream = TextStream::new(model.clone(), special, TextStart::Fresh);
    let mut text: String = tokens.iter().map(|&token| stream.push(token)).collect();
    text += &stream.finish();
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Random tokens are mostly invalid UTF-8, and some are special or unknown.
    #[test]
    fn streamed_text_equals_the_whole_decoding(
        which in 0usize..7,
        seeds in prop::collection::vec(any::<u32>(), 0..60),
    ) {
        let GoldenCheckpoint { model, .. } = &CHECKPOINTS[which];
        let tokens: Vec<TokenId> =
            seeds.iter().map(|seed| seed % (model.vocabulary_count() + 2)).collect();
        for special in [SpecialTokens::Kept, SpecialTokens::Skipped] {
            prop_assert_eq!(streamed(model, &tokens, special), model.tokenizer().decode(&tokens, special));
        }
    }

    /// Real text is unchanged, and never ends within a character.
    #[test]
    fn streamed_text_has_only_whole_characters(which in 0usize..7, text in "(\\PC|[ \n🙂你é]){0,40}") {
        let GoldenCheckpoint { model, .. } = &CHECKPOINTS[which];
        let tokens = model.tokenizer().encode(&text, SpecialTokens::Skipped).unwrap();
        let whole = model.tokenizer().decode(&tokens, SpecialTokens::Kept);
        let mut stream = TextStream::new(model.clone(), SpecialTokens::Kept, TextStart::Fresh);
        let mut out = String::new();
        for &token in &tokens {
            out += &stream.push(token);
            prop_assert!(whole.starts_with(&out), "{:?} does not begin {:?}", out, whole);
        }
        out += &stream.finish();
        prop_assert_eq!(out, whole);
    }

    /// A text continues a prompt as if both were one text.
    #[test]
    fn a_continued_text_keeps_its_leading_space(
        which in 0usize..7,
        prompt in "[a-z]{1,8}( [a-z]{1,8}){0,3}",
        answer in "( [a-z]{1,8}){1,4}",
    ) {
        let GoldenCheckpoint { model, .. } = &CHECKPOINTS[which];
        let tokens = model.tokenizer().encode(&(prompt.clone() + &answer), SpecialTokens::Skipped).unwrap();
        let cut = (0..tokens.len()).find(|&cut| model.tokenizer().decode(&tokens[..cut], SpecialTokens::Kept) == prompt);
        if let Some(cut) = cut {
            let mut stream = TextStream::new(model.clone(), SpecialTokens::Kept, TextStart::Continued);
            let mut out: String = tokens[cut..].iter().map(|&token| stream.push(token)).collect();
            out += &stream.finish();
            prop_assert_eq!(out, answer);
        }
    }
}

/// A script that the vocabulary spells in bytes is streamed, and at linear cost.
#[test]
fn a_long_run_of_byte_tokens_is_streamed() {
    let model = &CHECKPOINTS
        .iter()
        .find(|checkpoint| checkpoint.name == "llama2")
        .unwrap()
        .model;
    let text = "አማርኛ".repeat(20_000);
    let bytes = text
        .bytes()
        .map(|byte| model.tokenizer().id_of(&format!("<0x{byte:02X}>")));
    let tokens: Vec<TokenId> = bytes.map(Option::unwrap).collect();
    let mut stream = TextStream::new(model.clone(), SpecialTokens::Kept, TextStart::Fresh);
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
fn a_missing_model_file_is_named() {
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
