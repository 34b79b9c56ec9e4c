//! Packed weights cached on disk, for the next load to map.
//!
//! Owns: the file of each checkpoint and format, and when it is read, written, replaced or removed.
//! Never: fails a load. A problem with the file or its folder is logged as a warning, and weights
//! are packed from the checkpoint as without a cache.
//! Invariant: no data of a file are used before their checksum was verified, and a file under its
//! final name is complete.

mod layout;
mod place;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use crate::pack::{RowOrder, StackForm};
use cleave_checkpoint::StoredMatrix;
use cleave_cpu_kernels::memory::WeightWords;
pub(crate) use place::PackedLocation;
use reader::PackedReader;
use std::fs;
use std::io;
use twox_hash::XxHash3_64;
use writer::PackedWriter;

/// A packed stack without its bias.
#[derive(Debug)]
pub(crate) struct PackedStack {
    pub(crate) stack_form: StackForm,
    /// Packed words, as in [`crate::pack::CpuMatrix::words`].
    pub(crate) words: WeightWords,
    /// Scale of each column, for eight bits without groups.
    pub(crate) column_scales: Option<Vec<f32>>,
}

/// Identity of a stack of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StackKey {
    /// Hash of the tensors' names, so that no matrix is taken for another of its shape.
    names: u64,
    order: RowOrder,
    rows: usize,
    width: usize,
    /// Number of slices of the inner dimension.
    slices: usize,
}

impl StackKey {
    pub(crate) fn of_stack(stack: &[StoredMatrix], order: RowOrder, slices: usize) -> Self {
        let names: Vec<&str> = stack.iter().map(StoredMatrix::name).collect();
        Self {
            names: XxHash3_64::oneshot(names.join("\n").as_bytes()),
            order,
            rows: stack.iter().map(StoredMatrix::rows).sum(),
            width: stack.first().map_or(0, StoredMatrix::columns),
            slices,
        }
    }
}

/// The cache of one checkpoint during one load: each stack in turn is read from the file, or else
/// packed and written.
#[derive(Debug)]
pub(crate) struct PackedCache {
    place: PackedLocation,
    threads: usize,
    state: PackedCacheState,
}

#[derive(Debug)]
enum PackedCacheState {
    Reading(PackedReader),
    Writing(PackedWriter),
    /// Disabled: another process writes the same file, or this one cannot.
    Disabled,
}

impl PackedCache {
    /// Opens the file if it exists. Checksums of weights are verified when each stack is taken.
    pub(crate) fn open(place: PackedLocation, threads: usize) -> Self {
        let mut cache = Self {
            place,
            threads,
            state: PackedCacheState::Disabled,
        };
        match PackedReader::open(&cache.place) {
            Ok(Some(reader)) => cache.state = PackedCacheState::Reading(reader),
            Ok(None) => cache.begin_file(None),
            Err(problem) => {
                cache.discard_file(&problem);
                cache.begin_file(None);
            }
        }
        cache
    }

    /// Reads the next stack; `None` if the file does not have it intact.
    pub(crate) fn take_stack(&mut self, key: &StackKey) -> Option<PackedStack> {
        let PackedCacheState::Reading(reader) = &mut self.state else {
            return None;
        };
        match reader.take(key, self.threads) {
            Ok(packed) => Some(packed),
            Err(problem) => {
                let PackedCacheState::Reading(reader) =
                    std::mem::replace(&mut self.state, PackedCacheState::Disabled)
                else {
                    return None;
                };
                self.discard_file(&problem);
                self.begin_file(Some(&reader));
                None
            }
        }
    }

    /// Writes a stack that had to be packed.
    pub(crate) fn keep_stack(&mut self, key: &StackKey, packed: &PackedStack) {
        if let PackedCacheState::Writing(writer) = &mut self.state
            && let Err(error) = writer.put(key, packed)
        {
            self.state = PackedCacheState::Disabled;
            self.warn_not_written(&error);
        }
    }

    /// Ends the load; a written file gets its final name.
    pub(crate) fn finish(&mut self) {
        if let PackedCacheState::Writing(writer) =
            std::mem::replace(&mut self.state, PackedCacheState::Disabled)
            && let Err(error) = writer.finish(&self.place)
        {
            self.warn_not_written(&error);
        }
    }

    /// Begins a new file, with the stacks that were already taken from the old one.
    fn begin_file(&mut self, before: Option<&PackedReader>) {
        let begun = PackedWriter::begin(&self.place, self.threads).and_then(|writer| {
            let Some(mut writer) = writer else {
                return Ok(None);
            };
            for (key, packed) in before.into_iter().flat_map(PackedReader::taken_stacks) {
                writer.put(&key, &packed)?;
            }
            Ok(Some(writer))
        });
        match begun {
            Ok(Some(writer)) => self.state = PackedCacheState::Writing(writer),
            Ok(None) => {}
            Err(error) => self.warn_not_written(&error),
        }
    }

    /// Warns about an unusable file and removes it.
    fn discard_file(&self, problem: &str) {
        let file = self.place.file();
        tracing::warn!(
            file = %file.display(),
            problem,
            "the packed weights kept there are not used; they are packed from the checkpoint"
        );
        // In a read-only folder the file stays.
        let _ = fs::remove_file(file);
    }

    fn warn_not_written(&self, error: &io::Error) {
        tracing::warn!(
            folder = %self.place.folder().display(),
            problem = %error,
            "the packed weights cannot be kept there; the next load packs them again"
        );
    }
}

/// Bytes per checksum, so that several threads can share a matrix.
const CHECKSUM_PIECE_BYTES: usize = 1 << 20;

/// XXH3 of the list of XXH3 checksums of each mebibyte.
fn checksum(bytes: &[u8], threads: usize) -> u64 {
    let pieces: Vec<&[u8]> = bytes.chunks(CHECKSUM_PIECE_BYTES).collect();
    let each = pieces.len().div_ceil(threads.max(1)).max(1);
    let of = |pieces: &[&[u8]]| -> Vec<u8> {
        let sums = pieces.iter().map(|piece| XxHash3_64::oneshot(piece));
        sums.flat_map(u64::to_le_bytes).collect()
    };
    let mut parts = pieces.chunks(each);
    let first = parts.next().unwrap_or_default();
    let sums = std::thread::scope(|scope| {
        let others: Vec<_> = parts.map(|part| scope.spawn(move || of(part))).collect();
        let mut sums = of(first);
        for other in others {
            sums.extend(other.join().expect("a sum does not panic"));
        }
        sums
    });
    XxHash3_64::oneshot(&sums)
}
