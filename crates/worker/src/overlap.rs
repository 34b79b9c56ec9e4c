//! Steps that are begun before the previous one is over.
//!
//! Owns: the begun steps, in order. Never decides which steps, or that the engine has two: its
//! brain does. Lives on the engine's thread.
//! Invariant: each step is answered once, in the order in which they were begun, even one that the
//! engine refused or that panicked.

use super::engine::EngineThread;
use cleave_domain::StepPlan;
use cleave_engine::{Engine, EngineError, Overlap};
use cleave_sched::WorkerInput;
use std::collections::VecDeque;
use std::time::Instant;

/// How an engine takes steps.
pub(super) enum StepExecution {
    /// Each is over when the call returns.
    OneByOne,
    /// Steps are begun and collected; the begun ones, oldest first.
    Overlap(VecDeque<BegunStep>),
}

/// A step that was begun and not collected.
pub(super) struct BegunStep {
    plan: StepPlan,
    at: Instant,
    /// The error if the engine refused it; reported when the step's turn has come.
    refused: Option<Result<EngineError, String>>,
}

impl EngineThread {
    /// Begins a step; it is answered at once if the engine does not take it and has no other.
    pub(super) fn begin(&mut self, plan: StepPlan) -> Option<WorkerInput> {
        let at = Instant::now();
        let begun = self.catch_engine_panic(|engine| overlap(engine).begin(&plan));
        let refused = match begun {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Ok(error)),
            Err(panic) => Some(Err(panic)),
        };
        let StepExecution::Overlap(steps) = &mut self.steps else {
            unreachable!("only an engine that overlaps steps begins them");
        };
        let at_once = refused.is_some() && steps.is_empty();
        steps.push_back(BegunStep { plan, at, refused });
        if at_once { self.answer_oldest() } else { None }
    }

    /// Whether a step was begun and not collected.
    pub(super) fn has_uncollected_step(&self) -> bool {
        matches!(&self.steps, StepExecution::Overlap(steps) if !steps.is_empty())
    }

    /// Whether the engine has one more behind the oldest.
    pub(super) fn has_another(&self) -> bool {
        matches!(&self.steps, StepExecution::Overlap(steps) if steps.len() > 1)
    }

    /// Whether the oldest one can be answered without waiting.
    pub(super) fn is_done(&mut self) -> bool {
        let StepExecution::Overlap(steps) = &self.steps else {
            return false;
        };
        let refused = steps.front().is_some_and(|begun| begun.refused.is_some());
        // After a panic there is nothing more to wait for.
        refused
            || self
                .catch_engine_panic(|engine| overlap(engine).is_done())
                .unwrap_or(true)
    }

    /// Waits for the oldest one. Gives its answer, and the loss of the engine if that panicked in
    /// it.
    pub(super) fn collect(&mut self) -> [Option<WorkerInput>; 2] {
        let answer = self.answer_oldest();
        self.step_ended();
        [answer, self.take_failure()]
    }

    fn answer_oldest(&mut self) -> Option<WorkerInput> {
        let StepExecution::Overlap(steps) = &mut self.steps else {
            return None;
        };
        let BegunStep { plan, at, refused } = steps.pop_front()?;
        let result = match refused {
            None => self.catch_engine_panic(|engine| overlap(engine).collect()),
            Some(refused) => refused.map(Err),
        };
        let result = match result {
            // An engine that panicked may still hold an earlier step.
            Ok(Ok(other)) if other.step != plan.step => Err(format!(
                "the engine gave the result of {} in place of {}",
                other.step, plan.step
            )),
            result => result,
        };
        self.stepped(&plan, at, result)
    }
}

fn overlap(engine: &mut dyn Engine) -> &mut dyn Overlap {
    let overlap = engine.overlap();
    overlap.expect("an engine that overlapped steps once does so for good")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{EngineHost, EngineHostLimits, EngineWork};
    use crate::kv_copier::tests::capacity;
    use crate::pace::StepTime;
    use crate::swap::{SwapDirection, SwapJob};
    use cleave_domain::{BlockIndex, FlightId, HandoffId, KvPlane, SlotIndex, StepId, StepResult};
    use cleave_engine::{BlockSpan, EngineDescription};
    use cleave_fleet::HealthMonitor;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;
    use tokio::sync::mpsc as facts;

    /// How the test lets a step end.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum ScriptedStepEnd {
        Ends,
        /// It ends, and its result is given again in place of the next one's.
        Repeats,
        Breaks,
        YieldsNotFinite,
        Panics,
    }

    /// A device whose steps end when the test says so, and that reports each call.
    struct ScriptedEngine {
        reports: mpsc::Sender<String>,
        ends: mpsc::Receiver<ScriptedStepEnd>,
        next: Option<ScriptedStepEnd>,
        begun: VecDeque<StepId>,
        /// The step that it refuses.
        refuses: StepId,
    }

    impl ScriptedEngine {
        fn report(&self, text: String) {
            // The test may have stopped listening.
            let _ = self.reports.send(text);
        }
    }

    impl Engine for ScriptedEngine {
        fn describe(&self) -> &EngineDescription {
            unreachable!("nobody asks")
        }

        fn overlap(&mut self) -> Option<&mut dyn Overlap> {
            Some(self)
        }

        fn step(&mut self, _: &StepPlan) -> Result<StepResult, EngineError> {
            unreachable!("steps are begun and collected")
        }

        fn read_block(&self, _: BlockSpan, _: &mut [u8]) -> Result<(), EngineError> {
            self.report("read".into());
            Ok(())
        }

        fn write_block(&mut self, _: BlockSpan, _: &[u8]) -> Result<(), EngineError> {
            unreachable!("nothing comes")
        }

        fn copy_blocks(
            &mut self,
            _: KvPlane,
            _: &[(BlockIndex, BlockIndex)],
        ) -> Result<(), EngineError> {
            unreachable!("nothing is copied")
        }
    }

    impl Overlap for ScriptedEngine {
        fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
            self.report(format!("begin {}", plan.step));
            if plan.step == self.refuses {
                return Err(EngineError::Plan("not this one".into()));
            }
            self.begun.push_back(plan.step);
            Ok(())
        }

        fn is_done(&mut self) -> bool {
            self.next = self.next.or_else(|| self.ends.try_recv().ok());
            self.next.is_some()
        }

        fn collect(&mut self) -> Result<StepResult, EngineError> {
            let step = self.begun.pop_front().expect("a step was begun");
            let end = self.next.take().or_else(|| self.ends.recv().ok());
            match end.expect("the test says how it ends") {
                ScriptedStepEnd::Ends => Ok(StepResult {
                    step,
                    ..StepResult::default()
                }),
                ScriptedStepEnd::Repeats => {
                    self.begun.push_front(step);
                    Ok(StepResult {
                        step,
                        ..StepResult::default()
                    })
                }
                ScriptedStepEnd::Breaks => Err(EngineError::Device("on fire".into())),
                ScriptedStepEnd::YieldsNotFinite => Err(EngineError::NotFinite(vec![SlotIndex(0)])),
                ScriptedStepEnd::Panics => panic!("a kernel that is not there"),
            }
        }
    }

    /// The test's side of a host with such a device.
    struct OverlapFixture {
        host: EngineHost,
        monitor: Arc<HealthMonitor>,
        reports: mpsc::Receiver<String>,
        ends: mpsc::Sender<ScriptedStepEnd>,
        answers: facts::UnboundedReceiver<WorkerInput>,
    }

    const LIMITS: EngineHostLimits = EngineHostLimits {
        capacity: capacity(8),
        write_bytes_max: u64::MAX,
        swap_bytes_max: u64::MAX,
        time: StepTime::Measured,
    };

    impl OverlapFixture {
        /// With a device that refuses step `refuses`.
        fn new(refuses: u64) -> Self {
            let (report_sender, received_reports) = mpsc::channel();
            let (end_sender, end_receiver) = mpsc::channel();
            let device = ScriptedEngine {
                reports: report_sender,
                ends: end_receiver,
                next: None,
                begun: VecDeque::new(),
                refuses: StepId(refuses),
            };
            let (answer_sender, answers) = facts::unbounded_channel();
            let monitor = Arc::new(HealthMonitor::new(Duration::from_secs(60)));
            let watched = Arc::clone(&monitor);
            let device: Box<dyn Engine> = Box::new(device);
            let host =
                EngineHost::start(device, None, None, LIMITS, watched, answer_sender).unwrap();
            Self {
                host,
                monitor,
                reports: received_reports,
                ends: end_sender,
                answers,
            }
        }

        fn begin_step(&self, number: u64) {
            self.host.push(step(number));
            assert_eq!(
                self.reports.recv().unwrap(),
                format!("begin {}", StepId(number))
            );
        }

        async fn answer(&mut self) -> String {
            match self.answers.recv().await.unwrap() {
                WorkerInput::Stepped { result, .. } => format!("stepped {}", result.step),
                WorkerInput::StepFailed {
                    step,
                    slots,
                    fault: _,
                    reason,
                } => match slots[..] {
                    [slot] => format!("failed {step} for {slot}: {reason}"),
                    _ => format!("failed {step}: {reason}"),
                },
                WorkerInput::EngineLost { .. } => "lost".into(),
                WorkerInput::SwappedOut { .. } => "swapped".into(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn step(number: u64) -> EngineWork {
        EngineWork::Step(StepPlan {
            step: StepId(number),
            ..StepPlan::default()
        })
    }

    fn handoff() -> HandoffId {
        HandoffId {
            flight: FlightId(1),
            attempt: 0,
        }
    }

    #[tokio::test]
    async fn a_second_step_is_begun_while_the_first_runs() {
        let mut stage = OverlapFixture::new(0);
        stage.begin_step(1);
        stage.begin_step(2);
        for number in 1..9 {
            stage.ends.send(ScriptedStepEnd::Ends).unwrap();
            assert_eq!(stage.answer().await, format!("stepped {}", StepId(number)));
            // The next one runs, and the one behind it is begun before that is over.
            stage.begin_step(number + 2);
        }
    }

    #[tokio::test]
    async fn blocks_are_copied_while_steps_are_under_way() {
        let mut stage = OverlapFixture::new(0);
        stage.begin_step(1);
        stage.begin_step(2);
        let span = BlockSpan::of_block(BlockIndex(0), 0, 4);
        let swap = SwapJob::new(handoff(), vec![span], SwapDirection::Out);
        stage.host.push(EngineWork::Swap(swap));
        assert_eq!(stage.answer().await, "swapped");
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        assert_eq!(stage.answer().await, "stepped s2");
    }

    #[tokio::test]
    async fn a_refused_step_is_answered_in_order() {
        let mut stage = OverlapFixture::new(2);
        stage.begin_step(1);
        stage.begin_step(2);
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        let refused = "failed s2: impossible step: not this one";
        assert_eq!(stage.answer().await, refused);
        stage.begin_step(2);
        assert_eq!(stage.answer().await, refused);
    }

    #[tokio::test]
    async fn a_failed_or_panicked_step_and_its_followers_are_answered() {
        let mut stage = OverlapFixture::new(0);
        stage.begin_step(1);
        stage.begin_step(2);
        stage.ends.send(ScriptedStepEnd::Breaks).unwrap();
        assert_eq!(stage.answer().await, "failed s1: device failed: on fire");
        stage.begin_step(3);
        stage.ends.send(ScriptedStepEnd::Panics).unwrap();
        let panic = "the engine panicked: a kernel that is not there";
        assert_eq!(stage.answer().await, format!("failed s2: {panic}"));
        assert_eq!(stage.answer().await, "lost");
        stage.ends.send(ScriptedStepEnd::Panics).unwrap();
        assert_eq!(stage.answer().await, format!("failed s3: {panic}"));
    }

    #[tokio::test]
    async fn eight_device_failures_in_a_row_lose_the_engine() {
        let mut stage = OverlapFixture::new(0);
        let ends = [
            vec![ScriptedStepEnd::Breaks; 7],
            // Numbers that are not finite are the model's failure, not the device's; and one
            // success resets the count.
            vec![ScriptedStepEnd::YieldsNotFinite; 9],
            vec![ScriptedStepEnd::Ends],
            vec![ScriptedStepEnd::Breaks; 7],
        ];
        let mut number = 0;
        for end in ends.concat() {
            number += 1;
            stage.begin_step(number);
            stage.ends.send(end).unwrap();
            let answer = stage.answer().await;
            assert!(answer.contains(&StepId(number).to_string()), "{answer}");
            let named = answer.contains(&format!("for {}", SlotIndex(0)));
            assert_eq!(named, end == ScriptedStepEnd::YieldsNotFinite, "{answer}");
            assert_eq!(stage.monitor.check(), Ok(()), "{number}");
        }
        stage.begin_step(number + 1);
        stage.ends.send(ScriptedStepEnd::Breaks).unwrap();
        let failed = format!("failed {}: device failed: on fire", StepId(number + 1));
        assert_eq!(stage.answer().await, failed);
        assert_eq!(stage.answer().await, "lost");
        assert!(stage.monitor.check().is_err());
    }

    /// Otherwise the brain would wait for the missing result forever.
    #[tokio::test]
    async fn the_result_of_another_step_fails_the_step() {
        let mut stage = OverlapFixture::new(0);
        stage.begin_step(1);
        stage.begin_step(2);
        stage.ends.send(ScriptedStepEnd::Repeats).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        let other = "failed s2: the engine gave the result of s1 in place of s2";
        assert_eq!(stage.answer().await, other);
    }

    #[tokio::test]
    async fn a_dropped_host_still_answers_begun_steps() {
        let mut stage = OverlapFixture::new(0);
        stage.begin_step(1);
        stage.begin_step(2);
        drop(stage.host);
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        for number in 1..3 {
            let answer = stage.answers.recv().await.unwrap();
            assert!(
                matches!(answer, WorkerInput::Stepped { result, .. } if result.step.0 == number)
            );
        }
        assert_eq!(stage.answers.recv().await, None);
    }

    // Lesson: 12.
    #[tokio::test(start_paused = true)]
    async fn overlapped_steps_have_separate_time_limits() {
        let mut stage = OverlapFixture::new(0);
        let monitor = Arc::clone(&stage.monitor);
        let pass = |seconds| tokio::time::advance(Duration::from_secs(seconds));
        stage.begin_step(1);
        stage.begin_step(2);
        pass(59).await;
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        pass(59).await;
        assert_eq!(monitor.check(), Ok(()));
        pass(2).await;
        assert!(monitor.check().is_err());
        stage.ends.send(ScriptedStepEnd::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s2");
        assert_eq!(monitor.check(), Ok(()));
    }
}
