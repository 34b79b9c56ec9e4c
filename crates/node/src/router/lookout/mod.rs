//! What the page for operators shows of flights.
//!
//! Owns: how far each flight has come, what landed, the last minute, and what went wrong. Never: decides,
//! or sees a token or a text. Invariant: a flight is counted at one stage from its submission to its end,
//! and nothing is kept of it after that but numbers.
//!
//! The driver tells what it hears and does; whoever looks copies the numbers out. Workers are the
//! roster's.

mod happenings;
mod minute;

pub(crate) use minute::Judgement;

use crate::scaling::Decisions;
use cleave_api::{FlightsNow, Handoffs, Happening, Quantiles, ScalingStep, Second, Verdicts};
use cleave_domain::{FlightId, HandoffId, Report, Stage, Wanted, WorkerRef};
use cleave_router::Note;
use happenings::{Happenings, at_ms};
use minute::{ClassMinute, Minute};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// See the module.
#[derive(Debug)]
pub(crate) struct Lookout {
    since: Instant,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    flights: HashMap<FlightId, Course>,
    minute: Minute,
    totals: BTreeMap<String, Verdicts>,
    bytes_total: u64,
    landed_total: u64,
    joined_total: u64,
    happenings: Happenings,
    decisions: Decisions,
}

/// How far a flight has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    Queued,
    Reserved,
    Prefill,
    Transfer,
    Decode,
}

#[derive(Debug)]
struct Course {
    leg: Leg,
    prompt_tokens: u64,
    /// The one that its blocks last set out in.
    attempt: u32,
    /// Whether its legs are two workers'.
    apart: bool,
    /// A running sequence is on its way to another worker.
    moving: bool,
    /// Leading blocks that were there already.
    present: u32,
}

/// A pool's block, as the worker that takes it in has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSize {
    pub(crate) tokens: u32,
    pub(crate) bytes: u32,
}

/// What is to be seen of flights.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sight {
    pub(crate) uptime: Duration,
    pub(crate) flights: FlightsNow,
    pub(crate) stages: Vec<(Stage, Quantiles)>,
    /// The last minute and all of it, by class.
    pub(crate) classes: BTreeMap<String, ClassSight>,
    pub(crate) handoffs: Handoffs,
    pub(crate) history: Vec<Second>,
    pub(crate) events: Vec<Happening>,
    pub(crate) decisions: Vec<ScalingStep>,
}

/// What came of a class's requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClassSight {
    pub(crate) minute: ClassMinute,
    pub(crate) total: Verdicts,
}

impl Default for Lookout {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            seen: Mutex::default(),
        }
    }
}

impl Lookout {
    /// A flight is submitted.
    pub(crate) fn submitted(&self, flight: FlightId, prompt_tokens: usize) {
        let now = self.now();
        let mut seen = self.lock();
        seen.minute.second(now).begun += 1;
        let course = Course {
            leg: Leg::Queued,
            prompt_tokens: prompt_tokens as u64,
            attempt: 0,
            apart: false,
            moving: false,
            present: 0,
        };
        seen.flights.insert(flight, course);
    }

    /// The brain noted something; `name` knows what a worker is called.
    pub(crate) fn note(&self, note: &Note, name: impl Fn(&WorkerRef) -> String) {
        let mut seen = self.lock();
        match note {
            Note::Placed {
                handoff,
                prefill,
                decode,
                ..
            } => seen.placed(*handoff, prefill != decode),
            Note::Moving { handoff, .. } => {
                if let Some(course) = seen.flights.get_mut(&handoff.flight) {
                    (course.moving, course.attempt, course.present) = (true, handoff.attempt, 0);
                }
            }
            Note::Moved { handoff, .. } => seen.rests(*handoff),
            Note::Stayed { handoff, failure } => {
                seen.rests(*handoff);
                let reason = crate::telemetry::failure_name(failure);
                seen.happenings.add(("stayed", reason), "a move");
            }
            Note::Retried {
                handoff, failure, ..
            } => {
                if let Some(course) = seen.flights.get_mut(&handoff.flight) {
                    (course.leg, course.moving) = (Leg::Queued, false);
                }
                let reason = crate::telemetry::failure_name(failure);
                seen.happenings.add(("retried", reason), "an attempt");
            }
            Note::PassedOver {
                worker, refusal, ..
            } => {
                // A worker that refuses is no news; one that says nothing is.
                let (reason, about) = match refusal {
                    Some(refusal) => (crate::telemetry::refusal_name(refusal), "a worker".into()),
                    None => ("silent", name(worker)),
                };
                seen.happenings.add(("passed_over", reason), &about);
            }
            Note::WorkerStuck { worker } => {
                let about = name(worker);
                seen.happenings.add(("stuck", "no step ends"), &about);
            }
            Note::Decided(_)
            | Note::Judged { .. }
            | Note::Stale { .. }
            | Note::CancelFreed { .. }
            | Note::Fleet { .. } => {}
        }
    }

    /// A worker, whose blocks are so large, said something of a hand-off; `given` says how many tokens its
    /// client has. Gives the bytes of a hand-off that landed by this.
    pub(crate) fn hear(
        &self,
        report: &Report,
        blocks: BlockSize,
        given: impl FnOnce(FlightId) -> u32,
    ) -> Option<u64> {
        let (handoff, step) = match report {
            Report::Reserved {
                handoff, present, ..
            } => (handoff, Step::Reserved(*present)),
            Report::Prefilled { handoff, .. } => (handoff, Step::Prefilled),
            Report::Landed { handoff } => (handoff, Step::Landed),
            _ => return None,
        };
        let now = self.now();
        let mut seen = self.lock();
        let course = seen.flights.get_mut(&handoff.flight)?;
        if course.attempt != handoff.attempt {
            return None; // Of an attempt that is over.
        }
        if !course.step(step) {
            return None;
        }
        // The token that was drawn last has no KV yet.
        let output_tokens = u64::from(given(handoff.flight).saturating_sub(1));
        let tokens = course.prompt_tokens + output_tokens;
        let sent = tokens.div_ceil(u64::from(blocks.tokens.max(1)));
        let sent = sent.saturating_sub(u64::from(course.present));
        let bytes = sent * u64::from(blocks.bytes);
        seen.landed_total += 1;
        seen.bytes_total += bytes;
        seen.minute.second(now).handoff_bytes += bytes;
        Some(bytes)
    }

    /// A flight is over, and was worth this.
    pub(crate) fn ended(&self, flight: FlightId, judgement: Option<&Judgement>) {
        let now = self.now();
        let mut seen = self.lock();
        seen.flights.remove(&flight);
        if let Some(judgement) = judgement {
            seen.judged(now, judgement);
        }
    }

    /// Turned away before it was a flight.
    pub(crate) fn turned_away(&self, judgement: &Judgement) {
        let now = self.now();
        self.lock().judged(now, judgement);
    }

    /// Something happened to a worker.
    pub(crate) fn worker(&self, (kind, reason): (&'static str, &str), name: &str) {
        self.lock().happenings.add((kind, reason), name);
    }

    /// So many workers are wanted from now on.
    pub(crate) fn wants(&self, wanted: &Wanted) {
        self.lock().decisions.hear(wanted, at_ms());
    }

    /// All that is to be seen.
    pub(crate) fn sight(&self) -> Sight {
        let now = self.now();
        let mut seen = self.lock();
        let mut classes: BTreeMap<String, ClassSight> = BTreeMap::new();
        for (class, total) in &seen.totals {
            classes.entry(class.clone()).or_default().total = *total;
        }
        for (class, minute) in seen.minute.classes(now) {
            classes.entry(class).or_default().minute = minute;
        }
        Sight {
            uptime: self.since.elapsed(),
            flights: seen.flights_now(),
            stages: seen.minute.stages(now),
            classes,
            handoffs: Handoffs {
                bytes_total: seen.bytes_total,
                landed_total: seen.landed_total,
                joined_total: seen.joined_total,
                links: Vec::new(),
            },
            history: seen.minute.history(now),
            events: seen.happenings.all(),
            decisions: seen.decisions.all(),
        }
    }

    fn now(&self) -> u64 {
        self.since.elapsed().as_secs()
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a worker's word means for a flight.
#[derive(Clone, Copy)]
enum Step {
    Reserved(u32),
    Prefilled,
    Landed,
}

impl Course {
    /// Whether blocks of another worker have landed.
    fn step(&mut self, step: Step) -> bool {
        match step {
            Step::Reserved(present) => {
                self.present = present;
                if !self.moving {
                    self.leg = Leg::Prefill;
                }
                false
            }
            Step::Prefilled => {
                if !self.moving {
                    self.leg = match self.apart {
                        true => Leg::Transfer,
                        false => Leg::Decode,
                    };
                }
                false
            }
            Step::Landed => {
                self.leg = Leg::Decode;
                self.apart || self.moving
            }
        }
    }
}

impl Seen {
    fn placed(&mut self, handoff: HandoffId, apart: bool) {
        if !apart {
            self.joined_total += 1;
        }
        if let Some(course) = self.flights.get_mut(&handoff.flight) {
            course.leg = Leg::Reserved;
            (course.attempt, course.apart) = (handoff.attempt, apart);
            (course.moving, course.present) = (false, 0);
        }
    }

    /// A move is over, or came to nothing.
    fn rests(&mut self, handoff: HandoffId) {
        if let Some(course) = self.flights.get_mut(&handoff.flight) {
            course.moving = false;
        }
    }

    fn judged(&mut self, now: u64, judgement: &Judgement) {
        self.minute.judge(now, judgement);
        let total = self.totals.entry(judgement.class.clone()).or_default();
        *minute::verdict_of(total, judgement.verdict) += 1;
        if matches!(judgement.verdict, "refused" | "failed" | "late") {
            let what = (judgement.verdict, judgement.reason);
            self.happenings.add(what, &judgement.class);
        }
    }

    fn flights_now(&self) -> FlightsNow {
        let mut now = FlightsNow::default();
        for course in self.flights.values() {
            let count = match course.leg {
                Leg::Queued => &mut now.queued,
                Leg::Reserved => &mut now.reserved,
                Leg::Prefill => &mut now.prefill,
                Leg::Transfer => &mut now.transfer,
                Leg::Decode => &mut now.decode,
            };
            *count += 1;
            now.moving += u32::from(course.moving);
        }
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Failure, PrefillTiming, Timing, WorkerId};

    const BLOCKS: BlockSize = BlockSize {
        tokens: 16,
        bytes: 1_000,
    };

    fn worker(number: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(number),
            ..WorkerRef::default()
        }
    }

    fn attempt(attempt: u32) -> HandoffId {
        HandoffId {
            flight: FlightId(7),
            attempt,
        }
    }

    struct Desk(Lookout, std::cell::Cell<u32>);

    impl Desk {
        fn placed(&self, handoff: HandoffId, prefill: u64, decode: u64) {
            self.note(&Note::Placed {
                handoff,
                prefill: worker(prefill),
                decode: worker(decode),
                cached_tokens: 0,
                waited: Duration::ZERO,
            });
        }

        fn note(&self, note: &Note) {
            self.0.note(note, |worker| format!("w{}", worker.worker.0));
        }

        fn hear(&self, report: &Report) {
            self.0.hear(report, BLOCKS, |_| self.1.get());
        }

        fn reserved(&self, handoff: HandoffId, present: u32) {
            self.hear(&Report::Reserved {
                handoff,
                present,
                blocks: Vec::new(),
            });
        }

        fn prefilled(&self, handoff: HandoffId) {
            let timing = PrefillTiming::default();
            self.hear(&Report::Prefilled { handoff, timing });
        }

        #[track_caller]
        fn stands(&self, queued: u32, on_the_way: [u32; 3], decode: u32) {
            let [reserved, prefill, transfer] = on_the_way;
            let now = self.0.sight().flights;
            let expected = FlightsNow {
                queued,
                reserved,
                prefill,
                transfer,
                decode,
                moving: now.moving,
            };
            assert_eq!(now, expected);
        }
    }

    #[test]
    fn a_flight_is_at_one_stage_at_a_time_and_what_landed_is_counted_once() {
        let desk = Desk(Lookout::default(), std::cell::Cell::new(1));
        desk.0.submitted(FlightId(7), 100);
        desk.stands(1, [0, 0, 0], 0);
        desk.placed(attempt(0), 1, 2);
        desk.stands(0, [1, 0, 0], 0);
        desk.reserved(attempt(0), 2);
        desk.stands(0, [0, 1, 0], 0);
        desk.prefilled(attempt(0));
        desk.stands(0, [0, 0, 1], 0);
        desk.hear(&Report::Landed {
            handoff: attempt(0),
        });
        desk.stands(0, [0, 0, 0], 1);
        // Seven blocks, two of which were there.
        assert_eq!(desk.0.sight().handoffs.bytes_total, 5_000);
        // Its worker is lost, and the tokens it had are computed again, on one worker.
        desk.note(&Note::Retried {
            handoff: attempt(0),
            failure: Failure::WorkerLost,
            generated_tokens: 60,
        });
        desk.stands(1, [0, 0, 0], 0);
        desk.placed(attempt(1), 3, 3);
        desk.reserved(attempt(1), 0);
        // A late word of the attempt before.
        desk.hear(&Report::Landed {
            handoff: attempt(0),
        });
        desk.prefilled(attempt(1));
        desk.stands(0, [0, 0, 0], 1);
        // It moves: ten blocks for a hundred tokens and sixty more, and the last one drawn.
        desk.1.set(61);
        let (from, to) = (worker(3), worker(4));
        desk.note(&Note::Moving {
            handoff: attempt(2),
            from,
            to,
            why: cleave_router::MoveReason::Drain,
        });
        desk.reserved(attempt(2), 0);
        desk.prefilled(attempt(2));
        desk.stands(0, [0, 0, 0], 1);
        assert_eq!(desk.0.sight().flights.moving, 1);
        desk.hear(&Report::Landed {
            handoff: attempt(2),
        });
        desk.note(&Note::Moved {
            handoff: attempt(2),
            took: Duration::ZERO,
        });
        let sight = desk.0.sight();
        assert_eq!(sight.flights.moving, 0);
        let handoffs = sight.handoffs;
        assert_eq!(handoffs.bytes_total, 15_000);
        assert_eq!((handoffs.landed_total, handoffs.joined_total), (2, 1));
        let judgement = Judgement {
            class: "fast".to_owned(),
            verdict: "late",
            reason: "retry",
            timing: Timing::default(),
            output_tokens: 61,
        };
        desk.0.ended(FlightId(7), Some(&judgement));
        desk.stands(0, [0, 0, 0], 0);
        let sight = desk.0.sight();
        assert_eq!(sight.classes["fast"].total.late, 1);
        let told: Vec<_> = sight.events.iter().map(|e| (e.kind, &*e.reason)).collect();
        assert_eq!(told, [("late", "retry"), ("retried", "worker_lost")]);
        assert!(desk.0.lock().flights.is_empty());
    }
}
