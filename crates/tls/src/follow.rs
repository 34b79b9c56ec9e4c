//! Files that are followed.
//!
//! Owns: looking at them once a second and comparing their bytes: a secret that an orchestrator mounts is
//! a link to a folder that is swapped, and what matters is what is read through it. Never: tells the same
//! mistake twice. Invariant: what is current was made of one reading of all files.

use crate::TlsError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

/// How often files are looked at.
const PERIOD: Duration = Duration::from_secs(1);
/// A larger file is no chain, key or list of authorities.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A file as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
}

/// What is made of files, as long as they are sound.
pub(crate) type Make<T> = Box<dyn Fn(&[Contents]) -> Result<T, TlsError> + Send + Sync>;

/// See the module.
pub(crate) struct Followed<T> {
    paths: Vec<PathBuf>,
    make: Make<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    current: Arc<T>,
    /// What the last look found; none if a file could not be read, and that was told.
    seen: Option<Vec<Contents>>,
}

impl<T: Send + Sync + 'static> Followed<T> {
    /// Reads the files for the first time.
    pub(crate) fn open(paths: Vec<PathBuf>, make: Make<T>) -> Result<Arc<Self>, TlsError> {
        let seen = read(&paths)?;
        let current = Arc::new(make(&seen)?);
        let state = State {
            current,
            seen: Some(seen),
        };
        Ok(Arc::new(Self {
            paths,
            make,
            state: Mutex::new(state),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is in force.
    pub(crate) fn current(&self) -> Arc<T> {
        Arc::clone(&self.lock().current)
    }

    /// Looks again and again, for as long as it is polled.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(PERIOD).await;
            let followed = Arc::clone(&self);
            let looked = spawn_blocking(move || followed.look());
            let first = || self.paths[0].display().to_string();
            match looked.await {
                Ok(None) => {}
                Ok(Some(Ok(()))) => info!(file = first(), "certificates changed and are in force"),
                Ok(Some(Err(error))) => warn!(%error, "certificates stay as they were"),
                // Without a thread to look, the process is ending.
                Err(_) => return,
            }
        }
    }

    /// What is new since the last look.
    pub(crate) fn look(&self) -> Option<Result<(), TlsError>> {
        let found = match read(&self.paths) {
            Ok(found) => found,
            Err(error) => return self.lock().seen.take().map(|_| Err(error)),
        };
        if self.lock().seen.as_ref() == Some(&found) {
            return None;
        }
        let made = (self.make)(&found);
        let mut state = self.lock();
        state.seen = Some(found);
        Some(made.map(|made| state.current = Arc::new(made)))
    }
}

fn read(paths: &[PathBuf]) -> Result<Vec<Contents>, TlsError> {
    paths.iter().map(|path| read_one(path)).collect()
}

pub(crate) fn read_one(path: &Path) -> Result<Contents, TlsError> {
    let bytes = bytes(path).map_err(|error| TlsError::Unreadable(path.to_owned(), error))?;
    Ok(Contents {
        path: path.to_owned(),
        bytes,
    })
}

/// Small files only: a slip of the path may name anything.
fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    cleave_files::read(path, FILE_BYTES_MAX)
}
