//! Rules of the repository: code, documents and dependencies. None of them starts a server.
//!
//! Owns: the list of its tests, and the way to the repository's root. Never: links a client or an
//! engine, so that it is built soon.

mod docs;
mod supply;
mod tidy;

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .expect("crates/cli is two levels down")
        .to_path_buf()
}
