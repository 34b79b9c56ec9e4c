//! How parts of blocks are laid into staging memory.
//!
//! Owns: that layout. Never: copies.
//! Invariant: every byte of every part is in exactly one slice; no half is longer, or has more slices, than allowed.

use super::lane::Range;

/// A slice begins where kernels can.
const ALIGNMENT: usize = 16;

/// A run of bytes in the pool, in staging memory and in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// Which part.
    pub(super) part: usize,
    /// First byte in the part.
    pub(super) offset: usize,
    /// First byte in the pool.
    pub(super) pool: usize,
    /// First byte in staging memory.
    pub(super) staging: usize,
    pub(super) bytes: usize,
}

/// What goes through staging memory at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Half {
    pub(super) slices: Vec<Slice>,
    /// Of staging memory, from its beginning.
    pub(super) bytes: usize,
}

/// Lays ranges of the pool into as many halves as they take, in order.
pub(super) fn halves(ranges: &[Range], bytes_max: usize, slices_max: usize) -> Vec<Half> {
    let mut halves: Vec<Half> = Vec::new();
    for (part, range) in ranges.iter().enumerate() {
        let mut offset = 0;
        while offset < range.bytes {
            let open = halves.last().map(|half| {
                let free = bytes_max - half.bytes.next_multiple_of(ALIGNMENT).min(bytes_max);
                (free, half.slices.len())
            });
            // Crumbs at the end of a half would be copies of their own.
            let least = (range.bytes - offset).min(bytes_max / 4);
            if open.is_none_or(|(free, count)| free < least || count >= slices_max) {
                halves.push(Half::default());
            }
            let half = halves.last_mut().expect("one was just pushed");
            let staging = half.bytes.next_multiple_of(ALIGNMENT);
            let bytes = (range.bytes - offset).min(bytes_max - staging);
            half.slices.push(Slice {
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
    use super::{Range, halves};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_goes_through_staging_memory_once(
            lens in prop::collection::vec(0usize..300, 0..40),
            slices_max in 1usize..6,
        ) {
            let mut first = 0;
            let ranges: Vec<Range> = lens.iter().map(|bytes| {
                let range = Range { first, bytes: *bytes };
                first += bytes + 7;
                range
            }).collect();
            let mut seen: Vec<Vec<u32>> = lens.iter().map(|len| vec![0; *len]).collect();
            for half in halves(&ranges, 128, slices_max) {
                prop_assert!(half.bytes <= 128 && half.slices.len() <= slices_max);
                let mut end = 0;
                for slice in &half.slices {
                    prop_assert!(slice.staging >= end && slice.bytes > 0);
                    end = slice.staging + slice.bytes;
                    prop_assert!(end <= half.bytes);
                    prop_assert_eq!(slice.pool, ranges[slice.part].first + slice.offset);
                    let of = slice.offset..slice.offset + slice.bytes;
                    seen[slice.part][of].iter_mut().for_each(|count| *count += 1);
                }
            }
            prop_assert!(seen.iter().flatten().all(|count| *count == 1));
        }
    }
}
