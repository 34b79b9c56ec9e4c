//! C++ sources: where they are, what they include, and the one that is written for each file of kernels.
//!
//! Owns: reading and writing them.
//! Never: asks a compiler.
//! Invariant: all that a source includes from our folders is found, since objects are kept by what went into them.

use crate::compile::CompileError;
use crate::table::Kernel;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// Where the sources are.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// The emulator's and the driver's.
    pub(crate) cpp: PathBuf,
    /// What kernels include.
    pub(crate) include: PathBuf,
}

impl Sources {
    /// Of the crate in `manifest`.
    pub(crate) fn of(manifest: &Path) -> Sources {
        Sources {
            cpp: manifest.join("src/cpp"),
            include: manifest.join("../../kernels/include"),
        }
    }
}

/// A source that includes a kernel's file, in a name space of its own (two files may have functions of one name),
/// and lists its kernels.
pub(crate) fn listing(source: &Path, kernels: &[&Kernel]) -> String {
    let mut hasher = DefaultHasher::new();
    source.hash(&mut hasher);
    let space = format!("kernels_{:016x}", hasher.finish());
    let mut text = format!(
        "#include \"prims.cuh\"\n#include \"registry.h\"\nnamespace {space} {{\n#include \"{}\"\n}}\n",
        source.display()
    );
    for Kernel {
        name,
        threads,
        registers_max,
        shared_bytes,
        ..
    } in kernels
    {
        text += &format!(
            "static emulator::Listed listed_{name}({{\"{name}\", emulator::Entry<{space}::{name}>::run, \
             emulator::Entry<{space}::{name}>::ARGS_BYTES, {threads}, {registers_max}, {shared_bytes}, nullptr}});\n"
        );
    }
    text
}

pub(crate) fn read(path: &Path) -> Result<String, CompileError> {
    fs::read_to_string(path).map_err(|error| CompileError::File(path.to_path_buf(), error))
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), CompileError> {
    fs::write(path, bytes).map_err(|error| CompileError::File(path.to_path_buf(), error))
}

/// The C++ sources in one folder.
pub(crate) fn files_of(folder: &Path) -> Result<Vec<PathBuf>, CompileError> {
    let wrong = |error| CompileError::File(folder.to_path_buf(), error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if path.extension().is_some_and(|is| is == "cpp") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Everything that a source includes by a name in quotes, and what that includes in turn.
pub(crate) fn included(
    source: &Path,
    text: &str,
    folders: &[&Path],
) -> Result<BTreeMap<PathBuf, String>, CompileError> {
    let mut found = BTreeMap::new();
    let mut left = vec![(source.to_path_buf(), text.to_owned())];
    while let Some((from, text)) = left.pop() {
        for line in text.lines() {
            let Some(name) = line
                .trim()
                .strip_prefix("#include \"")
                .and_then(|rest| rest.strip_suffix('"'))
            else {
                continue;
            };
            let beside = from.parent().into_iter().chain(folders.iter().copied());
            // One that is nowhere is the compiler's to complain about.
            let Some(path) = beside
                .map(|folder| folder.join(name))
                .find(|path| path.exists())
            else {
                continue;
            };
            let path = path
                .canonicalize()
                .map_err(|error| CompileError::File(path.clone(), error))?;
            if let Entry::Vacant(place) = found.entry(path) {
                let text = read(place.key())?;
                left.push((place.key().clone(), text.clone()));
                place.insert(text);
            }
        }
    }
    Ok(found)
}
