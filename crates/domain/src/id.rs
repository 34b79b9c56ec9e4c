//! Names for things. Each is a newtype, so that no two kinds of number can be swapped.

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
    /// One sequence on its way through the fleet; unique across routers, see [`FlightId::new`].
    FlightId(u64), "f"
);
id!(
    /// A worker's identity; the same after a restart (see [`Incarnation`]).
    WorkerId(u64), "w"
);
id!(
    /// Which life of a worker this is: grows with every start of the process, so that state of an
    /// earlier life is told apart.
    Incarnation(u64), "i"
);
id!(
    /// A router in one of its lives: drawn anew at each start, at most 24 bits, so that a late word
    /// about an old life harms nothing. Workers may serve several.
    RouterId(u64), "r"
);
id!(
    /// A step of one worker's engine, counted from 1.
    StepId(u64), "s"
);
id!(
    /// A sequence's place in an engine: where its history and the sampler's state live.
    SlotIndex(u32), "slot"
);
id!(
    /// A block of a KV pool, `0..blocks_count`.
    BlockIndex(u32), "b"
);
id!(
    /// How often a block has been freed. A write that names an older generation is refused.
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

    /// The router whose flight this is.
    pub fn router(self) -> RouterId {
        RouterId(self.0 >> 40)
    }
}

/// One attempt to serve a flight; a retry is a new hand-off with the next attempt number.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct HandoffId {
    /// The flight served.
    pub flight: FlightId,
    /// Counted from 0.
    pub attempt: u32,
}

impl fmt::Display for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.flight, self.attempt)
    }
}

/// A block as its holder knows it: valid only while the generation is current.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct BlockRef {
    /// Which block.
    pub block: BlockIndex,
    /// The block's generation when it was handed out.
    pub generation: Generation,
}

/// A worker in one of its lives.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct WorkerRef {
    /// Which worker.
    pub worker: WorkerId,
    /// Which life of it.
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
