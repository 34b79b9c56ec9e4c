//! The outputs of the brain, and the context in which its machines handle an input.
//!
//! Owns: the outputs that the body has not taken yet, in the order in which it performs them.
//! Never: makes one. Invariant: outputs leave in the order in which they were emitted.

use crate::event::{RouterLimits, RouterNote, RouterOutput};
use crate::placement::policy::RoutingTerms;
use cleave_domain::Time;
use std::collections::VecDeque;

#[derive(Clone, Debug, Default)]
pub(crate) struct RouterOutputs {
    queue: VecDeque<RouterOutput>,
}

/// The time of the present input, the limits of the brain, and the outputs made so far.
#[derive(Debug)]
pub(crate) struct RouterContext<'a> {
    pub(crate) now: Time,
    pub(crate) limits: &'a RouterLimits,
    pub(crate) outputs: &'a mut RouterOutputs,
}

impl RouterOutputs {
    pub(crate) fn emit(&mut self, output: RouterOutput) {
        self.queue.push_back(output);
    }

    pub(crate) fn note(&mut self, note: RouterNote) {
        self.emit(RouterOutput::Note(note));
    }

    pub(crate) fn poll(&mut self) -> Option<RouterOutput> {
        self.queue.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl RouterContext<'_> {
    pub(crate) fn emit(&mut self, output: RouterOutput) {
        self.outputs.emit(output);
    }

    pub(crate) fn note(&mut self, note: RouterNote) {
        self.outputs.note(note);
    }

    /// The same context, borrowed for a machine that is called.
    pub(crate) fn reborrow(&mut self) -> RouterContext<'_> {
        RouterContext {
            now: self.now,
            limits: self.limits,
            outputs: self.outputs,
        }
    }
}

impl RouterLimits {
    pub(crate) fn terms(&self) -> RoutingTerms {
        RoutingTerms {
            mode: self.mode,
            placement: self.placement,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::RouterReadiness;

    #[test]
    fn outputs_leave_in_the_order_of_their_making() {
        let mut outputs = RouterOutputs::default();
        let all = [
            RouterOutput::Readiness(RouterReadiness::Ready),
            RouterOutput::Drained,
            RouterOutput::Readiness(RouterReadiness::NONE),
        ];
        for output in &all {
            outputs.emit(output.clone());
        }
        assert!(!outputs.is_empty());
        assert!(std::iter::from_fn(|| outputs.poll()).eq(all));
        assert!(outputs.is_empty());
    }
}
