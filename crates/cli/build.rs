//! Records of a build: the commit and the target, for `cleave --version`.
//!
//! Owns: the environment variables `BUILD_COMMIT` and `BUILD_TARGET` of the compilation. Never:
//! fails without git or outside a repository.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // A package that is built from an archive has no repository; its builder knows the commit.
    println!("cargo:rerun-if-env-changed=CLEAVE_COMMIT");
    let commit = env::var("CLEAVE_COMMIT").ok().or_else(checked_out);
    let target = env::var("TARGET").expect("cargo sets it");
    let commit = commit.unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=BUILD_COMMIT={commit}");
    println!("cargo:rustc-env=BUILD_TARGET={target}");
}

/// The commit that is checked out, with its date.
fn checked_out() -> Option<String> {
    // It grows with each commit and each checkout.
    let log = git(&[
        "rev-parse",
        "--path-format=absolute",
        "--git-path",
        "logs/HEAD",
    ])?;
    if Path::new(&log).exists() {
        println!("cargo:rerun-if-changed={log}");
    }
    git(&["log", "-1", "--format=%h (%cs)"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let text = text.trim();
    (output.status.success() && !text.is_empty()).then(|| text.to_owned())
}
