//! Hubs behind a proxy and behind TLS, and hubs that nobody can reach.

use super::{Pair, refusal_text};
use cleave_hub::{HubError, ProxySettings, ProxyVariable};
use cleave_test_hub::MODEL;
use cleave_tls::rustls::{ServerConnection, StreamOwned};
use cleave_tls::{CertificateFiles, ServerTls};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

/// A proxy that takes every connection to one address, and keeps the heads of the requests.
struct TestProxy {
    address: String,
    heads: Arc<Mutex<Vec<String>>>,
}

impl TestProxy {
    fn start(target: String) -> Self {
        let heads = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&heads);
        let address = listen(move |client| {
            let mut reader = BufReader::new(client.try_clone().unwrap());
            let head = read_head(&mut reader);
            kept.lock().unwrap().push(head.clone());
            let mut server = TcpStream::connect(&target).unwrap();
            if head.starts_with("CONNECT ") {
                (&client).write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            } else {
                let (line, rest) = head.split_once("\r\n").unwrap();
                let path = line.replacen("http://hub.invalid", "", 1);
                write!(server, "{path}\r\n{rest}").unwrap();
            }
            let (mut back, mut to_client) = (server.try_clone().unwrap(), client);
            let answers = thread::spawn(move || {
                let _ = std::io::copy(&mut back, &mut to_client);
                let _ = to_client.shutdown(Shutdown::Both);
            });
            let _ = std::io::copy(&mut reader, &mut server);
            let _ = server.shutdown(Shutdown::Write);
            answers.join().unwrap();
        });
        Self { address, heads }
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

/// Serves each connection on a thread of its own; returns the address.
fn listen(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let serve = Arc::clone(&serve);
            thread::spawn(move || serve(client));
        }
    });
    address
}

fn read_head(reader: &mut impl BufRead) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).unwrap() > 0, "cut: {head}");
    }
    head
}

/// Puts TLS before a server that closes after each answer; returns the address.
fn with_tls(target: String, folder: &Path) -> String {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let files = CertificateFiles {
        certificate: folder.join("authority.pem"),
        key: folder.join("key.pem"),
    };
    std::fs::write(&files.certificate, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    let tls = ServerTls::open(&files).unwrap();
    listen(move |client| {
        let connection = ServerConnection::new(tls.config()).unwrap();
        let mut client = StreamOwned::new(connection, client);
        let mut reader = BufReader::new(&mut client);
        let mut line = String::new();
        // A client without trust in the certificate leaves.
        if reader.read_line(&mut line).is_err() {
            return;
        }
        let head = line + &read_head(&mut reader);
        let mut server = TcpStream::connect(&target).unwrap();
        server.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        server.read_to_end(&mut answer).unwrap();
        client.write_all(&answer).unwrap();
        client.conn.send_close_notify();
        client.flush().unwrap();
    })
}

fn variable(name: &str, address: &str) -> ProxyVariable {
    ProxyVariable {
        name: name.to_owned(),
        address: address.to_owned(),
    }
}

fn with_password(proxy: &TestProxy) -> String {
    format!("http://user:pass@{}", proxy.address)
}

fn host(pair: &Pair) -> String {
    pair.hub.endpoint().replacen("http://", "", 1)
}

#[test]
fn a_proxy_forwards_requests_to_a_hub_of_http() {
    let mut pair = Pair::new();
    let proxy = TestProxy::start(host(&pair));
    pair.settings.endpoint = "http://hub.invalid".to_owned();
    pair.settings.proxies.http = variable("HTTP_PROXY", &with_password(&proxy));
    pair.pull_whole();
    for head in proxy.heads() {
        assert!(head.starts_with("GET http://hub.invalid/"), "{head}");
        assert!(
            head.contains("proxy-authorization: Basic dXNlcjpwYXNz"),
            "{head}"
        );
    }
}

#[test]
fn a_hub_of_https_is_asked_through_a_tunnel() {
    let mut pair = Pair::new();
    let secure = with_tls(host(&pair), pair.cache.path());
    let proxy = TestProxy::start(secure);
    pair.settings.endpoint = "https://localhost:4430".to_owned();
    pair.settings.authorities = Some(pair.cache.path().join("authority.pem"));
    pair.settings.proxies.all = variable("ALL_PROXY", &with_password(&proxy));
    pair.pull_whole();
    for head in proxy.heads() {
        assert!(head.starts_with("CONNECT localhost:4430 "), "{head}");
        assert!(
            !head.contains("Bearer"),
            "the proxy must not see the token: {head}"
        );
    }
    let tokens = pair.hub.requests("blobs=true").remove(0).authorization;
    assert_eq!(tokens.as_deref(), Some("Bearer secret"));
}

#[test]
fn a_certificate_of_an_unknown_authority_is_refused() {
    let mut pair = Pair::new();
    let secure = with_tls(host(&pair), pair.cache.path());
    let port = secure.rsplit(':').next().unwrap();
    pair.settings.endpoint = format!("https://localhost:{port}");
    pair.settings.authorities = Some(pair.cache.path().join("authority.pem"));
    pair.pull_whole();
    // Another authority of the same name.
    let other = tempfile::tempdir().unwrap();
    with_tls(host(&pair), other.path());
    pair.settings.authorities = Some(other.path().join("authority.pem"));
    let text = refusal_text(&pair, "cannot be reached");
    assert!(text.contains("certificate"), "{text}");
    assert_eq!(pair.hub.requests("blobs=true").len(), 1);
}

#[test]
fn hosts_of_no_proxy_are_asked_directly() {
    let mut pair = Pair::new();
    pair.settings.proxies = ProxySettings {
        all: variable("ALL_PROXY", "http://127.0.0.1:1"),
        none: "10.0.0.0/8, 127.0.0.0/8".to_owned(),
        ..ProxySettings::default()
    };
    pair.pull_whole();
}

#[test]
fn an_unreachable_hub_is_named_after_few_tries() {
    let mut pair = Pair::new();
    pair.settings.endpoint = "http://127.0.0.1:1".to_owned();
    let text = refusal_text(&pair, "http://127.0.0.1:1 cannot be reached");
    assert!(text.contains("tried 2 times"), "{text}");
    assert!(text.contains("check the network and HF_ENDPOINT"), "{text}");
}

#[test]
fn a_dead_proxy_is_named_with_its_port_and_variable() {
    let mut pair = Pair::new();
    pair.settings.authorities = Some(pair.cache.path().join("authority.pem"));
    with_tls(host(&pair), pair.cache.path());
    let dead = "http://user:secret@127.0.0.1:1";
    for (endpoint, name) in [
        ("http://hub.invalid", "http_proxy"),
        ("https://hub.invalid", "HTTPS_PROXY"),
        ("https://hub.invalid", "ALL_PROXY"),
    ] {
        pair.settings.endpoint = endpoint.to_owned();
        let variable = variable(name, dead);
        pair.settings.proxies = match name {
            "http_proxy" => ProxySettings {
                http: variable,
                ..ProxySettings::default()
            },
            "HTTPS_PROXY" => ProxySettings {
                https: variable,
                ..ProxySettings::default()
            },
            _ => ProxySettings {
                all: variable,
                ..ProxySettings::default()
            },
        };
        let text = refusal_text(&pair, &format!("through the proxy 127.0.0.1:1 of {name}: "));
        assert!(text.contains(&format!("check {name}, or")), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn a_proxy_of_another_kind_is_refused_with_its_variable() {
    let mut pair = Pair::new();
    pair.settings.proxies.http = variable("HTTP_PROXY", "socks5://127.0.0.1:1");
    let error = pair.pull(MODEL).unwrap_err();
    assert!(matches!(&error, HubError::Proxy { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("socks5://") && text.contains("HTTP_PROXY"),
        "{text}"
    );
}
