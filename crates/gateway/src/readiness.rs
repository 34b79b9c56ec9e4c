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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_can_be_run_without_a_worker_that_decodes() {
        let without_pair = |prefill, decode| {
            let readiness = readiness_text(RouterReadiness::NoPair { prefill, decode });
            matches!(readiness, ServingReadiness::PromptsOnly(_))
        };
        assert!(without_pair(1, 0) && without_pair(2, 3));
        assert!(!without_pair(0, 0) && !without_pair(0, 1));
        let ready = readiness_text(RouterReadiness::Ready);
        assert_eq!(ready, ServingReadiness::Ready);
    }
}
