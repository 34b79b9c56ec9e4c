//! The bundled checkpoint, which is part of the binary.
//!
//! Owns: unpacking the checkpoint into the user's cache. Never: trusts an existing file without
//! comparing it. Invariant: the loaded checkpoint equals the one in the binary.

use anyhow::{Context, bail};
use cleave_text::ModelFiles;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Name under which the checkpoint is served.
pub(crate) const NAME: &str = "cleave-demo";

const FILES: [(&str, &[u8]); 5] = [
    (
        "config.json",
        include_bytes!("../../../assets/demo/config.json"),
    ),
    (
        "generation_config.json",
        include_bytes!("../../../assets/demo/generation_config.json"),
    ),
    (
        "tokenizer.json",
        include_bytes!("../../../assets/demo/tokenizer.json"),
    ),
    (
        "tokenizer_config.json",
        include_bytes!("../../../assets/demo/tokenizer_config.json"),
    ),
    (
        "model.safetensors",
        include_bytes!("../../../assets/demo/model.safetensors"),
    ),
];

/// Returns the text side of the checkpoint without unpacking anything.
pub(crate) fn files() -> ModelFiles {
    let text = |name: &str| {
        let (_, bytes) = FILES.iter().find(|(file, _)| *file == name)?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    };
    ModelFiles {
        name: NAME.to_owned(),
        config: text("config.json").unwrap_or_default(),
        tokenizer: text("tokenizer.json").unwrap_or_default(),
        tokenizer_config: text("tokenizer_config.json"),
        generation_config: text("generation_config.json"),
        ..ModelFiles::default()
    }
}

/// Returns the folder with the checkpoint, unpacked if necessary.
///
/// # Errors
/// If no cache folder is writable.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let mut tried = Vec::new();
    for cache in caches() {
        match unpack(&cache.join("cleave")) {
            Ok(folder) => return Ok(folder),
            Err(error) => tried.push(format!("{error:#}")),
        }
    }
    bail!("{}", tried.join("; "))
}

/// Candidates for the cache folder, in order of preference.
fn caches() -> impl Iterator<Item = PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    [
        set("XDG_CACHE_HOME"),
        set("HOME").map(|home| home.join(".cache")),
        Some(std::env::temp_dir()),
    ]
    .into_iter()
    .flatten()
}

fn unpack(cache: &Path) -> anyhow::Result<PathBuf> {
    // Two threads of this process would write to one file aside.
    static UNPACKING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = UNPACKING.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = cache.join(NAME);
    let is_there = |(name, bytes): &(&str, &[u8])| {
        let read = cleave_files::read(&folder.join(name), bytes.len() as u64);
        read.is_ok_and(|there| there == *bytes)
    };
    if FILES.iter().all(is_there) {
        return Ok(folder);
    }
    fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    for (name, bytes) in FILES {
        // Each file is written under another name and renamed, so that a second process never reads
        // half a file.
        let aside = folder.join(format!(".{name}.{}", std::process::id()));
        let written = fs::write(&aside, bytes).and_then(|()| fs::rename(&aside, folder.join(name)));
        written.with_context(|| format!("{}", folder.join(name).display()))?;
    }
    Ok(folder)
}
