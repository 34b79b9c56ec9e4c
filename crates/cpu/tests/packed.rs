//! Whole checkpoints loaded with a cache folder: packed weights are written once, reused, and
//! replaced when the checkpoint changes.

use cleave_checkpoint::Checkpoint;
use cleave_cpu::{CpuOptions, CpuWeightLoader, Quantize};
use cleave_engine::Weights;
use cleave_engine::ops::Precision;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Loads the checkpoint; returns the cache's files with their modification times.
fn load(checkpoint: &Path, folder: &Path, options: &CpuOptions) -> Vec<(String, SystemTime)> {
    let checkpoint = Checkpoint::open(checkpoint).unwrap();
    let pack = CpuWeightLoader::cached(options, folder, &checkpoint);
    let mut last = None;
    let weights = Weights::load(&pack, &checkpoint, None, &mut |now| last = Some(now)).unwrap();
    let last = last.unwrap();
    assert_eq!(
        last.bytes_done, last.bytes_total,
        "the bar did not reach its end"
    );
    drop(weights);
    let mut files: Vec<(String, SystemTime)> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, entry.metadata().unwrap().modified().unwrap())
        })
        .collect();
    files.sort();
    files
}

#[test]
fn a_modified_checkpoint_is_packed_anew() {
    let (source, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let trained = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/trained");
    for entry in fs::read_dir(trained).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), source.path().join(entry.file_name())).unwrap();
    }
    let dense = CpuOptions::new(Precision::Bf16);
    let rounded = CpuOptions {
        quantize: Some(Quantize::Int4),
        ..dense.clone()
    };
    let first = load(source.path(), folder.path(), &dense);
    assert_eq!(first.len(), 1);
    assert_eq!(
        load(source.path(), folder.path(), &dense),
        first,
        "written again"
    );
    let both = load(source.path(), folder.path(), &rounded);
    assert_eq!(both.len(), 2, "a file for each form");

    let file = File::options()
        .write(true)
        .open(source.path().join("model.safetensors"))
        .unwrap();
    let before = file.metadata().unwrap().modified().unwrap();
    file.set_modified(before + Duration::from_secs(1)).unwrap();
    let after = load(source.path(), folder.path(), &dense);
    assert_eq!(after.len(), 1, "those of before stayed: {after:?}");
    assert_ne!(after, first);
}

/// Experts in tensors of their own, and all of a layer in one tensor, whose experts must not be
/// taken for each other.
#[test]
fn packed_experts_are_reused_as_other_matrices_are() {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    for name in ["qwen2-moe", "granitemoe", "gpt-oss"] {
        for quantize in [None, Some(Quantize::Int4), Some(Quantize::Nvfp4)] {
            let folder = tempfile::tempdir().unwrap();
            let options = CpuOptions {
                quantize,
                ..CpuOptions::new(Precision::Bf16)
            };
            let first = load(&testdata.join(name), folder.path(), &options);
            assert_eq!(first.len(), 1, "{name}");
            let again = load(&testdata.join(name), folder.path(), &options);
            assert_eq!(again, first, "{name} was packed again");
        }
    }
}
