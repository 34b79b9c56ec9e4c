//! Series of the number of workers wanted, with the reasons.
//!
//! Owns: these series. Never: decides. Invariant: each pool of a model has exactly one reason;
//! without `scaling` in the policy there is no series at all.

use super::buckets::FloatGauge;
use crate::series_table::series_table;
use cleave_domain::{Role, ScalingReason};
use cleave_planner::scaling::ScalerDecision;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScalingPoolLabels {
    pool: String,
    model: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScalingReasonLabels {
    pool: String,
    model: String,
    reason: &'static str,
}

series_table! {
    pub struct ScalingSeries;

    workers: Family<ScalingPoolLabels, Gauge>, "cleave_workers_wanted",
        "Number of workers wanted, by model and by the role that they are started with";
    legs: Family<ScalingPoolLabels, Gauge>, "cleave_legs_wanted",
        "Number of workers wanted for each leg; some may serve another leg than they were started with";
    reason: Family<ScalingReasonLabels, Gauge>, "cleave_scaling_reason",
        "1 for the reason of the present number of workers wanted, by pool";
    load: Family<ScalingPoolLabels, FloatGauge>, "cleave_scaling_load",
        "Load of prompts and of streams in numbers of workers, before rounding and delays";
}

impl ScalingSeries {
    /// Shows the decision about a model.
    pub fn show(&self, model: &str, decision: &ScalerDecision) {
        self.hide_reasons(model);
        let target = &decision.wanted;
        for role in ROLES {
            let pool = role.to_string();
            let model = model.to_owned();
            let label = ScalingPoolLabels {
                pool: pool.clone(),
                model: model.clone(),
            };
            let reason = target.reasons.for_role(role).name();
            self.workers
                .get_or_create(&label)
                .set(target.workers.for_role(role).into());
            self.legs
                .get_or_create(&label)
                .set(target.legs.for_role(role).into());
            self.reason
                .get_or_create(&ScalingReasonLabels {
                    pool,
                    model,
                    reason,
                })
                .set(1);
        }
        let loads = [
            (Role::Prefill, decision.prefill_load),
            (Role::Decode, decision.decode_load),
        ];
        for (role, load) in loads {
            let label = ScalingPoolLabels {
                pool: role.to_string(),
                model: model.to_owned(),
            };
            self.load.get_or_create(&label).set(load);
        }
    }

    /// Hides the series of a model.
    pub fn hide(&self, model: &str) {
        self.hide_reasons(model);
        for role in ROLES {
            let labels = ScalingPoolLabels {
                pool: role.to_string(),
                model: model.to_owned(),
            };
            self.workers.remove(&labels);
            self.legs.remove(&labels);
            self.load.remove(&labels);
        }
    }

    fn hide_reasons(&self, model: &str) {
        for role in ROLES {
            for reason in ScalingReason::ALL {
                self.reason.remove(&ScalingReasonLabels {
                    pool: role.to_string(),
                    model: model.to_owned(),
                    reason: reason.name(),
                });
            }
        }
    }
}

const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];
