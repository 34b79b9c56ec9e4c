//! The digest over all frames of a hand-off and every field of its seal.
//!
//! Owns: the folding of frames and seal. Never: depends on the order of frames, because several
//! streams may carry them. Invariant: omitting, repeating or altering one frame changes the digest,
//! up to a chance of one in 2^64; changing one field of the seal always changes it. The digest
//! detects mistakes, not an adversary on the link.

use crate::BlockPart;
use cleave_domain::{BlockHash, HandoffId, KvPlane, TokenId};

/// The digest of a set of frames; equal sets have equal digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HandoffDigest(u64);

impl HandoffDigest {
    /// Adds a frame: its byte range, and its checksum.
    pub fn add_frame(&mut self, part: BlockPart, checksum: u64) {
        let place = (u64::from(part.ordinal) << 32) | u64::from(part.offset);
        self.merge(mix(mix(mix(place) ^ u64::from(part.len)) ^ checksum));
    }

    /// Adds all frames of another digest, given its [`HandoffDigest::value`].
    pub fn merge(&mut self, value: u64) {
        self.0 = self.0.wrapping_add(value);
    }

    pub fn value(self) -> u64 {
        self.0
    }

    /// The digest of a seal: the frames so far, then every other field of the seal in its order,
    /// the tokens after their number. Each step is a bijection, so two seals that differ in one
    /// field have different digests, and the order of tokens matters.
    pub fn seal_digest(
        self,
        handoff: HandoffId,
        blocks_count: u32,
        content: BlockHash,
        output: &[TokenId],
    ) -> u64 {
        let fold = |digest: u64, word: u64| mix(digest ^ word);
        let [first, second] = halves(content);
        let head = [
            handoff.flight.0,
            u64::from(handoff.attempt),
            u64::from(blocks_count),
            first,
            second,
            output.len() as u64,
        ];
        let tokens = output.iter().map(|token| u64::from(*token));
        head.into_iter().chain(tokens).fold(self.0, fold)
    }
}

fn halves(BlockHash(bytes): BlockHash) -> [u64; 2] {
    let whole = u128::from_le_bytes(bytes);
    [whole as u64, (whole >> 64) as u64]
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): each bit of the input affects half of the
/// output bits.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::{HandoffDigest, mix};
    use crate::BlockPart;
    use cleave_domain::{BlockHash, FlightId, HandoffId};

    fn part(ordinal: u32, offset: u32) -> BlockPart {
        let len = 8;
        BlockPart {
            plane: KvPlane::Blocks,
            ordinal,
            offset,
            len,
        }
    }

    fn fold(frames: &[(BlockPart, u64)]) -> HandoffDigest {
        let mut digest = HandoffDigest::default();
        for (part, checksum) in frames {
            digest.add_frame(*part, *checksum);
        }
        digest
    }

    #[test]
    fn the_digest_depends_on_all_but_the_order_of_frames() {
        let whole = fold(&[(part(0, 0), 5), (part(1, 0), 6)]);
        assert_eq!(whole, fold(&[(part(1, 0), 6), (part(0, 0), 5)]));
        assert_ne!(whole, fold(&[(part(0, 0), 6), (part(1, 0), 5)]));
        assert_ne!(whole, fold(&[(part(0, 0), 5)]));
        assert_ne!(whole, fold(&[(part(0, 0), 5), (part(0, 1), 6)]));
        let mut merged = fold(&[(part(1, 0), 6)]);
        merged.merge(fold(&[(part(0, 0), 5)]).value());
        assert_eq!(whole, merged);
    }

    #[test]
    fn the_seal_digest_covers_every_field_and_position() {
        let handoff = |flight, attempt| HandoffId {
            flight: FlightId(flight),
            attempt,
        };
        let content = |byte: usize| {
            let mut content = BlockHash([7; 16]);
            content.0[byte % 16] ^= u8::from(byte < 16);
            content
        };
        let whole = fold(&[(part(0, 0), 5)]);
        let sealed = whole.seal_digest(handoff(1, 2), 3, content(16), &[4, 5]);
        let others = [
            fold(&[]).seal_digest(handoff(1, 2), 3, content(16), &[4, 5]),
            whole.seal_digest(handoff(0, 2), 3, content(16), &[4, 5]),
            whole.seal_digest(handoff(1, 3), 3, content(16), &[4, 5]),
            whole.seal_digest(handoff(1, 2), 2, content(16), &[4, 5]),
            whole.seal_digest(handoff(1, 2), 3, content(0), &[4, 5]),
            whole.seal_digest(handoff(1, 2), 3, content(15), &[4, 5]),
            whole.seal_digest(handoff(1, 2), 3, content(16), &[5, 4]),
            whole.seal_digest(handoff(1, 2), 3, content(16), &[4]),
            whole.seal_digest(handoff(1, 2), 3, content(16), &[4, 5, 0]),
            whole.seal_digest(handoff(1, 2), 3, content(16), &[]),
        ];
        assert!(others.iter().all(|other| *other != sealed), "{others:x?}");
        let different: std::collections::BTreeSet<u64> = others.into_iter().collect();
        assert_eq!(different.len(), others.len());
    }

    /// The first outputs of SplitMix64 seeded with 0 and 1234567, as published with it.
    #[test]
    fn the_mixer_matches_published_splitmix64() {
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
    }
}
