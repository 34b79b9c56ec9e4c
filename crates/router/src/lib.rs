//! The cluster's brain.
//!
//! Owns: which worker serves which leg of which flight, and each flight's way from submission to
//! its one end. Never: sees text, a token that was generated, an address, or a clock.
//! Invariant: every flight submitted ends in exactly one `Output::End`.

mod brain;
mod event;
mod fleet;
mod flight;
mod ledger;
mod line;
pub mod policy;
mod prefix;
mod stream;
mod walk;

pub use brain::Brain;
pub use event::{CancelStage, Census, Command, Input, Limits, MoveReason, Note, Output, Readiness};
pub use stream::TokenStream;
