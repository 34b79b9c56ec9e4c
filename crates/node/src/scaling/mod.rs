//! The number of workers wanted, for the orchestrators that start them.
//!
//! Owns: the last decision of the router's brain, and the two interfaces by which orchestrators ask
//! for it. Never decides; never starts or stops a worker. Invariant: where nothing is known, or
//! nothing is to change, the answer is an error and never a number: orchestrators then change
//! nothing.

mod dashboard;
mod external;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod https;
mod keda;

pub(crate) use dashboard::{RecentDecisions, dashboard_scaling};
pub(crate) use external::external_metrics_routes;
pub(crate) use https::ExternalMetricsServer;
pub(crate) use keda::scaler_service;

use cleave_domain::{PoolCounts, Role, ScalingMode, ScalingPolicy};
use cleave_planner::scaling::ScalerDecision;
use tokio::sync::watch;

/// Every pool, by its name.
pub(crate) const POOLS: [(&str, Role); 3] = [
    ("prefill", Role::Prefill),
    ("decode", Role::Decode),
    ("both", Role::Both),
];

/// The scaling decision of the router's brain, as far as there is one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum ScalingStatus {
    /// The policy has no scaling.
    #[default]
    Off,
    /// The brain has just started, and decides nothing before it knows the fleet.
    Starting(ScalingMode),
    /// The last decision of the brain.
    Decided(ScalingMode, ScalerDecision),
}

impl ScalingStatus {
    pub(crate) fn after_policy_change(scaling: Option<&ScalingPolicy>, before: &Self) -> Self {
        match (scaling, before) {
            (None, _) => Self::Off,
            (Some(scaling), Self::Decided(_, decision)) => Self::Decided(scaling.mode, *decision),
            (Some(scaling), _) => Self::Starting(scaling.mode),
        }
    }
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ScalingUnavailable {
    #[error("the router's policy has no `scaling`")]
    Off,
    #[error("the router has just started and does not know its workers yet")]
    Starting,
    #[error("the policy says `mode: advise`: nothing is to change")]
    AdviseOnly,
}

/// Reads the scaling status; clones read the same.
#[derive(Clone, Debug)]
pub(crate) struct ScalingStatusReader(watch::Receiver<ScalingStatus>);

impl ScalingStatusReader {
    pub(crate) fn new(status: watch::Receiver<ScalingStatus>) -> Self {
        Self(status)
    }

    pub(crate) fn status(&self) -> ScalingStatus {
        self.0.borrow().clone()
    }

    /// How many workers each pool is to have.
    pub(crate) fn target_workers(&self) -> Result<PoolCounts, ScalingUnavailable> {
        match &*self.0.borrow() {
            ScalingStatus::Off => Err(ScalingUnavailable::Off),
            ScalingStatus::Starting(_) => Err(ScalingUnavailable::Starting),
            ScalingStatus::Decided(ScalingMode::Advise, _) => Err(ScalingUnavailable::AdviseOnly),
            ScalingStatus::Decided(ScalingMode::Act, decision) => Ok(decision.wanted.workers),
        }
    }

    /// Returns when there may be another answer; false when there never will be.
    pub(crate) async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}
