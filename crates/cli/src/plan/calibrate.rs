//! `cleave plan calibrate`: the accuracy of the predicted step times on this machine.
//!
//! Owns: the choice of the steps that are held out. Never: serves, or changes how a worker
//! measures. Invariant: a judged step was never learned from; a seed draws the same steps twice.

use crate::args::PlanCalibrateArgs;
use crate::bench::PrintFormat;
use crate::model;
use cleave_domain::{Capacity, SplitMix64};
use cleave_planner::Predict;
use cleave_worker::{Calibration, StepPart, StepTimer, calibrate};
use serde::Serialize;
use std::io::Write;

/// Limit of a drawn context, if the model allows it.
const CONTEXT_MAX: u32 = 4096;

#[derive(Serialize)]
struct CalibrationReport {
    model: String,
    device: String,
    /// Errors of the prices that a worker measures at its start.
    start: PredictionErrors,
    /// Errors of the prices after the steps that refined them.
    refined: PredictionErrors,
    flops_per_second: f64,
    bytes_per_second: f64,
    prices: cleave_domain::Prices,
}

#[derive(Clone, Copy, Serialize)]
struct PredictionErrors {
    /// Number of steps learned from.
    steps_learned: u32,
    /// Number of steps held out.
    steps_judged: usize,
    /// Median of `|predicted / real - 1|`.
    error_median: f64,
    error_p95: f64,
}

pub(crate) fn run(args: &PlanCalibrateArgs) -> anyhow::Result<()> {
    let loaded = model::load(&args.model, &args.engine)?;
    let cost = loaded.cost();
    let mut engine = loaded.only_engine(&args.engine)?;
    let calibration = calibrate(engine.as_mut(), &cost, args.budget.0)?;
    let start = calibration.prices();
    let device = calibration.ceilings.device;
    let mut trial = CalibrationTrial {
        rng: SplitMix64::new(args.seed),
        capacity: engine.describe().capacity,
        calibration,
        of_start: Vec::new(),
        of_refined: Vec::new(),
    };
    let mut rehearsal = StepTimer::new(engine.as_mut());
    let (learned, mut drawn) = (trial.calibration.steps, 0_u32);
    while trial.of_refined.len() < args.steps as usize {
        let parts = trial.draw_parts();
        let Some((work, took)) = rehearsal.step(&parts)? else {
            continue;
        };
        let error = |predicted: std::time::Duration| {
            (predicted.as_secs_f64() / took.as_secs_f64() - 1.0).abs()
        };
        drawn += 1;
        // After as many steps were learned as are judged, every third step is held out.
        if drawn > args.steps && drawn.is_multiple_of(3) {
            trial.of_start.push(error(start.step(&work)));
            let prices = trial.calibration.learner.prices();
            trial.of_refined.push(error(prices.step(&work)));
        } else {
            trial.calibration.learner.observe(&work, took);
            trial.calibration.steps += 1;
        }
    }
    let found = CalibrationReport {
        model: loaded.title(),
        device: engine.describe().device.clone(),
        start: prediction_errors(learned, &mut trial.of_start),
        refined: prediction_errors(trial.calibration.steps, &mut trial.of_refined),
        flops_per_second: device.flops_per_second,
        bytes_per_second: device.bytes_per_second,
        prices: trial.calibration.prices(),
    };
    print(
        &found,
        if args.json {
            PrintFormat::Json
        } else {
            PrintFormat::Table
        },
    )
}

/// The random steps, and the errors of their predictions.
struct CalibrationTrial {
    rng: SplitMix64,
    capacity: Capacity,
    calibration: Calibration,
    of_start: Vec<f64>,
    of_refined: Vec<f64>,
}

impl CalibrationTrial {
    /// Draws a number below `bound`, which is at least 1.
    fn draw_below(&mut self, bound: u32) -> u32 {
        let draw = u128::from(self.rng.draw()) * u128::from(bound);
        u32::try_from(draw >> 64).unwrap_or(0)
    }

    /// Draws a step: a decode batch, chunks of prompts, or both.
    fn draw_parts(&mut self) -> Vec<StepPart> {
        let Capacity {
            block_tokens,
            blocks_count,
            slots_count,
            step_tokens_max,
            context_tokens_max,
            ..
        } = self.capacity;
        let longest = CONTEXT_MAX.min(context_tokens_max - 1);
        let kind = self.draw_below(3);
        let mut parts = Vec::new();
        let mut left = step_tokens_max;
        if kind != 0 {
            let most = 1 << self.draw_below(6);
            let sequences = 1 + self.draw_below(most.min(slots_count));
            let context = longest
                .min(blocks_count * block_tokens / (sequences + 3))
                .max(2);
            let context = 1 + self.draw_below(context);
            for _ in 0..sequences.min(left) {
                parts.push(StepPart::token(1 + self.draw_below(context)));
            }
            left -= sequences.min(left);
        }
        if kind != 1 {
            for _ in 0..=self.draw_below(2) {
                let tokens = 1 + self.draw_below(left.max(1));
                let before = self.draw_below(longest / 2);
                if tokens < 2 || tokens > left || before + tokens > longest {
                    break;
                }
                left -= tokens;
                let chunk = StepPart::chunk(before, tokens);
                let last = self.draw_below(2) == 0;
                parts.push(if last { chunk.last() } else { chunk });
            }
        }
        if parts.is_empty() {
            parts.push(StepPart::token(1 + self.draw_below(longest)));
        }
        parts
    }
}

fn prediction_errors(steps_learned: u32, errors: &mut [f64]) -> PredictionErrors {
    errors.sort_by(f64::total_cmp);
    let at = |part: usize| errors.get((errors.len().max(1) - 1) * part / 100).copied();
    PredictionErrors {
        steps_learned,
        steps_judged: errors.len(),
        error_median: at(50).unwrap_or_default(),
        error_p95: at(95).unwrap_or_default(),
    }
}

fn print(found: &CalibrationReport, form: PrintFormat) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let PrintFormat::Json = form {
        writeln!(out, "{}", serde_json::to_string(found)?)?;
        return Ok(());
    }
    writeln!(out, "{}, {}\n", found.model, found.device)?;
    writeln!(
        out,
        "| prices | steps learned from | held out | error, median | p95 |\n|---|---|---|---|---|"
    )?;
    for (name, judged) in [("of the start", found.start), ("refined", found.refined)] {
        writeln!(
            out,
            "| {name} | {} | {} | {:.1} % | {:.1} % |",
            judged.steps_learned,
            judged.steps_judged,
            judged.error_median * 100.0,
            judged.error_p95 * 100.0
        )?;
    }
    Ok(())
}
