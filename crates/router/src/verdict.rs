//! Where a flight's time went, and what came of its promise.
//!
//! Owns: the moments that are taken down on the way, the stages made of them, the verdict, and what
//! predictions learn from both. Never: decides anything about a flight.
//! Invariant: the stages add up to the time from arrival to the end, as far as the flight came; one
//! verdict for each flight.

use crate::brain::Brain;
use crate::event::{CancelReason, Note};
use crate::flight::Flight;
use crate::tally::Sample;
use cleave_domain::{
    Aim, DecodeTiming, Ending, FlightId, PrefillTiming, Stage, Time, Timing, Verdict,
};
use std::time::Duration;

/// When a flight came how far. Words may come in any order; only the first attempt that gave its client a
/// token tells of the time until then, and what failures cost after it is in the last stage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    /// The attempt under way was begun, and its prompt ordered.
    pub(crate) began: Option<Time>,
    pub(crate) ordered: Option<Time>,
    /// What attempts took that came to nothing before the first token.
    pub(crate) lost: Duration,
    /// The first token was there, and what its worker said of it.
    pub(crate) first: Option<(Time, PrefillTiming)>,
    /// The blocks were where they had to be.
    pub(crate) landed: Option<Time>,
    pub(crate) decode: DecodeTiming,
}

/// Workers fill the gaps that they have promised with the work of those that were promised nothing, so a
/// gap of most of its target is no error of a prediction where there are such.
fn most(target: Option<Duration>) -> Duration {
    target.map_or(Duration::ZERO, |target| target - target / 8)
}

/// Takes what it can of what is left.
fn cut(left: &mut Duration, wanted: Duration) -> Duration {
    let part = wanted.min(*left);
    *left -= part;
    part
}

impl Clock {
    /// The stages of a flight that began at `since` and ends at `until`: each is cut from what the ones
    /// before it left, so that they add up whatever was said and in whatever order.
    fn timing(&self, since: Time, until: Time) -> Timing {
        let Some((first, prefill)) = self.first else {
            let mut left = until.since(since);
            let waits = self.ordered.map_or(Duration::ZERO, |at| until.since(at));
            let prefill_wait = cut(&mut left, waits);
            let retry = cut(&mut left, self.lost);
            return Timing {
                router_queue: left,
                retry,
                prefill_wait,
                ..Timing::default()
            };
        };
        let mut before = first.since(since);
        let mut after = until.since(since) - before.min(until.since(since));
        // Two clocks: what a worker measured may be longer than what was seen of it here.
        let run = cut(&mut before, prefill.run);
        let prefill_wait = cut(&mut before, prefill.wait);
        let retry = cut(&mut before, self.lost);
        let landed = self.landed.unwrap_or(first);
        let transfer = cut(&mut after, landed.since(first));
        let decode_wait = cut(&mut after, self.decode.wait);
        let first_decode = cut(&mut after, self.decode.first);
        Timing {
            router_queue: before,
            retry,
            prefill_wait,
            prefill: run,
            transfer,
            decode_wait,
            first_decode,
            decode: after,
        }
    }
}

impl Flight {
    fn late(&self, timing: &Timing, output_tokens: u32) -> Option<Verdict> {
        let slo = &self.request.slo;
        let spans = [
            (Aim::Ttft, slo.ttft, Some(timing.ttft())),
            (Aim::Tpot, slo.tpot, timing.tpot(output_tokens)),
            (Aim::EndToEnd, slo.e2e, Some(timing.total())),
        ];
        let missed = |(_, target, real): &(Aim, Option<Duration>, Option<Duration>)| {
            target
                .zip(*real)
                .is_some_and(|(target, real)| real > target)
        };
        let (aim, target, _) = spans.into_iter().find(missed)?;
        let stage = self.stage_that_broke((aim, target.unwrap_or_default()), timing);
        Some(Verdict::Late { aim, stage })
    }

    /// The one that took the most beyond what was predicted when the flight was placed; without a
    /// prediction, or where it was already placed too late, the longest.
    fn stage_that_broke(&self, (aim, target): (Aim, Duration), timing: &Timing) -> Stage {
        let stages = match aim {
            Aim::Ttft => &Stage::ALL[..4],
            Aim::Tpot => &Stage::ALL[4..],
            Aim::EndToEnd => &Stage::ALL[..],
        };
        let in_time = |stages: &Timing| aim == Aim::Tpot || stages.ttft() <= target;
        let predicted = self.outlook.map(|outlook| outlook.stages);
        let predicted = predicted.filter(in_time);
        let predicted = predicted.unwrap_or_default();
        let beyond = |stage: Stage| timing.of(stage).saturating_sub(predicted.of(stage));
        let worst = stages.iter().copied().rev().max_by_key(|s| beyond(*s));
        worst.unwrap_or(Stage::RouterQueue)
    }
}

impl Brain {
    /// Notes what the flight was worth. Gives where its time went.
    pub(crate) fn judged(
        &mut self,
        flight: &Flight,
        (ending, why): (&Ending, CancelReason),
        tokens: Option<u32>,
    ) -> Timing {
        let timing = flight.clock.timing(flight.submitted, self.now);
        let given = flight.clock.first.is_some();
        let tokens = match (tokens, why) {
            (None, CancelReason::Enough { output_tokens }) => Some(output_tokens),
            (tokens, _) => tokens,
        };
        let counted = (flight.request.generated.len() as u32).max(u32::from(given));
        let output_tokens = tokens.unwrap_or(counted);
        let enough = matches!(why, CancelReason::Enough { .. });
        let is_whole = enough || matches!(ending, Ending::Done { .. });
        let answer = is_whole.then_some(output_tokens);
        let verdict = match ending {
            Ending::Cancelled if !enough => {
                let passed = flight.late(&timing, u32::from(given));
                passed.unwrap_or(Verdict::Cancelled)
            }
            Ending::Done { .. } | Ending::Cancelled => {
                let late = flight.late(&timing, output_tokens);
                self.learn_tpot(flight, &timing, output_tokens);
                late.unwrap_or(Verdict::Good)
            }
            Ending::Refused(_) => Verdict::Refused,
            Ending::Failed(_) => Verdict::Failed,
        };
        self.was_judged(flight, (verdict, ending), answer);
        self.note(Note::Judged {
            flight: flight.place.flight,
            class: flight.request.slo.class.clone(),
            tenant: flight.request.slo.tenant.clone(),
            verdict,
            timing,
            output_tokens,
            forecast: flight.outlook.map(|outlook| Box::new(outlook.forecast)),
        });
        timing
    }

    /// The prompt was ordered; its first token is not there.
    pub(crate) fn clock_ordered(&mut self, id: FlightId) {
        let now = self.now;
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.clock.ordered = Some(now);
        }
    }

    /// The attempt under way came to nothing.
    pub(crate) fn clock_lost(&mut self, id: FlightId) {
        let now = self.now;
        if let Some(flight) = self.flights.get_mut(&id) {
            let clock = &mut flight.clock;
            let began = clock.began.take().filter(|_| clock.first.is_none());
            clock.lost += began.map_or(Duration::ZERO, |at| now.since(at));
            clock.ordered = None;
        }
    }

    /// The first token is there.
    pub(crate) fn clock_first(&mut self, id: FlightId, timing: PrefillTiming) {
        let now = self.now;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if flight.clock.first.is_none() {
            flight.clock.first = Some((now, timing));
            self.learn_ttft(id);
        }
    }

    /// The last token is there; `began` is how its decode worker began, if it is the first.
    pub(crate) fn clock_last(&mut self, id: FlightId, began: Option<DecodeTiming>) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if flight.failures == 0 {
            flight.clock.decode = began.unwrap_or_default();
        }
    }

    /// The blocks are where they have to be.
    pub(crate) fn clock_landed(&mut self, id: FlightId) {
        let now = self.now;
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.clock.landed.get_or_insert(now);
        }
    }

    /// Whether what came of the flight says anything about predictions: nothing went wrong on its way,
    /// and nothing went elsewhere.
    fn is_plain(flight: &Flight) -> bool {
        flight.failures == 0 && flight.attempts == 1
    }

    fn learn_ttft(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id).filter(|f| Self::is_plain(f)) else {
            return;
        };
        let slo = &flight.request.slo;
        if slo.ttft.is_none() && slo.e2e.is_none() {
            // Whoever is due at no time runs behind those that are.
            return;
        }
        let Some(((first, _), outlook)) = flight.clock.first.zip(flight.outlook) else {
            return;
        };
        // What it waited for a place is known, not predicted.
        let before = outlook.stages.router_queue;
        let (class, goal_permille) = self.class_goal(flight);
        let sample = Sample {
            real: first.since(flight.submitted).saturating_sub(before),
            predicted: outlook.forecast.ttft.saturating_sub(before),
            target: slo.ttft.map(|ttft| ttft.saturating_sub(before)),
            goal_permille,
            at: self.now,
        };
        self.tally.learn_ttft(&class, &sample);
    }

    fn learn_tpot(&mut self, flight: &Flight, timing: &Timing, output_tokens: u32) {
        let Some(outlook) = flight.outlook.filter(|_| Self::is_plain(flight)) else {
            return;
        };
        let (class, goal_permille) = self.class_goal(flight);
        self.tally.answered(&class, output_tokens);
        let slo = &flight.request.slo;
        if slo.tpot.is_none() && slo.e2e.is_none() {
            // Whoever was promised no gap sits out for those that were.
            return;
        }
        let gap = most(flight.request.slo.tpot.filter(|_| self.anybody_gives_way()));
        if let Some(predicted) = outlook.tpot_of(output_tokens).map(|tpot| tpot.max(gap)) {
            let sample = Sample {
                real: timing.total() - timing.ttft(),
                predicted: predicted * (output_tokens - 1),
                target: slo.tpot.map(|tpot| tpot * (output_tokens - 1)),
                goal_permille,
                at: self.now,
            };
            self.tally.learn_tpot(&class, &sample);
        }
    }

    fn class_goal(&self, flight: &Flight) -> (String, u32) {
        let class = self.class_of(flight);
        (class.name.clone(), class.attainment_permille)
    }
}
