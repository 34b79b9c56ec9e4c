//! Predicted costs of work, and the number of workers that it takes.
//!
//! Owns: the formulas from [`cleave_domain::Prices`] to times, the sources of prices (a device's
//! datasheet and measured work), and the brain that decides how large a fleet is to be
//! ([`scaling`]).
//! Never: knows a request or the time of day, or starts anything.
//! Invariant: more work never costs less, and never takes fewer workers.

mod chunk;
mod learner;
mod predict;
mod roofline;
pub mod scaling;

pub use chunk::{ChunkRoom, chunk_tokens_within, quantum, slowdown_permille};
pub use learner::{PriceErrors, PriceLearner};
pub use predict::{Predict, mul_div, predict_link};
pub use roofline::{DeviceSpec, bytes_used, flops_used, roofline};
