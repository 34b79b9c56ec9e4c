//! Drawing tokens on the device.
//!
//! Owns: the logits' memory, the rules as kernels read them, and how tokens come to the host: each draw has a
//! piece of pinned memory and an event of its own until it is fetched.
//! Never: chooses a token itself; waits where it queues.
//! Invariant: the counters that kernels leave as they found them begin as zeros. What was drawn last stays on the
//! device, where the next step takes it, until that step's own draw.

use crate::args::{DeviceEdit, DeviceRule, SampleArgs};
use crate::buffers::{Contents, Growing};
use crate::driver::{DeviceMemory, Event, Kernel, PinnedMemory, Stream};
use crate::error::CudaError;
use crate::images::Images;
use crate::inbox::{Inbox, Place};
use crate::matmul::Target;
use cleave_domain::TokenId;
use cleave_engine::STEPS_IN_FLIGHT_MAX;
use cleave_engine::ops::{Change, DrawRule, Edit, Precision};

/// Tokens that one block of the first kernel takes: few rows then still give work to many blocks.
const PREPARE_TOKENS: usize = 8192;
/// Of what is kept for each row, at first: more rows than most engines have.
const ROWS_BYTES: usize = 4 << 10;
/// `NO_TOKEN` of the kernels.
const NO_TOKEN: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Sampling {
    prepare: Kernel<SampleArgs>,
    draw: Kernel<SampleArgs>,
    /// `(rows, vocab)`, f32.
    logits: Growing,
    /// `(rows)`, u64, zero between draws.
    best: Growing,
    /// `(rows)`, u32, of the last draw.
    tokens: Growing,
    /// In turns: at most so many draws are queued and not fetched.
    returns: [Return; STEPS_IN_FLIGHT_MAX],
    /// The oldest one not fetched, and how many there are.
    oldest: usize,
    returns_count: usize,
    sent: Sent,
    moves_count: u64,
}

/// What one draw brings to the host.
#[derive(Debug)]
struct Return {
    memory: PinnedMemory,
    rows: usize,
    /// Reached when the tokens are in the memory.
    done: Event,
}

/// Where the rules of the pass at hand are.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    rules: u64,
    edits: u64,
}

impl Sampling {
    pub(crate) fn new(images: &Images, stream: &Stream) -> Result<Self, CudaError> {
        let a_return = || -> Result<Return, CudaError> {
            Ok(Return {
                memory: PinnedMemory::new(stream.device(), ROWS_BYTES)?,
                rows: 0,
                done: Event::new(stream.device())?,
            })
        };
        Ok(Self {
            prepare: images.kernel("sample_prepare")?,
            draw: images.kernel("sample_draw")?,
            logits: Growing::new(stream, 0, "logits", Contents::Anything)?,
            best: Growing::new(stream, 0, "counters of draws", Contents::Zeros)?,
            tokens: Growing::new(stream, ROWS_BYTES, "drawn tokens", Contents::Kept)?,
            returns: [a_return()?, a_return()?],
            oldest: 0,
            returns_count: 0,
            sent: Sent::default(),
            moves_count: 0,
        })
    }

    /// Where so many rows of logits go.
    pub(crate) fn room(
        &mut self,
        stream: &Stream,
        rows: usize,
        vocab: usize,
    ) -> Result<Target, CudaError> {
        let bytes = rows * vocab * size_of::<f32>();
        let before = self.logits.memory().at(0);
        let address = self.logits.at_least(stream, bytes)?.at(0);
        self.moves_count += u64::from(address != before);
        Ok(Target {
            address,
            stored: Precision::F32,
        })
    }

    /// The logits of the last product into [`Sampling::room`].
    pub(crate) fn logits(&self) -> &DeviceMemory {
        self.logits.memory()
    }

    /// How often a workspace has moved.
    pub(crate) fn moves_count(&self) -> u64 {
        self.moves_count
    }

    /// Sends rules, with greedy ones for padding up to `bucket` rows, and makes room for what they give.
    pub(crate) fn send(
        &mut self,
        rules: &[DrawRule],
        bucket: usize,
        (stream, inbox): (&Stream, &mut Inbox),
    ) -> Result<(), CudaError> {
        let (mut rules, edits) = told(rules);
        rules.resize(bucket, PADDING);
        let bytes = bucket * size_of::<u32>();
        let before = (self.tokens.memory().at(0), self.best.memory().at(0));
        let tokens = self.tokens.at_least(stream, bytes)?.at(0);
        let best = self.best.at_least(stream, bucket * size_of::<u64>())?.at(0);
        self.moves_count += u64::from(before != (tokens, best));
        self.sent = Sent {
            rules: inbox.send(stream, Place::Rules, &rules)?,
            edits: inbox.send(stream, Place::Edits, &edits)?,
        };
        Ok(())
    }

    /// Queues the drawing of the token after each of `bucket` rows of logits, by the rules sent last.
    pub(crate) fn queue(
        &self,
        bucket: usize,
        vocab: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let args = SampleArgs {
            logits: self.logits.memory().at(0),
            rules: self.sent.rules,
            edits: self.sent.edits,
            best: self.best.memory().at(0),
            tokens: self.tokens.memory().at(0),
            vocab: vocab as u32,
            padding: 0,
        };
        let shares = vocab.div_ceil(PREPARE_TOKENS);
        // SAFETY: the logits of so many rows were just made; counters and tokens have room for them.
        unsafe {
            let grid = [bucket as u32, shares as u32, 1];
            self.prepare.launch(stream, grid, args)?;
            self.draw.launch(stream, [bucket as u32, 1, 1], args)
        }
    }

    /// Where the tokens of the last draw are.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens.memory().at(0)
    }

    /// Queues the way of the first rows' tokens to the host.
    ///
    /// # Panics
    /// If too many are queued and not fetched.
    pub(crate) fn bring(&mut self, rows: usize, stream: &Stream) -> Result<(), CudaError> {
        assert!(
            self.returns_count < STEPS_IN_FLIGHT_MAX,
            "a draw too many under way"
        );
        let to = &mut self.returns[(self.oldest + self.returns_count) % STEPS_IN_FLIGHT_MAX];
        let bytes = rows * size_of::<u32>();
        if to.memory.bytes() < bytes {
            // What it had was fetched.
            to.memory = PinnedMemory::new(stream.device(), bytes.next_power_of_two())?;
        }
        let from = (self.tokens.memory(), 0);
        stream.copy_out(from, (&mut to.memory, 0..bytes))?;
        to.done.record(stream)?;
        to.rows = rows;
        self.returns_count += 1;
        Ok(())
    }

    /// Waits for the tokens that were queued first.
    ///
    /// # Panics
    /// If none are.
    pub(crate) fn fetch(
        &mut self,
        stream: &Stream,
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

    /// Whether [`Sampling::fetch`] would not wait; so it is where it would fail.
    pub(crate) fn is_fetched(&self, stream: &Stream) -> bool {
        let oldest = &self.returns[self.oldest].done;
        let asked = stream.bind().and_then(|()| oldest.is_reached());
        asked.unwrap_or(true)
    }
}

/// Of a row that is padding: its logits may be anything, and nobody looks at its token.
const PADDING: DeviceRule = DeviceRule {
    bits: 0,
    top_p: 1 << 53,
    heat: 0.0,
    min_p: 0.0,
    top_k: 0,
    edits_first: 0,
    edits_count: 0,
    padding: 0,
};

/// Rules as the kernels read them, with all edits in one list.
fn told(rules: &[DrawRule]) -> (Vec<DeviceRule>, Vec<DeviceEdit>) {
    let mut edits = Vec::new();
    let rules = rules.iter().map(|rule| {
        let DrawRule {
            bits,
            heat,
            top_k,
            top_p,
            min_p,
            edits: of_row,
        } = rule;
        let first = edits.len();
        edits.extend(of_row.iter().map(told_edit));
        DeviceRule {
            bits: *bits,
            top_p: *top_p,
            heat: *heat,
            min_p: *min_p,
            top_k: *top_k,
            edits_first: first as u32,
            edits_count: of_row.len() as u32,
            padding: 0,
        }
    });
    (rules.collect(), edits)
}

fn told_edit(edit: &Edit) -> DeviceEdit {
    let (kind, value, frequency, presence) = match edit.change {
        Change::Add(bias) => (0, bias, 0.0, 0.0),
        Change::Ban => (1, 0.0, 0.0, 0.0),
        Change::Penalize {
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
