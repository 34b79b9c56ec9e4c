//! The next step: which sequences run how many tokens.
//!
//! Owns: slots, growth, the choice of who gives way, and the joint batch: decode tokens first, prompt
//! chunks in the room that is left, guesses last. Never: waits for anything; what cannot run now is tried again next time.
//! Invariant: whoever is most important among the active runs in every step, unless every slot or
//! every block is with sequences that will go on without it, the blocks it is given were being filled from below and are
//! free once that has stopped, or it has the slack to sit one out.

use crate::admit::Reach;
use crate::batch::{self, Candidate, IDLE_MAX};
use crate::brain::{Placed, Step};
use crate::close::Close;
use crate::policy::{self, Rank, Victim};
use crate::sequence::{Phase, Sequence};
use crate::settle::Ready;
use crate::swap::Yield;
use crate::{Brain, Drafting, Note, Output};
use cleave_domain::{Failure, HandoffId, Segment, StepId, StepPlan, Work};
use cleave_planner::{Predict, Room, chunk_within};

/// A step being put together.
pub(crate) struct Draft {
    pub(crate) plan: StepPlan,
    /// In the order of the plan's segments.
    pub(crate) placed: Vec<Placed>,
    /// Tokens that still fit.
    room: u32,
    /// What it holds, as far as promises go.
    pub(crate) held: batch::Placed,
    /// Those that must wait for a copy to be over.
    waiting: Vec<HandoffId>,
    /// Those that sit this step out.
    out: Vec<HandoffId>,
    /// Of those, how many need a block that will be free then.
    in_need: u64,
    /// A prompt got on that the streams had no time for.
    pressed: bool,
}

/// What became of a sequence that is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seating {
    /// It has a slot and its blocks.
    Taken,
    /// It has its blocks, and some of them are being brought back: it goes on after that.
    Fetches,
    /// There are not enough blocks.
    NoBlocks,
}

/// One in so many steps takes prompts that are late anyway in their turn.
pub(crate) const LATE_STEPS: u64 = 8;

impl Brain {
    /// Asks for a step if none is under way and there is something to run, and for the one after it if
    /// that is known.
    pub(crate) fn plan(&mut self) {
        if self.under_way.is_empty() {
            self.plan_anew();
        }
        self.plan_ahead();
    }

    fn plan_anew(&mut self) {
        let mut draft = Draft {
            plan: StepPlan::default(),
            placed: Vec::new(),
            room: self.limits.capacity.step_tokens_max,
            held: batch::Placed::default(),
            waiting: Vec::new(),
            out: Vec::new(),
            in_need: 0,
            pressed: false,
        };
        self.place_decodes(&mut draft);
        self.place_chunks(&mut draft);
        let drafting = self.place_drafts(&mut draft);
        if !draft.placed.is_empty() {
            self.say_step(draft.plan, draft.placed, drafting);
        }
    }

    /// `placed` in the order of the plan's segments.
    pub(crate) fn say_step(
        &mut self,
        mut plan: StepPlan,
        placed: Vec<Placed>,
        drafting: Option<Drafting>,
    ) {
        self.steps += 1;
        plan.step = StepId(self.steps);
        let work = Work::of(&plan);
        let drafts = plan.segments.iter().flat_map(|segment| &segment.drafts);
        self.under_way.push_back(Step {
            id: plan.step,
            work,
            predicted: self.learner.prices().step(&work),
            placed,
            drafts: drafts.copied().collect(),
            drafting,
            since: self.now,
            stuck: false,
            void: false,
        });
        self.fetches_wait_for_step();
        self.say(Output::Step(plan));
        self.wish();
    }

    /// The active ones of which `pick` is true, the most important first.
    fn those(&self, pick: impl Fn(&Sequence) -> bool) -> Vec<Rank> {
        let picked = |rank: &&Rank| pick(&self.sequences[&rank.handoff]);
        self.active.iter().filter(picked).copied().collect()
    }

    /// Sequences whose KV is here take free slots before prompts do: their clients have begun to
    /// read.
    fn seat_landed(&mut self) {
        if self.slots.is_empty() {
            return;
        }
        for rank in self.those(Sequence::landed) {
            let Some(sequence) = self.sequences.get_mut(&rank.handoff) else {
                continue;
            };
            let Some(slot) = self.slots.pop_first() else {
                return;
            };
            sequence.slot = Some(slot);
        }
    }

    // === decode ===

    fn place_decodes(&mut self, draft: &mut Draft) {
        // A sequence that gives up its slot makes room for another that landed.
        loop {
            self.seat_landed();
            let one = self.those(|s| {
                let handoff = &s.rank.handoff;
                let waits = draft.waiting.contains(handoff) || draft.out.contains(handoff);
                s.slot.is_some() && s.rest() == 1 && !s.stepping() && !waits
            });
            if !one.is_empty() {
                let out = self.sit_out(&one, draft);
                let chosen = one.into_iter().filter(|rank| !out.contains(&rank.handoff));
                let chosen: Vec<Rank> = chosen.collect();
                draft.out.extend(out);
                for rank in chosen {
                    self.place_decode(rank, draft);
                }
            } else if draft.placed.is_empty() && !draft.out.is_empty() {
                // Those for whom they sat out cannot run.
                draft.out.clear();
            } else {
                return;
            }
        }
    }

    pub(crate) fn candidate(&self, rank: Rank) -> Option<Candidate> {
        let sequence = self.sequences.get(&rank.handoff)?;
        let gap = self.gap_kept(sequence);
        Some(Candidate {
            rank,
            context_tokens: u64::from(sequence.len()),
            target: gap.zip(sequence.token_due()),
            served: sequence.pace.served,
        })
    }

    /// Those that could run and must not, for a promise to one that does.
    fn sit_out(&self, ranks: &[Rank], draft: &Draft) -> Vec<HandoffId> {
        let candidates = ranks.iter().filter_map(|rank| self.candidate(*rank));
        let candidates: Vec<_> = candidates.collect();
        batch::sit_out(self.learner.prices(), draft.held, &candidates, self.now)
    }

    /// One token of a running sequence. If it needs a block and none is left, the least important
    /// sequence gives up its own; nobody in this draft does, because those in it are more important.
    /// Blocks that are being copied come later, and whoever needs them waits.
    fn place_decode(&mut self, rank: Rank, draft: &mut Draft) {
        let handoff = rank.handoff;
        let capacity = self.limits.capacity;
        loop {
            let Some(sequence) = self.sequences.get_mut(&handoff) else {
                return;
            };
            // It may have been a victim since it was listed.
            if sequence.slot.is_none() {
                return;
            }
            if self.last_block_is_read(&self.sequences[&handoff]) {
                return draft.waiting.push(handoff);
            }
            let Some(sequence) = self.sequences.get_mut(&handoff) else {
                return;
            };
            let blocks = sequence.len().div_ceil(capacity.block_tokens);
            if blocks > capacity.blocks_count {
                return self.close(handoff, Close::Failed(Failure::OutOfBlocks));
            }
            if sequence.table.len() >= blocks as usize {
                break;
            }
            let block = self.pool.take_promised(&mut sequence.promise);
            if let Some(block) = block.or_else(|| self.pool.take()) {
                sequence.table.push(block);
                continue;
            }
            if self.stand_still_early(handoff) {
                return;
            }
            if self.blocks_coming() > draft.in_need {
                draft.in_need += 1;
                return draft.waiting.push(handoff);
            }
            let candidates = self.sequences.values().filter(|s| s.recomputable());
            let victim = policy::victim(rank, candidates.map(|s| (s.rank, s.token_due())));
            let (Victim::LessImportant(gives) | Victim::Itself(gives)) = victim;
            if self
                .sequences
                .get(&gives)
                .is_some_and(|s| s.fetch.is_some())
            {
                self.stop_fetch(gives);
                return draft.waiting.push(handoff);
            }
            match self.give_way(gives) {
                Yield::Later => {
                    draft.in_need += 1;
                    return draft.waiting.push(handoff);
                }
                Yield::Now if gives == handoff => return,
                Yield::Now => {}
            }
        }
        if let Some(candidate) = self.candidate(rank) {
            draft.held.add(&candidate, self.now);
        }
        self.place(handoff, 1, draft);
    }

    // === prompts ===

    /// Prompts that are to go on, in their order: the most important first, and those that are late
    /// already, whatever is done, after those that are not.
    fn prompts(&self) -> Vec<Rank> {
        let mut prompts = self.those(|s| !s.stepping() && !s.swapping());
        if self.learner.knows() {
            prompts.sort_by_key(|rank| (rank.priority, self.hopeless(*rank)));
        }
        prompts
    }

    /// Whether a prompt's first token will be late even if nothing else runs, and this step is not
    /// the one in which that makes no difference. Whoever has lost blocks never is: others wait for it
    /// to have them back.
    fn hopeless(&self, rank: Rank) -> bool {
        let Some(sequence) = self.sequences.get(&rank.handoff) else {
            return false;
        };
        let due = sequence.phase == Phase::Prompt && sequence.unmet.is_some();
        let due = due && !sequence.starved() && sequence.request.generated.is_empty();
        due && self.prompt_slack(sequence).is_none() && !self.steps.is_multiple_of(LATE_STEPS)
    }

    /// Whether prompts got nothing of late: then streams that have no time to spare make room.
    fn prompts_starve(&self, prompts: &[Rank]) -> bool {
        let waiting = prompts.iter().filter_map(|rank| {
            let sequence = self.sequences.get(&rank.handoff)?;
            sequence.computes().then_some(sequence.pace.served)
        });
        // If one ran lately, they have their share.
        waiting.min().is_some_and(|last| {
            let last = self.chunked.map_or(last, |at| last.max(at));
            self.now.since(last) > IDLE_MAX
        })
    }

    /// Fills the room that decoding left with chunks of prompts, and of sequences to be recomputed.
    fn place_chunks(&mut self, draft: &mut Draft) {
        // Once one that lost its blocks cannot have them back, none behind it may take them.
        let mut starved = false;
        let prompts = self.prompts();
        if self.prompts_starve(&prompts) {
            draft.held.spare = None;
        }
        draft.room = draft.room.min(self.quantum);
        for rank in prompts {
            if draft.room == 0 {
                return;
            }
            let Some(sequence) = self.sequences.get(&rank.handoff) else {
                continue;
            };
            let no_slot = sequence.slot.is_none() && self.slots.is_empty();
            let waits = draft.waiting.contains(&rank.handoff) || draft.out.contains(&rank.handoff);
            let waits = waits || no_slot || sequence.landed();
            if waits || sequence.starved() && starved {
                continue;
            }
            if sequence.swap.is_some() {
                starved = !self.swap_in(rank.handoff);
                continue;
            }
            match self.seat(rank.handoff) {
                Seating::Taken => self.place_chunk(rank.handoff, draft),
                Seating::Fetches => {}
                Seating::NoBlocks => starved = true,
            }
        }
    }

    /// Gives a sequence its blocks back if it lost them, and a slot if it has none. A slot is free, or it
    /// has one.
    fn seat(&mut self, handoff: HandoffId) -> Seating {
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return Seating::NoBlocks;
        };
        let lost = sequence.starved();
        let secured = !lost || self.secure(&mut sequence, Reach::Reusable, 0);
        self.sequences.insert(handoff, sequence);
        if !secured {
            return Seating::NoBlocks;
        }
        if lost {
            self.fetch(handoff);
        }
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return Seating::NoBlocks;
        };
        let seat = match sequence.fetch {
            Some(_) => Seating::Fetches,
            None => Seating::Taken,
        };
        if seat == Seating::Taken && sequence.slot.is_none() {
            sequence.slot = self.slots.pop_first();
            self.adopt(&mut sequence);
        }
        self.sequences.insert(handoff, sequence);
        seat
    }

    /// Takes over blocks that others computed since the sequence was accepted, in place of its own.
    fn adopt(&mut self, sequence: &mut Sequence) {
        let size = self.limits.capacity.block_tokens;
        if !self.limits.prefix_cache || sequence.computed != sequence.published * size {
            return;
        }
        let known = sequence.published as usize;
        let hashes = sequence.reusable(size).to_vec();
        for (i, hash) in hashes.into_iter().enumerate().skip(known) {
            if self.pool.leading(&[hash]).blocks == 0 {
                return;
            }
            // Its own block, or the promise of one, pays for the other.
            match sequence.table.get(i).copied() {
                Some(own) => self.pool.release(own),
                None => assert!(
                    self.pool.forgive_one(&mut sequence.promise),
                    "a block neither held nor promised"
                ),
            }
            let block = self.pool.hold(hash).expect("its price was paid");
            match sequence.table.get_mut(i) {
                Some(own) => *own = block,
                None => sequence.table.push(block),
            }
            sequence.published += 1;
            sequence.computed += size;
        }
    }

    fn place_chunk(&mut self, handoff: HandoffId, draft: &mut Draft) {
        let size = self.limits.capacity.block_tokens;
        self.start(handoff);
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let room = Room {
            computed: sequence.computed,
            rest: sequence.rest(),
            tokens: draft.room,
        };
        let room = self.affordable(handoff, room, draft);
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        // Less than a block is not worth its step, unless it is all.
        if room < sequence.rest() && room < size.min(draft.room) {
            return;
        }
        let chunk = policy::chunk(sequence.computed, sequence.rest(), room, size);
        draft.held.work += Work::prefill(sequence.computed, chunk.tokens());
        draft.held.work.draws += u32::from(chunk.tokens() == sequence.rest());
        self.chunked = Some(self.now);
        let blocks = (sequence.computed + chunk.tokens()).div_ceil(size);
        while sequence.table.len() < blocks as usize {
            let block = self.pool.take_promised(&mut sequence.promise);
            sequence
                .table
                .push(block.expect("a secured sequence has its blocks"));
        }
        self.place(handoff, chunk.tokens(), draft);
    }

    /// Tokens of the room that the streams in the draft have time for; a block at least, once in a
    /// step, of a prompt that must run now.
    fn affordable(&self, handoff: HandoffId, room: Room, draft: &mut Draft) -> u32 {
        let most = room.tokens.min(room.rest);
        let Some(spare) = draft.held.spare else {
            return most;
        };
        let fits = chunk_within(self.learner.prices(), &draft.held.work, room, spare);
        let block = self.limits.capacity.block_tokens.min(most);
        if fits >= block || draft.pressed {
            return fits;
        }
        // One that can still be in time and would not be if it sat this step out and shared the next, or
        // one whose client waits for the rest of an answer. What else is late makes nobody late.
        let step = self.learner.prices().step(&draft.held.work);
        let sequence = &self.sequences[&handoff];
        let presses = match self.prompt_slack(sequence) {
            Some(slack) => slack <= step * 2,
            None => sequence.starved() || !sequence.request.generated.is_empty(),
        };
        if !presses {
            return fits;
        }
        draft.pressed = true;
        block
    }

    /// A prompt's first chunk: what the cache had of it can leave before anything is computed.
    fn start(&mut self, handoff: HandoffId) {
        let now = self.now;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if sequence.phase == Phase::Decode || sequence.times.started.is_some() {
            return;
        }
        sequence.times.started = Some(now);
        sequence.cached_tokens = sequence.computed.min(sequence.prompt_count());
        let cached_tokens = sequence.cached_tokens;
        let prompt_tokens = sequence.prompt_count();
        let waited = now.since(sequence.times.accepted);
        self.note(Note::PrefixLooked {
            prompt_tokens,
            cached_tokens,
        });
        self.note(Note::PrefillStarted { waited });
        self.export(handoff, Ready::FullBlocks);
    }

    /// Puts the next `tokens` tokens of a sequence into the draft. It has a slot and the blocks.
    fn place(&mut self, handoff: HandoffId, tokens: u32, draft: &mut Draft) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let slot = sequence.slot.expect("a sequence that runs has a slot");
        if !sequence.opened {
            draft.plan.opens.push(sequence.opening(slot));
            sequence.opened = true;
        }
        draft.plan.segments.push(Segment {
            slot,
            position: sequence.computed,
            len: tokens,
            blocks: sequence.table.iter().map(|block| block.block).collect(),
            logits: sequence.logits(tokens),
            drafts: Vec::new(),
        });
        draft.placed.push(Placed {
            handoff,
            slot,
            tokens,
            drafts: 0,
            phase: sequence.phase,
            samples: tokens == sequence.rest(),
        });
        draft.room -= tokens;
        sequence.steps_count += 1;
        sequence.pace.step(self.now);
    }
}
