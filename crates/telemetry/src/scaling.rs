//! Series of the number of workers wanted, with the reasons.
//!
//! Owns: these series. Never: decides. Invariant: each pool has exactly one reason; without
//! `scaling` in the policy there is no series at all.

use super::buckets::FloatGauge;
use crate::series_table::series_table;
use cleave_domain::Role;
use cleave_planner::scaling::ScalerDecision;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScalingPoolLabels {
    pool: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScalingReasonLabels {
    pool: String,
    reason: &'static str,
}

series_table! {
    pub struct ScalingSeries;

    workers: Family<ScalingPoolLabels, Gauge>, "cleave_workers_wanted",
        "Number of workers wanted, by the role that they are started with";
    legs: Family<ScalingPoolLabels, Gauge>, "cleave_legs_wanted",
        "Number of workers wanted for each leg; some may serve another leg than they were started with";
    reason: Family<ScalingReasonLabels, Gauge>, "cleave_scaling_reason",
        "1 for the reason of the present number of workers wanted, by pool";
    load: Family<ScalingPoolLabels, FloatGauge>, "cleave_scaling_load",
        "Load of prompts and of streams in numbers of workers, before rounding and delays";
}

impl ScalingSeries {
    pub fn show(&self, decision: &ScalerDecision) {
        self.reason.clear();
        let target = &decision.wanted;
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            let pool = role.to_string();
            let label = ScalingPoolLabels { pool: pool.clone() };
            let reason = target.reasons.for_role(role).name();
            self.workers
                .get_or_create(&label)
                .set(target.workers.for_role(role).into());
            self.legs
                .get_or_create(&label)
                .set(target.legs.for_role(role).into());
            self.reason
                .get_or_create(&ScalingReasonLabels { pool, reason })
                .set(1);
        }
        let loads = [
            (Role::Prefill, decision.prefill_load),
            (Role::Decode, decision.decode_load),
        ];
        for (role, load) in loads {
            let pool = role.to_string();
            self.load
                .get_or_create(&ScalingPoolLabels { pool })
                .set(load);
        }
    }

    pub fn hide(&self) {
        self.workers.clear();
        self.legs.clear();
        self.reason.clear();
        self.load.clear();
    }
}
