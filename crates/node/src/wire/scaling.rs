//! What routers tell each other about scaling, on the wire.
//!
//! Owns: these conversions. Never: sums anything up. Invariant: a voice has no more classes than a policy.

use super::{WireError, proto, required, within};
use cleave_domain::{
    Demand, Flow, Kept, PoolCounts, Reasons, Role, RouterId, ScalingReason, Voice, Wanted,
};

/// More than any policy has.
const CLASSES_MAX: u64 = 1024;
/// In this order on the wire.
const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

impl From<Voice> for proto::Voice {
    fn from(voice: Voice) -> Self {
        let Voice {
            router: RouterId(router),
            number,
            demand,
            wanted,
        } = voice;
        Self {
            router,
            number,
            demand: Some(demand.into()),
            wanted: Some(wanted.into()),
        }
    }
}

impl TryFrom<proto::Voice> for Voice {
    type Error = WireError;

    fn try_from(voice: proto::Voice) -> Result<Self, WireError> {
        let proto::Voice {
            router,
            number,
            demand,
            wanted,
        } = voice;
        Ok(Self {
            router: RouterId(router),
            number,
            demand: required(demand, "voice.demand")?.try_into()?,
            wanted: required(wanted, "voice.wanted")?.try_into()?,
        })
    }
}

impl From<Demand> for proto::Demand {
    fn from(demand: Demand) -> Self {
        let Demand {
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

impl TryFrom<proto::Demand> for Demand {
    type Error = WireError;

    fn try_from(demand: proto::Demand) -> Result<Self, WireError> {
        let proto::Demand {
            slow,
            quick,
            classes,
            waiting,
            waiting_tokens,
            open,
        } = demand;
        let count = classes.len() as u64;
        within("demand.classes", count, (0, CLASSES_MAX))?;
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

impl From<Flow> for proto::Flow {
    fn from(flow: Flow) -> Self {
        let Flow {
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

impl From<proto::Flow> for Flow {
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

impl From<Kept> for proto::Kept {
    fn from(kept: Kept) -> Self {
        let Kept {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        } = kept;
        Self {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        }
    }
}

impl From<proto::Kept> for Kept {
    fn from(kept: proto::Kept) -> Self {
        let proto::Kept {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        } = kept;
        Self {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        }
    }
}

impl From<Wanted> for proto::Wanted {
    fn from(wanted: Wanted) -> Self {
        let Wanted {
            workers,
            legs,
            reasons,
        } = wanted;
        let place = |role| {
            let all = ScalingReason::ALL.iter();
            let place = all.take_while(|reason| **reason != reasons.of(role));
            place.count() as u32
        };
        Self {
            workers: Some(workers.into()),
            legs: Some(legs.into()),
            reasons: POOLS.into_iter().map(place).collect(),
        }
    }
}

impl TryFrom<proto::Wanted> for Wanted {
    type Error = WireError;

    fn try_from(wanted: proto::Wanted) -> Result<Self, WireError> {
        let proto::Wanted {
            workers,
            legs,
            reasons: places,
        } = wanted;
        let pools = POOLS.len() as u64;
        within("wanted.reasons", places.len() as u64, (pools, pools))?;
        let mut reasons = Reasons::default();
        for (role, place) in POOLS.into_iter().zip(places) {
            let last = ScalingReason::ALL.len() as u64 - 1;
            within("wanted.reasons", place.into(), (0, last))?;
            *reasons.of_mut(role) = ScalingReason::ALL[place as usize];
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
