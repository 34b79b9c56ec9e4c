//! Writes a brain's tape: one JSON object per line, as `cleave replay` reads them.
//!
//! A restart keeps the tape of the process before it, which may have crashed, under another name.
//!
//! All outputs for one input are on their way to the disk before the next input is handled, so that
//! the tape of a crashed process ends with the input that crashed it. That costs a system call per
//! input: tapes are for investigations.

use crate::error::TelemetryError;
use cleave_domain::{Tape, TapeRecord};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tracing::{error, info};

/// Permission bits of a new tape, less those of the process's mask.
const TAPE_MODE: u32 = 0o666;

/// A tape record of a worker's brain, borrowed from the driver.
pub type WorkerTapeRecord<'a> = TapeRecord<
    &'a cleave_sched::WorkerLimits,
    &'a cleave_sched::WorkerInput,
    &'a cleave_sched::WorkerOutput,
>;
/// A tape record of a router's brains.
pub type RouterTapeRecord<'a> = TapeRecord<
    &'a cleave_router::RouterLimits,
    &'a cleave_router::PoolInput,
    &'a cleave_router::PoolOutput,
>;

/// Writes a brain's tape, if one was asked for.
#[derive(Debug, Default)]
pub struct TapeRecorder {
    open: Option<(BufWriter<File>, PathBuf)>,
}

impl TapeRecorder {
    /// Creates the file; without a path nothing is recorded. A tape that is there already gets a
    /// number after its name, the lowest that is free.
    pub fn create(path: Option<&Path>) -> Result<Self, TelemetryError> {
        let Some(path) = path else {
            return Ok(Self::default());
        };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let file = folder.and_then(|()| create_beside_earlier(path));
        let file = file.map_err(|error| TelemetryError::Tape(path.to_owned(), error))?;
        let open = Some((BufWriter::new(file), path.to_owned()));
        Ok(Self { open })
    }

    /// Writes a record of a worker's brain.
    pub fn write_worker(&mut self, line: WorkerTapeRecord<'_>) {
        self.write(&Tape::<_, ()>::Worker(line));
    }

    /// Writes a record of a router's brain.
    pub fn write_router(&mut self, line: RouterTapeRecord<'_>) {
        self.write(&Tape::<(), _>::Router(line));
    }

    /// Flushes the file; called once the brain has no more outputs for an input.
    pub fn flush(&mut self) {
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

/// Creates the file, and renames one of that name that has contents.
fn create_beside_earlier(path: &Path) -> io::Result<File> {
    let file = cleave_files::open_or_create(path, TAPE_MODE)?;
    if file.metadata()?.len() == 0 {
        return Ok(file);
    }
    let numbered = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let free = (1..).map(numbered).find(|path| !path.exists());
    let earlier = free.ok_or(io::ErrorKind::AlreadyExists)?;
    std::fs::rename(path, &earlier)?;
    info!(kept = %earlier.display(), "the tape of an earlier start keeps its contents under this name");
    cleave_files::open_or_create(path, TAPE_MODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_keeps_the_tapes_before_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("router.jsonl");
        for start in ["first\n", "second\n", "third\n"] {
            let mut recorder = TapeRecorder::create(Some(&path)).expect("a tape");
            recorder.try_write(|file| file.write_all(start.as_bytes()));
            recorder.flush();
        }
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a tape");
        assert_eq!(read("router.jsonl.1"), "first\n");
        assert_eq!(read("router.jsonl.2"), "second\n");
        assert_eq!(read("router.jsonl"), "third\n");
    }
}
