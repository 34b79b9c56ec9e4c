//! Predicted costs of work, and the number of workers that it takes.
//!
//! Owns: the formulas from [`cleave_domain::Prices`] to times, the sources of prices (a device's
//! datasheet, measured work, and [`parts`]: hardware, a model and formats), and the state machine
//! that decides how large a fleet is to be ([`scaling`]).
//! Never: knows the state of a single request, or the time of day; starts anything.
//! Invariant: more work is never predicted to take less time, or to need fewer workers.

mod adapters;
mod chunk;
mod learner;
pub mod parts;
mod predict;
mod roofline;
pub mod scaling;

pub use adapters::AdapterPrices;
pub use chunk::{ChunkRoom, chunk_tokens_within, quantum, slowdown_permille};
pub use learner::{PriceErrors, PriceLearner};
pub use predict::{Predict, mul_div, predict_link};
pub use roofline::{DeviceSpec, bytes_used, flops_used, roofline};
