//! Layout of a file of packed weights: a header of one page; per matrix its words and, with eight
//! bits, its columns' scales, each padded with zeros to whole pages; then the index.
//!
//! Owns: the bytes of header and index. All their numbers are u64, little-endian; words and
//! scales are as in memory.
//! Never: trusts a number of a file: an entry from `PackedEntry::read` has the sizes of its shape.
//! Invariant: every byte of a file is covered by a checksum, or verified to be zero.

use super::{PackedStack, StackKey};
use crate::pack::{PER_STEP, RowOrder, StackForm, groups_of};
use cleave_cpu_kernels::kernel::product::PANEL;
use cleave_cpu_kernels::kernel::product::groups::{GroupCodes, GroupLayout, ScaleFormat};
use cleave_engine::ops::SLICES_MAX;
use std::ops::Range;
use twox_hash::XxHash3_64;

/// Alignment of parts in bytes; a multiple of every vector's alignment.
pub(super) const PAGE: usize = 4096;

const MAGIC: [u8; 8] = *b"CLEAVEpw";
/// Version of header and index. The data between have their own version, [`crate::pack::LAYOUT`].
const VERSION: u64 = 2;
/// Byte order of the words.
const ORDER: u64 = if cfg!(target_endian = "big") { 2 } else { 1 };

/// Offsets in the header: magic, numbers, stamp and form, zeros, and the checksum of all before at
/// the end.
const NUMBERS_AT: usize = MAGIC.len();
const STAMP_AT: usize = NUMBERS_AT + 7 * 8;
const FORM_AT: usize = STAMP_AT + 32;
const FORM_BYTES: usize = 32;
const SUM_AT: usize = PAGE - 8;

/// The header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackedHeader {
    pub(super) layout: u64,
    /// Bytes of the checkpoint's [`cleave_checkpoint::CheckpointStamp`].
    pub(super) stamp: [u8; 32],
    /// Precision and rounding, padded with zeros.
    pub(super) form: [u8; FORM_BYTES],
    /// Length of the whole file.
    pub(super) bytes: u64,
    pub(super) index_at: u64,
    pub(super) index_checksum: u64,
}

impl PackedHeader {
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
            index_checksum: index_sum,
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
    /// A description of the problem.
    pub(super) fn read(page: &[u8; PAGE]) -> Result<Self, String> {
        if !page.starts_with(&MAGIC) {
            return Err("not a file of packed weights".to_owned());
        }
        let sum = XxHash3_64::oneshot(&page[..SUM_AT]);
        if page[SUM_AT..] != sum.to_le_bytes() {
            return Err("the checksum of its header is wrong".to_owned());
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
            index_checksum: index_sum,
        })
    }
}

fn numbers<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let (eights, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|i| u64::from_le_bytes(eights[i]))
}

/// Index entry of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedEntry {
    pub(super) key: StackKey,
    pub(super) stack_form: StackForm,
    pub(super) words_checksum: u64,
    pub(super) scales_checksum: u64,
}

/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 11 * 8;

impl PackedEntry {
    pub(super) fn new(
        key: StackKey,
        packed: &PackedStack,
        words_checksum: u64,
        scales_checksum: u64,
    ) -> Self {
        Self {
            key,
            stack_form: packed.stack_form,
            words_checksum,
            scales_checksum,
        }
    }

    pub(super) fn write(&self) -> Vec<u8> {
        let Self {
            key,
            stack_form,
            words_checksum: words_sum,
            scales_checksum: sides_sum,
        } = *self;
        let StackKey {
            names,
            order,
            rows,
            width,
            slices,
        } = key;
        let none = GroupLayout::default();
        let (tag, units) = match stack_form {
            StackForm::F32 => (0, none),
            StackForm::Bf16 => (1, none),
            StackForm::F16 => (5, none),
            StackForm::Int8 => (2, none),
            StackForm::Groups(units) => match units.codes {
                GroupCodes::Four => (3, units),
                GroupCodes::Eight => (4, units),
                GroupCodes::Float4 => (6, units),
            },
        };
        let numbers = [
            names,
            u64::from(order == RowOrder::GateUpInterleaved),
            rows as u64,
            width as u64,
            slices as u64,
            tag,
            units.steps as u64,
            match units.scales {
                ScaleFormat::Bf16 => 0,
                ScaleFormat::F32 => 1,
                ScaleFormat::F16 => 2,
                ScaleFormat::E4m3 => 3,
            },
            u64::from(units.has_zeros),
            words_sum,
            sides_sum,
        ];
        numbers.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    /// `None` if a number is invalid.
    pub(super) fn read(bytes: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let [
            names,
            gated,
            rows,
            width,
            slices,
            tag,
            steps,
            scales,
            zeros,
            words_sum,
            sides_sum,
        ] = numbers(bytes);
        let width = usize::try_from(width).ok()?;
        let units = GroupLayout {
            codes: match tag {
                4 => GroupCodes::Eight,
                6 => GroupCodes::Float4,
                _ => GroupCodes::Four,
            },
            steps: usize::try_from(steps).ok()?,
            scales: match scales {
                0 => ScaleFormat::Bf16,
                1 => ScaleFormat::F32,
                2 => ScaleFormat::F16,
                3 => ScaleFormat::E4m3,
                _ => return None,
            },
            has_zeros: flag(zeros)?,
        };
        let stack_form = match tag {
            0 => StackForm::F32,
            1 => StackForm::Bf16,
            2 => StackForm::Int8,
            5 => StackForm::F16,
            3 | 4 | 6
                if groups_of(units.codes).contains(&units.steps.checked_mul(PER_STEP)?)
                    && width.is_multiple_of(units.steps * PER_STEP) =>
            {
                StackForm::Groups(units)
            }
            _ => return None,
        };
        let key = StackKey {
            names,
            order: if flag(gated)? {
                RowOrder::GateUpInterleaved
            } else {
                RowOrder::Stacked
            },
            rows: usize::try_from(rows).ok()?,
            width,
            slices: usize::try_from(slices)
                .ok()
                .filter(|slices| (1..=SLICES_MAX).contains(slices))?,
        };
        Some(Self {
            key,
            stack_form,
            words_checksum: words_sum,
            scales_checksum: sides_sum,
        })
    }

    /// Bytes of words, and of columns' scales. `None` if the shape overflows.
    fn byte_counts(&self) -> Option<(usize, usize)> {
        let StackKey {
            names: _,
            order,
            rows,
            width,
            slices: _,
        } = self.key;
        // No format has more than a word per element.
        rows.checked_add(PANEL)?
            .checked_mul(width)?
            .checked_mul(8)?;
        let panels = order.panels(rows);
        let sides = panels.checked_mul(PANEL * 4 * self.stack_form.column_words())?;
        Some((panels * self.stack_form.panel_words(width) * 4, sides))
    }

    /// Byte ranges of words, and of columns' scales; and the start of the next entry's.
    pub(super) fn byte_ranges(&self, at: usize) -> Option<(Range<usize>, Range<usize>, usize)> {
        let (words, sides) = self.byte_counts()?;
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
