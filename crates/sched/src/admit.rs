//! Orders: admission, refusal and renewal.
//!
//! Owns: the conditions of admission and the reservation of blocks.
//! Never: accepts a leg that would have to wait for blocks: all that it needs is held or reserved
//! before it is accepted, or it is refused. So no leg waits for a block that another leg holds.
//! Invariant: an order is answered by `Reserved` or `Refused`, or is in the end `Released`; a
//! refusal leaves nothing behind, and a repetition changes nothing.

use crate::handoff::EndedHandoff;
use crate::memory::SequenceState;
use crate::policy::{self, ServiceRank};
use crate::sequences::prompt_due;
use crate::sequences::{SequenceStage, WorkerSequence};
use crate::{WorkerBrain, WorkerNote};
use cleave_domain::{
    Deadline, HandoffId, PrefillOrder, Refusal, Report, Request, ReserveOrder, RouterId,
};
use cleave_kv::handoff::receiver::{ExpectedHandoff, HandoffReceiver};
use cleave_kv::handoff::sender::HandoffSender;
use cleave_kv::{PrefixNeed, SecuredKv, block_hash};
use std::time::Duration;

/// How much of a sequence may come from the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheReuse {
    /// Every full block: another worker runs the last token.
    EveryFullBlock,
    AllButLastToken,
    /// Nothing: its KV comes from host memory.
    NoBlock,
}

impl WorkerBrain {
    // === the decode leg ===

    pub(crate) fn reserve(&mut self, router: RouterId, order: ReserveOrder) {
        let handoff = order.handoff;
        if self.sequences.contains_key(&handoff) || self.was_here(handoff) {
            return self.context.note(WorkerNote::Repeated { handoff });
        }
        let accepted = self
            .may_reserve(&order)
            .and_then(|()| self.take_reservation(router, order));
        match accepted {
            Ok(reserved) => self.context.report(router, reserved),
            Err(refusal) => self
                .context
                .report(router, Report::Refused { handoff, refusal }),
        }
    }

    fn may_reserve(&self, order: &ReserveOrder) -> Result<(), Refusal> {
        let me = self.context.limits().me;
        // Any worker may serve both legs of one request; the role limits hand-offs from others. A
        // sender that is an earlier incarnation of this worker, or is fenced, will never write.
        let served = self.context.limits().role.decodes() && order.sender.worker != me.worker;
        let is_fenced = self.fenced.covers(order.sender);
        if order.sender != me && (!served || is_fenced) {
            return Err(Refusal::WrongWorker);
        }
        self.may_take(order.handoff, &order.request)?;
        let slots = self.context.limits().capacity.slots_count as usize;
        let decoding = self.sequences.values().filter(|s| s.decodes_here()).count();
        if decoding >= slots + self.context.limits().queue_max as usize {
            let retry_after = self.soonest_end();
            return Err(Refusal::QueueFull { retry_after });
        }
        self.refuse_slow_decode(order)
    }

    /// Holds every block of prompt and output so far, and reserves some for growth; all or none.
    fn take_reservation(
        &mut self,
        router: RouterId,
        order: ReserveOrder,
    ) -> Result<Report, Refusal> {
        let ReserveOrder {
            handoff,
            request,
            sender,
            expected_output_tokens,
            ahead_tokens,
            waited,
            due,
        } = order;
        let size = self.context.block_tokens();
        let rank = self.rank(handoff, &request, waited, due);
        let mut sequence = WorkerSequence::new(rank, router, request, self.context.now());
        sequence.on_miss = due.map(|due| due.unmet);
        if sender == self.context.limits().me {
            self.refuse_late_prompt(&mut sequence)?;
        }
        let tokens = sequence.len();
        let now = tokens.div_ceil(size);
        // Taken from the reservation now, because the sender may fill them before it seals.
        let blocks = self.ahead(&sequence, ahead_tokens);
        let growth = self.growth(&sequence, expected_output_tokens).max(blocks) - now;
        let reach = if sender == self.context.limits().me {
            CacheReuse::AllButLastToken
        } else {
            CacheReuse::EveryFullBlock
        };
        self.hold(&mut sequence, reach, growth)?;
        let present = sequence.published;
        while sequence.table.len() < blocks as usize {
            let block = self.pools.blocks.take_reserved(&mut sequence.reservation);
            sequence.table.push(block.expect("reserved just now"));
        }
        let blocks = sequence.table[present as usize..].to_vec();
        let state = sequence.state.map(|state| state.live);
        if sender != self.context.limits().me {
            let salt = sequence.request.cache_salt;
            let content = block_hash(salt, None, &sequence.tokens);
            sequence.peer_state_open = true;
            sequence.incoming = Some(HandoffReceiver::new(ExpectedHandoff {
                handoff,
                sender,
                present,
                blocks: blocks.clone(),
                state,
                capacity: self.context.limits().capacity,
                vocab_size: self.context.limits().vocab_size,
                tokens,
                content,
                writer: self.context.limits().writer,
            }));
        }
        self.sequences.insert(handoff, sequence);
        self.renewed(handoff);
        Ok(Report::Reserved {
            handoff,
            present,
            blocks,
            state,
        })
    }

    /// Blocks for a sequence and the tokens that its sender may draw before it seals; no more than
    /// the pool has.
    fn ahead(&self, sequence: &WorkerSequence, ahead_tokens: u32) -> u32 {
        let left = sequence.request.stop.max_tokens - sequence.output_count();
        self.blocks_of(sequence.len().saturating_add(left.min(ahead_tokens)))
    }

    /// Blocks for the expected length of a sequence; no more than the pool has. The last token
    /// drawn is never run, so it needs no block.
    fn growth(&self, sequence: &WorkerSequence, expected_output_tokens: u32) -> u32 {
        let left = sequence.request.stop.max_tokens - sequence.output_count();
        let run = left.min(expected_output_tokens).saturating_sub(1);
        self.blocks_of(sequence.len().saturating_add(run))
    }

    fn blocks_of(&self, tokens: u32) -> u32 {
        let capacity = &self.context.limits().capacity;
        tokens
            .min(capacity.context_tokens_max)
            .div_ceil(capacity.block_tokens)
            .min(capacity.blocks_count)
    }

    // === the prefill leg ===

    pub(crate) fn prefill(&mut self, router: RouterId, order: PrefillOrder) {
        let handoff = order.handoff;
        let accepted = match self.sequences.get(&handoff) {
            None if self.was_here(handoff) => {
                return self.context.note(WorkerNote::Repeated { handoff });
            }
            None => self
                .may_prefill(&order)
                .and_then(|()| self.take_prefill(router, order)),
            Some(sequence) if sequence.awaits_prefill() => self.start_here(router, &order),
            Some(sequence) if sequence.incoming.is_some() => Err(Refusal::WrongWorker),
            Some(_) => return self.context.note(WorkerNote::Repeated { handoff }),
        };
        if let Err(refusal) = accepted {
            self.context
                .report(router, Report::Refused { handoff, refusal });
        }
    }

    /// Starts the prompt of a reservation whose legs are both here: it is computed straight into
    /// the reserved blocks.
    fn start_here(&mut self, router: RouterId, order: &PrefillOrder) -> Result<(), Refusal> {
        let target = &order.target;
        let (me, now) = (self.context.limits().me, self.context.now());
        let sequence = self
            .sequences
            .get_mut(&order.handoff)
            .filter(|sequence| {
                target.worker == me
                    && sequence.router == router
                    && sequence.published == target.present
                    && sequence.table[target.present as usize..] == target.blocks
                    && sequence.state.map(|state| state.live) == target.state
            })
            .ok_or(Refusal::WrongWorker)?;
        sequence.stage = SequenceStage::Active;
        sequence.times.accepted = now;
        self.active.insert(sequence.rank);
        self.renewed(order.handoff);
        self.fetch(order.handoff);
        Ok(())
    }

    fn may_prefill(&self, order: &PrefillOrder) -> Result<(), Refusal> {
        let target = &order.target;
        let tokens = order.request.prompt.len() + order.request.generated.len();
        let blocks = tokens.div_ceil(self.context.block_tokens() as usize);
        let blocks_reserved = target.present as usize + target.blocks.len();
        if !self.context.limits().role.prefills()
            || target.worker.worker == self.context.limits().me.worker
            || blocks_reserved < blocks
            || target.present as usize > blocks
            || target.state.is_some() != self.pools.states.is_some()
        {
            return Err(Refusal::WrongWorker);
        }
        self.may_take(order.handoff, &order.request)?;
        let queued = |s: &&WorkerSequence| s.outgoing.is_some() && s.times.started.is_none();
        let queued = self.sequences.values().filter(queued).count();
        if queued >= self.context.limits().queue_max as usize {
            let tokens = self.load().queue_tokens;
            let steps = tokens / u64::from(self.context.limits().capacity.step_tokens_max).max(1);
            let steps = u32::try_from(steps).unwrap_or(u32::MAX);
            // There is room for one more once the first of the queue has started.
            let retry_after = policy::retry_after(
                steps / self.context.limits().queue_max.max(1),
                self.steps.mean(),
            );
            return Err(Refusal::QueueFull { retry_after });
        }
        Ok(())
    }

    /// Holds the cached part of the prompt and reserves the other blocks; all or none.
    fn take_prefill(&mut self, router: RouterId, order: PrefillOrder) -> Result<(), Refusal> {
        let PrefillOrder {
            handoff,
            request,
            target,
            waited,
            due,
        } = order;
        let rank = self.rank(handoff, &request, waited, due);
        let mut sequence = WorkerSequence::new(rank, router, request, self.context.now());
        sequence.on_miss = due.map(|due| due.unmet);
        self.refuse_late_prompt(&mut sequence)?;
        self.hold(&mut sequence, CacheReuse::AllButLastToken, 0)?;
        sequence.peer_state_open = true;
        let pieces = self.context.limits().capacity.state_pieces();
        sequence.outgoing = Some(HandoffSender::new(handoff, target, pieces));
        sequence.stage = SequenceStage::Active;
        self.active.insert(rank);
        self.sequences.insert(handoff, sequence);
        self.renewed(handoff);
        self.fetch(handoff);
        Ok(())
    }

    // === both ===

    fn rank(
        &mut self,
        handoff: HandoffId,
        request: &Request,
        waited: Duration,
        due: Option<Deadline>,
    ) -> ServiceRank {
        self.arrivals += 1;
        let since = self.context.now() - waited;
        ServiceRank {
            priority: (request.slo.priority, request.priority),
            due: due.map_or(prompt_due(since, None), |due| self.context.now() + due.left),
            since,
            arrival: self.arrivals,
            handoff,
        }
    }

    /// Whether the hand-off was accepted here before, and is over.
    fn was_here(&self, handoff: HandoffId) -> bool {
        matches!(
            self.recently_ended.trace(handoff),
            Some(EndedHandoff::Ended | EndedHandoff::Landed)
        )
    }

    fn may_take(&self, handoff: HandoffId, request: &Request) -> Result<(), Refusal> {
        if self.draining() {
            return Err(Refusal::Draining);
        }
        // The receiver was assured that nothing of it comes; or a sequence leaves under its name.
        let unwritten =
            self.recently_ended.trace(handoff) == Some(EndedHandoff::StoppedBeforeStart);
        if unwritten || self.moves.contains_key(&handoff) {
            return Err(Refusal::WrongWorker);
        }
        // An unknown token would fail the whole step that the request is part of.
        let vocab_size = self.context.limits().vocab_size;
        if !policy::runnable(request, vocab_size) {
            return Err(Refusal::OutOfVocabulary { vocab_size });
        }
        let capacity = &self.context.limits().capacity;
        let tokens = request.prompt.len() + request.generated.len();
        let pool = u64::from(capacity.blocks_count) * u64::from(capacity.block_tokens);
        let tokens_max = pool.min(u64::from(capacity.context_tokens_max));
        // The request must leave room for the next token and allow drawing it.
        if tokens == 0
            || tokens as u64 >= tokens_max
            || request.generated.len() >= request.stop.max_tokens as usize
        {
            let tokens_max = u32::try_from(tokens_max).unwrap_or(u32::MAX);
            return Err(Refusal::TooLong { tokens_max });
        }
        Ok(())
    }

    /// Calls [`WorkerBrain::secure`] for a sequence that is new here. Nothing is given out while a
    /// preempted or swapped sequence waits for blocks: new ones would starve it.
    fn hold(
        &mut self,
        sequence: &mut WorkerSequence,
        reach: CacheReuse,
        growth: u32,
    ) -> Result<(), Refusal> {
        let waits = |s: &WorkerSequence| s.starved() || s.swap.is_some();
        let starved = self.sequences.values().any(waits);
        if !starved && self.secure(sequence, reach, growth) {
            return Ok(());
        }
        let retry_after = self.soonest_end();
        Err(Refusal::NoBlocks { retry_after })
    }

    /// Holds the cached prefix of `sequence` and takes its state slot, and reserves the rest of its
    /// blocks and `growth` more; all or none.
    pub(crate) fn secure(
        &mut self,
        sequence: &mut WorkerSequence,
        reach: CacheReuse,
        growth: u32,
    ) -> bool {
        let size = self.context.block_tokens();
        let blocks = sequence.len().div_ceil(size) + growth;
        let reach = if self.context.limits().prefix_cache {
            reach
        } else {
            CacheReuse::NoBlock
        };
        let (hashes, need) = match reach {
            CacheReuse::NoBlock => (&[][..], PrefixNeed::EveryPlane),
            CacheReuse::AllButLastToken => (sequence.reusable(size), PrefixNeed::EveryPlane),
            CacheReuse::EveryFullBlock => {
                sequence.extend_hashes(size);
                (&sequence.hashes[..], PrefixNeed::Blocks)
            }
        };
        let Some(secured) = self.pools.secure(hashes, need, blocks) else {
            return false;
        };
        let SecuredKv {
            table,
            reservation,
            state,
        } = secured;
        sequence.published = u32::try_from(table.len()).expect("a table fits the pool");
        sequence.computed = sequence.published * size;
        sequence.table = table;
        sequence.reservation = reservation;
        // A snapshot serves only prompts that are run here.
        let points = |known_blocks| match (reach, need) {
            (CacheReuse::NoBlock, _) | (_, PrefixNeed::Blocks) => [0; 2],
            _ => sequence.snapshot_points(known_blocks, size),
        };
        let state = state.map(|state| SequenceState::new(state, points(state.known_blocks)));
        sequence.state = state;
        true
    }

    // === leases ===

    pub(crate) fn renew(&mut self, router: RouterId, handoffs: &[HandoffId]) {
        for handoff in handoffs {
            let sequence = self.sequences.get(handoff);
            if sequence.is_some_and(|s| s.router == router && !s.closing()) {
                self.renewed(*handoff);
            }
        }
    }

    fn renewed(&mut self, handoff: HandoffId) {
        self.leases
            .set(handoff, self.context.now() + self.context.limits().lease);
    }

    /// Upper bound of the time until the first running sequence ends.
    pub(crate) fn soonest_end(&self) -> Duration {
        let left = |s: &WorkerSequence| s.request.stop.max_tokens.saturating_sub(s.output_count());
        let running = self.sequences.values().filter(|s| s.slot.is_some());
        let steps = running.map(left).min().unwrap_or(1);
        policy::retry_after(steps, self.steps.mean())
    }
}

#[cfg(test)]
mod tests;
