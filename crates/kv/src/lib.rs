//! Records which sequence holds which KV block.
//!
//! Owns: the chained hash that defines "same content", the pools of blocks and state slots,
//! the prefix indexes, the index of the tiers below the pool, and the hand-off machine (both ends).
//! Never: moves or keeps a byte of KV; bodies move the bytes that this crate names, and hand them
//! in for their checksum only.
//! Invariant: every block has exactly one state, and a write is accepted only by the generation it
//! was reserved for.

mod checksum;
pub mod handoff;
mod hash;
mod packet;
mod pool;
mod pools;
mod prefix;
mod tier;

pub use checksum::{Checksum, checksum};
pub use handoff::PoolWriter;
pub use hash::{block_hash, block_hashes, extend_hashes, piece_hash, snapshot_hash, window_hash};
pub use packet::{BlockPart, Packet, PayloadCondition, Seal, SealedWindow};
pub use pool::{BlockReservation, HolderCharge, PlanePool, PrefixChanges, PrefixHits, ReadPin};
pub use pools::{KvPools, PrefixNeed, SecuredKv, SecuredState, SecuredWindow, WindowNeed};
pub use prefix::FleetPrefixIndex;
pub use tier::{EvictableContents, NoTierRoom, TierIndex, TierLevel};
