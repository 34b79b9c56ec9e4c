//! Checks of the documents: links resolve, commands exist, pages can be found and keep their
//! limits.
//!
//! Owns: the rules for every Markdown page of the repository, and `docs/cli.md`. Never: judges a
//! sentence. Invariant: a failure names the page and its fault.

mod cli_page;
mod commands;
mod names;
mod pages;

use crate::root;
use commands::BinaryCommands;
use pages::{MarkdownPage, pages, relative};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Most lines of these pages.
const LINES_MAX: [(&str, usize); 2] = [("README.md", 200), ("ARCHITECTURE.md", 300)];

/// Most entries of the glossary.
const WORDS_MAX: usize = 90;

/// Folders whose paths documents may name.
const FOLDERS: [&str; 9] = [
    "assets/",
    "crates/",
    "docs/",
    "helm/",
    "kernels/",
    "proto/",
    "scripts/",
    "testdata/",
    "tests/",
];

/// Fails with all faults of a rule, a line each.
fn assert_no_faults(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

// Lesson: 31.
#[test]
fn relative_links_and_anchors_resolve() {
    let pages = pages();
    assert!(pages.len() > 50, "the pages are found");
    let anchors: BTreeMap<PathBuf, BTreeSet<String>> = pages
        .iter()
        .map(|page| (page.path.clone(), page.anchors()))
        .collect();
    let mut faults = Vec::new();
    for page in &pages {
        for link in page.links() {
            let target = page.target(&link);
            if !target.path.exists() {
                faults.push(format!("{}: nothing at {link}", page.name()));
                continue;
            }
            let Some(anchor) = target.anchor else {
                continue;
            };
            let page_anchors = anchors.get(&target.path);
            if page_anchors.is_none_or(|page_anchors| !page_anchors.contains(&anchor)) {
                faults.push(format!("{}: no heading for {link}", page.name()));
            }
        }
    }
    assert_no_faults(&faults);
}

#[test]
fn every_page_is_two_clicks_from_the_readme() {
    let pages = pages();
    let by_path: BTreeMap<PathBuf, &MarkdownPage> =
        pages.iter().map(|p| (p.path.clone(), p)).collect();
    let from = |path: &PathBuf| -> BTreeSet<PathBuf> {
        let links = by_path
            .get(path)
            .map(|page| page.pages())
            .unwrap_or_default();
        links.into_iter().collect()
    };
    let first = from(&root().join("README.md"));
    let second: BTreeSet<PathBuf> = first.iter().flat_map(from).collect();
    let lost: Vec<String> = pages
        .iter()
        .filter(|page| page.name().starts_with("docs/"))
        .filter(|page| !first.contains(&page.path) && !second.contains(&page.path))
        .map(|page| format!("{}: more than two clicks from README.md", page.name()))
        .collect();
    assert_no_faults(&lost);
}

#[test]
fn readme_and_architecture_keep_their_line_limits() {
    for (name, lines_max) in LINES_MAX {
        let text = fs::read_to_string(root().join(name)).expect("the page is there");
        let lines = text.lines().count();
        assert!(
            lines <= lines_max,
            "{name}: {lines} lines, {lines_max} at most"
        );
    }
}

// Lesson: 31.
#[test]
fn commands_in_documents_exist() {
    let commands = BinaryCommands::of_the_binary();
    let mut faults = Vec::new();
    let mut checked = 0;
    for page in pages() {
        for line in page.command_lines() {
            for words in commands::calls(&line) {
                checked += 1;
                if let Err(fault) = commands.check(&words) {
                    faults.push(format!("{}: {fault}: {line}", page.name()));
                }
            }
        }
    }
    assert_no_faults(&faults);
    assert!(checked > 50, "the command lines are found: {checked}");
}

/// The commands of the guide on policies answer as they stand there.
#[test]
fn checks_in_the_guide_on_policies_pass() {
    let pages = pages();
    let guide = pages
        .iter()
        .find(|page| page.name() == "docs/guides/slo-policy.md");
    let lines = guide.expect("the guide is there").command_lines();
    let calls = lines.iter().flat_map(|line| commands::calls(line));
    let checks: Vec<Vec<String>> = calls.filter(|words| words[0] == "check").collect();
    assert!(
        checks.iter().flatten().any(|word| word == "--devices"),
        "a fleet is simulated: {checks:?}"
    );
    for words in checks {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleave"));
        command
            .args(&words)
            .env_remove("CLEAVE_MODEL")
            .env_remove("CLEAVE_POLICY");
        let output = command.current_dir(root()).output().expect("cleave starts");
        let stdout = String::from_utf8_lossy(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {stdout}{error}");
        let expected = if words.iter().any(|word| word == "--devices") {
            "interactive"
        } else {
            "no mistakes"
        };
        assert!(stdout.contains(expected), "{words:?}: {stdout}{error}");
    }
}

#[test]
fn cli_page_matches_the_binary() {
    let page = cli_page::page();
    let path = root().join("docs/cli.md");
    if std::env::var_os("UPDATE_CLI").is_some() {
        fs::write(&path, &page).expect("the page can be written");
    }
    let stored = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == page,
        "docs/cli.md is old: UPDATE_CLI=1 cargo test -p cleave-cli --test rules cli_page"
    );
}

/// A path in code font exists; `file.rs::name` has a function of that name.
#[test]
fn paths_and_functions_in_documents_exist() {
    let mut faults = Vec::new();
    for page in pages() {
        for span in page.code_spans() {
            let named = FOLDERS.iter().any(|folder| span.starts_with(folder));
            if !named || span.contains(['*', '{', ' ', '…']) {
                continue;
            }
            let (path, function) = match span.split_once("::") {
                Some((path, function)) => (path, Some(function)),
                None => (span.as_str(), None),
            };
            let file = root().join(path);
            if !file.exists() {
                faults.push(format!("{}: nothing at {path}", page.name()));
                continue;
            }
            let Some(function) = function else {
                continue;
            };
            let source = fs::read_to_string(&file).expect("a source file");
            let starts = [format!("fn {function}("), format!("fn {function}<")];
            if !starts.iter().any(|start| source.contains(start)) {
                faults.push(format!("{}: no function {function} in {path}", page.name()));
            }
        }
    }
    assert_no_faults(&faults);
}

#[test]
fn readme_and_ci_use_the_same_test_command() {
    let command = "cargo test --workspace";
    for name in ["README.md", ".ci/run"] {
        let text = fs::read_to_string(root().join(name)).expect("the file is there");
        let has = text
            .lines()
            .any(|line| line.trim_start().starts_with(command));
        assert!(has, "{name}: no line with {command}");
    }
}

#[test]
fn each_word_of_the_glossary_has_one_meaning() {
    let path = root().join("docs/contributing/glossary.md");
    let text = fs::read_to_string(&path).expect("the glossary is there");
    let rows = text.lines().filter(|line| line.starts_with("| "));
    let words: Vec<&str> = rows
        .filter_map(|row| row.split('|').nth(1).map(str::trim))
        .filter(|word| *word != "word")
        .collect();
    let unique: BTreeSet<&str> = words.iter().copied().collect();
    assert_eq!(
        unique.len(),
        words.len(),
        "{}: a word stands twice",
        relative(&path)
    );
    assert!(
        words.len() <= WORDS_MAX,
        "{} words, {WORDS_MAX} at most",
        words.len()
    );
}
