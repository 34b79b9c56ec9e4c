//! The scaling data that routers send each other, on the wire.
//!
//! Owns: these conversions. Never adds anything up. Invariant: a message has no more classes than a
//! policy may have.

use super::{FleetWireError, proto, required, within};
use cleave_domain::{
    FleetDemand, FleetTarget, PoolCounts, RequestFlow, Role, RouterId, ScalingGossip,
    ScalingReason, ScalingReasons, SloOutcomes,
};

/// More than any policy has.
const CLASSES_MAX: u64 = 1024;
/// The order of the pools on the wire.
const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

impl From<ScalingGossip> for proto::Voice {
    fn from(gossip: ScalingGossip) -> Self {
        let ScalingGossip {
            router: RouterId(router),
            number,
            demand,
            wanted,
        } = gossip;
        Self {
            router,
            number,
            demand: Some(demand.into()),
            wanted: Some(wanted.into()),
        }
    }
}

impl TryFrom<proto::Voice> for ScalingGossip {
    type Error = FleetWireError;

    fn try_from(gossip: proto::Voice) -> Result<Self, FleetWireError> {
        let proto::Voice {
            router,
            number,
            demand,
            wanted,
        } = gossip;
        Ok(Self {
            router: RouterId(router),
            number,
            demand: required(demand, "voice.demand")?.try_into()?,
            wanted: required(wanted, "voice.wanted")?.try_into()?,
        })
    }
}

impl From<FleetDemand> for proto::Demand {
    fn from(demand: FleetDemand) -> Self {
        let FleetDemand {
            slow,
            quick,
            classes,
            waiting,
            waiting_tokens,
            open,
        } = demand;
        Self {
            slow: Some(slow.into()),
            quick: Some(quick.into()),
            classes: classes.into_iter().map(Into::into).collect(),
            waiting,
            waiting_tokens,
            open,
        }
    }
}

impl TryFrom<proto::Demand> for FleetDemand {
    type Error = FleetWireError;

    fn try_from(demand: proto::Demand) -> Result<Self, FleetWireError> {
        let proto::Demand {
            slow,
            quick,
            classes,
            waiting,
            waiting_tokens,
            open,
        } = demand;
        let count = classes.len() as u64;
        within("demand.classes", count, 0..=CLASSES_MAX)?;
        Ok(Self {
            slow: required(slow, "demand.slow")?.into(),
            quick: required(quick, "demand.quick")?.into(),
            classes: classes.into_iter().map(Into::into).collect(),
            waiting,
            waiting_tokens,
            open,
        })
    }
}

impl From<RequestFlow> for proto::Flow {
    fn from(flow: RequestFlow) -> Self {
        let RequestFlow {
            arrivals,
            prompt_tokens,
            pairs,
            placed,
            cached_tokens,
            answers,
            output_tokens,
        } = flow;
        Self {
            arrivals,
            prompt_tokens,
            pairs,
            placed,
            cached_tokens,
            answers,
            output_tokens,
        }
    }
}

impl From<proto::Flow> for RequestFlow {
    fn from(flow: proto::Flow) -> Self {
        let proto::Flow {
            arrivals,
            prompt_tokens,
            pairs,
            placed,
            cached_tokens,
            answers,
            output_tokens,
        } = flow;
        Self {
            arrivals,
            prompt_tokens,
            pairs,
            placed,
            cached_tokens,
            answers,
            output_tokens,
        }
    }
}

impl From<SloOutcomes> for proto::Kept {
    fn from(outcomes: SloOutcomes) -> Self {
        let SloOutcomes {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        } = outcomes;
        Self {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        }
    }
}

impl From<proto::Kept> for SloOutcomes {
    fn from(outcomes: proto::Kept) -> Self {
        let proto::Kept {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        } = outcomes;
        Self {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        }
    }
}

impl From<FleetTarget> for proto::Wanted {
    fn from(target: FleetTarget) -> Self {
        let FleetTarget {
            workers,
            legs,
            reasons,
        } = target;
        let place = |role| {
            let all = ScalingReason::ALL.iter();
            let place = all.take_while(|reason| **reason != reasons.for_role(role));
            place.count() as u32
        };
        Self {
            workers: Some(workers.into()),
            legs: Some(legs.into()),
            reasons: POOLS.into_iter().map(place).collect(),
        }
    }
}

impl TryFrom<proto::Wanted> for FleetTarget {
    type Error = FleetWireError;

    fn try_from(target: proto::Wanted) -> Result<Self, FleetWireError> {
        let proto::Wanted {
            workers,
            legs,
            reasons: places,
        } = target;
        let pools = POOLS.len() as u64;
        within("wanted.reasons", places.len() as u64, pools..=pools)?;
        let mut reasons = ScalingReasons::default();
        for (role, place) in POOLS.into_iter().zip(places) {
            let last = ScalingReason::ALL.len() as u64 - 1;
            within("wanted.reasons", place.into(), 0..=last)?;
            *reasons.for_role_mut(role) = ScalingReason::ALL[place as usize];
        }
        Ok(Self {
            workers: required(workers, "wanted.workers")?.into(),
            legs: required(legs, "wanted.legs")?.into(),
            reasons,
        })
    }
}

impl From<PoolCounts> for proto::PoolCounts {
    fn from(counts: PoolCounts) -> Self {
        let PoolCounts {
            prefill,
            decode,
            both,
        } = counts;
        Self {
            prefill,
            decode,
            both,
        }
    }
}

impl From<proto::PoolCounts> for PoolCounts {
    fn from(counts: proto::PoolCounts) -> Self {
        let proto::PoolCounts {
            prefill,
            decode,
            both,
        } = counts;
        Self {
            prefill,
            decode,
            both,
        }
    }
}
