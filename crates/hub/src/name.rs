//! Names of models on a hub: `org/name`, `org/name@revision`.

use std::fmt;
use std::str::FromStr;

/// Longest part of a name, as on Hugging Face.
const PART_BYTES_MAX: usize = 96;
const REVISION_BYTES_MAX: usize = 256;
/// The branch that a name without a revision means.
const REVISION_DEFAULT: &str = "main";
/// Beginning of a model's folder in the cache, and the separator of its parts.
const FOLDER_PREFIX: &str = "models";
const FOLDER_SEPARATOR: &str = "--";

/// A repository of a hub: `org/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HubName {
    org: String,
    name: String,
}

/// A branch, a tag, a reference such as `refs/pr/1`, or a commit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HubRevision(String);

/// A model of a hub, as a user names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HubModel {
    pub name: HubName,
    /// The hub's `main` if absent.
    pub revision: Option<HubRevision>,
}

impl HubName {
    /// Returns the name of the model's folder in the cache: `models--org--name`.
    pub(crate) fn folder(&self) -> String {
        [FOLDER_PREFIX, &self.org, &self.name].join(FOLDER_SEPARATOR)
    }

    /// Reads the name of a folder of the cache; folders of datasets and others have none.
    pub(crate) fn of_folder(folder: &str) -> Option<Self> {
        let rest = folder.strip_prefix(FOLDER_PREFIX)?;
        let (org, name) = rest
            .strip_prefix(FOLDER_SEPARATOR)?
            .split_once(FOLDER_SEPARATOR)?;
        format!("{org}/{name}").parse().ok()
    }
}

impl HubRevision {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl HubModel {
    /// Returns the revision, which is `main` if none was given.
    #[must_use]
    pub fn revision(&self) -> HubRevision {
        let given = self.revision.clone();
        given.unwrap_or_else(|| HubRevision(REVISION_DEFAULT.to_owned()))
    }
}

impl FromStr for HubName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (org, name) = text
            .split_once('/')
            .ok_or("a hub's model is named org/name, with one slash")?;
        for part in [org, name] {
            check_part(part)?;
        }
        Ok(Self {
            org: org.to_owned(),
            name: name.to_owned(),
        })
    }
}

/// Checks one of the two parts: letters, digits, `-`, `_` and `.`, as on Hugging Face. Neither `--`
/// nor `..` may be in it, so that the name of a folder has one reading.
fn check_part(part: &str) -> Result<(), String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let fault = if part.is_empty() {
        "an empty part"
    } else if part.len() > PART_BYTES_MAX {
        "a part longer than 96 bytes"
    } else if !part.chars().all(is_allowed) {
        "a character other than letters, digits, `-`, `_`, `.` and one slash"
    } else if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
        "`-` or `.` at the beginning or the end of a part"
    } else if part.contains("--") || part.contains("..") {
        "`--` or `..`"
    } else {
        return Ok(());
    };
    Err(format!(
        "a hub's model is named org/name; this name has {fault}"
    ))
}

impl FromStr for HubRevision {
    type Err = String;

    /// A revision is a path below `refs/` of the cache, so it is checked as one.
    fn from_str(text: &str) -> Result<Self, String> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.+/".contains(c);
        let parts_fit = text
            .split('/')
            .all(|part| !part.is_empty() && !part.starts_with('.') && !part.contains(".."));
        if text.len() <= REVISION_BYTES_MAX && text.chars().all(is_allowed) && parts_fit {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!(
                "`{text}` is no revision: give a branch, a tag or a commit"
            ))
        }
    }
}

impl FromStr for HubModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(name) = name_in_address(text) {
            return Err(format!(
                "a hub's model is named org/name: give {name} without the address before it; HF_ENDPOINT sets the hub"
            ));
        }
        let (name, revision) = match text.split_once('@') {
            Some((name, revision)) => (name, Some(revision.parse()?)),
            None => (text, None),
        };
        Ok(Self {
            name: name.parse()?,
            revision,
        })
    }
}

/// The model whose page on a hub this address is.
fn name_in_address(text: &str) -> Option<HubName> {
    let (_, rest) = text.split_once("://")?;
    let mut parts = rest.split('/').skip(1);
    let (org, name) = (parts.next()?, parts.next()?);
    format!("{org}/{name}").parse().ok()
}

impl fmt::Display for HubName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.org, self.name)
    }
}

impl fmt::Display for HubRevision {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.revision {
            Some(revision) => write!(out, "{}@{revision}", self.name),
            None => write!(out, "{}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_two_parts_and_perhaps_a_revision() {
        for good in ["Qwen/Qwen3-8B", "a/b@v1.0", "a/b@refs/pr/1", "a_1/b.c@abc"] {
            let model: HubModel = good.parse().unwrap();
            assert_eq!(model.to_string(), good);
        }
        let model: HubModel = "a/b".parse().unwrap();
        assert_eq!(model.revision().as_str(), "main");
        for bad in [
            "gpt2", "a/b/c", "/b", "a/", "./a", "../a", "a/..", "a--b/c", "a/b@", "a/b@..",
            "a/b@../x", "a/b@/x", "a/b@x//y", "a/b@.git", "a b/c", "~/m", "a/b@x\n", "",
        ] {
            assert!(bad.parse::<HubModel>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_address_of_a_page_leads_to_the_models_name() {
        for address in ["https://hub.example/a/b", "http://h:1/a/b/tree/main"] {
            let error = address.parse::<HubModel>().unwrap_err();
            assert!(error.contains("give a/b without"), "{error}");
        }
        let error = "https://hub.example".parse::<HubModel>().unwrap_err();
        assert!(error.contains("org/name"), "{error}");
    }

    #[test]
    fn a_folder_of_the_cache_names_its_model() {
        let name: HubName = "Qwen/Qwen3-0.6B".parse().unwrap();
        assert_eq!(name.folder(), "models--Qwen--Qwen3-0.6B");
        assert_eq!(HubName::of_folder(&name.folder()), Some(name));
        for other in [
            "datasets--a--b",
            "models--gpt2",
            ".locks",
            "models--a--b--c",
        ] {
            assert_eq!(HubName::of_folder(other), None, "{other}");
        }
    }
}
