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
    let given = env::var("CLEAVE_COMMIT").ok();
    // A debug build is not made anew for each commit.
    let commit = match env::var("PROFILE").as_deref() {
        Ok("debug") => given.unwrap_or_else(|| "not recorded in a debug build".to_owned()),
        _ => given
            .or_else(checked_out)
            .unwrap_or_else(|| "unknown".to_owned()),
    };
    let target = env::var("TARGET").expect("cargo sets it");
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
