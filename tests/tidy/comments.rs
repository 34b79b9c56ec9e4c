//! The language of comments outside Rust: scenarios, protocols, kernels, the chart and scripts.

use super::language::VAGUE_BEGINNINGS;
use super::{relative, root};
use std::fs;
use std::path::{Path, PathBuf};

/// Files and folders whose comments follow the rules.
const PLACES: [&str; 17] = [
    ".ci/run",
    "Cargo.toml",
    "Dockerfile",
    "assets/policy.yaml",
    "clippy.toml",
    "crates/emulator/src/cpp",
    "crates/emulator/tests/kernels",
    "crates/router/tests/scenarios",
    "deny.toml",
    "helm",
    "kernels",
    "proto",
    "rustfmt.toml",
    "scripts",
    "testdata/alerts",
    "tests/fuzz/Cargo.toml",
    "tests/openai",
];

/// Endings of files with comments by `#`; files without an ending have them too.
const HASH: [&str; 8] = ["cfg", "conf", "py", "sh", "toml", "tpl", "txt", "yaml"];

/// Endings of files with comments by `//`.
const SLASHES: [&str; 6] = ["cpp", "cu", "cuh", "h", "mjs", "proto"];

/// Words that hide the subject of a sentence: a comment names the worker, the client or the slot.
const VAGUE_WORDS: [&str; 7] = [
    "anybody",
    "everybody",
    "nobody",
    "seat",
    "seats",
    "somebody",
    "whoever",
];

/// Columns of a line that is a comment.
const COMMENT_WIDTH: usize = 120;

/// One comment: its first line, and its lines joined by blanks.
struct Comment {
    line: usize,
    text: String,
}

fn files_of(place: &Path) -> Vec<PathBuf> {
    if place.is_file() {
        return vec![place.to_path_buf()];
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(place).expect("a folder of the repository") {
        let path = entry.expect("readable folder").path();
        let is_cache = path.ends_with("__pycache__") || path.ends_with("target");
        if !is_cache {
            files.extend(files_of(&path));
        }
    }
    files.sort();
    files
}

/// The mark with which comments of the file begin; none for data and documents.
fn mark_of(path: &Path) -> Option<&'static str> {
    let Some(ending) = path.extension().and_then(|ending| ending.to_str()) else {
        let name = path.file_name()?.to_str()?;
        return (!name.starts_with('.')).then_some("#");
    };
    if SLASHES.contains(&ending) {
        return Some("//");
    }
    HASH.contains(&ending).then_some("#")
}

/// The text of a line that is a comment, or that begins a template's comment or a docstring.
fn whole_line<'a>(line: &'a str, mark: &str) -> Option<&'a str> {
    let line = line.trim();
    if line.starts_with("#!") {
        return None;
    }
    let marks = [mark, "{{/*", "{{- /*", "\"\"\""];
    let text = marks.iter().find_map(|mark| line.strip_prefix(mark))?;
    let text = text.trim_start_matches(mark).trim();
    // A row of the chart's table of values begins with two hyphens.
    Some(text.strip_prefix("-- ").unwrap_or(text))
}

/// Whether a block of several lines, a docstring or a template's comment, is open after the line.
fn is_open_after(line: &str, was_open: bool) -> bool {
    let quotes = line.matches("\"\"\"").count();
    let opens = line.contains("{{/*") || line.contains("{{- /*");
    if quotes % 2 == 1 || opens || line.contains("*/") {
        !was_open && !line.contains("*/")
    } else {
        was_open
    }
}

/// The text of each line that is a comment or a part of one.
fn comment_lines<'a>(text: &'a str, mark: &str) -> Vec<Option<&'a str>> {
    let (mut is_open, mut is_comment) = (false, false);
    let read = |line: &'a str| {
        let was_open = is_open;
        is_open = is_open_after(line, was_open);
        let begins = whole_line(line, mark);
        if was_open {
            return is_comment.then(|| line.trim());
        }
        // A string in triple quotes that stands right of a name is no docstring.
        is_comment = begins.is_some();
        begins
    };
    text.lines().map(read).collect()
}

/// The comments of a file in order: whole lines joined to paragraphs, and ends of lines of code.
fn comments(text: &str, mark: &str) -> Vec<Comment> {
    let mut found: Vec<Comment> = Vec::new();
    let mut is_open = false;
    for (index, (line, words)) in text.lines().zip(comment_lines(text, mark)).enumerate() {
        let whole = words.is_some();
        let end = || Some(line.split_once(&format!(" {mark} "))?.1.trim());
        let Some(words) = words.or_else(end) else {
            is_open = false;
            continue;
        };
        match found.last_mut() {
            Some(last) if is_open && whole => {
                last.text.push(' ');
                last.text.push_str(words);
            }
            _ => found.push(Comment {
                line: index + 1,
                text: words.to_owned(),
            }),
        }
        is_open = whole && !words.is_empty();
    }
    found
}

/// The faults of a comment's sentences.
fn faults_of(text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for (index, sentence) in text.split(". ").enumerate() {
        let is_vague = |start: &&&str| {
            let head = sentence.get(..start.len()).unwrap_or_default();
            // An end of a line of code may begin with a small letter.
            let is_same = head == **start || index == 0 && head.eq_ignore_ascii_case(start);
            let rest = sentence.get(start.len()..).unwrap_or_default();
            is_same && !rest.starts_with(char::is_alphanumeric)
        };
        if let Some(start) = VAGUE_BEGINNINGS.iter().find(is_vague) {
            faults.push(format!(
                "a sentence begins with its subject, not with {start}"
            ));
        }
    }
    let words = text.split(|c: char| !c.is_alphanumeric());
    for word in words.map(str::to_lowercase) {
        if VAGUE_WORDS.contains(&word.as_str()) {
            faults.push(format!("name the thing that \"{word}\" stands for"));
        }
    }
    faults
}

#[test]
fn comments_outside_rust_name_their_subject() {
    let mut faults = Vec::new();
    for path in PLACES
        .iter()
        .flat_map(|place| files_of(&root().join(place)))
    {
        let Some(mark) = mark_of(&path) else {
            continue;
        };
        let name = relative(&path);
        let text = fs::read_to_string(&path).expect("readable text");
        for comment in comments(&text, mark) {
            let of = faults_of(&comment.text).into_iter();
            faults.extend(of.map(|fault| format!("{name}:{}: {fault}", comment.line)));
        }
        let lines = text.lines().zip(comment_lines(&text, mark)).enumerate();
        for (index, (line, words)) in lines {
            if words.is_some() && line.chars().count() > COMMENT_WIDTH {
                let number = index + 1;
                faults.push(format!(
                    "{name}:{number}: a comment is wider than {COMMENT_WIDTH} columns"
                ));
            }
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}
