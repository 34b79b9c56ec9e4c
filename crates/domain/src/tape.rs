//! The record of the inputs and outputs of a brain: its limits at the start, then each input with
//! its time, and each output caused by it, in order. One JSON object per line; all bodies write the
//! same format.

use crate::Time;
use serde::{Deserialize, Serialize};

/// One line of a tape, for either brain. `W` and `R` are the [`TapeRecord`]s of the brain of a
/// worker and of a router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Tape<W, R> {
    /// A line of the brain of a worker.
    Worker(W),
    /// A line of the brain of a router.
    Router(R),
}

/// One line. The first line is `Started`, and no other is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TapeRecord<Limits, Input, Output> {
    /// The brain was created.
    #[serde(rename = "Born")]
    Started {
        /// The limits of the brain.
        limits: Limits,
    },
    /// The brain received an input.
    #[serde(rename = "Heard")]
    Received {
        /// The time of the input.
        at: Time,
        /// The input as it was received.
        input: Input,
    },
    /// The brain emitted an output; belongs to the `Received` before it.
    #[serde(rename = "Said")]
    Emitted {
        /// The output as it was emitted.
        output: Output,
    },
}
