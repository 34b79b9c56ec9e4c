//! `cleave plan fit`: a device's reached shares, fitted to measured steps.
//!
//! Owns: the formats of the measurements, and the output. Never: measures, or judges by a sample
//! that it fitted to. Invariant: a row that cannot be used is counted, not dropped in silence.

mod samples;

use crate::args::PlanFitArgs;
use crate::parts;
use anyhow::Context;
use cleave_planner::parts::{ErrorSummary, FitReport, fit};
use samples::SampleFiles;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;

pub(crate) fn run(args: &PlanFitArgs) -> anyhow::Result<()> {
    let (found, skipped) = fitted(args)?;
    if let Some(out) = &args.out {
        let text = serde_json::to_string_pretty(&found.hardware)?;
        fs::write(out, text + "\n").with_context(|| out.display().to_string())?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", report_json(&found, skipped))?;
    } else {
        write!(out, "{}", table(&found, skipped))?;
    }
    Ok(())
}

/// Fits to the samples of all files; gives the number of rows that are no samples, too.
fn fitted(args: &PlanFitArgs) -> anyhow::Result<(FitReport, usize)> {
    let hardware = parts::hardware(&args.hardware)?;
    let mut files = SampleFiles::new(&hardware, args);
    for file in &args.samples {
        files
            .read(file)
            .with_context(|| format!("--samples {}", file.display()))?;
    }
    let SampleFiles {
        workers,
        samples,
        skipped,
        ..
    } = files;
    let mut found = fit(&hardware, &workers, &samples).map_err(anyhow::Error::msg)?;
    let sources = args.samples.iter().map(|file| file.display().to_string());
    let sources: Vec<String> = sources.collect();
    found.hardware.sources.push(format!(
        "shares fitted to half of {} measured steps of {}",
        samples.len(),
        sources.join(", ")
    ));
    if let Some(name) = &args.name {
        found.hardware.name.clone_from(name);
    }
    Ok((found, skipped))
}

fn table(found: &FitReport, skipped: usize) -> String {
    let mut text = format!(
        "| {} | fitted | median | worst | held out | median | worst |\n|---|---|---|---|---|---|---|\n",
        found.hardware.name
    );
    let cells = |summary: ErrorSummary| {
        if summary.count == 0 {
            return "0 | - | -".to_owned();
        }
        format!(
            "{} | {:.1} % | {:.1} %",
            summary.count,
            summary.median * 100.0,
            summary.worst * 100.0
        )
    };
    for row in &found.errors {
        text.push_str(&format!(
            "| {}, {} | {} | {} |\n",
            row.phase,
            row.bucket,
            cells(row.fitted),
            cells(row.held_out)
        ));
    }
    if skipped > 0 {
        text.push_str(&format!("\nrows that cannot be used: {skipped}\n"));
    }
    text
}

fn report_json(found: &FitReport, skipped: usize) -> Value {
    let summary = |summary: ErrorSummary| json!({"count": summary.count, "median": summary.median, "worst": summary.worst});
    let row = |row: &cleave_planner::parts::PhaseErrors| {
        json!({
            "phase": row.phase,
            "bucket": row.bucket,
            "fitted": summary(row.fitted),
            "held_out": summary(row.held_out),
        })
    };
    let rows: Vec<Value> = found.errors.iter().map(row).collect();
    json!({"hardware": found.hardware, "errors": rows, "rows_skipped": skipped})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, CliCommand, PlanCommand};
    use clap::Parser;
    use std::path::Path;

    fn args(words: &[&str]) -> PlanFitArgs {
        let words = ["cleave", "plan", "fit"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            CliCommand::Plan(plan) => match plan.command {
                PlanCommand::Fit(args) => args,
                _ => unreachable!("`plan fit` was given"),
            },
            _ => unreachable!("`plan fit` was given"),
        }
    }

    fn repository(path: &str) -> String {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        root.join(path).display().to_string()
    }

    /// Steps of three models on an H100: the half that was held out, by phase.
    #[test]
    fn a_report_of_the_lab_is_predicted_from_its_half() {
        let report = repository("results/gpu/2026-11-27-h100-80gb-hbm3.json");
        let words = ["--hardware", "h100", "--name", "lab", "--samples", &report];
        let (found, skipped) = fitted(&args(&words)).unwrap();
        assert_eq!(
            (found.hardware.name.as_str(), found.hardware.check()),
            ("lab", Ok(()))
        );
        assert!(skipped > 0, "rows of other programs");
        for (phase, worst_max, median_max) in [("prefill", 0.09, 0.08), ("decode", 0.2, 0.1)] {
            let of_phase = found.errors.iter().filter(|row| row.phase == phase);
            let judged: Vec<ErrorSummary> = of_phase
                .map(|row| row.held_out)
                .filter(|held_out| held_out.count > 0)
                .collect();
            assert!(judged.len() >= 3, "{phase}: {judged:?}");
            for held_out in judged {
                let is_near = held_out.worst <= worst_max && held_out.median <= median_max;
                assert!(is_near, "{phase}: {held_out:?}");
            }
        }
        let text = table(&found, skipped);
        assert!(text.contains("| prefill, prompts to 2k |"), "{text}");
        assert!(text.contains("| decode, 1 sequence |"), "{text}");
    }

    #[test]
    fn a_table_of_the_engine_needs_its_model() {
        let folder = tempfile::tempdir().unwrap();
        let steps = folder.path().join("steps.json");
        let seconds = [
            ("prefill:512", 0.015),
            ("prefill:1024", 0.03),
            ("prefill:2048", 0.06),
            ("prefill:4096", 0.13),
            ("decode:1x128", 0.006),
            ("decode:8x128", 0.0065),
            ("decode:32x128", 0.008),
            ("decode:64x128", 0.009),
        ];
        let rows: Vec<Value> = seconds
            .iter()
            .map(|(shape, seconds)| json!({"shape": shape, "seconds_median": seconds}))
            .collect();
        fs::write(&steps, json!({"model": "m", "rows": rows}).to_string()).unwrap();
        let file = steps.to_str().unwrap();
        let words = ["--hardware", "h100", "--samples", file];
        let error = format!("{:#}", fitted(&args(&words)).unwrap_err());
        assert!(error.contains("give --model"), "{error}");
        let words = [&words[..], &["--model", "llama-3.1-8b"]].concat();
        let (found, skipped) = fitted(&args(&words)).unwrap();
        assert_eq!(skipped, 0);
        let counts = found
            .errors
            .iter()
            .map(|row| row.fitted.count + row.held_out.count);
        assert_eq!(counts.sum::<usize>(), seconds.len());
        let last = found.hardware.sources.last().unwrap();
        assert!(last.contains("half of 8"), "{last}");
        fs::write(&steps, "{}").unwrap();
        let error = format!("{:#}", fitted(&args(&words)).unwrap_err());
        assert!(error.contains("neither"), "{error}");
    }
}
