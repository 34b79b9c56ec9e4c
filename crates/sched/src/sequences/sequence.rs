//! One hand-off as this worker has it: a sequence, its blocks, its slot and its peer.
//!
//! Owns: the sequence's facts and the arithmetic on them. Never: decides; the brain does.
//! Invariant: a sequence that is active has at least one token left to run.

use super::client_timing::ClientTiming;
use super::pooled::PooledSoFar;
use crate::memory::{SequenceKv, SwapState};
use crate::policy::ServiceRank;
use crate::speculate::SpeculationState;
use cleave_domain::{
    FinishReason, HandoffId, LogitsWanted, OnDeadlineMiss, OpenSlot, PrefillTiming, Request,
    RouterId, SampledToken, SlotIndex, Time, TokenId, WorkerRef,
};
use cleave_kv::handoff::{receiver::HandoffReceiver, sender::HandoffSender};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) struct WorkerSequence {
    /// Its place among all others; names the hand-off.
    pub(super) rank: ServiceRank,
    /// The router whose client it serves.
    pub(crate) router: RouterId,
    pub(crate) request: Arc<Request>,
    /// The action if its first token misses its deadline; `None` if it has no deadline.
    pub(crate) on_miss: Option<OnDeadlineMiss>,
    pub(super) stage: SequenceStage,
    /// Kind of the next token.
    pub(crate) phase: SequencePhase,
    /// Receiver of the KV from another worker, also after it landed.
    pub(crate) incoming: Option<HandoffReceiver>,
    /// Sender of the prompt's KV to the decode worker.
    pub(crate) outgoing: Option<HandoffSender>,
    /// The attempt under which it moves to another decode worker.
    pub(crate) moving: Option<HandoffId>,
    /// Its blocks and state, in the pools, in host memory, or on the way between.
    pub(crate) kv: SequenceKv,
    /// The body keeps state for the hand-off with the peer, until `Forget`.
    pub(crate) peer_state_open: bool,
    /// Prompt and output so far.
    pub(crate) tokens: Vec<TokenId>,
    /// Leading blocks that were given to the sender.
    pub(crate) exported: u32,
    pub(super) slot: Option<SlotIndex>,
    /// The engine has opened the slot for this sequence.
    pub(super) opened: bool,
    /// Steps under way that contain it.
    pub(super) steps_count: u32,
    /// Scores of the prompt's tokens so far, if they were requested.
    pub(crate) prompt_scores: Vec<SampledToken>,
    /// Its vector so far, if it asks for one.
    pub(crate) pooled: PooledSoFar,
    /// Prompt tokens that came from the prefix cache.
    pub(crate) cached_tokens: u32,
    pub(crate) times: SequenceTimes,
    /// Times of what its client observes, for its targets.
    pub(crate) client_timing: ClientTiming,
    /// State of speculation: index, drafts, acceptance.
    pub(crate) speculating: SpeculationState,
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SequenceStage {
    /// Holds its blocks; waits for its KV from another worker.
    Reserved,
    /// Has tokens to run: waits for a slot or for blocks, or is in the running batch.
    Active,
    /// Its prompt is done; its blocks are being sent to the peer.
    Sending,
    /// Paused for a move; its last block and the tokens drawn since the order are being sent.
    Paused,
    /// Over, except that a step under way, a copy, or a sender with one-sided access still touches
    /// its blocks.
    Closing {
        /// Time of the cancel, if that is why.
        cancelled: Option<Time>,
    },
}

/// Kind of the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SequencePhase {
    /// The first one of this hand-off.
    Prompt,
    Decode,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SequenceTimes {
    /// Time of the order that brought it.
    pub(crate) accepted: Time,
    pub(crate) started: Option<Time>,
    pub(crate) sending: Option<Time>,
    pub(crate) sealed: Option<Time>,
    /// When the prompt's first token was drawn, and the bytes sent by then.
    pub(crate) drawn: Option<(Time, u64)>,
}

impl WorkerSequence {
    /// Creates a sequence that holds nothing yet.
    pub(crate) fn new(
        rank: ServiceRank,
        router: RouterId,
        request: Arc<Request>,
        now: Time,
    ) -> Self {
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        Self {
            rank,
            router,
            request,
            on_miss: None,
            stage: SequenceStage::Reserved,
            phase: SequencePhase::Prompt,
            incoming: None,
            outgoing: None,
            moving: None,
            kv: SequenceKv::default(),
            peer_state_open: false,
            tokens,
            exported: 0,
            slot: None,
            opened: false,
            steps_count: 0,
            prompt_scores: Vec::new(),
            pooled: PooledSoFar::default(),
            cached_tokens: 0,
            times: SequenceTimes {
                accepted: now,
                started: None,
                sending: None,
                sealed: None,
                drawn: None,
            },
            client_timing: ClientTiming::new(now),
            speculating: SpeculationState::default(),
        }
    }

    /// Makes its prompt one to be run here, before it is added to the table.
    pub(crate) fn activated(mut self) -> Self {
        self.stage = SequenceStage::Active;
        self
    }

    pub(crate) fn handoff(&self) -> HandoffId {
        self.rank.handoff
    }

    pub(crate) fn rank(&self) -> ServiceRank {
        self.rank
    }

    pub(crate) fn stage(&self) -> SequenceStage {
        self.stage
    }

    pub(crate) fn slot(&self) -> Option<SlotIndex> {
        self.slot
    }

    /// Steps under way that contain it.
    pub(crate) fn steps_count(&self) -> u32 {
        self.steps_count
    }

    /// Waiting and running time of the prompt, as its last token is drawn.
    pub(crate) fn prefill_timing(&self, now: Time) -> PrefillTiming {
        let started = self.times.started.unwrap_or(now);
        PrefillTiming {
            wait: started.since(self.times.accepted),
            run: now.since(started),
        }
    }

    /// Number of tokens, run or not.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("a sequence fits the context")
    }

    /// Tokens to run before the next one can be drawn.
    pub(crate) fn tokens_to_run(&self) -> u32 {
        self.len() - self.kv.computed()
    }

    /// Output tokens over the whole life of the request.
    pub(crate) fn output_count(&self) -> u32 {
        self.len() - self.prompt_count()
    }

    pub(crate) fn prompt_count(&self) -> u32 {
        u32::try_from(self.request.prompt.len()).expect("a prompt fits the context")
    }

    /// Whether a step under way reads and writes its blocks.
    pub(crate) fn stepping(&self) -> bool {
        self.steps_count > 0
    }

    /// Whether its blocks, held or reserved, are enough for the tokens it has.
    pub(crate) fn has_all_blocks(&self, block_tokens: u32) -> bool {
        self.kv.blocks() >= u64::from(self.len().div_ceil(block_tokens))
    }

    /// Whether it lost its blocks to a more important one and waits for new ones.
    pub(crate) fn starved(&self) -> bool {
        self.stage == SequenceStage::Active && self.kv.blocks() == 0
    }

    /// Whether its KV is here and it only lacks a slot.
    pub(crate) fn awaits_slot(&self) -> bool {
        self.decodes_next() && self.slot.is_none()
    }

    /// Whether one more step here gives its next token.
    pub(crate) fn decodes_next(&self) -> bool {
        self.stage == SequenceStage::Active
            && self.phase == SequencePhase::Decode
            && self.outgoing.is_none()
            && self.kv.swap().is_none()
            && self.kv.fetch().is_none()
            && self.tokens_to_run() == 1
    }

    /// Whether it has prompt or lost tokens to run before it can decode.
    pub(crate) fn has_prefill_left(&self) -> bool {
        let decodes = self.phase == SequencePhase::Decode && self.tokens_to_run() == 1;
        self.stage == SequenceStage::Active && !decodes && self.kv.swap().is_none()
    }

    /// Whether it decodes here in the end, rather than elsewhere or not at all.
    pub(crate) fn decodes_here(&self) -> bool {
        self.outgoing.is_none() && !self.pools()
    }

    /// Whether it is over, except for readers and writers of its blocks.
    pub(crate) fn closing(&self) -> bool {
        matches!(self.stage, SequenceStage::Closing { .. })
    }

    /// Whether its blocks can be taken at no cost but computing or copying them again, here; while
    /// they are being filled from a tier, once that has stopped.
    pub(crate) fn preemptible(&self) -> bool {
        self.stage == SequenceStage::Active
            && self.outgoing.is_none()
            && self.kv.swap().is_none()
            && !self.stepping()
            && !self.starved()
    }

    /// Whether it is over, and the sender may still write to its blocks.
    pub(crate) fn quarantined(&self) -> bool {
        self.incoming
            .as_ref()
            .is_some_and(HandoffReceiver::is_quarantined)
    }

    /// Whether its blocks are being copied to host memory or back, or filled from a tier.
    pub(crate) fn swapping(&self) -> bool {
        self.kv.swap().is_some_and(SwapState::is_copied) || self.kv.fetch().is_some()
    }

    /// Leading tokens whose KV is in its blocks, or is being copied there.
    pub(crate) fn computed_or_fetching(&self, block_tokens: u32) -> u32 {
        let fetched = self
            .kv
            .fetch()
            .map_or(0, |fetch| fetch.blocks * block_tokens);
        self.kv.computed() + fetched
    }

    /// The worker at the other end, while the hand-off with it is open.
    pub(crate) fn peer(&self) -> Option<WorkerRef> {
        let incoming = self.incoming.as_ref().filter(|receiver| receiver.is_open());
        let outgoing = self.outgoing.as_ref().filter(|sender| sender.is_open());
        incoming
            .map(HandoffReceiver::sender)
            .or_else(|| outgoing.map(HandoffSender::receiver))
    }

    /// Whether nothing reads or writes its blocks, apart from a move: only then may they be
    /// released.
    pub(crate) fn settled(&self) -> bool {
        self.settled_here()
            && self
                .incoming
                .as_ref()
                .is_none_or(HandoffReceiver::is_settled)
    }

    /// The same, but another worker may still write to them itself.
    pub(crate) fn settled_here(&self) -> bool {
        !self.stepping()
            && !self.swapping()
            && self.incoming.as_ref().is_none_or(HandoffReceiver::is_idle)
            && self.outgoing.as_ref().is_none_or(HandoffSender::is_settled)
    }

    /// Whether only the peer, or the link to it, can make progress: no copy of our own is pending,
    /// since those may queue behind others and are always answered.
    pub(crate) fn waits_for_peer(&self) -> bool {
        let lacks_bytes =
            |receiver: &HandoffReceiver| receiver.is_sealed() && receiver.is_settled();
        self.incoming.as_ref().is_some_and(lacks_bytes)
            || self.outgoing.as_ref().is_some_and(HandoffSender::is_sealed)
    }

    /// Whether the prompt's tokens are to be scored: then all of them must be run.
    pub(crate) fn scores_prompt(&self) -> bool {
        self.phase == SequencePhase::Prompt
            && self.request.sampling.prompt_logprobs.is_some()
            && self.request.generated.is_empty()
    }

    /// The logits that a segment of so many tokens must compute.
    pub(crate) fn logits(&self, tokens: u32) -> LogitsWanted {
        if self.pools() {
            return if self.pools_segment(tokens) {
                LogitsWanted::Pool
            } else {
                LogitsWanted::No
            };
        }
        let sample = tokens == self.tokens_to_run();
        match (self.scores_prompt(), sample) {
            (true, true) => LogitsWanted::ScoreAndSample,
            (true, false) => LogitsWanted::Score,
            (false, true) => LogitsWanted::Sample,
            (false, false) => LogitsWanted::No,
        }
    }

    /// The engine's description of the sequence when it takes a slot.
    pub(super) fn describe(&self, slot: SlotIndex) -> OpenSlot {
        OpenSlot {
            slot,
            sampling: Arc::new(self.request.sampling.clone()),
            prompt: Arc::clone(&self.request.prompt),
            output: self.tokens[self.request.prompt.len()..].to_vec(),
            stop_tokens: Arc::clone(&self.request.stop.stop_tokens),
            min_tokens: self.request.stop.min_tokens,
            adapter: self.request.adapter,
        }
    }

    /// The reason that it is over, if its last token was the last.
    pub(crate) fn finish_reason(&self, context_tokens_max: u32) -> Option<FinishReason> {
        let output = &self.tokens[self.request.prompt.len()..];
        self.request.finish_reason(output, context_tokens_max)
    }

    /// Asserts that its blocks, slot and machines fit its stage.
    pub(crate) fn check(&self, block_tokens: u32) {
        let covered = self.kv.table().len() * block_tokens as usize;
        match self.stage {
            SequenceStage::Active => {
                assert!(
                    self.tokens_to_run() > 0,
                    "an active sequence has no token to run"
                );
                assert!(
                    self.kv.computed() as usize <= covered,
                    "computed tokens exceed the sequence's blocks"
                );
                let decoding = self.slot.is_some() || self.kv.computed() + 1 == self.len();
                assert!(
                    self.starved() || decoding || self.has_all_blocks(block_tokens),
                    "a running prompt lacks blocks: {self:?}"
                );
            }
            SequenceStage::Reserved => assert!(self.slot.is_none() && !self.stepping()),
            SequenceStage::Sending => {
                let open = self.outgoing.as_ref().is_some_and(|s| s.is_open());
                assert!(
                    self.slot.is_none() && open,
                    "a sending sequence has a slot or no open sender"
                );
            }
            SequenceStage::Paused => {
                let is_paused = self.slot.is_none() && self.moving.is_some();
                assert!(
                    is_paused && !self.stepping(),
                    "a paused sequence has a slot, no move, or a step"
                );
            }
            SequenceStage::Closing { .. } => {}
        }
        if self.kv.swap().is_some() {
            let stands = self.slot.is_none() && !self.stepping() && self.moving.is_none();
            assert!(
                stands,
                "a swapped sequence has a slot, a step or a move: {self:?}"
            );
        }
        if let Some(receiver) = &self.incoming {
            receiver.check();
        }
        if let Some(sender) = &self.outgoing {
            sender.check();
        }
    }
}
