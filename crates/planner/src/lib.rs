//! What work will cost, and how many workers it takes.
//!
//! Owns: the formulas from [`cleave_domain::Prices`] to times, the way to prices (from a device's
//! datasheet, and from what work cost), and the brain that says how large a fleet is to be ([`scaling`]).
//! Never: knows a request or the time of day, or starts anything.
//! Invariant: more work never costs less, and never takes fewer workers.

mod chunk;
mod learner;
mod predict;
mod roofline;
pub mod scaling;

pub use chunk::{Room, beside, chunk_within, quantum};
pub use learner::{Errors, Learner};
pub use predict::{Predict, predict_link, share};
pub use roofline::{Device, Shape, bytes, bytes_used, flops, flops_used, roofline};
