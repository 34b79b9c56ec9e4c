//! The cluster's brain.
//!
//! Owns: the assignment of the legs of each flight to workers, and each flight's way from
//! submission to its one end, over as many workers as it takes. Never: sees text, an address, or a
//! clock; or a generated token before another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one `RouterOutput::End`.

mod admit;
mod brain;
mod candidates;
mod devices;
mod event;
mod failover;
mod fingerprint;
mod fleet;
mod flight;
mod forecast;
mod judge;
mod ledger;
mod legs;
mod losses;
mod moves;
mod pass_over;
mod place;
pub mod policy;
mod prefix;
mod queue;
mod reports;
mod resume;
mod scale;
mod stream;
mod tally;
mod timers;
mod verdict;

pub use brain::RouterBrain;
pub use event::{
    CancelReason, CancelStage, DecisionOutcome, LegPlacement, MoveReason, OperatorRequest,
    OutsideQueue, PlacementDecision, PlacementReason, RequestForecast, RoleCounts, RouterInput,
    RouterLimits, RouterNote, RouterOutput, RouterReadiness, RoutingMode,
};
pub use stream::TokenStream;
