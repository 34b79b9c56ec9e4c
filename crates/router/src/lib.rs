//! The cluster's brain.
//!
//! Owns: which worker serves which leg of which flight, and each flight's way from submission to
//! its one end, over as many workers as it takes. Never: sees text, an address, or a clock; or a
//! generated token before another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one `Output::End`.

mod admit;
mod alarm;
mod brain;
mod candidates;
mod devices;
mod event;
mod fingerprint;
mod fleet;
mod flight;
mod forecast;
mod judge;
mod ledger;
mod legs;
mod line;
mod losses;
mod moves;
mod place;
pub mod policy;
mod prefix;
mod rescue;
mod resume;
mod scale;
mod stream;
mod tally;
mod verdict;
mod walk;

pub use brain::Brain;
pub use event::{
    CancelReason, CancelStage, Census, Command, Decided, Decision, Forecast, Input, Limits, Mode,
    MoveReason, Note, Output, Outside, PlaceReason, Placement, Readiness,
};
pub use stream::TokenStream;
