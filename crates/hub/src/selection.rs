//! The choice of files: only those that Cleave reads are downloaded.

use crate::listing::{RepoFile, RepoListing};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const WEIGHTS_INDEX: &str = "model.safetensors.index.json";
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Files of tokenizers beside `*.json`, by the end of their names.
const TOKENIZER_ENDS: [&str; 5] = [".jinja", ".model", ".tiktoken", "merges.txt", "vocab.txt"];
/// Folder of further chat templates.
const TEMPLATE_FOLDER: &str = "additional_chat_templates";

/// The weights of a repository, which decide its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WeightFiles {
    /// One file, of a model or of an adapter.
    One(&'static str),
    /// The files that this index names.
    Index(&'static str),
}

/// Finds the weights, by the rule of `checkpoint`: the single file goes before an index.
///
/// # Errors
/// A sentence that says which weights there are instead.
pub(crate) fn weight_files(listing: &RepoListing) -> Result<WeightFiles, String> {
    let names: BTreeSet<&str> = listing
        .files
        .iter()
        .map(|file| file.path.as_str())
        .collect();
    if names.contains(WEIGHTS) {
        return Ok(WeightFiles::One(WEIGHTS));
    }
    if names.contains(WEIGHTS_INDEX) {
        return Ok(WeightFiles::Index(WEIGHTS_INDEX));
    }
    if names.contains(ADAPTER_WEIGHTS) {
        return Ok(WeightFiles::One(ADAPTER_WEIGHTS));
    }
    let has = |ends: &[&str]| {
        let mut names = names.iter();
        names.any(|name| ends.iter().any(|end| name.ends_with(end)))
    };
    Err(if has(&[".gguf"]) {
        "has GGUF files only, and Cleave reads safetensors: look for the model that these were made from"
    } else if has(&[".bin", ".pt", ".pth"]) {
        "has PyTorch files only, and Cleave reads safetensors: look for a revision or a copy with them"
    } else if has(&[".safetensors"]) {
        "has neither model.safetensors nor model.safetensors.index.json; its other safetensors are no \
         weights of a language model in the layout of transformers"
    } else {
        "has no weights"
    }
    .to_owned())
}

/// Whether the file is small, and read beside the weights: `*.json`, the tokenizer's, templates.
fn is_description(path: &str) -> bool {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    // Folders of sentence-transformers' modules are numbered: `1_Pooling`.
    let is_module = folder.starts_with(|c: char| c.is_ascii_digit()) && !folder.contains('/');
    let is_read_folder = folder.is_empty() || is_module || folder == TEMPLATE_FOLDER;
    let ends_fit = name.ends_with(".json") || TOKENIZER_ENDS.iter().any(|end| name.ends_with(end));
    is_read_folder && ends_fit && !name.starts_with('.')
}

/// Chooses the files that are downloaded first: all but the weights.
pub(crate) fn descriptions(listing: &RepoListing) -> Vec<RepoFile> {
    let files = listing.files.iter();
    files
        .filter(|file| is_description(file.path.as_str()))
        .cloned()
        .collect()
}

/// Chooses these files by their names.
///
/// # Errors
/// A sentence that names the file which the repository lacks.
pub(crate) fn by_names(
    listing: &RepoListing,
    names: &BTreeSet<String>,
) -> Result<Vec<RepoFile>, String> {
    let file = |name: &String| {
        let found = listing.files.iter().find(|file| file.path.as_str() == name);
        found
            .cloned()
            .ok_or_else(|| format!("its index names {name}, which is not in the repository"))
    };
    names.iter().map(file).collect()
}

/// Reads the names of the weights' files from an index.
///
/// # Errors
/// A sentence, if the index is not one.
pub(crate) fn names_of_index(index: &str) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct IndexAnswer {
        weight_map: BTreeMap<String, String>,
    }
    let index: IndexAnswer =
        serde_json::from_str(index).map_err(|error| format!("{WEIGHTS_INDEX}: {error}"))?;
    Ok(index.weight_map.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listing::RepoPath;

    fn listing(names: &[&str]) -> RepoListing {
        let file = |name: &&str| RepoFile {
            path: RepoPath::parse(name).unwrap(),
            facts: None,
        };
        RepoListing {
            commit: String::new(),
            files: names.iter().map(file).collect(),
        }
    }

    #[test]
    fn only_files_that_are_read_are_chosen() {
        let chosen = [
            "config.json",
            "tokenizer.json",
            "tokenizer.model",
            "merges.txt",
            "chat_template.jinja",
            "additional_chat_templates/tool.jinja",
            "1_Pooling/config.json",
            "adapter_config.json",
        ];
        let left = [
            ".gitattributes",
            "README.md",
            "original/params.json",
            "original/tokenizer.model",
            "onnx/config.json",
            "consolidated.00.safetensors",
            "model-00001-of-00002.safetensors",
            "pytorch_model.bin",
            "image.png",
        ];
        let all: Vec<&str> = chosen.iter().chain(&left).copied().collect();
        let found = descriptions(&listing(&all));
        let found: Vec<_> = found.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(found, chosen);
    }

    #[test]
    fn weights_are_the_single_file_or_the_index() {
        let find = |names: &[&str]| weight_files(&listing(names));
        let shard = "model-00001-of-00002.safetensors";
        assert_eq!(
            find(&[WEIGHTS, WEIGHTS_INDEX, shard]),
            Ok(WeightFiles::One(WEIGHTS))
        );
        assert_eq!(
            find(&[WEIGHTS_INDEX, shard]),
            Ok(WeightFiles::Index(WEIGHTS_INDEX))
        );
        assert_eq!(
            find(&[ADAPTER_WEIGHTS]),
            Ok(WeightFiles::One(ADAPTER_WEIGHTS))
        );
        for (names, word) in [
            (["m-Q4_K_M.gguf", "config.json"], "GGUF"),
            (["pytorch_model.bin", "config.json"], "PyTorch"),
            (["consolidated.safetensors", "x"], "neither"),
            (["README.md", "config.json"], "no weights"),
        ] {
            let error = find(&names).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn an_index_names_files_that_must_be_there() {
        let names = names_of_index(r#"{"weight_map": {"a": "x", "b": "y", "c": "x"}}"#).unwrap();
        assert_eq!(
            by_names(&listing(&["x", "y", "z"]), &names).unwrap().len(),
            2
        );
        let error = by_names(&listing(&["x"]), &names).unwrap_err();
        assert!(error.contains("names y"), "{error}");
        assert!(names_of_index("{}").is_err());
    }
}
