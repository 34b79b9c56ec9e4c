//! What a client of a front trusts.
//!
//! Owns: whose word for a server's name is taken: the authorities of a file, or else this system's. Never:
//! goes on with a server that nobody vouches for.

use crate::follow::read_one;
use crate::{TlsError, pem, provider};
use hyper::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use tokio::net::TcpStream;

/// Dials `http://` and `https://`.
pub type Connector = HttpsConnector<HttpConnector>;
/// What it dials.
pub type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Dials what `plain` does and, for an `https://` address, asks the server for a certificate by one of the
/// `authorities` (a file of certificates in PEM) or, without a file, of this system's (SSL_CERT_FILE and SSL_CERT_DIR
/// replace those).
///
/// # Errors
/// If they are needed, and cannot be read or are none.
pub fn connector(
    mut plain: HttpConnector,
    url: &Uri,
    authorities: Option<&Path>,
) -> Result<Connector, TlsError> {
    plain.enforce_http(false);
    let trusted = match (url.scheme_str(), authorities) {
        (Some("https"), Some(path)) => pem::authorities(&read_one(path)?)?,
        (Some("https"), None) => of_this_system()?,
        _ => RootCertStore::empty(),
    };
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder
        .with_safe_default_protocol_versions()
        .expect("the provider has both versions");
    let config = builder
        .with_root_certificates(trusted)
        .with_no_client_auth();
    Ok(HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .wrap_connector(plain))
}

/// Certificates there that are not understood are left out, as everybody does.
fn of_this_system() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    let (added, _) = store.add_parsable_certificates(found.certs);
    if added > 0 {
        return Ok(store);
    }
    let reasons: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
    Err(TlsError::NoAuthorities(match reasons.is_empty() {
        true => "there are none".to_owned(),
        false => reasons.join("; "),
    }))
}
