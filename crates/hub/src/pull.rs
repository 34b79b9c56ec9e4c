//! The download of a model: listing, choice, room, blobs, links.

use crate::cache::{HubCache, ModelFolder};
use crate::cached::INDEX_BYTES_MAX;
use crate::digest::BlobHash;
use crate::error::HubError;
use crate::fetch::{BlobFetch, has_bytes, wait};
use crate::http::{FailureStage, HubClient, RequestError};
use crate::listing::{BlobFacts, RepoFile, RepoListing, RepoPath};
use crate::name::HubModel;
use crate::retry::FailureCount;
use crate::selection::{
    ADAPTER_CONFIG, CONFIG, WeightFiles, by_names, descriptions, names_of_index, weight_files,
};
use crate::settings::{HubSettings, NetworkUse};
use hyper::header::{CONTENT_LENGTH, ETAG, HeaderMap};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Files that are downloaded at once.
const DOWNLOADS_MAX: usize = 8;
/// Threads of the downloads: most of their time goes into checksums.
const THREADS: usize = 4;
/// Time between two looks of the observer.
const LOOK: Duration = Duration::from_millis(200);

/// The hub and the cache.
pub struct Hub {
    settings: HubSettings,
    cache: HubCache,
}

/// A model that was downloaded, or was there and is the hub's newest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledSnapshot {
    pub folder: PathBuf,
    pub commit: String,
    /// Bytes of the files.
    pub bytes: u64,
}

/// Progress of a download.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PullCounts {
    pub bytes_done: u64,
    /// Zero until the hub has said it.
    pub bytes_total: u64,
    /// Connections that were cut or refused, and tried again.
    pub retries: u64,
    /// Files that another process downloads now, which this one waits for.
    pub files_awaited: u64,
}

/// Receives the progress of a download a few times a second.
pub trait PullObserver {
    fn show(&mut self, counts: PullCounts);
}

/// The counts that the downloads share.
#[derive(Debug, Default)]
pub(crate) struct PullCounters {
    done: AtomicU64,
    total: AtomicU64,
    retries: AtomicU64,
    awaited: AtomicU64,
}

impl PullCounters {
    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes bytes back that have to arrive again.
    pub(crate) fn take_back(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a file that another process downloads, until the guard is dropped.
    pub(crate) fn await_file(&self) -> AwaitedFile<'_> {
        self.awaited.fetch_add(1, Ordering::Relaxed);
        AwaitedFile(self)
    }

    fn counts(&self) -> PullCounts {
        PullCounts {
            bytes_done: self.done.load(Ordering::Relaxed),
            bytes_total: self.total.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            files_awaited: self.awaited.load(Ordering::Relaxed),
        }
    }
}

/// A file that another process downloads.
pub(crate) struct AwaitedFile<'a>(&'a PullCounters);

impl Drop for AwaitedFile<'_> {
    fn drop(&mut self) {
        self.0.awaited.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A file with its size and checksum.
struct KnownFile {
    path: RepoPath,
    facts: BlobFacts,
}

impl Hub {
    #[must_use]
    pub fn new(settings: HubSettings) -> Self {
        let cache = HubCache::new(settings.cache.clone());
        Self { settings, cache }
    }

    #[must_use]
    pub fn cache(&self) -> &HubCache {
        &self.cache
    }

    /// Returns the folder of a model: from the cache without asking the hub, or else downloaded.
    ///
    /// # Errors
    /// If the cache does not have it, and it cannot be downloaded.
    pub fn folder(
        &self,
        model: &HubModel,
        observer: &mut dyn PullObserver,
    ) -> Result<PathBuf, HubError> {
        match self.cache.find(model) {
            Some(folder) => Ok(folder),
            None => Ok(self.pull(model, observer)?.folder),
        }
    }

    /// Downloads the hub's newest commit of a revision, except for the files that are there.
    ///
    /// # Errors
    /// If the network may not be used, the hub refuses, or the disk does.
    pub fn pull(
        &self,
        model: &HubModel,
        observer: &mut dyn PullObserver,
    ) -> Result<PulledSnapshot, HubError> {
        if self.settings.network == NetworkUse::Forbidden {
            return Err(HubError::Offline {
                model: model.clone(),
                cache: self.settings.cache.clone(),
            });
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .enable_all()
            .build()
            .map_err(HubError::disk(&self.settings.cache))?;
        let counters = Arc::new(PullCounters::default());
        runtime.block_on(async {
            let pulled = self.pull_observed(model, &counters);
            let mut pulled = std::pin::pin!(pulled);
            let mut looks = tokio::time::interval(LOOK);
            loop {
                tokio::select! {
                    done = &mut pulled => {
                        observer.show(counters.counts());
                        return done;
                    }
                    _ = looks.tick() => observer.show(counters.counts()),
                }
            }
        })
    }

    async fn pull_observed(
        &self,
        model: &HubModel,
        counters: &Arc<PullCounters>,
    ) -> Result<PulledSnapshot, HubError> {
        let client = Arc::new(HubClient::new(&self.settings));
        let unusable = |reason| HubError::Unusable {
            model: model.clone(),
            reason,
        };
        let listing = self.listing(&client, model).await?;
        let weights = weight_files(&listing).map_err(unusable)?;
        let folder = self.cache.model(&model.name);
        folder.make()?;
        let fetch = Arc::new(BlobFetch {
            client: Arc::clone(&client),
            retry: self.settings.retry,
            folder: folder.clone(),
            model: model.clone(),
            commit: listing.commit.clone(),
            counters: Arc::clone(counters),
        });
        // The index says which weights there are, so it comes first, with the other small files.
        let mut files = self
            .known(&client, model, &listing.commit, descriptions(&listing))
            .await?;
        self.fetch_all(&fetch, &files).await?;
        let names = match weights {
            WeightFiles::One(name) => BTreeSet::from([name.to_owned()]),
            WeightFiles::Index(index) => index_names(&folder, &files, index).map_err(unusable)?,
        };
        let chosen = by_names(&listing, &names).map_err(unusable)?;
        let large = self.known(&client, model, &listing.commit, chosen).await?;
        self.fetch_all(&fetch, &large).await?;
        files.extend(large);
        link_all(&folder, &listing.commit, &files)?;
        folder.write_ref(&model.revision(), &listing.commit)?;
        Ok(PulledSnapshot {
            folder: folder.snapshot(&listing.commit),
            bytes: files.iter().map(|file| file.facts.bytes).sum(),
            commit: listing.commit,
        })
    }

    async fn listing(&self, client: &HubClient, model: &HubModel) -> Result<RepoListing, HubError> {
        let url = client.listing_url(model);
        let mut failures = FailureCount::default();
        let answer = loop {
            match client.read(&url, model).await {
                Ok(answer) => break answer,
                Err(RequestError::Lasting(error)) => return Err(error),
                Err(RequestError::Passing(failure)) => {
                    // A name that nobody knows and an absent network rarely mend themselves.
                    let is_unmet = failure.stage == FailureStage::Connecting;
                    let tries = self.settings.retry.contacts_max;
                    if is_unmet && failures.count() + 1 >= tries {
                        return Err(HubError::NoContact {
                            endpoint: self.settings.endpoint.clone(),
                            reason: failure.reason,
                            tries,
                            remedy: client.contact_remedy(&url),
                        });
                    }
                    wait(&mut failures, &self.settings.retry, &url, failure).await?;
                }
            }
        };
        RepoListing::parse(&answer).map_err(|reason| HubError::Answer { url, reason })
    }

    /// Returns the files with sizes and checksums; the hub is asked for those that it did not list.
    async fn known(
        &self,
        client: &HubClient,
        model: &HubModel,
        commit: &str,
        files: Vec<RepoFile>,
    ) -> Result<Vec<KnownFile>, HubError> {
        let mut known = Vec::with_capacity(files.len());
        for RepoFile { path, facts } in files {
            let facts = match facts {
                Some(facts) => facts,
                None => {
                    let url = client.file_url(model, commit, path.as_str());
                    self.facts_of_file(client, model, &url).await?
                }
            };
            known.push(KnownFile { path, facts });
        }
        Ok(known)
    }

    async fn facts_of_file(
        &self,
        client: &HubClient,
        model: &HubModel,
        url: &str,
    ) -> Result<BlobFacts, HubError> {
        let mut failures = FailureCount::default();
        let headers = loop {
            match client.headers(url, model).await {
                Ok(headers) => break headers,
                Err(RequestError::Lasting(error)) => return Err(error),
                Err(RequestError::Passing(failure)) => {
                    wait(&mut failures, &self.settings.retry, url, failure).await?;
                }
            }
        };
        facts_of_headers(&headers).ok_or_else(|| HubError::Answer {
            url: url.to_owned(),
            reason: "no checksum or no size of the file".to_owned(),
        })
    }

    /// Downloads the blobs that are not there, several at once; the first failure ends the others.
    async fn fetch_all(&self, fetch: &Arc<BlobFetch>, files: &[KnownFile]) -> Result<(), HubError> {
        // Two files of the same content are one blob.
        let blobs: BTreeMap<&BlobHash, &KnownFile> =
            files.iter().map(|file| (&file.facts.hash, file)).collect();
        check_room(&fetch.folder, &blobs)?;
        let total = blobs.values().map(|file| file.facts.bytes).sum();
        fetch.counters.total.fetch_add(total, Ordering::Relaxed);
        let permits = Arc::new(Semaphore::new(DOWNLOADS_MAX));
        let mut downloads = JoinSet::new();
        for file in blobs.into_values() {
            let (fetch, permits) = (Arc::clone(fetch), Arc::clone(&permits));
            let (path, facts) = (file.path.clone(), file.facts.clone());
            downloads.spawn(async move {
                let _permit = permits.acquire().await;
                fetch.fetch(&path, &facts).await
            });
        }
        while let Some(done) = downloads.join_next().await {
            done.expect("a download neither panics nor is cancelled")?;
        }
        Ok(())
    }
}

/// Reads the names of the weights from an index that was downloaded.
fn index_names(
    folder: &ModelFolder,
    files: &[KnownFile],
    index: &str,
) -> Result<BTreeSet<String>, String> {
    let file = files.iter().find(|file| file.path.as_str() == index);
    let file = file.ok_or_else(|| format!("{index} is not in the listing"))?;
    let text = cleave_files::read_text(&folder.blob(&file.facts.hash), INDEX_BYTES_MAX);
    names_of_index(&text.map_err(|error| format!("{index}: {error}"))?)
}

/// Links every file of the commit. The configuration is last, so that a snapshot that has it has
/// the other files.
fn link_all(folder: &ModelFolder, commit: &str, files: &[KnownFile]) -> Result<(), HubError> {
    let is_last = |file: &&KnownFile| [CONFIG, ADAPTER_CONFIG].contains(&file.path.as_str());
    let (last, first): (Vec<_>, Vec<_>) = files.iter().partition(is_last);
    for KnownFile { path, facts } in first.into_iter().chain(last) {
        folder.link(commit, path, &facts.hash)?;
    }
    Ok(())
}

/// Checks that the disk has room for the bytes that are still to come.
fn check_room(
    folder: &ModelFolder,
    blobs: &BTreeMap<&BlobHash, &KnownFile>,
) -> Result<(), HubError> {
    let missing = blobs.values().map(|file| {
        let BlobFacts { hash, bytes } = &file.facts;
        if has_bytes(&folder.blob(hash), *bytes) {
            return 0;
        }
        let part = fs::metadata(folder.incomplete(hash)).map_or(0, |part| part.len());
        bytes.saturating_sub(part)
    });
    let needed_bytes: u64 = missing.sum();
    let path = folder.blobs();
    let system = rustix::fs::statvfs(&path).map_err(|error| HubError::disk(&path)(error.into()))?;
    let free_bytes = system.f_bavail.saturating_mul(system.f_frsize);
    if needed_bytes > free_bytes {
        return Err(HubError::NoRoom {
            folder: path,
            needed_bytes,
            free_bytes,
        });
    }
    Ok(())
}

/// Reads size and checksum from the headers of a file. Those that begin with `x-linked` describe
/// the file itself where the answer is a redirect.
fn facts_of_headers(headers: &HeaderMap) -> Option<BlobFacts> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let etag = text("x-linked-etag").or_else(|| text(ETAG.as_str()))?;
    let etag = etag.trim_start_matches("W/").trim_matches('"');
    let bytes = text("x-linked-size").or_else(|| text(CONTENT_LENGTH.as_str()))?;
    Some(BlobFacts {
        hash: BlobHash::parse(etag)?,
        bytes: bytes.parse().ok()?,
    })
}
