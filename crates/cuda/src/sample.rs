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
use crate::mailbox::Mailbox;
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
        Ok(Target {
            address: self.logits.at_least(stream, bytes)?.at(0),
            stored: Precision::F32,
        })
    }

    /// The logits of the last product into [`Sampling::room`].
    pub(crate) fn logits(&self) -> &DeviceMemory {
        self.logits.memory()
    }

    /// Draws the token after each row of logits, and waits for them.
    pub(crate) fn draw(
        &mut self,
        rules: &[DrawRule],
        vocab: usize,
        (stream, mailbox): (&Stream, &mut Mailbox),
        tokens: &mut Vec<Option<TokenId>>,
    ) -> Result<(), CudaError> {
        let rows = rules.len();
        let (rules, edits) = told(rules);
        let bytes = rows * size_of::<u32>();
        if self.fetched.bytes() < bytes {
            self.fetched = PinnedMemory::new(stream.device(), bytes.next_power_of_two())?;
        }
        let drawn = self.tokens.at_least(stream, bytes)?.at(0);
        let args = SampleArgs {
            logits: self.logits.memory().at(0),
            rules: mailbox.send_all(stream, &rules)?,
            edits: mailbox.send_all(stream, &edits)?,
            best: self.best.at_least(stream, rows * size_of::<u64>())?.at(0),
            tokens: drawn,
            vocab: vocab as u32,
            padding: 0,
        };
        let shares = vocab.div_ceil(PREPARE_TOKENS);
        // SAFETY: the logits of so many rows were just made; counters and tokens have room for them.
        unsafe {
            self.prepare
                .launch(stream, [rows as u32, shares as u32, 1], args)?;
            self.draw.launch(stream, [rows as u32, 1, 1], args)?;
        }
        stream.copy_out(
            (self.tokens.memory(), 0),
            (&mut self.fetched, 0..bytes),
        )?;
        stream.synchronize()?;
        let words = self.fetched.as_slice()[..bytes].as_chunks::<4>().0;
        let token = |word: &[u8; 4]| u32::from_le_bytes(*word);
        tokens.extend(words.iter().map(token).map(|t| (t != NO_TOKEN).then_some(t)));
        Ok(())
    }
}

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
