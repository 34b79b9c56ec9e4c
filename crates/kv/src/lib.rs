//! Who holds which KV block.
//!
//! Owns: the chained hash that defines "same content", the pool of blocks with their generations,
//! the prefix index, and the hand-off machine (both ends).
//! Never: touches a byte of KV; bodies move bytes, this crate says which.
//! Invariant: every block has exactly one state, and a write is accepted only by the generation it
//! was reserved for.

mod packet;

pub use packet::{BlockPart, Packet, Seal};
