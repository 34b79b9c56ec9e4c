//! What happened of late.
//!
//! Owns: the counts of the last minute, by seconds. Never: knows what they are for.
//! Invariant: a count is forgotten a minute after it was made.

use super::Came;
use cleave_domain::{Demand, Flow, Kept, Role, Time, Work};
use std::collections::VecDeque;
use std::time::Duration;

#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// By whole seconds, ascending.
    seconds: VecDeque<Second>,
}

#[derive(Clone, Debug)]
struct Second {
    at: u64,
    flow: Flow,
    classes: Vec<Kept>,
}

fn second(at: Time) -> u64 {
    at.since(Time::ZERO).as_secs()
}

impl Window {
    pub(super) fn arrived(&mut self, now: Time, class: usize, prompt_tokens: u32) {
        let second = self.second(now);
        second.kept(class).arrivals += 1;
        second.flow += Flow {
            arrivals: 1,
            prompt_tokens: u64::from(prompt_tokens),
            pairs: Work::prefill(0, prompt_tokens).pairs,
            ..Flow::default()
        };
    }

    pub(super) fn placed(&mut self, now: Time, cached_tokens: u32) {
        self.second(now).flow += Flow {
            placed: 1,
            cached_tokens: u64::from(cached_tokens),
            ..Flow::default()
        };
    }

    pub(super) fn answered(&mut self, now: Time, output_tokens: u32) {
        self.second(now).flow += Flow {
            answers: 1,
            output_tokens: u64::from(output_tokens),
            ..Flow::default()
        };
    }

    pub(super) fn judged(&mut self, now: Time, class: usize, came: Came) {
        let kept = self.second(now).kept(class);
        match came {
            Came::Aside => return,
            Came::Good => {}
            Came::Missed(Role::Decode) => kept.missed_decode += 1,
            Came::Missed(Role::Prefill | Role::Both) => kept.missed_prefill += 1,
        }
        kept.judged += 1;
    }

    /// What is in it now.
    pub(super) fn demand(&mut self, now: Time) -> Demand {
        self.forget(now);
        let quick = second(now).saturating_sub(Demand::QUICK.as_secs());
        let mut demand = Demand::default();
        for one in &self.seconds {
            demand.slow += one.flow;
            if one.at >= quick {
                demand.quick += one.flow;
            }
            if demand.classes.len() < one.classes.len() {
                demand.classes.resize(one.classes.len(), Kept::default());
            }
            for (sum, more) in demand.classes.iter_mut().zip(&one.classes) {
                *sum += *more;
            }
        }
        demand
    }

    /// Classes are others now.
    pub(super) fn forget_classes(&mut self) {
        for second in &mut self.seconds {
            second.classes.clear();
        }
    }

    fn second(&mut self, now: Time) -> &mut Second {
        let at = second(now);
        if self.seconds.back().is_none_or(|last| last.at < at) {
            self.forget(now);
            self.seconds.push_back(Second {
                at,
                flow: Flow::default(),
                classes: Vec::new(),
            });
        }
        self.seconds.back_mut().expect("there is one now")
    }

    fn forget(&mut self, now: Time) {
        let slow: Duration = Demand::SLOW;
        let from = second(now).saturating_sub(slow.as_secs());
        while self.seconds.front().is_some_and(|first| first.at < from) {
            self.seconds.pop_front();
        }
    }
}

impl Second {
    fn kept(&mut self, class: usize) -> &mut Kept {
        if self.classes.len() <= class {
            self.classes.resize(class + 1, Kept::default());
        }
        &mut self.classes[class]
    }
}
