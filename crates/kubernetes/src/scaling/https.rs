//! HTTPS for the external metrics API: API servers use nothing else.
//!
//! Owns: the handshakes. Never looks at requests. Invariant: a hanging handshake delays no other
//! one.

use axum::Router;
use axum::serve::Listener;
use cleave_server::ServerError;
use cleave_tls::ServerTls;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, error};

const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Handshakes under way at once; others wait to be accepted.
const HANDSHAKES_MAX: usize = 64;

/// The HTTPS server of the external metrics API.
#[derive(Debug)]
pub struct ExternalMetricsServer {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl ExternalMetricsServer {
    /// Serves with the certificate `shown`.
    pub fn start(
        listener: TcpListener,
        routes: Router,
        shown: ServerTls,
    ) -> Result<Self, ServerError> {
        let local = listener.local_addr();
        let address = local.map_err(|error| ServerError::Bind("the listener".into(), error))?;
        let (handshaken, ready) = mpsc::channel(HANDSHAKES_MAX);
        let handshakes = accept(listener, shown, handshaken);
        let task = tokio::spawn(async move {
            let served = axum::serve(HandshakenListener { address, ready }, routes);
            tokio::select! {
                () = handshakes => {}
                served = async { served.await } => {
                    if let Err(error) = served {
                        error!(%error, "the external metrics server ended");
                    }
                }
            }
        });
        Ok(Self { address, task })
    }
}

impl Drop for ExternalMetricsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type AcceptedTls = (TlsStream<TcpStream>, SocketAddr);

/// Each handshake is a task of its own.
async fn accept(listener: TcpListener, shown: ServerTls, handshaken: mpsc::Sender<AcceptedTls>) {
    let handshake_permits = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let Ok(permit) = Arc::clone(&handshake_permits).acquire_owned().await else {
            return;
        };
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                debug!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (acceptor, handshaken) = (TlsAcceptor::from(shown.config()), handshaken.clone());
        tokio::spawn(async move {
            let _permit = permit;
            match timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
                // A server that has stopped takes no connection.
                Ok(Ok(stream)) => drop(handshaken.send((stream, from)).await),
                Ok(Err(error)) => debug!(%from, %error, "a TLS handshake failed"),
                Err(_) => debug!(%from, "a TLS handshake took too long"),
            }
        });
    }
}

/// Connections whose handshake is over.
struct HandshakenListener {
    address: SocketAddr,
    ready: mpsc::Receiver<AcceptedTls>,
}

impl Listener for HandshakenListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(secure) => secure,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::external_metrics_routes;
    use crate::scaling::keda::tests::decided;
    use cleave_domain::ScalingMode;
    use cleave_fleet::{ScalingStatus, ScalingStatusReader};
    use cleave_server::bind;
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::watch;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::pki_types::CertificateDer;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    async fn get(
        secured: &ExternalMetricsServer,
        trusted: &CertificateDer<'static>,
        path: &str,
    ) -> (u16, serde_json::Value) {
        let mut roots = RootCertStore::empty();
        roots.add(trusted.clone()).expect("a certificate");
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(secured.address)
            .await
            .expect("it listens");
        let name = "localhost".try_into().expect("a name");
        let connector = TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect(name, stream).await.expect("a handshake");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream
            .write_all(request.as_bytes())
            .await
            .expect("it reads");
        let mut answer = Vec::new();
        // Some servers leave without a word; what came is whole.
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).expect("text");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        let body = serde_json::from_str(body).unwrap_or_default();
        (status.expect("a status"), body)
    }

    // Invariant: I43.
    #[tokio::test]
    async fn an_hpa_is_answered_as_an_api_server_expects() {
        let (status_sender, status_receiver) = watch::channel(ScalingStatus::Off.into());
        let routes = external_metrics_routes(ScalingStatusReader::new(status_receiver));
        let (own, trusted) = ServerTls::self_signed().expect("a certificate");
        let listener = bind("127.0.0.1:0").await.unwrap();
        let secured = ExternalMetricsServer::start(listener, routes, own);
        let secured = secured.expect("it starts");
        let group = "/apis/external.metrics.k8s.io/v1beta1";
        let (status, groups) = get(&secured, &trusted, "/apis").await;
        assert_eq!(
            (status, &groups["groups"][0]["name"]),
            (200, &"external.metrics.k8s.io".into())
        );
        let (status, resources) = get(&secured, &trusted, group).await;
        assert_eq!(
            (status, &resources["kind"]),
            (200, &"APIResourceList".into())
        );
        assert_eq!(resources["resources"][0]["name"], "cleave_workers_wanted");
        let metric =
            format!("{group}/namespaces/n/cleave_workers_wanted?labelSelector=pool%3Ddecode");
        let (status, unknown) = get(&secured, &trusted, &metric).await;
        assert_eq!(
            (status, &unknown["kind"]),
            (503, &"Status".into()),
            "never a number"
        );
        status_sender.send_replace(decided(ScalingMode::Act, 3).into());
        let (status, list) = get(&secured, &trusted, &metric).await;
        assert_eq!(
            (status, &list["kind"]),
            (200, &"ExternalMetricValueList".into())
        );
        let items = list["items"].as_array().expect("a list");
        assert_eq!(items.len(), 1);
        assert_eq!(items[0]["value"], "3");
        assert_eq!(items[0]["metricLabels"]["pool"], "decode");
        let stamp = items[0]["timestamp"].as_str().expect("a time");
        assert!(stamp.len() >= 20 && stamp.ends_with('Z'), "{stamp}");
        let (status, _) = get(
            &secured,
            &trusted,
            &format!("{group}/namespaces/n/requests"),
        )
        .await;
        assert_eq!(status, 404);
        for (from, to) in [("%3D", "%28"), ("/n/", "/%ff/")] {
            let (status, refused) = get(&secured, &trusted, &metric.replace(from, to)).await;
            assert_eq!((status, &refused["kind"]), (400, &"Status".into()), "{to}");
        }
    }
    #[tokio::test]
    async fn the_external_metrics_port_shows_the_client_certificate() {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let files = cleave_tls::CertificateFiles {
            certificate: folder.path().join("tls.crt"),
            key: folder.path().join("tls.key"),
        };
        std::fs::write(&files.certificate, cert.pem()).expect("a writable folder");
        std::fs::write(&files.key, signing_key.serialize_pem()).expect("a writable folder");
        let front = ServerTls::open(&files).expect("a certificate and its key");
        let (_status_sender, status) = watch::channel(ScalingStatus::Off.into());
        let routes = external_metrics_routes(ScalingStatusReader::new(status));
        let listener = bind("127.0.0.1:0").await.unwrap();
        let secured = ExternalMetricsServer::start(listener, routes, front);
        let secured = secured.expect("it starts");
        let (status, _) = get(&secured, cert.der(), "/apis").await;
        assert_eq!(status, 200);
    }
}
