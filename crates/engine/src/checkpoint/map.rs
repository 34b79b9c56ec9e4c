//! Bytes of a checkpoint's file, mapped or owned.
//!
//! Owns: the one place of this crate with `unsafe`, which is the mapping itself.
//! Never: interprets a byte.
//! Invariant: what is mapped is only ever read.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

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

/// A part of a file. Cheap to clone: the file stays mapped as long as any part of it is held.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    source: Arc<Bytes>,
    range: Range<usize>,
}

impl Span {
    /// `None` if the file has no such bytes.
    pub(crate) fn new(source: Arc<Bytes>, range: Range<usize>) -> Option<Self> {
        let within = range.start <= range.end && range.end <= source.as_slice().len();
        within.then_some(Self { source, range })
    }

    /// Bytes made in memory.
    pub(crate) fn owned(bytes: Vec<u8>) -> Self {
        Self {
            range: 0..bytes.len(),
            source: Arc::new(Bytes::Owned(bytes)),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.source.as_slice()[self.range.clone()]
    }

    /// Takes the pages of a mapped file out of this process's memory. They stay where the system caches files, and
    /// whoever reads them next has them back.
    pub(crate) fn release(&self) {
        #[cfg(target_os = "linux")]
        if let Bytes::Mapped(map) = &*self.source
            && !self.range.is_empty()
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the mapping is shared with a file, is read only and was never written, so that a page which is
            // taken out comes back with the bytes that it had. A refusal changes nothing.
            let _ =
                unsafe { map.unchecked_advise_range(advice, self.range.start, self.range.len()) };
        }
    }
}
