//! Copies of checkpoints that tests damage, and the errors of opening them.

use cleave_checkpoint::Checkpoint;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub(crate) fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

/// Copies a checkpoint of testdata to a temporary folder, for a test to damage.
pub(crate) fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(testdata(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        let text = file.to_string_lossy();
        if !text.contains("tokenizer") && !text.contains("goldens") {
            fs::copy(&path, dir.path().join(file)).unwrap();
        }
    }
    dir
}

pub(crate) fn open_error(dir: &Path) -> String {
    match Checkpoint::open(dir) {
        Ok(_) => panic!("{} was opened", dir.display()),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
pub(crate) fn assert_error_contains(dir: &Path, words: &[&str]) {
    let error = open_error(dir);
    for word in words {
        assert!(error.contains(word), "`{error}` does not say `{word}`");
    }
    assert!(!error.contains('\n'), "{error}");
}

pub(crate) fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = dir.join(file);
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

/// Rewrites a shard's header.
pub(crate) fn edit_header(file: &Path, change: impl FnOnce(&mut Value)) {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let text = header.to_string();
    let mut written = (text.len() as u64).to_le_bytes().to_vec();
    written.extend(text.as_bytes());
    written.extend(&bytes[8 + length..]);
    fs::write(file, written).unwrap();
}
