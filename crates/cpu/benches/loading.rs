//! Time to load very many tiny matrices: 48 layers of 128 experts of three matrices each, and half
//! of the layers. The time for each tensor must not grow.
//!
//! `cargo bench -p cleave-cpu --bench loading [-- ROUNDS]`; the processor must be idle otherwise.
//! The best of all rounds counts.
#![allow(clippy::print_stdout, clippy::unwrap_used)] // what it is for

#[path = "../tests/many_experts.rs"]
mod many_experts;

use many_experts::{STEPS, best_times, write};

const EXPERTS: usize = 128;

fn main() {
    let rounds = std::env::args().find_map(|arg| arg.parse().ok());
    let rounds = rounds.unwrap_or(3);
    let of = |layers: usize| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), layers, EXPERTS);
        let tensors = (layers * EXPERTS * 3) as f64;
        best_times(dir.path(), rounds).map(|time| time.as_secs_f64() / tensors)
    };
    let (half, whole) = (of(24), of(48));
    println!("| step | 9,216 tensors | 18,432 tensors | ratio for each tensor |");
    println!("|---|---|---|---|");
    for ((step, half), whole) in STEPS.iter().zip(half).zip(whole) {
        println!(
            "| {step} | {:.1} µs each | {:.1} µs each | {:.2} |",
            half * 1e6,
            whole * 1e6,
            whole / half
        );
    }
}
