//! The autoscaler, a state machine inside the router's brain: how many workers meet a fleet's
//! targets.
//!
//! - *Facts*: [`Scaler::handle`] takes one, with the time.
//! - *Commands*: [`Scaler::poll`] gives one at a time; drain it before the next fact.
//! - *Wake-ups*: [`Scaler::deadline`] says when to hand in [`ScalerInput::FleetChanged`] with the
//!   fleet as it is.
//! - *Checks*: [`Scaler::check`] asserts every invariant.
//!
//! Each router has one. Routers send each other their demand, over the workers that they share, and
//! add it up; the one with the smallest id decides, and the others repeat its answer, so that every
//! router answers the same. A router that shares no worker goes by its own demand.
//!
//! From demand to answer: `need` (workers of each leg, by prices), `steady` (grow fast, shrink
//! slowly), `fit` (bounds, devices, flips before starts, limits on reversals).
//!
//! Owns: these decisions. Never: starts or stops a worker; knows a flight.
//! Invariant: never more devices than the limit; never more reversals in an hour than the limit;
//! while a request waits and workers are allowed, some are wanted.

mod bounds;
mod demand;
mod need;
mod need_history;
mod scaler;
mod trends;
mod window;

pub use scaler::Scaler;

use cleave_domain::{
    Capacity, FleetTarget, Prices, Role, ScalingGossip, ScalingPolicy, SloMetric, SloPolicy,
    SloVerdict, WorkerId,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq)]
pub enum ScalerInput {
    /// New bounds and targets.
    Configured(ScalingPolicy, Arc<SloPolicy>),
    /// A request arrived, whatever its outcome.
    Arrived {
        class: String,
        /// Tokens of its prompt.
        prompt_tokens: u32,
    },
    /// A request was placed for the first time.
    Placed {
        /// Tokens of its prompt found in the cache.
        cached_tokens: u32,
    },
    Ended {
        class: String,
        outcome: PromiseOutcome,
        /// Tokens of its answer if it was completed; otherwise zero.
        output_tokens: u32,
    },
    /// Gossip of another router arrived.
    GossipReceived(Arc<ScalingGossip>),
    /// The present fleet; due at every deadline, and whenever a worker comes, goes or changes.
    FleetChanged(ScalerFleet),
}

/// A request's outcome for its targets, as far as something is learned from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromiseOutcome {
    /// It met its targets.
    Met,
    /// It was late or refused, because of the workers of that leg.
    Missed(Role),
    /// It failed, was retried, or its client left: such an outcome says nothing about the number of
    /// workers.
    NotCounted,
}

impl PromiseOutcome {
    /// From a verdict; `of` is the target that could not be met if it was refused for one. A
    /// request with a second attempt does not count.
    pub fn from_verdict(verdict: SloVerdict, plain: bool, of: Option<SloMetric>) -> Self {
        let leg = |aim| match aim {
            SloMetric::Ttft | SloMetric::EndToEnd => Role::Prefill,
            SloMetric::Tpot => Role::Decode,
        };
        match verdict {
            _ if !plain => Self::NotCounted,
            SloVerdict::Good => Self::Met,
            SloVerdict::Late { aim, stage } => Self::Missed(match aim {
                SloMetric::EndToEnd if stage >= cleave_domain::RequestStage::Transfer => {
                    Role::Decode
                }
                aim => leg(aim),
            }),
            SloVerdict::Refused => of.map_or(Self::NotCounted, |aim| Self::Missed(leg(aim))),
            SloVerdict::Failed | SloVerdict::Cancelled => Self::NotCounted,
        }
    }
}

/// The fleet as a router knows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalerFleet {
    /// Every worker connected to the router.
    pub members: Vec<ScalerMember>,
    /// Prices and capacity of a worker that runs prompts.
    pub prefill: Option<(Prices, Capacity)>,
    /// Prices and capacity of a worker that decodes.
    pub decode: Option<(Prices, Capacity)>,
    /// Tokens, prompt and output, of all streams that run or have reserved room.
    pub context_tokens: u64,
    /// Requests that wait for a place at this router, or for a worker's tokenizer.
    pub waiting: u32,
    pub waiting_tokens: u64,
    /// Requests of this router that have not ended.
    pub open: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalerMember {
    pub worker: WorkerId,
    pub role: Role,
    /// The role with which it was started.
    pub home_role: Role,
    /// It drains, or makes no progress: its capacity does not count.
    pub leaving: bool,
    /// Tokens of its running work.
    pub busy_tokens: u64,
}

/// Work for the body, to be performed in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum ScalerOutput {
    /// Send this to the other routers, over one or several workers.
    SendGossip(ScalingGossip),
    /// Change this worker's role.
    Flip { worker: WorkerId, role: Role },
    /// The wanted numbers of workers, from now on.
    Decided(ScalerDecision),
}

/// An answer, and the numbers behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScalerDecision {
    pub wanted: FleetTarget,
    /// Whether this router decided; otherwise it repeats the leader's answer.
    pub own: bool,
    /// The router has just started, a request waits, and no worker has joined: `wanted` may start
    /// workers of pools that have none, and stops none.
    pub first: bool,
    /// Requests per second, over all routers.
    pub rate: f64,
    /// Load of prompts in prefill workers, before rounding and stabilisation.
    pub prefill_load: f64,
    /// Load of streams in decode workers.
    pub decode_load: f64,
    /// Waiting requests, over all routers.
    pub waiting: u32,
    /// Workers that are wanted and have not joined yet.
    pub starting: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::RequestStage;

    #[test]
    fn a_missed_target_counts_for_its_leg_unless_retried() {
        let late =
            |aim, stage| PromiseOutcome::from_verdict(SloVerdict::Late { aim, stage }, true, None);
        let (prefill, decode) = (
            PromiseOutcome::Missed(Role::Prefill),
            PromiseOutcome::Missed(Role::Decode),
        );
        assert_eq!(late(SloMetric::Ttft, RequestStage::Transfer), prefill);
        assert_eq!(late(SloMetric::Tpot, RequestStage::Prefill), decode);
        // An answer that is late as a whole was late where most of its time went.
        let whole = |stage| late(SloMetric::EndToEnd, stage);
        assert_eq!(
            [
                whole(RequestStage::RouterQueue),
                whole(RequestStage::Prefill)
            ],
            [prefill; 2]
        );
        assert_eq!(
            [whole(RequestStage::Transfer), whole(RequestStage::Decode)],
            [decode; 2]
        );
        let refused = |of| PromiseOutcome::from_verdict(SloVerdict::Refused, true, of);
        assert_eq!(refused(Some(SloMetric::EndToEnd)), prefill);
        assert_eq!(
            [refused(Some(SloMetric::Tpot)), refused(None)],
            [decode, PromiseOutcome::NotCounted]
        );
        assert_eq!(
            PromiseOutcome::from_verdict(SloVerdict::Good, true, None),
            PromiseOutcome::Met
        );
        assert_eq!(
            PromiseOutcome::from_verdict(SloVerdict::Good, false, None),
            PromiseOutcome::NotCounted
        );
        assert_eq!(
            PromiseOutcome::from_verdict(SloVerdict::Failed, true, None),
            PromiseOutcome::NotCounted
        );
    }
}
