//! The number of workers wanted, as a router's brain last decided.
//!
//! Invariant: where nothing is known, or nothing is to change, there is no number.

use cleave_domain::{PoolCounts, Role, ScalingMode, ScalingPolicy};
use cleave_planner::scaling::ScalerDecision;
use tokio::sync::watch;

/// Every pool, by its name.
pub const POOLS: [(&str, Role); 3] = [
    ("prefill", Role::Prefill),
    ("decode", Role::Decode),
    ("both", Role::Both),
];

/// The scaling decision of the router's brain, as far as there is one.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ScalingStatus {
    /// The policy has no scaling.
    #[default]
    Off,
    /// The brain has just started, and decides nothing before it knows the fleet.
    Starting(ScalingMode),
    /// The last decision of the brain.
    Decided(ScalingMode, ScalerDecision),
}

impl ScalingStatus {
    pub fn after_policy_change(scaling: Option<&ScalingPolicy>, before: &Self) -> Self {
        match (scaling, before) {
            (None, _) => Self::Off,
            (Some(scaling), Self::Decided(_, decision)) => Self::Decided(scaling.mode, *decision),
            (Some(scaling), _) => Self::Starting(scaling.mode),
        }
    }
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScalingUnavailable {
    #[error("the router's policy has no `scaling`")]
    Off,
    #[error("the router has just started and does not know its workers yet")]
    Starting,
    #[error("the policy says `mode: advise`: nothing is to change")]
    AdviseOnly,
}

/// Reads the scaling status; clones read the same.
#[derive(Clone, Debug)]
pub struct ScalingStatusReader(watch::Receiver<ScalingStatus>);

impl ScalingStatusReader {
    pub fn new(status: watch::Receiver<ScalingStatus>) -> Self {
        Self(status)
    }

    pub fn status(&self) -> ScalingStatus {
        self.0.borrow().clone()
    }

    /// How many workers each pool is to have.
    pub fn target_workers(&self) -> Result<PoolCounts, ScalingUnavailable> {
        match &*self.0.borrow() {
            ScalingStatus::Off => Err(ScalingUnavailable::Off),
            ScalingStatus::Starting(_) => Err(ScalingUnavailable::Starting),
            ScalingStatus::Decided(ScalingMode::Advise, _) => Err(ScalingUnavailable::AdviseOnly),
            ScalingStatus::Decided(ScalingMode::Act, decision) => Ok(decision.wanted.workers),
        }
    }

    /// Returns when there may be another answer; false when there never will be.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}
