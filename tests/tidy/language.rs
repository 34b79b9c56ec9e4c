//! The language of the code: names, comments and tests that a newcomer can read.

use super::{relative, rust_files};
use crate::root;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

/// Words that say nothing by themselves: a type is called by the thing that it is.
const VAGUE_NAMES: [&str; 24] = [
    "Asked", "Bench", "Common", "Desk", "Hands", "Helper", "Inner", "Kept", "Known", "Manager",
    "Place", "Said", "Seat", "Seen", "Shelf", "State", "Still", "Thing", "Told", "Types", "Utils",
    "Wanted", "Way", "Wish",
];

/// Words that no comment begins with: its subject is a noun.
pub(crate) const VAGUE_BEGINNINGS: [&str; 8] = [
    "What",
    "Who",
    "Whoever",
    "Whom",
    "Whose",
    "Those",
    "Which",
    "Where it is",
];

/// Columns of a comment.
const COMMENT_WIDTH: usize = 100;

const TEST_NAME_MAX: usize = 60;

/// A doc comment of fewer words repeats the name that it stands above.
const DOC_WORDS_MIN: usize = 4;

fn sources() -> Vec<(PathBuf, String)> {
    let crates = rust_files(&root().join("crates")).into_iter();
    let files = crates.chain(rust_files(&root().join("tests")));
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("readable source");
        (path, text)
    };
    files.map(read).collect()
}

/// Fails with every fault of a rule, a line each.
fn none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

/// The name of the type that a line defines.
fn defined_type(line: &str) -> Option<&str> {
    let mut words = line.trim_start();
    for prefix in ["pub ", "pub(crate) ", "pub(super) ", "unsafe "] {
        words = words.strip_prefix(prefix).unwrap_or(words);
    }
    let kinds = ["struct ", "enum ", "trait ", "union "];
    let rest = kinds.iter().find_map(|kind| words.strip_prefix(kind));
    // An indented alias may be an associated type, whose name its trait chose.
    let alias = words
        .strip_prefix("type ")
        .filter(|_| !line.starts_with(' '));
    let rest = rest.or(alias)?;
    let end = rest
        .find(|c: char| !c.is_alphanumeric())
        .unwrap_or(rest.len());
    let name = &rest[..end];
    // A parameter of a type, or an alias for one, may be a letter.
    (name.len() > 1 && name.starts_with(char::is_uppercase)).then_some(name)
}

/// Stand-ins for other platforms have the names of what they stand for.
fn is_stand_in(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name == Some("unsupported.rs")
}

#[test]
fn a_type_name_has_one_meaning() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in sources() {
        if is_stand_in(&path) {
            continue;
        }
        let names = text.lines().filter_map(defined_type);
        for name in names {
            let place = relative(&path);
            places.entry(name.to_owned()).or_default().push(place);
        }
    }
    let repeated = places.iter().filter(|(_, places)| places.len() > 1);
    let repeated: Vec<_> = repeated
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect();
    none(&repeated);
    let vague = VAGUE_NAMES
        .iter()
        .filter_map(|name| Some((name, places.get(*name)?)));
    let vague: Vec<_> = vague
        .map(|(name, places)| {
            format!(
                "{}: {name}: call the type by the thing that it is",
                places[0]
            )
        })
        .collect();
    none(&vague);
}

#[test]
fn test_names_are_short_rules() {
    let mut faults = Vec::new();
    for (path, text) in sources() {
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            if line == "#[test]" || line.starts_with("#[tokio::test") {
                is_test = true;
            } else if is_test && let Some((_, rest)) = line.split_once("fn ") {
                is_test = false;
                let name = rest.split('(').next().unwrap_or_default();
                if name.len() > TEST_NAME_MAX {
                    faults.push(format!(
                        "{}: {name}: at most {TEST_NAME_MAX} letters",
                        relative(&path)
                    ));
                }
                if name.starts_with("lesson_") {
                    faults.push(format!(
                        "{}: {name}: a lesson's number stands in a marker",
                        relative(&path)
                    ));
                }
            }
        }
    }
    none(&faults);
}

/// The text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = ["///", "//!", "//"]
        .iter()
        .find_map(|mark| line.strip_prefix(mark))?;
    Some(text.trim())
}

#[test]
fn comments_begin_with_their_subject_and_fit_a_line() {
    let mut faults = Vec::new();
    for (path, text) in sources() {
        let mut is_first = true;
        for (number, line) in text.lines().enumerate() {
            let place = || format!("{}:{}", relative(&path), number + 1);
            let Some(words) = comment(line) else {
                is_first = true;
                continue;
            };
            let begins = |start: &str| {
                let rest = words.strip_prefix(start);
                rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
            };
            if is_first && let Some(start) = VAGUE_BEGINNINGS.iter().find(|start| begins(start)) {
                faults.push(format!(
                    "{}: a comment begins with its subject, not with {start}",
                    place()
                ));
            }
            if line.chars().count() > COMMENT_WIDTH {
                faults.push(format!(
                    "{}: a comment is wider than {COMMENT_WIDTH} columns",
                    place()
                ));
            }
            is_first = words.is_empty();
        }
    }
    none(&faults);
}

#[test]
fn docs_add_to_the_name() {
    let mut faults = Vec::new();
    for (path, text) in sources() {
        let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
        for (index, line) in lines.iter().enumerate() {
            let is_doc = |line: Option<&&str>| line.is_some_and(|line| line.starts_with("///"));
            let Some(doc) = line.strip_prefix("///") else {
                continue;
            };
            let is_alone =
                !is_doc(lines.get(index + 1)) && (index == 0 || !is_doc(lines.get(index - 1)));
            if is_alone && doc.split_whitespace().count() < DOC_WORDS_MIN {
                faults.push(format!(
                    "{}:{}: {line}: say more, or nothing",
                    relative(&path),
                    index + 1
                ));
            }
        }
    }
    none(&faults);
}

#[test]
fn folder_docs_state_what_they_own_and_never_do() {
    let mut faults = Vec::new();
    for path in rust_files(&root().join("crates")) {
        let name = relative(&path);
        if !name.contains("/src/") || !(name.ends_with("/mod.rs") || name.ends_with("/lib.rs")) {
            continue;
        }
        let text = fs::read_to_string(&path).expect("readable source");
        let head: String = text
            .lines()
            .take_while(|line| line.starts_with("//!"))
            .collect();
        for word in ["Owns", "Never"] {
            if !head.contains(word) {
                faults.push(format!("{name}: its head does not say `{word}:`"));
            }
        }
    }
    none(&faults);
}

#[test]
fn parameters_have_names_of_their_own() {
    let mut faults = Vec::new();
    for (path, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            let is_parameter = line.contains("fn ") || line.starts_with(' ');
            if is_parameter && tuple_parameter(line) {
                faults.push(format!(
                    "{}:{}: a tuple pattern as a parameter: name the parameters, or make a struct",
                    relative(&path),
                    number + 1
                ));
            }
        }
    }
    none(&faults);
}

/// Whether a line has a parameter such as `(a, b): (A, B)`, and is no `let` and no closure.
fn tuple_parameter(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let Some(at) = code.find("): (") else {
        return false;
    };
    let before = &code[..at];
    let start = before.rfind('(').unwrap_or(0);
    let outside = &before[..start];
    let is_pattern = before[start..].contains(',');
    is_pattern && !outside.contains("let ") && !outside.contains('|') && !outside.contains("for ")
}

/// Words of earlier names and the glossary's words for the same things.
const PRIVATE_WORDS: [(&str, &str); 34] = [
    ("brought", "loaded block"),
    ("crowd", "memory pressure"),
    ("desk", "the thing itself"),
    ("dice", "rng"),
    ("ears", "inbox"),
    ("errand", "outbound link"),
    ("fate", "outcome"),
    ("fates", "outcomes"),
    ("flaw", "diagnostic"),
    ("flies", "is running"),
    ("hands", "effects"),
    ("hear", "receive"),
    ("heard", "received"),
    ("hears", "receives"),
    ("incomings", "pending loads"),
    ("keeper", "tier I/O"),
    ("outlook", "forecast"),
    ("parcel", "message"),
    ("placing", "placement"),
    ("porter", "KV copier"),
    ("promise", "reservation or claim"),
    ("promises", "reservations"),
    ("prospect", "forecast"),
    ("said", "output, log or report"),
    ("say", "report"),
    ("says", "message or explanation"),
    ("seat", "slot"),
    ("seats", "slots"),
    ("shelf", "tier pool"),
    ("shelving", "offload"),
    ("tell", "send, notify or report"),
    ("told", "sent or reported"),
    ("wish", "request"),
    ("wishes", "requests"),
];

/// Source text without comments and without the contents of strings; lines stay lines.
fn code_alone(text: &str) -> String {
    let (mut code, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(c) = rest.chars().next() {
        let skipped = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '\'' if rest.starts_with("'\"'") => 3,
            '"' => 1 + string_end(&rest[1..], &code),
            _ => {
                code.push(c);
                rest = &rest[c.len_utf8()..];
                continue;
            }
        };
        code.extend(rest[..skipped].matches('\n'));
        code.push(' ');
        rest = &rest[skipped..];
    }
    code
}

/// The bytes of a string from after its opening quote to after its closing one; `before` is the
/// code before it, which tells whether the string is raw.
fn string_end(text: &str, before: &str) -> usize {
    let opened = before.trim_end_matches('#');
    if opened.ends_with('r') {
        let close = format!("\"{}", "#".repeat(before.len() - opened.len()));
        return text.find(&close).map_or(text.len(), |at| at + close.len());
    }
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        if c == '"' && !is_escaped {
            return at + 1;
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    text.len()
}

#[test]
fn identifiers_use_the_glossary() {
    let mut faults = Vec::new();
    let private = HashMap::from(PRIVATE_WORDS);
    for (path, text) in sources() {
        for (index, line) in code_alone(&text).lines().enumerate() {
            for name in line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
                let word = name
                    .split('_')
                    .find_map(|part| private.get_key_value(part));
                if let Some((word, better)) = word {
                    faults.push(format!(
                        "{}:{}: {name}: instead of {word}, {better}",
                        relative(&path),
                        index + 1
                    ));
                }
            }
        }
    }
    none(&faults);
}

#[test]
fn code_alone_has_no_strings_and_no_comments() {
    let source =
        "let said = r#\"told \"tell\"#; // hear\nlet b = '\"'; let c = \"say \\\" \n seat\"; wish";
    let code = code_alone(source);
    assert_eq!(code.lines().count(), source.lines().count(), "{code}");
    let words: Vec<&str> = code.split_whitespace().collect();
    assert_eq!(
        words,
        [
            "let", "said", "=", "r#", ";", "let", "b", "=", ";", "let", "c", "=", ";", "wish"
        ]
    );
}
