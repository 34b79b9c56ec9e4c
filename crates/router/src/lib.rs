//! The cluster's brain.
//!
//! Owns: which worker serves which leg of which flight, and each flight's way from submission to
//! its one end. Never: sees text, a token that was generated, an address, or a clock.
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
