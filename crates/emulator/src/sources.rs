//! C++ sources: their folders, their includes, and the generated source for each file of kernels.
//!
//! Owns: reading and writing them. Never: runs a compiler. Invariant: every include from our
//! folders is found, since objects are named by their content.

use crate::compile::CompileError;
use crate::table::KernelTableRow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// Folders of C++ sources.
#[derive(Clone, Debug)]
pub(crate) struct EmulatorSources {
    /// The emulator's and the driver's sources.
    pub(crate) cpp: PathBuf,
    pub(crate) include: PathBuf,
}

impl EmulatorSources {
    /// The folders of the crate in `manifest`.
    pub(crate) fn of(manifest: &Path) -> EmulatorSources {
        EmulatorSources {
            cpp: manifest.join("src/cpp"),
            include: manifest.join("../../kernels/include"),
        }
    }
}

/// The source that includes a kernel's file in a namespace of its own (two files may have functions
/// of one name) and registers its kernels.
pub(crate) fn registration_source(source: &Path, kernels: &[&KernelTableRow]) -> String {
    let mut hasher = DefaultHasher::new();
    source.hash(&mut hasher);
    let space = format!("kernels_{:016x}", hasher.finish());
    let mut text = format!(
        "#include \"prims.cuh\"\n#include \"registry.h\"\nnamespace {space} {{\n#include \"{}\"\n}}\n",
        source.display()
    );
    for KernelTableRow {
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

/// Everything that a source includes by a name in quotes, recursively.
pub(crate) fn included_files(
    source: &Path,
    text: &str,
    folders: &[&Path],
) -> Result<BTreeMap<PathBuf, String>, CompileError> {
    let mut found = BTreeMap::new();
    let mut left = vec![(source.to_path_buf(), text.to_owned())];
    // A depth-first walk over includes; a file that was found before is not read again.
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
            // A file that is nowhere is left to the compiler's error message.
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
