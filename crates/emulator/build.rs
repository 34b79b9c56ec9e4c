//! Warns at build time if the emulator cannot be built on this machine. A test compiles the
//! emulator on first use, so other crates never wait for it; this build script gives the crate a
//! folder to compile into.

use std::env;
use std::process::{Command, Stdio};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let of_target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if (of_target("OS").as_str(), of_target("ARCH").as_str()) != ("linux", "x86_64") {
        println!(
            "cargo:warning=the CUDA emulator runs on x86-64 Linux only: its tests will be left out"
        );
        return;
    }
    let found = Command::new("g++")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if !found.is_ok_and(|status| status.success()) {
        println!(
            "cargo:warning=the CUDA emulator needs g++, which was not found: its tests will be left out"
        );
    }
}
