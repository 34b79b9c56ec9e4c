//! Identifiers. Each is a newtype, so that two kinds of number cannot be confused.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A token of the model's vocabulary.
pub type TokenId = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($number:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $number);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{:x}"), self.0)
            }
        }
    };
}

id!(
    /// One sequence in the fleet; unique across routers, see [`FlightId::new`].
    FlightId(u64), "f"
);
id!(
    /// The identity of a worker; the same after a restart (see [`Incarnation`]).
    WorkerId(u64), "w"
);
id!(
    /// The incarnation of a worker: it grows with every start of the process, so that state of an
    /// earlier incarnation is recognised.
    Incarnation(u64), "i"
);
id!(
    /// One incarnation of a router: drawn anew at each start, at most 24 bits, so that a late
    /// message about an earlier incarnation has no effect. A worker may serve several routers.
    RouterId(u64), "r"
);
id!(
    /// A step of one worker's engine, counted from 1.
    StepId(u64), "s"
);
id!(
    /// The slot of a sequence in an engine, which keeps its history and the state of the sampler.
    SlotIndex(u32), "slot"
);
id!(
    /// A block of a KV pool, `0..blocks_count`.
    BlockIndex(u32), "b"
);
id!(
    /// The number of times that a block was freed. A write that names an older generation is
    /// refused.
    Generation(u32), "g"
);

impl FlightId {
    /// The `number`-th flight of a router: the router's 24 bits, then 40 bits of counter, which
    /// last 17 years at 2,000 flights per second.
    pub fn new(router: RouterId, number: u64) -> Self {
        assert!(
            router.0 < 1 << 24 && number < 1 << 40,
            "flight ids have 24 + 40 bits"
        );
        Self(router.0 << 40 | number)
    }

    /// The router that created this flight.
    pub fn router(self) -> RouterId {
        RouterId(self.0 >> 40)
    }
}

/// One attempt to serve a flight; a retry is a new hand-off with the next attempt number.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct HandoffId {
    /// The flight that is served.
    pub flight: FlightId,
    /// The number of the attempt, from 0.
    pub attempt: u32,
}

impl fmt::Display for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.flight, self.attempt)
    }
}

/// A block as its holder names it: valid only while the generation is current.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct BlockRef {
    /// The block's index in the pool.
    pub block: BlockIndex,
    /// The block's generation when it was handed out.
    pub generation: Generation,
}

/// One incarnation of a worker.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct WorkerRef {
    /// The id of the worker.
    pub worker: WorkerId,
    /// The incarnation: one life of the worker's process.
    pub incarnation: Incarnation,
}

impl fmt::Display for WorkerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.incarnation)
    }
}

/// The content of a full block: a hash over its tokens, chained to the block before it, keyed by
/// the cache salt. Equal hashes mean equal KV on equal fingerprints.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct BlockHash(pub [u8; 16]);

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .take(4)
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
