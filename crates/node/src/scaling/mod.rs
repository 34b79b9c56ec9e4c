//! How many workers there are to be, as whoever starts them is told.
//!
//! Owns: the last answer of the router's brain, and the two ways in which orchestrators ask for it. Never:
//! decides; starts or stops a worker. Invariant: where nothing is known, or nothing is to change, that is
//! an error and never a number: an orchestrator leaves everything as it is then.

mod external;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod keda;
mod listen;
mod shown;

pub(crate) use external::external_metrics_routes;
pub(crate) use keda::scaler_service;
pub(crate) use listen::Secured;
pub(crate) use shown::{Decisions, shown};

use cleave_domain::{PoolCounts, Role, Scaling, ScalingMode};
use cleave_planner::scaling::Decision;
use tokio::sync::watch;

/// Every pool, by its name.
pub(crate) const POOLS: [(&str, Role); 3] = [
    ("prefill", Role::Prefill),
    ("decode", Role::Decode),
    ("both", Role::Both),
];

/// What the router's brain has said.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Standing {
    /// Its policy does not say that the fleet changes.
    #[default]
    Off,
    /// It has just begun, and says nothing before it knows the fleet.
    Listening(ScalingMode),
    /// So many.
    Said(ScalingMode, Decision),
}

impl Standing {
    pub(crate) fn of(scaling: Option<&Scaling>, before: &Self) -> Self {
        match (scaling, before) {
            (None, _) => Self::Off,
            (Some(scaling), Self::Said(_, decision)) => Self::Said(scaling.mode, *decision),
            (Some(scaling), _) => Self::Listening(scaling.mode),
        }
    }
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unknown {
    #[error("the router's policy has no `scaling`")]
    Off,
    #[error("the router has just started and does not know its workers yet")]
    Listening,
    #[error("the policy says `mode: advise`: nothing is to change")]
    Advises,
}

/// Where answers are read; clones read the same.
#[derive(Clone, Debug)]
pub(crate) struct Answers(watch::Receiver<Standing>);

impl Answers {
    pub(crate) fn new(standing: watch::Receiver<Standing>) -> Self {
        Self(standing)
    }

    pub(crate) fn standing(&self) -> Standing {
        self.0.borrow().clone()
    }

    /// How many workers each pool is to have.
    pub(crate) fn wanted(&self) -> Result<PoolCounts, Unknown> {
        match &*self.0.borrow() {
            Standing::Off => Err(Unknown::Off),
            Standing::Listening(_) => Err(Unknown::Listening),
            Standing::Said(ScalingMode::Advise, _) => Err(Unknown::Advises),
            Standing::Said(ScalingMode::Act, decision) => Ok(decision.wanted.workers),
        }
    }

    /// Returns when there may be another answer; false when there never will be.
    pub(crate) async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}
