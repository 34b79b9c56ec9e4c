//! A gateway's requests to a picker's port, over real sockets.

#[path = "../../../../tests/harness/authority.rs"]
mod authority;

use super::proto::external_processor_client::ExternalProcessorClient;
use super::proto::processing_request::Request as Word;
use super::proto::processing_response::Response as Answer;
use super::proto::{HttpHeaders, ProcessingRequest};
use super::*;
use authority::TestAuthority;
use axum::routing::get;
use cleave_tls::CertificateFiles;
use cleave_tls::rustls::client::WebPkiServerVerifier;
use cleave_tls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use cleave_tls::rustls::crypto::ring;
use cleave_tls::rustls::pki_types::pem::PemObject;
use cleave_tls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use cleave_tls::rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsFault, RootCertStore, SignatureScheme,
};
use cleave_tls::tokio_rustls::TlsConnector;
use hyper_util::rt::TokioIo;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

const PATIENCE: Duration = Duration::from_secs(60);

/// The certificates that a gateway accepts.
#[derive(Clone, Copy)]
enum GatewayTrust<'a> {
    /// None: it connects in clear.
    Clear,
    /// Any certificate, as gateways do by default.
    AnyCertificate,
    /// Certificates of this authority.
    Authority(&'a TestAuthority),
}

/// Accepts every certificate, but only signatures by its key.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _shown: &CertificateDer<'_>,
        _chain: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, TlsFault> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsFault> {
        self.0.verify_tls12_signature(message, shown, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsFault> {
        self.0.verify_tls13_signature(message, shown, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

fn gateway_tls(trust: GatewayTrust<'_>) -> Option<TlsConnector> {
    let some = TestAuthority::new();
    let (authority, accepts_any) = match trust {
        GatewayTrust::Clear => return None,
        GatewayTrust::AnyCertificate => (&some, true),
        GatewayTrust::Authority(authority) => (authority, false),
    };
    let mut roots = RootCertStore::empty();
    let trusted = CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap();
    roots.add(trusted).unwrap();
    let provider = Arc::new(ring::default_provider());
    let verifier =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots.clone()), Arc::clone(&provider));
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let mut config = if accepts_any {
        config
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(
                verifier.build().unwrap(),
            )))
    } else {
        config.with_root_certificates(roots)
    }
    .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Some(TlsConnector::from(Arc::new(config)))
}

async fn dial(
    picker: SocketAddr,
    trust: GatewayTrust<'_>,
) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{picker}")).unwrap();
    let Some(tls) = gateway_tls(trust) else {
        return endpoint.connect().await;
    };
    let dial = service_fn(move |_: Uri| {
        let tls = tls.clone();
        async move {
            let stream = TcpStream::connect(picker).await?;
            let name = ServerName::try_from("picker.example").unwrap();
            let stream = tls.connect(name, stream).await?;
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    endpoint.connect_with_connector(dial).await
}

/// The endpoint for a request without a body, or the error.
async fn picked(picker: SocketAddr, trust: GatewayTrust<'_>) -> Result<String, String> {
    let channel = dial(picker, trust).await;
    let channel = channel.map_err(|error| format!("{error:?}"))?;
    let headers = HttpHeaders {
        end_of_stream: true,
        ..HttpHeaders::default()
    };
    let request = ProcessingRequest {
        request: Some(Word::RequestHeaders(headers)),
        ..ProcessingRequest::default()
    };
    let requests = tokio_stream::iter([request]);
    let answers = ExternalProcessorClient::new(channel)
        .process(requests)
        .await;
    let answers = answers.map_err(|status| status.message().to_owned())?;
    let answer = answers.into_inner().message().await.unwrap().unwrap();
    match answer.response.unwrap() {
        Answer::RequestHeaders(headers) => {
            let mutation = headers.response.unwrap().header_mutation.unwrap();
            let value = &mutation.set_headers[0].header.as_ref().unwrap().raw_value;
            Ok(String::from_utf8_lossy(value).into_owned())
        }
        other => Err(format!("{other:?}")),
    }
}

/// A router that is ready, as a picker sees it.
async fn router(telemetry: &Telemetry) -> HttpServer {
    let routes = Router::new()
        .route("/ready", get(async || "ready"))
        .route("/load", get(async || "{\"server_load\": 3}"));
    let listener = bind("127.0.0.1:0").await.unwrap();
    let (limits, series) = (HttpLimits::default(), telemetry.servers.clone());
    HttpServer::start(listener, PortRoutes::clear(routes), limits, series).unwrap()
}

/// A picker that knows one router, which is ready.
async fn picker(tls: ProxyTls, front: Option<ServerTls>) -> (Picker, HttpServer) {
    let telemetry = Telemetry::default();
    let router = router(&telemetry).await;
    let options = PickerOptions {
        listen: "127.0.0.1:0".into(),
        tls,
        // Requests would go to another port than polls.
        endpoints: vec![THERE.into()],
        admin_port: Some(router.address.port()),
    };
    let trust = RouterTls { front, peers: None };
    let picker = Picker::start(options, &telemetry, trust).await.unwrap();
    let ready = "cleave_picker_endpoints{state=\"ready\"} 1";
    let knows = async {
        while !telemetry.text().contains(ready) {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, knows).await.expect("it asks in time");
    (picker, router)
}

const THERE: &str = "127.0.0.1:9";

fn front(folder: &Path) -> ServerTls {
    ServerTls::open(&CertificateFiles {
        certificate: folder.join("tls.crt"),
        key: folder.join("tls.key"),
    })
    .unwrap()
}

#[tokio::test]
async fn a_picker_speaks_tls_with_the_current_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (TestAuthority::new(), TestAuthority::new());
    old.sign(folder.path(), "picker.example");
    let tls = front(folder.path());
    let follow = tokio::spawn(tls.clone().follow());
    let (picker, router) = picker(ProxyTls::Front, Some(tls)).await;
    let at = picker.address;
    assert_eq!(
        picked(at, GatewayTrust::Authority(&old)).await.unwrap(),
        THERE
    );
    assert_eq!(
        picked(at, GatewayTrust::AnyCertificate).await.unwrap(),
        THERE
    );
    let error = picked(at, GatewayTrust::Authority(&new)).await.unwrap_err();
    assert!(error.contains("InvalidCertificate"), "{error}");
    let error = picked(at, GatewayTrust::Clear).await.unwrap_err();
    assert!(error.contains("--ext-proc-tls off"), "{error}");
    // A new certificate takes effect soon, and the old one is no longer shown.
    new.sign(folder.path(), "picker.example");
    let changed = async { while picked(at, GatewayTrust::Authority(&new)).await.is_err() {} };
    timeout(PATIENCE, changed)
        .await
        .expect("it is seen in time");
    assert!(picked(at, GatewayTrust::Authority(&old)).await.is_err());
    follow.abort();
    picker.stop().await;
    router.stop().await;
}

#[tokio::test]
async fn a_picker_without_a_certificate_self_signs_one() {
    let folder = tempfile::tempdir().unwrap();
    let authority = TestAuthority::new();
    authority.sign(folder.path(), "picker.example");
    for (tls, front) in [
        (ProxyTls::Front, None),
        (ProxyTls::SelfSigned, None),
        (ProxyTls::SelfSigned, Some(front(folder.path()))),
    ] {
        let (picker, router) = picker(tls, front).await;
        let at = picker.address;
        assert_eq!(
            picked(at, GatewayTrust::AnyCertificate).await.unwrap(),
            THERE
        );
        assert!(
            picked(at, GatewayTrust::Authority(&authority))
                .await
                .is_err()
        );
        assert!(picked(at, GatewayTrust::Clear).await.is_err());
        picker.stop().await;
        router.stop().await;
    }
}

#[tokio::test]
async fn a_picker_with_tls_off_speaks_in_clear() {
    let folder = tempfile::tempdir().unwrap();
    TestAuthority::new().sign(folder.path(), "picker.example");
    let (picker, router) = picker(ProxyTls::Off, Some(front(folder.path()))).await;
    assert_eq!(
        picked(picker.address, GatewayTrust::Clear).await.unwrap(),
        THERE
    );
    assert!(
        picked(picker.address, GatewayTrust::AnyCertificate)
            .await
            .is_err()
    );
    picker.stop().await;
    router.stop().await;
}
