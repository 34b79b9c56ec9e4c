//! TLS, from files.
//!
//! Owns: which certificates, keys and authorities are in force, and following their files while they
//! change. Never: listens, dials, or knows what is said over a connection. Invariant: what is in force
//! was whole and fitted together when it was read; a file that has something wrong changes nothing, and
//! is told with its path.
//!
//! Two kinds: [`FrontTls`], where clients see who the server is (or at least that nobody listens), and [`PeerTls`], where both ends show
//! that they are of one fleet. Our own clients of a front dial by [`connector`]. TLS 1.2 and 1.3, by rustls over ring, and no other implementation.

mod client;
mod follow;
mod front;
mod peer;
mod pem;
mod reason;

pub use client::{Connector, Stream, connector};
pub use front::{CertificateFiles, FrontTls};
pub use peer::{Line, PEER_NAME, PeerTls};
pub use reason::Explained;
pub use rustls;
pub use tokio_rustls;

use rustls::crypto::CryptoProvider;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why files are of no use.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// It cannot be read.
    #[error("cannot read {}: {}", .0.display(), .1)]
    Unreadable(PathBuf, io::Error),
    /// It has no certificate, or one that is damaged.
    #[error("{} is no certificate in PEM: {}", .0.display(), .1)]
    Certificate(PathBuf, String),
    /// It has no private key, or one that is damaged.
    #[error("{} is no private key in PEM: {}", .0.display(), .1)]
    Key(PathBuf, String),
    /// A client has nobody to trust.
    #[error("this system has no authorities that could vouch for a server ({}): name a file with --cacert", .0)]
    NoAuthorities(String),
    /// The one is not the other's.
    #[error("the certificate {} cannot be used with the key {}: {}", .0.display(), .1.display(), .2)]
    Pair(PathBuf, PathBuf, String),
    /// None can be made in place of one.
    #[error("cannot make a certificate: {}", .0)]
    Unmade(String),
}

/// The one implementation, chosen here for every user: whatever else is linked in is not asked.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
