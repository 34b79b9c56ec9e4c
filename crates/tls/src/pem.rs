//! Reads certificates and keys from PEM files.

use crate::TlsError;
use crate::watched_files::FileContents;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// All certificates of a file, at least one.
pub(crate) fn certificates(file: &FileContents) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |reason: String| TlsError::Certificate(file.path.clone(), reason);
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&file.bytes).collect();
    match found {
        Ok(chain) if chain.is_empty() => Err(wrong("there is none in it".into())),
        Ok(chain) => Ok(chain),
        Err(error) => Err(wrong(error.to_string())),
    }
}

/// The first private key of a file.
pub(crate) fn key(file: &FileContents) -> Result<PrivateKeyDer<'static>, TlsError> {
    let wrong = |error: rustls::pki_types::pem::Error| {
        let reason = match error {
            rustls::pki_types::pem::Error::NoItemsFound => {
                "there is none in it, or it is encrypted".into()
            }
            other => other.to_string(),
        };
        TlsError::Key(file.path.clone(), reason)
    };
    PrivateKeyDer::from_pem_slice(&file.bytes).map_err(wrong)
}

/// All authorities of a file.
pub(crate) fn authorities(file: &FileContents) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(file)? {
        let wrong = |error: rustls::Error| {
            TlsError::Certificate(file.path.clone(), format!("not a valid authority: {error}"))
        };
        store.add(certificate).map_err(wrong)?;
    }
    Ok(store)
}
