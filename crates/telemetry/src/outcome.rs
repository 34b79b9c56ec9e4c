//! Outcomes of requests and of hand-offs, by the names that labels, spans and the dashboard show.

use cleave_domain::{Failure, Refusal, RequestStageTimes, SloMetric};

/// The verdict on one request.
#[derive(Clone, Debug)]
pub struct RequestVerdict {
    pub class: String,
    pub verdict: &'static str,
    pub reason: &'static str,
    pub timing: RequestStageTimes,
    pub output_tokens: u32,
}

/// The outcome of a hand-off that did not land. A cancelled or superseded one has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoffLoss {
    /// A worker refused its leg.
    Refused,
    Failed,
    /// A worker or its link went away, or did not answer.
    Lost,
}

impl HandoffLoss {
    pub const ALL: [Self; 3] = [Self::Refused, Self::Failed, Self::Lost];

    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Lost => "lost",
        }
    }

    /// The loss that a failure means; `None` for one that the flight's own router, client or
    /// request made.
    pub fn by(failure: &Failure) -> Option<Self> {
        match failure {
            Failure::Rejected => Some(Self::Refused),
            Failure::WorkerLost | Failure::LinkLost | Failure::LeaseExpired => Some(Self::Lost),
            Failure::WorkerStuck | Failure::Corrupt | Failure::Engine(_) | Failure::OutOfBlocks => {
                Some(Self::Failed)
            }
            Failure::RetriesSpent(last) => Self::by(last),
            // Its own router, client or constraint ended it.
            Failure::Draining | Failure::SlowReader | Failure::Constraint(_) => None,
        }
    }
}

/// The name of a refusal, as metrics and spans show it.
pub fn refusal_name(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::QueueFull { .. } => "queue_full",
        Refusal::NoBlocks { .. } => "no_blocks",
        Refusal::TooLong { .. } => "too_long",
        Refusal::OutOfVocabulary { .. } => "out_of_vocabulary",
        Refusal::NoWorker => "no_worker",
        Refusal::Draining => "draining",
        Refusal::WrongWorker => "wrong_worker",
        Refusal::NoAdapter { .. } => "no_adapter",
        Refusal::Late { aim, .. } => match aim {
            SloMetric::Ttft => "slo_ttft_unreachable",
            SloMetric::Tpot => "slo_tpot_unreachable",
            SloMetric::EndToEnd => "slo_e2e_unreachable",
        },
    }
}

/// The name of a failure, as metrics and spans show it.
pub fn failure_name(failure: &Failure) -> &'static str {
    match failure {
        Failure::WorkerLost => "worker_lost",
        Failure::WorkerStuck => "worker_stuck",
        Failure::SlowReader => "slow_reader",
        Failure::LinkLost => "link_lost",
        Failure::LeaseExpired => "lease_expired",
        Failure::Corrupt => "corrupt",
        Failure::Rejected => "rejected",
        Failure::Engine(_) => "engine",
        Failure::OutOfBlocks => "out_of_blocks",
        Failure::Draining => "draining",
        Failure::RetriesSpent(last) => failure_name(last),
        Failure::Constraint(_) => "constraint",
    }
}
