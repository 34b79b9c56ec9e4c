//! Examples in documentation, which are compiled as tests.
//!
//! Owns: the rule that a crate has `doctest = false` exactly if its documentation has no block of
//! code. The documentation's compiler reads a whole crate before it finds that nothing is to be
//! tested, which takes seconds per crate.

use super::{our_packages, rust_files};
use cargo_metadata::TargetKind;
use std::fs;

/// Whether a line of source opens or closes a block of code in documentation.
fn is_doc_fence(line: &str) -> bool {
    let line = line.trim_start();
    let comment = line.strip_prefix("///").or(line.strip_prefix("//!"));
    comment.is_some_and(|text| text.trim_start().starts_with("```"))
}

#[test]
fn crates_without_examples_in_docs_run_no_doc_tests() {
    let mut libraries_count = 0;
    for package in our_packages() {
        let libraries = package.targets.iter();
        for target in libraries.filter(|target| target.kind.contains(&TargetKind::Lib)) {
            let folder = target.src_path.parent().expect("a file is in a folder");
            let has_example = rust_files(folder.as_std_path()).iter().any(|path| {
                let text = fs::read_to_string(path).expect("readable source");
                text.lines().any(is_doc_fence)
            });
            assert_eq!(
                target.doctest, has_example,
                "{}: `doctest = false` in Cargo.toml exactly if no documentation has an example",
                package.name
            );
            libraries_count += 1;
        }
    }
    assert!(libraries_count > 20, "{libraries_count} libraries");
}
