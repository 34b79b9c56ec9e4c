//! Names in documents: flags in code font, and series.
//!
//! Owns: the comparison with `docs/cli.md` and `docs/metrics.md`, which other tests compare with
//! the binary. Never: checks a command line (see `commands`).

use super::assert_no_faults;
use super::pages::{pages, relative};
use crate::root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// (flag that `docs/cli.md` lacks, the reason why a page may name it)
const OTHER_FLAGS: [(&str, &str); 5] = [
    ("--check", "scripts that write tables compare them instead"),
    ("--long", "scripts/ci/clients/check.py"),
    ("--generators", "scripts/ci/clients/check.py"),
    ("--help", "every command has it, and the page leaves it out"),
    ("--stand-in", "scripts/gpu/run.sh"),
];

/// Endings that a scrape adds to the name of a histogram.
const HISTOGRAM_ENDINGS: [&str; 3] = ["_bucket", "_count", "_sum"];

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The cells of each row of a page's tables that begins with a code span.
fn rows(page: &str) -> impl Iterator<Item = Vec<&str>> {
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.split('|').skip(1).collect::<Vec<&str>>())
}

/// The flags in a text, without their values.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(['`', ' ', ',', '=', '[', '|']);
    words.filter(|word| word.len() > 2 && word.starts_with("--"))
}

#[test]
fn flags_in_code_font_exist() {
    let page = read("docs/cli.md");
    let mut known: BTreeSet<&str> = rows(&page).flat_map(|cells| flags(cells[0])).collect();
    assert!(known.len() > 100, "the flags are found");
    let mut unused = BTreeSet::new();
    for (flag, _) in OTHER_FLAGS {
        assert!(known.insert(flag), "{flag} is in docs/cli.md: drop its row");
        unused.insert(flag);
    }
    let mut faults = Vec::new();
    for page in pages() {
        let spans = page.code_spans().into_iter();
        for span in spans.filter(|span| span.starts_with("--")) {
            for flag in flags(&span) {
                unused.remove(flag);
                if !known.contains(flag) {
                    faults.push(format!("{}: no command has {flag}", page.name()));
                }
            }
        }
    }
    assert_no_faults(&faults);
    assert!(unused.is_empty(), "no page names {unused:?}: drop the row");
}

/// The files of a folder and of the folders in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("readable folder");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("readable folder").path())
        .collect();
    paths.sort();
    let (folders, mut files): (Vec<PathBuf>, Vec<PathBuf>) =
        paths.into_iter().partition(|path| path.is_dir());
    for folder in &folders {
        files.extend(self::files(folder));
    }
    files
}

/// Whether a word that begins as a series does is one, or the name of a crate.
fn is_known(word: &str, types: &BTreeMap<&str, &str>) -> bool {
    let mut bases = HISTOGRAM_ENDINGS
        .iter()
        .filter_map(|ending| word.strip_suffix(*ending));
    let package = word.trim_start_matches("cleave_").replace('_', "-");
    types.contains_key(word)
        || bases.any(|base| types.get(base) == Some(&"histogram"))
        || root().join("crates").join(package).is_dir()
}

#[test]
fn series_in_documents_and_the_chart_exist() {
    let page = read("docs/metrics.md");
    // A later table explains names that are close to each other.
    let types: BTreeMap<&str, &str> = rows(&page)
        .map(|cells| (cells[0].trim_matches([' ', '`']), cells[1].trim()))
        .filter(|(_, kind)| ["counter", "gauge", "histogram"].contains(kind))
        .collect();
    assert!(types.len() > 50, "the series are found");
    let pages = pages().into_iter().map(|page| page.path);
    let places: BTreeSet<PathBuf> = pages.chain(files(&root().join("helm"))).collect();
    let mut faults = Vec::new();
    for place in places {
        let text = fs::read_to_string(&place).expect("readable text");
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        // The bare beginning of all names is no name.
        let names = words.filter(|word| word.len() > "cleave_".len());
        for name in names.filter(|name| name.starts_with("cleave_")) {
            if !is_known(name, &types) {
                faults.push(format!(
                    "{}: docs/metrics.md has no {name}",
                    relative(&place)
                ));
            }
        }
    }
    assert_no_faults(&faults);
}
