//! The readiness of a router's brain, as its HTTP server answers it.

use cleave_api::ServingReadiness;
use cleave_router::RouterReadiness;

/// The text that `/ready` answers with.
pub(super) fn readiness_text(readiness: RouterReadiness) -> ServingReadiness {
    match readiness {
        RouterReadiness::Ready => ServingReadiness::Ready,
        RouterReadiness::Draining => ServingReadiness::Draining,
        RouterReadiness::NoPair { prefill, decode } => {
            let reason = format!(
                "no pair of workers with equal fingerprints is connected ({prefill} prefill, \
                 {decode} decode)"
            );
            if prefill > 0 {
                ServingReadiness::PromptsOnly(reason)
            } else {
                ServingReadiness::NotReady(reason)
            }
        }
    }
}
