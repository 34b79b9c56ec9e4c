//! The digest over all frames of a hand-off and every field of its seal.
//!
//! Owns: the folding of frames and seal. Never: depends on the order of frames, because several
//! streams may carry them. Invariant: omitting, repeating or altering one frame changes the digest,
//! up to a chance of one in 2^64; changing one field of the seal always changes it. The digest
//! detects mistakes, not an adversary on the link.

use crate::{BlockPart, Seal, SealedWindow};
use cleave_domain::{BlockHash, SplitMix64};

/// The digest of a set of frames; equal sets have equal digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HandoffDigest(u64);

impl HandoffDigest {
    /// Adds a frame: its byte range, and its checksum.
    pub fn add_frame(&mut self, part: BlockPart, checksum: u64) {
        let place = (u64::from(part.ordinal) << 32) | u64::from(part.offset);
        self.merge(SplitMix64::hash(
            SplitMix64::hash(SplitMix64::hash(place) ^ u64::from(part.len)) ^ checksum,
        ));
    }

    /// Adds all frames of another digest, given its [`HandoffDigest::value`].
    pub fn merge(&mut self, value: u64) {
        self.0 = self.0.wrapping_add(value);
    }

    pub fn value(self) -> u64 {
        self.0
    }

    /// The digest of a seal: the frames of blocks so far, then every other field of the seal in its
    /// order, the tokens after their number, and last what there is of state and window. The
    /// seal's own digest is not looked at. Each step is a bijection, so two seals that differ in
    /// one field have different digests, and the order of tokens matters.
    pub fn seal_digest(self, seal: &Seal) -> u64 {
        let Seal {
            handoff,
            blocks_count,
            digest: _,
            content,
            output,
            state,
            window,
        } = seal;
        let fold = |digest: u64, word: u64| SplitMix64::hash(digest ^ word);
        let [first, second] = halves(*content);
        let head = [
            handoff.flight.0,
            u64::from(handoff.attempt),
            u64::from(*blocks_count),
            first,
            second,
            output.len() as u64,
        ];
        let tokens = output.iter().map(|token| u64::from(*token));
        // A mark, because a state's digest alone would be followed by the same words.
        let window = window.map(|SealedWindow { first, digest }| [u64::MAX, first.into(), digest]);
        head.into_iter()
            .chain(tokens)
            .chain(*state)
            .chain(window.into_iter().flatten())
            .fold(self.0, fold)
    }
}

fn halves(BlockHash(bytes): BlockHash) -> [u64; 2] {
    let whole = u128::from_le_bytes(bytes);
    [whole as u64, (whole >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use super::{HandoffDigest, SplitMix64};
    use crate::{BlockPart, Seal, SealedWindow};
    use cleave_domain::{BlockHash, FlightId, HandoffId, KvPlane};

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

    /// Both sides compute it, which may be of two builds. The value was computed by another
    /// program.
    #[test]
    fn a_frame_has_the_same_digest_in_every_build() {
        assert_eq!(fold(&[(part(3, 16), 5)]).value(), 0x87b1_95b0_8218_168f);
    }

    #[test]
    fn the_seal_digest_covers_every_field_and_position() {
        let handoff = HandoffId {
            flight: FlightId(1),
            attempt: 2,
        };
        let whole = fold(&[(part(0, 0), 5)]);
        let seal = Seal {
            handoff,
            blocks_count: 3,
            digest: 0,
            content: BlockHash([7; 16]),
            output: vec![4, 5],
            state: None,
            window: None,
        };
        let window = |first, digest| Some(SealedWindow { first, digest });
        let sealed = whole.seal_digest(&seal);
        let changed = |change: fn(&mut Seal)| {
            let mut seal = seal.clone();
            change(&mut seal);
            whole.seal_digest(&seal)
        };
        let sealed_with = |window| {
            let seal = seal.clone();
            whole.seal_digest(&Seal { window, ..seal })
        };
        let others = [
            fold(&[]).seal_digest(&seal),
            changed(|seal| seal.handoff.flight.0 = 0),
            changed(|seal| seal.handoff.attempt = 3),
            changed(|seal| seal.blocks_count = 2),
            changed(|seal| seal.content.0[0] ^= 1),
            changed(|seal| seal.content.0[15] ^= 1),
            changed(|seal| seal.output = vec![5, 4]),
            changed(|seal| seal.output = vec![4]),
            changed(|seal| seal.output = vec![4, 5, 0]),
            changed(|seal| seal.output = Vec::new()),
            changed(|seal| seal.state = Some(0)),
            changed(|seal| seal.state = Some(6)),
            sealed_with(window(0, 0)),
            sealed_with(window(0, 1)),
            sealed_with(window(1, 0)),
        ];
        assert_eq!(sealed, changed(|seal| seal.digest = 9));
        assert!(others.iter().all(|other| *other != sealed), "{others:x?}");
        let different: std::collections::BTreeSet<u64> = others.into_iter().collect();
        assert_eq!(different.len(), others.len());
    }

    /// The first outputs of SplitMix64 seeded with 0 and 1234567, as published with it.
    #[test]
    fn the_mixer_matches_published_splitmix64() {
        assert_eq!(SplitMix64::hash(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(SplitMix64::hash(1_234_567), 6_457_827_717_110_365_317);
    }
}
