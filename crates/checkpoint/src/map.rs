//! Bytes of a checkpoint's file, mapped or owned.
//!
//! Owns: the only `unsafe` code of this crate, the mapping itself.
//! Never: interprets a byte.
//! Invariant: mapped bytes are never written.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a file, which do not move while a [`FileSpan`] of them exists.
#[derive(Debug)]
pub(crate) enum FileBytes {
    /// A mapped file, whose pages are read on first access.
    Mapped(memmap2::Mmap),
    /// Bytes made in memory.
    Owned(Vec<u8>),
}

impl FileBytes {
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
pub(crate) struct FileSpan {
    source: Arc<FileBytes>,
    range: Range<usize>,
}

impl FileSpan {
    /// `None` if the range is not within the file.
    pub(crate) fn new(source: Arc<FileBytes>, range: Range<usize>) -> Option<Self> {
        let within = range.start <= range.end && range.end <= source.as_slice().len();
        within.then_some(Self { source, range })
    }

    /// A part of this part; `None` if the range is not within it.
    pub(crate) fn part(&self, range: Range<usize>) -> Option<Self> {
        let first = self.range.start;
        let within = range.start <= range.end && range.end <= self.range.len();
        within.then(|| Self {
            source: Arc::clone(&self.source),
            range: first + range.start..first + range.end,
        })
    }

    /// Bytes made in memory.
    pub(crate) fn owned(bytes: Vec<u8>) -> Self {
        Self {
            range: 0..bytes.len(),
            source: Arc::new(FileBytes::Owned(bytes)),
        }
    }

    /// The range within the whole file.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.source.as_slice()[self.range.clone()]
    }

    /// Releases the pages of a mapped file from this process's memory. The system's page cache may
    /// keep them; the next read maps them again.
    pub(crate) fn release(&self) {
        #[cfg(target_os = "linux")]
        if let FileBytes::Mapped(map) = &*self.source
            && !self.range.is_empty()
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the mapping is file-backed, read-only and was never written, so that a
            // released page comes back with the same bytes. A refusal changes nothing.
            let _ =
                unsafe { map.unchecked_advise_range(advice, self.range.start, self.range.len()) };
        }
    }
}
