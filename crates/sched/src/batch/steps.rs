//! The steps that the engine has and has not answered.
//!
//! Owns: their order, their numbers, the time that steps take of late, and when prompts last ran.
//! Never: chooses the content of a step, or settles its result.
//! Invariant: the first step runs and each other one follows the one before it; a sequence in a
//! step is in every step before it.

use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::sequences::SequencePhase;
use crate::{DraftOutcome, WorkerLimits, WorkerNote, WorkerOutput};
use cleave_domain::{HandoffId, SlotIndex, StepId, StepPlan, StepWork, Time, TokenId};
use cleave_planner::Predict;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// How long before the predicted end of the step under way the next one is emitted: it covers the
/// error of a body's timer and the host's own way to the device. For a long step an eighth of it,
/// since predictions are off by that much.
const LEAD: Duration = Duration::from_millis(2);
const LEAD_PARTS: u32 = 8;

/// Every eighth step serves prompts that are past their deadline in their normal order, so that
/// they are not starved.
const LATE_STEPS: u64 = 8;

/// Steps given to the engine and not answered, the oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepPipeline {
    in_flight: VecDeque<StepInFlight>,
    /// Steps so far; numbers the next one.
    count: u64,
    /// Running mean of the time that recent steps took.
    mean: Duration,
    /// Time at which a step last held prompt tokens.
    last_chunk_at: Option<Time>,
}

/// The brain's record of a step under way.
#[derive(Clone, Debug)]
pub(crate) struct StepInFlight {
    pub(crate) id: StepId,
    /// When it was given to the engine, or when the one before it ended.
    started_at: Time,
    /// Whether it exceeded `step_max`.
    stuck: bool,
    /// Its work, and the time predicted for it.
    pub(crate) work: StepWork,
    pub(crate) predicted: Duration,
    /// In the order of the plan's segments.
    pub(crate) segments: Vec<SegmentInFlight>,
    /// Draft tokens, in the same order.
    pub(crate) drafts: Vec<TokenId>,
    /// Outcome of speculation, where it is enabled.
    pub(crate) drafting: Option<DraftOutcome>,
    /// The step before it, on which it builds, failed for one sequence: none of its results can be
    /// used.
    pub(crate) unusable: bool,
}

/// A segment of a step under way.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) struct SegmentInFlight {
    pub(crate) handoff: HandoffId,
    pub(crate) slot: SlotIndex,
    /// Tokens that it runs, `drafts` included.
    pub(crate) tokens: u32,
    pub(crate) drafts: u32,
    pub(crate) phase: SequencePhase,
    pub(crate) samples: bool,
    /// Whether it contributes to the vector of a pooled sequence.
    pub(crate) pools: bool,
}

impl SegmentInFlight {
    /// Whether a running sequence draws its next token, and has nothing else to run.
    pub(crate) fn decodes(&self) -> bool {
        self.phase == SequencePhase::Decode && self.samples && self.tokens - self.drafts == 1
    }
}

impl StepPipeline {
    // === steps ===

    /// Records a step as under way, and returns its plan with its number; `segments` are in the
    /// order of the plan's.
    fn begin(
        &mut self,
        mut plan: StepPlan,
        segments: Vec<SegmentInFlight>,
        drafting: Option<DraftOutcome>,
        forecast: &WorkForecast,
        now: Time,
    ) -> StepPlan {
        self.count += 1;
        plan.step = StepId(self.count);
        let work = StepWork::of_plan(&plan);
        let drafts = plan.segments.iter().flat_map(|segment| &segment.drafts);
        self.in_flight.push_back(StepInFlight {
            id: plan.step,
            work,
            predicted: forecast.prices().step(&work),
            segments,
            drafts: drafts.copied().collect(),
            drafting,
            started_at: now,
            stuck: false,
            unusable: false,
        });
        plan
    }

    /// Emits a step to the engine.
    pub(super) fn emit(
        &mut self,
        context: &mut WorkerContext,
        plan: StepPlan,
        segments: Vec<SegmentInFlight>,
        drafting: Option<DraftOutcome>,
        forecast: &WorkForecast,
    ) {
        let plan = self.begin(plan, segments, drafting, forecast, context.now());
        context.emit(WorkerOutput::Step(plan));
    }

    /// Removes the oldest step under way if it is this one; the one behind it starts now.
    pub(crate) fn finish(&mut self, id: StepId, now: Time) -> Option<StepInFlight> {
        if self.in_flight.front()?.id != id {
            return None;
        }
        let step = self.in_flight.pop_front();
        if let Some(next) = self.in_flight.front_mut() {
            next.started_at = now;
        }
        step
    }

    /// Records that the results of the steps still under way cannot be used.
    pub(crate) fn spoil(&mut self) {
        for step in &mut self.in_flight {
            step.unusable = true;
        }
    }

    /// Records the time that a step took: a running mean over about eight steps.
    pub(crate) fn measure(&mut self, id: StepId, took: Duration) {
        self.mean = match id.0 {
            1 => took,
            _ => (self.mean * 7 + took) / 8,
        };
    }

    /// Records that a step with prompt tokens is being put together.
    pub(crate) fn chunk_placed(&mut self, now: Time) {
        self.last_chunk_at = Some(now);
    }

    /// Notes a step that exceeds `step_max` as stuck, until it ends.
    pub(crate) fn detect_stuck(&mut self, context: &mut WorkerContext) {
        let (now, step_max) = (context.now(), context.limits().step_max);
        let late = |step: &&mut StepInFlight| !step.stuck && step.started_at + step_max <= now;
        if let Some(step) = self.in_flight.front_mut().filter(late) {
            step.stuck = true;
            context.changed();
            let running = now.since(step.started_at);
            context.note(WorkerNote::Stuck { running });
        }
    }

    // === looking ===

    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The step that the engine runs now.
    pub(crate) fn running(&self) -> Option<&StepInFlight> {
        self.in_flight.front()
    }

    /// The step that was emitted last.
    pub(crate) fn last(&self) -> Option<&StepInFlight> {
        self.in_flight.back()
    }

    /// The mean time of recent steps; zero before the first.
    pub(crate) fn mean(&self) -> Duration {
        self.mean
    }

    pub(crate) fn last_chunk_at(&self) -> Option<Time> {
        self.last_chunk_at
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.in_flight.iter().any(|step| step.stuck)
    }

    /// Whether the next step serves prompts that are past their deadline in their normal order.
    pub(crate) fn serves_late_prompts(&self) -> bool {
        self.count.is_multiple_of(LATE_STEPS)
    }

    /// Predicted rest of the steps under way.
    pub(crate) fn left(&self, now: Time) -> Duration {
        let left = |step: &StepInFlight| step.predicted.saturating_sub(now.since(step.started_at));
        // Nothing of a step that waits for another has passed.
        let mut steps = self.in_flight.iter();
        let first = steps.next().map_or(Duration::ZERO, left);
        steps.fold(first, |left, step| left + step.predicted)
    }

    /// The time from which a step ahead may be emitted, if the engine takes one now.
    pub(crate) fn ahead_at(&self, limits: &WorkerLimits) -> Option<Time> {
        let step = self.in_flight.front()?;
        let alone = self.in_flight.len() == 1 && !step.unusable;
        let takes_one = limits.steps_in_flight >= 2 && alone;
        let lead = LEAD.max(step.predicted / LEAD_PARTS);
        takes_one.then(|| step.started_at + step.predicted.saturating_sub(lead))
    }

    /// When the step under way counts as stuck, unless it does already.
    pub(crate) fn stuck_at(&self, step_max: Duration) -> Option<Time> {
        let step = self.in_flight.front().filter(|step| !step.stuck);
        step.map(|step| step.started_at + step_max)
    }

    /// Steps under way that contain each sequence, and its tokens in them.
    pub(crate) fn placed(&self) -> BTreeMap<HandoffId, (u32, u32)> {
        let mut placed: BTreeMap<HandoffId, (u32, u32)> = BTreeMap::new();
        for segment in self.in_flight.iter().flat_map(|step| &step.segments) {
            let (steps, tokens) = placed.entry(segment.handoff).or_default();
            *steps += 1;
            *tokens += segment.tokens;
        }
        placed
    }

    /// Hashes the steps under way.
    pub(crate) fn fingerprint(&self, now: Time, step_max: Duration, hasher: &mut impl Hasher) {
        self.in_flight.len().hash(hasher);
        for step in &self.in_flight {
            let left = (step.started_at + step_max).since(now);
            (step.stuck, step.unusable, left).hash(hasher);
            (&step.segments, &step.drafts).hash(hasher);
        }
    }

    /// The part of the past that decides the future where prices are known.
    pub(crate) fn turn(&self, now: Time) -> (Option<Duration>, u64) {
        let chunk = self.last_chunk_at.map(|at| now.since(at));
        (chunk, self.count % LATE_STEPS)
    }

    /// Asserts the invariant of the steps under way, and their limits.
    pub(crate) fn check(&self, limits: &WorkerLimits) {
        assert!(
            self.in_flight.len() <= limits.steps_in_flight as usize,
            "more steps are under way than steps_in_flight"
        );
        let mut steps_of: BTreeMap<HandoffId, usize> = BTreeMap::new();
        for (place, step) in self.in_flight.iter().enumerate() {
            let tokens: u32 = step.segments.iter().map(|placed| placed.tokens).sum();
            assert!(
                tokens <= limits.capacity.step_tokens_max,
                "a step holds more tokens than step_tokens_max"
            );
            for placed in &step.segments {
                let steps = steps_of.entry(placed.handoff).or_default();
                assert_eq!(
                    *steps, place,
                    "a sequence is in a step ahead but not in the step before it"
                );
                *steps += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_worker::{MS, handoff, limits};
    use cleave_domain::Segment;

    fn at(millis: u32) -> Time {
        Time::ZERO + MS * millis
    }

    /// A step of one token of a sequence: 1 ms and a draw of 5 us, by the prices of the tests.
    fn begin(steps: &mut StepPipeline, number: u64, now: Time) -> StepPlan {
        let limits = limits();
        let placed = SegmentInFlight {
            handoff: handoff(number),
            slot: SlotIndex(0),
            tokens: 1,
            drafts: 0,
            phase: SequencePhase::Decode,
            samples: true,
            pools: false,
        };
        let mut plan = StepPlan::default();
        plan.segments.push(Segment {
            slot: placed.slot,
            position: 0,
            len: 1,
            blocks: Vec::new(),
            logits: cleave_domain::LogitsWanted::Sample,
            drafts: Vec::new(),
            state: None,
            window: None,
        });
        steps.begin(plan, vec![placed], None, &WorkForecast::new(&limits), now)
    }

    fn two() -> WorkerLimits {
        WorkerLimits {
            steps_in_flight: 2,
            ..limits()
        }
    }

    #[test]
    fn a_step_ahead_counts_in_full() {
        let mut steps = StepPipeline::default();
        assert_eq!(steps.left(at(12)), Duration::ZERO);
        begin(&mut steps, 1, at(10));
        let whole = steps.left(at(10));
        assert_eq!(steps.left(at(10) + whole / 4), whole - whole / 4);
        begin(&mut steps, 1, at(10));
        assert_eq!(steps.left(at(10) + whole / 4), whole * 2 - whole / 4);
        assert_eq!(steps.left(at(40)), whole, "the first one is late");
        steps.check(&two());
    }

    #[test]
    fn steps_are_answered_in_their_order() {
        let mut steps = StepPipeline::default();
        let first = begin(&mut steps, 1, at(0)).step;
        let second = begin(&mut steps, 1, at(1)).step;
        assert_eq!((first, second), (StepId(1), StepId(2)));
        assert!(steps.finish(second, at(2)).is_none(), "the first one runs");
        assert_eq!(steps.placed()[&handoff(1)], (2, 2));
        assert_eq!(steps.finish(first, at(3)).map(|step| step.id), Some(first));
        assert!(steps.finish(first, at(3)).is_none(), "once");
        assert_eq!(steps.stuck_at(MS * 10), Some(at(13)), "it starts now");
        assert!(steps.finish(second, at(4)).is_some() && steps.is_empty());
    }

    #[test]
    fn a_stuck_step_is_noted_once() {
        let mut steps = StepPipeline::default();
        let mut context = WorkerContext::new(limits());
        let step_max = context.limits().step_max;
        begin(&mut steps, 1, at(5));
        context.advance(at(5) + step_max - Duration::from_nanos(1));
        steps.detect_stuck(&mut context);
        assert!(!steps.is_stuck() && !context.has_outputs());
        context.advance(at(5) + step_max);
        steps.detect_stuck(&mut context);
        let running = step_max;
        let note = crate::WorkerOutput::Note(WorkerNote::Stuck { running });
        assert_eq!((context.poll(), steps.is_stuck()), (Some(note), true));
        steps.detect_stuck(&mut context);
        assert_eq!((context.poll(), steps.stuck_at(step_max)), (None, None));
    }

    #[test]
    fn a_spoilt_step_is_followed_by_none() {
        let mut steps = StepPipeline::default();
        assert_eq!(steps.ahead_at(&two()), None, "nothing runs");
        begin(&mut steps, 1, at(0));
        assert_eq!(steps.ahead_at(&limits()), None, "the engine takes one");
        assert!(steps.ahead_at(&two()).is_some());
        steps.spoil();
        assert_eq!(steps.ahead_at(&two()), None);
    }

    #[test]
    #[should_panic(expected = "not in the step before it")]
    fn a_step_ahead_of_another_sequence_is_found() {
        let mut steps = StepPipeline::default();
        begin(&mut steps, 1, at(0));
        begin(&mut steps, 2, at(0));
        steps.check(&two());
    }
}
