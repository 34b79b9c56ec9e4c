//! The embedding table.
//!
//! Never: copies it.

use cleave_checkpoint::StoredTensor;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Embedding rows, read from the mapped file.
#[derive(Debug)]
pub struct CpuTable {
    stored: StoredTensor,
    /// Rows read since pages were last released.
    rows_read: AtomicUsize,
}

impl CpuTable {
    /// Bytes that the system maps on a page fault: sixteen pages, or one large one.
    const MAPPED_BYTES: usize = 1 << 16;
    /// Limit of the table's bytes in this process's memory.
    const HELD_BYTES: usize = 32 << 20;

    pub(super) fn new(stored: StoredTensor) -> Self {
        Self {
            stored,
            rows_read: AtomicUsize::new(0),
        }
    }

    /// A token's row, as f32.
    pub(crate) fn read_row(&self, token: usize, out: &mut [f32]) {
        self.stored.read_row(token, out);
    }

    /// Call after reading `rows` rows: releases the table's pages after many reads. A tied head is
    /// packed as well, so that a large table would otherwise be in memory twice once every token
    /// was used. The system's page cache keeps the pages for the next read.
    pub(crate) fn release_after_reads(&self, rows: usize) {
        let before = self.rows_read.fetch_add(rows, Ordering::Relaxed);
        if self.stored.bytes().len() > Self::HELD_BYTES
            && (before + rows) * Self::MAPPED_BYTES > Self::HELD_BYTES
        {
            self.rows_read.store(0, Ordering::Relaxed);
            self.stored.release();
        }
    }
}
