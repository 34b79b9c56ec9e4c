//! Bytes of a checkpoint's file, mapped or owned.
//!
//! Owns: the one place of this crate with `unsafe`, which is the mapping itself.
//! Never: interprets a byte.
//! Invariant: what is mapped is only ever read.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;

/// Bytes that stay where they are while anyone holds them.
#[derive(Debug)]
pub(crate) enum Bytes {
    /// A file, paged in as it is read.
    Mapped(memmap2::Mmap),
    /// Made in memory.
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a whole file for reading.
    ///
    /// # Errors
    /// The operating system's; an empty file cannot be mapped.
    pub(crate) fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a mapping is undefined if another process truncates or rewrites the file while it
        // is read. Checkpoints are files that nobody edits in place; a copy of 16 GB in memory just
        // to be safe from that would double what a worker needs. The mapping is private to this
        // type, never written, and every access goes through a bounds-checked slice.
        let map = unsafe { memmap2::Mmap::map(file)? };
        Ok(Self::Mapped(map))
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}
