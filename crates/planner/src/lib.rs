//! What work will cost.
//!
//! Owns: the formulas from [`cleave_domain::Prices`] to times, and the way to prices: from a device's
//! datasheet, and from what work cost. Never: knows a request, a worker or the time of day.
//! Invariant: more work never costs less.

mod chunk;
mod learner;
mod predict;
mod roofline;

pub use chunk::{Room, beside, chunk_within, quantum};
pub use learner::{Errors, Learner};
pub use predict::{Predict, predict_link, share};
pub use roofline::{Device, Shape, bytes, bytes_used, flops, flops_used, roofline};
