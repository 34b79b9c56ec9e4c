//! How the processes of a fleet know each other.
//!
//! Owns: who is a peer: whoever shows a certificate of the fleet's authority that is for the name
//! [`PEER_NAME`]. Never: tells one peer from another. Invariant: neither end of a connection says or
//! hears anything before both have shown that.
//!
//! The name is the same for all, because workers come and go at addresses that no certificate could
//! name beforehand; and it is asked for at both ends, so that an authority may sign for others too.

use crate::follow::{Contents, Followed};
use crate::reason::explained;
use crate::{Connector, TlsError, pem, provider};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig, ServerConnection};
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{StartHandshake, TlsAcceptor, TlsConnector, client};

/// The DNS name that every peer's certificate is for.
pub const PEER_NAME: &str = "cleave-peer";

/// What two peers say to each other; no connection for the one is taken for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// Orders and reports, by gRPC over HTTP/2.
    Control,
    /// KV blocks.
    Data,
}

impl Line {
    fn alpn(self) -> Vec<u8> {
        match self {
            Self::Control => b"h2".to_vec(),
            Self::Data => b"cleave-kv".to_vec(),
        }
    }
}

/// A peer's certificate and whom it takes for peers, as they are now. Clones are the same.
#[derive(Clone)]
pub struct PeerTls(Arc<Followed<Ends>>);

/// Both ends of both lines.
struct Ends {
    servers: [Arc<ServerConfig>; 2],
    clients: [Arc<ClientConfig>; 2],
}

impl PeerTls {
    /// Reads `tls.crt`, `tls.key` and `ca.crt` of a folder, as Kubernetes mounts a TLS secret.
    ///
    /// # Errors
    /// If one cannot be read, or they do not fit together.
    pub fn open(folder: &Path) -> Result<Self, TlsError> {
        let paths = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
        Ok(Self(Followed::open(paths.to_vec(), Box::new(ends))?))
    }

    /// Follows the files for as long as it is polled. Connections that stand keep what they began with.
    pub async fn follow(self) {
        self.0.run().await;
    }

    /// Whether a connection that asks for this name wants to be a peer's.
    pub fn is_meant(name: Option<&str>) -> bool {
        name == Some(PEER_NAME)
    }

    /// Shows who this is to whoever dialled, who must show the same.
    ///
    /// # Errors
    /// If the other end is no peer, or breaks off.
    pub async fn accept<S>(&self, stream: S, line: Line) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.0.current().servers[line as usize]);
        let stream = TlsAcceptor::from(config).accept(stream).await?;
        check(stream.get_ref().1)?;
        Ok(stream)
    }

    /// As [`Self::accept`], for a connection whose first message was read already.
    ///
    /// # Errors
    /// As there.
    pub async fn take<S>(&self, start: StartHandshake<S>, line: Line) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.0.current().servers[line as usize]);
        let stream = start.into_stream(config).await?;
        check(stream.get_ref().1)?;
        Ok(stream)
    }

    /// Shows who this is to whom it dialled, who must show the same.
    ///
    /// # Errors
    /// If the other end is no peer, or breaks off.
    pub async fn connect<S>(&self, stream: S, line: Line) -> io::Result<client::TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.0.current().clients[line as usize]);
        let connector = TlsConnector::from(config);
        let connected = connector.connect(name(), stream).await;
        connected.map_err(explained)
    }

    /// Dials peers for a client of HTTP/2, at `https://` addresses: as [`Self::connect`] on the line of control, by the
    /// certificates of now.
    pub fn connector(&self, mut plain: HttpConnector) -> Connector {
        plain.enforce_http(false);
        let config = Arc::clone(&self.0.current().clients[Line::Control as usize]);
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

/// The authority has signed for whoever dialled, as was verified; and for a peer.
fn check(connection: &ServerConnection) -> io::Result<()> {
    let shown = connection.peer_certificates();
    let shown = shown.and_then(|chain| chain.first());
    let shown = shown.ok_or_else(|| io::Error::other("the other end showed no certificate"))?;
    is_peers(shown).map_err(|error| {
        io::Error::other(format!(
            "the other end's certificate is not for {PEER_NAME}: {error}"
        ))
    })
}

fn is_peers(certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
    verify_server_name(&ParsedCertificate::try_from(certificate)?, &name())
}

fn ends(files: &[Contents]) -> Result<Ends, TlsError> {
    let [certificate, key, authority] = files else {
        unreachable!("three files were asked for");
    };
    let chain = pem::certificates(certificate)?;
    let unfit = |error: rustls::Error| {
        let reason = format!("it is not for the DNS name {PEER_NAME}: {error}");
        TlsError::Certificate(certificate.path.clone(), reason)
    };
    is_peers(&chain[0]).map_err(unfit)?;
    let authorities = Arc::new(pem::authorities(authority)?);
    let make = |line: Line| {
        let secret = pem::key(key)?;
        let made = servers(&authorities, (chain.clone(), secret.clone_key()), line);
        let made = made.and_then(|server| {
            let client = clients(&authorities, (chain.clone(), secret), line)?;
            Ok((server, client))
        });
        made.map_err(|reason| TlsError::Pair(certificate.path.clone(), key.path.clone(), reason))
    };
    let (control, data) = (make(Line::Control)?, make(Line::Data)?);
    Ok(Ends {
        servers: [control.0, data.0],
        clients: [control.1, data.1],
    })
}

type Pair = (
    Vec<CertificateDer<'static>>,
    rustls::pki_types::PrivateKeyDer<'static>,
);

fn servers(
    authorities: &Arc<RootCertStore>,
    (chain, key): Pair,
    line: Line,
) -> Result<Arc<ServerConfig>, String> {
    let told = |error: rustls::Error| error.to_string();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(authorities), provider());
    let verifier = verifier.build().map_err(|error| error.to_string())?;
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(told)?;
    let builder = builder.with_client_cert_verifier(verifier);
    let mut config = builder.with_single_cert(chain, key).map_err(told)?;
    config.alpn_protocols = vec![line.alpn()];
    Ok(Arc::new(config))
}

fn clients(
    authorities: &Arc<RootCertStore>,
    (chain, key): Pair,
    line: Line,
) -> Result<Arc<ClientConfig>, String> {
    let told = |error: rustls::Error| error.to_string();
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(told)?;
    let builder = builder.with_root_certificates(Arc::clone(authorities));
    let mut config = builder.with_client_auth_cert(chain, key).map_err(told)?;
    config.alpn_protocols = vec![line.alpn()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    type Authority = CertifiedIssuer<'static, KeyPair>;

    fn authority() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    /// A folder with a certificate for `name` by `issuer`, which trusts `trusted`.
    fn folder(issuer: &Authority, trusted: &Authority, name: &str) -> TempDir {
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        folder_of(issuer, trusted, &params)
    }

    fn folder_of(issuer: &Authority, trusted: &Authority, params: &CertificateParams) -> TempDir {
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

    /// Whether a word from the one that dials reaches the one that accepts.
    async fn talk(from: (&PeerTls, Line), to: (&PeerTls, Line)) -> io::Result<()> {
        let (near, far) = duplex(1 << 16);
        let dials = async {
            let mut stream = from.0.connect(near, from.1).await?;
            stream.write_all(b"word").await?;
            stream.flush().await?;
            // Open until the other end has heard it.
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
    async fn only_peers_of_one_fleet_talk_and_only_on_one_line() {
        let (ours, theirs) = (authority(), authority());
        let open = |folder: &TempDir| PeerTls::open(folder.path());
        let peers = folder(&ours, &ours, PEER_NAME);
        let (one, other) = (open(&peers).unwrap(), open(&peers).unwrap());
        for line in [Line::Control, Line::Data] {
            talk((&one, line), (&other, line)).await.unwrap();
        }
        let crossed = talk((&one, Line::Control), (&other, Line::Data)).await;
        assert!(crossed.is_err(), "a line was taken for the other");
        // Of another authority, whichever end it is.
        let stranger = open(&folder(&theirs, &ours, PEER_NAME)).unwrap();
        let line = Line::Data;
        assert!(talk((&stranger, line), (&one, line)).await.is_err());
        assert!(talk((&one, line), (&stranger, line)).await.is_err());
        // Of the same authority, and no peer.
        let guest = folder(&ours, &ours, "guest.example");
        let told = open(&guest).unwrap_err().to_string();
        assert!(told.contains("not for the DNS name cleave-peer"), "{told}");
    }

    #[tokio::test]
    async fn a_certificate_of_the_authority_for_somebody_else_was_a_peers() {
        let ours = authority();
        let peer = PeerTls::open(folder(&ours, &ours, PEER_NAME).path()).unwrap();
        let guest = folder(&ours, &ours, "guest.example");
        let file = |name: &str| Contents {
            path: guest.path().join(name),
            bytes: std::fs::read(guest.path().join(name)).unwrap(),
        };
        let chain = pem::certificates(&file("tls.crt")).unwrap();
        let key = pem::key(&file("tls.key")).unwrap();
        let authorities = Arc::new(pem::authorities(&file("ca.crt")).unwrap());
        let config = clients(&authorities, (chain, key), Line::Data).unwrap();
        let (near, far) = duplex(1 << 16);
        let dials = TlsConnector::from(config).connect(name(), near);
        let (_dialled, accepted) = tokio::join!(dials, peer.accept(far, Line::Data));
        let told = accepted.unwrap_err().to_string();
        assert!(told.contains("not for cleave-peer"), "{told}");
    }

    #[tokio::test]
    async fn a_certificate_that_has_run_out_or_none_at_all_was_a_peers() {
        let ours = authority();
        let line = Line::Control;
        let peer = PeerTls::open(folder(&ours, &ours, PEER_NAME).path()).unwrap();
        let mut over = CertificateParams::new([PEER_NAME.to_owned()]).unwrap();
        over.not_after = rcgen::date_time_ymd(2001, 1, 1);
        let over = PeerTls::open(folder_of(&ours, &ours, &over).path()).unwrap();
        for (from, to) in [(&over, &peer), (&peer, &over)] {
            let told = talk((from, line), (to, line)).await.unwrap_err();
            assert!(told.to_string().contains("xpired"), "{told}");
        }
        // One that trusts the fleet's authority, and shows nothing.
        let pem = ours.pem();
        let mut roots = RootCertStore::empty();
        roots
            .add(
                pem::certificates(&Contents {
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
        config.alpn_protocols = vec![line.alpn()];
        let (near, far) = duplex(1 << 16);
        let dials = TlsConnector::from(Arc::new(config)).connect(name(), near);
        let (_dialled, accepted) = tokio::join!(dials, peer.accept(far, line));
        let told = accepted.unwrap_err().to_string();
        assert!(told.contains("no certificates"), "{told}");
    }

    #[tokio::test]
    async fn an_authority_that_was_changed_went_on_being_trusted() {
        let (old, new) = (authority(), authority());
        let folder_old = folder(&old, &old, PEER_NAME);
        let stays = PeerTls::open(folder(&old, &old, PEER_NAME).path()).unwrap();
        let changes = PeerTls::open(folder_old.path()).unwrap();
        let line = Line::Control;
        talk((&stays, line), (&changes, line)).await.unwrap();
        let folder_new = folder(&new, &new, PEER_NAME);
        for name in ["tls.crt", "tls.key", "ca.crt"] {
            std::fs::copy(folder_new.path().join(name), folder_old.path().join(name)).unwrap();
        }
        assert!(changes.0.look().unwrap().is_ok());
        assert!(talk((&stays, line), (&changes, line)).await.is_err());
        let renewed = PeerTls::open(folder_new.path()).unwrap();
        talk((&renewed, line), (&changes, line)).await.unwrap();
    }
}
