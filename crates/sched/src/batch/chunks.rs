//! Chunks of prompts, and of sequences to be computed again, in a step.
//!
//! Owns: their order, and the tokens of each within the slack of the step's streams. Never: gives a
//! prompt blocks while one before it waits for the blocks that it lost.
//! Invariant: at most one prompt in a step takes more than the streams have slack for.

use super::plan::{StepBuilder, StepPlanner};
use super::targets::IDLE_MAX;
use crate::WorkerNote;
use crate::handoff::ReadyBlocks;
use crate::memory::CacheReuse;
use crate::policy::{self, ServiceRank};
use crate::sequences::{SequencePhase, WorkerSequence};
use cleave_domain::{HandoffId, StepWork};
use cleave_planner::{ChunkRoom, Predict, chunk_tokens_within};

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

impl StepPlanner<'_> {
    /// Prompts to continue, in order of service: by rank, and those that will miss their deadline
    /// whatever is done after those that can meet it.
    fn prompts(&self) -> Vec<ServiceRank> {
        let mut prompts = self
            .sequences
            .active_where(|s| !s.stepping() && !s.swapping());
        if self.forecast.has_prices() {
            prompts.sort_by_key(|rank| (rank.priority, self.hopeless(*rank)));
        }
        prompts
    }

    /// Whether a prompt's first token misses its deadline even if nothing else runs, and this step
    /// is not one of those that ignore it. A sequence that lost its blocks never counts: others
    /// wait until it has them back.
    fn hopeless(&self, rank: ServiceRank) -> bool {
        let Some(sequence) = self.sequences.get(rank.handoff) else {
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
            let sequence = self.sequences.get(rank.handoff)?;
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
    pub(super) fn place_chunks(&mut self, draft: &mut StepBuilder) {
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
            let Some(sequence) = self.sequences.get(rank.handoff) else {
                continue;
            };
            // Skip what a copy or a deferral holds back, and what needs a slot that nobody frees in
            // this step; landed sequences got their slots in `give_slots_to_landed`.
            let no_slot = sequence.slot().is_none() && !self.sequences.has_free_slot();
            let waits = draft.leaves_out(rank.handoff) || no_slot || sequence.awaits_slot();
            if waits || sequence.starved() && starved {
                continue;
            }
            // A swapped sequence is copied back instead of computed; its blocks come with that
            // copy.
            if sequence.kv.swap().is_some() {
                let swapped = self.sequences.get_mut(rank.handoff);
                starved = !swapped.is_some_and(|s| self.memory.swap_in(self.context, s));
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
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return ChunkReadiness::NoBlocks;
        };
        if sequence.starved() {
            let reach = CacheReuse::AllButLastToken;
            if !self.memory.secure(sequence, reach, 0) {
                return ChunkReadiness::NoBlocks;
            }
            // New blocks for lost ones: the tiers may still have their content.
            self.memory
                .fetch(self.context, sequence, self.steps, self.forecast);
        }
        if sequence.kv.fetch().is_some() {
            return ChunkReadiness::Fetching;
        }
        if sequence.slot().is_none() {
            self.memory.adopt(sequence);
            self.sequences.give_slot(handoff);
        }
        ChunkReadiness::Ready
    }

    fn place_chunk(&mut self, handoff: HandoffId, draft: &mut StepBuilder) {
        let size = self.context.block_tokens();
        self.start(handoff);
        let Some(sequence) = self.sequences.get(handoff) else {
            return;
        };
        let chunk_room = ChunkRoom {
            computed: sequence.kv.computed(),
            rest: sequence.tokens_to_run(),
            tokens: draft.tokens_left,
        };
        let chunk_room = self.affordable(sequence, chunk_room, draft);
        // A chunk of less than a block is not worth a step, unless it is all that is left.
        if chunk_room < sequence.tokens_to_run() && chunk_room < size.min(draft.tokens_left) {
            return;
        }
        let chunk = policy::chunk(
            sequence.kv.computed(),
            sequence.tokens_to_run(),
            chunk_room,
            size,
        );
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        let tokens = self.memory.cut_at_snapshot(sequence, chunk.tokens());
        draft.held.work += StepWork::prefill(sequence.kv.computed(), tokens);
        draft.held.work.draws += u32::from(sequence.logits(tokens).samples());
        self.steps.chunk_placed(self.context.now());
        let blocks = (sequence.kv.computed() + tokens).div_ceil(size);
        self.memory.take_reserved(sequence, blocks);
        self.memory.take_window(sequence, blocks);
        self.place(handoff, tokens, draft);
    }

    /// Tokens of the room for which the streams in the draft have slack; at least a block, once in
    /// a step, for a prompt that must run now.
    fn affordable(
        &self,
        sequence: &WorkerSequence,
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
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        if sequence.phase == SequencePhase::Decode || sequence.times.started.is_some() {
            return;
        }
        sequence.times.started = Some(now);
        sequence.cached_tokens = sequence.kv.computed().min(sequence.prompt_count());
        let cached_tokens = sequence.cached_tokens;
        let prompt_tokens = sequence.prompt_count();
        let waited = now.since(sequence.times.accepted);
        self.context.note(WorkerNote::PrefixLookedUp {
            prompt_tokens,
            cached_tokens,
        });
        self.context.note(WorkerNote::PrefillStarted { waited });
        self.handoffs().export(handoff, ReadyBlocks::FullBlocks);
    }
}
