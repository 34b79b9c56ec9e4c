//! The time, the limits and the outputs, for every part of a worker's brain.
//!
//! Owns: the queue of outputs, and whether the facts handled so far may allow a step or alter the
//! load. Never: decides anything.
//! Invariant: time never goes back; outputs are polled in the order in which they were emitted.

use crate::{WorkerLimits, WorkerNote, WorkerOutput};
use cleave_domain::{Report, Role, RouterId, Time};
use std::collections::VecDeque;

/// The time of the fact being handled, the limits, and where outputs go.
#[derive(Clone, Debug)]
pub(crate) struct WorkerContext {
    now: Time,
    limits: WorkerLimits,
    outputs: VecDeque<WorkerOutput>,
    changed: bool,
}

impl WorkerContext {
    pub(crate) fn new(limits: WorkerLimits) -> Self {
        Self {
            now: Time::ZERO,
            limits,
            outputs: VecDeque::new(),
            changed: false,
        }
    }

    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Sets the time of the fact to handle, and returns that of the one before; a time before an
    /// earlier one counts as that one.
    pub(crate) fn advance(&mut self, now: Time) -> Time {
        let before = self.now;
        self.now = before.max(now);
        before
    }

    pub(crate) fn limits(&self) -> &WorkerLimits {
        &self.limits
    }

    /// Tokens in a block of the pool.
    pub(crate) fn block_tokens(&self) -> u32 {
        self.limits.capacity.block_tokens
    }

    /// Sets the legs that new orders may ask for.
    pub(crate) fn set_role(&mut self, role: Role) {
        self.limits.role = role;
    }

    // === outputs ===

    pub(crate) fn emit(&mut self, output: WorkerOutput) {
        self.outputs.push_back(output);
    }

    pub(crate) fn note(&mut self, note: WorkerNote) {
        self.emit(WorkerOutput::Note(note));
    }

    pub(crate) fn report(&mut self, router: RouterId, report: Report) {
        self.emit(WorkerOutput::Report { router, report });
    }

    /// Removes and returns the oldest output.
    pub(crate) fn poll(&mut self) -> Option<WorkerOutput> {
        self.outputs.pop_front()
    }

    pub(crate) fn has_outputs(&self) -> bool {
        !self.outputs.is_empty()
    }

    // === changes ===

    /// Records that a step may be possible now, or that the load differs.
    pub(crate) fn changed(&mut self) {
        self.changed = true;
    }

    pub(crate) fn changed_if(&mut self, condition: bool) {
        self.changed |= condition;
    }

    pub(crate) fn has_changed(&self) -> bool {
        self.changed
    }

    /// Whether something changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}

#[cfg(test)]
mod tests {
    use super::WorkerContext;
    use crate::test_worker::{MS, limits};
    use crate::{WorkerNote, WorkerOutput};
    use cleave_domain::Time;

    #[test]
    fn time_never_goes_back() {
        let mut context = WorkerContext::new(limits());
        assert_eq!(context.advance(Time::ZERO + MS), Time::ZERO);
        assert_eq!(context.advance(Time::ZERO), Time::ZERO + MS);
        assert_eq!(context.now(), Time::ZERO + MS);
    }

    #[test]
    fn outputs_are_polled_in_their_order() {
        let mut context = WorkerContext::new(limits());
        let stuck = |running| WorkerNote::Stuck { running };
        context.note(stuck(MS));
        context.emit(WorkerOutput::Drained);
        assert!(context.has_outputs());
        assert_eq!(context.poll(), Some(WorkerOutput::Note(stuck(MS))));
        assert_eq!(context.poll(), Some(WorkerOutput::Drained));
        assert_eq!(context.poll(), None);
    }

    #[test]
    fn a_change_is_taken_once() {
        let mut context = WorkerContext::new(limits());
        context.changed_if(false);
        assert!(!context.take_changed());
        context.changed();
        context.changed_if(false);
        assert!(context.has_changed() && context.take_changed());
        assert!(!context.take_changed());
    }
}
