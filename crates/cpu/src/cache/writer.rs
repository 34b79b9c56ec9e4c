//! Writing a file of packed weights.
//!
//! Owns: the file while it is written, under a temporary name and with a lock on it.
//! Never: touches a complete file, except to replace it or to remove one that it supersedes.
//! Invariant: a file gets its final name when all of it is on disk; the next writer removes the
//! temporary files of all writers that died.

use super::layout::{PAGE, PackedEntry, PackedHeader};
use super::{PackedLocation, PackedStack, StackKey, checksum};
use crate::pack::LAYOUT;
use cleave_cpu_kernels::memory::bytes_of;
use std::fs::{self, File, TryLockError};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// Attempts to open and lock a file that others rename or remove in between.
const TRIES: usize = 8;

/// A file that is being written.
#[derive(Debug)]
pub(super) struct PackedWriter {
    file: File,
    part: PathBuf,
    threads: usize,
    entries: Vec<PackedEntry>,
    at: usize,
}

impl PackedWriter {
    /// `None` if another process is writing the same file.
    ///
    /// # Errors
    /// An error of the file system.
    pub(super) fn begin(place: &PackedLocation, threads: usize) -> io::Result<Option<Self>> {
        fs::create_dir_all(place.folder())?;
        let part = place.part_file();
        let Some(file) = open_locked(&part)? else {
            return Ok(None);
        };
        let mut writer = Self {
            file,
            part,
            threads,
            entries: Vec::new(),
            at: 0,
        };
        remove_abandoned_parts(place)?;
        writer.file.set_len(0)?;
        // Placeholder: the header is written last.
        writer.write(&[0; PAGE])?;
        Ok(Some(writer))
    }

    pub(super) fn put(&mut self, key: &StackKey, packed: &PackedStack) -> io::Result<()> {
        let words = bytes_of(&packed.words);
        let sides: &[u8] = packed.column_scales.as_deref().map_or(&[], bytes_of);
        let words_checksum = checksum(words, self.threads);
        let scales_checksum = XxHash3_64::oneshot(sides);
        let entry = PackedEntry::new(*key, packed, words_checksum, scales_checksum);
        self.write(words)?;
        self.write(sides)?;
        self.entries.push(entry);
        Ok(())
    }

    /// Completes the file and gives it its final name.
    pub(super) fn finish(mut self, place: &PackedLocation) -> io::Result<()> {
        let index_at = self.at;
        let index: Vec<u8> = self.entries.iter().flat_map(PackedEntry::write).collect();
        self.file.write_all(&index)?;
        let head = PackedHeader {
            layout: LAYOUT,
            stamp: place.stamp().0,
            form: PackedHeader::form(place.form()),
            bytes: (index_at + index.len()) as u64,
            index_at: index_at as u64,
            index_checksum: XxHash3_64::oneshot(&index),
        };
        self.file.rewind()?;
        self.file.write_all(&head.write())?;
        self.file.sync_all()?;
        fs::rename(&self.part, place.file())?;
        #[cfg(unix)]
        File::open(place.folder())?.sync_all()?;
        each_file(place.folder(), |path, name| {
            if place.is_superseded(name) {
                fs::remove_file(path)?;
            }
            Ok(())
        })
    }

    /// Writes bytes, and zeros to the end of a page.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.at += bytes.len();
        let end = self.at.next_multiple_of(PAGE);
        self.file.write_all(&[0; PAGE][..end - self.at])?;
        self.at = end;
        Ok(())
    }
}

impl Drop for PackedWriter {
    /// Removes an incomplete file; a complete one already has another name.
    fn drop(&mut self) {
        if is_file_at(&self.file, &self.part) {
            let _ = fs::remove_file(&self.part);
        }
    }
}

/// Opens or creates a file and locks it; `None` if another process has the lock.
fn open_locked(path: &Path) -> io::Result<Option<File>> {
    for _ in 0..TRIES {
        let file = cleave_files::open_or_create(path, 0o666)?;
        match file.try_lock() {
            // The lock's previous owner may have renamed the file meanwhile: then it is complete,
            // and must not be written.
            Ok(()) if is_file_at(&file, path) => return Ok(Some(file)),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(None)
}

/// Removes the temporary files of dead writers, whose locks are free.
fn remove_abandoned_parts(place: &PackedLocation) -> io::Result<()> {
    each_file(place.folder(), |path, name| {
        if !PackedLocation::is_part(name) || path == place.part_file() {
            return Ok(());
        }
        // Anything but a regular file was not written here, and stays.
        let Ok((file, _)) = cleave_files::open(path) else {
            return Ok(());
        };
        if file.try_lock().is_ok() && is_file_at(&file, path) {
            fs::remove_file(path)?;
        }
        Ok(())
    })
}

/// Calls `look` for every file of a folder. Errors are ignored: another process may remove a file
/// meanwhile, or another user may own it.
fn each_file(folder: &Path, look: impl Fn(&Path, &str) -> io::Result<()>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if let Some(name) = entry.file_name().to_str() {
            let _ = look(&entry.path(), name);
        }
    }
    Ok(())
}

/// Whether an open file is still the one at this path.
#[cfg(unix)]
fn is_file_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (open, named) = (file.metadata().map(place), fs::metadata(path).map(place));
    matches!((open, named), (Ok(open), Ok(named)) if open == named)
}

/// Other systems do not allow renaming or removing an open file.
#[cfg(not(unix))]
fn is_file_at(_: &File, path: &Path) -> bool {
    path.exists()
}
