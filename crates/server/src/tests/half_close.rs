//! Clients that close their sending side and wait, and clients that leave, whose first sign is the
//! same.

use super::*;
use crate::half_close::{COMMENT, INTERIM};
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::post;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, duplex};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Bytes of an answer that no socket's buffers take at once.
const LARGE: usize = 64 << 20;

/// The test's end of the handlers.
struct Handlers {
    routes: Router,
    go: Arc<Notify>,
    /// A unit for each handler or body that was dropped.
    dropped: UnboundedReceiver<()>,
    /// A sender of each event stream that has begun.
    streams: UnboundedReceiver<UnboundedSender<Bytes>>,
}

#[derive(Clone)]
struct HandlerState {
    go: Arc<Notify>,
    dropped: UnboundedSender<()>,
    streams: UnboundedSender<UnboundedSender<Bytes>>,
}

struct DropReporter(UnboundedSender<()>);

impl Drop for DropReporter {
    fn drop(&mut self) {
        // A test that has ended counts no more.
        let _ = self.0.send(());
    }
}

/// Reads the body, then waits.
async fn slow(State(work): State<HandlerState>, body: Bytes) -> String {
    let _running = DropReporter(work.dropped);
    work.go.notified().await;
    format!("{} bytes", body.len())
}

/// Waits, then reads the body.
async fn late(State(work): State<HandlerState>, body: Body) -> String {
    let _running = DropReporter(work.dropped);
    work.go.notified().await;
    let body = body.collect().await;
    body.map_or_else(
        |_| "broken".to_owned(),
        |b| format!("{} bytes", b.to_bytes().len()),
    )
}

/// An event stream whose events the test sends.
async fn events(State(work): State<HandlerState>) -> impl IntoResponse {
    let running = DropReporter(work.dropped);
    let (sender, mut receiver) = unbounded_channel::<Bytes>();
    work.streams.send(sender).unwrap();
    let events = stream::poll_fn(move |context| {
        let _running = &running;
        receiver
            .poll_recv(context)
            .map(|event| event.map(Ok::<_, io::Error>))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
    (headers, Body::from_stream(events))
}

fn handlers() -> Handlers {
    let go = Arc::new(Notify::new());
    let (dropped_sender, dropped) = unbounded_channel();
    let (streams_sender, streams) = unbounded_channel();
    let work = HandlerState {
        go: Arc::clone(&go),
        dropped: dropped_sender,
        streams: streams_sender,
    };
    let routes = Router::new()
        .route("/", get(async || "here"))
        .route("/slow", post(slow))
        .route("/late", post(late))
        .route("/events", get(events))
        .route("/large", get(async || vec![b'x'; LARGE]))
        .with_state(work);
    Handlers {
        routes,
        go,
        dropped,
        streams,
    }
}

impl Handlers {
    async fn dropped(&mut self) {
        let dropped = timeout(PATIENCE, self.dropped.recv()).await;
        dropped
            .expect("it ends in time")
            .expect("it reports its end");
    }

    async fn stream(&mut self) -> UnboundedSender<Bytes> {
        let stream = timeout(PATIENCE, self.streams.recv()).await;
        stream.expect("it begins in time").expect("a stream")
    }
}

fn start(listener: TcpListener, faces: PortRoutes) -> HttpServer {
    let series = Telemetry::default().servers.clone();
    HttpServer::start(listener, faces, limits(), series).unwrap()
}

async fn server(routes: &Router) -> HttpServer {
    start(
        bind("127.0.0.1:0").await.unwrap(),
        PortRoutes::clear(routes.clone()),
    )
}

async fn dial(server: &HttpServer) -> TcpStream {
    TcpStream::connect(server.address).await.unwrap()
}

async fn send_and_close(stream: &mut (impl AsyncWrite + Unpin), text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
}

async fn expect(stream: &mut (impl AsyncRead + Unpin), expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    let read = timeout(PATIENCE, stream.read_exact(&mut bytes)).await;
    read.expect("it is answered in time")
        .expect("the connection stands");
    assert_eq!(bytes.as_slice(), expected);
}

async fn rest(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut bytes = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await;
    read.expect("the server closes in time").unwrap();
    String::from_utf8(bytes).unwrap()
}

/// The headers of the answer, without interim responses.
async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap());
        if head == INTERIM {
            head.clear();
        }
    }
    String::from_utf8(head).unwrap()
}

const EVENTS: &str = "GET /events HTTP/1.1\r\nhost: x\r\n\r\n";

fn post_to(path: &str, rest: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\n{rest}")
}

/// The text without the interim responses that it begins with.
fn without_interims(mut text: &str) -> &str {
    let interim = std::str::from_utf8(INTERIM).unwrap();
    while let Some(after) = text.strip_prefix(interim) {
        text = after;
    }
    text
}

#[tokio::test]
async fn half_closed_clients_get_their_answers() {
    let handlers = handlers();
    let server = server(&handlers.routes).await;
    let bodies = [
        ("content-length: 0\r\n\r\n", 0),
        ("content-length: 5\r\n\r\nhello", 5),
        (
            "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n2\r\n..\r\n0\r\n\r\n",
            7,
        ),
    ];
    for path in ["/slow", "/late"] {
        for (body, len) in bodies {
            let mut stream = dial(&server).await;
            send_and_close(&mut stream, &post_to(path, body)).await;
            // The server sees the end, and asks again, once it has the whole body: of one in chunks
            // it reads no further than its handler does.
            if path == "/slow" || body.starts_with("content-length") {
                expect(&mut stream, INTERIM).await;
                expect(&mut stream, INTERIM).await;
            }
            handlers.go.notify_one();
            let answer = rest(&mut stream).await;
            let answer = without_interims(&answer);
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{path} {answer}");
            assert!(
                answer.ends_with(&format!("\r\n\r\n{len} bytes")),
                "{path} {answer}"
            );
        }
    }
}

#[tokio::test]
async fn a_half_closed_client_gets_all_events() {
    let mut handlers = handlers();
    let server = server(&handlers.routes).await;
    let mut stream = dial(&server).await;
    send_and_close(&mut stream, EVENTS).await;
    let events = handlers.stream().await;
    let answer = head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    expect(&mut stream, b"3\r\n:\n\n\r\n").await;
    for event in ["data: 1\n\n", "data: [DONE]\n\n"] {
        events.send(Bytes::from_static(event.as_bytes())).unwrap();
    }
    drop(events);
    let answer = rest(&mut stream).await;
    let end = "9\r\ndata: 1\n\n\r\nE\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    assert!(answer.ends_with(end), "{answer:?}");
}

#[tokio::test]
async fn a_large_answer_reaches_a_half_closed_client() {
    let handlers = handlers();
    let server = server(&handlers.routes).await;
    let mut stream = dial(&server).await;
    send_and_close(&mut stream, "GET /large HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let answer = rest(&mut stream).await;
    let (_, body) = without_interims(&answer).split_once("\r\n\r\n").unwrap();
    assert_eq!(body.len(), LARGE);
}

#[tokio::test]
async fn pipelined_requests_of_half_closed_clients_are_answered() {
    let handlers = handlers();
    let server = server(&handlers.routes).await;
    let mut stream = dial(&server).await;
    let first = std::str::from_utf8(GET).unwrap();
    let both = first.to_owned() + &post_to("/slow", "content-length: 2\r\n\r\nab");
    send_and_close(&mut stream, &both).await;
    let answer = head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    expect(&mut stream, b"here").await;
    expect(&mut stream, INTERIM).await;
    handlers.go.notify_one();
    let answer = rest(&mut stream).await;
    assert!(answer.ends_with("\r\n\r\n2 bytes"), "{answer}");
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request() {
    let mut handlers = handlers();
    let server = server(&handlers.routes).await;
    for path in ["/slow", "/late"] {
        let mut stream = dial(&server).await;
        let request = post_to(path, "content-length: 2\r\n\r\nab");
        stream.write_all(request.as_bytes()).await.unwrap();
        drop(stream);
        handlers.dropped().await;
    }
    // Nothing comes of the second one, so that only comments can tell.
    let mut stream = dial(&server).await;
    stream.write_all(EVENTS.as_bytes()).await.unwrap();
    let events = handlers.stream().await;
    head(&mut stream).await;
    drop(stream);
    handlers.dropped().await;
    assert!(events.is_closed());
}

#[tokio::test]
async fn a_fin_in_http_1_0_or_inside_a_body_ends_the_request() {
    let mut handlers = handlers();
    let server = server(&handlers.routes).await;
    let requests = [
        "POST /slow HTTP/1.0\r\ncontent-length: 2\r\n\r\nab".to_owned(),
        post_to("/slow", "content-length: 20\r\n\r\nab"),
        post_to("/slow", "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"),
    ];
    for request in requests {
        let mut stream = dial(&server).await;
        send_and_close(&mut stream, &request).await;
        let answer = rest(&mut stream).await;
        let answer = without_interims(&answer);
        // A handler may have the time to say that the body broke off.
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 400"),
            "{request} {answer}"
        );
        assert!(request.contains("1.1") || answer.is_empty(), "{answer}");
    }
    handlers.dropped().await;
    // A handler that asks for the body later finds it broken.
    let mut stream = dial(&server).await;
    send_and_close(
        &mut stream,
        &post_to("/late", "content-length: 20\r\n\r\nab"),
    )
    .await;
    handlers.go.notify_one();
    handlers.dropped().await;
    rest(&mut stream).await;
}

#[tokio::test]
async fn a_tls_client_that_sends_no_more_gets_its_answer() {
    let mut handlers = handlers();
    let (tls, certificate) = ServerTls::self_signed().unwrap();
    let faces = PortRoutes {
        clear: Router::new(),
        secure: Some((tls, handlers.routes.clone())),
        peers: None,
    };
    let server = start(bind("127.0.0.1:0").await.unwrap(), faces);
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(config));
    let request = post_to("/slow", "content-length: 2\r\n\r\nab");
    for reads_answer in [true, false] {
        let name = "localhost".try_into().unwrap();
        let dialled = dial(&server).await;
        let mut stream = connector.connect(name, dialled).await.unwrap();
        send_and_close(&mut stream, &request).await;
        expect(&mut stream, INTERIM).await;
        if reads_answer {
            handlers.go.notify_one();
            let answer = rest(&mut stream).await;
            assert!(answer.ends_with("\r\n\r\n2 bytes"), "{answer}");
        } else {
            drop(stream);
        }
        handlers.dropped().await;
    }
}

/// One connection without sockets, whose buffers hold `bytes`: a small one takes a write in parts.
fn serve_in_memory(routes: Router, bytes: usize) -> DuplexStream {
    let (client, end) = duplex(bytes);
    let (_, stopping) = channel::channel(false);
    let shared = HttpServerState {
        routes: Arc::new(PortRoutes::clear(routes.clone())),
        limits: limits(),
        series: Telemetry::default().servers.clone(),
        stopping,
        strangers_log: Arc::default(),
    };
    tokio::spawn(async move {
        let from = SocketAddr::from(([127, 0, 0, 1], 1));
        let _ended = shared.serve(end, from, &routes).await;
    });
    client
}

#[tokio::test(start_paused = true)]
async fn a_half_closed_client_is_probed_with_backoff() {
    let mut handlers = handlers();
    let mut stream = serve_in_memory(handlers.routes.clone(), 1 << 16);
    send_and_close(
        &mut stream,
        &post_to("/slow", "content-length: 2\r\n\r\nab"),
    )
    .await;
    let start = Instant::now();
    let mut waits = Vec::new();
    while waits.len() < 11 {
        expect(&mut stream, INTERIM).await;
        waits.push(start.elapsed().as_millis());
    }
    assert_eq!(
        waits,
        [0, 20, 60, 140, 300, 620, 1260, 2540, 5100, 10_100, 15_100]
    );
    // One that has left is noticed at the next.
    drop(stream);
    handlers.dropped().await;
    assert!(start.elapsed() <= Duration::from_millis(20_101));
}

#[tokio::test(start_paused = true)]
async fn an_interim_response_is_whole_before_the_answer() {
    let handlers = handlers();
    let mut stream = serve_in_memory(handlers.routes.clone(), 7);
    send_and_close(
        &mut stream,
        &post_to("/slow", "content-length: 2\r\n\r\nab"),
    )
    .await;
    // Some of the first is in the buffer, and the rest has no room until after the answer is there.
    expect(&mut stream, &INTERIM[..1]).await;
    handlers.go.notify_one();
    let answer = char::from(INTERIM[0]).to_string() + &rest(&mut stream).await;
    let answer = without_interims(&answer);
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\n2 bytes"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn sse_comments_to_half_closed_clients_back_off() {
    let mut handlers = handlers();
    let mut stream = serve_in_memory(handlers.routes.clone(), 1 << 16);
    send_and_close(&mut stream, EVENTS).await;
    let _events = handlers.stream().await;
    head(&mut stream).await;
    let start = Instant::now();
    let chunk = [b"3\r\n", COMMENT, b"\r\n"].concat();
    let mut waits = Vec::new();
    while waits.len() < 4 {
        expect(&mut stream, &chunk).await;
        waits.push(start.elapsed().as_millis());
    }
    assert_eq!(waits, [0, 20, 60, 140]);
}

#[tokio::test(start_paused = true)]
async fn no_comment_breaks_an_event() {
    let mut handlers = handlers();
    let mut stream = serve_in_memory(handlers.routes.clone(), 1 << 16);
    send_and_close(&mut stream, EVENTS).await;
    let events = handlers.stream().await;
    head(&mut stream).await;
    expect(&mut stream, b"3\r\n:\n\n\r\n").await;
    events.send(Bytes::from_static(b"data: ")).unwrap();
    expect(&mut stream, b"6\r\ndata: \r\n").await;
    let more = timeout(PATIENCE, stream.read_u8()).await;
    assert!(more.is_err(), "{more:?}");
    events.send(Bytes::from_static(b"1\n\n")).unwrap();
    expect(&mut stream, b"3\r\n1\n\n\r\n3\r\n:\n\n\r\n").await;
    drop(events);
    expect(&mut stream, b"0\r\n\r\n").await;
}
