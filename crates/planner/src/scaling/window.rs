//! Counts of recent events.
//!
//! Owns: the counts of the last minute, by seconds. Never: knows their use.
//! Invariant: a count is forgotten a minute after it was made.

use super::PromiseOutcome;
use cleave_domain::{FleetDemand, RequestFlow, Role, SloOutcomes, StepWork, Time};
use std::collections::VecDeque;
use std::time::Duration;

#[derive(Clone, Debug, Default)]
pub(super) struct DemandWindow {
    /// By whole seconds, ascending.
    seconds: VecDeque<SecondCounts>,
}

#[derive(Clone, Debug)]
struct SecondCounts {
    at: u64,
    flow: RequestFlow,
    classes: Vec<SloOutcomes>,
}

fn second(at: Time) -> u64 {
    at.since(Time::ZERO).as_secs()
}

impl DemandWindow {
    pub(super) fn arrived(&mut self, now: Time, class: usize, prompt_tokens: u32) {
        let second = self.second(now);
        second.outcomes(class).arrivals += 1;
        second.flow += RequestFlow {
            arrivals: 1,
            prompt_tokens: u64::from(prompt_tokens),
            pairs: StepWork::prefill(0, prompt_tokens).pairs,
            ..RequestFlow::default()
        };
    }

    pub(super) fn placed(&mut self, now: Time, cached_tokens: u32) {
        self.second(now).flow += RequestFlow {
            placed: 1,
            cached_tokens: u64::from(cached_tokens),
            ..RequestFlow::default()
        };
    }

    pub(super) fn answered(&mut self, now: Time, output_tokens: u32) {
        self.second(now).flow += RequestFlow {
            answers: 1,
            output_tokens: u64::from(output_tokens),
            ..RequestFlow::default()
        };
    }

    pub(super) fn judged(&mut self, now: Time, class: usize, outcome: PromiseOutcome) {
        let outcomes = self.second(now).outcomes(class);
        match outcome {
            PromiseOutcome::NotCounted => return,
            PromiseOutcome::Met => {}
            PromiseOutcome::Missed(Role::Decode) => outcomes.missed_decode += 1,
            PromiseOutcome::Missed(Role::Prefill | Role::Both) => outcomes.missed_prefill += 1,
        }
        outcomes.judged += 1;
    }

    /// The demand counted in the window.
    pub(super) fn demand(&mut self, now: Time) -> FleetDemand {
        self.forget(now);
        let quick = second(now).saturating_sub(FleetDemand::QUICK.as_secs());
        let mut demand = FleetDemand::default();
        for one in &self.seconds {
            demand.slow += one.flow;
            if one.at >= quick {
                demand.quick += one.flow;
            }
            if demand.classes.len() < one.classes.len() {
                demand
                    .classes
                    .resize(one.classes.len(), SloOutcomes::default());
            }
            for (sum, more) in demand.classes.iter_mut().zip(&one.classes) {
                *sum += *more;
            }
        }
        demand
    }

    /// Forgets the counts by class, whose indices have changed.
    pub(super) fn forget_classes(&mut self) {
        for second in &mut self.seconds {
            second.classes.clear();
        }
    }

    fn second(&mut self, now: Time) -> &mut SecondCounts {
        let at = second(now);
        if self.seconds.back().is_none_or(|last| last.at < at) {
            self.forget(now);
            self.seconds.push_back(SecondCounts {
                at,
                flow: RequestFlow::default(),
                classes: Vec::new(),
            });
        }
        self.seconds.back_mut().expect("there is one now")
    }

    fn forget(&mut self, now: Time) {
        let slow: Duration = FleetDemand::SLOW;
        let from = second(now).saturating_sub(slow.as_secs());
        while self.seconds.front().is_some_and(|first| first.at < from) {
            self.seconds.pop_front();
        }
    }
}

impl SecondCounts {
    fn outcomes(&mut self, class: usize) -> &mut SloOutcomes {
        if self.classes.len() <= class {
            self.classes.resize(class + 1, SloOutcomes::default());
        }
        &mut self.classes[class]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: u64) -> Time {
        Time::from_nanos(second * 1_000_000_000 + 5)
    }

    #[test]
    fn arrivals_are_counted_for_a_minute_and_for_a_quarter() {
        let mut window = DemandWindow::default();
        for (second, tokens) in [(0, 1), (44, 2), (45, 3), (60, 4)] {
            window.arrived(at(second), 0, tokens);
        }
        let flow = |arrivals, prompt_tokens, pairs| RequestFlow {
            arrivals,
            prompt_tokens,
            pairs,
            ..RequestFlow::default()
        };
        let demand = window.demand(at(60));
        assert_eq!(demand.slow, flow(4, 10, 1 + 3 + 6 + 10));
        assert_eq!(demand.quick, flow(2, 7, 6 + 10));
        let later = window.demand(at(61));
        assert_eq!(later.slow, flow(3, 9, 3 + 6 + 10));
        assert_eq!(later.quick, flow(1, 4, 10));
        assert_eq!(window.demand(at(121)), FleetDemand::default());
    }

    #[test]
    fn a_second_is_forgotten_when_a_later_one_is_counted() {
        let mut window = DemandWindow::default();
        window.placed(at(0), 1);
        window.placed(at(60), 2);
        assert_eq!(window.seconds.len(), 2);
        window.placed(at(61), 3);
        assert_eq!(window.seconds.len(), 2);
    }

    #[test]
    fn placements_and_answers_are_summed_with_their_tokens() {
        let mut window = DemandWindow::default();
        window.placed(at(1), 100);
        window.placed(at(1), 20);
        window.answered(at(2), 7);
        let expected = RequestFlow {
            placed: 2,
            cached_tokens: 120,
            answers: 1,
            output_tokens: 7,
            ..RequestFlow::default()
        };
        assert_eq!(window.demand(at(3)).slow, expected);
    }

    #[test]
    fn each_class_is_judged_by_itself_and_by_leg() {
        let mut window = DemandWindow::default();
        window.arrived(at(1), 2, 10);
        window.judged(at(1), 0, PromiseOutcome::Met);
        window.judged(at(1), 0, PromiseOutcome::Missed(Role::Decode));
        window.judged(at(2), 0, PromiseOutcome::Missed(Role::Prefill));
        window.judged(at(2), 0, PromiseOutcome::Missed(Role::Both));
        window.judged(at(2), 2, PromiseOutcome::NotCounted);
        let outcomes = |arrivals, judged, missed_prefill, missed_decode| SloOutcomes {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        };
        let classes = window.demand(at(3)).classes;
        let none = SloOutcomes::default();
        assert_eq!(classes, [outcomes(0, 4, 2, 1), none, outcomes(1, 0, 0, 0)]);
        window.forget_classes();
        let demand = window.demand(at(3));
        assert_eq!((demand.classes.len(), demand.slow.arrivals), (0, 1));
    }
}
