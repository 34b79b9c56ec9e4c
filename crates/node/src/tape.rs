//! Writes a brain's tape: one JSON object per line, as `cleave replay` reads them.
//!
//! Everything said to one input is on its way to the disk before the next input is handled, so that
//! the tape of a process that died ends with what killed it. That costs a system call per input:
//! tapes are for investigations.

use crate::NodeError;
use cleave_domain::{Tape, TapeLine};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tracing::error;

/// A line of a worker's brain, borrowed from the driver.
pub(crate) type WorkerLine<'a> =
    TapeLine<&'a cleave_sched::Limits, &'a cleave_sched::Input, &'a cleave_sched::Output>;
/// A line of a router's brain.
pub(crate) type RouterLine<'a> =
    TapeLine<&'a cleave_router::Limits, &'a cleave_router::Input, &'a cleave_router::Output>;

/// Where a brain's lines go, if anywhere.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    open: Option<(BufWriter<File>, PathBuf)>,
}

impl Recorder {
    /// Creates the file anew; without a path nothing is recorded.
    pub(crate) fn create(path: Option<&Path>) -> Result<Self, NodeError> {
        let Some(path) = path else {
            return Ok(Self::default());
        };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let file = folder.and_then(|()| File::create(path));
        let file = file.map_err(|error| NodeError::Tape(path.to_owned(), error))?;
        let open = Some((BufWriter::new(file), path.to_owned()));
        Ok(Self { open })
    }

    /// Writes a line of a worker's brain.
    pub(crate) fn worker(&mut self, line: WorkerLine<'_>) {
        self.write(&Tape::<_, ()>::Worker(line));
    }

    /// Writes a line of a router's brain.
    pub(crate) fn router(&mut self, line: RouterLine<'_>) {
        self.write(&Tape::<(), _>::Router(line));
    }

    /// Called when a brain has been drained.
    pub(crate) fn flush(&mut self) {
        self.attempt(Write::flush);
    }

    fn write(&mut self, line: &impl Serialize) {
        self.attempt(|file| {
            serde_json::to_writer(&mut *file, line)?;
            file.write_all(b"\n")
        });
    }

    /// A tape that cannot be written ends; serving goes on.
    fn attempt(&mut self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        if let Some((file, path)) = &mut self.open
            && let Err(reason) = write(file)
        {
            error!(path = %path.display(), %reason, "the tape ends here: it cannot be written");
            self.open = None;
        }
    }
}
