//! Opens and reads files that a user names.
//!
//! Owns: opening, and creating, without blocking, the refusal of everything but regular files, and
//! a limit on the bytes read.
//! Never: knows the purpose of a file. Invariant: no call blocks on a writer, reads without end, or
//! takes more memory than its limit, whatever the path names: a FIFO, a device, a folder, a socket,
//! a file of any size.

use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// The error of the system, and one that names the kind of a file that is not regular.
pub fn open(path: &Path) -> io::Result<(File, Metadata)> {
    check_regular(&std::fs::metadata(path)?)?;
    open_regular(path, OpenOptions::new().read(true))
}

/// Opens a regular file for reading and writing, and creates it if it is missing, with `mode`
/// (permission bits, less those of the process's mask) where the system has one. The contents stay.
///
/// # Errors
/// As [`open`].
pub fn open_or_create(path: &Path, mode: u32) -> io::Result<File> {
    match std::fs::metadata(path) {
        Ok(metadata) => check_regular(&metadata)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _ = mode;
    open_regular(path, &mut options).map(|(file, _)| file)
}

/// Opens a file whose kind the caller has checked: opening a FIFO without a writer would block, and
/// some devices act when they are opened. The check after the open cannot be raced.
fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<(File, Metadata)> {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        options.custom_flags(flags.bits().cast_signed());
    }
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    check_regular(&metadata)?;
    Ok((file, metadata))
}

/// Reads a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// As [`open`], and one that names the limit.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let (mut file, _) = open(path)?;
    read_opened(&mut file, bytes_max)
}

/// Reads a file that [`open`] gave, from its beginning, as it is now.
///
/// # Errors
/// The error of the system, and one that names the limit.
pub fn read_opened(file: &mut File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let too_large = |bytes: &str| {
        let reason = format!("it has {bytes} bytes; at most {bytes_max} are allowed");
        Err(io::Error::new(io::ErrorKind::FileTooLarge, reason))
    };
    let len = file.metadata()?.len();
    if len > bytes_max {
        return too_large(&len.to_string());
    }
    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    // The file may grow while it is read, and some files report a length of 0.
    file.take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        too_large(&format!("more than {bytes_max}"))
    } else {
        Ok(bytes)
    }
}

/// Reads a text, as [`read`].
///
/// # Errors
/// As [`read`], and one for bytes that are not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let bytes = read(path, bytes_max)?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let reason = format!("it is not UTF-8, from byte {at} on");
        io::Error::new(io::ErrorKind::InvalidData, reason)
    })
}

fn check_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let reason = format!("it is {}, not a regular file", kind(metadata.file_type()));
    Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
}

#[cfg(unix)]
fn kind(kind: FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match kind {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "something else",
    }
}

#[cfg(not(unix))]
fn kind(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a folder"
    } else {
        "something else"
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType as Kind, Mode, mknodat};
    use std::os::unix::net::UnixListener;

    #[test]
    fn anything_but_a_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        mknodat(CWD, path("fifo"), Kind::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::os::unix::fs::symlink(path("fifo"), path("link")).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        for (path, is) in [
            (path("fifo"), "a FIFO"),
            (path("link"), "a FIFO"),
            (path("socket"), "a socket"),
            (folder.path().to_owned(), "a folder"),
            ("/dev/zero".into(), "a device"),
            ("/dev/tty".into(), "a device"),
        ] {
            for error in [
                open(&path).err(),
                read(&path, 1 << 20).err(),
                open_or_create(&path, 0o600).err(),
            ] {
                let error = error.expect("no regular file");
                let reason = error.to_string();
                assert!(reason.contains(is), "{}: {reason}", path.display());
            }
        }
        let missing = read(&path("missing"), 10).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_is_created_once_and_keeps_its_contents() {
        use std::io::Write;
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut made = open_or_create(&path, 0o600).unwrap();
        made.write_all(b"kept").unwrap();
        let again = open_or_create(&path, 0o644).unwrap();
        assert_eq!(
            again.metadata().unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(read_text(&path, 10).unwrap(), "kept");
    }

    #[test]
    fn a_file_over_the_limit_is_refused_with_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        let error = read(&path, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("1048576"), "{error}");
        // Files of the kernel have a length of 0 and nevertheless contents.
        assert!(read(Path::new("/proc/self/maps"), 10).is_err());
        assert!(
            !read(Path::new("/proc/self/stat"), 1 << 20)
                .unwrap()
                .is_empty()
        );
        std::fs::write(&path, b"0123456789").unwrap();
        assert_eq!(read_text(&path, 10).unwrap(), "0123456789");
        assert!(read(&path, 9).is_err());
        std::fs::write(&path, b"\xff").unwrap();
        assert!(read_text(&path, 10).is_err());
    }
}
