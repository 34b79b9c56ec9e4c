//! The note that follows the bytes of a written slot.
//!
//! Owns: its eight bytes: the slot's number, and the lower half of that number's checksum, both
//! little-endian. Never: names a slot that does not exist; the reader of a note compares.
//! Invariant: a note in which any bit was flipped is not taken for another slot's.

/// Bytes of a note.
pub(super) const NOTE_BYTES: usize = 8;

/// Encodes the note for a slot.
pub(super) fn write(slot: u32) -> [u8; NOTE_BYTES] {
    let (mut note, number) = ([0; NOTE_BYTES], slot.to_le_bytes());
    note[..4].copy_from_slice(&number);
    note[4..].copy_from_slice(&check(number));
    note
}

/// Decodes a note; `None` if it is damaged or no note.
pub(super) fn read(note: &[u8]) -> Option<u32> {
    let note: &[u8; NOTE_BYTES] = note.try_into().ok()?;
    let (number, rest) = note.split_first_chunk::<4>()?;
    (*rest == check(*number)).then(|| u32::from_le_bytes(*number))
}

fn check(number: [u8; 4]) -> [u8; 4] {
    let [a, b, c, d, ..] = crate::checksum(&number).to_le_bytes();
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::{NOTE_BYTES, read, write};

    #[test]
    fn a_flipped_bit_invalidates_a_note() {
        for slot in (0..2000).chain([u32::MAX, 1 << 31]) {
            let mut note = write(slot);
            assert_eq!(read(&note), Some(slot));
            for bit in 0..8 * NOTE_BYTES {
                note[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(read(&note), None, "slot {slot}, bit {bit}");
                note[bit / 8] ^= 1 << (bit % 8);
            }
        }
        assert_eq!(read(&write(1)[..4]), None);
        assert_eq!(read(&[]), None);
    }
}
