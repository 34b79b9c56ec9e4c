//! Runs one world and prints its log: `cargo run -p cleave-sim --example world SEED`.

use cleave_sim::{ChaosOptions, LEGEND, run_chaos};
use std::io::Write;

fn main() -> std::io::Result<()> {
    let seed = std::env::args().nth(1).and_then(|seed| seed.parse().ok());
    let options = ChaosOptions {
        log: true,
        ..ChaosOptions::default()
    };
    let mut out = std::io::stdout().lock();
    match run_chaos(seed.unwrap_or(0), &options) {
        Ok(report) => writeln!(out, "{}{LEGEND}{}", report.world, report.log),
        Err(violation) => writeln!(out, "{violation}"),
    }
}
