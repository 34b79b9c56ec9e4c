//! The reports of a router about itself: whether it is ready, how large its fleet is, and the end
//! of its drain.
//!
//! Owns: the reports made so far, and how far the drain has come. Never: decides who can be served;
//! the fleet does. Invariant: a report differs from the one before it, and the end of the drain is
//! reported once, after the last flight.

use crate::event::{RoleCounts, RouterLimits, RouterNote, RouterOutput, RouterReadiness};
use crate::fleet::RouterFleet;
use crate::outputs::RouterOutputs;
use crate::scaling::workers_expected;
use cleave_domain::Time;

#[derive(Clone, Debug)]
pub(crate) struct ReadinessReports {
    draining: RouterDrainState,
    /// The readiness last reported.
    readiness: RouterReadiness,
    /// Readiness must be evaluated again, since the autoscaler was switched on or off.
    is_outdated: bool,
    /// Workers, flights and waiting flights as last noted.
    fleet_noted: (RoleCounts, u32, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RouterDrainState {
    No,
    Requested,
    Reported,
}

impl Default for ReadinessReports {
    fn default() -> Self {
        Self {
            draining: RouterDrainState::No,
            readiness: RouterReadiness::NONE,
            is_outdated: true,
            fleet_noted: (RoleCounts::default(), 0, 0),
        }
    }
}

impl ReadinessReports {
    /// Begins to drain; a second request changes nothing.
    pub(crate) fn drain(&mut self) {
        if self.draining == RouterDrainState::No {
            self.draining = RouterDrainState::Requested;
        }
    }

    /// Whether the router accepts nothing new.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining != RouterDrainState::No
    }

    /// Lets readiness be evaluated at the end of this input.
    pub(crate) fn set_outdated(&mut self) {
        self.is_outdated = true;
    }

    /// Reports readiness, if it changed. `fleet_changed` tells whether it may have; `evaluate` says
    /// how requests would fare now.
    pub(crate) fn report(
        &mut self,
        fleet_changed: bool,
        evaluate: impl FnOnce() -> RouterReadiness,
        outputs: &mut RouterOutputs,
    ) {
        let drains = self.draining == RouterDrainState::Requested;
        if !fleet_changed && !self.is_outdated && !drains {
            return;
        }
        self.is_outdated = false;
        let readiness = if self.is_draining() {
            RouterReadiness::Draining
        } else {
            evaluate()
        };
        if readiness != self.readiness {
            self.readiness = readiness;
            outputs.emit(RouterOutput::Readiness(readiness));
        }
    }

    /// Notes the size of the fleet and its flights, if it changed.
    pub(crate) fn note_fleet(
        &mut self,
        workers: RoleCounts,
        flights: u32,
        flights_waiting: u32,
        outputs: &mut RouterOutputs,
    ) {
        let fleet = (workers, flights, flights_waiting);
        if fleet != self.fleet_noted {
            self.fleet_noted = fleet;
            outputs.note(RouterNote::Fleet {
                workers,
                flights,
                flights_waiting,
            });
        }
    }

    /// Reports the end of a drain, once no flight is left.
    pub(crate) fn end_drain(&mut self, flights: usize, outputs: &mut RouterOutputs) {
        if self.draining == RouterDrainState::Requested && flights == 0 {
            self.draining = RouterDrainState::Reported;
            outputs.emit(RouterOutput::Drained);
        }
    }

    /// The part of it that decides the future.
    pub(crate) fn decisive(&self) -> (RouterDrainState, RouterReadiness) {
        (self.draining, self.readiness)
    }

    pub(crate) fn check(&self) {
        assert_eq!(
            self.is_draining(),
            self.readiness == RouterReadiness::Draining,
            "readiness differs from the state of the drain"
        );
    }
}

/// How a request would fare now. One that can wait for the first worker is accepted.
pub(crate) fn evaluate(fleet: &RouterFleet, limits: &RouterLimits, now: Time) -> RouterReadiness {
    match workers_expected(&limits.policy) {
        Some(_) => RouterReadiness::Ready,
        None => fleet.readiness(now, limits.terms()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs_of(act: impl FnOnce(&mut RouterOutputs)) -> Vec<RouterOutput> {
        let mut outputs = RouterOutputs::default();
        act(&mut outputs);
        std::iter::from_fn(|| outputs.poll()).collect()
    }

    fn ready() -> RouterReadiness {
        RouterReadiness::Ready
    }

    #[test]
    fn readiness_is_reported_when_it_changes() {
        let mut reports = ReadinessReports::default();
        let none = outputs_of(|outputs| reports.report(false, || RouterReadiness::NONE, outputs));
        assert_eq!(none, [], "a router begins without a pair");
        let first = outputs_of(|outputs| reports.report(true, ready, outputs));
        assert_eq!(first, [RouterOutput::Readiness(ready())]);
        let again = outputs_of(|outputs| reports.report(true, ready, outputs));
        assert_eq!(again, []);
        reports.check();
    }

    #[test]
    fn readiness_is_evaluated_only_when_it_may_change() {
        let mut reports = ReadinessReports::default();
        let evaluated = |reports: &mut ReadinessReports, fleet_changed| {
            let mut count = 0;
            let evaluate = || {
                count += 1;
                ready()
            };
            outputs_of(|outputs| reports.report(fleet_changed, evaluate, outputs));
            count
        };
        assert_eq!(evaluated(&mut reports, false), 1, "it begins outdated");
        assert_eq!(evaluated(&mut reports, false), 0);
        assert_eq!(evaluated(&mut reports, true), 1);
        reports.set_outdated();
        assert_eq!(evaluated(&mut reports, false), 1);
    }

    #[test]
    fn a_drain_ends_once_after_the_last_flight() {
        let mut reports = ReadinessReports::default();
        assert_eq!(outputs_of(|outputs| reports.end_drain(0, outputs)), []);
        reports.drain();
        assert!(reports.is_draining());
        let draining = outputs_of(|outputs| reports.report(false, ready, outputs));
        let expected = RouterOutput::Readiness(RouterReadiness::Draining);
        assert_eq!(draining, [expected]);
        assert_eq!(outputs_of(|outputs| reports.end_drain(1, outputs)), []);
        let ended = outputs_of(|outputs| reports.end_drain(0, outputs));
        assert_eq!(ended, [RouterOutput::Drained]);
        reports.drain();
        assert_eq!(outputs_of(|outputs| reports.end_drain(0, outputs)), []);
        reports.check();
    }

    #[test]
    fn the_fleet_is_noted_when_it_changes() {
        let mut reports = ReadinessReports::default();
        let counts = |both| RoleCounts {
            both,
            ..RoleCounts::default()
        };
        let mut noted = |both, flights, waiting| {
            outputs_of(|outputs| reports.note_fleet(counts(both), flights, waiting, outputs)).len()
        };
        assert_eq!((noted(0, 0, 0), noted(1, 0, 0), noted(1, 0, 0)), (0, 1, 0));
        assert_eq!((noted(1, 1, 0), noted(1, 1, 1), noted(1, 1, 1)), (1, 1, 0));
    }
}
