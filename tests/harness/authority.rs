//! A certificate authority for tests.
#![allow(dead_code, clippy::unwrap_used)]

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::Path;

pub(crate) struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

impl TestAuthority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// The certificate that clients trust.
    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Signs a certificate for `name`, and writes `tls.crt`, `tls.key` and `ca.crt` to `folder`.
    pub(crate) fn sign(&self, folder: &Path, name: &str) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        for (file, text) in [
            ("tls.crt", certificate.pem()),
            ("tls.key", key.serialize_pem()),
            ("ca.crt", self.pem()),
        ] {
            // Files are replaced by renaming, as by an orchestrator, so that no half file is read.
            let next = folder.join(format!("{file}.next"));
            std::fs::write(&next, text).unwrap();
            std::fs::rename(next, folder.join(file)).unwrap();
        }
    }
}
