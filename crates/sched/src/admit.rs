//! Orders: admission, refusal and renewal.
//!
//! Owns: the conditions of admission. Never: accepts a leg that would have to wait for blocks: all
//! that it needs is held or reserved before it is accepted, or it is refused. So no leg waits for a
//! block that another leg holds.
//! Invariant: an order is answered by `Reserved`, `Running` or `Refused`, or is in the end
//! `Released`; a refusal leaves nothing behind, and a repetition changes nothing.

use crate::client_timing::prompt_due;
use crate::policy::{self, ServiceRank};
use crate::recently_ended::EndedHandoff;
use crate::reservation::CacheReuse;
use crate::sequence::{SequenceStage, WorkerSequence};
use crate::{WorkerBrain, WorkerNote};
use cleave_domain::{
    Deadline, HandoffId, PrefillOrder, Refusal, Report, Request, ReserveOrder, RouterId, RunOrder,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::receiver::{ExpectedHandoff, HandoffReceiver};
use cleave_kv::handoff::sender::HandoffSender;
use std::sync::Arc;
use std::time::Duration;

/// The part of an order that makes a sequence.
struct SequenceOrder {
    handoff: HandoffId,
    request: Arc<Request>,
    waited: Duration,
    due: Option<Deadline>,
}

impl WorkerBrain {
    // === both legs ===

    /// Reserves and runs at once: one admission, which starts the prompt or refuses.
    pub(crate) fn run(&mut self, router: RouterId, order: RunOrder) {
        let handoff = order.handoff;
        if self.is_repeated(handoff) {
            return self.note(WorkerNote::Repeated { handoff });
        }
        let accepted = self
            .may_run(&order)
            .and_then(|()| self.take_run(router, order));
        match accepted {
            Ok(running) => self.report(router, running),
            Err(refusal) => self.report(router, Report::Refused { handoff, refusal }),
        }
    }

    /// Any worker may serve both legs of one request; its role limits hand-offs with others.
    fn may_run(&self, order: &RunOrder) -> Result<(), Refusal> {
        self.may_take(order.handoff, &order.request)?;
        self.may_decode(&order.request, order.due)
    }

    /// Holds every block of prompt and output so far, reserves some for growth, and makes the
    /// prompt runnable; all or none.
    fn take_run(&mut self, router: RouterId, order: RunOrder) -> Result<Report, Refusal> {
        let RunOrder {
            handoff,
            request,
            expected_output_tokens,
            waited,
            due,
        } = order;
        let of = SequenceOrder {
            handoff,
            request,
            waited,
            due,
        };
        let mut sequence = self.new_sequence(router, of);
        self.refuse_late_prompt(&mut sequence)?;
        let now = sequence.len().div_ceil(self.limits.capacity.block_tokens);
        let growth = self.growth(&sequence, expected_output_tokens);
        self.hold(&mut sequence, CacheReuse::AllButLastToken, growth - now)?;
        self.take_blocks(&mut sequence, now);
        let present = sequence.published;
        self.start_prompt(sequence);
        Ok(Report::Running { handoff, present })
    }

    // === the decode leg ===

    pub(crate) fn reserve(&mut self, router: RouterId, order: ReserveOrder) {
        let handoff = order.handoff;
        if self.is_repeated(handoff) {
            return self.note(WorkerNote::Repeated { handoff });
        }
        let accepted = self
            .may_reserve(&order)
            .and_then(|()| self.take_reservation(router, order));
        match accepted {
            Ok(reserved) => self.report(router, reserved),
            Err(refusal) => self.report(router, Report::Refused { handoff, refusal }),
        }
    }

    fn may_reserve(&self, order: &ReserveOrder) -> Result<(), Refusal> {
        // A sender that is this worker, in any incarnation, or is fenced, will never write.
        let is_other = order.sender.worker != self.limits.me.worker;
        if !self.limits.role.decodes() || !is_other || self.fenced.covers(order.sender) {
            return Err(Refusal::WrongWorker);
        }
        self.may_take(order.handoff, &order.request)?;
        self.may_decode(&order.request, order.due)
    }

    /// Whether one more sequence may decode here: the queue for slots has room, and no gap would
    /// miss its target.
    fn may_decode(&self, request: &Request, due: Option<Deadline>) -> Result<(), Refusal> {
        let slots = self.limits.capacity.slots_count as usize;
        let decoding = self.sequences.values().filter(|s| s.decodes_here()).count();
        if decoding >= slots + self.limits.queue_max as usize {
            let retry_after = self.soonest_end();
            return Err(Refusal::QueueFull { retry_after });
        }
        self.refuse_slow_decode(request, due)
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
        let of = SequenceOrder {
            handoff,
            request,
            waited,
            due,
        };
        let mut sequence = self.new_sequence(router, of);
        let size = self.limits.capacity.block_tokens;
        let tokens = sequence.len();
        let now = tokens.div_ceil(size);
        // Taken from the reservation now, because the sender may fill them before it seals.
        let blocks = self.ahead(&sequence, ahead_tokens);
        let growth = self.growth(&sequence, expected_output_tokens).max(blocks) - now;
        self.hold(&mut sequence, CacheReuse::EveryFullBlock, growth)?;
        let present = sequence.published;
        self.take_blocks(&mut sequence, blocks);
        let blocks = sequence.table[present as usize..].to_vec();
        let state = sequence.state.map(|state| state.live);
        let content = block_hash(sequence.request.cache_salt, None, &sequence.tokens);
        sequence.peer_state_open = true;
        sequence.incoming = Some(HandoffReceiver::new(ExpectedHandoff {
            handoff,
            sender,
            present,
            blocks: blocks.clone(),
            state,
            capacity: self.limits.capacity,
            vocab_size: self.limits.vocab_size,
            tokens,
            content,
            writer: self.limits.writer,
        }));
        self.sequences.insert(handoff, sequence);
        self.renewed(handoff);
        Ok(Report::Reserved {
            handoff,
            present,
            blocks,
            state,
        })
    }

    // === the prefill leg ===

    pub(crate) fn prefill(&mut self, router: RouterId, order: PrefillOrder) {
        let handoff = order.handoff;
        let accepted = match self.sequences.get(&handoff) {
            None if self.was_here(handoff) => return self.note(WorkerNote::Repeated { handoff }),
            None => self
                .may_prefill(&order)
                .and_then(|()| self.take_prefill(router, order)),
            // Its decode leg is here, so its prompt runs elsewhere.
            Some(sequence) if sequence.incoming.is_some() => Err(Refusal::WrongWorker),
            Some(_) => return self.note(WorkerNote::Repeated { handoff }),
        };
        if let Err(refusal) = accepted {
            self.report(router, Report::Refused { handoff, refusal });
        }
    }

    fn may_prefill(&self, order: &PrefillOrder) -> Result<(), Refusal> {
        let target = &order.target;
        let tokens = order.request.prompt.len() + order.request.generated.len();
        let blocks = tokens.div_ceil(self.limits.capacity.block_tokens as usize);
        let blocks_reserved = target.present as usize + target.blocks.len();
        if !self.limits.role.prefills()
            || target.worker.worker == self.limits.me.worker
            || blocks_reserved < blocks
            || target.present as usize > blocks
            || target.state.is_some() != self.pools.states.is_some()
        {
            return Err(Refusal::WrongWorker);
        }
        self.may_take(order.handoff, &order.request)?;
        let queued = |s: &&WorkerSequence| s.outgoing.is_some() && s.times.started.is_none();
        let queued = self.sequences.values().filter(queued).count();
        if queued >= self.limits.queue_max as usize {
            let tokens = self.load().queue_tokens;
            let steps = tokens / u64::from(self.limits.capacity.step_tokens_max).max(1);
            let steps = u32::try_from(steps).unwrap_or(u32::MAX);
            // There is room for one more once the first of the queue has started.
            let retry_after =
                policy::retry_after(steps / self.limits.queue_max.max(1), self.step_mean);
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
        let of = SequenceOrder {
            handoff,
            request,
            waited,
            due,
        };
        let mut sequence = self.new_sequence(router, of);
        self.refuse_late_prompt(&mut sequence)?;
        self.hold(&mut sequence, CacheReuse::AllButLastToken, 0)?;
        sequence.peer_state_open = true;
        let pieces = self.limits.capacity.state_pieces();
        sequence.outgoing = Some(HandoffSender::new(handoff, target, pieces));
        self.start_prompt(sequence);
        Ok(())
    }

    // === every order ===

    /// Makes a sequence that holds nothing yet.
    fn new_sequence(&mut self, router: RouterId, of: SequenceOrder) -> WorkerSequence {
        let rank = self.rank(&of);
        let mut sequence = WorkerSequence::new(rank, router, of.request, self.now);
        sequence.on_miss = of.due.map(|due| due.unmet);
        sequence
    }

    /// Adds a sequence that has all its blocks and whose prompt is to run here.
    fn start_prompt(&mut self, mut sequence: WorkerSequence) {
        let rank = sequence.rank;
        sequence.stage = SequenceStage::Active;
        self.active.insert(rank);
        self.sequences.insert(rank.handoff, sequence);
        self.renewed(rank.handoff);
        self.fetch(rank.handoff);
    }

    fn rank(&mut self, of: &SequenceOrder) -> ServiceRank {
        self.arrivals += 1;
        let since = self.now - of.waited;
        ServiceRank {
            priority: (of.request.slo.priority, of.request.priority),
            due: of
                .due
                .map_or(prompt_due(since, None), |due| self.now + due.left),
            since,
            arrival: self.arrivals,
            handoff: of.handoff,
        }
    }

    /// Whether the hand-off is here, or was and is over.
    fn is_repeated(&self, handoff: HandoffId) -> bool {
        self.sequences.contains_key(&handoff) || self.was_here(handoff)
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
        let vocab_size = self.limits.vocab_size;
        if !policy::runnable(request, vocab_size) {
            return Err(Refusal::OutOfVocabulary { vocab_size });
        }
        let capacity = &self.limits.capacity;
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
        self.leases.set(handoff, self.now + self.limits.lease);
    }
}

#[cfg(test)]
mod tests;
