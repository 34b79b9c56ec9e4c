//! One hand-off as this worker has it: a sequence, its blocks, its slot and its peer.
//!
//! Owns: the sequence's facts and the arithmetic on them. Never: decides; the brain does.
//! Invariant: the KV of `tokens[..computed]` is in `table`; a sequence that is active has at least
//! one token left to run.

use crate::pace::Pace;
use crate::policy::Rank;
use crate::speculate::Speculating;
use crate::swap::{Swap, SwapStage};
use crate::tier::Fetch;
use cleave_domain::{
    BlockHash, BlockRef, DueUnmet, FinishReason, HandoffId, LogitsWanted, OpenSlot, PrefillTiming,
    Request, RouterId, Sampled, SlotIndex, Time, TokenId, WorkerRef,
};
use cleave_kv::handoff::{receiver::Receiver, sender::Sender};
use cleave_kv::{Pool, Promise, extend_hashes};
use std::collections::BTreeSet;
use std::sync::Arc;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    /// Its place among all others; names the hand-off.
    pub(crate) rank: Rank,
    /// Whose client it serves.
    pub(crate) router: RouterId,
    /// What to generate.
    pub(crate) request: Arc<Request>,
    /// What becomes of it if its first token cannot be there when it is due; `None` if it is due at no
    /// time.
    pub(crate) unmet: Option<DueUnmet>,
    /// Where it stands.
    pub(crate) stage: Stage,
    /// What its next token is.
    pub(crate) phase: Phase,
    /// Expects the KV from elsewhere, or did.
    pub(crate) incoming: Option<Receiver>,
    /// Sends the KV elsewhere, as a prompt that is handed on.
    pub(crate) outgoing: Option<Sender>,
    /// The attempt under which it leaves for another decode worker.
    pub(crate) moving: Option<HandoffId>,
    /// It is in host memory, or on its way there or back.
    pub(crate) swap: Option<Swap>,
    /// Part of its beginning is being brought back from below the pool.
    pub(crate) fetch: Option<Fetch>,
    /// The body keeps something for the hand-off with the peer until it is told to forget it.
    pub(crate) peered: bool,
    /// Prompt and output so far.
    pub(crate) tokens: Vec<TokenId>,
    /// Leading tokens whose KV is in the table's blocks.
    pub(crate) computed: u32,
    /// Its blocks, in order.
    pub(crate) table: Vec<BlockRef>,
    /// Blocks it may still take, whoever else wants some.
    pub(crate) promise: Promise,
    /// Hashes of its first full blocks, as far as they were needed.
    pub(crate) hashes: Vec<BlockHash>,
    /// Leading blocks that the pool knows the content of.
    pub(crate) published: u32,
    /// Leading blocks that the sender was told of.
    pub(crate) exported: u32,
    /// Its place in the engine.
    pub(crate) slot: Option<SlotIndex>,
    /// The engine knows that the slot is its.
    pub(crate) opened: bool,
    /// Steps under way that it is part of.
    pub(crate) steps_count: u32,
    /// Scores of the prompt's tokens so far, if they were asked for.
    pub(crate) prompt_scores: Vec<Sampled>,
    /// Prompt tokens that came from the prefix cache.
    pub(crate) cached_tokens: u32,
    /// When things happened.
    pub(crate) times: Times,
    /// When things happened that its client feels.
    pub(crate) pace: Pace,
    /// What its next tokens may be.
    pub(crate) speculating: Speculating,
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Holds its blocks; waits for its KV, or for the order to compute it here.
    Reserved,
    /// Has tokens to run: waits for a slot or for blocks, or is in the running batch.
    Active,
    /// Its prompt is done; its blocks are on their way to the peer.
    Sending,
    /// It stands still; its last block and the tokens drawn since it was to move are on their way.
    Still,
    /// Over for everybody but those who still read or write its blocks: a step under way, a copy,
    /// a sender that writes here itself.
    Closing {
        /// When it was cancelled, if that is why.
        cancelled: Option<Time>,
    },
}

/// What the next token drawn is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    /// The first one of this hand-off.
    Prompt,
    /// A further one.
    Decode,
}

/// When things happened to a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The order that brought it (the second one if both legs are here).
    pub(crate) accepted: Time,
    /// Its first chunk.
    pub(crate) started: Option<Time>,
    /// Its first export.
    pub(crate) sending: Option<Time>,
    /// The seal's arrival.
    pub(crate) sealed: Option<Time>,
    /// When the token was drawn with which it is handed on, and how many bytes had left by then.
    pub(crate) drawn: Option<(Time, u64)>,
}

impl Sequence {
    /// A sequence that holds nothing yet.
    pub(crate) fn new(rank: Rank, router: RouterId, request: Arc<Request>, now: Time) -> Self {
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        Self {
            rank,
            router,
            request,
            unmet: None,
            stage: Stage::Reserved,
            phase: Phase::Prompt,
            incoming: None,
            outgoing: None,
            moving: None,
            swap: None,
            fetch: None,
            peered: false,
            tokens,
            computed: 0,
            table: Vec::new(),
            promise: Promise::default(),
            hashes: Vec::new(),
            published: 0,
            exported: 0,
            slot: None,
            opened: false,
            steps_count: 0,
            prompt_scores: Vec::new(),
            cached_tokens: 0,
            times: Times {
                accepted: now,
                started: None,
                sending: None,
                sealed: None,
                drawn: None,
            },
            pace: Pace::new(now),
            speculating: Speculating::default(),
        }
    }

    /// What the prompt's way has taken, as its last token is drawn.
    pub(crate) fn prefill_timing(&self, now: Time) -> PrefillTiming {
        let started = self.times.started.unwrap_or(now);
        PrefillTiming {
            wait: started.since(self.times.accepted),
            run: now.since(started),
        }
    }

    /// Tokens, run or not.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("a sequence fits the context")
    }

    /// Tokens to run before the next one can be drawn.
    pub(crate) fn rest(&self) -> u32 {
        self.len() - self.computed
    }

    /// Output tokens over the whole life of the request.
    pub(crate) fn output_count(&self) -> u32 {
        self.len() - self.prompt_count()
    }

    /// Prompt tokens.
    pub(crate) fn prompt_count(&self) -> u32 {
        u32::try_from(self.request.prompt.len()).expect("a prompt fits the context")
    }

    /// Whether a step under way reads and writes its blocks.
    pub(crate) fn stepping(&self) -> bool {
        self.steps_count > 0
    }

    /// Whether its blocks, held or promised, are enough for the tokens it has.
    pub(crate) fn secured(&self, block_tokens: u32) -> bool {
        let blocks = self.table.len() + self.promise.count() as usize;
        blocks >= self.len().div_ceil(block_tokens) as usize
    }

    /// Whether it lost its blocks to a more important one and waits to have them back.
    pub(crate) fn starved(&self) -> bool {
        self.stage == Stage::Active && self.table.is_empty() && self.promise.count() == 0
    }

    /// Whether it goes on from KV that is here, and has no slot yet.
    pub(crate) fn landed(&self) -> bool {
        self.generates() && self.slot.is_none()
    }

    /// Whether all it needs for its next token is one more step here.
    pub(crate) fn generates(&self) -> bool {
        self.stage == Stage::Active
            && self.phase == Phase::Decode
            && self.outgoing.is_none()
            && self.swap.is_none()
            && self.rest() == 1
    }

    /// Whether it has tokens to run before it can generate.
    pub(crate) fn computes(&self) -> bool {
        let decodes = self.phase == Phase::Decode && self.rest() == 1;
        self.stage == Stage::Active && !decodes && self.swap.is_none()
    }

    /// Whether it generates here in the end, rather than elsewhere.
    pub(crate) fn decodes_here(&self) -> bool {
        self.outgoing.is_none()
    }

    /// Whether it is over, but for those who still read or write its blocks.
    pub(crate) fn closing(&self) -> bool {
        matches!(self.stage, Stage::Closing { .. })
    }

    /// Whether it is reserved, and its prompt is to be run here too.
    pub(crate) fn awaits_prefill(&self) -> bool {
        self.stage == Stage::Reserved && self.incoming.is_none()
    }

    /// Whether losing its blocks costs nothing but computing or copying them again, here; while they are filled from
    /// below the pool, once that has stopped.
    pub(crate) fn recomputable(&self) -> bool {
        self.stage == Stage::Active
            && self.outgoing.is_none()
            && self.swap.is_none()
            && !self.stepping()
            && !self.starved()
    }

    /// Whether it is over, and the sender may still write to its blocks.
    pub(crate) fn quarantined(&self) -> bool {
        self.incoming.as_ref().is_some_and(Receiver::quarantined)
    }

    /// Whether its blocks are being copied to host memory or back, or filled from below the pool.
    pub(crate) fn swapping(&self) -> bool {
        let copied = |swap: Swap| matches!(swap.stage, SwapStage::Out | SwapStage::In);
        self.swap.is_some_and(copied) || self.fetch.is_some()
    }

    /// Leading tokens whose KV is in its blocks, or is being brought there.
    pub(crate) fn computed_soon(&self, block_tokens: u32) -> u32 {
        let fetched = self.fetch.map_or(0, |fetch| fetch.blocks * block_tokens);
        self.computed + fetched
    }

    /// The worker at the other end, while the hand-off with it is open.
    pub(crate) fn peer(&self) -> Option<WorkerRef> {
        let incoming = self.incoming.as_ref().filter(|receiver| receiver.open());
        let outgoing = self.outgoing.as_ref().filter(|sender| sender.open());
        incoming
            .map(Receiver::sender)
            .or_else(|| outgoing.map(Sender::receiver))
    }

    /// Whether nobody reads or writes its blocks, but for a move: only then may they go.
    pub(crate) fn settled(&self) -> bool {
        self.settled_here() && self.incoming.as_ref().is_none_or(Receiver::settled)
    }

    /// The same, but for another worker that may still write to them itself.
    pub(crate) fn settled_here(&self) -> bool {
        !self.stepping()
            && !self.swapping()
            && self.incoming.as_ref().is_none_or(Receiver::idle)
            && self.outgoing.as_ref().is_none_or(Sender::settled)
    }

    /// Whether nothing is left but that the peer, or the link to it, moves on: no own copy, which
    /// may have to queue behind others, and is always answered.
    pub(crate) fn waits_for_peer(&self) -> bool {
        let lacks_bytes = |receiver: &Receiver| receiver.sealed() && receiver.settled();
        self.incoming.as_ref().is_some_and(lacks_bytes)
            || self.outgoing.as_ref().is_some_and(Sender::sealed)
    }

    /// Whether the prompt's tokens are to be scored: then all of them must be run.
    pub(crate) fn scores_prompt(&self) -> bool {
        self.phase == Phase::Prompt
            && self.request.sampling.prompt_logprobs.is_some()
            && self.request.generated.is_empty()
    }

    /// What a segment that ends the sequence (or not) should compute.
    pub(crate) fn logits(&self, tokens: u32) -> LogitsWanted {
        let sample = tokens == self.rest();
        match (self.scores_prompt(), sample) {
            (true, true) => LogitsWanted::ScoreAndSample,
            (true, false) => LogitsWanted::Score,
            (false, true) => LogitsWanted::Sample,
            (false, false) => LogitsWanted::No,
        }
    }

    /// What the engine must know of it when it takes a slot.
    pub(crate) fn opening(&self, slot: SlotIndex) -> OpenSlot {
        OpenSlot {
            slot,
            sampling: Arc::new(self.request.sampling.clone()),
            prompt: Arc::clone(&self.request.prompt),
            output: self.tokens[self.request.prompt.len()..].to_vec(),
            stop_tokens: Arc::clone(&self.request.stop.stop_tokens),
            min_tokens: self.request.stop.min_tokens,
        }
    }

    /// Why it is over, if its last token was the last.
    pub(crate) fn ended(&self, context_tokens_max: u32) -> Option<FinishReason> {
        let output = &self.tokens[self.request.prompt.len()..];
        self.request.over(output, context_tokens_max)
    }

    /// Hashes of the leading blocks it could take from the cache if it is to run here: never the
    /// last token's block, because running that token gives the next one.
    pub(crate) fn reusable(&mut self, block_tokens: u32) -> &[BlockHash] {
        if self.scores_prompt() {
            return &[];
        }
        self.extend_hashes(block_tokens);
        &self.hashes[..((self.len() - 1) / block_tokens) as usize]
    }

    /// Hashes every full block that was not hashed before.
    pub(crate) fn extend_hashes(&mut self, block_tokens: u32) {
        let salt = self.request.cache_salt;
        extend_hashes(&mut self.hashes, salt, &self.tokens, block_tokens);
    }

    /// Gives everything back to the pool, leaves before roots, so that a cached prefix loses its
    /// end first.
    pub(crate) fn give_back(&mut self, pool: &mut Pool) {
        for slot in self.table.drain(..).rev() {
            pool.release(slot);
        }
        pool.forgive(&mut self.promise);
        self.computed = 0;
        self.published = 0;
    }

    /// Gives its slot back, if it has one.
    pub(crate) fn unseat(&mut self, slots: &mut BTreeSet<SlotIndex>) {
        slots.extend(self.slot.take());
        self.opened = false;
    }
}
