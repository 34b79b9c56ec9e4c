//! What a router's driver reads out of what its brain says.
//!
//! Owns: whose flight a note is about, and readiness in words. Never: keeps or decides anything.
//! Invariant: a note or a readiness that is new is looked at here before it compiles.

use cleave_domain::FlightId;
use cleave_router::{Note, Readiness};

/// Whose flight a note is about, if it is about one.
pub(super) fn flight_of(note: &Note) -> Option<FlightId> {
    match note {
        Note::Decided(decision) => Some(decision.flight),
        Note::Judged { flight, .. } | Note::CancelFreed { flight, .. } => Some(*flight),
        Note::Placed { handoff, .. }
        | Note::PassedOver { handoff, .. }
        | Note::Retried { handoff, .. }
        | Note::Moving { handoff, .. }
        | Note::Moved { handoff, .. }
        | Note::Stayed { handoff, .. } => Some(handoff.flight),
        Note::Stale { .. } | Note::WorkerStuck { .. } | Note::Fleet { .. } => None,
    }
}

/// In words, for whoever asks `/ready`.
pub(super) fn words(readiness: Readiness) -> cleave_api::Readiness {
    let reason = match readiness {
        Readiness::Ready => return cleave_api::Readiness::Ready,
        Readiness::Draining => return cleave_api::Readiness::Draining,
        Readiness::NoPair { prefill, decode } => format!(
            "no pair of workers with equal fingerprints is connected ({prefill} prefill, {decode} \
             decode)"
        ),
    };
    cleave_api::Readiness::NotReady(reason)
}
