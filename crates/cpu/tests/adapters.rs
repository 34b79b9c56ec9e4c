//! Adapters on the processor, compared with the reference's goldens and with each sequence alone.

use crate::harness::{available, options};
use cleave_checkpoint::{AdapterTarget, Checkpoint};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader, Isa, Quantize};
use cleave_engine::conformance::{adapter_goldens, mixed_adapters};
use cleave_engine::ops::Precision;
use cleave_engine::{AdapterTable, Engine, EngineLimits, ModelEngine, Weights};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Adapters, each with the checkpoint that it is for.
const ADAPTERS: [(&str, &str); 10] = [
    ("cohere", "cohere"),
    ("gemma2", "gemma2"),
    ("granite", "granite"),
    ("llama3-all", "llama3"),
    ("llama3-qv", "llama3"),
    ("llama3-third", "llama3"),
    ("olmo2", "olmo2"),
    ("phi3", "phi3"),
    ("qwen2", "qwen2"),
    ("qwen3-moe", "qwen3-moe"),
];

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

fn adapter(name: &str) -> PathBuf {
    testdata("adapters").join(name)
}

fn engine(
    dir: &Path,
    limits: EngineLimits,
    options: &CpuOptions,
) -> Result<Box<dyn Engine>, String> {
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    let pack = CpuWeightLoader::new(options);
    let weights = Weights::load(&pack, &checkpoint, None, &mut |_| {});
    let weights = Arc::new(weights.map_err(|error| error.to_string())?);
    let target = AdapterTarget::of(&checkpoint);
    let table = Arc::new(AdapterTable::new(pack, &weights, target, 64));
    let ops = CpuOps::new(options).map_err(|error| error.to_string())?;
    let engine = ModelEngine::new(ops, weights, limits).map_err(|error| error.to_string())?;
    let engine = engine.with_adapters(table);
    Ok(Box::new(engine.map_err(|error| error.to_string())?))
}

// Invariant: I17.
#[test]
fn adapters_match_the_reference_on_every_isa() {
    for isa in available() {
        for (name, base) in ADAPTERS {
            let options = options(Precision::F32, isa, 2);
            let build = |dir: &Path, limits| engine(dir, limits, &options);
            adapter_goldens(&testdata(base), &adapter(name), &build)
                .unwrap_or_else(|error| panic!("{isa}: {error}"));
        }
    }
}

#[test]
fn every_adapter_of_testdata_is_compared() {
    let found = std::fs::read_dir(testdata("adapters")).unwrap();
    let names = found.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert_eq!(names, ADAPTERS.map(|(name, _)| name));
}

/// Several adapters of one model in one step, beside sequences of the model alone.
// Invariant: I11.
#[test]
fn sequences_of_several_adapters_are_path_independent() {
    let names = ["llama3-all", "llama3-qv", "llama3-third"].map(adapter);
    let names: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
    let bases = [
        (Precision::F32, Isa::detect(), None),
        (Precision::F32, Isa::Plain, None),
        (Precision::Bf16, Isa::detect(), None),
        (Precision::Bf16, Isa::detect(), Some(Quantize::Int8)),
        (Precision::Bf16, Isa::detect(), Some(Quantize::Int4)),
    ];
    for (precision, isa, quantize) in bases {
        let options = CpuOptions {
            quantize,
            ..options(precision, isa, 2)
        };
        let build = |dir: &Path, limits| engine(dir, limits, &options);
        mixed_adapters(&testdata("llama3"), &names, &build)
            .unwrap_or_else(|error| panic!("{precision:?} {isa} {quantize:?}: {error}"));
    }
}
