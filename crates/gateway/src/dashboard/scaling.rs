//! Scaling on the operators' dashboard.
//!
//! Owns: which numbers are compared, and the recent decisions. Never decides. Invariant: workers
//! are counted by the leg that they serve, wanted ones too, so that equal numbers mean that nothing
//! changes.

use cleave_api::{PoolTarget, ScalingChange, ScalingSummary, WorkerRow, WorkerState};
use cleave_domain::{FleetTarget, PoolCounts, Role, ScalingMode};
use cleave_fleet::{POOLS, ScalingStatus, ScalingStatuses};
use std::collections::{BTreeMap, VecDeque};

/// The number of changes kept.
const STEPS_MAX: usize = 20;

/// Changes of the decision, the latest first. The first decision is no change.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentDecisions {
    /// As last decided, by model.
    legs: BTreeMap<String, PoolCounts>,
    steps: VecDeque<ScalingChange>,
}

impl RecentDecisions {
    /// Records a decision made at `at_ms`, in milliseconds since 1970.
    pub(crate) fn record(&mut self, model: &str, target: &FleetTarget, at_ms: u64) {
        let Some(before) = self.legs.insert(model.to_owned(), target.legs) else {
            return;
        };
        for (pool, role) in POOLS {
            let (from, to) = (before.for_role(role), target.legs.for_role(role));
            if from != to {
                let reason = target.reasons.for_role(role).name().to_owned();
                self.steps.push_front(ScalingChange {
                    at_ms,
                    model: model.to_owned(),
                    pool: pool.to_owned(),
                    from,
                    to,
                    reason,
                });
            }
        }
        self.steps.truncate(STEPS_MAX);
    }

    pub(crate) fn all(&self) -> Vec<ScalingChange> {
        self.steps.iter().cloned().collect()
    }
}

/// Scaling as the dashboard shows it; `None` where the policy has no scaling.
pub(crate) fn dashboard_scaling(
    statuses: &ScalingStatuses,
    workers: &[WorkerRow],
    recent: Vec<ScalingChange>,
) -> Option<ScalingSummary> {
    let mut summary: Option<ScalingSummary> = None;
    for (model, status) in statuses.iter() {
        let (mode, target) = match status {
            ScalingStatus::Off => continue,
            ScalingStatus::Starting(mode) | ScalingStatus::First(mode, _) => (*mode, None),
            ScalingStatus::Decided(mode, decision) => (*mode, Some(&decision.wanted)),
        };
        let shown = summary.get_or_insert_default();
        shown.advisory |= mode == ScalingMode::Advise;
        let pools = target.map(|target| pool_targets(model, target, workers));
        shown.pools.extend(pools.into_iter().flatten());
    }
    summary.map(|summary| ScalingSummary { recent, ..summary })
}

/// Workers that are there and wanted, of the pools of a model.
fn pool_targets(model: &str, target: &FleetTarget, workers: &[WorkerRow]) -> Vec<PoolTarget> {
    let there = |role: Role| {
        let is_open = |row: &&WorkerRow| row.state != WorkerState::Draining;
        let serves = |row: &&WorkerRow| row.role == role && row.model == model && is_open(row);
        u32::try_from(workers.iter().filter(serves).count()).unwrap_or(u32::MAX)
    };
    let pools = POOLS.map(|(pool, role)| PoolTarget {
        model: model.to_owned(),
        pool: pool.to_owned(),
        workers: there(role),
        wanted: target.legs.for_role(role),
        reason: target.reasons.for_role(role).name().to_owned(),
    });
    // A pool without workers that wants none is not part of this fleet.
    let shown = |pool: &PoolTarget| pool.workers > 0 || pool.wanted > 0;
    pools.into_iter().filter(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{ScalingReason, ScalingReasons};
    use cleave_planner::scaling::ScalerDecision;
    use std::time::Duration;

    fn row(role: Role, state: WorkerState) -> WorkerRow {
        WorkerRow {
            name: String::new(),
            model: String::new(),
            role,
            state,
            device: None,
            sharing: 0,
            running: 0,
            waiting: 0,
            queue_tokens: 0,
            backlog: Duration::ZERO,
            blocks_held: 0,
            blocks_count: 0,
            last_step: None,
            since_report: None,
            tokens_per_second: None,
            placed: 0,
        }
    }

    fn target(prefill: u32, decode: u32) -> FleetTarget {
        let legs = PoolCounts {
            prefill,
            decode,
            both: 0,
        };
        // Workers to start may serve another leg, and are not what is shown.
        let workers = PoolCounts {
            prefill: 7,
            ..PoolCounts::default()
        };
        let reasons = ScalingReasons {
            prefill: ScalingReason::Prompts,
            decode: ScalingReason::Memory,
            ..ScalingReasons::default()
        };
        FleetTarget {
            workers,
            legs,
            reasons,
        }
    }

    #[test]
    fn the_dashboard_compares_workers_by_the_leg_they_serve() {
        let rows = [
            row(Role::Prefill, WorkerState::Ready),
            row(Role::Decode, WorkerState::Stuck),
            row(Role::Decode, WorkerState::Draining),
        ];
        assert_eq!(
            dashboard_scaling(&ScalingStatus::Off.into(), &rows, Vec::new()),
            None
        );
        let listens = ScalingStatus::Starting(ScalingMode::Act);
        let nothing = dashboard_scaling(&listens.into(), &rows, Vec::new()).unwrap();
        assert_eq!((nothing.advisory, nothing.pools), (false, Vec::new()));
        let decision = ScalerDecision {
            wanted: target(2, 1),
            own: true,
            first: false,
            rate: 1.0,
            prefill_load: 1.5,
            decode_load: 0.5,
            waiting: 0,
            starting: 1,
        };
        let status = ScalingStatus::Decided(ScalingMode::Advise, decision);
        let summary = dashboard_scaling(&status.into(), &rows, Vec::new()).unwrap();
        let pools: Vec<_> = summary
            .pools
            .iter()
            .map(|pool| (&*pool.pool, pool.workers, pool.wanted, &*pool.reason))
            .collect();
        assert!(summary.advisory);
        let expected = [("prefill", 1, 2, "prompts"), ("decode", 1, 1, "memory")];
        assert_eq!(pools, expected);
    }

    #[test]
    fn a_repeated_decision_is_no_change() {
        let mut decisions = RecentDecisions::default();
        decisions.record("m", &target(1, 1), 1);
        decisions.record("m", &target(1, 1), 2);
        assert_eq!(decisions.all(), []);
        decisions.record("m", &target(1, 3), 3);
        decisions.record("m", &target(2, 3), 4);
        let steps = decisions.all();
        let steps: Vec<_> = steps
            .iter()
            .map(|step| (step.at_ms, &*step.pool, step.from, step.to, &*step.reason))
            .collect();
        let expected = [
            (4, "prefill", 1, 2, "prompts"),
            (3, "decode", 1, 3, "memory"),
        ];
        assert_eq!(steps, expected);
        for number in 0..100 {
            decisions.record("m", &target(number, 3), 5);
        }
        assert_eq!(decisions.all().len(), STEPS_MAX);
    }
}
