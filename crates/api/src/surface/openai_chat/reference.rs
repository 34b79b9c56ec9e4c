//! Chat requests compared with the results of transformers (`testdata/*/goldens.json`).

use super::tools::request_tools;
use super::{CHAT_REQUEST, template_input};
use crate::field::JsonFields;
use cleave_text::json::Document;
use cleave_text::{ModelFiles, ModelText, RenderError};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The API refuses some of the lists of messages that transformers renders; all others render
/// equally.
#[test]
fn chat_requests_render_as_in_the_reference() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let folders = fs::read_dir(root).unwrap();
    let folders = folders.map(|entry| entry.unwrap().path());
    let folders = folders.filter(|folder| folder.join("goldens.json").exists());
    let mut rendered_count = 0;
    for folder in folders {
        let name = folder.display();
        let model = ModelText::new(ModelFiles::read(&folder).unwrap()).unwrap();
        let goldens = fs::read(folder.join("goldens.json")).unwrap();
        let goldens: Value = serde_json::from_slice(&goldens).unwrap();
        for case in goldens["chat"].as_array().unwrap() {
            let body = serde_json::json!({
                "messages": case["messages"],
                "tools": case.get("tools"),
                "chat_template_kwargs": case.get("kwargs"),
                "add_generation_prompt": case["add_generation_prompt"],
            });
            let body = Document::check(body.to_string()).unwrap();
            let fields = JsonFields::of_body(&body, &CHAT_REQUEST).unwrap();
            let Ok(conversation) =
                request_tools(&fields).and_then(|tools| template_input(&fields, &tools))
            else {
                continue;
            };
            match (model.render(&conversation), case.get("error")) {
                (Ok(text), None) => assert_eq!(text, case["rendered"], "{name}"),
                (Err(RenderError::Refused(reason)), Some(expected)) => {
                    assert_eq!(reason, *expected, "{name}")
                }
                (got, _) => panic!("{name}: {got:?} for {case}"),
            }
            rendered_count += 1;
        }
    }
    assert!(rendered_count >= 7, "{rendered_count} cases");
}
