//! The TLS side of our HTTP clients.
//!
//! Owns: the authorities that a client trusts: those of a file, or of this system. Never: continues
//! with an unverified server.

use crate::watched_files::read_one;
use crate::{TlsError, pem, provider};
use hyper::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use tokio::net::TcpStream;

/// Dials `http://` and `https://` addresses.
pub type HttpTlsConnector = HttpsConnector<HttpConnector>;
/// The stream that it dials.
pub type HttpTlsStream = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Wraps `plain` with TLS: for an `https://` address the server must have a certificate by one of
/// the `authorities` (a file of certificates in PEM) or, without a file, of this system
/// (SSL_CERT_FILE and SSL_CERT_DIR replace those).
///
/// # Errors
/// If authorities are needed, and cannot be read or there are none.
pub fn connector(
    mut plain: HttpConnector,
    url: &Uri,
    authorities: Option<&Path>,
) -> Result<HttpTlsConnector, TlsError> {
    plain.enforce_http(false);
    connector_over(plain, url, authorities)
}

/// Wraps any connector with TLS, as [`connector`]; it must take `https://` addresses.
///
/// # Errors
/// If authorities are needed, and cannot be read or there are none.
pub fn connector_over<C>(
    plain: C,
    url: &Uri,
    authorities: Option<&Path>,
) -> Result<HttpsConnector<C>, TlsError> {
    let trusted = match (url.scheme_str(), authorities) {
        (Some("https"), Some(path)) => pem::authorities(&read_one(path)?)?,
        (Some("https"), None) => system_authorities()?,
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

/// The authorities of this system; certificates that cannot be parsed are skipped, as usual.
fn system_authorities() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    let (added, _) = store.add_parsable_certificates(found.certs);
    if added > 0 {
        return Ok(store);
    }
    let reasons: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
    Err(TlsError::NoAuthorities(if reasons.is_empty() {
        "there are none".to_owned()
    } else {
        reasons.join("; ")
    }))
}
