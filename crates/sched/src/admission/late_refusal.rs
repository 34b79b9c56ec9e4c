//! Targets that cannot be kept here, as predicted when the order arrives.
//!
//! Owns: the forecast of first tokens and of a mean gap, and the refusal that follows. Never:
//! refuses an order that its router wants served in any case, or one without a target.
//! Invariant: refuses only an order that would be late, or make another late, by more than a
//! quarter of its time, so that a router whose forecast was a little better is not contradicted,
//! and several routers cannot overbook one worker.

use crate::batch::targets;
use crate::policy::{self, ServiceRank};
use crate::sequences::{SequenceStage, WorkerSequence};
use crate::snapshot::LoadSnapshot;
use cleave_domain::{Deadline, OnDeadlineMiss, Refusal, Request, SloMetric, StepWork};
use cleave_planner::slowdown_permille;
use std::time::Duration;

/// Whether a prediction exceeds its target by more than a quarter.
fn clearly_over(predicted: Duration, target: Duration) -> bool {
    // The target is a router's input and may be extreme, hence saturating.
    predicted > target.saturating_add(target / 4)
}

fn may_refuse(due: Option<Deadline>) -> bool {
    due.is_some_and(|due| due.unmet == OnDeadlineMiss::Refuse)
}

impl LoadSnapshot<'_> {
    /// Refuses a new prompt whose first token would be late, or which would make another late that
    /// is in time without it.
    pub(crate) fn refuse_late_prompt(&self, sequence: &mut WorkerSequence) -> Result<(), Refusal> {
        if sequence.on_miss != Some(OnDeadlineMiss::Refuse) || !self.forecast.has_prices() {
            return Ok(());
        }
        let size = self.context.block_tokens();
        // Blocks in the pool, and those worth fetching from a tier, need no prefill.
        let in_pool = self.memory.prefix_blocks(sequence);
        let in_tiers = self.memory.tier_match(sequence, in_pool, self.forecast);
        let in_tiers = in_tiers.if_cheaper();
        let cached = (in_pool + in_tiers.adopted + in_tiers.blocks) * size;
        let (rest, rank) = (sequence.len() - cached, sequence.rank());
        // Beside running streams a prompt takes longer than alone.
        let slowed = self.slowed_permille();
        let takes = self.forecast.prefill(cached, rest) * slowed / 1000 + in_tiers.takes;
        let adds = self.forecast.prefill_added(cached, rest) * slowed / 1000;
        let (ahead, over) = self.demand(rank, adds);
        let left = rank.due.since(self.context.now());
        let waited = self.context.now().since(rank.since);
        let over = if clearly_over(ahead + takes, left) {
            over.max(ahead + takes - left)
        } else {
            over
        };
        if over.is_zero() {
            return Ok(());
        }
        Err(Refusal::Late {
            aim: SloMetric::Ttft,
            predicted: waited + (ahead + takes).max(left + over),
            retry_after: policy::clamp_retry_after(over),
        })
    }

    /// The time that a prompt of this rank waits here, and by how much the most affected prompt
    /// behind it would be late because of the `adds` that it adds, counting only those that could
    /// be in time without it.
    fn demand(&self, rank: ServiceRank, adds: Duration) -> (Duration, Duration) {
        let step = self.steps.left(self.context.now());
        let slowed = self.slowed_permille();
        let (mut work, mut ahead, mut over) = (step, step, Duration::ZERO);
        for sequence in self.sequences.active() {
            let other = sequence.rank();
            // Prompts that are late anyway are served after those that can be in time.
            let late = sequence.on_miss.is_some()
                && self
                    .forecast
                    .prompt_slack(sequence, self.context.now())
                    .is_none();
            if !sequence.has_prefill_left() || late {
                continue;
            }
            work += self.forecast.prompt_adds(sequence) * slowed / 1000;
            if other < rank {
                ahead = work;
                continue;
            }
            let left = other.due.since(self.context.now());
            let is_in_time = sequence.on_miss.is_some() && !clearly_over(work, left);
            if is_in_time && clearly_over(work + adds, left) {
                over = over.max(work + adds - left);
            }
        }
        (ahead, over)
    }

    /// How much longer prompts take because of the streams that run beside them, in thousandths.
    fn slowed_permille(&self) -> u32 {
        let mut streams = StepWork::default();
        let mut spare: Option<Duration> = None;
        let runs = |s: &&WorkerSequence| s.slot().is_some() && s.decodes_next();
        for stream in self.sequences.iter().filter(runs) {
            streams += StepWork::decode(u64::from(stream.len()));
            spare = spare
                .into_iter()
                .chain(self.forecast.keepable_gap(stream, self.context.now()))
                .min();
        }
        let block_tokens = self.context.block_tokens();
        let prices = self.forecast.prices();
        slowdown_permille(
            prices,
            &streams,
            spare,
            self.forecast.quantum(),
            block_tokens,
        )
    }

    /// Refuses a sequence whose mean gap, or that of a stream accepted before it, would exceed its
    /// target.
    pub(crate) fn refuse_slow_decode(
        &self,
        request: &Request,
        due: Option<Deadline>,
    ) -> Result<(), Refusal> {
        let Some(tpot) = request.slo.tpot else {
            return Ok(());
        };
        if !may_refuse(due) || !self.forecast.has_prices() {
            return Ok(());
        }
        let here = self.sequences.iter().filter(|s| {
            let admitted = matches!(s.stage(), SequenceStage::Active | SequenceStage::Reserved);
            admitted && s.decodes_here()
        });
        let here = here.filter_map(|s| {
            Some((
                self.forecast.keepable_gap(s, self.context.now())?,
                u64::from(s.len()),
            ))
        });
        let own = (tpot, request.prompt.len() as u64);
        let all_streams = targets::step_of_all_streams(self.forecast.prices(), here.chain([own]));
        match all_streams {
            Some((target, predicted)) if clearly_over(predicted, target) => Err(Refusal::Late {
                aim: SloMetric::Tpot,
                predicted,
                retry_after: self.soonest_end(),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
