//! From a worker to a router.

use super::request::{pairs_in, pairs_out};
use super::{
    FleetWireError, blocks_in, blocks_out, hashes_in, hashes_out, nanos, proto, required, role_of,
};
use crate::connection::LinkState;
use cleave_domain::{
    Emission, Failure, FinishReason, HandoffId, PrefillBacklog, PromptFacts, Refusal, Report,
    SampledToken, SloMetric, StepProgress, TokenScores, WorkerLoad,
};
use std::sync::Arc;
use std::time::Duration;

impl From<Report> for proto::Report {
    fn from(report: Report) -> Self {
        use proto::report::Kind;
        let kind = match report {
            Report::Reserved {
                handoff,
                present,
                blocks,
            } => Kind::Reserved(proto::Reserved {
                handoff: Some(handoff.into()),
                present,
                blocks: blocks_out(blocks),
            }),
            Report::Refused { handoff, refusal } => Kind::Refused(proto::Refused {
                handoff: Some(handoff.into()),
                refusal: Some(refusal.into()),
            }),
            Report::Prefilled { handoff, timing } => Kind::Prefilled(proto::Prefilled {
                handoff: Some(handoff.into()),
                timing: Some(timing.into()),
            }),
            Report::Landed { handoff } => Kind::Landed(handoff.into()),
            Report::Finished {
                handoff,
                reason,
                output_tokens,
                timing,
                prefill,
            } => Kind::Finished(proto::Finished {
                handoff: Some(handoff.into()),
                reason: proto::FinishReason::from(reason).into(),
                output_tokens,
                timing: Some(timing.into()),
                prefill: prefill.map(Into::into),
            }),
            Report::LegFailed { handoff, failure } => Kind::LegFailed(proto::LegFailed {
                handoff: Some(handoff.into()),
                failure: Some(failure.into()),
            }),
            Report::Released { handoff } => Kind::Released(handoff.into()),
            Report::MigrationAborted { handoff, failure } => Kind::Stayed(proto::Stayed {
                handoff: Some(handoff.into()),
                failure: Some(failure.into()),
            }),
            Report::MemoryPressure { handoff } => Kind::Crowded(handoff.into()),
            Report::Load(load) => Kind::Load(load.into()),
            Report::Prices(prices) => Kind::Prices(prices.into()),
            Report::Serves { role } => Kind::Serves(proto::Role::from(role).into()),
            Report::Draining => Kind::Draining(proto::Draining {}),
            Report::Relayed(gossip) => Kind::PassedOn(Arc::unwrap_or_clone(gossip).into()),
            Report::Prefix { stored, evicted } => Kind::Prefix(proto::Prefix {
                stored: hashes_out(stored),
                evicted: hashes_out(evicted),
            }),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<proto::Report> for Report {
    type Error = FleetWireError;

    fn try_from(report: proto::Report) -> Result<Self, FleetWireError> {
        use proto::report::Kind;
        Ok(match required(report.kind, "report.kind")? {
            Kind::Reserved(proto::Reserved {
                handoff,
                present,
                blocks,
            }) => Self::Reserved {
                handoff: required(handoff, "reserved.handoff")?.into(),
                present,
                blocks: blocks_in(blocks),
            },
            Kind::Refused(proto::Refused { handoff, refusal }) => Self::Refused {
                handoff: required(handoff, "refused.handoff")?.into(),
                refusal: required(refusal, "refused.refusal")?.try_into()?,
            },
            Kind::Prefilled(proto::Prefilled { handoff, timing }) => Self::Prefilled {
                handoff: required(handoff, "prefilled.handoff")?.into(),
                timing: required(timing, "prefilled.timing")?.into(),
            },
            Kind::Landed(handoff) => Self::Landed {
                handoff: handoff.into(),
            },
            Kind::Finished(finished) => finished.try_into()?,
            Kind::LegFailed(proto::LegFailed { handoff, failure }) => Self::LegFailed {
                handoff: required(handoff, "leg_failed.handoff")?.into(),
                failure: required(failure, "leg_failed.failure")?.try_into()?,
            },
            Kind::Released(handoff) => Self::Released {
                handoff: handoff.into(),
            },
            Kind::Stayed(proto::Stayed { handoff, failure }) => Self::MigrationAborted {
                handoff: required(handoff, "stayed.handoff")?.into(),
                failure: required(failure, "stayed.failure")?.try_into()?,
            },
            Kind::Crowded(handoff) => Self::MemoryPressure {
                handoff: handoff.into(),
            },
            Kind::Load(load) => Self::Load(load.try_into()?),
            Kind::Prices(prices) => Self::Prices(prices.try_into()?),
            Kind::Serves(role) => Self::Serves {
                role: role_of(role, "report.serves")?.try_into()?,
            },
            Kind::Draining(proto::Draining {}) => Self::Draining,
            Kind::PassedOn(gossip) => Self::Relayed(Arc::new(gossip.try_into()?)),
            Kind::Prefix(proto::Prefix { stored, evicted }) => Self::Prefix {
                stored: hashes_in(stored, "prefix.stored")?,
                evicted: hashes_in(evicted, "prefix.evicted")?,
            },
        })
    }
}

impl TryFrom<proto::Finished> for Report {
    type Error = FleetWireError;

    fn try_from(finished: proto::Finished) -> Result<Self, FleetWireError> {
        let reason = finished.reason();
        let proto::Finished {
            handoff,
            reason: _,
            output_tokens,
            timing,
            prefill,
        } = finished;
        Ok(Self::Finished {
            handoff: required(handoff, "finished.handoff")?.into(),
            reason: reason.try_into()?,
            output_tokens,
            timing: required(timing, "finished.timing")?.into(),
            prefill: prefill.map(Into::into),
        })
    }
}

impl From<FinishReason> for proto::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
        }
    }
}

impl TryFrom<proto::FinishReason> for FinishReason {
    type Error = FleetWireError;

    fn try_from(reason: proto::FinishReason) -> Result<Self, FleetWireError> {
        match reason {
            proto::FinishReason::Stop => Ok(Self::Stop),
            proto::FinishReason::Length => Ok(Self::Length),
            proto::FinishReason::Unspecified => Err(FleetWireError::Unknown("finished.reason")),
        }
    }
}

impl From<WorkerLoad> for proto::Load {
    fn from(load: WorkerLoad) -> Self {
        let WorkerLoad {
            queue_tokens,
            sequences_waiting,
            sequences_running,
            blocks_free,
            progress,
            context_tokens,
            streams,
            backlog: PrefillBacklog { micros },
            tpot_least,
            step_left,
            orders_received,
        } = load;
        let progress = match progress {
            StepProgress::Moving => proto::Progress::Moving,
            StepProgress::Stuck => proto::Progress::Stuck,
        };
        Self {
            queue_tokens,
            sequences_waiting,
            sequences_running,
            blocks_free,
            progress: progress.into(),
            context_tokens,
            streams,
            backlog_micros: micros.concat(),
            tpot_least_nanos: tpot_least.map(nanos),
            step_left_nanos: nanos(step_left),
            orders_received,
        }
    }
}

impl TryFrom<proto::Load> for WorkerLoad {
    type Error = FleetWireError;

    fn try_from(load: proto::Load) -> Result<Self, FleetWireError> {
        let progress = match load.progress() {
            proto::Progress::Moving => StepProgress::Moving,
            proto::Progress::Stuck => StepProgress::Stuck,
            proto::Progress::Unspecified => return Err(FleetWireError::Unknown("load.progress")),
        };
        let proto::Load {
            queue_tokens,
            sequences_waiting,
            sequences_running,
            blocks_free,
            progress: _,
            context_tokens,
            streams,
            backlog_micros,
            tpot_least_nanos,
            step_left_nanos,
            orders_received,
        } = load;
        let bands = backlog_micros.as_chunks::<9>();
        let micros = match bands {
            ([first, second, third], []) => [*first, *second, *third],
            _ => {
                return Err(FleetWireError::List {
                    field: "load.backlog_micros",
                    problem: "does not have three times nine entries",
                });
            }
        };
        Ok(Self {
            queue_tokens,
            sequences_waiting,
            sequences_running,
            blocks_free,
            progress,
            context_tokens,
            streams,
            backlog: PrefillBacklog { micros },
            tpot_least: tpot_least_nanos.map(Duration::from_nanos),
            step_left: Duration::from_nanos(step_left_nanos),
            orders_received,
        })
    }
}

impl From<Refusal> for proto::Refusal {
    fn from(refusal: Refusal) -> Self {
        use proto::refusal::Kind;
        let kind = match refusal {
            Refusal::QueueFull { retry_after } => Kind::QueueFull(nanos(retry_after)),
            Refusal::NoBlocks { retry_after } => Kind::NoBlocks(nanos(retry_after)),
            Refusal::TooLong { tokens_max } => Kind::TooLong(tokens_max),
            Refusal::OutOfVocabulary { vocab_size } => Kind::OutOfVocabulary(vocab_size),
            Refusal::NoWorker => Kind::NoWorker(proto::Nothing {}),
            Refusal::Draining => Kind::Draining(proto::Nothing {}),
            Refusal::WrongWorker => Kind::WrongWorker(proto::Nothing {}),
            Refusal::Late {
                aim,
                predicted,
                retry_after,
            } => Kind::Late(proto::Late {
                aim: proto::Aim::from(aim).into(),
                predicted_nanos: nanos(predicted),
                retry_after_nanos: nanos(retry_after),
            }),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<proto::Refusal> for Refusal {
    type Error = FleetWireError;

    fn try_from(refusal: proto::Refusal) -> Result<Self, FleetWireError> {
        use proto::refusal::Kind;
        Ok(match required(refusal.kind, "refusal.kind")? {
            Kind::QueueFull(nanos) => Self::QueueFull {
                retry_after: Duration::from_nanos(nanos),
            },
            Kind::NoBlocks(nanos) => Self::NoBlocks {
                retry_after: Duration::from_nanos(nanos),
            },
            Kind::TooLong(tokens_max) => Self::TooLong { tokens_max },
            Kind::NoWorker(proto::Nothing {}) => Self::NoWorker,
            Kind::Draining(proto::Nothing {}) => Self::Draining,
            Kind::WrongWorker(proto::Nothing {}) => Self::WrongWorker,
            Kind::OutOfVocabulary(vocab_size) => Self::OutOfVocabulary { vocab_size },
            Kind::Late(late) => {
                let aim = late.aim().try_into()?;
                let proto::Late {
                    aim: _,
                    predicted_nanos,
                    retry_after_nanos,
                } = late;
                Self::Late {
                    aim,
                    predicted: Duration::from_nanos(predicted_nanos),
                    retry_after: Duration::from_nanos(retry_after_nanos),
                }
            }
        })
    }
}

impl From<SloMetric> for proto::Aim {
    fn from(aim: SloMetric) -> Self {
        match aim {
            SloMetric::Ttft => Self::Ttft,
            SloMetric::Tpot => Self::Tpot,
            SloMetric::EndToEnd => Self::EndToEnd,
        }
    }
}

impl TryFrom<proto::Aim> for SloMetric {
    type Error = FleetWireError;

    fn try_from(aim: proto::Aim) -> Result<Self, FleetWireError> {
        match aim {
            proto::Aim::Ttft => Ok(Self::Ttft),
            proto::Aim::Tpot => Ok(Self::Tpot),
            proto::Aim::EndToEnd => Ok(Self::EndToEnd),
            proto::Aim::Unspecified => Err(FleetWireError::Unknown("late.aim")),
        }
    }
}

impl From<Failure> for proto::Failure {
    fn from(failure: Failure) -> Self {
        use proto::failure::Kind;
        let kind = match failure {
            Failure::WorkerLost => Kind::WorkerLost(proto::Nothing {}),
            Failure::WorkerStuck => Kind::WorkerStuck(proto::Nothing {}),
            Failure::SlowReader => Kind::SlowReader(proto::Nothing {}),
            Failure::LinkLost => Kind::LinkLost(proto::Nothing {}),
            Failure::LeaseExpired => Kind::LeaseExpired(proto::Nothing {}),
            Failure::Corrupt => Kind::Corrupt(proto::Nothing {}),
            Failure::Rejected => Kind::Rejected(proto::Nothing {}),
            Failure::Engine(reason) => Kind::Engine(reason),
            Failure::OutOfBlocks => Kind::OutOfBlocks(proto::Nothing {}),
            Failure::Draining => Kind::Draining(proto::Nothing {}),
            Failure::RetriesSpent(last) => Kind::RetriesSpent(Box::new((*last).into())),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<proto::Failure> for Failure {
    type Error = FleetWireError;

    /// Nests as deep as the decoder allowed (a hundred).
    fn try_from(failure: proto::Failure) -> Result<Self, FleetWireError> {
        use proto::failure::Kind;
        Ok(match required(failure.kind, "failure.kind")? {
            Kind::WorkerLost(proto::Nothing {}) => Self::WorkerLost,
            Kind::WorkerStuck(proto::Nothing {}) => Self::WorkerStuck,
            Kind::SlowReader(proto::Nothing {}) => Self::SlowReader,
            Kind::LinkLost(proto::Nothing {}) => Self::LinkLost,
            Kind::LeaseExpired(proto::Nothing {}) => Self::LeaseExpired,
            Kind::Corrupt(proto::Nothing {}) => Self::Corrupt,
            Kind::Rejected(proto::Nothing {}) => Self::Rejected,
            Kind::Engine(reason) => Self::Engine(reason),
            Kind::OutOfBlocks(proto::Nothing {}) => Self::OutOfBlocks,
            Kind::Draining(proto::Nothing {}) => Self::Draining,
            Kind::RetriesSpent(last) => Self::RetriesSpent(Box::new((*last).try_into()?)),
        })
    }
}

impl From<LinkState> for proto::LinkState {
    fn from(link: LinkState) -> Self {
        let LinkState {
            peer,
            transport,
            bytes_per_second,
            latency,
        } = link;
        Self {
            peer: Some(peer.into()),
            transport,
            bytes_per_second,
            latency_nanos: nanos(latency),
        }
    }
}

impl TryFrom<proto::LinkState> for LinkState {
    type Error = FleetWireError;

    fn try_from(link: proto::LinkState) -> Result<Self, FleetWireError> {
        let proto::LinkState {
            peer,
            transport,
            bytes_per_second,
            latency_nanos,
        } = link;
        Ok(Self {
            peer: required(peer, "link.peer")?.into(),
            transport,
            bytes_per_second,
            latency: Duration::from_nanos(latency_nanos),
        })
    }
}

impl From<(HandoffId, Emission)> for proto::Tokens {
    fn from(emitted: (HandoffId, Emission)) -> Self {
        let (handoff, emission) = emitted;
        let Emission {
            index,
            sampled,
            prompt,
        } = emission;
        Self {
            handoff: Some(handoff.into()),
            index,
            sampled: Some(sampled.into()),
            prompt: prompt.map(
                |PromptFacts {
                     cached_tokens,
                     scores,
                     timing,
                 }| proto::PromptFacts {
                    cached_tokens,
                    scores: scores.into_iter().map(Into::into).collect(),
                    timing: Some(timing.into()),
                },
            ),
        }
    }
}

impl TryFrom<proto::Tokens> for (HandoffId, Emission) {
    type Error = FleetWireError;

    fn try_from(tokens: proto::Tokens) -> Result<Self, FleetWireError> {
        let proto::Tokens {
            handoff,
            index,
            sampled,
            prompt,
        } = tokens;
        let facts = |proto::PromptFacts {
                         cached_tokens,
                         scores,
                         timing,
                     }| {
            Ok::<_, FleetWireError>(PromptFacts {
                cached_tokens,
                scores: scores.into_iter().map(Into::into).collect(),
                timing: required(timing, "prompt.timing")?.into(),
            })
        };
        let emission = Emission {
            index,
            sampled: required(sampled, "tokens.sampled")?.into(),
            prompt: prompt.map(facts).transpose()?,
        };
        Ok((required(handoff, "tokens.handoff")?.into(), emission))
    }
}

impl From<SampledToken> for proto::Sampled {
    fn from(sampled: SampledToken) -> Self {
        let SampledToken { token, scores } = sampled;
        let scores = scores.map(
            |TokenScores {
                 normalizer,
                 chosen,
                 top,
             }| proto::Scores {
                normalizer,
                chosen,
                top: pairs_out(top),
            },
        );
        Self { token, scores }
    }
}

impl From<proto::Sampled> for SampledToken {
    fn from(sampled: proto::Sampled) -> Self {
        let proto::Sampled { token, scores } = sampled;
        let scores = scores.map(
            |proto::Scores {
                 normalizer,
                 chosen,
                 top,
             }| TokenScores {
                normalizer,
                chosen,
                top: pairs_in(top),
            },
        );
        Self { token, scores }
    }
}
