//! Blocks in a file that outlives the process.
//!
//! Owns: the file's layout, its lock, and which slot holds which content. Never trusts a byte that
//! it reads: contents are sealed, and the caller verifies the seal. Never touches a file that is
//! not its own.
//! Invariant: a slot holds one content or is free; a slot half-written by a crash has a seal that
//! does not match, and blocks of another model, version or block size are not found.
//!
//! The file: a head of [`HEAD_BYTES`], then slots of a head of [`SLOT_HEAD_BYTES`] and a block
//! each. All numbers are little-endian. The head has the magic number, the size of a block, the
//! checksum of the fleet's fingerprint and its own checksum; a slot's head has the content's hash,
//! the block's seal and its own checksum. Bytes are written before their slot's head.

use cleave_domain::{BlockHash, Fingerprint};
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use tracing::warn;

/// Names what the file is, with the version of its layout.
const MAGIC: &[u8; 16] = b"cleave kv tier 1";
/// A page, so that slots of whole pages stay aligned.
const HEAD_BYTES: usize = 4096;
const SLOT_HEAD_BYTES: usize = 64;
/// Slots that are examined to tell a damaged file from a foreign one.
const SLOTS_TRIED: u32 = 64;
/// Workers that share one folder at most: each has a file of its own.
const FILES_MAX: u32 = 256;

/// Errors that keep the worker from starting.
#[derive(Debug, thiserror::Error)]
pub enum SlabError {
    /// The folder or the file cannot be used.
    #[error("cannot use {path} for KV blocks: {error}")]
    Unusable { path: PathBuf, error: io::Error },
    /// Host memory has no room for a single block.
    #[error(
        "host memory for KV blocks ({host_bytes} bytes) has no room for one of {block_bytes} bytes"
    )]
    NoRoom {
        host_bytes: u64,
        /// The size of a block.
        block_bytes: u32,
    },
    /// Every file is in use by another process.
    #[error("all {FILES_MAX} files of KV blocks in {folder} are in use: name another folder")]
    AllInUse { folder: PathBuf },
}

/// The model and the block size that a file's blocks belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabFormat {
    /// The checksum of the fleet's fingerprint.
    fingerprint: u64,
    pub(crate) block_bytes: u32,
}

impl SlabFormat {
    pub(crate) fn new(fingerprint: &Fingerprint, block_bytes: u32) -> Self {
        Self {
            fingerprint: cleave_transfer::checksum(fingerprint.0.as_bytes()),
            block_bytes,
        }
    }

    /// The checksum of a block's bytes with their content hash and model.
    pub(crate) fn seal(&self, content: BlockHash, bytes: &[u8]) -> u64 {
        let mut sealed = [0; 32];
        sealed[..16].copy_from_slice(&content.0);
        sealed[16..24].copy_from_slice(&self.fingerprint.to_le_bytes());
        sealed[24..].copy_from_slice(&cleave_transfer::checksum(bytes).to_le_bytes());
        cleave_transfer::checksum(&sealed)
    }

    fn head(&self) -> Vec<u8> {
        let mut head = vec![0; HEAD_BYTES];
        head[..16].copy_from_slice(MAGIC);
        head[16..20].copy_from_slice(&self.block_bytes.to_le_bytes());
        head[24..32].copy_from_slice(&self.fingerprint.to_le_bytes());
        let sum = cleave_transfer::checksum(&head[..32]);
        head[32..40].copy_from_slice(&sum.to_le_bytes());
        head
    }
}

fn unusable(path: &Path) -> impl FnOnce(io::Error) -> SlabError + use<> {
    let path = path.to_owned();
    move |error| SlabError::Unusable { path, error }
}

fn make_folder(folder: &Path) -> Result<(), SlabError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(unusable(folder))
}

/// Checks that files of blocks can be created and filled in the folder, which is created if needed,
/// and that its first file can be read: long before a model is loaded. A file that another process
/// uses, and one that is damaged or foreign, are left to [`Slab::open`].
pub(crate) fn check_folder(folder: &Path) -> Result<(), SlabError> {
    make_folder(folder)?;
    write_and_sync(folder).map_err(unusable(folder))?;
    let path = slab_path(folder, 0);
    match cleave_files::open(&path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(unusable(&path)(error)),
    }
}

fn slab_path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("kv-{number}.cleave"))
}

/// Fills an unnamed file, so that processes that share the folder, even with equal process ids,
/// touch no file of each other, and a crash leaves none behind.
fn write_and_sync(folder: &Path) -> io::Result<()> {
    let file = tempfile::tempfile_in(folder)?;
    file.write_all_at(&[0; HEAD_BYTES], 0)?;
    // Some systems report a full disk only now.
    file.sync_all()
}

/// An open file of blocks, locked for this process.
#[derive(Debug)]
pub(crate) struct Slab {
    file: File,
    path: PathBuf,
    block_bytes: usize,
    slots_count: u32,
    /// Held by tests to make the disk hang.
    #[cfg(test)]
    pub(crate) test_pause: tokio::sync::Mutex<()>,
}

impl Slab {
    /// Locks the first file of the folder that no other process has, or creates one, of at most
    /// this size. A file that is none of blocks is left as it is, and the next one is taken: a
    /// cache never keeps a worker from starting. Gives also its contents, by slot.
    pub(crate) fn open(
        folder: &Path,
        format: SlabFormat,
        bytes_max: u64,
    ) -> Result<(Self, Vec<(u32, BlockHash)>), SlabError> {
        make_folder(folder)?;
        for number in 0..FILES_MAX {
            let path = slab_path(folder, number);
            // Keys and values reveal prompts: only the owner may read the file.
            let file = cleave_files::open_or_create(&path, 0o600).map_err(unusable(&path))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Error(error)) => return Err(unusable(&path)(error)),
            }
            let block_bytes = format.block_bytes as usize;
            let slot_bytes = (SLOT_HEAD_BYTES + block_bytes) as u64;
            let slots_count = bytes_max.saturating_sub(HEAD_BYTES as u64) / slot_bytes;
            let slab = Self {
                file,
                path: path.clone(),
                block_bytes,
                slots_count: u32::try_from(slots_count).unwrap_or(u32::MAX),
                #[cfg(test)]
                test_pause: tokio::sync::Mutex::default(),
            };
            match slab.read_or_reset(&format).map_err(unusable(&path))? {
                Some(found) => return Ok((slab, found)),
                None => warn!(
                    path = %path.display(),
                    "this is no file of KV blocks, or its head is torn: it is left as it is, and another file is used; \
                     remove it if it is of no use"
                ),
            }
        }
        let folder = folder.to_owned();
        Err(SlabError::AllInUse { folder })
    }

    /// Blocks that it can hold.
    pub(crate) fn slots_count(&self) -> u32 {
        self.slots_count
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the contents, or clears a file of another model or a damaged one. `None` for a file
    /// that Cleave may not have written.
    fn read_or_reset(&self, format: &SlabFormat) -> io::Result<Option<Vec<(u32, BlockHash)>>> {
        let mut head = Vec::new();
        let mut from = &self.file;
        from.by_ref()
            .take(HEAD_BYTES as u64)
            .read_to_end(&mut head)?;
        if head == format.head() {
            return self.contents().map(Some);
        }
        match head_state(&head) {
            SlabHeadState::Blank | SlabHeadState::Sound => {}
            SlabHeadState::Damaged => self.warn_of_damage(),
            SlabHeadState::Foreign if self.has_sound_slot() => self.warn_of_damage(),
            SlabHeadState::Foreign => return Ok(None),
        }
        self.clear(format).map(|()| Some(Vec::new()))
    }

    /// The file is a cache: nothing is lost but time.
    fn warn_of_damage(&self) {
        let path = self.path.display();
        warn!(%path, "the head of this file of KV blocks is damaged: its blocks are dropped and the file begins anew");
    }

    /// Whether one of the first slots has a head that only this code writes.
    fn has_sound_slot(&self) -> bool {
        (0..self.slots_count.min(SLOTS_TRIED)).any(|slot| {
            let mut head = [0; SLOT_HEAD_BYTES];
            let read = self.file.read_exact_at(&mut head, self.slot_offset(slot));
            read.is_ok() && parse_slot_head(&head).is_some()
        })
    }

    fn clear(&self, format: &SlabFormat) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(&format.head(), 0)?;
        self.file.sync_all()
    }

    /// Every content that a slot's head names; of two slots with one content the first.
    fn contents(&self) -> io::Result<Vec<(u32, BlockHash)>> {
        // The file may have been larger, or cut off in a write.
        self.file.set_len(
            self.file
                .metadata()?
                .len()
                .min(self.slot_offset(self.slots_count)),
        )?;
        let mut found = Vec::new();
        let mut contents = std::collections::HashSet::new();
        for slot in 0..self.slots_count {
            let mut head = [0; SLOT_HEAD_BYTES];
            match self.file.read_exact_at(&mut head, self.slot_offset(slot)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            if let Some((content, _)) = parse_slot_head(&head)
                && contents.insert(content)
            {
                found.push((slot, content));
            }
        }
        Ok(found)
    }

    /// Reads what a slot holds of a content; gives its seal. `None` if it holds another.
    pub(crate) fn read(
        &self,
        slot: u32,
        content: BlockHash,
        bytes: &mut [u8],
    ) -> io::Result<Option<u64>> {
        #[cfg(test)]
        drop(self.test_pause.blocking_lock());
        let mut head = [0; SLOT_HEAD_BYTES];
        self.file.read_exact_at(&mut head, self.slot_offset(slot))?;
        let Some((_, seal)) = parse_slot_head(&head).filter(|(named, _)| *named == content) else {
            return Ok(None);
        };
        let at = self.slot_offset(slot) + SLOT_HEAD_BYTES as u64;
        self.file.read_exact_at(bytes, at)?;
        Ok(Some(seal))
    }

    pub(crate) fn write(
        &self,
        slot: u32,
        content: BlockHash,
        bytes: &[u8],
        seal: u64,
    ) -> io::Result<()> {
        let at = self.slot_offset(slot);
        self.file.write_all_at(bytes, at + SLOT_HEAD_BYTES as u64)?;
        let mut head = [0; SLOT_HEAD_BYTES];
        head[..16].copy_from_slice(&content.0);
        head[16..24].copy_from_slice(&seal.to_le_bytes());
        let sum = cleave_transfer::checksum(&head[..24]);
        head[24..32].copy_from_slice(&sum.to_le_bytes());
        self.file.write_all_at(&head, at)
    }

    /// The offset of a slot in the file.
    fn slot_offset(&self, slot: u32) -> u64 {
        let slot_bytes = (SLOT_HEAD_BYTES + self.block_bytes) as u64;
        HEAD_BYTES as u64 + u64::from(slot) * slot_bytes
    }
}

/// The state of a file by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlabHeadState {
    /// It was made and never written to: empty, or all zeros after a crash.
    Blank,
    /// A whole head, of this or another model.
    Sound,
    /// A head of ours with bytes that changed, or cut off.
    Damaged,
    /// Not written by Cleave.
    Foreign,
}

fn head_state(head: &[u8]) -> SlabHeadState {
    let magic = head
        .iter()
        .zip(MAGIC)
        .filter(|(byte, expected)| byte == expected);
    let sums = head.len() == HEAD_BYTES && {
        let mut named = head[..32].to_vec();
        named[..16].copy_from_slice(MAGIC);
        cleave_transfer::checksum(&named).to_le_bytes() == head[32..40]
    };
    let is_short = !head.is_empty() && MAGIC.starts_with(head);
    if head.iter().all(|byte| *byte == 0) {
        SlabHeadState::Blank
    } else if sums && head.starts_with(MAGIC) {
        SlabHeadState::Sound
    } else if sums || is_short || magic.count() >= MAGIC.len() / 2 {
        SlabHeadState::Damaged
    } else {
        SlabHeadState::Foreign
    }
}

/// The content and the seal of a slot's head, if it is whole.
fn parse_slot_head(head: &[u8; SLOT_HEAD_BYTES]) -> Option<(BlockHash, u64)> {
    let number = |at: usize| {
        let bytes = head[at..at + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    };
    if number(24) != cleave_transfer::checksum(&head[..24]) {
        return None;
    }
    let mut content = BlockHash::default();
    content.0.copy_from_slice(&head[..16]);
    Some((content, number(16)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const BLOCK: usize = 100;

    /// A folder of its own that is gone with it.
    pub(crate) struct SlabFolder(pub(crate) PathBuf);

    impl SlabFolder {
        pub(crate) fn new(name: &str) -> Self {
            let name = format!("cleave-slab-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = std::fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for SlabFolder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn hash(of: u8) -> BlockHash {
        BlockHash([of; 16])
    }

    fn slab_format(fingerprint: &str) -> SlabFormat {
        SlabFormat::new(&Fingerprint(fingerprint.into()), BLOCK as u32)
    }

    fn open(folder: &SlabFolder, fingerprint: &str) -> (Slab, Vec<(u32, BlockHash)>) {
        // Room for three.
        let bytes = HEAD_BYTES + 3 * (SLOT_HEAD_BYTES + BLOCK) + 1;
        Slab::open(&folder.0, slab_format(fingerprint), bytes as u64).unwrap()
    }

    fn fill(slab: &Slab, slot: u32, of: u8) {
        let bytes = [of; BLOCK];
        let seal = slab_format("m").seal(hash(of), &bytes);
        slab.write(slot, hash(of), &bytes, seal).unwrap();
    }

    #[test]
    fn stored_blocks_are_found_only_by_the_same_model() {
        let folder = SlabFolder::new("next");
        let (slab, found) = open(&folder, "m");
        assert_eq!((slab.slots_count(), found.len()), (3, 0));
        fill(&slab, 0, 1);
        fill(&slab, 2, 3);
        // Two workers do not share a file.
        let (other, found) = open(&folder, "m");
        assert_ne!(slab.path(), other.path());
        assert_eq!(found, []);
        drop((slab, other));
        let (slab, found) = open(&folder, "m");
        assert_eq!(found, [(0, hash(1)), (2, hash(3))]);
        let mut bytes = [0; BLOCK];
        let seal = slab.read(2, hash(3), &mut bytes).unwrap();
        assert_eq!(seal, Some(slab_format("m").seal(hash(3), &[3; BLOCK])));
        assert_eq!(bytes, [3; BLOCK]);
        assert_eq!(slab.read(2, hash(1), &mut bytes).unwrap(), None);
        drop(slab);
        let (slab, found) = open(&folder, "another");
        assert_eq!(found, []);
        drop(slab);
        assert_eq!(open(&folder, "m").1, [], "and that removed it");
    }

    // Invariant: I49.
    #[test]
    fn a_half_written_slot_or_head_is_recognised() {
        let folder = SlabFolder::new("crash");
        let (slab, _) = open(&folder, "m");
        fill(&slab, 0, 1);
        fill(&slab, 1, 2);
        // The bytes of another content were written, its head was not.
        let at = slab.slot_offset(0) + SLOT_HEAD_BYTES as u64;
        slab.file.write_all_at(&[9; BLOCK / 2], at).unwrap();
        // Half of a head was written.
        slab.file
            .write_all_at(&[7; 8], slab.slot_offset(1))
            .unwrap();
        drop(slab);
        let (slab, found) = open(&folder, "m");
        assert_eq!(found, [(0, hash(1))]);
        let mut bytes = [0; BLOCK];
        let seal = slab.read(0, hash(1), &mut bytes).unwrap();
        assert_ne!(seal, Some(slab_format("m").seal(hash(1), &bytes)));
        // The file's own head is torn: nothing of it is used.
        slab.file.write_all_at(&[1; 8], 24).unwrap();
        drop(slab);
        assert_eq!(open(&folder, "m").1, []);
    }

    #[test]
    fn a_foreign_file_is_left_alone_and_another_is_used() {
        let folder = SlabFolder::new("stranger");
        std::fs::create_dir_all(&folder.0).unwrap();
        let path = folder.0.join("kv-0.cleave");
        // The second one is the torn head of an older layout, without a slot.
        for content in [b"my thesis".to_vec(), vec![0xff; 100]] {
            std::fs::write(&path, &content).unwrap();
            check_folder(&folder.0).unwrap();
            let (slab, found) = open(&folder, "m");
            assert_eq!(slab.path(), folder.0.join("kv-1.cleave"));
            if content.len() == 100 {
                assert_eq!(found, [(0, hash(1))], "the other file is found again");
            }
            fill(&slab, 0, 1);
            assert_eq!(std::fs::read(&path).unwrap(), content);
        }
    }

    #[test]
    fn a_damaged_head_drops_the_blocks_and_starts_anew() {
        // Bytes of the head's parts: one of the magic number, half of it, a size, and the sum.
        let damages: [(u64, &[u8]); 4] = [(0, &[0xff]), (4, &[7; 8]), (16, &[9]), (32, &[1; 8])];
        for (number, (at, bytes)) in damages.into_iter().enumerate() {
            let folder = SlabFolder::new(&format!("damaged-{number}"));
            let (slab, _) = open(&folder, "m");
            fill(&slab, 0, 1);
            slab.file.write_all_at(bytes, at).unwrap();
            drop(slab);
            let (slab, found) = open(&folder, "m");
            assert_eq!(found, [], "{at}");
            fill(&slab, 1, 2);
            drop(slab);
            assert_eq!(
                open(&folder, "m").1,
                [(1, hash(2))],
                "{at}: a sound file again"
            );
        }
    }

    #[test]
    fn a_file_with_a_damaged_head_is_recognized_by_its_slots() {
        let folder = SlabFolder::new("garbage");
        let (slab, _) = open(&folder, "m");
        fill(&slab, 2, 1);
        slab.file.write_all_at(&[0xa5; HEAD_BYTES], 0).unwrap();
        drop(slab);
        assert_eq!(open(&folder, "m").1, []);
        // Without a sound slot the file counts as foreign.
        let (slab, _) = open(&folder, "m");
        slab.file.write_all_at(&[0xa5; HEAD_BYTES], 0).unwrap();
        drop(slab);
        let (slab, _) = open(&folder, "m");
        assert_eq!(slab.path(), folder.0.join("kv-1.cleave"));
    }

    #[test]
    fn a_truncated_head_is_damaged_not_foreign() {
        let folder = SlabFolder::new("cut");
        let (slab, _) = open(&folder, "m");
        slab.file.set_len(9).unwrap();
        drop(slab);
        assert_eq!(open(&folder, "m").1, []);
    }

    #[test]
    fn an_unusable_folder_is_named_in_the_error() {
        let folder = SlabFolder::new("useless");
        check_folder(&folder.0).unwrap();
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
        let file = folder.0.join("file");
        std::fs::write(&file, "text").unwrap();
        for path in [file.clone(), file.join("below"), "/proc/cleave".into()] {
            let error = check_folder(&path).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn checking_a_folder_touches_no_other_file() {
        let folder = SlabFolder::new("shared");
        std::fs::create_dir_all(&folder.0).unwrap();
        // Left by a crash, or in use: containers often have the same process id.
        let stale = folder.0.join(format!(".cleave-{}", std::process::id()));
        std::fs::write(&stale, "of another process").unwrap();
        std::thread::scope(|threads| {
            let tries = [(); 8].map(|()| threads.spawn(|| check_folder(&folder.0)));
            for one in tries {
                one.join().unwrap().unwrap();
            }
        });
        assert_eq!(std::fs::read(&stale).unwrap(), b"of another process");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_whose_first_file_is_a_fifo_is_unusable() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = SlabFolder::new("not-ours");
        std::fs::create_dir_all(&folder.0).unwrap();
        let path = slab_path(&folder.0, 0);
        let reason = || check_folder(&folder.0).unwrap_err().to_string();
        let open = || Slab::open(&folder.0, slab_format("m"), 1 << 20).map(drop);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(reason().contains("a FIFO"), "{}", reason());
        assert!(open().unwrap_err().to_string().contains("a FIFO"));
        std::fs::remove_file(&path).unwrap();
        open().unwrap();
        check_folder(&folder.0).unwrap();
        // A head of garbage before a slot of ours is damage, which is no reason not to start.
        let slab = Slab::open(&folder.0, slab_format("m"), 1 << 20).unwrap().0;
        slab.write(0, hash(1), &[5; BLOCK], 1).unwrap();
        slab.file.write_all_at(&[0xa5; HEAD_BYTES], 0).unwrap();
        check_folder(&folder.0).unwrap();
    }

    // Lesson: 7.
    #[test]
    fn a_seal_depends_on_content_model_and_bytes() {
        let bytes = [5; BLOCK];
        let seal = slab_format("m").seal(hash(1), &bytes);
        assert_ne!(
            seal,
            slab_format("m").seal(hash(2), &bytes),
            "another tenant's"
        );
        assert_ne!(
            seal,
            slab_format("n").seal(hash(1), &bytes),
            "another model's"
        );
        assert_ne!(seal, slab_format("m").seal(hash(1), &[6; BLOCK]));
    }
}
