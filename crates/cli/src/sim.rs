//! `cleave sim`: the brains in simulated worlds.

use anyhow::bail;
use cleave_sim::explore::{ExploreScope, explore as explore_world, worlds};
use cleave_sim::{ChaosOptions, LEGEND, run_chaos as run_world};
use std::io::Write;

/// Runs `seeds` worlds, from seed `from` on; prints what `options` selects.
///
/// # Errors
/// At the first violation, after its world, its last events and its seed were printed.
pub(crate) fn chaos(seeds: u64, from: u64, options: &ChaosOptions) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let (mut events, mut tokens) = (0u64, 0u64);
    let Some(last) = from.checked_add(seeds - 1) else {
        bail!(
            "--from {from} --seeds {seeds} goes past the greatest seed, {}",
            u64::MAX
        );
    };
    for seed in from..=last {
        let report = match run_world(seed, options) {
            Ok(report) => report,
            Err(violation) => {
                writeln!(out, "{violation}")?;
                bail!(
                    "seed {seed} violated an invariant; `cleave sim chaos --seeds 1 --from {seed} --log` reproduces it"
                );
            }
        };
        if options.log {
            write!(out, "{}{LEGEND}{}", report.world, report.log)?;
        }
        events += report.events;
        tokens += report.tokens;
    }
    writeln!(
        out,
        "{seeds} worlds from seed {from}: {events} events, {tokens} tokens compared, 0 violations"
    )?;
    Ok(())
}

/// Explores the small worlds, or only one.
///
/// # Errors
/// At the first violation, after the path to it was printed.
pub(crate) fn explore(world: Option<&str>, scope: &ExploreScope) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let known = worlds();
    let chosen: Vec<&str> = match world {
        Some(world) if !known.contains(&world) => {
            bail!(
                "--world {world}: there is no such world, but {}",
                known.join(", ")
            );
        }
        Some(world) => vec![world],
        None => known,
    };
    let mut states = 0u64;
    for world in chosen {
        match explore_world(world, scope) {
            Ok(explored) => {
                for explored in explored {
                    writeln!(out, "{explored}")?;
                    states += explored.states;
                }
            }
            Err(broken) => {
                write!(out, "{broken}")?;
                bail!("{}", broken.problem);
            }
        }
    }
    writeln!(out, "{states} states, 0 violations")?;
    Ok(())
}
