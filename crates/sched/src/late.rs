//! Promises that cannot be kept here, as predicted when the order arrives.
//!
//! Owns: the forecast of first tokens and of a mean gap, and the refusal that follows. Never: turns
//! away what its router says is to be served, or anything that nothing was promised of.
//! Invariant: refuses only what would be late, or make another late, by a good part of its time, so
//! that a router whose forecast was a little better is not contradicted, and several routers cannot
//! overbook one worker.

use crate::Brain;
use crate::batch;
use crate::policy::{self, Rank};
use crate::sequence::{Sequence, Stage};
use cleave_domain::{Aim, Due, DueUnmet, Refusal, Reserve, Work};
use cleave_planner::{Predict, beside};
use std::time::Duration;

/// What is predicted to take more than five fourths of its time is refused.
fn clearly_over(predicted: Duration, target: Duration) -> bool {
    // A target is whatever a router says.
    predicted > target.saturating_add(target / 4)
}

fn may_refuse(due: Option<Due>) -> bool {
    due.is_some_and(|due| due.unmet == DueUnmet::Refuse)
}

impl Brain {
    /// Whether the first token of a prompt that came just now would be late, or that of another which
    /// would not be late without it.
    pub(crate) fn refuse_late_prompt(&self, sequence: &mut Sequence) -> Result<(), Refusal> {
        if sequence.unmet != Some(DueUnmet::Refuse) || !self.learner.knows() {
            return Ok(());
        }
        let size = self.limits.capacity.block_tokens;
        let known = match self.limits.prefix_cache {
            true => self.pool.leading(sequence.reusable(size)).blocks,
            false => 0,
        };
        let kept = self.kept_below(sequence, known).worth();
        let cached = (known + kept.blocks) * size;
        let prices = self.learner.prices();
        let (rest, rank) = (sequence.len() - cached, sequence.rank);
        let slowed = self.slowed_permille();
        let takes = prices.prefill(cached, rest, self.quantum) * slowed / 1000 + kept.takes;
        let adds = prices.adds(cached, rest, self.quantum) * slowed / 1000;
        let (ahead, over) = self.demand(rank, adds);
        let left = rank.due.since(self.now);
        let waited = self.now.since(rank.since);
        let over = match clearly_over(ahead + takes, left) {
            true => over.max(ahead + takes - left),
            false => over,
        };
        if over.is_zero() {
            return Ok(());
        }
        Err(Refusal::Late {
            aim: Aim::Ttft,
            predicted: waited + (ahead + takes).max(left + over),
            retry_after: policy::worth_retrying(over),
        })
    }

    /// How long a prompt of this rank waits here, and by how much the one that it makes latest would
    /// be late for the `adds` that it adds, counting those that could be in time without it.
    fn demand(&self, rank: Rank, adds: Duration) -> (Duration, Duration) {
        let step = self.step_left();
        let slowed = self.slowed_permille();
        let (mut work, mut ahead, mut over) = (step, step, Duration::ZERO);
        for other in &self.active {
            let Some(sequence) = self.sequences.get(&other.handoff) else {
                continue;
            };
            // What is late anyway goes behind what can be in time.
            let late = sequence.unmet.is_some() && self.prompt_slack(sequence).is_none();
            if !sequence.computes() || late {
                continue;
            }
            work += self.prompt_adds(sequence) * slowed / 1000;
            if *other < rank {
                ahead = work;
                continue;
            }
            let left = other.due.since(self.now);
            let kept = sequence.unmet.is_some() && !clearly_over(work, left);
            if kept && clearly_over(work + adds, left) {
                over = over.max(work + adds - left);
            }
        }
        (ahead, over)
    }

    /// How much longer prompts take for the streams that run beside them.
    fn slowed_permille(&self) -> u32 {
        let mut streams = Work::default();
        let mut spare: Option<Duration> = None;
        let stays = |s: &&Sequence| s.slot.is_some() && s.generates();
        for stream in self.sequences.values().filter(stays) {
            streams += Work::decode(u64::from(stream.len()));
            spare = spare.into_iter().chain(self.gap_kept(stream)).min();
        }
        let sizes = (self.quantum, self.limits.capacity.block_tokens);
        beside(self.learner.prices(), &streams, spare, sizes)
    }

    /// Whether a sequence that is to generate here, or one that was promised a gap before it, would
    /// have a longer one.
    pub(crate) fn refuse_slow_decode(&self, order: &Reserve) -> Result<(), Refusal> {
        let request = &order.request;
        let Some(tpot) = request.slo.tpot else {
            return Ok(());
        };
        if !may_refuse(order.due) || !self.learner.knows() {
            return Ok(());
        }
        let here = self.sequences.values().filter(|s| {
            let stays = matches!(s.stage, Stage::Active | Stage::Reserved);
            stays && s.decodes_here()
        });
        let here = here.filter_map(|s| Some((self.gap_kept(s)?, u64::from(s.len()))));
        let own = (tpot, request.prompt.len() as u64);
        let crowded = batch::crowded_step(self.learner.prices(), here.chain([own]));
        match crowded {
            Some((target, predicted)) if clearly_over(predicted, target) => Err(Refusal::Late {
                aim: Aim::Tpot,
                predicted,
                retry_after: self.soonest_end(),
            }),
            _ => Ok(()),
        }
    }
}
