//! The next step: which sequences run how many tokens.
//!
//! Owns: slots, growth, the choice of sequences that give up blocks, and the joint batch: decode
//! tokens first, prompt chunks in the room that is left, drafts last. Never: waits for anything;
//! what cannot run now is tried again in the next step.
//! Invariant: the most important active sequence runs in every step, unless every slot or every
//! block is held by sequences that will run without it, the blocks it is given were being filled
//! from a tier and are free once that has stopped, or it has the slack to be deferred once.

use crate::admit::CacheReuse;
use crate::batch::ReadyBlocks;
use crate::batch::SegmentInFlight;
use crate::batch::targets::{self, DecodeCandidate, IDLE_MAX};
use crate::handoff::CloseReason;
use crate::memory::BlockRelease;
use crate::policy::{self, PreemptionVictim, ServiceRank};
use crate::sequences::{SequencePhase, WorkerSequence};
use crate::{DraftOutcome, WorkerBrain, WorkerNote, WorkerOutput};
use cleave_domain::{Failure, HandoffId, Segment, StepPlan, StepWork};
use cleave_planner::{ChunkRoom, Predict, chunk_tokens_within};

/// A step being put together.
pub(crate) struct StepBuilder {
    pub(crate) plan: StepPlan,
    /// In the order of the plan's segments.
    pub(crate) segments: Vec<SegmentInFlight>,
    /// Tokens that the step still has room for.
    tokens_left: u32,
    /// Work in the step, with the targets of its streams.
    pub(crate) held: targets::BatchLoad,
    /// Sequences that must wait for a copy to end.
    pub(crate) waiting: Vec<HandoffId>,
    /// Sequences deferred to a later step.
    deferred: Vec<HandoffId>,
    /// Blocks being freed that sequences of `waiting` will take.
    blocks_awaited: u64,
    /// A prompt got a block of tokens beyond what the streams have slack for; at most one does in a
    /// step.
    late_prompt_placed: bool,
}

/// Whether a sequence can run a chunk now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkReadiness {
    /// It has a slot and its blocks.
    Ready,
    /// It has its blocks, and some of them are being filled from a tier: it runs after that.
    Fetching,
    /// There are not enough blocks.
    NoBlocks,
}

impl WorkerBrain {
    /// Emits a step if none is under way and there is something to run, and the one after it if
    /// that is already determined.
    pub(crate) fn plan(&mut self) {
        if self.steps.is_empty() {
            self.plan_anew();
        }
        self.plan_ahead();
    }

    fn plan_anew(&mut self) {
        let mut draft = StepBuilder {
            plan: StepPlan::default(),
            segments: Vec::new(),
            tokens_left: self.context.limits().capacity.step_tokens_max,
            held: targets::BatchLoad::default(),
            waiting: Vec::new(),
            deferred: Vec::new(),
            blocks_awaited: 0,
            late_prompt_placed: false,
        };
        self.recompute_lost_states(&mut draft);
        // Decodes first: a stream that draws late is noticed at every token. Chunks then fill the
        // rows and the time that the streams leave, and drafts take only what remains.
        self.place_decodes(&mut draft);
        self.place_chunks(&mut draft);
        let drafting = self.place_drafts(&mut draft);
        if !draft.segments.is_empty() {
            self.emit_step(draft.plan, draft.segments, drafting);
        }
    }

    /// Emits the step and records it as under way; `placed` is in the order of the plan's segments.
    pub(crate) fn emit_step(
        &mut self,
        plan: StepPlan,
        placed: Vec<SegmentInFlight>,
        drafting: Option<DraftOutcome>,
    ) {
        let (now, forecast) = (self.context.now(), &self.forecast);
        let plan = self.steps.begin(plan, placed, drafting, forecast, now);
        self.fetches_wait_for_step();
        self.context.emit(WorkerOutput::Step(plan));
        self.pressure
            .request_migration(&mut self.context, &self.sequences, &self.pools);
    }

    /// Ranks of the active sequences for which `pick` holds, the most important first.
    pub(crate) fn active_where(&self, pick: impl Fn(&WorkerSequence) -> bool) -> Vec<ServiceRank> {
        let picked = |rank: &&ServiceRank| pick(&self.sequences[&rank.handoff]);
        self.active.iter().filter(picked).copied().collect()
    }

    /// Gives free slots to sequences whose KV is here before prompts get any: their clients already
    /// read a stream.
    fn give_slots_to_landed(&mut self) {
        if self.slots_free.is_empty() {
            return;
        }
        for rank in self.active_where(WorkerSequence::awaits_slot) {
            let Some(sequence) = self.sequences.get_mut(&rank.handoff) else {
                continue;
            };
            let Some(slot) = self.slots_free.pop_first() else {
                return;
            };
            sequence.slot = Some(slot);
        }
    }

    // === decode ===

    fn place_decodes(&mut self, draft: &mut StepBuilder) {
        // A sequence that gives up its slot makes room for another that landed, hence the loop.
        loop {
            self.give_slots_to_landed();
            let one = self.active_where(|s| {
                let handoff = &s.rank.handoff;
                let waits = draft.waiting.contains(handoff) || draft.deferred.contains(handoff);
                s.slot.is_some() && s.tokens_to_run() == 1 && !s.stepping() && !waits
            });
            if !one.is_empty() {
                // Streams whose presence would break a tighter stream's target wait for a later
                // step.
                let out = self.sit_out(&one, draft);
                let chosen = one.into_iter().filter(|rank| !out.contains(&rank.handoff));
                let chosen: Vec<ServiceRank> = chosen.collect();
                draft.deferred.extend(out);
                for rank in chosen {
                    self.place_decode(rank, draft);
                }
            } else if draft.segments.is_empty() && !draft.deferred.is_empty() {
                // The sequences for which others were deferred cannot run, so the deferred ones
                // may.
                draft.deferred.clear();
            } else {
                return;
            }
        }
    }

    pub(crate) fn candidate(&self, rank: ServiceRank) -> Option<DecodeCandidate> {
        let sequence = self.sequences.get(&rank.handoff)?;
        let gap = self.forecast.keepable_gap(sequence, self.context.now());
        Some(DecodeCandidate {
            rank,
            context_tokens: u64::from(sequence.len()),
            target: gap.zip(sequence.token_due()),
            last_run_at: sequence.client_timing.last_run_at,
        })
    }

    /// Streams that could run and are deferred, because they would break the target of one that
    /// runs.
    fn sit_out(&self, ranks: &[ServiceRank], draft: &StepBuilder) -> Vec<HandoffId> {
        let candidates = ranks.iter().filter_map(|rank| self.candidate(*rank));
        let candidates: Vec<_> = candidates.collect();
        targets::deferred(
            self.forecast.prices(),
            draft.held,
            &candidates,
            self.context.now(),
        )
    }

    /// Places one token of a running sequence. If it needs a block and none is left, the least
    /// important sequence gives up its own; none in this draft does, because those in it are more
    /// important. A sequence that needs blocks which are still being copied waits for a later step.
    fn place_decode(&mut self, rank: ServiceRank, draft: &mut StepBuilder) {
        let handoff = rank.handoff;
        let capacity = self.context.limits().capacity;
        loop {
            let Some(sequence) = self.sequences.get_mut(&handoff) else {
                return;
            };
            // It may have become a victim since it was listed.
            if sequence.slot.is_none() {
                return;
            }
            // A block or state that a move still reads must not be written: the sequence waits for
            // the copy.
            if self.last_block_is_read(&self.sequences[&handoff]) {
                return draft.waiting.push(handoff);
            }
            let Some(sequence) = self.sequences.get_mut(&handoff) else {
                return;
            };
            // A sequence longer than the whole pool can never grow: it fails.
            let blocks = sequence.len().div_ceil(capacity.block_tokens);
            if blocks > capacity.blocks_count {
                return self.close(handoff, CloseReason::Failed(Failure::OutOfBlocks));
            }
            if sequence.table.len() >= blocks as usize {
                break;
            }
            // Its own reservation first, then any free or cached block.
            let block = self.pools.blocks.take_reserved(&mut sequence.reservation);
            if let Some(block) = block.or_else(|| self.pools.blocks.take()) {
                sequence.table.push(block);
                continue;
            }
            // No block is left. A moving sequence pauses a little early instead of taking another's
            // block.
            if self.pause_early(handoff) {
                return;
            }
            // Blocks of earlier victims are already being freed, and not all are spoken for: wait
            // for one.
            if self.blocks_coming() > draft.blocks_awaited {
                draft.blocks_awaited += 1;
                return draft.waiting.push(handoff);
            }
            // Otherwise a victim gives up its blocks; it may be this sequence itself.
            let candidates = self.sequences.values().filter(|s| s.preemptible());
            let victim = policy::victim(rank, candidates.map(|s| (s.rank, s.token_due())));
            let (PreemptionVictim::LessImportant(victim_handoff)
            | PreemptionVictim::Itself(victim_handoff)) = victim;
            // A fetch writes to the victim's blocks, so they are free only after it has stopped.
            if self
                .sequences
                .get(&victim_handoff)
                .is_some_and(|s| s.fetch.is_some())
            {
                self.stop_fetch(victim_handoff);
                return draft.waiting.push(handoff);
            }
            match self.preempt_now(victim_handoff) {
                BlockRelease::Later => {
                    draft.blocks_awaited += 1;
                    return draft.waiting.push(handoff);
                }
                BlockRelease::Now if victim_handoff == handoff => return,
                BlockRelease::Now => {}
            }
        }
        // Its target now limits the time that prompts and drafts may add to this step.
        if let Some(candidate) = self.candidate(rank) {
            draft.held.add(&candidate, self.context.now());
        }
        self.place(handoff, 1, draft);
    }

    // === prompts ===

    /// Prompts to continue, in order of service: by rank, and those that will miss their deadline
    /// whatever is done after those that can meet it.
    fn prompts(&self) -> Vec<ServiceRank> {
        let mut prompts = self.active_where(|s| !s.stepping() && !s.swapping());
        if self.forecast.has_prices() {
            prompts.sort_by_key(|rank| (rank.priority, self.hopeless(*rank)));
        }
        prompts
    }

    /// Whether a prompt's first token misses its deadline even if nothing else runs, and this step
    /// is not one of those that ignore it. A sequence that lost its blocks never counts: others
    /// wait until it has them back.
    fn hopeless(&self, rank: ServiceRank) -> bool {
        let Some(sequence) = self.sequences.get(&rank.handoff) else {
            return false;
        };
        let due = sequence.phase == SequencePhase::Prompt && sequence.on_miss.is_some();
        let due = due && !sequence.starved() && sequence.request.generated.is_empty();
        due && self
            .forecast
            .prompt_slack(sequence, self.context.now())
            .is_none()
            && !self.steps.serves_late_prompts()
    }

    /// Whether prompts ran nothing for too long: then the streams' slack no longer limits them.
    fn prompts_starve(&self, prompts: &[ServiceRank]) -> bool {
        let waiting = prompts.iter().filter_map(|rank| {
            let sequence = self.sequences.get(&rank.handoff)?;
            sequence
                .has_prefill_left()
                .then_some(sequence.client_timing.last_run_at)
        });
        // Any prompt that ran lately shows that prompts have their share.
        waiting.min().is_some_and(|last| {
            let last = self.steps.last_chunk_at().map_or(last, |at| last.max(at));
            self.context.now().since(last) > IDLE_MAX
        })
    }

    /// Fills the room that decoding left with chunks of prompts, and of sequences to be recomputed.
    fn place_chunks(&mut self, draft: &mut StepBuilder) {
        // Once a sequence cannot get its lost blocks back, none behind it may take blocks first.
        let mut starved = false;
        let prompts = self.prompts();
        // After `IDLE_MAX` without a chunk the streams' slack no longer limits prompts, or they
        // would starve.
        if self.prompts_starve(&prompts) {
            draft.held.slack_least = None;
        }
        // A step longer than the quantum costs every stream in it a longer gap.
        draft.tokens_left = draft.tokens_left.min(self.forecast.quantum());
        for rank in prompts {
            if draft.tokens_left == 0 {
                return;
            }
            let Some(sequence) = self.sequences.get(&rank.handoff) else {
                continue;
            };
            // Skip what a copy or a deferral holds back, and what needs a slot that nobody frees in
            // this step; landed sequences got their slots in `give_slots_to_landed`.
            let no_slot = sequence.slot.is_none() && self.slots_free.is_empty();
            let waits =
                draft.waiting.contains(&rank.handoff) || draft.deferred.contains(&rank.handoff);
            let waits = waits || no_slot || sequence.awaits_slot();
            if waits || sequence.starved() && starved {
                continue;
            }
            // A swapped sequence is copied back instead of computed; its blocks come with that
            // copy.
            if sequence.swap.is_some() {
                starved = !self.swap_in(rank.handoff);
                continue;
            }
            match self.make_ready(rank.handoff) {
                ChunkReadiness::Ready => self.place_chunk(rank.handoff, draft),
                ChunkReadiness::Fetching => {}
                ChunkReadiness::NoBlocks => starved = true,
            }
        }
    }

    /// Gives a sequence new blocks if it lost its own, and a slot if it has none. The caller
    /// ensures that it has a slot or one is free.
    fn make_ready(&mut self, handoff: HandoffId) -> ChunkReadiness {
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return ChunkReadiness::NoBlocks;
        };
        let lost = sequence.starved();
        let secured = !lost || self.secure(&mut sequence, CacheReuse::AllButLastToken, 0);
        self.sequences.insert(handoff, sequence);
        if !secured {
            return ChunkReadiness::NoBlocks;
        }
        // New blocks for lost ones: the tiers may still have their content.
        if lost {
            self.fetch(handoff);
        }
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return ChunkReadiness::NoBlocks;
        };
        let readiness = match sequence.fetch {
            Some(_) => ChunkReadiness::Fetching,
            None => ChunkReadiness::Ready,
        };
        if readiness == ChunkReadiness::Ready && sequence.slot.is_none() {
            sequence.slot = self.slots_free.pop_first();
            self.adopt(&mut sequence);
        }
        self.sequences.insert(handoff, sequence);
        readiness
    }

    /// Replaces blocks still to be computed by blocks that other sequences have completed
    /// meanwhile.
    fn adopt(&mut self, sequence: &mut WorkerSequence) {
        let size = self.context.block_tokens();
        // A block alone does not bring the state after it.
        let able = self.context.limits().prefix_cache && sequence.state.is_none();
        if !able || sequence.computed != sequence.published * size {
            return;
        }
        let published = sequence.published as usize;
        let hashes = sequence.reusable(size).to_vec();
        for (i, hash) in hashes.into_iter().enumerate().skip(published) {
            if self.pools.blocks.prefix_hits(&[hash]).blocks == 0 {
                return;
            }
            // The released block, or the reservation of one, pays for the adopted block.
            match sequence.table.get(i).copied() {
                Some(own) => self.pools.blocks.release(own),
                None => assert!(
                    self.pools
                        .blocks
                        .release_reservation(&mut sequence.reservation),
                    "a block that is neither held nor reserved"
                ),
            }
            let block = self
                .pools
                .blocks
                .hold(hash)
                .expect("a block was released for it");
            match sequence.table.get_mut(i) {
                Some(own) => *own = block,
                None => sequence.table.push(block),
            }
            sequence.published += 1;
            sequence.computed += size;
        }
    }

    fn place_chunk(&mut self, handoff: HandoffId, draft: &mut StepBuilder) {
        let size = self.context.block_tokens();
        self.start(handoff);
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let chunk_room = ChunkRoom {
            computed: sequence.computed,
            rest: sequence.tokens_to_run(),
            tokens: draft.tokens_left,
        };
        let chunk_room = self.affordable(handoff, chunk_room, draft);
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        // A chunk of less than a block is not worth a step, unless it is all that is left.
        if chunk_room < sequence.tokens_to_run() && chunk_room < size.min(draft.tokens_left) {
            return;
        }
        let chunk = policy::chunk(
            sequence.computed,
            sequence.tokens_to_run(),
            chunk_room,
            size,
        );
        let tokens = self.cut_at_snapshot(handoff, chunk.tokens());
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        draft.held.work += StepWork::prefill(sequence.computed, tokens);
        draft.held.work.draws += u32::from(tokens == sequence.tokens_to_run());
        self.steps.chunk_placed(self.context.now());
        let blocks = (sequence.computed + tokens).div_ceil(size);
        while sequence.table.len() < blocks as usize {
            let block = self.pools.blocks.take_reserved(&mut sequence.reservation);
            sequence
                .table
                .push(block.expect("a secured sequence has its blocks"));
        }
        self.place(handoff, tokens, draft);
    }

    /// Tokens of the room for which the streams in the draft have slack; at least a block, once in
    /// a step, for a prompt that must run now.
    fn affordable(
        &self,
        handoff: HandoffId,
        chunk_room: ChunkRoom,
        draft: &mut StepBuilder,
    ) -> u32 {
        let most = chunk_room.tokens.min(chunk_room.rest);
        let Some(spare) = draft.held.slack_least else {
            return most;
        };
        let fits = chunk_tokens_within(self.forecast.prices(), &draft.held.work, chunk_room, spare);
        let block = self.context.block_tokens().min(most);
        if fits >= block || draft.late_prompt_placed {
            return fits;
        }
        // A prompt presses if it can still meet its deadline, and would not if it skipped this step
        // and shared the next, or if its client waits for the rest of an answer. A prompt that is
        // late anyway must not delay others.
        let step = self.forecast.prices().step(&draft.held.work);
        let sequence = &self.sequences[&handoff];
        let presses = match self.forecast.prompt_slack(sequence, self.context.now()) {
            Some(slack) => slack <= step * 2,
            None => sequence.starved() || !sequence.request.generated.is_empty(),
        };
        if !presses {
            return fits;
        }
        draft.late_prompt_placed = true;
        block
    }

    /// Starts a prompt: blocks found in the cache can be sent before anything is computed.
    fn start(&mut self, handoff: HandoffId) {
        let now = self.context.now();
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if sequence.phase == SequencePhase::Decode || sequence.times.started.is_some() {
            return;
        }
        sequence.times.started = Some(now);
        sequence.cached_tokens = sequence.computed.min(sequence.prompt_count());
        let cached_tokens = sequence.cached_tokens;
        let prompt_tokens = sequence.prompt_count();
        let waited = now.since(sequence.times.accepted);
        self.context.note(WorkerNote::PrefixLookedUp {
            prompt_tokens,
            cached_tokens,
        });
        self.context.note(WorkerNote::PrefillStarted { waited });
        self.export(handoff, ReadyBlocks::FullBlocks);
    }

    /// Adds the next `tokens` tokens of a sequence to the draft. It has a slot and the blocks.
    fn place(&mut self, handoff: HandoffId, tokens: u32, draft: &mut StepBuilder) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let slot = sequence.slot.expect("a sequence that runs has a slot");
        if !sequence.opened {
            draft.plan.opens.push(sequence.open_slot(slot));
            sequence.opened = true;
        }
        draft.plan.segments.push(Segment {
            slot,
            position: sequence.computed,
            len: tokens,
            blocks: sequence.table.iter().map(|block| block.block).collect(),
            logits: sequence.logits(tokens),
            drafts: Vec::new(),
            state: sequence.state.map(|state| state.segment(sequence.computed)),
        });
        draft.segments.push(SegmentInFlight {
            handoff,
            slot,
            tokens,
            drafts: 0,
            phase: sequence.phase,
            samples: tokens == sequence.tokens_to_run(),
        });
        draft.tokens_left -= tokens;
        sequence.steps_count += 1;
        sequence.client_timing.step_started(self.context.now());
    }
}
