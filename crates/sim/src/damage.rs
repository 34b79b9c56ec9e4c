//! Bits that flip on the way: in any field of any message.
//!
//! Owns: a message as bytes, the flip of one of them, and the check that a link makes, which is the real
//! links' own ([`cleave_kv::checksum`]). Never: knows what a message means.
//! Invariant: a message arrives as it was sent, or as [`Arrival::Damaged`], unless the link trusts what
//! comes ([`Checks::Trusting`]); then it arrives as whatever the bytes say.

use crate::dice::Dice;
use crate::world::Weather;
use cleave_kv::{Packet, Seal, checksum};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Whether links check what arrives. No real link trusts: this shows that the flips would be found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// A message to which its checksum does not fit ends the connection.
    #[default]
    Checked,
    /// Whatever can be read is taken.
    Trusting,
}

/// A message at the other end.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Arrival<M> {
    /// The connection ends.
    Damaged,
    /// It can be read, and nobody noticed.
    Read(M),
}

/// Of 100,000 messages, how many have one bit flipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flips {
    /// Between workers, but for payloads.
    pub(crate) packets: u32,
    /// From workers to routers.
    pub(crate) words: u32,
    /// From routers to workers.
    pub(crate) orders: u32,
    /// Seals that change behind the link's check, in the memory of a body.
    pub(crate) seals: u32,
}

/// Tells these dice from the others of a seed.
const FLIPS: u64 = 0x9fb2_1c65_1e98_df25;

impl Flips {
    /// Drawn apart, so that the rest of a seed's world is the same either way.
    pub(crate) fn draw(seed: u64, weather: Weather) -> Self {
        let dice = &mut dice(seed);
        let mut rate = |most: u32| match weather == Weather::Calm || dice.chance(500) {
            true => 0,
            false => dice.count(0, most),
        };
        Self {
            packets: rate(4000),
            words: rate(1000),
            orders: rate(2000),
            seals: rate(30_000),
        }
    }

    /// Whether anything may go wrong.
    pub(crate) fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// The dice that say which message is hit, and where.
pub(crate) fn dice(seed: u64) -> Dice {
    Dice::new(seed ^ FLIPS)
}

/// Whether one of so many of 100,000 is hit.
pub(crate) fn hits(dice: &mut Dice, rate: u32) -> bool {
    rate > 0 && dice.range(0, 99_999) < u64::from(rate)
}

/// The arrival of a message with one drawn bit flipped: of its bytes, or of its checksum.
pub(crate) fn flip<M: Serialize + DeserializeOwned>(
    message: &M,
    dice: &mut Dice,
    checks: Checks,
) -> Arrival<M> {
    let mut bytes = closed(message);
    let bits = match checks {
        Checks::Checked => 8 * bytes.len(),
        Checks::Trusting => 8 * (bytes.len() - CHECK_BYTES),
    };
    flip_bit(&mut bytes, dice.next() as usize % bits);
    open(&bytes, checks)
}

/// Asserts that no flip of any bit of a message would be taken for a message.
///
/// # Errors
/// The first flip that would.
pub(crate) fn every_flip_is_noticed<M: Serialize + DeserializeOwned>(
    message: &M,
) -> Result<(), String> {
    let mut bytes = closed(message);
    for bit in 0..8 * bytes.len() {
        flip_bit(&mut bytes, bit);
        if let Arrival::Read(_) = open::<M>(&bytes, Checks::Checked) {
            return Err(format!("nobody notices that bit {bit} was flipped"));
        }
        flip_bit(&mut bytes, bit);
    }
    Ok(())
}

/// A seal of which a drawn bit was flipped behind the link's check; `None` if no seal is left.
pub(crate) fn flip_seal(seal: &Seal, dice: &mut Dice) -> Option<Packet> {
    match flip(seal, dice, Checks::Trusting) {
        Arrival::Read(other) if other != *seal => Some(Packet::Seal(other)),
        _ => None,
    }
}

const CHECK_BYTES: usize = 8;

/// The bytes of a message, closed by their checksum.
fn closed(message: &impl Serialize) -> Vec<u8> {
    let mut bytes = postcard::to_allocvec(message).expect("a vector grows as it is filled");
    let check = checksum(&bytes);
    bytes.extend(check.to_le_bytes());
    bytes
}

fn open<M: DeserializeOwned>(bytes: &[u8], checks: Checks) -> Arrival<M> {
    let Some((message, check)) = bytes.split_last_chunk::<CHECK_BYTES>() else {
        return Arrival::Damaged;
    };
    if checks == Checks::Checked && checksum(message) != u64::from_le_bytes(*check) {
        return Arrival::Damaged;
    }
    match postcard::take_from_bytes(message) {
        Ok((read, [])) => Arrival::Read(read),
        _ => Arrival::Damaged,
    }
}

fn flip_bit(bytes: &mut [u8], bit: usize) {
    bytes[bit / 8] ^= 1 << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{BlockHash, BlockRef, Cause, Failure, HandoffId};
    use cleave_kv::BlockPart;

    fn packets() -> Vec<Packet> {
        let handoff = HandoffId::default();
        let part = BlockPart {
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
            }),
            Packet::Landed { handoff },
            Packet::Abandoned {
                handoff,
                cause: Cause::Failed(Failure::Engine("broken".to_owned())),
            },
            Packet::Stop { handoff },
            Packet::Stopped { handoff },
        ]
    }

    #[test]
    fn the_check_of_a_link_notices_every_flipped_bit() {
        for packet in packets() {
            every_flip_is_noticed(&packet).unwrap();
        }
    }

    #[test]
    fn a_link_that_trusts_takes_other_messages() {
        let dice = &mut Dice::new(1);
        for packet in packets() {
            let flips = (0..500).map(|_| flip(&packet, dice, Checks::Trusting));
            let others = flips.filter(|arrival| match arrival {
                Arrival::Read(other) => *other != packet,
                Arrival::Damaged => false,
            });
            assert!(others.count() > 50, "{packet:?}");
            let checked = flip(&packet, dice, Checks::Checked);
            assert_eq!(checked, Arrival::Damaged);
        }
    }
}
