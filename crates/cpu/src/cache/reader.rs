//! Reading a file of packed weights where it is mapped.
//!
//! Owns: the mapping, and what is compared before anything of it is used.
//! Never: writes, or copies words.
//! Invariant: what is taken has the shape that was asked for and fits its checksum.

use super::layout::{ENTRY_BYTES, Entry, Head, PAGE};
use super::{Packed, Place, Wanted, sum};
use crate::kernel::product::PANEL;
use crate::memory::{MappedWords, Words};
use crate::pack::{Columns, Kept, LAYOUT};
use memmap2::Mmap;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// A file whose head and index are in order.
#[derive(Debug)]
pub(super) struct Reader {
    map: Arc<Mmap>,
    /// With where each begins.
    entries: Vec<(Entry, usize)>,
    taken: usize,
}

impl Reader {
    /// `None` if there is no file.
    ///
    /// # Errors
    /// Why it is not used.
    pub(super) fn open(place: &Place) -> Result<Option<Self>, String> {
        let (file, metadata) = match cleave_files::open(&place.file()) {
            Ok(opened) => opened,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let length = metadata.len();
        if length < PAGE as u64 {
            return Err(format!("{length} bytes are less than a head"));
        }
        // SAFETY: a mapping is undefined if another process shortens or rewrites the file while it is read. Nobody here
        // does: a file gets its name when it is whole, and is replaced or removed by name alone.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| error.to_string())?;
        let entries = entries(&map, place)?;
        Ok(Some(Self {
            map: Arc::new(map),
            entries,
            taken: 0,
        }))
    }

    /// The next matrix.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(super) fn take(&mut self, wanted: &Wanted, threads: usize) -> Result<Packed, String> {
        let number = self.taken;
        let &(entry, at) = self
            .entries
            .get(number)
            .ok_or_else(|| format!("has {number} matrices, and another one is wanted"))?;
        if entry.wanted != *wanted {
            return Err(format!("matrix {number} is another than is wanted"));
        }
        let places = entry.places(at).ok_or("too large")?;
        let (words, sides, end) = places;
        let is_zero = |range: Range<usize>| self.map[range].iter().all(|byte| *byte == 0);
        if sum(&self.map[words.clone()], threads) != entry.words_sum
            || XxHash3_64::oneshot(&self.map[sides.clone()]) != entry.sides_sum
            || !is_zero(words.end..sides.start)
            || !is_zero(sides.end..end)
        {
            return Err(format!("matrix {number} does not fit its checksum"));
        }
        self.taken += 1;
        Ok(self.packed(&entry, (words, sides)))
    }

    /// What was taken so far.
    pub(super) fn taken(&self) -> impl Iterator<Item = (Wanted, Packed)> {
        self.entries[..self.taken].iter().filter_map(|(entry, at)| {
            let (words, sides, _) = entry.places(*at)?;
            Some((entry.wanted, self.packed(entry, (words, sides))))
        })
    }

    fn packed(&self, entry: &Entry, (words, sides): (Range<usize>, Range<usize>)) -> Packed {
        let of_columns = (entry.kept == Kept::Int8).then(|| {
            let (all, _) = self.map[sides].as_chunks::<4>();
            let (scales, starts) =
                all.split_at(entry.wanted.order.panels(entry.wanted.rows) * PANEL);
            Columns {
                scales: scales.iter().map(|b| f32::from_ne_bytes(*b)).collect(),
                starts: starts.iter().map(|b| u32::from_ne_bytes(*b)).collect(),
            }
        });
        Packed {
            kept: entry.kept,
            words: Words::Mapped(MappedWords::new(&self.map, words)),
            of_columns,
        }
    }
}

/// Compares everything but the weights.
fn entries(file: &[u8], place: &Place) -> Result<Vec<(Entry, usize)>, String> {
    let head = file.first_chunk::<PAGE>().ok_or("shorter than a head")?;
    let head = Head::read(head)?;
    if head.layout != LAYOUT {
        let layout = head.layout;
        return Err(format!("layout {layout}, where {LAYOUT} is read"));
    }
    if (head.stamp, head.form) != (place.stamp().0, Head::form(place.form())) {
        return Err("of another checkpoint or form".to_owned());
    }
    if head.bytes != file.len() as u64 {
        let (is, was) = (file.len(), head.bytes);
        return Err(format!("{is} bytes long, where it was written with {was}"));
    }
    let index_at = usize::try_from(head.index_at).map_err(|error| error.to_string())?;
    let index = file.get(index_at..).ok_or("its index is missing")?;
    if XxHash3_64::oneshot(index) != head.index_sum {
        return Err("its index does not fit its checksum".to_owned());
    }
    let mut entries = Vec::new();
    let (all, rest) = index.as_chunks::<ENTRY_BYTES>();
    let mut at = PAGE;
    for entry in all {
        let entry = Entry::read(entry).ok_or("its index makes no sense")?;
        let (_, _, end) = entry.places(at).ok_or("its index makes no sense")?;
        entries.push((entry, at));
        at = end;
    }
    match at == index_at && rest.is_empty() {
        true => Ok(entries),
        false => Err("its index does not fit its length".to_owned()),
    }
}
