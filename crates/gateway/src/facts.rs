//! Reads the notes and the readiness of a router's brain for its driver.
//!
//! Owns: the flight that a note is about, and the text of a readiness. Never keeps or decides
//! anything. Invariant: the matches are exhaustive, so that a new note or readiness does not
//! compile before it is handled here.

use cleave_domain::FlightId;
use cleave_router::{RouterNote, RouterReadiness};

/// The flight that a note is about, if any.
pub(super) fn flight_of(note: &RouterNote) -> Option<FlightId> {
    match note {
        RouterNote::Decided(decision) => Some(decision.flight),
        RouterNote::Judged { flight, .. } | RouterNote::CancelFreed { flight, .. } => Some(*flight),
        RouterNote::Placed { handoff, .. }
        | RouterNote::PassedOver { handoff, .. }
        | RouterNote::Retried { handoff, .. }
        | RouterNote::Moving { handoff, .. }
        | RouterNote::Moved { handoff, .. }
        | RouterNote::MigrationAborted { handoff, .. } => Some(handoff.flight),
        RouterNote::Stale { .. }
        | RouterNote::WorkerStuck { .. }
        | RouterNote::PrefixDropped { .. }
        | RouterNote::Fleet { .. } => None,
    }
}

/// The text that `/ready` answers with.
pub(super) fn readiness_text(readiness: RouterReadiness) -> cleave_api::ServingReadiness {
    let reason = match readiness {
        RouterReadiness::Ready => return cleave_api::ServingReadiness::Ready,
        RouterReadiness::Draining => return cleave_api::ServingReadiness::Draining,
        RouterReadiness::NoPair { prefill, decode } => format!(
            "no pair of workers with equal fingerprints is connected ({prefill} prefill, {decode} \
             decode)"
        ),
    };
    cleave_api::ServingReadiness::NotReady(reason)
}
