//! The layout of parts of blocks in staging memory.
//!
//! Owns: that layout. Never: copies.
//! Invariant: every byte of every part is in exactly one slice; no half exceeds the allowed size or
//! number of slices.

use super::lane::PoolRange;

/// The alignment of slices in bytes, as the kernels need it.
const ALIGNMENT: usize = 16;

/// A run of bytes with its places in a part, in the pool and in staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StagedSlice {
    /// Index of the part.
    pub(super) part: usize,
    /// First byte in the part.
    pub(super) offset: usize,
    /// First byte in the pool.
    pub(super) pool: usize,
    /// First byte in staging memory.
    pub(super) staging: usize,
    pub(super) bytes: usize,
}

/// The slices that pass through staging memory at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StagedHalf {
    pub(super) slices: Vec<StagedSlice>,
    /// Used bytes of staging memory, from its beginning.
    pub(super) bytes: usize,
}

/// Distributes ranges of the pool over as many halves as they need, in order.
pub(super) fn split_into_halves(
    ranges: &[PoolRange],
    bytes_max: usize,
    slices_max: usize,
) -> Vec<StagedHalf> {
    let mut halves: Vec<StagedHalf> = Vec::new();
    for (part, range) in ranges.iter().enumerate() {
        let mut offset = 0;
        while offset < range.bytes {
            let open = halves.last().map(|half| {
                let free = bytes_max - half.bytes.next_multiple_of(ALIGNMENT).min(bytes_max);
                (free, half.slices.len())
            });
            // A slice is not split for the sake of a few free bytes at a half's end: each piece
            // would be a copy of its own.
            let least = (range.bytes - offset).min(bytes_max / 4);
            if open.is_none_or(|(free, count)| free < least || count >= slices_max) {
                halves.push(StagedHalf::default());
            }
            let half = halves.last_mut().expect("one was just pushed");
            let staging = half.bytes.next_multiple_of(ALIGNMENT);
            let bytes = (range.bytes - offset).min(bytes_max - staging);
            half.slices.push(StagedSlice {
                part,
                offset,
                pool: range.first + offset,
                staging,
                bytes,
            });
            half.bytes = staging + bytes;
            offset += bytes;
        }
    }
    halves
}

#[cfg(test)]
mod tests {
    use super::{PoolRange, split_into_halves};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_is_staged_exactly_once(
            lens in prop::collection::vec(0usize..300, 0..40),
            slices_max in 1usize..6,
        ) {
            let mut first = 0;
            let ranges: Vec<PoolRange> = lens.iter().map(|bytes| {
                let range = PoolRange { first, bytes: *bytes };
                first += bytes + 7;
                range
            }).collect();
            let mut counts: Vec<Vec<u32>> = lens.iter().map(|len| vec![0; *len]).collect();
            for half in split_into_halves(&ranges, 128, slices_max) {
                prop_assert!(half.bytes <= 128 && half.slices.len() <= slices_max);
                let mut end = 0;
                for slice in &half.slices {
                    prop_assert!(slice.staging >= end && slice.bytes > 0);
                    end = slice.staging + slice.bytes;
                    prop_assert!(end <= half.bytes);
                    prop_assert_eq!(slice.pool, ranges[slice.part].first + slice.offset);
                    let of = slice.offset..slice.offset + slice.bytes;
                    counts[slice.part][of].iter_mut().for_each(|count| *count += 1);
                }
            }
            prop_assert!(counts.iter().flatten().all(|count| *count == 1));
        }
    }
}
