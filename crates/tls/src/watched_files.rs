//! Watches files for changes.
//!
//! Owns: reading the files once a second and comparing their bytes. An orchestrator mounts a secret
//! as a link to a folder that it swaps, so only the bytes read through the link matter. Never:
//! reports the same error twice. Invariant: the current value was built from one reading of all
//! files.

use crate::TlsError;
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

/// The interval between readings.
const PERIOD: Duration = Duration::from_secs(1);
/// The size limit: a larger file is no chain, key or list of authorities.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A file with its contents when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileContents {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

/// Builds a value from the contents of the files, if they are valid.
pub(crate) type BuildFromFiles<T> =
    Box<dyn Fn(&[FileContents]) -> Result<T, TlsError> + Send + Sync>;

/// A value that follows its files.
pub(crate) struct WatchedFiles<T> {
    paths: Vec<PathBuf>,
    make: BuildFromFiles<T>,
    state: Mutex<WatchedFilesState<T>>,
}

struct WatchedFilesState<T> {
    current: Arc<T>,
    /// The contents at the last reading; `None` if a file could not be read, and that was reported.
    last_read: Option<Vec<FileContents>>,
}

impl<T: Send + Sync + 'static> WatchedFiles<T> {
    /// Reads the files for the first time.
    pub(crate) fn open(
        paths: Vec<PathBuf>,
        make: BuildFromFiles<T>,
    ) -> Result<Arc<Self>, TlsError> {
        let contents = read(&paths)?;
        let current = Arc::new(make(&contents)?);
        let state = WatchedFilesState {
            current,
            last_read: Some(contents),
        };
        Ok(Arc::new(Self {
            paths,
            make,
            state: Mutex::new(state),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, WatchedFilesState<T>> {
        self.state.lock()
    }

    /// The value in force.
    pub(crate) fn current(&self) -> Arc<T> {
        Arc::clone(&self.lock().current)
    }

    /// Checks the files periodically while it is polled.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(PERIOD).await;
            let followed = Arc::clone(&self);
            let looked = spawn_blocking(move || followed.check_files());
            let first = || self.paths[0].display().to_string();
            match looked.await {
                Ok(None) => {}
                Ok(Some(Ok(()))) => info!(file = first(), "new certificates are in force"),
                Ok(Some(Err(error))) => warn!(%error, "previous certificates stay in force"),
                // Blocking threads are gone only when the process is exiting.
                Err(_) => return,
            }
        }
    }

    /// Reads the files; returns the result if they have changed since the last reading.
    pub(crate) fn check_files(&self) -> Option<Result<(), TlsError>> {
        let found = match read(&self.paths) {
            Ok(found) => found,
            Err(error) => return self.lock().last_read.take().map(|_| Err(error)),
        };
        if self.lock().last_read.as_ref() == Some(&found) {
            return None;
        }
        let made = (self.make)(&found);
        let mut state = self.lock();
        state.last_read = Some(found);
        Some(made.map(|made| state.current = Arc::new(made)))
    }
}

fn read(paths: &[PathBuf]) -> Result<Vec<FileContents>, TlsError> {
    paths.iter().map(|path| read_one(path)).collect()
}

pub(crate) fn read_one(path: &Path) -> Result<FileContents, TlsError> {
    let bytes = bytes(path).map_err(|error| TlsError::Unreadable(path.to_owned(), error))?;
    Ok(FileContents {
        path: path.to_owned(),
        bytes,
    })
}

/// Reads small files only: a mistyped path may name anything.
fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    cleave_files::read(path, FILE_BYTES_MAX)
}
