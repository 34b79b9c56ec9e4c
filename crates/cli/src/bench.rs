//! `cleave bench engine`: how fast an engine alone is.
//!
//! Owns: which steps are timed. Never: takes part in serving.
//! Invariant: only whole steps are timed, after one of the same shape has run untimed.

use crate::args::{EngineArgs, ModelArgs};
use crate::model;
use anyhow::Context;
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Sampling, Segment, SlotIndex, StepId, StepPlan,
};
use cleave_engine::{Engine, EngineLimits};
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Decode steps per sample.
const DECODE_STEPS: u32 = 32;

/// What is measured: sequences at once, and tokens that each has before.
#[derive(Clone, Copy)]
enum Shape {
    /// One prompt, nothing before it.
    Prefill { tokens: u32 },
    /// One token per sequence and step.
    Decode { sequences: u32, context_tokens: u32 },
}

const SHAPES: [Shape; 5] = [
    Shape::Prefill { tokens: 512 },
    Shape::Prefill { tokens: 2048 },
    Shape::Decode {
        sequences: 1,
        context_tokens: 128,
    },
    Shape::Decode {
        sequences: 8,
        context_tokens: 128,
    },
    Shape::Decode {
        sequences: 32,
        context_tokens: 128,
    },
];

#[derive(Serialize)]
struct Table {
    model: String,
    device: String,
    threads: usize,
    load_seconds: f64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    tokens_per_second_median: f64,
    tokens_per_second_best: f64,
}

impl Shape {
    fn name(self) -> String {
        match self {
            Self::Prefill { tokens } => format!("prefill {tokens}"),
            Self::Decode {
                sequences,
                context_tokens,
            } => format!("decode b{sequences}, ctx {context_tokens}"),
        }
    }

    fn sequences(self) -> u32 {
        match self {
            Self::Prefill { .. } => 1,
            Self::Decode { sequences, .. } => sequences,
        }
    }

    /// Tokens of each sequence before the timed part.
    fn context_tokens(self) -> u32 {
        match self {
            Self::Prefill { .. } => 0,
            Self::Decode { context_tokens, .. } => context_tokens,
        }
    }

    /// Tokens of each sequence in the timed part.
    fn timed_tokens(self) -> u32 {
        match self {
            Self::Prefill { tokens } => tokens,
            Self::Decode { .. } => DECODE_STEPS,
        }
    }

    fn sequence_tokens(self) -> u32 {
        self.context_tokens() + self.timed_tokens() + 1
    }
}

/// How the result is printed.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    Table,
    Json,
}

/// Runs the command.
pub(crate) fn engine(
    model: &ModelArgs,
    args: &EngineArgs,
    rounds: u32,
    form: Form,
) -> anyhow::Result<()> {
    let from = Instant::now();
    let loaded = model::load(model, args)?;
    let load_seconds = from.elapsed().as_secs_f64();
    let context = loaded.context_tokens_max();
    let threads = args.threads();
    let shapes: Vec<Shape> = SHAPES
        .into_iter()
        .filter(|shape| shape.sequence_tokens() <= context)
        .collect();
    let blocks =
        |shape: &Shape| shape.sequences() * shape.sequence_tokens().div_ceil(args.block_tokens());
    let limits = EngineLimits {
        block_tokens: args.block_tokens(),
        blocks_count: shapes
            .iter()
            .map(blocks)
            .max()
            .context("the model's context is too short to measure")?,
        slots_count: 32,
        step_tokens_max: args.step_tokens_max(),
    };
    let mut engine = loaded.engine(limits, threads)?;
    let mut samples = vec![Vec::new(); shapes.len()];
    for _ in 0..rounds {
        for (shape, samples) in shapes.iter().zip(&mut samples) {
            samples.push(
                Sample {
                    engine: engine.as_mut(),
                    shape: *shape,
                }
                .run()?,
            );
        }
    }
    let rows = shapes.iter().zip(samples).map(|(shape, mut samples)| {
        samples.sort_by(f64::total_cmp);
        let best = samples.last().copied().unwrap_or_default();
        Row {
            name: shape.name(),
            tokens_per_second_median: samples[samples.len() / 2],
            tokens_per_second_best: best,
        }
    });
    let device = engine.describe().device.clone();
    print(
        &Table {
            model: loaded.title(),
            device,
            threads,
            load_seconds,
            rows: rows.collect(),
        },
        form,
    )
}

/// One measurement.
struct Sample<'a> {
    engine: &'a mut dyn Engine,
    shape: Shape,
}

impl Sample<'_> {
    /// Tokens per second.
    fn run(&mut self) -> anyhow::Result<f64> {
        let chunk = self.engine.describe().capacity.step_tokens_max;
        let opens = (0..self.shape.sequences())
            .map(|slot| self.open(slot))
            .collect();
        self.engine.step(&StepPlan {
            step: StepId(1),
            opens,
            segments: Vec::new(),
        })?;
        let context = self.shape.context_tokens();
        for slot in 0..self.shape.sequences() {
            for position in (0..context).step_by(chunk as usize) {
                let len = chunk.min(context - position);
                self.step(&[(slot, position, len)], after(position + len, context))?;
            }
        }
        let mut took = Duration::ZERO;
        match self.shape {
            Shape::Prefill { tokens } => {
                for position in (0..tokens).step_by(chunk as usize) {
                    let len = chunk.min(tokens - position);
                    took += self.step(&[(0, position, len)], after(position + len, tokens))?;
                }
            }
            Shape::Decode {
                sequences,
                context_tokens,
            } => {
                for index in 0..DECODE_STEPS {
                    let rows: Vec<_> = (0..sequences)
                        .map(|slot| (slot, context_tokens + index, 1))
                        .collect();
                    took += self.step(&rows, LogitsWanted::Sample)?;
                }
            }
        }
        Ok(f64::from(self.shape.sequences() * self.shape.timed_tokens()) / took.as_secs_f64())
    }

    fn open(&self, slot: u32) -> OpenSlot {
        let vocabulary = self.engine.describe().vocab_size;
        let prompt = match self.shape {
            Shape::Prefill { tokens } => tokens,
            Shape::Decode { context_tokens, .. } => context_tokens,
        };
        OpenSlot {
            slot: SlotIndex(slot),
            sampling: Arc::new(Sampling::greedy()),
            prompt: (0..prompt)
                .map(|index| (index * 7919 + slot * 104_729) % vocabulary)
                .collect(),
            output: Vec::new(),
            stop_tokens: Arc::from([]),
            min_tokens: 0,
        }
    }

    /// Runs `(slot, position, len)` and says how long that took.
    fn step(&mut self, rows: &[(u32, u32, u32)], logits: LogitsWanted) -> anyhow::Result<Duration> {
        let block_tokens = self.engine.describe().capacity.block_tokens;
        let table = self.shape.sequence_tokens().div_ceil(block_tokens);
        let segments = rows.iter().map(|&(slot, position, len)| Segment {
            slot: SlotIndex(slot),
            position,
            len,
            blocks: (slot * table..(slot + 1) * table).map(BlockIndex).collect(),
            logits,
        });
        let plan = StepPlan {
            step: StepId(1),
            opens: Vec::new(),
            segments: segments.collect(),
        };
        let from = Instant::now();
        self.engine.step(&plan)?;
        Ok(from.elapsed())
    }
}

/// A token is drawn after a prompt's last chunk, and after no other.
fn after(chunk_end: u32, prompt_end: u32) -> LogitsWanted {
    if chunk_end == prompt_end {
        LogitsWanted::Sample
    } else {
        LogitsWanted::No
    }
}

fn print(table: &Table, form: Form) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let Form::Json = form {
        writeln!(out, "{}", serde_json::to_string(table)?)?;
        return Ok(());
    }
    writeln!(
        out,
        "{}, {}, loaded in {:.2} s\n",
        table.model, table.device, table.load_seconds
    )?;
    writeln!(out, "| | tokens/s, median | best |\n|---|---|---|")?;
    for row in &table.rows {
        writeln!(
            out,
            "| {} | {:.1} | {:.1} |",
            row.name, row.tokens_per_second_median, row.tokens_per_second_best
        )?;
    }
    Ok(())
}
