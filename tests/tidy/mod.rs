//! House rules that a compiler does not check.
//!
//! Owns: the comparison of the code with ARCHITECTURE.md (crate table) and docs/design (invariants,
//! lessons), the bans, and the rules for names and comments.
//! Never: fixes anything. Each failure names the file and the remedy.

mod comments;
mod doc_examples;
mod kernels;
mod language;
mod markers;

use crate::root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Crates whose behaviour is a function of their inputs.
const PURE: [&str; 8] = [
    "domain", "kv", "models", "sched", "router", "planner", "sim", "testkit",
];

/// External dependencies allowed in a pure crate: none of them reads a clock, a socket or a file.
const PURE_DEPENDENCIES: [&str; 7] = [
    "blake3",
    "postcard",
    "serde",
    "serde_json",
    "subtle",
    "thiserror",
    "twox-hash",
];

/// (text, reason of its ban in a pure crate and its replacement)
const PURE_BANS: [(&str, &str); 14] = [
    (
        "tokio",
        "async belongs to the bodies: gateway, worker, fleet",
    ),
    ("std::net", "sockets belong to fleet, server and transfer"),
    (
        "std::fs",
        "files belong to cli, policy, telemetry and worker",
    ),
    ("std::env", "configuration is handed in"),
    ("std::thread", "threads belong to worker and cpu"),
    ("Mutex", "a brain has one owner"),
    ("RwLock", "a brain has one owner"),
    ("Atomic", "a brain has one owner"),
    ("Instant", "time is handed in as domain::Time"),
    ("SystemTime", "time is handed in as domain::Time"),
    ("HashMap", "randomly seeded; use BTreeMap"),
    ("HashSet", "randomly seeded; use BTreeSet"),
    ("prometheus", "facts leave as Note"),
    ("println!", "facts leave as Note"),
];

/// The only places that may contain `unsafe`.
const UNSAFE_HOMES: [&str; 10] = [
    "crates/api/tests/bodies.rs",
    "crates/cpu/",
    "crates/cpu-kernels/",
    "crates/cuda/",
    "crates/emulator/",
    "crates/transfer/src/transports/nixl/hostile/",
    "crates/transfer/src/transports/nixl/process_exit.rs",
    "crates/transfer/src/transports/nixl/library.rs",
    "crates/transfer/src/transports/shm/ring.rs",
    "crates/checkpoint/src/map.rs",
];

/// Engines see slots, block indices and token ids.
const ENGINE_BANS: [&str; 8] = [
    "Slo",
    "Request",
    "WorkerId",
    "RouterId",
    "FlightId",
    "HandoffId",
    "Order",
    "Report",
];

fn page(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else {
        return files;
    };
    for entry in entries {
        let path = entry.expect("readable folder").path();
        if path.is_dir() && path.file_name().is_none_or(|name| name != "target") {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root())
        .expect("inside the repository")
        .display()
        .to_string()
}

/// A file's lines outside comments, up to its unit tests.
fn code_lines(path: &Path) -> Vec<(usize, String)> {
    let text = fs::read_to_string(path).expect("readable source");
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("#[cfg(test)]") {
            break;
        }
        let code = line.split("//").next().unwrap_or_default();
        if !code.trim().is_empty() {
            lines.push((number + 1, code.to_owned()));
        }
    }
    lines
}

/// Whether `word` stands in `code` as a word of its own.
fn has_word(code: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// Rows of the Markdown table whose header starts with `first`, cells trimmed of blanks and ticks.
fn table(text: &str, first: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| -> Vec<String> {
        line.trim()
            .trim_matches('|')
            .split('|')
            .map(|cell| cell.trim().replace('`', ""))
            .collect()
    };
    text.lines()
        .skip_while(|line| !(line.starts_with('|') && cells(line)[0] == first))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(cells)
        .collect()
}

fn our_packages() -> Vec<cargo_metadata::Package> {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata runs");
    metadata.packages
}

fn our_dependencies() -> BTreeMap<String, BTreeMap<String, bool>> {
    let short = |name: &str| name.strip_prefix("cleave-").map(str::to_owned);
    our_packages()
        .iter()
        .map(|package| {
            let dependencies = package
                .dependencies
                .iter()
                .filter(|dependency| dependency.kind == cargo_metadata::DependencyKind::Normal)
                .map(|dependency| {
                    let own_name = short(&dependency.name);
                    (
                        own_name.clone().unwrap_or(dependency.name.clone()),
                        own_name.is_some(),
                    )
                })
                .collect();
            let name = short(&package.name).unwrap_or(package.name.to_string());
            (name, dependencies)
        })
        .collect()
}

#[test]
fn crate_table_matches_cargo_metadata() {
    let rows = table(&page("ARCHITECTURE.md"), "crate");
    let stated: BTreeMap<String, BTreeSet<String>> = rows
        .iter()
        .map(|row| {
            let imports = row[2]
                .split([' ', ','])
                .filter(|name| !name.is_empty() && *name != "-");
            (row[0].clone(), imports.map(str::to_owned).collect())
        })
        .collect();
    let actual: BTreeMap<String, BTreeSet<String>> = our_dependencies()
        .into_iter()
        .map(|(name, dependencies)| {
            (
                name,
                dependencies
                    .into_iter()
                    .filter(|(_, is_own)| *is_own)
                    .map(|(name, _)| name)
                    .collect(),
            )
        })
        .collect();
    assert_eq!(
        stated, actual,
        "left: ARCHITECTURE.md's crate table, right: cargo metadata"
    );
}

#[test]
fn pure_crates_depend_on_nothing_impure() {
    for (name, dependencies) in our_dependencies() {
        if !PURE.contains(&name.as_str()) {
            continue;
        }
        for (dependency, is_own) in dependencies {
            let allowed = if is_own {
                PURE.contains(&dependency.as_str())
            } else {
                PURE_DEPENDENCIES.contains(&dependency.as_str())
            };
            assert!(allowed, "pure crate {name} depends on {dependency}");
        }
    }
}

#[test]
fn pure_crates_name_nothing_impure() {
    for name in PURE {
        for path in rust_files(&root().join("crates").join(name).join("src")) {
            for (number, code) in code_lines(&path) {
                for (word, instead) in PURE_BANS {
                    assert!(
                        !code.contains(word),
                        "{}:{number}: `{word}`: {instead}",
                        relative(&path)
                    );
                }
            }
        }
    }
}

#[test]
fn engine_crates_name_no_request_types() {
    for name in [
        "models",
        "checkpoint",
        "engine",
        "cpu-kernels",
        "cpu",
        "cuda",
    ] {
        for path in rust_files(&root().join("crates").join(name).join("src")) {
            for (number, code) in code_lines(&path) {
                for word in ENGINE_BANS {
                    assert!(
                        !has_word(&code, word),
                        "{}:{number}: an engine knows no {word}",
                        relative(&path)
                    );
                }
            }
        }
    }
}

/// Workers use `text` too, so it knows neither a server nor a runtime.
#[test]
fn text_knows_no_server_and_reads_one_folder() {
    let dependencies = our_dependencies();
    for banned in ["axum", "hyper", "tokio", "tonic"] {
        assert!(
            !dependencies["text"].contains_key(banned),
            "crate text depends on {banned}"
        );
    }
    for path in rust_files(&root().join("crates/text/src")) {
        for (number, code) in code_lines(&path) {
            // The second one is a test.
            let is_reader = ["/model_files.rs", "/reference.rs"];
            let is_reader = is_reader.iter().any(|end| relative(&path).ends_with(end));
            assert!(
                is_reader || !code.contains("fs::"),
                "{}:{number}: only ModelFiles::read reads files",
                relative(&path)
            );
        }
    }
}

/// Names of the test binaries that a manifest gives a reason for: the comment above `[[test]]`.
fn explained_test_binaries(manifest: &str) -> BTreeSet<&str> {
    let blocks = manifest.split("\n\n");
    let explained = blocks.filter(|block| {
        let mut lines = block.trim().lines();
        let first = lines.next().unwrap_or_default();
        first.starts_with("# ") && lines.any(|line| line == "[[test]]")
    });
    explained
        .filter_map(|block| block.split("name = \"").nth(1)?.split('"').next())
        .collect()
}

/// Each binary is linked with all that its crate needs, which takes most of the time of a build.
#[test]
fn a_crate_has_one_integration_binary() {
    for package in our_packages() {
        let manifest = fs::read_to_string(&package.manifest_path).expect("a manifest");
        let explained = explained_test_binaries(&manifest);
        let unexplained: Vec<&str> = package
            .targets
            .iter()
            .filter(|target| target.is_test() && !explained.contains(target.name.as_str()))
            .map(|target| target.name.as_str())
            .collect();
        assert!(
            unexplained.len() <= 1,
            "{}: {unexplained:?} are integration binaries: make them modules of one, or say above \
             `[[test]]` why one is apart",
            package.name
        );
    }
}

/// Whether a source file declares this module.
fn declares(source: &Path, module: &str) -> bool {
    let text = fs::read_to_string(source).unwrap_or_default();
    let declaration = format!("mod {module};");
    let visibility = ["pub(crate) ", "pub "];
    text.lines().any(|line| {
        let stripped = visibility.iter().find_map(|word| line.strip_prefix(word));
        stripped.unwrap_or(line) == declaration
    })
}

/// Cargo compiles only the listed binaries, so a file without a `mod` line would never run.
#[test]
fn each_file_of_tests_is_a_module_of_a_binary() {
    let targets: Vec<PathBuf> = our_packages()
        .iter()
        .flat_map(|package| &package.targets)
        .filter(|target| target.is_test())
        .map(|target| fs::canonicalize(&target.src_path).expect("the target has a source"))
        .collect();
    let crates = rust_files(&root().join("crates")).into_iter();
    let crates = crates.filter(|path| relative(path).split('/').nth(2) == Some("tests"));
    // Fuzz targets are programs of a workspace of their own.
    let system = rust_files(&root().join("tests")).into_iter();
    let system = system.filter(|path| !relative(path).starts_with("tests/fuzz/"));
    for path in crates.chain(system) {
        let path = fs::canonicalize(path).expect("it was just found");
        if targets.contains(&path) {
            continue;
        }
        let is_folder = path.ends_with("mod.rs");
        let module = if is_folder {
            path.parent()
        } else {
            Some(&*path)
        };
        let module = module.expect("a file is in a folder");
        let folder = module.parent().expect("it is in the repository");
        let name = module.file_stem().and_then(|name| name.to_str());
        let name = name.expect("a module's name is text");
        let of_folder = folder.join("mod.rs");
        let mut parents = targets
            .iter()
            .filter(|target| target.parent() == Some(folder));
        assert!(
            declares(&of_folder, name) || parents.any(|target| declares(target, name)),
            "{}: no test binary has `mod {name};`",
            path.display()
        );
    }
}

/// Names of families of models, as their crates' code would test for them.
const FAMILY_NAMES: [&str; 27] = [
    "cohere",
    "cohere2",
    "exaone4",
    "gemma",
    "gemma2",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "llama",
    "minimax_m2",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
];

#[test]
fn families_of_models_are_named_in_models_alone() {
    for name in [
        "checkpoint",
        "engine",
        "cpu-kernels",
        "cpu",
        "cuda",
        "planner",
    ] {
        for path in rust_files(&root().join("crates").join(name).join("src")) {
            // Synthetic checkpoints are of named families.
            let name = relative(&path);
            if name.starts_with("crates/checkpoint/src/synth/") {
                continue;
            }
            for (number, code) in code_lines(&path) {
                let code = code.to_lowercase();
                for family in FAMILY_NAMES {
                    assert!(
                        !has_word(&code, family),
                        "{name}:{number}: {family}: only crates/models tests for a family"
                    );
                }
            }
        }
    }
}

#[test]
fn unsafe_code_stays_in_its_listed_files() {
    // clippy's undocumented_unsafe_blocks checks that each block gives its reason.
    for path in rust_files(&root().join("crates")) {
        let name = relative(&path);
        for (number, code) in code_lines(&path) {
            let at_home = UNSAFE_HOMES.iter().any(|home| name.starts_with(home));
            assert!(
                at_home || !has_word(&code, "unsafe"),
                "{name}:{number}: unsafe outside its homes"
            );
        }
    }
}

#[test]
fn files_open_with_docs_and_keep_the_line_limit() {
    for path in rust_files(&root().join("crates")) {
        let name = relative(&path);
        let text = fs::read_to_string(&path).expect("readable source");
        assert!(
            text.starts_with("//!"),
            "{name}: open with `//!`: what it owns, what it never does"
        );
        let is_source = name.contains("/src/");
        let lines = text
            .lines()
            .take_while(|line| !line.starts_with("#[cfg(test)]"))
            .count();
        assert!(
            !is_source || lines <= 600,
            "{name}: {lines} lines without its tests; split it (600 at most)"
        );
    }
}

#[test]
fn sources_contain_no_todo_dbg_or_ignored_test() {
    // Split in two, so that this file does not find itself.
    let bans: Vec<String> = [
        ("todo", "!("),
        ("unimplemented", "!("),
        ("dbg", "!("),
        ("#[ig", "nore"),
        ("cfg(fea", "ture"),
    ]
    .iter()
    .map(|(head, tail)| format!("{head}{tail}"))
    .collect();
    for path in rust_files(&root().join("crates"))
        .into_iter()
        .chain(rust_files(&root().join("tests")))
    {
        let text = fs::read_to_string(&path).expect("readable source");
        for ban in &bans {
            assert!(!text.contains(ban), "{}: contains {ban}", relative(&path));
        }
    }
}

#[test]
fn tests_wait_for_events_not_for_times() {
    let sleep = format!("{}{}", "sleep", "(");
    let folders = rust_files(&root().join("crates"))
        .into_iter()
        .filter(|path| relative(path).contains("/tests/"));
    for path in folders.chain(rust_files(&root().join("tests"))) {
        let text = fs::read_to_string(&path).expect("readable source");
        // A paused clock needs no real time.
        assert!(
            !text.contains(&sleep) || text.contains("start_paused"),
            "{}: wait for an event instead of a time",
            relative(&path)
        );
    }
}
