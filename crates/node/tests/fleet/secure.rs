//! Access: clients by TLS and key, workers by certificate.

use crate::authority::TestAuthority;
use crate::fleet::hash_chain::{HashChainEngine, StepGate};
use crate::fleet::{
    TEST_WAIT_MAX, check, exchange, files, http, metric, prompt, router_with, until, worker_node,
};
use cleave_domain::Role;
use cleave_kubernetes::{PickerOptions, ProxyTls};
use cleave_node::{FleetModel, FleetNode, RouterNode, RouterOptions, RunningFleet};
use cleave_policy::PolicyFile;
use cleave_tls::rustls::pki_types::pem::PemObject;
use cleave_tls::rustls::pki_types::{CertificateDer, ServerName};
use cleave_tls::rustls::{ClientConfig, RootCertStore};
use cleave_tls::tokio_rustls::TlsConnector;
use cleave_tls::{CertificateFiles, PEER_NAME};
use cleave_worker::WorkerOptions;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

async fn serve(options: RouterOptions) -> RunningFleet {
    let worker = |role: Role| {
        let engine: Box<dyn cleave_engine::Engine> =
            Box::new(HashChainEngine::new(&StepGate::new()));
        (WorkerOptions::new(role.to_string(), role), engine)
    };
    let serve = FleetNode {
        listen: "127.0.0.1:0".into(),
        router: options,
        models: vec![FleetModel {
            workers: [Role::Prefill, Role::Decode].map(worker).into(),
            files: files(),
        }],
    };
    let running = serve.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    running
}

fn certificate(folder: &Path) -> CertificateFiles {
    CertificateFiles {
        certificate: folder.join("tls.crt"),
        key: folder.join("tls.key"),
    }
}

/// The answer to a client that trusts `authority` and speaks one of these protocols.
async fn https(address: &str, authority: &TestAuthority, alpn: &str) -> io::Result<String> {
    let mut roots = RootCertStore::empty();
    let pem = authority.pem();
    roots
        .add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
        .unwrap();
    let ring = cleave_tls::rustls::crypto::ring::default_provider();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name, stream).await?;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(alpn.as_bytes()));
    if alpn == "h2" {
        return Ok(String::new());
    }
    let request = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

// Invariant: I46.
#[tokio::test]
async fn clients_see_the_current_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (TestAuthority::new(), TestAuthority::new());
    old.sign(folder.path(), "localhost");
    let running = serve(RouterOptions {
        certificate: Some(certificate(folder.path())),
        ..RouterOptions::default()
    })
    .await;
    let address = running.address().to_string();
    let answer = https(&address, &old, "http/1.1").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    https(&address, &old, "h2").await.unwrap();
    assert!(https(&address, &new, "http/1.1").await.is_err());
    // In clear the answer names HTTPS and nothing else.
    let clear = http(&address, "/version").await;
    assert!(
        clear.starts_with("HTTP/1.1 400") && clear.contains("HTTPS"),
        "{clear}"
    );
    // A file that is none changes nothing; another one is in force soon.
    std::fs::write(folder.path().join("tls.key"), "no key").unwrap();
    assert!(https(&address, &old, "http/1.1").await.is_ok());
    new.sign(folder.path(), "localhost");
    let changed = async { while https(&address, &new, "http/1.1").await.is_err() {} };
    timeout(TEST_WAIT_MAX, changed)
        .await
        .expect("it is seen in time");
    assert!(https(&address, &old, "http/1.1").await.is_err());
    running.drain(TEST_WAIT_MAX).await;
}

/// A TCP proxy that keeps the bytes that pass it.
async fn tapped_wire(target: std::net::SocketAddr, listener: TcpListener) -> Arc<Mutex<Vec<u8>>> {
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&recorded);
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let (mut reads, mut back) = near.into_split();
            let far = TcpStream::connect(target).await.unwrap();
            let (mut answers, mut writes) = far.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut answers, &mut back).await });
            let keep = Arc::clone(&keep);
            tokio::spawn(async move {
                let mut some = vec![0; 1 << 16];
                while let Ok(count @ 1..) = reads.read(&mut some).await {
                    keep.lock().unwrap().extend(&some[..count]);
                    if writes.write_all(&some[..count]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    recorded
}

#[tokio::test]
async fn workers_join_and_hand_over_only_by_certificate() {
    let (fleet_authority, other_authority) = (TestAuthority::new(), TestAuthority::new());
    let folders = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let [router_folder, prefill_folder, decode_folder, foreign_folder] = &folders;
    for folder in [router_folder, prefill_folder, decode_folder] {
        fleet_authority.sign(folder.path(), PEER_NAME);
    }
    other_authority.sign(foreign_folder.path(), PEER_NAME);
    let router = router_with(RouterOptions {
        peer_tls: Some(router_folder.path().to_owned()),
        ..RouterOptions::default()
    })
    .await;
    let address = router.address().to_string();
    // Foreign workers first: one without a certificate, one with another fleet's.
    let strangers = [None, Some(foreign_folder.path().to_owned())].map(|folder| {
        let name = format!("stranger-{}", folder.is_some());
        let mut node = worker_node(&name, Role::Both, &address, &StepGate::new());
        node.options.peer_tls = folder;
        node
    });
    let mut turned_away = Vec::new();
    for node in strangers {
        turned_away.push(node.start().await.unwrap());
    }
    // Where there is another address of this machine's own, nobody else's worker dials there who
    // once knew the port as a peer's.
    let tap = match TcpListener::bind("127.0.0.2:0").await {
        Ok(tap) => tap,
        Err(_) => TcpListener::bind("127.0.0.1:0").await.unwrap(),
    };
    let mut decode = worker_node("d0", Role::Decode, &address, &StepGate::new());
    decode.options.peer_tls = Some(decode_folder.path().to_owned());
    decode.data_address = Some(tap.local_addr().unwrap().to_string());
    let decode = decode.start().await.unwrap();
    let wire_bytes = tapped_wire(decode.data_address(), tap).await;
    let mut prefill = worker_node("p0", Role::Prefill, &address, &StepGate::new());
    prefill.options.peer_tls = Some(prefill_folder.path().to_owned());
    let prefill = prefill.start().await.unwrap();
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    for salt in 0..3 {
        check(&router.frontend(), &prompt(salt, 40), 9).await;
    }
    let wire = wire_bytes.lock().unwrap().clone();
    assert_eq!(wire[0], 0x16, "a handshake of TLS");
    assert!(!wire.windows(4).any(|four| four == b"CLVK"), "in clear");
    let text = router.frontend().metrics();
    let refused = "cleave_connections_let_go_total{reason=\"no_peer\"} 0";
    assert!(!text.contains(refused), "{text}");
    // Clients are no peers, and need not be.
    let workers = http(&address, "/admin/workers").await;
    assert!(
        workers.contains("d0") && !workers.contains("stranger"),
        "{workers}"
    );
    for worker in turned_away {
        worker.stop().await;
    }
    router.drain(TEST_WAIT_MAX).await;
    prefill.stop().await;
    decode.stop().await;
}

#[tokio::test]
async fn a_picker_trusts_only_routers_of_its_fleet() {
    let (fleet_authority, other_authority) = (TestAuthority::new(), TestAuthority::new());
    let folders = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let [front, picker_folder, near_folder, far_folder] = &folders;
    fleet_authority.sign(front.path(), "llm.example");
    for (authority, folder) in [
        (&TestAuthority::new(), picker_folder),
        (&fleet_authority, near_folder),
        (&other_authority, far_folder),
    ] {
        authority.sign(folder.path(), PEER_NAME);
    }
    let options = |folder: &Path| RouterOptions {
        certificate: Some(certificate(front.path())),
        peer_tls: Some(folder.to_owned()),
        ..RouterOptions::default()
    };
    // Two that are ready, each of another fleet.
    let near = router_with(options(near_folder.path())).await;
    let far = router_with(RouterOptions {
        admin_listen: Some("127.0.0.1:0".into()),
        ..options(far_folder.path())
    })
    .await;
    let mut workers = Vec::new();
    for (router, folder) in [(&near, near_folder), (&far, far_folder)] {
        let address = router.address().to_string();
        let mut node = worker_node("w", Role::Both, &address, &StepGate::new());
        node.options.peer_tls = Some(folder.path().to_owned());
        workers.push(node.start().await.unwrap());
        timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    }
    // Every port of a router answers those whom it knows.
    let endpoints = [near.address(), far.admin_address().unwrap()];
    let picker = RouterNode {
        listen: "127.0.0.1:0".into(),
        options: options(picker_folder.path()),
        picker: Some(PickerOptions {
            listen: "127.0.0.1:0".into(),
            tls: ProxyTls::Front,
            endpoints: endpoints.map(|address| address.to_string()).into(),
            admin_port: None,
        }),
    };
    let picker = picker.start().await.unwrap();
    let frontend = picker.frontend();
    let endpoints_count =
        |state: &str| metric(&frontend.metrics(), "cleave_picker_endpoints", state);
    until(|| endpoints_count("away") == 2.0).await;
    // The picker becomes one of the first's fleet, and then the second does.
    fleet_authority.sign(picker_folder.path(), PEER_NAME);
    until(|| endpoints_count("ready") == 1.0).await;
    assert_eq!(endpoints_count("away"), 1.0, "a stranger was believed");
    fleet_authority.sign(far_folder.path(), PEER_NAME);
    until(|| endpoints_count("ready") == 2.0).await;
    for worker in workers {
        worker.stop().await;
    }
    for router in [picker, near, far] {
        router.drain(TEST_WAIT_MAX).await;
    }
}

#[tokio::test]
async fn operators_have_a_port_of_their_own() {
    let running = serve(RouterOptions {
        admin_listen: Some("127.0.0.1:0".into()),
        ..RouterOptions::default()
    })
    .await;
    let front = running.address().to_string();
    let admin = running.admin_address().unwrap().to_string();
    for (address, path, status) in [
        (&front, "/admin/workers", 404),
        (&admin, "/admin/workers", 200),
        (&front, "/v1/models", 200),
        (&admin, "/v1/models", 404),
        (&front, "/metrics", 200),
        (&admin, "/metrics", 200),
        (&admin, "/health", 200),
        (&admin, "/ready", 200),
    ] {
        let answer = http(address, path).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{path} {answer}"
        );
    }
    // It leaves: that is reported, and nothing else changes.
    running.set_not_ready();
    for address in [&front, &admin] {
        assert!(http(address, "/ready").await.starts_with("HTTP/1.1 503"));
    }
    check(&running.frontend(), &prompt(3, 20), 4).await;
    assert!(complete(&front, "", 1).await.starts_with("HTTP/1.1 200"));
    running.drain(TEST_WAIT_MAX).await;
}

/// A completion of a prompt of 60 tokens, with this key.
async fn complete(address: &str, key: &str, salt: usize) -> String {
    let prompt: Vec<usize> = (0..60).map(|index| 70 + (index * salt) % 50).collect();
    let body = format!("{{\"prompt\": {prompt:?}, \"max_tokens\": 2, \"ignore_eos\": true}}");
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer \
         {key}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    exchange(address, request).await
}

/// Prompt tokens that were found in a cache.
async fn cached(address: &str, key: &str, salt: usize) -> u32 {
    let answer = complete(address, key, salt).await;
    let (_, rest) = answer
        .split_once("\"cached_tokens\":")
        .unwrap_or_else(|| panic!("{answer}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

// Invariant: I10.
// Lesson: 7.
#[tokio::test]
async fn cached_tokens_reveal_nothing_of_other_tenants() {
    let policy = |shared: bool| {
        let text = format!(
            "classes:\n- name: a\ntrust: {{shared_prefixes: {shared}}}\ntenants:\n\
             - name: acme\n  api_key_sha256: [7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed]\n\
             - name: blue\n  api_key_sha256: [3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3]\n"
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.yaml");
        std::fs::write(&path, text).unwrap();
        RouterOptions {
            policy: Some(PolicyFile::open(&path).unwrap()),
            ..RouterOptions::default()
        }
    };
    let running = serve(policy(false)).await;
    let address = running.address().to_string();
    let ask = async |key: &str, salt| cached(&address, key, salt).await;
    // Each tenant sees the cached prefix that it would see alone.
    assert_eq!(ask("one", 7).await, 0);
    assert_eq!(ask("two", 7).await, 0, "not the other's");
    assert_eq!(ask("nobody's", 7).await, 0, "not a tenant's");
    for key in ["one", "two", "nobody's"] {
        assert!(ask(key, 7).await > 0, "{key}: its own");
    }
    running.drain(TEST_WAIT_MAX).await;
    let running = serve(policy(true)).await;
    let address = running.address().to_string();
    assert_eq!(cached(&address, "one", 7).await, 0);
    assert!(
        cached(&address, "two", 7).await > 0,
        "where that is allowed"
    );
    running.drain(TEST_WAIT_MAX).await;
}

/// The log of this thread, a line for each event.
#[derive(Clone, Debug, Default)]
pub(crate) struct CapturedLog(Arc<Mutex<Vec<String>>>);

impl CapturedLog {
    pub(crate) fn has(&self, words: &[&str]) -> bool {
        let lines = self.0.lock().unwrap();
        let fits = |line: &String| words.iter().all(|word| line.contains(word));
        lines.iter().any(fits)
    }
}

impl tracing::Subscriber for CapturedLog {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        let target = metadata.target();
        target.starts_with("cleave") || target == "access"
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct CapturedLine(String);
        impl tracing::field::Visit for CapturedLine {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut line = CapturedLine(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test]
async fn a_refused_worker_logs_the_reason() {
    let logged = CapturedLog::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let (fleet_authority, other_authority) = (TestAuthority::new(), TestAuthority::new());
    let folders = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let [router_folder, own, foreign, trusting] = &folders;
    fleet_authority.sign(router_folder.path(), PEER_NAME);
    fleet_authority.sign(own.path(), PEER_NAME);
    other_authority.sign(foreign.path(), PEER_NAME);
    // It knows the router by its authority, and shows a certificate of another.
    other_authority.sign(trusting.path(), PEER_NAME);
    std::fs::write(trusting.path().join("ca.crt"), fleet_authority.pem()).unwrap();
    let secure = router_with(RouterOptions {
        peer_tls: Some(router_folder.path().to_owned()),
        ..RouterOptions::default()
    })
    .await;
    let plain = router_with(RouterOptions::default()).await;
    let (secure_at, plain_at) = (secure.address().to_string(), plain.address().to_string());
    let cases: [(&str, &str, Option<&Path>, &[&str]); 4] = [
        ("in-clear", &secure_at, None, &["mutual TLS", "--peer-tls"]),
        (
            "foreign",
            &secure_at,
            Some(foreign.path()),
            &["other end is refused here", "authority"],
        ),
        (
            "refused",
            &secure_at,
            Some(trusting.path()),
            &["refuses the certificate of this one"],
        ),
        (
            "secure",
            &plain_at,
            Some(own.path()),
            &["other end", "TLS", "--peer-tls"],
        ),
    ];
    for (name, address, folder, words) in cases {
        println!("{name}");
        let mut node = worker_node(name, Role::Both, address, &StepGate::new());
        node.options.peer_tls = folder.map(Path::to_owned);
        let worker = node.start().await.unwrap();
        until(|| logged.has(words)).await;
        worker.stop().await;
        logged.0.lock().unwrap().clear();
    }
    secure.drain(TEST_WAIT_MAX).await;
    plain.drain(TEST_WAIT_MAX).await;
}
