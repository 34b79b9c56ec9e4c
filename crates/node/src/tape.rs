//! Writes a brain's tape: one JSON object per line, as `cleave replay` reads them.
//!
//! All outputs for one input are on their way to the disk before the next input is handled, so that
//! the tape of a crashed process ends with the input that crashed it. That costs a system call per
//! input: tapes are for investigations.

use crate::NodeError;
use cleave_domain::{Tape, TapeRecord};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tracing::error;

/// Permission bits of a new tape, less those of the process's mask.
const TAPE_MODE: u32 = 0o666;

/// A tape record of a worker's brain, borrowed from the driver.
pub(crate) type WorkerTapeRecord<'a> = TapeRecord<
    &'a cleave_sched::WorkerLimits,
    &'a cleave_sched::WorkerInput,
    &'a cleave_sched::WorkerOutput,
>;
/// A tape record of a router's brain.
pub(crate) type RouterTapeRecord<'a> = TapeRecord<
    &'a cleave_router::RouterLimits,
    &'a cleave_router::RouterInput,
    &'a cleave_router::RouterOutput,
>;

/// Writes a brain's tape, if one was asked for.
#[derive(Debug, Default)]
pub(crate) struct TapeRecorder {
    open: Option<(BufWriter<File>, PathBuf)>,
}

impl TapeRecorder {
    /// Creates the file anew; without a path nothing is recorded.
    pub(crate) fn create(path: Option<&Path>) -> Result<Self, NodeError> {
        let Some(path) = path else {
            return Ok(Self::default());
        };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let file = folder.and_then(|()| cleave_files::open_or_create(path, TAPE_MODE));
        let file = file.and_then(|file| file.set_len(0).map(|()| file));
        let file = file.map_err(|error| NodeError::Tape(path.to_owned(), error))?;
        let open = Some((BufWriter::new(file), path.to_owned()));
        Ok(Self { open })
    }

    /// Writes a record of a worker's brain.
    pub(crate) fn write_worker(&mut self, line: WorkerTapeRecord<'_>) {
        self.write(&Tape::<_, ()>::Worker(line));
    }

    /// Writes a record of a router's brain.
    pub(crate) fn write_router(&mut self, line: RouterTapeRecord<'_>) {
        self.write(&Tape::<(), _>::Router(line));
    }

    /// Flushes the file; called once the brain has no more outputs for an input.
    pub(crate) fn flush(&mut self) {
        self.try_write(Write::flush);
    }

    fn write(&mut self, line: &impl Serialize) {
        self.try_write(|file| {
            serde_json::to_writer(&mut *file, line)?;
            file.write_all(b"\n")
        });
    }

    /// Ends the tape at the first write error; serving continues.
    fn try_write(&mut self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        if let Some((file, path)) = &mut self.open
            && let Err(reason) = write(file)
        {
            error!(path = %path.display(), %reason, "cannot write the tape: recording stops, serving continues");
            self.open = None;
        }
    }
}
