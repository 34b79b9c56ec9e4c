//! Strategies for the gossip between routers.
//!
//! Owns: the demand and the wanted fleet that routers tell each other.
//! Never: draws an order or a report.

use cleave_domain::{
    FleetDemand, FleetTarget, PoolCounts, RequestFlow, RouterId, ScalingGossip, ScalingReason,
    ScalingReasons, SloOutcomes,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;

fn flow() -> impl Strategy<Value = RequestFlow> {
    any::<[u64; 7]>().prop_map(|drawn| RequestFlow {
        arrivals: drawn[0],
        prompt_tokens: drawn[1],
        pairs: drawn[2],
        placed: drawn[3],
        cached_tokens: drawn[4],
        answers: drawn[5],
        output_tokens: drawn[6],
    })
}

fn slo_outcomes() -> impl Strategy<Value = SloOutcomes> {
    any::<[u64; 4]>().prop_map(|drawn| SloOutcomes {
        arrivals: drawn[0],
        judged: drawn[1],
        missed_prefill: drawn[2],
        missed_decode: drawn[3],
    })
}

fn pool_counts() -> impl Strategy<Value = PoolCounts> {
    any::<[u32; 3]>().prop_map(|[prefill, decode, both]| PoolCounts {
        prefill,
        decode,
        both,
    })
}

fn fleet_target() -> impl Strategy<Value = FleetTarget> {
    let reason = || (0..ScalingReason::ALL.len()).prop_map(|place| ScalingReason::ALL[place]);
    let reasons =
        (reason(), reason(), reason()).prop_map(|(prefill, decode, both)| ScalingReasons {
            prefill,
            decode,
            both,
        });
    (pool_counts(), pool_counts(), reasons).prop_map(|(workers, legs, reasons)| FleetTarget {
        workers,
        legs,
        reasons,
    })
}

/// The scaling data that one router sends to the others.
pub(super) fn gossip() -> impl Strategy<Value = Arc<ScalingGossip>> {
    let demand = (
        flow(),
        flow(),
        vec(slo_outcomes(), 0..4),
        any::<(u32, u64, u32)>(),
    )
        .prop_map(
            |(slow, quick, classes, (waiting, waiting_tokens, open))| FleetDemand {
                slow,
                quick,
                classes,
                waiting,
                waiting_tokens,
                open,
            },
        );
    (any::<u64>(), any::<u64>(), demand, fleet_target()).prop_map(
        |(router, number, demand, wanted)| {
            Arc::new(ScalingGossip {
                router: RouterId(router),
                number,
                demand,
                wanted,
            })
        },
    )
}
