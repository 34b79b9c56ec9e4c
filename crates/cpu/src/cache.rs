//! Packed weights kept on disk, for the next load to map.
//!
//! Owns: which file keeps which checkpoint in which form, and when it is read, written, replaced or removed.
//! Never: stops a load. What is wrong with the file or its folder is told in a warning, and weights are packed from the
//! checkpoint as without it.
//! Invariant: nothing of a file is used before its checksum was compared, and a file that has its last name is whole.

mod layout;
mod place;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use crate::memory::Words;
use crate::pack::{Columns, Kept, RowOrder};
use cleave_engine::checkpoint::StoredMatrix;
pub(crate) use place::Place;
use reader::Reader;
use std::fs;
use std::io;
use twox_hash::XxHash3_64;
use writer::Writer;

/// A packed stack without its bias.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) kept: Kept,
    /// See [`crate::pack::CpuMatrix::words`].
    pub(crate) words: Words,
    /// Where weights have eight bits.
    pub(crate) of_columns: Option<Columns>,
}

/// Which stack is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Of its tensors' names, so that no matrix passes for another of its shape.
    names: u64,
    order: RowOrder,
    rows: usize,
    width: usize,
}

impl Wanted {
    pub(crate) fn of(stack: &[StoredMatrix], order: RowOrder) -> Self {
        let names: Vec<&str> = stack.iter().map(StoredMatrix::name).collect();
        Self {
            names: XxHash3_64::oneshot(names.join("\n").as_bytes()),
            order,
            rows: stack.iter().map(StoredMatrix::rows).sum(),
            width: stack.first().map_or(0, StoredMatrix::columns),
        }
    }
}

/// The packed weights of one checkpoint, for one load: every stack in turn is taken from the file, or else packed and
/// kept.
#[derive(Debug)]
pub(crate) struct Cache {
    place: Place,
    threads: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    Reading(Reader),
    Writing(Writer),
    /// Another process writes the same file, or this one cannot.
    Off,
}

impl Cache {
    /// Looks for the file. Checksums of weights are compared when they are taken.
    pub(crate) fn open(place: Place, threads: usize) -> Self {
        let mut cache = Self {
            place,
            threads,
            state: State::Off,
        };
        match Reader::open(&cache.place) {
            Ok(Some(reader)) => cache.state = State::Reading(reader),
            Ok(None) => cache.write(None),
            Err(problem) => {
                cache.refuse(&problem);
                cache.write(None);
            }
        }
        cache
    }

    /// The next stack, if the file has it whole.
    pub(crate) fn take(&mut self, wanted: &Wanted) -> Option<Packed> {
        let State::Reading(reader) = &mut self.state else {
            return None;
        };
        match reader.take(wanted, self.threads) {
            Ok(packed) => Some(packed),
            Err(problem) => {
                let State::Reading(reader) = std::mem::replace(&mut self.state, State::Off) else {
                    return None;
                };
                self.refuse(&problem);
                self.write(Some(&reader));
                None
            }
        }
    }

    /// Keeps what was packed because it could not be taken.
    pub(crate) fn keep(&mut self, wanted: &Wanted, packed: &Packed) {
        if let State::Writing(writer) = &mut self.state
            && let Err(error) = writer.put(wanted, packed)
        {
            self.state = State::Off;
            self.warn(&error);
        }
    }

    /// Every stack was taken or kept.
    pub(crate) fn finish(&mut self) {
        if let State::Writing(writer) = std::mem::replace(&mut self.state, State::Off)
            && let Err(error) = writer.finish(&self.place)
        {
            self.warn(&error);
        }
    }

    /// Begins the file anew, with what was taken of the old one already.
    fn write(&mut self, before: Option<&Reader>) {
        let begun = Writer::begin(&self.place, self.threads).and_then(|writer| {
            let Some(mut writer) = writer else {
                return Ok(None);
            };
            for (wanted, packed) in before.into_iter().flat_map(Reader::taken) {
                writer.put(&wanted, &packed)?;
            }
            Ok(Some(writer))
        });
        match begun {
            Ok(Some(writer)) => self.state = State::Writing(writer),
            Ok(None) => {}
            Err(error) => self.warn(&error),
        }
    }

    /// The file is not used, and is not found again.
    fn refuse(&self, problem: &str) {
        let file = self.place.file();
        tracing::warn!(
            file = %file.display(),
            problem,
            "the packed weights kept there are not used; they are packed from the checkpoint"
        );
        // A folder that nobody may write to keeps it.
        let _ = fs::remove_file(file);
    }

    fn warn(&self, error: &io::Error) {
        tracing::warn!(
            folder = %self.place.folder().display(),
            problem = %error,
            "the packed weights cannot be kept there; the next load packs them again"
        );
    }
}

/// Bytes that one checksum is made of, so that several threads make those of one matrix.
const SUMMED_BYTES: usize = 1 << 20;

/// XXH3 of the XXH3 of each mebibyte.
fn sum(bytes: &[u8], threads: usize) -> u64 {
    let pieces: Vec<&[u8]> = bytes.chunks(SUMMED_BYTES).collect();
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
