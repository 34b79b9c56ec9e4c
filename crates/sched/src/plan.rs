//! The next step: which sequences run how many tokens.
//!
//! Owns: slots, growth, the choice of who gives way, and the joint batch: decode tokens first, prompt
//! chunks in the room that is left. Never: waits for anything; what cannot run now is tried again next time.
//! Invariant: whoever is most important among the active runs in every step, unless every slot or
//! every block is with sequences that will go on without it.

use crate::admit::Reach;
use crate::brain::{Placed, Step};
use crate::close::Close;
use crate::policy::{self, Rank, Victim};
use crate::sequence::{Phase, Sequence};
use crate::settle::Ready;
use crate::swap::Yield;
use crate::{Brain, Note, Output};
use cleave_domain::{Failure, HandoffId, Segment, StepId, StepPlan};

/// A step being put together.
struct Draft {
    plan: StepPlan,
    placed: Vec<Placed>,
    /// Tokens that still fit.
    room: u32,
    /// Those that must wait for a copy to be over.
    waiting: Vec<HandoffId>,
    /// Of those, how many need a block that will be free then.
    in_need: u64,
}

impl Brain {
    /// Asks for a step if none is under way and there is something to run.
    pub(crate) fn plan(&mut self) {
        if self.under_way.is_some() {
            return;
        }
        let mut draft = Draft {
            plan: StepPlan::default(),
            placed: Vec::new(),
            room: self.limits.capacity.step_tokens_max,
            waiting: Vec::new(),
            in_need: 0,
        };
        // A sequence that gives up its slot makes room for another that landed.
        loop {
            self.seat_landed();
            let waiting = &draft.waiting;
            let one = self.those(|s| {
                let waits = waiting.contains(&s.rank.handoff);
                s.slot.is_some() && s.rest() == 1 && !s.stepping && !waits
            });
            if one.is_empty() {
                break;
            }
            for rank in one {
                self.place_decode(rank, &mut draft);
            }
        }
        self.place_chunks(&mut draft);
        if draft.placed.is_empty() {
            return;
        }
        self.steps += 1;
        draft.plan.step = StepId(self.steps);
        self.under_way = Some(Step {
            id: draft.plan.step,
            placed: draft.placed,
            said: self.now,
            stuck: false,
        });
        self.say(Output::Step(draft.plan));
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
            let victim = policy::victim(rank, candidates.map(|s| s.rank));
            let (Victim::LessImportant(gives) | Victim::Itself(gives)) = victim;
            match self.give_way(gives) {
                Yield::Later => {
                    draft.in_need += 1;
                    return draft.waiting.push(handoff);
                }
                Yield::Now if gives == handoff => return,
                Yield::Now => {}
            }
        }
        self.place(handoff, 1, draft);
    }

    // === prompts ===

    /// Fills the room that decoding left with chunks of prompts, and of sequences to be recomputed.
    fn place_chunks(&mut self, draft: &mut Draft) {
        // Once one that lost its blocks cannot have them back, none behind it may take them.
        let mut starved = false;
        for rank in self.those(|s| !s.stepping && !s.swapping()) {
            if draft.room == 0 {
                return;
            }
            let Some(sequence) = self.sequences.get(&rank.handoff) else {
                continue;
            };
            let no_slot = sequence.slot.is_none() && self.slots.is_empty();
            let waits = no_slot || sequence.landed() || draft.waiting.contains(&rank.handoff);
            if waits || sequence.starved() && starved {
                continue;
            }
            if sequence.swap.is_some() {
                starved = !self.swap_in(rank.handoff);
            } else if self.seat(rank.handoff) {
                self.place_chunk(rank.handoff, draft);
            } else {
                starved = true;
            }
        }
    }

    /// Gives a sequence its blocks back if it lost them, and a slot if it has none; false if there
    /// are not enough blocks. A slot is free, or it has one.
    fn seat(&mut self, handoff: HandoffId) -> bool {
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return false;
        };
        let secured = !sequence.starved() || self.secure(&mut sequence, Reach::Reusable, 0);
        if secured && sequence.slot.is_none() {
            sequence.slot = self.slots.pop_first();
            self.adopt(&mut sequence);
        }
        self.sequences.insert(handoff, sequence);
        secured
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
        let chunk = policy::chunk(sequence.computed, sequence.rest(), draft.room, size);
        let blocks = (sequence.computed + chunk.tokens()).div_ceil(size);
        while sequence.table.len() < blocks as usize {
            let block = self.pool.take_promised(&mut sequence.promise);
            sequence
                .table
                .push(block.expect("a secured sequence has its blocks"));
        }
        self.place(handoff, chunk.tokens(), draft);
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
        });
        draft.placed.push(Placed {
            handoff,
            slot,
            tokens,
            phase: sequence.phase,
            samples: tokens == sequence.rest(),
        });
        draft.room -= tokens;
        sequence.stepping = true;
    }
}
