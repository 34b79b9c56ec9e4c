//! Models of a hub, by the Hugging Face protocol.
//!
//! Owns: names of models, the choice of the files that Cleave reads, the cache that it shares with
//! Python's tools, downloads. Never: opens a checkpoint. Invariant: a blob has its final name only
//! after its size and its checksum were compared with the hub's, and `config.json` is the last file
//! of a snapshot.
//!
//! Decisions take facts alone: `name.rs`, `settings.rs`, `listing.rs`, `selection.rs`, `retry.rs`.
//! I/O is in `cache.rs` and `cached.rs` (disk), `http.rs` (network), `fetch.rs` and `pull.rs`
//! (both).

mod cache;
mod cached;
mod digest;
mod error;
mod fetch;
mod http;
mod listing;
mod name;
mod proxy;
mod pull;
mod retry;
mod selection;
mod settings;

pub use cache::HubCache;
pub use cached::{CachedSnapshot, CutDownload, FreedSpace};
pub use error::HubError;
pub use name::{HubModel, HubName, HubRevision};
pub use proxy::{ProxySettings, ProxyVariable};
pub use pull::{Hub, PullCounts, PullObserver, PulledSnapshot};
pub use retry::RetryOptions;
pub use settings::{HubSettings, HubToken, NetworkUse};
