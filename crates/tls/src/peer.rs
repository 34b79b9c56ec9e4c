//! Mutual TLS between the processes of a fleet.
//!
//! Owns: the definition of a peer: a process with a certificate of the authority of the fleet, for
//! the name [`PEER_NAME`]. Never: distinguishes one peer from another. Invariant: neither end of a
//! connection sends or accepts data before both are authenticated.
//!
//! The name is the same for all peers, because workers come and go at addresses that no certificate
//! could name beforehand. Both ends check it, so that the authority may sign certificates for other
//! purposes, too.

use crate::reason::{explain, explain_connect_error};
use crate::watched_files::{FileContents, WatchedFiles};
use crate::{HttpTlsConnector, TlsError, pem, provider};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme,
};
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{StartHandshake, TlsAcceptor, TlsConnector, client};

/// The DNS name in the certificate of every peer.
pub const PEER_NAME: &str = "cleave-peer";

/// The protocol of a connection between peers; ALPN keeps the two apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerProtocol {
    /// Orders and reports, by gRPC over HTTP/2.
    Control,
    /// KV blocks between two workers.
    Data,
}

impl PeerProtocol {
    fn alpn(self) -> Vec<u8> {
        match self {
            Self::Control => b"h2".to_vec(),
            Self::Data => b"cleave-kv".to_vec(),
        }
    }
}

/// The certificate of a peer and the authorities that it trusts, as in force. Clones share them.
#[derive(Clone)]
pub struct PeerTls(Arc<WatchedFiles<PeerTlsConfigs>>);

/// The configurations of both ends, for both protocols.
struct PeerTlsConfigs {
    servers: [Arc<ServerConfig>; 2],
    clients: [Arc<ClientConfig>; 2],
}

impl PeerTls {
    /// Reads `tls.crt`, `tls.key` and `ca.crt` of a folder, as Kubernetes mounts a TLS secret.
    ///
    /// # Errors
    /// If a file cannot be read, or the files do not match.
    pub fn open(folder: &Path) -> Result<Self, TlsError> {
        let paths = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
        Ok(Self(WatchedFiles::open(
            paths.to_vec(),
            Box::new(peer_configs),
        )?))
    }

    /// Watches the files while it is polled. Established connections keep their configuration.
    pub async fn follow(self) {
        self.0.run().await;
    }

    /// Whether a connection that asks for this server name is meant to be a peer.
    pub fn is_peer_name(name: Option<&str>) -> bool {
        name == Some(PEER_NAME)
    }

    /// Accepts a connection: both ends authenticate.
    ///
    /// # Errors
    /// If the other end is no peer, or closes the connection.
    pub async fn accept<S>(&self, stream: S, protocol: PeerProtocol) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.0.current().servers[protocol as usize]);
        let stream = TlsAcceptor::from(config).accept(stream).await;
        stream.map_err(explain)
    }

    /// As [`Self::accept`], for a connection whose first message was already read.
    ///
    /// # Errors
    /// As [`Self::accept`].
    pub async fn accept_started<S>(
        &self,
        start: StartHandshake<S>,
        protocol: PeerProtocol,
    ) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.0.current().servers[protocol as usize]);
        let stream = start.into_stream(config).await;
        stream.map_err(explain)
    }

    /// Authenticates a connection that this end dialled: both ends authenticate.
    ///
    /// # Errors
    /// If the other end is no peer, or closes the connection.
    pub async fn connect<S>(
        &self,
        stream: S,
        protocol: PeerProtocol,
    ) -> io::Result<client::TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.0.current().clients[protocol as usize]);
        let connector = TlsConnector::from(config);
        let connected = connector.connect(name(), stream).await;
        connected.map_err(explain_connect_error)
    }

    /// Dials peers for a client of HTTP/2, at `https://` addresses: as [`Self::connect`] with the
    /// control protocol and the certificates in force now.
    pub fn connector(&self, mut plain: HttpConnector) -> HttpTlsConnector {
        plain.enforce_http(false);
        let config = Arc::clone(&self.0.current().clients[PeerProtocol::Control as usize]);
        let named = Arc::new(FixedServerNameResolver::new(name()));
        HttpsConnector::new(plain, config, true, named)
    }
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerTls(…)")
    }
}

impl PartialEq for PeerTls {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

fn name() -> ServerName<'static> {
    ServerName::try_from(PEER_NAME).expect("a DNS name")
}

fn check_peer_name(certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
    verify_server_name(&ParsedCertificate::try_from(certificate)?, &name())
}

/// Requires a certificate of the authority (as the inner verifier does) with the name of a peer.
/// The check is part of the handshake, so that the dialling end gets an alert.
#[derive(Debug)]
struct PeerVerifier(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for PeerVerifier {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.0.verify_client_cert(certificate, intermediates, now)?;
        check_peer_name(certificate)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

fn peer_configs(files: &[FileContents]) -> Result<PeerTlsConfigs, TlsError> {
    let [certificate, key, authority] = files else {
        unreachable!("three files were asked for");
    };
    let chain = pem::certificates(certificate)?;
    let unfit = |error: rustls::Error| {
        let reason = format!("it is not for the DNS name {PEER_NAME}: {error}");
        TlsError::Certificate(certificate.path.clone(), reason)
    };
    check_peer_name(&chain[0]).map_err(unfit)?;
    let authorities = Arc::new(pem::authorities(authority)?);
    let make = |protocol: PeerProtocol| {
        let secret = pem::key(key)?;
        let made = servers(&authorities, chain.clone(), secret.clone_key(), protocol);
        let made = made.and_then(|server| {
            let client = clients(&authorities, chain.clone(), secret, protocol)?;
            Ok((server, client))
        });
        made.map_err(|reason| {
            TlsError::KeyMismatch(certificate.path.clone(), key.path.clone(), reason)
        })
    };
    let (control, data) = (make(PeerProtocol::Control)?, make(PeerProtocol::Data)?);
    Ok(PeerTlsConfigs {
        servers: [control.0, data.0],
        clients: [control.1, data.1],
    })
}

fn servers(
    authorities: &Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    protocol: PeerProtocol,
) -> Result<Arc<ServerConfig>, String> {
    let error_text = |error: rustls::Error| error.to_string();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(authorities), provider());
    let verifier = verifier.build().map_err(|error| error.to_string())?;
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(error_text)?;
    let builder = builder.with_client_cert_verifier(Arc::new(PeerVerifier(verifier)));
    let mut config = builder.with_single_cert(chain, key).map_err(error_text)?;
    config.alpn_protocols = vec![protocol.alpn()];
    Ok(Arc::new(config))
}

fn clients(
    authorities: &Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    protocol: PeerProtocol,
) -> Result<Arc<ClientConfig>, String> {
    let error_text = |error: rustls::Error| error.to_string();
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(error_text)?;
    let builder = builder.with_root_certificates(Arc::clone(authorities));
    let mut config = builder
        .with_client_auth_cert(chain, key)
        .map_err(error_text)?;
    config.alpn_protocols = vec![protocol.alpn()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExplainedStream;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    type TestIssuer = CertifiedIssuer<'static, KeyPair>;

    fn authority() -> TestIssuer {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    /// A folder with a certificate for `name` by `issuer`; its authority file has `trusted`.
    fn folder(issuer: &TestIssuer, trusted: &TestIssuer, name: &str) -> TempDir {
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        folder_of(issuer, trusted, &params)
    }

    fn folder_of(issuer: &TestIssuer, trusted: &TestIssuer, params: &CertificateParams) -> TempDir {
        let key = KeyPair::generate().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| {
            std::fs::write(folder.path().join(name), text).unwrap();
        };
        write("tls.crt", params.signed_by(&key, issuer).unwrap().pem());
        write("tls.key", key.serialize_pem());
        write("ca.crt", trusted.pem());
        folder
    }

    /// Sends a word from the dialling end to the accepting one.
    async fn send_word(
        from: (&PeerTls, PeerProtocol),
        to: (&PeerTls, PeerProtocol),
    ) -> io::Result<()> {
        let (near, far) = duplex(1 << 16);
        let dials = async {
            let mut stream = from.0.connect(near, from.1).await?;
            stream.write_all(b"word").await?;
            stream.flush().await?;
            // The stream stays open until the other end has read the word.
            Ok(stream)
        };
        let accepts = async {
            let mut stream = to.0.accept(far, to.1).await?;
            let mut word = [0; 4];
            stream.read_exact(&mut word).await?;
            assert_eq!(&word, b"word");
            Ok(())
        };
        let (dialled, accepted) = tokio::join!(dials, accepts);
        accepted.and(dialled.map(drop))
    }

    #[tokio::test]
    async fn only_peers_of_one_fleet_connect_and_on_one_protocol() {
        let (fleet_authority, other_authority) = (authority(), authority());
        let open = |folder: &TempDir| PeerTls::open(folder.path());
        let peers = folder(&fleet_authority, &fleet_authority, PEER_NAME);
        let (one, other) = (open(&peers).unwrap(), open(&peers).unwrap());
        for protocol in [PeerProtocol::Control, PeerProtocol::Data] {
            send_word((&one, protocol), (&other, protocol))
                .await
                .unwrap();
        }
        let crossed = send_word((&one, PeerProtocol::Control), (&other, PeerProtocol::Data)).await;
        assert!(
            crossed.is_err(),
            "connections of two protocols must not match"
        );
        // A certificate of another authority, at either end.
        let stranger = open(&folder(&other_authority, &fleet_authority, PEER_NAME)).unwrap();
        let protocol = PeerProtocol::Data;
        assert!(
            send_word((&stranger, protocol), (&one, protocol))
                .await
                .is_err()
        );
        assert!(
            send_word((&one, protocol), (&stranger, protocol))
                .await
                .is_err()
        );
        // A certificate of the same authority for another name.
        let wrong_name = folder(&fleet_authority, &fleet_authority, "guest.example");
        let error = open(&wrong_name).unwrap_err().to_string();
        assert!(
            error.contains("not for the DNS name cleave-peer"),
            "{error}"
        );
    }

    /// The configurations of both ends, with a certificate of the authority for this name.
    fn stranger(issuer: &TestIssuer, name: &str) -> (Arc<ServerConfig>, Arc<ClientConfig>) {
        let folder = folder(issuer, issuer, name);
        let file = |name: &str| FileContents {
            path: folder.path().join(name),
            bytes: std::fs::read(folder.path().join(name)).unwrap(),
        };
        let chain = pem::certificates(&file("tls.crt")).unwrap();
        let key = || pem::key(&file("tls.key")).unwrap();
        let authorities = Arc::new(pem::authorities(&file("ca.crt")).unwrap());
        let server = servers(&authorities, chain.clone(), key(), PeerProtocol::Data).unwrap();
        let client = clients(&authorities, chain, key(), PeerProtocol::Data).unwrap();
        (server, client)
    }

    #[tokio::test]
    async fn a_certificate_for_another_name_is_explained_at_both_ends() {
        let issuer = authority();
        let peer = PeerTls::open(folder(&issuer, &issuer, PEER_NAME).path()).unwrap();
        let (server, client) = stranger(&issuer, "guest.example");
        // The other process dials: its side of the handshake is complete when it is refused.
        let (near, far) = duplex(1 << 16);
        let dials = async {
            let stream = TlsConnector::from(client).connect(name(), near).await?;
            ExplainedStream(stream).read_u8().await
        };
        let (dialled, accepted) = tokio::join!(dials, peer.accept(far, PeerProtocol::Data));
        let error = accepted.unwrap_err().to_string();
        assert!(
            error.contains("is not for cleave-peer") && error.contains("guest.example"),
            "{error}"
        );
        let error = dialled.unwrap_err().to_string();
        assert!(
            error.contains("BadCertificate") && error.contains("for the name cleave-peer"),
            "{error}"
        );
        // The other process is dialled.
        let (near, far) = duplex(1 << 16);
        let accepts = TlsAcceptor::from(server).accept(far);
        let (dialled, _accepted) = tokio::join!(peer.connect(near, PeerProtocol::Data), accepts);
        let error = dialled.unwrap_err().to_string();
        assert!(
            error.contains("is not for cleave-peer") && error.contains("guest.example"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn an_expired_or_missing_certificate_is_refused() {
        let issuer = authority();
        let protocol = PeerProtocol::Control;
        let peer = PeerTls::open(folder(&issuer, &issuer, PEER_NAME).path()).unwrap();
        let mut over = CertificateParams::new([PEER_NAME.to_owned()]).unwrap();
        over.not_after = rcgen::date_time_ymd(2001, 1, 1);
        let over = PeerTls::open(folder_of(&issuer, &issuer, &over).path()).unwrap();
        for (from, to) in [(&over, &peer), (&peer, &over)] {
            let error = send_word((from, protocol), (to, protocol))
                .await
                .unwrap_err();
            assert!(error.to_string().contains("xpired"), "{error}");
        }
        // A client that trusts the authority of the fleet, without a certificate.
        let pem = issuer.pem();
        let mut roots = RootCertStore::empty();
        roots
            .add(
                pem::certificates(&FileContents {
                    path: "ca.crt".into(),
                    bytes: pem.into_bytes(),
                })
                .unwrap()
                .remove(0),
            )
            .unwrap();
        let config = ClientConfig::builder_with_provider(provider());
        let config = config.with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![protocol.alpn()];
        let (near, far) = duplex(1 << 16);
        let dials = TlsConnector::from(Arc::new(config)).connect(name(), near);
        let (_dialled, accepted) = tokio::join!(dials, peer.accept(far, protocol));
        let error = accepted.unwrap_err().to_string();
        assert!(error.contains("no certificates"), "{error}");
    }

    #[tokio::test]
    async fn a_replaced_authority_is_no_longer_trusted() {
        let (old, new) = (authority(), authority());
        let folder_old = folder(&old, &old, PEER_NAME);
        let unchanged = PeerTls::open(folder(&old, &old, PEER_NAME).path()).unwrap();
        let reloaded = PeerTls::open(folder_old.path()).unwrap();
        let protocol = PeerProtocol::Control;
        send_word((&unchanged, protocol), (&reloaded, protocol))
            .await
            .unwrap();
        let folder_new = folder(&new, &new, PEER_NAME);
        for name in ["tls.crt", "tls.key", "ca.crt"] {
            std::fs::copy(folder_new.path().join(name), folder_old.path().join(name)).unwrap();
        }
        assert!(reloaded.0.check_files().unwrap().is_ok());
        assert!(
            send_word((&unchanged, protocol), (&reloaded, protocol))
                .await
                .is_err()
        );
        let renewed = PeerTls::open(folder_new.path()).unwrap();
        send_word((&renewed, protocol), (&reloaded, protocol))
            .await
            .unwrap();
    }
}
