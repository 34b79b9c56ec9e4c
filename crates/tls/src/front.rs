//! What clients see.

use crate::follow::{Contents, Followed};
use crate::{TlsError, pem, provider};
use rustls::ServerConfig;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a server's certificate is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate in PEM, followed by those that lead to an authority.
    pub certificate: PathBuf,
    /// Its private key in PEM, without a passphrase.
    pub key: PathBuf,
}

/// A server's certificate, as it is now. Clones are the same one.
#[derive(Clone)]
pub struct FrontTls(Arc<Followed<Arc<ServerConfig>>>);

impl FrontTls {
    /// Reads the files. Clients are offered HTTP/2 and HTTP/1.1.
    ///
    /// # Errors
    /// If one cannot be read, or they are no certificate and its key.
    pub fn open(files: &CertificateFiles) -> Result<Self, TlsError> {
        let CertificateFiles { certificate, key } = files.clone();
        let followed = Followed::open(vec![certificate, key], Box::new(config))?;
        Ok(Self(followed))
    }

    /// For a connection that begins now.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.current())
    }

    /// Follows the files for as long as it is polled. Connections that stand keep what they began with.
    pub async fn follow(self) {
        self.0.run().await;
    }
}

impl fmt::Debug for FrontTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FrontTls(…)")
    }
}

fn config(files: &[Contents]) -> Result<Arc<ServerConfig>, TlsError> {
    let [certificate, key] = files else {
        unreachable!("two files were asked for");
    };
    let (chain, secret) = (pem::certificates(certificate)?, pem::key(key)?);
    let pair = |error: rustls::Error| {
        let reason = error.to_string();
        TlsError::Pair(certificate.path.clone(), key.path.clone(), reason)
    };
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(pair)?;
    let builder = builder.with_no_client_auth();
    let mut config = builder.with_single_cert(chain, secret).map_err(pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};
    use std::path::Path;

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

    #[test]
    fn a_bad_file_is_told_with_its_path_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let files = pair(folder.path());
        let tls = FrontTls::open(&files).unwrap();
        assert!(tls.0.look().is_none());
        let good = std::fs::read(&files.key).unwrap();
        for (path, text, says) in [
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
            let told = tls.0.look().unwrap().unwrap_err().to_string();
            assert!(
                told.contains(says) && told.contains(&*path.to_string_lossy()),
                "{told}"
            );
            assert!(tls.0.look().is_none(), "told once");
            assert!(FrontTls::open(&files).is_err());
            assert!(Arc::ptr_eq(&first, &tls.config()));
            std::fs::write(path, before).unwrap();
            assert!(tls.0.look().unwrap().is_ok());
        }
        let first = tls.config();
        // Somebody else's key.
        let other = tempfile::tempdir().unwrap();
        std::fs::copy(&pair(other.path()).key, &files.key).unwrap();
        let told = tls.0.look().unwrap().unwrap_err().to_string();
        assert!(told.contains("cannot be used with the key"), "{told}");
        std::fs::remove_file(&files.key).unwrap();
        let told = tls.0.look().unwrap().unwrap_err().to_string();
        assert!(told.contains("cannot read"), "{told}");
        assert!(tls.0.look().is_none(), "told once");
        assert!(Arc::ptr_eq(&first, &tls.config()));
        std::fs::write(&files.key, good).unwrap();
        assert!(tls.0.look().unwrap().is_ok());
        pair(folder.path());
        assert!(tls.0.look().unwrap().is_ok());
        assert!(
            !Arc::ptr_eq(&first, &tls.config()),
            "the new one is in force"
        );
    }
}
