//! How far one flight has come, and the outcome of its hand-offs.
//!
//! Owns: the stage that the dashboard counts it at. Never decides: it follows the brain's notes and
//! the workers' reports. Invariant: a hand-off has one outcome, landed or lost, and none if it was
//! cancelled or superseded.

use cleave_api::FlightStageCounts;
use cleave_domain::{Ending, HandoffId, Report};
use cleave_router::RouterNote;
use cleave_telemetry::HandoffLoss;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FlightStage {
    #[default]
    Queued,
    Reserved,
    Prefill,
    Transfer,
    Decode,
}

#[derive(Debug, Default)]
pub(super) struct FlightProgress {
    stage: FlightStage,
    /// The attempt whose hand-off is tracked.
    attempt: u32,
    /// Whether its legs are on two workers.
    is_split: bool,
    /// A running sequence is on its way to another worker.
    moving: bool,
    /// Leading blocks that the receiver had already.
    blocks_present: u32,
}

/// The progress of a hand-off that a worker's report means.
#[derive(Clone, Copy, Debug)]
pub(super) enum HandoffProgress {
    Reserved {
        blocks_present: u32,
    },
    /// One worker runs both legs: no block is to land.
    Running,
    Prefilled,
    Landed,
}

impl HandoffProgress {
    /// The hand-off of a report, and its progress, if the report means any.
    pub(super) fn of(report: &Report) -> Option<(HandoffId, Self)> {
        match report {
            Report::Reserved {
                handoff, present, ..
            } => {
                let blocks_present = *present;
                Some((*handoff, Self::Reserved { blocks_present }))
            }
            Report::Running { handoff, .. } => Some((*handoff, Self::Running)),
            Report::Prefilled { handoff, .. } => Some((*handoff, Self::Prefilled)),
            Report::Landed { handoff } => Some((*handoff, Self::Landed)),
            _ => None,
        }
    }
}

impl FlightProgress {
    /// Handles a note about the flight. Gives the outcome of a hand-off that this ends without a
    /// landing.
    pub(super) fn handle_note(&mut self, note: &RouterNote) -> Option<HandoffLoss> {
        let was_handing_over = self.is_handing_over();
        let loss = match note {
            RouterNote::Placed {
                handoff,
                prefill,
                decode,
                ..
            } => {
                *self = Self {
                    stage: FlightStage::Reserved,
                    attempt: handoff.attempt,
                    is_split: prefill != decode,
                    moving: false,
                    blocks_present: 0,
                };
                None
            }
            RouterNote::Moving { handoff, .. } => {
                (self.moving, self.attempt, self.blocks_present) = (true, handoff.attempt, 0);
                None
            }
            RouterNote::Moved { .. } => {
                self.moving = false;
                None
            }
            RouterNote::MigrationAborted { failure, .. } => {
                self.moving = false;
                HandoffLoss::by(failure)
            }
            RouterNote::Retried { failure, .. } => {
                (self.stage, self.moving) = (FlightStage::Queued, false);
                HandoffLoss::by(failure)
            }
            RouterNote::PassedOver { refusal, .. } => {
                self.handoff_ended();
                Some(match refusal {
                    Some(_) => HandoffLoss::Refused,
                    None => HandoffLoss::Lost,
                })
            }
            _ => None,
        };
        loss.filter(|_| was_handing_over)
    }

    /// Ends the hand-off under way. A sequence that was to migrate stays where it is.
    fn handoff_ended(&mut self) {
        if self.moving {
            self.moving = false
        } else {
            self.stage = FlightStage::Queued
        }
    }

    /// Advances the flight by a report on this attempt; one on an attempt that is over changes
    /// nothing. If blocks of another worker have landed, gives how many leading ones the receiver
    /// had already.
    pub(super) fn advance(&mut self, attempt: u32, progress: HandoffProgress) -> Option<u32> {
        if attempt != self.attempt {
            return None;
        }
        let was_handing_over = self.is_handing_over();
        match progress {
            HandoffProgress::Reserved { blocks_present } => {
                self.blocks_present = blocks_present;
                if !self.moving {
                    self.stage = FlightStage::Prefill;
                }
                None
            }
            HandoffProgress::Running => {
                self.stage = FlightStage::Prefill;
                None
            }
            HandoffProgress::Prefilled => {
                if !self.moving {
                    self.stage = if self.is_split {
                        FlightStage::Transfer
                    } else {
                        FlightStage::Decode
                    };
                }
                None
            }
            HandoffProgress::Landed => {
                (self.stage, self.moving) = (FlightStage::Decode, false);
                was_handing_over.then_some(self.blocks_present)
            }
        }
    }

    /// The outcome of a hand-off that is under way when the flight ends.
    pub(super) fn loss_at_end(&self, ending: &Ending) -> Option<HandoffLoss> {
        match ending {
            Ending::Failed(failure) if self.is_handing_over() => HandoffLoss::by(failure),
            _ => None,
        }
    }

    /// Whether blocks of one worker are to land at another.
    fn is_handing_over(&self) -> bool {
        let is_before_landing = matches!(
            self.stage,
            FlightStage::Reserved | FlightStage::Prefill | FlightStage::Transfer
        );
        self.moving || (self.is_split && is_before_landing)
    }

    /// Counts the flight at its stage.
    pub(super) fn count_into(&self, counts: &mut FlightStageCounts) {
        let count = match self.stage {
            FlightStage::Queued => &mut counts.queued,
            FlightStage::Reserved => &mut counts.reserved,
            FlightStage::Prefill => &mut counts.prefill,
            FlightStage::Transfer => &mut counts.transfer,
            FlightStage::Decode => &mut counts.decode,
        };
        *count += 1;
        counts.moving += u32::from(self.moving);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Failure, FlightId, Refusal, WorkerId, WorkerRef};
    use cleave_router::MoveReason;
    use std::time::Duration;

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

    #[test]
    fn every_failed_hand_off_has_one_outcome() {
        let mut lost = Vec::new();
        let mut flight = FlightProgress::default();
        let placed = |number: u32, prefill| RouterNote::Placed {
            handoff: attempt(number),
            prefill: worker(prefill),
            decode: worker(2),
            cached_tokens: 0,
            waited: Duration::ZERO,
        };
        let passed_over = |number, refusal| RouterNote::PassedOver {
            handoff: attempt(number),
            worker: worker(2),
            refusal,
        };
        let retried = |number, failure| RouterNote::Retried {
            handoff: attempt(number),
            failure,
            generated_tokens: 0,
        };
        assert_eq!(flight.handle_note(&placed(0, 1)), None);
        lost.push(flight.handle_note(&passed_over(0, Some(Refusal::Draining))));
        // The same attempt has no second end.
        assert_eq!(flight.handle_note(&retried(0, Failure::Corrupt)), None);
        assert_eq!(flight.handle_note(&placed(1, 1)), None);
        lost.push(flight.handle_note(&passed_over(1, None)));
        assert_eq!(flight.handle_note(&placed(2, 1)), None);
        lost.push(flight.handle_note(&retried(2, Failure::Corrupt)));
        assert_eq!(flight.handle_note(&placed(3, 1)), None);
        lost.push(flight.handle_note(&retried(3, Failure::LinkLost)));
        // Both legs of one worker are no hand-off.
        assert_eq!(flight.handle_note(&placed(4, 2)), None);
        assert_eq!(flight.handle_note(&retried(4, Failure::WorkerLost)), None);
        assert_eq!(flight.handle_note(&placed(5, 1)), None);
        assert!(flight.advance(5, HandoffProgress::Landed).is_some());
        let again = flight.advance(5, HandoffProgress::Landed);
        assert_eq!(again, None, "landed once");
        let moving = RouterNote::Moving {
            handoff: attempt(6),
            from: worker(2),
            to: worker(3),
            why: MoveReason::Drain,
        };
        assert_eq!(flight.handle_note(&moving), None);
        assert_eq!(
            flight.handle_note(&passed_over(6, Some(Refusal::Draining))),
            Some(HandoffLoss::Refused)
        );
        let aborted = RouterNote::MigrationAborted {
            handoff: attempt(6),
            failure: Failure::Rejected,
        };
        let loss = flight.handle_note(&aborted);
        assert_eq!(loss, None, "it was counted as refused");
        // A failure after the landing is not the hand-off's.
        assert_eq!(flight.handle_note(&retried(5, Failure::WorkerLost)), None);
        assert_eq!(flight.handle_note(&placed(7, 1)), None);
        let spent = Ending::Failed(Failure::RetriesSpent(Box::new(Failure::WorkerLost)));
        lost.push(flight.loss_at_end(&spent));
        assert_eq!(flight.loss_at_end(&Ending::Cancelled), None);
        use HandoffLoss::{Failed, Lost, Refused};
        assert_eq!(lost, [Refused, Lost, Failed, Lost, Lost].map(Some));
    }
}
