//! The record of a brain's life: what it was told at birth, then each fact with its time, and each
//! output it gave to it, in order. One JSON object per line; any body writes the same ones.

use crate::Time;
use serde::{Deserialize, Serialize};

/// One line of a tape, for whichever brain was taped. `W` and `R` are the [`TapeLine`]s of a
/// worker's brain and of a router's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Tape<W, R> {
    /// A worker's brain.
    Worker(W),
    /// A router's brain.
    Router(R),
}

/// What happened on one line. The first line is `Born`, and no other is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TapeLine<Limits, Input, Output> {
    /// The brain was made.
    Born {
        /// With these limits.
        limits: Limits,
    },
    /// The brain was told something.
    Heard {
        /// When.
        at: Time,
        /// What.
        input: Input,
    },
    /// The brain wants something done; belongs to the `Heard` before it.
    Said {
        /// What.
        output: Output,
    },
}
