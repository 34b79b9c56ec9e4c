//! Reading a mapped file of packed weights.
//!
//! Owns: the mapping, and its verification.
//! Never: writes, or copies words.
//! Invariant: a stack that is taken has the expected shape and a correct checksum.

use super::layout::{ENTRY_BYTES, PAGE, PackedEntry, PackedHeader};
use super::{PackedLocation, PackedStack, StackKey, checksum};
use crate::pack::LAYOUT;
use cleave_cpu_kernels::memory::{MappedWords, WeightWords};
use memmap2::Mmap;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// A file whose header and index were verified.
#[derive(Debug)]
pub(super) struct PackedReader {
    map: Arc<Mmap>,
    /// Entries, each with its first byte.
    entries: Vec<(PackedEntry, usize)>,
    taken_count: usize,
}

impl PackedReader {
    /// `None` if there is no file.
    ///
    /// # Errors
    /// The reason not to use the file.
    pub(super) fn open(place: &PackedLocation) -> Result<Option<Self>, String> {
        let (file, metadata) = match cleave_files::open(&place.file()) {
            Ok(opened) => opened,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let length = metadata.len();
        if length < PAGE as u64 {
            return Err(format!("{length} bytes are shorter than the header"));
        }
        // SAFETY: a mapping is undefined if another process shortens or rewrites the file while it
        // is read. No code of ours does: a file gets its name when it is complete, and is replaced
        // or removed by name only.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| error.to_string())?;
        let entries = entries(&map, place)?;
        Ok(Some(Self {
            map: Arc::new(map),
            entries,
            taken_count: 0,
        }))
    }

    /// Takes the next matrix.
    ///
    /// # Errors
    /// The reason not to use it.
    pub(super) fn take(&mut self, key: &StackKey, threads: usize) -> Result<PackedStack, String> {
        let number = self.taken_count;
        let &(entry, at) = self
            .entries
            .get(number)
            .ok_or_else(|| format!("has only {number} matrices"))?;
        if entry.key != *key {
            return Err(format!("matrix {number} is not the expected one"));
        }
        let places = entry.byte_ranges(at).ok_or("too large")?;
        let (words, sides, end) = places;
        let is_zero = |range: Range<usize>| self.map[range].iter().all(|byte| *byte == 0);
        if checksum(&self.map[words.clone()], threads) != entry.words_checksum
            || XxHash3_64::oneshot(&self.map[sides.clone()]) != entry.scales_checksum
            || !is_zero(words.end..sides.start)
            || !is_zero(sides.end..end)
        {
            return Err(format!("the checksum of matrix {number} is wrong"));
        }
        self.taken_count += 1;
        Ok(self.packed(&entry, words, sides))
    }

    /// Stacks that were taken so far.
    pub(super) fn taken_stacks(&self) -> impl Iterator<Item = (StackKey, PackedStack)> {
        self.entries[..self.taken_count]
            .iter()
            .filter_map(|(entry, at)| {
                let (words, sides, _) = entry.byte_ranges(*at)?;
                Some((entry.key, self.packed(entry, words, sides)))
            })
    }

    fn packed(&self, entry: &PackedEntry, words: Range<usize>, sides: Range<usize>) -> PackedStack {
        let has_scales = entry.stack_form.column_words() > 0;
        let column_scales = has_scales.then(|| {
            let (scales, _) = self.map[sides].as_chunks::<4>();
            scales.iter().map(|b| f32::from_ne_bytes(*b)).collect()
        });
        PackedStack {
            stack_form: entry.stack_form,
            words: WeightWords::Mapped(MappedWords::new(&self.map, words)),
            column_scales,
        }
    }
}

/// Verifies everything but the weights.
fn entries(file: &[u8], place: &PackedLocation) -> Result<Vec<(PackedEntry, usize)>, String> {
    let head = file
        .first_chunk::<PAGE>()
        .ok_or("shorter than the header")?;
    let head = PackedHeader::read(head)?;
    if head.layout != LAYOUT {
        let layout = head.layout;
        return Err(format!("layout {layout}, where {LAYOUT} is read"));
    }
    if (head.stamp, head.form) != (place.stamp().0, PackedHeader::form(place.form())) {
        return Err("of another checkpoint or form".to_owned());
    }
    if head.bytes != file.len() as u64 {
        let (is, was) = (file.len(), head.bytes);
        return Err(format!("{is} bytes long, where it was written with {was}"));
    }
    let index_at = usize::try_from(head.index_at).map_err(|error| error.to_string())?;
    let index = file.get(index_at..).ok_or("its index is missing")?;
    if XxHash3_64::oneshot(index) != head.index_checksum {
        return Err("the checksum of its index is wrong".to_owned());
    }
    let mut entries = Vec::new();
    let (all, rest) = index.as_chunks::<ENTRY_BYTES>();
    let mut at = PAGE;
    for entry in all {
        let entry = PackedEntry::read(entry).ok_or("its index is invalid")?;
        let (_, _, end) = entry.byte_ranges(at).ok_or("its index is invalid")?;
        entries.push((entry, at));
        at = end;
    }
    if at == index_at && rest.is_empty() {
        Ok(entries)
    } else {
        Err("its index does not match its length".to_owned())
    }
}
