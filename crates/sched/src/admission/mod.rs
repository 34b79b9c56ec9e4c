//! Orders: admission, refusal and renewal.
//!
//! Owns: the conditions of admission. Never: accepts a leg that would have to wait for blocks: all
//! that it needs is held or reserved before it is accepted, or it is refused. So no leg waits for a
//! block that another leg holds.
//! Invariant: an order is answered by `Reserved`, `Running` or `Refused`, or is in the end
//! `Released`; a refusal leaves nothing behind, and a repetition changes nothing.

mod late_refusal;
mod reservation;

use crate::WorkerNote;
use crate::batch::StepPipeline;
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::handoff::{EndedHandoff, PeerTraffic};
use crate::memory::{CacheReuse, KvMemory, SequenceWindow};
use crate::policy::{self, ServiceRank};
use crate::report::RouterReports;
use crate::sequences::{SequenceTable, WorkerSequence, prompt_due};
use crate::snapshot::LoadSnapshot;
use cleave_domain::{
    Deadline, HandoffId, PrefillOrder, Refusal, Report, Request, ReserveOrder, RouterId, RunOrder,
    Time,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::receiver::{ExpectedHandoff, HandoffReceiver};
use cleave_kv::handoff::sender::HandoffSender;
use reservation::{ahead, growth};
use std::sync::Arc;
use std::time::Duration;

/// The rules of admission, and of leases.
pub(crate) struct Admission<'a> {
    pub(crate) context: &'a mut WorkerContext,
    pub(crate) sequences: &'a mut SequenceTable,
    pub(crate) memory: &'a mut KvMemory,
    pub(crate) peers: &'a PeerTraffic,
    pub(crate) steps: &'a StepPipeline,
    pub(crate) forecast: &'a WorkForecast,
    /// Whether the worker drains.
    pub(crate) reports: &'a RouterReports,
}

impl Admission<'_> {
    // === both legs ===

    /// Reserves and runs at once: one admission, which starts the prompt or refuses.
    pub(crate) fn run(&mut self, router: RouterId, order: RunOrder) {
        let handoff = order.handoff;
        if self.is_repeated(handoff) {
            return self.context.note(WorkerNote::Repeated { handoff });
        }
        let accepted = self
            .may_run(&order)
            .and_then(|()| self.take_run(router, order));
        self.answer(router, handoff, accepted);
    }

    /// Any worker may serve both legs of one request; its role limits hand-offs with others, and
    /// pooled requests, which have a prefill leg alone.
    fn may_run(&self, order: &RunOrder) -> Result<(), Refusal> {
        if order.request.pooling.is_some() {
            if !self.context.limits().role.prefills() {
                return Err(Refusal::WrongWorker);
            }
            self.may_take(order.handoff, &order.request)?;
            return self.has_room_for_prompt();
        }
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
        let mut sequence = self.new_sequence(router, handoff, request, waited, due);
        self.snapshot().refuse_late_prompt(&mut sequence)?;
        let now = sequence.len().div_ceil(self.context.block_tokens());
        let growth = growth(self.context.limits(), &sequence, expected_output_tokens);
        self.hold(&mut sequence, CacheReuse::AllButLastToken, growth - now)?;
        self.memory.take_reserved(&mut sequence, now);
        let present = sequence.kv.published();
        self.start_prompt(sequence);
        Ok(Report::Running { handoff, present })
    }

    // === the decode leg ===

    pub(crate) fn reserve(&mut self, router: RouterId, order: ReserveOrder) {
        let handoff = order.handoff;
        if self.is_repeated(handoff) {
            return self.context.note(WorkerNote::Repeated { handoff });
        }
        let accepted = self
            .may_reserve(&order)
            .and_then(|()| self.take_reservation(router, order));
        self.answer(router, handoff, accepted);
    }

    fn may_reserve(&self, order: &ReserveOrder) -> Result<(), Refusal> {
        // A sender that is this worker, in any incarnation, or is fenced, will never write.
        let is_other = order.sender.worker != self.context.limits().me.worker;
        if !self.context.limits().role.decodes() || !is_other || self.peers.is_fenced(order.sender)
        {
            return Err(Refusal::WrongWorker);
        }
        self.may_take(order.handoff, &order.request)?;
        self.may_decode(&order.request, order.due)
    }

    /// Whether one more sequence may decode here: the queue for slots has room, and no gap would
    /// miss its target.
    fn may_decode(&self, request: &Request, due: Option<Deadline>) -> Result<(), Refusal> {
        let slots = self.context.limits().capacity.slots_count as usize;
        let decoding = self.sequences.iter().filter(|s| s.decodes_here()).count();
        if decoding >= slots + self.context.limits().queue_max as usize {
            let retry_after = self.snapshot().soonest_end();
            return Err(Refusal::QueueFull { retry_after });
        }
        self.snapshot().refuse_slow_decode(request, due)
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
        let mut sequence = self.new_sequence(router, handoff, request, waited, due);
        let size = self.context.block_tokens();
        let tokens = sequence.len();
        let now = tokens.div_ceil(size);
        // Taken from the reservation now, because the sender may fill them before it seals.
        let blocks = ahead(self.context.limits(), &sequence, ahead_tokens);
        let growth =
            growth(self.context.limits(), &sequence, expected_output_tokens).max(blocks) - now;
        self.hold(&mut sequence, CacheReuse::EveryFullBlock { blocks }, growth)?;
        let present = sequence.kv.published();
        self.memory.take_reserved(&mut sequence, blocks);
        self.memory.take_window(&mut sequence, blocks);
        let window = sequence.kv.window().map(SequenceWindow::target);
        let blocks = sequence.kv.table()[present as usize..].to_vec();
        let state = sequence.kv.state().map(|state| state.live);
        let content = block_hash(sequence.request.cache_scope(), None, &sequence.tokens);
        sequence.peer_state_open = true;
        sequence.incoming = Some(HandoffReceiver::new(ExpectedHandoff {
            handoff,
            sender,
            present,
            blocks: blocks.clone(),
            state,
            window: window.clone(),
            capacity: self.context.limits().capacity,
            vocab_size: self.context.limits().vocab_size,
            tokens,
            content,
            writer: self.context.limits().writer,
        }));
        self.sequences.add(sequence, self.leased_until());
        Ok(Report::Reserved {
            handoff,
            present,
            blocks,
            state,
            window,
        })
    }

    // === the prefill leg ===

    pub(crate) fn prefill(&mut self, router: RouterId, order: PrefillOrder) {
        let handoff = order.handoff;
        let accepted = match self.sequences.get(handoff) {
            None if self.was_here(handoff) => {
                return self.context.note(WorkerNote::Repeated { handoff });
            }
            None => self
                .may_prefill(&order)
                .and_then(|()| self.take_prefill(router, order)),
            // Its decode leg is here, so its prompt runs elsewhere.
            Some(sequence) if sequence.incoming.is_some() => Err(Refusal::WrongWorker),
            Some(_) => return self.context.note(WorkerNote::Repeated { handoff }),
        };
        if let Err(refusal) = accepted {
            self.context
                .report(router, Report::Refused { handoff, refusal });
        }
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
            || target.state.is_some() != self.memory.states().is_some()
            || !self.context.limits().fits_window(target, tokens as u32)
        {
            return Err(Refusal::WrongWorker);
        }
        self.may_take(order.handoff, &order.request)?;
        self.has_room_for_prompt()
    }

    /// Whether the queue of prompts has room. Pooled prompts wait in it with those of prefill legs.
    fn has_room_for_prompt(&self) -> Result<(), Refusal> {
        let queued = |s: &&WorkerSequence| !s.decodes_here() && s.times.started.is_none();
        let queued = self.sequences.iter().filter(queued).count();
        if queued >= self.context.limits().queue_max as usize {
            let tokens = self.snapshot().load().queue_tokens;
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
        let mut sequence = self.new_sequence(router, handoff, request, waited, due);
        self.snapshot().refuse_late_prompt(&mut sequence)?;
        self.hold(&mut sequence, CacheReuse::AllButLastToken, 0)?;
        sequence.peer_state_open = true;
        let capacity = &self.context.limits().capacity;
        sequence.outgoing = Some(HandoffSender::new(handoff, target, capacity));
        self.start_prompt(sequence);
        Ok(())
    }

    // === every order ===

    fn answer(&mut self, router: RouterId, handoff: HandoffId, accepted: Result<Report, Refusal>) {
        let refused = |refusal| Report::Refused { handoff, refusal };
        self.context
            .report(router, accepted.unwrap_or_else(refused));
    }

    /// Makes a sequence that holds nothing yet.
    fn new_sequence(
        &mut self,
        router: RouterId,
        handoff: HandoffId,
        request: Arc<Request>,
        waited: Duration,
        due: Option<Deadline>,
    ) -> WorkerSequence {
        let now = self.context.now();
        let since = now - waited;
        let rank = ServiceRank {
            priority: (request.slo.priority, request.priority),
            due: due.map_or(prompt_due(since, None), |due| now + due.left),
            since,
            arrival: self.sequences.count_arrival(),
            handoff,
        };
        let mut sequence = WorkerSequence::new(rank, router, request, now);
        sequence.on_miss = due.map(|due| due.unmet);
        sequence
    }

    /// Adds a sequence that has all its blocks and whose prompt is to run here.
    fn start_prompt(&mut self, mut sequence: WorkerSequence) {
        self.memory
            .fetch(self.context, &mut sequence, self.steps, self.forecast);
        self.sequences
            .add(sequence.activated(), self.leased_until());
    }

    /// Whether the hand-off is here, or was and is over.
    fn is_repeated(&self, handoff: HandoffId) -> bool {
        self.sequences.contains(handoff) || self.was_here(handoff)
    }

    /// Whether the hand-off was accepted here before, and is over.
    fn was_here(&self, handoff: HandoffId) -> bool {
        matches!(
            self.peers.ended(handoff),
            Some(EndedHandoff::Ended | EndedHandoff::Landed)
        )
    }

    fn may_take(&self, handoff: HandoffId, request: &Request) -> Result<(), Refusal> {
        if self.reports.draining() {
            return Err(Refusal::Draining);
        }
        // The receiver was assured that nothing of it comes; or a sequence leaves under its name.
        let unwritten = self.peers.ended(handoff) == Some(EndedHandoff::StoppedBeforeStart);
        if unwritten || self.peers.is_move(handoff) {
            return Err(Refusal::WrongWorker);
        }
        // An unknown token would fail the whole step that the request is part of.
        let vocab_size = self.context.limits().vocab_size;
        if !request.is_runnable(vocab_size) {
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

    // === leases ===

    pub(crate) fn renew(&mut self, router: RouterId, handoffs: &[HandoffId]) {
        for handoff in handoffs {
            let sequence = self.sequences.get(*handoff);
            if sequence.is_some_and(|s| s.router == router) {
                self.sequences.renew(*handoff, self.leased_until());
            }
        }
    }

    fn leased_until(&self) -> Time {
        self.context.now() + self.context.limits().lease
    }

    pub(crate) fn snapshot(&self) -> LoadSnapshot<'_> {
        LoadSnapshot {
            context: self.context,
            sequences: self.sequences,
            memory: self.memory,
            steps: self.steps,
            forecast: self.forecast,
        }
    }
}

#[cfg(test)]
mod tests;
