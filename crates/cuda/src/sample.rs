//! Drawing tokens on the device.
//!
//! Owns: the logits' memory, and the rules as kernels read them.
//! Never: chooses a token itself.
//! Invariant: the counters that kernels leave as they found them begin as zeros.

use crate::args::{DeviceEdit, DeviceRule, SampleArgs};
use crate::buffers::{Contents, Growing};
use crate::driver::{DeviceMemory, Kernel, PinnedMemory, Stream};
use crate::error::CudaError;
use crate::images::Images;
use crate::inbox::{Inbox, Place};
use crate::matmul::Target;
use cleave_domain::TokenId;
use cleave_engine::ops::{Change, DrawRule, Edit, Precision};

/// Tokens that one block of the first kernel takes: few rows then still give work to many blocks.
const PREPARE_TOKENS: usize = 8192;
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
    /// `(rows)`, u32.
    tokens: Growing,
    fetched: PinnedMemory,
    sent: Sent,
    moves_count: u64,
}

/// Where the rules of the pass at hand are.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    rules: u64,
    edits: u64,
}

impl Sampling {
    pub(crate) fn new(images: &Images, stream: &Stream) -> Result<Self, CudaError> {
        Ok(Self {
            prepare: images.kernel("sample_prepare")?,
            draw: images.kernel("sample_draw")?,
            logits: Growing::new(stream, 0, "logits", Contents::Anything)?,
            best: Growing::new(stream, 0, "counters of draws", Contents::Zeros)?,
            tokens: Growing::new(stream, 0, "drawn tokens", Contents::Anything)?,
            fetched: PinnedMemory::new(stream.device(), 0)?,
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
        if self.fetched.bytes() < bytes {
            stream.synchronize()?;
            self.fetched = PinnedMemory::new(stream.device(), bytes.next_power_of_two())?;
        }
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

    /// Waits for the tokens of the first rows.
    pub(crate) fn fetch(
        &mut self,
        rows: usize,
        stream: &Stream,
        tokens: &mut Vec<Option<TokenId>>,
    ) -> Result<(), CudaError> {
        let bytes = rows * size_of::<u32>();
        let from = (self.tokens.memory(), 0);
        stream.copy_out(from, (&mut self.fetched, 0..bytes))?;
        stream.synchronize()?;
        let words = self.fetched.as_slice()[..bytes].as_chunks::<4>().0;
        let token = |word: &[u8; 4]| u32::from_le_bytes(*word);
        tokens.extend(
            words
                .iter()
                .map(token)
                .map(|t| (t != NO_TOKEN).then_some(t)),
        );
        Ok(())
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
