//! The files of a revision, as the hub lists them.

use crate::digest::BlobHash;
use serde::Deserialize;
use std::fmt;

/// Longest path of a file.
const PATH_BYTES_MAX: usize = 1024;

/// A path inside a repository, which stays inside any folder that it is joined to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RepoPath(String);

/// Size and checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobFacts {
    pub(crate) hash: BlobHash,
    pub(crate) bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepoFile {
    pub(crate) path: RepoPath,
    /// Absent where the hub lists names alone; the file itself is asked then.
    pub(crate) facts: Option<BlobFacts>,
}

/// A commit and its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepoListing {
    pub(crate) commit: String,
    pub(crate) files: Vec<RepoFile>,
}

impl RepoPath {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let parts_fit = text
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..");
        let has_control = text.chars().any(|c| c.is_control() || c == '\\');
        if parts_fit && !has_control && text.len() <= PATH_BYTES_MAX {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!("the name {text:?} of a file leads out of a folder"))
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RepoPath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// Whether the text is a commit, and so a safe name of a folder.
pub(crate) fn is_commit(text: &str) -> bool {
    matches!(BlobHash::parse(text), Some(BlobHash::Git(_)))
}

/// The fields of `/api/models/…/revision/…?blobs=true` that are read.
#[derive(Deserialize)]
struct ModelAnswer {
    sha: String,
    siblings: Vec<SiblingAnswer>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SiblingAnswer {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LfsAnswer>,
}

#[derive(Deserialize)]
struct LfsAnswer {
    sha256: String,
    size: u64,
}

impl SiblingAnswer {
    fn facts(&self) -> Option<BlobFacts> {
        let (hash, bytes) = match &self.lfs {
            Some(lfs) => (&lfs.sha256, lfs.size),
            None => (self.blob_id.as_ref()?, self.size?),
        };
        let hash = BlobHash::parse(hash)?;
        Some(BlobFacts { hash, bytes })
    }
}

impl RepoListing {
    /// Reads the hub's answer.
    ///
    /// # Errors
    /// A sentence without a subject, if the answer is not a hub's, or a file's name is not safe.
    pub(crate) fn parse(answer: &[u8]) -> Result<Self, String> {
        let answer: ModelAnswer =
            serde_json::from_slice(answer).map_err(|error| error.to_string())?;
        if !is_commit(&answer.sha) {
            return Err(format!("{:?} is no commit", answer.sha));
        }
        let file = |sibling: &SiblingAnswer| {
            let path = RepoPath::parse(&sibling.rfilename)?;
            let facts = sibling.facts();
            Ok(RepoFile { path, facts })
        };
        Ok(Self {
            commit: answer.sha,
            files: answer
                .siblings
                .iter()
                .map(file)
                .collect::<Result<_, String>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const SHA: &str = "ce013625030ba8dba906f756967f9e9ca394464a";

    fn parse(name: &str) -> Result<RepoListing, String> {
        let answer = json!({"sha": SHA, "siblings": [{"rfilename": name}], "likes": 3});
        RepoListing::parse(answer.to_string().as_bytes())
    }

    #[test]
    fn names_of_files_stay_inside_their_folder() {
        for good in ["config.json", "1_Pooling/config.json", "a..b"] {
            assert_eq!(parse(good).unwrap().files[0].path.as_str(), good);
        }
        for bad in [
            "../x",
            "a/../b",
            "/etc/passwd",
            "",
            "a//b",
            "./a",
            "a\0",
            "..\\x",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn large_files_have_their_own_checksum() {
        let digest = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let answer = json!({"sha": SHA, "siblings": [
            {"rfilename": "a", "size": 5, "blobId": SHA},
            {"rfilename": "b", "size": 9, "blobId": SHA, "lfs": {"sha256": digest, "size": 9, "pointerSize": 1}},
            {"rfilename": "c"},
        ]});
        let listing = RepoListing::parse(answer.to_string().as_bytes()).unwrap();
        let facts = |hash: &str, bytes| BlobHash::parse(hash).map(|hash| BlobFacts { hash, bytes });
        let found: Vec<_> = listing.files.into_iter().map(|file| file.facts).collect();
        assert_eq!(found, [facts(SHA, 5), facts(digest, 9), None]);
    }

    #[test]
    fn a_commit_is_forty_digits() {
        for bad in ["main", "../x", ""] {
            let answer = json!({"sha": bad, "siblings": []}).to_string();
            assert!(RepoListing::parse(answer.as_bytes()).is_err(), "{bad}");
        }
    }
}
