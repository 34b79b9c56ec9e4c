//! The number of workers wanted of each model, as a router's brains last decided.
//!
//! Invariant: where nothing is known, or nothing is to change, there is no number.

use cleave_domain::{PoolCounts, Role, ScalingMode, ScalingPolicy};
use cleave_planner::scaling::ScalerDecision;
use std::collections::BTreeMap;
use std::sync::Arc;
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
    /// The brain has just started, and a request waits: these workers may be started in pools that
    /// have none. Workers of an earlier router may be about to connect, so none is to be stopped.
    First(ScalingMode, PoolCounts),
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

/// The status of each model, by its name; of one without a name before any model is known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalingStatuses(BTreeMap<Arc<str>, ScalingStatus>);

impl From<ScalingStatus> for ScalingStatuses {
    /// The status before a model is known.
    fn from(status: ScalingStatus) -> Self {
        Self(BTreeMap::from([(Arc::from(""), status)]))
    }
}

impl ScalingStatuses {
    /// A model is known from now on, with the status that it has then. It takes the place of the
    /// one without a name.
    pub fn begin(&mut self, model: &Arc<str>, status: ScalingStatus) {
        let unnamed = self.0.remove("");
        let status = unnamed.unwrap_or(status);
        self.0.entry(Arc::clone(model)).or_insert(status);
    }

    /// A model is forgotten.
    pub fn end(&mut self, model: &str) {
        self.0.remove(model);
    }

    /// The status of a model.
    pub fn of(&self, model: &str) -> ScalingStatus {
        self.0.get(model).cloned().unwrap_or_default()
    }

    pub fn set(&mut self, model: &Arc<str>, status: ScalingStatus) {
        self.0.insert(Arc::clone(model), status);
    }

    /// The models and their status, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &ScalingStatus)> {
        self.0.iter()
    }

    /// The status of the model of this name; without a name, that of the only one.
    fn named(&self, model: Option<&str>) -> Result<&ScalingStatus, ScalingUnavailable> {
        let only = || {
            let mut all = self.0.values();
            all.next().filter(|_| all.next().is_none())
        };
        match model {
            None => only().ok_or(ScalingUnavailable::ModelNotNamed),
            Some(model) => {
                let named = self.0.get(model).or_else(|| self.0.get(""));
                named.ok_or(ScalingUnavailable::UnknownModel)
            }
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
    #[error("the router has several models: name one")]
    ModelNotNamed,
    #[error(
        "the router knows no such model: list it in the policy's `models`, or start a worker of it"
    )]
    UnknownModel,
}

impl ScalingStatus {
    /// How many workers each pool is to have.
    pub fn target_workers(&self) -> Result<PoolCounts, ScalingUnavailable> {
        match self {
            Self::Off => Err(ScalingUnavailable::Off),
            Self::Starting(_) | Self::First(..) => Err(ScalingUnavailable::Starting),
            Self::Decided(ScalingMode::Advise, _) => Err(ScalingUnavailable::AdviseOnly),
            Self::Decided(ScalingMode::Act, decision) => Ok(decision.wanted.workers),
        }
    }

    /// Whether a pool is to have any worker.
    fn is_pool_wanted(&self, role: Role) -> Result<bool, ScalingUnavailable> {
        match self {
            // No answer keeps a pool as it is; only those of the first workers are wanted for sure.
            Self::First(ScalingMode::Act, first) if first.for_role(role) > 0 => Ok(true),
            _ => Ok(self.target_workers()?.for_role(role) > 0),
        }
    }
}

/// Reads the scaling status; clones read the same.
#[derive(Clone, Debug)]
pub struct ScalingStatusReader(watch::Receiver<ScalingStatuses>);

impl ScalingStatusReader {
    pub fn new(statuses: watch::Receiver<ScalingStatuses>) -> Self {
        Self(statuses)
    }

    pub fn statuses(&self) -> ScalingStatuses {
        self.0.borrow().clone()
    }

    /// How many workers each pool of a model is to have; without a name, of the only model.
    pub fn target_workers(&self, model: Option<&str>) -> Result<PoolCounts, ScalingUnavailable> {
        self.0.borrow().named(model)?.target_workers()
    }

    /// Whether a pool of a model is to have any worker; without a name, of the only model.
    pub fn is_pool_wanted(
        &self,
        model: Option<&str>,
        role: Role,
    ) -> Result<bool, ScalingUnavailable> {
        self.0.borrow().named(model)?.is_pool_wanted(role)
    }

    /// Returns when there may be another answer; false when there never will be.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(prefill: u32) -> ScalingStatus {
        let mut decision = ScalerDecision::default();
        decision.wanted.workers.prefill = prefill;
        ScalingStatus::Decided(ScalingMode::Act, decision)
    }

    #[test]
    fn a_model_is_named_where_there_are_several() {
        let (sender, statuses) = watch::channel(ScalingStatuses::from(decided(1)));
        let reader = ScalingStatusReader::new(statuses);
        let prefill = |model: Option<&str>| {
            let workers = reader.target_workers(model);
            workers.map(|workers| workers.prefill)
        };
        assert_eq!((prefill(None), prefill(Some("a"))), (Ok(1), Ok(1)));
        let (a, b) = (Arc::from("a"), Arc::from("b"));
        sender.send_modify(|all| all.begin(&a, ScalingStatus::Off));
        assert_eq!(prefill(None), Ok(1), "the status got its name");
        sender.send_modify(|all| all.begin(&b, decided(2)));
        assert_eq!((prefill(Some("a")), prefill(Some("b"))), (Ok(1), Ok(2)));
        assert_eq!(prefill(None), Err(ScalingUnavailable::ModelNotNamed));
        assert_eq!(prefill(Some("c")), Err(ScalingUnavailable::UnknownModel));
    }
    #[test]
    fn first_workers_are_wanted_and_no_pool_shrinks() {
        let first = PoolCounts {
            prefill: 1,
            ..PoolCounts::default()
        };
        let status = ScalingStatus::First(ScalingMode::Act, first);
        assert_eq!(status.target_workers(), Err(ScalingUnavailable::Starting));
        assert_eq!(status.is_pool_wanted(Role::Prefill), Ok(true));
        let unknown = Err(ScalingUnavailable::Starting);
        assert_eq!(status.is_pool_wanted(Role::Both), unknown);
        let advice = ScalingStatus::First(ScalingMode::Advise, first);
        assert_eq!(advice.is_pool_wanted(Role::Prefill), unknown);
        assert_eq!(decided(0).is_pool_wanted(Role::Prefill), Ok(false));
    }
}
