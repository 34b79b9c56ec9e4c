//! Which placement is best, by what is predicted of each.
//!
//! Owns: which placements are looked at, and their order. Never: predicts; `forecast` does.
//! Invariant: costs O(workers): the legs are ranked apart, and only the best few are judged together.

use crate::event::Placement;
use crate::forecast::{Manners, Need, Outlook, Pair, Prompt, Prospect, Rank, Stream};
use crate::policy::{self, NoPlace};
use cleave_domain::Role;

/// Of each leg so many are judged together with as many of the other.
const LEGS: usize = 8;
/// So many judgements are kept for the record.
const KEPT: usize = 4;

/// The best placements among workers that may exchange blocks, best first; never none.
///
/// # Errors
/// Says why nobody was found.
pub(crate) fn judge(
    prospects: &[Prospect],
    need: &Need,
    placement: Placement,
) -> Result<Vec<Outlook>, NoPlace> {
    let ask = &need.ask;
    policy::exists(prospects.iter().map(|p| &p.seat), ask, placement)?;
    let ranks = |p: &Prospect| (p.prompt_rank(need), p.stream_rank(need));
    let ranks: Vec<(u64, u64)> = prospects.iter().map(ranks).collect();
    let prompts = Shortlist::of(prospects, |p, at| {
        policy::takes_prompt(&p.seat, ask).then(|| ranks[at].0)
    });
    let wholes = Shortlist::of(prospects, |p, at| {
        let allowed = placement != Placement::Split || p.seat.role == Role::Both;
        let takes = allowed && policy::takes_whole(&p.seat, ask) && p.seats_prompt(need);
        // Where prompts run, what gives way would have to do so all the time.
        let guest = p.seat.role == Role::Prefill;
        let takes = takes && !(guest && need.manners == Manners::GivesWay);
        takes.then(|| ranks[at].0.saturating_add(ranks[at].1))
    });
    let prompt = |p: &Prospect| p.prompt(need);
    let lead = |prompt: &Prompt| prompt.wait + prompt.run;
    let prompts = prompts.legs(prospects, prompt);
    let soonest = prompts.iter().map(|(_, prompt)| lead(prompt)).min();
    let soonest = soonest.unwrap_or_default();
    let stays = placement == Placement::Auto;
    let streams = Shortlist::of(prospects, |p, at| {
        let takes = placement != Placement::Whole && policy::takes_stream(&p.seat, ask);
        let takes = takes && (!stays || p.seats_stream(need, soonest));
        takes.then(|| ranks[at].1)
    });
    let streams = streams.legs(prospects, |d| Some(d.stream(need, soonest)));
    let mut pairs: Vec<(Rank, Turn, Pair)> = Vec::with_capacity(prompts.len() * streams.len());
    for (p, prompt) in &prompts {
        for (d, stream) in &streams {
            if p.seat.worker != d.seat.worker {
                pairs.push(weighed((*p, *prompt), (*d, *stream), need));
            }
        }
    }
    for (p, prompt) in wholes.legs(prospects, prompt) {
        let stream = p.stream(need, lead(&prompt));
        pairs.push(weighed((p, prompt), (p, stream), need));
    }
    if !need.has_target() {
        // It waits until it harms nobody; there is no target that it could miss.
        pairs.retain(|(.., pair)| pair.harmless());
    }
    pairs.sort_unstable_by_key(|(rank, turn, _)| (*rank, *turn));
    let kept = pairs.iter().take(KEPT);
    let outlooks: Vec<Outlook> = kept.map(|(.., pair)| pair.outlook(need)).collect();
    match outlooks.is_empty() {
        true => Err(NoPlace::Busy),
        false => Ok(outlooks),
    }
}

/// Equals take turns, and whoever serves both legs by its role stays free for the pool that runs short.
type Turn = (bool, u64, u64);

fn weighed<'a>(
    (prefill, prompt): (&'a Prospect<'a>, Prompt),
    (decode, stream): (&'a Prospect<'a>, Stream),
    need: &Need,
) -> (Rank, Turn, Pair<'a>) {
    let pair = Pair {
        prefill,
        prompt,
        decode,
        stream,
    };
    let both = |p: &Prospect| p.seat.role == Role::Both;
    let turn = (
        both(prefill) || both(decode),
        prefill.seat.chosen.max(decode.seat.chosen),
        decode.seat.worker.worker.0,
    );
    (pair.rank(need), turn, pair)
}

/// The least few of many, by index.
struct Shortlist {
    least: Vec<(u64, u64, usize)>,
}

impl Shortlist {
    fn of(prospects: &[Prospect], rank: impl Fn(&Prospect, usize) -> Option<u64>) -> Self {
        let mut least: Vec<(u64, u64, usize)> = Vec::with_capacity(LEGS + 1);
        for (index, prospect) in prospects.iter().enumerate() {
            let Some(rank) = rank(prospect, index) else {
                continue;
            };
            let entry = (rank, prospect.seat.chosen, index);
            if least.len() == LEGS && least.last().is_some_and(|last| *last <= entry) {
                continue;
            }
            let at = least.partition_point(|other| *other < entry);
            least.insert(at, entry);
            least.truncate(LEGS);
        }
        Self { least }
    }

    /// Those of them of which `leg` makes something.
    fn legs<'a, T>(
        &self,
        prospects: &'a [Prospect<'a>],
        leg: impl Fn(&'a Prospect<'a>) -> Option<T>,
    ) -> Vec<(&'a Prospect<'a>, T)> {
        let leg = |(.., index): &(u64, u64, usize)| {
            let prospect = &prospects[*index];
            Some((prospect, leg(prospect)?))
        };
        self.least.iter().filter_map(leg).collect()
    }
}
