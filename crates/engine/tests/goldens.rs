//! The forward pass against the reference's goldens, and against itself on every path.

mod reference;

use cleave_engine::conformance::{goldens, path_independence};
use cleave_engine::{Engine, EngineLimits};
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

fn build(dir: &Path, limits: EngineLimits) -> Result<Box<dyn Engine>, String> {
    Ok(Box::new(reference::engine(dir, limits)?))
}

macro_rules! checkpoint {
    ($name:ident, $folder:literal) => {
        mod $name {
            use super::*;

            #[test]
            fn tokens_and_logits_are_the_references() {
                goldens(&folder($folder), &build).unwrap();
            }

            #[test]
            fn the_answer_does_not_depend_on_the_path() {
                path_independence(&folder($folder), &build).unwrap();
            }
        }
    };
}

checkpoint!(llama2, "llama2");
checkpoint!(llama3, "llama3");
checkpoint!(llama3_new, "llama3-new");
checkpoint!(mistral, "mistral");
checkpoint!(qwen2, "qwen2");
checkpoint!(qwen2_5, "qwen2.5");
checkpoint!(qwen3, "qwen3");

#[test]
fn every_folder_of_testdata_is_compared() {
    let mut found: Vec<String> = std::fs::read_dir(folder(""))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("goldens.json").exists())
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    found.sort();
    let compared = [
        "llama2",
        "llama3",
        "llama3-new",
        "mistral",
        "qwen2",
        "qwen2.5",
        "qwen3",
    ];
    assert_eq!(found, compared);
}
