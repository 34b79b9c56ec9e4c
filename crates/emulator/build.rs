//! Compiles the stand-in driver with all kernels in it, and the stand-in cublasLt and NVRTC.
//!
//! Without a g++, or for a machine that the emulator does not run on, it says so and leaves them out.

#[path = "src/compile.rs"]
#[allow(dead_code, unreachable_pub)] // Tests use the rest of it, through the crate.
mod compile;
#[path = "src/table.rs"]
#[allow(dead_code, unreachable_pub)]
mod table;

use compile::{Beside, Compiler, Sources, Variant};
use std::env;
use std::path::{Path, PathBuf};

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let sources = Sources::of(&manifest, &manifest.join("../../kernels"));
    for watched in [&sources.cpp, &sources.kernels] {
        println!("cargo:rerun-if-changed={}", watched.display());
    }
    let os = env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    if (os.as_str(), arch.as_str()) != ("linux", "x86_64") {
        println!("cargo:warning=no CUDA emulator: it runs on x86-64 Linux only");
        return;
    }
    let Some(compiler) = Compiler::find(&out) else {
        println!(
            "cargo:warning=no CUDA emulator: g++ was not found; its tests will say that they were left out"
        );
        return;
    };
    let say = |name: &str, made: Result<PathBuf, compile::CompileError>| match made {
        Ok(path) => println!("cargo:rustc-env={name}={}", shown(&path)),
        Err(error) => panic!("{error}"),
    };
    say(
        "CLEAVE_STANDIN_CUDA",
        compiler.stand_in(&sources, Variant::Plain),
    );
    say(
        "CLEAVE_STANDIN_CUBLAS_LT",
        compiler.beside(&sources, Beside::CublasLt),
    );
    say(
        "CLEAVE_STANDIN_NVRTC",
        compiler.beside(&sources, Beside::Nvrtc),
    );
    for warning in compiler.warnings() {
        println!("cargo:warning={warning}");
    }
}

fn shown(path: &Path) -> &str {
    path.to_str()
        .expect("a path in text, as cargo's own variables are")
}
