//! What the page for operators shows of scaling.
//!
//! Owns: which numbers stand beside each other, and what was decided of late. Never: decides. Invariant:
//! workers are counted by the leg that they serve, wanted ones too, so that equal numbers mean rest.

use super::{POOLS, Standing};
use cleave_api::{PoolWanted, Scaling, ScalingStep, WorkerRow, WorkerState};
use cleave_domain::{PoolCounts, Role, ScalingMode, Wanted};
use std::collections::VecDeque;

/// So many changes are kept.
const KEPT: usize = 20;

/// Changes of mind, the latest first. The first answer is none: there was nothing before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Decisions {
    legs: Option<PoolCounts>,
    steps: VecDeque<ScalingStep>,
}

impl Decisions {
    /// So many are wanted, as was said at `at_ms`, in milliseconds since 1970.
    pub(crate) fn hear(&mut self, wanted: &Wanted, at_ms: u64) {
        let Some(before) = self.legs.replace(wanted.legs) else {
            return;
        };
        for (pool, role) in POOLS {
            let (from, to) = (before.of(role), wanted.legs.of(role));
            if from != to {
                let reason = wanted.reasons.of(role).name().to_owned();
                self.steps.push_front(ScalingStep {
                    at_ms,
                    pool: pool.to_owned(),
                    from,
                    to,
                    reason,
                });
            }
        }
        self.steps.truncate(KEPT);
    }

    pub(crate) fn all(&self) -> Vec<ScalingStep> {
        self.steps.iter().cloned().collect()
    }
}

/// As the page shows it; none where the policy does not say that the fleet changes.
pub(crate) fn shown(
    standing: &Standing,
    workers: &[WorkerRow],
    recent: Vec<ScalingStep>,
) -> Option<Scaling> {
    let (mode, wanted) = match standing {
        Standing::Off => return None,
        Standing::Listening(mode) => (*mode, None),
        Standing::Said(mode, decision) => (*mode, Some(&decision.wanted)),
    };
    let there = |role: Role| {
        let serves = |row: &&WorkerRow| row.role == role && row.state != WorkerState::Draining;
        u32::try_from(workers.iter().filter(serves).count()).unwrap_or(u32::MAX)
    };
    let pools = wanted.into_iter().flat_map(|wanted| {
        POOLS.map(|(pool, role)| PoolWanted {
            pool: pool.to_owned(),
            workers: there(role),
            wanted: wanted.legs.of(role),
            reason: wanted.reasons.of(role).name().to_owned(),
        })
    });
    // A pool that has nobody and wants nobody is none of this fleet's.
    let pools = pools.filter(|pool| pool.workers > 0 || pool.wanted > 0);
    Some(Scaling {
        advisory: mode == ScalingMode::Advise,
        pools: pools.collect(),
        recent,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Reasons, ScalingReason};
    use cleave_planner::scaling::Decision;
    use std::time::Duration;

    fn row(role: Role, state: WorkerState) -> WorkerRow {
        WorkerRow {
            name: String::new(),
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
            step: None,
            heard: None,
            tokens_per_second: None,
            placed: 0,
        }
    }

    fn wanted(prefill: u32, decode: u32) -> Wanted {
        let legs = PoolCounts {
            prefill,
            decode,
            both: 0,
        };
        // What is started, and may serve another leg, is not what is shown.
        let workers = PoolCounts {
            prefill: 7,
            ..PoolCounts::default()
        };
        let reasons = Reasons {
            prefill: ScalingReason::Prompts,
            decode: ScalingReason::Memory,
            ..Reasons::default()
        };
        Wanted {
            workers,
            legs,
            reasons,
        }
    }

    #[test]
    fn the_page_showed_other_workers_than_it_compared() {
        let rows = [
            row(Role::Prefill, WorkerState::Ready),
            row(Role::Decode, WorkerState::Stuck),
            row(Role::Decode, WorkerState::Draining),
        ];
        assert_eq!(shown(&Standing::Off, &rows, Vec::new()), None);
        let listens = Standing::Listening(ScalingMode::Act);
        let nothing = shown(&listens, &rows, Vec::new()).unwrap();
        assert_eq!((nothing.advisory, nothing.pools), (false, Vec::new()));
        let decision = Decision {
            wanted: wanted(2, 1),
            own: true,
            rate: 1.0,
            prefill_load: 1.5,
            decode_load: 0.5,
            waiting: 0,
            starting: 1,
        };
        let said = Standing::Said(ScalingMode::Advise, decision);
        let said = shown(&said, &rows, Vec::new()).unwrap();
        let pools: Vec<_> = said
            .pools
            .iter()
            .map(|pool| (&*pool.pool, pool.workers, pool.wanted, &*pool.reason))
            .collect();
        assert!(said.advisory);
        let expected = [("prefill", 1, 2, "prompts"), ("decode", 1, 1, "memory")];
        assert_eq!(pools, expected);
    }

    #[test]
    fn what_was_said_again_was_a_change_of_mind() {
        let mut decisions = Decisions::default();
        decisions.hear(&wanted(1, 1), 1);
        decisions.hear(&wanted(1, 1), 2);
        assert_eq!(decisions.all(), []);
        decisions.hear(&wanted(1, 3), 3);
        decisions.hear(&wanted(2, 3), 4);
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
            decisions.hear(&wanted(number, 3), 5);
        }
        assert_eq!(decisions.all().len(), KEPT);
    }
}
