//! The whole engine on a GPU: reference goldens, path independence, and tokens drawn on the device against those
//! that the host draws from the same logits.
#![allow(clippy::unwrap_used)] // Tests, and what they share.

mod harness;

use cleave_cuda::{CudaOps, CudaOptions, CudaPack};
use cleave_engine::checkpoint::Checkpoint;
use cleave_engine::ops::{KvType, Precision};
use cleave_engine::synth::{Layout, Quantizing, quantize};
use cleave_engine::{Engine, EngineLimits, ModelEngine, Weights, conformance};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where cargo says when it runs, so that this program finds its data on a machine that it was not built on.
fn testdata() -> PathBuf {
    let folder = std::env::var("CARGO_MANIFEST_DIR");
    let folder = folder.as_deref().unwrap_or(env!("CARGO_MANIFEST_DIR"));
    Path::new(folder).join("../../testdata")
}

fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(testdata())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("goldens.json").exists())
        .collect();
    folders.sort();
    assert!(!folders.is_empty(), "testdata has goldens");
    folders
}

fn build(
    dir: &Path,
    limits: EngineLimits,
    options: CudaOptions,
) -> Result<Box<dyn Engine>, String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let device = harness::device().expect("asked for only where there is one");
    let checkpoint = Checkpoint::open(dir).map_err(|error| told(&error))?;
    let pack = CudaPack::new(&device, options.precision).map_err(|error| told(&error))?;
    let weights =
        Weights::load(&pack, &checkpoint, None, &mut |_| {}).map_err(|error| told(&error))?;
    let ops = CudaOps::new(&device, &options).map_err(|error| told(&error))?;
    let engine = ModelEngine::new(ops, Arc::new(weights), limits).map_err(|error| told(&error))?;
    Ok(Box::new(engine))
}

#[test]
fn f32_agrees_with_the_reference() {
    if harness::device().is_none() {
        return;
    }
    for folder in folders() {
        let options = CudaOptions::new(Precision::F32);
        conformance::goldens(&folder, &|dir, limits| build(dir, limits, options)).unwrap();
    }
}

/// Windows and chunks in bf16; every path of every architecture would take the emulator an hour.
#[test]
fn answers_do_not_depend_on_the_path() {
    if harness::device().is_none() {
        return;
    }
    let build = |dir: &Path, limits| build(dir, limits, CudaOptions::new(Precision::Bf16));
    conformance::path_independence(&testdata().join("mistral"), &build).unwrap();
}

/// The same with weights of four bits, keys and values of eight. (`down_proj` has 112 columns, which groups of 32 do
/// not divide, and stays dense.)
#[test]
fn answers_of_quantised_weights_over_fp8_keys_do_not_depend_on_the_path() {
    if harness::device().is_none() {
        return;
    }
    let from = testdata().join("mistral");
    let folder = tempfile::tempdir().unwrap();
    let quantizing = Quantizing {
        layout: Layout::Awq,
        group: 32,
    };
    quantize(&from, folder.path(), quantizing, &mut |_| {}).unwrap();
    std::fs::copy(
        from.join("goldens.json"),
        folder.path().join("goldens.json"),
    )
    .unwrap();
    let options = CudaOptions {
        kv: KvType::Fp8E4m3,
        ..CudaOptions::new(Precision::Bf16)
    };
    let build = |dir: &Path, limits| build(dir, limits, options);
    conformance::path_independence(folder.path(), &build).unwrap();
}
