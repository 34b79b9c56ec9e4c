//! The choice of a placement by its forecast.
//!
//! Owns: which placements are compared, and their order. Never: predicts; `forecast` does.
//! Invariant: costs O(workers): the legs are ranked separately, and only the best few are compared
//! as pairs.

use crate::event::LegPlacement;
use crate::placement::forecast::{
    PairForecast, PlacementForecast, PlacementPriority, PlacementRank, PromptForecast, RequestNeed,
    StreamForecast, WorkerForecast,
};
use crate::placement::policy::{self, NoPlacement};
use cleave_domain::Role;

/// Candidates of each leg that are paired with those of the other.
const LEGS_MAX: usize = 8;
/// Forecasts kept for the record.
const FORECASTS_KEPT: usize = 4;

/// The best placements among workers that may exchange blocks, best first; never empty.
///
/// # Errors
/// Returns why no placement was found.
pub(crate) fn judge(
    workers: &[WorkerForecast],
    need: &RequestNeed,
    placement: LegPlacement,
) -> Result<Vec<PlacementForecast>, NoPlacement> {
    let ask = &need.ask;
    policy::placement_exists(workers.iter().map(|p| &p.snapshot), ask, placement)?;
    // Each leg is ranked alone first: only the best few of each are worth the cost of a joint
    // forecast.
    let ranks = |p: &WorkerForecast| (p.prompt_rank(need), p.stream_rank(need));
    let ranks: Vec<(u64, u64)> = workers.iter().map(ranks).collect();
    let prompts = Shortlist::of(workers, |p, at| {
        policy::takes_prompt(&p.snapshot, ask).then(|| ranks[at].0)
    });
    let wholes = Shortlist::of(workers, |p, at| {
        let allowed = placement != LegPlacement::Split || p.snapshot.role == Role::Both;
        let takes = allowed && policy::takes_whole(&p.snapshot, ask) && p.has_slot_for_prompt(need);
        // On prefill workers a yielding stream would have to yield all the time.
        let guest = p.snapshot.role == Role::Prefill && !ask.prefill_only;
        let takes = takes && !(guest && need.priority_over_others == PlacementPriority::Yielding);
        takes.then(|| ranks[at].0.saturating_add(ranks[at].1))
    });
    let prompt = |p: &WorkerForecast| p.prompt(need);
    let lead = |prompt: &PromptForecast| prompt.wait + prompt.run;
    let prompts = prompts.legs(workers, prompt);
    // The earliest end of a prompt elsewhere decides which streams are there when its KV arrives.
    let soonest = prompts.iter().map(|(_, prompt)| lead(prompt)).min();
    let soonest = soonest.unwrap_or_default();
    let may_stay_whole = placement == LegPlacement::Auto;
    let streams = Shortlist::of(workers, |p, at| {
        let takes = placement != LegPlacement::Whole && policy::takes_stream(&p.snapshot, ask);
        let takes = takes && (!may_stay_whole || p.has_slot_for_stream(need, soonest));
        takes.then(|| ranks[at].1)
    });
    let streams = streams.legs(workers, |d| Some(d.stream(need, soonest)));
    // Every pair of the two short lists, then every worker that could serve both legs.
    let mut pairs: Vec<(PlacementRank, TieBreak, PairForecast)> =
        Vec::with_capacity(prompts.len() * streams.len());
    for (p, prompt) in &prompts {
        for (d, stream) in &streams {
            if p.snapshot.worker != d.snapshot.worker {
                pairs.push(ranked_pair(p, *prompt, d, *stream, need));
            }
        }
    }
    for (p, prompt) in wholes.legs(workers, prompt) {
        let stream = p.stream(need, lead(&prompt));
        pairs.push(ranked_pair(p, prompt, p, stream, need));
    }
    if !need.has_target() {
        // It waits until it breaks no target; it has none that it could miss.
        pairs.retain(|(.., pair)| pair.breaks_nothing());
    }
    pairs.sort_unstable_by_key(|(rank, turn, _)| (*rank, *turn));
    let best = pairs.iter().take(FORECASTS_KEPT);
    let forecasts: Vec<PlacementForecast> = best.map(|(.., pair)| pair.forecast(need)).collect();
    if forecasts.is_empty() {
        Err(NoPlacement::Busy)
    } else {
        Ok(forecasts)
    }
}

/// Breaks ties: equals take turns, and a worker of both roles stays free for the pool that runs
/// short.
type TieBreak = (bool, u64, u64);

fn ranked_pair<'a>(
    prefill: &'a WorkerForecast<'a>,
    prompt: PromptForecast,
    decode: &'a WorkerForecast<'a>,
    stream: StreamForecast,
    need: &RequestNeed,
) -> (PlacementRank, TieBreak, PairForecast<'a>) {
    let pair = PairForecast {
        prefill,
        prompt,
        decode,
        stream,
    };
    let both = |p: &WorkerForecast| p.snapshot.role == Role::Both;
    let turn = (
        both(prefill) || both(decode),
        prefill.snapshot.chosen.max(decode.snapshot.chosen),
        decode.snapshot.worker.worker.0,
    );
    (pair.rank(need), turn, pair)
}

/// The few entries of least rank, by index.
struct Shortlist {
    least: Vec<(u64, u64, usize)>,
}

impl Shortlist {
    fn of(
        workers: &[WorkerForecast],
        rank: impl Fn(&WorkerForecast, usize) -> Option<u64>,
    ) -> Self {
        let mut least: Vec<(u64, u64, usize)> = Vec::with_capacity(LEGS_MAX + 1);
        for (index, worker) in workers.iter().enumerate() {
            let Some(rank) = rank(worker, index) else {
                continue;
            };
            let entry = (rank, worker.snapshot.chosen, index);
            if least.len() == LEGS_MAX && least.last().is_some_and(|last| *last <= entry) {
                continue;
            }
            let at = least.partition_point(|other| *other < entry);
            least.insert(at, entry);
            least.truncate(LEGS_MAX);
        }
        Self { least }
    }

    /// Its workers with the forecast of `leg`, where there is one.
    fn legs<'a, T>(
        &self,
        workers: &'a [WorkerForecast<'a>],
        leg: impl Fn(&'a WorkerForecast<'a>) -> Option<T>,
    ) -> Vec<(&'a WorkerForecast<'a>, T)> {
        let leg = |(.., index): &(u64, u64, usize)| {
            let worker = &workers[*index];
            Some((worker, leg(worker)?))
        };
        self.least.iter().filter_map(leg).collect()
    }
}
