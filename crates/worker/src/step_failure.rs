//! Steps that failed, as the brain and the log have them.
//!
//! Owns: whether the constraints of some sequences are the reason, or the engine. Never: decides
//! what becomes of the sequences.

use cleave_domain::{SlotIndex, StepId};
use cleave_engine::{ConstraintError, EngineError};
use cleave_sched::{StepFault, WorkerInput};
use tracing::{error, warn};

/// The failure of a step. A reason that reaches a client names no slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StepFailure {
    slots: Vec<SlotIndex>,
    fault: StepFault,
    reason: String,
}

impl StepFailure {
    pub(crate) fn of_panic(reason: String) -> Self {
        Self {
            slots: Vec::new(),
            fault: StepFault::Engine,
            reason,
        }
    }

    /// The failure by an error, whose text is `text`.
    pub(crate) fn of(error: &EngineError, text: String) -> Self {
        let (fault, reason) = match error {
            EngineError::Constraint {
                error: ConstraintError::Unenforceable(reason),
                ..
            } => (StepFault::Constraint, reason.clone()),
            _ => (StepFault::Engine, text),
        };
        Self {
            slots: error.slots().to_vec(),
            fault,
            reason,
        }
    }

    /// Logs it, and gives the brain's input.
    pub(crate) fn report(self, step: StepId) -> WorkerInput {
        let Self {
            slots,
            fault,
            reason,
        } = self;
        match fault {
            StepFault::Engine => error!(%step, %reason, "step failed"),
            StepFault::Constraint => {
                warn!(%step, %reason, "a constraint cannot be enforced any further: its request fails");
            }
        }
        WorkerInput::StepFailed {
            step,
            slots,
            fault,
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_constraint_itself_is_the_requests_fault() {
        let fault = |error| {
            let slots = vec![SlotIndex(3)];
            let error = EngineError::Constraint { slots, error };
            let text = error.to_string();
            StepFailure::of(&error, text)
        };
        let failure = fault(ConstraintError::Unenforceable("too complex".to_owned()));
        assert_eq!(failure.fault, StepFault::Constraint);
        assert_eq!(failure.reason, "too complex");
        assert_eq!(failure.slots, [SlotIndex(3)]);
        let failure = fault(ConstraintError::Broken("no vocabulary".to_owned()));
        assert_eq!(failure.fault, StepFault::Engine);
        assert!(failure.reason.contains("no vocabulary"), "{failure:?}");
    }
}
