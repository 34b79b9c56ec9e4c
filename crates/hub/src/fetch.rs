//! The download of one blob: lock, resume, compare, rename.

use crate::cache::ModelFolder;
use crate::digest::BlobHasher;
use crate::error::HubError;
use crate::http::{ByteRange, HubClient, PassingFailure, RequestError, passing};
use crate::listing::{BlobFacts, RepoPath};
use crate::name::HubModel;
use crate::pull::PullCounters;
use crate::retry::{FailureCount, RetryOptions, RetryStep};
use http_body_util::BodyExt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Time between two looks at a lock that another process holds.
const LOCK_LOOK: Duration = Duration::from_millis(200);
const READ_BYTES: usize = 1 << 20;

/// A file of a commit to download, and everything that it needs.
pub(crate) struct BlobFetch {
    pub(crate) client: Arc<HubClient>,
    pub(crate) retry: RetryOptions,
    pub(crate) folder: ModelFolder,
    pub(crate) model: HubModel,
    pub(crate) commit: String,
    pub(crate) counters: Arc<PullCounters>,
}

/// A part of a blob on the disk, with the checksum of its bytes so far.
struct PartFile {
    file: File,
    bytes: u64,
    hasher: BlobHasher,
}

/// The end of one attempt that brought all bytes.
enum BlobCheck {
    Fits,
    /// The bytes are not the hub's, and were removed.
    Damaged,
}

impl BlobFetch {
    /// Downloads a blob unless it is there.
    pub(crate) async fn fetch(&self, path: &RepoPath, facts: &BlobFacts) -> Result<(), HubError> {
        let blob = self.folder.blob(&facts.hash);
        let lock = self.lock(&self.folder.lock(&facts.hash)).await?;
        if has_bytes(&blob, facts.bytes) {
            self.counters.add(facts.bytes);
            return Ok(());
        }
        let incomplete = self.folder.incomplete(&facts.hash);
        for _ in 0..2 {
            match self.attempts(path, facts, &incomplete).await? {
                BlobCheck::Fits => {
                    fs::rename(&incomplete, &blob).map_err(HubError::disk(&blob))?;
                    drop(lock);
                    return Ok(());
                }
                BlobCheck::Damaged => {}
            }
        }
        Err(HubError::Damaged {
            name: self.model.name.clone(),
            file: path.to_string(),
            expected: facts.hash.to_string(),
        })
    }

    /// Waits for the lock of a blob, which a process holds while it downloads it.
    async fn lock(&self, path: &Path) -> Result<File, HubError> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .map_err(HubError::disk(path))?;
        let mut awaited = None;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => {
                    awaited.get_or_insert_with(|| self.counters.await_file());
                    tokio::time::sleep(LOCK_LOOK).await;
                }
                Err(TryLockError::Error(error)) => return Err(HubError::disk(path)(error)),
            }
        }
    }

    /// Tries until every byte arrived, or the failures are too many.
    async fn attempts(
        &self,
        path: &RepoPath,
        facts: &BlobFacts,
        incomplete: &Path,
    ) -> Result<BlobCheck, HubError> {
        let url = self
            .client
            .file_url(&self.model, &self.commit, path.as_str());
        let mut part = PartFile::open(incomplete, facts).map_err(HubError::disk(incomplete))?;
        self.counters.add(part.bytes);
        let mut failures = FailureCount::default();
        while part.bytes < facts.bytes {
            let before = part.bytes;
            let failed = match self.attempt(&url, facts, &mut part, incomplete).await {
                Ok(()) => continue,
                Err(RequestError::Lasting(error)) => return Err(error),
                Err(RequestError::Passing(failure)) => failure,
            };
            if part.bytes > before {
                failures.progress();
            }
            self.counters.retry();
            wait(&mut failures, &self.retry, &url, failed).await?;
        }
        let PartFile { file, hasher, .. } = part;
        if hasher.matches(&facts.hash) {
            // A rename may reach the disk before the bytes do.
            file.sync_data().map_err(HubError::disk(incomplete))?;
            return Ok(BlobCheck::Fits);
        }
        self.counters.take_back(facts.bytes);
        fs::remove_file(incomplete).map_err(HubError::disk(incomplete))?;
        Ok(BlobCheck::Damaged)
    }

    /// Reads from where the part ends to the end of the file, or of the connection.
    async fn attempt(
        &self,
        url: &str,
        facts: &BlobFacts,
        part: &mut PartFile,
        path: &Path,
    ) -> Result<(), RequestError> {
        let disk = |error| RequestError::Lasting(HubError::disk(path)(error));
        let range = match part.bytes {
            0 => ByteRange::All,
            bytes => ByteRange::From(bytes),
        };
        let (given, mut body) = self.client.open(url, &self.model, range).await?;
        if given == ByteRange::All && part.bytes > 0 {
            self.counters.take_back(part.bytes);
            part.restart(facts).map_err(disk)?;
        }
        while part.bytes < facts.bytes {
            let frame = match tokio::time::timeout(self.retry.silence_max, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => return Err(passing(error.to_string())),
                Ok(None) => return Err(passing("the file ended before its size".to_owned())),
                Err(_) => return Err(passing("no byte for too long".to_owned())),
            };
            let Some(bytes) = frame.data_ref() else {
                continue;
            };
            // Bytes behind the size fail the comparison of checksums of what is before them.
            let left = usize::try_from(facts.bytes - part.bytes).unwrap_or(usize::MAX);
            let bytes = &bytes[..bytes.len().min(left)];
            part.append(bytes).map_err(disk)?;
            self.counters.add(bytes.len() as u64);
        }
        Ok(())
    }
}

/// Waits after a failure, or gives the address up.
pub(crate) async fn wait(
    failures: &mut FailureCount,
    options: &RetryOptions,
    url: &str,
    failure: PassingFailure,
) -> Result<(), HubError> {
    match failures.fail(options, failure.asked) {
        RetryStep::Wait(span) => {
            tokio::time::sleep(span).await;
            Ok(())
        }
        RetryStep::GiveUp => Err(HubError::Unreachable {
            url: url.to_owned(),
            reason: failure.reason,
            tries: options.failures_max,
        }),
    }
}

/// Whether the blob is there, whole.
pub(crate) fn has_bytes(path: &Path, bytes: u64) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == bytes)
}

impl PartFile {
    /// Opens the part that an earlier process left, and computes its checksum.
    fn open(path: &Path, facts: &BlobFacts) -> std::io::Result<Self> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path)?;
        let mut part = Self {
            file,
            bytes: 0,
            hasher: facts.hash.hasher(facts.bytes),
        };
        if part.file.metadata()?.len() > facts.bytes {
            part.restart(facts)?;
            return Ok(part);
        }
        let mut buffer = vec![0; READ_BYTES];
        loop {
            match part.file.read(&mut buffer)? {
                0 => return Ok(part),
                read => {
                    part.hasher.update(&buffer[..read]);
                    part.bytes += read as u64;
                }
            }
        }
    }

    fn restart(&mut self, facts: &BlobFacts) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.bytes = 0;
        self.hasher = facts.hash.hasher(facts.bytes);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}
