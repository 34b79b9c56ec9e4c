//! Measured steps, as `cleave bench engine --json` and the GPU lab write them.
//!
//! Owns: the reading of both. Never: measures. Invariant: a prompt's steps are the chunks that the
//! engine ran.

use crate::args::PlanFitArgs;
use crate::bench::BenchShape;
use crate::parts;
use anyhow::{Context, bail, ensure};
use cleave_domain::StepWork;
use cleave_planner::parts::{Hardware, SamplePhase, StepSample, WeightFormat, WorkerSetup};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Limit of a file of samples.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Limit of the tokens of a measured prompt, and of the sequences of a measured step.
const ROW_TOKENS_MAX: u32 = 1 << 24;

/// Workers and samples of all files.
pub(super) struct SampleFiles<'a> {
    hardware: &'a Hardware,
    args: &'a PlanFitArgs,
    pub(super) workers: Vec<WorkerSetup>,
    pub(super) samples: Vec<StepSample>,
    /// Number of rows that are no step of this engine, or of a model without known sizes.
    pub(super) skipped: usize,
}

/// A report of the GPU lab.
#[derive(Deserialize)]
struct LabReport {
    models: Vec<LabModel>,
    decode: Vec<LabDecode>,
    prefill: Vec<LabPrefill>,
}

#[derive(Deserialize)]
struct LabModel {
    name: String,
    weight_bits: u32,
}

#[derive(Deserialize)]
struct LabDecode {
    system: String,
    model: String,
    batch: u32,
    context: u32,
    seconds: f64,
}

#[derive(Deserialize)]
struct LabPrefill {
    system: String,
    model: String,
    tokens: u32,
    seconds: f64,
}

/// A table of `cleave bench engine --json`.
#[derive(Deserialize)]
struct BenchTable {
    rows: Vec<EngineRow>,
}

#[derive(Deserialize)]
struct EngineRow {
    shape: String,
    seconds_median: f64,
}

/// Name under which the lab lists this program.
const LAB_SYSTEM: &str = "cleave";

impl<'a> SampleFiles<'a> {
    pub(super) fn new(hardware: &'a Hardware, args: &'a PlanFitArgs) -> Self {
        Self {
            hardware,
            args,
            workers: Vec::new(),
            samples: Vec::new(),
            skipped: 0,
        }
    }

    pub(super) fn read(&mut self, file: &Path) -> anyhow::Result<()> {
        let text = cleave_files::read_text(file, FILE_BYTES_MAX)?;
        let value: Value = serde_json::from_str(&text)?;
        if value.get("models").is_some() {
            self.read_lab(&LabReport::deserialize(value)?)
        } else if value.get("rows").is_some() {
            self.read_engine(&BenchTable::deserialize(value)?)
        } else {
            bail!("is neither a table of `cleave bench engine --json` nor a report of the GPU lab")
        }
    }

    /// Reads this program's rows of models whose sizes are published.
    fn read_lab(&mut self, report: &LabReport) -> anyhow::Result<()> {
        for row in &report.decode {
            let shape = BenchShape::Decode {
                sequences: row.batch,
                context_tokens: row.context,
            };
            self.add_lab(report, &row.system, &row.model, shape, row.seconds)?;
        }
        for row in &report.prefill {
            let shape = BenchShape::Prefill { tokens: row.tokens };
            self.add_lab(report, &row.system, &row.model, shape, row.seconds)?;
        }
        Ok(())
    }

    fn add_lab(
        &mut self,
        report: &LabReport,
        system: &str,
        model: &str,
        shape: BenchShape,
        seconds: f64,
    ) -> anyhow::Result<()> {
        let bits = report.models.iter().find(|one| one.name == model);
        let weights = match bits.map(|one| one.weight_bits) {
            Some(16) => Some(WeightFormat::Bf16),
            Some(8) => Some(WeightFormat::Int8),
            Some(4) => Some(WeightFormat::Int4),
            _ => None,
        };
        let weights = weights.filter(|_| system == LAB_SYSTEM);
        let worker = weights.and_then(|weights| self.worker(model, weights).ok());
        match worker {
            Some(worker) => self.add(worker, shape, seconds)?,
            None => self.skipped += 1,
        }
        Ok(())
    }

    fn read_engine(&mut self, table: &BenchTable) -> anyhow::Result<()> {
        let model = self.args.model.as_deref();
        let model = model.context("such a table does not have the model's sizes: give --model")?;
        let worker = self.worker(model, self.args.placement.quantization)?;
        for row in &table.rows {
            let shape: Result<BenchShape, String> = row.shape.parse();
            let shape = shape.map_err(anyhow::Error::msg)?;
            self.add(worker, shape, row.seconds_median)?;
        }
        Ok(())
    }

    /// Index of the worker of this model.
    fn worker(&mut self, model: &str, weights: WeightFormat) -> anyhow::Result<usize> {
        let mut placement = self.args.placement.clone();
        placement.quantization = weights;
        let worker = WorkerSetup {
            hardware: self.hardware.clone(),
            ..parts::worker(&self.args.hardware, model, &placement)?
        };
        let known = self.workers.iter().position(|known| *known == worker);
        Ok(known.unwrap_or_else(|| {
            self.workers.push(worker);
            self.workers.len() - 1
        }))
    }

    fn add(&mut self, worker: usize, shape: BenchShape, seconds: f64) -> anyhow::Result<()> {
        check(shape)?;
        let chunk = self.args.placement.max_num_batched_tokens;
        self.samples.push(sample(worker, shape, seconds, chunk));
        Ok(())
    }
}

/// Refuses a row of no work, or of more tokens than any context has.
fn check(shape: BenchShape) -> anyhow::Result<()> {
    let (BenchShape::Prefill { tokens: count }
    | BenchShape::Decode {
        sequences: count, ..
    }) = shape;
    ensure!(
        (1..=ROW_TOKENS_MAX).contains(&count),
        "a row has {count} tokens or sequences: expected 1 to {ROW_TOKENS_MAX}"
    );
    Ok(())
}

fn sample(worker: usize, shape: BenchShape, seconds: f64, chunk: u32) -> StepSample {
    let (phase, steps) = match shape {
        BenchShape::Decode {
            sequences,
            context_tokens,
        } => {
            let step = StepWork {
                rows: sequences,
                pairs: 0,
                context_tokens: u64::from(sequences) * u64::from(context_tokens),
                draws: sequences,
            };
            (SamplePhase::Decode { sequences }, vec![step])
        }
        BenchShape::Prefill { tokens } => {
            let step = |before: u32| {
                let tokens_now = chunk.min(tokens - before);
                let mut work = StepWork::prefill(before, tokens_now);
                work.draws = u32::from(before + tokens_now == tokens);
                work
            };
            let steps = (0..tokens).step_by(chunk as usize).map(step);
            (SamplePhase::Prefill { tokens }, steps.collect())
        }
    };
    StepSample {
        worker,
        phase,
        steps,
        seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_its_chunks_and_draws_once() {
        let shape = "prefill:5000".parse().unwrap();
        let found = sample(0, shape, 1.0, 2048);
        let rows: Vec<u32> = found.steps.iter().map(|step| step.rows).collect();
        let draws: Vec<u32> = found.steps.iter().map(|step| step.draws).collect();
        assert_eq!((rows, draws), (vec![2048, 2048, 904], vec![0, 0, 1]));
        let pairs: u64 = found.steps.iter().map(|step| step.pairs).sum();
        assert_eq!(pairs, 5000 * 5001 / 2);
    }

    #[test]
    fn rows_of_no_work_and_endless_ones_are_refused() {
        for (tokens, is_good) in [(0, false), (1, true), (1 << 24, true), (u32::MAX, false)] {
            let shape = BenchShape::Prefill { tokens };
            assert_eq!(check(shape).is_ok(), is_good, "{tokens}");
        }
    }

    #[test]
    fn a_decode_step_has_the_contexts_of_all_sequences() {
        let found = sample(0, "decode:8x1024".parse().unwrap(), 1.0, 2048);
        let step = found.steps[0];
        assert_eq!((step.rows, step.context_tokens, step.draws), (8, 8192, 8));
    }
}
