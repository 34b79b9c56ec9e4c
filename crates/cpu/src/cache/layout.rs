//! How a file of packed weights is laid out: a head of one page, then of each matrix its words and, with eight bits, its
//! scales and starts, each from a page's beginning and with zeros to a page's end, then the index.
//!
//! Owns: head and index as bytes. All their numbers are u64, little-endian; words, scales and starts are as in memory.
//! Never: trusts a number of a file: an entry that comes out of `Entry::read` has the sizes that its shape calls for.
//! Invariant: every byte of a file is under a checksum, or is zero and looked at.

use super::{Packed, Wanted};
use crate::kernel::product::PANEL;
use crate::kernel::product::groups::{Bits, Scales, Units};
use crate::pack::{GROUPS, Kept, PER_STEP, RowOrder};
use std::ops::Range;
use twox_hash::XxHash3_64;

/// Where parts begin. In bytes; any vector's alignment divides it.
pub(super) const PAGE: usize = 4096;

const MAGIC: [u8; 8] = *b"CLEAVEpw";
/// Of head and index. What is between has a version of its own, [`crate::pack::LAYOUT`].
const VERSION: u64 = 1;
/// Which byte of a word comes first.
const ORDER: u64 = match cfg!(target_endian = "big") {
    true => 2,
    false => 1,
};

/// Of a head: magic, numbers, stamp and form, zeros, and at last the sum of all before.
const NUMBERS_AT: usize = MAGIC.len();
const STAMP_AT: usize = NUMBERS_AT + 7 * 8;
const FORM_AT: usize = STAMP_AT + 32;
const FORM_BYTES: usize = 32;
const SUM_AT: usize = PAGE - 8;

/// What a file says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) layout: u64,
    /// See [`cleave_engine::checkpoint::Stamp`].
    pub(super) stamp: [u8; 32],
    /// Precision and rounding, zeros after it.
    pub(super) form: [u8; FORM_BYTES],
    /// Of the whole file.
    pub(super) bytes: u64,
    pub(super) index_at: u64,
    pub(super) index_sum: u64,
}

impl Head {
    pub(super) fn form(name: &str) -> [u8; FORM_BYTES] {
        let mut form = [0; FORM_BYTES];
        for (to, from) in form.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        form
    }

    pub(super) fn write(&self) -> [u8; PAGE] {
        let Self {
            layout,
            stamp,
            form,
            bytes,
            index_at,
            index_sum,
        } = self;
        let mut page = [0; PAGE];
        page[..NUMBERS_AT].copy_from_slice(&MAGIC);
        let numbers = [VERSION, ORDER, *layout, *bytes, *index_at, *index_sum, 0];
        page[NUMBERS_AT..STAMP_AT].copy_from_slice(numbers.map(u64::to_le_bytes).as_flattened());
        page[STAMP_AT..FORM_AT].copy_from_slice(stamp);
        page[FORM_AT..FORM_AT + FORM_BYTES].copy_from_slice(form);
        let sum = XxHash3_64::oneshot(&page[..SUM_AT]);
        page[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// # Errors
    /// What is wrong with it.
    pub(super) fn read(page: &[u8; PAGE]) -> Result<Self, String> {
        if !page.starts_with(&MAGIC) {
            return Err("not a file of packed weights".to_owned());
        }
        let sum = XxHash3_64::oneshot(&page[..SUM_AT]);
        if page[SUM_AT..] != sum.to_le_bytes() {
            return Err("its head does not fit its checksum".to_owned());
        }
        let numbers = numbers::<7>(&page[NUMBERS_AT..STAMP_AT]);
        let [version, order, layout, bytes, index_at, index_sum, _] = numbers;
        if (version, order) != (VERSION, ORDER) {
            return Err(format!(
                "version {version} with byte order {order}, where {VERSION} with {ORDER} is read"
            ));
        }
        let (mut stamp, mut form) = ([0; 32], [0; FORM_BYTES]);
        stamp.copy_from_slice(&page[STAMP_AT..FORM_AT]);
        form.copy_from_slice(&page[FORM_AT..FORM_AT + FORM_BYTES]);
        Ok(Self {
            layout,
            stamp,
            form,
            bytes,
            index_at,
            index_sum,
        })
    }
}

fn numbers<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let (eights, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|i| u64::from_le_bytes(eights[i]))
}

/// One matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) wanted: Wanted,
    pub(super) kept: Kept,
    pub(super) words_sum: u64,
    pub(super) sides_sum: u64,
}

/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 10 * 8;

impl Entry {
    pub(super) fn new(wanted: Wanted, packed: &Packed, (words_sum, sides_sum): (u64, u64)) -> Self {
        Self {
            wanted,
            kept: packed.kept,
            words_sum,
            sides_sum,
        }
    }

    pub(super) fn write(&self) -> Vec<u8> {
        let Self {
            wanted,
            kept,
            words_sum,
            sides_sum,
        } = *self;
        let Wanted {
            names,
            order,
            rows,
            width,
        } = wanted;
        let none = Units::default();
        let (tag, units) = match kept {
            Kept::F32 => (0, none),
            Kept::Bf16 => (1, none),
            Kept::F16 => (5, none),
            Kept::Int8 => (2, none),
            Kept::Groups(units) => match units.bits {
                Bits::Four => (3, units),
                Bits::Eight => (4, units),
            },
        };
        let numbers = [
            names,
            u64::from(order == RowOrder::Gated),
            rows as u64,
            width as u64,
            tag,
            units.steps as u64,
            u64::from(units.scales == Scales::Single),
            u64::from(units.has_zeros),
            words_sum,
            sides_sum,
        ];
        numbers.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    /// `None` if it makes no sense.
    pub(super) fn read(bytes: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let [
            names,
            gated,
            rows,
            width,
            tag,
            steps,
            single,
            zeros,
            words_sum,
            sides_sum,
        ] = numbers(bytes);
        let width = usize::try_from(width).ok()?;
        let units = Units {
            bits: match tag {
                4 => Bits::Eight,
                _ => Bits::Four,
            },
            steps: usize::try_from(steps).ok()?,
            scales: match flag(single)? {
                true => Scales::Single,
                false => Scales::Brain,
            },
            has_zeros: flag(zeros)?,
        };
        let kept = match tag {
            0 => Kept::F32,
            1 => Kept::Bf16,
            2 => Kept::Int8,
            5 => Kept::F16,
            3 | 4
                if GROUPS.contains(&units.steps.checked_mul(PER_STEP)?)
                    && width.is_multiple_of(units.steps * PER_STEP) =>
            {
                Kept::Groups(units)
            }
            _ => return None,
        };
        let wanted = Wanted {
            names,
            order: match flag(gated)? {
                true => RowOrder::Gated,
                false => RowOrder::Stacked,
            },
            rows: usize::try_from(rows).ok()?,
            width,
        };
        Some(Self {
            wanted,
            kept,
            words_sum,
            sides_sum,
        })
    }

    /// Bytes of words, and of scales and starts. `None` if there cannot be so many.
    fn sizes(&self) -> Option<(usize, usize)> {
        let Wanted {
            order, rows, width, ..
        } = self.wanted;
        // No form has more than a word for an element.
        rows.checked_add(PANEL)?
            .checked_mul(width)?
            .checked_mul(8)?;
        let panels = order.panels(rows);
        let sides = match self.kept {
            Kept::Int8 => panels.checked_mul(PANEL * 8)?,
            Kept::F32 | Kept::Bf16 | Kept::F16 | Kept::Groups(_) => 0,
        };
        Some((panels * self.kept.panel_words(width) * 4, sides))
    }

    /// Where its words are, and its scales and starts; and where the next entry's begin.
    pub(super) fn places(&self, at: usize) -> Option<(Range<usize>, Range<usize>, usize)> {
        let (words, sides) = self.sizes()?;
        let sides_at = at.checked_add(words)?.checked_next_multiple_of(PAGE)?;
        let end = sides_at
            .checked_add(sides)?
            .checked_next_multiple_of(PAGE)?;
        Some((at..at + words, sides_at..sides_at + sides, end))
    }
}

fn flag(number: u64) -> Option<bool> {
    match number {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}
