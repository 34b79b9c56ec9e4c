//! Models that the cache has: finding, listing and removing them.

use crate::cache::{HubCache, ModelFolder};
use crate::error::HubError;
use crate::listing::is_commit;
use crate::name::{HubModel, HubName};
use crate::selection::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, TOKENIZER, WEIGHTS, WEIGHTS_INDEX, names_of_index,
};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Longest index of weights that is read, in bytes.
pub(crate) const INDEX_BYTES_MAX: u64 = 64 << 20;
/// Deepest folder of a snapshot that is read.
const DEPTH_MAX: usize = 8;

/// A commit of a model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedSnapshot {
    pub name: HubName,
    pub commit: String,
    /// Branches and tags that name this commit.
    pub revisions: Vec<String>,
    pub folder: PathBuf,
    /// Bytes of its blobs; other commits may have some of them, too.
    pub bytes: u64,
    /// Last time that a file was read, as far as the file system keeps it.
    pub used: Option<SystemTime>,
    /// Whether every file is there that serving needs.
    pub is_complete: bool,
}

/// The part of a download that ended early, or runs: blobs that no snapshot has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutDownload {
    pub name: HubName,
    pub folder: PathBuf,
    pub bytes: u64,
    /// Last time that bytes arrived.
    pub written: Option<SystemTime>,
}

/// The result of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreedSpace {
    pub snapshots_count: usize,
    pub bytes: u64,
}

/// A blob of a snapshot.
struct BlobUse {
    bytes: u64,
    used: Option<SystemTime>,
}

impl HubCache {
    /// Finds a model that can be served without the network: the folder of its snapshot.
    #[must_use]
    pub fn find(&self, model: &HubModel) -> Option<PathBuf> {
        let folder = self.model(&model.name);
        let commit = folder.commit(&model.revision())?;
        let snapshot = folder.snapshot(&commit);
        is_complete(&snapshot).then_some(snapshot)
    }

    /// Lists every snapshot, by name and commit.
    ///
    /// # Errors
    /// If a folder cannot be read; a cache that does not exist is empty.
    pub fn list(&self) -> Result<Vec<CachedSnapshot>, HubError> {
        let mut found = Vec::new();
        for folder in names_in(&self.root)? {
            if let Some(name) = HubName::of_folder(&folder) {
                found.extend(snapshots(&self.model(&name), &name)?);
            }
        }
        found.sort_by(|a, b| (&a.name, &a.commit).cmp(&(&b.name, &b.commit)));
        Ok(found)
    }

    /// Lists the models with parts of downloads that have not ended, by name. A download that runs
    /// has such parts, too.
    ///
    /// # Errors
    /// If a folder cannot be read; a cache that does not exist is empty.
    pub fn cut_downloads(&self) -> Result<Vec<CutDownload>, HubError> {
        let mut found = Vec::new();
        for folder in names_in(&self.root)? {
            if let Some(name) = HubName::of_folder(&folder) {
                found.extend(cut_download(&self.model(&name), name)?);
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Removes a model, or one revision of it. Blobs that another snapshot has stay; of a commit
    /// with several names, a branch or tag is removed alone.
    ///
    /// # Errors
    /// If the cache does not have it, or a file cannot be removed.
    pub fn remove(&self, model: &HubModel) -> Result<FreedSpace, HubError> {
        let folder = self.model(&model.name);
        let all = snapshots(&folder, &model.name)?;
        let absent = || HubError::NotCached {
            model: model.clone(),
            cache: self.root.clone(),
        };
        let Some(revision) = &model.revision else {
            if !folder.root.is_dir() {
                return Err(absent());
            }
            return remove_all(&folder, all.len());
        };
        let commit = folder.commit(revision).ok_or_else(absent)?;
        let found = all.iter().find(|snapshot| snapshot.commit == commit);
        let removed = found.ok_or_else(absent)?;
        let is_named_otherwise = removed.revisions.len() > 1;
        if is_named_otherwise
            && removed
                .revisions
                .iter()
                .any(|name| name == revision.as_str())
        {
            let path = folder.refs().join(revision.as_str());
            fs::remove_file(&path).map_err(HubError::disk(&path))?;
            return Ok(FreedSpace {
                snapshots_count: 0,
                bytes: 0,
            });
        }
        let others = all.iter().filter(|snapshot| snapshot.commit != commit);
        let mut others = others.peekable();
        if others.peek().is_none() {
            return remove_all(&folder, all.len());
        }
        let mut blobs = blobs_of(&folder, &removed.folder)?;
        for other in others {
            for path in blobs_of(&folder, &other.folder)?.keys() {
                blobs.remove(path);
            }
        }
        // First the names, so that an interrupted removal leaves no snapshot without its blobs.
        for name in &removed.revisions {
            let path = folder.refs().join(name);
            fs::remove_file(&path).map_err(HubError::disk(&path))?;
        }
        fs::remove_dir_all(&removed.folder).map_err(HubError::disk(&removed.folder))?;
        for path in blobs.keys().filter(|path| path.exists()) {
            fs::remove_file(path).map_err(HubError::disk(path))?;
        }
        Ok(FreedSpace {
            snapshots_count: 1,
            bytes: blobs.values().map(|blob| blob.bytes).sum(),
        })
    }
}

fn remove_all(folder: &ModelFolder, snapshots_count: usize) -> Result<FreedSpace, HubError> {
    let blobs = folder.blobs();
    let sizes = names_in(&blobs)?.into_iter().map(|name| {
        let file = fs::symlink_metadata(blobs.join(name));
        file.map_or(0, |file| file.len())
    });
    let bytes = sizes.sum();
    // Its name goes first, so that an interrupted removal leaves no half of a model under it.
    let name = folder.root.file_name().unwrap_or_default();
    let hidden = format!(".removed-{}", name.to_string_lossy());
    let gone = folder.root.with_file_name(hidden);
    fs::rename(&folder.root, &gone).map_err(HubError::disk(&folder.root))?;
    fs::remove_dir_all(&gone).map_err(HubError::disk(&gone))?;
    match fs::remove_dir_all(folder.locks()) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(HubError::disk(folder.locks())(error))
        }
        _ => Ok(FreedSpace {
            snapshots_count,
            bytes,
        }),
    }
}

/// Whether a snapshot has all that serving needs: weights, and the model's text side or an
/// adapter's configuration.
pub(crate) fn is_complete(snapshot: &Path) -> bool {
    let has = |name: &str| snapshot.join(name).exists();
    if has(ADAPTER_CONFIG) && has(ADAPTER_WEIGHTS) {
        return true;
    }
    if !has(CONFIG) || !has(TOKENIZER) {
        return false;
    }
    if has(WEIGHTS) {
        return true;
    }
    let index = cleave_files::read_text(&snapshot.join(WEIGHTS_INDEX), INDEX_BYTES_MAX);
    let names = index.ok().and_then(|index| names_of_index(&index).ok());
    names.is_some_and(|names| !names.is_empty() && names.iter().all(|name| has(name)))
}

/// Names of the entries of a folder; a folder that does not exist has none.
fn names_in(folder: &Path) -> Result<Vec<String>, HubError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(HubError::disk(folder)(error)),
    };
    let names = entries.flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.collect())
}

fn snapshots(folder: &ModelFolder, name: &HubName) -> Result<Vec<CachedSnapshot>, HubError> {
    let mut revisions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    read_refs(&folder.refs(), "", 0, &mut revisions)?;
    let mut found = Vec::new();
    for commit in names_in(&folder.snapshots())? {
        if !is_commit(&commit) {
            continue;
        }
        let snapshot = folder.snapshot(&commit);
        let blobs = blobs_of(folder, &snapshot)?;
        found.push(CachedSnapshot {
            name: name.clone(),
            revisions: revisions.remove(&commit).unwrap_or_default(),
            bytes: blobs.values().map(|blob| blob.bytes).sum(),
            used: blobs.values().filter_map(|blob| blob.used).max(),
            is_complete: is_complete(&snapshot),
            folder: snapshot,
            commit,
        });
    }
    Ok(found)
}

/// The parts of a model's downloads; `None` if there are none.
fn cut_download(folder: &ModelFolder, name: HubName) -> Result<Option<CutDownload>, HubError> {
    let mut linked = BTreeMap::new();
    for commit in names_in(&folder.snapshots())? {
        linked.extend(blobs_of(folder, &folder.snapshot(&commit))?);
    }
    let blobs = folder.blobs();
    let has_snapshots = !names_in(&folder.snapshots())?.is_empty();
    // Beside snapshots, a whole blob that none of them has is no download.
    let is_part = |name: &String| !has_snapshots || name.ends_with(".incomplete");
    let names = names_in(&blobs)?.into_iter().filter(is_part);
    let paths = names.map(|name| blobs.join(name));
    let parts: Vec<fs::Metadata> = paths
        .filter(|path| !linked.contains_key(path))
        .filter_map(|path| fs::metadata(path).ok())
        .collect();
    Ok((!parts.is_empty()).then(|| CutDownload {
        name,
        bytes: parts.iter().map(fs::Metadata::len).sum(),
        written: parts.iter().filter_map(|part| part.modified().ok()).max(),
        folder: blobs,
    }))
}

/// Collects the revisions below a folder of `refs`, by commit.
fn read_refs(
    folder: &Path,
    prefix: &str,
    depth: usize,
    found: &mut BTreeMap<String, Vec<String>>,
) -> Result<(), HubError> {
    for name in names_in(folder)? {
        let path = folder.join(&name);
        let revision = format!("{prefix}{name}");
        if path.is_dir() {
            if depth < DEPTH_MAX {
                read_refs(&path, &format!("{revision}/"), depth + 1, found)?;
            }
        } else if let Ok(commit) = cleave_files::read_text(&path, 256) {
            let commits = found.entry(commit.trim().to_owned()).or_default();
            commits.push(revision);
            commits.sort();
        }
    }
    Ok(())
}

/// Blobs that a snapshot's links lead to, by path; links out of the model's blobs are not followed.
fn blobs_of(folder: &ModelFolder, snapshot: &Path) -> Result<BTreeMap<PathBuf, BlobUse>, HubError> {
    let mut found = BTreeMap::new();
    collect_blobs(folder, snapshot, 0, &mut found)?;
    Ok(found)
}

fn collect_blobs(
    folder: &ModelFolder,
    inside: &Path,
    depth: usize,
    found: &mut BTreeMap<PathBuf, BlobUse>,
) -> Result<(), HubError> {
    for name in names_in(inside)? {
        let path = inside.join(&name);
        let Ok(entry) = fs::symlink_metadata(&path) else {
            continue;
        };
        if entry.is_dir() {
            if depth < DEPTH_MAX {
                collect_blobs(folder, &path, depth + 1, found)?;
            }
            continue;
        }
        // A snapshot without links, as file systems without them get it, has its bytes itself.
        let blob = match fs::read_link(&path) {
            Ok(target) => folder.blobs().join(target.file_name().unwrap_or_default()),
            Err(_) => path,
        };
        if let Ok(file) = fs::metadata(&blob) {
            let used = file.accessed().ok();
            let bytes = file.len();
            found.insert(blob, BlobUse { bytes, used });
        }
    }
    Ok(())
}
