//! The KV memory of a worker: blocks, states, swapped sequences, and the tiers below the pool.
//!
//! Owns: copies between the pool, host memory and disk, and the request that a sequence be moved
//! before blocks are short. Never: chooses which sequence runs.

mod pressure;
mod states;
mod swap;
mod tiers;

pub(crate) use pressure::MemoryPressure;
pub(crate) use states::SequenceState;
pub(crate) use swap::{BlockRelease, SwapStage, SwapState};
pub(crate) use tiers::OffloadTiers;
pub(crate) use tiers::TierFetch;
