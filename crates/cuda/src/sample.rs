//! Drawing tokens on the device.
//!
//! Owns: the logits' memory, the rules as kernels read them, and the return of tokens to the host:
//! each draw has pinned memory and an event of its own until it is fetched.
//! Never: chooses a token itself; waits for the device, except to fetch tokens.
//! Invariant: counters begin as zeros, and kernels reset them to zero. The tokens of the last draw
//! stay on the device, where the next step reads them, until that step's own draw.

use crate::args::{CapArgs, DeviceEdit, DeviceRule, SampleArgs};
use crate::attention::cap_exponent;
use crate::buffers::{GrowingMemory, MemoryContents};
use crate::driver::{CudaEvent, CudaKernel, CudaStream, DeviceMemory, PinnedMemory};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::matmul::MatmulTarget;
use crate::step_messages::{StepMessage, StepMessages};
use cleave_domain::TokenId;
use cleave_engine::STEPS_IN_FLIGHT_MAX;
use cleave_engine::ops::{DrawRule, LogitChange, LogitEdit, MaskedDraw, Precision};

/// Tokens of the vocabulary that one thread block of the first kernel takes, few enough that even
/// one row gives work to many blocks.
const PREPARE_TOKENS: usize = 8192;
/// Tokens of the vocabulary that one thread block of the second kernel weighs: an exponential takes
/// longer than the load of a logit.
const WEIGH_TOKENS: usize = 2048;
/// `SEGMENTS_MAX` of the kernels.
const SEGMENTS_MAX: usize = 1024;
/// Logits that one thread block caps.
const CAP_LOGITS: usize = 2048;
/// The initial size of each buffer with an element for every row: room for more rows than most
/// engines have.
const ROWS_BYTES: usize = 4 << 10;
/// `NO_TOKEN` of the kernels.
const NO_TOKEN: u32 = u32::MAX;
/// `NO_MASK` of the kernels.
const NO_MASK: u32 = u32::MAX;
/// `DRAWN_LATER` of the kernels.
const DRAWN_LATER: u32 = u32::MAX - 1;

#[derive(Debug)]
pub(crate) struct CudaSampling {
    cap: CudaKernel<CapArgs>,
    prepare: CudaKernel<SampleArgs>,
    weigh: CudaKernel<SampleArgs>,
    draw: CudaKernel<SampleArgs>,
    /// Logits, `(rows, vocab)`, f32.
    logits: GrowingMemory,
    /// Best candidates, `(rows)`, u64, zero between draws.
    best: GrowingMemory,
    /// Sums of the weights of segments of rows, `(rows, SEGMENTS_MAX)`, u64.
    segments: GrowingMemory,
    /// Tokens of the last draw, `(rows)`, u32.
    tokens: GrowingMemory,
    /// Used in turns; their number limits the draws that are queued and not fetched.
    returns: [TokenReturn; STEPS_IN_FLIGHT_MAX],
    /// The index of the oldest draw that was not fetched; `returns_count` of them are queued.
    oldest: usize,
    returns_count: usize,
    sent: SentRules,
    /// Size of the vocabulary, as of the last logits.
    vocab: usize,
    reallocations_count: u64,
}

/// The pinned memory and the event of one draw.
#[derive(Debug)]
struct TokenReturn {
    memory: PinnedMemory,
    rows: usize,
    /// Reached when the tokens are in `memory`.
    done: CudaEvent,
}

/// Addresses of rules on the device.
#[derive(Clone, Copy, Debug, Default)]
struct SentRules {
    rules: u64,
    edits: u64,
    masks: u64,
}

impl CudaSampling {
    pub(crate) fn new(images: &KernelImages, stream: &CudaStream) -> Result<Self, CudaError> {
        let a_return = || -> Result<TokenReturn, CudaError> {
            Ok(TokenReturn {
                memory: PinnedMemory::new(stream.device(), ROWS_BYTES)?,
                rows: 0,
                done: CudaEvent::new(stream.device())?,
            })
        };
        Ok(Self {
            cap: images.kernel("cap_logits")?,
            prepare: images.kernel("sample_prepare")?,
            weigh: images.kernel("sample_weigh")?,
            draw: images.kernel("sample_draw")?,
            logits: GrowingMemory::new(stream, 0, "logits", MemoryContents::Undefined)?,
            best: GrowingMemory::new(stream, 0, "counters of draws", MemoryContents::Zeros)?,
            segments: GrowingMemory::new(stream, 0, "sums of weights", MemoryContents::Undefined)?,
            tokens: GrowingMemory::new(
                stream,
                ROWS_BYTES,
                "drawn tokens",
                MemoryContents::Preserved,
            )?,
            returns: [a_return()?, a_return()?],
            oldest: 0,
            returns_count: 0,
            sent: SentRules::default(),
            vocab: 0,
            reallocations_count: 0,
        })
    }

    /// Grows the memory for `rows` rows of logits, and returns it as a product's destination.
    pub(crate) fn logits_target(
        &mut self,
        stream: &CudaStream,
        rows: usize,
        vocab: usize,
    ) -> Result<MatmulTarget, CudaError> {
        let bytes = rows * vocab * size_of::<f32>();
        let before = self.logits.memory().at(0);
        let address = self.logits.ensure_bytes(stream, bytes)?.at(0);
        self.reallocations_count += u64::from(address != before);
        self.vocab = vocab;
        Ok(MatmulTarget {
            address,
            stored: Precision::F32,
        })
    }

    /// Returns the memory with the logits of the last product into [`CudaSampling::logits_target`].
    pub(crate) fn logits(&self) -> &DeviceMemory {
        self.logits.memory()
    }

    /// Counts the moves of all buffers; a move invalidates recordings.
    pub(crate) fn reallocations_count(&self) -> u64 {
        self.reallocations_count
    }

    /// Sends rules, padded up to `bucket` rows, and grows the buffers for their tokens.
    pub(crate) fn send_rules(
        &mut self,
        rules: &[Option<DrawRule>],
        bucket: usize,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        let mut edits = Vec::new();
        let rules: Vec<DeviceRule> = (0..bucket)
            .map(|row| match rules.get(row) {
                Some(Some(rule)) => device_rule(rule, (row as u32, NO_MASK), &mut edits),
                Some(None) | None => drawn_later(row as u32),
            })
            .collect();
        let bytes = bucket * size_of::<u32>();
        let before = [&self.tokens, &self.best, &self.segments].map(|of| of.memory().at(0));
        let tokens = self.tokens.ensure_bytes(stream, bytes)?.at(0);
        let best = self
            .best
            .ensure_bytes(stream, bucket * size_of::<u64>())?
            .at(0);
        let sums_bytes = bucket * SEGMENTS_MAX * size_of::<u64>();
        let segments = self.segments.ensure_bytes(stream, sums_bytes)?.at(0);
        self.reallocations_count += u64::from(before != [tokens, best, segments]);
        self.sent = SentRules {
            rules: messages.send(stream, StepMessage::Rules, &rules)?,
            edits: messages.send(stream, StepMessage::Edits, &edits)?,
            masks: 0,
        };
        Ok(())
    }

    /// Queues the cap of `rows` rows of logits, if there is one.
    pub(crate) fn queue_cap(
        &self,
        soft_cap: Option<f32>,
        rows: usize,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let count = rows * self.vocab;
        let Some(limit) = soft_cap.filter(|_| count > 0) else {
            return Ok(());
        };
        let args = CapArgs {
            logits: self.logits.memory().at(0),
            count: count as u64,
            limit,
            exponent: cap_exponent(limit),
        };
        let grid = [count.div_ceil(CAP_LOGITS) as u32, 1, 1];
        // SAFETY: the logits of the last product are in the memory.
        unsafe { self.cap.launch(stream, grid, args) }
    }

    /// Queues the draw of one token for each of `bucket` rows of logits, by the rules that were
    /// sent last.
    pub(crate) fn queue_draw(&self, bucket: usize, stream: &CudaStream) -> Result<(), CudaError> {
        self.launch(self.sent, bucket, stream)
    }

    /// Queues the draws of rows that the newest draw left out, under masks, and the copy of their
    /// tokens: it is the newest draw that they belong to.
    ///
    /// # Panics
    /// If no draw is queued, or it has no such row.
    pub(crate) fn queue_masked_draw(
        &mut self,
        draws: &[MaskedDraw<'_>],
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        let (mut rules, mut edits, mut masks) = (Vec::new(), Vec::new(), Vec::new());
        let newest = self.newest_return();
        for MaskedDraw { row, rule, mask } in draws {
            assert!(
                (*row as usize) < self.returns[newest].rows,
                "row {row} was not drawn"
            );
            let place = (*row, masks.len() as u32);
            rules.push(device_rule(rule, place, &mut edits));
            masks.extend_from_slice(&mask.words()[..self.vocab.div_ceil(32)]);
        }
        let sent = SentRules {
            rules: messages.send(stream, StepMessage::MaskedRules, &rules)?,
            edits: messages.send(stream, StepMessage::MaskedEdits, &edits)?,
            masks: messages.send(stream, StepMessage::Masks, &masks)?,
        };
        self.launch(sent, rules.len(), stream)?;
        self.copy_tokens(newest, stream)
    }

    /// Launches the draws of so many rules.
    fn launch(&self, sent: SentRules, count: usize, stream: &CudaStream) -> Result<(), CudaError> {
        let args = SampleArgs {
            logits: self.logits.memory().at(0),
            rules: sent.rules,
            edits: sent.edits,
            masks: sent.masks,
            best: self.best.memory().at(0),
            segments: self.segments.memory().at(0),
            tokens: self.tokens.memory().at(0),
            vocab: self.vocab as u32,
            padding: 0,
        };
        let grid = |tokens: usize| [count as u32, self.vocab.div_ceil(tokens) as u32, 1];
        // SAFETY: the stream has queued the logits of all rows that the rules name; counters and
        // tokens have room for them, and each mask has a word per 32 tokens.
        unsafe {
            self.prepare.launch(stream, grid(PREPARE_TOKENS), args)?;
            self.weigh.launch(stream, grid(WEIGH_TOKENS), args)?;
            self.draw.launch(stream, [count as u32, 1, 1], args)
        }
    }

    /// Returns the address of the tokens of the last draw.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens.memory().at(0)
    }

    /// Queues the copy of the first rows' tokens to the host.
    ///
    /// # Panics
    /// If too many draws are queued and not fetched.
    pub(crate) fn queue_token_copy(
        &mut self,
        rows: usize,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        assert!(
            self.returns_count < STEPS_IN_FLIGHT_MAX,
            "more draws queued than steps may be in flight"
        );
        self.returns_count += 1;
        let newest = self.newest_return();
        let to = &mut self.returns[newest];
        let bytes = rows * size_of::<u32>();
        if to.memory.bytes() < bytes {
            // This draw's previous tokens were fetched, so the old memory is free.
            to.memory = PinnedMemory::new(stream.device(), bytes.next_power_of_two())?;
        }
        to.rows = rows;
        self.copy_tokens(newest, stream)
    }

    /// The index of the newest draw that was not fetched.
    fn newest_return(&self) -> usize {
        let count = self.returns_count;
        let before = count.checked_sub(1).expect("a draw is queued");
        (self.oldest + before) % STEPS_IN_FLIGHT_MAX
    }

    fn copy_tokens(&mut self, index: usize, stream: &CudaStream) -> Result<(), CudaError> {
        let to = &mut self.returns[index];
        let bytes = to.rows * size_of::<u32>();
        let from = (self.tokens.memory(), 0);
        stream.copy_out(from, (&mut to.memory, 0..bytes))?;
        to.done.record(stream)
    }

    /// Waits for the oldest draw, and returns its tokens.
    ///
    /// # Panics
    /// If no draw is queued.
    pub(crate) fn fetch_tokens(
        &mut self,
        stream: &CudaStream,
        tokens: &mut Vec<Option<TokenId>>,
    ) -> Result<(), CudaError> {
        assert!(self.returns_count > 0, "no draw is under way");
        let from = &self.returns[self.oldest];
        self.oldest = (self.oldest + 1) % STEPS_IN_FLIGHT_MAX;
        self.returns_count -= 1;
        stream.bind()?;
        from.done.synchronize()?;
        let bytes = from.rows * size_of::<u32>();
        let words = from.memory.as_slice()[..bytes].as_chunks::<4>().0;
        let token = |word: &[u8; 4]| u32::from_le_bytes(*word);
        tokens.extend(
            words
                .iter()
                .map(token)
                .map(|t| (t != NO_TOKEN).then_some(t)),
        );
        Ok(())
    }

    /// Returns whether [`CudaSampling::fetch_tokens`] would return at once, with tokens or with an
    /// error.
    pub(crate) fn is_copy_done(&self, stream: &CudaStream) -> bool {
        let oldest = &self.returns[self.oldest].done;
        let is_reached = stream.bind().and_then(|()| oldest.is_reached());
        is_reached.unwrap_or(true)
    }
}

/// The rule of a row that is not drawn: one of padding, or one whose mask comes later.
fn drawn_later(row: u32) -> DeviceRule {
    device_rule(&DrawRule::greedy(), (row, DRAWN_LATER), &mut Vec::new())
}

/// Returns a rule as kernels read it, for a row and the first word of its mask, and appends its
/// edits to those of the other rules.
fn device_rule(rule: &DrawRule, place: (u32, u32), edits: &mut Vec<DeviceEdit>) -> DeviceRule {
    let DrawRule {
        random_bits: bits,
        inverse_temperature,
        top_k,
        top_p,
        min_p,
        top_n_sigma,
        edits: of_row,
    } = rule;
    let first = edits.len();
    edits.extend(of_row.iter().map(device_edit));
    let (row, mask) = place;
    DeviceRule {
        bits: *bits,
        top_p: *top_p,
        inverse_temperature: *inverse_temperature,
        min_p: *min_p,
        top_k: *top_k,
        edits_first: first as u32,
        edits_count: of_row.len() as u32,
        top_n_sigma: *top_n_sigma,
        row,
        mask,
    }
}

fn device_edit(edit: &LogitEdit) -> DeviceEdit {
    let (kind, value, frequency, presence) = match edit.change {
        LogitChange::Add(bias) => (0, bias, 0.0, 0.0),
        LogitChange::Ban => (1, 0.0, 0.0, 0.0),
        LogitChange::Penalize {
            repetition,
            frequency,
            presence,
        } => (2, repetition, frequency, presence),
    };
    DeviceEdit {
        token: edit.token,
        kind,
        value,
        frequency,
        presence,
    }
}
