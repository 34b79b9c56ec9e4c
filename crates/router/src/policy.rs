//! Which two workers serve an attempt, and where a running sequence moves: filter, score, pick, with
//! a reason.
//!
//! Owns: the placement rules. Never: changes anything, reads a clock, or knows of flights; it sees
//! a snapshot and returns a choice. Costs O(workers): the legs are judged apart, because what
//! makes a good prefill worker and a good decode worker has nothing in common but the link.

use crate::event::{Mode, PlaceReason, Placement};
use cleave_domain::{Capacity, Request, Role, WorkerRef};

/// A running sequence slows a prompt on the same worker about as much as this many queued prompt
/// tokens; it weighs the two legs against each other when one worker serves both.
const SEQUENCE_AS_TOKENS: u64 = 64;
/// What sending every block weighs against a full decode worker, in thousandths.
const TRANSFER_WEIGHT: u64 = 125;

/// What placing needs to know of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Tokens to compute: the prompt and what was generated before.
    pub prompt_tokens: u32,
    /// The longest the sequence may become.
    pub tokens_max: u32,
    /// How long it is expected to become; never less than `prompt_tokens + 1`.
    pub tokens_expected: u32,
}

impl Ask {
    /// One token in, one out.
    pub const SHORTEST: Self = Self {
        prompt_tokens: 1,
        tokens_max: 2,
        tokens_expected: 2,
    };

    /// What `request` asks of a fleet, counting on `output` further tokens.
    pub fn of(request: &Request, output: u32) -> Self {
        let generated = request.generated.len() as u32;
        let prompt_tokens = request.prompt.len() as u32 + generated;
        let left = request.stop.max_tokens.saturating_sub(generated).max(1);
        Self {
            prompt_tokens,
            tokens_max: prompt_tokens.saturating_add(left),
            tokens_expected: prompt_tokens + left.min(output.max(1)),
        }
    }
}

/// A worker as placing sees it: its last report and what was promised to it since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Who.
    pub worker: WorkerRef,
    /// Which legs it serves.
    pub role: Role,
    /// Not to be chosen now: it refused or failed a moment ago. It still counts as existing.
    pub shut: bool,
    /// It is about to run out of blocks: it takes no sequence more.
    pub crowded: bool,
    /// What it can hold.
    pub capacity: Capacity,
    /// Blocks free after every promise is kept.
    pub blocks_free: u32,
    /// Sequences it runs, has waiting, or was promised.
    pub sequences: u32,
    /// Prompts it queues at most.
    pub queue_max: u32,
    /// Prompts it was given and has not finished.
    pub prompts_open: u32,
    /// Prompt tokens it has yet to compute.
    pub queue_tokens: u64,
    /// Leading blocks of this request in its prefix cache.
    pub cached_blocks: u32,
    /// When it was last chosen, as a count; breaks ties so that equals take turns.
    pub chosen: u64,
}

/// Where the legs go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Runs the prompt.
    pub prefill: WorkerRef,
    /// Generates.
    pub decode: WorkerRef,
    /// Prompt tokens the prefill worker is believed to have cached.
    pub cached_tokens: u32,
    /// Lower is better; compares choices of different groups.
    pub cost: u64,
    /// Why it was chosen.
    pub reason: PlaceReason,
}

/// Why there is no choice. The order is that of hope: the greatest is the one to report when
/// several groups of workers were asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoPlace {
    /// No pair of legs is connected.
    NoWorker,
    /// No pair could ever hold it; this many tokens is the most that one could.
    TooLong {
        /// Tokens.
        tokens_max: u32,
    },
    /// A pair exists, and has no room now.
    Busy,
}

/// What routing goes by, and which shapes it may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// `Slo` is read as `Load`: prices are needed for more.
    pub mode: Mode,
    /// `Auto` is read as `Split`, for the same reason.
    pub placement: Placement,
}

/// Chooses among workers that may exchange blocks with each other, by load or by turns.
///
/// # Errors
/// Says why nobody was chosen.
pub fn choose(candidates: &[Candidate], ask: &Ask, terms: Terms) -> Result<Choice, NoPlace> {
    let placement = match terms.placement {
        Placement::Whole => Placement::Whole,
        Placement::Auto | Placement::Split => Placement::Split,
    };
    exists(candidates.iter(), ask, placement)?;
    let (prefill, decode, reason) = match (terms.mode, placement) {
        (Mode::RoundRobin, _) => {
            let (prefill, decode) = by_turns(candidates, ask, placement)?;
            (prefill, decode, PlaceReason::Turn)
        }
        (_, Placement::Whole) => {
            let anywhere = best(candidates, |c| {
                takes_whole(c, ask).then(|| whole_cost(c, ask))
            });
            let (_, whole) = anywhere.ok_or(NoPlace::Busy)?;
            (whole, whole, PlaceReason::Load)
        }
        _ => {
            let (prefill, decode) = by_load(candidates, ask)?;
            (prefill, decode, PlaceReason::Load)
        }
    };
    let cached_tokens = prefill.cached_tokens(ask);
    let cost = (ask.prompt_tokens as u64 - cached_tokens as u64)
        .saturating_add(prefill.queue_tokens)
        .saturating_add(decode.sequences as u64 * SEQUENCE_AS_TOKENS);
    Ok(Choice {
        prefill: prefill.worker,
        decode: decode.worker,
        cached_tokens,
        cost,
        reason,
    })
}

fn by_load(candidates: &[Candidate], ask: &Ask) -> Result<(Candidate, Candidate), NoPlace> {
    let prefill = best(candidates, |c| {
        takes_prompt(c, ask).then(|| prefill_cost(c, ask))
    });
    let decode = best(candidates, |c| {
        takes_stream(c, ask).then(|| decode_cost(c, ask))
    });
    match (prefill, decode) {
        // Two workers that serve both legs gain nothing from a hand-off between them.
        (Some((_, p)), Some((_, d))) if p.role == Role::Both && d.role == Role::Both => {
            let both = |c: &Candidate| takes_prompt(c, ask) && takes_stream(c, ask);
            let whole = best(candidates, |c| both(c).then(|| whole_cost(c, ask)));
            let (_, both) = whole.ok_or(NoPlace::Busy)?;
            Ok((both, both))
        }
        (Some((_, p)), Some((_, d))) => Ok((p, d)),
        _ => Err(NoPlace::Busy),
    }
}

/// Whoever was chosen longest ago, each leg for itself; a worker whose turn both legs are serves both.
fn by_turns(
    candidates: &[Candidate],
    ask: &Ask,
    placement: Placement,
) -> Result<(Candidate, Candidate), NoPlace> {
    let next = |takes: fn(&Candidate, &Ask) -> bool| {
        let able = candidates.iter().filter(|c| takes(c, ask));
        able.min_by_key(|c| (c.chosen, c.worker)).copied()
    };
    if placement == Placement::Whole {
        let whole = next(takes_whole).ok_or(NoPlace::Busy)?;
        return Ok((whole, whole));
    }
    let prefill = next(takes_prompt).ok_or(NoPlace::Busy)?;
    let decode = next(takes_stream).ok_or(NoPlace::Busy)?;
    if prefill.role == Role::Both && decode.role == Role::Both {
        let both = next(|c, ask| takes_prompt(c, ask) && takes_stream(c, ask));
        let both = both.ok_or(NoPlace::Busy)?;
        return Ok((both, both));
    }
    Ok((prefill, decode))
}

/// Chooses where a running sequence goes on; the worker that it leaves is not among the candidates.
/// It needs no prompt run, only a seat and blocks.
///
/// # Errors
/// Says why nobody was chosen.
pub fn choose_target(candidates: &[Candidate], ask: &Ask) -> Result<WorkerRef, NoPlace> {
    let able = |c: &Candidate| takes_stream(c, ask);
    if let Some((_, target)) = best(candidates, |c| able(c).then(|| decode_cost(c, ask))) {
        return Ok(target.worker);
    }
    let decode = || candidates.iter().filter(|c| c.role.decodes());
    let tokens_max = decode().map(Candidate::tokens_max).max();
    let tokens_max = tokens_max.ok_or(NoPlace::NoWorker)?;
    match decode().any(|c| c.holds_whole(ask)) {
        true => Err(NoPlace::Busy),
        false => Err(NoPlace::TooLong { tokens_max }),
    }
}

/// Whether `candidate` could now take one of the legs; tells whether news of it is worth a look
/// at the queue.
pub fn has_room(candidate: &Candidate, ask: &Ask, placement: Placement) -> bool {
    let whole = placement != Placement::Split && takes_whole(candidate, ask);
    whole || takes_prompt(candidate, ask) || takes_stream(candidate, ask)
}

// === filter ===

/// Whether it could take the prompt for another.
pub(crate) fn takes_prompt(c: &Candidate, ask: &Ask) -> bool {
    c.role.prefills() && prompt_room(c, ask)
}

/// Whether it could generate for another.
pub(crate) fn takes_stream(c: &Candidate, ask: &Ask) -> bool {
    c.role.decodes() && stream_room(c, ask)
}

/// Whether it could do both for itself, which is any worker's business.
pub(crate) fn takes_whole(c: &Candidate, ask: &Ask) -> bool {
    prompt_room(c, ask) && stream_room(c, ask)
}

fn prompt_room(c: &Candidate, ask: &Ask) -> bool {
    !c.shut && ask.prompt_tokens < c.tokens_max() && c.prompts_open < c.queue_max
}

fn stream_room(c: &Candidate, ask: &Ask) -> bool {
    let able = !c.shut && holds(c, ask) && stores(c, ask);
    able && c.sequences < c.seats()
}

/// Whether it could ever hold the longest that the sequence may become.
pub(crate) fn holds(c: &Candidate, ask: &Ask) -> bool {
    c.holds_whole(ask)
}

/// Whether it has the blocks that the sequence is expected to take.
pub(crate) fn stores(c: &Candidate, ask: &Ask) -> bool {
    let blocks_room = c.blocks_free.saturating_add(c.cached_blocks);
    !c.crowded && c.blocks(ask.tokens_expected) <= blocks_room
}

/// Whether the request could ever be placed.
pub(crate) fn exists<'a>(
    candidates: impl Iterator<Item = &'a Candidate> + Clone,
    ask: &Ask,
    placement: Placement,
) -> Result<(), NoPlace> {
    let pair = pair_exists(candidates.clone(), ask);
    if placement == Placement::Split || (placement == Placement::Auto && pair.is_ok()) {
        return pair;
    }
    let whole_max = candidates.clone().map(Candidate::tokens_max).max();
    let whole_max = whole_max.ok_or(NoPlace::NoWorker)?;
    let mut candidates = candidates;
    match candidates.any(|c| c.holds_whole(ask)) {
        true => Ok(()),
        false => Err(NoPlace::TooLong {
            tokens_max: whole_max,
        }),
    }
}

fn pair_exists<'a>(
    candidates: impl Iterator<Item = &'a Candidate> + Clone,
    ask: &Ask,
) -> Result<(), NoPlace> {
    let longest = |serves: fn(Role) -> bool, holds: fn(&Candidate) -> u32| {
        candidates
            .clone()
            .filter(|c| serves(c.role))
            .map(holds)
            .max()
            .ok_or(NoPlace::NoWorker)
    };
    let prompt_max = longest(Role::prefills, Candidate::tokens_max)?;
    let whole_max = longest(Role::decodes, Candidate::tokens_max)?;
    // A sequence ends at the context's end whatever `max_tokens` says, so only the pool bounds it.
    let pool_max = longest(Role::decodes, Candidate::pool_tokens)?;
    let mut candidates = candidates;
    let fits = ask.prompt_tokens < prompt_max.min(whole_max)
        && candidates.any(|c| c.role.decodes() && c.holds_whole(ask));
    if fits {
        Ok(())
    } else {
        Err(NoPlace::TooLong {
            tokens_max: prompt_max.min(whole_max).min(pool_max),
        })
    }
}

impl Candidate {
    fn pool_tokens(&self) -> u32 {
        self.capacity
            .blocks_count
            .saturating_mul(self.capacity.block_tokens)
    }

    fn tokens_max(&self) -> u32 {
        self.capacity.context_tokens_max.min(self.pool_tokens())
    }

    fn blocks(&self, tokens: u32) -> u32 {
        tokens
            .min(self.capacity.context_tokens_max)
            .div_ceil(self.capacity.block_tokens)
    }

    fn holds_whole(&self, ask: &Ask) -> bool {
        ask.prompt_tokens < self.tokens_max()
            && self.blocks(ask.tokens_max) <= self.capacity.blocks_count
    }

    /// At least one token is always computed: its logits are what the prompt is run for.
    pub(crate) fn cached_tokens(&self, ask: &Ask) -> u32 {
        let tokens = self
            .cached_blocks
            .saturating_mul(self.capacity.block_tokens);
        tokens.min(ask.prompt_tokens - 1)
    }

    /// Bytes of the blocks of the prompt that it does not have.
    pub(crate) fn blocks_to_send(&self, ask: &Ask) -> u64 {
        let blocks = self.blocks(ask.prompt_tokens);
        let sent = blocks.saturating_sub(self.cached_blocks);
        u64::from(sent) * u64::from(self.capacity.block_bytes)
    }

    /// Seats are overbooked by a quarter: a sequence is promised one while its prompt still runs.
    fn seats(&self) -> u32 {
        let slots = self.capacity.slots_count;
        slots.saturating_add(slots.div_ceil(4))
    }
}

// === score ===

fn prefill_cost(c: &Candidate, ask: &Ask) -> u64 {
    let tokens = ask.prompt_tokens - c.cached_tokens(ask);
    c.queue_tokens.saturating_add(u64::from(tokens))
}

fn decode_cost(c: &Candidate, ask: &Ask) -> u64 {
    let held = u64::from(c.capacity.blocks_count.saturating_sub(c.blocks_free));
    let fill_blocks = held * 1000 / u64::from(c.capacity.blocks_count.max(1));
    let fill_slots = u64::from(c.sequences) * 1000 / u64::from(c.capacity.slots_count.max(1));
    let prompt = u64::from(c.blocks(ask.prompt_tokens)).max(1);
    let sent = prompt.saturating_sub(u64::from(c.cached_blocks));
    fill_blocks.max(fill_slots) + sent * TRANSFER_WEIGHT / prompt
}

fn whole_cost(c: &Candidate, ask: &Ask) -> u64 {
    let sequences = u64::from(c.sequences) * SEQUENCE_AS_TOKENS;
    prefill_cost(c, ask).saturating_add(sequences)
}

// === pick ===

/// Dedicated workers come first, so that a worker of both legs stays free for whichever pool runs
/// short; then the cheapest; then the one that was chosen longest ago.
fn best(
    candidates: &[Candidate],
    cost: impl Fn(&Candidate) -> Option<u64>,
) -> Option<(u64, Candidate)> {
    candidates
        .iter()
        .filter_map(|c| cost(c).map(|cost| (cost, c)))
        .min_by_key(|(cost, c)| (c.role == Role::Both, *cost, c.chosen, c.worker))
        .map(|(cost, c)| (cost, *c))
}
