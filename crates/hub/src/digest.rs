//! Checksums of blobs, which are their names in the cache, too.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::fmt;

/// The checksum that the hub gives for a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BlobHash {
    /// Of a large file: SHA-256 of its bytes.
    Sha256(String),
    /// Of another file: git's SHA-1 of `blob LENGTH\0` and its bytes.
    Git(String),
}

impl BlobHash {
    /// Reads a checksum in lower-case hexadecimal digits; its length says which one it is.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let is_hex = text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match text.len() {
            64 if is_hex => Some(Self::Sha256(text.to_owned())),
            40 if is_hex => Some(Self::Git(text.to_owned())),
            _ => None,
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        let (Self::Sha256(text) | Self::Git(text)) = self;
        text
    }

    /// Begins the computation for a file of this many bytes.
    pub(crate) fn hasher(&self, bytes: u64) -> BlobHasher {
        match self {
            Self::Sha256(_) => BlobHasher(Context::new(&SHA256)),
            Self::Git(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {bytes}\0").as_bytes());
                BlobHasher(context)
            }
        }
    }
}

impl fmt::Display for BlobHash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// The checksum of a file as its bytes arrive.
pub(crate) struct BlobHasher(Context);

impl BlobHasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn matches(self, hash: &BlobHash) -> bool {
        let found = self.0.finish();
        let digits: String = found
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        digits == hash.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(hash: &str, content: &[u8]) {
        let hash = BlobHash::parse(hash).unwrap();
        let mut hasher = hash.hasher(content.len() as u64);
        let (head, tail) = content.split_at(content.len() / 2);
        hasher.update(head);
        hasher.update(tail);
        assert!(hasher.matches(&hash));
        let mut other = hash.hasher(content.len() as u64);
        other.update(b"other bytes");
        assert!(!other.matches(&hash));
    }

    #[test]
    fn checksums_equal_those_of_git_and_sha256sum() {
        // printf 'hello\n' | git hash-object --stdin; printf 'hello\n' | sha256sum
        check("ce013625030ba8dba906f756967f9e9ca394464a", b"hello\n");
        check(
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
            b"hello\n",
        );
    }

    #[test]
    fn a_checksum_is_a_safe_file_name() {
        let upper = "CE013625030BA8DBA906F756967F9E9CA394464A";
        for bad in ["", "../x", upper, "ce01"] {
            assert_eq!(BlobHash::parse(bad), None, "{bad}");
        }
    }
}
