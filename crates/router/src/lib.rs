//! The cluster's brain.
//!
//! Owns: which worker serves which leg of which flight, and each flight's way from submission to
//! its one end, over as many workers as it takes. Never: sees text, an address, or a clock; or a
//! generated token before another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one `Output::End`.

mod alarm;
mod brain;
mod candidates;
mod event;
mod fingerprint;
mod fleet;
mod flight;
mod ledger;
mod legs;
mod line;
mod moves;
mod place;
pub mod policy;
mod prefix;
mod rescue;
mod resume;
mod stream;
mod walk;

pub use brain::Brain;
pub use event::{CancelStage, Census, Command, Input, Limits, MoveReason, Note, Output, Readiness};
pub use stream::TokenStream;
