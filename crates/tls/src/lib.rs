//! TLS configurations from certificate files.
//!
//! Owns: the certificates, keys and authorities in force, and the watch of their files. Never:
//! listens, dials, or knows the contents of a connection. Invariant: the files in force were
//! complete and consistent when they were read; an invalid file changes nothing, and is reported
//! with its path.
//!
//! There are two kinds: [`ServerTls`], where clients authenticate the server (or at least get
//! encryption), and [`PeerTls`], where both ends prove that they belong to one fleet. Our own
//! clients of a server dial by [`connector`]. TLS 1.2 and 1.3, by rustls over ring, and no other
//! implementation.

mod client;
mod peer;
mod pem;
mod reason;
mod server;
mod watched_files;

pub use client::{HttpTlsConnector, HttpTlsStream, connector, connector_over};
pub use hyper_rustls::HttpsConnector;
pub use peer::{PEER_NAME, PeerProtocol, PeerTls};
pub use reason::ExplainedStream;
pub use rustls;
pub use server::{CertificateFiles, ServerTls};
pub use tokio_rustls;

use rustls::crypto::CryptoProvider;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// The reason for which files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("cannot read {}: {}", .0.display(), .1)]
    Unreadable(PathBuf, io::Error),
    /// The file has no certificate, or a damaged one.
    #[error("{} is no certificate in PEM: {}", .0.display(), .1)]
    Certificate(PathBuf, String),
    /// The file has no private key, or a damaged one.
    #[error("{} is no private key in PEM: {}", .0.display(), .1)]
    Key(PathBuf, String),
    /// A client has no trusted authorities.
    #[error("this system has no authorities that could vouch for a server ({}): name a file with --cacert", .0)]
    NoAuthorities(String),
    /// The key does not match the certificate.
    #[error("the certificate {} cannot be used with the key {}: {}", .0.display(), .1.display(), .2)]
    KeyMismatch(PathBuf, PathBuf, String),
    /// No self-signed certificate can be generated.
    #[error("cannot make a certificate: {}", .0)]
    CannotGenerate(String),
}

/// The crypto provider of every configuration, whatever other providers are linked in.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
