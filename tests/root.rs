//! The root of the repository, for tests that read its files.

use std::path::{Path, PathBuf};

pub(crate) fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .expect("crates/cli is two levels down")
        .to_path_buf()
}
