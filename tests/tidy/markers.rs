//! The pages of invariants and lessons, made from markers beside tests.
//!
//! A marker is a comment right above a test, or above its entry in a list of scripts: `//
//! Invariant: I4, I21.` or `// Lesson: 2, 16.` The statements stand on the pages, the tests in the
//! code.

use super::{page, relative, rust_files};
use crate::root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

const INVARIANTS: &str = "docs/design/invariants.md";
const LESSONS: &str = "docs/design/lessons.md";

/// Columns of a line of tests.
const WIDTH: usize = 118;

/// Tests and their files, by the number that their marker names.
type Marked = BTreeMap<u32, BTreeSet<MarkedTest>>;

/// A test beside a marker; ordered by its file.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct MarkedTest {
    file: String,
    name: String,
}

/// The name of the test that a line begins: a function, or an entry in a list of scripts.
fn test_name(line: &str) -> Option<&str> {
    let line = line.trim();
    let function = line.split_once("fn ").map(|(_, rest)| rest);
    let word = function.unwrap_or(line);
    let end = word.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    let (name, rest) = word.split_at(end.unwrap_or(word.len()));
    let is_entry = rest.is_empty() || rest.starts_with([',', ';', ':']) || rest.starts_with(" =>");
    (!name.is_empty() && (function.is_some() || is_entry)).then_some(name)
}

/// The numbers of a marker, such as `I4, I21.`.
fn numbers(list: &str) -> impl Iterator<Item = u32> {
    let items = list.trim_end_matches('.').split(", ");
    items.map(move |item| {
        let digits = item.trim_start_matches('I').parse();
        digits.unwrap_or_else(|_| panic!("a marker names no number: {list}"))
    })
}

/// Invariants and lessons, with the tests that their markers stand beside.
fn marked() -> (Marked, Marked) {
    let (mut invariants, mut lessons) = (Marked::new(), Marked::new());
    let crates = rust_files(&root().join("crates")).into_iter();
    for path in crates.chain(rust_files(&root().join("tests"))) {
        if path.ends_with("tidy/markers.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("readable source");
        let mut pending: Vec<(bool, u32)> = Vec::new();
        for line in text.lines() {
            let trimmed = line.trim();
            if let Some(list) = trimmed.strip_prefix("// Invariant: ") {
                pending.extend(numbers(list).map(|number| (true, number)));
            } else if let Some(list) = trimmed.strip_prefix("// Lesson: ") {
                pending.extend(numbers(list).map(|number| (false, number)));
            } else if pending.is_empty() || trimmed.starts_with("//") || trimmed.starts_with("#[") {
                // Attributes and comments stand between a marker and its test.
            } else {
                let name = test_name(line).unwrap_or_else(|| {
                    panic!("{}: a marker above no test: {line}", relative(&path))
                });
                for (is_invariant, number) in pending.drain(..) {
                    let of = if is_invariant {
                        &mut invariants
                    } else {
                        &mut lessons
                    };
                    of.entry(number).or_default().insert(MarkedTest {
                        file: relative(&path),
                        name: name.to_owned(),
                    });
                }
            }
        }
    }
    (invariants, lessons)
}

/// The names of tests, sorted, each once.
fn in_code_font(tests: &BTreeSet<MarkedTest>) -> Vec<String> {
    let names: BTreeSet<&str> = tests.iter().map(|test| test.name.as_str()).collect();
    names.iter().map(|name| format!("`{name}`")).collect()
}

/// Each file of tests with the names of its tests after it.
fn by_file(tests: &BTreeSet<MarkedTest>) -> String {
    let mut files: BTreeMap<&str, String> = BTreeMap::new();
    for test in tests {
        let names = files.entry(&test.file).or_default();
        *names += &format!(" `{}`", test.name);
    }
    let files = files.iter();
    let cells: Vec<String> = files
        .map(|(file, names)| format!("`{file}`:{names}"))
        .collect();
    cells.join("; ")
}

/// The page with the tests of each invariant in the last cell of its row.
fn invariants_page(text: &str, marked: &Marked) -> String {
    let row = |line: &str| {
        let number = line.strip_prefix("| I")?.split_once(" |")?.0.parse().ok()?;
        let (rest, _) = line.trim_end_matches(" |").rsplit_once(" | ")?;
        let tests = marked.get(&number);
        let tests = tests.unwrap_or_else(|| panic!("invariant I{number}: no test has its marker"));
        Some(format!("{rest} | {} |", by_file(tests)))
    };
    let lines = text
        .lines()
        .map(|line| row(line).unwrap_or_else(|| line.to_owned()));
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

/// The page with the tests of each lesson below its text.
fn lessons_page(text: &str, marked: &Marked) -> String {
    let mut sections = text.split("\n### Lesson ");
    let mut page = sections.next().unwrap_or_default().to_owned();
    for section in sections {
        let number = section.lines().next().and_then(|line| line.parse().ok());
        let number: u32 = number.expect("a lesson's heading is its number");
        let (statement, rest) = section.split_once("\nTests: ").unwrap_or((section, ""));
        let after = rest.split_once("\n\n").map_or("", |(_, after)| after);
        let tests = marked.get(&number);
        let tests = tests.unwrap_or_else(|| panic!("lesson {number}: no test has its marker"));
        let mut lines = vec!["Tests:".to_owned()];
        for test in in_code_font(tests) {
            let line = lines.last_mut().expect("it has a first line");
            if line.len() + 1 + test.len() > WIDTH {
                lines.push(test);
            } else {
                *line += &format!(" {test}");
            }
        }
        page += &format!(
            "\n### Lesson {number}\n\n{}\n\n{}\n",
            body(statement),
            lines.join("\n")
        );
        if !after.is_empty() {
            page += &format!("\n{after}");
        }
    }
    page.trim_end().to_owned() + "\n"
}

/// A section's text without its heading.
fn body(section: &str) -> &str {
    section.split_once('\n').map_or("", |(_, body)| body).trim()
}

fn check(name: &str, made: &str) {
    if page(name) == made {
        return;
    }
    if std::env::var_os("UPDATE_PAGES").is_some() {
        fs::write(root().join(name), made).expect("the page can be written");
    } else {
        panic!(
            "{name} is not what the markers say: UPDATE_PAGES=1 cargo test -p cleave-cli --test rules the_page"
        );
    }
}

#[test]
fn the_page_of_invariants_lists_the_marked_tests() {
    let (invariants, _) = marked();
    let text = page(INVARIANTS);
    check(INVARIANTS, &invariants_page(&text, &invariants));
    for number in invariants.keys() {
        let row = format!("\n| I{number} |");
        assert!(
            text.contains(&row),
            "a marker names I{number}, which {INVARIANTS} does not have"
        );
    }
}

#[test]
fn the_page_of_lessons_lists_the_marked_tests() {
    let (_, lessons) = marked();
    let text = page(LESSONS);
    check(LESSONS, &lessons_page(&text, &lessons));
    for number in lessons.keys() {
        let heading = format!("\n### Lesson {number}\n");
        assert!(
            text.contains(&heading),
            "a marker names lesson {number}, which {LESSONS} does not have"
        );
    }
}
