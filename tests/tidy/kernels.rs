//! Kernels, and the scripts that take them to a GPU.

use super::{page, relative, rust_files};
use crate::root;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of the archive that is copied to a machine with a GPU before each call.
const ARCHIVE_BYTES_MAX: u64 = 45_000_000;

fn kernel_sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("readable folder") {
        let path = entry.expect("readable folder").path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            files.extend(kernel_sources(&path));
        } else if matches!(extension, Some("cu" | "cuh" | "h")) {
            files.push(path);
        }
    }
    files
}

/// The inline assembly of a source: from each `asm` to the end of its statement.
fn assembly(text: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let starts = text.match_indices("asm").filter(|(at, word)| {
        let before = text[..*at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    });
    let mut found = Vec::new();
    for (at, _) in starts {
        let rest = &text[at..];
        let (mut in_text, mut end) = (false, rest.len());
        for (place, c) in rest.char_indices() {
            match c {
                '"' => in_text = !in_text,
                ';' if !in_text => {
                    end = place;
                    break;
                }
                _ => {}
            }
        }
        found.push(&rest[..end]);
    }
    found
}

/// The compiler moves reads of shared memory across an assembly that does not clobber memory, so
/// that they see old bytes.
#[test]
fn asynchronous_copies_clobber_memory() {
    let mut checked = 0;
    for path in kernel_sources(&root().join("kernels")) {
        let text = fs::read_to_string(&path).expect("readable source");
        for statement in assembly(&text) {
            if !statement.contains("cp.async") {
                continue;
            }
            checked += 1;
            assert!(
                statement.contains("\"memory\""),
                "{}: add a \"memory\" clobber: {statement}",
                relative(&path)
            );
        }
    }
    assert!(checked >= 3, "copy, commit and wait are found: {checked}");
}

/// Names of the GPU backend's tests.
fn backend_tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for path in rust_files(&root().join("crates/cuda")) {
        let text = fs::read_to_string(&path).expect("readable source");
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            if line == "#[test]" {
                is_test = true;
            } else if is_test && let Some((_, rest)) = line.split_once("fn ") {
                is_test = false;
                names.extend(rest.split('(').next().map(str::to_owned));
            }
        }
    }
    names
}

/// The words of an assignment in a script: `NAME="…"` or `NAME=(…)`, wherever it stands.
fn words_of<'a>(script: &'a str, name: &str) -> Vec<&'a str> {
    let mut words = Vec::new();
    for (open, close) in [("=\"", '"'), ("=(", ')')] {
        let start = format!("{name}{open}");
        for (at, _) in script.match_indices(&start) {
            let rest = &script[at + start.len()..];
            let end = rest.find(close).expect("an assignment ends");
            words.extend(rest[..end].split_whitespace());
        }
    }
    words
}

#[test]
fn tests_that_the_gpu_run_selects_exist() {
    let script = page("scripts/gpu/run.sh");
    let tests = backend_tests();
    assert!(tests.len() > 50, "the tests are found: {}", tests.len());
    for list in ["smoke", "watched", "names"] {
        let words = words_of(&script, list);
        assert!(words.len() >= 3, "the script's list `{list}`: {words:?}");
        for word in words {
            assert!(
                tests.iter().any(|test| test.contains(word)),
                "scripts/gpu/run.sh: no test of crates/cuda is named {word}"
            );
        }
    }
}

#[test]
fn the_gpu_archive_keeps_its_limit() {
    let script = page("scripts/gpu/build.sh");
    let limit = script
        .lines()
        .find_map(|line| line.strip_prefix("archive_bytes_max="));
    let limit = limit.and_then(|number| number.parse::<u64>().ok());
    assert_eq!(limit, Some(ARCHIVE_BYTES_MAX), "scripts/gpu/build.sh");
    let compared = "[ \"$bytes\" -gt \"$archive_bytes_max\" ]";
    assert!(
        script.contains(compared),
        "scripts/gpu/build.sh: {compared}"
    );
}
