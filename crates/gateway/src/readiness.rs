//! The readiness of each model, as a router's HTTP server answers it.
//!
//! Never decides: the brain of the model's pool does. Invariant: a model that no worker has brought
//! is as ready as the pool without a name, and not ready once there is none.

use cleave_api::ServingReadiness;
use cleave_router::RouterReadiness;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The readiness of each model, by name; of a pool without a name before any model is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelReadiness(BTreeMap<Arc<str>, ServingReadiness>);

impl ModelReadiness {
    /// The readiness before anything is known.
    pub(crate) fn starting(reason: &str) -> Self {
        let reason = ServingReadiness::NotReady(reason.to_owned());
        Self(BTreeMap::from([(Arc::from(""), reason)]))
    }

    /// A model is known from now on; it takes the place of the one without a name.
    pub(crate) fn begin(&mut self, model: &Arc<str>) {
        let unnamed = self.0.remove("");
        let begins = unnamed.unwrap_or_else(|| readiness_text(model, RouterReadiness::NONE));
        self.0.entry(Arc::clone(model)).or_insert(begins);
    }

    /// A model is forgotten.
    pub(crate) fn end(&mut self, model: &str) {
        self.0.remove(model);
    }

    pub(crate) fn set(&mut self, model: &Arc<str>, readiness: RouterReadiness) {
        self.0
            .insert(Arc::clone(model), readiness_text(model, readiness));
    }

    /// The readiness for requests of this model.
    pub(crate) fn of(&self, model: &str) -> ServingReadiness {
        let known = self.0.get(model).or_else(|| self.0.get(""));
        let only = || self.0.values().next().filter(|_| model.is_empty());
        let unknown = || ServingReadiness::NotReady("no worker has brought this model yet".into());
        known.or_else(only).cloned().unwrap_or_else(unknown)
    }

    /// Whether requests for some model would find a pair.
    pub fn has_ready_model(&self) -> bool {
        self.0.values().any(|one| *one == ServingReadiness::Ready)
    }

    /// Whether this model is known.
    pub(crate) fn knows(&self, model: &str) -> bool {
        self.0.contains_key(model)
    }

    /// The names of the models that are known.
    pub(crate) fn models(&self) -> impl Iterator<Item = &Arc<str>> {
        self.0.keys()
    }
}

/// The text that `/ready` answers with; a pool that no model has named yet is that of `""`.
fn readiness_text(model: &str, readiness: RouterReadiness) -> ServingReadiness {
    match readiness {
        RouterReadiness::Ready => ServingReadiness::Ready,
        RouterReadiness::Draining => ServingReadiness::Draining,
        RouterReadiness::NoPair { prefill, decode } => {
            let of_model = match model {
                "" => String::new(),
                model => format!(" of {model}"),
            };
            let reason = format!(
                "no pair of workers{of_model} with equal fingerprints is connected ({prefill} prefill, \
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
    fn each_model_has_its_own_readiness() {
        let mut readiness = ModelReadiness::starting("starting");
        let (a, b): (Arc<str>, Arc<str>) = (Arc::from("a"), Arc::from("b"));
        assert_eq!(readiness.of("a"), readiness.of(""));
        readiness.set(&Arc::from(""), RouterReadiness::Ready);
        readiness.begin(&a);
        readiness.begin(&b);
        assert_eq!(
            readiness.of("a"),
            ServingReadiness::Ready,
            "it got the name"
        );
        let ServingReadiness::NotReady(reason) = readiness.of("b") else {
            panic!("{readiness:?}");
        };
        assert!(reason.contains("workers of b "), "{reason}");
        assert!(matches!(readiness.of("c"), ServingReadiness::NotReady(_)));
        assert!(readiness.has_ready_model());
        readiness.set(&a, RouterReadiness::NONE);
        readiness.set(&b, RouterReadiness::Ready);
        assert!(readiness.has_ready_model());
    }

    #[test]
    fn prompts_can_be_run_without_a_worker_that_decodes() {
        let without_pair = |prefill, decode| {
            let readiness = readiness_text("m", RouterReadiness::NoPair { prefill, decode });
            matches!(readiness, ServingReadiness::PromptsOnly(_))
        };
        assert!(without_pair(1, 0) && without_pair(2, 3));
        assert!(!without_pair(0, 0) && !without_pair(0, 1));
        let ready = readiness_text("m", RouterReadiness::Ready);
        assert_eq!(ready, ServingReadiness::Ready);
    }
}
