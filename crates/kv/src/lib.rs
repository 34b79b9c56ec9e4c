//! Who holds which KV block.
//!
//! Owns: the chained hash that defines "same content", the pool of blocks with their generations,
//! the prefix indexes, the book of the tiers below the pool, and the hand-off machine (both ends).
//! Never: touches a byte of KV; bodies move bytes, this crate says which.
//! Invariant: every block has exactly one state, and a write is accepted only by the generation it
//! was reserved for.

mod checksum;
pub mod handoff;
mod hash;
mod packet;
mod pool;
mod prefix;
mod tier;

pub use checksum::{Checksum, checksum};
pub use handoff::Writer;
pub use hash::{block_hash, block_hashes, extend_hashes};
pub use packet::{BlockPart, Condition, Packet, Seal};
pub use pool::{Changes, Hits, Lent, Pool, Promise};
pub use prefix::FleetIndex;
pub use tier::{Gives, NoRoom, Place, Tier};
