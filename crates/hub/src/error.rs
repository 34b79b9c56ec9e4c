//! Reasons why a model of a hub cannot be had, each with the remedy.

use crate::name::{HubModel, HubName};
use std::path::{Path, PathBuf};

/// A model that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(
        "{model}: the hub {endpoint} has no such model, or does not show it to you: check the name; \
         for a private model set HF_TOKEN"
    )]
    NoModel { model: HubModel, endpoint: String },
    #[error("{model}: the hub {endpoint} has this model, but no such revision")]
    NoRevision { model: HubModel, endpoint: String },
    #[error(
        "{name}: this model is gated: accept its licence at {endpoint}/{name}, and set HF_TOKEN to a token \
         of that account"
    )]
    Gated { name: HubName, endpoint: String },
    #[error(
        "{name}: the hub {endpoint} refuses the token ({status}): set HF_TOKEN to one that may read this model"
    )]
    Refused {
        name: HubName,
        endpoint: String,
        status: u16,
    },
    #[error(
        "{model}: not in the cache {}, and HF_HUB_OFFLINE is set: unset it, or run `cleave pull {model}` \
         where the hub can be reached", .cache.display()
    )]
    Offline { model: HubModel, cache: PathBuf },
    #[error("{model}: not in the cache {}; `cleave list` shows what is in it", .cache.display())]
    NotCached { model: HubModel, cache: PathBuf },
    #[error("{model}: {reason}")]
    Unusable { model: HubModel, reason: String },
    #[error(
        "{}: {needed_bytes} bytes are needed, and {free_bytes} are free: make room, or set HF_HUB_CACHE \
         to a folder on a larger disk", .folder.display()
    )]
    NoRoom {
        folder: PathBuf,
        needed_bytes: u64,
        free_bytes: u64,
    },
    #[error(
        "{name}: {file} arrived twice with another checksum than the hub's ({expected}): try later, or \
         check the proxy between"
    )]
    Damaged {
        name: HubName,
        file: String,
        expected: String,
    },
    #[error("{url}: {reason}; tried {tries} times, and a later try goes on where this one ended")]
    Unreachable {
        url: String,
        reason: String,
        tries: u32,
    },
    #[error(
        "the hub {endpoint} cannot be reached: {reason} (tried {tries} times): {remedy}; with a model in the \
         cache, HF_HUB_OFFLINE=1 asks nobody"
    )]
    NoContact {
        endpoint: String,
        reason: String,
        tries: u32,
        remedy: String,
    },
    #[error(
        "{host}: the proxy of {variable} is of {scheme}://, and only those of http:// are used: change \
         {variable}, or name the host in NO_PROXY"
    )]
    Proxy {
        host: String,
        scheme: String,
        /// The variable that names the proxy.
        variable: String,
    },
    #[error("{url}: {reason}: this is no answer of a hub; check HF_ENDPOINT")]
    Answer { url: String, reason: String },
    #[error(
        "HF_ENDPOINT: `{endpoint}` is no address of a hub: give one with its scheme, such as https://huggingface.co"
    )]
    Endpoint { endpoint: String },
    #[error(
        "{}: {reason}; HF_HUB_CACHE, or HF_HOME, sets the folder of the cache", .path.display()
    )]
    Disk { path: PathBuf, reason: String },
}

impl HubError {
    /// Makes the error of a file operation.
    pub(crate) fn disk(path: &Path) -> impl Fn(std::io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::Disk {
            path: path.clone(),
            reason: error.to_string(),
        }
    }
}
