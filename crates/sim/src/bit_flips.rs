//! Bit flips in any field of any message.
//!
//! Owns: encoding a message, flipping one bit, and the check of a link, which is the real links'
//! own ([`cleave_kv::checksum`]). Never: knows the meaning of a message. Invariant: a message
//! arrives as it was sent, or as [`MessageArrival::Damaged`], unless the link trusts its input
//! ([`LinkChecks::Trust`]); then it arrives as whatever the bytes decode to.

use crate::world::FaultPlan;
use cleave_domain::SplitMix64;
use cleave_kv::{Packet, Seal, checksum};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Whether links verify checksums. Every real link does; `Trust` shows that undetected flips
/// would be found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkChecks {
    /// A message with a wrong checksum ends the connection.
    #[default]
    Verify,
    /// Whatever decodes is accepted.
    Trust,
}

/// A message as its receiver sees it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MessageArrival<M> {
    Damaged,
    /// The message decodes; the flip was not detected.
    Received(M),
}

/// Messages with one flipped bit, of 100,000.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BitFlipRates {
    /// Packets between workers, payloads excepted.
    pub(crate) packets: u32,
    /// Reports and tokens from workers to routers.
    pub(crate) worker_messages: u32,
    /// Orders from routers to workers.
    pub(crate) orders: u32,
    /// Seals that change behind the link's check, in the memory of a worker.
    pub(crate) seals: u32,
}

/// Separates the draws of flips from the seed's other draws.
const FLIP_SEED_SALT: u64 = 0x9fb2_1c65_1e98_df25;

impl BitFlipRates {
    /// Drawn from its own generator, so that the rest of a seed's world stays the same.
    pub(crate) fn draw(seed: u64, fault_plan: FaultPlan) -> Self {
        let rng = &mut flip_rng(seed);
        let mut rate = |most: u32| {
            if fault_plan == FaultPlan::NoFaults || rng.chance(500) {
                0
            } else {
                rng.count(0, most)
            }
        };
        Self {
            packets: rate(4000),
            worker_messages: rate(1000),
            orders: rate(2000),
            seals: rate(30_000),
        }
    }

    /// Whether any rate is above zero.
    pub(crate) fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// The generator that draws the messages to flip and their bits.
pub(crate) fn flip_rng(seed: u64) -> SplitMix64 {
    SplitMix64::new(seed ^ FLIP_SEED_SALT)
}

/// Whether this message is one of the `rate` of 100,000.
pub(crate) fn is_hit(rng: &mut SplitMix64, rate: u32) -> bool {
    rate > 0 && rng.range(0, 99_999) < u64::from(rate)
}

/// Flips one random bit of a message's bytes or checksum, and decodes the result.
pub(crate) fn flip_random_bit<M: Serialize + DeserializeOwned>(
    message: &M,
    rng: &mut SplitMix64,
    checks: LinkChecks,
) -> MessageArrival<M> {
    let mut bytes = encode_with_checksum(message);
    let bits = match checks {
        LinkChecks::Verify => 8 * bytes.len(),
        LinkChecks::Trust => 8 * (bytes.len() - CHECK_BYTES),
    };
    flip_bit(&mut bytes, rng.draw() as usize % bits);
    decode(&bytes, checks)
}

/// Checks that no single flipped bit of a message decodes as a message.
///
/// # Errors
/// The first flip that does.
pub(crate) fn check_every_flip_is_detected<M: Serialize + DeserializeOwned>(
    message: &M,
) -> Result<(), String> {
    let mut bytes = encode_with_checksum(message);
    for bit in 0..8 * bytes.len() {
        flip_bit(&mut bytes, bit);
        if let MessageArrival::Received(_) = decode::<M>(&bytes, LinkChecks::Verify) {
            return Err(format!("the flip of bit {bit} is not detected"));
        }
        flip_bit(&mut bytes, bit);
    }
    Ok(())
}

/// A seal with one bit flipped behind the link's check; `None` if the result is no other seal.
pub(crate) fn flip_seal(seal: &Seal, rng: &mut SplitMix64) -> Option<Packet> {
    match flip_random_bit(seal, rng, LinkChecks::Trust) {
        MessageArrival::Received(other) if other != *seal => Some(Packet::Seal(other)),
        _ => None,
    }
}

const CHECK_BYTES: usize = 8;

/// The bytes of a message, followed by their checksum.
fn encode_with_checksum(message: &impl Serialize) -> Vec<u8> {
    let mut bytes = postcard::to_allocvec(message).expect("a vector grows as it is filled");
    let check = checksum(&bytes);
    bytes.extend(check.to_le_bytes());
    bytes
}

fn decode<M: DeserializeOwned>(bytes: &[u8], checks: LinkChecks) -> MessageArrival<M> {
    let Some((message, check)) = bytes.split_last_chunk::<CHECK_BYTES>() else {
        return MessageArrival::Damaged;
    };
    if checks == LinkChecks::Verify && checksum(message) != u64::from_le_bytes(*check) {
        return MessageArrival::Damaged;
    }
    match postcard::take_from_bytes(message) {
        Ok((read, [])) => MessageArrival::Received(read),
        _ => MessageArrival::Damaged,
    }
}

fn flip_bit(bytes: &mut [u8], bit: usize) {
    bytes[bit / 8] ^= 1 << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{AbandonCause, BlockHash, BlockRef, Failure, HandoffId, KvPlane};
    use cleave_kv::BlockPart;

    fn packets() -> Vec<Packet> {
        let handoff = HandoffId::default();
        let part = BlockPart {
            plane: KvPlane::Blocks,
            ordinal: 1,
            offset: 2,
            len: 300,
        };
        vec![
            Packet::Frame {
                handoff,
                block: BlockRef::default(),
                part,
                checksum: 5,
            },
            Packet::Seal(Seal {
                handoff,
                blocks_count: 1,
                digest: 77,
                content: BlockHash([3; 16]),
                output: vec![1, 2, 3],
                state: None,
                window: None,
            }),
            Packet::Landed { handoff },
            Packet::Abandoned {
                handoff,
                cause: AbandonCause::Failed(Failure::Engine("broken".to_owned())),
            },
            Packet::Stop { handoff },
            Packet::Stopped { handoff },
        ]
    }

    #[test]
    fn link_checksums_detect_every_flipped_bit() {
        for packet in packets() {
            check_every_flip_is_detected(&packet).unwrap();
        }
    }

    #[test]
    fn links_without_checksums_accept_changed_messages() {
        let rng = &mut SplitMix64::new(1);
        for packet in packets() {
            let flips = (0..500).map(|_| flip_random_bit(&packet, rng, LinkChecks::Trust));
            let others = flips.filter(|arrival| match arrival {
                MessageArrival::Received(other) => *other != packet,
                MessageArrival::Damaged => false,
            });
            assert!(others.count() > 50, "{packet:?}");
            let checked = flip_random_bit(&packet, rng, LinkChecks::Verify);
            assert_eq!(checked, MessageArrival::Damaged);
        }
    }
}
