//! Builds the kernels where the machine has a CUDA compiler.
//!
//! Owns: `kernels.rs` in the output folder: the table of kernels, their sources (for the compiler
//! at run time), a hash of everything in `kernels/`, and, with nvcc, one compressed fatbin a file:
//! machine code for sm_80, sm_90a and sm_100a, and PTX of compute_80, which the driver compiles for
//! every other chip.
//! Never: fails because there is no nvcc, unless `CLEAVE_KERNELS=required`.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The chips that nvcc makes code for. The targets end in `a` because plain sm_90 and sm_100 have
/// neither wgmma nor tcgen05.
const TARGETS: [&str; 3] = [
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_100a,code=sm_100a",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for name in ["CLEAVE_NVCC", "CLEAVE_KERNELS", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let kernels = manifest.join("../../kernels");
    let kernels = kernels.canonicalize().expect("kernels/ is there");
    println!("cargo:rerun-if-changed={}", kernels.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let table = fs::read_to_string(kernels.join("table.txt")).expect("kernels/table.txt is there");

    let mut text = String::new();
    let files = write_table(&table, &mut text);
    write_sources(&kernels, &files, &mut text);
    write_hash(&kernels, &mut text);
    write_images(&kernels, &files, &out, &mut text);
    fs::write(out.join("kernels.rs"), text).expect("the output folder can be written");
}

/// Writes the table of kernels and returns the files that contain them.
fn write_table(table: &str, text: &mut String) -> BTreeSet<String> {
    let mut files = BTreeSet::new();
    text.push_str("pub(crate) static TABLE: &[Listed] = &[\n");
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [file, name, threads, _registers, shared_bytes, ..] = words[..] else {
            assert!(words.is_empty(), "kernels/table.txt: {line}");
            continue;
        };
        writeln!(
            text,
            "    Listed {{ file: {file:?}, name: {name:?}, threads: {threads}, shared_bytes: {shared_bytes} }},"
        )
        .expect("writing to a string");
        files.insert(file.to_owned());
    }
    text.push_str("];\n");
    files
}

fn write_sources(kernels: &Path, files: &BTreeSet<String>, text: &mut String) {
    let mut list = |name: &str, paths: &[(String, PathBuf)]| {
        writeln!(text, "pub(crate) static {name}: &[(&str, &str)] = &[").expect("to a string");
        for (name, path) in paths {
            writeln!(text, "    ({name:?}, include_str!({path:?})),").expect("to a string");
        }
        text.push_str("];\n");
    };
    let sources: Vec<_> = files
        .iter()
        .map(|file| (file.clone(), kernels.join(file)))
        .collect();
    list("SOURCES", &sources);
    let mut headers = Vec::new();
    for folder in fs::read_dir(kernels)
        .expect("kernels/ can be read")
        .flatten()
    {
        let Ok(entries) = fs::read_dir(folder.path()) else {
            continue;
        };
        for entry in entries.flatten().map(|entry| entry.path()) {
            if entry
                .extension()
                .is_some_and(|extension| extension == "cuh")
            {
                let name = entry.file_name().expect("a file has a name");
                headers.push((name.to_string_lossy().into_owned(), entry));
            }
        }
    }
    headers.sort();
    list("HEADERS", &headers);
}

/// Writes a hash over the name and the bytes of every file in `kernels/`. Workers exchange KV only
/// if their builds have the same hash.
fn write_hash(kernels: &Path, text: &mut String) {
    let mut files = Vec::new();
    list_files(kernels, &mut files);
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for path in files {
        let name = path.strip_prefix(kernels).expect("a file below kernels/");
        let bytes = fs::read(&path).expect("a file of kernels/ can be read");
        let name = name.to_string_lossy().replace('\\', "/");
        for part in [name.as_bytes(), bytes.as_slice()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    let hash = hasher.finalize().to_hex();
    writeln!(
        text,
        "pub(crate) static SOURCES_HASH: &str = {:?};",
        &hash[..12]
    )
    .expect("to a string");
}

fn list_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of kernels/ can be read") {
        let path = entry.expect("an entry of kernels/ can be read").path();
        if path.is_dir() {
            list_files(&path, files)
        } else {
            files.push(path)
        }
    }
}

fn write_images(kernels: &Path, files: &BTreeSet<String>, out: &Path, text: &mut String) {
    let required = env::var("CLEAVE_KERNELS").is_ok_and(|value| value == "required");
    let nvcc = nvcc();
    assert!(
        nvcc.is_some() || !required,
        "CLEAVE_KERNELS=required, but there is no nvcc: name it in CLEAVE_NVCC"
    );
    text.push_str("pub(crate) static IMAGES: &[(&str, &[u8])] = &[\n");
    for file in nvcc
        .iter()
        .flat_map(|nvcc| files.iter().map(move |file| (nvcc, file)))
    {
        let (nvcc, file) = file;
        let image = out.join(file.replace('/', "-")).with_extension("fatbin");
        let built = Command::new(nvcc)
            .args(["-std=c++17", "-O3", "--compress-mode=size", "-fatbin"])
            .args(["-Werror", "all-warnings"])
            .args(TARGETS)
            .arg("-I")
            .arg(kernels.join("include"))
            .arg("-o")
            .arg(&image)
            .arg(kernels.join(file))
            .status();
        let is_built = built.as_ref().is_ok_and(|status| status.success());
        if !is_built && !required {
            println!(
                "cargo:warning=nvcc did not build {file}; kernels will be compiled at run time"
            );
            continue;
        }
        assert!(is_built, "nvcc did not build {file}: {built:?}");
        writeln!(
            text,
            "    ({file:?}, &Aligned(*include_bytes!({image:?})).0),"
        )
        .expect("to a string");
    }
    text.push_str("];\n");
}

/// Finds nvcc in the places where users have it: the variable `CLEAVE_NVCC` comes first, the
/// default folder last.
fn nvcc() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).map(PathBuf::from);
    let mut places: Vec<PathBuf> = set("CLEAVE_NVCC").into_iter().collect();
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set);
    places.extend(homes.map(|home| home.join("bin/nvcc")));
    if let Some(path) = env::var_os("PATH") {
        places.extend(env::split_paths(&path).map(|folder| folder.join("nvcc")));
    }
    places.push("/usr/local/cuda/bin/nvcc".into());
    places.into_iter().find(|place| place.is_file())
}
