//! Certificates for tests: an authority of their own, and what it signs.
#![allow(dead_code, clippy::unwrap_used)]

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::Path;

/// Whoever signs.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// What clients trust it by.
    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes `tls.crt`, `tls.key` and `ca.crt` to `folder`: a certificate for `name` that this one
    /// signed.
    pub(crate) fn sign(&self, folder: &Path, name: &str) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        for (file, text) in [
            ("tls.crt", certificate.pem()),
            ("tls.key", key.serialize_pem()),
            ("ca.crt", self.pem()),
        ] {
            // As an orchestrator would: never half a file.
            let next = folder.join(format!("{file}.next"));
            std::fs::write(&next, text).unwrap();
            std::fs::rename(next, folder.join(file)).unwrap();
        }
    }
}
