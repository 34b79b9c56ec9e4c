//! The choice of two workers for an attempt, and of a target for a move: filter, score, pick,
//! with a reason.
//!
//! Owns: the placement rules. Never: changes anything, reads a clock, or knows of flights; it sees
//! a snapshot and returns a choice. Costs O(workers): the legs are judged separately, because the
//! qualities of a good prefill worker and a good decode worker have nothing in common but the link.

use crate::event::{LegPlacement, PlacementReason, RoutingMode};
use cleave_domain::{AdapterPlace, Capacity, Request, Role, WorkerRef};

/// A running sequence slows a prompt on the same worker about as much as this many queued prompt
/// tokens; it weighs the two legs against each other when one worker serves both.
const SEQUENCE_AS_TOKENS: u64 = 64;
/// Cost of sending every block, relative to a full decode worker, in thousandths.
const TRANSFER_WEIGHT: u64 = 125;

/// An adapter that is to be loaded delays a prompt about as much as this many queued tokens.
const LOAD_AS_TOKENS: u64 = 512;
/// Cost of loading it, relative to a full decode worker, in thousandths: streams with the same
/// adapter gather where it is loaded, as long as that worker is not much fuller than others.
const LOAD_WEIGHT: u64 = 250;
/// An adapter with a copy in host memory costs one part in this many of one that is read from a
/// disk.
const LOAD_FROM_HOST_PARTS: u64 = 4;

/// The size of an attempt, as placement needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptSize {
    /// Tokens to compute: the prompt and earlier output.
    pub prompt_tokens: u32,
    /// The longest the sequence may become.
    pub tokens_max: u32,
    /// Expected final length; never less than `prompt_tokens + 1`.
    pub tokens_expected: u32,
    /// A pooled request: only workers that serve prefill legs take it, and nothing is decoded.
    pub prefill_only: bool,
}

impl AttemptSize {
    /// One token in, one out.
    pub const SHORTEST: Self = Self {
        prompt_tokens: 1,
        tokens_max: 2,
        tokens_expected: 2,
        prefill_only: false,
    };

    /// The size of `request`, with at most `output` further tokens expected.
    pub fn of(request: &Request, output: u32) -> Self {
        let generated = request.generated.len() as u32;
        let prompt_tokens = request.prompt.len() as u32 + generated;
        let left = request.stop.max_tokens.saturating_sub(generated).max(1);
        Self {
            prompt_tokens,
            tokens_max: prompt_tokens.saturating_add(left),
            tokens_expected: prompt_tokens + left.min(output.max(1)),
            prefill_only: request.pooling.is_some(),
        }
    }
}

/// A worker as placement sees it: its last report with later claims added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerSnapshot {
    pub worker: WorkerRef,
    pub role: Role,
    /// Not to be chosen now: it refused or failed a moment ago. It still counts as existing.
    pub closed: bool,
    /// It is about to run out of blocks: it takes no further sequence.
    pub memory_short: bool,
    pub capacity: Capacity,
    /// Blocks free after all claims.
    pub blocks_free: u32,
    /// State slots free after all claims; 0 where the model has no states.
    pub states_free: u32,
    /// Blocks of the window plane free after all claims; 0 where the model has no such plane.
    pub windows_free: u32,
    /// Sequences that it runs, has waiting, or is to receive.
    pub sequences: u32,
    /// Upper limit of queued prompts.
    pub queue_max: u32,
    /// Prompts that it was given and has not finished.
    pub prompts_open: u32,
    /// Prompt tokens it has yet to compute.
    pub queue_tokens: u64,
    /// Leading blocks of this request in its prefix cache.
    pub cached_blocks: u32,
    /// The leading ones of them after which it can continue a prompt: all of them, or those before
    /// its last snapshot of a state, where the model has states.
    pub hit_blocks: u32,
    /// The place of the request's LoRA adapter, which is to be loaded first unless it is resident.
    pub adapter_place: AdapterPlace,
    /// When it was last chosen, as a count; breaks ties so that equals take turns.
    pub chosen: u64,
}

/// The chosen workers of the legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegChoice {
    pub prefill: WorkerRef,
    pub decode: WorkerRef,
    /// Prompt tokens the prefill worker is believed to have cached.
    pub cached_tokens: u32,
    /// Lower is better; compares choices of different groups.
    pub cost: u64,
    pub reason: PlacementReason,
}

/// Why there is no choice, ordered so that the greatest is the one to report when several groups of
/// workers were tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoPlacement {
    /// No pair of legs is connected.
    NoWorker,
    /// No pair could ever hold it; this many tokens is the most that one could.
    TooLong { tokens_max: u32 },
    /// A pair exists, and has no room now.
    Busy,
}

/// Routing mode, and the permitted shapes of a placement. Where prices are known and the mode is
/// `Slo`, `judge` chooses, and [`choose`] is not called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingTerms {
    /// Basis of the choice. [`choose`] has no prices, and treats `Slo` as `Load`.
    pub mode: RoutingMode,
    /// Whether one worker may serve both legs. [`choose`] has no prices to compare both shapes, and
    /// treats `Auto` as `Split`.
    pub placement: LegPlacement,
}

/// Chooses among workers that may exchange blocks with each other, by load or round robin.
///
/// # Errors
/// Returns why none was chosen.
pub fn choose(
    candidates: &[WorkerSnapshot],
    ask: &AttemptSize,
    terms: RoutingTerms,
) -> Result<LegChoice, NoPlacement> {
    let placement = match terms.placement {
        LegPlacement::Whole => LegPlacement::Whole,
        LegPlacement::Auto | LegPlacement::Split => LegPlacement::Split,
    };
    placement_exists(candidates.iter(), ask, placement)?;
    let (prefill, decode, reason) = match (terms.mode, placement) {
        (RoutingMode::RoundRobin, _) => {
            let (prefill, decode) = by_turns(candidates, ask, placement)?;
            (prefill, decode, PlacementReason::Turn)
        }
        (_, LegPlacement::Whole) => {
            let anywhere = best(candidates, |c| {
                takes_whole(c, ask).then(|| whole_cost(c, ask))
            });
            let (_, whole) = anywhere.ok_or(NoPlacement::Busy)?;
            (whole, whole, PlacementReason::Load)
        }
        _ => {
            let (prefill, decode) = by_load(candidates, ask)?;
            (prefill, decode, PlacementReason::Load)
        }
    };
    let cached_tokens = prefill.cached_tokens(ask);
    let cost = (ask.prompt_tokens as u64 - cached_tokens as u64)
        .saturating_add(prefill.queue_tokens)
        .saturating_add(decode.sequences as u64 * SEQUENCE_AS_TOKENS);
    Ok(LegChoice {
        prefill: prefill.worker,
        decode: decode.worker,
        cached_tokens,
        cost,
        reason,
    })
}

fn by_load(
    candidates: &[WorkerSnapshot],
    ask: &AttemptSize,
) -> Result<(WorkerSnapshot, WorkerSnapshot), NoPlacement> {
    let prefill = best(candidates, |c| {
        takes_prompt(c, ask).then(|| prefill_cost(c, ask))
    });
    let decode = best(candidates, |c| {
        takes_stream(c, ask).then(|| decode_cost(c, ask))
    });
    match (prefill, decode) {
        // Two workers that serve both legs gain nothing from a hand-off between them.
        (Some((_, p)), Some((_, d))) if p.role == Role::Both && d.role == Role::Both => {
            let both = |c: &WorkerSnapshot| takes_prompt(c, ask) && takes_stream(c, ask);
            let whole = best(candidates, |c| both(c).then(|| whole_cost(c, ask)));
            let (_, both) = whole.ok_or(NoPlacement::Busy)?;
            Ok((both, both))
        }
        (Some((_, p)), Some((_, d))) => Ok((p, d)),
        _ => Err(NoPlacement::Busy),
    }
}

/// The worker chosen longest ago, for each leg separately; a worker of both roles serves both legs
/// if both would go to such workers.
fn by_turns(
    candidates: &[WorkerSnapshot],
    ask: &AttemptSize,
    placement: LegPlacement,
) -> Result<(WorkerSnapshot, WorkerSnapshot), NoPlacement> {
    let next = |takes: fn(&WorkerSnapshot, &AttemptSize) -> bool| {
        let able = candidates.iter().filter(|c| takes(c, ask));
        able.min_by_key(|c| (c.chosen, c.worker)).copied()
    };
    if placement == LegPlacement::Whole {
        let whole = next(takes_whole).ok_or(NoPlacement::Busy)?;
        return Ok((whole, whole));
    }
    let prefill = next(takes_prompt).ok_or(NoPlacement::Busy)?;
    let decode = next(takes_stream).ok_or(NoPlacement::Busy)?;
    if prefill.role == Role::Both && decode.role == Role::Both {
        let both = next(|c, ask| takes_prompt(c, ask) && takes_stream(c, ask));
        let both = both.ok_or(NoPlacement::Busy)?;
        return Ok((both, both));
    }
    Ok((prefill, decode))
}

/// Chooses a target for a running sequence; the worker that it leaves is not among the candidates.
/// The sequence needs no prompt run, only a slot and blocks.
///
/// # Errors
/// Returns why none was chosen.
pub fn choose_target(
    candidates: &[WorkerSnapshot],
    ask: &AttemptSize,
) -> Result<WorkerRef, NoPlacement> {
    let able = |c: &WorkerSnapshot| takes_stream(c, ask);
    if let Some((_, target)) = best(candidates, |c| able(c).then(|| decode_cost(c, ask))) {
        return Ok(target.worker);
    }
    let decode = || candidates.iter().filter(|c| c.role.decodes());
    let tokens_max = decode().map(WorkerSnapshot::tokens_max).max();
    let tokens_max = tokens_max.ok_or(NoPlacement::NoWorker)?;
    if decode().any(|c| c.holds_whole(ask)) {
        Err(NoPlacement::Busy)
    } else {
        Err(NoPlacement::TooLong { tokens_max })
    }
}

/// Whether `candidate` could now take one of the legs, so that news of it justifies a pass over the
/// queue.
pub fn has_room(candidate: &WorkerSnapshot, ask: &AttemptSize, placement: LegPlacement) -> bool {
    let whole = placement != LegPlacement::Split && takes_whole(candidate, ask);
    whole || takes_prompt(candidate, ask) || takes_stream(candidate, ask)
}

// === filter ===

/// Whether it could take the prompt for another worker.
pub(crate) fn takes_prompt(c: &WorkerSnapshot, ask: &AttemptSize) -> bool {
    c.role.prefills() && !ask.prefill_only && has_prompt_room(c, ask)
}

/// Whether it could decode for another worker.
pub(crate) fn takes_stream(c: &WorkerSnapshot, ask: &AttemptSize) -> bool {
    c.role.decodes() && !ask.prefill_only && has_stream_room(c, ask, c.cached_blocks)
}

/// Whether it could do both for itself, which any role permits, or all of a pooled request.
pub(crate) fn takes_whole(c: &WorkerSnapshot, ask: &AttemptSize) -> bool {
    if ask.prefill_only && !c.role.prefills() {
        return false;
    }
    // Blocks behind the last snapshot are computed again, into blocks of its own.
    has_prompt_room(c, ask) && has_stream_room(c, ask, c.hit_blocks)
}

fn has_prompt_room(c: &WorkerSnapshot, ask: &AttemptSize) -> bool {
    let able =
        !c.closed && ask.prompt_tokens < c.tokens_max() && c.has_state() && c.has_window(ask);
    able && c.prompts_open < c.queue_max
}

fn has_stream_room(c: &WorkerSnapshot, ask: &AttemptSize, cached_blocks: u32) -> bool {
    let able = !c.closed && fits_ever(c, ask) && has_memory(c, ask, cached_blocks);
    able && c.sequences < c.slots_overbooked()
}

/// Whether it could ever hold the longest that the sequence may become.
pub(crate) fn fits_ever(c: &WorkerSnapshot, ask: &AttemptSize) -> bool {
    c.holds_whole(ask)
}

/// Whether it has the blocks that the sequence is expected to take, besides those that are cached,
/// and a state slot.
pub(crate) fn has_memory(c: &WorkerSnapshot, ask: &AttemptSize, cached_blocks: u32) -> bool {
    let blocks_usable = c.blocks_free.saturating_add(cached_blocks);
    !c.memory_short
        && c.blocks(ask.tokens_expected) <= blocks_usable
        && c.has_state()
        && c.has_window(ask)
}

/// Whether the request could ever be placed.
pub(crate) fn placement_exists<'a>(
    candidates: impl Iterator<Item = &'a WorkerSnapshot> + Clone,
    ask: &AttemptSize,
    placement: LegPlacement,
) -> Result<(), NoPlacement> {
    let serves = |c: &&WorkerSnapshot| !ask.prefill_only || c.role.prefills();
    let candidates = candidates.filter(serves);
    let pair = pair_exists(candidates.clone(), ask);
    if placement == LegPlacement::Split || (placement == LegPlacement::Auto && pair.is_ok()) {
        return pair;
    }
    let whole_max = candidates.clone().map(WorkerSnapshot::tokens_max).max();
    let whole_max = whole_max.ok_or(NoPlacement::NoWorker)?;
    let mut candidates = candidates;
    if candidates.any(|c| c.holds_whole(ask)) {
        Ok(())
    } else {
        Err(NoPlacement::TooLong {
            tokens_max: whole_max,
        })
    }
}

fn pair_exists<'a>(
    candidates: impl Iterator<Item = &'a WorkerSnapshot> + Clone,
    ask: &AttemptSize,
) -> Result<(), NoPlacement> {
    let longest = |serves: fn(Role) -> bool, holds: fn(&WorkerSnapshot) -> u32| {
        candidates
            .clone()
            .filter(|c| serves(c.role))
            .map(holds)
            .max()
            .ok_or(NoPlacement::NoWorker)
    };
    let prompt_max = longest(Role::prefills, WorkerSnapshot::tokens_max)?;
    let whole_max = longest(Role::decodes, WorkerSnapshot::tokens_max)?;
    // A sequence ends at the context limit whatever `max_tokens` is, so only the pool bounds it.
    let pool_max = longest(Role::decodes, WorkerSnapshot::pool_tokens)?;
    let mut candidates = candidates;
    let fits = ask.prompt_tokens < prompt_max.min(whole_max)
        && candidates.any(|c| c.role.decodes() && c.holds_whole(ask));
    if fits {
        Ok(())
    } else {
        Err(NoPlacement::TooLong {
            tokens_max: prompt_max.min(whole_max).min(pool_max),
        })
    }
}

impl WorkerSnapshot {
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

    fn holds_whole(&self, ask: &AttemptSize) -> bool {
        ask.prompt_tokens < self.tokens_max()
            && self.blocks(ask.tokens_max) <= self.capacity.blocks_count
    }

    /// Whether it has a slot for the state of one more sequence, if the model has states.
    fn has_state(&self) -> bool {
        self.capacity.states.is_none() || self.states_free > 0
    }

    /// Whether it has the window of one more sequence, if the model has such a plane. A prompt may
    /// need more, for its chunks: then the worker refuses it.
    fn has_window(&self, ask: &AttemptSize) -> bool {
        self.capacity.window().is_none_or(|window| {
            let blocks = self.blocks(ask.prompt_tokens).min(window.blocks_max(1));
            blocks <= self.windows_free
        })
    }

    /// At least one token is always computed: its logits give the first output token.
    pub(crate) fn cached_tokens(&self, ask: &AttemptSize) -> u32 {
        let tokens = self.hit_blocks.saturating_mul(self.capacity.block_tokens);
        tokens.min(ask.prompt_tokens - 1)
    }

    /// Bytes of the prompt's blocks that it does not have, and of the prompt's window.
    pub(crate) fn blocks_to_send(&self, ask: &AttemptSize) -> u64 {
        let blocks = self.blocks(ask.prompt_tokens);
        let sent = blocks.saturating_sub(self.cached_blocks);
        let live = self.capacity.window().map_or(0, |window| {
            blocks.saturating_sub(window.first_block(ask.prompt_tokens))
        });
        let window_bytes = self.capacity.windows.map_or(0, |windows| windows.bytes);
        u64::from(sent) * u64::from(self.capacity.block_bytes)
            + u64::from(live) * u64::from(window_bytes)
    }

    /// Slots are overbooked by a quarter: a sequence is promised one while its prompt still runs
    /// elsewhere.
    fn slots_overbooked(&self) -> u32 {
        let slots = self.capacity.slots_count;
        slots.saturating_add(slots.div_ceil(4))
    }
}

// === score ===

/// The part of the cost of a load that an adapter in this place has.
fn by_place(place: AdapterPlace, cost: u64) -> u64 {
    match place {
        AdapterPlace::Resident => 0,
        AdapterPlace::InHost => cost / LOAD_FROM_HOST_PARTS,
        AdapterPlace::OnDisk => cost,
    }
}

fn prefill_cost(c: &WorkerSnapshot, ask: &AttemptSize) -> u64 {
    let tokens = ask.prompt_tokens - c.cached_tokens(ask);
    let load = by_place(c.adapter_place, LOAD_AS_TOKENS);
    c.queue_tokens
        .saturating_add(u64::from(tokens))
        .saturating_add(load)
}

fn decode_cost(c: &WorkerSnapshot, ask: &AttemptSize) -> u64 {
    let held = u64::from(c.capacity.blocks_count.saturating_sub(c.blocks_free));
    let fill_blocks = held * 1000 / u64::from(c.capacity.blocks_count.max(1));
    let fill_slots = u64::from(c.sequences) * 1000 / u64::from(c.capacity.slots_count.max(1));
    let prompt = u64::from(c.blocks(ask.prompt_tokens)).max(1);
    let sent = prompt.saturating_sub(u64::from(c.cached_blocks));
    let load = by_place(c.adapter_place, LOAD_WEIGHT);
    fill_blocks.max(fill_slots) + sent * TRANSFER_WEIGHT / prompt + load
}

fn whole_cost(c: &WorkerSnapshot, ask: &AttemptSize) -> u64 {
    let sequences = u64::from(c.sequences) * SEQUENCE_AS_TOKENS;
    prefill_cost(c, ask).saturating_add(sequences)
}

// === pick ===

/// Workers of one role come first, so that a worker of both roles stays free for the pool that runs
/// short; then the cheapest; then the one that was chosen longest ago.
fn best(
    candidates: &[WorkerSnapshot],
    cost: impl Fn(&WorkerSnapshot) -> Option<u64>,
) -> Option<(u64, WorkerSnapshot)> {
    candidates
        .iter()
        .filter_map(|c| cost(c).map(|cost| (cost, c)))
        .min_by_key(|(cost, c)| (c.role == Role::Both, *cost, c.chosen, c.worker))
        .map(|(cost, c)| (cost, *c))
}
