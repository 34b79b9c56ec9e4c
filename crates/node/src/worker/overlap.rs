//! Steps that are begun before the one before them is over.
//!
//! Owns: those that the engine has, in order. Never: decides which, or that the engine has two: its brain
//! does. Lives on the engine's thread.
//! Invariant: each is answered once, in the order in which they were begun, also one that the engine would
//! not take or that panicked.

use super::engine::Bench;
use cleave_domain::StepPlan;
use cleave_engine::{Engine, EngineError, Overlap};
use cleave_sched::Input;
use std::collections::VecDeque;
use std::time::Instant;

/// How an engine takes steps.
pub(super) enum Steps {
    /// Each is over when the call returns.
    OneByOne,
    /// They are begun and collected; those between, the oldest first.
    Overlap(VecDeque<Begun>),
}

/// A step between the two.
pub(super) struct Begun {
    plan: StepPlan,
    at: Instant,
    /// How the engine would not take it; that is said when its turn has come.
    refused: Option<Result<EngineError, String>>,
}

impl Bench {
    /// Begins a step; it is answered at once if the engine does not take it and has no other.
    pub(super) fn begin(&mut self, plan: StepPlan) -> Option<Input> {
        let at = Instant::now();
        let begun = self.guarded(|engine| overlap(engine).begin(&plan));
        let refused = match begun {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Ok(error)),
            Err(panic) => Some(Err(panic)),
        };
        let Steps::Overlap(steps) = &mut self.steps else {
            unreachable!("an engine of the other kind runs steps");
        };
        let at_once = refused.is_some() && steps.is_empty();
        steps.push_back(Begun { plan, at, refused });
        if at_once { self.answer_oldest() } else { None }
    }

    /// Whether a step was begun and not collected.
    pub(super) fn flies(&self) -> bool {
        matches!(&self.steps, Steps::Overlap(steps) if !steps.is_empty())
    }

    /// Whether the engine has one more behind the oldest.
    pub(super) fn has_another(&self) -> bool {
        matches!(&self.steps, Steps::Overlap(steps) if steps.len() > 1)
    }

    /// Whether the oldest one can be answered without waiting.
    pub(super) fn is_done(&mut self) -> bool {
        let Steps::Overlap(steps) = &self.steps else {
            return false;
        };
        let refused = steps.front().is_some_and(|begun| begun.refused.is_some());
        // If that panics, the engine has nothing more to wait for.
        refused
            || self
                .guarded(|engine| overlap(engine).is_done())
                .unwrap_or(true)
    }

    /// Waits for the oldest one. Gives its answer, and the loss of the engine if that panicked in it.
    pub(super) fn collect(&mut self) -> [Option<Input>; 2] {
        let answer = self.answer_oldest();
        self.beat();
        [answer, self.lost()]
    }

    fn answer_oldest(&mut self) -> Option<Input> {
        let Steps::Overlap(steps) = &mut self.steps else {
            return None;
        };
        let Begun { plan, at, refused } = steps.pop_front()?;
        let result = match refused {
            None => self.guarded(|engine| overlap(engine).collect()),
            Some(refused) => refused.map(Err),
        };
        let result = match result {
            // One that panicked may have kept what it was asked for then.
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
    use crate::health::Pulse;
    use crate::worker::engine::{EngineHost, EngineLimits, Work};
    use crate::worker::pace::StepTime;
    use crate::worker::swap::{Swap, Way};
    use cleave_domain::{BlockIndex, FlightId, HandoffId, SlotIndex, StepId, StepResult};
    use cleave_engine::EngineDescription;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;
    use tokio::sync::mpsc as facts;

    /// What a device is told to do with a step.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        Ends,
        /// It ends, and its result is given again in place of the next one's.
        Repeats,
        Breaks,
        ComputesNoNumber,
        Panics,
    }

    /// A device whose steps end when the test says so, and that tells what it is asked to do.
    struct Device {
        told: mpsc::Sender<String>,
        fates: mpsc::Receiver<Fate>,
        next: Option<Fate>,
        begun: VecDeque<StepId>,
        /// It does not take this.
        refuses: StepId,
    }

    impl Device {
        fn tell(&self, what: String) {
            // The test may have seen enough.
            let _ = self.told.send(what);
        }
    }

    impl Engine for Device {
        fn describe(&self) -> &EngineDescription {
            unreachable!("nobody asks")
        }

        fn overlap(&mut self) -> Option<&mut dyn Overlap> {
            Some(self)
        }

        fn step(&mut self, _: &StepPlan) -> Result<StepResult, EngineError> {
            unreachable!("steps are begun and collected")
        }

        fn read_block(&self, _: BlockIndex, _: usize, _: &mut [u8]) -> Result<(), EngineError> {
            self.tell("read".into());
            Ok(())
        }

        fn write_block(&mut self, _: BlockIndex, _: usize, _: &[u8]) -> Result<(), EngineError> {
            unreachable!("nothing comes")
        }

        fn copy_blocks(&mut self, _: &[(BlockIndex, BlockIndex)]) -> Result<(), EngineError> {
            unreachable!("nothing is copied")
        }
    }

    impl Overlap for Device {
        fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
            self.tell(format!("begin {}", plan.step));
            if plan.step == self.refuses {
                return Err(EngineError::Plan("not this one".into()));
            }
            self.begun.push_back(plan.step);
            Ok(())
        }

        fn is_done(&mut self) -> bool {
            self.next = self.next.or_else(|| self.fates.try_recv().ok());
            self.next.is_some()
        }

        fn collect(&mut self) -> Result<StepResult, EngineError> {
            let step = self.begun.pop_front().expect("a step was begun");
            let fate = self.next.take().or_else(|| self.fates.recv().ok());
            match fate.expect("the test says how it ends") {
                Fate::Ends => Ok(StepResult {
                    step,
                    ..StepResult::default()
                }),
                Fate::Repeats => {
                    self.begun.push_front(step);
                    Ok(StepResult {
                        step,
                        ..StepResult::default()
                    })
                }
                Fate::Breaks => Err(EngineError::Device("on fire".into())),
                Fate::ComputesNoNumber => Err(EngineError::NotFinite(SlotIndex(0))),
                Fate::Panics => panic!("a kernel that is not there"),
            }
        }
    }

    /// The test's side of a host with such a device.
    struct Stage {
        host: EngineHost,
        pulse: Arc<Pulse>,
        told: mpsc::Receiver<String>,
        fates: mpsc::Sender<Fate>,
        answers: facts::UnboundedReceiver<Input>,
    }

    const LIMITS: EngineLimits = EngineLimits {
        block_bytes: 8,
        write_bytes_max: u64::MAX,
        swap_bytes_max: u64::MAX,
        time: StepTime::Measured,
    };

    impl Stage {
        /// With a device that does not take step `refuses`.
        fn new(refuses: u64) -> Self {
            let (tell, told) = mpsc::channel();
            let (fates, decided) = mpsc::channel();
            let device = Device {
                told: tell,
                fates: decided,
                next: None,
                begun: VecDeque::new(),
                refuses: StepId(refuses),
            };
            let (tell, answers) = facts::unbounded_channel();
            let pulse = Arc::new(Pulse::new(Duration::from_secs(60)));
            let watched = Arc::clone(&pulse);
            let device: Box<dyn Engine> = Box::new(device);
            let host = EngineHost::start((device, None), None, (LIMITS, watched), tell).unwrap();
            Self {
                host,
                pulse,
                told,
                fates,
                answers,
            }
        }

        fn begin(&self, number: u64) {
            self.host.push(step(number));
            assert_eq!(
                self.told.recv().unwrap(),
                format!("begin {}", StepId(number))
            );
        }

        async fn answer(&mut self) -> String {
            match self.answers.recv().await.unwrap() {
                Input::Stepped { result, .. } => format!("stepped {}", result.step),
                Input::StepFailed { step, slot, reason } => match slot {
                    Some(slot) => format!("failed {step} for {slot}: {reason}"),
                    None => format!("failed {step}: {reason}"),
                },
                Input::EngineLost { .. } => "lost".into(),
                Input::SwappedOut { .. } => "swapped".into(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn step(number: u64) -> Work {
        Work::Step(StepPlan {
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
    async fn the_device_waited_for_the_host_between_two_steps() {
        let mut stage = Stage::new(0);
        stage.begin(1);
        stage.begin(2);
        for number in 1..9 {
            stage.fates.send(Fate::Ends).unwrap();
            assert_eq!(stage.answer().await, format!("stepped {}", StepId(number)));
            // The next one runs, and the one behind it is begun before that is over.
            stage.begin(number + 2);
        }
    }

    #[tokio::test]
    async fn blocks_are_copied_while_steps_are_under_way() {
        let mut stage = Stage::new(0);
        stage.begin(1);
        stage.begin(2);
        let swap = Swap::new(handoff(), vec![BlockIndex(0)], Way::Out);
        stage.host.push(Work::Swap(swap));
        assert_eq!(stage.answer().await, "swapped");
        stage.fates.send(Fate::Ends).unwrap();
        stage.fates.send(Fate::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        assert_eq!(stage.answer().await, "stepped s2");
    }

    #[tokio::test]
    async fn a_step_that_was_refused_is_answered_in_its_turn() {
        let mut stage = Stage::new(2);
        stage.begin(1);
        stage.begin(2);
        stage.fates.send(Fate::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        let refused = "failed s2: impossible step: not this one";
        assert_eq!(stage.answer().await, refused);
        stage.begin(2);
        assert_eq!(stage.answer().await, refused);
    }

    #[tokio::test]
    async fn a_broken_step_or_a_panic_leaves_none_unanswered() {
        let mut stage = Stage::new(0);
        stage.begin(1);
        stage.begin(2);
        stage.fates.send(Fate::Breaks).unwrap();
        assert_eq!(stage.answer().await, "failed s1: device failed: on fire");
        stage.begin(3);
        stage.fates.send(Fate::Panics).unwrap();
        let panic = "the engine panicked: a kernel that is not there";
        assert_eq!(stage.answer().await, format!("failed s2: {panic}"));
        assert_eq!(stage.answer().await, "lost");
        stage.fates.send(Fate::Panics).unwrap();
        assert_eq!(stage.answer().await, format!("failed s3: {panic}"));
    }

    #[tokio::test]
    async fn a_device_that_failed_every_step_kept_its_streams() {
        let mut stage = Stage::new(0);
        let fates = [
            vec![Fate::Breaks; 7],
            // What a model computes is not the device's failure, and what it did once it can do.
            vec![Fate::ComputesNoNumber; 9],
            vec![Fate::Ends],
            vec![Fate::Breaks; 7],
        ];
        let mut number = 0;
        for fate in fates.concat() {
            number += 1;
            stage.begin(number);
            stage.fates.send(fate).unwrap();
            let answer = stage.answer().await;
            assert!(answer.contains(&StepId(number).to_string()), "{answer}");
            let named = answer.contains(&format!("for {}", SlotIndex(0)));
            assert_eq!(named, fate == Fate::ComputesNoNumber, "{answer}");
            assert_eq!(stage.pulse.check(), Ok(()), "{number}");
        }
        stage.begin(number + 1);
        stage.fates.send(Fate::Breaks).unwrap();
        let failed = format!("failed {}: device failed: on fire", StepId(number + 1));
        assert_eq!(stage.answer().await, failed);
        assert_eq!(stage.answer().await, "lost");
        assert!(stage.pulse.check().is_err());
    }

    /// The brain would have waited for the other one for ever.
    #[tokio::test]
    async fn the_result_of_another_step_left_one_unanswered() {
        let mut stage = Stage::new(0);
        stage.begin(1);
        stage.begin(2);
        stage.fates.send(Fate::Repeats).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        stage.fates.send(Fate::Ends).unwrap();
        let other = "failed s2: the engine gave the result of s1 in place of s2";
        assert_eq!(stage.answer().await, other);
    }

    #[tokio::test]
    async fn a_host_that_is_let_go_waits_for_what_it_began() {
        let mut stage = Stage::new(0);
        stage.begin(1);
        stage.begin(2);
        drop(stage.host);
        stage.fates.send(Fate::Ends).unwrap();
        stage.fates.send(Fate::Ends).unwrap();
        for number in 1..3 {
            let answer = stage.answers.recv().await.unwrap();
            assert!(matches!(answer, Input::Stepped { result, .. } if result.step.0 == number));
        }
        assert_eq!(stage.answers.recv().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn lesson_12_each_of_two_steps_has_its_own_time() {
        let mut stage = Stage::new(0);
        let pulse = Arc::clone(&stage.pulse);
        let pass = |seconds| tokio::time::advance(Duration::from_secs(seconds));
        stage.begin(1);
        stage.begin(2);
        pass(59).await;
        stage.fates.send(Fate::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s1");
        pass(59).await;
        assert_eq!(pulse.check(), Ok(()));
        pass(2).await;
        assert!(pulse.check().is_err());
        stage.fates.send(Fate::Ends).unwrap();
        assert_eq!(stage.answer().await, "stepped s2");
        assert_eq!(pulse.check(), Ok(()));
    }
}
