//! The cluster's brain: a pool of workers for each model, each with a brain of its own.
//!
//! Owns: the assignment of the legs of each flight to workers, and each flight's way from
//! submission to its one end, over as many workers as it takes. Never: sees text, an address, or a
//! clock; or a generated token before another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one `RouterOutput::End`.

mod accounting;
mod actions;
mod brain;
mod commands;
mod event;
mod fingerprint;
#[cfg(test)]
mod fixtures;
mod fleet;
mod flight;
mod invariants;
mod outputs;
mod placement;
mod pools;
mod queue;
mod readiness;
mod scaling;
mod stream;

pub use actions::RouterActions;
pub use brain::RouterBrain;
pub use event::{
    CancelReason, CancelStage, DecisionOutcome, LegPlacement, MoveReason, OperatorRequest,
    OutsideQueue, PlacementDecision, PlacementReason, RequestForecast, RoleCounts, RouterInput,
    RouterLimits, RouterNote, RouterOutput, RouterReadiness, RoutingMode,
};
pub use placement::policy;
pub use pools::{PoolInput, PoolOutput, RouterPools};
pub use stream::TokenStream;
