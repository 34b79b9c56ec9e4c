//! The readiness of a router's brain, as its HTTP server answers it.

use cleave_api::ServingReadiness;
use cleave_router::RouterReadiness;

/// The text that `/ready` answers with.
pub(super) fn readiness_text(readiness: RouterReadiness) -> ServingReadiness {
    let reason = match readiness {
        RouterReadiness::Ready => return ServingReadiness::Ready,
        RouterReadiness::Draining => return ServingReadiness::Draining,
        RouterReadiness::NoPair { prefill, decode } => format!(
            "no pair of workers with equal fingerprints is connected ({prefill} prefill, {decode} \
             decode)"
        ),
    };
    ServingReadiness::NotReady(reason)
}
