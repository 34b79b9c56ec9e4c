//! How many workers are wanted, and why.
//!
//! Owns: these series. Never: decides. Invariant: each pool has exactly one reason; without `scaling` in the
//! policy there is no series at all.

use super::FloatGauge;
use cleave_api::Book;
use cleave_domain::Role;
use cleave_planner::scaling::Decision;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    pool: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    pool: String,
    reason: &'static str,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct ScalingSeries {
    wanted: Family<Pool, Gauge>,
    legs: Family<Pool, Gauge>,
    reason: Family<Why, Gauge>,
    load: Family<Pool, FloatGauge>,
}

impl ScalingSeries {
    pub(super) fn register(book: &mut Book) -> Self {
        let series = Self {
            wanted: Family::default(),
            legs: Family::default(),
            reason: Family::default(),
            load: Family::default(),
        };
        book.register(
            "cleave_workers_wanted",
            "Workers that are to be started, by the leg that they are started with",
            series.wanted.clone(),
        );
        book.register(
            "cleave_legs_wanted",
            "Workers that are to serve each leg; some may serve another one than they were started with",
            series.legs.clone(),
        );
        book.register(
            "cleave_scaling_reason",
            "1 for why so many workers are wanted",
            series.reason.clone(),
        );
        book.register(
            "cleave_scaling_load",
            "Workers' worth of prompts and of streams, before anything is rounded or held",
            series.load.clone(),
        );
        series
    }

    pub(crate) fn show(&self, decision: &Decision) {
        self.reason.clear();
        let wanted = &decision.wanted;
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            let pool = role.to_string();
            let label = Pool { pool: pool.clone() };
            let reason = wanted.reasons.of(role).name();
            self.wanted
                .get_or_create(&label)
                .set(wanted.workers.of(role).into());
            self.legs
                .get_or_create(&label)
                .set(wanted.legs.of(role).into());
            self.reason.get_or_create(&Why { pool, reason }).set(1);
        }
        let loads = [
            (Role::Prefill, decision.prefill_load),
            (Role::Decode, decision.decode_load),
        ];
        for (role, load) in loads {
            let pool = role.to_string();
            self.load.get_or_create(&Pool { pool }).set(load);
        }
    }

    pub(crate) fn hide(&self) {
        self.wanted.clear();
        self.legs.clear();
        self.reason.clear();
        self.load.clear();
    }
}
