//! `cleave synth`: a checkpoint of a real shape with random weights.

use crate::args::SynthArgs;
use crate::model::{loading_bar, show};
use cleave_engine::synth::synth;

/// Runs the command.
pub(crate) fn run(args: &SynthArgs) -> anyhow::Result<()> {
    let bar = loading_bar();
    bar.set_message("writing");
    let written = synth(&args.shape, &args.out, args.seed, &mut |progress| {
        show(&bar, progress)
    });
    bar.finish_and_clear();
    written?;
    eprintln!("wrote {} to {}", args.shape, args.out.display());
    Ok(())
}
