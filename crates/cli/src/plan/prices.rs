//! `cleave plan prices`: the times and the capacity of a worker from parts.
//!
//! Owns: the output. Never: measures. Invariant: the JSON is a profile, as `--mock-profile` reads
//! it.

use crate::args::PlanPricesArgs;
use crate::parts;
use cleave_domain::Role;
use cleave_planner::Predict;
use cleave_planner::parts::WorkerSetup;
use cleave_sim::goodput::WorkerProfile;
use std::io::Write;

/// Batches of decode steps in the table.
const SEQUENCES: [u32; 5] = [1, 8, 32, 128, 256];
/// Tokens of each sequence's context, and of prompts.
const TOKENS: [u32; 3] = [512, 2048, 8192];

pub(crate) fn run(args: &PlanPricesArgs) -> anyhow::Result<()> {
    let worker = parts::worker(&args.hardware, &args.model, &args.placement)?;
    let profile = WorkerProfile::from_parts(&worker).map_err(anyhow::Error::msg)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&profile)?)?;
    } else {
        write!(out, "{}", table(&worker, &profile)?)?;
    }
    Ok(())
}

fn table(worker: &WorkerSetup, profile: &WorkerProfile) -> anyhow::Result<String> {
    let kv_tokens = worker.kv_tokens().map_err(anyhow::Error::msg)?;
    let mut text = format!(
        "{}\n\nweights on each device: {:.2} GB; keys and values: {kv_tokens} tokens of {} bytes\n\n",
        profile.about,
        worker.weight_bytes_each() / 1e9,
        worker.token_bytes(),
    );
    let prices = profile.prices(Role::Both);
    let context = worker.model.context_tokens_max;
    text.push_str("| ms of a decode step |");
    let lengths: Vec<u32> = TOKENS
        .into_iter()
        .filter(|tokens| *tokens <= context)
        .collect();
    for tokens in &lengths {
        text.push_str(&format!(" context {tokens} |"));
    }
    text.push_str(&format!("\n|---|{}\n", "---|".repeat(lengths.len())));
    for sequences in SEQUENCES {
        if sequences
            > worker
                .limits
                .sequences_max
                .min(worker.limits.step_tokens_max)
        {
            continue;
        }
        text.push_str(&format!("| {sequences} sequences |"));
        for tokens in &lengths {
            let together = u64::from(sequences) * u64::from(*tokens);
            if together > u64::from(kv_tokens) {
                text.push_str(" no room |");
                continue;
            }
            let took = prices.decode(sequences, together).as_secs_f64() * 1e3;
            text.push_str(&format!(" {took:.2} |"));
        }
        text.push('\n');
    }
    text.push_str("\n| prompt | ms | tokens/s |\n|---|---|---|\n");
    for tokens in lengths {
        let took = prices.prefill(0, tokens, worker.limits.step_tokens_max);
        let seconds = took.as_secs_f64();
        let rate = f64::from(tokens) / seconds;
        text.push_str(&format!(
            "| {tokens} | {:.1} | {rate:.0} |\n",
            seconds * 1e3
        ));
    }
    Ok(text)
}
