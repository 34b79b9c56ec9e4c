//! Writing a file of packed weights.
//!
//! Owns: the file while it is written, under a name of its own and with a lock on it.
//! Never: touches a file that has its last name, but to put another in its place or to remove what that replaces.
//! Invariant: a file gets its last name when all of it is on the disk; what is left of a writer that ended before is
//! removed by the next one, whoever's it was.

use super::layout::{Entry, Head, PAGE};
use super::{Packed, Place, Wanted, sum};
use crate::memory::bytes_of;
use crate::pack::LAYOUT;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// Times that a file may be renamed or removed between being opened and being locked.
const TRIES: usize = 8;

/// A file that is not whole.
#[derive(Debug)]
pub(super) struct Writer {
    file: File,
    part: PathBuf,
    threads: usize,
    entries: Vec<Entry>,
    /// Bytes written.
    at: usize,
}

impl Writer {
    /// `None` if another process is writing the same.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn begin(place: &Place, threads: usize) -> io::Result<Option<Self>> {
        fs::create_dir_all(place.folder())?;
        let part = place.part();
        let Some(file) = locked(&part)? else {
            return Ok(None);
        };
        let mut writer = Self {
            file,
            part,
            threads,
            entries: Vec::new(),
            at: 0,
        };
        sweep(place)?;
        writer.file.set_len(0)?;
        // The head comes last.
        writer.write(&[0; PAGE])?;
        Ok(Some(writer))
    }

    pub(super) fn put(&mut self, wanted: &Wanted, packed: &Packed) -> io::Result<()> {
        let words = bytes_of(&packed.words);
        let sides: Vec<u8> = match &packed.of_columns {
            None => Vec::new(),
            Some(columns) => [bytes_of(&columns.scales), bytes_of(&columns.starts)].concat(),
        };
        let sums = (sum(words, self.threads), XxHash3_64::oneshot(&sides));
        let entry = Entry::new(*wanted, packed, sums);
        self.write(words)?;
        self.write(&sides)?;
        self.entries.push(entry);
        Ok(())
    }

    /// Gives the file its last name.
    pub(super) fn finish(mut self, place: &Place) -> io::Result<()> {
        let index_at = self.at;
        let index: Vec<u8> = self.entries.iter().flat_map(Entry::write).collect();
        self.file.write_all(&index)?;
        let head = Head {
            layout: LAYOUT,
            stamp: place.stamp().0,
            form: Head::form(place.form()),
            bytes: (index_at + index.len()) as u64,
            index_at: index_at as u64,
            index_sum: XxHash3_64::oneshot(&index),
        };
        self.file.rewind()?;
        self.file.write_all(&head.write())?;
        self.file.sync_all()?;
        fs::rename(&self.part, place.file())?;
        #[cfg(unix)]
        File::open(place.folder())?.sync_all()?;
        each_file(place.folder(), |path, name| {
            if place.is_replaced(name) {
                fs::remove_file(path)?;
            }
            Ok(())
        })
    }

    /// Bytes, and zeros to the end of a page.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.at += bytes.len();
        let end = self.at.next_multiple_of(PAGE);
        self.file.write_all(&[0; PAGE][..end - self.at])?;
        self.at = end;
        Ok(())
    }
}

impl Drop for Writer {
    /// What is not whole goes; what is has another name by now.
    fn drop(&mut self) {
        if is_at(&self.file, &self.part) {
            let _ = fs::remove_file(&self.part);
        }
    }
}

/// Opens, or makes, a file that only one process at a time writes to; `None` if another one does.
fn locked(path: &Path) -> io::Result<Option<File>> {
    for _ in 0..TRIES {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        match file.try_lock() {
            // Who had it locked may have renamed it meanwhile: then it is whole, and nothing to write to.
            Ok(()) if is_at(&file, path) => return Ok(Some(file)),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(None)
}

/// Removes what writers of other files left that have ended.
fn sweep(place: &Place) -> io::Result<()> {
    each_file(place.folder(), |path, name| {
        if !Place::is_part(name) || path == place.part() {
            return Ok(());
        }
        let file = OpenOptions::new().write(true).open(path)?;
        if file.try_lock().is_ok() && is_at(&file, path) {
            fs::remove_file(path)?;
        }
        Ok(())
    })
}

/// Calls `look` for every file of a folder. One that another process removes meanwhile, or that is another user's, is
/// left alone.
fn each_file(folder: &Path, look: impl Fn(&Path, &str) -> io::Result<()>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if let Some(name) = entry.file_name().to_str() {
            let _ = look(&entry.path(), name);
        }
    }
    Ok(())
}

/// Whether an open file is the one that has this name.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (open, named) = (file.metadata().map(place), fs::metadata(path).map(place));
    matches!((open, named), (Ok(open), Ok(named)) if open == named)
}

/// Other systems let nobody rename or remove a file that is open.
#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}
