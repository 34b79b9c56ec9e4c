//! The TLS side of our HTTP servers.
//!
//! Owns: the certificate and key in force: from files, or generated here. Never: writes a key
//! anywhere.

use crate::watched_files::{FileContents, WatchedFiles};
use crate::{TlsError, pem, provider};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The files of a server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate in PEM, followed by the intermediate certificates.
    pub certificate: PathBuf,
    /// Its private key in PEM, without a passphrase.
    pub key: PathBuf,
}

/// A server's certificate in force. Clones share it. Clients are offered HTTP/2 and HTTP/1.1.
#[derive(Clone)]
pub struct ServerTls(CertificateSource);

#[derive(Clone)]
enum CertificateSource {
    Files(Arc<WatchedFiles<Arc<ServerConfig>>>),
    Memory(Arc<ServerConfig>),
}

impl ServerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// If a file cannot be read, or the files are no certificate with its key.
    pub fn open(files: &CertificateFiles) -> Result<Self, TlsError> {
        let CertificateFiles { certificate, key } = files.clone();
        let followed = WatchedFiles::open(vec![certificate, key], Box::new(read))?;
        Ok(Self(CertificateSource::Files(followed)))
    }

    /// Generates a key that lives as long as this process, and a self-signed certificate: for
    /// clients that want encryption without authenticating the server.
    ///
    /// # Errors
    /// If the system provides no randomness.
    pub fn self_signed() -> Result<(Self, CertificateDer<'static>), TlsError> {
        let made = generate_simple_self_signed(["cleave".to_owned(), "localhost".to_owned()]);
        let made = made.map_err(|error| TlsError::CannotGenerate(error.to_string()))?;
        let CertifiedKey { cert, signing_key } = made;
        let certificate = cert.der().clone();
        let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
        let config = config(vec![certificate.clone()], key);
        let config = config.map_err(|error| TlsError::CannotGenerate(error.to_string()))?;
        Ok((Self(CertificateSource::Memory(config)), certificate))
    }

    /// The configuration for a connection that begins now.
    pub fn config(&self) -> Arc<ServerConfig> {
        match &self.0 {
            CertificateSource::Files(followed) => Arc::clone(&followed.current()),
            CertificateSource::Memory(config) => Arc::clone(config),
        }
    }

    /// Watches the files while it is polled. Established connections keep their configuration.
    pub async fn follow(self) {
        match self.0 {
            CertificateSource::Files(followed) => followed.run().await,
            CertificateSource::Memory(_) => std::future::pending().await,
        }
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FrontTls(…)")
    }
}

fn read(files: &[FileContents]) -> Result<Arc<ServerConfig>, TlsError> {
    let [certificate, key] = files else {
        unreachable!("two files were asked for");
    };
    let (chain, secret) = (pem::certificates(certificate)?, pem::key(key)?);
    config(chain, secret).map_err(|error| {
        let reason = error.to_string();
        TlsError::KeyMismatch(certificate.path.clone(), key.path.clone(), reason)
    })
}

fn config(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions()?;
    let builder = builder.with_no_client_auth();
    let mut config = builder.with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};
    use std::path::Path;

    /// Checks the files for changes.
    fn look(tls: &ServerTls) -> Option<Result<(), TlsError>> {
        match &tls.0 {
            CertificateSource::Files(followed) => followed.check_files(),
            CertificateSource::Memory(_) => None,
        }
    }

    fn pair(folder: &Path) -> CertificateFiles {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let files = CertificateFiles {
            certificate: folder.join("tls.crt"),
            key: folder.join("tls.key"),
        };
        std::fs::write(&files.certificate, params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    }

    // Invariant: I46.
    #[test]
    fn a_bad_file_is_reported_once_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let files = pair(folder.path());
        let tls = ServerTls::open(&files).unwrap();
        assert!(look(&tls).is_none());
        let good = std::fs::read(&files.key).unwrap();
        for (path, text, expected) in [
            (&files.key, "", "there is none in it"),
            (&files.certificate, "no PEM", "is no certificate in PEM"),
            (
                &files.certificate,
                "-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----\n",
                "tls.crt",
            ),
        ] {
            let (first, before) = (tls.config(), std::fs::read(path).unwrap());
            std::fs::write(path, text).unwrap();
            let error = look(&tls).unwrap().unwrap_err().to_string();
            assert!(
                error.contains(expected) && error.contains(&*path.to_string_lossy()),
                "{error}"
            );
            assert!(look(&tls).is_none(), "told once");
            assert!(ServerTls::open(&files).is_err());
            assert!(Arc::ptr_eq(&first, &tls.config()));
            std::fs::write(path, before).unwrap();
            assert!(look(&tls).unwrap().is_ok());
        }
        let first = tls.config();
        // The key of another certificate.
        let other = tempfile::tempdir().unwrap();
        std::fs::copy(&pair(other.path()).key, &files.key).unwrap();
        let error = look(&tls).unwrap().unwrap_err().to_string();
        assert!(error.contains("cannot be used with the key"), "{error}");
        std::fs::remove_file(&files.key).unwrap();
        let error = look(&tls).unwrap().unwrap_err().to_string();
        assert!(error.contains("cannot read"), "{error}");
        assert!(look(&tls).is_none(), "told once");
        assert!(Arc::ptr_eq(&first, &tls.config()));
        std::fs::write(&files.key, good).unwrap();
        assert!(look(&tls).unwrap().is_ok());
        pair(folder.path());
        assert!(look(&tls).unwrap().is_ok());
        assert!(
            !Arc::ptr_eq(&first, &tls.config()),
            "the new one is in force"
        );
    }
}
