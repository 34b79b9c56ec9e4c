//! `cleave replay`: a recorded tape run again, with the decisions compared.

use crate::args::ReplayArgs;
use anyhow::Context;
use cleave_sim::tape;
use std::io::Write;

/// Limit of a tape, which is read whole.
const TAPE_BYTES_MAX: u64 = 4 << 30;

pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for path in &args.tapes {
        let text = cleave_files::read_text(path, TAPE_BYTES_MAX)
            .with_context(|| format!("{}", path.display()))?;
        let replayed = tape::replay(text.lines()).with_context(|| format!("{}", path.display()))?;
        writeln!(
            out,
            "{}: {} inputs, {} outputs, all equal",
            path.display(),
            replayed.inputs,
            replayed.outputs
        )?;
    }
    Ok(())
}
